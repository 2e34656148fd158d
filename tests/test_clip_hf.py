"""The CLIP and SigLIP adapters of transformers: own scores, sites, pooled positions, texts, pixels, loading."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import models
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.models import Unigram
from torch import nn
from transformers import (
    CLIPConfig,
    CLIPModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    CLIPVisionModel,
    CLIPVisionModelWithProjection,
    PreTrainedTokenizerFast,
    Siglip2Config,
    Siglip2Model,
    Siglip2Tokenizer,
    SiglipConfig,
    SiglipModel,
    SiglipVisionModel,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

import vlcam
from vlcam.adapter import Encoded, Inputs, adapters, for_module
from vlcam.images import open_image
from vlcam_adapters import clip_text
from vlcam_adapters.clip_hf import ClipHF
from vlcam_adapters.clip_text import TextWarning
from vlcam_adapters.siglip_hf import SiglipHF

LETTERS = "abcdefghijklmnopqrstuvwxyz"
TEXTS = ["a red dog", "a dog on grass", "red"]
LONG = "a red dog and a red dog and a red dog and a red dog"
BOT, EOT = "<|startoftext|>", "<|endoftext|>"
CONTEXT = 12
TEXT = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": CONTEXT,
}
VISION = {
    "hidden_size": 12,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}


def clip_tokenizer(longest=CONTEXT):
    letters = [*LETTERS, *",.!'-", "Ã", "©", "Ń", "Ċ"]
    words = ["re", "red</w>", "do", "dog</w>"]
    pieces = [*letters, *(f"{letter}</w>" for letter in letters), *words, BOT, EOT]
    merges = [("r", "e"), ("re", "d</w>"), ("d", "o"), ("do", "g</w>")]
    return CLIPTokenizer(vocab={p: i for i, p in enumerate(pieces)}, merges=merges, model_max_length=longest)


def legacy_tokenizer():
    """End token 2, with words of larger ids."""
    pieces = [BOT, "<pad>", EOT, "a</w>", "b</w>", "red</w>", "dog</w>", "on"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    return CLIPTokenizer(vocab=vocabulary, merges=[], pad_token="<pad>", model_max_length=CONTEXT)


def siglip_tokenizer():
    words = ["▁", "▁red", "▁dog", "▁a", "▁on", "▁grass", "▁and", "un", "able"]
    table = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -9.0), *((w, -3.0) for w in words), *((x, -8.0) for x in LETTERS)]
    made = Tokenizer(Unigram(table, unk_id=2))
    made.normalizer = normalizers.Sequence(
        [
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[!-/:-@\[-`{-~]"), ""),
            normalizers.Replace(Regex(r"\s+"), " "),
            normalizers.Strip(),
        ]
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="</s>", pad_token="</s>", unk_token="<unk>", model_input_names=["input_ids"]
    )


def gemma_tokenizer(*, lower=True):
    words = ["▁", *LETTERS, "re", "red", "▁red", "do", "dog", "▁dog"]
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *words, *("RED" if not lower else "")]
    merges = [("r", "e"), ("re", "d"), ("▁", "red"), ("d", "o"), ("do", "g"), ("▁", "dog")]
    made = Siglip2Tokenizer(
        vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges, add_bos_token=False, add_eos_token=True
    )
    if not lower:
        made.backend_tokenizer.normalizer = normalizers.Replace(" ", "▁")
    return made


def randomised(module):
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            around = 1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0
            parameter.copy_(around + torch.randn_like(parameter) * 0.3)
    return module.eval()


def clip(tokenizer=None, **text):
    tokenizer = tokenizer or clip_tokenizer()
    own = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 1}
    config = CLIPConfig(
        text_config={**TEXT, "vocab_size": len(tokenizer), **own, **text}, vision_config=VISION, projection_dim=8
    )
    return randomised(CLIPModel(config))


def siglip(tokenizer=None, **vision):
    words = len(tokenizer or siglip_tokenizer())
    own = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 1, "projection_size": 12}
    config = SiglipConfig(text_config={**TEXT, "vocab_size": words, **own}, vision_config={**VISION, **vision})
    return randomised(SiglipModel(config))


def clip_processor(tokenizer=None, **changes):
    settings = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}, **changes}
    return SimpleNamespace(image_processor=CLIPImageProcessorPil(**settings), tokenizer=tokenizer or clip_tokenizer())


def siglip_processor(tokenizer=None, **changes):
    settings = {"size": {"height": 32, "width": 32}, **changes}
    images = SiglipImageProcessorPil(**settings)
    return SimpleNamespace(image_processor=images, tokenizer=tokenizer or siglip_tokenizer())


def adapter_of(kind, **options):
    return (
        ClipHF.wrap(clip(), clip_processor(), **options)
        if kind == "clip"
        else SiglipHF.wrap(siglip(), siglip_processor(), **options)
    )


def asked(adapter, pixels, texts, image_of=None, text_of=None, *, grad=False):
    """Inputs with what the text tower makes of the texts; by default every image with every text."""
    images = adapter.accept_pixels(pixels)
    prepared = adapter.prepare_texts(texts) if isinstance(texts, list) else texts
    count = len(prepared.layouts)
    image_of = tuple(i for i in range(len(pixels)) for _ in range(count)) if image_of is None else image_of
    text_of = tuple(range(count)) * len(pixels) if text_of is None else text_of
    made = Inputs(images, prepared, image_of, text_of)
    every = adapter.text_tower(made).detach()
    return replace(made, encoded=Encoded(every, every[list(text_of)].clone().requires_grad_(grad)))


def answered(adapter, inputs, name="contrastive"):
    return adapter.head(name, adapter.trunk(inputs)[list(inputs.image_of)], inputs)


def own_logits(module, pixels, prepared, **options):
    with torch.no_grad():
        return module(pixel_values=pixels, **prepared.tensors, **options).logits_per_image


def read(reading, seen):
    """A hook that keeps what a reading means, for readings that plain hooks can reach."""
    if reading.how == "input":
        return reading.module.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    return reading.module.register_forward_hook(
        lambda _, __, output: seen.append(output if isinstance(output, torch.Tensor) else output[0])
    )


def captured(anatomy, stream, site, run):
    """A site of all blocks of a stream, in one run."""
    found = [[] for _ in anatomy.streams[stream].blocks]
    handles = [read(block.sites[site], seen) for block, seen in zip(anatomy.streams[stream].blocks, found, strict=True)]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    assert [len(each) for each in found] == [1] * len(found)
    return [each[0] for each in found]


# scores


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_cosines_and_logits_equal_the_models_own_forward(kind):
    adapter, pixels = adapter_of(kind), models.pixels(batch=2)
    inputs = asked(adapter, pixels, TEXTS)
    with torch.no_grad():
        found = answered(adapter, inputs)
    module = adapter.module
    logits = own_logits(module, pixels, inputs.texts)
    bias = module.logit_bias if kind == "siglip" else 0.0
    assert found.shape == (6, 3, 2)
    assert adapter.heads["contrastive"] == {"clip": "prompts", "siglip": "sigmoid"}[kind]
    wanted = logits.repeat_interleave(3, 0).detach()
    torch.testing.assert_close(found[..., 1], wanted, atol=1e-6, rtol=1e-6)
    cosines = (wanted - bias) / module.logit_scale.exp()
    torch.testing.assert_close(found[..., 0], cosines.detach(), atol=1e-6, rtol=0)
    assert found[..., 0].std() > 0.01


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_own_processors_and_padding_give_the_same_scores(kind):
    """The tokenizer's own call, as the model's processor makes it, not ours."""
    adapter = adapter_of(kind)
    tokenizer = clip_tokenizer() if kind == "clip" else siglip_tokenizer()
    padding = {"padding": "max_length", "max_length": CONTEXT} if kind == "siglip" else {"padding": True}
    coded = tokenizer(TEXTS, return_tensors="pt", **padding)
    pixels = models.pixels(batch=1)
    inputs = asked(adapter, pixels, TEXTS)
    torch.testing.assert_close(inputs.texts.tensors["input_ids"], coded["input_ids"])
    with torch.no_grad():
        wanted = adapter.module(pixel_values=pixels, **coded).logits_per_image[0]
        found = answered(adapter, inputs)[0, :, 1]
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_a_pairs_gradient_is_that_of_its_own_text(kind):
    adapter = adapter_of(kind)
    inputs = asked(adapter, models.pixels(batch=2), TEXTS, (0, 1, 1), (2, 0, 2), grad=True)
    found = answered(adapter, inputs)
    for pair, text in enumerate(inputs.text_of):
        (gradient,) = torch.autograd.grad(found[pair, text, 1], inputs.encoded.own, retain_graph=True)
        assert gradient[pair].abs().max() > 1e-3
        assert not gradient[[other for other in range(3) if other != pair]].any()
    (gradient,) = torch.autograd.grad(found[0, 1, 1], inputs.encoded.own, retain_graph=True)
    assert not gradient.any()


def test_patches_are_read_through_the_models_own_norm_and_projection():
    adapter, pixels = adapter_of("clip"), models.pixels(batch=1)
    inputs, module = asked(adapter, pixels, TEXTS), adapter.module
    tower = module.vision_model
    with torch.no_grad():
        tokens = adapter.trunk(inputs)
        mean = module.visual_projection(tower.post_layernorm(tokens[:, 1:]).mean(1))
        wanted = nn.functional.normalize(mean, dim=-1) @ inputs.encoded.every.T
        found = answered(adapter, inputs, "contrastive_patches")
        cls = answered(adapter, inputs)
    torch.testing.assert_close(found[0, :, 0], wanted[0])
    assert not torch.allclose(found, cls, atol=1e-3)
    assert adapter.readouts == {"contrastive_patches"} <= set(adapter.heads)
    assert next(iter(adapter.heads)) == "contrastive"


def test_single_tokens_are_embedded_as_the_class_token_is():
    adapter = adapter_of("clip")
    inputs = asked(adapter, models.pixels(batch=1), TEXTS, (0,), (1,))
    with torch.no_grad():
        tokens = adapter.trunk(inputs)
        found = adapter.token_cosines(tokens, inputs)
        wanted = answered(adapter, inputs)[..., 0]
    assert found.shape == (1, 17, 3)
    torch.testing.assert_close(found[:, 0], wanted)
    with pytest.raises(vlcam.RecipeError, match="SiglipHF does not embed single tokens"):
        SiglipHF.token_cosines(adapter_of("siglip"), tokens, inputs)


def test_a_block_of_clip_is_read_as_the_mean_of_its_tokens():
    adapter = adapter_of("clip")
    inputs = asked(adapter, models.pixels(batch=2), TEXTS)
    tokens = torch.randn(2, 17, 12)
    alike = tokens.mean(1, keepdim=True).expand(2, 17, 12)
    with torch.no_grad():
        found = adapter.read_block("contrastive", tokens, inputs)
        wanted = adapter.head("contrastive", alike, inputs)
    assert found.shape == (2, 3, 2)
    torch.testing.assert_close(found, wanted)


def test_a_block_of_siglip_is_read_by_the_pooler_with_or_without_the_norm():
    adapter = adapter_of("siglip")
    inputs = asked(adapter, models.pixels(batch=2), TEXTS)
    last = captured(adapter.anatomy, "vision", "F6", lambda: adapter.trunk(inputs))[-1]
    with torch.no_grad():
        wanted = adapter.head("contrastive", adapter.trunk(inputs), inputs)
        torch.testing.assert_close(adapter.read_block("contrastive", last, inputs), wanted)
        bare = adapter.read_block("contrastive", last, inputs, bare=True)
        torch.testing.assert_close(bare, adapter.head("contrastive", last, inputs))
    assert not torch.allclose(bare, wanted, atol=1e-3)


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_bfloat16_runs_and_stays_near(kind):
    exact, adapter = adapter_of(kind), adapter_of(kind)
    adapter.module.to(torch.bfloat16)
    pixels = models.pixels(batch=2)
    with torch.no_grad():
        found, wanted = (answered(each, asked(each, pixels, TEXTS)) for each in (adapter, exact))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), wanted, atol=0.06, rtol=0.06)
    logits = own_logits(adapter.module, pixels.bfloat16(), adapter.prepare_texts(TEXTS)).repeat_interleave(3, 0)
    torch.testing.assert_close(found[..., 1], logits, atol=0.03, rtol=0.03)


# sites


@pytest.mark.parametrize("kind", ["clip", "siglip"])
@pytest.mark.parametrize("stream", ["vision", "text"])
def test_sites_hold_what_the_library_returns(kind, stream):
    adapter, pixels = adapter_of(kind), models.pixels(batch=1)
    inputs = asked(adapter, pixels, TEXTS[:1])

    def run():
        with torch.no_grad():
            return adapter.trunk(inputs) if stream == "vision" else adapter.text_tower(inputs)

    found = {site: captured(adapter.anatomy, stream, site, run) for site in ("F1", "F3_HEADS", "F3", "F4", "F5", "F6")}
    with torch.no_grad():
        made = adapter.module(pixel_values=pixels, **inputs.texts.tensors, output_hidden_states=True)
    states = getattr(made, f"{stream}_model_output").hidden_states
    layers = getattr(adapter.module, f"{stream}_model").encoder.layers
    for number in range(3):
        torch.testing.assert_close(found["F6"][number], states[number + 1])
        total = states[number] + found["F3"][number] + found["F5"][number]
        torch.testing.assert_close(found["F6"][number], total, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(found["F1"][number], layers[number].layer_norm1(states[number]))
        torch.testing.assert_close(found["F3"][number], layers[number].self_attn.out_proj(found["F3_HEADS"][number]))
        torch.testing.assert_close(found["F5"][number], layers[number].mlp(found["F4"][number]))
        assert adapter.anatomy.streams[stream].blocks[number].sites["F2"].module is layers[number].self_attn


def test_the_trunk_ends_where_the_head_begins():
    """CLIP's class token is normed in the head; SigLIP's patches before the pooler, which runs in the head alone."""
    pixels = models.pixels(batch=1)
    for kind, name in (("clip", "last_hidden_state"), ("siglip", "last_hidden_state")):
        adapter = adapter_of(kind)
        inputs = asked(adapter, pixels, TEXTS)
        with torch.no_grad():
            own = adapter.module.vision_model(pixels)
            torch.testing.assert_close(adapter.trunk(inputs), getattr(own, name))
    calls = []
    with adapter.module.vision_model.head.register_forward_hook(lambda *_: calls.append(1)), torch.no_grad():
        shared = adapter.trunk(inputs)
        assert not calls
        adapter.head("contrastive", shared[list(inputs.image_of)], inputs)
    assert len(calls) == 1


def test_the_pooler_is_a_stream_of_one_block():
    adapter = adapter_of("siglip")
    stream = adapter.anatomy.streams["pooler"]
    (block,) = stream.blocks
    assert set(block.sites) == {"CROSS", "CONTEXT"}
    assert (stream.trunk, stream.heads, stream.width, stream.slots) == (False, 2, 12, "")
    head = adapter.module.vision_model.head
    assert (block.sites["CROSS"].module, block.sites["CROSS"].how) == (head.attention, "attention")
    inputs = asked(adapter, models.pixels(batch=1), TEXTS, (0,), (0,))
    (context,) = captured(adapter.anatomy, "pooler", "CONTEXT", lambda: answered(adapter, inputs))
    torch.testing.assert_close(context, adapter.trunk(inputs))
    with pytest.raises(vlcam.UnknownNameError, match="one learned query"):
        stream.reading(0, "F2")


def test_anatomy_says_which_streams_there_are_and_why_others_are_not():
    for kind, streams in (("clip", ["vision", "text"]), ("siglip", ["vision", "text", "pooler"])):
        anatomy = adapter_of(kind).anatomy
        assert list(anatomy.streams) == streams
        assert all(anatomy.streams[name].trunk for name in ("vision", "text"))
        with pytest.raises(vlcam.UnknownNameError, match="no cross-attention; its cross-modal evidence is the cosine"):
            anatomy.stream("fusion")
    assert "pooler" in adapter_of("clip").anatomy.lacks
    text = str(adapter_of("clip").anatomy)
    assert "[CLS], then 4 x 4 patches in raster order" in text
    assert "contrastive: cosine, logit, probability, log-probability, margin, difference, finer" in text
    assert "[CLS]" not in str(adapter_of("siglip").anatomy)


def test_prefix_and_what_the_heads_read():
    assert (adapter_of("clip").prefix, adapter_of("clip").reads) == (("cls",), "cls")
    assert (adapter_of("siglip").prefix, adapter_of("siglip").reads) == ((), "patches")


def test_gradients_lie_where_the_notes_say():
    """In the last block of CLIP only [CLS] and the end token; in SigLIP's vision tower everywhere."""
    for kind, stream, live in (("clip", "vision", [0]), ("clip", "text", [4]), ("siglip", "vision", range(16))):
        adapter = adapter_of(kind)
        inputs = asked(adapter, models.pixels(batch=1), [TEXTS[0], LONG], (0,), (0,))
        kept = []

        def keep(_, __, output, kept=kept):
            kept.append(output)

        last = adapter.anatomy.streams[stream].blocks[-1].sites["F6"].module
        with last.register_forward_hook(keep):
            every = adapter.text_tower(inputs)
            made = replace(inputs, encoded=Encoded(every.detach(), every[:1]))
            score = answered(adapter, made)[0, 0, 0]
        (gradient,) = torch.autograd.grad(score, kept[0])
        assert gradient[0].abs().sum(-1).nonzero().flatten().tolist() == list(live)


