"""The record of how a map was made: image, text, model, run and versions, as JSON values."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from vlcam.adapter import ModelAdapter
from vlcam.anatomy import HANDED, Tap
from vlcam.capture import Capture
from vlcam.plan import Job, counted
from vlcam.readers import explained_classes
from vlcam.rows import Selection
from vlcam.targets import Target
from vlcam.text import TextLayout

__all__ = [
    "SCHEMA",
    "WeightsHash",
    "class_records",
    "model_record",
    "run_record",
    "tapped",
    "taps_of",
    "text_record",
    "versions",
]

SCHEMA = 1
_PACKAGES = ("vlcam", "torch", "transformers", "numpy", "pillow", "safetensors")


class WeightsHash:
    """SHA-256 over a model's `state_dict`: its parameters and persistent buffers.

    Computed again only when a tensor was replaced or written to. PyTorch does not count what is written through
    `.data`; a sample of each tensor's values finds it, if it changes one of them.
    """

    def __init__(self, module: nn.Module) -> None:
        """Remember the model; nothing is computed yet."""
        self._module = module
        self._state: tuple[object, ...] = ()
        self._latest = ""

    def value(self) -> str:
        """The hash, 64 hexadecimal digits."""
        tensors = self._module.state_dict(keep_vars=True)
        # PyTorch counts writes nowhere else.
        counted = tuple((name, tensor.data_ptr(), tensor._version) for name, tensor in tensors.items())  # noqa: SLF001
        state = counted, _samples(tensors.values())
        if state != self._state:
            digest = hashlib.sha256()
            for name, tensor in tensors.items():
                plain = tensor.detach().cpu().contiguous()
                digest.update(f"{name} {plain.dtype} {tuple(plain.shape)}\0".encode())
                digest.update(memoryview(plain.reshape(-1).view(torch.uint8).numpy()))
            self._state, self._latest = state, digest.hexdigest()
        return self._latest


@torch.no_grad()
def _samples(tensors: Iterable[Tensor]) -> tuple[bytes, ...]:
    """The bytes of up to 8 evenly spaced elements of each; one copy off the device for all of a type."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        few = tensor.reshape(-1)[:: max(1, -(-tensor.numel() // 8))]
        kinds.setdefault((tensor.dtype, tensor.device), []).append(few)
    together = (torch.cat(each).cpu() for each in kinds.values())
    return tuple(each.view(torch.uint8).numpy().tobytes() for each in together)  # numpy knows no bfloat16


def tapped(adapter: ModelAdapter, taps: Iterable[Tap]) -> dict[str, list[int]]:
    """What a pass tapped, by stream and site the blocks: `{"vision.F2": [0, 11]}`.

    Attention that is looked into runs in another kernel, and gradients of what several blocks read add up in another
    order where it is tapped; so a pass that taps the same gives the same bits.
    """
    streams, found = adapter.anatomy.streams, dict[str, list[int]]()
    for tap in taps:
        if tap.site != HANDED and tap.layer < len(streams[tap.stream].blocks):
            found.setdefault(f"{tap.stream}.{tap.site}", []).append(tap.layer)
    return {place: sorted(layers) for place, layers in sorted(found.items())}


def taps_of(adapter: ModelAdapter, stated: Mapping[str, Sequence[int]]) -> tuple[Tap, ...]:
    """The taps that `tapped` stated; without those that this model does not have."""
    streams, found = adapter.anatomy.streams, []
    for place, layers in stated.items():
        stream, _, site = place.partition(".")
        there = streams.get(stream)
        found += [Tap(stream, layer, site) for layer in layers if there is not None and there.can_read(layer, site)]
    return tuple(found)


def model_record(
    adapter: ModelAdapter,
    name: str,
    weights_sha256: str,
    *,
    attention_tapped: bool,
    read: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> dict[str, Any]:
    """What model ran, and how; `read` is what the pass tapped."""
    parameter = next(adapter.module.parameters())
    kind = type(adapter.module)
    return {
        "id": name,
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "library": adapter.library,
        "adapter": f"{type(adapter).__module__}.{type(adapter).__qualname__}",
        "weights_sha256": weights_sha256,
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "device": str(parameter.device),
        "attention": {
            "configured": adapter.attention,
            "used": f"explicit softmax in tapped blocks, {adapter.attention} elsewhere"
            if attention_tapped
            else adapter.attention,
        },
        "tapped": {place: list(layers) for place, layers in read.items()},
        "options": dict(adapter.options),
    }


def text_record(layout: TextLayout) -> dict[str, Any]:
    """The text and every token of it."""
    return {
        "given": layout.text,
        "ids": list(layout.ids),
        "pieces": list(layout.pieces),
        "spans": [list(span) for span in layout.spans],
        "special": list(layout.special),
        "cut": list(layout.cut),
        "cut_text": layout.cut_text,
    }


def run_record(
    adapter: ModelAdapter, job: Job, found: Capture, pair: int, selection: Selection, grid: tuple[int, int]
) -> dict[str, Any]:
    """What the recipe came to on this model and this pair."""
    return {
        "stream": job.recipe.stream,
        "site": job.recipe.site,
        "layers": list(job.layers),
        "together_with": _together_with(job),
        "fitted": dict(job.fitted),
        "blocks": len(counted(adapter, job.recipe.stream, job.recipe.gradient_path).blocks),
        "target": job.target.label,
        "target_value": None if job.recipe.target == "none" else float(found.target[pair]),
        "block_values": [float(found.of_blocks[layer][pair]) for layer in job.layers]
        if job.target.path == "block"
        else None,
        "grid": list(grid),
        "prefix_tokens": list(adapter.prefix),
        "dropped": selection.dropped,
        "phrase": job.phrase,
        "occurrence": job.occurrence,
        "span": list(selection.span) if selection.span else None,
        "rows": list(selection.rows),
    }


def _together_with(job: Job) -> dict[str, list[int]] | None:
    """By stream the blocks whose self-attention cross-attention is read together with."""
    found: dict[str, list[int]] = {}
    for tap in (*job.text_taps, *job.image_taps):
        found.setdefault(tap.stream, []).append(tap.layer)
    return found or None


def class_records(
    adapter: ModelAdapter, target: Target, found: Capture, given: Sequence[int | None]
) -> list[dict[str, Any] | None]:
    """For every pair the class that the scores are of, and that is explained if the target is a class.

    Args:
        adapter: the model.
        target: of these classes.
        found: the pass.
        given: the classes that were named, None where none was.
    """
    output = found.outputs[target.head]
    if adapter.heads[target.head] not in ("classes", "pixels"):
        return [None] * len(output)
    records: list[dict[str, Any] | None] = []
    for pair, index in enumerate(explained_classes(output, target.classes).tolist()):
        named = given[pair if len(given) > 1 else 0] is not None
        label = adapter.labels[index] if index < len(adapter.labels) else None
        pixels = adapter.heads[target.head] == "pixels"
        most = "most pixels" if pixels else "highest logit"
        record = {"index": index, "label": label, "chosen": "as given" if named else most}
        if pixels:
            record["region"] = None if target.region is None else target.region.to_dict()
        records.append(record)
    return records


@cache
def versions(library: str = "") -> dict[str, str]:
    """Versions of Python and of the packages that take part, the model's `library` among them."""
    found = {"python": platform.python_version()}
    for package in dict.fromkeys((*_PACKAGES, *filter(None, [library]))):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = _version_by_import(package)
    return found


def _version_by_import(module: str) -> str:
    """The version of a package that is installed under another name than it is imported by."""
    names = packages_distributions().get(module, ())
    return version(names[0]) if names else "not installed as a package"
