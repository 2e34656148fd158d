"""A report as Markdown."""

from __future__ import annotations

import re
from itertools import groupby
from typing import TYPE_CHECKING

from vlcam import wording

if TYPE_CHECKING:
    from vlcam.reporting.report import Report

__all__ = ["document", "escape"]

_SIGNS = re.compile(r"([\\`*_{}\[\]<>|~#])")


def escape(text: str) -> str:
    """Any text as Markdown that shows it, in one line, also within a table."""
    return _SIGNS.sub(r"\\\1", " ".join(text.split()).replace("&", "&amp;"))


def document(report: Report) -> str:
    """Paragraph, checklist, formula, scores and BibTeX."""
    exp = report.explanation
    parts = [
        f"# {escape(exp.subject)}",
        f"Recipe {escape(exp.recipe.name)} ({exp.recipe.fingerprint}), status {exp.status}.",
        "## Methods",
        escape(report.paragraph),
        "## Checklist",
    ]
    for group, rows in groupby(report.checklist, lambda row: row.group):
        lines = [f"| {escape(row.item)} | {escape(row.stated)} | {_places(row.source)} |" for row in rows]
        parts += [f"### {group}", "\n".join(["| item | stated | in the record |", "|---|---|---|", *lines])]
    parts += ["## Formula", f"```text\n{wording.formula(exp.recipe)}\n```"]
    if report.bibtex:
        parts += ["## BibTeX", f"```bibtex\n{report.bibtex.strip()}\n```"]
    return "\n\n".join(parts) + "\n"


def _places(source: str) -> str:
    return ", ".join(f"`{place}`" for place in source.split(", ")) if source else ""
