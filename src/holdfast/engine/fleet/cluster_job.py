"""Runs a job on nodes of a cluster manager: its coordinator and its fleet, on this host.

    python -m holdfast.engine.fleet.cluster_job RUN_DIR [--host HOST] [--port PORT]

The run directory holds the job and its plan (cluster_manager.py). A job that has run before
continues from its newest checkpoint; its earlier nodes are given back first, because they knew
another coordinator.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import socket
import sys
from pathlib import Path

from holdfast.engine.core.errors import HoldfastError, UserError
from holdfast.engine.core.fleet.placements import Holding
from holdfast.engine.fleet.cluster_manager import (
    STILL_RUNNING,
    ClusterManager,
    FleetPlan,
    read_plan,
)
from holdfast.engine.fleet.fleet_process import manager_of
from holdfast.engine.net.standard_streams import print_line
from holdfast.engine.net.tcp import listen
from holdfast.engine.runtime.launcher import INTERRUPTED, CoordinatorSite
from holdfast.engine.runtime.leadership.journal import FileJournal
from holdfast.engine.runtime.rundir import RunDir
from holdfast.engine.runtime.supervise import Kept, Supervisor, say

RELEASE_S = 60.0  # for the manager to answer, when what an earlier run has left is given back
LOOK_S = 1.0


def launch_cluster_job(run_dir: RunDir, host: str, port: int = 0) -> int:
    """Run a job to its end, on the nodes that its fleet keeps. Returns the exit status.

    It is 0 for success, 1 for failure and 130 after a signal, and STILL_RUNNING if an earlier
    command runs it. UserError.
    """
    spec, plan = run_dir.spec(), read_plan(run_dir)
    if run_dir.outcome() == "":
        raise UserError(f"the run in {run_dir.path} has succeeded: there is nothing to resume")
    if FileJournal(run_dir.journal).is_held():
        say(f"the run in {run_dir.path} is running already: this job leaves it alone")
        return STILL_RUNNING
    resume = plan.join != ""
    with listen(host, port) as listener:
        shown = f"[{host}]" if ":" in host else host
        join = spec.nodes.election or f"{shown}:{listener.getsockname()[1]}"
        plan = dataclasses.replace(plan, join=join)
        plan.write()
        if resume:
            run_dir.reopen()
            asyncio.run(release_all(manager_of(plan, run_dir)))
        return coordinate(run_dir, plan, listener, host, resume=resume)


def coordinate(
    run_dir: RunDir, plan: FleetPlan, listener: socket.socket, host: str, *, resume: bool
) -> int:
    """Run coordinator and fleet, until the job is over or a signal comes. Returns the exit status.

    `host`: this machine, as agents reach it. `resume`: how the job ended before does not count.
    """
    tls, election = Path(plan.tls) if plan.tls else None, run_dir.spec().nodes.election
    site = CoordinatorSite(run_dir=run_dir, listener=listener, host=host, tls=tls)
    elected = ["--election", election] if election else []
    coordinator = site.coordinator(elected, ["--resume"] if resume else [])
    interrupted = Supervisor([coordinator, _fleet(plan)]).run()
    outcome = run_dir.outcome()
    if outcome:
        say(outcome)
    if interrupted:
        return INTERRUPTED
    return 0 if outcome == "" else 1


def _fleet(plan: FleetPlan) -> Kept:
    module = "holdfast.engine.fleet.fleet_process"
    fleet = (sys.executable, "-m", module, plan.run_dir, str(os.getpid()))
    return Kept("fleet", lambda starts: [*fleet], serves=True)


async def release_all(manager: ClusterManager) -> None:
    """Give back all placements of a job that does not run. WorldError, OSError, TimeoutError."""

    async def until_none() -> None:
        while found := [p for p in await manager.observe() if p.holding is not Holding.ENDED]:
            for each in found:
                await manager.release(each.id, each.handle)
            await asyncio.sleep(LOOK_S)

    try:
        await asyncio.wait_for(until_none(), RELEASE_S)
    finally:
        await manager.close()


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="holdfast.engine.fleet.cluster_job")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--host", default=socket.gethostname())
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args(argv)
    try:
        return launch_cluster_job(RunDir(options.run_dir), options.host, options.port)
    except (HoldfastError, OSError, asyncio.TimeoutError) as error:
        print_line(f"{error or 'the manager does not answer'}")
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
