"""Writes and reads how each worker spent its time, and how far the clock of each node is ahead.

Each process of a worker appends JSON lines to a file of its own, in a run's folder times/. A line
holds the seconds by use since the line before, so the uses of a file sum up to the life of its
process. In the folder clocks/, each node's agent writes how far its clock is ahead of the
coordinator's. An agent sends its time, and the coordinator answers with its own. The coordinator's
clock was read between the question and the answer, so half of the round trip bounds the error.
Must not know torch.
"""

from __future__ import annotations

import contextlib
import enum
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import quote

import msgspec

from holdfast.engine.state.store.regular_files import (
    append_regular,
    read_end,
    read_whole_lines,
)

TIMES_DIR = "times"
LINE_BYTES_MAX = 64 << 10
LAST_BYTES = 32 << 10  # read from the end of a file for an estimate
LAST_FILES = 4
_Natural = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
_StepClass = Annotated[int, msgspec.Meta(ge=0, lt=512)]  # up to 58 million years
_Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1e10)]
CLASSES_PER_OCTAVE = 8
SHORTEST_STEP_S = 1e-4
CLOCKS_DIR = "clocks"
NEAR_S = 600.0
CLOCK_BYTES_MAX = 4096


class TimeUse(str, enum.Enum):  # a string: those are hashed quickly
    """Names what a worker's script thread can be at."""

    STARTING = "starting"  # the process has begun, and the script has not joined the job yet
    JOINING = "joining"  # the script has joined; the worker has begun no step yet
    TRANSFER = "transfer"  # it waits for the job's state, or for steps that it has missed
    DATA = "data"  # it waits for a batch
    TASK = "task"  # it computes tasks that it hosts
    AGAIN = "again"  # it computes tasks of a step once more, or those of a lost worker
    CHECK = "check"  # it computes tasks of others: to compare them, or because they are late
    STATES = "states"  # it loads or packs states of virtual ranks, within tasks
    UPDATE = "update"  # the script's own lines between the batches of two steps
    SAVE = "save"  # it copies its share of the state
    WAIT = "wait"  # it waits for other workers of the view
    # It waits as a member without virtual ranks.
    SPARE = "spare"
    STALL = "stall"  # it waits, and there is no view that could commit a step
    END = "end"  # it waits at the end of a loop
    FROZEN = "frozen"  # no thread of the process ran


class ProcessHeader(
    msgspec.Struct, tag="header", tag_field="kind", forbid_unknown_fields=True, frozen=True
):
    """Names the process. `began`: seconds since the epoch. `host`: address of its node."""

    worker: _Natural
    incarnation: _Natural
    began: _Seconds
    host: str = ""
    format: Literal[1] = 1


class SpentLine(
    msgspec.Struct,
    tag="spent",
    tag_field="kind",
    forbid_unknown_fields=True,
    omit_defaults=True,
    frozen=True,
):
    """Describes how the time since the line before was spent.

    `step`: steps committed so far; `steps`: those among them whose end came since the line before,
    counted by how long they took (see `step_class`). `left`: steps that the script's loop has
    until its planned end; 0: not known, or there is no loop.
    """

    step: _Natural
    spent: dict[TimeUse, _Seconds]
    steps: dict[_StepClass, _Natural] = {}
    left: _Natural = 0

    @property
    def seconds(self) -> float:
        return sum(self.spent.values())


Line = ProcessHeader | SpentLine
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Line).decode


def times_path(run_dir: str | os.PathLike[str], worker: int, incarnation: int) -> Path:
    """Return the file of one incarnation of a worker."""
    return Path(run_dir) / TIMES_DIR / f"worker-{worker:05d}-{incarnation:05d}.jsonl"


class TimesWriter:
    """Appends to one file, with one write per line. A disk that refuses does not stop training."""

    def __init__(self, path: Path, header: ProcessHeader) -> None:
        self._path = path
        self._before = _encode(header) + b"\n"  # bytes that come before the next line
        self._file: int | None = None

    def append(self, line: SpentLine) -> bool:
        """Write a line; return whether it is in the file whole."""
        data = self._before + _encode(line) + b"\n"
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = append_regular(self._path)
            size = os.fstat(self._file).st_size
            if os.write(self._file, data) < len(data):
                os.ftruncate(self._file, size)  # half a line must not stay in front of later ones
                return False
        except OSError:
            return False
        self._before = b""
        return True


@dataclass(slots=True)
class ProcessTimes:
    """Keeps the lines of one process in the order in which they were written."""

    worker: int
    incarnation: int
    #: Beginning of the process, in seconds since the epoch.
    began: float
    host: str = ""
    lines: list[SpentLine] = field(default_factory=list)
    #: The clock of the process's node, if it was measured.
    clock: ClockLine | None = None

    @property
    def ended(self) -> float:
        """Return the time of the last line, in seconds since the epoch."""
        return self.began + sum(line.seconds for line in self.lines)

    def walk(self) -> Iterator[tuple[float, SpentLine]]:
        """Yield each line with the time at which it began."""
        at = self.began
        for line in self.lines:
            yield at, line
            at += line.seconds


