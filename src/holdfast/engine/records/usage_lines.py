"""Writes and reads the use of processors, memory and network of each node and of its workers.

Each node's agent appends JSON lines to a file of its own, in a run's folder usage/. Processors are
counted in whole ones that were busy, network traffic in bytes a second. A file never exceeds
`BYTES_MAX` by more than a line: before, each two of its lines become one. Must not know processes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import quote, unquote

import msgspec

from holdfast.engine.records.time_lines import choose_clock, read_clocks
from holdfast.engine.state.store.regular_files import append_regular, read_whole_lines

USAGE_DIR = "usage"
BYTES_MAX = 2 << 20
LINE_BYTES_MAX = 64 << 10
GAP = 1.5  # spans from the end of a line to the middle of the next, with a gap of the curves
_Natural = Annotated[int, msgspec.Meta(ge=0, lt=1 << 60)]
_Worker = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
_Amount = Annotated[float, msgspec.Meta(ge=0, lt=1e18)]
Point = tuple[float, float]
Curves = dict[str, dict[str, list[Point]]]  # by measure, and by node, worker or direction


class UsageHeader(
    msgspec.Struct, tag="header", tag_field="kind", forbid_unknown_fields=True, frozen=True
):
    """Names the node. `host`: its address. `cores`, `memory_bytes`: the most that it can use."""

    node: str
    host: str
    cores: _Natural
    memory_bytes: _Natural
    format: Literal[1] = 1


class WorkerUse(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Describes the use of a worker, together with the processes that it has started."""

    cores: _Amount
    memory_bytes: _Natural


class UsageLine(
    msgspec.Struct, tag="used", tag_field="kind", forbid_unknown_fields=True, frozen=True
):
    """Describes `span_s` seconds that end `at` a time of the node's clock, since the epoch.

    Of the memory it has the most that was seen.
    """

    at: _Amount
    span_s: _Amount
    cores: _Amount
    memory_bytes: _Natural
    received: _Amount
    sent: _Amount
    workers: dict[_Worker, WorkerUse] = {}


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(UsageHeader | UsageLine).decode


def merge_lines(lines: Sequence[UsageLine]) -> UsageLine:
    """Return one line for consecutive ones."""
    span_s = sum(line.span_s for line in lines) or 1e-9

    def average(values: Mapping[int, float]) -> float:
        """Return the mean over the whole span; `values`: by position."""
        return sum(lines[n].span_s * value for n, value in values.items()) / span_s

    workers = {}
    for worker in sorted({worker for line in lines for worker in line.workers}):
        uses = {n: each.workers[worker] for n, each in enumerate(lines) if worker in each.workers}
        workers[worker] = WorkerUse(
            average({n: use.cores for n, use in uses.items()}),
            max(use.memory_bytes for use in uses.values()),
        )
    return UsageLine(
        at=lines[-1].at,
        span_s=span_s,
        cores=average({n: line.cores for n, line in enumerate(lines)}),
        memory_bytes=max(line.memory_bytes for line in lines),
        received=average({n: line.received for n, line in enumerate(lines)}),
        sent=average({n: line.sent for n, line in enumerate(lines)}),
        workers=workers,
    )


