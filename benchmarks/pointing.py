"""Pointing game on held-out scenes: does the peak of a phrase's map lie in the phrase's object?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

import vlcam
from vlcam import scenes
from vlcam.explanation import Explanation
from vlcam.recipe import Recipe

SEED = 7
BATCH = 50
PUBLISHED = "lavis-itm: A x ReLU(G)"


def cross_recipes() -> dict[str, Recipe]:
    """The published recipe, attention alone, and their signed and unsigned relatives, by what they compute."""
    lavis = vlcam.recipes()["lavis-itm"].recipe
    return {
        PUBLISHED: lavis,
        "attention-cross: A": vlcam.recipes()["attention-cross"].recipe,
        "signed: A x G": lavis.replace(name="signed", relu="none"),
        "gradient alone: ReLU(G)": lavis.replace(name="gradient", weighting="gradient"),
        "lavis-itm, margin as target": lavis.replace(name="margin", scale="margin"),
        "lavis-itm, probability as target": lavis.replace(name="probability", scale="probability"),
    }


def phrase_map(whole: Explanation, item: scenes.SceneObject) -> Explanation:
    """The explanation of a phrase from the maps of its words: every token of the phrase counts alike."""
    inside = [w for w in whole.word_maps if w.span[0] >= item.span[0] and w.span[1] <= item.span[1]]
    tokens = np.average([w.tokens for w in inside], axis=0, weights=[len(w.rows) for w in inside])
    return replace(whole, tokens=tokens.astype(np.float32))


def points_right(explanation: Explanation, item: scenes.SceneObject) -> bool:
    """Whether the heatmap's peak lies on a pixel of the object; a constant map points nowhere."""
    if explanation.tokens.min() == explanation.tokens.max():
        return False
    x, y = explanation.peak()
    return bool(item.mask[y, x])


def accuracy(model: vlcam.Explainer, held_out: list[scenes.Scene], kind: scenes.Mismatch) -> float:
    """ITM accuracy over true captions and as many false ones of a kind."""
    right = 0
    for batch in _batches(held_out):
        images = [scene.image for scene in batch]
        true = model.scores(images, [scene.caption for scene in batch])
        false = model.scores(images, [scenes.mismatch(scene, kind)[0].text for scene in batch])
        right += sum(score["itm_probability"].value > 0.5 for score in true)
        right += sum(score["itm_probability"].value <= 0.5 for score in false)
    return right / (2 * len(held_out))


def pointing(model: vlcam.Explainer, held_out: list[scenes.Scene]) -> dict[str, list[float | None]]:
    """Share of phrases whose map points right, by recipe, for every fusion block; None where there is no gradient."""
    depth = len(model.anatomy.stream("fusion").blocks)
    table: dict[str, list[float | None]] = {}
    for title, recipe in cross_recipes().items():
        table[title] = []
        for layer in range(depth):
            try:
                table[title].append(_share(model, held_out, recipe.replace(layers=(layer,))))
            except vlcam.EvidenceError:
                table[title].append(None)
    return table


def _share(model: vlcam.Explainer, held_out: list[scenes.Scene], recipe: Recipe) -> float:
    hits, total = 0, 0
    for batch in _batches(held_out):
        found = model.explain([s.image for s in batch], [s.caption for s in batch], recipe)
        for scene, whole in zip(batch, found, strict=True):
            hits += sum(points_right(phrase_map(whole, item), item) for item in scene.objects)
            total += len(scene.objects)
    return hits / total


def best_block(shares: Sequence[float | None]) -> int:
    """The block that points right most often."""
    return max(range(len(shares)), key=lambda block: shares[block] or 0.0)


def chance(held_out: list[scenes.Scene]) -> float:
    """How often a pixel drawn at random lies in the object."""
    return float(np.mean([item.mask.mean() for scene in held_out for item in scene.objects]))


def rows(found: Mapping[str, Sequence[float | None]]) -> list[str]:
    """The pointing game as rows of a Markdown table, a recipe each."""
    return [
        f"| {title} | " + " | ".join("no gradient" if s is None else f"{s:.3f}" for s in shares) + " |"
        for title, shares in found.items()
    ]


def table(name: str, count: int) -> str:
    """Measure everything and lay it out as Markdown."""
    model = vlcam.load(name)
    held_out = list(scenes.generate(count, seed=SEED))
    found = pointing(model, held_out)
    depth = len(next(iter(found.values())))
    phrases = sum(len(scene.objects) for scene in held_out)
    lines = [
        "# Which recipe points at the object, at which layer",
        "",
        f"Pointing game of `{name}` on {count} held-out scenes (seed {SEED}, {phrases} phrases): the share of phrases "
        "whose heatmap has its peak on the phrase's object. A pixel drawn at random would be right in "
        f"{chance(held_out):.2f}. Remade by `python -m benchmarks pointing --write docs/pointing.md`.",
        "",
        "| recipe (A attention, G gradient of the target) | " + " | ".join(f"block {i}" for i in range(depth)) + " |",
        "|---|" + "---|" * depth,
    ]
    lines += rows(found)
    lines += ["", "| captions | ITM accuracy |", "|---|---|"]
    kinds: tuple[scenes.Mismatch, ...] = ("attribute", "object", "binding")
    lines += [f"| true against one {kind} wrong | {accuracy(model, held_out, kind):.3f} |" for kind in kinds]
    return "\n".join(lines)


def _batches(items: list[scenes.Scene]) -> Iterable[list[scenes.Scene]]:
    return (items[start : start + BATCH] for start in range(0, len(items), BATCH))
