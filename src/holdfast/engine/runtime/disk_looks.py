"""Reads from disks that may hang, for event loops that must not."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

T = TypeVar("T")
PATIENCE_S = 1.0


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
