"""Computes what failures cost, by formulas from the literature. Pure; all times are seconds.

`mtbf_s` is the mean time between failures of the whole job, whose failures are independent.
"""

from __future__ import annotations

import math
from collections.abc import Callable

GOLDEN = (math.sqrt(5) - 1) / 2
SEARCH_ROUNDS = 200


def job_mtbf_s(per_1000_node_days: float, nodes: float) -> float:
    """Return the mean time between failures of a job, in seconds; infinite without failures."""
    rate = per_1000_node_days / 1000 * nodes / 86_400
    return 1 / rate if rate > 0 else math.inf


def young_interval_s(save_s: float, mtbf_s: float) -> float:
    """Return Young's interval between saves that stop training for `save_s`.

    J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 1974.
    """
    return math.sqrt(2 * save_s * mtbf_s)


def young_share(save_s: float, mtbf_s: float) -> float:
    """Return the share of useful time at Young's interval, to first order, or 0."""
    return max(1 - math.sqrt(2 * save_s / mtbf_s), 0.0)


def exact_share(interval_s: float, save_s: float, mtbf_s: float, restart_s: float) -> float:
    """Return the share of useful time with exponential failures, without approximation.

    `interval_s`: training between two saves. Failures may strike in saves and restarts as well.
    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
    FGCS 2006, equation 20.
    """
    if mtbf_s == math.inf:
        return interval_s / (interval_s + save_s)
    exponent = (interval_s + save_s) / mtbf_s
    if exponent + restart_s / mtbf_s > 700:  # beyond this the exponential is no float
        return 0.0
    return interval_s / (mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1(exponent))


def find_best_interval_s(save_s: float, mtbf_s: float, restart_s: float) -> float:
    """Return the interval with the largest exact share, found by search."""
    most = 20 * max(young_interval_s(save_s, mtbf_s), save_s)
    return find_maximum(lambda t: exact_share(t, save_s, mtbf_s, restart_s), 1e-3, most)


def find_maximum(value: Callable[[float], float], low: float, high: float) -> float:
    """Return the place of a function's only maximum, by golden section on a log scale."""
    a, b = math.log(low), math.log(high)
    for _ in range(SEARCH_ROUNDS):
        c, d = b - GOLDEN * (b - a), a + GOLDEN * (b - a)
        if value(math.exp(c)) >= value(math.exp(d)):
            b = d
        else:
            a = c
        if b - a < 1e-9:
            break
    return math.exp((a + b) / 2)


def kokolis_ettr(interval_s: float, save_s: float, mtbf_s: float, restart_s: float) -> float:
    """Return the expected share of effective training time, without the time in a queue.

    Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning Research Clusters",
    HPCA 2025 (arXiv:2410.21680), section 4: each failure costs a restart and half an interval, and
    each interval ends with a save.
    """
    return max(1 - (restart_s + interval_s / 2) / mtbf_s, 0.0) / (1 + save_s / interval_s)


def pair_failures(pairs: int) -> float:
    """Return the expected number of failures until both processes of one pair have failed.

    Failures strike all processes alike, even if they have failed before. The number is one more
    than 4^n / C(2n, n) for n pairs. Casanova, Robert, Vivien and Zaidouni, "On the impact of
    process replication on executions of large-scale parallel applications with coordinated
    checkpointing", FGCS 2015.
    """
    log_choose = math.lgamma(2 * pairs + 1) - 2 * math.lgamma(pairs + 1)
    return 1 + math.exp(2 * pairs * math.log(2) - log_choose)
