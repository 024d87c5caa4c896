"""Writes the stacks of this process's threads, for people who wonder why it hangs.

A thread of Python does it, which has the interpreter's lock: faulthandler reads the frames of
threads while they run, and sending a thousand signals to a busy process ended it by SIGSEGV.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
import traceback
from types import FrameType

from holdfast.engine.state.store.regular_files import append_regular

VARIABLE = "HOLDFAST_STACKS"  # names the file; without it no stacks are written
PATIENCE_S = 0.2  # for the disk, before further stacks are left out
BYTES_MAX = 1 << 20  # a file that is longer begins from the start

_writing: list[threading.Thread] = []  # none or one


def write_stacks(reason: str, shard: int = 0) -> None:
    """Append the stacks of all threads but this one to the file, below a line with the reason.

    All processes of a worker on one node write to the same file; `shard`: the shard of this one.
    """
    path = os.environ.get(VARIABLE, "")
    if not path:
        return
    text = "".join(describe_stacks(f"{reason} (process {shard})" if shard else reason))
    # The caller receives the agent's messages: a disk that hangs must not keep it from that.
    if wait_for_stacks(PATIENCE_S):
        writing = threading.Thread(target=_append, args=(path, text), daemon=True, name="stacks")
        _writing[:] = [writing]
        writing.start()


def wait_for_stacks(limit_s: float) -> bool:
    """Wait until the last stacks are written; return whether they are."""
    for each in _writing:
        each.join(limit_s)
    return not any(each.is_alive() for each in _writing)


def _append(path: str, text: str) -> None:
    with contextlib.suppress(OSError):  # a full disk must not stop training
        file = os.fdopen(append_regular(path), "ab", buffering=0)
        with file:
            if os.fstat(file.fileno()).st_size > BYTES_MAX:
                os.ftruncate(file.fileno(), 0)
            file.write(text.encode(errors="replace"))


def describe_stacks(reason: str) -> list[str]:
    """Return lines on each thread, innermost call first. No source file is read for them."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = [f"{time.strftime('%Y-%m-%d %H:%M:%S')}: {reason}\n"]
    for number, frame in _find_frames().items():
        if number == threading.get_ident():
            continue
        found.append(f"\nThread {names.get(number, number)}:\n")
        for each, line in traceback.walk_stack(frame):
            code = each.f_code
            found.append(f'  File "{code.co_filename}", line {line}, in {code.co_name}\n')
    return [*found, "\n"]


def _find_frames() -> dict[int, FrameType]:
    """Return the innermost frame of each thread, without a garbage collection in between.

    Before Python 3.11.9 one could stop this process for ever: both may take the same lock of the
    interpreter (https://github.com/python/cpython/issues/106883).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collects:
            gc.enable()
