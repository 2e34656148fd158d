"""Executes notebooks in place: `python docs/run_notebooks.py [FILE ...]`; by default every notebook in `examples/`.

A notebook that raises is left as it was; the others still run, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
_ADDRESS = re.compile(r" at 0x[0-9A-Fa-f]+")


def execute(path: Path) -> None:
    """Run a notebook from top to bottom, in its own folder, and write its outputs into it.

    Raises:
        CellControlSignal: a cell raised, or ran for more than `TIMEOUT` seconds.
        DeadKernelError: the kernel died.
    """
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=TIMEOUT,
        kernel_name=KERNEL,
        resources={"metadata": {"path": str(path.parent)}},
        record_timing=False,
        coalesce_streams=True,  # how a stream is cut into pieces depends on timing
    )
    client.execute()
    strip(notebook)
    nbformat.write(notebook, path)


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
    """Execute the notebooks that are named; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="*", type=Path, help="notebooks; by default every one in examples/")
    logging.basicConfig(format="%(message)s")
    log.setLevel(logging.INFO)
    failed = []
    for path in parser.parse_args(arguments).file or sorted(EXAMPLES.glob("*.ipynb")):
        log.info("%s", path)
        try:
            execute(path)
        except (OSError, nbformat.reader.NotJSONError, CellControlSignal, DeadKernelError) as error:
            log.error("%s", error)  # noqa: TRY400 - the message holds the notebook's own traceback
            failed.append(path)
    if failed:
        log.error("failed: %s", ", ".join(map(str, failed)))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
