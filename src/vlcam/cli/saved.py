"""Commands that read what was saved: `vlcam verify`, `vlcam compare`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

import vlcam
from vlcam.cli import options
from vlcam.cli.base import emit, people
from vlcam.errors import FileError, InputError, UnknownNameError, VlcamError
from vlcam.explainer import Explainer
from vlcam.explanation import Explanation
from vlcam.verification import Verification

__all__ = ["compare", "verify"]

Models = dict[str, Explainer]
Images = Annotated[
    list[Path] | None, typer.Option("--image", help="The image, if the file does not carry it; repeatable.")
]


def verify(
    file: Annotated[list[Path], typer.Argument(help="A PNG that `explain` or `Explanation.save` wrote; or several.")],
    image: Images = None,
    model: Annotated[str | None, typer.Option(help="Where the model is now, if not where the record says.")] = None,
    device: Annotated[str, typer.Option(help="Where the model runs.")] = "cpu",
    alone: Annotated[
        bool,
        typer.Option("--alone", help="Compute one of several pairs of a call by itself, not in a batch as it was."),
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Compute saved maps again and compare; exit code 1 if one does not come out."""
    models: Models = {}
    found: dict[Path, Verification] = {}
    failed: dict[Path, VlcamError] = {}
    for path in dict.fromkeys(file):
        try:
            saved = _opened(path, image or [], alone=len(file) == 1)
            found[path] = saved.verify(_model_of(saved, model, device, models), alone=alone)
        except UnknownNameError:  # of a model on the command line
            raise
        except VlcamError as error:
            failed[path] = error
    if len(file) == 1:
        _tell_one(file[0], found, failed, as_json=as_json)
    else:
        _tell_all(found, failed, as_json=as_json)
    if failed or not all(outcome.reproduced for outcome in found.values()):
        raise typer.Exit(1)


def compare(
    a: Annotated[Path, typer.Argument(help="A PNG that `explain` or `Explanation.save` wrote.")],
    b: Annotated[Path, typer.Argument(help="Another, of the same image.")],
    image: Images = None,
    top: Annotated[float, typer.Option(help="Share of the cells that counts as the strongest.")] = 0.1,
    figure: Annotated[Path | None, typer.Option(help="Picture file for both maps side by side.")] = None,
    overwrite: options.Overwrite = False,
    as_json: options.AsJson = False,
) -> None:
    """Say in which fields two saved explanations of one image differ, and how far apart their maps are."""
    if figure is not None and figure.exists() and not overwrite:
        raise FileError(f"{str(figure)!r} exists already; choose another name, or pass --overwrite")
    both = [_opened(path, image or [], alone=False) for path in (a, b)]
    found = both[0].compare(both[1], top=top)
    for name, path, each in zip("AB", (a, b), both, strict=True):
        people.print(f"{name} {path}: {each.recipe.name} {each.recipe.fingerprint}, {each.subject}")
    people.print(str(found))
    if figure is not None:
        try:
            vlcam.gallery(both).savefig(figure, dpi=130)
        except (OSError, ValueError) as error:  # matplotlib raises the latter for an ending that it does not know
            raise error if isinstance(error, VlcamError) else FileError(f"{str(figure)!r}: {error}") from None
        people.print(f"  figure: {figure}")
    if as_json:
        drawn = {} if figure is None else {"figure": str(figure)}
        emit({"a": str(a), "b": str(b), "files": drawn} | found.to_dict())


def _opened(path: Path, images: Sequence[Path], *, alone: bool) -> Explanation:
    """An explanation with the image that belongs to it, out of those that were given."""
    saved = Explanation.open(path)
    refused: InputError | None = None
    for image in images:
        try:
            return Explanation.open(path, image=str(image))
        except InputError as error:
            refused = error
    if refused is not None and (alone or saved.image is None):
        raise refused
    return saved


def _model_of(saved: Explanation, given: str | None, device: str, models: Models) -> Explainer:
    """The model of a record, loaded once for all that were made with it."""
    record = saved.provenance["model"]
    own = {name: value for name, value in record["options"].items() if value is not None}
    name = given or record["id"]
    key = json.dumps([name, record["dtype"], own], sort_keys=True)
    if key not in models:
        try:
            models[key] = vlcam.load(name, dtype=record["dtype"], device=device, **own)
        except UnknownNameError as error:
            if given is not None:
                raise
            raise InputError(f"the model of the record cannot be loaded: {error}; say where it is, --model") from None
    return models[key]


def _tell_one(
    path: Path, found: Mapping[Path, Verification], failed: Mapping[Path, VlcamError], *, as_json: bool
) -> None:
    if path in failed:
        raise failed[path]
    outcome = found[path]
    people.print(str(outcome), style=_style(outcome))
    if as_json:
        emit({"file": str(path)} | outcome.to_dict())


def _tell_all(found: Mapping[Path, Verification], failed: Mapping[Path, VlcamError], *, as_json: bool) -> None:
    """A line per file, then the details of those that did not come out."""
    wide = max(len(str(path)) for path in (*found, *failed))
    people.print(f"{'file':<{wide}}  {'outcome':<14}  {'largest':>8}  {'relative':>8}  differing", style="bold")
    for path, outcome in found.items():
        numbers = f"{outcome.largest:>8.2g}  {outcome.relative:>8.2g}"
        line = f"{path!s:<{wide}}  {outcome.verdict:<14}  {numbers}  {', '.join(outcome.differing) or 'nothing'}"
        people.print(line, style=_style(outcome))
    for path in failed:
        people.print(f"{path!s:<{wide}}  not verified", style="red")
    for path, outcome in found.items():
        if not outcome.reproduced:
            people.print(f"{path}: {outcome}", style="red")
    for path, error in failed.items():
        people.print(f"{path} is not verified: {error}", style="red")
    if as_json:
        lines = [{"file": str(path)} | outcome.to_dict() for path, outcome in found.items()]
        emit({"verified": lines, "failed": [[str(path), str(error)] for path, error in failed.items()]})


def _style(outcome: Verification) -> str:
    return "green" if outcome.reproduced else "red"
