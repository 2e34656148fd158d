"""The Swin transformers of torchvision: `SwinTransformer`, as `swin_t`, `swin_v2_t` and others make it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn
from torchvision.models import SwinTransformer
from torchvision.models.swin_transformer import (
    PatchMerging,
    PatchMergingV2,
    SwinTransformerBlock,
    SwinTransformerBlockV2,
)

from vlcam.adapter import Inputs, PreparedImages
from vlcam.anatomy import Block, Reading
from vlcam.errors import AdapterError
from vlcam.tokens import Windows
from vlcam_adapters.classifier import (
    BEFORE_NORM,
    MEAN_OF_ALL,
    POST_NORM,
    ImageSizes,
    Stack,
    windowed_notes,
)
from vlcam_adapters.vit_torchvision import TorchvisionClassifier

_NO_HEADS = "torchvision computes the output projection inside a function, so that its input is that of no module"


class SwinTorchvision(TorchvisionClassifier):
    """Adapter for torchvision's `SwinTransformer`, of both versions.

    Any multiple of the patch size is taken: the model has no size of its own, and pads grids to whole windows.
    """

    kind: ClassVar[type[nn.Module]] = SwinTransformer
    example: ClassVar[tuple[str, str]] = ("Swin_T_Weights", "swin_t")
    reads = "patches"

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
            AdapterError: a model without classes, or with parts that are not known; an option that it cannot meet.
            InputError: an image size that the model cannot take.
        """
        stages = _stages(module)
        super().__init__(
            module,
            processor,
            prefix=(),
            sizes=_sizes(module, stages),
            classes=_classes(module),
            labels=labels,
            image_size=image_size,
        )
        self._layers = [block for stage in stages for block in stage]
        self._stack = _stack(self._layers, [len(stage) for stage in stages])

    @property
    def stack(self) -> Stack:
        """The blocks of all stages: pre-norm in Swin, res-post-norm in v2."""
        return self._stack

    @property
    def attention(self) -> str:
        """The one kind that it has."""
        return "explicit"

    def windows(self, stream: str, layer: int, images: PreparedImages) -> Windows:
        """Window and shift; no shift along a side that one window covers. Padding comes before the shift."""
        grid, attn = self.grid(stream, layer, images), self._layers[layer].attn
        height, width = attn.window_size
        down, across = (
            0 if side <= window else shift
            for side, window, shift in zip(grid, attn.window_size, attn.shift_size, strict=True)
        )
        return Windows(grid, (height, width), (down, across), pads_first=True)

    def read_block(self, name: str, tokens: Tensor, inputs: Inputs, *, bare: bool = False) -> Tensor:
        """The final norm and the head on the mean of all tokens of a block of the last stage."""
        found: Tensor = self.module.head(self.module.norm(self.averaged(tokens)))
        return found


def _stages(module: Any) -> list[list[Any]]:
    """The blocks of every stage; between stages tokens are merged."""
    stages = list(module.features[1::2])
    merging = list(module.features[2::2])
    whole = all(isinstance(stage, nn.Sequential) for stage in stages)
    if not whole or not all(isinstance(part, (PatchMerging, PatchMergingV2)) for part in merging):
        kinds = ", ".join(type(part).__name__ for part in module.features)
        raise AdapterError(f"features of {kinds}: this adapter knows stages of blocks with PatchMerging between them")
    return [list(stage) for stage in stages]


def _classes(module: Any) -> int:
    """How many classes the head tells apart; a head that was swapped by hand counts, not `num_classes`."""
    linear = [part for part in module.head.modules() if isinstance(part, nn.Linear)]
    if not linear:
        raise AdapterError(
            f"{type(module).__name__} without a linear layer in head has no classifier: it gives an embedding, of "
            f"which no class can be explained; give it one, model.head = nn.Linear({_width(module)}, classes)"
        )
    return int(linear[-1].out_features)


def _width(module: Any) -> int:
    return int(module.norm.normalized_shape[0])


def _sizes(module: Any, stages: Sequence[Sequence[Any]]) -> ImageSizes:
    """Where no transform says a size: the smallest at which every stage has whole windows, 224 or 256 as published."""
    patch = tuple(module.features[0][0].kernel_size)
    window = stages[-1][-1].attn.window_size
    height, width = (side * part * 2 ** (len(stages) - 1) for side, part in zip(window, patch, strict=True))
    return ImageSizes(patch, (height, width), others=True, positions=False)


def _stack(layers: Sequence[Any], depths: Sequence[int]) -> Stack:
    blocks = tuple(_block(block, number) for number, block in enumerate(layers))
    shifts = [any(block.attn.shift_size) for block in layers]
    notes = [*windowed_notes(shifts, ", along sides of the grid that are longer than a window"), MEAN_OF_ALL]
    if isinstance(layers[-1], SwinTransformerBlockV2):
        notes.append(BEFORE_NORM)
    last = layers[-1].attn
    return Stack(blocks, int(last.proj.out_features), int(last.num_heads), tuple(notes), tuple(depths))


def _block(block: Any, number: int) -> Block:
    if not isinstance(block, SwinTransformerBlock):
        raise AdapterError(
            f"block {number} is of class {type(block).__module__}.{type(block).__qualname__}; this adapter knows "
            "torchvision's SwinTransformerBlock and SwinTransformerBlockV2"
        )
    sites = {
        "F1": Reading(block.norm1, "output"),
        "F2": Reading(block.attn, "attention"),
        "F3": Reading(block.attn, "output"),
        "F4": Reading(block.norm2, "output"),
        "F5": Reading(block.mlp, "output"),
        "F6": Reading(block, "output"),
    }
    lacks = {"F3_HEADS": _NO_HEADS}
    if isinstance(block, SwinTransformerBlockV2):
        lacks |= {"F1": POST_NORM, "F4": POST_NORM}
    return Block({name: reading for name, reading in sites.items() if name not in lacks}, lacks)
