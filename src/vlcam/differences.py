"""What differs between the records of two explanations, sorted by what it is that differs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["KINDS", "Difference", "by_kind", "kind_of", "leaves"]

KINDS = ("recipe", "weights", "model", "preprocessing", "image", "text", "versions", "numbers")
"""What can differ, in the order in which it is told; `text` is all that was asked about, also an answer or a class."""

# The longest beginning of a field's path decides.
_KINDS = {
    "recipe": "recipe",
    "run": "recipe",
    "run.batch": "model",
    "run.blocks": "model",
    "run.prefix_tokens": "model",
    "run.windows": "model",
    "run.grid": "preprocessing",
    "run.against": "text",
    "run.class": "text",
    "run.occurrence": "text",
    "run.phrase": "text",
    "run.pooled": "text",
    "run.span": "text",
    "run.target_phrase": "text",
    "run.apart": "numbers",
    "run.block_values": "numbers",
    "run.target_value": "numbers",
    "model": "model",
    "model.weights_sha256": "weights",
    "placement": "preprocessing",
    "image": "image",
    "image.size": "preprocessing",
    "image.steps": "preprocessing",
    "text": "text",
    "answer": "text",
    "words": "text",
    "versions": "versions",
}


@dataclass(frozen=True)
class Difference:
    """One field that differs.

    Attributes:
        kind: one of `KINDS`.
        field: dotted path in the record, or words where there is no such field.
        one: the value of the first.
        other: the value of the second.
    """

    kind: str
    field: str
    one: Any
    other: Any

    def said(self, first: str, second: str) -> str:
        """One line, with a word in front of each value: `run.blocks: was 6, is 12`."""
        return f"{self.field}: {first} {self.one!r}, {second} {self.other!r}"


def kind_of(field: str) -> str:
    """The kind of a field, by its dotted path; `numbers` for what is no field of a record."""
    parts = field.split(".")
    if parts[0] == "words" and parts[-1] == "status":
        return "numbers"
    paths = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((_KINDS[path] for path in paths if path in _KINDS), "numbers")


def leaves(path: str, one: Any, other: Any, *, shared: bool = False) -> Iterator[Difference]:
    """The fields, tables taken apart, that have another value in each of two records.

    Args:
        path: where both stand.
        one: the first record.
        other: the second.
        shared: whether only fields that both have count: a release may not record what another does.
    """
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        keys = [key for key in one if key in other] if shared else dict.fromkeys([*one, *other])
        for key in keys:
            yield from leaves(f"{path}.{key}", one.get(key), other.get(key), shared=shared)
    elif one != other:
        yield Difference(kind_of(path), path, one, other)


def by_kind(found: Iterable[Difference]) -> dict[str, tuple[Difference, ...]]:
    """The differences of every kind, none left out, in the order of `KINDS`."""
    given = tuple(found)
    return {kind: tuple(each for each in given if each.kind == kind) for kind in KINDS}
