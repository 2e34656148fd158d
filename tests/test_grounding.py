"""Every phrase of a caption at once: the rule of the phrases, the rule of the boxes, one pass, files and pictures."""

from __future__ import annotations

import dataclasses
import doctest
import io
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import models
import numpy as np
import pytest
import torch
from models import photo, two_towers
from PIL import Image

import vlcam
from benchmarks import grounding as benchmark
from vlcam import cli, phrases, scenes
from vlcam.boxes import Component, iou, largest_component
from vlcam.errors import EvidenceError, FileError, InputError, RecipeError, UnknownNameError
from vlcam.explainer import Explainer
from vlcam.geometry import Placement
from vlcam.grounding import GroundedPhrase, grounded
from vlcam.phrases import Place, find_phrases, places
from vlcam.text import phrase_spans

TEXT = "A red circle and the  BLUE dog on the grass, a red circle"
FOUND = ["red circle", "BLUE dog", "grass", "red circle"]
PAGE = Path(__file__).parent.parent / "docs" / "grounding.md"


@pytest.fixture
def image():
    return photo()


@pytest.fixture
def counted(monkeypatch):
    """Counts rows that go through a module, call by call, and ways back."""
    handles, back = [], []
    own = torch.autograd.grad

    def grad(*args, **kwargs):
        back.append(1)
        return own(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", grad)

    def watch(module):
        rows = []

        def keep(_, args, kwargs):
            names = ("pixel_values", "input_ids", "inputs_embeds")
            rows.append(len([*args, *(kwargs[name] for name in names if name in kwargs)][0]))

        handles.append(module.register_forward_pre_hook(keep, with_kwargs=True))
        return rows

    yield watch, back
    for handle in handles:
        handle.remove()


def clip(**options):
    return Explainer(two_towers("clip", **options), "random-clip")


def blobs(*areas, shape=(12, 20)):
    """A map with 1 in rectangles (x0, y0, x1, y1), or what stands behind them."""
    made = np.zeros(shape, np.float32)
    for x0, y0, x1, y1, *value in areas:
        made[y0:y1, x0:x1] = value[0] if value else 1
    return made


def box(heatmap, threshold=0.5):
    found = largest_component(heatmap, threshold)
    return None if found is None else found.box


# Phrases

SENTENCES = {
    "a picture of an orange circle, a red star next to a purple square": [
        "orange circle",
        "red star",
        "purple square",
    ],
    "there is a yellow triangle": ["yellow triangle"],
    "Two dogs are running on the GRASS": ["Two dogs", "running", "GRASS"],
    "A man in a blue-and-white T-shirt  holds his dog's leash.": [
        "man",
        "blue-and-white T-shirt  holds",
        "dog's leash",
    ],
    "the cup to the left of the book": ["cup", "book"],
    "a cat in front of the TV on top of an old box": ["cat", "TV", "old box"],
    "It's not a bird; there\u2019s a plane": ["bird", "plane"],
    "a big\tred\nball": ["big\tred\nball"],
    "a very old, very red car/bus": ["very old", "very red car", "bus"],
    "An image of a photograph of the picture of nothing": ["nothing"],
    "a woman who can't swim and her three children": ["woman", "swim", "three children"],
    "dog": ["dog"],
    "the girl's left hand; the left side of the street": ["girl's left hand", "street"],
    "caf\u00e9 \u00e0 la mode, na\u00efve cafe\u0301": ["caf\u00e9 \u00e0 la mode", "na\u00efve cafe\u0301"],
    "pictures of a front door close by": ["pictures", "front door close"],
    "a red circle and": ["red circle"],
    "of the and": [],
    " \n": [],
}


@pytest.mark.parametrize("text", SENTENCES, ids=lambda text: text[:24])
def test_phrases_are_the_words_between_those_that_split(text):
    assert [text[start:end] for start, end in find_phrases(text)] == SENTENCES[text]


def test_every_list_splits_in_any_case():
    for words in phrases.SPLITTING.values():
        for word in words:
            text = f"red dog {word.upper()} blue cat"
            assert [text[a:b] for a, b in find_phrases(text)] == ["red dog", "blue cat"], word
    for together in phrases.SPLITTING_TOGETHER:
        text = f"red dog {' '.join(together)} blue cat"
        assert [text[a:b] for a, b in find_phrases(text)] == ["red dog", "blue cat"], together


def test_every_phrase_that_is_found_is_found_again_at_its_place():
    words = ["a", "red", "red-red", "dog", "dog-dog", "of", "next", "to", "left", "don't", "\u00e9t\u00e9"]
    rng = random.Random(0)
    for _ in range(300):
        text = "".join(rng.choice(words) + rng.choice([" ", "  ", ", ", "\n"]) for _ in range(9))
        for place in places(text, None):
            assert place.phrase == text[place.span[0] : place.span[1]]
            spans = phrase_spans(text, place.phrase)
            assert spans[(place.occurrence or 1) - 1] == place.span
            assert (place.occurrence is None) == (len(spans) == 1)


def test_given_phrases_stand_wherever_they_are_in_the_order_given():
    found = places(TEXT, ["blue  DOG", "Red circle", ("red circle", 2)])
    assert found == (
        Place("BLUE dog", (22, 30), None),
        Place("red circle", (2, 12), 1),
        Place("red circle", (47, 57), 2),
    )
    assert places(TEXT, [("red circle", 2)]) == (Place("red circle", (47, 57), 2),)
    assert places(TEXT, "dog") == (Place("dog", (27, 30), None),)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "name at least one"),
        (["cat"], "phrase 'cat' is not in the text"),
        ([""], "phrase is empty"),
        ([3], "give text, and a whole number"),
        ([("red circle", 3)], "occurrence=3: phrase 'red circle' stands 2 times"),
        ([("red circle", 1, 2)], "is no pair"),
        ([("red circle", "2")], "give text, and a whole number"),
    ],
)
def test_phrases_that_are_not_there_are_refused(given, words):
    with pytest.raises(InputError, match=words):
        places(TEXT, given)


