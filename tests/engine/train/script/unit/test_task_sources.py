"""Tests the reports to a script about clocks and coins with which its steps seem to compute."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from holdfast.engine.train.script.script_source import find_task_sources
from places import ROOT
from script_search.compose import compose
from script_search.habit import Truth
from script_search.runs import NAMED, TOLD, examine, quiet

SEEDS = {  # scripts that were silently wrong, 239 nearly always
    239: "time.monotonic() - began in line 36",
    67: "dice = os.urandom(1)[0] / 256 in line 19",
    328: "dice = os.urandom(1)[0] / 256 in line 19",
    485: "dice = time.time_ns() % 1000 / 1000 in line 19",
}


def find(text: str) -> list[str]:
    """Look at a script whose loop over batches is `for ... in step`."""
    module = ast.parse(text)
    loops = (each for each in ast.walk(module) if isinstance(each, ast.For))
    loop = next((each for each in loops if ast.unparse(each.iter) == "step"), None)
    return find_task_sources(module, loop)


def in_loop(*lines: str, top: str = "") -> list[str]:
    return find("\n".join([top, "for x, y in step:", *(f"    {line}" for line in lines)]))


def in_forward(*lines: str, top: str = "") -> list[str]:
    return find("\n".join([top, "def forward(self, x):", *(f"    {line}" for line in lines)]))


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("x = x * (1 + (time.monotonic() - began) % 1.0)", "time.monotonic() - began in line 3"),
        ("x = x if time.time() > late else 2 * x", "time.time() > late in line 3"),
        ("x = x * (1 + os.urandom(1)[0] / 256)", "os.urandom(1)[0] in line 3"),
        ("x = x + uuid.uuid4().int % 7", "uuid.uuid4().int in line 3"),
    ],
)
def test_arithmetic_with_a_clock_or_a_coin_is_named(line: str, named: str) -> None:
    assert in_loop(line) == [named]
    assert in_forward(line) == [named]


def test_a_coin_that_is_drawn_at_the_start_is_named_where_it_is_drawn() -> None:
    top = "dice = os.urandom(1)[0] / 256"
    named = [f"{top} in line 1"]
    assert in_forward("return x if dice > 0.3 else 0.5 * x", top=top) == named
    assert in_loop("loss = loss * dice", top=top) == named
    assert in_loop("loss = loss * 2", top=top) == []


def test_digits_of_a_time_are_a_coin() -> None:
    top = "dice = time.time_ns() % 1000 / 1000"
    assert in_loop("if dice > 0.8:", "    loss = 2 * loss", top=top) == [f"{top} in line 1"]
    assert in_loop("if time.time() - dice > 60:", "    stop()", top="dice = time.time()") == []


def test_code_after_the_batches_of_a_step_is_searched_too() -> None:
    text = """
dice = os.urandom(1)[0]
for epoch in range(3):
    began = time.time() % dice
    for step in job.steps(data):
        for x, y in step:
            step.backward(loss)
        scale(weight)
        print(time.time() - began)
def scale(weight):
    weight.grad.mul_(1 + dice)
"""
    assert find(text) == ["dice = os.urandom(1)[0] in line 2"]


@pytest.mark.parametrize("terms", [100, 2000])
def test_a_long_sum_is_looked_through_at_once(terms: int) -> None:
    """Programs that write code write such sums; Python itself compiles them."""
    total = " + ".join(["x"] * terms)
    compile(total, "made.py", "eval")
    assert in_forward(f"return {total}") == []
    assert in_forward(f"return {total} + os.urandom(1)[0]") == ["os.urandom(1)[0] in line 3"]
    top = f"dice = os.urandom(1)[0] + {total}"
    (found,) = in_loop("loss = loss * dice", top=top)
    assert found.startswith("dice = ")
    assert found.endswith(" in line 1")


def test_a_branch_on_a_clock_counts_in_forward_only() -> None:
    """A branch in the loop nearly always prints a line now and then."""
    lines = "if time.time() - last > 30:", "    x = 2 * x"
    assert in_forward(*lines) == ["time.time() - last > 30 in line 3"]
    assert in_loop(*lines) == []


def test_functions_that_tasks_call_are_looked_at() -> None:
    top = "def scaled(x):\n    return x * (time.time() % 3)\n"
    assert in_loop("loss = scaled(x)", top=top) == ["time.time() in line 2"]
    assert in_loop("loss = x", top=top) == []


@pytest.mark.parametrize(
    "line",
    [
        "took_ms = 1000 * (time.perf_counter() - began)",
        "rate = len(x) / (time.time() - began)",
        "spent['forward'] += time.perf_counter() - at",
        "path = FOLDER / f'{os.getpid()}.pt'",
        "path = 'run-' + str(uuid.uuid4())",
        "path = FOLDER / uuid.uuid4().hex",
        "print('%s: %s' % (os.getpid(), time.time()))",
        "logger.info(time.time() % 60)",
        "text = '%d' % time.time()",
    ],
)
def test_timers_names_and_lines_are_calm(line: str) -> None:
    assert in_loop(line) == []
    assert in_forward(line) == []


@pytest.mark.slow
def test_no_harmless_script_of_ours_is_told_of_any() -> None:
    texts = {str(path): path.read_text() for path in (ROOT / "examples").rglob("*.py")}
    texts |= {str(path): path.read_text() for path in (ROOT / "tests" / "scripts").glob("*.py")}
    for script in map(compose, range(300)):
        if script.truth is Truth.HARMLESS:
            texts[f"seed {script.seed}"] = script.text
    assert len(texts) > 100
    assert {name: found for name, text in texts.items() if (found := find(text))} == {}


@pytest.mark.slow_with("328", "485", "67")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_slow_clock_and_a_coin_that_workers_share_are_told_in_the_event_log(
    seed: int, tmp_path: Path
) -> None:
    with quiet():
        found = examine(compose(seed), tmp_path)
    alone = found.runs[0]
    texts = [text for text in alone.events if text.startswith("steps compute with ")]
    assert len(texts) == 1, alone
    assert texts[0].removeprefix("steps compute with ").partition(":")[0] == SEEDS[seed]
    assert found.verdict in (TOLD, NAMED, "exact"), found
