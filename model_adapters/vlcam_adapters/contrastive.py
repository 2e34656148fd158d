"""Image and text embeddings side by side: their cosines, and the logits that a temperature makes of them."""

from __future__ import annotations

import torch
from torch import Tensor

from vlcam.adapter import Inputs
from vlcam.errors import InputError


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
