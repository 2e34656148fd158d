"""Mistakes that would give a wrong map or a wrong record without a word: each is an error, or does not happen."""

from __future__ import annotations

import threading

import models
import numpy as np
import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

import vlcam
from vlcam.cli import main
from vlcam.targets import Class, Custom


def wrapped(kind="vit", **options):
    return vlcam.wrap(models.classifier(kind), **options)


@pytest.mark.parametrize("recipe", ["attention-rollout", "chefer-generic", "tam-transition", "legrad"])
def test_blocks_are_multiplied_first_to_last_in_whatever_order_they_are_named(recipe):
    model = wrapped()
    straight = model.explain(models.pixels(), None, recipe, target=1, layers=(0, 1, 2))
    turned = model.explain(models.pixels(), None, recipe, target=1, layers=(-1, 0, 1))
    assert np.array_equal(straight.tokens, turned.tokens)
    assert turned.provenance["run"]["layers"] == [0, 1, 2]


@pytest.mark.parametrize("recipe", ["ablationcam", "vit-reciprocam"])
def test_asking_changes_no_pass_of_another_thread(recipe):
    model, pixels = wrapped(), models.pixels()
    module = model.adapter.module
    with torch.no_grad():
        expected = module(pixels[None]).logits
    done, wrong = threading.Event(), []

    def run():
        with torch.no_grad():
            while not done.is_set():
                wrong.append(not torch.equal(module(pixels[None]).logits, expected))

    other = threading.Thread(target=run)
    other.start()
    try:
        model.explain(pixels, None, recipe, target=1, batch=1)
    finally:
        done.set()
        other.join()
    assert wrong
    assert not any(wrong)


def test_a_target_that_runs_the_model_itself_is_not_edited():
    model = wrapped()
    module, reference = model.adapter.module, torch.zeros(1, *models.pixels().shape)

    def above_reference(logits):
        with torch.no_grad():
            return logits[:, 1] - module(reference).logits[0, 1]

    exp = model.explain(models.pixels(), None, "ablationcam", target=Custom(above_reference))
    assert exp.status == "ok"


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"weighting": "elementwise", "relu": "map", "gradient_tokens": "none"}, "relu='map'"),
        ({"target": lambda logits: logits[:, 1], "scale": "logit"}, "scale='logit'"),
        ({"target": lambda logits: logits[:, 1], "scale": "margin"}, "scale='margin'"),
    ],
)
def test_what_the_user_says_is_refused_and_never_replaced(choices, message):
    with pytest.raises(vlcam.RecipeError, match=message):
        wrapped().explain(models.pixels(), **choices)


def test_excluded_registers_are_left_out_of_pooled_head_weights():
    model = wrapped("dinov2-registers")
    choices = {"recipe": "attn-gradcam-full", "target": 2, "queries": "cls", "layer": 1}
    with_all = model.explain(models.pixels(), **choices)
    without = model.explain(models.pixels(), exclude=("cls", "registers"), **choices)
    assert not np.array_equal(with_all.tokens, without.tokens)


def no_class_token():
    torch.manual_seed(0)
    module = VisionTransformer(
        img_size=32,
        patch_size=8,
        embed_dim=32,
        depth=3,
        num_heads=4,
        num_classes=5,
        class_token=False,
        global_pool="avg",
    )
    return vlcam.wrap(module.eval())


def test_without_a_class_token_no_patch_is_protected_from_being_discarded():
    model = no_class_token()
    kept = model.explain(models.pixels(), None, "vitexplain-rollout")
    bare = model.explain(models.pixels(), None, "vitexplain-rollout", departures="unprotected")
    assert np.array_equal(kept.tokens, bare.tokens)


def test_without_a_class_token_there_is_no_reciprocam():
    with pytest.raises(vlcam.RecipeError, match="no class token"):
        no_class_token().explain(models.pixels(), None, "vit-reciprocam")


@pytest.mark.parametrize("queries", ["patches", tuple(range(16))])
def test_all_rows_of_attention_as_cells_are_refused(queries):
    with pytest.raises(vlcam.RecipeError, match="rows of attention sum to 1"):
        no_class_token().explain(models.pixels(), None, "raw-attention", map_axis="queries", queries=queries)


