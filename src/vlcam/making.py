"""From planned recipes and prepared pairs to explanations: passes, maps, records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vlcam.adapter import ModelAdapter
from vlcam.anatomy import SCORES, VALUES, Tap
from vlcam.asking import BATCH, Progress, ask, questions
from vlcam.attention import Edit
from vlcam.batches import batch_record
from vlcam.capture import Capture, capture, integrated, run_heads
from vlcam.choices import ATTENTION_SITES, COMPARING
from vlcam.errors import EvidenceError, InputError
from vlcam.evidence import Known, NoGradientError, NotFiniteError, TokenMaps, nothing, token_maps
from vlcam.explanation import Explanation, WordMap
from vlcam.geometry import check_grid
from vlcam.naming import module_names
from vlcam.pairing import Pairs
from vlcam.plan import Job, in_passes
from vlcam.probe import where_alive
from vlcam.provenance import (
    SCHEMA,
    WeightsHash,
    class_records,
    model_record,
    run_record,
    tapped,
    text_record,
    versions,
)
from vlcam.readers import OF_CLASSES, OF_TEXTS, explained_classes
from vlcam.rows import Selection, select, select_words
from vlcam.scores import Scores
from vlcam.similarity import compared
from vlcam.targets import Target, unread
from vlcam.text import find_phrase, find_span
from vlcam.tokens import ImageTokens

__all__ = ["Asking", "Empty", "Making", "own_conditions"]

Empty = Literal["raise", "keep"]


@dataclass(frozen=True)
class Asking:
    """How variants are run for recipes that ask the model again; see `Explainer.explain`."""

    batch: int = BATCH
    progress: Progress | None = None

    def __post_init__(self) -> None:
        """Refuse what is no number of variants.

        Raises:
            InputError: not a whole number of 1 or more.
        """
        if isinstance(self.batch, bool) or not isinstance(self.batch, int) or self.batch < 1:
            raise InputError(f"batch={self.batch!r}: how many variants run at once, a whole number of 1 or more")


@dataclass(frozen=True, eq=False)
class Seen:
    """What one pass gave for one target: the tensors, and what records say of it."""

    found: Capture
    scores: Sequence[Scores]
    classes: Sequence[dict[str, Any] | None]
    model: Mapping[str, Any]


@contextmanager
def own_conditions(module: nn.Module) -> Iterator[None]:
    """The caller's inference_mode and autocast do not reach the model: it runs as it is, in its own precision."""
    device = next(module.parameters()).device.type
    with torch.inference_mode(mode=False), torch.no_grad(), torch.autocast(device, enabled=False):
        yield


