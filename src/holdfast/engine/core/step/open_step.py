"""Keeps the step that a worker's script computes: results so far, and the next task. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.engine.core.ground.events import Digest, Purpose, StepKind, TaskDone


class OpenStep:
    """Keeps one worker's results of a step; a task runs to its end once it has begun."""

    def __init__(self, index: int, kind: StepKind = StepKind.GRADIENTS) -> None:
        self.index = index
        self.kind = kind
        self.running: tuple[int, Purpose] | None = None
        self.samples: dict[int, int] = {}  # samples by virtual rank that this worker hosts
        self.audited: dict[int, bool] = {}  # other workers' tasks that it computed to compare
        self.speculative: dict[int, int] = {}  # samples of late workers' tasks that it computed
        self.digests: dict[int, Digest] = {}

    def restart(self) -> None:
        """Forget all results."""
        for each in (self.samples, self.audited, self.speculative, self.digests):
            each.clear()

    def note(self, task: TaskDone) -> None:
        """Take in a task that the script has computed."""
        self.running = None
        if task.digest is not None:
            self.digests[task.vrank] = task.digest
        match task.purpose:
            case Purpose.HOSTED:
                self.samples[task.vrank] = task.samples
            case Purpose.AUDITED:
                self.audited[task.vrank] = True
            case Purpose.SPECULATIVE:
                self.speculative[task.vrank] = task.samples

    def adopt(self, hosted: Iterable[int]) -> list[int]:
        """Take speculative tasks of virtual ranks that this worker hosts by now for its own."""
        found = [v for v in hosted if v in self.speculative and v not in self.samples]
        for vrank in found:
            self.samples[vrank] = self.speculative.pop(vrank)
        return found

    def missing_tasks(self, hosted: Iterable[int]) -> list[int]:
        """Return the virtual ranks whose tasks this worker owes."""
        return [vrank for vrank in hosted if vrank not in self.samples]

    def count_used(self, hosted: Sequence[int]) -> int | None:
        """Count the samples of these tasks; None until all of them are done."""
        if self.missing_tasks(hosted):
            return None
        return sum(self.samples[vrank] for vrank in hosted)
