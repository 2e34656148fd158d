"""What Hugging Face processors do, as records and layouts: image steps with their numbers, tokens with their spans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vlcam.errors import AdapterError, InputError
from vlcam.geometry import Placement
from vlcam.images import SourceImage
from vlcam.text import TextLayout, lay_out

_KNOWN_SWITCHES = {"do_resize", "do_center_crop", "do_rescale", "do_normalize", "do_convert_rgb", "do_reduce_labels"}
_KNOWN_PROCESSORS = {
    *("ViTImageProcessor", "DeiTImageProcessor", "BeitImageProcessor", "BitImageProcessor", "CLIPImageProcessor"),
    *("BlipImageProcessor", "SegformerImageProcessor", "SiglipImageProcessor"),
}


@dataclass(frozen=True)
class Framing:
    """How a processor brings an image to the model's frame: resize it, then cut out the centre.

    Attributes:
        resize: (height, width) whatever the proportions, or the length of the shorter side.
        crop: (height, width) of the centre that is kept; None where everything is.
    """

    resize: tuple[int, int] | int
    crop: tuple[int, int] | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the model's input."""
        if self.crop is not None:
            return self.crop
        return (self.resize, self.resize) if isinstance(self.resize, int) else self.resize

    def resized(self, original: tuple[int, int]) -> tuple[int, int]:
        """Height and width of an image after the resize; the longer side is rounded down."""
        if isinstance(self.resize, tuple):
            return self.resize
        shorter, longer = sorted(original)
        long = self.resize * longer // shorter
        return (self.resize, long) if original[0] == shorter else (long, self.resize)

    def corner(self, original: tuple[int, int]) -> tuple[int, int]:
        """Top and left of the crop within the resized image."""
        height, width = self.resized(original)
        return (height - self.size[0]) // 2, (width - self.size[1]) // 2

    def placement(self, original: tuple[int, int]) -> Placement:
        """Which part of an image of that height and width the model sees."""
        if self.crop is None:
            return Placement.squashed(original, self.size)
        return Placement.cropped(original, self.resized(original), self.crop, self.corner(original))

    def arguments(self) -> dict[str, Any]:
        """What a processor is called with to frame images like this."""
        if isinstance(self.resize, int):
            size = {"shortest_edge": self.resize}
        else:
            size = {"height": self.resize[0], "width": self.resize[1]}
        if self.crop is None:
            return {"size": size, "do_center_crop": False}
        return {"size": size, "do_center_crop": True, "crop_size": {"height": self.crop[0], "width": self.crop[1]}}


def framing(processor: Any, image_size: Any) -> Framing:
    """How an image processor frames images; with `image_size`, resized to that height and width and not cut.

    Raises:
        AdapterError: a processor that does anything else to the frame, or no pair of whole numbers.
    """
    odd = _odd_steps(processor)
    found = _own_framing(processor) if image_size is None else Framing(whole_pixels(image_size))
    if odd or found is None:
        cut = dict(processor.crop_size) if getattr(processor, "do_center_crop", None) else None
        raise AdapterError(
            f"{type(processor).__name__} with do_resize={processor.do_resize}, size={dict(processor.size)}, "
            f"crop={cut}, {', '.join(odd) or 'nothing else'}: this adapter knows processors that resize to a fixed "
            "height and width, or resize the shorter side and cut out a centre, no larger than that, and do nothing "
            "else to the frame; give such a processor, or images that are preprocessed"
        )
    return found


def whole_pixels(image_size: Any) -> tuple[int, int]:
    """An `image_size` as the user gave it, checked.

    Raises:
        AdapterError: no pair of whole numbers.
    """
    if not isinstance(image_size, (list, tuple)) or len(image_size) != 2 or not all(type(n) is int for n in image_size):
        raise AdapterError(f"image_size={image_size!r}: give (height, width) in whole pixels")
    return image_size[0], image_size[1]


