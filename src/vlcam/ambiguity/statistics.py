"""How far apart many maps of one grid are: pure functions on arrays [members, cells]."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vlcam.errors import InputError

__all__ = [
    "BINS",
    "SAME",
    "Correlations",
    "alone",
    "correlations",
    "distinct",
    "eta_squared",
    "matrix",
    "scaled",
    "unit_ranks",
    "variance_left",
]

BINS = 20_000
"""How finely correlations are counted, from -1 to 1: a median is known to 1e-4."""
SAME = 1e-4
"""Maps in 0..1 that differ by no more than this in any cell are one map to look at."""
_BLOCK, _TIED = 512, 1000
_STEP = 2 / BINS
_ROUNDING = 1e-6
"""Products of float32 ranks that are this close to 0 may be 0, which maps of few cells often have."""

Floats = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Correlations:
    """The rank correlations of all pairs of maps.

    Attributes:
        pairs: how many there are.
        counts: how many lie in each of `BINS` equal steps from -1 to 1.
        median: to 1e-4, and not below the minimum.
        minimum: of the two maps that are least alike.
        negative: share of pairs below 0.
        lowest: the pairs that are no more than 1e-4 above it, in order; the first thousand of them.
    """

    pairs: int
    counts: NDArray[np.int64]
    median: float
    minimum: float
    negative: float
    lowest: tuple[tuple[int, int], ...]


def scaled(maps: Floats) -> Floats:
    """Each map to 0..1 by its own smallest and largest cell, [n, cells]; a constant one becomes zeros."""
    low, high = maps.min(1, keepdims=True), maps.max(1, keepdims=True)
    # In two steps: the range of a map of very large and very small values may not be a float32.
    span = (high.astype(np.float64) - low).astype(np.float64)
    found: Floats = ((maps - low.astype(np.float64)) / np.where(span > 0, span, 1)).astype(np.float32)
    return found


def unit_ranks(maps: Floats) -> Floats:
    """Ranks of each map's cells, less their mean, at length 1, [n, cells]; equal cells share their mean rank.

    The product of two rows is Spearman's rank correlation.
    """
    from scipy.stats import rankdata  # half a second to import

    ranks = rankdata(maps, axis=1) - (maps.shape[1] + 1) / 2
    length = np.sqrt((ranks * ranks).sum(1, keepdims=True))
    found: Floats = (ranks / np.where(length > 0, length, 1)).astype(np.float32)
    return found


def matrix(ranks: Floats) -> Floats:
    """Rank correlations of all pairs, [n, n]."""
    found: Floats = np.clip(ranks @ ranks.T, -1, 1)
    return found


def correlations(ranks: Floats) -> Correlations:
    """Count the correlations of all pairs of maps, each pair once, without holding all of them at once.

    Args:
        ranks: what `unit_ranks` gives, [n, cells].

    Raises:
        InputError: fewer than two maps.
    """
    count = len(ranks)
    if count < 2:
        raise InputError(f"{count} maps to compare: rank correlations need two")
    counts = np.zeros(BINS, np.int64)
    minimum, negative = np.inf, 0
    lowest: list[tuple[float, int, int]] = []
    for first in range(0, count, _BLOCK):
        block = np.clip(ranks[first : first + _BLOCK] @ ranks[first:].T, -1, 1)
        later = np.arange(block.shape[1]) > np.arange(len(block))[:, None]
        found = block[later]
        if not found.size:
            continue
        counts += np.bincount(np.minimum(((found + 1) * (BINS / 2)).astype(np.int64), BINS - 1), minlength=BINS)
        negative += int((found < -_ROUNDING).sum())
        minimum = min(minimum, float(found.min()))
        rows, columns = np.nonzero(later & (block <= minimum + _STEP))
        near = zip(rows[:_TIED], columns[:_TIED], strict=True)
        lowest += [(float(block[r, c]), int(first + r), int(first + c)) for r, c in near]
        lowest = [each for each in lowest if each[0] <= minimum + _STEP][:_TIED]
    pairs = count * (count - 1) // 2
    tied = tuple((row, column) for _, row, column in lowest)
    return Correlations(pairs, counts, max(minimum, _median(counts, pairs)), minimum, negative / pairs, tied)


def _median(counts: NDArray[np.int64], pairs: int) -> float:
    """The middle of the step in which the middle pair lies; with two middle ones, of both steps."""
    below = counts.cumsum()
    steps = [int(np.searchsorted(below, rank)) for rank in ((pairs + 1) // 2, pairs // 2 + 1)]
    return float(np.mean([(step + 0.5) * 2 / BINS - 1 for step in steps]))


def eta_squared(maps: Floats, labels: Sequence[Hashable]) -> float:
    """Share of the variance of maps that groups explain, 0 to 1.

    The sum over groups of n_g |mean map of g - mean map|^2 over the sum over maps of |map - mean map|^2. 0 where all
    maps are equal.

    Args:
        maps: [n, cells].
        labels: the group of each map.
    """
    known = {label: number for number, label in enumerate(dict.fromkeys(labels))}
    groups = np.array([known[label] for label in labels])
    centred = maps.astype(np.float64) - maps.mean(0, dtype=np.float64)
    total = float((centred * centred).sum())
    order = np.argsort(groups, kind="stable")
    starts = np.searchsorted(groups[order], np.arange(len(known)))
    sums = np.add.reduceat(centred[order], starts, axis=0)
    between = float(((sums * sums).sum(1) / np.bincount(groups, minlength=len(known))).sum())
    return between / total if total > 0 else 0.0


def variance_left(maps: Floats, labels: Sequence[Hashable]) -> dict[Hashable, float]:
    """For every group the variance of its maps, the mean of |map - mean map|^2, as a share of that of all maps.

    A group may vary more than all maps do. The mean over all maps of their group's share is 1 less `eta_squared`. 0
    where all maps are equal.

    Args:
        maps: [n, cells].
        labels: the group of each map.
    """
    members: dict[Hashable, list[int]] = {}
    for number, label in enumerate(labels):
        members.setdefault(label, []).append(number)
    total = float(maps.var(0, dtype=np.float64).sum())
    found = {label: float(maps[numbers].var(0, dtype=np.float64).sum()) for label, numbers in members.items()}
    return {label: own / total if total > 0 else 0.0 for label, own in found.items()}


def alone(ranks: Floats, rest: Sequence[Hashable]) -> tuple[float | None, int]:
    """Mean rank correlation of the pairs that differ in one field and in nothing else, and how many there are.

    Args:
        ranks: what `unit_ranks` gives, [n, cells].
        rest: each map's values of all other fields; no two maps agree in these and in the field, too.

    Returns:
        None where there is no such pair.
    """
    members: dict[Hashable, list[int]] = {}
    for number, key in enumerate(rest):
        members.setdefault(key, []).append(number)
    total, pairs = 0.0, 0
    for numbers in members.values():
        own = ranks[numbers].astype(np.float64)
        summed = own.sum(0)
        total += float((summed @ summed - (own * own).sum()) / 2)
        pairs += len(numbers) * (len(numbers) - 1) // 2
    return (total / pairs, pairs) if pairs else (None, 0)


def distinct(maps: Floats) -> int:
    """How many maps in 0..1 are left where those that differ by no more than `SAME` in any cell count as one.

    A map counts as one with the first that it is close to, in the order of a weighted sum of cells.
    """
    weights = np.random.default_rng(0).choice([-1.0, 1.0], maps.shape[1])
    sums = maps @ weights
    kept: list[int] = []
    heights: list[float] = []
    for number in np.argsort(sums, kind="stable"):
        near = kept[bisect_left(heights, sums[number] - SAME * maps.shape[1]) :]
        if not near or not bool((np.abs(maps[near] - maps[number]).max(1) <= SAME).any()):
            kept.append(int(number))
            heights.append(float(sums[number]))
    return len(kept)
