"""A report as Markdown."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from vlcam import wording
from vlcam.markup import in_markdown

if TYPE_CHECKING:
    from vlcam.reporting.report import Report

__all__ = ["document"]


def document(report: Report) -> str:
    """Paragraph, checklist, formula, scores and BibTeX."""
    exp = report.explanation
    parts = [
        f"# {in_markdown(exp.subject)}",
        f"Recipe {in_markdown(exp.recipe.name)} ({exp.recipe.fingerprint}), status {exp.status}.",
        "## Methods",
        in_markdown(report.paragraph),
        "## Checklist",
    ]
    for group, rows in groupby(report.checklist, lambda row: row.group):
        lines = [f"| {in_markdown(row.item)} | {in_markdown(row.stated)} | {_places(row.source)} |" for row in rows]
        parts += [f"### {group}", "\n".join(["| item | stated | in the record |", "|---|---|---|", *lines])]
    parts += ["## Formula", f"```text\n{wording.formula(exp.recipe)}\n```"]
    if report.bibtex:
        parts += ["## BibTeX", f"```bibtex\n{report.bibtex.strip()}\n```"]
    return "\n\n".join(parts) + "\n"


def _places(source: str) -> str:
    return ", ".join(f"`{place}`" for place in source.split(", ")) if source else ""
