"""The Python page has every public name; docstrings name their parameters; examples run.

The examples are those of the docstrings and of the page; all begin with the page's first one.
"""

from __future__ import annotations

import importlib
import inspect
import re
import runpy
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
import holdfast.tables
from holdfast.engine.commands.data_command import main as run_data_command
from places import ROOT

PAGE = (ROOT / "docs" / "api.md").read_text()
SHOWN = {
    name: members.split(", ") if members else []
    for name, members in re.findall(
        r"^<!-- (?:docstring|object): ([\w.]+)(?:: (.+))? -->$", PAGE, re.MULTILINE
    )
}
MADE_BY_HOLDFAST = set(re.findall(r"^<!-- object: ([\w.]+)", PAGE, re.MULTILINE))
TRAINERS = [name for name in SHOWN if name.startswith("holdfast.trainers.")]
OURS = sorted(SHOWN.keys() - set(TRAINERS))
BEGIN, *OF_THE_PAGE = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
STEP = """
for step in job.steps(data, until=2):
{}
    optimizer.step()
    optimizer.zero_grad()
"""


def find_object(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def examples_of(docstring: str) -> list[str]:
    """Return the indented blocks of a docstring."""
    parts = re.findall(r"(?:^ {4}.*\n|^\n(?= {4}))+", docstring + "\n", re.MULTILINE)
    return [textwrap.dedent(part).strip("\n") for part in parts]


def documented(path: str) -> Iterator[tuple[str, Any]]:
    """Find a name of the page, and its members there; without a list all of its own."""
    found = find_object(path)
    yield path, found
    if inspect.isclass(found) and not issubclass(found, Exception):
        own = [name for name in vars(found) if name not in getattr(found, "__slots__", ())]
        plain = [name for name in own if callable(vars(found)[name])]
        names = SHOWN[path] or ([] if path in MADE_BY_HOLDFAST else plain)
        for name in names:
            if not name.startswith("_"):
                yield f"{path}.{name}", inspect.getattr_static(found, name)


def examples() -> Iterator[Any]:
    """Find every example as a test's parameter: a script, without its beginning."""
    for number, block in enumerate(OF_THE_PAGE):
        yield pytest.param(block, id=f"page-{number}")
    for path in OURS:
        for name, found in documented(path):
            for block in examples_of(inspect.getdoc(found) or ""):
                in_a_step = path == "holdfast.Step" and name != path
                script = STEP.format(textwrap.indent(block, "    ")) if in_a_step else block
                yield pytest.param(script, id=name)


def docstring_of(name: str, found: Any) -> str:
    """Return the docstrings of a name, and of the methods that it overrides."""
    owner, _, member = name.rpartition(".")
    bases = find_object(owner).__mro__[1:] if owner in SHOWN else ()
    overridden = [base.__dict__[member] for base in bases if member in base.__dict__]
    return "\n".join(inspect.getdoc(each) or "" for each in (found, *overridden))


def missing_words(found: Any, docstring: str) -> list[str]:
    """Return the parameters that a docstring does not name, nor the one to which it refers."""
    for other in re.findall(r"\bas for `?(\w+)", docstring):
        for place in (holdfast.tables, holdfast.Job):
            docstring += inspect.getdoc(getattr(place, other, None)) or ""
    names = [name for name in inspect.signature(found).parameters if name != "self"]
    return [name for name in names if not re.search(rf"\b{name}\b", docstring)]


def test_the_page_has_everything_public_and_nothing_else() -> None:
    public = [f"holdfast.{name}" for name in holdfast.__all__ if name not in ("servers", "tables")]
    public += [f"holdfast.tables.{name}" for name in holdfast.tables.__all__]
    assert sorted(SHOWN) == sorted(public + TRAINERS)
    assert [name for name in SHOWN if f"| `{name}` |" not in PAGE] == []
    for name in ("Job", "Step"):
        members = [each for each in dir(getattr(holdfast, name)) if not each.startswith("_")]
        assert sorted(SHOWN[f"holdfast.{name}"]) == members


@pytest.mark.parametrize("path", TRAINERS)
def test_the_trainers_are_there(path: str) -> None:
    """Importing them takes long; `make docs` refuses members that they lack."""
    module, _, name = path.rpartition(".")
    source = ROOT / "src" / f"{module.replace('.', '/')}.py"
    assert f"\nclass {name}(" in source.read_text() or f"\nclass {name}:" in source.read_text()


@pytest.mark.parametrize("path", OURS)
def test_docstrings_name_every_parameter(path: str) -> None:
    for name, found in documented(path):
        assert inspect.getdoc(found), f"{name} has no docstring"
        docstring = docstring_of(name, found)
        is_error = inspect.isclass(found) and issubclass(found, Exception)
        if callable(found) and name not in MADE_BY_HOLDFAST and not is_error:
            assert missing_words(found, docstring) == [], name


def test_a_parameter_that_is_not_named_is_found() -> None:
    def read(path: str, limit_s: float, seed: int) -> None:
        """Read `path` until `limit_s`; `keys`, and all else, as for KeyRules."""

    assert missing_words(read, inspect.getdoc(read) or "") == ["seed"]


@pytest.mark.parametrize("path", OURS)
def test_every_name_has_an_example(path: str) -> None:
    found = find_object(path)
    if not (inspect.isclass(found) and issubclass(found, Exception)):  # the page has one for all
        assert examples_of(inspect.getdoc(found) or "") != []


@pytest.mark.parametrize("script", sorted(examples(), key=lambda each: str(each.id)))
def test_an_example_runs(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokens.bin").write_bytes(bytes(1000))
    assert run_data_command(["index", "tokens.bin"]) == 0
    (tmp_path / "example.py").write_text(BEGIN + script)
    runpy.run_path("example.py", run_name="__main__")
