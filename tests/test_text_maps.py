"""Maps over the words of a text: by hand in float64, what is reported apart, files, phrases, texts that are cut."""

from __future__ import annotations

import models
import numpy as np
import pytest
import torch
from models import TEXTS, Slow, photo, two_towers
from PIL import Image
from torch.nn.functional import cosine_similarity

import vlcam
from vlcam.errors import InputError, RecipeError, UnknownNameError
from vlcam.evidence import NoGradientError
from vlcam.explainer import Explainer
from vlcam_adapters.clip_text import TextWarning

KINDS = ("clip", "siglip")
OF_TEXT = ("chefer-clip-text", "grad-eclip-text", "grad-eclip-text-as-coded")
PHRASED = "a red dog on a dog"
LONG = "a red dog a red dog a red dog a red dog a red dog"


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def pixels():
    return models.pixels()


def explainer(kind="clip", **options):
    return Explainer(two_towers(kind, **options), "x")


def on_text(**changes):
    """Attention of the text tower, weighted by its gradient; the row of the pooled token, by default."""
    return vlcam.recipes()["chefer-clip-text"].recipe.replace(**{"name": "text", "layer_rule": "single", **changes})


def features_of_text(**changes):
    own = {"name": "text", "attention": "own", "weighting": "gradcam", "gradient_tokens": "all", "relu": "none"}
    return vlcam.recipes()["grad-eclip-text"].recipe.replace(**{**own, **changes})


def assert_close(found, expected, share=1e-5):
    found, expected = (np.asarray(torch.as_tensor(each).detach(), np.float64).reshape(-1) for each in (found, expected))
    assert np.abs(expected).max() > 0
    np.testing.assert_allclose(found, expected, rtol=0, atol=share * np.abs(expected).max())


def layout(adapter, text):
    """How many tokens stand for a text, and which of them for its words; the position that is pooled."""
    made = adapter.prepare_texts([text])
    special = made.layouts[0].special
    return len(special), [i for i, flag in enumerate(special) if not flag], made.pooled[0]


def everything(found):
    """The sum of all that a map over words holds, shown or apart."""
    return float(found.tokens.sum()) + sum(found.provenance["run"]["apart"].values())


def similarities(slow, own, row, over):
    query, keys = (slow.at("text", -1, site)[own] for site in ("q", "k"))
    cosines = cosine_similarity(query[row], keys, dim=-1)
    return (cosines - cosines[over].min()) / (cosines[over].max() - cosines[over].min())


def with_one_head(module):
    """The last text block with one head of full width, in the library's own code."""
    attention = module.text_model.encoder.layers[-1].self_attn
    attention.num_heads, attention.head_dim = 1, attention.embed_dim
    attention.scale = attention.embed_dim**-0.5


# By hand


