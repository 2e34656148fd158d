"""Which tokens a recipe means for one image and text: query rows, pooled tokens, cells of the map."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from vlcam.anatomy import StreamAnatomy
from vlcam.choices import ATTENTION_SITES
from vlcam.errors import RecipeError
from vlcam.recipe import Recipe
from vlcam.text import Span, TextLayout, Word, find_phrase
from vlcam.tokens import ImageTokens

__all__ = ["Selection", "select", "select_words"]


@dataclass(frozen=True, eq=False)
class Selection:
    """The rows of the main map and of every word.

    Attributes:
        rows: query rows that the main map averages (key columns, where the cells are queries); empty for token
            features.
        pool: tokens over which gradients are pooled into channel weights; empty where they are not pooled so.
        cells: the image tokens that are the cells of the map.
        words: the words that get a map of their own; none where rows are not text.
        span: the phrase's characters, if a phrase was asked for.
        dropped: what never reaches the map and why, for the record.
        grid: rows and columns of the cells that are shown.
        shown: which cells are shown, for a map over words; None for all.
        apart: for a map over words, the cells that are reported apart, by name.
        similar: for key similarity, the tokens over which it is scaled to 0..1; None for the cells.
    """

    rows: Sequence[int]
    pool: Sequence[int]
    cells: Sequence[int]
    words: tuple[Word, ...]
    span: Span | None
    dropped: list[dict[str, Any]]
    grid: tuple[int, int]
    shown: tuple[int, ...] | None = None
    apart: tuple[tuple[str, tuple[int, ...]], ...] = ()
    similar: Sequence[int] | None = None

    @property
    def shown_cells(self) -> Sequence[int]:
        """The tokens behind the cells that are shown."""
        return self.cells if self.shown is None else [self.cells[place] for place in self.shown]

    @property
    def all_rows(self) -> tuple[Sequence[int], ...]:
        """The rows of the main map, then those of every word."""
        return (self.rows, *(word.tokens for word in self.words))


def select_words(recipe: Recipe, layout: TextLayout, pooled: int, count: int, *, full: bool = True) -> Selection:
    """Find the tokens of a map over the words of a text.

    Args:
        recipe: names the query rows and the pooled tokens.
        layout: the text.
        pooled: the position that the text tower reads the text from.
        count: how many positions the tower runs on, padding among them.
        full: whether that is the context length, whatever other texts there are.

    Raises:
        RecipeError: padding would count, and there is as much as other texts want; an index that the text does not
            have, or no token is left.
    """
    real, place = range(len(layout.ids)), tuple(i for i, flag in enumerate(layout.special) if not flag)
    if not place:
        raise RecipeError(f"stream='text': no token of the text {layout.text!r} stands for a word")
    if "padded_similarity" in recipe.departures and not full:
        raise RecipeError(
            "departures='padded_similarity': key similarity is scaled over the padded context, and this model's texts "
            "are padded to the longest of the call alone; leave the departure out, or take the weights in open_clip"
        )
    # Behind the token that is pooled nothing is read, unless the tower pools behind the text.
    read = range(count) if pooled >= len(real) else real
    apart: list[tuple[str, tuple[int, ...]]] = []
    for index in (i for i, flag in enumerate(layout.special) if flag):
        piece, seen = layout.pieces[index], sum(name.partition("#")[0] == layout.pieces[index] for name, _ in apart)
        apart.append((f"{piece}#{seen + 1}" if seen else piece, (index,)))
    if pooled >= len(real):
        apart.append(("pooled position", (pooled,)))
    if count > len(real):
        apart.append(("padding", tuple(i for i in read if i >= len(real) and i != pooled)))
    named: dict[str, Sequence[int]] = {"pooled": (pooled,), "all": real}
    rows: Sequence[int] = ()
    if recipe.site in ATTENTION_SITES:
        rows = _index_list(recipe, len(real)) or named[str(recipe.queries)]
    pool: Sequence[int] = place if recipe.heads == "channels" else named.get(recipe.gradient_tokens, ())
    return Selection(
        rows=rows,
        pool=pool,
        cells=read,
        words=(),
        span=None,
        dropped=[{"what": "text tokens", "tokens": [i for _, own in apart for i in own], "why": "reported apart"}],
        grid=(1, len(place)),
        shown=place,
        apart=tuple(apart),
        similar=range(count) if "padded_similarity" in recipe.departures else real,
    )


def select(
    recipe: Recipe,
    layout: TextLayout | None,
    tokens: ImageTokens,
    phrase: str | None,
    occurrence: int | None,
    stream: StreamAnatomy | None = None,
) -> Selection:
    """Find the tokens.

    Args:
        recipe: names the query rows, the pooled tokens and what is excluded.
        layout: the text; None for a model that takes none.
        tokens: the image tokens.
        phrase: the phrase, for `queries='phrase'`.
        occurrence: which of several.
        stream: the blocks that are read; for learned queries, and for text whose rows tell the next token.

    Raises:
        RecipeError: an index that the text does not have, a token that the image does not have, or no row is left.
        InputError: the phrase is not in the text.
    """
    before = list(range(len(tokens.prefix)))
    why = f"before the patches ({', '.join(tokens.prefix)}): no place on the grid"
    dropped: list[dict[str, Any]] = [{"what": "image tokens", "tokens": before, "why": why}] if before else []
    span = None
    if recipe.target == "caption" and layout is not None and phrase is not None:  # its tokens are what is scored
        span = find_phrase(layout, phrase, occurrence)
    if recipe.site not in ATTENTION_SITES:
        pooled = recipe.gradient_tokens
        pool: Sequence[int] = () if pooled == "none" else tokens.chosen(pooled, recipe.exclude)
        return Selection((), pool, tokens.patches, (), span, dropped, tokens.grid)
    pool = tokens.patches if recipe.heads == "channels" else ()
    if recipe.stream == "pooler":
        learned = 0 if stream is None else stream.queries
        slots: Sequence[int] = _index_list(recipe, learned) or range(learned)
        return Selection(slots, pool, tokens.patches, (), span, dropped, tokens.grid)
    if recipe.site == "F2" or layout is None:
        rows = _image_rows(recipe, tokens)
        if recipe.weighting == "head_weights" and recipe.gradient_tokens == "all":
            pool = tokens.chosen("all", recipe.exclude)
        return Selection(rows, pool, tokens.patches, (), span, dropped, tokens.grid)
    return _crossed(recipe, layout, tokens, pool, dropped, phrase, occurrence, stream)


def _image_rows(recipe: Recipe, tokens: ImageTokens) -> Sequence[int]:
    rows = _index_list(recipe, tokens.count) or tokens.chosen(str(recipe.queries), recipe.exclude)
    if recipe.map_axis == "queries" and recipe.weighting == "attention" and len(set(rows)) == tokens.count:
        raise RecipeError(
            f"queries={recipe.queries!r} with map_axis='queries': rows of attention sum to 1 over all tokens, "
            "so the map is constant; leave some tokens out"
        )
    return rows


def _crossed(
    recipe: Recipe,
    layout: TextLayout,
    tokens: ImageTokens,
    pool: Sequence[int],
    dropped: list[dict[str, Any]],
    phrase: str | None,
    occurrence: int | None,
    stream: StreamAnatomy | None,
) -> Selection:
    """The rows of text that looks at the image."""
    span = find_phrase(layout, phrase, occurrence) if phrase is not None else None
    special = [index for index, flag in enumerate(layout.special) if flag]
    if recipe.queries == "all" and "special_text" in recipe.exclude:
        why = "special tokens are excluded"
        dropped.append({"what": "text rows", "tokens": special, "why": why})
    rows = _index_list(recipe, len(layout.ids)) or _text_rows(recipe, layout, span)
    hidden = [row for row in rows if row in special] if "special_text" in recipe.exclude else []
    if hidden:
        raise RecipeError(f"queries={recipe.queries!r}: rows {hidden} are special tokens, which exclude leaves out")
    words = layout.words
    if stream is not None and stream.tells_next:  # rows that are given by number are taken as they are
        rows = rows if isinstance(recipe.queries, tuple) else tuple(row - 1 for row in rows if row)
        if not rows:
            raise RecipeError(
                f"queries={recipe.queries!r}: in this model a token is told by the row before it, and before the token "
                "that opens the text there is none; choose 'all', 'phrase', or rows by number"
            )
        words = tuple(_before(word) for word in words)
    return Selection(rows, pool, tokens.patches, words, span, dropped, tokens.grid)


def _before(word: Word) -> Word:
    return replace(word, tokens=tuple(token - 1 for token in word.tokens))


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
