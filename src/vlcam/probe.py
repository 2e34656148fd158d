"""Where a gradient is not zero: tried on the model itself, in one pass, not looked up in a table of names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from vlcam.adapter import Inputs, ModelAdapter
from vlcam.anatomy import SCORES, StreamAnatomy, Tap
from vlcam.capture import Capture, capture
from vlcam.choices import ATTENTION_SITES, POOLED
from vlcam.errors import EvidenceError, RecipeError
from vlcam.evidence import token_maps
from vlcam.plan import Job
from vlcam.recipe import Recipe
from vlcam.rows import select
from vlcam.tokens import ImageTokens

__all__ = ["where_alive"]


def where_alive(adapter: ModelAdapter, inputs: Inputs, job: Job, pair: int) -> str:
    """For a recipe whose gradient is zero: a sentence on the layers, sites and tokens that carry one in this model.

    Args:
        adapter: the model.
        inputs: the pairs.
        job: the recipe on this model.
        pair: the pair whose gradient is zero.
    """
    if job.edited or job.target.pooler or job.recipe.of_text or job.recipe.compose != "none":
        pooled = (
            "take gradient_tokens='pooled', or " if job.recipe.gradient_tokens == "all" and job.recipe.of_text else ""
        )
        return f"{pooled}choose other layers, or another site, than {job.recipe.site} of blocks {list(job.layers)}"
    stream = adapter.anatomy.stream(job.recipe.stream)
    found = _everything(adapter, inputs, job, stream)
    layers = [layer for layer in range(len(stream.blocks)) if _alive(adapter, inputs, found, pair, job, layers=layer)]
    site, single = job.recipe.site, job.layers if len(job.layers) == 1 else ()
    clauses = []
    if layers:
        clauses.append(f"{site} carries one in block {', '.join(map(str, layers))}")
    for layer in single:
        others = [
            each for each in _other_sites(stream, layer, site) if _alive(adapter, inputs, found, pair, job, site=each)
        ]
        if others:
            clauses.append(f"of block {layer} {', '.join(others)} does")
        clauses += [
            f"with {field}={value!r} {site} of block {layer} does"
            for field, value in _other_tokens(job.recipe)
            if _alive(adapter, inputs, found, pair, job, tokens={field: value})
        ]
    if clauses:
        return f"in this model {'; '.join(clauses)}"
    return (
        f"in this model no block of {stream.name} carries one at {site} for {job.target.label}, as with a class of "
        "constant logit, or a head of zeros that was never trained"
    )


def _everything(adapter: ModelAdapter, inputs: Inputs, job: Job, stream: StreamAnatomy) -> Capture:
    """Every site that the recipe could read instead, in every block of its stream."""
    attention = job.recipe.site in ATTENTION_SITES
    taps = [
        Tap(stream.name, layer, site)
        for layer, block in enumerate(stream.blocks)
        for site in ([job.recipe.site] if attention else block.sites)
        if site in block.sites and (site in ATTENTION_SITES) == attention
    ]
    if {tap.site for tap in job.read} & {SCORES}:
        taps += [Tap(stream.name, layer, SCORES) for layer, block in enumerate(stream.blocks) if "F2" in block.sites]
    (found,) = capture(adapter, inputs, taps, [job.target], direct=job.target.path == "direct")
    return found


def _other_sites(stream: StreamAnatomy, layer: int, site: str) -> list[str]:
    if site in ATTENTION_SITES or site == "CONTEXT":
        return []
    return [each for each in stream.blocks[layer].sites if each not in (site, "CONTEXT", *ATTENTION_SITES)]


def _other_tokens(recipe: Recipe) -> Iterator[tuple[str, str]]:
    if recipe.site in ATTENTION_SITES:
        yield from (("queries", rows) for rows in ("cls", "patches", "all") if rows != recipe.queries)
    elif recipe.weighting in POOLED:
        yield from (("gradient_tokens", t) for t in ("cls", "patches", "all") if t != recipe.gradient_tokens)


def _alive(
    adapter: ModelAdapter,
    inputs: Inputs,
    found: Capture,
    pair: int,
    job: Job,
    *,
    layers: int | None = None,
    site: str | None = None,
    tokens: Mapping[str, str] | None = None,
) -> bool:
    """Whether the recipe has a map with another layer, site, or choice of tokens."""
    changes: dict[str, Any] = {} if layers is None else {"layers": (layers,), "layer_rule": "single"}
    changes |= {"site": site} if site else {}
    try:
        recipe = job.recipe.replace(**changes, **tokens or {})
        changed = replace(job, recipe=recipe, layers=job.layers if layers is None else (layers,))
        layout = inputs.texts.layouts[inputs.text_of[pair]] if inputs.texts else None
        image_tokens = ImageTokens(adapter.prefix, adapter.grid(recipe.stream, changed.layers[0], inputs.images))
        stream = adapter.anatomy.stream(recipe.stream)
        token_maps(changed, found, pair, select(recipe, layout, image_tokens, job.phrase, job.occurrence, stream))
    except (EvidenceError, RecipeError, KeyError):
        return False
    return True
