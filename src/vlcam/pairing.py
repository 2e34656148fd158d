"""What users give (one or many images and texts, of any kind) as the pairs that the engine explains."""

from __future__ import annotations

import hashlib
from collections import UserDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vlcam.adapter import Inputs, ModelAdapter, PreparedImages, PreparedTexts
from vlcam.archive import Attachments
from vlcam.errors import InputError
from vlcam.images import SourceImage, open_image

__all__ = ["Pairs", "pair_up"]


@dataclass(frozen=True, eq=False)
class Pairs:
    """Pairs ready for the engine.

    Attributes:
        inputs: what the adapter runs.
        images: for each image, the picture for people and its record.
        attachments: for each image, what may travel in a file.
        many: whether the user gave a list, and gets one back.
    """

    inputs: Inputs
    images: tuple[tuple[Image.Image, dict[str, Any]], ...]
    attachments: tuple[Attachments, ...]
    many: bool


def pair_up(adapter: ModelAdapter, image: Any, text: Any, *, classes: int | None = None, strict: bool = False) -> Pairs:
    """Pair images with questions: one with one, one with many, many with one, or n with n in order.

    The questions are texts, or classes for a model that takes no text.

    Args:
        adapter: prepares both for its model.
        image: a path, bytes, PIL image or uint8 array; a float tensor [3, H, W] or [B, 3, H, W] that is already
            preprocessed; a list of any of the former; or a mapping with `pixel_values` and, if the model takes text,
            `input_ids`.
        text: a string, a list of strings; None where the mapping has `input_ids`, and for a model that takes none.
        classes: how many classes a list of them names; None where there was no list.
        strict: whether text beyond the model's limit is an error.

    Raises:
        InputError: nothing to pair, counts that do not fit, an empty text, or cut text with `strict`.
    """
    ids = mask = None
    if isinstance(image, (Mapping, UserDict)):  # transformers' BatchEncoding is a UserDict
        image, ids, mask = _from_mapping(image, text, with_text=adapter.takes_text)
    images, pictures, attachments, many = _images(adapter, image)
    if not adapter.takes_text:
        if text is not None:
            raise InputError(f"text={text!r}: this model takes no text; name a class instead, target=...")
        image_of = _image_of(len(pictures), 1 if classes is None else classes, "classes")
        return Pairs(Inputs(images, None, image_of), tuple(pictures), tuple(attachments), many or classes is not None)
    if ids is not None:
        texts, many = adapter.accept_ids(ids, mask), True
    else:
        given, several = _strings(text)
        many = many or several
        count = len(pictures) if len(given) == 1 else len(given)
        texts = adapter.prepare_texts(given * count if len(given) == 1 else given)
    image_of = _image_of(len(pictures), len(texts.layouts), "texts")
    _check_cut(texts, strict=strict)
    return Pairs(Inputs(images, texts, image_of), tuple(pictures), tuple(attachments), many)


def _from_mapping(batch: Any, text: Any, *, with_text: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    if with_text and text is not None:
        raise InputError("the batch has input_ids already; leave text out")
    missing = [key for key in ("pixel_values", *(["input_ids"] if with_text else [])) if key not in batch]
    if missing:
        raise InputError(f"the batch lacks {', '.join(missing)}; it has {', '.join(map(str, batch))}")
    pixels = _tensor("pixel_values", batch["pixel_values"])
    pixels = pixels if pixels.ndim == 4 else pixels[None]
    if not with_text:
        return pixels, None, None
    mask = batch.get("attention_mask")
    return pixels, _tensor("input_ids", batch["input_ids"]), None if mask is None else _tensor("attention_mask", mask)


def _tensor(name: str, value: Any) -> Tensor:
    """A tensor from what a processor returns: tensors, arrays, or lists."""
    try:
        return torch.as_tensor(value, device=None if isinstance(value, Tensor) else "cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{name} of the batch is no tensor ({error}); use return_tensors='pt', with padding") from None


def _images(
    adapter: ModelAdapter, image: Any
) -> tuple[PreparedImages, list[tuple[Image.Image, dict[str, Any]]], list[Attachments], bool]:
    many = isinstance(image, (list, tuple)) or (isinstance(image, Tensor) and image.ndim == 4)
    items = list(image) if many else [image]
    if not items:
        raise InputError("no image was given")
    if all(isinstance(item, Tensor) for item in items):
        return *_preprocessed(adapter, items), many
    if any(isinstance(item, Tensor) for item in items):
        raise InputError("the images mix tensors that are already preprocessed with others; give one kind")
    sources = [open_image(item) for item in items]
    prepared = adapter.prepare_images(sources)
    pictures = [(s.rgb, _image_record(s, steps)) for s, steps in zip(sources, prepared.steps, strict=True)]
    return prepared, pictures, [Attachments(image=s.encoded or s.rgb) for s in sources], many


def _preprocessed(
    adapter: ModelAdapter, items: Sequence[Tensor]
) -> tuple[PreparedImages, list[tuple[Image.Image, dict[str, Any]]], list[Attachments]]:
    shapes = {tuple(item.shape) for item in items}
    wrong = [item for item in items if item.ndim != 3 or len(item) != 3 or not item.is_floating_point()]
    if wrong or len(shapes) != 1:
        found = ", ".join(f"{item.dtype} {tuple(item.shape)}" for item in items)
        raise InputError(
            f"preprocessed images are float tensors [3, H, W] of one size, found {found}; give a uint8 array "
            "[H, W, 3] or a PIL image to have it preprocessed"
        )
    # A clone: a tensor made under inference_mode may not be part of a graph.
    prepared = adapter.accept_pixels(torch.stack([item.detach().clone() for item in items]))
    pictures, attachments = [], []
    for item, steps in zip(items, prepared.steps, strict=True):
        kept = item.detach().float().cpu()
        shown = (adapter.display(kept).clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
        source = open_image(np.ascontiguousarray(shown), name="preprocessed tensor")
        array = np.ascontiguousarray(kept.numpy(), np.float32)
        record = _image_record(source, steps) | {"pixels_sha256": hashlib.sha256(array.tobytes()).hexdigest()}
        pictures.append((source.rgb, record))
        attachments.append(Attachments(image=source.rgb, pixel_values=array))
    return prepared, pictures, attachments


def _image_record(source: SourceImage, steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "name": source.name,
        "sha256": source.sha256,
        "size": list(source.size),
        "steps": [*source.steps, *steps],
    }


def _strings(text: Any) -> tuple[list[str], bool]:
    many = isinstance(text, (list, tuple))
    given = list(text) if many else [text]
    if not given:
        raise InputError("no text was given")
    for item in given:
        if not isinstance(item, str):
            raise InputError(f"a text of type {type(item).__name__}: give a string, or a list of strings")
        if not item.strip():
            raise InputError(f"the text is empty ({item!r}); give at least one word")
    return given, many


def _image_of(images: int, questions: int, kind: str) -> tuple[int, ...]:
    if questions == 1:
        return tuple(range(images))
    if images == 1:
        return (0,) * questions
    if images == questions:
        return tuple(range(images))
    raise InputError(
        f"{images} images and {questions} {kind}: give one of either, or as many of one as of the other; pairs are "
        "made in order"
    )


def _check_cut(texts: PreparedTexts, *, strict: bool) -> None:
    for layout in texts.layouts:
        if strict and layout.cut_text:
            raise InputError(
                f"the text is longer than the model's {len(layout.ids)} tokens; cut off: {layout.cut_text}"
            )
