"""A recipe on one model: which blocks it means there, what is tapped, what is differentiated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vlcam.adapter import ModelAdapter
from vlcam.anatomy import HANDED, INPUT, KEYS, QUERIES, SCORES, VALUES, StreamAnatomy, Tap
from vlcam.catalogue import named
from vlcam.choices import COMPARING, CONTRASTIVE, FLOWS, OF_VALUES, SCALES
from vlcam.entry import Entry
from vlcam.errors import RecipeError, listing
from vlcam.readers import READERS, HeadKind
from vlcam.recipe import Recipe
from vlcam.targets import Custom, Region, Target, resolve

__all__ = ["Job", "counted", "in_passes", "plan"]


@dataclass(frozen=True)
class Job:
    """One recipe, made ready for one model.

    Attributes:
        recipe: every choice.
        layers: the blocks that the recipe's `layers` are in this model.
        fitted: how layers and target were found, in words, by field.
        target: what is differentiated.
        phrase: the words that were asked for, if any.
        occurrence: which of several.
        text_taps: the self-attention of text that cross-attention is read together with, first block first.
        image_taps: that of the image.
    """

    recipe: Recipe
    layers: tuple[int, ...]
    fitted: Mapping[str, str]
    target: Target
    phrase: str | None = None
    occurrence: int | None = None
    text_taps: tuple[Tap, ...] = ()
    image_taps: tuple[Tap, ...] = ()

    @property
    def taps(self) -> tuple[Tap, ...]:
        """What is weighted, a tap per layer: the recipe's site, or the values that its heads mix."""
        of_values = self.recipe.weighting in OF_VALUES or self.recipe.attention == "values"
        return self._at(VALUES if of_values else self.recipe.site)

    @property
    def gradient_taps(self) -> tuple[Tap, ...]:
        """Whose gradient goes with each of `taps`."""
        found = self._at(SCORES if "scores_gradient" in self.recipe.departures else self.recipe.site)
        return found[::-1] if "mirrored_layers" in self.recipe.departures else found

    @property
    def score_taps(self) -> tuple[Tap, ...]:
        """What the softmax takes at each of `taps`, for a recipe that reads it."""
        return self._at(SCORES) if self.recipe.weighting == "sigmoid*gradient" else ()

    @property
    def norm_taps(self) -> tuple[tuple[Tap, Tap], ...]:
        """What each block's tokens hand on, and its input, for a recipe that weights tokens by them."""
        if self.recipe.layer_rule != "tokenwise":
            return ()
        return tuple(zip(self._at(HANDED), self._at(INPUT), strict=True))

    @property
    def key_taps(self) -> tuple[tuple[Tap, Tap], ...]:
        """Queries and keys of each block, for a recipe that compares them."""
        if self.recipe.weighting != "value*gradient*similarity":
            return ()
        return tuple(zip(self._at(QUERIES), self._at(KEYS), strict=True))

    @property
    def pooler_tap(self) -> Tap | None:
        """The pooler's attention, for a recipe that carries slots on to the patches."""
        return Tap("pooler", 0, "CROSS") if self.recipe.compose == "pooler" else None

    @property
    def read(self) -> tuple[Tap, ...]:
        """Everything that a pass must tap."""
        found = [*self.taps, *self.gradient_taps] if self.recipe.needs_gradient else [*self.taps]
        found += [*self.score_taps, *self.text_taps, *self.image_taps]
        if self.norm_taps:
            found += [*self._at(VALUES), *self._at(INPUT)]
        found += [tap for pair in self.key_taps for tap in pair]
        if self.recipe.attention == "values":
            found.append(Tap(self.recipe.stream, self.layers[0], INPUT))
        if self.pooler_tap is not None:
            found.append(self.pooler_tap)
        return tuple(dict.fromkeys(found))

    @property
    def encodes_phrase(self) -> bool:
        """Whether the phrase is encoded in place of its text."""
        return self.recipe.prompt == "phrase" and self.recipe.target in CONTRASTIVE

    @property
    def edited(self) -> tuple[str, int] | None:
        """From which block of which stream on attention is computed otherwise than in the model, if it is."""
        if self.recipe.attention not in ("one_head", "identity"):
            return None
        behind = self.recipe.site == "F6" and self.recipe.attention == "one_head"
        return self.recipe.stream, self.layers[0] + behind

    def _at(self, site: str) -> tuple[Tap, ...]:
        return tuple(Tap(self.recipe.stream, layer, site) for layer in self.layers)


