"""Jobs take the walks that docs/architecture.md shows."""

from __future__ import annotations

import ast
import runpy
import subprocess
import sys
from collections.abc import Iterator

import pytest

from places import ROOT

SCRIPT = ROOT / "docs" / "count_walks.py"
NEW = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.11 tells a method's class")


def names_in(node: ast.AST, before: str = "") -> Iterator[str]:
    """List the qualified names of all functions."""
    for each in ast.iter_child_nodes(node):
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{before}{each.name}"
            yield from names_in(each, f"{before}{each.name}.<locals>.")
        elif isinstance(each, ast.ClassDef):
            yield from names_in(each, f"{before}{each.name}.")
        else:
            yield from names_in(each, before)


def test_each_station_of_a_walk_is_a_function() -> None:
    script = runpy.run_path(str(SCRIPT))
    known: set[str] = set()
    for path in (ROOT / "src" / "holdfast").rglob("*.py"):
        for name in names_in(ast.parse(path.read_text())):
            known |= {name, f"{path.stem}:{name}"}
    assert script["STATIONS"] <= known, script["STATIONS"] - known


@NEW
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_page_shows_the_walks_that_jobs_take() -> None:
    check = subprocess.run([sys.executable, SCRIPT, "--check"], timeout=300, check=False)
    assert check.returncode == 0, "run: python docs/count_walks.py --write"
