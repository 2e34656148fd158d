"""Compute an explanation again and say what differs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vlcam.errors import InputError
from vlcam.explainer import Explainer
from vlcam.explanation import Explanation
from vlcam.images import open_image
from vlcam.text import phrase_spans

__all__ = ["TOLERANCE", "Verification", "verify"]

TOLERANCE = 1e-5
"""Largest difference, relative to the map's largest magnitude, at which a map counts as reproduced."""


@dataclass(frozen=True)
class Verification:
    """The outcome of a comparison.

    Attributes:
        reproduced: whether the map came out again within `TOLERANCE`.
        identical: whether it came out bit for bit.
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
    """Recompute with a model and compare map, scores, weights, image and versions.

    Args:
        explanation: what was computed or opened.
        model: the model to compute with.
        image: the image, where the explanation does not carry it.

    Raises:
        InputError: the image is neither carried nor given, or the target was a Python callable.
    """
    run = explanation.provenance["run"]
    if explanation.recipe.target == "custom":
        raise InputError(
            f"the target {run['target']!r} is a Python callable, which no record can hold; call explain again"
        )
    source = _image(explanation, image)
    phrase, occurrence = _phrase(explanation)
    again = model.explain(source, explanation.text, explanation.recipe, phrase=phrase, occurrence=occurrence)
    if isinstance(again, list):
        (again,) = again
    same_shape = again.tokens.shape == explanation.tokens.shape
    largest = float(np.abs(again.tokens - explanation.tokens).max()) if same_shape else float("nan")
    scale = float(np.abs(explanation.tokens).max()) or 1.0
    return Verification(
        reproduced=same_shape and largest <= TOLERANCE * scale,
        identical=same_shape and bool((again.tokens == explanation.tokens).all()),
        largest=largest,
        differences=tuple(_differences(explanation, again)),
    )


def _image(explanation: Explanation, image: Any) -> Any:
    attached = explanation.attachments
    if attached.pixel_values is not None:
        return torch.from_numpy(attached.pixel_values.copy())
    if attached.image is not None:
        return attached.image
    if image is None:
        raise InputError("the file does not carry its image (it was saved with embed_image=False); give image=...")
    wanted, found = explanation.provenance["image"]["sha256"], open_image(image).sha256
    if found != wanted:
        raise InputError(f"another image: its SHA-256 is {found}, the explanation was made of {wanted}")
    return image


def _phrase(explanation: Explanation) -> tuple[str | None, int | None]:
    """The phrase as it stands in the text, and which of several it is."""
    span = explanation.provenance["run"]["span"]
    if span is None:
        return None, None
    phrase = explanation.text[span[0] : span[1]]
    return phrase, phrase_spans(explanation.text, phrase).index((span[0], span[1])) + 1


def _differences(old: Explanation, new: Explanation) -> list[str]:
    found = []
    for part in ("model", "image", "text", "versions"):
        found += _leaves(part, old.provenance[part], new.provenance[part])
    for name, score in old.scores.items():
        other = new.scores.get(name)
        if other is None or abs(other.value - score.value) > TOLERANCE * max(1.0, abs(score.value)):
            found.append(f"score {name}: was {score.value!r}, is {other.value if other else 'not offered'!r}")
    if old.status != new.status:
        found.append(f"status: was {old.status}, is {new.status}")
    return found


def _leaves(path: str, old: Any, new: Any) -> list[str]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        keys = dict.fromkeys([*old, *new])
        return [line for key in keys for line in _leaves(f"{path}.{key}", old.get(key), new.get(key))]
    # A file name is a label: an image that travelled inside the file has lost it.
    return [] if old == new or path == "image.name" else [f"{path}: was {old!r}, is {new!r}"]