def plan(
    adapter: ModelAdapter,
    recipe: str | Recipe,
    changes: Mapping[str, Any],
    *,
    custom: Custom | None = None,
    classes: Sequence[int | None] = (None,),
    region: Region | None = None,
    phrase: str | None = None,
    occurrence: int | None = None,
) -> Job:
    """Fit a recipe to a model.

    Args:
        adapter: the model.
        recipe: a name, whose published layer and target are moved to this model, or a recipe, taken as it is.
        changes: fields that replace the recipe's.
        custom: the callable behind `target='custom'`.
        classes: the class of every pair, or one for all; None for the one with the highest logit.
        region: where the class is explained, for a model that tells the classes of pixels.
        phrase: words of the text; the recipe then reads their rows.
        occurrence: which of several.

    Raises:
        RecipeError: choices that do not fit together, or that the model cannot meet.
        UnknownNameError: a name, stream or layer that does not exist.
    """
    if isinstance(recipe, str):
        entry = named(recipe)
        counting = counted(adapter, changes.get("stream", entry.recipe.stream), entry.recipe.gradient_path)
        chosen, fitted = _fitted(entry, adapter, counting, changes.get("site", entry.recipe.site))
    else:
        chosen, fitted = recipe, dict.fromkeys(("layers", "target", "tokens"), "as given")
    wanted = {**changes, **_scale(chosen, changes, adapter.heads)}
    fitted |= {field: "as given" for field in fitted if field in wanted}
    if {"queries", "gradient_tokens"} & set(wanted):
        fitted["tokens"] = "as given"
    if phrase is not None:
        wanted |= _phrase_rows(chosen, wanted, phrase)
    elif occurrence is not None:
        raise RecipeError(f"occurrence={occurrence}: there is no phrase of which it could be one; give phrase='...'")
    if any(getattr(chosen, field, None) != value for field, value in wanted.items()):
        chosen = chosen.replace(**wanted)
    if phrase is None and (chosen.queries == "phrase" or chosen.prompt != "whole"):
        field = "queries" if chosen.queries == "phrase" else "prompt"
        raise RecipeError(f"{field}={getattr(chosen, field)!r}: say which words, phrase='...'")
    stream = adapter.anatomy.stream(chosen.stream)
    layers = counted(adapter, chosen.stream, chosen.gradient_path).indices(chosen.layers, chosen.site)
    target = resolve(chosen, adapter.heads, custom=custom, classes=classes, region=region)
    if stream.run_by and target.head not in stream.run_by:
        target = _run(target, chosen, stream)
    _check_windows(chosen, stream, adapter.prefix)
    _check_flow(chosen, stream)
    _check_form(chosen, stream, adapter)
    _check_stages(chosen, stream, () if target.pooler else layers)
    _check_slots(chosen, stream)
    _check_blocks(target, adapter)
    _check_tokens(chosen, adapter)
    return Job(chosen, layers, fitted, target, phrase, occurrence, *_around(chosen, layers, adapter))


def _run(target: Target, chosen: Recipe, stream: StreamAnatomy) -> Target:
    """For a recipe without a target, the score whose pass runs its stream."""
    if chosen.target != "none":
        raise RecipeError(
            f"target={chosen.target!r} with stream={stream.name!r}: its pass does not run that stream, which belongs "
            f"to {listing(stream.run_by)}"
        )
    return replace(target, head=stream.run_by[0])


def _around(chosen: Recipe, layers: Sequence[int], adapter: ModelAdapter) -> tuple[tuple[Tap, ...], tuple[Tap, ...]]:
    """The self-attention of text, and of the image, that cross-attention is read together with."""
    if not chosen.bimodal:
        return (), ()
    text = adapter.anatomy.stream(chosen.stream)
    found = _self_attention(text, range(len(text.blocks)) if chosen.layers == "all" else layers)
    if chosen.compose == "none":
        return found, ()
    vision = adapter.anatomy.stream("vision")
    if vision.windowed or vision.stages:
        raise RecipeError(
            "compose='vision': image tokens of this model attend within windows, or are merged, so that there are no "
            "matrices over all of them to multiply; choose compose='none'"
        )
    return found, _self_attention(vision, range(len(vision.blocks)))


