"""Audit: what a table of papers says, in figures."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlcam.archive import write_json
from vlcam.auditing import tables
from vlcam.auditing.counting import FieldCount, GroupCount, Part
from vlcam.auditing.opening import Opening, Spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Audit"]

_SCHEMA = 1


@dataclass(frozen=True, eq=False)
class Audit:
    """What papers state of how their maps were made, and how many recipes that leaves open. `vlcam.audit` makes it.

    Attributes:
        source: the name of the table.
        whole: all papers, with how many back their adaptation in which way.
        adaptations: the distinct adaptations, by name.
        fields: per field of the checklist, how many papers state it.
        groups: per group of the checklist, how many of its cells are stated.
        years: the papers by year.
        venues: the papers by venue.
        tasks: the papers by task.
        rows: per paper, what it leaves open.
        spread: how the numbers of recipes that papers leave open are spread; None where no paper has one.
        notes: what a reader has to know of the table: columns that are missing or unknown, models that were assumed,
            papers that no recipe fits.
    """

    source: str
    whole: Part
    adaptations: tuple[str, ...]
    fields: tuple[FieldCount, ...]
    groups: tuple[GroupCount, ...]
    years: tuple[Part, ...]
    venues: tuple[Part, ...]
    tasks: tuple[Part, ...]
    rows: tuple[Opening, ...]
    spread: Spread | None
    notes: tuple[str, ...]

    def __len__(self) -> int:
        """How many papers there are."""
        return self.whole.papers

    def __str__(self) -> str:
        """The main figures, a few lines."""
        return tables.summary(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        basis = {
            name: {"papers": count, "share": count / self.whole.papers} for name, count in self.whole.basis.items()
        }
        return {
            "schema": _SCHEMA,
            "source": self.source,
            "papers": self.whole.papers,
            "basis": basis,
            "adaptations": {"distinct": len(self.adaptations), "names": list(self.adaptations)},
            "fields": {each.name: each.to_dict() for each in self.fields},
            "groups": {each.name: each.to_dict() for each in self.groups},
            "years": {each.name: each.to_dict() for each in self.years},
            "venues": {each.name: each.to_dict() for each in self.venues},
            "tasks": {each.name: each.to_dict() for each in self.tasks},
            "recipes": None if self.spread is None else self.spread.to_dict(),
            "rows": [each.to_dict() for each in self.rows],
            "notes": list(self.notes),
        }

    def to_markdown(self) -> str:
        """The tables as a page of Markdown."""
        return tables.markdown(self)

    def to_csv(self) -> str:
        """A line per paper: its model, the number of recipes that it leaves open, its open fields."""
        return tables.rows_csv(self)

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write `to_dict()` as JSON.

        Args:
            path: ends in `.json`.
            overwrite: whether an existing file may be replaced.

        Returns:
            The path.

        Raises:
            FileError: another ending, the file exists, or it cannot be written.
        """
        return write_json(Path(path), "an audit", self.to_dict(), overwrite=overwrite)

    def figure(self, title: str = "") -> Figure:
        """What is stated, by field; how adaptations are backed; how many recipes are left open.

        Args:
            title: what stands above; by default the table's name and the number of papers.

        Returns:
            A matplotlib figure that belongs to no window.

        Raises:
            InputError: matplotlib is not installed.
        """
        from vlcam.auditing.picture import figure  # matplotlib is an extra

        return figure(self, title)
