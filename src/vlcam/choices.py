"""The vocabulary of recipes: for every field the values that it knows."""

from __future__ import annotations

from typing import Any, Literal, get_args

__all__ = [
    "ASKING",
    "ATTENTION_SITES",
    "BIMODAL",
    "CARRIED",
    "CHANNEL_WEIGHTINGS",
    "COMPARING",
    "CONTRASTIVE",
    "DEPARTS",
    "FLOWS",
    "GROUPS",
    "OF_VALUES",
    "POOLED",
    "SCALES",
    "SCORED",
    "WITHOUT_GRADIENT",
    "WORDS",
    "WRITTEN",
    "Attention",
    "AttentionWeighting",
    "ChannelWeighting",
    "Compose",
    "Departure",
    "Excluded",
    "GradientPath",
    "GradientTokens",
    "Heads",
    "LayerRule",
    "Layers",
    "MapAxis",
    "Normalize",
    "Prompt",
    "Queries",
    "Relu",
    "Reshape",
    "Scale",
    "Site",
    "Stream",
    "Target",
    "Upsample",
    "Weighting",
    "takes_gradient",
    "takes_target",
]

Site = Literal["F1", "F2", "F3", "F3_HEADS", "F4", "F5", "F6", "CROSS", "CONTEXT"]
Stream = Literal["vision", "text", "pooler", "fusion"]
Layers = tuple[int, ...] | Literal["last", "all"]
Attention = Literal["own", "one_head", "identity", "values"]
Target = Literal[
    "class", "segmentation", "itm", "contrastive", "contrastive_patches", "caption", "answer", "custom", "none"
]
Scale = Literal["logit", "probability", "log-probability", "margin", "difference", "finer", "cosine", "raw", "none"]
Prompt = Literal["whole", "phrase", "in_place"]
GradientPath = Literal["full", "direct", "block", "integrated", "none"]
GradientTokens = Literal["cls", "patches", "pooled", "all", "none"]
Queries = tuple[int, ...] | Literal["cls", "registers", "patches", "pooled", "all", "phrase", "none"]
MapAxis = Literal["keys", "queries", "none"]
Compose = Literal["none", "pooler", "vision"]
Excluded = Literal["cls", "registers", "distillation", "special_text", "padding"]
ChannelWeighting = Literal[
    "gradcam",
    "gradcam++",
    "xgradcam",
    "layercam",
    "hirescam",
    "elementwise",
    "eigencam",
    "eigengradcam",
    "scorecam",
    "ablationcam",
    "reciprocam",
    "value*gradient",
    "value*gradient*similarity",
    "similarity",
    "surgery",
    "none",
]
AttentionWeighting = Literal["attention", "gradient", "attention*gradient", "sigmoid*gradient", "head_weights"]
Weighting = ChannelWeighting | AttentionWeighting
Relu = Literal["none", "gradient", "negative_gradient", "before_heads", "after_heads", "map"]
Heads = Literal["mean", "sum", "max", "min", "channels", "none"]
LayerRule = Literal[
    "single", "mean", "sum", "max", "shared", "rollout", "relevance", "transition", "headwise", "tokenwise"
]
Departure = Literal[
    "column_scaling",
    "mirrored_layers",
    "scores_gradient",
    "unprotected",
    "summed_cubes",
    "no_denominator",
    "aligned_corners",
    "one_token",
    "bare_pooler",
    "padded_similarity",
    "head_scale",
]
Reshape = Literal["raster", "words"]
Upsample = Literal["nearest", "bilinear", "bicubic", "none"]
Normalize = Literal["none", "minmax", "max", "sum"]

