"""The vision transformer of torchvision: `torchvision.models.VisionTransformer`, as `vit_b_16` and others make it.

With what it shares with the other classifiers of torchvision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import Tensor, nn
from torchvision.models import VisionTransformer, Weights, WeightsEnum
from torchvision.models.vision_transformer import EncoderBlock

from vlcam.adapter import Inputs, Prefix, PreparedImages
from vlcam.anatomy import Block, Reading
from vlcam.errors import AdapterError
from vlcam.images import SourceImage
from vlcam_adapters.classifier import ClassifierAdapter, ImageSizes, Stack, class_names
from vlcam_adapters.hf_processing import whole_pixels
from vlcam_adapters.torchvision_processing import Pipeline, prepare

__all__ = ["TorchvisionClassifier", "VitTorchvision"]

_ONE_SIZE = "torchvision cannot interpolate positions: bring the images to that size, or make the model for another one"
_CLS_ONLY = "the logits are read from [CLS]: in the last block nothing else has a gradient after the attention"


class TorchvisionClassifier(ClassifierAdapter):
    """Base of the adapters of torchvision's classifiers.

    The processor is what torchvision ships with the weights, a member of `ViT_B_16_Weights` for example, which also
    names the classes; or the transforms of such weights, or another transform. A family names its class in `kind`, and
    in `example` its weights and the function that makes such a model, and adds `stack`, `attention` and `read_block`.
    """

    library = "torchvision"
    kind: ClassVar[type[nn.Module]]
    example: ClassVar[tuple[str, str]]
    module: Any

    def __init__(
        self,
        module: nn.Module,
        processor: Any,
        *,
        prefix: tuple[Prefix, ...],
        sizes: ImageSizes,
        classes: int,
        labels: Sequence[str] | None,
        image_size: tuple[int, int] | None,
    ) -> None:
        """Hold a loaded model.

        Args:
            module: the model.
            processor: a member of a weights class, or a transform; without one only preprocessed tensors are taken.
            prefix: image tokens before the patches.
            sizes: which image sizes the model takes.
            classes: how many classes it tells apart.
            labels: a name per class, in place of those of the weights.
            image_size: height and width that images are resized to, in place of the transform's resize and crop.

        Raises:
            AdapterError: an option that the model cannot meet.
            InputError: an image size that the model cannot take.
        """
        weights = processor if isinstance(processor, (WeightsEnum, Weights)) else None
        own = tuple(weights.meta.get("categories", ())) if weights is not None else ()
        transform = weights.transforms() if weights is not None else processor
        pipeline = None if transform is None else Pipeline(transform)
        wanted = None if image_size is None else whole_pixels(image_size)
        if pipeline is not None and wanted is not None:
            pipeline = pipeline.exactly(wanted)
        super().__init__(
            module,
            prefix=prefix,
            sizes=sizes,
            size=wanted or (pipeline.size if pipeline else None) or sizes.trained,
            labels=class_names(labels, own, classes, source=str(weights)),
            normalisation=pipeline.normalisation if pipeline else None,
        )
        self._pipeline = pipeline
        self._options = {
            "labels": None if labels is None else list(labels),
            "image_size": None if wanted is None else list(wanted),
        }

    @classmethod
    def accepts(cls, module: nn.Module) -> bool:
        """Whether it is torchvision's class, or a subclass."""
        return isinstance(module, cls.kind)

    @classmethod
    def wrap(cls, module: nn.Module, processor: Any, **options: Any) -> Self:
        """Make an adapter for a loaded model; processor and options as in the constructor."""
        if not cls.accepts(module):
            raise AdapterError(f"expected torchvision's {cls.kind.__name__}, found {type(module).__name__}")
        return cls(module, processor, **options)

    @classmethod
    def load(cls, source: str | Path, *, local: bool, **options: Any) -> Self:
        """Refuse: torchvision's weights have no folder format.

        Raises:
            AdapterError: always.
        """
        del local, options
        weights, make = cls.example
        raise AdapterError(
            f"{str(source)!r}: torchvision's models are not loaded from a checkpoint folder; make the model yourself, "
            f"weights = {weights}.DEFAULT, model = {make}(weights=weights), then vlcam.wrap(model, weights)"
        )

    @property
    def options(self) -> Mapping[str, Any]:
        """Labels and image size."""
        return self._options

    def prepare_images(self, images: Sequence[SourceImage]) -> PreparedImages:
        """Run the transform.

        Raises:
            InputError: none was given, or the size does not fit.
        """
        remedy = f"give its weights or a transform, for example vlcam.wrap(model, {self.example[0]}.DEFAULT)"
        return prepare(self._pipeline, self.module, self.sizes, images, remedy=remedy)

    def logits(self, pixel_values: Tensor) -> Tensor:
        """Run the model as it is."""
        found: Tensor = self.module(pixel_values)
        return found


