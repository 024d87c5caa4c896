"""Keeps how far the clock of each node is ahead of the coordinator's, as the node's agent measures.

An agent sends its time, and the coordinator answers with its own. The coordinator's clock was read
between the question and the answer, so half of the round trip bounds the error.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

import msgspec

from holdfast.engine.state.store.regular_files import append_regular, read_whole_lines

CLOCKS_DIR = "clocks"
NEAR_S = 600.0
_LINE_BYTES_MAX = 4096


class ClockLine(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Describes one measurement, in seconds. `at`: by the node's clock, since the epoch."""

    host: str
    at: float
    ahead_s: float
    error_s: float

    @property
    def correction_s(self) -> float:
        """Return what to subtract from the node's times; 0 if the clocks may be the same."""
        return self.ahead_s if abs(self.ahead_s) > self.error_s else 0.0


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(ClockLine).decode


def measure(host: str, asked: float, told: float, heard: float) -> ClockLine | None:
    """Return a measurement; None if the node's clock was set back meanwhile.

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
        for data in read_whole_lines(path, _LINE_BYTES_MAX):
            with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
                line = _decode(data)
                found.setdefault(line.host, []).append(line)
    return found


def choose_clock(lines: Sequence[ClockLine], at: float) -> ClockLine | None:
    """Return the best measurement made around a time of the node's clock, else the nearest one.

    Clocks drift, and are set, so one that is much older or newer says little.
    """
    near = [line for line in lines if abs(line.at - at) <= NEAR_S]
    if near:
        return min(near, key=lambda line: line.error_s)
    return min(lines, key=lambda line: abs(line.at - at), default=None)
