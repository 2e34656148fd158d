"""Recipe, its words, and the catalogue of named recipes."""

import json
import tomllib

import pytest

from vlcam import wording
from vlcam.catalogue import named, recipes
from vlcam.errors import RecipeError, UnknownNameError
from vlcam.recipe import Recipe

LAVIS = recipes()["lavis-itm"].recipe
FEATURES = recipes()["pgc-gradcam"].recipe
NAMED = [entry.recipe for entry in recipes().values()]

FINGERPRINTS = {
    "lavis-itm": "r1-89890a9baf2e",
    "albef-itm": "r1-84026d1ba903",
    "attention-cross": "r1-2ed7521fd846",
    "context-gradcam": "r1-1313b9c6cfe9",
    "pgc-gradcam": "r1-c3c23434d7d2",
}

# One valid change per field; a field that others bind is changed together with them.
CHANGES = {
    "site": (FEATURES, {"site": "F3"}),
    "stream": (FEATURES, {"stream": "fusion", "site": "CONTEXT"}),
    "layers": (LAVIS, {"layers": (5,)}),
    "target": (LAVIS, {"target": "custom", "scale": "raw"}),
    "scale": (LAVIS, {"scale": "margin"}),
    "gradient_tokens": (FEATURES, {"gradient_tokens": "cls"}),
    "queries": (LAVIS, {"queries": (1, 2)}),
    "exclude": (LAVIS, {"exclude": ("cls", "padding")}),
    "weighting": (LAVIS, {"weighting": "gradient"}),
    "relu": (LAVIS, {"relu": "after_heads"}),
    "heads": (LAVIS, {"heads": "sum"}),
    "layer_rule": (LAVIS.replace(layers="all", layer_rule="mean"), {"layer_rule": "max"}),
    "upsample": (LAVIS, {"upsample": "bicubic"}),
    "normalize": (LAVIS, {"normalize": "none"}),
}
AFTER_THE_MAP = {"upsample", "normalize"}


def fields_of(recipe):
    return {field: value for field, value in recipe.to_dict().items() if field != "schema"}


def names(recipe):
    return recipe.name


