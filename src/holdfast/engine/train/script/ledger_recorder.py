"""Records one worker's steps: its copy of the ledger, and events of the job.

The script's thread uses it; doubts arrive from the engine's thread. If the file system of the run
directory is full, the ledger waits for room, but only where the coordinator has the same directory:
then the other workers most likely have it, too, and no worker could do better. In the meantime
lines are kept in memory, a few steps' at most, and the worker rests at its next boundary
(core/replica/replica.py).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.engine.core import tree
from holdfast.engine.core.errors import UserError
from holdfast.engine.core.ground.events import EventNoted, RoomSeen
from holdfast.engine.core.membership.event_log import ROOM
from holdfast.engine.core.step.backup import DropTally
from holdfast.engine.core.types import WorkerId
from holdfast.engine.records.ledger import (
    DoubtLine,
    HeaderLine,
    LedgerEntry,
    LedgerWriter,
    Place,
    StepDigests,
    Uses,
    ledger_path,
    make_disk_error,
)
from holdfast.engine.train.data.quarantine import Bad, Quarantine
from holdfast.engine.train.data.sampling import SamplePlan
from holdfast.engine.train.data.sources import Plan
from holdfast.engine.train.script.environment import WorkerEnvironment
from holdfast.engine.train.step.driver import Driver, ScriptOrder
from holdfast.engine.train.step.step_table import LEFT_OUT, UNWEIGHTED, StepTable
from holdfast.engine.wire.job_document import COORDINATOR_FILE


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMean:
    """Keeps a step's loss, and the factors of its gradient.

    `scale`: multiplies the sum. `weight`: divides it; 0 if no batch of the step counts. `left_out`:
    the virtual ranks whose batches were left out.
    """

    loss: float
    scale: float = 1.0
    weight: float = 1.0
    left_out: Collection[int] = ()


def find_mean(
    plan: Plan,
    index: int,
    counts: Sequence[int],
    weights: Sequence[float],
    losses: Sequence[float],
) -> StepMean:
    """Return the mean of a script's step; the sequences have an item for each virtual rank.

    Without weights the gradient is the mean over the step's samples, with weights the sum divided
    by their total. A batch that the script has left out has no part in either.

    Raises UserError if only some of the batches were given a weight.
    """
    rows = list(zip(counts, weights, strict=True))
    if any(UNWEIGHTED < weight < 0 or LEFT_OUT < weight < UNWEIGHTED for weight in weights):
        raise UserError(
            f"in step {index} some processes of a worker left out a batch, or gave it a weight, "
            "and others did not: let them decide alike"
        )
    kept = [(count, weight) for count, weight in rows if count and weight != LEFT_OUT]
    left_out = frozenset(
        vrank for vrank, (count, weight) in enumerate(rows) if count and weight in (LEFT_OUT, 0.0)
    )
    if all(weight >= 0 for _, weight in kept):
        total = _total([max(weight, 0.0) for weight in weights])
        if not total > 0:
            return StepMean(loss=math.nan, weight=0.0, left_out=left_out)
        return StepMean(loss=_total(losses) / total, weight=total, left_out=left_out)
    if any(weight >= 0 for _, weight in kept):
        raise UserError(
            f"some batches of step {index} were given a weight and others not: give "
            "step.backward a weight in every batch, or in none"
        )
    assert isinstance(plan, SamplePlan), "other losses are weighted"
    # 1 unless samples were dropped or left out
    scale = plan.step_samples(index) / sum(count for count, _ in kept)
    shares = zip(losses, plan.all_weights(index), strict=True)
    loss = _total([loss * share for loss, share in shares]) / plan.virtual_ranks * scale
    return StepMean(loss=loss, scale=scale, left_out=left_out)


def _total(values: Sequence[float]) -> float:
    """Add up values in the canonical order."""
    leaves = {(vrank, 1): value for vrank, value in enumerate(values)}
    return tree.fold(leaves, len(values), lambda a, b: a + b)


AGAIN_S = 1.0  # between two tries to write
EMPTY = (
    "no batch of step {index} counts: all were left out, or have a weight of 0. Its gradients are "
    "zeros, and step.loss is NaN. Later steps of this kind are not named; `holdfast ledger verify` "
    "counts them"
)


class PatientLedger:
    """Writes one worker's ledger, as the module describes. Two threads may use it at once."""

    def __init__(self, path: Path, driver: Driver, patience_s: float) -> None:
        self._run_dir = path.parent.parent
        self._writer = LedgerWriter(path, (self._run_dir / COORDINATOR_FILE).exists)
        self._driver = driver
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._full_since: float | None = None

    def begin(self, header: HeaderLine) -> None:
        """Write the header of the entries that follow. WorldError."""
        self._write(lambda: self._writer.begin(header))

    def append(self, entry: LedgerEntry) -> None:
        """Write an entry. WorldError."""
        self._write(lambda: self._writer.append(entry))

    def doubt(self, doubt: DoubtLine) -> None:
        """Write a doubt. WorldError."""
        self._write(lambda: self._writer.doubt(doubt))

    @property
    def again_s(self) -> float:
        """Return after how long to try again to write lines; infinite if none waits for room."""
        return float("inf") if self._full_since is None else AGAIN_S

    def write_kept(self) -> None:
        """Try again to write the lines that wait for room. WorldError."""
        self._write(lambda: None)

    def _write(self, write: Callable[[], None]) -> None:
        with self._lock:
            write()
            error = self._writer.write_kept()
            since, now = self._full_since, time.monotonic()
            if error is not None and since is not None and now >= since + self._patience_s:
                raise make_disk_error(self._writer.path, error) from error
            has_changed = (error is None) != (since is None)
            if has_changed:
                self._full_since = now if error is not None else None
        if has_changed:
            self._report(error)

    def _report(self, error: OSError | None) -> None:
        """Report to the machine, and to people, whether there is room."""
        text = f"the ledger under {self._run_dir} can grow again: training goes on"
        if error is not None:
            text = (
                f"the ledger under {self._run_dir} cannot grow ({error.strerror}): training waits "
                f"for room there, {self._patience_s:g} s at most; free space"
            )
        self._driver.post(EventNoted(ROOM, text))
        self._driver.post(RoomSeen(error is None))


