"""A CLIP of transformers as one of open_clip: the same weights under open_clip's names, in a model of the same sizes.

open_clip keeps the names of OpenAI's CLIP, so that the converted weights fit both. Only CLIPs whose two towers are
plain transformers can be converted: those that `transformers.CLIPModel` holds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from vlcam.errors import AdapterError

__all__ = ["open_clip_twin", "to_open_clip"]

_TOWERS = {"vision_model.": "visual.", "text_model.": ""}
_PLAIN = {
    "logit_scale": "logit_scale",
    "vision_model.embeddings.class_embedding": "visual.class_embedding",
    "vision_model.embeddings.patch_embedding.weight": "visual.conv1.weight",
    "vision_model.embeddings.position_embedding.weight": "visual.positional_embedding",
    "vision_model.pre_layrnorm.weight": "visual.ln_pre.weight",
    "vision_model.pre_layrnorm.bias": "visual.ln_pre.bias",
    "vision_model.post_layernorm.weight": "visual.ln_post.weight",
    "vision_model.post_layernorm.bias": "visual.ln_post.bias",
    "text_model.embeddings.token_embedding.weight": "token_embedding.weight",
    "text_model.embeddings.position_embedding.weight": "positional_embedding",
    "text_model.final_layer_norm.weight": "ln_final.weight",
    "text_model.final_layer_norm.bias": "ln_final.bias",
}
# open_clip multiplies by these from the right, transformers holds them as linear layers.
_TURNED = {"visual_projection.weight": "visual.proj", "text_projection.weight": "text_projection"}
_IN_BLOCK = {
    "self_attn.out_proj": "attn.out_proj",
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
}
_BLOCK = re.compile(r"(vision_model\.|text_model\.)encoder\.layers\.(\d+)\.(.+)\.(weight|bias)")
_STACKED = re.compile(r"self_attn\.([qkv])_proj")
_ACTIVATIONS = {"quick_gelu": True, "gelu": False}
_LEGACY_END = 2  # in configurations of before 2023, for which transformers pools at the highest id


def to_open_clip(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a `transformers.CLIPModel` under the names, and in the shapes, of open_clip's `CLIP`.

    Queries, keys and values become one stacked weight; the projections are transposed. What is not stacked shares
    its memory with what was given.

    Args:
        state_dict: all weights of the model, as `model.state_dict()` gives them.

    Returns:
        The weights as `open_clip.model.CLIP.load_state_dict` takes them.

    Raises:
        AdapterError: names that a `CLIPModel` does not have, or too few of its weights.
    """
    made: dict[str, Tensor] = {}
    stacks: dict[str, dict[str, Tensor]] = {}
    unknown = []
    for name, value in state_dict.items():
        if name.endswith("embeddings.position_ids"):
            continue  # older versions of transformers saved them; they count up from 0 and nothing else
        block = _BLOCK.fullmatch(name)
        if name in _PLAIN:
            made[_PLAIN[name]] = value
        elif name in _TURNED:
            made[_TURNED[name]] = value.T
        elif block is None or not _into_block(block, value, made, stacks):
            unknown.append(name)
    if unknown:
        raise AdapterError(f"no weights of a transformers.CLIPModel: {', '.join(sorted(unknown)[:5])}")
    lacking = sorted((_PLAIN.keys() | _TURNED.keys()) - state_dict.keys())
    lacking += [f"{name} (its {'qkv'[len(parts) :]})" for name, parts in stacks.items() if len(parts) < 3]
    if lacking:
        raise AdapterError(f"the weights lack {len(lacking)} that every CLIPModel has: {', '.join(lacking[:5])}")
    return made | {name: torch.cat([parts[which] for which in "qkv"]) for name, parts in stacks.items()}


