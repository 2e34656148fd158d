"""Attention that is computed otherwise than in the model: one head, identity, values, hidden words; then as before."""

from __future__ import annotations

import threading

import models
import numpy as np
import pytest
import torch
from models import TEXTS, Slow, photo, two_towers
from torch.nn.functional import cosine_similarity

import vlcam
from vlcam.errors import InputError, RecipeError
from vlcam.explainer import Explainer

KINDS = ("clip", "siglip")
TEXT = "a red dog on a"


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def pixels():
    return models.pixels()


def explainer(kind="clip", **options):
    return Explainer(two_towers(kind, **options), "x")


def named(name, **changes):
    return vlcam.recipes()[name].recipe.replace(**changes)


def assert_close(found, expected, share=1e-5):
    found, expected = (np.asarray(torch.as_tensor(each).detach(), np.float64).reshape(-1) for each in (found, expected))
    assert np.abs(expected).max() > 0
    np.testing.assert_allclose(found, expected, rtol=0, atol=share * np.abs(expected).max())


def one_head(stream, layers):
    """The library's own attention with one head of full width in some blocks."""

    def change(module):
        tower = module.vision_model if stream == "vision" else module.text_model
        for layer in layers:
            attention = tower.encoder.layers[layer].self_attn
            attention.num_heads, attention.head_dim = 1, attention.embed_dim
            attention.scale = attention.embed_dim**-0.5

    return change


def identity(module):
    """The last vision block, in which every token attends to itself alone: what is mixed are its own values."""
    attention = module.vision_model.encoder.layers[-1].self_attn
    attention.forward = lambda hidden_states, **_: (attention.out_proj(attention.v_proj(hidden_states)), None)


def own_scores(model, pixels, texts):
    slow = Slow(model.adapter, pixels, texts)
    return slow.cosines[0].tolist(), slow.logits[0].tolist()


# One head


@pytest.mark.parametrize("own", [0, 1, 2])
def test_grad_eclip_as_coded_explains_the_last_block_with_one_head(own, pixels):
    model = explainer()
    slow = Slow(model.adapter, pixels, TEXTS, change=one_head("vision", [2]))
    gradient = slow.gradient(slow.cosines[0, own], "vision", -1, "F3_HEADS")[0, 0]
    query, keys, values = (slow.at("vision", -1, site)[0] for site in ("q", "k", "v"))
    cosines = cosine_similarity(query[0], keys[1:], dim=-1)
    shares = (cosines - cosines.min()) / (cosines.max() - cosines.min())
    found = model.explain(pixels, TEXTS, "grad-eclip-as-coded", relu="none")[own]
    assert_close(found.tokens, values[1:] @ gradient * shares)
    plain = model.explain(pixels, TEXTS, "grad-eclip", relu="none")[own]
    assert np.abs(found.tokens - plain.tokens).max() > 0.01 * np.abs(plain.tokens).max()


def test_the_baseline_of_grad_eclip_as_coded_changes_the_block_behind_its_site(pixels):
    model = explainer()
    slow = Slow(model.adapter, pixels, TEXTS, change=one_head("vision", [2]))
    gradient = slow.gradient(slow.cosines[0, 1], "vision", -2, "F6")[0].mean(0)
    wanted = slow.at("vision", -2, "F6")[0, 1:] @ gradient
    found = model.explain(pixels, TEXTS, "gradeclip-gradcam-baseline-as-coded", relu="none")[1]
    assert_close(found.tokens, wanted)


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("stream", ["vision", "text"])
def test_one_head_runs_from_the_first_block_that_is_read_to_the_last(kind, stream, layer, pixels):
    model = explainer(kind)
    slow = Slow(model.adapter, pixels, TEXTS, change=one_head(stream, range(layer, 3)))
    name = "chefer-clip" if stream == "vision" else "chefer-clip-text"
    found = model.explain(pixels, TEXTS, name, attention="one_head", layer=layer)[1]
    row, y = (1 if stream == "text" else 0), slow.logits[0, 1]
    product = (slow.at(stream, layer, "F2")[row] * slow.gradient(y, stream, layer, "F2")[row]).relu()
    assert product.shape[0] == 1  # heads
    relevance = torch.eye(product.shape[-1]) + product[0]
    if stream == "text":
        special = found.provenance["text"]["special"]
        place = [i for i, flag in enumerate(special) if not flag]
        wanted = relevance[found.provenance["run"]["pooled"]["position"], place]
    else:
        wanted = relevance[0, 1:] if kind == "clip" else relevance.mean(0)
    assert_close(found.tokens, wanted, 2e-5)
    assert found.provenance["run"]["target_value"] == pytest.approx(y.item(), rel=1e-5)


