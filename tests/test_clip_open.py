"""The adapters of open_clip: own scores, sites, texts and their places, framing, towers, loading."""

from __future__ import annotations

import json

import models
import numpy as np
import open_clip
import pytest
import torch
from open_clip.coca_model import CoCa, MultimodalCfg
from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg, CustomTextCLIP
from open_clip.tokenizer import HFTokenizer, SimpleTokenizer
from open_clip.transform import PreprocessCfg, image_transform, image_transform_v2
from PIL import Image
from safetensors.torch import save_file
from tokenizers import Tokenizer, pre_tokenizers, processors
from tokenizers.models import WordLevel
from torch import nn
from torch.nn.functional import normalize
from transformers import PreTrainedTokenizerFast

import vlcam
from vlcam.adapter import Encoded, Inputs, adapters, for_config, for_module
from vlcam.anatomy import Tap
from vlcam.images import open_image
from vlcam.provenance import versions
from vlcam.taps import Taps
from vlcam_adapters.clip_open import ClipOpen
from vlcam_adapters.clip_text import TextWarning
from vlcam_adapters.coca_open import CocaOpen

CONTEXT = 12
TEXTS = ["a red circle", "a dog on the grass, and a ball", "blue"]
LONG = "one two three four five six seven eight nine ten eleven twelve"
WORDS = ("[PAD]", "[EOS]", "[UNK]", *("a", "red", "circle", "dog", "on", "the", "grass", "and", "ball", "blue"))
VISION = {"layers": 3, "width": 32, "head_width": 16, "patch_size": 8, "image_size": 32}
TEXT = {"context_length": CONTEXT, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 3}
SIGLIP_TEXT = {"vocab_size": 32, "no_causal_mask": True, "proj_bias": True, "pool_type": "last"}
CUSTOM = {"qk_norm": True, "scale_heads": True, "scale_attn": True, "scale_attn_inner": True, "scale_fc": True}
KINDS = {
    "gelu": (CLIP, {}, {}, {}),
    "quick": (CLIP, {}, {}, {"quick_gelu": True}),
    "scale": (CustomTextCLIP, {"ls_init_value": 0.1}, {"ls_init_value": 0.1}, {}),
    "custom": (CustomTextCLIP, CUSTOM, CUSTOM, {}),
    "avg": (CLIP, {"pool_type": "avg"}, {}, {}),
    "avg-late": (CLIP, {"pool_type": "avg", "final_ln_after_pool": True, "no_ln_pre": True}, {}, {}),
    "pooled": (CustomTextCLIP, {"attentional_pool": True, "attn_pooler_queries": 4, "attn_pooler_heads": 2}, {}, {}),
    "wide": (CLIP, {"image_size": (32, 48)}, {}, {}),
    "vector": (CLIP, {}, {}, {"nonscalar_logit_scale": True}),
    "timm": (CustomTextCLIP, {"timm_model_name": "test_vit", "timm_pool": "token"}, {}, {}),
    "timm-avg": (CustomTextCLIP, {"timm_model_name": "test_vit2", "timm_pool": "avg", "timm_proj": "mlp"}, {}, {}),
    "siglip": (
        CustomTextCLIP,
        {"timm_model_name": "test_vit3", "timm_pool": "map"},
        SIGLIP_TEXT,
        {"init_logit_bias": -10},
    ),
}
PREFIX = {"timm-avg": ("register",), "siglip": ("register",)}
PATCHES = ("avg", "avg-late", "pooled", "timm-avg", "siglip")
SITES = ("F1", "F2", "F3_HEADS", "F3", "F4", "F5", "F6")
COCA_VISION = {"attentional_pool": True, "attn_pooler_queries": 6, "attn_pooler_heads": 2, "output_tokens": True}


def randomised(module):
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            norm = (
                parameter.ndim == 1 and name.endswith("weight") and any(n in name for n in ("ln_", "norm", "ln.", "ln"))
            )
            around = 1.0 if norm or "logit_scale" in name or "gamma" in name or "head_scale" in name else 0.0
            parameter.copy_(around + torch.randn_like(parameter) * 0.2)
    return module.eval()


def made(kind):
    model, vision, text, more = KINDS[kind]
    timm = {"timm_model_name": None, "image_size": 160} if "timm_model_name" in vision else {}
    vision_cfg = CLIPVisionCfg(**{**VISION, **timm, **vision})
    return randomised(model(16, vision_cfg, CLIPTextCfg(**{**TEXT, **text}), **more))