@pytest.mark.parametrize("own", [0, 1])
def test_chefer_clip_text_is_the_pooled_tokens_row_of_weighted_attention(kind, own, pixels):
    model = explainer(kind)
    found = model.explain(pixels, TEXTS, "chefer-clip-text")[own]
    slow = Slow(model.adapter, pixels, TEXTS)
    attention, gradient = slow.at("text", -1, "F2")[own], slow.gradient(slow.logits[0, own], "text", -1, "F2")[own]
    relevance = torch.eye(len(attention[0])) + (attention * gradient).relu().mean(0)
    count, place, pooled = layout(model.adapter, TEXTS[own])
    pooled = pooled if kind == "clip" else 11
    assert_close(found.tokens, relevance[pooled, place])
    assert everything(found) == pytest.approx(relevance[pooled].sum().item(), rel=1e-5)
    run = found.provenance["run"]
    assert run["rows"] == [pooled]
    assert run["target_value"] == pytest.approx(slow.logits[0, own].item(), rel=1e-5)
    last = relevance[pooled, count - 1].item()
    assert run["apart"]["<|endoftext|>" if kind == "clip" else "</s>"] == pytest.approx(last, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("own", [0, 1])
@pytest.mark.parametrize("as_coded", [False, True])
def test_grad_eclip_text_weights_values_by_the_gradient_at_the_pooled_token(kind, own, as_coded, pixels):
    model = explainer(kind)
    name = "grad-eclip-text-as-coded" if as_coded else "grad-eclip-text"
    found = model.explain(pixels, TEXTS, name, relu="none")[own]
    slow = Slow(model.adapter, pixels, TEXTS, change=with_one_head if as_coded else None)
    width = slow.tensors["input_ids"].shape[1]
    count, place, pooled = layout(model.adapter, TEXTS[own])
    pooled = pooled if kind == "clip" else 11
    gradient = slow.gradient(slow.cosines[0, own], "text", -1, "F3_HEADS")[own]
    shares = similarities(slow, own, pooled, range(count))
    values = slow.at("text", -1, "v")[own] @ gradient[pooled] * shares
    assert_close(found.tokens, values[place])
    reach = values[: count if kind == "clip" else width]  # padding behind the end token is read by nothing
    beside = found.provenance["run"]["apart"].get("padding", 0) if kind == "clip" else 0
    assert everything(found) - beside == pytest.approx(reach.sum().item(), rel=1e-4, abs=1e-6)
    rectified = model.explain(pixels, TEXTS, name)[own].tokens[0]
    np.testing.assert_allclose(rectified, values[place].detach().relu(), atol=1e-5 * values.abs().max().item())
    assert found.provenance["run"]["target_value"] == pytest.approx(slow.cosines[0, own].item(), rel=1e-5)


def test_relevance_through_all_text_blocks_is_the_product_of_their_matrices(kind, pixels):
    model = explainer(kind)
    found = model.explain(pixels, TEXTS, "chefer-clip-text", layer="all")[1]
    slow = Slow(model.adapter, pixels, TEXTS)
    relevance = torch.eye(slow.tensors["input_ids"].shape[1], dtype=torch.float64)
    for layer in range(3):
        attention, gradient = slow.at("text", layer, "F2")[1], slow.gradient(slow.logits[0, 1], "text", layer, "F2")[1]
        relevance = relevance + (attention * gradient).relu().mean(0) @ relevance
    _, place, pooled = layout(model.adapter, TEXTS[1])
    assert_close(found.tokens, relevance[pooled if kind == "clip" else 11, place])


@pytest.mark.parametrize("queries", ["pooled", "all"])
def test_the_gradient_alone_leaves_nothing_at_keys_that_are_masked(kind, queries, pixels):
    model = explainer(kind)
    found = model.explain(pixels, TEXTS, on_text(weighting="gradient", queries=queries, layers=(1,), relu="none"))
    slow = Slow(model.adapter, pixels, TEXTS)
    for own, each in enumerate(found):
        gradient = slow.gradient(slow.logits[0, own], "text", 1, "F2")[own]
        width = gradient.shape[-1]
        if kind == "clip":  # a key behind the query has a gradient, but no attention
            assert gradient.triu(1).abs().max() > 1e-4
            gradient = gradient.tril()
        count, place, pooled = layout(model.adapter, TEXTS[own])
        rows = range(count) if queries == "all" else [pooled if kind == "clip" else 11]
        columns = gradient.mean(0)[rows].mean(0)
        assert_close(each.tokens, columns[place])
        apart = each.provenance["run"]["apart"]
        if kind == "clip":
            assert apart.get("padding", 0.0) == 0.0
        else:
            padding = [i for i in range(count, width) if i != 11]
            assert apart["padding"] == pytest.approx(columns[padding].sum().item(), rel=1e-4, abs=1e-8)
            assert apart["padding"] != 0


@pytest.mark.parametrize("site", ["F1", "F3_HEADS", "F3", "F4", "F5", "F6"])
@pytest.mark.parametrize("tokens", ["pooled", "all"])
def test_features_of_the_text_tower_are_weighted_by_their_gradient(kind, site, tokens, pixels):
    model = explainer(kind)
    recipe = features_of_text(site=site, layers=(1,), gradient_tokens=tokens)
    found = model.explain(pixels, TEXTS, recipe)[0]
    slow = Slow(model.adapter, pixels, TEXTS)
    gradient, features = slow.gradient(slow.cosines[0, 0], "text", 1, site)[0], slow.at("text", 1, site)[0]
    count, place, pooled = layout(model.adapter, TEXTS[0])
    pool = range(count) if tokens == "all" else [pooled if kind == "clip" else 11]
    assert_close(found.tokens, features[place] @ gradient[pool].mean(0), 2e-5)


@pytest.mark.parametrize("weighting", ["layercam", "hirescam", "elementwise"])
def test_elements_of_the_text_tower_are_weighted_one_by_one(kind, weighting, pixels):
    model = explainer(kind)
    recipe = features_of_text(site="F1", weighting=weighting, gradient_tokens="none")
    found = model.explain(pixels, TEXTS, recipe)[1]
    slow = Slow(model.adapter, pixels, TEXTS)
    gradient, features = slow.gradient(slow.cosines[0, 1], "text", -1, "F1")[1], slow.at("text", -1, "F1")[1]
    product = {
        "layercam": gradient.relu() * features,
        "hirescam": gradient * features,
        "elementwise": (gradient * features).relu(),
    }[weighting]
    _, place, _ = layout(model.adapter, TEXTS[1])
    assert_close(found.tokens, product.sum(-1)[place])
    assert everything(found) == pytest.approx(product.sum().item(), rel=1e-4)


def test_heads_of_the_text_tower_are_weighted_by_the_mean_gradient_of_the_text(kind, pixels):
    model = explainer(kind)
    recipe = on_text(weighting="head_weights", gradient_tokens="all", relu="none", layers=(1,), queries="all")
    found = model.explain(pixels, TEXTS, recipe)[0]
    slow = Slow(model.adapter, pixels, TEXTS)
    attention, gradient = slow.at("text", 1, "F2")[0], slow.gradient(slow.logits[0, 0], "text", 1, "F2")[0]
    gradient = gradient.tril() if kind == "clip" else gradient
    count, place, _ = layout(model.adapter, TEXTS[0])
    weights = gradient[:, :count, :count].mean((1, 2))
    wanted = (attention[:, :count] * weights[:, None, None]).mean(0).mean(0)
    assert_close(found.tokens, wanted[place])


@pytest.mark.parametrize(
    "changes",
    [
        {"weighting": "eigencam", "target": "none", "scale": "none", "gradient_path": "none"},
        {"weighting": "eigengradcam"},
        {"weighting": "attention", "layers": "all", "layer_rule": "rollout", "discard": 0.5, "relu": "none"},
    ],
    ids=["eigencam", "eigengradcam", "rollout that discards"],
)
def test_no_map_over_words_depends_on_how_far_a_text_is_padded(changes, pixels):
    model = explainer()
    make = on_text if changes["weighting"] == "attention" else features_of_text
    own = {} if changes["weighting"] == "attention" else {"site": "F1", "gradient_tokens": "none"}
    recipe = make(**own, **changes)
    together = model.explain(pixels, TEXTS, recipe)[0]
    assert_close(together.tokens, model.explain(pixels, TEXTS[0], recipe).tokens)


def test_attention_of_the_text_tower_needs_no_score(kind, pixels):
    model = explainer(kind)
    recipe = on_text(weighting="attention", relu="none")
    found = model.explain(pixels, TEXTS, recipe)[1]
    slow = Slow(model.adapter, pixels, TEXTS)
    _, place, pooled = layout(model.adapter, TEXTS[1])
    assert_close(found.tokens, slow.at("text", -1, "F2")[1].mean(0)[pooled if kind == "clip" else 11, place])
    assert everything(found) == pytest.approx(1)
    assert found.provenance["run"]["target_value"] is None


def test_a_custom_target_of_the_text_is_differentiated_too(pixels):
    model = explainer()
    recipe = on_text(layers=(0,))
    found = model.explain(pixels, TEXTS[0], recipe, target=lambda output: output[:, 0, 0] ** 2)
    slow = Slow(model.adapter, pixels, TEXTS[:1])
    y = slow.cosines[0, 0] ** 2
    wanted = (slow.at("text", 0, "F2")[0] * slow.gradient(y, "text", 0, "F2")[0]).relu().mean(0)
    _, place, pooled = layout(model.adapter, TEXTS[0])
    assert_close(found.tokens, wanted[pooled, place], 2e-5)


@pytest.mark.parametrize("scale", ["probability", "margin", "difference"])
def test_a_text_that_is_compared_is_explained_through_its_own_tokens_alone(scale, pixels):
    """The other texts are what it is compared with; how they came to be is not asked."""
    model = explainer()
    found = model.explain(pixels, TEXTS[0], "chefer-clip-text", scale=scale, against=TEXTS)
    slow = Slow(model.adapter, pixels, TEXTS)
    logits, cosines = slow.logits[0], slow.cosines[0]
    y = {
        "probability": logits.softmax(0)[0],
        "margin": logits[0] - logits[1:].max(),
        "difference": cosines[0] - cosines[1:].mean(),
    }[scale]
    wanted = (slow.at("text", -1, "F2")[0] * slow.gradient(y, "text", -1, "F2")[0]).relu().mean(0)
    _, place, pooled = layout(model.adapter, TEXTS[0])
    assert_close(found.tokens, wanted[pooled, place], 2e-5)
    assert found.provenance["run"]["against"] == TEXTS[1:]


# Words, and what is apart


def test_word_scores_are_sums_over_the_pieces_of_words_as_typed(pixels):
    text = "A red, dog on GRASS"[:19]
    model = explainer()
    found = model.explain(pixels, text.replace(",", ""), on_text(layers=(1,)))
    pieces = found.provenance["text"]["pieces"]
    assert pieces == ["<|startoftext|>", "a</w>", "red</w>", "dog</w>", "o", "n</w>", *"gras", "s</w>", "<|endoftext|>"]
    words = found.word_scores
    assert [(w.word, w.rows) for w in words] == [
        ("A", (1,)),
        ("red", (2,)),
        ("dog", (3,)),
        ("on", (4, 5)),
        ("GRASS", (6, 7, 8, 9, 10)),
    ]
    typed = found.text
    assert [typed[slice(*w.span)] for w in words] == [w.word for w in words]
    for word in words:
        assert word.score == pytest.approx(float(found.tokens[0, [row - 1 for row in word.rows]].sum()), rel=1e-6)
    assert sum(word.score for word in words) == pytest.approx(float(found.tokens.sum()), rel=1e-6)
    assert words[-1].score > 0


def test_words_of_a_model_without_a_start_token_begin_at_its_first_token(pixels):
    found = explainer("siglip").explain(pixels, "a dog on grass", "chefer-clip-text")
    assert [(w.word, w.rows) for w in found.word_scores] == [("a", (0,)), ("dog", (1,)), ("on", (2,)), ("grass", (3,))]
    assert [w.score for w in found.word_scores] == pytest.approx(found.tokens[0].tolist())


def test_start_end_and_padding_are_reported_apart_and_never_shown(kind, pixels):
    model = explainer(kind)
    found = model.explain(pixels, TEXTS, "chefer-clip-text")[0]
    run = found.provenance["run"]
    names = {"clip": ["<|startoftext|>", "<|endoftext|>"], "siglip": ["</s>", "pooled position", "padding"]}
    assert [name for name, value in run["apart"].items() if value] == names[kind]
    assert found.tokens.shape == (1, 3)
    assert run["grid"] == [1, 3]
    pooled = {"clip": {"position": 4, "piece": "<|endoftext|>"}, "siglip": {"position": 11, "piece": None}}
    assert run["pooled"] == pooled[kind]
    (dropped,) = run["dropped"]
    assert (dropped["what"], dropped["why"]) == ("text tokens", "reported apart")
    hidden = {"clip": range(5), "siglip": range(12)}  # behind the end token causal attention reads nothing
    assert set(hidden[kind]) - set(dropped["tokens"]) == {"clip": {1, 2, 3}, "siglip": {0, 1, 2}}[kind]
    assert not {"clip": {1, 2, 3}, "siglip": {0, 1, 2}}[kind] & set(dropped["tokens"])
    # The identity of the relevance lies at the pooled token, not at a word.
    assert run["apart"][{"clip": "<|endoftext|>", "siglip": "pooled position"}[kind]] >= 1


def test_maps_over_the_image_name_the_pooled_position_too(kind, pixels):
    run = explainer(kind).explain(pixels, "red", "chefer-clip").provenance["run"]
    assert run["pooled"]["position"] == {"clip": 2, "siglip": 11}[kind]
    assert run["apart"] == {}


@pytest.mark.parametrize("recipe", ["chefer-clip-text", "grad-eclip-text", "grad-eclip-text-as-coded"])
def test_texts_of_one_call_are_what_each_is_alone_however_they_are_padded(kind, recipe, pixels):
    model = explainer(kind)
    relu = "none" if "eclip" in recipe else "before_heads"
    texts = [*TEXTS[:2], "dog un"]
    for text, found in zip(texts, model.explain(pixels, texts, recipe, relu=relu), strict=True):
        alone = model.explain(pixels, text, recipe, relu=relu)
        assert_close(found.tokens, alone.tokens)
        assert [w.word for w in found.word_scores] == [w.word for w in alone.word_scores]
        own, other = (each.provenance["run"]["apart"] for each in (found, alone))
        for name, value in other.items():
            assert own[name] == pytest.approx(value, rel=1e-4, abs=1e-6)


def test_n_images_with_n_texts_give_the_maps_of_each_pair(kind):
    model, pictures = explainer(kind), [photo(seed) for seed in range(3)]
    texts = [TEXTS[1], TEXTS[0], TEXTS[1]]
    for picture, text, found in zip(pictures, texts, model.explain(pictures, texts, "chefer-clip-text"), strict=True):
        alone = model.explain(picture, text, "chefer-clip-text")
        assert_close(found.tokens, alone.tokens)
        assert found.text == text


def test_other_images_give_a_text_other_word_scores(pixels):
    first, second = explainer().explain([pixels, models.pixels(1)], TEXTS[1], "chefer-clip-text")
    shares = [each.tokens[0] / each.tokens.sum() for each in (first, second)]
    assert np.abs(shares[0] - shares[1]).max() > 1e-4


def test_a_special_token_that_was_typed_is_apart_and_not_lost(pixels):
    model = explainer()
    text = "red <|startoftext|> dog"
    found = model.explain(pixels, text, "chefer-clip-text")
    slow = Slow(model.adapter, pixels, [text])
    row = slow.at("text", -1, "F2")[0] * slow.gradient(slow.logits[0, 0], "text", -1, "F2")[0]
    assert everything(found) == pytest.approx(1 + row.relu().mean(0)[4].sum().item(), rel=1e-5)


def test_a_text_without_words_is_refused(pixels):
    with pytest.raises(RecipeError, match="no token of the text '</s>' stands for a word"):
        explainer("siglip").explain(pixels, "</s>", "chefer-clip-text")


@pytest.mark.parametrize("site", ["F3_HEADS", "F3", "F4", "F5", "F6"])
def test_words_without_a_gradient_behind_the_last_attention_are_an_error(site, kind, pixels):
    recipe = features_of_text(site=site, weighting="hirescam", gradient_tokens="none")
    with pytest.raises(NoGradientError, match=f"{site} of text block 2 is exactly zero"):
        explainer(kind).explain(pixels, TEXTS[0], recipe)


# What has no place on an image


def test_maps_over_words_have_no_heatmap_and_say_what_there_is(kind, pixels):
    found = explainer(kind).explain(pixels, TEXTS[0], "chefer-clip-text")
    assert found.status == "ok"
    assert repr(found) == "<Explanation of 'a red dog' by chefer-clip-text, 3 text tokens, ok>"
    with pytest.raises(RecipeError, match=r"map over the words of the text.*read word_scores, or draw overlay\(\)"):
        found.heatmap  # noqa: B018
    with pytest.raises(RecipeError, match="map over the words"):
        found.peak()
    with pytest.raises(UnknownNameError, match="scores of words are in word_scores"):
        found.words["red"]
    assert len(found.words) == 0
    assert found.word_maps == ()


def test_maps_over_the_image_have_no_word_scores(pixels):
    with pytest.raises(RecipeError, match="stream='text', for example 'chefer-clip-text'"):
        explainer().explain(pixels, "red").word_scores  # noqa: B018


def test_a_map_over_words_is_drawn_as_its_text(kind):
    found = explainer(kind).explain(photo(), TEXTS[1], "chefer-clip-text")
    picture = found.overlay()
    assert isinstance(picture, Image.Image)
    assert picture.mode == "RGB"
    assert len(np.unique(np.asarray(picture).reshape(-1, 3), axis=0)) > 10
    assert found._repr_png_().startswith(b"\x89PNG")
    assert len(found.figure().axes) == 2
    assert found.picture().size == (64, 40)


def test_a_map_of_one_word_alone_is_constant_and_keeps_its_score():
    found = explainer().explain(photo(), "red", "chefer-clip-text")
    assert found.status == "constant"
    assert found.word_scores[0].score == float(found.tokens[0, 0]) > 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"upsample": "bilinear"}, "upsample='bilinear' with stream='text': choose from 'none'"),
        ({"reshape": "raster"}, "reshape='raster' with stream='text': choose from 'words'"),
        ({"exclude": ("special_text",)}, r"exclude=\('special_text',\) with stream='text'"),
        ({"queries": "cls"}, "queries='cls'.*choose from 'pooled', 'all'"),
        ({"map_axis": "queries"}, "map_axis='queries' with stream='text': choose from 'keys'"),
        ({"target": "itm"}, "target='itm' with stream='text': choose from 'contrastive'"),
        ({"gradient_path": "block"}, "gradient_path='block' with stream='text'"),
        ({"weighting": "head_weights", "gradient_tokens": "patches"}, "gradient_tokens='patches'"),
    ],
)
def test_choices_that_belong_to_images_are_refused_for_texts(changes, words):
    with pytest.raises(RecipeError, match=words):
        on_text(**changes)


