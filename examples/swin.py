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
def show(picture: PIL.Image.Image | Figure, width: int | None = None, dpi: int = 75) -> Image:
    """A picture or a figure in 64 colours, which keeps this file small."""
    if isinstance(picture, Figure):
        drawn = io.BytesIO()
        picture.savefig(drawn, dpi=dpi, bbox_inches="tight")
        picture = PIL.Image.open(drawn)
    buffer = io.BytesIO()
    picture.convert("RGB").quantize(64, kmeans=1).save(buffer, "PNG", optimize=True)
    return Image(buffer.getvalue(), width=width)


scene = next(scenes.generate(1, seed=3, start=53, objects=(3, 3)))
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
TARGET = "green cross"
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

`capture` gives `F2` as it is inside the model, one matrix per window. The record says how the windows lie. The
picture shows two tokens of the first stage, marked by a cross, in the block without and in the block with a shift.
What is coloured is the token's window, and the colour says how much it takes from there, the mean over heads. White
lies outside of the window.
"""


# %%
def cut(found: vlcam.Explanation) -> vlcam.tokens.Windows:
    """How the block of an explanation cut its grid into windows, from the record."""
    run = found.provenance["run"]
    return vlcam.tokens.Windows(tuple(run["grid"]), tuple(run["windows"]["size"]), tuple(run["windows"]["shift"]))


def whole_matrix(found: vlcam.Explanation) -> tuple[Tensor, Tensor]:
    """F2 of an explanation's block over all tokens, the mean over heads [N, N]; and which tokens share a window."""
    run, windows = found.provenance["run"], cut(found)
    captured = model.capture(scene.image, stream="vision", site="F2", layers=run["layers"])
    (inside,) = captured.activations.values()  # [images, windows, heads, queries, keys]
    inside = inside[0].mean(1)
    places = windows.raster(torch.arange(inside[..., 0].numel()).view(inside.shape[:2]))[0]
    which, position = places // inside.shape[-1], places % inside.shape[-1]
    together = which[:, None] == which
    matrix = inside[which[:, None], position[:, None], position].where(together, torch.tensor(0.0))
    return matrix, together


def seen_by(tokens: Mapping[str, tuple[int, int]], blocks: list[vlcam.Explanation]) -> Figure:
    """For some tokens (row, column), a row each: where they look in some blocks, within their windows."""
    figure = Figure(figsize=(2.5 * len(blocks) + 1, 2.6 * len(tokens)), layout="constrained")
    grid = figure.subplots(len(tokens), len(blocks))
    for axes, (title, (row, column)) in zip(grid, tokens.items(), strict=True):
        for ax, found in zip(axes, blocks, strict=True):
            matrix, together = whole_matrix(found)
            rows, columns = found.tokens.shape
            token = row * columns + column
            window = together[token].view(rows, columns)
            looks = np.ma.masked_where(~window.numpy(), matrix[token].view(rows, columns).numpy())
            drawn = ax.imshow(looks, cmap="inferno", vmin=0, vmax=float(matrix[token].max()))
            ax.plot(column, row, "x", color="deepskyblue", markersize=8, markeredgewidth=2)
            ax.set_title(f"{found.recipe.name}, {title}", fontsize=8)
            ax.set_xticks([])
            ax.set_yticks([])
            figure.colorbar(drawn, ax=ax, shrink=0.7)
    return figure


show(seen_by({"in the middle": (5, 9), "at the corner": (0, 1)}, by_block[:first]))

# %% [markdown]
"""
In the shifted block the window of the token at the corner has parts at all four corners of the image. The mask holds:
what the token gives to strangers, beside what it gives to the tokens of its own corner, is next to nothing.
"""

# %%
for found in by_block[:first]:
    matrix, together = whole_matrix(found)
    side = cut(found).window[0]
    rows, columns = torch.tensor(np.indices(found.tokens.shape).reshape(2, -1))
    far = ((rows[:, None] - rows).abs() >= side) | ((columns[:, None] - columns).abs() >= side)
    strangers = matrix[together & far]
    given = f", the most that one gives is {float(strangers.max()):.1e}" if len(strangers) else ""
    print(
        f"{found.recipe.name}: {int(together[0].sum())} tokens in a window, {len(strangers)} pairs of strangers{given}"
    )

