"""Adapters are found by entry points; those for another version of their library are left out, with one warning."""

from __future__ import annotations

import itertools
import warnings
from importlib.metadata import version

import pytest

from vlcam.adapter import AdapterWarning, adapters

NAMES = (f"of_a_test_{number}" for number in itertools.count())
"""What was found out of an entry point is remembered: every test has a package of its own."""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Installs a package of two adapters, `one` and `two`, that has these requirements; returns its name."""
    name = next(NAMES)

    def install(*requirements, extra="", module="class Toy: pass\n"):
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0"]
        (folder / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {r}" for r in requirements)]) + "\n")
        entries = [f"{number} = {name}_module:Toy{extra}" for number in ("one", "two")]
        (folder / "entry_points.txt").write_text("\n".join(["[vlcam.adapters]", *entries]) + "\n")
        (tmp_path / f"{name}_module.py").write_text(module)
        monkeypatch.syspath_prepend(str(tmp_path))
        return name

    return install


def find(name):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [adapter.__module__ for adapter in adapters()].count(f"{name}_module")
    assert all(each.category is AdapterWarning for each in caught)
    return found, [str(each.message) for each in caught if name in str(each.message)]


@pytest.mark.parametrize("requirement", ["numpy>=1", "torch>=99", 'torch>=99; extra == "other"'])
def test_adapters_whose_library_is_of_the_right_version_are_found(package, requirement):
    assert find(package(requirement, extra=" [numpy]")) == (2, [])


def test_adapters_whose_library_is_missing_are_left_out_silently(package):
    assert find(package("no-such-library>=1", extra=" [no_such_library]")) == (0, [])


@pytest.mark.parametrize("requirement", ["numpy>=99", 'numpy>=99; extra == "numpy"'])
def test_adapters_for_another_version_are_left_out_with_one_warning(package, requirement):
    name = package(requirement, extra=" [numpy]")
    found, said = find(name)
    assert (found, len(said)) == (0, 1)
    assert said[0] == (
        f"adapters 'one', 'two' were left out ({name}): made for numpy>=99, and {version('numpy')} is installed"
    )
    assert find(name) == (0, [])


def test_the_extra_may_have_the_name_that_is_imported(package):
    found, said = find(package('pillow>=999; extra == "PIL"', "pillow>=1", extra=" [PIL]"))
    assert (found, len(said)) == (0, 1)
    assert "made for pillow>=999" in said[0]


def test_adapters_that_cannot_be_imported_are_left_out_with_one_warning(package):
    name = package(module="raise ImportError('no such thing')\n")
    assert find(name) == (0, [f"adapters 'one', 'two' were left out ({name}): no such thing"])
    assert find(name) == (0, [])
