"""Every named recipe on every embedded model: explained, saved, opened, computed again bit for bit; or refused."""

from __future__ import annotations

import re

import numpy as np
import pytest

import vlcam
from vlcam.plan import plan
from vlcam.recipe import Recipe

SCENE = next(vlcam.scenes.generate(1, seed=7))
PHRASE = SCENE.objects[0].phrase
OTHERS = ["a blue star", ""]
ASKED = {
    "tiny-beit": {"target": PHRASE},
    "tiny-beit-seg": {"target": PHRASE},
    "tiny-blip-caption": {"text": SCENE.caption},
    "tiny-blip-itm": {"text": SCENE.caption},
    "tiny-blip-vqa": {"text": f"what colour is the {PHRASE.split()[1]}?"},
    "tiny-clip": {"text": SCENE.caption, "against": OTHERS},
    "tiny-swin": {"target": PHRASE},
    "tiny-vit": {"target": PHRASE},
}
"""What each model is asked about."""
UNREAD = 2
"""The decoder of tiny-beit-seg does not read its last two blocks, so that recipes are moved before them."""
NOWHERE = {"blip2-itm", "blip2-itc", "legrad-pooler", "legrad-pooler-as-coded", "coca-caption"}
"""Recipes of poolers, which no embedded model has."""
FOUND = re.compile(r"it has '|it offers '|there are '|this model|this one's|choose from '|choose |use |take ")


@pytest.fixture(params=list(ASKED), scope="module")
def model(request):
    return vlcam.load(request.param)


def fitted(model) -> tuple[dict[str, Recipe], dict[str, Exception]]:
    """The named recipes as they are on a model, and why the others are not."""
    found, refused = {}, {}
    for name in vlcam.recipes():
        try:
            found[name] = plan(model.adapter, name, {}).recipe
        except vlcam.VlcamError as error:
            refused[name] = error
    return found, refused


def moved(recipe: Recipe, blocks: int) -> Recipe:
    """The same in blocks that the decoder reads."""
    given = recipe.layers
    if given in ("last", "all"):
        layers = tuple(range(blocks - UNREAD)) if given == "all" else (blocks - UNREAD - 1,)
    else:
        layers = tuple(max(0, (layer if layer >= 0 else layer + blocks) - UNREAD) for layer in given)
    return recipe.replace(layers=layers)


def verified(explanation, model, path, *, exactly=True):
    """Why a saved explanation does not come out of its file, bit for bit unless told otherwise; empty if it does."""
    opened = vlcam.open(explanation.save(path, overwrite=True))
    if opened.record() != explanation.record() or opened.tokens.tobytes() != explanation.tokens.tobytes():
        return "the file is not what was saved"
    outcome = opened.verify(model)
    as_it_was = outcome.identical if exactly else outcome.reproduced
    return "" if as_it_was and not outcome.differences else str(outcome)


def test_all_embedded_models_are_asked():
    assert list(ASKED) == list(vlcam.models())


def test_every_recipe_that_fits_is_computed_saved_opened_and_verified_bit_for_bit(model, tmp_path):
    found, _ = fitted(model)
    recipes = list(found.values())
    if model.name == "tiny-beit-seg":
        recipes = [moved(each, len(model.anatomy.stream("vision").blocks)) for each in recipes]
    asked = dict(ASKED[model.name])
    swept = model.sweep(SCENE.image, asked.pop("text", None), recipes, empty="keep", **asked)
    assert [each.recipe for each in swept] == recipes
    told = {each.recipe.name: verified(each, model, tmp_path / "saved.png") for each in swept}
    statuses = [each.status for each in swept]
    assert {name: why for name, why in told.items() if why} == {}
    assert "zero gradient" not in statuses
    assert statuses.count("ok") > 0.9 * len(statuses)


