"""What users give (one or many images and texts, of any kind) as the pairs that the engine explains."""

from __future__ import annotations

import hashlib
from collections import UserDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vlcam.adapter import Inputs, ModelAdapter, PreparedImages, PreparedTexts
from vlcam.archive import Attachments
from vlcam.capture import as_found
from vlcam.errors import InputError
from vlcam.images import SourceImage, open_image
from vlcam.readers import OF_TEXTS

__all__ = ["Pairs", "pair_up"]


@dataclass(frozen=True, eq=False)
class Pairs:
    """Pairs ready for the engine.

    Attributes:
        inputs: what the adapter runs.
        images: for each image, the picture for people and its record.
        attachments: for each image, what may travel in a file.
        many: whether the user gave a list, and gets one back.
        compared: which texts each pair's own is compared with, [P, T], itself among them; None for a model without
            texts.
        written: whether the model wrote the caption, or the answers, itself.
    """

    inputs: Inputs
    images: tuple[tuple[Image.Image, dict[str, Any]], ...]
    attachments: tuple[Attachments, ...]
    many: bool
    compared: Tensor | None = None
    written: bool = False

    def others(self, pair: int) -> list[str]:
        """The texts that a pair's own is compared with, without itself."""
        inputs = self.inputs
        if inputs.texts is None or self.compared is None:
            return []
        layouts, own = inputs.texts.layouts, inputs.text_of[pair]
        return [layouts[k].text for k, taken in enumerate(self.compared[pair].tolist()) if taken and k != own]


def pair_up(
    adapter: ModelAdapter,
    image: Any,
    text: Any,
    *,
    classes: int | None = None,
    against: Sequence[str] | str | None = None,
    answer: Sequence[str] | str | None = None,
    strict: bool = False,
) -> Pairs:
    """Pair images with questions: one with one, one with many, many with one, or n with n in order.

    The questions are texts, or classes for a model that takes no text. Each distinct text is encoded once.

    Args:
        adapter: prepares both for its model.
        image: a path, bytes, PIL image or uint8 array; a float tensor [3, H, W] or [B, 3, H, W] that is already
            preprocessed; a list of any of the former; or a mapping with `pixel_values` and, if the model takes text,
            `input_ids`.
        text: a string, a list of strings; None where the mapping has `input_ids`, and for a model that takes none.
        classes: how many classes a list of them names; None where there was no list.
        against: other texts, which each pair's own is compared with; None for all texts of the call.
        answer: for a model that answers questions, the answer to each pair's, or one for all; None for its own.
        strict: whether text beyond the model's limit is an error.

    Raises:
        InputError: nothing to pair, counts that do not fit, an empty text, or cut text with `strict`.
    """
    ids = mask = None
    if isinstance(image, (Mapping, UserDict)):  # transformers' BatchEncoding is a UserDict
        shows = adapter.writes == "caption" and "input_ids" not in image  # images alone, whose captions are strings
        image, ids, mask = _from_mapping(image, text, with_text=adapter.takes_text and not shows)
    images, pictures, attachments, many = _images(adapter, image)
    shown = Pairs(Inputs(images, None, tuple(range(len(pictures)))), tuple(pictures), tuple(attachments), many)
    if not adapter.takes_text:
        return _with_classes(shown, text, against, classes)
    if against is not None and not set(adapter.heads.values()) & set(OF_TEXTS):
        raise InputError(f"against={against!r}: no score of this model compares a text with others; leave it out")
    if answer is not None and adapter.writes != "answer":
        raise InputError(f"answer={answer!r}: this model answers no questions")
    if text is None and ids is None and adapter.writes == "caption":
        made = _written(adapter, shown.inputs)
        shown, text = replace(shown, written=True), made if many else made[0]
    if ids is None:
        texts = _texts(adapter, text, against)
    elif against is None:
        found = adapter.accept_ids(ids, mask)
        own = _firsts(found)
        texts = found, own, tuple(dict.fromkeys(own)), True
    else:
        raise InputError("against=...: the batch has its texts as ids; put the others among them, or give strings")
    _check_cut(texts[0], strict=strict)
    return _with_answers(adapter, _with_texts(shown, *texts), answer, strict=strict)


def _with_classes(shown: Pairs, text: Any, against: Sequence[str] | str | None, classes: int | None) -> Pairs:
    if text is not None or against is not None:
        given = f"text={text!r}" if text is not None else f"against={against!r}"
        raise InputError(f"{given}: this model takes no text; name a class instead, target=...")
    image_of = _image_of(len(shown.images), 1 if classes is None else classes, "classes")
    inputs = replace(shown.inputs, image_of=image_of)
    return replace(shown, inputs=inputs, many=shown.many or classes is not None)


