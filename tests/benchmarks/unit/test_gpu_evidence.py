"""The script that learns everything from a machine with one GPU works where there is none."""

from __future__ import annotations

import importlib
import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from places import ROOT

FOLDER = ROOT / "benchmarks"
LONG = (
    "machine",
    "tests",
    "bits",
    "bits_compiled_bf16",
    "cost",
    "snapshot",
    "recovery",
    "sharded",
    "audits",
)


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module("gpu_evidence")


@pytest.fixture(scope="module")
def parts(script: Any) -> Any:
    return importlib.import_module("gpu_parts")


def lacking(monkeypatch: pytest.MonkeyPatch, script: Any, *modules: str) -> None:
    """Let these modules be missing."""
    there = script._is_there
    monkeypatch.setattr(script, "_is_there", lambda m: m not in modules and there(m))


def test_missing_packages_are_named_with_the_command_that_fetches_them(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking(monkeypatch, script, "markdown_it", "pyeclib", "pytest")
    told, runs = script.needs()
    assert not runs
    assert "missing, so that nothing runs: markdown-it-py (for rich)" in told
    assert "pyeclib (for coding, and the tests of it), pytest (for tests)" in told
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert f"pip download --no-deps --only-binary=:all: --python-version {version} " in told
    assert told.splitlines()[-2].endswith("-d wheels markdown-it-py pyeclib pytest")


def test_nothing_but_tests_and_coding_is_missed_without_the_rest(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking(monkeypatch, script, "pytest")
    assert script.needs()[1]
    lacking(monkeypatch, script, "torch")
    told, runs = script.needs()
    assert not runs
    assert "torch is missing" in told


def test_wheels_are_unpacked_without_pip_and_only_what_is_missing(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking(monkeypatch, script, "markdown_it", "msgspec", "pynvml")
    for name in ("markdown_it_py-4.0-py3-none-any", "msgspec-1-cp312-cp312-x", "rich-1-py3-x"):
        with zipfile.ZipFile(tmp_path / f"{name}.whl", "w") as wheel:
            wheel.writestr(f"{name.split('-')[0]}/__init__.py", "")
    assert script.install(tmp_path, tmp_path / "site") == ["nvidia-ml-py"]
    assert sorted(each.name for each in (tmp_path / "site").iterdir()) == [
        "markdown_it_py",
        "msgspec",
    ]
    monkeypatch.setenv("PYTHONPATH", "mine")
    assert script.paths(tmp_path)["PYTHONPATH"].split(":")[0] == str(tmp_path / "site")
    assert script.paths(tmp_path)["PYTHONPATH"].endswith(":mine")


def test_mistakes_are_told_in_one_sentence(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main(["--wheels", str(tmp_path / "none"), "--needs"]) == 2
    assert "no such folder" in capsys.readouterr().err
    assert script.main([]) == 2
    assert "nothing to do" in capsys.readouterr().err
    assert script.main(["--list"]) == 0
    assert capsys.readouterr().out.count("\n") == len(script.PARTS)


def test_every_part_that_is_listed_can_be_run(script: Any, parts: Any) -> None:
    assert list(parts.RUNS) == list(script.PARTS)


def test_a_part_that_is_cut_off_keeps_what_it_had(
    script: Any, parts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evidence = parts.Evidence("bits", "cpu", tmp_path, 100.0)
    evidence.attempt("1 worker", lambda: {"ok": True, "ms of a step": 12.345678})
    evidence.attempt("2 workers", lambda: {"ok": 1 / 0})
    kept = json.loads((tmp_path / "bits.json").read_text())
    assert kept["rows"]["1 worker"]["ok"]
    assert "ZeroDivisionError" in kept["rows"]["2 workers"]["error"]
    assert evidence.failed
    late = parts.Evidence("cost", "cpu", tmp_path, 0.0)
    late.attempt("too late", lambda: {"ok": True})
    assert script.main(["--out", str(tmp_path), "--sheet", "--to", str(tmp_path / "GPU.md")]) == 0
    sheet = (tmp_path / "GPU.md").read_text()
    assert "| 1 worker | yes | 12.35 |  |" in sheet
    assert "| 2 workers | **no** |  | ZeroDivisionError: division by zero |" in sheet
    assert "It was cut off." in sheet
    assert "| too late | **no** | no time was left |" in sheet
    assert "Not run (`--part audits`)." in sheet


def test_the_stall_of_a_save_is_what_its_steps_take_longer(parts: Any) -> None:
    took = {step: 0.5 if step in (20, 31) else 0.1 for step in range(1, 45)}
    took[10] = 9.0  # the first one is left out
    assert parts.stalls_s(took, [10, 20, 30], 10) == pytest.approx([0.4, 0.4])
    assert parts.stalls_s(took, [10, 31], 10) == pytest.approx([0.4])  # the writer was busy at 20
    assert parts.stalls_s({}, [], 10) == []


def test_without_the_undisturbed_digest_nothing_is_equal_to_it(parts: Any) -> None:
    assert parts._is_as("abcd", None)
    assert parts._is_as("abcd", "ab")
    assert not parts._is_as("abcd", "b")
    assert not parts._is_as("abcd", "")


def test_steps_of_workers_that_came_later_are_counted(parts: Any) -> None:
    ends = [(step, worker, 0.0) for step in range(6) for worker in (0, 1)]
    assert parts.count_joined(ends) == 0
    assert parts.count_joined([e for e in ends if e[:2] != (2, 1)]) == 3  # worker 1 came back
    assert parts.count_joined([e for e in ends if e[1] == 0 or e[0] < 2]) == 0  # it did not
    assert parts.count_joined([*ends, (4, 2, 0.0), (5, 2, 0.0)]) == 2


def test_a_step_ends_when_its_last_worker_says_so(parts: Any) -> None:
    ends = [(0, 0, 1.0), (0, 1, 1.5), (1, 1, 2.0), (1, 0, 2.5), (3, 0, 9.0)]
    assert parts.durations(ends) == {1: 1.0}


@pytest.mark.parametrize(
    "part", ["coding", *(pytest.param(part, marks=pytest.mark.slow) for part in LONG)]
)
@pytest.mark.timeout(300)
def test_a_part_runs_without_a_gpu(part: str, parts: Any, tmp_path: Path) -> None:
    if part == "coding":
        pytest.importorskip("pyeclib")
    assert parts.run(part, "cpu", tmp_path, 280.0) == 0
    told = json.loads((tmp_path / f"{part}.json").read_text())
    assert told["ended"]
    assert told["rows"]
    assert all("error" not in row for row in told["rows"].values())
