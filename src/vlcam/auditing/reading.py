"""Rows of a table as papers: what each cell says, and everything that is wrong with them in one message."""

from __future__ import annotations

import csv
import difflib
import io
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vlcam.auditing.schema import (
    ABOUT,
    ANY,
    BASES,
    COLUMNS,
    FIELDS,
    LISTS,
    MEMBERS,
    NONE,
    NOT_APPLICABLE,
    NUMBERS,
    REQUIRED,
    STATED,
    Cell,
    Paper,
    words_of,
)
from vlcam.errors import FileError, InputError, listing

__all__ = ["Table", "read_file", "read_rows"]

_SEPARATORS = ",;\t"
_SHOWN = 20


@dataclass(frozen=True)
class Table:
    """Papers, and how the table departs from the schema.

    Attributes:
        source: the file's name, or what rows in memory are called.
        papers: the rows.
        unknown: columns that the schema does not know, as they are written.
        missing: columns of the schema that the table lacks.
    """

    source: str
    papers: tuple[Paper, ...]
    unknown: tuple[str, ...]
    missing: tuple[str, ...]


@dataclass
class _Problems:
    """What is wrong, collected: in which line or row, and what."""

    source: str
    unit: str = "line"
    found: list[tuple[int, str]] = field(default_factory=list)

    def add(self, line: int, what: str, column: str = "") -> None:
        """Note what is wrong in a line, or in one of its cells."""
        self.found.append((line, f"{self.unit} {line}{f', column {column!r}' if column else ''}: {what}"))

    def stop(self) -> None:
        """Raise what was collected, if anything was, in the order of the lines."""
        if not self.found:
            return
        told = [what for _, what in sorted(self.found, key=lambda each: each[0])]
        shown = told[:_SHOWN]
        more = [f"and {len(told) - _SHOWN} more"] if len(told) > _SHOWN else []
        what = f"{len(told)} problem{'s' if len(told) > 1 else ''}"
        raise InputError("\n".join([f"{self.source}: {what}", *(f"  {each}" for each in (*shown, *more))]))


def read_file(path: str | os.PathLike[str]) -> Table:
    """Read a CSV file: UTF-8 with or without a mark, any line ends, separated by commas, semicolons or tabs.

    Raises:
        FileError: no such file, or it cannot be read.
        InputError: not UTF-8, no CSV, or cells that the schema does not allow; all problems in one message.
    """
    file = Path(path)
    try:
        content = file.read_bytes()
    except OSError as error:
        raise FileError(f"{str(file)!r}: cannot be read ({error.strerror})") from None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise InputError(
            f"{file.name}: line {line}: byte {error.object[error.start]:#04x} is not UTF-8; save the table as CSV UTF-8"
        ) from None
    problems = _Problems(file.name)
    lines = list(_lines(text, file.name))
    if not lines:
        raise InputError(f"{file.name}: no header; the first line names the columns, {', '.join(COLUMNS[:8])}, ...")
    (_, header), *body = lines
    rows = list(_as_mappings(header, body, problems))
    return _table(header, rows, problems)


def read_rows(rows: Iterable[Mapping[str, object]]) -> Table:
    """Read rows that are in memory: mappings from column to value; None and a missing key are an empty cell.

    Raises:
        InputError: cells that the schema does not allow; all problems in one message.
    """
    given = list(rows)
    odd = [number for number, row in enumerate(given, start=1) if not isinstance(row, Mapping)]
    if odd:
        raise InputError(f"row {odd[0]}: {type(given[odd[0] - 1]).__name__}; give mappings from column to value")
    header = list(dict.fromkeys(str(column) for row in given for column in row))
    texts = [{str(column): _text(value) for column, value in row.items()} for row in given]
    numbered = [(number, row) for number, row in enumerate(texts, start=1)]
    return _table(header, numbered, _Problems("rows", "row"))


def _text(value: object) -> str:
    """A value as a cell; None and what is not equal to itself (the empty cell of data frames) are empty."""
    return "" if value is None or value != value else str(value).strip()


def _lines(text: str, source: str) -> Iterator[tuple[int, list[str]]]:
    """The rows that are not blank, each with the line on which it begins."""
    first = text.split("\n", 1)[0]
    separator = max(_SEPARATORS, key=lambda sign: sum(_plain(cell) in COLUMNS for cell in first.split(sign)))
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    start = 1
    try:
        for cells in reader:
            if any(cell.strip() for cell in cells):
                yield start, [cell.strip() for cell in cells]
            start = reader.line_num + 1
    except csv.Error as error:
        raise InputError(
            f"{source}: line {start}: no CSV ({error}); a cell that holds the separator, a quote or a line end stands "
            'in quotes, with each of its own quotes doubled: "a ""b"", c"'
        ) from None


def _as_mappings(
    header: Sequence[str], body: Iterable[tuple[int, list[str]]], problems: _Problems
) -> Iterator[tuple[int, dict[str, str]]]:
    for line, cells in body:
        if len(cells) != len(header):
            problems.add(
                line,
                f"{len(cells)} cells, and the header has {len(header)}; add what is missing, or put a cell that holds "
                "the separator in quotes",
            )
        elif unnamed := [cell for column, cell in zip(header, cells, strict=True) if cell and not column]:
            problems.add(line, f"{unnamed[0]!r} stands in a column without a name; name it in line 1")
        else:
            yield line, dict(zip(header, cells, strict=True))


