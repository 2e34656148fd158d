"""Likelihoods of texts that a decoder writes, token by token."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = ["of_next"]


def of_next(logits: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """Log-probability of each next token given those up to it, [P, N], at the row that tells it.

    Row t tells token t + 1, the end token too. It is 0 where that is padding, or there is none.

    Args:
        logits: what a decoder gives for each token, [P, N, V].
        ids: the tokens, [P, N].
        mask: which of them are no padding, [P, N].
    """
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    chosen = exact[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    return pad(chosen.masked_fill(mask[:, 1:] == 0, 0), (0, 1))
