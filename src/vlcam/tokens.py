"""What the image tokens are, in order: those before the patches, by name, then the patches in raster order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vlcam.errors import RecipeError, listing

__all__ = ["ImageTokens", "Windows"]


@dataclass(frozen=True)
class ImageTokens:
    """The layout of a stream's image tokens.

    Attributes:
        prefix: names of the tokens before the patches: `cls`, `distillation`, `register`.
        grid: rows and columns of the patches.
    """

    prefix: tuple[str, ...]
    grid: tuple[int, int]

    @property
    def count(self) -> int:
        """How many tokens there are."""
        return len(self.prefix) + self.grid[0] * self.grid[1]

    @property
    def patches(self) -> range:
        """The indices of the patches."""
        return range(len(self.prefix), self.count)

    def chosen(self, name: str, exclude: Sequence[str] = ()) -> Sequence[int]:
        """Indices of the tokens that a recipe calls `cls`, `registers`, `patches` or `all`.

        Args:
            name: what is asked for.
            exclude: the recipe's exclusions; `registers` and `distillation` shorten `all`.

        Raises:
            RecipeError: there is no such token.
        """
        if name == "patches":
            return self.patches
        if name == "all":
            hidden = [each for each in ("distillation", "registers") if each in exclude]
            if not hidden:
                return range(self.count)
            return [i for i in range(self.count) if i in self.patches or _plural(self.prefix[i]) not in hidden]
        found = tuple(index for index, each in enumerate(self.prefix) if _plural(each) == name)
        if not found:
            raise RecipeError(
                f"{name!r}: there is no such image token; before the patches there is {listing(self.prefix)}. Choose "
                "'patches' or 'all'"
            )
        return found


@dataclass(frozen=True)
class Windows:
    """How a block cuts its grid into windows of tokens that attend to each other.

    The grid is shifted cyclically, up and to the left, and padded below and at the right to whole windows. Windows lie
    in raster order, and so do the tokens in each.

    Attributes:
        grid: rows and columns of the tokens.
        window: rows and columns of a window.
        shift: by how many rows and columns the grid is shifted.
        pads_first: whether padding comes before the shift.
    """

    grid: tuple[int, int]
    window: tuple[int, int]
    shift: tuple[int, int]
    pads_first: bool = False

    @property
    def across(self) -> tuple[int, int]:
        """Rows and columns of windows."""
        return -(-self.grid[0] // self.window[0]), -(-self.grid[1] // self.window[1])

    @property
    def held(self) -> Tensor:
        """Which places in the windows hold a token and no padding, [windows, tokens]."""
        (down, across), (high, wide) = self.across, self.window
        places = torch.arange(down * across * high * wide, device="cpu").view(down * across, high * wide)
        held = torch.zeros(places.shape, dtype=torch.bool, device="cpu")
        held.view(-1)[self.raster(places)] = True
        return held

    def raster(self, values: Tensor) -> Tensor:
        """Tokens in raster order, [B, rows * columns, ...], from windows [B * windows, tokens, ...]; no padding."""
        (down, across), (high, wide), (rows, columns) = self.across, self.window, self.grid
        rest = values.shape[2:]
        whole = values.reshape(-1, down, across, high, wide, *rest).transpose(2, 3)
        whole = whole.reshape(-1, down * high, across * wide, *rest)
        if self.pads_first:
            return whole.roll(self.shift, (1, 2))[:, :rows, :columns].flatten(1, 2)
        return whole[:, :rows, :columns].roll(self.shift, (1, 2)).flatten(1, 2)


def _plural(name: str) -> str:
    return "registers" if name == "register" else name
