"""The catalogue: sources as data and as BibTeX, what backs each recipe, the list on the command line, the page."""

from __future__ import annotations

import ast
import copy
import functools
import json
import re
import runpy
from dataclasses import replace
from pathlib import Path

import models
import numpy as np
import pytest
import torch
from open_clip import SimpleTokenizer
from pybtex.database import parse_string
from test_clip_open import CONTEXT, coca
from test_clip_open import wrapped as wrapped_open
from test_swin import Logits, norms_of, pixels_of
from test_swin import made as made_swin
from test_swin import wrapped as wrapped_swin

import vlcam
from vlcam import citations
from vlcam.bibtex import bibliography
from vlcam.citations import Citation
from vlcam.explainer import Explainer
from vlcam.fitting import fitting

ROOT = Path(__file__).parent.parent
RECIPES = vlcam.recipes()
KINDS = ("re-derivation", "the authors' code, golden ", "parity with ", "relation: ")
ENC = len(models.PIECES) + 1
TEXT = "a red circle and a blue dog"

each_entry = pytest.mark.parametrize("entry", RECIPES.values(), ids=RECIPES)


def assert_close(found, wanted, share=1e-5):
    found, wanted = np.asarray(found, np.float64).ravel(), np.asarray(wanted, np.float64).ravel()
    assert np.abs(wanted).max() > 0
    np.testing.assert_allclose(found, wanted, rtol=0, atol=share * np.abs(wanted).max())


# ---------------------------------------------------------------- sources


def test_there_are_forty_recipes_and_more():
    assert len(RECIPES) >= 40


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (
            "lavis-itm",
            "Li, Li, Xiong, Hoi. BLIP: Bootstrapping Language-Image Pre-training for Unified Vision-Language "
            "Understanding and Generation. ICML 2022",
        ),
        ("pgc-elementwise", "Gildenblat and contributors. PyTorch library for CAM methods. 2021"),
        (
            "pgc-hirescam",
            "Draelos, Carin. Use HiResCAM instead of Grad-CAM for faithful explanations of convolutional neural "
            "networks. arXiv:2011.08891, 2020",
        ),
        ("gscorecam-gradcam", "Chen, Li, Biaz, Bui, Nguyen. gScoreCAM: What Objects Is CLIP Looking At? ACCV 2022"),
        (
            "tam-transition",
            "Yuan, Li, Xiong, Cao, Dou. Explaining Information Flow Inside Vision Transformers Using Markov Chain. "
            "NeurIPS 2021 Workshop on Explainable AI Approaches for Debugging and Diagnosis",
        ),
    ],
)
def test_a_citation_is_one_line(name, line):
    assert str(RECIPES[name].citation) == line


def test_every_source_has_a_key_of_its_own_and_what_its_kind_needs():
    known = [value for value in vars(citations).values() if isinstance(value, Citation)]
    assert len({each.key for each in known}) == len({each.title for each in known}) == len(known)
    for each in known:
        assert 2015 < each.year < 2030
        assert not each.doi or re.fullmatch(r"10\.\d{4,5}/\S+", each.doi)
        assert not each.eprint or re.fullmatch(r"\d{4}\.\d{4,5}", each.eprint)
        assert each.venue or each.kind == "misc"
        assert re.fullmatch(rf"[a-z]+{each.year}[a-z0-9]+", each.key)
        assert each.key.startswith(each.authors[0].partition(",")[0].lower())


def test_the_source_of_the_checklist_is_among_them():
    assert str(citations.TAXONOMY).startswith("Wall, Wang, Rizk, Santosh. Grad-CAM for Vision Transformers: A System")


@each_entry
def test_bibtex_of_every_recipe_is_read_by_a_parser(entry):
    parsed = parse_string(vlcam.bibtex(entry), "bibtex").entries
    paper = parsed[entry.citation.key]
    assert next(iter(parsed)) == entry.citation.key
    assert paper.type == entry.citation.kind
    assert paper.fields["year"] == str(entry.citation.year)
    assert paper.fields["title"] == f"{{{entry.citation.title}}}"
    families = [" ".join(person.last_names) for person in paper.persons["author"]]
    assert families == [author.partition(",")[0] for author in entry.citation.authors]
    for key, source in list(parsed.items())[1:]:
        owner, repository = source.fields["url"].removeprefix("https://github.com/").split("/")[:2]
        assert f"{owner}/{repository}" in entry.code
        assert key.startswith(f"{owner}-{repository}".lower())