def coca(context=CONTEXT, **vision):
    return randomised(
        CoCa(
            32,
            MultimodalCfg(context_length=CONTEXT, vocab_size=49408, width=32, heads=2, layers=2),
            CLIPTextCfg(**{**TEXT, "context_length": context, "embed_cls": True, "output_tokens": True}),
            CLIPVisionCfg(**{**VISION, **COCA_VISION, **vision}),
        )
    )


def word_tokenizer():
    """A tokenizer such as SigLIP's: an end token, no opening one, padding that is attended to."""
    made = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(single="$A [EOS]", special_tokens=[("[EOS]", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", eos_token="[EOS]", unk_token="[UNK]", padding_side="right"
    )


def siglip_tokenizer(tmp_path):
    word_tokenizer().save_pretrained(tmp_path / "tokenizer")
    return HFTokenizer(str(tmp_path / "tokenizer"), context_length=CONTEXT, clean="canonicalize")


def size_of(module):
    tower = module.visual
    return tuple(tower.trunk.patch_embed.img_size) if hasattr(tower, "trunk") else tuple(tower.image_size)


def wrapped(module, tokenizer=None, **options):
    side = size_of(module)
    transform = image_transform(side if side[0] != side[1] else side[0], is_train=False)
    if tokenizer is None:
        words = getattr(module, "vocab_size", 49408) == 49408
        tokenizer = SimpleTokenizer(context_length=CONTEXT) if words else word_tokenizer()
    return for_module(module).wrap(module, (transform, tokenizer), **options)


def pixels_for(module, batch=2, seed=0):
    height, width = size_of(module)
    return models.pixels(seed, height=height, width=width, batch=batch)


def asked(adapter, pixels, texts=TEXTS, image_of=None, text_of=None):
    prepared = adapter.prepare_texts(texts)
    pairs = [(i, t) for i in range(len(pixels)) for t in range(len(texts))]
    image_of = image_of or tuple(i for i, _ in pairs)
    text_of = text_of or tuple(t for _, t in pairs)
    return Inputs(adapter.accept_pixels(pixels), prepared, tuple(image_of), tuple(text_of))


def answered(adapter, inputs, name="contrastive"):
    """What a head gives for P pairs, as the engine asks for it."""
    with torch.no_grad(), adapter.running():
        encoded = adapter.text_tower(inputs)
        own = Encoded(encoded, encoded[list(inputs.text_of)])
        inputs = Inputs(inputs.images, inputs.texts, inputs.image_of, inputs.text_of, own)
        return adapter.head(name, adapter.trunk(inputs)[list(inputs.image_of)], inputs), inputs


def tapped(adapter, inputs, stream, *sites, head="contrastive"):
    """Tensors at sites of every block of a stream, as the engine reads them."""
    anatomy = adapter.anatomy.stream(stream)
    taps = [
        Tap(stream, layer, site) for layer, block in enumerate(anatomy.blocks) for site in sites if site in block.sites
    ]
    with (
        torch.no_grad(),
        adapter.running(),
        Taps({tap: anatomy.reading(tap.layer, tap.site) for tap in taps}, differentiate=False) as found,
    ):
        if stream == "text":
            adapter.text_tower(inputs)
        elif stream == "vision":
            adapter.trunk(inputs)
        else:
            answered(adapter, inputs, head)
    return {(tap.layer, tap.site): tensor for tap, tensor in found.tensors.items()}


def logits_of(module, inputs):
    ids = inputs.texts.tensors["input_ids"]
    with torch.no_grad():
        return module.get_logits(inputs.images.pixel_values, ids)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_the_head_gives_open_clips_own_logits(kind):
    module = made(kind)
    adapter = wrapped(module)
    inputs = asked(adapter, pixels_for(module))
    found, _ = answered(adapter, inputs)
    own = logits_of(module, inputs)[list(inputs.image_of)]
    assert torch.allclose(found[..., 1], own, atol=1e-5)
    image, text, scale, *bias = module(inputs.images.pixel_values, inputs.texts.tensors["input_ids"])
    assert torch.allclose(found[..., 0], (image @ text.T)[list(inputs.image_of)], atol=1e-6)
    assert torch.allclose(found[..., 0] * scale + (bias[0] if bias else 0), found[..., 1], atol=1e-5)
    assert adapter.heads["contrastive"] == ("sigmoid" if bias else "prompts")
    assert adapter.reads == ("patches" if kind in PATCHES else "cls")
    assert adapter.prefix == PREFIX.get(kind, ("cls",))
    assert ("contrastive_patches" in adapter.heads) == (kind not in PATCHES)
    assert "fusion" not in adapter.anatomy.streams


@pytest.mark.parametrize("stream", ["vision", "text"])
@pytest.mark.parametrize("kind", KINDS)
def test_sites_add_up_to_the_blocks_output(kind, stream):
    module = made(kind)
    adapter = wrapped(module)
    inputs = asked(adapter, pixels_for(module))
    sites = tapped(adapter, inputs, stream, *SITES)
    tower = module.visual if stream == "vision" else getattr(module, "text", module)
    blocks = tower.trunk.blocks if hasattr(tower, "trunk") else tower.transformer.resblocks
    width = sites[0, "F6"].shape[-1]
    assert adapter.anatomy.stream(stream).width == width
    assert len(adapter.anatomy.stream(stream).blocks) == len(blocks)
    for layer, block in enumerate(blocks):
        attention, site = sites[layer, "F2"], [sites[layer, name] for name in ("F3", "F5")]
        assert attention.shape[1] == adapter.anatomy.stream(stream).heads
        assert torch.allclose(attention.sum(-1), torch.ones(()), atol=1e-5)
        with torch.no_grad():
            first, second = (
                getattr(block, n, None) or getattr(block, o) for n, o in (("ls_1", "ls1"), ("ls_2", "ls2"))
            )
            after = first(getattr(block, "ln_attn", nn.Identity())(site[0]))
            heads = sites[layer, "F3_HEADS"]
            project = block.attn.proj if hasattr(block.attn, "proj") else block.attn.out_proj
            assert torch.allclose(project(heads), site[0], atol=1e-5)
            if layer:
                whole = sites[layer - 1, "F6"] + after + second(site[1])
                assert torch.allclose(whole, sites[layer, "F6"], atol=2e-5)


@pytest.mark.parametrize("kind", ["gelu", "scale", "custom", "timm"])
def test_attention_that_is_tapped_has_a_gradient_and_leaves_the_scores(kind):
    module = made(kind).requires_grad_(False)
    adapter = wrapped(module)
    plain, inputs = answered(adapter, asked(adapter, pixels_for(module)))
    tap = Tap("vision", 0, "F2")
    with torch.no_grad(), Taps({tap: adapter.anatomy.stream("vision").reading(0, "F2")}, differentiate=True) as taps:
        found = adapter.head("contrastive", adapter.trunk(inputs)[list(inputs.image_of)], inputs)
    assert torch.allclose(found, plain, atol=1e-5)
    (gradient,) = torch.autograd.grad(found[..., 0].sum(), [taps.tensors[tap]])
    assert gradient.shape == taps.tensors[tap].shape
    assert bool(gradient.abs().sum((0, 2, 3)).all())


def test_a_batch_as_large_as_the_tokens_are_many_equals_singles():
    module = made("gelu")
    adapter = wrapped(module)
    pixels = pixels_for(module, batch=17)
    inputs = asked(adapter, pixels, TEXTS, range(17), [i % 3 for i in range(17)])
    found, _ = answered(adapter, inputs)
    sites = tapped(adapter, inputs, "vision", "F2", "F6")
    assert sites[0, "F6"].shape == (17, 17, 32)
    for row in (0, 8, 16):
        alone = asked(adapter, pixels[row : row + 1], TEXTS, [0], [row % 3])
        assert torch.allclose(answered(adapter, alone)[0][0], found[row], atol=1e-5)
        single = tapped(adapter, alone, "vision", "F2", "F6")
        assert torch.allclose(single[2, "F2"][0], sites[2, "F2"][row], atol=1e-5)


def test_the_readout_of_patches_and_the_tokens_one_by_one_use_the_final_norm_and_the_projection():
    for kind in ("gelu", "timm"):
        module = made(kind)
        adapter = wrapped(module)
        inputs = asked(adapter, pixels_for(module))
        patches, inputs = answered(adapter, inputs, "contrastive_patches")
        with torch.no_grad():
            tokens = adapter.trunk(inputs)
            tower = module.visual
            native = kind == "gelu"
            normed = tower.ln_post(tokens) if native else tower.trunk.norm(tokens)
            project = (lambda x, t=tower: x @ t.proj) if native else tower.head
            every = inputs.encoded.every
            expected = normalize(project(normed[:, 1:].mean(1)), dim=-1) @ every.T
            cosines = adapter.token_cosines(tokens, inputs)
            block = adapter.read_block("contrastive", tokens, inputs)
            mean = tokens.mean(1)
            averaged = project(tower.ln_post(mean) if native else tower.trunk.norm(mean))
        assert torch.allclose(patches[..., 0], expected[list(inputs.image_of)], atol=1e-6)
        whole, _ = answered(adapter, inputs)
        assert torch.allclose(cosines[list(inputs.image_of), 0], whole[..., 0], atol=1e-6)
        assert torch.allclose(block[..., 0], normalize(averaged, dim=-1) @ every.T, atol=1e-6)


@pytest.mark.parametrize("kind", ["pooled", "siglip"])
def test_a_pooler_is_a_stream_whose_block_reads_all_image_tokens(kind):
    module = made(kind)
    adapter = wrapped(module)
    inputs = asked(adapter, pixels_for(module))
    sites = tapped(adapter, inputs, "pooler", "CROSS", "CONTEXT")
    tokens = adapter.trunk(inputs)
    pairs, queries = len(inputs.image_of), 4 if kind == "pooled" else 1
    stream = adapter.anatomy.stream("pooler")
    assert sites[0, "CROSS"].shape == (pairs, stream.heads, queries, tokens.shape[1])
    assert torch.allclose(sites[0, "CROSS"].sum(-1), torch.ones(()), atol=1e-5)
    assert torch.allclose(sites[0, "CONTEXT"], tokens[list(inputs.image_of)], atol=1e-5)
    assert not stream.trunk
    _, inputs = answered(adapter, inputs)
    with pytest.raises(vlcam.RecipeError, match="single tokens"):
        adapter.token_cosines(tokens, inputs)
    last = tapped(adapter, inputs, "vision", "F6")[len(adapter.anatomy.stream("vision").blocks) - 1, "F6"]
    read = adapter.read_block("contrastive", last, inputs)
    assert torch.allclose(read[..., 1], logits_of(module, inputs), atol=1e-5)
    assert not torch.allclose(adapter.read_block("contrastive", last, inputs, bare=True), read)


def test_images_are_framed_as_the_transform_frames_them():
    image = open_image(Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 96, 3), np.uint8)))
    module = made("gelu")
    boxes = {"shortest": (28, 0, 68, 40), "squash": (0, 0, 96, 40)}
    for mode in ("shortest", "squash", "longest"):
        transform = image_transform(32, is_train=False, resize_mode=mode, fill_color=7)
        adapter = ClipOpen.wrap(module, (transform, SimpleTokenizer()))
        found = adapter.prepare_images([image])
        assert torch.equal(found.pixel_values[0], transform(image.rgb))
        (placement,) = found.placements
        x0, y0, x1, y1 = placement.box
        if mode == "longest":  # 96 x 40 becomes 32 x 13, with 9 rows of padding above and 10 below
            assert (x0, x1) == (0, 96)
            assert y0 == pytest.approx(-9 * 40 / 13)
            assert y1 == pytest.approx(23 * 40 / 13)
            assert any(step.get("fill") == 7 for step in found.steps[0])
        else:
            assert placement.box == pytest.approx(boxes[mode], abs=1.3)
        shown = adapter.display(found.pixel_values[0])
        assert float(shown.min()) >= -1e-5
        assert float(shown.max()) <= 1 + 1e-5


