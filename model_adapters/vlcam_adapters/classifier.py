"""What the adapters of image classifiers share: sizes, pixels that are ready, labels, and one head named `class`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from vlcam.adapter import Inputs, ModelAdapter, Prefix, PreparedImages
from vlcam.anatomy import Anatomy, Block, StreamAnatomy
from vlcam.errors import AdapterError, InputError, RecipeError
from vlcam.geometry import Placement
from vlcam.targets import HeadKind

__all__ = [
    "BEFORE_NORM",
    "MEAN_OF_ALL",
    "POST_NORM",
    "ClassifierAdapter",
    "ImageSizes",
    "Normalisation",
    "Stack",
    "class_names",
    "given_pixels",
    "on_model",
    "pair",
    "processed_pixels",
    "stage_grid",
    "windowed_notes",
]

_TARGETS: dict[HeadKind, str] = {
    "classes": "class: logit, probability, log-probability, margin, finer",
    "pixels": "segmentation: logit, probability, log-probability, over a region",
}
_PLACES: dict[HeadKind, tuple[str, ...]] = {"classes": (), "pixels": ("height", "width")}
"""The axes of logits behind images and classes."""
_TOKEN_NAMES = {"cls": "[CLS]", "distillation": "[DIST]", "register": "register"}

POST_NORM = (
    "the block is res-post-norm: a LayerNorm comes behind attention and FFN, which read the residual stream itself"
)
"""Why a block of Swin v2 has no F1 and F4."""
MEAN_OF_ALL = "the classifier reads the mean of all tokens: each has a gradient at every site of every block"
BEFORE_NORM = "F3 and F5 are the branches before the LayerNorm that each passes on its way to the residual stream"
"""What is to be known of a block that has none."""


@dataclass(frozen=True)
class ImageSizes:
    """Which image sizes a model takes; each is (height, width).

    Attributes:
        patch: of one patch.
        trained: what the position embeddings were made for.
        others: whether other multiples of the patch are taken, with interpolated positions.
        remedy: what the user can do where they are not; ends the error message.
        positions: whether the model has position embeddings, which another size interpolates.
    """

    patch: tuple[int, int]
    trained: tuple[int, int]
    others: bool
    remedy: str = ""
    positions: bool = True

    def check(self, size: tuple[int, int]) -> None:
        """Refuse a size that the model cannot take.

        Raises:
            InputError: not a multiple of the patch, or not the trained size where no other is taken.
        """
        if any(side < part or side % part for side, part in zip(size, self.patch, strict=True)):
            patch = str(self.patch[0]) if self.patch[0] == self.patch[1] else f"{self.patch[0]} x {self.patch[1]}"
            raise InputError(f"image size {size}: height and width must be multiples of the patch, {patch}")
        if size != self.trained and not self.others:
            raise InputError(f"image size {size}: the model was trained at {self.trained}; {self.remedy}")

    def grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of the patch tokens."""
        return size[0] // self.patch[0], size[1] // self.patch[1]

    def steps(self, size: tuple[int, int]) -> tuple[dict[str, Any], ...]:
        """The step that records interpolated positions; none at the trained size."""
        if size == self.trained or not self.positions:
            return ()
        return ({"step": "interpolate_positions", "trained": list(self.trained), "used": list(size)},)


