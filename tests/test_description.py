"""Descriptions: what they state, how they are written and read, and which recipes of a model fit them."""

from __future__ import annotations

import copy
import itertools
import pickle

import models
import numpy as np
import pytest

import vlcam
from vlcam.ambiguity import fitting_recipes
from vlcam.ambiguity.description import FIELDS
from vlcam.ambiguity.domain import Domain
from vlcam.ambiguity.enumeration import fitting_jobs
from vlcam.ambiguity.spelling import spelt
from vlcam.ambiguity.words import SENTENCES, in_words
from vlcam.choices import WORDS
from vlcam.plan import plan
from vlcam.recipe import Recipe

FITS = {
    "tiny-vit": ("gradcam-vit", "gradcam-vit-last-layer", "pytorch-grad-cam-default", "attention-last-layer"),
    "tiny-clip": ("gradcam-clip", "chefer", "attention-rollout"),
    "tiny-blip-itm": ("gradcam-cross-attention",),
}


@pytest.fixture(scope="module")
def vit():
    return vlcam.load("tiny-vit")


def wrapped(kind="vit", **changes):
    return vlcam.wrap(models.classifier(kind, **changes), name=f"random-{kind}")


# What is stated


def test_a_field_is_given_as_one_value_or_as_several_and_all_others_are_open():
    found = vlcam.Description(name="mine", weighting="gradcam", site=["F1", "F4"])
    assert dict(found.stated) == {"site": ("F1", "F4"), "weighting": ("gradcam",)}
    assert set(found.open) == set(FIELDS) - {"site", "weighting"}
    assert "name" not in found.open
    assert vlcam.Description(name="other", site=["F1", "F4"], weighting="gradcam") == found
    assert len({found, vlcam.Description(site=["F1", "F4"], weighting="gradcam")}) == 1
    assert vlcam.Description(site="F1", heads=None) == vlcam.Description(site="F1")
    turned = vlcam.Description(weighting="gradcam", site=["F4", "F1"])
    assert turned == found
    assert hash(turned) == hash(found)
    assert turned != vlcam.Description(site="F1", weighting="gradcam")


@pytest.mark.parametrize(
    ("field", "given", "values"),
    [
        ("layers", 3, ((3,),)),
        ("layers", [2, 3], ((2, 3),)),
        ("layers", [[2], [3]], ((2,), (3,))),
        ("layers", ["last", [0, 1]], ("last", (0, 1))),
        ("queries", [1, 2], ((1, 2),)),
        ("queries", ["cls", "all"], ("cls", "all")),
        ("exclude", ["cls", "padding"], (("cls", "padding"),)),
        ("exclude", [["padding", "cls"], ["cls"]], (("cls", "padding"), ("cls",))),
        ("departures", [], ((),)),
        ("departures", [[], ["unprotected"]], ((), ("unprotected",))),
        ("discard", [0, 0.9], (0.0, 0.9)),
        ("site", ["F1", "F1"], ("F1",)),
    ],
)
def test_values_that_are_lists_are_told_from_lists_of_values(field, given, values):
    assert vlcam.Description(**{field: given}).stated[field] == values


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sight": "F1"}, "no field 'sight'; its fields: site, stream"),
        ({"site": "F9"}, "site='F9': choose from 'F1'"),
        ({"site": ["F1", "F9"]}, "site='F9'"),
        ({"site": []}, "a list of no values"),
        ({"layers": "first"}, "layers='first': give whole numbers"),
        ({"layers": [[1, 1]]}, "an index is given twice"),
        ({"exclude": "cats"}, "exclude='cats': give any of"),
        ({"discard": 2}, "discard=2: give a share"),
        ({"name": ""}, "name='': give text"),
    ],
)
def test_what_does_not_exist_is_refused_with_what_would_do(given, message):
    with pytest.raises(vlcam.RecipeError, match=message):
        vlcam.Description(**given)


@pytest.mark.parametrize("name", vlcam.descriptions())
def test_a_description_comes_back_from_text_and_from_copies(name):
    found = vlcam.descriptions()[name].description
    for again in (
        vlcam.Description.from_dict(found.to_dict()),
        vlcam.Description.from_json(found.to_json()),
        vlcam.Description.from_toml(found.to_toml()),
        vlcam.Description.from_yaml(found.to_yaml()),
        copy.deepcopy(found),
        pickle.loads(pickle.dumps(found)),
    ):
        assert again == found
        assert again.name == found.name
        assert again.to_dict() == found.to_dict()


