# %% [markdown]
"""# What did a ViT look at? One class, and every choice behind the picture.

This notebook walks through image classifiers with `tiny-vit`, a vision transformer that comes with the package and
knows coloured shapes. It runs on a CPU in half a minute and downloads nothing.

It needs the extras `plot`, `timm` and `torchvision`: `pip install 'vlcam[plot,timm,torchvision]'`. The last two are
for one section.
"""

# %%
import copy
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
from torch import nn
from torchvision.models import VisionTransformer
from torchvision.transforms import v2

import vlcam
from vlcam import scenes
from vlcam.provenance import versions

print("  ".join(f"{name} {number}" for name, number in versions().items()))

# %% [markdown]
"""
## What is in the picture?

An explanation can be checked only against an answer. `vlcam.scenes` draws coloured shapes and knows which pixels each
of them covers.
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


scene = next(scenes.generate(1, seed=4, start=207, objects=(3, 3)))
objects = {item.phrase: item for item in scene.objects}
for item in scene.objects:
    print(f"{item.phrase:<14} box {item.box}, {int(item.mask.sum())} pixels")
show(scene.image, width=256)

# %% [markdown]
"""
## What can be read, and where?

`anatomy` lists the stacks of blocks, the tensors inside a block that can be read, and the order of the tokens. Such a
tensor is called a *site*. The note at the end matters later.
"""

# %%
model = vlcam.load("tiny-vit")
print(model.anatomy)

# %% [markdown]
"""
The block of a ViT reads its input Z and adds to it twice:

| site | tensor | in symbols |
|---|---|---|
| `F1` | output of the LayerNorm before attention | F1 = LN1(Z) |
| `F2` | attention probabilities, after the softmax | F2 = softmax(q k^T / sqrt(d)) |
| `F3_HEADS` | what the heads collect, side by side, before the output projection | F2 v |
| `F3` | the same after the output projection | F3 = F3_HEADS W + b |
| `F4` | output of the LayerNorm before the FFN | F4 = LN2(Z + F3) |
| `F5` | output of the FFN | F5 = FFN(F4) |
| `F6` | output of the block | F6 = Z + F3 + F5 |

Papers call `F3` as well as `F3_HEADS` "the attention output". `capture` gives the tensors themselves, with the gradient
of a target. The cell checks the last line of the table.
"""

# %%
read = {
    site: model.capture(scene.image, stream="vision", site=site, target="blue square")
    for site in ("F1", "F2", "F3_HEADS", "F3", "F4", "F5", "F6")
}
values = {site: list(found.activations.values()) for site, found in read.items()}
for site, by_block in values.items():
    print(f"{site:<9}", tuple(by_block[-1].shape))
difference = values["F6"][-2] + values["F3"][-1] + values["F5"][-1] - values["F6"][-1]
print(f"F6 of the block before + F3 + F5 - F6, at most {float(difference.abs().max()):.1e}")

# %% [markdown]
"""
One image; [CLS] and 64 patches; then channels. The attention has a matrix per head instead: a row per token that asks
(query), a column per token that is asked (key).

## What does the model see?

A classifier gives every class a logit. The scores are those of one class, each with its kind.
"""

# %%
logits = read["F6"].outputs["class"][0]
labels = model.adapter.labels
for index in logits.argsort(descending=True)[:6].tolist():
    label = labels[index]
    there = "in the picture" if label in objects else ""
    print(f"{label:<16} logit {logits[index]:7.3f}   probability {logits.softmax(0)[index]:.3f}   {there}")
print()
for score in model.scores(scene.image).values():
    print(score)

# %% [markdown]
"""
Without a target, the scores are those of the class with the highest logit. A softmax shares 1 among the classes, so
three objects that are all seen have a third each. `class_margin` is the logit less that of the runner-up.

## Where is the blue square?

