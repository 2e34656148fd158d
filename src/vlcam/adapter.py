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
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from torch import Tensor, nn

from vlcam.anatomy import Anatomy
from vlcam.errors import AdapterError, RecipeError, listing
from vlcam.geometry import Placement
from vlcam.images import SourceImage
from vlcam.targets import HeadKind
from vlcam.text import TextLayout
from vlcam.tokens import Windows

__all__ = [
    "AdapterWarning",
    "Encoded",
    "Inputs",
    "ModelAdapter",
    "Prefix",
    "PreparedImages",
    "PreparedTexts",
    "adapters",
    "for_config",
    "for_module",
]

GROUP = "vlcam.adapters"

Prefix = Literal["cls", "distillation", "register"]


class AdapterWarning(UserWarning):
    """An adapter could not be imported, or is for another version of its library than the one installed."""


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
    """T texts as the model takes them.

    Attributes:
        tensors: [T, N] each, by name.
        layouts: each text's tokens, without padding.
        pooled: for each text, the position that its tower reads the text from; empty for a model without a text tower.
        full: whether texts are padded to the context length, whatever other texts there are.
    """

    tensors: Mapping[str, Tensor]
    layouts: tuple[TextLayout, ...]
    pooled: tuple[int, ...] = ()
    full: bool = False


@dataclass(frozen=True, eq=False)
class Encoded:
    """What a text tower made of the texts.

    Attributes:
        every: [T, ...], all texts of the call, without gradient.
        own: [P, ...], each pair's own text; the graph begins here where the text tower is tapped.
    """

    every: Tensor
    own: Tensor


@dataclass(frozen=True, eq=False)
class Inputs:
    """P pairs of an image and a question: I images and T texts, and for each pair the index of its image and text.

    For a model that takes no text the question is a class, which only the target knows, and `texts` is None. Texts may
    be more than those of the pairs: others that scores are compared with.

    Attributes:
        images: the images.
        texts: the texts, each distinct one once.
        image_of: for each pair, its image.
        text_of: for each pair, its text; empty without texts.
        encoded: what the text tower made of the texts, for `head` of a model that has one.
        answers: P answers, one per pair, for a model that answers questions.
    """

    images: PreparedImages
    texts: PreparedTexts | None
    image_of: tuple[int, ...]
    text_of: tuple[int, ...] = ()
    encoded: Encoded | None = None
    answers: PreparedTexts | None = None


