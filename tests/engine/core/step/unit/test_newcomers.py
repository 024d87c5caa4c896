"""Tests which worker computes a joiner's first tasks, too, and what follows from other bits."""

from __future__ import annotations

import dataclasses

import pytest

from holdfast.engine.core.membership.changes import OrderNext
from holdfast.engine.core.membership.progress import Progress
from holdfast.engine.core.membership.view_making import Proposal, make_view
from holdfast.engine.core.step.audit import Audit, Court, Ruling, Sentence
from holdfast.engine.core.step.newcomers import Newcomers, Refusal
from holdfast.engine.core.types import AgentId, Incarnation, ViewNumber, WorkerId
from holdfast.engine.core.views import View
from holdfast.engine.core.worker_status import Phase, WorkerStatus
from roster_kit import Cluster, member, view_of

W0, W1, W2, W3 = (WorkerId(i) for i in range(4))
OWNERS = (W0, W1, W2, W3) * 2


def joined(*joiners: WorkerId, members: int = 4) -> View:
    return view_of(*range(members), vranks=8, joiners=joiners, unproven=joiners)


def leaves(*wrong: tuple[WorkerId, int], steady: bool = True) -> Ruling:
    return Ruling(sentence=Sentence.LEAVE, wrong=wrong, steady=steady)


def test_each_task_of_a_joiner_is_computed_by_a_donor_until_one_is_committed() -> None:
    newcomers, view = Newcomers(looks=True), joined(W1, W3)
    planned = (Audit(0, W0, (W3,)), Audit(1, W1, (W3,)))
    found = newcomers.audits(view, OWNERS, planned)
    assert [audit.vrank for audit in found] == [0, 1, 3, 5, 7]
    assert found[0] == planned[0]  # the audits of other workers stay
    assert {a for audit in found[1:] for a in audit.auditors} == {W0, W2}
    newcomers.add_audits(view, (W0, W1, W3))
    assert newcomers.audits(view, OWNERS, planned) == found  # the step may be done again
    assert newcomers.record_commit(W1)
    assert not newcomers.record_commit(W0)  # it has no task to prove
    assert newcomers.audits(view, OWNERS, planned) == planned
    assert Newcomers(looks=False).audits(view, OWNERS, planned) == planned
    assert Newcomers(looks=False).record_commit(W1)


def test_a_joiner_that_hosts_nothing_proves_itself_by_a_members_task() -> None:
    newcomers, view, idle = Newcomers(looks=True), joined(W1), (W0, W2, W3, W0)
    planned = (Audit(0, W0, (W2,)),)
    assert newcomers.audits(view, idle, planned) == (*planned, Audit(1, W2, (W1,)))
    newcomers.add_audits(view, (W0, W2))  # other workers have computed everything again
    assert not newcomers.record_commit(W1)
    assert [audit.vrank for audit in newcomers.audits(view, OWNERS, ())] == [1, 5]
    newcomers.add_audits(view, (W2, W1))
    assert newcomers.record_commit(W1)
    assert newcomers.audits(view, OWNERS, ()) == ()


def test_a_joiner_that_differs_from_the_member_whose_task_it_computes_is_refused() -> None:
    idle = (W0, W2, W3, W0)
    for ruling in (leaves((W1, 1)), Ruling(sentence=Sentence.TIE, disputed=(1,), steady=True)):
        refused = Newcomers(looks=True).judge(joined(W1), ruling, idle)
        assert refused == ((W1,), Refusal.ANEW)


