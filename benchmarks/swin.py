"""Cost of explaining a class with a full-size Swin transformer (Swin-T at 224 pixels, random weights)."""

from __future__ import annotations

from typing import Any

import torch
from transformers import SwinConfig, SwinForImageClassification

import vlcam
from benchmarks.timing import Jobs
from benchmarks.vit import CLASS, OWN, SIDE, peer_job, sweep_jobs

WHAT = "Swin-T at 224 pixels"


def jobs(device: str = "cpu") -> Jobs:
    """What is measured, by name; the first is the unit."""
    torch.manual_seed(0)
    config = SwinConfig(depths=[2, 2, 6, 2], num_heads=[3, 6, 12, 24], embed_dim=96, num_labels=1000)
    module = SwinForImageClassification(config).eval().to(device)
    model = vlcam.wrap(module)
    pixels = torch.randn(3, SIDE, SIDE, device=device)
    last = module.swin.encoder.layers[-1].blocks[-1]

    def forward() -> object:
        with torch.no_grad():
            return module(pixel_values=pixels[None])

    def grid(tokens: torch.Tensor) -> torch.Tensor:
        return tokens.reshape(len(tokens), 7, 7, -1).permute(0, 3, 1, 2)

    found: dict[str, Any] = {
        OWN: forward,
        "the same once more, for the noise of this table": forward,
        "one class, F4 of the last block": lambda: model.explain(pixels, target=CLASS, site="F4"),
        "the same by pytorch-grad-cam": peer_job(module, last.layernorm_after, grid, pixels),
        "one class, F1 of the last block": lambda: model.explain(pixels, target=CLASS),
        "one class, F2 of the last block": lambda: model.explain(pixels, target=CLASS, recipe="attn-gradcam"),
    }
    found |= sweep_jobs(model, pixels, {"last block": "last", "last stage": range(10, 12)})
    return {name: job for name, job in found.items() if job is not None}
