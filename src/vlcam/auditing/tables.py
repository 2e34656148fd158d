"""An audit as text: a summary of a few lines, Markdown, CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from vlcam.auditing.counting import Part
from vlcam.auditing.opening import Spread
from vlcam.auditing.schema import BASES
from vlcam.markup import in_markdown

if TYPE_CHECKING:
    from vlcam.auditing.result import Audit

__all__ = ["count", "markdown", "percent", "rows_csv", "share", "summary"]

_NAMED = 5
_LINE = (
    "line",
    "key",
    "model",
    "recipes",
    "open",
    "open_fields",
    "counted_as_one",
    "field_that_would_narrow_most",
    "note",
)


def share(part: int, whole: int) -> str:
    """A count with its share in whole per cent: `101 (58 %)`."""
    return f"{part} ({percent(part / whole)})" if whole else f"{part}"


def percent(part: float | None) -> str:
    """A share in whole per cent, halves upwards: `58 %`; nothing for None."""
    return "" if part is None else f"{math.floor(100 * part + 0.5)} %"


def count(number: float) -> str:
    """A number of recipes, in groups of three digits: `12 600`; a half where a median has one."""
    return f"{number:,.1f}".removesuffix(".0").replace(",", " ")


def summary(audit: Audit) -> str:
    """The main figures, a few lines."""
    total = audit.whole.papers
    lines = [f"{_papers(total)} in {audit.source}"]
    lines += [f"  {name:<11} {share(n, total):<12} {BASES[name]}" for name, n in audit.whole.basis.items()]
    lines.append(f"{len(audit.adaptations)} distinct peer-reviewed adaptations")
    if audit.spread is not None:
        varied = [each for each in audit.fields if each.name in audit.spread.left_if_stated and each.share is not None]
        rarest = sorted(varied, key=lambda each: each.share or 0.0)[:_NAMED]
        told = (f"{each.name} {each.stated} of {each.stated + each.not_stated}" for each in rarest)
        lines += [f"stated least often, of what changes the map: {', '.join(told)}"] if rarest else []
        lines.append(f"recipes left open: {_spread(audit.spread)}")
        lines += [f"stating {name} would leave {percent(left)} of them on average" for name, left in _best(audit)[:1]]
    return "\n".join([*lines, *(f"note: {note}" for note in audit.notes)])


def _papers(number: int) -> str:
    return f"{number} paper{'s' if number > 1 else ''}"


def _spread(spread: Spread) -> str:
    first, median, third = map(count, spread.quartiles)
    models = ", ".join(f"{name} {papers}" for name, papers in spread.models.items())
    ends = f"{count(spread.least)} to {count(spread.most)}"
    return f"median {median}, quartiles {first} and {third}, {ends}, over {_papers(spread.papers)} ({models})"


def _best(audit: Audit) -> list[tuple[str, float]]:
    """Fields by how few recipes would be left if they were stated, the one that leaves fewest first."""
    return [] if audit.spread is None else sorted(audit.spread.left_if_stated.items(), key=lambda pair: pair[1])


def markdown(audit: Audit) -> str:
    """The tables as a page of Markdown."""
    total = audit.whole.papers
    basis = [(f"`{name}`", BASES[name], share(n, total)) for name, n in audit.whole.basis.items()]
    parts = [
        f"# Audit of {in_markdown(audit.source)}",
        f"{_papers(total)}, {len(audit.adaptations)} distinct peer-reviewed adaptations.",
        _table(("basis", "the paper ...", "papers"), basis),
        "## Fields of the checklist",
        _table(("group", "field", "stated", "not stated", "does not apply", "share stated"), _field_lines(audit)),
        "## Groups of the checklist",
        _table(("group", "cells stated", "not stated", "papers that state all"), _group_lines(audit)),
    ]
    for heading, those in (("Years", audit.years), ("Venues", audit.venues), ("Tasks", audit.tasks)):
        parts += [f"## {heading}", _parts(those)]
    parts += ["## Recipes left open", *_recipes(audit)]
    if audit.notes:
        parts += ["## Notes", "\n".join(f"- {in_markdown(note)}" for note in audit.notes)]
    return "\n\n".join(parts) + "\n"


def _field_lines(audit: Audit) -> list[Sequence[str]]:
    return [
        (each.group, f"`{each.name}`", "no column", "", "", "")
        if each.not_coded
        else (each.group, f"`{each.name}`", f"{each.stated}", f"{each.not_stated}", f"{each.not_applicable}", told)
        for each in audit.fields
        for told in [percent(each.share)]
    ]


def _group_lines(audit: Audit) -> list[Sequence[str]]:
    return [
        (
            each.name,
            share(each.stated, each.stated + each.not_stated),
            f"{each.not_stated}",
            share(each.whole, audit.whole.papers),
        )
        for each in audit.groups
    ]


def _parts(parts: Iterable[Part]) -> str:
    lines = [
        (
            in_markdown(each.name),
            f"{each.papers}",
            *(f"{n}" for n in each.basis.values()),
            percent(each.stated),
            "" if each.recipes is None else count(each.recipes),
        )
        for each in parts
    ]
    return _table(("", "papers", *(f"`{name}`" for name in BASES), "share stated", "median recipes"), lines)


def _recipes(audit: Audit) -> list[str]:
    lines = [
        (
            in_markdown(row.key),
            in_markdown(row.model),
            count(row.recipes),
            f"{len(row.open)}",
            f"`{row.best}`" if row.best else "",
        )
        for row in audit.rows
    ]
    listed = _table(("paper", "counted on", "recipes", "open fields", "field that would narrow most"), lines)
    if audit.spread is None:
        return [listed]
    best = [(f"`{name}`", percent(left)) for name, left in _best(audit)]
    narrowed = _table(("field", "recipes left if it were stated, mean over papers"), best)
    spread = in_markdown(_spread(audit.spread))
    return [f"{spread[0].upper()}{spread[1:]}.", narrowed, listed]


def rows_csv(audit: Audit) -> str:
    """A line per paper."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    extra = list(audit.rows[0].extra)
    writer.writerow((*_LINE, *extra))
    for row in audit.rows:
        open_, one = "|".join(row.open), "|".join(row.as_one)
        own = (row.line, row.key, row.model, row.recipes, len(row.open), open_, one, row.best, row.note)
        writer.writerow((*own, *(row.extra[column] for column in extra)))
    return text.getvalue()


def _table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [heads, ["---"] * len(heads), *lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
