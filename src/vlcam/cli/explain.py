"""`vlcam explain`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import vlcam
from vlcam.archive import make_folder
from vlcam.cli import options
from vlcam.cli.base import bar, emit, family_options, people, read_recipe, refuse_existing, slug, target_of
from vlcam.errors import EvidenceError, FileError, InputError
from vlcam.explanation import Explanation

__all__ = ["explain", "tell"]

_ENDINGS = {"explanation": ".png", "record": ".json", "map": ".npy"}


def explain(
    model: options.Model,
    image: Annotated[list[Path], typer.Option(help="Image file; may be given several times.")],
    out: options.OutFolder,
    text: Annotated[
        list[str] | None, typer.Option(help="The text, for a model that takes text; several share one pass.")
    ] = None,
    phrase: Annotated[str | None, typer.Option(help="Words of the text; by default the whole text.")] = None,
    occurrence: Annotated[int | None, typer.Option(help="Which one, if the phrase stands more than once.")] = None,
    prompt: options.Prompt = None,
    against: options.Against = None,
    answer: options.Answer = None,
    recipe: options.RecipeName = None,
    layer: options.Layer = None,
    layer_rule: options.LayerRule = None,
    target: options.Target = None,
    scale: options.Scale = None,
    option: options.FamilyOption = None,
    device: options.Device = "cpu",
    dtype: options.Dtype = "float32",
    alpha: Annotated[float, typer.Option(min=0.0, max=1.0, help="Opacity of the word overlays.")] = 0.6,
    words: Annotated[bool, typer.Option("--words", help="Also write an overlay for every word.")] = False,
    strict: options.Strict = False,
    overwrite: options.Overwrite = False,
    as_json: options.AsJson = False,
) -> None:
    """Explain the score of an image and a text, or a class: a PNG that carries its recipe, a record, the raw map."""
    chosen = None if recipe is None else read_recipe(recipe)
    loaded = vlcam.load(model, device=device, dtype=dtype, **family_options(option or []))
    given = {"scale": scale, "layer_rule": layer_rule, "prompt": prompt}
    changes: dict[str, Any] = {field: value for field, value in given.items() if value}
    _check_names(image)
    made, failed = [], []
    for path in image:
        try:
            with bar() as progress:
                found = loaded.explain(
                    str(path),
                    text if text is None or len(text) > 1 else text[0],
                    chosen,
                    phrase=phrase,
                    occurrence=occurrence,
                    layer=layer or None,
                    target=target_of(target, list(loaded.adapter.labels)),
                    against=against or None,
                    answer=answer,
                    strict=strict,
                    progress=progress,
                    **changes,
                )
            several = isinstance(found, list)
            explanations = found if several else [found]
            named_by = [f"{n:02d} {_whole(each)}" if several else None for n, each in enumerate(explanations, start=1)]
            written = [
                _write(each, out, path.stem, name, words=words, alpha=alpha, overwrite=overwrite)
                for each, name in zip(explanations, named_by, strict=True)
            ]
        except (InputError, FileError, EvidenceError) as error:
            if len(image) == 1:
                raise
            failed.append((path, str(error)))
            continue
        for explanation, files in zip(explanations, written, strict=True):
            made.append({"image": str(path), "files": {k: str(v) for k, v in files.items()}} | explanation.record())
            tell(explanation, files)
    for path, reason in failed:
        people.print(f"vlcam: {path}: {reason}", style="red")
    if as_json:
        emit(
            made[0]
            if len(image) == len(made) == 1
            else {"explained": made, "failed": [list(map(str, f)) for f in failed]}
        )
    if failed:
        raise typer.Exit(1)


def _check_names(images: Sequence[Path]) -> None:
    stems = [path.stem for path in images]
    for path in images:
        if stems.count(path.stem) > 1:
            raise InputError(f"two images are called {path.stem!r}, so their results would have one name; rename one")


def _write(
    explanation: Explanation, out: Path, stem: str, name: str | None, *, words: bool, alpha: float, overwrite: bool
) -> dict[str, Path]:
    """The files of one explanation; `name` tells it from others of the same image."""
    make_folder(out)
    run = explanation.provenance["run"]
    about = run["phrase"] if explanation.text is not None else explanation.subject.removeprefix("class ")
    in_place = "in-place" if explanation.recipe.prompt == "in_place" else None
    base = "-".join(filter(None, (stem, explanation.recipe.name, slug(name), slug(about), in_place)))
    files = {kind: out / f"{base}{ending}" for kind, ending in _ENDINGS.items()}
    if words:
        files |= {
            f"word {word}": out / f"{base}-word-{number:02d}-{slug(word)}.png"
            for number, (word, part) in enumerate(explanation.words.items(), start=1)
            if part.status == "ok"
        }
    refuse_existing(files, overwrite=overwrite)
    explanation.save(files["explanation"], overwrite=overwrite)
    try:
        files["record"].write_text(json.dumps(explanation.record(), indent=2) + "\n", encoding="utf-8")
        np.save(files["map"], explanation.tokens)
        for key, path in files.items():
            if key.startswith("word "):
                explanation.words[key.removeprefix("word ")].overlay(alpha=alpha).save(path)
    except OSError as error:
        raise FileError(f"{str(out)!r}: results cannot be written ({error})") from None
    return files


def _whole(explanation: Explanation) -> str:
    """The text, and for a phrase that was read alone the text that it is of."""
    record = explanation.provenance["text"]
    return str(record.get("whole", record["given"]))


def tell(explanation: Explanation, files: dict[str, Path]) -> None:
    """Say on stderr what was explained, by which recipe, and where it was written."""
    people.print(explanation.subject, style="bold")
    for score in explanation.scores.values():
        people.print(f"  {score}")
    run = explanation.provenance["run"]
    blocks = ", ".join(map(str, run["layers"]))
    people.print(
        f"  recipe {explanation.recipe.name} {explanation.recipe.fingerprint}, block {blocks} "
        f"({run['fitted']['layers']})"
    )
    if explanation.recipe.prompt != "whole":
        how = {"phrase": "alone", "in_place": "in its place"}[explanation.recipe.prompt]
        people.print(f"  phrase {run['phrase']!r} {how}: {run['target']} {run['target_value']:.4f}")
    text = explanation.provenance["text"]
    cut = text["cut"] if text else []
    if cut:
        people.print(f"  cut off, not explained: {', '.join(cut)}", style="yellow")
    if explanation.status != "ok":
        people.print(f"  status: {explanation.status}", style="yellow")
    if explanation.recipe.of_text and explanation.status == "ok":
        scores = "  ".join(f"{word.word} {word.score:.3g}" for word in explanation.word_scores)
        people.print(f"  words: {scores}")
    for kind, path in files.items():
        people.print(f"  {kind}: {path}")
