"""Boxes around what is high in a heatmap: the rule by which they are found, and how two are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vlcam.errors import InputError

__all__ = ["RULE", "Box", "Component", "area", "check_threshold", "iou", "largest_component"]

Box = tuple[int, int, int, int]
"""(x0, y0, x1, y1) in pixels, half-open."""

RULE = {
    "name": "largest component",
    "map": "the heatmap: normalised by the recipe, interpolated to the original image; pixels that the model did not "
    "see are left out",
    "at_least": "threshold times the largest value, which must be above zero",
    "connectivity": 8,
    "ties": "of components of equal area the one with the highest value, then the first in raster order",
    "box": "x0, y0, x1, y1 in pixels of the original image, half-open",
}


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
    return shared / (area(one) + area(other) - shared)


def area(box: Sequence[float]) -> float:
    """Width times height, in square pixels."""
    return float(box[2] - box[0]) * float(box[3] - box[1])