def test_a_wide_tower_frames_with_the_shorter_ratio():
    module = made("wide")
    adapter = wrapped(module)
    image = open_image(Image.new("RGB", (90, 40)))
    found = adapter.prepare_images([image])
    assert found.pixel_values.shape[-2:] == (32, 48)
    assert found.grid == (4, 6)
    x0, y0, x1, y1 = found.placements[0].box
    assert (y0, y1) == (0, 40)
    assert x1 - x0 == pytest.approx(60, abs=1.5)


def test_pixel_statistics_and_size_can_be_replaced_and_are_on_record():
    module = made("gelu")
    adapter = wrapped(module, image_mean=[0.5, 0.5, 0.5], image_std=(0.25, 0.5, 1), image_size=(32, 32))
    image = open_image(Image.new("RGB", (96, 40), (255, 128, 0)))
    found = adapter.prepare_images([image])
    assert found.placements[0].box == (0, 0, 96, 40)
    assert torch.allclose(found.pixel_values[0, :, 0, 0], torch.tensor([2.0, 1 / 255, -0.5]), atol=1e-6)
    assert adapter.options == {"image_size": [32, 32], "image_mean": [0.5, 0.5, 0.5], "image_std": [0.25, 0.5, 1.0]}
    (step,) = [step for step in found.steps[0] if step["step"] == "normalize"]
    assert (step["mean"], step["std"]) == ([0.5, 0.5, 0.5], [0.25, 0.5, 1.0])
    assert wrapped(module).options == {"image_size": None, "image_mean": None, "image_std": None}
    with pytest.raises(vlcam.AdapterError, match="three numbers"):
        wrapped(module, image_mean=0.5)
    with pytest.raises(vlcam.InputError, match="force_image_size"):
        wrapped(module, image_size=(64, 64))


