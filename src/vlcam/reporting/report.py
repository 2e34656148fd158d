"""Report: what a paper should say of an explanation, as text, tables, LaTeX, JSON and a page."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlcam import wording
from vlcam.archive import write_text
from vlcam.errors import FileError
from vlcam.reporting import fragment, latex, markdown
from vlcam.reporting.checklist import Row, checklist
from vlcam.reporting.prose import paragraph
from vlcam.reporting.source import Source, source

if TYPE_CHECKING:
    import os

    from vlcam.explanation import Explanation

__all__ = ["ENDINGS", "SCHEMA", "Report"]

SCHEMA = 1
"""Version of the keys of `Report.to_dict`."""
ENDINGS = {".html": "to_html", ".json": "to_json", ".md": "to_markdown", ".tex": "to_latex"}
"""Endings that `Report.save` knows, and what writes them."""


@dataclass(frozen=True, eq=False, repr=False)
class Report:
    """The reporting checklist of an explanation, filled in from its record, and the methods paragraph with it.

    Nothing is computed again: a file that was saved is enough, with its image or without.

    Attributes:
        explanation: what is reported.
    """

    explanation: Explanation

    def __repr__(self) -> str:
        """One line: whose report it is."""
        return f"<Report of {self.explanation!r}>"

    @cached_property
    def checklist(self) -> tuple[Row, ...]:
        """Every item with its group, what is stated, and where in the record that stands."""
        return checklist(self.explanation)

    @cached_property
    def paragraph(self) -> str:
        """The methods paragraph in plain text, one line."""
        return paragraph(self.explanation)

    @cached_property
    def formula(self) -> str:
        r"""The formula as an `align*` environment of LaTeX, which needs the package amsmath."""
        return latex.align(wording.formula(self.explanation.recipe))

    @property
    def source(self) -> Source:
        """The published recipe of the same name, and the fields in which this one differs from it."""
        return source(self.explanation)

    @property
    def bibtex(self) -> str:
        """The recipe's sources as BibTeX; empty where the catalogue has no recipe of that name."""
        return self.source.bibtex

    def to_dict(self) -> dict[str, Any]:
        """Everything but the pictures as JSON values; `docs/report.md` has the keys."""
        exp = self.explanation
        return {
            "schema": SCHEMA,
            "subject": exp.subject,
            "recipe": exp.recipe.to_dict() | {"fingerprint": exp.recipe.fingerprint},
            "status": exp.status,
            "scores": {name: {"kind": score.kind, "value": score.value} for name, score in exp.scores.items()},
            "checklist": [
                {"group": row.group, "item": row.item, "stated": row.stated, "source": row.source}
                for row in self.checklist
            ],
            "paragraph": self.paragraph,
            "formula": {"text": wording.formula(exp.recipe).splitlines(), "latex": self.formula},
            "citation": self.source.citation,
            "differences": list(self.source.differences),
            "bibtex": self.bibtex,
        }

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n"

    def to_markdown(self) -> str:
        """Paragraph, checklist, formula and BibTeX as Markdown."""
        return markdown.document(self)

    def to_latex(self) -> str:
        r"""The same as a fragment for `\input`; it needs amsmath, and XeLaTeX or LuaLaTeX for other scripts."""
        return fragment.document(self)

    def to_html(self) -> str:
        """One page that needs nothing else: pictures, words, every choice, the record."""
        from vlcam.reporting.page import page  # jinja2 and latex2mathml are only needed here

        return page(self)

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write the report in the form that the name's ending says.

        Args:
            path: ends in `.html`, `.json`, `.md` or `.tex`.
            overwrite: whether an existing file may be replaced.

        Returns:
            The path.

        Raises:
            FileError: another ending, a folder that does not exist, or the file exists.
        """
        target = Path(path)
        form = ENDINGS.get(target.suffix.lower())
        if form is None:
            raise FileError(
                f"{str(target)!r}: a report is saved as {', '.join(ENDINGS)}; give a name that ends in one of them"
            )
        return write_text(target, getattr(self, form)(), overwrite=overwrite)
