"""Which query rows of an attention map a recipe means, for one text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
        span: the phrase's characters, if a phrase was asked for.
        dropped: what never reaches the map and why, for the record.
    """

    rows: tuple[int, ...]
    words: tuple[Word, ...]
    span: Span | None
    dropped: list[dict[str, Any]]

    @property
    def all_rows(self) -> tuple[tuple[int, ...], ...]:
        """The rows of the main map, then those of every word."""
        return (self.rows, *(word.tokens for word in self.words))


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
        return Selection((), (), None, dropped)
    if recipe.site == "F2":
        rows = _index_list(recipe, keys) or _vision_rows(recipe, prefix, keys)
        return Selection(rows, (), None, dropped)
    span = find_phrase(layout, phrase, occurrence) if phrase is not None else None
    special = [index for index, flag in enumerate(layout.special) if flag]
    if recipe.queries == "all" and "special_text" in recipe.exclude:
        why = "special tokens are excluded"
        dropped.append({"what": "text rows", "tokens": special, "why": why})
    rows = _index_list(recipe, len(layout.ids)) or _text_rows(recipe, layout, span)
    hidden = [row for row in rows if row in special] if "special_text" in recipe.exclude else []
    if hidden:
        raise RecipeError(f"queries={recipe.queries!r}: rows {hidden} are special tokens, which exclude leaves out")
    return Selection(rows, layout.words, span, dropped)


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
    found = tuple(index % count for index in recipe.queries)
    if len(set(found)) < len(found):
        raise RecipeError(f"queries={recipe.queries!r} are rows {found}: one is named twice")
    return found
