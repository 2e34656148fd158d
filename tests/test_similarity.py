"""Image tokens compared with texts: similarities and CLIP Surgery, by hand, with one text and with many."""

from __future__ import annotations

import models
import numpy as np
import pytest
import torch
from models import TEXTS, Slow, photo, two_towers

import vlcam
from vlcam.errors import RecipeError
from vlcam.explainer import Explainer

FOUR = [*TEXTS, "un dog"]


@pytest.fixture
def pixels():
    return models.pixels()


@pytest.fixture
def model():
    return Explainer(two_towers(), "x")


def named(which, **changes):
    return vlcam.recipes()[which].recipe.replace(**changes)


def assert_close(found, expected, share=1e-5):
    found, expected = (np.asarray(torch.as_tensor(each).detach(), np.float64).reshape(-1) for each in (found, expected))
    assert np.abs(expected).max() > 0
    np.testing.assert_allclose(found, expected, rtol=0, atol=share * np.abs(expected).max())


def own_tokens(slow, attention, layers=(1, 2)):
    """What is embedded of each patch, token by token, written out."""
    if attention == "own":
        return slow.at("vision", -1, "F6")[0, 1:]
    blocks = slow.module.vision_model.encoder.layers
    if attention == "identity":
        block, state = blocks[-1], slow.at("vision", -2, "F6")[0]
        state = state + block.self_attn.out_proj(slow.at("vision", -1, "v")[0])
        return (state + block.mlp(block.layer_norm2(state)))[1:]
    state = slow.at("vision", layers[0] - 1, "F6")[0]
    for layer in layers:
        heads = slow.at("vision", layer, "v")[0].split(6, dim=-1)  # two, of width 6
        made = [(head @ head.T / 6**0.5).softmax(-1) @ head for head in heads]
        state = state + blocks[layer].self_attn.out_proj(torch.cat(made, -1))
    return state[1:]


def surgery(slow, tokens, own, among):
    """Feature surgery as published: weighted products of features, less their mean over texts, summed over channels."""
    features, texts = slow.embedded(tokens), slow.texts[among]
    weights = (2 * slow.images[0] @ texts.T).softmax(0)
    weights = weights / weights.mean()
    products = features[:, None] * texts[None] * weights[None, :, None]
    return (products - products.mean(1, keepdim=True)).sum(-1)[:, among.index(own)]


# Formulas


@pytest.mark.parametrize("attention", ["own", "identity", "values"])
@pytest.mark.parametrize("scale", ["cosine", "difference"])
def test_similarity_is_the_cosine_of_each_tokens_embedding_less_that_with_other_texts(model, attention, scale, pixels):
    changes = {"site": "F3", "layers": (1, 2), "layer_rule": "sum"} if attention == "values" else {}
    recipe = named("maskclip", attention=attention, scale=scale, **changes)
    slow = Slow(model.adapter, pixels, FOUR)
    cosines = slow.embedded(own_tokens(slow, attention)) @ slow.texts.T
    for own, found in enumerate(model.explain(pixels, FOUR, recipe)):
        others = [k for k in range(4) if k != own]
        wanted = cosines[:, own] - (cosines[:, others].mean(1) if scale == "difference" else 0)
        assert_close(found.tokens, wanted, 3e-5)
        assert found.provenance["run"]["against"] == [FOUR[k] for k in others]


@pytest.mark.parametrize("attention", ["own", "identity", "values"])
def test_surgery_takes_from_each_token_what_all_texts_share(model, attention, pixels):
    changes = {"site": "F6", "layers": "last", "layer_rule": "single"} if attention != "values" else {}
    recipe = named("clip-surgery", attention=attention, **{"layers": (1, 2), **changes})
    found = model.explain(pixels, FOUR, recipe)
    slow = Slow(model.adapter, pixels, FOUR)
    tokens = own_tokens(slow, attention)
    if attention == "identity":  # the class token is that of the same path
        block = slow.module.vision_model.encoder.layers[-1]
        state = slow.at("vision", -2, "F6")[0, :1] + block.self_attn.out_proj(slow.at("vision", -1, "v")[0, :1])
        slow.images = slow.embedded(state + block.mlp(block.layer_norm2(state)))
    for own, each in enumerate(found):
        assert_close(each.tokens, surgery(slow, tokens, own, list(range(4))))
        assert each.provenance["run"]["against"] == [text for text in FOUR if text != FOUR[own]]


