"""Weights of BLIP from LAVIS, under the names that Hugging Face transformers has for them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

__all__ = ["to_transformers", "transformers_name"]

_VISION = "visual_encoder."
_NAMES = {
    "cls_token": "embeddings.class_embedding",
    "pos_embed": "embeddings.position_embedding",
    "patch_embed.proj.": "embeddings.patch_embedding.",
    "norm.": "post_layernorm.",
    "blocks.": "encoder.layers.",
}
_IN_BLOCKS = {
    ".attn.proj.": ".self_attn.projection.",
    ".attn.": ".self_attn.",
    ".norm1.": ".layer_norm1.",
    ".norm2.": ".layer_norm2.",
}


def to_transformers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of a LAVIS `BlipITM`, `BlipCaption` or `BlipVQA`, for the transformers class of the same task.

    The tensors are the same, not copies. Buffers that transformers makes itself are left out, so load with
    `strict=False` and look at what is missing. The LayerNorms of LAVIS's image tower have eps 1e-6, and a transformers
    configuration should say so: `vision_config={"layer_norm_eps": 1e-6}`.

    Args:
        state: `model.state_dict()` of LAVIS, or the `model` entry of a checkpoint.
    """
    return {transformers_name(name): tensor for name, tensor in state.items() if not name.endswith("position_ids")}


def transformers_name(name: str) -> str:
    """The name in transformers of a parameter of LAVIS; those outside the image tower have one name in both."""
    if not name.startswith(_VISION):
        return name
    inner = name.removeprefix(_VISION)
    for ours, theirs in _NAMES.items():
        if inner.startswith(ours):
            inner = theirs + inner.removeprefix(ours)
            break
    if inner.startswith("encoder.layers."):
        for ours, theirs in _IN_BLOCKS.items():
            inner = inner.replace(ours, theirs)
    return f"vision_model.{inner}"
