"""From image and text to explanations: inputs of every kind, batches, phrases, layers, targets, refusals."""

from __future__ import annotations

import copy
import pickle

import models
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import vlcam
from vlcam.capture import Capture
from vlcam.evidence import token_maps
from vlcam.plan import plan
from vlcam.rows import select
from vlcam.tokens import ImageTokens

TEXT = "a red circle and a blue dog"


@pytest.fixture
def photo():
    generator = np.random.default_rng(0)
    return Image.fromarray(generator.integers(0, 255, (40, 64, 3), np.uint8), "RGB")


def test_the_same_call_gives_the_same_bits(model, photo):
    first, second = model.explain(photo, TEXT), model.explain(photo, TEXT)
    np.testing.assert_array_equal(first.tokens, second.tokens)
    np.testing.assert_array_equal(first.heatmap, second.heatmap)
    assert first.record() == second.record()


@pytest.mark.parametrize("recipe", ["lavis-itm", "attention-cross", "context-gradcam", "pgc-gradcam"])
def test_a_batch_equals_single_calls(model, recipe):
    images = models.pixels(batch=3)
    texts = ["a dog", TEXT, "the red ball is on the grass"]
    batch = model.explain(images, texts, recipe)
    for image, text, together in zip(images, texts, batch, strict=True):
        alone = model.explain(image, text, recipe)
        np.testing.assert_allclose(together.tokens, alone.tokens, atol=1e-6 * max(1, np.abs(alone.tokens).max()))
        for name, score in alone.scores.items():
            assert together.scores[name].value == pytest.approx(score.value, abs=1e-5)
        assert list(together.words) == list(alone.words)
        for word in alone.words:
            np.testing.assert_allclose(together.words[word].tokens, alone.words[word].tokens, atol=1e-6)


@pytest.mark.parametrize("recipe", ["lavis-itm", "context-gradcam", "pgc-gradcam"])
def test_one_image_goes_with_many_texts(model, photo, recipe):
    texts = [TEXT, "a dog", "the grass"]
    for text, together in zip(texts, model.explain(photo, texts, recipe), strict=True):
        alone = model.explain(photo, text, recipe)
        np.testing.assert_allclose(together.tokens, alone.tokens, atol=1e-6 * max(1, np.abs(alone.tokens).max()))
        assert together.text == text


def test_the_image_trunk_runs_once_however_many_texts_there_are(blip):
    runs = []
    blip.vision_model.register_forward_hook(lambda *_: runs.append(1))
    vlcam.wrap(blip, models.processor()).explain(models.pixels(), [TEXT, "a dog", "the grass"], "pgc-gradcam")
    assert len(runs) == 1


def test_keys_and_values_of_one_image_are_projected_once_for_all_texts(blip):
    sizes = []
    blip.text_encoder.encoder.layer[0].crossattention.self.key.register_forward_pre_hook(
        lambda _, args: sizes.append(len(args[0]))
    )
    model = vlcam.wrap(blip, models.processor())
    model.explain(models.pixels(), [TEXT, "a dog"])
    assert sizes == [2]  # hooks of the user run first and still see the whole batch
    blip.text_encoder.encoder.layer[0].crossattention.self.key.forward, plain = (
        lambda tokens: (sizes.append(len(tokens)), plain(tokens))[1],
        blip.text_encoder.encoder.layer[0].crossattention.self.key.forward,
    )
    model.explain(models.pixels(), [TEXT, "a dog"])
    assert sizes[-1] == 1


def test_many_images_go_with_one_text(model):
    images = models.pixels(batch=2)
    found = model.explain(images, "a dog")
    assert [exp.text for exp in found] == ["a dog", "a dog"]
    assert not np.allclose(found[0].tokens, found[1].tokens)


def test_images_of_different_size_share_a_batch(model):
    sizes = [(30, 50), (64, 20)]
    images = [Image.new("RGB", (w, h), (200, 30, 30)) for h, w in sizes]
    assert [exp.heatmap.shape for exp in model.explain(images, TEXT)] == sizes


