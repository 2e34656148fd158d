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
from vlcam.choices import COMPARING, SCALES
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
CLIP = recipes()["clip-gradcam"].recipe
CHEFER_CLIP = recipes()["chefer-clip"].recipe
CHEFER_TEXT = recipes()["chefer-clip-text"].recipe
GRADECLIP = recipes()["grad-eclip"].recipe
GRADECLIP_TEXT = recipes()["grad-eclip-text"].recipe
LEGRAD = recipes()["legrad"].recipe
POOLER = recipes()["legrad-pooler"].recipe
MASKCLIP = recipes()["maskclip"].recipe
SURGERY = recipes()["clip-surgery"].recipe
CAPTION = recipes()["coca-caption"].recipe
BIMODAL = recipes()["chefer-bimodal-words"].recipe
OF_TEXT = {"stream": "text", "exclude": ("special_text", "padding")}
NAMED = [entry.recipe for entry in recipes().values()]

FINGERPRINTS = {
    "lavis-itm": "r1-89890a9baf2e",
    "albef-itm": "r1-84026d1ba903",
    "attention-cross": "r1-2ed7521fd846",
    "context-gradcam": "r1-1313b9c6cfe9",
    "pnp-vqa": "r1-36cb109f56ee",
    "pnp-vqa-as-written": "r1-021fedffef34",
    "omnixai-itm": "r1-86e5f5638454",
    "blip2-itm": "r1-9c2f6d3efd27",
    "blip2-itc": "r1-a5fccb961d06",
    "blip-caption": "r1-f99346fa716c",
    "blip-vqa": "r1-2eb2f0753e17",
    "chefer-bimodal": "r1-92dd6f552a24",
    "chefer-bimodal-words": "r1-1b0e4c773f8b",
    "clip-gradcam": "r1-5d1b0c3a83a3",
    "pgc-clip-softmax": "r1-573690f5df6f",
    "clip-es": "r1-3afffd3036c4",
    "albef-itc": "r1-d4208541bd62",
    "chefer-clip": "r1-654a55f61960",
    "chefer-clip-text": "r1-390b066af25b",
    "grad-eclip": "r1-cc93a2b31037",
    "grad-eclip-as-coded": "r1-2fdfa13bc31b",
    "grad-eclip-text": "r1-52c07985db91",
    "grad-eclip-text-as-coded": "r1-ecdc05c80588",
    "legrad-pooler": "r1-65a6a3b83fdc",
    "legrad-pooler-as-coded": "r1-f7195922abc4",
    "maskclip": "r1-f7bd333eaab2",
    "clip-surgery": "r1-13d32770ccfe",
    "coca-caption": "r1-e2cc7edb9287",
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
    "gscorecam-gradcam": "r1-e8e6778fedbc",
    "gradeclip-gradcam-baseline": "r1-43db5c009b46",
    "gradeclip-gradcam-baseline-as-coded": "r1-106cc36e38b9",
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
    "legrad": "r1-9f93a67f7be9",
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
# The same choices, which were published under other names, or for another target.
OF_LATER_RELEASES = {
    "gscorecam-gradcam": "r1-0fb19ca60696",
    "gradeclip-gradcam-baseline": "r1-f1ea73a5d4d6",
    "legrad": "r1-ea1eddf7a405",
}
LATER_FIELDS = ("gradient_path", "map_axis", "discard", "departures", "attention", "prompt", "compose")

# One valid change per field; a field that others bind is changed together with them.
CHANGES = {
    "site": (FEATURES, {"site": "F3"}),
    "stream": (FEATURES, {"stream": "fusion", "site": "CONTEXT"}),
    "layers": (LAVIS, {"layers": (5,)}),
    "attention": (GRADECLIP, {"attention": "one_head"}),
    "target": (LAVIS, {"target": "custom", "scale": "raw"}),
    "scale": (LAVIS, {"scale": "margin"}),
    "prompt": (CLIP, {"prompt": "in_place"}),
    "gradient_path": (CHEFER, {"gradient_path": "direct"}),
    "gradient_tokens": (FEATURES, {"gradient_tokens": "cls"}),
    "map_axis": (GRAD_SAM, {"map_axis": "queries"}),
    "compose": (CAPTION, {"compose": "none"}),
    "discard": (ROLLOUT, {"discard": 0.5}),
    "departures": (PLUS_PLUS, {"departures": ("summed_cubes",)}),
    "queries": (LAVIS, {"queries": (1, 2)}),
    "exclude": (LAVIS, {"exclude": ("cls", "padding")}),
    "weighting": (LAVIS, {"weighting": "gradient"}),
    "relu": (LAVIS, {"relu": "after_heads"}),
    "heads": (LAVIS, {"heads": "sum"}),
    "layer_rule": (LAVIS.replace(layers="all", layer_rule="mean"), {"layer_rule": "max"}),
    "reshape": (CHEFER_CLIP.replace(queries="all"), {**OF_TEXT, "reshape": "words", "upsample": "none"}),
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
        (LAVIS, {"stream": "text"}, r"stream='text' with site='CROSS' \(or 'pooler', .*\): choose from 'fusion'$"),
        (LAVIS, {"stream": "audio"}, r"stream='audio': choose from 'vision', 'text', 'pooler', 'fusion'$"),
        (LAVIS, {"stream": "vision"}, r"stream='vision' with site='CROSS' \(or 'pooler', where .*\): .* 'fusion'$"),
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
            {"target": "contrastive", "scale": "raw"},
            r"scale='raw' with target='contrastive': choose from 'cosine', 'logit', 'probability', .*'finer'$",
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
        (
            LAVIS,
            {"queries": "none"},
            r"queries='none' with site='CROSS', stream='fusion': choose from 'cls', 'all', 'phrase'",
        ),
        (
            LAVIS,
            {"queries": "patches"},
            r"queries='patches' with site='CROSS', stream='fusion': choose from 'cls', 'all', 'phrase'",
        ),
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
        (
            FEATURES,
            {"exclude": ("cls", "padding")},
            r"with site='F1', stream='vision': there is no text, so leave out 'padding'$",
        ),
        (
            RAW,
            {"exclude": ("cls", "special_text", "padding")},
            r"with site='F2', stream='vision': there is no text, so leave out 'special_text', 'padding'$",
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
        (
            LAVIS,
            {"queries": "registers"},
            r"queries='registers' with site='CROSS', stream='fusion': choose from 'cls', 'all', 'phrase'",
        ),
        (
            RAW,
            {"queries": "none"},
            r"queries='none' with site='F2', stream='vision': choose from 'cls', 'registers', 'patches', 'all'$",
        ),
        (FEATURES, {"layer_rule": "rollout"}, r"site='F1' with layer_rule='rollout' \(.*\): choose from 'F2'$"),
        (LAVIS, {"layer_rule": "rollout"}, r"site='CROSS' with layer_rule='rollout' \(.*\): choose from 'F2'$"),
        (FEATURES, {"layer_rule": "relevance"}, r"site='F1' with .* \(only attention .*\): choose from 'F2', 'CROSS'$"),
        (
            POOLER,
            {"layer_rule": "relevance", "layers": "all"},
            r"stream='pooler' with site='CROSS', layer_rule='relevance' \(.* no text\): choose from 'fusion'$",
        ),
        (
            BIMODAL,
            {"weighting": "head_weights", "gradient_tokens": "all"},
            r"weighting='head_weights' with site='CROSS', layer_rule='relevance': choose from 'attention', 'att",
        ),
        (
            BIMODAL,
            {"relu": "none"},
            r"relu='none' with .* \(rows are divided by their sums, .*\): choose from 'gradient', 'before_heads', 'aft",
        ),
        (BIMODAL, {"relu": "map"}, r"relu='map' with site='CROSS', layer_rule='relevance' \("),
        (BIMODAL, {"relu": "negative_gradient"}, r"relu='negative_gradient' with site='CROSS', layer_rule='relevance'"),
        (BIMODAL, {"compose": "pooler"}, r"compose='pooler' with site='CROSS', layer_rule='relevance': choose from"),
        (
            BIMODAL,
            {"layer_rule": "mean"},
            r"compose='vision' with site='CROSS', layer_rule='mean': choose from 'none', ",
        ),
        (
            LAVIS,
            {"compose": "vision"},
            r"compose='vision' with site='CROSS', layer_rule='single': choose from 'none', 'p",
        ),
        (CHEFER, {"compose": "vision"}, r"compose='vision' with site='F2', stream='vision': choose from 'none'$"),
        (GRADECLIP, {"departures": "head_scale"}, r"attention='own' with departures=.*: choose from 'one_head'$"),
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
        (LAVIS, {"reshape": "windows"}, r"reshape='windows': choose from 'raster', 'words'$"),
        (LAVIS, {"upsample": "area"}, r"upsample='area': choose from 'nearest', 'bilinear', 'bicubic', 'none'$"),
        (LAVIS, {"normalize": "zscore"}, r"normalize='zscore': choose from 'none', 'minmax', 'max', 'sum'$"),
        (LAVIS, {"reshape": "words"}, r"reshape='words' with stream='fusion': choose from 'raster'$"),
        (LAVIS, {"upsample": "none"}, r"upsample='none' with stream='fusion': .* 'nearest', 'bilinear', 'bicubic'$"),
        (CHEFER_TEXT, {"reshape": "raster"}, r"reshape='raster' with stream='text': choose from 'words'$"),
        (CHEFER_TEXT, {"upsample": "bilinear"}, r"upsample='bilinear' with stream='text': choose from 'none'$"),
        (CHEFER_TEXT, {"queries": "cls"}, r"queries='cls' with site='F2', stream='text': choose from 'pooled', 'all'$"),
        (
            CHEFER_CLIP,
            {"queries": "pooled"},
            r"queries='pooled' with site='F2', stream='vision': choose from 'cls', 'registers', 'patches', 'all'$",
        ),
        (POOLER, {"queries": "cls"}, r"queries='cls' with site='CROSS', stream='pooler': choose from 'all'$"),
        (CHEFER_TEXT, {"map_axis": "queries"}, r"map_axis='queries' with .*: choose from 'keys'$"),
        (
            RAW,
            {"map_axis": "queries", "queries": "all"},
            r"queries='all' with map_axis='queries', weighting='attention' \(a row .* sums to 1, .*\): .* 'cls', ",
        ),
        (
            CHEFER_TEXT,
            {"exclude": ("padding",)},
            r"exclude=\('padding',\) with stream='text': .* exclude=\('special_text', 'padding'\)$",
        ),
        (
            CHEFER_TEXT,
            {"target": "class"},
            r"target='class' with stream='text': choose from 'contrastive', .*'custom'$",
        ),
        (
            CHEFER_TEXT,
            {"gradient_path": "direct"},
            r"gradient_path='direct' with stream='text': choose from 'full'$",
        ),
        (
            CHEFER_TEXT,
            {"layers": "all", "layer_rule": "transition", "relu": "gradient"},
            r"layer_rule='transition' with stream='text': choose from 'single', .*'rollout', 'relevance'$",
        ),
        (
            GRADECLIP_TEXT,
            {"weighting": "scorecam"},
            r"weighting='scorecam' with stream='text' \(the image is asked, .*\): choose from 'gradcam', ",
        ),
        (LAVIS, {"attention": "two_heads"}, r"attention='two_heads': choose from 'own', 'one_head', 'identity', 'val"),
        (LAVIS, {"attention": "one_head"}, r"attention='one_head' with weighting='attention\*gradient', .*: .* 'own'$"),
        (
            FEATURES,
            {"attention": "identity"},
            r"attention='identity' with weighting='gradcam': choose from 'own', 'one_head'$",
        ),
        (RAW, {"attention": "one_head"}, r"attention='one_head' with weighting='attention', gradient_path='none': "),
        (AGCAM, {"attention": "one_head"}, r"attention='one_head' with .*, gradient_path='direct': choose from 'own'$"),
        (
            MASKCLIP,
            {"attention": "one_head"},
            r"attention='one_head' with weighting='similarity': choose from 'own', 'identity', 'values'$",
        ),
        (MASKCLIP, {"site": "F3"}, r"site='F3' with weighting='similarity', attention='identity': choose from 'F6'$"),
        (
            MASKCLIP,
            {"layers": (0,)},
            r"layers=\(0,\) with weighting='similarity', attention='identity' \(.*\): choose from 'last'$",
        ),
        (MASKCLIP, {"layer_rule": "sum"}, r"layer_rule='sum' with weighting='similarity', .*: choose from 'single'$"),
        (
            MASKCLIP,
            {"target": "class", "scale": "logit"},
            r"target='class' with weighting='similarity' \(.*\): .* 'contrastive'$",
        ),
        (
            MASKCLIP,
            {"scale": "probability"},
            r"scale='probability' with weighting='similarity': choose from 'cosine', 'difference'$",
        ),
        (SURGERY, {"scale": "difference"}, r"scale='difference' with weighting='surgery': choose from 'cosine'$"),
        (SURGERY, {"site": "F6"}, r"site='F6' with weighting='surgery', attention='values': choose from 'F3'$"),
        (
            MASKCLIP,
            {"gradient_path": "full"},
            r"gradient_path='full' with weighting='similarity' \(.* nothing is differentiated\): choose from 'none'$",
        ),
        (
            GRADECLIP,
            {"site": "F3"},
            r"site='F3' with weighting='value\*gradient\*similarity' \(.*heads make of their values\): .* 'F3_HEADS'$",
        ),
        (
            GRADECLIP,
            {"gradient_tokens": "patches"},
            r"gradient_tokens='patches' with weighting='value\*gradient\*similarity': choose from 'cls'$",
        ),
        (GRADECLIP_TEXT, {"gradient_tokens": "all"}, r"gradient_tokens='all' with .*: choose from 'pooled'$"),
        (LAVIS, {"prompt": "long"}, r"prompt='long': choose from 'whole', 'phrase', 'in_place'$"),
        (LAVIS, {"prompt": "phrase"}, r"prompt='phrase' with target='itm': choose from 'whole'$"),
        (RAW, {"prompt": "in_place"}, r"prompt='in_place' with target='none': choose from 'whole'$"),
        (RAW, {"compose": "decoder"}, r"compose='decoder': choose from 'none', 'pooler', 'vision'$"),
        (RAW, {"compose": "pooler"}, r"compose='pooler' with site='F2', stream='vision': choose from 'none'$"),
        (POOLER, {"compose": "pooler"}, r"compose='pooler' with site='CROSS', stream='pooler': choose from 'none'$"),
        (POOLER, {"gradient_path": "direct"}, r"gradient_path='direct' with stream='pooler': choose from .*'block'$"),
        (
            LAVIS,
            {"gradient_path": "block"},
            r"gradient_path='block' with site='CROSS' \(.*\): .* 'full', 'integrated'$",
        ),
        (
            GRADECLIP,
            {"departures": "padded_similarity", "weighting": "value*gradient"},
            r"weighting='value\*gradient' with departures=\('padded_similarity',\): .* 'value\*gradient\*similarity'$",
        ),
        (
            LEGRAD,
            {"departures": "bare_pooler", "gradient_path": "full"},
            r"gradient_path='full' with departures=\('bare_pooler',\): choose from 'block'$",
        ),
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
        (LAVIS, {"target": "contrastive"}, {}),
        (LAVIS.replace(scale="probability"), {"target": "caption"}, {"scale": "log-probability"}),
        (LAVIS, {"stream": "pooler", "exclude": "cls"}, {}),
        (CHEFER_CLIP.replace(queries="all"), OF_TEXT, {"reshape": "words", "upsample": "none"}),
        (
            CHEFER_TEXT.replace(queries="all"),
            {"stream": "vision", "exclude": "cls", "upsample": "bilinear"},
            {"reshape": "raster"},
        ),
        (CLIP.replace(prompt="in_place"), {"target": "class"}, {"prompt": "whole"}),
        (CAPTION, {"stream": "pooler", "exclude": "cls"}, {"compose": "none"}),
        (
            GRADECLIP.replace(attention="one_head"),
            {"weighting": "eigencam"},
            {"attention": "own", "gradient_tokens": "none", "target": "none", "scale": "none", "gradient_path": "none"},
        ),
        (
            CLIP.replace(site="F6", scale="cosine"),
            {"weighting": "similarity"},
            {"gradient_tokens": "none", "gradient_path": "none"},
        ),
        (GRADECLIP, {"gradient_path": "integrated", "attention": "own"}, {}),
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


@pytest.mark.parametrize(("name", "fingerprint"), OF_LATER_RELEASES.items())
def test_fingerprints_of_recipes_that_were_published_for_classes_stay(name, fingerprint):
    assert recipes()[name].recipe.replace(target="class", scale="logit").fingerprint == fingerprint


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
    and (recipe.attention, recipe.prompt, recipe.compose) == ("own", "whole", "none")
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
    assert set(CHANGES) == set(fields_of(LAVIS)) - {"name"}


@pytest.mark.parametrize("field", CHANGES)
def test_every_field_takes_part_in_equality_and_fingerprint(field):
    base, changes = CHANGES[field]
    other = base.replace(**changes)
    assert other != base
    assert other.fingerprint != base.fingerprint
    assert set(base.differences(other)) == set(changes)


@pytest.mark.parametrize(
    "several",
    [
        [GRADECLIP, GRADECLIP.replace(attention="one_head")],
        [MASKCLIP, MASKCLIP.replace(attention="own"), MASKCLIP.replace(scale="difference")],
        [SURGERY, SURGERY.replace(weighting="similarity"), SURGERY.replace(weighting="similarity", scale="difference")],
        [CLIP.replace(prompt=each) for each in values_of("prompt")],
        [CLIP.replace(scale=each) for each in SCALES["contrastive"]],
        [CLIP, CLIP.replace(target="contrastive_patches")],
        [CAPTION, CAPTION.replace(compose="none")],
        [BIMODAL, BIMODAL.replace(compose="none")],
        [GRADECLIP.replace(attention="one_head"), GRADECLIP.replace(attention="one_head", departures="head_scale")],
        [GRADECLIP, GRADECLIP.replace(weighting="value*gradient")],
        [GRADECLIP_TEXT, GRADECLIP_TEXT.replace(departures="padded_similarity")],
        [POOLER, POOLER.replace(departures="bare_pooler"), POOLER.replace(queries="all")],
        [CHEFER_TEXT, CHEFER_TEXT.replace(queries="all"), CHEFER_CLIP],
    ],
    ids=lambda several: several[0].name,
)
def test_every_value_of_the_later_choices_is_told_apart(several):
    for told in (lambda recipe: recipe.fingerprint, wording.summary, wording.formula):
        assert len({told(recipe) for recipe in several}) == len(several)


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
        ("legrad-pooler", ["CROSS of pooler blocks -2, -1", "gradient path block", "query rows (0,)", "layers sum"]),
        ("legrad-pooler-as-coded", ["as coded: bare_pooler"]),
        ("clip-gradcam", ["F1 of vision last block", "gradient of the scaled similarity of image and text"]),
        ("pgc-clip-softmax", ["gradient of the probability of the text for the image"]),
        ("clip-es", ["gradient of the probability of the text for the mean of the patches"]),
        ("chefer-clip-text", ["F2 of text last block", "query rows pooled", "without special_text, padding"]),
        (
            "grad-eclip",
            [
                "F3_HEADS of vision last block; values weighted by the gradient of what the heads make of them and by",
                "gradient of the cosine of image and text",
                "gradient tokens cls",
            ],
        ),
        ("grad-eclip-as-coded", ["F3_HEADS of vision last block, from there on with one head; "]),
        ("grad-eclip-text-as-coded", ["gradient tokens pooled", "from there on with one head"]),
        (
            "maskclip",
            [
                "F6 of vision last block, which hands every token its own value; cosine of each token's embedding with",
                "; for the cosine of image and text; signed; without cls",
            ],
        ),
        (
            "clip-surgery",
            [
                "blocks -6, -5, -4, -3, -2, -1, of a second path of values with values",
                "less what all texts have in common",
            ],
        ),
        ("coca-caption", ["log-likelihood of the caption", "carried on by the pooler's attention"]),
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


@pytest.mark.parametrize("name", ["attention-cross", "maskclip", "clip-surgery"])
def test_the_summary_of_what_takes_no_gradient_speaks_of_none(name):
    assert "gradient" not in wording.summary(recipes()[name].recipe)


@pytest.mark.parametrize(("prompt", "words"), [("phrase", "of the phrase alone"), ("in_place", "phrase in its place")])
def test_the_summary_says_which_text_is_encoded(prompt, words):
    assert words in wording.summary(CLIP.replace(prompt=prompt))


@pytest.mark.parametrize("field", [field for field in CHANGES if field not in AFTER_THE_MAP])
def test_the_summary_names_every_choice_that_shapes_the_token_map(field):
    base, changes = CHANGES[field]
    assert wording.summary(base.replace(**changes)) != wording.summary(base)


LAST_LINE = "tokens[row, column] = M[j] in raster order, tokens before the patches left out"
LAST_LINE_OF_TEXT = "tokens[0, k] = M[j] of the k-th token that is not special; special tokens and padding apart"
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
    "pnp-vqa": [
        "y = itm_logit[match]",
        "G = dy/dA",
        "E[t,j] = mean over h of A[h,t,j] * ReLU(G[h,t,j])",
        "M[j] = mean over t in all but special_text and padding of E[t,j]",
        LAST_LINE,
    ],
    "pnp-vqa-as-written": [
        "y = itm_logit[match]",
        "G = dy/dA",
        "E[t,j] = mean over h of A[h,t,j] * min(0, G[h,t,j])",
        "M[j] = mean over t in all but special_text and padding of E[t,j]",
        LAST_LINE,
    ],
    "omnixai-itm": [
        "y = itm_logit[match]",
        "G = dy/dA",
        "E[t,j] = mean over h of A[h,t,j] * ReLU(G[h,t,j])",
        "M[j] = mean over t in all but padding of E[t,j]",
        LAST_LINE,
    ],
    "blip2-itm": [
        "y = itm_logit[match]",
        "G = dy/dA",
        "E[t,j] = mean over h of A[h,t,j] * ReLU(G[h,t,j])",
        "M[j] = mean over t in all of E[t,j]",
        LAST_LINE,
    ],
    "blip2-itc": [
        "v = image embedding; y = cos(v, own text)",
        "G = dy/dA",
        "E[t,j] = mean over h of A[h,t,j] * ReLU(G[h,t,j])",
        "M[j] = mean over t in all of E[t,j]",
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
    "blip-caption": [
        "y = sum over tokens k of log p(token k | tokens before k, image)",
        "G = dy/dA",
        "E[t,j] = mean over h of A[h,t,j] * ReLU(G[h,t,j])",
        "M[j] = mean over t in all but special_text and padding of E[t,j]",
        LAST_LINE,
    ],
    "blip-vqa": [
        "y = sum over tokens k of the answer of log p(token k | tokens before k, question, image)",
        "G = dy/dA",
        "E[t,j] = mean over h of A[h,t,j] * ReLU(G[h,t,j])",
        "M[j] = mean over t in all but special_text and padding of E[t,j]",
        LAST_LINE,
    ],
    "chefer-bimodal": [
        "y = itm_logit[match]",
        "G = dy/dA",
        "E[t,j] = mean over h of ReLU(A[h,t,j] * G[h,t,j])",
        "likewise T_l for self-attention of text block l, V_l for that of image block l, each with its own A and G",
        "Q = identity; Q <- Q + V_l Q for every block l of the image, first to last",
        "R = identity, X = 0; for every block l of text, first to last, X <- X + T_l X and R <- R + T_l R, ...",
        "... then, where it looks at the image, X <- X + N(R)^T E_l N(Q)",
        "N(R)[t,k] = (R - I)[t,k] / (sum over k of (R - I)[t,k]) + I[t,k], 0 / 0 = 0",
        "M[j] = mean over t = 0 of X[t,j]",
        LAST_LINE,
    ],
    "chefer-bimodal-words": [
        "y = itm_logit[match]",
        "G = dy/dA",
        "E[t,j] = mean over h of ReLU(A[h,t,j] * G[h,t,j])",
        "likewise T_l for self-attention of text block l, V_l for that of image block l, each with its own A and G",
        "Q = identity; Q <- Q + V_l Q for every block l of the image, first to last",
        "R = identity, X = 0; for every block l of text, first to last, X <- X + T_l X and R <- R + T_l R, ...",
        "... then, where it looks at the image, X <- X + N(R)^T E_l N(Q)",
        "N(R)[t,k] = (R - I)[t,k] / (sum over k of (R - I)[t,k]) + I[t,k], 0 / 0 = 0",
        "M[j] = mean over t in all but special_text and padding of X[t,j]",
        LAST_LINE,
    ],
    "clip-gradcam": [
        "v = image embedding; z[t] = s cos(v, t) + b, y = z[own]",
        "G = dy/dA",
        "w[c] = mean over i in patches of G[i,c]",
        "M[j] = ReLU(sum over c of w[c] A[j,c])",
        LAST_LINE,
    ],
    "pgc-clip-softmax": [
        (
            "v = image embedding; z[t] = s cos(v, t) + b, y = softmax over texts of z at own; sigmoid(z[own]) "
            "where the model was trained so"
        ),
        "G = dy/dA",
        "w[c] = mean over i in patches of G[i,c]",
        "M[j] = ReLU(sum over c of w[c] A[j,c])",
        LAST_LINE,
    ],
    "clip-es": [
        (
            "v = projection(mean over patches of norm(F6 of the last block)); z[t] = s cos(v, t) + b, y = "
            "softmax over texts of z at own; sigmoid(z[own]) where the model was trained so"
        ),
        "G = dy/dA",
        "w[c] = mean over i in patches of G[i,c]",
        "M[j] = ReLU(sum over c of w[c] A[j,c])",
        LAST_LINE,
    ],
    "albef-itc": [
        "v = image embedding; z[t] = s cos(v, t) + b, y = z[own]",
        "G = dy/dA",
        "E[t,j] = mean over h of A[h,t,j] * ReLU(G[h,t,j])",
        "M[j] = mean over t = 0 of E[t,j]",
        LAST_LINE,
    ],
    "chefer-clip": [
        "v = image embedding; z[t] = s cos(v, t) + b, y = z[own]",
        "G = dy/dA",
        "E[t,j] = mean over h of ReLU(A[h,t,j] * G[h,t,j])",
        "R = identity; R <- R + E_l R for every block l, first to last",
        "M[j] = mean over t = 0 of R[t,j]",
        LAST_LINE,
    ],
    "chefer-clip-text": [
        "v = image embedding; z[t] = s cos(v, t) + b, y = z[own]",
        "G = dy/dA",
        "E[t,j] = mean over h of ReLU(A[h,t,j] * G[h,t,j])",
        "R = identity; R <- R + E_l R for every block l, first to last",
        "M[j] = mean over t = the pooled token of R[t,j]",
        LAST_LINE_OF_TEXT,
    ],
    "grad-eclip": [
        "v = image embedding; y = cos(v, own text)",
        "G = dy/dA",
        "w[c] = G[i,c], i = 0",
        "l[j] = cos(query of i, key of j), all heads side by side, scaled to 0..1 over patches",
        "M[j] = ReLU(l[j] sum over c of w[c] u[j,c]), u the values of all heads",
        LAST_LINE,
    ],
    "grad-eclip-as-coded": [
        "from the first of these blocks on, attention has one head of full width D, its scores divided by sqrt(D)",
        "v = image embedding; y = cos(v, own text)",
        "G = dy/dA",
        "w[c] = G[i,c], i = 0",
        "l[j] = cos(query of i, key of j), all heads side by side, scaled to 0..1 over patches",
        "M[j] = ReLU(l[j] sum over c of w[c] u[j,c]), u the values of all heads",
        LAST_LINE,
    ],
    "grad-eclip-text": [
        "v = image embedding; y = cos(v, own text)",
        "G = dy/dA",
        "w[c] = G[i,c], i = the pooled token",
        "l[j] = cos(query of i, key of j), all heads side by side, scaled to 0..1 over tokens of the text",
        "M[j] = ReLU(l[j] sum over c of w[c] u[j,c]), u the values of all heads",
        LAST_LINE_OF_TEXT,
    ],
    "grad-eclip-text-as-coded": [
        "from the first of these blocks on, attention has one head of full width D, its scores divided by sqrt(D)",
        "v = image embedding; y = cos(v, own text)",
        "G = dy/dA",
        "w[c] = G[i,c], i = the pooled token",
        "l[j] = cos(query of i, key of j), all heads side by side, scaled to 0..1 over tokens of the text",
        "M[j] = ReLU(l[j] sum over c of w[c] u[j,c]), u the values of all heads",
        LAST_LINE_OF_TEXT,
    ],
    "legrad-pooler": [
        "v = image embedding; y = cos(v, own text)",
        "G_l = dy_l/dA_l, A_l the pooler's attention, y_l read from block l: v_l = final norm and pooler of F6_l",
        "E[t,j] = mean over h of ReLU(G[h,t,j])",
        "M[j] = mean over t in [0] of E[t,j]",
        "M[j] = sum over l of M_l[j]",
        LAST_LINE,
    ],
    "legrad-pooler-as-coded": [
        "v = image embedding; y = cos(v, own text)",
        (
            "G_l = dy_l/dA_l, A_l the pooler's attention, y_l read from block l: v_l = pooler of F6_l, without "
            "the final norm, and in CoCa v_l . t for the cosine"
        ),
        "E[t,j] = mean over h of ReLU(G[h,t,j])",
        "M[j] = mean over t in [0] of E[t,j]",
        "M[j] = sum over l of M_l[j]",
        LAST_LINE,
    ],
    "maskclip": [
        "in the last block A[h,t,j] = 1 for t = j, else 0",
        "e[j] = projection(norm(F6[j]))",
        "M[j] = cos(e[j], own text)",
        LAST_LINE,
    ],
    "clip-surgery": [
        (
            "F6 = input of the first of these blocks + sum over l of projection(softmax(u u^T / sqrt(d)) u), u "
            "the values of block l by head, d their width"
        ),
        "e[j] = projection(norm(F6[j])), w[t] = softmax over texts of 2 cos(v, t), over its mean",
        "M[j] = w[own] cos(e[j], own) - mean over t of w[t] cos(e[j], t)",
        LAST_LINE,
    ],
    "coca-caption": [
        "y = sum over tokens k of log p(token k | tokens before k, image)",
        "G = dy/dA",
        "E[t,j] = mean over h of A[h,t,j] * ReLU(G[h,t,j])",
        "E[t,j] <- sum over slots k of E[t,k] C[k,j], C the mean over heads of the pooler's attention",
        "M[j] = mean over t in all but special_text and padding of E[t,j]",
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
        (
            "M[j] = ReLU(first principal component over patches of A[j,c]), the component's value of largest magnitude "
            "positive"
        ),
        LAST_LINE,
    ],
    "pgc-eigengradcam": [
        "y = z[class]",
        "G = dy/dA",
        (
            "M[j] = ReLU(first principal component over patches of G[j,c] A[j,c]), the component's value of largest "
            "magnitude positive"
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
        "v = image embedding; z[t] = s cos(v, t) + b, y = z[own]",
        "G = dy/dA",
        "w[c] = mean over i = 0 of G[i,c]",
        "M[j] = ReLU(sum over c of w[c] A[j,c])",
        LAST_LINE,
    ],
    "gradeclip-gradcam-baseline": [
        "v = image embedding; y = cos(v, own text)",
        "G = dy/dA",
        "w[c] = mean over i in all tokens of G[i,c]",
        "M[j] = ReLU(sum over c of w[c] A[j,c])",
        LAST_LINE,
    ],
    "gradeclip-gradcam-baseline-as-coded": [
        "behind the first of these blocks, attention has one head of full width D, its scores divided by sqrt(D)",
        "v = image embedding; y = cos(v, own text)",
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
        "v = image embedding; y = cos(v, own text)",
        (
            "G_l = dy_l/dA_l, y_l read from block l: v_l = projection(norm(mean over all tokens of F6_l)), or "
            "projection(pooler(norm(F6_l))) in a model that pools by attention"
        ),
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
        (LAVIS, {"target": "contrastive", "scale": "cosine"}, "v = image embedding; y = cos(v, own text)"),
        (CLIP, {"scale": "cosine"}, "v = image embedding; y = cos(v, own text)"),
        (
            CLIP,
            {"scale": "log-probability"},
            "v = image embedding; z[t] = s cos(v, t) + b, y = log softmax over texts of z at own; log sigmoid(z[own]) "
            "where the model was trained so",
        ),
        (
            CLIP,
            {"scale": "margin"},
            "v = image embedding; z[t] = s cos(v, t) + b, y = z[own] - max over other t of z[t]",
        ),
        (
            CLIP,
            {"scale": "difference"},
            "v = image embedding; y = cos(v, own) - mean over other t of cos(v, t)",
        ),
        (
            CLIP,
            {"scale": "finer"},
            "v = image embedding; z[t] = s cos(v, t) + b, y = sum over r of p[r] (z[own] - z[r]) / (sum over r of p[r] "
            "+ 1e-9), p = softmax(z), r the 3 texts with the nearest logits",
        ),
        (
            CLIP,
            {"target": "contrastive_patches", "scale": "cosine"},
            "v = projection(mean over patches of norm(F6 of the last block)); y = cos(v, own text)",
        ),
        (
            LAVIS.replace(scale="log-probability"),
            {"target": "caption"},
            "y = sum over tokens k of log p(token k | tokens before k, image)",
        ),
        (CLIP, {"prompt": "phrase"}, "own text = the phrase alone"),
        (
            CLIP,
            {"prompt": "in_place"},
            "own text = the whole text, with the keys of all words but the phrase hidden in every block",
        ),
        (
            CLIP,
            {"attention": "one_head"},
            "from the first of these blocks on, attention has one head of full width D, its scores divided by sqrt(D)",
        ),
        (
            CLIP,
            {"attention": "one_head", "departures": "head_scale"},
            "from the first of these blocks on, attention has one head of full width D, its scores divided by sqrt(d), "
            "d the width of the model's own heads",
        ),
        (BIMODAL, {"compose": "none"}, "... then, where it looks at the image, X <- X + N(R)^T E_l"),
        (BIMODAL, {"compose": "none"}, "likewise T_l for self-attention of text block l, each with its own A and G"),
        (
            CLIP,
            {"attention": "one_head", "site": "F6"},
            "behind the first of these blocks, attention has one head of full width D, its scores divided by sqrt(D)",
        ),
        (GRADECLIP, {"weighting": "value*gradient"}, "w[c] = G[i,c], i = 0"),
        (
            GRADECLIP,
            {"weighting": "value*gradient"},
            "M[j] = ReLU(sum over c of w[c] u[j,c]), u the values of all heads",
        ),
        (GRADECLIP, {"relu": "gradient"}, "w[c] = ReLU(G[i,c]), i = 0"),
        (GRADECLIP, {"relu": "none"}, "M[j] = l[j] sum over c of w[c] u[j,c], u the values of all heads"),
        (GRADECLIP, {"layers": "all", "layer_rule": "sum"}, "M[j] = sum over l of M_l[j]"),
        (MASKCLIP, {"scale": "difference"}, "M[j] = cos(e[j], own text) - mean over other t of cos(e[j], t)"),
        (MASKCLIP, {"relu": "map"}, "M[j] = ReLU(cos(e[j], own text))"),
        (SURGERY, {"weighting": "similarity"}, "M[j] = cos(e[j], own text)"),
        (
            CHEFER_TEXT,
            {"queries": "all"},
            "M[j] = mean over t in all tokens of the text (with start and end) of R[t,j]",
        ),
        (LEGRAD, {"target": "class", "scale": "logit"}, "y = z[class]"),
        (
            LEGRAD,
            {"target": "class", "scale": "logit"},
            "G_l = dy_l/dA_l, y_l read from block l: z_l = head(norm(mean over all tokens of F6_l)), or "
            "head(pooler(norm(F6_l))) in a model that pools by attention",
        ),
        (CAPTION, {"relu": "map"}, "M[j] = ReLU(mean over t in all but special_text and padding of E[t,j])"),
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


KINDS = {
    "class": "classes",
    "itm": "binary",
    "contrastive": "prompts",
    "contrastive_patches": "prompts",
    "caption": "tokens",
    "answer": "tokens",
}
BARE = {"contrastive": "cosine"}
"""A similarity that has no logit, as that of BLIP."""


def adapter(*heads, reads="cls", kinds=KINDS):
    return SimpleNamespace(heads={head: (KINDS | kinds)[head] for head in heads}, reads=reads)


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
            "logit",
            "published for class (logit); this model offers 'contrastive'",
        ),
        (
            "pgc-finercam",
            ("contrastive",),
            "contrastive",
            "finer",
            "published for class (finer); this model offers 'contrastive'",
        ),
        (
            "pgc-gradcam",
            ("caption",),
            "caption",
            "log-probability",
            "published for class (logit); this model offers 'caption'",
        ),
        ("context-gradcam", ("class",), "class", "logit", "published for itm (logit); this model offers 'class'"),
        ("raw-attention", ("itm",), "none", "none", "as published"),
        ("grad-eclip", ("contrastive", "class"), "contrastive", "cosine", "as published"),
        ("grad-eclip", ("class",), "class", "logit", "published for contrastive (cosine); this model offers 'class'"),
        ("legrad", ("class",), "class", "logit", "published for contrastive (cosine); this model offers 'class'"),
        (
            "gscorecam-gradcam",
            ("itm",),
            "itm",
            "logit",
            "published for contrastive (logit); this model offers 'itm'",
        ),
    ],
)
def test_a_score_that_the_model_lacks_is_replaced_by_its_first(name, heads, target, scale, rule):
    fitted, rules = recipes()[name].fitted(12, adapter(*heads))
    assert (fitted.target, fitted.scale) == (target, scale)
    assert rules["target"] == rule
    assert fitted == recipes()[name].recipe.replace(target=target, scale=scale)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("pgc-gradcam", "published for class (logit); this model offers 'contrastive'"),
        ("clip-gradcam", "published for contrastive (logit); this model gives it as cosine"),
        ("gscorecam-gradcam", "published for contrastive (logit); this model gives it as cosine"),
        ("grad-eclip", "as published"),
    ],
)
def test_a_plain_scale_that_the_score_lacks_is_replaced_by_its_first(name, rule):
    fitted, rules = recipes()[name].fitted(12, adapter("contrastive", kinds=BARE))
    assert fitted == recipes()[name].recipe.replace(target="contrastive", scale="cosine")
    assert rules["target"] == rule


def test_a_scale_with_a_meaning_of_its_own_stays():
    fitted, rules = recipes()["pgc-clip-softmax"].fitted(12, adapter("contrastive", kinds=BARE))
    assert fitted == recipes()["pgc-clip-softmax"].recipe
    assert rules["target"] == "as published"


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("clip-gradcam", "contrastive"),
        ("pgc-clip-softmax", "contrastive"),
        ("clip-es", "contrastive_patches"),
        ("albef-itc", "contrastive"),
        ("chefer-clip", "contrastive"),
        ("coca-caption", "caption"),
        ("blip-caption", "caption"),
        ("blip-vqa", "answer"),
    ],
)
def test_a_score_that_no_other_stands_in_for_is_asked_for(name, needs):
    message = f"recipe {name!r} is for the score {needs!r}, which this model does not offer; it offers 'class', 'itm'$"
    with pytest.raises(RecipeError, match=message):
        recipes()[name].fitted(12, adapter("class", "itm"))
    assert recipes()[name].fitted(12, adapter("class", needs))[0].target == needs


