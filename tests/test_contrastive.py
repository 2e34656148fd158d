"""Models of two towers: what a text is compared with, on which scale, for which pairs; maps over the image, by hand."""

from __future__ import annotations

import dataclasses

import models
import numpy as np
import pytest
import torch
from models import TEXTS, Slow, photo, two_towers
from PIL import Image
from torch.nn.functional import cosine_similarity, normalize

import vlcam
from vlcam.errors import EvidenceError, InputError, RecipeError
from vlcam.evidence import NoGradientError
from vlcam.explainer import Explainer
from vlcam.fitting import fitting

KINDS = ("clip", "siglip")
SCALES = ("cosine", "logit", "probability", "log-probability", "margin", "difference", "finer")
COMPARING = ("probability", "log-probability", "margin", "difference", "finer")
FOUR = [*TEXTS, "un dog", "grass"]


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def pixels():
    return models.pixels()


@pytest.fixture
def calls():
    """Counts rows that go through a module, call by call: `count = calls(module)`."""
    handles = []

    def watch(module):
        rows = []

        def keep(_, args, kwargs):
            given = [
                *args,
                *(kwargs[name] for name in ("pixel_values", "input_ids", "inputs_embeds") if name in kwargs),
            ]
            rows.append(len(given[0]))

        handles.append(module.register_forward_pre_hook(keep, with_kwargs=True))
        return rows

    yield watch
    for handle in handles:
        handle.remove()


def explainer(kind="clip", **options):
    return Explainer(two_towers(kind, **options), "x")


def assert_close(found, expected, share=1e-5):
    found, expected = (np.asarray(torch.as_tensor(each).detach(), np.float64).reshape(-1) for each in (found, expected))
    assert np.abs(expected).max() > 0
    np.testing.assert_allclose(found, expected, rtol=0, atol=share * np.abs(expected).max())


def assert_same(one, other, share=1e-6):
    assert_close(one.tokens, other.tokens, share)
    assert one.status == other.status


def scaled(values):
    values = np.asarray(values, np.float64)
    return (values - values.min()) / (values.max() - values.min())


def read(slow, image, own, scale, *, among=None, sigmoid=False):
    """A score of an image and a text on every scale, from the model's own logits in float64, one term at a time."""
    logits, cosines = slow.logits[image], slow.cosines[image]
    among = list(range(len(logits))) if among is None else sorted({*among, own})
    others = [k for k in among if k != own]
    if scale == "cosine":
        return cosines[own]
    if scale == "logit":
        return logits[own]
    if scale in ("probability", "log-probability"):
        share = torch.sigmoid(logits[own]) if sigmoid else logits[own].exp() / sum(logits[k].exp() for k in among)
        return share if scale == "probability" else share.log()
    if scale == "margin":
        return logits[own] - max(logits[k] for k in others)
    if scale == "difference":
        return cosines[own] - sum(cosines[k] for k in others) / len(others)
    nearest = sorted(others, key=lambda k: abs((logits[k] - logits[own]).item()))[:3]
    total = sum(logits[k].exp() for k in among)
    weights = [logits[k].exp() / total for k in nearest]
    return sum(w * (logits[own] - logits[k]) for w, k in zip(weights, nearest, strict=True)) / sum(weights)


# Scales


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("stream", "site"), [("vision", "F1"), ("text", "F3_HEADS"), ("text", "F2")])
def test_value_and_gradient_on_every_scale_are_those_of_the_library_in_float64(kind, scale, stream, site, pixels):
    model = explainer(kind)
    found = model.capture(pixels, FOUR, stream=stream, site=site, layers=-1, scale=scale)
    ((_, gradients),) = found.gradients.items()
    slow = Slow(model.adapter, pixels, FOUR)
    for own in range(len(FOUR)):
        y = read(slow, 0, own, scale, sigmoid=kind == "siglip")
        assert float(found.target[own]) == pytest.approx(y.item(), rel=1e-5, abs=1e-6)
        gradient = slow.gradient(y, stream, -1, site)
        assert_close(gradients[own], gradient[own if stream == "text" else 0], 2e-5)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("recipe", ["clip-gradcam", "clip-es"])
def test_maps_on_every_scale_are_weighted_by_the_gradient_of_that_scale(recipe, scale, pixels):
    model = explainer()
    slow = Slow(model.adapter, pixels, FOUR)
    if recipe == "clip-es":  # the mean of the normed patches in place of the class token
        tower, projection = slow.module.vision_model, slow.module.visual_projection
        mean = tower.post_layernorm(slow.at("vision", -1, "F6")[:, 1:]).mean(1)
        slow.cosines = normalize(projection(mean), dim=-1) @ slow.texts.T
        slow.logits = slow.cosines * slow.scale
    for own, found in enumerate(model.explain(pixels, FOUR, recipe, scale=scale, relu="none")):
        y = read(slow, 0, own, scale)
        assert found.provenance["run"]["target_value"] == pytest.approx(y.item(), rel=1e-5, abs=1e-6)
        assert found.provenance["run"]["target"] == f"{found.recipe.target}_{scale.replace('-', '_')}"
        features, gradient = slow.at("vision", -1, "F1")[0, 1:], slow.gradient(y, "vision", -1, "F1")[0, 1:]
        assert_close(found.tokens, features @ gradient.mean(0), 2e-5)


