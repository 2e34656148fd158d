"""From a description to the maps of all its recipes, in as few passes as possible."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from vlcam.ambiguity.description import Description, shown_values
from vlcam.ambiguity.domain import Domain
from vlcam.ambiguity.enumeration import fitting_jobs, why_none
from vlcam.ambiguity.presets import Preset, described
from vlcam.ambiguity.result import Ambiguity, Member
from vlcam.choices import GROUPS
from vlcam.errors import EvidenceError, InputError, RecipeError
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
_PLANNED_LOCK = threading.Lock()
_KEPT = 16
_OF_A_PASS = {"attention": None, "tapped": None}
"""What a record says of a model that depends on what else its pass reads."""


def measured(
    adapter: ModelAdapter,
    description: str | Description | Preset,
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
        RecipeError: no recipe fits, or the description and the target contradict each other; or maps of members have no
            cells in common.
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
    if len({job.recipe.of_text for job in alone}) > 1:
        raise RecipeError(
            f"{chosen.name!r} allows maps over the image and maps over words, which have no cells in common; state "
            "stream='text', or other streams alone"
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
    custom = None if asked.custom is None else asked.custom.label
    pairs, record = seen[0].pairs, records[0] | {"phrase": phrase, "occurrence": occurrence, "custom": custom}
    if alone[0].recipe.of_text and len({made.grid for made in maps}) > 1:
        raise RecipeError(f"{chosen.name!r} allows maps over the words of different texts; state prompt='...'")
    explained = partial(_unchanged, record, again)
    members = [
        Member(number, job.recipe, made.values[0].reshape(made.grid).float().cpu().numpy(), made.statuses[0], explained)
        for number, (job, made) in enumerate(zip(alone, maps, strict=True))
    ]
    return Ambiguity(
        description=chosen,
        members=tuple(members),
        comparing=len(jobs) - len(alone),
        variants=_variants(chosen),
        record=record,
        image=pairs.images[0][0],
        placement=pairs.inputs.images.placements[0],
    )


def jobs_of(domain: Domain, asked: Asked, occurrence: int | None = None) -> list[Job]:
    """The planned recipes of a description, for one call; found once for a model and a description.

    Raises:
        RecipeError: there are none, or an occurrence of no phrase.
    """
    if occurrence is not None and domain.phrase is None:
        raise RecipeError(f"occurrence={occurrence}: there is no phrase of which it could be one; give phrase='...'")
    if asked.custom is not None:
        found = fitting_jobs(domain, custom=asked.custom, occurrence=occurrence)
    else:
        found = _found_once(domain)
    if not found:
        given = domain.description
        raise RecipeError(
            f"no recipe of {type(domain.adapter.module).__name__} fits {given.name!r} ({given.in_short}), "
            f"{why_none(domain)}"
        )
    if asked.custom is not None:
        return found
    targets = {job.target: replace(job.target.of_classes(asked.classes), region=asked.region) for job in found}
    return [replace(job, target=targets[job.target], phrase=domain.phrase, occurrence=occurrence) for job in found]


def _found_once(domain: Domain) -> list[Job]:
    """The planned recipes of a description, from the last time if they were found before."""
    stated = domain.description.stated.items()
    key = (domain.description.name, *stated, domain.phrase is not None)  # recipes show the name, and values in order
    with _PLANNED_LOCK:
        found = _PLANNED.setdefault(domain.adapter, {}).get(key)
    if found is None:
        found = fitting_jobs(domain)
        with _PLANNED_LOCK:
            known = _PLANNED[domain.adapter]
            known[key] = found
            while len(known) > _KEPT:
                known.pop(next(iter(known)))
    return found


def _unchanged(
    record: Mapping[str, Any], again: Callable[[list[Any]], list[Explanation]], recipes: list[Any]
) -> list[Explanation]:
    """Explanations by recipes, of the model and the image that the maps are of.

    Raises:
        EvidenceError: one of these has changed since.
    """
    found = again(recipes)
    for each in found:
        for what in ("image", "model"):
            now, then = ({**source[what], **_OF_A_PASS} for source in (each.provenance, record))
            if now != then:
                parts = ", ".join(key for key in now if now[key] != then.get(key))
                raise EvidenceError(f"the {what} is not that of the maps any more ({parts}): measure it anew")
    return found


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
