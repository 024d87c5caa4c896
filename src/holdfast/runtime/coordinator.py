"""The coordinator process: sockets, clock and journal around the pure machine.

    python -m holdfast.runtime.coordinator RUN_DIR LISTEN_FD PARENT_PID

It listens on a socket that it inherits, so that a restarted coordinator has the same address. Exit
status: 0 the job succeeded, 1 it failed (result.json says why); anything else is a crash.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

from holdfast.core import coordinator as machine
from holdfast.core.errors import WireError, assert_never
from holdfast.core.job import JobSpec
from holdfast.core.types import (
    RELEASE_ALL,
    AgentId,
    AgentReport,
    JobRecord,
    Stage,
    View,
    WorkerId,
    WorkerStatus,
)
from holdfast.runtime.channel import Channel, accept
from holdfast.runtime.lifetime import die_with_parent
from holdfast.runtime.rundir import RunDir, write_json
from holdfast.wire.messages import (
    Address,
    AddressBook,
    JoinReply,
    JoinRequest,
    StatusReply,
    StatusRequest,
    StopRequest,
)

Incoming = AgentReport | Address | JoinRequest | StatusRequest | StopRequest
INCOMING = (AgentReport, Address, JoinRequest, StatusRequest, StopRequest)
TICK_S_MIN = 0.02
CRASHED = 70  # exit status of a coordinator that met a bug of ours
FAREWELL_S = 2.0  # how long agents may take to hear that the job is over


class CoordinatorServer:
    """Drives one CoordinatorMachine; everything runs in one event loop."""

    def __init__(self, run_dir: RunDir, spec: JobSpec, core: machine.CoordinatorMachine) -> None:
        self._run_dir = run_dir
        self._spec = spec
        self._core = core
        self._secret = b""
        self._agents: dict[AgentId, Channel] = {}
        self._addresses: dict[WorkerId, bytes] = {}  # of the members of `_addressed`
        self._addressed = 0
        self._finished = asyncio.Event()
        self._outcome = ""
        self._timer: asyncio.TimerHandle | None = None

    async def run(self, listener: socket.socket) -> str:
        """Serve until the job is over; returns its outcome."""
        self._secret = self._run_dir.secret()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(
            signal.SIGTERM, lambda: self._feed(machine.StopRequested("interrupted"))
        )
        server = await asyncio.start_server(self._serve, sock=listener)
        host, port = listener.getsockname()[:2]
        where = {"host": host, "port": port, "pid": os.getpid()}
        write_json(self._run_dir.coordinator, where)
        self._feed(machine.Tick())
        await self._finished.wait()
        step = self._core.snapshot().step
        write_json(self._run_dir.result, {"outcome": self._outcome, "step": step})
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._agents_gone(), FAREWELL_S)
        server.close()
        return self._outcome

    async def _agents_gone(self) -> None:
        while self._agents:
            await asyncio.sleep(0.01)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        agent: AgentId | None = None
        channel: Channel | None = None
        try:
            channel = await accept(reader, writer, self._secret)
            while True:
                message: Incoming | None = await channel.receive(*INCOMING)
                match message:
                    case None:
                        break
                    case AgentReport():
                        agent = message.agent
                        self._agents[agent] = channel
                        self._feed(machine.ReportArrived(message))
                    case Address():
                        self._note_address(message, channel)
                    case JoinRequest():
                        host = str(writer.get_extra_info("peername")[0])
                        channel.send(JoinReply(spec=self._spec, seen_as=host))
                    case StatusRequest():
                        channel.send(StatusReply(text=json.dumps(self._status())))
                    case StopRequest():
                        self._feed(machine.StopRequested(message.reason))
                    case _:
                        assert_never(message)
        except WireError as error:
            self._say("refused", f"a connection was refused: {error}")
        except Exception:  # noqa: BLE001 - asyncio would keep it to itself: crash, be restarted
            traceback.print_exc()
            os._exit(CRASHED)
        finally:
            if channel is not None:
                channel.close()
            if agent is not None and self._agents.get(agent) is channel:
                del self._agents[agent]
                self._agent_left()

    def _agent_left(self) -> None:
        """An agent leaves an ended job when its workers are gone; its last word may be lost."""
        outcome = self._core.snapshot().record.outcome
        if outcome is not None and not self._agents:
            self._outcome = outcome
            self._finished.set()

    def _feed(self, event: machine.CoordinatorEvent) -> None:
        now = time.monotonic()
        for effect in self._core.handle(event, now):
            match effect:
                case machine.Persist(record):
                    self._save(record)
                case machine.SendDirective(directive):
                    channel = self._agents.get(directive.agent)
                    if channel is not None:
                        channel.send(directive)
                case machine.Announce():
                    self._say(effect.kind, effect.text, effect)
                case machine.Finish(outcome):
                    self._outcome = outcome
                    self._finished.set()
                case _:
                    assert_never(effect)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self._core.deadline()
        if deadline is not None and not self._finished.is_set():
            delay_s = max(deadline - now, TICK_S_MIN)
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(delay_s, self._feed, machine.Tick())

    def _save(self, record: JobRecord) -> None:
        try:
            self._run_dir.save_record(record)
        except OSError as error:
            # Without a journal nothing may be decided: stop here, in one sentence.
            print(
                f"holdfast: cannot write {self._run_dir.journal}: {error.strerror}; free space or "
                "use --run-dir",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)

    def _note_address(self, message: Address, channel: Channel) -> None:
        view = self._core.snapshot().record.view
        if view is None or message.view != view.number:
            return
        if self._addressed != view.number:
            self._addressed, self._addresses = view.number, {}
        known = len(self._addresses)
        self._addresses[message.worker] = message.address
        if any(w not in self._addresses for w in view.workers):
            return
        book = AddressBook(view=view.number, addresses=tuple(sorted(self._addresses.items())))
        for each in self._agents.values() if known < len(self._addresses) else [channel]:
            each.send(book)

    def _say(self, kind: str, text: str, announced: machine.Announce | None = None) -> None:
        event = {"time": time.time(), "kind": kind, "text": text}
        if announced is not None:
            found = {"worker": announced.worker, "view": announced.view, "step": announced.step}
            event |= {k: v for k, v in found.items() if v is not None}
        with contextlib.suppress(OSError), open(self._run_dir.events, "a") as file:
            file.write(json.dumps(event) + "\n")
        if kind != "failed":  # the launcher shows the outcome, once
            print(f"holdfast: {text}", file=sys.stderr, flush=True)

    def _status(self) -> dict[str, object]:
        snapshot = self._core.snapshot()
        record = snapshot.record
        view = record.view
        workers = []
        for status in snapshot.workers:
            member = view is not None and any(
                (m.worker, m.incarnation) == (status.worker, status.incarnation)
                for m in view.members
            )
            workers.append(
                {
                    "id": status.worker,
                    "pid": status.pid,
                    "incarnation": status.incarnation,
                    "state": _state(status, member, view),
                    "virtual_ranks": list(view.hosted_by(status.worker)) if view and member else [],
                    "step": status.committed,
                    "detail": status.detail,
                }
            )
        return {
            "view": view.number if view else 0,
            "step": snapshot.step,
            "state": "over" if snapshot.finished else _job_state(snapshot),
            "coordinator": {"pid": os.getpid(), "term": record.term},
            "agents": [
                {"id": a, "incarnation": i, "pid": p, "silent": s} for a, i, p, s in snapshot.agents
            ],
            "workers": workers,
            "leader": view.leader if view else None,
        }


def _job_state(snapshot: machine.CoordinatorSnapshot) -> str:
    view = snapshot.record.view
    if snapshot.record.outcome is not None:
        return "stopping"
    if view is None:
        return "starting"
    if snapshot.record.release_loop == RELEASE_ALL:
        return "finishing"
    return "recovering" if snapshot.stop_view >= view.number else "training"


def _state(status: WorkerStatus, member: bool, view: View | None) -> str:
    if not status.stage.alive or status.stage == Stage.BOOTING:
        return status.stage.value
    if not member:
        return "spare"
    if view is not None and status.view < view.number:
        return "changing view"
    if status.promised >= status.view:
        return "stopped"
    if not status.has_state:
        return "joining"
    return "ended" if status.ended else "waiting" if status.waiting else "computing"


def main(argv: list[str]) -> int:
    run_dir, listen_fd, parent_pid = RunDir(Path(argv[0])), int(argv[1]), int(argv[2])
    die_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides what Ctrl-C means
    spec = run_dir.spec()
    record = run_dir.load_record()
    term = record.term + 1 if record else 1
    core = machine.CoordinatorMachine(spec.policy(), term, record, time.monotonic())

    async def serve() -> str:
        return await CoordinatorServer(run_dir, spec, core).run(socket.socket(fileno=listen_fd))

    return 1 if asyncio.run(serve()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