The target is a class, by label or index. Without further words `explain` takes the recipe `pgc-gradcam`: Grad-CAM at
`F1` of the last block, as pytorch-grad-cam's guide for ViTs has it.
"""

# %%
exp = model.explain(scene.image, target="blue square")
print(exp)
print("highest pixel (x, y):", exp.peak())
show(exp.overlay(), width=256)

# %% [markdown]
"""
What the overlay shows went through three steps. `exp.tokens` is the map itself, one number per patch, raw.
`exp.heatmap` is that map normalised as the recipe says, then interpolated to the pixels of the image. The overlay lays
it over the image. Two maps can be compared by their tokens. Two heatmaps that were normalised cannot tell which is
stronger.
"""


# %%
def titled(figure: Figure, count: int, titles: list[str]) -> list[Any]:
    """A row of axes without ticks."""
    axes = list(np.atleast_1d(figure.subplots(1, count)))
    for ax, title in zip(axes, titles, strict=True):
        ax.set_title(title, fontsize=9)
        ax.set_axis_off()
    return axes


figure = Figure(figsize=(8.2, 2.7), layout="constrained")
left, middle, right = titled(figure, 3, ["tokens, raw", "heatmap, 0 to 1", "overlay"])
figure.colorbar(left.imshow(exp.tokens, cmap="inferno"), ax=left, shrink=0.8)
figure.colorbar(middle.imshow(exp.heatmap, cmap="inferno"), ax=middle, shrink=0.8)
right.imshow(exp.overlay())
print("tokens", exp.tokens.shape, " heatmap", exp.heatmap.shape)
show(figure)

# %% [markdown]
"""
How was it made? The recipe holds every choice. `describe` prints it under the headings of a reporting checklist, with
the formula at the end; `summary` is for a caption.
"""

# %%
print(vlcam.describe(exp.recipe))
print()
print(vlcam.summary(exp.recipe))

# %% [markdown]
"""
In words: the gradient of the class logit at `F1` is averaged over the patches, which gives a weight per channel. The
map of a patch is the weighted sum of its channels. The ReLU then removes what is negative.

## Is it the class, or just the things?

A map that is the same for every class says that there is something, not that it is a blue square. A list of classes
gives a list of maps, in one forward pass.
"""


# %%
def side_by_side(maps: Mapping[str, np.ndarray], title: str) -> Image:
    """Token maps [h, w] on one colour scale, from -largest to largest where one of them has negative values."""
    signed = any((tokens < 0).any() for tokens in maps.values())
    top = max(float(np.abs(tokens).max()) for tokens in maps.values())
    figure = Figure(figsize=(1.9 * len(maps) + 1.2, 2.5), layout="constrained")
    axes = titled(figure, len(maps), list(maps))
    for ax, tokens in zip(axes, maps.values(), strict=True):
        drawn = ax.imshow(tokens, cmap="coolwarm" if signed else "inferno", vmin=-top if signed else 0, vmax=top)
    figure.colorbar(drawn, ax=axes, shrink=0.8)
    figure.suptitle(title, fontsize=9)
    return show(figure)


def pointed(found: vlcam.Explanation, label: str) -> str:
    """Whether the heatmap's highest pixel lies on the object."""
    if found.status != "ok":
        return found.status
    x, y = found.peak()
    return "on it" if objects[label].mask[y, x] else "elsewhere"


names = list(objects)
by_class = dict(zip(names, model.explain(scene.image, target=names), strict=True))
for label, found in by_class.items():
    print(f"{label:<14} logit {found.scores['class_logit'].value:6.3f}   peak: {pointed(found, label)}")
side_by_side({label: found.tokens for label, found in by_class.items()}, "pgc-gradcam, raw values, one scale")

# %% [markdown]
"""
The ReLU hides what speaks against a class. Without it the map is signed: red speaks for the class, blue against it.
"""

# %%
signed = model.explain(scene.image, target=names, relu="none", name="pgc-gradcam, signed")
side_by_side({label: found.tokens for label, found in zip(names, signed, strict=True)}, "without ReLU, raw values")

# %% [markdown]
"""
## What if another tensor were read, or weighted otherwise?

"Grad-CAM on a ViT" does not say which tensor is meant. `all_recipes` makes every valid combination of site and
weighting, here for the last block. `sweep` explains with all of them in as few passes as possible; `empty="keep"` asks
it to keep those that have no gradient, instead of raising. `compare` draws a row per site and a column per weighting.
"""

