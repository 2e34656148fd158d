"""Where a recipe comes from: the published one of its name, and in which fields it differs from that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vlcam.bibtex import bibtex
from vlcam.catalogue import recipes
from vlcam.reporting.facts import shown
from vlcam.reporting.older import completed

if TYPE_CHECKING:
    from vlcam.entry import Entry
    from vlcam.explanation import Explanation

__all__ = ["Source", "source"]


@dataclass(frozen=True)
class Source:
    """The published recipe of the name that an explanation's recipe has.

    Attributes:
        entry: its catalogue entry; None where the catalogue has no recipe of that name.
        differences: a phrase for every field with another value than there, with the reason where the record has one.
    """

    entry: Entry | None
    differences: tuple[str, ...]

    @property
    def bibtex(self) -> str:
        """The sources as BibTeX entries; empty where none is known."""
        return "" if self.entry is None else bibtex(self.entry)

    @property
    def citation(self) -> str:
        """Authors, title, venue and year in one line; empty where none is known."""
        return "" if self.entry is None else str(self.entry.citation)


def source(exp: Explanation) -> Source:
    """Look an explanation's recipe up in the catalogue."""
    entry = recipes().get(exp.recipe.name)
    if entry is None:
        return Source(None, ())
    run = completed(exp).provenance["run"]
    reasons = {
        "layers": run["fitted"]["layers"],
        "target": run["fitted"]["target"],
        "scale": run["fitted"]["target"],
        "queries": "a phrase was asked for" if exp.recipe.queries == "phrase" else run["fitted"]["tokens"],
        "gradient_tokens": run["fitted"]["tokens"],
    }
    return Source(
        entry,
        tuple(
            f"{field} is {shown(own)} instead of {shown(published)}{_because(reasons.get(field, ''))}"
            for field, (own, published) in exp.recipe.differences(entry.recipe).items()
        ),
    )


def _because(reason: str) -> str:
    return "" if reason in ("", "as published", "as given") else f" ({reason})"
