"""DINOv2 classifiers of Hugging Face transformers, with and without register tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import (
    Dinov2ForImageClassification,
    Dinov2WithRegistersForImageClassification,
    PreTrainedModel,
)

from vlcam.adapter import Inputs, Prefix
from vlcam_adapters.classifier import ImageSizes, Stack, pair
from vlcam_adapters.hf_classifier import LAYER_SCALE, HFClassifier, check_square_positions, vit_block


class Dinov2HF(HFClassifier):
    """Adapter for `Dinov2ForImageClassification` and `Dinov2WithRegistersForImageClassification`.

    The model interpolates its positions by itself: any multiple of the patch size is taken, and recorded.
    """

    kinds: ClassVar[tuple[type[PreTrainedModel], ...]] = (
        Dinov2ForImageClassification,
        Dinov2WithRegistersForImageClassification,
    )
    architectures: ClassVar[tuple[str, ...]] = tuple(kind.__name__ for kind in kinds)

    def __init__(
        self,
        module: PreTrainedModel,
        processor: Any = None,
        *,
        image_size: tuple[int, int] | None = None,
        labels: Sequence[str] | None = None,
    ) -> None:
        """Hold a loaded model.

        Args:
            module: the model.
            processor: its image processor; without one only preprocessed tensors can be explained.
            image_size: height and width that images are resized to, in place of the processor's size and crop.
            labels: a name per class, in place of those of the configuration.

        Raises:
            AdapterError: no classes, or an option that the model cannot meet.
            InputError: a size that it cannot take.
        """
        config = module.config
        check_square_positions(config)
        register: Prefix = "register"
        super().__init__(
            module,
            processor,
            prefix=("cls", *(register,) * getattr(config, "num_register_tokens", 0)),
            sizes=ImageSizes(pair(config.patch_size), pair(config.image_size), others=True),
            image_size=image_size,
            labels=labels,
        )

    @property
    def stack(self) -> Stack:
        """Pre-norm blocks with LayerScale."""
        config = self.module.config
        blocks = tuple(
            vit_block(layer, before=layer.norm1, after=layer.norm2) for layer in self.module.base_model.encoder.layer
        )
        notes = [
            "the classifier reads [CLS] and the mean of the patches",
            LAYER_SCALE,
        ]
        if "register" in self.prefix:
            notes.append("in the last block registers have no gradient from F3_HEADS on, nor their queries in F2")
        return Stack(blocks, config.hidden_size, config.num_attention_heads, tuple(notes))

    def read_block(self, name: str, tokens: Tensor, inputs: Inputs, *, bare: bool = False) -> Tensor:
        """The final LayerNorm on the mean of all tokens, which stands for [CLS] and for the patches' mean."""
        seen = self.module.base_model.layernorm(tokens.mean(1))
        logits: Tensor = self.module.classifier(torch.cat([seen, seen], dim=1))
        return logits
