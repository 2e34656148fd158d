"""What papers state, counted: how they back their adaptation, and which fields of the checklist they fill."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from vlcam.auditing.schema import BASES, FIELDS, Paper
from vlcam.choices import GROUPS

__all__ = ["FieldCount", "GroupCount", "Part", "adaptations", "count_fields", "count_groups", "part", "parts_by"]

_NOT_GIVEN = "not given"


@dataclass(frozen=True)
class Part:
    """Some of the papers.

    Attributes:
        name: what they have in common.
        papers: how many they are.
        basis: how many of them back their adaptation in which way; the keys of `BASES`.
        stated: the share of the fields that they state, of those that apply, 0 to 1; None where none applies.
        recipes: the median number of recipes that they leave open; None where it is known of none.
    """

    name: str
    papers: int
    basis: dict[str, int]
    stated: float | None
    recipes: float | None

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "papers": self.papers,
            "basis": dict(self.basis),
            "share_stated": self.stated,
            "median_recipes": self.recipes,
        }


@dataclass(frozen=True)
class _Told:
    """How often something is stated.

    Attributes:
        name: a field, or a group of them.
        stated: how many cells state it, those among them in words that the vocabulary does not hold.
        not_stated: how many cells are empty.
        not_applicable: to how many it does not apply.
        not_coded: how many the table has no column for.
    """

    name: str
    stated: int
    not_stated: int
    not_applicable: int
    not_coded: int

    @property
    def share(self) -> float | None:
        """Stated of those to which it applies, 0 to 1; None where it applies to none."""
        applies = self.stated + self.not_stated
        return self.stated / applies if applies else None

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "stated": self.stated,
            "not_stated": self.not_stated,
            "not_applicable": self.not_applicable,
            "not_coded": self.not_coded,
            "share_stated": self.share,
        }


@dataclass(frozen=True)
class FieldCount(_Told):
    """How many papers state a field; `name` and counts as above.

    Attributes:
        group: the group of the checklist that it belongs to.
    """

    group: str

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {"group": self.group} | super().to_dict()


@dataclass(frozen=True)
class GroupCount(_Told):
    """How many cells of a group of fields state something.

    Attributes:
        whole: how many papers state every field of the group that applies to them.
    """

    whole: int

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return super().to_dict() | {"papers_that_state_all": self.whole}


def adaptations(papers: Iterable[Paper]) -> tuple[str, ...]:
    """The distinct names in the column `adaptation`, in order of appearance; upper case and spaces tell none apart."""
    found: dict[str, str] = {}
    for paper in papers:
        written = " ".join(paper.about["adaptation"].split())
        if written:
            found.setdefault(written.casefold(), written)
    return tuple(found.values())


def part(name: str, papers: Sequence[Paper], recipes: Mapping[str, int]) -> Part:
    """Some papers in figures.

    Args:
        name: what they have in common.
        papers: they.
        recipes: how many recipes papers leave open, by key; those of which it is not known are not in it.
    """
    bases = Counter(paper.about["basis"] for paper in papers)
    left = [recipes[paper.key] for paper in papers if paper.key in recipes]
    return Part(
        name,
        len(papers),
        {basis: bases[basis] for basis in BASES},
        _Told(name, *_told(papers, tuple(FIELDS))).share,
        float(median(left)) if left else None,
    )


def parts_by(papers: Sequence[Paper], column: str, recipes: Mapping[str, int]) -> tuple[Part, ...]:
    """The papers by a column of `ABOUT`, in the order of its values; those without one last, as `not given`.

    Args:
        papers: all.
        column: by which.
        recipes: as in `part`.
    """
    named: dict[str, list[Paper]] = {}
    for paper in papers:
        named.setdefault(paper.about[column] or _NOT_GIVEN, []).append(paper)
    order = sorted(named, key=lambda name: (name == _NOT_GIVEN, name.casefold()))
    return tuple(part(name, named[name], recipes) for name in order)


def count_fields(papers: Sequence[Paper]) -> tuple[FieldCount, ...]:
    """How many papers state each field, in the order of the checklist."""
    return tuple(FieldCount(field, *_told(papers, (field,)), group=group) for field, group in FIELDS.items())


def count_groups(papers: Sequence[Paper]) -> tuple[GroupCount, ...]:
    """How many cells of each group are filled, and how many papers fill all that apply to them."""
    found = []
    for group, fields in GROUPS.items():
        states = [[paper.cells[field].state for field in fields] for paper in papers]
        whole = sum("stated" in each and not {"not stated", "not coded"} & set(each) for each in states)
        found.append(GroupCount(group, *_told(papers, fields), whole=whole))
    return tuple(found)


def _told(papers: Sequence[Paper], fields: Sequence[str]) -> tuple[int, int, int, int]:
    states = Counter(paper.cells[field].state for paper in papers for field in fields)
    return states["stated"], states["not stated"], states["n/a"], states["not coded"]