def test_scores_are_the_models_own_with_their_kinds(kind, pixels):
    model = explainer(kind)
    slow = Slow(model.adapter, pixels, TEXTS)
    for own, found in enumerate(model.explain(pixels, TEXTS)):
        assert set(found.scores) == {f"contrastive_{scale.replace('-', '_')}" for scale in SCALES if scale != "finer"}
        for name, score in found.scores.items():
            scale = name.removeprefix("contrastive_").replace("_", "-")
            wanted = read(slow, 0, own, scale, sigmoid=kind == "siglip").item()
            assert score.value == pytest.approx(wanted, rel=1e-5, abs=1e-6)
            alone = scale in ("cosine", "logit") or (kind == "siglip" and "probability" in scale)
            assert score.kind == (scale if alone else f"{scale} over 3 texts")


def test_the_cosine_is_the_librarys_logit_over_its_temperature(kind, pixels):
    model = explainer(kind, temperature=50.0)
    adapter = model.adapter
    texts = adapter.prepare_texts(TEXTS).tensors
    with torch.no_grad():
        logits = adapter.module(pixel_values=pixels[None], **texts).logits_per_image[0]
        wanted = (logits - getattr(adapter.module, "logit_bias", 0.0)) / adapter.module.logit_scale.exp()
    for found, cosine, logit in zip(model.scores(pixels, TEXTS), wanted, logits, strict=True):
        assert float(found["contrastive_cosine"]) == pytest.approx(float(cosine), abs=1e-6)
        assert float(found["contrastive_logit"]) == pytest.approx(float(logit), rel=1e-5)


def test_siglip_gives_one_text_a_probability_of_its_own(pixels):
    model = explainer("siglip")
    alone, several = (
        model.explain(pixels, "red", scale="probability"),
        model.explain(pixels, TEXTS, scale="probability"),
    )
    logit = float(alone.scores["contrastive_logit"])
    assert alone.provenance["run"]["target_value"] == pytest.approx(1 / (1 + np.exp(-logit)), rel=1e-6)
    assert alone.scores["contrastive_probability"].kind == "probability"
    assert "contrastive_margin" not in alone.scores
    assert_same(alone, several[2])
    assert alone.provenance["run"]["against"] == []
    assert several[2].provenance["run"]["against"] == TEXTS[:2]  # those of the scores


@pytest.mark.parametrize("scale", COMPARING)
def test_a_text_that_is_compared_with_nothing_is_refused_with_what_to_do(scale, pixels):
    model = explainer()
    with pytest.raises(RecipeError, match=r"one text: .*gradient is zero; give several texts, .*against=\[.*'cosine'"):
        model.explain(pixels, "red", scale=scale)
    with pytest.raises(RecipeError, match="one text"):  # the same text twice is one text
        model.explain(pixels, ["red", "red"], scale=scale, against=["red"])
    assert model.explain(pixels, "red", scale=scale, against=["a dog"]).tokens.any()


@pytest.mark.parametrize("scale", ["margin", "difference", "finer"])
def test_siglip_too_refuses_one_text_where_it_compares_texts(scale, pixels):
    with pytest.raises(RecipeError, match="one text: it compares the text with others"):
        explainer("siglip").explain(pixels, "red", scale=scale)


def test_one_text_alone_has_scores_but_none_that_compare(pixels):
    assert list(explainer().scores(pixels, "red")) == ["contrastive_cosine", "contrastive_logit"]
    assert len(explainer().scores(pixels, "red", against="a dog")) == 6


def test_a_sure_model_has_a_logit_map_but_no_probability_map(pixels):
    model, sure = explainer(temperature=4), explainer(temperature=1e5)
    order = [float(each["contrastive_cosine"]) for each in model.scores(pixels, TEXTS)]
    best = int(np.argmax(order))
    plain, scaled_up = (each.explain(pixels, TEXTS, relu="none")[best] for each in (model, sure))
    np.testing.assert_allclose(scaled(scaled_up.tokens), scaled(plain.tokens), atol=1e-5)
    with pytest.raises(NoGradientError, match="contrastive_probability at F1 of vision block 2 is exactly zero"):
        sure.explain(pixels, TEXTS, scale="probability")
    worst = TEXTS[int(np.argmin(order))]
    kept = sure.explain(pixels, worst, scale="log-probability", relu="none", against=TEXTS)
    assert np.isfinite(kept.tokens).all()
    assert kept.tokens.any()


# Against


@pytest.mark.parametrize("scale", COMPARING)
def test_texts_given_against_are_compared_as_those_of_a_list_are(kind, scale, pixels):
    model = explainer(kind)
    together = model.explain(pixels, FOUR, scale=scale, relu="none")
    for own, text in enumerate(FOUR):
        others = [other for other in FOUR if other != text]
        alone = model.explain(pixels, text, scale=scale, relu="none", against=others)
        assert_same(alone, together[own], 1e-5)
        assert sorted(alone.provenance["run"]["against"]) == sorted(together[own].provenance["run"]["against"])
        sets = {frozenset(each.provenance["run"]["against"]) for each in (alone, together[own])}
        assert sets == {frozenset(others)}
        for name, score in together[own].scores.items():
            assert alone.scores[name].kind == score.kind
            assert alone.scores[name].value == pytest.approx(score.value, abs=1e-6)


def test_against_one_text_may_be_a_string_the_empty_one_too(pixels):
    model = explainer()
    slow = Slow(model.adapter, pixels, ["red", ""])
    found = model.explain(pixels, "red", scale="probability", against="")
    assert found.provenance["run"]["target_value"] == pytest.approx(read(slow, 0, 0, "probability").item(), rel=1e-5)
    assert found.provenance["run"]["against"] == [""]
    with pytest.raises(InputError, match=r"against=\[\]: there is no other text in it"):
        model.explain(pixels, "red", scale="probability", against=[])
    with pytest.raises(InputError, match="character 6 is half of a pair"):
        model.explain(pixels, "a red \ud800 star", scale="probability", against="")
    with pytest.raises(InputError, match="character 0 is half of a pair"):
        model.explain(pixels, "red", scale="probability", against="\udcff")
    with pytest.raises(InputError, match="the text is empty"):
        model.explain(pixels, "")