@pytest.mark.parametrize(
    "recipe", ["grad-eclip-as-coded", "gradeclip-gradcam-baseline-as-coded", "grad-eclip-text-as-coded"]
)
def test_scores_stay_the_models_own_while_the_target_is_that_of_the_changed_model(recipe, pixels):
    model = explainer()
    stream = "text" if "text" in recipe else "vision"
    slow = Slow(model.adapter, pixels, TEXTS, change=one_head(stream, [2]))
    cosines, logits = own_scores(model, pixels, TEXTS)
    for own, found in enumerate(model.explain(pixels, TEXTS, recipe)):
        run = found.provenance["run"]
        assert run["target_value"] == pytest.approx(slow.cosines[0, own].item(), rel=1e-5)
        assert float(found.scores["contrastive_cosine"]) == pytest.approx(cosines[own], abs=1e-6)
        assert float(found.scores["contrastive_logit"]) == pytest.approx(logits[own], abs=1e-5)
        share = np.exp(logits[own]) / np.exp(logits).sum()
        assert float(found.scores["contrastive_probability"]) == pytest.approx(share, rel=1e-5)
        assert abs(run["target_value"] - cosines[own]) > 1e-4


def test_one_head_is_what_a_block_with_one_head_has_anyway(pixels):
    model = explainer()
    for block in model.adapter.module.vision_model.encoder.layers:
        one_head("vision", range(3))(model.adapter.module)
        assert block.self_attn.num_heads == 1
    one, other = (model.explain(pixels, TEXTS, name, relu="none")[0] for name in ("grad-eclip", "grad-eclip-as-coded"))
    assert_close(one.tokens, other.tokens, 1e-6)


@pytest.mark.parametrize("recipe", ["grad-eclip-as-coded", "grad-eclip-text-as-coded"])
def test_heads_are_joined_where_attention_is_written_out(recipe, pixels):
    written, fused = explainer(attention="eager"), explainer()
    before = models.state(written.adapter.module)
    how = {"relu": "none", "weighting": "value*gradient"}
    for one, other in zip(*(model.explain(pixels, TEXTS, recipe, **how) for model in (written, fused)), strict=True):
        assert_close(one.tokens, other.tokens)
        values = [each.provenance["run"]["target_value"] for each in (one, other)]
        assert values[0] == pytest.approx(values[1], rel=1e-5)
    models.assert_same(before, models.state(written.adapter.module))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_one_head_on_the_scale_of_the_models_own_heads(attention, pixels):
    model = explainer(attention=attention)

    def change(module):
        one_head("vision", [2])(module)
        module.vision_model.encoder.layers[2].self_attn.scale = (12 // 2) ** -0.5

    slow = Slow(model.adapter, pixels, TEXTS, change=change)
    y = slow.cosines[0, 1]
    choices = {"relu": "none", "weighting": "value*gradient", "departures": "head_scale"}
    found = model.explain(pixels, TEXTS, "grad-eclip-as-coded", **choices)[1]
    assert found.provenance["run"]["target_value"] == pytest.approx(y.item(), rel=1e-5)
    gradient = slow.gradient(y, "vision", -1, "F3_HEADS")[0, 0]
    assert_close(found.tokens, slow.at("vision", -1, "v")[0, 1:] @ gradient)
    other, again = model.sweep(pixels, TEXTS[1], [found.recipe.replace(departures=()), found.recipe])
    assert_close(again.tokens, found.tokens)
    assert abs(other.provenance["run"]["target_value"] - y.item()) > 1e-4  # in a pass of its own


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("legrad", {"attention": "one_head"}),
        ("agcam", {"attention": "one_head"}),
        ("raw-attention", {"attention": "one_head"}),
        ("chefer-clip", {"attention": "identity"}),
        ("clip-gradcam", {"attention": "values"}),
        ("lavis-itm", {"attention": "one_head"}),
    ],
)
def test_forms_are_refused_where_they_mean_nothing(name, changes):
    with pytest.raises(RecipeError, match=f"attention='{changes['attention']}' with .*: choose from 'own'"):
        named(name, **changes)


