"""BEiT of Hugging Face transformers: what its models share, and the classifiers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import BeitForImageClassification, PreTrainedModel

from vlcam.adapter import Inputs
from vlcam_adapters.classifier import ImageSizes, Stack, pair
from vlcam_adapters.hf_classifier import (
    CLS_ONLY,
    LAYER_SCALE,
    HFClassifier,
    check_square_positions,
    square_positions,
    vit_block,
)

__all__ = ["BeitBase", "BeitHF"]

_MEAN_POOLED = (
    "the classifier reads the mean of the patches: in the last block [CLS] has no gradient from F3_HEADS on, nor its "
    "query in F2"
)
_EXCHANGED = (
    "transformers reads the table of relative positions with rows and columns exchanged where the trained grid is not "
    "square, as here; explained is the model as it runs"
)


class BeitBase(HFClassifier):
    """Base of the adapters of BEiT.

    The models interpolate their positions by themselves: any multiple of the patch size is taken, and recorded.
    """

    _sizes: ClassVar[type[ImageSizes]] = ImageSizes

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
        if config.use_absolute_position_embeddings:
            check_square_positions(config)
        relative = config.use_relative_position_bias or config.use_shared_relative_position_bias
        super().__init__(
            module,
            processor,
            prefix=("cls",),
            sizes=self._sizes(
                pair(config.patch_size),
                pair(config.image_size),
                others=True,
                positions=config.use_absolute_position_embeddings or relative,
            ),
            image_size=image_size,
            labels=labels,
        )
        self._relative = relative
        self.reads = "cls" if self.reads_cls else "patches"

    @property
    def joins_heads(self) -> bool:
        """Not where each has a bias of relative positions."""
        return not self._relative

    @property
    @abstractmethod
    def reads_cls(self) -> bool:
        """Whether the head reads [CLS] and not the patches."""

    @property
    @abstractmethod
    def reading_notes(self) -> Sequence[str]:
        """What the head reads, and which blocks and tokens therefore have no gradient."""

    @property
    def stack(self) -> Stack:
        """Pre-norm blocks, with LayerScale if so configured."""
        config, layers = self.module.config, self.module.base_model.layers
        blocks = tuple(vit_block(layer, before=layer.layernorm_before, after=layer.layernorm_after) for layer in layers)
        return Stack(blocks, config.hidden_size, config.num_attention_heads, tuple(self._notes(layers)))

    def _notes(self, layers: Any) -> list[str]:
        notes = [*self.reading_notes]
        if isinstance(layers[0].lambda_1, nn.Parameter):
            notes.append(LAYER_SCALE)
        if self._relative:
            notes.append("a bias of relative positions is added to the scores inside attention, before the softmax")
            if not square_positions(self.module.config):
                notes.append(_EXCHANGED)
        return notes


class BeitHF(BeitBase):
    """Adapter for `BeitForImageClassification`, which reads the mean of the patches, or [CLS] if so configured."""

    kinds: ClassVar[tuple[type[PreTrainedModel], ...]] = (BeitForImageClassification,)
    architectures: ClassVar[tuple[str, ...]] = tuple(kind.__name__ for kind in kinds)

    @property
    def reads_cls(self) -> bool:
        """Whether there is no LayerNorm for the mean of the patches."""
        return self.module.base_model.pooler.layernorm is None

    @property
    def reading_notes(self) -> Sequence[str]:
        """What the classifier reads."""
        return (CLS_ONLY if self.reads_cls else _MEAN_POOLED,)

    def read_block(self, name: str, tokens: Tensor, inputs: Inputs, *, bare: bool = False) -> Tensor:
        """The LayerNorm in front of the classifier on the mean of all tokens, and the classifier."""
        logits: Tensor = self.module.classifier(self._last_norm(tokens.mean(1)))
        return logits

    @property
    def _last_norm(self) -> nn.Module:
        """The pooler's where the mean of the patches is read, the model's own where [CLS] is."""
        model = self.module.base_model
        found: nn.Module = model.layernorm if self.reads_cls else model.pooler.layernorm
        return found
