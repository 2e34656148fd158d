"""Commands that read what was saved: `vlcam verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

import vlcam
from vlcam.cli import options
from vlcam.cli.base import emit, people
from vlcam.explanation import Explanation

__all__ = ["verify"]


def verify(
    file: Annotated[Path, typer.Argument(help="A PNG that `explain` or `Explanation.save` wrote.")],
    image: Annotated[Path | None, typer.Option(help="The image, if the file does not carry it.")] = None,
    model: Annotated[str | None, typer.Option(help="Where the model is now, if not where the record says.")] = None,
    device: Annotated[str, typer.Option(help="Where the model runs.")] = "cpu",
    as_json: options.AsJson = False,
) -> None:
    """Compute a saved map again and compare; exit code 1 if it does not come out."""
    saved = Explanation.open(file, image=None if image is None else str(image))
    record = saved.provenance["model"]
    given = {name: value for name, value in record["options"].items() if value is not None}
    loaded = vlcam.load(model or record["id"], dtype=record["dtype"], device=device, **given)
    outcome = saved.verify(loaded)
    people.print(str(outcome), style="green" if outcome.reproduced else "red")
    if as_json:
        emit(
            {
                "reproduced": outcome.reproduced,
                "identical": outcome.identical,
                "largest_difference": outcome.largest if np.isfinite(outcome.largest) else None,
                "differences": list(outcome.differences),
            }
        )
    if not outcome.reproduced:
        raise typer.Exit(1)
