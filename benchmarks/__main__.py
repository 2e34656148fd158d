"""`python -m benchmarks NAME`."""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path
from typing import Any


def main() -> None:
    """Run one benchmark and print its table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    which = parser.add_subparsers(dest="name", required=True)
    costs = {
        "itm": "an ITM explanation",
        "vit": "explaining a class with a ViT",
        "swin": "explaining a class with a Swin",
        "clip": "contrastive scores with a CLIP",
        "asking": "recipes that ask the model again",
        "ambiguity": "every map that a description allows",
    }
    for name, what in costs.items():
        cost = which.add_parser(name, help=f"cost of {what} in units of the model's own forward")
        cost.add_argument("--rounds", type=int, default=5)
        cost.add_argument("--device", default="cpu")
        cost.add_argument("--write", type=Path, help="write the table to this Markdown file")
        if name == "itm":
            cost.add_argument("--lavis", action="store_true", help="with LAVIS's model, in the environment of LAVIS")
    points = which.add_parser("pointing", help="pointing game of every recipe and layer on held-out scenes")
    points.add_argument("--model", default="tiny-blip-itm")
    points.add_argument("--scenes", type=int, default=200)
    points.add_argument("--write", type=Path, help="write the table to this Markdown file")
    classes = which.add_parser("pointing-classes", help="pointing game of every named recipe on the classifiers")
    classes.add_argument("--scenes", type=int, default=200)
    classes.add_argument("--write", type=Path, help="write the table to this Markdown file")
    prompts = which.add_parser("pointing-clip", help="pointing game of every named recipe on a CLIP")
    prompts.add_argument("--model", default="tiny-clip")
    prompts.add_argument("--scenes", type=int, default=200)
    prompts.add_argument("--write", type=Path, help="write the table to this Markdown file")
    grounded = which.add_parser("grounding", help="pointing game and boxes of phrases, by recipe and layer")
    grounded.add_argument("--scenes", type=int, default=200)
    grounded.add_argument("--write", type=Path, help="write the table to this Markdown file")
    given = parser.parse_args()
    how = {"rounds": given.rounds, "device": given.device} if given.name in costs else {}
    if given.name == "swin":
        swin = _imported("swin")
        text = _imported("vit").table(**how, make=swin.jobs, what=swin.WHAT, name="swin")
    elif given.name in costs:
        text = _imported("lavis" if getattr(given, "lavis", False) else given.name).table(**how)
    elif given.name in ("pointing", "pointing-clip"):
        text = _imported(given.name).table(given.model, given.scenes)
    else:
        text = _imported(given.name).table(given.scenes)
    print(text)
    if given.write:
        given.write.write_text(text + "\n", encoding="utf-8")


def _imported(name: str) -> Any:
    """A benchmark's module; only the one that is asked for, since LAVIS lives in an environment of its own."""
    return import_module(f"benchmarks.{name.replace('-', '_')}")


if __name__ == "__main__":
    main()
