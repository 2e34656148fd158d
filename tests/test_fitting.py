"""The grid of recipes that are valid for a model."""

from __future__ import annotations

import models
import pytest

import vlcam
from vlcam.explainer import Explainer
from vlcam.plan import plan

FAMILIES = ("vit", "deit-teacher", "dinov2-registers", "beit", "beit-cls")
FEATURES = ("F1", "F3_HEADS", "F3", "F4", "F5", "F6")
BEHIND = ("F3_HEADS", "F3", "F4", "F5", "F6")
CHANNELS = (
    *("gradcam", "gradcam++", "xgradcam", "layercam", "hirescam", "elementwise", "eigencam", "eigengradcam", "none"),
)
OF_VALUES = ("value*gradient", "value*gradient*similarity")
"""At F3_HEADS alone: the gradient of what the heads make of their values."""
ATTENTION = ("attention", "gradient", "attention*gradient", "sigmoid*gradient", "head_weights")


@pytest.fixture(params=FAMILIES)
def kind(request):
    return request.param


def wrapped(kind="vit", **changes):
    return vlcam.wrap(models.classifier(kind, **changes))


def assert_valid(model, recipes):
    """Each can be asked of the model, and none is there twice, neither by its choices nor by its name."""
    assert recipes
    for recipe in recipes:
        plan(model.adapter, recipe, {})
        assert vlcam.Recipe.from_json(recipe.to_json()) == recipe
    assert len({recipe.fingerprint for recipe in recipes}) == len(set(recipes)) == len(recipes)
    assert len({recipe.name for recipe in recipes}) == len(recipes)


def test_every_site_by_every_weighting_by_every_block(kind):
    model = wrapped(kind)
    recipes = vlcam.all_recipes(model)
    assert_valid(model, recipes)
    expected = {(site, weighting) for site in FEATURES for weighting in CHANNELS} | {("F2", w) for w in ATTENTION}
    expected |= {("F3_HEADS", weighting) for weighting in OF_VALUES if kind != "beit"}  # it has no class token to read
    for layer in range(3):
        found = [(recipe.site, recipe.weighting) for recipe in recipes if recipe.layers == (layer,)]
        assert sorted(found) == sorted(expected)
    assert len(recipes) == 3 * (6 * 9 + 5 + (0 if kind == "beit" else 2))


@pytest.mark.parametrize(("layers", "blocks"), [("last", [2]), ([0, -1], [0, 2]), (1, [1]), ("all", [0, 1, 2])])
def test_blocks_are_chosen_as_elsewhere(layers, blocks):
    recipes = vlcam.all_recipes(wrapped(), layers=layers, site="F1", weighting="gradcam")
    assert [recipe.layers for recipe in recipes] == [(block,) for block in blocks]
    assert [recipe.name for recipe in recipes] == [f"F1-gradcam-{block}" for block in blocks]


def test_rows_and_targets_are_the_usual_ones_of_the_model(kind, model):
    classifier = wrapped(kind)
    for recipe in vlcam.all_recipes(classifier):
        if recipe.site == "F2":
            assert recipe.queries == classifier.adapter.reads == ("patches" if kind == "beit" else "cls")
        assert (recipe.target, recipe.scale) == (("class", "logit") if recipe.needs_gradient else ("none", "none"))
    assert {recipe.target for recipe in vlcam.all_recipes(model) if recipe.needs_gradient} == {"itm"}


def test_the_streams_of_a_model_with_text(model):
    fusion = vlcam.all_recipes(model, stream="fusion")
    assert_valid(model, fusion)
    assert {recipe.site for recipe in fusion} == {"CROSS", "CONTEXT"}
    assert {recipe.weighting for recipe in fusion if recipe.site == "CROSS"} == set(ATTENTION) - {"sigmoid*gradient"}
    vision = vlcam.all_recipes(model)
    assert_valid(model, vision)
    assert {recipe.site for recipe in vision} == {*FEATURES, "F2"}
    text = "a red circle and a blue dog"
    found = model.sweep(models.pixels(), text, [*fusion, *vision], empty="keep")
    # In the last block of the text only the first token has a gradient, and lavis' rows are the words.
    zero = {exp.recipe for exp in found if exp.status == "zero gradient"}
    last = [recipe for recipe in fusion if recipe.site == "CROSS" and recipe.layers == (2,) and recipe.needs_gradient]
    assert zero == set(last)


@pytest.mark.parametrize(("kind", "stream"), [("clip", "text"), ("siglip", "text"), ("siglip", "pooler")])
def test_the_streams_of_a_model_with_two_towers(kind, stream):
    model = Explainer(models.two_towers(kind), "x")
    recipes = vlcam.all_recipes(model, stream=stream, layers="last")
    assert_valid(model, recipes)
    weightings = {recipe.weighting for recipe in recipes if recipe.site in ("F2", "CROSS")}
    assert weightings == set(ATTENTION) - ({"sigmoid*gradient"} if stream == "pooler" else set())
    if stream == "text":
        assert {r.weighting for r in recipes if r.site == "F3_HEADS"} == {*CHANNELS, *OF_VALUES}
    for exp in model.sweep(models.pixels(), "a red dog", recipes, empty="keep"):
        assert exp.status in ("ok", "no positive evidence", "zero gradient", "rounding noise")


