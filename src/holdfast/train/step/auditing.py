"""What is computed twice: what this worker owes of a step's audits, and what came out.

Tasks are shared by the script's thread, which computes, and the engine, which compares; under their
lock. Sums are the engine's alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
import xxhash

from holdfast.core.errors import Aborted
from holdfast.core.step.audit import ATTEMPTS_MAX, Alike, Audit, Classes, owed
from holdfast.core.types import View, WorkerId
from holdfast.train.checkpoint.state import as_bytes
from holdfast.train.step.buckets import Bucket
from holdfast.train.step.reduction import TAG_AUDIT, BucketSum, Layout, all_gather
from holdfast.train.transport.seam import Transport

Digests = dict[int, dict[WorkerId, int]]  # of tasks, by virtual rank, as each worker has them
SKETCH_SUMS = 8


class StepAudits:
    """The audits of the open step, as they are planned in one view.

    Which tasks are audited follows from the step alone; who computes them, from the view. So what
    was computed in the view before still counts.
    """

    def __init__(self) -> None:
        self.share = 0.0  # of all tasks and sums
        self.view = 0
        self.agreed_in = 0  # the view whose members have agreed on the two that follow
        self.alike = Alike.BITS  # what two runs of a task must be
        self.classes = Classes(0.0)
        self.whole_step = -1  # of which all is looked at: the first after a checkpoint
        self.audits: tuple[Audit, ...] = ()
        self.done: set[int] = set()  # virtual ranks that this worker has computed for others
        self._worker = WorkerId(-1)
        self._audited: frozenset[int] = frozenset()  # virtual ranks
        self._digests: dict[int, int] = {}  # by virtual rank, of tasks that this worker computed
        self._sketches: dict[int, torch.Tensor] = {}  # the same, where bits are not asked for

    def share_of(self, step: int) -> float:
        """How much of the step is looked at."""
        if self.alike is Alike.NOTHING:
            return 0.0
        return 1.0 if self.share and self.whole_step == step else self.share

    def open(self, worker: WorkerId) -> None:
        """Nothing of the step is computed yet, and nothing is planned."""
        self.plan(0, ())
        self._worker = worker
        self._forget()

    def plan(self, view: int, audits: Sequence[Audit]) -> None:
        """Perhaps in the middle of the step: digests of all tasks are kept until it is planned."""
        if view != self.view:
            self.classes.forget()
        self.view, self.audits = view, tuple(audits)
        self._audited = frozenset(audit.vrank for audit in audits)

    def again(self, audits: Sequence[Audit]) -> None:
        """The step is computed anew."""
        self.plan(self.view, audits)
        self._forget()

    def owed(self, view: int) -> list[int]:
        """Virtual ranks of others that this worker has yet to compute."""
        return owed(self.audits, self._worker, self.done) if view == self.view else []

    def _forget(self) -> None:
        self.done.clear()
        self._digests.clear()
        self._sketches.clear()

    def begin(self, vrank: int) -> None:
        """This worker computes the task, perhaps not for the first time."""
        self._digests[vrank] = 0
        self._sketches.pop(vrank, None)

    def note(self, vrank: int, bucket: int, flat: torch.Tensor) -> None:
        """A bucket of a task's gradient as this worker has it; they may come in any order."""
        if vrank not in self._audited and (self.view or not self.share):
            return  # nobody will ask for it
        if self.alike is Alike.NEAR:
            mine = sketch(flat, bucket)
            self._sketches[vrank] = self._sketches.get(vrank, torch.zeros_like(mine)) + mine
            return
        data = as_bytes(flat).cpu().numpy().data
        self._digests[vrank] ^= xxhash.xxh3_64_intdigest(data, seed=bucket) >> 1

    def compare(self, transport: Transport, layout: Layout, view: View) -> Digests:
        """What all members have found, task by task. Aborted."""
        none = torch.zeros(1 + SKETCH_SUMS, dtype=torch.float64)
        if self.alike is Alike.NEAR:
            rows = [self._sketches.get(audit.vrank, none) for audit in self.audits]
            mine = torch.stack(rows)
        else:
            words = [self._digests.get(audit.vrank, 0) for audit in self.audits]
            mine = torch.tensor(words, dtype=torch.int64)
        table = all_gather(transport, layout, mine, TAG_AUDIT)
        rank = {worker: i for i, worker in enumerate(view.workers)}
        return {
            audit.vrank: {w: self._number(audit.vrank, table[rank[w], i]) for w in audit.workers}
            for i, audit in enumerate(self.audits)
        }

    def _number(self, vrank: int, said: torch.Tensor) -> int:
        """What stands for a gradient: the same for those that are alike."""
        if said.ndim == 0:
            return int(said)
        squares, *sums = said.tolist()
        return self.classes.number(vrank, [squares**0.5, *sums])


