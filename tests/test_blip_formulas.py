"""Every named recipe on BLIP against a slow float64 evaluation of its formula, and LAVIS' own output."""

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

GOLDEN = Path(__file__).parent / "golden" / "r50-lavis-blip-itm"
TEXT = "a red circle and a blue dog"
ENC = len(models.PIECES) + 1


def double_pass(module, pixel_values, text, scalar):
    """Everything by hand in float64: eager attention probabilities and features, with gradients by autograd."""
    twin = copy.deepcopy(module).double()
    seen = {}

    def keep(key, pick):
        def hook(_, __, output):
            tensor = pick(output)
            tensor.retain_grad()
            seen[key] = tensor

        return hook

    for layer, block in enumerate(twin.text_encoder.encoder.layer):
        block.crossattention.self.register_forward_hook(keep(("CROSS", layer), lambda output: output[1]))
    for layer, block in enumerate(twin.vision_model.encoder.layers):
        sites = {
            "F1": (block.layer_norm1, lambda o: o),
            "F2": (block.self_attn, lambda o: o[1]),
            "F3": (block.self_attn, lambda o: o[0]),
            "F4": (block.layer_norm2, lambda o: o),
            "F5": (block.mlp, lambda o: o),
            "F6": (block, lambda o: o if isinstance(o, torch.Tensor) else o[0]),
        }
        for site, (part, pick) in sites.items():
            part.register_forward_hook(keep((site, layer), pick))
        block.self_attn.projection.register_forward_pre_hook(
            lambda _, args, layer=layer: keep(("F3_HEADS", layer), lambda o: o)(None, None, args[0])
        )
    coded = models.tokenizer()(text, return_tensors="pt")
    ids = coded["input_ids"]
    tokens = twin.vision_model(pixel_values.double()[None]).last_hidden_state
    tokens.retain_grad()
    seen["CONTEXT"] = tokens
    if scalar == "contrastive":
        hidden = twin.text_encoder(input_ids=ids, attention_mask=coded["attention_mask"]).last_hidden_state
        y = torch.cosine_similarity(twin.vision_proj(tokens[:, 0]), twin.text_proj(hidden[:, 0]))[0]
    else:
        opened = ids.clone()
        opened[:, 0] = ENC
        hidden = twin.text_encoder(
            input_ids=opened, attention_mask=coded["attention_mask"], encoder_hidden_states=tokens
        ).last_hidden_state
        logits = twin.itm_head(hidden[:, 0])[0]
        y = {
            "logit": logits[1],
            "margin": logits[1] - logits[0],
            "probability": logits.softmax(-1)[1],
            "log-probability": logits.log_softmax(-1)[1],
        }[scalar]
    y.backward()
    return seen, float(y.detach())


def cross_rows(seen, layer, relu=True):
    """E[t, j] of one block, heads averaged by a plain loop."""
    attention, gradient = seen["CROSS", layer][0].detach(), seen["CROSS", layer].grad[0]
    heads, rows, keys = attention.shape
    result = np.zeros((rows, keys))
    for h in range(heads):
        for t in range(rows):
            for j in range(keys):
                g = float(gradient[h, t, j])
                result[t, j] += float(attention[h, t, j]) * (max(g, 0.0) if relu else g) / heads
    return result


def channel_map(features, gradient, rows, relu=True):
    features, gradient = features[0].detach().numpy(), gradient[0].numpy()
    weights = gradient[rows].mean(0)
    values = np.array([sum(weights[c] * token[c] for c in range(len(weights))) for token in features])
    return (np.maximum(values, 0) if relu else values)[1:]


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("scale", ["logit", "margin", "probability", "log-probability"])
def test_lavis_itm_is_the_head_mean_of_attention_times_positive_gradient(model, blip, layer, scale):
    image = models.pixels()
    seen, y = double_pass(blip, image, TEXT, scale)
    expected = cross_rows(seen, layer)[1:-1, 1:].mean(0).reshape(4, 4)
    exp = model.explain(image, TEXT, "lavis-itm", layer=layer, scale=scale)
    np.testing.assert_allclose(exp.tokens, expected, atol=1e-5 * np.abs(expected).max(), rtol=1e-5)
    assert exp.provenance["run"]["target_value"] == pytest.approx(y, abs=1e-5)


