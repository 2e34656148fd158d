"""One pass through a model: activations at the taps, gradients of the target, and the model left as it was found."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from vlcam.adapter import Inputs, ModelAdapter
from vlcam.anatomy import SCORES, VALUES, StreamAnatomy, Tap
from vlcam.errors import AdapterError, EvidenceError
from vlcam.maps import taken
from vlcam.readers import explained_classes, region_weights
from vlcam.taps import Taps, attention_detached
from vlcam.targets import Target
from vlcam.tokens import Windows

__all__ = ["STEPS", "Capture", "as_found", "capture", "fixed_target", "integrated", "run_heads"]

STEPS = 20
"""Images over which `integrated` averages."""

_LOCKS: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_LOCKS_LOCK = threading.Lock()


@dataclass(frozen=True, eq=False)
class Capture:
    """What one pass gave for P pairs; every tensor has the pair as its first axis and no graph.

    Attributes:
        activations: the tensor at each tap; [P, N, C] for token features, in raster order.
        gradients: dy/d(tensor) at each tap; None where y does not depend on the tensor at all. Empty where the
            target takes no gradient.
        target: y, [P].
        outputs: what the target's head returned; `run_heads` gives the others.
        context: what the trunk gave, which the heads read.
        plain: for a target whose gradient is integrated, the gradients at the image itself.
        windows: how tapped blocks cut their grid into windows, where they do; their F2 is [P, windows, H, Q, K].
        known: answers that were worked out of the tensors once, for whoever asks again.
    """

    activations: Mapping[Tap, Tensor]
    gradients: Mapping[Tap, Tensor | None]
    target: Tensor
    outputs: Mapping[str, Tensor]
    context: Tensor
    windows: Mapping[Tap, Windows] = field(default_factory=dict)
    plain: Mapping[Tap, Tensor | None] = field(default_factory=dict)
    known: dict[tuple[object, ...], bool] = field(default_factory=dict, repr=False)

    def plain_gradient(self, tap: Tap) -> Tensor:
        """The gradient at the image itself.

        Raises:
            EvidenceError: there is none.
        """
        found = (self.plain or self.gradients)[tap]
        if found is None:
            raise EvidenceError(f"the target does not depend on {tap}")
        return found

    def alive(self, tap: Tap, pair: int, used: Mapping[int, Sequence[int]]) -> bool:
        """Whether the gradient of a pair at a tap is not zero everywhere in what is used: indices by axis."""
        chosen = {axis: own if isinstance(own, range) else tuple(own) for axis, own in used.items()}
        key = (tap, pair, *chosen.items())
        gradient = self.gradients[tap]
        if gradient is not None and key not in self.known:
            part = gradient[pair : pair + 1]
            for axis, indices in chosen.items():
                part = taken(part, indices, axis)
            # Several times faster than any(); NaN counts as alive, and is refused with the map.
            self.known[key] = bool(part.abs().amax())
        return self.known.get(key, False)


def capture(
    adapter: ModelAdapter, inputs: Inputs, taps: Sequence[Tap], targets: Sequence[Target], *, direct: bool = False
) -> tuple[Capture, ...]:
    """Run the model once, read the taps, and differentiate each target.

    The graph begins at the earliest tap; all before it runs without one. Parameters are frozen for the pass. The
    trunk runs once per image; its gradients for several texts of one image are drawn from that one run.

    Args:
        adapter: the model.
        inputs: P pairs.
        taps: what to read.
        targets: what to differentiate, one or more of one head.
        direct: whether the inputs of attention are detached in the streams of the taps, so that gradients pass through
            residual connections and FFNs only.

    Returns:
        What each target gave, in order; the activations are shared.

    Raises:
        CaptureError: a tap was not reached, or reached twice.
        EvidenceError: a target is not finite.
        RecipeError: a gradient path that the model does not have.
    """
    streams, name = adapter.anatomy.streams, targets[0].head
    differentiate = any(target.differentiate for target in targets)
    wanted = dict.fromkeys([*taps, *_block_outputs(taps, targets)])
    readings = {tap: streams[tap.stream].reading(tap.layer, tap.site) for tap in wanted}
    early = {tap: reading for tap, reading in readings.items() if streams[tap.stream].trunk}
    late = {tap: reading for tap, reading in readings.items() if tap not in early}
    with ExitStack() as stack:
        stack.enter_context(as_found(adapter.module))
        stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(adapter.running())
        if direct:
            stack.enter_context(attention_detached([streams[each] for each in dict.fromkeys(t.stream for t in taps)]))
        with Taps(early, differentiate=differentiate) as trunk:
            shared = adapter.trunk(inputs)
        windows = {tap: found for tap in early if (found := adapter.windows(tap.stream, tap.layer, inputs.images))}
        with torch.no_grad(), Taps(late, differentiate=differentiate) as head:
            context = _spread(shared.detach(), inputs.image_of)
            if early and differentiate:
                context = context.contiguous().requires_grad_()
                torch.set_grad_enabled(True)
            output = adapter.head(name, context, inputs)
            # Each target reads a copy: one that works in place must not change what others read.
            scalars = [target.read(output.clone()) for target in targets]
        run = _Run(
            adapter, inputs, shared, context if early else None, trunk.tensors, head.tensors, windows, output.detach()
        )
        gradients = []
        for number, (target, y) in enumerate(zip(targets, scalars, strict=True)):
            _check_finite(y, target)
            gradients.append(run.gradients(target, y, last=number == len(targets) - 1))
    activations = {
        tap: _spread(_by_image(tap, tensor.detach(), windows), inputs.image_of) for tap, tensor in trunk.tensors.items()
    }
    activations |= {tap: tensor.detach() for tap, tensor in head.tensors.items()}
    activations |= {
        tap: _projected(streams[tap.stream], tap, tensor) for tap, tensor in activations.items() if tap.site == VALUES
    }
    return tuple(
        Capture(activations, found, y.detach(), {name: output.detach()}, context.detach(), windows)
        for found, y in zip(gradients, scalars, strict=True)
    )


def integrated(adapter: ModelAdapter, inputs: Inputs, taps: Sequence[Tap], target: Target) -> Capture:
    """Average gradients over the images a * x for 20 values of a from 0 to 1, the last being the image itself.

    The image x is the preprocessed one, so that a = 0 is the mean colour. After Sundararajan et al. (ICML 2017), as in
    Yuan et al. (NeurIPS 2021 workshop) and Chen et al. (TMLR 2023). A class with the highest logit is the image's own.

    Args:
        adapter: the model.
        inputs: P pairs.
        taps: what to read.
        target: what to differentiate.

    Returns:
        The capture of the image itself, with the averaged gradients, and its own as `plain`.
    """
    (whole,) = capture(adapter, inputs, taps, [target])
    target = fixed_target(adapter, target, whole.outputs[target.head])
    sums = dict(whole.gradients)
    for step in range(STEPS - 1):
        pixels = inputs.images.pixel_values * (step / (STEPS - 1))
        dimmed = replace(inputs, images=replace(inputs.images, pixel_values=pixels))
        (found,) = capture(adapter, dimmed, taps, [target])
        for tap, gradient in found.gradients.items():
            total = sums[tap]
            sums[tap] = gradient if total is None else total if gradient is None else total + gradient
    means = {tap: None if total is None else total / STEPS for tap, total in sums.items()}
    return replace(whole, gradients=means, plain=whole.gradients, known={})


def fixed_target(adapter: ModelAdapter, target: Target, output: Tensor) -> Target:
    """The target for changed images: the class, and the pixels that are given to it, stay those of the images as given.

    Args:
        adapter: the model.
        target: of P pairs.
        output: what the head gave for the images as given.
    """
    if adapter.heads[target.head] not in ("classes", "pixels") or target.custom is not None:
        return target
    classes = explained_classes(output, target.classes)
    if adapter.heads[target.head] == "pixels":
        target = target.within(region_weights(output, classes, target.weights))
    return target.of_classes(classes.tolist())


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


def _block_outputs(taps: Sequence[Tap], targets: Sequence[Target]) -> list[Tap]:
    """What a target that is read at each block needs besides: the output of every block that is tapped."""
    if all(target.path != "block" for target in targets):
        return []
    return [Tap(tap.stream, tap.layer, "F6") for tap in taps]


@dataclass(frozen=True, eq=False)
class _Run:
    """A run of the model that can be differentiated; `context` is None where nothing in the trunk is tapped."""

    adapter: ModelAdapter
    inputs: Inputs
    shared: Tensor
    context: Tensor | None
    early: Mapping[Tap, Tensor]
    late: Mapping[Tap, Tensor]
    windows: Mapping[Tap, Windows]
    output: Tensor

    def gradients(self, target: Target, y: Tensor, *, last: bool) -> dict[Tap, Tensor | None]:
        """dy/d(tensor) at every tap, one row per pair; the graph is kept unless this is the last target."""
        if not target.differentiate:
            return {}
        if target.path == "block":
            return self._of_blocks(fixed_target(self.adapter, target, self.output))
        wanted = [*self.late.values(), *([] if self.context is None else [self.context])]
        found = list(_gradients(y, wanted, keep=not last))
        made: dict[Tap, Tensor | None] = {}
        if self.context is not None:
            made |= self._through(self.shared, self.early, found.pop(), last=last)
        return made | dict(zip(self.late, found, strict=True))

    def _by_image(self, tap: Tap, gradient: Tensor | None) -> Tensor | None:
        return None if gradient is None else _by_image(tap, gradient, self.windows)

    def _of_blocks(self, target: Target) -> dict[Tap, Tensor | None]:
        """Each block's own output is read by the head, and differentiated by what is tapped in that block."""
        made: dict[Tap, Tensor | None] = {}
        for output, tokens in self.early.items():
            inside = {t: x for t, x in self.early.items() if t.site != "F6" and t.layer == output.layer}
            if output.site != "F6" or not inside:
                continue
            with torch.enable_grad():
                scores = self.adapter.read_block(target.head, _by_image(output, tokens, self.windows), self.inputs)
                read = _spread(scores.detach(), self.inputs.image_of).contiguous().requires_grad_()
                y = target.read(read)
            _check_finite(y, target)
            (upstream,) = _gradients(y, [read])
            made |= self._through(scores, inside, upstream, last=False)
        return made

    def _through(
        self, end: Tensor, tapped: Mapping[Tap, Tensor], upstream: Tensor | None, *, last: bool
    ) -> dict[Tap, Tensor | None]:
        """Carry each pair's gradient from rows per image to the taps before; pairs of one image take turns."""
        image_of = self.inputs.image_of
        if upstream is None or not end.requires_grad:
            return dict.fromkeys(tapped)
        rounds = _rounds(image_of)
        if len(rounds) == 1 and list(image_of) == list(range(len(end))):  # a row per pair already
            found = torch.autograd.grad(end, list(tapped.values()), upstream, retain_graph=not last, allow_unused=True)
            return {tap: self._by_image(tap, gradient) for tap, gradient in zip(tapped, found, strict=True)}
        rows: dict[Tap, dict[int, Tensor]] = {tap: {} for tap in tapped}
        for number, pairs in enumerate(rounds):
            weights = torch.zeros_like(end)
            for pair in pairs:
                weights[image_of[pair]] = upstream[pair]
            keep = not last or number < len(rounds) - 1
            found = torch.autograd.grad(end, list(tapped.values()), weights, retain_graph=keep, allow_unused=True)
            for tap, raw in zip(tapped, found, strict=True):
                gradient = self._by_image(tap, raw)
                if gradient is not None:
                    rows[tap] |= {pair: gradient[image_of[pair]] for pair in pairs}
        return {
            tap: torch.stack([row[pair] for pair in range(len(image_of))]) if row else None for tap, row in rows.items()
        }


