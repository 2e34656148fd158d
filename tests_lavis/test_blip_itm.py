"""BlipITM: equal to LAVIS's own forward and its compute_gradcam; the model is left as found."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import lavis_models as models
import numpy as np
import pytest
import torch
from lavis.models.blip_models.blip_image_text_matching import compute_gradcam
from safetensors.torch import load_file

import vlcam
from vlcam_adapters.blip_weights import transformers_name

PAGE = Path(__file__).parent.parent / "docs" / "blip.md"
GOLDEN = Path(__file__).parent.parent / "tests" / "golden" / "r50-lavis-blip-itm"
TEXTS = ["a red dog", "the unaffable cat near a ball is on the grass"]


@pytest.fixture(scope="module")
def published():
    """A model of the grid and the heads that `compute_gradcam` is written for."""
    module = models.blip(text={"heads": 12, "layers": 5}, side=96, patch=4, seed=1)
    pixels = models.pixels(2, side=96, batch=2)
    twin = copy.deepcopy(module)
    tokens = twin.tokenizer(TEXTS, padding="longest", truncation=True, max_length=16, return_tensors="pt")
    maps = {block: compute_gradcam(twin, pixels, TEXTS, tokens, block_num=block)[0] for block in (1, 3)}
    return vlcam.wrap(module, models.processors(96)), pixels, maps


@pytest.mark.parametrize("block", [1, 3])
def test_maps_equal_those_of_compute_gradcam_on_a_padded_batch(published, block):
    model, pixels, maps = published
    for sample, exp in enumerate(model.explain(pixels, TEXTS, "lavis-itm", layer=block)):
        expected = maps[block][sample].numpy()
        largest = expected.max()
        np.testing.assert_allclose(exp.tokens, expected[1], atol=1e-6 * largest)
        for word in exp.word_maps:
            rows = expected[[1 + row for row in word.rows]]
            np.testing.assert_allclose(word.tokens, rows.mean(0), atol=1e-6 * largest)
        first = model.explain(pixels[sample], TEXTS[sample], layer=block, queries="cls", exclude=("cls", "padding"))
        np.testing.assert_allclose(first.tokens, expected[0], atol=1e-6 * largest)
        for position in range(1, len(exp.provenance["text"]["ids"]) - 1):
            row = model.explain(
                pixels[sample], TEXTS[sample], layer=block, queries=(position,), exclude=("cls", "padding")
            )
            np.testing.assert_allclose(row.tokens, expected[1 + position], atol=1e-6 * largest)


def test_maps_equal_the_golden_ones_on_a_real_lavis_object():
    values = np.load(GOLDEN / "golden.npz")
    spec = json.loads((GOLDEN / "model.json").read_text())
    text = {key: spec["text_config"][key] for key in ("vocab_size", "intermediate_size", "max_position_embeddings")}
    text |= {"encoder_width": 24, "layer_norm_eps": spec["text_config"]["layer_norm_eps"]}
    with models.vocabulary(spec["vocabulary"][:20]):
        encoder = models.XBertEncoder(models.text_config(layers=8, heads=12, **text), add_pooling_layer=False)
        module = models.BlipITM(models.vision(side=48, patch=2, width=24), encoder, embed_dim=16).eval()
    named = {transformers_name(name): name for name in module.state_dict()}
    weights = {named[name]: tensor for name, tensor in load_file(GOLDEN / "model.safetensors").items() if name in named}
    missing = module.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys
    assert all("position_ids" in name for name in missing.missing_keys)
    model = vlcam.wrap(module, (None, None))
    texts = ["a dog on the grass", "the unrelated red cat near a ball is on it"]
    pixels = torch.from_numpy(values["pixel_values"])
    for block in (6, 3):
        for sample, exp in enumerate(model.explain(pixels, texts, "lavis-itm", layer=block)):
            expected = values[f"gradcam__block{block}__sample{sample}"]
            np.testing.assert_allclose(exp.tokens, expected[1], atol=1e-5 * expected[1].max())
            assert exp.scores["itm_logit"].value == pytest.approx(float(values["score"][sample]), abs=1e-5)
            for word in exp.word_maps:
                rows = expected[[1 + row for row in word.rows]]
                np.testing.assert_allclose(word.tokens, rows.mean(0), atol=1e-5 * expected.max())
    ids = torch.from_numpy(values["input_ids_enc"])
    batch = {"pixel_values": pixels, "input_ids": ids, "attention_mask": torch.from_numpy(values["attention_mask"])}
    exp = model.explain(batch, recipe="lavis-itm", layer=6)[1]
    assert exp.text == texts[1]
    np.testing.assert_allclose(exp.tokens, values["gradcam__block6__sample1"][1], atol=1e-7)


def test_scores_are_those_of_the_model_itself(blip, matcher):
    pixels = models.pixels(3, batch=2)
    samples = {"image": pixels, "text_input": TEXTS}
    with torch.no_grad():
        logits, cosines = blip(samples, match_head="itm"), blip(samples, match_head="itc")
    for sample, scores in enumerate(matcher.scores(pixels, TEXTS)):
        assert scores["itm_logit"].value == pytest.approx(float(logits[sample, 1]), abs=1e-6)
        assert scores["contrastive_cosine"].value == pytest.approx(float(cosines[sample, sample]), abs=1e-6)
        assert scores["contrastive_cosine"].kind == "cosine"


def test_a_text_that_meets_the_image_is_opened_by_enc(matcher, blip):
    exp = matcher.explain(models.pixels(), TEXTS[0], layer=1)
    text = exp.provenance["text"]
    assert text["pieces"] == ["[ENC]", "a", "red", "dog", "[SEP]"]
    assert text["ids"][0] == blip.tokenizer.enc_token_id
    assert exp.provenance["versions"]["lavis"] == "1.0.2"


def test_the_model_is_left_as_found(blip):
    blip.train()
    blip.text_encoder.encoder.layer[1].crossattention.self.save_attention = True
    blip.itm_head.weight.requires_grad_(False)
    parts = list(blip.modules())
    before = models.state(blip)
    model = vlcam.wrap(blip, models.processors())
    model.explain(models.pixels(), TEXTS[0], layer=1)
    model.explain(models.pixels(), TEXTS[0], "pgc-gradcam", target="contrastive", layer=0)
    with pytest.raises(vlcam.EvidenceError):
        model.explain(models.pixels(), TEXTS[0], layer=3)
    assert list(blip.modules()) == parts
    assert models.same(before, models.state(blip))
    attention = blip.text_encoder.encoder.layer[1].crossattention.self
    assert attention.save_attention
    assert not hasattr(attention, "attention_map")
    attention.save_attention = False
    blip.itm_head.weight.requires_grad_(True)
    blip.eval()


def test_ten_captions_on_one_image_run_the_image_once(blip, matcher):
    runs = {"vision": 0, "keys": []}
    attention = blip.text_encoder.encoder.layer[0].crossattention.self
    hooks = [
        blip.visual_encoder.blocks[0].register_forward_hook(lambda *_: runs.update(vision=runs["vision"] + 1)),
        attention.key.register_forward_pre_hook(lambda _, args: runs["keys"].append(len(args[0]))),
    ]
    texts = [f"a red dog {'on the grass ' * count}" for count in range(10)]
    many = matcher.explain(models.pixels(), texts, layer=2)
    for hook in hooks:
        hook.remove()
    assert runs["vision"] == 1
    assert set(runs["keys"]) == {10}  # hooks of others see the batch as it is
    for text, exp in zip(texts, many, strict=True):
        alone = matcher.explain(models.pixels(), text, layer=2)
        np.testing.assert_allclose(exp.tokens, alone.tokens, atol=1e-5 * alone.tokens.max())


def test_texts_pass_the_text_processor_and_words_keep_their_places(matcher):
    typed = "  A RED, unaffable   DOG!! (on the grass)."
    exp = matcher.explain(models.pixels(), typed, layer=1)
    assert list(exp.words) == ["A", "RED", "unaffable", "DOG", "on", "the", "grass"]
    assert exp.text == typed
    for word in exp.word_maps:
        assert typed[slice(*word.span)] == word.word
    plain = matcher.explain(models.pixels(), "a red, unaffable dog on the grass", layer=1)
    np.testing.assert_array_equal(exp.tokens, plain.tokens)
    as_typed = vlcam.wrap(matcher.adapter.module, (models.processors()[0], None))
    assert as_typed.explain(models.pixels(), "a dog!", layer=1).provenance["text"]["pieces"][-2] == "[UNK]"


def test_what_the_model_does_not_read_is_on_record(matcher):
    exp = matcher.explain(models.pixels(), "a red dog on the grass near the unaffable cat near it, the ball", layer=1)
    assert len(exp.provenance["text"]["ids"]) == 16
    assert exp.provenance["text"]["cut"] == ["the", "ball"]
    with pytest.raises(vlcam.InputError, match="cut off"):
        matcher.explain(models.pixels(), " ".join(["dog"] * 60), layer=1, strict=True)


def test_images_are_prepared_as_by_the_processor(matcher):
    image = models.picture()
    prepared = matcher.adapter.prepare_images([vlcam.images.open_image(image)])
    torch.testing.assert_close(prepared.pixel_values[0], models.processors()[0](image), rtol=0, atol=0)
    assert [step["step"] for step in prepared.steps[0]] == ["processor", "resize", "rescale", "normalize"]
    exp = matcher.explain(image, TEXTS[0], layer=1)
    assert exp.heatmap.shape == (40, 64)
    assert exp.verify(matcher).identical


@pytest.mark.parametrize("processor", [None, models.processors()[0], (3, None)])
def test_missing_processors_are_asked_for(blip, processor):
    with pytest.raises(vlcam.AdapterError, match="load_model_and_preprocess"):
        vlcam.wrap(blip, processor)


def test_processors_come_as_lavis_returns_them(blip):
    image, text = models.processors()
    model = vlcam.wrap(blip, ({"train": None, "eval": image}, {"train": None, "eval": text}))
    assert model.explain(models.picture(), "A DOG!", layer=1).status == "ok"


def test_a_vision_tower_under_checkpointing_gives_the_same_maps():
    plain = vlcam.wrap(models.blip(), (None, None))
    module = models.blip(use_grad_checkpointing=True, ckpt_layer=1)
    wrapped = vlcam.wrap(module, (None, None))
    for recipe in ("pgc-gradcam", "raw-attention"):
        for layer in (0, 1):
            one, other = (each.explain(models.pixels(), TEXTS[0], recipe, layer=layer) for each in (plain, wrapped))
            np.testing.assert_array_equal(one.tokens, other.tokens)


def test_every_site_of_every_block_is_reached(matcher):
    for stream in matcher.anatomy.streams.values():
        for site in stream.blocks[0].sites:
            found = matcher.capture(models.pixels(), TEXTS[0], stream=stream.name, site=site, target="itm")
            assert len(found.activations) == len(stream.blocks)
            assert any(gradient is not None and gradient.any() for gradient in found.gradients.values()), site


def test_every_default_recipe_runs(matcher):
    assert len(matcher.sweep(models.pixels(), TEXTS[0], empty="keep")) > 10


def test_the_code_on_the_documentation_page_runs(tmp_path, monkeypatch, blip):
    code = PAGE.read_text().partition("```py\n")[2].partition("```")[0]
    models.picture().save(tmp_path / "merlion.png")
    monkeypatch.chdir(tmp_path)
    made = ({"eval": each} for each in models.processors())
    monkeypatch.setattr("lavis.models.load_model_and_preprocess", lambda *_, is_eval: (blip.train(not is_eval), *made))
    exec(code.replace("statue", "dog").replace("layer=6", "layer=1"), {})
    assert (tmp_path / "dog.png").stat().st_size > 0


def test_adapters_for_newer_libraries_are_left_out_with_a_word():
    code = "import vlcam.adapter; print(*(each.__name__ for each in vlcam.adapter.adapters()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"BlipItmLavis", "AlbefLavis", "VitTorchvision"} <= set(done.stdout.split())
    assert "BlipItmHF" not in done.stdout
    assert "left out (vlcam): made for transformers>=5.0, and 4.26.1 is installed" in done.stderr
    assert done.stderr.count("AdapterWarning") == 2  # for transformers and for timm
