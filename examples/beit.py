# %% [markdown]
"""# What did BEiT look at? Patches that answer together.

This notebook is about what changes when a vision transformer averages its patches instead of asking [CLS], adds
relative positions inside attention, and scales what its blocks add. `tiny-beit` comes with the package and knows
coloured shapes. The notebook runs on a CPU in half a minute and downloads nothing. The walk through every choice of a
recipe is in [vit.ipynb](vit.ipynb).

It needs the extra `plot`: `pip install 'vlcam[plot]'`.
"""

# %%
import io
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
from IPython.display import Image
from matplotlib.figure import Figure
from torch import Tensor, nn
from transformers import BeitConfig, BeitForImageClassification

import vlcam
from vlcam import scenes
from vlcam.provenance import versions

print("  ".join(f"{name} {number}" for name, number in versions().items()))

# %% [markdown]
"""
## What is different about this model?

The notes of the anatomy name three things. Each has a section below.
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


scene = next(scenes.generate(1, seed=1, start=171, objects=(3, 3)))
model = vlcam.load("tiny-beit")
depth = len(model.anatomy.stream("vision").blocks)
print(model.anatomy)
print()
logits = model.capture(scene.image, stream="vision", site="F6", layers="last").outputs["class"][0]
for index in logits.argsort(descending=True)[:5].tolist():
    there = "in the picture" if model.adapter.labels[index] in scene.phrases() else ""
    print(f"{model.adapter.labels[index]:<16} logit {logits[index]:7.3f}   {there}")
show(scene.image, width=256)

# %% [markdown]
"""
## Who answers, [CLS] or the patches?

The head of this BEiT reads the mean of the patches of the last block. [CLS] is there, takes part in attention, and is
left out of that mean. The table shows the largest gradient of the logit at every site, for [CLS] and for the patches;
at `F2` for their rows, which ask. `tiny-vit`, whose head reads [CLS], stands beside it.
"""

# %%
SITES = ("F1", "F2", "F3_HEADS", "F3", "F4", "F5", "F6")


def reach(explained: vlcam.Explainer, image: Any, target: Any, site: str, block: int) -> tuple[str, str]:
    """The largest gradient on [CLS] and on the patches, at a site of a block."""
    found = explained.capture(image, stream="vision", site=site, layers=block, target=target)
    (gradient,) = found.gradients.values()
    by_token = gradient[0].abs().amax((0, 2) if site == "F2" else 1)
    return tuple("zero" if not part.any() else f"{float(part.max()):.1e}" for part in (by_token[:1], by_token[1:]))


def compared(models: Mapping[str, vlcam.Explainer], image: Any, target: Any, block: int) -> None:
    """Print where the gradient is, for several models."""
    print(f"{f'block {block}':<12}" + "".join(f"{name:<28}" for name in models))
    print(" " * 12 + f"{'[CLS]':<10}{'patches':<18}" * len(models))
    for site in SITES:
        cells = [reach(each, image, target, site, block) for each in models.values()]
        print(f"{site:<12}" + "".join(f"{cls:<10}{patches:<18}" for cls, patches in cells))


trained = {"tiny-beit": model, "tiny-vit": vlcam.load("tiny-vit")}
compared(trained, scene.image, "blue star", depth - 1)
print()
compared(trained, scene.image, "blue star", depth - 2)

# %% [markdown]
"""
In the last block the two are opposites. Where the patches are averaged, [CLS] has no gradient behind attention, nor has
its row in `F2`. At `F1` both still have one, because every token can be asked. One block earlier everything has one.

## Is it the family, or the pooling?

The pooling. transformers can also build a BEiT whose head reads [CLS]. Two of them with random weights, equal but for
that switch:
"""


# %%
def random_beit(*, mean: bool) -> vlcam.Explainer:
    """A small BEiT, its weights nowhere zero, that pools the patches or reads [CLS]."""
    torch.manual_seed(0)
    config = BeitConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
        num_labels=5,
        use_relative_position_bias=True,
        use_mean_pooling=mean,
    )
    module = BeitForImageClassification(config).eval()
    for name, parameter in module.named_parameters():
        nn.init.normal_(parameter, 1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.2)
    return vlcam.wrap(module, name="random-beit")


pixels = torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(0))
compared({"mean of the patches": random_beit(mean=True), "[CLS]": random_beit(mean=False)}, pixels, 0, 2)

# %% [markdown]
"""
## What becomes of recipes that were published for [CLS]?

