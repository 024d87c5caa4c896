"""Temporary folders: none outlives its process for longer than until the next one is made."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.engine.core.errors import UserError
from holdfast.engine.runtime.temporary import temporary_folder

HOLD = """
import sys
from holdfast.engine.runtime.temporary import temporary_folder
with temporary_folder("check-") as folder:
    (folder / "large").write_bytes(b"x")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_the_folder_of_a_killed_process_is_removed_when_the_next_one_is_made(parent: Path) -> None:
    other = parent / "holdfast-of-somebody"  # without a lock: perhaps it was not made here
    other.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        held = Path(holder.stdout.readline().strip())
        with temporary_folder() as own:
            assert held.parent == own.parent == parent
            assert (held / "large").exists()  # its process lives
        assert not own.exists()
        holder.kill()
    assert held.exists()
    with temporary_folder() as own:
        assert not held.exists()
        assert own.exists()
    assert list(parent.iterdir()) == [other]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_process_that_is_asked_to_end_removes_its_folder(parent: Path, number: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        held = Path(holder.stdout.readline().strip())
        assert held.exists()
        holder.send_signal(number)
        assert holder.wait(60) == 128 + number
    assert list(parent.iterdir()) == []


def make_one() -> bool:
    with temporary_folder() as folder:
        return folder.exists()


def test_handlers_of_signals_stay_as_they_were(parent: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    mine = signal.getsignal(signal.SIGTERM)
    try:
        with temporary_folder():
            assert signal.getsignal(signal.SIGTERM) is mine
        assert signal.getsignal(signal.SIGTERM) is mine
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with temporary_folder(), temporary_folder():
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        with ThreadPoolExecutor(1) as pool, temporary_folder():
            assert pool.submit(make_one).result()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_link_is_not_followed(parent: Path) -> None:
    (parent / "outside").mkdir()
    (parent / "outside" / ".lock").touch()
    os.symlink(parent / "outside", parent / "holdfast-link")
    with temporary_folder():
        assert (parent / "outside" / ".lock").exists()


def test_without_a_folder_to_write_to_the_error_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A container whose root file system is read-only has no such folder."""
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: ["/proc", "/sys"])
    expected = pytest.raises(UserError, match=r"make /tmp writable .* or name a folder in TMPDIR")
    with expected, temporary_folder():
        pytest.fail("there is no such folder")
