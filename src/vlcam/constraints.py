"""Which values of a recipe's fields go together, and why not others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, get_args

from vlcam.choices import (
    ASKING,
    ATTENTION_SITES,
    CARRIED,
    CHANNEL_WEIGHTINGS,
    DEPARTS,
    FLOWS,
    POOLED,
    SCALES,
    SCORED,
    AttentionWeighting,
)
from vlcam.errors import RecipeError, listing

if TYPE_CHECKING:
    from vlcam.recipe import Recipe

__all__ = ["Constraint", "check", "constraints", "one_of"]

Constraint = tuple[str, tuple[Any, ...], str]
"""A field, the values that would do, and the reason."""


def check(recipe: Recipe) -> None:
    """Check every field that depends on another.

    Raises:
        RecipeError: values that contradict each other; names the fields and the values that would do.
    """
    for field, known, reason in constraints(recipe):
        one_of(field, getattr(recipe, field), known, reason)
    _check_layers(recipe)
    _check_exclude(recipe)
    _check_departures(recipe)


def one_of(field: str, value: object, known: tuple[Any, ...], reason: str = "") -> None:
    """Make sure that a field has one of some values.

    Raises:
        RecipeError: it has another.
    """
    if value not in known:
        because = f" with {reason}" if reason else ""
        raise RecipeError(f"{field}={value!r}{because}: choose from {listing(known)}")


def constraints(recipe: Recipe) -> Iterator[Constraint]:
    """For each field whose values depend on another field: the values that would do, and why."""
    site = recipe.site
    yield "stream", ("fusion",) if site in ("CROSS", "CONTEXT") else ("vision",), f"site={site!r}"
    yield "scale", SCALES[recipe.target], f"target={recipe.target!r}"
    if site in ATTENTION_SITES:
        yield from _attention_constraints(recipe)
    else:
        yield from _feature_constraints(recipe)
    yield from _gradient_constraints(recipe)
    yield from _layer_constraints(recipe)


def _attention_constraints(recipe: Recipe) -> Iterator[Constraint]:
    site, channels = f"site={recipe.site!r}", recipe.heads == "channels"
    yield "heads", ("mean", "sum", "max", "min", "channels"), site
    if channels:
        plain = tuple(each for each in CHANNEL_WEIGHTINGS if each not in ASKING)
        yield "weighting", plain, "heads='channels'"
        yield from _channel_constraints(recipe, ("patches",))
    else:
        yield "weighting", get_args(AttentionWeighting), f"{site}, heads={recipe.heads!r}"
        pooled = recipe.weighting == "head_weights"
        yield "gradient_tokens", ("patches", "all") if pooled else ("none",), f"weighting={recipe.weighting!r}"
    yield "map_axis", ("keys",) if channels or recipe.site == "CROSS" else ("keys", "queries"), site
    if isinstance(recipe.queries, str):
        rows = ("cls", "all", "phrase") if recipe.site == "CROSS" else ("cls", "registers", "patches", "all")
        yield "queries", rows, site
        if recipe.map_axis == "queries" and recipe.weighting == "attention":
            given = "map_axis='queries', weighting='attention' (a row of attention sums to 1, so the map is constant)"
            yield "queries", tuple(each for each in rows if each != "all"), given


def _feature_constraints(recipe: Recipe) -> Iterator[Constraint]:
    site = f"site={recipe.site!r}"
    yield "weighting", CHANNEL_WEIGHTINGS, site
    yield "heads", ("none",), f"{site} (token features have no head axis)"
    yield "queries", ("none",), f"{site} (token features have no query rows)"
    yield "map_axis", ("none",), f"{site} (tokens are the only axis)"
    yield from _channel_constraints(recipe, ("cls", "patches", "all"))


def _channel_constraints(recipe: Recipe, tokens: tuple[str, ...]) -> Iterator[Constraint]:
    weighting = f"weighting={recipe.weighting!r}"
    pooled = tokens if recipe.weighting == "gradcam" else tokens[-2:]
    yield "gradient_tokens", pooled if recipe.weighting in POOLED else ("none",), weighting
    if recipe.weighting == "elementwise":
        yield "relu", ("none",), f"{weighting} (its own ReLU leaves nothing negative)"
    elif recipe.weighting in ("gradcam", "xgradcam", "hirescam"):
        yield "relu", ("none", "gradient", "map"), weighting
    else:
        yield "relu", ("none", "map"), weighting


def _gradient_constraints(recipe: Recipe) -> Iterator[Constraint]:
    weighting = f"weighting={recipe.weighting!r}"
    if recipe.weighting in ASKING:
        yield "target", SCORED, weighting
        yield "gradient_path", ("none",), f"{weighting} (the model is asked, not differentiated)"
        yield "layer_rule", ("single",), weighting
        if recipe.weighting == "reciprocam":
            yield "site", ("F1",), f"{weighting} (it keeps tokens of the block's input)"
        return
    if not recipe.needs_gradient:
        if recipe.weighting == "attention":
            yield "relu", ("none",), f"{weighting} (probabilities are never negative)"
        yield "target", ("none",), f"{weighting} (it does not depend on a score)"
        yield "gradient_path", ("none",), weighting
        return
    yield "target", SCORED, weighting
    yield "gradient_path", ("full", "direct", "block", "integrated"), weighting
    if recipe.site != "F2":
        yield (
            "gradient_path",
            ("full", "integrated"),
            f"site={recipe.site!r} (other paths are those of AGCAM and LeGrad, for F2)",
        )
    if recipe.weighting == "sigmoid*gradient":
        yield "site", ("F2",), f"{weighting} (the scores before the softmax)"


def _layer_constraints(recipe: Recipe) -> Iterator[Constraint]:
    rule = f"layer_rule={recipe.layer_rule!r}"
    if recipe.layer_rule == "shared":
        yield "site", ("CONTEXT",), rule
    elif recipe.site == "CONTEXT":
        yield "layer_rule", ("single", "shared"), "site='CONTEXT' (every block reads the same tensor)"
    if recipe.layer_rule in FLOWS:
        yield "site", ("F2",), f"{rule} (only self-attention matrices can be multiplied)"
        yield "heads", ("mean", "sum", "max", "min"), rule
        yield "map_axis", ("keys",), rule
    if recipe.layer_rule in CARRIED:
        yield "weighting", ("attention*gradient",), f"{rule} (attention is carried, the gradient weights it)"
        yield "relu", ("gradient",), rule
        yield "heads", ("mean",), rule
    if recipe.layer_rule != "rollout":
        yield "discard", (0.0,), rule
    for departure in recipe.departures:
        yield *DEPARTS[departure], f"departures={recipe.departures!r}"
        if departure == "scores_gradient":
            yield "site", ("F2",), f"departures={recipe.departures!r} (the scores before the softmax)"


def _check_layers(recipe: Recipe) -> None:
    several = recipe.layers == "all" or (isinstance(recipe.layers, tuple) and len(recipe.layers) > 1)
    if recipe.layer_rule == "single" and several:
        raise RecipeError(
            f"layer_rule='single' with layers={recipe.layers!r}: give one layer, or a rule that merges several"
        )


def _check_exclude(recipe: Recipe) -> None:
    if "cls" not in recipe.exclude:
        raise RecipeError(
            f"exclude={recipe.exclude!r}: reshape='raster' has no place for the image class token; add 'cls'"
        )
    text = [name for name in recipe.exclude if name in ("special_text", "padding")]
    if recipe.site != "CROSS" and text:
        raise RecipeError(
            f"exclude={recipe.exclude!r} with site={recipe.site!r}: there is no text, so leave out {listing(text)}"
        )
    if recipe.site != "CROSS":
        return
    if "padding" not in recipe.exclude:
        raise RecipeError(
            f"exclude={recipe.exclude!r} with site='CROSS': a map must not depend on the texts that it shares a batch "
            "with; add 'padding'"
        )
    if recipe.queries == "cls" and "special_text" in recipe.exclude:
        raise RecipeError(
            f"queries='cls' with exclude={recipe.exclude!r}: row 0 is a special token; leave 'special_text' out"
        )


def _check_departures(recipe: Recipe) -> None:
    if {"summed_cubes", "no_denominator"} <= set(recipe.departures):
        raise RecipeError(f"departures={recipe.departures!r}: one has another denominator, one none; give one of them")
