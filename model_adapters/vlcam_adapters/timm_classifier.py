"""What all classifiers of timm have in common: how one is known, loaded, and its images prepared."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import timm
from timm.data import ImageNetInfo, create_transform, resolve_model_data_config
from timm.models import is_model_in_modules
from torch import nn

from vlcam.adapter import Prefix, PreparedImages
from vlcam.errors import AdapterError
from vlcam.images import SourceImage
from vlcam_adapters.classifier import ClassifierAdapter, ImageSizes, class_names
from vlcam_adapters.hf_loading import cast, placed
from vlcam_adapters.hf_processing import whole_pixels
from vlcam_adapters.timm_models import loading_by
from vlcam_adapters.torchvision_processing import Pipeline, prepare

__all__ = ["TimmClassifier"]

# Towers of image-text models, of which timm keeps the projection as the head.
_PROJECTING = re.compile(r"_(clip|mci|pe_core)_")


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
