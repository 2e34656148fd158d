"""A published recipe: its source, and how it is fitted to a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, cast

from vlcam.choices import OF_VALUES
from vlcam.errors import RecipeError, listing
from vlcam.readers import READERS
from vlcam.recipe import Recipe

if TYPE_CHECKING:
    from vlcam.adapter import ModelAdapter
    from vlcam.choices import Scale
    from vlcam.citations import Citation
    from vlcam.readers import HeadKind

__all__ = ["Check", "Entry"]


class Check(NamedTuple):
    """What backs a recipe.

    Attributes:
        what: what its map was compared with.
        test: the test that does, as `tests/FILE.py::FUNCTION` of the source tree.
    """

    what: str
    test: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A named recipe and where it comes from.

    Attributes:
        recipe: the choices, as the source makes them.
        citation: the paper, with authors, title, venue and year.
        code: the implementation that the formula was checked against, or that there is none.
        depth: number of blocks of the stream in the published model; 0 where `layers` is not an index.
        departs: in what the recipe departs from that paper; empty where it does not, or where the paper has no formula.
        checks: what backs it, and the tests that say so.
        notes: what else a reader should know before using it.
        reads: `patches`, if it needs a model whose heads read these; see `ModelAdapter.reads`.
        needs: the score that no other stands in for.
    """

    recipe: Recipe
    citation: Citation
    code: str
    depth: int
    notes: str
    departs: str = ""
    checks: tuple[Check, ...] = ()
    reads: str = ""
    needs: str = ""

    def at_depth(self, depth: int) -> tuple[Recipe, str]:
        """Return the recipe for a stream of `depth` blocks, and a sentence that says how its layers were found.

        A published index b of n blocks stands for the same relative depth: floor(b (depth - 1) / (n - 1)). Of indices
        that count from the end those are kept that the stream has.
        """
        if not isinstance(self.recipe.layers, tuple) or depth == self.depth:
            return self.recipe, "as published"
        if not self.depth:
            kept = tuple(b for b in self.recipe.layers if b >= -depth) or (0,)
            if kept == self.recipe.layers:
                return self.recipe, "as published"
            rule = f"published on blocks {list(self.recipe.layers)}, of which this model of {depth} has those kept"
            return self.recipe.replace(layers=kept), rule
        layers = tuple(dict.fromkeys(b * (depth - 1) // (self.depth - 1) for b in self.recipe.layers))
        rule = f"published on block {list(self.recipe.layers)} of {self.depth}; same relative depth of {depth} blocks"
        return self.recipe.replace(layers=layers), rule

    def fitted(self, depth: int, adapter: ModelAdapter) -> tuple[Recipe, dict[str, str]]:
        """Return the recipe for a model, and for every choice that depends on it a sentence: how it was found.

        Layers as in `at_depth`. A score that the model does not offer is replaced by its first one, on the scale of the
        same name if that has it. The class token is replaced by the patches in a model whose heads read those.

        Args:
            depth: number of blocks of the stream.
            adapter: the model.

        Raises:
            RecipeError: the recipe is for models whose heads read other tokens.
        """
        if self.reads and adapter.reads != self.reads:
            raise RecipeError(
                f"recipe {self.recipe.name!r} is for models whose heads read the {self.reads}; this one's read the "
                "class token, and patches have no gradient at that site; 'pgc-gradcam' reads one where they have"
            )
        recipe, layers = self.at_depth(depth)
        if self.needs and self.needs not in adapter.heads:
            raise RecipeError(
                f"recipe {recipe.name!r} is for the score {self.needs!r}, which this model does not offer; it offers "
                f"{listing(adapter.heads)}"
            )
        heads, rules = adapter.heads, {"layers": layers, "target": "as published", "tokens": "as published"}
        if recipe.target not in (*heads, "none"):
            head = next(iter(heads))
            scale = _scale(recipe, heads[head])
            rules["target"] = f"published for {recipe.target} ({recipe.scale}); this model offers {listing(heads)}"
            recipe = recipe.replace(target=head, scale=scale)
        elif recipe.target in heads and _scale(recipe, heads[recipe.target]) != recipe.scale:
            scale = _scale(recipe, heads[recipe.target])
            rules["target"] = f"published for {recipe.target} ({recipe.scale}); this model gives it as {scale}"
            recipe = recipe.replace(scale=scale)
        by_class_token = [f for f in ("queries", "gradient_tokens") if getattr(recipe, f) == "cls"]
        if by_class_token and recipe.stream == "vision" and adapter.reads == "patches":
            rules["tokens"] = f"published for the class token; this model's heads read the patches: {by_class_token[0]}"
            if recipe.weighting in OF_VALUES:
                raise RecipeError(
                    f"recipe {recipe.name!r} takes the gradient at the class token, and this model's heads read the "
                    "patches instead"
                )
            recipe = recipe.replace(**dict.fromkeys(by_class_token, "patches"))
        return recipe, rules


def _scale(recipe: Recipe, kind: HeadKind) -> Scale:
    """The recipe's scale, or for a plain one that the score does not have its first."""
    scales = tuple(READERS[kind])
    plain = recipe.scale in ("logit", "cosine") and recipe.scale not in scales
    return cast("Scale", scales[0]) if plain else recipe.scale
