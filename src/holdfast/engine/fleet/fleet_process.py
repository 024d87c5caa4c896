"""Runs the fleet of a job beside its coordinator: asks a cluster manager for the job's nodes.

    python -m holdfast.engine.fleet.fleet_process RUN_DIR PARENT_PID

It may be killed at any time: another one learns from the manager and the job what there is. Its
launcher orders it to end once the job is over.
"""

from __future__ import annotations

import asyncio
import sys
import time
from importlib import import_module
from pathlib import Path

from holdfast.engine.core.errors import HoldfastError
from holdfast.engine.core.fleet.fleet import FleetMachine
from holdfast.engine.fleet.cluster_manager import ClusterManager
from holdfast.engine.fleet.fleet_driver import FleetDriver, FleetPace, JobLink
from holdfast.engine.fleet.fleet_plan import FleetPlan, read_plan
from holdfast.engine.host.ending_signals import Orders
from holdfast.engine.host.lifetime import die_with_parent
from holdfast.engine.net.standard_streams import print_plain
from holdfast.engine.net.tls import client_of
from holdfast.engine.plugins import find_manager
from holdfast.engine.runtime.contact import contact_by
from holdfast.engine.runtime.outlet import free_output
from holdfast.engine.runtime.rundir import RunDir

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def main(argv: list[str]) -> int:
    run_dir, parent = RunDir(Path(argv[0])), int(argv[1])
    die_with_parent(parent)
    orders = Orders.receive()
    free_output("")
    try:
        asyncio.run(keep(run_dir, read_plan(run_dir), orders))
    except HoldfastError as error:
        say(str(error))
        return 1
    return 0


async def keep(run_dir: RunDir, plan: FleetPlan, orders: Orders) -> None:
    """Keep the nodes of the job in a run directory until the launcher says that it is over."""
    spec = run_dir.spec()
    manager = manager_of(plan, run_dir)
    contact = contact_by(plan.join, client_of(Path(plan.tls) if plan.tls else None), spec.job)
    driver = FleetDriver(
        FleetMachine(plan.policy(spec), new_epoch()),
        manager,
        JobLink(run_dir, contact, run_dir.secret()),
        plan.order,
        say,
        FleetPace(),
        find_manager(plan.manager).name,
    )
    orders.watch(lambda number: driver.end())
    try:
        await driver.run()
    finally:
        await manager.close()


def manager_of(plan: FleetPlan, run_dir: RunDir) -> ClusterManager:
    """Open the adapter that a plan names. UserError if there is none of that name."""
    module = import_module(find_manager(plan.manager).adapter)
    found: ClusterManager = module.open_manager(plan, run_dir.spec())
    return found


def new_epoch() -> str:
    """Return a name that no earlier fleet of the job has had: the time, in milliseconds."""
    left, found = time.time_ns() // 1_000_000, ""
    while left:
        left, digit = divmod(left, 36)
        found = DIGITS[digit] + found
    return found


def say(text: str) -> None:
    print_plain(f"holdfast: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
