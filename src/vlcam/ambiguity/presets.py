"""What papers typically write of their maps, as descriptions by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from vlcam.ambiguity.description import Description
from vlcam.catalogue import named
from vlcam.errors import RecipeError, UnknownNameError, listing

__all__ = ["Preset", "described", "descriptions"]


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A description by name, and the sentence that it is of.

    Attributes:
        description: what the sentence states.
        sentence: as papers write it.
        reasons: for fields, why they are stated so, or left open.
    """

    description: Description
    sentence: str
    reasons: Mapping[str, str]


_GRADCAM: dict[str, Any] = {
    "stream": "vision",
    "target": "class",
    "weighting": ["gradcam", "attention*gradient", "head_weights"],
    "relu": ["none", "gradient", "before_heads", "after_heads", "map"],
    "map_axis": ["keys", "none"],
    "layer_rule": ["single", "mean", "sum", "max"],
}
_WHY = {
    "weighting": "The name alone. On token features it is gradcam: channels weighted by their mean gradient. On "
    "attention the published readings are three: heads weighted by their mean gradient (head_weights), probabilities "
    "times their gradient (attention*gradient), and heads taken for channels (gradcam with heads=channels).",
    "relu": "The formula of Grad-CAM ends in a ReLU. Adaptations have it there, on the gradient, before or after "
    "heads, or leave it out; only what removes the positive side is no Grad-CAM.",
    "layer_rule": "Maps of several layers may be averaged, added, or their maximum taken. What multiplies the "
    "attention of the blocks goes by other names.",
    "map_axis": "On attention, the attention that a patch receives. That which it gives is known from "
    "re-implementations of Grad-SAM, and is not called Grad-CAM.",
    "stream": "An image classifier has one stream.",
    "target": "The score of a class. On which scale, logit or probability, is not said.",
    "site": "Open: a block of a transformer has seven tensors, and no last convolution.",
    "gradient_tokens": "Open: whether the class token counts when gradients are averaged.",
    "heads": "Open: how attention heads become one.",
    "queries": "Open: whose attention is read.",
    "scale": "Open: the raw logit or the softmax probability.",
}
_LAST = {"layers": "Stated: the last block.", "layer_rule": "One block."}


def _preset(name: str, sentence: str, reasons: Mapping[str, str], **stated: Any) -> Preset:
    return Preset(description=Description(name=name, **stated), sentence=sentence, reasons=MappingProxyType(reasons))


