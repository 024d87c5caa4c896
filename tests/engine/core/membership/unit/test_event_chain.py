"""Lines of the event log are linked by their causes, and name the node of their worker."""

from __future__ import annotations

from holdfast.engine.core.directives import AgentReport
from holdfast.engine.core.membership.coordinator_events import Announce
from holdfast.engine.core.membership.event_log import EventChain
from holdfast.engine.core.types import AgentId, Incarnation, ViewNumber, WorkerId
from holdfast.engine.core.views import Member, View
from holdfast.engine.core.worker_status import Stage, WorkerStatus

W0, W1 = WorkerId(0), WorkerId(1)
NEAR, FAR = AgentId("near"), AgentId("far")
FIRST = Incarnation(1)


def view_of(number: int, *workers: WorkerId) -> View:
    nodes = {W0: NEAR, W1: FAR}
    return View(
        number=ViewNumber(number),
        members=tuple(Member(worker=w, incarnation=FIRST, agent=nodes[w]) for w in workers),
        owners=tuple(workers),
        resume_step=0,
        leader=workers[0],
    )


def tell(chain: EventChain, *lines: Announce, view: View | None = None) -> list[Announce]:
    return [chain.number(line, view, 1.0) for line in lines]


def commit(chain: EventChain, step: int) -> None:
    status = WorkerStatus(
        worker=W0, incarnation=FIRST, stage=Stage.READY, view=ViewNumber(1), committed=step
    )
    report = AgentReport(agent=NEAR, incarnation=FIRST, seq=1, slots=1, workers=(status,))
    chain.take_in(report, 1.0)


def test_lines_on_wrong_results_lead_to_the_loss_of_the_worker() -> None:
    chain = EventChain(1, view_of(1, W0, W1))
    wrong = Announce("wrong", "worker 1 has computed wrongly", W1)
    first, second, lost = tell(chain, wrong, wrong, Announce("lost", "worker 1 was lost", W1))
    assert second.causes == (first.id,)
    assert lost.causes == (first.id, second.id)
    assert first.node == lost.node == FAR


def test_they_do_not_lead_to_a_loss_some_steps_later() -> None:
    chain = EventChain(1, view_of(1, W0, W1))
    tell(chain, Announce("wrong", "worker 1 has computed wrongly", W1))
    commit(chain, 5)
    (lost,) = tell(chain, Announce("lost", "worker 1 was lost", W1))
    assert lost.causes == ()


def test_silence_after_the_end_of_a_view_is_a_cause_of_the_next_one() -> None:
    chain = EventChain(1, view_of(1, W0, W1))
    stopped, silent, lost = tell(
        chain,
        Announce("stop_view", "view 1 is stopped", None, ViewNumber(1)),
        Announce("silent", "node far is silent", node=FAR),
        Announce("lost", "worker 1 was lost", W1, node=FAR),
    )
    (view,) = tell(chain, Announce("view", "view 2"), view=view_of(2, W0))
    assert lost.causes == (silent.id,)
    assert view.causes == (stopped.id, silent.id, lost.id)


def test_silence_of_a_node_without_members_is_none() -> None:
    chain = EventChain(1, view_of(1, W0))
    stopped, _ = tell(
        chain,
        Announce("stop_view", "view 1 is stopped", None, ViewNumber(1)),
        Announce("silent", "node far is silent", node=FAR),
    )
    (view,) = tell(chain, Announce("view", "view 2"), view=view_of(2, W0))
    assert view.causes == (stopped.id,)
