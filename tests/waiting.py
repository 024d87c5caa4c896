"""Waiting for a condition in another process, which gives no event to wait for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

POLL_S = 0.01
WAIT_S = 60.0  # bounds a hang
T = TypeVar("T")


def until(ready: Callable[[], T], what: str) -> T:
    """Look until `ready()` is truthy, and return that."""
    deadline = time.monotonic() + WAIT_S
    pause = threading.Event()
    while not (found := ready()):
        assert time.monotonic() < deadline, f"not in {WAIT_S} s: {what}"
        pause.wait(POLL_S)
    return found
