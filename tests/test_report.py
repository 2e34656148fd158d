"""The report: checklist, paragraph, formula in LaTeX, and every form in which it is written."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import os
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import get_args
from xml.etree import ElementTree

import numpy as np
import pytest
from latex2mathml.converter import convert
from PIL import Image

import vlcam
from vlcam import choices, markup, scenes, wording
from vlcam.reporting import aggregation, facts, fragment, latex, pictures, prose
from vlcam.reporting.facts import NOT_RECORDED
from vlcam.reporting.report import ENDINGS

HOSTILE = 'a "red" <script>alert(1)</script> | 100 % & $x_1$ #2 {b} ~ ^ \\ circle'
DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture(scope="module")
def scene():
    return next(scenes.generate(1, seed=7, start=1, objects=(2, 3), size=(256, 256)))


@pytest.fixture(scope="module")
def exps(scene):
    blip, clip, vit = (vlcam.load(name) for name in ("tiny-blip-itm", "tiny-clip", "tiny-vit"))
    custom = vlcam.targets.Custom(lambda logits: logits[:, 3] - logits[:, 4], label="three less four")
    return {
        "phrase": blip.explain(scene.image, scene.caption, phrase="red star"),
        "whole": blip.explain(scene.image, scene.caption, layer=0),
        "hostile": blip.explain(scene.image, HOSTILE),
        "text": clip.explain(scene.image, scene.caption, "chefer-clip-text"),
        "signed": clip.explain(scene.image, "a red star", "maskclip"),
        "margin": clip.explain(scene.image, "a red star", scale="margin", against=["a blue star"]),
        "class": vit.explain(scene.image, target="red star"),
        "highest": vit.explain(scene.image),
        "rollout": vit.explain(scene.image, recipe="attention-rollout"),
        "custom": vit.explain(scene.image, target=custom, scale="raw"),
        "answer": vlcam.load("tiny-blip-vqa").explain(scene.image, "what color is the star?"),
        "pixels": vlcam.load("tiny-beit-seg").explain(scene.image, layer=2),
        "windows": vlcam.load("tiny-swin").explain(scene.image, recipe="raw-attention"),
    }


NAMES = ("phrase", "whole", "hostile", "text", "signed", "margin", "class", "highest", "rollout", "custom")
NAMES += ("answer", "pixels", "windows")


@pytest.fixture(scope="module")
def lines():
    """Every line of every formula that can come up: named recipes, and the grid of all embedded models."""
    found = [entry.recipe for entry in vlcam.recipes().values()]
    for name in vlcam.models():
        model = vlcam.load(name)
        for stream in model.anatomy.streams:
            found += vlcam.all_recipes(model, stream=stream)
    return sorted({line for recipe in found for line in vlcam.formula(recipe).splitlines()})


def at(record, path):
    for key in path.split("."):
        record = record[key]
    return record


def stated(exp, item):
    (row,) = [row for row in exp.report().checklist if row.item == item]
    return row.stated


# The checklist


def test_the_five_groups_come_first_with_every_field_of_the_recipe(exps):
    rows = exps["phrase"].report().checklist
    fields = [(group, field) for group, own in choices.GROUPS.items() for field in own]
    first = rows[: len(fields)]
    assert [(row.group, row.source.split(", ")[0]) for row in first] == [(g, f"recipe.{f}") for g, f in fields]
    assert [row.item for row in first] == [wording.question(field) for _, field in fields]


@pytest.mark.parametrize("name", NAMES)
def test_every_source_is_a_place_in_the_record(exps, name):
    exp = exps[name]
    for row in exp.report().checklist:
        assert row.stated
        for place in filter(None, row.source.split(", ")):
            if place not in ("catalogue", "by recipe.name"):
                at(exp.record(), place)
        assert bool(row.source) == (row.stated != NOT_RECORDED)


def test_what_is_stated_is_what_is_on_record(exps):
    exp = exps["phrase"]
    record = exp.record()["provenance"]
    assert "block 1 of 3 (counted from 0); module text_encoder.encoder.layer.1;" in stated(exp, "of which blocks")
    assert "published on block [6] of 12" in stated(exp, "of which blocks")
    assert stated(exp, "query rows that are averaged") == "phrase; tokens 10, 11"
    assert stated(exp, "what takes no part") == "cls, special_text, padding"
    assert record["model"]["weights_sha256"] in stated(exp, "weights")
    assert stated(exp, "size") == "256 x 256 pixels (height x width)"
    assert stated(exp, "resize, crop, normalisation").startswith("resized to 64 x 64 pixels (bicubic, proportions not")
    assert stated(exp, "tokens that never reached the map").startswith("image tokens 0, reason: before the patches")
    assert stated(exp, "text beyond the model's limit") == "none"
    assert "itm_probability = 0.9539 (probability)" in stated(exp, "scores and their kind")
    assert stated(exp, "status") == "ok"
    for package, version in record["versions"].items():
        assert f"{package} {version}".lower() in stated(exp, "versions").lower()
    assert stated(exp, "seed") == "none: no random numbers were drawn"
    assert stated(exps["class"], "whose gradient") == "class; the class logit; class 3 (red star); chosen as given"
    assert "over the pixels that the model gives to it" in stated(exps["pixels"], "whose gradient")
    assert stated(exps["rollout"], "whose gradient") == "none; the map depends on no score"
    assert stated(exps["text"], "reported apart, raw").startswith("<|startoftext|> 0.0011")
    assert stated(exps["margin"], "other texts, for scores that compare") == "a blue star"
    assert stated(exps["answer"], "answer") == "red (the model's own)"


def test_of_many_modules_the_first_and_the_last_are_named(exps):
    assert "all 6 blocks; modules vit.layers.0 to vit.layers.5" in stated(exps["rollout"], "of which blocks")
    assert facts.modules({"modules": ["a.0", "a.2"]}) == "modules a.0 and a.2"
    assert facts.modules({"modules": [""]}) == ""


def test_what_the_record_cannot_say_is_not_invented(exps):
    unknown = {row.item for row in exps["custom"].report().checklist if row.stated == NOT_RECORDED}
    code = "code of the target, which was given as a callable"
    assert code in unknown
    assert "its code not recorded" in exps["custom"].report().paragraph
    assert stated(exps["custom"], "whose gradient") == f"custom; label {exps['custom'].provenance['run']['target']!r}"
    assert code not in {row.item for row in exps["class"].report().checklist}


def test_the_name_of_a_file_is_stated_and_its_lack_too(scene, tmp_path, exps):
    scene.image.save(tmp_path / "scene.png")
    exp = vlcam.load("tiny-vit").explain(tmp_path / "scene.png")
    assert stated(exp, "image").startswith("scene.png, SHA-256 ")
    assert "the image scene.png" in exp.report().paragraph
    assert "name of the image's file" not in {row.item for row in exp.report().checklist}
    assert stated(exps["class"], "name of the image's file") == NOT_RECORDED


def test_cut_text_is_stated():
    (scene,) = scenes.generate(1, seed=7)
    exp = vlcam.load("tiny-blip-itm").explain(scene.image, "a red circle and " * 20)
    assert exp.provenance["text"]["cut_text"]
    assert stated(exp, "text beyond the model's limit") == exp.provenance["text"]["cut_text"]
    assert f'did not read the end of the text: "{exp.provenance["text"]["cut_text"]}"' in exp.report().paragraph


def test_a_crop_is_stated(scene):
    exp = vlcam.load("tiny-vit").explain(scene.image)
    step = {"step": "center_crop", "to": [64, 48], "corner": [0, 8]}
    record = dict(exp.provenance["image"], steps=[*exp.provenance["image"]["steps"], step])
    box = dataclasses.replace(exp.placement, box=(32.0, 0.0, 224.0, 256.0))
    cropped = dataclasses.replace(exp, provenance={**exp.provenance, "image": record}, placement=box)
    text = cropped.report().paragraph
    assert "cropped at the centre to 64 x 48 pixels" in text
    assert "the part from x = 32.0, y = 0.0 to x = 224.0, y = 256.0 of the image" in text
    padded = dataclasses.replace(exp, placement=dataclasses.replace(exp.placement, box=(-8.0, 0.0, 264.0, 256.0)))
    assert "(beyond the image is padding)" in padded.report().paragraph


def test_numbers_in_short():
    assert facts.numbers([3]) == "3"
    assert facts.numbers([1, 0]) == "0, 1"
    assert facts.numbers([0, 17, 18, 19, 40]) == "0, 17 to 19, 40"


# The paragraph


def test_the_paragraph_states_the_choices_that_matter(exps):
    exp = exps["phrase"]
    text, record = exp.report().paragraph, exp.provenance
    for part in (
        "the image-text matching logit of 'match'",
        f'the text "{exp.text}"',
        'the phrase "red star"',
        f"BlipForImageTextRetrieval of transformers {record['versions']['transformers']}",
        f"{record['model']['weights_sha256'][:12]}...",
        "The image of 256 x 256 pixels (height x width) was resized to 64 x 64 pixels",
        "CROSS, the cross-attention probabilities, text on image, of block 1 of 3 (counted from 0)",
        "of the fusion stream",
        "module text_encoder.encoder.layer.1",
        "Attention was multiplied by its gradient, element by element; negative gradients were set to zero first",
        "heads were averaged",
        "the mean over the rows (queries) of the tokens of the phrase (10, 11)",
        "The map of 8 x 8 tokens in raster order was scaled to 0..1 by its minimum and maximum and interpolated",
        "itm_logit = 1.36",
        exp.recipe.fingerprint,
        str(vlcam.recipes()["lavis-itm"].citation),
        "layers is 1 instead of 6 (published on block [6] of 12; same relative depth of 3 blocks)",
        "queries is phrase instead of all (a phrase was asked for)",
        f"vlcam {vlcam.__version__}, torch {record['versions']['torch']}",
        "no random numbers were drawn",
    ):
        assert part in text, part
    assert "\n" not in text


def test_rows_of_a_caption_and_the_pooler_are_told_apart(exps):
    caption = body(exps["phrase"], vlcam.recipes()["blip-caption"].recipe)
    assert "each told by the row before it" not in caption
    pooler = body(exps["phrase"], vlcam.recipes()["legrad-pooler"].recipe)
    assert "of the pooler as it reads block 1 of 3 (counted from 0) of the vision stream in turn" in pooler


def test_a_recipe_as_published_and_one_that_is_not_in_the_catalogue(exps):
    assert "It differs from the published recipe" not in exps["class"].report().paragraph
    own = dataclasses.replace(exps["class"], recipe=exps["class"].recipe.replace(name="mine"))
    text = own.report().paragraph
    assert 'the recipe "mine"' in text
    assert "not in the catalogue of published recipes" in text
    assert own.report().bibtex == own.report().to_dict()["citation"] == ""
    assert exps["class"].report().bibtex == vlcam.bibtex("pgc-gradcam")


@pytest.mark.parametrize("name", NAMES)
def test_the_paragraph_is_made_of_whole_sentences(exps, name):
    text = exps[name].report().paragraph
    assert text.endswith(".")
    plain = re.sub(r'"[^"]*"', "Q", text.replace(HOSTILE, "Q"))
    for bad in ("  ", " ,", "..  ", "{", "}", "None", "()", " ;", "; ;", ". ."):
        assert bad not in plain, bad


def body(exp, recipe):
    """What the paragraph says of the choices, without name, fingerprint and source."""
    changed = dataclasses.replace(exp, recipe=recipe)
    parts = (*prose._explained(changed), *prose._tensor(changed), *prose._aggregation(changed))
    return " ".join([*parts, prose._reconstruction(changed)])


def test_recipes_that_differ_have_paragraphs_that_differ(exps):
    """Layers, excluded tokens and the grid come from the run's record, which is one and the same here."""
    same = {"layers": "all", "exclude": "cls"}
    found = {}
    for entry in vlcam.recipes().values():
        if entry.recipe.of_text:
            continue
        key = tuple(value for field, value in entry.recipe.to_dict().items() if field not in (*same, "name", "schema"))
        found.setdefault(body(exps["phrase"], entry.recipe), set()).add(str(key))
    assert all(len(keys) == 1 for keys in found.values()), [keys for keys in found.values() if len(keys) > 1]
    assert len(found) > 40


