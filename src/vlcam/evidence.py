"""From a capture to the token maps of one pair: the main map, a map per word, and whether there is anything in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vlcam import maps
from vlcam.capture import Capture
from vlcam.errors import EvidenceError
from vlcam.plan import Job
from vlcam.recipe import ATTENTION_SITES, Recipe
from vlcam.rows import Selection

__all__ = ["NoGradientError", "Status", "TokenMaps", "token_maps"]

Status = Literal["ok", "constant", "no positive evidence", "zero gradient"]


class NoGradientError(EvidenceError):
    """The gradient is zero, or missing, wherever the map would use it."""


@dataclass(frozen=True, eq=False)
class TokenMaps:
    """The maps of one pair, [1 + words, patches] in raster order, and the status of each."""

    values: Tensor
    statuses: tuple[Status, ...]


def token_maps(job: Job, found: Capture, pair: int, selection: Selection, prefix: int) -> TokenMaps:
    """Compute the maps of one pair.

    Args:
        job: the recipe on this model.
        found: what the pass gave.
        pair: index of the pair.
        selection: the rows of the main map and of every word.
        prefix: image tokens before the patches.

    Raises:
        NoGradientError: the gradient is zero wherever the main map would use it.
        EvidenceError: a map is not finite.
    """
    activations = [found.activations[tap][pair : pair + 1] for tap in job.taps]
    gradients = _gradients(job, found, pair)
    live = _live(job.recipe, gradients, selection, prefix)
    if not live[0]:
        where = f"rows {list(selection.rows)}" if selection.rows else f"the {job.recipe.gradient_tokens} tokens"
        taps = ", ".join(map(str, job.taps))
        raise NoGradientError(f"the gradient of {job.target.label} at {taps} is exactly zero on {where}")
    merged = _merged(job.recipe, activations, gradients, selection, prefix)[:, prefix:]
    if not bool(torch.isfinite(merged).all()):
        raise EvidenceError(f"the map at {job.taps[0]} is not finite: the model's activations or gradients overflow")
    statuses = tuple(_status(job.recipe, values, live=alive) for values, alive in zip(merged, live, strict=True))
    return TokenMaps(merged, statuses)


def _gradients(job: Job, found: Capture, pair: int) -> list[Tensor]:
    """One gradient per layer; none for a recipe that takes none."""
    kept = []
    for tap in job.taps if job.recipe.needs_gradient else ():
        gradient = found.gradients[tap]
        if gradient is None:
            raise NoGradientError(f"{job.target.label} does not depend on {tap}")
        kept.append(gradient[pair : pair + 1])
    return kept


def _merged(
    recipe: Recipe, activations: Sequence[Tensor], gradients: Sequence[Tensor], selection: Selection, prefix: int
) -> Tensor:
    """[1 + words, image tokens]."""
    if recipe.site in ATTENTION_SITES:
        rows = [
            maps.attention_rows(recipe, activation, gradients[number] if gradients else None)
            for number, activation in enumerate(activations)
        ]
        return maps.merge_layers(recipe, [maps.row_means(recipe, each, selection.all_rows)[0] for each in rows])
    if recipe.layer_rule == "shared":
        return maps.channel_weighted(recipe, activations[0], torch.stack(list(gradients)).float().sum(0), prefix)
    pairs = zip(activations, gradients, strict=True)
    return maps.merge_layers(recipe, [maps.channel_weighted(recipe, a, g, prefix) for a, g in pairs])


def _live(recipe: Recipe, gradients: Sequence[Tensor], selection: Selection, prefix: int) -> tuple[bool, ...]:
    """For the main map and every word: whether any gradient that it uses is not zero."""
    if not recipe.needs_gradient:
        return (True,) * len(selection.all_rows)
    if recipe.site in ATTENTION_SITES:
        return tuple(
            any(bool(gradient[:, :, list(rows)].any()) for gradient in gradients) for rows in selection.all_rows
        )
    part = {"cls": slice(0, 1), "patches": slice(prefix, None), "all": slice(None)}[recipe.gradient_tokens]
    return (any(bool(gradient[:, part].any()) for gradient in gradients),)


def _status(recipe: Recipe, values: Tensor, *, live: bool) -> Status:
    if not live:
        return "zero gradient"
    if recipe.relu != "none" and not bool(values.any()):
        return "no positive evidence"
    return "constant" if bool(values.amin() == values.amax()) else "ok"
