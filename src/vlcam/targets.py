"""The scalar y whose gradient is taken, and every score that a model offers, each with its kind."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, logsigmoid

from vlcam.errors import EvidenceError, InputError, RecipeError, UnknownNameError, listing
from vlcam.recipe import Recipe
from vlcam.recipe import Target as TargetName
from vlcam.regions import Region

__all__ = [
    "Asked",
    "Class",
    "Custom",
    "HeadKind",
    "Region",
    "Score",
    "Scores",
    "Target",
    "class_index",
    "explained_classes",
    "read_target",
    "region_weights",
    "resolve",
]

HeadKind = Literal["binary", "cosine", "classes", "pixels"]
"""What a head returns for P pairs.

`binary`: logits [P, 2] of (no match, match). `cosine`: values [P] in -1..1. `classes`: logits [P, C], of which one is
explained. `pixels`: logits [P, C, h, w] at places of the model's input, of which one class is explained over a region.
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
    weights = logits.softmax(1).gather(1, nearest)
    return (weights * (own - logits.gather(1, nearest))).sum(1) / (weights.sum(1) + 1e-9)


_READERS: dict[HeadKind, dict[str, Reader]] = {
    "binary": {
        "logit": lambda logits, _: logits[:, 1],
        # Through the margin: a softmax loses the gradient where the model is sure.
        "probability": lambda logits, _: logsigmoid(_match_margin(logits, _)).exp(),
        "log-probability": lambda logits, _: logsigmoid(_match_margin(logits, _)),
        "margin": _match_margin,
    },
    "cosine": {"cosine": lambda values, _: values},
    "classes": {
        "logit": _own,
        "probability": lambda logits, classes: logsigmoid(_log_odds(logits, classes)).exp(),
        "log-probability": lambda logits, classes: logsigmoid(_log_odds(logits, classes)),
        "margin": _class_margin,
        "finer": _finer,
    },
}
# At every place, [P, h, w]: the region is summed over afterwards.
_READERS["pixels"] = {
    "logit": lambda logits, classes: _at(logits, classes),
    "probability": lambda logits, classes: _at(_log_shares(logits), classes).exp(),
    "log-probability": lambda logits, classes: _at(_log_shares(logits), classes),
}
_OF_CLASSES = ("classes", "pixels")
_NO_SCORE = ("finer",)
"""Scales that a target can have, and that nobody reads as a score of the model."""


def _log_shares(logits: Tensor) -> Tensor:
    """Log-probabilities of [P, C, h, w]; a lone logit is compared with zero."""
    return logsigmoid(logits) if logits.shape[1] == 1 else logits.log_softmax(1)


def _at(values: Tensor, classes: Tensor) -> Tensor:
    """The explained class of [P, C, h, w] at every place, [P, h, w]."""
    return values[torch.arange(len(values), device=values.device), classes]


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
class Class:
    """A class to be explained.

    Attributes:
        which: its index, or its label; None for the class with the highest logit, or with the most places.
        scale: `logit`, `probability`, `log-probability`, `margin` or `finer`, in place of the recipe's.
        region: for a model that tells the classes of pixels, where; None for the places that it gives to the class.
    """

    which: int | str | None = None
    scale: str | None = None
    region: Region | None = None


@dataclass(frozen=True)
class Custom:
    """A target of the user's own.

    Attributes:
        function: takes what the head returns for P pairs (see `HeadKind`) and gives one scalar per pair, [P]. Pairs
            must not influence each other.
        head: which of the model's heads it reads; by default its first.
        label: what the record calls it.
    """

    function: Callable[[Tensor], Tensor]
    head: str | None = None
    label: str = "custom"


@dataclass(frozen=True)
class Target:
    """A target made ready; two that are equal have the same gradient.

    Attributes:
        head: the head that runs.
        label: what records call the scalar.
        read: from the head's output to one scalar per pair.
        differentiate: whether its gradient is wanted.
        path: how the scalar depends on a tensor; see `Recipe.gradient_path`.
        classes: the class of every pair, or one for all; None for the one with the highest logit.
        custom: the user's own target behind it, if any.
        region: for a head of the kind `pixels`, where; None for the places that the model gives to the class.
        reads_classes: makes `read` for other classes and for regions [P, H, W] on the model's input.
    """

    head: str
    label: str
    read: Callable[[Tensor], Tensor] = field(compare=False)
    differentiate: bool = True
    path: str = "full"
    classes: tuple[int | None, ...] = (None,)
    custom: Custom | None = None
    region: Region | None = None
    weights: Tensor | None = field(default=None, compare=False, repr=False)
    reads_classes: Callable[[Sequence[int | None], Tensor | None], Callable[[Tensor], Tensor]] | None = field(
        default=None, compare=False, repr=False
    )

    def of_classes(self, classes: Sequence[int | None]) -> Target:
        """The same target for other classes; a target that is of no class stays as it is."""
        read = self.read if self.reads_classes is None else self.reads_classes(classes, self.weights)
        return replace(self, read=read, classes=tuple(classes))

    def within(self, weights: Tensor) -> Target:
        """The same target over regions of the model's input, [P, H, W]."""
        read = self.read if self.reads_classes is None else self.reads_classes(self.classes, weights)
        return replace(self, read=read, weights=weights)