def test_a_text_without_phrases_says_so():
    with pytest.raises(InputError, match="no phrase was found in the text 'there is the'"):
        places("there is the", None)


def test_the_examples_of_the_rule_run():
    assert doctest.testmod(phrases) == (0, 2)


# Boxes


def test_of_two_parts_the_larger_one_is_boxed_though_the_other_is_higher():
    heatmap = blobs((1, 2, 4, 5, 0.6), (10, 6, 12, 7))
    assert largest_component(heatmap) == Component((1, 2, 4, 5), 0.5, 9, 2)
    assert box(heatmap, 0.7) == (10, 6, 12, 7)
    assert box(heatmap.T) == (2, 1, 5, 4)
    assert box(blobs((10, 1, 12, 2), (1, 6, 4, 9, 0.6), (8, 8, 9, 9))) == (1, 6, 4, 9)  # nor is it the first


def test_equal_parts_are_told_apart_by_their_highest_value_then_by_their_place():
    low, high, again = (9, 1, 11, 3, 0.8), (1, 5, 3, 7), (14, 0, 16, 2)
    assert box(blobs(low, high)) == high[:4]
    assert box(blobs((1, 1, 3, 3, 0.8), (9, 5, 11, 7))) == (9, 5, 11, 7)
    assert box(blobs(high, again)) == again  # it begins in a higher row
    assert box(blobs((14, 0, 16, 2), (2, 0, 4, 2))) == (2, 0, 4, 2)
    # It begins to the right of the other in the same row, and reaches further to the left below.
    bent = blobs((5, 0, 6, 1), (3, 1, 6, 2), (8, 0, 12, 1))
    assert box(bent) == (3, 0, 6, 2)


def test_pixels_that_touch_at_a_corner_belong_together():
    heatmap = blobs((2, 2, 3, 3), (3, 3, 4, 4), (4, 2, 5, 3), (10, 2, 12, 3))
    assert largest_component(heatmap) == Component((2, 2, 5, 4), 0.5, 3, 2)
    apart = blobs((2, 2, 3, 3), (4, 3, 5, 4))
    assert largest_component(apart) == Component((2, 2, 3, 3), 0.5, 1, 2)


def test_a_threshold_of_one_keeps_the_highest_pixels_and_the_level_itself_counts():
    heatmap = blobs((0, 0, 20, 12, 0.25), (3, 3, 9, 9, 0.5), (5, 4, 7, 5))
    assert box(heatmap, 1.0) == (5, 4, 7, 5)
    assert box(heatmap, 0.5) == (3, 3, 9, 9)
    assert box(heatmap, 0.51) == (5, 4, 7, 5)
    assert box(heatmap, 0.25) == (0, 0, 20, 12)
    odd = (np.random.default_rng(0).random((9, 9)) * 0.7).astype(np.float32)
    y, x = divmod(int(odd.argmax()), 9)
    assert box(odd, 1) == (x, y, x + 1, y + 1)


