"""One pass through a model: activations at the taps, gradients of the target, and the model left as it was found."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from vlcam.adapter import Inputs, ModelAdapter
from vlcam.anatomy import Reading, Tap
from vlcam.attention import AttentionMode
from vlcam.errors import AdapterError, CaptureError, EvidenceError, listing
from vlcam.targets import Target

__all__ = ["Capture", "as_found", "capture", "run_heads"]

_LOCKS: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_LOCKS_LOCK = threading.Lock()


@dataclass(frozen=True, eq=False)
class Capture:
    """What one pass gave for P pairs; every tensor has the pair as its first axis and no graph.

    Attributes:
        activations: the tensor at each tap.
        gradients: dy/d(tensor) at each tap; None where y does not depend on the tensor at all. Empty where the
            target takes no gradient.
        target: y, [P].
        outputs: what the target's head returned; `run_heads` gives the others.
        context: the image tokens that the heads read.
    """

    activations: Mapping[Tap, Tensor]
    gradients: Mapping[Tap, Tensor | None]
    target: Tensor
    outputs: Mapping[str, Tensor]
    context: Tensor


def capture(adapter: ModelAdapter, inputs: Inputs, taps: Sequence[Tap], target: Target) -> Capture:
    """Run the model once and read the taps.

    The graph begins at the earliest tap; all before it runs without one. Parameters are frozen for the pass. The
    trunk runs once per image; its gradients for several texts of one image are drawn from that one run.

    Args:
        adapter: the model.
        inputs: P pairs.
        taps: what to read.
        target: what to differentiate.

    Raises:
        CaptureError: a tap was not reached, or reached twice.
        EvidenceError: the target is not finite.
    """
    streams = adapter.anatomy.streams
    readings = {tap: streams[tap.stream].reading(tap.layer, tap.site) for tap in taps}
    early = {tap: reading for tap, reading in readings.items() if streams[tap.stream].trunk}
    late = {tap: reading for tap, reading in readings.items() if tap not in early}
    with as_found(adapter.module), torch.inference_mode(mode=False), torch.no_grad(), adapter.running():
        with _Taps(early, differentiate=target.differentiate) as trunk:
            tokens = adapter.trunk(inputs)
        with torch.no_grad(), _Taps(late, differentiate=target.differentiate) as head:
            context = _spread(tokens.detach(), inputs.image_of)
            if early and target.differentiate:
                context = context.contiguous().requires_grad_()
                torch.set_grad_enabled(True)
            output = adapter.head(target.head, context, inputs)
            # A copy, so that a target that works in place cannot change the scores on record.
            outputs = {target.head: output.detach().clone()}
            y = target.read(output)
        _check_finite(y, target)
        gradients: dict[Tap, Tensor | None] = {}
        if target.differentiate:
            wanted = [*head.tensors.values(), *([context] if early else [])]
            found = list(_gradients(y, wanted))
            if early:
                gradients |= _trunk_gradients(tokens, trunk.tensors, found.pop(), inputs.image_of)
            gradients |= dict(zip(head.tensors, found, strict=True))
    activations = {tap: _spread(tensor.detach(), inputs.image_of) for tap, tensor in trunk.tensors.items()}
    activations |= {tap: tensor.detach() for tap, tensor in head.tensors.items()}
    return Capture(activations, gradients, y.detach(), outputs, context.detach())


def run_heads(adapter: ModelAdapter, inputs: Inputs, context: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
    """What further heads return for the image tokens of a capture, without any gradient.

    Args:
        adapter: the model.
        inputs: the pairs of the capture.
        context: its image tokens.
        names: which heads.
    """
    with as_found(adapter.module), torch.inference_mode(mode=False), torch.no_grad(), adapter.running():
        return {name: adapter.head(name, context, inputs) for name in names}


@contextmanager
def as_found(module: nn.Module) -> Iterator[None]:
    """Set a model to evaluation with frozen parameters; whatever happens inside, put every flag back.

    One thread at a time is inside for one model: two that interleave would put back each other's flags.

    Raises:
        AdapterError: a parameter was made under inference_mode, which no gradient can pass.
    """
    with _lock_of(module):
        training = [part for part in module.modules() if part.training]
        parameters = list(module.parameters())
        free = [parameter for parameter in parameters if parameter.requires_grad]
        if any(parameter.is_inference() for parameter in parameters):
            raise AdapterError(
                "the model was made under torch.inference_mode(), which rules gradients out; load it outside"
            )
        try:
            for part in training:
                part.training = False
            for parameter in free:
                parameter.requires_grad_(False)
            yield
        finally:
            for part in training:
                part.training = True
            for parameter in free:
                parameter.requires_grad_(True)


def _lock_of(module: nn.Module) -> threading.RLock:
    with _LOCKS_LOCK:
        return _LOCKS.setdefault(module, threading.RLock())


class _Taps:
    """Hooks at the taps; holds what they saw. Leaving the context removes every one of them.

    Hooks fire for every thread that runs the module; these act only in the thread that set them.
    """

    def __init__(self, readings: Mapping[Tap, Reading], *, differentiate: bool) -> None:
        self.tensors: dict[Tap, Tensor] = {}
        self._readings = readings
        self._differentiate = differentiate
        self._cleanup = ExitStack()
        self._mode = AttentionMode(self._take)
        self._inside = ExitStack()  # holds the mode while a tapped attention module runs, and only then
        self._thread = threading.get_ident()

    def __enter__(self) -> Self:
        with self._cleanup:  # undone at once if a hook cannot be set
            for tap, reading in self._readings.items():
                self._attach(tap, reading)
            self._cleanup.callback(self._inside.close)
            self._cleanup = self._cleanup.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._cleanup.close()
        missed = [tap for tap in self._readings if tap not in self.tensors]
        if kind is None and missed:
            raise CaptureError(
                f"{', '.join(map(str, missed))} was not reached: the target's pass does not run it, or the model "
                "calls forward() directly or runs a compiled copy"
            )

    def _attach(self, tap: Tap, reading: Reading) -> None:
        def before(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
            return self._enter_module(tap, reading, args, kwargs) if self._is_mine() else None

        def after(_: nn.Module, __: Any, output: Any) -> Any:
            return self._leave_module(tap, reading, output) if self._is_mine() else None

        if reading.how != "output":
            self._cleanup.callback(reading.module.register_forward_pre_hook(before, with_kwargs=True).remove)
        if reading.how in ("output", "attention"):
            self._cleanup.callback(reading.module.register_forward_hook(after).remove)

    def _is_mine(self) -> bool:
        return threading.get_ident() == self._thread

    def _enter_module(
        self, tap: Tap, reading: Reading, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        if reading.how == "attention":
            if not self._mode.stack:
                self._inside.enter_context(self._mode)
            self._mode.stack.append(tap)
            return None
        if reading.how == "input":
            return (self._take(tap, args[0]), *args[1:]), kwargs
        if reading.keyword not in kwargs:
            raise CaptureError(f"{tap}: the module was called without {reading.keyword!r}; it got {listing(kwargs)}")
        return args, kwargs | {reading.keyword: self._take(tap, kwargs[reading.keyword])}

    def _leave_module(self, tap: Tap, reading: Reading, output: Any) -> Any:
        if reading.how == "attention":
            self._mode.stack.pop()
            if not self._mode.stack:
                self._inside.close()
            return None
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


def _spread(tensor: Tensor, image_of: Sequence[int]) -> Tensor:
    """One row per pair from one row per image; a single image is expanded, not copied."""
    if len(tensor) == 1:
        return tensor.expand(len(image_of), *tensor.shape[1:])
    if list(image_of) == list(range(len(tensor))):
        return tensor
    return tensor[list(image_of)]


def _gradients(y: Tensor, tensors: Sequence[Tensor]) -> Sequence[Tensor | None]:
    if not tensors or not y.requires_grad:
        return [None] * len(tensors)
    # Pairs do not influence each other, so the gradient of their sum holds each pair's own.
    return torch.autograd.grad(y, tensors, torch.ones_like(y), allow_unused=True)


def _trunk_gradients(
    tokens: Tensor, tapped: Mapping[Tap, Tensor], upstream: Tensor | None, image_of: Sequence[int]
) -> dict[Tap, Tensor | None]:
    """Carry each pair's gradient from the trunk's output to its taps; pairs of one image take turns."""
    if upstream is None:
        return dict.fromkeys(tapped)
    rounds = _rounds(image_of)
    rows: dict[Tap, dict[int, Tensor]] = {tap: {} for tap in tapped}
    for number, pairs in enumerate(rounds):
        weights = torch.zeros_like(tokens)
        for pair in pairs:
            weights[image_of[pair]] = upstream[pair]
        last = number == len(rounds) - 1
        found = torch.autograd.grad(tokens, list(tapped.values()), weights, retain_graph=not last, allow_unused=True)
        for tap, gradient in zip(tapped, found, strict=True):
            if gradient is not None:
                rows[tap] |= {pair: gradient[image_of[pair]] for pair in pairs}
    return {
        tap: torch.stack([row[pair] for pair in range(len(image_of))]) if row else None for tap, row in rows.items()
    }


def _rounds(image_of: Sequence[int]) -> list[list[int]]:
    """Pairs in groups in which no image occurs twice."""
    rounds: list[list[int]] = []
    seen: dict[int, int] = {}
    for pair, image in enumerate(image_of):
        turn = seen.get(image, 0)
        seen[image] = turn + 1
        if turn == len(rounds):
            rounds.append([])
        rounds[turn].append(pair)
    return rounds


def _check_finite(y: Tensor, target: Target) -> None:
    if not bool(torch.isfinite(y).all()):
        raise EvidenceError(
            f"{target.label} is not finite: {y.detach().float().tolist()}; the model's output is broken"
        )
