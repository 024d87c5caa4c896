"""Verdicts on slow workers and links, and new assignments, of small made-up jobs, step by step.

The jobs of test_stragglers.py and test_links.py are random, and show how often a verdict is right.
These are made by hand, so that the step and the words of every verdict are known. Each member of a
view decides separately, so a change here is a change of behaviour.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast.engine.core.ground.events import NO_MEMBER, Wait
from holdfast.engine.core.step.balance import BalancePolicy, Balancer
from holdfast.engine.core.step.link_detector import LinkDetector
from holdfast.engine.core.step.stragglers import Detector
from holdfast.engine.core.types import WorkerId

BEGIN = 30  # the step at which worker 1 becomes slow
Times = Callable[[int, int], float]  # the time of a worker in a step


def unsteady(worker: int, step: int, by: float = 0.02) -> float:
    """Return about a second, in a pattern of five steps that differs between workers."""
    return 1.0 + by * ((step * 7 + worker * 3) % 5 - 2) / 2


def slow(factor: Times, by: float = 0.02) -> Times:
    return lambda worker, step: (
        unsteady(worker, step, by)
        * (factor(worker, step) if worker == 1 and step >= BEGIN else 1.0)
    )


# How worker 1 becomes slow; then step, kind, factor and steps of each verdict on it.
SLOW: dict[str, tuple[Times, list[tuple[int, str, str, int]]]] = {
    "for thirty steps": (
        slow(lambda worker, step: 1.5 if step < 2 * BEGIN else 1.0),
        [(32, "STEADY", "1.49", 3), (74, "RECOVERED", "1.00", 16)],
    ),
    "by a tenth": (slow(lambda worker, step: 1.1), [(40, "STEADY", "1.10", 11)]),
    "in every third step": (
        slow(lambda worker, step: 1.6 if step % 3 == 0 else 1.0),
        [(39, "PERIODIC", "1.60", 10)],
    ),
    "more and more": (
        slow(lambda worker, step: 1.0 + 0.01 * (step - BEGIN)),
        [(44, "STEADY", "1.12", 10), (60, "DRIFTING", "1.23", 16)],
    ),
    "once": (
        slow(lambda worker, step: 2.5 if step == BEGIN else 1.0),
        [(31, "ONCE", "2.55", 1)],
    ),
    "from twice as fast": (
        lambda worker, step: unsteady(worker, step) * (0.5 if worker == 1 and step < BEGIN else 1),
        [(32, "OWN_PAST", "1.89", 16)],
    ),
    "amid much noise": (
        slow(lambda worker, step: 1.5, by=0.3),
        [(40, "INTERMITTENT", "2.13", 11)],
    ),
    "not at all": (slow(lambda worker, step: 1.0), []),
    "amid noise alone": (slow(lambda worker, step: 1.0, by=0.3), []),
}


@pytest.mark.parametrize("how", SLOW)
def test_a_slow_worker_is_reported_at_these_steps_as_these_kinds(how: str) -> None:
    times, expected = SLOW[how]
    detector = Detector([WorkerId(10 + w) for w in range(4)])
    found = []
    for step in range(110):
        for verdict in detector.observe([times(worker, step) for worker in range(4)]):
            assert verdict.worker == 11
            found.append((step, verdict.kind.name, f"{verdict.factor:.2f}", verdict.steps))
    assert found == expected


def test_a_slow_worker_alone_or_one_of_two_is_found_little_later() -> None:
    for workers, slow_one, expected in ((1, 0, (32, "OWN_PAST")), (2, 1, (33, "STEADY"))):
        detector = Detector([WorkerId(w) for w in range(workers)])
        found = []
        for step in range(90):
            factor = 1.5 if step >= BEGIN else 1.0
            times = [unsteady(w, step) * (factor if w == slow_one else 1) for w in range(workers)]
            found += [(step, v.kind.name) for v in detector.observe(times)]
        assert found == [expected]


# ---------------------------------------------------------------- links


def waits(rank: int, step: int) -> Wait:
    """Return the end of a usual exchange: each member waits a millisecond for its neighbour."""
    return Wait((rank + 1) % 4, 1000, 1000)


def late(whose: Callable[[int, int], bool], waited_us: int = 20_000) -> Callable[..., Wait]:
    """Return exchanges in which these members wait longer, and for rank 2."""

    def exchange(rank: int, step: int) -> Wait:
        return Wait(2, waited_us - 1000, waited_us) if whose(rank, step) else waits(rank, step)

    return exchange


# Which member waits for which; then step, peer, waiting member (None: most), whether the peer is
# slow, how late.
LINKS: dict[str, tuple[Callable[..., Wait], list[tuple[int, int, int | None, bool, int]]]] = {
    "one waits": (
        late(lambda rank, step: rank == 0 and step < 30),
        [(7, 12, 10, True, 18_000), (44, 12, 10, False, 0)],
    ),
    "all wait": (
        late(lambda rank, step: rank != 2 and step < 30),
        [(7, 12, None, True, 18_000), (44, 12, None, False, 0)],
    ),
    "one waits in every second step": (
        late(lambda rank, step: rank == 0 and step < 40 and step % 2 == 1),
        [(15, 12, 10, True, 18_000), (53, 12, 10, False, 0)],
    ),
    "first one, then all": (
        late(lambda rank, step: rank == 0 or (rank != 2 and step >= 20)),
        [(7, 12, 10, True, 18_000), (27, 12, None, True, 18_000)],
    ),
    "the peer computes longer": (
        lambda rank, step: Wait(1, 90_000, 0) if rank == 2 else Wait(2, 1000, 90_000 - 1000 * rank),
        [],
    ),
    "too short to matter": (late(lambda rank, step: rank == 0, waited_us=6_000), []),
    "as usual": (waits, []),
}


@pytest.mark.parametrize("how", LINKS)
def test_a_slow_link_is_reported_at_these_steps_as_that_of_these_workers(how: str) -> None:
    exchange, expected = LINKS[how]
    detector = LinkDetector([WorkerId(10 + w) for w in range(4)])
    found = []
    for step in range(60):
        for verdict in detector.observe([exchange(rank, step) for rank in range(4)], [100_000] * 4):
            found.append((step, verdict.worker, verdict.to, verdict.slow, verdict.late_us))
    assert found == expected


@pytest.mark.parametrize(("compute_us", "told"), [(100_000, True), (370_000, False)])
def test_a_wait_that_is_little_of_a_step_is_not_worth_a_line(compute_us: int, told: bool) -> None:
    detector = LinkDetector([WorkerId(w) for w in range(4)])
    exchange = late(lambda rank, step: rank == 0)
    found = [
        verdict
        for step in range(30)
        for verdict in detector.observe([exchange(rank, step) for rank in range(4)], [compute_us])
    ]
    assert bool(found) is told
    assert detector.observe([Wait()], [5]) == []  # a single member waits for no other
    assert Wait() == Wait(peer=NO_MEMBER, took_us=0, waited_us=0)


# ---------------------------------------------------------------- assignments


def test_an_assignment_follows_the_speeds_step_by_step() -> None:
    """Worker 1 is slow; later worker 2 is far slower, loses all tasks and is tried again."""
    policy = BalancePolicy(warm_up=1, window=2, gain=5, calm=8, retry=4)
    owners = [WorkerId(w) for w in (0, 0, 0, 1, 1, 1, 2, 2)]
    balancer = Balancer(policy, [WorkerId(w) for w in range(3)], owners)
    found = []
    for step in range(40):
        paces = (100, 250, 100) if step < 20 else (100, 100, 4000)
        if balancer.observe([p * n for p, n in zip(paces, balancer.counts, strict=True)]):
            found.append((step, balancer.owners))
    assert found == [
        (2, (0, 0, 0, 1, 0, 2, 2, 2)),
        (20, (0, 0, 0, 1, 0, 0, 0, 1)),
        (24, (0, 0, 0, 1, 0, 0, 2, 1)),
        (32, (0, 0, 0, 1, 0, 1, 1, 1)),
    ]
    assert balancer.paces == (100, 100, 4000)
    assert balancer.counts == (4, 4, 0)


@pytest.mark.parametrize(("gain", "moves"), [(25, True), (26, False)])
def test_an_assignment_changes_for_as_much_as_was_asked_for(gain: int, moves: bool) -> None:
    """Six tasks, four of them on one worker: with three on each a step takes a quarter less."""
    policy = BalancePolicy(warm_up=0, window=1, gain=gain)
    owners = [WorkerId(w) for w in (0, 0, 0, 0, 1, 1)]
    assert Balancer(policy, owners[3:5], owners).observe([400, 200]) is moves
