"""Every score that a model offers, each with its kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from vlcam.readers import (
    OF_TEXTS,
    READERS,
    HeadKind,
    compares,
    explained_classes,
    reading,
    region_weights,
    score_key,
    scored,
)

__all__ = ["Score", "Scores"]


@dataclass(frozen=True, slots=True)
class Score:
    """A number that the model gives an image and a text, with its kind: a cosine is never called a probability."""

    name: str
    kind: str
    value: float

    def __float__(self) -> float:
        """The value."""
        return self.value

    def __str__(self) -> str:
        """For people: `itm_probability 0.9731 (probability)`."""
        return f"{self.name} {self.value:.4f} ({self.kind})"


class Scores(Mapping[str, Score]):
    """Every score of one pair by name. Those of heads that the map did not need are computed when first read."""

    def __init__(
        self,
        heads: Mapping[str, HeadKind],
        pair: int,
        known: Mapping[str, Tensor],
        fetch: Callable[[], Mapping[str, Tensor]] | None,
        classes: Sequence[int | None] = (None,),
        weights: Tensor | None = None,
        texts: int = 1,
    ) -> None:
        """Hold the outputs [P, ...] of some heads, and how to get those of the others.

        Args:
            heads: the scores that the model offers, by head.
            pair: the pair.
            known: outputs of heads that ran.
            fetch: gives the others; None where there are none.
            classes: the class or text of every pair, or one class for all.
            weights: regions or texts, as in `Target`.
            texts: how many texts the pair's own is compared with, itself among them.
        """
        self._heads, self._pair, self._texts = heads, pair, texts
        self._class = classes[pair if len(classes) > 1 else 0]
        self._weights = None if weights is None else weights[pair : pair + 1]
        self._names = {
            f"{head}_{score_key(scale)}": (head, scale) for head, kind in heads.items() for scale in scored(kind, texts)
        }
        self._scores: dict[str, Score] = {}
        self._outputs: dict[str, Tensor] = {}
        self._keep(known)
        self._fetch: Callable[[], Mapping[str, Tensor]] | None = fetch

    def __getitem__(self, name: str) -> Score:
        """The score of that name."""
        if name not in self._names:
            raise KeyError(name)
        if name not in self._scores:
            head, scale = self._names[name]
            if head not in self._outputs and self._fetch is not None:
                self._keep(self._fetch())
                self._fetch = None  # and with it the tensors that it holds
            self._scores[name] = Score(name, *self._value(self._heads[head], scale, self._outputs[head]))
        return self._scores[name]

    def _keep(self, outputs: Mapping[str, Tensor]) -> None:
        """This pair's row of each output, as a copy: no pass is kept for it."""
        rows = {head: output.detach()[self._pair : self._pair + 1].clone() for head, output in outputs.items()}
        self._outputs |= {head: row for head, row in rows.items() if head in self._heads}

    def _value(self, kind: HeadKind, scale: str, output: Tensor) -> tuple[str, float]:
        weights = self._weights if kind in (*OF_TEXTS, "pixels") else None
        value = reading(READERS[kind][scale], kind, (self._class,), weights)(output)[0]
        if compares(kind, scale):
            return f"{scale} over {self._texts} texts", float(value)
        if kind != "pixels":
            return scale, float(value)
        size = region_weights(output, explained_classes(output, (self._class,)), weights)[0].sum()
        return f"mean {scale} of the region", float(value / size)

    def __iter__(self) -> Iterator[str]:
        """The names, in the order of the model's heads."""
        return iter(self._names)

    def __len__(self) -> int:
        """How many scores there are."""
        return len(self._names)

    def __reduce__(self) -> tuple[type[dict[str, Score]], tuple[dict[str, Score]]]:
        """Copies and pickles hold the numbers, not the model."""
        return dict, (dict(self),)

    def __repr__(self) -> str:
        """Like a dict's."""
        return repr(dict(self))