_PRESETS = (
    _preset(
        "gradcam-vit",
        "We use Grad-CAM to visualise which regions the ViT-B/16 relies on for the predicted class.",
        _WHY | {"layers": "Open: which block, or several of them."},
        **_GRADCAM,
    ),
    _preset(
        "gradcam-vit-last-layer",
        "We apply Grad-CAM to the last layer of the ViT.",
        _WHY | _LAST,
        **_GRADCAM | {"layers": "last", "layer_rule": "single"},
    ),
    Preset(
        description=Description.of(named("pgc-gradcam").recipe).stating(name="pytorch-grad-cam-default"),
        sentence="Grad-CAM maps were computed with pytorch-grad-cam and its documented reshape transform for ViT.",
        reasons=MappingProxyType(
            {
                "site": "The documentation's target layer for ViT: the first LayerNorm of the last block.",
                "target": "ClassifierOutputTarget: the class logit.",
                "gradient_tokens": "The reshape transform drops the class token before gradients are averaged.",
                "relu": "The library's own, of the map.",
                "normalize": "The library's own, to 0..1.",
                "weighting": "The library's class GradCAM. So nothing is left open: code and layer fix every choice.",
            }
        ),
    ),
    _preset(
        "attention-last-layer",
        "We visualise the attention of the last layer.",
        {
            "site": "Attention probabilities.",
            "weighting": "The probabilities themselves, without a gradient.",
            "layers": "Stated: the last block.",
            "heads": "Open: how heads become one.",
            "queries": "Open: whose attention; mostly that of the class token.",
            "map_axis": "Open: attention that patches receive, or give.",
        },
        stream="vision",
        site="F2",
        weighting="attention",
        layers="last",
        layer_rule="single",
    ),
    _preset(
        "attention-rollout",
        "We visualise attention with attention rollout.",
        {
            "layer_rule": "The name: attention matrices of all blocks, with the identity, multiplied.",
            "layers": "Rollout is over every block.",
            "weighting": "The probabilities themselves, without a gradient.",
            "heads": "Open: the paper takes the mean over heads, the best known code their mean, maximum or minimum.",
            "discard": "The paper discards nothing, the best known code nine tenths of each matrix.",
            "queries": "Open: whose row; mostly that of the class token.",
        },
        stream="vision",
        site="F2",
        weighting="attention",
        layers="all",
        layer_rule="rollout",
        discard=[0.0, 0.9],
    ),
    _preset(
        "chefer",
        "We use the transformer explainability method of Chefer et al.",
        {
            "layer_rule": "Relevance that is carried through the blocks (ICCV 2021); the other method of the same "
            "authors propagates relevance through every layer, and is no recipe.",
            "weighting": "Attention times its gradient.",
            "heads": "The mean, in paper and code.",
            "relu": "Paper and code remove negatives before heads are averaged, a re-implementation after it.",
            "layers": "The notebook for ViT takes all blocks, that for CLIP the last one.",
            "queries": "The row of the class token.",
            "map_axis": "Its attention to the patches.",
            "scale": "Open: logit or probability.",
        },
        stream="vision",
        site="F2",
        weighting="attention*gradient",
        layers=["all", "last"],
        layer_rule="relevance",
        heads="mean",
        relu=["gradient", "before_heads", "after_heads"],
        queries="cls",
        map_axis="keys",
    ),
    _preset(
        "gradcam-clip",
        "We apply Grad-CAM to the image encoder of CLIP, with the image-text similarity as the target.",
        _WHY
        | {
            "stream": "The image encoder.",
            "target": "The similarity of image and text. Whether the cosine, the scaled logit or a softmax over "
            "prompts is differentiated is not said.",
            "scale": "Open: cosine, logit, or what compares the prompts.",
            "layers": "Open: which block, or several of them.",
        },
        **_GRADCAM | {"target": "contrastive"},
    ),
    _preset(
        "gradcam-cross-attention",
        "We visualise Grad-CAM on the cross-attention maps for the image-text matching score.",
        {
            "site": "Cross-attention probabilities, text on image.",
            "stream": "The blocks in which text looks at the image.",
            "target": "The image-text matching score. On which scale is not said.",
            "weighting": _WHY["weighting"],
            "relu": _WHY["relu"],
            "layer_rule": _WHY["layer_rule"],
            "layers": "Open: ALBEF's code takes one block, BLIP's another.",
            "queries": "Open: the text's first token, or the mean over its tokens.",
            "exclude": "Open: whether special tokens count among them.",
            "heads": "Open: how attention heads become one.",
        },
        **_GRADCAM | {"site": "CROSS", "stream": "fusion", "target": "itm"},
    ),
)


def descriptions() -> Mapping[str, Preset]:
    """What papers typically write, by name: the description, the sentence, and why each field is stated or open."""
    return MappingProxyType({preset.description.name: preset for preset in _PRESETS})


def described(given: str | Description | Preset) -> Description:
    """A description from itself, from what holds it, or from its name.

    Raises:
        UnknownNameError: no description of that name; lists those that exist.
        RecipeError: neither a name nor a description.
    """
    if isinstance(given, Description):
        return given
    if isinstance(given, Preset):
        return given.description
    if not isinstance(given, str):
        raise RecipeError(f"a description of type {type(given).__name__}: give vlcam.Description(...), or a name")
    try:
        return descriptions()[given].description
    except KeyError:
        raise UnknownNameError(f"no description {given!r}; there are {listing(descriptions())}") from None
