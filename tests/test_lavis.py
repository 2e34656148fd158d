"""LAVIS's models without LAVIS: told by the names of their parts, explained as their twins of transformers."""

from __future__ import annotations

import copy
import tomllib
from pathlib import Path

import models
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import BlipConfig, BlipForImageTextRetrieval
from transformers.models.blip.modeling_blip_text import BlipTextModel

import vlcam
from vlcam.adapter import for_module
from vlcam_adapters.blip_lavis import BlipItmLavis
from vlcam_adapters.blip_weights import to_transformers

GOLDEN = Path(__file__).parent / "golden" / "lavis-blip-twin"
TEXTS = ["a red dog", "the unaffable ball is on grass, and a blue circle"]
ENC = len(models.PIECES) + 1


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.num_heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        shares = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1)
        return self.proj((shares @ v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x):
        return self.fc2(nn.functional.gelu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, width, heads, inner):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.attn, self.mlp = Attention(width, heads), Mlp(width, inner)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PatchEmbed(nn.Module):
    def __init__(self, side, patch, width):
        super().__init__()
        self.img_size, self.patch_size = (side, side), (patch, patch)
        self.proj = nn.Conv2d(3, width, patch, patch)

    def forward(self, x):
        return self.proj(x).flatten(2).transpose(1, 2)


class VisionTransformerEncoder(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed_dim = config.hidden_size
        self.patch_embed = PatchEmbed(config.image_size, config.patch_size, self.embed_dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, self.embed_dim))
        patches = (config.image_size // config.patch_size) ** 2
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + patches, self.embed_dim))
        shape = (self.embed_dim, config.num_attention_heads, config.intermediate_size)
        self.blocks = nn.ModuleList(Block(*shape) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(self.embed_dim, eps=1e-6)

    def forward_features(self, x):
        x = self.patch_embed(x)
        x = torch.cat((self.cls_token.expand(len(x), -1, -1), x), 1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class XBertEncoder(BlipTextModel):
    def forward(self, input_ids, *, mode="multimodal", **given):
        assert (mode == "text") == ("encoder_hidden_states" not in given)
        return super().forward(input_ids=input_ids, **given)


class BlipITM(nn.Module):
    """The paths of `lavis.models.blip_models.blip_image_text_matching.BlipITM`; no line of it."""

    def __init__(self, config):
        super().__init__()
        vision, text = config.vision_config, config.text_config
        self.tokenizer, self.max_txt_len = models.tokenizer(), 16
        self.tokenizer.enc_token_id = ENC
        self.visual_encoder = VisionTransformerEncoder(vision)
        self.text_encoder = XBertEncoder(text, add_pooling_layer=False)
        self.vision_proj = nn.Linear(vision.hidden_size, config.image_text_hidden_size)
        self.text_proj = nn.Linear(text.hidden_size, config.image_text_hidden_size)
        self.itm_head = nn.Linear(text.hidden_size, 2)


def transformers_twin(config, state):
    module = BlipForImageTextRetrieval(config).eval()
    left = module.load_state_dict(to_transformers(state), strict=False)
    assert not left.unexpected_keys
    assert all("position_ids" in name for name in left.missing_keys)
    return module


@pytest.fixture(scope="module")
def config():
    found = copy.deepcopy(models.blip().config)
    found.vision_config.layer_norm_eps = 1e-6  # as in LAVIS
    return found


@pytest.fixture(scope="module")
def fake(config):
    torch.manual_seed(3)
    module = BlipITM(config).eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            around = 1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0
            parameter.copy_(around + torch.randn_like(parameter) * 0.35)
    return module


@pytest.fixture(scope="module")
def pair_of_models(fake, config):
    twin = transformers_twin(config, fake.state_dict())
    return vlcam.wrap(fake, (None, None)), vlcam.wrap(twin, models.processor())


def test_the_versions_of_the_extra_are_those_that_are_installed_and_documented():
    root = Path(__file__).parent.parent
    extra = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]["lavis"]
    for page in ("Makefile", "docs/blip.md"):
        assert all(f"'{requirement}'" in (root / page).read_text() for requirement in extra), page


def test_lavis_is_not_needed(fake):
    assert for_module(fake) is BlipItmLavis
    assert not BlipItmLavis.accepts(nn.Linear(2, 2))
    class_of_that_name = type("BlipITM", (nn.Module,), {})()
    assert not BlipItmLavis.accepts(class_of_that_name)


@pytest.mark.parametrize(
    ("recipe", "choices"),
    [
        ("lavis-itm", {"layer": 0}),
        ("lavis-itm", {"layer": 1, "scale": "margin"}),
        ("albef-itm", {"layer": 1}),
        ("attention-cross", {"layer": 1}),
        ("context-gradcam", {}),
        ("pgc-gradcam", {"layer": 1}),
        ("pgc-gradcam", {"target": "contrastive", "layer": -1}),
        ("grad-eclip", {"layer": 1}),
        ("chefer-generic", {}),
        ("raw-attention", {}),
    ],
)
def test_maps_and_scores_equal_those_of_the_twin(pair_of_models, recipe, choices):
    pixels = models.pixels(5, batch=2)
    ours, theirs = (model.explain(pixels, TEXTS, recipe, **choices) for model in pair_of_models)
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one.tokens, other.tokens, atol=1e-5 * np.abs(other.tokens).max())
        assert list(one.words) == list(other.words)
        assert one.provenance["text"] == other.provenance["text"]
        assert one.recipe == other.recipe
        for name, score in other.scores.items():
            assert one.scores[name].value == pytest.approx(score.value, abs=1e-5)


