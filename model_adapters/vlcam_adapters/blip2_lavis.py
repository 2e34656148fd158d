"""BLIP-2 as in LAVIS: `Blip2ITM`, and `Blip2Qformer`, which it is a kind of.

LAVIS builds them with one of two vision towers, EVA or OpenAI's CLIP; there is an adapter for each. As for its other
models, LAVIS itself is imported by `load` alone.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vlcam.adapter import Inputs
from vlcam.anatomy import Block, Reading, StreamAnatomy
from vlcam.errors import AdapterError
from vlcam.targets import HeadKind
from vlcam_adapters.blip2_parts import HEADS, LACKS, NOTES, TARGETS, QFormer, pooler
from vlcam_adapters.classifier import pair
from vlcam_adapters.lavis_parts import LavisAdapter, named

__all__ = ["Blip2ClipLavis", "Blip2ItmLavis"]

_NAMES = ("blip2_image_text_matching", "blip2", "blip2_feature_extractor")
_PARTS = (
    *("ln_vision", "maybe_autocast", "query_tokens", "Qformer.bert.encoder.layer"),
    *("itm_head", "vision_proj", "text_proj"),
)


class Blip2ItmLavis(LavisAdapter):
    """Adapter for LAVIS's `Blip2ITM` with an EVA tower; texts are opened by [CLS] in both heads."""

    kind = "Blip2Qformer"
    parts = (*_PARTS, "visual_encoder.blocks", "visual_encoder.patch_embed.proj")
    architectures = named(*_NAMES, types=("pretrain", "coco"))
    heads: Mapping[str, HeadKind] = HEADS
    lacks: ClassVar[Mapping[str, str]] = LACKS

    def __init__(self, module: nn.Module, processor: Any) -> None:
        """Hold a loaded model; processors as in `LavisAdapter`.

        Raises:
            AdapterError: processors whose work cannot be put on record, or a model of a type that LAVIS cannot run.
        """
        super().__init__(module, processor)
        found = {part: next(getattr(module, part).parameters()).dtype for part in ("ln_vision", "Qformer")}
        if set(found.values()) != {torch.float32}:
            raise AdapterError(
                f"LAVIS hands image tokens to ln_vision and to the Q-Former in float32, but their types are {found}; "
                "keep these two in float32, only visual_encoder may be of another type"
            )

    @property
    def reader(self) -> Any:
        """The Q-Former."""
        return self.module.Qformer.bert

    @property
    def embedding(self) -> Any:
        """The convolution that embeds patches."""
        return self.module.visual_encoder.patch_embed.proj

    @property
    def opening(self) -> tuple[str, int]:
        """[CLS]."""
        return "[CLS]", int(self.module.tokenizer.cls_token_id)

    def streams(self) -> tuple[StreamAnatomy, ...]:
        """`vision`, pre-norm, and `pooler`, the Q-Former."""
        count = self.module.query_tokens.shape[1]
        return self.vision_stream(), pooler(self.reader.encoder.layer, "self", self.reader.config, count)

    def trunk(self, inputs: Inputs) -> Tensor:
        """The vision tower with the LayerNorm behind it, [I, 1 + h * w, D], in float32.

        The tower may be of another type than the rest: as released it is half, and runs under the model's own autocast
        on a GPU. So it does here.
        """
        module = self.module
        with module.maybe_autocast():
            tokens: Tensor = module.ln_vision(
                module.visual_encoder(inputs.images.pixel_values.to(self.embedding.weight.dtype))
            )
        return tokens.float()

    def head(self, name: str, shared: Tensor, inputs: Inputs) -> Tensor:
        """`itm`: logits [P, 2] of (no match, match), mean over queries. `contrastive`: the best query's cosine [P]."""
        ids, mask = self.opened(inputs.texts, inputs.text_of, self.opening)
        module = self.module
        former = QFormer(self._run, module.query_tokens, module.itm_head, module.vision_proj, module.text_proj)
        return former.head(name, shared, ids, mask)

    def _run(self, ids: Tensor | None, queries: Tensor | None, mask: Tensor | None, **image: Tensor) -> Tensor:
        """The Q-Former on texts, queries or both."""
        made = self.reader(ids, query_embeds=queries, attention_mask=mask, return_dict=True, **image)
        rows: Tensor = made.last_hidden_state
        return rows

    def targets(self) -> tuple[str, ...]:
        """Those of both heads."""
        return TARGETS

    def notes(self) -> tuple[str, ...]:
        """What is to be known of the queries."""
        return NOTES


class Blip2ClipLavis(Blip2ItmLavis):
    """The same with the tower of CLIP ViT-L, `pretrain_vitL`."""

    parts = (*_PARTS, "visual_encoder.transformer.resblocks", "visual_encoder.conv1")
    architectures = named(*_NAMES, types=("pretrain_vitL",))

    @property
    def embedding(self) -> Any:
        """The convolution that embeds patches."""
        return self.module.visual_encoder.conv1

    def frame(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Height and width of a patch, and of the images that the vision tower was built for."""
        return pair(self.embedding.kernel_size), pair(self.module.visual_encoder.input_resolution)

    def vision_stream(self) -> StreamAnatomy:
        """The vision tower, pre-norm."""
        vision, (rows, columns) = self.module.visual_encoder, self._sizes.grid(self._sizes.trained)
        return StreamAnatomy(
            "vision",
            tuple(_clip_block(block) for block in vision.transformer.resblocks),
            vision.num_features,
            vision.num_heads,
            f"[CLS], then {rows} x {columns} patches in raster order",
            trunk=True,
        )

    @contextmanager
    def running(self) -> Iterator[None]:
        """The tower runs with tokens as first axis; while it is read, its blocks have images there, attention aside."""
        blocks = self.module.visual_encoder.transformer
        with ExitStack() as stack:
            stack.enter_context(super().running())
            for part in (blocks, *(block.attn for block in blocks.resblocks)):
                for handle in _axes_swapped(part):
                    stack.callback(handle.remove)
            yield


def _clip_block(block: Any) -> Block:
    return Block(
        {
            "F1": Reading(block.ln_1, "output"),
            "F2": Reading(block.attn, "attention"),
            "F3_HEADS": Reading(block.attn, "heads"),
            "F3": Reading(block.attn, "output"),
            "F4": Reading(block.ln_2, "output"),
            "F5": Reading(block.mlp, "output"),
            "F6": Reading(block, "output"),
        }
    )


def _axes_swapped(module: nn.Module) -> list[torch.utils.hooks.RemovableHandle]:
    """Hooks that swap the first two axes of what a module takes and of what it gives, in this thread."""
    owner = threading.get_ident()

    def swapped(values: Any) -> Any:
        if isinstance(values, tuple):
            return tuple(map(swapped, values))
        return values.transpose(0, 1) if isinstance(values, Tensor) else values

    def before(_: nn.Module, args: tuple[Any, ...]) -> Any:
        return swapped(args) if threading.get_ident() == owner else None

    def after(_: nn.Module, __: Any, output: Any) -> Any:
        return swapped(output) if threading.get_ident() == owner else None

    return [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
