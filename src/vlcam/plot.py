"""Figures with matplotlib, which is an extra: `pip install vlcam[plot]`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vlcam.colours import COLORMAPS
from vlcam.errors import InputError
from vlcam.geometry import to_original

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

    from vlcam.explanation import Explanation

__all__ = ["PLAIN", "canvas", "figure", "scores_line"]

_COLUMNS = 5
_TILE = 2.3
_PIXELS = 512  # the longer side of a picture in a tile; at 200 dpi a tile shows no more
PLAIN: dict[str, Any] = {"parse_math": False}
"""Text is shown as it stands: a user's $ is no formula."""


def figure(explanation: Explanation) -> Figure:
    """The image, the map of the explanation, then every word's map, all maps on one colour scale with numbers.

    Args:
        explanation: what is shown.

    Returns:
        A matplotlib figure that belongs to no window; `figure.savefig(path)` writes it.

    Raises:
        InputError: matplotlib is not installed.
    """
    if explanation.recipe.of_text:
        return _text_figure(explanation)
    tiles = _tiles(explanation)
    rows = -(-(len(tiles) + 1) // _COLUMNS)
    columns = min(_COLUMNS, len(tiles) + 1)
    made = canvas(_TILE * columns + 0.9, (_TILE + 0.35) * rows + 0.9)
    axes = np.atleast_1d(made.subplots(rows, columns)).reshape(-1)
    for ax in axes:
        ax.set_axis_off()
    colours = _colours(tiles)
    placement = explanation.placement.scaled_down(_PIXELS)
    picture = explanation.picture().resize(placement.original[::-1])
    axes[0].imshow(picture)
    axes[0].set_title("image", **PLAIN, fontsize=9)
    for ax, (title, tokens, status) in zip(axes[1:], tiles, strict=False):
        ax.imshow(picture.convert("L"), cmap="gray", vmin=0, vmax=255)
        _draw(ax, to_original(tokens, placement, explanation.recipe.upsample), colours)
        ax.set_title(title if status == "ok" else f"{title}\n({status})", **PLAIN, fontsize=9)
    bar = made.colorbar(colours, ax=list(axes), shrink=0.8, pad=0.01)
    bar.ax.tick_params(labelsize=7)
    bar.set_label("raw map value, one scale for all", **PLAIN, fontsize=8)
    made.suptitle(_title(explanation), **PLAIN, fontsize=9, x=0.01, ha="left")
    return made


def _text_figure(explanation: Explanation) -> Figure:
    """The image, and under it the text with every word in the colour of its score."""
    made = canvas(7, 5)
    above, below = made.subplots(2, 1, height_ratios=[3, 2])
    for ax, picture in ((above, explanation.picture()), (below, explanation.overlay())):
        ax.set_axis_off()
        ax.imshow(picture)
    made.suptitle(_title(explanation), **PLAIN, fontsize=9, x=0.01, ha="left")
    return made


def canvas(width: float, height: float) -> Figure:
    """An empty figure of a size in inches.

    Raises:
        InputError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError(f"figures need matplotlib ({error}): pip install 'vlcam[plot]'") from None
    return Figure(figsize=(width, height), layout="constrained")


def _tiles(explanation: Explanation) -> list[tuple[str, NDArray[np.float32], str]]:
    phrase = explanation.provenance["run"]["phrase"]
    name = f"“{phrase}”" if phrase else "whole text" if explanation.text is not None else explanation.subject
    whole = (name, explanation.tokens, explanation.status)
    return [whole, *((word.word, word.tokens, word.status) for word in explanation.word_maps)]


def _colours(tiles: list[tuple[str, NDArray[np.float32], str]]) -> ScalarMappable:
    """One scale for all maps, up to the largest magnitude; zero is in its middle where any value is negative."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    largest = max(float(np.abs(tokens).max()) for _, tokens, _ in tiles) or 1.0
    signed = any(bool((tokens < 0).any()) for _, tokens, _ in tiles)
    anchors = np.array(COLORMAPS["coolwarm" if signed else "inferno"]) / 255
    colormap = LinearSegmentedColormap.from_list("vlcam", anchors)
    return ScalarMappable(Normalize(-largest if signed else 0.0, largest), colormap)


def _draw(ax: Axes, raw: NDArray[np.float32], colours: ScalarMappable) -> None:
    least, largest = colours.get_clim()
    strength = np.clip(np.abs(np.nan_to_num(raw)) / largest, 0, 1)
    ax.imshow(raw, cmap=colours.cmap, vmin=least, vmax=largest, alpha=0.25 + 0.6 * strength)


def _title(explanation: Explanation) -> str:
    run, model = explanation.provenance["run"], explanation.provenance["model"]
    blocks = ", ".join(map(str, run["layers"]))
    recipe = f"{explanation.recipe.name}, {run['site']} of {run['stream']} block {blocks}"
    value = run["target_value"]
    if value is not None and run["target"] not in scores_line(explanation):
        among = f" among {len(run['against']) + 1} texts" if run["against"] else ""
        how = {"phrase": ", phrase alone", "in_place": ", phrase in its place"}.get(explanation.recipe.prompt, "")
        recipe = f"{run['target']} {value:.4f}{among}{how}   {recipe}"
    last = f"{recipe}   {explanation.recipe.fingerprint}   {model['id']}"
    return f"{explanation.subject}\n{scores_line(explanation)}\n{last}"


def scores_line(explanation: Explanation) -> str:
    """The scores that people look for, with their kinds."""
    kinds = ("logit", "probability", "cosine")
    return "   ".join(str(score) for score in explanation.scores.values() if score.kind in kinds)
