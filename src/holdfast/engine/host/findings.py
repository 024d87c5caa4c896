"""Grades what a check says of a machine, and sums several findings up.

It knows nothing of how anything was measured.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

REASON_MAX = 300


class Grade(enum.Enum):
    """Grade is what a check says of one thing."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIPPED = "skipped"  # not measured, and why: it speaks neither for nor against the machine


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
    advice: str = ""  # what to do; empty when there is nothing to do

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
    """Grade a value that should be low; one that is no number fails, since something lies."""
    if not value <= fail:
        return Grade.FAIL
    return warn_if(value > warn)


def grade_below(value: float, warn: float, fail: float) -> Grade:
    """Grade a value that should be high; one that is no number fails, since something lies."""
    if not value >= fail:
        return Grade.FAIL
    return warn_if(value < warn)


def keep_if_needed(grade: Grade, advice: str) -> str:
    """Keep an advice only where there is something to do: after a warning or a failure."""
    return advice if grade in (Grade.WARN, Grade.FAIL) else ""


def worst(findings: Iterable[Finding]) -> Grade:
    """Return the worst grade; all skipped is OK, since nothing speaks against the machine."""
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
