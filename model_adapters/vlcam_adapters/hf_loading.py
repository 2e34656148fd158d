"""Loading through transformers without its progress bars on the user's terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers.utils import logging

from vlcam.errors import UnknownNameError

_DTYPES = ("float32", "bfloat16", "float16", "float64")


@contextmanager
def quiet_loading() -> Iterator[None]:
    """No progress bars inside; the user's setting comes back afterwards."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def cast(dtype: str) -> torch.dtype:
    """The torch type of that name.

    Raises:
        UnknownNameError: not a floating type that models run in.
    """
    if dtype not in _DTYPES:
        raise UnknownNameError(f"dtype={dtype!r}: choose from {', '.join(_DTYPES)}")
    found: torch.dtype = getattr(torch, dtype)
    return found