@dataclass(frozen=True)
class Asked:
    """What a user gave as the target.

    Attributes:
        changes: recipe fields that it decides.
        custom: the callable, if it is one.
        classes: the class of every pair, or one for all; None for the one with the highest logit.
        count: how many classes a list of them names; None where there was no list.
        region: where the class is explained, for a model that tells the classes of pixels.
    """

    changes: Mapping[str, str]
    custom: Custom | None = None
    classes: tuple[int | None, ...] = (None,)
    count: int | None = None
    region: Region | None = None


def read_target(target: Any, heads: Mapping[str, HeadKind], labels: Sequence[str]) -> Asked:
    """Understand what a user gives as the target: see `Explainer.explain`.

    Args:
        target: a class by index or label, several, `Class`, `Custom`, a callable, the name of a score, or None.
        heads: the scores that the model offers.
        labels: names of its classes.

    Raises:
        RecipeError: a target that the model does not offer.
        UnknownNameError: a class that does not exist.
    """
    if target is None:
        return Asked({})
    if callable(target) and not isinstance(target, (Custom, type)):
        target = Custom(target, label=getattr(target, "__qualname__", "callable"))
    if isinstance(target, Custom):
        return Asked({"target": "custom", "scale": "raw"}, target)
    if isinstance(target, str) and (target in heads or target in get_args(TargetName)):
        return Asked({"target": target})
    head = next((name for name, kind in heads.items() if kind in _OF_CLASSES), None)
    if head is None:
        raise RecipeError(f"target={target!r}: this model tells no classes apart; it offers {listing(heads)}")
    if isinstance(target, Class):
        return _one_class(target, head, heads[head], labels)
    plain = getattr(target, "tolist", lambda: target)()  # of arrays and tensors, those without an axis too
    if isinstance(plain, (int, str)):
        return Asked({"target": head}, classes=(class_index(plain, labels),))
    return _several(plain, head, labels)


def _one_class(target: Class, head: str, kind: HeadKind, labels: Sequence[str]) -> Asked:
    if target.region is not None and kind != "pixels":
        raise RecipeError(f"region={target.region!r}: this model tells the class of an image, and not of its pixels")
    own = {} if target.scale is None else {"scale": target.scale}
    which = None if target.which is None else class_index(target.which, labels)
    return Asked({"target": head} | own, classes=(which,), region=target.region)


def _several(target: Any, head: str, labels: Sequence[str]) -> Asked:
    try:
        classes = tuple(class_index(each, labels) for each in target)
    except TypeError:
        raise RecipeError(
            f"target={target!r}: give a class (index or label), a list of classes, a vlcam.targets object, the name of "
            "a score, or a callable"
        ) from None
    if not classes:
        raise RecipeError(f"target={target!r}: name at least one class")
    return Asked({"target": head}, classes=classes, count=len(classes))


def class_index(which: int | str, labels: Sequence[str]) -> int:
    """The index of a class that is named by index or by label.

    A label is found as it stands, then without regard to capitals, then as one of several names between commas.

    Raises:
        RecipeError: neither a whole number nor text.
        UnknownNameError: no such class, with labels that come close; or several of that name.
    """
    if not isinstance(which, str):
        index = _whole(which)
        if index < 0 or (labels and index >= len(labels)):
            last = f"; the model has classes 0 to {len(labels) - 1}" if labels else ""
            raise UnknownNameError(f"no class {index}{last}")
        return index
    folded = which.casefold()
    for fits in (
        lambda label: label == which,
        lambda label: label.casefold() == folded,
        lambda label: folded in (part.strip().casefold() for part in label.split(",")),
    ):
        found = [index for index, label in enumerate(labels) if fits(label)]
        if len(found) == 1:
            return found[0]
        if found:
            raise UnknownNameError(f"class {which!r}: classes {found} have that name; give the index")
    near = difflib.get_close_matches(which, labels, n=5, cutoff=0.5) or list(labels[:5])
    raise UnknownNameError(
        f"no class {which!r}; "
        + (f"close to it: {listing(near)}" if labels else "the model's classes have no names; give the index")
    )


