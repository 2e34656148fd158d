"""The contract between the engine and a model family, and the registry in which adapters are found.

An adapter answers questions about one loaded model. It knows no recipe and makes no map.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import Tensor, nn

from vlcam.anatomy import Anatomy
from vlcam.errors import AdapterError, listing
from vlcam.geometry import Placement
from vlcam.images import SourceImage
from vlcam.targets import HeadKind
from vlcam.text import TextLayout

__all__ = [
    "AdapterWarning",
    "Inputs",
    "ModelAdapter",
    "PreparedImages",
    "PreparedTexts",
    "adapters",
    "for_config",
    "for_module",
]

GROUP = "vlcam.adapters"


class AdapterWarning(UserWarning):
    """An adapter of another package could not be imported."""


@dataclass(frozen=True, eq=False)
class PreparedImages:
    """Images as the model takes them.

    Attributes:
        pixel_values: [I, 3, H, W] on the model's device, in its dtype.
        placements: for each image, which part of it the model sees.
        steps: for each image, what was done to it, with numbers.
        grid: rows and columns of the patch tokens.
    """

    pixel_values: Tensor
    placements: tuple[Placement, ...]
    steps: tuple[tuple[dict[str, Any], ...], ...]
    grid: tuple[int, int]


@dataclass(frozen=True, eq=False)
class PreparedTexts:
    """Texts as the model takes them: tensors [P, T] by name, and each text's layout."""

    tensors: Mapping[str, Tensor]
    layouts: tuple[TextLayout, ...]


@dataclass(frozen=True, eq=False)
class Inputs:
    """P image-text pairs: I images, P texts, and for each pair the index of its image."""

    images: PreparedImages
    texts: PreparedTexts
    image_of: tuple[int, ...]


class ModelAdapter(ABC):
    """One loaded model, seen by the engine. Subclass it to teach vlcam a model family; see `docs/adapters.md`.

    Attributes:
        library: the package that the model class comes from.
        architectures: names in a checkpoint's `config.json` that this adapter can load.
        module: the model.
        prefix: image tokens before the patches (class token, registers).
        heads: the scores that the model offers, by target name, with the kind of tensor that each returns.
    """

    library: ClassVar[str]
    architectures: ClassVar[tuple[str, ...]] = ()
    module: nn.Module
    prefix: int
    heads: Mapping[str, HeadKind]

    @classmethod
    @abstractmethod
    def accepts(cls, module: nn.Module) -> bool:
        """Whether the module is of this family."""

    @classmethod
    @abstractmethod
    def wrap(cls, module: nn.Module, processor: Any, **options: Any) -> Self:
        """Make an adapter for a model that is already loaded; the options are the family's own."""

    @classmethod
    @abstractmethod
    def load(cls, source: str | Path, *, local: bool, **options: Any) -> Self:
        """Load a checkpoint by name or folder; with `local`, without network."""

    @property
    @abstractmethod
    def anatomy(self) -> Anatomy:
        """Streams, blocks, sites and token layout."""

    @property
    @abstractmethod
    def options(self) -> Mapping[str, Any]:
        """The options in force, as JSON values: what the record needs so that `load` gives the same model again."""

    @property
    @abstractmethod
    def attention(self) -> str:
        """The attention implementation that the model is configured for."""

    @abstractmethod
    def prepare_images(self, images: Sequence[SourceImage]) -> PreparedImages:
        """Resize, crop and normalise images as the model's own processor does."""

    @abstractmethod
    def accept_pixels(self, pixel_values: Tensor) -> PreparedImages:
        """Take pixels [I, 3, H, W] that are already preprocessed; refuse sizes that the model cannot take."""

    @abstractmethod
    def prepare_texts(self, texts: Sequence[str]) -> PreparedTexts:
        """Tokenise; what does not fit is cut off and listed in the layouts."""

    @abstractmethod
    def accept_ids(self, ids: Tensor, mask: Tensor | None) -> PreparedTexts:
        """Take token ids [P, T] that are already made; the text is spelt back from them."""

    @abstractmethod
    def display(self, pixel_values: Tensor) -> Tensor:
        """Undo the normalisation of [3, H, W]: float values in 0..1, as far as they can be known."""

    @abstractmethod
    def trunk(self, inputs: Inputs) -> Tensor:
        """Run what comes before image and text meet: image tokens [I, prefix + h * w, D]."""

    @abstractmethod
    def head(self, name: str, tokens: Tensor, inputs: Inputs) -> Tensor:
        """Score P pairs with one head from image tokens [P, prefix + h * w, D]."""

    def running(self) -> AbstractContextManager[Any]:
        """What must be changed on the model while it runs; the context manager puts it back."""
        return nullcontext()


@cache
def adapters() -> tuple[type[ModelAdapter], ...]:
    """Every adapter class that installed packages offer under the entry-point group `vlcam.adapters`.

    Those of vlcam itself come first, so that no other package replaces one by accident.
    """
    found = []
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: (_package(entry) != "vlcam", entry.name)):
        try:
            found.append(entry.load())
        except ImportError as error:
            warnings.warn(
                f"adapter {entry.name!r} of package {_package(entry)!r} was left out: {error}",
                AdapterWarning,
                stacklevel=2,
            )
    return tuple(found)


def for_module(module: nn.Module) -> type[ModelAdapter]:
    """The adapter class that accepts a model.

    Raises:
        AdapterError: none does.
    """
    for adapter in adapters():
        if adapter.accepts(module):
            return adapter
    raise AdapterError(
        f"no adapter accepts {type(module).__module__}.{type(module).__qualname__}; {_known()}. "
        "docs/adapters.md says how to write one"
    )


def for_config(config: Mapping[str, Any], source: str) -> type[ModelAdapter]:
    """The adapter class that loads a checkpoint with this `config.json`.

    Raises:
        AdapterError: none does.
    """
    architectures = config.get("architectures") or []
    for adapter in adapters():
        if set(adapter.architectures) & set(architectures):
            return adapter
    raise AdapterError(f"{source!r} is a checkpoint of {listing(architectures)}, which no adapter loads; {_known()}")


def _known() -> str:
    names = [name for adapter in adapters() for name in adapter.architectures]
    return f"adapters exist for {listing(names)}"


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else ""