@dataclass(frozen=True)
class Normalisation:
    """Mean and standard deviation per channel that the preprocessing subtracts and divides by."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class Stack:
    """The blocks of a vision transformer with what a stream says of them, and notes that are true of the model.

    Attributes:
        blocks: in order, those of all stages.
        width: of the residual stream, in the last stage.
        heads: per block, in the last stage.
        notes: sentences.
        stages: how many blocks each stage has, where tokens are merged 2 x 2 from stage to stage; empty where they are
            not.
        windowed: whether the tokens of a model with stages attend within windows.
    """

    blocks: tuple[Block, ...]
    width: int
    heads: int
    notes: tuple[str, ...] = ()
    stages: tuple[int, ...] = ()
    windowed: bool = True


class ClassifierAdapter(ModelAdapter):
    """Base of the adapters of image classifiers: the trunk is the whole model, the question is a class.

    It has one head, of the kind `classes`; or of the kind `pixels`, where the model tells the class of every place. A
    family adds `accepts`, `wrap`, `load`, `stack`, `options`, `attention`, `prepare_images`, `logits` and `read_block`.
    """

    takes_text = False
    heads: Mapping[str, HeadKind] = MappingProxyType({"class": "classes"})
    notes: tuple[str, ...] = ()

    def __init__(
        self,
        module: nn.Module,
        *,
        prefix: tuple[Prefix, ...],
        sizes: ImageSizes,
        size: tuple[int, int],
        labels: Sequence[str],
        normalisation: Normalisation | None,
    ) -> None:
        """Hold a loaded model.

        Args:
            module: the model.
            prefix: image tokens before the patches.
            sizes: which image sizes the model takes.
            size: height and width that images are brought to.
            labels: a name per class, see `class_names`; empty where they have none.
            normalisation: of the preprocessing; None where it is not known.

        Raises:
            InputError: the model cannot take `size`.
        """
        self.module = module
        self.prefix = prefix
        self.labels = tuple(labels)
        self.sizes = sizes
        self.size = size
        self.normalisation = normalisation
        sizes.check(size)

    @property
    @abstractmethod
    def stack(self) -> Stack:
        """The blocks of the stream `vision`, and the notes."""

    @abstractmethod
    def logits(self, pixel_values: Tensor) -> Tensor:
        """Run the whole model as it is: class logits [I, classes], or [I, classes, height, width]."""

    @cached_property
    def anatomy(self) -> Anatomy:
        """One stream, `vision`; it runs inside the trunk."""
        stack, grid = self.stack, self.sizes.grid(self.size)
        patches = _stages_in_words(grid, stack.stages) if stack.stages else f"{grid[0]} x {grid[1]} patches"
        tokens = f"{_in_words(self.prefix)}{patches} in raster order"
        windowed = bool(stack.stages) and stack.windowed
        stream = StreamAnatomy(
            "vision", stack.blocks, stack.width, stack.heads, tokens, trunk=True, windowed=windowed, stages=stack.stages
        )
        targets = tuple(_TARGETS[kind] for kind in self.heads.values())
        return Anatomy(type(self.module).__name__, {"vision": stream}, targets, (*stack.notes, *self.notes))

    def grid(self, stream: str, layer: int, images: PreparedImages) -> tuple[int, int]:
        """Rows and columns of the tokens at a block: those of its stage, where there are stages."""
        return stage_grid(images.grid, self._stage_of[layer]) if self._stage_of else images.grid

    @cached_property
    def _stage_of(self) -> tuple[int, ...]:
        """The stage of every block."""
        return tuple(stage for stage, count in enumerate(self.stack.stages) for _ in range(count))

    def accept_pixels(self, pixel_values: Tensor) -> PreparedImages:
        """Take normalised pixels [I, 3, H, W].

        Raises:
            InputError: a size that the model cannot take as it is.
        """
        return given_pixels(self.module, self.sizes, pixel_values)

    def display(self, pixel_values: Tensor) -> Tensor:
        """Undo the normalisation; where it is not known, stretch the values from the smallest to the largest."""
        if self.normalisation is None:
            low, high = pixel_values.min(), pixel_values.max()
            return (pixel_values - low) / (high - low).clamp(min=1e-12)
        mean, std = (
            pixel_values.new_tensor(values)[:, None, None]
            for values in (self.normalisation.mean, self.normalisation.std)
        )
        return pixel_values * std + mean

    def trunk(self, inputs: Inputs) -> Tensor:
        """The whole model: class logits [I, classes], or [I, classes, height, width].

        Raises:
            AdapterError: the model returns something else than one logit per named class.
        """
        pixel_values = inputs.images.pixel_values
        found = self.logits(pixel_values)
        classes = (len(self.labels),) if self.labels else tuple(found.shape[1:2])
        wanted, places = (len(pixel_values), *classes), [axis for kind in self.heads.values() for axis in _PLACES[kind]]
        if found.ndim != 2 + len(places) or found.shape[:2] != wanted:
            axes = ", ".join(map(str, (*wanted, *places)))
            raise AdapterError(
                f"{type(self.module).__name__} returned {tuple(found.shape)}, expected class logits ({axes}): images, "
                "then class names; give as many names as the model has classes, labels=[...]"
            )
        return found

    def head(self, name: str, shared: Tensor, inputs: Inputs) -> Tensor:
        """Hand the logits [P, classes, ...] through."""
        return shared

    def averaged(self, tokens: Tensor) -> Tensor:
        """The mean [I, D] of a block's tokens [I, N, D], for `read_block`.

        Raises:
            RecipeError: a block of an earlier stage, whose tokens are narrower than what the head reads.
        """
        stack = self.stack
        if tokens.shape[-1] != stack.width:
            first, last = len(stack.blocks) - stack.stages[-1], len(stack.blocks) - 1
            raise RecipeError(
                f"gradient_path='block': the norm and head read {stack.width} channels, and this block has "
                f"{tokens.shape[-1]}: only blocks of the last stage, {first} to {last}, can be read on their own; "
                "choose layers among them, or gradient_path='full'"
            )
        return tokens.mean(1)


def class_names(labels: Any, own: Sequence[str], classes: int | None, *, source: str) -> tuple[str, ...]:
    """A name per class: those that the user gave, or the model's own; none where it has none.

    Args:
        labels: what the user gave; None for the model's own.
        own: the names that come with the model.
        classes: how many classes the model tells apart; None where only its output shows it.
        source: where the model's own names are from, for the message.

    Raises:
        AdapterError: another number of names than classes, or names that are not texts.
    """
    found = own if labels is None else labels
    if isinstance(found, str) or not isinstance(found, Sequence) or not all(isinstance(name, str) for name in found):
        raise AdapterError(f"labels={labels!r}: give a list of class names, in the order of the logits")
    nameless = labels is None and not own
    if classes is not None and len(found) != classes and not nameless:
        asked = f"{source} names {len(found)} classes" if labels is None else f"labels has {len(found)} names"
        raise AdapterError(f"{asked}, but the model has {classes} classes; give one name per class, labels=[...]")
    return tuple(found)


def given_pixels(module: nn.Module, sizes: ImageSizes, pixel_values: Tensor) -> PreparedImages:
    """Pixels [I, 3, H, W] that are preprocessed already, as the model takes them.

    Raises:
        InputError: a size that the model cannot take.
    """
    height, width = pixel_values.shape[-2:]
    size = (height, width)
    sizes.check(size)
    steps = ({"step": "given_preprocessed", "size": [height, width]}, *sizes.steps(size))
    return PreparedImages(
        on_model(module, pixel_values),
        (Placement.squashed(size, size),) * len(pixel_values),
        (steps,) * len(pixel_values),
        sizes.grid(size),
    )


def processed_pixels(
    module: nn.Module,
    sizes: ImageSizes,
    size: tuple[int, int],
    pixels: Tensor,
    placements: tuple[Placement, ...],
    steps: Sequence[tuple[dict[str, Any], ...]],
) -> PreparedImages:
    """Pixels [I, 3, H, W] as a processor made them, with its steps and those of the model for that size."""
    more = sizes.steps(size)
    return PreparedImages(on_model(module, pixels), placements, tuple((*own, *more) for own in steps), sizes.grid(size))


def on_model(module: nn.Module, pixel_values: Tensor) -> Tensor:
    """Pixels on the model's device, in its type."""
    parameter = next(module.parameters())
    return pixel_values.to(parameter.device, parameter.dtype)