@pytest.mark.parametrize(
    ("images", "texts", "words"), [(2, 3, "2 images and 3 texts"), (0, 1, "no image"), (1, 0, "no text")]
)
def test_counts_that_do_not_pair_are_refused(model, photo, images, texts, words):
    with pytest.raises(vlcam.InputError, match=words):
        model.explain([photo] * images, ["a dog"] * texts)


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (torch.zeros(3, 32, 32, dtype=torch.uint8), r"float tensors \[3, H, W\]"),
        (torch.zeros(4, 32, 32), r"float tensors \[3, H, W\]"),
        (torch.zeros(3, 30, 32), "multiples of the patch, 8"),
        (torch.zeros(3, 48, 32), "trained at \\(32, 32\\)"),
        ("nowhere.png", "no such file"),
        (7, "type int"),
        ({"pixel_values": torch.zeros(1, 3, 32, 32)}, "leave text out"),
    ],
)
def test_images_that_cannot_be_taken_are_refused(model, image, words):
    with pytest.raises(vlcam.InputError, match=words):
        model.explain(image, TEXT)


@pytest.mark.parametrize("text", ["", "   ", 7, ["a dog", ""]])
def test_texts_that_cannot_be_taken_are_refused(model, photo, text):
    with pytest.raises(vlcam.InputError, match=r"text (is empty|of type)"):
        model.explain(photo, text)


def test_text_beyond_the_limit_is_cut_listed_and_refused_when_strict(model, photo):
    text = "a red circle and a blue dog on the grass and a red unaffable ball is on the grass"
    exp = model.explain(photo, text)
    assert exp.provenance["text"]["cut"] == ["unaffable", "ball", "is", "on", "the", "grass"]
    assert list(exp.words)[-2:] == ["a#3", "red#2"]
    with pytest.raises(vlcam.InputError, match="cut off: unaffable ball is on the grass"):
        model.explain(photo, text, strict=True)
    with pytest.raises(vlcam.InputError, match="behind the model's limit"):
        model.explain(photo, text, phrase="unaffable ball")


def test_a_phrase_that_stands_twice_must_be_told_apart(model, photo):
    with pytest.raises(vlcam.InputError, match="2 times in the text, at characters 0-1, 17-18"):
        model.explain(photo, TEXT, phrase="a")
    first = model.explain(photo, TEXT, phrase="a", occurrence=1)
    second = model.explain(photo, TEXT, phrase="a", occurrence=2)
    assert not np.allclose(first.tokens, second.tokens)
    np.testing.assert_array_equal(second.tokens, first.words["a#2"].tokens)
    assert first.words["a#2"].record() == second.record()


def test_a_phrase_that_is_not_there_lists_the_words(model, photo):
    with pytest.raises(vlcam.InputError, match="'red', 'circle', 'and'"):
        model.explain(photo, TEXT, phrase="green circle")


@pytest.mark.parametrize("recipe", ["context-gradcam", "pgc-gradcam"])
def test_a_phrase_needs_text_rows(model, photo, recipe):
    with pytest.raises(vlcam.RecipeError, match="only maps with text rows"):
        model.explain(photo, TEXT, recipe, phrase="red circle")
    with pytest.raises(vlcam.UnknownNameError, match="has no text rows"):
        model.explain(photo, TEXT, recipe).words["red"]


def test_words_name_what_is_there(model, photo):
    with pytest.raises(vlcam.UnknownNameError, match="'a', 'red', 'circle'"):
        model.explain(photo, TEXT).words["zebra"]


def test_the_last_block_has_no_gradient_on_words_and_says_which_has(model, photo):
    with pytest.raises(vlcam.EvidenceError, match=r"exactly zero on rows \[1, 2.*carries one in block 0, 1"):
        model.explain(photo, TEXT, layer=-1)
    assert model.explain(photo, TEXT, layer=-1, queries="cls", exclude=("cls", "padding")).status == "ok"