def sketch(flat: torch.Tensor, seed: int) -> torch.Tensor:
    """[1 + SKETCH_SUMS] float64, on the host: the sum of squares, and sums with random signs.

    Those of the parts of a gradient add up to that of the whole.
    """
    dice = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (len(flat),), generator=dice, dtype=torch.int8) * 2 - 1
    values = flat.double()
    signed = values * signs.to(flat.device)
    padded = torch.nn.functional.pad(signed, (0, -len(flat) % SKETCH_SUMS))
    sums = padded.view(SKETCH_SUMS, -1).sum(dim=1)
    return torch.cat([values.square().sum().view(1), sums]).cpu()


def check_sum(bucket: Bucket, transport: Transport, layout: Layout) -> list[int] | None:
    """Sum a bucket again, each piece by another member; put right what turns out to be wrong.

    Returns the ranks of those whose sum, or copy of one, was wrong, in order; None when nobody can
    say which sum is right. Aborted.
    """
    runs = [bucket.result.data]
    tables = [_digests(bucket.result.data, transport, layout)]
    while len(runs) < ATTEMPTS_MAX:
        runs.append(torch.empty_like(bucket.result.data))
        again = BucketSum(bucket, layout, into=runs[-1], turned=len(runs) - 1)
        again.gather(transport)
        again.spread(transport)
        again.finish()
        tables.append(_digests(runs[-1], transport, layout))
        if all(bool((table == tables[0][0]).all()) for table in tables):
            return []
    right = _majority(tables)
    if right is None:
        return None
    _put_right(bucket, runs, tables, right, layout)
    return _who_was_wrong(tables, right)


def _digests(flat: torch.Tensor, transport: Transport, layout: Layout) -> torch.Tensor:
    """[members, pieces]: 63 bits of each piece as each member has it."""
    pieces = [flat[layout.piece(rank, flat.numel())] for rank in range(layout.size)]
    words = [xxhash.xxh3_64_intdigest(as_bytes(p).numpy().data) >> 1 for p in pieces]
    return all_gather(transport, layout, torch.tensor(words, dtype=torch.int64), TAG_AUDIT)


def _majority(tables: Sequence[torch.Tensor]) -> list[int] | None:
    """Of each piece the digest that most have in most runs, from more than one who summed it."""
    right, size = [], tables[0].shape[1]
    for piece in range(size):
        heard = [table[:, piece].tolist() for table in tables]
        counts = Counter(digest for said in heard for digest in said)
        ((digest, count),) = counts.most_common(1)
        summed_by = {(piece - turned) % size for turned, said in enumerate(heard) if digest in said}
        if 2 * count <= counts.total() or len(summed_by) < 2:
            return None
        right.append(digest)
    return right


def _put_right(
    bucket: Bucket,
    runs: Sequence[torch.Tensor],
    tables: Sequence[torch.Tensor],
    right: Sequence[int],
    layout: Layout,
) -> None:
    result = bucket.result.data
    for piece, digest in enumerate(right):
        mine = [int(table[layout.rank, piece]) for table in tables]
        if digest not in mine:
            raise Aborted(f"piece {piece} of bucket {bucket.index} is wrong here each time")
        where = layout.piece(piece, result.numel())
        result[where] = runs[mine.index(digest)][where]


def _who_was_wrong(tables: Sequence[torch.Tensor], right: Sequence[int]) -> list[int]:
    """Whoever summed what most have wrongly, or whose copy alone is wrong."""
    found: set[int] = set()
    size = len(right)
    for turned, table in enumerate(tables):
        for piece, digest in enumerate(right):
            wrong = [rank for rank in range(size) if int(table[rank, piece]) != digest]
            most = 2 * len(wrong) > size
            found.update([(piece - turned) % size] if most else wrong)
    return sorted(found)