def test_duplicates_and_the_text_itself_count_once(kind, pixels):
    model = explainer(kind)
    plain = model.explain(pixels, "red", scale="margin", against=["a dog", "un"])
    again = model.explain(pixels, "red", scale="margin", against=["un", "red", "a dog", "un", "a dog"])
    assert_same(plain, again)
    assert again.scores["contrastive_margin"].kind == "margin over 3 texts"
    twice = model.explain(pixels, ["red", "red", "a dog"], scale="difference")
    assert_same(twice[0], twice[1], 0)
    assert_same(twice[0], model.explain(pixels, "red", scale="difference", against="a dog"))
    assert twice[0].provenance["run"]["against"] == ["a dog"]


@pytest.mark.parametrize(
    "scale",
    [
        *COMPARING[:4],
        pytest.param(
            "finer",
        ),
    ],
)
def test_each_text_of_a_list_is_compared_with_those_against_and_not_with_the_list(kind, scale, pixels):
    model, against = explainer(kind), ["un dog", "grass"]
    slow = Slow(model.adapter, pixels, FOUR)
    for own, found in enumerate(model.explain(pixels, TEXTS, scale=scale, against=against, relu="none")):
        wanted = read(slow, 0, own, scale, among=[3, 4], sigmoid=kind == "siglip")
        assert found.provenance["run"]["target_value"] == pytest.approx(wanted.item(), rel=1e-5, abs=1e-6)
        alone = model.explain(pixels, TEXTS[own], scale=scale, against=against, relu="none")
        assert_same(found, alone, 1e-5)


def test_against_is_refused_for_batches_of_ids_and_for_models_without_texts(pixels):
    model = explainer()
    batch = {"pixel_values": pixels[None], **model.adapter.prepare_texts(TEXTS[:1]).tensors}
    with pytest.raises(InputError, match=r"against=\.\.\."):
        model.explain(batch, against=["red"])
    classifier = vlcam.wrap(models.classifier("vit"), name="x")
    with pytest.raises(InputError, match="takes no text"):
        classifier.explain(pixels, against=["red"])


def test_equal_ids_of_a_batch_count_once_as_equal_texts_do():
    model = explainer()
    ids = {name: torch.cat([rows] * 2) for name, rows in model.adapter.prepare_texts(["red"]).tensors.items()}
    for scores in model.scores({"pixel_values": models.pixels(batch=2), **ids}):
        assert list(scores) == ["contrastive_cosine", "contrastive_logit"]


def test_against_is_refused_for_models_that_compare_no_texts(blip):
    model = vlcam.wrap(blip, models.processor(), name="x")
    with pytest.raises((InputError, RecipeError), match="against="):
        model.explain(photo(), "a dog", against=["a red circle"])


def test_ids_of_a_processor_are_compared_as_texts_are(kind, pixels):
    model = explainer(kind)
    batch = {"pixel_values": pixels[None], **model.adapter.prepare_texts(TEXTS).tensors}
    pairs = zip(model.explain(batch, scale="margin"), model.explain(pixels, TEXTS, scale="margin"), strict=True)
    for found, wanted in pairs:
        assert_same(found, wanted)


# Pairs


def test_a_list_of_texts_gives_what_single_calls_give(kind):
    model, picture = explainer(kind), photo()
    for text, found in zip(TEXTS, model.explain(picture, TEXTS, scale="probability", relu="none"), strict=True):
        alone = model.explain(picture, text, scale="probability", relu="none", against=TEXTS)
        assert found.text == text
        assert_close(found.tokens, alone.tokens, 1e-5)
        assert np.abs(found.tokens - alone.tokens).max() < 1e-6


def test_other_texts_give_other_maps_and_the_same_text_the_same(kind, pixels):
    first, other, again = explainer(kind).explain(pixels, ["a red dog", "red", "a red dog"], relu="none")
    assert_close(first.tokens, again.tokens, 1e-6)
    assert np.abs(scaled(first.tokens) - scaled(other.tokens)).max() > 0.05


@pytest.mark.parametrize("recipe", ["clip-gradcam", "chefer-clip", "legrad", "agcam", "pgc-elementwise"])
def test_images_of_other_sizes_with_one_text_are_what_each_is_alone(kind, recipe):
    model = explainer(kind)
    pictures = [photo(0, height=40, width=64), photo(1, height=96, width=32), photo(2, height=33, width=33)]
    found = model.explain(pictures, "a red dog", recipe)
    for picture, each in zip(pictures, found, strict=True):
        assert_same(each, model.explain(picture, "a red dog", recipe), 1e-5)
        assert each.heatmap.shape == picture.size[::-1]


def test_n_images_go_with_n_texts_in_order(kind):
    model, pictures = explainer(kind), [photo(seed) for seed in range(3)]
    texts = [TEXTS[1], TEXTS[1], TEXTS[0]]
    for picture, text, found in zip(pictures, texts, model.explain(pictures, texts, scale="margin"), strict=True):
        assert found.text == text
        assert_same(found, model.explain(picture, text, scale="margin", against=TEXTS[:2]), 1e-5)
    with pytest.raises(InputError, match="3 images and 2 texts"):
        model.explain(pictures, TEXTS[:2])