@pytest.mark.parametrize(
    ("known", "words", "silent"),
    [
        (choices.Weighting, aggregation._WEIGHTINGS, set()),
        (choices.Relu, aggregation._NEGATIVE, set()),
        (choices.Heads, aggregation._HEADS, {"none", "channels"}),
        (choices.LayerRule, aggregation._LAYERS, {"single"}),
        (choices.GradientPath, prose._PATHS, {"full", "none"}),
        (choices.Attention, prose._FORMS, {"own"}),
        (choices.Departure, aggregation._DEPARTURES, set()),
        (choices.Prompt, prose._PROMPTS, {"whole"}),
        (choices.Normalize, prose._NORMALIZED, set()),
        (choices.Upsample, prose._UPSAMPLED, {"none"}),
    ],
)
def test_every_value_has_its_words(known, words, silent):
    values = {value for part in get_args(known) for value in (get_args(part) or (part,))}
    assert words.keys() == values - silent


ORDERED = {
    "tam-transition": ("Attention of the last block, its mean over heads, was carried", "the mean over the rows"),
    "attn-gradcam": ("over the patches in the rows (queries) of the class token; heads", "set to zero after heads"),
    "attn-gradcam-full": ("mean of its gradient over all rows and columns",),
    "legrad": ("negative gradients were set to zero first; heads were averaged; the mean over the rows", "maps of the"),
    "vitexplain-grad-rollout-as-coded": ("with respect to the scores that its softmax takes", "(scores_gradient)"),
    "vitexplain-rollout": ("smallest 90 % of the entries", "but for what the class token pays to itself", "identity"),
}


