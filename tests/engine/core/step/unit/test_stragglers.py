"""Slow workers: found, with reasons and few false alarms; given less to do; no bit changes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.engine.core.ground.events import EventNoted
from holdfast.engine.core.step.balance import BalancePolicy, Balancer
from holdfast.engine.core.step.speculation import Budget, Lateness, Patience, choose_copies
from holdfast.engine.core.step.speeds import LastingSlowness, Speeds
from holdfast.engine.core.step.stragglers import Detector, Kind, Verdict, _kind
from holdfast.engine.core.types import AgentId, Incarnation, ViewNumber, WorkerId
from holdfast.engine.core.views import Member, View

Inject = Callable[[int, int, random.Random], float]  # worker and step give a factor
SLOW = (Kind.STEADY, Kind.INTERMITTENT, Kind.PERIODIC, Kind.DRIFTING, Kind.OWN_PAST)
BEGIN = 60  # the step at which the victim becomes slow
VICTIM = 1


def watch(workers: int, steps: int, inject: Inject, seed: int) -> list[tuple[int, Verdict]]:
    """Return the verdicts on a made-up job: 3 % noise, odd steps, and samples of all lengths."""
    dice = random.Random(seed)
    detector = Detector([WorkerId(i) for i in range(workers)])
    found = []
    for step in range(steps):
        length = math.exp(dice.gauss(0, 0.1))  # the same for all workers
        times = []
        for worker in range(workers):
            odd = dice.uniform(1.3, 3.0) if dice.random() < 0.01 else 1.0
            noise = math.exp(dice.gauss(0, 0.03))
            times.append(0.1 * length * noise * odd * inject(worker, step, dice))
        found += [(step, verdict) for verdict in detector.observe(times)]
    return found


def nothing(worker: int, step: int, dice: random.Random) -> float:
    return 1.0


def slow(factor: float, when: Callable[[int, random.Random], float]) -> Inject:
    """Return an injection; `when`: the share of the slowness some steps after its beginning."""

    def inject(worker: int, step: int, dice: random.Random) -> float:
        if worker != VICTIM or step < BEGIN:
            return 1.0
        return 1.0 + (factor - 1.0) * when(step - BEGIN, dice)

    return inject


PATTERNS: dict[str, Callable[[int, random.Random], float]] = {
    "constant": lambda step, dice: 1.0,
    "intermittent": lambda step, dice: float(step // 4 % 2 == 0),
    "at random": lambda step, dice: float(dice.random() < 0.6),
    "drifting": lambda step, dice: min((step + 1) / 10, 1.0),
}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("workers", [3, 4, 16])
def test_a_slow_worker_is_found_within_twenty_steps(workers: int, pattern: str) -> None:
    missed = []
    for seed, factor in enumerate([1.2, 1.3, 1.5, 2.0, 10.0] * 4):
        found = watch(workers, BEGIN + 21, slow(factor, PATTERNS[pattern]), seed)
        hits = [s for s, v in found if v.worker == VICTIM and v.kind in SLOW]
        if not hits:
            missed.append((seed, factor))
    assert missed == []


@pytest.mark.parametrize("workers", [1, 2, 4, 100])
def test_false_alarms_are_rare(workers: int) -> None:
    steps = 20_000 // workers
    alarms = [v for _, v in watch(workers, steps, nothing, 7) if v.kind in SLOW]
    assert len(alarms) <= 2  # one in ten thousand


def test_a_drift_is_seen_in_three_thirds_of_three_steps_or_more() -> None:
    assert _kind([0.1, 0.1, 0.3, 0.3, 0.9, 0.9], 0.05) is Kind.STEADY
    assert _kind([0.1] * 3 + [0.3] * 3 + [0.9] * 3, 0.05) is Kind.DRIFTING


def test_verdicts_tell_what_kind_of_slowness_it_is() -> None:
    def kinds(when: Callable[[int, random.Random], float], steps: int = 40) -> list[Kind]:
        found = watch(4, BEGIN + steps, slow(2.0, when), 3)
        return [v.kind for _, v in found if v.worker == VICTIM]

    assert kinds(PATTERNS["constant"]) == [Kind.STEADY]
    assert kinds(lambda step, dice: float(step % 3 == 0))[-1] is Kind.PERIODIC
    assert kinds(PATTERNS["at random"])[-1] is Kind.INTERMITTENT
    assert Kind.DRIFTING in kinds(lambda step, dice: step / 20)
    assert set(kinds(lambda step, dice: 9.0 * (step == 5))) == {Kind.ONCE}
    assert kinds(lambda step, dice: float(step < 30), 80) == [Kind.STEADY, Kind.RECOVERED]


def test_a_verdict_says_by_how_much_and_against_whom() -> None:
    found = watch(4, BEGIN + 20, slow(2.0, PATTERNS["constant"]), 3)
    ((step, verdict),) = [(s, v) for s, v in found if v.worker == VICTIM]
    assert step < BEGIN + 6
    assert verdict.factor == pytest.approx(2.0, rel=0.1)
    assert "times as long as its peers" in str(verdict)


def test_a_fast_worker_that_becomes_usual_is_slower_than_it_was() -> None:
    def inject(worker: int, step: int, dice: random.Random) -> float:
        return 0.7 if worker == VICTIM and step < BEGIN else 1.0

    found = [(v.worker, v.kind) for s, v in watch(5, BEGIN + 20, inject, 1) if s >= BEGIN]
    assert found == [(VICTIM, Kind.OWN_PAST)]


def test_alone_a_worker_is_held_against_its_own_past() -> None:
    detector = Detector([WorkerId(0)])
    dice = random.Random(2)
    found = []
    for step in range(80):
        found += detector.observe([math.exp(dice.gauss(0, 0.03)) * (1.5 if step >= 60 else 1.0)])
    assert [v.kind for v in found] == [Kind.OWN_PAST]


@pytest.mark.parametrize("seed", [5, 1108, 1658, 3016])
def test_a_machine_that_becomes_noisy_gives_no_trouble(seed: int) -> None:
    """A worker is slow, and then its slowness is lost in noise: no verdict may contradict another.

    The seeds once ended the job.
    """
    dice = random.Random(seed)
    workers = dice.choice((1, 2, 4))
    detector = Detector([WorkerId(w) for w in range(workers)])
    noise, slow = dice.choice((0.01, 0.03, 0.1)), 1.0
    dice.random()
    for _ in range(200):
        if dice.random() < 0.03:
            noise = math.exp(dice.uniform(-4, 1))
        if dice.random() < 0.05:
            slow = math.exp(dice.uniform(0, 1))
        row = [math.exp(dice.gauss(0, noise)) for _ in range(workers)]
        row[0] *= slow
        for verdict in detector.observe(row):
            assert verdict.kind is Kind.RECOVERED or verdict.factor > 1


def test_a_worker_without_a_task_is_not_judged() -> None:
    detector = Detector([WorkerId(i) for i in range(3)])
    for _ in range(50):
        assert detector.observe([1.0, 0.0, 1.01]) == []
    assert detector.observe([0.0, 0.0, 0.0]) == []


# ---------------------------------------------------------------- balance


def balanced(paces: list[int], owners: list[int], steps: int, policy: BalancePolicy) -> Balancer:
    """Return a balancer after `steps` steps in which a task takes its worker the µs in `paces`."""
    balancer = Balancer(policy, [WorkerId(i) for i in range(len(paces))], _ids(owners))
    for _ in range(steps):
        counts = balancer.counts
        balancer.observe([pace * n for pace, n in zip(paces, counts, strict=True)])
    return balancer


def _ids(owners: list[int]) -> list[WorkerId]:
    return [WorkerId(owner) for owner in owners]


def blocks(workers: int, each: int) -> list[int]:
    return [worker for worker in range(workers) for _ in range(each)]


def test_one_of_four_that_is_half_as_fast_gets_half_the_work() -> None:
    found = balanced([100, 100, 200, 100], blocks(4, 4), 10, BalancePolicy())
    assert found.counts == (5, 5, 2, 4)
    moved = sum(a != b for a, b in zip(found.owners, blocks(4, 4), strict=True))
    assert moved == 2  # the least possible


def test_equal_workers_keep_what_they_have_through_noise() -> None:
    dice = random.Random(3)
    balancer = Balancer(BalancePolicy(), _ids([0, 1, 2, 3]), _ids(blocks(4, 4)))
    changes = 0
    for _ in range(5000):
        changes += balancer.observe([int(4000 * math.exp(dice.gauss(0, 0.05))) for _ in range(4)])
    assert changes == 0


def test_an_assignment_does_not_swing() -> None:
    """A worker is slow in every other stretch of ten steps."""
    balancer = Balancer(BalancePolicy(), _ids([0, 1, 2, 3]), _ids(blocks(4, 4)))
    changes = 0
    for step in range(1000):
        slow_now = 200 if step // 10 % 2 else 100
        paces = [100, 100, 100, slow_now]
        changes += balancer.observe([p * n for p, n in zip(paces, balancer.counts, strict=True)])
    assert changes < 20


def test_a_very_slow_worker_gets_nothing_and_is_tried_again() -> None:
    policy = BalancePolicy(retry=30)
    balancer = balanced([100, 100, 100, 2000], blocks(4, 4), 12, policy)
    assert balancer.counts == (6, 5, 5, 0)
    seen = []
    for _ in range(60):
        balancer.observe([p * n for p, n in zip([100] * 4, balancer.counts, strict=True)])
        seen.append(balancer.counts)
    assert seen[-1] == (4, 4, 4, 4)


@given(
    paces=st.lists(st.integers(1, 10_000), min_size=1, max_size=6),
    each=st.integers(1, 5),
    steps=st.integers(1, 60),
)
def test_every_virtual_rank_has_one_owner_and_nothing_gets_worse(
    paces: list[int], each: int, steps: int
) -> None:
    start = blocks(len(paces), each)
    found = balanced(paces, start, steps, BalancePolicy(warm_up=0, window=2, retry=10**6))
    assert len(found.owners) == len(start)
    assert [found.owners.count(WorkerId(i)) for i in range(len(paces))] == list(found.counts)
    before = max(each * pace for pace in paces)
    assert max(n * pace for n, pace in zip(found.counts, paces, strict=True)) <= before


def test_the_leader_tells_of_what_costs_something() -> None:
    workers = [WorkerId(i) for i in range(4)]
    members = tuple(
        Member(worker=w, incarnation=Incarnation(1), agent=AgentId("a")) for w in workers
    )
    view = View(
        number=ViewNumber(1),
        members=members,
        owners=tuple(_ids(blocks(4, 4))),
        resume_step=0,
        leader=workers[0],
    )

    def events(unit_us: int, leads: bool, policy: BalancePolicy | None) -> list[EventNoted]:
        speeds, said = Speeds(view, policy), list[EventNoted]()
        for _ in range(60):
            counts = [speeds.owners.count(w) for w in workers]
            times = [
                n * unit_us * (2 if w == 3 else 1) for w, n in zip(workers, counts, strict=True)
            ]
            said += speeds.observe(times, leads)
        return said

    kinds = [event.kind for event in events(10_000, True, BalancePolicy())]
    assert kinds == ["slow", "balance"]
    event, lasting = events(10_000, True, None)
    assert event.text == "worker 3 is slow: it takes 2.00 times as long as its peers"
    assert event.about == lasting.about == workers[3]
    assert lasting.kind == "straggler"
    assert events(10_000, False, BalancePolicy()) == []
    assert [event.kind for event in events(100, True, BalancePolicy())] == ["balance"]


def test_slowness_that_comes_and_goes_is_reported_once() -> None:
    """Worker 1 is late for a while, again and again, as on a laptop with other programs."""
    workers = _ids(range(2))
    members = tuple(
        Member(worker=w, incarnation=Incarnation(1), agent=AgentId("a")) for w in workers
    )
    view = View(
        number=ViewNumber(1),
        members=members,
        owners=tuple(_ids(blocks(2, 2))),
        resume_step=0,
        leader=workers[0],
    )
    speeds, rng = Speeds(view, None), random.Random(1)

    def told(late: Callable[[int], bool], steps: int) -> list[str]:
        found = []
        for step in range(steps):
            times = [int(10_000 * (1 + 0.02 * rng.random())) for _ in workers]
            found += speeds.observe([times[0], times[1] * (3 if late(step) else 1)], True)
        return [event.text.partition(":")[0] for event in found if event.kind == "slow"]

    passing = told(lambda step: step % 100 < 40 and step % 5 in (0, 3), 800)
    assert passing == ["worker 1 is slow now and then", "worker 1 is not slow any more"]
    lasting = told(lambda step: step % 100 < 40, 400)
    assert [t for t in lasting if "any more" not in t] == ["worker 1 is slow"] * 4
    assert told(lambda step: step % 100 < 40 and step % 5 in (0, 3), 400) == passing


# ---------------------------------------------------------------- slowness that lasts


def find_stragglers(
    workers: int, steps: int, inject: Inject, noise: float, seed: int
) -> list[tuple[int, WorkerId]]:
    """Return steps and stragglers of a job whose noise lasts for some thirty tasks of 20 ms."""
    dice, lasting = random.Random(seed), LastingSlowness()
    ids, passing, found = _ids(range(workers)), [1.0] * workers, []
    for step in range(steps):
        times = {}
        for worker in ids:
            if dice.random() < 0.03:
                passing[worker] = math.exp(abs(dice.gauss(0, noise)))
            own = math.exp(dice.gauss(0, noise)) * inject(worker, step, dice)
            times[worker] = 0.02 * passing[worker] * own
        told = lasting.observe(times, dict.fromkeys(ids, 1))
        found += [(step, worker) for worker, _ in told]
    return found


@pytest.mark.parametrize("workers", [2, 4, 16])
@pytest.mark.parametrize("pattern", ["constant", "intermittent", "at random"])
def test_a_worker_that_is_slow_for_long_is_a_straggler(workers: int, pattern: str) -> None:
    found = find_stragglers(workers, 300, slow(3.0, PATTERNS[pattern]), 0.05, 1)
    assert [worker for _, worker in found] == [VICTIM]
    assert found[0][0] < BEGIN + 150


@pytest.mark.parametrize("workers", [2, 3, 4, 16])
def test_noise_that_lasts_for_many_steps_makes_almost_no_stragglers(workers: int) -> None:
    found = [find_stragglers(workers, 1000, nothing, 0.2, seed) for seed in range(3)]
    assert sum(map(len, found)) <= 1


def test_busy_machines_are_named_once_several_workers_were_slow() -> None:
    lasting, (one, other) = LastingSlowness(), _ids(range(2))
    assert [lasting.find_busy([one], 2) for _ in range(9)] == [""] * 9  # it may be that worker
    (text, *rest) = (lasting.find_busy(slow, 2) for slow in ([other], [one], [], [other]))
    assert text.startswith("10 times by now a worker was slow for a while: other programs use")
    assert rest == [""] * 3


# ---------------------------------------------------------------- late workers


def lateness(task_s: list[float], others_s: list[float], patience: Patience) -> Lateness:
    """Return the lateness after steps of one task each; other workers took `others_s` longer."""
    found, now = Lateness(patience), 0.0
    found.record_view(now)
    for task, wait in zip(task_s, others_s, strict=True):
        found.record_done(now + task)
        now += task + wait
        found.record_step(now, tasks=1)
    found.record_done(now)
    return found


def after(found: Lateness) -> tuple[float, float]:
    """Return the times for which it waits before it copies, and before it reports a late worker."""
    return found.copy_at - found.began_at, found.late_at - found.began_at


def test_patience_is_the_usual_wait_and_the_cost_of_the_answer() -> None:
    patience = Patience(copies=1.0, least_s=0.5)
    steady = lateness([0.1] * 10, [0.02] * 10, patience)
    assert after(steady) == pytest.approx((0.12, 0.02 + 0.12 + 0.5))
    stalled = lateness([0.1] * 10, [0.02] * 5 + [3.0] + [0.02] * 4, patience)
    assert after(stalled) == pytest.approx(after(steady))  # a single late step is not usual
    uneven = lateness([0.1] * 16, [0.0, 0.1, 0.2, 0.3] * 4, patience)
    assert after(uneven)[0] == pytest.approx(0.2 + 6 * 1.4826 * 0.1)  # nor is chance lateness


def test_a_group_that_takes_long_to_build_makes_patient() -> None:
    found = lateness([0.1] * 10, [0.0] * 10, Patience())
    found.record_built(found.began_at + 60.0)  # with the state sent to joiners
    found.record_built(found.began_at + 8.0)
    found.record_built(found.began_at + 60.0)
    assert after(found)[1] == pytest.approx(0.1 + 8.0)


def test_nobody_is_late_before_some_steps_were_timed() -> None:
    assert after(lateness([0.1] * 7, [0.0] * 7, Patience(copies=1.0))) == (math.inf, math.inf)


def test_copies_are_a_share_of_what_a_worker_computes_itself() -> None:
    found = lateness([0.1] * 100, [0.0] * 100, Patience(copies=0.02))
    for _ in range(3):  # two in a hundred, and one of them in advance
        assert found.copy_at < math.inf
        found.copied += 1
    assert found.copy_at == math.inf
    assert lateness([0.1] * 100, [0.0] * 100, Patience()).copy_at == math.inf


def test_suspending_workers_costs_at_most_a_share_of_all_tasks() -> None:
    budget = Budget(0.02, tasks=10)
    assert budget.allows(0)
    budget.record_trial(0)
    budget.spend(2)
    assert next(step for step in range(30) if budget.allows(step)) == 10
    assert not Budget(0.0, tasks=10).allows(5)


def test_copies_are_what_one_would_host_if_the_late_were_suspended() -> None:
    workers, owners = dict.fromkeys(_ids([0, 1, 2, 3]), ()), _ids([0, 1, 2, 2, 3, 3])

    def copies(late: list[int], me: int) -> tuple[int, ...]:
        return choose_copies(owners, workers, _ids(late), WorkerId(me))

    assert [copies([2], me) for me in range(4)] == [(2,), (3,), (), ()]
    assert [copies([2, 3], me) for me in range(4)] == [(2, 4), (3, 5), (), ()]
    assert copies([1, 2, 3], 0) == ()  # it may be this worker's own network then
