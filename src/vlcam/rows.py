"""Which query rows of an attention map a recipe means, for one text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vlcam.errors import RecipeError
from vlcam.recipe import ATTENTION_SITES, Recipe
from vlcam.text import Span, TextLayout, Word, find_phrase

__all__ = ["Selection", "select"]


@dataclass(frozen=True, eq=False)
class Selection:
    """The rows of the main map and of every word.

    Attributes:
        rows: query rows that the main map averages; empty for token features.
        words: the words that get a map of their own; none where rows are not text.
        weights: [1 + words, Q], each row sums to 1.
        span: the phrase's characters, if a phrase was asked for.
        dropped: what never reaches the map and why, for the record.
    """

    rows: tuple[int, ...]
    words: tuple[Word, ...]
    weights: Tensor
    span: Span | None
    dropped: list[dict[str, Any]]


def select(
    recipe: Recipe, layout: TextLayout, prefix: int, keys: int, phrase: str | None, occurrence: int | None
) -> Selection:
    """Find the rows.

    Args:
        recipe: names the query rows and what is excluded.
        layout: the text.
        prefix: image tokens before the patches.
        keys: number of image tokens.
        phrase: the phrase, for `queries='phrase'`.
        occurrence: which of several.

    Raises:
        RecipeError: an index that the text does not have, or no row is left.
        InputError: the phrase is not in the text.
    """
    dropped = [
        {"what": "image tokens", "tokens": list(range(prefix)), "why": "class or register token: no place on the grid"}
    ]
    if recipe.site not in ATTENTION_SITES:
        return Selection((), (), torch.ones(1, 1, device="cpu"), None, dropped)
    if recipe.site == "F2":
        rows = _index_list(recipe, keys) or _vision_rows(recipe, prefix, keys)
        return Selection(rows, (), _weights([rows], keys), None, dropped)
    span = find_phrase(layout, phrase, occurrence) if phrase is not None else None
    special = [index for index, flag in enumerate(layout.special) if flag]
    if recipe.queries == "all" and "special_text" in recipe.exclude:
        why = "special tokens are excluded"
        dropped.append({"what": "text rows", "tokens": special, "why": why})
    rows = _index_list(recipe, len(layout.ids)) or _text_rows(recipe, layout, span)
    words = layout.words
    return Selection(rows, words, _weights([rows, *(word.tokens for word in words)], len(layout.ids)), span, dropped)


def _text_rows(recipe: Recipe, layout: TextLayout, span: Span | None) -> tuple[int, ...]:
    if recipe.queries == "cls":
        return (0,)
    if span is not None:
        return layout.tokens_of(span)
    hidden = layout.special if "special_text" in recipe.exclude else (False,) * len(layout.ids)
    rows = tuple(index for index, flag in enumerate(hidden) if not flag)
    if not rows:
        raise RecipeError(f"exclude={recipe.exclude!r}: no row is left of the text {layout.text!r}")
    return rows


def _vision_rows(recipe: Recipe, prefix: int, tokens: int) -> tuple[int, ...]:
    if recipe.queries == "cls":
        if not prefix:
            raise RecipeError("queries='cls': these tokens have no class token; choose 'patches' or 'all'")
        return (0,)
    return tuple(range(prefix if recipe.queries == "patches" else 0, tokens))


def _index_list(recipe: Recipe, count: int) -> tuple[int, ...]:
    if isinstance(recipe.queries, str):
        return ()
    wrong = [index for index in recipe.queries if not -count <= index < count]
    if wrong:
        raise RecipeError(f"queries={recipe.queries!r}: there are rows 0 to {count - 1}, not {wrong}")
    return tuple(index % count for index in recipe.queries)


def _weights(selections: Sequence[Sequence[int]], count: int) -> Tensor:
    # Named, because a default device of the caller would move it away from numpy's reach.
    weights = torch.zeros(len(selections), count, device="cpu")
    for number, rows in enumerate(selections):
        weights[number, list(rows)] = 1 / len(rows)
    return weights
