"""Remembers why a job began again, to see that it does so for one reason again and again. Pure."""

from __future__ import annotations

from holdfast.core.types import WorkerId, WorkerStatus

FALLS_ALIKE = 3  # times that a job may begin again from one step for one reason


class FallCauses:
    """Counts the reasons for which a job began again, since it last reached a new step.

    Only reasons of the workers' own count: what the outside world does to them may happen often.
    """

    def __init__(self) -> None:
        #: The newest words of each worker on a wrong result.
        self._words: dict[WorkerId, str] = {}
        #: How often the job began again, by step and reason.
        self._counts: dict[tuple[int, str], int] = {}
        #: The newest reason since the job began, or began again.
        self._newest = ""

    def record_words(self, status: WorkerStatus) -> None:
        """Record what a worker has reported last of wrong results: it may leave for that reason."""
        wrong = [event.text for event in status.events if event.kind == "wrong"]
        if wrong:
            self._words[status.worker] = wrong[-1]

    def count_loss(self, worker: WorkerId, crash: str) -> None:
        """Count a lost worker; `crash`: the signal of its own making that ended it, or empty."""
        self._newest = self._words.pop(worker, "") or crash or self._newest

    def begin(self, step: int) -> None:
        """Record that the job begins again from this step."""
        if self._newest:
            key = step, self._newest
            self._counts[key] = self._counts.get(key, 0) + 1
        self._newest = ""

    def forgive(self) -> None:
        """Forget the counts, because the job has reached a new step."""
        self._counts.clear()

    def reason_to_give_up(self) -> str:
        """Return the reason to give up; empty to continue."""
        for (step, cause), times in self._counts.items():
            if times >= FALLS_ALIKE:
                return (
                    f"the job began again from step {step} {times} times for the same reason: "
                    f"{cause}; a machine hardly fails alike so often, so look at the script first"
                )
        return ""