@pytest.mark.parametrize("recipe", ORDERED)
def test_steps_stand_in_the_order_in_which_they_are_done(scene, recipe):
    text = vlcam.load("tiny-vit").explain(scene.image, recipe=recipe).report().paragraph
    places = [text.find(part) for part in ORDERED[recipe]]
    assert -1 not in places
    assert places == sorted(places)
    assert ("multiplied by its gradient" in text) == (recipe == "vitexplain-grad-rollout-as-coded")


def test_choices_beyond_the_named_recipes_are_told_in_order(scene):
    vit = vlcam.load("tiny-vit")

    def told(recipe="pgc-gradcam", **changes):
        return vit.explain(scene.image, recipe=recipe, **changes).report().paragraph

    largest = told("attn-gradcam", layers=(3, 5), layer_rule="max")
    assert "of the class token (0) was taken; the maximum over the maps of the blocks was taken" in largest
    channels = told(site="F2", heads="channels", queries="cls", map_axis="keys")
    assert "(0) was taken, and that of its gradient likewise; each channel was weighted" in channels
    assert "negative values of the map were set to zero" in told("pgc-eigencam", relu="map")
    assert "the smallest 99.9 % of the entries" in told("attention-rollout", discard=0.999)
    behind = told(site="F6", attention="one_head", layers=(3,))
    assert "Behind the first of these blocks, attention was computed with one head" in behind
    assert re.search(r"class_logit = [\d.]+, with attention computed as said\.", behind)
    assert "was divided by its largest magnitude and" in told(normalize="max")
    assert "was divided by the sum of its magnitudes and" in told(normalize="sum")


