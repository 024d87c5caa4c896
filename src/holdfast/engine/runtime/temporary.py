"""Makes temporary folders that do not outlive their process by long, even if it is killed.

A process that is asked to end (SIGTERM, SIGHUP) removes its folder first. Each folder holds a lock
for as long as its process lives. The next process that makes a folder removes all folders with free
locks.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from holdfast.engine.core.errors import UserError

PREFIX = "holdfast-"
LOCK = ".lock"
ENDING = (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def temporary_folder(purpose: str = "") -> Iterator[Path]:
    """Make a folder for this process, and remove it at the end. OSError; UserError."""
    _sweep(_find_parent())
    folder, lock = _make(purpose)
    try:
        with _ending_in_order():
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _find_parent() -> Path:
    """Return the folder that temporary ones are made in. UserError."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:
        raise UserError(
            "there is nowhere to write temporary files: make /tmp writable (in a container whose "
            "root file system is read-only, mount a volume there), or name a folder in TMPDIR"
        ) from None


@contextlib.contextmanager
def _ending_in_order() -> Iterator[None]:
    """Turn the signals that would end this process at once into SystemExit, in the main thread."""
    is_main = threading.current_thread() is threading.main_thread()
    taken = [n for n in ENDING if is_main and signal.getsignal(n) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, _end)
    try:
        yield
    finally:
        for number in taken:
            if signal.getsignal(number) is _end:  # else a later handler took its place
                signal.signal(number, signal.SIG_DFL)


def _end(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)


def _make(purpose: str) -> tuple[Path, int]:
    """Make a folder; return it, and the descriptor that holds its lock."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{purpose}"))
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / LOCK).exists():  # else another process took it before it was locked
            return folder, lock
        os.close(lock)


def _sweep(parent: Path) -> None:
    """Remove the folders of this user whose processes have ended."""
    with contextlib.suppress(OSError):
        for each in os.scandir(parent):
            if each.name.startswith(PREFIX) and each.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    _remove_if_free(Path(each.path))


def _remove_if_free(folder: Path) -> None:
    """Remove a folder unless a process holds its lock. OSError: it has none, or is not ours."""
    if folder.stat().st_uid != os.geteuid():
        return
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)