def test_a_word_without_gradient_says_so_instead_of_showing_a_map(model, photo):
    exp = model.explain(photo, TEXT, layer=-1, queries="cls", exclude=("cls", "padding"))
    assert exp.words["red"].status == "zero gradient"
    with pytest.raises(vlcam.EvidenceError, match="does not depend on these tokens"):
        exp.words["red"].overlay()


def test_the_last_vision_block_has_no_patch_gradient_for_the_contrastive_score(model, photo):
    options = {"target": "contrastive", "scale": "cosine", "layer": 2}
    named = (
        "exactly zero on the patches; in this model F4 carries one in block 0, 1; of block 2 F1 does; with "
        "gradient_tokens='cls' F4 of block 2 does; with gradient_tokens='all' F4 of block 2 does"
    )
    with pytest.raises(vlcam.EvidenceError, match=rf"{named}$"):
        model.explain(photo, TEXT, "pgc-gradcam", site="F4", **options)
    assert model.explain(photo, TEXT, "pgc-gradcam", site="F1", **options).status == "ok"
    for tokens in ("cls", "all"):
        exp = model.explain(photo, TEXT, "pgc-gradcam", site="F4", gradient_tokens=tokens, **options)
        assert np.abs(exp.tokens).max() > 0


def test_the_contrastive_score_does_not_reach_cross_attention(model, photo):
    with pytest.raises(vlcam.RecipeError, match="pass does not run that stream, which belongs to 'itm'"):
        model.explain(photo, TEXT, target="contrastive", scale="cosine")


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"recipe": "gradcam"}, vlcam.UnknownNameError, "no recipe 'gradcam'; there are 'lavis-itm'"),
        ({"layer": 3}, vlcam.UnknownNameError, "fusion has no block 3; it has blocks 0 to 2"),
        ({"layer": [0, 1]}, vlcam.RecipeError, "layer_rule='single'"),
        ({"site": "F4"}, vlcam.RecipeError, "weighting='attention\\*gradient' with site='F4': choose from 'gradcam'"),
        (
            {"recipe": "pgc-gradcam", "site": "F4", "stream": "fusion"},
            vlcam.RecipeError,
            "stream='fusion' with site='F4': choose from 'vision'",
        ),
        ({"target": 3}, vlcam.RecipeError, "target=3: this model tells no classes apart; it offers 'itm', 'contrast"),
        ({"target": "a dog"}, vlcam.RecipeError, "target='a dog': this model tells no classes apart"),
        ({"target": vlcam.targets.Class(3)}, vlcam.RecipeError, "this model tells no classes apart"),
        ({"recipe": "legrad"}, vlcam.RecipeError, "gradient_path='block': BlipItmHF does not say how"),
        ({"target": "caption"}, vlcam.RecipeError, "target='caption'"),
        ({"queries": "phrase"}, vlcam.RecipeError, "say which words"),
        ({"queries": (99,)}, vlcam.RecipeError, "rows 0 to 8"),
        ({"colour": 1}, vlcam.RecipeError, "no field 'colour'"),
        ({"layer": [1, -2], "layer_rule": "mean"}, vlcam.UnknownNameError, "one is named twice"),
        ({"phrase": "red circle", "queries": "cls"}, vlcam.RecipeError, "give one of them"),
        ({"exclude": "cls"}, vlcam.RecipeError, "add 'padding'"),
        ({"recipe": "pgc-gradcam", "exclude": ("cls", "padding")}, vlcam.RecipeError, "there is no text"),
    ],
)
def test_choices_that_do_not_exist_are_refused(model, photo, changes, error, words):
    recipe = changes.pop("recipe", "lavis-itm")
    with pytest.raises(error, match=words):
        model.explain(photo, TEXT, recipe, **changes)


