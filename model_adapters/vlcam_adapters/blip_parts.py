"""What the adapters of Hugging Face's BLIP share: images and the vision tower, texts, what opens them, writing."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, get_args

import torch
from torch import Tensor, nn
from transformers import BlipProcessor, GenerationConfig

from vlcam.adapter import Inputs, ModelAdapter, Prefix, PreparedImages, PreparedTexts
from vlcam.anatomy import Block, Reading, StreamAnatomy
from vlcam.errors import AdapterError, InputError
from vlcam.images import SourceImage
from vlcam_adapters.blip_blocks import fusion_block, share_rows
from vlcam_adapters.classifier import ImageSizes, given_pixels, pair, processed_pixels
from vlcam_adapters.hf_loading import load_model, loading, placed
from vlcam_adapters.hf_processing import checked_ids, framing, processed, spelt_back, tokenised

__all__ = ["BlipAdapter", "FirstToken", "Opening", "encoding", "own_rows", "writing"]

FirstToken = Literal["enc", "cls"]
Opening = tuple[str, int]
"""Piece and id of the token that opens a text."""

# Released checkpoints embed [DEC] and [ENC] behind the tokenizer's own tokens; some pad the table to a round number.
_SPARE_IDS = 128
_INTERPOLATE = "load it with interpolate_pos_encoding=True to interpolate its positions, which is then on record"


class BlipAdapter(ModelAdapter):
    """Base of the adapters of BLIP models: the vision tower is the trunk, text looks at its tokens in every block.

    A family adds its `family`, `heads`, `anatomy`, `opening`, `fusion_blocks` and `head`.

    Attributes:
        family: the class of the model.
        processor: the class of its processor.
        opening: the token that opens a text.
    """

    library = "transformers"
    prefix: tuple[Prefix, ...] = ("cls",)
    family: ClassVar[Any]
    processor: ClassVar[Any] = BlipProcessor
    module: Any
    opening: Opening

    def __init__(
        self,
        module: nn.Module,
        processor: BlipProcessor,
        *,
        image_size: tuple[int, int] | None = None,
        interpolate_pos_encoding: bool = False,
    ) -> None:
        """Hold a loaded model.

        Args:
            module: the model.
            processor: its processor, with a fast tokenizer.
            image_size: height and width that images are resized to, in place of the processor's.
            interpolate_pos_encoding: whether other sizes than the trained one are taken, with interpolated positions.

        Raises:
            AdapterError: an option that the model cannot meet, or a tokenizer that does not belong to it.
        """
        self.module = module
        self._tokenizer = processor.tokenizer
        self._image_processor = processor.image_processor
        self._interpolate = interpolate_pos_encoding
        self._frame = framing(self._image_processor, image_size)
        self._own_size = image_size is not None
        vision = self.module.config.vision_config
        self._sizes = ImageSizes(
            pair(vision.patch_size), pair(vision.image_size), interpolate_pos_encoding, _INTERPOLATE
        )
        self._check_vocabulary()
        self._sizes.check(self._frame.size)

    @classmethod
    def accepts(cls, module: nn.Module) -> bool:
        """Whether it is the transformers class."""
        return isinstance(module, cls.family)

    @classmethod
    def wrap(cls, module: nn.Module, processor: Any, **options: Any) -> Self:
        """Make an adapter for a loaded model; options as in the constructor."""
        if not isinstance(module, cls.family):
            raise AdapterError(f"expected {cls.family.__name__}, found {type(module).__name__}")
        if not hasattr(processor, "tokenizer") or not hasattr(processor, "image_processor"):
            raise AdapterError(
                f"processor={type(processor).__name__}: BLIP needs its processor, for the tokenizer and the image "
                f"size: vlcam.wrap(model, {cls.processor.__name__}.from_pretrained(...))"
            )
        return cls(module, processor, **options)

    @classmethod
    def load(
        cls, source: str | Path, *, local: bool, dtype: str = "float32", device: str = "cpu", **options: Any
    ) -> Self:
        """Load a checkpoint and its processor to `device` in `dtype`; the other options as in the constructor."""
        with loading(source):
            module = load_model(cls.family, source, local=local, dtype=dtype)
            # Pillow resizes as the original preprocessing did, and needs no torchvision.
            processor = cls.processor.from_pretrained(source, local_files_only=local, backend="pil")
        return cls(placed(module, device).eval(), processor, **options)

    @property
    @abstractmethod
    def fusion_blocks(self) -> Sequence[Any]:
        """The modules of the blocks in which text looks at the image."""

    @property
    def text_config(self) -> Any:
        """The configuration of what reads or writes text."""
        return self.module.config.text_config

    @property
    def projections(self) -> Sequence[Any]:
        """What projects image tokens to keys and values."""
        inner = (layer.crossattention.self for layer in self.fusion_blocks)
        return [projection for attention in inner for projection in (attention.key, attention.value)]

    @property
    def options(self) -> Mapping[str, Any]:
        """Image size and position interpolation."""
        return {
            "image_size": list(self._frame.size) if self._own_size else None,
            "interpolate_pos_encoding": self._interpolate,
        }

    @property
    def attention(self) -> str:
        """What the configuration asks for; BLIP has only `eager`."""
        return str(self.module.config._attn_implementation)  # noqa: SLF001 - transformers has no public name for it

    def streams(self, tokens: str, *, tells_next: bool = False) -> dict[str, StreamAnatomy]:
        """`vision`, pre-norm, and `fusion`, text with cross-attention; `tokens` are those of the text, in words."""
        text, (rows, columns) = self.text_config, self._sizes.grid(self._frame.size)
        fusion = StreamAnatomy(
            "fusion",
            tuple(fusion_block(layer) for layer in self.fusion_blocks),
            text.hidden_size,
            text.num_attention_heads,
            f"{tokens}; keys of CROSS: [CLS], then {rows} x {columns} patches",
            trunk=False,
            run_by=tuple(name for name in self.heads if name != "contrastive"),  # which reads text by itself
            tells_next=tells_next,
        )
        return {"vision": self.vision_stream(), "fusion": fusion}

    def vision_stream(self) -> StreamAnatomy:
        """The vision tower, pre-norm."""
        vision, (rows, columns) = self.module.config.vision_config, self._sizes.grid(self._frame.size)
        return StreamAnatomy(
            "vision",
            tuple(_vision_block(layer) for layer in self.module.vision_model.encoder.layers),
            vision.hidden_size,
            vision.num_attention_heads,
            f"[CLS], then {rows} x {columns} patches in raster order",
            trunk=True,
        )

    def prepare_images(self, images: Sequence[SourceImage]) -> PreparedImages:
        """Run the model's own image processor."""
        found = processed(self._image_processor, self._frame, images)
        return processed_pixels(self.module, self._sizes, self._frame.size, *found)

    def accept_pixels(self, pixel_values: Tensor) -> PreparedImages:
        """Take normalised pixels [I, 3, H, W].

        Raises:
            InputError: a size that the model cannot take as it is.
        """
        return given_pixels(self.module, self._sizes, pixel_values)

    def prepare_texts(self, texts: Sequence[str]) -> PreparedTexts:
        """Tokenise with padding; text beyond the position table is cut off and listed."""
        return self.tokenised(texts, self.opening)

    def tokenised(self, texts: Sequence[str], opening: Opening) -> PreparedTexts:
        """As `prepare_texts`, for texts that are opened by that token."""
        tensors, layouts = tokenised(self._tokenizer, texts, self.longest, opening=opening)
        return PreparedTexts(self._on_device(tensors), layouts)

    def accept_ids(self, ids: Tensor, mask: Tensor | None) -> PreparedTexts:
        """Take token ids [P, T] that begin with [CLS] or the opening token; a missing mask is read off the padding.

        Raises:
            InputError: ids or a mask that the model cannot take.
        """
        text = self.text_config
        rows, known = checked_ids(
            ids,
            mask,
            padding=self._tokenizer.pad_token_id,
            table=text.vocab_size,
            limit=text.max_position_embeddings,
        )
        openings = {self._tokenizer.cls_token_id, self.opening[1]}
        if not set(rows[:, 0].tolist()) <= openings:
            raise InputError(
                f"input_ids begin with {rows[:, 0].tolist()}: a text is opened by one of {sorted(openings)}"
            )
        tensors = {"input_ids": rows.clone(), "attention_mask": known.long()}
        return PreparedTexts(self._on_device(tensors), spelt_back(self._tokenizer, rows, known, opening=self.opening))

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

    @contextmanager
    def running(self) -> Iterator[None]:
        """Project an image's tokens to keys and values once for all its texts, while the model runs."""
        with ExitStack() as stack:
            for projection in self.projections:
                for handle in share_rows(projection):
                    stack.callback(handle.remove)
            yield

    @property
    def longest(self) -> int:
        """Most tokens of a text, those that open and end it among them."""
        return int(min(self.text_config.max_position_embeddings, self._tokenizer.model_max_length))

    def written(self, decoder: Any, opening: Opening, seen: Tensor, mask: Tensor, count: int) -> list[str]:
        """What a decoder writes: always the likeliest token, until that is the end token or `count` are written.

        What its own generation settings say besides (a least length, a penalty for repetition) holds.

        Args:
            decoder: the model's decoder.
            opening: the token that opens what is written.
            seen: what it attends to, [P, K, D].
            mask: which of these are no padding, [P, K].
            count: most tokens, the end token among them; fewer where the position table ends.
        """
        first = torch.full((len(seen), 1), opening[1], device=seen.device)
        how = GenerationConfig(
            max_length=min(1 + count, self.longest - 1),
            do_sample=False,
            num_beams=1,
            return_dict_in_generate=False,
            eos_token_id=self._tokenizer.sep_token_id,
            pad_token_id=self._tokenizer.pad_token_id,
        )
        made = decoder.generate(
            first,
            generation_config=how,
            attention_mask=torch.ones_like(first),
            encoder_hidden_states=seen,
            encoder_attention_mask=mask,
        )
        return list(self._tokenizer.batch_decode(made, skip_special_tokens=True))

    def _check_vocabulary(self) -> None:
        """Ids of another vocabulary would be explained as if they were right."""
        words, table = len(self._tokenizer), self.text_config.vocab_size
        if not words <= table < words + _SPARE_IDS:
            raise AdapterError(
                f"a tokenizer of {words} tokens and a model that embeds {table} do not belong together; is the "
                "tokenizer's file missing?"
            )

    def _on_device(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        device = next(self.module.parameters()).device
        return {name: tensor.to(device) for name, tensor in tensors.items()}


def encoding(tokenizer: Any, config: Any, first_token: FirstToken) -> Opening:
    """What opens a text that is encoded while it looks at the image.

    The id of [ENC] is the tokenizer's, or the second one behind the tokenizer's own, as in released weights.

    Args:
        tokenizer: the model's.
        config: of the text blocks.
        first_token: which of the two.

    Raises:
        AdapterError: another word, or a model that embeds no [ENC].
    """
    if first_token not in get_args(FirstToken):
        raise AdapterError(f"first_token={first_token!r}: choose from 'enc', 'cls'")
    if first_token == "cls":
        return "[CLS]", int(tokenizer.cls_token_id)
    found = tokenizer.get_vocab().get("[ENC]", len(tokenizer) + 1)
    if found < config.vocab_size:
        return "[ENC]", int(found)
    raise AdapterError(
        f"first_token='enc': [ENC] would have id {found}, but the model embeds "
        f"{config.vocab_size} tokens; this checkpoint has no [ENC], use first_token='cls'"
    )


def writing(tokenizer: Any, config: Any) -> Opening:
    """What opens a text that is written: [DEC], by the id in the configuration of the text blocks.

    Args:
        tokenizer: the model's.
        config: of the text blocks.

    Raises:
        AdapterError: the configuration names no token that the model embeds.
    """
    found = config.bos_token_id
    if found is None or not 0 <= found < config.vocab_size:
        raise AdapterError(
            f"bos_token_id={found} in the text configuration: it names the token that opens what is written, and the "
            f"model embeds {config.vocab_size}"
        )
    return (tokenizer.convert_ids_to_tokens(found) if found < len(tokenizer) else "[DEC]"), int(found)


def own_rows(prepared: PreparedTexts | None, rows: Sequence[int], opening: Opening, missing: str) -> tuple[Tensor, ...]:
    """Ids and mask of the texts of P pairs, [P, N] each, opened by that token.

    Raises:
        InputError: there are none; `missing` says so.
    """
    if prepared is None:
        raise InputError(missing)
    ids, mask = (prepared.tensors[name][list(rows)] for name in ("input_ids", "attention_mask"))
    opened = ids.clone()
    opened[:, 0] = opening[1]
    return opened, mask


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
