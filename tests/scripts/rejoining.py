"""Runs a script that waits after some steps until a lost worker is ready to come back.

    rejoining.py STEP,STEP SCRIPT ARGUMENTS...

So a run whose workers take long to start sees joins, too.
"""

from __future__ import annotations

import runpy
import sys
import time
from collections.abc import Iterator
from typing import Any

from holdfast.engine.train.job import Job, Step

plain_steps = Job.steps
after = [int(number) for number in sys.argv[1].split(",")]


def steps(job: Job, *args: Any, **kwargs: Any) -> Iterator[Step]:
    everyone = job._environment.spec.workers.nproc
    for step in plain_steps(job, *args, **kwargs):
        yield step
        view = job._driver.view
        while step.index in after and len(view.members) < everyone and not job._driver.pending:
            if job._driver.view.number != view.number:
                break
            time.sleep(0.005)


Job.steps = steps  # type: ignore[method-assign]
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
