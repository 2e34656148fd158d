"""An ambiguity as JSON values, and as one screen of text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vlcam.ambiguity.words import in_words

if TYPE_CHECKING:
    from vlcam.ambiguity.result import Ambiguity, Share

__all__ = ["SCHEMA", "recorded", "screen"]

SCHEMA = 1
"""Version of the keys."""
_STEPS = 40
"""In how many steps from -1 to 1 correlations are on record."""


def recorded(found: Ambiguity) -> dict[str, Any]:
    """Everything but the maps of single members, as JSON values; see `docs/ambiguity.md`."""
    several = len(found.shown) > 1
    return {
        "schema": SCHEMA,
        "description": found.description.to_dict(),
        **found.record,
        "recipes": {
            "fit": len(found),
            "statuses": found.statuses,
            "distinct": found.distinct,
            "heatmaps_each": found.variants,
            "left_out_for_want_of_other_texts": found.comparing,
        },
        "rank_correlations": _correlations(found) if several else None,
        "grid": list(found.grid),
        "mean": _numbers(found.mean) if found.shown else None,
        "spread": _numbers(found.spread) if found.shown else None,
        "shares": [_share(each) for each in found.shares],
        "sentence": found.sentence,
        "most_different": [member.number for member in found.most_different] if several else None,
        "members": [
            {
                "number": member.number,
                "fingerprint": member.recipe.fingerprint,
                "status": member.status,
                **{field: _plain(getattr(member.recipe, field)) for field in found.fields},
            }
            for member in found.members
        ],
        "common": _common(found),
    }


def screen(found: Ambiguity) -> str:
    """One screen: how many recipes, how far apart, which fields, and what to add."""
    fit = "1 recipe fits" if len(found) == 1 else f"{len(found)} recipes fit"
    lines = [f"{found.description.name}: {fit}, on {found.subject!r}"]
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
    if found.shares:
        lines += ["", "share of the variance by field; rank correlation of maps that differ in it alone"]
        lines += [_line(each) for each in found.shares]
    return "\n".join([*lines, "", found.sentence])


def _line(share: Share) -> str:
    alone = f"{share.alone:6.2f} ({share.pairs:,} pairs)" if share.alone is not None else "     - "
    return f"  {share.field:<16} {share.share:6.1%}  {alone}  {len(share.values)} values"


def _share(share: Share) -> dict[str, Any]:
    return {
        "field": share.field,
        "share": share.share,
        "alone": share.alone,
        "pairs": share.pairs,
        "values": [
            {"value": _plain(value), "words": in_words(share.field, value), "recipes": count}
            for value, count in share.values.items()
        ],
    }


def _correlations(found: Ambiguity) -> dict[str, Any]:
    pairs = found.correlations
    return {
        "pairs": pairs.pairs,
        "median": pairs.median,
        "minimum": pairs.minimum,
        "share_below_zero": pairs.negative,
        "counts": pairs.counts.reshape(_STEPS, -1).sum(1).tolist(),
    }


def _common(found: Ambiguity) -> dict[str, Any]:
    """What all members have in common."""
    first = found.members[0].recipe.to_dict()
    return {field: value for field, value in first.items() if field not in (*found.fields, "name")}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _numbers(values: NDArray[np.float32]) -> list[list[float]]:
    return [[round(float(value), 6) for value in row] for row in values]