def _whole(which: Any) -> int:
    number: int | None = None
    with suppress(TypeError):
        number = operator.index(which)
    if number is None or isinstance(which, bool):
        raise RecipeError(f"class {which!r}: give a whole number or a label")
    return number


def resolve(
    recipe: Recipe,
    heads: Mapping[str, HeadKind],
    *,
    custom: Custom | None = None,
    classes: Sequence[int | None] = (None,),
    region: Region | None = None,
) -> Target:
    """Find the head and the reader that a recipe's target stands for.

    Args:
        recipe: names the target and its scale.
        heads: the heads that the model has.
        custom: the callable behind `target='custom'`.
        classes: the class of every pair, or one for all; None for the one with the highest logit.
        region: where, for a head of the kind `pixels`.

    Raises:
        RecipeError: the model has no such head, or a callable is missing.
    """
    first, classes = next(iter(heads)), tuple(classes)
    if recipe.target == "none":
        nothing = next(iter(_READERS[heads[first]].values()))
        read = _reading(nothing, heads[first], classes)
        return Target(first, "none", read, differentiate=False, classes=classes, region=region)
    path = recipe.gradient_path
    if recipe.target == "custom":
        if custom is None:
            raise RecipeError("target='custom': give the callable itself, target=vlcam.targets.Custom(function)")
        head = custom.head or first
        _need(head, heads)
        read = _checked(custom.function)
        differentiate = recipe.needs_gradient
        return Target(head, custom.label, read, differentiate, path=path, classes=classes, custom=custom)
    _need(recipe.target, heads)
    kind = heads[recipe.target]

    def of(chosen: Sequence[int | None], weights: Tensor | None = None) -> Callable[[Tensor], Tensor]:
        return _reading(_READERS[kind][recipe.scale], kind, chosen, weights)

    return Target(
        recipe.target,
        f"{recipe.target}_{_key(recipe.scale)}",
        of(classes),
        differentiate=recipe.needs_gradient,
        path=path,
        classes=classes,
        region=region,
        reads_classes=of,
    )


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


class Scores(Mapping[str, Score]):
    """Every score of one pair by name. Those of heads that the map did not need are computed when first read."""

    def __init__(
        self,
        heads: Mapping[str, HeadKind],
        pair: int,
        known: Mapping[str, Tensor],
        fetch: Callable[[], Mapping[str, Tensor]],
        classes: Sequence[int | None] = (None,),
        weights: Tensor | None = None,
    ) -> None:
        """Hold the outputs [P, ...] of some heads, and how to get those of the others; the rest as in `Target`."""
        self._heads, self._pair, self._classes, self._weights = heads, pair, classes, weights
        self._names = {f"{head}_{_key(scale)}": head for head, kind in heads.items() for scale in _scored(kind)}
        self._scores: dict[str, Score] = {}
        self._add(known)
        self._fetch: Callable[[], Mapping[str, Tensor]] | None = fetch

    def __getitem__(self, name: str) -> Score:
        """The score of that name."""
        if name not in self._names:
            raise KeyError(name)
        if name not in self._scores and self._fetch is not None:
            self._add(self._fetch())
            self._fetch = None  # and with it the tensors that it holds
        return self._scores[name]

    def _add(self, outputs: Mapping[str, Tensor]) -> None:
        for head, output in outputs.items():
            kind = self._heads[head]
            for scale in _scored(kind):
                name = f"{head}_{_key(scale)}"
                self._scores[name] = Score(name, *self._value(kind, scale, output.detach()))

    def _value(self, kind: HeadKind, scale: str, output: Tensor) -> tuple[str, float]:
        value = _reading(_READERS[kind][scale], kind, self._classes, self._weights)(output)[self._pair]
        if kind != "pixels":
            return scale, float(value)
        size = region_weights(output, explained_classes(output, self._classes), self._weights)[self._pair].sum()
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


def _most_frequent(output: Tensor) -> Tensor:
    won = output.detach().argmax(1).flatten(1)
    counts = torch.zeros(len(output), output.shape[1], device=output.device)
    return counts.scatter_add(1, won, torch.ones_like(won, dtype=counts.dtype)).argmax(1)


def _reading(
    reader: Reader, kind: HeadKind, classes: Sequence[int | None], weights: Tensor | None = None
) -> Callable[[Tensor], Tensor]:
    def read(output: Tensor) -> Tensor:
        chosen = explained_classes(output, classes) if kind in _OF_CLASSES else torch.empty(0)
        values = reader(_at_least_float32(output), chosen)
        return values if kind != "pixels" else (values * region_weights(output, chosen, weights)).sum((1, 2))

    return read


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


def _scored(kind: HeadKind) -> Iterator[str]:
    return (scale for scale in _READERS[kind] if scale not in _NO_SCORE)


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
