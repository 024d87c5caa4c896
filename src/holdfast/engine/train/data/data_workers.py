"""Runs data workers, which live until their training process ends them, whoever else signals them.

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
from collections import deque
from multiprocessing import queues
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from holdfast.engine.core.errors import WorldError
from holdfast.engine.train.data.batch_tasks import Batch, LoadOptions, Task, TaskFeed, Tasks

POLL_S = 0.2  # how soon a thread that waits for a data worker notices its death
_TIMED_OUT = "DataLoader timed out"  # how PyTorch's message begins when only the poll ran out
_PR_SET_PDEATHSIG = 1
_original: list[object] = []
ENDING = {signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}


def protect_data_workers() -> None:
    """Make the data workers of every DataLoader of this process leave ending signals to it."""
    prepare = signal_handling._set_worker_signal_handlers
    if prepare is _prepare_and_leave:
        return
    _original.append(prepare)
    signal_handling._set_worker_signal_handlers = _prepare_and_leave


def leave_to_parent() -> None:
    """Make this data worker end by a signal only if its parent sends it."""
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


def _prepare_and_leave() -> None:
    for prepare in _original:
        assert callable(prepare)
        prepare()
    leave_to_parent()


def _receive(parent: int) -> None:
    while signal.sigwaitinfo(ENDING).si_pid != parent:
        pass
    os._exit(0)  # as PyTorch's own handler does


class DataWorkerLost(WorldError):
    """Is raised when a data worker was killed, or its result cannot be received.

    `by_bus_error`: the kernel had no room for its write to shared memory.
    """

    def __init__(self, text: str, *, by_bus_error: bool = False) -> None:
        super().__init__(text)
        self.by_bus_error = by_bus_error


class Pipeline:
    """Runs PyTorch's data workers around one feed: start, receive in order, stop."""

    def __init__(self, tasks: Tasks, feed: TaskFeed, options: LoadOptions) -> None:
        self._tasks = tasks
        self._feed = feed
        self._options = options
        self._iterator: Any = None

    @property
    def sent(self) -> deque[Task | None]:
        """Return the tasks that data workers were given and have not delivered, in order."""
        return self._feed.sent

    @property
    def has_started(self) -> bool:
        return self._iterator is not None

    @property
    def processes(self) -> tuple[Any, ...]:
        return tuple(self._iterator._workers) if self.has_started else ()

    def start(self) -> None:
        loader: DataLoader[Any] = DataLoader(
            self._tasks,  # type: ignore[arg-type]
            batch_size=None,
            sampler=self._feed,
            num_workers=self._options.num_workers,
            collate_fn=_identity,
            pin_memory=self._options.pin_memory and torch.cuda.is_available(),
            timeout=POLL_S,
            worker_init_fn=enter_data_worker,
            multiprocessing_context=self._options.multiprocessing_context,
            # The loader's seeds have no use here; drawing them from the default generator would
            # disturb it.
            generator=torch.Generator(),
            prefetch_factor=self._options.prefetch_factor,
        )
        try:
            self._iterator = iter(loader)
        except RuntimeError as error:
            # Until it is disarmed below, PyTorch's handler raises here when a data worker dies.
            if "DataLoader worker" not in str(error):
                raise
            raise DataWorkerLost(str(error)) from error
        _disarm(self._iterator)

    def receive(self) -> tuple[Task | None, str, Batch | None]:
        """Wait for the oldest result under way. Raises DataWorkerLost."""
        while True:
            try:
                result = next(self._iterator)
            except Exception as error:
                dead = [p for p in self.processes if not p.is_alive()]
                if not dead and isinstance(error, RuntimeError) and _TIMED_OUT in str(error):
                    continue
                codes = ", ".join(f"process {p.pid} ended with code {p.exitcode}" for p in dead)
                by_bus_error = any(p.exitcode == -signal.SIGBUS for p in dead)
                raise DataWorkerLost(codes or repr(error), by_bus_error=by_bus_error) from error
            self.sent.popleft()
            return result

    def stop(self, *, kill: bool) -> None:
        """End the data workers: after their present task, or at once."""
        processes, iterator = self.processes, self._iterator
        self._iterator = None
        if iterator is None:
            return
        if kill:
            for process in processes:
                process.kill()
        iterator._shutdown_workers()
        for process in processes:
            sweep_shared_memory(process.pid)


def _identity(value: Any) -> Any:
    return value


def _disarm(iterator: Any) -> None:
    """Take our data workers off PyTorch's watch list.

    When one dies, PyTorch's SIGCHLD handler raises in the main thread at any point: inside the
    user's forward pass, or a collective. We look for deaths when we wait for a batch.
    """
    if iterator._worker_pids_set:
        signal_handling._remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False