def test_ten_captions_run_the_image_once(fake, pair_of_models):
    runs = []
    hook = fake.visual_encoder.blocks[0].register_forward_hook(lambda *_: runs.append(1))
    pair_of_models[0].explain(models.pixels(), [f"a red dog {'and ' * n}" for n in range(10)], layer=0)
    hook.remove()
    assert len(runs) == 1


def test_the_model_is_left_as_found(fake, pair_of_models):
    attention = fake.text_encoder.encoder.layer[0].crossattention.self
    attention.save_attention = True
    before = models.state(fake)
    pair_of_models[0].explain(models.pixels(), TEXTS, layer=0)
    with pytest.raises(vlcam.EvidenceError, match="CROSS carries one in block 0, 1"):
        pair_of_models[0].explain(models.pixels(), TEXTS[0], layer=2)
    models.assert_same(before, models.state(fake))
    assert attention.save_attention
    del attention.save_attention


def test_ids_that_come_ready_made(pair_of_models):
    coded = models.tokenizer()(TEXTS, padding=True, return_tensors="pt")
    for first in (models.tokenizer().cls_token_id, ENC):
        ids = coded["input_ids"].clone()
        ids[:, 0] = first
        batch = {"pixel_values": models.pixels(5, batch=2), "input_ids": ids, "attention_mask": coded["attention_mask"]}
        for one, other in zip(*(model.explain(batch, layer=0) for model in pair_of_models), strict=True):
            np.testing.assert_allclose(one.tokens, other.tokens, atol=1e-5 * other.tokens.max())
    with pytest.raises(vlcam.InputError, match="opened by one of"):
        pair_of_models[0].explain(batch | {"input_ids": ids[:, 1:], "attention_mask": coded["attention_mask"][:, 1:]})


def test_the_limit_is_that_of_the_model(fake, monkeypatch):
    monkeypatch.setattr(fake, "max_txt_len", 5)
    text = vlcam.wrap(fake, (None, None)).explain(models.pixels(), "a red dog is on grass", layer=0).provenance["text"]
    assert (text["pieces"], text["cut"]) == (["[ENC]", "a", "red", "dog", "[SEP]"], ["is", "on", "grass"])


@pytest.mark.parametrize("read", ["sentence: a red dog", "a dog red"])
def test_a_text_processor_that_does_more_than_leave_out_is_refused(fake, read):
    model = vlcam.wrap(fake, (None, lambda _: read))
    with pytest.raises(vlcam.AdapterError, match="more than leaving characters out"):
        model.explain(models.pixels(), "a red dog", layer=0)


