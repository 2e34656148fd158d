"""Explainer: the thread through everything, from an image and a text to explanations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vlcam import maps
from vlcam.adapter import ModelAdapter
from vlcam.anatomy import Anatomy, Tap
from vlcam.capture import Capture, capture
from vlcam.catalogue import named
from vlcam.errors import CaptureError, EvidenceError, RecipeError
from vlcam.explanation import Explanation, Status, WordMap
from vlcam.geometry import check_grid
from vlcam.pairing import Pairs, pair_up
from vlcam.provenance import SCHEMA, WeightsHash, model_record, text_record, versions
from vlcam.recipe import ATTENTION_SITES, Recipe
from vlcam.rows import Selection, select
from vlcam.targets import Custom, Score, Target, read_scores, resolve

__all__ = ["Explainer"]


@dataclass(frozen=True)
class _Job:
    """One recipe on this model: its blocks, how they were found, and its target."""

    recipe: Recipe
    layers: tuple[int, ...]
    layers_rule: str
    target: Target

    @property
    def taps(self) -> tuple[Tap, ...]:
        return tuple(Tap(self.recipe.stream, layer, self.recipe.site) for layer in self.layers)


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

    def explain(
        self,
        image: Any,
        text: Any = None,
        recipe: str | Recipe = "lavis-itm",
        *,
        phrase: str | None = None,
        occurrence: int | None = None,
        layer: int | Sequence[int] | None = None,
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
            layer: block index or indices in place of the recipe's.
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
            choices["layers"] = layer if isinstance(layer, int) else tuple(layer)
        if target is not None:
            choices |= {"target": "custom", "scale": "raw"} if custom else {"target": target}
        job = self._job(recipe, choices, custom, phrase)
        (found,) = self._explain(image, text, [job], phrase, occurrence, strict=strict)
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
        jobs = [self._job(recipe, {}, None, phrase) for recipe in recipes]
        return self._explain(image, text, jobs, phrase, occurrence, strict=strict)

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

        Returns:
            Activations and gradients by tap, with the pair as first axis.
        """
        custom = _custom(target)
        described = named("lavis-itm").recipe.replace(
            target="custom" if custom else target, scale="raw" if custom else scale
        )
        wanted = resolve(described, self.adapter.heads, custom)
        indices = self.anatomy.stream(stream).indices((layers,) if isinstance(layers, int) else layers)
        with _outside_inference_mode():
            pairs = pair_up(self.adapter, image, text, strict=False)
            return capture(self.adapter, pairs.inputs, [Tap(stream, i, site) for i in indices], wanted)

    def scores(self, image: Any, text: Any) -> Any:
        """Every score that the model offers, by name, with its kind; a list of these for lists and batches."""
        with _outside_inference_mode():
            pairs = pair_up(self.adapter, image, text, strict=False)
            target = resolve(named("attention-cross").recipe, self.adapter.heads)
            found = capture(self.adapter, pairs.inputs, [], target)
        scores = [self._scores(found, pair) for pair in range(len(pairs.inputs.image_of))]
        return scores if pairs.many else scores[0]

    def _scores(self, found: Capture, pair: int) -> dict[str, Score]:
        return read_scores(found.outputs, self.adapter.heads, pair)

    def _job(self, recipe: str | Recipe, choices: Mapping[str, Any], custom: Custom | None, phrase: str | None) -> _Job:
        changes = dict(choices)
        if isinstance(recipe, str):
            entry = named(recipe)
            stream = self.anatomy.stream(changes.get("stream", entry.recipe.stream))
            chosen, rule = entry.fitted(len(stream.blocks))
        else:
            chosen, rule = recipe, "as given"
        if "layers" in changes:
            rule = "as given"
        if phrase is not None:
            if chosen.queries not in ("all", "phrase"):
                raise RecipeError(
                    f"phrase={phrase!r} with site={chosen.site!r}, queries={chosen.queries!r}: only maps with text "
                    "rows (site='CROSS', queries='all' or 'phrase') can be read for one phrase"
                )
            changes["queries"] = "phrase"
        chosen = chosen.replace(**changes)
        if chosen.queries == "phrase" and phrase is None:
            raise RecipeError("queries='phrase': say which words, phrase='...'")
        layers = self.anatomy.stream(chosen.stream).indices(chosen.layers)
        if len(layers) > 1 and chosen.layer_rule == "single":
            raise RecipeError(f"layer_rule='single' with blocks {layers}: choose a rule that merges several")
        return _Job(chosen, layers, rule, resolve(chosen, self.adapter.heads, custom))

    def _explain(
        self, image: Any, text: Any, jobs: Sequence[_Job], phrase: str | None, occurrence: int | None, *, strict: bool
    ) -> list[Any]:
        with _outside_inference_mode():
            pairs = pair_up(self.adapter, image, text, strict=strict)
            results: list[Any] = [None] * len(jobs)
            for indices in _shared_targets(jobs):
                group = [jobs[index] for index in indices]
                taps = dict.fromkeys(tap for job in group for tap in job.taps)
                found = capture(self.adapter, pairs.inputs, list(taps), group[0].target)
                for index in indices:
                    made = [
                        self._one(jobs[index], pairs, found, pair, phrase, occurrence)
                        for pair in range(len(pairs.inputs.image_of))
                    ]
                    results[index] = made if pairs.many else made[0]
        return results

    def _one(
        self, job: _Job, pairs: Pairs, found: Capture, pair: int, phrase: str | None, occurrence: int | None
    ) -> Explanation:
        inputs = pairs.inputs
        layout = inputs.texts.layouts[pair]
        prefix, grid = self.adapter.prefix, inputs.images.grid
        tokens = found.activations[job.taps[0]].shape[-1 if job.recipe.site in ATTENTION_SITES else 1]
        check_grid(tokens, prefix, grid)
        selection = select(job.recipe, layout, prefix, tokens, phrase, occurrence)
        try:
            rows, live = _maps(job, found, pair, selection, prefix)
        except _NoGradientError as error:
            raise self._no_evidence(job, pairs, pair, selection, error) from None
        raw = rows.reshape(len(rows), *grid).cpu().numpy()
        if not bool(torch.isfinite(rows).all()):
            raise EvidenceError(
                f"the map at {job.taps[0]} is not finite; the model's activations or gradients overflow"
            )
        words = tuple(
            WordMap(
                word.text, word.span, word.tokens, raw[number + 1], _status(job.recipe, raw[number + 1], live=alive)
            )
            for number, (word, alive) in enumerate(zip(selection.words, live[1:], strict=True))
        )
        image = inputs.image_of[pair]
        picture, image_record = pairs.images[image]
        return Explanation(
            tokens=raw[0],
            recipe=job.recipe,
            provenance={
                "schema": SCHEMA,
                "image": image_record,
                "text": text_record(layout),
                "model": model_record(
                    self.adapter, self.name, self._weights, attention_tapped=job.recipe.site in ATTENTION_SITES
                ),
                "run": self._run_record(job, found, pair, selection, grid, phrase, occurrence),
                "versions": dict(versions()),
                "seed": None,
            },
            scores=self._scores(found, pair),
            status=_status(job.recipe, raw[0], live=True),
            image=picture,
            placement=inputs.images.placements[image],
            word_maps=words,
            attachments=pairs.attachments[image],
        )

    def _run_record(
        self,
        job: _Job,
        found: Capture,
        pair: int,
        selection: Selection,
        grid: tuple[int, int],
        phrase: str | None,
        occurrence: int | None,
    ) -> dict[str, Any]:
        return {
            "stream": job.recipe.stream,
            "site": job.recipe.site,
            "layers": list(job.layers),
            "layers_rule": job.layers_rule,
            "blocks": len(self.anatomy.stream(job.recipe.stream).blocks),
            "target": job.target.label,
            "target_value": float(found.target[pair]) if job.target.differentiate else None,
            "grid": list(grid),
            "prefix_tokens": self.adapter.prefix,
            "dropped": selection.dropped,
            "phrase": phrase,
            "occurrence": occurrence,
            "span": list(selection.span) if selection.span else None,
            "rows": list(selection.rows),
        }

    def _no_evidence(
        self, job: _Job, pairs: Pairs, pair: int, selection: Selection, error: _NoGradientError
    ) -> EvidenceError:
        """Say why there is no map, and at which blocks of this model the same choice would have one."""
        stream = self.anatomy.stream(job.recipe.stream)
        alive = []
        for layer in range(len(stream.blocks)):
            other = _Job(job.recipe.replace(layers=(layer,), layer_rule="single"), (layer,), "", job.target)
            try:
                found = capture(self.adapter, pairs.inputs, other.taps, job.target)
                _maps(other, found, pair, selection, self.adapter.prefix)
            except (_NoGradientError, CaptureError):
                continue
            alive.append(layer)
        advice = (
            f"in this model {job.recipe.site} carries one in block {', '.join(map(str, alive))}"
            if alive
            else f"in this model no block of {stream.name} carries one at {job.recipe.site} for {job.target.label}"
        )
        return EvidenceError(f"{error}; {advice}")


