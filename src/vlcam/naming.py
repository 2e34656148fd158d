"""Blocks by the names of their modules, of this version of a library or of an older one."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from vlcam.anatomy import StreamAnatomy
from vlcam.errors import UnknownNameError, listing

__all__ = ["block_named", "module_names"]

_NUMBER = re.compile(r"(?:layers?|blocks?|resblocks)\.(\d+)(?=\.|$)")


def module_names(stream: StreamAnatomy, root: nn.Module) -> tuple[str, ...]:
    """The dotted name of every block's module; of a block that is no module, of the one that gives its output.

    Of a pooler it is the attention's.
    """
    names = {id(module): name for name, module in root.named_modules()}
    givers = (block.sites.get("F6", block.sites.get("CROSS")) for block in stream.blocks)
    return tuple("" if giver is None else names.get(id(giver.module), "") for giver in givers)


def block_named(path: str, stream: StreamAnatomy, root: nn.Module) -> int:
    """The number of the block that a dotted module path names, or lies in.

    A prefix `module.` (of `DataParallel`) is looked through. A path that this version of the library does not have,
    such as `vit.encoder.layer.3`, is read by the number of its layer.

    Raises:
        UnknownNameError: no such block; lists the names that there are.
    """
    names = module_names(stream, root)
    bare = path.removeprefix("module.").removeprefix("_orig_mod.")
    inside = [number for number, name in enumerate(names) if name and f"{bare}.".startswith(f"{name}.")]
    if inside:
        return inside[-1]
    there = any(name == bare for name, _ in root.named_modules())
    numbers: list[Any] = _NUMBER.findall(bare)
    if there or not numbers or int(numbers[-1]) >= len(names):
        raise UnknownNameError(f"layer={path!r} names no block of {stream.name}; its blocks are {listing(names)}")
    return int(numbers[-1])
