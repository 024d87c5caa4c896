"""Describes a job among failures by a few numbers, and predicts its useful time from them.

`RecoveryTimes` has the seconds that each kind of failure costs. `predict` is the closed form:
failures are independent, and rarely overlap. `weeks.simulate` plays the same numbers event by
event, without these assumptions.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from holdfast.plan.failure_tables import Effect

#: A silent node is lost after this many leases: the lease, and a margin of a fifth of it.
LEASES_TO_LOSS = 1.2
#: Steps that the members take while they feed a worker, besides the time to send the state: they
#: copy it at a boundary, and the worker joins at another one.
JOIN_STEPS = 2
#: Standard deviations within which the number of missing groups lies.
DEVIATIONS = 9


class Loss(enum.Enum):
    """Names a part of the time that is lost."""

    SAVING = "checkpoint stalls"
    AGAIN = "computing again"
    DETECTION = "detection"
    OPENING = "opening of groups"
    STARTING = "starts and loading"
    WAITING = "waiting for nodes"
    DEGRADED = "fewer workers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Standstill:
    """Divides the standstill after a failure into its parts, in seconds."""

    detection_s: float = 0.0
    opening_s: float = 0.0
    again_s: float = 0.0
    starting_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.detection_s + self.opening_s + self.again_s + self.starting_s

    def parts(self) -> dict[Loss, float]:
        return {
            Loss.DETECTION: self.detection_s,
            Loss.OPENING: self.opening_s,
            Loss.AGAIN: self.again_s,
            Loss.STARTING: self.starting_s,
        }


NO_STANDSTILL = Standstill()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryTimes:
    """Describes how a job recovers. All times are seconds; all rates are per second."""

    #: Workers that train when none is missing. Spares come on top.
    workers: int
    #: Failures of the whole job in a second, by effect.
    rates: Mapping[Effect, float]
    #: Workers that a failure takes away.
    lost: Mapping[Effect, int]
    pauses: Mapping[Effect, Standstill]
    #: Time from the loss of a worker until another one is ready, without a spare.
    back_s: Mapping[Effect, float]
    #: The same where a spare takes over.
    spare_back_s: float
    #: Spares, in workers. A spare that takes over is itself replaced after `back_s`.
    spares: int
    #: Standstill when a worker joins.
    join: Standstill
    #: Share of the speed with all workers that this many have. It may be 0: then all wait.
    speed: Callable[[int], float]
    #: Training between two saves to a store; infinite: none is saved.
    save_every_s: float = math.inf
    save_stall_s: float = 0.0
    #: Standstill for a copy into nodes' memory, and the training between two copies.
    protect_every_s: float = math.inf
    protect_stall_s: float = 0.0
    #: Probability that a failure takes all copies of some state: the job goes back to its last
    #: checkpoint, and loads it.
    returns: Mapping[Effect, float] = field(default_factory=dict)
    reload: Standstill = NO_STANDSTILL

    @property
    def rate(self) -> float:
        return sum(self.rates.values())

    @property
    def stall_share(self) -> float:
        """Return the seconds of stalls for each second of training."""
        save = self.save_stall_s / self.save_every_s if self.save_every_s > 0 else math.inf
        protect = self.protect_stall_s / self.protect_every_s if self.protect_every_s > 0 else 0.0
        return save + protect

    @property
    def return_rate(self) -> float:
        """Return the number of times that the job goes back to a checkpoint, in a second."""
        return sum(rate * self.returns.get(effect, 0.0) for effect, rate in self.rates.items())

    def mean_lost_s(self) -> float:
        """Return the mean time since the last save when the job goes back, in seconds.

        An interval ends with a save, and a return begins a new one. So this is the mean of an
        exponential time that is known to be shorter than the interval.
        """
        rate = self.return_rate
        if rate == 0 or self.save_every_s == math.inf:
            return 1 / rate if rate else 0.0
        x = rate * (self.save_every_s + self.save_stall_s)
        if x < 1e-6:
            return (self.save_every_s + self.save_stall_s) / 2
        if x > 700:
            return 1 / rate
        return (1 - (1 + x) * math.exp(-x)) / (rate * -math.expm1(-x))

    def mean_missing(self) -> float:
        """Return the mean number of workers that are lost and not replaced, spares included."""
        return sum(
            rate * self.lost.get(effect, 0) * self.back_s.get(effect, 0.0)
            for effect, rate in self.rates.items()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """Predicts a job's time. `lost`: shares of the wall time; with `ettr` they sum up to 1."""

    #: Effective training time ratio: the share of the wall time that counts, at full speed.
    ettr: float
    lost: Mapping[Loss, float]


