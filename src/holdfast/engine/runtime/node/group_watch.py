"""Watches processes of a group from outside, for an agent, and lets them be forked."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from holdfast.engine.core.membership.liveness import ActivityMeter, ActivitySample
from holdfast.engine.core.types import NO_VIEW, Incarnation, WorkerId
from holdfast.engine.core.worker_status import WorkerStatus
from holdfast.engine.host.lifetime import SessionUse, measure_sessions
from holdfast.engine.runtime.node import fork_server
from holdfast.engine.runtime.node.gpu_shares import visible_gpus
from holdfast.engine.runtime.node.group_member import heartbeat_file, modules_of
from holdfast.engine.runtime.node.worker_process import WorkerProcess, WorkerTemplate
from holdfast.engine.runtime.rundir import RunDir
from holdfast.engine.runtime.temporary import temporary_folder


class GroupWatch:
    """Keeps the statuses of processes, and adds later observations."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._said: dict[WorkerId, WorkerStatus] = {}
        self._meters: dict[tuple[WorkerId, Incarnation], ActivityMeter] = {}

    def note(self, status: WorkerStatus) -> None:
        """Take in a process's own status; the newest counts."""
        self._said[status.worker] = status

    def look(
        self, processes: Sequence[WorkerProcess], steps: Mapping[int, int], now: float
    ) -> Iterator[WorkerStatus]:
        """Look at processes with a script; yield statuses of those at work since the last look.

        `steps`: the result of `read_steps`.
        """
        running = {p.worker: p for p in processes if p.running}
        uses = measure_sessions({p.pid for p in running.values()})
        meters, self._meters = self._meters, {}
        for worker, process in running.items():
            status = self._said.get(worker)
            if status is None or status.incarnation != process.incarnation:
                continue
            if status.view == NO_VIEW:
                continue
            sample = ActivitySample(
                at=now,
                cpu_s=uses.get(process.pid, SessionUse(0.0, 0)).cpu_s,
                printed=process.printed_bytes,
                step=steps.get(process.pid),
            )
            key = (worker, process.incarnation)
            meter = self._meters[key] = meters.get(key) or ActivityMeter(sample)
            if meter.observe(sample):
                self._said[worker] = status = dataclasses.replace(
                    status,
                    seq=status.seq + 1,
                    activity=status.activity + 1,
                    committed=max(sample.step or 0, status.committed),
                )
                yield status

    def read_steps(self, processes: Sequence[WorkerProcess]) -> dict[int, int]:
        """Return the steps that scripts have written to their heartbeat files, by process id.

        It reads from a disk.
        """
        found: dict[int, int] = {}
        for process in processes:
            path = heartbeat_file(self._run_dir.path, process.worker, process.incarnation)
            with contextlib.suppress(OSError, ValueError):
                found[process.pid] = int(Path(path).read_text())
        return found


@contextlib.contextmanager
def run_forking(template: WorkerTemplate) -> Iterator[None]:
    """Run a server that forks the node's processes, unless the job does not want that.

    Where GPUs are it is run only if all processes may be needed again, and at once.
    """
    spec = template.spec
    urgent = spec.compat.enabled or spec.workers.shard_optimizer or spec.redundancy().data > 0
    wanted = spec.workers.fork and (urgent or not visible_gpus(os.environ))
    if not wanted or fork_server.VARIABLE in os.environ:
        yield
        return
    with temporary_folder() as folder:
        path = folder / "fork"
        variables, modules = template.job_variables(), modules_of(spec)
        with fork_server.run_fork_server(path, variables=variables, modules=modules):
            os.environ[fork_server.VARIABLE] = str(path)
            yield
