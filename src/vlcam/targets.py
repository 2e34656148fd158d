"""The scalar y whose gradient is taken, and every score that a model offers, each with its kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from vlcam.errors import InputError, RecipeError, listing
from vlcam.recipe import Recipe

__all__ = ["Custom", "HeadKind", "Score", "Scores", "Target", "resolve"]

HeadKind = Literal["binary", "cosine"]
"""What a head returns for P pairs: `binary`, logits [P, 2] of (no match, match); `cosine`, values [P] in -1..1."""

_READERS: dict[HeadKind, dict[str, Callable[[Tensor], Tensor]]] = {
    "binary": {
        "logit": lambda logits: logits[:, 1],
        # Through the margin: a softmax loses the gradient where the model is sure.
        "probability": lambda logits: logsigmoid(logits[:, 1] - logits[:, 0]).exp(),
        "log-probability": lambda logits: logsigmoid(logits[:, 1] - logits[:, 0]),
        "margin": lambda logits: logits[:, 1] - logits[:, 0],
    },
    "cosine": {"cosine": lambda values: values},
}


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


@dataclass(frozen=True)
class Custom:
    """A target of the user's own.

    Attributes:
        function: takes what the head returns for P pairs (see `HeadKind`) and gives one scalar per pair, [P]. Pairs
            must not influence each other.
        head: which of the model's heads it reads.
        label: what the record calls it.
    """

    function: Callable[[Tensor], Tensor]
    head: str = "itm"
    label: str = "custom"


@dataclass(frozen=True)
class Target:
    """A target made ready: the head that runs and how its output becomes one scalar per pair."""

    head: str
    label: str
    read: Callable[[Tensor], Tensor]
    differentiate: bool = True


def resolve(recipe: Recipe, heads: Mapping[str, HeadKind], custom: Custom | None = None) -> Target:
    """Find the head and the reader that a recipe's target stands for.

    Args:
        recipe: names the target and its scale.
        heads: the heads that the model has.
        custom: the callable behind `target='custom'`.

    Raises:
        RecipeError: the model has no such head, or a callable is missing.
    """
    if recipe.target == "none":
        head = next(iter(heads))
        return Target(head, "none", next(iter(_READERS[heads[head]].values())), differentiate=False)
    if recipe.target == "custom":
        if custom is None:
            raise RecipeError("target='custom': give the callable itself, target=vlcam.targets.Custom(function)")
        _need(custom.head, heads)
        return Target(custom.head, custom.label, _checked(custom.function))
    _need(recipe.target, heads)
    reader = _READERS[heads[recipe.target]][recipe.scale]
    return Target(
        recipe.target, f"{recipe.target}_{_key(recipe.scale)}", lambda output: reader(_at_least_float32(output))
    )


class Scores(Mapping[str, Score]):
    """Every score of one pair by name. Those of heads that the map did not need are computed when first read."""

    def __init__(
        self,
        heads: Mapping[str, HeadKind],
        pair: int,
        known: Mapping[str, Tensor],
        fetch: Callable[[], Mapping[str, Tensor]],
    ) -> None:
        """Hold the outputs [P, ...] of some heads, and how to get those of the others."""
        self._scores = {name: score for head in known for name, score in _read(head, heads[head], known[head], pair)}
        self._names = {f"{head}_{_key(scale)}": head for head, kind in heads.items() for scale in _READERS[kind]}
        self._heads, self._pair = heads, pair
        self._fetch: Callable[[], Mapping[str, Tensor]] | None = fetch

    def __getitem__(self, name: str) -> Score:
        """The score of that name."""
        if name not in self._names:
            raise KeyError(name)
        if name not in self._scores and self._fetch is not None:
            for head, output in self._fetch().items():
                self._scores |= dict(_read(head, self._heads[head], output, self._pair))
            self._fetch = None  # and with it the tensors that it holds
        return self._scores[name]

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


def _read(head: str, kind: HeadKind, output: Tensor, pair: int) -> Iterator[tuple[str, Score]]:
    for scale, reader in _READERS[kind].items():
        name = f"{head}_{_key(scale)}"
        yield name, Score(name, scale, float(reader(_at_least_float32(output.detach()))[pair]))


def _at_least_float32(output: Tensor) -> Tensor:
    return output if output.dtype == torch.float64 else output.float()


def _key(scale: str) -> str:
    return scale.replace("-", "_")


def _need(head: str, heads: Mapping[str, HeadKind]) -> None:
    if head not in heads:
        raise RecipeError(f"target={head!r}: this model does not offer it; it offers {listing(heads)}")


def _checked(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def read(output: Tensor) -> Tensor:
        y = function(output)
        if not isinstance(y, torch.Tensor) or y.shape != output.shape[:1]:
            found = tuple(y.shape) if isinstance(y, torch.Tensor) else type(y).__name__
            raise InputError(
                f"the target callable returned {found}; it must return one scalar per pair, a tensor of shape "
                f"{tuple(output.shape[:1])}, for a head output of shape {tuple(output.shape)}"
            )
        return y

    return read
