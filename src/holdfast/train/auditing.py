"""Tasks that are computed twice: what this worker owes of a step's audits, and what came out.

Shared by the script's thread, which computes, and the engine, which compares; under their lock.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash

from holdfast.core.audit import ATTEMPTS_MAX, Audit, by_all, judge
from holdfast.core.types import View, WorkerId
from holdfast.train.exchange import TAG_AUDIT, Layout, all_gather
from holdfast.train.state import as_bytes
from holdfast.train.transport import Transport

Digests = dict[int, dict[WorkerId, int]]  # of tasks, by virtual rank, as each worker has them


class StepAudits:
    """The audits of the open step, as they are planned in one view.

    Which tasks are audited follows from the step alone; who computes them, from the view. So what
    was computed in the view before still counts.
    """

    def __init__(self) -> None:
        self.view = 0
        self.given_up = False  # the same task comes to other bits each time: audits prove nothing
        self.attempt = 0  # at the step, because the one before came to different bits
        self.audits: tuple[Audit, ...] = ()
        self.done: set[int] = set()  # virtual ranks that this worker has computed for others
        self._worker = WorkerId(-1)
        self._digests: dict[int, int] = {}  # by virtual rank, of tasks that this worker computed

    def open(self, view: int, worker: WorkerId, audits: Sequence[Audit], attempt: int = 0) -> None:
        """Nothing of the step is computed yet."""
        self.done.clear()
        self._digests = {audit.vrank: 0 for audit in audits}
        self.plan(view, worker, audits, attempt)

    def plan(self, view: int, worker: WorkerId, audits: Sequence[Audit], attempt: int = 0) -> None:
        """As `open`, in the middle of the step."""
        self.view, self.attempt, self._worker = view, attempt, worker
        self.audits = tuple(audits)

    def owed(self, view: int) -> list[int]:
        """Virtual ranks of others that this worker has yet to compute."""
        if view != self.view:
            return []
        mine = [a.vrank for a in self.audits if self._worker in a.auditors]
        return [vrank for vrank in mine if vrank not in self.done]

    def begin(self, vrank: int) -> None:
        """This worker computes the task, perhaps not for the first time."""
        if vrank in self._digests:
            self._digests[vrank] = 0

    def note(self, vrank: int, bucket: int, flat: torch.Tensor) -> None:
        """A bucket of a task's gradient as this worker has it; they may come in any order."""
        if vrank in self._digests:
            data = as_bytes(flat).cpu().numpy().data
            self._digests[vrank] ^= xxhash.xxh3_64_intdigest(data, seed=bucket) >> 1

    def compare(self, transport: Transport, layout: Layout, view: View) -> Digests:
        """What all members have found, task by task. Severed."""
        words = [self._digests.get(audit.vrank, 0) for audit in self.audits]
        table = all_gather(transport, layout, torch.tensor(words, dtype=torch.int64), TAG_AUDIT)
        rank = {worker: i for i, worker in enumerate(view.workers)}
        return {
            audit.vrank: {worker: int(table[rank[worker], i]) for worker in audit.workers}
            for i, audit in enumerate(self.audits)
        }


class Court:
    """Over the audits of one step: every member hears the same and comes to the same judgement."""

    def __init__(self) -> None:
        self._heard: list[Digests] = []  # attempt by attempt

    def hear(self, digests: Digests) -> None:
        self._heard.append(digests)

    @property
    def differing(self) -> list[int]:
        """Virtual ranks whose bits differ between workers, in the last attempt."""
        return [v for v, each in self._heard[-1].items() if len(set(each.values())) > 1]

    def agreed(self, owners: Sequence[WorkerId]) -> bool:
        """Whether the last attempt's sums are right: every owner has what most have."""
        judged = {vrank: judge(each) for vrank, each in self._heard[-1].items()}
        return all(
            judgement.right == self._heard[-1][vrank][owners[vrank]]
            for vrank, judgement in judged.items()
        )

    @property
    def hopeless(self) -> bool:
        """Whether the same task comes to other bits again and again, with no majority."""
        undecided = any(judge(each).right is None for each in self._heard[-1].values())
        return undecided and len(self._heard) >= ATTEMPTS_MAX

    def wrong(self) -> list[tuple[WorkerId, int]]:
        """Who has ever come to other bits than the majority of the last attempt; and where."""
        found = []
        for vrank, each in self._heard[-1].items():
            right = judge(each).right
            heard = [attempt.get(vrank, {}) for attempt in self._heard]
            liars = {w for said in heard for w, digest in said.items() if digest != right}
            found += [(worker, vrank) for worker in sorted(liars)] if right is not None else []
        return found

    def again(self, audits: Sequence[Audit], workers: Sequence[WorkerId]) -> tuple[Audit, ...]:
        """The next attempt: all is computed anew and so audited; by everybody what differs."""
        differing = self.differing
        return tuple(by_all(a, workers) if a.vrank in differing else a for a in audits)
