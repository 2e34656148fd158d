"""How far apart two maps are: rank correlation, structural similarity, overlap of the strongest cells."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vlcam.errors import InputError

__all__ = ["TOP", "Likeness", "likeness", "rank_correlation", "structural_similarity", "top_overlap"]

TOP = 0.1
"""Share of the cells that count as the strongest ones, where none is given."""

_SMALLEST = 3  # cells of the side of the smallest window that has a variance of its own
Map = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Likeness:
    """How alike two maps are.

    Attributes:
        rank_correlation: Spearman's, -1 to 1.
        ssim: structural similarity of the maps, each scaled to 0..1; -1 to 1. NaN for maps that are smaller than
            3 x 3, such as those over a text.
        top_overlap: share of the strongest cells of the one that are among those of the other, 0 to 1.
        top: which share of the cells counts as the strongest.
    """

    rank_correlation: float
    ssim: float
    top_overlap: float
    top: float

    def __str__(self) -> str:
        """One line with all three."""
        return (
            f"rank correlation {self.rank_correlation:.3f}, SSIM {self.ssim:.3f}, "
            f"overlap of the strongest {self.top:.0%} {self.top_overlap:.3f}"
        )


def likeness(one: Map, other: Map, *, top: float = TOP) -> Likeness:
    """Compare two maps of one shape, cell by cell; cells that are NaN in one of them are left out.

    Args:
        one: [h, w].
        other: [h, w].
        top: share of the cells that counts as the strongest.

    Raises:
        InputError: shapes differ, or no cell is left.
    """
    ssim = structural_similarity(one, other) if min(one.shape, default=0) >= _SMALLEST else math.nan
    return Likeness(rank_correlation(one, other), ssim, top_overlap(one, other, share=top), top)


def rank_correlation(one: Map, other: Map) -> float:
    """Spearman's rank correlation over the cells, -1 to 1; equal values share their mean rank.

    NaN where one of the maps is constant: it ranks nothing.

    Raises:
        InputError: shapes differ, or no cell is left.
    """
    from scipy.stats import rankdata  # half a second to import

    a, b = (rankdata(values) for values in _seen(one, other))
    a, b = a - a.mean(), b - b.mean()
    norm = math.sqrt(float((a * a).sum() * (b * b).sum()))
    return float((a * b).sum() / norm) if norm else math.nan


def structural_similarity(one: Map, other: Map) -> float:
    """Mean SSIM (Wang, Bovik, Sheikh, Simoncelli, IEEE TIP 2004) of two maps, each scaled to 0..1.

    Windows of 7 x 7 cells, or the largest odd square that fits; cells that are NaN count as 0 in both.

    Raises:
        InputError: shapes differ, no cell is left, or the maps are smaller than 3 x 3.
    """
    from skimage.metrics import structural_similarity as ssim  # two seconds to import

    _seen(one, other)
    seen = np.isfinite(one) & np.isfinite(other)
    side = min(7, *one.shape)
    side -= 1 - side % 2
    if side < _SMALLEST:
        raise InputError(f"maps of shape {one.shape}: structural similarity needs 3 x 3 cells or more")
    a, b = (np.where(seen, _scaled(values, seen), 0.0) for values in (one, other))
    return float(ssim(a, b, data_range=1.0, win_size=side))


def top_overlap(one: Map, other: Map, *, share: float = TOP) -> float:
    """Share of the strongest cells of one map that are among the strongest of the other, 0 to 1.

    There are ceil(share x cells) of them; of equal values, those that come first in raster order count.

    Raises:
        InputError: shapes differ, no cell is left, or `share` is not more than 0 and at most 1.
    """
    if not 0 < share <= 1:
        raise InputError(f"share={share!r}: give a share of the cells, more than 0 and at most 1")
    a, b = _seen(one, other)
    count = math.ceil(share * len(a) - 1e-9)
    first, second = (set(np.argsort(-values, kind="stable")[:count].tolist()) for values in (a, b))
    return len(first & second) / count


def _seen(one: Map, other: Map) -> tuple[Map, Map]:
    """The cells that both maps have a value for, flat."""
    if one.shape != other.shape or one.ndim != 2:
        raise InputError(f"maps of shapes {one.shape} and {other.shape}: give two of one shape [h, w]")
    seen = np.isfinite(one) & np.isfinite(other)
    if not seen.any():
        raise InputError(f"maps of shape {one.shape}: no cell has a finite value in both")
    return one[seen].astype(np.float64), other[seen].astype(np.float64)


def _scaled(values: Map, seen: NDArray[np.bool_]) -> Map:
    """To 0..1 over the cells that are seen; a constant map becomes 0."""
    low, high = float(values[seen].min()), float(values[seen].max())
    return (values.astype(np.float64) - low) / (high - low) if high > low else np.zeros(values.shape)
