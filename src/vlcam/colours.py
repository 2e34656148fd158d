"""Heatmaps as pictures, without a plotting library."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vlcam.errors import UnknownNameError, listing

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


def colourise(values: NDArray[np.floating], colormap: str = "inferno") -> NDArray[np.uint8]:
    """Colours [H, W, 3] for values [H, W]; below 0 and above 1 the end colours, NaN black.

    Raises:
        UnknownNameError: no such colormap; lists those there are.
    """
    if colormap not in COLORMAPS:
        raise UnknownNameError(f"no colormap {colormap!r}; there are {listing(COLORMAPS)}")
    anchors = np.array(COLORMAPS[colormap], np.float64)
    filled = np.nan_to_num(values, nan=0.0)
    steps = np.linspace(0, 1, len(anchors))
    channels = [np.interp(filled, steps, anchors[:, channel]) for channel in range(3)]
    known = ~np.isnan(values)[..., None]
    return np.where(known, np.stack(channels, -1).round(), 0).astype(np.uint8)


def overlay(
    image: Image.Image, heatmap: NDArray[np.floating], *, alpha: float = 0.6, colormap: str | None = None
) -> Image.Image:
    """Blend a heatmap [H, W] over an RGB image of the same size.

    The map is opaque in proportion to its magnitude, so that the image stays readable where there is no evidence.
    Pixels where it is NaN, which the model never saw, become grey with diagonal stripes.

    Args:
        image: what lies below.
        heatmap: values in 0..1, or in -1..1 where any is negative; zero is then in the middle of the colormap.
        alpha: opacity of the largest magnitude.
        colormap: a name out of `COLORMAPS`; by default `inferno`, or `coolwarm` where any value is negative.

    Returns:
        An RGB image.

    Raises:
        UnknownNameError: no such colormap.
    """
    pixels = np.asarray(image, np.float64)
    unseen = np.isnan(heatmap)
    values = np.nan_to_num(heatmap)
    signed = bool((values < 0).any())
    strength = alpha * (0.35 + 0.65 * np.clip(np.abs(values), 0, 1))[..., None]
    tint = colourise((values + 1) / 2 if signed else values, colormap or ("coolwarm" if signed else "inferno"))
    blended = pixels * (1 - strength) + tint * strength
    grey = pixels.mean(-1, keepdims=True) * 0.5 + 64
    rows, columns = np.indices(unseen.shape)
    grey = np.where(((rows + columns) // 4 % 2 == 0)[..., None], grey, grey * 0.8)
    return Image.fromarray(np.where(unseen[..., None], grey, blended).round().astype(np.uint8), "RGB")