def test_heads_as_channels_take_every_weighting():
    model = wrapped()
    grid = vlcam.all_recipes(model, layers="all", heads="channels", queries="all")
    found = model.sweep(models.pixels(), recipes=grid, target=1, empty="keep")
    assert {exp.recipe.weighting for exp in found} >= {"hirescam", "gradcam", "eigengradcam"}


def test_rounding_is_told_in_half_precision_too():
    model = vlcam.load("tiny-vit", dtype="bfloat16")
    scene = next(vlcam.scenes.generate(1, seed=7, start=1, objects=(2, 3)))
    exp = model.explain(scene.image, None, "pgc-hirescam", target=3, relu="none", site="F6", layer=4)
    assert exp.status == "rounding noise"


@pytest.mark.parametrize(("name", "layer"), [("tiny-vit", 4), ("tiny-swin", 5), ("tiny-clip", 2), ("tiny-blip-itm", 3)])
@pytest.mark.parametrize("eps", [None, 1e-5])
def test_terms_that_cancel_before_a_layer_norm_are_no_map(name, layer, eps):
    model = vlcam.load(name)
    for part in model.adapter.module.modules():
        if isinstance(part, torch.nn.LayerNorm) and eps is not None:
            part.eps = eps
    scene = next(vlcam.scenes.generate(1, seed=7, start=1, objects=(2, 3)))
    text = scene.caption if model.adapter.takes_text else None
    heads = model.adapter.heads
    score = {"target": "itm"} if "itm" in heads else {"target": "contrastive"} if text else {}
    recipe = vlcam.recipes()["pgc-hirescam"].recipe.replace(relu="none", site="F6", layers=(layer,), **score)
    (exp,) = model.sweep(scene.image, text, [recipe], empty="keep")
    assert exp.status == "rounding noise"


def test_what_a_sweep_made_explicit_is_on_record():
    model = wrapped()
    feature, _ = model.sweep(models.pixels(), recipes=["pgc-gradcam", "grad-sam"], target=1)
    alone = model.explain(models.pixels(), target=1)
    assert "explicit" in feature.provenance["model"]["attention"]["used"]
    assert "explicit" not in alone.provenance["model"]["attention"]["used"]


def test_names_that_differ_in_a_sign_are_saved_apart(tmp_path):
    scene = next(vlcam.scenes.generate(1, seed=7, start=1, objects=(2, 3)))
    scene.image.save(tmp_path / "scene.png")
    names = ["--recipe", "pgc-gradcam", "--recipe", "pgc-gradcam++", "--save"]
    given = ["sweep", "--model", "tiny-vit", "--image", str(tmp_path / "scene.png"), "--target", "3"]
    with pytest.raises(SystemExit) as ended:
        main([*given, *names, "--out", str(tmp_path / "out")])
    assert ended.value.code == 0
    saved = {vlcam.open(file).recipe.name for file in (tmp_path / "out").glob("*gradcam*.png")}
    assert saved == {"pgc-gradcam", "pgc-gradcam++"}


def test_a_set_of_classes_has_no_order():
    with pytest.raises(vlcam.RecipeError, match="a set has no order"):
        wrapped().explain(models.pixels(), target={1, 2})


def test_a_label_that_is_also_a_score_is_refused_but_its_index_is_not():
    labels = ["class", "none", "itm", "a", "b"]
    model = wrapped(labels=labels)
    with pytest.raises(vlcam.RecipeError, match="the name of a score and of class 0"):
        model.explain(models.pixels(), target="class")
    for target, index in (("none", 1), ("itm", 2), (0, 0), (Class("class"), 0)):
        exp = model.explain(models.pixels(), target=target)
        assert exp.provenance["run"]["class"]["index"] == index


def test_a_model_of_several_labels_at_once_says_what_its_probability_is():
    module = models.classifier("vit")
    assert not any("several classes at once" in note for note in vlcam.wrap(module).anatomy.notes)
    module.config.problem_type = "multi_label_classification"
    assert any("several classes at once" in note for note in vlcam.wrap(module).anatomy.notes)
