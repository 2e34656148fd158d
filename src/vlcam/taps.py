"""Hooks at the taps: what they see, replaced by what the graph goes on with, in one thread and for one pass."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any, Self, cast, get_args

import torch
from torch import Tensor, nn

from vlcam.anatomy import Inside, Reading, StreamAnatomy, Tap
from vlcam.attention import AttentionMode, Edit, Watched
from vlcam.errors import CaptureError, listing

__all__ = ["Taps", "attention_detached"]


class Taps:
    """Hooks at the taps; holds what they saw. Leaving the context removes every one of them.

    Hooks fire for every thread that runs the module; these act only in the thread that set them.
    """

    def __init__(
        self,
        readings: Mapping[Tap, Reading],
        *,
        differentiate: bool,
        edits: Mapping[nn.Module, Edit] = MappingProxyType({}),
    ) -> None:
        """Remember what to read, and which attention modules compute otherwise than the model.

        `differentiate` says whether the graph is to begin at the earliest tap.
        """
        self.tensors: dict[Tap, Tensor] = {}
        self._readings = readings
        self._edits = edits
        self._differentiate = differentiate
        self._cleanup = ExitStack()
        self._mode = AttentionMode(self._take)
        self._inside = ExitStack()  # holds the mode while a tapped attention module runs, and only then
        self._thread = threading.get_ident()

    def __enter__(self) -> Self:
        """Set the hooks."""
        with self._cleanup:  # undone at once if a hook cannot be set
            for tap, reading in self._readings.items():
                if reading.how not in get_args(Inside):
                    self._attach(tap, reading)
            for module, watched in self._attention_modules():
                self._watch(module, watched)
            self._cleanup.callback(self._inside.close)
            self._cleanup = self._cleanup.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Remove the hooks.

        Raises:
            CaptureError: a tap was not reached.
        """
        self._cleanup.close()
        missed = [tap for tap in self._readings if tap not in self.tensors]
        if kind is None and missed:
            raise CaptureError(
                f"{', '.join(map(str, missed))} was not reached: the target's pass does not run it, or the model "
                "calls forward() directly or runs a compiled copy"
            )

    def _attention_modules(self) -> list[tuple[nn.Module, Watched]]:
        """For every module that is tapped or edited inside: what is tapped there, and how it computes."""
        found: dict[nn.Module, dict[Inside, Tap]] = {module: {} for module in self._edits}
        for tap, reading in self._readings.items():
            if reading.how in get_args(Inside):
                found.setdefault(reading.module, {})[cast("Inside", reading.how)] = tap
        return [(module, Watched(taps, self._edits.get(module, Edit()))) for module, taps in found.items()]

    def _attach(self, tap: Tap, reading: Reading) -> None:
        def before(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
            return self._enter_module(tap, reading, args, kwargs) if self._is_mine() else None

        def after(_: nn.Module, __: Any, output: Any) -> Any:
            return self._replaced(tap, output) if self._is_mine() else None

        if reading.how == "output":
            self._cleanup.callback(reading.module.register_forward_hook(after).remove)
        else:
            self._cleanup.callback(reading.module.register_forward_pre_hook(before, with_kwargs=True).remove)

    def _watch(self, module: nn.Module, watched: Watched) -> None:
        def before(_: nn.Module, __: Any) -> None:
            if self._is_mine():
                if not self._mode.stack:
                    self._inside.enter_context(self._mode)
                self._mode.stack.append(watched)

        def after(_: nn.Module, __: Any, ___: Any) -> None:
            if self._is_mine():
                self._mode.stack.pop()
                if not self._mode.stack:
                    self._inside.close()

        self._cleanup.callback(module.register_forward_pre_hook(before).remove)
        # Before the hooks of others, so that the mode is off by the time they run.
        self._cleanup.callback(module.register_forward_hook(after, prepend=True).remove)

    def _is_mine(self) -> bool:
        return threading.get_ident() == self._thread

    def _enter_module(
        self, tap: Tap, reading: Reading, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        if reading.how == "input":
            return (self._take(tap, args[0]), *args[1:]), kwargs
        names = reading.keyword.split(",")
        if not all(name in kwargs for name in names):
            raise CaptureError(f"{tap}: the module was called without {reading.keyword!r}; it got {listing(kwargs)}")
        return args, kwargs | dict.fromkeys(names, self._take(tap, kwargs[names[0]]))

    def _replaced(self, tap: Tap, output: Any) -> Any:
        if isinstance(output, Tensor):
            return self._take(tap, output)
        if isinstance(output, tuple) and isinstance(output[0], Tensor):
            return (self._take(tap, output[0]), *output[1:])
        raise CaptureError(
            f"{tap}: the module returned {type(output).__name__}, not a tensor or a tuple that begins so"
        )

    def _take(self, tap: Tap, tensor: Tensor) -> Tensor:
        if tap in self.tensors:
            raise CaptureError(f"{tap} was reached twice in one pass: it is not clear which of the two is meant")
        if self._differentiate:
            if tensor.requires_grad:
                # A copy of its own, so that a tensor which several blocks read has one gradient per block.
                tensor = tensor.view_as(tensor)
            else:
                tensor = tensor.detach().requires_grad_()
                torch.set_grad_enabled(True)
        self.tensors[tap] = tensor
        return tensor


@contextmanager
def attention_detached(streams: Sequence[StreamAnatomy]) -> Iterator[None]:
    """Cut the gradient between each LayerNorm and the attention behind it, in this thread."""
    thread = threading.get_ident()

    def detached(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return output.detach() if threading.get_ident() == thread else output

    with ExitStack() as stack:
        for stream in streams:
            for layer in range(len(stream.blocks)):
                stack.callback(stream.reading(layer, "F1").module.register_forward_hook(detached).remove)
        yield