def refusal_of(entry, head):
    """Why a recipe does not fit a model with one score, as a pattern; nothing if it does."""
    recipe, plain = entry.recipe, entry.recipe.scale in ("logit", "cosine", "none")
    reasons = {
        "is for models whose heads read the patches": bool(entry.reads),
        f"is for the score '{entry.needs}'": entry.needs not in ("", head),
        "stream='text'": recipe.of_text and head != "contrastive",
        r"\(tokens are compared with texts\)": recipe.weighting in COMPARING and head != "contrastive",
        f"scale='{recipe.scale}' with target='{head}'": not plain and recipe.scale not in SCALES[head],
    }
    return next((reason for reason, true in reasons.items() if true), "")


@pytest.mark.parametrize("head", ["class", "itm", "contrastive", "caption", "answer"])
@pytest.mark.parametrize("entry", recipes().values(), ids=recipes())
def test_every_scale_that_a_fitted_recipe_takes_is_one_of_its_target(entry, head):
    if refused := refusal_of(entry, head):
        with pytest.raises(RecipeError, match=refused):
            entry.fitted(12, adapter(head))
        return
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
    head = "class" if entry.recipe.target == "none" else entry.recipe.target
    fitted, rules = entry.fitted(12, adapter(head, reads="patches"))
    assert fitted == entry.recipe.replace(**{field: "patches"})
    assert rules["tokens"] == f"published for the class token; this model's heads read the patches: {field}"
    fitted, rules = entry.fitted(12, adapter(head))
    assert fitted == entry.recipe
    assert set(rules.values()) == {"as published"}


