"""Cost of explaining an ITM score with a full-size BLIP (ViT-B at 384 pixels, BERT-base, random weights).

Every figure is a ratio to the model's own forward without gradient, measured in the same run: all jobs take turns,
because timings on a shared machine drift. The fastest of each is the figure least disturbed by other work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import BertTokenizer, BlipConfig, BlipForImageTextRetrieval, BlipProcessor
from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

import vlcam
from benchmarks.timing import in_turn, ratios
from vlcam.adapter import Inputs
from vlcam.anatomy import Tap
from vlcam.capture import capture
from vlcam.catalogue import named
from vlcam.targets import resolve

SIDE = 384
CAPTION = "a dog on the grass next to a red ball"


def full_size() -> tuple[Any, Any]:
    """A BLIP of the released size with random weights, and a processor with a small vocabulary."""
    torch.manual_seed(0)
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *dict.fromkeys(CAPTION.split())]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    # Filled up to BERT's 30,522 words, so that [DEC] and [ENC] have the ids that released checkpoints give them.
    vocabulary |= {f"[unused{index}]": index for index in range(len(vocabulary), 30522)}
    config = BlipConfig(
        vision_config={"image_size": SIDE}, text_config={"vocab_size": 30524, "encoder_hidden_size": 768}
    )
    words = BertTokenizer(vocab=vocabulary, model_max_length=512)
    images = BlipImageProcessorPil(size={"height": SIDE, "width": SIDE})
    return BlipForImageTextRetrieval(config).eval(), BlipProcessor(images, words)


def table(*, rounds: int, device: str) -> str:
    """Measure and lay out as Markdown."""
    module, processor = full_size()
    model = vlcam.wrap(module.to(device), processor)
    pixels = torch.randn(3, SIDE, SIDE, device=device)
    forward = _forward(module, processor, pixels)
    jobs: dict[str, Callable[[], object]] = {
        "the model's own forward": forward,
        "the same once more, for the noise of this table": forward,
        "one caption, CROSS of one block": lambda: model.explain(pixels, CAPTION, "lavis-itm", layer=7),
        "the same, capture and backward alone": _bare(model, pixels, [CAPTION]),
        "one caption, CROSS of one block, and every score read": lambda: dict(
            model.explain(pixels, CAPTION, "lavis-itm", layer=7).scores
        ),
        "ten captions, one image, CROSS of one block": lambda: model.explain(pixels, [CAPTION] * 10, layer=7),
        "one caption, CROSS of the first eleven blocks": lambda: model.explain(
            pixels, CAPTION, "lavis-itm", layer=range(11), layer_rule="mean"
        ),
        "one caption, CONTEXT": lambda: model.explain(pixels, CAPTION, "context-gradcam"),
        "one caption, F1 of the last vision block": lambda: model.explain(pixels, CAPTION, "pgc-gradcam"),
    }
    seconds = in_turn(jobs, rounds, device)
    own = seconds[next(iter(jobs))]
    lines = [
        "# What an explanation costs",
        "",
        "A BLIP of the released size (ViT-B at 384 pixels, BERT-base) with random weights. The unit is the model's own "
        "forward without gradient on one caption. All jobs take turns, in an order drawn anew in every round. Remade "
        "by "
        "`python -m benchmarks itm --write docs/costs.md`. On a GPU: not measured.",
        "",
        f"{torch.get_num_threads()} threads, {device}, {rounds} rounds, own forward {min(own):.2f} s",
        "",
        "| work | median against median | fastest against fastest |",
        "|---|---|---|",
    ]
    for name, (median, fastest) in ratios(seconds).items():
        lines.append(f"| {name} | {median:.2f} | {fastest:.2f} |")
    return "\n".join(lines)


def _forward(module: Any, processor: Any, pixels: torch.Tensor) -> Callable[[], object]:
    text = processor.tokenizer(CAPTION, return_tensors="pt").to(pixels.device)

    def run() -> object:
        with torch.no_grad():
            return module(input_ids=text["input_ids"], attention_mask=text["attention_mask"], pixel_values=pixels[None])

    return run


def _bare(model: vlcam.Explainer, pixels: torch.Tensor, captions: list[str]) -> Callable[[], object]:
    """One pass without preprocessing, maps and record."""
    adapter = model.adapter
    inputs = Inputs(adapter.accept_pixels(pixels[None]), adapter.prepare_texts(captions), (0,) * len(captions))
    target = resolve(named("lavis-itm").recipe, adapter.heads)
    return lambda: capture(adapter, inputs, [Tap("fusion", 7, "CROSS")], [target])
