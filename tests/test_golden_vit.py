"""Recipes on vision transformers against the maps of the authors' own code, see the NOTES.md of each golden."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from timm.models.vision_transformer import VisionTransformer

import vlcam
from vlcam.adapter import Inputs
from vlcam.anatomy import SCORES, Tap
from vlcam.capture import capture
from vlcam.maps import normalised
from vlcam.targets import Target

GOLDEN = Path(__file__).parent / "golden"


@functools.cache
def golden(name):
    """The model of a golden wrapped, what its authors' code gave, the image and the explained class."""
    folder = GOLDEN / name
    spec = json.loads((folder / "model.json").read_text())
    module = VisionTransformer(**spec["args"], norm_layer=functools.partial(torch.nn.LayerNorm, eps=1e-6))
    module.load_state_dict(load_file(folder / "model.safetensors"))
    values = dict(np.load(folder / "golden.npz"))
    return SimpleNamespace(
        model=vlcam.wrap(module.eval()),
        values=values,
        pixels=torch.from_numpy(values["pixel_values"][0]),
        label=int(values["class_index"]),
    )


def explained(found, recipe, **choices):
    exp = found.model.explain(found.pixels, target=found.label, recipe=recipe, **choices)
    assert exp.scores["class_logit"].value == pytest.approx(float(found.values["score"]), abs=1e-6, rel=1e-6)
    return exp


def scaled(values):
    return (values - values.min()) / (values.max() - values.min())


def assert_same_map(ours, published):
    """Equal as they are, relative to the largest value, and after min-max."""
    np.testing.assert_allclose(ours, published, rtol=0, atol=1e-5 * np.abs(published).max())
    np.testing.assert_allclose(scaled(ours), scaled(published), rtol=0, atol=1e-5)


def assert_same_tensor(ours, published):
    np.testing.assert_allclose(ours, published, rtol=1e-5, atol=1e-6 * max(1, np.abs(published).max()))


def enlarged(tokens, size):
    """Bilinear interpolation as the authors do it, by torch."""
    grid = torch.from_numpy(tokens)[None, None]
    return torch.nn.functional.interpolate(grid, size=size, mode="bilinear", align_corners=False)[0, 0].numpy()


def captured(found, site, *, direct=False):
    """Activations and gradients of every block, first block first."""
    adapter, label = found.model.adapter, found.label
    taps = [Tap("vision", layer, site) for layer in range(len(adapter.anatomy.stream("vision").blocks))]
    target = Target("class", "class_logit", lambda logits: logits[:, label], classes=(label,))
    inputs = Inputs(adapter.accept_pixels(found.pixels[None]), None, (0,))
    (seen,) = capture(adapter, inputs, taps, [target], direct=direct)
    return [seen.activations[tap][0] for tap in taps], [seen.gradients[tap][0] for tap in taps]


@pytest.mark.parametrize(
    "name",
    ["r25-bt-baselines", "r27-r28-vitexplain", "r29-r24-r33-vit-14x14", "r33-chefer-vit", "r41-agcam"],
)
def test_the_model_says_what_the_authors_model_said(name):
    found = golden(name)
    assert_same_tensor(found.model.adapter.logits(found.pixels[None]).detach(), found.values["logits"])


# Beyond Intuition's baselines: rollout, and relevance with the mean over heads first


@pytest.mark.parametrize("start", [0, 1])
def test_rollout_from_the_first_or_the_second_block(start):
    found = golden("r25-bt-baselines")
    exp = explained(found, "attention-rollout", layer=range(start, 8))
    assert_same_map(exp.tokens, found.values[f"rollout__start{start}"])


@pytest.mark.parametrize("start", [1, 2])
def test_relevance_with_the_mean_over_heads_first(start):
    """The authors count blocks from 1 here."""
    found = golden("r25-bt-baselines")
    exp = explained(found, "chefer-generic-heads-first", layer=range(start - 1, 8))
    assert_same_map(exp.tokens, found.values[f"genattr__start{start}"])


def test_the_order_of_heads_and_relu_matters():
    found = golden("r25-bt-baselines")
    other = explained(found, "chefer-generic")
    assert np.abs(scaled(other.tokens) - scaled(found.values["genattr__start1"])).max() > 0.1


# vit-explain


@pytest.mark.parametrize("discard", [0.9, 0.5, 0.0])
@pytest.mark.parametrize("heads", ["mean", "max", "min"])
def test_vitexplain_rollout_as_coded(heads, discard):
    found = golden("r27-r28-vitexplain")
    published = found.values[f"map__{heads}__discard{discard}"]
    exp = explained(found, "vitexplain-rollout-as-coded", heads=heads, discard=discard)
    assert_same_map(normalised(exp.recipe, torch.from_numpy(exp.tokens)).numpy(), published)
    intended = explained(found, "vitexplain-rollout", heads=heads, discard=discard)
    if (heads, discard) == ("mean", 0.0):  # the rows of a mean of probabilities sum to 1 as they are
        assert_same_map(scaled(intended.tokens), scaled(published))
    else:
        assert np.abs(scaled(intended.tokens) - scaled(published)).max() > 0.02


