"""The phrases of a caption: those that were asked for, or the runs of words between closed lists of English words.

>>> text = "A picture of an orange circle, a red star next to a purple  square"
>>> [text[start:end] for start, end in find_phrases(text)]
['orange circle', 'red star', 'purple  square']
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vlcam.errors import InputError, listing
from vlcam.text import TextLayout, Word, find_span, lay_out, phrase_spans

__all__ = ["RULE", "SPLITTING", "SPLITTING_TOGETHER", "Place", "find_phrases", "places", "within_limit"]

Span = tuple[int, int]

RULE = "maximal runs of words between signs and closed lists of English words (vlcam.phrases), version 1"
"""What records call the rule of `find_phrases`."""

_LISTS = {
    "determiners": "a an the this that these those some any no every each either neither both all another such my your "
    "his her its our their whose which what",
    "prepositions": "about above across after against along alongside amid among amongst around as at atop before "
    "behind below beneath beside besides between beyond by despite down during except for from in inside into like "
    "near of off on onto opposite out outside over past per through throughout till to toward towards under underneath "
    "until up upon via with within without",
    "conjunctions": "and or but nor so yet if than then because while when where whereas although though unless "
    "whether since",
    "auxiliaries": "am is are was were be been being do does did have has had having can could may might must shall "
    "should will would cannot not isn't aren't wasn't weren't don't doesn't didn't haven't hasn't hadn't can't "
    "couldn't won't wouldn't shouldn't",
    "pronouns": "i you he she it we they me him us them who whom there here it's he's she's that's there's i'm we're "
    "you're they're itself himself herself themselves",
}

SPLITTING: dict[str, frozenset[str]] = {kind: frozenset(words.split()) for kind, words in _LISTS.items()}
"""Words that are part of no phrase, by kind; a few that are nouns as well, such as "can" and "like", are among them."""

SPLITTING_TOGETHER: tuple[tuple[str, ...], ...] = (
    ("left", "hand", "side", "of"),
    ("right", "hand", "side", "of"),
    ("left", "side", "of"),
    ("right", "side", "of"),
    *((word, "to") for word in ("next", "close")),
    *((word, "of") for word in ("front", "top", "bottom", "middle", "centre", "center", "left", "right", "side")),
    *((word, "of") for word in ("back", "instead", "because")),
    ("well", "as"),
    *((word, "of") for word in ("picture", "photo", "photograph", "image")),
)
"""Words that are part of no phrase where they follow each other: places, and what a caption calls the picture."""

_ALONE = frozenset().union(*SPLITTING.values())


@dataclass(frozen=True)
class Place:
    """A phrase as typed, its half-open character range, and which of several it is, counted from 1; None for one."""

    phrase: str
    span: Span
    occurrence: int | None


def places(text: str, phrases: Sequence[str | tuple[str, int]] | str | None) -> tuple[Place, ...]:
    """Where the phrases stand in a text, in the order in which they were given, each place once.

    Args:
        text: the caption.
        phrases: strings, each of which means every place where it stands; pairs of a string and which one, counted
            from 1; None for those that `find_phrases` finds.

    Raises:
        InputError: no phrase was given or found, one is not in the text, or not as often.
    """
    if phrases is None:
        spans = find_phrases(text)
        if not spans:
            raise InputError(
                f"no phrase was found in the text {text!r}: all its words split phrases; name some, phrases=[...]"
            )
    else:
        given = [phrases] if isinstance(phrases, str) else list(phrases)
        if not given:
            raise InputError("phrases=[]: name at least one, or leave them to be found, phrases=None")
        spans = [span for each in given for span in _spans(text, each)]
    return tuple(_place(text, span) for span in dict.fromkeys(spans))


def within_limit(found: Sequence[Place], layout: TextLayout) -> tuple[list[int], tuple[str, ...]]:
    """The indices of the phrases that a model reads to their end, and the phrases that it does not.

    Raises:
        InputError: there is none that it reads.
    """
    read = max((end for _, end in layout.spans), default=0)
    kept = [index for index, each in enumerate(found) if each.span[1] <= read and layout.tokens_of(each.span)]
    cut = tuple(each.phrase for index, each in enumerate(found) if index not in kept)
    if not kept:
        raise InputError(f"all phrases lie behind the model's limit: {listing(cut)}; shorten the text")
    return kept, cut


def find_phrases(text: str) -> list[Span]:
    """The character ranges of the phrases of an English text, by a rule without grammar.

    Words are read one after another, without regard to case. A word out of `SPLITTING`, words out of
    `SPLITTING_TOGETHER`, and any sign between words end a phrase. What is left in between, as long as it can be, is a
    phrase. Hyphens and apostrophes inside a word are part of it. Verbs other than auxiliaries are not told from nouns.

    Args:
        text: the caption.

    Returns:
        Half-open ranges, in text order.
    """
    found: list[Span] = []
    for run in _runs(text):
        words = [word.text.casefold().replace("\u2019", "'") for word in run]
        start, index = 0, 0
        while index <= len(words):
            skipped = _splitting(words, index)
            if skipped:
                if index > start:
                    found.append((run[start].span[0], run[index - 1].span[1]))
                start = index + skipped
            index += skipped or 1
    return found


def _splitting(words: Sequence[str], index: int) -> int:
    """How many words from an index on split phrases; the end of the words counts as one."""
    if index == len(words):
        return 1
    for together in SPLITTING_TOGETHER:
        if tuple(words[index : index + len(together)]) == together:
            return len(together)
    return int(words[index] in _ALONE)


def _runs(text: str) -> Iterator[list[Word]]:
    """Words between which there are only blanks."""
    run: list[Word] = []
    for word in _words(text):
        if run and not text[run[-1].span[1] : word.span[0]].isspace():
            yield run
            run = []
        run.append(word)
    yield run


def _words(text: str) -> tuple[Word, ...]:
    """The words of a text that no model has read: as for a model that reads every character."""
    spans = [(index, index + 1) for index in range(len(text))]
    return lay_out(text, range(len(text)), list(text), spans, [False] * len(text)).words


def _spans(text: str, given: str | tuple[str, int]) -> list[Span]:
    if isinstance(given, tuple):
        if len(given) != 2:
            raise InputError(f"phrases: {given!r} is no pair of a phrase and which one, counted from 1")
        return [find_span(text, *given)]
    found = phrase_spans(text, given) if isinstance(given, str) and given.strip() else []
    return found or [find_span(text, given)]  # which says what is wrong


def _place(text: str, span: Span) -> Place:
    phrase = text[span[0] : span[1]]
    equal = phrase_spans(text, phrase)
    return Place(phrase, span, equal.index(span) + 1 if len(equal) > 1 else None)
