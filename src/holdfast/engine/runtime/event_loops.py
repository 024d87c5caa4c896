"""Helps the drivers of machines in event loops: timers for deadlines, and disks that may hang."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

T = TypeVar("T")
PATIENCE_S = 1.0


class DeadlineTimer:
    """Calls `tick` when a machine next wants a Tick, at least `least_s` from now."""

    def __init__(self, tick: Callable[[], object], least_s: float) -> None:
        self._tick = tick
        self._least_s = least_s
        self._handle: asyncio.TimerHandle | None = None
        self._deadline: float | None = None  # the one for which the handle is set

    def set(self, deadline: float | None) -> None:
        """Set the timer for the machine's present deadline; None: it wants no Tick."""
        if deadline == self._deadline:
            return
        self.cancel()
        self._deadline = deadline
        if deadline is not None:
            delay_s = max(deadline - time.monotonic(), self._least_s)
            self._handle = asyncio.get_running_loop().call_later(delay_s, self._fire)

    def cancel(self) -> None:
        """Stop the timer until it is set again."""
        if self._handle is not None:
            self._handle.cancel()
        self._handle, self._deadline = None, None

    def _fire(self) -> None:
        self._handle, self._deadline = None, None
        self._tick()


class DiskLook(Generic[T]):
    """Calls a function that reads from a disk, in a thread that does not hold up the process's end.

    While one call hangs there is no further one, and the answer is `otherwise`.
    """

    def __init__(self, look: Callable[[], T], otherwise: T) -> None:
        self._look = look
        self._otherwise = otherwise
        self._hanging: list[asyncio.Future[T]] = []  # none or one

    async def ask(self) -> T:
        """Return the function's answer, or `otherwise` if it takes too long; raise its error."""
        if any(not future.done() for future in self._hanging):
            return self._otherwise
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        self._hanging = [answer]

        def work() -> None:
            try:
                found = partial(answer.set_result, self._look())
            except Exception as error:  # noqa: BLE001 - the caller gets it
                found = partial(answer.set_exception, error)
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(found)

        threading.Thread(target=work, daemon=True, name="disk look").start()
        done, _ = await asyncio.wait([answer], timeout=PATIENCE_S)
        return answer.result() if done else self._otherwise
