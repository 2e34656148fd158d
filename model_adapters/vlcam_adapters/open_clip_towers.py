"""The vision towers of open_clip, its own and those of timm: how image tokens are made, pooled and projected."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal

import torch
from open_clip.timm_model import TimmModel
from open_clip.transformer import (
    CustomResidualAttentionBlock,
    ResidualAttentionBlock,
    VisionTransformer,
)
from timm.layers import AttentionPoolLatent
from timm.models.deit import VisionTransformerDistilled
from torch import Tensor, nn
from torch.nn.functional import normalize

from vlcam.adapter import Prefix
from vlcam.anatomy import Block, Reading, StreamAnatomy
from vlcam.errors import AdapterError
from vlcam_adapters.classifier import ImageSizes, Stack, pair
from vlcam_adapters.timm_models import fused_or_explicit
from vlcam_adapters.vit_timm import VitTimm, prefix_of, stack_of

__all__ = ["Tower", "residual_block", "residual_stack", "tower_of"]

_FUSED = "fused (scaled_dot_product_attention)"
_CHECKPOINTING = (
    "gradient checkpointing, which open_clip and timm keep on in evaluation too, is off while vlcam runs the model"
)
_LAYER_SCALE = "F3 and F5 are the branches before LayerScale"
_FIXED = (
    "open_clip fits positions to another size only where it loads weights: create the model with "
    "force_image_size=(height, width), or load it with image_size=(height, width)"
)


class Tower(ABC):
    """A vision tower: how its image tokens are made, pooled and projected.

    Attributes:
        visual: the tower, as it stands in the model.
        stack: its blocks.
        prefix: image tokens before the patches.
        reads: whether the class token is pooled, or the patches are.
        sizes: which image sizes it takes.
        entry: its first layer, whose device and type images must have.
        loop: the module that runs the blocks.
        attention: how attention is computed, in words.
        pools: whether it pools by attention.
    """

    visual: Any
    stack: Stack
    prefix: tuple[Prefix, ...]
    reads: Literal["cls", "patches"]
    sizes: ImageSizes
    entry: nn.Module
    loop: nn.Module
    attention: str
    pools: bool

    def tokens(self, pixel_values: Tensor) -> Tensor:
        """The last block's output, [I, prefix + h * w, D]."""
        made = self.visual.forward_intermediates(
            pixel_values, indices=1, intermediates_only=True, output_fmt="NLC", output_extra_tokens=True
        )
        patches: Tensor = made["image_intermediates"][0]
        prefix = made.get("image_intermediates_prefix")
        return patches if prefix is None else torch.cat((prefix[0], patches), 1)

    @abstractmethod
    def pooled(self, tokens: Tensor) -> Tensor:
        """From what `tokens` gave to the image's embedding [I, E], not yet of unit length."""

    @abstractmethod
    def norm(self, tokens: Tensor) -> Tensor:
        """The final norm, which tokens [..., D] have to pass."""

    @abstractmethod
    def projected(self, vectors: Tensor) -> Tensor:
        """From vectors [..., D] behind the final norm to embeddings [..., E]."""

    @abstractmethod
    def of_block(self, tokens: Tensor, *, bare: bool) -> Tensor:
        """What the pooler makes of any block's tokens [I, N, D]; see `ModelAdapter.read_block`."""

    @abstractmethod
    def pooler(self, tokens: str) -> StreamAnatomy | None:
        """The stream of the pooler, whose keys are tokens as described in words; None where there is none."""

    def in_words(self, size: tuple[int, int]) -> str:
        """The image tokens in order."""
        rows, columns = self.sizes.grid(size)
        names = [f"[{name.upper()}]" for name in self.prefix]
        return f"{', '.join(names)}{', then ' if names else ''}{rows} x {columns} patches in raster order"


