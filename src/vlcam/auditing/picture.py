"""An audit as a figure: what is stated, how adaptations are backed, how many recipes are left open."""

from __future__ import annotations

import math
from itertools import groupby
from typing import TYPE_CHECKING

from vlcam.auditing.counting import FieldCount
from vlcam.auditing.tables import count, share
from vlcam.plot import PLAIN, canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from vlcam.auditing.result import Audit

__all__ = ["figure"]

_STATES = {
    "stated": ("stated", "#2b5c8a"),
    "not_stated": ("not stated", "#e9a25b"),
    "not_applicable": ("does not apply", "#d5d5d5"),
    "not_coded": ("no column", "#f4f4f4"),
}
_BINS_PER_DECADE = 2


def figure(audit: Audit, title: str = "") -> Figure:
    """Stacked bars of what is stated per field, by group; bars of the basis; a histogram of recipes left open.

    Args:
        audit: what is shown.
        title: what stands above; by default the table's name and the number of papers.

    Returns:
        A matplotlib figure that belongs to no window.

    Raises:
        InputError: matplotlib is not installed.
    """
    made = canvas(10, 7)
    axes: dict[str, Axes] = made.subplot_mosaic([["fields", "basis"], ["fields", "recipes"]], width_ratios=[5, 4])
    _draw_fields(axes["fields"], audit)
    _draw_basis(axes["basis"], audit)
    _draw_recipes(axes["recipes"], audit)
    made.suptitle(title or f"{audit.source}: {audit.whole.papers} papers", **PLAIN, fontsize=11, x=0.01, ha="left")
    return made


def _draw_fields(ax: Axes, audit: Audit) -> None:
    """A line per field, under a line with the name of its group."""
    names: list[str] = []
    drawn: list[tuple[int, FieldCount]] = []
    for group, fields in groupby(audit.fields, key=lambda each: each.group):
        names.append(group)
        for each in fields:
            drawn.append((len(names), each))
            names.append(each.name)
    places = [place for place, _ in drawn]
    left = [0] * len(drawn)
    for state, (label, colour) in _STATES.items():
        counts = [getattr(each, state) for _, each in drawn]
        if any(counts):
            ax.barh(places, counts, left=left, color=colour, label=label, height=0.8)
        left = [before + count for before, count in zip(left, counts, strict=True)]
    ax.set_yticks(range(len(names)), names, fontsize=8, **PLAIN)
    for place, name in enumerate(ax.get_yticklabels()):
        name.set_fontweight("normal" if place in places else "bold")
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.set_xlim(0, audit.whole.papers)
    ax.set_xlabel("papers", fontsize=8)
    ax.tick_params(axis="x", labelsize=8)
    ax.set_title("What papers state, by field of the checklist\n", fontsize=9, loc="left")
    ax.legend(fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(_STATES), frameon=False, borderpad=0)
    _bare(ax)


def _draw_basis(ax: Axes, audit: Audit) -> None:
    counts = list(audit.whole.basis.values())
    bars = ax.barh(range(len(counts)), counts, color=_STATES["stated"][1], height=0.7)
    ax.bar_label(bars, [share(n, audit.whole.papers) for n in counts], padding=3, fontsize=8)
    words = [name.replace("_", " ") for name in audit.whole.basis]
    ax.set_yticks(range(len(counts)), words, fontsize=8, **PLAIN)
    ax.set_ylim(len(counts) - 0.4, -0.6)
    ax.set_xlim(0, 1.25 * max(counts))
    ax.locator_params(axis="x", integer=True)
    ax.tick_params(axis="x", labelsize=8)
    ax.set_xlabel("papers", fontsize=8)
    ax.set_title(
        f"How the adaptation is backed\n{len(audit.adaptations)} distinct peer-reviewed adaptations",
        fontsize=9,
        loc="left",
    )
    _bare(ax)


def _draw_recipes(ax: Axes, audit: Audit) -> None:
    ax.set_title("Recipes that a paper leaves open", fontsize=9, loc="left")
    counts = [row.recipes for row in audit.rows if row.recipes]
    if audit.spread is None:
        ax.set_axis_off()
        ax.text(0, 0.9, "not counted: no recipe fits any paper", fontsize=8, transform=ax.transAxes)
        return
    steps = _BINS_PER_DECADE * (int(math.log10(max(counts))) + 1)
    edges = [10 ** (step / _BINS_PER_DECADE) for step in range(steps + 1)]
    ax.hist(counts, bins=edges, color=_STATES["not_stated"][1], edgecolor="white")
    ax.set_xscale("log")
    ax.axvline(audit.spread.median, color="#333333", linewidth=1.2, linestyle="--")
    ax.set_xlabel(f"recipes, log scale; dashed: the median, {count(audit.spread.median)}", fontsize=8)
    ax.set_ylabel("papers", fontsize=8)
    ax.locator_params(axis="y", integer=True)
    ax.tick_params(labelsize=8)
    _bare(ax)


def _bare(ax: Axes) -> None:
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