def test_as_many_images_as_tokens_mix_up_no_axes():
    model = explainer()
    batch = models.pixels(batch=17)  # a 4 x 4 grid and a class token are 17 tokens
    for recipe in ("clip-gradcam", "chefer-clip", "grad-eclip"):
        found = model.explain(batch, "a red dog", recipe)
        for number in (0, 9, 16):
            assert_same(found[number], model.explain(batch[number], "a red dog", recipe), 1e-5)


def test_a_custom_target_sees_every_text_of_the_call(pixels):
    model, shapes = explainer(), []

    def target(output):
        shapes.append(tuple(output.shape))
        return output[:, 0, 1] - output[:, 1, 1]

    found = model.explain(pixels, TEXTS[:2], target=target, relu="none")
    slow = Slow(model.adapter, pixels, TEXTS[:2])
    y = slow.logits[0, 0] - slow.logits[0, 1]
    assert shapes == [(2, 2, 2)]
    assert found[0].provenance["run"]["target_value"] == pytest.approx(y.item(), rel=1e-5)
    features, gradient = slow.at("vision", -1, "F1")[0, 1:], slow.gradient(y, "vision", -1, "F1")[0, 1:]
    assert_close(found[0].tokens, features @ gradient.mean(0), 2e-5)


def test_an_image_runs_once_for_many_texts_and_a_text_once_for_many_images(kind, calls):
    model, texts = explainer(kind), [f"{a} {b}" for a in ("red", "a") for b in ("dog", "on", "un", "grass", "and")]
    module = model.adapter.module
    vision, text = (calls(tower.encoder.layers[0]) for tower in (module.vision_model, module.text_model))
    for recipe in ("clip-gradcam", "chefer-clip-text", "legrad"):
        for rows in (vision, text):
            rows.clear()
        model.explain(photo(), texts, recipe)
        assert (vision, text) == ([1], [10])
        for rows in (vision, text):
            rows.clear()
        model.explain([photo(seed) for seed in range(5)], "a red dog", recipe)
        assert (vision, text) == ([5], [1])
    for rows in (vision, text):
        rows.clear()
    model.explain(
        [photo(seed) for seed in range(4)], ["red", "dog", "red", "dog"], scale="margin", against=["red", "a"]
    )
    assert (vision, text) == ([4], [3])


def test_asking_again_runs_no_text_again(calls):
    model = explainer()
    text = calls(model.adapter.module.text_model.encoder.layers[0])
    assert model.explain(photo(), "red", "pgc-scorecam", scale="margin", against=TEXTS).tokens.any()
    assert text == [3]


@pytest.mark.parametrize("recipe", ["pgc-scorecam", "vit-reciprocam", "tam-transition"])
def test_asking_again_or_along_a_path_is_of_each_pair_and_what_it_is_compared_with(recipe, pixels):
    model = explainer()
    images = torch.stack([pixels, models.pixels(1), pixels])
    found = model.explain(images, TEXTS, recipe, scale="margin", against=["un dog"])
    for image, text, each in zip(images, TEXTS, found, strict=True):
        assert_same(each, model.explain(image, text, recipe, scale="margin", against=["un dog"]), 1e-5)
    assert np.abs(found[0].tokens - found[2].tokens).max() > 1e-4


# Maps over the image


def one(explained, recipe, own=0, **choices):
    """A named recipe's signed map of one of four texts, and the library's run in float64."""
    model, pixels = explained
    relu = {"relu": "none"} if recipe in ("clip-gradcam", "gscorecam-gradcam", "grad-eclip") else {}
    return model.explain(pixels, FOUR, recipe, **relu, **choices)[own]


@pytest.fixture
def explained(pixels):
    return explainer(), pixels


@pytest.fixture
def slow(explained):
    model, pixels = explained
    return Slow(model.adapter, pixels, FOUR)


@pytest.mark.parametrize("own", [0, 1, 2])
def test_pgc_clip_softmax_is_grad_cam_of_the_softmax_over_the_prompts(explained, slow, own):
    y = slow.logits[0].softmax(0)[own]
    features, gradient = slow.at("vision", -1, "F1")[0, 1:], slow.gradient(y, "vision", -1, "F1")[0, 1:]
    signed = features @ gradient.mean(0)
    assert_close(one(explained, "pgc-clip-softmax", own, relu="none").tokens, signed, 2e-5)
    found = one(explained, "pgc-clip-softmax", own)
    np.testing.assert_allclose(found.tokens.reshape(-1), signed.detach().relu(), atol=1e-5 * signed.abs().max().item())


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_albef_itc_is_attention_times_its_positive_gradient_in_the_class_tokens_row(explained, slow, layer):
    attention = slow.at("vision", layer, "F2")[0]
    gradient = slow.gradient(slow.logits[0, 1], "vision", layer, "F2")[0]
    wanted = (attention * gradient.relu()).mean(0)[0, 1:]
    assert_close(one(explained, "albef-itc", 1, layer=layer).tokens, wanted)


def test_chefer_clip_equals_albef_itc_at_the_last_block(explained, slow):
    attention, y = slow.at("vision", -1, "F2")[0], slow.logits[0, 0]
    relevance = torch.eye(17) + (attention * slow.gradient(y, "vision", -1, "F2")[0]).relu().mean(0)
    found = one(explained, "chefer-clip")
    assert_close(found.tokens, relevance[0, 1:])
    assert_close(one(explained, "albef-itc", layer="last").tokens, found.tokens, 1e-6)
    assert np.abs(scaled(one(explained, "albef-itc", layer=1).tokens) - scaled(found.tokens)).max() > 0.05


