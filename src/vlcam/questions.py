"""What a user gives as the target, understood: a class, several, a score, a callable."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, get_args

from vlcam.choices import Target as TargetName
from vlcam.errors import RecipeError, UnknownNameError, listing
from vlcam.readers import OF_CLASSES, HeadKind
from vlcam.regions import Region
from vlcam.targets import Class, Custom

__all__ = ["Asked", "class_index", "read_target"]


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
    if isinstance(target, str) and (target in heads or (target in get_args(TargetName) and target not in labels)):
        return _score(target, heads, labels)
    head = next((name for name, kind in heads.items() if kind in OF_CLASSES), None)
    if head is None:
        raise RecipeError(
            f"target={target!r}: this model tells no classes apart; it offers {listing(heads)}. What it scores is "
            "given as the text: explain(image, text)"
        )
    if isinstance(target, Class):
        return _one_class(target, head, heads[head], labels)
    plain = getattr(target, "tolist", lambda: target)()  # of arrays and tensors, those without an axis too
    if isinstance(plain, (int, str)):
        return Asked({"target": head}, classes=(class_index(plain, labels),))
    return _several(plain, head, labels)


def _score(name: str, heads: Mapping[str, HeadKind], labels: Sequence[str]) -> Asked:
    if name in labels:
        raise RecipeError(
            f"target={name!r} is the name of a score and of class {list(labels).index(name)}; give the class' index"
        )
    if name not in heads:
        raise RecipeError(f"target={name!r}: this model does not offer it; it offers {listing(heads)}")
    return Asked({"target": name})


def _one_class(target: Class, head: str, kind: HeadKind, labels: Sequence[str]) -> Asked:
    if target.region is not None and kind != "pixels":
        raise RecipeError(f"region={target.region!r}: this model tells the class of an image, and not of its pixels")
    own = {} if target.scale is None else {"scale": target.scale}
    which = None if target.which is None else class_index(target.which, labels)
    return Asked({"target": head} | own, classes=(which,), region=target.region)


def _several(target: Any, head: str, labels: Sequence[str]) -> Asked:
    if isinstance(target, (set, frozenset)):
        raise RecipeError(f"target={target!r}: a set has no order to pair classes with images in; give a list")
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