def test_what_a_gradient_was_pooled_over_leaves_out_what_is_excluded(exps):
    exp, own = exps["class"], exps["class"].recipe.replace(gradient_tokens="all", exclude=("cls", "registers"))
    run = exp.provenance["run"] | {"prefix_tokens": ["cls", "register"]}
    with_registers = dataclasses.replace(exp, recipe=own, provenance={**exp.provenance, "run": run})
    assert "over all tokens but registers, and" in with_registers.report().paragraph
    assert "over all tokens, and" in dataclasses.replace(exp, recipe=own).report().paragraph


def test_blocks_that_are_read_each_have_their_value(scene):
    exp = vlcam.load("tiny-swin").explain(scene.image, recipe="legrad")
    text = exp.report().paragraph
    assert "the score being read from the output of each block in turn" in text
    one, two = (facts.number(value) for value in exp.provenance["run"]["block_values"])
    assert f"; read from the blocks it is {one} and {two}." in text
    assert "shifted by 0 x 0 in the first of these blocks" in text


def test_text_and_image_read_together(scene):
    text = vlcam.load("tiny-blip-itm").explain(scene.image, scene.caption, "chefer-bimodal").report().paragraph
    assert "Self-attention of fusion blocks 0 to 2 and vision blocks 0 to 3 was read with it" in text
    assert "cross-attention between the relevance of the text and that of self-attention in the image tower" in text
    assert "starting from the identity" not in text
    assert "of the first token of the text (0)" in text


def test_what_tokens_are_compared_with(scene):
    clip = vlcam.load("tiny-clip")

    def told(recipe, **how):
        return clip.explain(scene.image, scene.caption, recipe, against=["a b", "c d"], **how).report().paragraph

    assert 'The text was compared with "a b" and "c d".' in told("clip-surgery")
    assert "the maps of the blocks were summed" not in told("clip-surgery")
    assert 'The map does not depend on the other texts of the call, "a b" and "c d".' in told("maskclip")
    assert "less its mean cosine with the other texts" in told("maskclip", scale="difference")
    assert "The text was compared with" in told("clip-gradcam", scale="margin")
    assert "The other texts, where the score takes them into account, are" in told("clip-gradcam", scale="probability")
    alone = told("clip-gradcam", phrase="red star", prompt="phrase")
    assert f'the text "red star" of the text "{scene.caption}"; the phrase alone was encoded.' in alone


def test_a_phrase_of_a_caption_is_counted_and_not_encoded_alone(scene):
    model, caption = vlcam.load("tiny-blip-caption"), "a red star next to a blue circle"
    exp = model.explain(scene.image, caption, phrase="red star")
    text = exp.report().paragraph
    assert "the phrase alone was encoded" not in text
    assert 'only those of the phrase "red star" count in that score. It is the map of the phrase "red star".' in text
    assert "of the tokens of the phrase (1, 2), each told by the row before it, was taken" in text
    word = exp.words["blue"].report().paragraph
    assert 'only those of the phrase "red star" count in that score. It is the map of the phrase "blue".' in word
    assert stated(exp.words["blue"], "phrase that the score counts") == "red star"
    every = model.explain(scene.image, caption, "pgc-gradcam", phrase="red star").report().paragraph
    assert "It is the map of the phrase" not in every
    plain = model.explain(scene.image, caption, "attention-cross").report().paragraph
    assert "all tokens but the special ones (0 to 7), each told by the row before it, was taken" in plain


def test_a_text_that_the_model_wrote_is_said_to_be(scene):
    exp = vlcam.load("tiny-blip-caption").explain(scene.image)
    assert f'"{exp.text}", which the model wrote itself' in exp.report().paragraph
    assert stated(exp, "text") == f"{exp.text} (written by the model)"


def test_rows_that_are_no_text_are_not_called_so(exps):
    text = body(exps["phrase"], vlcam.recipes()["blip2-itm"].recipe)
    assert "cross-attention probabilities, learned queries on image" in text
    assert "of all learned queries" in text


