"""Grad-ECLIP on BLIP's contrastive score against the maps of the authors' notebook; on ViT against its formula."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import models
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import BertTokenizer, BlipConfig, BlipForImageTextRetrieval, BlipProcessor
from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

import vlcam
from vlcam.anatomy import KEYS, QUERIES, VALUES, Tap
from vlcam.capture import capture
from vlcam.pairing import pair_up
from vlcam.plan import plan

GOLDEN = Path(__file__).parent / "golden" / "r21-grad-eclip-blip"
AS_CODED = {"recipe": "grad-eclip-as-coded", "departures": "head_scale"}
TEXT = "a red circle and a blue dog"


@pytest.fixture(scope="module")
def golden():
    spec = json.loads((GOLDEN / "model.json").read_text())
    config = BlipConfig(**{key: spec[key] for key in ("text_config", "vision_config", "image_text_hidden_size")})
    module = BlipForImageTextRetrieval(config).eval()
    missing = module.load_state_dict(load_file(GOLDEN / "model.safetensors"), strict=False).missing_keys
    assert all("position_ids" in key for key in missing)
    words = BertTokenizer(vocab={word: i for i, word in enumerate(spec["vocabulary"])}, model_max_length=32)
    processor = BlipProcessor(BlipImageProcessorPil(size={"height": 32, "width": 32}), words)
    values = dict(np.load(GOLDEN / "golden.npz"))
    batch = {name: torch.from_numpy(values[name]) for name in ("pixel_values", "input_ids", "attention_mask")}
    return vlcam.wrap(module, processor), values, batch


def explained(golden, **choices):
    model, _, batch = golden
    (found,) = model.explain(batch, **choices)
    return found


def scaled(values):
    return (values - values.min()) / (values.max() - values.min())


def assert_same_map(ours, published):
    np.testing.assert_allclose(ours, published, rtol=0, atol=1e-5 * np.abs(published).max())
    np.testing.assert_allclose(scaled(ours), scaled(published), rtol=0, atol=1e-5)


def assert_same_tensor(ours, published):
    np.testing.assert_allclose(ours, published, rtol=1e-5, atol=1e-6 * max(1, np.abs(published).max()))


@pytest.mark.parametrize("form", ["ksim", "woksim"])
def test_grad_eclip_as_the_notebook_for_blip_makes_it(golden, form):
    weighting = {"ksim": "value*gradient*similarity", "woksim": "value*gradient"}[form]
    found = explained(golden, **AS_CODED, weighting=weighting)
    _, values, _ = golden
    assert_same_map(found.tokens, values[f"raw_map__{form}"])
    assert (found.recipe.target, found.recipe.scale) == ("contrastive", "cosine")
    assert found.provenance["run"]["target_value"] == pytest.approx(float(values["score"]), abs=1e-6)
    assert found.scores["contrastive_cosine"].value == pytest.approx(float(values["score_unmodified_model"]), abs=1e-6)


def test_what_the_notebook_reads_inside_the_last_block(golden):
    model, values, batch = golden
    pairs = pair_up(model.adapter, batch, None)
    job = plan(model.adapter, AS_CODED["recipe"], {"departures": "head_scale"})
    edits = model._making(pairs)._edits(job)
    sites = {"q": QUERIES, "k": KEYS, "v": VALUES}
    taps = {name: Tap("vision", 2, site) for name, site in sites.items()}
    heads = Tap("vision", 2, "F3_HEADS")
    (seen,) = capture(model.adapter, pairs.inputs, [*taps.values(), heads], [job.target], edits=edits)
    for name, tap in taps.items():
        joined = seen.activations[tap][0].transpose(0, 1).flatten(1)
        assert_same_tensor(joined, values[name])
    assert_same_tensor(seen.gradients[heads][0], values["G_O"])


def test_the_notebook_explains_neither_the_model_nor_one_head_on_its_own_scale(golden):
    _, values, _ = golden
    for name in ("grad-eclip", "grad-eclip-as-coded"):
        other = explained(golden, recipe=name)
        assert np.abs(scaled(other.tokens) - scaled(values["raw_map__ksim"])).max() > 0.01
    plain = explained(golden, recipe="grad-eclip")
    assert plain.provenance["run"]["target_value"] == pytest.approx(float(values["score_unmodified_model"]), abs=1e-6)


# On the models as they are


def by_hand(values, queries, keys, gradient):
    """Grad-ECLIP without its ReLU, [cells], from [N, D] each and the class token's gradient [D], loop by loop."""
    cosines = [float(torch.cosine_similarity(queries[0], key, dim=0)) for key in keys[1:]]
    shares = [(each - min(cosines)) / (max(cosines) - min(cosines)) for each in cosines]
    return [share * float(value @ gradient) for share, value in zip(shares, values[1:], strict=True)]