def _table(header: Sequence[str], rows: Sequence[tuple[int, dict[str, str]]], problems: _Problems) -> Table:
    _check_header(header, problems.source)
    known = {column: _plain(column) for column in header if _plain(column) in COLUMNS}
    unknown = tuple(column for column in header if column not in known and column)
    missing = tuple(column for column in COLUMNS if column not in known.values())
    papers = [
        _paper(line, {known.get(column, column): cell for column, cell in row.items()}, unknown, missing, problems)
        for line, row in rows
    ]
    _check_keys(papers, problems)
    problems.stop()
    if not papers:
        raise InputError(f"{problems.source}: no paper; the table needs a row for each, under its header")
    return Table(problems.source, tuple(papers), unknown, missing)


def _plain(column: str) -> str:
    return re.sub(r"[\s-]+", "_", column.strip().strip('"').lower())


def _check_header(header: Sequence[str], source: str) -> None:
    """Stop where columns are wrong, for then every row is."""
    problems = _Problems(source)
    names = [_plain(column) for column in header if column]
    for column in dict.fromkeys(name for name in names if names.count(name) > 1):
        problems.add(1, f"stands {names.count(column)} times; keep one", column)
    for column in REQUIRED:
        if column not in names:
            near = difflib.get_close_matches(column, names, 1)
            hint = f"; is it {near[0]!r}?" if near else ""
            problems.add(1, f"missing; the table needs {listing(REQUIRED)}{hint}", column)
    problems.stop()


def _paper(
    line: int, row: dict[str, str], unknown: Sequence[str], missing: Sequence[str], problems: _Problems
) -> Paper:
    about = {column: row.get(column, "") for column in ABOUT}
    if about["basis"] not in BASES:
        problems.add(line, f"{about['basis']!r}; give one of {listing(BASES)}", "basis")
    if about["year"] and not re.fullmatch(r"\d{4}", about["year"]):
        problems.add(line, f"{about['year']!r}; give four digits, or leave it empty", "year")
    cells = {}
    for name in FIELDS:
        try:
            cells[name] = Cell("", "not coded") if name in missing else _cell(name, row.get(name, ""))
        except ValueError as error:
            problems.add(line, _what_would_do(name, str(error)), name)
    return Paper(line, about, cells, {column: row.get(column, "") for column in unknown})


def _check_keys(papers: Sequence[Paper], problems: _Problems) -> None:
    first: dict[str, int] = {}
    for paper in papers:
        if not paper.key:
            problems.add(paper.line, "empty; give every paper a name of its own", "key")
        elif paper.key in first:
            before = f"{paper.key!r} is that of {problems.unit} {first[paper.key]}, too"
            problems.add(paper.line, f"{before}; give every paper a name of its own, and one row", "key")
        else:
            first[paper.key] = paper.line


def _cell(name: str, written: str) -> Cell:
    """What a cell says of a field.

    Raises:
        ValueError: the part of it that the field does not know.
    """
    if not written:
        return Cell("", "not stated")
    if written.lower() == NOT_APPLICABLE:
        return Cell(written, "n/a")
    if written.lower() == STATED:
        return Cell(written, "stated")
    return Cell(written, "stated", tuple(dict.fromkeys(_value(name, part.strip()) for part in written.split(ANY))))


def _value(name: str, text: str) -> object:
    """One value of a field, as a recipe has it.

    Raises:
        ValueError: not one; its text is the argument.
    """
    spelt = {word.lower(): word for word in words_of(name)}
    if name == "discard" and re.fullmatch(r"0?\.\d+|0", text):
        return float(text)
    if name in NUMBERS and re.fullmatch(r"-?\d+(\s*\+\s*-?\d+)*", text):
        numbers = tuple(int(part) for part in text.split(MEMBERS))
        if len(set(numbers)) == len(numbers):
            return numbers
    elif name in LISTS:
        members = [part.strip().lower() for part in text.split(MEMBERS)]
        if members == [NONE]:
            return ()
        if all(member in spelt for member in members):
            return tuple(word for word in words_of(name) if word in members)
    elif text.lower() in spelt:
        return spelt[text.lower()]
    raise ValueError(text)


def _what_would_do(column: str, value: str) -> str:
    words = words_of(column)
    forms = [f"any of {listing(words)}"] if words else []
    forms += ["whole numbers joined by '+'"] if column in NUMBERS else []
    forms += ["a share of 0 or more, and less than 1"] if column == "discard" else []
    forms += [f"several joined by '+', or {NONE!r}"] if column in LISTS else []
    near = difflib.get_close_matches(value, words, 1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return (
        f"{value!r}{hint}; give {', or '.join(forms)}; several values that a paper uses joined by {ANY!r}; {STATED!r}, "
        f"{NOT_APPLICABLE!r}, or nothing where it is not stated"
    )
