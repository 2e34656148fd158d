"""`vlcam sweep`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

import vlcam
from vlcam import wording
from vlcam.archive import make_folder
from vlcam.cli import options
from vlcam.cli.base import bar, emit, family_options, people, read_recipe, refuse_existing, slug, target_of
from vlcam.errors import FileError, RecipeError, listing
from vlcam.explanation import Explanation
from vlcam.fitting import fitting
from vlcam.recipe import Recipe

__all__ = ["sweep"]


def sweep(
    model: options.Model,
    image: options.ImageFile,
    out: options.OutFolder,
    text: options.Text = None,
    against: options.Against = None,
    recipe: Annotated[
        list[str] | None, typer.Option(help="Name of a recipe, or a .toml or .json file; repeatable. Default: all.")
    ] = None,
    grid: Annotated[bool, typer.Option("--grid", help="Every site by every weighting, in place of names.")] = False,
    layer: Annotated[list[int] | None, typer.Option(help="Blocks of the grid; by default the last.")] = None,
    target: options.Target = None,
    option: options.FamilyOption = None,
    device: options.Device = "cpu",
    dtype: options.Dtype = "float32",
    save: Annotated[bool, typer.Option("--save", help="Also save every explanation.")] = False,
    overwrite: options.Overwrite = False,
    as_json: options.AsJson = False,
) -> None:
    """Explain one image with many recipes from one pass: a figure that compares them, and a table."""
    if grid and recipe:
        raise RecipeError("--grid and --recipe: give one of them")
    loaded = vlcam.load(model, device=device, dtype=dtype, **family_options(option or []))
    chosen: list[str | Recipe] | None = [read_recipe(each) for each in recipe] if recipe else None
    if grid:
        chosen = [*vlcam.all_recipes(loaded, layers=layer or "last")]
    base = "-".join(filter(None, (image.stem, "sweep", slug(target))))
    files = {"figure": out / f"{base}.png", "table": out / f"{base}.json"}
    names = [one if isinstance(one, str) else one.name for one in chosen or fitting(loaded.adapter)]
    each = {name: out / f"{base}-{slug(name)}.png" for name in names} if save else {}
    if len(set(each.values())) < len(names) and save:
        raise RecipeError(f"recipes {listing(names)}: two of them would be saved to one file; give them other names")
    refuse_existing(files | each, overwrite=overwrite)
    with bar() as progress:
        found = loaded.sweep(
            str(image),
            text,
            chosen,
            target=target_of(target, list(loaded.adapter.labels)),
            against=against or None,
            empty="keep",
            progress=progress,
        )
    make_folder(out)
    table = [_line(explanation) for explanation in found]
    figure = vlcam.compare(found) if grid and len(layer or "1") == 1 else vlcam.gallery(found)
    try:
        figure.savefig(files["figure"], dpi=130)
        files["table"].write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise FileError(f"{str(out)!r}: results cannot be written ({error})") from None
    for explanation in found if save else ():
        explanation.save(each[explanation.recipe.name], overwrite=overwrite)
    _tell_table(found[0].subject, table, files)
    if as_json:
        emit({"files": {key: str(path) for key, path in (files | each).items()}, "explained": table})


def _tell_table(subject: str, table: Sequence[dict[str, Any]], files: dict[str, Path]) -> None:
    people.print(subject, style="bold")
    for line in table:
        peak = "peak at {}, {}".format(*line["peak"]) if line["peak"] else line["status"]
        people.print(f"  {line['recipe']:<34} {peak}")
    for kind, path in files.items():
        people.print(f"  {kind}: {path}")


def _line(explanation: Explanation) -> dict[str, Any]:
    """What a table says of one explanation."""
    return {
        "recipe": explanation.recipe.name,
        "fingerprint": explanation.recipe.fingerprint,
        "layers": explanation.provenance["run"]["layers"],
        "status": explanation.status,
        "peak": list(explanation.peak()) if explanation.status == "ok" and not explanation.recipe.of_text else None,
        "summary": wording.summary(explanation.recipe),
    }