def test_only_positive_values_count_whatever_the_negative_ones():
    heatmap = blobs((0, 0, 8, 8, -5), (10, 2, 12, 4, 0.5))
    assert largest_component(heatmap) == Component((10, 2, 12, 4), 0.25, 4, 1)
    assert box(-np.abs(heatmap)) is None


@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, np.nan])
def test_a_constant_map_has_no_box(value):
    heatmap = np.full((5, 6), value, np.float32)
    assert largest_component(heatmap) is None
    heatmap[:, :2] = np.nan
    assert largest_component(heatmap) is None


def test_what_the_model_did_not_see_is_in_no_box_and_joins_nothing():
    heatmap = blobs((2, 2, 5, 4), (6, 2, 8, 4))
    heatmap[:, 5] = np.nan
    assert largest_component(heatmap) == Component((2, 2, 5, 4), 0.5, 6, 2)
    heatmap[:, 3:] = np.nan
    assert box(heatmap) == (2, 2, 3, 4)


@pytest.mark.parametrize("threshold", [0, -0.5, 1.01, float("nan"), True, "0.5", None])
def test_a_threshold_is_a_share(threshold, model, image):
    with pytest.raises(InputError, match="above 0 and up to 1"):
        largest_component(blobs((1, 1, 3, 3)), threshold)
    with pytest.raises(InputError, match="above 0 and up to 1"):
        model.ground(image, TEXT, threshold=threshold)


def test_an_array_that_is_no_heatmap_is_refused():
    for wrong in (np.zeros(4, np.float32), np.zeros((2, 3, 4), np.float32), np.full((2, 2), np.inf, np.float32)):
        with pytest.raises(InputError, match="two axes"):
            largest_component(wrong)


def test_intersection_over_union():
    assert iou((0, 0, 4, 4), (0, 0, 4, 4)) == 1
    assert iou((0, 0, 4, 4), (2, 2, 6, 6)) == pytest.approx(4 / 28)
    assert iou((0, 0, 4, 4), (1, 1, 3, 3)) == iou((1, 1, 3, 3), (0, 0, 4, 4)) == pytest.approx(4 / 16)
    assert iou((0, 0, 4, 4), (4, 0, 8, 4)) == 0
    assert iou((0, 0, 4, 4), (9, 9, 10, 10)) == 0
    for wrong in ((0, 0, 0, 4), (4, 0, 0, 4), (0, 0, 4)):
        with pytest.raises(InputError, match="give x0, y0, x1, y1"):
            iou((0, 0, 1, 1), wrong)


# From cells to pixels of the original


def hot(explanation, row, column, upsample="nearest"):
    """The explanation with one cell of 1 in its map."""
    tokens = np.zeros_like(explanation.tokens)
    tokens[row, column] = 1
    recipe = explanation.recipe.replace(upsample=upsample, normalize="max")
    return dataclasses.replace(explanation, tokens=tokens, recipe=recipe, status="ok")


def test_a_cell_of_a_squashed_image_is_its_share_of_the_original(model):
    exp = model.explain(photo(height=40, width=64), TEXT, phrase="blue dog")
    assert exp.tokens.shape == (4, 4)
    found = grounded(hot(exp, 1, 3), Place("dog", (0, 3), None), 0.5)
    assert found.box == (48, 10, 64, 20)
    assert found.peak == (48, 10)
    assert (found.component.area, found.score, found.status) == (160, 1.0, "ok")


@pytest.mark.parametrize(("height", "width", "expected"), [(40, 80, (50, 10, 60, 20)), (96, 48, (36, 36, 48, 48))])
def test_a_cell_of_a_crop_lies_in_the_part_that_was_seen(height, width, expected):
    exp = clip().explain(photo(height=height, width=width), "a red dog")
    assert exp.tokens.shape == (4, 4)
    side = min(height, width)
    left, top = (width - side) / 2, (height - side) / 2
    assert exp.placement == Placement((height, width), (32, 32), (left, top, left + side, top + side))
    assert grounded(hot(exp, 1, 3), Place("dog", (0, 3), None), 0.5).box == expected


def test_between_cells_the_box_ends_where_the_interpolated_map_falls_below_the_threshold(model):
    exp = model.explain(photo(height=64, width=64), TEXT, phrase="dog")
    # Along an axis the map is 1 - d / 16, d from the cell's centre at 24; pixels lie at d = 0.5, 1.5, ...
    found = hot(exp, 1, 1, "bilinear")
    assert grounded(found, Place("dog", (0, 3), None), 0.5).box == (16, 16, 32, 32)  # d up to 8.25
    assert grounded(found, Place("dog", (0, 3), None), 0.25).box == (12, 12, 36, 36)  # d up to 12.125


