"""Proves from a run's ledger that every sample was used exactly once.

It compares all copies of all steps with each other and with the plan that the headers name, which
is made by the caller's `plan_of` and recomputed here. Invariant: no part of a file is trusted; each
fault becomes a finding that names file and line.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from holdfast.engine.core.errors import UserError
from holdfast.engine.records.ledger import (
    LINE_BYTES_MAX,
    ChainCheck,
    DoubtLine,
    HeaderLine,
    Host,
    Line,
    Place,
    StepLine,
    Uses,
    decode_line,
    find_ledger_files,
    newer_format_in,
    read_doubts,
)
from holdfast.engine.records.ledger_claims import Claim, claim_of_result
from holdfast.engine.records.left_out_audit import LeftOut
from holdfast.engine.state.store.regular_files import regular_stream

FINDINGS_MAX = 1000
#: A finding may quote a file at length.
FINDING_CHARS_MAX = 1000
STEP_SAMPLES_MAX = 1 << 26  # a plan that claims more for one step is not recomputed


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerReport:
    """Sums up a verification; `lost` and `repeated` count samples over all epochs.

    `inexact_since`: the first step whose result may differ from that of sound machines. `dropped`:
    samples of late workers that were left out by choice, in `dropped_in` steps. `skipped`: samples
    of batches that the script has left out, in `skipped_in` steps. `quarantined`: records that were
    reported bad; good ones took their places `replaced` times. `job_steps`: the job's number of
    steps, if a source besides the ledger names it.
    """

    findings: tuple[str, ...]
    files: int
    #: Lines read, over all workers.
    copies: int
    #: Distinct steps.
    steps: int
    #: Samples that are proved to have been used.
    samples: int
    lost: int
    repeated: int
    #: Steps committed again after all workers were lost.
    replayed: tuple[int, ...]
    #: Files whose last line was cut off by the death of their writer.
    torn: int
    inexact_since: int | None = None
    dropped: int = 0
    dropped_in: int = 0
    skipped: int = 0
    skipped_in: int = 0
    quarantined: int = 0
    replaced: int = 0
    job_steps: int | None = None

    @property
    def ok(self) -> bool:
        return not (self.findings or self.lost or self.repeated) and self.steps > 0

    def to_dict(self) -> dict[str, Any]:
        names = [name for name in self.__slots__ if name not in ("findings", "replayed")]
        return {
            "ok": self.ok,
            **{name: getattr(self, name) for name in names},
            "replayed": list(self.replayed),
            "findings": list(self.findings),
        }


class AnyPlan(Protocol):
    """Declares what `verify` needs of every plan."""

    @property
    def virtual_ranks(self) -> int: ...
    @property
    def first_step(self) -> int: ...


@runtime_checkable
class OrderedPlan(AnyPlan, Protocol):
    """Declares a plan of data that is read in order: a `StreamPlan` or an `OrderPlan`."""

    def start(self) -> list[Any]: ...

    def position_after(
        self,
        positions: Sequence[Any],
        step: int,
        counts: Sequence[int],
        digests: Sequence[int],
        told: str,
    ) -> list[Any]:
        """Return the position in the order after a step with these values.

        UserError if it used other samples.
        """
        ...


@runtime_checkable
class Plan(AnyPlan, Protocol):
    """Declares a plan of the samples that each step uses: `SamplePlan` is one."""

    def step_samples(self, step: int) -> int: ...
    def step_tasks(self, step: int) -> list[NDArray[np.int64]]: ...
    def digest_of(self, indices: NDArray[np.int64]) -> int: ...
    def replace_bad(
        self, indices: NDArray[np.int64], bad: Collection[int]
    ) -> tuple[NDArray[np.int64], set[int]]: ...
    def epoch_of(self, step: int) -> tuple[int, int]: ...
    def samples_before(self, step: int) -> int: ...


PlanOf = Callable[[Mapping[str, Any]], AnyPlan]


def verify(
    run_dir: str | os.PathLike[str], plan_of: PlanOf, claims: Sequence[Claim] = ()
) -> LedgerReport:
    """Compare all copies of every step with each other, the plan and its epochs.

    `claims`: the run's number of steps, from other sources; result.json in its directory is read
    here. It takes memory for a small record per step, and for the indices of one epoch. UserError
    when the run has no ledger.
    """
    paths = find_ledger_files(run_dir)
    audit = _Audit(plan_of, read_doubts(paths))
    audit.left_out.read(paths, audit.is_withdrawn)
    for path in paths:
        audit.read(path)
    result = claim_of_result(run_dir)
    claims = [*claims, result] if result is not None else list(claims)
    audit.check_steps()
    audit.check_length(claims)
    streamed = audit.check_streams()
    lost, repeated, samples = audit.count_samples()
    dropped = audit.count_dropped()
    skipped = [step.skipped for step in audit.steps.values() if step.skipped]
    return LedgerReport(
        findings=tuple(audit.findings),
        files=len(paths),
        copies=audit.copies,
        steps=len(audit.steps),
        samples=samples + streamed,
        lost=lost,
        repeated=repeated,
        replayed=tuple(audit.replayed),
        torn=audit.torn,
        inexact_since=min((d.step for d in audit.doubts if not d.again), default=None),
        dropped=sum(dropped),
        dropped_in=len(dropped),
        skipped=sum(skipped),
        skipped_in=len(skipped),
        quarantined=audit.left_out.count,
        replaced=sum(step.replaced for step in audit.steps.values()),
        job_steps=max((claim.steps for claim in claims), default=None),
    )


# All copies of a step must agree on this. Hashed, so that a million steps fit in memory. A step
# that only hands over values does not agree on the value of `place`: see `_check_told`.
_CONTENT = (
    *("plan", "place", "counts", "digests", "loss", "bad", "handed", "losses", "state"),
    *("gradients", "sum"),
)


@dataclass(slots=True)
class _Step:
    """Keeps one step while the files are read."""

    #: The fields of _CONTENT, by `hosts` if they may differ.
    contents: dict[tuple[Host, ...], tuple[Any, ...]]
    #: File and line of the first copy.
    where: str
    #: View of the newest commit.
    view: int
    #: Index of the plan, or -1 when it cannot be recomputed.
    plan: int
    place: Place
    #: A stream's counts and digests.
    marks: tuple[Sequence[int], Sequence[int]] = ((), ())
    #: The value that was agreed on, by `hosts`.
    told: dict[tuple[Host, ...], str] = field(default_factory=dict)
    commits: list[tuple[int, tuple[Host, ...], Host]] = field(default_factory=list)
    #: Virtual ranks whose samples are not the plan's.
    wrong: tuple[int, ...] = ()
    #: Samples that a plan replaced by others.
    replaced: int = 0
    #: Virtual ranks whose samples were left out by choice.
    dropped: tuple[int, ...] = ()
    #: Samples of batches that the script has left out.
    skipped: int = 0


class _Audit:
    """Verifies one run: files are read one by one, then steps are checked."""

    def __init__(self, plan_of: PlanOf, doubts: Sequence[DoubtLine]) -> None:
        self.doubts = doubts
        self.findings: list[str] = []
        self.steps: dict[int, _Step] = {}
        self.replayed: list[int] = []
        self.copies = 0
        self.torn = 0
        self.left_out = LeftOut()
        self._plan_of = plan_of
        self._plans: list[AnyPlan] = []
        self._plan_index: dict[bytes, int] = {}
        self._backups: dict[int, str] = {}  # what headers declare, and the first that does
        self._hosts: dict[tuple[Host, ...], tuple[Host, ...]] = {}  # each kept once

    def find(self, text: str) -> None:
        if len(self.findings) < FINDINGS_MAX:
            self.findings.append(text[:FINDING_CHARS_MAX])
        elif len(self.findings) == FINDINGS_MAX:
            self.findings.append(f"more than {FINDINGS_MAX} findings: the rest is not listed")

    def read(self, path: Path) -> None:
        """Read a file's lines. A last line without newline was cut short by a death: no finding."""
        header: HeaderLine | None = None
        plan, chain = -1, ChainCheck()
        try:
            with regular_stream(path) as file:
                for number, line in enumerate(iter(lambda: file.readline(LINE_BYTES_MAX), b""), 1):
                    where = f"{path.name}:{number}"
                    if not line.endswith(b"\n"):
                        if len(line) == LINE_BYTES_MAX:
                            self.find(f"{where}: longer than {LINE_BYTES_MAX} bytes: not read on")
                        else:
                            self.torn += 1
                        return
                    value = self._parse(where, line)
                    if not isinstance(value, DoubtLine) and (wrong := chain.find_problem(line)):
                        self.find(f"{where}: {wrong}")
                    match value:
                        case HeaderLine() as found:
                            header, plan = found, self._adopt(where, found)
                        case StepLine() as entry if not self.is_withdrawn(entry):
                            self._take(where, header, plan, entry)
        except OSError as error:
            self.find(f"{path.name}: cannot be read: {error}")

    def is_withdrawn(self, entry: StepLine) -> bool:
        """Return whether the step was redone because it may have used something wrong."""
        return any(doubt.withdraws(entry) for doubt in self.doubts)

    def _parse(self, where: str, line: bytes) -> Line | None:
        try:
            return decode_line(line)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            if newer := newer_format_in(line):
                raise UserError(f"the ledger {where} {newer}") from None
            self.find(f"{where}: malformed: {error}")
            return None

    def _adopt(self, where: str, header: HeaderLine) -> int:
        """Return the index of the header's plan; -1, with a finding, if there is no such plan."""
        self._backups.setdefault(header.backup, where)
        key = msgspec.json.encode((header.seed, header.virtual_ranks, header.plan), order="sorted")
        if key not in self._plan_index:
            self._plan_index[key] = -1
            try:
                plan = self._plan_of(header.plan)
            except UserError as error:
                self.find(f"{where}: {error}")
                return -1
            if plan.virtual_ranks != header.virtual_ranks:
                self.find(
                    f"{where}: the plan has {plan.virtual_ranks} virtual ranks "
                    f"but the header {header.virtual_ranks}"
                )
                return -1
            self._plan_index[key] = len(self._plans)
            self._plans.append(plan)
        return self._plan_index[key]

    def _take(self, where: str, header: HeaderLine | None, plan: int, entry: StepLine) -> None:
        if header is None:
            self.find(f"{where}: step {entry.step} comes before any header")
            return
        vranks = header.virtual_ranks
        lengths = {name: len(getattr(entry, name)) for name in ("hosts", "counts", "digests")}
        lengths["gradients"] = len(entry.all_gradients()) or vranks  # either all or none
        for name, length in lengths.items():
            if length != vranks:
                self.find(
                    f"{where}: step {entry.step} has {length} {name} for {vranks} virtual ranks"
                )
                return
        if wrong := self.left_out.find_fault(header, entry.bad):
            self.find(f"{where}: step {entry.step} {wrong}")
            return
        self.copies += 1
        marks = _hash(entry.counts), _hash(entry.digests)
        bad = tuple(sorted(entry.bad.items()))
        place = entry.place
        if place.uses is Uses.NO_SAMPLES:
            place = replace(place, told="")
        handed = tuple(sorted(entry.handed.items()))
        more: list[int | str | None] = [None] * 4  # older releases lack these
        if header.format > 1:
            more[:2] = _hash((entry.losses,)), entry.state
        if header.format > 2:
            more[2:] = _hash((entry.gradients,)), entry.sum
        content = (plan, place, *marks, entry.loss, bad, handed, *more)
        commit = entry.hosts if header.backup else ()  # done again, other tasks may be dropped
        step = self.steps.get(entry.step)
        if step is None:
            plan = self._find_covering(where, plan, entry.place)
            step = _Step(contents={}, where=where, view=-1, plan=plan, place=entry.place)
            self.steps[entry.step] = step
        known = step.contents.setdefault(commit, content)
        if known is content:
            if step.plan >= 0 and entry.view > step.view:
                step.view, step.skipped = entry.view, _count_skipped(entry)
                covering = self._plans[step.plan]
                if isinstance(covering, Plan):
                    step.dropped = self._find_dropped(where, header, entry)
                    before = self.left_out.left_out_records(header.dataset, entry.place.index)
                    self._compare(where, covering, entry, step, before)
                else:
                    step.marks = entry.counts, [int(digest, 16) for digest in entry.digests]
        elif known != content:
            differing = [
                name
                for name, ours, theirs in zip(_CONTENT, known, content, strict=True)
                if ours != theirs and ours is not None and theirs is not None
            ]
            if differing:
                what = ", ".join(differing)
                self.find(f"{where}: step {entry.step} differs from {step.where} in {what}")
        writer = (header.worker, header.incarnation)
        if any(writer == other for _, _, other in step.commits):
            self.find(f"{where}: step {entry.step} is written twice by incarnation {writer}")
        hosts = self._hosts.setdefault(entry.hosts, entry.hosts)
        step.commits.append((entry.view, hosts, writer))
        if entry.place.uses is Uses.NO_SAMPLES:
            self._check_told(where, step, hosts, entry)

    def _check_told(
        self, where: str, step: _Step, hosts: tuple[Host, ...], entry: StepLine
    ) -> None:
        """Check that all copies of one commit name the same agreed value.

        It comes from outside (a time, a choice). So if all workers are lost and the step is done
        again, by other hosts, they may agree on another one.
        """
        known = step.told.setdefault(hosts, entry.told)
        if known != entry.told:
            self.find(
                f"{where}: step {entry.step} differs from another copy of its commit in the value "
                f"that was agreed on: {entry.told[:80]} and {known[:80]}"
            )

    def _find_covering(self, where: str, index: int, place: Place) -> int:
        """Return `index` if that plan has the step and can be recomputed; else -1."""
        if index < 0 or place.uses is Uses.NO_SAMPLES:
            return -1
        plan, number = self._plans[index], place.index
        if number < plan.first_step:
            self.find(f"{where}: step {number} is before the plan's first, {plan.first_step}")
            return -1
        if isinstance(plan, Plan) and plan.step_samples(number) > STEP_SAMPLES_MAX:
            self.find(f"{where}: step {number} is too large to be recomputed")
            return -1
        return index

    def _find_dropped(self, where: str, header: HeaderLine, entry: StepLine) -> tuple[int, ...]:
        """Return the vranks of a step that its workers were allowed to drop, and did."""
        if 0 not in entry.counts:
            return ()
        marks = enumerate(zip(entry.counts, entry.digests, strict=True))
        found = [vrank for vrank, (count, digest) in marks if not count and not int(digest, 16)]
        hosts = {entry.hosts[vrank] for vrank in found}
        if header.backup and len(hosts) > header.backup:
            self.find(
                f"{where}: step {entry.step} dropped the results of {len(hosts)} workers, but may "
                f"drop those of {header.backup}"
            )
        return tuple(found) if len(hosts) <= header.backup else ()

    def _compare(
        self, where: str, plan: Plan, entry: StepLine, step: _Step, before: frozenset[int]
    ) -> None:
        """Record the vranks whose counts or digests are not the plan's, except dropped ones.

        `before`: the records that were quarantined in earlier steps.
        """
        wrong, others = [], 0
        for vrank, planned in enumerate(plan.step_tasks(entry.place.index)):
            if vrank in step.dropped:
                continue
            told = entry.bad.get(vrank, ())
            task, problem = self.left_out.used_records(plan, planned, before, told)
            others += int(np.count_nonzero(task != planned))
            name = f"{where}: step {entry.step} virtual rank {vrank}"
            count, digest = entry.counts[vrank], entry.digests[vrank]
            if problem:
                self.find(f"{name} {problem}")
                wrong.append(vrank)
            elif count != len(task):
                self.find(f"{name} used {count} samples, its plan has {len(task)}")
                wrong.append(vrank)
            elif digest != f"{plan.digest_of(task):016x}":
                self.find(f"{name} used other samples than its plan's: digest {digest}")
                wrong.append(vrank)
        step.wrong = tuple(wrong)
        step.replaced = others if entry.place.uses is Uses.SAMPLES else 0

    def check_steps(self) -> None:
        """Check that no step is missing, and none was committed twice while any worker survived.

        It also checks that all files of a step were allowed to drop the same number.
        """
        if len(self._backups) > 1:
            said = " but ".join(f"{b} in {where}" for b, where in self._backups.items())
            self.find(f"the number of backup workers differs: {said}")
        expected = 0
        for number in sorted(self.steps):
            if number > expected:
                self.find(f"no copy of step {_format_range(expected, number)}")
            expected = number + 1
            self._check_commits(number, self.steps[number])
        users: dict[int, int] = {}  # by sample of a step: its first user
        for number, step in sorted(self.steps.items()):
            index, uses = step.place.index, step.place.uses
            first = users.setdefault(index, number) if uses is Uses.SAMPLES else number
            if first != number:
                self.find(f"{step.where}: step {number} uses the samples of step {first} again")
            if uses is Uses.SAME_SAMPLES and index not in users:
                self.find(f"{step.where}: step {number} is the first to use its samples")

    def check_length(self, claims: Sequence[Claim]) -> None:
        """Check that the ledger has no fewer steps than each claim requires."""
        steps = max(self.steps, default=-1) + 1
        for claim in claims:
            if steps < claim.least:
                self.find(
                    f"proved up to step {steps} of {claim.steps}: {claim.source} says that the run "
                    "came further, and there is no copy of the steps since; if nodes had run "
                    "directories of their own, put all *.jsonl files into one"
                )
                return

    def check_streams(self) -> int:
        """Check that each step used the samples that came next; returns how many were used."""
        used = 0
        for number, plan in enumerate(self._plans):
            if not isinstance(plan, OrderedPlan):
                continue
            positions = plan.start()
            for index, step in sorted(self._find_first_uses().items()):
                if step.plan != number:
                    continue
                try:
                    positions = plan.position_after(positions, index, *step.marks, step.place.told)
                except (UserError, ValueError) as error:
                    self.find(f"{step.where}: {error}")
                    break
                used += sum(step.marks[0])
        return used

    def _check_commits(self, number: int, step: _Step) -> None:
        """Check that copies with different hosts stem from different commits.

        A step may be committed again only by workers that took no part in an earlier commit of it.
        Copies of one commit may differ in view: who learns of it late does so in a later view.
        """
        groups: dict[tuple[Host, ...], tuple[int, set[Host]]] = {}
        for view, hosts, writer in step.commits:
            first, involved = groups.get(hosts, (view, set(hosts)))
            groups[hosts] = (min(first, view), involved | {writer})
        if len(groups) == 1:
            return
        seen: set[Host] = set()
        last_view = -1
        for view, involved in sorted(groups.values(), key=lambda group: group[0]):
            again = sorted(seen & involved)
            if again or view == last_view:
                who = f"by {again}, which had done so before" if again else "by others"
                self.find(f"{step.where}: step {number} was committed again in view {view} {who}")
                return
            seen |= involved
            last_view = view
        self.replayed.append(number)

    def count_samples(self) -> tuple[int, int, int]:
        """Return (lost, repeated, used) samples, epoch by epoch, over all proved tasks."""
        lost = repeated = used = 0
        for index, plan in enumerate(self._plans):
            if not isinstance(plan, Plan):
                continue
            using = self._find_first_uses()
            numbers = sorted(n for n, step in using.items() if step.plan == index)
            expected = sum(
                plan.samples_before(stop) - plan.samples_before(start)
                for start, stop in self._ranges_of(plan, numbers)
            )
            distinct = 0
            epochs = [plan.epoch_of(number)[0] for number in numbers]
            for _, epoch in itertools.groupby(zip(epochs, numbers, strict=True), lambda e: e[0]):
                tasks = [
                    task
                    for _, number in epoch
                    for vrank, task in enumerate(plan.step_tasks(number))
                    if vrank not in (*using[number].wrong, *using[number].dropped)
                ]
                samples = np.sort(np.concatenate([np.empty(0, np.int64), *tasks]))
                again = int(np.count_nonzero(samples[1:] == samples[:-1]))
                repeated += again
                distinct += len(samples) - again
            used += distinct
            lost += expected - distinct
        return lost - sum(self.count_dropped()), repeated, used

    def _find_first_uses(self) -> dict[int, _Step]:
        """Return the steps that use samples for the first time, by the script's number."""
        steps = self.steps.values()
        return {s.place.index: s for s in steps if s.place.uses is Uses.SAMPLES}

    def count_dropped(self) -> list[int]:
        """Count the samples left out by choice, for each step in which there were some."""
        found = []
        for index, step in sorted(self._find_first_uses().items()):
            plan = self._plans[step.plan] if step.dropped else None
            tasks = plan.step_tasks(index) if isinstance(plan, Plan) else []
            found.append(sum(len(tasks[vrank]) for vrank in step.dropped))
        return [samples for samples in found if samples]

    def _ranges_of(self, plan: Plan, numbers: list[int]) -> list[tuple[int, int]]:
        """Return ranges of steps that the plan covers: `numbers`, and those missing before each."""
        present = sorted(self._find_first_uses())
        # A job may have begun with a model that was trained elsewhere, up to its first step's
        # number.
        began = self.steps[0].place.index if 0 in self.steps else 0
        previous = dict(zip(present, [began - 1, *present], strict=False))
        return [(max(previous[n] + 1, plan.first_step), n + 1) for n in numbers]


def _format_range(start: int, stop: int) -> str:
    return str(start) if stop == start + 1 else f"{start} to {stop - 1}"


def _count_skipped(entry: StepLine) -> int:
    """Count the samples of batches that the script has left out: these have no loss."""
    if entry.place.uses is not Uses.SAMPLES:
        return 0
    pairs = zip(entry.counts, entry.all_losses(), strict=False)
    return sum(count for count, loss in pairs if math.isnan(loss))


def _hash(values: tuple[Any, ...]) -> int:
    return xxhash.xxh3_64_intdigest(",".join(map(str, values)).encode())