# %%
last = vlcam.all_recipes(model, layers="last")
swept = model.sweep(scene.image, recipes=last, target="blue square", empty="keep")
counted = [found.status for found in swept]
print(len(swept), "recipes:", ", ".join(f"{counted.count(status)} {status}" for status in dict.fromkeys(counted)))
show(vlcam.compare(swept))

# %% [markdown]
"""
Every map has its own scale, because values of different weightings have no common one.

The empty cells are no failure of the program. The attention of the last block is where [CLS] reads the patches for the
last time; what comes after, from `F3_HEADS` to `F6`, is computed for each token alone, and the head reads [CLS]. So the
logit does not depend on the patches there: their gradient is exactly zero. `eigencam` and `none` take no gradient and
need none, nor does `attention`. Their picture is the same for every class. `no positive evidence` is something else:
there was a gradient, and a ReLU removed the whole map.

One block earlier the patches have a gradient at every site. Some of the weightings are enough to see it:
"""

# %%
depth = len(model.anatomy.stream("vision").blocks)
some = ["gradcam", "hirescam", "layercam", "eigencam", "attention", "gradient", "attention*gradient", "head_weights"]
earlier = vlcam.all_recipes(model, layers=depth - 2, weighting=some)
show(vlcam.compare(model.sweep(scene.image, recipes=earlier, target="blue square", empty="keep")))

# %% [markdown]
"""
`hirescam` at `F6` of this block has nothing to show, for a reason worth knowing. From there a patch reaches the logit
only through the LayerNorm of the last block, and a LayerNorm does not care how long its input is. So the gradient is at
right angles to the token, and the sum of their products is zero but for rounding.
"""

# %% [markdown]
"""
## Which published recipe?

The catalogue holds recipes as papers and their code made them, each with its source. Without a list, `sweep` takes
every one that fits the model.
"""

# %%
named = model.sweep(scene.image, target="blue square", empty="keep")
show(vlcam.gallery(named))

# %%
entry = vlcam.recipes()["legrad"]
print(entry.citation)
print(entry.code)
print(entry.departs)
print()
fitted = next(each for each in named if each.recipe.name == "legrad")
print(vlcam.formula(fitted.recipe))

# %% [markdown]
"""
## How much does each choice matter?

Numbers are easier to report than pictures. Spearman's rank correlation of two token maps is 1 where both order the
patches alike, whatever their scale; 0 where they have nothing to do with each other. Patches that a ReLU set to zero
share their mean rank.

Two recipes are the base lines, both in the last block: Grad-CAM on `F1`, and attention times gradient on `F2`, without
a ReLU, so that every patch has a rank of its own. One choice is changed at a time.
"""


# %%
def ranks(tokens: np.ndarray) -> np.ndarray:
    """The rank of every value; equal values share the mean of theirs."""
    _, places, counts = np.unique(tokens.ravel(), return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts - 1) / 2)[places]


def agreement(one: vlcam.Explanation, other: vlcam.Explanation) -> float:
    """Spearman's rank correlation; NaN where a map has nothing in it."""
    if one.status != "ok" or other.status != "ok":
        return math.nan
    return float(np.corrcoef(ranks(one.tokens), ranks(other.tokens))[0, 1])


def against(base: vlcam.Recipe, field: str, given: list[Any]) -> None:
    """Print how far a recipe's map changes with one field."""
    changed = [base.replace(**{field: value, "name": f"{field}={value}"}) for value in given]
    first, *others = model.sweep(scene.image, recipes=[base, *changed], target="blue square", empty="keep")
    for found in others:
        print(f"  {found.recipe.name:<26}{agreement(first, found):7.3f}   {pointed(found, 'blue square')}")


grad_cam = exp.recipe.replace(relu="none")
(weighted,) = vlcam.all_recipes(model, site="F2", weighting="attention*gradient", relu="none", layers="last")
blocks = [(block,) for block in range(depth)]
print(f"F1, {grad_cam.weighting}, gradient pooled over the {grad_cam.gradient_tokens}")
against(grad_cam, "relu", ["gradient", "map"])
against(grad_cam, "gradient_tokens", ["cls", "all"])
against(grad_cam, "scale", ["probability", "log-probability", "margin", "finer"])
against(grad_cam, "layers", blocks)
print(f"F2, {weighted.weighting}, heads {weighted.heads}, rows {weighted.queries}")
against(weighted, "relu", ["gradient", "before_heads", "after_heads", "map"])
against(weighted, "heads", ["sum", "max", "min"])
against(weighted, "scale", ["probability", "log-probability", "margin", "finer"])
against(weighted, "layers", blocks)

