"""What Hugging Face processors do, as records and layouts: image steps with their numbers, tokens with their spans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from vlcam.errors import AdapterError, InputError
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


def resize_target(processor: Any, image_size: Any) -> tuple[int, int]:
    """Height and width that a processor resizes to, or those that were asked for.

    Raises:
        AdapterError: a processor that crops, pads, or does not resize to a fixed size, or no pair of whole numbers.
    """
    size = dict(processor.size)
    odd = [flag for flag in ("do_center_crop", "do_pad") if getattr(processor, flag, False)]
    if odd or not processor.do_resize or not {"height", "width"} <= size.keys():
        raise AdapterError(
            f"{type(processor).__name__} with do_resize={processor.do_resize}, size={size}, {odd or 'no crop'}: this "
            "adapter knows processors that resize to a fixed height and width and do nothing else to the frame"
        )
    wanted = image_size if image_size is not None else (size["height"], size["width"])
    if not isinstance(wanted, (list, tuple)) or len(wanted) != 2 or not all(isinstance(n, int) for n in wanted):
        raise AdapterError(f"image_size={image_size!r}: give (height, width) in whole pixels")
    return wanted[0], wanted[1]


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
        padding_side="right",
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
        truncated = bool(made.encodings[row].overflowing)
        layouts.append(lay_out(text, [opening[1], *ids[1:]], pieces, spans, special, truncated=truncated))
    # Made here and not by the tokenizer, which would follow a default device of the caller.
    tensors = {name: torch.tensor(made[name], device="cpu") for name in ("input_ids", "attention_mask")}
    return tensors, tuple(layouts)


def spelt_back(tokenizer: Any, ids: Tensor, mask: Tensor, *, opening: tuple[str, int]) -> tuple[TextLayout, ...]:
    """Layouts for ids that came without a text: the text is made from the word pieces, blanks between words."""
    special_ids = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
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


def checked_ids(ids: Tensor, mask: Tensor | None, *, padding: int, table: int, limit: int) -> tuple[Tensor, Tensor]:
    """Token ids [P, T] and mask [P, T] that a model can take; a missing mask is read off the padding.

    Args:
        ids: as the user gave them.
        mask: as the user gave it.
        padding: id of the padding token.
        table: number of ids that the model embeds.
        limit: most tokens of a text.

    Raises:
        InputError: types, shapes or ids that do not fit; padding that is not at the end.
    """
    rows = ids if ids.ndim == 2 else ids[None]
    if ids.is_floating_point() or rows.ndim != 2 or not 1 <= rows.shape[1] <= limit:
        raise InputError(
            f"input_ids of type {ids.dtype} and shape {tuple(ids.shape)}: give whole numbers [texts, tokens], "
            f"with 1 to {limit} tokens"
        )
    if int(rows.min()) < 0 or int(rows.max()) >= table:
        raise InputError(f"input_ids from {int(rows.min())} to {int(rows.max())}: the model embeds 0 to {table - 1}")
    known = rows != padding if mask is None else mask.bool()
    if known.ndim == 1:
        known = known[None]
    if known.shape != rows.shape:
        raise InputError(f"attention_mask {tuple(known.shape)} for input_ids {tuple(rows.shape)}: give one flag per id")
    if bool((known[:, 1:] & ~known[:, :-1]).any()) or not bool(known[:, 0].all()):
        raise InputError(
            "attention_mask: padding must stand at the end of each text; tokenise with padding_side='right'"
        )
    return rows, known