@pytest.mark.parametrize("name", ["pgc-gradcam", "legrad", "grad-sam", "lavis-itm", "context-gradcam"])
def test_other_tokens_stay_where_patches_are_read(name):
    entry = recipes()[name]
    fitted, rules = entry.fitted(entry.depth or 12, adapter(entry.recipe.target, reads="patches"))
    assert fitted == entry.recipe
    assert rules["tokens"] == "as published"


@pytest.mark.parametrize("name", ["grad-eclip", "grad-eclip-as-coded"])
def test_no_patches_stand_for_the_class_token_whose_gradient_weights_values(name):
    with pytest.raises(RecipeError, match=rf"^recipe '{name}' takes the gradient at the class token, and this model's"):
        recipes()[name].fitted(12, adapter("contrastive", reads="patches"))


@pytest.mark.parametrize(("depth", "layers"), [(12, range(-6, 0)), (6, range(-6, 0)), (3, range(-3, 0)), (1, (-1,))])
def test_of_blocks_that_count_from_the_end_those_are_kept_that_there_are(depth, layers):
    fitted, rule = recipes()["clip-surgery"].at_depth(depth)
    assert fitted == recipes()["clip-surgery"].recipe.replace(layers=tuple(layers))
    published = "published on blocks [-6, -5, -4, -3, -2, -1], of which this model of"
    assert rule.startswith("as published" if depth >= 6 else published)


