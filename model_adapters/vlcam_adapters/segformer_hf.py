"""SegFormer of Hugging Face transformers: stages with grids of their own, and a decoder that reads them all."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from types import MappingProxyType
from typing import Any, ClassVar

from transformers import PreTrainedModel, SegformerForSemanticSegmentation

from vlcam.anatomy import Block
from vlcam.errors import AdapterError, InputError
from vlcam.targets import HeadKind
from vlcam_adapters.classifier import ImageSizes, Stack
from vlcam_adapters.hf_classifier import HFClassifier, vit_block

__all__ = ["SegformerHF"]

_USUAL = (512, 512)
"""The size that the family was published at. It has no positions, and so no configuration names one."""
_MERGED = "2 x 2 tokens are merged from stage to stage; a map has the grid of its block's stage"
_ALL_READ = "the decoder reads the tokens of every stage: each has a gradient at every site of every block"


class SegformerHF(HFClassifier):
    """Adapter for `SegformerForSemanticSegmentation`: class logits at the tokens of the first stage.

    Attention maps are there for the blocks in which tokens attend to all tokens; in the others keys are merged tokens.
    """

    kinds: ClassVar[tuple[type[PreTrainedModel], ...]] = (SegformerForSemanticSegmentation,)
    architectures: ClassVar[tuple[str, ...]] = tuple(kind.__name__ for kind in kinds)
    heads: Mapping[str, HeadKind] = MappingProxyType({"segmentation": "pixels"})
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
            AdapterError: a configuration without published models, or an option that the model cannot meet.
            InputError: a size that it cannot take.
        """
        config = module.config
        if set(config.strides[1:]) != {2} or not config.reshape_last_stage:
            raise AdapterError(
                f"strides={list(config.strides)}, reshape_last_stage={config.reshape_last_stage}: only SegFormers that "
                "halve the grid from stage to stage and keep the last one as a grid are explained"
            )
        super().__init__(module, processor, prefix=(), sizes=_sizes(config), image_size=image_size, labels=labels)

    @property
    def stack(self) -> Stack:
        """Pre-norm blocks of all stages; F2 only where the keys are the tokens."""
        config = self.module.config
        blocks = tuple(
            _block(layer, ratio)
            for stage, ratio in zip(self.module.base_model.stages, config.sr_ratios, strict=True)
            for layer in stage.blocks
        )
        return Stack(
            blocks,
            config.hidden_sizes[-1],
            config.num_attention_heads[-1],
            (_MERGED, _ALL_READ, *_notes(config)),
            tuple(config.depths),
            windowed=False,
        )


@dataclass(frozen=True)
class _WholeCells(ImageSizes):
    """Sizes for which every stage has whole cells, and merges whole groups of keys.

    Attributes:
        unit: what height and width must be multiples of.
    """

    unit: int = 1

    def check(self, size: tuple[int, int]) -> None:
        """Refuse a size that leaves part of a cell.

        Raises:
            InputError: not a multiple of the unit.
        """
        if any(side < self.unit or side % self.unit for side in size):
            raise InputError(
                f"image size {size}: height and width must be multiples of {self.unit}, so that the grid of every "
                "stage covers the image in whole cells"
            )


def _sizes(config: Any) -> ImageSizes:
    cells = accumulate(config.strides, mul)
    unit = math.lcm(*(cell * ratio for cell, ratio in zip(cells, config.sr_ratios, strict=True)))
    usual = tuple(-(-side // unit) * unit for side in _USUAL)
    first = config.strides[0]
    return _WholeCells((first, first), (usual[0], usual[1]), others=True, positions=False, unit=unit)


def _block(layer: Any, ratio: int) -> Block:
    found = vit_block(layer, before=layer.layernorm_before, after=layer.layernorm_after)
    if ratio == 1:
        return found
    why = f"its queries are tokens, but its keys are tokens merged {ratio} x {ratio}: no map of one cell per token"
    return Block({site: reading for site, reading in found.sites.items() if site != "F2"}, {"F2": why})


def _notes(config: Any) -> Iterator[str]:
    """What is true of the configured model."""
    first, window = config.strides[0], config.patch_sizes[0]
    yield (
        f"patches overlap, {window} x {window} pixels for every {first} x {first}, and so do the tokens that are "
        "merged: a token sees more than its cell, which is the part of the image that the decoder lays it over"
    )
    number, merged = 0, []
    for depth, ratio in zip(config.depths, config.sr_ratios, strict=True):
        if ratio > 1:
            blocks = f"block {number}" if depth == 1 else f"blocks {number}-{number + depth - 1}"
            merged.append(f"{ratio} x {ratio} in {blocks}")
        number += depth
    if merged:
        yield f"keys are tokens merged {', '.join(merged)}: those blocks have no F2"
    yield "the FFN mixes neighbours: it holds a 3 x 3 convolution over the grid"
