"""The BLIP adapter: same scores as the model's own forward, sites where they should be, sizes, first token, loading."""

from __future__ import annotations

import models
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import BlipConfig, BlipForImageTextRetrieval, BlipProcessor
from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

import vlcam
from vlcam.anatomy import Tap

TEXT = "a red circle and a blue dog"
ENC = len(models.PIECES) + 1


def own_forward(module, image, text, *, first=None, use_itm_head=True, **options):
    coded = models.tokenizer()(text, return_tensors="pt")
    ids = coded["input_ids"].clone()
    if first is not None:
        ids[:, 0] = first
    with torch.no_grad():
        return module(
            input_ids=ids,
            attention_mask=coded["attention_mask"],
            pixel_values=image[None],
            use_itm_head=use_itm_head,
            **options,
        ).itm_score


@pytest.mark.parametrize(("token", "first"), [("enc", ENC), ("cls", None)])
def test_scores_equal_the_models_own_forward(blip, token, first):
    image = models.pixels()
    scores = vlcam.wrap(blip, models.processor(), first_token=token).scores(image, TEXT)
    logits = own_forward(blip, image, TEXT, first=first)[0]
    assert scores["itm_logit"].value == pytest.approx(float(logits[1]), abs=1e-5)
    assert scores["itm_margin"].value == pytest.approx(float(logits[1] - logits[0]), abs=1e-5)
    cosine = own_forward(blip, image, TEXT, use_itm_head=False)[0, 0]
    assert scores["contrastive_cosine"].value == pytest.approx(float(cosine), abs=1e-5)


def test_the_first_token_moves_score_and_map_and_is_on_record(blip):
    image = models.pixels()
    enc = vlcam.wrap(blip, models.processor()).explain(image, TEXT)
    cls = vlcam.wrap(blip, models.processor(), first_token="cls").explain(image, TEXT)
    assert enc.scores["itm_logit"].value != pytest.approx(cls.scores["itm_logit"].value, abs=1e-4)
    assert not np.allclose(enc.tokens, cls.tokens)
    assert (enc.provenance["text"]["pieces"][0], enc.provenance["text"]["ids"][0]) == ("[ENC]", ENC)
    assert (cls.provenance["text"]["pieces"][0], cls.provenance["text"]["ids"][0]) == ("[CLS]", 2)


def test_a_model_without_an_encode_token_says_what_to_do(blip):
    blip.config.text_config.vocab_size = len(models.PIECES) + 1
    with pytest.raises(vlcam.AdapterError, match="use first_token='cls'"):
        vlcam.wrap(blip, models.processor())
    with pytest.raises(vlcam.AdapterError, match="choose from 'enc', 'cls'"):
        vlcam.wrap(blip, models.processor(), first_token="dec")


def test_every_site_of_every_block_is_captured_with_a_gradient(model):
    for stream in model.anatomy.streams.values():
        for site in stream.blocks[0].sites:
            found = model.capture(models.pixels(), TEXT, stream=stream.name, site=site)
            assert list(found.activations) == [Tap(stream.name, layer, site) for layer in range(3)]
            for tap, activation in found.activations.items():
                gradient = found.gradients[tap]
                assert gradient.shape == activation.shape
                assert gradient.any(), tap


def test_residual_sums_hold_at_the_captured_sites(model):
    got = {
        site: model.capture(models.pixels(), TEXT, stream="vision", site=site).activations
        for site in ("F3", "F5", "F6")
    }
    for layer in (1, 2):
        total = sum(got[site][Tap("vision", layer, site)] for site in ("F3", "F5"))
        total = total + got["F6"][Tap("vision", layer - 1, "F6")]
        torch.testing.assert_close(got["F6"][Tap("vision", layer, "F6")], total, atol=1e-5, rtol=1e-5)


def test_attention_rows_sum_to_one_and_text_looks_at_the_image(model):
    cross = model.capture(models.pixels(), TEXT, stream="fusion", site="CROSS", layers=0)
    attention = cross.activations[Tap("fusion", 0, "CROSS")]
    assert attention.shape == (1, 2, 9, 17)
    torch.testing.assert_close(attention.sum(-1), torch.ones(1, 2, 9))
    own = model.capture(models.pixels(), TEXT, stream="vision", site="F2", layers=0)
    assert own.activations[Tap("vision", 0, "F2")].shape == (1, 2, 17, 17)


