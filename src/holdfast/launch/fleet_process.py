"""Runs the fleet of a job beside its coordinator: asks a cluster manager for the job's nodes.

    python -m holdfast.launch.fleet_process RUN_DIR PARENT_PID

It may be killed at any time: another one learns from the manager and the job what there is. Its
launcher orders it to end once the job is over. Each manager has a module with an `open_manager`.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
import time
from pathlib import Path

from holdfast.core.errors import HoldfastError, UserError
from holdfast.core.fleet.fleet import FleetMachine
from holdfast.health.measure.ending_signals import Orders
from holdfast.health.measure.lifetime import die_with_parent
from holdfast.launch.cluster_manager import ClusterManager
from holdfast.launch.fleet_driver import FleetDriver, FleetPace, JobLink
from holdfast.launch.fleet_plan import FleetPlan, read_plan
from holdfast.net.standard_streams import print_plain
from holdfast.net.tls import client_of
from holdfast.runtime.contact import contact_by
from holdfast.runtime.outlet import free_output
from holdfast.runtime.rundir import RunDir

MANAGERS = {
    "local": "holdfast.launch.local_manager",
    "slurm": "holdfast.launch.slurm_manager",
    "kubernetes": "holdfast.launch.kubernetes_manager",
    "ray": "holdfast.launch.ray_manager",
    "yarn": "holdfast.launch.yarn_manager",
    "mesos": "holdfast.launch.mesos_manager",
    "fake": "holdfast.testing.fake_cluster",  # for tests
}
# Names for people; a manager without one is called by its key.
NAMES = {
    "slurm": "Slurm",
    "kubernetes": "Kubernetes",
    "ray": "Ray",
    "yarn": "YARN",
    "mesos": "Mesos",
}
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
        NAMES.get(plan.manager, plan.manager),
    )
    orders.watch(lambda number: driver.end())
    try:
        await driver.run()
    finally:
        await manager.close()


def manager_of(plan: FleetPlan, run_dir: RunDir) -> ClusterManager:
    """Open the adapter that a plan names. UserError if there is none of that name."""
    if plan.manager not in MANAGERS:
        raise UserError(f"there is no manager {plan.manager!r}: use one of {', '.join(MANAGERS)}")
    module = importlib.import_module(MANAGERS[plan.manager])
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
