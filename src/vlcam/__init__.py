"""vlcam shows what a vision transformer or a vision-language model looked at, and states how each map was made.

>>> model = load("tiny-blip-itm")
>>> exp = model.explain("scene.png", "a red circle and a blue square", phrase="red circle")  # doctest: +SKIP
>>> exp.overlay().save("where.png")  # doctest: +SKIP
"""

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as _version

from vlcam import scenes, targets
from vlcam.adapter import ModelAdapter
from vlcam.ambiguity import Ambiguity, Description, descriptions
from vlcam.auditing import Audit, audit
from vlcam.bibtex import bibtex
from vlcam.boxes import iou
from vlcam.catalogue import Entry, recipes
from vlcam.comparison import Comparison
from vlcam.errors import (
    AdapterError,
    CaptureError,
    EvidenceError,
    FileError,
    InputError,
    RecipeError,
    UnknownNameError,
    VlcamError,
)
from vlcam.explainer import Explainer
from vlcam.explanation import Explanation
from vlcam.fitting import all_recipes
from vlcam.galleries import compare, gallery
from vlcam.grounding import GroundedPhrase, Grounding
from vlcam.recipe import Recipe
from vlcam.reporting import Report
from vlcam.verification import Verification
from vlcam.wording import describe, formula, summary
from vlcam.zoo import load, models, wrap

open = Explanation.open

try:
    __version__ = _version("vlcam")
except PackageNotFoundError:  # run from a source tree that was not installed
    __version__ = "0+unknown"

__all__ = [
    "AdapterError",
    "Ambiguity",
    "Audit",
    "CaptureError",
    "Comparison",
    "Description",
    "Entry",
    "EvidenceError",
    "Explainer",
    "Explanation",
    "FileError",
    "GroundedPhrase",
    "Grounding",
    "InputError",
    "ModelAdapter",
    "Recipe",
    "RecipeError",
    "Report",
    "UnknownNameError",
    "Verification",
    "VlcamError",
    "__version__",
    "all_recipes",
    "audit",
    "bibtex",
    "compare",
    "describe",
    "descriptions",
    "formula",
    "gallery",
    "iou",
    "load",
    "models",
    "recipes",
    "scenes",
    "summary",
    "targets",
    "wrap",
]
