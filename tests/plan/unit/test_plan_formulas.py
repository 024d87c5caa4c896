"""Distributions, closed forms and published tables of a plan give the figures of their sources."""

from __future__ import annotations

import math
from random import Random
from statistics import fmean, pstdev

import pytest

from holdfast.engine.core.errors import UserError
from holdfast.engine.core.replica.intervals import best_interval_s
from holdfast.plan import closed_forms as forms
from holdfast.plan.distributions import (
    Interval,
    LogNormal,
    Weibull,
    fit_weibull,
    read_interval,
)
from holdfast.plan.failure_tables import (
    LLAMA3,
    TABLES,
    Effect,
    find_model,
    interpolate_cold_recovery_s,
)

HOUR_S = 3600.0


@pytest.mark.parametrize(
    ("shape", "factor", "variation"),
    [(0.7, 1.2658, 1.46), (0.78, 1.1543, 1.30), (0.8, 1.133, 1.26)],
)
def test_a_weibull_distribution_draws_what_it_states(shape, factor, variation):
    times = Weibull(mean_s=50.0, shape=shape)
    assert times.mean_factor == pytest.approx(factor, abs=5e-5)
    assert times.variation == pytest.approx(variation, abs=6e-3)
    rng = Random(1)
    drawn = [times.draw(rng) for _ in range(100_000)]
    assert fmean(drawn) == pytest.approx(50.0, rel=0.02)
    assert pstdev(drawn) / fmean(drawn) == pytest.approx(times.variation, rel=0.03)


def test_the_age_of_old_units_is_that_of_a_renewal_process_in_equilibrium():
    times, rng = Weibull(mean_s=1.0, shape=0.7), Random(2)
    drawn = [times.draw_remaining(rng) for _ in range(100_000)]
    assert fmean(drawn) == pytest.approx((1 + times.variation**2) / 2, rel=0.03)


def test_new_nodes_fail_more_often_at_first():
    span_s, rng = 54 * 86_400.0, Random(3)
    times = Weibull(mean_s=1000 / 6.5 * 86_400, shape=0.7)
    expected = times.count_renewals(span_s) / (span_s / times.mean_s)
    assert expected == pytest.approx(1.77, abs=0.01)
    failures = 0
    for _ in range(20_000):
        at = times.draw(rng)
        while at < span_s:
            failures += 1
            at += times.draw(rng)
    assert failures / 20_000 / (span_s / times.mean_s) == pytest.approx(expected, rel=0.02)
    steady = Weibull(mean_s=times.mean_s)
    assert steady.count_renewals(span_s) == pytest.approx(span_s / times.mean_s, rel=1e-3)


def test_a_fit_finds_the_shape_and_the_mean():
    rng = Random(4)
    times = Weibull(mean_s=100.0, shape=0.75)
    found = fit_weibull([times.draw(rng) for _ in range(20_000)])
    assert (found.shape, found.mean_s) == pytest.approx((0.75, 100.0), rel=0.03)
    with pytest.raises(UserError, match="at least three times"):
        fit_weibull([1.0, 2.0])


