"""Each test is in the folder of its subject; tests that start jobs have folders of their own."""

from __future__ import annotations

import ast
import collections
from pathlib import Path

from places import ROOT, TESTS

# Folders with `unit` and `jobs` that are not in src/holdfast.
OTHERS = {"benchmarks", "examples", "kits"}
HOUSE = TESTS / "house"
STARTERS = ("holdfast.engine.runtime.local_run", "labs.local_nodes")


def starts_jobs(path: Path) -> bool:
    """Return whether a file imports a starter of jobs, or asks for one by a fixture."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module in STARTERS:
            return True
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            if any(ast.unparse(each.annotation or each) == "Start" for each in node.args.args):
                return True
    return False


def test_each_test_is_in_a_folder_of_the_source() -> None:
    for path in TESTS.rglob("test_*.py"):
        if path.parent == HOUSE:
            continue
        assert path.parent.name in ("unit", "jobs"), f"{path} is neither in unit nor in jobs"
        area = path.parent.parent.relative_to(TESTS)
        known = str(area) in OTHERS or (ROOT / "src" / "holdfast" / area).is_dir()
        assert known, f"{path}: src/holdfast has no {area}"


def test_no_unit_test_starts_a_job() -> None:
    units = [path for path in TESTS.rglob("test_*.py") if path.parent.name == "unit"]
    assert len(units) > 100
    starting = [str(path.relative_to(TESTS)) for path in units if starts_jobs(path)]
    assert not starting, f"move them to the folder jobs: {starting}"


def test_names_of_test_files_are_unique() -> None:
    names = collections.Counter(path.name for path in TESTS.rglob("test_*.py"))
    assert not [name for name, count in names.items() if count > 1]
