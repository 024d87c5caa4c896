"""Makes Accelerate's idea of the main process follow the job's leader.

Transformers and Accelerate ask PartialState for the process that writes and logs. A worker of a
job is a world of its own to them, so that none of their collectives is ever called.
"""

from __future__ import annotations

from holdfast.engine.core.errors import UserError
from holdfast.engine.train.job import Job

try:
    from accelerate import PartialState
except ImportError:
    raise UserError(
        "this integration needs the package accelerate: pip install 'holdfast[accelerate]'"
    ) from None


def follow_leader(job: Job) -> bool:
    """Make this process the main one if it leads the job, else not; returns which."""
    state, leads = PartialState(), job.is_leader
    state.process_index = state.local_process_index = 0 if leads else max(int(job.worker), 1)
    return leads
