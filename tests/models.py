"""Small random models for the tests: every parameter random, so that no zero hides a path. And a model's state."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.models import Unigram
from torch import nn
from transformers import (
    BeitConfig,
    BeitForImageClassification,
    BertTokenizer,
    BlipConfig,
    BlipForImageTextRetrieval,
    BlipProcessor,
    CLIPConfig,
    CLIPModel,
    CLIPTokenizer,
    DeiTConfig,
    DeiTForImageClassification,
    DeiTForImageClassificationWithTeacher,
    Dinov2Config,
    Dinov2ForImageClassification,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersForImageClassification,
    PreTrainedTokenizerFast,
    SiglipConfig,
    SiglipModel,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from vlcam_adapters.clip_hf import ClipHF
from vlcam_adapters.siglip_hf import SiglipHF

PIECES = (
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "circle", "and", "blue", "dog", "on", "the", "grass"),
    *("un", "##aff", "##able", ",", "ball", "is"),
)


def tokenizer(longest: int = 16) -> BertTokenizer:
    return BertTokenizer(vocab={piece: i for i, piece in enumerate(PIECES)}, model_max_length=longest)


def blip(*, side: int = 32, patch: int = 8, layers: int = 3, heads: int = 2, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = BlipConfig(
        text_config={
            "vocab_size": len(PIECES) + 2,
            "hidden_size": 16,
            "encoder_hidden_size": 12,
            "intermediate_size": 24,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "max_position_embeddings": 16,
            "pad_token_id": 0,
        },
        vision_config={
            "hidden_size": 12,
            "intermediate_size": 24,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "image_size": side,
            "patch_size": patch,
        },
        image_text_hidden_size=8,
    )
    model = BlipForImageTextRetrieval(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            around = 1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0
            parameter.copy_(around + torch.randn_like(parameter) * 0.35)
    return model


COMMON = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 5,
}
FFN = {"intermediate_size": 64}
_RELATIVE = {"use_relative_position_bias": True}
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "vit": (ViTForImageClassification, ViTConfig, FFN),
    "deit": (DeiTForImageClassification, DeiTConfig, FFN),
    "deit-teacher": (DeiTForImageClassificationWithTeacher, DeiTConfig, FFN),
    "dinov2": (Dinov2ForImageClassification, Dinov2Config, {"mlp_ratio": 2}),
    "dinov2-registers": (Dinov2WithRegistersForImageClassification, Dinov2WithRegistersConfig, {"mlp_ratio": 2}),
    "dinov2-swiglu": (Dinov2ForImageClassification, Dinov2Config, {"use_swiglu_ffn": True}),
    "beit": (BeitForImageClassification, BeitConfig, {**FFN, **_RELATIVE, "use_absolute_position_embeddings": True}),
    "beit-shared": (BeitForImageClassification, BeitConfig, {**FFN, "use_shared_relative_position_bias": True}),
    "beit-cls": (BeitForImageClassification, BeitConfig, {**FFN, **_RELATIVE, "use_mean_pooling": False}),
    "beit-plain": (BeitForImageClassification, BeitConfig, {**FFN, "layer_scale_init_value": 0.0}),
}
PREFIX = {
    "deit": ("cls", "distillation"),
    "deit-teacher": ("cls", "distillation"),
    "dinov2-registers": ("cls", "register", "register", "register", "register"),
}
"""Tokens before the patches; of the kinds that are not named here, the class token alone."""
ASKS = ("vit", "deit", "deit-teacher")
"""Kinds that take other image sizes only with `interpolate_pos_encoding`."""
LIVE = {
    "vit": [0],
    "deit": [0],
    "deit-teacher": [0, 1],
    "dinov2": range(17),
    "dinov2-swiglu": range(17),
    "dinov2-registers": [0, *range(5, 21)],
    "beit": range(1, 17),
    "beit-shared": range(1, 17),
    "beit-plain": range(1, 17),
    "beit-cls": [0],
}
"""Which tokens of a 4 x 4 grid have a gradient behind the last block's attention, for the sites F3_HEADS to F6."""


