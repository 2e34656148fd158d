"""Recipe: every choice behind a map, stated, checked and hashed.

"Grad-CAM on a ViT" leaves open which tensor is weighted by the gradient of which scalar over which tokens, and in
which order heads are averaged and negatives removed. A recipe leaves nothing open: no field has a default.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Self, cast, get_args

from vlcam import textform
from vlcam.choices import (
    ASKING,
    ATTENTION_SITES,
    BIMODAL,
    GROUPS,
    WORDS,
    Attention,
    Compose,
    Departure,
    Excluded,
    GradientPath,
    GradientTokens,
    Heads,
    LayerRule,
    Layers,
    MapAxis,
    Normalize,
    Prompt,
    Queries,
    Relu,
    Reshape,
    Scale,
    Site,
    Stream,
    Target,
    Upsample,
    Weighting,
    takes_gradient,
)
from vlcam.constraints import check, constraints, one_of
from vlcam.errors import RecipeError, listing

__all__ = ["SCHEMA", "Recipe", "in_form", "values_of"]

SCHEMA = 1
"""Version of the field list. A field that a later version adds is left out of the fingerprint at its neutral value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """The choices that turn a model, an image and a text into one map. Immutable, hashable, without defaults.

    Attributes:
        name: what people call it. A label only: it is not part of equality or of the fingerprint.
        site: the tensor that is read: F1 (LayerNorm before attention), F2 (attention probabilities), F3
            (attention output after the projection), F3_HEADS (before it), F4 (LayerNorm before the FFN), F5 (FFN
            output), F6 (block output), CROSS (cross-attention probabilities), CONTEXT (image tokens that feed
            cross-attention).
        stream: the stack of blocks that the site is in; with `text` the map is over the words.
        layers: block indices (negative ones count from the end), `last` or `all`. For the stream `pooler` with
            `gradient_path="block"`: the vision blocks whose outputs the pooler reads in turn.
        attention: how blocks compute attention while the map is made. `own`: as in the model. `one_head`: from the
            first block of `layers` on (site F6: behind it), one head of full width instead of several, whose score is
            another (Grad-ECLIP's code). `identity`: the last block hands every token its own value (MaskCLIP).
            `values`: beside the model's path, a second one on which attention of values with values of all `layers` is
            added to the first one's input, without FFNs (CLIP Surgery).
        target: the scalar whose gradient is taken: a class, a class summed over pixels, image-text matching,
            contrastive similarity, the same with the mean of the patches in place of the class token (CLIP-ES), a
            caption, an answer to a question, a callable, none.
        scale: on which scale the target is read. `margin`: to the runner-up. `difference`: cosine less the mean cosine
            of the other texts. `finer`: to the three classes or texts whose logits are nearest, weighted by their
            probabilities (Finer-CAM).
        prompt: for a contrastive target, which text is encoded: the `whole` one, the `phrase` alone, or the phrase
            `in_place`, all other words of the text hidden from the text tower's attention. For a caption, whose tokens
            are counted: all, or those of the `phrase`.
        gradient_path: how the target depends on the tensor. `full`: as in the model. `direct`: through residual
            connections and FFNs only, the inputs of attention detached (AGCAM). `block`: each block is read at its
            own output, averaged over all tokens, by the model's final norm and head (LeGrad). `integrated`: the mean
            over 20 images from the mean colour to the image itself (integrated gradients). `none`: no gradient.
        gradient_tokens: over which tokens the gradient is pooled into channel or head weights. For attention: over
            which keys of the chosen rows (`patches`), or over all rows and keys (`all`). `pooled`: the token from
            which a text tower reads the text.
        queries: for attention, which query rows are averaged into the map; which key columns, if the map's cells
            are queries. `pooled` as above.
        map_axis: for attention, whether the map's cells are the `keys` (attention received) or the `queries`.
        compose: what columns of cross-attention are carried on through in the same pass. `pooler`, where they are slots
            of an attention pooler: by its own attention to the patches, mean over its heads. `vision`, for
            `layer_rule="relevance"`: by the relevance of the image's self-attention in all blocks of its tower.
        exclude: what takes no part. `cls`: the image's prefix tokens are no cells of the map. `registers`,
            `distillation`: these tokens are left out of `all` too. `special_text` (rows of [ENC], [CLS], [SEP]),
            `padding` (rows of padding).
        weighting: how activation and gradient are combined.
        relu: where negative values are removed, besides the ReLU that is part of a weighting. `negative_gradient`: what
            is positive in the gradient is removed instead.
        heads: how attention heads are merged; `channels`: heads are taken for the channels of token features.
        layer_rule: how several layers are merged. `shared`: the layers read one tensor, and its gradients add up.
            `rollout` and `relevance` multiply attention matrices; `transition`, `headwise` and `tokenwise` carry
            attention through the blocks and weight it by the gradient at the last of them. At site CROSS `relevance`
            takes up the text's self-attention of the same blocks besides, with `layers="all"` that of every block.
        discard: for `rollout`, the share of smallest entries of each block's matrix that is set to zero.
        departures: where published code departs from the formula, by name; see `docs/recipes.md`.
        reshape: how tokens become a grid, or words.
        upsample: interpolation from the grid to pixels; none for words.
        normalize: what is done to the token map before it becomes a heatmap.

    Raises:
        RecipeError: a value that a field does not know, or values that contradict each other; the message names
            the fields and the values that would do.
    """

    name: str = dataclasses.field(compare=False)
    site: Site
    stream: Stream
    layers: Layers
    attention: Attention
    target: Target
    scale: Scale
    prompt: Prompt
    gradient_path: GradientPath
    gradient_tokens: GradientTokens
    queries: Queries
    map_axis: MapAxis
    compose: Compose
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
        for field in _FORMS:
            object.__setattr__(self, field, in_form(field, getattr(self, field)))
        for field, known in WORDS.items():
            one_of(field, getattr(self, field), known)
        check(self)

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
    def of_text(self) -> bool:
        """Whether the map is over the words of the text, and not over the image."""
        return self.stream == "text"

    @property
    def bimodal(self) -> bool:
        """Whether cross-attention is read together with the self-attention of text, and of the image."""
        return self.site == "CROSS" and self.layer_rule in BIMODAL

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
        return cls.from_dict(textform.table("a recipe", textform.from_json(text)))

    def to_toml(self) -> str:
        """The recipe as TOML text."""
        return textform.to_toml(self.to_dict())

    @classmethod
    def from_toml(cls, text: str) -> Self:
        """Read `to_toml()`'s text.

        Raises:
            RecipeError: text that is not TOML, or not a recipe.
        """
        return cls.from_dict(textform.from_toml(text))

    def groups(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The fields under the headings of the reporting checklist."""
        for group, fields in GROUPS.items():
            yield group, {field: getattr(self, field) for field in fields}

    def differences(self, other: Recipe) -> dict[str, tuple[Any, Any]]:
        """The fields in which another recipe differs, with both values; the name is not compared."""
        pairs = {field: (getattr(self, field), getattr(other, field)) for field in self._fields() if field != "name"}
        return {field: pair for field, pair in pairs.items() if pair[0] != pair[1]}

    @classmethod
    def _fields(cls) -> tuple[str, ...]:
        return tuple(field.name for field in dataclasses.fields(cls))


def values_of(field: str) -> tuple[Any, ...]:
    """The words that a field knows; none for one that holds numbers, lists or free text.

    Raises:
        RecipeError: no such field.
    """
    if field in WORDS:
        return WORDS[field]
    if field in Recipe.__dataclass_fields__:
        return {"queries": ("cls", "registers", "patches", "pooled", "all")}.get(field, ())
    raise RecipeError(f"a recipe has no field {field!r}; its fields: {', '.join(Recipe.__dataclass_fields__)}")


def in_form(field: str, value: Any) -> Any:
    """A value of one field in the one form in which a recipe holds it.

    Args:
        field: which one.
        value: what was given: a word, numbers, names, a share.

    Raises:
        RecipeError: no such field, or a value that it does not know.
    """
    if field in _FORMS:
        return _FORMS[field](value)
    one_of(field, value, values_of(field))
    return value


def _neutral(values: Mapping[str, Any]) -> dict[str, Any]:
    """What fields that came after the first files mean there: those lack them, and fingerprints stay as they were."""
    return {
        "gradient_path": "full" if takes_gradient(values.get("weighting", "")) else "none",
        "map_axis": "keys" if values.get("site") in ATTENTION_SITES else "none",
        "attention": "own",
        "prompt": "whole",
        "compose": "none",
        "discard": 0.0,
        "departures": [],
    }


def _forced(recipe: Recipe, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that are not among the changes, and for which those leave one value, with that value."""
    values = {field: getattr(recipe, field) for field in WORDS} | {
        "queries": recipe.queries,
        "discard": recipe.discard,
        "departures": (),
    }
    values |= {field: value for field, value in changes.items() if field in values and field != "departures"}
    settled = {"site", *changes}  # where a map is read does not follow from how it is made
    if any(values[field] not in known for field, known in WORDS.items()):
        return {}  # the constructor says what is wrong
    forced: dict[str, Any] = {}
    for _ in WORDS:  # one value may force the next
        draft = SimpleNamespace(**values | forced)
        draft.needs_gradient = takes_gradient(draft.weighting)
        draft.of_text = draft.stream == "text"
        open_ = [each for each in constraints(cast("Recipe", draft)) if each[0] in values and each[0] not in settled]
        found = {
            field: known[0]
            for field, known, _ in open_
            if (len(known) == 1 or _unset(field, draft)) and getattr(draft, field) != known[0]
            # Where two constraints agree on no value, the fields that they name contradict each other.
            if all(known[0] in others for other, others, _ in open_ if other == field)
        }
        if not found:
            break
        forced |= found
    return forced


def _unset(field: str, draft: SimpleNamespace) -> bool:
    """Whether a recipe that took no gradient takes one now: then along the model's own paths."""
    return field == "gradient_path" and draft.needs_gradient and draft.gradient_path == "none"


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


_FORMS: dict[str, Callable[[Any], Any]] = {
    "layers": lambda value: _whole_numbers("layers", value, ("last", "all")),
    "queries": lambda value: _whole_numbers("queries", value, get_args(get_args(Queries)[1])),
    "exclude": lambda value: _names("exclude", value, get_args(Excluded)),
    "departures": lambda value: _names("departures", value, get_args(Departure)),
    "discard": lambda value: _share(value),
}
"""Fields that hold more than a word of their own."""
