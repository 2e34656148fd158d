"""Swin and Swin v2 classifiers of timm: `SwinTransformer` (`swin_*`) and `SwinTransformerV2` (`swinv2_*`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

from timm.models.swin_transformer import SwinTransformer, SwinTransformerBlock
from timm.models.swin_transformer_v2 import SwinTransformerV2, SwinTransformerV2Block
from timm.models.swin_transformer_v2_cr import SwinTransformerV2Cr
from torch import Tensor, nn

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
from vlcam_adapters.timm_classifier import TimmClassifier
from vlcam_adapters.timm_models import CHECKPOINTING, changed, fused_or_explicit

_REMEDY = (
    "wrap or load it with dynamic_img_size=True, which keeps its windows, or before you wrap it call "
    "model.set_input_size(img_size=(height, width)), which scales them"
)


class SwinTimm(TimmClassifier):
    """Adapter for timm's Swin transformers with a classification head."""

    architectures: ClassVar[tuple[str, ...]] = ("swin_*", "swinv2_*")
    families: ClassVar[tuple[type[nn.Module], ...]] = (SwinTransformer, SwinTransformerV2, SwinTransformerV2Cr)
    files: ClassVar[tuple[str, ...]] = ("swin_transformer", "swin_transformer_v2")
    reads = "patches"

    def __init__(
        self,
        module: nn.Module,
        processor: Any = None,
        *,
        labels: Sequence[str] | None = None,
        image_size: tuple[int, int] | None = None,
        dynamic_img_size: bool = False,
    ) -> None:
        """Hold a loaded model.

        Args:
            module: the model.
            processor: a torchvision transform that prepares an image; by default the one of its `pretrained_cfg`.
            labels: a name per class, in place of those that timm knows.
            image_size: height and width that images are resized to, in place of the transform's resize and crop.
            dynamic_img_size: whether other sizes than the trained one are taken, with the same windows.

        Raises:
            AdapterError: a model without classes, or with blocks that are not known; an option that it cannot meet.
            InputError: an image size that the model cannot take.
        """
        if isinstance(module, SwinTransformerV2Cr):
            raise AdapterError(
                "SwinTransformerV2Cr (swinv2_cr_*) is another implementation than swin_* and swinv2_*, with norms and "
                "windows of its own, which this adapter does not know"
            )
        super().__init__(
            module,
            processor,
            prefix=(),
            sizes=_sizes(module, asked=dynamic_img_size),
            labels=labels,
            image_size=image_size,
            dynamic_img_size=dynamic_img_size,
        )
        self._layers = [block for stage in self.module.layers for block in stage.blocks]
        self._stack = self._stacked()

    @property
    def stack(self) -> Stack:
        """The blocks of all stages: pre-norm in Swin, res-post-norm in v2."""
        return self._stack

    @property
    def attention(self) -> str:
        """What timm chose when the model was made: fused or explicit attention."""
        return fused_or_explicit(self._layers)

    def logits(self, pixel_values: Tensor) -> Tensor:
        """Run the model as it is; for another size with masks made on the fly, as with timm's own dynamic_img_size."""
        height, width = pixel_values.shape[-2:]
        with ExitStack() as stack:
            if (height, width) != self.sizes.trained and self.module.patch_embed.strict_img_size:
                stack.enter_context(changed(self.module.patch_embed, strict_img_size=False))
                for block in self._layers:
                    stack.enter_context(changed(block, dynamic_mask=True))
            found: Tensor = self.module(pixel_values)
        return found

    def windows(self, stream: str, layer: int, images: PreparedImages) -> Windows:
        """Window and shift as the block has them, whatever the size; padding comes after the shift."""
        block = self._layers[layer]
        return Windows(self.grid(stream, layer, images), tuple(block.window_size), tuple(block.shift_size))

    def read_block(self, name: str, tokens: Tensor, inputs: Inputs, *, bare: bool = False) -> Tensor:
        """The final norm and the head on the mean of all tokens of a block of the last stage, as on a single token."""
        found: Tensor = self.module.head(self.module.norm(self.averaged(tokens))[:, None, None])
        return found

    @contextmanager
    def running(self) -> Iterator[None]:
        """Switch gradient checkpointing off, under which every hook would fire again in the backward pass."""
        with ExitStack() as stack:
            for stage in self.module.layers:
                stack.enter_context(changed(stage, grad_checkpointing=False))
            yield

    def _stacked(self) -> Stack:
        blocks = tuple(_block(block, number) for number, block in enumerate(self._layers))
        notes = list(windowed_notes([any(block.shift_size) for block in self._layers]))
        if self.module.global_pool in ("avg", "fast", "fastavg"):
            notes.append(MEAN_OF_ALL)
        if isinstance(self.module, SwinTransformerV2):
            notes.append(BEFORE_NORM)
        return Stack(
            blocks,
            int(self.module.num_features),
            int(self._layers[-1].attn.num_heads),
            (*notes, CHECKPOINTING),
            tuple(len(stage.blocks) for stage in self.module.layers),
        )


def _sizes(module: Any, *, asked: bool) -> ImageSizes:
    embed = module.patch_embed
    if asked and not all(hasattr(block, "dynamic_mask") for stage in module.layers for block in stage.blocks):
        raise AdapterError(
            "dynamic_img_size=True: this version of timm makes the masks of shifted windows for one size; update timm, "
            "or call model.set_input_size(img_size=(height, width)) before you wrap it"
        )
    others = asked or not embed.strict_img_size
    return ImageSizes(tuple(embed.patch_size), tuple(embed.img_size), others, _REMEDY, positions=False)


def _block(block: Any, number: int) -> Block:
    if not isinstance(block, (SwinTransformerBlock, SwinTransformerV2Block)):
        raise AdapterError(
            f"block {number} is of class {type(block).__module__}.{type(block).__qualname__}; this adapter knows "
            "timm's SwinTransformerBlock and SwinTransformerV2Block"
        )
    sites = {
        "F1": Reading(block.norm1, "output"),
        "F2": Reading(block.attn, "attention"),
        "F3_HEADS": Reading(block.attn.proj, "input"),
        "F3": Reading(block.attn, "output"),
        "F4": Reading(block.norm2, "output"),
        "F5": Reading(block.mlp, "output"),
        "F6": Reading(block, "output"),
    }
    lacks = {"F1": POST_NORM, "F4": POST_NORM} if isinstance(block, SwinTransformerV2Block) else {}
    return Block({name: reading for name, reading in sites.items() if name not in lacks}, lacks)
