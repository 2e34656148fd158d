"""Compute an explanation again and say what differs, and of what kind each difference is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vlcam.differences import KINDS, Difference, leaves
from vlcam.errors import InputError, RecipeError, UnknownNameError
from vlcam.explainer import Explainer
from vlcam.explanation import Explanation, same_image, same_pixels
from vlcam.regions import Region
from vlcam.targets import Class
from vlcam.text import phrase_spans

__all__ = ["TOLERANCE", "Verification", "verify"]

TOLERANCE = 1e-5
"""Largest difference, relative to a map's largest magnitude, at which the map counts as reproduced."""

# What may differ without a meaning: labels, how a choice was spelt, and what is compared elsewhere. An image's hash is
# compared before it is explained again, the target's value is one of the scores.
_LABELS = (
    "model.attention.used",
    "text.written",
    "answer.written",
    "image.name",
    "image.sha256",
    "run.modules",
    "run.fitted.layers",
    "run.fitted.target",
    "run.fitted.tokens",
    "run.phrase",
    "run.occurrence",
    "run.target_phrase.phrase",
    "run.target_phrase.occurrence",
    "run.target_value",
    "run.block_values",
    "run.class.chosen",
)
_PLURAL = ("weights", "versions", "numbers")
_SOURCE_STEPS = ("exif_rotation", "convert", "first_picture")