def test_a_site_that_the_blocks_lack_is_refused_with_the_reason(model, photo):
    with pytest.raises(vlcam.UnknownNameError, match=r"F4 of fusion block 0 does not exist: .*post-norm.*has 'F2'"):
        model.capture(photo, TEXT, stream="fusion", site="F4", layers=0)
    with pytest.raises(vlcam.UnknownNameError, match="has no stream 'text'"):
        model.capture(photo, TEXT, stream="text", site="F1")


def test_layers_merge_by_the_rule_of_the_recipe(model, photo):
    single = [model.explain(photo, TEXT, layer=i).tokens for i in (0, 1)]
    for rule, merge in {"mean": np.mean, "sum": np.sum, "max": np.max}.items():
        merged = model.explain(photo, TEXT, layer=[0, 1], layer_rule=rule).tokens
        np.testing.assert_allclose(merged, merge(single, axis=0), rtol=1e-5)


def test_negative_layers_count_from_the_end(model, photo):
    exp = model.explain(photo, TEXT, layer=-2)
    np.testing.assert_array_equal(exp.tokens, model.explain(photo, TEXT, layer=1).tokens)
    assert exp.provenance["run"]["layers"] == [1]


def test_a_published_layer_is_moved_to_the_same_relative_depth_and_that_is_on_record(model, photo):
    run = model.explain(photo, TEXT).provenance["run"]
    assert run["layers"] == [1]
    assert run["fitted"] == {
        "layers": "published on block [6] of 12; same relative depth of 3 blocks",
        "target": "as published",
        "tokens": "as published",
    }
    assert model.explain(photo, TEXT, layer=1).provenance["run"]["fitted"]["layers"] == "as given"
    assert run["class"] is None
    assert run["prefix_tokens"] == ["cls"]


def test_a_published_target_that_the_model_lacks_is_replaced_by_its_own_and_that_is_on_record(model, photo):
    exp = model.explain(photo, TEXT, "pgc-gradcam")
    assert (exp.recipe.target, exp.recipe.scale) == ("itm", "logit")
    assert exp.provenance["run"]["fitted"]["target"] == (
        "published for class (logit); this model offers 'itm', 'contrastive'"
    )
    given = model.explain(photo, TEXT, "pgc-gradcam", target="itm")
    assert given.provenance["run"]["fitted"]["target"] == "as given"
    np.testing.assert_array_equal(given.tokens, exp.tokens)


def test_a_sweep_equals_single_calls_in_one_pass_per_head(blip, photo):
    runs = []
    blip.vision_model.register_forward_hook(lambda *_: runs.append(1))
    model = vlcam.wrap(blip, models.processor())
    base = vlcam.recipes()["lavis-itm"].recipe.replace(layers=(1,))
    recipes = [
        "lavis-itm",
        base.replace(relu="none"),
        "pgc-gradcam",
        "context-gradcam",
        "attention-cross",
        base.replace(layers=(0,)),
        base.replace(scale="probability"),
        base.replace(scale="margin"),
    ]
    swept = model.sweep(photo, TEXT, recipes)
    assert len(runs) == 1  # also for several scales of one head
    cosine = vlcam.recipes()["pgc-gradcam"].recipe.replace(target="contrastive", scale="cosine", site="F1")
    recipes.insert(0, cosine)
    runs.clear()
    swept = model.sweep(photo, TEXT, recipes)
    assert len(runs) == 2  # another head
    for recipe, exp in zip(recipes, swept, strict=True):
        alone = model.explain(photo, TEXT, recipe)
        np.testing.assert_allclose(exp.tokens, alone.tokens, atol=1e-6 * np.abs(alone.tokens).max())
        assert exp.recipe == alone.recipe


