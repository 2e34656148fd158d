"""Classes of images explained: targets, batches, any state of model and caller, grids of every family, attention."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import models
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from transformers import ViTConfig, ViTModel
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

import vlcam
from vlcam.fitting import fitting
from vlcam.targets import Class, Custom

FAMILIES = ("vit", "deit-teacher", "dinov2-registers", "beit", "beit-cls")
LABELS = ("tench, Tinca tinca", "Red Fox", "bee", "fly", "bee eater")
RECIPES = ("pgc-gradcam", "pgc-hirescam", "attn-gradcam", "chefer-generic", "agcam", "legrad", "attention-rollout")


@pytest.fixture(params=FAMILIES)
def kind(request):
    return request.param


@pytest.fixture
def photo():
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 64, 3), np.uint8))


def wrapped(kind="vit", *, labels=LABELS, processor=None, options=None, **changes):
    return vlcam.wrap(
        models.classifier(kind, **changes), processor, name=f"random-{kind}", labels=labels, **options or {}
    )


def processor(side=32):
    return ViTImageProcessorPil(size={"height": side, "width": side})


def assert_close(found, expected, share=1e-6):
    """Equal up to a share of the largest magnitude."""
    np.testing.assert_allclose(found, expected, rtol=0, atol=share * max(np.abs(expected).max(), 1e-30))


def rank_correlation(one, other):
    ranks = [np.argsort(np.argsort(values.ravel())) for values in (one, other)]
    return np.corrcoef(*ranks)[0, 1]


# Targets


@pytest.mark.parametrize("target", [1, np.int64(1), "Red Fox", "red fox", "RED FOX", Class(1), Class("red fox"), [1]])
def test_a_class_is_named_by_its_index_or_its_label_in_any_capitals(target):
    model = wrapped()
    exp = model.explain(models.pixels(), target=target)
    exp = exp[0] if isinstance(target, list) else exp
    np.testing.assert_array_equal(exp.tokens, model.explain(models.pixels(), target=1).tokens)
    assert exp.provenance["run"]["class"] == {"index": 1, "label": "Red Fox", "chosen": "as given"}
    assert exp.subject == "class 1: Red Fox"
    assert exp.text is None
    assert exp.provenance["text"] is None
    assert (exp.recipe.target, exp.recipe.scale) == ("class", "logit")


def test_one_of_several_names_between_commas_is_enough():
    model = wrapped()
    for name in ("tench", "tinca tinca", "tench, Tinca tinca"):
        assert model.explain(models.pixels(), target=name).provenance["run"]["class"]["index"] == 0


@pytest.mark.parametrize(
    ("target", "error", "words"),
    [
        (5, vlcam.UnknownNameError, "no class 5; the model has classes 0 to 4"),
        (-1, vlcam.UnknownNameError, "no class -1"),
        ([0, 9], vlcam.UnknownNameError, "no class 9"),
        ("bee-eater", vlcam.UnknownNameError, "no class 'bee-eater'; close to it: 'bee eater'"),
        ("zebra crossing", vlcam.UnknownNameError, "no class 'zebra crossing'; close to it: 'tench"),
        (Class("zebra"), vlcam.UnknownNameError, "no class 'zebra'"),
        (1.5, vlcam.RecipeError, "give a class .index or label., a list of classes"),
        ([], vlcam.RecipeError, "name at least one class"),
        ("itm", vlcam.RecipeError, "target='itm': this model does not offer it; it offers 'class'"),
        ("contrastive", vlcam.RecipeError, "target='contrastive': this model does not offer it; it offers 'class'"),
        (Class(1, scale="cosine"), vlcam.RecipeError, "scale='cosine' with target='class'"),
        (Custom(lambda logits: logits, head="itm"), vlcam.RecipeError, "it offers 'class'"),
        (lambda logits: logits, vlcam.InputError, r"returned \(1, 5\); it must return one scalar per pair"),
    ],
)
def test_targets_that_do_not_exist_are_refused(target, error, words):
    with pytest.raises(error, match=words):
        wrapped().explain(models.pixels(), target=target)


def test_a_label_that_two_classes_have_needs_the_index():
    model = wrapped(labels=("crane", "Crane", "bee", "crane", "fly"))
    with pytest.raises(vlcam.UnknownNameError, match=r"classes \[0, 3\] have that name; give the index"):
        model.explain(models.pixels(), target="crane")
    assert model.explain(models.pixels(), target="Crane").provenance["run"]["class"]["index"] == 1


def test_without_a_target_the_class_of_the_highest_logit_is_explained_and_on_record(kind):
    model = wrapped(kind)
    images = models.pixels(batch=4, seed=3)
    with torch.no_grad():
        logits = model.adapter.module(images).logits
    for image, row, exp in zip(images, logits, model.explain(images), strict=True):
        top = int(row.argmax())
        assert exp.provenance["run"]["class"] == {"index": top, "label": LABELS[top], "chosen": "highest logit"}
        assert exp.provenance["run"]["target_value"] == pytest.approx(float(row[top]), rel=1e-4)
        assert exp.scores["class_logit"].value == pytest.approx(float(row[top]), rel=1e-4)
        assert exp.scores["class_probability"].value == pytest.approx(float(row.softmax(0)[top]), rel=1e-4)
        assert_close(exp.tokens, model.explain(image, target=top).tokens)


def test_scores_are_of_the_explained_class_with_their_kinds():
    model = wrapped()
    with torch.no_grad():
        row = model.adapter.module(models.pixels(batch=1)).logits[0]
    scores = model.explain(models.pixels(), target=2).scores
    others = torch.cat([row[:2], row[3:]])
    expected = {
        "class_logit": ("logit", row[2]),
        "class_probability": ("probability", row.softmax(0)[2]),
        "class_log_probability": ("log-probability", row.log_softmax(0)[2]),
        "class_margin": ("margin", row[2] - others.max()),
    }
    assert {name: score.kind for name, score in scores.items()} == {name: kind for name, (kind, _) in expected.items()}
    for name, (_, value) in expected.items():
        assert scores[name].value == pytest.approx(float(value), rel=1e-4), name
    top = model.scores(models.pixels())
    assert top["class_logit"].value == pytest.approx(float(row.max()), rel=1e-5)


def test_a_callable_and_a_custom_target_read_the_logits():
    model = wrapped()

    def second(logits):
        return logits[:, 1]

    expected = model.explain(models.pixels(), target=1).tokens
    for target in (second, Custom(second, label="second"), Custom(second, head="class")):
        exp = model.explain(models.pixels(), target=target)
        np.testing.assert_array_equal(exp.tokens, expected)
        assert (exp.recipe.target, exp.recipe.scale) == ("custom", "raw")
    named = model.explain(models.pixels(), target=Custom(second, label="second"))
    assert named.provenance["run"]["target"] == "second"
    assert named.subject == "target second"


@pytest.mark.parametrize("scale", ["probability", "log-probability", "margin", "finer"])
def test_a_class_brings_its_scale(scale):
    model = wrapped()
    exp = model.explain(models.pixels(), target=Class("bee", scale=scale))
    assert exp.recipe.scale == scale
    np.testing.assert_array_equal(exp.tokens, model.explain(models.pixels(), target=2, scale=scale).tokens)
    top = model.explain(models.pixels(), target=Class(scale=scale))
    assert top.provenance["run"]["class"]["chosen"] == "highest logit"
    assert top.recipe.scale == scale


def test_maps_of_two_classes_differ_and_the_same_class_gives_the_same_bits(kind):
    model = wrapped(kind)
    one, two, again = (model.explain(models.pixels(), target=index, relu="none").tokens for index in (1, 2, 1))
    np.testing.assert_array_equal(one, again)
    assert np.abs(one - two).max() > 0.01 * np.abs(one).max()


@pytest.mark.parametrize("recipe", ["pgc-gradcam", "agcam", "legrad"])
def test_classes_of_one_image_in_one_call(kind, recipe):
    model = wrapped(kind)
    one, two, again = model.explain(models.pixels(), None, recipe, target=[1, 2, 1])
    np.testing.assert_array_equal(one.tokens, again.tokens)
    assert np.abs(one.tokens - two.tokens).max() > 1e-3 * np.abs(one.tokens).max()
    for index, exp in ((1, one), (2, two)):
        assert_close(exp.tokens, model.explain(models.pixels(), None, recipe, target=index).tokens)
        assert exp.provenance["run"]["class"]["index"] == index
        assert exp.scores["class_logit"].value == pytest.approx(exp.provenance["run"]["target_value"])


def test_images_and_classes_are_paired_in_order():
    model = wrapped()
    images = models.pixels(batch=3)
    for image, index, exp in zip(images, (4, 0, 2), model.explain(images, target=[4, "tench", 2]), strict=True):
        assert exp.provenance["run"]["class"]["index"] == index
        assert_close(exp.tokens, model.explain(image, target=index).tokens)
    for image, exp in zip(images, model.explain(images, target="fly"), strict=True):
        assert exp.subject == "class 3: fly"
        assert_close(exp.tokens, model.explain(image, target=3).tokens)
    for target in (np.array([4, 0, 2]), torch.tensor([4, 0, 2]), (4, 0, 2)):
        assert [exp.provenance["run"]["class"]["index"] for exp in model.explain(images, target=target)] == [4, 0, 2]


def test_counts_that_do_not_pair_are_refused():
    with pytest.raises(vlcam.InputError, match="2 images and 3 classes"):
        wrapped().explain(models.pixels(batch=2), target=[0, 1, 2])


def test_a_list_gives_a_list_and_a_batch_of_a_processor_is_taken(photo):
    model = wrapped(processor=processor())
    batch = processor()(photo, return_tensors="pt")
    (found,) = model.explain(batch)
    np.testing.assert_array_equal(found.tokens, model.explain(photo).tokens)
    assert found.heatmap.shape == (32, 32)
    assert model.explain(photo).heatmap.shape == (40, 64)
    assert len(model.explain([photo])) == len(model.explain(photo, target=[1])) == 1
    with pytest.raises(vlcam.InputError, match="the batch lacks pixel_values"):
        model.explain({"images": 1})


def test_text_is_refused_by_a_model_that_takes_none(photo):
    model = wrapped(processor=processor())
    for text in ("a red fox", ["a fox"]):
        with pytest.raises(vlcam.InputError, match="this model takes no text; name a class instead, target="):
            model.explain(photo, text)
    with pytest.raises(vlcam.RecipeError, match="only maps with text rows"):
        model.explain(photo, phrase="fox")
    for recipe in ("lavis-itm", vlcam.recipes()["lavis-itm"].recipe):
        with pytest.raises(vlcam.UnknownNameError, match="no stream 'fusion'; it has 'vision'"):
            model.explain(photo, None, recipe)
    with pytest.raises(vlcam.RecipeError, match="target='itm': this model does not offer it; it offers 'class'"):
        model.explain(photo, None, vlcam.recipes()["pgc-gradcam"].recipe.replace(target="itm"))


def test_an_explanation_of_a_class_shows_what_it_is_of(photo):
    exp = wrapped(processor=processor()).explain(photo, target="bee")
    assert repr(exp) == "<Explanation of 'class 2: bee' by pgc-gradcam, 4 x 4 tokens, ok>"
    assert exp._repr_png_().startswith(b"\x89PNG")
    assert list(exp.words) == []
    with pytest.raises(vlcam.UnknownNameError, match="no map per word"):
        exp.words["bee"]
    assert wrapped(labels=None).explain(models.pixels(), target=1).subject == "class 1: LABEL_1"


def test_a_model_that_embeds_only_is_refused():
    config = ViTConfig(**{**models.COMMON, **models.FFN})
    with pytest.raises(vlcam.AdapterError, match=r"no adapter accepts transformers\..*ViTModel; looked for: .*VitHF"):
        vlcam.wrap(ViTModel(config))
    with pytest.raises(vlcam.AdapterError, match="its output is an embedding, of which no class can be explained"):
        vlcam.wrap(models.classifier("vit", num_labels=0))


# Layers


def test_a_layer_is_an_index_a_negative_one_or_a_word():
    model = wrapped()
    by_index = [model.explain(models.pixels(), layer=index, relu="none").tokens for index in range(3)]
    for layer, index in ((-1, 2), (-3, 0), ("last", 2), ([1], 1), (np.int64(1), 1)):
        exp = model.explain(models.pixels(), layer=layer, relu="none")
        np.testing.assert_array_equal(exp.tokens, by_index[index])
        assert exp.provenance["run"]["layers"] == [index]
    for rule, merge in {"mean": np.mean, "sum": np.sum, "max": np.max}.items():
        merged = model.explain(models.pixels(), layer="all", layer_rule=rule, relu="none")
        assert_close(merged.tokens, merge(by_index, axis=0))
        assert merged.provenance["run"]["layers"] == [0, 1, 2]
    with pytest.raises(vlcam.UnknownNameError, match="vision has no block 3; it has blocks 0 to 2"):
        model.explain(models.pixels(), layer=3)
    with pytest.raises(vlcam.RecipeError, match="layer_rule='single'"):
        model.explain(models.pixels(), layer=[0, 1])


def test_choices_of_published_recipes_that_depend_on_the_model_are_on_record():
    run = wrapped("beit").explain(models.pixels(), None, "raw-attention").provenance["run"]
    assert run["fitted"]["tokens"] == "published for the class token; this model's heads read the patches: queries"
    run = wrapped("beit-cls").explain(models.pixels(), None, "raw-attention").provenance["run"]
    assert run["fitted"] == dict.fromkeys(("layers", "target", "tokens"), "as published")
    run = wrapped("beit").explain(models.pixels(), None, "raw-attention", queries="cls").provenance["run"]
    assert run["fitted"]["tokens"] == "as given"
    assert run["rows"] == [0]


@pytest.mark.parametrize("recipe", ["legrad", "agcam", "pgc-gradcam"])
def test_the_class_of_the_highest_logit_is_the_models_not_that_of_a_block(kind, recipe):
    model = wrapped(kind)
    for seed in range(4):
        top = model.explain(models.pixels(seed), None, recipe)
        index = top.provenance["run"]["class"]["index"]
        np.testing.assert_array_equal(top.tokens, model.explain(models.pixels(seed), None, recipe, target=index).tokens)


# Batches and types


def test_a_batch_equals_single_calls_with_every_named_recipe(kind):
    model = vlcam.wrap(models.classifier(kind).double(), labels=LABELS)  # some recipes divide by what is nearly zero
    images = models.pixels(batch=3)
    together = model.sweep(images, target=[0, 3, 2], empty="keep")
    for number, (image, index) in enumerate(zip(images, (0, 3, 2), strict=True)):
        alone = model.sweep(image, target=index, empty="keep")
        for batch, single in zip(together, alone, strict=True):
            assert batch[number].status == single.status, single.recipe.name
            assert_close(batch[number].tokens, single.tokens)
            np.testing.assert_allclose(batch[number].heatmap, single.heatmap, atol=1e-5)


def test_a_bfloat16_model_gives_finite_float32_maps_like_those_of_float32(kind):
    exact = wrapped(kind).sweep(models.pixels(), None, RECIPES, target=1)
    model = vlcam.wrap(models.classifier(kind).bfloat16(), labels=LABELS)
    for exp, expected in zip(model.sweep(models.pixels(), None, RECIPES, target=1), exact, strict=True):
        assert exp.tokens.dtype == np.float32
        assert np.isfinite(exp.tokens).all()
        assert exp.status == expected.status
        if exp.status == "ok":
            assert rank_correlation(exp.tokens, expected.tokens) > 0.9, exp.recipe.name
        assert exp.provenance["model"]["dtype"] == "bfloat16"


# The state of the model and of the caller


def assert_same_maps(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens, one.recipe.name)
        assert one.status == other.status


def test_frozen_parameters_and_no_grad_give_the_same_maps(kind):
    module = models.classifier(kind)
    model = vlcam.wrap(module)
    free = model.sweep(models.pixels(), empty="keep")
    module.requires_grad_(False)
    pixels = models.pixels()
    with torch.no_grad():
        frozen = model.sweep(pixels, empty="keep")
        assert not torch.is_grad_enabled()
    assert_same_maps(frozen, free)
    assert not any(parameter.requires_grad for parameter in module.parameters())
    assert not pixels.requires_grad


def test_inference_mode_of_the_caller_does_not_matter(kind, photo):
    model = wrapped(kind, processor=processor())
    expected = [model.sweep(image, empty="keep") for image in (models.pixels(), photo)]
    with torch.inference_mode():
        found = [model.sweep(image, empty="keep") for image in (models.pixels(), photo)]
        assert torch.is_inference_mode_enabled()
    for some, others in zip(found, expected, strict=True):
        assert_same_maps(some, others)


def test_a_default_device_of_the_caller_does_not_matter_with_any_named_recipe(kind, photo):
    model = wrapped(kind, processor=processor())
    pixels = models.pixels(batch=2)
    expected = model.sweep([photo], empty="keep"), model.sweep(pixels, target=[1, 2], empty="keep")
    torch.set_default_device("meta")
    try:
        found = model.sweep([photo], empty="keep"), model.sweep(pixels, target=[1, 2], empty="keep")
        heat = found[0][0][0].heatmap
    finally:
        torch.set_default_device(None)
    np.testing.assert_array_equal(heat, expected[0][0][0].heatmap)
    for before, after in zip(expected[0] + expected[1], found[0] + found[1], strict=True):
        for one, other in zip(before, after, strict=True):
            np.testing.assert_array_equal(one.tokens, other.tokens)


def test_autocast_and_a_default_type_of_the_caller_do_not_matter(kind):
    model = wrapped(kind)
    pixels = models.pixels()
    expected = model.sweep(pixels, empty="keep")
    with torch.autocast("cpu", torch.bfloat16):
        inside = model.sweep(pixels, empty="keep")
    torch.set_default_dtype(torch.float64)
    try:
        other = model.sweep(pixels, empty="keep")
    finally:
        torch.set_default_dtype(torch.float32)
    for before, *after in zip(expected, inside, other, strict=True):
        for exp in after:
            np.testing.assert_array_equal(exp.tokens, before.tokens)
            assert exp.tokens.dtype == np.float32
            assert exp.scores == before.scores


def test_wrappers_are_looked_through(kind):
    module = models.classifier(kind)
    expected = vlcam.wrap(module).explain(models.pixels(batch=2), target=1)
    for wrapper in (nn.DataParallel(module), torch.compile(module), torch.compile(nn.DataParallel(module))):
        found = vlcam.wrap(wrapper).explain(models.pixels(batch=2), target=1)
        for one, other in zip(expected, found, strict=True):
            np.testing.assert_array_equal(one.tokens, other.tokens)
            assert one.provenance["model"] == other.provenance["model"]


def lived_in(kind, **changes):
    """A model in the middle of training: dropout, gradients, mixed flags, hooks of its own."""
    rates = {"drop_path_rate": 0.5} if kind.startswith(("dinov2", "beit")) else {}
    module = models.classifier(
        kind, hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5, **rates, **changes
    ).train()
    parts = list(module.modules())
    assert any(isinstance(part, nn.Dropout) and part.p == 0.5 for part in parts)
    parts[-1].eval()
    parameters = list(module.parameters())
    parameters[-1].requires_grad_(False)
    for parameter in parameters[::2]:
        parameter.grad = torch.randn_like(parameter)
    parts[3].register_forward_hook(lambda *_: None)
    module.register_buffer("seen", torch.tensor([3.0]))
    module.register_buffer("unsaved", torch.tensor([4.0]), persistent=False)
    return module


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_dropout_of_a_model_in_training_does_not_reach_the_map(kind, implementation):
    quiet = models.classifier(kind)
    quiet.set_attn_implementation(implementation)
    expected = vlcam.wrap(quiet).sweep(models.pixels(), target=1, empty="keep")
    module = lived_in(kind)
    module.set_attn_implementation(implementation)
    model = vlcam.wrap(module)
    first, second = (model.sweep(models.pixels(), target=1, empty="keep") for _ in range(2))
    for calm, one, two in zip(expected, first, second, strict=True):
        np.testing.assert_array_equal(one.tokens, two.tokens)
        np.testing.assert_array_equal(one.tokens, calm.tokens)
    assert module.training


def test_nothing_about_the_model_changes(kind):
    module = lived_in(kind)
    model = vlcam.wrap(module)
    before = models.state(module)
    model.sweep(models.pixels(batch=2), target=[1, 2], empty="keep")
    model.capture(models.pixels(), stream="vision", site="F2")
    model.scores(models.pixels())
    models.assert_same(before, models.state(module))


class BrokenError(Exception):
    pass


def test_nothing_changes_when_the_target_breaks(kind):
    module = lived_in(kind)
    model = vlcam.wrap(module)
    before = models.state(module)
    for recipe in ("pgc-gradcam", "chefer-generic", "agcam", "legrad"):
        for error in (BrokenError, KeyboardInterrupt):

            def fail(_, error=error):
                raise error

            with pytest.raises(error):
                model.explain(models.pixels(), None, recipe, target=fail)
            models.assert_same(before, models.state(module))
    assert model.explain(models.pixels(), target=1, relu="none").status == "ok"


@pytest.mark.parametrize("site", ["F2", "F6"])
def test_nothing_changes_when_the_model_breaks(kind, site, monkeypatch):
    module = lived_in(kind)
    model = vlcam.wrap(module)

    def fail(*_, **__):
        raise BrokenError

    last = model.anatomy.stream("vision").blocks[-1].sites[site].module
    monkeypatch.setattr(last, "forward", fail)
    before = models.state(module)
    for recipe in ("pgc-gradcam", "agcam"):
        with pytest.raises(BrokenError):
            model.explain(models.pixels(), None, recipe)
        models.assert_same(before, models.state(module))
    monkeypatch.undo()
    assert model.explain(models.pixels(), target=1, relu="none").status == "ok"


def test_captured_tensors_have_no_graph_and_die_with_the_capture(kind):
    model = wrapped(kind)
    for site in ("F1", "F2", "F6"):
        found = model.capture(models.pixels(), stream="vision", site=site, target=1)
        tensors = [*found.activations.values(), *found.gradients.values(), found.target, *found.outputs.values()]
        assert len(found.activations) == len(found.gradients) == 3
        assert all(not tensor.requires_grad and tensor.grad_fn is None for tensor in tensors)
        held = [weakref.ref(tensor) for tensor in tensors]
        del found, tensors
        gc.collect()
        assert all(ref() is None for ref in held)


@pytest.mark.parametrize("recipes", [["pgc-gradcam"], ["chefer-generic", "agcam", "legrad"]])
@pytest.mark.parametrize("kind", ["vit", "beit"])
def test_thirty_explainers_leave_no_hook_and_no_tensor(kind, recipes):
    module = models.classifier(kind)
    image = models.pixels()
    hooks = models.state(module)["hooks"]

    def work(times):
        for _ in range(times):
            for exp in vlcam.wrap(module).sweep(image, None, recipes):
                assert isinstance(exp.tokens, np.ndarray)
            assert models.state(module)["hooks"] == hooks

    work(3)
    gc.collect()
    tensors = sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())
    work(30)
    gc.collect()
    assert sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects()) <= tensors


# Grids


@pytest.mark.parametrize(("side", "patch", "heads"), [(32, 8, 2), (48, 8, 4), (32, 4, 4)])
def test_the_grid_is_read_from_the_model_and_the_input(kind, side, patch, heads):
    model = wrapped(kind, image_size=side, patch_size=patch, num_attention_heads=heads)
    cells = side // patch
    for exp in model.sweep(models.pixels(height=side, width=side), None, RECIPES):
        assert exp.tokens.shape == (cells, cells), exp.recipe.name
        assert exp.provenance["run"]["grid"] == [cells, cells]
    found = model.capture(models.pixels(height=side, width=side), stream="vision", site="F2", layers=0)
    count = len(model.adapter.prefix) + cells**2
    assert next(iter(found.activations.values())).shape == (1, heads, count, count)


def other_sizes(kind):
    return {"interpolate_pos_encoding": True} if kind in models.ASKS else {}


@pytest.mark.parametrize("size", [(48, 32), (24, 88)])
def test_an_image_that_is_not_square_has_its_own_grid_and_that_is_on_record(kind, size):
    model = wrapped(kind, options=other_sizes(kind))
    grid = size[0] // 8, size[1] // 8
    for exp in model.sweep(models.pixels(height=size[0], width=size[1]), empty="keep"):
        assert exp.tokens.shape == grid, exp.recipe.name
        assert exp.heatmap.shape == size
        steps = exp.provenance["image"]["steps"]
        assert {"step": "interpolate_positions", "trained": [32, 32], "used": list(size)} in steps


def test_a_size_that_is_not_asked_for_is_refused():
    with pytest.raises(vlcam.InputError, match=r"\(48, 32\).*trained at \(32, 32\).*interpolate_pos_encoding=True"):
        wrapped().explain(models.pixels(height=48))
    with pytest.raises(vlcam.InputError, match="multiples of the patch, 8"):
        wrapped("dinov2-registers").explain(models.pixels(height=44))


CORNERS = {"top left": (0, 0), "top right": (0, -1), "bottom left": (-1, 0), "bottom right": (-1, -1)}


@pytest.mark.parametrize("corner", CORNERS.values(), ids=CORNERS)
@pytest.mark.parametrize("size", [(40, 64), (64, 24)])
def test_what_changes_in_a_corner_is_hot_in_that_corner_of_the_heatmap(kind, size, corner):
    model = wrapped(kind, options=other_sizes(kind))
    row, column = (edge % (side // 8) for edge, side in zip(corner, size, strict=True))
    before = models.pixels(height=size[0], width=size[1])
    after = before.clone()
    after[:, row * 8 : row * 8 + 8, column * 8 : column * 8 + 8] += 2
    # The first LayerNorm stands before any mixing of tokens: one patch, one token.
    plain = {"site": "F1", "weighting": "none", "layer": 0, "relu": "none"}
    one, other = (model.explain(image, None, "pgc-gradcam", **plain) for image in (before, after))
    moved = np.abs(other.tokens - one.tokens)
    assert np.argwhere(moved > 0).tolist() == [[row, column]]
    x, y = replace(other, tokens=moved, status="ok").peak()
    assert (y // 8, x // 8) == (row, column)


@pytest.mark.parametrize("corner", CORNERS.values(), ids=CORNERS)
def test_a_corner_painted_on_a_file_is_found_at_that_corner_of_the_file(kind, corner):
    model = wrapped(kind, processor=processor(), options={"image_size": (40, 64), **other_sizes(kind)})
    blank = np.zeros((80, 320, 3), np.uint8)  # twice as high and five times as wide as what the model sees
    painted = blank.copy()
    painted[
        slice(0, 16) if corner[0] == 0 else slice(-16, None), slice(0, 40) if corner[1] == 0 else slice(-40, None)
    ] = 255
    plain = {"site": "F1", "weighting": "none", "layer": 0, "relu": "none"}
    one, other = (model.explain(image, None, "pgc-gradcam", **plain) for image in (blank, painted))
    moved = replace(other, tokens=np.abs(other.tokens - one.tokens), status="ok")
    assert moved.heatmap.shape == (80, 320)
    x, y = moved.peak()
    assert (y // 16, x // 40) == (corner[0] % 5, corner[1] % 8)


def test_a_distilled_model_has_sixteen_cells_of_eighteen_tokens_and_averages_two_heads():
    model = wrapped("deit-teacher")
    exp = model.explain(models.pixels(), target=1)
    assert exp.tokens.shape == (4, 4)
    assert exp.provenance["run"]["prefix_tokens"] == ["cls", "distillation"]
    found = model.capture(models.pixels(), stream="vision", site="F1")
    assert all(tensor.shape == (1, 18, 32) for tensor in found.activations.values())
    assert exp.provenance["run"]["dropped"][0]["tokens"] == [0, 1]
    with torch.no_grad():
        both = model.adapter.module(models.pixels(batch=1))
    mean = (both.cls_logits + both.distillation_logits)[0, 1] / 2
    assert exp.provenance["run"]["target_value"] == pytest.approx(float(mean), rel=1e-4)


@pytest.mark.parametrize(("side", "patch"), [(32, 8), (28, 7)])
def test_registers_are_no_cells_of_the_map_and_have_rows_of_their_own(side, patch):
    model = wrapped("dinov2-registers", image_size=side, patch_size=patch)
    pixels = models.pixels(height=side, width=side)
    features = next(iter(model.capture(pixels, stream="vision", site="F1", layers=1).activations.values()))
    assert features.shape[1] == 21
    plain = model.explain(pixels, site="F1", weighting="none", layer=1, relu="none")
    assert_close(plain.tokens.ravel(), features[0, 5:].mean(-1).numpy())
    attention = next(iter(model.capture(pixels, stream="vision", site="F2", layers=1).activations.values()))
    mean = attention[0].mean(0)
    for rows, indices in {"cls": [0], "registers": [1, 2, 3, 4], "patches": range(5, 21), "all": range(21)}.items():
        exp = model.explain(pixels, None, "raw-attention", layer=1, queries=rows)
        assert exp.provenance["run"]["rows"] == list(indices)
        assert_close(exp.tokens.ravel(), mean[list(indices), 5:].mean(0).numpy())
    fewer = model.explain(pixels, None, "raw-attention", layer=1, queries="all", exclude=("cls", "registers"))
    assert fewer.provenance["run"]["rows"] == [0, *range(5, 21)]


def test_rows_of_tokens_that_the_model_lacks_are_refused():
    with pytest.raises(vlcam.RecipeError, match=r"'registers': there is no such image token; before .*'cls'"):
        wrapped().explain(models.pixels(), None, "raw-attention", queries="registers")


def test_where_patches_are_pooled_gradcam_of_the_last_output_is_hirescam():
    model = wrapped("beit")
    choices = {"site": "F6", "layer": -1, "relu": "none", "target": 2}
    exact = model.explain(models.pixels(), None, "pgc-hirescam", **choices).tokens
    assert_close(model.explain(models.pixels(), None, "pgc-gradcam", **choices).tokens, exact)
    with_cls = model.explain(models.pixels(), None, "pgc-gradcam", gradient_tokens="all", **choices).tokens
    assert_close(with_cls, exact * 16 / 17)
    assert_close(with_cls, exact, 0.06)
    with pytest.raises(vlcam.EvidenceError, match="exactly zero on the class token"):
        model.explain(models.pixels(), None, "pgc-gradcam", gradient_tokens="cls", **choices)


# Attention


def test_attention_is_the_models_own_whatever_kernel_it_is_configured_for(kind):
    module = models.classifier(kind)
    model = vlcam.wrap(module)
    assert module.config._attn_implementation == "sdpa"
    with torch.no_grad():
        before = module(models.pixels(batch=2)).logits
    found = model.capture(models.pixels(batch=2), stream="vision", site="F2", target=1)
    with torch.no_grad():
        after = module(models.pixels(batch=2)).logits
    assert module.config._attn_implementation == "sdpa"
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    torch.testing.assert_close(found.outputs["class"], before, rtol=1e-5, atol=1e-5)
    module.set_attn_implementation("eager")
    with torch.no_grad():
        own = module(models.pixels(batch=2), output_attentions=True).attentions
    for attention, reference in zip(found.activations.values(), own, strict=True):
        assert attention.shape == reference.shape
        assert bool((attention >= 0).all())
        torch.testing.assert_close(attention.sum(-1), torch.ones(attention.shape[:-1]))
        torch.testing.assert_close(attention, reference, rtol=1e-4, atol=1e-6)
    for exp in model.explain(models.pixels(batch=2), None, "raw-attention"):
        assert exp.status == "ok"
        assert exp.provenance["model"]["attention"]["used"] == "explicit softmax in tapped blocks, eager elsewhere"


def test_attention_of_one_layer_keeps_one_attention_matrix(kind):
    module = models.classifier(kind, num_hidden_layers=12)
    model = vlcam.wrap(module)
    count = len(model.adapter.prefix) + 16

    def captured(layers):
        """The attention that is handed out, and how many matrices of its size the graph keeps besides."""
        kept = set()

        def pack(tensor):
            if tensor.is_floating_point() and tensor.shape[-2:] == (count, count):
                kept.add(tensor.untyped_storage().data_ptr())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            found = model.capture(models.pixels(), stream="vision", site="F2", layers=layers, target=1)
        assert all(tensor.shape == (1, 4, count, count) for tensor in found.activations.values())
        assert len(found.activations) == len(found.gradients)
        return len(found.activations), len(kept)

    handed_out, kept = captured(5)
    assert handed_out == 1
    assert captured("all")[0] == 12
    if not kind.startswith("beit"):  # every kernel keeps its bias of relative positions, which has the same size
        assert kept == 0  # the graph begins at the matrix: nothing before it, and fused kernels behind it
        assert captured("all")[1] >= 11


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_every_named_recipe_works_with_every_implementation_of_attention(kind, implementation):
    module = models.classifier(kind)
    module.set_attn_implementation(implementation)
    model = vlcam.wrap(module)
    entries = vlcam.recipes().items()
    asked = [name for name, e in entries if e.recipe.asks or e.recipe.gradient_path == "integrated"]
    one_head = {name for name, e in entries if e.recipe.attention == "one_head" and e.recipe.stream == "vision"}
    names = [*fitting(model.adapter), *asked]
    # Heads are joined but where each has a bias of its own.
    joined = not kind.startswith("beit")
    assert one_head & set(names) == (one_head if joined else set())
    for exp in model.sweep(models.pixels(), None, names, target=1, empty="keep"):
        assert exp.tokens.shape == (4, 4)
        assert exp.status in ("ok", "no positive evidence"), exp.recipe.name


# Maps in which there is nothing


def flat(module, sign):
    """Let the last block's first LayerNorm give every token the same feature, `sign` in one channel."""
    norm = module.vit.layers[-1].layernorm_before
    with torch.no_grad():
        norm.weight.zero_()
        norm.bias.zero_()
        norm.bias[3] = sign
    return module


