"""The scalar y whose gradient is taken."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch
from torch import Tensor

from vlcam.errors import InputError, RecipeError, listing
from vlcam.readers import READERS, HeadKind, compares, reading, score_key
from vlcam.recipe import Recipe
from vlcam.regions import Region

__all__ = ["Class", "Custom", "HeadKind", "Region", "Target", "TargetWarning", "resolve", "unread"]

_RISES: Mapping[HeadKind, str] = MappingProxyType(
    {"binary": "the logit of a match", "cosine": "the cosine", "tokens": "the likelihood of the text"}
)
"""Of heads that tell how well one text fits an image: what rises with that."""


class TargetWarning(UserWarning):
    """A target of the user's own that points the other way."""


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

    def __post_init__(self) -> None:
        """Refuse a region that is none.

        Raises:
            InputError: an array, or something else.
        """
        if self.region is not None and not isinstance(self.region, Region):
            raise InputError(
                f"region of type {type(self.region).__name__}: give targets.Region(box=(x0, y0, x1, y1)), or "
                "targets.Region.of(mask) for an array [H, W]"
            )


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
        compares: whether a text is compared with others, so that it takes two.
        read: from the head's output to one scalar per pair.
        differentiate: whether its gradient is wanted.
        path: how the scalar depends on a tensor; see `Recipe.gradient_path`.
        pooler: whether what is read at each block is the attention of the pooler that reads it.
        bare: whether it is read so without the final norm; see `ModelAdapter.read_block`.
        classes: the class of every pair, or one for all; None for the one with the highest logit. For heads that
            compare texts: the text of every pair.
        custom: the user's own target behind it, if any.
        region: for a head of the kind `pixels`, where; None for the places that the model gives to the class.
        part: what of a text that is written counts, in words; empty for all of it.
        weights: regions [P, H, W] on the model's input; or which texts each pair is compared with, [P, T]; or which
            tokens of a text that is written count, [P, N].
        reads_classes: makes `read` for other classes and weights.
    """

    head: str
    label: str
    read: Callable[[Tensor], Tensor] = field(compare=False)
    compares: bool = False
    differentiate: bool = True
    path: str = "full"
    pooler: bool = False
    bare: bool = False
    classes: tuple[int | None, ...] = (None,)
    custom: Custom | None = None
    region: Region | None = None
    part: str = ""
    weights: Tensor | None = field(default=None, compare=False, repr=False)
    reads_classes: Callable[[Sequence[int | None], Tensor | None], Callable[[Tensor], Tensor]] | None = field(
        default=None, compare=False, repr=False
    )

    def of_classes(self, classes: Sequence[int | None]) -> Target:
        """The same target for other classes; a target that is of no class stays as it is."""
        read = self.read if self.reads_classes is None else self.reads_classes(classes, self.weights)
        return replace(self, read=read, classes=tuple(classes))

    def within(self, weights: Tensor) -> Target:
        """The same target with other weights."""
        read = self.read if self.reads_classes is None else self.reads_classes(self.classes, weights)
        return replace(self, read=read, weights=weights)


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
        return replace(unread(first), classes=classes, region=region)
    path = recipe.gradient_path
    if recipe.target == "custom":
        if custom is None:
            raise RecipeError("target='custom': give the callable itself, target=vlcam.targets.Custom(function)")
        head = custom.head or first
        _need(head, heads)
        read = _checked(custom, heads[head])
        differentiate = recipe.needs_gradient
        return Target(
            head,
            custom.label,
            read,
            differentiate=differentiate,
            path=path,
            pooler=path == "block" and recipe.stream == "pooler",
            bare="bare_pooler" in recipe.departures,
            classes=classes,
            custom=custom,
        )
    _need(recipe.target, heads)
    kind = heads[recipe.target]
    if recipe.scale not in READERS[kind]:
        raise RecipeError(
            f"scale={recipe.scale!r} with target={recipe.target!r}: this model gives it on the scale "
            f"{listing(READERS[kind])}"
        )

    def of(chosen: Sequence[int | None], weights: Tensor | None = None) -> Callable[[Tensor], Tensor]:
        return reading(READERS[kind][recipe.scale], kind, chosen, weights)

    return Target(
        recipe.target,
        f"{recipe.target}_{score_key(recipe.scale)}",
        of(classes),
        compares=compares(kind, recipe.scale) or recipe.weighting == "surgery",
        differentiate=recipe.needs_gradient,
        path=path,
        pooler=path == "block" and recipe.stream == "pooler",
        bare="bare_pooler" in recipe.departures,
        classes=classes,
        region=region,
        reads_classes=of,
    )


def unread(head: str) -> Target:
    """The target of a pass of which no score is differentiated."""
    return Target(head, "none", lambda output: output.new_zeros(len(output)), differentiate=False)


def _need(head: str, heads: Mapping[str, HeadKind]) -> None:
    if head not in heads:
        raise RecipeError(f"target={head!r}: this model does not offer it; it offers {listing(heads)}")


def _checked(custom: Custom, kind: HeadKind) -> Callable[[Tensor], Tensor]:
    def read(output: Tensor) -> Tensor:
        y = custom.function(output.clone())  # it may work in place
        if not isinstance(y, torch.Tensor) or y.shape != output.shape[:1]:
            found = tuple(y.shape) if isinstance(y, torch.Tensor) else type(y).__name__
            raise InputError(
                f"the target callable returned {found}; it must return one scalar per pair, a tensor of shape "
                f"{tuple(output.shape[:1])}, for a head output of shape {tuple(output.shape)}"
            )
        if _falls(y, output, kind):
            warnings.warn(
                f"the target {custom.label!r} falls as {_RISES[kind]} rises, as a loss does: the map shows what speaks "
                "against the text; for what speaks for it give minus the target, or a score of the model",
                TargetWarning,
                stacklevel=2,
            )
        return y

    return read


def _falls(y: Tensor, output: Tensor, kind: HeadKind) -> bool:
    """Whether scalars [P] of a head's output fall as the text is said to fit better, in every pair."""
    if kind not in _RISES or not (y.requires_grad and output.requires_grad):
        return False
    (slope,) = torch.autograd.grad(y, output, torch.ones_like(y), retain_graph=True, allow_unused=True)
    if slope is None:
        return False
    slope = slope[:, 1:] if kind == "binary" else slope.view(len(slope), -1)
    return bool((slope <= 0).all() and (slope < 0).any(1).all())