def test_a_callable_target_is_differentiated_and_named(model, photo):
    def doubled(logits):
        return 2 * logits[:, 1]

    exp = model.explain(photo, TEXT, target=doubled)
    np.testing.assert_allclose(exp.tokens, 2 * model.explain(photo, TEXT).tokens, rtol=1e-5)
    assert exp.recipe.target == "custom"
    assert "doubled" in exp.provenance["run"]["target"]
    with pytest.raises(vlcam.InputError, match="a Python callable"):
        exp.verify(model)


def test_a_callable_target_must_give_one_scalar_per_pair(model, photo):
    with pytest.raises(vlcam.InputError, match=r"returned \(1, 2\); it must return one scalar per pair"):
        model.explain(photo, TEXT, target=lambda logits: logits)


def test_match_and_no_match_share_the_attention_and_differ_in_the_gradient(model, photo):
    yes = model.explain(photo, TEXT, relu="none")
    no = model.explain(photo, TEXT, target=lambda logits: logits[:, 0], relu="none")
    assert np.corrcoef(yes.tokens.ravel(), no.tokens.ravel())[0, 1] < 0.9
    attention = [model.explain(photo, TEXT, "attention-cross").tokens for _ in range(2)]
    np.testing.assert_array_equal(*attention)


def test_margin_and_log_probability_differ_by_one_positive_factor(model, photo):
    margin = model.explain(photo, TEXT, scale="margin").tokens
    log = model.explain(photo, TEXT, scale="log-probability").tokens
    ratio = log[margin > 1e-9] / margin[margin > 1e-9]
    assert ratio.min() > 0
    np.testing.assert_allclose(ratio, ratio.mean(), rtol=1e-3)


@pytest.mark.parametrize(("relu", "status"), [("map", "no positive evidence"), ("none", "ok")])
def test_a_map_that_the_relu_empties_says_so_and_the_signed_one_is_negative(model, relu, status):
    job = plan(model.adapter, "pgc-gradcam", {"relu": relu})
    features = torch.arange(1.0, 18.0)[None, :, None].expand(1, 17, 12)
    found = Capture(
        {job.taps[0]: features}, {job.taps[0]: -torch.ones(1, 17, 12)}, torch.zeros(1), {}, torch.zeros(1, 17, 12)
    )
    made = token_maps(job, found, 0, select(job.recipe, None, ImageTokens(("cls",), (4, 4)), None, None))
    assert made.statuses == (status,)
    assert (made.values.max() == 0) if relu == "map" else (made.values.max() < 0)


def test_evidence_for_a_score_and_for_its_opposite_never_share_a_cell(model, photo):
    exp = model.explain(photo, TEXT, "pgc-gradcam", layer=0)
    with pytest.warns(vlcam.targets.TargetWarning, match="what speaks against the text"):
        flipped = model.explain(photo, TEXT, "pgc-gradcam", layer=0, target=lambda logits: -logits[:, 1])
    assert (exp.tokens > 0).any()
    np.testing.assert_array_equal((exp.tokens > 0) & (flipped.tokens > 0), False)


def test_scores_have_names_and_kinds(model, photo):
    exp = model.explain(photo, TEXT)
    kinds = {name: score.kind for name, score in exp.scores.items()}
    assert kinds == {
        "itm_logit": "logit",
        "itm_probability": "probability",
        "itm_log_probability": "log-probability",
        "itm_margin": "margin",
        "contrastive_cosine": "cosine",
    }
    assert 0 <= float(exp.scores["itm_probability"]) <= 1
    assert {name: float(s) for name, s in model.scores(photo, TEXT).items()} == {
        name: float(s) for name, s in exp.scores.items()
    }


def test_a_bfloat16_model_gives_a_finite_float32_map(blip, photo):
    exact = vlcam.wrap(blip, models.processor()).explain(photo, TEXT, relu="none")
    exp = vlcam.wrap(blip.bfloat16(), models.processor()).explain(photo, TEXT, relu="none")
    assert exp.tokens.dtype == np.float32
    assert np.isfinite(exp.tokens).all()
    assert np.corrcoef(exp.tokens.ravel(), exact.tokens.ravel())[0, 1] > 0.9
    assert exp.provenance["model"]["dtype"] == "bfloat16"


