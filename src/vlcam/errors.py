"""Every error that vlcam raises on purpose.

VlcamError
+-- RecipeError        choices that contradict each other, or that this model cannot meet
+-- InputError         an image, a text or a phrase that cannot be explained
+-- UnknownNameError   a model, recipe, layer or site that does not exist; lists what does
+-- AdapterError       no adapter knows the model, or an adapter broke its contract
+-- CaptureError       a tapped tensor was not reached, or reached twice
+-- EvidenceError      nothing to show: a zero gradient, a non-finite map or score
+-- FileError          not a vlcam file, a damaged one, or an output that would be overwritten
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = [
    "AdapterError",
    "CaptureError",
    "EvidenceError",
    "FileError",
    "InputError",
    "RecipeError",
    "UnknownNameError",
    "VlcamError",
    "listing",
]


class VlcamError(Exception):
    """Base of every error that vlcam raises on purpose."""


class RecipeError(VlcamError, ValueError):
    """Choices that contradict each other, or that this model cannot meet."""


class InputError(VlcamError, ValueError):
    """An image, a text or a phrase that cannot be explained."""


class UnknownNameError(VlcamError, LookupError):
    """A model, recipe, layer or site that does not exist."""


class AdapterError(VlcamError, TypeError):
    """No adapter knows the model, or an adapter broke its contract."""


class CaptureError(VlcamError, RuntimeError):
    """A tapped tensor was not reached, or was reached more than once."""


class EvidenceError(VlcamError, ArithmeticError):
    """There is nothing to show: a gradient that is zero, a map or a score that is not finite."""


class FileError(VlcamError, OSError):
    """Not a vlcam file, a damaged one, or an output that already exists."""


def listing(values: Iterable[object]) -> str:
    """The values as a reader wants them in an error: quoted, comma-separated, `nothing` if there are none."""
    return ", ".join(repr(value) for value in values) or "nothing"