def test_what_a_text_processor_leaves_out_moves_no_word(fake):
    def clean(text):
        words = "".join(letter for letter in text.lower() if letter not in '.!"()*#:;~').split()
        return " ".join(words[:4])

    model = vlcam.wrap(fake, (None, clean))
    typed = '  "A RED"  (unaffable) dog ON THE grass!'
    exp = model.explain(models.pixels(), typed, layer=0)
    assert {word: typed[slice(*each.span)] for word, each in zip(exp.words, exp.word_maps, strict=True)} == {
        word: word for word in ("A", "RED", "unaffable", "dog")
    }
    assert exp.provenance["text"]["cut"] == ["ON", "THE", "grass"]
    plain = model.explain(models.pixels(), "a red unaffable dog", layer=0)
    np.testing.assert_array_equal(exp.tokens, plain.tokens)


def test_images_need_the_processor_that_prepares_them(pair_of_models, fake):
    photo = models.photo()
    with pytest.raises(vlcam.InputError, match="load_model_and_preprocess"):
        pair_of_models[0].explain(photo, "a red dog", layer=0)
    transforms = pytest.importorskip("torchvision.transforms")
    steps = [
        transforms.Resize((32, 32), transforms.InterpolationMode.BICUBIC),
        transforms.ToTensor(),
        transforms.Normalize((0.5, 0.5, 0.5), (0.25, 0.25, 0.25)),
    ]
    exp = vlcam.wrap(fake, (transforms.Compose(steps), None)).explain(photo, "a red dog", layer=0)
    assert exp.heatmap.shape == (40, 64)
    assert [step["step"] for step in exp.provenance["image"]["steps"][-3:]] == ["resize", "rescale", "normalize"]
    steps[0] = transforms.Resize((16, 32))
    with pytest.raises(vlcam.InputError, match="trained at"):
        vlcam.wrap(fake, (transforms.Compose(steps), None))
    steps[0] = transforms.RandomResizedCrop((32, 32))
    with pytest.raises(vlcam.AdapterError, match="RandomResizedCrop"):
        vlcam.wrap(fake, (transforms.Compose(steps), None))


def test_weights_of_lavis_give_the_numbers_of_lavis_in_transformers():
    values, weights = np.load(GOLDEN / "golden.npz"), load_file(GOLDEN / "model.safetensors")
    text = {"vocab_size": 24, "hidden_size": 24, "encoder_hidden_size": 16, "intermediate_size": 32}
    text |= {"num_hidden_layers": 3, "num_attention_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0}
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"image_size": 32, "patch_size": 8, "layer_norm_eps": 1e-6}
    shape = BlipConfig(text_config=text, vision_config=vision, image_text_hidden_size=8)
    module = transformers_twin(shape, weights)
    pixels, mask = torch.from_numpy(values["pixel_values"]), torch.from_numpy(values["attention_mask"])
    ids = torch.from_numpy(values["input_ids"])
    with torch.no_grad():
        cosines = module(input_ids=ids, attention_mask=mask, pixel_values=pixels, use_itm_head=False).itm_score
        np.testing.assert_allclose(cosines, values["itc_cosines"], atol=1e-5)
        ids[:, 0] = int(values["enc_token_id"])
        logits = module(input_ids=ids, attention_mask=mask, pixel_values=pixels).itm_score
    np.testing.assert_allclose(logits, values["itm_logits"], atol=1e-5)
    model = vlcam.wrap(module, models.processor())
    model.adapter.opening = ("[ENC]", int(values["enc_token_id"]))
    batch = {"pixel_values": pixels, "input_ids": ids, "attention_mask": mask}
    found = model.capture(batch, stream="fusion", site="CROSS", layers=1, target="itm")
    for tensors, name in ((found.activations, "C"), (found.gradients, "G")):
        (tensor,) = tensors.values()
        np.testing.assert_allclose(
            tensor * mask[:, None, :, None], values[name] * mask.numpy()[:, None, :, None], atol=1e-5
        )


def test_a_name_of_lavis_needs_lavis():
    with pytest.raises(vlcam.AdapterError, match=r"needs LAVIS.*docs/blip\.md says how to install it"):
        vlcam.load("lavis:blip_image_text_matching/base")
    with pytest.raises(vlcam.AdapterError, match=r"'lavis:blip_nlvr/nlvr'.*no adapter loads"):
        vlcam.load("lavis:blip_nlvr/nlvr")
