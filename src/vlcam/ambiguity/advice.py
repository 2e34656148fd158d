"""The sentence that a paper would have to add."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vlcam.ambiguity.words import SENTENCES, in_words

if TYPE_CHECKING:
    from vlcam.ambiguity.result import Share

__all__ = ["Advice", "advice"]

GAP = "___"
_LISTED = 8


@dataclass(frozen=True)
class Advice:
    """What to state.

    Attributes:
        field: the field with the largest share of the variance.
        share: that share.
        sentence: what a paper would say of it, with a gap for the value.
        choices: for every value its words and how many recipes remain with it, the fewest last.
    """

    field: str
    share: float
    sentence: str
    choices: Mapping[Any, tuple[str, int]]

    def filled(self, value: Any) -> str:
        """The sentence with one value filled in.

        Raises:
            KeyError: no member has that value.
        """
        return self.sentence.replace(GAP, self.choices[value][0])

    def __str__(self) -> str:
        """The sentence, then what it can be filled in with, and what remains."""
        parts = [f"{words}: {count}" for words, count in self.choices.values()]
        more = f"; {len(parts) - _LISTED} more values" if len(parts) > _LISTED else ""
        remain = f"Recipes that remain with {'; '.join(parts[:_LISTED])}{more}."
        return f"Add: “{self.sentence}” On average {self.share:.0%} of the variance goes with it. {remain}"


def advice(share: Share) -> Advice:
    """What to state of one field."""
    choices = {value: (in_words(share.field, value), count) for value, count in share.values.items()}
    ordered = dict(sorted(choices.items(), key=lambda item: -item[1][1]))
    return Advice(share.field, share.share, SENTENCES[share.field].format(GAP), ordered)