@pytest.mark.parametrize("field", fields_of(LAVIS))
def test_every_field_is_required(field):
    values = fields_of(LAVIS)
    del values[field]
    with pytest.raises(TypeError, match=f"'{field}'"):
        Recipe(**values)


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (LAVIS, {"site": "F9"}, r"site='F9': choose from 'F1', 'F2'"),
        (LAVIS, {"stream": "text"}, r"stream='text': choose from 'vision', 'fusion'"),
        (LAVIS, {"stream": "vision"}, r"stream='vision' with site='CROSS': choose from 'fusion'"),
        (FEATURES, {"stream": "fusion"}, r"stream='fusion' with site='F1': choose from 'vision'"),
        (LAVIS, {"layers": "first"}, r"layers='first': give whole numbers, or choose from 'last', 'all'"),
        (LAVIS, {"layers": ()}, r"layers=\(\): give whole numbers"),
        (LAVIS, {"layers": 6.0}, r"layers=6\.0: give whole numbers"),
        (LAVIS, {"layers": True}, r"layers=True: give whole numbers"),
        (LAVIS, {"layers": (6, 6)}, r"layers=\(6, 6\): an index is given twice"),
        (LAVIS, {"layers": (5, 6)}, r"layer_rule='single' with layers=\(5, 6\): give one layer, or a rule"),
        (LAVIS, {"layers": "all"}, r"layer_rule='single' with layers='all'"),
        (LAVIS, {"target": "class"}, r"target='class': choose from 'itm', 'contrastive', 'custom', 'none'"),
        (LAVIS, {"target": "contrastive"}, r"scale='logit' with target='contrastive': choose from 'cosine'"),
        (LAVIS, {"scale": "cosine"}, r"scale='cosine' with target='itm': choose from 'logit', 'probability'"),
        (LAVIS, {"target": "none", "scale": "none"}, r"target='none' with weighting='attention\*gradient'.*'itm'"),
        (LAVIS, {"gradient_tokens": "cls"}, r"gradient_tokens='cls' with site='CROSS'.*choose from 'none'"),
        (FEATURES, {"gradient_tokens": "none"}, r"gradient_tokens='none' with site='F1': choose from 'cls'"),
        (LAVIS, {"queries": "none"}, r"queries='none' with site='CROSS': choose from 'cls', 'all', 'phrase'"),
        (LAVIS, {"queries": "patches"}, r"queries='patches' with site='CROSS': choose from 'cls', 'all', 'phrase'"),
        (LAVIS, {"queries": (1, 1)}, r"queries=\(1, 1\): an index is given twice"),
        (LAVIS, {"site": "F2", "stream": "vision", "queries": "phrase"}, r"queries='phrase' with site='F2'.*'patches'"),
        (FEATURES, {"queries": "all"}, r"queries='all' with site='F1'.*choose from 'none'"),
        (FEATURES, {"queries": (0,)}, r"queries=\(0,\) with site='F1'.*choose from 'none'"),
        (LAVIS, {"exclude": ("pads",)}, r"exclude=\('pads',\): give any of 'cls', 'special_text', 'padding'"),
        (LAVIS, {"exclude": None}, r"exclude=None: give any of"),
        (LAVIS, {"exclude": ("padding",)}, r"exclude=\('padding',\).*add 'cls'"),
        (LAVIS, {"queries": "cls"}, r"queries='cls' with exclude=.*leave 'special_text' out"),
        (LAVIS, {"exclude": "cls"}, r"exclude=\('cls',\) with site='CROSS'.*add 'padding'"),
        (FEATURES, {"exclude": ("cls", "padding")}, r"with site='F1': there is no text; give \('cls',\)"),
        (LAVIS, {"weighting": "gradcam"}, r"weighting='gradcam' with site='CROSS': choose from 'attention'"),
        (FEATURES, {"weighting": "attention"}, r"weighting='attention' with site='F1': choose from 'gradcam'"),
        (LAVIS, {"weighting": "attention"}, r"relu='gradient' with weighting='attention'.*choose from 'none'"),
        (
            LAVIS,
            {"weighting": "attention", "relu": "none"},
            r"target='itm' with weighting='attention'.*choose from 'none'",
        ),
        (
            FEATURES,
            {"relu": "after_heads"},
            r"relu='after_heads' with site='F1': choose from 'none', 'gradient', 'map'",
        ),
        (LAVIS, {"heads": "none"}, r"heads='none' with site='CROSS': choose from 'mean', 'sum', 'max', 'min'"),
        (FEATURES, {"heads": "mean"}, r"heads='mean' with site='F1'.*choose from 'none'"),
        (LAVIS, {"layer_rule": "shared"}, r"site='CROSS' with layer_rule='shared': choose from 'CONTEXT'"),
        (
            recipes()["context-gradcam"].recipe,
            {"layer_rule": "mean"},
            r"layer_rule='mean' with site='CONTEXT'.*choose from 'single', 'shared'",
        ),
        (LAVIS, {"reshape": "windows"}, r"reshape='windows': choose from 'raster'"),
        (LAVIS, {"upsample": "area"}, r"upsample='area': choose from 'nearest', 'bilinear', 'bicubic'"),
        (LAVIS, {"normalize": "zscore"}, r"normalize='zscore': choose from 'none', 'minmax', 'max'"),
        (LAVIS, {"name": None}, r"name=None"),
    ],
)
def test_a_refused_choice_is_quoted_with_the_values_that_would_do(base, changes, message):
    with pytest.raises(RecipeError, match=message):
        base.replace(**changes)


