"""Plays the failures of a job over weeks, event by event, by the numbers of its `RecoveryTimes`.

It knows no decision of the coordinator: what a failure costs is in the `RecoveryTimes`. Unlike the
closed form it lets failures overlap, uses up spares, and lets nodes age.
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass
from random import Random

from holdfast.plan.distributions import Weibull
from holdfast.plan.failure_tables import Effect, Lemons
from holdfast.plan.recovery import NO_STANDSTILL, Loss, Outlook, RecoveryTimes, Standstill

FAILURES_MAX = 5_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Ageing:
    """Draws the failures of each node by itself, by the time since its last one."""

    nodes: int
    shape: float = 1.0
    is_new: bool = False
    lemons: Lemons | None = None


class _Play:
    """Keeps the state of one job while its failures are played."""

    def __init__(self, recovery: RecoveryTimes, rng: Random) -> None:
        self.recovery = recovery
        self.rng = rng
        self.now = 0.0
        self.present = recovery.workers
        self.spares = recovery.spares
        #: Training that counts, at full speed, in seconds.
        self.useful_s = 0.0
        #: Training since the last save: of `useful_s`, and of time.
        self.unsaved_s = self.unsaved_time_s = 0.0
        self.lost = dict.fromkeys(Loss, 0.0)
        #: Workers that become ready: when, in what order, how many, and whether they
        #: were spares.
        self.returns: list[tuple[float, int, int, bool]] = []
        #: Spares that are about to join.
        self.called = 0
        self._order = itertools.count()
        #: The standstill that is under way ends then.
        self.still_until = 0.0
        self._pause = NO_STANDSTILL

    def run_to(self, end: float) -> None:
        """Pass time without a failure; workers that are ready join."""
        while self.returns and self.returns[0][0] <= end:
            at, _, workers, were_spares = heapq.heappop(self.returns)
            self._pass(at)
            self._welcome(workers, were_spares=were_spares)
        self._pass(end)

    def _welcome(self, workers: int, *, were_spares: bool) -> None:
        """Put workers that are ready where some are missing; the rest become spares."""
        missing = self.recovery.workers - self.present - (0 if were_spares else self.called)
        joining = min(workers, missing)
        if were_spares:
            self.called -= workers
        self.present += joining
        self.spares = min(self.spares + workers - joining, self.recovery.spares)
        if joining:
            self._stand(self.recovery.join)

    def _pass(self, end: float) -> None:
        still_s = min(end, self.still_until) - self.now
        if still_s > 0:
            total = self._pause.total_s
            for part, seconds in self._pause.parts().items():
                self.lost[part] += still_s * seconds / total
            self.now += still_s
        if end > self.now:
            self._train(end - self.now)
            self.now = end

    def _train(self, span_s: float) -> None:
        recovery = self.recovery
        speed = recovery.speed(self.present)
        if speed == 0:
            self.lost[Loss.WAITING] += span_s
            return
        training_s = span_s / (1 + recovery.stall_share)
        self.lost[Loss.SAVING] += span_s - training_s
        self.lost[Loss.DEGRADED] += training_s * (1 - speed)
        self.useful_s += training_s * speed
        self.unsaved_time_s += training_s
        self.unsaved_s += training_s * speed
        if self.unsaved_time_s >= recovery.save_every_s:
            rest_s = self.unsaved_time_s % recovery.save_every_s
            self.unsaved_time_s, self.unsaved_s = rest_s, rest_s * speed

    def fail(self, effect: Effect) -> None:
        """Strike the job with a failure now."""
        recovery = self.recovery
        lost = min(recovery.lost.get(effect, 0), self.present)
        self.present -= lost
        taken = min(lost, self.spares)
        self.spares -= taken
        self.called += taken
        self._schedule(self.now + recovery.spare_back_s, taken, were_spares=True)
        self._schedule(self.now + recovery.back_s.get(effect, 0.0), lost, were_spares=False)
        self._stand(recovery.pauses.get(effect, NO_STANDSTILL))
        if self.rng.random() < recovery.returns.get(effect, 0.0):
            self.useful_s -= self.unsaved_s
            self.lost[Loss.AGAIN] += self.unsaved_s
            self.unsaved_s = self.unsaved_time_s = 0.0
            self._stand(recovery.reload)

    def _schedule(self, at: float, workers: int, *, were_spares: bool) -> None:
        if workers:
            heapq.heappush(self.returns, (at, next(self._order), workers, were_spares))

    def _stand(self, pause: Standstill) -> None:
        """Stand still from now on; a standstill that is under way begins again."""
        if pause.total_s == 0:
            return
        left_s = max(self.still_until - self.now, 0.0)
        if pause.total_s >= left_s:
            self._pause, self.still_until = pause, self.now + pause.total_s


def simulate(
    recovery: RecoveryTimes, span_s: float, rng: Random, ageing: Ageing | None = None
) -> Outlook:
    """Play a job for a time, and return the shares of it.

    Without `ageing` the failures of the job are exponential.
    """
    play = _Play(recovery, rng)
    effects = [effect for effect, rate in recovery.rates.items() if rate > 0]
    weights = [recovery.rates[effect] for effect in effects]
    if effects:
        for at in _draw_times(recovery.rate, span_s, rng, ageing):
            play.run_to(at)
            play.fail(rng.choices(effects, weights)[0])
    play.run_to(span_s)
    lost = {part: seconds / span_s for part, seconds in play.lost.items()}
    return Outlook(ettr=play.useful_s / span_s, lost=lost)


def _draw_times(rate: float, span_s: float, rng: Random, ageing: Ageing | None) -> list[float]:
    """Draw the times of all failures, in order."""
    found: list[float] = []
    if ageing is None:
        at = rng.expovariate(rate)
        while at < span_s and len(found) < FAILURES_MAX:
            found.append(at)
            at += rng.expovariate(rate)
        return found
    lemons = ageing.lemons or Lemons(share=0.0, factor=1.0)
    many = round(ageing.nodes * lemons.share)
    # The rates of all nodes sum up to the rate of the job.
    weight = ageing.nodes - many + many * lemons.factor
    for number in range(ageing.nodes):
        factor = lemons.factor if number < many else 1.0
        times = Weibull(mean_s=weight / factor / rate, shape=ageing.shape)
        at = times.draw(rng) if ageing.is_new else times.draw_remaining(rng)
        while at < span_s and len(found) < FAILURES_MAX:
            found.append(at)
            at += times.draw(rng)
    return sorted(found)


def spread_of(outlooks: list[Outlook]) -> tuple[float, float, float]:
    """Return the mean share of useful time, and bounds that hold the mean with 95 %."""
    values = [outlook.ettr for outlook in outlooks]
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, mean, mean
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    error = 1.96 * math.sqrt(variance / len(values))
    return mean, mean - error, mean + error
