"""Draws the pictures of the README and the docs from embedded models: `python docs/draw_images.py`."""

from __future__ import annotations

from pathlib import Path

import vlcam
from vlcam import scenes

IMAGES = Path(__file__).parent / "images"


def sites_by_weightings(path: Path) -> None:
    """One image and one class: every site by every weighting, in the last block of a ViT."""
    (scene,) = scenes.generate(1, seed=7, start=3, objects=(3, 3), size=(256, 256))
    model = vlcam.load("tiny-vit")
    grid = vlcam.all_recipes(model, layers="last")
    found = model.sweep(scene.image, recipes=grid, target=scene.objects[0].phrase, empty="keep")
    vlcam.compare(found).savefig(path, dpi=80)


if __name__ == "__main__":
    sites_by_weightings(IMAGES / "sites_by_weightings.png")