def test_layers_and_target_are_fitted_together():
    fitted, rules = recipes()["lavis-itm"].fitted(3, adapter("contrastive", kinds=BARE))
    assert (fitted.layers, fitted.target, fitted.scale) == ((1,), "contrastive", "cosine")
    assert rules["layers"] == "published on block [6] of 12; same relative depth of 3 blocks"


@pytest.mark.parametrize("entry", recipes().values(), ids=recipes())
def test_every_entry_says_where_it_comes_from(entry):
    assert re.search(r"\b(19|20)\d\d\b", str(entry.citation))
    assert entry.code
    assert entry.notes.endswith(".")


@pytest.mark.parametrize(
    ("heads", "name"),
    [
        (("itm", "contrastive"), "lavis-itm"),
        (("class",), "pgc-gradcam"),
        (("contrastive",), "clip-gradcam"),
        (("caption", "contrastive"), "clip-gradcam"),
        (("caption",), "blip-caption"),
        (("answer",), "blip-vqa"),
    ],
)
def test_the_default_recipe_is_that_of_the_models_kind(heads, name):
    assert default({head: KINDS[head] for head in heads}) == name


def test_the_catalogue_is_read_only_and_names_what_it_has():
    with pytest.raises(TypeError):
        recipes()["mine"] = recipes()["lavis-itm"]
    with pytest.raises(UnknownNameError, match=r"no recipe 'gradcam'; there are 'lavis-itm', .*'pgc-gradcam'"):
        named("gradcam")
    assert named("albef-itm").recipe.layers == (2,)
