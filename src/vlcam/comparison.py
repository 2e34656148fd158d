"""Two explanations of one image side by side: in which fields they differ, and how far apart their maps are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vlcam.differences import Difference, by_kind, kind_of, leaves
from vlcam.errors import InputError
from vlcam.explanation import Explanation
from vlcam.likeness import TOP, Likeness, Map, likeness

__all__ = ["Comparison", "contrast"]

_WIDTH = 120
_MODEL = ("id", "class", "library", "adapter", "dtype", "device", "options")
_RUN = ("layers", "against", "phrase", "occurrence", "span", "target_phrase", "class")
_NOT_OF_CLASS = ("run.class.chosen",)  # how a class came to be explained does not change what is
_CLOSE = 1e-5


@dataclass(frozen=True)
class Comparison:
    """How two explanations of one image differ.

    Attributes:
        differences: for every kind, as in `Verification`, the fields that differ with both values; those of the record
            that made the maps, not all that follow from them.
        likeness: how alike the maps are.
        compared_on: the cells on which they were compared, in words.
    """

    differences: Mapping[str, tuple[Difference, ...]]
    likeness: Likeness
    compared_on: str

    def __str__(self) -> str:
        """For people: how alike the maps are, then the kinds of differences, each with its lines."""
        found = [f"{self.likeness}, on {self.compared_on}"]
        for kind, each in self.differences.items():
            found += [f"{kind}:", *(f"  {_shortened(one.said('A', 'B'))}" for one in each)] if each else []
        return "\n".join(found if len(found) > 1 else [*found, "no field differs"])

    def to_dict(self) -> dict[str, Any]:
        """As JSON values; a correlation or similarity that is not defined is null."""
        return {
            "rank_correlation": _number(self.likeness.rank_correlation),
            "ssim": _number(self.likeness.ssim),
            "top_overlap": _number(self.likeness.top_overlap),
            "top": self.likeness.top,
            "compared_on": self.compared_on,
            "differences": {
                kind: [{"field": one.field, "a": _plain(one.one), "b": _plain(one.other)} for one in each]
                for kind, each in self.differences.items()
            },
        }


def contrast(one: Explanation, other: Explanation, *, top: float = TOP) -> Comparison:
    """Compare two explanations of one image.

    Maps over the image are compared on the token grid, raw, where both have the same grid over the same part of the
    image; otherwise as heatmaps on the original image, where both models saw it. Maps over the text are compared token
    by token.

    Args:
        one: an explanation.
        other: another.
        top: share of the cells that counts as the strongest.

    Raises:
        InputError: of two images; one map is over the text and the other is not; two maps over other tokens; no part
            of the image that both models saw.
    """
    _check_images(one, other)
    first, second, where = _cells(one, other)
    return Comparison(by_kind(_differences(one, other)), likeness(first, second, top=top), where)


def _check_images(one: Explanation, other: Explanation) -> None:
    """Refuse two images."""
    if one.of_same_image(other):
        return
    hashes = [each.provenance["image"]["sha256"] for each in (one, other)]
    names = [f"{each.provenance['image']['name']!r} {each.placement.original}" for each in (one, other)]
    raise InputError(
        f"explanations of two images, {names[0]} with the SHA-256 {hashes[0]} and {names[1]} with {hashes[1]}: their "
        "maps have no cell in common; give two of one image"
    )


def _cells(one: Explanation, other: Explanation) -> tuple[Map, Map, str]:
    """Both maps on cells that they share, and which cells these are."""
    if one.recipe.of_text != other.recipe.of_text:
        over = [f"{each.recipe.name!r} over the {'text' if each.recipe.of_text else 'image'}" for each in (one, other)]
        raise InputError(f"maps of {over[0]} and {over[1]} have no cell in common; give two over the same")
    if one.recipe.of_text:
        read = [each.provenance["text"]["ids"] for each in (one, other)]
        if read[0] != read[1]:
            raise InputError(
                f"maps over two texts, {one.text!r} and {other.text!r} ({one.tokens.shape[1]} and "
                f"{other.tokens.shape[1]} tokens), have no cell in common; give two of one text and one tokenizer"
            )
        return one.tokens, other.tokens, f"the {one.tokens.shape[1]} tokens of the text"
    rows, columns = one.tokens.shape
    seen = [(each.placement.original, each.placement.box, each.tokens.shape) for each in (one, other)]
    if seen[0] == seen[1]:
        return one.tokens, other.tokens, f"the token grid, {rows} x {columns}"
    height, width = one.placement.original
    return one.heatmap, other.heatmap, f"heatmaps on the original image, {height} x {width} pixels"


def _differences(one: Explanation, other: Explanation) -> Iterator[Difference]:
    """The fields that made the maps. What an older release did not record is left out."""
    for field, (first, second) in one.recipe.differences(other.recipe).items():
        yield Difference("recipe", f"recipe.{field}", first, second)
    yield from leaves("placement", one.record()["placement"], other.record()["placement"])
    was, now = one.provenance, other.provenance
    yield from leaves("model", _some(was["model"], (*_MODEL, "weights_sha256")), now["model"], shared=True)
    yield from leaves("image", _some(was["image"], ("sha256", "pixels_sha256", "steps")), now["image"], shared=True)
    for part in ("text", "answer"):
        yield from _texts(part, was.get(part), now.get(part))
    for each in leaves("run", _some(was["run"], _RUN), now["run"], shared=True):
        if each.field not in _NOT_OF_CLASS:
            yield each
    yield from leaves("versions", was["versions"], now["versions"], shared=True)
    yield from leaves("status", one.status, other.status)
    for name in [name for name in one.scores if name in other.scores]:
        values = one.scores[name].value, other.scores[name].value
        if abs(values[0] - values[1]) > _CLOSE * max(1.0, *map(abs, values)):
            yield Difference("numbers", f"score {name}", *values)


def _texts(part: str, one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> Iterator[Difference]:
    """The text as typed, with the one that it is a phrase of; its tokens only where it is the same text."""
    if one is None or other is None:
        if one is not other:
            yield Difference(kind_of(part), f"{part}.given", *((each or {}).get("given") for each in (one, other)))
        return
    typed = ("given", "whole")
    found = list(leaves(part, *({name: each.get(name) for name in typed} for each in (one, other))))
    yield from found or leaves(part, _some(one, ("ids",)), other, shared=True)


def _some(record: Mapping[str, Any], fields: tuple[str, ...]) -> dict[str, Any]:
    return {field: record[field] for field in fields if field in record}


def _shortened(line: str) -> str:
    return line if len(line) <= _WIDTH * 2 else f"{line[: _WIDTH * 2 - 3]}..."


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _number(value: float) -> float | None:
    return value if np.isfinite(value) else None
