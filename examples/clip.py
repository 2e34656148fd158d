# %% [markdown]
"""# What did CLIP look at, and which words did it read?

CLIP has two towers. One turns an image into a vector, the other a text, and the score is the cosine of the two. No
token of the text ever attends to the image, so there is no cross-attention to draw. What there is: the gradient of the
score, through either tower. This notebook makes maps over the image and over the words, asks ten prompts at once, and
shows what goes wrong with one prompt and a softmax.

It runs on a CPU in a minute and downloads nothing: the model `tiny-clip` and the pictures come with the package. It
needs the extras `plot` and `open_clip`: `pip install 'vlcam[plot,open_clip]'`.
"""

# %%
# %matplotlib inline

import io
import tempfile
from pathlib import Path

import numpy as np
import open_clip
import PIL.Image
from IPython.display import Image, display_png
from transformers import CLIPProcessor

import vlcam
from vlcam import scenes
from vlcam.images import open_image
from vlcam.provenance import versions
from vlcam_adapters.clip_weights import open_clip_twin

print("  ".join(f"{name} {number}" for name, number in versions("open_clip").items()))

# %% [markdown]
"""
## A scene whose answer is known

`vlcam.scenes` draws coloured shapes with a true caption, and knows which pixels each phrase stands for.
"""


# %%
def show(picture: PIL.Image.Image, width: int | None = None) -> Image:
    """A PIL image at twice its size, or of some width."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return Image(buffer.getvalue(), width=width or 2 * picture.width)


scene = next(scenes.generate(1, seed=11, start=18, objects=(2, 3)))
print(scene.caption)
show(scene.image)

# %% [markdown]
"""
## A contrastive score, explained

The default recipe of a CLIP is `clip-gradcam`: Grad-CAM on the input of the last block's attention, for the scaled
cosine of image and text. Every choice behind the map travels with it.
"""

# %%
model = vlcam.load("tiny-clip")
first, second = (item.phrase for item in scene.objects[:2])
exp = model.explain(scene.image, first)
for score in exp.scores.values():
    print(score)
print(vlcam.describe(exp.recipe))
show(exp.overlay())

# %% [markdown]
"""
The anatomy says which tensors can be read. The class token alone is read at the end, so behind the attention of the
last block patches have no gradient. A recipe that looks there is refused, with advice; it is not drawn as an empty map.
"""

# %%
print(model.anatomy)
try:
    model.explain(scene.image, first, site="F6")
except vlcam.EvidenceError as error:
    print(error)

# %% [markdown]
"""
## Ten prompts at once

A list of texts shares one run of the image tower, and each distinct text is encoded once. What that saves is measured
in `docs/costs_clip.md`.
"""

# %%
colours, shapes = ("red", "blue", "green", "yellow", "purple"), ("circle", "square")
others = [f"{colour} {shape}" for colour in colours for shape in shapes if f"{colour} {shape}" not in (first, second)]
prompts = [first, second, *others][:10]
ten = model.explain(scene.image, prompts)
for found in sorted(ten, key=lambda found: -found.scores["contrastive_cosine"].value):
    cosine, share = (found.scores[f"contrastive_{name}"] for name in ("cosine", "probability"))
    where = found.status
    if where == "ok":
        x, y = found.peak()
        where = next((f"peak on {item.phrase}" for item in scene.objects if item.mask[y, x]), "peak on the background")
    print(f"{found.text:<16} cosine {cosine.value:6.3f}   {share.kind}: {share.value:.3f}   {where}")

# %%
figure = vlcam.gallery([found for found in ten if found.status == "ok"][:6])
figure.set_dpi(70)
display_png(figure)

# %% [markdown]
"""
A prompt that names nothing in the scene has a map too, or none with anything positive in it: a map shows where the
cosine would rise. Look at the score before you look at the map.

## On which scale?

- `cosine` and `logit`: the text alone. They differ by a factor, so their maps are the same after scaling.
- `probability`, `log-probability`: the softmax over the texts of the call, or over those in `against`.
- `margin`: against the best of the others. `difference`: the cosine less the mean cosine of the others, which with one
  other text is text minus text.

The map of a comparison depends on what is compared. Here is what tells the two phrases of the scene apart.
"""

# %%
contrast = model.explain(scene.image, first, against=[second], scale="difference", relu="none")
print(contrast.provenance["run"]["target"], "against", contrast.provenance["run"]["against"])
show(contrast.overlay())

# %% [markdown]
"""
## One prompt and a softmax

A softmax over a single prompt is 1 for every image. Its gradient is zero, and a tool that rescales what it gets then
draws rounding noise. vlcam refuses, and says what to do.
"""

# %%
try:
    model.explain(scene.image, first, "pgc-clip-softmax")
except vlcam.RecipeError as error:
    print(error)

# %% [markdown]
"""
## The other tower: which words?

