"""A pair that was explained beside others comes out again bit for bit from its file alone."""

from __future__ import annotations

import json

import numpy as np
import pytest

import vlcam
from vlcam.readers import OF_TEXTS

SCENES = list(vlcam.scenes.generate(3, seed=7))
IMAGES = [scene.image for scene in SCENES]
CAPTIONS = [scene.caption for scene in SCENES]
QUESTIONS = ["what colour is the star?", "which one is left of the large blue circle?", "how many?"]
# Those that divide by what nearly cancels, read words, or carry cross-attention on.
RECIPES = ["torchcam-gradcam++", "grad-eclip-text-as-coded", "chefer-bimodal-words", "pgc-gradcam"]
OF_SOME = ("grad-eclip-text-as-coded", "chefer-bimodal-words")


@pytest.fixture(scope="module", params=["tiny-clip", "tiny-blip-itm", "tiny-blip-vqa", "tiny-blip-caption", "tiny-vit"])
def model(request):
    return vlcam.load(request.param)


def asked(model):
    """Calls of several pairs: one image, as many images as questions, several images."""
    if not model.adapter.takes_text:
        return [(IMAGES[0], {"target": [0, 1, 2]}), (IMAGES, {"target": [3, 4, 5]}), (IMAGES, {})]
    texts = QUESTIONS if model.adapter.writes == "answer" else CAPTIONS
    others = {"against": texts[1:]} if set(model.adapter.heads.values()) & set(OF_TEXTS) else {}
    return [
        (IMAGES[0], {"text": texts}),
        (IMAGES, {"text": texts[::-1]}),
        (IMAGES, {"text": texts[0]} | others),
        (IMAGES[0], {"text": [texts[0], texts[1], texts[0]]}),
    ]


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_pair_of_a_call_comes_out_bit_for_bit(model, recipe, tmp_path):
    for number, (image, questions) in enumerate(asked(model)):
        try:
            several = model.explain(image, recipe=recipe, **questions)
        except (vlcam.RecipeError, vlcam.UnknownNameError):
            assert recipe in OF_SOME
            continue
        for pair, made in enumerate(several):
            outcome = vlcam.open(made.save(tmp_path / f"{number}-{pair}.png")).verify(model)
            assert outcome.identical, (number, pair, str(outcome))
            assert outcome.differences == ()


def test_the_record_states_the_shape_of_the_call():
    model = vlcam.load("tiny-blip-itm")
    made = model.explain(IMAGES[0], CAPTIONS)[1].provenance["run"]["batch"]
    longest = max(len(model.adapter.prepare_texts([text]).layouts[0].ids) for text in CAPTIONS)
    assert made == {
        "pair": 1,
        "image_of": [0, 0, 0],
        "text_of": [0, 1, 2],
        "texts": 3,
        "compared": [0, 1, 2],
        "tokens": longest,
        "answer_tokens": None,
        "variants": None,
    }


def test_alone_it_is_computed_by_itself_and_says_so():
    model = vlcam.load("tiny-clip")
    made = model.explain(IMAGES, CAPTIONS[0], "torchcam-gradcam++")
    together, alone = made[1].verify(model), made[1].verify(model, alone=True)
    assert together.identical
    assert not together.model
    assert alone.model
    assert all(line.startswith("run.batch.") for line in alone.model)


@pytest.mark.parametrize("name", ["tiny-clip", "tiny-blip-itm"])
def test_a_caption_keeps_the_padding_that_a_longer_one_gave_it(name):
    """As when ids came padded: the text alone is shorter than the row was."""
    model = vlcam.load(name)
    made = model.explain(IMAGES[0], ["a star", CAPTIONS[0]], "pgc-gradcam")[0]
    assert made.verify(model).identical


def test_phrases_that_are_prompts_of_their_own_come_out_too():
    model = vlcam.load("tiny-clip")
    for found in model.ground(IMAGES[0], CAPTIONS[0], recipe="torchcam-gradcam++"):
        assert found.explanation.verify(model).identical


def test_as_many_variants_run_at_once_as_did():
    model = vlcam.load("tiny-blip-itm")
    made = model.explain(IMAGES[0], CAPTIONS[0], "ablationcam", batch=5)
    assert made.provenance["run"]["batch"]["variants"] == 5
    assert made.verify(model).identical


def test_half_precision_comes_out_too():
    model = vlcam.load("tiny-clip", dtype="bfloat16")
    for made in model.explain(IMAGES, CAPTIONS[0], "pgc-gradcam"):
        assert made.verify(model).identical


def test_a_record_without_a_batch_is_computed_alone():
    model = vlcam.load("tiny-vit")
    made = model.explain(IMAGES[0], target=3)
    record = json.loads(json.dumps(made.provenance))
    del record["run"]["batch"]
    (again,) = model.sweep(IMAGES[0], None, [made.recipe], target=3, conditions=record)
    np.testing.assert_array_equal(again.tokens, made.tokens)