def test_a_joiner_is_unproven_until_a_task_of_it_is_committed() -> None:
    first = [member(w, unproven=True) for w in range(4)]
    roster = Cluster(*first).roster

    def unproven(step: int, *joiners: int, old: View | None = None, members: int = 4) -> tuple:
        workers = tuple(WorkerId(w) for w in range(members))
        proposal = Proposal(
            workers=workers,
            owners=workers,
            resume_step=step,
            joiners=tuple(map(WorkerId, joiners)),
            why="",
        )
        return make_view(proposal, ViewNumber(9), old, roster).unproven

    assert unproven(4, 1, 3) == (W1, W3)
    assert unproven(4, 0, 1, 2, 3) == ()  # the job begins: no worker has proven more than they
    before = joined(W1)
    assert unproven(4, old=before) == (W1,)  # the step is done again
    assert unproven(4, 3, old=before) == (W1, W3)
    assert unproven(5, old=before) == (W1,)  # it hosted no task in the step before
    proved = Cluster(*[member(w) for w in range(4)]).roster
    there, roster = roster, proved
    assert unproven(5, old=before) == ()
    assert unproven(5, 3, old=before) == (W3,)
    roster = there
    assert unproven(4, old=joined(W1, W3), members=3) == (W1,)
    assert unproven(4, old=joined(W0, W1), members=2) == ()  # no other worker is left
    there.apply(OrderNext(W1))
    assert unproven(4, old=before) == ()


def judged(newcomers: Newcomers, view: View, ruling: Ruling) -> tuple:
    return newcomers.judge(view, ruling, OWNERS)


def test_a_joiner_is_refused_then_quarantined() -> None:
    newcomers, view = Newcomers(looks=True), joined(W1)
    assert judged(newcomers, view, leaves((W1, 1), (W1, 5))) == ((W1,), Refusal.ANEW)
    assert judged(newcomers, view, leaves((W1, 1))) == ((W1,), Refusal.QUARANTINED)
    tie = Ruling(sentence=Sentence.TIE, disputed=(1,), steady=True)
    assert judged(newcomers, view, tie) == ((W1,), Refusal.QUARANTINED)


def test_two_workers_that_are_refused_in_turn_or_at_once_are_the_scripts_doing() -> None:
    newcomers = Newcomers(looks=True)
    assert judged(newcomers, joined(W1), leaves((W1, 1)))[1] is Refusal.ANEW
    assert judged(newcomers, joined(W2), leaves((W2, 2))) == ((W2,), Refusal.SCRIPT)
    at_once = judged(Newcomers(looks=True), joined(W1, W2), leaves((W1, 1), (W2, 2)))
    assert at_once == ((W1, W2), Refusal.SCRIPT)


def test_joiners_of_one_new_node_are_one_machine() -> None:
    newcomers, view = Newcomers(looks=True), joined(W2, W3)
    members = tuple(
        dataclasses.replace(each, agent=AgentId("new" if each.worker in (W2, W3) else "old"))
        for each in view.members
    )
    view = dataclasses.replace(view, members=members)
    assert judged(newcomers, view, leaves((W2, 2), (W3, 3))) == ((W2, W3), Refusal.ANEW)
    assert judged(newcomers, view, leaves((W2, 2), (W3, 3)))[1] is Refusal.QUARANTINED


def test_a_joiner_whose_processor_is_of_another_kind_says_nothing_of_the_script() -> None:
    newcomers = Newcomers(looks=True)
    for joiner in (W1, W2, W1):
        view = joined(joiner)
        newcomers.compare_processors(view, [8 if each == joiner else 5 for each in view.workers])
        assert judged(newcomers, view, leaves((joiner, 1))) == ((joiner,), Refusal.KIND)
    newcomers.compare_processors(joined(W1), [5] * 4)
    assert judged(newcomers, joined(W1), leaves((W1, 1))) == ((W1,), Refusal.ANEW)


def test_a_joiner_that_is_accepted_in_between_clears_the_script() -> None:
    newcomers = Newcomers(looks=True)
    judged(newcomers, joined(W1), leaves((W1, 1)))
    newcomers.add_audits(joined(W3), (W0, W2))
    assert judged(newcomers, joined(W1), leaves((W1, 1)))[1] is Refusal.QUARANTINED
    newcomers.add_audits(joined(W3), (W0, W3))
    assert judged(newcomers, joined(W2), leaves((W2, 2)))[1] is Refusal.ANEW
    # the same next to a joiner that is right
    assert judged(newcomers, joined(W1, W3), leaves((W1, 1))) == ((W1,), Refusal.ANEW)


