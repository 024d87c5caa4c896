"""Stacks of a busy process are written, and do it no harm."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from holdfast.engine.train.step import agent_link
from holdfast.engine.train.step.agent_link import VARIABLE, wait_for_stacks, write_stacks

WAIT_S = 30.0

SLOW = (pytest.mark.slow, pytest.mark.timeout(400))


def call_deep(depth: int) -> int:
    return 0 if depth == 0 else 1 + call_deep(depth - 1)


@pytest.mark.parametrize(
    "looks", [pytest.param(100, marks=pytest.mark.slow), pytest.param(1000, marks=SLOW)]
)
def test_stacks_of_busy_threads_are_written_again_and_again(
    looks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, over = tmp_path / "stacks.txt", threading.Event()
    monkeypatch.setenv(VARIABLE, str(path))

    def keep_busy() -> None:
        while not over.is_set():
            call_deep(30)

    threads = [threading.Thread(target=keep_busy, name=f"busy-{n}") for n in range(3)]
    for thread in threads:
        thread.start()
    try:
        for number in range(looks):  # a signal to faulthandler ended such a process earlier
            write_stacks(f"look {number}")
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert wait_for_stacks(WAIT_S)
    text = path.read_text()
    assert f": look {looks - 1}\n" in text
    assert "\nThread busy-2:\n" in text
    assert ", in keep_busy\n" in text
    assert "write_stacks" not in text  # the thread that looks is no news


def test_a_long_file_begins_from_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "stacks.txt"
    monkeypatch.setenv(VARIABLE, str(path))
    monkeypatch.setattr(agent_link, "BYTES_MAX", 10)
    for number in range(3):
        write_stacks(f"look {number}")
    assert wait_for_stacks(WAIT_S)
    assert path.read_text().count(": look ") == 1


def test_a_place_that_cannot_be_written_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "missing" / "stacks.txt"))
    write_stacks("nobody sees this")
    assert wait_for_stacks(WAIT_S)
    monkeypatch.delenv(VARIABLE)
    write_stacks("nobody sees this")
    assert list(tmp_path.iterdir()) == []


GARBAGE = """
import gc, os, threading
from holdfast.engine.train.step.agent_link import describe_stacks

class Garbage:
    def __init__(self):
        self.me, self.own = self, threading.local()
        self.own.value = 1
    def __del__(self):
        Garbage()  # so that each collection has some to collect

gc.set_threshold(1)
Garbage()
for _ in range(100):
    describe_stacks("nothing")
print("done", gc.isenabled())
gc.disable()
describe_stacks("nothing")
print(gc.isenabled(), flush=True)
os._exit(0)
"""


def test_a_garbage_collection_does_not_stop_the_process() -> None:
    command = [sys.executable, "-c", GARBAGE]
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert found.stdout.split() == ["done", "True", "False"], found.stderr
