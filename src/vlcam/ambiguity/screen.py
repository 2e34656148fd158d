"""An ambiguity as one screen of text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vlcam.ambiguity.result import Ambiguity, Share

__all__ = ["in_brief", "screen"]


def screen(found: Ambiguity) -> str:
    """One screen: how many recipes, how far apart, which fields, and what to add."""
    fit = "1 recipe fits" if len(found) == 1 else f"{len(found)} recipes fit"
    lines = [f"{found.description.name}: {fit}, on {found.subject!r}", f"stated: {found.description.in_short}"]
    if found.held:
        lines.append(f"open, and not varied in full: {in_brief(found.held)}")
    for status, count in found.statuses.items():
        has = "has" if count == 1 else "have"
        lines.append(f"  {count:>6} {has} {'a map' if status == 'ok' else f'nothing to show: {status}'}")
    if found.comparing:
        lines.append(f"  {found.comparing:>6} more compare the text with others, and there are none (against=[...])")
    if found.shown:
        differ = "map" if found.distinct == 1 else "maps differ to the eye"
        drawn = "one heatmap" if found.variants == 1 else f"{found.variants} heatmaps"
        lines.append(f"  {found.distinct:>6} {differ}; each can be drawn as {drawn}")
    if len(found.shown) > 1:
        pairs = found.correlations
        lines += [
            "",
            f"rank correlation of two of them: median {pairs.median:.2f}, lowest {pairs.minimum:.2f}, "
            f"{pairs.negative:.0%} of {pairs.pairs:,} pairs below 0",
            f"the two that are least alike: {found.difference(*found.most_different)}",
            f"standard deviation of a cell: {float(found.spread.mean()):.2f} on average, up to "
            f"{float(found.spread.max()):.2f}, of maps from 0 to 1",
        ]
    if found.shares and len(found.shown) > 1:
        lines += ["", "share of the variance by field; rank correlation of maps that differ in it alone"]
        lines += [_line(each) for each in found.shares]
    return "\n".join([*lines, "", found.sentence])


def in_brief(held: Mapping[str, str]) -> str:
    """Fields and what they are held at, in one line."""
    return "; ".join(f"{field} {words}" for field, words in held.items())


def _line(share: Share) -> str:
    alone = f"{share.alone:6.2f} ({share.pairs:,} pairs)" if share.alone is not None else "     - "
    return f"  {share.field:<16} {share.share:6.1%}  {alone}  {len(share.values)} values"
