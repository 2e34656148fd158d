"""Where a token lies: tokens -> grid -> the model's pixels -> the user's original image."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vlcam.choices import Upsample
from vlcam.errors import AdapterError, InputError

__all__ = ["Placement", "check_grid", "to_original"]

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Placement:
    """Which part of the original image the model saw.

    Attributes:
        original: height and width of the user's image in pixels.
        model: height and width of the model's input in pixels.
        box: (x0, y0, x1, y1), the rectangle of the original, in its pixels, that the model's input shows. It may
            reach beyond the image where padding was added, and is smaller than the image after a crop.
    """

    original: tuple[int, int]
    model: tuple[int, int]
    box: tuple[float, float, float, float]

    @classmethod
    def squashed(cls, original: tuple[int, int], model: tuple[int, int]) -> Placement:
        """The whole image, resized to the model's input without regard to its proportions."""
        return cls(original, model, (0.0, 0.0, float(original[1]), float(original[0])))

    @classmethod
    def cropped(
        cls, original: tuple[int, int], resized: tuple[int, int], model: tuple[int, int], corner: tuple[float, float]
    ) -> Placement:
        """The image resized, then cut (or padded, with a negative corner) to the model's input.

        Args:
            original: height and width of the user's image.
            resized: height and width after the resize.
            model: height and width of the model's input.
            corner: (top, left) of the model's input within the resized image.
        """
        down, across = original[0] / resized[0], original[1] / resized[1]
        top, left = corner
        return cls(original, model, (left * across, top * down, (left + model[1]) * across, (top + model[0]) * down))

    def scaled_down(self, longest: int) -> Placement:
        """The same placement in a copy of the original whose longer side has at most `longest` pixels."""
        height, width = self.original
        factor = min(1.0, longest / max(height, width))
        small = max(1, round(height * factor)), max(1, round(width * factor))
        down, across = small[0] / height, small[1] / width
        x0, y0, x1, y1 = self.box
        return Placement(small, self.model, (x0 * across, y0 * down, x1 * across, y1 * down))


def check_grid(tokens: int, prefix: int, grid: tuple[int, int]) -> None:
    """Make sure that the image tokens are the prefix and the grid, and nothing else.

    Raises:
        AdapterError: they are not; quotes both numbers.
    """
    if tokens != prefix + grid[0] * grid[1]:
        raise AdapterError(
            f"{tokens} image tokens were captured, but the adapter's layout is {prefix} prefix tokens and a grid of "
            f"{grid[0]} x {grid[1]} = {prefix + grid[0] * grid[1]}; no map is made from a guessed grid"
        )


def to_original(tokens: Floats, placement: Placement, upsample: Upsample) -> Floats:
    """Interpolate a token map at the centre of every pixel of the original image.

    The two resizes (grid to model pixels, model pixels to original) are one interpolation here, with half-pixel
    centres: where original and model input have the same size it equals torch's `interpolate` with
    `align_corners=False`. Only the overshoot of bicubic interpolation is cut: no value leaves the range from the
    smallest to the largest token, so that a map in 0..1 stays one.

    Args:
        tokens: float32 [h, w].
        placement: which part of the original the grid covers.
        upsample: `nearest`, `bilinear` or `bicubic`.

    Returns:
        float32 [H, W], NaN where the model saw nothing.

    Raises:
        InputError: an interpolation that does not exist.
    """
    x0, y0, x1, y1 = placement.box
    rows = _weights(placement.original[0], y0, y1, tokens.shape[0], upsample)
    columns = _weights(placement.original[1], x0, x1, tokens.shape[1], upsample)
    found = (rows @ tokens.astype(np.float64) @ columns.T).astype(np.float32)
    return np.clip(found, tokens.min(), tokens.max(), out=found)


def _weights(pixels: int, start: float, end: float, cells: int, upsample: Upsample) -> NDArray[np.float64]:
    """How much of each cell a pixel takes, [pixels, cells]; rows of NaN for pixels outside start..end."""
    position = (np.arange(pixels) + 0.5 - start) / (end - start) * cells - 0.5
    weights = np.zeros((pixels, cells))
    if upsample == "nearest":
        taps = [(np.floor(position + 0.5), np.ones(pixels))]
    elif upsample == "bilinear":
        # torch clamps the position itself, so that edge pixels repeat the edge cell.
        low = np.floor(np.maximum(position, 0))
        share = np.maximum(position, 0) - low
        taps = [(low, 1 - share), (low + 1, share)]
    elif upsample == "bicubic":
        low = np.floor(position)
        taps = [(low + k, _cubic(np.abs(position - low - k))) for k in (-1, 0, 1, 2)]
    else:
        raise InputError(f"upsample={upsample!r}: choose from 'nearest', 'bilinear', 'bicubic'")
    for cell, weight in taps:
        np.add.at(weights, (np.arange(pixels), np.clip(cell, 0, cells - 1).astype(int)), weight)
    centre = np.arange(pixels) + 0.5
    weights[(centre < start) | (centre > end)] = np.nan
    return weights


def _cubic(distance: NDArray[np.float64]) -> NDArray[np.float64]:
    """Keys' cubic convolution kernel with a = -0.75, the one that torch's bicubic interpolation uses."""
    a = -0.75
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = a * (((distance - 5) * distance + 8) * distance - 4)
    return np.where(distance <= 1, near, np.where(distance < 2, far, 0.0))