class _NativeTower(Tower):
    """A tower of open_clip's own."""

    prefix: tuple[Prefix, ...] = ("cls",)

    def __init__(self, visual: VisionTransformer) -> None:
        """Hold a tower.

        Raises:
            AdapterError: it pools in a way that is not known.
        """
        self.visual, self.entry, self.loop = visual, visual.conv1, visual.transformer
        self.pools = visual.attn_pool is not None
        if visual.pool_type not in ("tok", "avg"):
            raise AdapterError(
                f"visual pools by pool_type={visual.pool_type!r}, attentional_pool="
                f"{getattr(visual, 'attn_pool_type', False)!r}: looked for pool_type 'tok' or 'avg', with "
                "attentional_pool on or off"
            )
        self.reads = "patches" if self.pools or visual.pool_type == "avg" else "cls"
        self.sizes = ImageSizes(pair(visual.patch_size), pair(visual.image_size), others=False, remedy=_FIXED)
        self.stack = residual_stack(visual.transformer, "visual")
        self.attention = _FUSED

    def pooled(self, tokens: Tensor) -> Tensor:
        seen, _ = self.visual._pool(tokens)  # noqa: SLF001 - the order of norm and pooling is the library's own
        return self._out(seen)

    def norm(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.visual.ln_post(tokens)
        return found

    def projected(self, vectors: Tensor) -> Tensor:
        return self._out(vectors)

    def of_block(self, tokens: Tensor, *, bare: bool) -> Tensor:
        if not bare:
            return normalize(self.pooled(tokens), dim=-1)
        slots = self.visual.attn_pool(tokens)
        return self._out(slots[:, 0] if self.visual.pool_type == "tok" else slots[:, 1:].mean(1))

    def pooler(self, tokens: str) -> StreamAnatomy | None:
        if not self.pools:
            return None
        module, queries = self.visual.attn_pool, len(self.visual.attn_pool.query)
        sites = {"CROSS": Reading(module.attn, "attention"), "CONTEXT": Reading(module, "input")}
        said = f"{queries} learned queries; keys of CROSS: {tokens}"
        width, heads = int(module.attn.embed_dim), int(module.attn.num_heads)
        return StreamAnatomy("pooler", (Block(sites),), width, heads, said, trunk=False, queries=queries)

    def _out(self, vectors: Tensor) -> Tensor:
        return vectors if self.visual.proj is None else vectors @ self.visual.proj


class _TimmTower(Tower):
    """A tower that wraps a vision transformer of timm."""

    def __init__(self, visual: TimmModel) -> None:
        """Hold a tower.

        Raises:
            AdapterError: it pools in a way that is not known, or has blocks that are not.
        """
        trunk = visual.trunk
        self.visual, self.entry, self.loop = visual, trunk.patch_embed, trunk
        self.prefix = prefix_of(trunk)
        pool = getattr(trunk, "attn_pool", None)
        self.pools = pool is not None
        keeps_all = not self.prefix or getattr(trunk, "pool_include_prefix", True)
        if not trunk.global_pool or (pool is not None and not (isinstance(pool, AttentionPoolLatent) and keeps_all)):
            raise AdapterError(
                f"visual.trunk pools by global_pool={trunk.global_pool!r}, attn_pool={type(pool).__name__}: looked for "
                "a pool of the class token or of patches, or an AttentionPoolLatent that reads all tokens"
            )
        self.reads = "cls" if trunk.global_pool == "token" else "patches"
        embed = trunk.patch_embed
        self.sizes = ImageSizes(
            tuple(embed.feat_ratio(as_scalar=False)),
            tuple(embed.img_size),
            getattr(trunk, "dynamic_img_size", False),
            _FIXED,
        )
        self.stack = stack_of(trunk)
        self.attention = fused_or_explicit(trunk.blocks)

    def tokens(self, pixel_values: Tensor) -> Tensor:
        """The last block's output; where it is pooled by attention, behind the final norm, as the pooler reads it."""
        made = super().tokens(pixel_values)
        return self.norm(made) if self.pools else made

    def pooled(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.visual.head(self.visual.trunk.forward_head(tokens if self.pools else self.norm(tokens)))
        return found

    def norm(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.visual.trunk.norm(tokens)
        return found

    def projected(self, vectors: Tensor) -> Tensor:
        trunk = self.visual.trunk
        found: Tensor = self.visual.head(trunk.head(trunk.head_drop(trunk.fc_norm(vectors))))
        return found

    def of_block(self, tokens: Tensor, *, bare: bool) -> Tensor:
        return normalize(self.pooled(tokens if bare else self.norm(tokens)), dim=-1)

    def pooler(self, tokens: str) -> StreamAnatomy | None:
        if not self.pools:
            return None
        module = self.visual.trunk.attn_pool
        sites = {"CROSS": Reading(module, "attention"), "CONTEXT": Reading(module, "input")}
        queries, heads = int(module.latent_len), int(module.num_heads)
        said = f"{queries} learned {'query' if queries == 1 else 'queries'}; keys of CROSS: {tokens}"
        width = heads * int(module.head_dim)
        return StreamAnatomy("pooler", (Block(sites),), width, heads, said, trunk=False, queries=queries)


def tower_of(visual: Any) -> Tower:
    """What runs the vision tower of a model.

    Raises:
        AdapterError: a tower of another kind; lists those that were looked for.
    """
    if isinstance(visual, VisionTransformer):
        return _NativeTower(visual)
    trunk: Any = getattr(visual, "trunk", None)
    if isinstance(visual, TimmModel) and VitTimm.accepts(trunk) and not isinstance(trunk, VisionTransformerDistilled):
        return _TimmTower(visual)
    found = " around ".join(f"{type(each).__module__}.{type(each).__qualname__}" for each in (visual, trunk) if each)
    kinds = ", ".join(kind.__name__ for kind in VitTimm.families)
    raise AdapterError(
        f"visual is {found}, which this adapter does not know; looked for open_clip.transformer.VisionTransformer, and "
        f"for open_clip.timm_model.TimmModel around one of timm's {kinds}"
    )


def residual_stack(transformer: Any, name: str) -> Stack:
    """The blocks of one of open_clip's transformers.

    Raises:
        AdapterError: blocks that are not known.
    """
    if not transformer.batch_first:
        raise AdapterError(f"{name}.transformer has batch_first=False; this adapter reads [batch, tokens, width] alone")
    blocks, first = tuple(residual_block(block) for block in transformer.resblocks), transformer.resblocks[0]
    notes = [_CHECKPOINTING]
    if not isinstance(first.ls_1, nn.Identity):
        notes.append(_LAYER_SCALE)
    if isinstance(first, CustomResidualAttentionBlock):
        if not isinstance(first.ln_attn, nn.Identity):
            notes.append("F3 comes before ln_attn, which attention passes on its way to the residual stream")
        if not isinstance(first.attn.ln_inner, nn.Identity) or first.attn.head_scale is not None:
            notes.append("F3_HEADS comes after the scale of heads and attn.ln_inner, where there are such")
    return Stack(blocks, int(transformer.width), int(first.attn.num_heads), tuple(notes))


def residual_block(block: Any) -> Block:
    """The sites of a block of open_clip.

    Raises:
        AdapterError: a block that is not known.
    """
    if isinstance(block, CustomResidualAttentionBlock):
        heads = Reading(block.attn.out_proj, "input")
    elif isinstance(block, ResidualAttentionBlock):
        heads = Reading(block.attn, "heads")
    else:
        raise AdapterError(
            f"a block is {type(block).__module__}.{type(block).__qualname__}; looked for ResidualAttentionBlock and "
            "CustomResidualAttentionBlock of open_clip.transformer"
        )
    return Block(
        {
            "F1": Reading(block.ln_1, "output"),
            "F2": Reading(block.attn, "attention"),
            "F3_HEADS": heads,
            "F3": Reading(block.attn, "output"),
            "F4": Reading(block.ln_2, "output"),
            "F5": Reading(block.mlp, "output"),
            "F6": Reading(block, "output"),
        }
    )
