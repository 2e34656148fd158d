"""Attention probabilities with their gradient, from inside modules that never return them.

While a tapped attention module runs, a `TorchFunctionMode` watches for softmax and writes fused attention out as the
explicit softmax that it stands for. It is local to the thread, needs no flag of the model, and leaves every other
module its fast kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout, scaled_dot_product_attention, softmax
from torch.overrides import TorchFunctionMode

from vlcam.anatomy import Tap

__all__ = ["AttentionMode"]

Take = Callable[[Tap, Tensor], Tensor]

_SOFTMAX = (softmax, torch.softmax, Tensor.softmax)


class AttentionMode(TorchFunctionMode):
    """Hands the probabilities of the attention modules on `stack` to `take`, and computes on with what it returns."""

    def __init__(self, take: Take) -> None:
        """Start with no module on the stack."""
        super().__init__()
        self._take = take
        self.stack: list[Tap] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Pass everything through but softmax and fused attention inside a tapped module."""
        given = dict(kwargs or {})
        if self.stack:
            if func in _SOFTMAX:
                return self._take(self.stack[-1], func(*args, **given))
            if func is scaled_dot_product_attention:
                return self._explicit(*args, **given)
        return func(*args, **given)

    def _explicit(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """`scaled_dot_product_attention` in its documented meaning, with the probabilities in the open."""
        if enable_gqa:
            groups = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
        scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        if is_causal:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(future, -math.inf)
        if attn_mask is not None:
            hidden = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, -math.inf) if hidden else scores + attn_mask
        # A row whose keys are all masked gives zeros in the fused kernel, and would give NaN in a plain softmax.
        nowhere = scores.isneginf().all(-1, keepdim=True)
        plain = scores.masked_fill(nowhere, 0).softmax(-1).masked_fill(nowhere, 0)
        probabilities = self._take(self.stack[-1], plain)
        return dropout(probabilities, dropout_p, training=dropout_p > 0) @ value
