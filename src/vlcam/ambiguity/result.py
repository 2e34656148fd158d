"""Ambiguity: the maps that one description allows, how far apart they are, and what would settle it."""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vlcam.ambiguity import statistics
from vlcam.ambiguity.advice import Advice, advice
from vlcam.ambiguity.description import FIELDS, Description, shown_value
from vlcam.ambiguity.domain import held
from vlcam.archive import make_folder, write_json
from vlcam.errors import EvidenceError, InputError, RecipeError, listing
from vlcam.evidence import Status
from vlcam.geometry import Placement, to_original
from vlcam.recipe import Recipe

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vlcam.explanation import Explanation

__all__ = ["Ambiguity", "Member", "Share"]

LARGEST = 8192
"""Of how many maps all correlations are handed out at once."""

_WRITTEN_OTHERWISE = ("layers", "upsample", "normalize")
"""Fields of which members have one way to write it."""

Floats = NDArray[np.float32]


@dataclass(frozen=True, eq=False, repr=False)
class Member:
    """One recipe that the description allows, and its map.

    Attributes:
        number: its place among the members.
        recipe: every choice.
        tokens: float32 [h, w], the raw map on the token grid, as in `Explanation`; zeros where there is no gradient.
        status: `ok`, or why there is nothing to draw, as in `Explanation`; `zero gradient` is no error here.
    """

    number: int
    recipe: Recipe
    tokens: Floats
    status: Status
    _again: Callable[[list[Any]], list[Explanation]] = field(repr=False)

    def __repr__(self) -> str:
        """One line."""
        return f"<Member {self.number}: {self.recipe.name}, {self.status}>"

    @property
    def explanation(self) -> Explanation:
        """The full explanation, made by a pass of its own: bit for bit that of `model.explain` with this recipe."""
        return self._again([self.recipe])[0]


@dataclass(frozen=True)
class Share:
    """How much one field moves the map.

    Attributes:
        field: which one.
        values: for every value of it, how many members have it; with and without a map.
        share: of the variance of the maps, what grouping them by the value explains (eta squared), 0 to 1. It is what
            goes on average once the field is stated, where a value counts as often as members with a map have it.
        left: for every value with a map, the variance of the maps that have it, as a share of that of all; their mean,
            weighed so, is 1 less `share`. A value may leave more than 1.
        alone: mean rank correlation of the pairs that differ in this field and in nothing else; None without such.
        pairs: how many these are.
    """

    field: str
    values: Mapping[Any, int]
    share: float
    left: Mapping[Any, float]
    alone: float | None
    pairs: int


