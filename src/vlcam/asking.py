"""Methods that ask the model again, with parts of the image or of a tensor taken away, instead of taking a gradient."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from vlcam.adapter import Encoded, Inputs, ModelAdapter, PreparedTexts
from vlcam.anatomy import Tap
from vlcam.capture import Capture, as_found, fixed_target
from vlcam.errors import RecipeError
from vlcam.maps import taken
from vlcam.plan import Job
from vlcam.rows import Selection
from vlcam.targets import Target

__all__ = ["BATCH", "Progress", "ask", "questions"]

BATCH = 32
"""How many variants run at once."""

Progress = Callable[[int, int], None]
"""Told after every batch: how many variants have run, of how many."""

Edit = Callable[[Tensor, range], Tensor]
"""From a tensor for a batch of variants, and which of all variants they are, to what the model goes on with."""


@dataclass(frozen=True, eq=False)
class _Variants:
    """What is asked: how many variants there are, their pixels where those differ, and edits of tensors inside."""

    count: int
    pixels: Edit | None
    edits: dict[Tap, Edit]


def questions(job: Job, found: Capture, selection: Selection) -> int:
    """How many times the model is asked for one pair, beside the pass that reads the tensors; 0 for most recipes."""
    if not job.recipe.asks:
        return 0
    return len(selection.cells) if job.recipe.weighting == "reciprocam" else found.activations[job.taps[0]].shape[-1]


def ask(
    adapter: ModelAdapter,
    inputs: Inputs,
    job: Job,
    found: Capture,
    pair: int,
    selection: Selection,
    *,
    batch: int = BATCH,
    progress: Progress | None = None,
) -> Tensor:
    """The weights that the model's answers give: [1, channels], or [1, cells] for `reciprocam`.

    - `scorecam`: softmax over the channels of the score of the image times each channel's activation, scaled to 0..1
      and laid over the image (Wang et al., CVPRW 2020). `aligned_corners`: laid over with corners aligned, and scaled
      after that, as in pytorch-grad-cam; otherwise scaled on the grid and laid over with half-pixel centres, as in
      torch-cam.
    - `ablationcam`: (y - y without the channel) / y (Desai and Ramaswamy, WACV 2020); the channel is set to zero at
      every token.
    - `reciprocam`: the score when of the last block's input, and of its first LayerNorm's output, only the class token
      and the neighbourhood of a cell are left, weighted by a 3 x 3 Gaussian (Byun and Lee, arXiv 2310.02588).

    Args:
        adapter: the model.
        inputs: the pairs.
        job: the recipe on this model.
        found: what the pass without changes gave.
        pair: the pair that is explained.
        selection: the cells of the map.
        batch: how many variants run at once; the answers do not depend on it.
        progress: told after every batch. What it raises ends the asking; the model is left as found.
    """
    target = _fixed(adapter, job.target, found, pair)
    variants = _VARIANTS[job.recipe.weighting](adapter, inputs, job, found, pair, selection)
    scores = torch.cat(list(_answers(adapter, inputs, found, pair, target, variants, batch, progress))).float()
    if job.recipe.weighting == "scorecam":
        return scores.softmax(0)[None]
    if job.recipe.weighting == "ablationcam":
        whole = target.read(found.outputs[target.head][pair : pair + 1]).float()
        return ((whole - scores) / whole)[None]
    return scores[None]


def _fixed(adapter: ModelAdapter, target: Target, found: Capture, pair: int) -> Target:
    """The target of one pair; a class with the highest logit stays the one of the whole image."""
    fixed = fixed_target(adapter, target, found.outputs[target.head])
    if fixed.weights is not None:
        fixed = fixed.within(fixed.weights[pair : pair + 1])
    return fixed.of_classes(fixed.classes[pair : pair + 1] if len(fixed.classes) > 1 else fixed.classes)


def _answers(
    adapter: ModelAdapter,
    inputs: Inputs,
    found: Capture,
    pair: int,
    target: Target,
    variants: _Variants,
    batch: int,
    progress: Progress | None,
) -> Iterator[Tensor]:
    original = inputs.images.pixel_values[inputs.image_of[pair]][None]
    with as_found(adapter.module), torch.inference_mode(mode=False), torch.no_grad(), adapter.running():
        for start in range(0, variants.count, batch):
            which = range(start, min(start + batch, variants.count))
            pixels = original.expand(len(which), *original.shape[1:])
            if variants.pixels is not None:
                pixels = variants.pixels(pixels, which)
            asked = _repeated(inputs, found, pair, pixels)
            with _edited(adapter, variants.edits, which):
                shared = adapter.trunk(asked)
                output = adapter.head(target.head, shared, asked)
            yield target.read(output)
            if progress is not None:
                progress(which.stop, variants.count)


def _repeated(inputs: Inputs, found: Capture, pair: int, pixels: Tensor) -> Inputs:
    """One pair as often as there are variants of its pixels."""
    count, images = len(pixels), inputs.images
    image = inputs.image_of[pair]
    encoded = found.encoded
    if encoded is not None:
        own = encoded.own[pair : pair + 1]
        encoded = Encoded(encoded.every, own.expand(count, *own.shape[1:]))
    repeated = replace(
        images,
        pixel_values=pixels,
        placements=(images.placements[image],) * count,
        steps=(images.steps[image],) * count,
    )
    text_of = inputs.text_of[pair : pair + 1] * count
    return Inputs(repeated, inputs.texts, tuple(range(count)), text_of, encoded, _same(inputs.answers, pair, count))


def _same(answers: PreparedTexts | None, pair: int, count: int) -> PreparedTexts | None:
    """A pair's answer for every variant."""
    if answers is None:
        return None
    rows = {name: tensor[[pair] * count] for name, tensor in answers.tensors.items()}
    return PreparedTexts(rows, (answers.layouts[pair],) * count)


