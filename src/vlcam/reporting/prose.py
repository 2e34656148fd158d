"""The methods paragraph of an explanation: every choice that matters, in sentences that can be pasted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vlcam import wording
from vlcam.choices import ATTENTION_SITES, takes_target
from vlcam.reporting import facts
from vlcam.reporting.source import source

if TYPE_CHECKING:
    from vlcam.explanation import Explanation

__all__ = ["paragraph"]

_SUMMED = "and the weighted channels were summed"
_WEIGHTINGS = {
    "gradcam": f"each channel was weighted by the mean of its gradient over {{pool}}, {_SUMMED}",
    "gradcam++": f"each channel was weighted as in Grad-CAM++, from its gradient over {{pool}}, {_SUMMED}",
    "xgradcam": f"each channel was weighted as in XGrad-CAM, from its gradient over {{pool}}, {_SUMMED}",
    "layercam": "activation times the positive part of its gradient was summed over channels",
    "hirescam": "activation times gradient was summed over channels",
    "elementwise": "the positive part of activation times gradient was summed over channels",
    "eigencam": "the first principal component of the activation over the patches was taken, its sign such that its "
    "value of largest magnitude is positive",
    "eigengradcam": "the first principal component of activation times gradient over the patches was taken, its sign "
    "such that its value of largest magnitude is positive",
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
    "channels": "heads were taken for channels",
}
_LAYERS = {
    "mean": "the maps of the blocks were averaged",
    "sum": "the maps of the blocks were summed",
    "max": "the maximum over the blocks was taken",
    "shared": "the gradients of all blocks that read the tensor were added",
    "rollout": "the matrices of the blocks, with the identity added and scaled by sums of rows, were multiplied, the "
    "first block applied first",
    "relevance": "starting from the identity, the matrix of each block times the relevance so far was added to that "
    "relevance, from the first block to the last",
    "transition": "the mean attention of each block was carried from the last block to the first, and the result was "
    "weighted by the positive gradient of attention in the last block",
    "headwise": "attention, its heads weighted by their gradient, was carried from the first block to the last, and "
    "the result was weighted by the positive gradient of attention in the last block",
    "tokenwise": "attention, its tokens weighted by the length of their values, was carried from the first block to "
    "the last, and the result was weighted by the positive gradient of attention in the last block",
}
_PATHS = {
    "direct": " along residual connections and FFNs only, the inputs of attention being detached",
    "block": ", each block being read at its own output by the final norm and head of the model",
    "integrated": ", as the mean over 20 images from the mean colour to the image (integrated gradients)",
}
_FORMS = {
    "one_head": "From the first of these blocks on, attention was computed with one head of full width.",
    "identity": "In the last block every token was handed its own value in place of attention.",
    "values": "Attention was read on a second path on which values attend to values.",
}
_COMPOSED = {
    "pooler": "columns were carried on to the patches by the attention of the pooler",
    "vision": "columns were carried on by the relevance of self-attention in the image tower",
}
_PROMPTS = {
    "phrase": "; the phrase alone was encoded",
    "in_place": "; the whole text was encoded, with every word but the phrase hidden from attention",
}
_NORMALIZED = {
    "none": "was not scaled",
    "minmax": "was scaled to 0..1 by its minimum and maximum",
    "max": "was divided by its maximum",
    "sum": "was divided by its sum",
}
_UPSAMPLED = {"nearest": "by nearest neighbour", "bilinear": "bilinearly", "bicubic": "bicubically"}
_TOKENS = {
    "cls": "the class token",
    "pooled": "the token from which the text is read",
    "registers": "the register tokens",
    "patches": "the patches",
    "all": "all tokens",
}


def paragraph(exp: Explanation) -> str:
    """The paragraph, in one line of plain text."""
    sentences = (
        *_explained(exp),
        _model(exp),
        *_preprocessing(exp),
        *_tensor(exp),
        *_aggregation(exp),
        *_left_out(exp),
        _reconstruction(exp),
        *_found(exp),
        *_origin(exp),
        _software(exp),
    )
    return " ".join(filter(None, sentences))


def _explained(exp: Explanation) -> Iterator[str]:
    run, recipe = exp.provenance["run"], exp.recipe
    given = [facts.image_name(exp.provenance["image"])]
    if exp.text is not None:
        kind = "the question" if exp.provenance["answer"] else "the text"
        given.append(f"{kind} {_quoted(exp.text)}")
    pair = facts.listed(given)
    if recipe.target == "none":
        yield f"The map was made of {pair}; it depends on no score."
    elif recipe.target == "custom":
        yield f"The map explains a scalar given as a callable, {run['target']!r} (its code not recorded), for {pair}."
    else:
        yield f"The map explains {wording.scored(recipe)}{_class(exp)} for {pair}{_PROMPTS.get(recipe.prompt, '')}."
    if run["phrase"] is not None:
        which = "" if run["occurrence"] is None else f" (occurrence {run['occurrence']})"
        yield f"It is the map of the phrase {_quoted(run['phrase'])}{which}."
    if run["against"] and takes_target(recipe.weighting):
        yield f"The text was compared with {facts.listed([_quoted(text) for text in run['against']])}."
    answer = exp.provenance["answer"]
    if answer is not None:
        whose = "which the model wrote itself" if answer["written"] else "which was given"
        yield f"The answer is {_quoted(answer['given'])}, {whose}."


def _class(exp: Explanation) -> str:
    explained = exp.provenance["run"]["class"]
    if explained is None:
        return ""
    named = f"class {explained['index']}" + ("" if explained["label"] is None else f", {explained['label']}")
    chosen = "" if explained["chosen"] == "as given" else f"the class with the {explained['chosen']}"
    return f" ({'; '.join(filter(None, [named, chosen, facts.region(explained)]))})"


def _model(exp: Explanation) -> str:
    record = exp.provenance["model"]
    version = exp.provenance["versions"].get(record["library"], "")
    library = " ".join(filter(None, [record["library"], version]))
    return (
        f"The model is {facts.model_class(record)} of {library} ({record['id']}, weights with SHA-256 "
        f"{record['weights_sha256'][:12]}...), run in {record['dtype']} on {record['device']}; attention: "
        f"{record['attention']['used']}."
    )


def _preprocessing(exp: Explanation) -> Iterator[str]:
    record = exp.provenance["image"]
    done = facts.listed(facts.steps(record))
    if done:
        yield f"The image of {facts.size(record['size'])} pixels (height x width) was {done}."
    yield f"The model saw {facts.seen(exp)}, as {facts.size(exp.placement.model)} pixels."


def _tensor(exp: Explanation) -> Iterator[str]:
    run, recipe = exp.provenance["run"], exp.recipe
    where = f"of {facts.blocks(run)} of the {recipe.stream} stream"
    if recipe.stream == "pooler" and recipe.gradient_path == "block":
        where = f"of the pooler as it reads {facts.blocks(run)} of the vision stream in turn"
    named = ", ".join(filter(None, [where, facts.modules(run)]))
    yield f"The tensor that was read is {recipe.site}, the {wording.tensor(recipe)}, {named}."
    if recipe.attention != "own":
        yield _FORMS[recipe.attention]
    if run["windows"] is not None:
        yield (
            f"Attention is within windows of {facts.size(run['windows']['size'])} tokens, shifted by "
            f"{facts.size(run['windows']['shift'])}."
        )
    if recipe.needs_gradient:
        yield f"The gradient of that score was taken with respect to it{_PATHS.get(recipe.gradient_path, '')}."
    elif recipe.asks:
        yield f"No gradient was taken; the model was asked again {run['asked']} times."
    else:
        yield "No gradient was taken."


def _aggregation(exp: Explanation) -> Iterator[str]:
    recipe = exp.recipe
    parts = [_WEIGHTINGS[recipe.weighting].format(pool=_TOKENS.get(recipe.gradient_tokens, ""))]
    if takes_target(recipe.weighting) and recipe.weighting != "elementwise":
        parts.append(_NEGATIVE[recipe.relu])
    if recipe.heads != "none":
        parts.append(_HEADS[recipe.heads])
    if recipe.discard:
        parts.append(f"the smallest {recipe.discard:.0%} of the entries of each block were set to zero")
    if recipe.layer_rule != "single":
        parts.append(_LAYERS[recipe.layer_rule])
    yield _sentence("; ".join(parts))
    if recipe.site in ATTENTION_SITES and recipe.queries != "none":
        yield _rows(exp)
    if recipe.compose != "none":
        yield _sentence(_COMPOSED[recipe.compose])
    if recipe.departures:
        yield f"As in published code, the computation departs from the formula in {facts.listed(recipe.departures)}."


def _rows(exp: Explanation) -> str:
    recipe, rows = exp.recipe, exp.provenance["run"]["rows"]
    axis = "rows (queries)" if recipe.map_axis == "keys" else "columns (keys)"
    indices = f" ({facts.numbers(rows)})" if rows else ""
    told = "; a token of the caption is told by the row before it" if recipe.target == "caption" else ""
    return f"The map is the mean over the {axis} of {_queried(exp)}{indices}{told}."


def _queried(exp: Explanation) -> str:
    queries = exp.recipe.queries
    if not isinstance(queries, str):
        return "the given tokens"
    return "the tokens of the phrase" if queries == "phrase" else _TOKENS[queries]


def _left_out(exp: Explanation) -> Iterator[str]:
    run, text = exp.provenance["run"], exp.provenance["text"]
    if run["dropped"]:
        yield f"Left out of the map: {'; '.join(facts.dropped(part) for part in run['dropped'])}."
    if text is not None and (text["cut_text"] or text["cut"]):
        yield f"The model did not read the end of the text: {_quoted(text['cut_text'] or ' '.join(text['cut']))}."


def _reconstruction(exp: Explanation) -> str:
    recipe, grid = exp.recipe, exp.provenance["run"]["grid"]
    scaled = _NORMALIZED[recipe.normalize]
    if recipe.of_text:
        return f"The {grid[1]} text tokens were summed by word, and the result {scaled} for display."
    return (
        f"The map of {facts.size(grid)} tokens in raster order {scaled} and interpolated {_UPSAMPLED[recipe.upsample]} "
        f"to the {facts.size(exp.placement.original)} pixels of the image."
    )


def _found(exp: Explanation) -> Iterator[str]:
    run = exp.provenance["run"]
    if run["target_value"] is not None:
        yield f"The explained score is {run['target']} = {facts.number(run['target_value'])}."
    if exp.status != "ok":
        yield f"The map has nothing to show: its status is {_quoted(exp.status)}."


def _origin(exp: Explanation) -> Iterator[str]:
    found, recipe = source(exp), exp.recipe
    named = f"the recipe {_quoted(recipe.name)} (fingerprint {recipe.fingerprint})"
    if found.entry is None:
        yield f"All choices make up {named}, which is not in the catalogue of published recipes."
        return
    yield f"All choices make up {named}, after {_closed(found.citation)}"
    if found.differences:
        yield f"It differs from the published recipe: {'; '.join(found.differences)}."


def _software(exp: Explanation) -> str:
    drawn = "no random numbers were drawn" if exp.provenance["seed"] is None else f"seed {exp.provenance['seed']}"
    return f"Computed with {facts.versions(exp.provenance['versions'])}; {drawn}."


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _closed(text: str) -> str:
    return text if text.endswith(".") else f"{text}."


def _quoted(text: str) -> str:
    return f'"{" ".join(text.split())}"'