def test_constant_and_negative_maps_say_so_and_are_not_drawn():
    found = {}
    for sign in (1.0, -1.0):
        model = vlcam.wrap(flat(models.classifier("vit"), sign))
        signed = model.explain(models.pixels(), target=1, relu="none")
        assert signed.status == "constant"
        assert len(set(signed.tokens.ravel().tolist())) == 1
        exp = model.explain(models.pixels(), target=1)
        found[bool(signed.tokens.max() > 0)] = exp.status
        assert (exp.tokens.max() == 0) == (signed.tokens.max() < 0)
        for each in (signed, exp):
            np.testing.assert_array_equal(each.heatmap, 0)  # no division by a range of zero
            with pytest.raises(vlcam.EvidenceError, match=rf"nothing to draw \({each.status}\)"):
                each.overlay()
            assert each._repr_png_() is None
    assert found == {True: "constant", False: "no positive evidence"}


def test_a_broken_model_is_refused():
    module = models.classifier("vit")
    with torch.no_grad():
        module.classifier.weight.fill_(float("nan"))
    with pytest.raises(vlcam.EvidenceError, match="class_logit is not finite"):
        vlcam.wrap(module).explain(models.pixels())


@pytest.mark.parametrize("target", [None, 1])
def test_where_the_model_is_sure_the_logit_keeps_its_map_and_the_probability_has_none(kind, target):
    expected = wrapped(kind).explain(models.pixels(), target=target).heatmap
    module = models.classifier(kind)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "classifier" in name:
                parameter.mul_(1e5)
    model = vlcam.wrap(module)
    np.testing.assert_allclose(model.explain(models.pixels(), target=target).heatmap, expected, atol=1e-5)
    with pytest.raises(vlcam.EvidenceError, match="class_probability at F1 of vision block 2 is exactly zero"):
        model.explain(models.pixels(), target=target, scale="probability")
    recipe = model.explain(models.pixels()).recipe.replace(scale="probability")
    (kept,) = model.sweep(models.pixels(), None, [recipe], target=target, empty="keep")
    assert kept.status == "zero gradient"


