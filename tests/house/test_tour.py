"""The files and functions of docs/tour.md are there, and in their places."""

from __future__ import annotations

import ast
import re

from places import ROOT

STOP = re.compile(r"(?m)^(\d+)\. \[[^]]+\]\(\.\./([^)]+)\):((?:.|\n)*?)(?=^\d+\. |^#|^$)")
NAME = re.compile(r"`([A-Za-z_]+(?:\.[A-Za-z_]+)*)`")
NOT_IN_THE_FILE = {"job.steps", "holdfast run"}  # what scripts and people write


def names_in(source: str) -> set[str]:
    """Return the names of all functions and classes, and of methods with their classes."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (n for n in node.body if isinstance(n, ast.FunctionDef))
            found |= {f"{node.name}.{method.name}" for method in methods}
    return found


def test_the_tour_has_sixty_stops_whose_names_are_in_their_files() -> None:
    stops = STOP.findall((ROOT / "docs" / "tour.md").read_text())
    assert [int(number) for number, _, _ in stops] == list(range(1, 61))
    for _, path, text in stops:
        known = names_in((ROOT / path).read_text())
        for name in NAME.findall(text):
            assert name in known | NOT_IN_THE_FILE, f"{name} is not in {path}"
    assert len({path for _, path, _ in stops}) == 60


def test_the_changes_to_try_name_files_and_lines_that_are_there() -> None:
    changes = (ROOT / "docs" / "tour.md").read_text().partition("## Three changes")[2]
    machine = (ROOT / "src/holdfast/engine/core/worker/machine.py").read_text()
    (line,) = re.findall(r"leave out `([^`]+)`", changes)
    assert line in machine
    paths = re.findall(r"(?:pytest|python) ((?:docs|tests)/\S+\.py)", changes)
    assert len(paths) >= 3
    assert all((ROOT / path).exists() for path in paths)


def test_the_tour_is_found() -> None:
    assert "(tour.md)" in (ROOT / "docs" / "README.md").read_text()
    assert "(docs/tour.md)" in (ROOT / "CONTRIBUTING.md").read_text()