# the pooled position


def test_clip_pools_the_first_end_token_and_says_which():
    adapter = adapter_of("clip")
    prepared = adapter.prepare_texts(TEXTS)
    assert prepared.pooled == (4, 10, 2)
    for layout, position in zip(prepared.layouts, prepared.pooled, strict=True):
        assert layout.pieces[position] == EOT
        assert len(layout.ids) == position + 1
    made = adapter.module.text_model(**prepared.tensors)
    wanted = made.last_hidden_state[torch.arange(3), list(prepared.pooled)]
    torch.testing.assert_close(made.pooler_output, wanted)


def test_old_configurations_pool_the_largest_id():
    """With `eos_token_id=2` transformers takes the largest id: of [0, 5, 6, 2, 1, 1] position 2, not 3."""
    tokenizer = legacy_tokenizer()
    module = clip(tokenizer, eos_token_id=2)
    adapter = ClipHF.wrap(module, clip_processor(tokenizer))
    ids = torch.tensor([[0, 5, 6, 2, 1, 1]])
    prepared = adapter.accept_ids(ids, None)
    assert prepared.pooled == (2,)
    assert prepared.layouts[0].pieces == (BOT, "red</w>", "dog</w>", EOT)
    made = module.text_model(input_ids=ids)
    torch.testing.assert_close(made.pooler_output, made.last_hidden_state[:, 2])
    torch.testing.assert_close(
        adapter.text_tower(asked(adapter, models.pixels(batch=1), prepared)),
        nn.functional.normalize(module.text_projection(made.pooler_output), dim=-1),
    )