# Saved files


@pytest.mark.parametrize("target", [None, "bee", Class(3, scale="margin"), Class(scale="finer")], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_an_explanation_of_a_class_verifies_from_its_file(tmp_path, photo, recipe, target):
    model = wrapped(processor=processor())
    exp = model.explain(photo, None, recipe, target=target if recipe != "attention-rollout" else None)
    opened = vlcam.open(exp.save(tmp_path / "out.png"))
    assert opened.record() == exp.record()
    assert opened.subject == exp.subject
    assert opened.text is None
    outcome = opened.verify(model)
    assert outcome.identical
    assert outcome.differences == ()


def test_every_named_recipe_of_every_family_verifies(tmp_path, kind):
    # A sweep taps more in one pass than a single recipe does, so that the last bits may differ; in float32 that is too
    # much for recipes that divide by what is nearly zero.
    model = vlcam.wrap(models.classifier(kind).double())
    for name, exp in zip(fitting(model.adapter), model.sweep(models.pixels(), target=2, empty="keep"), strict=True):
        outcome = vlcam.open(exp.save(tmp_path / f"{name}.png")).verify(model)
        assert outcome.reproduced, name
        # The sweep made attention explicit where the recipe alone does not need it, and says so.
        assert all(line.startswith("model.attention.used") for line in outcome.differences), name


def test_each_of_several_classes_verifies_as_the_class_it_is(tmp_path):
    model = wrapped()
    for index, exp in zip((1, 4), model.explain(models.pixels(), target=[1, 4]), strict=True):
        opened = vlcam.open(exp.save(tmp_path / f"{index}.png"))
        assert opened.provenance["run"]["class"]["index"] == index
        assert opened.verify(model).identical


def test_a_custom_target_cannot_be_verified(tmp_path):
    model = wrapped()
    exp = model.explain(models.pixels(), target=lambda logits: logits[:, 1] - logits[:, 2])
    opened = vlcam.open(exp.save(tmp_path / "custom.png"))
    assert "lambda" in opened.subject
    with pytest.raises(vlcam.InputError, match="is a Python callable, which no record can hold"):
        opened.verify(model)


def test_another_class_or_label_is_told(tmp_path):
    model = wrapped()
    exp = model.explain(models.pixels(), target=1)
    opened = vlcam.open(exp.save(tmp_path / "out.png"))
    other = vlcam.wrap(models.classifier("vit"), name="random-vit", labels=["a", "b", "c", "d", "e"])
    outcome = opened.verify(other)
    assert "run.class.label: was 'Red Fox', is 'b'" in outcome.differences
    changed = opened.provenance["run"] | {"class": {"index": 2, "label": "bee", "chosen": "as given"}}
    assert not replace(opened, provenance={**opened.provenance, "run": changed}).verify(model).reproduced
