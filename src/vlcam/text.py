"""How a text lies on a model's tokens: characters, pieces, words, special tokens, padding, and what was cut off."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from unicodedata import category

from vlcam.errors import InputError

__all__ = ["TextLayout", "Word", "find_phrase", "find_span", "lay_out", "phrase_spans"]

Span = tuple[int, int]

# Accents and vowel signs that stand as characters of their own belong to the letter before them.
_MARKS = "".join(map(chr, (code for code in range(0x300, 0x11000) if category(chr(code)).startswith("M"))))
_LETTER = rf"[\w{_MARKS}]"
_WORD = re.compile(rf"\w{_LETTER}*(?:['\u2019-]\w{_LETTER}*)*")


@dataclass(frozen=True)
class Word:
    """A word of the user's text: its characters as typed, its span, the indices of its tokens."""

    text: str
    span: Span
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class TextLayout:
    """One text and the tokens that stand for it.

    Attributes:
        text: as typed.
        ids: token ids, without padding.
        pieces: the token of each id, as the vocabulary spells it.
        spans: half-open character range of each token in `text`; (0, 0) for special tokens.
        special: whether each token is a special one.
        words: the words that the model read, in order; punctuation is not a word.
        cut: the words that the model did not read, or not to their end.
        cut_text: what was cut off behind the model's limit, as typed.
    """

    text: str
    ids: tuple[int, ...]
    pieces: tuple[str, ...]
    spans: tuple[Span, ...]
    special: tuple[bool, ...]
    words: tuple[Word, ...]
    cut: tuple[str, ...] = ()
    cut_text: str = ""

    def tokens_of(self, span: Span) -> tuple[int, ...]:
        """Indices of the tokens that share a character with the span; special tokens never do."""
        return tuple(
            index
            for index, (start, end) in enumerate(self.spans)
            if not self.special[index] and start < span[1] and end > span[0]
        )


def lay_out(
    text: str,
    ids: Sequence[int],
    pieces: Sequence[str],
    spans: Sequence[Span],
    special: Sequence[bool],
    *,
    truncated: bool = False,
) -> TextLayout:
    """Group a text's tokens into words.

    Args:
        text: as typed.
        ids: token ids that the model reads, without padding.
        pieces: the token of each id.
        spans: half-open character range of each token.
        special: whether each token is a special one.
        truncated: whether the model's limit cut tokens off.

    Returns:
        The layout. A word of which any character lies behind the last token counts as cut.
    """
    read = max((end for (_, end), other in zip(spans, special, strict=True) if not other), default=0)
    bare = TextLayout(text, tuple(ids), tuple(pieces), tuple(spans), tuple(special), ())
    words, cut, begin = [], [], read
    for match in _WORD.finditer(text):
        tokens = bare.tokens_of(match.span())
        if not tokens or (truncated and match.end() > read):
            cut.append(match.group())
            begin = min(begin, match.start()) if match.end() > read else begin
        else:
            words.append(Word(match.group(), match.span(), tokens))
    return replace(bare, words=tuple(words), cut=tuple(cut), cut_text=text[begin:].strip() if truncated else "")


def find_phrase(layout: TextLayout, phrase: str, occurrence: int | None = None) -> Span:
    """Return the character range of a phrase in the text.

    Case and the amount of white space do not matter; a phrase does not begin or end inside a run of letters,
    but it may be a part of a hyphenated word.

    Args:
        layout: the text.
        phrase: words that follow each other in the text.
        occurrence: which of several, counted from 1.

    Raises:
        InputError: the phrase is empty, is not in the text, stands there more than once and `occurrence` does not
            say which, or was cut off.
    """
    span = _occurrence_of(layout.text, layout.words, phrase, occurrence)
    read = max((end for _, end in layout.spans), default=0)
    if span[1] > read or not layout.tokens_of(span):
        raise InputError(
            f"phrase {phrase!r} lies behind the model's limit: it read the text up to character {read}, "
            f"cut off were {', '.join(repr(word) for word in layout.cut)}"
        )
    return span


def _occurrence_of(text: str, words: Sequence[Word], phrase: str, occurrence: int | None) -> Span:
    """The place of a phrase in a text, and a complaint if it is not clear."""
    if not isinstance(phrase, str) or not isinstance(occurrence, int | None):
        raise InputError(f"phrase={phrase!r}, occurrence={occurrence!r}: give text, and a whole number")
    if not phrase.strip():
        raise InputError("phrase is empty; give words of the text")
    found = phrase_spans(text, phrase)
    if not found:
        listed = ", ".join(repr(word.text) for word in words)
        raise InputError(f"phrase {phrase!r} is not in the text {text!r}; its words are {listed}")
    if len(found) > 1 and occurrence is None:
        raise InputError(
            f"phrase {phrase!r} stands {len(found)} times in the text, at characters "
            f"{', '.join(f'{a}-{b}' for a, b in found)}; say which with occurrence=1..{len(found)}"
        )
    if occurrence is not None and not 1 <= occurrence <= len(found):
        raise InputError(f"occurrence={occurrence}: phrase {phrase!r} stands {len(found)} times in the text")
    return found[(occurrence or 1) - 1]


def find_span(text: str, phrase: str, occurrence: int | None = None) -> Span:
    """Return the character range of a phrase in a text that no model has read; as in `find_phrase`.

    Raises:
        InputError: the phrase is empty, is not in the text, or stands there more often than `occurrence` says.
    """
    words = tuple(Word(match.group(), match.span(), ()) for match in _WORD.finditer(text))
    return _occurrence_of(text, words, phrase, occurrence)


def phrase_spans(text: str, phrase: str) -> list[Span]:
    """Every character range at which a phrase stands in a text, whatever its case and white space."""
    pattern = r"(?<!\w)" + r"\s+".join(re.escape(part) for part in phrase.split()) + rf"(?!{_LETTER})"
    return [match.span() for match in re.finditer(pattern, text, re.IGNORECASE)]
