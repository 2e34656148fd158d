"""`python -m benchmarks NAME`."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks import itm, pointing


def main() -> None:
    """Run one benchmark and print its table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    which = parser.add_subparsers(dest="name", required=True)
    cost = which.add_parser("itm", help="cost of an ITM explanation in units of the model's own forward")
    cost.add_argument("--rounds", type=int, default=5)
    cost.add_argument("--device", default="cpu")
    cost.add_argument("--write", type=Path, help="write the table to this Markdown file")
    points = which.add_parser("pointing", help="pointing game of every recipe and layer on held-out scenes")
    points.add_argument("--model", default="tiny-blip-itm")
    points.add_argument("--scenes", type=int, default=200)
    points.add_argument("--write", type=Path, help="write the table to this Markdown file")
    given = parser.parse_args()
    if given.name == "itm":
        text = itm.table(rounds=given.rounds, device=given.device)
    else:
        text = pointing.table(given.model, given.scenes)
    print(text)
    if given.write:
        given.write.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