# %% [markdown]
"""
Four lines of this table hold for every model of this kind, and are worth knowing:

- `scale`: probability and log-probability give one map up to a factor. Their gradients are p (1 - p) and (1 - p) times
  that of the log odds, so they fade where the model is sure. The logit alone is another scalar: raising a probability
  also means lowering the other classes. `margin` contrasts with the runner-up only, `finer` with the three classes
  whose logits are nearest.
- `relu` on `F2`: probabilities are never negative, so a ReLU on the gradient and one on each head's product are the
  same. One after the heads are merged is not.
- `heads`: the sum is the mean times the number of heads.
- `layers` on `F2`: in the last block only the row of [CLS] has a gradient. In an earlier block every row has one, and
  the row of [CLS] is a part of the story.

Where the ReLU stands, and how heads are merged, as a picture. `normalize="max"` divides by the largest magnitude and
keeps the sign. The usual `minmax` would turn a signed map into one from 0 to 1, with the strongest counter-evidence
at 0.
"""

# %%
merged = vlcam.all_recipes(
    model,
    site="F2",
    weighting="attention*gradient",
    layers="last",
    relu=["none", "gradient", "before_heads", "after_heads", "map"],
    heads=["mean", "sum", "max", "min"],
    normalize="max",
)
show(vlcam.compare(model.sweep(scene.image, recipes=merged, target="blue square"), rows="relu", columns="heads"))

# %% [markdown]
"""
Without a ReLU the map can be signed: red speaks for the class, blue against it. The maximum over heads keeps what some
head says for the class, the minimum what some head says against it.

Which block, for four ways to weight `F1`:
"""

# %%
layered = vlcam.all_recipes(model, site="F1", weighting=["gradcam", "hirescam", "layercam", "eigencam"])
show(
    vlcam.compare(
        model.sweep(scene.image, recipes=layered, target="blue square", empty="keep"),
        rows="weighting",
        columns="layers",
    )
)

# %% [markdown]
"""
## Why is there no map?

Many tools stretch a gradient of zeros, or of rounding errors, into a picture. Here it is an error. Grad-CAM at `F4` of
the last block, the LayerNorm before the FFN, runs into it:
"""

# %%
try:
    model.explain(scene.image, target="blue square", site="F4")
except vlcam.EvidenceError as error:
    print(error)

# %% [markdown]
"""
The message says what is zero, and where this model does have a gradient; that was tried on the model, not looked up.
Following it one piece at a time:
"""

# %%
advised = {
    "F1 of this block": {"site": "F1"},
    "F4, one block earlier": {"site": "F4", "layer": depth - 2},
    "F4, weights from [CLS]": {"site": "F4", "gradient_tokens": "cls"},
}
followed = {
    title: model.explain(scene.image, target="blue square", name=title, **choices) for title, choices in advised.items()
}
for title, found in followed.items():
    print(f"{title:<24} {pointed(found, 'blue square'):<10} {vlcam.summary(found.recipe)}")
show(vlcam.gallery(list(followed.values())))

# %% [markdown]
"""
The three are different questions. The first asks what the attention of the last block reads in the patches. The second
asks the same of the FFN before it. The third weights channels by the gradient of [CLS], and applies these weights to
patches that the logit does not depend on. That is defined, but it is no path of evidence: it shows which patches look
like what the class wants in [CLS].

## What flows through all blocks?

Rollout multiplies the attention of all blocks, with the identity added for the residual connection. It takes no target.
Relevance (`chefer-generic`) weights every block's attention by its gradient first, so it depends on the class.
"""

# %%
flows = ["raw-attention", "attention-rollout", "chefer-generic", "chefer-generic-heads-first"]
for name in flows:
    print(f"{name}\n{vlcam.formula(vlcam.recipes()[name].recipe)}\n")