With a recipe of the stream `text` the map is over the words. `word_scores` adds up the pieces of each word. The tokens
for start and end are no words and are reported apart; the record names the position from which the text was read.
"""

# %%
caption = scene.caption
words = model.explain(scene.image, caption, "chefer-clip-text")
for word in words.word_scores:
    print(f"{word.word:<10} tokens {word.rows}   {word.score:.4f}")
print("apart:", {name: round(value, 4) for name, value in words.provenance["run"]["apart"].items()})
print("read from:", words.provenance["run"]["pooled"])
show(words.overlay(), width=700)

# %% [markdown]
"""
## A phrase of a caption

CLIP reads a caption as a whole. There are two honest ways to ask for a part of it, and the recipe says which was used:

- `prompt="phrase"`: the phrase is encoded alone, as a prompt of its own.
- `prompt="in_place"`: the caption is encoded with all other words hidden from the text tower's attention. The phrase
  keeps its place and its neighbours are gone.
"""

# %%
for prompt in ("phrase", "in_place"):
    found = model.explain(scene.image, caption, phrase=second, prompt=prompt)
    x, y = found.peak()
    hit = bool(scene.objects[1].mask[y, x])
    print(f"{prompt:<10} target {found.provenance['run']['target_value']:.3f}   peak on the object: {hit}")
show(found.overlay())

# %% [markdown]
"""
## Published recipes, side by side

Everything that fits the model, from as few passes as possible. `-as-coded` recipes run the last block with one head, as
the authors' code does: what they explain is another function, and the record says so.
"""

# %%
names = ("clip-gradcam", "grad-eclip", "grad-eclip-as-coded", "chefer-clip", "legrad", "maskclip", "clip-surgery")
figure = vlcam.gallery(model.sweep(scene.image, first, names, against=[second, "background"]))
figure.set_dpi(70)
display_png(figure)

# %% [markdown]
"""
## Hugging Face and open_clip

The same weights in the classes of either library give the same scores and the same maps, at every site.
"""

# %%
module = model.adapter.module
processor = CLIPProcessor.from_pretrained(vlcam.models()["tiny-clip"].folder, backend="pil")
own = processor.image_processor
preprocess = open_clip.image_transform(
    module.config.vision_config.image_size,
    is_train=False,
    mean=tuple(own.image_mean),
    std=tuple(own.image_std),
    resize_mode="squash",
)
twin = vlcam.wrap(open_clip_twin(module), (preprocess, processor.tokenizer))

pixels = model.adapter.prepare_images([open_image(scene.image)]).pixel_values[0]
for name in names:
    ours, theirs = (each.explain(pixels, first, name, against=[second, "background"]) for each in (model, twin))
    gap = np.abs(ours.tokens - theirs.tokens).max() / np.abs(ours.tokens).max()
    print(f"{name:<20} largest difference {gap:.1e} of the map's largest value")

# %% [markdown]
"""
A model of your own is wrapped the same way, `vlcam.wrap(model, processor)`: a `CLIPProcessor` for transformers, the
pair of validation transform and tokenizer for open_clip. SigLIP and CoCa are in `docs/clip.md`.

## Save, open, verify
"""

# %%
with tempfile.TemporaryDirectory() as folder:
    path = contrast.save(Path(folder) / "contrast.png")
    print(vlcam.open(path).verify(model))
    path = words.save(Path(folder) / "words.png")
    print(vlcam.open(path).verify(model))

# %% [markdown]
"""
## Released weights (optional)

Set `USE_REAL_WEIGHTS = True` to do the same with OpenAI's ViT-B/32. It downloads the checkpoint on first use.
"""

# %%
USE_REAL_WEIGHTS = False
PHOTO: str | None = None  # a path to an image of yours
TEXTS = ["a photo of a cat", "a photo of a dog"]

if USE_REAL_WEIGHTS:
    clip = vlcam.load("openai/clip-vit-base-patch32")
    for found in clip.explain(PHOTO or scene.image, TEXTS):
        print(found.subject, {name: round(score.value, 4) for name, score in found.scores.items()})
        display_png(found.figure())

# %% [markdown]
"""
## Limits, in plain words

- A map says where the score of this text would change. It is no segmentation, and no proof that the text is true.
- CLIP often sees what a caption mentions and not how the words belong together. A map of a whole caption is a map of
  all of it at once.
- The map depends on the recipe, and for comparisons on the other texts. Report both; the saved file does.
- `tiny-clip` is a toy, trained with losses that reward looking at the named object, so its maps point better than those
  of a model that nobody helped: `vlcam.models()["tiny-clip"].card`.
"""