def test_a_broken_model_is_refused(blip, photo):
    with torch.no_grad():
        blip.itm_head.weight.fill_(float("nan"))
    with pytest.raises(vlcam.EvidenceError, match="itm_logit is not finite"):
        vlcam.wrap(blip, models.processor()).explain(photo, TEXT)


def test_a_data_parallel_wrapper_is_looked_through(blip, photo):
    bare = vlcam.wrap(blip, models.processor()).explain(photo, TEXT)
    wrapped = vlcam.wrap(nn.DataParallel(blip), models.processor()).explain(photo, TEXT)
    np.testing.assert_array_equal(bare.tokens, wrapped.tokens)


def test_an_unknown_module_is_refused_with_what_exists():
    with pytest.raises(vlcam.AdapterError, match=r"no adapter accepts torch.nn.*BlipForImageTextRetrieval"):
        vlcam.wrap(nn.Linear(2, 2))
    with pytest.raises(vlcam.AdapterError, match="BLIP needs its processor"):
        vlcam.wrap(models.blip())


def test_what_is_passed_on_is_what_the_record_says(model, photo):
    record = model.explain(photo, TEXT, phrase="red circle").record()
    run = record["provenance"]["run"]
    assert run["phrase"] == "red circle"
    assert run["span"] == [2, 12]
    assert run["rows"] == [2, 3]
    assert run["grid"] == [4, 4]
    assert run["dropped"][0]["tokens"] == [0]
    assert record["provenance"]["text"]["pieces"][0] == "[ENC]"
    assert record["provenance"]["model"]["options"]["first_token"] == "enc"
    assert [step["step"] for step in record["provenance"]["image"]["steps"]] == [
        "processor",
        "resize",
        "rescale",
        "normalize",
    ]
    assert record["recipe"]["queries"] == "phrase"


def test_the_weights_hash_follows_the_weights(blip, photo):
    model = vlcam.wrap(blip, models.processor())
    before = model.explain(photo, TEXT).provenance["model"]["weights_sha256"]
    assert model.explain(photo, TEXT).provenance["model"]["weights_sha256"] == before
    with torch.no_grad():
        blip.itm_head.bias.add_(1)
    assert model.explain(photo, TEXT).provenance["model"]["weights_sha256"] != before


def test_an_explanation_shows_itself_in_one_line_and_as_a_picture(model, photo):
    exp = model.explain(photo, TEXT)
    assert repr(exp) == f"<Explanation of {TEXT!r} by lavis-itm, 4 x 4 tokens, ok>"
    assert exp._repr_png_().startswith(b"\x89PNG")
    nothing = model.explain(photo, TEXT, layer=-1, queries="cls", exclude=("cls", "padding")).words["red"]
    assert nothing._repr_png_() is None
    assert repr(model) == "Explainer('random-blip', BlipForImageTextRetrieval)"


def test_words_in_a_saved_record_have_the_status_of_their_map(model, photo):
    record = model.explain(photo, TEXT, layer=-1, queries="cls", exclude=("cls", "padding")).record()
    assert {word["status"] for word in record["words"]} == {"zero gradient"}


def test_a_module_that_returns_neither_tensor_nor_tuple_is_refused(blip, photo):
    blip.vision_model.encoder.layers[1].mlp.register_forward_hook(lambda _, __, output: {"out": output})
    with pytest.raises(vlcam.CaptureError, match="F5 of vision block 1: the module returned dict"):
        vlcam.wrap(blip, models.processor()).explain(photo, TEXT, "pgc-gradcam", site="F5", layer=1)


