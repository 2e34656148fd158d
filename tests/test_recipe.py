"""Recipe, its words, and the catalogue of named recipes."""

import hashlib
import json
import re
import tomllib
from itertools import product
from types import SimpleNamespace

import pytest

from vlcam import wording
from vlcam.catalogue import default, named, recipes
from vlcam.choices import SCALES
from vlcam.errors import RecipeError, UnknownNameError
from vlcam.recipe import Recipe, values_of

LAVIS = recipes()["lavis-itm"].recipe
FEATURES = recipes()["pgc-gradcam"].recipe
CONTEXT = recipes()["context-gradcam"].recipe
RAW = recipes()["raw-attention"].recipe
ROLLOUT = recipes()["vitexplain-rollout"].recipe
CHEFER = recipes()["chefer-generic"].recipe
PLUS_PLUS = recipes()["pgc-gradcam++"].recipe
HEAD_WEIGHTS = recipes()["attn-gradcam"].recipe
GRAD_SAM = recipes()["grad-sam"].recipe
AGCAM = recipes()["agcam"].recipe
NAMED = [entry.recipe for entry in recipes().values()]

FINGERPRINTS = {
    "lavis-itm": "r1-89890a9baf2e",
    "albef-itm": "r1-84026d1ba903",
    "attention-cross": "r1-2ed7521fd846",
    "context-gradcam": "r1-1313b9c6cfe9",
    "pgc-gradcam": "r1-4bab14910920",
    "pgc-swin": "r1-8e9b03009fe7",
    "pgc-gradcam++": "r1-a9f0aa53ad9f",
    "pgc-xgradcam": "r1-cca3cda7b479",
    "pgc-hirescam": "r1-c2b8442b0c87",
    "pgc-layercam": "r1-811a2fafff18",
    "pgc-elementwise": "r1-7c8e95134014",
    "pgc-eigencam": "r1-d0368b688ea9",
    "pgc-eigengradcam": "r1-daf667bdac87",
    "pgc-finercam": "r1-1d623d0aad70",
    "torchcam-gradcam++": "r1-ad9c44726d7a",
    "torchcam-gradcam++-as-coded": "r1-444c0f4cd3e6",
    "gscorecam-gradcam": "r1-0fb19ca60696",
    "gradeclip-gradcam-baseline": "r1-f1ea73a5d4d6",
    "raw-attention": "r1-1c9a2296b1fb",
    "attention-rollout": "r1-3c301400e05e",
    "vitexplain-rollout": "r1-723b83e2960b",
    "vitexplain-rollout-as-coded": "r1-f8c1d0aadd41",
    "vitexplain-grad-rollout": "r1-73bfea35b3d4",
    "vitexplain-grad-rollout-as-coded": "r1-9213b38c5faa",
    "attn-gradcam": "r1-8ddb42e33fff",
    "attn-gradcam-full": "r1-23f7cc641f66",
    "chefer-generic": "r1-4af13befe00d",
    "chefer-generic-heads-first": "r1-a7bb07d61f9b",
    "agcam": "r1-d54024ebb5ca",
    "legrad": "r1-ea1eddf7a405",
    "grad-sam": "r1-289c321c5a05",
    "grad-sam-queries": "r1-b371d0f95955",
    "pgc-scorecam": "r1-154d6a29f4bf",
    "torchcam-scorecam": "r1-fb974341c9dd",
    "ablationcam": "r1-0173a742386d",
    "vit-reciprocam": "r1-b339d9f489a5",
    "tam-transition": "r1-ff24c9a74c25",
    "beyond-intuition-headwise": "r1-e00249f95b97",
    "beyond-intuition-tokenwise": "r1-c670be1f8b8e",
}

# Files and records of the first release hold these; fields that came later are silent at their neutral values.
OF_THE_FIRST_RELEASE = {
    "lavis-itm": "r1-89890a9baf2e",
    "albef-itm": "r1-84026d1ba903",
    "attention-cross": "r1-2ed7521fd846",
    "context-gradcam": "r1-1313b9c6cfe9",
}
LATER_FIELDS = ("gradient_path", "map_axis", "discard", "departures")