# Identity


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_identity_lets_every_token_keep_its_own_value(attention, pixels):
    model = explainer(attention=attention)
    slow = Slow(model.adapter, pixels, TEXTS)
    block = slow.module.vision_model.encoder.layers[-1]
    state = slow.at("vision", -2, "F6")[0]
    state = state + block.self_attn.out_proj(slow.at("vision", -1, "v")[0])
    state = state + block.mlp(block.layer_norm2(state))
    wanted = slow.embedded(state)[1:] @ slow.texts.T
    cosines, _ = own_scores(model, pixels, TEXTS)
    for own, found in enumerate(model.explain(pixels, TEXTS, "maskclip")):
        assert_close(found.tokens, wanted[:, own])
        assert float(found.scores["contrastive_cosine"]) == pytest.approx(cosines[own], abs=1e-6)


def test_the_target_of_identity_is_the_class_tokens_score_behind_it(pixels):
    model = explainer()
    slow = Slow(model.adapter, pixels, TEXTS, change=identity)
    found = model.explain(pixels, TEXTS, "maskclip")[0]
    assert found.provenance["run"]["target_value"] == pytest.approx(slow.cosines[0, 0].item(), rel=1e-5)
    assert found.provenance["run"]["target_value"] != pytest.approx(float(found.scores["contrastive_cosine"]), abs=1e-3)


# Words that are hidden


def hidden_mask(model, text, words):
    """The library's attention mask with zeros at some words."""
    made = model.adapter.prepare_texts([text])
    layout = made.layouts[0]
    mask = torch.ones(1, made.tensors["input_ids"].shape[1], dtype=torch.long)
    for word in layout.words:
        if word.text in words:
            mask[0, list(word.tokens)] = 0
    return mask


def test_in_place_encodes_the_phrase_as_a_mask_over_the_other_words_does(kind, pixels):
    model = explainer(kind)
    mask = hidden_mask(model, TEXT, {"a", "on"})
    assert (mask == 0).sum() == (4 if kind == "clip" else 3)
    slow = Slow(model.adapter, pixels, [TEXT], mask=mask)
    found = model.explain(pixels, TEXT, "clip-gradcam", phrase="red dog", prompt="in_place", relu="none")
    assert found.provenance["run"]["target_value"] == pytest.approx(slow.logits[0, 0].item(), rel=1e-5)
    start = 1 if kind == "clip" else 0
    gradient = slow.gradient(slow.logits[0, 0], "vision", -1, "F1")[0, start:]
    assert_close(found.tokens, slow.at("vision", -1, "F1")[0, start:] @ gradient.mean(0))
    _, logits = own_scores(model, pixels, [TEXT])
    assert float(found.scores["contrastive_logit"]) == pytest.approx(logits[0], rel=1e-5)
    assert found.provenance["run"]["target_value"] != pytest.approx(logits[0], abs=1e-3)
    alone = model.explain(pixels, "red dog", "clip-gradcam")
    assert found.provenance["run"]["target_value"] != pytest.approx(float(alone.scores["contrastive_logit"]), abs=1e-3)


@pytest.mark.parametrize("layer", [0, -1])
def test_in_place_leaves_hidden_words_without_a_score(kind, layer, pixels):
    model = explainer(kind)
    mask = hidden_mask(model, TEXT, {"a", "on"})
    slow = Slow(model.adapter, pixels, [TEXT], mask=mask)
    found = model.explain(pixels, TEXT, "chefer-clip-text", layer=layer, phrase="red dog", prompt="in_place")
    attention, gradient = slow.at("text", layer, "F2")[0], slow.gradient(slow.logits[0, 0], "text", layer, "F2")[0]
    row = (attention * gradient).relu().mean(0)[found.provenance["run"]["pooled"]["position"]]
    place = [i for i, flag in enumerate(found.provenance["text"]["special"]) if not flag]
    assert_close(found.tokens, row[place])
    scores = {word.word: word.score for word in found.word_scores}
    assert scores["on"] == scores["a"] == 0
    assert scores["red"] > 0 or scores["dog"] > 0


def test_the_gradient_alone_leaves_nothing_at_hidden_words(kind, pixels):
    model = explainer(kind)
    recipe = named("chefer-clip-text", weighting="gradient", layer_rule="single", relu="none")
    found = model.explain(pixels, TEXT, recipe, phrase="red dog", prompt="in_place")
    for word in found.word_scores:
        assert (word.score == 0) == (word.word in ("a", "on"))