@pytest.mark.parametrize("weighting", ["scorecam", "similarity", "surgery"])
def test_texts_are_neither_asked_nor_compared_token_by_token(weighting):
    with pytest.raises(RecipeError, match="weighting="):
        features_of_text(site="F1", weighting=weighting, gradient_tokens="none", gradient_path="none")


def test_rows_by_number_are_those_of_the_text(pixels):
    model = explainer()
    found = model.explain(pixels, TEXTS[0], on_text(layers=(1,), queries=(-1,)))
    assert_close(found.tokens, model.explain(pixels, TEXTS[0], on_text(layers=(1,))).tokens)
    with pytest.raises(RecipeError, match="there are rows 0 to 4"):
        model.explain(pixels, TEXTS[0], on_text(queries=(5,)))


def test_models_without_a_text_tower_say_so(blip):
    model = vlcam.wrap(blip, models.processor(), name="x")
    with pytest.raises(UnknownNameError, match="no stream 'text'"):
        model.explain(photo(), "a dog", "chefer-clip-text")
    with pytest.raises(UnknownNameError, match="no stream 'text'"):
        vlcam.wrap(models.classifier("vit"), name="x").explain(photo(), recipe="chefer-clip-text")


# Files


@pytest.mark.parametrize("recipe", ["chefer-clip-text", "grad-eclip-text-as-coded"])
def test_a_saved_map_over_words_opens_with_its_scores_and_comes_out_again(kind, recipe, tmp_path):
    model = explainer(kind)
    found = model.explain(photo(), TEXTS[1], recipe, relu="none" if "eclip" in recipe else "before_heads")
    opened = vlcam.open(found.save(tmp_path / "text.png"))
    np.testing.assert_array_equal(opened.tokens, found.tokens)
    assert opened.recipe == found.recipe
    assert opened.word_scores == found.word_scores
    assert opened.record() == found.record()
    assert opened.overlay().tobytes() == found.overlay().tobytes()
    outcome = opened.verify(model)
    assert outcome.identical
    assert outcome.differences == ()
    with pytest.raises(RecipeError, match="map over the words"):
        opened.heatmap  # noqa: B018