def test_relevance_through_all_blocks_is_the_product_of_their_matrices(explained, slow):
    relevance = torch.eye(17, dtype=torch.float64)
    for layer in range(3):
        attention, gradient = (
            slow.at("vision", layer, "F2")[0],
            slow.gradient(slow.logits[0, 0], "vision", layer, "F2")[0],
        )
        relevance = relevance + (attention * gradient).relu().mean(0) @ relevance
    assert_close(one(explained, "chefer-generic").tokens, relevance[0, 1:])


def similar(slow, stream, row, place, text=0, over=None, layer=-1):
    """Cosine of one token's query with the keys of others, scaled to 0..1 over some of them."""
    query, keys = (slow.at(stream, layer, site)[text] for site in ("q", "k"))
    cosines = cosine_similarity(query[row], keys, dim=-1)
    among = cosines[place if over is None else over]
    return ((cosines - among.min()) / (among.max() - among.min()))[place]


@pytest.mark.parametrize("similarity", [True, False])
def test_grad_eclip_weights_values_by_the_gradient_of_what_heads_make_of_them(explained, slow, similarity):
    gradient = slow.gradient(slow.cosines[0, 2], "vision", -1, "F3_HEADS")[0]
    values = slow.at("vision", -1, "v")[0, 1:] @ gradient[0]
    changes = {} if similarity else {"weighting": "value*gradient"}
    shares = similar(slow, "vision", 0, range(1, 17)) if similarity else 1
    assert_close(one(explained, "grad-eclip", 2, **changes).tokens, values * shares)
    assert not gradient[1:].any()


def test_grad_eclip_over_several_blocks_adds_what_each_gives_behind_its_relu(explained, slow):
    total = 0
    for layer in (1, 2):
        gradient = slow.gradient(slow.cosines[0, 0], "vision", layer, "F3_HEADS")[0]
        values = slow.at("vision", layer, "v")[0, 1:] @ gradient[0]
        total = total + (values * similar(slow, "vision", 0, range(1, 17), layer=layer)).relu()
    model, pixels = explained
    found = model.explain(pixels, FOUR, "grad-eclip", layer=(1, 2), layer_rule="sum")[0]
    assert_close(found.tokens, total)


def test_gscorecams_grad_cam_weights_channels_by_the_class_tokens_gradient(explained, slow):
    gradient = slow.gradient(slow.logits[0, 1], "vision", -1, "F6")[0]
    assert not gradient[1:].any()
    assert_close(one(explained, "gscorecam-gradcam", 1).tokens, slow.at("vision", -1, "F6")[0, 1:] @ gradient[0])


def test_grad_eclips_baseline_reads_the_last_blocks_input_over_all_tokens(explained, slow):
    gradient = slow.gradient(slow.cosines[0, 1], "vision", -2, "F6")[0].mean(0)
    found = one(explained, "gradeclip-gradcam-baseline", 1, relu="none")
    assert_close(found.tokens, slow.at("vision", -2, "F6")[0, 1:] @ gradient)


def test_legrad_reads_each_block_as_the_mean_of_its_tokens(explained, slow):
    total = 0
    for layer in (1, 2):
        y = slow.embedded(slow.at("vision", layer, "F6")[0].mean(0)) @ slow.texts[1]
        total = total + slow.gradient(y, "vision", layer, "F2")[0].relu().mean((0, 1))[1:]
    assert_close(one(explained, "legrad", 1).tokens, total)


def test_legrad_of_the_models_own_score_at_the_last_block_is_its_class_tokens_row_over_all_tokens(explained, slow):
    own = {"gradient_path": "full", "layers": "last", "layer_rule": "single"}
    gradient = slow.gradient(slow.cosines[0, 1], "vision", -1, "F2")[0]
    assert not gradient[:, 1:].any()  # only the class token's query reaches the score
    found = one(explained, "legrad", 1, **own)
    assert_close(found.tokens, gradient[:, 0].relu().mean(0)[1:] / 17)
    assert_close(one(explained, "legrad", 1, queries="cls", **own).tokens, 17 * found.tokens)
    block = one(explained, "legrad", 1, layers="last", layer_rule="single")
    assert np.abs(scaled(block.tokens) - scaled(found.tokens)).max() > 0.05


def pooled(head, tokens):
    """What SigLIP's pooler makes of tokens [1, N, D], and its attention [heads, 1, N], written out."""
    attention = head.attention
    weights, biases = attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3)
    given = zip((head.probe, tokens, tokens), weights, biases, strict=True)
    parts = [(x @ w.T + b)[0].reshape(x.shape[1], attention.num_heads, -1).transpose(0, 1) for x, w, b in given]
    shares = (parts[0] @ parts[1].transpose(1, 2) / parts[0].shape[-1] ** 0.5).softmax(-1)
    state = attention.out_proj((shares @ parts[2]).transpose(0, 1).flatten(1))
    state = state + head.mlp(head.layernorm(state))
    return normalize(state, dim=-1)[0], shares


@pytest.mark.parametrize("bare", [False, True])
def test_the_pooler_of_siglip_reads_each_block_in_turn(bare, pixels):
    model = explainer("siglip")
    slow = Slow(model.adapter, pixels, FOUR)
    tower, total = slow.module.vision_model, 0
    for layer in (1, 2):
        tokens = slow.at("vision", layer, "F6").detach()
        made, shares = pooled(tower.head, tokens if bare else tower.post_layernorm(tokens))
        (gradient,) = torch.autograd.grad(made @ slow.texts[1], shares)
        total = total + gradient.relu().mean(0)[0]
    name = "legrad-pooler-as-coded" if bare else "legrad-pooler"
    assert_close(model.explain(pixels, FOUR, name)[1].tokens, total)


