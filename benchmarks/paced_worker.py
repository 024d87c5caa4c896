"""Runs a script that rests after each step, so that processes which start have the processor.

paced_worker.py SECONDS SCRIPT ARGUMENTS...
"""

from __future__ import annotations

import runpy
import sys
import time
from collections.abc import Iterator
from typing import Any

from holdfast.engine.train.job import Job
from holdfast.engine.train.script.job_step import Step

plain_steps, rest_s = Job.steps, float(sys.argv[1])


def steps(job: Job, *args: Any, **kwargs: Any) -> Iterator[Step]:
    for step in plain_steps(job, *args, **kwargs):
        yield step
        time.sleep(rest_s)


Job.steps = steps
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
