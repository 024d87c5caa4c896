"""Temporary folders: none outlives its process for longer than until the next one is made."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.runtime.temporary import temporary_folder

HOLD = """
import sys
from holdfast.runtime.temporary import temporary_folder
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


def test_a_link_is_not_followed(parent: Path) -> None:
    (parent / "outside").mkdir()
    (parent / "outside" / ".lock").touch()
    os.symlink(parent / "outside", parent / "holdfast-link")
    with temporary_folder():
        assert (parent / "outside" / ".lock").exists()