def test_lists_of_lists_come_back_from_text():
    found = vlcam.Description(layers=[[6], "last", [0, 1]], exclude=[["cls"], ["cls", "padding"]], discard=[0, 0.9])
    assert vlcam.Description.from_toml(found.to_toml()) == found
    assert vlcam.Description.from_json(found.to_json()) == found
    assert vlcam.Description.from_yaml(found.to_yaml()) == found


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (vlcam.Description.from_toml, "site = ", "not TOML"),
        (vlcam.Description.from_json, "{", "not JSON"),
        (vlcam.Description.from_yaml, "site: [F1", "not YAML: while parsing a flow sequence"),
        (vlcam.Description.from_yaml, "- F1", "a table of fields, found list"),
        (vlcam.Description.from_yaml, "!!python/object:os.system {}", "not YAML"),
        (vlcam.Description.from_json, "[1]", "a table of fields, found list"),
        (vlcam.Description.from_toml, "sight = 1", "no field 'sight'"),
    ],
)
def test_text_that_is_no_description_is_refused(read, text, message):
    with pytest.raises(vlcam.RecipeError, match=message):
        read(text)


def test_it_prints_by_checklist_group_what_is_stated_and_what_is_open():
    printed = str(vlcam.Description(name="mine", site=["F1", "F4"], exclude=["cls", "padding"], departures=[]))
    assert printed.splitlines()[0] == "mine"
    assert "feature representation\n  site             F1 or F4\n  stream           open" in printed
    assert "  exclude          cls, padding" in printed
    assert "  departures       none" in printed


def test_a_recipe_matches_where_it_has_a_stated_value():
    recipe = vlcam.recipes()["pgc-gradcam"].recipe
    assert vlcam.Description(site=["F1", "F4"], weighting="gradcam").matches(recipe)
    assert not vlcam.Description(site="F4").matches(recipe)
    assert vlcam.Description(layers=-1).matches(recipe)
    assert vlcam.Description().matches(recipe)
    whole = vlcam.Description.of(recipe)
    assert whole.open == ()
    assert whole.matches(recipe)
    assert not whole.matches(recipe.replace(relu="none"))
    assert vlcam.Description.of(recipe.replace(name="")) == whole


def test_stating_more_and_opening_again():
    found = vlcam.Description(name="mine", site="F1")
    narrower = found.stating(scale="logit", name="narrower")
    assert (narrower.name, dict(narrower.stated)) == ("narrower", {"site": ("F1",), "scale": ("logit",)})
    assert narrower.stating(scale=None) == found
    assert dict(found.stated) == {"site": ("F1",)}


@pytest.mark.parametrize("preset", vlcam.descriptions().values(), ids=vlcam.descriptions())
def test_presets_have_a_sentence_and_a_reason_for_what_they_state(preset):
    assert preset.sentence.endswith(".")
    assert set(preset.reasons) <= set(FIELDS)
    assert "weighting" in preset.reasons
    assert len(preset.reasons) >= 5


def test_a_preset_is_a_description_too(vit):
    preset = vlcam.descriptions()["pytorch-grad-cam-default"]
    assert fitting_recipes(vit, preset) == fitting_recipes(vit, preset.description)
    image = models.photo()
    assert vit.ambiguity(image, description=preset).description == preset.description


def test_a_recipe_is_named_by_the_description_of_the_call(vit):
    one = vlcam.descriptions()["pytorch-grad-cam-default"].description
    for name in ("first", "second"):
        (member,) = vit.ambiguity(models.photo(), description=one.stating(name=name)).members
        assert member.recipe.name == name


def test_an_unknown_name_lists_those_there_are(vit):
    with pytest.raises(vlcam.UnknownNameError, match="no description 'gradcam'; there are 'gradcam-vit'"):
        fitting_recipes(vit, "gradcam")
    with pytest.raises(vlcam.RecipeError, match="a description of type int"):
        fitting_recipes(vit, 3)


# Which recipes fit


