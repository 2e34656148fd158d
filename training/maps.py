"""Measures a classifier in plain torch: what it recognises, and where its maps point. No recipe of the package runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import interpolate

from training.pictures import LABEL_IDS, picture
from vlcam import scenes

CAMS = ("gradcam", "hirescam", "layercam")


@dataclass(frozen=True)
class Tapped:
    """What one forward of a batch left behind, block by block, all still part of the gradient's graph.

    `normed` are the outputs of `layernorm_before` (F1), `after` those of `layernorm_after` (F4), `streams` the outputs
    of the blocks (F6), all [B, T, D]; `attention` is [B, H, T, T], in Swin window by window.
    """

    logits: torch.Tensor
    normed: list[torch.Tensor]
    after: list[torch.Tensor]
    streams: list[torch.Tensor]
    attention: list[torch.Tensor]


def blocks(model: nn.Module) -> Sequence[Any]:
    """The transformer blocks of a ViT, BEiT or Swin classifier."""
    base: Any = getattr(model, model.config.model_type)  # type: ignore[arg-type, union-attr]
    if model.config.model_type == "swin":  # type: ignore[union-attr]
        return [block for stage in base.encoder.layers for block in stage.blocks]
    found: Sequence[Any] = base.layers
    return found


def tapped(model: nn.Module, pixels: torch.Tensor) -> Tapped:
    """Run the model with eager attention and keep what the maps are made of."""
    normed: list[torch.Tensor] = []
    after: list[torch.Tensor] = []
    streams: list[torch.Tensor] = []
    attention: list[torch.Tensor] = []
    handles = []
    for block in blocks(model):
        handles += [
            block.layernorm_before.register_forward_hook(lambda _m, _i, out: normed.append(out)),
            block.layernorm_after.register_forward_hook(lambda _m, _i, out: after.append(out)),
            block.register_forward_hook(lambda _m, _i, out: streams.append(out[0] if isinstance(out, tuple) else out)),
            block.attention.register_forward_hook(lambda _m, _i, out: attention.append(out[1])),
        ]
    try:
        logits = model(pixels).logits
    finally:
        for handle in handles:
            handle.remove()
    return Tapped(logits, normed, after, streams, attention)


def cam(features: torch.Tensor, gradient: torch.Tensor, kind: str, prefix: int = 1) -> torch.Tensor:
    """Grad-CAM, HiResCAM or LayerCAM over the patches, [B, h * w]: the first token is [CLS] and has no place."""
    features, gradient = features[:, prefix:], gradient[:, prefix:]
    if kind == "gradcam":
        gradient = gradient.mean(1, keepdim=True)
    elif kind == "layercam":
        gradient = gradient.relu()
    return (features * gradient).sum(-1).relu()


def relevance(attention: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], mean_rows: bool) -> torch.Tensor:
    """Chefer's relevance, R <- R + E_h ReLU(G * A) R, read at [CLS] or over the patches' mean, [B, h * w]."""
    first = attention[0]
    total = torch.eye(first.shape[-1]).expand(len(first), -1, -1)
    for weights, gradient in zip(attention, gradients, strict=True):
        total = total + (weights * gradient).relu().mean(1) @ total
    return read(total, mean_rows)


def read(square: torch.Tensor, mean_rows: bool) -> torch.Tensor:
    """The row of [CLS], or the mean of the patches' rows, without its first column: [B, h * w]."""
    return square[:, 1:, 1:].mean(1) if mean_rows else square[:, 0, 1:]


