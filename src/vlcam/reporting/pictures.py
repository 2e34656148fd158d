"""The pictures of a page: the image as it is shown, and every map as a layer above it."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image

from vlcam.colours import COLORMAPS, colourise
from vlcam.geometry import to_original
from vlcam.maps import normalised

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vlcam.explanation import Explanation

__all__ = ["LONGEST", "colour_scale", "is_signed", "layers", "photograph"]

LONGEST = 1024
"""Longer side, in pixels, beyond which an image is shown smaller."""
_LAYER = 384  # of a map; the browser enlarges it, and it is smooth between cells
_BUDGET = 900_000  # bytes for all maps together; with many words each is smaller
_LEVELS = 254  # of a palette of 256; the last two are the stripes where the model saw nothing
_WITHOUT_LOSS = 300_000  # bytes up to which the image is shown as PNG


def photograph(image: Image.Image) -> tuple[str, tuple[int, int]]:
    """The image as a data address, and its width and height there."""
    shown = image.copy()
    shown.thumbnail((LONGEST, LONGEST), Image.Resampling.LANCZOS)
    exact = _encoded(shown, "PNG", optimize=True)
    if len(exact) <= _WITHOUT_LOSS:
        return _address(exact, "png"), shown.size
    return _address(_encoded(shown, "JPEG", quality=88, optimize=True), "jpeg"), shown.size


def layers(maps: list[Explanation], *, opaque: bool) -> list[str | None]:
    """Every map as a data address of a transparent PNG; None where there is nothing to draw.

    A cell is opaque in proportion to its magnitude, as in `Explanation.overlay`, so that the page's slider is that
    picture's `alpha`.

    Args:
        maps: the explanations.
        opaque: whether nothing lies below, so that colours are shown pure.
    """
    side, made = _LAYER, [_layer(one, _LAYER, opaque=opaque) for one in maps]
    while sum(len(one or b"") for one in made) > _BUDGET and side > 48:
        side //= 2
        made = [_layer(one, side, opaque=opaque) for one in maps]
    return [None if one is None else _address(one, "png") for one in made]


def is_signed(exp: Explanation) -> bool:
    """Whether a map has negative values after normalisation, and so zero in the middle of its colours."""
    return bool((normalised(exp.recipe, torch.from_numpy(exp.tokens)) < 0).any())


def colour_scale(*, signed: bool) -> str:
    """The colours of a map from low to high, as a gradient of CSS."""
    stops = ["#{:02x}{:02x}{:02x}".format(*anchor) for anchor in COLORMAPS["coolwarm" if signed else "inferno"]]
    return f"linear-gradient(to right, {', '.join(stops)})"


def _layer(exp: Explanation, longest: int, *, opaque: bool) -> bytes | None:
    if exp.status != "ok" or exp.recipe.of_text:
        return None
    scaled = normalised(exp.recipe, torch.from_numpy(exp.tokens)).numpy()
    heatmap = to_original(scaled, exp.placement.scaled_down(longest), exp.recipe.upsample)
    if exp.recipe.normalize == "none":  # colours need a scale, raw values have none
        heatmap = heatmap / np.nanmax(np.abs(heatmap))
    low = -1.0 if is_signed(exp) else 0.0
    levels = np.round((np.clip(np.nan_to_num(heatmap), low, 1) - low) / (1 - low) * (_LEVELS - 1)).astype(np.uint8)
    unseen = np.isnan(heatmap)
    rows, columns = np.nonzero(unseen)
    levels[unseen] = _LEVELS + (rows + columns) // 4 % 2
    return _palette_png(levels, low, opaque=opaque)


def _palette_png(levels: NDArray[np.uint8], low: float, *, opaque: bool) -> bytes:
    steps = np.linspace(0, 1, _LEVELS)
    colours = colourise(steps[None], "coolwarm" if low < 0 else "inferno")[0]
    strength = np.ones(_LEVELS) if opaque else 0.35 + 0.65 * np.abs(np.linspace(low, 1, _LEVELS))
    picture = Image.fromarray(levels, "L").convert("P")
    picture.putpalette([*colours.flatten().tolist(), *(150, 150, 150), *(110, 110, 110)])
    alpha = bytes([*np.round(strength * 255).astype(int).tolist(), 235, 235])
    return _encoded(picture, "PNG", optimize=True, transparency=alpha)


def _encoded(picture: Image.Image, kind: str, **how: object) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **how)
    return buffer.getvalue()


def _address(data: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