def test_albef_itm_also_averages_the_special_tokens(model, blip):
    image = models.pixels(1)
    seen, _ = double_pass(blip, image, TEXT, "logit")
    expected = cross_rows(seen, 1)[:, 1:].mean(0).reshape(4, 4)
    exp = model.explain(image, TEXT, "albef-itm", layer=1)
    np.testing.assert_allclose(exp.tokens, expected, atol=1e-5 * expected.max(), rtol=1e-5)


def test_attention_cross_is_the_attention_alone(model, blip):
    image = models.pixels(2)
    seen, _ = double_pass(blip, image, TEXT, "logit")
    expected = seen["CROSS", 1][0].detach().mean(0)[1:-1, 1:].mean(0).reshape(4, 4).numpy()
    exp = model.explain(image, TEXT, "attention-cross", layer=1)
    np.testing.assert_allclose(exp.tokens, expected, rtol=1e-5)
    assert exp.provenance["run"]["target_value"] is None


def test_context_gradcam_sums_the_gradient_of_every_block_that_reads_the_tokens(model, blip):
    image = models.pixels(3)
    seen, _ = double_pass(blip, image, TEXT, "logit")
    tokens = seen["CONTEXT"]
    expected = channel_map(tokens, tokens.grad, slice(1, None), relu=False).reshape(4, 4)
    exp = model.explain(image, TEXT, "context-gradcam", relu="none")
    np.testing.assert_allclose(exp.tokens, expected, atol=1e-5 * np.abs(expected).max())
    np.testing.assert_array_equal(model.explain(image, TEXT, "context-gradcam").tokens, np.maximum(exp.tokens, 0))


def test_context_maps_of_single_blocks_add_up_to_the_shared_one(model):
    image = models.pixels(3)
    shared = model.explain(image, TEXT, "context-gradcam", relu="none").tokens
    single = [
        model.explain(image, TEXT, "context-gradcam", layer=i, layer_rule="single", relu="none").tokens
        for i in range(3)
    ]
    np.testing.assert_allclose(sum(single), shared, atol=1e-5 * np.abs(shared).max())
    assert not np.allclose(single[0], shared, atol=1e-3 * np.abs(shared).max())


