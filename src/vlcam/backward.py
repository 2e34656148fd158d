"""From the targets of a pass back to its taps: one gradient per pair, whatever images and texts the pairs share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vlcam.adapter import Inputs, ModelAdapter
from vlcam.anatomy import KEYS, QUERIES, SCORES, VALUES, Tap
from vlcam.errors import EvidenceError
from vlcam.taps import Taps
from vlcam.targets import Target
from vlcam.tokens import Windows

__all__ = ["Run", "Side", "by_image", "check_finite", "spread"]

_BY_HEAD = ("F2", "CROSS", SCORES, QUERIES, KEYS, VALUES)


@dataclass(frozen=True, eq=False)
class Side:
    """What ran before image and text meet: the trunk with a row per image, or a text tower with a row per text.

    Attributes:
        end: what it gave, with the graph that leads to the taps.
        leaf: the same with a row per pair, where the graph of what comes behind begins; None where nothing is tapped.
        tapped: the tensors at its taps.
        row_of: for each pair, its row of `end`.
    """

    end: Tensor
    leaf: Tensor | None
    tapped: Mapping[Tap, Tensor]
    row_of: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Run:
    """A run of the model that can be differentiated.

    Attributes:
        adapter: the model.
        inputs: the pairs.
        sides: the trunk, then the text tower if there is one.
        late: the tensors tapped behind them, with a row per pair.
        windows: how tapped blocks cut their grid into windows.
        read_again: what was tapped while each block's output was read, filled by `gradients`.
        of_blocks: what a target that is read at each block was there, [P] by block.
    """

    adapter: ModelAdapter
    inputs: Inputs
    sides: Sequence[Side]
    late: Mapping[Tap, Tensor]
    windows: Mapping[Tap, Windows]
    read_again: dict[Tap, Tensor] = field(default_factory=dict)
    of_blocks: dict[int, Tensor] = field(default_factory=dict)

    def gradients(self, target: Target, y: Tensor, *, last: bool) -> dict[Tap, Tensor | None]:
        """dy/d(tensor) at every tap, one row per pair; the graph is kept unless this is the last target.

        Raises:
            EvidenceError: a target that is read at a block is not finite.
        """
        if not target.differentiate:
            return {}
        if target.path == "block":
            return self._of_blocks(target)
        open_sides = [side for side in self.sides if side.leaf is not None]
        leaves = [side.leaf for side in open_sides if side.leaf is not None]
        found = _gradients(y, [*self.late.values(), *leaves], keep=not last)
        made = dict(zip(self.late, found[: len(self.late)], strict=True))
        for side, upstream in zip(open_sides, found[len(self.late) :], strict=True):
            made |= self._through(side.end, side.tapped, side.row_of, upstream, last=last)
        return made

    def _of_blocks(self, target: Target) -> dict[Tap, Tensor | None]:
        """Each block's own output is read by the head, and differentiated by what is tapped in that block."""
        made: dict[Tap, Tensor | None] = {}
        trunk = self.sides[0]
        for output, tokens in trunk.tapped.items():
            inside = {t: x for t, x in trunk.tapped.items() if t.site != "F6" and t.layer == output.layer}
            if output.site != "F6" or not (inside or target.pooler):
                continue
            pooler = Tap("pooler", output.layer, "CROSS")
            readings = {pooler: self.adapter.anatomy.stream("pooler").reading(0, "CROSS")} if target.pooler else {}
            with torch.enable_grad(), Taps(readings, differentiate=True) as seen:
                block = by_image(output, tokens.detach() if target.pooler else tokens, self.windows)
                scores = self.adapter.read_block(target.head, block, self.inputs, bare=target.bare)
                read = spread(scores.detach(), trunk.row_of).contiguous().requires_grad_()
                y = target.read(read)
            check_finite(y, target)
            self.of_blocks[output.layer] = y.detach()
            (upstream,) = _gradients(y, [read])
            inside = seen.tensors if target.pooler else inside
            made |= self._through(scores, inside, trunk.row_of, upstream, last=False)
            self.read_again.update(seen.tensors)
        return made

    def _by_image(self, tap: Tap, gradient: Tensor | None) -> Tensor | None:
        return None if gradient is None else by_image(tap, gradient, self.windows)

    def _through(
        self,
        end: Tensor,
        tapped: Mapping[Tap, Tensor],
        row_of: Sequence[int],
        upstream: Tensor | None,
        *,
        last: bool,
    ) -> dict[Tap, Tensor | None]:
        """Carry each pair's gradient from shared rows to the taps before; pairs of one row take turns."""
        if upstream is None or not end.requires_grad:
            return dict.fromkeys(tapped)
        rounds = _rounds(row_of)
        if len(rounds) == 1 and list(row_of) == list(range(len(end))):  # a row per pair already
            found = torch.autograd.grad(end, list(tapped.values()), upstream, retain_graph=not last, allow_unused=True)
            return {tap: self._by_image(tap, gradient) for tap, gradient in zip(tapped, found, strict=True)}
        rows: dict[Tap, dict[int, Tensor]] = {tap: {} for tap in tapped}
        for number, pairs in enumerate(rounds):
            weights = torch.zeros_like(end)
            for pair in pairs:
                weights[row_of[pair]] = upstream[pair]
            keep = not last or number < len(rounds) - 1
            found = torch.autograd.grad(end, list(tapped.values()), weights, retain_graph=keep, allow_unused=True)
            for tap, raw in zip(tapped, found, strict=True):
                gradient = self._by_image(tap, raw)
                if gradient is not None:
                    rows[tap] |= {pair: gradient[row_of[pair]] for pair in pairs}
        return {
            tap: torch.stack([row[pair] for pair in range(len(row_of))]) if row else None for tap, row in rows.items()
        }