def test_autocast_and_default_types_of_the_caller_do_not_matter(model, photo):
    expected = model.explain(photo, TEXT)
    with torch.autocast("cpu", torch.bfloat16):
        inside = model.explain(photo, TEXT)
    torch.set_default_dtype(torch.float64)
    try:
        other = model.explain(photo, TEXT)
    finally:
        torch.set_default_dtype(torch.float32)
    for found in (inside, other):
        np.testing.assert_array_equal(found.tokens, expected.tokens)
        assert found.scores == expected.scores


def test_a_model_made_under_inference_mode_is_refused():
    with torch.inference_mode():
        module = models.blip()
    with pytest.raises(vlcam.AdapterError, match=r"made under torch\.inference_mode"):
        vlcam.wrap(module, models.processor()).explain(models.pixels(), TEXT)


@pytest.mark.parametrize("scale", ["probability", "log-probability", "margin"])
def test_targets_keep_their_gradient_where_the_model_is_sure(blip, photo, scale):
    with torch.no_grad():
        blip.itm_head.bias.copy_(torch.tensor([-9.0, 9.0]))
    exact = vlcam.wrap(blip.double(), models.processor()).explain(photo, TEXT, scale=scale)
    found = vlcam.wrap(blip.float(), models.processor()).explain(photo, TEXT, scale=scale)
    np.testing.assert_allclose(found.tokens, exact.tokens, atol=1e-4 * exact.tokens.max())
    assert found.provenance["run"]["target_value"] == pytest.approx(exact.provenance["run"]["target_value"])


def test_a_target_that_works_in_place_does_not_change_the_scores(model, photo):
    def loud(logits):
        logits.mul_(100)
        return logits[:, 1]

    assert model.explain(photo, TEXT, target=loud).scores == model.explain(photo, TEXT).scores
    with pytest.raises(vlcam.RecipeError, match="scale='probability' with target='custom': choose from 'raw'"):
        model.explain(photo, TEXT, target=loud, scale="probability")


def test_signs_behind_the_limit_are_cut_text_too(model, photo):
    text = "a red circle" + " ," * 40
    assert model.explain(photo, text).provenance["text"]["cut_text"].startswith(", ,")
    with pytest.raises(vlcam.InputError, match="longer than the model's 16 tokens"):
        model.explain(photo, text, strict=True)


def test_a_wrong_phrase_costs_no_pass(blip, photo):
    runs = []
    blip.vision_model.register_forward_hook(lambda *_: runs.append(1))
    with pytest.raises(vlcam.InputError):
        vlcam.wrap(blip, models.processor()).explain(photo, TEXT, phrase="pink elephant")
    assert not runs


def test_advice_on_a_zero_gradient_costs_one_more_pass(blip, photo):
    runs = []
    blip.vision_model.register_forward_hook(lambda *_: runs.append(1))
    with pytest.raises(vlcam.EvidenceError, match="block 0, 1"):
        vlcam.wrap(blip, models.processor()).explain(photo, TEXT, layer=-1)
    assert len(runs) == 2


@pytest.mark.parametrize("layer", [np.int64(1), torch.tensor(1), (1,), np.array([1]), "last"])
def test_layers_are_taken_in_any_integer_form(model, photo, layer):
    exp = model.explain(photo, TEXT, "pgc-gradcam", layer=layer)
    assert exp.provenance["run"]["layers"] == [2 if layer == "last" else 1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"layer": 1.5}, "give a whole number"),
        ({"layer": []}, "give a whole number"),
        ({"layer": 1, "layers": 0}, "give one of them"),
        ({"occurrence": 2}, "there is no phrase"),
        ({"queries": (1, -8)}, "one is named twice"),
        ({"queries": (0, 1)}, "are special tokens"),
    ],
)
def test_arguments_that_contradict_or_mean_nothing_are_refused(model, photo, arguments, words):
    with pytest.raises(vlcam.RecipeError, match=words):
        model.explain(photo, TEXT, **arguments)


def test_a_sweep_over_one_name_is_refused(model, photo):
    with pytest.raises(vlcam.RecipeError, match="a sweep takes a list"):
        model.sweep(photo, TEXT, "lavis-itm")