def test_ids_are_those_of_open_clip_and_words_are_found_as_typed():
    texts = [*TEXTS, "Don\u2019t  STOP \u2014 na\u00efve caf\u00e9 &amp; tea", "3D\tmodels!!?", "!", ""]
    tokenizer = SimpleTokenizer(context_length=CONTEXT)
    adapter = wrapped(made("gelu"))
    found = adapter.prepare_texts(texts)
    assert torch.equal(found.tensors["input_ids"], tokenizer(texts))
    assert found.pooled == tuple(tokenizer(texts).argmax(1).tolist())
    for layout, mask in zip(found.layouts, found.tensors["attention_mask"], strict=True):
        assert int(mask.sum()) == len(layout.ids)
        assert (layout.pieces[0], layout.pieces[-1]) == ("<start_of_text>", "<end_of_text>")
        for word in layout.words:
            begin, end = word.span
            assert layout.text[begin:end] == word.text
            read = "".join(layout.text[a:b] for a, b in (layout.spans[index] for index in word.tokens))
            assert read == word.text
    assert [word.text for word in found.layouts[3].words] == ["Don\u2019t", "STOP", "na\u00efve", "caf\u00e9", "tea"]
    assert found.layouts[0].pieces[2] == "red</w>"


def test_what_does_not_fit_is_listed_and_the_end_token_stays():
    found = wrapped(made("gelu")).prepare_texts([LONG])
    (layout,) = found.layouts
    assert layout.cut == ("eleven", "twelve")
    assert layout.cut_text == "eleven twelve"
    assert found.tensors["input_ids"][0, -1] == 49407
    assert found.pooled == (CONTEXT - 1,)
    assert [word.text for word in layout.words][-1] == "ten"


