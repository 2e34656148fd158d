"""What published recipes have in common, to be changed where they differ."""

from __future__ import annotations

from typing import Any

from vlcam.citations import Citation
from vlcam.entry import Entry
from vlcam.published.checks import CHECKS
from vlcam.recipe import Recipe

__all__ = ["ATTENTION", "FEATURES", "LAVIS", "TOKENS", "WEIGHTED", "entry", "pgc"]

TOKENS = (
    "The paper weights the feature maps of a CNN. Here the patch tokens of a LayerNorm's output stand for their "
    "pixels, and the class token is left out."
)
"""What every recipe departs in that a paper wrote for a CNN."""

FEATURES = Recipe(
    name="pgc-gradcam",
    site="F1",
    stream="vision",
    layers="last",
    attention="own",
    target="class",
    scale="logit",
    prompt="whole",
    gradient_path="full",
    gradient_tokens="patches",
    queries="none",
    map_axis="none",
    compose="none",
    exclude=("cls",),
    weighting="gradcam",
    relu="map",
    heads="none",
    layer_rule="single",
    discard=0.0,
    departures=(),
    reshape="raster",
    upsample="bilinear",
    normalize="minmax",
)
ATTENTION = FEATURES.replace(
    name="raw-attention",
    site="F2",
    target="none",
    scale="none",
    gradient_path="none",
    gradient_tokens="none",
    queries="cls",
    map_axis="keys",
    weighting="attention",
    relu="none",
    heads="mean",
)
WEIGHTED = ATTENTION.replace(
    target="class", scale="logit", gradient_path="full", weighting="attention*gradient", relu="before_heads"
)
LAVIS = WEIGHTED.replace(
    name="lavis-itm",
    site="CROSS",
    stream="fusion",
    layers=(6,),
    target="itm",
    queries="all",
    exclude=("cls", "special_text", "padding"),
    relu="gradient",
)


def pgc(name: str, module: str, **changes: Any) -> tuple[Recipe, str]:
    """A recipe as pytorch-grad-cam makes it on a vision transformer, and the module of its code."""
    code = f"jacobgil/pytorch-grad-cam 084273b and 1.5.7, {module}, last block's first LayerNorm, class token dropped"
    return FEATURES.replace(name=name, **changes), code


def entry(
    made: Recipe | tuple[Recipe, str], citation: Citation, code: str = "", *, depth: int = 0, **facts: Any
) -> Entry:
    """A published recipe with its citation, what backs it, and its code where `pgc` does not give that."""
    recipe, source = made if isinstance(made, tuple) else (made, code)
    checks = CHECKS.get(recipe.name, ())
    return Entry(recipe=recipe, citation=citation, code=source, depth=depth, checks=checks, **facts)
