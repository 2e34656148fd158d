"""Text of users as it is shown: with what nobody would see, and with the signs of Markdown escaped."""

from __future__ import annotations

import re

__all__ = ["in_markdown", "visible"]

_UNSEEN = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")
_SIGNS = re.compile(r"([\\`*_{}\[\]<>|~#$])")


def visible(text: str) -> str:
    """Text in one line, in which signs that no reader sees, and that turn the order of those around them, are escaped.

    They are control characters, surrogates, which stand for the bytes of a file name that is not UTF-8, and marks that
    embed or override a direction. Joiners and other marks of scripts stay.
    """
    return _UNSEEN.sub(lambda found: found.group().encode("unicode_escape").decode(), " ".join(text.split()))


def in_markdown(text: str) -> str:
    """Any text as Markdown that shows it, in one line, also within a table."""
    return _SIGNS.sub(r"\\\1", visible(text).replace("&", "&amp;"))
