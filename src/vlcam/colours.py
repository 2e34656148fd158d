"""Heatmaps as pictures, without a plotting library."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vlcam.errors import InputError, UnknownNameError, listing

__all__ = ["COLORMAPS", "colourise", "overlay"]

# Anchors at equal steps between which colours are interpolated: perceptually ordered, readable in grey.
COLORMAPS: dict[str, tuple[tuple[int, int, int], ...]] = {
    "inferno": (
        (0, 0, 4),
        (40, 11, 84),
        (101, 21, 110),
        (159, 42, 99),
        (212, 72, 66),
        (245, 125, 21),
        (250, 193, 39),
        (252, 255, 164),
    ),
    "viridis": ((68, 1, 84), (65, 68, 135), (42, 120, 142), (34, 168, 132), (122, 209, 81), (253, 231, 37)),
    "gray": ((0, 0, 0), (255, 255, 255)),
    "coolwarm": ((59, 76, 192), (141, 176, 254), (221, 221, 221), (244, 152, 122), (180, 4, 38)),
}
_LEVELS = 1024  # finer than 8-bit colours can show
_STRIP = 1 << 18  # pixels that are blended at once


def colourise(values: NDArray[np.floating], colormap: str = "inferno") -> NDArray[np.uint8]:
    """Colours [H, W, 3] for values [H, W]; below 0 and above 1 the end colours, NaN black.

    Raises:
        UnknownNameError: no such colormap; lists those there are.
    """
    known = ~np.isnan(values)[..., None]
    return np.where(known, _interpolated(np.nan_to_num(values), colormap).round(), 0).astype(np.uint8)


def overlay(
    image: Image.Image, heatmap: NDArray[np.floating], *, alpha: float = 0.6, colormap: str | None = None
) -> Image.Image:
    """Blend a heatmap [H, W] over an RGB image of the same size.

    The map is opaque in proportion to its magnitude, so that the image stays readable where there is no evidence.
    Pixels where it is NaN, which the model never saw, become grey with diagonal stripes.

    Args:
        image: what lies below.
        heatmap: values in 0..1, or in -1..1 where any is negative; zero is then in the middle of the colormap.
        alpha: opacity of the largest magnitude, 0 to 1.
        colormap: a name out of `COLORMAPS`; by default `inferno`, or `coolwarm` where any value is negative.

    Returns:
        An RGB image.

    Raises:
        UnknownNameError: no such colormap.
        InputError: an alpha outside 0..1.
    """
    if not 0 <= alpha <= 1:
        raise InputError(f"alpha={alpha!r}: an opacity is from 0 to 1")
    signed = bool((heatmap < 0).any())
    low = -1.0 if signed else 0.0
    keep, paint = _tables(low, alpha, colormap or ("coolwarm" if signed else "inferno"))
    pixels = np.asarray(image)
    blended = np.empty_like(pixels)
    strip = max(1, _STRIP // image.width)
    for top in range(0, image.height, strip):
        rows = slice(top, top + strip)
        values = np.clip(np.nan_to_num(heatmap[rows]), low, 1)
        level = ((values - low) * (_LEVELS / (1 - low)) + 0.5).astype(np.int16)
        blended[rows] = pixels[rows] * keep[level] + paint[level]
        _stripe(blended[rows], pixels[rows], np.isnan(heatmap[rows]), top)
    return Image.fromarray(blended)


def _interpolated(values: NDArray[np.floating], colormap: str) -> NDArray[np.float64]:
    """Colours [..., 3], not rounded."""
    if colormap not in COLORMAPS:
        raise UnknownNameError(f"no colormap {colormap!r}; there are {listing(COLORMAPS)}")
    anchors = np.array(COLORMAPS[colormap], np.float64)
    steps = np.linspace(0, 1, len(anchors))
    return np.stack([np.interp(values, steps, channel) for channel in anchors.T], -1)


def _tables(low: float, alpha: float, colormap: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """For every level from `low` to 1: the share of the picture [levels, 1] that stays, the colour [levels, 3] added.

    The half that turns truncation into rounding is in the colour.
    """
    values = np.linspace(low, 1, _LEVELS + 1)
    strength = alpha * (0.35 + 0.65 * np.abs(values))[:, None]
    tint = _interpolated(np.linspace(0, 1, _LEVELS + 1), colormap)
    return (1 - strength).astype(np.float32), (tint * strength + 0.5).astype(np.float32)


def _stripe(blended: NDArray[np.uint8], pixels: NDArray[np.uint8], unseen: NDArray[np.bool_], top: int) -> None:
    """Make the unseen pixels of a strip that begins at row `top` grey, with diagonal stripes."""
    rows, columns = np.nonzero(unseen)
    grey = pixels[rows, columns].mean(-1) * 0.5 + 64
    grey[(top + rows + columns) // 4 % 2 == 1] *= 0.8
    blended[rows, columns] = grey.round().astype(np.uint8)[:, None]