def stage_grid(grid: tuple[int, int], stage: int) -> tuple[int, int]:
    """Rows and columns after 2 x 2 tokens were merged `stage` times; odd grids are padded."""
    return -(-grid[0] // 2**stage), -(-grid[1] // 2**stage)


def windowed_notes(shifts: Sequence[bool], where: str = "") -> tuple[str, ...]:
    """What is true of every Swin.

    Args:
        shifts: whether windows are shifted, for every block.
        where: for which grids only.
    """
    shifted = [str(number) for number, each in enumerate(shifts) if each]
    blocks = f"block{'s' if len(shifted) > 1 else ''} {', '.join(shifted)}{where}" if shifted else "no block"
    return (
        f"tokens attend within windows, shifted in {blocks}",
        "a grid is padded to whole windows: padding is attended to, but has no cell on a map",
        "2 x 2 tokens are merged from stage to stage; a map has the grid of its block's stage",
    )


def pair(value: Any) -> tuple[int, int]:
    """Height and width from a configuration that gives one number for both, or two."""
    if isinstance(value, int):
        return value, value
    height, width = value
    return int(height), int(width)


def _stages_in_words(grid: tuple[int, int], stages: Sequence[int]) -> str:
    """`8 x 8 patches in blocks 0-1, 4 x 4 in blocks 2-3,` and so on."""
    parts, first = [], 0
    for stage, count in enumerate(stages):
        rows, columns = stage_grid(grid, stage)
        blocks = f"block {first}" if count == 1 else f"blocks {first}-{first + count - 1}"
        parts.append(f"{rows} x {columns}{'' if stage else ' patches'} in {blocks}")
        first += count
    return f"{', '.join(parts)},"


def _in_words(prefix: tuple[Prefix, ...]) -> str:
    """`[CLS], 4 registers, then `, or nothing where the patches come first."""
    registers = prefix.count("register")
    names = [_TOKEN_NAMES[name] for name in prefix if name != "register"]
    if registers:
        names.append(f"{registers} registers")
    return f"{', '.join(names)}, then " if names else ""
