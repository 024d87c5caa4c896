"""Lets data workers live until their training process ends them, whoever else signals them.

A scheduler that ends a job sends SIGTERM to all of its processes. Without its data workers a
training process could not finish the step that it has begun, and there would be no last checkpoint.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from multiprocessing import queues
from typing import Any

from torch.utils.data._utils import signal_handling

_PR_SET_PDEATHSIG = 1
ENDING = {signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}


def protect_data_workers() -> None:
    """Have the data workers of every DataLoader of this process leave ending signals to it."""
    prepare = signal_handling._set_worker_signal_handlers
    if prepare is _prepare_and_leave:
        return
    _original.append(prepare)
    signal_handling._set_worker_signal_handlers = _prepare_and_leave


def leave_to_parent() -> None:
    """Let only the parent end this process by an ending signal. Call it in a data worker."""
    if signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ENDING):
        return  # another call has begun already
    arguments = (os.getppid(),)
    threading.Thread(target=_receive, args=arguments, daemon=True, name="signals").start()


def enter_data_worker(_index: int) -> None:
    """Run first in a data worker: make it end with the training process, and only with it.

    A data worker that outlived the training process would do harm: a forked process has copies of
    its sockets, and peers learn of its death by their closing.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    leave_to_parent()
    queues.Queue._on_queue_feeder_error = _send_failure  # type: ignore[attr-defined]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():  # it died before the line above
        os._exit(1)


def _send_failure(queue: Any, error: BaseException, result: Any) -> None:
    """Send the training process the reason in place of a batch that cannot be handed over.

    Python only prints the reason, and the training process would wait for the batch for ever.
    """
    number, (task, _, _) = result
    told = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    queue.put((number, (task, told, None)))


def sweep_shared_memory(pid: int) -> None:
    """Remove the tensor that a killed process may have left between creating and unlinking it."""
    for path in glob.glob(f"/dev/shm/torch_{pid}_*"):
        with contextlib.suppress(OSError):
            os.unlink(path)


_original: list[object] = []


def _prepare_and_leave() -> None:
    for prepare in _original:
        assert callable(prepare)
        prepare()
    leave_to_parent()


def _receive(parent: int) -> None:
    while signal.sigwaitinfo(ENDING).si_pid != parent:
        pass
    os._exit(0)  # as PyTorch's own handler does
