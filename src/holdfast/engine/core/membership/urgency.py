"""Decides which changes of a worker's status an agent reports before its next heartbeat."""

from __future__ import annotations

import dataclasses
from operator import attrgetter

from holdfast.engine.core.worker_status import WorkerStatus

_TOLD = attrgetter("late", "ended", "at_boundary")  # news in a phase; the rest is mere progress


def is_urgent(old: WorkerStatus, new: WorkerStatus) -> bool:
    """Return whether a status brings more than progress within a step or a view."""
    quiet = dataclasses.replace(
        new,
        seq=old.seq,
        committed=old.committed,
        phase=old.phase,
        proved_at=old.proved_at,
        activity=old.activity,
    )
    return quiet != old or _TOLD(new) != _TOLD(old)
