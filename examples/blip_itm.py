# %% [markdown]
"""# What did BLIP look at, word by word?

This notebook walks through one model family: BLIP with an image-text matching (ITM) head. It runs on a CPU in a minute
and downloads nothing: the model `tiny-blip-itm` and the pictures come with the package. The last section does the same
with released weights, if you switch it on.

It needs the extra `plot`: `pip install 'vlcam[plot]'`.
"""

# %%
# %matplotlib inline

import io
import random
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import PIL.Image
import torch
from IPython.display import Image, display_png
from matplotlib.figure import Figure

import vlcam
from vlcam import scenes
from vlcam.provenance import versions

random.seed(0)
np.random.seed(0)  # noqa: NPY002
torch.manual_seed(0)
print("  ".join(f"{name} {number}" for name, number in versions().items()))

# %% [markdown]
"""
Seeds are set by habit. Nothing below draws random numbers: a scene depends on its seed alone, and an explanation on its
recipe and its inputs alone.

## A scene whose answer is known

An explanation can be checked only against an answer. `vlcam.scenes` draws coloured shapes with a true caption, and
knows which pixels each phrase stands for.
"""


# %%
def show(picture: PIL.Image.Image) -> Image:
    """A PIL image at twice its size."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return Image(buffer.getvalue(), width=2 * picture.width)


scene = next(scenes.generate(1, seed=11, start=18, objects=(2, 3)))
for item in scene.objects:
    print(f"{item.phrase:<16} characters {item.span}, box {item.box}, {int(item.mask.sum())} pixels")
print(scene.caption)
show(scene.image)

# %% [markdown]
"""
## The model and its scores

`vlcam.load` takes the name of an embedded model, a folder, or the name of a checkpoint on the hub. `vlcam.wrap` takes a
model that you have loaded yourself.

A matching model gives one image and one text several numbers. vlcam returns all of them, each with its kind. A cosine
is never called a probability: the ITM head and the contrastive projections answer different questions.
"""

# %%
model = vlcam.load("tiny-blip-itm")
for score in model.scores(scene.image, scene.caption).values():
    print(score)

# %% [markdown]
"""
`anatomy` shows which tensors can be read, and where. A *stream* is a stack of blocks. A *site* is a tensor inside a
block; `CROSS` is the attention of the text tokens on the image tokens.
"""

# %%
print(model.anatomy)

# %% [markdown]
"""
## A phrase

Without further words, `explain` uses the recipe `lavis-itm`, the rule of LAVIS' `compute_gradcam`: attention times the
positive part of the gradient of the match logit, averaged over heads, then over the rows of the words.
With `phrase=` the average goes over the rows of that phrase.
"""

# %%
phrase = scene.objects[0].phrase
exp = model.explain(scene.image, scene.caption, phrase=phrase)
x, y = exp.peak()
hit = bool(scene.objects[0].mask[int(y), int(x)])
print(f"highest point of {phrase!r}: x = {x:.0f}, y = {y:.0f}; on the object: {hit}")
show(exp.overlay())

# %% [markdown]
"""
Every choice that led to this picture is in the explanation, with the values that were filled in: the block, and the
sentence that says how the published block was carried over to a model of another depth.
"""

# %%
print(vlcam.describe(exp.recipe))
print()
print("blocks", exp.provenance["run"]["layers"], "-", exp.provenance["run"]["fitted"]["layers"])

# %% [markdown]
"""
## Every word

The same pass holds a map for every word of the text. Words are the user's words: `purple` is one word, although the
tokenizer splits it. A word that occurs again is `word#2`. [ENC] and [SEP] have no map.

The figure shows all of them on one colour scale, with numbers, so that a weak map looks weak. A word whose map is zero
everywhere has a `status` that says why; drawing it alone would be an error.
"""

# %%
print(list(exp.words))
figure = exp.figure()
figure.set_dpi(60)
display_png(figure)

# %%
text = exp.provenance["text"]
print([piece for piece, special in zip(text["pieces"], text["special"], strict=True) if not special])
word = max(exp.words, key=lambda name: exp.words[name].tokens.max())
print("the strongest word:", word)
show(exp.words[word].overlay())

# %% [markdown]
"""
## Which layer?

The layer is a choice, and it changes the picture. A sweep asks for every block in turn.
"""

# %%
depth = len(model.anatomy.stream("fusion").blocks)
by_layer = {}
for layer in range(depth):
    try:
        by_layer[f"block {layer}"] = model.explain(scene.image, scene.caption, phrase=phrase, layer=layer)
    except vlcam.EvidenceError as error:
        print(f"block {layer}: {error}")

# %% [markdown]
"""
Read the message. The ITM head reads the first token of the last block, and nothing else of it. In that block the other
rows of the attention lead nowhere: their gradient is exactly zero. Many tools stretch such zeros into a picture. Here
it is an error, and it names the blocks that have a gradient.