@pytest.mark.parametrize("discard", [0.9, 0.5, 0.0])
def test_vitexplain_grad_rollout_as_coded(discard):
    found = golden("r27-r28-vitexplain")
    published = found.values[f"map__discard{discard}"]
    exp = explained(found, "vitexplain-grad-rollout-as-coded", discard=discard)
    assert_same_map(normalised(exp.recipe, torch.from_numpy(exp.tokens)).numpy(), published)
    intended = explained(found, "vitexplain-grad-rollout", discard=discard)
    assert np.abs(scaled(intended.tokens) - scaled(published)).max() > 0.1


def test_vitexplain_stores_the_gradients_of_the_scores_last_block_first():
    found = golden("r27-r28-vitexplain")
    attention, _ = captured(found, "F2")
    _, gradients = captured(found, SCORES)
    for block in range(4):
        assert_same_tensor(attention[block], found.values[f"A__block{block}"][0])
        assert_same_tensor(gradients[block], found.values[f"stored_gradient__{3 - block}"][0])


# Single maps of the last block, and the enlarged relevance, on a grid of 14 x 14


def test_raw_attention_of_the_class_token():
    found = golden("r29-r24-r33-vit-14x14")
    exp = explained(found, "raw-attention")
    assert_same_map(scaled(exp.tokens), found.values["bt_raw_attention"])


@pytest.mark.parametrize("published", ["cam_attn", "bt_cam_attn"])
def test_attention_gradcam_of_the_class_token(published):
    found = golden("r29-r24-r33-vit-14x14")
    exp = explained(found, "attn-gradcam")
    assert_same_map(scaled(exp.tokens), found.values[published])


def test_last_attention_and_its_gradient_on_14x14():
    found = golden("r29-r24-r33-vit-14x14")
    attention, gradients = captured(found, "F2")
    assert_same_tensor(attention[-1][:, 0], found.values["A_last_cls_row"])
    assert_same_tensor(gradients[-1][:, 0], found.values["G_last_cls_row"])


def test_chefer_generic_on_14x14():
    found = golden("r29-r24-r33-vit-14x14")
    assert_same_map(explained(found, "chefer-generic").tokens, found.values["chefer_raw"])


def test_the_authors_enlarge_first_and_a_heatmap_is_normalised_first():
    """Interpolation keeps affine relations: the two orders differ by a scale and a shift, and by nothing else."""
    found = golden("r29-r24-r33-vit-14x14")
    exp = explained(found, "chefer-generic", normalize="minmax", upsample="bilinear")
    published = found.values["chefer_final__every5th"]
    assert_same_map(scaled(enlarged(exp.tokens, (224, 224)))[::5, ::5], published)
    assert exp.heatmap.shape == (224, 224)
    assert_same_map(scaled(exp.heatmap)[::5, ::5], published)
    # Half-pixel centres: no pixel lies on the centre of a token, so the extremes 0 and 1 are not reached.
    assert exp.heatmap.min() > 0
    assert exp.heatmap.max() < 1
    assert 1e-3 < np.abs(exp.heatmap[::5, ::5] - published).max() < 0.1


# Generic relevance


def test_chefer_generic():
    found = golden("r33-chefer-vit")
    assert_same_map(explained(found, "chefer-generic").tokens, found.values["raw_map"])
    attention, gradients = captured(found, "F2")
    for block in range(4):
        assert_same_tensor(attention[block], found.values[f"A__block{block}"][0])
        assert_same_tensor(gradients[block], found.values[f"G__block{block}"][0])


def test_the_default_class_is_the_one_with_the_highest_logit():
    found = golden("r33-chefer-vit")
    exp = found.model.explain(found.pixels, recipe="chefer-generic")
    assert_same_map(exp.tokens, found.values["raw_map"])


# AGCAM


def test_agcam():
    found = golden("r41-agcam")
    exp = explained(found, "agcam")
    assert_same_map(exp.tokens, found.values["raw_map"])
    assert_same_map(scaled(enlarged(exp.tokens, (224, 224)))[::5, ::5], found.values["final_map__every5th"])


def test_agcam_cuts_the_graph_before_attention():
    found = golden("r41-agcam")
    scores, _ = captured(found, SCORES, direct=True)
    _, gradients = captured(found, "F2", direct=True)
    for block in range(4):
        assert_same_tensor(scores[block][:, 0], found.values[f"S__block{block}"])
        assert_same_tensor(gradients[block][:, 0], found.values[f"G__block{block}"])
        assert not gradients[block][:, 1:].any()
