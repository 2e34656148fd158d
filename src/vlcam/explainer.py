"""Explainer: the thread through everything, from an image and a text to explanations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, overload

import torch
from torch import Tensor

from vlcam.adapter import ModelAdapter
from vlcam.anatomy import Anatomy, Tap, block_numbers
from vlcam.capture import Capture, capture, run_heads
from vlcam.catalogue import named
from vlcam.errors import EvidenceError, RecipeError
from vlcam.evidence import NoGradientError, TokenMaps, token_maps
from vlcam.explanation import Explanation, WordMap
from vlcam.geometry import check_grid
from vlcam.images import ImageSource
from vlcam.pairing import Pairs, pair_up
from vlcam.plan import Job, in_passes, plan
from vlcam.provenance import SCHEMA, WeightsHash, model_record, run_record, text_record, versions
from vlcam.recipe import ATTENTION_SITES, Recipe
from vlcam.rows import Selection, select
from vlcam.targets import Custom, Scores, resolve

__all__ = ["Explainer"]


@dataclass(frozen=True, eq=False)
class _Pass:
    """What one pass gave, and the hash of the weights that it ran with."""

    found: Capture
    weights: str


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
        self, image: ImageSource, text: str, recipe: str | Recipe = "lavis-itm", **choices: Any
    ) -> Explanation: ...

    @overload
    def explain(self, image: Any, text: Any = None, recipe: str | Recipe = "lavis-itm", **choices: Any) -> Any: ...

    def explain(
        self,
        image: Any,
        text: Any = None,
        recipe: str | Recipe = "lavis-itm",
        *,
        phrase: str | None = None,
        occurrence: int | None = None,
        layer: int | str | Sequence[int] | None = None,
        target: str | Custom | Callable[[Tensor], Tensor] | None = None,
        strict: bool = False,
        **choices: Any,
    ) -> Any:
        """Explain an image and a text.

        Args:
            image: a path, bytes, PIL image or uint8 array [H, W, 3]; a float tensor [3, H, W] or [B, 3, H, W] that is
                already preprocessed; a list of these; or a batch with `pixel_values` and `input_ids`.
            text: a string, or a list. One image goes with many texts, many images with one text, n with n in order.
            recipe: a name out of `vlcam.recipes()`, or a recipe.
            phrase: words of the text; the map is then the mean over their query rows.
            occurrence: which one, counted from 1, where the phrase stands more than once.
            layer: block index or indices, `last` or `all`, in place of the recipe's.
            target: another target in place of the recipe's: its name, or a callable on the head's output.
            strict: whether text beyond the model's limit is an error; otherwise what was cut is on record.
            **choices: any other field of the recipe, for example `relu="none"`.

        Returns:
            An `Explanation`; a list of them, one per pair, where a list or a batch was given.

        Raises:
            RecipeError: choices that do not fit together or do not fit this model.
            InputError: an image, text or phrase that cannot be explained.
            EvidenceError: a gradient that is zero everywhere the map would use it; says where it is not.
        """
        custom = _custom(target)
        if layer is not None:
            if "layers" in choices:
                raise RecipeError(f"layer={layer!r} and layers={choices['layers']!r}: give one of them")
            choices["layers"] = block_numbers(layer)
        if custom is not None:
            if choices.setdefault("scale", "raw") != "raw":
                raise RecipeError(
                    f"scale={choices['scale']!r} with a callable target: it is read as it is, scale='raw'"
                )
            choices["target"] = "custom"
        elif target is not None:
            choices["target"] = target
        job = plan(self.adapter, recipe, choices, custom=custom, phrase=phrase, occurrence=occurrence)
        (found,) = self._explain(image, text, [job], strict=strict)
        return found

    def sweep(
        self,
        image: Any,
        text: Any,
        recipes: Sequence[str | Recipe],
        *,
        phrase: str | None = None,
        occurrence: int | None = None,
        strict: bool = False,
    ) -> list[Any]:
        """Explain with many recipes; those that share a target share one pass.

        Args:
            image: as in `explain`.
            text: as in `explain`.
            recipes: names or recipes.
            phrase: as in `explain`; for recipes without text rows it is an error, as there.
            occurrence: as in `explain`.
            strict: as in `explain`.

        Returns:
            What `explain` returns for each recipe, in order.
        """
        if isinstance(recipes, (str, Recipe)):
            raise RecipeError(f"recipes={recipes!r}: a sweep takes a list; one recipe is what explain is for")
        jobs = [plan(self.adapter, recipe, {}, phrase=phrase, occurrence=occurrence) for recipe in recipes]
        return self._explain(image, text, jobs, strict=strict)

    def capture(
        self,
        image: Any,
        text: Any,
        *,
        stream: str,
        site: str,
        layers: Any = "all",
        target: str | Custom | Callable[[Tensor], Tensor] = "itm",
        scale: str = "logit",
        strict: bool = False,
    ) -> Capture:
        """Read the raw tensors at a site and their gradients, in one pass.

        Args:
            image: as in `explain`.
            text: as in `explain`.
            stream: `vision`, `fusion`, ...
            site: `F1` ... `F6`, `CROSS`, `CONTEXT`; any site that `anatomy` lists, also those without an image grid.
            layers: block indices, `last` or `all`.
            target: what is differentiated: a target's name, or a callable on the head's output.
            scale: on which scale, for a named target.
            strict: as in `explain`.

        Returns:
            Activations and gradients by tap, with the pair as first axis.
        """
        custom = _custom(target)
        described = named("lavis-itm").recipe.replace(
            target="custom" if custom else target, scale="raw" if custom else scale
        )
        wanted = resolve(described, self.adapter.heads, custom)
        indices = self.anatomy.stream(stream).indices(block_numbers(layers))
        with self._own_conditions():
            pairs = pair_up(self.adapter, image, text, strict=strict)
            return capture(self.adapter, pairs.inputs, [Tap(stream, i, site) for i in indices], wanted)

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
            found = capture(self.adapter, pairs.inputs, [], target)
        scores = [dict(each) for each in self._scores(pairs, _Pass(found, self._weights.value()))]
        return scores if pairs.many else scores[0]

    def _scores(self, pairs: Pairs, seen: _Pass) -> list[Scores]:
        """The scores of every pair; the first that is asked for another head's runs it for all of them."""
        adapter, inputs, known, context = self.adapter, pairs.inputs, seen.found.outputs, seen.found.context
        others = [head for head in adapter.heads if head not in known]
        weights = seen.weights

        @cache
        def fetch() -> dict[str, Tensor]:
            if self._weights.value() != weights:
                raise EvidenceError(
                    f"the scores of {', '.join(others)} were not read before the model's weights changed; explain again"
                )
            with self._own_conditions():
                return run_heads(adapter, inputs, context, others)

        return [Scores(adapter.heads, pair, known, fetch) for pair in range(len(inputs.image_of))]

    @contextmanager
    def _own_conditions(self) -> Iterator[None]:
        """The caller's inference_mode and autocast do not reach the model: it runs as it is, in its own precision."""
        device = next(self.adapter.module.parameters()).device.type
        with torch.inference_mode(mode=False), torch.no_grad(), torch.autocast(device, enabled=False):
            yield

    def _explain(self, image: Any, text: Any, jobs: Sequence[Job], *, strict: bool) -> list[Any]:
        results: list[Any] = [None] * len(jobs)
        with self._own_conditions():
            pairs = pair_up(self.adapter, image, text, strict=strict)
            selections = [self._selections(job, pairs) for job in jobs]  # a wrong phrase costs no pass
            for indices in in_passes(jobs):
                taps = dict.fromkeys(tap for index in indices for tap in jobs[index].taps)
                found = capture(self.adapter, pairs.inputs, list(taps), jobs[indices[0]].target)
                seen = _Pass(found, self._weights.value())
                scores = self._scores(pairs, seen)
                for index in indices:
                    made = [
                        self._one(jobs[index], pairs, seen, pair, selection, scores[pair])
                        for pair, selection in enumerate(selections[index])
                    ]
                    results[index] = made if pairs.many else made[0]
        return results

    def _selections(self, job: Job, pairs: Pairs) -> list[Selection]:
        rows, columns = pairs.inputs.images.grid
        prefix, layouts = self.adapter.prefix, pairs.inputs.texts.layouts
        return [
            select(job.recipe, layout, prefix, prefix + rows * columns, job.phrase, job.occurrence)
            for layout in layouts
        ]

    def _one(self, job: Job, pairs: Pairs, seen: _Pass, pair: int, selection: Selection, scores: Scores) -> Explanation:
        inputs, found = pairs.inputs, seen.found
        grid, prefix = inputs.images.grid, self.adapter.prefix
        attention = job.recipe.site in ATTENTION_SITES
        check_grid(found.activations[job.taps[0]].shape[-1 if attention else 1], prefix, grid)
        try:
            made = token_maps(job, found, pair, selection, prefix)
        except NoGradientError as error:
            raise NoGradientError(f"{error}; {self._advice(job, pairs, pair, selection)}") from None
        raw = made.values.reshape(-1, *grid).cpu().numpy()
        image = inputs.image_of[pair]
        picture, image_record = pairs.images[image]
        return Explanation(
            tokens=raw[0],
            recipe=job.recipe,
            provenance={
                "schema": SCHEMA,
                "image": image_record,
                "text": text_record(inputs.texts.layouts[pair]),
                "model": model_record(self.adapter, self.name, seen.weights, attention_tapped=attention),
                "run": run_record(self.adapter, job, found, pair, selection, grid),
                "versions": dict(versions()),
                "seed": None,
            },
            scores=scores,
            status=made.statuses[0],
            image=picture,
            placement=inputs.images.placements[image],
            word_maps=_word_maps(selection, raw, made),
            attachments=pairs.attachments[image],
        )

    def _advice(self, job: Job, pairs: Pairs, pair: int, selection: Selection) -> str:
        """At which blocks of this model the same choice would have a gradient: tried in one pass, not looked up."""
        stream = self.anatomy.stream(job.recipe.stream)
        blocks = [index for index, block in enumerate(stream.blocks) if job.recipe.site in block.sites]
        every = replace(job, layers=tuple(blocks))
        found = capture(self.adapter, pairs.inputs, every.taps, job.target)
        alive = []
        for layer in blocks:
            single = replace(job, recipe=job.recipe.replace(layers=layer, layer_rule="single"), layers=(layer,))
            try:
                token_maps(single, found, pair, selection, self.adapter.prefix)
            except EvidenceError:
                continue
            alive.append(layer)
        if alive:
            return f"in this model {job.recipe.site} carries one in block {', '.join(map(str, alive))}"
        return f"in this model no block of {stream.name} carries one at {job.recipe.site} for {job.target.label}"


def _word_maps(selection: Selection, raw: Any, made: TokenMaps) -> tuple[WordMap, ...]:
    rows = zip(selection.words, raw[1:], made.statuses[1:], strict=True)
    return tuple(WordMap(word.text, word.span, word.tokens, tokens, status) for word, tokens, status in rows)


def _custom(target: object) -> Custom | None:
    if isinstance(target, Custom):
        return target
    return Custom(target, label=getattr(target, "__qualname__", "callable")) if callable(target) else None
