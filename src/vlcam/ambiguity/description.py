"""Description: what a text says of how a map was made, with every choice that it leaves open."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

import yaml

from vlcam import textform
from vlcam.choices import GROUPS
from vlcam.errors import RecipeError, listing
from vlcam.recipe import Recipe, in_form

__all__ = ["FIELDS", "Description", "shown_value", "shown_values"]

FIELDS = tuple(field for fields in GROUPS.values() for field in fields)
"""The choices of a recipe, in the order of the reporting checklist."""

_NUMBERS, _NAMES = ("layers", "queries"), ("exclude", "departures")


@dataclass(frozen=True, init=False, repr=False)
class Description:
    """Some choices of a recipe, each stated as one value or as several, and all others open.

    `Description(weighting="gradcam", site=["F1", "F4"])` says that the map is a Grad-CAM of one of two tensors, and
    nothing else. The values of a field are those of `Recipe`; a list is several of them. Where one value is a list
    itself, a flat list of whole numbers (`layers`, `queries`) or of names (`exclude`, `departures`) is one value, and a
    list that holds lists, or words beside numbers, is several: `layers=[2, 3]` is two blocks that are merged,
    `layers=[[2], [3]]` one block or the other.

    Attributes:
        name: what people call it. A label only: it is not part of equality.
        stated: for every field that is stated, the values that it may have, in checklist order.
    """

    name: str
    stated: Mapping[str, tuple[Any, ...]]

    def __init__(self, *, name: str = "description", **stated: Any) -> None:
        """Check every field and bring its values into their one form.

        Args:
            name: what people call it.
            **stated: fields of a recipe, each with a value or a list of values. None leaves a field open.

        Raises:
            RecipeError: a field that a recipe does not have, a value that it does not know, or a list of none.
        """
        if not isinstance(name, str) or not name:
            raise RecipeError(f"name={name!r}: give text")
        unknown = [field for field in stated if field not in FIELDS]
        if unknown:
            raise RecipeError(f"a recipe has no field {listing(unknown)}; its fields: {', '.join(FIELDS)}")
        values = {field: _values(field, stated[field]) for field in FIELDS if stated.get(field) is not None}
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "stated", MappingProxyType(values))

    def __eq__(self, other: object) -> bool:
        """Whether another one states the same; names and the order of values are not compared."""
        return isinstance(other, Description) and self._sets() == other._sets()

    def __hash__(self) -> int:
        """Of what is stated."""
        return hash(frozenset(self._sets().items()))

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are made from the values; a view on them has no copy."""
        return Description.from_dict, (self.to_dict(),)

    def __repr__(self) -> str:
        """One line: what is stated."""
        return f"<Description {self.name!r}: {self.in_short}>"

    @property
    def in_short(self) -> str:
        """What is stated, in one line."""
        stated = "; ".join(f"{field} {shown_values(values)}" for field, values in self.stated.items())
        return stated or "nothing stated"

    @property
    def open(self) -> tuple[str, ...]:
        """The fields that are not stated, in checklist order."""
        return tuple(field for field in FIELDS if field not in self.stated)

    @classmethod
    def of(cls, recipe: Recipe) -> Self:
        """The description that leaves nothing open: that of one recipe."""
        return cls(name=recipe.name or "recipe", **{field: [getattr(recipe, field)] for field in FIELDS})

    def matches(self, recipe: Recipe) -> bool:
        """Whether a recipe has a stated value in every stated field.

        Blocks are compared as they are written, since no model is at hand: (-1,) is `last`, and (5,) is not.
        """
        return all(
            _written(field, getattr(recipe, field)) in [_written(field, value) for value in values]
            for field, values in self.stated.items()
        )

    def stating(self, *, name: str | None = None, **fields: Any) -> Self:
        """The same description with some fields stated otherwise, or opened with None.

        Args:
            name: by default the same.
            **fields: as in the constructor.

        Raises:
            RecipeError: as in the constructor.
        """
        kept = {field: list(values) for field, values in self.stated.items()}
        return type(self)(name=name or self.name, **kept | fields)

    def groups(self) -> Iterator[tuple[str, dict[str, tuple[Any, ...] | None]]]:
        """The fields under the headings of the reporting checklist; None for those that are open."""
        for group, fields in GROUPS.items():
            yield group, {field: self.stated.get(field) for field in fields}

    def __str__(self) -> str:
        """By checklist group what is stated and what is open."""
        lines = [self.name]
        for group, fields in self.groups():
            lines += ["", group]
            lines += [
                f"  {field:<16} {'open' if values is None else shown_values(values)}"
                for field, values in fields.items()
            ]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The name and every stated field, as JSON values; a single value stands by itself."""
        stated = {field: _plain(field, values) for field, values in self.stated.items()}
        return {"name": self.name, **stated}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build a description from `to_dict()`'s result.

        Raises:
            RecipeError: as in the constructor.
        """
        return cls(**textform.table("a description", values))

    def to_json(self) -> str:
        """The description as JSON text."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read `to_json()`'s text.

        Raises:
            RecipeError: text that is not JSON, or not a description.
        """
        return cls.from_dict(textform.from_json(text))

    def to_toml(self) -> str:
        """The description as TOML text."""
        return textform.to_toml(self.to_dict())

    @classmethod
    def from_toml(cls, text: str) -> Self:
        """Read `to_toml()`'s text.

        Raises:
            RecipeError: text that is not TOML, or not a description.
        """
        return cls.from_dict(textform.from_toml(text))

    def to_yaml(self) -> str:
        """The description as YAML text."""
        return str(yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True, default_flow_style=None))

    @classmethod
    def from_yaml(cls, text: str) -> Self:
        """Read `to_yaml()`'s text.

        Raises:
            RecipeError: text that is not YAML, or not a description.
        """
        return cls.from_dict(textform.from_yaml(text))

    def _sets(self) -> dict[str, frozenset[Any]]:
        return {field: frozenset(values) for field, values in self.stated.items()}


def shown_values(values: tuple[Any, ...]) -> str:
    """Values for people, `or` between them."""
    return " or ".join(map(shown_value, values))


def shown_value(value: Any) -> str:
    """A value for people, on one line."""
    return ", ".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)


def _values(field: str, given: Any) -> tuple[Any, ...]:
    """The values that a field may have, each once."""
    several = list(given) if isinstance(given, (list, tuple)) and not _is_one(field, given) else [given]
    found = tuple(dict.fromkeys(in_form(field, value) for value in several))
    if not found:
        raise RecipeError(f"{field}={given!r}: a list of no values; leave the field out to leave it open")
    return found


def _is_one(field: str, given: list[Any] | tuple[Any, ...]) -> bool:
    """Whether a list is one value, and not several."""
    if field in _NUMBERS:
        return bool(given) and all(isinstance(each, int) for each in given)
    return field in _NAMES and all(isinstance(each, str) for each in given)


def _plain(field: str, values: tuple[Any, ...]) -> Any:
    """Values as JSON has them, so that `_values` reads the same again."""
    plain = [list(value) if isinstance(value, tuple) else value for value in values]
    return plain[0] if len(plain) == 1 and (field not in _NAMES or isinstance(plain[0], list)) else plain


def _written(field: str, value: Any) -> Any:
    return "last" if field == "layers" and value == (-1,) else value