def class_maps(model: nn.Module, pixels: torch.Tensor, classes: torch.Tensor) -> dict[str, torch.Tensor]:
    """Every measured map of each image's class logit, [B, h * w], by name."""
    found = tapped(model, pixels)
    target = found.logits.gather(1, classes[:, None]).sum()
    if model.config.model_type == "swin":  # type: ignore[union-attr]
        return windowed_maps(found, target)
    depth = len(found.streams)
    wanted = [*found.attention, *found.normed, *found.streams[:-1]]
    gradients = torch.autograd.grad(target, wanted, allow_unused=True)
    by_attention, by_normed, by_stream = gradients[:depth], gradients[depth : 2 * depth], gradients[2 * depth :]
    mean_rows = model.config.model_type == "beit"  # type: ignore[union-attr]
    maps = {}
    for kind in CAMS:
        maps[f"F1 last block, {kind}"] = cam(found.normed[-1], by_normed[-1], kind)
    for kind in CAMS:
        # A head that reads [CLS] sees the patches of this stream through a layer norm alone, which no scaling of them
        # passes: features times gradient sum to zero, and HiResCAM is nothing but rounding.
        if mean_rows or kind != "hirescam":
            maps[f"F6 block before last, {kind}"] = cam(found.streams[-2], by_stream[-1], kind)
    for back in (1, 2):
        weights, gradient = found.attention[-back], by_attention[-back]
        name = "last block" if back == 1 else "block before last"
        maps[f"A, {name}"] = read(weights.mean(1), mean_rows)
        maps[f"A x ReLU(G), {name}"] = read((weights * gradient.relu()).mean(1), mean_rows)
    for count in (2, depth):
        name = "last 2 blocks" if count == 2 else "all blocks"
        maps[f"relevance, {name}"] = relevance(found.attention[-count:], by_attention[-count:], mean_rows)
    return {name: made.detach() for name, made in maps.items()}


def windowed_maps(found: Tapped, target: torch.Tensor) -> dict[str, torch.Tensor]:
    """The maps of a Swin's target: its patches see their window alone, so that no attention has a row for all."""
    sites = {
        "F1 last block": found.normed[-1],
        "F4 last block": found.after[-1],
        "F6 block before last": found.streams[-2],
    }
    gradients = torch.autograd.grad(target, list(sites.values()))
    return {
        f"{site}, {kind}": cam(features, gradient, kind, prefix=0).detach()
        for (site, features), gradient in zip(sites.items(), gradients, strict=True)
        for kind in CAMS
    }


def on_object(made: torch.Tensor, item: scenes.SceneObject) -> tuple[bool, bool]:
    """Whether a map's peak, after bilinear enlarging, lies on the object's mask, and in its box."""
    if made.min() == made.max():
        return False, False
    height, width = item.mask.shape
    side = round(len(made) ** 0.5)
    large = interpolate(made.view(1, 1, side, side), (height, width), mode="bilinear")
    y, x = divmod(int(large.flatten().argmax()), width)
    left, top, right, bottom = item.box
    return bool(item.mask[y, x]), left <= x < right and top <= y < bottom


def measure(model: nn.Module, held_out: Sequence[scenes.Scene], batch: int = 64) -> dict[str, Any]:
    """Recall of the present classes, and the pointing game of every map, over held-out scenes."""
    side, patch = model.config.image_size, model.config.patch_size  # type: ignore[union-attr]
    images = [picture(scene, side, patch).pixels for scene in held_out]  # type: ignore[arg-type]
    with torch.no_grad():
        logits = model(torch.cat(images)).logits
    whole, named, mass = 0, 0, 0.0
    for row, scene in zip(logits, held_out, strict=True):
        present = {LABEL_IDS[phrase] for phrase in scene.phrases()}
        found = len(present & set(row.topk(len(present)).indices.tolist()))
        whole, named = whole + (found == len(present)), named + found
        mass += float(row.softmax(0)[list(present)].sum())
    cases = [(image, item) for image, scene in zip(images, held_out, strict=True) for item in scene.objects]
    hits: dict[str, list[tuple[bool, bool]]] = {}
    for start in range(0, len(cases), batch):
        part = cases[start : start + batch]
        classes = torch.tensor([LABEL_IDS[item.phrase] for _, item in part])
        for name, maps in class_maps(model, torch.cat([image for image, _ in part]), classes).items():
            hits.setdefault(name, []).extend(on_object(m, item) for m, (_, item) in zip(maps, part, strict=True))
    shares = {name: torch.tensor(found).float().mean(0).tolist() for name, found in hits.items()}
    return {
        "topk_recall": round(whole / len(held_out), 3),
        "object_recall": round(named / len(cases), 3),
        "probability_of_present": round(mass / len(held_out), 3),
        "pointing_game": {name: round(mask, 3) for name, (mask, _) in shares.items()},
        "pointing_game_box": {name: round(box, 3) for name, (_, box) in shares.items()},
    }
