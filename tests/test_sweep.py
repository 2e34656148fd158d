"""Many recipes in one call: the maps are those of single calls, and what they share is computed once."""

from __future__ import annotations

import models
import numpy as np
import pytest
import torch
from PIL import Image

import vlcam
from vlcam.evidence import NoGradientError
from vlcam.fitting import fitting

TEXT = "a red circle and a blue dog"
FAMILIES = ("vit", "deit-teacher", "dinov2-registers", "beit", "beit-cls")
OF_FUSION = (
    "lavis-itm",
    "albef-itm",
    "pnp-vqa",
    "pnp-vqa-as-written",
    "omnixai-itm",
    "attention-cross",
    "context-gradcam",
    "chefer-bimodal",
    "chefer-bimodal-words",
)
NOT_FOR_CLASSES = {
    **dict.fromkeys((*OF_FUSION, "coca-caption", "blip-caption", "blip-vqa"), "no stream 'fusion'"),
    **dict.fromkeys(("chefer-clip-text", "grad-eclip-text", "grad-eclip-text-as-coded"), "no stream 'text'"),
    **dict.fromkeys(("legrad-pooler", "legrad-pooler-as-coded", "blip2-itm", "blip2-itc"), "no stream 'pooler'"),
    **dict.fromkeys(("clip-gradcam", "pgc-clip-softmax", "albef-itc", "chefer-clip"), "for the score 'contrastive',"),
    "clip-es": "for the score 'contrastive_patches',",
    **dict.fromkeys(("maskclip", "clip-surgery"), "tokens are compared with texts"),
}
BY_THE_CLASS_TOKEN = ("grad-eclip", "grad-eclip-as-coded")
"""Of no use where the heads read the patches."""
ONE_HEAD = ("grad-eclip-as-coded", "gradeclip-gradcam-baseline-as-coded")
"""Of no use where the heads cannot be joined: each of BEiT's has a bias of its own."""
NOT_FOR_BLIP = {
    **dict.fromkeys(("chefer-clip-text", "grad-eclip-text", "grad-eclip-text-as-coded"), "no stream 'text'"),
    **dict.fromkeys(("legrad-pooler", "legrad-pooler-as-coded", "blip2-itm", "blip2-itc"), "no stream 'pooler'"),
    **dict.fromkeys(("pgc-clip-softmax", "pgc-finercam"), r"choose from|gives it on the scale 'cosine'"),
    "clip-es": "for the score 'contrastive_patches',",
    **dict.fromkeys(("coca-caption", "blip-caption"), "for the score 'caption',"),
    "blip-vqa": "for the score 'answer',",
    "legrad": "gradient_path='block'",
    "pgc-swin": "heads read the patches",
    **dict.fromkeys(("maskclip", "clip-surgery"), "does not embed single tokens"),
}


@pytest.fixture(params=FAMILIES)
def kind(request):
    return request.param


@pytest.fixture
def photo():
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 64, 3), np.uint8))


def wrapped(kind="vit"):
    return vlcam.wrap(models.classifier(kind), name=f"random-{kind}")


def in_one_pass():
    """The named recipes that neither ask the model again nor follow a path of images, in catalogue order."""
    every = {name: entry.recipe for name, entry in vlcam.recipes().items()}
    return [name for name, recipe in every.items() if not recipe.asks and recipe.gradient_path != "integrated"]


@pytest.fixture
def forwards():
    """Counts runs of a module: `count = forwards(module)`, then `len(count)`."""
    handles = []

    def watch(module):
        runs = []
        handles.append(module.register_forward_hook(lambda *_: runs.append(1)))
        return runs

    yield watch
    for handle in handles:
        handle.remove()


@pytest.fixture
def backwards(monkeypatch):
    """The backward passes through a classifier: those that begin at its logits [images, classes]."""
    runs, own = [], torch.autograd.grad

    def counted(outputs, *args, **options):
        if outputs.ndim == 2:
            runs.append(tuple(outputs.shape))
        return own(outputs, *args, **options)

    monkeypatch.setattr(torch.autograd, "grad", counted)
    return runs


