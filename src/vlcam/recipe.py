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
from typing import Any, Literal, Self, get_args

from vlcam.errors import RecipeError, listing

__all__ = ["SCHEMA", "Layers", "Queries", "Recipe"]

SCHEMA = 1
"""Version of the field list. A field that a later version adds is left out of the fingerprint at its neutral value."""

Site = Literal["F1", "F2", "F3", "F3_HEADS", "F4", "F5", "F6", "CROSS", "CONTEXT"]
Stream = Literal["vision", "fusion"]
Layers = tuple[int, ...] | Literal["last", "all"]
Target = Literal["itm", "contrastive", "custom", "none"]
Scale = Literal["logit", "probability", "log-probability", "margin", "cosine", "raw", "none"]
GradientTokens = Literal["cls", "patches", "all", "none"]
Queries = tuple[int, ...] | Literal["cls", "patches", "all", "phrase", "none"]
Excluded = Literal["cls", "special_text", "padding"]
Weighting = Literal["gradcam", "attention", "gradient", "attention*gradient"]
Relu = Literal["none", "gradient", "before_heads", "after_heads", "map"]
Heads = Literal["mean", "sum", "max", "min", "none"]
LayerRule = Literal["single", "mean", "sum", "max", "shared"]
Reshape = Literal["raster"]
Upsample = Literal["nearest", "bilinear", "bicubic"]
Normalize = Literal["none", "minmax", "max"]

ATTENTION_SITES = ("F2", "CROSS")

