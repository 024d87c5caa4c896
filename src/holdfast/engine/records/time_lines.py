"""Writes and reads how each worker spent its time: JSON lines in a run's folder times/.

Each process of a worker appends to a file of its own. A line holds the seconds by use since the
line before, so the uses of a file sum up to the life of its process. Must not know torch.
"""

from __future__ import annotations

import contextlib
import enum
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from holdfast.engine.records.clocks import ClockLine, choose_clock, read_clocks
from holdfast.engine.state.store.regular_files import (
    append_regular,
    read_whole_lines,
    regular_stream,
)

TIMES_DIR = "times"
LINE_BYTES_MAX = 64 << 10
LAST_BYTES = 32 << 10  # read from the end of a file for an estimate
LAST_FILES = 4
_Natural = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
_StepClass = Annotated[int, msgspec.Meta(ge=0, lt=512)]  # up to 58 million years
_Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1e10)]


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
    SPARE = "spare"  # it waits as a member that hosts nothing
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

CLASSES_PER_OCTAVE = 8
SHORTEST_STEP_S = 1e-4


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
    began: float  # seconds since the epoch
    host: str = ""
    lines: list[SpentLine] = field(default_factory=list)
    clock: ClockLine | None = None  # its node's clock, if that was measured

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


def read_last_times(run_dir: str | os.PathLike[str]) -> list[list[SpentLine]]:
    """Return the last lines of the files that were written last, beginning with the newest file."""
    try:
        ages = {p: p.stat().st_mtime_ns for p in (Path(run_dir) / TIMES_DIR).glob("*.jsonl")}
    except OSError:  # one has gone meanwhile
        return []
    newest = sorted(ages, key=ages.__getitem__, reverse=True)[:LAST_FILES]
    return [list(_read_last_lines(path)) for path in newest]


def _read_last_lines(path: Path) -> Iterator[SpentLine]:
    try:
        with regular_stream(path) as file:
            file.seek(max(file.seek(0, os.SEEK_END) - LAST_BYTES, 0))
            lines = file.read(LAST_BYTES).split(b"\n")[:-1]
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
