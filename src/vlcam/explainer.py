"""Explainer: the thread through everything, from an image and a text to explanations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, overload

from vlcam.adapter import ModelAdapter
from vlcam.anatomy import Anatomy, Tap, block_numbers
from vlcam.asking import BATCH, Progress
from vlcam.batches import in_batch
from vlcam.boxes import check_threshold
from vlcam.capture import Capture, capture
from vlcam.catalogue import default, named
from vlcam.choices import Layers, takes_target
from vlcam.errors import InputError, RecipeError
from vlcam.explanation import Explanation
from vlcam.fitting import fitting
from vlcam.grounding import Grounding, check_caption, grounded
from vlcam.images import ImageSource
from vlcam.making import Asking, Empty, Making, own_conditions
from vlcam.naming import block_named
from vlcam.pairing import Pairs, pair_up
from vlcam.phrases import RULE, Place, places, within_limit
from vlcam.placing import of_tokens, placed
from vlcam.plan import Job, plan
from vlcam.provenance import WeightsHash, taps_of
from vlcam.questions import Asked, read_target
from vlcam.recipe import Recipe
from vlcam.targets import resolve
from vlcam.text import find_span

if TYPE_CHECKING:
    from vlcam.ambiguity import Ambiguity, Description, Preset

__all__ = ["Explainer"]


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
        against: Sequence[str] | str | None = None,
        answer: Sequence[str] | str | None = None,
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
                one text, n with n in order. Each distinct text is encoded once.
            recipe: a name out of `vlcam.recipes()`, or a recipe; by default the published one of the model's kind.
            target: what is explained. A class, by index or label (by default the one with the highest logit), or a list
                of classes, which are paired with images as texts are; a `vlcam.targets` object; the name of another of
                the model's scores; or a callable on the head's output.
            phrase: words of the text. With cross-attention the map is the mean over their query rows; for a contrastive
                score the phrase is encoded alone, or with `prompt="in_place"` in its place.
            occurrence: which one, counted from 1, where the phrase stands more than once.
            layer: block index or indices, dotted names of modules (`vit.layers.3`), `last` or `all`, in place of the
                recipe's.
            against: other texts, which the text is compared with on the scales `probability`, `log-probability`,
                `margin`, `difference` and `finer` of a contrastive score; by default all texts of the call.
            answer: for a model that answers questions, the answer whose likelihood is explained; by default the model's
                own. A captioning model that is given no text explains the caption that it writes.
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
        choices = self._with_layers(layer, recipe, choices)
        asked = self._asked(target)
        job = self._plan(recipe, asked, choices, phrase=phrase, occurrence=occurrence)
        asking = Asking(batch, progress)
        (found,) = self._explain(
            image, text, asked, [job], against=against, answer=answer, strict=strict, asking=asking
        )
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
        against: Sequence[str] | str | None = None,
        answer: Sequence[str] | str | None = None,
        empty: Empty = "raise",
        strict: bool = False,
        batch: int = BATCH,
        progress: Progress | None = None,
        conditions: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Explain with many recipes; those that share a head share one forward pass, and equal targets one backward.

        Args:
            image: as in `explain`.
            text: as in `explain`.
            recipes: names or recipes; by default every named recipe that fits the model and does not ask it again, and
                for one text does not compare it with others.
            target: as in `explain`; each recipe keeps its own scale. A recipe without a target takes none.
            phrase: as in `explain`; for recipes without text rows it is an error, as there.
            occurrence: as in `explain`.
            against: as in `explain`.
            answer: as in `explain`.
            empty: what becomes of a recipe whose gradient is zero wherever its map would use it: `raise`, as in
                `explain`; or `keep` it, as a map of zeros with the status `zero gradient`.
            strict: as in `explain`.
            batch: as in `explain`.
            progress: as in `explain`, for one recipe after the other.
            conditions: the provenance of an explanation of one pair, whose last bits are to come out again. Every pass
                then taps what that pass tapped (`model.tapped`), and the pair runs among copies of itself in a batch of
                the same shape (`run.batch`).

        Returns:
            What `explain` returns for each recipe, in order.
        """
        if isinstance(recipes, (str, Recipe)):
            raise RecipeError(f"recipes={recipes!r}: a sweep takes a list; one recipe is what explain is for")
        if empty not in ("raise", "keep"):
            raise RecipeError(f"empty={empty!r}: choose from 'raise', 'keep'")
        asked = self._asked(target)
        wanted = fitting(self.adapter) if recipes is None else recipes
        jobs = []
        for each in wanted:
            try:
                jobs.append(self._plan(each, asked, {}, phrase=phrase, occurrence=occurrence))
            except RecipeError:
                if recipes is not None or phrase is None:  # by default, those that know phrases
                    raise
        if recipes is None and _one_text(text, against):
            jobs = [job for job in jobs if not job.target.compares]
        read, shape = _conditions(conditions)
        asking = Asking(shape.get("variants") or batch, progress)
        how: dict[str, Any] = {"asking": asking, "empty": empty, "also": taps_of(self.adapter, read), "shape": shape}
        return self._explain(image, text, asked, jobs, against=against, answer=answer, strict=strict, **how)

    def ambiguity(
        self,
        image: Any,
        text: Any = None,
        description: str | Description | Preset = "gradcam-vit",
        *,
        target: Any = None,
        phrase: str | None = None,
        occurrence: int | None = None,
        against: Sequence[str] | str | None = None,
        answer: str | None = None,
        strict: bool = False,
    ) -> Ambiguity:
        """Every map that a description allows, and how far apart they are.

        All of them come from one pass per head, form of attention and gradient path, with one backward pass per scale;
        see `docs/ambiguity.md`.

        Args:
            image: one image, as in `explain`.
            text: one text, for a model that takes text.
            description: a description, or one out of `vlcam.descriptions()` or its name.
            target: as in `explain`; one class. A score or a scale that it names counts as stated.
            phrase: words of the text; of cross-attention their rows are read, and for a contrastive score they are
                encoded alone or in their place.
            occurrence: as in `explain`.
            against: as in `explain`. Without other texts, recipes that compare the text with some are left out, and
                counted.
            answer: as in `explain`.
            strict: as in `explain`.

        Returns:
            The recipes with their maps, the spread of these, and what to state.

        Raises:
            RecipeError: no recipe fits the description on this model; says what it states that does not. Or it allows
                maps over the image and over words, which have no cells in common.
            InputError: an image or text that cannot be explained, or several of them.
            UnknownNameError: a description or a class that does not exist.
        """
        from vlcam.ambiguity.measure import measured  # half a second of further imports

        asked, one_text = self._asked(target), _one_text(text, against)
        given: dict[str, Any] = {"against": against, "answer": answer, "strict": strict}
        run = partial(self._explain, image, text, asked, asking=Asking(), empty="keep", **given)
        words: dict[str, Any] = {"phrase": phrase, "occurrence": occurrence}
        again = partial(self.sweep, image, text, target=target, empty="keep", **words, **given)
        return measured(self.adapter, description, asked, **words, one_text=one_text, run=run, again=again)

    def ground(
        self,
        image: Any,
        text: str,
        phrases: Sequence[str | tuple[str, int]] | str | None = None,
        recipe: str | Recipe | None = None,
        *,
        threshold: float = 0.5,
        target: Any = None,
        layer: int | str | Sequence[int] | None = None,
        against: Sequence[str] | str | None = None,
        answer: str | None = None,
        empty: Empty = "raise",
        strict: bool = False,
        batch: int = BATCH,
        progress: Progress | None = None,
        **choices: Any,
    ) -> Grounding:
        """Find every phrase of a caption in the image: its map, its peak and its box.

        With cross-attention all phrases come from one pass. For a contrastive score each is a prompt of its own, and
        the image runs once for all of them; with `prompt="in_place"` it runs once for each.

        Args:
            image: one image, as in `explain`.
            text: the caption.
            phrases: words of the caption; those that stand there more than once are grounded everywhere, unless given
                as (phrase, which one), counted from 1. By default those that `vlcam.phrases.find_phrases` finds.
            recipe: as in `explain`; one that makes a map over the image.
            threshold: share of a heatmap's largest value from which on its pixels may belong to the box; see
                `vlcam.boxes.largest_component`.
            target: as in `explain`.
            layer: as in `explain`.
            against: as in `explain`; of a contrastive score by default all phrases.
            answer: as in `explain`; the text is then the question.
            empty: what becomes of a phrase whose gradient is zero wherever its map would use it: `raise`, as in
                `explain`; or `keep` it, without a box.
            strict: as in `explain`.
            batch: as in `explain`.
            progress: as in `explain`, for one phrase after the other.
            **choices: as in `explain`.

        Returns:
            The phrases, each with its explanation; one that has nothing to show has no box, and says why.

        Raises:
            RecipeError: choices that do not fit together or do not fit this model, a recipe whose map is over the text.
            InputError: several images or texts, a model that takes no text, no phrase, one that is not in the text.
            UnknownNameError: a recipe, layer or site that does not exist.
            EvidenceError: a gradient that is zero everywhere a map would use it, unless `empty="keep"`.
        """
        check_threshold(threshold)
        if empty not in ("raise", "keep"):
            raise RecipeError(f"empty={empty!r}: choose from 'raise', 'keep'")
        check_caption(image, text, takes_text=self.adapter.takes_text)
        asked = self._asked(target)
        choices = self._with_layers(layer, recipe, choices)
        found = places(text, phrases)
        jobs = [self._plan(recipe, asked, choices, phrase=p.phrase, occurrence=p.occurrence) for p in found]
        if jobs[0].recipe.of_text:
            raise RecipeError(
                f"recipe {jobs[0].recipe.name!r} makes a map over the words of the text, which has no place on the "
                "image; take one whose stream is not 'text'"
            )
        cut: tuple[str, ...] = ()
        if phrases is None and not jobs[0].encodes_phrase:
            kept, cut = within_limit(found, self.adapter.prepare_texts([text]).layouts[0])
            found, jobs = tuple(found[index] for index in kept), [jobs[index] for index in kept]
        asking = Asking(batch, progress)
        how: dict[str, Any] = {"against": against, "answer": answer, "strict": strict, "asking": asking, "empty": empty}
        if jobs[0].encodes_phrase:
            made = self._explain_alone(image, text, found, asked, jobs[0], **how)
        elif jobs[0].recipe.prompt == "in_place":  # what is hidden differs, so every phrase needs a pass of its own
            made = [self._explain(image, text, asked, [job], **how)[0] for job in jobs]
        else:
            made = self._explain(image, text, asked, jobs, **how)
        grounds = [grounded(each, place, threshold) for each, place in zip(made, found, strict=True)]
        return Grounding(text, tuple(grounds), float(threshold), RULE if phrases is None else "given", cut)

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
        against: Sequence[str] | str | None = None,
        answer: Sequence[str] | str | None = None,
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
            scale: on which scale; by default `logit`, or the first one that the target has.
            against: as in `explain`.
            answer: as in `explain`.
            strict: as in `explain`.

        Returns:
            Activations and gradients by tap, with the pair as first axis.
        """
        asked = self._asked(target)
        changes = dict(asked.changes)
        if scale is not None:
            changes["scale"] = scale
        plain, _ = named("pgc-gradcam").fitted(1, self.adapter)
        target_there = resolve(
            plain.replace(**changes),
            self.adapter.heads,
            custom=asked.custom,
            classes=asked.classes,
            region=asked.region,
        )
        indices = self.anatomy.stream(stream).indices(block_numbers(layers), site)
        with own_conditions(self.adapter.module):
            pairs = pair_up(
                self.adapter, image, text, classes=asked.count, against=against, answer=answer, strict=strict
            )
            taps = [Tap(stream, index, site) for index in indices]
            (wanted,) = placed([target_there], asked, pairs, self.adapter.heads)
            (found,) = capture(self.adapter, pairs.inputs, taps, [wanted])
        return found

    def scores(
        self,
        image: Any,
        text: Any = None,
        *,
        against: Sequence[str] | str | None = None,
        answer: Sequence[str] | str | None = None,
        strict: bool = False,
    ) -> Any:
        """Every score that the model offers, by name, with its kind; a list of these for lists and batches.

        Args:
            image: as in `explain`.
            text: as in `explain`.
            against: as in `explain`.
            answer: as in `explain`.
            strict: as in `explain`.
        """
        with own_conditions(self.adapter.module):
            pairs = pair_up(self.adapter, image, text, against=against, answer=answer, strict=strict)
            target = resolve(named("attention-cross").recipe, self.adapter.heads)
            (found,) = capture(self.adapter, pairs.inputs, [], [target])
            seen = self._making(pairs).seen(target, found)
        scores = [dict(each) for each in seen.scores]
        return scores if pairs.many else scores[0]

    def _asked(self, target: Any) -> Asked:
        return read_target(target, self.adapter.heads, self.adapter.labels)

    def _with_layers(self, layer: Any, recipe: str | Recipe | None, choices: dict[str, Any]) -> dict[str, Any]:
        """The choices, with the blocks that `layer` names."""
        if layer is None:
            return choices
        if "layers" in choices:
            raise RecipeError(f"layer={layer!r} and layers={choices['layers']!r}: give one of them")
        return {**choices, "layers": self._numbers(layer, recipe, choices)}

    def _explain_alone(
        self,
        image: Any,
        text: str,
        found: Sequence[Place],
        asked: Asked,
        job: Job,
        *,
        against: Sequence[str] | str | None,
        answer: str | None,
        strict: bool,
        **how: Any,
    ) -> list[Explanation]:
        """Phrases of one text, each a prompt of its own: the image runs once for all of them."""
        with own_conditions(self.adapter.module):
            prompts = [each.phrase for each in found]
            pairs = pair_up(
                self.adapter, image, prompts, classes=asked.count, against=against, answer=answer, strict=strict
            )
            (target,) = placed([job.target], asked, pairs, self.adapter.heads)
            making = self._making(pairs, wholes=(text,) * len(found), **how)
            (made,) = making.explanations([replace(job, target=target)])
        return [_of_place(each, place) for each, place in zip(made, found, strict=True)]

    def _numbers(self, layer: Any, recipe: str | Recipe | None, choices: dict[str, Any]) -> Layers:
        """Block numbers from numbers, or from the dotted names of modules."""
        given = [layer] if isinstance(layer, str) else layer
        if not isinstance(given, (list, tuple)) or not any(isinstance(each, str) and "." in each for each in given):
            return block_numbers(layer)
        base = recipe if recipe is not None else default(self.adapter.heads, self.anatomy.streams)
        own = base if isinstance(base, Recipe) else named(base).recipe
        stream = self.anatomy.stream(choices.get("stream", own.stream))
        root = self.adapter.module
        return block_numbers([block_named(each, stream, root) if isinstance(each, str) else each for each in given])

    def _plan(self, recipe: str | Recipe | None, asked: Asked, choices: dict[str, Any], **words: Any) -> Job:
        """Fit one recipe; what was asked for replaces its target unless it takes none."""
        base = recipe if recipe is not None else default(self.adapter.heads, self.anatomy.streams)
        own = base if isinstance(base, Recipe) else named(base).recipe
        takes = takes_target(choices.get("weighting", own.weighting))
        changes = {**(asked.changes if takes else {}), **choices}
        return plan(
            self.adapter, base, changes, custom=asked.custom, classes=asked.classes, region=asked.region, **words
        )

    def _explain(
        self,
        image: Any,
        text: Any,
        asked: Asked,
        jobs: Sequence[Job],
        *,
        against: Sequence[str] | str | None,
        answer: Sequence[str] | str | None,
        strict: bool,
        shape: Mapping[str, Any] = MappingProxyType({}),
        work: Callable[[Making, list[Job]], Sequence[Sequence[Any]]] = Making.explanations,
        **how: Any,
    ) -> list[Any]:
        """For every job what `work` makes of it, for the pair or for each."""
        found: list[Any] = [None] * len(jobs)
        alone = [index for index, job in enumerate(jobs) if job.encodes_phrase]
        rest = [index for index in range(len(jobs)) if index not in alone]
        for indices in filter(None, (rest, alone)):
            chosen = [jobs[index] for index in indices]
            read, wholes = _phrases(text, chosen[0]) if indices is alone else (text, ())
            with own_conditions(self.adapter.module):
                pairs = pair_up(
                    self.adapter, image, read, classes=asked.count, against=against, answer=answer, strict=strict
                )
                pairs = in_batch(self.adapter, pairs, shape) if shape else pairs
                targets = placed([job.target for job in chosen], asked, pairs, self.adapter.heads)
                ready = [
                    replace(job, target=of_tokens(job, target, pairs))
                    for job, target in zip(chosen, targets, strict=True)
                ]
                if wholes:
                    wholes = wholes * len(pairs.inputs.image_of) if len(wholes) == 1 else wholes
                made = work(self._making(pairs, wholes=wholes, **how), ready)
            for index, each in zip(indices, made, strict=True):
                found[index] = each if pairs.many else each[shape.get("pair", 0)]
        return found

    def _making(self, pairs: Pairs, **how: Any) -> Making:
        return Making(self.adapter, self.name, self._weights, pairs, **how)


def _conditions(record: Mapping[str, Any] | None) -> tuple[Mapping[str, Sequence[int]], Mapping[str, Any]]:
    """What was tapped and the shape of the batch, as a provenance states them; older ones do not."""
    return ({}, {}) if record is None else (record["model"].get("tapped") or {}, record["run"].get("batch") or {})


def _of_place(explanation: Explanation, place: Place) -> Explanation:
    """The explanation of a phrase with its own place on record."""
    own = {"phrase": place.phrase, "occurrence": place.occurrence, "span": list(place.span)}
    record = explanation.provenance
    return replace(explanation, provenance={**record, "run": record["run"] | own})


def _one_text(text: Any, against: Sequence[str] | str | None) -> bool:
    """Whether there is one text, and no other that it could be compared with."""
    if not isinstance(text, (str, list, tuple)):
        return False
    own, others = ([each] if isinstance(each, str) else each or () for each in (text, against))
    return len({*own, *others}) == 1


def _phrases(text: Any, job: Job) -> tuple[Any, tuple[str, ...]]:
    """What is encoded in place of each text, its phrase, and the texts that the phrases are of."""
    wholes = (text,) if isinstance(text, str) else tuple(text or ())
    if job.phrase is None or not wholes or not all(isinstance(each, str) for each in wholes):
        raise InputError(
            f"prompt='phrase' takes texts and a phrase of them, found text={text!r}, phrase={job.phrase!r}"
        )
    spans = [find_span(each, job.phrase, job.occurrence) for each in wholes]
    phrases = [each[start:end] for each, (start, end) in zip(wholes, spans, strict=True)]
    return (phrases[0] if isinstance(text, str) else phrases), wholes
