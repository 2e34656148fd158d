"""From planned recipes and prepared pairs to explanations: passes, maps, records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vlcam.adapter import ModelAdapter
from vlcam.anatomy import SCORES, VALUES
from vlcam.asking import BATCH, Progress, ask, questions
from vlcam.capture import Capture, capture, integrated, run_heads
from vlcam.choices import ATTENTION_SITES
from vlcam.errors import EvidenceError, InputError
from vlcam.evidence import NoGradientError, TokenMaps, nothing, token_maps
from vlcam.explanation import Explanation, WordMap
from vlcam.geometry import check_grid
from vlcam.naming import module_names
from vlcam.pairing import Pairs
from vlcam.plan import Job, in_passes
from vlcam.probe import where_alive
from vlcam.provenance import SCHEMA, WeightsHash, class_records, model_record, run_record, text_record, versions
from vlcam.rows import Selection, select
from vlcam.scores import Scores
from vlcam.targets import Target
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

    def seen(self, target: Target, found: Capture) -> Seen:
        """What records say of a pass, besides its tensors."""
        weights = self.weights.value()
        tapped = any(tap.site in (*ATTENTION_SITES, SCORES, VALUES) for tap in found.activations)
        record = model_record(self.adapter, self.name, weights, attention_tapped=tapped)
        scores = self._scores(target, found, weights)
        return Seen(found, scores, class_records(self.adapter, target, found), record)

    def _scores(self, target: Target, found: Capture, weights: str) -> list[Scores]:
        """The scores of every pair; the first that is asked for another head's runs it for all of them."""
        adapter, inputs, known, context = self.adapter, self.pairs.inputs, found.outputs, found.context
        others = [head for head in adapter.heads if head not in known]

        @cache
        def fetch() -> dict[str, Tensor]:
            if self.weights.value() != weights:
                raise EvidenceError(
                    f"the scores of {', '.join(others)} were not read before the model's weights changed; explain again"
                )
            with own_conditions(adapter.module):
                return run_heads(adapter, inputs, context, others)

        count = range(len(inputs.image_of))
        return [Scores(adapter.heads, pair, known, fetch, target.classes, target.weights) for pair in count]

    def _names(self, stream: str) -> tuple[str, ...]:
        if stream not in self.names:
            self.names[stream] = module_names(self.adapter.anatomy.stream(stream), self.adapter.module)
        return self.names[stream]

    def _run(self, jobs: Sequence[Job]) -> list[Seen]:
        """One pass for jobs that share a head: for each what its target gave."""
        taps = list(dict.fromkeys(tap for job in jobs for tap in job.read))
        targets = list(dict.fromkeys(job.target for job in jobs if job.recipe.target != "none")) or [jobs[0].target]
        paths, inputs = {target.path for target in targets}, self.pairs.inputs
        if "integrated" in paths:
            found = tuple(integrated(self.adapter, inputs, taps, target) for target in targets)
        else:
            found = capture(self.adapter, inputs, taps, targets, direct="direct" in paths)
        seen = {target: self.seen(target, each) for target, each in zip(targets, found, strict=True)}
        return [seen.get(job.target, seen[targets[0]]) for job in jobs]

    def _selections(self, job: Job) -> list[Selection]:
        inputs = self.pairs.inputs
        tokens = ImageTokens(self.adapter.prefix, self._grid(job))
        layouts = inputs.texts.layouts if inputs.texts else (None,) * len(inputs.image_of)
        return [select(job.recipe, layout, tokens, job.phrase, job.occurrence) for layout in layouts]

    def _grid(self, job: Job) -> tuple[int, int]:
        """The grid of the blocks that a recipe reads."""
        return self.adapter.grid(job.recipe.stream, job.layers[0], self.pairs.inputs.images)

    def _one(self, job: Job, seen: Seen, pair: int, selection: Selection) -> Explanation:
        inputs, found, grid = self.pairs.inputs, seen.found, self._grid(job)
        attention = job.recipe.site in ATTENTION_SITES
        if not (attention and job.taps[0] in found.windows):
            check_grid(found.activations[job.taps[0]].shape[-1 if attention else 1], len(self.adapter.prefix), grid)
        made = self._maps(job, found, pair, selection)
        raw = made.values.reshape(-1, *grid).cpu().numpy()
        image = inputs.image_of[pair]
        picture, image_record = self.pairs.images[image]
        cut = found.windows.get(job.taps[0])
        own = {
            "class": seen.classes[pair],
            "asked": questions(job, found, selection),
            "modules": [self._names(job.recipe.stream)[layer] for layer in job.layers],
            "windows": None if cut is None else {"size": list(cut.window), "shift": list(cut.shift)},
        }
        return Explanation(
            tokens=raw[0],
            recipe=job.recipe,
            provenance={
                "schema": SCHEMA,
                "image": image_record,
                "text": text_record(inputs.texts.layouts[pair]) if inputs.texts else None,
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

    def _maps(self, job: Job, found: Capture, pair: int, selection: Selection) -> TokenMaps:
        answers, inputs = None, self.pairs.inputs
        if job.recipe.asks:
            batch, progress = self.asking.batch, self.asking.progress
            answers = ask(self.adapter, inputs, job, found, pair, selection, batch=batch, progress=progress)
        try:
            return token_maps(job, found, pair, selection, answers)
        except NoGradientError as error:
            if self.empty == "keep":
                return nothing(selection)
            raise NoGradientError(f"{error}; {where_alive(self.adapter, inputs, job, pair)}") from None


def _word_maps(selection: Selection, raw: Any, made: TokenMaps) -> tuple[WordMap, ...]:
    rows = zip(selection.words, raw[1:], made.statuses[1:], strict=True)
    return tuple(WordMap(word.text, word.span, word.tokens, tokens, status) for word, tokens, status in rows)