def test_a_signed_map_without_a_positive_value_has_no_box_and_says_why(model, image):
    exp = model.explain(image, TEXT, phrase="dog")
    down = dataclasses.replace(hot(exp, 1, 1), tokens=-hot(exp, 1, 1).tokens)
    found = grounded(down, Place("dog", (0, 3), None), 0.5)
    assert (found.box, found.peak, found.component, found.score) == (None, None, None, 0.0)
    assert (found.status, found.explanation.status) == ("no positive evidence", "ok")


# One pass


def test_all_phrases_of_cross_attention_come_from_one_pass(model, image, counted):
    watch, back = counted
    module = model.adapter.module
    vision, text = watch(module.vision_model), watch(module.text_encoder)
    found = model.ground(image, TEXT)
    assert [each.phrase for each in found] == FOUND
    assert (vision, text, len(back)) == ([1], [1], 1)


def test_a_contrastive_model_runs_the_image_once_for_all_phrases(image, counted):
    explainer = clip()
    watch, _ = counted
    module = explainer.adapter.module
    vision, text = watch(module.vision_model), watch(module.text_model)
    found = explainer.ground(image, "a red dog on a dog")
    assert [(each.phrase, each.occurrence) for each in found] == [("red dog", None), ("dog", 2)]
    assert (vision, text) == ([1], [2])


@pytest.mark.parametrize("recipe", [None, "attention-cross", "albef-itm"])
def test_each_phrase_is_what_explain_gives_for_it_alone(model, image, recipe):
    found = model.ground(image, TEXT, recipe=recipe, layer=1)
    assert len({each.explanation.tokens.tobytes() for each in found}) == 4
    for each in found:
        alone = model.explain(image, TEXT, recipe, layer=1, phrase=each.phrase, occurrence=each.occurrence)
        np.testing.assert_array_equal(each.explanation.tokens, alone.tokens)
        assert each.explanation.record() == alone.record()
        assert each.peak == alone.peak()
        assert each.box == largest_component(alone.heatmap).box
        assert each.score == alone.tokens.max()
        assert each.explanation.verify(model).identical


@pytest.mark.parametrize("prompt", [None, "in_place"])
@pytest.mark.parametrize("scale", ["logit", "margin"])
def test_each_prompt_is_what_explain_gives_for_it_alone(image, prompt, scale):
    explainer, text = clip(), "a red dog on a  Dog"
    how = {"scale": scale, **({} if prompt is None else {"prompt": prompt})}
    how |= {"against": ["un dog", "red"]} if scale == "margin" else {}
    found = explainer.ground(image, text, **how)
    assert [(each.phrase, each.span, each.occurrence) for each in found] == [
        ("red dog", (2, 9), None),
        ("Dog", (16, 19), 2),
    ]
    for each, other in zip(found, (found[1], found[0]), strict=True):
        beside = {} if prompt or "against" in how else {"against": [other.phrase]}  # the other texts of the call
        alone = explainer.explain(image, text, phrase=each.phrase, occurrence=each.occurrence, **how, **beside)
        np.testing.assert_allclose(each.explanation.tokens, alone.tokens, atol=1e-6 * np.abs(alone.tokens).max())
        assert each.explanation.provenance["text"] == alone.provenance["text"]
        run, wanted = (dict(exp.provenance["run"]) for exp in (each.explanation, alone))
        assert run.pop("target_value") == pytest.approx(wanted.pop("target_value"), abs=1e-5)
        assert run.pop("batch") == wanted.pop("batch") if prompt else run.pop("batch") != wanted.pop("batch")
        assert run == wanted
        assert list(each.explanation.scores) == list(alone.scores)
        assert each.explanation.verify(explainer).reproduced


def test_phrases_are_compared_with_each_other_where_the_scale_compares(image):
    found = clip().ground(image, "a red dog on the grass", scale="probability")
    against = [each.explanation.provenance["run"]["against"] for each in found]
    assert against == [["grass"], ["red dog"]]
    assert sum(each.record()["target_value"] for each in found) == pytest.approx(1, abs=1e-6)