@dataclass(frozen=True)
class Verification:
    """The outcome of a comparison. The last eight fields hold a line for each thing that differs, by kind.

    Attributes:
        reproduced: whether every map came out again within `TOLERANCE`, for the same words, rows, layers, grid and
            placement.
        identical: whether the maps came out bit for bit besides.
        largest: largest absolute difference of a cell, over all maps; NaN where shapes differ.
        relative: largest difference of a cell, relative to the largest magnitude of the map that it is in; NaN as well.
        where: the cell of that map, in words; empty where no cell differs.
        recipe: fields of the recipe, and what it came to on the model: blocks, rows, dropped tokens.
        weights: the hash over the parameters.
        model: name, class, library, adapter, number type, device, attention and options of the model, and its tokens.
        preprocessing: the steps to the model's input, the grid, and which part of the image the model saw.
        image: the image itself.
        text: the text and its tokens, the words, the answer, the phrase, the class, the texts compared with.
        versions: of Python and the packages. They alone do not make a map count as not reproduced.
        numbers: maps beyond the tolerance, scores and other values beyond 1e-5, statuses.
    """

    reproduced: bool
    identical: bool
    largest: float
    relative: float
    where: str
    recipe: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    preprocessing: tuple[str, ...] = ()
    image: tuple[str, ...] = ()
    text: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()

    @property
    def by_kind(self) -> dict[str, tuple[str, ...]]:
        """The lines of each of the last eight fields, by its name."""
        return {kind: getattr(self, kind) for kind in KINDS}

    @property
    def differences(self) -> tuple[str, ...]:
        """All lines, kind by kind."""
        return tuple(line for lines in self.by_kind.values() for line in lines)

    @property
    def differing(self) -> tuple[str, ...]:
        """The kinds of which something differs."""
        return tuple(kind for kind, lines in self.by_kind.items() if lines)

    @property
    def verdict(self) -> str:
        """`identical`, `reproduced` or `NOT reproduced`."""
        return "identical" if self.identical else "reproduced" if self.reproduced else "NOT reproduced"

    def __str__(self) -> str:
        """For people: the verdict with the largest difference, then the kinds of differences, each with its lines."""
        first = f"{self.verdict}: largest difference {self.largest:.3g}"
        if self.where:
            first += f", {self.relative:.3g} of the largest magnitude of the map, at {self.where}"
        found = [first]
        for kind in self.differing:
            found += [f"{kind} differs:" if kind not in _PLURAL else f"{kind} differ:"]
            found += [f"  {line}" for line in getattr(self, kind)]
        return "\n".join(found)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values; differences that have no number, because shapes differ, are null."""
        return {
            "reproduced": self.reproduced,
            "identical": self.identical,
            "largest_difference": _number(self.largest),
            "largest_relative_difference": _number(self.relative),
            "largest_at": self.where,
            "differing": list(self.differing),
            "by_kind": {kind: list(lines) for kind, lines in self.by_kind.items()},
            "differences": list(self.differences),
        }


def verify(explanation: Explanation, model: Explainer, *, image: Any = None, alone: bool = False) -> Verification:
    """Recompute with a model and compare maps, scores, weights, image and versions.

    Args:
        explanation: what was computed or opened.
        model: the model to compute with.
        image: the image or the preprocessed tensor, where the explanation does not carry it.
        alone: whether the pair is computed by itself, where it was one of several of a call; otherwise among copies of
            itself, in a batch of the same shape.

    Raises:
        InputError: the image is neither carried nor given, the target was a Python callable, the phrase cannot be
            searched for, or the model is one that the recipe does not fit.
    """
    run = explanation.provenance["run"]
    if explanation.recipe.target == "custom":
        raise InputError(
            f"the target {run['target']!r} is a Python callable, which no record can hold: it cannot be verified from "
            "the file; call explain again with that callable, and compare the two with compare"
        )
    source = _image(explanation, image)
    phrase, occurrence = _phrase(explanation, (run.get("target_phrase") or run)["span"])
    try:
        (again,) = model.sweep(
            source,
            _text(explanation),
            [explanation.recipe],
            target=_class(run.get("class")),
            phrase=phrase,
            occurrence=occurrence,
            against=run.get("against") or None,
            answer=(explanation.provenance.get("answer") or {}).get("given"),
            empty="keep",
            conditions=_conditions_of(explanation, alone=alone),
        )
    except (RecipeError, UnknownNameError) as error:
        made_with = explanation.provenance["model"]["id"]
        raise InputError(
            f"the map cannot be computed with model {model.name!r}; it was made with {made_with!r}: {error}"
        ) from None
    return _compared(explanation, _of_word(again, run["span"]) if "target_phrase" in run else again)


def _conditions_of(explanation: Explanation, *, alone: bool) -> Mapping[str, Any]:
    """The provenance, which says what was tapped and in what batch; `alone`, without the latter."""
    record = explanation.provenance
    run = {name: value for name, value in record["run"].items() if name != "batch" or not alone}
    return {**record, "run": run}


def _of_word(explanation: Explanation, span: Sequence[int]) -> Explanation:
    """The view of a word, where the target is the likelihood of another phrase."""
    found = [view for view in explanation.words.values() if view.provenance["run"]["span"] == list(span)]
    return found[0] if found else explanation


def _text(explanation: Explanation) -> str | None:
    """The text as typed; for a phrase that was encoded alone, the text that it is of."""
    record = explanation.provenance["text"]
    return None if record is None else record.get("whole", record["given"])


def _class(record: Mapping[str, Any] | None) -> Class | None:
    """The class on record, with its region."""
    if record is None:
        return None
    region = record.get("region")
    return Class(record["index"], region=None if region is None else Region.from_dict(region))


def _compared(old: Explanation, new: Explanation) -> Verification:
    pairs = list(zip(_maps(old), _maps(new), strict=False))
    gaps = [_gap(a, b) for a, b in pairs]
    shares = [gap / _scale(a) for gap, (a, _) in zip(gaps, pairs, strict=True)]
    reproduced = _facts(old) == _facts(new) and all(share <= TOLERANCE for share in shares)
    worst = int(np.argmax(shares))  # NaN counts as the largest
    found = [*_conditions(old, new), *_results(old, new)]
    lines = {kind: [each.said("was", "is") for each in found if each.kind == kind] for kind in KINDS}
    lines["numbers"] += _far(old, gaps, shares)
    return Verification(
        reproduced=reproduced,
        identical=reproduced and all(a.tobytes() == b.tobytes() for a, b in pairs),
        largest=float(np.max(gaps)),
        relative=shares[worst],
        where=_where(old, worst, *pairs[worst]) if gaps[worst] != 0 else "",
        **{kind: tuple(each) for kind, each in lines.items()},
    )


def _maps(explanation: Explanation) -> list[NDArray[np.float32]]:
    return [explanation.tokens, *(word.tokens for word in explanation.word_maps)]


def _facts(explanation: Explanation) -> tuple[Any, ...]:
    """What has to be equal, besides the values of the maps."""
    run = explanation.provenance["run"]
    words = [(word.word, word.span, word.rows, word.status) for word in explanation.word_maps]
    return explanation.placement, explanation.status, words, [run[key] for key in ("layers", "rows", "grid", "span")]


def _gap(old: NDArray[np.float32], new: NDArray[np.float32]) -> float:
    return float(np.abs(new - old).max()) if new.shape == old.shape else float("nan")


def _scale(tokens: NDArray[np.float32]) -> float:
    return float(np.abs(tokens).max()) or 1.0


def _where(explanation: Explanation, number: int, old: NDArray[np.float32], new: NDArray[np.float32]) -> str:
    """The cell that differs most, of the whole map or of a word's, in words."""
    if old.shape != new.shape:
        place = f"a map of shape {new.shape} in place of {old.shape}"
    else:
        row, column = divmod(int(np.abs(new - old).argmax()), old.shape[1])
        place = _piece(explanation, column) if explanation.recipe.of_text else f"row {row}, column {column}"
    return place if number == 0 else f"{place} of the word {explanation.word_maps[number - 1].word!r}"


