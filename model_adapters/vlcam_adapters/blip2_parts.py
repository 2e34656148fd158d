"""BLIP-2's Q-Former with its two retrieval heads, as it is in every library.

Learned queries look at the image, in every second block; words never do. In the matching head words and queries attend
to each other, in the contrastive one they meet in a cosine alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from vlcam.anatomy import Block, Reading, StreamAnatomy
from vlcam.targets import HeadKind
from vlcam_adapters.blip_blocks import POST_NORM

__all__ = ["HEADS", "LACKS", "MISSING", "NOTES", "TARGETS", "QFormer", "pooler"]

MISSING = "BLIP-2 scores an image with a text, but no text was given"
_NO_WORDS = (
    "no word of BLIP-2 looks at the image: its cross-attention is that of learned queries, stream 'pooler', and there "
    "is no map per word"
)
LACKS: Mapping[str, str] = MappingProxyType(
    {"fusion": _NO_WORDS, "text": "the Q-Former reads the text, together with its queries"}
)
HEADS: Mapping[str, HeadKind] = MappingProxyType({"itm": "binary", "contrastive": "cosine"})
TARGETS = ("itm: logit, probability, log-probability, margin", "contrastive: cosine of the query that fits best")
NOTES = (
    _NO_WORDS,
    "itm averages over the queries; of contrastive only the best one has a gradient behind the last block",
    "F2 of pooler belongs to itm: contrastive runs the Q-Former twice, on the image and on the text",
)


@dataclass(frozen=True, eq=False)
class QFormer:
    """A Q-Former and what is behind it.

    Attributes:
        run: called with ids [P, N] or None, queries [P, Q, D] or None, the mask of both or None, and what is seen of
            the image by the names that cross-attention has for it; gives the last block's rows, those of queries first.
        queries: the learned queries, [1, Q, D].
        itm_head: from the row of a query to (no match, match).
        image: projects the rows of queries for the cosine.
        text: projects the first row of a text for the cosine.
    """

    run: Callable[..., Tensor]
    queries: Tensor
    itm_head: nn.Module
    image: nn.Module
    text: nn.Module

    def head(self, name: str, tokens: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        """`itm`: logits [P, 2] of (no match, match), mean over queries. `contrastive`: the best query's cosine [P].

        Args:
            name: which of the two.
            tokens: image tokens of P pairs, [P, K, D].
            ids: texts of the pairs, [P, N].
            mask: which ids are no padding, [P, N].
        """
        queries = self.queries.expand(len(tokens), -1, -1)
        seen = {"encoder_hidden_states": tokens, "encoder_attention_mask": _everywhere(tokens, mask)}
        if name == "itm":
            joint = torch.cat((_everywhere(queries, mask), mask), 1)
            rows = self.run(ids, queries, joint, **seen)[:, : queries.shape[1]]
            logits: Tensor = self.itm_head(rows).mean(1)
            return logits
        images = normalize(self.image(self.run(None, queries, None, **seen)), dim=-1)
        text = normalize(self.text(self.run(ids, None, mask)[:, 0]), dim=-1)
        return torch.einsum("pqe,pe->pq", images, text).amax(1)


def pooler(layers: Sequence[Any], inner: str, config: Any, queries: int) -> StreamAnatomy:
    """The Q-Former as a stream.

    Args:
        layers: its blocks, each with `attention`, some with `crossattention`.
        inner: the name of what computes attention in either.
        config: has `hidden_size` and `num_attention_heads`.
        queries: how many there are.
    """
    return StreamAnatomy(
        "pooler",
        tuple(_block(layer, inner) for layer in layers),
        config.hidden_size,
        config.num_attention_heads,
        f"{queries} learned queries, then word pieces; rows of CROSS: the queries; keys of CROSS: image tokens",
        trunk=False,
        queries=queries,
    )


def _block(layer: Any, inner: str) -> Block:
    attention = getattr(layer.attention, inner)
    sites = {
        "F2": Reading(attention, "attention"),
        "F3_HEADS": Reading(attention, "output"),
        "F3": Reading(layer.attention.output.dense, "output"),
        "F6": Reading(layer, "output"),
    }
    lacks = {"F1": POST_NORM, "F4": POST_NORM, "F5": "queries and words have an FFN each"}
    if hasattr(layer, "crossattention"):
        crossing = getattr(layer.crossattention, inner)
        sites["CROSS"] = Reading(crossing, "attention")
        sites["CONTEXT"] = Reading(crossing, "keyword", "encoder_hidden_states")
    else:
        lacks |= dict.fromkeys(("CROSS", "CONTEXT"), "this block has no cross-attention")
    return Block(sites, lacks)


def _everywhere(tokens: Tensor, like: Tensor) -> Tensor:
    """A mask that hides none of the tokens [P, N, D], of the type of another mask."""
    return torch.ones(tokens.shape[:2], dtype=like.dtype, device=tokens.device)
