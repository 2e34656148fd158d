"""Vision transformers of timm that classify: `VisionTransformer`, the distilled one, `Beit` and `Eva`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, ClassVar, Self

import timm
from safetensors import SafetensorError
from timm.data import ImageNetInfo, create_transform, resolve_model_data_config
from timm.layers import Format
from timm.models import is_model_in_modules
from timm.models.beit import Beit
from timm.models.beit import Block as BeitBlock
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva, EvaBlock, EvaBlockPostNorm
from timm.models.vision_transformer import Block as VitBlock
from timm.models.vision_transformer import ResPostBlock, VisionTransformer
from torch import Tensor, nn

from vlcam.adapter import Inputs, Prefix, PreparedImages
from vlcam.anatomy import Block, Reading
from vlcam.errors import AdapterError
from vlcam.images import SourceImage
from vlcam_adapters.classifier import ClassifierAdapter, ImageSizes, Stack, class_names
from vlcam_adapters.hf_loading import cast, placed
from vlcam_adapters.hf_processing import whole_pixels
from vlcam_adapters.torchvision_processing import Pipeline, prepare

__all__ = [
    "CHECKPOINTING",
    "TimmClassifier",
    "VitTimm",
    "changed",
    "fused_or_explicit",
    "loading_by",
    "prefix_of",
    "stack_of",
]

CHECKPOINTING = "gradient checkpointing, which timm keeps on in evaluation too, is off while vlcam runs the model"

_PRE_NORM = (VitBlock, BeitBlock, EvaBlock)
_POST_NORM = (ResPostBlock, EvaBlockPostNorm)

# Towers of image-text models, of which timm keeps the projection as the head.
_PROJECTING = re.compile(r"_(clip|mci|pe_core)_")

_NO_NORM = "the block is post-norm: attention and MLP read the residual stream, not a LayerNorm of their own"
_TWO_SOFTMAXES = "differential attention is the difference of two softmaxes, which is no probability"
_SET_SIZE = "timm cannot change that on the fly: call model.set_input_size(img_size=(height, width)) before you wrap it"
_DYNAMIC = "wrap or load it with dynamic_img_size=True to interpolate its positions, which is then on record"


class TimmClassifier(ClassifierAdapter):
    """Base of the adapters of timm's classifiers.

    Images are prepared as the model's `pretrained_cfg` says, or by a transform that the user gives. A family names its
    classes in `families`, timm's files that define them in `files`, and adds `stack`, `attention`, `logits` and
    `read_block`.
    """

    library = "timm"
    families: ClassVar[tuple[type[nn.Module], ...]]
    files: ClassVar[tuple[str, ...]]
    module: Any

    def __init__(
        self,
        module: nn.Module,
        processor: Any,
        *,
        prefix: tuple[Prefix, ...],
        sizes: ImageSizes,
        labels: Sequence[str] | None,
        image_size: tuple[int, int] | None,
        dynamic_img_size: bool,
    ) -> None:
        """Hold a loaded model.

        Args:
            module: the model.
            processor: a torchvision transform that prepares an image; by default the one of its `pretrained_cfg`.
            prefix: image tokens before the patches.
            sizes: which image sizes the model takes.
            labels: a name per class, in place of those that timm knows.
            image_size: height and width that images are resized to, in place of the transform's resize and crop.
            dynamic_img_size: what the user asked for, for the record; `sizes` says what it comes to.

        Raises:
            AdapterError: a model without classes; an option that it cannot meet.
            InputError: an image size that the model cannot take.
        """
        classes = _classes(module)
        if labels is None:
            _refuse_projection(module, classes)
        own = _own_labels(module, classes)
        pipeline = _own_pipeline(module, sizes.trained) if processor is None else Pipeline(processor)
        wanted = None if image_size is None else whole_pixels(image_size)
        if pipeline is not None and wanted is not None:
            pipeline = pipeline.exactly(wanted)
        super().__init__(
            module,
            prefix=prefix,
            sizes=sizes,
            size=wanted or (pipeline.size if pipeline else None) or sizes.trained,
            labels=class_names(labels, own, classes, source="pretrained_cfg"),
            normalisation=pipeline.normalisation if pipeline else None,
        )
        self._pipeline = pipeline
        self._options = {
            "labels": None if labels is None else list(labels),
            "image_size": None if wanted is None else list(wanted),
            "dynamic_img_size": dynamic_img_size,
        }

    @classmethod
    def accepts(cls, module: nn.Module) -> bool:
        """Whether it is one of timm's classes, or of a subclass."""
        return isinstance(module, cls.families)

    @classmethod
    def loads(cls, config: Mapping[str, Any]) -> bool:
        """Whether the checkpoint is of timm's own format, with an architecture of these families."""
        name = config.get("architecture")
        return isinstance(name, str) and bool(is_model_in_modules(name, cls.files))

    @classmethod
    def wrap(cls, module: nn.Module, processor: Any, **options: Any) -> Self:
        """Make an adapter for a loaded model; processor and options as in the constructor."""
        if not cls.accepts(module):
            *names, last = (kind.__name__ for kind in cls.families)
            raise AdapterError(
                f"expected a {', '.join(names)} or {last} of timm, found {type(module).__module__}."
                f"{type(module).__qualname__}"
            )
        return cls(module, processor, **options)

    @classmethod
    def load(
        cls, source: str | Path, *, local: bool, dtype: str = "float32", device: str = "cpu", **options: Any
    ) -> Self:
        """Load a checkpoint to `device` in `dtype`; the other options as in the constructor."""
        with loading_by("timm", source):
            module = timm.create_model(f"{'local-dir' if local else 'hf-hub'}:{source}", pretrained=True)
        return cls.wrap(placed(module.to(cast(dtype)), device).eval(), None, **options)

    @property
    def options(self) -> Mapping[str, Any]:
        """Labels, image size, and whether others are taken."""
        return self._options

    def prepare_images(self, images: Sequence[SourceImage]) -> PreparedImages:
        """Run the transform.

        Raises:
            InputError: the model has no `pretrained_cfg` and no transform was given, or the size does not fit.
        """
        remedy = "it has no pretrained_cfg; give the transform, vlcam.wrap(model, transform)"
        return prepare(self._pipeline, self.module, self.sizes, images, remedy=remedy)


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