@pytest.mark.parametrize("site", ["F1", "F3", "F3_HEADS", "F4", "F5", "F6"])
@pytest.mark.parametrize("rows", ["patches", "all", "cls"])
def test_pgc_gradcam_weights_channels_by_their_mean_gradient(model, blip, site, rows):
    image = models.pixels(4)
    seen, _ = double_pass(blip, image, TEXT, "logit")
    pooled = {"patches": slice(1, None), "all": slice(None), "cls": slice(0, 1)}[rows]
    tensor = seen[site, 1]
    expected = channel_map(tensor, tensor.grad, pooled, relu=False).reshape(4, 4)
    exp = model.explain(image, TEXT, "pgc-gradcam", layer=1, site=site, gradient_tokens=rows, relu="none")
    np.testing.assert_allclose(exp.tokens, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("queries", ["cls", "patches", "all"])
def test_vision_attention_maps_average_the_rows_that_the_recipe_names(model, blip, queries):
    image = models.pixels(5)
    seen, _ = double_pass(blip, image, TEXT, "contrastive")
    attention, gradient = seen["F2", 1][0].detach(), seen["F2", 1].grad[0]
    rows = {"cls": slice(0, 1), "patches": slice(1, None), "all": slice(None)}[queries]
    expected = (attention * gradient.relu()).mean(0)[rows, 1:].mean(0).reshape(4, 4).numpy()
    recipe = vlcam.recipes()["lavis-itm"].recipe.replace(
        site="F2", stream="vision", layers=(1,), target="contrastive", scale="cosine", queries=queries, exclude="cls"
    )
    np.testing.assert_allclose(model.explain(image, TEXT, recipe).tokens, expected, atol=1e-5 * expected.max())


def test_a_phrase_is_the_mean_of_its_tokens_and_a_word_of_its_pieces(model, blip):
    text = "a red unaffable dog"
    image = models.pixels(6)
    seen, _ = double_pass(blip, image, text, "logit")
    rows = cross_rows(seen, 0)[:, 1:]
    exp = model.explain(image, text, layer=0, phrase="red  UNAFFABLE")
    np.testing.assert_allclose(exp.tokens.ravel(), rows[2:6].mean(0), atol=1e-5 * rows.max())
    assert list(exp.words) == ["a", "red", "unaffable", "dog"]
    np.testing.assert_allclose(exp.words["unaffable"].tokens.ravel(), rows[3:6].mean(0), atol=1e-5 * rows.max())


@pytest.fixture(scope="module")
def golden():
    values = np.load(GOLDEN / "golden.npz")
    spec = json.loads((GOLDEN / "model.json").read_text())
    config = BlipConfig(
        text_config=spec["text_config"],
        vision_config=spec["vision_config"],
        image_text_hidden_size=spec["image_text_hidden_size"],
    )
    module = BlipForImageTextRetrieval(config).eval()
    missing = module.load_state_dict(load_file(GOLDEN / "model.safetensors"), strict=False).missing_keys
    assert all("position_ids" in key for key in missing)
    words = spec["vocabulary"][:20]
    made = BertTokenizer(vocab={word: i for i, word in enumerate(words)}, model_max_length=32)
    processor = BlipProcessor(BlipImageProcessorPil(size={"height": 48, "width": 48}), made)
    return vlcam.wrap(module, processor), values


@pytest.mark.parametrize("block", [6, 3])
def test_maps_equal_those_that_lavis_computes_on_a_padded_batch(golden, block):
    model, values = golden
    pixel_values = torch.from_numpy(values["pixel_values"])
    texts = ["a dog on the grass", "the unrelated red cat near a ball is on it"]
    for sample, exp in enumerate(model.explain(pixel_values, texts, "lavis-itm", layer=block)):
        published = values[f"gradcam__block{block}__sample{sample}"]
        np.testing.assert_allclose(exp.tokens, published[1], atol=1e-5 * published[1].max())
        assert exp.scores["itm_logit"].value == pytest.approx(float(values["score"][sample]), abs=1e-5)
        row = model.explain(
            pixel_values[sample], texts[sample], "lavis-itm", layer=block, queries="cls", exclude=("cls", "padding")
        )
        np.testing.assert_allclose(row.tokens, published[0], atol=1e-5 * published[0].max())
        for word in exp.word_maps:
            expected = published[[1 + index for index in word.rows]].mean(0)
            np.testing.assert_allclose(word.tokens, expected, atol=1e-5 * published.max())


def test_ids_and_pixels_that_come_ready_made_give_the_same_maps(golden):
    model, values = golden
    batch = {
        "pixel_values": torch.from_numpy(values["pixel_values"]),
        "input_ids": torch.from_numpy(values["input_ids"]),
        "attention_mask": torch.from_numpy(values["attention_mask"]),
    }
    before = batch["input_ids"].clone()
    exps = model.explain(batch, recipe="lavis-itm", layer=6)
    assert [exp.text for exp in exps] == ["a dog on the grass", "the unrelated red cat near a ball is on it"]
    for sample, exp in enumerate(exps):
        published = values[f"gradcam__block6__sample{sample}"][1]
        np.testing.assert_allclose(exp.tokens, published, atol=1e-5 * published.max())
    assert torch.equal(batch["input_ids"], before)