class VitTorchvision(TorchvisionClassifier):
    """Adapter for torchvision's `VisionTransformer`."""

    kind: ClassVar[type[nn.Module]] = VisionTransformer
    example: ClassVar[tuple[str, str]] = ("ViT_B_16_Weights", "vit_b_16")

    def __init__(
        self,
        module: nn.Module,
        processor: Any = None,
        *,
        labels: Sequence[str] | None = None,
        image_size: tuple[int, int] | None = None,
    ) -> None:
        """Hold a loaded model.

        Args:
            module: the model.
            processor: a member of a weights class, or a transform; without one only preprocessed tensors are taken.
            labels: a name per class, in place of those of the weights.
            image_size: height and width that images are resized to, in place of the transform's resize and crop.

        Raises:
            AdapterError: a model without classes; an option that it cannot meet.
            InputError: an image size that the model cannot take.
        """
        super().__init__(
            module,
            processor,
            prefix=("cls",),
            sizes=_sizes(module),
            classes=_classes(module),
            labels=labels,
            image_size=image_size,
        )
        self._stack = _stack(self.module)

    @property
    def stack(self) -> Stack:
        """Pre-norm blocks with `nn.MultiheadAttention`."""
        return self._stack

    @property
    def attention(self) -> str:
        """The one kind that it has."""
        return "torch.nn.MultiheadAttention"

    def read_block(self, name: str, tokens: Tensor, inputs: Inputs, *, bare: bool = False) -> Tensor:
        """The final LayerNorm and the head on the mean of all tokens of a block."""
        found: Tensor = self.module.heads(self.module.encoder.ln(tokens.mean(1)))
        return found


def _classes(module: Any) -> int:
    """How many classes the head tells apart; a head that was swapped by hand counts, not `num_classes`."""
    linear = [part for part in module.heads.modules() if isinstance(part, nn.Linear)]
    if not linear or isinstance(getattr(module.heads, "head", None), nn.Identity):
        raise AdapterError(
            f"{type(module).__name__} without a linear layer in heads has no classifier: it gives an embedding, of "
            f"which no class can be explained; give it one, model.heads.head = nn.Linear({module.hidden_dim}, classes)"
        )
    return int(linear[-1].out_features)


def _sizes(module: Any) -> ImageSizes:
    side, patch = int(module.image_size), int(module.patch_size)
    return ImageSizes((patch, patch), (side, side), others=False, remedy=_ONE_SIZE)


def _stack(module: Any) -> Stack:
    blocks = tuple(_block(block, number) for number, block in enumerate(module.encoder.layers))
    return Stack(blocks, int(module.hidden_dim), int(module.encoder.layers[0].num_heads), (_CLS_ONLY,))


def _block(block: Any, number: int) -> Block:
    if not isinstance(block, EncoderBlock):
        raise AdapterError(
            f"block {number} is of class {type(block).__module__}.{type(block).__qualname__}; this adapter knows "
            "torchvision's EncoderBlock"
        )
    return Block(
        {
            "F1": Reading(block.ln_1, "output"),
            "F2": Reading(block.self_attention, "attention"),
            "F3_HEADS": Reading(block.self_attention, "heads"),
            "F3": Reading(block.self_attention, "output"),
            "F4": Reading(block.ln_2, "output"),
            "F5": Reading(block.mlp, "output"),
            "F6": Reading(block, "output"),
        }
    )
