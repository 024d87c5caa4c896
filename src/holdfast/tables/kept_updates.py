"""Keeps the last updates of a worker, so that servers which have missed some can be given them."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from holdfast.tables.key_batch import SentUpdate


class KeptUpdates:
    """Keeps a worker's last updates, `most` of them. Safe to use from several threads."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._updates: dict[int, SentUpdate] = {}
        self._lock = threading.Lock()

    def keep(self, number: int, update: SentUpdate) -> None:
        """Keep one more update, and drop the oldest if they are too many."""
        with self._lock:
            if number - 1 not in self._updates:
                self._updates.clear()  # the state was received in between
            self._updates[number] = update
            self._updates.pop(number - self._most, None)

    def replace(self, updates: Mapping[int, SentUpdate]) -> None:
        """Keep only these, by their numbers."""
        with self._lock:
            self._updates = dict(updates)

    def find(self, number: int) -> SentUpdate | None:
        """Return an update, if it is kept."""
        with self._lock:
            return self._updates.get(number)

    def find_start(self, version: int) -> int:
        """Return the number after which all updates up to `version` are kept."""
        with self._lock:
            while version in self._updates:
                version -= 1
            return version

    def list_since(self, number: int) -> list[tuple[int, SentUpdate]]:
        """Return all updates after this one."""
        with self._lock:
            return sorted((n, each) for n, each in self._updates.items() if n > number)