def test_a_saved_map_over_words_without_its_image_needs_it_to_be_verified(tmp_path):
    model = explainer()
    path = model.explain(photo(), TEXTS[1], "chefer-clip-text").save(tmp_path / "text.png", embed_image=False)
    with pytest.raises(InputError, match="image="):
        vlcam.open(path).verify(model)
    assert vlcam.open(path).verify(model, image=photo()).identical
    assert len(vlcam.open(path).word_scores) == 4


def test_another_model_does_not_reproduce_word_scores():
    found = explainer().explain(photo(), TEXTS[1], "chefer-clip-text")
    outcome = found.verify(explainer(seed=2))
    assert not outcome.reproduced
    assert any("weights_sha256" in line for line in outcome.differences)


def test_one_text_out_of_a_list_is_reproduced_alone(kind):
    model = explainer(kind)
    for found in model.explain(photo(), TEXTS, "chefer-clip-text"):
        assert found.verify(model).reproduced


def test_one_text_out_of_a_list_is_verified_without_differences(kind):
    model = explainer(kind)
    assert model.explain(photo(), TEXTS, "chefer-clip-text")[0].verify(model).differences == ()


# Texts that do not fit


def test_words_that_were_cut_off_have_no_score_and_are_listed(kind, pixels):
    model = explainer(kind)
    found = model.explain(pixels, LONG, "chefer-clip-text")
    record = found.provenance["text"]
    read = 10 if kind == "clip" else 11
    assert [w.word for w in found.word_scores] == LONG.split()[:read]
    assert record["cut"] == LONG.split()[read:]
    assert record["cut_text"] == " ".join(LONG.split()[read:])
    assert found.tokens.shape == (1, read)
    assert found.provenance["run"]["pooled"]["position"] == 11
    assert isinstance(found.overlay(), Image.Image)
    with pytest.raises(InputError, match=r"longer than the model's 12 tokens; cut off: .*red dog"):
        model.explain(pixels, LONG, "chefer-clip-text", strict=True)
    with pytest.raises(InputError, match="cut off"):
        model.explain(pixels, "red", against=[LONG], strict=True)