def test_the_count_for_grad_cam_on_the_last_layer_is_that_of_trying_everything(vit):
    """Every word of every field that matters here, tried on `Recipe` and `plan`, and counted by rules of its own."""
    stated = {"stream": "vision", "layers": (5,), "target": "class", "gradient_path": "full", "layer_rule": "single"}
    usual = {"attention": "own", "prompt": "whole", "compose": "none", "discard": 0.0, "departures": ()}
    laid = {"exclude": ("cls",), "reshape": "raster", "upsample": "bilinear", "normalize": "minmax"}
    tried = {
        "site": WORDS["site"],
        "weighting": ("gradcam", "attention*gradient", "head_weights"),
        "heads": WORDS["heads"],
        "relu": ("none", "gradient", "before_heads", "after_heads", "map"),
        "gradient_tokens": WORDS["gradient_tokens"],
        "queries": ("cls", "patches", "pooled", "all", "phrase", "none"),  # it has no registers
        "map_axis": ("keys", "none"),
    }
    found = set()
    for words in itertools.product(*tried.values()):
        chosen = dict(zip(tried, words, strict=True))
        if (chosen["queries"] == "none") != (chosen["map_axis"] == "none"):
            continue  # never valid; the rest is tried
        try:
            recipe = Recipe(name="", scale="logit", **stated, **usual, **laid, **chosen)
            plan(vit.adapter, recipe, {})
        except (vlcam.RecipeError, vlcam.UnknownNameError):
            continue
        found.update(_at_every_scale(vit, recipe))
    different = set()
    for recipe in found:
        relu = recipe.relu
        if recipe.weighting == "attention*gradient" and relu == "before_heads":
            relu = "gradient"  # probabilities are not negative
        if recipe.queries == "cls" and recipe.heads != "channels" and relu == "map":
            relu = "after_heads"  # the mean over one row
        different.add(
            (recipe.fingerprint, relu) if relu == recipe.relu else (recipe.replace(relu=relu).fingerprint, relu)
        )
    enumerated = fitting_recipes(vit, "gradcam-vit-last-layer")
    assert len(enumerated) == len(different)
    assert set(enumerated) <= found
    assert len(found) > len(different) > 1000


def _at_every_scale(vit, recipe):
    for scale in WORDS["scale"]:
        try:
            changed = recipe.replace(scale=scale)
            plan(vit.adapter, changed, {})
        except vlcam.RecipeError:
            continue
        yield changed


@pytest.mark.parametrize("kind", ["vit", "dinov2-registers", "beit", "deit-teacher"])
def test_every_recipe_is_valid_stated_and_there_once(kind):
    model = wrapped(kind)
    description = vlcam.descriptions()["gradcam-vit"].description
    found = fitting_recipes(model, description)
    assert len(set(found)) == len(found) > 100
    assert len({recipe.name for recipe in found}) == len(found)
    for recipe in found[::50]:
        plan(model.adapter, recipe, {})
        assert description.matches(recipe)
    assert {recipe.layers for recipe in found if recipe.layer_rule == "single"} == {(0,), (1,), (2,)}
    assert {recipe.layers for recipe in found if recipe.layer_rule != "single"} == {"all"}
    with_registers = {recipe for recipe in found if "registers" in recipe.exclude}
    assert bool(with_registers) == (kind == "dinov2-registers")
    assert all("all" in (recipe.queries, recipe.gradient_tokens) for recipe in with_registers)


@pytest.mark.parametrize(("name", "fits"), FITS.items())
def test_presets_fit_the_models_that_they_are_of(name, fits):
    model = vlcam.load(name)
    for preset in fits:
        assert fitting_recipes(model, preset), preset


def test_what_pytorch_grad_cam_fixes_leaves_one_recipe(vit):
    (found,) = fitting_recipes(vit, "pytorch-grad-cam-default")
    assert found == vlcam.recipes()["pgc-gradcam"].recipe.replace(layers=(5,))


def test_the_description_of_any_recipe_that_fits_leaves_that_one(vit):
    for recipe in fitting_recipes(vit, "gradcam-vit-last-layer")[::97]:
        assert fitting_recipes(vit, vlcam.Description.of(recipe)) == [recipe]


