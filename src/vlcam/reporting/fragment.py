r"""A report as a fragment of LaTeX, for `\input`."""

from __future__ import annotations

import re
from itertools import groupby
from typing import TYPE_CHECKING
from unicodedata import normalize

from vlcam.markup import visible

if TYPE_CHECKING:
    from vlcam.reporting.checklist import Row
    from vlcam.reporting.report import Report

__all__ = ["document", "escape"]

_SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "`": r"\textasciigrave{}",
    "\u200b": r"\allowbreak{}",
    **dict.fromkeys("\u2060\ufeff", ""),  # without a width, and without a glyph in fonts of LaTeX
    **{sign: f"\\{sign}" for sign in "{}$&#_%"},
}
_LONG = 20  # signs without a blank beside which a narrow column has no room
_PART = re.compile(r"[0-9a-f]{8}|[^._/]+[._/]*|[._/]+")


def escape(text: str) -> str:
    """Any text as LaTeX that prints it; straight quotes become typographic ones, line ends become blanks."""
    spelt = "".join(_SPECIAL.get(sign, sign) for sign in normalize("NFC", visible(text)))
    apart = re.sub(r"([-',])(?=\1)", r"\1{}", spelt)  # two of these would be set as one sign
    return re.sub(r'(^|(?<=[\s(]))"', "``", apart).replace('"', "''")


def document(report: Report) -> str:
    """Paragraph, formula, a table for every group of the checklist, and the sources as a comment."""
    exp = report.explanation
    tables = [_table(group, list(rows)) for group, rows in groupby(report.checklist, lambda row: row.group)]
    parts = [
        r"% Needs \usepackage{amsmath}; texts in other than Latin script need XeLaTeX or LuaLaTeX and a font.",
        rf"\paragraph{{Explanation of ``{escape(exp.subject)}''.}}" + "\n" + _breakable(report.paragraph),
        report.formula,
        *tables,
        *([_comment(report.bibtex)] if report.bibtex else []),
    ]
    return "\n\n".join(parts) + "\n"


def _table(group: str, rows: list[Row]) -> str:
    lines = [rf"{escape(row.item)} & {_breakable(row.stated)} & {_places(row.source)} \\" for row in rows]
    return "\n".join(
        [
            rf"\paragraph{{Checklist: {escape(group)}.}}\mbox{{}}",
            "",
            r"\noindent{\footnotesize\sloppy",
            r"\begin{tabular}{@{}p{0.24\linewidth}p{0.44\linewidth}p{0.24\linewidth}@{}}",
            r"\hline",
            *lines,
            r"\hline",
            r"\end{tabular}}",
        ]
    )


def _breakable(text: str) -> str:
    """Text whose long words may be parted without a hyphen: dotted names behind a dot, hashes anywhere."""
    return " ".join(
        r"\allowbreak{}".join(map(escape, _PART.findall(word))) if len(word) > _LONG else escape(word)
        for word in text.split()
    )


def _places(source: str) -> str:
    spelt = escape(source).replace(".", r".\allowbreak{}")
    return rf"\texttt{{{spelt}}}" if source else ""


def _comment(bibtex: str) -> str:
    return "\n".join(["% For the bibliography:", *(f"% {line}" for line in bibtex.strip().splitlines())])
