"""The command line: `vlcam explain`, `ground`, `sweep`, `verify`, `models`, `recipes`, `anatomy`, `demo`.

Results as JSON go to stdout with `--json`; everything for people goes to stderr. Exit codes: 0 done, 1 it could not
be done or did not reproduce, 2 the command asks for something that does not exist.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

import vlcam
from vlcam import demo as demo_job
from vlcam import wording
from vlcam.archive import make_folder
from vlcam.asking import Progress
from vlcam.catalogue import named
from vlcam.errors import EvidenceError, FileError, InputError, RecipeError, UnknownNameError, VlcamError, listing
from vlcam.explanation import Explanation
from vlcam.grid import fitting
from vlcam.grounding import Grounding
from vlcam.provenance import versions
from vlcam.recipe import Recipe

__all__ = ["app", "main"]

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
_people = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)

JsonFlag = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; an error of vlcam becomes one line and an exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    try:
        app(args=[item for item in given if item != "--debug"], prog_name="vlcam")
    except VlcamError as error:
        if debug:
            raise
        _people.print(f"vlcam: {error}", style="red")
        sys.exit(2 if isinstance(error, (UnknownNameError, RecipeError)) else 1)


def _show_version(*, wanted: bool) -> None:
    if wanted:
        found = versions()
        typer.echo(f"vlcam {vlcam.__version__}")
        typer.echo("  ".join(f"{name} {number}" for name, number in found.items() if name != "vlcam"))
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=lambda value: _show_version(wanted=value), is_eager=True)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Show what a vision-language model looked at, and state how each map was made."""