def test_a_repository_stands_beside_the_paper_at_its_commit():
    parsed = parse_string(vlcam.bibtex("raw-attention"), "bibtex").entries
    assert list(parsed) == [
        "chefer2021lrp",
        "hila-chefer-transformer-explainability-c3e578f",
        "jiaminchen-1031-transformerinterp-a76854a",
    ]
    code = parsed["hila-chefer-transformer-explainability-c3e578f"]
    assert code.fields["url"] == "https://github.com/hila-chefer/Transformer-Explainability/tree/c3e578f"
    assert code.fields["note"] == "commit c3e578f"
    released = parse_string(vlcam.bibtex("torchcam-scorecam"), "bibtex").entries["frgfm-torch-cam-0.5.0"]
    assert released.fields["note"] == "version 0.5.0"
    assert released.fields["url"] == "https://github.com/frgfm/torch-cam"


@pytest.mark.parametrize("name", ["blip2-itm", "coca-caption", "grad-sam", "ablationcam", "pnp-vqa-as-written"])
def test_where_no_code_was_followed_the_paper_stands_alone(name):
    """An issue that is named, or a peer that departs, is no source."""
    assert list(parse_string(vlcam.bibtex(name), "bibtex").entries) == [RECIPES[name].citation.key]


def test_all_sources_together_have_keys_of_their_own():
    """The parser refuses a key that comes twice."""
    text = bibliography(RECIPES.values())
    parsed = parse_string(text, "bibtex").entries
    assert {entry.citation.key for entry in RECIPES.values()} <= set(parsed)
    assert text == bibliography(RECIPES.values())
    assert text.count("\n@") + 1 == len(parsed)


def test_signs_of_latex_come_through():
    title = r"50% of A&B_C #1: $x^2$ ~ {y} \ Grad-CAM++"
    odd = replace(
        RECIPES["lavis-itm"].citation, title=title, container="Signs & Symbols", authors=("O'Neill_X, A. {B}",)
    )
    parsed = parse_string(vlcam.bibtex(replace(RECIPES["lavis-itm"], citation=odd)), "bibtex").entries["li2022blip"]
    assert parsed.fields["title"] == (
        r"{50\% of A\&B\_C \#1: \$x\textasciicircum{}2\$ \textasciitilde{} \{y\} \textbackslash{} Grad-CAM++}"
    )
    assert parsed.fields["booktitle"] == r"Signs \& Symbols"
    assert parsed.persons["author"][0].last_names == [r"O'Neill\_X"]


def test_bibtex_takes_whatever_has_a_recipe(embedded):
    wanted = vlcam.bibtex("albef-itm")
    entry = RECIPES["albef-itm"]
    exp = embedded.explain(models.photo(), "a red star", "albef-itm", relu="none")
    assert vlcam.bibtex(entry) == vlcam.bibtex(entry.recipe) == vlcam.bibtex(exp) == wanted


def test_a_recipe_without_a_source_says_what_to_do():
    with pytest.raises(vlcam.UnknownNameError, match=r"recipe 'mine' is not in the catalogue.* made from, one of 'lav"):
        vlcam.bibtex(RECIPES["lavis-itm"].recipe.replace(name="mine"))
    with pytest.raises(vlcam.UnknownNameError, match="no recipe 'gradcam'"):
        vlcam.bibtex("gradcam")


# ---------------------------------------------------------------- departures and checks


@each_entry
def test_departures_and_notes_are_sentences_that_say_different_things(entry):
    sentences = [re.split(r"(?<=[.]) ", text) for text in (entry.departs, entry.notes) if text]
    for text in (entry.departs, entry.notes):
        assert not text or (text[0].isupper() and text.endswith("."))
    said = [sentence for part in sentences for sentence in part]
    assert len(said) == len(set(said))


def test_a_recipe_that_is_named_as_coded_says_what_the_code_does():
    for name, entry in RECIPES.items():
        assert entry.departs or not name.endswith("-as-coded"), name