one, other = (model.sweep(scene.image, recipes=flows, target=label) for label in names[:2])
for first, second in zip(one, other, strict=True):
    apart = float(np.abs(first.tokens - second.tokens).max() / max(first.tokens.max(), second.tokens.max()))
    print(f"{first.recipe.name:<28} {names[0]} against {names[1]}: {apart:.3f} of the highest value apart")
show(vlcam.gallery(model.sweep(scene.image, recipes=flows, target="blue square")))

# %% [markdown]
"""
## The formula, or what the code computes?

Published code does not always do what its description says. Where the difference is known, the catalogue has both, and
the recipe names the departures. The three pairs here are the two rollouts of vit-explain, and Grad-CAM++ of torch-cam:
with the denominator that its code works out, and without, because the code then does not use it.
"""

# %%
pairs = ["vitexplain-rollout", "vitexplain-grad-rollout", "torchcam-gradcam++"]
for name in pairs:
    meant, coded = model.sweep(scene.image, recipes=[name, f"{name}-as-coded"], target="blue square", empty="keep")
    a, b = (found.tokens / max(float(np.abs(found.tokens).max()), 1e-30) for found in (meant, coded))
    apart, alike = float(np.abs(a - b).max()), agreement(meant, coded)
    print(f"{name:<26} largest difference {apart:.3f} of the highest value, rank correlation {alike:.3f}")
    print(f"{'':<26} departures: {', '.join(coded.recipe.departures)}")

coded = vlcam.recipes()["vitexplain-grad-rollout-as-coded"]
print()
print(coded.notes)
print()
print(vlcam.formula(coded.recipe))

# %% [markdown]
"""
## Why this class rather than that?

A target may be a function of the logits, [P, classes] for P pairs of image and class, with one scalar per pair. Here it
is the difference of two logits. A recipe without ReLU is linear in the gradient, so its map for the difference is the
difference of its maps.
"""

# %%
this, that = "blue square", "red circle"
here, there = labels.index(this), labels.index(that)
rather = vlcam.targets.Custom(
    lambda logits: logits[:, here] - logits[:, there], head="class", label=f"{this} rather than {that}"
)
contrast = model.explain(scene.image, target=rather, relu="none")
parts = dict(zip(names, signed, strict=True))
apart = contrast.tokens - (parts[this].tokens - parts[that].tokens)
print(contrast.provenance["run"]["target"], "- from the difference of the maps, at most", f"{np.abs(apart).max():.1e}")
side_by_side(
    {this: parts[this].tokens, that: parts[that].tokens, "difference": contrast.tokens}, "without ReLU, raw values"
)

# %% [markdown]
"""
## Many images?

Lists are paired: n images with n classes, one image with many, many with one. A batch gives what single calls give, up
to the rounding of larger matrix products.
"""

# %%
more = list(scenes.generate(6, seed=7, objects=(1, 2)))
wanted = [other.objects[0].phrase for other in more]
batch = model.explain([other.image for other in more], target=wanted)
single = [model.explain(other.image, target=label) for other, label in zip(more, wanted, strict=True)]
for found, alone, other in zip(batch, single, more, strict=True):
    x, y = found.peak()
    apart = float(np.abs(found.tokens - alone.tokens).max() / np.abs(alone.tokens).max())
    print(f"{found.subject:<26} peak on it: {bool(other.objects[0].mask[y, x])!s:<6} from the single call: {apart:.1e}")

# %% [markdown]
"""
## Another library, another shape?

The calls are the same for models of timm and torchvision. The three here are small, and their weights are random: their
maps mean nothing, but tokens, sites and gradients are where they are in trained ones.

`wrap` takes a model that you have. A timm model made by `create_model` brings its own preprocessing; torchvision's
takes its weights object or a transform. The first one is not square, and has registers: 8 x 12 patches after five
tokens that lie nowhere in the image.
"""


# %%
def random_weights(module: nn.Module) -> nn.Module:
    """Weights that are nowhere zero; libraries start heads at zero, and such a model has no gradient."""
    for name, parameter in module.named_parameters():
        around = 1.0 if ("norm" in name or "ln" in name) and name.endswith("weight") else 0.0
        nn.init.normal_(parameter, around, 0.2)
    return module.eval()