@pytest.mark.parametrize("name", ["tiny-vit", "tiny-clip"])
def test_a_recipe_alone_comes_out_bit_for_bit_too(name, tmp_path):
    model, asked = vlcam.load(name), dict(ASKED[name])
    text, told = asked.pop("text", None), {}
    for recipe in ("pgc-gradcam", "torchcam-gradcam++", "raw-attention", "chefer-generic", "grad-eclip", "agcam"):
        told[recipe] = verified(model.explain(SCENE.image, text, recipe, **asked), model, tmp_path / "saved.png")
    assert {recipe: why for recipe, why in told.items() if why} == {}


def test_without_what_the_pass_read_besides_the_last_bits_are_others():
    """Attention that is looked into runs in another kernel, and Grad-CAM++ divides by what nearly cancels."""
    model = vlcam.load("tiny-vit")
    beside, _ = model.sweep(SCENE.image, None, ["torchcam-gradcam++", "attention-rollout"], target=17)
    tapped = beside.provenance["model"]["tapped"]
    assert tapped == {"vision.F1": [5], "vision.F2": list(range(6))}
    alone = model.explain(SCENE.image, None, "torchcam-gradcam++", target=17)
    assert alone.provenance["model"]["tapped"] == {"vision.F1": [5]}
    assert alone.tokens.tobytes() != beside.tokens.tobytes()
    record = beside.provenance
    (again,) = model.sweep(SCENE.image, None, ["torchcam-gradcam++"], target=17, conditions=record)
    assert again.tokens.tobytes() == beside.tokens.tobytes()
    of_others = {"text.F2": [0], "vision.F2": [99], "vision.CROSS": [0], "vision.F2_SCORES": [0]}
    record = {**record, "model": {**record["model"], "tapped": of_others}}
    (other,) = model.sweep(SCENE.image, None, ["torchcam-gradcam++"], target=17, conditions=record)
    assert other.provenance["model"]["tapped"] == {"vision.F1": [5], "vision.F2_SCORES": [0]}


def test_every_recipe_that_does_not_fit_is_refused_with_the_reason(model):
    found, refused = fitted(model)
    assert len(found) > 20
    wrong = {}
    for name, planned in refused.items():
        asked = dict(ASKED[model.name])
        with pytest.raises((vlcam.RecipeError, vlcam.UnknownNameError)) as raised:
            model.explain(SCENE.image, asked.pop("text", None), name, **asked)
        message, fields = str(raised.value), vlcam.recipes()[name].recipe.to_dict()
        names = [f"'{name}'", *(f"{field}=" for field in fields), f"no stream '{fields['stream']}'"]
        if message != str(planned) or not any(each in message for each in names) or not FOUND.search(message):
            wrong[name] = message
    assert wrong == {}


def test_every_recipe_fits_an_embedded_model_but_those_of_poolers():
    fit = {name for each in vlcam.models() for name in fitted(vlcam.load(each))[0]}
    assert set(vlcam.recipes()) - fit == NOWHERE


# What a recipe is asked with


