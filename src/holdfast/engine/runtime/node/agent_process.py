"""Runs the agent process, which starts, watches, fences and serves the workers of one node.

    python -m holdfast.engine.runtime.node.agent_process RUN_DIR --join HOST:PORT --name NAME ...

Its launcher orders it to leave: its workers go at the next step boundary, then it ends. Workers'
standard output goes to this process's own (the launcher's); each worker also has a log file in the
run directory. A worker that dies takes its whole process group with it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.engine.core.directives import Directive
from holdfast.engine.core.domains import join_labels, read_domains
from holdfast.engine.core.errors import OtherJob, WorldError, assert_never, first_line
from holdfast.engine.core.machine_errors import MachineError
from holdfast.engine.core.membership import agent as machine
from holdfast.engine.core.membership.liveness import FreezePolicy
from holdfast.engine.core.membership.server_host import BookArrived, ServerHost
from holdfast.engine.core.types import AgentId, Incarnation, Tick, WorkerId
from holdfast.engine.core.worker_status import WorkerStatus
from holdfast.engine.host.external_checks import ExternalCheck, load_checks
from holdfast.engine.host.history import Health, Watch
from holdfast.engine.host.lifetime import (
    Orders,
    adopt_orphans,
    die_with_parent,
    end_all_orphans,
    end_orphans,
    sample_process,
)
from holdfast.engine.host.light import light_checks
from holdfast.engine.net.channel import Channel
from holdfast.engine.net.descriptors import raise_limit
from holdfast.engine.net.peer_listener import open_listener
from holdfast.engine.net.secret import derive_peer_key, read_run_dir
from holdfast.engine.net.standard_streams import RareLines, print_line
from holdfast.engine.net.tls import PeerIdentity, client_of
from holdfast.engine.records.run_tail import read_log_end
from holdfast.engine.records.time_lines import measure, write_clock
from holdfast.engine.runtime.contact import ENDED_ALONE, Contact, contact_by
from holdfast.engine.runtime.event_loops import DeadlineTimer, DiskLook
from holdfast.engine.runtime.node import bootstrap
from holdfast.engine.runtime.node.fork_server import LocalProcess
from holdfast.engine.runtime.node.gpu_shares import free_place
from holdfast.engine.runtime.node.group_watch import GroupWatch, run_forking
from holdfast.engine.runtime.node.notices import NoticeSource, list_notices, notice_source
from holdfast.engine.runtime.node.server_processes import ServerProcesses
from holdfast.engine.runtime.node.usage_watch import UsageWatch
from holdfast.engine.runtime.node.worker_process import (
    SpreadPart,
    StackDumps,
    WorkerProcess,
    WorkerTemplate,
    say,
)
from holdfast.engine.runtime.outlet import free_output
from holdfast.engine.runtime.rundir import STACKS_DIR, RunDir
from holdfast.engine.state.memory.free_memory import piece_bytes
from holdfast.engine.state.memory.node_memory import NodeMemory, PieceServer
from holdfast.engine.wire.messages import (
    Address,
    AddressBook,
    ClockReply,
    ClockRequest,
    DrainRequest,
    LabelRequest,
    LogReply,
    LogRequest,
    MoveRequest,
    StacksRequest,
)

if TYPE_CHECKING:
    from holdfast.engine.state.memory.node_memory import Mending

FROM_COORDINATOR = (
    *(Directive, AddressBook, DrainRequest, MoveRequest, LabelRequest, StacksRequest, ClockReply),
    LogRequest,
)
CLOCK_S = 300.0  # between two measurements of this node's clock
CLOCK_FIRST_S = 1.0  # the same, for the first ones
CLOCK_FIRST = 5
RECONNECT_S = 0.1
MEND_S = 5.0  # between two rounds of verifying pieces in memory
HEALTH_S = 10.0  # between two rounds of light checks
TICK_S_MIN = 0.01
ORPHANS_S = 2.0  # for the ends of processes that scripts have left behind
LOOKS_PER_HANG = 10
LOOK_S_MIN, LOOK_S_MAX = 0.25, 10.0
# A process of a torchrun script may wait unscheduled for as long as it likes. A process that the
# kernel reports as stopped for 10 s holds up the whole group, and would be found by --hang-s only.
STOPPED_ONLY = FreezePolicy(stopped_samples=40, silent_samples=1 << 60)


class NodePieces:
    """Serves, reports, verifies and mends the pieces of the state in this node's memory.

    `feed`: gets the pieces as an event for the agent's machine. `peers`: the servers of pieces on
    all nodes.
    """

    def __init__(
        self, template: WorkerTemplate, feed: Callable[[machine.AgentEvent], None]
    ) -> None:
        self.peers: tuple[str, ...] = ()
        self._spec = template.spec
        self._feed = feed
        workers = template.spec.workers
        self._loop = asyncio.get_running_loop()
        self._memory = NodeMemory(self._report_soon, workers.procs, workers.spread)
        key = derive_peer_key(template.run_dir.secret(), template.spec.job)
        self._identity = PeerIdentity.of(key, template.tls)
        self._address = PieceServer(self._memory, self._identity).listen(template.host)
        self._mending: Mending | None = None

    def open(self, worker: WorkerId) -> tuple[int, int]:
        """Open a file for pieces of one process of a worker; return its number and descriptor."""
        return self._memory.open(worker)

    def record_end(self, numbers: Sequence[int]) -> None:
        """Record that no process writes to these files any more."""
        for number in numbers:
            self._memory.record_end(number)
        self.report()

    def report(self) -> None:
        kept, size = self._memory.report()
        self._feed(machine.MemoryHeld(kept, self._address, size))

    def _report_soon(self) -> None:
        self._loop.call_soon_threadsafe(self.report)

    async def watch(self, every_s: float) -> None:
        """Report the pieces, for ever."""
        while True:
            self.report()
            await asyncio.sleep(every_s)

    async def mend(self) -> None:
        """Verify pieces all the time, slowly, and mend damaged ones."""
        from holdfast.engine.state.memory.node_memory import Mending  # needs numpy

        rate = self._spec.checkpoints.scrub_rate * 1e6
        self._mending = Mending(self._memory, self._identity, self._spec.redundancy())
        while rate:
            await asyncio.sleep(MEND_S)
            for line in await asyncio.to_thread(self._mending.round, rate, self.peers):
                say(line)
                self.report()

    def end(self) -> None:
        """End a round of verifying soon."""
        if self._mending is not None:
            self._mending.end()


class AgentServer:
    """Drives one AgentMachine; everything runs in one event loop."""

    def __init__(
        self,
        core: machine.AgentMachine,
        template: WorkerTemplate,
        policy: machine.AgentPolicy,
        health_directory: str = "",
        external: Sequence[ExternalCheck] = (),
    ) -> None:
        self._core = core
        self._template = template
        self._policy = policy
        self._health_directory = health_directory  # its disk is watched; empty: no checks
        self._external = external
        self._coordinator: Channel | None = None
        self._processes: dict[WorkerId, WorkerProcess] = {}
        self._spawning: dict[WorkerId, asyncio.Task[None]] = {}
        self._pieces: NodePieces | None = None
        self._servers: ServerProcesses | None = None
        self._group = GroupWatch(template.run_dir) if template.spec.compat.enabled else None
        self._quit = asyncio.Event()
        self._problem = ""  # why it quits
        self._timer = DeadlineTimer(lambda: self._feed(Tick()), TICK_S_MIN)

    async def run(
        self,
        contact: Contact,
        secret: bytes,
        notices: NoticeSource | None,
        orders: Orders,
        notice_s: float,
    ) -> str:
        """Serve until the job is over and every worker has ended; return why it failed, or "".

        `notices`: the source of notices. `orders`: the launcher's, to leave, `notice_s` before the
        end of this machine.
        """
        leave = machine.Drained("it was asked to leave", leave=True, deadline_s=notice_s)
        self._feed(machine.Labelled(self._template.domains))
        orders.watch(lambda number: self._feed(leave))
        tasks = [
            asyncio.ensure_future(self._talk(contact, secret)),
            asyncio.ensure_future(self._watch()),
            asyncio.ensure_future(self._ask_time()),
            asyncio.ensure_future(self._usage_watch().run()),
        ]
        if self._template.spec.redundancy().data:
            self._pieces = NodePieces(self._template, self._feed)
            tasks.append(asyncio.ensure_future(self._pieces.watch(self._policy.heartbeat_s)))
            tasks.append(asyncio.ensure_future(self._pieces.mend()))
        if self._template.spec.servers.count:
            host = ServerHost(self._core.snapshot().agent)
            self._servers = ServerProcesses(
                host, self._template, lambda found: self._feed(machine.ServersRun(found))
            )
            tasks.append(asyncio.ensure_future(self._servers.watch()))
        if notices is not None:
            tasks.append(asyncio.ensure_future(self._watch_notices(notices)))
        if self._group is not None:
            tasks.append(asyncio.ensure_future(self._watch_group(self._group)))
        if self._health_directory:
            tasks.append(asyncio.ensure_future(self._watch_health(self._health_directory)))
        await self._quit.wait()
        if self._servers is not None:
            self._servers.end()
        for process in list(self._processes.values()):
            await process.wait_until_drained()
        if self._coordinator is not None:
            await self._coordinator.finish()
        if self._pieces is not None:
            self._pieces.end()
        for task in tasks:
            task.cancel()
        end_all_orphans(LocalProcess.living, ORPHANS_S)
        return self._problem

    def _usage_watch(self) -> UsageWatch:
        def list_workers() -> dict[int, int]:
            return {p.worker: p.pid for p in list(self._processes.values()) if p.running}

        name, template = self._core.snapshot().agent, self._template
        return UsageWatch(template.run_dir.path, name, template.host, list_workers)

    def _forget(self, process: WorkerProcess) -> None:
        """Record that a process has ended: its place is free, and it writes no more pieces."""
        process.place = None
        if self._pieces is not None:
            self._pieces.record_end([number for number, _ in process.memory])

    async def _watch_notices(self, source: NoticeSource) -> None:
        """Leave the job once a notice announces the end of this machine."""
        async for found in list_notices(source, say):
            self._feed(machine.Drained(found.reason, leave=True, deadline_s=found.in_s))

    async def _talk(self, contact: Contact, secret: bytes) -> None:
        """Keep a connection to the coordinator, for ever: it may be restarted at any time."""
        refusals, has_met, began_at = RareLines(say), False, time.monotonic()
        stacks = StackDumps(self._processes)
        outcome = DiskLook(self._template.run_dir.outcome, None)
        while True:
            try:
                self._coordinator = await contact.connect(secret)
                has_met = True
                self._feed(machine.CoordinatorReached(contact.job))
                while (m := await self._coordinator.receive(*FROM_COORDINATOR)) is not None:
                    if isinstance(m, Directive):
                        stacks.follow(m)
                        if self._pieces is not None and m.view:
                            self._pieces.peers = m.view.pieces_at
                        self._feed(machine.DirectiveArrived(m))
                        if self._servers is not None and not m.undecided:
                            self._servers.handle(BookArrived(m.servers, over=m.shutdown))
                    elif isinstance(m, DrainRequest):
                        asked = machine.Drained(m.reason, leave=True, deadline_s=m.deadline_s)
                        self._feed(asked)
                    elif isinstance(m, ClockReply):
                        self._note_time(m)
                    elif isinstance(m, StacksRequest):
                        stacks.write(m)
                    elif isinstance(m, LogRequest):
                        self._send_log(m, self._coordinator)
                    elif isinstance(m, MoveRequest):
                        self._feed(machine.MoveAsked(m.leaving))
                    elif isinstance(m, LabelRequest):
                        self._feed(machine.Labelled(join_labels(m.domains, self._template.domains)))
                    else:
                        for process in self._processes.values():
                            process.send(m)
            except OtherJob as error:
                self._feed(machine.CoordinatorReached(error.met))
            except WorldError as error:
                refusals.put(str(error))
            except OSError:
                pass
            if self._coordinator is not None:
                self._coordinator.close()
            self._coordinator = None
            if await outcome.ask() is not None or await contact.has_ended():
                self._feed(machine.JobOver())
                return
            abandon_s = self._policy.lease.abandon_s
            if not has_met and time.monotonic() > began_at + abandon_s:  # so no worker runs here
                self._problem = f"no coordinator at {contact} for {abandon_s:g} s: is the job over?"
                self._quit.set()
                return
            await asyncio.sleep(RECONNECT_S)

    async def _ask_time(self) -> None:
        """Ask the coordinator for its time now and then, to compare it with this node's clock."""
        count = 0
        while True:
            if self._coordinator is not None:
                self._coordinator.send(ClockRequest(asked=time.time()))
                count += 1
            await asyncio.sleep(CLOCK_FIRST_S if count < CLOCK_FIRST else CLOCK_S)

    def _note_time(self, reply: ClockReply) -> None:
        line = measure(self._template.host, reply.asked, reply.told, time.time())
        if line is not None:
            words = self._template.run_dir.path, self._core.snapshot().agent, line
            # A disk that hangs must not hold up the agent, nor its end.
            threading.Thread(target=write_clock, args=words, daemon=True).start()

    def _send_log(self, request: LogRequest, asker: Channel) -> None:
        loop, logs = asyncio.get_running_loop(), self._template.run_dir.logs

        def read() -> None:
            name, lines = read_log_end(logs, request.worker)
            reply = LogReply(number=request.number, name=name, lines=tuple(lines))
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(asker.send, reply)

        # A disk that hangs must not hold up the agent, nor its end.
        threading.Thread(target=read, daemon=True).start()

    async def _watch(self) -> None:
        while True:
            self._template.oom_kills.look(time.monotonic())
            for worker, process in list(self._processes.items()):
                sample = sample_process(process.pid) if process.running else None
                if sample is not None:
                    self._feed(machine.Sampled(worker, process.incarnation, sample))
            end_orphans(LocalProcess.living)
            await asyncio.sleep(self._policy.freeze.sample_s)

    async def _watch_group(self, group: GroupWatch) -> None:
        """Report which processes are at work, without their help."""
        look_s = self._template.spec.workers.hang_s / LOOKS_PER_HANG
        none_read: dict[int, int] = {}
        look = DiskLook(lambda: group.read_steps(list(self._processes.values())), none_read)
        while True:
            await asyncio.sleep(min(max(look_s, LOOK_S_MIN), LOOK_S_MAX))
            steps = await look.ask()
            for status in group.look(list(self._processes.values()), steps, time.monotonic()):
                self._feed(machine.WorkerSaid(status))

    async def _watch_health(self, directory: str) -> None:
        """Ask to be drained while this machine fails its checks, and for a while after."""
        checks = light_checks(directory, external=self._external)
        watch, drained = Watch(), ""
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(
            1, "holdfast-health"
        ) as thread:  # the checks need one lasting thread
            try:
                while True:
                    now = time.monotonic()
                    findings = await loop.run_in_executor(thread, checks.round, now)
                    verdict = watch.observe(findings, now)
                    drains = verdict.health is Health.DRAIN
                    reason = verdict.reason if drains else ""
                    if reason != drained:
                        drained = reason
                        self._feed(machine.Drained(reason, verdict.check if drains else ""))
                    await asyncio.sleep(HEALTH_S)
            finally:
                checks.close()

    def _feed(self, event: machine.AgentEvent) -> None:
        now = time.monotonic()
        for effect in self._core.handle(event, now):
            self._carry_out(effect)
        self._timer.set(self._core.deadline())

    def _carry_out(self, effect: machine.AgentEffect) -> None:
        match effect:
            case machine.SendReport(report):
                if self._coordinator is not None:
                    self._coordinator.send(report)
            case machine.SendWorker(worker, incarnation, directive):
                process = self._processes.get(worker)
                if process is not None and process.incarnation == incarnation:
                    process.send(directive)
            case machine.Spawn(worker, incarnation, role, place, meets_at):
                process = WorkerProcess(self._template, worker, incarnation, role)
                if self._template.spec.workers.spread > 1:
                    process.spread = SpreadPart(place=place, meets_at=meets_at)
                taken = [p.place for p in self._processes.values() if p.place is not None]
                process.place = free_place(taken)
                self._processes[worker] = process
                self._spawning[worker] = asyncio.ensure_future(self._spawn(process))
            case machine.Kill(worker, incarnation, reason):
                process = self._processes.get(worker)
                if process is not None and process.incarnation == incarnation:
                    process.note(f"holdfast: killed: {reason}")
                    process.kill()
            case machine.AskToEnd(worker, incarnation, number):
                process = self._processes.get(worker)
                if process is not None and process.incarnation == incarnation:
                    process.note(f"holdfast: asked to end by {signal.Signals(number).name}")
                    process.ask_to_end(number)
            case machine.Pause(worker, incarnation):
                process = self._processes.get(worker)
                if process is not None and process.incarnation == incarnation:
                    process.note("holdfast: paused: the node has not heard the coordinator")
                    process.pause()
            case machine.Resume(worker, incarnation):
                process = self._processes.get(worker)
                if process is not None and process.incarnation == incarnation:
                    process.note("holdfast: resumed")
                    process.resume()
            case machine.Quit(problem):
                self._problem = problem
                self._quit.set()
            case _:
                assert_never(effect)

    async def _spawn(self, process: WorkerProcess) -> None:
        worker, incarnation = process.worker, process.incarnation
        try:
            if self._pieces is not None:
                for _ in range(self._template.spec.workers.procs_on_node):
                    process.memory.append(self._pieces.open(worker))
            if process.spread is not None and not process.spread.place:
                listener, meets_at = open_listener(self._template.host)
                part = SpreadPart(place=0, meets_at=meets_at, listener=listener)
                process.spread = part
            await process.start(self._on_message, self._on_exit)
        except (OSError, MemoryError, RuntimeError) as error:  # RuntimeError: no more threads
            self._forget(process)
            reason = f"cannot start a process: {first_line(error)}"
            by_machine = bootstrap.find_machine_error(error) or MachineError.OTHER
            self._feed(machine.ProcessExited(worker, incarnation, -1, reason, error=by_machine))
            return
        meets_at = process.spread.meets_at if process.spread is not None else ""
        self._feed(machine.Spawned(worker, incarnation, process.pid, meets_at))
        if process.killed_early:
            process.kill()

    def _on_message(self, process: WorkerProcess, message: WorkerStatus | Address) -> None:
        if isinstance(message, WorkerStatus):
            if (message.worker, message.incarnation) == (process.worker, process.incarnation):
                if self._group is not None:
                    self._group.note(message)
                    process.label_rank(message.hosted)
                if message.has_stopped and self._pieces is not None:
                    self._pieces.report()  # the next view may begin from its pieces
                self._feed(machine.WorkerSaid(message))
        elif self._coordinator is not None:
            self._coordinator.send(message)

    def _on_exit(self, process: WorkerProcess, end: machine.ProcessExited) -> None:
        self._forget(process)
        self._feed(end)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="holdfast.engine.runtime.node.agent_process")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--join", metavar="HOST:PORT|URL", help="where the coordinator is")
    parser.add_argument("--name", type=AgentId)
    parser.add_argument("--incarnation", type=int)
    parser.add_argument("--nproc", type=int)
    parser.add_argument("--host", help="by which other nodes reach this one")
    parser.add_argument("--parent", type=int)
    parser.add_argument("--tls", type=Path, metavar="DIR", help="with tls.crt, tls.key and ca.crt")
    parser.add_argument("--notice-s", type=float, default=float("inf"))
    parser.add_argument("--notices", type=notice_source, help="aws, gcp, azure or a URL")
    parser.add_argument("--domain", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--orders", type=int, metavar="FD", help="to the checkpoint writer")
    options = parser.parse_args(argv)
    die_with_parent(options.parent)
    raise_limit()
    orders = Orders.receive()
    adopt_orphans()
    run_dir = RunDir(options.run_dir)
    free_output(str(run_dir.logs))
    with contextlib.suppress(OSError):
        (run_dir.path / STACKS_DIR).mkdir(exist_ok=True)
    spec, secret = run_dir.spec(), read_run_dir(run_dir.path)
    external = load_checks(run_dir.path, options.name)

    tls = client_of(options.tls)
    contact = contact_by(options.join, tls, spec.job)

    template = WorkerTemplate(
        run_dir=run_dir,
        spec=spec,
        host=options.host,
        orders_fd=options.orders,
        tls=options.tls.absolute() if options.tls is not None else None,
        domains=read_domains(options.domain),
        # Measured once: later, pieces fill a part of the free memory.
        memory_bytes=piece_bytes(spec.memory.budget) if spec.redundancy().data else 0,
    )

    async def serve() -> str:
        spares = spec.spares(options.nproc)
        policy = machine.AgentPolicy(
            heartbeat_s=spec.nodes.lease_s / 5, lease=spec.lease(), spares=spares
        )
        if spec.compat.enabled:
            policy = dataclasses.replace(policy, freeze=STOPPED_ONLY, end_s=spec.compat.end_s)
        slots, incarnation = spec.slots(options.nproc) + spares, Incarnation(options.incarnation)
        name, pid = options.name, os.getpid()
        core = machine.AgentMachine(name, incarnation, slots, policy, pid, spec.job)
        # No node can take over from the only one, so its checks would have no effect.
        directory = str(run_dir.path) if spec.nodes_max > 1 else ""
        server = AgentServer(core, template, policy, directory, external)
        return await server.run(contact, secret, options.notices, orders, options.notice_s)

    with run_forking(template):
        problem = asyncio.run(serve())
    if problem:
        print_line(problem)
    return ENDED_ALONE if problem else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