def test_ids_without_text_are_padded_and_spelt_back():
    module = made("gelu")
    adapter = wrapped(module)
    ids = adapter.prepare_texts(TEXTS).tensors["input_ids"]
    for given in (ids, ids[:, :11]):
        found = adapter.accept_ids(given, None)
        assert torch.equal(found.tensors["input_ids"], ids)
        assert torch.equal(found.tensors["attention_mask"], adapter.prepare_texts(TEXTS).tensors["attention_mask"])
        assert found.pooled == adapter.prepare_texts(TEXTS).pooled
        assert found.layouts[0].text == "a red circle"
        assert [word.text for word in found.layouts[1].words] == ["a", "dog", "on", "the", "grass", "and", "a", "ball"]
    with pytest.raises(vlcam.InputError, match="end token"):
        adapter.accept_ids(ids[:1, :3], None)


def test_a_siglip_is_read_at_its_last_position_and_short_ids_are_filled_up(tmp_path):
    module = made("siglip")
    tokenizer = siglip_tokenizer(tmp_path)
    adapter = wrapped(module, tokenizer)
    texts = ["A red, circle!", "the DOG on the grass"]
    found = adapter.prepare_texts(texts)
    assert torch.equal(found.tensors["input_ids"], tokenizer(texts))
    assert found.pooled == (CONTEXT - 1,) * 2
    assert [word.text for word in found.layouts[0].words] == ["A", "red", "circle"]
    assert found.layouts[0].pieces == ("a", "red", "circle", "[EOS]")
    with pytest.warns(TextWarning, match="padding, id 0"):
        short = adapter.accept_ids(found.tensors["input_ids"][:, :6], None)
    assert torch.equal(short.tensors["input_ids"], found.tensors["input_ids"])
    assert short.pooled == found.pooled
    assert short.layouts[0].text == "a red circle"


