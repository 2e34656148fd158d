"""Saved explanations: nothing is lost, they verify from the file alone, and what was edited or moved is told."""

from __future__ import annotations

import json
from dataclasses import replace

import models
import numpy as np
import pytest
import torch
from PIL import Image

import vlcam
from vlcam.fitting import fitting

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


@pytest.mark.parametrize(
    "choices", [{}, {"phrase": "red circle"}, {"queries": "cls", "exclude": ("cls", "padding")}], ids=str
)
def test_a_words_view_verifies_without_a_difference(model, photo, tmp_path, choices):
    path = model.explain(photo, TEXT, layer=1, **choices).save(tmp_path / "out.png")
    for word, view in vlcam.open(path).words.items():
        outcome = view.verify(model)
        assert outcome.identical, word
        assert outcome.differences == ()


def test_a_word_without_gradient_verifies(model, photo):
    words = model.explain(photo, TEXT, layer=-1, queries="cls", exclude=("cls", "padding")).words
    assert words["dog"].status == "zero gradient"
    outcome = words["dog"].verify(model)
    assert outcome.identical
    assert outcome.largest == 0
    assert outcome.differences == ()
    claimed = replace(words["dog"], status="ok").verify(model)
    assert not claimed.reproduced
    assert not claimed.identical
    assert claimed.differences == ("status: was 'ok', is 'zero gradient'",)


def test_a_map_without_gradient_that_a_sweep_kept_verifies(model, photo, tmp_path):
    recipe = model.explain(photo, TEXT).recipe.replace(layers="last")
    (kept,) = model.sweep(photo, TEXT, [recipe], empty="keep")
    assert kept.status == "zero gradient"
    outcome = vlcam.open(kept.save(tmp_path / "kept.png")).verify(model)
    assert outcome.identical
    assert outcome.differences == ()


def test_another_placement_is_not_the_same_map(saved, model):
    exp, _ = saved
    moved = replace(exp, placement=replace(exp.placement, box=(1.0, 0.0, 64.0, 40.0)))
    outcome = moved.verify(model)
    assert not outcome.reproduced
    assert not outcome.identical
    assert outcome.differences == ("placement.box: was [1.0, 0.0, 64.0, 40.0], is [0.0, 0.0, 64.0, 40.0]",)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"word": "green"}, "words.1.word: was 'green', is 'red'"),
        ({"span": (2, 4)}, "words.1.span: was [2, 4], is [2, 5]"),
        ({"rows": (5,)}, "words.1.rows: was [5], is [2]"),
        ({"status": "constant"}, "words.1.status: was 'constant', is 'ok'"),
        ({"tokens": np.ones((4, 4), np.float32)}, "map of the word 'red': largest difference"),
        ({"tokens": np.ones((2, 2), np.float32)}, "map of the word 'red': largest difference nan"),
    ],
    ids=["word", "span", "rows", "status", "map", "shape"],
)
def test_another_word_map_is_not_the_same(saved, model, change, told):
    exp, _ = saved
    first, second, *rest = exp.word_maps
    outcome = replace(exp, word_maps=(first, replace(second, **change), *rest)).verify(model)
    assert not outcome.reproduced
    assert not outcome.identical
    assert len(outcome.differences) == 1
    assert outcome.differences[0].startswith(told)


def test_a_word_map_within_the_tolerance_is_reproduced_but_not_identical(saved, model):
    exp, _ = saved
    first, *rest = exp.word_maps
    outcome = replace(exp, word_maps=(replace(first, tokens=first.tokens * np.float32(1 + 2e-6)), *rest)).verify(model)
    assert outcome.reproduced
    assert not outcome.identical
    assert outcome.largest > 0


def test_a_missing_word_map_is_not_the_same(saved, model):
    exp, _ = saved
    outcome = replace(exp, word_maps=exp.word_maps[1:]).verify(model)
    assert not outcome.reproduced
    assert any(line.startswith("words.6: was None, is {'word': 'dog'") for line in outcome.differences)


@pytest.mark.parametrize(
    ("field", "value", "counts"),
    [
        ("layers", [0], True),
        ("rows", [1], True),
        ("grid", [2, 8], True),
        ("blocks", 12, False),
        ("fitted", dict.fromkeys(("layers", "target", "tokens"), "as told"), None),
        ("phrase", "Red  Circle", None),
    ],
)
def test_another_run_is_told_and_counts_where_it_decides(saved, model, field, value, counts):
    exp, _ = saved
    run = exp.provenance["run"] | {field: value}
    outcome = replace(exp, provenance={**exp.provenance, "run": run}).verify(model)
    assert outcome.identical == outcome.reproduced == (not counts)
    told = [f"run.{field}: was {value!r}, is {exp.provenance['run'][field]!r}"]
    assert list(outcome.differences) == ([] if counts is None else told)


NOT_OF_BLIP = (
    *("legrad", "pgc-finercam", "pgc-swin", "pgc-clip-softmax"),
    *("chefer-clip-text", "grad-eclip-text", "grad-eclip-text-as-coded", "legrad-pooler", "legrad-pooler-as-coded"),
    *("blip2-itm", "blip2-itc"),
    *("clip-es", "coca-caption", "blip-caption", "blip-vqa", "maskclip", "clip-surgery"),
)
"""No single block is read, no classes are told apart, and similarities come without logits."""