def assert_same_map(found, alone, share):
    np.testing.assert_allclose(found.tokens, alone.tokens, rtol=0, atol=share * np.abs(alone.tokens).max())
    assert found.status == alone.status


def assert_same_explanation(found, alone, share=1e-6):
    assert found.recipe == alone.recipe
    assert found.recipe.name == alone.recipe.name
    assert_same_map(found, alone, share)
    assert [word.word for word in found.word_maps] == [word.word for word in alone.word_maps]
    for one, other in zip(found.word_maps, alone.word_maps, strict=True):
        assert_same_map(one, other, share)
    was, now = (dict(each.provenance) for each in (alone, found))
    assert (now["run"]["block_values"] or []) == pytest.approx(was["run"]["block_values"] or [], rel=1e-4, abs=1e-6)
    for run in (was, now):
        run["run"] = {key: value for key, value in run["run"].items() if key not in ("target_value", "block_values")}
    tapping = dict.fromkeys(("attention", "tapped"))  # a sweep taps more
    was["model"], now["model"] = ({**each["model"], **tapping} for each in (was, now))
    assert now == was
    assert found.scores.keys() == alone.scores.keys()
    for name, score in alone.scores.items():
        assert found.scores[name].value == pytest.approx(score.value, rel=1e-4, abs=1e-6)


# The same maps


@pytest.mark.parametrize("target", [None, 2])
def test_a_sweep_of_every_named_recipe_equals_single_calls(kind, target):
    model = vlcam.wrap(models.classifier(kind).double())  # some recipes divide by what is nearly zero
    names = fitting(model.adapter)
    swept = model.sweep(models.pixels(), target=target)
    assert [exp.recipe.name for exp in swept] == names
    for name, found in zip(names, swept, strict=True):
        assert_same_explanation(found, model.explain(models.pixels(), None, name, target=target))


def test_in_single_precision_only_the_last_bits_differ(kind):
    model = wrapped(kind)
    names = [name for name in fitting(model.adapter) if "++" not in name and "xgradcam" not in name]
    for name, found in zip(names, model.sweep(models.pixels(), None, names, target=1), strict=True):
        assert_same_explanation(found, model.explain(models.pixels(), None, name, target=1), 2e-5)


def test_a_sweep_of_one_equals_the_single_call_bit_for_bit(kind):
    model = wrapped(kind)
    for name in fitting(model.adapter):
        (found,) = model.sweep(models.pixels(), None, [name], target=1)
        np.testing.assert_array_equal(found.tokens, model.explain(models.pixels(), None, name, target=1).tokens)


def test_by_default_every_named_recipe_that_fits_a_classifier_in_catalogue_order(kind):
    model = wrapped(kind)
    unfit = dict(NOT_FOR_CLASSES)
    if model.adapter.reads == "cls":
        unfit["pgc-swin"] = "for models whose heads read the patches"
    else:
        unfit |= dict.fromkeys(BY_THE_CLASS_TOKEN, "takes the gradient at the class token, and this model's heads read")
    if kind.startswith("beit"):
        unfit |= dict.fromkeys([name for name in ONE_HEAD if name not in unfit], "attention='one_head'")
    expected = [name for name in in_one_pass() if name not in unfit]
    assert fitting(model.adapter) == expected
    assert [exp.recipe.name for exp in model.sweep(models.pixels())] == expected
    for name, why in unfit.items():
        with pytest.raises((vlcam.UnknownNameError, vlcam.RecipeError), match=why):
            model.sweep(models.pixels(), None, [name])


def test_what_fits_does_not_hang_on_how_attention_is_written(kind):
    module = models.classifier(kind)
    module.set_attn_implementation("eager")
    assert fitting(vlcam.wrap(module).adapter) == fitting(wrapped(kind).adapter)


def test_a_sweep_on_a_model_that_takes_text_equals_single_calls(blip, photo, forwards):
    model = vlcam.wrap(blip.double(), models.processor())
    runs = forwards(blip.vision_model)
    swept = model.sweep(photo, TEXT)
    # One pass per score, one for the path that detaches attention, one for one head.
    assert len(runs) == 4
    names = [exp.recipe.name for exp in swept]
    assert names == fitting(model.adapter) == [name for name in in_one_pass() if name not in NOT_FOR_BLIP]
    assert set(OF_FUSION) < set(names)
    for name, found in zip(names, swept, strict=True):
        assert_same_explanation(found, model.explain(photo, TEXT, name))


