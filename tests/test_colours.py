"""Heatmaps as pictures."""

import tracemalloc

import numpy as np
import pytest
from PIL import Image

from vlcam import colours
from vlcam.colours import COLORMAPS, colourise, overlay
from vlcam.errors import InputError, UnknownNameError

PIXELS = np.random.default_rng(0).integers(0, 256, (12, 20, 3), dtype=np.uint8)
PICTURE = Image.fromarray(PIXELS)


@pytest.mark.parametrize("name", COLORMAPS)
def test_the_ends_are_the_first_and_last_colour(name):
    found = colourise(np.array([[0.0, 1.0, -0.5, 1.5]]), name)
    first, last = (list(COLORMAPS[name][end]) for end in (0, -1))
    assert found.dtype == np.uint8
    assert found.tolist() == [[first, last, first, last]]


@pytest.mark.parametrize("name", COLORMAPS)
def test_anchors_stand_at_equal_steps(name):
    anchors = COLORMAPS[name]
    found = colourise(np.linspace(0, 1, len(anchors))[None], name)
    assert found.tolist() == [[list(anchor) for anchor in anchors]]


def test_between_anchors_colours_are_interpolated():
    assert colourise(np.array([[0.2, 0.6]]), "gray").tolist() == [[[51] * 3, [153] * 3]]
    assert colourise(np.array([[0.375]]), "coolwarm").tolist() == [[[181, 198, 238]]]


@pytest.mark.parametrize("name", COLORMAPS)
def test_nan_is_black(name):
    assert colourise(np.array([[np.nan, 1.0]]), name)[0, 0].tolist() == [0, 0, 0]


def test_float32_and_shape_are_kept_as_given():
    values = np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4)
    before = values.copy()
    assert colourise(values).shape == (3, 4, 3)
    assert np.array_equal(values, before)


def test_an_unknown_colormap_is_refused_with_those_there_are():
    with pytest.raises(UnknownNameError, match="no colormap 'jet'; there are 'inferno', 'viridis', 'gray', 'coolwarm'"):
        colourise(np.zeros((2, 2)), "jet")
    with pytest.raises(UnknownNameError, match="no colormap 'jet'"):
        overlay(Image.new("RGB", (2, 2)), np.zeros((2, 2)), colormap="jet")


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_an_overlay_is_an_rgb_image_of_the_same_size(dtype):
    found = overlay(PICTURE, np.linspace(0, 1, 240).reshape(12, 20).astype(dtype))
    assert found.mode == "RGB"
    assert found.size == PICTURE.size


def test_the_map_is_the_more_opaque_the_higher_it_is():
    heatmap = np.array([[0.0, 0.5, 1.0]])
    found = np.asarray(overlay(Image.new("RGB", (3, 1), (200, 200, 200)), heatmap, alpha=0.5, colormap="gray"), float)
    shares = 0.5 * np.array([0.35, 0.675, 1.0])
    wanted = 200 * (1 - shares) + np.array([0.0, 127.5, 255.0]) * shares
    assert np.abs(found[0] - wanted[:, None]).max() <= 1


def test_with_no_opacity_the_picture_stays():
    assert np.array_equal(np.asarray(overlay(PICTURE, np.full((12, 20), 0.7), alpha=0)), PIXELS)


def plainly(pixels, heatmap, alpha, colormap):
    """The overlay as its formula says, in float64 and without a table."""
    unseen, values = np.isnan(heatmap), np.nan_to_num(heatmap)
    strength = alpha * (0.35 + 0.65 * np.clip(np.abs(values), 0, 1))[..., None]
    tint = colourise((values + 1) / 2 if (values < 0).any() else values, colormap)
    blended = pixels * (1 - strength) + tint * strength
    grey = pixels.mean(-1, keepdims=True) * 0.5 + 64
    rows, columns = np.indices(unseen.shape)
    grey = np.where(((rows + columns) // 4 % 2 == 0)[..., None], grey, grey * 0.8)
    return np.where(unseen[..., None], grey, blended).round()


@pytest.mark.parametrize("strip", [20, 100, 1 << 18])
@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("low", [0, -1.3])
@pytest.mark.parametrize("name", COLORMAPS)
def test_table_and_strips_change_no_colour_by_more_than_one(monkeypatch, name, low, alpha, strip):
    monkeypatch.setattr(colours, "_STRIP", strip)
    heatmap = np.random.default_rng(1).uniform(low, 1.3, (12, 20)).astype(np.float32)
    heatmap[5:9, 3:] = np.nan
    found = np.asarray(overlay(PICTURE, heatmap, alpha=alpha, colormap=name), int)
    assert np.abs(found - plainly(PIXELS, heatmap, alpha, name)).max() <= 1


def test_a_large_overlay_takes_little_memory():
    picture, heatmap = Image.new("RGB", (1500, 1000)), np.linspace(0, 1, 1_500_000, dtype=np.float32).reshape(1000, -1)
    tracemalloc.start()
    overlay(picture, heatmap)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40e6  # 140 MB where the whole picture is made float64 at once


@pytest.mark.parametrize("alpha", [-0.1, 1.01, 60, float("nan")])
def test_an_opacity_outside_its_range_is_refused_by_its_value(alpha):
    with pytest.raises(InputError, match=rf"alpha={alpha!r}: an opacity is from 0 to 1"):
        overlay(PICTURE, np.zeros((12, 20)), alpha=alpha)


@pytest.mark.parametrize("name", COLORMAPS)
@pytest.mark.parametrize("value", [0.0, 0.5, 1.0])
def test_unseen_pixels_differ_from_seen_ones(name, value):
    heatmap = np.full((16, 16), value)
    heatmap[:, 8:] = np.nan
    found = np.asarray(overlay(Image.new("RGB", (16, 16), (180, 60, 60)), heatmap, colormap=name), int)
    seen, unseen = found[:, :8].reshape(-1, 3), found[:, 8:].reshape(-1, 3)
    assert len(np.unique(seen, axis=0)) == 1
    assert np.abs(unseen - seen[0]).sum(1).min() > 20


def test_unseen_pixels_are_grey_and_striped():
    found = np.asarray(overlay(PICTURE.resize((16, 16)), np.full((16, 16), np.nan)))
    assert np.array_equal(found[..., 0], found[..., 1])
    assert np.array_equal(found[..., 0], found[..., 2])
    even = np.asarray(overlay(Image.new("RGB", (16, 16), (180, 60, 60)), np.full((16, 16), np.nan)))
    assert len(np.unique(even)) == 2
    assert np.array_equal(even[1:, :-1], even[:-1, 1:])


def test_unseen_pixels_leave_the_seen_ones_as_they_are():
    heatmap = np.random.default_rng(1).random((12, 20))
    partly = heatmap.copy()
    partly[:, :5] = np.nan
    whole, found = (np.asarray(overlay(PICTURE, values)) for values in (heatmap, partly))
    assert np.array_equal(whole[:, 5:], found[:, 5:])


def test_picture_and_map_are_left_alone():
    picture, heatmap = PICTURE.copy(), np.random.default_rng(1).random((12, 20))
    heatmap[0] = np.nan
    before = heatmap.copy()
    overlay(picture, heatmap)
    assert np.array_equal(np.asarray(picture), PIXELS)
    assert np.array_equal(heatmap, before, equal_nan=True)
