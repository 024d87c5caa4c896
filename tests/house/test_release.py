"""A release names its version in one place, and its wheel holds the package and nothing else.

`make release` tries out the rest, since that needs a package index.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile

import pytest

import holdfast
from built_packages import source_problems, wheel_problems
from holdfast.engine.core.errors import RELEASE
from places import ROOT

BUILD_S = 100.0  # bounds a hang; it takes a few seconds
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


def test_the_version_stands_in_one_place() -> None:
    assert holdfast.__version__ == RELEASE
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert 'dynamic = ["version"]' in pyproject
    assert 'version = { attr = "holdfast.engine.core.errors.RELEASE" }' in pyproject
    named = [
        path
        for path in (*ROOT.glob("*.toml"), *ROOT.glob("*.cff"), *(ROOT / "src").rglob("*.py"))
        if re.search(rf"\b{re.escape(RELEASE)}\b", path.read_text())
    ]
    assert named == [ROOT / "src/holdfast/engine/core/errors.py"]


def test_the_changelog_has_a_section_for_this_version() -> None:
    sections = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert sections[0] == "Unreleased"
    assert re.fullmatch(rf"{re.escape(RELEASE)} - \d{{4}}-\d\d-\d\d", sections[1])


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the names of the files in a wheel that is built from this tree."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", tree / "src", ignore=ignored)
    shutil.copytree(ROOT / "tests/fuzz", tree / "tests/fuzz", ignore=ignored)
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    command = [sys.executable, "-c", BUILD, str(out)]
    built = subprocess.run(
        command, cwd=tree, capture_output=True, text=True, timeout=BUILD_S, check=False
    )
    assert built.returncode == 0, built.stderr
    with zipfile.ZipFile(out / f"holdfast-{RELEASE}-py3-none-any.whl") as found:
        return found.namelist()


def test_the_wheel_holds_the_package_and_nothing_else(wheel: list[str]) -> None:
    assert wheel_problems(wheel, RELEASE) == []
    for name in ("py.typed", "reports/dashboard/static/index.html", "reports/commands/report.css"):
        less = [each for each in wheel if each != f"holdfast/{name}"]
        assert wheel_problems(less, RELEASE) == [f"the wheel lacks holdfast/{name}"]
    more = [*wheel, "tests/test_wire.py"]
    assert wheel_problems(more, RELEASE) == ["the wheel holds tests/test_wire.py"]


def test_a_source_package_that_lacks_a_file_or_has_tests_is_refused(wheel: list[str]) -> None:
    root = f"holdfast-{RELEASE}"
    package = [f"{root}/src/{name}" for name in wheel if name.startswith("holdfast/")]
    listed = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "constraints.txt")
    whole = [*package, *(f"{root}/{name}" for name in listed)]
    assert source_problems(whole, RELEASE) == []
    without = [name for name in whole if not name.endswith("py.typed")]
    assert source_problems(without, RELEASE) == ["the source package lacks src/holdfast/py.typed"]
    (problem,) = source_problems([*whole, f"{root}/tests/test_wire.py"], RELEASE)
    assert problem == f"the source package holds {root}/tests/test_wire.py"
