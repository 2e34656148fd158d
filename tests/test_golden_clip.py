"""Recipes on models of two towers against the maps of the authors' own code, see the NOTES.md of each golden."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg, CustomTextCLIP
from open_clip.transform import image_transform
from safetensors.torch import load_file
from timm.models.vision_transformer import VisionTransformer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from vlcam.anatomy import VALUES, Tap
from vlcam.capture import capture
from vlcam.explainer import Explainer
from vlcam.maps import normalised
from vlcam.pairing import pair_up
from vlcam.plan import plan
from vlcam_adapters.clip_open import ClipOpen

GOLDEN = Path(__file__).parent / "golden"
IDS = 64
START, END = 62, 63


class WithGivenTexts(ClipOpen):
    """A vision tower alone: text embeddings are given."""

    given: torch.Tensor

    def text_tower(self, inputs):
        return self.given[: len(inputs.texts.layouts)]


def tokenizer():
    """Ids without a text."""
    words = WordLevel({f"w{i}": i for i in range(IDS)}, unk_token="w61")
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), pad_token="w0", bos_token=f"w{START}", eos_token=f"w{END}"
    )


def read(name):
    folder = GOLDEN / name
    spec = json.loads((folder / "model.json").read_text())
    return spec, load_file(folder / "model.safetensors"), dict(np.load(folder / "golden.npz"))


def found_with(adapter, values, ids):
    batch = {"pixel_values": torch.from_numpy(values["pixel_values"]), "input_ids": torch.as_tensor(ids).long()}
    return SimpleNamespace(model=Explainer(adapter, "golden"), adapter=adapter, values=values, batch=batch)


@functools.cache
def golden(name):
    """The model of a golden wrapped, what its authors' code gave, and the batch of image and texts."""
    spec, weights, values = read(name)
    vision, text = CLIPVisionCfg(**spec["vision_cfg"]), CLIPTextCfg(**spec["text_cfg"])
    module = CLIP(spec["embed_dim"], vision, text, quick_gelu=spec["quick_gelu"])
    module.load_state_dict(weights)
    if "positional_embedding_used" in values:
        with torch.no_grad():
            module.visual.positional_embedding.copy_(torch.from_numpy(values["positional_embedding_used"]))
    adapter = ClipOpen(module.eval(), (image_transform(vision.image_size, is_train=False), tokenizer()))
    return found_with(adapter, values, values["input_ids"])


@functools.cache
def golden_siglip():
    """The same for a vision tower without a text tower; its texts are the two directions that were given."""
    spec, weights, values = read("r43-legrad-siglip")
    width = spec["args"]["embed_dim"]
    vision = CLIPVisionCfg(timm_model_name="test_vit3", timm_pool="map", timm_proj="none", image_size=32)
    text = CLIPTextCfg(context_length=4, vocab_size=IDS, width=16, heads=2, layers=1)
    module = CustomTextCLIP(width, vision, text)
    module.visual.trunk = VisionTransformer(**spec["args"])
    module.visual.trunk.load_state_dict(weights)
    adapter = WithGivenTexts(module.eval(), (image_transform(32, is_train=False), tokenizer()))
    adapter.given = torch.from_numpy(np.concatenate([values["text_features"], values["empty_text_features"]]))
    return found_with(adapter, values, [[START, 1, END, 0], [START, 2, END, 0]])


def explained(found, recipe, texts=None, **choices):
    """An explanation per text."""
    batch = found.batch if texts is None else {**found.batch, "input_ids": found.batch["input_ids"][texts]}
    return found.model.explain(batch, recipe=recipe, **choices)


def only(explanations):
    (exp,) = explanations
    return exp


def assert_score(exp, score):
    """The scalar that is explained."""
    assert exp.provenance["run"]["target_value"] == pytest.approx(float(score), abs=1e-6, rel=1e-6)


def scaled(values):
    return (values - values.min()) / (values.max() - values.min())


def assert_same_map(ours, published):
    """Equal as they are, relative to the largest value, and after min-max."""
    np.testing.assert_allclose(ours, published, rtol=0, atol=1e-5 * np.abs(published).max())
    np.testing.assert_allclose(scaled(ours), scaled(published), rtol=0, atol=1e-5)


def assert_same_tensor(ours, published):
    np.testing.assert_allclose(ours, published, rtol=1e-5, atol=1e-6 * max(1, np.abs(published).max()))


def assert_another_map(ours, published, least):
    assert np.abs(scaled(ours) - scaled(published)).max() > least