def _by_image(tap: Tap, tensor: Tensor, windows: Mapping[Tap, Windows]) -> Tensor:
    """A tensor of the trunk with the image as its first axis, and token features as [I, N, C] in raster order."""
    cut = windows.get(tap)
    if cut is not None and tap.site in ("F2", SCORES):
        return tensor.view(-1, cut.across[0] * cut.across[1], *tensor.shape[1:])
    if cut is not None and tap.site in ("F3", "F3_HEADS") and tensor.ndim == 3:
        return cut.raster(tensor)
    return tensor.flatten(1, 2) if tensor.ndim == 4 and tap.site not in ("F2", SCORES, VALUES) else tensor


def _projected(stream: StreamAnatomy, tap: Tap, values: Tensor) -> Tensor:
    """What each token's values add to the block's output, [P, N, C] from [P, H, N, d], without the bias."""
    reading = stream.reading(tap.layer, "F3_HEADS")
    projection: Any = reading.module if reading.how == "input" else reading.module.out_proj
    weight: Tensor = projection.weight
    return values.transpose(1, 2).flatten(2) @ weight.detach().T


def _spread(tensor: Tensor, image_of: Sequence[int]) -> Tensor:
    """One row per pair from one row per image; a single image is expanded, not copied."""
    if len(tensor) == 1:
        return tensor.expand(len(image_of), *tensor.shape[1:])
    if list(image_of) == list(range(len(tensor))):
        return tensor
    return tensor[list(image_of)]


def _gradients(y: Tensor, tensors: Sequence[Tensor], *, keep: bool = False) -> Sequence[Tensor | None]:
    if not tensors or not y.requires_grad:
        return [None] * len(tensors)
    # Pairs do not influence each other, so the gradient of their sum holds each pair's own.
    return torch.autograd.grad(y, tensors, torch.ones_like(y), retain_graph=keep, allow_unused=True)


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