@pytest.mark.parametrize(
    ("given", "field", "normal"),
    [
        ({"layers": 6}, "layers", (6,)),
        ({"layers": -1}, "layers", (-1,)),
        ({"layers": [2, 5], "layer_rule": "mean"}, "layers", (2, 5)),
        ({"queries": 3}, "queries", (3,)),
        ({"queries": [1, 2]}, "queries", (1, 2)),
        ({"exclude": ["padding", "cls"]}, "exclude", ("cls", "padding")),
        ({"exclude": ("padding", "cls", "special_text", "cls")}, "exclude", ("cls", "special_text", "padding")),
    ],
)
def test_sequences_have_one_form(given, field, normal):
    assert getattr(LAVIS.replace(**given), field) == normal


def test_forms_of_one_choice_are_one_recipe():
    one, other = LAVIS.replace(layers=6, exclude=["padding", "special_text", "cls"]), LAVIS
    assert one == other
    assert one.fingerprint == other.fingerprint


def test_the_name_is_a_label_only():
    renamed = LAVIS.replace(name="ours")
    assert renamed.name == "ours"
    assert renamed == LAVIS
    assert hash(renamed) == hash(LAVIS)
    assert renamed.fingerprint == LAVIS.fingerprint


def test_a_recipe_cannot_be_changed():
    with pytest.raises(AttributeError):
        LAVIS.heads = "sum"


def test_fingerprints_of_the_named_recipes_stay():
    assert {recipe.name: recipe.fingerprint for recipe in NAMED} == FINGERPRINTS


def test_the_table_of_changes_misses_no_field_that_has_a_choice():
    assert set(CHANGES) == set(fields_of(LAVIS)) - {"name", "reshape"}


@pytest.mark.parametrize("field", CHANGES)
def test_every_field_takes_part_in_equality_and_fingerprint(field):
    base, changes = CHANGES[field]
    other = base.replace(**changes)
    assert other != base
    assert other.fingerprint != base.fingerprint
    assert set(base.differences(other)) == set(changes)


def test_differences_show_both_values():
    assert LAVIS.differences(LAVIS.replace(heads="max", name="other")) == {"heads": ("mean", "max")}


@pytest.mark.parametrize("recipe", NAMED, ids=names)
def test_named_recipes_survive_json_and_toml(recipe):
    for back in (Recipe.from_json(recipe.to_json()), Recipe.from_toml(recipe.to_toml())):
        assert back == recipe
        assert back.name == recipe.name


@pytest.mark.parametrize(
    "name", ['a "quoted" name', "back\\slash", "two\nlines", "fa\u00e7ade", "\U0001f50d", "\x7f", ""]
)
def test_any_name_survives_json_and_toml(name):
    recipe = LAVIS.replace(name=name, queries=(0, 2))
    assert Recipe.from_json(recipe.to_json()).name == name
    assert Recipe.from_toml(recipe.to_toml()).name == name


def test_json_and_toml_say_the_same():
    assert json.loads(LAVIS.to_json()) == tomllib.loads(LAVIS.to_toml()) == LAVIS.to_dict()
    assert LAVIS.to_dict()["schema"] == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": ...}, r"missing 'heads', unknown nothing"),
        ({"colour": "red"}, r"missing nothing, unknown 'colour'"),
        ({"heads": ..., "head": "mean"}, r"missing 'heads', unknown 'head'"),
        ({"schema": 2}, r"schema 2: this release of vlcam reads schema 1"),
        ({"schema": ...}, r"schema None: this release"),
        ({"heads": "median"}, r"heads='median': choose from"),
    ],
)
def test_a_table_must_state_every_field_and_no_other(changes, message):
    table = {field: value for field, value in (LAVIS.to_dict() | changes).items() if value is not ...}
    with pytest.raises(RecipeError, match=message):
        Recipe.from_dict(table)


def test_reading_leaves_the_table_alone():
    table = LAVIS.to_dict()
    Recipe.from_dict(table)
    assert table == LAVIS.to_dict()


def test_text_of_another_kind_is_refused():
    with pytest.raises(RecipeError, match="not JSON"):
        Recipe.from_json("layers = 6")
    with pytest.raises(RecipeError, match="found list"):
        Recipe.from_json("[]")
    with pytest.raises(RecipeError, match="not TOML"):
        Recipe.from_toml("{}")


