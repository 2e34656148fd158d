"""Recipes that make the same map, bit for bit, whatever the model and the image: one of their spellings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vlcam.choices import ATTENTION_SITES, FLOWS

__all__ = ["spelt"]

_POSITIVE = ("gradient", "attention*gradient", "sigmoid*gradient")
"""Weightings that multiply the gradient by what is never negative, or by nothing."""
_MERGES = ("mean", "sum", "max", "shared")
_WORDS = {"register": "registers", "distillation": "distillation"}
"""Tokens before the patches that may be left out, as `exclude` calls them."""


def spelt(values: Mapping[str, Any], blocks: Sequence[int], prefix: Sequence[str]) -> dict[str, Any]:
    """One spelling of choices that several recipes write differently and that give one token map.

    - One block: to merge the maps of one block, by `mean`, `sum`, `max` or `shared`, is `single`.
    - `exclude`: what is left out of `all` makes no difference where nothing is counted over `all`.
    - `all` is `patches` where no token stands before the patches, or none that is not left out.
    - `relu`: probabilities are never negative. So what is removed from each head's product with a gradient is what is
      removed from the gradient, `before_heads` is `gradient`.
    - `relu`: the mean over a single query row does nothing, so that where no matrices of blocks are multiplied `map` is
      `after_heads`.
    - `hirescam` with `relu="gradient"` is `layercam`. At an attention site `elementwise` is, too, and in both nothing
      is left for `relu="map"` to remove.

    Args:
        values: the fields of a recipe.
        blocks: which blocks its `layers` are.
        prefix: names of the image tokens before the patches.

    Returns:
        The fields that decide the token map.
    """
    found = {field: value for field, value in values.items() if field not in ("name", "upsample", "normalize")}
    found["layers"] = tuple(blocks)
    if len(blocks) == 1 and found["layer_rule"] in _MERGES:
        found["layer_rule"] = "single"
    if found["stream"] != "text":
        found |= _of_tokens(found, prefix)
    if found["site"] in ATTENTION_SITES:
        found["relu"] = _of_rows(found)
    return found | _of_elements(found)


def _of_tokens(found: Mapping[str, Any], prefix: Sequence[str]) -> dict[str, Any]:
    """Which tokens count, where several words say so."""
    of_text = found["site"] == "CROSS" and found["stream"] == "fusion"
    counted = "all" in ((found["queries"],) if of_text else (found["queries"], found["gradient_tokens"]))
    own = ("special_text",) if of_text else [_WORDS[name] for name in prefix if name in _WORDS]
    kept = tuple(word for word in found["exclude"] if word in ("cls", "padding") or (counted and word in own))
    left = [name for name in prefix if _WORDS.get(name) not in kept]
    if found["site"] == "CROSS" or left or isinstance(found["queries"], tuple):
        return {"exclude": kept}
    same = [field for field in ("queries", "gradient_tokens") if found[field] == "all"]
    return {"exclude": kept} | dict.fromkeys(same, "patches")


def _of_rows(found: Mapping[str, Any]) -> str:
    relu, rows = str(found["relu"]), found["queries"]
    if relu == "before_heads" and found["weighting"] in _POSITIVE:
        return "gradient"
    single = rows in ("cls", "pooled") or (isinstance(rows, tuple) and len(rows) == 1)
    apart = found["heads"] == "channels" or found["compose"] != "none" or found["layer_rule"] in FLOWS
    return "after_heads" if relu == "map" and single and not apart else relu


def _of_elements(found: Mapping[str, Any]) -> dict[str, str]:
    """Weightings of single elements, as one weighting and one ReLU."""
    weighting, relu = found["weighting"], found["relu"]
    positive = found["site"] in ATTENTION_SITES
    if weighting == "hirescam" and relu == "gradient":
        weighting, relu = "layercam", "none"
    if weighting == "elementwise" and positive:
        weighting = "layercam"
    if weighting in ("layercam", "none") and positive:
        relu = "none"
    return {"weighting": weighting, "relu": relu}
