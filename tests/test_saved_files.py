"""Saved explanations: nothing is lost, they verify from the file alone, and what was edited or moved is told."""

from __future__ import annotations

import models
import numpy as np
import pytest
import torch
from PIL import Image

import vlcam

TEXT = "a red circle and a blue dog"


@pytest.fixture
def photo(tmp_path):
    path = tmp_path / "photo.jpg"
    pixels = np.random.default_rng(3).integers(0, 255, (40, 64, 3), np.uint8)
    Image.fromarray(pixels, "RGB").save(path, quality=90)
    return path


@pytest.fixture
def saved(model, photo, tmp_path):
    exp = model.explain(photo, TEXT, phrase="red circle")
    return exp, exp.save(tmp_path / "out.png")


def test_what_was_saved_is_what_is_opened(saved):
    exp, path = saved
    opened = vlcam.open(path)
    np.testing.assert_array_equal(opened.tokens, exp.tokens)
    np.testing.assert_array_equal(opened.heatmap, exp.heatmap)
    assert opened.record() == exp.record()
    assert opened.recipe == exp.recipe
    assert list(opened.words) == list(exp.words)
    for word in exp.words:
        np.testing.assert_array_equal(opened.words[word].tokens, exp.words[word].tokens)
    np.testing.assert_array_equal(np.asarray(opened.picture()), np.asarray(exp.picture()))


def test_the_file_is_a_picture_of_the_overlay(saved):
    exp, path = saved
    with Image.open(path) as shown:
        np.testing.assert_array_equal(np.asarray(shown), np.asarray(exp.overlay()))


def test_it_verifies_bit_for_bit_from_the_file_alone(saved, model, photo):
    _, path = saved
    photo.unlink()
    outcome = vlcam.open(path).verify(model)
    assert outcome.identical
    assert outcome.largest == 0
    assert outcome.differences == ()
    assert vlcam.open(path).words["dog"].verify(model).identical


@pytest.mark.parametrize("recipe", list(vlcam.recipes()))
def test_every_named_recipe_verifies(model, photo, tmp_path, recipe):
    path = model.explain(photo, TEXT, recipe).save(tmp_path / "recipe.png")
    assert vlcam.open(path).verify(model).identical


def test_the_second_of_two_equal_phrases_verifies(model, photo, tmp_path):
    path = model.explain(photo, TEXT, phrase="a", occurrence=2).save(tmp_path / "second.png")
    assert vlcam.open(path).verify(model).identical


def test_preprocessed_pixels_travel_and_verify(model, tmp_path):
    path = model.explain(models.pixels(), TEXT).save(tmp_path / "tensor.png")
    assert vlcam.open(path).verify(model).identical


def test_other_weights_do_not_reproduce_the_map_and_are_named(saved, blip):
    _, path = saved
    with torch.no_grad():
        blip.text_encoder.encoder.layer[0].crossattention.self.value.weight.mul_(1.5)
    outcome = vlcam.open(path).verify(vlcam.wrap(blip, models.processor(), name="random-blip"))
    assert not outcome.reproduced
    assert outcome.largest > 0
    assert any("model.weights_sha256" in line for line in outcome.differences)
    assert any("score itm_logit" in line for line in outcome.differences)
    assert str(outcome).startswith("NOT reproduced")


def test_another_option_is_named(saved, blip):
    _, path = saved
    outcome = vlcam.open(path).verify(vlcam.wrap(blip, models.processor(), name="random-blip", first_token="cls"))
    assert not outcome.reproduced
    assert "model.options.first_token: was 'enc', is 'cls'" in outcome.differences


def test_without_its_image_a_file_asks_for_it_and_checks_it(model, photo, tmp_path):
    path = model.explain(photo, TEXT).save(tmp_path / "bare.png", embed_image=False)
    bare = vlcam.open(path)
    assert bare.heatmap.shape == (40, 64)
    with pytest.raises(vlcam.InputError, match=r"vlcam.open\(path, image=...\)"):
        bare.overlay()
    with pytest.raises(vlcam.InputError, match="does not carry its image"):
        bare.verify(model)
    assert bare.verify(model, image=photo).identical
    assert vlcam.open(path, image=photo).verify(model).identical
    other = tmp_path / "other.png"
    Image.new("RGB", (64, 40)).save(other)
    with pytest.raises(vlcam.InputError, match="another image: its SHA-256"):
        vlcam.open(path, image=other)


def test_a_map_with_nothing_to_draw_is_saved_with_its_status(model, photo, tmp_path):
    exp = model.explain(photo, TEXT, layer=-1, queries="cls").words["red"]
    assert exp.status == "zero gradient"
    opened = vlcam.open(exp.save(tmp_path / "nothing.png"))
    assert opened.status == "zero gradient"
    with pytest.raises(vlcam.EvidenceError, match="nothing to draw"):
        opened.overlay()


def test_an_existing_file_is_kept(saved):
    exp, path = saved
    before = path.read_bytes()
    with pytest.raises(vlcam.FileError, match="exists already"):
        exp.save(path)
    assert path.read_bytes() == before
    assert exp.save(path, overwrite=True) == path


def test_the_peak_is_in_pixels_of_the_original(model, photo):
    exp = model.explain(photo, TEXT)
    x, y = exp.peak()
    row, column = np.unravel_index(exp.tokens.argmax(), exp.tokens.shape)
    assert exp.heatmap[y, x] == exp.heatmap.max()
    assert (x // 16, y // 10) == (column, row)
