"""Cost of explaining a class with a full-size vision transformer (ViT-B/16 at 224 pixels, random weights).

Every figure is a ratio to the model's own forward without gradient, measured in the same run; pytorch-grad-cam is
measured beside it, if it is installed.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import ViTConfig, ViTForImageClassification

import vlcam
from benchmarks.timing import Jobs, in_turn, peak_memory, ratios

SIDE, CLASS = 224, 7
OWN = "the model's own forward"
ONE = "one class, F1 of the last block (pgc-gradcam)"
PEER = "the same by pytorch-grad-cam"


def jobs(device: str = "cpu") -> Jobs:
    """What is measured, by name; the first is the unit."""
    torch.manual_seed(0)
    module = ViTForImageClassification(ViTConfig(num_labels=1000)).eval().to(device)
    model = vlcam.wrap(module)
    pixels = torch.randn(3, SIDE, SIDE, device=device)
    names = vlcam.recipes()
    attention = [
        name for name in ("raw-attention", "attention-rollout", "chefer-generic", "legrad", "agcam") if name in names
    ]
    grids = {
        text: [recipe for recipe in vlcam.all_recipes(model, layers=layers) if recipe.needs_gradient]
        for text, layers in (("last block", "last"), ("last four blocks", range(8, 12)), ("all twelve blocks", "all"))
    }

    def forward() -> object:
        with torch.no_grad():
            return module(pixel_values=pixels[None])

    def sweep(grid: list[vlcam.Recipe]) -> object:
        return model.sweep(pixels, recipes=grid, target=CLASS, empty="keep")

    found: dict[str, Any] = {
        OWN: forward,
        "the same once more, for the noise of this table": forward,
        ONE: lambda: model.explain(pixels, target=CLASS),
        PEER: _peer(module, pixels),
    }
    for name in attention:
        found[f"one class, {name}"] = lambda name=name: model.explain(pixels, target=CLASS, recipe=name)
    for text, grid in grids.items():
        found[f"{len(grid)} gradient recipes, every site of the {text}"] = lambda grid=grid: sweep(grid)
    return {name: job for name, job in found.items() if job is not None}


def _peer(module: Any, pixels: torch.Tensor) -> Any:
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
            logits: torch.Tensor = self.inner(pixel_values=images).logits
            return logits

    def grid(tokens: torch.Tensor) -> torch.Tensor:
        return tokens[:, 1:].reshape(len(tokens), 14, 14, -1).permute(0, 3, 1, 2)

    peer = GradCAM(model=Logits(), target_layers=[module.vit.layers[-1].layernorm_before], reshape_transform=grid)
    return lambda: peer(input_tensor=pixels[None], targets=[ClassifierOutputTarget(CLASS)])


def table(*, rounds: int, device: str) -> str:
    """Measure and lay out as Markdown."""
    measured = jobs(device)
    seconds = in_turn(measured, rounds, device)
    own = next(iter(seconds.values()))
    memory = peak_memory(jobs, list(measured)[2:]) if device == "cpu" else {}
    lines = [
        "# What an explanation of a class costs",
        "",
        "ViT-B/16 at 224 pixels with random weights. The unit is the model's own forward without gradient on one "
        "image. All jobs take turns, in alternating order. Memory: by how much the job raises the peak of a process "
        "that has run one forward. Remade by `python -m benchmarks vit --write docs/costs_vit.md`. On a GPU: not "
        "measured.",
        "",
        f"{torch.get_num_threads()} threads, {device}, {rounds} rounds, own forward {min(own):.2f} s",
        "",
        "| work | median against median | fastest against fastest | memory, MiB |",
        "|---|---|---|---|",
    ]
    for name, (median, fastest) in ratios(seconds).items():
        more = f"{memory[name]:.0f}" if name in memory else ""
        lines.append(f"| {name} | {median:.2f} | {fastest:.2f} | {more} |")
    return "\n".join(lines)