@pytest.mark.parametrize("layer", [0, 2])
def test_grad_eclip_on_blip_with_its_own_heads(model, blip, layer):
    pixels = models.pixels(3)
    found = model.explain(pixels, TEXT, "grad-eclip", layer=layer, relu="none")
    twin, seen = copy.deepcopy(blip).double(), {}
    attention = twin.vision_model.encoder.layers[layer].self_attn
    attention.qkv.register_forward_hook(lambda _, __, made: seen.update(qkv=made[0].detach()))
    attention.projection.register_forward_pre_hook(lambda _, given: seen.update(heads=given[0]))
    coded = models.tokenizer()(TEXT, return_tensors="pt")
    y = twin(pixel_values=pixels.double()[None], **coded, use_itm_head=False).itm_score[0, 0]
    (gradient,) = torch.autograd.grad(y, seen["heads"])
    queries, keys, values = seen["qkv"].chunk(3, -1)
    wanted = np.array(by_hand(values, queries, keys, gradient[0, 0]))
    np.testing.assert_allclose(found.tokens.ravel(), wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    assert found.provenance["run"]["target_value"] == pytest.approx(y.item(), abs=1e-6)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("as_coded", [False, True])
def test_grad_eclip_on_vit_explains_the_logit_of_a_class(implementation, as_coded):
    module = models.classifier("vit")
    twin, seen = copy.deepcopy(module).double(), {}
    module.set_attn_implementation(implementation)
    twin.set_attn_implementation("eager")
    part = twin.vit.layers[-1].attention
    if as_coded:  # the scale stays as it was built
        part.num_attention_heads, part.attention_head_size, part.head_dim = 1, 32, 32
    for name, projection in (("q", part.q_proj), ("k", part.k_proj), ("v", part.v_proj)):
        projection.register_forward_hook(lambda _, __, made, name=name: seen.update({name: made[0].detach()}))
    part.o_proj.register_forward_pre_hook(lambda _, given: seen.update(heads=given[0]))
    pixels = models.pixels(1)
    y = twin(pixel_values=pixels.double()[None]).logits[0, 3]
    (gradient,) = torch.autograd.grad(y, seen["heads"])
    wanted = np.array(by_hand(seen["v"], seen["q"], seen["k"], gradient[0, 0]))
    name, choices = ("grad-eclip-as-coded", {"departures": "head_scale"}) if as_coded else ("grad-eclip", {})
    found = vlcam.wrap(module).explain(pixels, None, name, target=3, relu="none", **choices)
    np.testing.assert_allclose(found.tokens.ravel(), wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    assert (found.recipe.target, found.recipe.scale) == ("class", "logit")
    assert found.provenance["run"]["target_value"] == pytest.approx(y.item(), abs=1e-5)


@pytest.mark.parametrize("name", ["grad-eclip", "grad-eclip-as-coded"])
def test_the_model_is_left_as_found(model, blip, name):
    before = models.state(blip)
    model.explain(models.pixels(), TEXT, name)
    models.assert_same(before, models.state(blip))
    with pytest.raises(ZeroDivisionError):
        model.explain(models.pixels(), TEXT, name, target=lambda _: 1 / 0)
    models.assert_same(before, models.state(blip))


def test_three_pairs_at_once_are_three_single_pairs(model):
    texts = ["a red circle", "a dog on the grass", "a blue ball is unaffable"]
    pixels = models.pixels(5, batch=3)
    for name in ("grad-eclip", "grad-eclip-as-coded"):
        for number, found in enumerate(model.explain(pixels, texts, name, relu="none")):
            alone = model.explain(pixels[number], texts[number], name, relu="none")
            np.testing.assert_allclose(found.tokens, alone.tokens, rtol=0, atol=1e-5 * np.abs(alone.tokens).max())


def test_the_embedded_matcher_takes_grad_eclip_by_name():
    model = vlcam.load("tiny-blip-itm")
    scene = next(vlcam.scenes.generate(1, seed=7))
    for name in ("grad-eclip", "grad-eclip-as-coded"):
        found = model.explain(scene.image, scene.caption, name)
        assert (found.status, found.recipe.target, found.recipe.scale) == ("ok", "contrastive", "cosine")