# One valid change per field; a field that others bind is changed together with them.
CHANGES = {
    "site": (FEATURES, {"site": "F3"}),
    "stream": (FEATURES, {"stream": "fusion", "site": "CONTEXT"}),
    "layers": (LAVIS, {"layers": (5,)}),
    "target": (LAVIS, {"target": "custom", "scale": "raw"}),
    "scale": (LAVIS, {"scale": "margin"}),
    "gradient_path": (CHEFER, {"gradient_path": "direct"}),
    "gradient_tokens": (FEATURES, {"gradient_tokens": "cls"}),
    "map_axis": (GRAD_SAM, {"map_axis": "queries"}),
    "discard": (ROLLOUT, {"discard": 0.5}),
    "departures": (PLUS_PLUS, {"departures": ("summed_cubes",)}),
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
        (LAVIS, {"target": "animal"}, r"target='animal': choose from 'class', "),
        (
            LAVIS,
            {"target": "contrastive", "scale": "logit"},
            r"scale='logit' with target='contrastive': choose from 'cosine'",
        ),
        (LAVIS, {"scale": "cosine"}, r"scale='cosine' with target='itm': choose from 'logit', 'probability'"),
        (LAVIS, {"scale": "finer"}, r"scale='finer' with target='itm': choose from 'logit', .*'margin'$"),
        (LAVIS, {"target": "none", "scale": "none"}, r"target='none' with weighting='attention\*gradient'.*'itm'"),
        (LAVIS, {"gradient_path": "half"}, r"gradient_path='half': choose from 'full', 'direct', 'block'"),
        (LAVIS, {"gradient_path": "none"}, r"gradient_path='none' with weighting='attention\*gradient': .* 'full', "),
        (LAVIS, {"gradient_path": "direct"}, r"gradient_path='direct' with site='CROSS' \(.*\): choose from 'full'"),
        (FEATURES, {"gradient_path": "block"}, r"gradient_path='block' with site='F1' \(.*\): choose from 'full'"),
        (RAW, {"gradient_path": "full"}, r"gradient_path='full' with weighting='attention': choose from 'none'$"),
        (
            LAVIS,
            {"gradient_tokens": "cls"},
            r"gradient_tokens='cls' with weighting='attention\*gradient': choose from 'none'$",
        ),
        (
            HEAD_WEIGHTS,
            {"gradient_tokens": "none"},
            r"gradient_tokens='none' with weighting='head_weights': choose from 'patches', 'all'$",
        ),
        (
            HEAD_WEIGHTS,
            {"gradient_tokens": "cls"},
            r"gradient_tokens='cls' with weighting='head_weights': choose from 'patches', 'all'$",
        ),
        (
            FEATURES,
            {"gradient_tokens": "none"},
            r"gradient_tokens='none' with weighting='gradcam': choose from 'cls', 'patches', 'all'$",
        ),
        (
            PLUS_PLUS,
            {"gradient_tokens": "cls"},
            r"gradient_tokens='cls' with weighting='gradcam\+\+': choose from 'patches', 'all'$",
        ),
        (
            FEATURES,
            {"weighting": "xgradcam", "gradient_tokens": "cls"},
            r"gradient_tokens='cls' with weighting='xgradcam': choose from 'patches', 'all'$",
        ),
        (
            FEATURES,
            {"weighting": "hirescam", "gradient_tokens": "patches"},
            r"gradient_tokens='patches' with weighting='hirescam': choose from 'none'$",
        ),
        (LAVIS, {"queries": "none"}, r"queries='none' with site='CROSS': choose from 'cls', 'all', 'phrase'"),
        (LAVIS, {"queries": "patches"}, r"queries='patches' with site='CROSS': choose from 'cls', 'all', 'phrase'"),
        (LAVIS, {"queries": (1, 1)}, r"queries=\(1, 1\): an index is given twice"),
        (LAVIS, {"site": "F2", "stream": "vision", "queries": "phrase"}, r"queries='phrase' with site='F2'.*'patches'"),
        (FEATURES, {"queries": "all"}, r"queries='all' with site='F1'.*choose from 'none'"),
        (FEATURES, {"queries": (0,)}, r"queries=\(0,\) with site='F1'.*choose from 'none'"),
        (
            LAVIS,
            {"exclude": ("pads",)},
            r"exclude=\('pads',\): give any of 'cls', 'registers', 'distillation', 'special_text', 'padding'",
        ),
        (LAVIS, {"exclude": None}, r"exclude=None: give any of"),
        (LAVIS, {"exclude": ("padding",)}, r"exclude=\('padding',\).*add 'cls'"),
        (LAVIS, {"queries": "cls"}, r"queries='cls' with exclude=.*leave 'special_text' out"),
        (LAVIS, {"exclude": "cls"}, r"exclude=\('cls',\) with site='CROSS'.*add 'padding'"),
        (FEATURES, {"exclude": ("cls", "padding")}, r"with site='F1': there is no text, so leave out 'padding'$"),
        (
            RAW,
            {"exclude": ("cls", "special_text", "padding")},
            r"with site='F2': there is no text, so leave out 'special_text', 'padding'$",
        ),
        (LAVIS, {"weighting": "gradcam"}, r"weighting='gradcam' with site='CROSS', heads='mean': .*'attention', "),
        (RAW, {"weighting": "eigencam"}, r"weighting='eigencam' with site='F2', heads='mean': choose from 'attention'"),
        (
            RAW,
            {"heads": "channels"},
            r"weighting='attention' with heads='channels': choose from 'gradcam', 'gradcam\+\+', 'xgradcam', ",
        ),
        (FEATURES, {"weighting": "attention"}, r"weighting='attention' with site='F1': choose from 'gradcam'"),
        (
            LAVIS,
            {"weighting": "sigmoid*gradient"},
            r"site='CROSS' with weighting='sigmoid\*gradient' \(the scores before the softmax\): choose from 'F2'$",
        ),
        (
            LAVIS,
            {"weighting": "attention", "relu": "gradient"},
            r"relu='gradient' with weighting='attention' \(.*\): choose from 'none'$",
        ),
        (
            LAVIS,
            {"weighting": "attention", "target": "itm"},
            r"target='itm' with weighting='attention' \(it does not depend on a score\): choose from 'none'$",
        ),
        (
            FEATURES,
            {"weighting": "eigencam", "target": "class"},
            r"target='class' with weighting='eigencam' \(it does not depend on a score\): choose from 'none'$",
        ),
        (
            FEATURES,
            {"relu": "after_heads"},
            r"relu='after_heads' with weighting='gradcam': choose from 'none', 'gradient', 'map'$",
        ),
        (
            PLUS_PLUS,
            {"relu": "gradient"},
            r"relu='gradient' with weighting='gradcam\+\+': choose from 'none', 'map'$",
        ),
        (
            FEATURES,
            {"weighting": "layercam", "relu": "gradient"},
            r"relu='gradient' with weighting='layercam': choose from 'none', 'map'$",
        ),
        (
            FEATURES,
            {"weighting": "elementwise", "relu": "map"},
            r"relu='map' with weighting='elementwise' \(its own ReLU leaves nothing negative\): choose from 'none'$",
        ),
        (LAVIS, {"map_axis": "queries"}, r"map_axis='queries' with site='CROSS': choose from 'keys'$"),
        (LAVIS, {"map_axis": "none"}, r"map_axis='none' with site='CROSS': choose from 'keys'$"),
        (RAW, {"map_axis": "none"}, r"map_axis='none' with site='F2': choose from 'keys', 'queries'$"),
        (FEATURES, {"map_axis": "keys"}, r"map_axis='keys' with site='F1' \(.*\): choose from 'none'$"),
        (CHEFER, {"map_axis": "queries"}, r"map_axis='queries' with layer_rule='relevance': choose from 'keys'$"),
        (LAVIS, {"queries": "registers"}, r"queries='registers' with site='CROSS': choose from 'cls', 'all', 'phrase'"),
        (RAW, {"queries": "none"}, r"queries='none' with site='F2': choose from 'cls', 'registers', 'patches', 'all'$"),
        (FEATURES, {"layer_rule": "rollout"}, r"site='F1' with layer_rule='rollout' \(.*\): choose from 'F2'$"),
        (LAVIS, {"layer_rule": "relevance"}, r"site='CROSS' with layer_rule='relevance' \(.*\): choose from 'F2'$"),
        (
            HEAD_WEIGHTS.replace(heads="channels", weighting="gradcam", relu="map"),
            {"layers": "all", "layer_rule": "rollout"},
            r"heads='channels' with layer_rule='rollout': choose from 'mean', 'sum', 'max', 'min'$",
        ),
        (RAW, {"discard": 0.9}, r"discard=0\.9 with layer_rule='single': choose from 0\.0$"),
        (CHEFER, {"discard": 0.9}, r"discard=0\.9 with layer_rule='relevance': choose from 0\.0$"),
        (ROLLOUT, {"discard": 1}, r"discard=1: give a share of 0 or more, and less than 1$"),
        (ROLLOUT, {"discard": -0.1}, r"discard=-0\.1: give a share"),
        (ROLLOUT, {"discard": float("nan")}, r"discard=nan: give a share"),
        (ROLLOUT, {"discard": "0.9"}, r"discard='0\.9': give a share"),
        (ROLLOUT, {"discard": False}, r"discard=False: give a share"),
        (ROLLOUT, {"discard": None}, r"discard=None: give a share"),
        (ROLLOUT, {"departures": ("column",)}, r"departures=\('column',\): give any of 'column_scaling', "),
        (ROLLOUT, {"departures": None}, r"departures=None: give any of "),
        (
            CHEFER,
            {"departures": "column_scaling"},
            r"layer_rule='relevance' with departures=\('column_scaling',\): choose from 'rollout'$",
        ),
        (
            CHEFER,
            {"departures": "mirrored_layers"},
            r"layer_rule='relevance' with departures=\('mirrored_layers',\): choose from 'rollout'$",
        ),
        (
            CHEFER,
            {"departures": "unprotected"},
            r"layer_rule='relevance' with departures=\('unprotected',\): choose from 'rollout'$",
        ),
        (
            ROLLOUT,
            {"departures": "scores_gradient"},
            r"weighting='attention' with departures=\('scores_gradient',\): choose from 'gradient', 'attention\*gradi",
        ),
        (
            LAVIS,
            {"departures": "scores_gradient"},
            r"site='CROSS' with departures=\('scores_gradient',\) \(the scores before the softmax\): choose from 'F2'$",
        ),
        (
            FEATURES,
            {"departures": "summed_cubes"},
            r"weighting='gradcam' with departures=\('summed_cubes',\): choose from 'gradcam\+\+'$",
        ),
        (
            FEATURES,
            {"departures": "no_denominator"},
            r"weighting='gradcam' with departures=\('no_denominator',\): choose from 'gradcam\+\+'$",
        ),
        (
            PLUS_PLUS,
            {"departures": ("no_denominator", "summed_cubes")},
            r"departures=\('summed_cubes', 'no_denominator'\): one has another denominator, one none; give one",
        ),
        (LAVIS, {"heads": "none"}, r"heads='none' with site='CROSS': choose from 'mean', 'sum', 'max', 'min'"),
        (FEATURES, {"heads": "mean"}, r"heads='mean' with site='F1'.*choose from 'none'"),
        (LAVIS, {"layer_rule": "shared"}, r"site='CROSS' with layer_rule='shared': choose from 'CONTEXT'$"),
        (
            CONTEXT,
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


@pytest.mark.parametrize(
    ("given", "normal"),
    [
        ("unprotected", ("unprotected",)),
        (["unprotected", "column_scaling"], ("column_scaling", "unprotected")),
        (("unprotected", "unprotected"), ("unprotected",)),
        ([], ()),
    ],
)
def test_departures_have_one_form(given, normal):
    recipe = ROLLOUT.replace(departures=given)
    assert recipe.departures == normal
    assert recipe.fingerprint == ROLLOUT.replace(departures=normal).fingerprint


def test_a_share_of_nothing_is_nothing_however_it_is_written():
    recipe = ROLLOUT.replace(discard=0)
    assert recipe == ROLLOUT.replace(discard=0.0)
    assert type(recipe.discard) is float
    assert recipe.fingerprint == ROLLOUT.replace(discard=-0.0).fingerprint


@pytest.mark.parametrize(
    ("base", "changes", "forced"),
    [
        (
            LAVIS,
            {"weighting": "attention"},
            {"target": "none", "scale": "none", "gradient_path": "none", "relu": "none"},
        ),
        (LAVIS, {"target": "contrastive"}, {"scale": "cosine"}),
        (LAVIS, {"target": "custom"}, {"scale": "raw"}),
        (LAVIS, {"target": "class"}, {}),
        (LAVIS, {"heads": "max"}, {}),
        (FEATURES, {"weighting": "hirescam"}, {"gradient_tokens": "none"}),
        (FEATURES, {"weighting": "elementwise"}, {"gradient_tokens": "none", "relu": "none"}),
        (FEATURES, {"weighting": "gradcam++"}, {}),
        (
            FEATURES,
            {"weighting": "eigencam"},
            {"gradient_tokens": "none", "target": "none", "scale": "none", "gradient_path": "none"},
        ),
        (RAW, {"site": "CROSS", "exclude": ("cls", "padding")}, {"stream": "fusion"}),
        (FEATURES, {"site": "CONTEXT"}, {"stream": "fusion"}),
        (recipes()["grad-sam-queries"].recipe, {"layer_rule": "relevance"}, {"map_axis": "keys"}),
        (ROLLOUT, {"layer_rule": "relevance"}, {"discard": 0.0}),
        (ROLLOUT, {"layer_rule": "single", "layers": "last"}, {"discard": 0.0}),
        (HEAD_WEIGHTS, {"weighting": "gradient"}, {"gradient_tokens": "none"}),
        (LAVIS, {"site": "F2", "exclude": "cls"}, {"stream": "vision"}),
    ],
)
def test_what_has_one_value_left_takes_it(base, changes, forced):
    """And what it takes is on record, as if it had been written out."""
    found = base.replace(**changes)
    assert found == base.replace(**changes, **forced)
    assert {field for field in base.differences(found) if field not in changes} == set(forced)


@pytest.mark.parametrize("base", NAMED, ids=names)
def test_every_word_fits_or_is_refused_in_the_same_manner(base):
    """The message quotes a field, its value and what would do; what fits is as good as written out."""
    for field in fields_of(base):
        for value in values_of(field):
            refused = ""
            try:
                found = base.replace(**{field: value})
            except RecipeError as error:
                refused = str(error)
            if refused:
                quoted = re.match(
                    r"^(\w+)=.+: (choose from .+|give .+|.*; (add|leave|give) .+|.*, so leave out .+)$", refused
                )
                assert quoted, refused
                assert quoted[1] in fields_of(base)
            else:
                assert getattr(found, field) in (value, (value,))
                assert Recipe(**fields_of(found)) == found


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


def test_named_recipes_are_different_recipes():
    assert len({recipe.fingerprint for recipe in NAMED}) == len(NAMED) == len(set(NAMED))


def test_fingerprints_of_the_first_release_stay():
    assert {name: FINGERPRINTS[name] for name in OF_THE_FIRST_RELEASE} == OF_THE_FIRST_RELEASE
    # Its Grad-CAM of token features was published here for matching.
    assert FEATURES.replace(target="itm").fingerprint == "r1-c3c23434d7d2"


def digest(made):
    return hashlib.sha256(" ".join(recipe.fingerprint for recipe in made).encode()).hexdigest()[:16]


def test_fingerprints_of_every_kind_of_recipe_of_the_first_release_stay():
    """Computed with the code of that release."""
    base = LAVIS.replace(layers="last", exclude=("cls", "padding"), relu="none")
    layers = [("last", "single"), ("all", "mean"), ([1, 3], "max")]
    relus = ("none", "gradient", "before_heads", "after_heads", "map")
    weightings, heads, queries = (
        ("gradient", "attention*gradient"),
        ("mean", "sum", "max", "min"),
        ("cls", "all", (0, 2)),
    )
    cross = [
        base.replace(
            scale=scale, relu=relu, weighting=weighting, heads=head, queries=rows, layers=which, layer_rule=rule
        )
        for scale, relu, weighting, head, rows, (which, rule) in product(
            ("logit", "probability", "log-probability", "margin"), relus, weightings, heads, queries, layers
        )
    ]
    features = [
        FEATURES.replace(site=site, gradient_tokens=tokens, relu=relu, target=target, scale=scale, normalize=normalize)
        for site, tokens, relu, (target, scale), normalize in product(
            ("F1", "F3", "F3_HEADS", "F4", "F5", "F6"),
            ("cls", "patches", "all"),
            ("none", "gradient", "map"),
            (("itm", "margin"), ("contrastive", "cosine"), ("custom", "raw")),
            ("none", "minmax", "max"),
        )
    ]
    plain = [
        RAW.replace(site=site, stream=stream, exclude=exclude, heads=head, queries=rows)
        for (site, stream, exclude), head, rows in product(
            (("F2", "vision", "cls"), ("CROSS", "fusion", ("cls", "padding"))), heads, queries
        )
    ]
    assert (len(cross), digest(cross)) == (1440, "876de50fae1cd6ca")
    assert (len(features), digest(features)) == (486, "416983b5ca06f6a6")
    assert (len(plain), digest(plain)) == (24, "80ec03790d93b50a")


NEUTRAL = [
    recipe
    for recipe in NAMED
    if not recipe.departures
    and not recipe.discard
    and recipe.map_axis != "queries"
    and recipe.gradient_path in ("full", "none")
]


@pytest.mark.parametrize("recipe", NEUTRAL, ids=names)
def test_files_without_the_later_fields_are_read_as_they_were_meant(recipe):
    old = {field: value for field, value in recipe.to_dict().items() if field not in LATER_FIELDS}
    kept = dict(old)
    toml = "".join(f"{field} = {json.dumps(value)}\n" for field, value in old.items())
    for found in (Recipe.from_dict(old), Recipe.from_json(json.dumps(old)), Recipe.from_toml(toml)):
        assert found == recipe
        assert found.fingerprint == recipe.fingerprint
        assert found.to_dict() == recipe.to_dict()
    assert old == kept


def test_a_file_of_the_first_release_is_read():
    text = """{
      "schema": 1, "name": "lavis-itm", "site": "CROSS", "stream": "fusion", "layers": [6], "target": "itm",
      "scale": "logit", "gradient_tokens": "none", "queries": "all", "exclude": ["cls", "special_text", "padding"],
      "weighting": "attention*gradient", "relu": "gradient", "heads": "mean", "layer_rule": "single",
      "reshape": "raster", "upsample": "bilinear", "normalize": "minmax"
    }"""
    found = Recipe.from_json(text)
    assert found == LAVIS
    assert found.fingerprint == "r1-89890a9baf2e"


@pytest.mark.parametrize("field", LATER_FIELDS)
@pytest.mark.parametrize("recipe", NEUTRAL, ids=names)
def test_a_later_field_may_be_missing_alone(recipe, field):
    values = recipe.to_dict()
    del values[field]
    assert Recipe.from_dict(values) == recipe


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


@pytest.mark.parametrize("discard", [0.1, 0.9, 1e-7, 1 / 3, 0.1 + 0.2, 5e-324, 1 - 2**-53])
def test_any_share_survives_json_and_toml(discard):
    recipe = ROLLOUT.replace(discard=discard, departures=("unprotected", "column_scaling"))
    for back in (Recipe.from_json(recipe.to_json()), Recipe.from_toml(recipe.to_toml())):
        assert back == recipe
        assert back.discard == discard
        assert back.fingerprint == recipe.fingerprint


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
            shown = (", ".join(map(str, value)) or "none") if isinstance(value, tuple) else str(value)
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
        ("pgc-elementwise", ["ReLU of activation x gradient", "nothing negative"]),
        ("pgc-eigencam", ["first principal component of the activation; without cls"]),
        ("torchcam-gradcam++", ["Grad-CAM++", "as coded: summed_cubes"]),
        ("legrad", ["F2 of vision blocks -2, -1; gradient;", "gradient path block", "query rows all", "layers sum"]),
        ("agcam", ["sigmoid of the scores x gradient", "gradient path direct", "heads sum", "layers sum"]),
        ("attn-gradcam", ["heads weighted by the mean gradient", "gradient tokens patches", "ReLU after heads"]),
        ("vitexplain-rollout", ["layers rollout; smallest 0.9 set to zero", "heads max"]),
        ("vitexplain-rollout-as-coded", ["as coded: column_scaling"]),
        ("grad-sam-queries", ["key columns all"]),
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


LAST_LINE = "tokens[row, column] = M[j] in raster order, tokens before the patches left out"
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
        "M[j] = ReLU(sum over c of w[c] A[j,c])",
        LAST_LINE,
    ],
    "pgc-gradcam": [
        "y = z[class]",
        "G = dy/dA",
        "w[c] = mean over i in patches of G[i,c]",
        "M[j] = ReLU(sum over c of w[c] A[j,c])",
        LAST_LINE,
    ],
    "pgc-swin": [
        "y = z[class]",
        "G = dy/dA",
        "w[c] = mean over i in patches of G[i,c]",
        "M[j] = ReLU(sum over c of w[c] A[j,c])",
        LAST_LINE,
    ],
    "pgc-gradcam++": [
        "y = z[class]",
        "G = dy/dA",
        (
            "w[c] = sum over i in patches of ReLU(G[i,c]) G[i,c]^2 / (2 G[i,c]^2 + (sum over i in patches of "
            "A[i,c]) G[i,c]^3 + 1e-6)"
        ),
        "M[j] = ReLU(sum over c of w[c] A[j,c])",
        LAST_LINE,
    ],
    "pgc-xgradcam": [
        "y = z[class]",
        "G = dy/dA",
        "w[c] = sum over i in patches of G[i,c] A[i,c] / (sum over i in patches of A[i,c] + 1e-7)",
        "M[j] = ReLU(sum over c of w[c] A[j,c])",
        LAST_LINE,
    ],
    "pgc-hirescam": [
        "y = z[class]",
        "G = dy/dA",
        "M[j] = ReLU(sum over c of G[j,c] A[j,c])",
        LAST_LINE,
    ],
    "pgc-layercam": [
        "y = z[class]",
        "G = dy/dA",
        "M[j] = ReLU(sum over c of ReLU(G[j,c]) A[j,c])",
        LAST_LINE,
    ],
    "pgc-elementwise": [
        "y = z[class]",
        "G = dy/dA",
        "M[j] = sum over c of ReLU(G[j,c] A[j,c])",
        LAST_LINE,
    ],
    "pgc-eigencam": [
        "M[j] = ReLU(first principal component over patches of A[j,c], its value of largest magnitude positive)",
        LAST_LINE,
    ],
    "pgc-eigengradcam": [
        "y = z[class]",
        "G = dy/dA",
        (
            "M[j] = ReLU(first principal component over patches of G[j,c] A[j,c], its value of largest magnitude "
            "positive)"
        ),
        LAST_LINE,
    ],
    "pgc-finercam": [
        (
            "y = sum over r of p[r] (z[class] - z[r]) / (sum over r of p[r] + 1e-9), p = softmax(z), r the 3 "
            "classes with the nearest logits"
        ),
        "G = dy/dA",
        "w[c] = mean over i in patches of G[i,c]",
        "M[j] = ReLU(sum over c of w[c] A[j,c])",
        LAST_LINE,
    ],
    "torchcam-gradcam++": [
        "y = z[class]",
        "G = dy/dA",
        (
            "w[c] = sum over i in patches of ReLU(G[i,c]) G[i,c]^2 / (2 G[i,c]^2 + (sum over i in patches of "
            "G[i,c]^3 A[i,c]) + 1e-8)"
        ),
        "M[j] = ReLU(sum over c of w[c] A[j,c])",
        LAST_LINE,
    ],
    "torchcam-gradcam++-as-coded": [
        "y = z[class]",
        "G = dy/dA",
        "w[c] = sum over i in patches of ReLU(G[i,c]) G[i,c]^2",
        "M[j] = ReLU(sum over c of w[c] A[j,c])",
        LAST_LINE,
    ],
    "gscorecam-gradcam": [
        "y = z[class]",
        "G = dy/dA",
        "w[c] = mean over i = 0 of G[i,c]",
        "M[j] = ReLU(sum over c of w[c] A[j,c])",
        LAST_LINE,
    ],
    "gradeclip-gradcam-baseline": [
        "y = z[class]",
        "G = dy/dA",
        "w[c] = mean over i in all tokens of G[i,c]",
        "M[j] = ReLU(sum over c of w[c] A[j,c])",
        LAST_LINE,
    ],
    "raw-attention": [
        "E[t,j] = mean over h of A[h,t,j]",
        "M[j] = mean over t = 0 of E[t,j]",
        LAST_LINE,
    ],
    "attention-rollout": [
        "E[t,j] = mean over h of A[h,t,j]",
        "B[t,j] = (E + I)[t,j] / sum over k of (E + I)[t,k]",
        "R = B_L ... B_2 B_1, the first block last",
        "M[j] = mean over t = 0 of R[t,j]",
        LAST_LINE,
    ],
    "vitexplain-rollout": [
        "E[t,j] = max over h of A[h,t,j]",
        "E[t,j] = 0 for the smallest 0.9 of all entries, but E[0,0]",
        "B[t,j] = (E + I)[t,j] / sum over k of (E + I)[t,k]",
        "R = B_L ... B_2 B_1, the first block last",
        "M[j] = mean over t = 0 of R[t,j]",
        LAST_LINE,
    ],
    "vitexplain-rollout-as-coded": [
        "E[t,j] = max over h of A[h,t,j]",
        "E[t,j] = 0 for the smallest 0.9 of all entries, but E[0,0]",
        "B[t,j] = (E + I)[t,j] / sum over k of (E + I)[j,k]",
        "R = B_L ... B_2 B_1, the first block last",
        "M[j] = mean over t = 0 of R[t,j]",
        LAST_LINE,
    ],
    "vitexplain-grad-rollout": [
        "y = z[class]",
        "G = dy/dA",
        "E[t,j] = ReLU(mean over h of A[h,t,j] * G[h,t,j])",
        "E[t,j] = 0 for the smallest 0.9 of all entries, but E[0,0]",
        "B[t,j] = (E + I)[t,j] / sum over k of (E + I)[t,k]",
        "R = B_L ... B_2 B_1, the first block last",
        "M[j] = mean over t = 0 of R[t,j]",
        LAST_LINE,
    ],
    "vitexplain-grad-rollout-as-coded": [
        "y = z[class]",
        "G = dy/dS, of block L - 1 - l in the place of block l",
        "E[t,j] = ReLU(mean over h of A[h,t,j] * G[h,t,j])",
        "E[t,j] = 0 for the smallest 0.9 of all entries",
        "B[t,j] = (E + I)[t,j] / sum over k of (E + I)[j,k]",
        "R = B_L ... B_2 B_1, the first block last",
        "M[j] = mean over t = 0 of R[t,j]",
        LAST_LINE,
    ],
    "attn-gradcam": [
        "y = z[class]",
        "G = dy/dA",
        "w[h] = mean over t = 0, j in patches, of G[h,t,j]",
        "E[t,j] = ReLU(mean over h of w[h] * A[h,t,j])",
        "M[j] = mean over t = 0 of E[t,j]",
        LAST_LINE,
    ],
    "attn-gradcam-full": [
        "y = z[class]",
        "G = dy/dA",
        "w[h] = mean over all t and j of G[h,t,j]",
        "E[t,j] = ReLU(mean over h of w[h] * A[h,t,j])",
        "M[j] = mean over t = 0 of E[t,j]",
        LAST_LINE,
    ],
    "chefer-generic": [
        "y = z[class]",
        "G = dy/dA",
        "E[t,j] = mean over h of ReLU(A[h,t,j] * G[h,t,j])",
        "R = identity; R <- R + E_l R for every block l, first to last",
        "M[j] = mean over t = 0 of R[t,j]",
        LAST_LINE,
    ],
    "chefer-generic-heads-first": [
        "y = z[class]",
        "G = dy/dA",
        "E[t,j] = ReLU(mean over h of A[h,t,j] * G[h,t,j])",
        "R = identity; R <- R + E_l R for every block l, first to last",
        "M[j] = mean over t = 0 of R[t,j]",
        LAST_LINE,
    ],
    "agcam": [
        "y = z[class]",
        "G = dy/dA through residual connections and FFNs only (the input of attention is detached)",
        "E[t,j] = sum over h of sigmoid(S[h,t,j]) * ReLU(G[h,t,j])",
        "M[j] = mean over t = 0 of E[t,j]",
        "M[j] = sum over l of M_l[j]",
        LAST_LINE,
    ],
    "legrad": [
        "y = z[class]",
        "G_l = dy_l/dA_l, y_l read from block l: z_l = head(norm(mean over all tokens of F6_l))",
        "E[t,j] = mean over h of ReLU(G[h,t,j])",
        "M[j] = mean over t in all of E[t,j]",
        "M[j] = sum over l of M_l[j]",
        LAST_LINE,
    ],
    "grad-sam": [
        "y = z[class]",
        "G = dy/dA",
        "E[t,j] = mean over h of A[h,t,j] * ReLU(G[h,t,j])",
        "M[j] = mean over t in all of E[t,j]",
        "M[j] = mean over l of M_l[j]",
        LAST_LINE,
    ],
    "grad-sam-queries": [
        "y = z[class]",
        "G = dy/dA",
        "E[t,j] = mean over h of A[h,t,j] * ReLU(G[h,t,j])",
        "M[j] = mean over t in all of E[j,t]",
        "M[j] = mean over l of M_l[j]",
        LAST_LINE,
    ],
    "pgc-scorecam": [
        "y = z[class]",
        (
            "w = softmax over c of y(image * U[c]), U[c] = A[j,c] laid over the image with corners aligned, then "
            "scaled to 0..1"
        ),
        "M[j] = ReLU(sum over c of w[c] A[j,c])",
        LAST_LINE,
    ],
    "torchcam-scorecam": [
        "y = z[class]",
        "w = softmax over c of y(image * U[c]), U[c] = A[j,c] scaled to 0..1, then laid over the image",
        "M[j] = ReLU(sum over c of w[c] A[j,c])",
        LAST_LINE,
    ],
    "ablationcam": [
        "y = z[class]",
        "w[c] = (y - y(A[.,c] = 0)) / y",
        "M[j] = ReLU(sum over c of w[c] A[j,c])",
        LAST_LINE,
    ],
    "vit-reciprocam": [
        "y = z[class]",
        "y[j] = y when A and the block's input are multiplied by a 3 x 3 Gaussian around j; the class token stays",
        "M[j] = y[j]",
        LAST_LINE,
    ],
    "tam-transition": [
        "y = z[class]",
        "G = mean over a in 0, 1/19, ..., 1 of dy/dA at the image times a",
        "W[t,j] = mean over h of ReLU(G[h,t,j]) of the last block",
        "R = mean over h of A of the last block; R <- R (mean over h of A_l) + R for every block l below it",
        "M[j] = mean over t = 0 of R[t,j] W[t,j]",
        LAST_LINE,
    ],
    "beyond-intuition-headwise": [
        "y = z[class]",
        "G = mean over a in 0, 1/19, ..., 1 of dy/dA at the image times a",
        "W[t,j] = mean over h of ReLU(G[h,t,j]) of the last block",
        "s_l[h] = mean over i, j of |(A_l[h]^T dy/dA_l[h])[i,j]| at the image itself, scaled to a sum of 1 over h",
        "R = identity; R <- R + (sum over h of s_l[h] A_l[h]) R for every block l, first to last",
        "M[j] = mean over t = 0 of R[t,j] W[t,j]",
        LAST_LINE,
    ],
    "beyond-intuition-tokenwise": [
        "y = z[class]",
        "G = mean over a in 0, 1/19, ..., 1 of dy/dA at the image times a",
        "W[t,j] = mean over h of ReLU(G[h,t,j]) of the last block",
        "m_l[j] = |values of j, projected, without bias| / |input of block l at j|",
        "R = identity; R <- R + (mean over h of A_l[h,.,j] m_l[j]) R for every block l, first to last",
        "M[j] = mean over t = 0 of R[t,j] W[t,j]",
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
        (LAVIS, {"target": "contrastive"}, "y = cos(image projection, text projection)"),
        (LAVIS, {"target": "custom"}, "y = given callable"),
        (LAVIS, {"scale": "log-probability"}, "y = log softmax(itm_logit)[match]"),
        (FEATURES, {"scale": "probability"}, "y = softmax(z)[class]"),
        (FEATURES, {"scale": "log-probability"}, "y = log softmax(z)[class]"),
        (FEATURES, {"scale": "margin"}, "y = z[class] - max over other k of z[k]"),
        (RAW, {"queries": "registers"}, "M[j] = mean over t in registers of E[t,j]"),
        (RAW, {"queries": "patches"}, "M[j] = mean over t in patches of E[t,j]"),
        (RAW, {"queries": "all"}, "M[j] = mean over t in all of E[t,j]"),
        (
            RAW,
            {"queries": "all", "exclude": ("cls", "registers", "distillation")},
            "M[j] = mean over t in all but registers and distillation of E[t,j]",
        ),
        (RAW, {"map_axis": "queries"}, "M[j] = mean over t = 0 of E[j,t]"),
        (CHEFER, {"relu": "map"}, "M[j] = ReLU(mean over t = 0 of R[t,j])"),
        (CHEFER, {"queries": "patches"}, "M[j] = mean over t in patches of R[t,j]"),
        (ROLLOUT, {"departures": "unprotected"}, "E[t,j] = 0 for the smallest 0.9 of all entries"),
        (ROLLOUT, {"discard": 0.25}, "E[t,j] = 0 for the smallest 0.25 of all entries, but E[0,0]"),
        (
            recipes()["vitexplain-grad-rollout"].recipe,
            {"departures": "scores_gradient"},
            "G = dy/dS",
        ),
        (AGCAM, {"relu": "none"}, "E[t,j] = sum over h of sigmoid(S[h,t,j]) * G[h,t,j]"),
        (HEAD_WEIGHTS, {"relu": "gradient"}, "w[h] = mean over t = 0, j in patches, of ReLU(G[h,t,j])"),
        (HEAD_WEIGHTS, {"relu": "before_heads"}, "E[t,j] = mean over h of ReLU(w[h] * A[h,t,j])"),
        (HEAD_WEIGHTS, {"queries": (1, 2)}, "w[h] = mean over t in [1, 2], j in patches, of G[h,t,j]"),
        (
            HEAD_WEIGHTS,
            {"heads": "channels", "weighting": "gradcam", "relu": "map"},
            "A[j,c] = mean over t = 0 of A[h=c,t,j]; G likewise",
        ),
        (RAW, {"heads": "channels", "weighting": "none"}, "A[j,c] = mean over t = 0 of A[h=c,t,j]"),
        (RAW, {"heads": "channels", "weighting": "none"}, "M[j] = mean over c of A[j,c]"),
        (FEATURES, {"weighting": "none"}, "M[j] = ReLU(mean over c of A[j,c])"),
        (FEATURES, {"weighting": "hirescam", "relu": "gradient"}, "M[j] = sum over c of ReLU(G[j,c]) A[j,c]"),
        (FEATURES, {"gradient_tokens": "all"}, "w[c] = mean over i in all tokens of G[i,c]"),
        (
            FEATURES,
            {"gradient_tokens": "all", "exclude": ("cls", "registers")},
            "w[c] = mean over i in all tokens but registers of G[i,c]",
        ),
        (
            FEATURES,
            {"weighting": "xgradcam", "relu": "gradient"},
            "w[c] = sum over i in patches of ReLU(G[i,c]) A[i,c] / (sum over i in patches of A[i,c] + 1e-7)",
        ),
        (
            PLUS_PLUS,
            {"gradient_tokens": "all", "departures": "no_denominator"},
            "w[c] = sum over i in all tokens of ReLU(G[i,c]) G[i,c]^2",
        ),
        (FEATURES, {"gradient_tokens": "cls"}, "w[c] = mean over i = 0 of G[i,c]"),
        (FEATURES, {"relu": "gradient"}, "w[c] = mean over i in patches of ReLU(G[i,c])"),
        (FEATURES, {"relu": "gradient"}, "M[j] = sum over c of w[c] A[j,c]"),
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


def adapter(*heads, reads="cls"):
    return SimpleNamespace(heads=dict.fromkeys(heads, "classes"), reads=reads)


@pytest.mark.parametrize(
    ("name", "heads", "target", "scale", "rule"),
    [
        ("lavis-itm", ("itm", "contrastive"), "itm", "logit", "as published"),
        ("pgc-gradcam", ("class",), "class", "logit", "as published"),
        ("pgc-gradcam", ("itm", "class"), "class", "logit", "as published"),
        (
            "pgc-gradcam",
            ("itm", "contrastive"),
            "itm",
            "logit",
            "published for class (logit); this model offers 'itm', 'contrastive'",
        ),
        (
            "pgc-gradcam",
            ("contrastive",),
            "contrastive",
            "cosine",
            "published for class (logit); this model offers 'co",
        ),
        ("context-gradcam", ("class",), "class", "logit", "published for itm (logit); this model offers 'class'"),
        ("raw-attention", ("itm",), "none", "none", "as published"),
    ],
)
def test_a_score_that_the_model_lacks_is_replaced_by_its_first(name, heads, target, scale, rule):
    fitted, rules = recipes()[name].fitted(12, adapter(*heads))
    assert (fitted.target, fitted.scale) == (target, scale)
    assert rules["target"].startswith(rule)
    assert fitted == recipes()[name].recipe.replace(target=target, scale=scale)


def test_every_scale_that_a_fitted_recipe_takes_is_one_of_its_target():
    for entry, head in product(recipes().values(), ("class", "itm", "contrastive")):
        if entry.recipe.scale == "finer" and head != "class":
            with pytest.raises(RecipeError, match="scale='finer'"):
                entry.fitted(12, adapter(head))
            continue
        if entry.reads:
            with pytest.raises(RecipeError, match="is for models whose heads read the patches"):
                entry.fitted(12, adapter(head))
            continue
        fitted, _ = entry.fitted(12, adapter(head))
        assert fitted.scale in SCALES[fitted.target]
        assert fitted.name == entry.recipe.name


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("raw-attention", "queries"),
        ("attention-rollout", "queries"),
        ("attn-gradcam", "queries"),
        ("chefer-generic", "queries"),
        ("agcam", "queries"),
        ("gscorecam-gradcam", "gradient_tokens"),
    ],
)
def test_where_patches_are_read_they_stand_for_the_class_token(name, field):
    entry = recipes()[name]
    fitted, rules = entry.fitted(12, adapter("class", reads="patches"))
    assert fitted == entry.recipe.replace(**{field: "patches"})
    assert rules["tokens"] == f"published for the class token; this model's heads read the patches: {field}"
    fitted, rules = entry.fitted(12, adapter("class"))
    assert fitted == entry.recipe
    assert set(rules.values()) == {"as published"}