@pytest.mark.parametrize("field", ["colour", "schema"])
def test_replace_refuses_a_field_that_does_not_exist(field):
    with pytest.raises(RecipeError, match=rf"no field '{field}'; its fields: name, site, stream"):
        LAVIS.replace(**{field: 1})


def test_groups_hold_every_field_once():
    shown = [field for _, fields in LAVIS.groups() for field in fields]
    assert shown == [field for field in fields_of(LAVIS) if field != "name"]


@pytest.mark.parametrize("recipe", NAMED, ids=names)
def test_the_description_states_every_field_and_the_formula(recipe):
    text = wording.describe(recipe)
    assert text.startswith(f"{recipe.name} ({recipe.fingerprint})\n")
    for group, fields in recipe.groups():
        assert f"\n{group}\n" in text
        for field, value in fields.items():
            shown = ", ".join(map(str, value)) if isinstance(value, tuple) else value
            assert any(line.split()[:1] == [field] and shown in line for line in text.splitlines())
    for line in wording.formula(recipe).splitlines():
        assert f"\n  {line}" in text


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        (
            "lavis-itm",
            ["CROSS of fusion block 6", "attention x gradient", "ReLU gradient", "heads mean", "special_text"],
        ),
        ("albef-itm", ["CROSS of fusion block 2", "matching logit of 'match'", "without cls, padding"]),
        ("attention-cross", ["CROSS of fusion block 6; attention; heads mean", "query rows all"]),
        ("context-gradcam", ["CONTEXT of fusion all blocks", "ReLU map", "gradient tokens patches"]),
        ("pgc-gradcam", ["F1 of vision last block", "channels weighted by the mean gradient", "without cls"]),
    ],
)
def test_the_summary_is_one_line_with_the_choices(name, pieces):
    line = wording.summary(recipes()[name].recipe)
    assert "\n" not in line
    assert [piece for piece in pieces if piece not in line] == []


def test_the_summary_of_plain_attention_speaks_of_no_gradient():
    assert "gradient" not in wording.summary(recipes()["attention-cross"].recipe)


@pytest.mark.parametrize("field", [field for field in CHANGES if field not in AFTER_THE_MAP])
def test_the_summary_names_every_choice_that_shapes_the_token_map(field):
    base, changes = CHANGES[field]
    assert wording.summary(base.replace(**changes)) != wording.summary(base)


LAST_LINE = "tokens[row, column] = M[j] in raster order, class token left out"
FORMULAS = {
    "lavis-itm": [
        "y = itm_logit[match]",
        "G = dy/dA",
        "E[t,j] = mean over h of A[h,t,j] * ReLU(G[h,t,j])",
        "M[j] = mean over t in all but special_text and padding of E[t,j]",
        LAST_LINE,
    ],
    "albef-itm": [
        "y = itm_logit[match]",
        "G = dy/dA",
        "E[t,j] = mean over h of A[h,t,j] * ReLU(G[h,t,j])",
        "M[j] = mean over t in all but padding of E[t,j]",
        LAST_LINE,
    ],
    "attention-cross": [
        "E[t,j] = mean over h of A[h,t,j]",
        "M[j] = mean over t in all but special_text and padding of E[t,j]",
        LAST_LINE,
    ],
    "context-gradcam": [
        "y = itm_logit[match]",
        "G = sum over l of dy/dA_l",
        "w[c] = mean over i in patches of G[i,c]",
        "M[j] = ReLU(sum over c of w[c] * A[j,c])",
        LAST_LINE,
    ],
    "pgc-gradcam": [
        "y = itm_logit[match]",
        "G = dy/dA",
        "w[c] = mean over i in patches of G[i,c]",
        "M[j] = ReLU(sum over c of w[c] * A[j,c])",
        LAST_LINE,
    ],
}