@pytest.mark.parametrize("layers", [(0, 1, 2), (1, 2), (2,), (1,)])
def test_values_alone_add_up_over_the_blocks_that_are_named(model, layers, pixels):
    slow = Slow(model.adapter, pixels, FOUR)
    if layers[0]:
        state = slow.at("vision", layers[0] - 1, "F6")
    else:  # what the first block reads
        seen = []
        handle = slow.module.vision_model.pre_layrnorm.register_forward_hook(lambda *given: seen.append(given[-1]))
        slow.module.vision_model(pixel_values=pixels[None].double())
        handle.remove()
        state = seen[0]
        slow.seen["vision", -1, "F6"] = state
    slow.at = lambda stream, layer, site: slow.seen[stream, layer, site] if layer >= 0 else state
    tokens = own_tokens(slow, "values", layers)
    found = model.explain(pixels, FOUR, "clip-surgery", layer=layers)[1]
    assert_close(found.tokens, surgery(slow, tokens, 1, [0, 1, 2, 3]))


def test_what_all_texts_share_adds_to_nothing_over_texts(model, pixels):
    maps = [each.tokens for each in model.explain(pixels, FOUR, "clip-surgery")]
    assert np.abs(maps[0]).max() > 1e-2
    np.testing.assert_allclose(sum(maps), 0, atol=1e-6)


def test_the_redundant_text_may_be_the_empty_one(model, pixels):
    recipe = named(
        "clip-surgery", layers=(1, 2), weighting="similarity", scale="difference", attention="values", name="redundant"
    )
    slow = Slow(model.adapter, pixels, ["red", ""])
    features = slow.embedded(own_tokens(slow, "values"))
    found = model.explain(pixels, "red", recipe, against=[""])
    assert_close(found.tokens, features @ (slow.texts[0] - slow.texts[1]))
    assert found.provenance["run"]["against"] == [""]
    surgical = model.explain(pixels, "red", "clip-surgery", layer=(1, 2), against=[""])
    assert_close(surgical.tokens, surgery(slow, own_tokens(slow, "values"), 0, [0, 1]))


# Texts


@pytest.mark.parametrize(
    "recipe",
    [
        named("clip-surgery", layers=(1, 2)),
        named("maskclip", scale="difference"),
        named("maskclip", weighting="surgery"),
    ],
    ids=["surgery", "difference", "surgery of one block"],
)
def test_one_text_leaves_nothing_to_compare_and_is_refused(model, recipe, pixels):
    for texts in ("red", ["red", "red"]):
        with pytest.raises(RecipeError, match=r"against=\["):
            model.explain(pixels, texts, recipe)
    with pytest.raises(RecipeError, match=r"against=\["):
        model.explain(pixels, "red", recipe, against=["red"])
    assert model.explain(pixels, "red", recipe, against=["un"]).tokens.any()


def test_one_text_has_a_similarity(model, pixels):
    alone = model.explain(pixels, "red", "maskclip")
    together = model.explain(pixels, FOUR, "maskclip")[2]
    assert_close(alone.tokens, together.tokens)
    assert alone.status == "ok"


@pytest.mark.parametrize("name", ["clip-surgery", "maskclip"])
def test_texts_given_against_are_compared_as_those_of_a_list_are(model, name, pixels):
    together = model.explain(pixels, FOUR, name)
    for own, text in enumerate(FOUR):
        alone = model.explain(pixels, text, name, against=[*FOUR, FOUR[-1]])
        assert_close(alone.tokens, together[own].tokens)


def test_each_text_of_a_list_is_compared_with_those_against_alone(model, pixels):
    slow = Slow(model.adapter, pixels, FOUR)
    tokens = own_tokens(slow, "values")
    for own, found in enumerate(model.explain(pixels, FOUR[:2], "clip-surgery", layer=(1, 2), against=FOUR[2:])):
        assert_close(found.tokens, surgery(slow, tokens, own, [own, 2, 3]))
        assert found.provenance["run"]["against"] == FOUR[2:]


