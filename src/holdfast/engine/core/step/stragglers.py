"""Finds workers that compute too slowly: verdicts, with reasons, from the votes' times. Pure.

Only the time of a worker's own computing counts, per virtual rank, never its waiting; so one slow
worker does not make other workers look slow. Each worker is compared with its peers of the same
step (a common cause, such as longer samples, cancels out) and with its own past. Small excesses are
summed up until chance is no explanation any more (Page's cumulative sum, 1954); the limit follows
from the noise, which is measured robustly.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from holdfast.engine.core.types import WorkerId

NOISE_MIN = 0.01  # all of these are logarithms of ratios: about 1 %
NOISE_FIRST = 0.05
NOISE_SHARE = 0.1  # the weight of one step in the running estimate
EXCESS = 0.04  # a step with more of it is evidence of slowness
STEP_MAX = 0.32  # the most that one step counts, so that one alone is no proof
EVIDENCE_MIN = 0.8  # more than two odd steps
EVIDENCE = 10.0  # in units of noise squared over excess: e^-20 by chance
RECENT = 16  # steps
OFTEN = 5  # clearly late steps among the recent ones: slow now and then
CLEARLY, CLEARLY_MIN = 3.0, 0.1  # in units of noise, and at least
HIGH = 2.0  # in units of noise: a slow step rather than a usual one
ONCE, ONCE_MIN = 10.0, math.log(2.0)  # in units of noise, and at least: noted by itself
PAST = 1 / 64  # the weight of one step in a worker's own usual time
PAST_MIN = 16  # steps, before its past is evidence


class Kind(enum.Enum):
    STEADY = "slow"
    INTERMITTENT = "slow now and then"
    PERIODIC = "slow again and again"
    DRIFTING = "slower and slower"
    OWN_PAST = "slower than it was"
    ONCE = "slow once"
    RECOVERED = "not slow any more"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Describes how a worker is slow, or that it is not slow any more.

    `factor`: its slow steps take this many times the usual time.
    """

    worker: WorkerId
    kind: Kind
    factor: float
    #: The steps since it began.
    steps: int
    reason: str

    def __str__(self) -> str:
        return f"worker {self.worker} is {self.kind.value}: {self.reason}"


@dataclass(slots=True)
class _Track:
    """Keeps the record of one worker."""

    evidence: float = 0.0
    #: The steps in which the evidence was not zero.
    since: int = 0
    slow: bool = False
    #: The steps since the verdict that it is slow.
    told: int = 0
    #: The kind in that verdict.
    kind: Kind = Kind.STEADY
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    last: float = 0.0
    #: Its usual time against its peers; or, alone, the logarithm of its time.
    usual: float = 0.0
    #: The number of steps on which `usual` rests.
    known: int = 0
    #: The evidence against its own past.
    past: float = 0.0
    #: Its delay in the last step, if that was large: perhaps only once.
    odd: float = 0.0


