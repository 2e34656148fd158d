"""Which recipes a model can be asked for: the named ones that fit it, and the grid of all choices."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from vlcam.anatomy import Anatomy, block_numbers
from vlcam.catalogue import default, named, recipes
from vlcam.choices import ASKING, ATTENTION_SITES, CHANNEL_WEIGHTINGS, OF_VALUES, POOLED, takes_gradient, takes_target
from vlcam.errors import RecipeError, UnknownNameError, listing
from vlcam.plan import plan
from vlcam.recipe import Recipe, values_of

if TYPE_CHECKING:
    from vlcam.adapter import ModelAdapter
    from vlcam.explainer import Explainer

__all__ = ["all_recipes", "fitting"]

_SITES = ("F1", "F2", "F3", "F3_HEADS", "F4", "F5", "F6", "CROSS", "CONTEXT")
_RELU = {
    "attention": "none",
    "head_weights": "after_heads",
    "attention*gradient": "before_heads",
    "elementwise": "none",
}


def fitting(adapter: ModelAdapter) -> list[str]:
    """The named recipes that the model can meet from one pass or few, in catalogue order: none that asks it again."""
    found = []
    for name, entry in recipes().items():
        try:
            plan(adapter, name, {})
        except (RecipeError, UnknownNameError):
            continue
        if not entry.recipe.asks and entry.recipe.gradient_path != "integrated":
            found.append(name)
    return found


def all_recipes(model: Explainer, *, stream: str = "vision", layers: Any = "all", **fields: Any) -> list[Recipe]:
    """The grid of recipes that are valid for a model: every site by every weighting by every block.

    The other choices are the usual ones of each weighting, unless `fields` names values for them. Left out are
    combinations that contradict themselves, or that a block has no site for, and weightings that ask the model again,
    unless `fields` names them. Those whose gradient is zero in this model are not left out: `model.sweep(...,
    empty="keep")` says which they are.

    Args:
        model: what the recipes are for.
        stream: the stack of blocks.
        layers: block indices, `last` or `all`; every recipe reads one of them.
        **fields: for any field of a recipe a value, a list of values, or `"every"`; for example
            `relu=["none", "map"]`, `heads="every"`, `site=["F1", "F4"]`.

    Returns:
        Recipes named by site, weighting and block, and by what `fields` varies.

    Raises:
        RecipeError: a field that a recipe does not have, or a value that no valid recipe of this model takes.
    """
    anatomy = model.anatomy
    choices = {field: _values(field, given) for field, given in fields.items()}
    choices.setdefault("site", _SITES)
    choices.setdefault("weighting", [each for each in values_of("weighting") if each not in ASKING])
    blocks = anatomy.stream(stream).indices(block_numbers(layers))
    found = dict.fromkeys(
        recipe
        for layer in blocks
        for combination in itertools.product(*choices.values())
        for recipe in _made(model, anatomy, stream, layer, dict(zip(choices, combination, strict=True)))
    )
    for field, given in choices.items():
        unused = [value for value in given if all(getattr(recipe, field) != value for recipe in found)]
        if field in fields and fields[field] != "every" and unused:
            raise RecipeError(f"{field}={listing(unused)}: no valid recipe of stream {stream!r} of this model has it")
    return list(found)


def _values(field: str, given: Any) -> Sequence[Any]:
    known = values_of(field)
    if isinstance(given, str) and given == "every":
        return known
    alone = isinstance(given, (str, float, int)) or field in ("departures", "exclude")
    return [given] if alone else list(given)


def _made(model: Explainer, anatomy: Anatomy, stream: str, layer: int, chosen: dict[str, Any]) -> Iterator[Recipe]:
    if chosen["site"] not in anatomy.stream(stream).blocks[layer].sites:
        return
    if chosen["weighting"] in OF_VALUES and stream == "vision" and model.adapter.reads != "cls":
        return
    usual = _usual(model.adapter, stream, chosen["site"], chosen["weighting"], chosen.get("heads"))
    varied = [str(value) for field, value in chosen.items() if field not in ("site", "weighting")]
    name = "-".join([chosen["site"], chosen["weighting"], *varied, str(layer)])
    if anatomy.stream(stream).slots and chosen["site"] == "CROSS":
        usual["compose"] = "pooler"
    try:
        made = named("pgc-gradcam").recipe.replace(**usual | chosen | {"name": name, "stream": stream, "layers": layer})
        plan(model.adapter, made, {})
    except RecipeError:
        return
    yield made


def _usual(adapter: ModelAdapter, stream: str, site: str, weighting: str, heads: str | None) -> dict[str, Any]:
    """The other choices that are usual with a site and a weighting."""
    target = named(default(adapter.heads, adapter.anatomy.streams)).fitted(1, adapter)[0]
    score = {"target": target.target, "scale": target.scale, "gradient_path": "full"}
    if not takes_gradient(weighting):
        score["gradient_path"] = "none"
    if not takes_target(weighting):
        score = dict.fromkeys(score, "none")
    pooled = weighting in (*POOLED, "head_weights")
    usual: dict[str, Any] = {
        "relu": _RELU.get(weighting, "gradient" if weighting not in CHANNEL_WEIGHTINGS else "map"),
        **score,
    }
    usual["gradient_tokens"] = "patches" if pooled else "none"
    if weighting in OF_VALUES:
        usual["gradient_tokens"] = "cls"
    if stream == "text":
        usual |= {"exclude": ("special_text", "padding"), "normalize": "sum"}
        of_heads = weighting == "head_weights"
        usual["gradient_tokens"] = "none" if not pooled else "all" if of_heads else "pooled"
    if site not in ATTENTION_SITES:
        return usual | {"queries": "none", "map_axis": "none", "heads": "none"}
    rows = {"text": "pooled", "fusion": "all", "pooler": "all"}.get(stream, adapter.reads)
    if stream == "fusion":
        usual["exclude"] = ("cls", "special_text", "padding")
    exclude = usual.get("exclude", ("cls",))
    return usual | {"queries": rows, "map_axis": "keys", "heads": heads or "mean", "exclude": exclude}
