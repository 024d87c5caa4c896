"""Decides where a job goes on after a view was stopped: a pure function of survivors' statuses.

The vote of step t ends with every member holding the complete reduced gradient of t. So if anyone
committed t, everyone can. If nobody did but all members live and hold the gradient, committing it
loses nothing. Otherwise t is redone, and redoing gives the same bits: a member that is lost before
it voted may have been the only one to see that its piece of the sum was not finite.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.engine.core.errors import require
from holdfast.engine.core.worker_status import WorkerStatus


def resume_step(survivors: Sequence[WorkerStatus], lost: bool) -> tuple[int, str]:
    """Return the number of steps that count as committed, and the reason why.

    `survivors` all hold state and have promised not to act in the stopped view. `lost`: some member
    of that view is not among them.
    """
    require(len(survivors) > 0, "no survivor to resume from")
    newest = max(s.committed for s in survivors)
    behind = [s for s in survivors if s.committed < newest]
    if behind:
        for s in behind:
            require(
                s.committed == newest - 1 and s.reduced,
                f"worker {s.worker} is at step {s.committed} (reduced: {s.reduced}) while another "
                f"committed {newest} steps",
            )
        return newest, f"step {newest - 1} was committed by a survivor: all commit it"
    if all(s.reduced for s in survivors) and not lost:
        return newest + 1, f"all members hold the gradient of step {newest}: all commit it"
    why = "for the lost virtual ranks" if lost else "since not all members have its gradient"
    return newest, f"step {newest} is redone {why}"
