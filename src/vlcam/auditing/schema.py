"""The table that an audit reads, as data: its columns, what each may hold, which model stands for an architecture."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import get_args

from vlcam.choices import GROUPS, WORDS, Departure, Excluded

__all__ = [
    "ABOUT",
    "ANY",
    "ARCHITECTURES",
    "BASES",
    "COLUMNS",
    "FIELDS",
    "LISTS",
    "MEMBERS",
    "NONE",
    "NOT_APPLICABLE",
    "NUMBERS",
    "REFERENCE",
    "REQUIRED",
    "STATED",
    "TEMPLATE",
    "Cell",
    "Paper",
    "architecture_of",
    "words_of",
]

BASES = {
    "cnn_paper": "cites the paper of Grad-CAM for CNNs and nothing else for its adaptation",
    "justified": "justifies its adaptation",
    "code_only": "points at a code repository only",
    "other": "none of these",
}
"""How a paper backs its adaptation."""

ABOUT = {
    "key": "a short name of the paper, different in every row",
    "title": "its title",
    "venue": "where it was published",
    "year": "when, four digits",
    "task": "what the explained model does",
    "architecture": "the explained model, for example `ViT-B/16`",
    "basis": "how the adaptation is backed",
    "adaptation": "name of the distinct peer-reviewed adaptation that it uses or introduces; empty if none",
}
"""Columns that say which paper it is, in order, with their meaning."""

REQUIRED = ("key", "basis")
FIELDS = {field: group for group, fields in GROUPS.items() for field in fields}
"""Columns of the checklist: every field of a recipe but its name, in order, with its group."""
COLUMNS = (*ABOUT, *FIELDS)

STATED = "stated"
"""A cell that says: stated, in words that the vocabulary does not hold."""
NOT_APPLICABLE = "n/a"
ANY = "|"
"""Between values of which a paper uses each."""
MEMBERS = "+"
"""Between the members of one value that is a list."""
NONE = "none"
"""The empty list, where a field holds a list of names."""
NUMBERS = ("layers", "queries")
"""Fields that hold a word or a list of whole numbers."""
LISTS = ("exclude", "departures")
"""Fields that hold a list of names."""
_WORDS: dict[str, tuple[str, ...]] = {
    "layers": ("last", "all"),
    "queries": ("cls", "registers", "patches", "pooled", "all", "phrase", "none"),
    "exclude": get_args(Excluded),
    "departures": get_args(Departure),
    "discard": (),
}

REFERENCE = "tiny-vit"
"""The embedded model on which recipes are counted where nothing else is said."""
ARCHITECTURES = {
    "vit": "tiny-vit",
    "deit": "tiny-vit",
    "beit": "tiny-beit",
    "swin": "tiny-swin",
    "clip": "tiny-clip",
    "blip": "tiny-blip-itm",
    "blip caption": "tiny-blip-caption",
    "blip vqa": "tiny-blip-vqa",
}
"""Which embedded model stands for an architecture: one with the same sites, tokens and scores, and of a few blocks."""

TEMPLATE = {
    "key": "first-paper",
    "title": "Put the first paper here",
    "venue": "Journal or conference",
    "year": "2026",
    "task": "classification",
    "architecture": "ViT-B/16",
    "basis": "cnn_paper",
    "site": "F1",
    "layers": "last",
    "target": "class",
    "exclude": "cls",
    "weighting": "gradcam",
    "heads": NOT_APPLICABLE,
    "upsample": STATED,
}
"""The row that an empty table starts with."""


@dataclass(frozen=True)
class Cell:
    """What a paper says of one field.

    Attributes:
        written: the cell as it stands in the table.
        state: `stated`, `not stated`, `n/a`, or `not coded` where the table has no such column.
        values: the values of the vocabulary that it states; empty where its words are not in the vocabulary.
    """

    written: str
    state: str
    values: tuple[object, ...] = ()


@dataclass(frozen=True)
class Paper:
    """A row of the table.

    Attributes:
        line: where it begins in the file, from 1; for rows that are given as mappings, their number.
        about: the columns of `ABOUT`, in order; empty text where nothing is said.
        cells: what it says of each field.
        extra: columns that the schema does not know.
    """

    line: int
    about: dict[str, str]
    cells: dict[str, Cell]
    extra: dict[str, str]

    @property
    def key(self) -> str:
        """The paper's short name."""
        return self.about["key"]


def words_of(field: str) -> tuple[str, ...]:
    """The words that a field of the checklist knows; none for one that holds numbers alone."""
    return WORDS[field] if field in WORDS else _WORDS[field]


def architecture_of(written: str) -> str | None:
    """The architecture that a cell begins with; None where the table has none, as for `ResNet-50` or `BLIP-2`."""
    plain = re.sub(r"[\s_-]+", " ", written.strip().lower())
    for known in sorted(ARCHITECTURES, key=len, reverse=True):
        if re.match(rf"{known}(?![a-z]| ?v?\d)", plain):
            return known
    return None
