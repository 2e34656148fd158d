"""Cost of every map that a description allows (ViT-B/16 at 224 pixels, random weights).

Laid out as the table for explanations of a class, in the same unit.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import ViTConfig, ViTForImageClassification

import vlcam
from benchmarks import vit
from benchmarks.timing import Jobs
from vlcam.ambiguity import fitting_recipes

SIDE, CLASS = 224, 7
OWN = "the model's own forward"
WHAT = "every map that a description allows, ViT-B/16 at 224 pixels"


def jobs(device: str = "cpu") -> Jobs:
    """What is measured, by name; the first is the unit."""
    torch.manual_seed(0)
    module = ViTForImageClassification(ViTConfig(num_labels=1000)).eval().to(device)
    model = vlcam.wrap(module)
    pixels = torch.randn(3, SIDE, SIDE, device=device)

    def forward() -> object:
        with torch.no_grad():
            return module(pixel_values=pixels[None])

    def figures(description: str) -> object:
        return str(model.ambiguity(pixels, description=description, target=CLASS))

    found: dict[str, Any] = {
        OWN: forward,
        "the same once more, for the noise of this table": forward,
        "one class, F1 of the last block (pgc-gradcam)": lambda: model.explain(pixels, target=CLASS),
    }
    for name in ("attention-last-layer", "gradcam-vit-last-layer", "gradcam-vit"):
        count = len(fitting_recipes(model, name))
        found[f"{name}: maps of {count:,} recipes"] = lambda name=name: model.ambiguity(
            pixels, description=name, target=CLASS
        )
        found[f"{name}: the same with all figures on them"] = lambda name=name: figures(name)
    found["gradcam-vit-last-layer: finding its recipes, once for a model"] = lambda: fitting_recipes(
        model, "gradcam-vit-last-layer"
    )
    return found


def table(*, rounds: int, device: str) -> str:
    """Measure and lay out as Markdown."""
    return vit.table(rounds=rounds, device=device, make=jobs, what=WHAT, name="ambiguity")
