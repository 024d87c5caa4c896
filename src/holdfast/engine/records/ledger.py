"""Records which samples each committed step used, and who computed it.

Every incarnation of every worker appends to a file of its own, one JSON line per committed step, so
that all copies of a step must agree (see ledger_audit.py). Must not know torch, datasets or how
samples are drawn.

The lines of a file are a chain: each has a digest of itself and of all lines before it. So a line
that was changed, left out or put in is found. A forger can compute all digests again, but the
copies of the other workers have to agree with them.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import hashlib
import os
import re
import struct
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from holdfast.engine.core.errors import UserError, WorldError, describe_newer_writer
from holdfast.engine.state.store.regular_files import (
    append_regular,
    read_whole_lines,
    regular_stream,
)

CHAIN_BEGIN = ""  # before the first line of a file
LINE_BYTES_MAX = 1 << 26
_CHAIN = re.compile(rb',"chain":"([0-9a-f]{16})"\}\n?$')
LEDGER_DIR = "ledger"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)  # a disk is full, or a quota is used up
_DOUBT = b'"doubt"'  # occurs in each line that holds a doubt
Host = tuple[int, int]  # (worker, incarnation)
_Natural = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
_HexList = Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{16})*$")]
_Hex64 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]
NOT_TAKEN = f"{0:016x}"
# 1 had no chain, no losses of tasks and no digests of the state; 2 had no digests of gradients
FORMAT: Literal[3] = 3


def add_chain(line: bytes, before: str) -> tuple[bytes, str]:
    """Return a JSON line with its chain, and the chain. `before`: the last line's chain."""
    chain = _digest(line, before)
    return b'%s,"chain":"%s"}' % (line[:-1], chain.encode()), chain


class ChainCheck:
    """Checks the chain of one file, line by line."""

    def __init__(self) -> None:
        self._chain = CHAIN_BEGIN

    def find_problem(self, line: bytes) -> str:
        """Return a problem of a line's chain, or "".

        The lines that follow are compared with the chain that this one has.
        """
        found = _CHAIN.search(line)
        if found is None:
            return "has no digest of the lines before it" if self._chain else ""
        chain, before = found[1].decode(), self._chain
        self._chain = chain
        if chain == _digest(line[: found.start()] + b"}", before):
            return ""
        return "was changed, or lines before it were changed, left out or put in"


def find_last_chain(path: Path) -> str:
    """Return the chain at the end of a file, which other lines may follow. OSError."""
    chain = CHAIN_BEGIN
    with regular_stream(path) as file:
        for line in iter(lambda: file.readline(LINE_BYTES_MAX), b""):
            found = _CHAIN.search(line)
            chain = found[1].decode() if found is not None else chain
    return chain


def _digest(line: bytes, before: str) -> str:
    return hashlib.blake2b(before.encode() + line, digest_size=8).hexdigest()


class Uses(enum.Enum):
    """Names the samples that a step uses."""

    SAMPLES = "samples"
    SAME_SAMPLES = "same samples"  # as the step before it, in the script's same step
    # The members of the view only handed each other values.
    NO_SAMPLES = "no samples"


@dataclass(frozen=True, slots=True)
class Place:
    """Places an entry in a step of the job, and in a step of the script (`index`).

    The script's steps are those of the plan. They have other numbers if one of them consists of
    several of the job's. `told`: the value that the members have agreed on, as JSON, if any.
    """

    step: int
    index: int
    uses: Uses = Uses.SAMPLES
    told: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDigests:
    """Keeps digests of 63 bits of a step's parts, other parts in each step; 0: not taken.

    `state`: of that with which it began. `gradients`: of each virtual rank's. `sum`: of the sum of
    these, as the optimizer has received it, but for its scale.
    """

    state: int = 0
    gradients: Sequence[int] = ()
    sum: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """Describes one committed step; `hosts`, `counts` and `digests` have one item per virtual rank.

    A task that was dropped has count and digest 0. `bad`: by virtual rank, the records that a task
    left out by itself, from the beginning of the script's step on. `handed`: by virtual rank, 63
    bits of the values and states that a task has handed over to all members. `losses`: of each
    virtual rank, as its task has computed it; NaN if the script has left out its batch. `of`:
    digests of what the step has computed.
    """

    place: Place
    view: int
    hosts: Sequence[Host]
    counts: Sequence[int]
    digests: Sequence[int]
    loss: float
    bad: Mapping[int, Sequence[int]] = field(default_factory=dict)
    handed: Mapping[int, int] = field(default_factory=dict)
    losses: Sequence[float] = ()
    of: StepDigests = StepDigests()