def enlarged(tokens, size):
    """Bilinear interpolation as the authors do it, by torch or OpenCV."""
    grid = torch.from_numpy(np.ascontiguousarray(tokens))[None, None]
    return torch.nn.functional.interpolate(grid, size=size, mode="bilinear", align_corners=False)[0, 0].numpy()


def captured(found, recipe, taps, **choices):
    """What the pass of a recipe gives at more taps, its attention computed as the recipe says."""
    job, pairs = plan(found.adapter, recipe, choices), pair_up(found.adapter, found.batch, None)
    edits = found.model._making(pairs)._edits(job)
    target = job.target.of_classes(pairs.inputs.text_of)
    (seen,) = capture(found.adapter, pairs.inputs, taps, [target], edits=edits)
    return seen


def block_score(found, seen, layer, pair, *, bare=False):
    """What a block's output is read as, by the explained text."""
    pairs = pair_up(found.adapter, found.batch, None)
    tokens = seen.activations[Tap("vision", layer, "F6")][:1]
    read_there = found.adapter.read_block("contrastive", tokens, replace(pairs.inputs, encoded=seen.encoded), bare=bare)
    return float(read_there[0, pair, 0].detach())


def by_channel(tokens):
    """Patches [N, C] as the authors store them, [C, 4, 4]."""
    return tokens[1:].T.reshape(-1, 4, 4)


def cosines(rows, direction):
    return rows @ direction / np.linalg.norm(rows, axis=-1) / np.linalg.norm(direction)


@pytest.mark.parametrize(
    "name",
    ["r14-clip-es", "r17-r19-r57-grad-eclip", "r42-legrad-clip", "r43-legrad-coca"],
)
def test_the_text_tower_says_what_the_authors_model_said(name):
    found = golden(name)
    inputs = pair_up(found.adapter, found.batch, None).inputs
    assert_same_tensor(found.adapter.text_tower(inputs).detach(), found.values["text_features"])


# CLIP-ES


@pytest.mark.parametrize("label", [0, 1])
def test_clip_es_reads_the_probability_of_the_mean_patch(label):
    found = golden("r14-clip-es")
    exp = explained(found, "clip-es")[label]
    assert_score(exp, found.values["probabilities"][0, label])
    published = found.values[f"raw_map__label{label}"]
    np.testing.assert_allclose(scaled(exp.tokens), published, rtol=0, atol=1e-5)
    final = found.values[f"highres_map__label{label}"]
    np.testing.assert_allclose(enlarged(scaled(exp.tokens), final.shape), final, rtol=0, atol=1e-5)
    assert_another_map(explained(found, "pgc-clip-softmax")[label].tokens, published, 0.1)


def test_clip_es_scores_every_text_against_all_others():
    found = golden("r14-clip-es")
    for exp, probability in zip(explained(found, "clip-es"), found.values["probabilities"][0], strict=True):
        assert_score(exp, probability)
    alone, _ = explained(found, "clip-es", texts=[0, 1])
    assert alone.provenance["run"]["target_value"] > found.values["probabilities"][0, 0] + 0.01


def test_clip_es_features_and_gradients():
    found, last = golden("r14-clip-es"), 3
    seen = found.model.capture(
        found.batch, stream="vision", site="F1", layers="last", target="contrastive_patches", scale="probability"
    )
    tap = Tap("vision", last, "F1")
    assert_same_tensor(by_channel(seen.activations[tap][0]), found.values["A_F1"])
    for label in (0, 1):
        assert_same_tensor(by_channel(seen.gradients[tap][label]), found.values[f"G__label{label}"])
    attention = found.model.capture(found.batch, stream="vision", site="F2", layers="last")
    assert_same_tensor(attention.activations[Tap("vision", last, "F2")][0].mean(0), found.values["attn_last"])


# gScoreCAM's repository: Grad-CAM of the class token, and relevance over all blocks


def test_gscorecam_gradcam():
    """The authors end with a second min-max, behind the interpolation."""
    found = golden("r16b-r34-gscorecam")
    exp = only(explained(found, "gscorecam-gradcam"))
    assert_score(exp, found.values["score"])
    np.testing.assert_allclose(scaled(exp.tokens), found.values["gradcam__grid_map"], rtol=0, atol=1e-5)
    final = found.values["gradcam__final_map"]
    np.testing.assert_allclose(scaled(enlarged(exp.tokens, final.shape)), final, rtol=0, atol=1e-5)