def test_in_place_on_a_model_that_writes_its_attention_out(kind, pixels):
    fused, written = explainer(kind), explainer(kind, attention="eager")
    for name in ("chefer-clip", "chefer-clip-text"):
        one, other = (
            model.explain(pixels, TEXT, name, phrase="red dog", prompt="in_place") for model in (fused, written)
        )
        assert_close(one.tokens, other.tokens)


def test_in_place_the_other_occurrence_is_hidden(kind, pixels):
    model, text = explainer(kind), "dog red dog"
    made = model.adapter.prepare_texts([text])
    values = []
    for occurrence in (1, 2):
        mask = torch.ones(1, made.tensors["input_ids"].shape[1], dtype=torch.long)
        for number, word in enumerate(made.layouts[0].words):
            if number != 2 * (occurrence - 1):
                mask[0, list(word.tokens)] = 0
        slow = Slow(model.adapter, pixels, [text], mask=mask)
        found = model.explain(pixels, text, phrase="dog", occurrence=occurrence, prompt="in_place")
        values.append(found.provenance["run"]["target_value"])
        assert values[-1] == pytest.approx(slow.logits[0, 0].item(), rel=1e-5)
    assert abs(values[0] - values[1]) > 1e-3  # positions differ


def test_texts_given_against_keep_all_their_words(kind, pixels):
    model = explainer(kind)
    found = model.explain(
        pixels, TEXT, "clip-gradcam", phrase="red dog", prompt="in_place", scale="margin", against=TEXTS[1:]
    )
    hidden = Slow(model.adapter, pixels, [TEXT], mask=hidden_mask(model, TEXT, {"a", "on"})).logits[0, 0]
    others = Slow(model.adapter, pixels, TEXTS[1:]).logits[0]
    assert found.provenance["run"]["target_value"] == pytest.approx((hidden - others.max()).item(), rel=1e-4)


def test_in_place_hides_nothing_of_a_phrase_that_is_the_whole_text(kind, pixels):
    model = explainer(kind)
    whole = model.explain(pixels, "red dog", "chefer-clip-text")
    found = model.explain(pixels, "red dog", "chefer-clip-text", phrase="red dog", prompt="in_place")
    assert_close(found.tokens, whole.tokens)
    assert found.provenance["run"]["span"] == [0, 7]


def test_one_head_and_hidden_words_go_together(pixels):
    model = explainer()
    mask = hidden_mask(model, TEXT, {"a", "on"})
    slow = Slow(model.adapter, pixels, [TEXT], mask=mask, change=one_head("text", [2]))
    found = model.explain(pixels, TEXT, "chefer-clip-text", attention="one_head", phrase="red dog", prompt="in_place")
    assert found.provenance["run"]["target_value"] == pytest.approx(slow.logits[0, 0].item(), rel=1e-5)
    product = slow.at("text", -1, "F2")[0] * slow.gradient(slow.logits[0, 0], "text", -1, "F2")[0]
    place = [i for i, flag in enumerate(found.provenance["text"]["special"]) if not flag]
    assert_close(found.tokens, product.relu()[0, found.provenance["run"]["pooled"]["position"], place])


def test_in_place_needs_a_text_tower(blip):
    model = vlcam.wrap(blip, models.processor(), name="x")
    with pytest.raises((InputError, RecipeError)):
        model.explain(photo(), "a red dog", phrase="dog", prompt="in_place")


# Afterwards


@pytest.mark.parametrize(
    ("recipe", "how"),
    [
        ("grad-eclip-as-coded", {}),
        ("grad-eclip-text-as-coded", {}),
        ("maskclip", {}),
        ("clip-surgery", {}),
        ("chefer-clip", {"phrase": "red", "prompt": "in_place"}),
    ],
)
def test_the_model_computes_as_before_afterwards(recipe, how, pixels):
    model = explainer()
    module = model.adapter.module
    texts = ["a red dog", "red un"]
    given = {"pixel_values": pixels[None], **model.adapter.prepare_texts(texts).tensors}
    with torch.no_grad():
        logits = module(**given).logits_per_image
    before = models.state(module)
    model.explain(pixels, texts, recipe, **how)
    models.assert_same(before, models.state(module))
    with torch.no_grad():
        assert torch.equal(module(**given).logits_per_image, logits)
    plain = model.explain(pixels, texts, "chefer-clip")[0]
    assert_close(plain.tokens, explainer().explain(pixels, texts, "chefer-clip")[0].tokens, 1e-9)


