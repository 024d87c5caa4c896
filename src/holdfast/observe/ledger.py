"""Records which samples each committed step used, and proves that each was used exactly once.

Every incarnation of every worker appends to a file of its own, one JSON line per committed step, so
that all copies of a step must agree. Must not know torch, datasets or how samples are drawn: the
plan that the header names is made by the caller's `plan_of` and recomputed here. Invariant: nothing
in a file is trusted; whatever is wrong with it becomes a finding that names file and line.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Protocol

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from holdfast.core.errors import UserError, WorldError

LEDGER_DIR = "ledger"
LINE_BYTES_MAX = 1 << 26
FINDINGS_MAX = 1000
FINDING_CHARS_MAX = 1000  # it may quote what the file says
STEP_SAMPLES_MAX = 1 << 26  # a plan that claims more for one step is not recomputed

Host = tuple[int, int]  # (worker, incarnation)
_Natural = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
_Hex64 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerHeader:
    """Says who writes, and for which job. A later header in the same file names the next plan.

    `backup`: how many workers' results a step may drop.
    """

    seed: int
    virtual_ranks: int
    plan: Mapping[str, Any]
    worker: int
    incarnation: int
    backup: int = 0


class Uses(enum.Enum):
    """Says what a step uses of the dataset."""

    SAMPLES = "samples"
    SAME_SAMPLES = "same samples"  # as the step before it, in the script's same step
    NO_SAMPLES = "no samples"  # its members only told each other values


@dataclass(frozen=True, slots=True)
class Place:
    """Says which step of the job an entry is of, and which step of the script that is (`index`).

    The script's steps are those of the plan. They have other numbers if one of them consists of
    several of the job's.
    """

    step: int
    index: int
    uses: Uses = Uses.SAMPLES


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """Describes one committed step; `hosts`, `counts` and `digests` have one item per virtual rank.

    A task that was dropped has count and digest 0.
    """

    place: Place
    view: int
    hosts: Sequence[Host]
    counts: Sequence[int]
    digests: Sequence[int]
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerDoubt:
    """Says that steps from `step` on, committed in views up to `view`, may be wrong.

    `again`: they do not count and are done again; otherwise they stay, and the result is not exact.
    """

    step: int
    view: int
    again: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerReport:
    """Holds what `verify` found; `lost` and `repeated` count samples over all epochs.

    `inexact_since`: the first step whose result may differ from that of sound machines. `dropped`:
    samples of late workers that were left out by choice, in `dropped_in` steps.
    """

    findings: tuple[str, ...]
    files: int
    copies: int  # lines read, over all workers
    steps: int  # distinct steps
    samples: int  # proved to have been used
    lost: int
    repeated: int
    replayed: tuple[int, ...]  # steps committed again after all workers were lost
    torn: int  # files whose last line was cut off by the death of their writer
    inexact_since: int | None = None
    dropped: int = 0
    dropped_in: int = 0

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


class Plan(Protocol):
    """Declares what `verify` needs of a plan; `train.sampling.SamplePlan` is one."""

    @property
    def virtual_ranks(self) -> int: ...
    @property
    def first_step(self) -> int: ...
    def step_samples(self, step: int) -> int: ...
    def step_tasks(self, step: int) -> list[NDArray[np.int64]]: ...
    def digest_of(self, indices: NDArray[np.int64]) -> int: ...
    def epoch_of(self, step: int) -> tuple[int, int]: ...
    def samples_before(self, step: int) -> int: ...


PlanOf = Callable[[Mapping[str, Any]], Plan]


class _HeaderLine(
    msgspec.Struct,
    tag="header",
    tag_field="kind",
    forbid_unknown_fields=True,
    omit_defaults=True,
):
    seed: Annotated[int, msgspec.Meta(ge=0)]
    virtual_ranks: Annotated[int, msgspec.Meta(ge=1)]
    plan: dict[str, Any]
    worker: _Natural
    incarnation: _Natural
    backup: _Natural = 0


class _StepLine(
    msgspec.Struct, tag="step", tag_field="kind", forbid_unknown_fields=True, omit_defaults=True
):
    step: _Natural
    view: _Natural
    hosts: tuple[tuple[_Natural, _Natural], ...]
    counts: tuple[_Natural, ...]
    digests: tuple[_Hex64, ...]
    loss: str
    index: _Natural | None = None  # the plan's step, if that has another number
    uses: Uses = Uses.SAMPLES

    @property
    def place(self) -> Place:
        return Place(self.step, self.step if self.index is None else self.index, self.uses)


class _DoubtLine(msgspec.Struct, tag="doubt", tag_field="kind", forbid_unknown_fields=True):
    step: _Natural
    view: _Natural
    again: bool


_Line = _HeaderLine | _StepLine | _DoubtLine
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Line).decode
_DOUBT = b'"doubt"'  # occurs in each line that holds a doubt


def ledger_path(run_dir: str | os.PathLike[str], worker: int, incarnation: int) -> Path:
    """Return the file in which an incarnation of a worker keeps its copy."""
    return Path(run_dir) / LEDGER_DIR / f"worker-{worker:05d}-{incarnation:05d}.jsonl"


class LedgerWriter:
    """Appends to one file, with one write per line.

    A line is with the operating system before `append` returns: the death of the process loses
    none. It is not forced to the disk: the death of the machine may lose some.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file: int | None = None
        self._size = 0

    def begin(self, header: LedgerHeader) -> None:
        """Open the file if it is not open, and write the header of the entries that follow."""
        self._open()
        line = _HeaderLine(
            seed=header.seed,
            virtual_ranks=header.virtual_ranks,
            plan=dict(header.plan),
            worker=header.worker,
            incarnation=header.incarnation,
            backup=header.backup,
        )
        self._write(_encode(line))

    def append(self, entry: LedgerEntry) -> None:
        step, index, uses = entry.place.step, entry.place.index, entry.place.uses
        line = _StepLine(
            step=step,
            view=entry.view,
            hosts=tuple(entry.hosts),
            counts=tuple(entry.counts),
            digests=tuple(f"{digest:016x}" for digest in entry.digests),
            loss=float(entry.loss).hex(),
            index=None if index == step else index,
            uses=uses,
        )
        self._write(_encode(line))

    def doubt(self, doubt: LedgerDoubt) -> None:
        """Record a doubt, which also covers what other workers have written."""
        self._open()
        self._write(_encode(_DoubtLine(step=doubt.step, view=doubt.view, again=doubt.again)))

    def _open(self) -> None:
        if self._file is None:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                self._file = os.open(self.path, flags, 0o644)
                self._size = os.fstat(self._file).st_size
            except OSError as error:
                raise _disk_error(self.path, error) from error

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write(self, line: bytes) -> None:
        if self._file is None:
            raise WorldError(f"the ledger {self.path} is not open for writing")
        rest = memoryview(line + b"\n")
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            with contextlib.suppress(OSError):  # half a line must not stay in front of later ones
                os.ftruncate(self._file, self._size)
            raise _disk_error(self.path, error) from error
        self._size += len(line) + 1


