"""Every phrase of a caption with its map, its peak and its box: what `ground` returns."""

from __future__ import annotations

import io
import os
from collections import UserDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image
from torch import Tensor

from vlcam import archive
from vlcam.boxes import RULE, Box, Component, area, largest_component
from vlcam.errors import InputError, UnknownNameError, listing
from vlcam.evidence import Status
from vlcam.explanation import Explanation
from vlcam.groundpicture import SIDE, drawn, figure
from vlcam.phrases import Place

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "GroundedPhrase",
    "Grounding",
    "check_caption",
    "grounded",
]

Span = tuple[int, int]

_SCORE = "largest value of the raw map on the token grid"


def check_caption(image: Any, text: Any, *, takes_text: bool) -> None:
    """Make sure that it is one image with one caption, for a model that takes text.

    Raises:
        InputError: it is not.
    """
    if not takes_text:
        raise InputError(
            "this model takes no text, so that there are no phrases to ground; explain a class instead: "
            "explain(image, target=...)"
        )
    if not isinstance(text, str) or not text.strip():
        raise InputError(f"text={text!r}: ground takes one caption, a string of at least one word")
    if isinstance(image, (list, tuple, Mapping, UserDict)) or (isinstance(image, Tensor) and image.ndim > 3):
        raise InputError(f"an image of type {type(image).__name__}: ground takes one image, and no list or batch")


@dataclass(frozen=True, eq=False)
class GroundedPhrase:
    """A phrase and where the model looked for it.

    Attributes:
        phrase: as typed in the caption.
        span: its half-open character range there.
        occurrence: which of several, counted from 1; None where it stands once.
        explanation: its map, with recipe and record.
        peak: (x, y) of the heatmap's highest pixel in the original image; None where there is nothing to show.
        component: what the box is around, with the numbers of the rule; None where there is nothing to show.
        score: the largest value of the raw map, `explanation.tokens`. It compares phrases of one grounding only.
    """

    phrase: str
    span: Span
    occurrence: int | None
    explanation: Explanation
    peak: tuple[int, int] | None
    component: Component | None
    score: float

    def __repr__(self) -> str:
        """One line: the phrase and its box, or why it has none."""
        return f"<GroundedPhrase {self.phrase!r} {self.box or self.status}>"

    @property
    def box(self) -> Box | None:
        """(x0, y0, x1, y1) in pixels of the original image, half-open; None where there is nothing to show."""
        return None if self.component is None else self.component.box

    @property
    def status(self) -> Status:
        """`ok`, or why there is no box; a signed map without a positive value has `no positive evidence`."""
        found = self.explanation.status
        return "no positive evidence" if found == "ok" and self.component is None else found

    def record(self) -> dict[str, Any]:
        """Phrase, place, box, score, and the record of the explanation, as JSON values."""
        run, part = self.explanation.provenance["run"], self.component
        return {
            "phrase": self.phrase,
            "span": list(self.span),
            "occurrence": self.occurrence,
            "status": self.status,
            "peak": None if self.peak is None else list(self.peak),
            "box": None if self.box is None else list(self.box),
            "component": None
            if part is None
            else {"level": part.level, "area": part.area, "components": part.components},
            "score": self.score,
            "target": run["target"],
            "target_value": run["target_value"],
            "explanation": self.explanation.record(),
        }


def grounded(explanation: Explanation, place: Place, threshold: float) -> GroundedPhrase:
    """A phrase with the peak and the box of its explanation, by `largest_component`.

    Args:
        explanation: of the phrase, over the image.
        place: the phrase and where it stands in the caption.
        threshold: of the rule.

    Raises:
        RecipeError: the map is over the text.
    """
    peak = component = None
    if explanation.status == "ok":
        heatmap = explanation.heatmap
        component = largest_component(heatmap, threshold)
        if component is not None:
            y, x = divmod(int(np.nanargmax(heatmap)), heatmap.shape[1])
            peak = (x, y)
    score = float(explanation.tokens.max())
    return GroundedPhrase(place.phrase, place.span, place.occurrence, explanation, peak, component, score)


