"""Defines a worker's monitor: the one lock of its threads, and the one way in which they wait."""

from __future__ import annotations

import threading


class Monitor(threading.Condition):
    """Guards all that the script, the engine and the control thread of one worker share.

    Who changes something that another thread may wait for notifies all. It is owned by the driver;
    others are given it to read and write their part of the shared state.
    """

    def __init__(self) -> None:
        super().__init__(threading.RLock())