class ModelAdapter(ABC):
    """One loaded model, seen by the engine. Subclass it to teach vlcam a model family; see `docs/adapters.md`.

    Attributes:
        library: the package that the model class comes from.
        architectures: names in a checkpoint's `config.json` that this adapter can load; those of models that the
            library has names of its own for are spelt `library:name`, as `vlcam.load` takes them.
        takes_text: whether a question to the model is a text; otherwise it is a class.
        module: the model.
        prefix: names of the image tokens before the patches, in order: `cls`, `distillation`, `register`.
        reads: which image tokens the heads read: the class token, or the patches where they are pooled instead.
        heads: the scores that the model offers, by target name, with the kind of tensor that each returns.
        labels: names of the classes that a head of the kind `classes` tells apart; empty where they have none.
        readouts: heads that recipes read, and that are no scores of the model itself.
        writes: what the model can write of an image when it is given none: a `caption`, an `answer` to a question;
            empty where it writes nothing.
    """

    library: ClassVar[str] = ""
    readouts: ClassVar[frozenset[str]] = frozenset()
    writes: ClassVar[Literal["", "caption", "answer"]] = ""
    architectures: ClassVar[tuple[str, ...]] = ()
    takes_text: ClassVar[bool] = True
    module: nn.Module
    prefix: tuple[Prefix, ...]
    reads: Literal["cls", "patches"] = "cls"
    heads: Mapping[str, HeadKind]
    labels: Sequence[str] = ()

    @classmethod
    def accepts(cls, module: nn.Module) -> bool:
        """Whether the module is of this family; an adapter that nobody registers need not say."""
        del module
        return False

    @classmethod
    def loads(cls, config: Mapping[str, Any]) -> bool:
        """Whether `load` can load a checkpoint with this `config.json`."""
        return bool(set(cls.architectures) & set(config.get("architectures") or ()))

    @classmethod
    def wrap(cls, module: nn.Module, processor: Any, **options: Any) -> Self:  # noqa: ARG003 - for those that can
        """Make an adapter for a model that is already loaded; the options are the family's own."""
        raise AdapterError(
            f"{cls.__name__} wraps no module; make the adapter and hand it over: Explainer(adapter, name)"
        )

    @classmethod
    def load(cls, source: str | Path, *, local: bool, **options: Any) -> Self:  # noqa: ARG003 - for those that can
        """Load a checkpoint by name or folder; with `local`, without network."""
        raise AdapterError(f"{cls.__name__} loads no checkpoint; load the model and hand its adapter over")

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

    def prepare_texts(self, texts: Sequence[str]) -> PreparedTexts:
        """Tokenise; what does not fit is cut off and listed in the layouts. Needed where the model takes text."""
        raise NotImplementedError

    def accept_ids(self, ids: Tensor, mask: Tensor | None) -> PreparedTexts:
        """Take token ids [T, N] that are already made, and spell the text back. Needed where the model takes text."""
        raise NotImplementedError

    def prepare_answers(self, answers: Sequence[str]) -> PreparedTexts:
        """Tokenise answers to questions. Needed where the model answers questions."""
        raise NotImplementedError

    def write(self, inputs: Inputs) -> list[str]:
        """Write a caption for each image, or an answer for each pair, deterministically. Needed where `writes` says."""
        raise NotImplementedError

    @abstractmethod
    def display(self, pixel_values: Tensor) -> Tensor:
        """Undo the normalisation of [3, H, W]: float values in 0..1, as far as they can be known."""

    @abstractmethod
    def trunk(self, inputs: Inputs) -> Tensor:
        """Run what every question about an image shares, [I, ...].

        With text, all before image and text meet: image tokens [I, prefix + h * w, D]. A classifier runs as a whole:
        class logits [I, classes].
        """

    def text_tower(self, inputs: Inputs) -> Tensor | None:  # noqa: ARG002 - for models that have one
        """Run what can be done with the texts before they meet an image, [T, ...]; None where that is nothing."""
        return None

    @abstractmethod
    def head(self, name: str, shared: Tensor, inputs: Inputs) -> Tensor:
        """Answer P questions with one head from the trunk's rows, [P, ...]; a classifier hands its logits through.

        What the text tower made of the texts is in `inputs.encoded`.
        """

    def grid(self, stream: str, layer: int, images: PreparedImages) -> tuple[int, int]:  # noqa: ARG002 - for others
        """Rows and columns of the image tokens at a block; those of the patches, where no block merges any."""
        return images.grid

    def windows(self, stream: str, layer: int, images: PreparedImages) -> Windows | None:  # noqa: ARG002 - for others
        """How a block cut its grid into windows in the pass that just ran; None where all tokens see each other.

        Attention sites (F2, F3_HEADS, F3) of such a block are then in window order: their first axis is images times
        windows, in that order.
        """
        return None

    def token_cosines(self, tokens: Tensor, inputs: Inputs) -> Tensor:
        """Read each image token of [P, N, D], outputs of the last block, as the model reads an image: [P, N, T].

        The cosine of every token's embedding with that of every text, for maps that compare tokens with texts
        (MaskCLIP, CLIP Surgery).

        Raises:
            RecipeError: this family embeds no single tokens.
        """
        del tokens, inputs
        raise RecipeError(
            f"weighting='similarity': {type(self).__name__} does not embed single tokens next to texts; choose a "
            "weighting of gradients"
        )

    def read_block(self, name: str, tokens: Tensor, inputs: Inputs, *, bare: bool = False) -> Tensor:
        """Return what one head gives if it reads a block's output tokens [I, N, D] at once: their mean, or its pooler.

        For `gradient_path="block"` (LeGrad). The final norm and the head are the model's own; `bare` leaves out what
        LeGrad's code leaves out in models that pool by attention: the final norm, and CoCa's scaling to unit length.

        Raises:
            RecipeError: this family has no such reading.
        """
        del tokens, inputs, bare
        raise RecipeError(
            f"gradient_path='block': {type(self).__name__} does not say how target {name!r} is read from the tokens "
            "of a block; use gradient_path='full'"
        )

    @property
    def reads_blocks(self) -> bool:
        """Whether the family says how the tokens of a block are read; see `read_block`."""
        return type(self).read_block is not ModelAdapter.read_block

    @property
    def joins_heads(self) -> bool:
        """Whether heads can be joined to one: not where each adds a bias of its own to the scores."""
        return True

    @property
    def embeds_tokens(self) -> bool:
        """Whether the family embeds single image tokens next to texts; see `token_cosines`."""
        return type(self).token_cosines is not ModelAdapter.token_cosines

    def running(self) -> AbstractContextManager[Any]:
        """What must be changed on the model while it runs; the context manager puts it back."""
        return nullcontext()


