"""Writes the page of all named recipes from the catalogue: `python docs/write_catalogue.py`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import vlcam
from vlcam.citations import Citation
from vlcam.published import asking, attention, contrastive, cross, features, paths

PAGE = Path(__file__).parent / "catalogue.md"
GROUPS = {
    "Text that looks at the image": cross,
    "Contrastive scores": contrastive,
    "Token features": features,
    "Self-attention": attention,
    "Asking the model again": asking,
    "Gradients along a path": paths,
}

_HEAD = """# Catalogue

All {count} named recipes: what each one computes, who published it, in what it departs from its paper, and what backs
it. Made from the package by `docs/write_catalogue.py`; edit `src/vlcam/published`, not this page. The fields and their
values, and how a recipe is fitted to a model, are explained in [recipes.md](recipes.md).

- **Formula**: what vlcam computes, in the notation of `vlcam.formula`: A is the tensor at the site, G the gradient of y
  with respect to it, S what the softmax of A takes, h a head, t a query row, j an image token (or a token of the text),
  i a pooled token, c a channel, l a block, z the class logits. Where texts are scored, v is the image embedding, t a
  text embedding.
- **Departures**: from the paper, and where it says so from the code that was read. A recipe without them follows its
  paper as far as that gives a formula for such a map. Many papers were written for a CNN, and do not say what becomes
  of their method on tokens: that is a departure too.
- **Checks**: what its map was compared with, and the test that does. A *golden* is what the authors' own code gave on a
  tiny random model, kept in `tests/golden`.

`vlcam.bibtex(name)` and `vlcam recipes NAME --bibtex` give the sources as BibTeX.

| recipe | site | target | weighting | source |
|---|---|---|---|---|
{rows}
"""


def page() -> str:
    """The whole page, as Markdown."""
    entries = vlcam.recipes()
    rows = "\n".join(_row(entry) for entry in entries.values())
    head = _HEAD.format(count=len(entries), rows=rows)
    sections = "\n".join(line for title, module in GROUPS.items() for line in _group(title, module))
    return f"{head}\n{sections}"


def _group(title: str, module: ModuleType) -> Iterator[str]:
    yield f"## {title}\n\n{module.__doc__}\n"
    for entry in module.ENTRIES:
        yield _section(entry)


def _row(entry: vlcam.Entry) -> str:
    recipe = entry.recipe
    score = recipe.target if recipe.target == "none" else f"{recipe.target}, {recipe.scale}"
    link = f"[{recipe.name}](#{_anchor(_heading(recipe.name))})"
    return f"| {link} | `{recipe.site}` | {score} | `{recipe.weighting}` | {_short(entry.citation)} |"


def _section(entry: vlcam.Entry) -> str:
    lines = [
        f"### {_heading(entry.recipe.name)}\n",
        f"`{entry.recipe.name}`, {entry.recipe.fingerprint}: {_escaped(vlcam.summary(entry.recipe))}.\n",
        f"```text\n{vlcam.formula(entry.recipe)}\n```\n",
        f"- **Paper**: {_escaped(str(entry.citation))}{_address(entry.citation)}",
        f"- **Code**: {_escaped(entry.code)}",
    ]
    if entry.depth:
        lines.append(f"- **Published for** a stream of {entry.depth} blocks")
    if entry.departs:
        lines.append(f"- **Departures**: {_escaped(entry.departs)}")
    lines.append("- **Checks**:")
    lines += [f"  - {_escaped(check.what)}: `{check.test}`" for check in entry.checks]
    lines.append(f"- **Notes**: {_escaped(entry.notes)}\n")
    return "\n".join(lines)


def _short(citation: Citation) -> str:
    first, *others = citation.families.split(", ")
    names = first if not others else f"{first}, {others[0]}" if len(others) == 1 else f"{first} et al."
    venue = "" if not citation.venue else f" {citation.venue}"
    return f"{names},{venue} {citation.year}" if str(citation.year) not in venue else f"{names},{venue}"


def _address(citation: Citation) -> str:
    if citation.doi:
        return f". [doi:{citation.doi}](https://doi.org/{citation.doi})"
    if citation.eprint:
        return f". [arXiv:{citation.eprint}](https://arxiv.org/abs/{citation.eprint})"
    return f". <{citation.url}>" if citation.url else ""


def _heading(name: str) -> str:
    """A heading whose anchor is its own: signs are dropped from anchors, so that two names could share one."""
    return f"{name} (plus plus)" if "+" in name else name


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _escaped(text: str) -> str:
    return re.sub(r"([*<|\[\]])", r"\\\1", text)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
