"""Blocks of text that look at the image, as BLIP has them in every library: a BERT with cross-attention."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

from vlcam.anatomy import Block, Reading

__all__ = ["LACKS_NORMS", "POST_NORM", "fusion_block", "share_rows"]

POST_NORM = "the text blocks are post-norm: attention and FFN read the residual stream, not a LayerNorm of their own"
LACKS_NORMS = f"fusion lacks F1 and F4: {POST_NORM}"
_TEXT_ALONE = "this block reads text alone, it has no cross-attention"


def fusion_block(layer: Any) -> Block:
    """The sites of a block; one that has no `crossattention` reads text alone.

    Args:
        layer: the block. The image tokens come to its cross-attention as `encoder_hidden_states`.
    """
    sites = {
        "F2": Reading(layer.attention.self, "attention"),
        "F3_HEADS": Reading(layer.attention.self, "output"),
        "F3": Reading(layer.attention.output.dense, "output"),
    }
    lacks = {"F1": POST_NORM, "F4": POST_NORM}
    if hasattr(layer, "crossattention"):
        sites["CROSS"] = Reading(layer.crossattention.self, "attention")
        sites["CONTEXT"] = Reading(layer.crossattention.self, "keyword", "encoder_hidden_states")
    else:
        lacks |= dict.fromkeys(("CROSS", "CONTEXT"), _TEXT_ALONE)
    sites |= {"F5": Reading(layer.output.dense, "output"), "F6": Reading(layer, "output")}
    return Block(sites, lacks)


def share_rows(projection: nn.Module) -> list[torch.utils.hooks.RemovableHandle]:
    """Hooks that project one row for a batch whose rows are one tensor expanded, and expand the result."""
    rows: list[int] = []
    owner = threading.get_ident()

    def keep_one(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if threading.get_ident() != owner:
            return args
        (tokens,) = args
        # A row of its own gradient per text must not be shared.
        shared = len(tokens) > 1 and tokens.stride(0) == 0 and not tokens.requires_grad
        rows.append(len(tokens) if shared else 0)
        return (tokens[:1],) if shared else args

    def give_all(_: nn.Module, __: tuple[Tensor, ...], output: Tensor) -> Tensor:
        count = rows.pop() if threading.get_ident() == owner else 0
        return output.expand(count, *output.shape[1:]) if count else output

    return [projection.register_forward_pre_hook(keep_one), projection.register_forward_hook(give_all)]
