"""Small random models for the tests: every parameter random, so that no zero hides a path."""

from __future__ import annotations

from typing import Any

import torch
from transformers import BertTokenizer, BlipConfig, BlipForImageTextRetrieval, BlipProcessor
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


def processor(side: int = 32, longest: int = 16) -> BlipProcessor:
    return BlipProcessor(BlipImageProcessorPil(size={"height": side, "width": side}), tokenizer(longest))


def pixels(seed: int = 0, *, height: int = 32, width: int = 32, batch: int | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (3, height, width) if batch is None else (batch, 3, height, width)
    return torch.randn(shape, generator=generator)
