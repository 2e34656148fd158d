"""Texts of models with a text tower: ids with the characters they stand for, and the position that the tower pools.

Nothing here knows a model: a fast tokenizer, texts or ids, and a context length go in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from vlcam.errors import AdapterError, InputError
from vlcam.text import TextLayout, lay_out
from vlcam_adapters.hf_processing import checked_ids

__all__ = [
    "Pool",
    "TextWarning",
    "TowerTexts",
    "check_tokenizer",
    "read_back",
    "tokenise",
]

Pool = Literal["first end", "largest id", "last"]
"""Which position a tower pools: the first end token; the largest id, which is the end token unless tokens were added to
the vocabulary; or the last position, padding or not. The first two are of towers whose attention is causal."""

_SPARE_IDS = 128
"""Released checkpoints pad their table of embeddings to a round number."""


class TextWarning(UserWarning):
    """A text reaches the model in another form than the model was trained on."""


@dataclass(frozen=True, eq=False)
class TowerTexts:
    """T texts for a text tower.

    Attributes:
        ids: [T, N], padding included.
        mask: [T, N], 1 for tokens that stand for the text, special ones included.
        layouts: each text's tokens, without padding.
        pooled: for each text, the position that the tower pools.
    """

    ids: Tensor
    mask: Tensor
    layouts: tuple[TextLayout, ...]
    pooled: tuple[int, ...]


def check_tokenizer(tokenizer: Any, table: int) -> None:
    """Refuse a tokenizer whose tokens cannot be found in the text, or that is another model's.

    Args:
        tokenizer: as the user gave it.
        table: number of ids that the model embeds.

    Raises:
        AdapterError: a tokenizer without offsets, without an end token, or of another size than the model's.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise AdapterError(
            f"{type(tokenizer).__name__} gives no character offsets, which maps of words need: give the processor a "
            "fast tokenizer, for example transformers.PreTrainedTokenizerFast(tokenizer_file='tokenizer.json', "
            "eos_token=..., pad_token=...)"
        )
    if tokenizer.eos_token_id is None:
        raise AdapterError(f"{type(tokenizer).__name__} has no end token; name it, tokenizer.eos_token = ...")
    words = len(tokenizer)
    if not words <= table < words + _SPARE_IDS:
        raise AdapterError(
            f"a tokenizer of {words} tokens and a model that embeds {table} do not belong together; is the "
            "tokenizer's file missing?"
        )


def tokenise(
    tokenizer: Any, texts: Sequence[str], limit: int, *, pool: Pool, padding: int | None = None, full: bool = False
) -> TowerTexts:
    """Texts as ids with their layouts; what does not fit is cut off before the end token, and listed.

    Args:
        tokenizer: a fast one.
        texts: as typed.
        limit: the most tokens of a text, special ones included.
        pool: which position the tower pools.
        padding: id of the padding; by default the tokenizer's.
        full: whether all texts are padded to the limit; otherwise to the longest of them.

    Raises:
        AdapterError: the tokenizer misplaces tokens in the text, or has no padding.
        InputError: a text without the end token that the tower pools.
    """
    made = tokenizer(
        list(texts),
        truncation=True,
        max_length=limit,
        return_offsets_mapping=True,
        return_special_tokens_mask=True,
        return_attention_mask=False,
    )
    pad = _padding(tokenizer) if padding is None else padding
    rows: list[list[int]] = made["input_ids"]
    width = limit if full else max(len(row) for row in rows)
    padded = [[*row, *[pad] * (width - len(row))] for row in rows]
    layouts, pooled, lengths = [], [], []
    for number, (text, row) in enumerate(zip(texts, rows, strict=True)):
        position, length = _ends(tokenizer, padded[number], len(row), pool)
        ids = row[:length]
        pieces = tokenizer.convert_ids_to_tokens(ids)
        special = [
            bool(flag) or id_ in _special(tokenizer)
            for flag, id_ in zip(made["special_tokens_mask"][number], ids, strict=False)
        ]
        spans = [
            (0, 0) if flag else _tight(text, span)
            for flag, span in zip(special, made["offset_mapping"][number], strict=False)
        ]
        _check_spans(tokenizer, text, ids, pieces, spans)
        truncated = bool(made.encodings[number].overflowing) or length < len(row)
        layouts.append(lay_out(text, ids, pieces, spans, special, truncated=truncated))
        pooled.append(position)
        lengths.append(length)
    # On the CPU whatever the caller's default device.
    tensor = torch.tensor(padded, device="cpu")
    return TowerTexts(tensor, _mask(lengths, width), tuple(layouts), tuple(pooled))


def read_back(tokenizer: Any, ids: Tensor, mask: Tensor | None, *, pool: Pool, table: int, limit: int) -> TowerTexts:
    """Ids [T, N] that came without a text, with layouts of the text that they spell; a missing mask is made.

    Args:
        tokenizer: a fast one.
        ids: as the user gave them.
        mask: as the user gave it.
        pool: which position the tower pools.
        table: number of ids that the model embeds.
        limit: the most tokens of a text.

    Raises:
        InputError: ids or a mask that the model cannot take, or that hide what it pools.
    """
    rows, known = checked_ids(ids, torch.ones_like(ids) if mask is None else mask, padding=-1, table=table, limit=limit)
    layouts, pooled, lengths = [], [], []
    for row, shown in zip(rows.tolist(), known.sum(1).tolist(), strict=True):
        position, length = _ends(tokenizer, row, shown if mask is not None else _unpadded(tokenizer, row, pool), pool)
        if mask is not None and pool != "last" and position >= shown:
            raise InputError(
                f"attention_mask hides position {position}, where the model reads the text from: it shows {shown} of "
                f"the ids {row}; show everything up to the end token, or leave the mask out"
            )
        layouts.append(_spelt(tokenizer, row[:length]))
        pooled.append(position)
        lengths.append(length)
    made = _mask(lengths, rows.shape[1]) if mask is None else known.long()
    return TowerTexts(rows.clone(), made, tuple(layouts), tuple(pooled))