torch.manual_seed(0)
small = {"patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 4, "num_classes": 5}
prepare = v2.Compose(
    [v2.Resize((64, 64)), v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.5] * 3)]
)
others = {
    "timm, registers": vlcam.wrap(
        random_weights(timm.create_model("vit_tiny_patch16_224", **small, img_size=(64, 96), reg_tokens=4))
    ),
    "timm, distilled": vlcam.wrap(
        random_weights(timm.create_model("deit_tiny_distilled_patch16_224", **small, img_size=64))
    ),
    "torchvision": vlcam.wrap(
        random_weights(VisionTransformer(64, 8, 3, 4, hidden_dim=32, mlp_dim=64, num_classes=5)), prepare
    ),
}
for name, wrapped in others.items():
    print(f"--- {name}: {wrapped.anatomy}\n")

# %%
wide = next(scenes.generate(1, seed=5, start=3, size=(96, 144)))
for name, wrapped in others.items():
    found = wrapped.explain(wide.image, target=2, relu="none")
    run = found.provenance["run"]
    print(
        f"{name}: tokens {found.tokens.shape}, heatmap {found.heatmap.shape}, before the patches {run['prefix_tokens']}"
    )
    try:
        wrapped.explain(wide.image, target=2, site="F6")
    except vlcam.EvidenceError as error:
        print(f"  {error}")
    fitting = wrapped.sweep(wide.image, target=2, empty="keep")
    print(f"  {len(fitting)} named recipes, {sum(found.status == 'ok' for found in fitting)} with a map\n")

# %% [markdown]
"""
No token is counted among the patches that is none: a grid is never guessed. Attention can also be read in the rows of
the registers. A heatmap may be NaN where the preprocessing cropped; the model saw nothing there.
"""

# %%
registers = others["timm, registers"].explain(wide.image, recipe="raw-attention", queries="registers")
print(vlcam.summary(registers.recipe))
print("rows", registers.provenance["run"]["rows"], " left out:", registers.provenance["run"]["dropped"])
cropped = others["timm, distilled"].explain(wide.image, target=2, relu="none")
print(f"not seen by the distilled model: {np.isnan(cropped.heatmap).mean():.2f} of the pixels")
for step in cropped.provenance["image"]["steps"]:
    print(" ", json.dumps(step))

# %% [markdown]
"""
## Can someone else check it?

An explanation carries its record. `run` says what the recipe came to on this model; `fitted` says, for what depends on
the model, how it was found.
"""

# %%
for part in ("run", "model"):
    print(part)
    for key, value in exp.provenance[part].items():
        print(f"  {key:<16} {json.dumps(value)}")

# %% [markdown]
"""
`save` writes one PNG that any viewer shows. It holds the raw map, the recipe, the record and the image. `open` reads it
back, and `verify` computes the map again with a model that you give it. The second model here is a copy, in which one
weight of the head is not what it was.
"""

# %%
altered = copy.deepcopy(model.adapter.module)
with torch.no_grad():
    altered.classifier.weight[here, 0] += 0.5
with tempfile.TemporaryDirectory() as folder:
    path = exp.save(Path(folder) / "blue_square.png")
    again = vlcam.open(path)
print(again.recipe == exp.recipe, bool((again.tokens == exp.tokens).all()))
print(again.verify(model))
print(again.verify(vlcam.wrap(altered, model.adapter.processor, name="tiny-vit")))

# %% [markdown]
"""
## Limits, in plain words

- A map is evidence for one score of one model under one recipe. It is not a segmentation, and it is not a cause. To
  know whether a region decides, change the region and look at the score.
- Recipes disagree, and none of them is the true one. Report the recipe with the picture; the saved file does.
- A map without a class in it (attention, rollout, eigencam) cannot say why this class.
- Normalised maps hide strength. Compare raw values, and only under one recipe, block and target.
- `tiny-vit` is a toy that was trained to look at its objects. That a recipe points right here says that it reads the
  evidence off such a model, not that classifiers look where they should. Its card says how it was made:
  `vlcam.models()["tiny-vit"].card`.
- Scenes are not photographs. What holds here need not hold there.
"""
