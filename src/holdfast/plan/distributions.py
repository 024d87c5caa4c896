"""Describes how long things last: times between failures, and times to repair.

All times are seconds. Random numbers come from the `random.Random` that the caller passes, so the
same seed gives the same times.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from random import Random
from statistics import NormalDist

from holdfast.engine.core.errors import UserError

#: Steps of the grid for the renewal equation.
GRID = 2_000
NEWTON_ROUNDS_MAX = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Bounds a quantity that is known roughly, such as a published rate."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high < math.inf:
            raise UserError(
                f"{self.low:g}:{self.high:g} is no interval: give LOW:HIGH with 0 <= LOW <= HIGH"
            )

    @property
    def middle(self) -> float:
        """Return the geometric mean, or the arithmetic mean if the interval begins at 0."""
        if self.low == 0:
            return self.high / 2
        return math.sqrt(self.low * self.high)

    def times(self, factor: float) -> Interval:
        return Interval(low=self.low * factor, high=self.high * factor)

    def __str__(self) -> str:
        return f"{self.low:g}" if self.low == self.high else f"{self.low:g} to {self.high:g}"


def read_interval(text: str) -> Interval:
    """Read `VALUE` or `LOW:HIGH`. UserError if the text is neither."""
    low, _, high = text.partition(":")
    try:
        return Interval(low=float(low), high=float(high or low))
    except ValueError:
        raise UserError(f"{text!r} is no number: give VALUE or LOW:HIGH") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Weibull:
    """Describes times between failures. With shape 1 they are exponential.

    A shape below 1 means that a failure is likelier soon after the last one than later.
    """

    mean_s: float
    shape: float = 1.0

    @property
    def mean_factor(self) -> float:
        """Return the mean divided by the scale: the gamma function at 1 + 1 / shape."""
        return math.gamma(1 + 1 / self.shape)

    @property
    def variation(self) -> float:
        """Return the coefficient of variation: the standard deviation divided by the mean."""
        second = math.gamma(1 + 2 / self.shape)
        return math.sqrt(second / self.mean_factor**2 - 1)

    @property
    def scale_s(self) -> float:
        return self.mean_s / self.mean_factor

    def draw(self, rng: Random) -> float:
        return rng.weibullvariate(self.scale_s, self.shape)

    def draw_remaining(self, rng: Random) -> float:
        """Draw the time from a random moment to the next failure, of an old unit.

        A random moment falls into a long time between failures more often than into a short one,
        in proportion to its length, and anywhere within it. In units of the scale, a length chosen
        so is a gamma variable with the parameter 1 + 1 / shape, to the power of 1 / shape.
        """
        length = rng.gammavariate(1 + 1 / self.shape, 1.0) ** (1 / self.shape)
        return float(self.scale_s * length * rng.random())

    def failed_by(self, age_s: float) -> float:
        """Return the probability that a new unit has failed by this age."""
        return -math.expm1(-math.pow(age_s / self.scale_s, self.shape))

    def count_renewals(self, span_s: float) -> float:
        """Return the mean number of failures in a time of a unit that is new at its beginning.

        It is repaired at once and is as good as new. Solves the renewal equation on a grid.
        """
        edges = [self.failed_by(span_s * i / GRID) for i in range(GRID + 1)]
        shares = [b - a for a, b in itertools.pairwise(edges)]
        found = [0.0]
        for n in range(1, GRID + 1):
            later = sum(shares[j] * found[n - 1 - j] for j in range(n - 1))
            halves = sum(shares[j] * (found[n - j] - found[n - 1 - j]) for j in range(1, n)) / 2
            # The newest value stands on both sides of the equation, with half of the first share.
            known = edges[n] + later + halves + shares[0] * found[n - 1] / 2
            found.append(known / (1 - shares[0] / 2))
        return found[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormal:
    """Describes times to repair: most are short, and a few are very long."""

    mean_s: float
    median_s: float

    def __post_init__(self) -> None:
        if not 0 < self.median_s <= self.mean_s:
            raise UserError(
                f"a median of {self.median_s:g} s needs a mean of at least as much, "
                f"not {self.mean_s:g} s"
            )

    @property
    def sigma(self) -> float:
        """Return the standard deviation of the logarithm."""
        return math.sqrt(2 * math.log(self.mean_s / self.median_s))

    def draw(self, rng: Random) -> float:
        return rng.lognormvariate(math.log(self.median_s), self.sigma)

    def quantile(self, share: float) -> float:
        """Return the time within which this share of the repairs has ended."""
        if self.sigma == 0:
            return self.median_s
        return math.exp(NormalDist(math.log(self.median_s), self.sigma).inv_cdf(share))


def fit_weibull(times_s: list[float]) -> Weibull:
    """Fit times between failures by the greatest likelihood.

    UserError if there are fewer than three times, or not all are above zero.
    """
    if len(times_s) < 3 or min(times_s) <= 0:
        raise UserError(
            f"a shape needs at least three times above zero between failures, not {times_s}"
        )
    logs = [math.log(t) for t in times_s]
    mean_log = sum(logs) / len(logs)
    shape = 1.0
    for _ in range(NEWTON_ROUNDS_MAX):
        weights = [math.exp(shape * (each - mean_log)) for each in logs]
        total = sum(weights)
        first = sum(w * log for w, log in zip(weights, logs, strict=True)) / total
        second = sum(w * log * log for w, log in zip(weights, logs, strict=True)) / total
        value = first - 1 / shape - mean_log
        step = value / (second - first**2 + 1 / shape**2)
        shape = max(shape - step, shape / 2)
        if abs(step) < 1e-10 * shape:
            break
    mean_power = sum(math.exp(shape * (each - mean_log)) for each in logs) / len(logs)
    scale_s = math.exp(mean_log) * mean_power ** (1 / shape)
    return Weibull(mean_s=scale_s * math.gamma(1 + 1 / shape), shape=shape)
