# %% [markdown]
"""# What did a Swin look at? Windows, stages, and then: which class has every pixel?

Most recipes were published for models whose tokens all see each other and keep their number. In a Swin transformer they
do neither. This notebook is about what remains, what changes, and what does not exist there. Its second part explains a
model that gives every pixel a class. Both models, `tiny-swin` and `tiny-beit-seg`, come with the package and know
coloured shapes. The notebook runs on a CPU in a minute and downloads nothing. The walk through every choice of a recipe
is in [vit.ipynb](vit.ipynb).

It needs the extras `plot`, `timm` and `torchvision`: `pip install 'vlcam[plot,timm,torchvision]'`. The last two are for
one section.
"""

# %%
import io
import json
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import timm
import torch
from IPython.display import Image
from matplotlib.figure import Figure
from torch import Tensor, nn
from torchvision.models import SwinTransformer
from transformers import SegformerConfig, SegformerForSemanticSegmentation, Swinv2Config, Swinv2ForImageClassification

import vlcam
from vlcam import scenes
from vlcam.provenance import versions
from vlcam.targets import Class, Region

print("  ".join(f"{name} {number}" for name, number in versions().items()))

# %% [markdown]
"""
## What is different about this model?

The anatomy says it: two stages, each with a grid of its own. There is no [CLS]. All tokens are averaged, so that each
of them has a gradient at every site of every block; the trap of [vit.ipynb](vit.ipynb), gradients of zero behind the
last attention, does not exist here.
"""


# %%
def show(picture: PIL.Image.Image | Figure, width: int | None = None) -> Image:
    """A picture or a figure in 128 colours, which keeps this file small."""
    if isinstance(picture, Figure):
        drawn = io.BytesIO()
        picture.savefig(drawn, dpi=75, bbox_inches="tight")
        picture = PIL.Image.open(drawn)
    buffer = io.BytesIO()
    picture.convert("RGB").quantize(128, kmeans=1).save(buffer, "PNG", optimize=True)
    return Image(buffer.getvalue(), width=width)


scene = next(scenes.generate(1, seed=3, start=56, objects=(3, 3)))
objects = {item.phrase: item for item in scene.objects}
model = vlcam.load("tiny-swin")
vision = model.anatomy.stream("vision")
depth, first = len(vision.blocks), vision.stages[0]
print(model.anatomy)
print()
print("blocks of each stage:", vision.stages)
logits = model.capture(scene.image, stream="vision", site="F6", layers="last").outputs["class"][0]
for index in logits.argsort(descending=True)[:5].tolist():
    there = "in the picture" if model.adapter.labels[index] in objects else ""
    print(f"{model.adapter.labels[index]:<16} logit {logits[index]:7.3f}   {there}")
show(scene.image, width=256)

# %% [markdown]
"""
## How fine is a map?

As fine as the grid of its block. Between the stages 2 x 2 tokens become one, so that a map of the first stage has four
cells where one of the second has one. The record says for every map which grid it has, and which windows its block
used: their size, and by how much the grid was shifted before it was cut.
"""

# %%
TARGET = "red triangle"
by_block = [model.explain(scene.image, target=TARGET, layer=layer, name=f"block {layer}") for layer in range(depth)]
for found in by_block:
    run = found.provenance["run"]
    print(f"{found.recipe.name}: grid {run['grid']}, windows {run['windows']}")
show(vlcam.gallery(by_block))

# %% [markdown]
"""
## Who sees whom?

A token attends to the tokens of its own window. Were the windows the same in every block, no token would ever hear of
its neighbour across a border. So every other block shifts the grid by half a window before it cuts it: up and to the
left, and what leaves at one edge comes in at the other. Tokens that meet only because of that are strangers, and a mask
keeps them apart.

`capture` gives `F2` as it is inside the model, one matrix per window. The adapter knows how the windows lie. The
picture shows two tokens of the first stage, marked by a cross, in the block without and in the block with a shift. The
frame of grey is the window; colours say where the token looks, the mean over heads.
"""

# %%
pairs = model.adapter.prepare_images([])if False else None
