"""Many recipes on one image and subject, side by side, with matplotlib."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vlcam.errors import InputError, RecipeError, listing
from vlcam.plot import PLAIN, canvas, scores_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from PIL.Image import Image

    from vlcam.explanation import Explanation

__all__ = ["compare", "gallery"]

_SIDE = 1.25
_ACROSS = 8
_SIGNS_PER_INCH = 14
_SIGNS_OF_A_TITLE = 20
_PIXELS = 256  # the longer side of a picture in a tile

Cells = dict[tuple[Any, Any], "Explanation"]


def compare(explanations: Sequence[Explanation], *, rows: str = "site", columns: str = "weighting") -> Figure:
    """A row per value of one choice, a column per value of another; rows that know other columns stand below.

    Every map is scaled as its own recipe says, because raw values of different weightings have no common scale. A cell
    without a picture says why.

    Args:
        explanations: of one image and subject, as `sweep` returns them.
        rows: the recipe field whose values are the rows.
        columns: the recipe field whose values are the columns.

    Returns:
        A matplotlib figure that belongs to no window.

    Raises:
        InputError: matplotlib is not installed, nothing was given, or not of one image and subject.
        RecipeError: two explanations belong in one cell; the message names a field that tells them apart.
    """
    first = _of_one_subject(explanations)
    cells = _cells(explanations, rows, columns)
    panels = _panels(cells)
    wide = max(len(across) for _, across in panels)
    lines = sum(len(down) for down, _ in panels)
    made = canvas(_SIDE * (wide + 1.3), _SIDE * lines * _aspect(first) + 0.28 * len(panels) + 0.7)
    axes = made.subplots(lines, wide + 1, squeeze=False)
    for ax in axes.flat:
        ax.set_axis_off()
    picture = _picture(first)
    axes[0, 0].imshow(picture)
    line = 0
    for down, across in panels:
        for column, value in enumerate(across, start=1):
            axes[line, column].set_title(_in_words(value), **PLAIN, fontsize=8)
        for value in down:
            _name_row(axes[line, 1], _in_words(value))
            for column, other in enumerate(across, start=1):
                if (value, other) in cells:
                    _draw(axes[line, column], cells[value, other], picture)
            line += 1
    _add_title(made, _title(explanations, f"{rows} by {columns}"))
    return made


def gallery(explanations: Sequence[Explanation]) -> Figure:
    """The image, then every explanation under the name of its recipe, each scaled as its recipe says.

    Explanations of several texts or classes, as `explain` returns them for a list, stand under those; explanations of
    several models under the models' names.

    Args:
        explanations: of one image.

    Returns:
        A matplotlib figure that belongs to no window.

    Raises:
        InputError: matplotlib is not installed, nothing was given, or not of one image.
    """
    first = _of_one_image(explanations)
    subjects = {explanation.subject for explanation in explanations}
    names = {explanation.recipe.name for explanation in explanations}
    models = _models(explanations)
    wide = min(_ACROSS, len(explanations) + 1)
    lines = -(-(len(explanations) + 1) // wide)
    made = canvas((_SIDE + 0.25) * wide, (_SIDE * _aspect(first) + 0.5) * lines + 0.5)
    axes = made.subplots(lines, wide, squeeze=False).flat
    for ax in axes:
        ax.set_axis_off()
    picture = _picture(first)
    axes[0].imshow(picture)
    axes[0].set_title("image", **PLAIN, fontsize=8)
    for number, explanation in enumerate(explanations, start=1):
        _draw(axes[number], explanation, picture)
        title = [_folded(explanation.recipe.name)] if len(names) > 1 or len(subjects) == 1 else []
        title += textwrap.wrap(_own_choices(explanation, explanations), _SIGNS_OF_A_TITLE)
        title += textwrap.wrap(explanation.subject, _SIGNS_OF_A_TITLE) if len(subjects) > 1 else []
        title += textwrap.wrap(_models([explanation])[0], _SIGNS_OF_A_TITLE) if len(models) > 1 else []
        axes[number].set_title("\n".join(title), **PLAIN, fontsize=7)
    what = "recipes" if len(subjects) == 1 else f"{len(subjects)} texts or classes, recipe {', '.join(sorted(names))}"
    _add_title(made, _title(explanations, what))
    return made


def _own_choices(explanation: Explanation, explanations: Sequence[Explanation]) -> str:
    """The choices that tell a recipe from others of its name."""
    own = explanation.recipe
    others = [each.recipe for each in explanations if each.recipe.name == own.name]
    fields = dict.fromkeys(field for other in others for field in own.differences(other))
    return ", ".join(f"{field} {_in_words(getattr(own, field))}" for field in fields)


def _of_one_image(explanations: Sequence[Explanation]) -> Explanation:
    if not explanations:
        raise InputError("no explanation to compare was given")
    odd = [each for each in explanations if not hasattr(each, "provenance")]
    if odd:
        raise InputError(
            f"explanations that are {type(odd[0]).__name__}: give a flat list of explanations of one image"
        )
    images: list[Explanation] = []
    for explanation in explanations:
        if not any(explanation.of_same_image(other) for other in images):
            images.append(explanation)
    if len(images) > 1:
        raise InputError(f"explanations of {len(images)} images: give those of one")
    return explanations[0]


def _of_one_subject(explanations: Sequence[Explanation]) -> Explanation:
    first = _of_one_image(explanations)
    subjects = {explanation.subject for explanation in explanations}
    if len(subjects) > 1:
        raise InputError(f"subjects: {listing(subjects)}; compare recipes on one, or draw a gallery")
    return first


def _cells(explanations: Sequence[Explanation], rows: str, columns: str) -> Cells:
    cells: Cells = {}
    for explanation in explanations:
        key = (getattr(explanation.recipe, rows), getattr(explanation.recipe, columns))
        if key in cells:
            apart = [*cells[key].recipe.differences(explanation.recipe), "nothing"]
            raise RecipeError(
                f"{cells[key].recipe.name!r} and {explanation.recipe.name!r} have the same {rows} and {columns}, "
                f"{key}; they differ in {apart[0]}: compare fewer recipes, or take that for rows or columns"
            )
        cells[key] = explanation
    return cells


def _panels(cells: Cells) -> list[tuple[list[Any], list[Any]]]:
    """Rows that share their columns, with these columns; in the order of first appearance."""
    columns: dict[Any, list[Any]] = {}
    for row, column in cells:
        columns.setdefault(row, []).append(column)
    panels: list[tuple[list[Any], list[Any]]] = []
    for row, own in columns.items():
        for down, across in panels:
            if set(own) & set(across):
                down.append(row)
                across += [column for column in own if column not in across]
                break
        else:
            panels.append(([row], list(own)))
    return panels


def _name_row(ax: Axes, name: str) -> None:
    """Upright, at the left edge of the row's first map."""
    ax.text(-0.06, 0.5, name, transform=ax.transAxes, rotation=90, ha="right", va="center", fontsize=8, **PLAIN)


