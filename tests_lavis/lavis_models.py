"""Small random models of LAVIS with a vocabulary of their own in place of the hub's; every parameter random."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from lavis.models.albef_models import AlbefBase
from lavis.models.albef_models.albef_retrieval import AlbefRetrieval
from lavis.models.blip2_models.blip2 import Blip2Base
from lavis.models.blip2_models.blip2 import LayerNorm as Blip2LayerNorm
from lavis.models.blip2_models.blip2_image_text_matching import Blip2ITM
from lavis.models.blip2_models.Qformer import BertLMHeadModel
from lavis.models.blip_models.blip import BlipBase
from lavis.models.blip_models.blip_caption import BlipCaption
from lavis.models.blip_models.blip_image_text_matching import BlipITM
from lavis.models.blip_models.blip_vqa import BlipVQA
from lavis.models.clip_vit import VisionTransformer as ClipTransformer
from lavis.models.eva_vit import VisionTransformer as EvaTransformer
from lavis.models.med import XBertEncoder, XBertLMHeadDecoder
from lavis.models.vit import VisionTransformerEncoder
from lavis.processors.blip_processors import BlipCaptionProcessor, BlipImageEvalProcessor, BlipQuestionProcessor
from PIL import Image
from torch import nn
from transformers import BertTokenizer
from transformers.models.bert.configuration_bert import BertConfig

PIECES = (
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "dog", "on", "the", "grass", "ball", "un", "##aff"),
    *("##able", ",", "cat", "near", "it", "is"),
)


def tokenizer(pieces: Sequence[str], *, blip: bool) -> BertTokenizer:
    """As LAVIS makes it of the hub's vocabulary."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "vocab.txt"
        file.write_text("\n".join(pieces))
        made = BertTokenizer(str(file))
    if blip:
        made.add_special_tokens({"bos_token": "[DEC]"})
        made.add_special_tokens({"additional_special_tokens": ["[ENC]"]})
        made.enc_token_id = made.additional_special_tokens_ids[0]
    return made


@contextmanager
def vocabulary(pieces: Sequence[str] = PIECES) -> Iterator[None]:
    """Models that are built inside have this vocabulary."""
    before = {base: base.__dict__["init_tokenizer"] for base in (BlipBase, AlbefBase)}
    BlipBase.init_tokenizer = classmethod(lambda _: tokenizer(pieces, blip=True))
    AlbefBase.init_tokenizer = classmethod(lambda _: tokenizer(pieces, blip=False))
    try:
        yield
    finally:
        for base, own in before.items():
            base.init_tokenizer = own


def vision(*, side: int = 32, patch: int = 8, width: int = 16, depth: int = 2, **more: Any) -> Any:
    made = VisionTransformerEncoder(
        img_size=side, patch_size=patch, embed_dim=width, depth=depth, num_heads=2, mlp_ratio=2, qkv_bias=True, **more
    )
    made.vision_width = width
    return made


def text_config(*, width: int = 24, layers: int = 4, heads: int = 2, **more: Any) -> BertConfig:
    settings = {
        "vocab_size": len(PIECES) + 4,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 32,
        "max_position_embeddings": 32,
        "encoder_width": 16,
        "add_cross_attention": True,
        "add_type_embeddings": False,
        "pad_token_id": 0,
    }
    return BertConfig(**{**settings, **more})


def randomised(module: nn.Module, seed: int) -> Any:
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            around = 1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0
            if name == "temp":
                parameter.fill_(0.07)
            else:
                parameter.copy_(around + torch.randn_like(parameter) * 0.35)
    return module.eval()


def blip(*, seed: int = 0, text: dict[str, Any] | None = None, **image: Any) -> Any:
    """A `BlipITM` of 4 x 4 patches and 4 text blocks."""
    with vocabulary():
        encoder = XBertEncoder(text_config(**text or {}), add_pooling_layer=False)
        module = BlipITM(vision(**image), encoder, embed_dim=8, max_txt_len=16)
    return randomised(module, seed)


def albef(*, seed: int = 0, text: dict[str, Any] | None = None, **image: Any) -> Any:
    """An `AlbefRetrieval` of 4 x 4 patches, 2 text blocks and 2 fusion blocks."""
    with vocabulary():
        encoder = XBertEncoder(text_config(**{"fusion_layer": 2, **(text or {})}), add_pooling_layer=False)
        module = AlbefRetrieval(vision(**image), encoder, queue_size=8, embed_dim=8, max_txt_len=16)
    return randomised(module, seed)


