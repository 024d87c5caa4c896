"""What is known of a machine's health: findings, and a verdict on a history of them.

A check turns measurements into findings (core/checks_*.py); a `Watch` turns the findings of
repeated checks into a verdict. It knows nothing of how anything was measured. Its invariant: no
single round of findings, however bad, ever drains a node, and a drained node is only taken back
after a clean probation, in which every check that drained it was seen to be well again.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from holdfast.core.errors import InvariantError, require

REASON_MAX = 300
TRACKS_MAX = 1024


class Grade(enum.Enum):
    """What a check says of one thing."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIPPED = "skipped"  # not measured, and why: it speaks neither for nor against the machine


_BADNESS = {Grade.SKIPPED: 0, Grade.OK: 1, Grade.WARN: 2, Grade.FAIL: 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One check of one thing: what was measured, what is allowed, and what to do about it."""

    check: str  # its name, such as disk-sync; documented in docs/doctor.md
    grade: Grade
    reason: str  # one line: what was found
    subject: str = ""  # of several: GPU 3, a directory, a peer
    value: float | None = None
    unit: str = ""
    limit: str = ""  # in words, such as: warn above 0.1, fail above 1
    advice: str = ""  # what to do; empty when there is nothing to do

    @property
    def name(self) -> str:
        return f"{self.check} {self.subject}" if self.subject else self.check

    @property
    def line(self) -> str:
        return one_line(f"{self.name}: {self.reason}")


def one_line(text: str) -> str:
    """Reasons travel and are shown: one bounded line of plain text, whatever a message held."""
    text = "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))
    return text if len(text) <= REASON_MAX else text[: REASON_MAX - 3] + "..."


def grade_above(value: float, warn: float, fail: float) -> Grade:
    """For what should be low. A value that is no number fails: it was measured wrongly or lies."""
    if not value <= fail:
        return Grade.FAIL
    return Grade.WARN if value > warn else Grade.OK


def grade_below(value: float, warn: float, fail: float) -> Grade:
    """For what should be high."""
    if not value >= fail:
        return Grade.FAIL
    return Grade.WARN if value < warn else Grade.OK


def worst(findings: Iterable[Finding]) -> Grade:
    """The worst grade; OK when everything was skipped, since nothing speaks against the machine."""
    found = max((f.grade for f in findings), key=_BADNESS.__getitem__, default=Grade.OK)
    return Grade.OK if found is Grade.SKIPPED else found


def summary(findings: Sequence[Finding]) -> str:
    """The verdict of a whole examination in one sentence."""
    failed = [f for f in findings if f.grade is Grade.FAIL]
    warned = [f for f in findings if f.grade is Grade.WARN]
    more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
    if failed:
        return one_line(f"NOT FIT to join: {failed[0].line}{more}")
    if warned:
        count = "1 warning" if len(warned) == 1 else f"{len(warned)} warnings"
        names = ", ".join(dict.fromkeys(f.check for f in warned))
        return one_line(f"fit to join, with {count}: {names}")
    return "fit to join"


class Health(enum.Enum):
    """What the job should do with a node."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"  # keep it, prefer others, look at it
    DRAIN = "drain"  # move its work away; it is taken back after a clean probation


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Small enough to travel in every report; the rest is empty when healthy."""

    health: Health = Health.HEALTHY
    reason: str = ""  # one bounded line
    check: str = ""  # which one it is about, so that equal causes on many nodes can be told


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchPolicy:
    """How much evidence changes a verdict. Samples are counted *and* timed.

    Counting alone would let three quick calls drain a node; time alone would take a pause of the
    observer for evidence.
    """

    window: int = 6  # samples of one check that are remembered
    fails_to_drain: int = 3  # of the window
    drain_s: float = 15.0  # and from the first of them to now at least this long
    warns_to_suspect: int = 3  # of the window; a single failure is enough
    probation_s: float = 600.0  # clean for this long after a drain; doubled by every further one
    probation_s_max: float = 86400.0
    probation_samples: int = 10
    gap_s_max: float = 60.0  # a longer pause between samples counts as only this much clean time

    def __post_init__(self) -> None:
        require(
            2 <= self.fails_to_drain <= self.window and self.drain_s > 0,
            "one sample must never drain a node",
        )
        require(1 <= self.warns_to_suspect <= self.window, "warns_to_suspect is from 1 to window")
        require(self.probation_samples >= 1 and self.gap_s_max > 0, "a probation takes evidence")


@dataclass(slots=True)
class _Track:
    """The recent grades of one check of one thing."""

    recent: deque[tuple[float, Grade]]
    suspect: bool = False
    bad: Finding | None = None  # the newest one that was not ok

    def count(self, grade: Grade) -> int:
        return sum(1 for _, g in self.recent if g is grade)

    @property
    def clean(self) -> bool:
        return all(g is Grade.OK for _, g in self.recent)

    def first_fail(self) -> float:
        return next(t for t, g in self.recent if g is Grade.FAIL)


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchRecord:
    """For dashboards and dumps."""

    verdict: Verdict
    drains: int
    clean_s: float  # of the probation
    probation_s: float  # how long the present or next probation is
    suspects: tuple[str, ...]


@dataclass(slots=True)
class _Probation:
    """A drained node on its way back: which checks must be seen clean, and for how long so far."""

    causes: dict[str, None] = field(default_factory=dict)  # in the order in which they failed
    clean_s: float = 0.0
    clean_samples: int = 0


class Watch:
    """`observe` takes each round's findings and returns the verdict; the only mutator."""

    def __init__(self, policy: WatchPolicy | None = None) -> None:
        self.policy = policy or WatchPolicy()
        self._tracks: dict[str, _Track] = {}
        self._verdict = Verdict()
        self._probation = _Probation()
        self._drains = 0
        self._last = 0.0  # time of the newest round; only meaningful once there was one
        self._rounds = 0

    @property
    def verdict(self) -> Verdict:
        return self._verdict

    def observe(self, findings: Sequence[Finding], now: float) -> Verdict:
        """`now`: seconds of a clock that never goes back."""
        require(self._rounds == 0 or now >= self._last, f"time went back to {now}")
        gap_s = min(now - self._last, self.policy.gap_s_max) if self._rounds else 0.0
        self._last, self._rounds = now, self._rounds + 1
        for finding in findings:
            if finding.grade is not Grade.SKIPPED:
                self._note(finding, now)
        if self._verdict.health is Health.DRAIN:
            self._prove(findings, gap_s)
        else:
            self._judge(now)
        return self._verdict

    def snapshot(self) -> WatchRecord:
        return WatchRecord(
            verdict=self._verdict,
            drains=self._drains,
            clean_s=self._probation.clean_s,
            probation_s=self._probation_s(),
            suspects=tuple(name for name, t in self._tracks.items() if t.suspect),
        )

    def check(self) -> None:
        """Assert every invariant."""
        require(len(self._tracks) <= TRACKS_MAX, "too many tracks")
        for name, track in self._tracks.items():
            require(len(track.recent) <= self.policy.window, f"{name} remembers too much")
            times = [t for t, _ in track.recent]
            require(times == sorted(times), f"{name} is out of order")
        drained = self._verdict.health is Health.DRAIN
        require(drained == bool(self._probation.causes), "a drain has causes, nothing else does")
        require((self._verdict.health is Health.HEALTHY) == (not self._verdict.reason), "no reason")
        require(len(self._verdict.reason) <= REASON_MAX, "the reason is too long")

    def _note(self, finding: Finding, now: float) -> None:
        track = self._tracks.get(finding.name)
        if track is None:
            if not self._room():
                return
            track = self._tracks[finding.name] = _Track(deque(maxlen=self.policy.window))
        track.recent.append((now, finding.grade))
        if finding.grade is not Grade.OK:
            track.bad = finding
        if track.clean:
            track.suspect = False
        elif track.count(Grade.FAIL) or track.count(Grade.WARN) >= self.policy.warns_to_suspect:
            track.suspect = True

    def _room(self) -> bool:
        """Subjects come and go: a clean track makes room for a new one."""
        if len(self._tracks) < TRACKS_MAX:
            return True
        spare = next((name for name, t in self._tracks.items() if t.clean), None)
        if spare is None:
            return False
        del self._tracks[spare]
        return True

    def _failing(self, track: _Track, now: float) -> bool:
        enough = track.count(Grade.FAIL) >= self.policy.fails_to_drain
        return enough and now - track.first_fail() >= self.policy.drain_s

    def _judge(self, now: float) -> None:
        failing = [name for name, t in self._tracks.items() if self._failing(t, now)]
        suspects = [name for name, t in self._tracks.items() if t.suspect]
        if failing:
            self._drains += 1
            self._probation = _Probation(causes=dict.fromkeys(failing))
            self._verdict = self._tell(Health.DRAIN, failing[0])
        elif suspects:
            self._verdict = self._tell(Health.SUSPECT, suspects[0])
        else:
            self._verdict = Verdict()

    def _tell(self, health: Health, name: str) -> Verdict:
        """What was seen last, and how often; what comes last may be cut off."""
        track = self._tracks[name]
        fails, bad = track.count(Grade.FAIL), track.bad
        seen = f"{fails} failed" if fails else f"{track.count(Grade.WARN)} warned"
        if bad is None:
            raise InvariantError(f"{name} counts against the node and was never bad")
        advice = f"; {bad.advice}" if bad.advice else ""
        reason = f"{bad.line} ({seen} of the last {len(track.recent)} samples){advice}"
        return Verdict(health=health, reason=one_line(reason), check=bad.check)

    def _prove(self, findings: Sequence[Finding], gap_s: float) -> None:
        """One round of a probation: any failure starts it again; silence does not advance it."""
        probation = self._probation
        grades = {f.name: f.grade for f in findings}
        failed = [f.name for f in findings if f.grade is Grade.FAIL]
        warned = [name for name in probation.causes if grades.get(name) is Grade.WARN]
        if failed or warned:
            probation.causes.update(dict.fromkeys(failed))
            probation.clean_s, probation.clean_samples = 0.0, 0
            return
        if any(grades.get(name) is not Grade.OK for name in probation.causes):
            return
        probation.clean_s += gap_s if probation.clean_samples else 0.0
        probation.clean_samples += 1
        enough = probation.clean_samples >= self.policy.probation_samples
        if enough and probation.clean_s >= self._probation_s():
            self._probation = _Probation()
            self._tracks.clear()
            self._verdict = Verdict()

    def _probation_s(self) -> float:
        doubled = self.policy.probation_s * 2.0 ** min(max(self._drains - 1, 0), 32)
        return min(doubled, max(self.policy.probation_s_max, self.policy.probation_s))
