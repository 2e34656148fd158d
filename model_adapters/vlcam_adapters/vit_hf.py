"""ViT and DeiT classifiers of Hugging Face transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor
from transformers import (
    DeiTForImageClassification,
    DeiTForImageClassificationWithTeacher,
    PreTrainedModel,
    ViTForImageClassification,
)

from vlcam.adapter import Inputs, Prefix
from vlcam_adapters.classifier import ImageSizes, Stack, pair
from vlcam_adapters.hf_classifier import CLS_ONLY, HFClassifier, square_positions, vit_block

_DISTILLED = (
    "the logits are the mean of two heads, one on [CLS] and one on [DIST]: in the last block only these two have a "
    "gradient from F3_HEADS on, and only their queries in F2"
)


class VitHF(HFClassifier):
    """Adapter for `ViTForImageClassification`, `DeiTForImageClassification` and its `WithTeacher` variant.

    Both DeiT classes have a distillation token behind [CLS]; only the one with a teacher has a head on it.
    """

    kinds: ClassVar[tuple[type[PreTrainedModel], ...]] = (
        ViTForImageClassification,
        DeiTForImageClassification,
        DeiTForImageClassificationWithTeacher,
    )
    architectures: ClassVar[tuple[str, ...]] = tuple(kind.__name__ for kind in kinds)

    def __init__(
        self,
        module: PreTrainedModel,
        processor: Any = None,
        *,
        image_size: tuple[int, int] | None = None,
        interpolate_pos_encoding: bool = False,
        labels: Sequence[str] | None = None,
    ) -> None:
        """Hold a loaded model.

        Args:
            module: the model.
            processor: its image processor; without one only preprocessed tensors can be explained.
            image_size: height and width that images are resized to, in place of the processor's size and crop.
            interpolate_pos_encoding: whether other sizes than the trained one are taken, with interpolated positions.
            labels: a name per class, in place of those of the configuration.

        Raises:
            AdapterError: no classes, or an option that the model cannot meet.
            InputError: a size that it cannot take.
        """
        self._interpolate = interpolate_pos_encoding
        prefix: tuple[Prefix, ...] = ("cls",)
        if not isinstance(module, ViTForImageClassification):
            prefix = ("cls", "distillation")
        super().__init__(
            module,
            processor,
            prefix=prefix,
            sizes=_sizes(module.config, asked=interpolate_pos_encoding),
            image_size=image_size,
            labels=labels,
        )

    @property
    def stack(self) -> Stack:
        """Pre-norm blocks."""
        config = self.module.config
        blocks = tuple(
            vit_block(layer, before=layer.layernorm_before, after=layer.layernorm_after)
            for layer in self.module.base_model.layers
        )
        notes = [_DISTILLED if self._has_teacher else CLS_ONLY]
        if len(self.prefix) > 1 and not self._has_teacher:
            notes.append("[DIST] has no head: it acts on the logits through attention only")
        return Stack(blocks, config.hidden_size, config.num_attention_heads, tuple(notes))

    @property
    def options(self) -> Mapping[str, Any]:
        """Image size, labels and position interpolation."""
        return {**super().options, "interpolate_pos_encoding": self._interpolate}

    def logits(self, pixel_values: Tensor) -> Tensor:
        """Class logits of the model's own forward; positions are interpolated where the size asks for it."""
        height, width = pixel_values.shape[-2:]
        # Only there: at the trained size a table that is not square would be mixed up.
        resized = (height, width) != self.sizes.trained
        made = self.module(pixel_values=pixel_values, interpolate_pos_encoding=resized, return_dict=True)
        logits: Tensor = made.logits
        return logits

    def read_block(self, name: str, tokens: Tensor, inputs: Inputs, *, bare: bool = False) -> Tensor:
        """The final LayerNorm and the classifier on the mean of all tokens; the mean of two heads with a teacher."""
        seen = self.module.base_model.layernorm(tokens.mean(1))
        if self._has_teacher:
            heads = self.module.cls_classifier, self.module.distillation_classifier
            both: Tensor = sum(head(seen) for head in heads) / 2
            return both
        logits: Tensor = self.module.classifier(seen)
        return logits

    @property
    def _has_teacher(self) -> bool:
        return isinstance(self.module, DeiTForImageClassificationWithTeacher)


def _sizes(config: Any, *, asked: bool) -> ImageSizes:
    able = square_positions(config) and isinstance(config.patch_size, int)
    if able:
        remedy = "load it with interpolate_pos_encoding=True to interpolate its positions, which is then on record"
    else:
        remedy = "transformers interpolates positions of square grids and patches only, so that no other size is taken"
    return ImageSizes(pair(config.patch_size), pair(config.image_size), others=asked and able, remedy=remedy)
