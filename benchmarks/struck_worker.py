"""Kills a worker of a job that writes when its steps end, and watches how the job continues."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from step_ends import Ends, read_ends

from holdfast.engine.runtime.local_run import LocalRun, strike

SPARES = {"hot": ["--spares", "1", "--hot-spares"], "warm": ["--spares", "1"], "no": []}
STATES = {"hot": "hot spare", "warm": "spare"}
STEADY_STEPS = 20  # before the kill


@dataclass(frozen=True, slots=True, kw_only=True)
class Struck:
    """Describes a kill. `at`: its time, in monotonic seconds. `last`: the newest step until then.

    `ends`: what ended since, not on the worker that was killed unless it was the only one.
    """

    at: float
    last: int
    ends: Ends

    @property
    def steps_again(self) -> int:
        """Return the number of steps that were done again."""
        return max(self.last + 1 - self.ends[0][0], 0)


def strike_worker(
    run: LocalRun,
    told: Path,
    spare: str,
    workers: int,
    *,
    limit_s: float,
    steps: int = 1,
    grace_s: float = 0.0,
) -> Struck:
    """Kill the newest worker once all train and its spare is there; wait for `steps` more steps.

    `grace_s`: a step that ends so soon after the kill was under way, and does not count.
    RuntimeError if the worker had ended before; each wait takes `limit_s` seconds at most.
    """
    run.until(lambda: len(read_ends(told)) >= STEADY_STEPS * workers, limit_s, "some steps")
    run.until_members(workers, limit_s)
    if spare in STATES:
        run.until(lambda: workers_in(run, STATES[spare]), limit_s, "a spare")
        enough = len(read_ends(told)) + STEADY_STEPS * workers
        run.until(lambda: len(read_ends(told)) >= enough, limit_s, "steps beside the spare")
    victim = max(workers_in(run, "computing", "waiting"), key=lambda each: each["id"])
    seen, at = read_ends(told), time.monotonic()
    if not strike(victim["pid"]):
        raise RuntimeError("the worker had ended before it was killed")

    def after() -> Ends:
        others = [x for x in read_ends(told)[len(seen) :] if workers == 1 or x[1] != victim["id"]]
        return [x for x in others if x[2] > at + grace_s]

    run.until(lambda: len(after()) >= steps, limit_s, "the next steps")
    return Struck(at=at, last=max(step for step, _, _ in seen), ends=after())


def workers_in(run: LocalRun, *states: str) -> list[dict[str, Any]]:
    """Return the status of the workers that are in one of these states."""
    return [each for each in run.status()["workers"] if each["state"] in states]
