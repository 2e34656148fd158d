"""`vlcam audit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import vlcam
from vlcam.archive import make_folder, write_text
from vlcam.auditing import Audit, empty_table
from vlcam.cli import options
from vlcam.cli.base import emit, people, refuse_existing
from vlcam.errors import FileError, InputError

__all__ = ["audit"]

_TEMPLATE = Path("audit_template.csv")


def audit(
    file: Annotated[Path | None, typer.Argument(help="The CSV file, a row per paper; see docs/audit.md.")] = None,
    model: Annotated[
        str | None, typer.Option(help="On which model recipes are counted, for all rows. Default: by architecture.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for tables and figure; made if it does not exist.")] = None,
    template: Annotated[
        bool, typer.Option("--template", help="Write an empty table with one example row into the file, and stop.")
    ] = False,
    overwrite: options.Overwrite = False,
    as_json: options.AsJson = False,
) -> None:
    """Count what papers state of how their maps were made, and the recipes that each leaves open."""
    if template:
        _write_template((out or Path()) / (file or _TEMPLATE), overwrite=overwrite)
        return
    if file is None:
        raise InputError("no file: name a CSV file with a row per paper; vlcam audit --template makes one")
    files = _files(file, out)
    refuse_existing(files, overwrite=overwrite)
    if out is not None:
        make_folder(out)
    found = vlcam.audit(file, model)
    people.print(str(found))
    if out is not None:
        files = _write(found, files)
        for kind, path in files.items():
            people.print(f"  {kind}: {path}")
    if as_json:
        emit({"files": {kind: str(path) for kind, path in files.items()}} | found.to_dict())


def _files(file: Path, out: Path | None) -> dict[str, Path]:
    endings = {"record": ".json", "tables": ".md", "rows": "-rows.csv", "figure": ".png"}
    return {} if out is None else {kind: out / f"{file.stem}-audit{ending}" for kind, ending in endings.items()}


def _write(found: Audit, files: dict[str, Path]) -> dict[str, Path]:
    """The files that were written: without matplotlib, all but the figure."""
    found.save(files["record"], overwrite=True)
    write_text(files["tables"], found.to_markdown(), overwrite=True)
    write_text(files["rows"], found.to_csv(), overwrite=True)
    try:
        found.figure().savefig(files["figure"], dpi=130)
    except OSError as error:
        raise FileError(f"{str(files['figure'])!r}: cannot be written ({error.strerror})") from None
    except InputError as error:
        people.print(f"left out the figure: {error}", style="yellow")
        return {kind: path for kind, path in files.items() if kind != "figure"}
    return files


def _write_template(path: Path, *, overwrite: bool) -> None:
    refuse_existing({"template": path}, overwrite=overwrite)
    make_folder(path.parent)
    write_text(path, empty_table(), overwrite=overwrite)
    people.print(f"{path}: a column per field of the checklist, and a row to replace")
