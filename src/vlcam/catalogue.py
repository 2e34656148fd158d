"""Published recipes by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from vlcam.entry import Entry
from vlcam.errors import UnknownNameError, listing
from vlcam.published import asking, attention, contrastive, cross, features, paths

if TYPE_CHECKING:
    from vlcam.readers import HeadKind

__all__ = ["Entry", "default", "named", "recipes"]

_ENTRIES = (
    *cross.ENTRIES,
    *contrastive.ENTRIES,
    *features.ENTRIES,
    *attention.ENTRIES,
    *asking.ENTRIES,
    *paths.ENTRIES,
)


def default(heads: Mapping[str, HeadKind], streams: Collection[str] = ("fusion",)) -> str:
    """The recipe that is used where none is named: the published one of the model's kind.

    Args:
        heads: the scores that the model offers.
        streams: its stacks of blocks.
    """
    if "itm" in heads and "fusion" not in streams:
        return "blip2-itm"
    kinds = {"itm": "lavis-itm", "contrastive": "clip-gradcam", "caption": "blip-caption", "answer": "blip-vqa"}
    return next((name for head, name in kinds.items() if head in heads), "pgc-gradcam")


def recipes() -> Mapping[str, Entry]:
    """Every named recipe with its source, in catalogue order."""
    return MappingProxyType({entry.recipe.name: entry for entry in _ENTRIES})


def named(name: str) -> Entry:
    """Return the catalogue entry of that name.

    Raises:
        UnknownNameError: no such recipe; lists those that exist.
    """
    try:
        return recipes()[name]
    except KeyError:
        raise UnknownNameError(f"no recipe {name!r}; there are {listing(recipes())}") from None
