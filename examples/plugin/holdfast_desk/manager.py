"""Keeps a job's nodes as processes of this machine, which it finds by their environment.

So it keeps no state: its successor finds the same.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from holdfast.engine.core.errors import Refused
from holdfast.engine.core.fleet.placements import Holding, Placement, PlacementId
from holdfast.engine.core.job_spec import JobSpec
from holdfast.engine.fleet.cluster_manager import FleetPlan, PlacementOrder, job_prefix

PLACEMENT, HOST, PROCESS = "DESK_PLACEMENT", "DESK_HOST", "DESK_PROCESS"
# The processes that a node starts inherit its marks, and have other numbers.
MARKED = f'export {PROCESS}=$$ && exec "$@"'


class DeskManager:
    """Starts and ends placements whose ids begin with `prefix`, each on a host of its own."""

    def __init__(self, prefix: str, hosts: Sequence[str]) -> None:
        self._prefix = prefix
        self._hosts = hosts

    async def observe(self) -> Sequence[Placement]:
        return list(self._list())

    async def request(self, order: PlacementOrder) -> None:
        found = list(self._list())
        if any(each.id == order.id for each in found):
            return
        taken = {*order.avoid, *(each.host for each in found)}
        free = [host for host in self._hosts if host not in taken]
        if not free:
            raise Refused("the desk is full")
        self._start(order, free[0])

    async def release(self, id_: PlacementId, handle: str) -> None:
        if any(each.id == id_ and each.handle == handle for each in self._list()):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(handle), signal.SIGTERM)

    async def close(self) -> None:
        pass

    def _start(self, order: PlacementOrder, host: str) -> None:
        marks = {PLACEMENT: order.id, HOST: host}
        subprocess.Popen(
            ["sh", "-c", MARKED, "sh", *order.command],
            env={**os.environ, **order.environment, **marks},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _list(self) -> Iterator[Placement]:
        for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
                marks = dict(line.split("=", 1) for line in text.split("\0") if "=" in line)
                id_ = PlacementId(marks.get(PLACEMENT, ""))
                if id_.startswith(self._prefix) and marks.get(PROCESS) == str(pid):
                    yield Placement(
                        id=id_, handle=str(pid), holding=Holding.RUNNING, host=marks[HOST]
                    )


def open_manager(plan: FleetPlan, spec: JobSpec) -> DeskManager:
    """Open the manager of a job, with one host more than it has nodes."""
    hosts = [f"desk{number}" for number in range(plan.nodes_max + 1)]
    return DeskManager(job_prefix(spec.job), hosts)
