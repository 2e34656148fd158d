"""How alike two maps are: against SciPy, against scikit-image, and cell by cell."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import spearmanr
from skimage.metrics import structural_similarity as peer_ssim

import vlcam
from vlcam.likeness import TOP, Likeness, likeness, rank_correlation, structural_similarity, top_overlap

SHAPES = [(7, 7), (8, 8), (5, 9), (3, 3), (14, 4)]


def maps(shape, seed=0, dtype=np.float32):
    generator = np.random.default_rng(seed)
    return generator.standard_normal(shape).astype(dtype), generator.standard_normal(shape).astype(dtype)


def scaled(values):
    exact = values.astype(np.float64)
    return (exact - exact.min()) / (exact.max() - exact.min())


def strongest(values, count):
    """The places of the largest values; of equal ones, the first in raster order."""
    ranked = sorted(range(values.size), key=lambda place: (-values.reshape(-1)[place], place))
    return set(ranked[:count])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_rank_correlation_is_spearmans(shape, dtype):
    one, other = maps(shape, dtype=dtype)
    assert rank_correlation(one, other) == pytest.approx(spearmanr(one.ravel(), other.ravel()).statistic, abs=1e-12)


def test_equal_values_share_their_mean_rank():
    one, other = (np.random.default_rng(seed).integers(0, 4, (9, 7)).astype(np.float32) for seed in (1, 2))
    assert rank_correlation(one, other) == pytest.approx(spearmanr(one.ravel(), other.ravel()).statistic, abs=1e-12)


def test_ranks_do_not_hang_on_the_scale_and_order_does_not_matter():
    one, other = maps((8, 6))
    found = rank_correlation(one, other)
    assert rank_correlation(np.exp(one) * 7 - 3, other) == pytest.approx(found, abs=1e-12)
    assert rank_correlation(other, one) == pytest.approx(found, abs=1e-12)
    assert rank_correlation(one, one) == pytest.approx(1)
    assert rank_correlation(one, -one) == pytest.approx(-1)


@pytest.mark.parametrize(("one", "other"), [(0.0, 1.0), (1.0, None), (None, 2.0)])
def test_a_constant_map_ranks_nothing(one, other):
    drawn = maps((4, 4))[0]
    pair = [drawn if value is None else np.full((4, 4), value, np.float32) for value in (one, other)]
    assert math.isnan(rank_correlation(*pair))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_structural_similarity_is_that_of_scikit_image_on_maps_from_0_to_1(shape):
    one, other = maps(shape)
    side = max(side for side in (3, 5, 7) if side <= min(shape))
    wanted = peer_ssim(scaled(one), scaled(other), data_range=1.0, win_size=side)
    assert structural_similarity(one, other) == pytest.approx(wanted, abs=1e-9)
    assert structural_similarity(one, one) == pytest.approx(1)


def test_the_structural_similarity_is_its_formula():
    """With one window over the whole map nothing is averaged but the window itself."""
    one, other = maps((7, 7), seed=4)
    a, b = scaled(one), scaled(other)
    means, (first, cross), (_, second) = (a.mean(), b.mean()), *np.cov(a.ravel(), b.ravel())
    above = (2 * means[0] * means[1] + 0.01**2) * (2 * cross + 0.03**2)
    below = (means[0] ** 2 + means[1] ** 2 + 0.01**2) * (first + second + 0.03**2)
    assert structural_similarity(one, other) == pytest.approx(above / below, abs=1e-9)


def test_constant_maps_are_alike_and_unlike_others():
    drawn, flat = maps((8, 8))[0], np.full((8, 8), 3.0)
    assert structural_similarity(flat, flat * 2) == pytest.approx(1)
    wanted = peer_ssim(scaled(drawn), np.zeros((8, 8)), data_range=1.0, win_size=7)
    assert structural_similarity(drawn, flat) == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize("shape", [(2, 8), (1, 5), (2, 2)], ids=str)
def test_maps_without_a_window_have_no_structural_similarity(shape):
    one, other = maps(shape)
    with pytest.raises(vlcam.InputError, match="structural similarity needs 3 x 3 cells or more"):
        structural_similarity(one, other)
    assert math.isnan(likeness(one, other).ssim)
    assert likeness(one, other).rank_correlation == rank_correlation(one, other)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("share", [0.01, 0.1, 0.25, 0.5, 1.0])
def test_the_overlap_is_counted_cell_by_cell(shape, share):
    one, other = maps(shape, seed=5)
    count = math.ceil(round(share * one.size, 6))
    wanted = len(strongest(one, count) & strongest(other, count)) / count
    assert top_overlap(one, other, share=share) == wanted


@pytest.mark.parametrize(("cells", "share", "count"), [(10, 0.1, 1), (10, 0.3, 3), (30, 0.1, 3), (10, 0.31, 4)])
def test_a_share_that_comes_out_even_takes_no_cell_more(cells, share, count):
    """0.3 x 10 is a little more than 3 in floating point."""
    one = np.arange(cells, dtype=np.float32)[None]
    other = -one
    other[0, -count:] = cells  # the same strongest cells
    assert top_overlap(one, other, share=share) == 1
    other[0, -count - 1] = 2 * cells  # and one more in the second, which drives one of them out
    assert top_overlap(one, other, share=share) == (count - 1) / count


def test_of_equal_values_the_first_in_raster_order_are_the_strongest():
    one = np.array([[1, 1, 1, 1]], np.float32)
    assert top_overlap(one, np.array([[4, 3, 2, 1]], np.float32), share=0.5) == 1
    assert top_overlap(one, np.array([[1, 2, 3, 4]], np.float32), share=0.5) == 0


def test_cells_that_are_nan_in_one_map_are_left_out():
    one, other = maps((6, 7), seed=6)
    first, second = one.copy(), other.copy()
    first[0] = np.nan
    second[:, 0] = np.nan
    assert rank_correlation(first, second) == pytest.approx(rank_correlation(one[1:, 1:], other[1:, 1:]), abs=1e-12)
    assert top_overlap(first, second) == top_overlap(one[1:, 1:], other[1:, 1:])
    both = [np.pad(scaled(each[1:, 1:]), ((1, 0), (1, 0))) for each in (one, other)]
    assert structural_similarity(first, second) == pytest.approx(peer_ssim(*both, data_range=1.0, win_size=5))


def test_what_is_infinite_is_left_out_too():
    one, other = maps((5, 5), seed=7)
    first = one.copy()
    first[0, 0] = np.inf
    wanted = spearmanr(one.ravel()[1:], other.ravel()[1:]).statistic
    assert rank_correlation(first, other) == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("measure", [rank_correlation, structural_similarity, top_overlap, likeness])
@pytest.mark.parametrize(
    ("shapes", "told"),
    [
        (((4, 4), (4, 5)), r"maps of shapes \(4, 4\) and \(4, 5\): give two of one shape"),
        (((4,), (4,)), r"maps of shapes \(4,\) and \(4,\): give two of one shape \[h, w\]"),
        (((2, 4, 4), (2, 4, 4)), "give two of one shape"),
    ],
)
def test_other_shapes_are_refused(measure, shapes, told):
    with pytest.raises(vlcam.InputError, match=told):
        measure(*(np.zeros(shape) for shape in shapes))


@pytest.mark.parametrize("measure", [rank_correlation, structural_similarity, top_overlap, likeness])
def test_maps_without_a_common_cell_are_refused(measure):
    one, other = maps((4, 4))
    one[:2], other[2:] = np.nan, np.nan
    with pytest.raises(vlcam.InputError, match=r"maps of shape \(4, 4\): no cell has a finite value in both"):
        measure(one, other)


@pytest.mark.parametrize("share", [0, -0.1, 1.1, float("nan")])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(vlcam.InputError, match="give a share of the cells, more than 0 and at most 1"):
        top_overlap(*maps((4, 4)), share=share)


def test_all_three_at_once_and_the_maps_are_left_as_they_were():
    one, other = maps((8, 8), seed=8)
    before = one.copy(), other.copy()
    found = likeness(one, other, top=0.2)
    assert found == Likeness(
        rank_correlation(one, other), structural_similarity(one, other), top_overlap(one, other, share=0.2), 0.2
    )
    assert likeness(one, other).top == TOP
    assert np.array_equal(one, before[0])
    assert np.array_equal(other, before[1])
    assert str(Likeness(0.5, -0.25, 0.75, 0.1)) == (
        "rank correlation 0.500, SSIM -0.250, overlap of the strongest 10% 0.750"
    )