def test_a_phrase_of_pieces_is_the_mean_of_their_rows(model, image):
    (found,) = model.ground(image, "a  Red Unaffable dog", ["red unaffable"], layer=0)
    assert (found.phrase, found.span) == ("Red Unaffable", (3, 16))
    assert found.explanation.provenance["run"]["rows"] == [2, 3, 4, 5]
    words = found.explanation.words
    mean = (words["Red"].tokens + 3 * words["Unaffable"].tokens) / 4
    np.testing.assert_allclose(found.explanation.tokens, mean, atol=1e-6 * mean.max())


def test_a_tensor_that_is_preprocessed_is_grounded_in_its_own_pixels(model):
    found = model.ground(models.pixels(), TEXT, ["dog"])
    assert found[0].explanation.placement.original == (32, 32)
    assert max(found[0].box) <= 32


def test_found_phrases_that_were_cut_off_are_left_out_and_named(model, image):
    text = "a red circle and a blue dog on the grass and a red unaffable ball is on the grass"
    found = model.ground(image, text, layer=0)
    assert [each.phrase for each in found] == ["red circle", "blue dog", "grass"]
    assert found.cut == ("red unaffable ball", "grass")
    assert found.record()["phrases"]["cut"] == ["red unaffable ball", "grass"]
    assert [each.phrase for each in model.ground(image, text, ["grass", "dog"][1:], layer=0)] == ["dog"]
    with pytest.raises(InputError, match="lies behind the model's limit"):
        model.ground(image, text, ["unaffable ball"])
    with pytest.raises(InputError, match="the text is longer than the model's"):
        model.ground(image, text, strict=True)
    with pytest.raises(InputError, match="all phrases lie behind the model's limit: 'dog'"):
        model.ground(image, "and the " * 9 + "dog")


# What is refused


def test_a_model_without_text_a_list_and_a_batch_are_refused(model, image):
    classifier = Explainer(vlcam.load("tiny-vit").adapter, "x")
    with pytest.raises(InputError, match="takes no text, so that there are no phrases"):
        classifier.ground(image, TEXT)
    for images in ([image], (image,), torch.zeros(1, 3, 32, 32), {"pixel_values": torch.zeros(1, 3, 32, 32)}):
        with pytest.raises(InputError, match="ground takes one image"):
            model.ground(images, TEXT)
    for text in (None, [TEXT], " "):
        with pytest.raises(InputError, match="ground takes one caption"):
            model.ground(image, text)


def test_choices_are_refused_as_explain_refuses_them(model, image):
    with pytest.raises(RecipeError, match="give one of them"):
        model.ground(image, TEXT, layer=0, layers=(1,))
    with pytest.raises(UnknownNameError, match="no recipe 'gradcam'"):
        model.ground(image, TEXT, recipe="gradcam")
    with pytest.raises(RecipeError, match="can be read for one phrase"):
        model.ground(image, TEXT, recipe="pgc-gradcam")
    with pytest.raises(RecipeError, match="choose from 'raise', 'keep'"):
        model.ground(image, TEXT, empty="drop")
    with pytest.raises(RecipeError, match="has no place on the image"):
        clip().ground(image, "a red dog", recipe="chefer-clip-text")
    with pytest.raises(RecipeError, match="of one text"):
        clip().ground(image, "a red dog", scale="probability")


def test_a_zero_gradient_is_an_error_or_a_phrase_without_a_box(model, image):
    with pytest.raises(EvidenceError, match="is exactly zero on rows"):
        model.ground(image, TEXT, layer=-1)
    found = model.ground(image, TEXT, layer=-1, empty="keep")
    assert [(each.status, each.box, each.peak, each.score) for each in found] == [
        ("zero gradient", None, None, 0.0)
    ] * 4
    coco = found.to_coco(image_id=5)
    assert coco["annotations"] == []
    assert coco["info"]["without_box"][1] == {"phrase": "BLUE dog", "span": [22, 30], "status": "zero gradient"}
    assert [part["box"] for part in found.record()["grounded"]] == [None] * 4
    assert found.drawn().height > 8 * 40 + 4 * 20


def test_the_model_is_left_as_it_was_found(model, image):
    before = models.state(model.adapter.module)
    model.ground(image, TEXT)
    with pytest.raises(EvidenceError):
        model.ground(image, TEXT, layer=-1)
    models.assert_same(before, models.state(model.adapter.module))


# What comes out


@pytest.fixture(scope="module")
def scene():
    return next(scenes.generate(1, seed=7, start=1, objects=(2, 3)))


@pytest.fixture(scope="module")
def grounding(scene):
    return vlcam.load("tiny-blip-itm").ground(scene.image, scene.caption + " and a red star", layer=0)


