"""From a description to the maps of all its recipes, in as few passes as possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from vlcam.ambiguity.description import Description, shown_values
from vlcam.ambiguity.domain import Domain
from vlcam.ambiguity.enumeration import fitting_jobs, why_none
from vlcam.ambiguity.presets import described
from vlcam.ambiguity.result import Ambiguity, Member
from vlcam.choices import GROUPS
from vlcam.errors import InputError, RecipeError
from vlcam.evidence import TokenMaps
from vlcam.making import Making
from vlcam.plan import Job

if TYPE_CHECKING:
    from vlcam.adapter import ModelAdapter
    from vlcam.explanation import Explanation
    from vlcam.questions import Asked

__all__ = ["jobs_of", "measured"]

_PLANNED: WeakKeyDictionary[ModelAdapter, dict[Any, list[Job]]] = WeakKeyDictionary()
"""What a description allows on a model, for the next image."""
_KEPT = 16


def measured(
    adapter: ModelAdapter,
    description: str | Description,
    asked: Asked,
    *,
    phrase: str | None,
    occurrence: int | None,
    one_text: bool,
    run: Callable[..., list[Any]],
    again: Callable[[list[Any]], list[Explanation]],
) -> Ambiguity:
    """Make every map that a description allows.

    Args:
        adapter: the model.
        description: what is stated.
        asked: the target of the call.
        phrase: words of the text that the map is of.
        occurrence: which of several.
        one_text: whether there is no text to compare with.
        run: prepares image and text, and gives planned recipes to its argument `work`.
        again: explains recipes in full.

    Raises:
        RecipeError: no recipe fits, or the description and the target contradict each other.
        InputError: several images or texts.
    """
    chosen = narrowed(described(description), asked)
    jobs = jobs_of(Domain(adapter, chosen, phrase, asked.custom is not None), asked, occurrence)
    alone = [job for job in jobs if not job.target.compares] if one_text else jobs
    if not alone:
        raise RecipeError(
            f"every recipe that {chosen.name!r} allows compares the text with others, and there is one; give others "
            "with against=[...]"
        )
    records: list[dict[str, Any]] = []
    seen: list[Making] = []

    def work(making: Making, planned: Sequence[Job]) -> list[list[TokenMaps]]:
        if making.pairs.many:
            raise InputError("an ambiguity is that of one image with one text or class; ask for one after the other")
        found, own = making.token_maps(planned)
        records.extend(own)
        seen.append(making)
        return found

    maps: list[TokenMaps] = run(alone, work=work)
    pairs = seen[0].pairs
    grids = [adapter.grid(job.recipe.stream, job.layers[0], pairs.inputs.images) for job in alone]
    members = [
        Member(number, job.recipe, made.values[0].reshape(grid).float().cpu().numpy(), made.statuses[0], again)
        for number, (job, made, grid) in enumerate(zip(alone, maps, grids, strict=True))
    ]
    return Ambiguity(
        description=chosen,
        members=tuple(members),
        comparing=len(jobs) - len(alone),
        variants=_variants(chosen),
        record=records[0] | {"phrase": phrase},
        image=pairs.images[0][0],
        placement=pairs.inputs.images.placements[0],
    )


def jobs_of(domain: Domain, asked: Asked, occurrence: int | None = None) -> list[Job]:
    """The planned recipes of a description, for one call; found once for a model and a description.

    Raises:
        RecipeError: there are none.
    """
    if asked.custom is not None:
        found = fitting_jobs(domain, custom=asked.custom)
    else:
        known = _PLANNED.setdefault(domain.adapter, {})
        key = (domain.description, domain.phrase is not None)
        if key not in known:
            while len(known) >= _KEPT:
                known.pop(next(iter(known)))
            known[key] = fitting_jobs(domain)
        found = known[key]
    if not found:
        given = domain.description
        raise RecipeError(
            f"no recipe of {type(domain.adapter.module).__name__} fits {given.name!r} ({given.in_short}), "
            f"{why_none(domain)}"
        )
    if asked.custom is not None and asked.region is None:
        return found
    targets = {job.target: replace(job.target.of_classes(asked.classes), region=asked.region) for job in found}
    return [replace(job, target=targets[job.target], phrase=domain.phrase, occurrence=occurrence) for job in found]


def narrowed(description: Description, asked: Asked) -> Description:
    """The description with what the call names as its target; recipes that depend on no score stay.

    Raises:
        RecipeError: the description states another target, or another scale.
    """
    for field, value in asked.changes.items():
        stated = description.stated.get(field)
        if stated is not None and not {value, "none"} & set(stated):
            raise RecipeError(
                f"target=... means {field}={value!r}, and {description.name!r} states {field} {shown_values(stated)}"
            )
        possible: dict[str, Any] = {field: [each for each in (value, "none") if stated is None or each in stated]}
        description = description.stating(**possible)
    return description


def _variants(description: Description) -> int:
    """How many heatmaps of one token map the description allows."""
    open_ = {"upsample": 3, "normalize": 4} if description.stated.get("stream") != ("text",) else {"normalize": 4}
    count = 1
    for field in GROUPS["spatial reconstruction"]:
        count *= len(description.stated.get(field, ())) or open_.get(field, 1)
    return count
