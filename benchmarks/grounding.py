"""Grounding on held-out scenes: do the peaks of phrases lie on their objects, and how well do boxes fit?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

import vlcam
from benchmarks.pointing import SEED, chance, cross_recipes
from vlcam import scenes
from vlcam.boxes import largest_component
from vlcam.grounding import GroundedPhrase
from vlcam.recipe import Recipe

ITM, CLIP = "tiny-blip-itm", "tiny-clip"
CLIP_RECIPES = ("clip-gradcam", "chefer-clip", "grad-eclip", "pgc-hirescam")
CROSS_RECIPES = ("lavis-itm: A x ReLU(G)", "attention-cross: A", "signed: A x G", "gradient alone: ReLU(G)")
BIMODAL = "chefer-bimodal-words"
THRESHOLDS = (0.3, 0.5, 0.7)
HALF = 0.5
"""The overlap from which on a box counts as right, and the threshold that `ground` has by default."""


@dataclass
class Found:
    """What was found for many phrases: hits of their peaks, and the overlap of their boxes by threshold."""

    hits: list[bool] = field(default_factory=list)
    overlaps: dict[float, list[float]] = field(default_factory=lambda: {each: [] for each in THRESHOLDS})

    def add(self, each: GroundedPhrase, item: scenes.SceneObject) -> None:
        """Take a phrase and its object; what has no box points nowhere and overlaps with nothing."""
        self.hits.append(each.peak is not None and bool(item.mask[each.peak[1], each.peak[0]]))
        heatmap = each.explanation.heatmap if each.box is not None else None
        for threshold, found in self.overlaps.items():
            part = None if heatmap is None else largest_component(heatmap, threshold)
            found.append(0.0 if part is None else vlcam.iou(part.box, item.box))

    def row(self) -> str:
        """Shares and means as the cells of a table."""
        right = float(np.mean([overlap >= HALF for overlap in self.overlaps[HALF]]))
        figures = [float(np.mean(self.hits)), *(float(np.mean(each)) for each in self.overlaps.values()), right]
        return " | ".join(f"{figure:.3f}" for figure in figures)


def measured(
    model: vlcam.Explainer, held_out: Sequence[scenes.Scene], recipe: str | Recipe, layer: int | None = None
) -> Found | None:
    """Ground every object's phrase of every scene; None where a block has no gradient."""
    found = Found()
    for scene in held_out:
        try:
            made = model.ground(scene.image, scene.caption, scene.phrases(), recipe, layer=layer)
        except vlcam.EvidenceError:
            return None
        for each, item in zip(made, scene.objects, strict=True):
            found.add(each, item)
    return found


def by_block(model: vlcam.Explainer, held_out: Sequence[scenes.Scene]) -> dict[tuple[str, int], Found | None]:
    """Recipes of cross-attention at every block."""
    recipes = cross_recipes()
    depth = range(len(model.anatomy.stream("fusion").blocks))
    return {(n, layer): measured(model, held_out, recipes[n], layer) for n in CROSS_RECIPES for layer in depth}


def of_all_blocks(model: vlcam.Explainer, held_out: Sequence[scenes.Scene]) -> dict[str, Found | None]:
    """Recipes that read all blocks at once; `chefer-bimodal` has one row, and none for a phrase."""
    words = vlcam.recipes()[BIMODAL].recipe
    recipes = {BIMODAL: words, f"{BIMODAL}, compose='none'": words.replace(name="text", compose="none")}
    return {name: measured(model, held_out, recipe) for name, recipe in recipes.items()}


def default_block(model: vlcam.Explainer, scene: scenes.Scene) -> int:
    """The block that is read where neither recipe nor layer is named."""
    (first, *_) = model.ground(scene.image, scene.caption, scene.phrases())
    return int(first.explanation.provenance["run"]["layers"][0])


def whole_image(held_out: Sequence[scenes.Scene]) -> float:
    """Mean overlap of the objects' boxes with the image's."""
    boxes = [((0, 0, *scene.image.size), item.box) for scene in held_out for item in scene.objects]
    return float(np.mean([vlcam.iou(one, other) for one, other in boxes]))


def table(count: int) -> str:
    """Measure everything and lay it out as Markdown."""
    held_out = list(scenes.generate(count, seed=SEED))
    phrases = sum(len(scene.objects) for scene in held_out)
    matching = vlcam.load(ITM)
    lines = [
        "# Grounding phrases: pointing game and boxes",
        "",
        f"{count} held-out scenes (seed {SEED}, {phrases} phrases), `model.ground` with the phrases of the objects. "
        "*Pointing*: share of phrases whose peak lies on the object; a pixel drawn at random would do so in "
        f"{chance(held_out):.2f}. *Mean IoU*: of the box, by `threshold`, with the object's box; the box of the whole "
        f"image has {whole_image(held_out):.3f}. *IoU >= 0.5*: share of phrases, at `threshold=0.5`, which is the "
        "default. A phrase without a box counts as 0. Remade by `python -m benchmarks grounding --write "
        "docs/grounding_table.md`.",
        "",
        f"`{ITM}`, all phrases from one pass; A attention, G gradient of the match logit. Without `layer=`, "
        f"`lavis-itm` reads block {default_block(matching, held_out[0])} of it:",
        "",
        *_head("recipe | block"),
    ]
    lines += [f"| {name} | {layer} | {_cells(each)} |" for (name, layer), each in by_block(matching, held_out).items()]
    lines += [f"| {name} | all | {_cells(each)} |" for name, each in of_all_blocks(matching, held_out).items()]
    lines += ["", f"`{CLIP}`, each phrase a prompt of its own:", "", *_head("recipe")]
    contrastive = vlcam.load(CLIP)
    lines += [f"| {name} | {_cells(measured(contrastive, held_out, name))} |" for name in CLIP_RECIPES]
    return "\n".join(lines)


def _head(first: str) -> list[str]:
    names = [*first.split(" | "), "pointing", *(f"mean IoU, {each}" for each in THRESHOLDS), "IoU >= 0.5"]
    return [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]


def _cells(found: Found | None) -> str:
    return found.row() if found is not None else " | ".join(["no gradient", *["-"] * (len(THRESHOLDS) + 1)])
