"""One pass through a model: activations at the taps, gradients of the target, and the model left as it was found."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from vlcam.adapter import Encoded, Inputs, ModelAdapter
from vlcam.anatomy import HANDED, INPUT, VALUES, StreamAnatomy, Tap
from vlcam.attention import Edit
from vlcam.backward import Run, Side, by_image, check_finite, spread
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
        encoded: what a text tower made of the texts, where there is one.
        plain: for a target whose gradient is integrated, the gradients at the image itself.
        windows: how tapped blocks cut their grid into windows, where they do; their F2 is [P, windows, H, Q, K].
        of_blocks: for a target that is read at each block, its value there, [P] by block.
        known: answers that were worked out of the tensors once, for whoever asks again.
    """

    activations: Mapping[Tap, Tensor]
    gradients: Mapping[Tap, Tensor | None]
    target: Tensor
    outputs: Mapping[str, Tensor]
    context: Tensor
    encoded: Encoded | None = None
    windows: Mapping[Tap, Windows] = field(default_factory=dict)
    plain: Mapping[Tap, Tensor | None] = field(default_factory=dict)
    of_blocks: Mapping[int, Tensor] = field(default_factory=dict)
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
    adapter: ModelAdapter,
    inputs: Inputs,
    taps: Sequence[Tap],
    targets: Sequence[Target],
    *,
    direct: bool = False,
    edits: Mapping[nn.Module, Edit] = MappingProxyType({}),
) -> tuple[Capture, ...]:
    """Run the model once, read the taps, and differentiate each target.

    The graph begins at the earliest tap; all before it runs without one. Parameters are frozen for the pass. The
    trunk runs once per image, and a text tower once per text; gradients of several pairs that share one are drawn from
    that one run.

    Args:
        adapter: the model.
        inputs: P pairs.
        taps: what to read.
        targets: what to differentiate, one or more of one head.
        direct: whether the inputs of attention are detached in the streams of the taps, so that gradients pass through
            residual connections and FFNs only.
        edits: attention modules that compute otherwise than in the model.

    Returns:
        What each target gave, in order; the activations are shared.

    Raises:
        CaptureError: a tap was not reached, or reached twice.
        EvidenceError: a target is not finite.
        RecipeError: a gradient path that the model does not have.
    """
    streams, name = adapter.anatomy.streams, targets[0].head
    differentiate = any(target.differentiate for target in targets)
    wanted = _wanted(taps, targets, streams)
    readings = {tap: streams[tap.stream].reading(tap.layer, tap.site) for tap in wanted}
    before = {tap: reading for tap, reading in readings.items() if streams[tap.stream].trunk}
    texts = {tap: reading for tap, reading in before.items() if tap.stream == "text"}
    images = {tap: reading for tap, reading in before.items() if tap not in texts}
    late = {tap: reading for tap, reading in readings.items() if tap not in before}
    with ExitStack() as stack:
        stack.enter_context(as_found(adapter.module))
        stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(adapter.running())
        if direct:
            stack.enter_context(attention_detached([streams[each] for each in dict.fromkeys(t.stream for t in taps)]))
        with torch.no_grad(), Taps(images, differentiate=differentiate, edits=edits) as trunk:
            shared = adapter.trunk(inputs)
        windows = {tap: found for tap in images if (found := adapter.windows(tap.stream, tap.layer, inputs.images))}
        with torch.no_grad(), Taps(texts, differentiate=differentiate, edits=edits) as tower:
            read = adapter.text_tower(inputs)
        with torch.no_grad(), Taps(late, differentiate=differentiate) as head:
            sides = [_side(shared, trunk.tensors, inputs.image_of, differentiate=differentiate)]
            context, _ = sides[0]
            if read is not None:
                # Words are hidden in a pair's own text, and not in those that it is compared with.
                hides = any(edit.hidden is not None for edit in edits.values())
                whole = adapter.text_tower(inputs) if hides else read
                sides.append(_side(read, tower.tensors, inputs.text_of, differentiate=differentiate))
                inputs = replace(inputs, encoded=Encoded(torch.as_tensor(whole).detach(), sides[1][0]))
            output = adapter.head(name, context, inputs)
            # Each target reads a copy: one that works in place must not change what others read.
            scalars = [target.read(output.clone()) for target in targets]
        run = Run(adapter, inputs, [side for _, side in sides], head.tensors, windows)
        gradients = []
        for number, (target, y) in enumerate(zip(targets, scalars, strict=True)):
            check_finite(y, target)
            fixed = fixed_target(adapter, target, output.detach()) if target.path == "block" else target
            run.of_blocks.clear()
            run.read_again.clear()
            own = run.gradients(fixed, y, last=number == len(targets) - 1)
            gradients.append((own, dict(sorted(run.of_blocks.items())), dict(run.read_again)))
    by_row = {tap: by_image(tap, tensor.detach(), windows) for tap, tensor in trunk.tensors.items()}
    by_row |= _handed_on(streams, by_row)
    activations = {tap: spread(tensor, inputs.image_of) for tap, tensor in by_row.items()}
    activations |= {tap: spread(tensor.detach(), inputs.text_of) for tap, tensor in tower.tensors.items()}
    activations |= {tap: tensor.detach() for tap, tensor in head.tensors.items()}
    encoded = None if inputs.encoded is None else replace(inputs.encoded, own=inputs.encoded.own.detach())
    return tuple(
        Capture(
            activations | {tap: spread(tensor.detach(), inputs.image_of) for tap, tensor in again.items()},
            found,
            y.detach(),
            {name: output.detach()},
            context.detach(),
            encoded,
            windows,
            of_blocks=of_blocks,
        )
        for (found, of_blocks, again), y in zip(gradients, scalars, strict=True)
    )


