"""How the pairs of a call lay beside each other: on record, and laid so again with copies of one of them.

Sums of floats depend on the shape of a batch, and hardly on what else is in it: a row of a matrix product is rounded by
the kernel that the shape selects. So one pair comes out bit for bit in a batch of the same shape, whose other pairs, of
which its file knows nothing, are copies of itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from vlcam.adapter import Inputs, ModelAdapter, PreparedImages, PreparedTexts
from vlcam.pairing import Pairs

__all__ = ["batch_record", "in_batch"]


def batch_record(pairs: Pairs, pair: int, variants: int | None) -> dict[str, Any]:
    """The shape of a call, and where a pair stood in it.

    Args:
        pairs: of the call.
        pair: which one.
        variants: how many ran at once, of a recipe that asks the model again.
    """
    inputs = pairs.inputs
    return {
        "pair": pair,
        "image_of": list(inputs.image_of),
        "text_of": list(inputs.text_of),
        "texts": 0 if inputs.texts is None else len(inputs.texts.layouts),
        "compared": [] if pairs.compared is None else pairs.compared.all(0).nonzero()[:, 0].tolist(),
        "tokens": _width(inputs.texts),
        "answer_tokens": _width(inputs.answers),
        "variants": variants,
    }


def in_batch(adapter: ModelAdapter, pairs: Pairs, record: Mapping[str, Any]) -> Pairs:
    """One pair in a batch as `batch_record` stated it: copies of its image, of its text and of its answer.

    Texts that it is compared with stand where they stood, so that there may be no others in `pairs`.

    Args:
        adapter: the model's.
        pairs: a single one.
        record: the shape.
    """
    inputs = pairs.inputs
    image_of, text_of = tuple(record["image_of"]), tuple(record["text_of"])
    images = max(image_of) + 1
    texts, compared = inputs.texts, None
    if texts is not None:
        slots = _slots(record, len(texts.layouts))
        texts = _copied(_as_wide(texts, record["tokens"], adapter.prepare_texts), slots)
        compared = torch.zeros(len(image_of), len(slots), dtype=torch.bool, device="cpu")
        compared[:, list(record["compared"])] = True
        compared[range(len(text_of)), list(text_of)] = True
    answers = inputs.answers
    if answers is not None:
        wide = _as_wide(answers, record["answer_tokens"], adapter.prepare_answers)
        answers = _copied(wide, [0] * len(image_of))
    return replace(
        pairs,
        inputs=Inputs(_repeated(inputs.images, images), texts, image_of, text_of, answers=answers),
        images=pairs.images * images,
        attachments=pairs.attachments * images,
        compared=compared,
    )


def _width(texts: PreparedTexts | None) -> int | None:
    return None if texts is None else int(next(iter(texts.tensors.values())).shape[1])


def _slots(record: Mapping[str, Any], known: int) -> list[int]:
    """For each text of the batch which of the known ones it is: its own is the first, those compared with follow."""
    slots, others = [0] * record["texts"], iter(range(1, known))
    for place in record["compared"]:
        if place != record["text_of"][record["pair"]]:
            slots[place] = next(others, 0)
    return slots


def _as_wide(texts: PreparedTexts, width: int, prepare: Callable[[Sequence[str]], PreparedTexts]) -> PreparedTexts:
    """Texts with the padding that they had beside a longer one: one is put beside them, and taken away again."""
    if texts.full or _width(texts) == width:
        return texts
    strings = [layout.text for layout in texts.layouts]
    beside = prepare([*strings, " ".join(strings[:1] * width)]).tensors
    return replace(texts, tensors={name: tensor[: len(strings), :width] for name, tensor in beside.items()})


def _copied(texts: PreparedTexts, rows: Sequence[int]) -> PreparedTexts:
    return replace(
        texts,
        tensors={name: tensor[list(rows)] for name, tensor in texts.tensors.items()},
        layouts=tuple(texts.layouts[row] for row in rows),
        pooled=tuple(texts.pooled[row] for row in rows) if texts.pooled else (),
    )


def _repeated(images: PreparedImages, count: int) -> PreparedImages:
    return replace(
        images,
        pixel_values=images.pixel_values.repeat(count, 1, 1, 1),
        placements=images.placements * count,
        steps=images.steps * count,
    )
