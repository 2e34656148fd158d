"""`vlcam report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vlcam.archive import make_folder
from vlcam.cli import options
from vlcam.cli.base import emit, people, refuse_existing
from vlcam.errors import FileError, UnknownNameError, listing
from vlcam.explanation import Explanation
from vlcam.reporting.report import ENDINGS

__all__ = ["report"]

_FORMATS = tuple(ending.removeprefix(".") for ending in ENDINGS)


def report(
    file: Annotated[Path, typer.Argument(help="A PNG that `explain` or `Explanation.save` wrote.")],
    out: Annotated[Path, typer.Option(help="A file that ends in .html, .json, .md or .tex; or a folder.")],
    image: Annotated[Path | None, typer.Option(help="The image, if the file does not carry it.")] = None,
    form: Annotated[
        list[str] | None, typer.Option("--format", help="html, json, md, tex; repeatable. For a folder. Default: html.")
    ] = None,
    overwrite: options.Overwrite = False,
    as_json: options.AsJson = False,
) -> None:
    """Fill in the reporting checklist of a saved map: a page, Markdown, LaTeX, JSON."""
    files = _files(file, out, form or [])
    saved = Explanation.open(file, image=None if image is None else str(image))
    refuse_existing(files, overwrite=overwrite)
    made = saved.report()
    if out.suffix.lower() not in ENDINGS:
        make_folder(out)
    for kind, path in files.items():
        people.print(f"{kind}: {made.save(path, overwrite=overwrite)}")
    if as_json:
        emit({"files": {kind: str(path) for kind, path in files.items()}, **made.to_dict()})


def _files(file: Path, out: Path, forms: list[str]) -> dict[str, Path]:
    """What is written where: one file that `out` names, or one of each format in the folder `out`."""
    unknown = [form for form in forms if form not in _FORMATS]
    if unknown:
        raise UnknownNameError(f"--format {listing(unknown)}: choose from {', '.join(_FORMATS)}")
    if out.suffix[1:].isalpha() and out.suffix.lower() not in ENDINGS and not out.is_dir():
        raise FileError(
            f"{str(out)!r}: a report is saved as {', '.join(ENDINGS)}; give a name that ends so, or make the folder "
            "of that name first"
        )
    if out.suffix.lower() not in ENDINGS:
        return {form: out / f"{file.stem}-report.{form}" for form in dict.fromkeys(forms or ["html"])}
    form = out.suffix.lower().removeprefix(".")
    if forms and forms != [form]:
        raise UnknownNameError(
            f"--format {listing(forms)}: --out names one file, which ends in .{form}; give a folder, or leave --format "
            "out"
        )
    return {form: out}
