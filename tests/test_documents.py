"""What the documents say is true: examples run, exported names exist, every page is linked, notebooks were executed."""

from __future__ import annotations

import ast
import doctest
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer

import vlcam
from vlcam import cli, scenes
from vlcam.recipe import Recipe, values_of

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.glob("*.md")])
LISTED = ("exclude", "departures")
"""Fields that hold a list of names; what they know is in the message that refuses another."""
FIGURES = {
    "image": ("topk_recall", "object_recall", "probability_of_present"),
    "pixels": ("mean_iou", "mean_iou_objects", "background_iou", "pixel_accuracy", "pixel_accuracy_objects"),
}
"""What the card of an embedded model states besides its pointing game, by what has a class."""


def text_of(page):
    return page.read_text(encoding="utf-8")


def blocks(page, language):
    """The fenced blocks of a page in a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text_of(page), re.DOTALL | re.MULTILINE)


def run_blocks(page, codes):
    """Run code blocks one after another, in one namespace."""
    namespace = {"__name__": page.stem}
    for number, code in enumerate(codes):
        exec(compile(code, f"{page.name}, block {number}", "exec"), namespace)


def in_one_line(text):
    return " ".join(text.split())


def names_of(field):
    """The words that a field of a recipe knows."""
    if field not in LISTED:
        return [value for value in values_of(field) if isinstance(value, str)]
    with pytest.raises(vlcam.RecipeError) as refused:
        vlcam.recipes()["pgc-gradcam"].recipe.replace(**{field: "no such name"})
    return re.findall(r"'(\w+)'", str(refused.value).partition("give any of")[2])


def test_the_examples_in_docstrings_run():
    assert doctest.testmod(scenes).attempted == 3
    assert doctest.testmod(scenes).failed == 0


def test_every_exported_name_exists():
    assert sorted(vlcam.__all__) == sorted(set(vlcam.__all__))
    for name in vlcam.__all__:
        assert hasattr(vlcam, name), name


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_links_to_files_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)", text_of(page)):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_links_to_headings_lead_somewhere(page):
    for file, anchor in re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", text_of(page)):
        there = text_of(page.parent / file if file else page)
        headings = [re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^#+ (.+)$", there, re.M)]
        assert anchor in headings, anchor


def test_every_page_and_every_notebook_is_in_the_index():
    index = text_of(DOCS / "README.md")
    for page in [*DOCS.glob("*.md"), *(ROOT / "examples").glob("*.ipynb")]:
        assert page.name == "README.md" or page.name in index, page.name


@pytest.mark.parametrize("notebook", sorted((ROOT / "examples").glob("*.ipynb")), ids=lambda path: path.name)
def test_notebooks_are_stored_with_the_output_of_a_clean_run(notebook):
    cells = [cell for cell in json.loads(text_of(notebook))["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert not any(output["output_type"] == "error" for cell in cells for output in cell["outputs"])


def test_every_recipe_is_in_the_catalogue_and_every_value_on_the_recipe_page():
    page, catalogue = text_of(DOCS / "recipes.md"), text_of(DOCS / "catalogue.md")
    for name in vlcam.recipes():
        assert f"| [{name}](#" in catalogue, name
    for field in Recipe.__dataclass_fields__:
        assert field == "name" or f"| `{field}` |" in page, field
        for value in names_of(field):
            assert f"`{value}`" in page or f'`"{value}"`' in page, (field, value)


def test_the_recipe_file_on_the_recipe_page_is_a_recipe():
    (found,) = blocks(DOCS / "recipes.md", "toml")
    assert Recipe.from_toml(found).to_toml() == found


def test_the_code_on_the_recipe_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run_blocks(DOCS / "recipes.md", blocks(DOCS / "recipes.md", "python"))
    assert (tmp_path / "mine.toml").read_text() == blocks(DOCS / "recipes.md", "toml")[0]
    printed = capsys.readouterr().out
    assert "same relative depth of 6 blocks" in printed
    assert "asked 64 for a map of (8, 8)" in printed
    assert "16 of 96\n32 of 96\n48 of 96\n64 of 96\nbroken off" in printed


def test_the_code_on_the_classifier_page_runs_and_prints_what_it_says(tmp_path, monkeypatch, capsys):
    for package in ("timm", "torchvision", "matplotlib"):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    run_blocks(DOCS / "classifiers.md", blocks(DOCS / "classifiers.md", "python"))
    printed = in_one_line(capsys.readouterr().out)
    for output in blocks(DOCS / "classifiers.md", "text"):
        assert in_one_line(output) in printed, output


def test_the_code_on_the_clip_page_runs_and_prints_what_it_says(tmp_path, monkeypatch, capsys):
    pytest.importorskip("open_clip")
    monkeypatch.chdir(tmp_path)
    run_blocks(DOCS / "clip.md", blocks(DOCS / "clip.md", "python"))
    printed = in_one_line(capsys.readouterr().out)
    for output in blocks(DOCS / "clip.md", "text"):
        assert in_one_line(output) in printed, output


def test_the_code_of_the_quickstart_runs(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    codes = blocks(ROOT / "README.md", "python")
    run_blocks(ROOT / "README.md", [code for code in codes if "google/" not in code])  # which needs a network


@pytest.mark.parametrize("page", ["blip.md", "provenance.md"])
def test_the_code_on_the_other_pages_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_blocks(DOCS / page, blocks(DOCS / page, "python"))


def test_the_adapters_on_the_adapter_page_work(tmp_path, monkeypatch, capsys):
    page = DOCS / "adapters.md"
    shown = dict(
        re.findall(r"`src/(\w+)\.py`[^`]*\n+.*?^```python\n(.*?)^```$", text_of(page), re.DOTALL | re.MULTILINE)
    )
    for name, code in shown.items():
        (tmp_path / f"{name}.py").write_text(code)
    installed = tmp_path / "toys-0.1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: toys\nVersion: 0.1.0\n")
    entries = re.findall(r'^(\w+ = )"(toy_\w+:\w+)"$|`(\w+ = )"(toy_\w+:\w+)"`', text_of(page), re.MULTILINE)
    lines = ["".join(entry) for entry in entries]
    (installed / "entry_points.txt").write_text("\n".join(["[vlcam.adapters]", *lines]) + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    run_blocks(page, [code for code in blocks(page, "python") if code not in shown.values()])
    printed = capsys.readouterr().out
    assert len(shown) == len(lines) == 2
    assert "identical: largest difference 0" in printed
    assert "legrad all ok" in printed
    for name in shown:
        sys.modules.pop(name)


def test_every_command_and_every_option_is_on_the_command_line_page():
    page = text_of(DOCS / "cli.md")
    for name, command in typer.main.get_command(cli.app).commands.items():
        _, heading, section = page.partition(f"\n## {name}\n")
        assert heading, name
        section = section.partition("\n## ")[0]
        for parameter in command.params:
            for spelling in parameter.opts if parameter.param_type_name == "option" else ():
                assert f"`{spelling}`" in section or spelling in ("--help", "--json"), (name, spelling)


def messages():
    """Every text in the code, with `…` for what is filled in."""
    for module in [*(ROOT / "src").rglob("*.py"), *(ROOT / "model_adapters").rglob("*.py")]:
        for node in ast.walk(ast.parse(text_of(module))):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            texts = [part.value if isinstance(part, ast.Constant) else "…" for part in parts]
            if all(isinstance(text, str) for text in texts):
                yield "".join(texts)


def test_every_heading_of_the_troubleshooting_page_is_a_message():
    known = [in_one_line(message) for message in messages()]
    headings = re.findall(r"^### (.+)$", text_of(DOCS / "troubleshooting.md"), re.MULTILINE)
    assert len(headings) == len(set(headings))
    for heading in re.findall(r"`([^`]+)`", "\n".join(headings)):
        # Of a status and its advice two texts make one message, and so does a field with its value.
        for piece in re.split("…|[(]|[)]|: |'", heading):
            assert any(piece.strip(" ;:,") in message for message in known), (heading, piece)


def test_the_embedded_models_are_small_and_their_cards_state_their_figures():
    limits = {"itm_accuracy": 4_000_000, "captions_true": 3_000_000, "answers_right": 3_000_000}
    limits["pointing_game"] = 3_000_000
    for model in vlcam.models().values():
        kind = next(each for each in limits if each in model.figures)
        assert sum(file.stat().st_size for file in model.folder.iterdir()) < limits[kind], model.name
        found = model.figures[kind]
        shares = list(found.values()) if isinstance(found, dict) else [found]
        if kind in ("captions_true", "answers_right"):
            shares += [share for blocks in model.figures["pointing_game"].values() for share in blocks]
        if kind == "pointing_game":
            own = FIGURES["pixels" if "mean_iou" in model.figures else "image"]
            shares += [*model.figures["pointing_game_box"].values(), *(model.figures[each] for each in own)]
        for share in shares:
            assert f"{share:.3f}" in model.card, (model.name, share)


def test_adapters_import_the_engine_and_never_the_reverse():
    engine = Path(vlcam.__file__).parent
    for module in engine.rglob("*.py"):
        assert "vlcam_adapters" not in text_of(module), module.name


def test_the_engine_imports_without_a_model_library_or_matplotlib():
    extras = ("transformers", "timm", "matplotlib", "torchvision")
    code = f"import sys, vlcam; print([name for name in {extras} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout.strip() == "[]"


def test_the_version_is_stated_once():
    with (ROOT / "pyproject.toml").open("rb") as file:
        assert tomllib.load(file)["project"]["version"] == vlcam.__version__
