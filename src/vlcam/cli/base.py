"""What all commands share: the app itself, its errors, options that are read alike, and what is printed."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

import vlcam
from vlcam.asking import Progress
from vlcam.errors import FileError, RecipeError, UnknownNameError, VlcamError
from vlcam.provenance import versions
from vlcam.recipe import Recipe

__all__ = [
    "app",
    "bar",
    "emit",
    "family_options",
    "main",
    "people",
    "read_file",
    "read_recipe",
    "refuse_existing",
    "slug",
    "target_of",
]

_HELP = """Show what a vision transformer or a vision-language model looked at, and state how each map was made.

Results as JSON go to stdout with `--json`; everything for people goes to stderr. Exit codes: 0 done, 1 it could not
be done or did not reproduce, 2 the command asks for something that does not exist.
"""

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=_HELP)
people = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; an error of vlcam becomes one line and an exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    try:
        app(args=[item for item in given if item != "--debug"], prog_name="vlcam")
    except VlcamError as error:
        if debug:
            raise
        people.print(f"vlcam: {error}", style="red")
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


@contextmanager
def bar() -> Iterator[Progress]:
    """A bar on stderr, for recipes that ask the model many times; it appears with the first batch."""
    columns = (TextColumn("asking the model"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bar(*columns, console=people, transient=True) as bar:
        task = bar.add_task("", visible=False, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total, visible=True)


def target_of(given: str | None, labels: Sequence[str]) -> str | int | None:
    """A class index is written in digits; digits that are also a class' name must mean the same class."""
    if given is None or not given.isdecimal():
        return given
    if given in labels and labels[int(given) :][:1] != [given]:
        raise UnknownNameError(
            f"--target {given}: it is the name of class {labels.index(given)}, and the number of another; in Python, "
            'target="..." is a name and target=... a number'
        )
    return int(given)


def read_recipe(given: str) -> str | Recipe:
    """The recipe in a `.toml` or `.json` file; anything else is a name, which is returned as it is."""
    readers = {".toml": Recipe.from_toml, ".json": Recipe.from_json}
    suffix = Path(given).suffix
    return readers[suffix](read_file("recipe", given)) if suffix in readers else given


def read_file(what: str, given: str) -> str:
    """The text of a file that says what is asked for.

    Raises:
        UnknownNameError: no such file.
        RecipeError: it cannot be read.
    """
    path = Path(given)
    if not path.is_file():
        raise UnknownNameError(f"{what} file {given!r}: no such file")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{what} file {given!r} cannot be read: {error}") from None


def family_options(given: Sequence[str]) -> dict[str, Any]:
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


def refuse_existing(files: dict[str, Path], *, overwrite: bool) -> None:
    """Stop before any work where one of the files that would be written exists."""
    existing = [str(path) for path in files.values() if path.exists()]
    if existing and not overwrite:
        raise FileError(f"{', '.join(existing)} exists already; choose another --out, or pass --overwrite")


def slug(text: str | None) -> str:
    """Text as part of a file name."""
    spelt = (text or "").replace("++", "-plus-plus").replace("*", "-times-")
    return re.sub(r"\W+", "-", spelt).strip("-").lower()[:60]


def emit(value: object) -> None:
    """Print a result as JSON on stdout."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))