def test_old_configurations_read_on_to_a_larger_id_behind_the_end_token():
    tokenizer = legacy_tokenizer()
    adapter = ClipHF.wrap(clip(tokenizer, eos_token_id=2), clip_processor(tokenizer))
    ids, pixels = torch.tensor([[0, 5, 2, 6, 1]]), models.pixels(batch=1)
    prepared = adapter.accept_ids(ids, None)
    assert (prepared.pooled, prepared.layouts[0].ids) == ((3,), (0, 5, 2, 6))
    with torch.no_grad():
        wanted = adapter.module(input_ids=ids, pixel_values=pixels).logits_per_image
        torch.testing.assert_close(answered(adapter, asked(adapter, pixels, prepared))[0, :, 1], wanted[0])


def test_old_configurations_pool_the_end_token_of_their_own_vocabulary():
    adapter = ClipHF.wrap(clip(eos_token_id=2), clip_processor())
    assert adapter.prepare_texts(TEXTS).pooled == (4, 10, 2)


def test_ids_without_an_end_token_are_refused():
    for end in ({}, {"eos_token_id": 2}):
        adapter = ClipHF.wrap(clip(**end), clip_processor())
        with pytest.raises(vlcam.InputError, match=r"input_ids \[0, 5, 6\]: no end token '<\|endoftext\|>'"):
            adapter.accept_ids(torch.tensor([[0, 5, 6]]), None)


