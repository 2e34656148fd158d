"""A recipe on one model: which blocks it means there, what is tapped, what is differentiated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlcam.adapter import ModelAdapter
from vlcam.anatomy import Tap
from vlcam.catalogue import named
from vlcam.errors import RecipeError
from vlcam.recipe import Recipe
from vlcam.targets import Custom, Target, resolve

__all__ = ["Job", "in_passes", "plan"]


@dataclass(frozen=True)
class Job:
    """One recipe, made ready for one model.

    Attributes:
        recipe: every choice.
        layers: the blocks that the recipe's `layers` are in this model.
        layers_rule: how they were found, in words.
        target: what is differentiated.
        phrase: the words that were asked for, if any.
        occurrence: which of several.
    """

    recipe: Recipe
    layers: tuple[int, ...]
    layers_rule: str
    target: Target
    phrase: str | None = None
    occurrence: int | None = None

    @property
    def taps(self) -> tuple[Tap, ...]:
        """What is read, a tap per layer."""
        return tuple(Tap(self.recipe.stream, layer, self.recipe.site) for layer in self.layers)


def plan(
    adapter: ModelAdapter,
    recipe: str | Recipe,
    changes: Mapping[str, Any],
    *,
    custom: Custom | None = None,
    phrase: str | None = None,
    occurrence: int | None = None,
) -> Job:
    """Fit a recipe to a model.

    Args:
        adapter: the model.
        recipe: a name, whose published layer is moved to the same relative depth, or a recipe, taken as it is.
        changes: fields that replace the recipe's.
        custom: the callable behind `target='custom'`.
        phrase: words of the text; the recipe then reads their rows.
        occurrence: which of several.

    Raises:
        RecipeError: choices that do not fit together, or that the model cannot meet.
        UnknownNameError: a name, stream or layer that does not exist.
    """
    if isinstance(recipe, str):
        entry = named(recipe)
        stream = adapter.anatomy.stream(changes.get("stream", entry.recipe.stream))
        chosen, rule = entry.fitted(len(stream.blocks))
    else:
        chosen, rule = recipe, "as given"
    wanted = dict(changes)
    if "layers" in wanted:
        rule = "as given"
    if phrase is not None:
        if chosen.queries not in ("all", "phrase"):
            raise RecipeError(
                f"phrase={phrase!r} with site={chosen.site!r}, queries={chosen.queries!r}: only maps with text rows "
                "(site='CROSS', queries='all' or 'phrase') can be read for one phrase"
            )
        if wanted.get("queries", "phrase") != "phrase":
            raise RecipeError(f"phrase={phrase!r} and queries={wanted['queries']!r}: give one of them")
        wanted["queries"] = "phrase"
    elif occurrence is not None:
        raise RecipeError(f"occurrence={occurrence}: there is no phrase of which it could be one; give phrase='...'")
    chosen = chosen.replace(**wanted)
    if chosen.queries == "phrase" and phrase is None:
        raise RecipeError("queries='phrase': say which words, phrase='...'")
    layers = adapter.anatomy.stream(chosen.stream).indices(chosen.layers)
    return Job(chosen, layers, rule, resolve(chosen, adapter.heads, custom), phrase, occurrence)


def in_passes(jobs: Sequence[Job]) -> list[list[int]]:
    """Indices of jobs, grouped by the pass that serves them: those with one target share one.

    A map that takes no gradient joins a pass that runs the same head for another reason.
    """
    passes: dict[tuple[str, str], list[int]] = {}
    for index, job in sorted(enumerate(jobs), key=lambda item: not item[1].target.differentiate):
        key = (job.target.head, job.target.label)
        if not job.target.differentiate:
            key = next((other for other in passes if other[0] == job.target.head), key)
        passes.setdefault(key, []).append(index)
    return list(passes.values())