def test_other_tokenizers_that_fit_are_taken_and_others_are_refused():
    module = made("gelu")
    simple = SimpleTokenizer(context_length=CONTEXT)
    fast = wrapped(module, simple)._texts._fast
    fast.pad_token = "<end_of_text>"
    bare = wrapped(module, fast)
    assert torch.equal(bare.prepare_texts(TEXTS).tensors["input_ids"], simple(TEXTS))
    with pytest.raises(vlcam.AdapterError, match="do not belong together"):
        wrapped(module, word_tokenizer())
    with pytest.raises(vlcam.AdapterError, match="at random"):
        wrapped(module, SimpleTokenizer(reduction_mask="random"))
    with pytest.raises(vlcam.AdapterError, match="offsets"):
        wrapped(module, str)


def test_what_is_missing_from_the_processor_is_said():
    module = made("gelu")
    train = image_transform_v2(PreprocessCfg(size=32), is_train=True)
    validation = image_transform_v2(PreprocessCfg(size=32), is_train=False)
    for processor in (None, validation, (train, validation, SimpleTokenizer()), (validation, None)):
        with pytest.raises(vlcam.AdapterError, match=r"the last of the three .*get_tokenizer"):
            ClipOpen.wrap(module, processor)
    with pytest.raises(vlcam.AdapterError, match=r"for training, with RandomResizedCrop"):
        ClipOpen.wrap(module, (train, SimpleTokenizer()))
    with pytest.raises(vlcam.AdapterError, match="expected a CLIP or CustomTextCLIP"):
        ClipOpen.wrap(nn.Linear(1, 1), (validation, SimpleTokenizer()))


def test_towers_that_are_not_known_are_refused_with_what_was_looked_for():
    resnet = CLIP(16, CLIPVisionCfg(layers=(1, 1, 1, 1), width=32, head_width=32, image_size=32), CLIPTextCfg(**TEXT))
    processor = (image_transform(32, is_train=False), SimpleTokenizer())
    with pytest.raises(vlcam.AdapterError, match=r"ModifiedResNet.*looked for .*VisionTransformer.*TimmModel"):
        ClipOpen.wrap(resnet, processor)
    module = made("timm")
    module.visual.trunk = nn.Identity()
    with pytest.raises(vlcam.AdapterError, match=r"TimmModel around .*Identity.*VisionTransformer, Beit, Eva"):
        ClipOpen.wrap(module, processor)
    module = made("scale")
    module.text = nn.Identity()
    with pytest.raises(vlcam.AdapterError, match=r"text is .*Identity.*TextTransformer"):
        ClipOpen.wrap(module, processor)
    module = made("gelu")
    module.transformer.resblocks[1] = nn.Identity()
    with pytest.raises(vlcam.AdapterError, match=r"Identity; looked for ResidualAttentionBlock"):
        assert wrapped(module).anatomy
    plain = coca(attentional_pool=False)
    with pytest.raises(vlcam.AdapterError, match=r"did not find visual.attn_pool"):
        wrapped(plain)


@pytest.mark.parametrize("kind", ["gelu", "siglip", "coca"])
def test_half_precision_and_checkpointing_leave_the_scores(kind):
    module = coca() if kind == "coca" else made(kind)
    adapter = wrapped(module)
    inputs = asked(adapter, pixels_for(module))
    plain, _ = answered(adapter, inputs)
    module.set_grad_checkpointing(True)
    found = tapped(adapter, inputs, "vision", "F6")
    assert found[0, "F6"].dtype == torch.float32
    assert module.visual.trunk.grad_checkpointing if kind == "siglip" else module.visual.transformer.grad_checkpointing
    module.set_grad_checkpointing(False)
    half = wrapped(module.to(torch.bfloat16))
    inputs = asked(half, pixels_for(module))
    assert inputs.images.pixel_values.dtype == torch.bfloat16
    rounded, _ = answered(half, inputs)
    assert torch.allclose(rounded[..., 0].float(), plain[..., 0], atol=0.05)


