"""Runs a script whose workers have several processes, and strikes some of these.

    sharded.py FAULTS REJOINS SCRIPT ARGUMENTS...

FAULTS: POINT:WORKER.SHARD:STEP[:SIGNAL], separated by commas, or "-": the first incarnation of that
worker is struck at this point of that step: "task" (as one begins), "backward" (after it) or "end"
(of the step). EXIT as the SIGNAL calls os._exit(0). At "saved" it waits until a checkpoint is
complete, at "held" until there is a file "go" beside the run directory, and goes on; at "fails" its
script fails. "late" is before it has joined, and STEP is for how many seconds it waits there.
REJOINS: steps after
which to wait until all workers are members, or "-".
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast.engine.train.job import Job
from holdfast.engine.train.script.job_step import Step

plain_steps, plain_backward, plain_task = Job.steps, Step.backward, Step._task
shard = int(os.environ.get("HOLDFAST_SHARD", "0"))
me = f"{os.environ.get('HOLDFAST_WORKER')}.{shard}"
faults = [each.split(":") for each in sys.argv[1].split(",") if each != "-"]
events = Path(os.environ["HOLDFAST_RUN_DIR"]) / "events.jsonl"
rejoins = [int(number) for number in sys.argv[2].split(",") if number != "-"]
if os.environ.get("HOLDFAST_INCARNATION") != "1":
    faults = []


def strike(point: str, step: int) -> None:
    for at, whom, when, *name in faults:
        if (at, point, whom, int(when)) == ("saved", "end", me, step):
            while '"save"' not in events.read_text():
                time.sleep(0.005)
        if (at, point, whom, int(when)) == ("held", "end", me, step):
            while not (events.parent.parent / "go").exists():
                time.sleep(0.005)
        if (at, point, whom, int(when)) == ("fails", "end", me, step):
            raise ValueError("it fails")
        if (at, whom, int(when)) == (point, me, step):
            if name == ["EXIT"]:
                os._exit(0)
            os.kill(os.getpid(), getattr(signal, name[0]) if name else signal.SIGKILL)


def steps(job: Job, *args: Any, **kwargs: Any) -> Iterator[Step]:
    everyone = job._environment.spec.workers.nproc
    for step in plain_steps(job, *args, **kwargs):
        yield step
        strike("end", step.index)
        if step.index in rejoins and shard == 0:  # the others wait for this one
            view = job._driver.view
            while len(job._driver.view.members) < everyone and not job._driver.pending:
                if job._driver.view.number != view.number:
                    break
                time.sleep(0.005)


def task(step: Step, *args: Any) -> Iterator[Any]:
    strike("task", step.index)
    return plain_task(step, *args)


def backward(step: Step, *args: Any, **kwargs: Any) -> None:
    plain_backward(step, *args, **kwargs)
    strike("backward", step.index)


for at, whom, seconds, *_ in faults:
    if (at, whom) == ("late", me):
        time.sleep(float(seconds))
Job.steps = steps
Step._task = task
Step.backward = backward
sys.argv = sys.argv[3:]
runpy.run_path(sys.argv[0], run_name="__main__")
