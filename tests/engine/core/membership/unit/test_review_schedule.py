"""The coordinator must look again after a change, when a node falls silent, and at alarms."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from holdfast.engine.core.membership import review_schedule
from holdfast.engine.core.membership.review_schedule import LEASES, REVIEW_S, Agenda
from holdfast.engine.core.policies import CoordinatorPolicy, LeasePolicy
from holdfast.engine.core.types import Incarnation
from holdfast.engine.core.worker_status import Phase
from roster_kit import LEASE, Cluster, member

POLICY = CoordinatorPolicy(virtual_ranks=2, lease=LEASE, patience_s=5.0, hang_s=50.0)


def agenda(*, reviewed: bool = True) -> tuple[Agenda, Cluster]:
    """Return the agenda of an old job: two nodes reported at 1.0, when it was reviewed."""
    cluster = Cluster(member(0), member(1))
    cluster.roster.started_at = cluster.roster.moved_at = -100.0
    found = Agenda(POLICY, cluster.roster, 1.0)
    if reviewed:
        assert found.is_due(1.0)
        found.record_review(1.0, [])
    return found, cluster


def hear_both(cluster: Cluster, now: float, **fields: object) -> None:
    cluster.now = now
    for worker in range(2):
        cluster.hear(f"n{worker}", member(worker, **fields))


def test_the_first_review_is_due_at_once_and_none_before_its_time() -> None:
    found, _ = agenda(reviewed=False)
    assert found.deadline == 1.0
    assert not found.is_due(0.9)
    assert found.is_due(1.0)
    found.record_review(1.0, [])
    assert not found.is_due(1.0)


def test_after_a_review_the_next_is_due_when_somebody_may_be_silent() -> None:
    found, cluster = agenda()
    assert found.deadline == 1.0 + LEASE.suspect_s
    hear_both(cluster, 2.0)
    assert not found.is_due(2.5)  # they have reported by then
    assert found.deadline == 2.0 + LEASE.suspect_s
    assert found.is_due(3.5)
    assert found.silent == {"n0", "n1"}


def test_a_change_is_reviewed_after_a_pause_that_grows_with_the_job() -> None:
    found, cluster = agenda()
    found.change(1.0)
    pause_s = len(cluster.roster.slots) * REVIEW_S
    assert found.deadline == 1.0 + pause_s
    assert not found.is_due(1.0 + 0.9 * pause_s)
    assert found.is_due(1.0 + pause_s)
    found.record_review(1.0 + pause_s, [])
    found.change(1.2)
    assert found.deadline == 1.2
    assert found.is_due(1.2)
    found.record_review(1.2, [])
    found.change(1.2, at_once=True)
    assert found.is_due(1.2)
    found.record_review(1.2, [])
    found.change(9.0)
    assert found.deadline == 1.0 + LEASE.suspect_s  # the earlier deadline stays


def test_nodes_that_fall_silent_one_after_the_other_are_reviewed_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, cluster = agenda()
    monkeypatch.setattr(review_schedule, "REVIEW_S", 0.5)  # for each of the two workers
    cluster.now = 1.2
    cluster.hear("n1", member(1))
    assert found.is_due(1.0 + LEASE.suspect_s)
    found.record_review(1.0 + LEASE.suspect_s, [])
    assert not found.is_due(1.3 + LEASE.suspect_s)
    assert found.silent == {"n0"}
    assert found.deadline == 2.0 + LEASE.suspect_s
    assert found.is_due(2.0 + LEASE.suspect_s)
    assert found.silent == {"n0", "n1"}


def test_an_alarm_is_kept_whoever_is_heard() -> None:
    found, cluster = agenda()
    found.record_review(1.0, [0.5, 1.0, 2.0, 3.0])  # deadlines in the past do not count
    assert found.deadline == 2.0
    hear_both(cluster, 1.9)
    assert not found.is_due(1.99)
    assert found.is_due(2.0)


def test_a_silent_node_is_reviewed_again_when_it_is_fenced_and_when_it_is_given_up() -> None:
    found, cluster = agenda()
    cluster.now = 3.0
    cluster.hear("n0", member(0))
    assert found.is_due(3.0)
    assert found.silent == {"n1"}
    found.record_review(3.0, [])
    times = []
    while len(times) < 2:
        cluster.now = found.deadline or 0.0
        cluster.hear("n0", member(0, committed=int(cluster.now * 1000)))  # the job moves
        if found.is_due(cluster.now):
            times.append(cluster.now)
            found.record_review(cluster.now, [])
    lost_at = 1.0 + LEASE.abandon_s + LEASE.margin_s
    assert times == pytest.approx([1.0 + LEASE.fence_s, lost_at])
    cluster.hear("n1", member(1))
    found.change(cluster.now, at_once=True)
    assert found.is_due(cluster.now)
    assert found.silent == set()


def test_a_process_that_waits_to_be_started_again_is_an_alarm() -> None:
    found, cluster = agenda()
    cluster.put(1, respawn_at=1.75)
    found.record_review(1.0, [])
    assert found.deadline == 1.75


def test_a_job_that_stands_still_is_reviewed_at_both_limits_and_not_while_it_moves() -> None:
    found, cluster = agenda()
    reviews, now = [], 1.0
    while now < 60.0:
        now = min(found.deadline or now + 1.0, now + 1.0)
        hear_both(cluster, now)
        if found.is_due(now):
            reviews.append(now)
            found.record_review(now, [])
    assert reviews == pytest.approx([1.0 + POLICY.patience_s, 1.0 + POLICY.hang_s])
    assert found.still_since == 1.0
    hear_both(cluster, 60.0, phase=Phase.WAITING)
    assert found.still_since == 60.0
    found.stir(61.0)
    assert found.still_since == 61.0


def test_a_coordinator_that_stood_still_has_heard_nobody_and_suspects_nobody() -> None:
    found, cluster = agenda()
    woke = 1.0 + LEASE.suspect_s + 1.0
    assert not found.is_due(woke)  # its timer came late by more than half of the suspicion
    assert found.still_since == woke
    assert found.deadline == woke + LEASE.suspect_s
    hear_both(cluster, woke + 0.1)
    assert not found.is_due(woke + LEASE.suspect_s)


# ---------------------------------------------------------------- false suspicions


class Reports:
    """Node n0 reports ten times a second, n1 only on request; both from 1.0 on."""

    def __init__(self) -> None:
        self.found, self.cluster = agenda()

    def pass_time(self, until: float) -> None:
        while self.cluster.now < until - 1e-9:
            self.cluster.now = round(self.cluster.now + 0.1, 6)
            self.cluster.hear("n0", member(0, committed=int(self.cluster.now * 1000)))
            self._look()

    def hear_after(self, silence_s: float, **fields: Any) -> None:
        """Keep n1 silent for some time, then deliver its report."""
        self.pass_time(self.cluster.now + silence_s)
        self.cluster.hear("n1", member(1), **fields)
        self.found.change(self.cluster.now, at_once=True)
        self._look()

    def suspected_after(self, most_s: float = 10.0) -> float:
        """Return the silence after which n1, which has just reported, is suspected."""
        since = self.cluster.now
        while not self.found.silent:
            assert self.cluster.now < since + most_s
            self.pass_time(self.cluster.now + 0.1)
        return round(self.cluster.now - since, 6)

    def _look(self) -> None:
        now = self.cluster.now
        if self.found.is_due(now):
            self.found.record_review(now, [])


def test_a_node_that_was_suspected_for_nothing_may_be_silent_for_longer() -> None:
    job = Reports()
    assert job.suspected_after() == LEASE.suspect_s
    job.hear_after(0.1)  # after 1.6 s
    assert not job.found.silent
    assert job.suspected_after() == LEASE.lease_s, "half as long again is more than a lease"


def test_the_tolerated_silence_grows_and_never_shrinks_while_it_is_remembered() -> None:
    tick_s = 0.11
    short = LeasePolicy(lease_s=8.0, margin_s=0.5, suspect_s=1.5, abandon_s=20.0)
    job = Reports()
    job.found = Agenda(dataclasses.replace(POLICY, lease=short), job.cluster.roster, 1.0)
    assert job.suspected_after() == 1.5
    job.hear_after(0.1)  # after 1.6 s
    job.hear_after(2.3)
    after_s = job.suspected_after()
    assert after_s == pytest.approx(2.4, abs=tick_s)
    job.hear_after(4.0 - after_s)
    assert job.suspected_after() == pytest.approx(6.0, abs=tick_s)
    job.hear_after(0.1)
    for _ in range(3):
        job.hear_after(5.9)  # a silence that is tolerated now
        assert not job.found.silent
    assert job.suspected_after() == pytest.approx(8.0, abs=tick_s)
    job.hear_after(0.1)
    for _ in range(8 * LEASES):
        job.hear_after(1.0)
    assert job.suspected_after() == 1.5, "it is forgotten"


def test_the_others_are_suspected_as_before() -> None:
    job = Reports()
    job.suspected_after()
    job.hear_after(0.1)
    silent_from = job.cluster.now
    for _ in range(30):
        job.cluster.now = round(job.cluster.now + 0.1, 6)
        job.cluster.hear("n1", member(1, committed=int(job.cluster.now * 1000)))
        job._look()
        if job.found.silent:
            break
    assert job.found.silent == {"n0"}
    assert job.cluster.now - silent_from == pytest.approx(LEASE.suspect_s)


def test_a_silence_beyond_the_lease_or_of_an_agent_that_died_teaches_nothing() -> None:
    for silence_s, fields in ((LEASE.lease_s + 0.1, {}), (1.7, {"incarnation": Incarnation(2)})):
        job = Reports()
        job.hear_after(silence_s, **fields)
        assert job.suspected_after() == LEASE.suspect_s