class Detector:
    """Finds the slow workers of one view. `observe` is the only mutator."""

    def __init__(self, workers: Sequence[WorkerId]) -> None:
        self._workers = tuple(workers)
        self._tracks = [_Track() for _ in workers]
        self._noise = NOISE_FIRST
        self._steps = 0
        self._allowed = EXCESS  # more than this is evidence of slowness, in this step
        self._needed = EVIDENCE_MIN  # evidence for a verdict

    @property
    def noise(self) -> float:
        """Return the noise of one worker's time in one step, as a share of that time."""
        return self._noise

    def observe(self, task_s: Sequence[float]) -> list[Verdict]:
        """Take in each worker's seconds for one virtual rank in this step; 0 where it had none.

        Returns new verdicts: a worker has become slow, was late once, or is not slow any more.
        """
        times = [math.log(t) if t > 0 else None for t in task_s]
        there = sorted(t for t in times if t is not None)
        if not there:
            return []
        alone = len(self._tracks) == 1
        reference = 0.0 if alone else there[(len(there) - 1) // 2]
        self._steps += 1
        self._learn_noise(times, reference)
        allowed = max(EXCESS, 0.5 * self._noise)
        if len(there) == 2:
            allowed += 0.5 * self._noise  # one of two is always the slower one
        self._allowed = allowed
        self._needed = max(EVIDENCE_MIN, EVIDENCE * self._noise**2 / allowed)
        found: list[Verdict] = []
        for worker, track, time in zip(self._workers, self._tracks, times, strict=True):
            if time is None:
                continue
            excess = time - reference
            quiet = not (track.slow or track.odd or alone) and track.known > 64
            if quiet and excess <= allowed >= excess - track.usual:  # most of the time
                track.recent.append(excess)
                track.evidence = max(track.evidence + excess - allowed, 0.0)
                track.past = max(track.past + excess - track.usual - allowed, 0.0)
                track.since = track.since + 1 if track.evidence else 0
                track.usual += (excess - track.usual) * PAST
                continue
            verdict = self._judge(worker, track, excess, alone)
            if verdict is not None:
                found.append(verdict)
        return found

    def _learn_noise(self, times: Sequence[float | None], reference: float) -> None:
        """Learn from the changes of each worker's excess: an excess that lasts does not count.

        The median of all workers' changes counts; of fewer than three, their mean.
        """
        changes = []
        for track, time in zip(self._tracks, times, strict=True):
            if time is None:
                continue
            if track.known:
                changes.append(min(abs(time - reference - track.last), STEP_MAX))
            track.last = time - reference
        if not changes:
            return
        changes.sort()
        middle = (changes[len(changes) // 2] + changes[(len(changes) - 1) // 2]) / 2
        few = len(changes) < 3
        # Of a normal distribution's differences: the median is 0.954, the mean 1.128 times sigma.
        now = sum(changes) / len(changes) / 1.128 if few else middle / 0.954
        share = max(NOISE_SHARE, 1 / self._steps)
        self._noise = max(self._noise + share * (now - self._noise), NOISE_MIN)

    def _judge(self, worker: WorkerId, track: _Track, excess: float, alone: bool) -> Verdict | None:
        noise, allowed = self._noise, self._allowed
        against_past = excess - track.usual if track.known >= PAST_MIN else 0.0
        late = against_past if alone else excess
        track.recent.append(late)
        track.evidence = max(0.0, track.evidence + min(late, STEP_MAX) - allowed)
        track.since = track.since + 1 if track.evidence else 0
        verdict = None
        if track.slow:
            track.told += 1
            verdict = self._judge_recovery(worker, track) or self._look_once_more(
                worker, track, alone
            )
        elif track.evidence > self._needed or self._is_often_late(track, late):
            steps = track.since if track.evidence else RECENT
            verdict = self._make_slow_verdict(worker, track, steps, alone)
            track.slow, track.told, track.kind = True, 0, verdict.kind
        elif track.odd and late <= HIGH * noise:
            verdict = self._make_once_verdict(worker, track.odd)
        track.odd = late if late > max(ONCE * noise, ONCE_MIN) and not track.slow else 0.0
        if not (track.slow or alone):
            verdict = verdict or self._judge_by_past(worker, track, against_past)
        if not track.slow:  # slow steps are no part of its usual time
            track.known += 1
            track.usual += (excess - track.usual) * max(PAST, 1 / track.known)
        return verdict

    def _is_often_late(self, track: _Track, late: float) -> bool:
        clearly = max(CLEARLY * self._noise, CLEARLY_MIN)
        return late > clearly and sum(each > clearly for each in track.recent) >= OFTEN

    def _look_once_more(self, worker: WorkerId, track: _Track, alone: bool) -> Verdict | None:
        """Look again after some more steps: the slowness may look otherwise than at first."""
        if track.told != RECENT:
            return None
        verdict = self._make_slow_verdict(worker, track, RECENT, alone)
        return verdict if verdict.kind is not track.kind and verdict.factor > 1 else None

    def _make_slow_verdict(
        self, worker: WorkerId, track: _Track, steps: int, alone: bool
    ) -> Verdict:
        window = list(track.recent)[-max(steps, 1) :]
        half = 0.5 * max(window)
        least = max(HIGH * self._noise, half) if 2 * half > HIGH * self._noise else half
        high = [late for late in window if late > least]
        kind = _kind(window, least)
        factor = math.exp(sum(high) / len(high)) if high else 1.0
        whom = "before" if alone else "its peers"
        often = "" if len(high) == len(window) else f" in {len(high)} of {len(window)} steps"
        return Verdict(
            worker=worker,
            kind=Kind.OWN_PAST if alone and kind is Kind.STEADY else kind,
            factor=factor,
            steps=len(window),
            reason=f"it takes {factor:.2f} times as long as {whom}{often}",
        )

    def _judge_by_past(self, worker: WorkerId, track: _Track, late: float) -> Verdict | None:
        """Judge a fast worker that has become slower, though not slower than its peers."""
        track.past = max(0.0, track.past + min(late, STEP_MAX) - self._allowed)
        if track.past <= self._needed:
            return None
        track.past, track.known = 0.0, 0  # from now on that is its usual time
        factor = math.exp(late)
        return Verdict(
            worker=worker,
            kind=Kind.OWN_PAST,
            factor=factor,
            steps=RECENT,
            reason=f"it takes {factor:.2f} times as long as before",
        )

    def _judge_recovery(self, worker: WorkerId, track: _Track) -> Verdict | None:
        high = sum(late > HIGH * self._noise for late in track.recent)
        if len(track.recent) < RECENT or high > 1 or sum(track.recent) > RECENT * EXCESS:
            return None
        track.slow, track.evidence = False, 0.0
        return Verdict(
            worker=worker,
            kind=Kind.RECOVERED,
            factor=1.0,
            steps=RECENT,
            reason=f"it was as fast as usual for {RECENT} steps",
        )

    def _make_once_verdict(self, worker: WorkerId, late: float) -> Verdict:
        factor = math.exp(late)
        return Verdict(
            worker=worker,
            kind=Kind.ONCE,
            factor=factor,
            steps=1,
            reason=f"one step took {factor:.1f} times as long as usual",
        )


def _kind(window: Sequence[float], least: float) -> Kind:
    """Classify the slowness of these steps; those above `least` are slow."""
    third = len(window) // 3
    parts = [sum(window[i * third : (i + 1) * third]) for i in range(3)]
    if third > 2 and parts[2] > 1.2 * parts[1] > 1.44 * max(parts[0], 0.0):
        return Kind.DRIFTING
    slow = [i for i, late in enumerate(window) if late > least]
    if not slow:
        return Kind.INTERMITTENT
    if len(slow) >= 0.8 * (slow[-1] - slow[0] + 1):
        return Kind.STEADY
    gaps = {b - a for a, b in itertools.pairwise(slow)}
    return Kind.PERIODIC if len(gaps) == 1 else Kind.INTERMITTENT
