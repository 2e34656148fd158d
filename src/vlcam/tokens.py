"""What the image tokens are, in order: those before the patches, by name, then the patches in raster order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vlcam.errors import RecipeError, listing

__all__ = ["ImageTokens"]


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
            left = [i for i in range(self.count) if i in self.patches or _plural(self.prefix[i]) not in hidden]
            return left if hidden else range(self.count)
        found = tuple(index for index, each in enumerate(self.prefix) if _plural(each) == name)
        if not found:
            raise RecipeError(
                f"{name!r}: there is no such image token; before the patches there is {listing(self.prefix)}. Choose "
                "'patches' or 'all'"
            )
        return found


def _plural(name: str) -> str:
    return "registers" if name == "register" else name