# %% [markdown]
"""
## Where is the green cross?

pytorch-grad-cam's documents name two layers for Swin: its tutorial the first LayerNorm of the last block, its example
the second. Here these are the sites `F1` and `F4`. Both maps are called Grad-CAM of the last block.
"""


# %%
def ranks(tokens: np.ndarray) -> np.ndarray:
    """The rank of every value; equal values share the mean of theirs."""
    _, places, counts = np.unique(tokens.ravel(), return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts - 1) / 2)[places]


def agreement(one: vlcam.Explanation, other: vlcam.Explanation) -> float:
    """Spearman's rank correlation of two maps; NaN where one has nothing in it."""
    if one.status != "ok" or other.status != "ok":
        return math.nan
    return float(np.corrcoef(ranks(one.tokens), ranks(other.tokens))[0, 1])


def pointed(found: vlcam.Explanation, label: str) -> str:
    """Whether the heatmap's highest pixel lies on the object."""
    if found.status != "ok":
        return found.status
    x, y = found.peak()
    return "on it" if objects[label].mask[y, x] else "elsewhere"


signed = [
    model.explain(scene.image, target=TARGET, site=site, relu="none", normalize="max", name=f"{site}, signed")
    for site in ("F1", "F4")
]
rectified = [model.explain(scene.image, target=TARGET, site=site, name=f"{site}, ReLU") for site in ("F1", "F4")]
exp = rectified[0]
for found in rectified:
    print(f"{found.recipe.site}: peak {found.peak()}, {pointed(found, TARGET)}   {vlcam.summary(found.recipe)}")
print(f"rank correlation of the two, without ReLU: {agreement(*signed):.3f}")
show(vlcam.gallery([*rectified, *signed]))

# %% [markdown]
"""
They are different questions. `F1` is what the attention of the last block reads; a cell there can count for what it
hands to the other tokens of its window. `F4` is what the FFN reads, after attention; a cell there counts for itself
alone. Which of the two was meant belongs into a caption.

## What if another tensor were read, or weighted otherwise?

Every site by every weighting, in the last block and in the last block of the first stage. No cell is empty for want of
a gradient. What is empty says why: a ReLU removed everything, or gradient times activation cancels.
"""

# %%
for layer in (depth - 1, first - 1):
    grid = vlcam.all_recipes(model, layers=layer)
    swept = model.sweep(scene.image, recipes=grid, target=TARGET, empty="keep")
    counted = [found.status for found in swept]
    print(f"block {layer}:", ", ".join(f"{counted.count(status)} {status}" for status in dict.fromkeys(counted)))
    if layer == depth - 1:
        last = swept
show(vlcam.compare(last), dpi=60)

# %%
show(vlcam.compare(swept), dpi=60)

# %% [markdown]
"""
`hirescam` at `F6` of the last block is `rounding noise` for a reason: the final LayerNorm comes next, and it does not
care how long a token is. So the gradient is at right angles to the token, and the sum of their products is zero but for
rounding. Many programs would stretch it from 0 to 1.

## What does attention say within windows?

The rule for `F2`: a cell of the map is the attention that its token receives, averaged over all places of its window.
The cell works it out of the whole matrix, in which tokens of different windows have zero.
"""

# %%
attended, weighted = (
    [model.explain(scene.image, recipe=name, target=TARGET, layer=layer) for layer in range(depth)]
    for name in ("raw-attention", "attn-gradcam")
)
for layer, found in enumerate(attended[:first]):
    matrix, together = whole_matrix(found)
    received = matrix.sum(0) / together.sum(0)
    apart = np.abs(received.view(found.tokens.shape).numpy() - found.tokens).max()
    within = (together.float() @ received) / together.sum(1)
    print(f"raw-attention, block {layer}: from the whole matrix, at most {apart:.1e}")
    print(f"  mean over the cells of a window: {float(within.min()):.6f} to {float(within.max()):.6f}")