class HeaderLine(
    msgspec.Struct,
    tag="header",
    tag_field="kind",
    forbid_unknown_fields=True,
    omit_defaults=True,
):
    """Names the writer and the job. A later header in the same file names the next plan.

    `backup`: how many workers' results a step may drop. `dataset`: a number for each dataset with
    records that may be quarantined, from 1 on; `quarantined`: the records at this place.
    `digest_steps`: digests of gradients and sums cover every byte in this number of steps; 0: there
    are none.
    """

    seed: Annotated[int, msgspec.Meta(ge=0)]
    virtual_ranks: Annotated[int, msgspec.Meta(ge=1)]
    plan: dict[str, Any]
    worker: _Natural
    incarnation: _Natural
    backup: _Natural = 0
    dataset: _Natural = 0
    quarantined: tuple[_Natural, ...] = ()
    digest_steps: _Natural = 0
    #: The first ledgers omit it.
    format: Literal[1, 2, 3] = 1
    chain: _Hex64 | None = None


class _AnyHeader(msgspec.Struct, tag="header", tag_field="kind"):
    format: int


class StepLine(
    msgspec.Struct, tag="step", tag_field="kind", forbid_unknown_fields=True, omit_defaults=True
):
    step: _Natural
    view: _Natural
    hosts: tuple[tuple[_Natural, _Natural], ...]
    counts: tuple[_Natural, ...]
    digests: tuple[_Hex64, ...]
    loss: str
    #: The plan's step, if it has another number.
    index: _Natural | None = None
    uses: Uses = Uses.SAMPLES
    told: str = ""
    bad: dict[int, tuple[_Natural, ...]] = {}
    handed: dict[int, _Hex64] = {}
    #: The bits of the losses, one after the other.
    losses: _HexList = ""
    state: _Hex64 = NOT_TAKEN
    #: The digests of the gradients, one after the other.
    gradients: _HexList = ""
    sum: _Hex64 = NOT_TAKEN
    #: Digest of all lines of the file up to this one, without doubts.
    chain: _Hex64 | None = None

    def __post_init__(self) -> None:
        """Raise ValueError, which makes a line malformed, if the loss is no number."""
        try:
            float.fromhex(self.loss)
        except OverflowError:
            raise ValueError(f"the loss {self.loss[:40]} is too large") from None

    @property
    def is_consistent(self) -> bool:
        """Return whether the lists have an entry for each virtual rank, or are left out."""
        ranks = len(self.hosts)
        return (
            len(self.counts) == len(self.digests) == ranks
            and len(self.losses) in (0, 16 * ranks)
            and len(self.gradients) in (0, 16 * ranks)
        )

    def all_losses(self) -> tuple[float, ...]:
        """Return the losses of all virtual ranks; none if an older release has written the line."""
        data = bytes.fromhex(self.losses)
        return struct.unpack(f">{len(data) // 8}d", data)

    def all_gradients(self) -> tuple[str, ...]:
        """Return the digests of all virtual ranks' gradients; none if none was taken."""
        found = self.gradients
        return tuple(found[i : i + 16] for i in range(0, len(found), 16))

    @property
    def place(self) -> Place:
        index = self.step if self.index is None else self.index
        return Place(self.step, index, self.uses, self.told)


class DoubtLine(msgspec.Struct, tag="doubt", tag_field="kind", forbid_unknown_fields=True):
    """Declares steps from `step` on, committed in views up to `view`, doubtful.

    `again`: they do not count and are done again; otherwise they stay, and the result is not exact.
    """

    step: _Natural
    view: _Natural
    again: bool

    def withdraws(self, line: StepLine) -> bool:
        """Return whether a step was done again because something wrong may have been used in it."""
        return self.covers(line.step, line.view)

    def covers(self, step: int, view: int) -> bool:
        """Return whether a step that was committed in this view is withdrawn."""
        return self.again and step >= self.step and view <= self.view


Line = HeaderLine | StepLine | DoubtLine
_encode = msgspec.json.Encoder().encode
decode_line = msgspec.json.Decoder(Line).decode
_decode_any_header = msgspec.json.Decoder(_AnyHeader).decode


def newer_format_in(line: bytes) -> str:
    """Return the warning for a header line of a newer release's ledger; empty for other lines."""
    try:
        found = _decode_any_header(line).format
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return ""
    return describe_newer_writer(found, FORMAT) if found > FORMAT else ""


def ledger_path(run_dir: str | os.PathLike[str], worker: int, incarnation: int) -> Path:
    """Return the file in which an incarnation of a worker keeps its copy."""
    return Path(run_dir) / LEDGER_DIR / f"worker-{worker:05d}-{incarnation:05d}.jsonl"


def find_ledger_files(run_dir: str | os.PathLike[str]) -> list[Path]:
    """Return the files of a run's ledger, in order. UserError if there is none."""
    directory = Path(run_dir) / LEDGER_DIR
    if not os.path.isdir(run_dir):
        raise UserError(
            f"there is no run directory {run_dir}: `holdfast run` prints its own at start"
        )
    if not (paths := sorted(directory.glob("*.jsonl"))):
        raise UserError(f"{directory} has no *.jsonl files: name the directory of a run")
    return paths