def per_channel(value: Any) -> list[float]:
    """Mean or standard deviation of three channels; processors may give one number for all."""
    return [float(value)] * 3 if isinstance(value, (int, float)) else [float(item) for item in value]


def processed(
    processor: Any, frame: Framing, images: Sequence[SourceImage]
) -> tuple[Tensor, tuple[Placement, ...], tuple[tuple[dict[str, Any], ...], ...]]:
    """Run an image processor: pixels [I, 3, H, W], and for each image its placement and its steps.

    Raises:
        AdapterError: the processor did something else than its settings say.
    """
    # As numpy arrays: tensors made by the processor would follow a default device of the caller.
    made = processor(images=[image.rgb for image in images], return_tensors="np", **frame.arguments())
    pixels = torch.from_numpy(np.asarray(made["pixel_values"]))
    if pixels.shape != (len(images), 3, *frame.size):
        raise AdapterError(
            f"{type(processor).__name__} made {tuple(pixels.shape)} of {len(images)} images, expected "
            f"{(len(images), 3, *frame.size)}: it does something that its settings do not say"
        )
    placements = tuple(frame.placement(image.size) for image in images)
    return pixels, placements, tuple(image_steps(processor, frame, image.size) for image in images)


def image_steps(processor: Any, frame: Framing, original: tuple[int, int]) -> tuple[dict[str, Any], ...]:
    """The steps of an image processor for an image of that height and width, with every number."""
    keeps = isinstance(frame.resize, int)
    resize = {"step": "resize", "to": list(frame.resized(original)), "resample": _resample(processor)}
    steps: list[dict[str, Any]] = [
        {"step": "processor", "class": type(processor).__name__},
        resize | {"keeps_proportions": keeps} | ({"shortest_edge": frame.resize} if keeps else {}),
    ]
    if frame.crop is not None:
        steps.append({"step": "center_crop", "to": list(frame.crop), "corner": list(frame.corner(original))})
    if processor.do_rescale:
        steps.append({"step": "rescale", "factor": processor.rescale_factor})
    if processor.do_normalize:
        mean, std = per_channel(processor.image_mean), per_channel(processor.image_std)
        steps.append({"step": "normalize", "mean": mean, "std": std})
    return tuple(steps)


def _own_framing(processor: Any) -> Framing | None:
    """The framing that a processor's settings describe; None where they describe another kind."""
    size = {name: length for name, length in dict(processor.size).items() if length is not None}
    resize: tuple[int, int] | int
    if size.keys() == {"height", "width"}:
        resize = size["height"], size["width"]
    elif size.keys() == {"shortest_edge"}:
        resize = size["shortest_edge"]
    else:
        return None
    if not getattr(processor, "do_center_crop", None):
        return None if isinstance(resize, int) else Framing(resize)
    cut = dict(processor.crop_size)
    if cut.keys() != {"height", "width"}:
        return None
    crop = cut["height"], cut["width"]
    room = (resize, resize) if isinstance(resize, int) else resize
    # A larger crop pads, and the two backends of transformers do so half a pixel apart.
    return Framing(resize, crop) if crop[0] <= room[0] and crop[1] <= room[1] else None


def _odd_steps(processor: Any) -> list[str]:
    """Settings that move or change pixels in a way that this module does not know."""
    odd = [] if processor.do_resize else ["no resize"]
    switches = [name for name in vars(processor) if name.startswith("do_") and getattr(processor, name)]
    odd += [name for name in switches if name not in _KNOWN_SWITCHES]
    kinds = {kind.__name__.removesuffix("Pil").removesuffix("Fast") for kind in type(processor).__mro__}
    return odd if kinds & _KNOWN_PROCESSORS else [*odd, "an unknown class"]


def _resample(processor: Any) -> str:
    found = processor.resample
    named = found if hasattr(found, "name") else Image.Resampling(2 if found is None else found)
    return str(named.name).lower()


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
