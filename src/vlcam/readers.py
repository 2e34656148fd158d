"""From what a head returns to one scalar per pair: on which scale, of which class, over which region."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, logsigmoid

from vlcam.errors import EvidenceError, RecipeError, UnknownNameError, listing

__all__ = [
    "OF_CLASSES",
    "OF_TEXTS",
    "READERS",
    "HeadKind",
    "compares",
    "explained_classes",
    "reading",
    "region_weights",
    "score_key",
    "scored",
]

HeadKind = Literal["binary", "cosine", "prompts", "sigmoid", "tokens", "classes", "pixels"]
"""What a head returns for P pairs.

`binary`: logits [P, 2] of (no match, match). `cosine`: values [P] in -1..1. `prompts`: cosine and logit of the pair's
image with each of T texts, [P, T, 2], whose logits a softmax compares; `sigmoid`: the same, where each logit stands for
itself. `tokens`: log-probabilities [P, N] of each token of a text after those before it, 0 where there is none.
`classes`: logits [P, C], of which one is explained. `pixels`: logits [P, C, h, w] at places of the model's input, of
which one class is explained over a region.
"""

_NEIGHBOURS = 3
_PIXEL_AXES = 4

Reader = Callable[[Tensor, Tensor], Tensor]
"""From a head's output and the explained class of each pair [P] to one scalar per pair, or for each of its places."""


def _match_margin(logits: Tensor, _: Tensor) -> Tensor:
    return logits[:, 1] - logits[:, 0]


def _own(logits: Tensor, classes: Tensor) -> Tensor:
    return logits.gather(1, classes[:, None])[:, 0]


def _others(logits: Tensor, classes: Tensor) -> Tensor:
    """The logits of all classes but the explained one, which is -inf: nothing that is compared with it picks it."""
    return logits.scatter(1, classes[:, None], -torch.inf)


def _log_odds(logits: Tensor, classes: Tensor) -> Tensor:
    """The log odds of the explained class. A softmax loses the gradient where the model is sure, these do not."""
    alone = logits.shape[1] == 1  # a lone logit is compared with zero
    return _own(logits, classes) - (0 if alone else _others(logits, classes).logsumexp(1))


def _class_margin(logits: Tensor, classes: Tensor) -> Tensor:
    alone = logits.shape[1] == 1
    return _own(logits, classes) - (0 if alone else _others(logits, classes).amax(1))


def _finer(logits: Tensor, classes: Tensor) -> Tensor:
    """Contrast with the classes whose logits are nearest, weighted by their probabilities.

    Zhang et al., Finer-CAM, CVPR 2025, with alpha = 1; the probabilities are part of the graph, as in
    `FinerWeightedTarget` of pytorch-grad-cam.
    """
    own = _own(logits, classes)[:, None]
    count = min(_NEIGHBOURS, logits.shape[1] - 1)
    if not count:
        raise RecipeError("scale='finer' needs classes to compare with, and this model has one; use scale='logit'")
    distance = (logits - own).abs().scatter(1, classes[:, None], torch.inf)
    nearest = distance.topk(count, largest=False).indices
    # Where there are fewer others, the nearest ones are at an infinite distance, and take no part.
    there = distance.gather(1, nearest).isfinite()
    weights = logits.softmax(1).gather(1, nearest).where(there, 0)
    lead = (own - logits.gather(1, nearest)).where(there, 0)
    return (weights * lead).sum(1) / (weights.sum(1) + 1e-9)


def _scored_texts(output: Tensor) -> Tensor:
    """The logits [P, T] of cosines and logits [P, T, 2]; texts that take no part in the comparison have -inf."""
    return output[..., 1]


def _difference(output: Tensor, own: Tensor) -> Tensor:
    """The pair's cosine less the mean cosine of the other texts that take part."""
    cosines = output[..., 0]
    others = output[..., 1].detach().isfinite().scatter(1, own[:, None], value=False)
    return _own(cosines, own) - cosines.where(others, 0).sum(1) / others.sum(1)


READERS: dict[HeadKind, dict[str, Reader]] = {
    "binary": {
        "logit": lambda logits, _: logits[:, 1],
        # Through the margin: a softmax loses the gradient where the model is sure.
        "probability": lambda logits, _: logsigmoid(_match_margin(logits, _)).exp(),
        "log-probability": lambda logits, _: logsigmoid(_match_margin(logits, _)),
        "margin": _match_margin,
    },
    "cosine": {"cosine": lambda values, _: values},
    "prompts": {
        "cosine": lambda output, own: _own(output[..., 0], own),
        "logit": lambda output, own: _own(_scored_texts(output), own),
        "probability": lambda output, own: logsigmoid(_log_odds(_scored_texts(output), own)).exp(),
        "log-probability": lambda output, own: logsigmoid(_log_odds(_scored_texts(output), own)),
        "margin": lambda output, own: _class_margin(_scored_texts(output), own),
        "difference": _difference,
        "finer": lambda output, own: _finer(_scored_texts(output), own),
    },
    "tokens": {"log-probability": lambda output, _: output.sum(1)},
    "classes": {
        "logit": _own,
        "probability": lambda logits, classes: logsigmoid(_log_odds(logits, classes)).exp(),
        "log-probability": lambda logits, classes: logsigmoid(_log_odds(logits, classes)),
        "margin": _class_margin,
        "finer": _finer,
    },
}
READERS["sigmoid"] = READERS["prompts"] | {
    # Each pair by itself, as the model was trained.
    "probability": lambda output, own: _own(_scored_texts(output), own).sigmoid(),
    "log-probability": lambda output, own: logsigmoid(_own(_scored_texts(output), own)),
}
# At every place, [P, h, w]: the region is summed over afterwards.
READERS["pixels"] = {
    "logit": lambda logits, classes: _at(logits, classes),
    "probability": lambda logits, classes: _at(_log_shares(logits), classes).exp(),
    "log-probability": lambda logits, classes: _at(_log_shares(logits), classes),
}
OF_CLASSES = ("classes", "pixels")
OF_TEXTS = ("prompts", "sigmoid")
_NO_SCORE = ("finer",)
"""Scales that a target can have, and that nobody reads as a score of the model."""


