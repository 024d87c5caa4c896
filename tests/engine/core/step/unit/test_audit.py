"""Which tasks are computed twice, and the consequences when the bits differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.engine.core.invalidations import (
    INVALIDATIONS_MAX,
    Invalidation,
    is_invalidated,
    merge,
)
from holdfast.engine.core.membership.durable import Durable
from holdfast.engine.core.step.audit import (
    Audit,
    Classes,
    Court,
    Digests,
    Ruling,
    Sentence,
    are_near,
    audit_by_all,
    judge,
    plan,
    plan_sums,
)
from holdfast.engine.core.step.rulings import Trust, WrongSince
from holdfast.engine.core.types import AgentId, Incarnation, ViewNumber, WorkerId
from holdfast.engine.core.views import Member, View
from holdfast.engine.core.worker_status import WorkerStatus
from holdfast.engine.train.step.gradient_digest import sketch

WORKERS = [WorkerId(i) for i in range(4)]
OWNERS = [WorkerId(i // 4) for i in range(16)]


def test_the_wanted_share_of_tasks_is_audited() -> None:
    plans = [plan(7, step, OWNERS, WORKERS, 0.05) for step in range(2000)]
    assert 0.045 < sum(map(len, plans)) / (2000 * len(OWNERS)) < 0.055
    audits = [audit for each in plans for audit in each]
    assert all(audit.owner == OWNERS[audit.vrank] not in audit.auditors for audit in audits)
    pairs = {(audit.owner, *audit.auditors) for audit in audits}
    assert len(pairs) == 12  # every worker is compared with every other
    assert {audit.vrank for audit in audits} == set(range(16))
    assert plans == [plan(7, step, OWNERS, WORKERS, 0.05) for step in range(2000)]
    assert plans != [plan(8, step, OWNERS, WORKERS, 0.05) for step in range(2000)]


def test_the_wanted_share_of_sums_is_audited() -> None:
    plans = [plan_sums(7, step, 10, 0.05) for step in range(4000)]
    assert 0.045 < sum(map(len, plans)) / 40_000 < 0.055
    assert {bucket for each in plans for bucket in each} == set(range(10))
    assert plan_sums(7, 3, 4, 1.0) == (0, 1, 2, 3)
    assert plan_sums(7, 3, 4, 0.0) == ()


def test_a_plan_audits_all_tasks_or_none_and_none_without_another_worker() -> None:
    assert len(plan(1, 2, OWNERS, WORKERS, 1.0)) == 16
    assert plan(1, 2, OWNERS, WORKERS, 0.0) == ()
    assert plan(1, 2, [WorkerId(0)] * 4, [WorkerId(0)], 1.0) == ()


@given(st.dictionaries(st.sampled_from(WORKERS), st.integers(0, 2), min_size=1))
def test_a_majority_is_more_than_half(digests: dict[WorkerId, int]) -> None:
    found = judge(digests)
    counts = {d: list(digests.values()).count(d) for d in digests.values()}
    most = [d for d, n in counts.items() if 2 * n > len(digests)]
    assert found.right == (most[0] if most else None)
    assert set(found.wrong) == {w for w, d in digests.items() if most and d != most[0]}


def ruling(court: Court, digests: Digests, audits: Sequence[Audit] = ()) -> Ruling:
    return court.rule(digests, audits, OWNERS, WORKERS)


def test_a_worker_that_was_wrong_once_is_known_after_the_second_attempt() -> None:
    a, b, c, _ = WORKERS
    court = Court()
    audits = (Audit(0, a, (b,)), Audit(4, b, (c,)))
    first = ruling(court, {0: {a: 1, b: 1}, 4: {b: 5, c: 6}}, audits)
    again = (audits[0], audit_by_all(audits[1], WORKERS))
    assert first == Ruling(sentence=Sentence.AGAIN, audits=again, disputed=(4,))
    second = ruling(court, {0: {a: 1, b: 1}, 4: dict.fromkeys(WORKERS, 6)}, again)
    assert second == Ruling(sentence=Sentence.USE, wrong=((b, 4),))


def test_a_worker_that_is_wrong_again_leaves_even_if_the_sum_would_be_right() -> None:
    _, b, c, _ = WORKERS
    for liar in (b, c):
        court = Court()
        ruling(court, {4: {b: 5, c: 6}})
        last = ruling(court, {4: dict.fromkeys(WORKERS, 6) | {liar: 9}})
        assert last == Ruling(sentence=Sentence.LEAVE, wrong=((liar, 4),))


def three_times(*said: dict[WorkerId, int]) -> Ruling:
    court = Court()
    *before, last = [ruling(court, {4: each}) for each in said]
    assert [each.sentence for each in before] == [Sentence.AGAIN] * 2
    return last


def test_a_worker_that_contradicts_itself_is_wrong_unless_all_do() -> None:
    a, b, *_ = WORKERS
    tie = three_times(*[{a: 1, b: 2}] * 3)
    assert tie == Ruling(sentence=Sentence.TIE, disputed=(4,), steady=True)
    fickle = three_times({a: 1, b: 2}, {a: 1, b: 3}, {a: 1, b: 4})
    assert fickle == Ruling(sentence=Sentence.LEAVE, wrong=((b, 4),))
    unlike = three_times(*({w: 10 * attempt + w for w in WORKERS} for attempt in range(3)))
    assert unlike == Ruling(sentence=Sentence.UNLIKE)


def test_gradients_are_near_if_they_differ_by_a_small_share_of_their_norm() -> None:
    dice = torch.Generator().manual_seed(1)
    parts = [torch.randn(size, generator=dice) for size in (1000, 37)]

    def sums(parts: list[torch.Tensor]) -> list[float]:
        squares, *rest = sum(sketch(part, i) for i, part in enumerate(parts)).tolist()
        return [squares**0.5, *rest]

    def off(by: float, numbers: int) -> list[torch.Tensor]:
        found = [part.clone() for part in parts]
        found[0][:numbers] += by * norm / numbers**0.5
        return found

    norm = torch.cat(parts).norm()
    assert sums(parts)[0] == pytest.approx(float(norm))
    for numbers in (1, 10, 1000):
        assert are_near(sums(parts), sums(off(0.001, numbers)), 0.01)
        assert not are_near(sums(parts), sums(off(0.1, numbers)), 0.01)
    broken = off(math.inf, 1)
    assert not are_near(sums(parts), sums(broken), 0.01)
    assert are_near(sums(broken), sums(broken), 0.01)  # all agree that it is not finite


def test_near_gradients_have_the_same_number() -> None:
    classes = Classes(0.01)
    said = [(1.0, 0.5), (2.0, 0.5), (1.001, 0.5), (1.0, 0.6), (2.0, 0.501)]
    assert [classes.number(4, each) for each in said] == [0, 1, 0, 2, 1]
    classes.forget()
    assert classes.number(4, said[1]) == 0


def test_every_worker_audits_when_all_tasks_are_audited() -> None:
    owners = [WorkerId(0)] * 6 + [WorkerId(1)] * 2
    for step in range(20):
        audits = plan(7, step, owners, WORKERS, 1.0)
        assert {w for audit in audits for w in audit.workers} == set(WORKERS)
        assert all(audit.owner not in audit.auditors for audit in audits)


# ---------------------------------------------------------------- since when


def a_view(step: int, *incarnations: int, joiners: tuple[int, ...] = ()) -> View:
    return View(
        number=ViewNumber(step + 1),
        members=tuple(
            Member(worker=WorkerId(w), incarnation=Incarnation(i), agent=AgentId("a"))
            for w, i in enumerate(incarnations)
        ),
        owners=tuple(WorkerId(v % len(incarnations)) for v in range(4)),
        resume_step=step,
        leader=WorkerId(0),
        joiners=tuple(map(WorkerId, joiners)),
    )


def trusted(cycle: int, steps: int, audited: Callable[[int], Iterable[int]]) -> Trust:
    view, trust = a_view(0, 1, 1), Trust(cycle)
    trust.enter(view, compared=True)
    for step in range(steps):
        trust.record_sums(step, view.owners, audited(step))
    return trust


def test_a_state_that_differs_may_have_done_so_for_a_whole_cycle() -> None:
    trust = trusted(8, 20, lambda step: ())
    assert trust.doubt([WorkerId(1)], 20, diverged=True) == WrongSince(sums=12, saved=12)
    trust = trusted(8, 20, lambda step: range(4))  # all was audited: the sums are right
    assert trust.doubt([WorkerId(1)], 20, diverged=True) == WrongSince(sums=None, saved=12)
    trust = trusted(8, 20, lambda step: range(4) if step != 15 else (0, 1, 2))
    assert trust.doubt([WorkerId(1)], 20, diverged=True).sums == 12
    assert trust.doubt([WorkerId(0)], 20, diverged=True).sums is None  # it does not host 3


def test_wrong_gradients_go_back_to_the_last_audit_that_agreed() -> None:
    trust = trusted(0, 20, lambda step: [1] if step == 5 else [])
    # It may have become wrong right after that task, in the same step.
    assert trust.doubt([WorkerId(1)], 20, diverged=False) == WrongSince(sums=5, saved=5)
    assert trust.doubt([WorkerId(0)], 20, diverged=False) == WrongSince(sums=0, saved=0)
    assert trust.doubt(WORKERS[:2], 20, diverged=False) == WrongSince(sums=0, saved=0)


def test_a_worker_that_has_just_come_holds_the_compared_state() -> None:
    trust = trusted(64, 20, lambda step: ())
    trust.enter(a_view(20, 1, 2, joiners=(1,)), compared=True)
    trust.record_sums(20, a_view(20, 1, 2).owners, ())
    assert trust.doubt([WorkerId(1)], 21, diverged=True) == WrongSince(sums=20, saved=20)
    trust.enter(a_view(21, 1, 2), compared=False)
    assert trust.doubt([WorkerId(0)], 21, diverged=True) == WrongSince(sums=20, saved=20)


INVALIDATION = st.lists(
    st.builds(
        Invalidation,
        after=st.integers(0, 9),
        view=st.integers(1, 9).map(ViewNumber),
        wrong=st.lists(st.integers(0, 3).map(WorkerId), max_size=2, unique=True).map(tuple),
    ),
    max_size=6,
)


@given(INVALIDATION, INVALIDATION, st.integers(0, 10), st.integers(1, 10))
def test_an_invalidation_stays(
    first: list[Invalidation], second: list[Invalidation], step: int, view: int
) -> None:
    merged = merge(merge((), first), second)
    plainly = any(
        step > invalidation.after and view <= invalidation.view
        for invalidation in (*first, *second)
    )
    assert is_invalidated(merged, step, ViewNumber(view)) == plainly


@given(INVALIDATION)
def test_invalidations_do_not_depend_on_the_order_of_reports(
    found: list[Invalidation],
) -> None:
    forwards = merge((), found)
    one_by_one: tuple[Invalidation, ...] = ()
    for each in reversed(found):
        one_by_one = merge(one_by_one, [each])
    assert [(e.after, e.view) for e in one_by_one] == [(e.after, e.view) for e in forwards]
    assert [e.view for e in forwards] == sorted(e.view for e in forwards)
    newest = max((each.view for each in found), default=0)
    accused = {w for each in found if each.view == newest for w in each.wrong}
    for merged in (forwards, one_by_one):  # no worker in the newest view is forgotten
        assert {w for each in merged if each.view == newest for w in each.wrong} == accused


def test_the_newest_invalidations_are_remembered() -> None:
    many = [Invalidation(after=n, view=ViewNumber(n)) for n in range(1, INVALIDATIONS_MAX + 4)]
    assert merge((), many) == tuple(many[3:])


def test_workers_accused_of_the_same_step_and_view_are_accused_in_any_order() -> None:
    first = Invalidation(after=3, view=ViewNumber(5), wrong=(WorkerId(1),))
    second = Invalidation(after=3, view=ViewNumber(5), wrong=(WorkerId(2),))
    for one, other in ((first, second), (second, first)):
        durable = Durable()
        durable.note([told(0, 5, 0, one), told(3, 5, 0, other)])
        assert durable.accused == [1, 2]
        later = Durable()
        later.note([told(0, 5, 0, one)])
        accused = later.accused
        later.judge()
        later.note([told(3, 5, 0, other)])
        assert sorted([*accused, *later.accused]) == [1, 2]
        later.judge()
        assert later.accused == []


def test_an_invalidation_heard_again_takes_nothing_back_that_was_saved_since() -> None:
    old = Invalidation(after=3, view=ViewNumber(5), wrong=(WorkerId(1),))
    wider = Invalidation(after=2, view=ViewNumber(6))
    durable = Durable()
    durable.note([told(0, 6, 0, wider)])
    durable.note([told(0, 7, 9, wider)])
    durable.note([told(3, 7, 0, old)])
    assert durable.step == 9


def told(worker: int, view: int, saved: int, *invalidations: Invalidation) -> WorkerStatus:
    return WorkerStatus(
        worker=WorkerId(worker),
        incarnation=Incarnation(1),
        view=ViewNumber(view),
        saved=saved,
        invalidations=invalidations,
    )


def test_steps_that_were_saved_and_are_not_invalidated_are_durable() -> None:
    durable = Durable()
    for step in (10, 20, 30):
        durable.note([told(0, 1, step)])
    assert (durable.step, durable.steps) == (30, (10, 20, 30))
    invalidation = Invalidation(after=15, view=ViewNumber(1), wrong=(WorkerId(3),))
    durable.note(
        [told(0, 1, 30), told(1, 1, 0, invalidation)]
    )  # the first one does not know it yet
    assert (durable.step, durable.invalidations) == (10, (invalidation,))
    assert durable.accused == [WorkerId(3)]
    durable.judge()
    assert durable.accused == []
    durable.note([told(0, 2, 20), told(1, 1, 0, invalidation)])  # the report of a later view
    assert durable.step == 20
    later = Durable(durable.steps, durable.invalidations)  # another coordinator
    assert (later.step, later.accused) == (20, [])
