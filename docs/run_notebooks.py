"""Makes the notebooks of `examples/` from their sources: `python docs/run_notebooks.py [--check] [NAME.py ...]`.

Each `NAME.py` (jupytext's percent format) becomes `NAME.ipynb`, executed from top to bottom. A notebook that raises is
left as it was; the others are still made, and the exit code is 1. Where no source is named, those that need packages
that are not installed are passed over.
"""

from __future__ import annotations

import argparse
import ast
import logging
import os
import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellControlSignal, DeadKernelError

log = logging.getLogger("notebooks")

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
TIMEOUT = 600
KERNEL = "python3"
# What a run leaves behind that says nothing of the result: when a cell ran, and where an object lay in memory.
_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": KERNEL},
    "language_info": {"name": "python"},
}
# tqdm would like widgets, and says so with the path of its file; no bar is shown.
_QUIET = "ignore:IProgress not found"
_CELL = "# %%"
_ADDRESS = re.compile(r" at 0x[0-9A-Fa-f]+")


def sources() -> list[Path]:
    """The sources in `examples/`: the files that open with a cell. Another script there is no notebook."""
    return [path for path in sorted(EXAMPLES.glob("*.py")) if path.read_text(encoding="utf-8").startswith(_CELL)]


def missing(source: Path) -> list[str]:
    """Packages that a source imports and that are not installed; modules beside it count as installed."""
    names: dict[str, None] = {}
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0]: None for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names[node.module.partition(".")[0]] = None
    own = {path.stem for path in source.parent.iterdir()}
    return [name for name in names if name not in own and find_spec(name) is None]


def build(source: Path) -> Any:
    """The notebook that a source stands for, without outputs. The same source always gives the same cell ids."""
    notebook = jupytext.read(source, fmt="py:percent")
    notebook.metadata = nbformat.from_dict(_METADATA)
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number:02}"
        cell.metadata.clear()  # which quotes the source has around a text
    return notebook


def execute(notebook: Any, folder: Path) -> None:
    """Run a notebook from top to bottom in a folder, and keep its outputs.

    Raises:
        CellControlSignal: a cell raised, or ran for more than `TIMEOUT` seconds.
        DeadKernelError: the kernel died.
    """
    client = NotebookClient(
        notebook,
        timeout=TIMEOUT,
        kernel_name=KERNEL,
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
        coalesce_streams=True,  # how a stream is cut into pieces depends on timing
    )
    client.execute(env=os.environ | {"PYTHONWARNINGS": _QUIET})
    strip(notebook)


def strip(notebook: Any) -> None:
    """Remove, in place, what changes from run to run though the result does not."""
    notebook.metadata = nbformat.from_dict(_METADATA)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", ()):
            plain = output.get("data", {}).get("text/plain")
            if plain is not None:
                output["data"]["text/plain"] = _ADDRESS.sub("", plain)


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the notebooks that are named; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="*", type=Path, help="sources; by default every one in examples/")
    parser.add_argument("--check", action="store_true", help="execute, and write nothing")
    logging.basicConfig(format="%(message)s")
    log.setLevel(logging.INFO)
    chosen = parser.parse_args(arguments)
    failed = []
    for source in chosen.file or sources():
        absent = [] if chosen.file else missing(source)
        if absent:
            log.warning("%s: passed over, it needs %s", source, ", ".join(absent))
            continue
        log.info("%s", source)
        try:
            notebook = build(source)
            execute(notebook, source.parent)
        except (OSError, CellControlSignal, DeadKernelError) as error:
            log.error("%s", error)  # noqa: TRY400 - the message holds the notebook's own traceback
            failed.append(source)
        else:
            if not chosen.check:
                nbformat.write(notebook, source.with_suffix(".ipynb"))
    if failed:
        log.error("failed: %s", ", ".join(map(str, failed)))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