def test_phrases_are_found_by_number_by_words_and_by_which(grounding):
    assert len(grounding) == 4
    assert [each.phrase for each in grounding] == ["orange circle", "red star", "purple square", "red star"]
    assert all(isinstance(each, GroundedPhrase) for each in grounding)
    assert grounding["Purple  SQUARE"] is grounding[2] is grounding[-2]
    assert grounding["red star", 2] is grounding[3]
    assert grounding["red star", 1] is grounding[1]
    assert grounding["purple square", 1] is grounding[2]
    assert "ORANGE circle" in grounding
    assert grounding[0] in grounding
    assert "circle" not in grounding
    with pytest.raises(InputError, match=r"stands 2 times here; say which: .*\('red star', 2\)"):
        grounding["red star"]
    for missing in ("blue star", ("red star", 3)):
        with pytest.raises(UnknownNameError, match="there are 'orange circle', "):
            grounding[missing]
    with pytest.raises(IndexError):
        grounding[4]
    assert "4 phrases, 4 boxes" in repr(grounding)


def test_the_record_has_the_rule_with_its_numbers_and_everything_else(grounding):
    record = grounding.record()
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert record["box_rule"]["name"] == "largest component"
    assert (record["box_rule"]["threshold"], record["box_rule"]["connectivity"]) == (0.5, 8)
    assert record["phrases"] == {"found_by": phrases.RULE, "cut": []}
    for part, each in zip(record["grounded"], grounding, strict=True):
        exp = each.explanation
        assert part["explanation"] == exp.record()
        assert grounding.text[part["span"][0] : part["span"][1]] == part["phrase"] == each.phrase
        assert part["box"] == list(each.box)
        assert part["peak"] == list(exp.peak())
        assert part["score"] == float(exp.tokens.max())
        assert part["target_value"] == pytest.approx(part["explanation"]["scores"]["itm_logit"]["value"])
        component = largest_component(exp.heatmap)
        assert part["component"] == {
            "level": pytest.approx(0.5 * exp.heatmap.max()),
            "area": component.area,
            "components": component.components,
        }


def test_coco_has_corner_and_size_and_only_what_has_a_box(grounding):
    coco = grounding.to_coco(image_id=17)
    assert coco["images"] == [{"id": 17, "file_name": "PIL image", "width": 128, "height": 128}]
    assert coco["categories"] == [{"id": 1, "name": "phrase"}]
    for number, (part, each) in enumerate(zip(coco["annotations"], grounding, strict=True), start=1):
        x, y, width, height = part["bbox"]
        assert (x, y, x + width, y + height) == each.box
        assert part == {
            "id": number,
            "image_id": 17,
            "category_id": 1,
            "bbox": [x, y, width, height],
            "area": width * height,
            "iscrowd": 0,
            "score": each.score,
            "caption": grounding.text,
            "phrase": each.phrase,
            "span": list(each.span),
            "peak": list(each.peak),
        }
    assert json.loads(json.dumps(coco, allow_nan=False)) == coco


def test_coco_takes_categories_for_phrases(grounding):
    coco = grounding.to_coco(
        image_id=1, category_ids={"Red  Star": 7, "orange circle": 3, "purple square": 5, "star": 7}
    )
    assert [part["category_id"] for part in coco["annotations"]] == [3, 7, 5, 7]
    assert coco["categories"] == [
        {"id": 3, "name": "orange circle"},
        {"id": 5, "name": "purple square"},
        {"id": 7, "name": "Red  Star"},
    ]
    with pytest.raises(UnknownNameError, match="category_ids has no phrase 'red star'; it has 'orange circle'"):
        grounding.to_coco(image_id=1, category_ids={"orange circle": 3})


def test_it_is_saved_as_json_and_nothing_is_replaced_unasked(grounding, tmp_path):
    path = grounding.save(tmp_path / "found.json")
    assert json.loads(path.read_text(encoding="utf-8")) == grounding.record()
    with pytest.raises(FileError, match="exists already"):
        grounding.save(path)
    path.write_text("")
    grounding.save(path, overwrite=True)
    assert json.loads(path.read_text(encoding="utf-8")) == grounding.record()
    with pytest.raises(FileError, match=r"ends in \.json"):
        grounding.save(tmp_path / "found.png")
    with pytest.raises(FileError, match="does not exist"):
        grounding.save(tmp_path / "nowhere" / "found.json")