@pytest.mark.parametrize("name", NOT_FOR_BLIP)
def test_a_recipe_that_a_model_with_text_cannot_meet_is_refused(model, photo, name):
    assert name not in fitting(model.adapter)
    with pytest.raises((vlcam.UnknownNameError, vlcam.RecipeError), match=NOT_FOR_BLIP[name]):
        model.sweep(photo, TEXT, [name])


def test_a_phrase_goes_to_every_recipe_or_is_refused(model, photo):
    cross = ["lavis-itm", "attention-cross"]
    for name, found in zip(cross, model.sweep(photo, TEXT, cross, phrase="blue dog"), strict=True):
        assert_same_explanation(found, model.explain(photo, TEXT, name, phrase="blue dog"))
    with pytest.raises(vlcam.RecipeError, match="only maps with text rows"):
        model.sweep(photo, TEXT, [*cross, "pgc-gradcam"], phrase="blue dog")


def test_lists_of_images_and_classes_give_a_list_per_recipe(kind):
    model = wrapped(kind)
    names = ["pgc-gradcam", "agcam", "raw-attention"]
    swept = model.sweep(models.pixels(batch=2), None, names, target=[3, 1])
    assert [len(each) for each in swept] == [2, 2, 2]
    for name, found in zip(names, swept, strict=True):
        for exp, alone in zip(found, model.explain(models.pixels(batch=2), None, name, target=[3, 1]), strict=True):
            np.testing.assert_allclose(exp.tokens, alone.tokens, atol=1e-5 * np.abs(alone.tokens).max())
    with pytest.raises(vlcam.InputError, match="2 images and 3 classes"):
        model.sweep(models.pixels(batch=2), None, names, target=[3, 1, 0])


# What is shared


def test_recipes_of_one_head_share_one_forward_and_other_ways_through_the_model_cost_one_more(kind, forwards):
    model = wrapped(kind)
    runs = forwards(model.adapter.module)
    names = fitting(model.adapter)
    model.sweep(models.pixels(), None, [name for name in names if name not in ("agcam", *ONE_HEAD)])
    assert len(runs) == 1
    runs.clear()
    model.sweep(models.pixels(), None, names, target=1)
    one_head = bool(set(names) & set(ONE_HEAD))
    assert one_head == (not kind.startswith("beit"))
    assert len(runs) == 2 + one_head  # attention that is detached, and attention with one head
    runs.clear()
    model.sweep(models.pixels(), None, ["agcam", "raw-attention", "pgc-eigencam"])
    assert len(runs) == 1  # maps without a gradient join the pass that there is
    runs.clear()
    model.sweep(models.pixels(batch=3), None, ["pgc-gradcam", "raw-attention"], target=[0, 1, 2])
    assert len(runs) == 1


def test_recipes_that_edit_the_same_blocks_share_a_pass_and_others_do_not_join_it(forwards):
    model = wrapped()
    runs = forwards(model.adapter.module)
    model.sweep(models.pixels(), None, ONE_HEAD, target=1)  # both edit the last block
    assert len(runs) == 1
    runs.clear()
    earlier = vlcam.recipes()["grad-eclip-as-coded"].recipe.replace(target="class", scale="logit", layers=(1,))
    model.sweep(models.pixels(), None, [*ONE_HEAD, earlier], target=1)
    assert len(runs) == 2
    runs.clear()
    found = model.sweep(models.pixels(), None, [*ONE_HEAD, "raw-attention", "pgc-gradcam"], target=1)
    assert len(runs) == 2  # attention of one head is not the model's
    for exp, alone in zip(found, ("grad-eclip-as-coded", ONE_HEAD[1], "raw-attention", "pgc-gradcam"), strict=True):
        assert_same_explanation(exp, model.explain(models.pixels(), None, alone, target=1), 2e-5)
    values = [exp.scores["class_logit"].value for exp in found]
    assert values == pytest.approx([values[-1]] * 4)  # scores are the model's own
    assert found[0].provenance["run"]["target_value"] != pytest.approx(values[0], rel=1e-4)


