"""The small objects around a step, apart from the machine that uses them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.engine.core.errors import InvariantError
from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.ground import vote
from holdfast.engine.core.ground.events import Purpose, TaskDone, Wait
from holdfast.engine.core.ground.vote import Vote, count_votes
from holdfast.engine.core.policies import BackupPolicy
from holdfast.engine.core.step import audit
from holdfast.engine.core.step.audit import Alike, Audit, Ruling, Sentence
from holdfast.engine.core.step.audits import SKETCH_WORDS, Audits
from holdfast.engine.core.step.backup import Settlement
from holdfast.engine.core.step.open_step import OpenStep
from holdfast.engine.core.step.rulings import CALM_STEPS, NEVER, Rulings, Trust, WrongSince
from holdfast.engine.core.step.speculation import Budget, Lateness, Patience, choose_copies
from holdfast.engine.core.step.speeds import Speeds
from holdfast.engine.core.step.step_policy import Counting, StepPolicy
from holdfast.engine.core.step.verdicts import Doubted
from holdfast.engine.core.types import ViewNumber, WorkerId
from holdfast.engine.core.views import LateWorker, View
from machine_kit import a_view

W0, W1, W2, W3 = (WorkerId(w) for w in range(4))
PLANNED = [[(7, 0), (11, 0), (13, 2)], [(4, 1), (7, 2), (11, 0), (13, 3)], [(0, 1)]]
PLANNED_SUMS = [(0, 3, 11), (0, 3, 7, 8), (1, 3, 5), (1,)]


# ---------------------------------------------------------------- votes


@given(
    st.builds(
        Vote,
        view=st.integers(0, 9).map(ViewNumber),
        step=st.integers(0, 9),
        pending=st.booleans(),
        save=st.booleans(),
        busy=st.booleans(),
        alike=st.integers(0, 2),
        doubt=st.integers(0, 9),
        compute_us=st.integers(0, 9),
        wait=st.builds(Wait, st.integers(0, 9), st.integers(-1, 9), st.integers(0, 9)),
    )
)
def test_a_vote_travels_as_it_is(each: Vote) -> None:
    assert Vote.of(each.row()) == each


def tally(*votes: dict[str, Any]) -> vote.Tally:
    rows = [Vote(**({"view": ViewNumber(1), "step": 4} | each)).row() for each in votes]
    return count_votes(rows)


def test_a_flag_that_one_member_sets_counts_for_all() -> None:
    plain = tally({}, {})
    assert (plain.alien, plain.pending, plain.save, plain.alike) == (False, False, False, 0)
    assert tally({}, dict(pending=True)).pending
    assert tally(dict(save=True), {}).save
    assert not tally(dict(save=True), dict(busy=True)).save
    assert tally(dict(alike=1), dict(alike=2), {}).alike == 2
    assert tally({}, dict(step=5)).alien
    assert tally({}, dict(view=ViewNumber(2))).alien
    found = tally(dict(doubt=3, compute_us=7), dict(wait=Wait(1, 0, 2)))
    assert (found.doubts, found.compute_us) == ((3, 0), (7, 0))
    assert found.waits == (Wait(), Wait(1, 0, 2))


def test_the_defaults_of_a_step_compare_and_save_and_copy_nothing() -> None:
    policy = StepPolicy()
    assert not policy.looks
    assert (policy.audit, policy.cycle, policy.keeps) == (0.0, 0, False)
    assert (policy.saves.enabled, policy.saves.compared) == (False, False)
    assert (policy.backup.workers, policy.patience.copies) == (0, 0.0)
    assert StepPolicy(audit=0.1).looks
    assert StepPolicy(cycle=2).looks


# ---------------------------------------------------------------- the open step


def test_an_open_step_knows_what_is_done_and_by_what_right() -> None:
    step = OpenStep(3)
    assert step.count_used([0, 1]) is None
    assert step.count_used([]) == 0
    step.running = (0, Purpose.HOSTED)
    step.note(TaskDone(3, 0, Purpose.HOSTED, 5, 77))
    step.note(TaskDone(3, 1, Purpose.SPECULATIVE, 6, None))
    step.note(TaskDone(3, 2, Purpose.AUDITED, 7, 0))
    assert step.running is None
    assert (step.samples, step.speculative, step.audited) == ({0: 5}, {1: 6}, {2: True})
    assert step.digests == {0: 77, 2: 0}
    assert step.missing_tasks([0, 1, 2]) == [1, 2]
    assert step.adopt([0, 1, 2]) == [1]
    assert step.adopt([0, 1, 2]) == []
    assert (step.samples, step.speculative) == ({0: 5, 1: 6}, {})
    assert (step.count_used([0, 1]), step.count_used([1])) == (11, 6)
    step.restart()
    assert (step.samples, step.speculative, step.audited, step.digests) == ({}, {}, {}, {})


# ---------------------------------------------------------------- who counts


def test_counted_ranks_are_settled_once_and_forgotten_when_the_step_is_over() -> None:
    first = Settlement(BackupPolicy(workers=1), 0, 3)
    first.begin(5)
    assert first.record_done(2, 4, 9) == ()  # the word is about a step that is over
    assert first.record_done(0, 5, 9) == ()
    assert first.record_done(2, 5, 9) == (0, 2)
    assert first.record_done(1, 5, 9) == ()
    assert first.counted_ranks(5) == (0, 2)
    assert (first.drops(5), first.drops(6)) == (False, False)
    late = Settlement(BackupPolicy(workers=1), 1, 3)
    late.record_settled(5, (0, 2))
    assert late.drops(5)
    assert not late.record_own_done(5)  # too late to be of use
    assert late.record_own_done(6)
    assert not late.record_own_done(6)
    late.begin(6)
    assert late.counted_ranks(5) is None


# ---------------------------------------------------------------- audits


def audits(share: float = 1.0, tolerance: float = 0.0) -> Audits:
    found = Audits(3, share, tolerance)
    found.enter()
    return found


def test_of_a_step_after_a_save_all_is_looked_at_if_anything_is() -> None:
    found = audits(0.25)
    assert found.share_of(7) == 0.25
    found.agree(Alike.BITS, 7)
    assert (found.share_of(7), found.share_of(8)) == (1.0, 0.25)
    found.agree(Alike.NOTHING, 7)
    assert found.share_of(7) == 0.0
    none = audits(0.0)
    none.agree(Alike.BITS, 7)
    assert none.share_of(7) == 0.0


def test_less_is_asked_for_in_two_stages_if_a_tolerance_is_given() -> None:
    for tolerance, stages in ((0.1, [Alike.NEAR, Alike.NOTHING]), (0.0, [Alike.NOTHING] * 2)):
        found = audits(tolerance=tolerance)
        for stage in stages:
            found.ask_less()
            assert found.alike is stage
        assert found.tolerance == tolerance


def test_a_plan_is_made_once_in_a_view_and_again_in_the_next() -> None:
    found, owners = audits(), [W0, W1]
    assert found.wants_digest(9)  # any digest may be asked for
    assert found.owed_vranks(W0, OpenStep(2)) == []
    found.plan(a_view(1, [0, 1]), 2, owners)
    assert [each.vrank for each in found.planned] == [0, 1]
    assert (found.wants_digest(1), found.wants_digest(9)) == (True, False)
    found.plan_again(())
    found.plan(a_view(1, [0, 1]), 2, owners)
    assert found.planned == ()
    assert not found.wants_digest(1)
    for number, step in ((1, 3), (2, 3)):
        found.plan_again(())
        found.plan(a_view(number, [0, 1]), step, owners)
        assert len(found.planned) == 2
    found.enter()
    assert found.wants_digest(9)
    assert not audits(0.0).wants_digest(0)
    assert [each.vrank for each in found.audit_all(a_view(1, [0, 1]), 2, owners)] == [0, 1]


def test_a_worker_owes_audited_tasks_that_it_has_not_computed() -> None:
    found = audits()
    found.plan(a_view(1, [0, 1]), 2, [W0, W1])
    step = OpenStep(2)
    assert found.owed_vranks(W0, step) == [1, 0]  # its own task as well, without a digest of it
    step.note(TaskDone(2, 0, Purpose.HOSTED, 5, 77))
    assert found.owed_vranks(W0, step) == [1]
    step.note(TaskDone(2, 1, Purpose.AUDITED, 5, 78))
    assert found.owed_vranks(W0, step) == []
    assert found.row(step) == (77, 78, -1)
    assert found.row(OpenStep(2)) == (0, 0, -1)


def test_audits_are_ruled_on_by_the_words_of_all() -> None:
    found, view = audits(), a_view(1, [0, 1, 2])
    found.plan_again((Audit(0, W0, (W1, W2)), Audit(1, W1, (W2,))))
    good = found.rule([(7, 0, -1), (7, 8, -1), (7, 8, -1)], view, [W0, W1])
    assert good.sentence is Sentence.USE
    found.record_sums()
    bad = found.rule([(7, 0, -1), (6, 8, -1), (7, 8, -1)], view, [W0, W1])
    assert bad.sentence is Sentence.USE  # its host is right
    assert bad.wrong == ((W1, 0),)
    found.record_sums()
    wrong = found.rule([(6, 0, -1), (7, 8, -1), (7, 8, -1)], view, [W0, W1])
    assert wrong.sentence is Sentence.AGAIN
    found.record_sums()
    with pytest.raises(InvariantError, match="3 words are audited"):
        found.rule([(7, 0, -1), (7, -1), (7, 8, -1)], view, [W0, W1])


def test_near_gradients_count_as_the_same() -> None:
    found, view = audits(tolerance=0.1), a_view(1, [0, 1])
    found.ask_less()
    found.plan_again((Audit(0, W0, (W1,)), Audit(1, W1, (W0,))))
    steps = [OpenStep(2), OpenStep(2)]
    for step, factor in zip(steps, (1.0, 1.01), strict=True):
        for vrank in (0, 1):
            sums = (factor * (vrank + 1),) * (SKETCH_WORDS - 1)
            sketch = ((vrank + 1.0) ** 2 * (SKETCH_WORDS - 1) * factor**2, *sums)
            step.note(TaskDone(2, vrank, Purpose.AUDITED, 1, sketch))
    rows = [found.row(step) for step in steps]
    assert [len(row) for row in rows] == [2 * SKETCH_WORDS + 1] * 2
    assert found.rule(rows, view, [W0, W1]).sentence is Sentence.USE
    found.enter()
    found.plan_again((Audit(0, W0, (W1,)), Audit(1, W1, (W0,))))
    far = (*rows[1][:SKETCH_WORDS], *(2 * x for x in rows[1][SKETCH_WORDS:-1]), -1)
    assert found.rule([rows[0], far], view, [W0, W1]).sentence is Sentence.AGAIN


def test_the_choice_of_audits_is_the_same_for_ever() -> None:
    """The choice is pinned: members must choose alike while a job moves to another release."""
    workers, owners = [W0, W1, W2, W3], [WorkerId(v % 4) for v in range(16)]
    planned = [audit.plan(1, step, owners, workers, 0.2) for step in range(3)]
    assert [[(a.vrank, *a.auditors) for a in each] for each in planned] == PLANNED
    assert [audit.plan_sums(1, step, 12, 0.25) for step in range(4)] == PLANNED_SUMS
    found = Audits(1, 0.25, 0.0)
    planned_sums = [tuple(found.plan_sum_checks(step, 12)) for step in range(4)]
    assert planned_sums == PLANNED_SUMS
    assert SKETCH_WORDS == 9  # the length of a row about a task


# ---------------------------------------------------------------- since when


def trusting(cycle: int, *workers: int, step: int = 0) -> Trust:
    trust = Trust(cycle)
    trust.enter(a_view(1, workers, step), compared=True)
    return trust


def test_a_suspended_worker_is_judged_by_when_it_left() -> None:
    trust, owners = trusting(8, 0, 1), [W0, W1]
    for step in range(10):
        trust.record_sums(step, owners, [])
    lag = LateWorker(worker=W1, incarnation=a_view(1, [0]).members[0].incarnation, committed=10)
    suspended = dataclasses.replace(a_view(2, [0], 10), suspended=(lag,))
    trust.enter(suspended, compared=False)
    for step in range(10, 30):
        trust.record_sums(step, [W0, W0], [])
    assert trust.doubt([W1], 30, diverged=True).saved == 2
    assert trust.doubt([W0], 30, diverged=True).saved == 22
    trust.enter(a_view(3, [0, 1], 30), compared=True)
    assert trust.doubt([W1], 31, diverged=True).saved == 30
    trust.enter(a_view(4, [0], 31), compared=False)
    # Older members know more of it.
    assert trust.doubt([W1], 31, diverged=True) == WrongSince(sums=None, saved=31)


def test_a_worker_that_hosted_nothing_was_not_audited() -> None:
    trust = trusting(1, 0, 1)
    trust.record_sums(0, [W0, W1], [0])
    trust.record_sums(1, [W0, W0], [0, 1])
    assert trust.doubt([W1], 2, diverged=False) == WrongSince(sums=0, saved=0)
    assert trust.doubt([W0], 2, diverged=False) == WrongSince(sums=None, saved=1)


def test_without_a_cycle_only_audits_say_anything() -> None:
    trust = trusting(0, 0, 1)
    trust.record_sums(0, [W0, W1], [0])
    assert trust.doubt([W0], 1, diverged=True).saved == 1
    assert trust.doubt([W0], 1, diverged=False) == WrongSince(sums=None, saved=1)
    assert trust.doubt([W1], 1, diverged=False) == WrongSince(sums=0, saved=0)


# ---------------------------------------------------------------- who is wrong


def ruling(me: int = 0, workers: int = 3, **fields: Any) -> Rulings:
    values = dict(keeps=True, looks=True) | fields
    found = Rulings(WorkerId(me), values.pop("cycle", 4), **values)  # type: ignore[arg-type]
    found.enter(a_view(1, range(workers)))
    found.record_sync(compared=True)
    return found


def texts(outcomes: list[ef.Outcome]) -> list[str]:
    return [each.text for each in outcomes if isinstance(each, ev.EventNoted)]


def test_the_leader_tells_unless_it_is_wrong_itself() -> None:
    for me, wrong, tells in ((0, (), True), (1, (), False), (0, (W0,), False), (1, (W0,), True)):
        assert bool(ruling(me).tell("so", wrong)) is tells
    assert ruling(0).tell("so", (W0, W1, W2)) == [ev.EventNoted("wrong", "so")]


def ruled(*wrong: tuple[WorkerId, int], sentence: Sentence = Sentence.USE) -> Ruling:
    return Ruling(sentence=sentence, wrong=wrong)


def test_one_mistake_is_forgiven_and_the_second_is_not() -> None:
    found = ruling(1)
    assert ef.Exit() not in found.record_wrong_sum(3, [W1])
    assert ef.Exit() not in found.record_wrong_sum(4, [W2])
    assert ef.Exit() in found.record_wrong_sum(5, [W1])
    blamed = ruling(1)
    assert ef.Exit() not in blamed.blame(3, ruled((W1, 0), (W1, 1)))
    assert ef.Exit() not in blamed.blame(
        3, ruled((W1, 0), sentence=Sentence.LEAVE)
    )  # it is leaving anyway
    assert ef.Exit() in blamed.blame(4, ruled((W1, 2)))
    leader = ruling(0)
    assert (
        "worker 1 has computed virtual rank 5 of step 3 wrongly"
        in texts(leader.blame(3, ruled((W1, 5))))[0]
    )


def test_sums_that_are_rightly_not_finite_leave_others_in_peace_for_a_while() -> None:
    found = ruling()
    assert not found.believes_not_finite(0, 7)
    found.record_doubt(4, [W1])
    assert texts(found.settle(4, rightly=True)) == [
        "the gradient of step 4 is not finite, on all workers that compute it"
    ]
    assert found.believes_not_finite(4 + CALM_STEPS - 1, 7)
    assert not found.believes_not_finite(4 + CALM_STEPS, 7)
    assert found.settle(5, rightly=True) == []  # reported once


def test_a_lone_worker_believes_what_is_not_finite_with_the_same_bits_and_never_leaves() -> None:
    alone, others = ruling(workers=1), ruling()
    for found in (alone, others):
        assert not found.believes_not_finite(4, 7)
        found.record_doubt(4, [W0], 7)
    assert alone.believes_not_finite(4, 7)
    assert not alone.believes_not_finite(4, 8)
    assert not alone.believes_not_finite(5, 7)
    assert not others.believes_not_finite(4, 7)
    assert texts(alone.settle(4, rightly=True)) == [
        "the gradient of step 4 is not finite, each time it is computed"
    ]
    fickle = ruling(workers=1)
    for bits in (7, 8):
        assert not fickle.believes_not_finite(4, bits)
        fickle.record_doubt(4, [W0], bits)
    assert fickle.believes_not_finite(4, 9)  # it is not finite, whichever bits it has
    healthy = ruling(workers=1)
    for step in (4, 5, 6):
        healthy.record_doubt(step, [W0], 7)
        (told,) = healthy.settle(step, rightly=False)
        assert texts([told])


def test_a_worker_whose_numbers_were_finite_again_has_made_a_mistake() -> None:
    found = ruling()
    found.record_doubt(4, [W1, W1])
    assert texts(found.settle(4, rightly=False)) == [
        "worker 1 had numbers in step 4 that were not finite; computed again, they are"
    ]
    assert found.settle(5, rightly=False) == []
    liar = ruling(1)
    for step in (4, 5):
        liar.record_doubt(step, [W1])
        out = liar.settle(step, rightly=False)
    assert out == [ef.Exit()]
    entered = ruling()
    entered.record_doubt(4, [W1])
    entered.enter(a_view(2, range(3)))
    assert entered.settle(4, rightly=False) == []  # no member of another view knows of the doubt


def test_states_that_differ_are_judged_by_the_majority() -> None:
    wrong, out = ruling().judge_states(6, {W0: 5, W1: 8, W2: 5})
    assert wrong == (W1,)
    assert texts(out) == ["the state of worker 1 is not that of the others in step 6"]
    wrong, out = ruling().judge_states(6, {W0: 5, W1: 8})
    assert wrong == ()
    assert "none has a majority" in texts(out)[0]


def confessed(found: Rulings, wrong: list[WorkerId], *, diverged: bool, step: int = 9) -> Any:
    for each in range(step):
        found.record_sums(each, [W0, W1, W2], range(3))
    return found.report_fault(step, wrong, diverged=diverged)


def test_only_steps_that_wrong_workers_have_computed_are_doubted() -> None:
    for wrong, since in ((W1, NEVER), (W0, 0)):
        found = ruling()
        for step in range(9):
            found.record_sums(step, [W0, W1, W2], [1])  # no member has ever compared worker 0
        assert found.report_fault(9, [wrong], diverged=False)[0] == since


def test_a_wrong_worker_leaves_and_the_rest_go_back_if_its_errors_may_have_been_used() -> None:
    for me, exits in ((0, False), (1, True)):
        found = ruling(me)
        row = confessed(found, [W1], diverged=True)
        assert row == (NEVER, 5)
        out = found.conclude(9, [(*row, 1), (3, 3, 2), (*row, 1)])
        assert (out == [ef.Exit()]) is exits
    (told, note, doubted) = ruled_back = conclude_with([(NEVER, 5, 1), (3, 3, 2), (NEVER, 5, 1)])
    assert "since step 3: the job goes back" in texts([told])[0]
    assert note == ef.NoteDoubt(3, ViewNumber(1), True)
    assert isinstance(doubted, Doubted)
    assert doubted.discarded
    assert (doubted.invalidation.after, doubted.invalidation.view) == (3, 1)
    assert doubted.invalidation.wrong == ()  # its state is wrong, for whatever reason
    assert len(ruled_back) == 3


def conclude_with(rows: Any, *, diverged: bool = True, **fields: Any) -> list[ef.Outcome]:
    found = ruling(**fields)
    confessed(found, [W1], diverged=diverged)
    return found.conclude(9, rows)


def test_where_all_that_was_used_was_audited_nobody_goes_back() -> None:
    (only,) = conclude_with([(NEVER, 5, 1)] * 3, diverged=False)
    assert isinstance(only, Doubted)
    assert not only.discarded
    assert only.invalidation.wrong == (W1,)  # its state is right, but it computes wrongly
    (only,) = conclude_with([(NEVER, 5, 1), (NEVER, 5, 2), (NEVER, 5, 1)], diverged=False)
    assert isinstance(only, Doubted)
    assert only.invalidation.wrong == ()  # it started from a wrong state
    (only,) = conclude_with(None, diverged=False)  # the group broke before all messages were there
    assert isinstance(only, Doubted)
    assert only.invalidation == dataclasses.replace(only.invalidation, after=5, wrong=())


def test_without_checkpoints_the_doubt_is_told_and_in_a_tie_only_the_leader_goes_on() -> None:
    told, note, doubted = conclude_with([(3, 3, 1)] * 3, keeps=False)
    assert "from step 3 on" in texts([told])[0]
    assert note == ef.NoteDoubt(3, ViewNumber(1), False)
    assert isinstance(doubted, Doubted)
    assert not doubted.discarded
    for me, exits in ((0, False), (1, True)):
        found = ruling(me, keeps=False)
        confessed(found, [], diverged=True)
        out = found.conclude(9, [(NEVER, 5, n) for n in range(3)])
        assert (out[-1] == ef.Exit()) is exits
        assert ef.NoteDoubt(9, ViewNumber(1), False) in out


# ---------------------------------------------------------------- who is late


def waited(lateness: Lateness, steps: int, *, step_s: float = 2.0, wait_s: float = 0.5) -> float:
    now = lateness.began_at
    for _ in range(steps):
        lateness.record_done(now + step_s - wait_s)
        now += step_s
        lateness.record_step(now, tasks=3)
    return now


def test_copies_come_after_a_task_and_word_of_the_late_after_a_step() -> None:
    lateness = Lateness(Patience(steps=4, times=1.0, least_s=0.25, copies=0.5))
    lateness.record_view(10.0)
    now = waited(lateness, 3)
    lateness.record_done(now)
    assert lateness.copy_at == lateness.late_at == float("inf")  # too little is known
    now = waited(lateness, 1)
    lateness.record_done(now + 1.0)
    assert lateness.copy_at == pytest.approx(now + 1.0 + 0.5 + 0.5)  # usual wait and a task
    assert lateness.late_at == pytest.approx(now + 1.0 + 0.5 + 2.0 + 0.25)
    lateness.record_view(now)
    lateness.record_built(now + 4.0)
    assert lateness.late_at == pytest.approx(now + 0.5 + 2.0 + 4.0)
    lateness.record_view(now)
    lateness.record_built(now + 3.0)
    lateness.record_built(now + 5.0)
    assert lateness.group_s == 3.0


def test_workers_whose_waits_vary_are_given_more_time() -> None:
    steady, varied = (Lateness(Patience(steps=1, least_s=0.0)) for _ in range(2))
    for i in range(9):
        waited(steady, 1, wait_s=0.5)
        waited(varied, 1, wait_s=(0.1, 0.5, 0.9)[i % 3])
    for each in (steady, varied):
        each.record_done(100.0)
    assert steady.late_at == pytest.approx(102.5)
    assert varied.late_at == pytest.approx(100.5 + 6.0 * 1.4826 * 0.4)


def test_copies_and_suspensions_are_a_share_of_the_work() -> None:
    lateness = Lateness(Patience(steps=1, copies=0.5))
    waited(lateness, 1)
    for allowed in (True, True, False):
        assert (lateness.copy_at < float("inf")) is allowed
        lateness.count_copy()
    budget = Budget(0.1, 20)
    assert budget.allows(5)  # a little in advance
    budget.record_trial(5)
    assert not budget.allows(5)
    budget.spend(5)
    assert [budget.allows(step) for step in (6, 7, 8)] == [False, False, True]
    assert not Budget(0.0, 20).allows(100)


def test_only_punctual_workers_copy_and_nobody_if_most_are_late() -> None:
    owners, workers = [W0, W0, W1, W2], dict.fromkeys([W0, W1, W2], ())
    assert choose_copies(owners, workers, [W2], W1) == (3,)
    assert choose_copies(owners, workers, [W2], W0) == ()
    assert choose_copies(owners, workers, [W2], W2) == ()
    assert choose_copies(owners, workers, [W1, W2], W0) == ()
    assert choose_copies([W0, W1], dict.fromkeys([W0, W1], ()), [W1], W0) == (1,)


# ---------------------------------------------------------------- speeds


def paced(view: View, leads: bool, steps: int, *times: int) -> list[ev.EventNoted]:
    speeds, found = Speeds(view, None), list[ev.EventNoted]()
    for _ in range(steps):
        found += speeds.observe(times, leads)
    return found


def test_only_the_leader_tells_of_slow_workers_and_only_of_what_costs_something() -> None:
    view = a_view(1, range(4))
    usual, slow = 100_000, 200_000
    kinds = [event.kind for event in paced(view, True, 30, usual, usual, usual, slow)]
    assert kinds == ["slow", "straggler"]
    assert paced(view, False, 30, usual, usual, usual, slow) == []
    assert paced(view, True, 30, 1000, 1000, 1000, 2000) == []  # a millisecond a step
    assert paced(view, True, 30, usual, usual, usual, usual) == []


def test_a_worker_that_was_reported_slow_is_reported_well_again() -> None:
    speeds = Speeds(a_view(1, range(4)), None)
    found = []
    for times in [(100_000,) * 3 + (200_000,)] * 30 + [(100_000,) * 4] * 40:
        found += speeds.observe(times, leads=True)
    assert ["not slow any more" in event.text for event in found if event.kind == "slow"] == [
        False,
        True,
    ]
    assert speeds.owners == (0, 1, 2, 3)
    counting = Counting(a_view(1, range(4)), None)
    assert counting.owners == (0, 1, 2, 3)


def test_a_worker_without_tasks_is_not_judged() -> None:
    view = dataclasses.replace(a_view(1, range(3)), owners=(W0, W1, W1))
    assert paced(view, True, 30, 100_000, 200_000, 0) == []