def test_words_may_begin_with_a_combining_mark(model, photo):
    exp = model.explain(photo, "\u0301red red circle")
    assert list(exp.words) == ["red", "red#2", "circle"]
    assert exp.words["red"].tokens.shape == (4, 4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"input_ids": torch.tensor([[2, 6, 999]])}, "the model embeds 0 to 21"),
        ({"input_ids": torch.tensor([[2.0, 6.0]])}, "give whole numbers"),
        ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, "with 1 to 16 tokens"),
        ({"input_ids": torch.full((1, 40), 6)}, "with 1 to 16 tokens"),
        ({"input_ids": torch.tensor([[6, 7, 8, 3]])}, "a text is opened by one of"),
        ({"attention_mask": torch.tensor([[0, 1, 1, 1]])}, "padding must stand at the end"),
        ({"attention_mask": torch.tensor([[1, 1]])}, "give one flag per id"),
        ({"input_ids": [[2, 6], [2]]}, "is no tensor"),
        ({"pixel_values": np.zeros((1, 3, 32, 32), np.uint8)}, r"float tensors \[3, H, W\]"),
    ],
)
def test_batches_that_do_not_fit_are_refused(model, changes, words):
    batch = {
        "pixel_values": models.pixels(batch=1),
        "input_ids": torch.tensor([[2, 6, 7, 3]]),
        "attention_mask": torch.ones(1, 4, dtype=torch.long),
    }
    assert model.explain(batch)[0].text == "red circle"
    with pytest.raises(vlcam.InputError, match=words):
        model.explain(batch | changes)


def test_ids_and_text_give_the_same_map_with_an_unknown_word(model):
    text = "a red zebra circle"
    ids = models.tokenizer()(text, return_tensors="pt")["input_ids"]
    found = model.explain({"pixel_values": models.pixels(batch=1), "input_ids": ids})[0]
    np.testing.assert_array_equal(found.tokens, model.explain(models.pixels(), text).tokens)
    assert found.text == "a red [UNK] circle"
    assert found.verify(model).identical


def test_a_tokenizer_that_pads_on_the_left_does_not_shift_rows(blip):
    processor = models.processor()
    processor.tokenizer.padding_side = "left"
    model = vlcam.wrap(blip, processor)
    batch = model.explain(models.pixels(), ["a dog", TEXT])
    np.testing.assert_allclose(batch[0].tokens, model.explain(models.pixels(), "a dog").tokens, atol=1e-7)


def test_scores_of_other_heads_are_computed_once_and_only_when_read(blip, photo):
    runs = []
    blip.text_encoder.register_forward_hook(lambda *_: runs.append(1))
    found = vlcam.wrap(blip, models.processor()).explain(photo, [TEXT, "a dog"])
    assert len(runs) == 1
    assert found[0].scores["itm_logit"].kind == "logit"
    assert list(found[0].scores)[-1] == "contrastive_cosine"
    assert len(runs) == 1
    cosines = [exp.scores["contrastive_cosine"].value for exp in found]
    assert len(runs) == 2
    assert cosines[0] != cosines[1]
    with pytest.raises(KeyError):
        found[0].scores["caption"]


def test_scores_that_were_not_read_are_not_made_up_from_other_weights(blip, photo):
    exp = vlcam.wrap(blip, models.processor()).explain(photo, TEXT)
    with torch.no_grad():
        blip.text_proj.weight.mul_(2)
    with pytest.raises(vlcam.EvidenceError, match="before the model's weights changed"):
        exp.scores["contrastive_cosine"]


def test_explanations_can_be_copied_and_pickled(model, photo):
    exp = model.explain(photo, TEXT)
    twin = pickle.loads(pickle.dumps(exp))
    assert twin.scores == exp.scores
    np.testing.assert_array_equal(copy.deepcopy(exp).tokens, exp.tokens)
