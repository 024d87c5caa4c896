"""Defines a worker's monitor: the one lock of its threads, and the one way in which they wait."""

from __future__ import annotations

import threading


class Monitor(threading.Condition):
    """Guards the data shared by the script, the engine and the control thread of one worker.

    A thread that changes something for which another may wait notifies all. The driver owns the
    monitor; others get it to read and write their part of the shared state.
    """

    def __init__(self) -> None:
        super().__init__(threading.RLock())
