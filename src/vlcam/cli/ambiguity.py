"""`vlcam ambiguity`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

import vlcam
from vlcam.ambiguity import Ambiguity, Description, fitting_recipes
from vlcam.ambiguity.domain import Domain
from vlcam.ambiguity.enumeration import why_none
from vlcam.ambiguity.measure import narrowed
from vlcam.ambiguity.presets import described
from vlcam.archive import make_folder
from vlcam.cli import options
from vlcam.cli.base import emit, family_options, people, read_file, refuse_existing, slug, target_of
from vlcam.errors import FileError, InputError, RecipeError, UnknownNameError
from vlcam.questions import read_target

__all__ = ["ambiguity"]

_READERS = {
    ".toml": Description.from_toml,
    ".json": Description.from_json,
    ".yaml": Description.from_yaml,
    ".yml": Description.from_yaml,
}


def ambiguity(
    model: options.Model,
    image: Annotated[Path | None, typer.Option(help="Image file; not needed with --dry-run.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the results; not needed with --dry-run.")] = None,
    text: options.Text = None,
    phrase: Annotated[str | None, typer.Option(help="Words of the text that the map is of.")] = None,
    against: options.Against = None,
    target: options.Target = None,
    description: Annotated[
        str, typer.Option(help="Name of a description, or a .toml, .json or .yaml file.")
    ] = "gradcam-vit",
    state: Annotated[
        list[str] | None,
        typer.Option(help="FIELD=VALUE that is stated besides; again for another field, or another value of it."),
    ] = None,
    open_: Annotated[list[str] | None, typer.Option("--open", help="FIELD that is left open; repeatable.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count and list the recipes.")] = False,
    option: options.FamilyOption = None,
    device: options.Device = "cpu",
    dtype: options.Dtype = "float32",
    overwrite: options.Overwrite = False,
    as_json: options.AsJson = False,
) -> None:
    """Make every map that a description allows: how far apart they are, and what to state; a figure and a JSON."""
    chosen = _stating(_read(description), state or [], open_ or [])
    loaded = vlcam.load(model, device=device, dtype=dtype, **family_options(option or []))
    labels = list(loaded.adapter.labels)
    if dry_run:
        asked = read_target(target_of(target, labels), loaded.adapter.heads, labels)
        _count(loaded, narrowed(chosen, asked), phrase, as_json=as_json)
        return
    if image is None or out is None:
        raise UnknownNameError("--image and --out: give both, or --dry-run to count the recipes alone")
    base = "-".join(filter(None, (image.stem, "ambiguity", slug(chosen.name), slug(phrase or target))))
    files = {"figure": out / f"{base}.png", "record": out / f"{base}.json"}
    refuse_existing(files, overwrite=overwrite)
    found = loaded.ambiguity(
        str(image),
        text,
        chosen,
        target=target_of(target, labels),
        phrase=phrase,
        against=against or None,
    )
    people.print(str(found))
    written = _write(found, files)
    for kind, path in written.items():
        people.print(f"  {kind}: {path}")
    if as_json:
        emit({"files": {kind: str(path) for kind, path in written.items()}} | found.to_dict())


def _write(found: Ambiguity, files: dict[str, Path]) -> dict[str, Path]:
    """Write the record, and the figure where there are maps to compare and a library to draw them."""
    make_folder(files["record"].parent)
    found.save(files["record"], overwrite=True)
    if len(found.shown) < 2:
        people.print("no figure: there are no two maps to compare", style="yellow")
        return {"record": files["record"]}
    try:
        figure = found.figure()
    except InputError as error:  # an extra that is not installed
        people.print(f"no figure: {error}", style="yellow")
        return {"record": files["record"]}
    try:
        figure.savefig(files["figure"], dpi=130)
    except OSError as error:
        raise FileError(f"{str(files['figure'])!r} cannot be written ({error})") from None
    return files


def _read(given: str) -> Description:
    """The description in a `.toml`, `.json` or `.yaml` file; anything else is a name."""
    path = Path(given)
    if path.suffix not in _READERS:
        if path.is_file():
            raise UnknownNameError(f"description file {given!r}: give one that ends in {', '.join(_READERS)}")
        return described(given)
    return _READERS[path.suffix](read_file("description", given))


def _stating(description: Description, state: Sequence[str], open_: Sequence[str]) -> Description:
    """The description with fields stated or opened; a value that is JSON is read as such, anything else is text."""
    stated: dict[str, list[Any]] = {}
    for item in state:
        field, equals, value = item.partition("=")
        if not equals:
            raise UnknownNameError(f"--state {item!r}: give FIELD=VALUE")
        try:
            stated.setdefault(field, []).append(json.loads(value))
        except json.JSONDecodeError:
            stated.setdefault(field, []).append(value)
    both = sorted(set(stated) & set(open_))
    if both:
        raise RecipeError(f"--state {both[0]}=... and --open {both[0]}: give one of them")
    several: dict[str, Any] = {field: [_one(value, field) for value in values] for field, values in stated.items()}
    return description.stating(**several, **dict.fromkeys(open_))


def _one(value: Any, field: str) -> Any:
    """A number or a name that stands for a list of one, so that two of them are two values."""
    kind = {"layers": int, "queries": int, "exclude": str, "departures": str}.get(field)
    return [value] if kind is not None and type(value) is kind else value


def _count(loaded: vlcam.Explainer, chosen: Description, phrase: str | None, *, as_json: bool) -> None:
    found = fitting_recipes(loaded, chosen, phrase=phrase)
    people.print(str(chosen))
    people.print(f"\n{len(found)} recipes of {loaded.name} fit", style="bold")
    if not found:
        people.print(why_none(Domain(loaded.adapter, chosen, phrase)))
    for recipe in found:
        people.print(f"  {recipe.name}")
    if as_json:
        emit(
            {
                "description": chosen.to_dict(),
                "fit": len(found),
                "recipes": [recipe.to_dict() | {"fingerprint": recipe.fingerprint} for recipe in found],
            }
        )
