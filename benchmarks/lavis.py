"""Cost of explaining an ITM score with LAVIS's BLIP (ViT-B at 384 pixels, BERT-base), beside LAVIS's own function.

Runs in the environment of LAVIS: `.venv-lavis/bin/python -m benchmarks itm --lavis`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lavis.models.blip_models.blip import BlipBase
from lavis.models.blip_models.blip_image_text_matching import BlipITM, compute_gradcam
from lavis.models.med import XBertEncoder
from lavis.models.vit import VisionTransformerEncoder
from transformers import BertConfig, BertTokenizer

import vlcam
from benchmarks.timing import in_turn, ratios

SIDE = 384
CAPTION = "a dog on the grass next to a red ball"
BLOCK = 6
"""The block that LAVIS reads by default."""


def full_size() -> Any:
    """A `BlipITM` of the released size with random weights and a small vocabulary."""
    torch.manual_seed(0)
    own = BlipBase.__dict__["init_tokenizer"]
    BlipBase.init_tokenizer = classmethod(lambda _: _tokenizer())
    try:
        vision = VisionTransformerEncoder(
            img_size=SIDE, patch_size=16, embed_dim=768, depth=12, num_heads=12, qkv_bias=True
        )
        vision.vision_width = 768
        config = BertConfig(
            vocab_size=30524, encoder_width=768, add_cross_attention=True, add_type_embeddings=False, pad_token_id=0
        )
        return BlipITM(vision, XBertEncoder(config, add_pooling_layer=False)).eval()
    finally:
        BlipBase.init_tokenizer = own


def table(*, rounds: int, device: str) -> str:
    """Measure and lay out as Markdown."""
    module = full_size().to(device)
    model = vlcam.wrap(module, (None, None))
    pixels = torch.randn(3, SIDE, SIDE, device=device)
    forward = _forward(module, pixels)
    words = CAPTION.split()
    texts = [" ".join(words[count:] + words[:count]) for count in range(10)]  # ten texts of one length
    jobs: dict[str, Callable[[], object]] = {
        "the model's own forward": forward,
        "the same once more, for the noise of this table": forward,
        "vlcam: one caption, CROSS of one block": lambda: model.explain(pixels, CAPTION, "lavis-itm", layer=BLOCK),
        "LAVIS `compute_gradcam`: the same": _published(module, pixels, [CAPTION]),
        "vlcam: ten captions, one image": lambda: model.explain(pixels, texts, "lavis-itm", layer=BLOCK),
        "LAVIS `compute_gradcam`: the same, a batch of ten": _published(module, pixels, texts),
    }
    seconds = in_turn(jobs, rounds, device)
    own = seconds[next(iter(jobs))]
    lines = [
        "# What an explanation of a LAVIS model costs",
        "",
        "LAVIS's `BlipITM` of the released size (ViT-B at 384 pixels, BERT-base) with random weights. The unit is the "
        "model's own forward without gradient on one caption. All jobs take turns, in an order drawn anew in every "
        "round. Remade by "
        "`.venv-lavis/bin/python -m benchmarks itm --lavis --write docs/costs_lavis.md`. On a GPU: not measured.",
        "",
        f"{torch.get_num_threads()} threads, {device}, {rounds} rounds, own forward {min(own):.2f} s",
        "",
        "| work | median against median | fastest against fastest |",
        "|---|---|---|",
    ]
    for name, (median, fastest) in ratios(seconds).items():
        lines.append(f"| {name} | {median:.2f} | {fastest:.2f} |")
    return "\n".join(lines)


def _tokenizer() -> Any:
    """As LAVIS makes it, of few words: filled up to BERT's 30,522, so that [DEC] and [ENC] have their usual ids."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *dict.fromkeys(CAPTION.split())]
    words += [f"[unused{index}]" for index in range(len(words), 30522)]
    with TemporaryDirectory() as folder:
        file = Path(folder) / "vocab.txt"
        file.write_text("\n".join(words), encoding="utf-8")
        made = BertTokenizer(str(file))
    made.add_special_tokens({"bos_token": "[DEC]"})
    made.add_special_tokens({"additional_special_tokens": ["[ENC]"]})
    made.enc_token_id = made.additional_special_tokens_ids[0]
    return made


def _forward(module: Any, pixels: torch.Tensor) -> Callable[[], object]:
    def run() -> object:
        with torch.no_grad():
            return module({"image": pixels[None], "text_input": [CAPTION]}, match_head="itm")

    return run


def _published(module: Any, pixels: torch.Tensor, texts: list[str]) -> Callable[[], object]:
    """LAVIS's own function; the flag that it leaves on, and the gradients, are removed behind it."""
    attention = module.text_encoder.encoder.layer[BLOCK].crossattention.self
    images = pixels.expand(len(texts), *pixels.shape)
    tokens = module.tokenizer(
        texts, padding="longest", truncation=True, max_length=module.max_txt_len, return_tensors="pt"
    ).to(pixels.device)

    def run() -> object:
        try:
            return compute_gradcam(module, images, texts, tokens, block_num=BLOCK)
        finally:
            attention.save_attention = False
            module.zero_grad()

    return run
