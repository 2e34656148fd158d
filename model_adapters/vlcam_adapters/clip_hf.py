"""CLIP and SigLIP of Hugging Face transformers: an image tower and a text tower, compared by the cosine.

Both towers run before image and text meet, each once per image or text.
"""

from __future__ import annotations

import copy
import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from transformers import (
    AutoImageProcessor,
    CLIPModel,
    CLIPProcessor,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPVisionModel,
    CLIPVisionModelWithProjection,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Siglip2Model,
    Siglip2TextModel,
    Siglip2VisionModel,
    SiglipModel,
    SiglipTextModel,
    SiglipVisionModel,
)
from transformers.utils import cached_file

from vlcam.adapter import Inputs, ModelAdapter, Prefix, PreparedImages, PreparedTexts
from vlcam.anatomy import Anatomy, Block, Reading, StreamAnatomy
from vlcam.errors import AdapterError, InputError
from vlcam.images import SourceImage
from vlcam.targets import HeadKind
from vlcam_adapters.classifier import ImageSizes, given_pixels, on_model, pair
from vlcam_adapters.clip_text import Pool, TextWarning, TowerTexts, check_tokenizer, read_back, tokenise
from vlcam_adapters.contrastive import NO_FUSION, pixel_statistics, similarities
from vlcam_adapters.hf_loading import load_model, loading, placed
from vlcam_adapters.hf_processing import framing, per_channel, processed

_RGB = 3
_LEGACY_END = 2
"""The wrong `eos_token_id` of older CLIP configurations, for which transformers pools at the largest id."""
_INTERPOLATE = "load it with interpolate_pos_encoding=True to interpolate its positions, which is then on record"
_TARGETS = ("contrastive: cosine, logit, probability, log-probability, margin, difference, finer",)
_CLS_ONLY = (
    "the image embedding reads [CLS] alone: in the last vision block only [CLS] has a gradient from F3_HEADS on, and "
    "only its query in F2"
)
_END_ONLY = (
    "the text embedding reads the end token: in the last text block only it has a gradient from F3_HEADS on, and "
    "tokens behind it have none anywhere"
)
_LAST_ONLY = (
    "the text embedding reads the last position, padding or not: in the last text block only it has a gradient from "
    "F3_HEADS on; padding is attended to"
)


class _DualEncoderHF(ModelAdapter):
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
        own = dict.fromkeys(self.attention_of(stream) for stream in ("vision", "text"))
        return " in vision, ".join(own) + (" in text" if len(own) > 1 else "")

    def attention_of(self, stream: str) -> str:
        """What the configuration of a tower asks for; each can have its own."""
        config = (self.module.text_model if stream == "text" else self.module.vision_model).config
        return str(config._attn_implementation)  # noqa: SLF001 - transformers has no public name for it

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