def test_a_tokenizer_that_ends_texts_otherwise_is_refused():
    with pytest.raises(vlcam.AdapterError, match="pools a text at its end token, id 7, and the tokenizer ends texts"):
        ClipHF.wrap(clip(eos_token_id=7), clip_processor())


def test_siglip_pools_the_last_position():
    adapter = adapter_of("siglip")
    assert adapter.prepare_texts(TEXTS).pooled == (CONTEXT - 1,) * 3
    ids = torch.tensor([[4, 5, 1]])
    with pytest.warns(TextWarning, match="input_ids of 3 tokens: SigLIP was trained on texts padded to 12"):
        assert adapter.accept_ids(ids, None).pooled == (2,)


# texts


def test_clip_layouts_hold_words_pieces_and_characters():
    text = "A  RED-dog, isn't"
    layout = adapter_of("clip").prepare_texts([text]).layouts[0]
    assert layout.pieces[:3] == (BOT, "a</w>", "red</w>")
    assert layout.pieces[-1] == EOT
    assert layout.special == (True, *(False,) * (len(layout.ids) - 2), True)
    assert [word.text for word in layout.words] == ["A", "RED-dog", "isn't"]
    assert [text[start:end] for start, end in layout.spans[1:3]] == ["A", "RED"]


def test_clip_finds_accents_in_the_text_as_typed():
    layout = adapter_of("clip").prepare_texts(["é red"]).layouts[0]
    assert [word.text for word in layout.words] == ["é", "red"]
    assert layout.spans[-2] == (2, 5)


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_a_long_text_keeps_its_end_and_lists_what_was_cut(kind):
    adapter = adapter_of(kind)
    prepared = adapter.prepare_texts([LONG, "red"])
    layout = prepared.layouts[0]
    assert len(layout.ids) == CONTEXT
    assert layout.pieces[-1] == {"clip": EOT, "siglip": "</s>"}[kind]
    assert prepared.pooled[0] == CONTEXT - 1
    words = [*(word.text for word in layout.words), *layout.cut]
    assert " ".join(words) == LONG
    assert layout.cut
    assert layout.cut_text == " ".join(layout.cut)
    assert prepared.layouts[1].cut == ()


