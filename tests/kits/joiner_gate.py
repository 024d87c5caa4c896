"""Has the members of a job in threads wait for workers that come back, so that they join in time.

A worker that died is started again at once, but on a busy machine the other workers may be at the
job's end before it is ready. With this gate they do not open a step while they must wait for the
worker that comes back, or for the coordinator: until the worker is ready, until the change of the
view in which it joins is announced, or until it has applied the steps that it was fed.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from holdfast.engine.train.step.probe import Probe

if TYPE_CHECKING:
    from thread_cluster import ThreadCluster, ThreadWorker

FEED_STEPS = 10  # steps in which the members agree on a copy of the state, make it and send it


class JoinerGate(Probe):
    """Stops each member before a step until a worker that comes back can use that step."""

    def __init__(self, cluster: ThreadCluster) -> None:
        self._cluster = cluster
        self._ordered_at: dict[int, int] = {}  # number of an order to feed: a member's step then

    def boundary(self, step: int, protected: Mapping[str, Any]) -> None:
        """Wait before this step, but no longer than a job may take."""
        this = threading.current_thread()
        running = [w for w in list(self._cluster.workers.values()) if w.thread is this]
        for me in filter(self._is_member, running):
            self._cluster.await_round(partial(self._may_open, me, step))

    def _is_member(self, worker: ThreadWorker) -> bool:
        view = self._cluster.view
        return view is not None and view.includes(worker.worker, worker.incarnation)

    def _may_open(self, me: ThreadWorker, step: int) -> bool:
        # A worker that has come back may be left out again, if a busy machine held it up.
        newest = list(self._cluster.workers.values())
        returned = {w.worker for w in newest if w.incarnation > 1 and self._is_member(w)}
        missing = self._cluster.ended - returned
        away = [worker for worker in missing if self._cluster.comes_back(worker)]
        needed = any(self._can_use(self._cluster.workers[w], step) for w in away)
        return not me.alive or not away or needed or me.expects_change

    def _can_use(self, worker: ThreadWorker, step: int) -> bool:
        """Return whether the worker that comes back needs the members to continue."""
        order, status = self._cluster.feed, worker.driver.status()
        if order is None or not order.names(worker.worker, worker.incarnation):
            return False
        if status.abreast == order.number:
            return False
        if status.has_state:
            return status.committed >= step - 1
        return step < self._ordered_at.setdefault(order.number, step) + FEED_STEPS
