"""The tool that plants bugs: it plants them, records which check notices each, and counts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mutants import equivalents, scope, survey
from mutants.planting import Mutant, Planter, draw
from mutants.rules import Knowledge
from mutants.table import Report
from places import TESTS

CODE = '''"""A module with known mutants."""


def clamp(value: int, most: int) -> int:
    """Return the value, or the most that it may be."""
    if value > most:
        return most
    return value


def countdown(start: int) -> int:
    """Return what is left when all is counted down."""
    while start > 0:
        start -= 1
    return start


def forgotten(flag: bool) -> bool:
    """Tell what no test asks for."""
    return not flag
'''
TEST = """from holdfast.engine.core.tiny import clamp, countdown


def test_clamp():
    assert [clamp(value, 3) for value in (2, 3, 4)] == [2, 3, 3]


def test_countdown():
    assert countdown(2) == 0
"""
FILE = "src/holdfast/engine/core/tiny.py"


def mutants(code: str) -> list[Mutant]:
    knowledge = Knowledge()
    knowledge.learn(code.encode())
    return Planter(FILE, code.encode(), knowledge).mutants()


def planted(code: str, rule: str) -> list[str]:
    return [m.after for m in mutants(code) if m.rule == rule]


# ---------------------------------------------------------------- what is planted

RULES = [
    ("boundary", "x = a < b", ["x = a <= b"]),
    ("comparison", "x = a is not b", ["x = a is b"]),
    ("and/or", "x = a and b or c", ["x = a and b and c", "x = a or b or c"]),
    ("operand dropped", "x = a and b", ["x = ((a))", "x = ((b))"]),
    ("operand dropped", "x = [a] + b", ["x = [a]", "x = b"]),
    ("not dropped", "x = not a", ["x = (a)"]),
    ("arithmetic", "x = a * b", ["x = a // b"]),
    ("condition negated", "x = [y for y in a if b]", ["x = [y for y in a if (not (b))]"]),
    ("condition constant", "if a:\n  b()", ["if False:", "if True:"]),
    ("condition constant", "while a:\n  b()", ["while False:"]),
    ("constant", "x = f(3, 0.5, False)", None),
    ("min/max, any/all", "x = min(a)", ["x = max(a)"]),
    ("arguments swapped", "x = f(a, b)", ["x = f(b, a)"]),
    ("arguments swapped", "x = max(a, b)", []),
    ("order", "x = [a, b]", ["x = [b, a]"]),
    ("element dropped", "x = [a, b]", ["x = [a]", "x = [b]"]),
    ("first/last", "x = a[0], b[-1], c[:d]", None),
    ("statement dropped", "a.b = c", ["pass"]),
    ("statement dropped", "a(b)", ["pass"]),
    ("= for +=", "a += b", ["a = b"]),
    ("result", "return a", ["return not (a)"]),
]


@pytest.mark.parametrize(("rule", "line", "after"), RULES)
def test_each_rule_finds_its_places(rule: str, line: str, after: list[str] | None) -> None:
    body = line.replace("\n", "\n    ")
    found = planted(f"def f(a, b, c) -> bool:\n    {body}\n", rule)
    expected = {
        "constant": ["f(2,", "f(4,", "1.0,", "0.25,", "True)"],
        "first/last": ["a[-1],", "b[0],", "c[d:]"],
    }
    if after is None:
        assert len(found) == len(expected[rule])
        assert all(any(part in each for each in found) for part in expected[rule])
    else:
        assert sorted(found) == sorted(after)


def test_settings_are_made_far_from_what_was_meant_and_counts_by_one() -> None:
    assert planted("A = 50\nB = 1\nC = 0.5", "constant") == [
        *("A = 5", "A = 500", "B = 0", "B = 2", "C = 0.05", "C = 5.0")
    ]


def test_fields_and_members_of_one_kind_are_mistaken_for_each_other() -> None:
    code = (
        "class Colour(enum.Enum):\n    RED = 'r'\n    BLUE = 'b'\n"
        "class Point:\n    x: int\n    y: int\n    name: str\n"
        "def f(p: Point, q: Point, s: str):\n    return p.x, Colour.RED, p.name\n"
    )
    assert {m.text for m in mutants(code) if m.rule == "sibling field"} == {"p.y", "Colour.BLUE"}
    assert {m.text for m in mutants(code) if m.rule == "sibling name"} == {"q"}


def test_an_early_return_leaves_out_what_follows() -> None:
    code = "def f(a) -> None:\n    a.x()\n    if a:\n        a.y()\n        return\n"
    (early,) = [m for m in mutants(code) if m.rule == "early return"]
    assert early.planted(code.encode()).decode().splitlines()[2:4] == ["    return", "    if a:"]


UNTOUCHED = [
    '"""Adds 1 and 2."""',
    "X: Literal[1] = y",
    "def f(x: 1 = y): ...",
    "def __repr__(self):\n    return self.a + self.b",
    "def f():\n    assert a > b, c + d",
    "def f():\n    require(a > b, c)",
    "def f():\n    raise ValueError(a + b)",
    "def f():\n    log(f'{a + b}')",
    "class C(Protocol):\n    x: int = 3",
]


@pytest.mark.parametrize("code", UNTOUCHED)
def test_messages_types_and_invariants_are_left_alone(code: str) -> None:
    assert [m for m in mutants(code) if m.rule != "statement dropped"] == []


# ---------------------------------------------------------------- what is drawn


def test_a_sample_is_of_different_lines_and_follows_from_its_seed() -> None:
    every, sources = {FILE: mutants(CODE)}, {FILE: CODE.encode()}
    sample = draw(every, sources, 1, 5)
    assert sample == draw(every, sources, 1, 5)
    assert sample != draw(every, sources, 2, 5)
    assert len({m.line for m in sample}) == 5
    lines = {m.line for m in every[FILE]}
    assert {m.line for m in draw(every, sources, 1, 100)} == lines


def test_a_change_that_gives_no_program_is_passed_over() -> None:
    code = "def f(a):\n    for b in a:\n        continue\n"
    broken = Mutant(
        path=FILE, function="f", line=3, rule="x", before="", after="", start=0, end=3, text="("
    )
    every = {FILE: [broken, *mutants(code)]}
    for seed in range(9):
        assert broken not in draw(every, {FILE: code.encode()}, seed, 9)


# ---------------------------------------------------------------- who notices


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree with one module, one test file and one mutant that is known to have no effect."""
    root = tmp_path_factory.mktemp("tree")
    (same,) = [m for m in mutants(CODE) if m.rule == "boundary" and m.function == "clamp"]
    known = {
        "file": FILE,
        "function": same.function,
        "before": same.before,
        "after": same.after,
        "reason": "at the boundary both are the same",
    }
    listed = "\n".join(f"{key} = {json.dumps(value)}" for key, value in known.items())
    for name, text in {
        FILE: CODE,
        "src/holdfast/__init__.py": "",
        "src/holdfast/engine/core/__init__.py": "",
        "tests/conftest.py": "",
        "tests/engine/core/unit/test_core.py": TEST,
        "pyproject.toml": "[tool.pytest.ini_options]\npythonpath = ['src', 'tests']\n",
        equivalents.FILE: f"[[mutant]]\n{listed}\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.slow
def test_the_survey_can_begin_since_it_imports_nothing_of_the_project() -> None:
    code = "from mutants import survey; survey.checks.preload()"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=TESTS, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.slow
def test_mutants_are_caught_survive_or_are_equivalent(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tree / "results.jsonl"
    sample = ["--root", str(tree), "--seeds", "0:0", "--seed", "3", "--json"]
    options = ["--test-s", "3", "--results", str(results)]
    run = subprocess.run(
        [sys.executable, "-m", "mutants.survey", *sample, *options],
        cwd=TESTS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout, run.stderr
    report = json.loads(run.stdout)
    assert run.returncode == (report["share"] < survey.WANTED)
    survived = {m["function"] for m in report["survived"]}
    caught = {m["function"] for m in report["caught"]}
    assert survived == {"forgotten"}
    assert caught == {"clamp", "countdown"}
    assert {m["outcome"]["by"] for m in report["caught"]} == {"test"}
    assert all(
        m["outcome"]["what"].startswith("tests/engine/core/unit/test_core.py")
        for m in report["caught"]
    )
    assert (tree / FILE).read_text() == CODE
    # Known results are not computed again.
    assert survey.main([*sample, "--resume", str(results)]) == run.returncode
    assert json.loads(capsys.readouterr().out) == report


def test_every_mutant_of_the_tiny_module(tree: Path) -> None:
    """Each is caught, except those of the function without a test and the equivalent one."""
    known = equivalents.read(tree / equivalents.FILE)
    same = [m for m in mutants(CODE) if known.reason(m)]
    assert [(m.function, m.rule) for m in same] == [("clamp", "boundary")]
    moved = "\n\n" + CODE  # another line has no effect
    assert [m.function for m in mutants(moved) if known.reason(m)] == ["clamp"]


def test_the_share_of_caught_mutants_leaves_out_equivalent_ones() -> None:
    one, two, three = mutants(CODE)[:3]
    caught = {"by": "simulator", "what": "seed 3", "why": "x", "same_traces": None}
    missed = {"by": "", "what": "", "why": "", "same_traces": True}
    report = Report.of(7, [(one, caught, None), (two, missed, None), (three, None, "the same")])
    assert report.share == 0.5
    text = report.markdown()
    assert "Seed 7: 1 of 2 caught (50.0%): 1 by simulator. 1 more are equivalent." in text
    assert text.splitlines()[-1].endswith("| all the same |")
    assert two.function in text.splitlines()[-1]


def test_the_test_files_that_are_asked_are_there() -> None:
    assert scope.test_files(TESTS.parent) == list(scope.TEST_FILES)
    assert len(scope.paths(TESTS.parent)) > len(scope.DRIVERS)
    assert all((TESTS.parent / name).exists() for name in scope.DRIVERS)


@pytest.mark.slow
def test_the_code_of_listed_equivalents_is_still_there() -> None:
    """An entry whose code has changed is of no use any more."""
    root = TESTS.parent
    known = equivalents.read(root / equivalents.FILE)
    every = survey.Survey(root, ["*"]).mutants()
    there = {(m.path, m.function, m.before, m.after) for found in every.values() for m in found}
    assert sorted(set(known.known) - there) == []
