"""Fields and their values in words, for sentences that a paper can take over."""

from __future__ import annotations

from typing import Any

__all__ = ["SENTENCES", "in_words"]

SENTENCES = {
    "site": "The map is read at {}.",
    "stream": "The map is read in {}.",
    "layers": "It is read at {}.",
    "attention": "Attention is computed {}.",
    "target": "The explained score is {}.",
    "scale": "The gradient is that of {}.",
    "prompt": "The text that is encoded is {}.",
    "gradient_path": "Gradients pass {}.",
    "gradient_tokens": "Gradients are averaged over {}.",
    "queries": "The map is the mean over {}.",
    "map_axis": "A cell of the map is {}.",
    "compose": "Cross-attention is {}.",
    "exclude": "Besides the class token, {}.",
    "weighting": "Activation and gradient are combined as {}.",
    "relu": "Negative values are {}.",
    "heads": "Attention heads are {}.",
    "layer_rule": "Layers are {}.",
    "discard": "Of each attention matrix, {}.",
    "departures": "The formula is computed {}.",
    "reshape": "Tokens become {}.",
    "upsample": "The map is brought to the size of the image by {}.",
    "normalize": "The map is {}.",
}
"""What a paper would say of each field, with a gap for the value."""

_WORDS: dict[str, dict[Any, str]] = {
    "site": {
        "F1": "the output of the LayerNorm before attention",
        "F2": "the self-attention probabilities",
        "F3": "the attention output after the output projection",
        "F3_HEADS": "the attention output before the output projection",
        "F4": "the output of the LayerNorm before the FFN",
        "F5": "the FFN output before the residual sum",
        "F6": "the output of the block",
        "CROSS": "the cross-attention probabilities",
        "CONTEXT": "the image tokens that feed cross-attention",
    },
    "stream": {
        "vision": "the image encoder",
        "text": "the text encoder",
        "pooler": "the attention that pools the image tokens",
        "fusion": "the blocks in which text looks at the image",
    },
    "attention": {
        "own": "as in the model",
        "one_head": "with one head of full width",
        "identity": "so that every token of the last block attends to itself alone",
        "values": "on a second path, of values with values",
    },
    "target": {
        "class": "a class of the classifier",
        "segmentation": "a class, summed over the pixels of a region",
        "itm": "the image-text matching score",
        "contrastive": "the similarity of image and text",
        "contrastive_patches": "the similarity of the mean of the patches and the text",
        "caption": "the likelihood of the caption",
        "answer": "the likelihood of the answer",
        "custom": "a score of our own",
        "none": "none; the map depends on no score",
    },
    "scale": {
        "logit": "the logit",
        "probability": "the probability",
        "log-probability": "the log-probability",
        "margin": "the logit less that of the runner-up",
        "difference": "the cosine less the mean cosine of other texts",
        "finer": "the contrast with the three nearest classes",
        "cosine": "the cosine",
        "raw": "the score as it is",
        "none": "nothing",
    },
    "prompt": {
        "whole": "the whole text",
        "phrase": "the phrase alone",
        "in_place": "the whole text, with all words but the phrase hidden",
    },
    "gradient_path": {
        "full": "through the whole model",
        "direct": "through residual connections and FFNs only",
        "block": "from the output of each block to that block alone",
        "integrated": "through the model at 20 images between the mean colour and the image, and are averaged",
        "none": "nowhere; there is no gradient",
    },
    "gradient_tokens": {
        "cls": "the class token alone",
        "patches": "the patches without the class token",
        "pooled": "the token that is pooled",
        "all": "all tokens with the class token",
        "none": "nothing: each token keeps its own, or there is no gradient",
    },
    "queries": {
        "cls": "the row of the class token alone",
        "registers": "the rows of the register tokens",
        "patches": "the rows of the patches",
        "pooled": "the row of the pooled token",
        "all": "all rows",
        "phrase": "the rows of the phrase",
        "none": "nothing: token features have no query rows",
    },
    "map_axis": {
        "keys": "a key: the attention that a token receives",
        "queries": "a query: the attention that a token gives",
        "none": "a token of features, which have no rows and columns",
    },
    "compose": {
        "none": "not carried on",
        "pooler": "carried on to the patches by the pooler's attention",
        "vision": "carried on by the relevance of the image's self-attention",
    },
    "weighting": {
        "gradcam": "channels weighted by their mean gradient (Grad-CAM)",
        "gradcam++": "channels weighted as in Grad-CAM++",
        "xgradcam": "channels weighted as in XGrad-CAM",
        "layercam": "activation times the positive gradient (LayerCAM)",
        "hirescam": "activation times gradient (HiResCAM)",
        "elementwise": "the positive part of activation times gradient",
        "eigencam": "the first principal component of the activation",
        "eigengradcam": "the first principal component of activation times gradient",
        "scorecam": "channels weighted by the scores of masked images (Score-CAM)",
        "ablationcam": "channels weighted by the drop of the score without them (Ablation-CAM)",
        "reciprocam": "the score when only a neighbourhood of each token is left",
        "value*gradient": "attention's values weighted by the gradient of what the heads make of them",
        "value*gradient*similarity": "values weighted by gradient and key similarity (Grad-ECLIP)",
        "similarity": "the cosine of each token's embedding with the text",
        "surgery": "the cosine of each token's embedding with the text, less what all texts share",
        "none": "the mean over channels, without a gradient",
        "attention": "the attention probabilities alone",
        "gradient": "the gradient alone",
        "attention*gradient": "attention probabilities times their gradient",
        "sigmoid*gradient": "the sigmoid of the attention scores times the gradient",
        "head_weights": "attention heads weighted by their mean gradient",
    },
    "relu": {
        "none": "kept",
        "gradient": "removed from the gradient",
        "negative_gradient": "all that is kept of the gradient",
        "before_heads": "removed from each head's product",
        "after_heads": "removed after heads are merged",
        "map": "removed from the map of each block",
    },
    "heads": {
        "mean": "averaged",
        "sum": "added",
        "max": "merged by their maximum",
        "min": "merged by their minimum",
        "channels": "taken for channels",
        "none": "not apart in the token features that are read",
    },
    "layer_rule": {
        "single": "not merged: there is one",
        "mean": "averaged",
        "sum": "added",
        "max": "merged by their maximum",
        "shared": "merged by adding their gradients",
        "rollout": "merged by attention rollout",
        "relevance": "merged by the relevance rule of Chefer et al.",
        "transition": "merged by transition attention",
        "headwise": "merged by head-wise Beyond Intuition",
        "tokenwise": "merged by token-wise Beyond Intuition",
    },
    "reshape": {"raster": "a grid in reading order", "words": "words in order"},
    "upsample": {
        "nearest": "repeating the nearest cell",
        "bilinear": "bilinear interpolation",
        "bicubic": "bicubic interpolation",
        "none": "nothing: it is over words",
    },
    "normalize": {
        "none": "not scaled",
        "minmax": "scaled to 0..1",
        "max": "divided by its largest magnitude",
        "sum": "divided by the sum of its magnitudes",
    },
}
_TOKENS = {
    "registers": "the register tokens",
    "distillation": "the distillation token",
    "special_text": "the special tokens of the text",
    "padding": "padding",
}


def in_words(field: str, value: Any) -> str:
    """A value as it stands in the gap of its field's sentence."""
    if field == "layers":
        return _layers(value)
    if field == "exclude":
        return _left_out([name for name in value if name != "cls"])
    if field == "discard":
        return f"the smallest {value:.0%} of all entries are set to zero" if value else "nothing is set to zero"
    if field == "departures":
        return f"as in published code ({', '.join(value)})" if value else "as it stands"
    if field == "queries" and isinstance(value, tuple):
        return f"the rows {', '.join(map(str, value))}"
    return _WORDS[field][value]


def _left_out(names: list[str]) -> str:
    if not names:
        return "nothing is left out"
    one = len(names) == 1 and names[0] in ("distillation", "padding")
    return f"{' and '.join(_TOKENS[name] for name in names)} {'is' if one else 'are'} left out"


def _layers(value: Any) -> str:
    if isinstance(value, str):
        return {"last": "the last block", "all": "all blocks"}[value]
    several = "blocks" if len(value) > 1 else "block"
    return f"{several} {', '.join(map(str, value))}, counted from 0"