class LedgerRecorder:
    """Writes this worker's copy of the ledger; without a run directory there is none."""

    def __init__(self, environment: WorkerEnvironment, seed: int, driver: Driver) -> None:
        self._environment = environment
        self._seed = seed
        self._driver = driver
        self._plan: Plan  # plan of the present loop
        self._ledger = self._make_ledger()
        self._quarantine: Quarantine | None = None  # quarantine of the loop's dataset
        self._header_due = False  # a header must still be written for the present loop
        self._tally = DropTally()  # counts the samples dropped in the present loop
        self._has_named_empty = False  # a step in which no batch counts was named
        self._copied = 0  # tasks of other workers computed here, as last reported

    def begin(self, plan: Plan, quarantine: Quarantine | None = None) -> None:
        """Begin a loop whose samples this plan cuts into steps."""
        self._quarantine = quarantine
        self._plan, self._header_due, self._tally = plan, True, DropTally()

    def commit(
        self,
        place: Place,
        view: int,
        table: StepTable,
        mean: StepMean,
        dropped: int,
        handed: Mapping[int, int],
        of: StepDigests,
    ) -> None:
        """Record a step, whose gradient became complete in `view` without `dropped` samples.

        `handed`: digests of values that its tasks have handed over, by virtual rank.
        """
        if dropped:
            self._note_dropped(place.index, table, dropped)
        if not mean.weight:
            self._note_empty(place.index)
        ledger = self._ledger
        if ledger is None:
            return
        if self._header_due:
            self._header_due = False
            ledger.begin(self._header())
        left_out = None if place.uses is Uses.NO_SAMPLES else self._quarantine
        ledger.append(
            LedgerEntry(
                place=place,
                view=view,
                hosts=table.hosts(),
                counts=table.counts(),
                digests=table.digests(),
                loss=mean.loss,
                bad={} if left_out is None else {v: r for v, r in left_out.turn.items() if r},
                handed=handed,
                losses=() if place.uses is Uses.NO_SAMPLES else _losses(table, mean),
                of=of,
            )
        )

    def report_quarantined(
        self, quarantine: Quarantine, news: Mapping[int, Bad], table: StepTable
    ) -> None:
        """Report each new quarantined record once in the event log, with the worker that met it."""
        hosts, said = table.hosts(), set(quarantine.records)
        for vrank, bad in news.items() if self._driver.leads else ():
            for record, why in bad.items():
                if record not in said:
                    worker = WorkerId(hosts[vrank][0])
                    text = f"record {record} is quarantined: on worker {worker} it {why}"
                    self._driver.post(EventNoted("record", text, worker))
                said.add(record)

    def doubt(self, step: int, view: int, again: bool) -> None:
        """Record that steps from this one on, committed up to `view`, may be wrong."""
        if self._ledger is not None:
            self._ledger.doubt(DoubtLine(step=step, view=view, again=again))

    def rest(self, next_order: Callable[[float], ScriptOrder | None]) -> ScriptOrder:
        """Return the script's next order at a boundary; lines that wait for room are written.

        `next_order`: waits so many seconds at most for an order. WorldError.
        """
        while (order := next_order(self._again_s)) is None:
            self._write_kept()
        return order

    def wait(self) -> None:
        """Wait, after a loop's last step, until all lines are written. WorldError."""
        while self._again_s < float("inf"):
            self._driver.next_for_script(self._again_s)
            self._write_kept()

    @property
    def _again_s(self) -> float:
        return float("inf") if self._ledger is None else self._ledger.again_s

    def _write_kept(self) -> None:
        if self._ledger is not None:
            self._ledger.write_kept()

    def end(self) -> None:
        """End the loop: no further step follows."""
        self._post_dropped()
        copied, self._copied = self._driver.copied - self._copied, self._driver.copied
        if copied:
            tasks = "a task" if copied == 1 else f"{copied} tasks"
            what = f"computed {tasks} for other workers, which were late"
            self._post("copy", f"worker {self._environment.worker} {what}")

    def _note_dropped(self, index: int, table: StepTable, samples: int) -> None:
        assert isinstance(self._plan, SamplePlan), "nothing of a stream is dropped"
        rows = enumerate(zip(table.hosts(), table.counts(), strict=True))
        hosts = {
            WorkerId(worker)
            for vrank, ((worker, _), count) in rows
            if count < self._plan.task_samples(index, vrank)
        }
        if self._tally.note(index, hosts, samples):
            self._post_dropped()

    def _post_dropped(self) -> None:
        if self._tally.steps and self._driver.leads:
            self._post("backup", str(self._tally))

    def _note_empty(self, index: int) -> None:
        if self._driver.leads and not self._has_named_empty:
            self._post("script", EMPTY.format(index=index))
        self._has_named_empty = True

    def _post(self, kind: str, text: str) -> None:
        self._driver.post(EventNoted(kind, text))

    def _make_ledger(self) -> PatientLedger | None:
        me = self._environment
        if me.run_dir is None:
            return None
        path = ledger_path(me.run_dir, me.worker, me.incarnation)
        return PatientLedger(path, self._driver, me.spec.nodes.abandon_s)

    def _header(self) -> HeaderLine:
        me = self._environment
        return HeaderLine(
            seed=self._seed,
            virtual_ranks=me.spec.virtual_ranks,
            plan=self._plan.to_dict(),
            worker=me.worker,
            incarnation=me.incarnation,
            backup=me.spec.stragglers.backup,
            dataset=0 if self._quarantine is None else self._quarantine.number,
            quarantined=tuple(sorted(self._quarantine.records)) if self._quarantine else (),
            digest_steps=me.spec.silent_errors.digest_steps,
        )


def _losses(table: StepTable, mean: StepMean) -> list[float]:
    """Return the losses of all tasks; NaN for a batch that was left out."""
    losses = enumerate(table.losses())
    return [math.nan if vrank in mean.left_out else loss for vrank, loss in losses]
