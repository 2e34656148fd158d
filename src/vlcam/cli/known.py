"""Commands that list what there is: `vlcam models`, `recipes`, `anatomy`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

import vlcam
from vlcam import wording
from vlcam.catalogue import named
from vlcam.cli import options
from vlcam.cli.base import emit, people

__all__ = ["anatomy", "models", "recipes"]


def models(as_json: options.AsJson = False) -> None:
    """List the embedded models."""
    known = vlcam.models()
    for name, entry in known.items():
        people.print(f"{name}  {entry.summary}")
    if as_json:
        emit({name: dict(entry.figures) for name, entry in known.items()})


def recipes(
    name: Annotated[str | None, typer.Argument(help="One recipe, whole.")] = None, as_json: options.AsJson = False
) -> None:
    """List the named recipes, or show one with its formula and source."""
    if name is None:
        known = vlcam.recipes()
        width = max(map(len, known))
        for key, entry in known.items():
            people.print(f"{key:<{width}}  {wording.summary(entry.recipe)}")
        if as_json:
            emit({key: _entry(key) for key in known})
        return
    entry = named(name)
    people.print(wording.describe(entry.recipe))
    people.print(f"\nsource\n  {entry.citation}\n  code: {entry.code}\n  {entry.notes}")
    if as_json:
        emit(_entry(name))


def _entry(name: str) -> dict[str, Any]:
    entry = named(name)
    return {
        "recipe": entry.recipe.to_dict() | {"fingerprint": entry.recipe.fingerprint},
        "formula": wording.formula(entry.recipe).splitlines(),
        "citation": str(entry.citation),
        "code": entry.code,
        "published_depth": entry.depth or None,
        "notes": entry.notes,
    }


def anatomy(
    model: Annotated[str, typer.Argument(help="Embedded model, folder or checkpoint name.")],
    as_json: options.AsJson = False,
) -> None:
    """Show a model's streams, blocks, sites, tokens and targets."""
    found = vlcam.load(model).anatomy
    people.print(str(found))
    if as_json:
        emit(found.to_dict())