A recipe that is asked for by name is fitted: where it reads [CLS] and the model does not, it reads the patches. The
record says so.
"""

# %%
names = ["pgc-gradcam", "gscorecam-gradcam", "raw-attention", "attn-gradcam", "chefer-generic"]
for found in model.sweep(scene.image, recipes=names, target="blue star"):
    recipe, fitted = found.recipe, found.provenance["run"]["fitted"]["tokens"]
    print(f"{recipe.name:<18} gradient_tokens={recipe.gradient_tokens:<8} queries={recipe.queries:<8} {fitted}")

# %% [markdown]
"""
A choice that is given in the call is taken as it is. With a gradient, the row of [CLS] is an error in the last block.
Without one it is a picture: of a row that the answer does not read.
"""

# %%
try:
    model.explain(scene.image, recipe="attn-gradcam", target="blue star", queries="cls")
except vlcam.EvidenceError as error:
    print(error)
asked = [
    model.explain(scene.image, recipe="raw-attention", queries="patches", name="rows of patches"),
    model.explain(scene.image, recipe="raw-attention", queries="cls", name="row of [CLS]"),
]
show(vlcam.gallery(asked))

# %% [markdown]
"""
## Where is the blue star?

The default is the same recipe as for a ViT: Grad-CAM at `F1` of the last block.
"""

# %%
exp = model.explain(scene.image, target="blue star")
star = next(item for item in scene.objects if item.phrase == "blue star")
x, y = exp.peak()
print(exp)
print(vlcam.summary(exp.recipe))
print(f"highest pixel x = {x}, y = {y}; on the star: {bool(star.mask[y, x])}")
show(exp.overlay(), width=256)

# %% [markdown]
"""
Every site by every weighting, in the last block. In the same figure for `tiny-vit`, in the other notebook, whatever
needs a gradient behind attention is empty. Here the patches have one at every site.
"""

# %%
last = vlcam.all_recipes(model, layers="last")
swept = model.sweep(scene.image, recipes=last, target="blue star", empty="keep")
show(vlcam.compare(swept))

# %% [markdown]
"""
## When is Grad-CAM the same as HiResCAM?

Grad-CAM weights channels by the mean gradient of the patches, HiResCAM takes each patch's own gradient. At `F6` of the
last block the head reads the mean of the patches, so every patch has the same gradient and the two are one map. The
same holds at `F5`, which is only added. Before the FFN every patch has a gradient of its own.
"""


# %%
def token_map(site: str, weighting: str) -> np.ndarray:
    """The raw map of the last block, without ReLU."""
    (recipe,) = vlcam.all_recipes(model, site=site, weighting=weighting, layers="last", relu="none")
    return model.explain(scene.image, recipe=recipe, target="blue star").tokens


for site in ("F6", "F5", "F4", "F3", "F1"):
    grad_cam, hires_cam = token_map(site, "gradcam"), token_map(site, "hirescam")
    apart = np.abs(grad_cam - hires_cam).max() / np.abs(hires_cam).max()
    print(f"{site}: largest difference {apart:.1e} of the highest value")
whole = token_map("F6", "gradcam")
print(f"F6: sum of the map {whole.sum():.1e}, sum of its magnitudes {np.abs(whole).sum():.1e}")

# %% [markdown]
"""
The last line is no accident either. The head is a LayerNorm and a linear layer on the mean, and a LayerNorm does not
care how long its input is. So the map at `F6` sums to zero but for rounding: what speaks for the class and what speaks
against it always balance. Its values compare patches with each other. They do not say how sure the model is.

## Is position a part of the attention?

BEiT adds a learned bias to the scores, for every head and every distance between two patches, before the softmax. `F2`
is what comes out of the softmax and goes on to the values, so the bias is in it. The cell computes both by hand.
"""

# %%
layer = model.adapter.module.beit.layers[depth - 1]


def captured(site: str, block: int) -> Tensor:
    """The tensor at a site of a block."""
    (found,) = model.capture(scene.image, stream="vision", site=site, layers=block).activations.values()
    return found


def split(projected: Tensor) -> Tensor:
    """[1, N, D] as [1, heads, N, D / heads]."""
    return projected.unflatten(-1, (layer.attention.num_attention_heads, -1)).transpose(1, 2)


with torch.no_grad():
    read = captured("F1", depth - 1)
    query, key = split(layer.attention.q_proj(read)), split(layer.attention.k_proj(read))
    scores = query @ key.transpose(-1, -2) * layer.attention.scaling
    bias = layer.relative_position_bias((8, 8))
probabilities = captured("F2", depth - 1)
for title, by_hand in {"without the bias": scores, "with the bias": scores + bias}.items():
    apart = float((by_hand.softmax(-1) - probabilities).abs().max())
    print(f"softmax of the scores {title:<17} from F2, at most {apart:.1e}")

# %% [markdown]
"""
The bias alone, through a softmax, is where each head would look from one patch if content did not count. Here for the
patch in row 4 and column 4 (counted from 0), above; below what the same patch attends to in this image.
"""

# %%
centre = 1 + 4 * 8 + 4
rows = {"position alone": bias[0].softmax(-1)[:, centre, 1:], "F2": probabilities[0, :, centre, 1:]}
heads = len(bias[0])
figure = Figure(figsize=(1.7 * heads + 0.9, 3.8), layout="constrained")
grid = figure.subplots(2, heads)
for axes, (title, values) in zip(grid, rows.items(), strict=True):
    top = float(values.max())
    for head, ax in enumerate(axes):
        drawn = ax.imshow(values[head].reshape(8, 8), cmap="inferno", vmin=0, vmax=top)
        ax.set_title(f"head {head}, {title}", fontsize=8)
        ax.set_axis_off()
    figure.colorbar(drawn, ax=list(axes), shrink=0.8)
show(figure)

# %% [markdown]
"""
## What does LayerScale scale?