def test_behind_the_last_block_the_class_token_alone_has_a_gradient():
    found = golden("r16b-r34-gscorecam")
    seen = found.model.capture(found.batch, stream="vision", site="F6", layers="last")
    tap = Tap("vision", 2, "F6")
    assert_same_tensor(by_channel(seen.activations[tap][0]), found.values["A"])
    assert_same_tensor(seen.gradients[tap][0, 0], found.values["G_cls"])
    assert not seen.gradients[tap][0, 1:].any()


def test_hilacam_is_relevance_over_all_blocks():
    """Enlarged to 224 x 224, min-max, then resized; [CLS, CLS] is set to zero where nothing reads it any more."""
    found = golden("r16b-r34-gscorecam")
    exp = only(explained(found, "chefer-generic"))
    assert_score(exp, found.values["score"])
    final = found.values["hilacam__final_map"]
    ours = enlarged(scaled(enlarged(exp.tokens, (224, 224))), final.shape)
    np.testing.assert_allclose(ours, final, rtol=0, atol=1e-5)
    other = only(explained(found, "chefer-clip"))
    assert_another_map(enlarged(other.tokens, final.shape), final, 0.1)


# Grad-ECLIP's repository: one head of full width in the last blocks


@pytest.mark.parametrize("text", [0, 1])
def test_gradeclips_gradcam_runs_the_last_block_with_one_head(text):
    found = golden("r17-r19-r57-grad-eclip")
    exp = explained(found, "gradeclip-gradcam-baseline-as-coded")[text]
    assert_score(exp, found.values["score__n1"][text])
    for form in ("script", "notebook_n1"):
        assert_same_map(exp.tokens, found.values[f"gradcam__raw_map__{form}__text{text}"])
    final = found.values[f"gradcam__final_map__script__text{text}"]
    np.testing.assert_allclose(enlarged(scaled(exp.tokens), final.shape), final, rtol=0, atol=1e-5)
    intended = explained(found, "gradeclip-gradcam-baseline")[text]
    assert_score(intended, found.values["score_unmodified_model"][text])
    assert_another_map(intended.tokens, found.values[f"gradcam__raw_map__script__text{text}"], 0.1)


def test_gradeclips_gradcam_reads_the_input_of_the_last_block():
    found = golden("r17-r19-r57-grad-eclip")
    tap = Tap("vision", 2, "F6")
    seen = captured(found, "gradeclip-gradcam-baseline-as-coded", [tap])
    assert_same_tensor(seen.activations[tap][0], found.values["gradcam__Z_in_last"])
    for text in (0, 1):
        assert_same_tensor(seen.gradients[tap][text], found.values[f"gradcam__G__text{text}"])


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("text", [0, 1])
def test_grad_eclip_as_coded(text, blocks):
    found = golden("r17-r19-r57-grad-eclip")
    several = {"layers": (-2, -1), "layer_rule": "sum"} if blocks == 2 else {}
    exp = explained(found, "grad-eclip-as-coded", **several)[text]
    published = found.values[f"gradeclip__raw_map__notebook_n{blocks}__text{text}"]
    assert_score(exp, found.values[f"score__n{blocks}"][text])
    assert_same_map(exp.tokens, published)
    assert exp.scores["contrastive_cosine"].value == pytest.approx(
        float(found.values["score_unmodified_model"][text]), abs=1e-6
    )
    intended = explained(found, "grad-eclip", **several)[text]
    assert_score(intended, found.values["score_unmodified_model"][text])
    assert_another_map(intended.tokens, published, 0.01)


@pytest.mark.parametrize("text", [0, 1])
def test_grad_eclips_script_compares_keys_behind_the_output_projection(text):
    found = golden("r17-r19-r57-grad-eclip")
    exp = explained(found, "grad-eclip-as-coded", weighting="value*gradient")[text]
    assert_same_map(exp.tokens, found.values[f"gradeclip__raw_map__script_woksim__text{text}"])
    queries, keys = found.values["gradeclip__q_out"], found.values["gradeclip__k_out"]
    similarity = scaled(cosines(keys[1:], queries[0])).reshape(4, 4)
    published = found.values[f"gradeclip__raw_map__script_ksim__text{text}"]
    assert_same_map(exp.tokens * similarity, published)
    final = found.values[f"gradeclip__final_map__script_ksim__text{text}"]
    ours = enlarged(scaled(exp.tokens * similarity), final.shape)
    np.testing.assert_allclose(ours, final, rtol=0, atol=1e-5)
    raw = explained(found, "grad-eclip-as-coded")[text]
    assert_another_map(raw.tokens, published, 0.1)