show(vlcam.compare(attended + weighted, rows="weighting", columns="layers"))

# %% [markdown]
"""
Look at the second line of each block. A row of attention sums to 1, and all of it stays in the window. So every window
has the same share of a map of raw attention, whatever is in it: the map says which token of a window is looked at, and
cannot say which window matters. Multiplied by a gradient it can.

## What does not exist here?

Rollout and relevance multiply matrices over all tokens. There are none: tokens see their window, and the stages do not
even have the same tokens. Nor do maps of two stages have cells to add. The errors come before anything runs.
"""

# %%
refused: dict[str, dict[str, Any]] = {
    "rollout": {"recipe": "attention-rollout"},
    "relevance": {"recipe": "chefer-generic"},
    "two stages": {"recipe": "grad-sam"},
    "row of [CLS]": {"recipe": "raw-attention", "queries": "cls"},
    "ReciproCAM": {"recipe": "vit-reciprocam"},
}
for title, choices in refused.items():
    try:
        model.explain(scene.image, target=TARGET, **choices)
    except vlcam.RecipeError as error:
        print(f"{title}: {error}\n")
stage = list(range(first, depth))
for name in ("grad-sam", "agcam", "legrad"):
    found = model.explain(scene.image, recipe=name, target=TARGET, layer=stage)
    print(f"{name} over blocks {stage}: {pointed(found, TARGET)}")

# %% [markdown]
"""
Within a stage maps can be merged, as the last lines show.

## Can the model be asked instead of differentiated?

Score-CAM takes no gradient. It lays each channel of a site over the image as a mask, runs the model on what is left,
and weights the channel by the score. So it costs a forward pass per channel, and the stages do not have the same number
of channels. Ablation-CAM takes each channel away instead. `batch` says how many run at once, `progress` is told after
each batch, and the record says how often the model was asked.
"""


# %%
def told(done: int, total: int) -> None:
    """Print how far it is."""
    print(f"  {done} of {total}")


asked = []
for layer in (depth - 1, first - 1):
    print(f"block {layer}, of stage {vision.stage_of(layer)}")
    for name in ("torchcam-scorecam", "ablationcam"):
        own: dict[str, Any] = {"batch": 40, "progress": told} if name == "torchcam-scorecam" else {}
        own |= {"layer": layer, "name": f"{name}, block {layer}"}
        found = model.explain(scene.image, recipe=name, target=TARGET, **own)
        print(f"  {name} asked {found.provenance['run']['asked']} times: {pointed(found, TARGET)}")
        asked.append(found)
show(vlcam.gallery(asked))

# %% [markdown]
"""
Two ways to lay a channel over the image are in use, and have a name each. An exception that `progress` raises breaks
the work off; the model is left as it was found.
"""


# %%
class Enough(Exception):  # noqa: N818 - no error
    """Raised by whoever waits."""


def impatient(done: int, total: int) -> None:
    """Break off after half of the questions."""
    if 2 * done >= total:
        raise Enough(f"broken off at {done} of {total}")


one, other = model.sweep(scene.image, recipes=["pgc-scorecam", "torchcam-scorecam"], target=TARGET)
print(f"corners aligned or not: rank correlation {agreement(one, other):.3f}")
try:
    model.explain(scene.image, recipe="pgc-scorecam", target=TARGET, batch=10, progress=impatient)
except Enough as stopped:
    print(stopped)
again = model.explain(scene.image, target=TARGET)
print("the default map after that, unchanged:", bool((again.tokens == exp.tokens).all()))

# %% [markdown]
"""
## And Swin v2, and the other libraries?

Swin v2 has its LayerNorms behind attention and behind the FFN. So there is no tensor that `F1` or `F4` could mean, and
the recipes that read one are an error that says what else there is. Its `F3` and `F5` are read before those LayerNorms.
The weights of this and of the next models are random: their maps mean nothing, but tokens, windows and sites are where
they are in trained ones. The second image is given to three libraries below; its grid of 10 x 6 is no multiple of the
windows, and is padded.
"""