The blocks that do have one, on one raw scale:
"""


# %%
def side_by_side(maps: Mapping[str, np.ndarray], title: str, largest: float) -> Figure:
    """Token maps [h, w] on one colour scale from -largest to largest, or from 0 where none is negative."""
    signed = any((values < 0).any() for values in maps.values())
    figure = Figure(figsize=(2.2 * len(maps) + 1.2, 2.7), layout="constrained")
    axes = np.atleast_1d(figure.subplots(1, len(maps)))
    for ax, (name, values) in zip(axes, maps.items(), strict=True):
        drawn = ax.imshow(
            values, cmap="coolwarm" if signed else "inferno", vmin=-largest if signed else 0, vmax=largest
        )
        ax.set_title(name, fontsize=8)
        ax.set_axis_off()
    figure.colorbar(drawn, ax=list(axes), shrink=0.8)
    figure.suptitle(title, fontsize=9)
    return figure


raw = {name: found.tokens for name, found in by_layer.items()}
side_by_side(raw, f"lavis-itm, {phrase!r}, raw values", max(float(abs(v).max()) for v in raw.values()))

# %% [markdown]
"""
`sweep` does the same for any list of recipes in as few passes as possible. It wants recipes that have a map; the
benchmark in `docs/pointing.md` tries every block.

## Which recipe?

"Grad-CAM of BLIP" can mean each of these. `vlcam.formula` prints what is computed.
"""

# %%
choices = {
    "lavis-itm": model.explain(scene.image, scene.caption, "lavis-itm"),
    "attention-cross": model.explain(scene.image, scene.caption, "attention-cross"),
    "signed": model.explain(scene.image, scene.caption, "lavis-itm", relu="none", name="signed"),
    "context-gradcam": model.explain(scene.image, scene.caption, "context-gradcam"),
    "pgc-gradcam": model.explain(scene.image, scene.caption, "pgc-gradcam"),
}
for name, found in choices.items():
    print(f"{name}  {found.recipe.fingerprint}  status: {found.status}")
    print(vlcam.formula(found.recipe))
    print()

# %% [markdown]
"""
The five have different units, so their raw values cannot share a scale. Each map is divided by its own largest
magnitude; then all are drawn between -1 and 1. The sign survives: blue is evidence against a match, where the recipe
keeps it.
"""

# %%
shares = {name: found.tokens / (abs(found.tokens).max() or 1) for name, found in choices.items()}
side_by_side(shares, "whole text, share of each map's largest magnitude", 1.0)

# %% [markdown]
"""
`attention-cross` takes no gradient: it is the same map for "match" and for "no match". `context-gradcam` and
`pgc-gradcam` read image tokens, which carry no text rows. They give one map for the whole text, and say so when they
are asked for a word:
"""

# %%
try:
    choices["pgc-gradcam"].words[word]
except vlcam.UnknownNameError as error:
    print(error)

# %% [markdown]
"""
## [ENC] or [CLS]?

The original BLIP opens a text that is matched with an image by a token of its own, [ENC]. The forward of the
transformers class feeds [CLS] instead. The weights were trained with [ENC], so vlcam feeds [ENC].
`first_token="cls"` gives the other one, to explain exactly what the transformers forward computes.
The choice is on record. The cosine does not change: the contrastive pass uses [CLS] in both.
"""

# %%
with_cls = vlcam.load("tiny-blip-itm", first_token="cls")
other = with_cls.explain(scene.image, scene.caption, phrase=phrase)
for name, score in exp.scores.items():
    print(f"{name:<20} [ENC] {score.value:9.4f}   [CLS] {other.scores[name].value:9.4f}")
print(other.provenance["model"]["options"], other.provenance["text"]["pieces"][:2])
print("largest difference of the two maps:", abs(exp.tokens - other.tokens).max())

# %% [markdown]
"""
## Logit, probability, margin

The target is the scalar whose gradient is taken. On which scale it is read is a choice too.
The gradient of the probability p is p (1 - p) times the gradient of the margin between the two logits, and that of the
log-probability is (1 - p) times it. So the three give one picture with three strengths, and the probability's map fades
where the model is sure. The match logit alone is another scalar and gives another map.
"""

# %%
scales = {
    scale: model.explain(scene.image, scene.caption, phrase=phrase, scale=scale)
    for scale in ("logit", "margin", "log-probability", "probability")
}
p = scales["margin"].scores["itm_probability"].value
margin = scales["margin"].tokens.max()
print(f"p = {p:.4f}   1 - p = {1 - p:.4f}   p (1 - p) = {p * (1 - p):.4f}")
for scale, found in scales.items():
    print(f"{scale:<16} largest value {found.tokens.max():.6f}   of the margin's: {found.tokens.max() / margin:.4f}")
pictures = {scale: found.tokens / (abs(found.tokens).max() or 1) for scale, found in scales.items()}
side_by_side(pictures, f"{phrase!r}, each by its own maximum", 1.0)

# %% [markdown]
"""
## ITM against ITC