def test_one_head_of_full_width_in_the_last_block():
    found = golden("r17-r19-r57-grad-eclip")
    mixed, values, attention = (Tap("vision", 3, site) for site in ("F3_HEADS", VALUES, "F2"))
    seen = captured(found, "grad-eclip-as-coded", [mixed, values, attention])
    assert seen.activations[values].shape == (2, 1, 17, 32)
    assert_same_tensor(seen.activations[values][0, 0], found.values["gradeclip__v"])
    assert_same_tensor(seen.activations[attention][0, 0, 0], found.values["gradeclip__A_onehead"])
    assert_same_tensor(seen.activations[mixed][0], found.values["gradeclip__O"])
    for text in (0, 1):
        assert_same_tensor(seen.gradients[mixed][text], found.values[f"gradeclip__G_O__text{text}"])


@pytest.mark.parametrize("text", [0, 1])
def test_maskclip_as_in_grad_eclip(text):
    """There the cosine is multiplied by that of each patch's key with the class token's, behind the projection."""
    found = golden("r17-r19-r57-grad-eclip")
    exp = explained(found, "maskclip")[text]
    direction = found.values["text_features"][text]
    np.testing.assert_allclose(exp.tokens.ravel(), cosines(found.values["maskclip__v_final"], direction), atol=1e-6)
    keys = found.values["gradeclip__k_out"]
    similar = exp.tokens * cosines(keys[1:], keys[0]).reshape(4, 4)
    published = found.values[f"maskclip__raw_map__text{text}"]
    assert_same_map(similar, published)
    final = found.values[f"maskclip__final_map__text{text}"]
    np.testing.assert_allclose(enlarged(scaled(similar), final.shape), final, rtol=0, atol=1e-5)
    assert_another_map(exp.tokens, published, 0.1)


# Grad-ECLIP over the words


def shares(exp):
    """The authors' tail: no negative values, and a sum of 1."""
    kept = np.maximum(exp.tokens[0], 0)
    return kept / kept.sum()


@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize("form", ["notebook", "script_woksim"])
def test_grad_eclip_text_as_coded(form, blocks):
    """Of several blocks maps are added up first, negative values removed then."""
    found = golden("r20-grad-eclip-text")
    several = {"layers": tuple(range(-blocks, 0)), "layer_rule": "sum", "relu": "none"} if blocks > 1 else {}
    plain = {"weighting": "value*gradient"} if form == "script_woksim" else {}
    as_coded = plain | ({} if plain else {"departures": "padded_similarity"})
    exp = only(explained(found, "grad-eclip-text-as-coded", **several, **as_coded))
    published = found.values[f"text_map__{form}__n{blocks}"]
    assert_score(exp, found.values[f"score__n{blocks}"])
    np.testing.assert_allclose(shares(exp), published, rtol=0, atol=1e-5)
    intended = only(explained(found, "grad-eclip-text", **several, **plain))
    assert np.abs(shares(intended) - published).max() > 0.01


def test_grad_eclip_text_scales_similarity_over_padding_too():
    """In the last block of this golden the extremes lie on the text itself, in the one before they do not."""
    found = golden("r20-grad-eclip-text")
    choices = {"layers": (-2, -1), "layer_rule": "sum", "relu": "none"}
    exp = only(explained(found, "grad-eclip-text-as-coded", **choices))
    assert np.abs(shares(exp) - found.values["text_map__notebook__n2"]).max() > 1e-3


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_one_head_of_full_width_in_the_last_text_blocks(blocks):
    found = golden("r20-grad-eclip-text")
    layers = tuple(range(4 - blocks, 4))
    mixed, attention = [Tap("text", layer, "F3_HEADS") for layer in layers], Tap("text", 3, "F2")
    several = {"layers": layers, "layer_rule": "sum"} if blocks > 1 else {}
    seen = captured(found, "grad-eclip-text-as-coded", [*mixed, attention], **several)
    for number, tap in enumerate(mixed):
        assert_same_tensor(seen.gradients[tap][0], found.values[f"G_O__n{blocks}__{number}"])
    end = int(found.values["eot_position"])
    assert_same_tensor(seen.activations[attention][0, 0, end], found.values[f"self_attn__n{blocks}"])


# Generic relevance of both towers


