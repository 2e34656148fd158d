"""Pointing game of every named recipe on a CLIP: does the peak of a phrase's map lie in the phrase's object?"""

from __future__ import annotations

from collections.abc import Iterator

import vlcam
from benchmarks.pointing import SEED, chance, points_right
from vlcam import scenes
from vlcam.fitting import fitting

BATCH = 25


def phrases(held_out: list[scenes.Scene]) -> list[tuple[scenes.Scene, scenes.SceneObject, str]]:
    """Every object with the phrase that names it."""
    return [(s, item, s.caption[item.span[0] : item.span[1]]) for s in held_out for item in s.objects]


def shares(model: vlcam.Explainer, held_out: list[scenes.Scene]) -> dict[str, float]:
    """Share of phrases whose map points right, by recipe; each phrase is a prompt of its own."""
    hits: dict[str, int] = {}
    asked = phrases(held_out)
    others = sorted({phrase for _, _, phrase in asked})
    recipes = [name for name in fitting(model.adapter) if not vlcam.recipes()[name].recipe.of_text]
    for batch in _batches(asked):
        images, texts = [s.image for s, _, _ in batch], [phrase for _, _, phrase in batch]
        found = model.sweep(images, texts, recipes, against=others, empty="keep")
        for name, each in zip(recipes, found, strict=True):
            right = (points_right(one, item) for one, (_, item, _) in zip(each, batch, strict=True))
            hits[name] = hits.get(name, 0) + sum(right)
    return {name: count / len(asked) for name, count in hits.items()}


def in_captions(model: vlcam.Explainer, held_out: list[scenes.Scene], recipe: str) -> dict[str, float]:
    """The same for one recipe by how the phrase is read: the whole caption, the phrase alone, the phrase in place."""
    hits = dict.fromkeys(("whole caption", "phrase", "in_place"), 0)
    asked = phrases(held_out)
    for scene, item, phrase in asked:
        which = 1 + sum(other.span[0] < item.span[0] for other in scene.objects if _same(scene, other, phrase))
        twice = sum(_same(scene, other, phrase) for other in scene.objects) > 1
        hits["whole caption"] += points_right(model.explain(scene.image, scene.caption, recipe), item)
        for prompt in ("phrase", "in_place"):
            found = model.explain(
                scene.image, scene.caption, recipe, phrase=phrase, occurrence=which if twice else None, prompt=prompt
            )
            hits[prompt] += points_right(found, item)
    return {how: count / len(asked) for how, count in hits.items()}


def table(name: str, count: int) -> str:
    """Measure everything and lay it out as Markdown."""
    model = vlcam.load(name)
    held_out = list(scenes.generate(count, seed=SEED))
    asked = phrases(held_out)
    lines = [
        "# Which recipe points at the object of a phrase, on CLIP",
        "",
        f"Pointing game of `{name}` on {count} held-out scenes (seed {SEED}, {len(asked)} phrases): each phrase is a "
        "prompt of its own, and right is a map whose peak lies on the phrase's object. Recipes that compare texts have "
        "all phrases of these scenes to compare with. A pixel drawn at random would be right in "
        f"{chance(held_out):.2f}. Remade by `python -m benchmarks pointing-clip --write docs/pointing_clip.md`.",
        "",
        "| recipe | pointing game |",
        "|---|---|",
    ]
    measured = sorted(shares(model, held_out).items(), key=lambda item: -item[1])
    lines += [f"| {recipe} | {share:.3f} |" for recipe, share in measured]
    lines += ["", "| clip-gradcam on the caption, phrase read as | pointing game |", "|---|---|"]
    lines += [f"| {how} | {share:.3f} |" for how, share in in_captions(model, held_out, "clip-gradcam").items()]
    return "\n".join(lines)


def _same(scene: scenes.Scene, item: scenes.SceneObject, phrase: str) -> bool:
    return scene.caption[item.span[0] : item.span[1]] == phrase


def _batches(
    items: list[tuple[scenes.Scene, scenes.SceneObject, str]],
) -> Iterator[list[tuple[scenes.Scene, scenes.SceneObject, str]]]:
    return (items[start : start + BATCH] for start in range(0, len(items), BATCH))