def test_an_end_token_that_was_typed_ends_the_text():
    prepared = adapter_of("clip").prepare_texts([f"red {EOT} dog"])
    layout = prepared.layouts[0]
    assert layout.pieces == (BOT, "red</w>", EOT)
    assert prepared.pooled == (2,)
    assert [word.text for word in layout.words] == ["red"]
    assert "dog" in layout.cut
    assert layout.cut_text.endswith("dog")


def test_siglip_layouts_find_words_through_lower_case_and_lost_punctuation():
    text = "A  RED,\ndog."
    layout = adapter_of("siglip").prepare_texts([text]).layouts[0]
    assert layout.pieces == ("▁a", "▁red", "▁dog", "</s>")
    assert [word.text for word in layout.words] == ["A", "RED", "dog"]
    assert [text[start:end] for start, end in layout.spans] == ["A", "RED", "dog", ""]


def test_a_word_that_siglip_cuts_in_pieces_has_all_of_them():
    layout = adapter_of("siglip").prepare_texts(["Un-able,  red"]).layouts[0]
    assert layout.pieces == ("▁", "un", "able", "▁red", "</s>")
    assert [(word.text, word.tokens) for word in layout.words] == [("Un-able", (0, 1, 2)), ("red", (3,))]


def test_siglip_is_always_padded_to_its_context_length():
    prepared = adapter_of("siglip").prepare_texts(["a dog"])
    assert set(prepared.tensors) == {"input_ids"}
    assert prepared.tensors["input_ids"].tolist() == [[6, 5, *[1] * 10]]
    assert prepared.layouts[0].ids == (6, 5, 1)


def test_padding_of_siglip_moves_its_score():
    adapter = adapter_of("siglip")
    pixels = models.pixels(batch=1)
    with pytest.warns(TextWarning):
        short = adapter.accept_ids(torch.tensor([[6, 5, 1]]), None)
    with torch.no_grad():
        found = [answered(adapter, asked(adapter, pixels, each))[0, 0, 1] for each in (["a dog"], short)]
    assert abs(float(found[0] - found[1])) > 1e-3
    torch.testing.assert_close(found[1], own_logits(adapter.module, pixels, short)[0, 0])


def test_a_gemma_tokenizer_gives_words_and_its_own_padding():
    tokenizer = gemma_tokenizer()
    adapter = SiglipHF.wrap(siglip(tokenizer), siglip_processor(tokenizer))
    prepared = adapter.prepare_texts(["Red dog"])
    layout = prepared.layouts[0]
    assert layout.pieces == ("red", "▁dog", "<eos>")
    assert [word.text for word in layout.words] == ["Red", "dog"]
    assert layout.spans == ((0, 3), (4, 7), (0, 0))
    assert prepared.tensors["input_ids"][0, 2:].tolist() == [1, *[0] * 9]


def test_capitals_that_siglip_was_not_trained_on_are_warned_of():
    tokenizer = gemma_tokenizer(lower=False)
    adapter = SiglipHF.wrap(siglip(tokenizer), siglip_processor(tokenizer))
    adapter.prepare_texts(["red dog"])
    with pytest.warns(TextWarning, match="trained on text in lower case"):
        adapter.prepare_texts(["RED dog"])


def test_ids_are_spelt_back():
    adapter = adapter_of("clip")
    typed = adapter.prepare_texts(TEXTS)
    for mask in (None, typed.tensors["attention_mask"]):
        found = adapter.accept_ids(typed.tensors["input_ids"], mask)
        assert found.pooled == typed.pooled
        torch.testing.assert_close(found.tensors["attention_mask"], typed.tensors["attention_mask"])
        for one, other in zip(found.layouts, typed.layouts, strict=True):
            assert (one.text, one.ids, one.pieces, one.spans) == (other.text, other.ids, other.pieces, other.spans)
    siglip_typed = adapter_of("siglip").prepare_texts(TEXTS)
    found = adapter_of("siglip").accept_ids(siglip_typed.tensors["input_ids"], None)
    assert [layout.ids for layout in found.layouts] == [layout.ids for layout in siglip_typed.layouts]
    assert [word.text for word in found.layouts[0].words] == ["a", "red", "dog"]
    assert set(found.tensors) == {"input_ids"}


