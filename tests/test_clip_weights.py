"""A CLIP of transformers and its twin of open_clip: the same logits, whatever the weights, or a reason why not."""

from __future__ import annotations

import pytest
import torch
from transformers import CLIPConfig, CLIPModel, ViTConfig, ViTModel

import vlcam
from vlcam.errors import AdapterError
from vlcam_adapters.clip_weights import open_clip_twin, to_open_clip

pytest.importorskip("open_clip")

END, LONGEST = 39, 9
VISION = {
    **{"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"image_size": 24, "patch_size": 8},
}
TEXT = {
    **{"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"vocab_size": END + 1, "max_position_embeddings": LONGEST},
    **{"bos_token_id": END - 1, "eos_token_id": END, "pad_token_id": END},
}


def model(vision=None, text=None):
    """Every weight is drawn: norms, biases and the scale too, which are ones and zeros in a new model."""
    config = CLIPConfig(vision_config=VISION | (vision or {}), text_config=TEXT | (text or {}), projection_dim=12)
    made = CLIPModel(config).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
        made.logit_scale.fill_(1.7)
    return made


def ids(end=END, longest=LONGEST, begin=END - 1, count=5):
    """Texts of several lengths, padded with 0 as open_clip does."""
    found = torch.zeros(count, longest, dtype=torch.long)
    generator = torch.Generator().manual_seed(3)
    for row in range(count):
        length = 1 + row % (longest - 2)
        found[row, 0], found[row, length + 1] = begin, end
        found[row, 1 : length + 1] = torch.randint(0, min(begin, end), (length,), generator=generator)
    return found


def logits(hf, texts):
    side = hf.config.vision_config.image_size
    pixels = torch.randn(3, 3, side, side, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = hf(input_ids=texts, pixel_values=pixels).logits_per_image
        found, _ = open_clip_twin(hf).get_logits(pixels, texts)
    return found, wanted


@pytest.mark.parametrize(
    ("vision", "text"),
    [
        ({}, {}),
        ({"hidden_act": "gelu"}, {"hidden_act": "gelu"}),
        ({"layer_norm_eps": 1e-2}, {"layer_norm_eps": 1e-3}),
        ({"intermediate_size": 49}, {"intermediate_size": 35}),
        ({"image_size": 27}, {}),
    ],
)
def test_both_give_the_same_logits(vision, text):
    found, wanted = logits(model(vision, text), ids())
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert wanted.std() > 0.1


def test_the_end_of_a_text_is_found_by_its_id_where_that_is_not_the_highest():
    found, wanted = logits(model(text={"eos_token_id": 20, "bos_token_id": 21, "pad_token_id": 20}), ids(20, begin=30))
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_old_configurations_pool_at_the_highest_id():
    found, wanted = logits(model(text={"eos_token_id": 2}), ids())
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_what_stands_behind_the_end_changes_nothing():
    hf, texts = model(), ids()
    padded = torch.where(torch.arange(LONGEST) > texts.argmax(1, keepdim=True), END, texts)
    assert (padded != texts).any()
    torch.testing.assert_close(logits(hf, texts)[0], logits(hf, padded)[1], atol=1e-5, rtol=1e-5)


def test_the_embedded_model_has_a_twin():
    from transformers import AutoModel, AutoProcessor

    folder = vlcam.models()["tiny-clip"].folder
    hf = AutoModel.from_pretrained(folder).eval()
    words = AutoProcessor.from_pretrained(folder).tokenizer
    texts = torch.zeros(3, words.model_max_length, dtype=torch.long)
    for row, text in enumerate(["a red circle", "there is a blue star and a purple triangle", "zebra, 42!"]):
        coded = torch.tensor(words(text)["input_ids"])
        texts[row, : len(coded)] = coded
    found, wanted = logits(hf, texts)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_the_twin_has_weights_of_its_own_and_keeps_the_dtype():
    hf = model().double()
    twin = open_clip_twin(hf)
    assert twin.visual.proj.dtype == torch.float64
    before = hf.visual_projection.weight.clone()
    with torch.no_grad():
        twin.visual.proj.zero_()
    assert torch.equal(hf.visual_projection.weight, before)


def test_every_weight_is_used_once():
    hf = model()
    made = to_open_clip(hf.state_dict())
    assert sum(value.numel() for value in made.values()) == sum(value.numel() for value in hf.parameters())
    assert set(made) == set(open_clip_twin(hf).state_dict())


def test_saved_position_ids_are_left_out():
    state = model().state_dict()
    old = {**state, "text_model.embeddings.position_ids": torch.arange(LONGEST)[None]}
    assert to_open_clip(old).keys() == to_open_clip(state).keys()


def test_weights_of_another_model_are_refused_by_name():
    state = model().state_dict()
    with pytest.raises(AdapterError, match=r"no weights of a transformers\.CLIPModel: encoder\.layer\.0\.weight"):
        to_open_clip({**state, "encoder.layer.0.weight": torch.zeros(1)})
    with pytest.raises(AdapterError, match=r"no weights .*layers\.0\.mlp\.fc3\.weight"):
        to_open_clip({**state, "text_model.encoder.layers.0.mlp.fc3.weight": torch.zeros(1)})


@pytest.mark.parametrize("gone", ["visual_projection.weight", "vision_model.encoder.layers.1.self_attn.k_proj.bias"])
def test_missing_weights_are_named(gone):
    state = model().state_dict()
    del state[gone]
    with pytest.raises(AdapterError, match="the weights lack 1 that every CLIPModel has"):
        to_open_clip(state)


@pytest.mark.parametrize(
    ("vision", "text", "message"),
    [
        ({"hidden_act": "gelu"}, {}, "hidden_act is gelu and quick_gelu"),
        ({"hidden_act": "relu"}, {"hidden_act": "relu"}, "hidden_act is relu"),
        ({"num_channels": 1}, {}, "num_channels=1"),
        ({}, {"eos_token_id": [2, 3]}, "eos_token_id="),
    ],
)
def test_what_open_clip_does_not_compute_is_refused(vision, text, message):
    with pytest.raises(AdapterError, match=message):
        open_clip_twin(model(vision, text))


def test_sizes_that_are_no_squares_are_refused():
    hf = model()
    hf.config.vision_config.image_size = (24, 32)
    with pytest.raises(AdapterError, match=r"image_size=.*only squares"):
        open_clip_twin(hf)


def test_other_models_are_refused():
    other = ViTModel(ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8))
    with pytest.raises(AdapterError, match="a model of type 'vit' has no twin"):
        open_clip_twin(other)