def test_open_clips_mixed_precision_is_taken():
    config = {"embed_dim": 16, "vision_cfg": VISION, "text_cfg": TEXT}
    module = CLIP(16, CLIPVisionCfg(**config["vision_cfg"]), CLIPTextCfg(**TEXT), cast_dtype=torch.bfloat16)
    open_clip.model.convert_weights_to_lp(randomised(module), torch.bfloat16)
    adapter = wrapped(module)
    inputs = asked(adapter, pixels_for(module))
    found, _ = answered(adapter, inputs)
    own = logits_of(module, inputs)
    assert torch.allclose(found[..., 1].float(), own[list(inputs.image_of)].float(), atol=0.05)


def test_coca_answers_as_the_model_does():
    module = coca()
    adapter = wrapped(module)
    inputs = asked(adapter, pixels_for(module))
    ids, own = adapter.ids(inputs), list(inputs.text_of)
    with torch.no_grad():
        given = module(inputs.images.pixel_values[list(inputs.image_of)], ids[own])
        logits = given["image_features"] @ module.encode_text(ids).T
    found, _ = answered(adapter, inputs)
    assert torch.allclose(found[..., 0], logits, atol=1e-6)
    assert torch.allclose(found[..., 1], logits * module.logit_scale.exp(), atol=1e-5)
    chances = given["logits"].log_softmax(-1).gather(2, given["labels"][..., None])[..., 0]
    captions, _ = answered(adapter, inputs, "caption")
    assert captions.shape == (6, CONTEXT)
    for pair, text in enumerate(own):
        count = len(inputs.texts.layouts[text].ids)
        assert torch.allclose(captions[pair, : count - 1], chances[pair, : count - 1], atol=1e-5)
        assert not captions[pair, count - 1 :].any()
        assert bool((captions[pair, : count - 1] < 0).all())
    assert adapter.heads == {"contrastive": "prompts", "caption": "tokens"}
    assert inputs.texts.pooled == (CONTEXT,) * 3
    assert {tensor.shape for tensor in inputs.texts.tensors.values()} == {(3, CONTEXT + 1)}
    assert torch.equal(ids, SimpleTokenizer(context_length=CONTEXT)(TEXTS))


def test_cocas_streams_read_what_their_modules_compute():
    module = coca()
    adapter = wrapped(module)
    inputs = asked(adapter, pixels_for(module))
    pairs, tokens = len(inputs.image_of), adapter.trunk(inputs)
    text = tapped(adapter, inputs, "text", *SITES)
    assert text[0, "F6"].shape == (3, CONTEXT + 1, 32)
    for layer in (1, 2):
        whole = text[layer - 1, "F6"] + text[layer, "F3"] + text[layer, "F5"]
        assert torch.allclose(whole, text[layer, "F6"], atol=1e-5)
    for head in ("contrastive", "caption"):
        pooler = tapped(adapter, inputs, "pooler", "CROSS", "CONTEXT", head=head)
        assert pooler[0, "CROSS"].shape == (pairs, 2, 6, 17)
        assert torch.allclose(pooler[0, "CONTEXT"], tokens[list(inputs.image_of)], atol=1e-5)
    fusion = tapped(adapter, inputs, "fusion", *SITES, "CROSS", "CONTEXT", head="caption")
    assert adapter.anatomy.stream("fusion").slots == "5 pooled slots"
    for layer, cross in enumerate(module.text_decoder.cross_attn):
        assert fusion[layer, "F2"].shape == (pairs, 2, CONTEXT, CONTEXT)
        assert fusion[layer, "CROSS"].shape == (pairs, 2, CONTEXT, 5)
        assert torch.allclose(fusion[layer, "CROSS"].sum(-1), torch.ones(()), atol=1e-5)
        assert fusion[layer, "CONTEXT"].shape == (pairs, 5, 32)
        if layer:
            between = fusion[layer - 1, "F6"] + fusion[layer, "F3"] + fusion[layer, "F5"]
            with torch.no_grad():
                after = cross(between, k_x=fusion[layer, "CONTEXT"], v_x=fusion[layer, "CONTEXT"])
            assert torch.allclose(after, fusion[layer, "F6"], atol=1e-5)