def classifier(kind: str, **changes: Any) -> Any:
    """A random classifier of Hugging Face transformers; the changes are to its configuration."""
    model, config, extra = KINDS[kind]
    torch.manual_seed(0)
    module = model(config(**{**COMMON, **extra, **changes})).eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            around = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.copy_(around + torch.randn_like(parameter) * (0.05 if name.endswith("bias") else 0.2))
    return module


def processor(side: int = 32, longest: int = 16) -> BlipProcessor:
    return BlipProcessor(BlipImageProcessorPil(size={"height": side, "width": side}), tokenizer(longest))


def pixels(seed: int = 0, *, height: int = 32, width: int = 32, batch: int | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (3, height, width) if batch is None else (batch, 3, height, width)
    return torch.randn(shape, generator=generator)


def state(module: nn.Module) -> dict[str, Any]:
    """Everything about a model, and about torch, that a caller could notice."""
    parts, parameters = list(module.modules()), list(module.parameters())
    return {
        "grads": [id(parameter.grad) for parameter in parameters],
        "grad values": [None if parameter.grad is None else parameter.grad.clone() for parameter in parameters],
        "requires": [parameter.requires_grad for parameter in parameters],
        "training": [part.training for part in parts],
        "hooks": [_hooks(part) for part in parts],
        "attention": [part.config._attn_implementation for part in parts if hasattr(part, "config")],
        "weights": [tensor.clone() for tensor in module.state_dict().values()],
        "buffers": [buffer.clone() for buffer in module.buffers()],
        "forward": [part.__dict__.get("forward") for part in parts],
        "torch rng": torch.get_rng_state().clone(),
        "python rng": random.getstate(),
        "grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
    }


def _hooks(part: nn.Module) -> tuple[int, ...]:
    return (
        len(part._forward_hooks),
        len(part._forward_pre_hooks),
        len(part._backward_hooks),
        len(part._backward_pre_hooks),
        len(part._forward_hooks_always_called),
    )


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Two states of `state` are one."""
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert _equal(value, after[key]), key


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, list):
        return len(one) == len(other) and all(_equal(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


# Two towers

TEXTS = ["a red dog", "a dog on grass", "red"]
"""Texts of different lengths; of a tower with a context of 12 tokens the second takes 11."""
LETTERS = "abcdefghijklmnopqrstuvwxyz"
_TOWER = {"intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}


def photo(seed: int = 0, *, height: int = 40, width: int = 64) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8))


def clip_words(context: int = 12) -> CLIPTokenizer:
    """`a`, `red` and `dog` are one piece, all other words their letters."""
    ends = ["<|startoftext|>", "<|endoftext|>"]
    pieces = [*LETTERS, *(f"{letter}</w>" for letter in LETTERS), "re", "red</w>", "do", "dog</w>", *ends]
    merges = [("r", "e"), ("re", "d</w>"), ("d", "o"), ("do", "g</w>")]
    return CLIPTokenizer(vocab={p: i for i, p in enumerate(pieces)}, merges=merges, model_max_length=context)


def siglip_words() -> PreTrainedTokenizerFast:
    """Lower case, no start; padding is the end token."""
    words = ["\u2581", *(f"\u2581{word}" for word in ("red", "dog", "a", "on", "grass", "and")), "un", "able"]
    table = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -9.0), *((w, -3.0) for w in words), *((x, -8.0) for x in LETTERS)]
    made = Tokenizer(Unigram(table, unk_id=2))
    spaces = normalizers.Replace(Regex(r"\s+"), " ")
    made.normalizer = normalizers.Sequence([normalizers.Lowercase(), spaces, normalizers.Strip()])
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="</s>", pad_token="</s>", unk_token="<unk>", model_input_names=["input_ids"]
    )


def two_towers(
    kind: str = "clip", *, seed: int = 1, temperature: float = 4.0, attention: str = "sdpa", **options: Any
) -> Any:
    """The adapter of a random CLIP or SigLIP of 3 blocks, 4 x 4 patches and a context of 12 tokens."""
    torch.manual_seed(seed)
    vision = {**_TOWER, "hidden_size": 12, "image_size": 32, "patch_size": 8}
    text = {**_TOWER, "hidden_size": 16, "max_position_embeddings": 12}
    module: Any
    if kind == "clip":
        words = clip_words()
        ends = {"bos_token_id": words.bos_token_id, "eos_token_id": words.eos_token_id, "pad_token_id": 1}
        text |= {"vocab_size": len(words), **ends}
        module = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))
        images = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    else:
        words = siglip_words()
        ends = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 1}
        text |= {"vocab_size": len(words), "projection_size": 12, **ends}
        module = SiglipModel(SiglipConfig(text_config=text, vision_config=vision))
        images = SiglipImageProcessorPil(size={"height": 32, "width": 32})
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            around = 1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0
            parameter.copy_(around + torch.randn_like(parameter) * 0.3)
        module.logit_scale.fill_(float(np.log(temperature)))
    module.set_attn_implementation(attention)
    adapter = ClipHF if kind == "clip" else SiglipHF
    return adapter.wrap(module.eval(), SimpleNamespace(image_processor=images, tokenizer=words), **options)


class Slow:
    """A copy of two towers in float64 that writes its attention out: every image with every text, in one graph.

    `change` may edit the copy before it runs, and `mask` is the texts' attention mask in place of the tokenizer's.
    """

    def __init__(
        self,
        adapter: Any,
        pixels: torch.Tensor,
        texts: Sequence[str],
        *,
        change: Callable[[Any], None] | None = None,
        mask: torch.Tensor | None = None,
        **options: Any,
    ) -> None:
        self.module = copy.deepcopy(adapter.module).double()
        self.module.set_attn_implementation("eager")
        if change is not None:
            change(self.module)
        self.towers = {"vision": self.module.vision_model, "text": self.module.text_model}
        self.seen: dict[tuple[str, int, str], torch.Tensor] = {}
        for stream, tower in self.towers.items():
            for layer, block in enumerate(tower.encoder.layers):
                self._watch((stream, layer), block)
        full = isinstance(self.module, SiglipModel)
        padding = {"padding": "max_length", "max_length": 12} if full else {"padding": True}
        coded = dict(adapter._tokenizer(list(texts), truncation=True, return_tensors="pt", **padding))
        self.tensors = coded if mask is None else coded | {"attention_mask": mask}
        pixels = pixels if pixels.ndim == 4 else pixels[None]
        out = self.module(pixel_values=pixels.double(), **self.tensors, output_attentions=True, **options)
        for stream, made in (("vision", out.vision_model_output), ("text", out.text_model_output)):
            self.seen |= {(stream, layer, "F2"): seen for layer, seen in enumerate(made.attentions or ())}
        self.logits = out.logits_per_image
        self.scale = self.module.logit_scale.exp()
        self.cosines = (self.logits - getattr(self.module, "logit_bias", 0.0)) / self.scale
        self.texts = nn.functional.normalize(out.text_embeds, dim=-1)
        self.images = nn.functional.normalize(out.image_embeds, dim=-1)

    def _watch(self, place: tuple[str, int], block: Any) -> None:
        parts = {"F1": block.layer_norm1, "F4": block.layer_norm2, "F5": block.mlp, "F6": block}
        parts |= {name: getattr(block.self_attn, f"{name}_proj") for name in ("q", "k", "v")}

        def keep(site: str) -> Any:
            return lambda _, __, made: self.seen.__setitem__((*place, site), made)

        for site, part in parts.items():
            part.register_forward_hook(keep(site))
        block.self_attn.out_proj.register_forward_hook(
            lambda _, given, made: self.seen.update({(*place, "F3_HEADS"): given[0], (*place, "F3"): made})
        )

    def at(self, stream: str, layer: int, site: str) -> torch.Tensor:
        """A tensor [rows, ...]; layers count from the end too."""
        return self.seen[stream, layer % 3, site]

    def gradient(self, y: torch.Tensor, stream: str, layer: int, site: str) -> torch.Tensor:
        (found,) = torch.autograd.grad(y, self.at(stream, layer, site), retain_graph=True)
        return found

    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        """Image tokens of CLIP [..., D] as its class token is embedded."""
        normed = self.module.vision_model.post_layernorm(tokens)
        return nn.functional.normalize(self.module.visual_projection(normed), dim=-1)