@dataclass(frozen=True, eq=False, repr=False)
class Grounding:
    """Every phrase of a caption that was grounded, in order; an index is a number or a phrase.

    Attributes:
        text: the caption as typed.
        phrases: what was found, in order.
        threshold: of the rule of the boxes.
        found_by: how the phrases were chosen: `given`, or the rule of `vlcam.phrases`.
        cut: phrases that the rule found and the model did not read, because they lie behind its limit.
    """

    text: str
    phrases: tuple[GroundedPhrase, ...]
    threshold: float
    found_by: str
    cut: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """One line: how many phrases have a box, and by which recipe."""
        boxes = sum(each.box is not None for each in self.phrases)
        return f"<Grounding of {self.text!r} by {self._first.recipe.name}: {len(self)} phrases, {boxes} boxes>"

    def _repr_png_(self) -> bytes | None:
        """The picture with boxes, which notebooks show; nothing where the image is missing."""
        if self._first.image is None:
            return None
        buffer = io.BytesIO()
        self.drawn().save(buffer, "PNG")
        return buffer.getvalue()

    def __len__(self) -> int:
        """How many phrases there are."""
        return len(self.phrases)

    def __iter__(self) -> Iterator[GroundedPhrase]:
        """The phrases in order."""
        return iter(self.phrases)

    def __contains__(self, key: object) -> bool:
        """Whether a phrase, or what was found for one, is here."""
        return any(each is key or (isinstance(key, str) and _alike(each.phrase, key)) for each in self.phrases)

    def __getitem__(self, key: int | str | tuple[str, int]) -> GroundedPhrase:
        """A phrase by its number, by its words, or by its words and which of several: `grounding["red star", 2]`.

        Raises:
            UnknownNameError: no such phrase; lists those there are.
            InputError: words that stand more than once, without which.
        """
        if isinstance(key, int):
            return self.phrases[key]
        words, which = key if isinstance(key, tuple) else (key, None)
        found = [each for each in self.phrases if _alike(each.phrase, words)]
        if which is not None:
            found = [each for each in found if (each.occurrence or 1) == which]
        if not found:
            raise UnknownNameError(f"no phrase {key!r}; there are {listing(self._names())}")
        if len(found) > 1:
            raise InputError(f"phrase {key!r} stands {len(found)} times here; say which: {listing(self._names())}")
        return found[0]

    def _names(self) -> list[str | tuple[str, int]]:
        return [each.phrase if each.occurrence is None else (each.phrase, each.occurrence) for each in self.phrases]

    @property
    def _first(self) -> Explanation:
        return self.phrases[0].explanation

    def record(self) -> dict[str, Any]:
        """Text, rule with its numbers, and every phrase with the record of its explanation, as JSON values."""
        record = self._first.provenance
        return {
            "text": self.text,
            "image": dict(record["image"]),
            "model": record["model"]["id"],
            "phrases": {"found_by": self.found_by, "cut": list(self.cut)},
            "box_rule": RULE | {"threshold": self.threshold},
            "score": _SCORE,
            "grounded": [each.record() for each in self.phrases],
        }

    def to_coco(self, *, image_id: int, category_ids: Mapping[str, int] | None = None) -> dict[str, Any]:
        """The boxes in the layout of COCO: `images`, `annotations`, `categories`, and `info` on those without a box.

        `bbox` is [x, y, width, height]. Each annotation has COCO's keys, and `score`, `caption`, `phrase`, `span`,
        `peak` besides; the list is what COCO's tools load as results.

        Args:
            image_id: the image's number in your data.
            category_ids: the number of each phrase's category, whatever the case and the blanks of the phrase; by
                default all phrases are of category 1, `phrase`.

        Returns:
            A dict of JSON values.

        Raises:
            UnknownNameError: `category_ids` lacks a phrase.
        """
        height, width = self._first.placement.original
        numbers = [1] * len(self) if category_ids is None else [_category(p.phrase, category_ids) for p in self]
        names = {1: "phrase"} if category_ids is None else {n: name for name, n in [*category_ids.items()][::-1]}
        annotations = [
            {
                "id": index,
                "image_id": image_id,
                "category_id": number,
                "bbox": [each.box[0], each.box[1], each.box[2] - each.box[0], each.box[3] - each.box[1]],
                "area": int(area(each.box)),
                "iscrowd": 0,
                "score": each.score,
                "caption": self.text,
                "phrase": each.phrase,
                "span": list(each.span),
                "peak": None if each.peak is None else list(each.peak),
            }
            for index, (each, number) in enumerate(zip(self.phrases, numbers, strict=True), start=1)
            if each.box is not None
        ]
        without = [{"phrase": p.phrase, "span": list(p.span), "status": p.status} for p in self if p.box is None]
        name = self._first.provenance["image"]["name"]
        return {
            "info": {
                "description": f"{self._first.recipe.name} of {self._first.provenance['model']['id']}",
                "recipe_fingerprint": self._first.recipe.fingerprint,
                "box_rule": RULE | {"threshold": self.threshold},
                "score": _SCORE,
                "without_box": without,
            },
            "images": [{"id": image_id, "file_name": name, "width": width, "height": height}],
            "annotations": annotations,
            "categories": [{"id": number, "name": name} for number, name in sorted(names.items())],
        }

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write `record()` as JSON.

        Args:
            path: ends in `.json`.
            overwrite: whether an existing file may be replaced.

        Returns:
            The path.

        Raises:
            FileError: another ending, the file exists, or it cannot be written.
        """
        return archive.write_json(Path(path), "a grounding", self.record(), overwrite=overwrite)

    def drawn(self, *, side: int = SIDE) -> Image.Image:
        """The image with a numbered box and a point at the peak of every phrase; phrases and scores stand below.

        Args:
            side: an image whose longer side is shorter is enlarged, by a whole factor, to at least this many pixels.

        Returns:
            An RGB image.

        Raises:
            InputError: the image came from a file that does not carry it, or a side below 1.
        """
        return drawn(self, side=side)

    def figure(self) -> Figure:
        """The image with all boxes and peaks, then the map of every phrase with its own. Needs the extra `plot`.

        Returns:
            A matplotlib figure that belongs to no window.

        Raises:
            InputError: matplotlib is not installed.
        """
        return figure(self)


def _alike(one: str, other: str) -> bool:
    """Whether phrases are the same but for case and blanks."""
    return one.casefold().split() == other.casefold().split()


def _category(phrase: str, categories: Mapping[str, int]) -> int:
    for name, number in categories.items():
        if _alike(name, phrase):
            return number
    raise UnknownNameError(f"category_ids has no phrase {phrase!r}; it has {listing(categories)}")
