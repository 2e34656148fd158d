"""Recipe: every choice behind a map, stated, checked and hashed.

"Grad-CAM on a ViT" leaves open which tensor is weighted by the gradient of which scalar over which tokens, and in
which order heads are averaged and negatives removed. A recipe leaves nothing open: no field has a default.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, Self, cast, get_args

from vlcam.errors import RecipeError, listing

__all__ = ["SCALES", "SCHEMA", "Layers", "Queries", "Recipe", "Target", "takes_gradient", "takes_target", "values_of"]

SCHEMA = 1
"""Version of the field list. A field that a later version adds is left out of the fingerprint at its neutral value."""

Site = Literal["F1", "F2", "F3", "F3_HEADS", "F4", "F5", "F6", "CROSS", "CONTEXT"]
Stream = Literal["vision", "fusion"]
Layers = tuple[int, ...] | Literal["last", "all"]
Target = Literal["class", "segmentation", "itm", "contrastive", "custom", "none"]
Scale = Literal["logit", "probability", "log-probability", "margin", "finer", "cosine", "raw", "none"]
GradientPath = Literal["full", "direct", "block", "integrated", "none"]
GradientTokens = Literal["cls", "patches", "all", "none"]
Queries = tuple[int, ...] | Literal["cls", "registers", "patches", "all", "phrase", "none"]
MapAxis = Literal["keys", "queries", "none"]
Excluded = Literal["cls", "registers", "distillation", "special_text", "padding"]
ChannelWeighting = Literal[
    "gradcam",
    "gradcam++",
    "xgradcam",
    "layercam",
    "hirescam",
    "elementwise",
    "eigencam",
    "eigengradcam",
    "scorecam",
    "ablationcam",
    "reciprocam",
    "none",
]
AttentionWeighting = Literal["attention", "gradient", "attention*gradient", "sigmoid*gradient", "head_weights"]
Weighting = ChannelWeighting | AttentionWeighting
Relu = Literal["none", "gradient", "before_heads", "after_heads", "map"]
Heads = Literal["mean", "sum", "max", "min", "channels", "none"]
LayerRule = Literal[
    "single", "mean", "sum", "max", "shared", "rollout", "relevance", "transition", "headwise", "tokenwise"
]
Departure = Literal[
    "column_scaling",
    "mirrored_layers",
    "scores_gradient",
    "unprotected",
    "summed_cubes",
    "no_denominator",
    "aligned_corners",
    "one_token",
]
Reshape = Literal["raster"]
Upsample = Literal["nearest", "bilinear", "bicubic"]
Normalize = Literal["none", "minmax", "max"]

ATTENTION_SITES = ("F2", "CROSS")
CHANNEL_WEIGHTINGS = get_args(ChannelWeighting)
POOLED = ("gradcam", "gradcam++", "xgradcam")
"""Weightings with one weight per channel, for which gradients are pooled over tokens."""
ASKING = ("scorecam", "ablationcam", "reciprocam")
"""Weightings for which the model is asked again instead of differentiated."""
CARRIED = ("transition", "headwise", "tokenwise")
"""Layer rules that carry attention through the blocks, and weight it by the gradient at the last of them."""
FLOWS = ("rollout", "relevance", *CARRIED)
"""Layer rules that multiply the attention matrices of the blocks."""

_SCORED = ("class", "segmentation", "itm", "contrastive", "custom")
_WITHOUT_GRADIENT = ("attention", "none", "eigencam")

_DEPARTS: dict[Departure, tuple[str, tuple[str, ...]]] = {
    "column_scaling": ("layer_rule", ("rollout",)),
    "mirrored_layers": ("layer_rule", ("rollout",)),
    "scores_gradient": ("weighting", ("gradient", "attention*gradient", "head_weights")),
    "unprotected": ("layer_rule", ("rollout",)),
    "summed_cubes": ("weighting", ("gradcam++",)),
    "no_denominator": ("weighting", ("gradcam++",)),
    "aligned_corners": ("weighting", ("scorecam",)),
    "one_token": ("weighting", ("reciprocam",)),
}

_WORDS: dict[str, tuple[Any, ...]] = {
    "site": get_args(Site),
    "stream": get_args(Stream),
    "target": get_args(Target),
    "scale": get_args(Scale),
    "gradient_path": get_args(GradientPath),
    "gradient_tokens": get_args(GradientTokens),
    "map_axis": get_args(MapAxis),
    "weighting": (*get_args(ChannelWeighting), *get_args(AttentionWeighting)),
    "relu": get_args(Relu),
    "heads": get_args(Heads),
    "layer_rule": get_args(LayerRule),
    "reshape": get_args(Reshape),
    "upsample": get_args(Upsample),
    "normalize": get_args(Normalize),
}
SCALES: dict[str, tuple[Scale, ...]] = {
    "class": ("logit", "probability", "log-probability", "margin", "finer"),
    "segmentation": ("logit", "probability", "log-probability"),
    "itm": ("logit", "probability", "log-probability", "margin"),
    "contrastive": ("cosine",),
    "custom": ("raw",),
    "none": ("none",),
}
_GROUPS: dict[str, tuple[str, ...]] = {
    "feature representation": ("site", "stream", "layers"),
    "gradient target": ("target", "scale", "gradient_path"),
    "token handling": ("gradient_tokens", "queries", "map_axis", "exclude"),
    "aggregation": ("weighting", "relu", "heads", "layer_rule", "discard", "departures"),
    "spatial reconstruction": ("reshape", "upsample", "normalize"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """The choices that turn a model, an image and a text into one map. Immutable, hashable, without defaults.

    Attributes:
        name: what people call it. A label only: it is not part of equality or of the fingerprint.
        site: the tensor that is read: F1 (LayerNorm before attention), F2 (attention probabilities), F3
            (attention output after the projection), F3_HEADS (before it), F4 (LayerNorm before the FFN), F5 (FFN
            output), F6 (block output), CROSS (cross-attention probabilities), CONTEXT (image tokens that feed
            cross-attention).
        stream: the stack of blocks that the site is in.
        layers: block indices (negative ones count from the end), `last` or `all`.
        target: the scalar whose gradient is taken: a class, a class summed over pixels, image-text matching,
            contrastive similarity, a callable, none.
        scale: on which scale the target is read. `margin`: to the runner-up. `finer`: to the three classes whose
            logits are nearest, weighted by their probabilities (Finer-CAM).
        gradient_path: how the target depends on the tensor. `full`: as in the model. `direct`: through residual
            connections and FFNs only, the inputs of attention detached (AGCAM). `block`: each block is read at its
            own output, averaged over all tokens, by the model's final norm and head (LeGrad). `integrated`: the mean
            over 20 images from the mean colour to the image itself (integrated gradients). `none`: no gradient.
        gradient_tokens: over which tokens the gradient is pooled into channel or head weights. For attention: over
            which keys of the chosen rows (`patches`), or over all rows and keys (`all`).
        queries: for attention, which query rows are averaged into the map; which key columns, if the map's cells
            are queries.
        map_axis: for attention, whether the map's cells are the `keys` (attention received) or the `queries`.
        exclude: what takes no part. `cls`: the image's prefix tokens are no cells of the map. `registers`,
            `distillation`: these tokens are left out of `all` too. `special_text` (rows of [ENC], [CLS], [SEP]),
            `padding` (rows of padding).
        weighting: how activation and gradient are combined.
        relu: where negative values are removed, besides the ReLU that is part of a weighting.
        heads: how attention heads are merged; `channels`: heads are taken for the channels of token features.
        layer_rule: how several layers are merged. `shared`: the layers read one tensor, and its gradients add up.
            `rollout` and `relevance` multiply attention matrices; `transition`, `headwise` and `tokenwise` carry
            attention through the blocks and weight it by the gradient at the last of them.
        discard: for `rollout`, the share of smallest entries of each block's matrix that is set to zero.
        departures: where published code departs from the formula, by name; see `docs/recipes.md`.
        reshape: how tokens become a grid.
        upsample: interpolation from the grid to pixels.
        normalize: what is done to the token map before it becomes a heatmap.

    Raises:
        RecipeError: a value that a field does not know, or values that contradict each other; the message names
            the fields and the values that would do.
    """

    name: str = dataclasses.field(compare=False)
    site: Site
    stream: Stream
    layers: Layers
    target: Target
    scale: Scale
    gradient_path: GradientPath
    gradient_tokens: GradientTokens
    queries: Queries
    map_axis: MapAxis
    exclude: tuple[Excluded, ...]
    weighting: Weighting
    relu: Relu
    heads: Heads
    layer_rule: LayerRule
    discard: float
    departures: tuple[Departure, ...]
    reshape: Reshape
    upsample: Upsample
    normalize: Normalize

    def __post_init__(self) -> None:
        """Bring sequences into their one form, then check every field and every pair of fields."""
        if not isinstance(self.name, str):
            raise RecipeError(f"name={self.name!r}: give text")
        object.__setattr__(self, "layers", _whole_numbers("layers", self.layers, ("last", "all")))
        words = ("cls", "registers", "patches", "all", "phrase", "none")
        object.__setattr__(self, "queries", _whole_numbers("queries", self.queries, words))
        object.__setattr__(self, "exclude", _names("exclude", self.exclude, get_args(Excluded)))
        object.__setattr__(self, "departures", _names("departures", self.departures, get_args(Departure)))
        object.__setattr__(self, "discard", _share(self.discard))
        for field, known in _WORDS.items():
            _one_of(field, getattr(self, field), known)
        for field, known, reason in _constraints(self):
            _one_of(field, getattr(self, field), known, reason)
        _check_layers(self)
        _check_exclude(self)
        _check_departures(self)

    @property
    def fingerprint(self) -> str:
        """Short name of the choices: `r1-` and twelve hexadecimal digits; equal recipes have equal fingerprints."""
        values = self.to_dict()
        silent = {"name": self.name, "schema": SCHEMA} | _neutral(values)
        choices = {field: value for field, value in values.items() if field not in silent or value != silent[field]}
        digest = hashlib.sha256(json.dumps(choices, sort_keys=True).encode()).hexdigest()
        return f"r{SCHEMA}-{digest[:12]}"

    @property
    def needs_gradient(self) -> bool:
        """Whether the map depends on the gradient of the target."""
        return takes_gradient(self.weighting)

    @property
    def asks(self) -> bool:
        """Whether the model is asked again, with something taken away, instead of differentiated."""
        return self.weighting in ASKING

    def replace(self, **changes: Any) -> Self:
        """Return a copy with other choices; the name is kept unless a new one is given.

        A field but `site` for which the changes leave a single value takes that value: `replace(weighting="attention")`
        also sets `target="none"`, because attention depends on no score.

        Args:
            **changes: field names and their new values.

        Raises:
            RecipeError: an unknown field, or choices that no longer fit together.
        """
        unknown = [field for field in changes if field not in self.to_dict() or field == "schema"]
        if unknown:
            raise RecipeError(f"a recipe has no field {listing(unknown)}; its fields: {', '.join(self._fields())}")
        return dataclasses.replace(self, **_forced(self, changes) | changes)

    def to_dict(self) -> dict[str, Any]:
        """The schema version and every field in order, as JSON values."""
        values: dict[str, Any] = {"schema": SCHEMA}
        for field in self._fields():
            value = getattr(self, field)
            values[field] = list(value) if isinstance(value, tuple) else value
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build a recipe from `to_dict()`'s result.

        Args:
            values: the schema version and every field; none may be missing.

        Raises:
            RecipeError: a schema version that this release does not know, or missing or unknown fields.
        """
        given = dict(values)
        schema = given.pop("schema", None)
        if schema != SCHEMA:
            raise RecipeError(f"recipe schema {schema!r}: this release of vlcam reads schema {SCHEMA}")
        given = _neutral(given) | given
        missing = [field for field in cls._fields() if field not in given]
        unknown = [field for field in given if field not in cls._fields()]
        if missing or unknown:
            raise RecipeError(f"a recipe states every field: missing {listing(missing)}, unknown {listing(unknown)}")
        return cls(**given)

    def to_json(self) -> str:
        """The recipe as JSON text."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read `to_json()`'s text.

        Raises:
            RecipeError: text that is not JSON, or not a recipe.
        """
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise RecipeError(f"not JSON: {error}") from None
        return cls.from_dict(_table(values))

    def to_toml(self) -> str:
        """The recipe as TOML text."""
        return "".join(f"{field} = {_toml(value)}\n" for field, value in self.to_dict().items())

    @classmethod
    def from_toml(cls, text: str) -> Self:
        """Read `to_toml()`'s text.

        Raises:
            RecipeError: text that is not TOML, or not a recipe.
        """
        try:
            values = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise RecipeError(f"not TOML: {error}") from None
        return cls.from_dict(values)

    def groups(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The fields under the headings of the reporting checklist."""
        for group, fields in _GROUPS.items():
            yield group, {field: getattr(self, field) for field in fields}

    def differences(self, other: Recipe) -> dict[str, tuple[Any, Any]]:
        """The fields in which another recipe differs, with both values; the name is not compared."""
        pairs = {field: (getattr(self, field), getattr(other, field)) for field in self._fields() if field != "name"}
        return {field: pair for field, pair in pairs.items() if pair[0] != pair[1]}

    @classmethod
    def _fields(cls) -> tuple[str, ...]:
        return tuple(field.name for field in dataclasses.fields(cls))


def takes_gradient(weighting: str) -> bool:
    """Whether a weighting depends on the gradient of the target."""
    return weighting not in (*_WITHOUT_GRADIENT, *ASKING)


def takes_target(weighting: str) -> bool:
    """Whether a weighting depends on the target at all."""
    return weighting not in _WITHOUT_GRADIENT


def values_of(field: str) -> tuple[Any, ...]:
    """The words that a field knows; none for one that holds numbers, lists or free text.

    Raises:
        RecipeError: no such field.
    """
    if field in _WORDS:
        return _WORDS[field]
    if field in Recipe.__dataclass_fields__:
        return {"queries": ("cls", "registers", "patches", "all")}.get(field, ())
    raise RecipeError(f"a recipe has no field {field!r}; its fields: {', '.join(Recipe.__dataclass_fields__)}")


def _neutral(values: Mapping[str, Any]) -> dict[str, Any]:
    """What fields that came after the first files mean there: those lack them, and fingerprints stay as they were."""
    return {
        "gradient_path": "full" if takes_gradient(values.get("weighting", "")) else "none",
        "map_axis": "keys" if values.get("site") in ATTENTION_SITES else "none",
        "discard": 0.0,
        "departures": [],
    }


Constraint = tuple[str, tuple[Any, ...], str]


def _forced(recipe: Recipe, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that are not among the changes, and for which those leave one value, with that value."""
    values = {field: getattr(recipe, field) for field in _WORDS} | {
        "queries": recipe.queries,
        "discard": recipe.discard,
        "departures": (),
    }
    values |= {field: value for field, value in changes.items() if field in values and field != "departures"}
    settled = {"site", *changes}  # where a map is read does not follow from how it is made
    if any(values[field] not in known for field, known in _WORDS.items()):
        return {}  # the constructor says what is wrong
    forced: dict[str, Any] = {}
    for _ in _WORDS:  # one value may force the next
        draft = SimpleNamespace(**values | forced)
        draft.needs_gradient = takes_gradient(draft.weighting)
        found = {
            field: known[0]
            for field, known, _ in _constraints(cast("Recipe", draft))
            if (len(known) == 1 or _unset(field, draft)) and field in values and field not in settled
            if getattr(draft, field) != known[0]
        }
        if not found:
            break
        forced |= found
    return forced


def _unset(field: str, draft: SimpleNamespace) -> bool:
    """Whether a recipe that took no gradient takes one now: then along the model's own paths."""
    return field == "gradient_path" and draft.needs_gradient and draft.gradient_path == "none"


def _constraints(recipe: Recipe) -> Iterator[Constraint]:
    """For each field whose values depend on another field: the values that would do, and why."""
    site = recipe.site
    yield "stream", ("fusion",) if site in ("CROSS", "CONTEXT") else ("vision",), f"site={site!r}"
    yield "scale", SCALES[recipe.target], f"target={recipe.target!r}"
    if site in ATTENTION_SITES:
        yield from _attention_constraints(recipe)
    else:
        yield from _feature_constraints(recipe)
    yield from _gradient_constraints(recipe)
    yield from _layer_constraints(recipe)


def _attention_constraints(recipe: Recipe) -> Iterator[Constraint]:
    site, channels = f"site={recipe.site!r}", recipe.heads == "channels"
    yield "heads", ("mean", "sum", "max", "min", "channels"), site
    if channels:
        plain = tuple(each for each in CHANNEL_WEIGHTINGS if each not in ASKING)
        yield "weighting", plain, "heads='channels'"
        yield from _channel_constraints(recipe, ("patches",))
    else:
        yield "weighting", get_args(AttentionWeighting), f"{site}, heads={recipe.heads!r}"
        pooled = recipe.weighting == "head_weights"
        yield "gradient_tokens", ("patches", "all") if pooled else ("none",), f"weighting={recipe.weighting!r}"
    yield "map_axis", ("keys",) if channels or recipe.site == "CROSS" else ("keys", "queries"), site
    if isinstance(recipe.queries, str):
        rows = ("cls", "all", "phrase") if recipe.site == "CROSS" else ("cls", "registers", "patches", "all")
        yield "queries", rows, site
        if recipe.map_axis == "queries" and recipe.weighting == "attention":
            given = "map_axis='queries', weighting='attention' (a row of attention sums to 1, so the map is constant)"
            yield "queries", tuple(each for each in rows if each != "all"), given


def _feature_constraints(recipe: Recipe) -> Iterator[Constraint]:
    site = f"site={recipe.site!r}"
    yield "weighting", CHANNEL_WEIGHTINGS, site
    yield "heads", ("none",), f"{site} (token features have no head axis)"
    yield "queries", ("none",), f"{site} (token features have no query rows)"
    yield "map_axis", ("none",), f"{site} (tokens are the only axis)"
    yield from _channel_constraints(recipe, ("cls", "patches", "all"))


def _channel_constraints(recipe: Recipe, tokens: tuple[str, ...]) -> Iterator[Constraint]:
    weighting = f"weighting={recipe.weighting!r}"
    pooled = tokens if recipe.weighting == "gradcam" else tokens[-2:]
    yield "gradient_tokens", pooled if recipe.weighting in POOLED else ("none",), weighting
    if recipe.weighting == "elementwise":
        yield "relu", ("none",), f"{weighting} (its own ReLU leaves nothing negative)"
    elif recipe.weighting in ("gradcam", "xgradcam", "hirescam"):
        yield "relu", ("none", "gradient", "map"), weighting
    else:
        yield "relu", ("none", "map"), weighting


def _gradient_constraints(recipe: Recipe) -> Iterator[Constraint]:
    weighting = f"weighting={recipe.weighting!r}"
    if recipe.weighting in ASKING:
        yield "target", _SCORED, weighting
        yield "gradient_path", ("none",), f"{weighting} (the model is asked, not differentiated)"
        yield "layer_rule", ("single",), weighting
        if recipe.weighting == "reciprocam":
            yield "site", ("F1",), f"{weighting} (it keeps tokens of the block's input)"
        return
    if not recipe.needs_gradient:
        if recipe.weighting == "attention":
            yield "relu", ("none",), f"{weighting} (probabilities are never negative)"
        yield "target", ("none",), f"{weighting} (it does not depend on a score)"
        yield "gradient_path", ("none",), weighting
        return
    yield "target", _SCORED, weighting
    yield "gradient_path", ("full", "direct", "block", "integrated"), weighting
    if recipe.site != "F2":
        yield (
            "gradient_path",
            ("full", "integrated"),
            f"site={recipe.site!r} (other paths are those of AGCAM and LeGrad, for F2)",
        )
    if recipe.weighting == "sigmoid*gradient":
        yield "site", ("F2",), f"{weighting} (the scores before the softmax)"


def _layer_constraints(recipe: Recipe) -> Iterator[Constraint]:
    rule = f"layer_rule={recipe.layer_rule!r}"
    if recipe.layer_rule == "shared":
        yield "site", ("CONTEXT",), rule
    elif recipe.site == "CONTEXT":
        yield "layer_rule", ("single", "shared"), "site='CONTEXT' (every block reads the same tensor)"
    if recipe.layer_rule in FLOWS:
        yield "site", ("F2",), f"{rule} (only self-attention matrices can be multiplied)"
        yield "heads", ("mean", "sum", "max", "min"), rule
        yield "map_axis", ("keys",), rule
    if recipe.layer_rule in CARRIED:
        yield "weighting", ("attention*gradient",), f"{rule} (attention is carried, the gradient weights it)"
        yield "relu", ("gradient",), rule
        yield "heads", ("mean",), rule
    if recipe.layer_rule != "rollout":
        yield "discard", (0.0,), rule
    for departure in recipe.departures:
        yield *_DEPARTS[departure], f"departures={recipe.departures!r}"
        if departure == "scores_gradient":
            yield "site", ("F2",), f"departures={recipe.departures!r} (the scores before the softmax)"


def _check_layers(recipe: Recipe) -> None:
    several = recipe.layers == "all" or (isinstance(recipe.layers, tuple) and len(recipe.layers) > 1)
    if recipe.layer_rule == "single" and several:
        raise RecipeError(
            f"layer_rule='single' with layers={recipe.layers!r}: give one layer, or a rule that merges several"
        )


def _check_exclude(recipe: Recipe) -> None:
    if "cls" not in recipe.exclude:
        raise RecipeError(
            f"exclude={recipe.exclude!r}: reshape='raster' has no place for the image class token; add 'cls'"
        )
    text = [name for name in recipe.exclude if name in ("special_text", "padding")]
    if recipe.site != "CROSS" and text:
        raise RecipeError(
            f"exclude={recipe.exclude!r} with site={recipe.site!r}: there is no text, so leave out {listing(text)}"
        )
    if recipe.site != "CROSS":
        return
    if "padding" not in recipe.exclude:
        raise RecipeError(
            f"exclude={recipe.exclude!r} with site='CROSS': a map must not depend on the texts that it shares a batch "
            "with; add 'padding'"
        )
    if recipe.queries == "cls" and "special_text" in recipe.exclude:
        raise RecipeError(
            f"queries='cls' with exclude={recipe.exclude!r}: row 0 is a special token; leave 'special_text' out"
        )


def _check_departures(recipe: Recipe) -> None:
    if {"summed_cubes", "no_denominator"} <= set(recipe.departures):
        raise RecipeError(f"departures={recipe.departures!r}: one has another denominator, one none; give one of them")


def _one_of(field: str, value: object, known: tuple[Any, ...], reason: str = "") -> None:
    if value not in known:
        because = f" with {reason}" if reason else ""
        raise RecipeError(f"{field}={value!r}{because}: choose from {listing(known)}")


def _whole_numbers(field: str, value: object, words: tuple[str, ...]) -> object:
    if isinstance(value, str) and value in words:
        return value
    numbers = (value,) if isinstance(value, int) else value
    if isinstance(numbers, (list, tuple)) and numbers and all(type(n) is int for n in numbers):
        if len(set(numbers)) == len(numbers):
            return tuple(numbers)
        raise RecipeError(f"{field}={value!r}: an index is given twice")
    raise RecipeError(f"{field}={value!r}: give whole numbers, or choose from {listing(words)}")


def _names(field: str, value: object, known: tuple[Any, ...]) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or any(name not in known for name in names):
        raise RecipeError(f"{field}={value!r}: give any of {listing(known)}")
    return tuple(name for name in known if name in names)


def _share(value: object) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1:
        return float(value)
    raise RecipeError(f"discard={value!r}: give a share of 0 or more, and less than 1")


def _toml(value: object) -> str:
    """Strings, numbers and lists of them are written alike in TOML and in JSON, but for one control sign."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _table(values: object) -> Mapping[str, Any]:
    if not isinstance(values, dict):
        raise RecipeError(f"a recipe is a table of fields, found {type(values).__name__}")
    return values