def _log_shares(logits: Tensor) -> Tensor:
    """Log-probabilities of [P, C, h, w]; a lone logit is compared with zero."""
    return logsigmoid(logits) if logits.shape[1] == 1 else logits.log_softmax(1)


def _at(values: Tensor, classes: Tensor) -> Tensor:
    """The explained class of [P, C, h, w] at every place, [P, h, w]."""
    return values[torch.arange(len(values), device=values.device), classes]


def explained_classes(output: Tensor, classes: Sequence[int | None]) -> Tensor:
    """The class of every pair, [P]; where none was named, the one with the highest logit.

    Of logits [P, C, h, w] the class that has the highest one at most places.

    Raises:
        UnknownNameError: an index beyond the model's classes.
    """
    named = list(classes) * (len(output) if len(classes) == 1 else 1)
    beyond = list(dict.fromkeys(k for k in named if k is not None and k >= output.shape[1]))
    if beyond:
        raise UnknownNameError(f"no class {listing(beyond)}; the model has classes 0 to {output.shape[1] - 1}")
    top = _most_frequent(output) if output.ndim == _PIXEL_AXES else output.detach().argmax(1)
    chosen = [int(top[pair]) if index is None else index for pair, index in enumerate(named)]
    return torch.tensor(chosen, device=output.device)


def _most_frequent(output: Tensor) -> Tensor:
    won = output.detach().argmax(1).flatten(1)
    counts = torch.zeros(len(output), output.shape[1], device=output.device)
    return counts.scatter_add(1, won, torch.ones_like(won, dtype=counts.dtype)).argmax(1)


def region_weights(output: Tensor, classes: Tensor, weights: Tensor | None) -> Tensor:
    """How much of every place of [P, C, h, w] belongs to the region, [P, h, w].

    Args:
        output: the head's logits.
        classes: the class of every pair.
        weights: the region on the model's input [P, H, W]; None for the places whose highest logit is the class'.

    Raises:
        EvidenceError: a region without any place.
    """
    exact = torch.promote_types(output.dtype, torch.float32)  # sums over many places need more than half precision
    if weights is None:
        found = (output.detach().argmax(1) == classes[:, None, None]).to(exact)
    else:
        size = (output.shape[-2], output.shape[-1])
        found = adaptive_avg_pool2d(weights.to(output.device, exact)[:, None], size)[:, 0].expand(len(output), *size)
    empty = [pair for pair in range(len(output)) if not bool(found[pair].any())]
    if empty:
        names = listing(dict.fromkeys(int(classes[pair]) for pair in empty))
        which = f" in pair {', '.join(map(str, empty))} of {len(output)}, counted from 0" if len(output) > 1 else ""
        where = "the region holds no pixel" if weights is not None else "the model predicts it at no pixel"
        raise EvidenceError(
            f"class {names}: {where}{which}; name another class, or say where, "
            "target=vlcam.targets.Class(which, region=...)"
        )
    return found


def reading(
    reader: Reader, kind: HeadKind, classes: Sequence[int | None], weights: Tensor | None = None
) -> Callable[[Tensor], Tensor]:
    """One reader for the classes of all pairs, over a region where the head tells classes of pixels."""

    def read(output: Tensor) -> Tensor:
        exact = _at_least_float32(output)
        if kind in OF_TEXTS:
            named = list(classes) * (len(output) if len(classes) == 1 else 1)
            chosen = torch.tensor(named, device=output.device)
            exact = exact if weights is None else _taking_part(exact, weights.to(output.device))
            return reader(exact, chosen)
        if kind == "tokens" and weights is not None:
            exact = exact * weights.to(exact)[:, : exact.shape[1]]
        chosen = explained_classes(output, classes) if kind in OF_CLASSES else torch.empty(0)
        values = reader(exact, chosen)
        return values if kind != "pixels" else (values * region_weights(output, chosen, weights)).sum((1, 2))

    return read


def _taking_part(output: Tensor, chosen: Tensor) -> Tensor:
    """Cosines and logits [P, T, 2] with logits of -inf for texts that a pair is not compared with, [P, T]."""
    return torch.stack((output[..., 0], output[..., 1].masked_fill(~chosen, -torch.inf)), -1)


def compares(kind: HeadKind, scale: str) -> bool:
    """Whether a scale of a kind compares a text with others, so that it takes two of them."""
    alone = ("cosine", "logit", *(("probability", "log-probability") if kind == "sigmoid" else ()))
    return kind in OF_TEXTS and scale not in alone


def scored(kind: HeadKind, texts: int = 1) -> Iterator[str]:
    """The scales of a kind that people read as scores; those that compare texts, where there are several."""
    scales = (scale for scale in READERS[kind] if scale not in _NO_SCORE)
    return (scale for scale in scales if texts > 1 or not compares(kind, scale))


def _at_least_float32(output: Tensor) -> Tensor:
    return output if output.dtype == torch.float64 else output.float()


def score_key(scale: str) -> str:
    """A scale as part of a score's name."""
    return scale.replace("-", "_")