def _handed_on(streams: Mapping[str, StreamAnatomy], tensors: Mapping[Tap, Tensor]) -> dict[Tap, Tensor]:
    """What each token hands on, for blocks whose values and input are tapped."""
    found = {}
    for tap, values in tensors.items():
        if tap.site == VALUES and replace(tap, site=INPUT) in tensors:
            projection: Any = streams[tap.stream].projection(tap.layer)
            joined = values.transpose(1, 2).flatten(2)
            found[replace(tap, site=HANDED)] = joined @ projection.weight.detach().T
    return found


def _wanted(taps: Sequence[Tap], targets: Sequence[Target], streams: Mapping[str, StreamAnatomy]) -> dict[Tap, None]:
    """What the pass itself taps; a target that is read at each block needs the output of every block besides."""
    if all(target.path != "block" for target in targets):
        return dict.fromkeys(taps)
    if any(target.pooler for target in targets):  # the pooler is tapped while it reads each block
        return dict.fromkeys(Tap("vision", tap.layer, "F6") for tap in taps)
    read = [tap for tap in taps if streams[tap.stream].trunk and tap.stream != "text"]
    return dict.fromkeys([*taps, *(Tap(tap.stream, tap.layer, "F6") for tap in read)])


def _side(
    end: Tensor, tapped: Mapping[Tap, Tensor], row_of: tuple[int, ...], *, differentiate: bool
) -> tuple[Tensor, Side]:
    """What the head reads of a trunk or tower, a row per pair, and how gradients get back from there."""
    rows = spread(end.detach(), row_of)
    if not tapped or not differentiate:
        return rows, Side(end, None, tapped, row_of)
    rows = rows.contiguous().requires_grad_()
    torch.set_grad_enabled(True)
    return rows, Side(end, rows, tapped, row_of)


def integrated(
    adapter: ModelAdapter,
    inputs: Inputs,
    taps: Sequence[Tap],
    target: Target,
    *,
    edits: Mapping[nn.Module, Edit] = MappingProxyType({}),
) -> Capture:
    """Average gradients over the images a * x for 20 values of a from 0 to 1, the last being the image itself.

    The image x is the preprocessed one, so that a = 0 is the mean colour. After Sundararajan et al. (ICML 2017), as in
    Yuan et al. (NeurIPS 2021 workshop) and Chen et al. (TMLR 2023). A class with the highest logit is the image's own.

    Args:
        adapter: the model.
        inputs: P pairs.
        taps: what to read.
        target: what to differentiate.
        edits: attention modules that compute otherwise than in the model.

    Returns:
        The capture of the image itself, with the averaged gradients, and its own as `plain`.
    """
    (whole,) = capture(adapter, inputs, taps, [target], edits=edits)
    target = fixed_target(adapter, target, whole.outputs[target.head])
    sums = dict(whole.gradients)
    for step in range(STEPS - 1):
        pixels = inputs.images.pixel_values * (step / (STEPS - 1))
        dimmed = replace(inputs, images=replace(inputs.images, pixel_values=pixels))
        (found,) = capture(adapter, dimmed, taps, [target], edits=edits)
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


def run_heads(adapter: ModelAdapter, inputs: Inputs, found: Capture, names: Sequence[str]) -> dict[str, Tensor]:
    """What further heads return for the images and texts of a capture, without any gradient.

    Args:
        adapter: the model.
        inputs: the pairs of the capture.
        found: what its pass gave.
        names: which heads.
    """
    inputs = replace(inputs, encoded=found.encoded)
    with as_found(adapter.module), torch.inference_mode(mode=False), torch.no_grad(), adapter.running():
        return {name: adapter.head(name, found.context, inputs) for name in names}


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
