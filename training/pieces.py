"""The tokenizer of `tiny-clip`: CLIP's own byte-pair encoding with merges for the words of the scenes alone."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from transformers import CLIPTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

BEGIN, END = "<|startoftext|>", "<|endoftext|>"
LAST = "</w>"  # what CLIP puts behind the last piece of a word
# A blank stands where a word stays in pieces: maps of words must also be tried on words of several pieces.
WORDS = (
    *("a", "an", "and", "with", "next", "to", "there", "is", "this", "picture", "photo", "of", "the"),
    *("red", "green", "blue", "yellow", "or ange", "pur ple"),
    *("circle", "square", "star", "cross", "tri angle"),
)


def merges() -> list[tuple[str, str]]:
    """The merges, in order, that make each piece of `WORDS` out of its letters: byte-pair encoding, learned here."""
    pieces = [piece for word in WORDS for piece in _ended(word)]
    found: list[tuple[str, str]] = []
    while pairs := Counter(pair for piece in pieces for pair in pairwise(piece)):
        # The first among equals, so that the merges hang on the order of the words and on nothing else.
        best = max(pairs, key=lambda pair: pairs[pair])
        found.append(best)
        pieces = [_merged(piece, best) for piece in pieces]
    return found


def _ended(word: str) -> list[list[str]]:
    """The letters of each of a word's pieces; the word's last letter carries the mark of the end."""
    parts = [list(part) for part in word.split()]
    parts[-1][-1] += LAST
    return parts


def _merged(piece: list[str], pair: tuple[str, str]) -> list[str]:
    made: list[str] = []
    for part in piece:
        if made and (made[-1], part) == pair:
            made[-1] += part
        else:
            made.append(part)
    return made


def vocabulary() -> dict[str, int]:
    """Every piece and its id: all bytes within a word and at its end, what the merges make, begin, and end.

    The end has the highest id, as in CLIP: some implementations find it as the highest one in a text.
    """
    letters = list(bytes_to_unicode().values())
    made = ["".join(pair) for pair in merges()]
    pieces = dict.fromkeys([*letters, *(letter + LAST for letter in letters), *made, BEGIN, END])
    return {piece: index for index, piece in enumerate(pieces)}


def tokenizer(longest: int) -> CLIPTokenizer:
    """A tokenizer over `vocabulary()` for texts of up to `longest` tokens; any text has pieces, and none is unknown."""
    return CLIPTokenizer(vocab=vocabulary(), merges=merges(), model_max_length=longest)
