"""AlbefRetrieval: equal to ALBEF's own code; cross-attention exists in the last blocks only, and that is said."""

from __future__ import annotations

import json
from pathlib import Path

import lavis_models as models
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import vlcam

GOLDEN = Path(__file__).parent.parent / "tests" / "golden" / "r49-albef-itm"
TEXTS = ["a red dog", "the unaffable cat near a ball is on the grass"]


@pytest.fixture(scope="module")
def golden():
    """The golden model as an `AlbefRetrieval`, its values, and the pairs by sample."""
    values = np.load(GOLDEN / "golden.npz")
    spec = json.loads((GOLDEN / "model.json").read_text())
    known = ("vocab_size", "intermediate_size", "max_position_embeddings", "fusion_layer", "layer_norm_eps")
    text = {key: spec["text"][key] for key in known} | {"encoder_width": 24}
    with models.vocabulary(spec["vocabulary"]):
        encoder = models.XBertEncoder(models.text_config(layers=8, heads=12, **text), add_pooling_layer=False)
        image = models.vision(side=48, patch=2, width=24)
        module = models.AlbefRetrieval(image, encoder, queue_size=4, embed_dim=16, max_txt_len=30).eval()
    weights = load_file(GOLDEN / "model.safetensors")
    # ALBEF's own code adds the embedding of type 0 to every token, LAVIS's adds none.
    of_type = weights.pop("text_encoder.embeddings.token_type_embeddings.weight")
    weights["text_encoder.embeddings.position_embeddings.weight"] += of_type[0]
    weights |= {f"vision_proj.{part}": torch.from_numpy(values[f"vision_proj_{part}"]) for part in ("weight", "bias")}
    assert not module.load_state_dict(weights, strict=False).unexpected_keys
    pixels = torch.from_numpy(values["pixel_values"])
    ids, mask = torch.from_numpy(values["input_ids"]), torch.from_numpy(values["attention_mask"])
    _project_texts(module, ids, mask, torch.from_numpy(values["text_features_itc"]))
    return vlcam.wrap(module, (None, None)), values, {"pixel_values": pixels, "input_ids": ids, "attention_mask": mask}


def _project_texts(module, ids, mask, features):
    """A text projection that makes the golden features of the golden texts."""
    with torch.no_grad():
        tokens = module.text_encoder(ids, attention_mask=mask, return_dict=True, mode="text").last_hidden_state[:, 0]
        module.text_proj.weight.copy_((torch.linalg.pinv(tokens.double()) @ features.double()).T)
        module.text_proj.bias.zero_()


def test_word_maps_equal_those_of_the_notebook(golden):
    model, values, batch = golden
    block = int(values["block_num"])
    for sample in range(2):
        one = {name: tensor[sample][None] for name, tensor in batch.items()}
        expected = values[f"gradcam_words__sample{sample}"]
        (exp,) = model.explain(one, recipe="albef-itm", layer=block)
        assert exp.scores["itm_logit"].value == pytest.approx(float(values[f"score__sample{sample}"]), abs=1e-5)
        np.testing.assert_allclose(exp.tokens, expected.mean(0), atol=1e-5 * expected.max())
        for position, row in enumerate(expected):
            (found,) = model.explain(
                one, recipe="albef-itm", layer=block, queries=(position,), exclude=("cls", "padding")
            )
            np.testing.assert_allclose(found.tokens, row, atol=1e-5 * expected.max())


def test_maps_equal_those_of_grounding_on_a_padded_batch(golden):
    model, values, batch = golden
    width = batch["input_ids"].shape[1]
    for sample, exp in enumerate(model.explain(batch, recipe="albef-itm", layer=int(values["block_num"]))):
        real = int(batch["attention_mask"][sample].sum())
        expected = values["grounding_itm"][sample] * width / real  # its mean counts padding, whose rows are zero
        np.testing.assert_allclose(exp.tokens, expected, atol=1e-5 * expected.max())


def test_maps_of_the_contrastive_score_equal_those_of_grounding(golden):
    model, values, batch = golden
    exps = model.explain(batch, recipe="albef-itc", layer=1)
    total = sum(exp.provenance["run"]["target_value"] for exp in exps)
    assert total == pytest.approx(float(values["score__itc"]), abs=1e-4)
    for sample, exp in enumerate(exps):
        expected = values["grounding_itc"][sample]
        np.testing.assert_allclose(exp.tokens, expected, atol=1e-5 * expected.max())


