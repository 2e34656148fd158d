# %% [markdown]
"""# Where is each phrase of a caption?

Grounding asks for every phrase of a caption at once: a map, its highest point, a box, a score. This notebook does it
with two kinds of model. BLIP reads the whole caption and its words look at the image; CLIP gets every phrase as a
prompt of its own. It runs on a CPU in a minute and downloads nothing. It needs the extra `plot`:
`pip install 'vlcam[plot]'`.
"""

# %%
# %matplotlib inline

import io
import json

import PIL.Image
from IPython.display import Image, display_png

import vlcam
from vlcam import scenes
from vlcam.provenance import versions

print("  ".join(f"{name} {number}" for name, number in versions().items()))

# %% [markdown]
"""
## A scene whose answer is known
"""


# %%
def show(picture: PIL.Image.Image) -> Image:
    """A PIL image, two to three times as large as a scene."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return Image(buffer.getvalue(), width=360)


scene = next(scenes.generate(1, seed=11, start=18, objects=(2, 3)))
print(scene.caption)
for item in scene.objects:
    print(f"{item.phrase:<16} box {item.box}")
show(scene.image)

# %% [markdown]
"""
## Every phrase, from one pass

Without a list of phrases they are found by a simple rule: runs of words between prepositions, conjunctions and the
like. The rule and its lists are in `docs/grounding.md`. All phrases share one forward and one backward pass of BLIP.
"""

# %%
blip = vlcam.load("tiny-blip-itm")
found = blip.ground(scene.image, scene.caption)
for part in found:
    print(f"{part.phrase:<18} characters {part.span}   peak {part.peak}   box {part.box}   score {part.score:.4f}")
figure = found.figure()
figure.set_dpi(80)
display_png(figure)

# %% [markdown]
"""
A box is made by a stated rule: the pixels of the heatmap from a share of its maximum on, of these the largest connected
component, of that the smallest rectangle. The share is a choice, and the box depends on it. `vlcam.iou` compares a box
with the true one.
"""

# %%
for threshold in (0.3, 0.5, 0.7):
    boxes = [part.box for part in blip.ground(scene.image, scene.caption, threshold=threshold)]
    overlaps = [vlcam.iou(box, item.box) for box, item in zip(boxes, scene.objects, strict=True) if box is not None]
    print(f"threshold {threshold}: IoU with the true boxes", [round(value, 2) for value in overlaps])

# %% [markdown]
"""
Products of attention and gradient have narrow peaks, so a low threshold fits them better than a high one. How recipes,
blocks and thresholds do on 200 scenes is measured in `docs/grounding_table.md`.

## Phrases of your own

A phrase may stand twice, be written in capitals, or with other blanks. It is found in the text as typed, and the record
keeps its characters. A phrase that is not in the text is an error.
"""

# %%
twice = f"{scene.caption}, and again a {scene.objects[0].phrase.upper()}"
for part in blip.ground(scene.image, twice, phrases=[scene.objects[0].phrase]):
    print(f"{part.phrase!r} at characters {part.span}: box {part.box}")
try:
    blip.ground(scene.image, scene.caption, phrases=["green dog"])
except vlcam.InputError as error:
    print(error)

# %% [markdown]
"""
## The same with CLIP

A contrastive score has no rows of words. Every phrase is encoded alone, while the image runs once; with
`prompt="in_place"` it is encoded in its caption with the other words hidden. The record says which.
"""

# %%
clip = vlcam.load("tiny-clip")
by_clip = clip.ground(scene.image, scene.caption)
for part, item in zip(by_clip, scene.objects, strict=True):
    print(
        f"{part.phrase:<18} box {part.box}   IoU {vlcam.iou(part.box, item.box):.2f}   {part.explanation.recipe.prompt}"
    )
show(by_clip.drawn())

# %% [markdown]
"""
## For other programs

`to_coco` gives annotations as COCO writes them, boxes as x, y, width, height; `record` everything, the recipe and the
provenance of every phrase included. On the command line it is `vlcam ground`.
"""

# %%
print(json.dumps(by_clip.to_coco(image_id=1)["annotations"][0], indent=1)[:600])

# %% [markdown]
"""
## Limits, in plain words

- A box around a map is no detection: it has no class, and there is one for a false phrase too. Look at scores first.
- The box depends on recipe, block and threshold. Report them; the record does.
- `tiny-blip-itm` and `tiny-clip` were trained to look at the named object, on drawings. Released models point worse.
"""
