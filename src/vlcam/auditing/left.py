"""Which recipes fit what a paper states, counted on a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlcam.ambiguity import Description, fitting_recipes
from vlcam.ambiguity.domain import Domain
from vlcam.ambiguity.enumeration import why_none
from vlcam.auditing.schema import FIELDS, Paper
from vlcam.explainer import Explainer
from vlcam.recipe import Recipe

__all__ = ["Left", "described", "fitting", "left_open"]

_PHRASE = "phrase"
"""Stands for the words that a map is of; which they are makes no difference to what fits."""


@dataclass(frozen=True)
class Left:
    """What a description leaves open on a model.

    Attributes:
        recipes: how many recipes fit.
        left_if_stated: for every open field in which they differ, which share of them would be left if it were stated.
        note: for a description that no recipe fits, what stands in the way.
    """

    recipes: int
    left_if_stated: Mapping[str, float]
    note: str


def described(paper: Paper, model: Explainer) -> tuple[Description, str]:
    """What a paper states, as a description, and what was changed for the model; empty if nothing.

    Block numbers that the model does not have are taken for its last blocks, as many as there are numbers: how many
    recipes fit depends on how many blocks are merged, and hardly on which.
    """
    stated: dict[str, Any] = {name: list(cell.values) for name, cell in paper.cells.items() if cell.values}
    changed = ""
    if "layers" in stated:
        depth = _depth(model, stated.get("stream", ()))
        moved = [_moved(value, depth) for value in stated["layers"]]
        if moved != stated["layers"]:
            changed = f"layers {paper.cells['layers'].written}: the model has {depth} blocks; counted as its last ones"
        stated["layers"] = moved
    return Description(**stated), changed


def _depth(model: Explainer, streams: Sequence[object]) -> int:
    """How many blocks the model has, in the stream that is stated, or in the one that has most."""
    known = model.anatomy.streams
    named = [stream for name, stream in known.items() if name in streams]
    return max(len(stream.blocks) for stream in named or known.values())


def _moved(layers: object, depth: int) -> object:
    if not isinstance(layers, tuple) or all(-depth <= block < depth for block in layers):
        return layers
    return tuple(range(-len(layers), 0)) if len(layers) <= depth else "all"


def fitting(model: Explainer, description: Description) -> list[Recipe]:
    """The recipes that fit a description on a model, those for a phrase of a text among them where it speaks of one."""
    found = fitting_recipes(model, description)
    of_phrase = _of_phrase(description)
    if of_phrase:
        found += fitting_recipes(model, description.stating(**of_phrase), phrase=_PHRASE)
    return list(dict.fromkeys(found))


def left_open(
    model: Explainer, description: Description, recipes: Sequence[Recipe], as_one: Sequence[str] = ()
) -> Left:
    """Count the recipes that fit a description.

    Args:
        model: on which.
        description: what is stated.
        recipes: those that fit it.
        as_one: fields that have one value, though the description cannot say which. Of the recipes, those are counted
            that agree in these fields: the largest such set.
    """
    if not recipes:
        phrase = _PHRASE if _of_phrase(description) else None
        why = why_none(Domain(model.adapter, description, phrase))
        return Left(0, {}, f"no recipe has all of {', '.join(description.stated)} as stated, {why}")
    agreeing = _agreeing(recipes, as_one)
    shares = {}
    for name in FIELDS:
        values = Counter(getattr(recipe, name) for recipe in agreeing)
        if name not in description.stated and len(values) > 1:
            # Any of the recipes may be meant; stated, its value leaves those that have it too.
            shares[name] = sum(count * count for count in values.values()) / len(agreeing) ** 2
    return Left(len(agreeing), shares, "")


def _of_phrase(description: Description) -> dict[str, Any]:
    """The fields that speak of a phrase, with the values that do."""
    own = {"queries": ("phrase",), "prompt": ("phrase", "in_place")}
    found = {
        field: [each for each in description.stated.get(field, ()) if each in words] for field, words in own.items()
    }
    return {field: values for field, values in found.items() if values}


def _agreeing(recipes: Sequence[Recipe], fields: Sequence[str]) -> list[Recipe]:
    sets: dict[tuple[object, ...], list[Recipe]] = {}
    for recipe in recipes:
        sets.setdefault(tuple(getattr(recipe, name) for name in fields), []).append(recipe)
    return max(sets.values(), key=len)
