"""Every phrase of a caption with its map, its peak and its box: the rule of the boxes, and what `ground` returns."""

from __future__ import annotations

import io
import json
import os
from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from vlcam import textpicture
from vlcam.errors import FileError, InputError, UnknownNameError, listing
from vlcam.evidence import Status
from vlcam.explanation import Explanation
from vlcam.phrases import Place

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "Component",
    "GroundedPhrase",
    "Grounding",
    "check_caption",
    "check_threshold",
    "grounded",
    "iou",
    "largest_component",
]

Box = tuple[int, int, int, int]
Span = tuple[int, int]
Colour = tuple[int, int, int]

_RULE = {
    "name": "largest component",
    "map": "the heatmap: normalised by the recipe, interpolated to the original image; pixels that the model did not "
    "see are left out",
    "at_least": "threshold times the largest value, which must be above zero",
    "connectivity": 8,
    "ties": "of components of equal area the one with the highest value, then the first in raster order",
    "box": "x0, y0, x1, y1 in pixels of the original image, half-open",
}
_SCORE = "largest value of the raw map on the token grid"

# Colours that differ for colour-blind readers, too (Okabe and Ito, without black); phrases have numbers besides.
_PALETTE: tuple[Colour, ...] = (
    (230, 159, 0),
    (86, 180, 233),
    (0, 158, 115),
    (240, 228, 66),
    (204, 121, 167),
    (213, 94, 0),
    (0, 114, 178),
)
_INK, _PAPER = (20, 20, 20), (255, 255, 255)
_SIDE = 480
_LETTERS = 18  # height of the letters of a picture's legend
_COLUMNS, _TILE, _PIXELS = 4, 2.6, 512  # of a figure: tiles in a row, inches, pixels of a picture in a tile


@dataclass(frozen=True)
class Component:
    """A component of a heatmap.

    Attributes:
        box: (x0, y0, x1, y1) in pixels, half-open: the smallest box that holds it.
        level: the value from which on pixels belong to a component.
        area: how many pixels it has.
        components: how many there are at this level, itself among them.
    """

    box: Box
    level: float
    area: int
    components: int


def largest_component(heatmap: NDArray[np.floating], threshold: float = 0.5) -> Component | None:
    """The largest part of a heatmap that is connected and high: the rule of every box.

    Pixels of at least `threshold` times the largest value belong together where they touch, also at a corner. Of these
    components the one with the most pixels is taken; of equal ones that with the highest value, then the first in
    raster order. It need not hold the highest value of all.

    Args:
        heatmap: [H, W], NaN where the model saw nothing.
        threshold: share of the largest value, above 0 and up to 1.

    Returns:
        The component; None where all values are the same, or none is above zero.

    Raises:
        InputError: a threshold outside of its range, an array that is no heatmap.
    """
    from scipy import ndimage  # it takes longer to import than everything here

    check_threshold(threshold)
    if heatmap.ndim != 2 or np.isinf(heatmap).any():
        raise InputError(f"a heatmap of shape {heatmap.shape}: it has two axes, and values that are finite or NaN")
    seen = heatmap[~np.isnan(heatmap)]
    if not len(seen) or not seen.max() > max(0, seen.min()):
        return None
    level = heatmap.dtype.type(threshold * float(seen.max()))
    labels, count = ndimage.label(heatmap >= level, structure=np.ones((3, 3), int))
    areas = np.bincount(labels.ravel())[1:]
    equal = [int(label) + 1 for label in np.flatnonzero(areas == areas.max())]
    label = min(equal, key=lambda each: _rank(heatmap, labels == each)) if len(equal) > 1 else equal[0]
    rows, columns = ndimage.find_objects(labels)[label - 1]
    box = (int(columns.start), int(rows.start), int(columns.stop), int(rows.stop))
    return Component(box, float(level), int(areas[label - 1]), int(count))


def _rank(heatmap: NDArray[np.floating], inside: NDArray[np.bool_]) -> tuple[float, int]:
    """The highest first, then the one that begins first."""
    return -float(heatmap[inside].max()), int(inside.argmax())


def check_threshold(threshold: float) -> None:
    """Refuse what is no share of the largest value.

    Raises:
        InputError: not a number above 0 and up to 1.
    """
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float, np.floating)) or not 0 < threshold <= 1:
        raise InputError(f"threshold={threshold!r}: a share of the heatmap's largest value, above 0 and up to 1")


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


def iou(one: Sequence[float], other: Sequence[float]) -> float:
    """Intersection over union of two boxes (x0, y0, x1, y1), half-open: 1 for equal ones, 0 for those that are apart.

    Raises:
        InputError: not four numbers, or a box without area.
    """
    for box in (one, other):
        if len(box) != 4 or not (box[0] < box[2] and box[1] < box[3]):
            raise InputError(f"box {tuple(box)!r}: give x0, y0, x1, y1 with x0 < x1 and y0 < y1")
    across = min(one[2], other[2]) - max(one[0], other[0])
    down = min(one[3], other[3]) - max(one[1], other[1])
    shared = max(0.0, float(across)) * max(0.0, float(down))
    return shared / (_area(one) + _area(other) - shared)


