"""Random fault schedules against real processes; the digest never changes.

Each seed draws its faults: kills and freezes from outside, several at once, all but one at once, a
worker killed while it joins. The slow tier runs fifty seeds, the fast one a few.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable

import pytest

from conftest import RUN_S, Start, finish
from goodput_kit import goodput_of
from holdfast.engine.core.errors import HoldfastError
from holdfast.engine.records.incidents import Part, list_incidents
from holdfast.engine.records.ledger_audit import verify
from holdfast.engine.runtime.local_run import LocalRun, RunEnded, strike
from holdfast.engine.train.data.sampling import SamplePlan

STEPS = 160
TASK_S = 0.03
NOBODY = 1 << 30  # no process has this number
Reference = Callable[[int], str]


def kill_some(run: LocalRun, rng: random.Random) -> None:
    members = run.until_members(2, RUN_S)
    for worker in rng.sample(sorted(members), rng.randint(1, len(members) - 1)):
        strike(members[worker])


def freeze_one(run: LocalRun, rng: random.Random) -> None:
    members = run.until_members(2, RUN_S)
    strike(members[rng.choice(sorted(members))], signal.SIGSTOP)


def kill_and_freeze(run: LocalRun, rng: random.Random) -> None:
    members = run.until_members(3, RUN_S)
    one, two = rng.sample(sorted(members), 2)
    strike(members[one], signal.SIGSTOP)
    strike(members[two])


def kill_all_but_one(run: LocalRun, rng: random.Random) -> None:
    members = run.until_members(2, RUN_S)
    for worker in rng.sample(sorted(members), len(members) - 1):
        strike(members[worker])


def kill_a_joiner(run: LocalRun, rng: random.Random) -> None:
    """Kill a member, then its replacement while it starts, is ready, or receives the state."""
    members = run.until_members(2, RUN_S)
    victim = rng.choice(sorted(members))
    strike(members[victim])
    state = rng.choice(["booting", "spare", "joining"])

    def replacement() -> int | None:
        try:
            workers = run.status()["workers"]
        except HoldfastError:  # the run has ended before the replacement came: no worker to strike
            return NOBODY
        for worker in workers:
            new = worker["id"] == victim and worker["pid"] not in (0, members[victim])
            late = state == "joining" and worker["state"] in ("computing", "waiting")
            if new and (worker["state"] == state or late):
                return int(worker["pid"])
        return None

    strike(run.until(replacement, RUN_S, f"worker {victim} is {state}"))


FAULTS = [kill_some, freeze_one, kill_and_freeze, kill_all_but_one, kill_a_joiner]


def run_seed(seed: int, start: Start, reference: Reference) -> None:
    rng = random.Random(seed)
    at = sorted(rng.sample(range(3, STEPS - 40), rng.randint(2, 4)))
    faults = [rng.choice(FAULTS) for _ in at]
    expected = reference(STEPS)
    with start("--steps", str(STEPS), "--task-s", str(TASK_S)) as run:
        run.until_members(4, RUN_S)
        for step, fault in zip(at, faults, strict=True):
            try:
                reached = run.until(_reaches(run, step), RUN_S, f"step {step}")
                if reached < STEPS - 20:
                    fault(run, rng)
            except (RunEnded, HoldfastError):
                run.wait(RUN_S)  # it ended before the fault could strike; a hang raises here
                break
        assert finish(run) == expected, (seed, [f.__name__ for f in faults], at)
    assert run.events("lost"), "no fault struck: the test proves nothing"
    report = verify(run.run_dir.path, SamplePlan.from_dict)
    assert report.ok, report.findings
    assert (report.steps, report.lost, report.repeated) == (STEPS, 0, 0)
    found = goodput_of(run)
    incidents = list_incidents(run.events())
    assert [cost.incident for cost in found.costs] == incidents
    charged = sum(cost.seconds for cost in found.costs)
    assert charged <= sum(s for part, s in found.parts().items() if part is not Part.PRODUCTIVE)


def _reaches(run: LocalRun, step: int) -> Callable[[], int]:
    def reached() -> int:
        now = int(run.status()["step"])
        return now if now >= step else 0

    return reached


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_random_faults(seed: int, start: Start, reference: Reference) -> None:
    run_seed(seed, start, reference)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 50))
def test_many_random_faults(seed: int, start: Start, reference: Reference) -> None:
    run_seed(seed, start, reference)


@pytest.mark.slow
@pytest.mark.timeout(400)  # every lost worker starts again, and that is most of the work
def test_a_kill_every_two_seconds(start: Start, reference: Reference) -> None:
    """Random workers are killed every two seconds for most of the run."""
    steps, rng = 600, random.Random(1)
    expected = reference(steps)
    with start("--steps", str(steps), "--task-s", str(TASK_S)) as run:
        run.until_members(4, RUN_S)
        lost = 0
        while run.is_running() and (members := run.members()) and run.status()["step"] < steps - 50:
            strike(members[rng.choice(sorted(members))])
            lost += 1
            with_pause = _paused(run, 2.0)
            if not with_pause:
                break
        assert finish(run) == expected
    assert lost >= 5


def _paused(run: LocalRun, pause_s: float) -> bool:
    """Wait for a while as the run continues; False when it ended in that time."""
    import subprocess

    try:
        run.wait(pause_s)
    except subprocess.TimeoutExpired:
        return True
    return False
