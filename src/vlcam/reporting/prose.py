"""The methods paragraph of an explanation: every choice that matters, in sentences that can be pasted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vlcam import wording
from vlcam.markup import visible
from vlcam.reporting import aggregation, facts
from vlcam.reporting.older import completed
from vlcam.reporting.source import source

if TYPE_CHECKING:
    from vlcam.explanation import Explanation
    from vlcam.recipe import Recipe

__all__ = ["paragraph"]

_PATHS = {
    "direct": " along residual connections and FFNs only, the inputs of attention being detached",
    "block": ", the score being read from the output of each block in turn, {read}",
    "integrated": ", as the mean over 20 images from the mean colour of the preprocessing to the image (integrated "
    "gradients)",
}
_FORMS = {
    "one_head": "{From} the first of these blocks{on}, attention was computed with one head of full width.",
    "identity": "In the last block every token was handed its own value in place of attention.",
    "values": "On a second path, what attention of values with values gives in each of these blocks was added to the "
    "input of the first, without FFNs, and its sum was embedded as the model embeds its last block.",
}
_PROMPTS = {
    "phrase": "; the phrase alone was encoded",
    "in_place": "; the whole text was encoded, with every word but the phrase hidden from attention",
}
_NORMALIZED = {
    "none": "was not scaled",
    "minmax": "was scaled to 0..1 by its minimum and maximum",
    "max": "was divided by its largest magnitude",
    "sum": "was divided by the sum of its magnitudes",
}
_UPSAMPLED = {"nearest": "by nearest neighbour", "bilinear": "bilinearly", "bicubic": "bicubically"}


def paragraph(exp: Explanation) -> str:
    """The paragraph, in one line of plain text."""
    exp = completed(exp)
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
    return visible(" ".join(sentences))


def _explained(exp: Explanation) -> Iterator[str]:
    run, recipe = exp.provenance["run"], exp.recipe
    given = [facts.image_name(exp.provenance["image"]), *_texts(exp)]
    pair = facts.listed(given)
    if recipe.target == "none":
        yield f"The map was made of {pair}; it depends on no score."
    elif recipe.target == "custom":
        yield f"The map explains a scalar given as a callable, {run['target']!r} (its code not recorded), for {pair}."
    else:
        prompt = "" if recipe.target == "caption" else _PROMPTS.get(recipe.prompt, "")
        yield f"The map explains {wording.scored(recipe)}{_class(exp)} for {pair}{prompt}."
    yield from _phrases(exp)
    if run["against"]:
        yield f"{_AGAINST[facts.compares(recipe)]} {facts.listed([_quoted(text) for text in run['against']])}."
    answer = exp.provenance["answer"]
    if answer is not None:
        whose = "which the model wrote itself" if answer["written"] else "which was given"
        yield f"The answer is {_quoted(answer['given'])}, {whose}."


_AGAINST = {
    True: "The text was compared with",
    False: "The map does not depend on the other texts of the call,",
    None: "The other texts, where the score takes them into account, are",
}


def _texts(exp: Explanation) -> Iterator[str]:
    text = exp.provenance["text"]
    if text is None:
        return
    kind = "the question" if exp.provenance["answer"] else "the text"
    whole = f" of the text {_quoted(text['whole'])}" if "whole" in text else ""
    yield f"{kind} {_quoted(text['given'])}{whole}" + (", which the model wrote itself" if text.get("written") else "")


def _phrases(exp: Explanation) -> Iterator[str]:
    """Which words the score counts, and which the map is of."""
    run, recipe = exp.provenance["run"], exp.recipe
    if recipe.target == "caption" and recipe.prompt == "phrase":
        counted = run.get("target_phrase", run)
        yield f"Of its tokens only those of the phrase {_named(counted)} count in that score."
        if recipe.queries != "phrase":
            return
    if run["phrase"] is not None:
        yield f"It is the map of the phrase {_named(run)}."


def _named(phrase: Mapping[str, Any]) -> str:
    which = "" if phrase["occurrence"] is None else f" (occurrence {phrase['occurrence']})"
    return f"{_quoted(phrase['phrase'])}{which}"


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
        behind = recipe.site == "F6"
        yield _FORMS[recipe.attention].format(From="Behind" if behind else "From", on="" if behind else " on")
    if run["windows"] is not None:
        yield (
            f"Attention is within windows of {facts.size(run['windows']['size'])} tokens, shifted by "
            f"{facts.size(run['windows']['shift'])}{' in the first of these blocks' if len(run['layers']) > 1 else ''}."
        )
    if run["together_with"]:
        others = (f"{stream} blocks {facts.numbers(blocks)}" for stream, blocks in run["together_with"].items())
        yield f"Self-attention of {facts.listed(list(others))} was read with it."
    yield _differentiated(exp)


def _differentiated(exp: Explanation) -> str:
    recipe = exp.recipe
    if recipe.needs_gradient:
        scores = "scores_gradient" in recipe.departures
        what = "the scores that its softmax takes" if scores else "it"
        return f"The gradient of that score was taken with respect to {what}{_path(recipe)}."
    asked = exp.provenance["run"]["asked"]
    times = f" {asked} times" if asked else ""
    return "No gradient was taken" + (f"; the model was asked again{times}." if recipe.asks else ".")


def _path(recipe: Recipe) -> str:
    read = "by the final norm and the head of the model, from the mean of all tokens, or by its pooler where it has one"
    if recipe.stream == "pooler":
        norm = "without" if "bare_pooler" in recipe.departures else "behind"
        read = f"by the pooler of the model, {norm} the final norm"
    return _PATHS.get(recipe.gradient_path, "").format(read=read)


def _aggregation(exp: Explanation) -> Iterator[str]:
    yield _sentence("; ".join(aggregation.steps(exp)))
    departures = aggregation.departures(exp)
    if departures:
        yield f"As in published code, the computation departs from the formula: {'; '.join(departures)}."


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
        yield f"The explained score is {run['target']} = {facts.number(run['target_value'])}{_how(exp)}."
    if exp.status != "ok":
        yield f"The map has nothing to show: its status is {_quoted(exp.status)}."


def _how(exp: Explanation) -> str:
    """How the explained score differs from the one that the model gives; empty where it does not."""
    blocks = exp.provenance["run"]["block_values"]
    if blocks:
        return f"; read from the blocks it is {facts.listed([facts.number(value) for value in blocks])}"
    return ", with attention computed as said" if exp.recipe.attention in ("one_head", "identity") else ""


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
    return f'"{visible(text)}"'