def painted(picture, colour):
    """Where a colour stands, (x0, y0, x1, y1), half-open."""
    rows, columns = np.nonzero((np.asarray(picture) == colour).all(-1))
    return (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)


def test_boxes_are_drawn_where_they_are_each_in_a_colour_of_its_own(model):
    blank = Image.new("RGB", (60, 40), (128, 128, 128))
    made = [
        grounded(hot(model.explain(blank, TEXT, phrase=p), row, column), Place(p, (0, 3), None), 0.5)
        for p, row, column in (("blue dog", 0, 1), ("grass", 2, 3))
    ]
    bare = tuple(dataclasses.replace(each, peak=None) for each in made)
    found = dataclasses.replace(model.ground(blank, TEXT, ["blue dog", "grass"]), phrases=bare)
    shown = found.drawn(side=240)
    image = shown.crop((0, 0, 240, 160))
    assert shown.height > 160
    assert [each.box for each in made] == [(15, 0, 30, 10), (45, 20, 60, 30)]
    for each, colour in zip(made, ((230, 159, 0), (86, 180, 233)), strict=True):
        assert painted(image, colour) == tuple(4 * edge for edge in each.box)
        legend = shown.crop((0, 160, shown.width, shown.height))
        assert painted(legend, colour)[2] < 30
    assert np.asarray(image)[100, 20].tolist() == [128, 128, 128]
    small = found.drawn(side=1)
    assert small.crop((0, 0, 60, 40)).size == (60, 40)
    assert painted(small.crop((0, 0, 60, 40)), (230, 159, 0))[2:] == (30, 10)
    pointed = np.asarray(dataclasses.replace(found, phrases=tuple(made)).drawn(side=240))
    assert [each.peak for each in made] == [(15, 0), (45, 20)]
    assert pointed[82 + 4, 182].tolist() == [86, 180, 233]  # in the middle of the pixel, beside the tag
    assert np.asarray(image)[82, 182 - 4].tolist() == [128, 128, 128]
    assert pointed[82, 182 - 4].tolist() == [86, 180, 233]
    with pytest.raises(InputError, match="side=0"):
        found.drawn(side=0)


def test_many_phrases_and_overlapping_boxes_still_make_a_picture(model, image):
    found = model.ground(image, TEXT, ["a", "red", "circle", "and", "blue", "dog", "on", "the", "grass"], layer=0)
    assert len(found) == 13
    shown = found.drawn()
    assert shown.height - 8 * 40 > 13 * 20
    assert Image.open(io.BytesIO(found._repr_png_())).size == shown.size


def test_the_figure_has_every_box_every_peak_and_a_legend_with_scores(grounding):
    pytest.importorskip("matplotlib")
    figure = grounding.figure()
    first, *others = [ax for ax in figure.axes if ax.images]
    assert len(others) == len(grounding)
    assert [ax.get_title() for ax in others] == [f"{n}  {each.phrase}" for n, each in enumerate(grounding, start=1)]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        f"{n}  {each.phrase}   score {each.score:.3g}" for n, each in enumerate(grounding, start=1)
    ]
    boxes = [line for line in first.lines if line.get_label().isdigit()]
    assert len({line.get_color() for line in boxes}) == len(grounding)
    for line, each, ax in zip(boxes, grounding, others, strict=True):
        xs, ys = line.get_data()
        assert (min(xs), min(ys), max(xs), max(ys)) == each.box
        assert any(np.array_equal(own.get_data()[0], xs) for own in ax.lines)
    peaks = [line.get_data() for line in first.lines if len(line.get_data()[0]) == 1]
    assert [(x[0] - 0.5, y[0] - 0.5) for x, y in peaks] == [each.peak for each in grounding]
    assert first.images[0].get_extent() == [0, 128, 128, 0]
    figure.savefig(io.BytesIO())


def test_the_figure_says_why_there_is_no_box(model, image):
    pytest.importorskip("matplotlib")
    found = model.ground(image, TEXT, ["dog", "grass"], layer=-1, empty="keep")
    figure = found.figure()
    assert figure.axes[1].get_title() == "1  dog\n(zero gradient)"
    assert figure.legends[0].get_texts()[1].get_text() == "2  grass   no box: zero gradient"
    figure.savefig(io.BytesIO())


