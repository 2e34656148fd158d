"""Commands that list what there is: `vlcam models`, `recipes`, `anatomy`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

import vlcam
from vlcam import wording
from vlcam.bibtex import bibliography
from vlcam.catalogue import named
from vlcam.cli import options
from vlcam.cli.base import emit, people
from vlcam.errors import RecipeError, UnknownNameError, listing
from vlcam.plan import plan

if TYPE_CHECKING:
    from vlcam.entry import Entry
    from vlcam.recipe import Recipe

__all__ = ["anatomy", "models", "recipes"]

_WIDTH = 100
_COLUMNS = ("name", "site", "weighting", "target")


def models(as_json: options.AsJson = False) -> None:
    """List the embedded models."""
    known = vlcam.models()
    for name, entry in known.items():
        people.print(f"{name}  {entry.summary}")
    if as_json:
        emit({name: dict(entry.figures) for name, entry in known.items()})


def recipes(
    name: Annotated[str | None, typer.Argument(help="One recipe, whole.")] = None,
    site: Annotated[str | None, typer.Option(help="Only those that read this site.")] = None,
    target: Annotated[str | None, typer.Option(help="Only those of this target.")] = None,
    model: Annotated[str | None, typer.Option(help="Only those that fit this model.")] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="With --model: the others too, each with the reason why it does not fit.")
    ] = False,
    bibtex: Annotated[bool, typer.Option("--bibtex", help="Print the sources as BibTeX on stdout.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """List the named recipes, or show one with its formula, its source and what backs it."""
    chosen = {field: value for field, value in (("site", site), ("target", target)) if value is not None}
    if name is not None and (chosen or model or everything):
        raise UnknownNameError(f"recipe {name!r} with --site, --target, --model or --all: these choose from the list")
    if everything and model is None:
        raise UnknownNameError("--all says why a recipe does not fit a model: name one with --model")
    entries = _chosen(chosen) if name is None else {name: named(name)}
    reasons = _reasons(model, entries) if model is not None else {}
    shown = {key: entry for key, entry in entries.items() if everything or key not in reasons}
    if bibtex and not as_json:
        typer.echo(bibliography(shown.values()), nl=False)
    elif name is not None:
        people.print(_whole(entries[name]))
    else:
        _print_list(shown, reasons)
    if as_json:
        found = {key: _entry(entry) | _fit(model, reasons.get(key)) for key, entry in shown.items()}
        emit(found if name is None else found[name])


def _chosen(fields: dict[str, str]) -> dict[str, Entry]:
    """The entries whose recipes have these values."""
    known = vlcam.recipes()
    for field, value in fields.items():
        values = dict.fromkeys(getattr(entry.recipe, field) for entry in known.values())
        if value not in values:
            raise UnknownNameError(f"--{field} {value!r}: no named recipe has it; there are {listing(values)}")
    return {
        key: entry
        for key, entry in known.items()
        if all(getattr(entry.recipe, field) == value for field, value in fields.items())
    }


def _reasons(model: str, entries: Iterable[str]) -> dict[str, str]:
    """Why a model cannot meet a recipe, of those that it cannot."""
    adapter, found = vlcam.load(model).adapter, {}
    for key in entries:
        try:
            plan(adapter, key, {})
        except (RecipeError, UnknownNameError) as error:
            found[key] = str(error)
    return found


def _print_list(entries: dict[str, Entry], reasons: dict[str, str]) -> None:
    rows = [_COLUMNS, *(_row(entry.recipe) for key, entry in entries.items() if key not in reasons)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        people.print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    unfit = [key for key in entries if key in reasons]
    if unfit:
        people.print("\nwhat does not fit, and why")
    for key in unfit:
        people.print(_paragraph(f"{key}: {reasons[key]}", hanging="    "))


def _row(recipe: Recipe) -> tuple[str, ...]:
    return tuple(str(getattr(recipe, field)) for field in _COLUMNS)


def _whole(entry: Entry) -> str:
    """One entry for people: the recipe by checklist group, its formula, where it comes from and what backs it."""
    parts = [wording.describe(entry.recipe), "", "source", _paragraph(str(entry.citation))]
    parts += ["", "code", _paragraph(entry.code)]
    if entry.departs:
        parts += ["", "departures", _paragraph(entry.departs)]
    parts += ["", "checks", *(f"  {check.what}\n    {check.test}" for check in entry.checks)]
    return "\n".join([*parts, "", "notes", _paragraph(entry.notes)])


def _paragraph(text: str, hanging: str = "  ") -> str:
    return textwrap.fill(
        text, _WIDTH, initial_indent="  ", subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False
    )


def _entry(entry: Entry) -> dict[str, Any]:
    return {
        "recipe": entry.recipe.to_dict() | {"fingerprint": entry.recipe.fingerprint},
        "formula": wording.formula(entry.recipe).splitlines(),
        "citation": str(entry.citation),
        "bibtex": vlcam.bibtex(entry),
        "code": entry.code,
        "published_depth": entry.depth or None,
        "departs": entry.departs,
        "checks": [check._asdict() for check in entry.checks],
        "notes": entry.notes,
    }


def _fit(model: str | None, reason: str | None) -> dict[str, Any]:
    return {} if model is None else {"fits": reason is None, "reason": reason}


def anatomy(
    model: Annotated[str, typer.Argument(help="Embedded model, folder or checkpoint name.")],
    as_json: options.AsJson = False,
) -> None:
    """Show a model's streams, blocks, sites, tokens and targets."""
    found = vlcam.load(model).anatomy
    people.print(str(found))
    if as_json:
        emit(found.to_dict())
