"""Small random models for the tests: every parameter random, so that no zero hides a path. And a model's state."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn
from transformers import (
    BeitConfig,
    BeitForImageClassification,
    BertTokenizer,
    BlipConfig,
    BlipForImageTextRetrieval,
    BlipProcessor,
    DeiTConfig,
    DeiTForImageClassification,
    DeiTForImageClassificationWithTeacher,
    Dinov2Config,
    Dinov2ForImageClassification,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

PIECES = (
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "circle", "and", "blue", "dog", "on", "the", "grass"),
    *("un", "##aff", "##able", ",", "ball", "is"),
)


def tokenizer(longest: int = 16) -> BertTokenizer:
    return BertTokenizer(vocab={piece: i for i, piece in enumerate(PIECES)}, model_max_length=longest)


def blip(*, side: int = 32, patch: int = 8, layers: int = 3, heads: int = 2, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = BlipConfig(
        text_config={
            "vocab_size": len(PIECES) + 2,
            "hidden_size": 16,
            "encoder_hidden_size": 12,
            "intermediate_size": 24,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "max_position_embeddings": 16,
            "pad_token_id": 0,
        },
        vision_config={
            "hidden_size": 12,
            "intermediate_size": 24,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "image_size": side,
            "patch_size": patch,
        },
        image_text_hidden_size=8,
    )
    model = BlipForImageTextRetrieval(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            around = 1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0
            parameter.copy_(around + torch.randn_like(parameter) * 0.35)
    return model


COMMON = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 5,
}
FFN = {"intermediate_size": 64}
_RELATIVE = {"use_relative_position_bias": True}
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "vit": (ViTForImageClassification, ViTConfig, FFN),
    "deit": (DeiTForImageClassification, DeiTConfig, FFN),
    "deit-teacher": (DeiTForImageClassificationWithTeacher, DeiTConfig, FFN),
    "dinov2": (Dinov2ForImageClassification, Dinov2Config, {"mlp_ratio": 2}),
    "dinov2-registers": (Dinov2WithRegistersForImageClassification, Dinov2WithRegistersConfig, {"mlp_ratio": 2}),
    "dinov2-swiglu": (Dinov2ForImageClassification, Dinov2Config, {"use_swiglu_ffn": True}),
    "beit": (BeitForImageClassification, BeitConfig, {**FFN, **_RELATIVE, "use_absolute_position_embeddings": True}),
    "beit-shared": (BeitForImageClassification, BeitConfig, {**FFN, "use_shared_relative_position_bias": True}),
    "beit-cls": (BeitForImageClassification, BeitConfig, {**FFN, **_RELATIVE, "use_mean_pooling": False}),
    "beit-plain": (BeitForImageClassification, BeitConfig, {**FFN, "layer_scale_init_value": 0.0}),
}
PREFIX = {
    "deit": ("cls", "distillation"),
    "deit-teacher": ("cls", "distillation"),
    "dinov2-registers": ("cls", "register", "register", "register", "register"),
}
"""Tokens before the patches; of the kinds that are not named here, the class token alone."""
ASKS = ("vit", "deit", "deit-teacher")
"""Kinds that take other image sizes only with `interpolate_pos_encoding`."""
LIVE = {
    "vit": [0],
    "deit": [0],
    "deit-teacher": [0, 1],
    "dinov2": range(17),
    "dinov2-swiglu": range(17),
    "dinov2-registers": [0, *range(5, 21)],
    "beit": range(1, 17),
    "beit-shared": range(1, 17),
    "beit-plain": range(1, 17),
    "beit-cls": [0],
}
"""Which tokens of a 4 x 4 grid have a gradient behind the last block's attention, for the sites F3_HEADS to F6."""


def classifier(kind: str, **changes: Any) -> Any:
    """A random classifier of Hugging Face transformers; the changes are to its configuration."""
    model, config, extra = KINDS[kind]
    torch.manual_seed(0)
    module = model(config(**{**COMMON, **extra, **changes})).eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            around = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.copy_(around + torch.randn_like(parameter) * (0.05 if name.endswith("bias") else 0.2))
    return module


def processor(side: int = 32, longest: int = 16) -> BlipProcessor:
    return BlipProcessor(BlipImageProcessorPil(size={"height": side, "width": side}), tokenizer(longest))


def pixels(seed: int = 0, *, height: int = 32, width: int = 32, batch: int | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (3, height, width) if batch is None else (batch, 3, height, width)
    return torch.randn(shape, generator=generator)


def state(module: nn.Module) -> dict[str, Any]:
    """Everything about a model, and about torch, that a caller could notice."""
    parts, parameters = list(module.modules()), list(module.parameters())
    return {
        "grads": [id(parameter.grad) for parameter in parameters],
        "grad values": [None if parameter.grad is None else parameter.grad.clone() for parameter in parameters],
        "requires": [parameter.requires_grad for parameter in parameters],
        "training": [part.training for part in parts],
        "hooks": [_hooks(part) for part in parts],
        "attention": [part.config._attn_implementation for part in parts if hasattr(part, "config")],
        "weights": [tensor.clone() for tensor in module.state_dict().values()],
        "buffers": [buffer.clone() for buffer in module.buffers()],
        "forward": [part.__dict__.get("forward") for part in parts],
        "torch rng": torch.get_rng_state().clone(),
        "python rng": random.getstate(),
        "grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
    }


def _hooks(part: nn.Module) -> tuple[int, ...]:
    return (
        len(part._forward_hooks),
        len(part._forward_pre_hooks),
        len(part._backward_hooks),
        len(part._backward_pre_hooks),
        len(part._forward_hooks_always_called),
    )


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Two states of `state` are one."""
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert _equal(value, after[key]), key


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, list):
        return len(one) == len(other) and all(_equal(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)
