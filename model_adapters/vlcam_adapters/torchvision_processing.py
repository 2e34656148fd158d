"""What a torchvision transform does, read off its steps: the record, which part of the image is seen, the numbers.

The pixels always come from the transform itself. Only steps whose effect on frame and values is known are taken; a
subclass of one may do anything, so classes are told by their exact name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision import transforms
from torchvision.transforms import InterpolationMode

from vlcam.adapter import PreparedImages
from vlcam.errors import AdapterError, InputError, listing
from vlcam.geometry import Placement
from vlcam.images import SourceImage
from vlcam_adapters.classifier import ImageSizes, Normalisation, on_model

__all__ = ["Pipeline", "prepare"]

Size = tuple[int, int]

_REMEDY = "preprocess the image yourself and give a float tensor [3, H, W]"
_BYTE = 1 / 255
_NAMES = {
    "torchvision.Resize": "resize",
    "timm.ResizeKeepRatio": "resize_keep_ratio",
    "open_clip.ResizeKeepRatio": "resize_keep_ratio",
    "torchvision.CenterCrop": "crop",
    "timm.CenterCropOrPad": "crop",
    "open_clip.CenterCropOrPad": "crop",
    "torchvision.ToTensor": "to_tensor",
    "timm.MaybeToTensor": "to_tensor",
    "open_clip.MaybeToTensor": "to_tensor",
    "torchvision.PILToTensor": "to_bytes",
    "timm.MaybePILToTensor": "to_bytes",
    "torchvision.ToImage": "to_bytes",
    "torchvision.ConvertImageDtype": "to_dtype",
    "torchvision.ToDtype": "to_dtype",
    "torchvision.Normalize": "normalize",
    "torchvision.Identity": "nothing",
    "torchvision.ToPureTensor": "nothing",
    "torchvision.RGB": "nothing",
    "open_clip.MaybeConvertMode": "nothing",
    "torch.Identity": "nothing",
}
_FRAMING = ("resize", "resize_keep_ratio", "crop")


class Pipeline:
    """A transform from a PIL image to normalised pixels [3, H, W], with what can be said of it.

    Attributes:
        size: height and width of the result; None where it depends on the image.
        normalisation: how the result is brought back to 0..1.
    """

    def __init__(self, transform: Callable[[Image.Image], Any]) -> None:
        """Read the steps of a transform: a Compose, a Sequential, an `ImageClassification` preset, or a single step.

        Raises:
            AdapterError: a step that is not known, or an end that is not float pixels.
        """
        self._transform = transform
        self._leaves = tuple(_leaves(transform))
        # Two proportions: where both end alike, every image does.
        tall, wide = (self._walk(size) for size in ((211, 97), (97, 211)))
        if not tall.floats:
            raise AdapterError(
                f"processor={type(transform).__name__} ends without float values: add ToTensor() or "
                f"ToDtype(torch.float32, scale=True), and Normalize; or {_REMEDY}"
            )
        self.size = tall.size if tall.size == wide.size else None
        self.normalisation = Normalisation(tuple(tall.mean), tuple(tall.std))

    def __call__(self, image: Image.Image) -> tuple[Tensor, tuple[dict[str, Any], ...], Placement]:
        """Pixels [3, H, W], the steps with their numbers, and the placement.

        Raises:
            AdapterError: the transform gave something else than its steps say.
        """
        walk = self._walk((image.height, image.width))
        made = self._transform(image)
        found = tuple(made.shape) if isinstance(made, Tensor) else type(made).__name__
        if found != (3, *walk.size):
            raise AdapterError(
                f"processor={type(self._transform).__name__} returned {found}; by its steps it makes {(3, *walk.size)}"
            )
        steps = ({"step": "processor", "class": type(self._transform).__name__}, *walk.steps)
        placement = Placement((image.height, image.width), walk.size, walk.box)
        return made.as_subclass(Tensor), steps, placement

    def exactly(self, size: Size) -> Pipeline:
        """The same values, but the whole image resized to a height and width, without regard to its proportions."""
        framing = [leaf for leaf in self._leaves if _kind(leaf) in _FRAMING]
        resizes = [leaf for leaf in framing if _kind(leaf) != "crop"]
        resample = InterpolationMode(_interpolation(resizes[0]) if resizes else "bicubic")
        smooth = getattr(resizes[0], "antialias", True) if resizes else True
        first = self._leaves.index(framing[0]) if framing else 0
        kept = [leaf for leaf in self._leaves if _kind(leaf) not in _FRAMING]
        kept.insert(first, transforms.Resize(size, resample, antialias=smooth))
        return Pipeline(transforms.Compose(kept))

    def normalising(self, mean: Sequence[float] | None, std: Sequence[float] | None) -> Pipeline:
        """The same frame, but values normalised by other numbers per channel; None for those that it has.

        Raises:
            AdapterError: the transform has no single Normalize.
        """
        own = [leaf for leaf in self._leaves if _kind(leaf) == "normalize"]
        if len(own) != 1:
            raise AdapterError(
                f"processor={type(self._transform).__name__} has {len(own)} Normalize steps, whose mean and deviation "
                f"cannot be replaced; give a transform that has one, or {_REMEDY}"
            )
        other = transforms.Normalize(_numbers(own[0].mean if mean is None else mean), _numbers(std or own[0].std))
        return Pipeline(transforms.Compose([other if leaf is own[0] else leaf for leaf in self._leaves]))

    def _walk(self, size: Size) -> _Walk:
        walk = _Walk(size, (0.0, 0.0, float(size[1]), float(size[0])))
        for leaf in self._leaves:
            getattr(walk, _kind(leaf))(leaf)
        return walk


@dataclass
class _Walk:
    """How far an image of one size has come: where its frame lies in the original, and what its values mean.

    A value v stands for v * std + mean in 0..1.
    """

    size: Size
    box: tuple[float, float, float, float]
    tensor: bool = False
    floats: bool = False
    mean: list[float] = field(default_factory=lambda: [0.0] * 3)
    std: list[float] = field(default_factory=lambda: [_BYTE] * 3)
    steps: list[dict[str, Any]] = field(default_factory=list)

    def resize(self, leaf: Any) -> None:
        if leaf.max_size is not None:
            raise AdapterError(f"Resize with max_size={leaf.max_size}: not known to vlcam; {_REMEDY}")
        given = [leaf.size] if isinstance(leaf.size, int) else list(leaf.size)
        height, width = self.size
        if len(given) == 2:
            target = (given[0], given[1])
        elif width <= height:
            target = (int(given[0] * height / width), given[0])
        else:
            target = (given[0], int(given[0] * width / height))
        self._resized(leaf, target, {"shortest_edge": given[0]} if len(given) == 1 else None)

    def resize_keep_ratio(self, leaf: Any) -> None:
        if leaf.random_scale_prob or leaf.random_aspect_prob or isinstance(leaf.interpolation, tuple):
            raise AdapterError(f"ResizeKeepRatio that is random: not known to vlcam; {_REMEDY}")
        ratios = [side / target for side, target in zip(self.size, leaf.size, strict=True)]
        ratio = max(ratios) * leaf.longest + min(ratios) * (1 - leaf.longest)
        height, width = (round(side / ratio) for side in self.size)
        self._resized(leaf, (height, width), {"fit": list(leaf.size), "longest": leaf.longest})

    def crop(self, leaf: Any) -> None:
        height, width = _pair(leaf.size)
        top, left = (_corner(have, want) for have, want in zip(self.size, (height, width), strict=True))
        x0, y0, x1, y1 = self.box
        down, across = (y1 - y0) / self.size[0], (x1 - x0) / self.size[1]
        self.box = (x0 + left * across, y0 + top * down, x0 + (left + width) * across, y0 + (top + height) * down)
        self.size = (height, width)
        step: dict[str, Any] = {"step": "center_crop", "to": [height, width], "corner": [top, left]}
        if top < 0 or left < 0:
            step |= {"fill": getattr(leaf, "fill", 0), "padding_mode": getattr(leaf, "padding_mode", "constant")}
        self.steps.append(step)

    def to_tensor(self, _: Any) -> None:
        self.tensor = True
        self._to_floats(rescale=True)

    def to_bytes(self, _: Any) -> None:
        self.tensor = True

    def to_dtype(self, leaf: Any) -> None:
        if not isinstance(leaf.dtype, torch.dtype) or not leaf.dtype.is_floating_point:
            raise AdapterError(f"{type(leaf).__name__} to {leaf.dtype}: vlcam knows a single floating type; {_REMEDY}")
        self._to_floats(rescale=getattr(leaf, "scale", True))

    def normalize(self, leaf: Any) -> None:
        mean, std = _numbers(leaf.mean), _numbers(leaf.std)
        self.mean = [m * unit + zero for m, unit, zero in zip(mean, self.std, self.mean, strict=True)]
        self.std = [s * unit for s, unit in zip(std, self.std, strict=True)]
        self.steps.append({"step": "normalize", "mean": mean, "std": std})

    def nothing(self, _: Any) -> None:
        pass

    def _resized(self, leaf: Any, target: Size, rule: dict[str, Any] | None) -> None:
        """Record a resize; the rule is how its size follows from the image's, where proportions are kept."""
        self.size = target
        step = {"step": "resize", "to": list(target), "resample": _interpolation(leaf)}
        # Pillow always smooths; on tensors it is a choice.
        smooth = {"antialias": bool(getattr(leaf, "antialias", True))} if self.tensor else {}
        self.steps.append({**step, "keeps_proportions": rule is not None, **(rule or {}), **smooth})

    def _to_floats(self, *, rescale: bool) -> None:
        if rescale and not self.floats:
            self.std = [1.0] * 3
            self.steps.append({"step": "rescale", "factor": _BYTE})
        self.floats = True