@functools.cache
def functions_of(path):
    """The text of every test of a file, with its decorators and the constants of the module that either names."""
    source = (ROOT / path).read_text(encoding="utf-8")
    tree = ast.parse(source)
    constants = {
        target.id: ast.get_source_segment(source, node)
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            parts = [node, *node.decorator_list]
            names = {each.id for part in parts for each in ast.walk(part) if isinstance(each, ast.Name)}
            texts = [ast.get_source_segment(source, part) for part in parts]
            found[node.name] = "\n".join([*texts, *(constants[name] for name in names & constants.keys())])
    return found


@each_entry
def test_every_recipe_is_backed_by_a_test_that_exists_and_is_of_it(entry):
    assert entry.checks
    assert len(set(entry.checks)) == len(entry.checks)
    for check in entry.checks:
        assert check.what.startswith(KINDS), check.what
        path, _, function = check.test.partition("::")
        assert f'"{entry.recipe.name}"' in functions_of(path)[function], (entry.recipe.name, check.test)
        if golden := re.search(r"golden (\S+)$", check.what):
            folder = golden[1]
            assert (ROOT / "tests" / "golden" / folder / "golden.npz").exists()
            assert folder in (ROOT / path).read_text(encoding="utf-8")


def test_checks_speak_of_recipes_that_exist():
    from vlcam.published.checks import CHECKS

    assert set(CHECKS) == set(RECIPES)


# ---------------------------------------------------------------- re-derivations


def text_rows(module, image):
    """Cross-attention and its gradient under the logit of a match, in float64: heads, rows, image tokens."""
    twin, kept = copy.deepcopy(module).double(), {}

    def keep(layer):
        def hook(_, __, output):
            output[1].retain_grad()
            kept[layer] = output[1]

        return hook

    for layer, block in enumerate(twin.text_encoder.encoder.layer):
        block.crossattention.self.register_forward_hook(keep(layer))
    coded = models.tokenizer()(TEXT, return_tensors="pt")
    ids = coded["input_ids"].clone()
    ids[:, 0] = ENC
    tokens = twin.vision_model(image.double()[None]).last_hidden_state
    hidden = twin.text_encoder(
        input_ids=ids, attention_mask=coded["attention_mask"], encoder_hidden_states=tokens
    ).last_hidden_state
    twin.itm_head(hidden[:, 0])[0, 1].backward()
    return {layer: (seen[0].detach().numpy(), seen.grad[0].numpy()) for layer, seen in kept.items()}


@pytest.mark.parametrize(
    ("name", "kept", "rows"),
    [
        ("pnp-vqa", lambda g: max(g, 0.0), slice(1, -1)),
        ("pnp-vqa-as-written", lambda g: min(g, 0.0), slice(1, -1)),
        ("omnixai-itm", lambda g: max(g, 0.0), slice(None)),
    ],
)
def test_recipes_on_the_rows_of_a_text_are_those_of_their_formula(model, blip, name, kept, rows):
    image = models.pixels(3)
    exp = model.explain(image, TEXT, name)
    assert exp.recipe.layers == (1,)  # blocks 6 and 7 of 12, in a model of 3
    attention, gradient = text_rows(blip, image)[1]
    wanted = np.zeros(attention.shape[1:])
    for h, t, j in np.ndindex(*attention.shape):
        wanted[t, j] += attention[h, t, j] * kept(gradient[h, t, j]) / len(attention)
    assert_close(exp.tokens, wanted[rows, 1:].mean(0))


def head_weighted(attention, gradient, keys):
    """Heads weighted by the mean of the gradient over some rows and keys; the class token's row over the patches."""
    rows, columns = keys
    total = sum(gradient[h][rows, columns].mean() * attention[h] for h in range(len(attention)))
    return np.maximum(total / len(attention), 0)[0, 1:]


ATTENTION = {
    "attn-gradcam": lambda layers: head_weighted(*layers[-1], (slice(0, 1), slice(1, None))),
    "attn-gradcam-full": lambda layers: head_weighted(*layers[-1], (slice(None), slice(None))),
    "grad-sam": lambda layers: np.mean([(a * np.maximum(g, 0)).mean((0, 1))[1:] for a, g in layers], 0),
    "grad-sam-queries": lambda layers: np.mean([(a * np.maximum(g, 0)).mean((0, 2))[1:] for a, g in layers], 0),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_of_a_classifier_follows_the_formula(name):
    module, image = models.classifier("vit"), models.pixels(2, height=32, width=32)
    twin = copy.deepcopy(module).double()
    twin.set_attn_implementation("eager")
    out = twin(pixel_values=image.double()[None], output_attentions=True)
    gradients = torch.autograd.grad(out.logits[0, 2], out.attentions)
    layers = [(a[0].detach().numpy(), g[0].numpy()) for a, g in zip(out.attentions, gradients, strict=True)]
    exp = vlcam.wrap(module).explain(image, target=2, recipe=name)
    assert_close(exp.tokens, ATTENTION[name](layers))


def test_the_site_of_the_example_for_swin_is_that_of_pgc_swin():
    from pytorch_grad_cam import GradCAM
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    module, image = made_swin("hf", 1), pixels_of((64, 32), 1, seed=5)
    twin = copy.deepcopy(module)
    part = norms_of(twin.swin.encoder.layers[-1].blocks[-1])[1]

    def to_grid(tokens):
        return tokens.reshape(1, 8, 4, -1).permute(0, 3, 1, 2)

    with GradCAM(Logits(twin), [part], reshape_transform=to_grid) as cam:
        cam(input_tensor=image, targets=[ClassifierOutputTarget(1)])
        tensors = [
            tensors[0].numpy()
            for tensors in (cam.activations_and_grads.activations, cam.activations_and_grads.gradients)
        ]
        theirs = cam.get_cam_image(image, part, None, *tensors, eigen_smooth=False)[0]
    model = wrapped_swin(module)
    assert_close(model.explain(image[0], recipe="pgc-swin", target=1, relu="none").tokens, theirs)
    other = model.explain(image[0], recipe="pgc-gradcam", target=1, relu="none").tokens
    assert np.abs(other - theirs).max() > 0.01 * np.abs(theirs).max()


def written_out(attention, kept):
    """Multi-head attention of torch in plain steps, so that its probabilities have a gradient."""

    def forward(query, key, value, **_):
        weights = (attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight)
        if attention.in_proj_weight is not None:
            weights = attention.in_proj_weight.chunk(3)
        heads = attention.num_heads
        q, k, v = (
            (given @ weight.T + bias).unflatten(-1, (heads, -1)).transpose(1, 2)
            for given, weight, bias in zip((query, key, value), weights, attention.in_proj_bias.chunk(3), strict=True)
        )
        shares = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        kept.append(shares)
        return attention.out_proj((shares @ v).transpose(1, 2).flatten(2)), None

    return forward


def test_a_caption_of_coca_is_carried_on_through_the_slots():
    """Row t of the decoder's attention on slots, times each slot's attention on patches; row t tells token t + 1."""
    module = coca()
    image, text = models.pixels(1), "a red dog"
    exp = Explainer(wrapped_open(module), "coca").explain(image, text, "coca-caption")
    twin = copy.deepcopy(module).double()
    crossed, pooled = [], []
    last, pooler = twin.text_decoder.cross_attn[-1].attn, twin.visual.attn_pool.attn
    last.forward, pooler.forward = written_out(last, crossed), written_out(pooler, pooled)
    ids = SimpleTokenizer(context_length=CONTEXT)([text])
    out = twin(image.double()[None], ids)
    count = int(ids.argmax()) + 1  # the end token has the largest number
    chances = out["logits"].log_softmax(-1).gather(2, out["labels"][..., None])[0, : count - 1, 0]
    (gradient,) = torch.autograd.grad(chances.sum(), crossed[0])
    attention, slots = crossed[0][0].detach().numpy(), pooled[0][0].detach().numpy().mean(0)
    slopes = gradient[0].numpy()
    wanted = np.zeros(slots.shape[1])
    words = count - 2
    for h, t, k, j in np.ndindex(len(attention), words, attention.shape[2], slots.shape[1]):
        wanted[j] += attention[h, t, k] * max(slopes[h, t, k], 0) * slots[1 + k, j] / len(attention) / words
    assert exp.provenance["run"]["target_value"] == pytest.approx(float(chances.sum().detach()), rel=1e-5)
    assert_close(exp.tokens, wanted[1:])


# ---------------------------------------------------------------- the command line


def test_the_list_is_readable_in_a_hundred_columns(run):
    code, out, err = run("recipes")
    assert (code, out) == (0, "")
    lines = err.splitlines()
    assert lines[0].split() == ["name", "site", "weighting", "target"]
    assert [line.split()[0] for line in lines[1:]] == list(RECIPES)
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize(
    ("options", "field", "value"),
    [(("--site", "F3_HEADS"), "site", "F3_HEADS"), (("--target", "itm"), "target", "itm")],
)
def test_the_list_is_cut_to_a_site_or_a_target(run, options, field, value):
    _, out, _ = run("recipes", *options, "--json")
    wanted = [name for name, entry in RECIPES.items() if getattr(entry.recipe, field) == value]
    assert list(json.loads(out)) == wanted
    assert 1 < len(wanted) < len(RECIPES)


def test_filters_go_together(run):
    _, out, _ = run("recipes", "--site", "CROSS", "--target", "contrastive", "--json")
    wanted = [n for n, e in RECIPES.items() if (e.recipe.site, e.recipe.target) == ("CROSS", "contrastive")]
    assert list(json.loads(out)) == wanted
    assert wanted


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--site", "F9"), r"--site 'F9': no named recipe has it; there are 'CROSS', "),
        (("--target", "custom"), r"--target 'custom': no named recipe has it"),
        (("--all",), r"name one with --model"),
        (("lavis-itm", "--site", "CROSS"), r"recipe 'lavis-itm' with --site"),
        (("--model", "no-such-model"), r"no-such-model"),
    ],
)
def test_what_the_list_cannot_be_asked(run, arguments, words):
    code, out, err = run("recipes", *arguments)
    assert out == ""
    assert code == 2
    assert re.search(words, " ".join(err.split()))