def test_ids_of_accents_are_spelt_back_as_characters():
    adapter = adapter_of("clip")
    layout = adapter.accept_ids(adapter.prepare_texts(["é red"]).tensors["input_ids"], None).layouts[0]
    assert (layout.text, [word.text for word in layout.words]) == ("é red", ["é", "red"])


def test_ids_that_no_text_gives_are_spelt_as_the_vocabulary_does():
    tokenizer = clip_tokenizer()
    ids = tokenizer.convert_tokens_to_ids([BOT, "d", "o", "g</w>", "red</w>", EOT])
    layout = adapter_of("clip").accept_ids(torch.tensor([ids]), None).layouts[0]
    assert layout.text == "dog red"
    assert [(word.text, word.tokens) for word in layout.words] == [("dog", (1, 2, 3)), ("red", (4,))]


def test_a_mask_that_hides_the_pooled_token_is_refused():
    adapter = adapter_of("clip")
    ids = adapter.prepare_texts(["a dog"]).tensors["input_ids"]
    with pytest.raises(vlcam.InputError, match="hides position 3, where the model reads the text"):
        adapter.accept_ids(ids, torch.tensor([[1, 1, 1, 0]]))


def test_a_mask_for_siglip_is_used_as_the_model_would_and_warned_of():
    adapter, pixels = adapter_of("siglip"), models.pixels(batch=1)
    ids = adapter.prepare_texts(["a dog"]).tensors["input_ids"]
    mask = (torch.arange(CONTEXT) < 3).long()[None]
    with pytest.warns(TextWarning, match="trained without one"):
        prepared = adapter.accept_ids(ids, mask)
    with torch.no_grad():
        wanted = adapter.module(input_ids=ids, attention_mask=mask, pixel_values=pixels).logits_per_image
        plain = adapter.module(input_ids=ids, pixel_values=pixels).logits_per_image
        found = answered(adapter, asked(adapter, pixels, prepared))
    torch.testing.assert_close(found[0, :, 1], wanted[0])
    assert abs(float(wanted - plain)) > 1e-4


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_ids_of_another_vocabulary_or_length_are_refused(kind):
    adapter = adapter_of(kind)
    with pytest.raises(vlcam.InputError, match="the model embeds 0 to"):
        adapter.accept_ids(torch.tensor([[0, 999]]), None)
    with pytest.raises(vlcam.InputError, match="with 1 to 12 tokens"):
        adapter.accept_ids(torch.zeros(1, 13, dtype=torch.long), None)


class Slow:
    is_fast = False


def test_tokenizers_that_cannot_say_where_words_are_are_refused():
    with pytest.raises(vlcam.AdapterError, match=r"Slow gives no character offsets.*PreTrainedTokenizerFast"):
        SiglipHF.wrap(siglip(), siglip_processor(Slow()))
    other = clip()
    other.config.text_config.vocab_size = 49408
    with pytest.raises(vlcam.AdapterError, match="a tokenizer of 76 tokens and a model that embeds 49408"):
        ClipHF.wrap(other, clip_processor())


def test_offsets_that_point_at_other_letters_are_refused():
    class Shifted:
        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def __call__(self, *args, **kwargs):
            made = self.inner(*args, **kwargs)
            made["offset_mapping"] = [[(a + 1, b + 1) for a, b in row] for row in made["offset_mapping"]]
            return made

    with pytest.raises(vlcam.AdapterError, match=r"says that 'red</w>' stands at characters 1-3 of 'red dog'"):
        clip_text.tokenise(Shifted(clip_tokenizer()), ["red dog"], CONTEXT, pool="first end")


def test_texts_follow_no_default_device():
    with torch.device("meta"):
        found = clip_text.tokenise(clip_tokenizer(), ["red"], CONTEXT, pool="first end", padding=0, full=True)
    assert found.ids.tolist()[0][3:] == [0] * 9
    assert found.mask.sum() == 3


# images


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_a_grid_that_is_not_square(kind):
    adapter = adapter_of(kind, image_size=(48, 32), interpolate_pos_encoding=True)
    source = open_image(Image.fromarray(np.random.default_rng(1).integers(0, 255, (70, 50, 3), np.uint8)))
    images = adapter.prepare_images([source])
    assert (images.grid, tuple(images.pixel_values.shape)) == ((6, 4), (1, 3, 48, 32))
    assert images.placements[0].box == (0.0, 0.0, 50.0, 70.0)
    assert {"step": "interpolate_positions", "trained": [32, 32], "used": [48, 32]} in images.steps[0]
    inputs = asked(adapter, images.pixel_values, TEXTS)
    with torch.no_grad():
        found = answered(adapter, inputs)
    wanted = own_logits(adapter.module, images.pixel_values, inputs.texts, interpolate_pos_encoding=True)
    torch.testing.assert_close(found[..., 1], wanted.expand(3, 3), atol=1e-6, rtol=1e-6)
    # Tokens are rows of the grid: the last patch of the first row is the fourth.
    after = images.pixel_values.clone()
    after[..., :8, -8:] += 1
    first = [
        captured(adapter.anatomy, "vision", "F1", lambda each=each: adapter.trunk(asked(adapter, each, TEXTS)))[0]
        for each in (images.pixel_values, after)
    ]
    moved = (first[0] - first[1]).abs().sum(-1)[0, len(adapter.prefix) :].reshape(6, 4)
    assert torch.nonzero(moved).tolist() == [[0, 3]]


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_other_sizes_need_to_be_asked_for(kind):
    with pytest.raises(vlcam.InputError, match=r"\(48, 32\): the model was trained at \(32, 32\); load it with"):
        adapter_of(kind, image_size=(48, 32))
    with pytest.raises(vlcam.InputError, match="multiples of the patch, 8"):
        adapter_of(kind, image_size=(50, 32), interpolate_pos_encoding=True)
    # As many patches as trained: SigLIP itself would run this with wrong positions and not say so.
    with pytest.raises(vlcam.InputError, match=r"\(16, 64\): the model was trained at"):
        adapter_of(kind).accept_pixels(torch.zeros(1, 3, 16, 64))


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_the_processor_of_the_model_is_what_prepares_images(kind):
    adapter = adapter_of(kind)
    picture = Image.fromarray(np.random.default_rng(1).integers(0, 255, (64, 96, 3), np.uint8))
    images = (clip_processor() if kind == "clip" else siglip_processor()).image_processor
    ready = torch.from_numpy(images(picture, return_tensors="np")["pixel_values"])
    found = adapter.prepare_images([open_image(picture)])
    torch.testing.assert_close(found.pixel_values, ready)
    assert found.placements[0].box == ((16.0, 0.0, 80.0, 64.0) if kind == "clip" else (0.0, 0.0, 96.0, 64.0))


