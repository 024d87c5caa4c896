"""Functions of sessions as scripts, with the definitions that they use."""

from __future__ import annotations

import code
import linecache
import runpy
from pathlib import Path
from typing import Any

import pytest

from holdfast.engine.commands.session_launch import launch
from holdfast.engine.commands.session_script import write_script
from holdfast.engine.core.errors import UserError

USED = """
import collections.abc as shapes
import functools
import math
from collections import deque as Line
from dataclasses import dataclass

RATES = {"first": (0.1, None), 2: [True, b"x", {3}]}
shadowed = object()


@dataclass
class Settings:
    rate: float = RATES["first"][0]


class Base:
    def double(self, x: int) -> int:
        return 2 * x


class Derived(Base):
    def double(self, x: int) -> int:
        return super().double(x) + is_even(x)
"""
TRAIN = """
def is_even(x):
    return x == 0 or is_odd(x - 1)


def is_odd(x):
    return x != 0 and is_even(x - 1)


def twice(function):
    @functools.wraps(function)
    def again(*args):
        return function(*args), function(*args)

    return again


@twice
def rated(x, by=Settings):
    return by().rate * x


other = rated


def train(start, *, names=("a",)):
    shadowed = [Derived().double(x) for x in range(start)]
    print(shadowed, other(10.0), names, math.pi > 3, RATES, Line([1]), shapes.Sized.__name__)
"""
LATER = """
RATES = {"first": (0.5, None)}


@dataclass
class Settings:
    rate: float = 7.0
"""


def run_cells(*cells: str) -> dict[str, Any]:
    """Run cells as a session does, and return its names."""
    defined: dict[str, Any] = {"__name__": "__main__"}
    session = code.InteractiveInterpreter(defined)
    for number, cell in enumerate(cells):
        name = f"<cell {number} of {id(defined)}>"
        linecache.cache[name] = len(cell), None, cell.splitlines(keepends=True), name
        session.runcode(compile(cell, name, "exec"))
    return defined


def printed(text: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    script = folder / "script.py"
    script.write_text(text)
    runpy.run_path(str(script), run_name="__main__")
    return capsys.readouterr().out


def test_what_a_function_uses_comes_along(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = write_script(run_cells(USED, TRAIN)["train"], {"start": 3})
    assert printed(text, tmp_path, capsys) == (
        "[1, 2, 5] (1.0, 1.0) ('a',) True "
        "{'first': (0.1, None), 2: [True, b'x', {3}]} deque([1]) Sized\n"
    )
    assert "import math\n" in text
    # Definitions are run again, with the values that names have now.
    later = write_script(run_cells(USED, TRAIN, LATER)["train"], {"start": 0, "names": ["b"]})
    assert printed(later, tmp_path, capsys).startswith("[] (70.0, 70.0) ['b'] True {'first': (0.5")


def test_the_newest_definition_of_a_name_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also of a class without a method, whose cell is not known from its code."""
    cells = [
        "class Settings:\n    rate = 1\n",
        "def train():\n    print(Settings.rate)\n",
        "class Settings:\n    rate = 2\n",
        "def train():\n    print('newest', Settings.rate)\n",
    ]
    text = write_script(run_cells(*cells)["train"], {})
    assert printed(text, tmp_path, capsys) == "newest 2\n"


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("model = object()\ndef train(): model", "uses model, a object of this session"),
        ("def f():\n    def train(): pass\n    return train\ntrain = f()", "that def has named"),
        (
            "def f():\n    return lambda: 1\ng = f()\ndef train(): g()",
            "g is defined inside another",
        ),
        ("train = lambda: 0", "that def has named"),
        ("train = 3", "launch\\(3\\): give a function"),
        ("def train(x): pass", "cannot be called with these arguments: missing a required"),
        ("Made = type('Made', (), {})\ndef train(): Made", "the source of Made cannot be read"),
    ],
)
def test_what_cannot_come_along_is_named(cell: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        write_script(run_cells(cell)["train"], {})


def test_arguments_are_plain_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = run_cells("def train(x): pass")["train"]
    for value in (object(), float("nan"), [Path("x")]):
        with pytest.raises(UserError, match=r"arguments=\{'x': .*\}: give numbers, strings"):
            write_script(train, {"x": value})
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="arguments"):
        launch(train, {"x": object()}, nproc=1)
    assert list(tmp_path.iterdir()) == []


def test_a_session_without_sources_is_refused() -> None:
    defined: dict[str, Any] = {"__name__": "__main__"}
    code.InteractiveInterpreter(defined).runsource("def train(): pass\n", symbol="exec")
    with pytest.raises(UserError, match=r"the source of train cannot be read .* `holdfast run`"):
        write_script(defined["train"], {})