def test_the_poolers_own_attention_is_weighted_by_its_gradient(pixels):
    model = explainer("siglip")
    slow = Slow(model.adapter, pixels, FOUR)
    tower = slow.module.vision_model
    tokens = tower.post_layernorm(slow.at("vision", -1, "F6"))
    made, shares = pooled(tower.head, tokens)
    torch.testing.assert_close(made, slow.images[0])
    y = slow.scale * (made @ slow.texts[2]) + slow.module.logit_bias[0]
    at_attention, at_tokens = torch.autograd.grad(y, [shares, tokens])
    own = vlcam.recipes()["legrad-pooler"].recipe.replace(
        gradient_path="full", layers="last", layer_rule="single", weighting="attention*gradient", scale="logit"
    )
    found = model.explain(pixels, FOUR, own)[2]
    assert found.provenance["run"]["target_value"] == pytest.approx(y.item(), rel=1e-5)
    assert_close(found.tokens, (shares * at_attention.relu()).mean(0))
    context = vlcam.recipes()["clip-gradcam"].recipe.replace(site="CONTEXT", stream="pooler", relu="none")
    assert_close(model.explain(pixels, FOUR, context)[2].tokens, tokens[0] @ at_tokens[0].mean(0))


def test_two_ways_to_read_blocks_by_the_pooler_are_kept_apart_in_a_sweep(pixels):
    model = explainer("siglip")
    recipes = [
        vlcam.recipes()[name].recipe.replace(weighting="attention*gradient")
        for name in ("legrad-pooler", "legrad-pooler-as-coded")
    ]
    for recipe, found in zip(recipes, model.sweep(pixels, FOUR, recipes), strict=True):
        assert_same(found[0], model.explain(pixels, FOUR, recipe)[0])


def test_raw_attention_reads_the_attention_that_the_library_returns(kind, pixels):
    model = explainer(kind)
    row = Slow(model.adapter, pixels, TEXTS).at("vision", -1, "F2")[0].mean(0)
    wanted = row[0, 1:] if kind == "clip" else row.mean(0)
    assert_close(model.explain(pixels, "red", "raw-attention").tokens, wanted)


@pytest.mark.parametrize("recipe", ["clip-gradcam", "albef-itc", "chefer-clip", "grad-eclip", "gscorecam-gradcam"])
def test_logit_and_cosine_give_the_same_map_and_the_temperature_changes_nothing(recipe, pixels):
    model, hot = explainer(temperature=4), explainer(temperature=40)
    logit, cosine = (model.explain(pixels, TEXTS, recipe, scale=scale)[1] for scale in ("logit", "cosine"))
    assert_close(logit.tokens, 4 * cosine.tokens)  # a first-order map scales with the score
    np.testing.assert_allclose(scaled(logit.tokens), scaled(cosine.tokens), atol=1e-5)
    other = hot.explain(pixels, TEXTS, recipe, scale="logit")[1]
    np.testing.assert_allclose(scaled(other.tokens), scaled(logit.tokens), atol=1e-5)


def test_the_temperature_and_the_other_texts_change_a_map_of_the_probability(pixels):
    maps = [
        explainer(temperature=heat).explain(pixels, text, scale="probability", relu="none", against=others).tokens
        for heat, text, others in ((4, "a red dog", FOUR), (40, "a red dog", FOUR), (4, "a red dog", ["un"]))
    ]
    assert np.abs(scaled(maps[0]) - scaled(maps[1])).max() > 0.05
    assert np.abs(scaled(maps[0]) - scaled(maps[2])).max() > 0.05


def test_rolled_out_attention_is_the_same_for_every_text(pixels):
    first, second = explainer().explain(pixels, TEXTS[:2], "attention-rollout")
    np.testing.assert_array_equal(first.tokens, second.tokens)


def test_the_class_token_cannot_be_asked_of_a_model_that_has_none(pixels):
    with pytest.raises(RecipeError, match=r"class token|gradient_tokens='patches'"):
        explainer("siglip").explain(pixels, TEXTS, "grad-eclip")


@pytest.mark.parametrize("site", ["F3_HEADS", "F3", "F4", "F5", "F6"])
def test_behind_the_last_attention_patches_have_no_gradient_and_the_error_says_where_they_have(site, pixels):
    with pytest.raises(
        NoGradientError, match=rf"exactly zero on the patches; in this model {site} carries one in block 0, 1"
    ):
        explainer().explain(pixels, "red", site=site)


# Records


def test_the_record_names_what_a_text_was_compared_with(kind, pixels):
    model = explainer(kind)
    assert model.explain(pixels, TEXTS, scale="margin")[1].provenance["run"]["against"] == [TEXTS[0], TEXTS[2]]
    assert model.explain(pixels, TEXTS, scale="cosine")[1].provenance["run"]["against"] == [TEXTS[0], TEXTS[2]]
    assert model.explain(pixels, TEXTS[0], scale="cosine").provenance["run"]["against"] == []
    record = model.explain(pixels, TEXTS, scale="margin", against=["un"])[1].record()
    assert record["provenance"]["run"]["against"] == ["un"]
    assert record["scores"]["contrastive_margin"]["kind"] == "margin over 2 texts"


@pytest.mark.parametrize("recipe", ["pgc-clip-softmax", "clip-es", "pgc-finercam"])
def test_a_saved_map_of_a_compared_text_comes_out_again(recipe, tmp_path):
    model = explainer()
    found = model.explain(photo(), "a red dog", recipe, against=["red", "grass", "un"])
    path = found.save(tmp_path / "map.png")
    opened = vlcam.open(path)
    assert opened.recipe == found.recipe
    assert opened.record() == found.record()
    outcome = opened.verify(model)
    assert outcome.identical
    assert outcome.differences == ()


