"""BEiT of Hugging Face transformers that tells the class of every place of an image."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import BeitForSemanticSegmentation, PreTrainedModel

from vlcam.errors import InputError
from vlcam.targets import HeadKind
from vlcam_adapters.beit_hf import BeitBase
from vlcam_adapters.classifier import ImageSizes

_LEAST = 2  # the decoder halves the grid once


class _DecoderSizes(ImageSizes):
    """Sizes whose grid the decoder can halve."""

    def check(self, size: tuple[int, int]) -> None:
        """Refuse a size that the model cannot take.

        Raises:
            InputError: as for every model, or a grid with a side of one patch.
        """
        super().check(size)
        rows, columns = self.grid(size)
        if min(rows, columns) < _LEAST:
            height, width = (_LEAST * side for side in self.patch)
            raise InputError(
                f"image size {size}: a grid of {rows} x {columns} patches, which the decoder cannot halve; give images "
                f"of at least {height} x {width} pixels"
            )


class BeitSegmentationHF(BeitBase):
    """Adapter for `BeitForSemanticSegmentation`: class logits at 4 x 4 places of every patch."""

    kinds: ClassVar[tuple[type[PreTrainedModel], ...]] = (BeitForSemanticSegmentation,)
    architectures: ClassVar[tuple[str, ...]] = tuple(kind.__name__ for kind in kinds)
    heads: Mapping[str, HeadKind] = MappingProxyType({"segmentation": "pixels"})
    reads_cls = False
    _sizes: ClassVar[type[ImageSizes]] = _DecoderSizes

    def logits(self, pixel_values: Tensor) -> Tensor:
        """Class logits of the model's own forward, [I, classes, 4 * rows, 4 * columns]."""
        with _collected_last(self.module.base_model.layers):
            return super().logits(pixel_values)

    @property
    def blocks_read(self) -> tuple[int, ...]:
        """The blocks whose outputs the decoder reads; -1 for what goes into the first.

        transformers counts them from the embeddings, and takes the one before each of `out_indices`.
        """
        config = self.module.config
        outputs = range(-1, config.num_hidden_layers)
        return tuple(outputs[index - 1] for index in config.out_indices)

    @property
    def reading_notes(self) -> Sequence[str]:
        """Which blocks the decoder reads, and what therefore has no gradient."""
        config, read = self.module.config, sorted(set(self.blocks_read))
        deepest, last = read[-1], config.num_hidden_layers - 1
        notes = [
            f"the decoder reads the patches behind {_blocks([block for block in read if block >= 0])} (out_indices "
            f"{', '.join(map(str, config.out_indices))})" + (", and the embedded patches" if read[0] < 0 else "")
        ]
        if deepest < last:
            notes.append(
                f"no logit depends on {_blocks(range(deepest + 1, last + 1))}: nothing there has a gradient; the last "
                f"that has is block {deepest}"
            )
        notes.append(
            f"the decoder drops [CLS]: in block {deepest} it has no gradient from F3_HEADS on, nor its query in F2"
        )
        return notes


@contextmanager
def _collected_last(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Let the hooks with which transformers collects the blocks' outputs run behind all others.

    It sets them at the first run, for good. The decoder reads what they collect, and that must be what the hooks of a
    pass have put in the place of an output.
    """
    before = [(layer._forward_hooks, list(layer._forward_hooks)) for layer in layers]  # noqa: SLF001 - no public name
    for hooks, order in before:
        own = [key for key in order if str(getattr(hooks[key], "__module__", "")).startswith("transformers.")]
        _move_to_end(hooks, own)
    try:
        yield
    finally:
        for hooks, order in before:
            new = [key for key in hooks if key not in order]
            _move_to_end(hooks, [*order, *new])


def _move_to_end(hooks: dict[int, Any], keys: Sequence[int]) -> None:
    for key in keys:
        hooks[key] = hooks.pop(key)


def _blocks(numbers: Sequence[int]) -> str:
    return f"block{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
