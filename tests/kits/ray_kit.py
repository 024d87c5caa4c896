"""Makes a cluster of Ray, real or faked, report why it does not start actors."""

from __future__ import annotations

import functools
from typing import Any

from holdfast.clusters.ray.ray_manager import RayManager
from holdfast.engine.core.fleet.placements import Placement, PlacementId
from holdfast.lab.contracts.cluster_contract import order, run_placement, until

FULL, LARGE = "hf-full-", "hf-large-"


async def check_reasons(cluster: Any, small: int) -> None:
    """Wait on a cluster whose nodes are all taken, and for a node that it does not have.

    `small`: the nodes that have no CPUs, besides the hosts.
    """
    nodes = len(cluster.hosts) + small
    manager, large = cluster.manager(FULL), cluster.manager(LARGE, cpus=64.0)
    for number in range(len(cluster.hosts)):
        await run_placement(cluster, manager, order(number, prefix=FULL))
    more, most = order(nodes, prefix=FULL), order(nodes, prefix=LARGE)
    await manager.request(more)
    await large.request(most)
    (found,) = await until(lambda: reasons(manager, more.id), "a reason to wait")
    lacks = f"1 is too small, {len(cluster.hosts)}" if small else f"{len(cluster.hosts)}"
    assert (
        found == f"CPU 0.5 is pending in Ray: of its {nodes} nodes {lacks} have a node of the job"
    )
    (found,) = await until(lambda: reasons(large, most.id), "another reason to wait")
    assert found == f"CPU 64 is infeasible in Ray: none of its {nodes} nodes has so much"
    for each in (manager, large):
        for placement in await each.observe():
            await each.release(placement.id, placement.handle)
        await until(functools.partial(is_empty, each), "all are released")


async def reasons(manager: RayManager, id_: PlacementId) -> list[str]:
    found: list[Placement] = [p for p in await manager.observe() if p.id == id_ and p.why]
    return [each.why for each in found]


async def is_empty(manager: RayManager) -> bool:
    return not await manager.observe()