@app.command()
def explain(
    model: Annotated[str, typer.Option(help="Embedded model, folder or checkpoint name.")],
    image: Annotated[list[Path], typer.Option(help="Image file; may be given several times.")],
    out: Annotated[Path, typer.Option(help="Folder for the results; made if it does not exist.")],
    text: Annotated[
        list[str] | None, typer.Option(help="The text, for a model that takes text; several share one pass.")
    ] = None,
    phrase: Annotated[str | None, typer.Option(help="Words of the text; by default the whole text.")] = None,
    occurrence: Annotated[int | None, typer.Option(help="Which one, if the phrase stands more than once.")] = None,
    prompt: Annotated[
        str | None, typer.Option(help="How a phrase of a contrastive score is read: phrase (alone) or in_place.")
    ] = None,
    against: Annotated[
        list[str] | None, typer.Option(help="Another text to compare with; repeatable. Default: all texts given.")
    ] = None,
    recipe: Annotated[str | None, typer.Option(help="Name of a recipe, or a .toml or .json file.")] = None,
    layer: Annotated[list[int] | None, typer.Option(help="Block in place of the recipe's; may be repeated.")] = None,
    layer_rule: Annotated[str | None, typer.Option(help="How several blocks are merged: mean, sum, max.")] = None,
    target: Annotated[str | None, typer.Option(help="Class (label or index), or score: itm, contrastive.")] = None,
    scale: Annotated[str | None, typer.Option(help="Scale in place of the recipe's: logit, probability, ...")] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE for the model family, such as first_token=cls; repeatable.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, mps.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16.")] = "float32",
    alpha: Annotated[float, typer.Option(min=0.0, max=1.0, help="Opacity of the word overlays.")] = 0.6,
    words: Annotated[bool, typer.Option("--words", help="Also write an overlay for every word.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse text beyond the model's limit.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that exist.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Explain the score of an image and a text, or a class: a PNG that carries its recipe, a record, the raw map."""
    chosen = None if recipe is None else _read_recipe(recipe)
    loaded = vlcam.load(model, device=device, dtype=dtype, **_family_options(option or []))
    given = {"scale": scale, "layer_rule": layer_rule, "prompt": prompt}
    changes: dict[str, Any] = {field: value for field, value in given.items() if value}
    _check_names(image)
    made, failed = [], []
    for path in image:
        try:
            with _bar() as progress:
                found = loaded.explain(
                    str(path),
                    text if text is None or len(text) > 1 else text[0],
                    chosen,
                    phrase=phrase,
                    occurrence=occurrence,
                    layer=layer or None,
                    target=_target(target, list(loaded.adapter.labels)),
                    against=against or None,
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
            _tell(explanation, files)
    for path, reason in failed:
        _people.print(f"vlcam: {path}: {reason}", style="red")
    if as_json:
        _emit(
            made[0]
            if len(image) == len(made) == 1
            else {"explained": made, "failed": [list(map(str, f)) for f in failed]}
        )
    if failed:
        raise typer.Exit(1)


@app.command()
def ground(
    model: Annotated[str, typer.Option(help="Embedded model, folder or checkpoint name.")],
    image: Annotated[Path, typer.Option(help="Image file.")],
    text: Annotated[str, typer.Option(help="The caption.")],
    out: Annotated[Path, typer.Option(help="Folder for the results; made if it does not exist.")],
    phrase: Annotated[
        list[str] | None, typer.Option(help="Words of the caption; repeatable. Default: those that a rule finds.")
    ] = None,
    threshold: Annotated[float, typer.Option(help="Share of a map's largest value that belongs to a box.")] = 0.5,
    prompt: Annotated[
        str | None, typer.Option(help="How a phrase of a contrastive score is read: phrase (alone) or in_place.")
    ] = None,
    against: Annotated[
        list[str] | None, typer.Option(help="Another text to compare with; repeatable. Default: all phrases.")
    ] = None,
    answer: Annotated[str | None, typer.Option(help="The answer, for a model that answers questions.")] = None,
    recipe: Annotated[str | None, typer.Option(help="Name of a recipe, or a .toml or .json file.")] = None,
    layer: Annotated[list[int] | None, typer.Option(help="Block in place of the recipe's; may be repeated.")] = None,
    layer_rule: Annotated[str | None, typer.Option(help="How several blocks are merged: mean, sum, max.")] = None,
    target: Annotated[str | None, typer.Option(help="Score: itm, contrastive, caption.")] = None,
    scale: Annotated[str | None, typer.Option(help="Scale in place of the recipe's: logit, probability, ...")] = None,
    image_id: Annotated[int, typer.Option(help="The image's number in the COCO file.")] = 1,
    option: Annotated[list[str] | None, typer.Option(help="NAME=VALUE for the model family; repeatable.")] = None,
    device: Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, mps.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16.")] = "float32",
    strict: Annotated[bool, typer.Option("--strict", help="Refuse text beyond the model's limit.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that exist.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Find every phrase of a caption in the image: a picture with boxes, the boxes as COCO, a record."""
    chosen = None if recipe is None else _read_recipe(recipe)
    loaded = vlcam.load(model, device=device, dtype=dtype, **_family_options(option or []))
    given = {"scale": scale, "layer_rule": layer_rule, "prompt": prompt}
    changes: dict[str, Any] = {field: value for field, value in given.items() if value}
    with _bar() as progress:
        found = loaded.ground(
            str(image),
            text,
            phrase or None,
            chosen,
            threshold=threshold,
            layer=layer or None,
            target=target,
            against=against or None,
            answer=answer,
            strict=strict,
            progress=progress,
            **changes,
        )
    base = f"{image.stem}-{_slug(found[0].explanation.recipe.name)}-ground"
    files = {kind: out / f"{base}{ending}" for kind, ending in _GROUND_ENDINGS.items()}
    _refuse_existing(files, overwrite=overwrite)
    make_folder(out)
    coco = json.dumps(found.to_coco(image_id=image_id), indent=2, ensure_ascii=False)
    try:
        found.drawn().save(files["picture"])
        files["coco"].write_text(coco + "\n", encoding="utf-8")
    except OSError as error:
        raise FileError(f"{str(out)!r}: results cannot be written ({error})") from None
    found.save(files["record"], overwrite=overwrite)
    _tell_ground(found, files)
    if as_json:
        _emit({"files": {key: str(path) for key, path in files.items()}} | found.record())


def _tell_ground(found: Grounding, files: dict[str, Path]) -> None:
    _people.print(found.text, style="bold")
    for each in found:
        place = f"box {each.box}, peak {each.peak}, score {each.score:.3g}" if each.box else each.status
        _people.print(f"  {each.phrase:<24} {place}", style=None if each.box else "yellow")
    if found.cut:
        _people.print(f"  cut off, not grounded: {', '.join(found.cut)}", style="yellow")
    for kind, path in files.items():
        _people.print(f"  {kind}: {path}")


@app.command()
def sweep(
    model: Annotated[str, typer.Option(help="Embedded model, folder or checkpoint name.")],
    image: Annotated[Path, typer.Option(help="Image file.")],
    out: Annotated[Path, typer.Option(help="Folder for the results; made if it does not exist.")],
    text: Annotated[str | None, typer.Option(help="The text, for a model that takes text.")] = None,
    against: Annotated[list[str] | None, typer.Option(help="Another text to compare with; repeatable.")] = None,
    recipe: Annotated[
        list[str] | None, typer.Option(help="Name of a recipe, or a .toml or .json file; repeatable. Default: all.")
    ] = None,
    grid: Annotated[bool, typer.Option("--grid", help="Every site by every weighting, in place of names.")] = False,
    layer: Annotated[list[int] | None, typer.Option(help="Blocks of the grid; by default the last.")] = None,
    target: Annotated[str | None, typer.Option(help="Class (label or index), or score: itm, contrastive.")] = None,
    option: Annotated[list[str] | None, typer.Option(help="NAME=VALUE for the model family; repeatable.")] = None,
    device: Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, mps.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16.")] = "float32",
    save: Annotated[bool, typer.Option("--save", help="Also save every explanation.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that exist.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Explain one image with many recipes from one pass: a figure that compares them, and a table."""
    if grid and recipe:
        raise RecipeError("--grid and --recipe: give one of them")
    loaded = vlcam.load(model, device=device, dtype=dtype, **_family_options(option or []))
    chosen: list[str | Recipe] | None = [_read_recipe(each) for each in recipe] if recipe else None
    if grid:
        chosen = [*vlcam.all_recipes(loaded, layers=layer or "last")]
    base = "-".join(filter(None, (image.stem, "sweep", _slug(target))))
    files = {"figure": out / f"{base}.png", "table": out / f"{base}.json"}
    names = [one if isinstance(one, str) else one.name for one in chosen or fitting(loaded.adapter)]
    each = {name: out / f"{base}-{_slug(name)}.png" for name in names} if save else {}
    if len(set(each.values())) < len(names) and save:
        raise RecipeError(f"recipes {listing(names)}: two of them would be saved to one file; give them other names")
    _refuse_existing(files | each, overwrite=overwrite)
    with _bar() as progress:
        found = loaded.sweep(
            str(image),
            text,
            chosen,
            target=_target(target, list(loaded.adapter.labels)),
            against=against or None,
            empty="keep",
            progress=progress,
        )
    make_folder(out)
    table = [_line(explanation) for explanation in found]
    figure = vlcam.compare(found) if grid and len(layer or "1") == 1 else vlcam.gallery(found)
    try:
        figure.savefig(files["figure"], dpi=130)
        files["table"].write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise FileError(f"{str(out)!r}: results cannot be written ({error})") from None
    for explanation in found if save else ():
        explanation.save(each[explanation.recipe.name], overwrite=overwrite)
    _tell_table(found[0].subject, table, files)
    if as_json:
        _emit({"files": {key: str(path) for key, path in (files | each).items()}, "explained": table})


def _tell_table(subject: str, table: Sequence[dict[str, Any]], files: dict[str, Path]) -> None:
    _people.print(subject, style="bold")
    for line in table:
        peak = "peak at {}, {}".format(*line["peak"]) if line["peak"] else line["status"]
        _people.print(f"  {line['recipe']:<34} {peak}")
    for kind, path in files.items():
        _people.print(f"  {kind}: {path}")


def _line(explanation: Explanation) -> dict[str, Any]:
    """What a table says of one explanation."""
    return {
        "recipe": explanation.recipe.name,
        "fingerprint": explanation.recipe.fingerprint,
        "layers": explanation.provenance["run"]["layers"],
        "status": explanation.status,
        "peak": list(explanation.peak()) if explanation.status == "ok" and not explanation.recipe.of_text else None,
        "summary": wording.summary(explanation.recipe),
    }


@app.command()
def verify(
    file: Annotated[Path, typer.Argument(help="A PNG that `explain` or `Explanation.save` wrote.")],
    image: Annotated[Path | None, typer.Option(help="The image, if the file does not carry it.")] = None,
    model: Annotated[str | None, typer.Option(help="Where the model is now, if not where the record says.")] = None,
    device: Annotated[str, typer.Option(help="Where the model runs.")] = "cpu",
    as_json: JsonFlag = False,
) -> None:
    """Compute a saved map again and compare; exit code 1 if it does not come out."""
    saved = Explanation.open(file, image=None if image is None else str(image))
    record = saved.provenance["model"]
    given = {name: value for name, value in record["options"].items() if value is not None}
    loaded = vlcam.load(model or record["id"], dtype=record["dtype"], device=device, **given)
    outcome = saved.verify(loaded)
    _people.print(str(outcome), style="green" if outcome.reproduced else "red")
    if as_json:
        _emit(
            {
                "reproduced": outcome.reproduced,
                "identical": outcome.identical,
                "largest_difference": outcome.largest if np.isfinite(outcome.largest) else None,
                "differences": list(outcome.differences),
            }
        )
    if not outcome.reproduced:
        raise typer.Exit(1)


@app.command()
def models(as_json: JsonFlag = False) -> None:
    """List the embedded models."""
    known = vlcam.models()
    for name, entry in known.items():
        _people.print(f"{name}  {entry.summary}")
    if as_json:
        _emit({name: dict(entry.figures) for name, entry in known.items()})


@app.command()
def recipes(
    name: Annotated[str | None, typer.Argument(help="One recipe, whole.")] = None, as_json: JsonFlag = False
) -> None:
    """List the named recipes, or show one with its formula and source."""
    if name is None:
        known = vlcam.recipes()
        width = max(map(len, known))
        for key, entry in known.items():
            _people.print(f"{key:<{width}}  {wording.summary(entry.recipe)}")
        if as_json:
            _emit({key: _entry(key) for key in known})
        return
    entry = named(name)
    _people.print(wording.describe(entry.recipe))
    _people.print(f"\nsource\n  {entry.citation}\n  code: {entry.code}\n  {entry.notes}")
    if as_json:
        _emit(_entry(name))


@app.command()
def anatomy(
    model: Annotated[str, typer.Argument(help="Embedded model, folder or checkpoint name.")], as_json: JsonFlag = False
) -> None:
    """Show a model's streams, blocks, sites, tokens and targets."""
    found = vlcam.load(model).anatomy
    _people.print(str(found))
    if as_json:
        _emit(found.to_dict())


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("demo"), as_json: JsonFlag = False
) -> None:
    """Explain a scene with the embedded model and write the pictures."""
    written = demo_job.run(out)
    _tell(written.explanation, written.files)
    if written.left_out:
        _people.print(f"left out the figure: {written.left_out}", style="yellow")
    if as_json:
        _emit({"files": {key: str(path) for key, path in written.files.items()}} | written.explanation.record())


@contextmanager
def _bar() -> Iterator[Progress]:
    """A bar on stderr, for recipes that ask the model many times; it appears with the first batch."""
    columns = (TextColumn("asking the model"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bar(*columns, console=_people, transient=True) as bar:
        task = bar.add_task("", visible=False, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total, visible=True)


def _target(given: str | None, labels: Sequence[str]) -> str | int | None:
    """A class index is written in digits; digits that are also a class' name must mean the same class."""
    if given is None or not given.isdecimal():
        return given
    if given in labels and labels[int(given) :][:1] != [given]:
        raise UnknownNameError(
            f"--target {given}: it is the name of class {labels.index(given)}, and the number of another; in Python, "
            'target="..." is a name and target=... a number'
        )
    return int(given)


def _read_recipe(given: str) -> str | Recipe:
    path = Path(given)
    if path.suffix not in (".toml", ".json"):
        return given
    if not path.is_file():
        raise UnknownNameError(f"recipe file {given!r}: no such file")
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"recipe file {given!r} cannot be read: {error}") from None
    return Recipe.from_toml(content) if path.suffix == ".toml" else Recipe.from_json(content)


def _family_options(given: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE pairs; a value that is JSON is read as such, anything else is text."""
    found = {}
    for item in given:
        name, equals, value = item.partition("=")
        if not equals:
            raise UnknownNameError(f"--option {item!r}: give NAME=VALUE")
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = value
    return found


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
    base = "-".join(filter(None, (stem, explanation.recipe.name, _slug(name), _slug(about), in_place)))
    files = {kind: out / f"{base}{ending}" for kind, ending in _ENDINGS.items()}
    if words:
        files |= {
            f"word {word}": out / f"{base}-word-{number:02d}-{_slug(word)}.png"
            for number, (word, part) in enumerate(explanation.words.items(), start=1)
            if part.status == "ok"
        }
    _refuse_existing(files, overwrite=overwrite)
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


def _refuse_existing(files: dict[str, Path], *, overwrite: bool) -> None:
    existing = [str(path) for path in files.values() if path.exists()]
    if existing and not overwrite:
        raise FileError(f"{', '.join(existing)} exists already; choose another --out, or pass --overwrite")


_ENDINGS = {"explanation": ".png", "record": ".json", "map": ".npy"}
_GROUND_ENDINGS = {"picture": ".png", "coco": "-coco.json", "record": ".json"}


def _slug(text: str | None) -> str:
    spelt = (text or "").replace("++", "-plus-plus").replace("*", "-times-")
    return re.sub(r"\W+", "-", spelt).strip("-").lower()[:60]


def _tell(explanation: Explanation, files: dict[str, Path]) -> None:
    _people.print(explanation.subject, style="bold")
    for score in explanation.scores.values():
        _people.print(f"  {score}")
    run = explanation.provenance["run"]
    blocks = ", ".join(map(str, run["layers"]))
    _people.print(
        f"  recipe {explanation.recipe.name} {explanation.recipe.fingerprint}, block {blocks} "
        f"({run['fitted']['layers']})"
    )
    if explanation.recipe.prompt != "whole":
        how = {"phrase": "alone", "in_place": "in its place"}[explanation.recipe.prompt]
        _people.print(f"  phrase {run['phrase']!r} {how}: {run['target']} {run['target_value']:.4f}")
    text = explanation.provenance["text"]
    cut = text["cut"] if text else []
    if cut:
        _people.print(f"  cut off, not explained: {', '.join(cut)}", style="yellow")
    if explanation.status != "ok":
        _people.print(f"  status: {explanation.status}", style="yellow")
    if explanation.recipe.of_text and explanation.status == "ok":
        scores = "  ".join(f"{word.word} {word.score:.3g}" for word in explanation.word_scores)
        _people.print(f"  words: {scores}")
    for kind, path in files.items():
        _people.print(f"  {kind}: {path}")


def _entry(name: str) -> dict[str, Any]:
    entry = named(name)
    return {
        "recipe": entry.recipe.to_dict() | {"fingerprint": entry.recipe.fingerprint},
        "formula": wording.formula(entry.recipe).splitlines(),
        "citation": entry.citation,
        "code": entry.code,
        "published_depth": entry.depth or None,
        "notes": entry.notes,
    }


def _emit(value: object) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))