def test_repairs_have_the_mean_and_the_median_of_their_source():
    repair, rng = LogNormal(mean_s=355 * 60, median_s=54 * 60), Random(5)
    drawn = sorted(repair.draw(rng) for _ in range(200_000))
    assert drawn[len(drawn) // 2] == pytest.approx(54 * 60, rel=0.03)
    assert fmean(drawn) == pytest.approx(355 * 60, rel=0.15)
    assert repair.quantile(0.5) == pytest.approx(54 * 60)
    with pytest.raises(UserError, match="a median of 10 s"):
        LogNormal(mean_s=5.0, median_s=10.0)


def test_intervals_are_read_as_people_write_them():
    assert read_interval("5") == Interval(low=5.0, high=5.0)
    assert read_interval("2:8") == Interval(low=2.0, high=8.0)
    assert read_interval("2:8").middle == 4.0
    assert read_interval("0:8").middle == 4.0
    for text in ("8:2", "x", "-1:2", "1:inf", "nan", ":", ""):
        with pytest.raises(UserError):
            read_interval(text)


def test_means_between_failures_are_those_of_the_papers():
    assert forms.job_mtbf_s(6.5, 16_384 / 8) / HOUR_S == pytest.approx(1.803, abs=5e-4)
    assert forms.job_mtbf_s(6.5, 131_072 / 8) / HOUR_S == pytest.approx(0.2254, abs=5e-5)
    assert forms.job_mtbf_s(6.5, 128) / HOUR_S == pytest.approx(28.8, abs=0.05)
    assert LLAMA3.rate is not None
    assert LLAMA3.rate.middle == pytest.approx(3.789, abs=5e-4)
    assert forms.job_mtbf_s(LLAMA3.rate.middle, 2048) / HOUR_S == pytest.approx(3.093, abs=5e-4)
    assert forms.job_mtbf_s(0.0, 5) == math.inf


def test_intervals_between_saves_are_those_of_young_and_daly_and_of_a_search():
    mtbf_s, save_s, restart_s = 6 * HOUR_S, 120.0, 600.0
    assert forms.young_interval_s(save_s, mtbf_s) == pytest.approx(2276.8, abs=0.05)
    assert best_interval_s(save_s, mtbf_s) == pytest.approx(2197.5, abs=0.05)
    best_s = forms.find_best_interval_s(save_s, mtbf_s, restart_s)
    tried = max(range(100, 10_000), key=lambda t: forms.exact_share(t, save_s, mtbf_s, restart_s))
    assert best_s == pytest.approx(tried, abs=1.0)
    assert forms.exact_share(best_s, save_s, mtbf_s, restart_s) == pytest.approx(0.8737, abs=5e-5)


def test_the_ettr_of_kokolis_is_that_of_the_paper():
    mtbf_s = forms.job_mtbf_s(6.5, 1500)
    interval_s = forms.young_interval_s(10.0, mtbf_s)
    assert interval_s / 60 == pytest.approx(7.02, abs=5e-3)
    assert forms.kokolis_ettr(interval_s, 10.0, mtbf_s, 300.0) == pytest.approx(0.9205, abs=5e-5)


def test_pairs_of_processes_fail_as_published():
    failures = forms.pair_failures(100_000)
    assert failures == pytest.approx(561.5, abs=0.05)
    days = failures * 5 * 365 / 200_000
    assert days == pytest.approx(5.12, abs=5e-3)
    # The second failure of one pair strikes its other process half of the time: 3 on the average.
    assert forms.pair_failures(1) == pytest.approx(3.0)
    rng, total = Random(6), 0
    for _ in range(20_000):
        seen: set[int] = set()
        while 2 not in {sum(1 for each in seen if each // 2 == pair) for pair in range(3)}:
            seen.add(rng.randrange(6))
            total += 1
    assert total / 20_000 == pytest.approx(forms.pair_failures(3), rel=0.02)


@pytest.mark.parametrize("name", sorted(TABLES))
def test_every_table_makes_a_model(name):
    table = TABLES[name]
    rate = None if table.rate else Interval(low=5.0, high=5.0)
    if rate is not None:
        with pytest.raises(UserError, match="add --rate"):
            find_model(name)
    model = find_model(name, rate)
    assert sum(model.shares.values()) == pytest.approx(1.0)
    assert model.source
    assert model.per_node_s(4).low == pytest.approx(model.rate.low / 2000 / 86_400)


def test_counts_of_the_tables_are_those_of_their_sources():
    assert sum(cause.count for cause in LLAMA3.causes) == 419
    assert sum(cause.count for cause in TABLES["ft-hsdp"].causes) == 678
    assert LLAMA3.shares()[Effect.SILENT] == pytest.approx(6 / 419)
    with pytest.raises(UserError, match="no failure model 'llama4'"):
        find_model("llama4")


def test_lemon_nodes_cause_the_part_of_the_failures_that_their_source_states():
    lemons = TABLES["rsc-1"].lemons
    assert lemons is not None
    assert lemons.part == pytest.approx(10 / 14)


def test_a_cold_recovery_is_read_off_the_figure():
    assert interpolate_cold_recovery_s(98_000) == (900, 200)
    assert interpolate_cold_recovery_s(19_000) == pytest.approx((250, 23.5))
    assert interpolate_cold_recovery_s(8_000) == pytest.approx((100, 8.5))
    assert interpolate_cold_recovery_s(115_000) == pytest.approx((1050, 250))
