"""Explainer: the thread through everything, from an image and a text to explanations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, overload

import numpy as np
import torch
from torch import Tensor

from vlcam.adapter import ModelAdapter
from vlcam.anatomy import Anatomy, Tap, block_numbers
from vlcam.asking import BATCH, Progress, ask, questions
from vlcam.capture import Capture, capture, integrated, run_heads
from vlcam.catalogue import default, named
from vlcam.errors import EvidenceError, RecipeError
from vlcam.evidence import NoGradientError, TokenMaps, nothing, token_maps
from vlcam.explanation import Explanation, WordMap
from vlcam.geometry import check_grid
from vlcam.grid import fitting
from vlcam.images import ImageSource
from vlcam.pairing import Pairs, pair_up
from vlcam.plan import Job, in_passes, plan
from vlcam.probe import where_alive
from vlcam.provenance import SCHEMA, WeightsHash, class_records, model_record, run_record, text_record, versions
from vlcam.recipe import ATTENTION_SITES, Recipe, takes_target
from vlcam.regions import on_model_input
from vlcam.rows import Selection, select
from vlcam.targets import Asked, Scores, Target, read_target, resolve
from vlcam.tokens import ImageTokens

__all__ = ["Explainer"]

Empty = Literal["raise", "keep"]


@dataclass(frozen=True, eq=False)
class _Pass:
    """What one pass gave for one target: the tensors, and what records say of it."""

    found: Capture
    scores: Sequence[Scores]
    classes: Sequence[dict[str, Any] | None]
    model: Mapping[bool, dict[str, Any]]


@dataclass(frozen=True)
class _Asking:
    """How variants are run for recipes that ask the model again."""

    batch: int
    progress: Progress | None


class Explainer:
    """A loaded model that can be asked what it looked at. `vlcam.load` and `vlcam.wrap` make one.

    The model is left exactly as it was found after every call, also after an exception.
    """

    def __init__(self, adapter: ModelAdapter, name: str) -> None:
        """Hold an adapter; `name` is what records call the model."""
        self.adapter = adapter
        self.name = name
        self._weights = WeightsHash(adapter.module)

    def __repr__(self) -> str:
        """The model's name and class."""
        return f"Explainer({self.name!r}, {type(self.adapter.module).__name__})"

    @property
    def anatomy(self) -> Anatomy:
        """Streams, blocks, sites, token layout and targets; prints as a table."""
        return self.adapter.anatomy

    @overload
    def explain(
        self, image: ImageSource, text: str | None = None, recipe: str | Recipe | None = None, **choices: Any
    ) -> Explanation: ...

    @overload
    def explain(self, image: Any, text: Any = None, recipe: str | Recipe | None = None, **choices: Any) -> Any: ...

    def explain(
        self,
        image: Any,
        text: Any = None,
        recipe: str | Recipe | None = None,
        *,
        target: Any = None,
        phrase: str | None = None,
        occurrence: int | None = None,
        layer: int | str | Sequence[int] | None = None,
        strict: bool = False,
        batch: int = BATCH,
        progress: Progress | None = None,
        **choices: Any,
    ) -> Any:
        """Explain an image and a text, or an image and a class.

        Args:
            image: a path, bytes, PIL image or uint8 array [H, W, 3]; a float tensor [3, H, W] or [B, 3, H, W] that is
                already preprocessed; a list of these; or a batch with `pixel_values` and `input_ids`.
            text: a string, or a list, for a model that takes text. One image goes with many texts, many images with
                one text, n with n in order.
            recipe: a name out of `vlcam.recipes()`, or a recipe; by default the published one of the model's kind.
            target: what is explained. A class, by index or label (by default the one with the highest logit), or a list
                of classes, which are paired with images as texts are; a `vlcam.targets` object; the name of another of
                the model's scores; or a callable on the head's output.
            phrase: words of the text; the map is then the mean over their query rows.
            occurrence: which one, counted from 1, where the phrase stands more than once.
            layer: block index or indices, `last` or `all`, in place of the recipe's.
            strict: whether text beyond the model's limit is an error; otherwise what was cut is on record.
            batch: how many variants run at once, for a recipe that asks the model again (Score-CAM and its like).
            progress: called with (how many have run, of how many) after each such batch; an exception that it raises
                ends the work, and the model is left as found.
            **choices: any other field of the recipe, for example `relu="none"`.

        Returns:
            An `Explanation`; a list of them, one per pair, where a list or a batch was given.

        Raises:
            RecipeError: choices that do not fit together or do not fit this model.
            InputError: an image, text or phrase that cannot be explained.
            UnknownNameError: a class, recipe, layer or site that does not exist.
            EvidenceError: a gradient that is zero everywhere the map would use it; says where it is not.
        """
        if layer is not None:
            if "layers" in choices:
                raise RecipeError(f"layer={layer!r} and layers={choices['layers']!r}: give one of them")
            choices["layers"] = block_numbers(layer)
        asked = self._asked(target)
        job = self._plan(recipe, asked, choices, phrase=phrase, occurrence=occurrence)
        asking = _Asking(batch, progress)
        (found,) = self._explain(image, text, asked, [job], strict=strict, asking=asking)
        return found

    def sweep(
        self,
        image: Any,
        text: Any = None,
        recipes: Sequence[str | Recipe] | None = None,
        *,
        target: Any = None,
        phrase: str | None = None,
        occurrence: int | None = None,
        empty: Empty = "raise",
        strict: bool = False,
        batch: int = BATCH,
        progress: Progress | None = None,
    ) -> list[Any]:
        """Explain with many recipes; those that share a head share one forward pass, and equal targets one backward.

        Args:
            image: as in `explain`.
            text: as in `explain`.
            recipes: names or recipes; by default every named recipe that fits the model and does not ask it again.
            target: as in `explain`; each recipe keeps its own scale. A recipe without a target takes none.
            phrase: as in `explain`; for recipes without text rows it is an error, as there.
            occurrence: as in `explain`.
            empty: what becomes of a recipe whose gradient is zero wherever its map would use it: `raise`, as in
                `explain`; or `keep` it, as a map of zeros with the status `zero gradient`.
            strict: as in `explain`.
            batch: as in `explain`.
            progress: as in `explain`, for one recipe after the other.

        Returns:
            What `explain` returns for each recipe, in order.
        """
        if isinstance(recipes, (str, Recipe)):
            raise RecipeError(f"recipes={recipes!r}: a sweep takes a list; one recipe is what explain is for")
        if empty not in ("raise", "keep"):
            raise RecipeError(f"empty={empty!r}: choose from 'raise', 'keep'")
        asked = self._asked(target)
        wanted = fitting(self.adapter) if recipes is None else recipes
        jobs = [self._plan(each, asked, {}, phrase=phrase, occurrence=occurrence) for each in wanted]
        asking = _Asking(batch, progress)
        return self._explain(image, text, asked, jobs, strict=strict, asking=asking, empty=empty)

    def capture(
        self,
        image: Any,
        text: Any = None,
        *,
        stream: str,
        site: str,
        layers: Any = "all",
        target: Any = None,
        scale: str | None = None,
        strict: bool = False,
    ) -> Capture:
        """Read the raw tensors at a site and their gradients, in one pass.

        Args:
            image: as in `explain`.
            text: as in `explain`.
            stream: `vision`, `fusion`, ...
            site: `F1` ... `F6`, `CROSS`, `CONTEXT`; any site that `anatomy` lists, also those without an image grid.
            layers: block indices, `last` or `all`.
            target: as in `explain`.
            scale: on which scale; by default `logit`, or the only one that the target has.
            strict: as in `explain`.

        Returns:
            Activations and gradients by tap, with the pair as first axis.
        """
        asked = self._asked(target)
        changes = dict(asked.changes)
        if scale is not None:
            changes["scale"] = scale
        described = plan(self.adapter, "pgc-gradcam", changes, custom=asked.custom, classes=asked.classes)
        indices = self.anatomy.stream(stream).indices(block_numbers(layers))
        with self._own_conditions():
            pairs = pair_up(self.adapter, image, text, classes=asked.count, strict=strict)
            taps = [Tap(stream, index, site) for index in indices]
            (found,) = capture(self.adapter, pairs.inputs, taps, [described.target])
        return found

    def scores(self, image: Any, text: Any = None, *, strict: bool = False) -> Any:
        """Every score that the model offers, by name, with its kind; a list of these for lists and batches.

        Args:
            image: as in `explain`.
            text: as in `explain`.
            strict: as in `explain`.
        """
        with self._own_conditions():
            pairs = pair_up(self.adapter, image, text, strict=strict)
            target = resolve(named("attention-cross").recipe, self.adapter.heads)
            (found,) = capture(self.adapter, pairs.inputs, [], [target])
            seen = self._seen(pairs, target, found)
        scores = [dict(each) for each in seen.scores]
        return scores if pairs.many else scores[0]

    def _asked(self, target: Any) -> Asked:
        return read_target(target, self.adapter.heads, self.adapter.labels)

    def _plan(self, recipe: str | Recipe | None, asked: Asked, choices: dict[str, Any], **words: Any) -> Job:
        """Fit one recipe; what was asked for replaces its target unless it takes none."""
        base = recipe if recipe is not None else default(self.adapter.heads)
        own = base if isinstance(base, Recipe) else named(base).recipe
        takes = takes_target(choices.get("weighting", own.weighting))
        changes = {**(asked.changes if takes else {}), **choices}
        return plan(
            self.adapter, base, changes, custom=asked.custom, classes=asked.classes, region=asked.region, **words
        )

    def _seen(self, pairs: Pairs, target: Target, found: Capture) -> _Pass:
        weights = self._weights.value()
        records = {
            tapped: model_record(self.adapter, self.name, weights, attention_tapped=tapped) for tapped in (False, True)
        }
        return _Pass(
            found, self._scores(pairs, target, found, weights), class_records(self.adapter, target, found), records
        )

    def _scores(self, pairs: Pairs, target: Target, found: Capture, weights: str) -> list[Scores]:
        """The scores of every pair; the first that is asked for another head's runs it for all of them."""
        adapter, inputs, known, context = self.adapter, pairs.inputs, found.outputs, found.context
        others = [head for head in adapter.heads if head not in known]

        @cache
        def fetch() -> dict[str, Tensor]:
            if self._weights.value() != weights:
                raise EvidenceError(
                    f"the scores of {', '.join(others)} were not read before the model's weights changed; explain again"
                )
            with self._own_conditions():
                return run_heads(adapter, inputs, context, others)

        count = range(len(inputs.image_of))
        return [Scores(adapter.heads, pair, known, fetch, target.classes, target.weights) for pair in count]

    @contextmanager
    def _own_conditions(self) -> Iterator[None]:
        """The caller's inference_mode and autocast do not reach the model: it runs as it is, in its own precision."""
        device = next(self.adapter.module.parameters()).device.type
        with torch.inference_mode(mode=False), torch.no_grad(), torch.autocast(device, enabled=False):
            yield

    def _explain(
        self,
        image: Any,
        text: Any,
        asked: Asked,
        jobs: Sequence[Job],
        *,
        strict: bool,
        asking: _Asking,
        empty: Empty = "raise",
    ) -> list[Any]:
        results: list[Any] = [None] * len(jobs)
        with self._own_conditions():
            pairs = pair_up(self.adapter, image, text, classes=asked.count, strict=strict)
            jobs = self._within_region(jobs, asked, pairs)
            selections = [self._selections(job, pairs) for job in jobs]  # a wrong phrase costs no pass
            for indices in in_passes(jobs):
                for index, seen in self._run(pairs, [jobs[index] for index in indices], indices):
                    made = [
                        self._one(jobs[index], pairs, seen, pair, selection, asking=asking, empty=empty)
                        for pair, selection in enumerate(selections[index])
                    ]
                    results[index] = made if pairs.many else made[0]
        return results

    def _within_region(self, jobs: Sequence[Job], asked: Asked, pairs: Pairs) -> Sequence[Job]:
        """The jobs with the region laid on each pair's model input."""
        if asked.region is None:
            return jobs
        images = pairs.inputs.images
        laid = [on_model_input(asked.region, images.placements[image]) for image in pairs.inputs.image_of]
        weights = torch.from_numpy(np.stack(laid)).to(images.pixel_values.device)
        return [replace(job, target=job.target.within(weights)) for job in jobs]

    def _run(self, pairs: Pairs, jobs: Sequence[Job], indices: Sequence[int]) -> Iterator[tuple[int, _Pass]]:
        """One pass for jobs that share a head: for each job's index, what its target gave."""
        taps = list(dict.fromkeys(tap for job in jobs for tap in job.read))
        targets = list(dict.fromkeys(job.target for job in jobs if job.recipe.target != "none")) or [jobs[0].target]
        paths = {target.path for target in targets}
        if "integrated" in paths:
            found = tuple(integrated(self.adapter, pairs.inputs, taps, target) for target in targets)
        else:
            found = capture(self.adapter, pairs.inputs, taps, targets, direct="direct" in paths)
        seen = {target: self._seen(pairs, target, each) for target, each in zip(targets, found, strict=True)}
        for job, index in zip(jobs, indices, strict=True):
            yield index, seen.get(job.target, seen[targets[0]])

    def _selections(self, job: Job, pairs: Pairs) -> list[Selection]:
        inputs = pairs.inputs
        tokens = ImageTokens(self.adapter.prefix, self._grid(job, pairs))
        layouts = inputs.texts.layouts if inputs.texts else (None,) * len(inputs.image_of)
        return [select(job.recipe, layout, tokens, job.phrase, job.occurrence) for layout in layouts]

    def _grid(self, job: Job, pairs: Pairs) -> tuple[int, int]:
        """The grid of the blocks that a recipe reads.

        Raises:
            RecipeError: they have grids of different sizes.
        """
        images = pairs.inputs.images
        grids = {layer: self.adapter.grid(job.recipe.stream, layer, images) for layer in job.layers}
        if len(set(grids.values())) > 1:
            raise RecipeError(
                f"layers={job.recipe.layers!r}: these blocks have grids of different sizes, "
                + ", ".join(f"{rows} x {columns} in block {layer}" for layer, (rows, columns) in grids.items())
                + "; choose blocks of one stage"
            )
        return next(iter(grids.values()))

    def _one(
        self,
        job: Job,
        pairs: Pairs,
        seen: _Pass,
        pair: int,
        selection: Selection,
        *,
        asking: _Asking,
        empty: Empty,
    ) -> Explanation:
        inputs, found = pairs.inputs, seen.found
        grid = self._grid(job, pairs)
        attention = job.recipe.site in ATTENTION_SITES
        if not (attention and job.taps[0] in found.windows):
            check_grid(found.activations[job.taps[0]].shape[-1 if attention else 1], len(self.adapter.prefix), grid)
        answers = None
        if job.recipe.asks:
            answers = ask(
                self.adapter, inputs, job, found, pair, selection, batch=asking.batch, progress=asking.progress
            )
        try:
            made = token_maps(job, found, pair, selection, answers)
        except NoGradientError as error:
            if empty == "raise":
                advice = where_alive(self.adapter, pairs.inputs, job, pair)
                raise NoGradientError(f"{error}; {advice}") from None
            made = nothing(selection)
        raw = made.values.reshape(-1, *grid).cpu().numpy()
        image = inputs.image_of[pair]
        picture, image_record = pairs.images[image]
        return Explanation(
            tokens=raw[0],
            recipe=job.recipe,
            provenance={
                "schema": SCHEMA,
                "image": image_record,
                "text": text_record(inputs.texts.layouts[pair]) if inputs.texts else None,
                "model": dict(seen.model[attention]),
                "run": run_record(self.adapter, job, found, pair, selection, grid)
                | {"class": seen.classes[pair], "asked": questions(job, found, selection)},
                "versions": dict(versions()),
                "seed": None,
            },
            scores=seen.scores[pair],
            status=made.statuses[0],
            image=picture,
            placement=inputs.images.placements[image],
            word_maps=_word_maps(selection, raw, made),
            attachments=pairs.attachments[image],
        )


def _word_maps(selection: Selection, raw: Any, made: TokenMaps) -> tuple[WordMap, ...]:
    rows = zip(selection.words, raw[1:], made.statuses[1:], strict=True)
    return tuple(WordMap(word.text, word.span, word.tokens, tokens, status) for word, tokens, status in rows)
