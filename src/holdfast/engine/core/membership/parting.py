"""Finds members whose scripts part ways, or who all wait for each other. Pure.

All members take the same steps in the same loops. A member that has left a loop will never take
part in a further step of it, so another member that has begun such a step would wait for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.engine.core.job_record import LeaderEnd
from holdfast.engine.core.membership.facts import Facts
from holdfast.engine.core.worker_status import WorkerStatus


def find_parting(facts: Facts) -> str:
    """Return the reason why the members' scripts cannot go on together; empty if they can."""
    view = facts.view
    if view is None:
        return ""
    acting = [s for s in facts.known if s.view == view.number and s.promised < view.number]
    for left in acting:
        if reason := describe_parting(left, acting):
            return reason
    return ""


def describe_parting(left: WorkerStatus, others: Iterable[WorkerStatus]) -> str:
    """Return a sentence on another member that takes steps in a loop that `left` has left."""
    for other in others:
        is_left = left.loop > other.loop or (left.loop == other.loop and left.has_left_loop)
        if is_left and other.opened > left.committed:
            return describe_uneven_ends(left, other)
    return ""


def describe_uneven_ends(left: WorkerStatus | LeaderEnd, other: WorkerStatus) -> str:
    """Return a sentence on a worker that has left a loop, and another worker that continues it."""
    return (
        f"the script of worker {left.worker} has left its loop after step {left.committed}"
        f"{_place(left)}, where that of worker {other.worker} begins another step{_place(other)}: "
        "what ends a loop must be the same on all workers; use job.stop(), or keep what `break` "
        "depends on in job.values"
    )


def are_all_waiting(facts: Facts) -> bool:
    """Return whether all members wait for each other: each has done its tasks of a step."""
    known: Sequence[WorkerStatus] = facts.known
    there = [status for status in known if status.stage.alive]
    return len(there) > 1 and all(status.waiting for status in there)


def describe_waits(statuses: Iterable[WorkerStatus]) -> str:
    """Name the steps and lines in which the members wait for each other."""
    each = [f"worker {s.worker} in step {s.committed}{_place(s)}" for s in statuses]
    return f"all workers wait for each other: {', '.join(each)}"


def _place(status: WorkerStatus | LeaderEnd) -> str:
    return f" ({status.line})" if status.line else ""