@pytest.mark.parametrize("name", ["grad-eclip-as-coded", "grad-eclip-text-as-coded"])
def test_the_model_computes_as_before_after_an_error_in_the_middle(name, pixels):
    model = explainer()
    module = model.adapter.module
    given = {"pixel_values": pixels[None], **model.adapter.prepare_texts(TEXTS).tensors}
    with torch.no_grad():
        logits = module(**given).logits_per_image
    before = models.state(module)

    def broken(_):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        model.explain(pixels, TEXTS, name, target=broken)
    with pytest.raises(KeyError, match="mine"):
        model.explain(pixels, "a red dog", "chefer-clip", target=broken, attention="one_head")
    models.assert_same(before, models.state(module))
    with torch.no_grad():
        assert torch.equal(module(**given).logits_per_image, logits)


def test_an_error_inside_the_changed_attention_leaves_nothing_behind(pixels):
    model = explainer()
    module = model.adapter.module
    before = models.state(module)
    out = module.vision_model.encoder.layers[-1].self_attn.out_proj
    handle = out.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.explain(pixels, TEXTS, "grad-eclip-as-coded")
    handle.remove()
    models.assert_same(before, models.state(module))
    assert_close(
        model.explain(pixels, TEXTS, "grad-eclip")[0].tokens, explainer().explain(pixels, TEXTS, "grad-eclip")[0].tokens
    )


def test_another_thread_runs_the_model_as_it_is(pixels):
    model = explainer()
    module = model.adapter.module
    given = {"pixel_values": pixels[None], **model.adapter.prepare_texts(TEXTS).tensors}
    with torch.no_grad():
        logits = module(**given).logits_per_image
    wanted = model.explain(pixels, TEXTS, "grad-eclip-as-coded")[0]
    seen, mine = [], threading.get_ident()

    def elsewhere():
        with torch.no_grad():
            seen.append(module(**given).logits_per_image)

    def in_the_middle(*_):  # the last block is yet to come, its attention already changed
        if threading.get_ident() == mine and not seen:
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()

    handle = module.vision_model.encoder.layers[1].register_forward_hook(in_the_middle)
    found = model.explain(pixels, TEXTS, "grad-eclip-as-coded")[0]
    handle.remove()
    (other,) = seen
    assert torch.equal(other, logits)
    np.testing.assert_array_equal(found.tokens, wanted.tokens)


def test_a_sweep_of_several_forms_keeps_them_apart(pixels):
    model = explainer()
    names = ["grad-eclip", "grad-eclip-as-coded", "maskclip", "chefer-clip", "grad-eclip-text-as-coded", "grad-eclip"]
    swept = model.sweep(pixels, TEXTS[:2], names, empty="keep")
    for name, found in zip(names, swept, strict=True):
        alone = model.sweep(pixels, TEXTS[:2], [name], empty="keep")[0]
        for one, other in zip(found, alone, strict=True):
            np.testing.assert_allclose(
                one.tokens, other.tokens, rtol=0, atol=1e-5 * max(1e-12, np.abs(other.tokens).max())
            )
            assert one.provenance["run"]["target_value"] == pytest.approx(other.provenance["run"]["target_value"])


@pytest.mark.parametrize("name", ["grad-eclip-as-coded", "maskclip", "grad-eclip-text-as-coded"])
def test_maps_of_changed_attention_say_so_and_come_out_again(name, tmp_path):
    model = explainer()
    found = model.explain(photo(), "a red dog", name, relu="none")
    assert found.provenance["model"]["attention"]["used"].startswith("explicit softmax in tapped blocks")
    opened = vlcam.open(found.save(tmp_path / "form.png"))
    outcome = opened.verify(model)
    assert outcome.identical
    assert outcome.differences == ()
    assert opened.recipe.attention == named(name).attention


def test_half_precision_stands_one_head_and_hidden_words(kind):
    full, half = explainer(kind), explainer(kind)
    half.adapter.module.to(torch.bfloat16)
    for name in ("chefer-clip", "chefer-clip-text"):
        how = {"attention": "one_head", "phrase": "red dog on", "prompt": "in_place", "normalize": "none"}
        exact, found = (model.explain(photo(), TEXT, name, **how) for model in (full, half))
        assert found.tokens.dtype == np.float32
        assert np.isfinite(found.tokens).all()
        assert np.corrcoef(exact.tokens.reshape(-1), found.tokens.reshape(-1))[0, 1] > 0.9
