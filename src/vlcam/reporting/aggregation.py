"""How a tensor and its gradient became a map, in words, in the order in which it was done."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vlcam.choices import ATTENTION_SITES, CARRIED, FLOWS
from vlcam.reporting import facts
from vlcam.text import lay_out

if TYPE_CHECKING:
    from vlcam.explanation import Explanation

__all__ = ["departures", "steps"]

_SUMMED = "and the weighted channels were summed"
_CARRIED = "and the result was weighted by the positive gradient of attention in the last block, its mean over heads"
_WEIGHTINGS = {
    "gradcam": f"each channel was weighted by the mean of its gradient over {{pool}}, {_SUMMED}",
    "gradcam++": f"each channel was weighted as in Grad-CAM++, from its gradient over {{pool}}, {_SUMMED}",
    "xgradcam": f"each channel was weighted as in XGrad-CAM, from its gradient over {{pool}}, {_SUMMED}",
    "layercam": "activation times the positive part of its gradient was summed over channels",
    "hirescam": "activation times gradient was summed over channels",
    "elementwise": "the positive part of activation times gradient was summed over channels",
    "eigencam": "the first principal component of the activation over the map's cells was taken, its sign such that "
    "its value of largest magnitude is positive",
    "eigengradcam": "the first principal component of activation times gradient over the map's cells was taken, its "
    "sign such that its value of largest magnitude is positive",
    "scorecam": "each channel was weighted by the softmax over channels of the scores of the image masked by that "
    f"channel, {_SUMMED}",
    "ablationcam": "each channel was weighted by the relative drop of the score when that channel was set to zero, "
    f"{_SUMMED}",
    "reciprocam": "each token was given the score that is left when only its neighbourhood is kept",
    "value*gradient": "the values that attention mixes were weighted by the gradient, at {pool}, of what the heads "
    "make of them, and summed over channels",
    "value*gradient*similarity": "the values that attention mixes were weighted by the gradient, at {pool}, of what "
    "the heads make of them, and by the similarity of their keys with the query there, and summed over channels",
    "similarity": "each token was given the cosine of its embedding with that of the text",
    "surgery": "each token was given the cosine of its embedding with that of the text, less what all texts have in "
    "common",
    "none": "the activation was averaged over channels",
    "attention": "the attention probabilities were taken as they are",
    "gradient": "the gradient of the attention probabilities was taken alone",
    "attention*gradient": "attention was multiplied by its gradient, element by element",
    "sigmoid*gradient": "the sigmoid of the attention scores was multiplied by the gradient, element by element",
    "head_weights": "the attention of each head was weighted by the mean of its gradient over {pool}",
}
_NEGATIVE = {
    "none": "negative values were kept",
    "gradient": "negative gradients were set to zero first",
    "negative_gradient": "positive gradients were set to zero first",
    "before_heads": "negative values were set to zero before heads were merged",
    "after_heads": "negative values were set to zero after heads were merged",
    "map": "negative values of the map were set to zero",
}
_HEADS = {
    "mean": "heads were averaged",
    "sum": "heads were summed",
    "max": "the maximum over heads was taken",
    "min": "the minimum over heads was taken",
}
_LAYERS = {
    "mean": "the maps of the blocks were averaged",
    "sum": "the maps of the blocks were summed",
    "max": "the maximum over the maps of the blocks was taken",
    "shared": "the gradients of all blocks that read the tensor were added",
    "rollout": "the matrices of the blocks, with the identity added and scaled by sums of rows, were multiplied, the "
    "first block applied first",
    "relevance": "starting from the identity, the matrix of each block times the relevance so far was added to that "
    "relevance, from the first block to the last",
    "transition": "attention of the last block, its mean over heads, was carried on through the mean attention of each "
    f"block below it, {_CARRIED}",
    "headwise": "attention, its heads weighted by attention times gradient at the image itself, was carried from the "
    f"first block to the last, {_CARRIED}",
    "tokenwise": "the mean attention over heads, its tokens weighted by the length of their values relative to their "
    f"own, was carried from the first block to the last, {_CARRIED}",
}
_BIMODAL = (
    "self-attention of the text was treated likewise and multiplied up to its relevance, from the first block to the "
    "last; wherever the text looks at the image, cross-attention between the relevance of the text and {image}, each "
    "row of a relevance scaled to a sum of 1, was added to what had reached the text so far"
)
_IMAGE = {"none": "the image's tokens as they are", "vision": "that of self-attention in the image tower"}
_POOLER = "columns were carried on to the patches by the attention of the pooler, its mean over heads"
_TOKENS = {
    "cls": "the class token",
    "pooled": "the token from which the text is read",
    "registers": "the register tokens",
    "patches": "the patches",
    "phrase": "the tokens of the phrase",
    "all": "all tokens",
}
_DEPARTURES = {
    "column_scaling": "each column was divided by the sum of the row of the same number, in place of each row by its "
    "own",
    "mirrored_layers": "the gradient of the first block was taken for that of the last, and so on inwards",
    "scores_gradient": "the gradient was that of the scores before the softmax",
    "unprotected": "what the class token pays to itself could be set to zero too",
    "summed_cubes": "the weight's denominator sums activation times the cube of the gradient",
    "no_denominator": "the weights have no denominator",
    "aligned_corners": "masks were laid over the image with corners aligned, and scaled to 0..1 then",
    "one_token": "the neighbourhood of a token is that token",
    "bare_pooler": "the pooler read the blocks without the final norm",
    "padded_similarity": "similarity was scaled over the padding too",
    "head_scale": "scores were divided by the root of the width of the model's own heads",
}


def steps(exp: Explanation) -> Iterator[str]:
    """What was done, a phrase for each step in order, in the past tense."""
    recipe = exp.recipe
    if recipe.layer_rule in CARRIED:
        yield from (_LAYERS[recipe.layer_rule], _rows(exp))
    elif recipe.site in ATTENTION_SITES and recipe.heads != "channels":
        yield from _attention(exp)
    else:
        yield from _channels(exp)


def departures(exp: Explanation) -> list[str]:
    """Where the computation departs from the formula, a phrase for each, with its name."""
    return [f"{_DEPARTURES[name]} ({name})" for name in exp.recipe.departures]


def _attention(exp: Explanation) -> Iterator[str]:
    recipe = exp.recipe
    late = recipe.relu in ("none", "map")
    yield _WEIGHTINGS[recipe.weighting].format(pool=_pooled_rows(exp))
    heads = [_HEADS[recipe.heads]]
    if not late:
        heads.insert(1 if recipe.relu == "after_heads" else 0, _NEGATIVE[recipe.relu])
    yield from heads
    if recipe.compose == "pooler":
        yield _POOLER
    if recipe.layer_rule in FLOWS:
        yield from _flow(exp)
    yield _rows(exp)
    if late and recipe.weighting != "attention":  # which is never negative
        yield _NEGATIVE[recipe.relu]
    if recipe.layer_rule not in (*FLOWS, "single"):
        yield _LAYERS[recipe.layer_rule]


def _channels(exp: Explanation) -> Iterator[str]:
    recipe = exp.recipe
    if recipe.heads == "channels":
        likewise = ", and that of its gradient likewise" if recipe.needs_gradient else ""
        yield f"heads were taken for channels; {_rows(exp)}{likewise}"
    if recipe.layer_rule == "shared":
        yield _LAYERS["shared"]
    less = recipe.weighting == "similarity" and recipe.scale == "difference"
    other = ", less its mean cosine with the other texts" if less else ""
    yield _WEIGHTINGS[recipe.weighting].format(pool=_tokens(exp, recipe.gradient_tokens)) + other
    if recipe.weighting != "elementwise":
        yield _NEGATIVE[recipe.relu]
    # On a second path of values blocks are summed before there is a map.
    if recipe.layer_rule not in ("single", "shared") and recipe.attention != "values":
        yield _LAYERS[recipe.layer_rule]


def _flow(exp: Explanation) -> Iterator[str]:
    recipe = exp.recipe
    if recipe.bimodal:
        yield _BIMODAL.format(image=_IMAGE[recipe.compose])
        return
    if recipe.discard:
        protected = exp.provenance["run"]["prefix_tokens"] and "unprotected" not in recipe.departures
        but = ", but for what the class token pays to itself" if protected else ""
        yield f"the smallest {100 * recipe.discard:g} % of the entries of each block were set to zero{but}"
    yield _LAYERS[recipe.layer_rule]


def _rows(exp: Explanation) -> str:
    rows = exp.provenance["run"]["rows"]
    indices = f" ({facts.numbers(rows)})" if rows else ""
    told = ", each told by the row before it," if isinstance(exp.recipe.queries, str) and _tells_next(exp) else ""
    return f"the mean over the {_axis(exp)} of {_tokens(exp, exp.recipe.queries)}{indices}{told} was taken"


def _axis(exp: Explanation) -> str:
    return "columns (keys)" if exp.recipe.map_axis == "queries" else "rows (queries)"


def _pooled_rows(exp: Explanation) -> str:
    """Over which entries of attention the gradient is pooled into a weight per head."""
    recipe = exp.recipe
    if recipe.gradient_tokens == "all":
        return "all rows and columns" + ("" if recipe.site == "CROSS" else _but(exp))
    return f"the patches in the {_axis(exp)} of {_tokens(exp, recipe.queries)}"


def _tokens(exp: Explanation, which: str | tuple[int, ...]) -> str:
    recipe = exp.recipe
    slots, text = recipe.site == "CROSS" and recipe.stream == "pooler", recipe.site == "CROSS" or recipe.of_text
    if not isinstance(which, str):
        return "the given queries" if slots else "the given tokens"
    if slots:
        return "all learned queries"
    special = {"cls": "the first token of the text", "patches": "the tokens of words"} if text else {}
    return (special | {"none": ""}).get(which) or _TOKENS.get(which, "") + (_but(exp) if which == "all" else "")


def _but(exp: Explanation) -> str:
    """The tokens of those that there are which `all` leaves out."""
    recipe, prefix = exp.recipe, exp.provenance["run"]["prefix_tokens"]
    if recipe.of_text or (recipe.site == "CROSS" and recipe.stream != "fusion"):
        return ""
    if recipe.site == "CROSS":
        return " but the special ones" if "special_text" in recipe.exclude else ""
    out = [name for name in ("registers", "distillation") if name in recipe.exclude and name.rstrip("s") in prefix]
    return f" but {facts.listed(out)}" if out else ""


def _tells_next(exp: Explanation) -> bool:
    """Whether each row of the text tells the token behind it, so that words stand one row before their tokens."""
    text = exp.provenance["text"]
    if not exp.word_maps or text is None:
        return False
    layout = lay_out(text["given"], *(text[part] for part in ("ids", "pieces", "spans", "special")))
    return all(list(word.rows) == [token - 1 for token in layout.tokens_of(word.span)] for word in exp.word_maps)