def test_phrases_of_the_embedded_models_are_boxed_at_their_objects(scene):
    for name, how in (("tiny-blip-itm", {"layer": 0}), ("tiny-clip", {})):
        found = vlcam.load(name).ground(scene.image, scene.caption, **how)
        assert [each.phrase for each in found] == list(scene.phrases())
        for each, item in zip(found, scene.objects, strict=True):
            assert iou(each.box, item.box) > 0.2
            assert all(iou(each.box, other.box) < 0.1 for other in scene.objects if other is not item)


def test_the_benchmark_counts_peaks_on_objects_and_the_overlap_of_boxes(scene):
    model = vlcam.load("tiny-blip-itm")
    found = benchmark.measured(model, [scene], "lavis-itm", 0)
    made = model.ground(scene.image, scene.caption, layer=0)
    pairs = list(zip(made, scene.objects, strict=True))
    assert found.hits == [bool(item.mask[each.peak[1], each.peak[0]]) for each, item in pairs]
    assert found.overlaps[0.5] == [iou(each.box, item.box) for each, item in pairs]
    assert found.overlaps[0.3] != found.overlaps[0.5]
    assert benchmark.measured(model, [scene], "lavis-itm", 2) is None
    assert benchmark.default_block(model, scene) == 1


# Command line


@pytest.fixture
def run(capsys, tmp_path, scene):
    path = tmp_path / "scene.png"
    scene.image.save(path)

    def call(*more):
        code = 0
        command = ("ground", "--model", "tiny-blip-itm", "--image", path, "--out", tmp_path / "out", *more)
        try:
            cli.main([str(part) for part in command])
        except SystemExit as left:
            code = left.code or 0
        found = capsys.readouterr()
        return code, found.out, found.err

    return call


def test_the_command_writes_picture_coco_and_record(run, scene):
    code, out, err = run("--text", scene.caption, "--layer", 0, "--threshold", 0.4, "--image-id", 9, "--json")
    assert code == 0
    printed = json.loads(out)
    files = printed.pop("files")
    assert Path(files["picture"]).name == "scene-lavis-itm-ground.png"
    again = vlcam.load("tiny-blip-itm").ground(
        str(Path(files["picture"]).parent.parent / "scene.png"), scene.caption, layer=0, threshold=0.4
    )
    assert printed == again.record() == json.loads(Path(files["record"]).read_text(encoding="utf-8"))
    assert json.loads(Path(files["coco"]).read_text(encoding="utf-8")) == again.to_coco(image_id=9)
    assert np.array_equal(np.asarray(Image.open(files["picture"])), np.asarray(again.drawn()))
    assert f"box {again[0].box}" in err
    assert run("--text", scene.caption)[0] == 1
    code, out, err = run("--text", scene.caption, "--overwrite", "--phrase", "star", "--phrase", "circle")
    assert (code, out) == (0, "")
    assert len(json.loads(Path(files["record"]).read_text(encoding="utf-8"))["grounded"]) == 2


@pytest.mark.parametrize(
    ("more", "code", "words"),
    [
        (("--phrase", "pink elephant"), 1, "is not in the text"),
        (("--threshold", "2"), 1, "above 0 and up to 1"),
        (("--recipe", "gradcam"), 2, "no recipe 'gradcam'"),
        (("--layer", "9"), 2, "has blocks 0 to"),
        (("--layer", "2"), 1, "is exactly zero"),
    ],
)
def test_the_command_refuses_in_one_line(run, scene, tmp_path, more, code, words):
    found, out, err = run("--text", scene.caption, *more)
    assert (found, out) == (code, "")
    assert words in err
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


# Documents


def test_the_page_runs_and_prints_what_it_says(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text(encoding="utf-8")
    namespace = {"__name__": "page"}
    for number, code in enumerate(re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)):
        exec(compile(code, f"{PAGE.name}, block {number}", "exec"), namespace)
    printed = " ".join(capsys.readouterr().out.split())
    for output in re.findall(r"^```text\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        assert " ".join(output.split()) in printed, output
    assert (tmp_path / "boxes.png").exists()


def test_the_page_has_every_word_of_the_lists():
    text = PAGE.read_text(encoding="utf-8")
    for kind, words in phrases.SPLITTING.items():
        (row,) = re.findall(rf"^\| {kind} \| (.*) \|$", text, re.MULTILINE)
        assert set(row.split()) == words, kind
    (row,) = re.findall(r"^\| together \| (.*) \|$", text, re.MULTILINE)
    assert {tuple(part.split()) for part in row.split(", ")} == set(phrases.SPLITTING_TOGETHER)


def test_importing_vlcam_does_not_import_scipy():
    code = "import sys, vlcam; print('scipy' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout.strip() == "False"