class _NoGradientError(Exception):
    """The gradient is zero, or missing, wherever the map would use it."""


def _maps(job: _Job, found: Capture, pair: int, selection: Selection, prefix: int) -> tuple[Tensor, tuple[bool, ...]]:
    """The maps of one pair, [1 + words, patches], and which of them have any gradient."""
    gradients = [found.gradients.get(tap) for tap in job.taps] if job.recipe.needs_gradient else []
    if any(gradient is None for gradient in gradients):
        raise _NoGradientError(f"{job.target.label} does not depend on {job.taps[0]}")
    activations = [found.activations[tap][pair : pair + 1] for tap in job.taps]
    chosen = [gradient[pair : pair + 1] for gradient in gradients if gradient is not None]
    live = _live(job, chosen, selection, prefix)
    if not live[0]:
        where = f"rows {list(selection.rows)}" if selection.rows else f"the {job.recipe.gradient_tokens} tokens"
        raise _NoGradientError(
            f"the gradient of {job.target.label} at {', '.join(map(str, job.taps))} is exactly zero on {where}"
        )
    if job.recipe.site in ATTENTION_SITES:
        weights = selection.weights.to(activations[0].device)
        rows = [
            maps.attention_rows(job.recipe, activation, chosen[number] if chosen else None)
            for number, activation in enumerate(activations)
        ]
        pieces = [maps.row_means(job.recipe, each[:, : weights.shape[1]], weights)[0] for each in rows]
    else:
        if job.recipe.layer_rule == "shared":
            activations, chosen = activations[:1], [torch.stack(chosen).float().sum(0)]
        pieces = [maps.channel_weighted(job.recipe, a, g, prefix) for a, g in zip(activations, chosen, strict=True)]
    return maps.merge_layers(job.recipe, pieces)[:, prefix:], live