def cases():
    """By model, in words: what explain is asked."""
    two = SCENE.caption, "a blue star and a red circle"
    clip = vlcam.recipes()["clip-gradcam"].recipe
    mask = np.zeros(SCENE.image.size[::-1], bool)
    mask[20:90, 15:70] = True
    region, outlined = (vlcam.targets.Region(box=(12, 20, 90, 101)), vlcam.targets.Region.of(mask))
    return {
        "tiny-blip-itm": {
            "words": {"text": SCENE.caption},
            "a phrase": {"text": SCENE.caption, "phrase": PHRASE},
            "a list of texts": {"text": list(two)},
            "the other score": {"text": SCENE.caption, "target": "contrastive", "recipe": "pgc-gradcam"},
        },
        "tiny-clip": {
            "a list of texts that are compared": {"text": [*two, "a red star"], "scale": "margin"},
            "a phrase alone": {"text": SCENE.caption, "phrase": PHRASE},
            "a phrase alone, compared": {
                "text": SCENE.caption,
                "phrase": PHRASE,
                "against": OTHERS,
                "scale": "probability",
            },
            "a phrase in its place": {"text": SCENE.caption, "phrase": PHRASE, "prompt": "in_place"},
            "a phrase in its place, compared": {
                "text": SCENE.caption,
                "phrase": PHRASE,
                "prompt": "in_place",
                "against": OTHERS,
                "scale": "difference",
            },
            "the second of equal phrases": {"text": "a star and a star", "phrase": "a star", "occurrence": 2},
            "texts of equal tokens": {"text": ["A red  star", "a red star"], "against": ["a blue star"]},
            "compared with itself": {"text": "a red star", "against": ["a red star", "a blue star"], "scale": "finer"},
            "a map over words, compared": {
                "text": SCENE.caption,
                "recipe": "chefer-clip-text",
                "against": OTHERS,
                "scale": "margin",
            },
            "a long text": {"text": "a red star and " * 30 + "a blue circle"},
            "the mean over a path": {"text": SCENE.caption, "recipe": clip.replace(gradient_path="integrated")},
        },
        "tiny-blip-caption": {
            "a caption that the model writes": {},
            "a caption": {"text": "a blue star"},
            "a phrase of a caption": {"text": SCENE.caption, "phrase": PHRASE},
        },
        "tiny-blip-vqa": {
            "an answer that the model writes": {"text": "what colour is the star?"},
            "an answer": {"text": "what colour is the star?", "answer": "red"},
            "a phrase of a question": {"text": "what colour is the star?", "phrase": "star", "answer": "red"},
        },
        "tiny-vit": {
            "a class, by default": {},
            "a class, of one head": {"recipe": "grad-eclip-as-coded"},
            "several classes": {"target": [3, 17, 9]},
            "the mean over a path": {"gradient_path": "integrated", "target": 17},
            "the mean over a path to the class of the image": {"gradient_path": "integrated", "scale": "finer"},
            "few channels": {"recipe": "pgc-scorecam", "layer": 0, "target": 17},
        },
        "tiny-beit-seg": {
            "a class, by default": {"layer": 3},
            "a box": {"target": vlcam.targets.Class(PHRASE, region=region), "layer": 3},
            "a mask": {"target": vlcam.targets.Class(PHRASE, region=outlined), "layer": 3},
        },
        "tiny-swin": {"a block within windows": {"recipe": "raw-attention", "layer": 0, "target": 5}},
    }


@pytest.mark.parametrize("name", list(cases()))
def test_whatever_was_asked_comes_out_of_the_file(name, tmp_path):
    model, told = vlcam.load(name), {}
    for what, asked in cases()[name].items():
        given = dict(asked)
        made = model.explain(SCENE.image, given.pop("text", None), **given)
        several = isinstance(made, list)  # what runs in one batch comes out alone but for its last bits
        for number, each in enumerate(made if several else [made]):
            told[what, number] = verified(each, model, tmp_path / "saved.png", exactly=not several)
            for word, view in each.words.items():
                told[what, number, word] = verified(view, model, tmp_path / "word.png", exactly=not several)
    assert {what: why for what, why in told.items() if why} == {}


@pytest.mark.parametrize("name", ["tiny-blip-itm", "tiny-clip", "tiny-blip-caption", "tiny-blip-vqa"])
@pytest.mark.parametrize("choices", [{}, {"prompt": "in_place", "scale": "cosine"}], ids=["alone", "in place"])
def test_the_phrases_of_a_grounding_come_out_of_their_files(name, choices, tmp_path):
    if choices and name != "tiny-clip":
        pytest.skip("its phrases are rows, or parts of what is written")
    model = vlcam.load(name)
    text = {"tiny-blip-vqa": "what colour is the star?"}.get(name, SCENE.caption)
    phrases = ["star"] if name == "tiny-blip-vqa" else None
    grounded = model.ground(SCENE.image, text, phrases, empty="keep", **choices)
    alone = name != "tiny-clip" or bool(choices)  # its prompts run in one batch
    told = {each.phrase: verified(each.explanation, model, tmp_path / "saved.png", exactly=alone) for each in grounded}
    assert {phrase: why for phrase, why in told.items() if why} == {}