def test_what_was_done_to_pixels_is_stated_whole():
    steps = [
        {"step": "exif_rotation", "orientation": 6},
        {"step": "convert", "from": "RGBA", "to": "RGB", "alpha": "dropped"},
        {"step": "convert", "from": "I;16", "to": "RGB", "divided_by": 257},
    ]
    assert facts.steps({"steps": steps}) == [
        "turned upright to that size (EXIF orientation 6)",
        "converted from RGBA to RGB (alpha dropped)",
        "converted from I;16 to RGB (divided by 257)",
    ]


def test_a_map_without_evidence_says_so(exps):
    empty = dataclasses.replace(exps["class"], status="no positive evidence", tokens=np.zeros((8, 8), np.float32))
    assert 'its status is "no positive evidence"' in empty.report().paragraph
    assert stated(empty, "status") == "no positive evidence"


# The formula


@pytest.mark.parametrize(
    ("line", "rows"),
    [
        ("G = dy/dA", [r"G &= \frac{\partial y}{\partial A}"]),
        ("w[c] = G[i,c], i = 0", [r"w_{c} &= G_{i,c},\quad i = 0"]),
        ("M[j] = mean over t in [0, 2] of E[t,j]", [r"M_{j} &= \operatorname*{mean}_{t \in \{0, 2\}} E_{t,j}"]),
        (
            "w[c] = sum over i in patches of G[i,c] A[i,c] / (sum over i in patches of A[i,c] + 1e-7)",
            [
                r"w_{c} &= \sum_{i \in \text{patches}} \frac{G_{i,c} A_{i,c}}"
                r"{\sum_{i \in \text{patches}} A_{i,c} + 10^{-7}}"
            ],
        ),
        (
            "R = identity; R <- R + E_l R for every block l, first to last",
            ["R &= I", r"R &\leftarrow R + E^{(l)} R \text{ for every block } l \text{, first to last}"],
        ),
        (
            "s_l[h] = mean over i, j of |(A_l[h]^T dy/dA_l[h])[i,j]| at once",
            [
                r"s_{h}^{(l)} &= \operatorname*{mean}_{i, j} \left\lvert \left(A_{h}^{(l)\top} "
                r"\frac{\partial y}{\partial A_{h}^{(l)}}\right)_{i,j} \right\rvert \text{ at once}"
            ],
        ),
        (
            "y = sum over tokens k of the answer of log p(token k | tokens before k, image)",
            [
                r"y &= \sum_{\text{tokens } k \text{ of the answer}} \log p(\text{token } k \mid "
                r"\text{tokens before } k \text{, image})"
            ],
        ),
        (
            "in the last block A[h,t,j] = 1 for t = j, else 0",
            [r"&\text{in the last block } A_{h,t,j} = 1 \text{ for } t = j \text{, else } 0"],
        ),
        (
            "G = mean over a in 0, 1/19, ..., 1 of dy/dA at the image times a",
            [
                r"G &= \operatorname*{mean}_{a \in \{0, 1/19, \ldots, 1\}} \frac{\partial y}{\partial A} "
                r"\text{ at the image times } a"
            ],
        ),
        ("w[c] = (y - y(A[.,c] = 0)) / y", [r"w_{c} &= \frac{y - y(A_{\cdot,c} = 0)}{y}"]),
        ("y = max over other t of 3 x 3 v_l . t", [r"y &= \max_{\text{other } t} 3 \times 3 v^{(l)} \cdot t"]),
    ],
)
def test_lines_become_latex(line, rows):
    assert latex.rows(line) == rows


def test_every_line_of_every_formula_translates(lines):
    assert len(lines) > 70
    for line in lines:
        made = latex.align(line)
        assert made.count("{") == made.count("}"), line
        for opened, closed in ((r"\left(", r"\right)"), (r"\left\lvert", r"\right\rvert"), (r"\{", r"\}")):
            assert made.count(opened) == made.count(closed), line
        assert not re.search(r"[\[\]_^]\s*$|\^\{\}|_\{\}|\\text\{\s*\}", made, re.MULTILINE), line
        tree = ElementTree.fromstring(convert(made, display="block"))
        assert tree.findall(".//{*}mtr"), line
        assert not tree.findall(".//{*}merror"), line


def test_no_word_and_no_number_of_a_formula_is_lost(lines):
    """Reductions, functions and symbols have signs of their own; all else stands in the LaTeX as often as before."""
    signs = {"identity", "sum", "over", "of", "in", "x", "sqrt", "mean", "max", "min", "softmax", "log", "cos", "dy"}
    for line in lines:
        made = re.sub(r"\\(begin|end)\{align\*\}", "", latex.align(line))
        line = line.replace("1e-", "10^-")
        plain = re.sub(r"\bdy(?:_l)?/d[A-Z](?:_l)?", " ", line).replace("_", " ")
        wanted = Counter(word for word in re.findall(r"[A-Za-z][A-Za-z'-]+", plain) if word not in signs)
        found = Counter(re.findall(r"(?<!\\)\b[A-Za-z][A-Za-z'-]+", made))
        assert not wanted - found, (line, wanted - found)
        numbers = Counter(re.findall(r"\d+(?:\.\d+)?", line))
        assert not numbers - Counter(re.findall(r"\d+(?:\.\d+)?", made)), line


