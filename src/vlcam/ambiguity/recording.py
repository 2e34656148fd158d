"""An ambiguity as JSON values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vlcam.ambiguity.words import in_words

if TYPE_CHECKING:
    from vlcam.ambiguity.result import Ambiguity, Share

__all__ = ["SCHEMA", "recorded"]

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
        "held": found.held,
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
        "shares": [_share(each, several=several) for each in found.shares],
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


def _share(share: Share, *, several: bool) -> dict[str, Any]:
    return {
        "field": share.field,
        "share": share.share if several else None,
        "alone": share.alone,
        "pairs": share.pairs,
        "values": [
            {
                "value": _plain(value),
                "words": in_words(share.field, value),
                "recipes": count,
                "variance_left": share.left.get(value),
            }
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
