"""Launches a job whose nodes come from a cluster manager: its coordinator and its fleet, here."""

from __future__ import annotations

import os
import sys

from holdfast.core.job_spec import JobSpec
from holdfast.runtime.launcher import INTERRUPTED, CoordinatorSite
from holdfast.runtime.supervise import Kept, Supervisor


def launch_cluster_job(site: CoordinatorSite, spec: JobSpec, *, resume: bool = False) -> int:
    """Run a job to its end, on the nodes that its fleet keeps. Returns the exit status.

    It is 0 for success, 1 for failure and 130 after a signal. `resume`: the job has run before.
    """
    election = ["--election", spec.nodes.election] if spec.nodes.election else []
    coordinator = site.coordinator(election, ["--resume"] if resume else [])
    run_dir = str(site.run_dir.path)
    fleet = Kept(
        "fleet",
        lambda starts: [
            *(sys.executable, "-m", "holdfast.launch.fleet_process", run_dir, str(os.getpid()))
        ],
        serves=True,
    )
    interrupted = Supervisor([coordinator, fleet]).run()
    outcome = site.run_dir.outcome()
    if outcome:
        print(f"holdfast: {outcome}", file=sys.stderr, flush=True)
    if interrupted:
        return INTERRUPTED
    return 0 if outcome == "" else 1