@dataclass(frozen=True, eq=False, repr=False)
class Ambiguity:
    """Every map that a description allows, for one image and one text or class.

    Attributes:
        description: what is stated.
        members: the recipes that fit, each with its map.
        comparing: how many more would fit, had there been other texts to compare with.
        variants: how many heatmaps each token map can become, by `upsample` and `normalize`.
        record: what the maps are of, and of which model, as JSON values.
        image: the image as the user sees it.
        placement: which part of it the model saw.
    """

    description: Description
    members: tuple[Member, ...]
    comparing: int
    variants: int
    record: Mapping[str, Any]
    image: Image.Image
    placement: Placement

    def __len__(self) -> int:
        """How many recipes fit."""
        return len(self.members)

    def __repr__(self) -> str:
        """One line."""
        return f"<Ambiguity of {self.description.name!r}: {len(self)} recipes, {len(self.shown)} with a map>"

    def explanation(self, number: int) -> Explanation:
        """The full explanation of a member, made by a pass of its own; see `Member.explanation`."""
        return self.members[number].explanation

    @cached_property
    def shown(self) -> tuple[Member, ...]:
        """The members with something to show: status `ok`. All figures on maps are about these."""
        return tuple(member for member in self.members if member.status == "ok")

    @cached_property
    def statuses(self) -> dict[str, int]:
        """How many members have each status, the most frequent first."""
        return dict(Counter(member.status for member in self.members).most_common())

    @cached_property
    def fields(self) -> tuple[str, ...]:
        """The fields in which members differ, in checklist order."""
        return tuple(f for f in FIELDS if len({getattr(member.recipe, f) for member in self.members}) > 1)

    @cached_property
    def grid(self) -> tuple[int, int]:
        """Rows and columns on which maps are compared: the finest grid among them.

        A map of a coarser one is interpolated to it, bilinearly. Of maps over words, 1 and how many tokens they have.
        """
        shapes = [(member.tokens.shape[0], member.tokens.shape[1]) for member in self.shown]
        return max(shapes, key=lambda shape: shape[0] * shape[1], default=(0, 0))

    @cached_property
    def scaled(self) -> Floats:
        """The maps of `shown`, each from 0 to 1, float32 [n, h, w] on `grid`."""
        self._check_shown(1)
        return statistics.scaled(self._laid).reshape(-1, *self.grid)

    @cached_property
    def mean(self) -> Floats:
        """The mean of the scaled maps, float32 [h, w]."""
        return np.asarray(self.scaled.mean(0, dtype=np.float64), np.float32)

    @cached_property
    def spread(self) -> Floats:
        """Their standard deviation in every cell, float32 [h, w]; 0.5 is the largest there can be."""
        return np.asarray(self.scaled.std(0, dtype=np.float64), np.float32)

    @property
    def mean_heatmap(self) -> Floats:
        """`mean` on the original image, float32 [H, W], interpolated bilinearly; NaN where the model saw nothing.

        Raises:
            InputError: the maps are over words.
        """
        return self.on_image(self.mean)

    @property
    def spread_heatmap(self) -> Floats:
        """`spread` on the original image, as `mean_heatmap`."""
        return self.on_image(self.spread)

    def on_image(self, cells: Floats, *, longest: int | None = None) -> Floats:
        """A map on `grid`, laid on the original image, or on a copy of at most so many pixels a side; bilinearly.

        Raises:
            InputError: the maps are over words.
        """
        if self.of_text:
            raise InputError(
                f"the maps that {self.description.name!r} allows are over the words of the text, which have no place "
                "on the image; read ambiguity.mean and ambiguity.spread"
            )
        placement = self.placement if longest is None else self.placement.scaled_down(longest)
        return to_original(cells, placement, "bilinear")

    @property
    def of_text(self) -> bool:
        """Whether the maps are over words."""
        return self.members[0].recipe.of_text

    @property
    def held(self) -> dict[str, str]:
        """Fields that are open and of which not every value is tried: what is, in words; see `docs/ambiguity.md`."""
        return held(self.description)

    @property
    def rank_correlations(self) -> Floats:
        """Spearman's rank correlation of every two maps of `shown`, float32 [n, n].

        Raises:
            InputError: more maps than are compared in one table; `correlations` has the figures of all.
        """
        if len(self.shown) > LARGEST:
            raise InputError(
                f"rank correlations of {len(self.shown)} maps are a table of {len(self.shown) ** 2:,}; it is made for "
                f"{LARGEST:,} maps at most: state more, ambiguity.after(...), or read ambiguity.correlations"
            )
        return statistics.matrix(self._ranks)

    @cached_property
    def correlations(self) -> statistics.Correlations:
        """Median, minimum and share below zero of the rank correlations of all pairs of `shown`, and their counts.

        Raises:
            EvidenceError: fewer than two maps.
        """
        self._check_shown(2)
        return statistics.correlations(self._ranks)

    @cached_property
    def distinct(self) -> int:
        """How many of the maps differ to the eye: by more than 1e-4 of their range in some cell."""
        return statistics.distinct(self.scaled.reshape(len(self.shown), -1)) if self.shown else 0

    @property
    def most_different(self) -> tuple[Member, Member]:
        """The two members whose maps have the lowest rank correlation, to 1e-4; of several those that differ least.

        That is, in the fewest fields; of equal ones the first.

        Raises:
            EvidenceError: fewer than two maps.
        """
        pairs = [(self.shown[first], self.shown[second]) for first, second in self.correlations.lowest]
        return min(pairs, key=lambda pair: len(pair[0].recipe.differences(pair[1].recipe)))

    @cached_property
    def shares(self) -> tuple[Share, ...]:
        """For every field in which members differ, how much it moves the map; the largest share first.

        Fields overlap, because not every value goes with every other: shares do not add up to 1.
        """
        return tuple(sorted(map(self._share, self.fields), key=lambda each: -each.share))

    @property
    def advice(self) -> Advice | None:
        """What to state, so that most of the ambiguity goes; None where there are no two maps that differ."""
        return advice(self.shares[0]) if self.distinct > 1 else None

    @property
    def sentence(self) -> str:
        """The sentence to add to the paper, and how many recipes remain for each way to fill it in."""
        found = self.advice
        if found is not None:
            return str(found)
        if not self.fields:
            return "Nothing is left open."
        if len(self.shown) < 2:
            return "No two of the recipes have a map, so that nothing can be said of what is left open."
        return "What is left open does not move this map."

    def after(self, **fields: Any) -> Description:
        """The description with more stated.

        Raises:
            RecipeError: a value that no member has, or a field or value that does not exist.
        """
        narrower = self.description.stating(**fields)
        for name in fields:
            known = {getattr(member.recipe, name) for member in self.members}
            lost = name in narrower.stated and not known & set(narrower.stated[name])
            if lost and name not in _WRITTEN_OTHERWISE:
                there = listing(sorted(known, key=str))
                raise RecipeError(f"{name}={fields[name]!r}: no member has it; there are {there}")
        return narrower

    @property
    def subject(self) -> str:
        """What was explained: the text, or the class with its label."""
        text, explained = self.record["text"], self.record["class"]
        if text is not None:
            return str(self.record["phrase"] or text["given"])
        if self.record["custom"] is not None:
            return f"target {self.record['custom']}"
        if explained is None:
            return "no class"
        label = "" if explained["label"] is None else f": {explained['label']}"
        return f"class {explained['index']}{label}"

    def difference(self, one: Member, other: Member) -> str:
        """In which fields two members differ, with their values."""
        pairs = {name: map(shown_value, pair) for name, pair in one.recipe.differences(other.recipe).items()}
        return "; ".join(f"{name} {' | '.join(pair)}" for name, pair in pairs.items() if name in FIELDS)

    def figure(self) -> Figure:
        """The image, mean and spread, the two most different maps, the shares, and all correlations. Needs `plot`."""
        from vlcam.ambiguity.picture import figure  # matplotlib is an extra

        return figure(self)

    def _repr_png_(self) -> bytes | None:
        """The figure, which notebooks show; nothing without two maps, or without matplotlib."""
        if len(self.shown) < 2:
            return None
        buffer = io.BytesIO()
        try:
            self.figure().savefig(buffer, dpi=80)
        except InputError:
            return None
        return buffer.getvalue()

    def to_dict(self) -> dict[str, Any]:
        """Every figure, and of every member what tells it from the others, as JSON values."""
        from vlcam.ambiguity.recording import recorded

        return recorded(self)

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write `to_dict()` as JSON.

        Args:
            path: ends in `.json`.
            overwrite: whether an existing file may be replaced.

        Raises:
            FileError: another ending, the file exists, or it cannot be written.
        """
        target = Path(path)
        make_folder(target.parent)
        return write_json(target, "an ambiguity", self.to_dict(), overwrite=overwrite, indent=None)

    def __str__(self) -> str:
        """One screen: how many recipes, how far apart, which fields, and what to add."""
        from vlcam.ambiguity.screen import screen

        return screen(self)

    @cached_property
    def _ranks(self) -> Floats:
        # Of the raw maps: between 0 and 1, cells that differ by little become equal.
        return statistics.unit_ranks(self._laid)

    @property
    def _laid(self) -> Floats:
        """The raw maps of `shown` on `grid`, [n, cells]."""
        return np.stack([self._on_grid(member.tokens).ravel() for member in self.shown])

    def _share(self, name: str) -> Share:
        values = Counter(getattr(member.recipe, name) for member in self.members)
        if len(self.shown) < 2:
            return Share(name, values, 0.0, {}, None, 0)
        labels = [getattr(member.recipe, name) for member in self.shown]
        others = [f for f in self.fields if f != name]
        rest = [tuple(getattr(member.recipe, f) for f in others) for member in self.shown]
        maps = self.scaled.reshape(len(labels), -1)
        share, left = statistics.eta_squared(maps, labels), statistics.variance_left(maps, labels)
        return Share(name, values, share, left, *statistics.alone(self._ranks, rest))

    def _on_grid(self, tokens: Floats) -> Floats:
        if tokens.shape == self.grid:
            return tokens
        return to_original(tokens, Placement.squashed(self.grid, self.grid), "bilinear")

    def _check_shown(self, needed: int) -> None:
        if len(self.shown) < needed:
            found = ", ".join(f"{count} {status}" for status, count in self.statuses.items())
            raise EvidenceError(
                f"{len(self.shown)} of {len(self)} recipes have a map, and {needed} are needed ({found}); choose "
                "another layer or site, or state less"
            )
