"""Every recipe that a description allows on a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from vlcam.ambiguity.description import FIELDS, Description, shown_values
from vlcam.ambiguity.domain import Domain
from vlcam.ambiguity.presets import Preset, described
from vlcam.ambiguity.spelling import spelt
from vlcam.constraints import check, constraints
from vlcam.errors import RecipeError, UnknownNameError
from vlcam.plan import Job, plan
from vlcam.recipe import Recipe

if TYPE_CHECKING:
    from vlcam.explainer import Explainer

__all__ = ["fitting_jobs", "fitting_recipes", "why_none"]

_ORDER = (
    *("stream", "site", "target", "heads", "weighting", "relu", "queries", "map_axis", "gradient_tokens"),
    *("gradient_path", "layers", "departures", "discard", "attention", "prompt", "compose", "scale", "exclude"),
    *("reshape", "upsample", "normalize"),
)
"""Fields in the order in which `constraints` reads them, so that what contradicts itself is left early; the layer rule
comes with the layers."""


class _UnsettledError(Exception):
    """A constraint depends on a field that has not been chosen yet."""


class _Draft:
    """Some fields of a recipe, as constraints read them."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        """What a recipe works out of its fields; a field that is not there is not chosen yet."""
        found = vars(Recipe).get(name)
        if isinstance(found, property) and found.fget is not None:
            return found.fget(self)
        raise _UnsettledError(name)


def fitting_recipes(
    model: Explainer, description: str | Description | Preset, *, phrase: str | None = None, heatmaps: bool = False
) -> list[Recipe]:
    """Every recipe that a description allows and that the model can meet, each map once.

    What is tried for a field that the description leaves open: every value that the field knows and the model has,
    with these exceptions. Nobody means what changes the model or the formula without saying so: `attention="own"`,
    `departures=()`, `discard=0`, and for a weighting that takes a gradient `gradient_path="full"`. Nor what asks the
    model again: `scorecam`, `ablationcam` and `reciprocam` have to be stated. `stream`: not `text`, whose maps are over
    words. `target`: the model's scores. `prompt`: `whole`; with a phrase, the phrase alone or in its place. `queries`
    of cross-attention: with a phrase, its rows. `layers`: every single block that has the site; and all of them with
    every rule that merges several, where the rule is stated so, or open too. `exclude`: what has to be left out, and
    where `all` tokens count, each choice of what else may be. `upsample` and `normalize` do not change the token map:
    by default `bilinear` and `minmax`, or the first stated value.

    Recipes that make the same token map bit for bit on every model and image, because two words then mean one thing,
    count once; see `vlcam.ambiguity.spelling.spelt`.

    Args:
        model: the model.
        description: a description, or the name of one out of `vlcam.descriptions()`.
        phrase: words of the text that the map is of.
        heatmaps: whether `upsample` and `normalize` are varied too.

    Returns:
        The recipes, in the order of the fields' values; each is named by its values in the fields in which they differ.

    Raises:
        UnknownNameError: no description of that name.
    """
    domain = Domain(model.adapter, described(description), phrase, heatmaps=heatmaps)
    return [job.recipe for job in fitting_jobs(domain)]


def fitting_jobs(domain: Domain, **asked: Any) -> list[Job]:
    """The recipes of a domain, each planned on the model.

    Args:
        domain: what is tried.
        **asked: what `vlcam.plan.plan` takes besides: the callable, the classes, the region, the occurrence.
    """
    different: dict[tuple[Any, ...], dict[str, Any]] = {}
    for values, blocks in _chosen(domain, {}, 0):
        own = spelt(values, blocks, domain.adapter.prefix)
        laid = (values["upsample"], values["normalize"]) if domain.heatmaps else ()
        different.setdefault((*own.values(), *laid), values)
    varied = [field for field in FIELDS if len({values[field] for values in different.values()}) > 1]
    tried = (_planned(domain, values, varied, asked) for values in different.values())
    return [job for job in tried if job is not None]


def why_none(domain: Domain) -> str:
    """For a description that no recipe fits: which stated fields stand in the way, one at a time."""
    freed = []
    for field, values in domain.description.stated.items():
        wider = Domain(domain.adapter, domain.description.stating(**{field: None}), domain.phrase, domain.custom)
        if any(_planned(wider, chosen, (), {}) for chosen, _ in _chosen(wider, {}, 0)):  # the first is enough
            freed.append(f"{field}={shown_values(values)}")
    if not freed:
        return "and none would if one stated field were left open; state less"
    return f"and some would without {' or without '.join(freed)}"


def _planned(domain: Domain, values: Mapping[str, Any], varied: Sequence[str], asked: Mapping[str, Any]) -> Job | None:
    name = named_by(values, varied) or domain.description.name
    try:
        return plan(domain.adapter, Recipe(name=name, **values), {}, phrase=domain.phrase, **asked)
    except (RecipeError, UnknownNameError):
        return None


def named_by(values: Mapping[str, Any], fields: Sequence[str]) -> str:
    """What tells a recipe from others that differ in these fields: its values there."""
    told = {field: values[field] for field in fields if values[field] not in ("none", ()) or field == "relu"}
    return "-".join("+".join(map(str, v)) if isinstance(v, tuple) else str(v) for v in told.values())


def _chosen(
    domain: Domain, chosen: dict[str, Any], step: int, possible: Mapping[str, tuple[Any, ...]] | None = None
) -> Iterator[tuple[dict[str, Any], tuple[int, ...]]]:
    """Every way to choose the fields from a step on, and the blocks of each; `possible` where they narrow nothing."""
    if step == len(_ORDER):
        values = {field: value for field, value in chosen.items() if field != "blocks"}
        if _sound(values):
            yield values, chosen["blocks"]
        return
    left, settled = (possible, True) if possible is not None else _possible(chosen)
    if left is None:
        return
    for more in _next(domain, _ORDER[step], chosen):
        if all(field not in left or value in left[field] for field, value in more.items()):
            yield from _chosen(domain, chosen | more, step + 1, left if settled else None)


def _next(domain: Domain, field: str, chosen: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What is tried for one field; for layers, with the rule that merges them and the blocks that they are."""
    if field == "layers":
        for layers, rule, blocks in domain.layers(chosen):
            yield {"layers": layers, "layer_rule": rule, "blocks": blocks}
        return
    for value in domain.values(field, chosen):
        yield {field: value}


def _possible(chosen: Mapping[str, Any]) -> tuple[dict[str, tuple[Any, ...]] | None, bool]:
    """For fields that what was chosen narrows, what is left, and whether the rest cannot narrow them any more.

    None where what was chosen contradicts itself.
    """
    found: dict[str, tuple[Any, ...]] = {}
    try:
        for field, known, _ in constraints(cast("Recipe", _Draft(chosen))):
            if field not in chosen:
                found[field] = tuple(value for value in found.get(field, known) if value in known)
            elif chosen[field] not in known:
                return None, False
    except _UnsettledError:
        return found, False
    return found, True


def _sound(values: Mapping[str, Any]) -> bool:
    try:
        check(cast("Recipe", _Draft(values)))
    except RecipeError:
        return False
    return True
