"""How long nodes that leave keep their pieces, and when the last workers may be ended."""

from __future__ import annotations

import dataclasses
from typing import Any

from holdfast.engine.core.membership.durable import Durable
from holdfast.engine.core.membership.facts import Facts
from holdfast.engine.core.membership.handover import Handover
from holdfast.engine.core.membership.protection import Protection
from holdfast.engine.core.redundancy import KeptPieces, Piece, Redundancy
from holdfast.engine.core.types import AgentId, Incarnation, WorkerId
from holdfast.engine.core.views import View
from holdfast.engine.core.worker_status import WorkerStatus
from roster_kit import LEASE, Cluster, member, stopped, view_of

ONE = Redundancy(data=1, parity=0)  # no loss of a node is borne
TWO = Redundancy(data=1, parity=1)
GONE = AgentId("n2")
LATER = 100.0


def kept(view: int, part: int, parts: int, *states: int, end: int, number: int = 0) -> KeptPieces:
    """Return a piece of a view's states, and of the gradients from the first of these to `end`."""
    return KeptPieces(
        view=view,
        worker=part,
        parts=parts,
        pieces=(Piece(part, number),),
        states=states,
        first=min(states, default=0),
        end=end,
        committed=end,
    )


class Job:
    """Members of view 3 on n0 and n1, and n2, which leaves with its pieces of view 2."""

    def __init__(self, redundancy: Redundancy = ONE, **handover: Any) -> None:
        self.cluster = Cluster(member(0), member(1))
        self.protection = Protection(redundancy)
        self.handover = Handover(**handover)
        self.durable = Durable()
        self.view = view_of(0, 1)
        self.lines: list[str] = []
        self.leave(kept(2, 2, 3, 4, end=5))
        for part in (0, 1):
            self.hear(part, kept(2, part, 3, 4, end=5))

    def hear(self, worker: int, *pieces: KeptPieces, **fields: Any) -> None:
        """Deliver the report of a node with its worker."""
        self.cluster.hear(f"n{worker}", fields.pop("says", member(worker)), kept=pieces, **fields)

    def leave(self, *pieces: KeptPieces, **fields: Any) -> None:
        self.cluster.hear(GONE, draining="asked for", kept=pieces, **fields)

    def facts(self, *silent: int, **fields: Any) -> Facts:
        return self.cluster.facts(self.view, *silent, **({"now": LATER} | fields))

    def review(self, *silent: int, ends: bool = False, **fields: Any) -> tuple[AgentId, ...]:
        """Decide; return the nodes that are needed."""
        facts = self.facts(*silent, **fields)
        self.handover, lines = self.handover.review(facts, self.protection, self.durable, ends)
        self.lines += [line.text for line in lines]
        return self.handover.needed

    def warning(self, node: str = GONE) -> str:
        facts = self.facts()
        return self.handover.foresee_loss(facts, self.protection, self.durable, AgentId(node))


def test_a_node_keeps_its_pieces_until_others_protect_a_newer_state() -> None:
    job = Job()
    assert job.review() == (GONE,)
    assert job.review() == (GONE,)
    assert job.lines == ["node n2 stays until other nodes have its pieces of the state"]
    for part in (0, 1):
        job.hear(part, kept(3, part, 2, 5, end=5))
        assert job.review() == (GONE,), "no step has compared the newer state yet"
    for part in (0, 1):
        job.hear(part, kept(3, part, 2, 5, end=6))
    assert job.review() == ()
    (freed,) = job.handover.freed
    assert (freed.agent, freed.report) == (GONE, 1)


def test_a_node_is_freed_by_a_report_that_lists_its_pieces() -> None:
    job = Job()
    for part in (0, 1):
        job.hear(part, kept(3, part, 2, 5, end=6))

    def freed() -> list[tuple[int, int]]:
        job.review()
        assert not job.handover.awaits_reports
        return [(each.incarnation, each.report) for each in job.handover.freed]

    assert freed() == [(1, 1)]
    job.leave(kept(2, 2, 3, 4, end=5))
    assert freed() == [(1, 1)], "the same pieces"
    job.leave(kept(2, 2, 3, 4, end=6))
    assert freed() == [(1, 3)]
    job.leave(kept(2, 2, 3, 4, end=6), incarnation=Incarnation(2), seq=1)
    assert freed() == [(2, 1)]


def test_pieces_are_kept_although_the_memory_bears_their_loss() -> None:
    """It would bear no other loss until a newer state is protected."""
    job = Job(TWO)
    for part in (0, 1):
        job.hear(part, kept(2, part, 3, 4, end=5), kept(2, (part + 2) % 3, 3, 4, end=5, number=1))
    lost = frozenset([GONE])
    assert job.protection.find_newest(job.facts(), job.durable, lost).step == 5
    assert job.review() == (GONE,)


def test_reports_of_different_moments_free_no_node() -> None:
    """Node n1 has reported newer pieces, and has dropped older ones; n0 has reported neither."""
    job = Job()
    job.hear(1, kept(3, 1, 2, 5, end=7))
    assert job.protection.find_newest(job.facts(), job.durable, frozenset()).step == 0
    assert job.review() == (GONE,)


def test_pieces_that_silent_nodes_would_complete_are_kept() -> None:
    job = Job()
    assert job.review(1) == (GONE,)
    for part in (0, 1):
        job.hear(part, kept(3, part, 2, 5, end=6))
    assert job.review(1) == (GONE,), "the newer state may be lost with node n1"
    long_silent = LEASE.abandon_s + LEASE.margin_s + 1.0
    assert job.review(2, now=1.0 + long_silent) == (), "a silent node that leaves is given up"


