"""A recipe on one model: which blocks it means there, what is tapped, what is differentiated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlcam.adapter import ModelAdapter
from vlcam.anatomy import INPUT, SCORES, VALUES, StreamAnatomy, Tap
from vlcam.catalogue import named
from vlcam.choices import FLOWS, SCALES
from vlcam.errors import RecipeError
from vlcam.recipe import Recipe
from vlcam.targets import Custom, Region, Target, resolve

__all__ = ["Job", "in_passes", "plan"]


@dataclass(frozen=True)
class Job:
    """One recipe, made ready for one model.

    Attributes:
        recipe: every choice.
        layers: the blocks that the recipe's `layers` are in this model.
        fitted: how layers and target were found, in words, by field.
        target: what is differentiated.
        phrase: the words that were asked for, if any.
        occurrence: which of several.
    """

    recipe: Recipe
    layers: tuple[int, ...]
    fitted: Mapping[str, str]
    target: Target
    phrase: str | None = None
    occurrence: int | None = None

    @property
    def taps(self) -> tuple[Tap, ...]:
        """The recipe's site, a tap per layer."""
        return tuple(Tap(self.recipe.stream, layer, self.recipe.site) for layer in self.layers)

    @property
    def gradient_taps(self) -> tuple[Tap, ...]:
        """Whose gradient goes with each of `taps`."""
        order = self.layers[::-1] if "mirrored_layers" in self.recipe.departures else self.layers
        site = SCORES if "scores_gradient" in self.recipe.departures else self.recipe.site
        return tuple(Tap(self.recipe.stream, layer, site) for layer in order)

    @property
    def score_taps(self) -> tuple[Tap, ...]:
        """What the softmax takes at each of `taps`, for a recipe that reads it."""
        if self.recipe.weighting != "sigmoid*gradient":
            return ()
        return tuple(Tap(self.recipe.stream, layer, SCORES) for layer in self.layers)

    @property
    def norm_taps(self) -> tuple[Tap, ...]:
        """The values and the input of each block, for a recipe that weights tokens by them."""
        if self.recipe.layer_rule != "tokenwise":
            return ()
        return tuple(Tap(self.recipe.stream, layer, site) for layer in self.layers for site in (VALUES, INPUT))

    @property
    def read(self) -> tuple[Tap, ...]:
        """Everything that a pass must tap."""
        return tuple(dict.fromkeys((*self.taps, *self.gradient_taps, *self.score_taps, *self.norm_taps)))


def plan(
    adapter: ModelAdapter,
    recipe: str | Recipe,
    changes: Mapping[str, Any],
    *,
    custom: Custom | None = None,
    classes: Sequence[int | None] = (None,),
    region: Region | None = None,
    phrase: str | None = None,
    occurrence: int | None = None,
) -> Job:
    """Fit a recipe to a model.

    Args:
        adapter: the model.
        recipe: a name, whose published layer and target are moved to this model, or a recipe, taken as it is.
        changes: fields that replace the recipe's.
        custom: the callable behind `target='custom'`.
        classes: the class of every pair, or one for all; None for the one with the highest logit.
        region: where the class is explained, for a model that tells the classes of pixels.
        phrase: words of the text; the recipe then reads their rows.
        occurrence: which of several.

    Raises:
        RecipeError: choices that do not fit together, or that the model cannot meet.
        UnknownNameError: a name, stream or layer that does not exist.
    """
    if isinstance(recipe, str):
        entry = named(recipe)
        blocks = adapter.anatomy.stream(changes.get("stream", entry.recipe.stream)).blocks
        chosen, fitted = entry.fitted(len(blocks), adapter)
    else:
        chosen, fitted = recipe, dict.fromkeys(("layers", "target", "tokens"), "as given")
    wanted = {**changes, **_scale(chosen, changes)}
    fitted |= {field: "as given" for field in fitted if field in wanted}
    if {"queries", "gradient_tokens"} & set(wanted):
        fitted["tokens"] = "as given"
    if phrase is not None:
        wanted |= _phrase_rows(chosen, wanted, phrase)
    elif occurrence is not None:
        raise RecipeError(f"occurrence={occurrence}: there is no phrase of which it could be one; give phrase='...'")
    if any(getattr(chosen, field, None) != value for field, value in wanted.items()):
        chosen = chosen.replace(**wanted)
    if chosen.queries == "phrase" and phrase is None:
        raise RecipeError("queries='phrase': say which words, phrase='...'")
    stream = adapter.anatomy.stream(chosen.stream)
    layers = stream.indices(chosen.layers)
    target = resolve(chosen, adapter.heads, custom=custom, classes=classes, region=region)
    _check_windows(chosen, stream, adapter.prefix)
    _check_stages(chosen, stream, layers)
    if target.path == "block" and not adapter.reads_blocks:
        raise RecipeError(
            f"gradient_path='block': {type(adapter).__name__} does not say how target {target.head!r} is read from the "
            "tokens of a block; use gradient_path='full'"
        )
    return Job(chosen, layers, fitted, target, phrase, occurrence)


