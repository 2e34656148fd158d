"""The embedded models, and loading by name: embedded, a local folder, or a checkpoint of the hub."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn

from vlcam.adapter import ModelAdapter, for_config, for_module
from vlcam.errors import UnknownNameError, listing
from vlcam.explainer import Explainer

__all__ = ["EmbeddedModel", "load", "models", "wrap"]

_FOLDER = Path(__file__).parent / "embedded"
_OPEN_CLIP = "open_clip_config.json"
_CONFIGS = ("config.json", _OPEN_CLIP)
_HUB = "hf-hub:"
"""With this before its name, a checkpoint of the hub is loaded by open_clip, where it is one of other libraries too."""
_OF_A_LIBRARY = re.compile("[a-z_-]{2,}:[^:]+")
"""Of models that a library knows by names of its own, the hub has no configuration; the name itself is asked for."""


@dataclass(frozen=True)
class EmbeddedModel:
    """A small trained model inside the package: its folder, one line about it, and its measured figures."""

    name: str
    folder: Path
    summary: str
    figures: Mapping[str, Any]

    @property
    def card(self) -> str:
        """The model card, Markdown."""
        return (self.folder / "README.md").read_text(encoding="utf-8")


def models() -> Mapping[str, EmbeddedModel]:
    """Every embedded model by name."""
    found = {}
    for file in sorted(_FOLDER.glob("*/figures.json")):
        figures = json.loads(file.read_text(encoding="utf-8"))
        found[file.parent.name] = EmbeddedModel(file.parent.name, file.parent, figures["summary"], figures)
    return MappingProxyType(found)


def load(name: str | Path, **options: Any) -> Explainer:
    """Load a model.

    Args:
        name: an embedded model (`vlcam.models()`), a folder with a checkpoint and its processor, or the name of a
            checkpoint on the Hugging Face hub (needs a network, or the hub's cache); `hf-hub:` before that name asks
            for the checkpoint as open_clip loads it; a name that an adapter lists among its `architectures`, such as
            `lavis:blip_image_text_matching/base`, is looked up by the adapter's library.
        **options: `dtype` ("float32"), `device` ("cpu"), and the model family's own, which its page in the docs lists.

    Returns:
        The model, ready to be asked.

    Raises:
        UnknownNameError: nothing of that name; lists the embedded models.
        AdapterError: a checkpoint of a family that no adapter loads.
    """
    embedded = models().get(str(name))
    folder = embedded.folder if embedded else Path(name)
    if folder.is_dir():
        configs = [folder / each for each in _CONFIGS if (folder / each).is_file()]
        if not configs:
            raise UnknownNameError(f"folder {str(name)!r} has no {' and no '.join(_CONFIGS)}: not a checkpoint folder")
        adapter = for_config(_read_config(configs[0]), str(name))
        _check_options(adapter, options, loading=True)
        return Explainer(adapter.load(folder, local=True, **options), str(name))
    source = str(name)
    adapter = for_config(_hub_config(source), source)
    _check_options(adapter, options, loading=True)
    return Explainer(adapter.load(source, local=False, **options), source)


def wrap(module: nn.Module, processor: Any = None, *, name: str = "", **options: Any) -> Explainer:
    """Explain a model that is already loaded. It is neither copied nor changed.

    Args:
        module: the model; a `DataParallel` or compiled wrapper is looked through.
        processor: what prepares its images and texts.
        name: what records call it; by default its `name_or_path`, or its class.
        **options: as in `load`, without `dtype` and `device`.

    Raises:
        AdapterError: no adapter accepts it.
    """
    bare = _unwrapped(module)
    label = name or _public(getattr(bare, "name_or_path", "")) or type(bare).__name__
    adapter = for_module(bare)
    _check_options(adapter, options, loading=False)
    return Explainer(adapter.wrap(bare, processor, **options), label)


def _public(name: str) -> str:
    """A checkpoint's name as it is; of a path only its last part, for where it lies is nobody's business."""
    return Path(name).name if Path(name).is_absolute() or Path(name).exists() else name


def _read_config(file: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnknownNameError(f"{str(file)!r} is no checkpoint's configuration: {error}") from None
    if not isinstance(found, dict):
        raise UnknownNameError(f"{str(file)!r} is no checkpoint's configuration: found {type(found).__name__}")
    return found


def _check_options(adapter: type[ModelAdapter], options: Mapping[str, Any], *, loading: bool) -> None:
    """An adapter's options are the keyword arguments of its constructor, and of `load` where it loads."""
    known: dict[str, None] = {}
    for function in (adapter.load, adapter.__init__) if loading else (adapter.__init__,):
        keywords = inspect.signature(function).parameters.values()
        known |= {p.name: None for p in keywords if p.kind is p.KEYWORD_ONLY and p.name != "local"}
    unknown = [option for option in options if option not in known]
    if unknown:
        raise UnknownNameError(f"{adapter.__name__} has no option {listing(unknown)}; it has {listing(known)}")


def _unwrapped(module: nn.Module) -> nn.Module:
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return _unwrapped(module.module)
    compiled = getattr(module, "_orig_mod", None)  # hooks never fire in torch.compile's copy
    return _unwrapped(compiled) if isinstance(compiled, nn.Module) else module


def _hub_config(name: str) -> Mapping[str, Any]:
    known = f"embedded models: {listing(models())}"
    if _OF_A_LIBRARY.fullmatch(name) and not name.startswith(_HUB):
        return {"architectures": [name]}
    if "/" not in name or name.startswith((".", "/")):
        raise UnknownNameError(f"no model {name!r}: not an embedded model and not a folder; {known}")
    try:
        return _config_by_name(name)
    except OSError as error:
        reason = str(error).splitlines()[0]
        raise UnknownNameError(
            f"no model {name!r}: not a folder, and the hub did not give it ({reason}); {known}"
        ) from None


def _config_by_name(name: str) -> Mapping[str, Any]:
    """The `config.json` of a checkpoint of the hub; open_clip's own where there is none, or where it is asked for."""
    from transformers import PretrainedConfig  # only a checkpoint of the hub needs it
    from transformers.utils import cached_file

    bare = name.removeprefix(_HUB)
    if bare != name:
        return _read_config(Path(str(cached_file(bare, _OPEN_CLIP))))
    try:
        config, _ = PretrainedConfig.get_config_dict(name)
    except OSError:
        with suppress(OSError):
            return _read_config(Path(str(cached_file(name, _OPEN_CLIP))))
        raise
    return dict(config)