def adapters(*, for_: nn.Module | None = None) -> tuple[type[ModelAdapter], ...]:
    """The adapter classes that installed packages offer under the entry-point group `vlcam.adapters`.

    Those of vlcam itself come first, so that no other package replaces one by accident. An entry point may name, as
    its extra, the package that its models come from; the adapter is then left alone where that package is not
    installed, and left out with a warning where the installed version is not one that the adapter's own package asks
    for.

    Args:
        for_: only those that may know this model: an entry whose extra is not among the packages of the model's
            class and its bases is not even imported.
    """
    roots = {kind.__module__.partition(".")[0] for kind in type(for_).__mro__} if for_ is not None else None
    entries = sorted(entry_points(group=GROUP), key=lambda entry: (_package(entry) != "vlcam", entry.name))
    wanted = [entry for entry in entries if roots is None or not entry.extras or roots & set(entry.extras)]
    found, reasons = [], {}
    for entry in wanted:
        loaded = _loaded(entry)
        if isinstance(loaded, str):
            reasons[entry] = loaded
        elif loaded is not None:
            found.append(loaded)
    _warn(reasons)
    return tuple(found)


@cache
def _loaded(entry: EntryPoint) -> type[ModelAdapter] | str | None:
    """The adapter; the reason why it is left out; or None where the package of its models is not installed."""
    if any(find_spec(package) is None for package in entry.extras):
        return None
    if unmet := _unmet(entry):
        return unmet
    try:
        found: type[ModelAdapter] = entry.load()
    except ImportError as error:
        return str(error)
    return found


def _unmet(entry: EntryPoint) -> str:
    """What the adapter's package asks of the package of its models, and what there is instead; empty if it is met."""
    for text in (entry.dist.requires if entry.dist else None) or ():
        wanted = Requirement(text)
        if not any(_concerns(wanted, extra) for extra in entry.extras):
            continue
        try:
            there = version(wanted.name)
        except PackageNotFoundError:
            continue  # installed by another name; the import tells
        if not wanted.specifier.contains(there, prereleases=True):
            return f"made for {wanted.name}{wanted.specifier}, and {there} is installed"
    return ""


def _concerns(wanted: Requirement, extra: str) -> bool:
    """Whether a requirement is on the package that an entry point names, or belongs to the extra of that name."""
    if canonicalize_name(wanted.name) == canonicalize_name(extra):
        return True
    marker = wanted.marker
    return marker is not None and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""})


_WARNED: set[EntryPoint] = set()


def _warn(reasons: Mapping[EntryPoint, str]) -> None:
    """Say once which adapters were left out, those of one reason together."""
    fresh = {entry: reason for entry, reason in reasons.items() if entry not in _WARNED}
    _WARNED.update(fresh)
    for package, reason in dict.fromkeys((_package(entry), reason) for entry, reason in fresh.items()):
        names = [entry.name for entry, why in fresh.items() if (_package(entry), why) == (package, reason)]
        what = f"adapter {names[0]!r} was" if len(names) == 1 else f"adapters {listing(names)} were"
        warnings.warn(f"{what} left out ({package}): {reason}", AdapterWarning, stacklevel=3)


def for_module(module: nn.Module) -> type[ModelAdapter]:
    """The adapter class that accepts a model.

    Raises:
        AdapterError: none does.
    """
    for adapter in adapters(for_=module):
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
    for adapter in adapters():
        if adapter.loads(config):
            return adapter
    architectures = config.get("architectures") or [config.get("architecture", "no named architecture")]
    raise AdapterError(f"{source!r} is a checkpoint of {listing(architectures)}, which no adapter loads; {_known()}")


def _known() -> str:
    names = [
        f"{adapter.__name__} ({', '.join(adapter.architectures)})" if adapter.architectures else adapter.__name__
        for adapter in adapters()
    ]
    return f"looked for: {'; '.join(names) or 'nothing, no adapter is installed'}"


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else ""
