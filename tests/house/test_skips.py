"""Skipped tests are reported in one line, and can be made to fail."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from conftest import describe_skips, pytest_collection_modifyitems

ETCD = "`etcd` is not installed (package etcd-server)"
SKIPPING = f"""
import pytest
def test_one(): pytest.skip({ETCD!r})
def test_two(): pytest.skip("needs a GPU")
def test_three(): pass
"""


def test_skips_are_told_in_one_line() -> None:
    told = describe_skips([f"Skipped: {ETCD}", "needs a GPU", f"Skipped: {ETCD}"])
    advice = "to run more of them: apt-get install etcd-server"
    assert told == f"3 skipped (2: {ETCD}; 1: needs a GPU); {advice}"
    assert describe_skips(["needs a GPU"]) == "1 skipped (1: needs a GPU)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "options", "code"),
    [
        (SKIPPING, (), 0),
        (SKIPPING, ("--fail-on-missing-packages",), 1),
        (SKIPPING, ("--fail-on-missing-packages", "-n", "2"), 1),
        (SKIPPING, ("--fail-on-missing-packages", "-k", "two or three"), 0),
    ],
)
def test_a_missing_package_fails_on_request(
    tmp_path: Path, text: str, options: tuple[str, ...], code: int
) -> None:
    (tmp_path / "test_skipping.py").write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = (sys.executable, "-m", "pytest", "-q", "-p", "conftest", *options, str(tmp_path))
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={"PYTHONPATH": ":".join(filter(None, sys.path)), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "skipped (" in done.stdout


def test_parameters_of_no_test_among_the_slow_ones_are_an_error(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Item:
        nodeid = "tests/house/test_skips.py::test_that_is_parametrized[now]"

        def __init__(self, *ids: str) -> None:
            self.ids = ids
            self.marks: list[object] = []

        def iter_markers(self, name: str) -> Iterator[pytest.Mark]:
            assert name == "slow_with"
            yield pytest.mark.slow_with(*self.ids).mark

        def add_marker(self, mark: object) -> None:
            self.marks.append(mark)

    def collect(item: Item) -> list[object]:
        pytest_collection_modifyitems(pytestconfig, cast(list[pytest.Item], [item]))
        return item.marks

    monkeypatch.setattr(pytestconfig, "args", ["tests"])
    assert collect(Item("now")) == [pytest.mark.slow]
    with pytest.raises(pytest.UsageError, match=r"that no test has: .*parametrized\[later\]"):
        collect(Item("now", "later"))
    monkeypatch.setattr(pytestconfig, "args", ["tests/house/test_skips.py::one"])
    assert collect(Item("later")) == []