def test_a_new_coordinator_frees_no_node_before_it_has_heard_all() -> None:
    job = Job()
    for part in (0, 1):
        job.hear(part, kept(3, part, 2, 5, end=6))
    assert job.review(now=LEASE.fence_s - 0.1) == (GONE,)
    assert job.review(now=LEASE.fence_s) == ()


def test_in_a_job_that_stands_still_a_copy_of_another_worker_is_enough() -> None:
    job = Job()
    for part in (0, 1):
        job.hear(part, kept(2, part, 3, 4, end=5), says=stopped(part))
    moved_at = job.cluster.roster.moved_at
    assert job.review(now=moved_at + LEASE.abandon_s - 0.1) == (GONE,)
    assert job.review(now=moved_at + LEASE.abandon_s) == ()
    shares = Job(replicated=False)
    for part in (0, 1):
        shares.hear(part, kept(2, part, 3, 4, end=5), says=stopped(part))
    assert shares.review() == (GONE,), "no worker holds the whole state"


def test_a_node_that_fails_a_check_is_needed_once_it_is_drained() -> None:
    job = Job()
    pieces = (kept(2, 2, 3, 4, end=5),)
    job.cluster.hear(GONE, draining="disk: slow", failing="disk", kept=pieces)
    assert job.review() == ()
    job.cluster.drain(GONE)
    assert job.review() == (GONE,), "its cluster manager may take it"
    assert job.lines == []


# ---------------------------------------------------------------- the last workers


def test_the_last_workers_end_once_memory_has_the_step_that_was_known() -> None:
    job = Job()
    assert not job.handover.may_end
    job.hear(0, kept(2, 0, 3, 4, end=5), says=member(0, committed=6))
    job.review(ends=True)
    assert (job.handover.may_end, job.handover.awaits_reports) == (False, True)
    job.hear(0, kept(2, 0, 3, 4, end=8), says=member(0, committed=8))
    for part in (1, 2):
        pieces = kept(2, part, 3, 4, end=8)
        job.leave(pieces) if part == 2 else job.hear(part, pieces, says=member(1, committed=7))
        job.review(ends=True)
        assert job.handover.may_end is (part == 2)
    assert not job.handover.saves, "the node stays until its pieces were read"
    job.review()
    assert not job.handover.may_end


def test_without_memory_they_end_once_a_checkpoint_has_it() -> None:
    job = Job(Redundancy())
    job.review(ends=True)
    assert (job.handover.may_end, job.handover.saves) == (False, True)
    job.durable.note([saved(4)])
    job.review(ends=True)
    assert not job.handover.may_end
    job.durable.note([saved(5)])
    job.review(ends=True)
    assert (job.handover.may_end, job.handover.saves) == (True, False)


def saved(step: int) -> WorkerStatus:
    return member(0, saved=step)


def test_before_a_deadline_a_checkpoint_has_half_of_the_time_if_memory_bears_no_loss() -> None:
    job = Job()
    job.leave(kept(2, 2, 3, 4, end=5), leaves_in_s=LATER + 9.0)
    job.review(ends=True)
    assert (job.handover.may_end, job.handover.saves) == (False, True)
    (half,) = job.handover.list_alarms()
    assert half == LATER + 5.0
    job.review(ends=True, now=half - 0.1)
    assert not job.handover.may_end
    job.review(ends=True, now=half)
    assert job.handover.may_end, "its pieces are still there to be read"
    bears = Job(TWO)
    for part in (0, 1):
        bears.hear(part, kept(2, part, 3, 4, end=5), kept(2, (part + 2) % 3, 3, 4, end=5, number=1))
    bears.leave(kept(2, 2, 3, 4, end=5), leaves_in_s=LATER + 9.0)
    bears.review(ends=True)
    assert bears.handover.may_end


# ---------------------------------------------------------------- warnings


def test_an_order_to_leave_is_answered_with_what_may_be_lost() -> None:
    job = Job()
    assert job.warning() == "", "others hold the state"
    job.view = spread_over(0, 2)
    needed = "node n2 is needed until other nodes have its share of the state: if it is gone before"
    assert job.warning() == f"{needed}, the job goes back to step 0"
    job.durable.note([saved(3)])
    assert job.warning() == f"{needed}, the job goes back to the checkpoint of step 3"
    job.protection = Protection(Redundancy())
    assert job.warning() == f"{needed}, the job goes back to the checkpoint of step 3"
    assert job.warning("n1") == "", "nothing of the job is there"


def test_no_loss_is_foreseen_that_memory_bears_although_reports_are_some_steps_late() -> None:
    job = Job(TWO)
    job.view = spread_over(0, 2)
    job.hear(
        0, kept(2, 0, 3, 4, end=5), kept(2, 2, 3, 4, end=5, number=1), says=member(0, committed=9)
    )
    assert job.warning() == ""


def spread_over(first: int, second: int) -> View:
    """Return view 3 with worker 0 alone, spread over two nodes."""
    alone = dataclasses.replace(
        view_of(0).members[0], agent=AgentId(f"n{first}"), further=(AgentId(f"n{second}"),)
    )
    assert alone.worker == WorkerId(0)
    return dataclasses.replace(view_of(0), members=(alone,))
