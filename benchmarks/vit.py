"""Cost of explaining a class with a full-size vision transformer (ViT-B/16 at 224 pixels, random weights).

Every figure is a ratio to the model's own forward without gradient, measured in the same run; pytorch-grad-cam is
measured beside it, if it is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import ViTConfig, ViTForImageClassification

import vlcam
from benchmarks.timing import Jobs, in_turn, peak_memory, ratios

SIDE, CLASS = 224, 7
OWN = "the model's own forward"

WHAT = "ViT-B/16 at 224 pixels"


def jobs(device: str = "cpu") -> Jobs:
    """What is measured, by name; the first is the unit."""
    torch.manual_seed(0)
    module = ViTForImageClassification(ViTConfig(num_labels=1000)).eval().to(device)
    model = vlcam.wrap(module)
    pixels = torch.randn(3, SIDE, SIDE, device=device)

    def forward() -> object:
        with torch.no_grad():
            return module(pixel_values=pixels[None])

    def grid(tokens: torch.Tensor) -> torch.Tensor:
        return tokens[:, 1:].reshape(len(tokens), 14, 14, -1).permute(0, 3, 1, 2)

    found: dict[str, Any] = {
        OWN: forward,
        "the same once more, for the noise of this table": forward,
        "one class, F1 of the last block (pgc-gradcam)": lambda: model.explain(pixels, target=CLASS),
        "the same by pytorch-grad-cam": peer_job(module, module.vit.layers[-1].layernorm_before, grid, pixels),
    }
    for name in ("raw-attention", "attention-rollout", "chefer-generic", "legrad", "agcam"):
        found[f"one class, {name}"] = lambda name=name: model.explain(pixels, target=CLASS, recipe=name)
    found |= sweep_jobs(model, pixels, {"last block": "last", "last four blocks": range(8, 12), "all twelve": "all"})
    return {name: job for name, job in found.items() if job is not None}


def sweep_jobs(model: vlcam.Explainer, pixels: torch.Tensor, blocks: Mapping[str, Any]) -> dict[str, Any]:
    """Sweeps of every valid gradient recipe over all sites of some blocks; with and without the eigenvectors."""
    found: dict[str, Any] = {}
    for text, layers in blocks.items():
        grid = [recipe for recipe in vlcam.all_recipes(model, layers=layers) if recipe.needs_gradient]
        plain = [recipe for recipe in grid if recipe.weighting != "eigengradcam"]
        for name, chosen in ((text, grid), (f"{text}, without eigengradcam", plain)):
            title = f"{len(chosen)} gradient recipes, every site, {name}"
            found[title] = lambda chosen=chosen: model.sweep(pixels, recipes=chosen, target=CLASS, empty="keep")
    return found


def peer_job(module: Any, layer: Any, grid: Callable[[torch.Tensor], torch.Tensor], pixels: torch.Tensor) -> Any:
    """GradCAM of pytorch-grad-cam on a transformers classifier; None where it is not installed."""
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

    peer = GradCAM(model=Logits(), target_layers=[layer], reshape_transform=grid)
    return lambda: peer(input_tensor=pixels[None], targets=[ClassifierOutputTarget(CLASS)])


def table(*, rounds: int, device: str, make: Callable[[str], Jobs] = jobs, what: str = WHAT, name: str = "vit") -> str:
    """Measure and lay out as Markdown."""
    measured = make(device)
    seconds = in_turn(measured, rounds, device)
    own = next(iter(seconds.values()))
    memory = peak_memory(make, list(measured)[2:]) if device == "cpu" else {}
    lines = [
        f"# What an explanation of a class costs: {what}",
        "",
        "Random weights. The unit is the model's own forward without gradient on one image. All jobs take turns, in "
        "an order drawn anew in every round. Memory: by how much the job raises the peak of a process that has run one "
        "forward. Remade "
        f"by `python -m benchmarks {name} --write docs/costs_{name}.md`. On a GPU: not measured.",
        "",
        f"{torch.get_num_threads()} threads, {device}, {rounds} rounds, own forward {min(own):.2f} s",
        "",
        "| work | median against median | fastest against fastest | memory, MiB |",
        "|---|---|---|---|",
    ]
    for job, (median, fastest) in ratios(seconds).items():
        more = f"{memory[job]:.0f}" if job in memory else ""
        lines.append(f"| {job} | {median:.2f} | {fastest:.2f} | {more} |")
    return "\n".join(lines)