def _self_attention(stream: StreamAnatomy, layers: Sequence[int]) -> tuple[Tap, ...]:
    for layer in layers:
        stream.reading(layer, "F2")  # says why there is none
    return tuple(Tap(stream.name, layer, "F2") for layer in layers)


def _fitted(entry: Entry, adapter: ModelAdapter, stream: StreamAnatomy, site: str) -> tuple[Recipe, dict[str, str]]:
    """A named recipe on a model; relative depth counts the blocks that have the site, where others lack it."""
    there = stream.having(site)
    if not there or len(there) == len(stream.blocks):
        return entry.fitted(len(stream.blocks), adapter)
    chosen, rules = entry.fitted(len(there), adapter)
    if isinstance(chosen.layers, tuple) and all(-len(there) <= b < len(there) for b in chosen.layers):
        chosen = chosen.replace(layers=tuple(there[b] for b in chosen.layers))
        rules["layers"] += f"; counted over the blocks that have {site}: {', '.join(map(str, there))}"
    return chosen, rules


def counted(adapter: ModelAdapter, stream: str, path: str) -> StreamAnatomy:
    """The stream whose blocks a recipe's `layers` count: a pooler that reads each block's output counts those."""
    return adapter.anatomy.stream("vision" if (stream, path) == ("pooler", "block") else stream)


def _check_slots(chosen: Recipe, stream: StreamAnatomy) -> None:
    if stream.slots and chosen.site in ("CROSS", "CONTEXT") and chosen.compose != "pooler":
        carried = chosen.site == "CROSS" and not chosen.bimodal
        instead = "; compose='pooler' carries them on to the patches" if carried else ""
        raise RecipeError(
            f"site={chosen.site!r}: {stream.name} of this model looks at {stream.slots}, which have no place on the "
            f"image{instead}"
        )
    if not stream.slots and chosen.compose == "pooler":
        raise RecipeError("compose='pooler': this model's cross-attention looks at the image tokens themselves")


def _check_blocks(target: Target, adapter: ModelAdapter) -> None:
    if target.path == "block" and not adapter.reads_blocks:
        raise RecipeError(
            f"gradient_path='block': {type(adapter).__name__} does not say how target {target.head!r} is read from the "
            "tokens of a block; use gradient_path='full'"
        )


def _check_tokens(chosen: Recipe, adapter: ModelAdapter) -> None:
    if chosen.weighting in COMPARING and not adapter.embeds_tokens:
        raise RecipeError(
            f"weighting={chosen.weighting!r}: {type(adapter).__name__} does not embed single tokens next to texts; "
            "choose a weighting of gradients"
        )


def _check_form(chosen: Recipe, stream: StreamAnatomy, adapter: ModelAdapter) -> None:
    if chosen.attention == "one_head" and (stream.windowed or not adapter.joins_heads):
        raise RecipeError(
            "attention='one_head': each head of this model adds a bias of its own to its scores, so that they cannot "
            "be joined; take attention='own'"
        )


def _check_stages(chosen: Recipe, stream: StreamAnatomy, layers: Sequence[int]) -> None:
    for layer in layers:
        stream.reading(layer, chosen.site)  # says which sites there are, if not this one
    stages = {stream.stage_of(layer) for layer in layers}
    if len(stages) > 1:
        raise RecipeError(
            f"layers={chosen.layers!r}: these blocks are of stages {sorted(stages)}, whose grids have different sizes; "
            "choose blocks of one stage"
        )


def _check_flow(chosen: Recipe, stream: StreamAnatomy) -> None:
    lacking = [number for number, block in enumerate(stream.blocks) if chosen.site not in block.sites]
    if chosen.layer_rule in FLOWS and chosen.layers == "all" and lacking and not chosen.bimodal:
        stream.reading(lacking[0], chosen.site)  # says why


