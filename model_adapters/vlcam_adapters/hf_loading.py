"""Loading through transformers: quietly, whole, and with errors that say what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from torch import nn
from transformers.utils import logging

from vlcam.errors import AdapterError, UnknownNameError

_DTYPES = ("float32", "bfloat16", "float16", "float64")

Model = TypeVar("Model", bound=nn.Module)


@contextmanager
def loading(source: str | Path) -> Iterator[None]:
    """No progress bars inside; what transformers raises on missing or damaged files becomes one error.

    Raises:
        AdapterError: a file of the checkpoint is missing or damaged.
    """
    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # missing weights are an error here, not a table on the terminal
    try:
        yield
    except (OSError, SafetensorError, ValueError, TypeError, RuntimeError) as error:
        if isinstance(error, (AdapterError, UnknownNameError)):
            raise
        raise AdapterError(f"{str(source)!r} cannot be loaded: {str(error).splitlines()[0]}") from None
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()


def load_model(kind: Any, source: str | Path, *, local: bool, dtype: str) -> Any:
    """A model of that class with the checkpoint's weights, every one of them; use inside `loading`.

    Raises:
        AdapterError: weights are missing or of another shape; their explanations would be of nothing.
        UnknownNameError: an unknown dtype.
    """
    # With ignored sizes transformers reports weights of another shape like missing ones, and we refuse both by name.
    module, info = kind.from_pretrained(
        source, local_files_only=local, dtype=cast(dtype), output_loading_info=True, ignore_mismatched_sizes=True
    )
    lacking = [*info.get("missing_keys", ()), *(_spelt(item) for item in info.get("mismatched_keys", ()))]
    if lacking:
        shown = ", ".join(sorted(lacking)[:5])
        raise AdapterError(f"{str(source)!r} lacks {len(lacking)} of the model's weights: {shown}")
    return module


def _spelt(mismatch: Any) -> str:
    """A weight of another shape: its name, the shape in the checkpoint, and the model's."""
    name, found, wanted = mismatch
    return f"{name} (has shape {tuple(found)}, not {tuple(wanted)})"


def placed(module: Model, device: str) -> Model:
    """The model on a device.

    Raises:
        UnknownNameError: a device that torch does not know, or that is not there.
    """
    try:
        return module.to(device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UnknownNameError(f"device={device!r} cannot be used ({reason}); 'cpu' always can") from None


def cast(dtype: str) -> torch.dtype:
    """The torch type of that name.

    Raises:
        UnknownNameError: not a floating type that models run in.
    """
    if dtype not in _DTYPES:
        raise UnknownNameError(f"dtype={dtype!r}: choose from {', '.join(_DTYPES)}")
    found: torch.dtype = getattr(torch, dtype)
    return found
