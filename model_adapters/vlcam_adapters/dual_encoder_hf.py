"""What CLIP and SigLIP of Hugging Face transformers share: an image tower and a text tower of pre-norm blocks.

Both towers run before image and text meet, each once per image or text.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Self

from torch import Tensor, nn
from torch.nn.functional import normalize
from transformers import PreTrainedModel

from vlcam.adapter import Inputs, ModelAdapter, PreparedImages, PreparedTexts
from vlcam.anatomy import Anatomy, Block, Reading, StreamAnatomy
from vlcam.errors import AdapterError, InputError
from vlcam.images import SourceImage
from vlcam_adapters.classifier import ImageSizes, given_pixels, pair, processed_pixels
from vlcam_adapters.clip_text import Pool, TowerTexts, check_tokenizer, read_back, tokenise
from vlcam_adapters.contrastive import NO_FUSION, pixel_statistics
from vlcam_adapters.hf_processing import framing, per_channel, processed

__all__ = ["DualEncoderHF"]

_RGB = 3
_INTERPOLATE = "load it with interpolate_pos_encoding=True to interpolate its positions, which is then on record"
_TARGETS = ("contrastive: cosine, logit, probability, log-probability, margin, difference, finer",)


class DualEncoderHF(ModelAdapter):
    """Base of the adapters of `transformers` models with two towers of pre-norm blocks.

    Attributes:
        kind: the class that it explains.
        parts: classes of the same family that it knows, and refuses with a reason.
        full: whether texts are padded to the context length.
    """

    library = "transformers"
    kind: ClassVar[type[PreTrainedModel]]
    parts: ClassVar[tuple[type[PreTrainedModel], ...]]
    full: ClassVar[bool] = False
    module: PreTrainedModel

    def __init__(
        self,
        module: PreTrainedModel,
        processor: Any,
        *,
        image_size: tuple[int, int] | None = None,
        interpolate_pos_encoding: bool = False,
        image_mean: Sequence[float] | None = None,
        image_std: Sequence[float] | None = None,
    ) -> None:
        """Hold a loaded model.

        Args:
            module: the model.
            processor: its processor, with a fast tokenizer.
            image_size: height and width that images are resized to, in place of the processor's size and crop.
            interpolate_pos_encoding: whether other sizes than the trained one are taken, with interpolated positions.
            image_mean: mean per channel in place of the processor's, which is what the model was trained with.
            image_std: standard deviation per channel in place of the processor's.

        Raises:
            AdapterError: an option that the model cannot meet, or a processor that is not the model's.
            InputError: a size that the model cannot take.
        """
        self.module = module
        vision = module.config.vision_config
        if vision.num_channels != _RGB:
            raise AdapterError(
                f"{type(module).__name__} takes {vision.num_channels} channels; vlcam prepares RGB images"
            )
        self._tokenizer = processor.tokenizer
        check_tokenizer(self._tokenizer, module.config.text_config.vocab_size)
        self._statistics = {
            "image_mean": pixel_statistics("image_mean", image_mean),
            "image_std": pixel_statistics("image_std", image_std),
        }
        self._image_processor = _normalising(processor.image_processor, self._statistics)
        self._interpolate = interpolate_pos_encoding
        self._frame = framing(self._image_processor, image_size)
        self._own_size = image_size is not None
        self._sizes = ImageSizes(
            pair(vision.patch_size), pair(vision.image_size), interpolate_pos_encoding, _INTERPOLATE
        )
        self._sizes.check(self._frame.size)
        self._check()

    @classmethod
    def accepts(cls, module: nn.Module) -> bool:
        """Whether it is a model of the family; of one tower, or of another form, `wrap` says what is missing."""
        return isinstance(module, (cls.kind, *cls.parts))

    @classmethod
    def wrap(cls, module: nn.Module, processor: Any, **options: Any) -> Self:
        """Make an adapter for a loaded model; options as in the constructor."""
        if not isinstance(module, cls.kind):
            raise AdapterError(cls._refusal(type(module).__name__))
        if getattr(processor, "tokenizer", None) is None or getattr(processor, "image_processor", None) is None:
            raise AdapterError(
                f"processor={type(processor).__name__}: {cls.kind.__name__} needs its processor, for the tokenizer and "
                "the image size; vlcam.wrap(model, processor), for example AutoProcessor.from_pretrained(...)"
            )
        return cls(module, processor, **options)

    @classmethod
    def _refusal(cls, name: str) -> str:
        """Why a class of the family cannot be explained, and what can."""
        if name.removesuffix("WithProjection").endswith(("VisionModel", "TextModel")):
            return (
                f"{name} is one tower: its output is an embedding, of which no score can be explained; give the whole "
                f"{cls.kind.__name__} with its processor, and texts to compare the image with"
            )
        return f"expected {cls.kind.__name__}, found {name}"

    @cached_property
    def anatomy(self) -> Anatomy:
        """Streams `vision` and `text`, pre-norm, and what pools the image tokens where that is a stream."""
        streams = (self._vision, self._text, *self._poolers)
        lacks = {"fusion": NO_FUSION, **({} if self._poolers else {"pooler": "it pools by reading its class token"})}
        return Anatomy(
            type(self.module).__name__, {each.name: each for each in streams}, _TARGETS, self._notes, lacks=lacks
        )

    @property
    def options(self) -> Mapping[str, Any]:
        """Image size, position interpolation, and pixel statistics where they are not the processor's."""
        return {
            "image_size": list(self._frame.size) if self._own_size else None,
            "interpolate_pos_encoding": self._interpolate,
            **self._statistics,
        }

    @property
    def attention(self) -> str:
        """What the configuration asks for."""
        towers = (self.module.vision_model, self.module.text_model)  # each can have its own
        # transformers has no public name for it
        own = dict.fromkeys(str(tower.config._attn_implementation) for tower in towers)  # noqa: SLF001
        return " in vision, ".join(own) + (" in text" if len(own) > 1 else "")

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
        """Tokenise; text beyond the context length is cut off and listed."""
        return self._prepared(
            tokenise(self._tokenizer, texts, self.limit, pool=self.pool, full=self.full), masked=not self.full
        )

    def accept_ids(self, ids: Tensor, mask: Tensor | None) -> PreparedTexts:
        """Take token ids [T, N]; padding follows the end token.

        Raises:
            InputError: ids or a mask that the model cannot take.
        """
        config = self.module.config.text_config
        found = read_back(
            self._tokenizer,
            ids,
            mask,
            pool=self.pool,
            table=config.vocab_size,
            limit=config.max_position_embeddings,
        )
        return self._prepared(found, masked=mask is not None or not self.full)

    def display(self, pixel_values: Tensor) -> Tensor:
        """Undo the processor's normalisation."""
        processor = self._image_processor
        white = 255 * processor.rescale_factor if processor.do_rescale else 255.0
        found = pixel_values
        if processor.do_normalize:
            mean, std = (
                pixel_values.new_tensor(per_channel(values))[:, None, None]
                for values in (processor.image_mean, processor.image_std)
            )
            found = found * std + mean
        return found / white

    def text_tower(self, inputs: Inputs) -> Tensor:
        """Unit text embeddings [T, E].

        Raises:
            InputError: no text was given.
        """
        if inputs.texts is None:
            raise InputError(f"{type(self.module).__name__} scores an image with a text, but no text was given")
        made = self.module.get_text_features(**inputs.texts.tensors, return_dict=True)
        embedded: Tensor = made.pooler_output
        return normalize(embedded, dim=-1)

    @property
    @abstractmethod
    def pool(self) -> Pool:
        """Which position the text tower pools."""

    @property
    def limit(self) -> int:
        """The most tokens of a text."""
        return int(self.module.config.text_config.max_position_embeddings)

    @abstractmethod
    def _check(self) -> None:
        """Refuse a model that gives no embedding, or a tokenizer that is not its own."""

    @property
    @abstractmethod
    def _notes(self) -> tuple[str, ...]:
        """What is to be known of gradients."""

    @property
    @abstractmethod
    def _text_words(self) -> str:
        """The tokens of a text, in words."""

    @property
    def _poolers(self) -> tuple[StreamAnatomy, ...]:
        return ()

    @property
    def _vision(self) -> StreamAnatomy:
        config, first = self.module.config.vision_config, "[CLS], then " if self.prefix else ""
        blocks = tuple(_block(layer) for layer in self.module.vision_model.encoder.layers)
        tokens = f"{first}{self._patches}"
        return StreamAnatomy("vision", blocks, config.hidden_size, config.num_attention_heads, tokens, trunk=True)

    @property
    def _text(self) -> StreamAnatomy:
        config = self.module.config.text_config
        blocks = tuple(_block(layer) for layer in self.module.text_model.encoder.layers)
        return StreamAnatomy(
            "text", blocks, config.hidden_size, config.num_attention_heads, self._text_words, trunk=True
        )

    @property
    def _patches(self) -> str:
        rows, columns = self._sizes.grid(self._frame.size)
        return f"{rows} x {columns} patches in raster order"

    def _resized(self, pixel_values: Tensor) -> bool:
        """Whether positions must be interpolated."""
        height, width = pixel_values.shape[-2:]
        return (height, width) != self._sizes.trained

    def _prepared(self, found: TowerTexts, *, masked: bool) -> PreparedTexts:
        device = next(self.module.parameters()).device
        tensors = {"input_ids": found.ids.to(device)}
        if masked:
            tensors["attention_mask"] = found.mask.to(device)
        return PreparedTexts(tensors, found.layouts, found.pooled, full=self.full)


def _block(layer: Any) -> Block:
    """The sites of a block of either tower; all four have the same names."""
    return Block(
        {
            "F1": Reading(layer.layer_norm1, "output"),
            "F2": Reading(layer.self_attn, "attention"),
            "F3_HEADS": Reading(layer.self_attn.out_proj, "input"),
            "F3": Reading(layer.self_attn, "output"),
            "F4": Reading(layer.layer_norm2, "output"),
            "F5": Reading(layer.mlp, "output"),
            "F6": Reading(layer, "output"),
        }
    )


def _normalising(processor: Any, statistics: Mapping[str, list[float] | None]) -> Any:
    """The image processor; a copy with other statistics where they are asked for, for it is the user's."""
    asked = {name: values for name, values in statistics.items() if values is not None}
    if not asked:
        return processor
    if not processor.do_normalize:
        given = ", ".join(f"{name}={values}" for name, values in asked.items())
        raise AdapterError(
            f"{given} for a {type(processor).__name__} with do_normalize=False, which uses none; leave them out"
        )
    changed = copy.copy(processor)
    for name, values in asked.items():
        setattr(changed, name, values)
    return changed
