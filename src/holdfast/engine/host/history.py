"""Judge a machine by the history of its findings: a `Watch` turns rounds of them into a verdict.

It does not know how anything was measured. Its invariant: no single round of findings, however
bad, ever drains a node, and a drained node is only taken back after a clean probation, in which
every check that drained it was seen to be well again.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from holdfast.engine.core.errors import InvariantError, require
from holdfast.engine.host.findings import REASON_MAX, Finding, Grade, to_one_line

TRACKS_MAX = 1024


class Health(enum.Enum):
    """Health is what the job should do with a node."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"  # keep it, prefer other nodes, look at it
    DRAIN = "drain"  # move its work away; it is taken back after a clean probation


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthVerdict:
    """Gives the treatment of a node and its reason; small enough for every report."""

    health: Health = Health.HEALTHY
    reason: str = ""  # one bounded line; empty when healthy
    check: str = ""  # its check, so that equal causes on many nodes are recognised


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchPolicy:
    """Sets the evidence that changes a verdict: samples, counted *and* timed.

    Counting alone would let three quick calls drain a node; time alone would take a pause of the
    observer for evidence.
    """

    window: int = 6  # samples of one check that are remembered
    fails_to_drain: int = 3  # failures in the window
    drain_s: float = 15.0  # and from the first of them to now at least this long
    warns_to_suspect: int = 3  # warnings in the window; a single failure is enough
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
class _CheckTrack:
    """Keeps the recent grades of one check on one subject."""

    recent: deque[tuple[float, Grade]]
    suspect: bool = False
    bad: Finding | None = None  # the newest finding that was not ok

    def count(self, grade: Grade) -> int:
        return sum(1 for _, g in self.recent if g is grade)

    @property
    def is_clean(self) -> bool:
        return all(g is Grade.OK for _, g in self.recent)

    def first_failure_time(self) -> float:
        return next(t for t, g in self.recent if g is Grade.FAIL)


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchRecord:
    """A watch record is what dashboards and dumps show of a watch."""

    verdict: HealthVerdict
    drains: int
    clean_s: float  # healthy seconds of the probation
    probation_s: float  # how long the present or next probation is
    suspects: tuple[str, ...]


@dataclass(slots=True)
class _Probation:
    """Keeps the progress of a drained node on its way back."""

    causes: dict[str, None] = field(default_factory=dict)  # failed, in order; must be seen well
    seen: dict[str, None] = field(default_factory=dict)  # causes seen well since clean_at
    clean_at: float = 0.0  # when all causes had last been seen well
    clean_s: float = 0.0
    clean_samples: int = 0


class Watch:
    """A watch judges a node by its rounds of findings; `observe` is its only mutator."""

    def __init__(self, policy: WatchPolicy | None = None) -> None:
        self.policy = policy or WatchPolicy()
        self._tracks: dict[str, _CheckTrack] = {}
        self._verdict = HealthVerdict()
        self._probation = _Probation()
        self._drains = 0
        self._last = 0.0  # time of the newest round; only meaningful once there was one
        self._rounds = 0

    @property
    def verdict(self) -> HealthVerdict:
        return self._verdict

    def observe(self, findings: Sequence[Finding], now: float) -> HealthVerdict:
        """Take one round of findings and judge again. `now`: by a clock that never goes back."""
        require(self._rounds == 0 or now >= self._last, f"time went back to {now}")
        self._last, self._rounds = now, self._rounds + 1
        for finding in findings:
            if finding.grade is not Grade.SKIPPED:
                self._note(finding, now)
        if self._verdict.health is Health.DRAIN:
            self._prove(findings, now)
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
            track = self._tracks[finding.name] = _CheckTrack(deque(maxlen=self.policy.window))
        track.recent.append((now, finding.grade))
        if finding.grade is not Grade.OK:
            track.bad = finding
        if track.is_clean:
            track.suspect = False
        elif track.count(Grade.FAIL) or track.count(Grade.WARN) >= self.policy.warns_to_suspect:
            track.suspect = True

    def _room(self) -> bool:
        """Make room for one more track, if a clean one can go: subjects come and go."""
        if len(self._tracks) < TRACKS_MAX:
            return True
        spare = next((name for name, t in self._tracks.items() if t.is_clean), None)
        if spare is None:
            return False
        del self._tracks[spare]
        return True

    def _is_failing(self, track: _CheckTrack, now: float) -> bool:
        enough = track.count(Grade.FAIL) >= self.policy.fails_to_drain
        return enough and now - track.first_failure_time() >= self.policy.drain_s

    def _judge(self, now: float) -> None:
        failing = [name for name, t in self._tracks.items() if self._is_failing(t, now)]
        suspects = [name for name, t in self._tracks.items() if t.suspect]
        if failing:
            self._drains += 1
            self._probation = _Probation(causes=dict.fromkeys(failing))
            self._verdict = self._tell(Health.DRAIN, failing[0])
        elif suspects:
            self._verdict = self._tell(Health.SUSPECT, suspects[0])
        else:
            self._verdict = HealthVerdict()

    def _tell(self, health: Health, name: str) -> HealthVerdict:
        """Return the last finding and its count in words; their end may be cut off."""
        track = self._tracks[name]
        fails, bad = track.count(Grade.FAIL), track.bad
        seen = f"{fails} failed" if fails else f"{track.count(Grade.WARN)} warned"
        if bad is None:
            raise InvariantError(f"{name} counts against the node and was never bad")
        advice = f"; {bad.advice}" if bad.advice else ""
        reason = f"{bad.line} ({seen} of the last {len(track.recent)} samples){advice}"
        return HealthVerdict(health=health, reason=to_one_line(reason), check=bad.check)

    def _prove(self, findings: Sequence[Finding], now: float) -> None:
        """Count one round towards the probation, which any failure starts again.

        Checks may report at different times, so a sample is complete when every cause has been seen
        to be well; silence does not advance it.
        """
        probation = self._probation
        grades = {f.name: f.grade for f in findings}
        failed = [f.name for f in findings if f.grade is Grade.FAIL]
        warned = [name for name in probation.causes if grades.get(name) is Grade.WARN]
        if failed or warned:
            self._probation = _Probation(causes=probation.causes | dict.fromkeys(failed))
            return
        probation.seen |= {name: None for name in probation.causes if grades.get(name) is Grade.OK}
        if len(probation.seen) < len(probation.causes):
            return
        if probation.clean_samples:
            probation.clean_s += min(now - probation.clean_at, self.policy.gap_s_max)
        probation.seen, probation.clean_at = {}, now
        probation.clean_samples += 1
        enough = probation.clean_samples >= self.policy.probation_samples
        if enough and probation.clean_s >= self._probation_s():
            self._probation = _Probation()
            self._tracks.clear()
            self._verdict = HealthVerdict()

    def _probation_s(self) -> float:
        doubled = self.policy.probation_s * 2.0 ** min(max(self._drains - 1, 0), 32)
        return min(doubled, max(self.policy.probation_s_max, self.policy.probation_s))
