"""Draws the pictures of the README and the docs from embedded models: `python docs/draw_images.py`."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import vlcam
from vlcam import scenes

IMAGES = Path(__file__).parent / "images"
EXAMPLES = Path(__file__).parent.parent / "examples"


def sites_by_weightings(path: Path) -> None:
    """One image and one class: every site by every weighting, in the last block of a ViT."""
    (scene,) = scenes.generate(1, seed=7, start=3, objects=(3, 3), size=(256, 256))
    model = vlcam.load("tiny-vit")
    grid = vlcam.all_recipes(model, layers="last")
    found = model.sweep(scene.image, recipes=grid, target=scene.objects[0].phrase, empty="keep")
    vlcam.compare(found).savefig(path, dpi=80)


def audit_of_made_up_rows(path: Path) -> None:
    """What an audit looks like; its title says that the rows are made up."""
    found = vlcam.audit(EXAMPLES / "audit_made_up.csv")
    title = f"{len(found)} made-up rows (examples/audit_made_up.csv): no audit of real papers"
    found.figure(title).savefig(path, dpi=100)


def report_page(path: Path) -> None:
    """A report as a browser shows it, with the map of one word; left as it is where there is no browser."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        return
    from playwright.sync_api import sync_playwright  # of the extra `test`

    (scene,) = scenes.generate(1, seed=7, start=1, objects=(2, 3), size=(384, 512))
    exp = vlcam.load("tiny-blip-itm").explain(scene.image, scene.caption, layer=0)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"]).new_page(
            viewport={"width": 1180, "height": 860}
        )
        page.goto(exp.report().save(Path(folder) / "report.html").as_uri())
        page.get_by_role("button", name="star", exact=True).focus()
        page.screenshot(path=path)


def ambiguity(path: Path) -> None:
    """One image, one class, one sentence: the maps that it allows."""
    (scene,) = scenes.generate(1, seed=7, start=3, objects=(3, 3), size=(256, 256))
    model = vlcam.load("tiny-vit")
    found = model.ambiguity(scene.image, description="gradcam-vit-last-layer", target=scene.objects[0].phrase)
    found.figure().savefig(path, dpi=80)


if __name__ == "__main__":
    sites_by_weightings(IMAGES / "sites_by_weightings.png")
    ambiguity(IMAGES / "ambiguity.png")
    audit_of_made_up_rows(IMAGES / "audit_made_up.png")
    report_page(IMAGES / "report.png")
