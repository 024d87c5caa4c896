"""Skipped tests are reported in one line, and can be made to fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import ClassVar, cast

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


def test_a_stale_name_in_the_list_of_slow_tests_is_an_error(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Item:
        nodeid = "tests/test_skips.py::test_that_is_parametrized[now]"
        marks: ClassVar[list[object]] = []

        def add_marker(self, mark: object) -> None:
            self.marks.append(mark)

    def read(path: Path) -> str:
        assert path.name == "slow_tests.txt"
        return "# a comment\ntest_skips.py::test_that_is_parametrized[now]\n" + more

    more = ""
    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr(pytestconfig, "args", ["tests"])
    pytest_collection_modifyitems(pytestconfig, cast(list[pytest.Item], [Item()]))
    assert Item.marks == [pytest.mark.slow]
    more = "test_skips.py::test_that_is_parametrized[before]\ntest_elsewhere.py::test_other\n"
    with pytest.raises(pytest.UsageError, match=r"\['test_skips.py::.*before\]'\]$"):
        pytest_collection_modifyitems(pytestconfig, cast(list[pytest.Item], [Item()]))