def read_lines(path: Path, *, having: Sequence[bytes] = ()) -> Iterator[Line]:
    """Yield the lines of a file that are whole and can be read.

    `having`: only lines that contain one of these; by default all.
    """
    for line in read_whole_lines(path, LINE_BYTES_MAX):
        if not having or any(mark in line for mark in having):
            with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
                found = decode_line(line)
                if not isinstance(found, StepLine) or found.is_consistent:
                    yield found


def read_doubts(paths: Sequence[Path]) -> list[DoubtLine]:
    """Collect the doubts of all files: a worker may doubt another worker's lines."""
    every = (line for path in paths for line in read_lines(path, having=(_DOUBT,)))
    return [line for line in every if isinstance(line, DoubtLine)]


class LedgerWriter:
    """Appends to one file, with one write per line.

    A line is with the operating system before `append` returns: the death of the process loses
    none. It is not forced to the disk: the death of the machine may lose some. Where a full file
    system may be given room (`may_wait`), lines that it does not take are kept for `write_kept`.
    """

    def __init__(
        self, path: str | os.PathLike[str], may_wait: Callable[[], bool] = lambda: False
    ) -> None:
        self.path = Path(path)
        self._may_wait = may_wait
        self._file: int | None = None
        self._chain: str | None = None  # the last line's; None: not looked up yet
        self._kept: deque[tuple[bytes, bool]] = deque()  # without chain, and whether to have one

    def begin(self, header: HeaderLine) -> None:
        """Open the file if it is not open, and write the header of the entries that follow."""
        self._put(_encode(msgspec.structs.replace(header, format=FORMAT)), opens=True)

    def append(self, entry: LedgerEntry) -> None:
        step, index, uses = entry.place.step, entry.place.index, entry.place.uses
        gradients = entry.of.gradients if any(entry.of.gradients) else ()
        line = StepLine(
            step=step,
            view=entry.view,
            hosts=tuple(entry.hosts),
            counts=tuple(entry.counts),
            digests=tuple(f"{digest:016x}" for digest in entry.digests),
            loss=float(entry.loss).hex(),
            index=None if index == step else index,
            uses=uses,
            told=entry.place.told,
            bad={vrank: tuple(records) for vrank, records in entry.bad.items()},
            handed={vrank: f"{digest:016x}" for vrank, digest in entry.handed.items()},
            losses=struct.pack(f">{len(entry.losses)}d", *entry.losses).hex(),
            state=f"{entry.of.state:016x}",
            gradients="".join(f"{digest:016x}" for digest in gradients),
            sum=f"{entry.of.sum:016x}",
        )
        self._put(_encode(line))

    def doubt(self, doubt: DoubtLine) -> None:
        """Record a doubt, which also covers what other workers have written."""
        self._put(_encode(doubt), chained=False, opens=True)

    def write_kept(self) -> OSError | None:
        """Write the lines that were kept; return the error if there is still no room for one.

        Raises WorldError if they cannot be written for another reason.
        """
        while self._kept:
            line, is_chained = self._kept[0]
            try:
                self._open()
                self._write(line, is_chained=is_chained)
            except OSError as error:
                if error.errno in NO_ROOM and self._may_wait():
                    return error
                raise make_disk_error(self.path, error) from error
            self._kept.popleft()
        return None

    def _put(self, line: bytes, *, chained: bool = True, opens: bool = False) -> None:
        """Write the lines that were kept, and then this one, or keep it as well. WorldError."""
        if self._file is None and not (opens or self._kept):
            raise WorldError(f"the ledger {self.path} is not open for writing")
        self._kept.append((line, chained))
        try:
            self.write_kept()
        except WorldError:
            self._kept.clear()
            raise

    def _open(self) -> None:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = append_regular(self.path)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write(self, line: bytes, *, is_chained: bool) -> None:
        """Write one line, whole or not at all. OSError.

        `is_chained`: it gets the digest of all lines up to it.
        """
        assert self._file is not None, "the file is open"
        size = os.fstat(self._file).st_size
        chain = self._chain
        if is_chained:
            if chain is None:
                chain = find_last_chain(self.path) if size else CHAIN_BEGIN
            line, chain = add_chain(line, chain)
        rest = memoryview(line + b"\n")
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            with contextlib.suppress(OSError):  # half a line must not stay in front of later ones
                os.ftruncate(self._file, size)
            raise
        self._chain = chain


def make_disk_error(path: Path, error: OSError) -> WorldError:
    if error.errno in NO_ROOM:
        return WorldError(
            f"the ledger {path} cannot grow ({error.strerror}): free space there or move the run"
        )
    return WorldError(f"the ledger {path} cannot be written: {error}")