ATTENTION_SITES = ("F2", "CROSS")
CHANNEL_WEIGHTINGS = get_args(ChannelWeighting)
OF_VALUES = ("value*gradient", "value*gradient*similarity")
"""Weightings of the values that attention mixes, by the gradient of what it makes of them."""
POOLED = ("gradcam", "gradcam++", "xgradcam", *OF_VALUES)
"""Weightings with one weight per channel, for which gradients are pooled over tokens."""
COMPARING = ("similarity", "surgery")
"""Weightings for which tokens are embedded and compared with texts, without a gradient."""
ASKING = ("scorecam", "ablationcam", "reciprocam")
"""Weightings for which the model is asked again instead of differentiated."""
CARRIED = ("transition", "headwise", "tokenwise")
"""Layer rules that carry attention through the blocks, and weight it by the gradient at the last of them."""
FLOWS = ("rollout", "relevance", *CARRIED)
"""Layer rules that multiply the attention matrices of the blocks."""
BIMODAL = ("relevance",)
"""Layer rules that cross-attention has together with the self-attention on either side of it."""

CONTRASTIVE = ("contrastive", "contrastive_patches")
"""Similarities of an image with texts, which can be read against other texts."""
WRITTEN = ("caption", "answer")
"""Likelihoods of texts that the model writes, token by token."""
SCORED = ("class", "segmentation", "itm", *CONTRASTIVE, *WRITTEN, "custom")
WITHOUT_GRADIENT = ("attention", "none", "eigencam")

DEPARTS: dict[Departure, tuple[str, tuple[str, ...]]] = {
    "column_scaling": ("layer_rule", ("rollout",)),
    "mirrored_layers": ("layer_rule", ("rollout",)),
    "scores_gradient": ("weighting", ("gradient", "attention*gradient", "head_weights")),
    "unprotected": ("layer_rule", ("rollout",)),
    "summed_cubes": ("weighting", ("gradcam++",)),
    "no_denominator": ("weighting", ("gradcam++",)),
    "aligned_corners": ("weighting", ("scorecam",)),
    "one_token": ("weighting", ("reciprocam",)),
    "bare_pooler": ("gradient_path", ("block",)),
    "padded_similarity": ("weighting", ("value*gradient*similarity",)),
    "head_scale": ("attention", ("one_head",)),
}

WORDS: dict[str, tuple[Any, ...]] = {
    "site": get_args(Site),
    "stream": get_args(Stream),
    "attention": get_args(Attention),
    "target": get_args(Target),
    "scale": get_args(Scale),
    "prompt": get_args(Prompt),
    "gradient_path": get_args(GradientPath),
    "gradient_tokens": get_args(GradientTokens),
    "map_axis": get_args(MapAxis),
    "compose": get_args(Compose),
    "weighting": (*get_args(ChannelWeighting), *get_args(AttentionWeighting)),
    "relu": get_args(Relu),
    "heads": get_args(Heads),
    "layer_rule": get_args(LayerRule),
    "reshape": get_args(Reshape),
    "upsample": get_args(Upsample),
    "normalize": get_args(Normalize),
}
_CONTRASTIVE_SCALES: tuple[Scale, ...] = (
    *("cosine", "logit", "probability", "log-probability"),
    *("margin", "difference", "finer"),
)
SCALES: dict[str, tuple[Scale, ...]] = {
    "class": ("logit", "probability", "log-probability", "margin", "finer"),
    "segmentation": ("logit", "probability", "log-probability"),
    "itm": ("logit", "probability", "log-probability", "margin"),
    "contrastive": _CONTRASTIVE_SCALES,
    "contrastive_patches": _CONTRASTIVE_SCALES,
    "caption": ("log-probability",),
    "answer": ("log-probability",),
    "custom": ("raw",),
    "none": ("none",),
}
GROUPS: dict[str, tuple[str, ...]] = {
    "feature representation": ("site", "stream", "layers", "attention"),
    "gradient target": ("target", "scale", "prompt", "gradient_path"),
    "token handling": ("gradient_tokens", "queries", "map_axis", "compose", "exclude"),
    "aggregation": ("weighting", "relu", "heads", "layer_rule", "discard", "departures"),
    "spatial reconstruction": ("reshape", "upsample", "normalize"),
}


def takes_gradient(weighting: str) -> bool:
    """Whether a weighting depends on the gradient of the target."""
    return weighting not in (*WITHOUT_GRADIENT, *ASKING, *COMPARING)


def takes_target(weighting: str) -> bool:
    """Whether a weighting depends on the target at all."""
    return weighting not in WITHOUT_GRADIENT
