"""From token grid to the pixels of the original image."""

import numpy as np
import pytest
import torch
from torch.nn.functional import interpolate

from vlcam.errors import AdapterError, InputError
from vlcam.geometry import Placement, check_grid, to_original

MODES = {"nearest": "nearest-exact", "bilinear": "bilinear", "bicubic": "bicubic"}


def noise(*shape):
    return np.random.default_rng(5).standard_normal(shape).astype(np.float32)


def hot(shape, row, column):
    tokens = np.zeros(shape, np.float32)
    tokens[row, column] = 1
    return tokens


@pytest.mark.parametrize("upsample", MODES)
@pytest.mark.parametrize(
    ("grid", "size"),
    [((4, 4), (64, 64)), ((2, 3), (30, 51)), ((5, 3), (37, 41)), ((1, 4), (10, 7)), ((7, 7), (7, 7)), ((6, 8), (4, 3))],
    ids=str,
)
def test_where_sizes_agree_it_is_torchs_interpolate_within_the_range_of_the_tokens(grid, size, upsample):
    tokens = noise(*grid)
    found = to_original(tokens, Placement.squashed(size, size), upsample)
    options = {} if upsample == "nearest" else {"align_corners": False}
    wanted = interpolate(torch.from_numpy(tokens)[None, None], size, mode=MODES[upsample], **options)[0, 0]
    wanted = wanted.clamp(tokens.min().item(), tokens.max().item())
    assert found.dtype == np.float32
    assert found.shape == size
    assert np.abs(found - wanted.numpy()).max() < 1e-5


def test_bicubic_interpolation_does_not_overshoot():
    tokens = hot((4, 4), 1, 2)
    torchs = interpolate(torch.from_numpy(tokens)[None, None], (64, 64), mode="bicubic")
    assert torchs.min() < -0.01
    placement = Placement((64, 80), (64, 64), (0.0, 0.0, 64.0, 64.0))
    found = to_original(tokens, placement, "bicubic")
    assert (np.nanmin(found), np.nanmax(found)) == (0, pytest.approx(1, abs=0.05))
    assert np.array_equal(np.isnan(found).all(0), np.arange(80) >= 64)


@pytest.mark.parametrize("upsample", MODES)
def test_a_squashed_image_does_not_depend_on_the_models_size(upsample):
    tokens = noise(3, 5)
    maps = [to_original(tokens, Placement.squashed((40, 90), model), upsample) for model in ((40, 90), (384, 384))]
    assert np.array_equal(*maps)


def test_squashed_shows_the_whole_image():
    placement = Placement.squashed((30, 50), (384, 224))
    assert placement == Placement((30, 50), (384, 224), (0.0, 0.0, 50.0, 30.0))


@pytest.mark.parametrize("upsample", MODES)
@pytest.mark.parametrize(
    ("cell", "corner"),
    [((0, 0), (0, 0)), ((0, -1), (0, -1)), ((-1, 0), (-1, 0)), ((-1, -1), (-1, -1))],
    ids=["top left", "top right", "bottom left", "bottom right"],
)
def test_a_hot_cell_keeps_its_corner(upsample, cell, corner):
    found = to_original(hot((3, 4), *cell), Placement.squashed((60, 200), (96, 128)), upsample)
    peak = np.unravel_index(found.argmax(), found.shape)
    assert found[corner] > 0.9
    assert abs(peak[0] - corner[0] % 60) < 20
    assert abs(peak[1] - corner[1] % 200) < 50


def test_a_cell_covers_its_own_rectangle():
    found = to_original(hot((2, 4), 1, 2), Placement.squashed((20, 80), (32, 64)), "nearest")
    wanted = np.zeros((20, 80), np.float32)
    wanted[10:20, 40:60] = 1
    assert np.array_equal(found, wanted)


def test_a_constant_map_stays_constant():
    for upsample in MODES:
        found = to_original(np.full((3, 3), 0.7, np.float32), Placement.squashed((31, 45), (48, 48)), upsample)
        assert np.allclose(found, 0.7, atol=1e-6)


def test_a_centre_crop_is_a_box_in_original_pixels():
    # 100 x 200 is resized to 50 x 100 and its middle 40 x 40 is kept.
    placement = Placement.cropped((100, 200), (50, 100), (40, 40), (5, 30))
    assert placement == Placement((100, 200), (40, 40), (60.0, 10.0, 140.0, 90.0))


