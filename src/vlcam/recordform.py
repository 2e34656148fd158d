"""The form of a saved record: what must be there, of which type, and what must agree with what.

A digest tells that a file is as it was made, and not that vlcam made it. So that a record of anybody's making is either
read or refused, its form is checked once, when it is opened; what reads it later need not ask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, get_args

from vlcam.evidence import Status
from vlcam.regions import Region

__all__ = ["check_form"]

Check = Callable[[Any, str], None]
_LARGEST = 2**31
_STATUSES = get_args(Status)


def check_form(record: Any, tokens: tuple[int, ...], words: tuple[int, ...]) -> None:
    """Make sure that a record has the form that `docs/provenance.md` lists, and fits the maps beside it.

    What a later release adds is let through, and what an older one did not record yet is not asked for.

    Args:
        record: JSON values.
        tokens: shape of the map.
        words: shape of the maps of the words.

    Raises:
        ValueError: it does not; says where, and what is there.
    """
    _RECORD(record, "record")
    run, placement, text = record["provenance"]["run"], record["placement"], record["provenance"]["text"]
    _agree("the map's shape", list(tokens), "run.grid", run["grid"])
    _agree("the shape of the words' maps", list(words), "that of the words", [len(record["words"]), *tokens])
    _agree("image.size", record["provenance"]["image"]["size"], "placement.original", placement["original"])
    _check_box(placement)
    explained = run.get("class")
    if text is None and "class" not in run:
        raise ValueError("there is neither a text nor a class")
    if text is not None:
        _check_text(text)
    if record["recipe"].get("stream") == "text":
        _check_over_text(text, run, tokens)
    if "batch" in run:
        _check_batch(run["batch"])
    if explained is not None and explained.get("region") is not None:
        _check_region(explained["region"], placement["original"])


def _check_box(placement: Mapping[str, Any]) -> None:
    (x0, y0, x1, y1), (height, width) = placement["box"], placement["original"]
    if not (x0 < x1 and y0 < y1 and x0 < width and y0 < height and x1 > 0 and y1 > 0):
        raise ValueError(f"placement.box {placement['box']!r} shows nothing of an image of {placement['original']!r}")


def _check_text(text: Mapping[str, Any]) -> None:
    for name in ("pieces", "spans", "special"):
        _agree(f"the length of text.{name}", len(text[name]), "that of text.ids", len(text["ids"]))


def _check_over_text(text: Mapping[str, Any] | None, run: Mapping[str, Any], tokens: tuple[int, ...]) -> None:
    """What is read of a map over the words of a text."""
    if text is None or "apart" not in run:
        raise ValueError("a map over the text without the text, or without run.apart")
    _agree("the map's shape", list(tokens), "that of the words' tokens", [1, text["special"].count(False)])


def _check_batch(batch: Mapping[str, Any]) -> None:
    pairs, texts = len(batch["image_of"]), batch["texts"]
    kinds = {"pair": ([batch["pair"]], pairs), "image_of": (batch["image_of"], pairs)}
    kinds |= {name: (batch[name], texts) for name in ("text_of", "compared")}
    for name, (numbers, count) in kinds.items():
        if not all(0 <= number < count for number in numbers):
            raise ValueError(f"run.batch.{name} names what the batch does not have")
    _agree("the length of run.batch.text_of", len(batch["text_of"]), "that of image_of", pairs if texts else 0)


def _check_region(region: Mapping[str, Any], original: list[int]) -> None:
    if "mask" in region:
        _agree("the size of the mask", region["mask"]["size"], "placement.original", original)
        if not all(0 <= place < original[0] * original[1] for place in region["mask"]["changes"]):
            raise ValueError("run.class.region.mask.changes names pixels that the image does not have")
    Region.from_dict(region)


def _agree(one: str, value: object, other: str, wanted: object) -> None:
    if value != wanted:
        raise ValueError(f"{one} is {value!r}, and {other} {wanted!r}")


def _refuse(value: object, path: str, wanted: str) -> None:
    shown = repr(value) if not isinstance(value, (dict, list)) else type(value).__name__
    raise ValueError(f"{path} is {shown[:60]}, and not {wanted}")


def _string(value: Any, path: str) -> None:
    if not isinstance(value, str):
        _refuse(value, path, "text")


def _truth(value: Any, path: str) -> None:
    if not isinstance(value, bool):
        _refuse(value, path, "true or false")


def _whole(value: Any, path: str) -> None:
    if type(value) is not int or not -_LARGEST < value < _LARGEST:
        _refuse(value, path, "a whole number")


def _size(value: Any, path: str) -> None:
    _whole(value, path)
    if value < 1:
        _refuse(value, path, "a size of 1 or more")


def _number(value: Any, path: str) -> None:
    if type(value) not in (int, float) or abs(value) > 1e300 or not math.isfinite(value):
        _refuse(value, path, "a finite number")


def _status(value: Any, path: str) -> None:
    if value not in _STATUSES:
        _refuse(value, path, f"any of {', '.join(_STATUSES)}")


def _anything(value: Any, path: str) -> None:
    """An option of a model's family, which only its adapter knows."""