@pytest.mark.parametrize("name", ["tiny-vit", "tiny-swin", "tiny-blip-itm"])
def test_the_list_is_cut_to_what_fits_a_model(run, name):
    _, out, _ = run("recipes", "--model", name, "--json")
    found = json.loads(out)
    at_once = fitting(vlcam.load(name).adapter)
    several = [key for key in found if RECIPES[key].recipe.asks or RECIPES[key].recipe.gradient_path == "integrated"]
    assert set(found) == {*at_once, *several}
    assert all(entry["fits"] and entry["reason"] is None for entry in found.values())
    _, out, err = run("recipes", "--model", name, "--all", "--json")
    everything = json.loads(out)
    assert list(everything) == list(RECIPES)
    listed, _, unfit = err.partition("\nwhat does not fit, and why\n")
    assert [line.split()[0] for line in listed.splitlines()[1:]] == list(found)
    for key, entry in everything.items():
        assert entry["fits"] is (key in found)
        if key not in found:
            assert entry["reason"]
            assert f"{key}: {entry['reason']}" in " ".join(unfit.split()), key
    model = vlcam.load(name)
    refused = next(key for key in everything if key not in found)
    with pytest.raises((vlcam.RecipeError, vlcam.UnknownNameError)) as caught:
        model.explain(models.photo(), "a red star" if "blip" in name else None, recipe=refused)
    assert str(caught.value) == everything[refused]["reason"]


