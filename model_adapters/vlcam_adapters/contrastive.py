"""Image and text embeddings side by side: their cosines, and the logits that a temperature makes of them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from vlcam.adapter import Inputs
from vlcam.errors import AdapterError, InputError

__all__ = ["NO_FUSION", "pixel_statistics", "similarities"]

_CHANNELS = 3
NO_FUSION = (
    "it has no cross-attention; its cross-modal evidence is the cosine of its two towers, whose maps the streams "
    "vision and text give"
)


def similarities(images: Tensor, inputs: Inputs, *, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Cosines and logits of image embeddings with every text, [B, T, 2], from unit vectors.

    Args:
        images: [B, E], of unit length: one row per pair, or one per image.
        inputs: the pairs, with unit text embeddings `encoded.every` [T, E] and `encoded.own` [P, E].
        scale: what cosines are multiplied by, as the model has learned it.
        bias: what is added then, in a model that has one.

    Returns:
        The cosines [..., 0] and scale * cosine + bias [..., 1]. With one row per pair, that of the pair's own text
        depends on `encoded.own`, whose gradient so is the pair's alone.
    """
    encoded = inputs.encoded
    if encoded is None:
        raise InputError("an image is scored with texts, but no text was given")
    cosines = images @ encoded.every.T
    if len(images) == len(inputs.text_of):
        own = (images * encoded.own).sum(-1, keepdim=True)
        index = torch.tensor(inputs.text_of, device=images.device)[:, None]
        cosines = cosines.scatter(1, index, own)
    logits = cosines * scale
    return torch.stack((cosines, logits if bias is None else logits + bias), -1)


def pixel_statistics(name: str, values: Any) -> list[float] | None:
    """A mean or a standard deviation as the user gave it, checked.

    Raises:
        AdapterError: not three finite numbers, or a deviation that is not above zero.
    """
    if values is None:
        return None
    whole = isinstance(values, (list, tuple)) and len(values) == _CHANNELS
    numbers = whole and all(
        isinstance(n, (int, float)) and not isinstance(n, bool) and math.isfinite(n) for n in values
    )
    if not numbers or (name == "image_std" and min(values) <= 0):
        above = ", above zero" if name == "image_std" else ""
        raise AdapterError(f"{name}={values!r}: give three numbers{above}, one per channel")
    return [float(n) for n in values]
