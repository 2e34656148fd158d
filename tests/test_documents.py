"""What the documents say is true: examples run, exported names exist, every page is linked, notebooks were executed."""

from __future__ import annotations

import doctest
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import vlcam
from vlcam import scenes

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])


def test_the_examples_in_docstrings_run():
    assert doctest.testmod(scenes).attempted == 3
    assert doctest.testmod(scenes).failed == 0


def test_every_exported_name_exists():
    assert sorted(vlcam.__all__) == sorted(set(vlcam.__all__))
    for name in vlcam.__all__:
        assert hasattr(vlcam, name), name


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_links_to_files_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), target


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or page.name in index, page.name


@pytest.mark.parametrize("notebook", sorted((ROOT / "examples").glob("*.ipynb")), ids=lambda path: path.name)
def test_notebooks_are_stored_with_the_output_of_a_clean_run(notebook):
    cells = [cell for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert not any(output["output_type"] == "error" for cell in cells for output in cell["outputs"])


def test_every_recipe_is_on_the_recipe_page():
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    for name in vlcam.recipes():
        assert f"`{name}`" in page


def test_the_embedded_model_is_small_and_its_card_states_its_figures():
    for model in vlcam.models().values():
        assert sum(file.stat().st_size for file in model.folder.iterdir()) < 4_000_000
        for share in model.figures["itm_accuracy"].values():
            assert f"{share:.3f}" in model.card


def test_adapters_import_the_engine_and_never_the_reverse():
    engine = Path(vlcam.__file__).parent
    for module in engine.rglob("*.py"):
        assert "vlcam_adapters" not in module.read_text(encoding="utf-8"), module.name


def test_the_engine_imports_without_a_model_library_or_matplotlib():
    extras = ("transformers", "timm", "matplotlib", "torchvision")
    code = f"import sys, vlcam; print([name for name in {extras} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout.strip() == "[]"


def test_the_version_is_stated_once():
    with (ROOT / "pyproject.toml").open("rb") as file:
        assert tomllib.load(file)["project"]["version"] == vlcam.__version__
