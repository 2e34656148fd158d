"""`python -m benchmarks NAME`."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks import asking, clip, itm, pointing, pointing_classes, pointing_clip, swin, vit


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
    }
    for name, what in costs.items():
        cost = which.add_parser(name, help=f"cost of {what} in units of the model's own forward")
        cost.add_argument("--rounds", type=int, default=5)
        cost.add_argument("--device", default="cpu")
        cost.add_argument("--write", type=Path, help="write the table to this Markdown file")
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
    given = parser.parse_args()
    how = {"rounds": given.rounds, "device": given.device} if given.name in costs else {}
    if given.name == "swin":
        text = vit.table(**how, make=swin.jobs, what=swin.WHAT, name="swin")
    elif given.name in costs:
        text = {"itm": itm, "vit": vit, "clip": clip, "asking": asking}[given.name].table(**how)
    elif given.name == "pointing-classes":
        text = pointing_classes.table(given.scenes)
    elif given.name == "pointing-clip":
        text = pointing_clip.table(given.model, given.scenes)
    else:
        text = pointing.table(given.model, given.scenes)
    print(text)
    if given.write:
        given.write.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