@pytest.mark.parametrize(
    "ruling",
    [
        Ruling(sentence=Sentence.USE, wrong=((W1, 1),), steady=True),
        leaves((W1, 1), steady=False),  # it contradicts itself, as machines do
        leaves((W1, 1), (W2, 2)),  # so does a member
        Ruling(sentence=Sentence.TIE, disputed=(2,), steady=True),  # a tie of members
        Ruling(sentence=Sentence.UNLIKE),
    ],
)
def test_rulings_that_do_not_concern_unproven_joiners_alone_refuse_nobody(ruling: Ruling) -> None:
    assert judged(Newcomers(looks=True), joined(W1), ruling)[0] == ()
    proved = Newcomers(looks=True)
    proved.add_audits(joined(W1), (W1,))
    proved.record_commit(W1)
    assert judged(proved, joined(W1), leaves((W1, 1)))[0] == ()


def test_a_court_knows_the_steady_workers() -> None:
    def last(*said: dict[WorkerId, int]) -> Ruling:
        court = Court()
        return [court.rule({1: each}, (), OWNERS, (W0, W1, W2)) for each in said][-1]

    assert last({W0: 1, W1: 2}, {W0: 1, W1: 2, W2: 1}).steady
    assert not last({W0: 1, W1: 2}, {W0: 1, W1: 3, W2: 1}).steady


def test_results_of_joiners_count_only_where_the_other_members_have_no_majority() -> None:
    joiners = [W1, W2, W3]
    court = Court(joiners)
    court.rule({1: {W0: 1, W1: 2}}, (Audit(1, W1, (W0,)),), OWNERS, (W0, *joiners))
    last = court.rule({1: {W0: 1, W1: 2, W2: 2, W3: 2}}, (), OWNERS, (W0, *joiners))
    assert last == leaves((W1, 1), (W2, 1), (W3, 1))
    split = Court([W2, W3])
    split.rule({2: {W0: 9, W2: 2}}, (Audit(2, W2, (W0,)),), OWNERS, (W0, *joiners))
    last = split.rule({2: {W0: 9, W1: 2, W2: 2, W3: 2}}, (), OWNERS, (W0, *joiners))
    assert last == leaves((W0, 2))  # one of two members is wrong: the joiners decide


def status(
    worker: int, committed: int, *, loop: int = 1, ended: bool = False, view: int = 5
) -> WorkerStatus:
    phase = Phase.ENDED if ended else Phase.COMPUTING
    return WorkerStatus(
        worker=WorkerId(worker),
        incarnation=Incarnation(1),
        view=ViewNumber(view),
        committed=committed,
        loop=loop,
        phase=phase,
    )


def test_scripts_that_end_after_other_steps_are_told() -> None:
    progress = Progress(0)
    behind = [status(1, 12), status(2, 11)]
    assert progress.reason_of_uneven_ends([status(1, 13)]) == ""
    progress.record_end(status(0, 5))  # the knowledge of it is older than its end
    assert progress.reason_of_uneven_ends([status(1, 13)]) == ""
    progress.record_resume(12)  # without the leader, which may have committed this step
    assert progress.reason_of_uneven_ends([status(1, 13, view=6)]) == ""
    assert progress.reason_of_uneven_ends([status(1, 14, view=6)]) != ""
    progress = Progress(0)
    progress.record_end(status(0, 12, ended=True))
    assert progress.reason_of_uneven_ends(behind) == ""
    assert progress.reason_of_uneven_ends([status(1, 13, loop=2)]) == ""
    # It was lost in a view before the job began again from an earlier step.
    assert progress.reason_of_uneven_ends([status(1, 13, view=4)]) == ""
    found = progress.reason_of_uneven_ends([*behind, status(1, 13, view=6)])
    assert "worker 0 has left its loop after step 12, where that of worker 1 begins" in found
    progress.record_end(status(1, 30, ended=True))  # the first counts
    assert progress.reason_of_uneven_ends([status(1, 13)]) != ""