@pytest.mark.parametrize("name", ["pgc-gradcam", "legrad", "grad-sam", "lavis-itm", "context-gradcam"])
def test_other_tokens_stay_where_patches_are_read(name):
    entry = recipes()[name]
    fitted, rules = entry.fitted(entry.depth or 12, adapter(entry.recipe.target, reads="patches"))
    assert fitted == entry.recipe
    assert rules["tokens"] == "as published"


def test_layers_and_target_are_fitted_together():
    fitted, rules = recipes()["lavis-itm"].fitted(3, adapter("contrastive"))
    assert (fitted.layers, fitted.target, fitted.scale) == ((1,), "contrastive", "cosine")
    assert rules["layers"] == "published on block [6] of 12; same relative depth of 3 blocks"


@pytest.mark.parametrize("entry", recipes().values(), ids=recipes())
def test_every_entry_says_where_it_comes_from(entry):
    assert re.search(r"\b(19|20)\d\d\b", entry.citation)
    assert entry.code
    assert entry.notes.endswith(".")


@pytest.mark.parametrize(("heads", "name"), [(("itm", "contrastive"), "lavis-itm"), (("class",), "pgc-gradcam")])
def test_the_default_recipe_is_that_of_the_models_kind(heads, name):
    assert default(dict.fromkeys(heads, "classes")) == name


def test_the_catalogue_is_read_only_and_names_what_it_has():
    with pytest.raises(TypeError):
        recipes()["mine"] = recipes()["lavis-itm"]
    with pytest.raises(UnknownNameError, match=r"no recipe 'gradcam'; there are 'lavis-itm', .*'pgc-gradcam'"):
        named("gradcam")
    assert named("albef-itm").recipe.layers == (2,)