def test_a_word_that_was_cut_in_the_middle_has_no_score(pixels):
    found = explainer().explain(pixels, "a red dog on a red grass", "chefer-clip-text")
    record = found.provenance["text"]
    assert record["cut"] == ["grass"]
    assert record["pieces"][-4:] == ["g", "r", "a", "<|endoftext|>"]
    assert [w.word for w in found.word_scores] == ["a", "red", "dog", "on", "a", "red"]


def test_a_text_that_just_fits_loses_nothing(kind, pixels):
    text = " ".join(LONG.split()[: 10 if kind == "clip" else 11])
    found = explainer(kind).explain(pixels, text, "chefer-clip-text", strict=True)
    assert [w.word for w in found.word_scores] == text.split()
    assert found.provenance["text"]["cut"] == []
    assert "padding" not in found.provenance["run"]["apart"]


def test_ids_of_siglip_that_are_not_padded_are_warned_of_and_read_at_their_own_end(pixels):
    model = explainer("siglip")
    short = {"pixel_values": pixels[None], "input_ids": torch.tensor([[6, 4, 5, 1]])}
    with pytest.warns(TextWarning, match="padded to 12"):
        (found,) = model.explain(short, recipe="chefer-clip-text")
    assert found.provenance["run"]["pooled"] == {"position": 3, "piece": "</s>"}
    full = model.explain(pixels, "a red dog", "chefer-clip-text")
    assert float(found.scores["contrastive_logit"]) != pytest.approx(float(full.scores["contrastive_logit"]), abs=1e-3)
    assert [w.word for w in found.word_scores] == ["a", "red", "dog"]


