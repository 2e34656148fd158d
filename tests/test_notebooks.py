"""Every example is a pair: a source that people edit, and the notebook made from it. They say the same, and run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from docs import run_notebooks

ROOT = Path(__file__).parent.parent
SOURCES = run_notebooks.sources()
LARGEST = 800_000

each = pytest.mark.parametrize("source", SOURCES, ids=[source.stem for source in SOURCES])


def test_every_notebook_has_a_source_and_every_source_a_notebook():
    notebooks = sorted((ROOT / "examples").glob("*.ipynb"))
    assert [notebook.stem for notebook in notebooks] == [source.stem for source in SOURCES] != []


@each
def test_a_notebook_says_what_its_source_says(source):
    stored = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    built = run_notebooks.build(source)
    assert [cell.cell_type for cell in stored.cells] == [cell.cell_type for cell in built.cells]
    for one, other in zip(stored.cells, built.cells, strict=True):
        assert (one.id, one.source, one.metadata) == (other.id, other.source, other.metadata)
    assert stored.metadata == built.metadata


@each
def test_a_notebook_is_small_and_names_no_folder_of_the_machine(source):
    notebook = source.with_suffix(".ipynb").read_bytes()
    assert len(notebook) < LARGEST
    assert b"site-packages" not in notebook
    assert str(ROOT).encode() not in notebook


@pytest.mark.slow
@each
def test_a_notebook_runs(source, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as in conftest.py: threads that wait cost more than they give
    if absent := run_notebooks.missing(source):
        pytest.skip(f"needs {', '.join(absent)}")
    command = [sys.executable, str(ROOT / "docs" / "run_notebooks.py"), "--check", str(source)]
    before = source.with_suffix(".ipynb").read_bytes()
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert source.with_suffix(".ipynb").read_bytes() == before


def test_packages_that_are_not_installed_are_found(tmp_path):
    (tmp_path / "beside.py").write_text("", encoding="utf-8")
    source = tmp_path / "example.py"
    source.write_text("# %%\nimport json\nimport no_such_package.part\nfrom beside import x\nfrom nor_this import y\n")
    assert run_notebooks.missing(source) == ["no_such_package", "nor_this"]


def test_a_notebook_that_raises_is_reported_and_not_written(tmp_path):
    source = tmp_path / "broken.py"
    source.write_text("# %%\nraise ValueError('of no use')\n", encoding="utf-8")
    command = [sys.executable, str(ROOT / "docs" / "run_notebooks.py"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1
    assert "of no use" in done.stderr
    assert not source.with_suffix(".ipynb").exists()
