"""Finds out why a job began again, to see that it does so for one reason again and again. Pure."""

from __future__ import annotations

from holdfast.engine.core.job_record import Setbacks
from holdfast.engine.core.types import WorkerId
from holdfast.engine.core.worker_status import WorkerStatus

FALLS_ALIKE = 3  # times that a job may begin again from one step for one reason


class FallCauses:
    """Remembers what workers have reported of wrong results, as reasons for which they leave.

    Only reasons of the workers' own count: what the outside world does to them may happen often.
    """

    def __init__(self) -> None:
        #: The newest words of each worker on a wrong result.
        self._words: dict[WorkerId, str] = {}

    def record_words(self, status: WorkerStatus) -> None:
        """Record what a worker has reported last of wrong results: it may leave for that reason."""
        wrong = [event.text for event in status.events if event.kind == "wrong"]
        if wrong:
            self._words[status.worker] = wrong[-1]

    def find_cause(self, worker: WorkerId, crash: str) -> str:
        """Return why a worker was lost. `crash`: the signal by which it ended itself, or empty."""
        return self._words.pop(worker, "") or crash


def describe_alike_falls(setbacks: Setbacks) -> str:
    """Return the reason to give up, because the job began again too often; empty to continue."""
    for fall in setbacks.alike:
        if fall.times >= FALLS_ALIKE:
            return (
                f"the job began again from step {fall.step} {fall.times} times for the same "
                f"reason: {fall.cause}; a machine hardly fails alike so often, so look at the "
                "script first"
            )
    return ""
