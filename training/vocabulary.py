"""The embedded models' tokenizer: a small WordPiece vocabulary in which some words are made of pieces."""

from __future__ import annotations

import string

from transformers import BertTokenizer

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = (
    *("a", "an", "and", "with", "next", "to", "there", "is", "picture", "of", "the"),
    *("red", "green", "blue", "yellow", "or", "##ange", "pur", "##ple"),
    *("circle", "square", "star", "cross", "tri", "##angle"),
)
# Letters, so that any word of any user becomes pieces and not [UNK].
LETTERS = (*string.ascii_lowercase, *(f"##{letter}" for letter in string.ascii_lowercase))
SIGNS = (",", ".", "?", "!", "'", "-")
# What questions need besides, behind all other pieces so that these keep their ids.
QUESTION_WORDS = ("what", "colour", "shape")
# As in the original BLIP, [DEC] and [ENC] follow the tokenizer's own vocabulary.
BEGIN_TOKENS = ("[DEC]", "[ENC]")


def vocabulary(more: tuple[str, ...] = ()) -> dict[str, int]:
    """The tokenizer's words and pieces with their ids, `more` at the end; [DEC] and [ENC] are not among them."""
    pieces = dict.fromkeys((*SPECIAL, *WORDS, *LETTERS, *SIGNS, *string.digits, *more))
    return {piece: index for index, piece in enumerate(pieces)}


def tokenizer(longest: int, more: tuple[str, ...] = ()) -> BertTokenizer:
    """A lower-casing WordPiece tokenizer over `vocabulary(more)` for texts of up to `longest` tokens."""
    return BertTokenizer(vocab=vocabulary(more), do_lower_case=True, model_max_length=longest)
