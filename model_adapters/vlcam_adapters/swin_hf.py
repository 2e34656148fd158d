"""Swin and Swin v2 classifiers of Hugging Face transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from transformers import PreTrainedModel, SwinForImageClassification, Swinv2ForImageClassification

from vlcam.adapter import Inputs, PreparedImages
from vlcam.anatomy import Block, Reading
from vlcam.errors import AdapterError, InputError
from vlcam.tokens import Windows
from vlcam_adapters.classifier import (
    BEFORE_NORM,
    MEAN_OF_ALL,
    POST_NORM,
    ImageSizes,
    Stack,
    pair,
    stage_grid,
    windowed_notes,
)
from vlcam_adapters.hf_classifier import HFClassifier, vit_block

_ABSOLUTE = "its absolute positions are made for that size, and transformers interpolates them for square grids only"
_FORGETS = (
    "a block that meets a grid no longer than its window on a side loses its shift for good in transformers; vlcam "
    "puts it back, so that a small image changes no later result"
)


class SwinHF(HFClassifier):
    """Adapter for `SwinForImageClassification` and `Swinv2ForImageClassification`.

    Any multiple of the patch size is taken, for Swin (not v2) as long as no stage's grid is smaller than the window.
    """

    kinds: ClassVar[tuple[type[PreTrainedModel], ...]] = (SwinForImageClassification, Swinv2ForImageClassification)
    architectures: ClassVar[tuple[str, ...]] = tuple(kind.__name__ for kind in kinds)
    reads = "patches"

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
        super().__init__(module, processor, prefix=(), sizes=_sizes(module), image_size=image_size, labels=labels)
        self._layers = [layer for stage in module.base_model.encoder.layers for layer in stage.blocks]
        self._stack = self._stacked()

    @property
    def stack(self) -> Stack:
        """The blocks of all stages: pre-norm in Swin, res-post-norm in v2."""
        return self._stack

    def windows(self, stream: str, layer: int, images: PreparedImages) -> Windows:
        """Square windows; padding comes before the shift."""
        side, shift = int(self._layers[layer].window_size), int(self._layers[layer].shift_size)
        return Windows(self.grid(stream, layer, images), (side, side), (shift, shift), pads_first=True)

    def read_block(self, name: str, tokens: Tensor, inputs: Inputs, *, bare: bool = False) -> Tensor:
        """The final LayerNorm and the classifier on the mean of all tokens of a block of the last stage."""
        logits: Tensor = self.module.classifier(self.module.base_model.layernorm(self.averaged(tokens)))
        return logits

    @contextmanager
    def running(self) -> Iterator[None]:
        """Put back the window and the shift of every block, which Swin overwrites as it runs.

        Raises:
            AdapterError: an image that was too small has overwritten them before, and the model runs no more.
        """
        before = [(layer, layer.window_size, layer.shift_size) for layer in self._layers]
        for number, (layer, window, _) in enumerate(before):
            if not self._is_v2 and window != self.module.config.window_size:
                raise AdapterError(
                    f"block {number} has a window of {window}, its table of positions is for "
                    f"{self.module.config.window_size}: transformers left {type(self.module).__name__} so when it was "
                    f"given an image that is too small for it, and it can run on none any more; load it again, or set "
                    f"window_size of this {type(layer).__name__} back"
                )
        try:
            yield
        finally:
            for layer, window, shift in before:
                layer.window_size, layer.shift_size = window, shift

    @property
    def _is_v2(self) -> bool:
        return isinstance(self.module, Swinv2ForImageClassification)

    def _stacked(self) -> Stack:
        config, make = self.module.config, _post_norm if self._is_v2 else _pre_norm
        shifts = [bool(layer.shift_size) for layer in self._layers]
        if self._is_v2:
            notes = [*windowed_notes(shifts), MEAN_OF_ALL, BEFORE_NORM]
        else:
            where = ", where the grid is longer than a window both ways"
            notes = [*windowed_notes(shifts, where), MEAN_OF_ALL, _FORGETS, *_lost(self._layers, self.sizes, config)]
        return Stack(
            tuple(make(layer) for layer in self._layers),
            self.module.base_model.num_features,
            config.num_heads[-1],
            tuple(notes),
            tuple(config.depths),
        )


@dataclass(frozen=True)
class _SwinSizes(ImageSizes):
    """Sizes for which no stage has a grid with a side smaller than the window.

    Attributes:
        window: rows and columns of a window.
        stages: how many.
    """

    window: int = 1
    stages: int = 1

    def check(self, size: tuple[int, int]) -> None:
        """Refuse a size that the model cannot take.

        Raises:
            InputError: as for every model, or a grid that is smaller than the window.
        """
        super().check(size)
        for stage in range(self.stages):
            rows, columns = stage_grid(self.grid(size), stage)
            if min(rows, columns) < self.window:
                least = (self.window - 1) * 2 ** (self.stages - 1) + 1
                height, width = (least * side for side in self.patch)
                raise InputError(
                    f"image size {size}: stage {stage} would have a grid of {rows} x {columns}, and transformers' Swin "
                    f"takes none smaller than its window, {self.window} x {self.window}; give images of at least "
                    f"{height} x {width} pixels"
                )


def _sizes(module: Any) -> ImageSizes:
    config = module.config
    patch, trained = pair(config.patch_size), pair(config.image_size)
    others = not config.use_absolute_embeddings
    if isinstance(module, Swinv2ForImageClassification):
        return ImageSizes(patch, trained, others, _ABSOLUTE, positions=False)
    stages = len(config.depths)
    return _SwinSizes(patch, trained, others, _ABSOLUTE, positions=False, window=config.window_size, stages=stages)


def _pre_norm(layer: Any) -> Block:
    return vit_block(layer, before=layer.layernorm_before, after=layer.layernorm_after)


def _post_norm(layer: Any) -> Block:
    """The modules are named for Swin: `layernorm_before` and `layernorm_after` both come behind what they normalise."""
    return Block(
        {
            "F2": Reading(layer.attention.self, "attention"),
            "F3_HEADS": Reading(layer.attention.output.dense, "input"),
            "F3": Reading(layer.attention.output, "output"),
            "F5": Reading(layer.output, "output"),
            "F6": Reading(layer, "output"),
        },
        {"F1": POST_NORM, "F4": POST_NORM},
    )


def _lost(layers: Sequence[Any], sizes: ImageSizes, config: Any) -> list[str]:
    """What images that the model has seen before have changed for good."""
    lost, number = [], 0
    for stage, depth in enumerate(config.depths):
        grid = stage_grid(sizes.grid(sizes.trained), stage)
        shifts = config.window_size // 2 and min(grid) > config.window_size
        lost += [number + i for i in range(depth) if i % 2 and shifts and not layers[number + i].shift_size]
        number += depth
    if not lost:
        return []
    blocks = ", ".join(map(str, lost))
    return [f"a small image has taken the shift from blocks {blocks} before; explained is the model as it runs now"]