def _ends(tokenizer: Any, row: Sequence[int], length: int, pool: Pool) -> tuple[int, int]:
    """The position that is pooled, and how many tokens stand for the text.

    Behind its end token a causal tower reads nothing, not even words.
    """
    if pool == "last":
        return len(row) - 1, length
    end = tokenizer.eos_token_id
    if end not in row:
        raise InputError(
            f"input_ids {list(row)}: no end token {tokenizer.eos_token!r} (id {end}), from which the model reads the "
            "text; it would read another position and not say so; end each text with it"
        )
    first = row.index(end)
    # The first of equal ids, as torch's argmax on the CPU.
    position = first if pool == "first end" else row.index(max(row))
    return position, min(length, max(first, position) + 1)


def _unpadded(tokenizer: Any, row: Sequence[int], pool: Pool) -> int:
    """How many of the ids are no padding; an end token that doubles as padding stands once."""
    pad = tokenizer.pad_token_id
    if pool != "last" or pad is None:
        return len(row)
    length = len(row)
    while length > 1 and row[length - 1] == pad:
        length -= 1
    return length + 1 if pad == tokenizer.eos_token_id and length < len(row) and row[length - 1] != pad else length


def _padding(tokenizer: Any) -> int:
    if tokenizer.pad_token_id is None:
        raise AdapterError(f"{type(tokenizer).__name__} has no padding token; name it, tokenizer.pad_token = ...")
    return int(tokenizer.pad_token_id)


def _special(tokenizer: Any) -> set[int]:
    """Ids that stand for no word. CLIP's unknown token is its end token, and ends the text."""
    unknown = {tokenizer.unk_token_id} - {tokenizer.eos_token_id}
    return set(tokenizer.all_special_ids) - unknown


def _mask(lengths: Sequence[int], width: int) -> Tensor:
    return torch.tensor([[int(index < length) for index in range(width)] for length in lengths], device="cpu")


def _tight(text: str, span: Sequence[int]) -> tuple[int, int]:
    """A span without the blanks around it, which some vocabularies count as part of the next word."""
    start, end = int(span[0]), int(span[1])
    inside = text[start:end]
    if not inside.strip():
        return start, end
    return start + len(inside) - len(inside.lstrip()), end - len(inside) + len(inside.rstrip())


def _check_spans(
    tokenizer: Any, text: str, ids: Sequence[int], pieces: Sequence[str], spans: Sequence[tuple[int, int]]
) -> None:
    """Tokenizers that change the text before they cut it can lose track of where a piece came from.

    Raises:
        AdapterError: a piece lies where the text has other letters.
    """
    for id_, piece, (start, end) in zip(ids, pieces, spans, strict=True):
        letters, found = _letters(piece), _letters(text[start:end])
        # Other alphabets are spelt in bytes, or normalised.
        plain = piece.replace("\u2581", "").isascii() and text[start:end].isascii() and not _is_byte(piece)
        # A mark of the word's beginning alone takes the word's first letter for its place.
        if plain and letters and letters != found and start < end and id_ != tokenizer.unk_token_id:
            raise AdapterError(
                f"{type(tokenizer).__name__} says that {piece!r} stands at characters {start}-{end} of {text!r}, where "
                f"there is {text[start:end]!r}; words cannot be found with such offsets: give a tokenizer whose "
                "offsets count the characters of the text as typed"
            )


def _letters(piece: str) -> str:
    return "".join(letter for letter in piece.removesuffix("</w>").lower() if letter.isalnum())


def _is_byte(piece: str) -> bool:
    """Whether a piece stands for one byte of a character that the vocabulary lacks, `<0x0A>`."""
    return piece.startswith("<0x") and piece.endswith(">")


def _spelt(tokenizer: Any, ids: Sequence[int]) -> TextLayout:
    """A layout for ids alone: of the text that the tokenizer decodes them to, if that text has these ids again."""
    special = [id_ in _special(tokenizer) for id_ in ids]
    pieces = [piece or f"id {id_}" for piece, id_ in zip(tokenizer.convert_ids_to_tokens(ids), ids, strict=True)]
    words = [id_ for id_, flag in zip(ids, special, strict=True) if not flag]
    text = tokenizer.decode(words, clean_up_tokenization_spaces=False) if words else ""
    again = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False)
    found = [_tight(text, span) for span in again["offset_mapping"]]
    if list(again["input_ids"]) != words:
        text, found = _joined([piece for piece, flag in zip(pieces, special, strict=True) if not flag])
    spans = iter(found)
    return lay_out(text, ids, pieces, [(0, 0) if flag else next(spans) for flag in special], special)


def _joined(pieces: Sequence[str]) -> tuple[str, list[tuple[int, int]]]:
    """Pieces as the vocabulary spells them, with blanks where it marks the bounds of words."""
    text, spans = "", []
    for piece in pieces:
        body = piece.removesuffix("</w>").replace("\u2581", " ")
        bare = body.strip()
        text += " " if body.startswith(" ") and text and not text.endswith(" ") else ""
        spans.append((len(text), len(text) + len(bare)))
        text += bare + (" " if piece.endswith("</w>") else "")
    return text.rstrip(), spans