def _into_block(
    found: re.Match[str], value: Tensor, made: dict[str, Tensor], stacks: dict[str, dict[str, Tensor]]
) -> bool:
    """Put a weight of a block where it belongs; False where a block has none of that name."""
    tower, number, part, kind = found.groups()
    block = f"{_TOWERS[tower]}transformer.resblocks.{number}."
    stacked = _STACKED.fullmatch(part)
    if stacked is not None:
        stacks.setdefault(f"{block}attn.in_proj_{kind}", {})[stacked[1]] = value
    elif part in _IN_BLOCK:
        made[f"{block}{_IN_BLOCK[part]}.{kind}"] = value
    else:
        return False
    return True


def open_clip_twin(hf_model: Any) -> Any:
    """An open_clip `CLIP` with the sizes and the weights of a `transformers.CLIPModel`, in eval mode.

    Both give the same embeddings and logits for the same pixels and the same ids. open_clip wants texts at the full
    context length and pads them with 0; what stands behind the end of a text changes nothing in either model.

    Args:
        hf_model: the model to convert; it is not changed, and shares no weights with its twin.

    Returns:
        An `open_clip.model.CLIP`, of the same dtype and on the same device.

    Raises:
        AdapterError: open_clip is not installed, or has no model that computes the same.
    """
    config = hf_model.config
    if config.model_type != "clip":
        raise AdapterError(f"a model of type {config.model_type!r} has no twin in open_clip: give a CLIPModel")
    try:
        open_clip = import_module("open_clip.model")
    except ImportError:
        raise AdapterError("open_clip is not installed: pip install open_clip_torch") from None
    weights = to_open_clip(hf_model.state_dict())
    twin = open_clip.CLIP(
        config.projection_dim,
        open_clip.CLIPVisionCfg(**_vision(config.vision_config)),
        open_clip.CLIPTextCfg(**_text(config.text_config)),
        quick_gelu=_activation(config),
    )
    twin.load_state_dict(weights)
    return twin.to(hf_model.device, hf_model.dtype).eval()


def _vision(config: Any) -> dict[str, Any]:
    """The arguments of `CLIPVisionCfg`."""
    if config.num_channels != 3:
        raise AdapterError(f"num_channels={config.num_channels}: open_clip's CLIPs see images of 3 channels")
    return {
        **_sizes(config),
        "head_width": config.hidden_size // config.num_attention_heads,
        "image_size": _side(config.image_size, "image_size"),
        "patch_size": _side(config.patch_size, "patch_size"),
    }


def _text(config: Any) -> dict[str, Any]:
    """The arguments of `CLIPTextCfg`, among them where the end of a text is found."""
    end = config.eos_token_id
    if not isinstance(end, int):
        raise AdapterError(f"eos_token_id={end!r}: open_clip finds the end of a text by one id")
    highest = end in (_LEGACY_END, config.vocab_size - 1)
    return {
        **_sizes(config),
        "heads": config.num_attention_heads,
        "context_length": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "pool_type": "argmax" if highest else "eos",
        "eos_id": end,
    }


def _sizes(config: Any) -> dict[str, Any]:
    """What both towers are told in the same way."""
    return {
        "width": config.hidden_size,
        "layers": config.num_hidden_layers,
        # open_clip rounds width times ratio down, which must not end one below the width that is meant.
        "mlp_ratio": (config.intermediate_size + 0.5) / config.hidden_size,
        "norm_kwargs": {"eps": config.layer_norm_eps},
    }


def _activation(config: Any) -> bool:
    """Whether both towers use the quick approximation of GELU.

    Raises:
        AdapterError: they differ, or use something else.
    """
    names = {config.vision_config.hidden_act, config.text_config.hidden_act}
    if len(names) != 1 or not names <= _ACTIVATIONS.keys():
        raise AdapterError(
            f"hidden_act is {' and '.join(sorted(names))}: open_clip has one for both towers, gelu or quick_gelu"
        )
    return _ACTIVATIONS[names.pop()]


def _side(size: Any, name: str) -> int:
    """One number for a square.

    Raises:
        AdapterError: more than one number.
    """
    if not isinstance(size, int):
        raise AdapterError(f"{name}={size}: only squares are converted, and their side is one whole number")
    return size
