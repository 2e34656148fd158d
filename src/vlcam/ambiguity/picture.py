"""An ambiguity as one figure, with matplotlib."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np

from vlcam import colours
from vlcam.ambiguity.description import shown_value
from vlcam.ambiguity.screen import in_brief
from vlcam.plot import PLAIN, canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from vlcam.ambiguity.result import Ambiguity, Member, Share

__all__ = ["figure"]

_WIDE, _SIDE = 12.5, 2.3
_SIGNS_PER_INCH = 14
_PIXELS = 320  # the longer side of a picture in a tile
_STEPS = 40
_SIGNS = 32
_BARS = 5
_DARK, _LIGHT = "#7b3294", "#c2a5cf"


def figure(found: Ambiguity) -> Figure:
    """The image, mean and spread, the two most different maps, the shares of the fields, and all correlations.

    Args:
        found: what is shown.

    Returns:
        A matplotlib figure that belongs to no window.

    Raises:
        InputError: matplotlib is not installed, or the maps are over words.
        EvidenceError: fewer than two maps.
    """
    pairs = found.correlations
    tall = _SIDE * min(1.6, max(0.5, found.placement.original[0] / found.placement.original[1]))
    title, foot = _title_of(found), _foot_of(found)
    made = canvas(_WIDE, tall + 4.0 + 0.16 * (len(title) + len(foot)))
    halves: Any = made.subfigures(2, 1, height_ratios=[tall + 1.1, 3.5])
    tiles = halves[0].subplots(1, 5)
    for ax in tiles:
        ax.set_axis_off()
    _maps(found, tiles)
    left, right = halves[1].subplots(1, 2, width_ratios=[3, 2])
    _bars(left, found.shares)
    counts = pairs.counts.reshape(_STEPS, -1).sum(1) / pairs.pairs
    edges = np.linspace(-1, 1, _STEPS + 1)
    right.bar(edges[:-1], counts, width=2 / _STEPS, align="edge", color=_LIGHT, edgecolor="white", linewidth=0.4)
    right.axvline(pairs.median, color=_DARK)
    right.set_xlim(-1, 1)
    right.set_title(
        f"rank correlation of pairs: median {pairs.median:.2f} (line), {pairs.negative:.0%} below 0",
        fontsize=9,
        **PLAIN,
    )
    right.set_ylabel("share of the pairs", fontsize=8, **PLAIN)
    for ax in (left, right):
        ax.tick_params(labelsize=8)
        ax.spines[["top", "right"]].set_visible(False)
    made.suptitle("\n".join(title), **PLAIN, fontsize=10, x=0.01, ha="left")
    made.supxlabel("\n".join(foot), **PLAIN, fontsize=8.5, x=0.01, ha="left")
    return made


def _maps(found: Ambiguity, tiles: Any) -> None:
    placement = found.placement.scaled_down(_PIXELS)
    picture = found.image.resize(placement.original[::-1])
    one, other = found.most_different

    def over(values: Any, colormap: str | None = None) -> Any:
        return colours.overlay(picture, found.on_image(values, longest=_PIXELS), alpha=0.75, colormap=colormap)

    widest = float(found.spread.max())
    shown = [
        ("image", picture),
        (f"mean of {len(found.shown)} maps", over(found.mean)),
        (
            f"standard deviation\nup to {widest:.2f}, {float(found.spread.mean()):.2f} on average",
            over(found.spread / (widest or 1), "viridis"),
        ),
        (_title(found, one, other), over(_scaled(found, one))),
        (_title(found, other, one), over(_scaled(found, other))),
    ]
    for ax, (title, image) in zip(tiles, shown, strict=True):
        ax.imshow(image)
        ax.set_title(title, fontsize=8, **PLAIN)


def _scaled(found: Ambiguity, member: Member) -> Any:
    return found.scaled[found.shown.index(member)]


def _title(found: Ambiguity, member: Member, other: Member) -> str:
    """What tells one of the two most different members from the other."""
    apart = [field for field in found.fields if getattr(member.recipe, field) != getattr(other.recipe, field)]
    parts = [f"{field}: {shown_value(getattr(member.recipe, field))}" for field in apart]
    whole = "; ".join(part.replace(" ", "\u00a0") for part in parts)  # a field stays with its value
    lines = textwrap.wrap(whole, _SIGNS, break_long_words=False)
    return "\n".join([f"least alike, correlation {found.correlations.minimum:.2f}", *lines[:5]])


def _bars(ax: Axes, shares: tuple[Share, ...]) -> None:
    """The share of every field, the largest above, and beside it how alike maps are that differ in it alone."""
    places = np.arange(len(shares))[::-1]
    ax.barh(places, [each.share for each in shares], color=_DARK, height=0.6)
    for place, each in zip(places, shares, strict=True):
        alone = "" if each.alone is None else f"; correlation {each.alone:.2f} where nothing else differs"
        values = f"{each.share:.0%}, {len(each.values)} values{alone}"
        ax.annotate(values, (each.share, place), (4, 0), textcoords="offset points", va="center", fontsize=8, **PLAIN)
    ax.set_yticks(places, [each.field for each in shares], **PLAIN)
    ax.set_ylim(len(shares) - max(len(shares), _BARS) - 0.5, len(shares) - 0.5)  # few bars are not broad, but above
    widest = 1.9 * max((each.share for each in shares), default=0) or 1.9
    ax.set_xticks([tick for tick in ax.xaxis.get_major_locator().tick_values(0, widest) if 0 <= tick <= 1])
    ax.set_xlim(0, widest)
    ax.set_title("share of the variance of the maps that each field explains", fontsize=9, **PLAIN)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")


def _title_of(found: Ambiguity) -> list[str]:
    nothing = len(found) - len(found.shown)
    empty = f", {nothing} have nothing to show" if nothing else ""
    first = f"{found.description.name}: {len(found)} recipes fit{empty}; {found.distinct} different maps"
    model = found.record["model"]["id"]
    return [*_wrapped(first), *_wrapped(f"{found.subject}   {model}")]


def _foot_of(found: Ambiguity) -> list[str]:
    """What to state; and what was stated or held, so that the figure says by itself what was not varied."""
    held = in_brief(found.held)
    parts = [found.sentence, f"Stated: {found.description.in_short}."]
    parts += [f"Open, and not varied in full: {held}."] if held else []
    return [line for part in parts for line in _wrapped(part)]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, int(_WIDE * _SIGNS_PER_INCH))
