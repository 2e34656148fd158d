"""BLIP-2 of transformers: own scores, maps of learned queries by hand, and no map per word."""

from __future__ import annotations

import models
import numpy as np
import pytest
import torch
from transformers import Blip2Config, Blip2ForImageTextRetrieval, Blip2Processor
from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

import vlcam
from vlcam.errors import RecipeError, UnknownNameError

QUERIES, LAYERS = 4, 4
TEXTS = ["a red dog", "blue", "unaffable dog on the grass"]


def blip2(seed=0):
    torch.manual_seed(seed)
    config = Blip2Config(
        vision_config={
            "hidden_size": 12,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 8,
            "initializer_range": 0.2,
        },
        qformer_config={
            "vocab_size": len(models.PIECES) + 2,
            "hidden_size": 16,
            "encoder_hidden_size": 12,
            "intermediate_size": 24,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 2,
            "max_position_embeddings": 16,
            "cross_attention_frequency": 2,
            "use_qformer_text_input": True,
        },
        num_query_tokens=QUERIES,
        image_text_hidden_size=8,
    )
    module = Blip2ForImageTextRetrieval(config).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return module


def processor():
    return Blip2Processor(
        BlipImageProcessorPil(size={"height": 32, "width": 32}), models.tokenizer(), num_query_tokens=QUERIES
    )


@pytest.fixture(scope="module")
def model():
    return vlcam.wrap(blip2(), processor(), name="blip2")


def given(texts, batch):
    made = models.tokenizer()(texts, padding=True, return_tensors="pt")
    pixels = models.pixels(batch=batch)
    return {
        "pixel_values": pixels.expand(len(texts), -1, -1, -1),
        **{k: made[k] for k in ("input_ids", "attention_mask")},
    }


def test_scores_are_the_models_own(model):
    batch = given(TEXTS, 1)
    module = model.adapter.module
    with torch.no_grad():
        itm = module(**batch, use_image_text_matching_head=True).logits_per_image
        itc = module(**batch, use_image_text_matching_head=False).logits_per_image[0]
    scores = model.scores(batch["pixel_values"][0], TEXTS)
    for row, score in enumerate(scores):
        assert score["itm_logit"].value == pytest.approx(itm[row, 1].item(), abs=1e-5)
        assert score["itm_probability"].value == pytest.approx(itm[row].softmax(0)[1].item(), abs=1e-5)
        assert score["contrastive_cosine"].value == pytest.approx(itc[row].item(), abs=1e-5)


def by_hand(head, text, layer):
    """Cross-attention of queries and its gradient in float64, out of the library's own eager attention."""
    module = blip2().double()
    module.set_attn_implementation("eager")
    kept = {}
    inner = module.qformer.encoder.layer[layer].crossattention.attention

    def keep(_, __, output):
        kept["probabilities"] = output[1]
        output[1].retain_grad()

    inner.register_forward_hook(keep)
    batch = given([text], 1)
    batch["pixel_values"] = batch["pixel_values"].double()
    made = module(**batch, use_image_text_matching_head=head == "itm").logits_per_image
    (made[0, 1] if head == "itm" else made[0, 0]).backward()
    return kept["probabilities"][0].detach(), kept["probabilities"].grad[0]


@pytest.mark.parametrize(("name", "head"), [("blip2-itm", "itm"), ("blip2-itc", "contrastive")])
@pytest.mark.parametrize("layer", [0, 2])
def test_the_mean_over_queries_by_hand(model, name, head, layer):
    attention, gradient = by_hand(head, TEXTS[2], layer)
    assert attention.shape == (2, QUERIES, 17)  # never rows of words
    found = model.explain(models.pixels(batch=1)[0], TEXTS[2], name, layer=layer)
    wanted = (attention * gradient.relu()).mean((0, 1))[1:].reshape(4, 4)
    np.testing.assert_allclose(found.tokens, wanted, atol=1e-5 * float(wanted.abs().max()))
    one = model.explain(models.pixels(batch=1)[0], TEXTS[2], name, layer=layer, queries=(1,))
    wanted = (attention * gradient.relu()).mean(0)[1, 1:].reshape(4, 4)
    np.testing.assert_allclose(one.tokens, wanted, atol=1e-5 * max(1e-6, float(wanted.abs().max())))


def test_the_image_side_of_cross_attention(model):
    recipe = vlcam.recipes()["context-gradcam"].recipe.replace(stream="pooler", layers="all", exclude=("cls",))
    found = model.explain(models.pixels(batch=1)[0], TEXTS[0], recipe)
    assert found.status in ("ok", "no positive evidence")
    assert found.provenance["run"]["layers"] == [0, 2]


def test_the_last_block_is_the_last_that_has_cross_attention(model):
    found = model.explain(models.pixels(batch=1)[0], TEXTS[0])
    assert found.recipe.name == "blip2-itm"
    assert found.provenance["run"]["layers"] == [2]
    with pytest.raises(UnknownNameError, match=r"CROSS of pooler block 3 does not exist.*CROSS is in block 0, 2"):
        model.explain(models.pixels(batch=1)[0], TEXTS[0], layer=3)


def test_words_are_refused_with_the_reason(model):
    with pytest.raises(RecipeError, match="learned queries"):
        model.explain(models.pixels(batch=1)[0], TEXTS[0], phrase="dog")
    with pytest.raises(UnknownNameError, match="learned queries"):
        model.explain(models.pixels(batch=1)[0], TEXTS[0], "lavis-itm")
    assert len(model.explain(models.pixels(batch=1)[0], TEXTS[0]).words) == 0


@pytest.mark.parametrize("name", ["blip2-itm", "blip2-itc", "pgc-gradcam"])
def test_a_batch_equals_singles_and_the_model_stays_as_found(model, name):
    pixels = models.pixels(batch=3)
    before = models.state(model.adapter.module)
    together = model.explain(pixels, TEXTS, name)
    for number, text in enumerate(TEXTS):
        alone = model.explain(pixels[number], text, name)
        np.testing.assert_allclose(together[number].tokens, alone.tokens, atol=1e-5 * np.abs(alone.tokens).max())
    after = models.state(model.adapter.module)
    assert before["hooks"] == after["hooks"]
    assert before["requires"] == after["requires"]


def test_one_image_runs_once_for_many_texts(model):
    rows = []
    handle = model.adapter.module.vision_model.register_forward_hook(lambda _, __, out: rows.append(len(out[0])))
    model.explain(models.pixels(batch=1)[0], TEXTS)
    handle.remove()
    assert rows == [1]


def test_a_saved_map_is_verified(model, tmp_path):
    found = model.explain(models.photo(), TEXTS[1], "blip2-itc")
    outcome = vlcam.open(found.save(tmp_path / "map.png")).verify(model)
    assert outcome.identical
    assert outcome.differences == ()


def test_half_precision_gives_a_finite_map():
    half = vlcam.wrap(blip2().to(torch.bfloat16), processor(), name="half")
    found = half.explain(models.pixels(batch=1)[0], TEXTS[0])
    assert np.isfinite(found.tokens).all()