def _draw(ax: Axes, explanation: Explanation, picture: Image) -> None:
    if explanation.status == "ok":
        shown = explanation.overlay()
        ax.imshow(shown if explanation.recipe.of_text else shown.resize(picture.size))
        return
    ax.imshow(picture.convert("L"), cmap="gray", vmin=-400, vmax=255)  # faint, under the reason
    reason = explanation.status.replace(" ", "\n")
    ax.text(0.5, 0.5, reason, transform=ax.transAxes, ha="center", va="center", fontsize=7, **PLAIN)


def _picture(explanation: Explanation) -> Image:
    return explanation.picture().resize(explanation.placement.scaled_down(_PIXELS).original[::-1])


def _aspect(explanation: Explanation) -> float:
    height, width = explanation.placement.original
    return max(0.4, min(2.5, height / width))


def _models(explanations: Sequence[Explanation]) -> list[str]:
    return list(dict.fromkeys(explanation.provenance["model"]["id"] for explanation in explanations))


def _title(explanations: Sequence[Explanation], what: str) -> str:
    first, models = explanations[0], _models(explanations)
    blocks = {tuple(explanation.provenance["run"]["layers"]) for explanation in explanations}
    streams = dict.fromkeys(explanation.recipe.stream for explanation in explanations)
    where = f"block {_in_words(blocks.pop())}" if len(blocks) == 1 else "blocks as each recipe says"
    several = len({explanation.subject for explanation in explanations}) > 1
    scores = scores_line(first) if len(models) == 1 else ""
    about = "" if several else f"{first.subject}   {scores}\n"
    return f"{about}{what}, stream {' and '.join(streams)}, {where}   {', '.join(models)}"


def _add_title(figure: Figure, text: str) -> None:
    """At the left, folded to the figure's width."""
    signs = max(30, int(figure.get_figwidth() * _SIGNS_PER_INCH))
    lines = [part for line in text.split("\n") for part in textwrap.wrap(line, signs) or [""]]
    figure.suptitle("\n".join(lines), **PLAIN, fontsize=9, x=0.01, ha="left")


def _in_words(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _folded(name: str) -> str:
    """A long name on two lines, broken at a hyphen."""
    cut = name.rfind("-", 0, len(name) // 2 + 6)
    return name if len(name) <= 16 or cut < 0 else f"{name[: cut + 1]}\n{name[cut + 1 :]}"