def _with_texts(
    shown: Pairs, texts: PreparedTexts, own: tuple[int, ...], others: tuple[int, ...], several: bool
) -> Pairs:
    """Pair images with texts: `own` are those that are asked for, `others` those that they are compared with."""
    image_of = _image_of(len(shown.images), len(own), "texts")
    text_of = own * len(image_of) if len(own) == 1 else own
    compared = torch.zeros(len(image_of), len(texts.layouts), dtype=torch.bool, device="cpu")
    compared[:, list(others or range(len(texts.layouts)))] = True
    compared[range(len(text_of)), list(text_of)] = True
    inputs = replace(shown.inputs, texts=texts, image_of=image_of, text_of=text_of)
    return replace(shown, inputs=inputs, many=shown.many or several, compared=compared)


def _with_answers(adapter: ModelAdapter, pairs: Pairs, answer: Sequence[str] | str | None, *, strict: bool) -> Pairs:
    if adapter.writes != "answer":
        return pairs
    answers = _written(adapter, pairs.inputs) if answer is None else _answers(answer, len(pairs.inputs.image_of))
    prepared = adapter.prepare_answers(answers)
    _check_cut(prepared, strict=strict)
    return replace(pairs, inputs=replace(pairs.inputs, answers=prepared), written=answer is None)


def _written(adapter: ModelAdapter, inputs: Inputs) -> list[str]:
    with as_found(adapter.module), torch.inference_mode(mode=False), torch.no_grad(), adapter.running():
        found = adapter.write(inputs)
    empty = [number for number, each in enumerate(found) if not each.strip()]
    if empty:
        raise InputError(f"the model wrote nothing for image {empty}; give the {adapter.writes} to be explained")
    return found


def _answers(answer: Sequence[str] | str, pairs: int) -> list[str]:
    given, _ = _strings(answer, blank=True)
    if not all(each.strip() for each in given):
        raise InputError(f"answer={answer!r}: an answer is empty; give at least one word, or leave it out")
    if len(given) not in (1, pairs):
        raise InputError(f"{len(given)} answers for {pairs} pairs: give one, or one for each")
    return given * pairs if len(given) == 1 else given


def _texts(
    adapter: ModelAdapter, text: Any, against: Sequence[str] | str | None
) -> tuple[PreparedTexts, tuple[int, ...], tuple[int, ...], bool]:
    """Each distinct text once, which of them are asked for and which compared with, and whether a list was given."""
    if text is None and adapter.writes == "answer":
        raise InputError("no question was given; this model answers questions about an image, give a string")
    strings, several = _strings(text)
    if against is not None and not isinstance(against, str) and not len(against):
        raise InputError("against=[]: there is no other text in it; give one, for example [''], or leave it out")
    others = [] if against is None else _strings(against, blank=True)[0]
    distinct = list(dict.fromkeys([*strings, *others]))
    texts = adapter.prepare_texts(distinct)
    firsts = _firsts(texts)
    own, compared = ([firsts[distinct.index(each)] for each in given] for given in (strings, others or distinct))
    return texts, tuple(own), tuple(dict.fromkeys(compared)), several


def _firsts(texts: PreparedTexts) -> tuple[int, ...]:
    """For each text the first one of the same tokens: as far as the model can tell they are one text."""
    known = [layout.ids for layout in texts.layouts]
    return tuple(map(known.index, known))


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
    # Stacked copies: a tensor made under inference_mode may not be part of a graph.
    prepared = adapter.accept_pixels(torch.stack([item.detach() for item in items]))
    pictures, attachments = [], []
    for item, steps in zip(items, prepared.steps, strict=True):
        kept = item.detach().float().cpu()
        shown = adapter.display(kept).clamp(0, 1).mul_(255).round_().to(torch.uint8)
        source = open_image(shown.permute(1, 2, 0).contiguous().numpy(), name="preprocessed tensor")
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


def _strings(text: Any, *, blank: bool = False) -> tuple[list[str], bool]:
    if text is None:
        raise InputError("no text was given: this model scores an image with a text, explain(image, text)")
    many = isinstance(text, (list, tuple))
    given = list(text) if many else [text]
    if not given:
        raise InputError("no text was given")
    for item in given:
        if not isinstance(item, str):
            raise InputError(f"a text of type {type(item).__name__}: give a string, or a list of strings")
        if not item.strip() and not blank:
            raise InputError(f"the text is empty ({item!r}); give at least one word")
        _check_encodable(item)
    return given, many


def _check_encodable(text: str) -> None:
    """Refuse what no tokenizer can read."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"the text {text!r} is no Unicode text: character {error.start} is half of a pair, as in text read "
            "with another encoding than it was written in; read it again, or leave the character out"
        ) from None


def _image_of(images: int, questions: int, kind: str) -> tuple[int, ...]:
    if questions == 1:
        return tuple(range(images))
    if images == 1:
        return (0,) * questions
    if images == questions:
        return tuple(range(images))
    raise InputError(
        f"{images} images and {questions} {kind}: give one of either, or as many of one as of the other; pairs are "
        "made in order; for all pairs call once for each image"
    )


def _check_cut(texts: PreparedTexts, *, strict: bool) -> None:
    for layout in texts.layouts:
        if strict and layout.cut_text:
            raise InputError(
                f"the text is longer than the model's {len(layout.ids)} tokens; cut off: {layout.cut_text}"
            )
