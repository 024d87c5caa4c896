"""Grades the results of checks by limits, and sums several findings up.

It does not know how anything was measured. docs/doctor.md has the sources of the limits between ok,
warn and fail. A pair is (warn, fail).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

Pair = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits separate ok, warn and fail; speeds are a second, fractions from 0 to 1."""

    # Against the median of the other machines: below this part of it.
    slow: Pair = (0.7, 0.5)  # arithmetic, memory
    slow_disk: Pair = (0.5, 0.2)  # shared storage varies more, and training waits for it less

    # Memory and processors.
    memory_available: Pair = (0.10, 0.01)  # below this part of what the machine or container has
    swap_used: float = 0.01  # warn above this part of the memory
    swap_pages_per_s: float = 100.0  # warn above, while running
    steal: Pair = (0.02, 0.20)  # above this part of the processors' time
    throttled: float = 0.10  # warn above this part of the scheduling periods
    cpu_pressure: float = 25.0  # warn above this % of the last minute (before a job only)
    memory_pressure: float = 5.0  # the same, for "full"
    io_pressure: float = 25.0

    # What processes may have.
    open_files: Pair = (4096, 512)
    processes: Pair = (4096, 512)
    shared_memory_bytes: Pair = (
        1 * GIB,
        16 * MIB,
    )  # or the need of the data loaders, if it is given

    # Disk.
    disk_free_bytes: Pair = (10 * GIB, 1 * GIB)
    disk_inodes: Pair = (0.05, 0.001)
    disk_write: Pair = (100e6, 10e6)
    disk_sync_s: Pair = (0.02, 1.0)  # median, on a machine that waits for a job
    disk_sync_busy_s: Pair = (5.0, 60.0)  # one, on a node that may be writing a checkpoint
    answer_s: float = 60.0  # a disk or GPU that has not answered for so long while running: fail

    # Network.
    round_trip_s: Pair = (0.01, 0.5)
    network: Pair = (100e6, 10e6)
    clock_s: Pair = (0.1, 1.0)

    # GPU.
    gpu_margin_c: int = 5  # warn when so close to the temperature at which it slows itself down
    gpu_slowdown_c: int = 90  # for a GPU that does not report that temperature
    gpu_corrected: int = 100  # warn above, since the driver was loaded
    gpu_memory_used_bytes: int = 2 * GIB  # warn above, before a job


def limit_text(sign: str, pair: Pair, scale: float = 1.0) -> str:
    """Put a pair of limits into words, for example: warn above 0.1, fail above 1."""
    return f"warn {sign} {pair[0] / scale:g}, fail {sign} {pair[1] / scale:g}"


REASON_MAX = 300


class Grade(enum.Enum):
    """Grade is a check's verdict on one thing."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    #: It is not measured, for a reason: evidence neither for nor against the machine.
    SKIPPED = "skipped"


_BADNESS = {Grade.SKIPPED: 0, Grade.OK: 1, Grade.WARN: 2, Grade.FAIL: 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Describes one check's measurement, its limit, and the remedy."""

    check: str  # the check's name (disk-sync, for example); documented in docs/doctor.md
    grade: Grade
    reason: str  # one line
    subject: str = ""  # one of several: GPU 3, a directory, a peer
    value: float | None = None
    unit: str = ""
    limit: str = ""  # in words, for example: warn above 0.1, fail above 1
    advice: str = ""  # the remedy; none where all is well

    def __post_init__(self) -> None:
        if self.grade is Grade.OK:
            object.__setattr__(self, "advice", "")

    @property
    def name(self) -> str:
        return f"{self.check} {self.subject}" if self.subject else self.check

    @property
    def line(self) -> str:
        return to_one_line(f"{self.name}: {self.reason}")


def to_one_line(text: str) -> str:
    """Turn a text into one bounded line of plain text, since reasons travel and are shown."""
    text = "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))
    return text if len(text) <= REASON_MAX else text[: REASON_MAX - 3] + "..."


def make_skipped(check: str, reason: str) -> Finding:
    """Make the finding that something was not measured."""
    return Finding(check=check, grade=Grade.SKIPPED, reason=reason)


def warn_if(bad: bool) -> Grade:
    """Grade a property that is well or worth a warning."""
    return Grade.WARN if bad else Grade.OK


def fail_if(bad: bool) -> Grade:
    """Grade a property that is well or broken."""
    return Grade.FAIL if bad else Grade.OK


def grade_above(value: float, warn: float, fail: float) -> Grade:
    """Grade a value that should be low; NaN fails, because a measurement is wrong."""
    if not value <= fail:
        return Grade.FAIL
    return warn_if(value > warn)


def grade_below(value: float, warn: float, fail: float) -> Grade:
    """Grade a value that should be high; NaN fails, because a measurement is wrong."""
    if not value >= fail:
        return Grade.FAIL
    return warn_if(value < warn)


def worst(findings: Iterable[Finding]) -> Grade:
    """Return the worst grade; all skipped is OK, because there is no evidence of a fault."""
    found = max((f.grade for f in findings), key=_BADNESS.__getitem__, default=Grade.OK)
    return Grade.OK if found is Grade.SKIPPED else found


def summary(findings: Sequence[Finding]) -> str:
    """Return a sentence on whether a machine with these findings may join a job."""
    failed = [f for f in findings if f.grade is Grade.FAIL]
    warned = [f for f in findings if f.grade is Grade.WARN]
    more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
    if failed:
        return to_one_line(f"NOT FIT to join: {failed[0].line}{more}")
    if warned:
        count = "1 warning" if len(warned) == 1 else f"{len(warned)} warnings"
        names = ", ".join(dict.fromkeys(f.check for f in warned))
        return to_one_line(f"fit to join, with {count}: {names}")
    return "fit to join"
