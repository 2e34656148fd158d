"""What Hugging Face processors do, as records and layouts: image steps with their numbers, tokens with their spans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from vlcam.errors import AdapterError
from vlcam.text import TextLayout, lay_out


def image_steps(processor: Any, size: tuple[int, ...]) -> tuple[dict[str, Any], ...]:
    """The steps of an image processor that resizes to a fixed size, with every number."""
    steps: list[dict[str, Any]] = [{"step": "processor", "class": type(processor).__name__}]
    if processor.do_resize:
        resample = Image.Resampling(processor.resample).name.lower()
        steps.append({"step": "resize", "to": list(size), "resample": resample, "keeps_proportions": False})
    if processor.do_rescale:
        steps.append({"step": "rescale", "factor": processor.rescale_factor})
    if processor.do_normalize:
        mean, std = list(processor.image_mean), list(processor.image_std)
        steps.append({"step": "normalize", "mean": mean, "std": std})
    return tuple(steps)


def tokenised(
    tokenizer: Any, texts: Sequence[str], limit: int, *, opening: tuple[str, int]
) -> tuple[dict[str, Tensor], tuple[TextLayout, ...]]:
    """Token ids and mask as tokenised, [P, T] each, and layouts that name the opening token (piece, id) really read.

    Raises:
        AdapterError: a tokenizer that cannot tell where a token lies in the text.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise AdapterError(
            f"{type(tokenizer).__name__} gives no character offsets, which maps of words need; load the fast tokenizer"
        )
    made = tokenizer(
        list(texts),
        padding=True,
        truncation=True,
        max_length=limit,
        return_offsets_mapping=True,
        return_special_tokens_mask=True,
    )
    layouts = []
    for row, text in enumerate(texts):
        real = [index for index, flag in enumerate(made["attention_mask"][row]) if flag]
        ids = [made["input_ids"][row][index] for index in real]
        pieces = [opening[0], *tokenizer.convert_ids_to_tokens(ids)[1:]]
        spans = [tuple(made["offset_mapping"][row][index]) for index in real]
        special = [bool(made["special_tokens_mask"][row][index]) for index in real]
        layouts.append(lay_out(text, [opening[1], *ids[1:]], pieces, spans, special))
    # Made here and not by the tokenizer, which would follow a default device of the caller.
    tensors = {name: torch.tensor(made[name], device="cpu") for name in ("input_ids", "attention_mask")}
    return tensors, tuple(layouts)


def spelt_back(tokenizer: Any, ids: Tensor, mask: Tensor, *, opening: tuple[str, int]) -> tuple[TextLayout, ...]:
    """Layouts for ids that came without a text: the text is made from the word pieces, blanks between words."""
    special_ids = set(tokenizer.all_special_ids)
    layouts = []
    for row, known in zip(ids, mask, strict=True):
        kept = row[known.bool()].tolist()
        names = tokenizer.convert_ids_to_tokens(kept)
        # Ids behind the tokenizer's own vocabulary are begin tokens such as [ENC].
        special = [index == 0 or id_ in special_ids or id_ >= len(tokenizer) for index, id_ in enumerate(kept)]
        text, spans = "", []
        for name, flag in zip(names, special, strict=True):
            if flag:
                spans.append((0, 0))
                continue
            piece = name.removeprefix("##")
            text += piece if piece != name or not text else f" {piece}"
            spans.append((len(text) - len(piece), len(text)))
        pieces = [opening[0], *(name or f"id {id_}" for name, id_ in zip(names[1:], kept[1:], strict=True))]
        layouts.append(lay_out(text, [opening[1], *kept[1:]], pieces, spans, special))
    return tuple(layouts)
