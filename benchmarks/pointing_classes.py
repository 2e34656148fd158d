"""Pointing game of every named recipe on the embedded classifiers: does the peak of a class' map lie in its object?"""

from __future__ import annotations

import vlcam
from benchmarks.pointing import SEED, chance, points_right
from vlcam import scenes
from vlcam.explanation import Explanation
from vlcam.fitting import fitting

MODELS = ("tiny-vit", "tiny-beit", "tiny-swin")
BATCH = 50


def recall(model: vlcam.Explainer, held_out: list[scenes.Scene]) -> float:
    """Share of scenes whose k objects are the k classes with the highest logits."""
    logits = _logits(model, held_out)
    right = 0
    for scene, row in zip(held_out, logits, strict=True):
        wanted = {model.adapter.labels.index(item.phrase) for item in scene.objects}
        right += wanted == set(sorted(range(len(row)), key=row.__getitem__)[-len(wanted) :])
    return right / len(held_out)


def _logits(model: vlcam.Explainer, held_out: list[scenes.Scene]) -> list[list[float]]:
    found: list[list[float]] = []
    for start in range(0, len(held_out), BATCH):
        images = [scene.image for scene in held_out[start : start + BATCH]]
        capture = model.capture(images, stream="vision", site="F6", layers="last")
        found += capture.outputs["class"].tolist()
    return found


def pointing(model: vlcam.Explainer, held_out: list[scenes.Scene]) -> dict[str, float | None]:
    """Share of objects whose class' map points right, by recipe; None where no object has a gradient."""
    names = fitting(model.adapter)
    hits, alive, total = dict.fromkeys(names, 0), dict.fromkeys(names, False), 0
    for image, label, item in _questions(held_out):
        for name, explanation in zip(names, _explained(model, image, label, names), strict=True):
            alive[name] |= explanation.status != "zero gradient"
            hits[name] += explanation.status == "ok" and points_right(explanation, item)
        total += 1
    return {name: hits[name] / total if alive[name] else None for name in names}


def _questions(held_out: list[scenes.Scene]) -> list[tuple[object, str, scenes.SceneObject]]:
    return [(scene.image, item.phrase, item) for scene in held_out for item in scene.objects]


def _explained(model: vlcam.Explainer, image: object, label: str, names: list[str]) -> list[Explanation]:
    found: list[Explanation] = model.sweep(image, recipes=names, target=label, empty="keep")
    return found


def table(count: int) -> str:
    """Measure every named recipe on every embedded classifier and lay it out as Markdown."""
    held_out = list(scenes.generate(count, seed=SEED))
    loaded = {name: vlcam.load(name) for name in MODELS}
    found = {name: pointing(model, held_out) for name, model in loaded.items()}
    right = {name: recall(model, held_out) for name, model in loaded.items()}
    names = list(dict.fromkeys(recipe for shares in found.values() for recipe in shares))
    objects = sum(len(scene.objects) for scene in held_out)
    lines = [
        "# Which recipe points at the object of a class",
        "",
        f"Pointing game on {count} held-out scenes (seed {SEED}, {objects} objects): the share of objects for whose "
        "class the heatmap has its peak on the object. Each recipe is used by its name, fitted to the model as "
        "`provenance.run.fitted` records it. A pixel drawn at random would be right in "
        f"{chance(held_out):.2f}. Remade by `python -m benchmarks pointing-classes --write docs/pointing_classes.md`.",
        "",
        *(f"`{name}` has all objects of a scene on top in {share:.3f} of the scenes." for name, share in right.items()),
        "",
        *_extremes(found),
        "",
        "| recipe | " + " | ".join(f"`{name}`" for name in MODELS) + " |",
        "|---|" + "---|" * len(MODELS),
    ]
    lines += [f"| `{recipe}` | " + " | ".join(_cell(found[name], recipe) for name in MODELS) + " |" for recipe in names]
    return "\n".join(lines)


def _cell(shares: dict[str, float | None], recipe: str) -> str:
    if recipe not in shares:
        return "does not fit"
    share = shares[recipe]
    return "no gradient" if share is None else f"{share:.3f}"


def _extremes(found: dict[str, dict[str, float | None]]) -> list[str]:
    lines = []
    for name, shares in found.items():
        known = {recipe: share for recipe, share in shares.items() if share is not None}
        best, worst = max(known, key=lambda r: known[r]), min(known, key=lambda r: known[r])
        lines.append(f"`{name}`: best `{best}` ({known[best]:.3f}), worst `{worst}` ({known[worst]:.3f}).")
    return lines
