"""What an adapter says of a model: its streams, their blocks, and where each site of a block is read."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from torch import nn

from vlcam.choices import Layers
from vlcam.errors import RecipeError, UnknownNameError, listing

__all__ = [
    "HANDED",
    "INPUT",
    "KEYS",
    "QUERIES",
    "SCORES",
    "VALUES",
    "Anatomy",
    "Block",
    "Inside",
    "Reading",
    "StreamAnatomy",
    "Tap",
    "block_numbers",
]

Inside = Literal["attention", "scores", "queries", "keys", "values", "heads"]
How = Inside | Literal["output", "input", "keyword"]

SCORES = "F2_SCORES"
QUERIES = "F2_QUERIES"
KEYS = "F2_KEYS"
VALUES = "F2_VALUES"
INPUT = "F6_INPUT"
HANDED = "F3_VALUES"
"""No sites of a recipe, but tapped where one needs them besides F2: the scores before the softmax, the queries, keys
and values [B, H, N, d] of its heads, and the block's input; and made of the values where both are tapped, what each
token hands on: its values projected, without bias, [B, N, D]."""


_BESIDES: dict[str, tuple[str, How]] = {
    SCORES: ("F2", "scores"),
    QUERIES: ("F2", "queries"),
    KEYS: ("F2", "keys"),
    VALUES: ("F2", "values"),
    INPUT: ("F6", "input"),
}


@dataclass(frozen=True, eq=False)
class Reading:
    """How a tensor is reached.

    At a module's `output` (its first tensor), its first positional `input`, a `keyword` argument (or several, by
    commas, that are one tensor); or inside an attention module: its `attention` probabilities, the `scores` that their
    softmax takes, the `queries` and `keys` that these come from and the `values` that they weight (which the engine
    reads wherever there is F2), or the `heads` that `nn.MultiheadAttention` concatenates before it projects them.
    """

    module: nn.Module
    how: How
    keyword: str = ""


@dataclass(frozen=True)
class Tap:
    """One site of one block of one stream."""

    stream: str
    layer: int
    site: str

    def __str__(self) -> str:
        """For messages: `CROSS of fusion block 7`."""
        return f"{self.site} of {self.stream} block {self.layer}"


@dataclass(frozen=True, eq=False)
class Block:
    """A block's sites, and for sites that it lacks the reason."""

    sites: Mapping[str, Reading]
    lacks: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, eq=False)
class StreamAnatomy:
    """A stack of blocks.

    Attributes:
        name: `vision`, `text` (the text tower of a model that has one), `pooler` (one block that pools image tokens by
            attention) or `fusion` (where text attends to the image).
        blocks: in order.
        width: size of the residual stream.
        heads: attention heads per block.
        tokens: what the tokens are, in order, in words.
        trunk: whether the stream runs before image and text meet, so that one pass serves every text of an image, or
            every image of a text.
        windowed: whether tokens attend to those of their window only.
        stages: how many blocks each stage has, where stages have grids of their own; empty where all blocks have one.
        queries: how many learned queries look at the tokens, in a stream `pooler`.
        tells_next: whether each token's row tells the token behind it, so that a word is told by the rows before it.
        run_by: the scores whose pass runs the stream; empty where every one does.
        slots: what the keys of CROSS are, in words, where they are not the image tokens; empty where they are.
    """

    name: str
    blocks: tuple[Block, ...]
    width: int
    heads: int
    tokens: str
    trunk: bool
    windowed: bool = False
    stages: tuple[int, ...] = ()
    queries: int = 0
    tells_next: bool = False
    run_by: tuple[str, ...] = ()
    slots: str = ""

    def stage_of(self, layer: int) -> int:
        """The stage of a block; all are of one where there are no stages."""
        ends = list(itertools.accumulate(self.stages))
        return next((stage for stage, end in enumerate(ends) if layer < end), 0)

    def reading(self, layer: int, site: str) -> Reading:
        """How a site of a block is read.

        Raises:
            UnknownNameError: the block lacks the site; says why and which sites it has.
        """
        block = self.blocks[layer]
        if site in block.sites:
            return block.sites[site]
        if site in _BESIDES and _BESIDES[site][0] in block.sites:
            return replace(block.sites[_BESIDES[site][0]], how=_BESIDES[site][1])
        why = block.lacks.get(site, "the model does not have it")
        others = self.having(site)
        there = f", and {site} is in block {', '.join(map(str, others))}" if others else ""
        raise UnknownNameError(
            f"{site} of {self.name} block {layer} does not exist: {why}; this block has {listing(block.sites)}{there}"
        )

    def can_read(self, layer: int, site: str) -> bool:
        """Whether there is such a block, and what it has can be read by `reading`."""
        name = _BESIDES[site][0] if site in _BESIDES else site
        return 0 <= layer < len(self.blocks) and name in self.blocks[layer].sites

    def having(self, site: str) -> tuple[int, ...]:
        """The blocks that have a site."""
        return tuple(number for number, block in enumerate(self.blocks) if site in block.sites)

    def projection(self, layer: int) -> nn.Module:
        """The module whose `weight` and `bias` project what the heads of a block make."""
        reading = self.reading(layer, "F3_HEADS")
        found: Any = reading.module
        return found if reading.how == "input" else found.out_proj  # type: ignore[no-any-return]

    def indices(self, layers: Layers, site: str = "") -> tuple[int, ...]:
        """Block numbers that a recipe's `layers` stand for, first to last, in whatever order they were given.

        `last` and `all` are of the blocks that have the site, where any has.

        Raises:
            UnknownNameError: an index outside the stream, says which exist; or two that mean one block.
        """
        depth = len(self.blocks)
        if isinstance(layers, str):
            known = self.having(site) or tuple(range(depth))
            return known if layers == "all" else known[-1:]
        wrong = [index for index in layers if not isinstance(index, int) or not -depth <= index < depth]
        if wrong:
            raise UnknownNameError(f"{self.name} has no block {listing(wrong)}; it has blocks 0 to {depth - 1}")
        found = tuple(index % depth for index in layers)
        if len(set(found)) < len(found):
            raise UnknownNameError(f"blocks {tuple(layers)} of {self.name} are {found}: one is named twice")
        return tuple(sorted(found))