def test_no_row_is_wider_than_a_page(lines):
    for line in lines:
        for row in latex.rows(line):
            prose_alone = "".join(re.findall(r"\\text\{([^}]*)\}", re.sub(r"_\{[^=]*?\}", "", row)))
            assert len(prose_alone) <= 90, row


# The forms


@pytest.mark.parametrize("name", NAMES)
def test_json_has_the_documented_keys(exps, name):
    report = exps[name].report()
    found = json.loads(report.to_json())
    assert found == report.to_dict()
    page = (DOCS / "report.md").read_text(encoding="utf-8")
    for key in found:
        assert f"| `{key}` |" in page, key
    assert found["recipe"]["fingerprint"] == exps[name].recipe.fingerprint
    assert found["checklist"][0].keys() == {"group", "item", "stated", "source"}
    assert found["formula"]["text"] == vlcam.formula(exps[name].recipe).splitlines()


@pytest.mark.parametrize("name", NAMES)
def test_markdown_tables_have_three_cells(exps, name):
    report = exps[name].report()
    text = report.to_markdown()
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) > len(report.checklist)
    for row in rows:
        assert len(re.findall(r"(?<!\\)\|", row)) == 4, row
    assert "<script>" not in text


def test_text_is_escaped_in_markdown_and_latex():
    assert markup.in_markdown("100 $a$") == r"100 \$a\$"
    assert fragment.escape("a--b ''c'' ?`d") == r"a-{}-b '{}'c'{}' ?\textasciigrave{}d"
    assert fragment.escape("e\u0301 a\u200bb\ufeff") == "\u00e9 a\\allowbreak{}b"
    assert markup.in_markdown("a*b_[c]|<d>\n# &amp;") == r"a\*b\_\[c\]\|\<d\> \# &amp;amp;"
    assert fragment.escape('50 % of "a_b" & \\c{d}') == r"50 \% of ``a\_b'' \& \textbackslash{}c\{d\}"
    assert fragment.escape("^~$#<|>") == (r"\textasciicircum{}\textasciitilde{}\$\#\textless{}\textbar{}\textgreater{}")


@pytest.mark.parametrize("name", NAMES)
def test_the_latex_fragment_is_well_formed(exps, name):
    text = exps[name].report().to_latex()
    plain = re.sub(r"\\begin\{align\*\}.*?\\end\{align\*\}", "", text, flags=re.DOTALL)
    body = "\n".join(line for line in plain.splitlines() if not line.startswith("%"))
    depth = 0
    for sign in re.sub(r"\\[\\{}]", "", body):
        depth += (sign == "{") - (sign == "}")
        assert depth >= 0
    assert depth == 0
    bare = re.sub(r"\\[%#$&_{}]|\\textasci\w+|\\textbackslash", "", body)
    assert not re.search(r"[%#$_^~]", bare)
    for row in (line for line in bare.splitlines() if line.endswith(r"\\")):
        assert row.count(" & ") == 2, row
    assert Counter(re.findall(r"\\begin\{(\w+)", text)) == Counter(re.findall(r"\\end\{(\w+)", text))
    assert "% @" in text


def test_what_nobody_sees_is_shown():
    assert markup.visible("a\n\tb\0c\x1b\udce9\u202ed") == r"a b\x00c\x1b\udce9\u202ed"
    assert markup.visible("שלום e\u0301 \u200d") == "שלום e\u0301 \u200d"


