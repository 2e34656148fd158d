"""A grounding as a picture: numbered boxes on the image, and a figure with the map of every phrase."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from vlcam import textpicture
from vlcam.boxes import Box
from vlcam.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from vlcam.grounding import GroundedPhrase, Grounding

__all__ = ["SIDE", "drawn", "figure"]

Colour = tuple[int, int, int]

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
SIDE = 480
"""To how many pixels the longer side of a small image is enlarged at least."""
_LETTERS = 18  # height of the letters of a picture's legend
_COLUMNS, _TILE, _PIXELS = 4, 2.6, 512  # of a figure: tiles in a row, inches, pixels of a picture in a tile


def drawn(found: Grounding, *, side: int = SIDE) -> Image.Image:
    """The image with a numbered box and a point at the peak of every phrase; phrases and scores stand below.

    Args:
        found: the phrases, of one image.
        side: an image whose longer side is shorter is enlarged, by a whole factor, to at least this many pixels.

    Returns:
        An RGB image.

    Raises:
        InputError: the image came from a file that does not carry it, or a side below 1.
    """
    if side < 1:
        raise InputError(f"side={side!r}: a length in pixels is at least 1")
    image = found[0].explanation.picture()
    times = max(1, -(-side // max(image.size)))
    shown = image.resize((image.width * times, image.height * times), Image.Resampling.NEAREST)
    pen = ImageDraw.Draw(shown)
    for index, each in enumerate(found.phrases):
        if each.box is not None:
            _outline(pen, each.box, times, _colour(index))
    taken: list[Box] = []
    for index, each in enumerate(found.phrases):
        if each.box is not None and each.peak is not None:
            _point(pen, each.peak, times, _colour(index))
            _tag(pen, (each.box[0] * times, each.box[1] * times), str(index + 1), _colour(index), taken)
    return _stacked(shown, [_legend_line(index, each) for index, each in enumerate(found.phrases)])


def figure(found: Grounding) -> Figure:
    """The image with all boxes and peaks, then the map of every phrase with its own. Needs the extra `plot`.

    Args:
        found: the phrases, of one image.

    Returns:
        A matplotlib figure that belongs to no window.

    Raises:
        InputError: matplotlib is not installed.
    """
    from vlcam.plot import PLAIN, canvas  # matplotlib is an extra

    columns = min(_COLUMNS, len(found) + 1)
    rows = -(-(len(found) + 1) // columns)
    placement = found[0].explanation.placement.scaled_down(_PIXELS)
    aspect = max(0.4, min(2.5, placement.original[0] / placement.original[1]))
    made = canvas(_TILE * columns, (_TILE * aspect + 0.3) * rows + 0.2 * len(found) + 0.7)
    axes = list(np.atleast_1d(made.subplots(rows, columns)).reshape(-1))
    for ax in axes:
        ax.set_axis_off()
    height, width = found[0].explanation.placement.original
    extent = (0, width, height, 0)  # coordinates of the original, whatever the size that is drawn
    picture = found[0].explanation.picture().resize(placement.original[::-1])
    axes[0].imshow(picture, extent=extent)
    axes[0].set_title("all phrases", **PLAIN, fontsize=9)
    for index, (each, ax) in enumerate(zip(found.phrases, axes[1:], strict=False)):
        shown = each.explanation.overlay() if each.explanation.status == "ok" else picture.convert("L")
        ax.imshow(shown.resize(picture.size), extent=extent, cmap="gray", vmin=0, vmax=255)
        title = f"{index + 1}  {each.phrase}"
        ax.set_title(title if each.status == "ok" else f"{title}\n({each.status})", **PLAIN, fontsize=9)
        for where in (axes[0], ax):
            _mark(where, each, index)
    handles = axes[0].get_legend_handles_labels()[0]
    legend = made.legend(handles, [_line(i, p) for i, p in enumerate(found)], loc="outside lower left", fontsize=8)
    for text in legend.get_texts():
        text.set(**PLAIN)
    run, recipe = found[0].explanation.provenance["run"], found[0].explanation.recipe
    blocks = ", ".join(map(str, run["layers"]))
    about = f"{recipe.name}, {run['site']} of {run['stream']} block {blocks}   {recipe.fingerprint}"
    made.suptitle(f"{found.text}\n{about}\nbox: {_rule(found.threshold)}", **PLAIN, fontsize=9, x=0.01, ha="left")
    return made


def _rule(threshold: float) -> str:
    return f"largest component of at least {threshold:g} of the maximum"


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
    strips = [_strip(line, max(picture.width, SIDE) - 30) for line, _ in lines]
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
