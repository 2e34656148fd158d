"""`audit`: from a table to its audit."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from vlcam.auditing.counting import adaptations, count_fields, count_groups, part, parts_by
from vlcam.auditing.opening import Opening, openings, spread_of
from vlcam.auditing.reading import Table, read_file, read_rows
from vlcam.auditing.result import Audit
from vlcam.auditing.schema import COLUMNS, FIELDS, Paper
from vlcam.errors import listing
from vlcam.explainer import Explainer

__all__ = ["audit"]

_NAMED = 5


def audit(
    papers: str | os.PathLike[str] | Iterable[Mapping[str, object]], model: Explainer | str | Path | None = None
) -> Audit:
    """Count what papers state of how their maps were made, and how many recipes each leaves open.

    Args:
        papers: a CSV file with a row per paper, or such rows as mappings from column to value. `docs/audit.md` has the
            columns and what a cell may hold.
        model: on which model recipes are counted, a model or the name of one, for all papers; by default the embedded
            one that stands for a paper's `architecture`, and `tiny-vit` where none does.

    Returns:
        The audit.

    Raises:
        FileError: the file cannot be read.
        InputError: cells that the schema does not allow; all problems in one message.
        UnknownNameError: no model of that name.
    """
    table = read_file(papers) if isinstance(papers, (str, os.PathLike)) else read_rows(papers)
    rows = openings(table.papers, model)
    recipes = {row.key: row.recipes for row in rows if row.recipes}
    years, venues, tasks = (parts_by(table.papers, column, recipes) for column in ("year", "venue", "task"))
    return Audit(
        source=table.source,
        whole=part("all", table.papers, recipes),
        adaptations=adaptations(table.papers),
        fields=count_fields(table.papers),
        groups=count_groups(table.papers),
        years=years,
        venues=venues,
        tasks=tasks,
        rows=rows,
        spread=spread_of(rows),
        notes=(*_of_columns(table), *_of_rows(table.papers, rows)),
    )


def _of_columns(table: Table) -> list[str]:
    notes = []
    for column in table.unknown:
        near = difflib.get_close_matches(column.lower(), table.missing, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        notes.append(f"column {column!r} is not part of the schema, and is kept as it is{hint}")
    lacking = [column for column in table.missing if column in FIELDS]
    if lacking:
        notes.append(f"no column for {listing(lacking)}: not counted as unstated, but open where recipes are counted")
    lacking = [column for column in table.missing if column in COLUMNS and column not in FIELDS]
    if lacking:
        notes.append(f"no column for {listing(lacking)}")
    return notes


def _of_rows(papers: Sequence[Paper], rows: Sequence[Opening]) -> list[str]:
    notes = []
    assumed = [(paper, row.model) for paper, row in zip(papers, rows, strict=True) if row.assumed]
    if assumed:
        written = list(dict.fromkeys(paper.about["architecture"] or "none given" for paper, _ in assumed))
        notes.append(
            f"{_papers(assumed)} counted on {assumed[0][1]}, since no embedded model stands for the architecture: "
            f"{_some(written)}"
        )
    changed = [row.key for row in rows if row.note and row.recipes]
    if changed:
        notes.append(f"{_papers(changed)} with numbers of blocks that the model does not have: {_some(changed)}")
    without = [row.key for row in rows if not row.recipes]
    if without:
        notes.append(f"{_papers(without)} that no recipe fits, left out of the median: {_some(without)}")
    return notes


def _papers(those: Sequence[object]) -> str:
    return f"{len(those)} paper{'s' if len(those) > 1 else ''}"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return listing(names[:_NAMED]) + more