@pytest.mark.parametrize(("name", "layers"), [("default", "last"), ("all", "all")])
def test_chefer_clip(name, layers):
    found = golden("r34-chefer-clip")
    exp = only(explained(found, "chefer-clip", layers=layers))
    assert_score(exp, found.values["score"])
    assert_same_map(exp.tokens, found.values[f"image_raw__{name}"][0])
    published = found.values[f"image_final__{name}__every5th"]
    assert_same_map(scaled(enlarged(exp.tokens, (224, 224)))[::5, ::5], published)


@pytest.mark.parametrize(("name", "layers"), [("default", "last"), ("all", "all")])
def test_chefer_clip_text(name, layers):
    found = golden("r34-chefer-clip")
    exp = only(explained(found, "chefer-clip-text", layers=layers))
    row = found.values[f"text_row__{name}"]
    end = found.values["input_ids"][0].tolist().index(END)
    assert_score(exp, found.values["score"])
    assert_same_map(exp.tokens[0], row[1:end])
    apart = exp.provenance["run"]["apart"]
    assert apart == pytest.approx({f"w{START}": row[0], f"w{END}": row[end], "padding": 0}, rel=1e-5, abs=1e-7)
    ours = normalised(exp.recipe, torch.from_numpy(exp.tokens[0])).numpy()
    np.testing.assert_allclose(ours, found.values[f"text_final__{name}__text0"], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("stream", "name"), [("vision", "image"), ("text", "text")])
def test_attention_of_both_towers_and_its_gradients(stream, name):
    found = golden("r34-chefer-clip")
    seen = found.model.capture(found.batch, stream=stream, site="F2", target="contrastive")
    for block in range(4):
        tap = Tap(stream, block, "F2")
        assert_same_tensor(seen.activations[tap][0], found.values[f"A_{name}__block{block}"][0])
        assert_same_tensor(seen.gradients[tap][0], found.values[f"G_{name}__block{block}"][0])


# Beyond Intuition on CLIP. Its blocks are those with a number above num_layers.


@pytest.mark.parametrize(("above", "layers"), [(1, (2, 3)), (-1, "all")])
def test_beyond_intuition_headwise_on_clip(above, layers):
    found = golden("r34-r39-bt-clip")
    text = int(found.values["text_index"])
    exp = explained(found, "beyond-intuition-headwise", layers=layers)[text]
    assert_score(exp, found.values["logits_per_image"][0, text])
    assert_same_map(exp.tokens, found.values[f"headwise__num_layers{above}"])


@pytest.mark.parametrize(("above", "layers"), [(1, (2, 3)), (-1, "all")])
def test_beyond_intuitions_relevance_on_clip(above, layers):
    found = golden("r34-r39-bt-clip")
    exps = explained(found, "chefer-clip", layers=layers)
    for exp, score in zip(exps, found.values["logits_per_image"][0], strict=True):
        assert_score(exp, score)
    assert_same_map(exps[0].tokens, found.values[f"generic__num_layers{above}__text0"])
    assert_another_map(exps[1].tokens, found.values[f"generic__num_layers{above}__text0"], 0.1)


# LeGrad

LEGRAD = [("default", (-2, -1)), ("all", "all")]


def summed(values, prefix, layers, depth):
    """What the maps of some blocks add up to."""
    numbers = range(depth) if layers == "all" else [layer % depth for layer in layers]
    return sum(values[f"{prefix}__block{number}"] for number in numbers)


@pytest.mark.parametrize(("name", "layers"), [*LEGRAD, ("last", (-1,))])
def test_legrad(name, layers):
    """The authors enlarge each block's map and add up then, which is the same, and end with min-max."""
    found = golden("r42-legrad-clip")
    exp = only(explained(found, "legrad", layers=layers))
    assert_same_map(exp.tokens, summed(found.values, "raw_map", layers, 4)[0])
    np.testing.assert_allclose(scaled(exp.heatmap), found.values[f"final_map__{name}"][0], rtol=0, atol=1e-5)


def test_legrad_reads_every_block_by_itself():
    found = golden("r42-legrad-clip")
    taps = [Tap("vision", block, "F2") for block in range(4)]
    seen = captured(found, "legrad", taps, layers="all")
    for block, tap in enumerate(taps):
        assert_same_tensor(seen.activations[tap][0], found.values[f"A__block{block}"][0])
        assert_same_tensor(seen.gradients[tap][0], found.values[f"G__block{block}"][0])
        assert block_score(found, seen, block, 0) == pytest.approx(
            float(found.values[f"score__block{block}"]), abs=1e-6
        )


# LeGrad on models that pool image tokens by attention