What attention and FFN give is multiplied by a learned number per channel before it is added to the residual stream. The
sites `F3` and `F5` are read before that.
"""

# %%
before, attended = captured("F6", depth - 2), captured("F3", depth - 1)
fed, after = captured("F5", depth - 1), captured("F6", depth - 1)
with torch.no_grad():
    scaled = before + layer.lambda_1 * attended + layer.lambda_2 * fed
print(f"F6 of the block before + l1 F3 + l2 F5 - F6, at most {float((scaled - after).abs().max()):.1e}")
print(f"the same without l1 and l2,                at most {float((before + attended + fed - after).abs().max()):.1e}")

# %% [markdown]
"""
Grad-CAM and HiResCAM do not notice: what the activation lacks, the gradient has, and their product is the same on
either side of the scaling. `eigencam` and `none` take the activation alone and do notice.

## Attention received, or attention given?

A row of attention is what a token gives, and it sums to 1; a column is what a token receives. `map_axis` says which one
becomes the map: `keys` are the patches that receive, `queries` those that give.
"""

# %%
axes_of_attention = vlcam.all_recipes(
    model, site="F2", weighting=["attention", "attention*gradient"], map_axis=["keys", "queries"], layers="last"
)
both = model.sweep(scene.image, recipes=axes_of_attention, target="blue star")
given = next(found for found in both if (found.recipe.weighting, found.recipe.map_axis) == ("attention", "queries"))
to_cls = probabilities[0].mean(0)[1:, 0].reshape(8, 8).numpy()
apart = np.abs(given.tokens - (1 - to_cls) / to_cls.size).max()
print(f"given to the patches, from (1 - given to [CLS]) / 64: at most {apart:.1e}")
print(f"raw values of that map: {given.tokens.min():.6f} to {given.tokens.max():.6f}")
show(vlcam.compare(both, rows="weighting", columns="map_axis"))

# %% [markdown]
"""
Without a gradient, what a patch gives to all patches together is 1 less what it gives to [CLS]. So that map says
nothing of the image but how much each patch asks [CLS]. Its picture looks as strong as the others, because `minmax`
stretches any map from 0 to 1; the raw values tell how much there is. With a gradient both axes are worth a look,
because in the last block the patches that ask are those that the head reads.

## Which recipe points at its object?

The pointing game asks, for every object of a scene, whether the highest pixel of its class' map lies on it. Twenty
scenes are few: a share moves by several hundredths from one draw to the next. The benchmark in
[pointing_classes.md](../docs/pointing_classes.md) has every named recipe on more scenes.
"""

# %%
held_out = list(scenes.generate(20, seed=7))
recipes = ["pgc-gradcam", "pgc-hirescam", "raw-attention", "attention-rollout", "chefer-generic", "grad-sam", "legrad"]
hits = dict.fromkeys(recipes, 0)
total, chance = 0, 0.0
for each in held_out:
    swept = model.sweep(each.image, recipes=recipes, target=list(each.phrases()), empty="keep")
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
Attention alone and rollout have no class in them: they give one map for all objects of a scene, which can be right for
one of them only.

## Can someone else check it?

`save` writes a PNG with map, recipe and record. Here the image stays out of it, for pictures that may not travel: who
checks must have the image, and its hash is compared.
"""

# %%
with tempfile.TemporaryDirectory() as folder:
    path = exp.save(Path(folder) / "blue_star.png", embed_image=False)
    again = vlcam.open(path)
print(again.recipe == exp.recipe, bool((again.tokens == exp.tokens).all()))
print(again.verify(model, image=scene.image))
try:
    again.verify(model, image=held_out[0].image)
except vlcam.InputError as error:
    print(error)

# %% [markdown]
"""
## Limits, in plain words

- Which tokens answer is a fact of the model, not of the family's name: read the notes of the anatomy, and what `fitted`
  says in the record.
- A patch of the last block has seen all others. That a map is high there says that the answer passes through this
  token, not that only its own pixels matter.
- A map is evidence for one score of one model under one recipe. To know whether a region decides, change the region and
  look at the score.
- `tiny-beit` is a toy that was trained to look at its objects. Its card says how it was made:
  `vlcam.models()["tiny-beit"].card`. Scenes are not photographs.
"""
