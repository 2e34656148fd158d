"""Several texts, recipes and streams in one call: what was once crossed, stays apart."""

from __future__ import annotations

import gc

import models
import numpy as np
import pytest
import test_clip_open
import torch

import vlcam
from vlcam.errors import InputError, RecipeError
from vlcam.explainer import Explainer


@pytest.fixture(scope="module")
def coca():
    pytest.importorskip("open_clip")
    model = Explainer(test_clip_open.wrapped(test_clip_open.coca()), "coca")
    return model, test_clip_open.pixels_for(model.adapter.module, 1)[0]


def test_a_caption_is_scored_alone_whatever_it_is_compared_with(coca):
    model, pixels = coca
    texts = ["a red circle", "a dog"]
    together = model.explain(pixels, texts, "coca-caption")
    for text, found in zip(texts, together, strict=True):
        alone = model.explain(pixels, text, "coca-caption")
        against = model.explain(pixels, text, "coca-caption", against=[f"word {n}" for n in range(13)])
        for other in (found, against):
            for name in ("caption_log_probability", "contrastive_cosine"):
                assert other.scores[name].value == pytest.approx(alone.scores[name].value, rel=1e-5)
            assert other.provenance["run"]["target_value"] == pytest.approx(
                alone.provenance["run"]["target_value"], rel=1e-5
            )


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_the_default_sweep_runs_on_models_that_pool_by_attention_too(kind):
    model = Explainer(models.two_towers(kind), "x")
    found = model.sweep(models.photo(1), "a red dog", empty="keep")
    assert len(found) > 30
    assert {each.status for each in found} <= {
        *("ok", "zero gradient", "no positive evidence", "rounding noise", "constant")
    }


def test_the_default_sweep_of_a_phrase_leaves_out_what_knows_no_phrases():
    model = Explainer(models.two_towers("clip"), "x")
    found = model.sweep(models.photo(1), "a red dog", phrase="red", empty="keep")
    assert {each.recipe.prompt for each in found} == {"phrase"}
    with pytest.raises(RecipeError, match="phrase='red'"):
        model.sweep(models.photo(1), "a red dog", ["raw-attention"], phrase="red")


def test_other_texts_are_whole_where_a_phrase_stands_in_its_place():
    model = Explainer(models.two_towers("clip"), "x")
    texts = ["a red dog", "red grass on a dog"]
    found = model.explain(models.photo(1), texts, phrase="red", prompt="in_place", scale="margin", relu="none")
    for own, each in enumerate(found):
        alone = model.explain(
            models.photo(1), texts[own], phrase="red", prompt="in_place", scale="margin", relu="none",
            against=texts[1 - own],
        )  # fmt: skip
        np.testing.assert_allclose(each.tokens, alone.tokens, atol=1e-5 * np.abs(alone.tokens).max())
        assert each.verify(model).reproduced


def test_texts_of_equal_tokens_are_one_text():
    model = Explainer(models.two_towers("clip"), "x")
    with pytest.raises(RecipeError, match="of one text"):
        model.explain(models.photo(1), ["a red dog", "A  red   Dog"], scale="probability")
    assert "contrastive_probability" not in model.scores(models.photo(1), ["a red dog", "A  red   Dog"])[0]


def test_scores_of_many_texts_are_read_one_by_one_and_keep_no_pass():
    model = Explainer(models.two_towers("clip"), "x")
    texts = [f"a red dog {'a ' * n}" for n in range(8)]
    found = model.explain(models.photo(1), texts, "chefer-generic")
    gc.collect()
    held = [
        each
        for each in gc.get_objects()
        if type(each) is torch.Tensor and each.ndim == 4 and each.shape[0] == len(texts)
    ]
    assert held == []  # no attention of the pass is left
    assert found[3].scores["contrastive_probability"].kind == "probability over 8 texts"
    logits = torch.tensor([each.scores["contrastive_logit"].value for each in found])
    assert found[3].scores["contrastive_probability"].value == pytest.approx(logits.softmax(0)[3].item(), rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_values_are_found_behind_a_change_of_type(dtype):
    model = Explainer(models.two_towers("clip", attention="eager"), "x")
    model.adapter.module.to(dtype)
    assert np.isfinite(model.explain(models.photo(1), "a red dog", "grad-eclip", relu="none").tokens).all()


def test_what_users_type_first_is_answered():
    model = vlcam.load("tiny-clip")
    with pytest.raises(InputError, match="no text was given"):
        model.explain(models.photo(1))
    with pytest.raises(RecipeError, match="given as the text"):
        model.explain(models.photo(1), "a red star", target="red star")


def test_a_gallery_of_several_texts_names_each():
    model = vlcam.load("tiny-clip")
    texts = ["a red star", "a blue square"]
    found = model.explain(models.photo(1), texts, relu="none")
    titles = [ax.get_title() for ax in vlcam.gallery(found).axes]
    assert titles[:3] == ["image", *texts]
    with pytest.raises(InputError, match="draw a gallery"):
        vlcam.compare(found)
    with pytest.raises(InputError, match="a flat list"):
        vlcam.gallery([found])


def test_a_gallery_tells_recipes_of_one_name_apart():
    model = vlcam.load("tiny-clip")
    found = [model.explain(models.photo(1), "a red star", **changes) for changes in ({}, {"site": "F6", "layer": -2})]
    titles = [ax.get_title() for ax in vlcam.gallery(found).axes]
    assert titles[1:] == ["clip-gradcam\nsite F1, layers last", "clip-gradcam\nsite F6, layers -2"]
    assert vlcam.gallery(found[:1]).axes[1].get_title() == "clip-gradcam"


def test_each_tower_has_its_own_attention():
    model = Explainer(models.two_towers("clip"), "x")
    model.adapter.module.vision_model.set_attn_implementation("eager")
    assert model.adapter.attention == "eager in vision, sdpa in text"
    fused = Explainer(models.two_towers("clip"), "x")
    for name in ("grad-eclip-as-coded", "grad-eclip-text-as-coded"):
        written, other = (each.explain(models.photo(1), "a red dog", name, relu="none") for each in (model, fused))
        np.testing.assert_allclose(written.tokens, other.tokens, rtol=0, atol=1e-5 * np.abs(other.tokens).max())
    assert len(model.sweep(models.photo(1), "a red dog", empty="keep")) > 30