def _piece(explanation: Explanation, cell: int) -> str:
    """The token of a map over the text, as the vocabulary spells it."""
    record = explanation.provenance["text"]
    words = [piece for piece, special in zip(record["pieces"], record["special"], strict=True) if not special]
    return f"token {words[cell]!r}"


def _image(explanation: Explanation, image: Any) -> Any:
    attached, record = explanation.attachments, explanation.provenance["image"]
    if attached.pixel_values is not None:
        return torch.from_numpy(attached.pixel_values.copy())
    tensor = "pixels_sha256" in record
    if attached.image is not None and not tensor:
        return attached.image
    if image is None:
        what = "preprocessed tensor" if tensor else "image"
        raise InputError(
            f"the file does not carry its {what} (it was saved with embed_image=False), and nothing can be computed "
            "without; give image=..., or --image on the command line"
        )
    if isinstance(image, torch.Tensor):
        return torch.from_numpy(same_pixels(image, record))
    if tensor:
        raise InputError("the explanation was made of a preprocessed tensor; give image=<that tensor [3, H, W]>")
    same_image(image, record)
    return image


def _phrase(explanation: Explanation, span: Sequence[int] | None) -> tuple[str | None, int | None]:
    """The phrase as it stands in the text, and which of several it is."""
    if span is None:
        return None, None
    text = _text(explanation) or ""
    phrase = text[span[0] : span[1]]
    places, own = phrase_spans(text, phrase), (span[0], span[1])
    if own not in places:
        raise InputError(
            f"the phrase {phrase!r} at characters {span[0]}-{span[1]} cannot be verified: a search for it in the text "
            "does not find this place"
        )
    return phrase, places.index(own) + 1


def _conditions(old: Explanation, new: Explanation) -> Iterator[Difference]:
    """What differs of that which the maps were made from, and in the scores."""
    was, now = old.record(), new.record()
    for field, (one, other) in old.recipe.differences(new.recipe).items():
        yield Difference("recipe", f"recipe.{field}", one, other)
    yield from leaves("placement", was["placement"], now["placement"])
    for part in ("model", "image", "text", "answer", "versions"):
        records = (_without_source(each.provenance.get(part)) for each in (old, new))
        yield from _told(leaves(part, *records, shared=True))
    for name, score in old.scores.items():
        other = new.scores.get(name)
        if other is None or abs(other.value - score.value) > TOLERANCE * max(1.0, abs(score.value)):
            yield Difference("numbers", f"score {name}", score.value, other.value if other else "not offered")


def _results(old: Explanation, new: Explanation) -> Iterator[Difference]:
    """What differs of that which came out, but for the maps."""
    was, now = (dict(each.provenance["run"]) for each in (old, new))
    if isinstance(was["prefix_tokens"], int):  # the first release counted them
        now["prefix_tokens"] = len(now["prefix_tokens"])
    yield from _told(leaves("run", _without_reasons(was), _without_reasons(now), shared=True))
    was, now = old.record(), new.record()
    yield from leaves("words", dict(enumerate(was["words"])), dict(enumerate(now["words"])))
    yield from leaves("status", old.status, new.status)


def _far(explanation: Explanation, gaps: Sequence[float], shares: Sequence[float]) -> Iterator[str]:
    """A line for every map that is beyond the tolerance; `shares` are the gaps relative to its largest magnitude."""
    names = ["map", *(f"map of the word {word.word!r}" for word in explanation.word_maps)]
    for name, gap, share in zip(names, gaps, shares, strict=False):
        if not share <= TOLERANCE:
            yield f"{name}: largest difference {gap:.3g}"


def _told(found: Iterator[Difference]) -> Iterator[Difference]:
    """Without labels, and without what is equal up to rounding."""
    for each in found:
        close = each.field.startswith("run.apart.") and _close(each.one, each.other)
        if each.field not in _LABELS and not close:
            yield each


def _close(one: object, other: object) -> bool:
    if not isinstance(one, float) or not isinstance(other, float):
        return False
    return abs(one - other) <= TOLERANCE * max(abs(one), abs(other), 1.0)


def _without_source(record: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Without the steps that led to upright RGB pixels: an image that travelled in the file may have them behind it."""
    if record is None or "steps" not in record:
        return record
    return {**record, "steps": [step for step in record["steps"] if step["step"] not in _SOURCE_STEPS]}


def _without_reasons(run: Mapping[str, Any]) -> Mapping[str, Any]:
    """What was dropped without the sentence that says why, which a later release may word otherwise."""
    return {**run, "dropped": [{k: v for k, v in each.items() if k != "why"} for each in run["dropped"]]}


def _number(value: float) -> float | None:
    return value if np.isfinite(value) else None