def test_a_map_that_was_compared_with_other_texts_is_not_the_same():
    model = explainer()
    found = model.explain(photo(), "a red dog", "pgc-clip-softmax", against=["red", "grass"], relu="none")
    run = found.provenance["run"] | {"against": ["red", "un"]}
    forged = dataclasses.replace(found, provenance={**found.provenance, "run": run})
    assert not forged.verify(model).reproduced


@pytest.mark.parametrize("recipe", ["clip-gradcam", "pgc-clip-softmax"])
def test_one_map_out_of_a_list_comes_out_again_alone(kind, recipe):
    model = explainer(kind)
    for found in model.explain(photo(), TEXTS, recipe, relu="none"):
        assert found.verify(model).reproduced


@pytest.mark.parametrize("recipe", ["clip-gradcam", "raw-attention", "chefer-clip"])
def test_one_map_out_of_a_list_comes_out_again_alone_with_its_scores(kind, recipe):
    model = explainer(kind)
    found = model.explain(photo(), TEXTS, recipe)[1]
    assert found.verify(model).differences == ()


# Images and models as they come


def test_images_of_other_modes_and_types_are_one_input(kind):
    model, picture = explainer(kind), photo()
    wanted = model.explain(picture, "red", relu="none")
    array = np.asarray(picture)
    for given in (array, picture.convert("RGBA"), picture.copy()):
        assert_same(model.explain(given, "red", relu="none"), wanted)
    for mode in ("L", "P", "LA", "1"):
        assert model.explain(picture.convert(mode), "red", relu="none").tokens.shape == (4, 4)


def test_a_crop_leaves_what_the_model_did_not_see_without_a_value():
    wide = photo(height=32, width=96)
    heatmap = explainer("clip").explain(wide, "a red dog", relu="none").heatmap
    assert heatmap.shape == (32, 96)
    assert np.isnan(heatmap[:, :30]).all()
    assert np.isnan(heatmap[:, 66:]).all()
    assert np.isfinite(heatmap[:, 34:62]).all()
    assert np.isfinite(explainer("siglip").explain(wide, "a red dog", relu="none").heatmap).all()


@pytest.mark.parametrize("recipe", ["clip-gradcam", "chefer-clip", "legrad"])
def test_a_grid_that_is_not_square_is_read_row_by_row(recipe, kind):
    model = explainer(kind, image_size=(32, 64), interpolate_pos_encoding=True)
    pixels = models.pixels(width=64)
    found = model.explain(pixels, TEXTS, recipe, relu="none" if recipe == "clip-gradcam" else "before_heads")[1]
    assert found.tokens.shape == (4, 8)
    slow = Slow(model.adapter, pixels, TEXTS, interpolate_pos_encoding=True)
    first = 1 if kind == "clip" else 0
    if recipe == "clip-gradcam":
        gradient = slow.gradient(slow.logits[0, 1], "vision", -1, "F1")[0, first:]
        assert_close(found.tokens, slow.at("vision", -1, "F1")[0, first:] @ gradient.mean(0))
    elif recipe == "chefer-clip":
        attention, gradient = slow.at("vision", -1, "F2")[0], slow.gradient(slow.logits[0, 1], "vision", -1, "F2")[0]
        product = (attention * gradient).relu().mean(0)
        rows = product[0] if kind == "clip" else (product + torch.eye(32)).mean(0)
        assert_close(found.tokens, rows[first:])
    assert model.explain(photo(), TEXTS[0], recipe).heatmap.shape == (40, 64)


@pytest.mark.parametrize("recipe", ["clip-gradcam", "chefer-clip", "chefer-clip-text", "legrad", "pgc-clip-softmax"])
def test_a_model_in_bfloat16_gives_finite_maps_near_those_of_float32(kind, recipe):
    full, half = explainer(kind, temperature=10), explainer(kind, temperature=10)
    half.adapter.module.to(torch.bfloat16)
    text = {"normalize": "none"} if recipe == "chefer-clip-text" else {}
    relu = {"relu": "none"} if recipe in ("clip-gradcam", "pgc-clip-softmax") else {}
    exact, found = (m.explain(photo(), TEXTS, recipe, **text, **relu)[1] for m in (full, half))
    assert found.tokens.dtype == np.float32
    assert np.isfinite(found.tokens).all()
    ranks = [np.argsort(np.argsort(each.tokens.reshape(-1))) for each in (exact, found)]
    assert np.corrcoef(*ranks)[0, 1] > 0.9
    assert found.provenance["model"]["dtype"] == "bfloat16"


@pytest.mark.parametrize("recipe", ["clip-gradcam", "chefer-clip-text", "legrad", "maskclip", "pgc-scorecam"])
def test_the_model_is_left_as_it_was_found(recipe, pixels):
    model = explainer()
    module = model.adapter.module.train()
    module.vision_model.encoder.layers[0].eval()
    for number, parameter in enumerate(module.parameters()):
        parameter.requires_grad_(number % 2 == 0)
        parameter.grad = torch.full_like(parameter, number) if number % 3 == 0 else None
    before = models.state(module)
    model.explain(pixels, TEXTS, recipe)
    models.assert_same(before, models.state(module))
    with pytest.raises(ZeroDivisionError):
        model.explain(pixels, TEXTS, target=lambda _: 1 / 0)
    models.assert_same(before, models.state(module))