def _live(job: _Job, gradients: Sequence[Tensor], selection: Selection, prefix: int) -> tuple[bool, ...]:
    """For the main map and every word: whether any gradient that it uses is not zero."""
    if not job.recipe.needs_gradient:
        return (True,) * len(selection.weights)
    if job.recipe.site in ATTENTION_SITES:
        used = [list(selection.rows), *(list(word.tokens) for word in selection.words)]
        return tuple(any(bool(g[:, :, rows].any()) for g in gradients) for rows in used)
    part = {"cls": slice(0, 1), "patches": slice(prefix, None), "all": slice(None)}[job.recipe.gradient_tokens]
    return (any(bool(g[:, part].any()) for g in gradients),)


def _status(recipe: Recipe, tokens: Any, *, live: bool) -> Status:
    if not live:
        return "zero gradient"
    if not tokens.any() and recipe.relu != "none":
        return "no positive evidence"
    return "constant" if tokens.min() == tokens.max() else "ok"


def _shared_targets(jobs: Sequence[_Job]) -> Iterator[list[int]]:
    """Indices of jobs in groups that one pass can serve; a map without gradient joins any group that has one."""
    groups: dict[tuple[str, str], list[int]] = {}
    for index, job in enumerate(jobs):
        groups.setdefault((job.target.head, job.target.label), []).append(index)
    yield from groups.values()


def _custom(target: object) -> Custom | None:
    if isinstance(target, Custom):
        return target
    return Custom(target, label=getattr(target, "__qualname__", "callable")) if callable(target) else None


@contextmanager
def _outside_inference_mode() -> Iterator[None]:
    """Gradients cannot be taken under inference_mode, and tensors made there cannot enter a graph."""
    with torch.inference_mode(mode=False), torch.no_grad():
        yield
