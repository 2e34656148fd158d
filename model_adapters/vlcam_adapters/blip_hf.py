"""BLIP with an image-text matching head, as in Hugging Face transformers: `BlipForImageTextRetrieval`.

The vision tower runs once per image. The text encoder then runs twice: with cross-attention on the image tokens for
the matching head (stream `fusion`), and without for the contrastive projection.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from transformers import BlipForImageTextRetrieval, BlipProcessor

from vlcam.adapter import Inputs, ModelAdapter, Prefix, PreparedImages, PreparedTexts
from vlcam.anatomy import Anatomy, Block, Reading, StreamAnatomy
from vlcam.errors import AdapterError, InputError
from vlcam.images import SourceImage
from vlcam.targets import HeadKind
from vlcam_adapters.classifier import ImageSizes, given_pixels, on_model, pair
from vlcam_adapters.hf_loading import load_model, loading, placed
from vlcam_adapters.hf_processing import checked_ids, framing, processed, spelt_back, tokenised

FirstToken = Literal["enc", "cls"]

# Released checkpoints embed [DEC] and [ENC] behind the tokenizer's own tokens; some pad the table to a round number.
_SPARE_IDS = 128
_INTERPOLATE = "load it with interpolate_pos_encoding=True to interpolate its positions, which is then on record"
_POST_NORM = "the text blocks are post-norm: attention and FFN read the residual stream, not a LayerNorm of their own"


class BlipItmHF(ModelAdapter):
    """Adapter for `transformers.BlipForImageTextRetrieval`.

    The original BLIP opens a text that is matched with an image by [ENC]; the transformers class feeds [CLS] and so
    scores differently. vlcam feeds [ENC], as the weights were trained, unless `first_token="cls"` asks for the
    other. The contrastive pass keeps [CLS], in the original too.
    """

    library = "transformers"
    architectures: ClassVar[tuple[str, ...]] = ("BlipForImageTextRetrieval",)
    prefix: tuple[Prefix, ...] = ("cls",)
    heads: Mapping[str, HeadKind] = MappingProxyType({"itm": "binary", "contrastive": "cosine"})
    module: BlipForImageTextRetrieval

    def __init__(
        self,
        module: BlipForImageTextRetrieval,
        processor: BlipProcessor,
        *,
        first_token: FirstToken = "enc",
        image_size: tuple[int, int] | None = None,
        interpolate_pos_encoding: bool = False,
    ) -> None:
        """Hold a loaded model.

        Args:
            module: the model.
            processor: its processor, with a fast tokenizer.
            first_token: what opens the text for the matching head.
            image_size: height and width that images are resized to, in place of the processor's.
            interpolate_pos_encoding: whether other sizes than the trained one are taken, with interpolated positions.

        Raises:
            AdapterError: an option that the model cannot meet.
        """
        self.module = module
        self._tokenizer = processor.tokenizer
        self._image_processor = processor.image_processor
        if first_token not in ("enc", "cls"):
            raise AdapterError(f"first_token={first_token!r}: choose from 'enc', 'cls'")
        self._first_token = first_token
        self._interpolate = interpolate_pos_encoding
        self._frame = framing(self._image_processor, image_size)
        self._own_size = image_size is not None
        vision = module.config.vision_config
        self._sizes = ImageSizes(
            pair(vision.patch_size), pair(vision.image_size), interpolate_pos_encoding, _INTERPOLATE
        )
        self._check_vocabulary()
        self._encode_id = self._find_encode_id()
        self._sizes.check(self._frame.size)

    @classmethod
    def accepts(cls, module: nn.Module) -> bool:
        """Whether it is the transformers class."""
        return isinstance(module, BlipForImageTextRetrieval)

    @classmethod
    def wrap(cls, module: nn.Module, processor: Any, **options: Any) -> Self:
        """Make an adapter for a loaded model; options as in the constructor."""
        if not isinstance(module, BlipForImageTextRetrieval):
            raise AdapterError(f"expected BlipForImageTextRetrieval, found {type(module).__name__}")
        if not hasattr(processor, "tokenizer") or not hasattr(processor, "image_processor"):
            raise AdapterError(
                f"processor={type(processor).__name__}: BLIP needs its BlipProcessor, for the tokenizer and the image "
                "size; vlcam.wrap(model, processor)"
            )
        return cls(module, processor, **options)

    @classmethod
    def load(
        cls, source: str | Path, *, local: bool, dtype: str = "float32", device: str = "cpu", **options: Any
    ) -> Self:
        """Load a checkpoint and its processor to `device` in `dtype`; the other options as in the constructor."""
        with loading(source):
            module = load_model(BlipForImageTextRetrieval, source, local=local, dtype=dtype)
            # Pillow resizes as the original preprocessing did, and needs no torchvision.
            processor = BlipProcessor.from_pretrained(source, local_files_only=local, backend="pil")
        return cls(placed(module, device).eval(), processor, **options)

    @cached_property
    def anatomy(self) -> Anatomy:
        """Two streams: `vision`, pre-norm, and `fusion`, the text encoder with cross-attention."""
        vision, text = self.module.config.vision_config, self.module.config.text_config
        rows, columns = self._sizes.grid(self._frame.size)
        streams = (
            StreamAnatomy(
                "vision",
                tuple(_vision_block(layer) for layer in self.module.vision_model.encoder.layers),
                vision.hidden_size,
                vision.num_attention_heads,
                f"[CLS], then {rows} x {columns} patches in raster order",
                trunk=True,
            ),
            StreamAnatomy(
                "fusion",
                tuple(_fusion_block(layer) for layer in self.module.text_encoder.encoder.layer),
                text.hidden_size,
                text.num_attention_heads,
                f"{self._opening[0]}, word pieces, [SEP]; keys of CROSS: [CLS], then {rows} x {columns} patches",
                trunk=False,
            ),
        )
        return Anatomy(
            type(self.module).__name__,
            {stream.name: stream for stream in streams},
            ("itm: logit, probability, log-probability, margin", "contrastive: cosine"),
            (
                f"fusion lacks F1 and F4: {_POST_NORM}",
                "in the last fusion block only the first text token has a gradient; maps of words need an earlier one",
                "contrastive does not run cross-attention: CROSS and CONTEXT belong to itm",
            ),
        )

    @property
    def options(self) -> Mapping[str, Any]:
        """First token, image size and position interpolation."""
        return {
            "first_token": self._first_token,
            "image_size": list(self._frame.size) if self._own_size else None,
            "interpolate_pos_encoding": self._interpolate,
        }

    @property
    def attention(self) -> str:
        """What the configuration asks for; BLIP has only `eager`."""
        return str(self.module.config._attn_implementation)  # noqa: SLF001 - transformers has no public name for it

    def prepare_images(self, images: Sequence[SourceImage]) -> PreparedImages:
        """Run the model's own image processor."""
        pixels, placements, steps = processed(self._image_processor, self._frame, images)
        more = self._sizes.steps(self._frame.size)
        return PreparedImages(
            on_model(self.module, pixels),
            placements,
            tuple((*own, *more) for own in steps),
            self._sizes.grid(self._frame.size),
        )

    def accept_pixels(self, pixel_values: Tensor) -> PreparedImages:
        """Take normalised pixels [I, 3, H, W].

        Raises:
            InputError: a size that the model cannot take as it is.
        """
        return given_pixels(self.module, self._sizes, pixel_values)

    def prepare_texts(self, texts: Sequence[str]) -> PreparedTexts:
        """Tokenise with padding; text beyond the position table is cut off and listed."""
        limit = min(self.module.config.text_config.max_position_embeddings, self._tokenizer.model_max_length)
        tensors, layouts = tokenised(self._tokenizer, texts, limit, opening=self._opening)
        return PreparedTexts(self._on_device(tensors), layouts)

    def accept_ids(self, ids: Tensor, mask: Tensor | None) -> PreparedTexts:
        """Take token ids [P, T] that begin with [CLS] or [ENC]; a missing mask is read off the padding.

        Raises:
            InputError: ids or a mask that the model cannot take.
        """
        text = self.module.config.text_config
        rows, known = checked_ids(
            ids,
            mask,
            padding=self._tokenizer.pad_token_id,
            table=text.vocab_size,
            limit=text.max_position_embeddings,
        )
        openings = {self._tokenizer.cls_token_id, self._opening[1]}
        if not set(rows[:, 0].tolist()) <= openings:
            raise InputError(
                f"input_ids begin with {rows[:, 0].tolist()}: a text is opened by one of {sorted(openings)}"
            )
        tensors = {"input_ids": rows.clone(), "attention_mask": known.long()}
        return PreparedTexts(self._on_device(tensors), spelt_back(self._tokenizer, rows, known, opening=self._opening))

    def display(self, pixel_values: Tensor) -> Tensor:
        """Undo the processor's normalisation."""
        mean, std = (
            pixel_values.new_tensor(values)[:, None, None]
            for values in (self._image_processor.image_mean, self._image_processor.image_std)
        )
        return pixel_values * std + mean

    def trunk(self, inputs: Inputs) -> Tensor:
        """The vision tower with its final LayerNorm: [I, 1 + h * w, D]."""
        made = self.module.vision_model(
            pixel_values=inputs.images.pixel_values, interpolate_pos_encoding=self._interpolate
        )
        tokens: Tensor = made.last_hidden_state
        return tokens

    def head(self, name: str, shared: Tensor, inputs: Inputs) -> Tensor:
        """`itm`: logits [P, 2] of (no match, match). `contrastive`: cosine [P] of the two projections."""
        ids, mask = _tensors(inputs)
        encoder, module, opened = self.module.text_encoder, self.module, ids.clone()
        if name == "itm":
            opened[:, 0] = self._opening[1]
            fused = encoder(input_ids=opened, attention_mask=mask, encoder_hidden_states=shared).last_hidden_state
            logits: Tensor = module.itm_head(fused[:, 0])
            return logits
        opened[:, 0] = self._tokenizer.cls_token_id
        plain = encoder(input_ids=opened, attention_mask=mask).last_hidden_state[:, 0]
        image = normalize(module.vision_proj(shared[:, 0]), dim=-1)
        return (image * normalize(module.text_proj(plain), dim=-1)).sum(-1)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Project an image's tokens to keys and values once for all its texts, while the model runs."""
        with ExitStack() as stack:
            for layer in self.module.text_encoder.encoder.layer:
                attention = layer.crossattention.self
                for projection in (attention.key, attention.value):
                    for handle in _share_rows(projection):
                        stack.callback(handle.remove)
            yield

    @property
    def _opening(self) -> tuple[str, int]:
        """Piece and id of the token that opens a text for the matching head."""
        if self._encode_id is None:
            return "[CLS]", int(self._tokenizer.cls_token_id)
        return "[ENC]", self._encode_id

    def _find_encode_id(self) -> int | None:
        """The id of [ENC]: the tokenizer's, or the second one behind the tokenizer's own, as in released weights."""
        if self._first_token == "cls":
            return None
        found = self._tokenizer.get_vocab().get("[ENC]", len(self._tokenizer) + 1)
        if found < self.module.config.text_config.vocab_size:
            return int(found)
        raise AdapterError(
            f"first_token='enc': [ENC] would have id {found}, but the model embeds "
            f"{self.module.config.text_config.vocab_size} tokens; this checkpoint has no [ENC], use first_token='cls'"
        )

    def _check_vocabulary(self) -> None:
        """Ids of another vocabulary would be explained as if they were right."""
        words, table = len(self._tokenizer), self.module.config.text_config.vocab_size
        if not words <= table < words + _SPARE_IDS:
            raise AdapterError(
                f"a tokenizer of {words} tokens and a model that embeds {table} do not belong together; is the "
                "tokenizer's file missing?"
            )

    def _on_device(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        device = next(self.module.parameters()).device
        return {name: tensor.to(device) for name, tensor in tensors.items()}


def _tensors(inputs: Inputs) -> tuple[Tensor, Tensor]:
    if inputs.texts is None:
        raise InputError("BLIP scores an image with a text, but no text was given")
    rows = list(inputs.text_of)
    return inputs.texts.tensors["input_ids"][rows], inputs.texts.tensors["attention_mask"][rows]


def _vision_block(layer: Any) -> Block:
    return Block(
        {
            "F1": Reading(layer.layer_norm1, "output"),
            "F2": Reading(layer.self_attn, "attention"),
            "F3_HEADS": Reading(layer.self_attn.projection, "input"),
            "F3": Reading(layer.self_attn, "output"),
            "F4": Reading(layer.layer_norm2, "output"),
            "F5": Reading(layer.mlp, "output"),
            "F6": Reading(layer, "output"),
        }
    )


def _fusion_block(layer: Any) -> Block:
    return Block(
        {
            "F2": Reading(layer.attention.self, "attention"),
            "F3_HEADS": Reading(layer.attention.self, "output"),
            "F3": Reading(layer.attention.output.dense, "output"),
            "CROSS": Reading(layer.crossattention.self, "attention"),
            "CONTEXT": Reading(layer.crossattention.self, "keyword", "encoder_hidden_states"),
            "F5": Reading(layer.output.dense, "output"),
            "F6": Reading(layer, "output"),
        },
        {"F1": _POST_NORM, "F4": _POST_NORM},
    )


def _share_rows(projection: nn.Module) -> list[torch.utils.hooks.RemovableHandle]:
    """Hooks that project one row for a batch whose rows are one tensor expanded, and expand the result."""
    rows: list[int] = []
    owner = threading.get_ident()

    def keep_one(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if threading.get_ident() != owner:
            return args
        (tokens,) = args
        # A row of its own gradient per text must not be shared.
        shared = len(tokens) > 1 and tokens.stride(0) == 0 and not tokens.requires_grad
        rows.append(len(tokens) if shared else 0)
        return (tokens[:1],) if shared else args

    def give_all(_: nn.Module, __: tuple[Tensor, ...], output: Tensor) -> Tensor:
        count = rows.pop() if threading.get_ident() == owner else 0
        return output.expand(count, *output.shape[1:]) if count else output

    return [projection.register_forward_pre_hook(keep_one), projection.register_forward_hook(give_all)]