@each_entry
def test_one_recipe_is_shown_whole(run, entry):
    code, out, err = run("recipes", entry.recipe.name)
    assert (code, out) == (0, "")
    shown = " ".join(err.split())
    for group, fields in entry.recipe.groups():
        assert f"\n{group}\n" in f"\n{err}"
        assert all(f"  {field} " in err for field in fields)
    for line in vlcam.formula(entry.recipe).splitlines():
        assert line in err
    for text in (str(entry.citation), entry.code, entry.departs, entry.notes):
        assert " ".join(text.split()) in shown
    for check in entry.checks:
        assert check.what in err
        assert check.test in err
    assert ("\ndepartures\n" in err) is bool(entry.departs)


def test_sources_go_to_stdout_as_bibtex(run):
    code, out, err = run("recipes", "agcam", "--bibtex")
    assert (code, out, err) == (0, vlcam.bibtex("agcam"), "")
    _, out, _ = run("recipes", "--site", "F4", "--bibtex")
    assert out == vlcam.bibtex("pgc-swin")
    _, out, _ = run("recipes", "agcam", "--bibtex", "--json")
    assert json.loads(out)["bibtex"] == vlcam.bibtex("agcam")


# ---------------------------------------------------------------- the page


def test_the_page_is_what_the_catalogue_gives():
    made = runpy.run_path(str(ROOT / "docs" / "write_catalogue.py"))["page"]()
    assert (ROOT / "docs" / "catalogue.md").read_text(encoding="utf-8") == made, "run docs/write_catalogue.py"


@each_entry
def test_every_recipe_has_a_section_on_the_page(entry):
    page = (ROOT / "docs" / "catalogue.md").read_text(encoding="utf-8")
    heading = entry.recipe.name + (" (plus plus)" if "+" in entry.recipe.name else "")
    _, found, section = page.partition(f"\n### {heading}\n")
    assert found
    section = section.partition("\n### ")[0]
    assert f"```text\n{vlcam.formula(entry.recipe)}\n```" in section
    for check in entry.checks:
        assert check.test in section