@contextmanager
def _edited(adapter: ModelAdapter, edits: dict[Tap, Edit], which: range) -> Iterator[None]:
    """Replace the outputs of tapped modules while a batch runs."""
    with ExitStack() as stack:
        for tap, edit in edits.items():
            reading = adapter.anatomy.stream(tap.stream).reading(tap.layer, tap.site)
            if reading.how not in ("output", "input"):
                raise RecipeError(f"{tap} is read at {reading.how!r} of a module, which cannot be changed there")
            stack.callback(_hook(reading.module, reading.how, edit, which).remove)
        yield


def _hook(module: nn.Module, how: str, edit: Edit, which: range) -> torch.utils.hooks.RemovableHandle:
    """An edit that only the thread feels that sets it."""
    owner = threading.get_ident()

    def before(_: nn.Module, args: Any) -> Any:
        return (edit(args[0], which), *args[1:]) if threading.get_ident() == owner else None

    def after(_: nn.Module, __: Any, output: Any) -> Any:
        if threading.get_ident() != owner:
            return None
        return edit(output, which) if isinstance(output, Tensor) else (edit(output[0], which), *output[1:])

    return module.register_forward_pre_hook(before) if how == "input" else module.register_forward_hook(after)


def _masked_images(
    adapter: ModelAdapter,  # noqa: ARG001 - all variants are made from the same facts
    inputs: Inputs,
    job: Job,
    found: Capture,
    pair: int,
    selection: Selection,
) -> _Variants:
    rows, columns = selection.grid
    features = taken(found.activations[job.taps[0]][pair : pair + 1].float(), selection.cells, 1)
    masks = features[0].T.reshape(-1, 1, rows, columns)
    size = inputs.images.pixel_values.shape[-2:]

    def mask(pixels: Tensor, which: range) -> Tensor:
        chosen = masks[which.start : which.stop]
        if "aligned_corners" in job.recipe.departures:
            laid = _scaled(interpolate(chosen, size, mode="bilinear", align_corners=True))
        else:
            laid = interpolate(_scaled(chosen), size, mode="bilinear", align_corners=False)
        return pixels * laid.to(pixels)

    return _Variants(len(masks), mask, {})


def _scaled(values: Tensor) -> Tensor:
    """Each map to 0..1."""
    low = values.amin((2, 3), keepdim=True)
    high = values.amax((2, 3), keepdim=True)
    return (values - low) / (high - low + 1e-8)


def _ablated_channels(
    adapter: ModelAdapter,  # noqa: ARG001 - all variants are made from the same facts
    inputs: Inputs,  # noqa: ARG001
    job: Job,
    found: Capture,
    pair: int,  # noqa: ARG001
    selection: Selection,  # noqa: ARG001
) -> _Variants:
    tap = job.taps[0]

    def ablate(tensor: Tensor, which: range) -> Tensor:
        left = tensor.clone()
        variants = left.view(len(which), -1, tensor.shape[-1])  # windows of one variant stand together
        for row, channel in enumerate(which):
            variants[row, :, channel] = 0
        return left

    return _Variants(found.activations[tap].shape[-1], None, {tap: ablate})


def _kept_neighbourhoods(
    adapter: ModelAdapter,
    inputs: Inputs,  # noqa: ARG001 - all variants are made from the same facts
    job: Job,
    found: Capture,
    pair: int,
    selection: Selection,
) -> _Variants:
    tap = job.taps[0]
    if tap.layer == 0:
        raise RecipeError(
            "weighting='reciprocam' at block 0: it changes what the block before gives; choose a later one"
        )
    masks = _neighbourhoods(job, selection.grid)
    count = len(selection.cells)
    keep = torch.ones(count, found.activations[tap].shape[1], device=masks.device)
    keep[:, list(selection.cells)] = masks
    norm = found.activations[tap][pair : pair + 1]

    def block_input(tensor: Tensor, which: range) -> Tensor:
        return tensor * keep[which.start : which.stop, :, None].to(tensor)

    def norm_output(tensor: Tensor, which: range) -> Tensor:
        return norm.to(tensor) * keep[which.start : which.stop, :, None].to(tensor)

    before = Tap(tap.stream, tap.layer - 1, "F6")
    adapter.anatomy.stream(tap.stream).reading(before.layer, before.site)
    return _Variants(count, None, {before: block_input, tap: norm_output})


def _neighbourhoods(job: Job, grid: tuple[int, int]) -> Tensor:
    """For every cell the weights of all cells, [cells, cells]: a 3 x 3 Gaussian around it, or the cell alone."""
    rows, columns = grid
    cells = torch.eye(rows * columns, device="cpu").reshape(-1, 1, rows, columns)
    if "one_token" in job.recipe.departures:
        return cells.flatten(1)
    line = torch.tensor([1.0, 2.0, 1.0], device="cpu")
    kernel = (line[:, None] * line / 16)[None, None]
    return nn.functional.conv2d(cells, kernel, padding=1).flatten(1)


_VARIANTS = {"scorecam": _masked_images, "ablationcam": _ablated_channels, "reciprocam": _kept_neighbourhoods}