def predict(recovery: RecoveryTimes) -> Outlook:
    """Predict the shares of the time, in closed form.

    A standstill that another failure interrupts begins again, so its mean is
    (exp(rate * pause) - 1) / rate.
    """
    per_second = dict.fromkeys(Loss, 0.0)  # seconds of standstill for each second without
    for effect, rate in recovery.rates.items():
        _add(per_second, recovery.pauses.get(effect, NO_STANDSTILL), rate, recovery.rate)
        joins = rate * (recovery.lost.get(effect, 0) > 0)
        _add(per_second, recovery.join, joins, recovery.rate)
        returns = rate * recovery.returns.get(effect, 0.0)
        _add(per_second, recovery.reload, returns, recovery.rate)
    up = 1 / (1 + sum(per_second.values()))
    lost = {part: seconds * up for part, seconds in per_second.items()}
    again = up * recovery.return_rate * recovery.mean_lost_s()
    stalled = (up - again) * recovery.stall_share / (1 + recovery.stall_share)
    training = up - again - stalled
    lost[Loss.AGAIN] += again
    lost[Loss.SAVING] += stalled
    slow, still = _find_absence(recovery)
    lost[Loss.WAITING] += training * still
    lost[Loss.DEGRADED] += training * (slow - still)
    return Outlook(ettr=training * (1 - slow), lost=lost)


def _add(found: dict[Loss, float], pause: Standstill, rate: float, all_rate: float) -> None:
    """Add pauses that occur at a rate; failures at `all_rate` make them longer."""
    exponent = min(all_rate * pause.total_s, 700.0)
    longer = math.expm1(exponent) / exponent if exponent > 0 else 1.0
    for part, seconds in pause.parts().items():
        found[part] += rate * seconds * longer


def _missing_shares(recovery: RecoveryTimes) -> list[tuple[int, float]]:
    """Return the numbers of workers that are missing beyond the spares, with shares of the time.

    Losses are independent, so the number of groups that are away is Poisson distributed.
    """
    size = _mean_group(recovery)
    mean = recovery.mean_missing() / size
    if mean == 0:
        return [(0, 1.0)]
    spread = DEVIATIONS * math.sqrt(mean) + DEVIATIONS
    # With more groups away no worker is left.
    all_away = math.ceil((recovery.workers + recovery.spares) / size)
    found = []
    for groups in range(max(math.floor(mean - spread), 0), math.ceil(mean + spread)):
        if groups >= all_away:
            break
        chance = math.exp(groups * math.log(mean) - mean - math.lgamma(groups + 1))
        missing = max(round(groups * size) - recovery.spares, 0)
        found.append((min(missing, recovery.workers), chance))
    rest = 1 - math.fsum(chance for _, chance in found)
    return [*found, (recovery.workers, rest)] if rest > 1e-12 else found


def _mean_group(recovery: RecoveryTimes) -> float:
    """Return the mean number of workers that are lost together, weighted by their absence."""
    weights = [
        (rate * recovery.back_s.get(effect, 0.0), recovery.lost.get(effect, 0))
        for effect, rate in recovery.rates.items()
    ]
    total = sum(weight for weight, lost in weights if lost)
    return sum(weight * lost for weight, lost in weights if lost) / total if total > 0 else 1.0


def _find_absence(recovery: RecoveryTimes) -> tuple[float, float]:
    """Return the share of the training time that missing workers cost, and its part at no speed."""
    slow = still = 0.0
    for missing, chance in _missing_shares(recovery):
        speed = recovery.speed(recovery.workers - missing)
        slow += chance * (1 - speed)
        still += chance * (speed == 0)
    if recovery.spares:  # until a spare has taken over
        for effect, rate in recovery.rates.items():
            lost = min(recovery.lost.get(effect, 0), recovery.workers)
            slow += rate * recovery.spare_back_s * (1 - recovery.speed(recovery.workers - lost))
    return min(slow, 1.0), min(still, 1.0)
