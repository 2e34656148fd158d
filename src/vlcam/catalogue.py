"""Published recipes by name, each with its source and the depth of the model it was published on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from vlcam.errors import UnknownNameError, listing
from vlcam.recipe import Recipe

__all__ = ["Entry", "named", "recipes"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A named recipe and where it comes from.

    Attributes:
        recipe: the choices, as the source makes them.
        citation: authors, title, venue and year.
        code: the implementation that the formula was checked against, or that there is none.
        depth: number of blocks of the stream in the published model; 0 where `layers` is not an index.
        notes: what a reader should know before using it.
    """

    recipe: Recipe
    citation: str
    code: str
    depth: int
    notes: str

    def fitted(self, depth: int) -> tuple[Recipe, str]:
        """Return the recipe for a stream of `depth` blocks, and a sentence that says how its layers were found.

        A published index b of n blocks stands for the same relative depth: floor(b (depth - 1) / (n - 1)).
        """
        if not self.depth or depth == self.depth or not isinstance(self.recipe.layers, tuple):
            return self.recipe, "as published"
        layers = tuple(dict.fromkeys(b * (depth - 1) // (self.depth - 1) for b in self.recipe.layers))
        rule = f"published on block {list(self.recipe.layers)} of {self.depth}; same relative depth of {depth} blocks"
        return self.recipe.replace(layers=layers), rule


_BLIP = (
    "Li, Li, Xiong, Hoi. BLIP: Bootstrapping Language-Image Pre-training for Unified Vision-Language "
    "Understanding and Generation. ICML 2022"
)
_ALBEF = (
    "Li, Selvaraju, Gotmare, Joty, Xiong, Hoi. Align before Fuse: Vision and Language Representation Learning "
    "with Momentum Distillation. NeurIPS 2021"
)
_GRADCAM = (
    "Selvaraju, Cogswell, Das, Vedantam, Parikh, Batra. Grad-CAM: Visual Explanations from Deep Networks via "
    "Gradient-based Localization. ICCV 2017"
)

_LAVIS = Recipe(
    name="lavis-itm",
    site="CROSS",
    stream="fusion",
    layers=(6,),
    target="itm",
    scale="logit",
    gradient_tokens="none",
    queries="all",
    exclude=("cls", "special_text", "padding"),
    weighting="attention*gradient",
    relu="gradient",
    heads="mean",
    layer_rule="single",
    reshape="raster",
    upsample="bilinear",
    normalize="minmax",
)
_FEATURES = _LAVIS.replace(
    name="pgc-gradcam",
    site="F1",
    stream="vision",
    layers="last",
    gradient_tokens="patches",
    queries="none",
    exclude=("cls",),
    weighting="gradcam",
    relu="map",
    heads="none",
)

_ENTRIES = (
    Entry(
        recipe=_LAVIS,
        citation=_BLIP,
        code="salesforce/LAVIS 506965b, lavis/models/blip_models/blip_image_text_matching.py, compute_gradcam",
        depth=12,
        notes="Text-averaged map over the words, without [ENC] and [SEP]. In the last block only the first text "
        "token has a gradient, so words need an earlier one.",
    ),
    Entry(
        recipe=_LAVIS.replace(name="albef-itm", layers=(2,), exclude=("cls", "padding")),
        citation=_ALBEF,
        code="salesforce/ALBEF b9727e4, Grounding.py and visualization.ipynb",
        depth=6,
        notes="Mean over all text rows, special tokens included. ALBEF's 'layer 8' of 12 is the third of the six "
        "fusion blocks that have cross-attention, block 2 here. Its mean also counts padding, which only rescales.",
    ),
    Entry(
        recipe=_LAVIS.replace(name="attention-cross", weighting="attention", target="none", scale="none", relu="none"),
        citation=_BLIP,
        code="no published code: the probabilities of lavis-itm without their gradient",
        depth=12,
        notes="Does not depend on the score: the same map for 'match' and for 'no match'.",
    ),
    Entry(
        recipe=_FEATURES.replace(
            name="context-gradcam", site="CONTEXT", stream="fusion", layers="all", layer_rule="shared"
        ),
        citation=_GRADCAM,
        code="no published code for an encoder-decoder model; the context side is named in the taxonomy of Wall, "
        "Wang, Rizk, Santosh (2026)",
        depth=0,
        notes="One map for the whole text: the image tokens carry no text rows. The gradient is the sum over every "
        "block that reads them; with one layer and layer_rule='single', over that block's reading alone.",
    ),
    Entry(
        recipe=_FEATURES,
        citation=_GRADCAM,
        code="jacobgil/pytorch-grad-cam 084273b, GradCAM with a ViT reshape and the last block's first LayerNorm",
        depth=0,
        notes="One map for the whole text. The peer rescales to 0..1 twice and always; tokens here stay raw.",
    ),
)


def recipes() -> Mapping[str, Entry]:
    """Every named recipe with its source, in catalogue order."""
    return MappingProxyType({entry.recipe.name: entry for entry in _ENTRIES})


def named(name: str) -> Entry:
    """Return the catalogue entry of that name.

    Raises:
        UnknownNameError: no such recipe; lists those that exist.
    """
    try:
        return recipes()[name]
    except KeyError:
        raise UnknownNameError(f"no recipe {name!r}; there are {listing(recipes())}") from None
