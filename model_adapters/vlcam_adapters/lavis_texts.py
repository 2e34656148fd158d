"""Texts of LAVIS models: the ids that the model's own tokenizer makes, and where each token stands in the text.

LAVIS has the tokenizer of BERT that knows no characters. A fast twin of it says where tokens stand; its ids must be
those of the model's own, which are what the model reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from vlcam.errors import AdapterError
from vlcam.text import Span, TextLayout, lay_out

__all__ = ["BertTexts"]


class BertTexts:
    """Tokenises as a LAVIS model does, and knows where each token stands."""

    def __init__(
        self, tokenizer: Any, limit: int, prepare: Callable[[str], str] | None = None, *, prompt: str = ""
    ) -> None:
        """Hold a tokenizer.

        Args:
            tokenizer: the model's own.
            limit: the most tokens of a text, special ones included.
            prepare: what a text passes before it is tokenised; LAVIS's text processor.
            prompt: what is put before a text that does not begin so; its tokens are no words of the text.
        """
        self.tokenizer = tokenizer
        self.limit = limit
        self._prepare = prepare
        self._prompt = prompt
        self._twin = _twin(tokenizer)

    def __call__(
        self, texts: Sequence[str], *, opening: tuple[str, int]
    ) -> tuple[dict[str, Tensor], tuple[TextLayout, ...]]:
        """Ids and mask as tokenised, [T, N] each, and layouts that name the opening token (piece, id) really read.

        Raises:
            AdapterError: the text processor, or the twin, loses track of the text.
        """
        rows, layouts = [], []
        for text in texts:
            ids, layout = self._one(text, opening)
            rows.append(ids)
            layouts.append(layout)
        width, padding = max(map(len, rows)), self.tokenizer.pad_token_id
        # On the CPU whatever the caller's default device.
        padded = torch.tensor([[*row, *[padding] * (width - len(row))] for row in rows], device="cpu")
        mask = torch.tensor([[int(index < len(row)) for index in range(width)] for row in rows], device="cpu")
        return {"input_ids": padded, "attention_mask": mask}, tuple(layouts)

    def _one(self, text: str, opening: tuple[str, int]) -> tuple[list[int], TextLayout]:
        """A text's ids as tokenised, and its layout."""
        read = text if self._prepare is None else self._prepare(text)
        before = "" if read.lower().startswith(self._prompt.lower()) else self._prompt
        places = [*[-1] * len(before), *_places(text, read)]
        read = before + read
        ids = list(self.tokenizer(read, truncation=True, max_length=self.limit)["input_ids"])
        whole = self._twin.encode(read)
        kept = len(ids) - 1  # the last is [SEP], which a text that is cut off has too
        if [*whole.ids[:kept], whole.ids[-1]] != ids:
            raise AdapterError(
                f"{type(self.tokenizer).__name__} makes {ids} of {read!r}, its fast twin {whole.ids}: where its tokens "
                "stand in the text cannot be told, so that no map of a word can be drawn"
            )
        spans = [_span(places, *found) for found in (*whole.offsets[:kept], (0, 0))]
        flags = zip((*whole.special_tokens_mask[:kept], 1), spans, strict=True)
        special = [bool(flag) or not any(span) for flag, span in flags]
        pieces = [opening[0], *self.tokenizer.convert_ids_to_tokens(ids)[1:]]
        cut = len(whole.ids) > len(ids) or any(map(str.isalnum, text[places[-1] + 1 if places else 0 :]))
        return ids, lay_out(text, [opening[1], *ids[1:]], pieces, spans, special, truncated=cut)


def _twin(tokenizer: Any) -> Tokenizer:
    """A tokenizer with offsets, neither padding nor cutting; the model's own is left as it is.

    Raises:
        AdapterError: no tokenizer of BERT.
    """
    if getattr(tokenizer, "is_fast", False):
        twin = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    else:
        from transformers.convert_slow_tokenizer import convert_slow_tokenizer  # slow ones are of transformers

        try:
            twin = convert_slow_tokenizer(tokenizer)
        except (ValueError, AttributeError) as error:
            raise AdapterError(f"tokenizer={type(tokenizer).__name__}: not one that BERT has ({error})") from None
        added = sorted(tokenizer.get_added_vocab().items(), key=lambda item: item[1])
        twin.add_special_tokens([token for token, _ in added])
    twin.no_padding()
    twin.no_truncation()
    return twin


def _places(text: str, read: str) -> list[int]:
    """For each character of what is read its place in the text as typed; blanks stand where the next one does.

    LAVIS's text processor drops punctuation and the difference of cases, and cuts off behind a number of words.

    Raises:
        AdapterError: it does anything else.
    """
    if read == text:
        return list(range(len(text)))
    lowered = [(index, letter) for index, typed in enumerate(text) for letter in typed.lower()]
    places, at = [], 0
    for letter in read:
        if letter.isspace():
            places.append(lowered[at][0] if at < len(lowered) else len(text))
            continue
        while at < len(lowered) and lowered[at][1] != letter.lower():
            at += 1
        if at == len(lowered):
            raise AdapterError(
                f"the text processor makes {read!r} of {text!r}, which is more than leaving characters out: where a "
                "word stands cannot be told; give (vis_processor, None) and prepare texts yourself"
            )
        places.append(lowered[at][0])
        at += 1
    return places


def _span(places: Sequence[int], start: int, end: int) -> Span:
    return (places[start], places[end - 1] + 1) if start < end and places[start] >= 0 else (0, 0)
