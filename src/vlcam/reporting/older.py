"""Records of older releases: what they do not hold yet, with values of which a report says nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlcam.explanation import Explanation

__all__ = ["completed"]

_RUN: dict[str, Any] = {
    "fitted": {"layers": "", "target": "", "tokens": ""},
    "class": None,
    "asked": None,
    "modules": [],
    "windows": None,
    "against": [],
    "apart": {},
    "together_with": None,
    "block_values": None,
}


def completed(exp: Explanation) -> Explanation:
    """The same explanation with every key that reports read; what was not recorded is empty."""
    record = {"answer": None} | dict(exp.provenance)
    return replace(exp, provenance=record | {"run": _RUN | record["run"]})
