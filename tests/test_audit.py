"""Which tasks are computed twice, and what follows when the bits differ."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.audit import Audit, by_all, judge, plan
from holdfast.core.types import WorkerId
from holdfast.train.auditing import Court

WORKERS = [WorkerId(i) for i in range(4)]
OWNERS = [WorkerId(i // 4) for i in range(16)]


def test_so_many_tasks_are_audited_as_were_asked_for() -> None:
    plans = [plan(7, step, OWNERS, WORKERS, 0.05) for step in range(2000)]
    assert 0.045 < sum(map(len, plans)) / (2000 * len(OWNERS)) < 0.055
    audits = [audit for each in plans for audit in each]
    assert all(audit.owner == OWNERS[audit.vrank] not in audit.auditors for audit in audits)
    pairs = {(audit.owner, *audit.auditors) for audit in audits}
    assert len(pairs) == 12  # everybody is held against everybody else
    assert {audit.vrank for audit in audits} == set(range(16))
    assert plans == [plan(7, step, OWNERS, WORKERS, 0.05) for step in range(2000)]
    assert plans != [plan(8, step, OWNERS, WORKERS, 0.05) for step in range(2000)]


def test_all_none_and_nobody_to_ask() -> None:
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


def test_whoever_was_wrong_once_is_known_after_the_second_attempt() -> None:
    a, b, c, _ = WORKERS
    court = Court()
    court.hear({0: {a: 1, b: 1}, 4: {b: 5, c: 6}})
    assert court.differing == [4]
    assert not court.agreed(OWNERS)
    assert court.wrong() == []  # one against one
    audits = (Audit(0, a, (b,)), Audit(4, b, (c,)))
    again = court.again(audits, workers=WORKERS)
    assert again == (audits[0], by_all(audits[1], WORKERS))
    court.hear({0: {a: 1, b: 1}, 4: dict.fromkeys(WORKERS, 6)})
    assert court.agreed(OWNERS)
    assert court.wrong() == [(b, 4)]


def test_an_owner_who_is_wrong_again_spoils_the_sum_and_an_auditor_does_not() -> None:
    a, b, c, d = WORKERS
    for liar, agreed in ((b, False), (c, True)):
        court = Court()
        court.hear({4: {b: 5, c: 6}})
        court.hear({4: dict.fromkeys(WORKERS, 6) | {liar: 9}})
        assert court.agreed(OWNERS) is agreed
        assert (liar, 4) in court.wrong()
    assert {a, d}.isdisjoint(worker for worker, _ in court.wrong())


def test_what_differs_for_ever_is_hopeless() -> None:
    court = Court()
    for attempt in range(3):
        assert attempt == 0 or not court.hopeless
        court.hear({4: {worker: 10 * attempt + worker for worker in WORKERS}})
    assert court.hopeless
