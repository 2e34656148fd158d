"""`vlcam demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vlcam import demo as demo_job
from vlcam.cli import options
from vlcam.cli.base import emit, people
from vlcam.cli.explain import tell

__all__ = ["demo"]


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("demo"), as_json: options.AsJson = False
) -> None:
    """Explain a scene with the embedded model and write the pictures."""
    written = demo_job.run(out)
    tell(written.explanation, written.files)
    if written.left_out:
        people.print(f"left out the figure: {written.left_out}", style="yellow")
    if as_json:
        emit({"files": {key: str(path) for key, path in written.files.items()}} | written.explanation.record())
