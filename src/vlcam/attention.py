"""Attention with its gradient, from inside modules that never return it.

While a tapped attention module runs, a `TorchFunctionMode` watches for softmax and writes fused attention out as the
explicit softmax that it stands for. It is local to the thread, needs no flag of the model, and leaves every other
module its fast kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import dropout, linear, multi_head_attention_forward, scaled_dot_product_attention, softmax
from torch.overrides import TorchFunctionMode

from vlcam.anatomy import Inside, Tap
from vlcam.errors import CaptureError

__all__ = ["AttentionMode", "Edit", "Watched"]

Take = Callable[[Tap, Tensor], Tensor]

_BY_HEAD = 4  # axes of a mask by head
_SOFTMAX = (softmax, torch.softmax, Tensor.softmax)
_CASTS = (Tensor.to, Tensor.type, Tensor.type_as, Tensor.float, Tensor.half, Tensor.bfloat16)
_PRODUCTS = (torch.matmul, torch.bmm, Tensor.matmul, Tensor.bmm, Tensor.__matmul__)


@dataclass(frozen=True, eq=False)
class Edit:
    """How attention is computed in some modules instead of as the model does.

    Attributes:
        form: `one_head`: one head of full width, scores scaled by its own width; `identity`: each token attends to
            itself alone; `own`: as the model does.
        hidden: keys [B, K] that no query attends to.
        head_scale: for `one_head`, whether scores are scaled as those of the model's own heads are.
    """

    form: Literal["own", "one_head", "identity"] = "own"
    hidden: Tensor | None = None
    head_scale: bool = False


@dataclass(frozen=True, eq=False)
class Watched:
    """One attention module that runs: which tap reads its scores, its probabilities, ..., and how it is computed."""

    taps: Mapping[Inside, Tap] = field(default_factory=lambda: MappingProxyType({}))
    edit: Edit = Edit()


class AttentionMode(TorchFunctionMode):
    """Hands what is tapped inside the attention module on `stack` to `take`, and computes on with what it returns."""

    def __init__(self, take: Take) -> None:
        """Start with no module on the stack."""
        super().__init__()
        self._take = take
        self._probabilities: Tensor | None = None
        self._product: tuple[Tensor, Tensor] | None = None
        self.stack: list[Watched] = []

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
                return self._softmax(func, *args, **given)
            if func is scaled_dot_product_attention:
                return self._explicit(*args, **given)
            if func is multi_head_attention_forward:
                return self._multi_head(*args, **given)
            if func in _PRODUCTS and len(args) > 1:
                return self._multiplied(func, *args, **given)
        made = func(*args, **given)
        if self.stack and func in _CASTS and args and args[0] is self._probabilities:
            self._probabilities = made
        return made

    def _tap(self, what: Inside, tensor: Tensor) -> Tensor:
        tap = self.stack[-1].taps.get(what)
        return tensor if tap is None else self._take(tap, tensor)

    def _multiplied(self, func: Callable[..., Tensor], one: Tensor, other: Tensor, *args: Any, **given: Any) -> Tensor:
        """A product in attention that is written out: of queries with keys, or of probabilities with values."""
        edit, by_head = self.stack[-1].edit, one.ndim == other.ndim == _BY_HEAD
        joins = edit.form == "one_head" and by_head and other.shape[1] > 1
        if self._weights_values((one, other)):
            heads = other.shape[1]
            mixed = func(one, self._tap("values", _joined(other) if joins else other), *args, **given)
            return _split(mixed, heads) if joins else mixed
        self._product = one, other
        if not joins or one.shape[1] != other.shape[1]:
            return func(one, other, *args, **given)
        made = func(_joined(one), _joined(other.transpose(-1, -2)).transpose(-1, -2), *args, **given)
        # The model scales by the width of its own heads, before or after.
        return made if edit.head_scale else made / math.sqrt(other.shape[1])

    def _softmax(self, func: Callable[..., Tensor], scores: Tensor, *args: Any, **given: Any) -> Tensor:
        if self.stack[-1].edit.form == "one_head" and (scores.ndim != _BY_HEAD or scores.shape[1] > 1):
            raise CaptureError(
                "attention='one_head': the model writes its attention out in a way in which its heads, axis 1 of its "
                f"scores {tuple(scores.shape)}, cannot be joined; load it with fused attention where it has that "
                "(transformers: attn_implementation='sdpa')"
            )
        if self._product is not None:  # the scores come from the latest product of two tensors
            self._tap("queries", self._product[0])
            self._tap("keys", self._product[1].transpose(-1, -2))
            self._product = None
        plain = func(self._tap("scores", self._without_hidden(scores)), *args, **given)
        self._probabilities = self._tap("attention", self._formed(plain))
        return self._probabilities

    def _formed(self, probabilities: Tensor) -> Tensor:
        """The probabilities that the edit asks for."""
        if self.stack[-1].edit.form != "identity":
            return probabilities
        rows, columns = probabilities.shape[-2:]
        return torch.eye(rows, columns, dtype=probabilities.dtype, device=probabilities.device).expand_as(probabilities)

    def _without_hidden(self, scores: Tensor) -> Tensor:
        hidden = self.stack[-1].edit.hidden
        return scores if hidden is None else scores.masked_fill(hidden[:, None, None, :], -math.inf)

    def _weights_values(self, args: tuple[Any, ...]) -> bool:
        """Whether a product of two tensors is that of the latest probabilities with the values."""
        latest, watched = self._probabilities, self.stack[-1]
        wanted = "values" in watched.taps or watched.edit.form == "one_head"
        if not wanted or latest is None or not isinstance(args[0], Tensor):
            return False
        # Dropout that does nothing, or a change of type that changes nothing, may hand on another object.
        return args[0].shape == latest.shape and args[0].data_ptr() == latest.data_ptr()

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
        heads = query.shape[1]
        if self.stack[-1].edit.form == "one_head":
            if not self.stack[-1].edit.head_scale:
                scale = None  # that of the width of one head
            elif scale is None:
                scale = 1 / math.sqrt(query.shape[-1])
            query, key, value = (_joined(each) for each in (query, key, value))
            attn_mask = None if attn_mask is None else _same_for_all(attn_mask)
        query, key, value = self._tap("queries", query), self._tap("keys", key), self._tap("values", value)
        scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        if is_causal:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(future, -math.inf)
        if attn_mask is not None:
            hidden = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, -math.inf) if hidden else scores + attn_mask
        scores = self._tap("scores", self._without_hidden(scores))
        plain = self._formed(scores.softmax(-1) if attn_mask is None else _as_fused(scores))
        mixed = dropout(self._tap("attention", plain), dropout_p, training=dropout_p > 0) @ value
        return mixed if mixed.shape[1] == heads else _split(mixed, heads)

    def _multi_head(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        embed_dim_to_check: int,
        num_heads: int,
        in_proj_weight: Tensor | None,
        in_proj_bias: Tensor | None,
        bias_k: Tensor | None,
        bias_v: Tensor | None,
        add_zero_attn: bool,
        dropout_p: float,
        out_proj_weight: Tensor,
        out_proj_bias: Tensor | None,
        training: bool = True,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        use_separate_proj_weight: bool = False,
        q_proj_weight: Tensor | None = None,
        k_proj_weight: Tensor | None = None,
        v_proj_weight: Tensor | None = None,
        static_k: Tensor | None = None,
        static_v: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """`nn.MultiheadAttention` in its documented meaning; tokens come first, [tokens, batch, width]."""
        del is_causal  # a hint: the mask is always given with it
        if bias_k is not None or bias_v is not None or add_zero_attn or static_k is not None or static_v is not None:
            where = next(iter(self.stack[-1].taps.values()), "attention")
            raise CaptureError(
                f"{where}: nn.MultiheadAttention with bias_k, bias_v, add_zero_attn or static keys adds a key that is "
                "no token; such a module cannot be tapped"
            )
        weights = (
            (q_proj_weight, k_proj_weight, v_proj_weight)
            if use_separate_proj_weight
            else torch.as_tensor(in_proj_weight).chunk(3)
        )
        biases = (None, None, None) if in_proj_bias is None else in_proj_bias.chunk(3)
        width = embed_dim_to_check // num_heads
        if self.stack[-1].edit.form == "one_head":
            num_heads = 1
            width = width if self.stack[-1].edit.head_scale else embed_dim_to_check
        batched = query.ndim == 3
        sources = [each if batched else each.unsqueeze(1) for each in (query, key, value)]
        heads = [
            linear(source, torch.as_tensor(weight), bias)
            .view(*source.shape[:2], num_heads, embed_dim_to_check // num_heads)
            .permute(1, 2, 0, 3)
            for source, weight, bias in zip(sources, weights, biases, strict=True)
        ]
        seen: list[Tensor] = []
        if self.stack[-1].edit.form == "one_head" and attn_mask is not None and attn_mask.ndim == 3:
            attn_mask = _same_for_all(attn_mask.view(len(heads[0]), -1, *attn_mask.shape[1:]))[:, 0]
        mask = _added_mask(attn_mask, key_padding_mask, heads[0])
        mixed = self._attend(heads, mask, width, dropout_p if training else 0.0, seen, fused=not need_weights)
        joined = self._tap("heads", mixed.permute(0, 2, 1, 3).flatten(2))
        projected = linear(joined.transpose(0, 1), out_proj_weight, out_proj_bias)
        returned = seen[0].mean(1) if average_attn_weights else seen[0]
        if not batched:
            projected, returned = projected.squeeze(1), returned.squeeze(0)
        return projected, returned if need_weights else None

    def _attend(
        self,
        heads: list[Tensor],
        mask: Tensor | None,
        width: int,
        dropout_p: float,
        seen: list[Tensor],
        *,
        fused: bool,
    ) -> Tensor:
        query, key, value = heads
        query, key, value = self._tap("queries", query), self._tap("keys", key), self._tap("values", value)
        scores = query @ key.transpose(-2, -1) / math.sqrt(width)
        scores = self._tap("scores", self._without_hidden(scores if mask is None else scores + mask))
        plain = _as_fused(scores) if fused and mask is not None else scores.softmax(-1)
        probabilities = self._tap("attention", self._formed(plain))
        kept = dropout(probabilities, dropout_p, training=dropout_p > 0)
        seen.append(kept)
        return kept @ value


def _joined(heads: Tensor) -> Tensor:
    """One head of full width, [B, 1, N, H * d], from [B, H, N, d]."""
    return heads.transpose(1, 2).flatten(2)[:, None]


def _split(mixed: Tensor, heads: int) -> Tensor:
    """What several heads would give, [B, H, N, d], from what one head of full width gives, [B, 1, N, H * d]."""
    return mixed[:, 0].view(len(mixed), mixed.shape[2], heads, -1).transpose(1, 2)


def _same_for_all(mask: Tensor) -> Tensor:
    """The mask of one head, [B, 1, Q, K], from one that is the same for all heads, [B, H, Q, K].

    Raises:
        CaptureError: it is not.
    """
    if mask.ndim < _BY_HEAD or mask.shape[1] == 1:
        return mask
    if not bool((mask == mask[:, :1]).all()):
        raise CaptureError(
            "attention='one_head': each head of this model has a bias or mask of its own, so that they cannot be joined"
        )
    return mask[:, :1]


def _as_fused(scores: Tensor) -> Tensor:
    """The softmax of masked scores: where all keys are masked, zeros as in the fused kernel, not NaN."""
    nowhere = scores.isneginf().all(-1, keepdim=True)
    return scores.masked_fill(nowhere, 0).softmax(-1).masked_fill(nowhere, 0)


def _added_mask(attn_mask: Tensor | None, key_padding_mask: Tensor | None, query: Tensor) -> Tensor | None:
    """Both masks of `nn.MultiheadAttention` as one that is added to scores [B, H, Q, K]; True hides a key there."""
    masks = []
    if attn_mask is not None:
        by_head = attn_mask.ndim == 3
        masks.append(attn_mask.view(*query.shape[:2], *attn_mask.shape[1:]) if by_head else attn_mask)
    if key_padding_mask is not None:
        masks.append(key_padding_mask.reshape(-1, 1, 1, key_padding_mask.shape[-1]))
    added = [
        torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill(mask, -math.inf)
        if mask.dtype == torch.bool
        else mask
        for mask in masks
    ]
    return None if not added else added[0] if len(added) == 1 else added[0] + added[1]
