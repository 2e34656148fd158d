"""How many recipes a paper leaves open, on a model that stands for its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from vlcam.ambiguity import Description
from vlcam.auditing.left import Left, described, fitting, left_open
from vlcam.auditing.schema import ARCHITECTURES, FIELDS, REFERENCE, Paper, architecture_of
from vlcam.explainer import Explainer
from vlcam.zoo import load

__all__ = ["Opening", "Spread", "openings", "spread_of"]


@dataclass(frozen=True)
class Opening:
    """What a paper leaves open.

    Attributes:
        line: its line in the table.
        key: its key.
        model: the model on which recipes are counted.
        assumed: whether that is the reference model because no embedded one stands for the paper's architecture.
        recipes: how many recipes fit what it states; 0 where none does.
        open: the fields that it does not state.
        as_one: the fields that it states in words of its own, or that do not apply: one value, which is not varied.
        left_if_stated: for every open field that is varied, which share of the recipes would be left if it were stated,
            0 to 1: the mean over the recipes, any of which may be the one that was meant.
        note: what is to be known besides; empty if nothing.
        extra: its cells in columns that the schema does not know.
    """

    line: int
    key: str
    model: str
    assumed: bool
    recipes: int
    open: tuple[str, ...]
    as_one: tuple[str, ...]
    left_if_stated: Mapping[str, float]
    note: str
    extra: Mapping[str, str]

    @property
    def best(self) -> str:
        """The field that would leave the fewest recipes if it were stated; empty where none would leave fewer."""
        return min(self.left_if_stated, key=lambda name: self.left_if_stated[name], default="")

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "line": self.line,
            "key": self.key,
            "model": self.model,
            "model_assumed": self.assumed,
            "recipes": self.recipes,
            "open": list(self.open),
            "counted_as_one": list(self.as_one),
            "left_if_stated": dict(self.left_if_stated),
            "best": self.best or None,
            "note": self.note,
            "extra": dict(self.extra),
        }


@dataclass(frozen=True)
class Spread:
    """How the numbers of recipes that papers leave open are spread.

    Attributes:
        papers: how many papers are counted: those that at least one recipe fits.
        least: the smallest number.
        quartiles: a quarter, half and three quarters of the papers leave open at most so many, interpolated linearly.
        most: the largest number.
        models: how many of the papers are counted on which model.
        left_if_stated: per field, which share of a paper's recipes would be left if it were stated, 0 to 1, mean over
            the papers; 1 for a paper that states it. Fields that are varied for no paper are left out.
    """

    papers: int
    least: int
    quartiles: tuple[float, float, float]
    most: int
    models: Mapping[str, int]
    left_if_stated: Mapping[str, float]

    @property
    def median(self) -> float:
        """Half of the papers leave open at most so many recipes."""
        return self.quartiles[1]

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        first, median, third = self.quartiles
        return {
            "papers": self.papers,
            "least": self.least,
            "first_quartile": first,
            "median": median,
            "third_quartile": third,
            "most": self.most,
            "models": dict(self.models),
            "left_if_stated": dict(self.left_if_stated),
        }


def openings(papers: Sequence[Paper], model: Explainer | str | Path | None = None) -> tuple[Opening, ...]:
    """What each paper leaves open.

    Args:
        papers: in order.
        model: on which model the recipes of all papers are counted; by default the embedded one that stands for a
            paper's architecture, and `REFERENCE` where none does.
    """
    given = model if model is None or isinstance(model, Explainer) else load(model)
    models: dict[str, Explainer] = {}
    alike: dict[tuple[str, Description], list[tuple[int, str]]] = {}  # many papers state the same
    for place, paper in enumerate(papers):
        name = _stands_for(paper) if given is None else given.name
        if name not in models:
            models[name] = load(name) if given is None else given
        description, changed = described(paper, models[name])
        alike.setdefault((name, description), []).append((place, changed))
    found: dict[int, Opening] = {}
    for (name, description), those in alike.items():
        recipes = fitting(models[name], description)
        counted: dict[tuple[str, ...], Left] = {}
        for place, changed in those:
            as_one = _as_one(papers[place])
            if as_one not in counted:
                counted[as_one] = left_open(models[name], description, recipes, as_one)
            assumed = given is None and architecture_of(papers[place].about["architecture"]) is None
            found[place] = _opening(papers[place], name, counted[as_one], changed, assumed=assumed)
    return tuple(found[place] for place in range(len(papers)))


def _stands_for(paper: Paper) -> str:
    architecture = architecture_of(paper.about["architecture"])
    return REFERENCE if architecture is None else ARCHITECTURES[architecture]


def _as_one(paper: Paper) -> tuple[str, ...]:
    """Fields with one value that is not known."""
    states = ("stated", "n/a")
    return tuple(name for name, cell in paper.cells.items() if not cell.values and cell.state in states)


def _opening(paper: Paper, model: str, left: Left, changed: str, *, assumed: bool) -> Opening:
    return Opening(
        line=paper.line,
        key=paper.key,
        model=model,
        assumed=assumed,
        recipes=left.recipes,
        open=tuple(name for name, cell in paper.cells.items() if cell.state in ("not stated", "not coded")),
        as_one=_as_one(paper),
        left_if_stated=left.left_if_stated,
        note="; ".join(filter(None, (changed, left.note))),
        extra=paper.extra,
    )


def spread_of(rows: Sequence[Opening]) -> Spread | None:
    """How the numbers of recipes are spread over the papers that at least one fits; None where there is no such."""
    fit = [row for row in rows if row.recipes]
    if not fit:
        return None
    counts = [row.recipes for row in fit]
    first, median, third = np.percentile(counts, [25, 50, 75]).tolist()
    varied = [name for name in FIELDS if any(name in row.left_if_stated for row in fit)]
    return Spread(
        papers=len(fit),
        least=min(counts),
        quartiles=(first, median, third),
        most=max(counts),
        models=dict(Counter(row.model for row in fit)),
        left_if_stated={name: fmean(row.left_if_stated.get(name, 1.0) for row in fit) for name in varied},
    )
