"""A text whose words are coloured by a score: as a picture, without a plotting library, and as HTML.

>>> draw("a cat", [(2, 5)], [0.5], width=300).size
(300, 107)
>>> words_html("a cat", [(2, 5)], [0.5]).count("<span")
1
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

from vlcam.colours import colourise
from vlcam.errors import InputError
from vlcam.glyphs import Colour, length, text_width, write

__all__ = ["draw", "words_html"]

Span = tuple[int, int]

_ENDS = r"\n\r\v\f\x1c-\x1e\x85\u2028\u2029"
_NEWLINE = rf"\r\n|[{_ENDS}]"
# A line breaks at blanks, but not at those that forbid it.
_PIECE = re.compile(rf"{_NEWLINE}|[^\S{_ENDS}\xa0\u202f]+|[\S\xa0\u202f]+")
_SMOOTH = 4  # corners are drawn this many times larger
_LONG = 1e6  # from here on scores are written with an exponent


class _Page(NamedTuple):
    ground: Colour
    grey: Colour
    title: Colour


# Words without evidence should not stand out: the page is light or dark as the colour of zero is.
_LIGHT = _Page((255, 255, 255), (118, 118, 124), (38, 38, 42))
_DARK = _Page((17, 17, 21), (152, 152, 160), (236, 236, 240))
_PLAIN: Colour = (234, 234, 238)  # boxes of words between which the scores do not distinguish, on a light page


class _Word(NamedTuple):
    start: int
    end: int
    score: float
    colour: Colour


class _Piece(NamedTuple):
    """What a line never breaks: a word or a part of one, a run of blanks, or a newline."""

    text: str
    word: _Word | None = None

    @property
    def kind(self) -> str:
        if self.word is not None or not self.text.isspace():
            return "text"
        return "newline" if re.fullmatch(_NEWLINE, self.text) else "blank"


class _Block(NamedTuple):
    """Lines of one size: pieces with where each begins, and how far one line is below the other."""

    lines: list[list[tuple[int, _Piece]]]
    size: int
    pitch: int
    lead: int  # the part of the pitch that is empty
    after: int = 0  # to the next block

    @property
    def height(self) -> int:
        return len(self.lines) * self.pitch - self.lead + self.after

    @property
    def width(self) -> int:
        return max((x + _width(piece, self.size) for line in self.lines for x, piece in line), default=0)


def draw(
    text: str,
    spans: Sequence[Span],
    values: Sequence[float],
    *,
    apart: Mapping[str, float] = {},
    colormap: str | None = None,
    size: int = 28,
    width: int = 900,
    title: str = "",
) -> Image.Image:
    """Draw a text with a box around each word in the colour of its score, and the score below.

    Colours run from zero to the largest score; where any score is negative, from minus to plus the largest magnitude.
    Scores that are all the same distinguish nothing: their boxes are plain. What lies outside of the spans is grey.
    Of characters that Pillow's font lacks, the code is drawn in a frame.

    Args:
        text: the text; its newlines and blanks are kept.
        spans: half-open character ranges of words, in any order.
        values: the score of each span.
        apart: scores of what is no word of the text, by name; listed below.
        colormap: a name out of `vlcam.colours.COLORMAPS`; by default `inferno`, or `coolwarm` where any score is
            negative.
        size: height of the text in pixels.
        width: width of the picture in pixels, within which lines wrap; a longer word makes the picture wider.
        title: what stands above.

    Returns:
        An RGB image.

    Raises:
        InputError: spans outside the text, empty or overlapping; not a score for each; a score that is not finite;
            a size or width below 1.
        UnknownNameError: no such colormap; lists those there are.
    """
    if size < 1 or width < 1:
        raise InputError(f"size={size!r}, width={width!r}: lengths in pixels are at least 1")
    words, page = _words(text, spans, values, colormap)
    margin = length(size, 0.9)
    room = max(1, width - 2 * margin)
    blocks = [(_body(text, words, size, room, length(size, 0.6) if apart else 0), page.grey)]
    if title:
        blocks.insert(0, (_plain_block(title, length(size, 0.82, 9), room, length(size, 0.5)), page.title))
    if apart:
        blocks.append((_plain_block(_listed(apart), length(size, 0.5, 9), room), page.grey))

    extent = max(width, max(block.width for block, _ in blocks) + 2 * margin)
    picture = Image.new("RGB", (extent, sum(block.height for block, _ in blocks) + 2 * margin), page.ground)
    top = margin
    for block, colour in blocks:
        for row, line in enumerate(block.lines):
            for x, piece in line:
                _draw_piece(picture, piece, block.size, margin + x, top + row * block.pitch, colour)
        top += block.height
    return picture


def words_html(
    text: str,
    spans: Sequence[Span],
    values: Sequence[float],
    *,
    apart: Mapping[str, float] = {},
    colormap: str | None = None,
) -> str:
    """The text of `draw` as a piece of HTML that needs no style sheet; the score of a word shows under the pointer.

    Args:
        text: the text; its newlines and blanks are kept.
        spans: half-open character ranges of words, in any order.
        values: the score of each span.
        apart: scores of what is no word of the text, by name; listed below.
        colormap: as of `draw`.

    Returns:
        One `div` element.

    Raises:
        InputError: spans outside the text, empty or overlapping; not a score for each; a score that is not finite.
        UnknownNameError: no such colormap; lists those there are.
    """
    words, page = _words(text, spans, values, colormap)
    made, read = [], 0
    for word in words:
        style = f"background:{_hex(word.colour)};color:{_hex(_readable(word.colour))};padding:.15em .35em;"
        style += "border-radius:.35em;box-decoration-break:clone;-webkit-box-decoration-break:clone"
        made.append(html.escape(text[read : word.start]))
        made.append(
            f'<span style="{style}" title="{word.score:z.6g}">{html.escape(text[word.start : word.end])}</span>'
        )
        read = word.end
    made.append(html.escape(text[read:]))
    if apart:
        made.append(f'<div style="font-size:.75em;margin-top:.4em">{html.escape(_listed(apart))}</div>')
    style = "font:16px/2 system-ui,sans-serif;white-space:pre-wrap;overflow-wrap:anywhere;"
    style += f"color:{_hex(page.grey)};background:{_hex(page.ground)};padding:.6em .9em;border-radius:.6em"
    return f'<div style="{style}">{"".join(made)}</div>'


def _words(
    text: str, spans: Sequence[Span], values: Sequence[float], colormap: str | None
) -> tuple[list[_Word], _Page]:
    """The words in the order of the text, without the blanks at their ends; and the page that suits their colours."""
    if len(spans) != len(values):
        raise InputError(f"{len(spans)} spans, but {len(values)} values; give one for each")
    scores = [float(value) for value in values]
    _require_finite(dict(enumerate(scores)))
    for start, end in spans:
        if not 0 <= start < end <= len(text):
            raise InputError(f"span ({start}, {end}) is no range of characters of a text of {len(text)}")
    for one, other in pairwise(sorted(spans)):
        if one[1] > other[0]:
            raise InputError(f"spans ({one[0]}, {one[1]}) and ({other[0]}, {other[1]}) overlap")
    colours, page = _colours(scores, colormap)
    words = []
    for (start, end), score, colour in zip(spans, scores, colours, strict=True):
        inner = text[start:end]
        if not inner.isspace():
            start, end = end - len(inner.lstrip()), start + len(inner.rstrip())
        words.append(_Word(start, end, score, colour))
    return sorted(words), page


def _require_finite(scores: Mapping[int, float] | Mapping[str, float]) -> None:
    for name, score in scores.items():
        if not math.isfinite(score):
            raise InputError(f"value {name!r} is {score}; scores are finite numbers")


def _colours(scores: Sequence[float], colormap: str | None) -> tuple[list[Colour], _Page]:
    values = np.array([*scores, 0.0])  # zero as well, for the page
    signed = bool((values < 0).any())
    shares = values / (np.abs(values).max() or 1)
    levels = (shares + 1) / 2 if signed else shares
    rows = colourise(levels[None], colormap or ("coolwarm" if signed else "inferno"))[0]
    *colours, zero = [(int(red), int(green), int(blue)) for red, green, blue in rows]
    if len(set(scores)) < 2:
        return [_PLAIN] * len(scores), _LIGHT
    return colours, _DARK if _readable(zero) == (255, 255, 255) else _LIGHT


def _readable(colour: Colour) -> Colour:
    """Black or white, whichever stands out more (the contrast ratio of WCAG 2)."""
    linear = [(c / 255 / 12.92) if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return (0, 0, 0) if (luminance + 0.05) ** 2 > 1.05 * 0.05 else (255, 255, 255)


def _hex(colour: Colour) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)


def _written(score: float) -> str:
    return f"{score:z.2f}" if abs(score) < _LONG else f"{score:.2e}"


def _listed(apart: Mapping[str, float]) -> str:
    _require_finite(apart)
    return "apart: " + ", ".join(f"{' '.join(str(name).split())} {_written(score)}" for name, score in apart.items())


def _body(text: str, words: Sequence[_Word], size: int, room: int, after: int) -> _Block:
    """The text itself; scores take a row below each line."""
    pieces: list[_Piece] = []
    read = 0
    for word in words:
        pieces += _pieces(text[read : word.start])
        pieces += _parts(text[word.start : word.end], word, size, room)
        read = word.end
    pieces += _pieces(text[read:])
    scores = length(size, 0.14) + length(size, 0.5, 9) if words else 0
    lead = length(size, 0.45 if words else 0.1)
    return _Block(_lines(pieces, size, room), size, length(size, 1.4) + scores + lead, lead, after)


def _plain_block(text: str, size: int, room: int, after: int = 0) -> _Block:
    return _Block(_lines(_pieces(text), size, room), size, length(size, 1.4), 0, after)


def _pieces(text: str) -> list[_Piece]:
    return [_Piece(found) for found in _PIECE.findall(text.replace("\t", "    "))]


def _parts(text: str, word: _Word, size: int, room: int) -> Iterator[_Piece]:
    """A word in one piece, but parted at newlines, and at blanks where it is too long for a line."""
    for part in filter(None, re.split(f"({_NEWLINE})", text)):
        whole = _Piece(part, word)
        if re.fullmatch(_NEWLINE, part):
            yield _Piece(part)
        elif part.isspace() or _width(whole, size) <= room:
            yield whole
        else:
            yield from (_Piece(found.text, word if found.kind == "text" else None) for found in _pieces(part))


def _lines(pieces: Sequence[_Piece], size: int, room: int) -> list[list[tuple[int, _Piece]]]:
    """Break at blanks; between pieces that no blanks part, only where they are too long for one line together."""
    lines: list[list[tuple[int, _Piece]]] = [[]]
    x = 0
    for kind, group in groupby(pieces, lambda piece: piece.kind):
        run = [(piece, _width(piece, size)) for piece in group]
        if kind == "newline":
            lines += [[] for _ in run]
            x = 0
        elif kind == "blank":
            x += sum(wide for _, wide in run)
        else:
            x = _begin(lines, x, sum(wide for _, wide in run), room)
            for piece, wide in run:
                x = _begin(lines, x, wide, room)
                lines[-1].append((x, piece))
                x += wide
    return lines


def _begin(lines: list[list[tuple[int, _Piece]]], x: int, wide: int, room: int) -> int:
    """Where to put what is so wide: at x, or at the left end of a new line that this opens."""
    if x + wide <= room:
        return x
    if lines[-1]:
        lines.append([])
    return 0


def _width(piece: _Piece, size: int) -> int:
    if piece.kind == "blank":
        return length(size, 0.3) * len(piece.text)
    if piece.word is None:
        return text_width(piece.text, size)
    box = text_width(piece.text, size) + 2 * length(size, 0.28)
    return max(box, text_width(_written(piece.word.score), length(size, 0.5, 9))) + 2 * length(size, 0.05)


def _draw_piece(picture: Image.Image, piece: _Piece, size: int, x: int, top: int, grey: Colour) -> None:
    canvas, baseline = ImageDraw.Draw(picture), top + length(size, 1.03)
    if piece.word is None:
        write(canvas, piece.text, x, baseline, size, grey)
        return
    gap, small = length(size, 0.05), length(size, 0.5, 9)
    wide, high = _width(piece, size) - 2 * gap, length(size, 1.4)
    colour, score = piece.word.colour, _written(piece.word.score)
    _draw_box(picture, (x + gap, top, wide, high), size, colour, grey)
    middle = x + gap + wide / 2
    write(canvas, piece.text, middle - text_width(piece.text, size) / 2, baseline, size, _readable(colour))
    below = top + high + length(size, 0.14) + length(small, 0.78)
    write(canvas, score, middle - text_width(score, small) / 2, below, small, grey)


def _draw_box(picture: Image.Image, box: tuple[int, int, int, int], size: int, colour: Colour, grey: Colour) -> None:
    """A box (left, top, width, height) with round corners, and an edge for colours that are close to the page's."""
    left, top, wide, high = box
    edge = tuple(round(0.8 * own + 0.2 * other) for own, other in zip(colour, grey, strict=True))
    for inset, paint in ((0, edge), (length(size, 0.04), colour)):
        area = (wide - 2 * inset, high - 2 * inset)
        if min(area) > 0:
            radius = max(0, length(size, 0.3) - inset) * _SMOOTH
            mask = Image.new("L", (area[0] * _SMOOTH, area[1] * _SMOOTH))
            ImageDraw.Draw(mask).rounded_rectangle((0, 0, mask.width - 1, mask.height - 1), radius, fill=255)
            picture.paste(paint, (left + inset, top + inset), mask.reduce(_SMOOTH))
