"""What a record says, in words that both the checklist and the paragraph use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlcam.explanation import Explanation
    from vlcam.recipe import Recipe

__all__ = [
    "NOT_RECORDED",
    "WITHOUT_FILE",
    "blocks",
    "compares",
    "dropped",
    "image_name",
    "listed",
    "model_class",
    "modules",
    "number",
    "numbers",
    "region",
    "seen",
    "shown",
    "size",
    "steps",
    "versions",
]

NOT_RECORDED = "not recorded"
WITHOUT_FILE = {
    "PIL image": "an image that was given as pixels",
    "array": "an image that was given as an array",
    "bytes": "an image that was given as bytes",
    "preprocessed tensor": "a preprocessed tensor",
}
"""What the record has in place of a file's name, in words."""


def number(value: float) -> str:
    """Six digits are more than a reader needs and fewer than the record has."""
    return f"{value:.6g}"


def numbers(indices: Sequence[int]) -> str:
    """Whole numbers with runs of them in short: `0, 17 to 40`."""
    runs = [list(run) for _, run in groupby(enumerate(sorted(indices)), lambda pair: pair[1] - pair[0])]
    ends = [(run[0][1], run[-1][1]) for run in runs]
    return ", ".join(str(a) if a == b else f"{a} to {b}" if b > a + 1 else f"{a}, {b}" for a, b in ends)


def listed(parts: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))


def shown(value: object) -> str:
    """A value of a recipe or a record."""
    if isinstance(value, (tuple, list)):
        return ", ".join(map(shown, value)) or "none"
    return number(value) if isinstance(value, float) else str(value)


def size(rows_and_columns: Sequence[int]) -> str:
    """`480 x 640`: height and width, or rows and columns."""
    return " x ".join(map(str, rows_and_columns))


def blocks(run: Mapping[str, Any]) -> str:
    """Which blocks were read, of how many."""
    read, of = run["layers"], run["blocks"]
    if len(read) == of > 1:
        return f"all {of} blocks"
    return f"{'block' if len(read) == 1 else 'blocks'} {numbers(read)} of {of} (counted from 0)"


def modules(run: Mapping[str, Any]) -> str:
    """The names of the blocks that were read, of many the first and the last; empty where they have none."""
    names = [name for name in run["modules"] if name]
    if len(names) > 2:
        return f"modules {names[0]} to {names[-1]}"
    return f"module{'s' if len(names) > 1 else ''} {listed(names)}" if names else ""


def model_class(record: Mapping[str, Any]) -> str:
    """The model's class without the path of its module."""
    return str(record["class"]).rpartition(".")[2]


def image_name(record: Mapping[str, Any]) -> str:
    """What the image is called in a sentence."""
    return WITHOUT_FILE.get(record["name"], f"the image {record['name']}")


def compares(recipe: Recipe) -> bool | None:
    """Whether what is explained depends on the other texts of the call; None where that is the model's matter."""
    if recipe.weighting == "surgery" or recipe.scale in ("margin", "difference", "finer"):
        return True
    return None if recipe.target == "custom" or recipe.scale.endswith("probability") else False


def seen(exp: Explanation) -> str:
    """Which part of the original the model saw."""
    height, width = exp.placement.original
    x0, y0, x1, y1 = exp.placement.box
    if max(abs(x0), abs(y0), abs(x1 - width), abs(y1 - height)) < 0.5:
        return "the whole image"
    beyond = " (beyond the image is padding)" if min(x0, y0) < 0 or x1 > width or y1 > height else ""
    return f"the part from x = {x0:.1f}, y = {y0:.1f} to x = {x1:.1f}, y = {y1:.1f} of the image{beyond}"


def steps(record: Mapping[str, Any]) -> list[str]:
    """What was done to the image, a phrase for each step in order, in the past tense."""
    return [_STEPS.get(step["step"], _step)(step) for step in record["steps"] if step["step"] != "processor"]


def _convert(step: Mapping[str, Any]) -> str:
    """Conversion to another mode, and what it took: alpha was dropped, values of 16 bits were divided."""
    more = ", ".join(
        f"{key.replace('_', ' ')} {value}" for key, value in step.items() if key not in ("step", "from", "to")
    )
    return f"converted from {step['from']} to {step['to']}" + (f" ({more})" if more else "")


def _resize(step: Mapping[str, Any]) -> str:
    kept = "proportions kept" if step.get("keeps_proportions") else "proportions not kept"
    return f"resized to {size(step['to'])} pixels ({step['resample']}, {kept})"


def _crop(step: Mapping[str, Any]) -> str:
    return f"cropped at the centre to {size(step['to'])} pixels"


def _normalize(step: Mapping[str, Any]) -> str:
    return f"normalised with mean ({shown(step['mean'])}) and standard deviation ({shown(step['std'])})"


def _rescale(step: Mapping[str, Any]) -> str:
    return "scaled by 1/255" if abs(step["factor"] * 255 - 1) < 1e-6 else f"scaled by {number(step['factor'])}"


def _positions(step: Mapping[str, Any]) -> str:
    return (
        f"used with position embeddings interpolated from {size(step['trained'])} to {size(step['used'])}"
        if step["trained"] != step["used"]
        else "used with position embeddings as trained"
    )


def _step(step: Mapping[str, Any]) -> str:
    details = ", ".join(f"{key} {shown(value)}" for key, value in step.items() if key != "step")
    return f"processed by {step['step']} ({details})"


_STEPS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "first_picture": lambda step: f"taken as the first of {step['of']} pictures in the file",
    "exif_rotation": lambda step: f"turned upright to that size (EXIF orientation {step['orientation']})",
    "convert": _convert,
    "resize": _resize,
    "center_crop": _crop,
    "rescale": _rescale,
    "normalize": _normalize,
    "interpolate_positions": _positions,
    "given_preprocessed": lambda step: f"given preprocessed, {size(step['size'])} pixels, and used as it was",
}


def dropped(part: Mapping[str, Any]) -> str:
    """What never reached the map, with its indices and the reason."""
    reason = part["why"].replace(": ", ", ")
    return f"{part['what']} {numbers(part['tokens'])}, reason: {reason}"


def region(explained: Mapping[str, Any]) -> str:
    """Over which pixels a class of pixels was explained; empty for the class of an image."""
    if "region" not in explained:
        return ""
    given = explained["region"]
    if given is None:
        return "over the pixels that the model gives to it"
    if "box" in given:
        return f"over the box x0, y0, x1, y1 = {shown(given['box'])} of the image"
    return "over a mask of the image that is on record"


def versions(record: Mapping[str, str]) -> str:
    """Every package with its version, vlcam first and Python last."""
    order = sorted(record, key=lambda name: (name != "vlcam", name == "python"))
    return ", ".join(f"{'Python' if name == 'python' else name} {record[name]}" for name in order)