# Phrases


@pytest.mark.parametrize("recipe", ["clip-gradcam", "chefer-clip", "chefer-clip-text", "pgc-clip-softmax", "maskclip"])
def test_a_phrase_is_explained_as_a_text_of_its_own(kind, recipe):
    recipe = "albef-itc" if kind == "siglip" and recipe == "maskclip" else recipe  # SigLIP embeds no single tokens
    model, picture = explainer(kind), photo()
    how = {"against": TEXTS} if recipe == "pgc-clip-softmax" else {}
    found = model.explain(picture, "a red dog on a dog", recipe, phrase="red dog", **how)
    alone = model.explain(picture, "red dog", recipe, **how)
    np.testing.assert_array_equal(found.tokens, alone.tokens)
    assert found.status == alone.status
    assert found.recipe == alone.recipe.replace(prompt="phrase")
    assert {name: score.value for name, score in found.scores.items()} == {n: s.value for n, s in alone.scores.items()}
    text, run = found.provenance["text"], found.provenance["run"]
    assert (text["given"], text["whole"]) == ("red dog", "a red dog on a dog")
    assert (run["phrase"], run["span"]) == ("red dog", [2, 9])
    assert "whole" not in alone.provenance["text"]


def test_a_phrase_is_encoded_as_it_stands_in_the_text(pixels):
    found = explainer().explain(pixels, "a  RED  dog", phrase="red dog")
    assert found.text == "RED  dog"
    assert found.provenance["run"]["span"] == [3, 11]