def _disk_error(path: Path, error: OSError) -> Exception:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(
            f"the ledger {path} cannot grow ({error.strerror}): free space there or move the run"
        )
    return WorldError(f"the ledger {path} cannot be written: {error}")


def verify(run_dir: str | os.PathLike[str], plan_of: PlanOf) -> LedgerReport:
    """Check every copy of every step against the others, the plan and its epochs.

    It takes memory for a small record per step, and for the indices of one epoch. UserError when
    the run has no ledger.
    """
    directory = Path(run_dir) / LEDGER_DIR
    paths = sorted(directory.glob("*.jsonl"))
    if not os.path.isdir(run_dir):
        raise UserError(
            f"there is no run directory {run_dir}: `holdfast run` prints its own at start"
        )
    if not paths:
        raise UserError(f"{directory} has no *.jsonl files: name the directory of a run")
    audit = _Audit(plan_of, _doubts(paths))
    for path in paths:
        audit.read(path)
    audit.check_steps()
    lost, repeated, samples = audit.count_samples()
    dropped = audit.count_dropped()
    return LedgerReport(
        findings=tuple(audit.findings),
        files=len(paths),
        copies=audit.copies,
        steps=len(audit.steps),
        samples=samples,
        lost=lost,
        repeated=repeated,
        replayed=tuple(audit.replayed),
        torn=audit.torn,
        inexact_since=min((d.step for d in audit.doubts if not d.again), default=None),
        dropped=sum(dropped),
        dropped_in=len(dropped),
    )


def _doubts(paths: Sequence[Path]) -> list[_DoubtLine]:
    """Collect the doubts of all files: a worker may doubt what others have written."""
    found = []
    for path in paths:
        with contextlib.suppress(OSError), path.open("rb") as file:
            for line in iter(lambda: file.readline(LINE_BYTES_MAX), b""):
                if _DOUBT in line and line.endswith(b"\n"):
                    with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
                        value = _decode(line)
                        found += [value] if isinstance(value, _DoubtLine) else []
    return found