@pytest.mark.parametrize(
    ("stated", "layers"),
    [
        ({"layers": "last"}, {(5,)}),
        ({"layers": ["last", 5, -1]}, {(5,)}),
        ({"layers": [[2, 3]]}, {(2, 3)}),
        ({"layers": [[9], [2]]}, {(2,)}),
        ({"layer_rule": "mean"}, {"all"}),
        ({"layers": "all", "layer_rule": "single"}, set()),
        ({}, {(0,), (1,), (2,), (3,), (4,), (5,), "all"}),
    ],
)
def test_blocks_are_counted_once_however_they_are_named(vit, stated, layers):
    fixed = {"site": "F1", "weighting": "gradcam", "scale": "logit", "relu": "map", "gradient_tokens": "patches"}
    found = fitting_recipes(vit, vlcam.Description(**fixed, **stated))
    assert {recipe.layers for recipe in found} == layers
    per_layers = {"all": 3, (2, 3): 3} if "layer_rule" not in stated else {}
    assert len(found) == sum(per_layers.get(each, 1) for each in layers)


def test_one_block_with_a_stated_rule_is_taken_as_it_is():
    model = vlcam.load("tiny-clip")
    found = fitting_recipes(model, "chefer")
    assert {(recipe.layers, recipe.layer_rule) for recipe in found} == {("all", "relevance"), ((3,), "relevance")}


def test_open_fields_stay_as_nobody_would_have_to_say(vit):
    found = fitting_recipes(vit, vlcam.Description(layers="last", site=["F1", "F2"], scale=["logit", "none"]))
    assert {recipe.attention for recipe in found} == {"own"}
    assert {recipe.departures for recipe in found} == {()}
    assert {recipe.gradient_path for recipe in found} == {"full", "none"}
    assert {recipe.discard for recipe in found} == {0.0}
    assert not any(recipe.asks for recipe in found)
    assert {recipe.upsample for recipe in found} == {"bilinear"}
    stated = fitting_recipes(vit, vlcam.Description(weighting="reciprocam", scale="logit", layers="last"))
    assert [recipe.weighting for recipe in stated] == ["reciprocam"] * 2
    wide = vlcam.Description(site="F2", attention="one_head", weighting="attention*gradient", layers=0, heads="mean")
    assert fitting_recipes(vit, wide)


def test_heatmaps_of_one_token_map_are_varied_on_request(vit):
    description = vlcam.descriptions()["pytorch-grad-cam-default"].description.stating(upsample=None, normalize=None)
    assert len(fitting_recipes(vit, description)) == 1
    found = fitting_recipes(vit, description, heatmaps=True)
    assert len(found) == 12
    assert len({(recipe.upsample, recipe.normalize) for recipe in found}) == 12
    (only,) = fitting_recipes(vit, description.stating(upsample=["bicubic", "nearest"]))
    assert only.upsample == "bicubic"


def test_maps_over_words_have_to_be_stated():
    model = vlcam.load("tiny-clip")
    assert not any(recipe.of_text for recipe in fitting_recipes(model, "chefer"))
    found = fitting_recipes(model, vlcam.Description(stream="text", weighting="gradcam", layers="last", scale="cosine"))
    assert found
    assert all(recipe.of_text and recipe.upsample == "none" for recipe in found)


def test_no_row_tells_the_token_that_opens_a_caption():
    model = vlcam.load("tiny-blip-caption")
    description = vlcam.Description(site="CROSS", weighting="attention", layers=0, heads="mean")
    assert {recipe.queries for recipe in fitting_recipes(model, description)} == {"all"}
    recipe = vlcam.recipes()["blip-caption"].recipe.replace(queries="cls", exclude=("cls", "padding"))
    with pytest.raises(vlcam.RecipeError, match="before the token that opens the text there is none"):
        model.explain(models.photo(), "a red star", recipe)


def test_with_a_phrase_its_rows_are_read_or_its_prompts():
    crossed = fitting_recipes(vlcam.load("tiny-blip-itm"), "gradcam-cross-attention", phrase="red star")
    assert {recipe.queries for recipe in crossed} == {"phrase"}
    clip = fitting_recipes(vlcam.load("tiny-clip"), "gradcam-clip", phrase="red star")
    assert {recipe.prompt for recipe in clip} == {"phrase", "in_place"}