class ClipHF(_DualEncoderHF):
    """Adapter for `transformers.CLIPModel`."""

    kind: ClassVar[type[PreTrainedModel]] = CLIPModel
    parts: ClassVar[tuple[type[PreTrainedModel], ...]] = (
        CLIPVisionModel,
        CLIPVisionModelWithProjection,
        CLIPTextModel,
        CLIPTextModelWithProjection,
    )
    architectures: ClassVar[tuple[str, ...]] = ("CLIPModel",)
    prefix: tuple[Prefix, ...] = ("cls",)
    heads: Mapping[str, HeadKind] = MappingProxyType({"contrastive": "prompts", "contrastive_patches": "prompts"})
    readouts: ClassVar[frozenset[str]] = frozenset({"contrastive_patches"})
    module: CLIPModel

    @classmethod
    def load(
        cls, source: str | Path, *, local: bool, dtype: str = "float32", device: str = "cpu", **options: Any
    ) -> Self:
        """Load a checkpoint and its processor to `device` in `dtype`; the other options as in the constructor."""
        with loading(source):
            module = load_model(CLIPModel, source, local=local, dtype=dtype)
            # Pillow resizes as the original preprocessing did, and needs no torchvision.
            processor = CLIPProcessor.from_pretrained(source, local_files_only=local, backend="pil")
        return cls(placed(module, device).eval(), processor, **options)

    def trunk(self, inputs: Inputs) -> Tensor:
        """The output of the last vision block, before the norm of the class token: [I, 1 + h * w, D]."""
        pixels = inputs.images.pixel_values
        made = self.module.vision_model(
            pixel_values=pixels, interpolate_pos_encoding=self._resized(pixels), return_dict=True
        )
        tokens: Tensor = made.last_hidden_state
        return tokens

    def head(self, name: str, shared: Tensor, inputs: Inputs) -> Tensor:
        """Cosine and logit with every text, [P, T, 2]; of `contrastive_patches`, of the mean of the normed patches."""
        normed = self.module.vision_model.post_layernorm
        pooled = normed(shared[:, 0]) if name == "contrastive" else normed(shared[:, len(self.prefix) :]).mean(1)
        return self._compared(self._embedded(pooled), inputs)

    def token_cosines(self, tokens: Tensor, inputs: Inputs) -> Tensor:
        """Cosines of every image token, read as the class token is, with every text: [P, N, T]."""
        if inputs.encoded is None:
            raise InputError("image tokens are compared with texts, but no text was given")
        return self._embedded(self.module.vision_model.post_layernorm(tokens)) @ inputs.encoded.every.T

    def read_block(self, name: str, tokens: Tensor, inputs: Inputs, *, bare: bool = False) -> Tensor:
        """Cosine and logit [I, T, 2] of the mean of all tokens, behind the final norm and the projection."""
        del name, bare
        return self._compared(self._embedded(self.module.vision_model.post_layernorm(tokens.mean(1))), inputs)

    @property
    def pool(self) -> Pool:
        """The first end token; by the rule of older configurations the largest id."""
        return "largest id" if self.module.text_model.eos_token_id == _LEGACY_END else "first end"

    @property
    def limit(self) -> int:
        """The most tokens of a text, of which the tokenizer may allow fewer than the model."""
        return min(super().limit, int(self._tokenizer.model_max_length))

    def _check(self) -> None:
        end, own = self.module.text_model.eos_token_id, self._tokenizer.eos_token_id
        if end not in (_LEGACY_END, own):
            raise AdapterError(
                f"the model pools a text at its end token, id {end}, and the tokenizer ends texts with "
                f"{self._tokenizer.eos_token!r}, id {own}: every text would be read at its first token; give the "
                "model's own tokenizer"
            )

    @property
    def _notes(self) -> tuple[str, ...]:
        return _CLS_ONLY, _END_ONLY

    @property
    def _text_words(self) -> str:
        tokenizer = self._tokenizer
        return f"{tokenizer.bos_token}, word pieces, {tokenizer.eos_token}, then padding; each sees those before it"

    def _embedded(self, normed: Tensor) -> Tensor:
        return normalize(self.module.visual_projection(normed), dim=-1)

    def _compared(self, images: Tensor, inputs: Inputs) -> Tensor:
        return similarities(images, inputs, scale=self.module.logit_scale.exp())


