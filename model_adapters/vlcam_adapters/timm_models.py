"""What running and loading a model of timm takes, whatever it is for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from safetensors import SafetensorError
from torch import nn

from vlcam.errors import AdapterError

__all__ = ["CHECKPOINTING", "changed", "fused_or_explicit", "loading_by"]

CHECKPOINTING = "gradient checkpointing, which timm keeps on in evaluation too, is off while vlcam runs the model"


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