class UsageWriter:
    """Appends to the file of one node. A disk that refuses costs lines only."""

    def __init__(self, run_dir: Path, header: UsageHeader, bytes_max: int = BYTES_MAX) -> None:
        self._path = run_dir / USAGE_DIR / f"{quote(header.node, safe='')}.jsonl"
        self._header = header
        self._bytes_max = bytes_max
        self._has_begun = False
        self._waiting: list[UsageLine] = []
        self._pace = 1  # lines that become one

    def append(self, line: UsageLine) -> None:
        """Write a line; once the file has been full, one line for several."""
        self._waiting.append(line)
        if len(self._waiting) < self._pace:
            return
        line, self._waiting = merge_lines(self._waiting), []
        with contextlib.suppress(OSError):
            data = b"" if self._has_begun else _encode(self._header) + b"\n"
            if self._write(data + _encode(line) + b"\n") > self._bytes_max:
                self._thin()
            self._has_begun = True

    def _write(self, data: bytes) -> int:
        """Append to the file in one write; return its size."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = append_regular(self._path)
        try:
            os.write(file, data)
            return os.fstat(file).st_size
        finally:
            os.close(file)

    def _thin(self) -> None:
        """Make one line of each two, in another file that takes the place of this one."""
        lines = [line for line in _read_lines(self._path) if isinstance(line, UsageLine)]
        pairs = [merge_lines(lines[n : n + 2]) for n in range(0, len(lines), 2)]
        draft = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        draft.write_bytes(b"".join(_encode(each) + b"\n" for each in (self._header, *pairs)))
        draft.replace(self._path)
        self._pace *= 2


@dataclass(slots=True)
class NodeUsage:
    """Keeps the lines of one node in their order. `correction_s`: to subtract from its times."""

    header: UsageHeader
    lines: list[UsageLine] = field(default_factory=list)
    correction_s: float = 0.0

    def list_curves(self, began: float) -> Curves:
        """Return the curves of all measures over the seconds since `began`, with NaN for gaps."""
        workers = sorted({worker for line in self.lines for worker in line.workers})
        found: Curves = {"cores": {"node": []}, "memory": {"node": []}, "network": {}}
        end = float("inf")
        for line in self.lines:
            middle = line.at - self.correction_s - began - line.span_s / 2
            if middle - end > GAP * line.span_s:
                self._add(found, middle - line.span_s, None, workers)
            self._add(found, middle, line, workers)
            end = middle + line.span_s / 2
        return found

    def _add(self, found: Curves, at: float, line: UsageLine | None, workers: list[int]) -> None:
        values = {
            ("cores", "node"): line.cores if line else None,
            ("memory", "node"): line.memory_bytes if line else None,
            ("network", "received"): line.received if line else None,
            ("network", "sent"): line.sent if line else None,
        }
        for worker in workers:
            use = line.workers.get(worker) if line else None
            values["cores", f"worker {worker}"] = use.cores if use else None
            values["memory", f"worker {worker}"] = use.memory_bytes if use else None
        for (measure, name), value in values.items():
            points = found[measure].setdefault(name, [])
            points.append((at, float("nan") if value is None else float(value)))


def list_nodes(run_dir: Path) -> list[str]:
    """Return the names of the nodes that have written their use to this run directory."""
    return sorted(unquote(path.stem) for path in (run_dir / USAGE_DIR).glob("*.jsonl"))


def read_usage(run_dir: Path, node: str) -> NodeUsage | None:
    """Return the use of a node, or None. A line that cannot be read is left out."""
    found: NodeUsage | None = None
    for line in _read_lines(run_dir / USAGE_DIR / f"{quote(node, safe='')}.jsonl"):
        if isinstance(line, UsageHeader):
            found = NodeUsage(line, found.lines if found else [])
            continue
        # A mirror of a long file lacks its beginning.
        found = found or NodeUsage(UsageHeader(node, "", 0, 0))
        found.lines.append(line)
    if found is not None and found.lines:
        clocks = read_clocks(run_dir).get(found.header.host, ())
        clock = choose_clock(clocks, found.lines[0].at)
        found.correction_s = clock.correction_s if clock is not None else 0.0
    return found


def read_all_usage(run_dir: Path) -> list[NodeUsage]:
    """Return the use of all nodes, by their names."""
    found = (read_usage(run_dir, node) for node in list_nodes(run_dir))
    return [usage for usage in found if usage is not None]


def _read_lines(path: Path) -> Iterator[UsageHeader | UsageLine]:
    for data in read_whole_lines(path, LINE_BYTES_MAX):
        with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
            yield _decode(data)