def _check_windows(chosen: Recipe, stream: StreamAnatomy, prefix: Sequence[str]) -> None:
    if chosen.weighting == "reciprocam" and (stream.stages or "cls" not in prefix):
        raise RecipeError(
            "weighting='reciprocam': it keeps one neighbourhood of a block's input and the class token, and this model "
            "merges its tokens or has no class token; choose another weighting"
        )
    if not stream.windowed or chosen.site != "F2":
        return
    if chosen.layer_rule in FLOWS:
        raise RecipeError(
            f"layer_rule={chosen.layer_rule!r}: tokens of this model attend within windows, and stages merge tokens, "
            "so that there are no matrices over all tokens to multiply; choose layer_rule='single'"
        )
    if chosen.queries not in ("all", "patches"):
        raise RecipeError(
            f"queries={chosen.queries!r}: tokens of this model attend within windows and there is no class token; "
            "queries='patches' takes all tokens of each window"
        )


def _scale(chosen: Recipe, wanted: Mapping[str, Any], heads: Mapping[str, HeadKind]) -> dict[str, Any]:
    """The plain scale of another target in place of the recipe's plain one; a scale with a meaning of its own stays."""
    target = wanted.get("target", chosen.target)
    scales = tuple(READERS[heads[target]]) if target in heads else SCALES.get(target, ())
    plain = chosen.scale in ("logit", "cosine", "raw")
    return {"scale": scales[0]} if "scale" not in wanted and scales and plain and chosen.scale not in scales else {}


def _phrase_rows(chosen: Recipe, wanted: Mapping[str, Any], phrase: str) -> dict[str, Any]:
    """How a phrase is asked for: by its rows in cross-attention, or by the text or tokens that are scored."""
    if wanted.get("target", chosen.target) == "caption":
        rows = {"queries": "phrase"} if chosen.site == "CROSS" else {}
        stated = "prompt" in wanted or chosen.queries == "phrase"
        return rows if stated else {"prompt": "phrase", **rows}
    if chosen.site != "CROSS" and wanted.get("target", chosen.target) in CONTRASTIVE:
        if wanted.get("prompt") == "whole":
            raise RecipeError(
                f"phrase={phrase!r} and prompt='whole': choose 'phrase' or 'in_place', or leave phrase out"
            )
        return {"prompt": wanted.get("prompt", "phrase" if chosen.prompt == "whole" else chosen.prompt)}
    if wanted.get("stream", chosen.stream) == "pooler":
        raise RecipeError(
            f"phrase={phrase!r} with stream='pooler': its rows are learned queries and no words, so that there is no "
            "map of a phrase; leave phrase out, or name queries by number, queries=(0, ...)"
        )
    if chosen.queries not in ("all", "phrase"):
        raise RecipeError(
            f"phrase={phrase!r} with site={chosen.site!r}, queries={chosen.queries!r}: only maps with text rows "
            "(site='CROSS', queries='all' or 'phrase'), and those of a contrastive score, can be read for one phrase"
        )
    if wanted.get("queries", "phrase") != "phrase":
        raise RecipeError(f"phrase={phrase!r} and queries={wanted['queries']!r}: give one of them")
    return {"queries": "phrase"}


def in_passes(jobs: Sequence[Job]) -> list[list[int]]:
    """Indices of jobs, grouped by the pass that serves them: one head, and one way for gradients through the model.

    A map that takes no gradient joins a pass that runs for another reason.
    """
    passes: dict[tuple[Any, ...], list[int]] = {}
    for index, job in sorted(enumerate(jobs), key=lambda item: not item[1].target.differentiate):
        own = job.target.path if job.target.path in ("direct", "integrated") else "full"
        scaled = "head_scale" in job.recipe.departures
        form = (job.recipe.attention if job.edited else None, job.edited, job.recipe.prompt, scaled)
        key = (job.target.head, form, "pooler" if job.target.pooler else own)
        if not job.target.differentiate:
            key = next((other for other in passes if other[:2] == key[:2] and other[2] != "pooler"), key)
        passes.setdefault(key, []).append(index)
    return list(passes.values())