def test_each_target_costs_one_backward_however_many_recipes_read_it(backwards):
    model = wrapped()
    base = vlcam.recipes()["pgc-gradcam"].recipe
    one = ["pgc-gradcam", "pgc-hirescam", "pgc-layercam", "pgc-gradcam++", "attn-gradcam", "chefer-generic", "grad-sam"]
    for recipes, targets in (
        (one, 1),
        ([*one, "raw-attention", "attention-rollout", "pgc-eigencam"], 1),
        (["raw-attention", "attention-rollout", "pgc-eigencam"], 0),
        ([*one, "pgc-finercam"], 2),
        ([*one, "pgc-finercam", base.replace(scale="probability"), base.replace(scale="margin")], 4),
    ):
        backwards.clear()
        model.sweep(models.pixels(), None, recipes, target=1)
        assert backwards == [(1, 5)] * targets


def test_classes_of_one_image_take_turns_and_images_do_not(backwards, forwards):
    model = wrapped()
    runs = forwards(model.adapter.module)
    model.sweep(models.pixels(), None, ["pgc-gradcam", "pgc-hirescam"], target=[0, 1, 2])
    assert (len(runs), backwards) == (1, [(1, 5)] * 3)
    runs.clear()
    backwards.clear()
    model.sweep(models.pixels(batch=3), None, ["pgc-gradcam", "pgc-hirescam"], target=[0, 1, 2])
    assert (len(runs), backwards) == (1, [(3, 5)])


def test_one_target_may_break_the_sweep_and_the_model_is_as_it_was():
    module = models.classifier("vit").train()
    before = models.state(module)

    class BrokenError(Exception):
        pass

    def fail(_):
        raise BrokenError

    with pytest.raises(BrokenError):
        vlcam.wrap(module).sweep(models.pixels(), target=fail)
    models.assert_same(before, models.state(module))


# Empty maps


def test_an_empty_map_stops_the_sweep_unless_it_is_to_be_kept():
    model = wrapped()
    recipe = vlcam.recipes()["pgc-gradcam"].recipe
    recipes = ["pgc-gradcam", recipe.replace(site="F4"), "raw-attention"]
    for choices in ({}, {"empty": "raise"}):
        with pytest.raises(
            NoGradientError, match=r"F4 of vision block 2 is exactly zero.*in this model F4 carries one"
        ):
            model.sweep(models.pixels(), None, recipes, **choices)
    found = model.sweep(models.pixels(), None, recipes, empty="keep")
    assert [exp.status for exp in found] == ["ok", "zero gradient", "ok"]
    assert found[1].recipe.site == "F4"
    assert found[1].scores == found[0].scores


def test_an_empty_main_map_keeps_the_words_with_their_own_status(model, photo):
    recipe = model.explain(photo, TEXT).recipe.replace(layers="last")
    (kept,) = model.sweep(photo, TEXT, [recipe], empty="keep")
    assert kept.status == "zero gradient"
    assert {word.status for word in kept.word_maps} == {"zero gradient"}
    assert [word.word for word in kept.word_maps] == TEXT.split()


@pytest.mark.parametrize(
    ("recipes", "choices", "words"),
    [
        ("pgc-gradcam", {}, "a sweep takes a list; one recipe is what explain is for"),
        (vlcam.recipes()["pgc-gradcam"].recipe, {}, "a sweep takes a list"),
        (["pgc-gradcam"], {"empty": "skip"}, "empty='skip': choose from 'raise', 'keep'"),
        (["pgc-gradcam"], {"target": "itm"}, "target='itm': this model does not offer it"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(recipes, choices, words):
    with pytest.raises(vlcam.RecipeError, match=words):
        wrapped().sweep(models.pixels(), None, recipes, **choices)


def test_no_recipes_give_no_explanations(forwards):
    model = wrapped()
    runs = forwards(model.adapter.module)
    assert model.sweep(models.pixels(), None, []) == []
    assert not runs
