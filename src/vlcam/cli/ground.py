"""`vlcam ground`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

import vlcam
from vlcam.archive import make_folder
from vlcam.cli import options
from vlcam.cli.base import bar, emit, family_options, people, read_recipe, refuse_existing, slug
from vlcam.errors import FileError
from vlcam.grounding import Grounding

__all__ = ["ground"]

_ENDINGS = {"picture": ".png", "coco": "-coco.json", "record": ".json"}


def ground(
    model: options.Model,
    image: options.ImageFile,
    text: Annotated[str, typer.Option(help="The caption.")],
    out: options.OutFolder,
    phrase: Annotated[
        list[str] | None, typer.Option(help="Words of the caption; repeatable. Default: those that a rule finds.")
    ] = None,
    threshold: Annotated[float, typer.Option(help="Share of a map's largest value that belongs to a box.")] = 0.5,
    prompt: options.Prompt = None,
    against: options.Against = None,
    answer: options.Answer = None,
    recipe: options.RecipeName = None,
    layer: options.Layer = None,
    layer_rule: options.LayerRule = None,
    target: options.Target = None,
    scale: options.Scale = None,
    image_id: Annotated[int, typer.Option(help="The image's number in the COCO file.")] = 1,
    option: options.FamilyOption = None,
    device: options.Device = "cpu",
    dtype: options.Dtype = "float32",
    strict: options.Strict = False,
    overwrite: options.Overwrite = False,
    as_json: options.AsJson = False,
) -> None:
    """Find every phrase of a caption in the image: a picture with boxes, the boxes as COCO, a record."""
    chosen = None if recipe is None else read_recipe(recipe)
    loaded = vlcam.load(model, device=device, dtype=dtype, **family_options(option or []))
    given = {"scale": scale, "layer_rule": layer_rule, "prompt": prompt}
    changes: dict[str, Any] = {field: value for field, value in given.items() if value}
    with bar() as progress:
        found = loaded.ground(
            str(image),
            text,
            phrase or None,
            chosen,
            threshold=threshold,
            layer=layer or None,
            target=target,
            against=against or None,
            answer=answer,
            strict=strict,
            progress=progress,
            **changes,
        )
    base = f"{image.stem}-{slug(found[0].explanation.recipe.name)}-ground"
    files = {kind: out / f"{base}{ending}" for kind, ending in _ENDINGS.items()}
    refuse_existing(files, overwrite=overwrite)
    make_folder(out)
    coco = json.dumps(found.to_coco(image_id=image_id), indent=2, ensure_ascii=False)
    try:
        found.drawn().save(files["picture"])
        files["coco"].write_text(coco + "\n", encoding="utf-8")
    except OSError as error:
        raise FileError(f"{str(out)!r}: results cannot be written ({error})") from None
    found.save(files["record"], overwrite=overwrite)
    _tell_ground(found, files)
    if as_json:
        emit({"files": {key: str(path) for key, path in files.items()}} | found.record())


def _tell_ground(found: Grounding, files: dict[str, Path]) -> None:
    people.print(found.text, style="bold")
    for each in found:
        place = f"box {each.box}, peak {each.peak}, score {each.score:.3g}" if each.box else each.status
        people.print(f"  {each.phrase:<24} {place}", style=None if each.box else "yellow")
    if found.cut:
        people.print(f"  cut off, not grounded: {', '.join(found.cut)}", style="yellow")
    for kind, path in files.items():
        people.print(f"  {kind}: {path}")