def fused_or_explicit(blocks: Iterable[Any]) -> str:
    """How timm's blocks compute attention, in words."""
    fused = {bool(getattr(block.attn, "fused_attn", False)) for block in blocks}
    names = {True: "fused (scaled_dot_product_attention)", False: "explicit"}
    return names[fused.pop()] if len(fused) == 1 else "fused in some blocks, explicit in others"


@contextmanager
def changed(part: nn.Module, **values: Any) -> Iterator[None]:
    """Attributes of a module set to values, and put back."""
    before = {name: getattr(part, name) for name in values}
    try:
        for name, value in values.items():
            setattr(part, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(part, name, value)


def _classes(module: Any) -> int:
    """How many classes the head tells apart; a head that was swapped by hand counts, not `num_classes`."""
    linear = [part for part in module.head.modules() if isinstance(part, nn.Linear)]
    if not linear:
        raise AdapterError(
            f"{type(module).__name__} with num_classes={module.num_classes} and a head of type "
            f"{type(module.head).__name__} has no classifier: it gives an embedding of {module.num_features} numbers, "
            "of which no class can be explained; create it with num_classes=..., or load weights that have a head"
        )
    if not module.global_pool:
        raise AdapterError(
            f"{type(module).__name__} with global_pool='' gives logits for every token, and no class of the image; "
            "create it with another global_pool"
        )
    channels = getattr(module, "in_chans", 3)
    if channels != 3:
        raise AdapterError(f"{type(module).__name__} takes {channels} channels; vlcam gives it RGB images")
    return int(linear[-1].out_features)


def _refuse_projection(module: Any, classes: int) -> None:
    """The numbers of an embedding would be explained as if they were classes."""
    config = _config(module)
    name = str(config.get("architecture", ""))
    if config.get("num_classes") == classes and _PROJECTING.search(name) and not _datasets(config):
        raise AdapterError(
            f"{name}.{config.get('tag')} has a head that projects the image to an embedding of {classes} numbers, "
            "to be compared with texts, and no classes; if you trained the head on classes, name them, labels=[...]"
        )


def _config(module: Any) -> Mapping[str, Any]:
    return getattr(module, "pretrained_cfg", None) or {}


def _datasets(config: Mapping[str, Any]) -> list[str]:
    """The parts of ImageNet that weights were trained on, in order, as their tag tells: `in21k`, `in1k`."""
    return re.findall(r"in\d+k", str(config.get("tag", "")))


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


def _own_pipeline(module: Any, size: tuple[int, int]) -> Pipeline | None:
    """The transform that `pretrained_cfg` describes, for the size that the model has now."""
    if not _config(module):
        return None
    settings = resolve_model_data_config(module, args={"input_size": (3, *size)})
    return Pipeline(create_transform(**settings, is_training=False))


def _own_labels(module: Any, classes: int) -> tuple[str, ...]:
    """The names that come with the weights, or those of ImageNet-1k where they were last trained on it; or none."""
    config = _config(module)
    names = config.get("label_names") or ()
    if isinstance(names, Mapping):
        by_number = {int(number): name for number, name in names.items()}
        names = [by_number[number] for number in range(classes) if number in by_number]
    if len(names) == classes:
        said = config.get("label_descriptions") or {}
        return tuple(str(said.get(name, name)) for name in names)
    info = ImageNetInfo() if _datasets(config)[-1:] == ["in1k"] else None
    return tuple(info.label_descriptions()) if info and info.num_classes() == classes else ()


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


@contextmanager
def loading_by(library: str, source: str | Path) -> Iterator[None]:
    """What a library raises on missing, damaged or unfitting files becomes one error.

    Raises:
        AdapterError: the library could not load the source.
    """
    try:
        yield
    except (
        OSError,
        RuntimeError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        EOFError,
        SafetensorError,
        UnpicklingError,
    ) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise AdapterError(f"{str(source)!r} cannot be loaded by {library}: {reason}") from None