@dataclass(frozen=True, eq=False)
class Making:
    """One call of the user: the model, the pairs, and how they are explained."""

    adapter: ModelAdapter
    name: str
    weights: WeightsHash
    pairs: Pairs
    asking: Asking = Asking()
    empty: Empty = "raise"
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    wholes: tuple[str, ...] = ()
    """For pairs whose texts are phrases: the text of each that the phrase is of."""
    also: tuple[Tap, ...] = ()
    """What every pass taps besides, so that it is computed as the pass of an explanation that is verified was."""

    def explanations(self, jobs: Sequence[Job]) -> list[list[Explanation]]:
        """For every job an explanation per pair; jobs that share a head share a pass."""
        results: list[list[Explanation]] = [[] for _ in jobs]
        selections = [self._selections(job) for job in jobs]  # a wrong phrase costs no pass
        for indices in in_passes(jobs):
            chosen = [jobs[index] for index in indices]
            for index, job, seen in zip(indices, chosen, self._run(chosen), strict=True):
                results[index] = [
                    self._one(job, seen, pair, selection) for pair, selection in enumerate(selections[index])
                ]
        return results

    def token_maps(self, jobs: Sequence[Job]) -> tuple[list[list[TokenMaps]], list[dict[str, Any]]]:
        """For every job the token maps of every pair, as `explanations` makes them, and for every pair one record.

        A map that is not finite, and with `empty="keep"` a gradient that is zero wherever a map would use it, gives a
        map of zeros with that status. The record says what the maps are of, and of which model, but not how each was
        made.
        """
        records: list[dict[str, Any]] = []
        results: list[list[TokenMaps]] = [[] for _ in jobs]
        selections = [self._selections(job) for job in jobs]
        for indices in in_passes(jobs):
            captures = self._captured([jobs[index] for index in indices])
            first = next(iter(captures))
            records = records or self._records(self.seen(*captures[first], asked=first))
            sharing: dict[tuple[Any, ...], list[int]] = {}
            for index in indices:
                sharing.setdefault((jobs[index].target, jobs[index].taps), []).append(index)
            for (target, _), these in sharing.items():
                _, found = captures[target if target in captures else first]
                for pair in range(len(self.pairs.inputs.image_of)):
                    known: Known = {}  # of one pair at these taps; nobody else needs any of it
                    for index in these:
                        results[index].append(self._lean(jobs[index], found, pair, selections[index][pair], known))
        return results, records

    def _lean(self, job: Job, found: Capture, pair: int, selection: Selection, known: Known) -> TokenMaps:
        self._check_tokens(job, found)
        try:
            return self._maps(job, found, pair, selection, known)
        except NotFiniteError:
            return nothing(selection, "not finite")

    def _records(self, seen: Seen) -> list[dict[str, Any]]:
        return [
            {
                "image": self.pairs.images[image][1],
                "text": self._text(pair),
                "answer": self._answer(pair),
                "against": self._against(pair),
                "class": seen.classes[pair],
                "model": dict(seen.model),
                "versions": dict(versions(self.adapter.library)),
            }
            for pair, image in enumerate(self.pairs.inputs.image_of)
        ]

    def seen(self, target: Target, found: Capture, *, asked: Target | None = None, edited: bool = False) -> Seen:
        """What records say of a pass, besides its tensors.

        Args:
            target: what was differentiated.
            found: the pass.
            asked: the target with the classes as they were named, where `target` has them filled in.
            edited: whether attention was not that of the model.
        """
        weights = self.weights.value()
        read = tapped(self.adapter, found.activations)
        inside = any(tap.site in (*ATTENTION_SITES, SCORES, VALUES) for tap in found.activations)
        record = model_record(self.adapter, self.name, weights, attention_tapped=inside or edited, read=read)
        scores = self._scores(target, found, weights, edited=edited)
        return Seen(found, scores, class_records(self.adapter, target, found, (asked or target).classes), record)

    def _scores(self, target: Target, found: Capture, weights: str, *, edited: bool) -> list[Scores]:
        """The scores of every pair; the first that is asked for another head's runs it for all of them."""
        adapter, inputs = self.adapter, self.pairs.inputs
        heads = {name: kind for name, kind in adapter.heads.items() if name not in adapter.readouts}
        known = {} if edited else {name: output for name, output in found.outputs.items() if name in heads}
        others = [head for head in heads if head not in known]
        # What further heads read, without the tensors of the pass.
        light = replace(found, activations={}, gradients={}, plain={}, windows={}, known={})

        @cache
        def fetch() -> dict[str, Tensor]:
            if self.weights.value() != weights:
                raise EvidenceError(
                    f"the scores of {', '.join(others)} were not read before the model's weights changed; explain again"
                )
            with own_conditions(adapter.module):
                plain = light
                if edited:  # the scores are the model's own
                    (plain,) = capture(adapter, inputs, [], [unread(others[0])])
                return run_heads(adapter, inputs, plain, others)

        pairs, later = range(len(inputs.image_of)), fetch if others else None
        if not set(heads.values()) & set(OF_TEXTS):
            region = target.weights if heads.get(target.head) == "pixels" else None
            return [Scores(heads, pair, known, later, target.classes, region) for pair in pairs]
        taking = self.pairs.compared
        counts = [1 if taking is None else int(taking[pair].sum()) for pair in pairs]
        return [Scores(heads, pair, known, later, inputs.text_of, taking, counts[pair]) for pair in pairs]

    def _names(self, stream: str) -> tuple[str, ...]:
        if stream not in self.names:
            self.names[stream] = module_names(self.adapter.anatomy.stream(stream), self.adapter.module)
        return self.names[stream]

    def _run(self, jobs: Sequence[Job]) -> list[Seen]:
        """One pass for jobs that share a head: for each what its target gave, and what records say of it."""
        edited = bool(self._edits(jobs[0]))
        seen = {
            asked: self.seen(target, found, asked=asked, edited=edited)
            for asked, (target, found) in self._captured(jobs).items()
        }
        first = next(iter(seen.values()))
        return [seen.get(job.target, first) for job in jobs]

    def _captured(self, jobs: Sequence[Job]) -> dict[Target, tuple[Target, Capture]]:
        """One pass for jobs that share a head: for each target, with its classes settled, what it gave.

        Jobs without a target take what the first one gave.
        """
        taps = list(dict.fromkeys([*(tap for job in jobs for tap in job.read), *self.also]))
        asked = list(dict.fromkeys(job.target for job in jobs if job.recipe.target != "none")) or [jobs[0].target]
        paths, inputs = {target.path for target in asked}, self.pairs.inputs
        edits = self._edits(jobs[0])
        targets = self._settled(asked) if edits else asked
        if "integrated" in paths:
            found = tuple(integrated(self.adapter, inputs, taps, target, edits=edits) for target in targets)
        else:
            found = capture(self.adapter, inputs, taps, targets, direct="direct" in paths, edits=edits)
        return dict(zip(asked, zip(targets, found, strict=True), strict=True))

    def _settled(self, targets: Sequence[Target]) -> Sequence[Target]:
        """Targets of the model's own classes where none was named: with other attention it may rank them otherwise."""
        head = targets[0].head
        if self.adapter.heads[head] not in OF_CLASSES or all(None not in each.classes for each in targets):
            return targets
        (plain,) = capture(self.adapter, self.pairs.inputs, [], [unread(head)])
        chosen = [explained_classes(plain.outputs[head], each.classes).tolist() for each in targets]
        return [target.of_classes(classes) for target, classes in zip(targets, chosen, strict=True)]

    def _edits(self, job: Job) -> dict[nn.Module, Edit]:
        """How attention modules compute otherwise than in the model; jobs of one pass agree on it."""
        streams, found = self.adapter.anatomy.streams, {}
        if job.edited is not None:
            stream, first = job.edited
            edit = Edit(job.recipe.attention, head_scale="head_scale" in job.recipe.departures)  # type: ignore[arg-type]
            for layer in range(first, len(streams[stream].blocks)):
                found[streams[stream].reading(layer, "F2").module] = edit
        if job.recipe.prompt == "in_place":
            hidden, text = self._hidden(job), self.adapter.anatomy.stream("text")
            for layer in range(len(text.blocks)):
                module = text.reading(layer, "F2").module
                found[module] = replace(found.get(module, Edit()), hidden=hidden)
        return found

    def _hidden(self, job: Job) -> Tensor:
        """Every word of a text but the phrase, [T, N]; texts that others are compared with keep theirs."""
        inputs = self.pairs.inputs
        if inputs.texts is None or job.phrase is None:
            raise InputError("prompt='in_place': there is no text, or no phrase of it")
        rows = next(iter(inputs.texts.tensors.values()))
        hidden = torch.zeros(rows.shape, dtype=torch.bool, device=rows.device)
        for text in dict.fromkeys(inputs.text_of):
            layout = inputs.texts.layouts[text]
            kept = layout.tokens_of(find_phrase(layout, job.phrase, job.occurrence))
            others = [i for i, flag in enumerate(layout.special) if not flag and i not in kept]
            hidden[text, others] = True
        return hidden

    def _selections(self, job: Job) -> list[Selection]:
        inputs, texts, recipe = self.pairs.inputs, self.pairs.inputs.texts, job.recipe
        pairs = range(len(inputs.image_of))
        if recipe.of_text:
            if texts is None or not texts.pooled:
                raise InputError("stream='text': this model has no text tower, or was given no text")
            count = next(iter(texts.tensors.values())).shape[1]
            return [
                select_words(recipe, texts.layouts[k], texts.pooled[k], count, full=texts.full) for k in inputs.text_of
            ]
        tokens = ImageTokens(self.adapter.prefix, self._grid(job))
        layouts = [texts.layouts[inputs.text_of[pair]] if texts else None for pair in pairs]
        stream = self.adapter.anatomy.stream(recipe.stream)
        return [select(recipe, each, tokens, job.phrase, job.occurrence, stream) for each in layouts]

    def _grid(self, job: Job) -> tuple[int, int]:
        """The grid of the blocks that a recipe reads."""
        return self.adapter.grid(job.recipe.stream, job.layers[0], self.pairs.inputs.images)

    def _check_tokens(self, job: Job, found: Capture) -> None:
        """Refuse tokens that are not the prefix and the grid."""
        if job.recipe.of_text or (job.taps[0] in found.windows and job.recipe.site in ATTENTION_SITES):
            return
        tap = job.pooler_tap or job.taps[0]
        axis = -1 if tap.site in ATTENTION_SITES else -2
        check_grid(found.activations[tap].shape[axis], len(self.adapter.prefix), self._grid(job))

    def _one(self, job: Job, seen: Seen, pair: int, selection: Selection) -> Explanation:
        inputs, found, grid = self.pairs.inputs, seen.found, selection.grid
        self._check_tokens(job, found)
        made = self._maps(job, found, pair, selection)
        raw = made.values.reshape(-1, *grid).cpu().numpy()
        image = inputs.image_of[pair]
        picture, image_record = self.pairs.images[image]
        cut = found.windows.get(job.taps[0])
        own: dict[str, Any] = {
            "class": seen.classes[pair],
            "asked": questions(job, found, selection),
            "modules": self._modules(job),
            "windows": None if cut is None else {"size": list(cut.window), "shift": list(cut.shift)},
            "against": self._against(pair),
            "apart": dict(made.apart),
            "pooled": self._pooled(pair),
            "batch": batch_record(self.pairs, pair, self.asking.batch if job.recipe.asks else None),
        }
        if job.recipe.prompt != "whole" and job.recipe.target != "caption":
            own["span"] = self._span(job, pair)
        return Explanation(
            tokens=raw[0],
            recipe=job.recipe,
            provenance={
                "schema": SCHEMA,
                "image": image_record,
                "text": self._text(pair),
                "answer": self._answer(pair),
                "model": dict(seen.model),
                "run": run_record(self.adapter, job, found, pair, selection, grid) | own,
                "versions": dict(versions(self.adapter.library)),
                "seed": None,
            },
            scores=seen.scores[pair],
            status=made.statuses[0],
            image=picture,
            placement=inputs.images.placements[image],
            word_maps=_word_maps(selection, raw, made),
            attachments=self.pairs.attachments[image],
        )

    def _text(self, pair: int) -> dict[str, Any] | None:
        """The text that the model read, and for a phrase the text that it is of."""
        inputs = self.pairs.inputs
        if inputs.texts is None:
            return None
        more: dict[str, Any] = {"whole": self.wholes[pair]} if self.wholes else {}
        if self.pairs.written and self.adapter.writes == "caption":
            more["written"] = True
        return text_record(inputs.texts.layouts[inputs.text_of[pair]]) | more

    def _answer(self, pair: int) -> dict[str, Any] | None:
        """The answer to the pair's question, and whether it is the model's own."""
        answers = self.pairs.inputs.answers
        if answers is None:
            return None
        return text_record(answers.layouts[pair]) | {"written": self.pairs.written}

    def _span(self, job: Job, pair: int) -> list[int]:
        """Where the phrase that is encoded stands in the text."""
        inputs = self.pairs.inputs
        if job.phrase is None or inputs.texts is None:
            raise InputError(f"prompt={job.recipe.prompt!r}: there is no text, or no phrase of it")
        text = self.wholes[pair] if self.wholes else inputs.texts.layouts[inputs.text_of[pair]].text
        return list(find_span(text, job.phrase, job.occurrence))

    def _modules(self, job: Job) -> list[str]:
        names = self._names(job.recipe.stream)
        return [names[0]] if job.target.pooler else [names[layer] for layer in job.layers]

    def _against(self, pair: int) -> list[str]:
        """The texts that scores, and the target if it does so, compare the pair's own with."""
        of_texts = set(self.adapter.heads.values()) & set(OF_TEXTS)
        return self.pairs.others(pair) if of_texts else []

    def _pooled(self, pair: int) -> dict[str, Any] | None:
        """From which position the text tower read the pair's text."""
        inputs = self.pairs.inputs
        if inputs.texts is None or not inputs.texts.pooled:
            return None
        text = inputs.text_of[pair]
        position, pieces = inputs.texts.pooled[text], inputs.texts.layouts[text].pieces
        return {"position": position, "piece": pieces[position] if position < len(pieces) else None}

    def _maps(self, job: Job, found: Capture, pair: int, selection: Selection, known: Known | None = None) -> TokenMaps:
        answers, inputs = None, self.pairs.inputs
        if job.recipe.asks:
            batch, progress = self.asking.batch, self.asking.progress
            answers = ask(self.adapter, inputs, job, found, pair, selection, batch=batch, progress=progress)
        if job.recipe.weighting in COMPARING and self.pairs.compared is not None:
            taking = self.pairs.compared[pair]
            answers = compared(self.adapter, inputs, job, found, pair, selection, taking)
        try:
            return token_maps(job, found, pair, selection, answers, known)
        except NoGradientError as error:
            if self.empty == "keep":
                return nothing(selection)
            raise NoGradientError(f"{error}; {where_alive(self.adapter, inputs, job, pair)}") from None


def _word_maps(selection: Selection, raw: Any, made: TokenMaps) -> tuple[WordMap, ...]:
    rows = zip(selection.words, raw[1:], made.statuses[1:], strict=True)
    return tuple(WordMap(word.text, word.span, word.tokens, tokens, status) for word, tokens, status in rows)
