"""Planned ends of views: a state that only the store keeps is saved where the view ends."""

from __future__ import annotations

from typing import Any

import pytest
from test_coordinator_machine import POLICY, Job, begun

from holdfast.engine.core.directives import WorkerDirective
from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.replica.saves import SavePolicy
from holdfast.engine.core.step.step_policy import StepPolicy
from holdfast.engine.core.types import ViewNumber
from holdfast.engine.core.worker_status import Phase, Stage
from holdfast.lab.sim.swarm import run_seed
from machine_kit import Company, Walker, a_view
from mutation_kit import GOES_ON, SPREAD
from roster_kit import status

ONE = ViewNumber(1)
SAVES = StepPolicy(saves=SavePolicy(enabled=True, every=1000))
STORE_ONLY = GOES_ON | {"pieces": (0, 0), "save_every": 2}


# ---------------------------------------------------------------- members


def resting(*, busy: bool = False) -> Walker:
    """Return a worker at the boundary after it has learnt that its view ends with a save.

    `busy`: it still saves another state when it votes.
    """
    company = Company(1, SAVES)
    company.enter(a_view(1, [0], joiners=[0]))
    (walker,) = company.walkers
    if busy:
        walker.feed(ev.Directed(WorkerDirective(save_wanted=1)))
        step_once(company)
    walker.feed(ev.Directed(WorkerDirective(pending_view=ONE, pending_save=True)))
    step_once(company)
    return walker


def step_once(company: Company) -> None:
    """Take one step, up to the boundary after it."""
    (walker,) = company.walkers
    walker.feed(ev.AtBoundary())
    company.settle()
    walker.feed(ev.AtBoundary())


def test_the_view_ends_at_the_boundary_whose_state_is_copied_and_the_worker_says_so() -> None:
    walker = resting()
    step = walker.status.committed
    assert [c.step for c in walker.orders(ef.CopyState)] == [step]
    assert walker.status.at_boundary
    assert walker.status.saving == step
    walker.feed(ev.SaveEnded(step, ONE, durable=True, first=True))
    assert (walker.status.saved, walker.status.saving) == (step, 0)


def test_a_save_that_fails_is_not_waited_for() -> None:
    walker = resting()
    walker.feed(ev.SaveEnded(walker.status.committed, ONE, problem="the disk is full", first=True))
    assert (walker.status.saved, walker.status.saving) == (0, 0)
    assert walker.status.events[-1].kind == "unsaved"


def test_the_view_goes_on_while_another_state_is_still_being_saved() -> None:
    walker = resting(busy=True)
    first = walker.orders(ef.CopyState)[0].step
    assert not walker.status.at_boundary
    walker.feed(ev.SaveEnded(first, ONE, durable=True, first=True))
    assert walker.status.saving == 0
    assert walker.status.saved == first


# ---------------------------------------------------------------- the coordinator


def drained(**fields: Any) -> Job:
    """Return a job that shares its state, one of whose nodes is to be left, with one to spare."""
    job = begun("a", "b", keeps=True, replicated=False, nodes_max=2, **fields)
    job.known["c"] = status(2)
    job.hear("c", status(2))
    for worker, name in enumerate("ab"):
        job.say(name, worker, committed=6, saved=5 if name == "a" else 0)
    job.node("a", draining="it is needed elsewhere")
    return job


def rest(job: Job, *, saving: int = 8) -> None:
    """Make both members rest at the end of their view, while the state of step 8 is saved."""
    for name in "ab":
        job.stop(name, committed=8, phase=Phase.BOUNDARY, saving=saving)


def replaced(job: Job) -> bool:
    """Return whether members were ordered to end."""
    return any(w.incarnation > 1 for name in "ab" for w in job.told[name].wanted)


def test_members_rest_until_the_state_in_which_they_end_is_durable() -> None:
    job = drained()
    assert job.told["b"].pending_view == 0, "the store may be away"
    assert job.told["b"].save_wanted
    job.say("a", 0, saved=6)
    assert (job.told["b"].pending_view, job.told["b"].pending_save) == (1, True)
    rest(job)
    job.say("b", 1, saving=0)
    job.pass_time(job.now + 5.0)
    assert not replaced(job)
    job.say("a", 0, saved=8, saving=0)
    assert replaced(job)


@pytest.mark.parametrize("why", ["it failed", "a member is gone", "it takes as long as a hang"])
def test_members_do_not_rest_for_a_checkpoint_that_never_comes(why: str) -> None:
    job = drained()
    job.say("a", 0, saved=6)
    rest(job)
    assert not replaced(job)
    if why == "it failed":
        job.say("a", 0, saving=0)
    elif why == "a member is gone":
        job.say("b", 1, stage=Stage.LOST)
    else:
        job.pass_time(job.now + POLICY.hang_s + 1.0)
        assert any("; step 8 is not saved" in text for text in job.announced("replaced"))
    assert replaced(job)


def test_a_restarted_coordinator_waits_for_the_checkpoint_as_well() -> None:
    job = drained()
    job.say("a", 0, saved=6)
    rest(job)
    again = Job(record=job.machine.snapshot().record, keeps=True, replicated=False, nodes_max=2)
    again.known |= job.known
    for name in "abc":
        again.hear(name, job.known[name], view_known=again.number)
    again.pass_time(again.now + 5.0)
    assert not replaced(again)
    again.say("a", 0, saved=8, saving=0)
    assert replaced(again)


# ---------------------------------------------------------------- whole jobs


@pytest.mark.parametrize("seed", [777, 960, 1037, 1307, 1397])
def test_a_seed_whose_planned_leave_once_cost_a_step(seed: int) -> None:
    result = run_seed(seed, small=True, tuned=GOES_ON)
    assert not result.failure, f"{result.failure}\n{result.replay}"


@pytest.mark.slow
@pytest.mark.parametrize("swarm", [{"shard_optimizer": True}, SPREAD], ids=["shares", "spread"])
def test_planned_leaves_cost_no_step_where_the_store_is_the_only_memory(
    swarm: dict[str, object],
) -> None:
    leaves = 0
    for seed in range(12):
        tuned = GOES_ON | swarm | STORE_ONLY | {"faults": ("leave", "drain", "move")}
        tuned |= {name: swarm[name] for name in ("procs", "spread") if name in swarm}
        result = run_seed(seed, small=True, tuned=tuned)
        assert not result.failure, f"{result.failure}\nseed {seed}"
        leaves += result.faults.get("leave", 0)
    assert leaves > 20