# What all copies of a step must agree on. Hashed, so that a million steps fit in memory.
_CONTENT = ("plan", "place", "counts", "digests", "loss")


@dataclass(slots=True)
class _Step:
    """Holds what is kept of one step while the files are read."""

    contents: dict[tuple[Host, ...], tuple[Any, ...]]  # as _CONTENT; by `hosts` if they may differ
    where: str  # file and line of the first copy
    view: int  # view of the newest commit
    plan: int  # its index, or -1 when it cannot be recomputed
    place: Place
    commits: list[tuple[int, tuple[Host, ...], Host]] = field(default_factory=list)
    wrong: tuple[int, ...] = ()  # vranks whose samples are not the plan's
    dropped: tuple[int, ...] = ()  # vranks whose samples were left out by choice


class _Audit:
    """Holds the state of one verification: files are read one by one, then steps are checked."""

    def __init__(self, plan_of: PlanOf, doubts: Sequence[_DoubtLine]) -> None:
        self.doubts = doubts
        self.findings: list[str] = []
        self.steps: dict[int, _Step] = {}
        self.replayed: list[int] = []
        self.copies = 0
        self.torn = 0
        self._plan_of = plan_of
        self._plans: list[Plan] = []
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
        header: _HeaderLine | None = None
        plan = -1
        try:
            with path.open("rb") as file:
                for number, line in enumerate(iter(lambda: file.readline(LINE_BYTES_MAX), b""), 1):
                    where = f"{path.name}:{number}"
                    if not line.endswith(b"\n"):
                        if len(line) == LINE_BYTES_MAX:
                            self.find(f"{where}: longer than {LINE_BYTES_MAX} bytes: not read on")
                        else:
                            self.torn += 1
                        return
                    match self._parse(where, line):
                        case _HeaderLine() as found:
                            header, plan = found, self._adopt(where, found)
                        case _StepLine() as entry if not self._withdrawn(entry):
                            self._take(where, header, plan, entry)
        except OSError as error:
            self.find(f"{path.name}: cannot be read: {error}")

    def _withdrawn(self, entry: _StepLine) -> bool:
        """Tell whether the step was done again because something wrong may have been used in it."""
        return any(d.again and entry.step >= d.step and entry.view <= d.view for d in self.doubts)

    def _parse(self, where: str, line: bytes) -> _Line | None:
        try:
            value = _decode(line)
            if isinstance(value, _StepLine):
                float.fromhex(value.loss)
            return value
        except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
            self.find(f"{where}: malformed: {error}")
            return None

    def _adopt(self, where: str, header: _HeaderLine) -> int:
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

    def _take(self, where: str, header: _HeaderLine | None, plan: int, entry: _StepLine) -> None:
        if header is None:
            self.find(f"{where}: step {entry.step} comes before any header")
            return
        vranks = header.virtual_ranks
        for name in ("hosts", "counts", "digests"):
            if len(getattr(entry, name)) != vranks:
                self.find(
                    f"{where}: step {entry.step} has {len(getattr(entry, name))} {name} "
                    f"for {vranks} virtual ranks"
                )
                return
        self.copies += 1
        content = (plan, entry.place, _hash(entry.counts), _hash(entry.digests), entry.loss)
        commit = entry.hosts if header.backup else ()  # done again, other tasks may be dropped
        step = self.steps.get(entry.step)
        if step is None:
            plan = self._covering(where, plan, entry.place)
            step = _Step(contents={}, where=where, view=-1, plan=plan, place=entry.place)
            self.steps[entry.step] = step
        known = step.contents.setdefault(commit, content)
        if known is content:
            if step.plan >= 0 and entry.view > step.view:
                step.view = entry.view
                step.dropped = self._dropped(where, header, entry)
                step.wrong = self._compare(where, self._plans[step.plan], entry, step.dropped)
        elif known != content:
            differing = [
                name
                for name, ours, theirs in zip(_CONTENT, known, content, strict=True)
                if ours != theirs
            ]
            self.find(
                f"{where}: step {entry.step} differs from {step.where} in {', '.join(differing)}"
            )
        writer = (header.worker, header.incarnation)
        if any(writer == other for _, _, other in step.commits):
            self.find(f"{where}: step {entry.step} is written twice by incarnation {writer}")
        hosts = self._hosts.setdefault(entry.hosts, entry.hosts)
        step.commits.append((entry.view, hosts, writer))

    def _covering(self, where: str, index: int, place: Place) -> int:
        """Return `index` if that plan has the step and can be recomputed; else -1."""
        if index < 0 or place.uses is Uses.NO_SAMPLES:
            return -1
        plan, number = self._plans[index], place.index
        if number < plan.first_step:
            self.find(f"{where}: step {number} is before the plan's first, {plan.first_step}")
            return -1
        if plan.step_samples(number) > STEP_SAMPLES_MAX:
            self.find(f"{where}: step {number} is too large to be recomputed")
            return -1
        return index

    def _dropped(self, where: str, header: _HeaderLine, entry: _StepLine) -> tuple[int, ...]:
        """Return the vranks of a step that its workers were allowed to drop, and did."""
        if 0 not in entry.counts:
            return ()
        marks = enumerate(zip(entry.counts, entry.digests, strict=True))
        found = [vrank for vrank, (count, digest) in marks if not count and not int(digest, 16)]
        hosts = {entry.hosts[vrank] for vrank in found}
        if header.backup and len(hosts) > header.backup:
            self.find(
                f"{where}: step {entry.step} dropped what {len(hosts)} workers computed, of which "
                f"it may drop {header.backup}"
            )
        return tuple(found) if len(hosts) <= header.backup else ()

    def _compare(
        self, where: str, plan: Plan, entry: _StepLine, dropped: Sequence[int]
    ) -> tuple[int, ...]:
        """Return the vranks whose counts or digests are not the plan's, except dropped ones."""
        wrong = []
        for vrank, task in enumerate(plan.step_tasks(entry.place.index)):
            if vrank in dropped:
                continue
            name = f"{where}: step {entry.step} virtual rank {vrank}"
            count, digest = entry.counts[vrank], entry.digests[vrank]
            if count != len(task):
                self.find(f"{name} used {count} samples, its plan has {len(task)}")
                wrong.append(vrank)
            elif digest != f"{plan.digest_of(task):016x}":
                self.find(f"{name} used other samples than its plan's: digest {digest}")
                wrong.append(vrank)
        return tuple(wrong)

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
                self.find(f"no copy of step {_span(expected, number)}")
            expected = number + 1
            self._check_commits(number, self.steps[number])
        users: dict[int, int] = {}  # of each step's samples: who was first
        for number, step in sorted(self.steps.items()):
            index, uses = step.place.index, step.place.uses
            first = users.setdefault(index, number) if uses is Uses.SAMPLES else number
            if first != number:
                self.find(f"{step.where}: step {number} uses the samples of step {first} again")
            if uses is Uses.SAME_SAMPLES and index not in users:
                self.find(f"{step.where}: step {number} is the first to use its samples")

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
                who = f"by {again}, who had done so before" if again else "by others"
                self.find(f"{step.where}: step {number} was committed again in view {view} {who}")
                return
            seen |= involved
            last_view = view
        self.replayed.append(number)

    def count_samples(self) -> tuple[int, int, int]:
        """Return (lost, repeated, used) samples, epoch by epoch, over all proved tasks."""
        lost = repeated = used = 0
        for index, plan in enumerate(self._plans):
            using = self._using()
            numbers = sorted(n for n, step in using.items() if step.plan == index)
            expected = sum(
                plan.samples_before(stop) - plan.samples_before(start)
                for start, stop in self._spans(plan, numbers)
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

    def _using(self) -> dict[int, _Step]:
        """Return the steps that use samples for the first time, by the script's number."""
        steps = self.steps.values()
        return {s.place.index: s for s in steps if s.place.uses is Uses.SAMPLES}

    def count_dropped(self) -> list[int]:
        """Count the samples left out by choice, for each step in which there were some."""
        found = []
        for index, step in sorted(self._using().items()):
            tasks = self._plans[step.plan].step_tasks(index) if step.dropped else []
            found.append(sum(len(tasks[vrank]) for vrank in step.dropped))
        return [samples for samples in found if samples]

    def _spans(self, plan: Plan, numbers: list[int]) -> list[tuple[int, int]]:
        """Return ranges of steps that the plan covers: `numbers`, and those missing before each."""
        present = sorted(self._using())
        previous = dict(zip(present, [-1, *present], strict=False))
        return [(max(previous[n] + 1, plan.first_step), n + 1) for n in numbers]


def _span(start: int, stop: int) -> str:
    return str(start) if stop == start + 1 else f"{start} to {stop - 1}"


def _hash(values: tuple[Any, ...]) -> int:
    return xxhash.xxh3_64_intdigest(",".join(map(str, values)).encode())
