"""The coordinator of a large job: real sockets, a real coordinator process, simulated agents.

Every agent has a connection of its own, reports once a second, and its workers carry out their
orders at once. Measured: the coordinator's share of one core without any event, and the time from
the loss of a node until the last agent receives the view without it. The node's connection closes,
but its loss is noticed by its silence, as always; that wait, set by the lease, is shown separately.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from holdfast.engine.core.directives import AgentReport, Directive
from holdfast.engine.core.job_spec import JobSpec, Nodes, Workers
from holdfast.engine.core.types import NO_VIEW, AgentId, Incarnation, ViewNumber, WorkerId
from holdfast.engine.core.views import View
from holdfast.engine.core.worker_status import ReplicaStage, Stage, WorkerStatus
from holdfast.engine.net.channel import Channel, connect
from holdfast.engine.runtime.rundir import RunDir
from holdfast.engine.wire import messages

messages._unpack = functools.lru_cache(maxsize=1)(messages._unpack)  # each node has its own core

HOST = "127.0.0.1"
LEASE_S = 4.0
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class FakeAgent:
    """Is one node, which reports as perfect workers would."""

    name: AgentId
    slots: int
    channel: Channel
    seq: int = 0
    view: View | None = None
    view_at: float = 0.0
    statuses: dict[WorkerId, WorkerStatus] = field(default_factory=dict)

    def report(self) -> None:
        self.seq += 1
        for worker, status in self.statuses.items():
            # Workers that count steps must count alike; it costs the coordinator the same.
            self.statuses[worker] = replace(status, seq=self.seq, proved_at=time.monotonic())
        self.channel.send(
            AgentReport(
                agent=self.name,
                incarnation=Incarnation(1),
                seq=self.seq,
                slots=self.slots,
                view_known=self.view.number if self.view else NO_VIEW,
                workers=tuple(self.statuses.values()),
            )
        )

    async def listen(self) -> None:
        while (directive := await self.channel.receive(Directive)) is not None:
            if self.obey(directive):
                self.report()

    def obey(self, directive: Directive) -> bool:
        """Return whether something changed that the coordinator should learn at once."""
        changed = False
        for each in directive.wanted:
            worker = each.worker
            if worker not in self.statuses:
                changed = True
                self.statuses[worker] = WorkerStatus(
                    worker=worker, incarnation=each.incarnation, stage=Stage.READY, loop=1
                )
        if directive.view is not None:
            self.view, self.view_at, changed = directive.view, time.monotonic(), True
        for worker, status in self.statuses.items():
            new = self._next(status, directive.stop_view)
            changed = changed or new is not status
            self.statuses[worker] = new
        return changed

    def _next(self, status: WorkerStatus, stop_view: ViewNumber) -> WorkerStatus:
        view = self.view
        if view is not None and status.view < view.number and status.promised < view.number:
            step = max(view.resume_step, 0)
            return replace(status, view=view.number, state=ReplicaStage.CURRENT, committed=step)
        if stop_view >= status.view > status.promised:
            return replace(status, promised=stop_view)
        return status


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    agents: int
    workers: int
    cpu: float  # share of one core
    joined_s: float  # until all agents know the first view
    view_s: tuple[float, ...]  # from the decision that a node is lost to the last agent's view
    silence_s: float  # the lease makes the coordinator wait this long


class Scale:
    """Runs one coordinator process and its agents."""

    def __init__(self, agents: int, slots: int, run_dir: RunDir) -> None:
        self._count = agents
        self._slots = slots
        self._run_dir = run_dir
        self._agents: list[FakeAgent] = []
        self._listeners: list[asyncio.Task[None]] = []

    async def run(self, pid: int, address: tuple[str, int], calm_s: float, losses: int) -> Measured:
        secret, began = self._run_dir.secret(), time.monotonic()
        beating = asyncio.ensure_future(self._beat())
        for i in range(self._count):
            channel = await connect(*address, secret, handshake_s=30.0)
            agent = FakeAgent(AgentId(f"node{i:04}"), self._slots, channel)
            self._agents.append(agent)
            self._listeners.append(asyncio.ensure_future(agent.listen()))
            agent.report()
        await self._until_view(1)
        joined_s = time.monotonic() - began
        await asyncio.sleep(2.0)
        before, at = cpu_ticks(pid), time.monotonic()
        await asyncio.sleep(calm_s)
        cpu = (cpu_ticks(pid) - before) / TICKS / (time.monotonic() - at)
        views = []
        for _ in range(losses):
            views.append(await self._lose_one())
        beating.cancel()
        return Measured(
            agents=self._count,
            workers=self._count * self._slots,
            cpu=cpu,
            joined_s=joined_s,
            view_s=tuple(views),
            silence_s=LEASE_S / 2 + LEASE_S + LEASE_S / 5,
        )

    async def _beat(self) -> None:
        """Every agent once a second, spread evenly, from when it has connected."""
        while not self._agents:
            await asyncio.sleep(0.01)
        next_at = time.monotonic()
        while True:
            for agent in list(self._agents):
                agent.report()
                next_at += 1.0 / len(self._agents)
                await asyncio.sleep(max(next_at - time.monotonic(), 0.0))

    async def _lose_one(self) -> float:
        number = self._number()
        lost = self._agents.pop()
        self._listeners.pop().cancel()
        lost.channel.close()
        await self._until_view(number + 1)
        heard = max(agent.view_at for agent in self._agents)
        await asyncio.sleep(1.0)
        return heard - self._formed_at()

    def _formed_at(self) -> float:
        """Return when the coordinator decided to leave the node, by its own event log."""
        last = 0.0
        with open(self._run_dir.events) as file:
            for line in file:
                if '"kind": "stop_view"' in line or '"kind": "view"' in line:
                    last = float(line.split('"time": ')[1].split(",")[0])
        return last - time.time() + time.monotonic()

    def _number(self) -> int:
        return min(agent.view.number if agent.view else 0 for agent in self._agents)

    async def _until_view(self, number: int) -> None:
        while self._number() < number:
            await asyncio.sleep(0.01)


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def measure(agents: int, slots: int, calm_s: float = 20.0, losses: int = 5) -> Measured:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        run_dir = RunDir(Path(folder) / "run")
        run_dir.create(spec(agents, slots), os.urandom(32))
        listener = stack.enter_context(socket.create_server((HOST, 0), backlog=4096))
        address: tuple[str, int] = listener.getsockname()[:2]
        process = subprocess.Popen(
            [
                *(
                    sys.executable,
                    "-m",
                    "holdfast.engine.runtime.coordinate.coordinator_process",
                    str(run_dir.path),
                ),
                *(str(listener.fileno()), str(os.getpid())),
            ],
            pass_fds=[listener.fileno()],
            stderr=subprocess.DEVNULL,
        )
        stack.callback(process.wait)
        stack.callback(process.kill)
        return asyncio.run(Scale(agents, slots, run_dir).run(process.pid, address, calm_s, losses))


def spec(agents: int, slots: int) -> JobSpec:
    return JobSpec(
        job="scale",
        script="none",
        args=(),
        cwd="/",
        workers=Workers(nproc=slots, losses_max=100_000),
        nodes=Nodes(min=agents, lease_s=LEASE_S),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=1250)
    parser.add_argument("--slots", type=int, default=8)
    options = parser.parse_args()
    print(measure(options.agents, options.slots))


if __name__ == "__main__":
    main()
