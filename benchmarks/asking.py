"""Cost of recipes that ask the model again, in forward passes of one image (ViT of width 192 at 224 pixels)."""

from __future__ import annotations

import torch
from transformers import ViTConfig, ViTForImageClassification

import vlcam
from benchmarks.timing import in_turn
from vlcam.asking import BATCH

RECIPES = ("pgc-scorecam", "torchcam-scorecam", "ablationcam", "vit-reciprocam")


def table(*, rounds: int, device: str) -> str:
    """Measure and lay out as Markdown."""
    torch.manual_seed(0)
    config = ViTConfig(hidden_size=192, num_attention_heads=3, intermediate_size=768, num_labels=1000)
    module = ViTForImageClassification(config).eval().to(device)
    model = vlcam.wrap(module)
    pixels = torch.randn(3, 224, 224, device=device)
    many = torch.randn(BATCH, 3, 224, 224, device=device)
    asked = {name: model.explain(pixels, target=7, recipe=name).provenance["run"]["asked"] for name in RECIPES}

    def forward() -> object:
        with torch.no_grad():
            return module(pixel_values=many)

    jobs = {"batch": forward} | {
        name: lambda name=name: model.explain(pixels, target=7, recipe=name) for name in RECIPES
    }
    seconds = {name: min(took) for name, took in in_turn(jobs, rounds, device).items()}
    one = seconds["batch"] / BATCH
    lines = [
        "# What asking the model again costs",
        "",
        f"A ViT of width 192 at 224 pixels with random weights; the unit is a {BATCH}th of a forward pass of {BATCH} "
        "images without gradient, measured in the same run. The fastest of each counts. Remade by "
        "`python -m benchmarks asking --write docs/costs_asking.md`. On a GPU: not measured.",
        "",
        f"{torch.get_num_threads()} threads, {device}, {rounds} rounds",
        "",
        "| recipe | forwards that it asks for | cost in forwards | more than asked for |",
        "|---|---|---|---|",
    ]
    for name in RECIPES:
        cost = seconds[name] / one
        lines.append(f"| `{name}` | {asked[name]} + 1 | {cost:.0f} | {cost / (asked[name] + 1) - 1:+.1%} |")
    return "\n".join(lines)
