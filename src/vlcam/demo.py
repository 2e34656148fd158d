"""The main jobs on embedded models, from nothing: an image and a text by words, a class by sites and weightings."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from vlcam import scenes, zoo
from vlcam.archive import make_folder
from vlcam.errors import InputError
from vlcam.explanation import Explanation
from vlcam.fitting import all_recipes
from vlcam.galleries import compare

__all__ = ["Written", "run"]

MODEL, CLASSIFIER = "tiny-blip-itm", "tiny-vit"
_SEED, _INDEX = 7, 0


@dataclass(frozen=True)
class Written:
    """What the demo made: the explanation, the files by what they are, and what was left out and why."""

    explanation: Explanation
    files: dict[str, Path]
    left_out: str


def run(out: Path) -> Written:
    """Explain a held-out scene and write pictures and record into `out`, over those of an earlier run.

    Raises:
        FileError: `out` cannot be written.
    """
    make_folder(out)
    (scene,) = scenes.generate(1, seed=_SEED, start=_INDEX, objects=(2, 3), size=(256, 256))
    model = zoo.load(MODEL)
    block = zoo.models()[MODEL].figures["best_block"]  # the one that its card states
    explanation = model.explain(scene.image, scene.caption, phrase=scene.objects[0].phrase, layer=block)
    files = {"image": out / "scene.png", "record": out / "explanation.json"}
    scene.image.save(files["image"])
    files["explanation"] = explanation.save(out / "explanation.png", overwrite=True)
    files["record"].write_text(json.dumps(explanation.record(), indent=2) + "\n", encoding="utf-8")
    for number, (word, part) in enumerate(explanation.words.items(), start=1):
        if part.status == "ok":
            files[f"word {word}"] = path = out / f"word-{number:02d}-{word.replace('#', '-')}.png"
            part.overlay().save(path)
    classifier = zoo.load(CLASSIFIER)
    grid = all_recipes(classifier, layers="last")
    swept = classifier.sweep(scene.image, recipes=grid, target=scene.objects[0].phrase, empty="keep")
    left_out = ""
    try:
        figures = {"figure": explanation.figure(), "sites by weightings": compare(swept)}
    except InputError as error:
        left_out = str(error)
    else:
        for name, figure in figures.items():
            files[name] = path = out / f"{name.replace(' ', '-')}.png"
            figure.savefig(path, dpi=110)
    return Written(explanation, files, left_out)
