"""Options that several commands have, each said once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Against = Annotated[
    list[str] | None, typer.Option(help="Another text to compare with; repeatable. Default: all texts given.")
]
Answer = Annotated[str | None, typer.Option(help="The answer, for a model that answers questions. Default: its own.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Device = Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, mps.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16.")]
FamilyOption = Annotated[
    list[str] | None, typer.Option(help="NAME=VALUE for the model family, such as first_token=cls; repeatable.")
]
ImageFile = Annotated[Path, typer.Option(help="Image file.")]
Layer = Annotated[list[int] | None, typer.Option(help="Block in place of the recipe's; may be repeated.")]
LayerRule = Annotated[str | None, typer.Option(help="How several blocks are merged: mean, sum, max.")]
Model = Annotated[str, typer.Option(help="Embedded model, folder or checkpoint name.")]
OutFolder = Annotated[Path, typer.Option(help="Folder for the results; made if it does not exist.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace files that exist.")]
Prompt = Annotated[
    str | None, typer.Option(help="How a phrase of a contrastive score is read: phrase (alone) or in_place.")
]
RecipeName = Annotated[str | None, typer.Option(help="Name of a recipe, or a .toml or .json file.")]
Scale = Annotated[str | None, typer.Option(help="Scale in place of the recipe's: logit, probability, ...")]
Strict = Annotated[bool, typer.Option("--strict", help="Refuse text beyond the model's limit.")]
Target = Annotated[str | None, typer.Option(help="Class (label or index), or score: itm, contrastive, caption.")]
Text = Annotated[str | None, typer.Option(help="The text, for a model that takes text.")]
