"""The reporting checklist of an explanation: for every item what is stated, and where the record says so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vlcam import wording
from vlcam.markup import visible
from vlcam.reporting import facts
from vlcam.reporting.facts import NOT_RECORDED
from vlcam.reporting.older import completed
from vlcam.reporting.source import source

if TYPE_CHECKING:
    from vlcam.explanation import Explanation

__all__ = ["Row", "checklist"]


@dataclass(frozen=True, slots=True)
class Row:
    """One item of the checklist.

    Attributes:
        group: its heading: one of the five of the published checklist, or what vlcam adds to them.
        item: what is asked.
        stated: the answer; `not recorded` where there is none.
        source: where it stands, as paths into `exp.record()` with dots between keys; empty where it stands nowhere.
    """

    group: str
    item: str
    stated: str
    source: str


def checklist(exp: Explanation) -> tuple[Row, ...]:
    """Every item, in the order of the published checklist, then what a map depends on besides the recipe."""
    recorded, exp = exp.provenance, completed(exp)
    rows = (
        *_recipe(exp),
        *_origin(exp),
        *_model(exp),
        *_image(exp),
        *_text(exp),
        *_left_out(exp),
        *_result(exp),
        *_software(exp),
        *_unknown(exp),
    )
    return tuple(replace(row, stated=visible(row.stated), source=_there(row.source, recorded)) for row in rows)


def _there(source: str, recorded: Mapping[str, Any]) -> str:
    """The places of a source without those that a record of an older release lacks."""
    return ", ".join(place for place in source.split(", ") if _holds(recorded, place))


def _holds(recorded: Mapping[str, Any], place: str) -> bool:
    first, *keys = place.split(".")
    found: Any = recorded if first == "provenance" else None
    for key in keys if found is not None else ():
        if not isinstance(found, Mapping) or key not in found:
            return False
        found = found[key]
    return True


def _recipe(exp: Explanation) -> Iterator[Row]:
    for group, fields in exp.recipe.groups():
        for field, value in fields.items():
            more, where = _resolved(exp, field)
            stated = "; ".join(filter(None, [facts.shown(value), more]))
            yield Row(group, wording.question(field), stated, ", ".join(filter(None, [f"recipe.{field}", where])))


def _resolved(exp: Explanation, field: str) -> tuple[str, str]:
    """What a field came to on this model, and where the record says so."""
    run = exp.provenance["run"]
    rows = f"tokens {facts.numbers(run['rows'])}" if run["rows"] else ""
    found = {
        "site": (wording.tensor(exp.recipe), ""),
        "layers": (
            "; ".join(filter(None, [facts.blocks(run), facts.modules(run), run["fitted"]["layers"]])),
            "provenance.run.layers, provenance.run.blocks, provenance.run.modules, provenance.run.fitted.layers",
        ),
        "target": (_target(exp), "provenance.run.target, provenance.run.class"),
        "queries": (rows, "provenance.run.rows") if rows else ("", ""),
        "reshape": (f"{facts.size(run['grid'])} cells", "provenance.run.grid"),
    }
    return found.get(field, ("", ""))


def _target(exp: Explanation) -> str:
    run = exp.provenance["run"]
    if exp.recipe.target == "none":
        return "the map depends on no score"
    parts = [wording.scored(exp.recipe) if exp.recipe.target != "custom" else f"label {run['target']!r}"]
    if run["class"] is not None and exp.recipe.target != "custom":
        label = run["class"]["label"]
        named = "" if label is None else f" ({label})"
        parts.append(" ".join(filter(None, [f"class {run['class']['index']}{named}", facts.region(run["class"])])))
        parts.append(f"chosen {run['class']['chosen']}")
    return "; ".join(parts)


def _origin(exp: Explanation) -> Iterator[Row]:
    found, group = source(exp), "source of the recipe"
    yield Row(
        group, "name and fingerprint", f"{exp.recipe.name}, {exp.recipe.fingerprint}", "recipe.name, recipe.fingerprint"
    )
    if found.entry is None:
        yield Row(group, "publication", "none known: no recipe of that name is in the catalogue", "recipe.name")
        return
    yield Row(group, "publication", found.citation, "catalogue, by recipe.name")
    yield Row(group, "code that the formula was checked against", found.entry.code, "catalogue, by recipe.name")
    yield Row(
        group,
        "differences from the published recipe",
        "; ".join(found.differences) or "none",
        "recipe, catalogue, provenance.run.fitted",
    )


def _model(exp: Explanation) -> Iterator[Row]:
    record, group = exp.provenance["model"], "model"
    library = record["library"]
    version = exp.provenance["versions"].get(library, "")
    options = {name: value for name, value in record["options"].items() if value not in (None, "", [])}
    at = "provenance.model."
    yield Row(group, "identifier", record["id"], f"{at}id")
    yield Row(
        group,
        "class and library",
        f"{record['class']} ({' '.join(filter(None, [library, version]))})",
        f"{at}class, {at}library",
    )
    yield Row(group, "weights", f"SHA-256 {record['weights_sha256']}", f"{at}weights_sha256")
    yield Row(group, "number type and device", f"{record['dtype']} on {record['device']}", f"{at}dtype, {at}device")
    yield Row(group, "attention implementation", record["attention"]["used"], f"{at}attention.used")
    spelt = ", ".join(f"{name} = {facts.shown(value)}" for name, value in options.items())
    yield Row(group, "options of the model family", spelt or "none set", f"{at}options")


def _image(exp: Explanation) -> Iterator[Row]:
    record, group, at = exp.provenance["image"], "image and preprocessing", "provenance.image."
    yield Row(group, "image", f"{record['name']}, SHA-256 {record['sha256']}", f"{at}name, {at}sha256")
    yield Row(group, "size", f"{facts.size(record['size'])} pixels (height x width)", f"{at}size")
    done = "; ".join(facts.steps(record))
    yield Row(group, "resize, crop, normalisation", done or "none", f"{at}steps")
    by = [step["class"] for step in record["steps"] if step["step"] == "processor"]
    yield Row(group, "done by", facts.listed(by) or "nothing: given as the model takes it", f"{at}steps")
    model_input = facts.size(exp.placement.model)
    yield Row(group, "what the model saw", f"{facts.seen(exp)}, as {model_input} pixels", "placement")


def _text(exp: Explanation) -> Iterator[Row]:
    record, run, group = exp.provenance["text"], exp.provenance["run"], "text"
    if record is None:
        yield Row(group, "text", "the model takes none", "provenance.text")
        return
    written, at = (" (written by the model)", ", provenance.text.written") if record.get("written") else ("", "")
    yield Row(group, "text", record["given"] + written, f"provenance.text.given{at}")
    if "whole" in record:
        yield Row(group, "text that the phrase is of", record["whole"], "provenance.text.whole")
    phrase = "the whole text" if run["phrase"] is None else run["phrase"]
    which = "" if run["occurrence"] is None else f" (occurrence {run['occurrence']})"
    yield Row(group, "phrase", phrase + which, "provenance.run.phrase, provenance.run.occurrence, provenance.run.span")
    if "target_phrase" in run:
        yield Row(group, "phrase that the score counts", run["target_phrase"]["phrase"], "provenance.run.target_phrase")
    yield Row(group, "tokens", f"{len(record['ids'])}: {' '.join(record['pieces'])}", "provenance.text.pieces")
    if run["against"]:
        yield Row(group, "other texts, for scores that compare", "; ".join(run["against"]), "provenance.run.against")
    answer = exp.provenance["answer"]
    if answer is not None:
        own = "the model's own" if answer["written"] else "as given"
        yield Row(group, "answer", f"{answer['given']} ({own})", "provenance.answer")


def _left_out(exp: Explanation) -> Iterator[Row]:
    run, text, group = exp.provenance["run"], exp.provenance["text"], "what was left out"
    lost = "; ".join(facts.dropped(part) for part in run["dropped"])
    yield Row(group, "tokens that never reached the map", lost or "none", "provenance.run.dropped")
    if run["apart"]:
        apart = ", ".join(f"{name} {facts.number(value)}" for name, value in run["apart"].items())
        yield Row(group, "reported apart, raw", apart, "provenance.run.apart")
    if text is not None:
        cut = text["cut_text"] or ", ".join(text["cut"]) or "none"
        yield Row(group, "text beyond the model's limit", cut, "provenance.text.cut, provenance.text.cut_text")


def _result(exp: Explanation) -> Iterator[Row]:
    run, group = exp.provenance["run"], "result"
    yield Row(group, "status", exp.status, "status")
    if run["target_value"] is not None:
        value = f"{run['target']} = {facts.number(run['target_value'])}"
        yield Row(group, "value of what was explained", value, "provenance.run.target_value")
    spelt = "; ".join(f"{score.name} = {facts.number(score.value)} ({score.kind})" for score in exp.scores.values())
    yield Row(group, "scores and their kind", spelt or "none", "scores")
    if run["asked"]:
        yield Row(group, "times that the model was asked again", str(run["asked"]), "provenance.run.asked")


def _software(exp: Explanation) -> Iterator[Row]:
    record, group = exp.provenance, "software"
    yield Row(group, "versions", facts.versions(record["versions"]), "provenance.versions")
    yield Row(group, "adapter", record["model"]["adapter"], "provenance.model.adapter")
    seed = "none: no random numbers were drawn" if record["seed"] is None else str(record["seed"])
    yield Row(group, "seed", seed, "provenance.seed")


def _unknown(exp: Explanation) -> Iterator[Row]:
    """What a reader may ask and no record answers."""
    group = "beyond the record"
    unknown = {
        "how the model was trained, and on what": True,
        "where the image comes from, and its licence": True,
        "name of the image's file": exp.provenance["image"]["name"] in facts.WITHOUT_FILE,
        "code of the target, which was given as a callable": exp.recipe.target == "custom",
    }
    for item, missing in unknown.items():
        if missing:
            yield Row(group, item, NOT_RECORDED, "")
