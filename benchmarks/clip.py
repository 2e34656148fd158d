"""Cost of explaining contrastive scores with a full-size CLIP (ViT-B/16 at 224 pixels, random weights).

The unit is the image tower's own forward without gradient; pytorch-grad-cam is measured beside it, if it is installed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from transformers import CLIPConfig, CLIPModel, CLIPProcessor

import vlcam
from benchmarks.timing import Jobs, in_turn, peak_memory, ratios

SIDE, PATCH = 224, 16
OWN = "the image tower's own forward"
ENCODE = "encoding {} without gradient"
TITLES = {1: "one prompt", 10: "ten prompts"}
COLOURS = ("red", "green", "blue", "yellow", "purple", "orange", "cyan", "pink", "brown", "gray")
TEXTS = tuple(f"a photo of a {colour} square on the left" for colour in COLOURS)


def jobs(device: str = "cpu") -> Jobs:
    """What is measured, by name; the first is the unit."""
    torch.manual_seed(0)
    processor = CLIPProcessor.from_pretrained(vlcam.models()["tiny-clip"].folder, backend="pil")
    module = CLIPModel(_config(processor.tokenizer)).eval().to(device)
    model = vlcam.wrap(module, processor, image_size=(SIDE, SIDE))
    pixels = torch.randn(3, SIDE, SIDE, device=device)
    texts = list(TEXTS)
    ids = {
        key: value.to(device) for key, value in processor.tokenizer(texts, padding=True, return_tensors="pt").items()
    }

    def image_tower() -> object:
        with torch.no_grad():
            return module.get_image_features(pixel_values=pixels[None])

    def encode(count: int) -> Callable[[], object]:
        def run() -> object:
            with torch.no_grad():
                return module.get_text_features(**{key: value[:count] for key, value in ids.items()})

        return run

    found: dict[str, Any] = {
        OWN: image_tower,
        "the same once more, for the noise of this table": image_tower,
        **{ENCODE.format(TITLES[n]): encode(n) for n in TITLES},
        "one prompt, clip-gradcam": lambda: model.explain(pixels, texts[0]),
        "ten prompts, clip-gradcam": lambda: model.explain(pixels, texts),
        "ten prompts by pytorch-grad-cam, one after the other": _peer(module, ids, pixels),
    }
    for name in ("chefer-clip", "grad-eclip", "legrad", "maskclip", "chefer-clip-text"):
        found[f"ten prompts, {name}"] = lambda name=name: model.explain(pixels, texts, name)
    found["ten prompts, clip-gradcam on the softmax over them"] = lambda: model.explain(
        pixels, texts, "pgc-clip-softmax"
    )
    return {name: job for name, job in found.items() if job is not None}


def _config(tokenizer: Any) -> CLIPConfig:
    own = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return CLIPConfig(
        text_config={"vocab_size": len(tokenizer), **own}, vision_config={"patch_size": PATCH, "image_size": SIDE}
    )


def _peer(module: CLIPModel, ids: dict[str, torch.Tensor], pixels: torch.Tensor) -> Callable[[], object] | None:
    """GradCAM of pytorch-grad-cam with the wrapper that it asks for; None where it is not installed."""
    try:
        from pytorch_grad_cam import GradCAM
        from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
    except ImportError:
        return None

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.inner(pixel_values=images, **ids).logits_per_image
            return logits

    def grid(tokens: torch.Tensor) -> torch.Tensor:
        side = SIDE // PATCH
        return tokens[:, 1:].reshape(len(tokens), side, side, -1).permute(0, 3, 1, 2)

    peer = GradCAM(Logits(), [module.vision_model.encoder.layers[-1].layer_norm1], reshape_transform=grid)

    def run() -> object:
        return [peer(input_tensor=pixels[None], targets=[ClassifierOutputTarget(n)]) for n in range(len(TEXTS))]

    return run


def table(*, rounds: int, device: str) -> str:
    """Measure and lay out as Markdown."""
    measured = jobs(device)
    seconds = in_turn(measured, rounds, device)
    memory = (
        peak_memory(jobs, [name for name in measured if name.startswith(("one", "ten"))]) if device == "cpu" else {}
    )
    lines = [
        "# What an explanation of a contrastive score costs: CLIP ViT-B/16 at 224 pixels",
        "",
        "Random weights, prompts of 9 words. The unit is the image tower's own forward without gradient on one image. "
        "All jobs take turns, in an order drawn anew in every round. Memory: by how much the job raises the peak of a "
        "process that has "
        "run one forward. Remade by `python -m benchmarks clip --write docs/costs_clip.md`. On a GPU: not measured.",
        "",
        f"{torch.get_num_threads()} threads, {device}, {rounds} rounds, image tower {min(seconds[OWN]):.2f} s",
        "",
        "| work | median against median | fastest against fastest | memory, MiB |",
        "|---|---|---|---|",
    ]
    for job, (median, fastest) in ratios(seconds).items():
        more = f"{memory[job]:.0f}" if job in memory else ""
        lines.append(f"| {job} | {median:.2f} | {fastest:.2f} | {more} |")
    for title in TITLES.values():
        median, fastest = _less_encoding(seconds, title)
        lines.append(f"| {title}, clip-gradcam, less the encoding of text | {median:.2f} | {fastest:.2f} | |")
    return "\n".join(lines)


def _less_encoding(seconds: dict[str, list[float]], title: str) -> tuple[float, float]:
    whole, text, own = seconds[f"{title}, clip-gradcam"], seconds[ENCODE.format(title)], seconds[OWN]
    middle, least = statistics.median, min
    return (middle(whole) - middle(text)) / middle(own), (least(whole) - least(text)) / least(own)
