"""The sources of a recipe as BibTeX: the paper of its method, and the repositories that its code was read in."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from vlcam.catalogue import named, recipes
from vlcam.entry import Entry
from vlcam.errors import UnknownNameError, listing
from vlcam.recipe import Recipe

if TYPE_CHECKING:
    from vlcam.citations import Citation
    from vlcam.explanation import Explanation

__all__ = ["bibliography", "bibtex", "entry_of"]

_SPECIAL = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    }
)
# An owner and a name open the line, or follow a semicolon; behind them a commit or a release.
_REPOSITORY = re.compile(r"(?:^|; )([\w.-]+)/([\w.-]+)(?: ([0-9a-f]{7}|\d+(?:\.\d+)+))?(?=[,;]| and |$)")


def bibtex(recipe: str | Recipe | Entry | Explanation) -> str:
    """The sources of a recipe as BibTeX entries: the method's paper, then every repository that its code was read in.

    Titles stand in a second pair of braces, so that no style changes their capitals. The text is the same in every
    call, and a source has the same key in every recipe that names it.

    Args:
        recipe: the name of a recipe; a recipe, found in the catalogue by its name; an entry of the catalogue; or an
            explanation, for its recipe.

    Raises:
        UnknownNameError: no recipe of that name is in the catalogue, so that its source is not known.
    """
    return bibliography([entry_of(recipe)])


def bibliography(entries: Iterable[Entry]) -> str:
    """The sources of several recipes, each source once, in the order in which they are first named."""
    return "\n".join(dict.fromkeys(source for entry in entries for source in _sources(entry)))


def entry_of(recipe: str | Recipe | Entry | Explanation) -> Entry:
    """The catalogue entry that something with a recipe belongs to, found by the recipe's name.

    Raises:
        UnknownNameError: the catalogue has no recipe of that name.
    """
    if isinstance(recipe, str):
        return named(recipe)
    if isinstance(recipe, Entry):
        return recipe
    name = (recipe if isinstance(recipe, Recipe) else recipe.recipe).name
    if name not in recipes():
        raise UnknownNameError(
            f"recipe {name!r} is not in the catalogue, so its source is not known; give the name of the recipe that it "
            f"was made from, one of {listing(recipes())}"
        )
    return named(name)


def _sources(entry: Entry) -> Iterator[str]:
    yield _paper(entry.citation)
    for owner, name, version in _REPOSITORY.findall(entry.code):
        yield _repository(owner, name, version)


def _paper(citation: Citation) -> str:
    container = {"inproceedings": "booktitle", "article": "journal"}.get(citation.kind)
    fields = {
        "author": " and ".join(author.translate(_SPECIAL) for author in citation.authors),
        "title": f"{{{citation.title.translate(_SPECIAL)}}}",
        **({container: (citation.container or citation.venue).translate(_SPECIAL)} if container else {}),
        "year": str(citation.year),
        "doi": citation.doi,
        "eprint": citation.eprint,
        "archiveprefix": "arXiv" if citation.eprint else "",
        "url": citation.url,
    }
    return _entry(citation.kind, citation.key, fields)


def _repository(owner: str, name: str, version: str) -> str:
    what = "version" if "." in version else "commit"
    address = f"https://github.com/{owner}/{name}"
    fields = {
        "author": f"{{{owner.translate(_SPECIAL)}}}",
        "title": f"{{{name.translate(_SPECIAL)}}}",
        "note": f"{what} {version}" if version else "",
        "url": f"{address}/tree/{version}" if version and what == "commit" else address,
    }
    return _entry("misc", "-".join(filter(None, [owner, name, version])).lower(), fields)


def _entry(kind: str, key: str, fields: dict[str, str]) -> str:
    """One entry; fields without a value are left out. Identifiers and addresses are verbatim in BibTeX, unescaped."""
    lines = [f"  {field} = {{{value}}}," for field, value in fields.items() if value]
    return "\n".join([f"@{kind}{{{key},", *lines, "}", ""])
