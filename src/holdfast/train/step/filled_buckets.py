"""Collects the buckets that this worker has filled completely, so that they can be exchanged."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from holdfast.train.step.buckets import Bucket
from holdfast.train.step.monitor import Monitor


class FilledBuckets:
    """Hands buckets from the script, which fills them, to the engine, which sums them."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        # virtual ranks whose tasks are awaited; None: no sums are under way
        self._hosted: set[int] | None = None
        self._ready: deque[Bucket] = deque()

    def begin(self, hosted: Iterable[int], buckets: Iterable[Bucket]) -> None:
        """Begin the sums: a bucket can be exchanged once all of these virtual ranks are in it."""
        with self._monitor:
            self._hosted = wanted = set(hosted)
            self._ready = deque(b for b in buckets if wanted <= b.contributed)

    def begin_without(self, buckets: Iterable[Bucket]) -> None:
        """Begin sums to which this worker adds nothing: these buckets are ready at once."""
        with self._monitor:
            self._hosted, self._ready = None, deque(buckets)

    def end(self) -> None:
        """Stop handing out buckets: the sums have ended."""
        with self._monitor:
            self._hosted = None
            self._ready.clear()

    def note(self, bucket: Bucket) -> None:
        """Record that a task has contributed to a bucket; called with the monitor held."""
        if self._hosted is not None and self._hosted <= bucket.contributed:
            self._ready.append(bucket)
        self._monitor.notify_all()  # the sums may not have begun, since no bucket was ready

    def take(self, only: int | None, wait: bool, check: Callable[[], None]) -> list[Bucket]:
        """Return buckets to begin with now. With `only`, none but that one, and one at a time.

        `check` raises when no more buckets will be ready.
        """
        with self._monitor:
            while True:
                taken = [b for b in self._ready if only is None or (wait and b.index == only)]
                if taken or not wait:
                    break
                check()
                self._monitor.wait()
            for bucket in taken:
                self._ready.remove(bucket)
            return taken
