"""One HTML file that shows an explanation: it holds everything that it needs and fetches nothing."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.resources import files
from itertools import groupby
from typing import TYPE_CHECKING, Any

import jinja2
import torch
from latex2mathml.converter import convert
from markupsafe import Markup

from vlcam import wording
from vlcam.errors import EvidenceError
from vlcam.maps import normalised
from vlcam.markup import visible
from vlcam.reporting import facts, pictures
from vlcam.reporting.older import completed
from vlcam.textpicture import words_html

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from vlcam.explanation import Explanation
    from vlcam.reporting.report import Report

__all__ = ["page"]


def page(report: Report) -> str:
    """The page as text.

    The image is shown with at most `pictures.LONGEST` pixels on its longer side, and the page says so. Where the
    explanation has no image the maps stand alone; where there is nothing to draw the page says why.
    """
    exp, script = report.explanation, _file("report.js")
    maps = [exp, *exp.words.values()]
    drawn = [None] if exp.recipe.of_text else pictures.layers(maps, opaque=exp.image is None)
    return _template().render(
        report=report,
        exp=exp,
        run=completed(exp).provenance["run"],
        explained=_explained(exp),
        script=Markup(script),
        style=Markup(_file("report.css")),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        figure=_figure(exp, drawn),
        layers=drawn,
        scale=pictures.colour_scale(signed=pictures.is_signed(exp)),
        signed=pictures.is_signed(exp),
        pieces=list(_pieces(exp)),
        coloured=_coloured(exp),
        reason=_reason(exp),
        summary=wording.summary(exp.recipe),
        fields=[(group, list(fields.items())) for group, fields in exp.recipe.groups()],
        checklist=[(group, list(rows)) for group, rows in groupby(report.checklist, lambda row: row.group)],
        formula=Markup(
            convert(report.formula, display="block")
        ),  # its words are those of the recipes, none of the user's
        data=_data(exp, maps),
        record=json.dumps(exp.record(), indent=2, ensure_ascii=False),
        facts=facts,
        visible=visible,
    )


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("vlcam.reporting"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html")


def _file(name: str) -> str:
    return (files("vlcam.reporting") / "templates" / name).read_text(encoding="utf-8")


def _figure(exp: Explanation, layers: Sequence[str | None]) -> dict[str, Any] | None:
    """The image, how large it is shown, and where the grid lies on it in per cent; None where all is empty."""
    photograph, shown = (None, None) if exp.image is None else pictures.photograph(exp.image)
    if not any(layers) and not (exp.recipe.of_text and photograph):
        return None
    height, width = exp.placement.original
    x0, y0, x1, y1 = exp.placement.box
    return {
        "image": photograph,
        "width": width,
        "height": height,
        "smaller": None if shown in (None, (width, height)) else shown,
        "box": [100 * x0 / width, 100 * y0 / height, 100 * (x1 - x0) / width, 100 * (y1 - y0) / height],
    }


def _pieces(exp: Explanation) -> Iterator[tuple[str, int]]:
    """The text in pieces, each with the number of its word's map, or 0 where it has none."""
    if not exp.word_maps or exp.text is None:
        return
    read = 0
    for number, word in sorted(enumerate(exp.word_maps, start=1), key=lambda pair: pair[1].span):
        start, end = word.span
        yield exp.text[read:start], 0
        yield exp.text[start:end], number
        read = end
    yield exp.text[read:], 0


def _coloured(exp: Explanation) -> Markup | None:
    """The text of a map over words, each in the colour of its score."""
    if not exp.recipe.of_text or exp.status != "ok":
        return None
    words = exp.word_scores
    values = normalised(exp.recipe, torch.tensor([word.score for word in words], device="cpu")).tolist()
    # The text as it was read, which is the phrase alone where that was encoded.
    return Markup(words_html(exp.provenance["text"]["given"], [word.span for word in words], values))


def _explained(exp: Explanation) -> str:
    """The score of the model that the map is of; empty where attention was another, and with it the score."""
    edited = exp.recipe.attention in ("one_head", "identity") or exp.recipe.prompt == "in_place"
    return "" if edited else exp.provenance["run"]["target"]


def _reason(exp: Explanation) -> str:
    """Why there is nothing to draw; empty where there is something."""
    if exp.status == "ok":
        return ""
    try:
        exp.overlay()
    except EvidenceError as error:
        return str(error)
    return exp.status


def _data(exp: Explanation, maps: Sequence[Explanation]) -> dict[str, Any]:
    """What the page's script reads."""
    if exp.recipe.of_text:
        scores = [{"word": word.word, "score": _shortest(word.score)} for word in exp.word_scores]
        return {"grid": None, "maps": [], "scores": scores}
    names = ["", *exp.words]
    return {
        "grid": list(exp.tokens.shape),
        "maps": [
            {"word": name, "status": one.status, "values": _numbers(one.tokens)}
            for name, one in zip(names, maps, strict=True)
        ],
        "scores": [],
    }


def _numbers(tokens: NDArray[np.float32]) -> list[list[float]]:
    """Every value with as few digits as tell it from its neighbours in float32."""
    return [[float(str(value)) for value in row] for row in tokens]


def _shortest(value: float) -> float:
    return float(f"{value:.9g}")
