"""Collects the buckets that this worker has filled completely, so that they can be exchanged."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from holdfast.engine.train.step.buckets import Bucket
from holdfast.engine.train.step.monitor import Monitor


class FilledBuckets:
    """Hands buckets from the script, which fills them, to the engine, which sums them.

    Buckets are handed out in one order, the same on all members. Each member waits for one sum
    before it begins the next ones, so two members with other orders would wait for each other.
    """

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        # Virtual ranks whose tasks must be in a bucket.
        self._hosted: set[int] = set()
        self._left: deque[Bucket] = deque()

    def begin(self, hosted: Iterable[int], buckets: Iterable[Bucket]) -> None:
        """Begin the sums: a bucket can be exchanged once all of these virtual ranks are in it.

        A worker that adds nothing to the sums hosts none, so that all buckets are ready at once.
        """
        with self._monitor:
            self._hosted, self._left = set(hosted), deque(buckets)

    def end(self) -> None:
        """Stop handing out buckets: the sums have ended."""
        with self._monitor:
            self._left.clear()

    def note(self, bucket: Bucket) -> None:
        """Record that a task has contributed to a bucket; called with the monitor held."""
        is_next = bool(self._left) and bucket is self._left[0] and self._is_filled(bucket)
        if is_next or not self._left:  # the engine may not have begun the sums yet
            self._monitor.notify_all()

    def take(self, wait: bool, check: Callable[[], None]) -> Bucket | None:
        """Return the next bucket, or None if it is not filled yet; `wait`: wait until it is.

        `check` raises when no more buckets will be filled.
        """
        with self._monitor:
            while self._left and not self._is_filled(self._left[0]):
                if not wait:
                    return None
                check()
                self._monitor.wait()
            return self._left.popleft() if self._left else None

    def _is_filled(self, bucket: Bucket) -> bool:
        return self._hosted <= bucket.contributed