@pytest.mark.parametrize("recipe", [name for name in vlcam.recipes() if name not in NOT_OF_BLIP])
def test_every_named_recipe_verifies(model, photo, tmp_path, recipe):
    path = model.explain(photo, TEXT, recipe).save(tmp_path / "recipe.png")
    outcome = vlcam.open(path).verify(model)
    assert outcome.identical
    assert outcome.differences == ()


def test_of_the_recipes_of_one_pass_all_fit_but_those(model):
    entries = vlcam.recipes().items()
    cheap = [name for name, e in entries if not e.recipe.asks and e.recipe.gradient_path != "integrated"]
    assert fitting(model.adapter) == [name for name in cheap if name not in NOT_OF_BLIP]
    with pytest.raises(vlcam.RecipeError, match="scale='finer' with target='itm'"):
        model.explain(models.pixels(), TEXT, "pgc-finercam")
    with pytest.raises(vlcam.RecipeError, match="BlipItmHF does not say how target 'contrastive' is read"):
        model.explain(models.pixels(), TEXT, "legrad")


def test_the_second_of_two_equal_phrases_verifies(model, photo, tmp_path):
    path = model.explain(photo, TEXT, phrase="a", occurrence=2).save(tmp_path / "second.png")
    assert vlcam.open(path).verify(model).identical


def test_preprocessed_pixels_travel_and_verify(model, tmp_path):
    path = model.explain(models.pixels(), TEXT).save(tmp_path / "tensor.png")
    outcome = vlcam.open(path).verify(model)
    assert outcome.identical
    assert outcome.differences == ()


def test_preprocessed_pixels_that_did_not_travel_are_asked_for_and_checked(model, tmp_path):
    pixels = models.pixels()
    exp = model.explain(pixels, TEXT)
    path = exp.save(tmp_path / "bare.png", embed_image=False)
    for outcome in (vlcam.open(path).verify(model, image=pixels), vlcam.open(path, image=pixels).verify(model)):
        assert outcome.identical
        assert outcome.differences == ()
    with pytest.raises(vlcam.InputError, match="does not carry its preprocessed tensor"):
        vlcam.open(path).verify(model)
    with pytest.raises(vlcam.InputError, match=r"another tensor: its shape is .* its SHA-256"):
        vlcam.open(path).verify(model, image=pixels + 1)
    with pytest.raises(vlcam.InputError, match="another tensor: its shape is"):
        vlcam.open(path, image=pixels[None])
    shown = vlcam.open(path, image=exp.picture())  # enough to draw, not to compute
    assert shown.overlay().size == (32, 32)
    with pytest.raises(vlcam.InputError, match="made of a preprocessed tensor; give image="):
        shown.verify(model, image=exp.picture())


def test_a_tensor_in_place_of_an_image_is_told(model, photo, tmp_path):
    path = model.explain(photo, TEXT).save(tmp_path / "bare.png", embed_image=False)
    with pytest.raises(vlcam.InputError, match="made of an image, not of a preprocessed tensor"):
        vlcam.open(path).verify(model, image=models.pixels())


def turned(image):
    image.getexif()[0x0112] = 6
    return image


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "turned"])
@pytest.mark.parametrize("embed", [True, False])
def test_an_image_without_a_file_verifies_without_a_difference(model, photo, tmp_path, mode, embed):
    with Image.open(photo) as opened:
        image = turned(opened.convert("RGB")) if mode == "turned" else opened.convert(mode)
    exp = model.explain(image, TEXT)
    assert exp.picture().size == ((40, 64) if mode == "turned" else (64, 40))
    assert exp.verify(model).differences == ()
    path = exp.save(tmp_path / "pil.png", embed_image=embed)
    outcome = vlcam.open(path, image=None if embed else image).verify(model)
    assert outcome.identical
    assert outcome.differences == ()
    again = vlcam.open(path, image=None if embed else image).save(tmp_path / "again.png")
    assert vlcam.open(again).verify(model).identical


def test_saving_twice_gives_the_same_bytes(saved, tmp_path):
    exp, path = saved
    for number in range(8):
        assert exp.save(tmp_path / f"{number}.png").read_bytes() == path.read_bytes()


def test_a_word_that_a_search_does_not_find_has_a_view_all_the_same(saved, model):
    exp, _ = saved
    text = "\u0301red circle"
    odd = replace(exp.word_maps[1], word="\u0301red", span=(1, 4))
    provenance = json.loads(json.dumps(exp.provenance))
    provenance["text"]["given"] = f"red {text} red {text}"
    view = replace(exp, provenance=provenance, word_maps=(odd,)).words["\u0301red"]
    assert view.provenance["run"]["occurrence"] is None
    with pytest.raises(vlcam.InputError, match="at characters 1-4 cannot be verified: a search"):
        view.verify(model)


def test_weights_written_through_data_are_hashed_again(blip, model, photo):
    def weights():
        return model.explain(photo, TEXT).provenance["model"]["weights_sha256"]

    before = weights()
    assert weights() == before
    weight = blip.text_encoder.encoder.layer[1].crossattention.self.key.weight
    weight.data.mul_(3)
    after = weights()
    assert after != before
    weight.data.div_(3)
    assert weights() != after


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
    exp = model.explain(photo, TEXT, layer=-1, queries="cls", exclude=("cls", "padding")).words["red"]
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