def _check_stages(chosen: Recipe, stream: StreamAnatomy, layers: Sequence[int]) -> None:
    for layer in layers:
        stream.reading(layer, chosen.site)  # says which sites there are, if not this one
    stages = {stream.stage_of(layer) for layer in layers}
    if len(stages) > 1:
        raise RecipeError(
            f"layers={chosen.layers!r}: these blocks are of stages {sorted(stages)}, whose grids have different sizes; "
            "choose blocks of one stage"
        )


def _check_windows(chosen: Recipe, stream: StreamAnatomy, prefix: Sequence[str]) -> None:
    if chosen.weighting == "reciprocam" and (stream.stages or "cls" not in prefix):
        raise RecipeError(
            "weighting='reciprocam': it keeps one neighbourhood of a block's input and the class token, and this model "
            "merges its tokens or has no class token; choose another weighting"
        )
    if not stream.windowed or chosen.site != "F2":
        return
    if chosen.layer_rule in FLOWS:
        raise RecipeError(
            f"layer_rule={chosen.layer_rule!r}: tokens of this model attend within windows, and stages merge tokens, "
            "so that there are no matrices over all tokens to multiply; choose layer_rule='single'"
        )
    if chosen.queries not in ("all", "patches"):
        raise RecipeError(
            f"queries={chosen.queries!r}: tokens of this model attend within windows and there is no class token; "
            "queries='patches' takes all tokens of each window"
        )


def _scale(chosen: Recipe, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The plain scale of another target in place of the recipe's plain one; a scale with a meaning of its own stays."""
    scales = SCALES.get(wanted.get("target", chosen.target), ())
    plain = chosen.scale in ("logit", "cosine", "raw")
    return {"scale": scales[0]} if "scale" not in wanted and scales and plain and chosen.scale not in scales else {}


def _phrase_rows(chosen: Recipe, wanted: Mapping[str, Any], phrase: str) -> dict[str, Any]:
    if chosen.queries not in ("all", "phrase"):
        raise RecipeError(
            f"phrase={phrase!r} with site={chosen.site!r}, queries={chosen.queries!r}: only maps with text rows "
            "(site='CROSS', queries='all' or 'phrase') can be read for one phrase"
        )
    if wanted.get("queries", "phrase") != "phrase":
        raise RecipeError(f"phrase={phrase!r} and queries={wanted['queries']!r}: give one of them")
    return {"queries": "phrase"}


def in_passes(jobs: Sequence[Job]) -> list[list[int]]:
    """Indices of jobs, grouped by the pass that serves them: one head, and one way for gradients through the model.

    A map that takes no gradient joins a pass that runs for another reason.
    """
    passes: dict[tuple[str, str], list[int]] = {}
    for index, job in sorted(enumerate(jobs), key=lambda item: not item[1].target.differentiate):
        own = job.target.path if job.target.path in ("direct", "integrated") else "full"
        key = (job.target.head, own)
        if not job.target.differentiate:
            key = next((other for other in passes if other[0] == job.target.head), key)
        passes.setdefault(key, []).append(index)
    return list(passes.values())