def test_the_whole_grid_is_explained_in_one_forward_and_says_where_there_is_no_gradient(kind):
    model = wrapped(kind)
    runs = []
    handle = model.adapter.module.register_forward_hook(lambda *_: runs.append(1))
    recipes = vlcam.all_recipes(model)
    found = model.sweep(models.pixels(), None, recipes, target=1, empty="keep")
    handle.remove()
    assert len(runs) == 1
    assert [exp.recipe for exp in found] == recipes
    read = {True: 0 in models.LIVE[kind], False: {5, 6} <= set(models.LIVE[kind])}
    # Values are weighted by the class token's gradient, all others by those of the patches.
    dead = {
        recipe
        for recipe in recipes
        if recipe.site in BEHIND and recipe.layers == (2,) and recipe.needs_gradient
        if not read[recipe.gradient_tokens == "cls"]
    }
    assert {exp.recipe for exp in found if exp.status == "zero gradient"} == dead
    assert len(dead) == {"beit": 0, "dinov2-registers": 0}.get(kind, 5 * 7)
    for exp in found:
        assert exp.tokens.shape == (4, 4)


# Fields


def test_a_field_takes_one_value_or_several():
    model = wrapped()
    only = vlcam.all_recipes(model, site="F1", weighting="gradcam", layers="last", relu="none")
    assert [(recipe.name, recipe.relu) for recipe in only] == [("F1-gradcam-none-2", "none")]
    several = vlcam.all_recipes(model, site=["F1", "F4"], relu=["none", "map"], layers="last")
    assert_valid(model, several)
    assert {recipe.site for recipe in several} == {"F1", "F4"}
    # gradcam, for one, with both; elementwise has a ReLU of its own and takes none besides.
    takes = {w: {r.relu for r in several if r.weighting == w} for w in CHANNELS}
    assert takes == {w: {"none"} if w == "elementwise" else {"none", "map"} for w in CHANNELS}
    negative = vlcam.all_recipes(model, weighting="gradcam", site="F1", gradient_tokens=["cls", "all"], layers="last")
    assert [recipe.gradient_tokens for recipe in negative] == ["cls", "all"]
    share = vlcam.all_recipes(model, site="F2", weighting="attention", layer_rule="rollout", discard=[0.0, 0.5])
    assert {recipe.discard for recipe in share} == {0.0, 0.5}


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("heads", {"none", "mean", "sum", "max", "min", "channels"}),
        ("relu", {"none", "gradient", "negative_gradient", "before_heads", "after_heads", "map"}),
        ("scale", {"logit", "probability", "log-probability", "margin", "finer", "none"}),
        ("gradient_tokens", {"cls", "patches", "all", "none"}),
        ("map_axis", {"keys", "queries", "none"}),
        ("queries", {"cls", "registers", "patches", "all"}),
        ("upsample", {"nearest", "bilinear", "bicubic"}),
        ("normalize", {"none", "minmax", "max", "sum"}),
        ("attention", {"own", "one_head"}),
        ("compose", {"none"}),
        ("prompt", {"whole"}),
        ("reshape", {"raster"}),
    ],
)
def test_every_value_of_a_field_that_is_valid_somewhere(field, values):
    model = wrapped("dinov2-registers")
    recipes = vlcam.all_recipes(model, layers="last", **{field: "every"})
    assert_valid(model, recipes)
    assert {getattr(recipe, field) for recipe in recipes} == values
    found = model.sweep(models.pixels(), None, recipes, empty="keep")
    # A LayerNorm does not see its input's size, so that gradient times input vanishes before the last one.
    noise = [exp.recipe for exp in found if exp.status == "rounding noise"]
    assert all((recipe.site, recipe.weighting) == ("F6", "hirescam") for recipe in noise)
    assert {exp.status for exp in found} <= {"ok", "no positive evidence", "zero gradient", "rounding noise"}


def test_every_head_rule_takes_heads_for_channels_too():
    recipes = vlcam.all_recipes(wrapped(), site="F2", layers="last", heads="every")
    by_rule = {rule: {r.weighting for r in recipes if r.heads == rule} for rule in ("mean", "channels")}
    assert by_rule == {"mean": set(ATTENTION), "channels": set(CHANNELS)}


def test_weightings_that_ask_the_model_again_are_left_out_unless_they_are_named():
    model = wrapped()
    assert not any(recipe.asks for recipe in vlcam.all_recipes(model))
    named = vlcam.all_recipes(model, weighting="ablationcam", layers="last")
    assert_valid(model, named)
    assert all(recipe.asks for recipe in named)


@pytest.mark.parametrize(
    ("choices", "error", "words"),
    [
        ({"colour": "red"}, vlcam.RecipeError, "a recipe has no field 'colour'; its fields: name, site"),
        ({"site": "CROSS"}, vlcam.RecipeError, "site='CROSS': no valid recipe of stream 'vision' of this model has it"),
        ({"site": ["F1", "F7"]}, vlcam.RecipeError, "site='F7': no valid recipe"),
        ({"relu": ["none", "sideways"]}, vlcam.RecipeError, "relu='sideways': no valid recipe"),
        ({"site": "F1", "weighting": "attention"}, vlcam.RecipeError, "site='F1': no valid recipe"),
        ({"scale": "cosine"}, vlcam.RecipeError, "scale='cosine': no valid recipe"),
        ({"layers": 3}, vlcam.UnknownNameError, "vision has no block 3; it has blocks 0 to 2"),
        ({"layers": 1.5}, vlcam.RecipeError, "give a whole number, several, 'last' or 'all'"),
        ({"stream": "fusion"}, vlcam.UnknownNameError, "has no stream 'fusion'; it has 'vision'"),
    ],
)
def test_what_no_recipe_can_be_is_refused(choices, error, words):
    with pytest.raises(error, match=words):
        vlcam.all_recipes(wrapped(), **choices)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_the_count_grows_with_the_blocks(depth):
    assert len(vlcam.all_recipes(wrapped(num_hidden_layers=depth))) == 61 * depth