@pytest.mark.parametrize("name", [b"caf\xe9.png", b"two\nlines.png", b'a "$b_c" {d} % & #.png'])
def test_any_name_of_a_file_can_be_reported(scene, tmp_path, name):
    file = tmp_path / os.fsdecode(name)
    try:
        scene.image.save(file)
    except OSError:
        pytest.skip("the file system has no such names")
    exp = vlcam.load("tiny-vit").explain(file)
    report = exp.report()
    assert "\n" not in report.paragraph
    for ending in ENDINGS:
        report.save(tmp_path / f"report{ending}")
    assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8")) == report.to_dict()
    again = vlcam.open(exp.save(tmp_path / "saved.png"))
    assert again.provenance["image"]["name"] == file.name
    assert again.report().to_dict() == report.to_dict()


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no pdflatex on the path")
@pytest.mark.parametrize("text", [HOSTILE, "\0a -- b `c` ''d'' <<e>> e\u0301 \u200b\u202e"])
def test_pdflatex_sets_the_fragment(scene, tmp_path, text):
    vlcam.load("tiny-blip-itm").explain(scene.image, f"{text} red").report().save(tmp_path / "report.tex")
    packages = r"\documentclass{article}\usepackage[T1]{fontenc}\usepackage{amsmath}"
    (tmp_path / "page.tex").write_text(rf"{packages}\begin{{document}}\input{{report}}\end{{document}}")
    command = ["pdflatex", "-halt-on-error", "-interaction=nonstopmode", "page.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout[-1500:]
    assert (tmp_path / "page.pdf").is_file()


def test_saving_by_ending(exps, tmp_path):
    report = exps["class"].report()
    for ending, form in ENDINGS.items():
        path = report.save(tmp_path / f"report{ending}")
        assert path.read_text(encoding="utf-8") == getattr(report, form)()
        with pytest.raises(vlcam.FileError, match="exists already"):
            report.save(path)
        assert report.save(path, overwrite=True) == path
    with pytest.raises(vlcam.FileError, match=r"\.html, \.json, \.md, \.tex"):
        report.save(tmp_path / "report.pdf")
    with pytest.raises(vlcam.FileError, match=r"the folder .* does not exist"):
        report.save(tmp_path / "nowhere" / "report.md")
    assert sorted(path.suffix for path in tmp_path.iterdir()) == sorted(ENDINGS)


@pytest.mark.parametrize("name", ["phrase", "text", "class"])
@pytest.mark.parametrize("embed", [True, False])
def test_a_saved_file_alone_gives_the_same_report(exps, tmp_path, name, embed):
    again = vlcam.open(exps[name].save(tmp_path / "saved.png", embed_image=embed)).report()
    assert again.to_dict() == exps[name].report().to_dict()
    assert again.to_latex() == exps[name].report().to_latex()
    assert ('id="photograph"' in again.to_html()) == embed


SAVED = sorted((Path(__file__).parent / "saved").glob("*.png"))


@pytest.mark.parametrize("file", SAVED, ids=lambda file: file.stem)
def test_files_of_older_releases_are_reported_without_what_they_do_not_record(file):
    exp = vlcam.open(file)
    report = exp.report()
    assert all(getattr(report, form)() for form in ENDINGS.values())
    for place in {place for row in report.checklist for place in row.source.split(", ")}:
        if place.startswith("provenance."):
            at(exp.record(), place)
    assert ("; module" in stated(exp, "of which blocks")) == ("modules" in exp.provenance["run"])


def test_how_often_a_model_was_asked_is_not_invented(scene):
    exp = vlcam.load("tiny-vit").explain(scene.image, recipe="torchcam-scorecam")
    assert "the model was asked again 96 times." in exp.report().paragraph
    run = {key: value for key, value in exp.provenance["run"].items() if key != "asked"}
    older = dataclasses.replace(exp, provenance={**exp.provenance, "run": run})
    assert "the model was asked again. " in older.report().paragraph


# The page


def layer_of(page, number):
    found = re.search(rf'data-map="{number}" src="data:image/png;base64,([^"]+)"', page)
    return Image.open(io.BytesIO(base64.b64decode(found.group(1)))).convert("RGBA")


@pytest.mark.parametrize("name", ["whole", "class", "signed"])
def test_image_and_layer_together_are_the_overlay(exps, name):
    exp = exps[name]
    layer = layer_of(exp.report().to_html(), 0)
    assert layer.size == exp.image.size
    colours = np.asarray(layer, np.float64)
    strength = colours[..., 3:] / 255 * 0.6  # where the page's slider stands
    blended = np.asarray(exp.image, np.float64) * (1 - strength) + colours[..., :3] * strength
    assert np.abs(blended - np.asarray(exp.overlay(), np.float64)).max() <= 4


def test_every_word_has_its_layer_and_its_values(exps):
    exp = exps["whole"]
    page = exp.report().to_html()
    data = json.loads(re.search(r'id="maps">(.*?)</script>', page).group(1))
    assert [entry["word"] for entry in data["maps"]] == ["", *exp.words]
    for number, one in enumerate([exp, *exp.words.values()]):
        np.testing.assert_array_equal(np.float32(data["maps"][number]["values"]), one.tokens)
        if one.status == "ok":
            assert layer_of(page, number).getextrema()[3][1] > 240
    assert page.count('class="word') == len(exp.words)


def test_the_embedded_record_is_the_record(exps):
    for name in ("hostile", "class"):
        page = exps[name].report().to_html()
        found = re.search(r'<script type="application/json" id="record">(.*?)</script>', page, re.DOTALL)
        assert json.loads(found.group(1)) == exps[name].record()
        assert "<" not in found.group(1)


def test_a_hostile_caption_stays_text(exps):
    page = exps["hostile"].report().to_html()
    assert page.count("<script") == 3
    assert "alert(1)<" not in page.replace("alert(1)&lt;", "")
    assert "&lt;script&gt;" in page


def test_nothing_on_the_page_can_be_fetched(exps):
    for name in NAMES:
        page = exps[name].report().to_html()
        assert "default-src 'none'; img-src data:" in page
        for address in re.findall(r'(?:src|href)="([^"]*)"', page):
            assert address.startswith("data:"), address
        assert "url(" not in page
        assert "@import" not in page


def test_a_large_photograph_is_shown_smaller_and_says_so():
    rng = np.random.default_rng(0)
    photo = Image.fromarray(rng.integers(0, 256, (150, 200, 3), np.uint8)).resize(
        (4000, 3000), Image.Resampling.BICUBIC
    )
    exp = vlcam.load("tiny-blip-itm").explain(photo, "a red circle and a blue square next to a yellow star")
    page = exp.report().to_html()
    assert "Shown at 1024 x 768 of 4000 x 3000 pixels" in page
    assert len(page.encode()) < 2_000_000
    assert "data:image/jpeg" in page


def test_many_words_are_drawn_smaller(exps, monkeypatch):
    exp = exps["whole"]
    monkeypatch.setattr(pictures, "_BUDGET", 40_000)
    found = pictures.layers([exp, *exp.words.values()], opaque=False)
    assert sum(len(one or "") for one in found) < 40_000 * 4 / 3 + 100 * len(found)
    assert layer_of(f'data-map="0" src="{found[0]}"', 0).width < 256


def test_what_the_model_did_not_see_is_striped(exps):
    exp = exps["class"]
    cropped = dataclasses.replace(exp, placement=dataclasses.replace(exp.placement, box=(64.0, 0.0, 192.0, 256.0)))
    page = cropped.report().to_html()
    layer = np.asarray(layer_of(page, 0))
    assert {tuple(colour) for colour in layer[:, :64].reshape(-1, 4)} == {(150,) * 3 + (235,), (110,) * 3 + (235,)}
    assert "what it did not see is striped" in page


def test_the_score_of_other_attention_is_not_that_of_the_model(scene, exps):
    exp = vlcam.load("tiny-vit").explain(scene.image, recipe="grad-eclip-as-coded")
    assert 'class="explained"' not in exp.report().to_html()
    assert 'class="explained"' in exps["class"].report().to_html()


def test_a_map_without_evidence_is_no_picture(exps):
    exp = exps["class"]
    empty = dataclasses.replace(exp, status="no positive evidence", tokens=np.zeros((8, 8), np.float32))
    page = empty.report().to_html()
    assert "every value is zero after the ReLU" in page
    assert "<figure" not in page
    assert "data:image" not in page


def test_words_of_a_map_over_text_have_their_scores(exps):
    exp = exps["text"]
    page = exp.report().to_html()
    data = json.loads(re.search(r'id="maps">(.*?)</script>', page).group(1))
    found = [(entry["word"], np.float32(entry["score"])) for entry in data["scores"]]
    assert found == [(word.word, np.float32(word.score)) for word in exp.word_scores]
    assert 'class="layer"' not in page


def test_the_code_on_the_report_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"^```python\n(.*?)^```$", (DOCS / "report.md").read_text(), re.DOTALL | re.MULTILINE)
    exec(compile(code, "report.md", "exec"), {})
    assert (tmp_path / "report.html").is_file()
    assert "feature representation | which tensor | CROSS; " in capsys.readouterr().out