def captioner(*, seed: int = 0, prompt: str = "a red") -> Any:
    """A `BlipCaption` of 4 x 4 patches and 3 text blocks."""
    with vocabulary():
        module = BlipCaption(vision(), XBertLMHeadDecoder(text_config(layers=3)), prompt=prompt, max_txt_len=16)
    return randomised(module, seed)


def answerer(*, seed: int = 0) -> Any:
    """A `BlipVQA` of 4 x 4 patches and 3 text blocks, whose decoder has 2 and reads the width of the text."""
    decoder = text_config(layers=2, encoder_width=24)
    with vocabulary():
        encoder = XBertEncoder(text_config(layers=3), add_pooling_layer=False)
        module = BlipVQA(vision(), encoder, XBertLMHeadDecoder(decoder), max_txt_len=16)
    return randomised(module, seed)


def eva(*, side: int | tuple[int, int] = 32, patch: int = 8, width: int = 16, depth: int = 2, **more: Any) -> Any:
    settings = {"num_heads": 2, "mlp_ratio": 2, "qkv_bias": True, "norm_layer": partial(nn.LayerNorm, eps=1e-6)}
    return EvaTransformer(img_size=side, patch_size=patch, embed_dim=width, depth=depth, **settings, **more)


def clip_tower(*, checkpointing: bool = False) -> Any:
    return ClipTransformer(32, 8, 16, layers=4, heads=2, use_grad_checkpointing=checkpointing)


@contextmanager
def without_hub(tower: nn.Module) -> Iterator[None]:
    """BLIP-2 models that are built inside have this vision tower, and a small vocabulary and Q-Former."""

    def vision_encoder(*_: Any) -> tuple[nn.Module, nn.Module]:
        return tower, Blip2LayerNorm(tower.num_features)

    def former(_: Any, queries: int, width: int, every: int) -> tuple[nn.Module, nn.Parameter]:
        config = text_config(encoder_width=width, cross_attention_freq=every, query_length=queries)
        return BertLMHeadModel(config), nn.Parameter(torch.zeros(1, queries, config.hidden_size))

    made = {
        "init_tokenizer": lambda _: blip2_tokenizer(),
        "init_vision_encoder": vision_encoder,
        "init_Qformer": former,
    }
    before = {name: Blip2Base.__dict__[name] for name in made}
    for name, function in made.items():
        setattr(Blip2Base, name, classmethod(function))
    try:
        yield
    finally:
        for name, own in before.items():
            setattr(Blip2Base, name, own)


def blip2_tokenizer() -> BertTokenizer:
    """As `Blip2Base` makes it of the hub's vocabulary."""
    made = tokenizer(PIECES, blip=False)
    made.add_special_tokens({"bos_token": "[DEC]"})
    return made


def blip2(*, seed: int = 0, kind: Any = Blip2ITM, tower: nn.Module | None = None) -> Any:
    """A `Blip2ITM` of 4 x 4 patches, 4 learned queries, and 4 blocks of which the first and the third look at them."""
    with without_hub(tower or eva()):
        module = kind(num_query_token=4, embed_dim=8, max_txt_len=16)
    return randomised(module, seed)


def processors(side: int = 32) -> tuple[Any, Any]:
    return BlipImageEvalProcessor(image_size=side), BlipCaptionProcessor()


def question_processors(side: int = 32) -> tuple[Any, Any]:
    return BlipImageEvalProcessor(image_size=side), BlipQuestionProcessor()


def pixels(seed: int = 0, *, side: int = 32, batch: int | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((3, side, side) if batch is None else (batch, 3, side, side), generator=generator)


def picture() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 64, 3), np.uint8))


def state(module: nn.Module) -> list[Any]:
    """Everything about a model that an explanation must leave as it was."""
    found: list[Any] = [tensor.clone() for tensor in module.state_dict().values()]
    found += [parameter.requires_grad for parameter in module.parameters()]
    found += [parameter.grad is None for parameter in module.parameters()]
    for part in module.modules():
        found += [part.training, len(part._forward_hooks), len(part._forward_pre_hooks), "forward" in vars(part)]
        found += [getattr(part, flag, None) for flag in ("save_attention", "use_checkpoint")]
        found += sorted(vars(part))
    return found


def same(before: list[Any], after: list[Any]) -> bool:
    """Whether two such states are one."""
    pairs = zip(before, after, strict=True)
    return all(torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other for one, other in pairs)
