"""Which values of a recipe's fields go together, and why not others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, get_args

from vlcam.choices import (
    ASKING,
    ATTENTION_SITES,
    BIMODAL,
    CARRIED,
    CHANNEL_WEIGHTINGS,
    COMPARING,
    CONTRASTIVE,
    DEPARTS,
    FLOWS,
    OF_VALUES,
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
    crossed = site in ("CROSS", "CONTEXT")
    yield "stream", _streams(recipe), f"site={site!r}" + (" (or 'pooler', where a model pools so)" if crossed else "")
    yield "scale", SCALES[recipe.target], f"target={recipe.target!r}"
    if site in ATTENTION_SITES:
        yield from _attention_constraints(recipe)
    else:
        yield from _feature_constraints(recipe)
    yield from _gradient_constraints(recipe)
    yield from _layer_constraints(recipe)
    yield from _bimodal_constraints(recipe)
    yield from _form_constraints(recipe)
    yield from _text_constraints(recipe)


def _streams(recipe: Recipe) -> tuple[str, ...]:
    """The streams that have a site; the one that is asked for if it does, so that one is left."""
    known = ("fusion", "pooler") if recipe.site in ("CROSS", "CONTEXT") else ("vision", "text")
    return (recipe.stream,) if recipe.stream in known else known[:1]


_QUERIES = {
    "vision": ("cls", "registers", "patches", "all"),
    "text": ("pooled", "all"),
    "pooler": ("all",),
    "fusion": ("cls", "all", "phrase"),
}


def _attention_constraints(recipe: Recipe) -> Iterator[Constraint]:
    site, channels = f"site={recipe.site!r}", recipe.heads == "channels"
    yield "heads", ("mean", "sum", "max", "min", "channels"), site
    if channels:
        plain = tuple(each for each in CHANNEL_WEIGHTINGS if each not in (*ASKING, *COMPARING, *OF_VALUES))
        yield "weighting", plain, "heads='channels'"
        yield from _channel_constraints(recipe, ("patches",))
    else:
        yield "weighting", get_args(AttentionWeighting), f"{site}, heads={recipe.heads!r}"
        pooled = recipe.weighting == "head_weights"
        over = ("all",) if recipe.of_text else ("patches", "all")
        yield "gradient_tokens", over if pooled else ("none",), f"weighting={recipe.weighting!r}"
    if recipe.relu == "negative_gradient":
        yield "weighting", ("gradient", "attention*gradient"), "relu='negative_gradient'"
    yield "map_axis", ("keys",) if channels or recipe.site == "CROSS" else ("keys", "queries"), site
    if isinstance(recipe.queries, str):
        rows = _QUERIES[recipe.stream]
        yield "queries", rows, f"{site}, stream={recipe.stream!r}"
        if recipe.map_axis == "queries" and recipe.weighting == "attention":
            given = "map_axis='queries', weighting='attention' (a row of attention sums to 1, so the map is constant)"
            yield "queries", tuple(each for each in rows if each != "all"), given


def _feature_constraints(recipe: Recipe) -> Iterator[Constraint]:
    site = f"site={recipe.site!r}"
    yield "weighting", CHANNEL_WEIGHTINGS, site
    yield "heads", ("none",), f"{site} (token features have no head axis)"
    yield "queries", ("none",), f"{site} (token features have no query rows)"
    yield "map_axis", ("none",), f"{site} (tokens are the only axis)"
    yield from _channel_constraints(recipe, ("pooled", "all") if recipe.of_text else ("cls", "patches", "all"))


def _channel_constraints(recipe: Recipe, tokens: tuple[str, ...]) -> Iterator[Constraint]:
    weighting = f"weighting={recipe.weighting!r}"
    pooled = tokens if recipe.weighting == "gradcam" else tokens[-2:]
    if recipe.weighting in OF_VALUES:
        pooled = tokens[:1]
        yield "site", ("F3_HEADS",), f"{weighting} (the gradient of what the heads make of their values)"
    yield "gradient_tokens", pooled if recipe.weighting in POOLED else ("none",), weighting
    if recipe.weighting == "elementwise":
        yield "relu", ("none",), f"{weighting} (its own ReLU leaves nothing negative)"
    elif recipe.weighting in ("gradcam", "xgradcam", "hirescam", *OF_VALUES):
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
    elif recipe.weighting in COMPARING:
        yield from _comparing_constraints(recipe)
    elif recipe.needs_gradient:
        yield from _path_constraints(recipe)
    else:
        if recipe.weighting == "attention":
            yield "relu", ("none",), f"{weighting} (probabilities are never negative)"
        yield "target", ("none",), f"{weighting} (it does not depend on a score)"
        yield "gradient_path", ("none",), weighting


def _path_constraints(recipe: Recipe) -> Iterator[Constraint]:
    weighting = f"weighting={recipe.weighting!r}"
    yield "target", SCORED, weighting
    yield "gradient_path", ("full", "direct", "block", "integrated"), weighting
    if recipe.stream == "pooler":
        yield "gradient_path", ("full", "block") if recipe.site == "CROSS" else ("full",), "stream='pooler'"
    elif recipe.site != "F2":
        yield (
            "gradient_path",
            ("full", "integrated"),
            f"site={recipe.site!r} (other paths are those of AGCAM and LeGrad, for F2)",
        )
    if recipe.weighting == "sigmoid*gradient":
        yield "site", ("F2",), f"{weighting} (the scores before the softmax)"


def _comparing_constraints(recipe: Recipe) -> Iterator[Constraint]:
    weighting = f"weighting={recipe.weighting!r}"
    yield "target", ("contrastive",), f"{weighting} (tokens are compared with texts)"
    scales = ("cosine", "difference") if recipe.weighting == "similarity" else ("cosine",)
    yield "scale", scales, weighting
    yield "gradient_path", ("none",), f"{weighting} (tokens are embedded, nothing is differentiated)"


def _layer_constraints(recipe: Recipe) -> Iterator[Constraint]:
    rule = f"layer_rule={recipe.layer_rule!r}"
    if recipe.layer_rule == "shared":
        yield "site", ("CONTEXT",), rule
    elif recipe.site == "CONTEXT":
        yield "layer_rule", ("single", "shared"), "site='CONTEXT' (every block reads the same tensor)"
    if recipe.layer_rule in FLOWS:
        crossed = recipe.layer_rule in BIMODAL
        kind = "attention" if crossed else "self-attention"
        yield "site", ("F2", "CROSS") if crossed else ("F2",), f"{rule} (only {kind} matrices can be multiplied)"
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


def _bimodal_constraints(recipe: Recipe) -> Iterator[Constraint]:
    """What belongs to cross-attention that is read together with the self-attention around it."""
    both = f"site='CROSS', layer_rule={recipe.layer_rule!r}"
    if recipe.site == "CROSS" and recipe.layer_rule in BIMODAL:
        yield "stream", ("fusion",), f"{both} (rows of a pooler are no text)"
        yield "compose", ("none", "vision"), both
        yield "weighting", ("attention", "attention*gradient", "gradient"), both
        if recipe.needs_gradient:
            kept = ("gradient", "before_heads", "after_heads")
            yield "relu", kept, f"{both} (rows are divided by their sums, so that nothing may be negative)"
    elif recipe.site == "CROSS":
        yield "compose", ("none", "pooler"), both


def _form_constraints(recipe: Recipe) -> Iterator[Constraint]:
    """What belongs to the forms that attention and prompts can take."""
    weighting = f"weighting={recipe.weighting!r}"
    if recipe.weighting in COMPARING:
        second = recipe.attention == "values"
        yield "site", ("F3",) if second else ("F6",), f"{weighting}, attention={recipe.attention!r}"
        yield "layer_rule", ("sum",) if second else ("single",), f"{weighting}, attention={recipe.attention!r}"
        if not second:
            yield "layers", ("last",), f"{weighting}, attention={recipe.attention!r} (the model embeds no others)"
        yield "attention", ("own", "identity", "values"), weighting
    elif recipe.needs_gradient and recipe.stream in ("vision", "text") and recipe.gradient_path == "full":
        yield "attention", ("own", "one_head"), weighting
    else:
        yield "attention", ("own",), f"{weighting}, gradient_path={recipe.gradient_path!r}"
    if recipe.target not in CONTRASTIVE:
        parts = ("whole", "phrase") if recipe.target == "caption" else ("whole",)
        yield "prompt", parts, f"target={recipe.target!r}"
    elif recipe.weighting in COMPARING or recipe.gradient_path == "block":
        yield "prompt", ("whole", "phrase"), f"{weighting}, gradient_path={recipe.gradient_path!r}"
    if recipe.compose == "pooler":  # keys are slots, which no patch stands behind yet
        yield "heads", ("mean", "sum", "max", "min"), "compose='pooler'"
        yield "gradient_tokens", ("none", "all"), "compose='pooler'"
    if recipe.site != "CROSS" or recipe.stream != "fusion":
        yield "compose", ("none",), f"site={recipe.site!r}, stream={recipe.stream!r}"


def _text_constraints(recipe: Recipe) -> Iterator[Constraint]:
    """What belongs to maps over the words of a text, and what to maps over an image."""
    stream = f"stream={recipe.stream!r}"
    yield "reshape", ("words",) if recipe.of_text else ("raster",), stream
    yield "upsample", ("none",) if recipe.of_text else ("nearest", "bilinear", "bicubic"), stream
    if not recipe.of_text:
        return
    yield "map_axis", ("keys",) if recipe.site in ATTENTION_SITES else ("none",), stream
    if recipe.needs_gradient:
        yield "target", (*CONTRASTIVE, "custom"), stream
        yield "gradient_path", ("full",), stream
    if recipe.site not in ATTENTION_SITES:
        known = (each for each in CHANNEL_WEIGHTINGS if each not in (*ASKING, *COMPARING))
        yield "weighting", tuple(known), f"{stream} (the image is asked, or embedded, and not the text)"
    if recipe.layer_rule in CARRIED:
        rules = ("single", "mean", "sum", "max", "rollout", "relevance")
        yield "layer_rule", rules, stream


def _check_layers(recipe: Recipe) -> None:
    several = recipe.layers == "all" or (isinstance(recipe.layers, tuple) and len(recipe.layers) > 1)
    if recipe.layer_rule == "single" and several:
        raise RecipeError(
            f"layer_rule='single' with layers={recipe.layers!r}: give one layer, or a rule that merges several"
        )


def _check_exclude(recipe: Recipe) -> None:
    if recipe.of_text:
        if set(recipe.exclude) != {"special_text", "padding"}:
            raise RecipeError(
                f"exclude={recipe.exclude!r} with stream='text': the map is over words; its special tokens and padding "
                "are reported apart; give exclude=('special_text', 'padding')"
            )
        return
    if "cls" not in recipe.exclude:
        raise RecipeError(
            f"exclude={recipe.exclude!r}: reshape='raster' has no place for the image class token; add 'cls'"
        )
    text = [name for name in recipe.exclude if name in ("special_text", "padding")]
    rows = recipe.site == "CROSS" and recipe.stream == "fusion"
    if not rows and text:
        raise RecipeError(
            f"exclude={recipe.exclude!r} with site={recipe.site!r}, stream={recipe.stream!r}: there is no text, so "
            f"leave out {listing(text)}"
        )
    if not rows:
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