def test_cocas_blocks_are_read_by_its_pooler_and_the_caption_has_no_such_reading():
    module = coca()
    adapter = wrapped(module)
    _, inputs = answered(adapter, asked(adapter, pixels_for(module)))
    with torch.no_grad():
        tokens = adapter.trunk(inputs)
        read = adapter.read_block("contrastive", tokens, inputs)
        bare = adapter.read_block("contrastive", tokens, inputs, bare=True)
        texts = module.encode_text(adapter.ids(inputs))
        unscaled = module.visual.attn_pool(tokens)[:, 0] @ module.visual.proj @ texts.T
    whole, _ = answered(adapter, inputs)
    assert torch.allclose(read[list(inputs.image_of)], whole, atol=1e-5)
    assert torch.allclose(bare[..., 0], unscaled, atol=1e-5)
    with pytest.raises(vlcam.RecipeError, match="caption"):
        adapter.read_block("caption", tokens, inputs)


def checkpoint(folder, kind="gelu"):
    module = made(kind)
    model, vision, text, more = KINDS[kind]
    config = {"embed_dim": 16, "vision_cfg": {**VISION, **vision}, "text_cfg": {**TEXT, **text}, **more}
    config |= {"custom_text": True} if model is CustomTextCLIP else {}
    written = {"model_cfg": config, "preprocess_cfg": {"resize_mode": "squash", "mean": [0.5] * 3, "std": [0.5] * 3}}
    (folder / "open_clip_config.json").write_text(json.dumps(written), encoding="utf-8")
    save_file(
        {name: tensor.contiguous() for name, tensor in module.state_dict().items()},
        folder / "open_clip_model.safetensors",
    )
    return module


def test_a_folder_is_loaded_whole(tmp_path):
    module = checkpoint(tmp_path, "quick")
    explainer = vlcam.load(tmp_path)
    adapter = explainer.adapter if hasattr(explainer, "adapter") else ClipOpen.load(tmp_path, local=True)
    inputs = asked(adapter, pixels_for(module))
    assert torch.allclose(logits_of(adapter.module, inputs), logits_of(module, inputs), atol=1e-6)
    assert not adapter.module.training
    found = adapter.prepare_images([open_image(Image.new("RGB", (96, 40)))])
    assert found.placements[0].box == (0, 0, 96, 40)
    half = ClipOpen.load(tmp_path, local=True, dtype="bfloat16")
    assert half.module.visual.conv1.weight.dtype == torch.bfloat16


def test_positions_are_interpolated_where_another_size_is_asked_for(tmp_path):
    checkpoint(tmp_path)
    adapter = ClipOpen.load(tmp_path, local=True, image_size=(48, 48))
    found = adapter.prepare_images([open_image(Image.new("RGB", (96, 40)))])
    assert found.grid == (6, 6)
    assert found.steps[0][-1] == {"step": "interpolate_positions", "trained": [32, 32], "used": [48, 48]}
    assert answered(adapter, asked(adapter, found.pixel_values))[0].shape == (3, 3, 2)
    assert adapter.options["image_size"] == [48, 48]


def test_folders_that_are_damaged_are_refused(tmp_path):
    checkpoint(tmp_path)
    weights = tmp_path / "open_clip_model.safetensors"
    kept = weights.read_bytes()
    weights.write_bytes(kept[:1000])
    with pytest.raises(vlcam.AdapterError, match="cannot be loaded by open_clip"):
        vlcam.load(tmp_path)
    weights.unlink()
    with pytest.raises(vlcam.AdapterError, match="cannot be loaded by open_clip"):
        vlcam.load(tmp_path)
    with pytest.raises(vlcam.UnknownNameError, match="it has 'dtype', 'device', 'image_size'"):
        vlcam.load(tmp_path, first_token="cls")


def test_configurations_and_versions_are_found():
    assert {ClipOpen, CocaOpen} <= set(adapters())
    plain = {"model_cfg": {"vision_cfg": {}, "text_cfg": {}}}
    assert for_config(plain, "x") is ClipOpen
    assert for_config({"model_cfg": {**plain["model_cfg"], "multimodal_cfg": {}}}, "x") is CocaOpen
    assert versions("open_clip")["open_clip"] == open_clip.__version__
    assert for_module(coca()) is CocaOpen
