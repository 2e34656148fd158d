"""What the adapters of image classifiers of Hugging Face transformers share: processor, labels, loading, running."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import Tensor, nn
from transformers import AutoImageProcessor, PretrainedConfig, PreTrainedModel

from vlcam.adapter import Prefix, PreparedImages
from vlcam.anatomy import Block, Reading
from vlcam.errors import AdapterError, InputError
from vlcam.images import SourceImage
from vlcam_adapters.classifier import ClassifierAdapter, ImageSizes, Normalisation, class_names, pair, processed_pixels
from vlcam_adapters.hf_loading import load_model, loading, placed
from vlcam_adapters.hf_processing import Framing, framing, per_channel, processed, whole_pixels

__all__ = ["CLS_ONLY", "LAYER_SCALE", "HFClassifier", "check_square_positions", "square_positions", "vit_block"]

CLS_ONLY = (
    "the classifier reads [CLS] alone: in the last block only [CLS] has a gradient from F3_HEADS on, and only its "
    "query in F2"
)
LAYER_SCALE = "LayerScale multiplies what attention and FFN add to the residual stream, after F3 and F5"
_MULTI_LABEL = (
    "trained to name several classes at once: probability, log-probability, margin and finer compare the classes with "
    "each other, which this model's own sigmoids do not; logit is what each class rests on"
)
_RGB = 3


class HFClassifier(ClassifierAdapter):
    """Base of the adapters of `transformers` image classifiers.

    A family names its classes in `kinds` and `architectures`, and adds `stack`, `read_block`, and what its constructor
    hands on.
    """

    library = "transformers"
    kinds: ClassVar[tuple[type[PreTrainedModel], ...]] = ()
    module: PreTrainedModel

    def __init__(
        self,
        module: PreTrainedModel,
        processor: Any,
        *,
        prefix: tuple[Prefix, ...],
        sizes: ImageSizes,
        image_size: Any,
        labels: Any,
    ) -> None:
        """Hold a loaded model.

        Args:
            module: the model.
            processor: its image processor; None where only preprocessed images are explained.
            prefix: image tokens before the patches.
            sizes: which image sizes the model takes.
            image_size: height and width that images are resized to, in place of the processor's size.
            labels: class names in place of those of the configuration.

        Raises:
            AdapterError: the model has no classes, or an option that it cannot meet.
            InputError: a size that it cannot take.
        """
        config = module.config
        if config.num_channels != _RGB:
            raise AdapterError(
                f"{type(module).__name__} takes {config.num_channels} channels; vlcam prepares RGB images"
            )
        self.processor = getattr(processor, "image_processor", processor)
        self._frame = self._framed(image_size, sizes.trained)
        self._own_size = image_size is not None
        self._own_labels = labels is not None
        if config.problem_type == "multi_label_classification":
            self.notes = (_MULTI_LABEL,)
        names = class_names(labels, _configured(config), _classes(module), source="the configuration (id2label)")
        super().__init__(
            module,
            prefix=prefix,
            sizes=sizes,
            size=self._frame.size,
            labels=names,
            normalisation=_normalisation(self.processor),
        )

    @classmethod
    def accepts(cls, module: nn.Module) -> bool:
        """Whether it is one of the transformers classes; the same model without a classifier is not."""
        return isinstance(module, cls.kinds)

    @classmethod
    def wrap(cls, module: nn.Module, processor: Any, **options: Any) -> Self:
        """Make an adapter for a loaded model; options as in the family's constructor."""
        if not isinstance(module, cls.kinds):
            raise AdapterError(f"expected {' or '.join(cls.architectures)}, found {type(module).__name__}")
        return cls(module, processor, **options)

    @classmethod
    def load(
        cls, source: str | Path, *, local: bool, dtype: str = "float32", device: str = "cpu", **options: Any
    ) -> Self:
        """Load a checkpoint and its processor to `device` in `dtype`; the other options as in the constructor."""
        with loading(source):
            config, _ = PretrainedConfig.get_config_dict(source, local_files_only=local)
            kind = cls._kind(config, source)
            module = load_model(kind, source, local=local, dtype=dtype)
            # Pillow resizes as the original preprocessing did, and needs no torchvision.
            processor = AutoImageProcessor.from_pretrained(source, local_files_only=local, backend="pil")
        return cls(placed(module, device).eval(), processor, **options)

    @property
    def options(self) -> Mapping[str, Any]:
        """Image size and labels, where they are not the checkpoint's own."""
        return {
            "image_size": list(self.size) if self._own_size else None,
            "labels": list(self.labels) if self._own_labels else None,
        }

    @property
    def attention(self) -> str:
        """What the configuration asks for."""
        return str(self.module.config._attn_implementation)  # noqa: SLF001 - transformers has no public name for it

    def prepare_images(self, images: Sequence[SourceImage]) -> PreparedImages:
        """Run the model's own image processor.

        Raises:
            InputError: the model came without one.
        """
        if self.processor is None:
            raise InputError(
                "an image for a model without a processor, so that its resize and normalisation are not known: give "
                "the processor, vlcam.wrap(model, processor), for example AutoImageProcessor.from_pretrained(...), or "
                "a float tensor [3, H, W] that is already preprocessed"
            )
        found = processed(self.processor, self._frame, images)
        return processed_pixels(self.module, self.sizes, self.size, *found)

    def logits(self, pixel_values: Tensor) -> Tensor:
        """Class logits of the model's own forward."""
        found: Tensor = self.module(pixel_values=pixel_values, return_dict=True).logits
        return found

    @classmethod
    def _kind(cls, config: Mapping[str, Any], source: str | Path) -> type[PreTrainedModel]:
        for kind in cls.kinds:
            if kind.__name__ in (config.get("architectures") or ()):
                return kind
        raise AdapterError(
            f"{str(source)!r} is a checkpoint of {config.get('architectures')}; {cls.__name__} loads "
            f"{', '.join(cls.architectures)}"
        )

    def _framed(self, image_size: Any, trained: tuple[int, int]) -> Framing:
        if self.processor is None:
            return Framing(trained if image_size is None else whole_pixels(image_size))
        if not hasattr(self.processor, "size"):
            raise AdapterError(
                f"processor={type(self.processor).__name__}: give the model's image processor, for example "
                "AutoImageProcessor.from_pretrained(...), or None to explain preprocessed tensors only"
            )
        return framing(self.processor, image_size)