The contrastive score is another head with another path. It never runs cross-attention: the vision tower's class token
is projected and compared with the text. So its maps come from the vision tower, and they need not agree with those of
the matching head. `albef-itc` weights the class token's attention by the gradient of the cosine.
"""

# %%
heads = {
    "itm": model.explain(scene.image, phrase, "lavis-itm"),
    "itc": model.explain(scene.image, phrase, "albef-itc", layer="last"),
    "itc, grad-eclip": model.explain(scene.image, phrase, "grad-eclip"),
}
for name, found in heads.items():
    run = found.provenance["run"]
    print(f"{name:<16} {run['target']:<20} {run['stream']} block {run['layers']}   status: {found.status}")
parts = {name: found.tokens / (abs(found.tokens).max() or 1) for name, found in heads.items()}
side_by_side(parts, f"{phrase!r}, each by its own maximum", 1.0)

# %% [markdown]
"""
## A false caption

`scenes.mismatch` changes one phrase so that the caption is false. The scores should fall. For each phrase the table
shows the sum of its raw map under both captions, and how much of that sum lies on the pixels of the object that stands
in its place. Raw values of one recipe, block and target can be compared; normalised ones cannot.
"""

# %%
false, wrong = scenes.mismatch(scene, "object")
print("true: ", scene.caption)
print("false:", false.text)
before, after = model.scores(scene.image, [scene.caption, false.text])
for name in ("itm_probability", "itm_margin", "contrastive_cosine"):
    print(f"{name:<20} true {before[name].value:9.4f}   false {after[name].value:9.4f}")


# %%
def evidence(caption: str, phrase: str, mask: np.ndarray) -> tuple[float, float]:
    """The sum of a phrase's raw map, and the share of it in cells whose centre lies on the mask."""
    tokens = model.explain(scene.image, caption, phrase=phrase, scale="margin").tokens
    rows, columns = tokens.shape
    centres = np.ix_(
        ((np.arange(rows) + 0.5) / rows * mask.shape[0]).astype(int),
        ((np.arange(columns) + 0.5) / columns * mask.shape[1]).astype(int),
    )
    total = float(tokens.sum())
    return total, float(tokens[mask[centres]].sum()) / total if total else 0.0


print(f"{'true caption':<18}{'sum':>8}{'on object':>11}   {'false caption':<18}{'sum':>8}{'on object':>11}")
for number, (item, other_phrase) in enumerate(zip(scene.objects, false.phrases, strict=True)):
    total, share = evidence(scene.caption, item.phrase, item.mask)
    new_total, new_share = evidence(false.text, other_phrase, item.mask)
    line = f"{item.phrase:<18}{total:>8.4f}{share:>11.2f}   {other_phrase:<18}{new_total:>8.4f}{new_share:>11.2f}"
    print(line, "<- false" if number == wrong else "")

# %% [markdown]
"""
Two things to keep in mind. A map of a false phrase is still a map: it says where the score would react, not that the
phrase is true. And the phrases of one caption share one score, so a false phrase can also change the maps of the true
ones.

## Save, open, verify

`save` writes one PNG. Any viewer shows the overlay. Inside are the raw map, the recipe, the record and the image.
`verify` computes the map again and compares.
"""

# %%
with tempfile.TemporaryDirectory() as folder:
    path = exp.save(Path(folder) / "where.png")
    again = vlcam.open(path)
    print(again.recipe == exp.recipe, bool((again.tokens == exp.tokens).all()))
    print(again.verify(model))
    print(again.verify(with_cls))

# %% [markdown]
"""
The second check used the model that opens the text with [CLS]. The list says what differs.

## Released weights (optional)

Set `USE_REAL_WEIGHTS = True` to do the same with BLIP base fine-tuned on COCO. It downloads the checkpoint from the
hub on first use, and takes some seconds per text on a CPU. Put your own photo and words in.
The published block 6 of 12 is used as it is.
"""

# %%
USE_REAL_WEIGHTS = False
PHOTO: str | None = None  # a path to an image of yours
TEXT, WORDS = scene.caption, phrase

if USE_REAL_WEIGHTS:
    blip = vlcam.load("Salesforce/blip-itm-base-coco")
    real = blip.explain(PHOTO or scene.image, TEXT, phrase=WORDS)
    print(real.provenance["run"]["fitted"]["layers"])
    display_png(real.figure())

# %% [markdown]
"""
## Limits, in plain words

- A map is evidence for one score of one model. It is not a segmentation of the object, and a box around it is a box
  from a thresholded map.
- It is not a cause. To know whether a region decides, change the region and look at the score.
- The map depends on the recipe. Report the recipe with the picture; the saved file does.
- Normalised maps hide strength: the highest cell is 1 even where there is next to no evidence. Compare raw values, and
  only under one recipe, block and target.
- `tiny-blip-itm` is a toy. It was trained with a loss on every patch and with a loss that rewards words for looking at
  their object, so its maps point better than those of a model that nobody helped. Its card says how it was made:
  `vlcam.models()["tiny-blip-itm"].card`.
- Scenes are not photographs. What holds here need not hold there.
"""