def by_image(tap: Tap, tensor: Tensor, windows: Mapping[Tap, Windows]) -> Tensor:
    """A tensor of a trunk with the image as its first axis, and token features as [I, N, C] in raster order."""
    cut = windows.get(tap)
    if cut is not None and tap.site in ("F2", SCORES):
        return tensor.view(-1, cut.across[0] * cut.across[1], *tensor.shape[1:])
    if cut is not None and tap.site in ("F3", "F3_HEADS") and tensor.ndim == 3:
        return cut.raster(tensor)
    return tensor.flatten(1, 2) if tensor.ndim == 4 and tap.site not in _BY_HEAD else tensor


def spread(tensor: Tensor, row_of: Sequence[int]) -> Tensor:
    """One row per pair from one row per image or text; a single row is expanded, not copied."""
    if len(tensor) == 1:
        return tensor.expand(len(row_of), *tensor.shape[1:])
    if list(row_of) == list(range(len(tensor))):
        return tensor
    return tensor[list(row_of)]


def check_finite(y: Tensor, target: Target) -> None:
    """Make sure that a target is a number.

    Raises:
        EvidenceError: it is not, for some pair.
    """
    if not bool(torch.isfinite(y).all()):
        raise EvidenceError(
            f"{target.label} is not finite: {y.detach().float().tolist()}; the model's output is broken"
        )


def _gradients(y: Tensor, tensors: Sequence[Tensor], *, keep: bool = False) -> Sequence[Tensor | None]:
    if not tensors or not y.requires_grad:
        return [None] * len(tensors)
    # Pairs do not influence each other, so the gradient of their sum holds each pair's own.
    return torch.autograd.grad(y, tensors, torch.ones_like(y), retain_graph=keep, allow_unused=True)


def _rounds(row_of: Sequence[int]) -> list[list[int]]:
    """Pairs in groups in which no row occurs twice."""
    rounds: list[list[int]] = []
    seen: dict[int, int] = {}
    for pair, row in enumerate(row_of):
        turn = seen.get(row, 0)
        seen[row] = turn + 1
        if turn == len(rounds):
            rounds.append([])
        rounds[turn].append(pair)
    return rounds