@pytest.mark.parametrize(("name", "layers"), LEGRAD)
def test_legrad_of_a_pooler_with_several_queries(name, layers):
    found = golden("r43-legrad-coca")
    exp = only(explained(found, "legrad-pooler-as-coded", layers=layers))
    published = summed(found.values, "raw_map", layers, 3)
    assert_same_map(exp.tokens, published)
    np.testing.assert_allclose(scaled(exp.heatmap), found.values[f"final_map__{name}"], rtol=0, atol=1e-5)
    assert_another_map(only(explained(found, "legrad-pooler", layers=layers)).tokens, published, 0.1)


def test_a_pooler_with_several_queries_reads_every_block():
    found = golden("r43-legrad-coca")
    taps = [Tap("pooler", block, "CROSS") for block in range(3)]
    seen = captured(found, "legrad-pooler-as-coded", taps, layers="all")
    for block, tap in enumerate(taps):
        assert_same_tensor(seen.gradients[tap][0], found.values[f"G__block{block}"])
        assert block_score(found, seen, block, 0, bare=True) == pytest.approx(
            float(found.values[f"score__block{block}"]), abs=1e-6
        )


@pytest.mark.parametrize(("name", "layers"), LEGRAD)
def test_legrad_of_siglips_pooler(name, layers):
    found = golden_siglip()
    exp, empty = explained(found, "legrad-pooler-as-coded", layers=layers)
    published = summed(found.values, "raw_map_text", layers, 3)
    assert_same_map(exp.tokens, published)
    assert_same_map(empty.tokens, summed(found.values, "raw_map_empty", layers, 3))
    np.testing.assert_allclose(exp.heatmap, found.values[f"final_map__{name}__plain"], rtol=0, atol=1e-5)
    corrected = np.where(scaled(empty.tokens) > 0.8, 0, exp.tokens)  # their threshold by an empty text
    ours = enlarged(scaled(corrected), (32, 32))
    np.testing.assert_allclose(ours, found.values[f"final_map__{name}__corrected"], rtol=0, atol=1e-5)
    assert_another_map(explained(found, "legrad-pooler", layers=layers)[0].tokens, published, 0.1)


def test_siglips_pooler_reads_every_block():
    found = golden_siglip()
    taps = [Tap("pooler", block, "CROSS") for block in range(3)]
    seen = captured(found, "legrad-pooler-as-coded", taps, layers="all")
    for pair, text in enumerate(("text", "empty")):
        for block, tap in enumerate(taps):
            assert_same_tensor(seen.gradients[tap][pair][:, 0], found.values[f"G_{text}__block{block}"])
            assert block_score(found, seen, block, pair, bare=True) == pytest.approx(
                float(found.values[f"score_{text}__block{block}"]), abs=1e-6
            )


# CLIP Surgery

SIX = (2, 3, 4, 5, 6, 7)
"""The last six blocks, as in the authors' code; the recipe's own layers are those of 12 blocks, moved to this depth."""


@pytest.mark.parametrize("text", [0, 1, 2])
def test_clip_surgery(text):
    found = golden("r58-clip-surgery")
    exp = explained(found, "clip-surgery", texts=[0, 1, 2], layers=SIX)[text]
    assert_same_map(exp.tokens.ravel(), found.values["similarity__token_norm"][0, 1:, text])
    np.testing.assert_allclose(exp.heatmap, found.values["final_map__token_norm"][..., text], rtol=0, atol=1e-5)
    whole, direction = found.values["image_class_token"], found.values["text_features"][text]
    assert_score(exp, cosines(whole, direction))
    fewer = explained(found, "clip-surgery", texts=[0, 1, 2], layers=SIX[1:])[text]
    assert_another_map(fewer.tokens, exp.tokens, 0.05)


@pytest.mark.parametrize("text", [0, 1, 2])
def test_clip_surgery_against_a_redundant_text(text):
    found = golden("r58-clip-surgery")
    choices = {"layers": SIX, "weighting": "similarity", "scale": "difference"}
    exp, _ = explained(found, "clip-surgery", texts=[text, 3], **choices)
    assert_same_map(exp.tokens.ravel(), found.values["similarity_redundant__token_norm"][0, 1:, text])
    published = found.values["final_map_redundant__token_norm"][..., text]
    np.testing.assert_allclose(exp.heatmap, published, rtol=0, atol=1e-5)
    assert_another_map(exp.tokens, found.values["similarity__token_norm"][0, 1:, text].reshape(4, 4), 0.1)
