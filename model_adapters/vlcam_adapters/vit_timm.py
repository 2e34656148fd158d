"""Vision transformers of timm that classify: `VisionTransformer`, the distilled one, `Beit` and `Eva`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

from timm.layers import Format
from timm.models.beit import Beit
from timm.models.beit import Block as BeitBlock
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva, EvaBlock, EvaBlockPostNorm
from timm.models.vision_transformer import Block as VitBlock
from timm.models.vision_transformer import ResPostBlock, VisionTransformer
from torch import Tensor, nn

from vlcam.adapter import Inputs, Prefix
from vlcam.anatomy import Block, Reading
from vlcam.errors import AdapterError
from vlcam_adapters.classifier import ImageSizes, Stack
from vlcam_adapters.timm_classifier import TimmClassifier
from vlcam_adapters.timm_models import CHECKPOINTING, changed, fused_or_explicit

__all__ = ["VitTimm", "prefix_of", "stack_of"]

_PRE_NORM = (VitBlock, BeitBlock, EvaBlock)
_POST_NORM = (ResPostBlock, EvaBlockPostNorm)

_NO_NORM = "the block is post-norm: attention and MLP read the residual stream, not a LayerNorm of their own"
_TWO_SOFTMAXES = "differential attention is the difference of two softmaxes, which is no probability"
_SET_SIZE = "timm cannot change that on the fly: call model.set_input_size(img_size=(height, width)) before you wrap it"
_DYNAMIC = "wrap or load it with dynamic_img_size=True to interpolate its positions, which is then on record"


class VitTimm(TimmClassifier):
    """Adapter for timm's vision transformers with a classification head."""

    # The config.json of timm names an entry of its registry; see `loads`.
    architectures: ClassVar[tuple[str, ...]] = ("vit_*", "deit*", "beit*", "eva*")
    families: ClassVar[tuple[type[nn.Module], ...]] = (VisionTransformer, Beit, Eva)
    files: ClassVar[tuple[str, ...]] = ("vision_transformer", "vision_transformer_hybrid", "deit", "beit", "eva")

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
            dynamic_img_size: whether other sizes than the trained one are taken, with interpolated positions.

        Raises:
            AdapterError: a model without classes, or with blocks that are not known; an option that it cannot meet.
            InputError: an image size that the model cannot take.
        """
        super().__init__(
            module,
            processor,
            prefix=prefix_of(module),
            sizes=_sizes(module, asked=dynamic_img_size),
            labels=labels,
            image_size=image_size,
            dynamic_img_size=dynamic_img_size,
        )
        self.reads = "cls" if self.module.global_pool == "token" else "patches"
        self._stack = stack_of(self.module)

    @property
    def stack(self) -> Stack:
        """The blocks, in which LayerScale, where there is one, comes after F3 and F5."""
        return self._stack

    @property
    def attention(self) -> str:
        """What timm chose when the model was made: fused or explicit attention."""
        return fused_or_explicit(self.module.blocks)

    @property
    def joins_heads(self) -> bool:
        """Not where each has a bias of relative positions, as in BEiT."""
        return not any(
            getattr(block.attn, "relative_position_bias_table", None) is not None for block in self.module.blocks
        )

    def logits(self, pixel_values: Tensor) -> Tensor:
        """Run the model as it is; the mean of both heads where it is distilled."""
        height, width = pixel_values.shape[-2:]
        with _taking(self.module, (height, width), self.sizes):
            found: Tensor = self.module(pixel_values)
        return found

    def read_block(self, name: str, tokens: Tensor, inputs: Inputs, *, bare: bool = False) -> Tensor:
        """The final norm and the head, or the mean of both heads, on the mean of all tokens of a block.

        Raises:
            RecipeError: the model pools by attention, which an average does not replace.
        """
        if getattr(self.module, "attn_pool", None) is not None:
            return super().read_block(name, tokens, inputs)
        seen = self.module.norm(tokens.mean(1))
        found: Tensor
        if isinstance(self.module, VisionTransformerDistilled):
            found = (self.module.head(seen) + self.module.head_dist(seen)) / 2
        else:
            found = self.module.head(self.module.fc_norm(seen))
        return found

    @contextmanager
    def running(self) -> Iterator[None]:
        """Switch gradient checkpointing off, under which every hook would fire again in the backward pass."""
        with changed(self.module, grad_checkpointing=False):
            yield


def prefix_of(module: Any) -> tuple[Prefix, ...]:
    """Names of the tokens before the patches, in the order in which timm's classes put them.

    Raises:
        AdapterError: tokens that are not known.
    """
    found: tuple[Prefix, ...] = () if module.cls_token is None else ("cls",)
    registers = getattr(module, "reg_token", None)
    if isinstance(module, VisionTransformerDistilled):
        found = (*found, "distillation")
    elif registers is not None:
        found = (*found, *(("register",) * registers.shape[1]))
    if len(found) != module.num_prefix_tokens:
        raise AdapterError(
            f"{type(module).__name__} has the tokens {found}, but num_prefix_tokens={module.num_prefix_tokens}; no "
            "layout is guessed"
        )
    return found


def _sizes(module: Any, *, asked: bool) -> ImageSizes:
    embed = module.patch_embed
    if isinstance(module, Beit) and asked:
        raise AdapterError(
            f"dynamic_img_size=True: {type(module).__name__} has positions and biases for {tuple(embed.img_size)} "
            f"pixels; {_SET_SIZE}"
        )
    others = asked or getattr(module, "dynamic_img_size", False)
    remedy = _SET_SIZE if isinstance(module, Beit) else _DYNAMIC
    return ImageSizes(tuple(embed.feat_ratio(as_scalar=False)), tuple(embed.img_size), others, remedy)


def stack_of(module: Any) -> Stack:
    """The blocks of a vision transformer of timm, whether it classifies or not.

    Raises:
        AdapterError: a block that is not known.
    """
    blocks = tuple(_block(block, number) for number, block in enumerate(module.blocks))
    first = module.blocks[0]
    notes = [CHECKPOINTING]
    if getattr(first, "gamma_1", None) is not None or not isinstance(getattr(first, "ls1", nn.Identity()), nn.Identity):
        notes.append("F3 and F5 are the branches before LayerScale")
    between = [name for name in ("norm", "gate") if _acts(getattr(first.attn, name, None))]
    if between:
        notes.append(f"F3_HEADS comes after attn.{' and attn.'.join(between)}")
    if isinstance(module, VisionTransformerDistilled):
        notes.append("the logits are the mean of two heads, of the class and of the distillation token")
    return Stack(blocks, int(module.embed_dim), int(first.attn.num_heads), tuple(notes))


def _block(block: Any, number: int) -> Block:
    if not isinstance(block, _PRE_NORM + _POST_NORM):
        known = ", ".join(dict.fromkeys(kind.__name__ for kind in _PRE_NORM + _POST_NORM))
        raise AdapterError(
            f"block {number} is of class {type(block).__module__}.{type(block).__qualname__}; of timm's blocks this "
            f"adapter knows {known}, in which attention and MLP follow each other"
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
    lacks = {}
    if isinstance(block, _POST_NORM):
        lacks = {"F1": _NO_NORM, "F4": _NO_NORM}
    if hasattr(block.attn, "lambda_init"):
        lacks["F2"] = _TWO_SOFTMAXES
    return Block({name: reading for name, reading in sites.items() if name not in lacks}, lacks)


def _acts(part: Any) -> bool:
    return part is not None and not isinstance(part, nn.Identity)


@contextmanager
def _taking(module: Any, size: tuple[int, int], sizes: ImageSizes) -> Iterator[None]:
    """Let a model that was made for one size run on another, as timm does when it is made with dynamic_img_size."""
    with ExitStack() as stack:
        if size != sizes.trained and not module.dynamic_img_size:
            flags = {"strict_img_size": False, "flatten": False, "output_fmt": Format.NHWC}
            stack.enter_context(changed(module.patch_embed, **flags))
            stack.enter_context(changed(module, dynamic_img_size=True))
            rope = getattr(module, "rope", None)
            if rope is not None and getattr(rope, "feat_shape", None) is not None:
                # A table that was made ahead would be used whatever the size.
                tables = dict(rope.named_buffers(recurse=False))
                stack.enter_context(changed(rope, feat_shape=rope.feat_shape, **tables))
                rope.update_feat_shape(sizes.grid(size))
        yield