# The command line


def test_the_command_writes_one_file_or_a_folder(run, exps, tmp_path):
    file = exps["class"].save(tmp_path / "saved.png")
    code, out, err = run("report", file, "--out", tmp_path / "page.html")
    assert (code, out) == (0, "")
    assert "html: " in err
    assert (tmp_path / "page.html").read_text() == vlcam.open(file).report().to_html()
    code, out, _ = run("report", file, "--out", tmp_path / "all", "--format", "md", "--format", "tex", "--json")
    assert code == 0
    printed = json.loads(out)
    assert printed["files"] == {form: str(tmp_path / "all" / f"saved-report.{form}") for form in ("md", "tex")}
    assert printed["paragraph"] == exps["class"].report().paragraph
    assert sorted(path.name for path in (tmp_path / "all").iterdir()) == ["saved-report.md", "saved-report.tex"]


def test_the_command_refuses(run, exps, tmp_path, scene):
    file = exps["class"].save(tmp_path / "saved.png", embed_image=False)
    scene.image.save(tmp_path / "scene.png")
    page = tmp_path / "page.html"
    for more, code, words in (
        (("--format", "pdf"), 2, "choose from html, json, md, tex"),
        (("--format", "md"), 2, "--out names one file, which ends in .html"),
        (("--out", tmp_path / "page.pdf"), 1, "a report is saved as .html, .json, .md, .tex"),
        (("--image", file), 1, "another image"),
    ):
        found, out, err = run("report", file, "--out", page, *more)
        assert (found, out) == (code, "")
        assert words in err
        assert not page.exists()
    assert run("report", file, "--out", page)[0] == 0
    assert 'id="photograph"' not in page.read_text()
    assert "exists already" in run("report", file, "--out", page)[2]
    assert run("report", file, "--out", page, "--image", tmp_path / "scene.png", "--overwrite")[0] == 0
    assert 'id="photograph"' in page.read_text()
