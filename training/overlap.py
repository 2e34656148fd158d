"""Measures a segmenter in plain torch: how its classes overlap the scenes' masks, and where its maps point."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import interpolate

from training.maps import CAMS, cam, on_object
from training.pictures import LABEL_IDS, picture
from vlcam import scenes


def truth(scene: scenes.Scene) -> torch.Tensor:
    """The class of every pixel, [H, W]: 0 for background, else one more than the classifiers' class."""
    found = np.zeros(scene.objects[0].mask.shape, np.int64)
    for item in scene.objects:
        found[item.mask] = LABEL_IDS[item.phrase] + 1
    return torch.from_numpy(found)


def confusion(wanted: torch.Tensor, found: torch.Tensor, classes: int) -> torch.Tensor:
    """How many pixels of each wanted class (rows) were found to be each class (columns)."""
    return torch.bincount(wanted.flatten() * classes + found.flatten(), minlength=classes**2).view(classes, classes)


def agreement(table: torch.Tensor) -> dict[str, float]:
    """Overlap and accuracy out of a table of pixels; the means over classes take those that are there."""
    right, there = table.diagonal().float(), table.sum(1).float()
    union = there + table.sum(0) - right
    present = there > 0
    overlaps = right[present] / union[present]
    return {
        "mean_iou": round(float(overlaps.mean()), 3),
        "mean_iou_objects": round(float(overlaps[1:].mean()), 3),
        "background_iou": round(float(overlaps[0]), 3),
        "pixel_accuracy": round(float(right.sum() / there.sum()), 3),
        "pixel_accuracy_objects": round(float(right[1:].sum() / there[1:].sum()), 3),
    }


def class_maps(model: Any, pixels: torch.Tensor, classes: torch.Tensor) -> dict[str, torch.Tensor]:
    """Maps of each image's class, [B, h * w], by name: its logit summed over the places where it is the highest.

    They are made at the deepest block that the decoder reads.
    """
    number = deepest(model.config)
    block = model.beit.layers[number]
    sites: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Any:
        return lambda _module, _inputs, out: sites.setdefault(name, out)

    handles = [
        block.layernorm_before.register_forward_hook(keep("F1")),
        block.layernorm_after.register_forward_hook(keep("F4")),
    ]
    try:
        out = model(pixels, output_hidden_states=True)
    finally:
        for handle in handles:
            handle.remove()
    sites["F6"] = out.hidden_states[number + 1]
    own = out.logits.argmax(1) == classes[:, None, None]
    target = (out.logits[torch.arange(len(classes)), classes] * own).sum()
    gradients = torch.autograd.grad(target, list(sites.values()))
    return {
        f"{site} block {number}, {kind}": cam(features, gradient, kind).detach()
        for (site, features), gradient in zip(sites.items(), gradients, strict=True)
        for kind in CAMS
    }


def deepest(config: Any) -> int:
    """The last block that a logit depends on: the decoder reads what goes into the blocks of `out_indices`."""
    return int(max(config.out_indices)) - 2


def dead(model: Any, pixels: torch.Tensor) -> list[int]:
    """The blocks whose weights get no gradient from any logit, found by asking for it."""
    parameters = [next(iter(block.parameters())) for block in model.beit.layers]
    gradients = torch.autograd.grad(model(pixels).logits.sum(), parameters, allow_unused=True)
    return [number for number, gradient in enumerate(gradients) if gradient is None]


def measure(model: nn.Module, held_out: Sequence[scenes.Scene], batch: int = 64) -> dict[str, Any]:
    """Overlap with the masks at the scenes' own size, and the pointing game of every map, over held-out scenes."""
    config: Any = model.config
    images = [picture(scene, config.image_size, config.patch_size).pixels for scene in held_out]
    table = torch.zeros(config.num_labels, config.num_labels, dtype=torch.long)
    for start in range(0, len(images), batch):
        with torch.no_grad():
            logits = model(torch.cat(images[start : start + batch])).logits
        wanted = torch.stack([truth(scene) for scene in held_out[start : start + batch]])
        large = interpolate(logits, wanted.shape[1:], mode="bilinear")
        table += confusion(wanted, large.argmax(1), config.num_labels)
    cases = [(image, item) for image, scene in zip(images, held_out, strict=True) for item in scene.objects]
    hits: dict[str, list[tuple[bool, bool]]] = {}
    for start in range(0, len(cases), batch):
        part = cases[start : start + batch]
        classes = torch.tensor([LABEL_IDS[item.phrase] + 1 for _, item in part])
        for name, maps in class_maps(model, torch.cat([image for image, _ in part]), classes).items():
            hits.setdefault(name, []).extend(on_object(m, item) for m, (_, item) in zip(maps, part, strict=True))
    shares = {name: torch.tensor(found).float().mean(0).tolist() for name, found in hits.items()}
    return {
        **agreement(table),
        "blocks_without_gradient": dead(model, images[0]),
        "pointing_game": {name: round(mask, 3) for name, (mask, _) in shares.items()},
        "pointing_game_box": {name: round(box, 3) for name, (_, box) in shares.items()},
    }