def test_scores_are_those_of_lavis(albef, retriever):
    pixels = models.pixels(3, batch=2)
    text = albef.tokenizer(TEXTS, padding="longest", truncation=True, max_length=16, return_tensors="pt")
    with torch.no_grad():
        seen = albef.visual_encoder.forward_features(pixels)
        mask = torch.ones(seen.shape[:2], dtype=torch.long)
        read = albef.text_encoder.forward_text(text).last_hidden_state
        fused = albef.text_encoder(
            encoder_embeds=read,
            attention_mask=text.attention_mask,
            encoder_hidden_states=seen,
            encoder_attention_mask=mask,
            return_dict=True,
            mode="fusion",
        ).last_hidden_state
        logits = albef.itm_head(fused[:, 0])
        texts = torch.nn.functional.normalize(albef.text_proj(read[:, 0]), dim=-1)
        images = torch.nn.functional.normalize(albef.vision_proj(seen[:, 0]), dim=-1)
        cosines = images @ texts.T
        shares = (cosines / albef.temp).softmax(1)
    for sample, scores in enumerate(retriever.scores(pixels, TEXTS)):
        assert scores["itm_logit"].value == pytest.approx(float(logits[sample, 1]), abs=1e-5)
        assert scores["contrastive_cosine"].value == pytest.approx(float(cosines[sample, sample]), abs=1e-6)
        assert scores["contrastive_logit"].value == pytest.approx(float(cosines[sample, sample]) / 0.07, abs=1e-4)
        assert scores["contrastive_probability"].value == pytest.approx(float(shares[sample, sample]), abs=1e-5)


def test_anatomy_says_which_blocks_look_at_the_image(retriever):
    rows = {(stream, blocks): sites.split() for stream, blocks, sites, _ in retriever.anatomy.rows()}
    assert "CROSS" not in rows["fusion", "0-1"]
    assert {"CROSS", "CONTEXT"} <= set(rows["fusion", "2-3"])
    assert "fusion blocks 0 to 1 read text alone; those from 2 on look at the image too" in str(retriever.anatomy)
    with pytest.raises(vlcam.UnknownNameError, match=r"reads text alone.*CROSS is in block 2, 3"):
        retriever.explain(models.pixels(), TEXTS[0], layer=1)


def test_published_layers_are_counted_over_the_blocks_that_look_at_the_image():
    model = vlcam.wrap(models.albef(text={"layers": 12, "fusion_layer": 6}), models.processors())
    exp = model.explain(models.pixels(), TEXTS[0], "albef-itm")
    assert exp.provenance["run"]["layers"] == [8]  # as ALBEF counts
    assert "counted over the blocks that have CROSS: 6, 7, 8, 9, 10, 11" in exp.provenance["run"]["fitted"]["layers"]
    assert model.explain(models.pixels(), TEXTS[0]).provenance["run"]["layers"] == [8]
    assert model.explain(models.pixels(), TEXTS[0], "context-gradcam").provenance["run"]["layers"] == list(range(6, 12))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types(dtype, retriever):
    model = vlcam.wrap(models.albef().to(dtype), models.processors())
    for recipe in ("lavis-itm", "context-gradcam", "albef-itc"):
        exp, other = (each.explain(models.pixels(), TEXTS[1], recipe) for each in (model, retriever))
        assert exp.tokens.dtype == np.float32
        tolerance = 1e-5 if dtype == torch.float64 else 0.2
        np.testing.assert_allclose(exp.tokens, other.tokens, atol=tolerance * np.abs(other.tokens).max())


def test_a_text_is_opened_by_cls(retriever):
    exp = retriever.explain(models.pixels(), "a RED dog!", layer=2)
    assert exp.provenance["text"]["pieces"] == ["[CLS]", "a", "red", "dog", "[SEP]"]
    assert list(exp.words) == ["a", "RED", "dog"]


def test_a_batch_equals_single_calls(retriever):
    pixels = models.pixels(4, batch=3)
    texts = [*TEXTS, "a ball"]
    for recipe in ("lavis-itm", "context-gradcam", "pgc-gradcam", "clip-gradcam"):
        many = retriever.explain(pixels, texts, recipe)
        for sample, exp in enumerate(many):
            alone = retriever.explain(pixels[sample], texts[sample], recipe)
            np.testing.assert_allclose(exp.tokens, alone.tokens, atol=1e-5 * np.abs(alone.tokens).max())


def test_momentum_copies_and_queues_are_left_alone(albef, retriever):
    before = {name: tensor.clone() for name, tensor in albef.state_dict().items()}
    retriever.explain(models.pixels(), TEXTS, layer=2)
    for name, tensor in albef.state_dict().items():
        assert torch.equal(tensor, before[name]), name