def test_one_of_several_equal_phrases_must_be_named(kind, pixels):
    model = explainer(kind)
    for how in ({}, {"prompt": "in_place"}):
        with pytest.raises(InputError, match=r"stands 2 times in the text.*occurrence=1\.\.2"):
            model.explain(pixels, PHRASED, phrase="dog", **how)
        with pytest.raises(InputError, match="is not in the text"):
            model.explain(pixels, PHRASED, phrase="cat", **how)
        with pytest.raises(InputError, match="stands 2 times"):
            model.explain(pixels, PHRASED, phrase="dog", occurrence=3, **how)
    found = model.explain(pixels, PHRASED, phrase="dog", occurrence=2)
    assert found.provenance["run"]["span"] == [15, 18]
    with pytest.raises(RecipeError, match="there is no phrase of which it could be one"):
        model.explain(pixels, PHRASED, occurrence=1)


@pytest.mark.parametrize("prompt", ["phrase", "in_place"])
def test_every_text_of_a_list_is_read_for_its_own_phrase(kind, prompt, pixels):
    model = explainer(kind)
    texts = ["a red dog", "a dog on grass", "dog un"]
    for text, found in zip(
        texts, model.explain(pixels, texts, "chefer-clip", phrase="dog", prompt=prompt), strict=True
    ):
        alone = model.explain(pixels, text, "chefer-clip", phrase="dog", prompt=prompt)
        assert_close(found.tokens, alone.tokens)
        assert found.provenance["run"]["span"] == alone.provenance["run"]["span"]
        assert found.provenance["text"].get("whole", text) == text
    with pytest.raises(InputError, match="is not in the text 'red'"):
        model.explain(pixels, [*texts, "red"], "chefer-clip", phrase="dog", prompt=prompt)