_WORDS: dict[str, tuple[Any, ...]] = {
    "site": get_args(Site),
    "stream": get_args(Stream),
    "target": get_args(Target),
    "scale": get_args(Scale),
    "gradient_tokens": get_args(GradientTokens),
    "weighting": get_args(Weighting),
    "relu": get_args(Relu),
    "heads": get_args(Heads),
    "layer_rule": get_args(LayerRule),
    "reshape": get_args(Reshape),
    "upsample": get_args(Upsample),
    "normalize": get_args(Normalize),
}
_SCALES: dict[str, tuple[Scale, ...]] = {
    "itm": ("logit", "probability", "log-probability", "margin"),
    "contrastive": ("cosine",),
    "custom": ("raw",),
    "none": ("none",),
}
_GROUPS: dict[str, tuple[str, ...]] = {
    "feature representation": ("site", "stream", "layers"),
    "gradient target": ("target", "scale"),
    "token handling": ("gradient_tokens", "queries", "exclude"),
    "aggregation": ("weighting", "relu", "heads", "layer_rule"),
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
        target: the scalar whose gradient is taken: image-text matching, contrastive similarity, a callable, none.
        scale: on which scale the target is read.
        gradient_tokens: for token features, over which tokens the gradient is averaged into channel weights.
        queries: for attention, which query rows are averaged into the map.
        exclude: what never reaches the map: `cls` (image class token), `special_text` (rows of [ENC], [CLS],
            [SEP]), `padding` (rows of padding).
        weighting: how activation and gradient are combined.
        relu: where negative values are removed.
        heads: how attention heads are merged.
        layer_rule: how several layers are merged. `shared`: the layers read one tensor, and its gradients add up.
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
    gradient_tokens: GradientTokens
    queries: Queries
    exclude: tuple[Excluded, ...]
    weighting: Weighting
    relu: Relu
    heads: Heads
    layer_rule: LayerRule
    reshape: Reshape
    upsample: Upsample
    normalize: Normalize

    def __post_init__(self) -> None:
        """Bring sequences into their one form, then check every field and every pair of fields."""
        if not isinstance(self.name, str):
            raise RecipeError(f"name={self.name!r}: give text")
        object.__setattr__(self, "layers", _whole_numbers("layers", self.layers, ("last", "all")))
        words = ("cls", "patches", "all", "phrase", "none")
        object.__setattr__(self, "queries", _whole_numbers("queries", self.queries, words))
        object.__setattr__(self, "exclude", _excluded(self.exclude))
        for field, known in _WORDS.items():
            _one_of(field, getattr(self, field), known)
        for field, known, reason in _constraints(self):
            _one_of(field, getattr(self, field), known, reason)
        _check_layers(self)
        _check_exclude(self)

    @property
    def fingerprint(self) -> str:
        """Short name of the choices: `r1-` and twelve hexadecimal digits; equal recipes have equal fingerprints."""
        choices = {field: value for field, value in self.to_dict().items() if field not in ("name", "schema")}
        digest = hashlib.sha256(json.dumps(choices, sort_keys=True).encode()).hexdigest()
        return f"r{SCHEMA}-{digest[:12]}"

    @property
    def needs_gradient(self) -> bool:
        """Whether the map depends on the gradient of the target."""
        return self.weighting != "attention"

    def replace(self, **changes: Any) -> Self:
        """Return a copy with other choices; the name is kept unless a new one is given.

        Args:
            **changes: field names and their new values.

        Raises:
            RecipeError: an unknown field, or choices that no longer fit together.
        """
        unknown = [field for field in changes if field not in self.to_dict() or field == "schema"]
        if unknown:
            raise RecipeError(f"a recipe has no field {listing(unknown)}; its fields: {', '.join(self._fields())}")
        return dataclasses.replace(self, **changes)

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


def _constraints(recipe: Recipe) -> Iterator[tuple[str, tuple[Any, ...], str]]:
    """For each field whose values depend on another field: the values that would do, and why."""
    site, attention = recipe.site, recipe.site in ATTENTION_SITES
    yield "stream", ("fusion",) if site in ("CROSS", "CONTEXT") else ("vision",), f"site={site!r}"
    yield "scale", _SCALES[recipe.target], f"target={recipe.target!r}"
    if attention:
        yield "weighting", ("attention", "gradient", "attention*gradient"), f"site={site!r}"
        yield "gradient_tokens", ("none",), f"site={site!r} (rows are chosen by queries)"
        yield "heads", ("mean", "sum", "max", "min"), f"site={site!r}"
        if isinstance(recipe.queries, str):
            rows = ("cls", "all", "phrase") if site == "CROSS" else ("cls", "patches", "all")
            yield "queries", rows, f"site={site!r}"
    else:
        yield "weighting", ("gradcam",), f"site={site!r}"
        yield "gradient_tokens", ("cls", "patches", "all"), f"site={site!r}"
        yield "heads", ("none",), f"site={site!r} (token features have no head axis)"
        yield "queries", ("none",), f"site={site!r} (token features have no query rows)"
        yield "relu", ("none", "gradient", "map"), f"site={site!r}"
    if recipe.weighting == "attention":
        yield "relu", ("none",), "weighting='attention' (probabilities are never negative)"
        yield "target", ("none",), "weighting='attention' (attention does not depend on a score)"
    else:
        yield "target", ("itm", "contrastive", "custom"), f"weighting={recipe.weighting!r}"
    if recipe.layer_rule == "shared":
        yield "site", ("CONTEXT",), "layer_rule='shared'"
    elif site == "CONTEXT":
        yield "layer_rule", ("single", "shared"), "site='CONTEXT' (every block reads the same tensor)"


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
    if recipe.site == "CROSS" and "padding" not in recipe.exclude:
        raise RecipeError(
            f"exclude={recipe.exclude!r} with site='CROSS': a map must not depend on the texts that it shares a batch "
            "with; add 'padding'"
        )
    if recipe.site == "CROSS" and recipe.queries == "cls" and "special_text" in recipe.exclude:
        raise RecipeError(
            f"queries='cls' with exclude={recipe.exclude!r}: row 0 is a special token; leave 'special_text' out"
        )
    if recipe.site != "CROSS" and recipe.exclude != ("cls",):
        raise RecipeError(f"exclude={recipe.exclude!r} with site={recipe.site!r}: there is no text; give ('cls',)")


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


def _excluded(value: object) -> tuple[str, ...]:
    known = get_args(Excluded)
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or any(name not in known for name in names):
        raise RecipeError(f"exclude={value!r}: give any of {listing(known)}")
    return tuple(name for name in known if name in names)


def _toml(value: object) -> str:
    """Strings, whole numbers and lists of them are written alike in TOML and in JSON, but for one control sign."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _table(values: object) -> Mapping[str, Any]:
    if not isinstance(values, dict):
        raise RecipeError(f"a recipe is a table of fields, found {type(values).__name__}")
    return values