def test_a_model_with_dropout_in_training_gives_the_same_map_twice(kind, pixels):
    model = explainer(kind)
    module = model.adapter.module
    for block in (*module.vision_model.encoder.layers, *module.text_model.encoder.layers):
        block.self_attn.dropout = 0.5
    calm = model.explain(pixels, TEXTS, "chefer-clip")[0]
    module.train()
    for _ in range(2):
        np.testing.assert_array_equal(model.explain(pixels, TEXTS, "chefer-clip")[0].tokens, calm.tokens)


@pytest.mark.parametrize("recipe", ["clip-gradcam", "albef-itc", "legrad", "chefer-clip-text", "agcam", "maskclip"])
def test_a_model_that_writes_its_attention_out_gives_the_same_maps(recipe, pixels):
    fused, written = explainer(), explainer(attention="eager")
    for one_, other in zip(fused.explain(pixels, TEXTS, recipe), written.explain(pixels, TEXTS, recipe), strict=True):
        assert_same(one_, other, 1e-5)
    assert written.adapter.module.config._attn_implementation == "eager"


# Many recipes


def test_a_sweep_gives_what_single_calls_give_in_few_passes(calls):
    model, picture = explainer(), photo()
    module = model.adapter.module
    names = fitting(model.adapter)
    assert len(names) >= 35
    vision, text = (calls(tower.encoder.layers[0]) for tower in (module.vision_model, module.text_model))
    swept = model.sweep(picture, TEXTS, empty="keep")
    # own, the patches' mean, detached, one head in either tower, values of the last block alone
    assert (vision, text) == ([1] * 6, [3] * 6)
    vision.clear()
    for name, together in zip(names, swept, strict=True):
        try:
            alone = model.explain(picture, TEXTS, name)
        except NoGradientError:
            alone = model.sweep(picture, TEXTS, [name], empty="keep")[0]
        for one_, other in zip(together, alone, strict=True):
            assert one_.recipe == other.recipe
            np.testing.assert_allclose(
                one_.tokens, other.tokens, rtol=0, atol=1e-4 * max(float(np.abs(other.tokens).max()), 1e-12)
            )
            assert one_.provenance["run"]["apart"] == pytest.approx(other.provenance["run"]["apart"], abs=1e-6)
            assert one_.provenance["run"]["against"] == other.provenance["run"]["against"]
            for name_, score in other.scores.items():
                assert one_.scores[name_].value == pytest.approx(score.value, abs=1e-5)
    assert len(vision) >= len(names)


def test_a_sweep_of_many_images_and_many_texts_gives_what_single_calls_give(kind):
    model, pictures = explainer(kind), [photo(0), photo(1), photo(0)]
    names = ["clip-gradcam", "pgc-clip-softmax", "legrad", "chefer-clip-text", "raw-attention", "agcam"]
    names += ["legrad-pooler", "legrad-pooler-as-coded", "pgc-finercam"] if kind == "siglip" else ["clip-es"]
    swept = model.sweep(pictures, TEXTS, names)
    for name, together in zip(names, swept, strict=True):
        for picture, text, found in zip(pictures, TEXTS, together, strict=True):
            assert_close_or_zero(found, model.explain(picture, text, name, against=TEXTS))


def assert_close_or_zero(found, wanted):
    atol = 1e-4 * max(float(np.abs(wanted.tokens).max()), 1e-12)
    np.testing.assert_allclose(found.tokens, wanted.tokens, rtol=0, atol=atol)


def test_a_sweep_is_of_phrases_alone_and_in_place_at_once(kind):
    model, text = explainer(kind), "a red dog"
    plain = vlcam.recipes()["chefer-clip"].recipe.replace(queries="cls" if kind == "clip" else "patches")
    recipes = [plain.replace(prompt=prompt) for prompt in ("phrase", "in_place", "phrase")]
    swept = model.sweep(photo(), text, recipes, phrase="dog")
    for recipe, found in zip(recipes, swept, strict=True):
        assert found.recipe.prompt == recipe.prompt
        assert_same(found, model.explain(photo(), text, recipe, phrase="dog"), 1e-6)
    assert np.abs(scaled(swept[0].tokens) - scaled(swept[1].tokens)).max() > 1e-3
    assert_same(swept[0], swept[2], 0)


FITS = (
    "clip",
    pytest.param(
        "siglip",
    ),
)


def test_a_sweep_by_default_skips_recipes_that_one_text_cannot_have(kind, pixels):
    swept = explainer(kind).sweep(pixels, "red", empty="keep")
    assert len(swept) > 30
    assert not {each.recipe.name for each in swept} & {"pgc-finercam", "clip-surgery"}


def test_every_recipe_that_is_said_to_fit_does(kind, pixels):
    model = explainer(kind)
    failing = []
    for name in fitting(model.adapter):
        try:
            model.sweep(pixels, TEXTS, [name], empty="keep")
        except RecipeError as error:
            failing.append(f"{name}: {error}")
    assert failing == []


def test_an_unknown_score_of_a_text_is_refused(pixels):
    with pytest.raises(RecipeError, match="does not offer it"):
        explainer().explain(pixels, "red", target="itm")
    with pytest.raises(RecipeError, match="'contrastive_patches', which this model does not offer"):
        explainer("siglip").explain(pixels, TEXTS, "clip-es")


def test_a_score_that_is_no_number_is_an_error(pixels):
    model = explainer()
    with torch.no_grad():
        model.adapter.module.logit_scale.fill_(float("nan"))
    with pytest.raises(EvidenceError, match="contrastive_logit is not finite"):
        model.explain(pixels, "red")


def test_pictures_of_no_text_are_refused():
    for missing in ("", "  ", None, [], ["red", ""]):
        with pytest.raises(InputError):
            explainer().explain(Image.new("RGB", (8, 8)), missing)