# %%
def random_weights(module: nn.Module) -> nn.Module:
    """Weights that are nowhere zero."""
    torch.manual_seed(0)
    for name, parameter in module.named_parameters():
        around = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        nn.init.normal_(parameter, around, 0.2)
    return module.eval()


small: dict[str, Any] = {"embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4]}
config = Swinv2Config(image_size=64, window_size=4, num_labels=5, **small)
second = vlcam.wrap(random_weights(Swinv2ForImageClassification(config)), name="random Swin v2")
pixels = torch.randn(3, 64, 64, generator=torch.Generator().manual_seed(0))
print(second.anatomy)
print()
try:
    second.explain(pixels, target=2)
except vlcam.UnknownNameError as error:
    print(error)
for site in ("F3", "F5", "F6"):
    print(f"{site}: {second.explain(pixels, target=2, site=site)}")

# %%
libraries = {
    "transformers, Swin v2": second,
    "timm, Swin": vlcam.wrap(
        random_weights(
            timm.create_model("swin_tiny_patch4_window7_224", img_size=64, window_size=4, num_classes=5, **small)
        ),
        name="random timm",
        dynamic_img_size=True,
    ),
    "torchvision, Swin": vlcam.wrap(
        random_weights(SwinTransformer([4, 4], window_size=[4, 4], num_classes=5, **small)), name="random torchvision"
    ),
}
narrow = torch.randn(3, 40, 24, generator=torch.Generator().manual_seed(0))
for title, each in libraries.items():
    blocks = each.anatomy.stream("vision").blocks
    print(f"{title}: sites {' '.join(blocks[-1].sites)}")
    for image in (pixels, narrow):
        for layer in range(len(blocks)):
            found = each.explain(image, target=2, recipe="attn-gradcam", layer=layer, relu="none")
            run = found.provenance["run"]
            print(f"  image {tuple(image.shape[1:])}, block {layer}: map {found.tokens.shape}, {run['windows']}")

# %% [markdown]
"""
One description serves all three, though they differ inside: in what a side that one window covers does to the shift,
in whether padding comes before the shift or after it, in where an output projection is computed. A map has no cell for
padding in any of them.

## Which recipe points at its object?

The pointing game asks, for every object of a scene, whether the highest pixel of its class' map lies on it. Twenty
scenes are few: a share moves by several hundredths from one draw to the next.
"""

# %%
held_out = list(scenes.generate(20, seed=7))
recipes: dict[str, vlcam.Recipe] = {}
for name, choices in {
    "pgc-gradcam": {},
    "pgc-hirescam": {},
    "pgc-layercam": {},
    "torchcam-scorecam": {},
    "raw-attention": {"queries": "patches"},
    "attn-gradcam": {"queries": "patches"},
}.items():
    base = vlcam.recipes()[name].recipe.replace(**choices)
    recipes[name] = base
    if base.site == "F1" and not base.asks:
        recipes[f"{name}, F4"] = base.replace(site="F4", name=f"{name}, F4")
hits = dict.fromkeys(recipes, 0)
total, chance = 0, 0.0
for each in held_out:
    swept = model.sweep(each.image, recipes=list(recipes.values()), target=list(each.phrases()), empty="keep")
    for name, maps in zip(recipes, swept, strict=True):
        for item, found in zip(each.objects, maps, strict=True):
            if found.status == "ok":
                x, y = found.peak()
                hits[name] += bool(item.mask[y, x])
    total += len(each.objects)
    chance += sum(float(item.mask.mean()) for item in each.objects)
print(f"{total} objects in {len(held_out)} scenes; a random pixel is right in {chance / total:.2f}")
for name, right in sorted(hits.items(), key=lambda item: -item[1]):
    print(f"{name:<20} {right / total:.2f}")

# %% [markdown]
"""
Attention alone has no class in it: one map for all objects of a scene can be right for one of them only.

## Can someone else check it?

The record holds the grid and the windows of the block, beside everything else.
"""

# %%
checked = model.explain(scene.image, recipe="attn-gradcam", target=TARGET, layer=first - 1)
for key in ("stream", "site", "layers", "fitted", "target", "grid", "prefix_tokens", "class", "asked", "windows"):
    print(f"{key:<14} {json.dumps(checked.provenance['run'][key])}")
with tempfile.TemporaryDirectory() as folder:
    opened = vlcam.open(checked.save(Path(folder) / "green_cross.png"))
print(opened.verify(model))

# %% [markdown]
"""
# The class of every pixel

`tiny-beit-seg` is a BEiT with a decoder that gives every place of the image a class. So a question needs one thing
more: a class, and *where*. The anatomy has two notes to remember: which blocks the decoder reads, and that nothing
depends on those behind.
"""

# %%
segmenter = vlcam.load("tiny-beit-seg")
names = segmenter.adapter.labels
print(segmenter.anatomy)
places = segmenter.capture(scene.image, stream="vision", site="F1", layers=0).outputs["segmentation"][0]
predicted = places.argmax(0)
print()
print("logits", tuple(places.shape), "- classes, then places")
for index in predicted.unique().tolist():
    print(f"{names[index]:<16} at {int((predicted == index).sum())} places")
figure = Figure(figsize=(5.2, 2.6), layout="constrained")
left, right = figure.subplots(1, 2)
left.imshow(scene.image)
right.imshow(predicted.numpy(), cmap="tab20", interpolation="nearest")
for ax, title in ((left, "image"), (right, "class of every place")):
    ax.set_title(title, fontsize=9)
    ax.set_axis_off()
show(figure)

# %% [markdown]
"""
## Which blocks are on the path?

The default recipe reads the last block. No logit depends on it. That is not a gradient that happens to be small: there
is no path. The message names the blocks that have one, tried on the model.
"""

# %%
box = Region(box=tuple(map(float, objects[TARGET].box)))
question = Class(TARGET, region=box)
try:
    segmenter.explain(scene.image, target=question)
except vlcam.EvidenceError as error:
    print(error)
reached = [
    layer
    for layer, (tap, gradient) in enumerate(
        segmenter.capture(scene.image, stream="vision", site="F1", target=question).gradients.items()
    )
    if gradient is not None
]
deepest = reached[-1]
print("blocks with a gradient:", reached)

# %% [markdown]
"""
A recipe over all blocks needs those on the path. A recipe without a gradient does not notice: raw attention of the last
block is a picture of what nobody reads.
"""

# %%
for layers in ("all", reached):
    try:
        found = segmenter.explain(scene.image, recipe="chefer-generic", target=question, layer=layers)
        print(f"layers {layers}: {found}")
    except vlcam.EvidenceError as error:
        print(f"layers {layers}: {error}")
print("raw attention of the last block:", segmenter.explain(scene.image, recipe="raw-attention").status)

# %% [markdown]
"""
## Where, and where is that?

A region is a box or a mask in pixels of the image as given, or the places that the model gives to the class. The target
is the sum over the region; scores are means over it, and say so. A class that the model gives to no place has no pixels
to explain, and needs a region.
"""


# %%
def beside(maps: Mapping[str, vlcam.Explanation]) -> Figure:
    """The image and the overlays of explanations that answer several questions."""
    pictures = {"image": scene.image} | {title: found.overlay() for title, found in maps.items()}
    figure = Figure(figsize=(2.0 * len(pictures), 2.3), layout="constrained")
    for ax, (title, picture) in zip(figure.subplots(1, len(pictures)), pictures.items(), strict=True):
        ax.imshow(picture)
        ax.set_title(title, fontsize=8)
        ax.set_axis_off()
    return figure


mask = Region.of(objects[TARGET].mask)
regions: dict[str, Any] = {"predicted": Class(TARGET), "box": question, "mask": Class(TARGET, region=mask)}
here = {}
for title, target in regions.items():
    try:
        found = segmenter.explain(scene.image, target=target, layer=deepest, relu="none", normalize="max", name=title)
    except vlcam.EvidenceError as error:
        print(f"{title}: {error}")
        continue
    here[title] = found
    run = found.provenance["run"]
    shown = json.dumps(run["class"]["region"])
    print(f"{title}: sum {run['target_value']:.2f}; {found.scores['segmentation_logit']}")
    print(f"  region on record: {shown if len(shown) < 80 else shown[:77] + '...'}")
absent = next(name for index, name in enumerate(names) if index not in predicted)
try:
    segmenter.explain(scene.image, target=absent, layer=deepest)
except vlcam.EvidenceError as error:
    print(error)
show(beside(here))

# %% [markdown]
"""
The same class over another part of the image is another question: what speaks for it, or against it, *there*. Without a
ReLU the map is signed, red for and blue against.
"""

# %%
elsewhere = {
    item.phrase: segmenter.explain(
        scene.image,
        target=Class(TARGET, region=Region.of(item.mask)),
        layer=deepest,
        relu="none",
        normalize="max",
        name=f"pixels of the {item.phrase}",
    )
    for item in scene.objects
}
for phrase, found in elsewhere.items():
    print(f"{TARGET} on the {phrase}: {found.scores['segmentation_logit']}")
show(beside(elsewhere))

# %% [markdown]
"""
Every site by some weightings, in the deepest block on the path. Patches have a gradient everywhere, for the decoder
reads them all.
"""

# %%
some = ["gradcam", "hirescam", "layercam", "eigencam", "attention", "gradient", "attention*gradient", "head_weights"]
grid = vlcam.all_recipes(segmenter, layers=deepest, weighting=some)
swept = segmenter.sweep(scene.image, recipes=grid, target=question, empty="keep")
show(vlcam.compare(swept), dpi=60)

# %% [markdown]
"""
Score-CAM asks here, too: every channel is laid over the image, and the region stays where it is.
"""

# %%
masked = segmenter.explain(scene.image, recipe="torchcam-scorecam", target=question, layer=deepest)
print(f"asked {masked.provenance['run']['asked']} times")
with tempfile.TemporaryDirectory() as folder:
    opened = vlcam.open(masked.save(Path(folder) / "region.png"))
print(opened.provenance["run"]["class"])
print(opened.verify(segmenter))

# %% [markdown]
"""
## Stages without windows?

SegFormer has stages, but its tokens do not attend within windows. Instead they attend to merged tokens, which are
fewer, in all stages but the last. `F2` exists only where keys are tokens. Its decoder reads every stage, so that every
block is on the path. The weights are random.
"""

# %%
shape: dict[str, Any] = {"hidden_sizes": [16, 32, 48, 64], "num_attention_heads": [1, 2, 3, 4], "depths": [1, 1, 1, 1]}
config = SegformerConfig(**shape, decoder_hidden_size=32, num_labels=5)
segformer = vlcam.wrap(random_weights(SegformerForSemanticSegmentation(config)), name="random SegFormer")
print(segformer.anatomy)
print()
image = torch.randn(3, 64, 96, generator=torch.Generator().manual_seed(0))
corner = Class(2, region=Region(box=(0, 0, 32, 32)))
for layer in range(4):
    print(f"block {layer}: map {segformer.explain(image, target=corner, layer=layer, relu='none').tokens.shape}")
try:
    segformer.explain(image, recipe="raw-attention", target=corner, layer=0)
except vlcam.UnknownNameError as error:
    print(error)

# %% [markdown]
"""
## Limits, in plain words

- Within windows, attention says what a token looks at, and nothing about what lies outside. What reaches a cell through
  shifts, stages and FFNs is in gradients, not in one matrix.
- A token of a late stage stands for a large part of the image, and has heard of more. That a map is high there says
  that the answer passes through this token, not that only its own pixels matter.
- The region of a question is what the model answered about. The map is where it looked, and need not lie inside.
- A map is evidence for one score of one model under one recipe. To know whether a region decides, change the region and
  look at the score.
- Both models are toys that were trained on such scenes. Their cards say how: `vlcam.models()["tiny-swin"].card` and
  `vlcam.models()["tiny-beit-seg"].card`. Scenes are not photographs.
"""