@pytest.mark.parametrize("kind", ["clip", "siglip"])
@pytest.mark.parametrize("mode", ["RGBA", "L", "P"])
def test_pictures_of_other_modes_become_rgb(kind, mode):
    colours = np.random.default_rng(3).integers(0, 255, (32, 32, 3), np.uint8)
    picture = Image.fromarray(colours).convert(mode)
    adapter = adapter_of(kind)
    found = adapter.prepare_images([open_image(picture)]).pixel_values
    wanted = adapter.prepare_images([open_image(picture.convert("RGB"))]).pixel_values
    assert found.shape == (1, 3, 32, 32)
    torch.testing.assert_close(found, wanted)
    if mode == "L":
        shown = adapter.display(found[0])
        torch.testing.assert_close(shown[0], shown[1], atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_one_picture_as_array_file_and_image_is_one_input(kind, tmp_path):
    array = np.random.default_rng(4).integers(0, 255, (40, 60, 3), np.uint8)
    Image.fromarray(array).save(tmp_path / "a.png")
    adapter = adapter_of(kind)
    sources = [open_image(each) for each in (array, Image.fromarray(array), tmp_path / "a.png")]
    found = adapter.prepare_images(sources).pixel_values
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(found[0], found[2])
    assert found.std() > 0.3


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_display_undoes_the_normalisation(kind):
    adapter = adapter_of(kind)
    array = np.random.default_rng(2).integers(0, 255, (32, 32, 3), np.uint8)
    pixels = adapter.prepare_images([open_image(array)]).pixel_values[0]
    shown = (adapter.display(pixels) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    np.testing.assert_array_equal(shown, array)


@pytest.mark.parametrize(
    "changes",
    [{"do_rescale": False, "do_normalize": False}, {"rescale_factor": 1 / 127.5}, {"do_normalize": False}],
)
def test_display_follows_what_the_processor_does(changes):
    adapter = ClipHF.wrap(clip(), clip_processor(**changes))
    array = np.random.default_rng(2).integers(0, 255, (32, 32, 3), np.uint8)
    pixels = adapter.prepare_images([open_image(array)]).pixel_values[0]
    shown = (adapter.display(pixels) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    np.testing.assert_array_equal(shown, array)


def test_other_pixel_statistics_change_the_pixels_and_are_on_record():
    processor = clip_processor()
    before = dict(vars(processor.image_processor))
    plain, other = (
        ClipHF.wrap(clip(), processor, **options)
        for options in ({}, {"image_mean": (0.5, 0.5, 0.5), "image_std": [0.5, 0.25, 0.5]})
    )
    assert dict(vars(processor.image_processor)) == before
    array = np.full((32, 32, 3), 255, np.uint8)
    source = open_image(array)
    made = other.prepare_images([source])
    torch.testing.assert_close(made.pixel_values[0, :, 0, 0], torch.tensor([1.0, 2.0, 1.0]))
    assert not torch.allclose(made.pixel_values, plain.prepare_images([source]).pixel_values)
    assert {"step": "normalize", "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.25, 0.5]} in made.steps[0]
    torch.testing.assert_close(other.display(made.pixel_values[0]), torch.ones(3, 32, 32))
    assert (other.options["image_mean"], other.options["image_std"]) == ([0.5, 0.5, 0.5], [0.5, 0.25, 0.5])
    assert (plain.options["image_mean"], plain.options["image_std"]) == (None, None)
    json.dumps(dict(other.options))
    again = ClipHF.wrap(clip(), processor, **other.options)
    torch.testing.assert_close(again.prepare_images([source]).pixel_values, made.pixel_values)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"image_mean": 0.5}, "image_mean=0.5: give three numbers"),
        ({"image_mean": [0.5, 0.5]}, "give three numbers"),
        ({"image_std": [0.5, 0.0, 0.5]}, "give three numbers, above zero"),
        ({"image_std": [0.5, float("nan"), 0.5]}, "give three numbers"),
        ({"image_size": 64}, r"give \(height, width\)"),
    ],
)
def test_options_that_say_nothing_are_refused(options, words):
    with pytest.raises(vlcam.AdapterError, match=words):
        adapter_of("clip", **options)


