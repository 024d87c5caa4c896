"""Tests that workers compare tasks early, and that what a script keeps is no machine's fault."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import thread_cluster
from guard_kit import STEPS, told
from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground.events import Purpose, TaskDone
from holdfast.engine.core.job_spec import with_settings
from holdfast.engine.core.step.audit import (
    FICKLE,
    SUBSTITUTED,
    Alike,
    Audit,
    Court,
    Ruling,
    Sentence,
)
from holdfast.engine.core.step.audits import EARLY_STEPS, PAIRS_MAX, Audits, plan_early
from holdfast.engine.core.step.open_step import OpenStep
from holdfast.engine.core.step.rulings import Rulings
from holdfast.engine.core.types import AgentId, WorkerId
from holdfast.engine.core.views import View
from holdfast.engine.train.job import Job
from holdfast.engine.train.script import repeated_tasks, script_suspects
from loop_kit import dataset, protected
from machine_kit import a_view
from support import SPEC
from thread_cluster import ThreadCluster, ThreadWorker

W0, W1, W2, W3 = (WorkerId(i) for i in range(4))
mse = nn.functional.mse_loss
DIFFER = {0: 3, 1: 4}  # digests of one task, by worker


def view_of(workers: int, vranks: int, step: int = 0, joiners: tuple[int, ...] = ()) -> View:
    return a_view(1, range(workers), step, joiners=joiners, vranks=vranks)


def planned(view: View, step: int, cycle: int = 64) -> list[tuple[int, ...]]:
    found = plan_early(view, step, view.owners, cycle)
    return [(each.vrank, each.owner, *each.auditors) for each in found]


# ---------------------------------------------------------------- the plan


def test_the_plan_of_early_audits_is_the_same_for_ever() -> None:
    """Pinned: all members must choose alike, also while a job moves to another release."""
    view = view_of(3, 6)
    assert planned(view, 0) == [(0, 0, 1), (1, 1, 2), (2, 2, 0)]
    assert planned(view, 1) == [(3, 0, 2), (4, 1, 0), (5, 2, 1)]
    assert planned(view, EARLY_STEPS) == []
    assert planned(view, 64) == [(1, 1, 0)]
    assert planned(view, 128) == [(2, 2, 0)]
    assert planned(view, 65) == []


def test_each_worker_is_compared_early_and_no_step_has_many_comparisons() -> None:
    view = view_of(12, 24)
    steps = [planned(view, step) for step in range(EARLY_STEPS)]
    assert all(len(each) == PAIRS_MAX for each in steps)
    seen = Counter(owner for _, owner, _ in itertools.chain(*steps))
    assert set(seen) == set(range(12))
    assert all(owner != auditor for _, owner, auditor in itertools.chain(*steps))


def test_after_a_join_tasks_are_compared_again() -> None:
    view = view_of(2, 2, 100, joiners=(1,))
    compared = [step for step in range(100, 130) if planned(view, step, 1000)]
    assert compared == list(range(100, 100 + EARLY_STEPS))
    assert planned(view_of(2, 2, 100), 100, 1000) == []


def test_nothing_is_compared_alone_or_where_nothing_is_to_be() -> None:
    assert planned(view_of(1, 4), 0) == []
    assert planned(view_of(2, 4), 0, cycle=0) == []


def audits(*, cycle: int = 64, kinds: tuple[int, ...] = (5, 5), exact: bool = True) -> Audits:
    found = Audits(1, 0.0, 0.0, cycle=cycle)
    found.enter()
    view = view_of(2, 4)
    found.hear(view, [(Alike.BITS, -1, kind, exact) for kind in kinds], drops=False)
    found.plan(view, 0, view.owners)
    return found


def test_workers_whose_bits_may_differ_are_not_compared() -> None:
    assert [audit.vrank for audit in audits().planned] == [0, 1]
    assert audits(kinds=(5, 6)).planned == ()
    assert audits(exact=False).planned == ()
    assert audits(cycle=0).planned == ()


# ---------------------------------------------------------------- script or machine


def on_nodes(*nodes: str) -> View:
    """Return a view of one worker on each of these nodes, in order."""
    view = a_view(1, range(len(nodes)))
    named = zip(view.members, nodes, strict=True)
    members = (dataclasses.replace(member, agent=AgentId(node)) for member, node in named)
    return dataclasses.replace(view, members=tuple(members))


def ruled(nodes: str, *attempts: dict[int, int]) -> Ruling:
    """Return the last ruling on one task with these digests, by worker, in each attempt."""
    view = on_nodes(*nodes)
    court, audit = Court(view=view), (Audit(0, W0, (W1,)),)
    for each in attempts:
        said = {WorkerId(worker): digest for worker, digest in each.items()}
        ruling = court.rule({0: said}, audit, (W0,), view.workers)
    return ruling


def test_several_machines_that_contradict_themselves_are_the_scripts_doing() -> None:
    last = {0: FICKLE, 1: FICKLE, 2: 4}
    assert ruled("abc", DIFFER, last).sentence is Sentence.SCRIPT
    assert ruled("aaa", DIFFER, last).sentence is Sentence.SCRIPT  # no node is right
    assert ruled("aba", DIFFER, last).sentence is Sentence.SCRIPT  # worker 2 is right, on node a


def test_a_node_whose_workers_all_contradict_themselves_is_one_machine() -> None:
    last = {0: FICKLE, 1: FICKLE, 2: 4}
    found = ruled("aab", DIFFER, last, last)
    assert found.sentence is Sentence.LEAVE
    assert found.wrong == ((W0, 0), (W1, 0))


def test_a_majority_that_agrees_is_believed_whatever_others_do() -> None:
    found = ruled("abcde", DIFFER, {0: FICKLE, 1: FICKLE, 2: 4, 3: 4, 4: 4})
    assert (found.sentence, found.wrong) == (Sentence.LEAVE, ((W0, 0), (W1, 0)))


def test_one_worker_that_contradicts_itself_is_a_machines_fault() -> None:
    three = ruled("aaa", DIFFER, {0: 3, 1: FICKLE, 2: 3})
    assert (three.sentence, three.wrong) == (Sentence.LEAVE, ((W1, 0),))
    two = ruled("aa", DIFFER, {0: 3, 1: FICKLE}, {0: 3, 1: FICKLE})
    assert (two.sentence, two.wrong) == (Sentence.LEAVE, ((W1, 0),))


def test_a_task_that_left_out_a_record_on_one_worker_is_not_compared() -> None:
    assert ruled("ab", {0: SUBSTITUTED, 1: 4}).sentence is Sentence.USE
    assert ruled("ab", {0: 3, 1: SUBSTITUTED}).sentence is Sentence.USE
    later = ruled("abc", DIFFER, {0: 3, 1: SUBSTITUTED, 2: 4})  # it could be read at first
    assert (later.sentence, later.wrong) == (Sentence.USE, ())
    view, audits = on_nodes("a", "b", "c"), [Audit(v, W0, (W1,)) for v in (0, 1)]
    said = {0: {W0: SUBSTITUTED, W1: 4}, 1: {W0: 5, W1: 6}}
    ruling = Court(view=view).rule(said, audits, (W0, W0), view.workers)
    assert (ruling.sentence, ruling.disputed) == (Sentence.AGAIN, (1,))  # the other one is


@pytest.mark.parametrize(("exact", "kinds"), [(True, (5, 5)), (False, (5, 5)), (True, (5, 6))])
def test_all_contradict_themselves_by_the_script_or_by_their_kernels(
    exact: bool, kinds: tuple[int, int]
) -> None:
    """Processors of two kinds do not explain it, but no worker is accused of steady results."""
    found, view = audits(), view_of(2, 4)
    found.hear(view, [(Alike.BITS, -1, kind, exact) for kind in kinds], drops=False)
    for attempt in range(3):
        ruling = found.rule([(attempt, 9, -1), (attempt + 5, 9, -1)], view, view.owners)
    assert ruling.sentence is (Sentence.SCRIPT if exact else Sentence.UNLIKE)
    assert found.is_comparable is (exact and len(set(kinds)) == 1)


def test_a_task_that_contradicts_itself_is_computed_by_all_though_it_was_not_to_be() -> None:
    """The worker that repeats its own first task may be the only one."""
    found, view = audits(), view_of(2, 4)
    step = OpenStep(0)
    step.note(TaskDone(0, 3, Purpose.HOSTED, 1, FICKLE))
    assert found.order(0, 3, Purpose.HOSTED).compared
    assert found.row(step) == (0, 0, 3)
    ruling = found.rule([(7, 9, -1), (7, 9, 3)], view, view.owners)
    assert (ruling.sentence, ruling.disputed) == (Sentence.AGAIN, (3,))
    assert ruling.audits == (*found.planned, Audit(3, W1, (W0,)))
    found.plan_again(ruling.audits)
    assert found.order(0, 3, Purpose.HOSTED).disputed
    assert found.row(step) == (0, 0, FICKLE, -1)
    last = found.rule([(7, 9, 5, -1), (7, 9, FICKLE, -1)], view, view.owners)
    assert last.sentence is Sentence.AGAIN
    last = found.rule([(7, 9, 5, -1), (7, 9, FICKLE, -1)], view, view.owners)
    assert (last.sentence, last.wrong) == (Sentence.LEAVE, ((W1, 3),))


def rulings_of(view: View, me: WorkerId = W0, *, keeps: bool = False) -> Rulings:
    found = Rulings(me, 64, keeps=keeps, looks=True)
    found.enter(view)
    found.record_sync(compared=True)
    return found


def ends(
    rulings: Rulings, step: int, ruling: Ruling, prints: Sequence[int], *, exact: bool = True
) -> list[str]:
    """Return the reasons for which a ruling ends the job, where states have these prints."""
    rulings.script.comparable = exact
    rulings.blame(step, ruling)
    wrong = sorted({worker for worker, _ in ruling.wrong})
    row = rulings.report_fault(step, wrong, diverged=False)
    found = rulings.conclude(step, [(*row, each) for each in prints])
    assert all(each.by_script for each in found if isinstance(each, ef.GiveUp))
    return [each.reason for each in found if isinstance(each, ef.GiveUp)]


def a_tie() -> Ruling:
    found = ruled("ab", DIFFER, DIFFER, DIFFER)
    assert (found.sentence, found.steady) == (Sentence.TIE, True)
    return found


def test_two_workers_that_differ_steadily_from_the_same_state_end_the_job() -> None:
    for step, keeps in ((2, True), (5000, False)):
        (reason,) = ends(rulings_of(on_nodes("a", "b"), keeps=keeps), step, a_tie(), (7, 7))
        assert f"workers come to different gradients in step {step} from the same state" in reason


def test_a_tie_late_in_a_job_with_checkpoints_may_be_a_machine_that_has_just_failed() -> None:
    rulings = rulings_of(on_nodes("a", "b"), keeps=True)
    at = (5000, 5300, 5400)  # the second is too long after the first
    assert [bool(ends(rulings, step, a_tie(), (7, 7))) for step in at] == [False, False, True]


def test_other_kernels_and_other_states_are_no_fault_of_the_script() -> None:
    assert not ends(rulings_of(on_nodes("a", "b")), 2, a_tie(), (7, 7), exact=False)
    assert not ends(rulings_of(on_nodes("a", "b")), 2, a_tie(), (7, 8))


@pytest.mark.parametrize("comparable", [True, False])
def test_states_that_tie_for_the_third_time_in_a_short_while_end_the_job(comparable: bool) -> None:
    rulings, ended = rulings_of(on_nodes("a", "b"), keeps=True), []
    rulings.script.comparable = comparable
    for step in (5, 40, 400, 401, 402):
        row = rulings.report_fault(step, (), diverged=True)
        found = rulings.conclude(step, [(*row, 7), (*row, 8)])
        ended.append(any(isinstance(each, ef.GiveUp) for each in found))
    assert ended == [False, False, False, False, comparable]


def test_without_checkpoints_states_may_tie_once() -> None:
    rulings, ended = rulings_of(on_nodes("a", "b")), []
    rulings.script.comparable = True
    for step in (5, 300, 400):
        row = rulings.report_fault(step, (), diverged=True)
        found = rulings.conclude(step, [(*row, 7), (*row, 8)])
        ended.append(any(isinstance(each, ef.GiveUp) for each in found))
    assert ended == [False, False, True]


def steady_liars(nodes: str, liars: Sequence[tuple[int, int]]) -> list[bool]:
    """Return whether the job ends by each of these steps with one worker that is wrong in it."""
    view = on_nodes(*nodes)
    rulings = rulings_of(view, view.workers[-1], keeps=True)
    found = []
    for step, liar in liars:
        said = {int(worker): 3 + (worker == liar) for worker in view.workers}
        ruling = ruled(nodes, said, said)
        assert ruling.sentence is Sentence.LEAVE
        found.append(bool(ends(rulings, step, ruling, (7,) * len(nodes))))
    return found


def test_a_third_machine_that_is_steadily_wrong_in_a_short_while_ends_the_job() -> None:
    liars = [(5, 0), (6, 1), (300, 2), (301, 0), (302, 1)]
    assert steady_liars("abcd", liars) == [False, False, False, False, True]
    # Three of sixteen machines may be wrong.
    assert not any(steady_liars("abcdefghijklmnop", liars))


# ---------------------------------------------------------------- whole jobs


def keeps(kind: str) -> Callable[[Job, ThreadWorker], None]:
    """Return a script that keeps something that is the same each time on one worker."""

    def script(job: Job, me: ThreadWorker) -> None:
        model, optimizer = protected(job)
        first: dict[str, Any] = {}
        began = time.monotonic()
        for step in job.steps(job.batches(dataset(), 3), until=STEPS):
            for x, y in step:
                if kind == "first batch":
                    if "mean" not in first:
                        first["mean"] = x.mean(0)
                    x = x - first["mean"]
                elif kind == "worker":
                    x = x * (1 + job.worker / 7)
                elif kind == "leader":
                    x = x * (1 + 0.1 * job.is_leader)
                else:
                    x = x * (1 + 0.1 * (began % 1.0))
                step.backward(mse(model(x), y))
            optimizer.step()

    return script


@pytest.mark.parametrize(
    ("kind", "says", "workers"),
    [
        ("first batch", "first['mean']", 2),
        pytest.param("first batch", "first['mean']", 3, marks=pytest.mark.slow),
        pytest.param("worker", "job.worker", 2, marks=pytest.mark.slow),
        pytest.param("worker", "job.worker", 3, marks=pytest.mark.slow),
        ("leader", "job.is_leader", 2),
        pytest.param("start", "time.monotonic()", 2, marks=pytest.mark.slow),
    ],
)
def test_a_steady_difference_on_one_worker_is_found_by_another(
    kind: str, says: str, workers: int
) -> None:
    # On a busy machine a short lease may lapse, and with it, for a moment, job.is_leader.
    found = told(keeps(kind), workers, **{"nodes.lease_s": 60.0})
    assert "workers come to different gradients in step" in found
    assert "the script keeps something that is not the same on all workers" in found
    assert says in found


def test_a_worker_that_has_failed_gives_up_no_further_views(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(thread_cluster, "ROUNDS_TO_FAIL", 100)  # its script takes long to end
    spec = with_settings(SPEC, {"workers.nproc": 2, "workers.virtual": 4})
    cluster = ThreadCluster(spec, keeps("worker"))
    assert cluster.run()
    assert len(cluster.views) <= 2, cluster.views


@pytest.mark.parametrize("start", [9, pytest.param(30, marks=pytest.mark.slow)])
def test_a_count_of_calls_that_comes_late_is_found(
    start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeated_tasks, "QUICK_S", 60.0)  # the machine may be busy

    def script(job: Job, me: ThreadWorker) -> None:
        model, optimizer = protected(job)
        calls = [0]
        for step in job.steps(job.batches(dataset(), 3), until=STEPS):
            for x, y in step:
                calls[0] += 1
                step.backward(mse(model(x), y) * (1.5 if calls[0] > start else 1.0))
            optimizer.step()

    for workers in (1, 2):
        found = told(script, workers)
        assert "came to another gradient each time" in found
        assert "calls[0]" in found


def test_iterators_and_generators_that_a_script_keeps_are_named() -> None:
    def script(job: Job, me: ThreadWorker) -> None:
        model, optimizer = protected(job)
        turns = itertools.cycle([0.1, 0.2, 0.3])
        loader = iter(DataLoader(torch.arange(5000.0)))  # type: ignore[arg-type]
        dice = torch.Generator().manual_seed(3)
        for step in job.steps(job.batches(dataset(), 3), until=STEPS):
            for x, y in step:
                drawn = next(turns) + next(loader).item() + torch.rand(1, generator=dice).item()
                step.backward(mse(model(x), y) * (1 + drawn))
            optimizer.step()

    found = told(script, 1)
    assert all(name in found for name in ("turns", "loader", "dice")), found
    assert "carries x" not in found


def test_a_look_at_a_large_memory_is_short() -> None:
    """It comes as a worker begins, and must not hold a job up."""
    large = tuple(tuple(tuple(object() for _ in range(50)) for _ in range(50)) for _ in range(50))
    walk = script_suspects._Walk(())
    walk.visit("large", large, 0)
    assert script_suspects.VISITS_MAX // 2 < len(walk._seen) <= script_suspects.VISITS_MAX


def test_the_ends_of_a_long_text_stand_for_it() -> None:
    walk = script_suspects._Walk(())
    for name, text in (("one", "a" * 5000), ("same", "a" * 5000), ("other", "a" * 4999 + "b")):
        walk.visit(name, text, 0)
    assert walk.found["one"] == walk.found["same"] != walk.found["other"]