def test_each_axis_of_a_crop_has_its_own_ratio():
    placement = Placement.cropped((100, 300), (50, 100), (20, 40), (10, 20))
    assert placement.box == (60.0, 20.0, 180.0, 60.0)


def test_scaled_down_original_and_box_shrink_together():
    placement = Placement.cropped((1000, 2000), (50, 100), (40, 40), (5, 30)).scaled_down(200)
    assert placement == Placement((100, 200), (40, 40), (60.0, 10.0, 140.0, 90.0))
    assert Placement.squashed((3, 4000), (8, 8)).scaled_down(512) == Placement.squashed((1, 512), (8, 8))


def test_a_small_original_is_not_scaled():
    placement = Placement.cropped((100, 200), (50, 100), (40, 40), (5, 30))
    assert placement.scaled_down(200) == placement


@pytest.mark.parametrize("upsample", MODES)
def test_outside_a_crop_is_nan_and_inside_is_the_map(upsample):
    tokens = noise(4, 4)
    placement = Placement.cropped((100, 200), (50, 100), (40, 40), (5, 30))
    found = to_original(tokens, placement, upsample)
    inside = np.zeros((100, 200), bool)
    inside[10:90, 60:140] = True
    assert np.array_equal(np.isnan(found), ~inside)
    alone = to_original(tokens, Placement.squashed((80, 80), (40, 40)), upsample)
    assert np.allclose(found[10:90, 60:140], alone, atol=1e-6)


def test_a_hot_cell_of_a_crop_lies_in_the_cropped_part():
    placement = Placement.cropped((100, 200), (50, 100), (40, 40), (5, 30))
    found = to_original(hot((4, 4), 0, 3), placement, "nearest")
    assert np.argwhere(found == 1).min(0).tolist() == [10, 120]
    assert np.argwhere(found == 1).max(0).tolist() == [29, 139]


def test_with_padding_every_pixel_is_seen_and_the_border_cells_lie_outside():
    # 20 x 40 is padded to 40 x 40, ten rows above and ten below.
    placement = Placement.cropped((20, 40), (20, 40), (40, 40), (-10, 0))
    assert placement.box == (0.0, -10.0, 40.0, 30.0)
    tokens = np.arange(16, dtype=np.float32).reshape(4, 4)
    found = to_original(tokens, placement, "nearest")
    assert np.array_equal(found, np.kron(tokens[1:3], np.ones((10, 10))))


def test_padded_interpolation_reads_the_cells_outside():
    placement = Placement.cropped((20, 40), (20, 40), (40, 40), (-10, 0))
    tokens = noise(4, 4)
    whole = to_original(tokens, Placement.squashed((40, 40), (40, 40)), "bilinear")
    assert np.allclose(to_original(tokens, placement, "bilinear"), whole[10:30], atol=1e-6)


def test_the_token_map_is_left_alone():
    tokens = noise(3, 3)
    before = tokens.copy()
    to_original(tokens, Placement.squashed((9, 12), (9, 12)), "bicubic")
    assert np.array_equal(tokens, before)


@pytest.mark.parametrize("upsample", ["area", "", None])
def test_an_unknown_interpolation_is_refused(upsample):
    with pytest.raises(InputError, match=f"upsample={upsample!r}: choose from 'nearest', 'bilinear', 'bicubic'"):
        to_original(noise(2, 2), Placement.squashed((4, 4), (4, 4)), upsample)


def test_a_grid_that_fits_is_accepted():
    check_grid(1 + 3 * 5, 1, (3, 5))
    check_grid(16, 0, (4, 4))


@pytest.mark.parametrize(("tokens", "prefix", "grid", "wanted"), [(16, 1, (3, 6), 19), (577, 0, (24, 24), 576)])
def test_a_grid_that_does_not_fit_is_refused_with_both_numbers(tokens, prefix, grid, wanted):
    message = rf"^{tokens} image tokens.* {prefix} prefix tokens and a grid of {grid[0]} x {grid[1]} = {wanted}"
    with pytest.raises(AdapterError, match=message):
        check_grid(tokens, prefix, grid)