def test_a_model_that_compares_tokens_with_texts_has_those_recipes_too():
    description = vlcam.Description(weighting="similarity", scale="cosine", relu="none", layers="last")
    found = fitting_recipes(vlcam.load("tiny-clip"), description)
    assert {recipe.layers for recipe in found} == {"last"}


def test_stages_are_not_merged_and_windows_have_no_class_token():
    found = fitting_recipes(vlcam.load("tiny-swin"), "gradcam-vit")
    assert {recipe.layers for recipe in found} == {(block,) for block in range(6)}
    assert {recipe.gradient_tokens for recipe in found} == {"patches", "none"}
    assert {recipe.queries for recipe in found} == {"patches", "none"}


# One spelling


@pytest.mark.parametrize(
    ("kind", "stated"),
    [
        ("vit", {"weighting": ["attention*gradient", "gradient", "head_weights"], "layers": 1, "site": "F2"}),
        ("vit", {"weighting": ["layercam", "hirescam", "elementwise", "none"], "layers": 1, "site": ["F1", "F2"]}),
        ("vit", {"weighting": "gradcam", "layers": 1, "site": "F4", "layer_rule": ["single", "mean", "sum", "max"]}),
        ("dinov2-registers", {"weighting": "gradcam", "layers": 1, "exclude": [["cls"], ["cls", "registers"]]}),
    ],
)
def test_what_counts_once_makes_the_same_bits(kind, stated):
    """Every valid recipe of a small product against the one that is kept of its spelling."""
    model = wrapped(kind)
    description = vlcam.Description(scale=["logit", "none"], heads=["mean", "none", "channels"], **stated)
    every = _without_spelling(model, description)
    groups = {}
    for recipe in every:
        key = tuple(spelt(_values(recipe), (1,), model.adapter.prefix).values())
        groups.setdefault(key, []).append(recipe)
    assert len(fitting_recipes(model, description)) == len(groups) < len(every)
    flat = [recipe for group in groups.values() for recipe in group]
    maps = dict(zip(flat, model.sweep(models.pixels(), None, flat, target=1, empty="keep"), strict=True))
    for group in groups.values():
        for recipe in group[1:]:
            np.testing.assert_array_equal(maps[recipe].tokens, maps[group[0]].tokens, err_msg=recipe.name)


def test_without_tokens_before_the_patches_all_is_patches():
    model = vlcam.load("tiny-swin")
    description = vlcam.Description(weighting=["gradcam", "head_weights"], layers=1, scale="logit", relu="none")
    patches, every = (
        [r for r in _without_spelling(model, description) if r.queries in (word, "none") and r.gradient_tokens == word]
        for word in ("patches", "all")
    )
    assert len(patches) > 5
    image = models.photo()
    for recipe in every:
        other = recipe.replace(gradient_tokens="patches", queries=recipe.queries.replace("all", "patches"))
        assert other in patches
        one, two = model.sweep(image, None, [recipe, other], target=1)
        np.testing.assert_array_equal(one.tokens, two.tokens)


def _values(recipe):
    return {field: getattr(recipe, field) for field in FIELDS}


def _without_spelling(model, description):
    """What would be enumerated if every spelling counted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vlcam.ambiguity.enumeration.spelt", lambda values, *_: dict(values))
        return [job.recipe for job in fitting_jobs(Domain(model.adapter, description))]


# Words


def test_every_value_of_every_field_has_words():
    for field, words in WORDS.items():
        for value in words:
            assert in_words(field, value)
    assert set(SENTENCES) == set(FIELDS)
    assert all(sentence.count("{}") == 1 for sentence in SENTENCES.values())
    assert in_words("layers", (3,)) == "block 3, counted from 0"
    assert in_words("layers", (2, 3)) == "blocks 2, 3, counted from 0"
    assert in_words("exclude", ("cls",)) == "nothing is left out"
    assert in_words("exclude", ("cls", "registers")) == "the register tokens are left out"
    assert in_words("exclude", ("cls", "special_text", "padding")).endswith("and padding are left out")
    assert in_words("discard", 0.9) == "the smallest 90% of all entries are set to zero"
    assert in_words("queries", (0, 2)) == "the rows 0, 2"