def test_statistics_for_a_processor_that_does_not_normalise_are_refused():
    with pytest.raises(vlcam.AdapterError, match="do_normalize=False, which uses none"):
        ClipHF.wrap(clip(), clip_processor(do_normalize=False), image_mean=[0.5, 0.5, 0.5])


# the model as found, wrapping, loading


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_the_model_is_left_as_it_was_found(kind):
    adapter = adapter_of(kind)
    before = models.state(adapter.module)
    with adapter.running():
        inputs = asked(adapter, models.pixels(batch=1), TEXTS, grad=True)
        for name in adapter.heads:
            torch.autograd.grad(answered(adapter, inputs, name)[..., 1].diagonal().sum(), inputs.encoded.own)
        adapter.read_block("contrastive", adapter.trunk(inputs), inputs)
    models.assert_same(before, models.state(adapter.module))


def test_models_find_their_adapter():
    assert for_module(clip()) is ClipHF
    assert for_module(siglip()) is SiglipHF
    assert {ClipHF, SiglipHF} <= set(adapters(for_=clip()))
    assert vlcam.wrap(clip(), clip_processor(), image_mean=[0.5] * 3).adapter.options["image_mean"] == [0.5] * 3
    with pytest.raises(vlcam.UnknownNameError, match="no option 'colour'; it has 'image_size'"):
        vlcam.wrap(clip(), clip_processor(), colour=1)


@pytest.mark.parametrize(
    "kind", [CLIPVisionModel, CLIPVisionModelWithProjection, CLIPTextModelWithProjection, SiglipVisionModel]
)
def test_a_tower_alone_is_refused_with_what_to_give(kind):
    config = siglip().config if kind is SiglipVisionModel else clip().config
    config = config.vision_config if "Vision" in kind.__name__ else config.text_config
    whole = "SiglipModel" if kind is SiglipVisionModel else "CLIPModel"
    with pytest.raises(vlcam.AdapterError, match=rf"its output is an embedding.*give the whole {whole} with its proc"):
        vlcam.wrap(kind(config))


def test_naflex_is_refused_and_says_what_to_load(tmp_path):
    config = Siglip2Config(
        text_config={**TEXT, "vocab_size": 40, "projection_size": 12, "bos_token_id": None, "eos_token_id": 1},
        vision_config={**{k: v for k, v in VISION.items() if k != "image_size"}, "num_patches": 16},
    )
    module = Siglip2Model(config)
    with pytest.raises(vlcam.AdapterError, match=r"NaFlex inputs.*google/siglip2-base-patch16-224.*is a SiglipModel"):
        vlcam.wrap(module, siglip_processor())
    module.save_pretrained(tmp_path)
    with pytest.raises(vlcam.AdapterError, match="NaFlex inputs"):
        SiglipHF.load(tmp_path, local=True)
    assert SiglipHF.loads({"architectures": ["Siglip2Model"]})
    assert not SiglipHF.loads({"architectures": ["CLIPModel"]})


def test_a_model_without_its_processor_says_what_is_missing():
    for processor in (None, clip_tokenizer(), clip_processor().image_processor):
        with pytest.raises(vlcam.AdapterError, match="CLIPModel needs its processor"):
            ClipHF.wrap(clip(), processor)


def test_a_siglip_without_its_pooler_is_refused():
    with pytest.raises(vlcam.AdapterError, match="vision_use_head=False"):
        SiglipHF.wrap(siglip(vision_use_head=False), siglip_processor())


def save(kind, folder):
    made = adapter_of(kind)
    processor = clip_processor() if kind == "clip" else siglip_processor()
    made.module.save_pretrained(folder)
    processor.image_processor.save_pretrained(folder)
    processor.tokenizer.save_pretrained(folder)
    return made


@pytest.mark.parametrize("kind", ["clip", "siglip"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_loads_from_a_folder(kind, dtype, tmp_path):
    wanted = save(kind, tmp_path)
    wanted.module.to(getattr(torch, dtype))
    adapter = {"clip": ClipHF, "siglip": SiglipHF}[kind].load(
        tmp_path, local=True, dtype=dtype, image_size=[48, 32], interpolate_pos_encoding=True
    )
    assert adapter.module.dtype == getattr(torch, dtype)
    assert adapter.options["image_size"] == [48, 32]
    pixels = models.pixels(batch=1)
    with torch.no_grad():
        found, same = (answered(each, asked(each, pixels, [*TEXTS, "RED, dog"])) for each in (adapter, wanted))
    torch.testing.assert_close(found, same)


def test_the_sentencepiece_class_in_the_files_is_not_needed(tmp_path):
    save("siglip", tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": "SiglipTokenizer"}))
    layout = SiglipHF.load(tmp_path, local=True).prepare_texts(["A red, dog"]).layouts[0]
    assert layout.pieces == ("▁a", "▁red", "▁dog", "</s>")


def test_a_siglip_without_a_tokenizer_file_says_what_is_needed(tmp_path):
    save("siglip", tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(vlcam.AdapterError, match=r"has no tokenizer.json.*character offsets"):
        SiglipHF.load(tmp_path, local=True)


def test_a_checkpoint_without_some_weights_is_refused(tmp_path):
    save("clip", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if "visual_projection" not in name}
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(vlcam.AdapterError, match=r"lacks 1 of the model's weights: visual_projection.weight"):
        ClipHF.load(tmp_path, local=True)
