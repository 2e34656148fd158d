"""What a file is that holds no explanation, for the message that refuses it."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["foreign"]

_SIGNATURES = {
    b"\xff\xd8\xff": "a JPEG picture",
    b"GIF8": "a GIF picture",
    b"BM": "a BMP picture",
    b"II*\0": "a TIFF picture",
    b"MM\0*": "a TIFF picture",
    b"RIFF": "a WebP picture",
    b"\x93NUMPY": "a map as NumPy saves it, without its recipe; the PNG beside it has both",
    b"%PDF": "a PDF",
    b"<svg": "an SVG picture",
    b"<!DOCTYPE html": "a page of HTML",
}
_RECORDS = {
    ("recipe", "provenance"): "the record of an explanation as JSON, without its map; give the PNG beside it",
    ("grounded", "box_rule"): "the record of a grounding; the explanation of each of its phrases can be saved as a "
    "PNG, grounding[phrase].explanation.save(...), and that is what is read here",
    ("annotations", "images"): "boxes in the layout of COCO",
    ("site", "weighting"): "a recipe; it says how a map is made, and holds none",
}
_FIGURE = b"Software\0Matplotlib"


def foreign(data: bytes) -> str:
    """What the bytes of a file are, where they hold no explanation.

    Args:
        data: the whole file.

    Returns:
        A part of a sentence, for people; empty where it cannot be told.
    """
    if _FIGURE in data[:4096]:
        return "it is a figure that matplotlib drew, for example of a sweep; sweep --save saves every explanation"
    known = next((what for start, what in _SIGNATURES.items() if data.startswith(start)), "")
    return known or (_of_json(data) if data.lstrip()[:1] in (b"{", b"[") else "")


def _of_json(data: bytes) -> str:
    try:
        found: Any = json.loads(data)
    except (ValueError, RecursionError):  # the former also for bytes that are no text
        return ""
    if isinstance(found, list) and found and all(isinstance(each, dict) and "fingerprint" in each for each in found):
        return "the table of a sweep; sweep --save saves every explanation"
    if not isinstance(found, dict):
        return "JSON"
    return next((what for keys, what in _RECORDS.items() if all(key in found for key in keys)), "JSON")