def _area(box: Sequence[float]) -> float:
    return float(box[2] - box[0]) * float(box[3] - box[1])


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
            "box_rule": _RULE | {"threshold": self.threshold},
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
                "area": int(_area(each.box)),
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
                "box_rule": _RULE | {"threshold": self.threshold},
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
        file = Path(path)
        if file.suffix.lower() != ".json":
            raise FileError(f"{str(file)!r}: a grounding is saved as JSON; give a name that ends in .json")
        text = json.dumps(self.record(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        try:
            with file.open("w" if overwrite else "x", encoding="utf-8") as opened:
                opened.write(text)
        except FileExistsError:
            raise FileError(f"{str(file)!r} exists already; choose another name or pass overwrite=True") from None
        except (OSError, ValueError) as error:  # a null byte in the name is a ValueError
            raise FileError(f"{str(file)!r}: cannot be written ({getattr(error, 'strerror', None) or error})") from None
        return file

    def drawn(self, *, side: int = _SIDE) -> Image.Image:
        """The image with a numbered box and a point at the peak of every phrase; phrases and scores stand below.

        Args:
            side: an image whose longer side is shorter is enlarged, by a whole factor, to at least this many pixels.

        Returns:
            An RGB image.

        Raises:
            InputError: the image came from a file that does not carry it, or a side below 1.
        """
        if side < 1:
            raise InputError(f"side={side!r}: a length in pixels is at least 1")
        image = self._first.picture()
        times = max(1, -(-side // max(image.size)))
        shown = image.resize((image.width * times, image.height * times), Image.Resampling.NEAREST)
        pen = ImageDraw.Draw(shown)
        for index, each in enumerate(self.phrases):
            if each.box is not None:
                _outline(pen, each.box, times, _colour(index))
        taken: list[Box] = []
        for index, each in enumerate(self.phrases):
            if each.box is not None and each.peak is not None:
                _point(pen, each.peak, times, _colour(index))
                _tag(pen, (each.box[0] * times, each.box[1] * times), str(index + 1), _colour(index), taken)
        return _stacked(shown, [_legend_line(index, each) for index, each in enumerate(self.phrases)])

    def figure(self) -> Figure:
        """The image with all boxes and peaks, then the map of every phrase with its own. Needs the extra `plot`.

        Returns:
            A matplotlib figure that belongs to no window.

        Raises:
            InputError: matplotlib is not installed.
        """
        from vlcam.plot import PLAIN, canvas  # matplotlib is an extra

        columns = min(_COLUMNS, len(self) + 1)
        rows = -(-(len(self) + 1) // columns)
        placement = self._first.placement.scaled_down(_PIXELS)
        aspect = max(0.4, min(2.5, placement.original[0] / placement.original[1]))
        made = canvas(_TILE * columns, (_TILE * aspect + 0.3) * rows + 0.2 * len(self) + 0.7)
        axes = list(np.atleast_1d(made.subplots(rows, columns)).reshape(-1))
        for ax in axes:
            ax.set_axis_off()
        height, width = self._first.placement.original
        extent = (0, width, height, 0)  # coordinates of the original, whatever the size that is drawn
        picture = self._first.picture().resize(placement.original[::-1])
        axes[0].imshow(picture, extent=extent)
        axes[0].set_title("all phrases", **PLAIN, fontsize=9)
        for index, (each, ax) in enumerate(zip(self.phrases, axes[1:], strict=False)):
            shown = each.explanation.overlay() if each.explanation.status == "ok" else picture.convert("L")
            ax.imshow(shown.resize(picture.size), extent=extent, cmap="gray", vmin=0, vmax=255)
            title = f"{index + 1}  {each.phrase}"
            ax.set_title(title if each.status == "ok" else f"{title}\n({each.status})", **PLAIN, fontsize=9)
            for where in (axes[0], ax):
                _mark(where, each, index)
        handles = axes[0].get_legend_handles_labels()[0]
        legend = made.legend(handles, [_line(i, p) for i, p in enumerate(self)], loc="outside lower left", fontsize=8)
        for text in legend.get_texts():
            text.set(**PLAIN)
        run, recipe = self._first.provenance["run"], self._first.recipe
        blocks = ", ".join(map(str, run["layers"]))
        about = f"{recipe.name}, {run['site']} of {run['stream']} block {blocks}   {recipe.fingerprint}"
        made.suptitle(f"{self.text}\n{about}\nbox: {self._rule()}", **PLAIN, fontsize=9, x=0.01, ha="left")
        return made

    def _rule(self) -> str:
        return f"largest component of at least {self.threshold:g} of the maximum"


def _alike(one: str, other: str) -> bool:
    """Whether phrases are the same but for case and blanks."""
    return one.casefold().split() == other.casefold().split()


def _category(phrase: str, categories: Mapping[str, int]) -> int:
    for name, number in categories.items():
        if _alike(name, phrase):
            return number
    raise UnknownNameError(f"category_ids has no phrase {phrase!r}; it has {listing(categories)}")


def _line(index: int, each: GroundedPhrase) -> str:
    """What a legend says of a phrase."""
    found = f"score {each.score:.3g}" if each.status == "ok" else f"no box: {each.status}"
    return f"{index + 1}  {each.phrase}   {found}"


def _colour(index: int) -> Colour:
    return _PALETTE[index % len(_PALETTE)]


def _mark(ax: Axes, each: GroundedPhrase, index: int) -> None:
    """Box and peak on an axis in pixels of the original image; an empty handle for the legend without them."""
    colour = tuple(part / 255 for part in _colour(index)) if each.box is not None else (0.6, 0.6, 0.6)
    x0, y0, x1, y1 = each.box or (np.nan,) * 4
    across, down = [x0, x1, x1, x0, x0], [y0, y0, y1, y1, y0]
    ax.plot(across, down, color="black", linewidth=3.4)
    ax.plot(across, down, color=colour, linewidth=1.8, label=f"{index + 1}")
    if each.peak is not None:
        x, y = each.peak[0] + 0.5, each.peak[1] + 0.5  # the pixel's middle
        ax.plot([x], [y], "o", color=colour, markeredgecolor="black", markersize=5)


def _outline(pen: ImageDraw.ImageDraw, box: Box, times: int, colour: Colour) -> None:
    """The outermost pixels of a box, with a dark line on either side of them."""
    x0, y0, x1, y1 = (edge * times for edge in box)
    for inset, width, paint in ((-1, 5, _INK), (0, 3, colour)):
        outer = (x0 + inset, y0 + inset, x1 - 1 - inset, y1 - 1 - inset)
        if outer[0] <= outer[2] and outer[1] <= outer[3]:
            pen.rectangle(outer, outline=paint, width=width)


def _point(pen: ImageDraw.ImageDraw, peak: tuple[int, int], times: int, colour: Colour) -> None:
    x, y = ((place + 0.5) * times for place in peak)
    for radius, paint in ((7, _INK), (5, colour)):
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=paint)


def _tag(pen: ImageDraw.ImageDraw, corner: tuple[int, int], name: str, colour: Colour, taken: list[Box]) -> None:
    """A number at the corner of a box, to the right of others that are there already."""
    wide, high = 8 + 10 * len(name), 20
    x, y = corner
    while any(x < a1 and x + wide > a0 and y < b1 and y + high > b0 for a0, b0, a1, b1 in taken):
        x += wide
    taken.append((x, y, x + wide, y + high))
    pen.rectangle((x, y, x + wide - 1, y + high - 1), fill=colour, outline=_INK)
    pen.text((x + wide / 2, y + high / 2), name, fill=_INK, font=ImageFont.load_default(15), anchor="mm")


def _legend_line(index: int, each: GroundedPhrase) -> tuple[str, Colour]:
    return _line(index, each), _colour(index) if each.box is not None else (190, 190, 190)


def _stacked(picture: Image.Image, lines: Sequence[tuple[str, Colour]]) -> Image.Image:
    """A picture above the lines of its legend, each behind a patch of its colour."""
    strips = [_strip(line, max(picture.width, _SIDE) - 30) for line, _ in lines]
    width = max([picture.width, *(strip.width + 30 for strip in strips)])
    page = Image.new("RGB", (width, picture.height + sum(strip.height for strip in strips) + 12), _PAPER)
    page.paste(picture, (0, 0))
    pen, top = ImageDraw.Draw(page), picture.height + 6
    for strip, (_, colour) in zip(strips, lines, strict=True):
        pen.rectangle((10, top + 6, 24, top + 20), fill=colour, outline=_INK)
        page.paste(strip, (30, top))
        top += strip.height
    return page


def _strip(line: str, width: int) -> Image.Image:
    """A line of text, folded to a width, without the margins above and below; at least as high as tall letters."""
    first, last = _inked(_written("Ay|", width))
    drawn = _written(line, width)
    return drawn.crop((0, first - 4, drawn.width, max(last, _inked(drawn)[1]) + 5))


def _written(line: str, width: int) -> Image.Image:
    return textpicture.draw("", [], [], title=line, size=round(_LETTERS / 0.82), width=width)


def _inked(drawn: Image.Image) -> tuple[int, int]:
    """The first and the last row in which there is anything."""
    rows = np.flatnonzero((np.asarray(drawn) != _PAPER).any((1, 2)))
    return int(rows[0]), int(rows[-1])
