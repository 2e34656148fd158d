"""A part of the original image that a user names, on record and on the model's input."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vlcam.errors import InputError
from vlcam.geometry import Placement

__all__ = ["Region", "on_model_input"]


@dataclass(frozen=True, repr=False)
class Region:
    """Part of an image, in pixels of the original.

    Attributes:
        box: (x0, y0, x1, y1), half-open.
        mask: bool [H, W] of the original's size, as nested tuples; `Region.of(mask)` takes an array.
    """

    box: tuple[float, float, float, float] | None = None
    mask: tuple[tuple[bool, ...], ...] | None = None

    def __post_init__(self) -> None:
        """Refuse both, neither, or an empty one.

        Raises:
            InputError: not one region.
        """
        if (self.box is None) == (self.mask is None):
            raise InputError("a region is a box or a mask: Region(box=(x0, y0, x1, y1)) or Region.of(mask)")
        if self.mask is not None and not isinstance(self.mask, tuple):
            raise InputError(f"mask of type {type(self.mask).__name__}: Region.of(mask) takes arrays and lists")
        if self.box is not None:
            object.__setattr__(self, "box", _checked_box(self.box))

    def __repr__(self) -> str:
        """The box, or how large the mask is and how many pixels are inside."""
        if self.mask is None:
            return f"Region(box={self.box})"
        inside = sum(map(sum, self.mask))
        return f"Region.of(<mask of {len(self.mask)} x {len(self.mask[0])} with {inside} pixels inside>)"

    @classmethod
    def of(cls, mask: Any) -> Region:
        """A region from an array [H, W] of truth values, or of numbers that are not zero inside.

        Raises:
            InputError: not two axes, or nothing inside.
        """
        array = np.asarray(getattr(mask, "cpu", lambda: mask)()) != 0  # a tensor may be on another device
        if array.ndim != 2 or not array.any():
            raise InputError(
                f"a mask of shape {array.shape} with {int(array.sum())} pixels inside: give [H, W] with some"
            )
        return cls(mask=tuple(map(tuple, array.tolist())))

    def to_dict(self) -> dict[str, Any]:
        """For the record: the box, or the mask's size, count and runs of equal pixels in raster order."""
        if self.box is not None:
            return {"box": list(self.box)}
        array = np.array(self.mask, bool)
        edges = np.flatnonzero(np.diff(array.ravel().astype(np.int8))) + 1
        return {"mask": {"size": list(array.shape), "first": bool(array.flat[0]), "changes": edges.tolist()}}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Region:
        """Read `to_dict()`'s result."""
        if "box" in values:
            x0, y0, x1, y1 = values["box"]
            return cls(box=(x0, y0, x1, y1))
        rows, columns = values["mask"]["size"]
        marks = np.zeros(rows * columns, np.int64)
        marks[values["mask"]["changes"]] = 1
        return cls.of(((np.cumsum(marks) + values["mask"]["first"]) % 2).reshape(rows, columns))


def on_model_input(region: Region, placement: Placement) -> NDArray[np.float32]:
    """A region of the original image on the model's input: float32 [H, W], 1 inside.

    Args:
        region: the region.
        placement: which part of the original the model saw.

    Raises:
        InputError: a mask of another size than the image, or a region that the model never saw.
    """
    x0, y0, x1, y1 = placement.box
    across = x0 + (np.arange(placement.model[1]) + 0.5) / placement.model[1] * (x1 - x0)
    down = y0 + (np.arange(placement.model[0]) + 0.5) / placement.model[0] * (y1 - y0)
    box, mask = region.box, None if region.mask is None else np.array(region.mask, bool)
    if box is not None:
        inside = np.outer((down >= box[1]) & (down < box[3]), (across >= box[0]) & (across < box[2]))
    else:
        shape = () if mask is None else mask.shape
        if mask is None or shape != placement.original:
            raise InputError(
                f"a mask of shape {shape} for an image of {placement.original}: give one truth value a pixel"
            )
        rows, columns = np.floor(down).astype(int), np.floor(across).astype(int)
        seen = np.outer((rows >= 0) & (rows < shape[0]), (columns >= 0) & (columns < shape[1]))
        inside = seen & mask[np.ix_(rows.clip(0, shape[0] - 1), columns.clip(0, shape[1] - 1))]
    if not inside.any():
        raise InputError(
            f"the region lies outside of what the model saw, {tuple(round(v) for v in placement.box)} of an image of "
            f"{placement.original} (rows, columns), or between two of its pixels"
        )
    return inside.astype(np.float32)


def _checked_box(box: Any) -> tuple[float, float, float, float]:
    """A box as the user gave it, in floats.

    Raises:
        InputError: not four finite numbers, or nothing between them.
    """
    found: tuple[float, ...] = ()
    with suppress(TypeError, ValueError):
        found = tuple(float(number) for number in box)
    if len(found) != 4 or not np.isfinite(found).all() or not (found[0] < found[2] and found[1] < found[3]):
        raise InputError(f"box={box!r}: give (x0, y0, x1, y1) with x0 < x1 and y0 < y1, in pixels of the image")
    return found[0], found[1], found[2], found[3]