class SiglipHF(_DualEncoderHF):
    """Adapter for `transformers.SiglipModel`, which fixed-size checkpoints of SigLIP 2 are too.

    `Siglip2Model` takes patches of images of any proportions (NaFlex), which have no common grid; it is refused.
    """

    kind: ClassVar[type[PreTrainedModel]] = SiglipModel
    parts: ClassVar[tuple[type[PreTrainedModel], ...]] = (
        SiglipVisionModel,
        SiglipTextModel,
        Siglip2Model,
        Siglip2VisionModel,
        Siglip2TextModel,
    )
    architectures: ClassVar[tuple[str, ...]] = ("SiglipModel",)
    prefix: tuple[Prefix, ...] = ()
    reads: Literal["cls", "patches"] = "patches"
    heads: Mapping[str, HeadKind] = MappingProxyType({"contrastive": "sigmoid"})
    full: ClassVar[bool] = True
    module: SiglipModel

    @classmethod
    def loads(cls, config: Mapping[str, Any]) -> bool:
        """Whether it is a checkpoint of SigLIP; one with NaFlex is refused by `load`, which says why."""
        return bool({*cls.architectures, "Siglip2Model"} & set(config.get("architectures") or ()))

    @classmethod
    def load(
        cls, source: str | Path, *, local: bool, dtype: str = "float32", device: str = "cpu", **options: Any
    ) -> Self:
        """Load a checkpoint and its processor to `device` in `dtype`; the other options as in the constructor.

        The tokenizer is the checkpoint's `tokenizer.json` as it stands; the class that transformers would take for
        SigLIP 1 gives no offsets.

        Raises:
            AdapterError: NaFlex, or files that are missing or damaged.
        """
        with loading(source):
            config, _ = SiglipModel.config_class.get_config_dict(source, local_files_only=local)
            if "Siglip2Model" in (config.get("architectures") or ()):
                raise AdapterError(f"{str(source)!r}: {cls._refusal('Siglip2Model')}")
            module = load_model(SiglipModel, source, local=local, dtype=dtype)
            images = AutoImageProcessor.from_pretrained(source, local_files_only=local, backend="pil")
            tokenizer = _tokenizer_of(source, local=local)
        processor = SimpleNamespace(image_processor=images, tokenizer=tokenizer)
        return cls(placed(module, device).eval(), processor, **options)

    def prepare_texts(self, texts: Sequence[str]) -> PreparedTexts:
        """Tokenise and pad to the context length; text beyond it is cut off and listed."""
        lower = [text.lower() for text in texts]
        made = super().prepare_texts(texts)
        if lower != list(texts):
            again = tokenise(self._tokenizer, lower, self.limit, pool=self.pool, full=True)
            if not torch.equal(again.ids, made.tensors["input_ids"].cpu()):
                warnings.warn(
                    "SigLIP was trained on text in lower case, and this tokenizer keeps capitals, which then are other "
                    "tokens; write texts in lower case",
                    TextWarning,
                    stacklevel=2,
                )
        return made

    def accept_ids(self, ids: Tensor, mask: Tensor | None) -> PreparedTexts:
        """Take token ids [T, N] as they are; SigLIP was trained on ids padded to its context length, without a mask.

        Raises:
            InputError: ids or a mask that the model cannot take.
        """
        found = super().accept_ids(ids, mask)
        width = found.tensors["input_ids"].shape[1]
        if width < self.limit:
            warnings.warn(
                f"input_ids of {width} tokens: SigLIP was trained on texts padded to {self.limit}, and reads the last "
                "position; tokenise with padding='max_length', or give text",
                TextWarning,
                stacklevel=2,
            )
        if mask is not None and not bool(mask.bool().all()):
            warnings.warn(
                "an attention_mask that hides padding: SigLIP was trained without one and attends to padding; leave it "
                "out, or give text",
                TextWarning,
                stacklevel=2,
            )
        return found

    def trunk(self, inputs: Inputs) -> Tensor:
        """The patch tokens that enter the pooler, behind the final norm: [I, h * w, D]."""
        pixels, tower = inputs.images.pixel_values, self.module.vision_model
        # Not the tower's own forward, which would run the pooler here as well as in the head.
        embedded = tower.embeddings(pixels, interpolate_pos_encoding=self._resized(pixels))
        tokens: Tensor = tower.post_layernorm(tower.encoder(inputs_embeds=embedded).last_hidden_state)
        return tokens

    def head(self, name: str, shared: Tensor, inputs: Inputs) -> Tensor:
        """Cosine and logit with every text, [P, T, 2]."""
        del name
        return self._compared(self.module.vision_model.head(shared), inputs)

    def read_block(self, name: str, tokens: Tensor, inputs: Inputs, *, bare: bool = False) -> Tensor:
        """Cosine and logit [I, T, 2] of what the pooler makes of the tokens, behind the final norm unless `bare`."""
        del name
        tower = self.module.vision_model
        return self._compared(tower.head(tokens if bare else tower.post_layernorm(tokens)), inputs)

    @classmethod
    def _refusal(cls, name: str) -> str:
        if name == "Siglip2Model":
            return (
                "Siglip2Model takes NaFlex inputs (patches of images whose grids differ, with a mask of padding), not "
                "pixels [I, 3, H, W]; load a fixed-size checkpoint of SigLIP 2 (for example "
                "google/siglip2-base-patch16-224), which is a SiglipModel"
            )
        return super()._refusal(name)

    @property
    def pool(self) -> Pool:
        """The last position, padding or not."""
        return "last"

    def _check(self) -> None:
        if not self.module.vision_model.use_head:
            raise AdapterError(
                f"{type(self.module).__name__} without a pooling head (vision_use_head=False) has no image embedding; "
                "load a checkpoint that has one"
            )

    @property
    def _notes(self) -> tuple[str, ...]:
        return (_LAST_ONLY,)

    @property
    def _text_words(self) -> str:
        return f"word pieces, {self._tokenizer.eos_token}, then padding up to {self.limit} tokens"

    @property
    def _poolers(self) -> tuple[StreamAnatomy, ...]:
        config, head = self.module.config.vision_config, self.module.vision_model.head
        sites = {"CROSS": Reading(head.attention, "attention"), "CONTEXT": Reading(head, "input")}
        lacks = dict.fromkeys(
            ("F1", "F2", "F3", "F4", "F5", "F6"),
            "it is no block of the tower: one learned query reads the image tokens",
        )
        tokens = f"one learned query; keys of CROSS: {self._patches}"
        return (
            StreamAnatomy(
                "pooler",
                (Block(sites, lacks),),
                config.hidden_size,
                config.num_attention_heads,
                tokens,
                trunk=False,
                queries=1,
            ),
        )

    def _compared(self, images: Tensor, inputs: Inputs) -> Tensor:
        unit, module = normalize(images, dim=-1), self.module
        return similarities(unit, inputs, scale=module.logit_scale.exp(), bias=module.logit_bias)


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


def _tokenizer_of(source: str | Path, *, local: bool) -> Any:
    try:
        cached_file(source, "tokenizer.json", local_files_only=local)
    except OSError as error:
        raise AdapterError(
            f"{str(source)!r} has no tokenizer.json ({str(error).splitlines()[0]}), and a SentencePiece model alone "
            "gives no character offsets, which maps of words need: put the checkpoint's tokenizer.json there, or load "
            "the model and give a processor with a fast tokenizer, vlcam.wrap(model, processor)"
        ) from None
    return PreTrainedTokenizerFast.from_pretrained(source, local_files_only=local)


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