def _maybe(check: Check) -> Check:
    return lambda value, path: None if value is None else check(value, path)


def _either(first: type, one: Check, other: Check) -> Check:
    """`one` for values of the first type, and `other` for all others."""
    return lambda value, path: (one if isinstance(value, first) else other)(value, path)


def _each(check: Check) -> Check:
    def each(value: Any, path: str) -> None:
        if not isinstance(value, list):
            _refuse(value, path, "a list")
        for number, one in enumerate(value):
            check(one, f"{path}[{number}]")

    return each


def _exactly(count: int, check: Check) -> Check:
    every = _each(check)

    def exactly(value: Any, path: str) -> None:
        every(value, path)
        if len(value) != count:
            _refuse(value, path, f"a list of {count}")

    return exactly


def _by_name(check: Check) -> Check:
    def by_name(value: Any, path: str) -> None:
        if not isinstance(value, dict):
            _refuse(value, path, "a table")
        for name, one in value.items():
            check(one, f"{path}.{name}")

    return by_name


def _table(needed: Mapping[str, Check], more: Mapping[str, Check] | None = None) -> Check:
    """A table with some keys, and others that may be missing."""

    def table(value: Any, path: str) -> None:
        if not isinstance(value, dict):
            _refuse(value, path, "a table")
        for name, check in needed.items():
            if name not in value:
                raise ValueError(f"it lacks {path}.{name}")
            check(value[name], f"{path}.{name}")
        for name, check in (more or {}).items():
            if name in value:
                check(value[name], f"{path}.{name}")

    return table


_strings, _wholes = _each(_string), _each(_whole)
_span = _exactly(2, _whole)
_of_text = {
    "given": _string,
    "ids": _wholes,
    "pieces": _strings,
    "spans": _each(_span),
    "special": _each(_truth),
    "cut": _strings,
    "cut_text": _string,
}
_phrase = {"phrase": _maybe(_string), "occurrence": _maybe(_whole), "span": _maybe(_span)}
_region = _table(
    {},
    {
        "box": _exactly(4, _number),
        "mask": _table({"size": _exactly(2, _size), "first": _truth, "changes": _wholes}),
    },
)
_PLACEMENT = _table(
    {"original": _exactly(2, _size), "model": _exactly(2, _size), "box": _exactly(4, _number)},
)
_IMAGE = _table(
    {
        "name": _string,
        "sha256": _string,
        "size": _exactly(2, _size),
        "steps": _each(_table({"step": _string})),
    },
    {"pixels_sha256": _string},
)
_MODEL = _table(
    {
        **dict.fromkeys(("id", "class", "library", "adapter", "weights_sha256", "dtype", "device"), _string),
        "attention": _table({"configured": _string, "used": _string}),
        "options": _by_name(_anything),
    },
    {"tapped": _by_name(_wholes)},
)
_RUN = _table(
    {
        "stream": _string,
        "site": _string,
        "layers": _wholes,
        "blocks": _whole,
        "target": _string,
        "target_value": _maybe(_number),
        "grid": _exactly(2, _size),
        "prefix_tokens": _either(int, _whole, _strings),  # the first release counted them
        "dropped": _each(_table({"what": _string, "tokens": _wholes, "why": _string})),
        "rows": _wholes,
        **_phrase,
    },
    {
        "fitted": _by_name(_string),
        "together_with": _maybe(_by_name(_wholes)),
        "class": _maybe(
            _table({"index": _whole, "label": _maybe(_string), "chosen": _string}, {"region": _maybe(_region)})
        ),
        "asked": _whole,
        "modules": _strings,
        "windows": _maybe(_table({"size": _span, "shift": _span})),
        "against": _strings,
        "apart": _by_name(_number),
        "pooled": _maybe(_table({"position": _whole, "piece": _maybe(_string)})),
        "block_values": _maybe(_each(_number)),
        "target_phrase": _table(_phrase),
        "batch": _table(
            {
                **dict.fromkeys(("pair", "texts"), _whole),
                **dict.fromkeys(("image_of", "text_of", "compared"), _wholes),
                **dict.fromkeys(("tokens", "answer_tokens", "variants"), _maybe(_size)),
            }
        ),
    },
)
_RECORD = _table(
    {
        "recipe": _table({"fingerprint": _string}),
        "status": _status,
        "scores": _by_name(_table({"kind": _string, "value": _number})),
        "placement": _PLACEMENT,
        "words": _each(_table({"word": _string, "span": _span, "rows": _wholes, "status": _status})),
        "provenance": _table(
            {
                "schema": _whole,
                "image": _IMAGE,
                "text": _maybe(_table(_of_text, {"whole": _string, "written": _truth})),
                "model": _MODEL,
                "run": _RUN,
                "versions": _by_name(_string),
            },
            {"answer": _maybe(_table({**_of_text, "written": _truth}))},
        ),
    }
)
