"""Which values are tried for a field that a description leaves open, on one model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vlcam.ambiguity.description import Description
from vlcam.choices import ASKING, COMPARING, CONTRASTIVE, WORDS, takes_gradient
from vlcam.errors import UnknownNameError
from vlcam.plan import counted
from vlcam.readers import READERS
from vlcam.recipe import values_of

if TYPE_CHECKING:
    from vlcam.adapter import ModelAdapter

__all__ = ["Domain", "held"]

_USUAL: dict[str, tuple[Any, ...]] = {"attention": ("own",), "departures": ((),), "discard": (0.0,)}
"""What nobody means who does not say so."""
_LAID = {"upsample": ("bilinear", "none"), "normalize": ("minmax",)}
"""How a token map becomes a heatmap, where it is not varied: the first value that fits."""
_HELD = {
    "stream": "all but text",
    "layers": "each block alone, and all",
    "attention": "own",
    "gradient_path": "full, or none without a gradient",
    "queries": "by name, not by number",
    "weighting": f"all but {', '.join(ASKING)}",
    "discard": "0",
    "departures": "none",
    "upsample": "bilinear",
    "normalize": "minmax",
}
"""Fields of which not every value is tried where they are open, and what is, for people."""
_NEEDS = {"cls": "cls", "registers": "register"}
"""Words for tokens that not every model has."""
_EXCLUDABLE = {"register": "registers", "distillation": "distillation"}


@dataclass(frozen=True)
class Domain:
    """The values that a field may have on one model, given a description.

    Attributes:
        adapter: the model.
        description: states some fields.
        phrase: words of the text that the map is of.
        custom: whether the target is a callable.
        heatmaps: whether the fields behind the token map are varied too.
    """

    adapter: ModelAdapter
    description: Description
    phrase: str | None = None
    custom: bool = False
    heatmaps: bool = False

    def values(self, field: str, chosen: Mapping[str, Any]) -> tuple[Any, ...]:
        """What is tried for a field, after those before it were chosen; layers are found by `layers`.

        Args:
            field: which one.
            chosen: the fields before it.
        """
        stated = self.description.stated.get(field)
        if stated is None:
            return self._open(field, chosen)
        if field in _LAID and not self.heatmaps:  # the token map is one for all of them
            return tuple(value for value in _LAID[field] if value in stated) or stated
        return tuple(value for value in stated if self._has(field, value, chosen))

    def layers(self, chosen: Mapping[str, Any]) -> Iterator[tuple[Any, str, tuple[int, ...]]]:
        """Layers as a recipe has them, the rule that merges them, and the blocks that they are.

        Open layers are every single block that has the site, and all of them where they may be merged. With one block
        an open rule is `single`; with several it is any other.

        Args:
            chosen: the fields before them.
        """
        path = "block" if chosen["gradient_path"] == "block" else "full"
        stream = counted(self.adapter, chosen["stream"], path)
        having = stream.having(chosen["site"]) or tuple(range(len(stream.blocks)))
        stated, rules = self.description.stated.get("layers"), self.description.stated.get("layer_rule")
        given: tuple[Any, ...] = stated if stated is not None else (*((block,) for block in having), "all")
        tried = rules if rules is not None else WORDS["layer_rule"]
        seen = set()
        for layers in given:
            try:
                blocks = stream.indices(layers, chosen["site"])
            except UnknownNameError:
                continue
            if blocks in seen:
                continue
            seen.add(blocks)
            embedded = chosen["weighting"] in COMPARING and blocks == having[-1:]  # the model embeds no others
            written = "all" if layers == "all" else "last" if embedded else blocks
            for rule in tried:
                if self._merges(rule, blocks, stated is not None, rules is not None):
                    yield written, rule, blocks

    @staticmethod
    def _merges(rule: str, blocks: tuple[int, ...], layers_stated: bool, rule_stated: bool) -> bool:
        if len(blocks) == 1 and not (layers_stated and rule_stated):
            return rule == "single"
        return len(blocks) == 1 or rule != "single"

    def _open(self, field: str, chosen: Mapping[str, Any]) -> tuple[Any, ...]:
        if field in _USUAL:
            return _USUAL[field]
        if field in _LAID and not self.heatmaps:
            return _LAID[field]
        own = getattr(self, f"_{field}", None)
        tried = WORDS[field] if own is None else own(chosen)
        return tuple(value for value in tried if self._has(field, value, chosen))

    def _has(self, field: str, value: Any, chosen: Mapping[str, Any]) -> bool:
        """Whether the model has what a value names."""
        adapter = self.adapter
        if field == "stream":
            return value in adapter.anatomy.streams
        if field == "site":
            return bool(adapter.anatomy.stream(chosen["stream"]).having(value))
        if field == "target":
            return value == "none" or value in (("custom",) if self.custom else adapter.heads)
        if (field, value) == ("queries", "cls") and adapter.anatomy.stream(chosen["stream"]).tells_next:
            return False  # no row tells the token that opens the text
        if field in ("queries", "gradient_tokens") and self._of_image(chosen):
            return _NEEDS.get(value, "") in ("", *adapter.prefix) if isinstance(value, str) else True
        return True

    @staticmethod
    def _of_image(chosen: Mapping[str, Any]) -> bool:
        """Whether tokens that are named are those of the image."""
        return chosen["stream"] != "text" and (chosen["site"], chosen["stream"]) != ("CROSS", "fusion")

    def _stream(self, _: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(stream for stream in self.adapter.anatomy.streams if stream != "text")

    def _scale(self, chosen: Mapping[str, Any]) -> tuple[str, ...]:
        target = chosen["target"]
        return tuple(READERS[self.adapter.heads[target]]) if target in self.adapter.heads else WORDS["scale"]

    def _weighting(self, _: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(weighting for weighting in WORDS["weighting"] if weighting not in ASKING)

    def _gradient_path(self, chosen: Mapping[str, Any]) -> tuple[str, ...]:
        return ("full",) if takes_gradient(chosen["weighting"]) else ("none",)

    def _prompt(self, chosen: Mapping[str, Any]) -> tuple[str, ...]:
        if self.phrase is None or chosen["site"] == "CROSS":
            return ("whole",)
        return ("phrase", "in_place") if chosen["target"] in CONTRASTIVE else ("phrase",)

    def _queries(self, chosen: Mapping[str, Any]) -> tuple[str, ...]:
        if (chosen["site"], chosen["stream"]) == ("CROSS", "fusion"):
            return ("phrase",) if self.phrase is not None else ("cls", "all")
        return (*values_of("queries"), "none")

    def _exclude(self, chosen: Mapping[str, Any]) -> tuple[tuple[str, ...], ...]:
        """What must be left out, and what may be besides where it changes which tokens count."""
        if chosen["stream"] == "text":
            return (("special_text", "padding"),)
        of_text = chosen["site"] == "CROSS" and chosen["stream"] == "fusion"
        may: list[str] = []
        if "all" in (chosen["queries"], chosen["gradient_tokens"]) and not of_text:
            may = [word for name, word in _EXCLUDABLE.items() if name in self.adapter.prefix]
        if of_text and chosen["queries"] == "all":
            may = ["special_text"]
        must = {"cls", "padding"} if of_text else {"cls"}
        subsets = itertools.chain.from_iterable(itertools.combinations(may, n) for n in range(len(may) + 1))
        order = ("cls", "registers", "distillation", "special_text", "padding")
        return tuple(tuple(word for word in order if word in must.union(more)) for more in subsets)


def held(description: Description) -> dict[str, str]:
    """Fields that a description leaves open and of which not every value is tried: what is, in words.

    Heatmaps are not varied here; see `Domain.heatmaps`.
    """
    return {field: words for field, words in _HELD.items() if field not in description.stated}
