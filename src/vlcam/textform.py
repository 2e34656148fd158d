"""Recipes and descriptions as text: tables of fields, written and read as JSON, TOML and YAML."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from typing import Any

import yaml

from vlcam.errors import RecipeError

__all__ = ["from_json", "from_toml", "from_yaml", "table", "to_toml"]


def to_toml(values: Mapping[str, Any]) -> str:
    """A line per field. Strings, numbers and lists are written as in JSON, but for one control sign."""
    lines = {field: json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f") for field, value in values.items()}
    return "".join(f"{field} = {value}\n" for field, value in lines.items())


def from_json(text: str) -> Any:
    """The values of JSON text.

    Raises:
        RecipeError: not JSON.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise RecipeError(f"not JSON: {error}") from None


def from_toml(text: str) -> dict[str, Any]:
    """The table of TOML text.

    Raises:
        RecipeError: not TOML.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"not TOML: {error}") from None


def from_yaml(text: str) -> Any:
    """The values of YAML text.

    Raises:
        RecipeError: not YAML.
    """
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RecipeError(f"not YAML: {' '.join(str(error).split())}") from None


def table(what: str, values: Any) -> Mapping[str, Any]:
    """Values that are a table of fields.

    Raises:
        RecipeError: they are not; names `what` they should have been.
    """
    if not isinstance(values, Mapping):
        raise RecipeError(f"{what} is a table of fields, found {type(values).__name__}")
    return values
