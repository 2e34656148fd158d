"""Compute an explanation again and say what differs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vlcam.errors import InputError
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
    "run.target_value",
    "run.block_values",
    "run.class.chosen",
)
_SOURCE_STEPS = ("exif_rotation", "convert", "first_picture")


@dataclass(frozen=True)
class Verification:
    """The outcome of a comparison.

    Attributes:
        reproduced: whether every map came out again within `TOLERANCE`, for the same words, rows, layers, grid and
            placement.
        identical: whether the maps came out bit for bit besides.
        largest: largest absolute difference between the maps, NaN where their shapes differ.
        differences: what differs, in words; library versions alone do not make a map count as not reproduced.
    """

    reproduced: bool
    identical: bool
    largest: float
    differences: tuple[str, ...]

    def __str__(self) -> str:
        """For people: the verdict, then a line per difference."""
        verdict = "identical" if self.identical else "reproduced" if self.reproduced else "NOT reproduced"
        return "\n".join([f"{verdict}: largest difference {self.largest:.3g}", *self.differences])


def verify(explanation: Explanation, model: Explainer, *, image: Any = None) -> Verification:
    """Recompute with a model and compare maps, scores, weights, image and versions.

    Args:
        explanation: what was computed or opened.
        model: the model to compute with.
        image: the image or the preprocessed tensor, where the explanation does not carry it.

    Raises:
        InputError: the image is neither carried nor given, the target was a Python callable, or the phrase cannot be
            searched for.
    """
    run = explanation.provenance["run"]
    if explanation.recipe.target == "custom":
        raise InputError(
            f"the target {run['target']!r} is a Python callable, which no record can hold; call explain again"
        )
    source = _image(explanation, image)
    phrase, occurrence = _phrase(explanation)
    (again,) = model.sweep(
        source,
        _text(explanation),
        [explanation.recipe],
        target=_class(run["class"]),
        phrase=phrase,
        occurrence=occurrence,
        against=run.get("against") or None,
        answer=(explanation.provenance.get("answer") or {}).get("given"),
        empty="keep",
    )
    return _compared(explanation, again)


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
    reproduced = _facts(old) == _facts(new) and all(
        gap <= TOLERANCE * _scale(a) for gap, (a, _) in zip(gaps, pairs, strict=True)
    )
    return Verification(
        reproduced=reproduced,
        identical=reproduced and all(a.tobytes() == b.tobytes() for a, b in pairs),
        largest=float(np.max(gaps)),
        differences=(*_conditions(old, new), *_results(old, new)),
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


def _image(explanation: Explanation, image: Any) -> Any:
    attached, record = explanation.attachments, explanation.provenance["image"]
    if attached.pixel_values is not None:
        return torch.from_numpy(attached.pixel_values.copy())
    tensor = "pixels_sha256" in record
    if attached.image is not None and not tensor:
        return attached.image
    if image is None:
        what = "preprocessed tensor" if tensor else "image"
        raise InputError(f"the file does not carry its {what} (it was saved with embed_image=False); give image=...")
    if isinstance(image, torch.Tensor):
        return torch.from_numpy(same_pixels(image, record))
    if tensor:
        raise InputError("the explanation was made of a preprocessed tensor; give image=<that tensor [3, H, W]>")
    same_image(image, record)
    return image


def _phrase(explanation: Explanation) -> tuple[str | None, int | None]:
    """The phrase as it stands in the text, and which of several it is."""
    span = explanation.provenance["run"]["span"]
    if span is None:
        return None, None
    text = _text(explanation) or ""
    phrase = text[span[0] : span[1]]
    places = phrase_spans(text, phrase)
    if tuple(span) not in places:
        raise InputError(
            f"the phrase {phrase!r} at characters {span[0]}-{span[1]} cannot be verified: a search for it in the text "
            "does not find this place"
        )
    return phrase, places.index(tuple(span)) + 1


def _conditions(old: Explanation, new: Explanation) -> list[str]:
    """What differs of that which the maps were made from, and in the scores."""
    was, now = old.record(), new.record()
    found = _leaves("placement", was["placement"], now["placement"])
    for part in ("model", "image", "text", "versions"):
        found += _leaves(part, _without_source(old.provenance[part]), _without_source(new.provenance[part]))
    for name, score in old.scores.items():
        other = new.scores.get(name)
        if other is None or abs(other.value - score.value) > TOLERANCE * max(1.0, abs(score.value)):
            found.append(f"score {name}: was {score.value!r}, is {other.value if other else 'not offered'!r}")
    return found


def _results(old: Explanation, new: Explanation) -> list[str]:
    """What differs of that which came out."""
    found = _leaves("run", old.provenance["run"], new.provenance["run"])
    was, now = old.record(), new.record()
    found += _leaves("words", dict(enumerate(was["words"])), dict(enumerate(now["words"])))
    for a, b in zip(old.word_maps, new.word_maps, strict=False):
        gap = _gap(a.tokens, b.tokens)
        if not gap <= TOLERANCE * _scale(a.tokens):
            found.append(f"map of the word {a.word!r}: largest difference {gap:.3g}")
    return found + _leaves("status", old.status, new.status)


def _without_source(record: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Without the steps that led to upright RGB pixels: an image that travelled in the file may have them behind it."""
    if record is None or "steps" not in record:
        return record
    return {**record, "steps": [step for step in record["steps"] if step["step"] not in _SOURCE_STEPS]}


def _leaves(path: str, old: Any, new: Any) -> list[str]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        keys = dict.fromkeys([*old, *new])
        return [line for key in keys for line in _leaves(f"{path}.{key}", old.get(key), new.get(key))]
    if path.startswith("run.apart.") and isinstance(old, float) and isinstance(new, float):
        old, new = (old, old) if abs(old - new) <= TOLERANCE * max(abs(old), abs(new), 1.0) else (old, new)
    return [] if old == new or path in _LABELS else [f"{path}: was {old!r}, is {new!r}"]