def test_gradients_of_one_image_with_many_texts_are_those_of_single_texts(model):
    texts = [TEXT, "a dog", "the grass"]
    together = model.capture(models.pixels(), texts, stream="vision", site="F1", layers=1)
    tap = Tap("vision", 1, "F1")
    for row, text in enumerate(texts):
        alone = model.capture(models.pixels(), text, stream="vision", site="F1", layers=1)
        torch.testing.assert_close(together.gradients[tap][row], alone.gradients[tap][0], atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(together.activations[tap][row], alone.activations[tap][0])


def test_padding_changes_nothing(model):
    alone = model.explain(models.pixels(), "a dog")
    padded = model.explain(models.pixels(), ["a dog", TEXT])[0]
    np.testing.assert_allclose(padded.tokens, alone.tokens, atol=1e-7)
    assert list(padded.words) == ["a", "dog"]


def test_a_grid_that_is_not_square(blip):
    model = vlcam.wrap(blip, models.processor(), image_size=(48, 32), interpolate_pos_encoding=True)
    image = Image.new("RGB", (50, 70), (30, 200, 30))
    exp = model.explain(image, TEXT)
    assert exp.tokens.shape == (6, 4)
    assert exp.heatmap.shape == (70, 50)
    steps = exp.provenance["image"]["steps"]
    assert {"step": "interpolate_positions", "trained": [32, 32], "used": [48, 32]} in steps
    logits = own_forward(
        blip,
        torch.from_numpy(
            models.processor().image_processor(image, size={"height": 48, "width": 32}, return_tensors="np")[
                "pixel_values"
            ][0]
        ),
        TEXT,
        first=ENC,
        interpolate_pos_encoding=True,
    )
    assert exp.scores["itm_logit"].value == pytest.approx(float(logits[0, 1]), abs=1e-5)


def test_only_the_cell_of_the_changed_patch_moves(blip):
    model = vlcam.wrap(blip, models.processor(), interpolate_pos_encoding=True)
    before = models.pixels(height=48, width=32)
    after = before.clone()
    after[:, :8, -8:] += 1.0
    embedded = [
        model.capture(image, TEXT, stream="vision", site="F1", layers=0).activations[Tap("vision", 0, "F1")]
        for image in (before, after)
    ]
    moved = (embedded[0] - embedded[1]).abs().sum(-1)[0, 1:].reshape(6, 4)
    assert torch.nonzero(moved).tolist() == [[0, 3]]


@pytest.mark.parametrize(("side", "patch", "heads"), [(32, 8, 2), (48, 8, 4), (32, 4, 2)])
def test_grid_and_heads_are_read_off_the_model(side, patch, heads):
    module = models.blip(side=side, patch=patch, heads=heads)
    exp = vlcam.wrap(module, models.processor(side)).explain(models.pixels(height=side, width=side), TEXT)
    assert exp.tokens.shape == (side // patch, side // patch)


def test_an_unknown_option_lists_those_there_are(blip):
    with pytest.raises(vlcam.UnknownNameError, match="no option 'colour'; it has 'first_token', 'image_size'"):
        vlcam.wrap(blip, models.processor(), colour=1)


def test_only_the_last_part_of_a_path_is_recorded(blip):
    blip.config.name_or_path = blip.name_or_path = "/home/somebody/models/blip-itm"
    assert vlcam.wrap(blip, models.processor()).name == "blip-itm"


def test_another_size_needs_to_be_asked_for(blip):
    with pytest.raises(vlcam.InputError, match=r"\(48, 32\): the model was trained at \(32, 32\)"):
        vlcam.wrap(blip, models.processor(), image_size=(48, 32))
    with pytest.raises(vlcam.InputError, match="multiples of the patch, 8"):
        vlcam.wrap(blip, models.processor(), image_size=(50, 32), interpolate_pos_encoding=True)


def test_the_processor_of_the_model_is_what_prepares_images(blip):
    image = Image.fromarray(np.random.default_rng(1).integers(0, 255, (30, 50, 3), np.uint8), "RGB")
    processor = models.processor()
    ready = torch.from_numpy(processor.image_processor(image, return_tensors="np")["pixel_values"])
    model = vlcam.wrap(blip, processor)
    np.testing.assert_array_equal(model.explain(image, TEXT).tokens, model.explain(ready[0], TEXT).tokens)


def test_preprocessed_pixels_are_shown_as_they_were_before_normalisation(model):
    image = Image.fromarray(np.random.default_rng(2).integers(0, 255, (32, 32, 3), np.uint8), "RGB")
    ready = torch.from_numpy(models.processor().image_processor(image, return_tensors="np")["pixel_values"])
    exp = model.explain(ready, [TEXT])[0]
    np.testing.assert_array_equal(np.asarray(exp.picture()), np.asarray(image))
    assert exp.provenance["image"]["steps"][0] == {"step": "given_preprocessed", "size": [32, 32]}


def test_anatomy_prints_streams_blocks_and_sites(model):
    text = str(model.anatomy)
    assert "vision  0-2     F1 F2 F3_HEADS F3 F4 F5 F6" in text
    assert "CROSS CONTEXT" in text
    assert "contrastive: cosine" in text
    assert model.anatomy.to_dict()["streams"]["fusion"]["blocks"][0]["lacks"].keys() == {"F1", "F4"}


def test_ids_without_a_mask_read_it_off_the_padding(model):
    ids = models.tokenizer()(["a dog", TEXT], padding=True, return_tensors="pt")["input_ids"]
    batch = {"pixel_values": models.pixels(batch=2), "input_ids": ids}
    found = model.explain(batch)
    for exp, image, text in zip(found, batch["pixel_values"], ["a dog", TEXT], strict=True):
        assert exp.text == text
        np.testing.assert_allclose(exp.tokens, model.explain(image, text).tokens, atol=1e-7)


@pytest.mark.slow
def test_a_full_size_checkpoint_loads_from_a_folder_and_is_explained(tmp_path):
    torch.manual_seed(0)
    config = BlipConfig(
        vision_config={"image_size": 384}, text_config={"vocab_size": 30524, "encoder_hidden_size": 768}
    )
    BlipForImageTextRetrieval(config).save_pretrained(tmp_path)
    words = [*models.PIECES, *(f"[unused{index}]" for index in range(len(models.PIECES), 30522))]
    tokenizer = type(models.tokenizer())(vocab={word: i for i, word in enumerate(words)}, model_max_length=512)
    BlipProcessor(BlipImageProcessorPil(size={"height": 384, "width": 384}), tokenizer).save_pretrained(tmp_path)
    model = vlcam.load(tmp_path)
    exp = model.explain(Image.new("RGB", (640, 427), (90, 120, 30)), TEXT, "lavis-itm", phrase="blue dog")
    assert exp.provenance["run"]["layers"] == [6]
    assert exp.provenance["run"]["fitted"]["layers"] == "as published"
    assert exp.provenance["text"]["ids"][0] == 30523
    assert exp.tokens.shape == (24, 24)
    assert exp.heatmap.shape == (427, 640)
    assert exp.verify(model).identical


def test_loading_what_does_not_exist_lists_what_does(tmp_path):
    with pytest.raises(vlcam.UnknownNameError, match=r"no model 'tiny-blop'.*embedded models:.*'tiny-blip-itm'"):
        vlcam.load("tiny-blop")
    with pytest.raises(vlcam.UnknownNameError, match=r"has no config.json"):
        vlcam.load(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(vlcam.AdapterError, match="'LlamaForCausalLM', which no adapter loads"):
        vlcam.load(tmp_path)


def test_a_checkpoint_name_without_network_is_an_error_that_says_so(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(vlcam.UnknownNameError, match=r"no model 'nobody/nothing'.*the hub did not give it"):
        vlcam.load("nobody/nothing")


@pytest.fixture
def checkpoint(blip, tmp_path):
    blip.save_pretrained(tmp_path)
    models.processor().save_pretrained(tmp_path)
    return tmp_path


def test_a_whole_checkpoint_loads(checkpoint, blip):
    found = vlcam.load(checkpoint).explain(models.pixels(), TEXT)
    np.testing.assert_array_equal(
        found.tokens, vlcam.wrap(blip, models.processor()).explain(models.pixels(), TEXT).tokens
    )


def test_a_checkpoint_without_some_weights_is_refused(checkpoint):
    weights = load_file(checkpoint / "model.safetensors")
    save_file(
        {k: v for k, v in weights.items() if "itm_head" not in k}, checkpoint / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(vlcam.AdapterError, match=r"lacks 2 of the model's weights: itm_head.bias, itm_head.weight"):
        vlcam.load(checkpoint)


def test_damaged_or_missing_files_are_refused(checkpoint):
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(vlcam.AdapterError, match="cannot be loaded"):
        vlcam.load(checkpoint)
    weights.unlink()
    with pytest.raises(vlcam.AdapterError, match="cannot be loaded"):
        vlcam.load(checkpoint)
    (checkpoint / "config.json").write_text("{")
    with pytest.raises(vlcam.UnknownNameError, match="no checkpoint's configuration"):
        vlcam.load(checkpoint)


def test_a_tokenizer_of_another_model_is_refused(blip):
    blip.config.text_config.vocab_size = 30524
    with pytest.raises(vlcam.AdapterError, match=r"a tokenizer of 20 tokens and a model that embeds 30524"):
        vlcam.wrap(blip, models.processor())


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"do_resize": False}, "do_resize=False"), ({"size": {"shortest_edge": 32}}, "fixed height and width")],
)
def test_a_processor_that_frames_otherwise_is_refused(blip, changes, words):
    processor = models.processor()
    for name, value in changes.items():
        setattr(processor.image_processor, name, value)
    with pytest.raises(vlcam.AdapterError, match=words):
        vlcam.wrap(blip, processor)


@pytest.mark.parametrize("size", [64, "64", (64,), (32.0, 32.0)])
def test_an_image_size_is_two_whole_numbers(blip, size):
    with pytest.raises(vlcam.AdapterError, match=r"give \(height, width\)"):
        vlcam.wrap(blip, models.processor(), image_size=size, interpolate_pos_encoding=True)


def test_a_device_that_is_not_there_is_refused(checkpoint):
    with pytest.raises(vlcam.UnknownNameError, match="device='nowhere' cannot be used"):
        vlcam.load(checkpoint, device="nowhere")