@pytest.mark.parametrize("recipe", NAMED, ids=names)
def test_the_formula_of_a_named_recipe(recipe):
    assert wording.formula(recipe).splitlines() == FORMULAS[recipe.name]


@pytest.mark.parametrize(
    ("base", "changes", "line"),
    [
        (LAVIS, {"relu": "none"}, "E[t,j] = mean over h of A[h,t,j] * G[h,t,j]"),
        (LAVIS, {"relu": "before_heads"}, "E[t,j] = mean over h of ReLU(A[h,t,j] * G[h,t,j])"),
        (LAVIS, {"relu": "after_heads"}, "E[t,j] = ReLU(mean over h of A[h,t,j] * G[h,t,j])"),
        (LAVIS, {"relu": "map", "queries": "phrase"}, "M[j] = ReLU(mean over t in phrase of E[t,j])"),
        (LAVIS, {"heads": "max"}, "E[t,j] = max over h of A[h,t,j] * ReLU(G[h,t,j])"),
        (LAVIS, {"weighting": "gradient"}, "E[t,j] = mean over h of ReLU(G[h,t,j])"),
        (LAVIS, {"queries": (1, 3)}, "M[j] = mean over t in [1, 3] of E[t,j]"),
        (LAVIS, {"queries": "cls", "exclude": ("cls", "padding")}, "M[j] = mean over t = 0 of E[t,j]"),
        (LAVIS, {"scale": "probability"}, "y = softmax(itm_logit)[match]"),
        (LAVIS, {"scale": "margin"}, "y = itm_logit[match] - itm_logit[no match]"),
        (LAVIS, {"layers": "all", "layer_rule": "max"}, "M[j] = max over l of M_l[j]"),
        (FEATURES, {"gradient_tokens": "cls"}, "w[c] = mean over i = 0 of G[i,c]"),
        (FEATURES, {"relu": "gradient"}, "w[c] = mean over i in patches of ReLU(G[i,c])"),
        (FEATURES, {"relu": "gradient"}, "M[j] = sum over c of w[c] * A[j,c]"),
    ],
)
def test_the_formula_follows_the_choice(base, changes, line):
    assert line in wording.formula(base.replace(**changes)).splitlines()


@pytest.mark.parametrize(
    ("name", "depth", "layers"),
    [
        ("lavis-itm", 12, (6,)),
        ("lavis-itm", 24, (12,)),
        ("lavis-itm", 3, (1,)),
        ("lavis-itm", 2, (0,)),
        ("albef-itm", 6, (2,)),
        ("albef-itm", 12, (4,)),
        ("context-gradcam", 4, "all"),
        ("pgc-gradcam", 4, "last"),
    ],
)
def test_a_published_block_is_carried_to_the_same_relative_depth(name, depth, layers):
    fitted, _ = recipes()[name].at_depth(depth)
    assert fitted == recipes()[name].recipe.replace(layers=layers)
    assert fitted.name == name


@pytest.mark.parametrize("name", ["lavis-itm", "albef-itm", "attention-cross"])
@pytest.mark.parametrize("depth", range(2, 40))
def test_a_carried_block_is_never_the_last(name, depth):
    fitted, _ = recipes()[name].at_depth(depth)
    assert all(0 <= layer < depth - 1 for layer in fitted.layers)


def test_the_rule_says_whether_the_block_was_carried():
    assert recipes()["lavis-itm"].at_depth(12)[1] == "as published"
    assert recipes()["pgc-gradcam"].at_depth(3)[1] == "as published"
    carried = recipes()["lavis-itm"].at_depth(3)[1]
    assert carried == "published on block [6] of 12; same relative depth of 3 blocks"


def test_the_catalogue_is_read_only_and_names_what_it_has():
    with pytest.raises(TypeError):
        recipes()["mine"] = recipes()["lavis-itm"]
    with pytest.raises(UnknownNameError, match=r"no recipe 'gradcam'; there are 'lavis-itm', .*'pgc-gradcam'"):
        named("gradcam")
    assert named("albef-itm").recipe.layers == (2,)