@dataclass(frozen=True, eq=False, repr=False)
class Anatomy:
    """The streams of a model, for streams that it lacks the reason, and its scores; prints as a table."""

    model: str
    streams: Mapping[str, StreamAnatomy]
    targets: tuple[str, ...]
    notes: tuple[str, ...] = ()
    lacks: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def stream(self, name: str) -> StreamAnatomy:
        """The stream of that name.

        Raises:
            UnknownNameError: there is none; lists those that exist.
        """
        if name not in self.streams:
            why = f" ({self.lacks[name]})" if name in self.lacks else ""
            raise UnknownNameError(f"{self.model} has no stream {name!r}{why}; it has {listing(self.streams)}")
        return self.streams[name]

    def rows(self) -> list[tuple[str, str, str, str]]:
        """(stream, blocks, sites, tokens) for every run of blocks that have the same sites."""
        table = []
        for stream in self.streams.values():
            for first, last, sites in _runs(tuple(block.sites) for block in stream.blocks):
                blocks = str(first) if first == last else f"{first}-{last}"
                table.append((stream.name, blocks, " ".join(sites), stream.tokens))
        return table

    def to_dict(self) -> dict[str, object]:
        """The anatomy as JSON values."""
        return {
            "model": self.model,
            "streams": {
                name: {
                    "width": stream.width,
                    "heads": stream.heads,
                    "tokens": stream.tokens,
                    "blocks": [{"sites": list(b.sites), "lacks": dict(b.lacks)} for b in stream.blocks],
                }
                for name, stream in self.streams.items()
            },
            "targets": list(self.targets),
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        """A table: stream, blocks, sites, tokens; then the targets and the notes."""
        rows = [("stream", "blocks", "sites", "tokens"), *self.rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [self.model]
        for row in rows:
            cells = [cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)]
            lines.append("  ".join([*cells, row[3]]).rstrip())
        lines.append(f"targets: {', '.join(self.targets)}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    __repr__ = __str__


def block_numbers(layers: Any) -> Layers:
    """What users give as layers, as a recipe holds it: a number, numbers of any integer type, `last`, `all`.

    Raises:
        RecipeError: anything else, or none.
    """
    if isinstance(layers, str) and layers in ("last", "all"):
        return "last" if layers == "last" else "all"
    found: tuple[int, ...] = ()
    if isinstance(layers, bool):
        raise RecipeError(f"layer={layers!r}: give a whole number, several, 'last' or 'all'")
    with suppress(TypeError):
        found = (operator.index(layers),)
    with suppress(TypeError):
        found = found or tuple(operator.index(item) for item in layers)
    if not found:
        raise RecipeError(f"layer={layers!r}: give a whole number, several, 'last' or 'all'")
    return found


def _runs(blocks: Iterable[tuple[str, ...]]) -> list[tuple[int, int, tuple[str, ...]]]:
    runs: list[tuple[int, int, tuple[str, ...]]] = []
    for index, sites in enumerate(blocks):
        if runs and runs[-1][2] == sites:
            runs[-1] = (runs[-1][0], index, sites)
        else:
            runs.append((index, index, sites))
    return runs