def test_one_phrase_of_one_text_goes_with_many_images(kind):
    model, pictures = explainer(kind), [photo(0), photo(1)]
    for text in ("a red dog", ["a red dog"]):
        found = model.explain(pictures, text, "chefer-clip", phrase="dog")
        for picture, each in zip(pictures, found, strict=True):
            assert_close(each.tokens, model.explain(picture, "dog", "chefer-clip").tokens)
            assert each.provenance["text"]["whole"] == "a red dog"


@pytest.mark.parametrize("recipe", ["chefer-clip", "chefer-clip-text"])
@pytest.mark.parametrize("prompt", ["phrase", "in_place"])
def test_a_saved_map_of_a_phrase_comes_out_again(kind, recipe, prompt, tmp_path):
    model = explainer(kind)
    found = model.explain(photo(), PHRASED, recipe, phrase="a dog", prompt=prompt)
    opened = vlcam.open(found.save(tmp_path / "phrase.png"))
    outcome = opened.verify(model)
    assert outcome.identical
    assert outcome.differences == ()
    run = opened.provenance["run"]
    assert PHRASED[slice(*run["span"])] == run["phrase"] == "a dog"
    assert opened.recipe.prompt == prompt


def test_the_second_of_two_phrases_comes_out_again(kind, tmp_path):
    model = explainer(kind)
    for prompt in ("phrase", "in_place"):
        found = model.explain(photo(), PHRASED, "chefer-clip", phrase="dog", occurrence=2, prompt=prompt)
        path = found.save(tmp_path / f"{prompt}.png")
        assert vlcam.open(path).verify(model).identical
        other = model.explain(photo(), PHRASED, "chefer-clip", phrase="dog", occurrence=1, prompt=prompt)
        assert np.array_equal(other.tokens, found.tokens) == (prompt == "phrase")


def test_a_phrase_behind_the_limit_can_be_encoded_alone_and_not_in_place(pixels):
    model, text = explainer(), "a red dog a red dog a red dog on grass"
    found = model.explain(pixels, text, phrase="grass", strict=True)
    assert_close(found.tokens, model.explain(pixels, "grass").tokens)
    assert found.provenance["text"]["whole"] == text
    with pytest.raises(InputError, match="'grass' lies behind the model's limit"):
        model.explain(pixels, text, phrase="grass", prompt="in_place")


def test_a_prompt_without_a_phrase_is_refused(pixels):
    for prompt in ("phrase", "in_place"):
        with pytest.raises(RecipeError, match=f"prompt='{prompt}': say which words, phrase="):
            explainer().explain(pixels, "a red dog", prompt=prompt)


def test_ids_have_no_phrase(pixels):
    model = explainer()
    batch = {"pixel_values": pixels[None], **model.adapter.prepare_texts(["a red dog"]).tensors}
    with pytest.raises(InputError, match="phrase"):
        model.explain(batch, phrase="dog")


def test_maps_that_read_no_text_have_no_phrase(pixels):
    with pytest.raises(RecipeError, match="can be read for one phrase"):
        explainer().explain(pixels, "a red dog", "raw-attention", phrase="dog")


def test_the_whole_text_and_a_phrase_of_it_contradict_each_other(pixels):
    with pytest.raises(RecipeError, match="prompt='whole'"):
        explainer().explain(pixels, "a red dog", phrase="dog", prompt="whole")
