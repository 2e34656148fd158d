"""Characters as Pillow's own font can draw them: what it has, what is put together from that, codes for the rest."""

from __future__ import annotations

import math
import unicodedata
from functools import lru_cache
from typing import NamedTuple, cast

from PIL import Image, ImageDraw, ImageFont

__all__ = ["Colour", "length", "text_width", "write"]

Colour = tuple[int, int, int]

# What Pillow's font lacks is drawn with what it has: dashes by a hyphen, a letter with an accent by both.
_ALIKE = dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212", "-") | {"\u2022": "\xb7"}
_ACCENTS = {
    "\u0300": "`",
    "\u0301": "\xb4",
    "\u0302": "^",
    "\u0303": "~",
    "\u0304": "-",
    "\u0307": ".",
    "\u0308": "..",
    "\u030a": "\xb0",
    "\u030b": "\xb4\xb4",
}
_CEDILLA = "\u0327"
_ABSENT = "\U0010ffff"  # no character: as it is drawn, so is all that a font lacks
_UNSEEN = ("Mn", "Me", "Cf", "Cc")  # joiners, variation selectors and the like


def length(size: int, share: float, least: int = 1) -> int:
    """A length in pixels, as a share of the size of the text."""
    return max(least, round(share * size))


class _Glyph(NamedTuple):
    """Characters that the font has, with accents on the last one; or the code of one that it lacks."""

    text: str
    accents: str = ""
    code: bool = False


@lru_cache(maxsize=64)
def _font(size: int) -> ImageFont.FreeTypeFont:
    return cast("ImageFont.FreeTypeFont", ImageFont.load_default(size))


@lru_cache(maxsize=4096)
def _has(character: str) -> bool:
    if unicodedata.category(character) == "Cs":
        return False
    font = _font(24)
    return bytes(font.getmask(character)) != bytes(font.getmask(_ABSENT))


@lru_cache(maxsize=4096)
def _glyphs(text: str) -> tuple[_Glyph, ...]:
    found: list[_Glyph] = []
    for character in unicodedata.normalize("NFC", text):
        glyph = _glyph(character)
        if glyph is None:
            continue
        if found and glyph == _Glyph(glyph.text) and found[-1] == _Glyph(found[-1].text):
            found[-1] = _Glyph(found[-1].text + glyph.text)
        else:
            found.append(glyph)
    return tuple(found)


def _glyph(character: str) -> _Glyph | None:
    shown = " " if character.isspace() else _ALIKE.get(character, character)
    category = unicodedata.category(shown)
    if category in _UNSEEN:
        return None
    if _has(shown):
        return _Glyph(shown)
    base, *marks = list(unicodedata.normalize("NFD", shown))
    if marks and _has(base) and all(mark in _ACCENTS or mark == _CEDILLA for mark in marks):
        return _Glyph(base, "".join(marks))
    alike = unicodedata.normalize("NFKC", shown)
    if alike != shown and all(map(_has, alike)):
        return _Glyph(alike)
    return _Glyph(f"{ord(character):04X}", code=True)


def text_width(text: str, size: int) -> int:
    """How many pixels wide a text is at a size."""
    return math.ceil(sum(_glyph_width(glyph, size) for glyph in _glyphs(text)))


def _glyph_width(glyph: _Glyph, size: int) -> float:
    if not glyph.code:
        return _font(size).getlength(glyph.text)
    return _code_columns(glyph) * _digit(size) + length(size, 0.34)


def _code_columns(glyph: _Glyph) -> int:
    return -(-len(glyph.text) // 2)


def _digit(size: int) -> float:
    return _font(length(size, 0.36)).getlength("0")


def write(canvas: ImageDraw.ImageDraw, text: str, x: float, baseline: int, size: int, colour: Colour) -> None:
    """Write a text from x on, its letters standing on the baseline."""
    for glyph in _glyphs(text):
        if glyph.code:
            _write_code(canvas, glyph, round(x), baseline, size, colour)
        else:
            canvas.text((round(x), baseline), glyph.text, fill=colour, font=_font(size), anchor="ls")
            _write_accents(canvas, glyph, round(x), baseline, size, colour)
        x += _glyph_width(glyph, size)


def _write_accents(
    canvas: ImageDraw.ImageDraw, glyph: _Glyph, x: int, baseline: int, size: int, colour: Colour
) -> None:
    """Above the letter one on top of the other, or below it, in its middle."""
    left, top, right, bottom = _ink(glyph.text, size)
    for mark in glyph.accents:
        accent = "," if mark == _CEDILLA else _ACCENTS[mark]
        ink = _ink(accent, size)
        if mark == _CEDILLA:
            y = baseline + bottom - ink[1] - length(size, 0.05)
        else:
            top -= length(size, 0.06)
            y = baseline + top - ink[3]
            top -= ink[3] - ink[1]
        middle = x + (left + right) / 2 - (ink[0] + ink[2]) / 2
        canvas.text((round(middle), y), accent, fill=colour, font=_font(size), anchor="ls")


@lru_cache(maxsize=1024)
def _ink(text: str, size: int) -> tuple[int, int, int, int]:
    """The box of what is drawn, from the left end of the baseline; `getbbox` of the font always includes that end."""
    sheet = Image.new("L", (4 * size + 8, 4 * size + 8))
    ImageDraw.Draw(sheet).text((size, 2 * size), text, fill=255, font=_font(size), anchor="ls")
    left, top, right, bottom = sheet.getbbox() or (size, 2 * size, size, 2 * size)
    return left - size, top - 2 * size, right - size, bottom - 2 * size


def _write_code(canvas: ImageDraw.ImageDraw, glyph: _Glyph, x: int, baseline: int, size: int, colour: Colour) -> None:
    """The digits in two rows, in a frame."""
    columns, font = _code_columns(glyph), _font(length(size, 0.36))
    wide = round(_glyph_width(glyph, size))
    frame = (x + 1, baseline - length(size, 0.8), x + wide - 2, baseline + length(size, 0.12))
    if frame[2] > frame[0]:
        canvas.rounded_rectangle(frame, length(size, 0.12), outline=colour, width=length(size, 0.04))
    for row, digits in enumerate((glyph.text[:-columns], glyph.text[-columns:])):
        below = baseline - length(size, 0.4) + row * length(size, 0.4)
        start = x + (wide - font.getlength(digits)) / 2
        canvas.text((round(start), below), digits, fill=colour, font=font, anchor="ls")