def test_many_images_are_what_each_is_alone(model):
    pictures = [photo(0), photo(1, height=90)]
    for name in ("maskclip", "clip-surgery"):
        for picture, found in zip(pictures, model.explain(pictures, FOUR[:2], name), strict=True):
            alone = model.explain(picture, found.text, name, against=FOUR[:2])
            assert_close(found.tokens, alone.tokens)


# Models


def test_neither_takes_a_gradient(model, pixels, monkeypatch):
    monkeypatch.setattr(torch.autograd, "grad", lambda *_, **__: pytest.fail("a gradient was taken"))
    for name in ("maskclip", "clip-surgery"):
        assert model.explain(pixels, FOUR, name)[0].tokens.any()


def test_both_keep_negative_values(model, pixels):
    for name in ("maskclip", "clip-surgery"):
        assert min(each.tokens.min() for each in model.explain(pixels, FOUR, name)) < 0


@pytest.mark.parametrize("name", ["maskclip", "clip-surgery"])
def test_models_that_embed_no_single_tokens_say_so(name, pixels):
    siglip = Explainer(two_towers("siglip"), "x")
    with pytest.raises(RecipeError, match="does not embed single tokens"):
        siglip.explain(pixels, FOUR, name)
    classifier = vlcam.wrap(models.classifier("vit"), name="x")
    with pytest.raises(RecipeError, match=r"contrastive|embed"):
        classifier.explain(pixels, recipe=name)


@pytest.mark.parametrize("name", ["maskclip", "clip-surgery"])
def test_half_precision_stays_near(name):
    full, half = (Explainer(two_towers(), "x") for _ in range(2))
    half.adapter.module.to(torch.bfloat16)
    exact, found = (model.explain(photo(), FOUR, name)[1] for model in (full, half))
    assert found.tokens.dtype == np.float32
    ranks = [np.argsort(np.argsort(each.tokens.reshape(-1))) for each in (exact, found)]
    assert np.corrcoef(*ranks)[0, 1] > 0.9


def test_a_grid_that_is_not_square_is_compared_row_by_row():
    wide = Explainer(two_towers(image_size=(32, 64), interpolate_pos_encoding=True), "x")
    pixels = models.pixels(width=64)
    slow = Slow(wide.adapter, pixels, FOUR, interpolate_pos_encoding=True)
    found = wide.explain(pixels, FOUR, "maskclip")[1]
    assert found.tokens.shape == (4, 8)
    assert_close(found.tokens, (slow.embedded(own_tokens(slow, "identity")) @ slow.texts.T)[:, 1])


@pytest.mark.parametrize("name", ["maskclip", "clip-surgery"])
def test_a_saved_map_comes_out_again(model, name, tmp_path):
    found = model.explain(photo(), "a red dog", name, against=None if name == "maskclip" else ["red", ""])
    opened = vlcam.open(found.save(tmp_path / "map.png"))
    outcome = opened.verify(model)
    assert outcome.identical
    assert outcome.differences == ()
    assert np.isfinite(opened.heatmap[:, 20:44]).all()


def test_a_saved_map_of_similarities_is_verified_without_differences(model, tmp_path):
    found = model.explain(photo(), "a red dog", "maskclip", against=["red", ""])
    assert vlcam.open(found.save(tmp_path / "map.png")).verify(model).differences == ()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scale": "probability"}, "scale='probability' with weighting='similarity'"),
        ({"target": "class", "scale": "logit"}, "target='class' with weighting='similarity'"),
        ({"layers": (0,)}, r"layers=\(0,\) with weighting='similarity', attention='identity'"),
        ({"site": "F1"}, "site='F1' with weighting='similarity', attention='identity': choose from 'F6'"),
        ({"attention": "values"}, "site='F6' with weighting='similarity', attention='values': choose from 'F3'"),
        ({"attention": "one_head"}, "attention='one_head' with weighting='similarity'"),
        ({"gradient_path": "full"}, "gradient_path='full' with weighting='similarity'"),
        ({"weighting": "surgery", "scale": "difference"}, "scale='difference' with weighting='surgery'"),
    ],
)
def test_choices_that_do_not_go_with_a_comparison_are_refused(changes, words):
    with pytest.raises(RecipeError, match=words):
        named("maskclip", **changes)