def read_times(run_dir: str | os.PathLike[str]) -> list[ProcessTimes]:
    """Return the times of all processes, by worker and incarnation; none if there are none.

    They are those of the coordinator's clock, where the clocks were compared. A line that cannot be
    read is left out.
    """
    found, clocks = [], read_clocks(run_dir)
    for path in sorted((Path(run_dir) / TIMES_DIR).glob("*.jsonl")):
        times: ProcessTimes | None = None
        for line in _read_lines(path):
            if isinstance(line, ProcessHeader):
                times = times or ProcessTimes(line.worker, line.incarnation, line.began, line.host)
            elif times is not None:
                times.lines.append(line)
        if times is not None:
            times.clock = choose_clock(clocks.get(times.host, ()), times.began)
            if times.clock is not None:
                times.began -= times.clock.correction_s
            found.append(times)
    return found


def read_beginning(run_dir: str | os.PathLike[str], worker: int, incarnation: int) -> float | None:
    """Return when a process began, by its node's clock; None if it has recorded no times."""
    line = next(_read_lines(times_path(run_dir, worker, incarnation)), None)
    return line.began if isinstance(line, ProcessHeader) else None


def read_last_times(run_dir: str | os.PathLike[str]) -> list[list[SpentLine]]:
    """Return the last lines of the files that were written last, beginning with the newest file."""
    try:
        ages = {p: p.stat().st_mtime_ns for p in (Path(run_dir) / TIMES_DIR).glob("*.jsonl")}
    # One has been removed since the list was made.
    except OSError:
        return []
    newest = sorted(ages, key=ages.__getitem__, reverse=True)[:LAST_FILES]
    return [list(_read_last_lines(path)) for path in newest]


def _read_last_lines(path: Path) -> Iterator[SpentLine]:
    try:
        lines = read_end(path, LAST_BYTES)[:-1]
    except OSError:
        return
    for data in lines:
        with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
            line = _decode(data)  # the first one may lack its beginning
            if isinstance(line, SpentLine):
                yield line


def _read_lines(path: Path) -> Iterator[Line]:
    for line in read_whole_lines(path, LINE_BYTES_MAX):
        with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
            yield _decode(line)


def step_class(seconds: float) -> int:
    """Return the class of a step by its length: each is 2^(1/8), or 9 %, above the one before."""
    ratio = max(seconds, SHORTEST_STEP_S) / SHORTEST_STEP_S
    found = 0
    # Exact for any float, and without the rounding of a logarithm at the borders of octaves.
    while ratio >= 2.0:
        ratio, found = ratio / 2.0, found + CLASSES_PER_OCTAVE
    return found + sum(
        ratio >= 2.0 ** (k / CLASSES_PER_OCTAVE) for k in range(1, CLASSES_PER_OCTAVE)
    )


def class_seconds(number: int) -> float:
    """Return the middle of a class of lengths, in seconds."""
    return float(SHORTEST_STEP_S * 2.0 ** ((number + 0.5) / CLASSES_PER_OCTAVE))


def find_quantile(counts: Mapping[int, int], share: float) -> float:
    """Return the length in seconds that this share of all counted steps does not exceed; 0: none.

    It is right to 5 %, as the classes are.
    """
    total, seen = sum(counts.values()), 0
    for number in sorted(counts):
        seen += counts[number]
        if seen >= share * total:
            return class_seconds(number)
    return 0.0


class ClockLine(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Describes one measurement, in seconds. `at`: by the node's clock, since the epoch."""

    host: str
    at: float
    ahead_s: float
    error_s: float

    @property
    def correction_s(self) -> float:
        """Return the seconds to subtract from the node's times; 0 if the clocks may be the same."""
        return self.ahead_s if abs(self.ahead_s) > self.error_s else 0.0


_decode_clock = msgspec.json.Decoder(ClockLine).decode


def measure(host: str, asked: float, told: float, heard: float) -> ClockLine | None:
    """Return a measurement; None if the node's clock was set back in between.

    `asked`, `heard`: times of the question and of the answer, by the node's clock. `told`: the
    time of the coordinator's clock in the answer.
    """
    if heard < asked:
        return None
    middle, error_s = (asked + heard) / 2, (heard - asked) / 2
    return ClockLine(host=host, at=heard, ahead_s=middle - told, error_s=error_s)


def write_clock(run_dir: str | os.PathLike[str], node: str, line: ClockLine) -> None:
    """Append a measurement to the node's file. A disk that refuses does no harm."""
    path = Path(run_dir) / CLOCKS_DIR / f"{quote(node, safe='')}.jsonl"
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = append_regular(path)
        try:
            os.write(file, _encode(line) + b"\n")
        finally:
            os.close(file)


def read_clocks(run_dir: str | os.PathLike[str]) -> dict[str, list[ClockLine]]:
    """Return the measurements of each host's clock."""
    found: dict[str, list[ClockLine]] = {}
    for path in sorted((Path(run_dir) / CLOCKS_DIR).glob("*.jsonl")):
        for data in read_whole_lines(path, CLOCK_BYTES_MAX):
            with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
                line = _decode_clock(data)
                found.setdefault(line.host, []).append(line)
    return found


def choose_clock(lines: Sequence[ClockLine], at: float) -> ClockLine | None:
    """Return the best measurement made around a time of the node's clock, else the nearest one.

    Clocks drift, and are set, so a measurement that is much older or newer shows little.
    """
    near = [line for line in lines if abs(line.at - at) <= NEAR_S]
    if near:
        return min(near, key=lambda line: line.error_s)
    return min(lines, key=lambda line: abs(line.at - at), default=None)