def vit_block(layer: Any, *, before: nn.Module, after: nn.Module) -> Block:
    """The sites of a block with `attention.o_proj` and `mlp`, and its two LayerNorms."""
    return Block(
        {
            "F1": Reading(before, "output"),
            "F2": Reading(layer.attention, "attention"),
            "F3_HEADS": Reading(layer.attention.o_proj, "input"),
            "F3": Reading(layer.attention, "output"),
            "F4": Reading(after, "output"),
            "F5": Reading(layer.mlp, "output"),
            "F6": Reading(layer, "output"),
        }
    )


def square_positions(config: Any) -> bool:
    """Whether the trained grid is square: transformers takes a table that it interpolates for a square one."""
    (height, width), (down, across) = pair(config.image_size), pair(config.patch_size)
    return height // down == width // across


def check_square_positions(config: Any) -> None:
    """Refuse a model that resamples its positions even at its trained size, and wrongly.

    Raises:
        AdapterError: the grid is not square.
    """
    if not square_positions(config):
        raise AdapterError(
            f"a model trained at {pair(config.image_size)} with patches of {pair(config.patch_size)}: transformers "
            "takes its table of positions for one of a square grid and mixes it up; only square grids are explained"
        )


def _configured(config: Any) -> tuple[str, ...]:
    """The class names of a configuration in the order of the logits; a number without a name is itself its name."""
    named = {int(index): str(name) for index, name in (config.id2label or {}).items()}
    return tuple(named.get(index, str(index)) for index in range(max(named, default=-1) + 1))


def _classes(module: Any) -> int | None:
    """How many classes the model tells apart; None where its head is not one layer."""
    holder = getattr(module, "decode_head", module)
    head = holder.classifier if hasattr(holder, "classifier") else holder.cls_classifier
    if isinstance(head, nn.Identity):
        raise AdapterError(
            f"{type(module).__name__} has no classifier (num_labels=0): its output is an embedding, of which no class "
            "can be explained; load a checkpoint that was fine-tuned to classes"
        )
    if isinstance(head, nn.Conv2d):
        return head.out_channels
    return head.out_features if isinstance(head, nn.Linear) else None


def _normalisation(processor: Any) -> Normalisation | None:
    if processor is None:
        return None
    white = 255 * processor.rescale_factor if processor.do_rescale else 255.0
    mean = per_channel(processor.image_mean) if processor.do_normalize else [0.0] * _RGB
    std = per_channel(processor.image_std) if processor.do_normalize else [1.0] * _RGB
    return Normalisation(tuple(value / white for value in mean), tuple(value / white for value in std))