def prepare(
    pipeline: Pipeline | None, module: nn.Module, sizes: ImageSizes, images: Sequence[SourceImage], *, remedy: str
) -> PreparedImages:
    """Run a pipeline over images and say what it did.

    Args:
        pipeline: None where it is not known how the model's images are prepared.
        module: the model that will take the pixels.
        sizes: which sizes it takes.
        images: as the user gave them.
        remedy: what the user can do where there is no pipeline; ends the error message.

    Raises:
        InputError: no pipeline, a size that the model cannot take, or images that differ in size.
    """
    if pipeline is None:
        raise InputError(f"how {type(module).__name__} wants its images prepared is not known: {remedy}; or {_REMEDY}")
    made = [pipeline(image.rgb) for image in images]
    found = list(dict.fromkeys(placement.model for _, _, placement in made))
    if len(found) > 1:
        raise InputError(f"the transform makes images of {listing(found)} out of these: explain them one by one")
    sizes.check(found[0])
    return PreparedImages(
        on_model(module, torch.stack([pixels for pixels, _, _ in made])),
        tuple(placement for _, _, placement in made),
        tuple((*steps, *sizes.steps(found[0])) for _, steps, _ in made),
        sizes.grid(found[0]),
    )


def _leaves(transform: Any) -> Iterator[Any]:
    """The steps of a transform in order, containers opened."""
    name = _name(transform)
    if name == "torchvision.Compose":
        for part in transform.transforms:
            yield from _leaves(part)
    elif name == "torch.Sequential":
        for part in transform:
            yield from _leaves(part)
    elif name == "torchvision.ImageClassification":
        yield transforms.Resize(transform.resize_size, transform.interpolation, antialias=transform.antialias)
        yield transforms.CenterCrop(transform.crop_size)
        yield transforms.PILToTensor()
        yield transforms.ConvertImageDtype(torch.float)
        yield transforms.Normalize(transform.mean, transform.std)
    elif name in _NAMES:
        yield transform
    else:
        raise AdapterError(
            f"processor: what {name} does to the frame and the values is not known to vlcam; it knows "
            f"{', '.join(dict.fromkeys(known.partition('.')[2] for known in _NAMES))}. Leave it out, or {_REMEDY}"
        )


def _name(transform: Any) -> str:
    kind = type(transform)
    return f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}"


def _kind(leaf: Any) -> str:
    return _NAMES[_name(leaf)]


def _interpolation(leaf: Any) -> str:
    given = leaf.interpolation
    if isinstance(given, InterpolationMode):
        return str(given.value)
    return given if isinstance(given, str) else Image.Resampling(given).name.lower()


def _pair(size: Any) -> Size:
    given = [size] if isinstance(size, int) else list(size)
    return int(given[0]), int(given[-1])


def _corner(have: int, want: int) -> int:
    """Where a centred frame begins; negative where the image is smaller and padding is put around it."""
    return -((want - have) // 2) if want > have else round((have - want) / 2)


def _numbers(values: Any) -> list[float]:
    """One number per channel, as short as float32 allows where they are a float32 tensor."""
    given = values.detach().cpu().numpy().astype(np.float32) if isinstance(values, Tensor) else values
    found = [float(str(value)) for value in given]
    return found * 3 if len(found) == 1 else found
