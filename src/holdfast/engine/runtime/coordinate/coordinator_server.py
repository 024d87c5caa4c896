"""Serves the coordinator: sockets, clock and journal around the pure machine.

It carries out the machine's effects in order. An effect that follows a record waits until that
record is durable. When another coordinator may lead, no effect is carried out. It does not know how
a coordinator becomes leader, nor where the journal is.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, get_args

from holdfast.engine.core.directives import SIGTERM, AgentReport
from holdfast.engine.core.errors import Deposed, HoldfastError, WireError, WorldError, assert_never
from holdfast.engine.core.job_problems import SPREAD_STAYS, find_scale_problem
from holdfast.engine.core.job_record import JobRecord
from holdfast.engine.core.job_spec import JobSpec
from holdfast.engine.core.membership import coordinator as machine
from holdfast.engine.core.membership import coordinator_events as ce
from holdfast.engine.core.membership.group import GroupMachine
from holdfast.engine.core.types import NO_VIEW, AgentId, Peer, Tick, WorkerId
from holdfast.engine.core.views import View
from holdfast.engine.net.channel import Channel, Gate
from holdfast.engine.net.standard_streams import print_line
from holdfast.engine.net.tls import server_of
from holdfast.engine.runtime.coordinate.black_box import BlackBox
from holdfast.engine.runtime.coordinate.connected_nodes import ConnectedNodes, LogDesk
from holdfast.engine.runtime.event_loops import DeadlineTimer
from holdfast.engine.runtime.job_events import EventSink, LoggedEvent
from holdfast.engine.runtime.job_status import encode_status, make_status
from holdfast.engine.runtime.leadership.journal import DEPOSED, Journal
from holdfast.engine.runtime.outlet import flush_outlets
from holdfast.engine.runtime.run_mirror import read_parts
from holdfast.engine.runtime.rundir import RunDir, write_json
from holdfast.engine.wire.messages import (
    Address,
    AddressBook,
    ClockReply,
    ClockRequest,
    DrainRequest,
    FilesRequest,
    JoinReply,
    JoinRequest,
    LabelRequest,
    LogReply,
    LogRequest,
    MoveRequest,
    NodesAwaited,
    OrderReply,
    ScaleRequest,
    StacksRequest,
    StatusReply,
    StatusRequest,
    StopRequest,
)

Incoming = (
    AgentReport
    | Address
    | JoinRequest
    | StatusRequest
    | StopRequest
    | DrainRequest
    | MoveRequest
    | LabelRequest
    | NodesAwaited
    | ScaleRequest
    | StacksRequest
    | ClockRequest
    | FilesRequest
    | LogRequest
    | LogReply
)
INCOMING = get_args(Incoming)
TICK_S_MIN = 0.002
FAREWELL_S = 2.0  # agents may take so long to receive the end of the job
CRASHED = 70  # exit status of a coordinator that met a bug of ours


class EffectPipe:
    """Queues effects on their way out, in order.

    The effects that wait for a slow journal stay bounded: directives and records are complete in
    themselves, so of several that wait only the newest is kept, at its own position.
    """

    def __init__(self) -> None:
        self._waiting: dict[object, ce.CoordinatorEffect] = {}
        self._count = 0

    def push(self, effects: Sequence[ce.CoordinatorEffect]) -> None:
        for effect in effects:
            key: object
            if isinstance(effect, ce.SendDirective):
                key = ("directive", effect.directive.agent)
                self._waiting.pop(key, None)
            else:
                self._count += 1
                key = self._count
            self._waiting[key] = effect

    def pop(self) -> ce.CoordinatorEffect | None:
        """Return the next effect; a Persist already carries the newest record that waits."""
        key = next(iter(self._waiting), None)
        if key is None:
            return None
        effect = self._waiting.pop(key)
        if isinstance(effect, ce.Persist):
            later = [k for k, e in self._waiting.items() if isinstance(e, ce.Persist)]
            for key in later:
                effect = self._waiting.pop(key)
        return effect


class AddressRoll:
    """Collects the addresses of the processes of one view."""

    def __init__(self) -> None:
        self._view = NO_VIEW
        self._addresses: dict[Peer, bytes] = {}

    def take(self, view: View, message: Address) -> tuple[bool, AddressBook | None]:
        """Return whether an address is new, and all of them; None until all are there."""
        if self._view != view.number:
            self._view, self._addresses = view.number, {}
        is_new = message.peer not in self._addresses
        self._addresses[message.peer] = message.address
        if any(peer not in self._addresses for peer in view.peers):
            return is_new, None
        found = tuple(sorted(self._addresses.items()))
        return is_new, AddressBook(view=view.number, addresses=found)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorSetup:
    """Keeps the settings of a coordinator process for its whole life."""

    run_dir: RunDir
    secret: bytes
    listener: socket.socket
    #: The name by which other machines reach this one.
    host: str
    #: The directory of the certificates. None: no TLS.
    tls: Path | None = None


TORCH_IN_THE_CLEAR = (
    "--tls does not encrypt what processes exchange by torch.distributed: those of one worker with "
    "--procs-per-worker, all of a script for torchrun"
)


class CoordinatorServer:
    """Drives one CoordinatorMachine or GroupMachine; everything runs in one event loop.

    `check` raises Deposed when no message may be sent any more.
    """

    def __init__(
        self,
        setup: CoordinatorSetup,
        spec: JobSpec,
        core: machine.CoordinatorMachine | GroupMachine,
        journal: Journal,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._setup = setup
        self._events = EventSink(setup.run_dir.events)
        self._spec = spec
        self._core = core
        self._journal = journal
        self._check = check
        self._nodes = ConnectedNodes()
        self._addresses = AddressRoll()
        self._logs = LogDesk(setup.run_dir.logs)
        self._pipe = EffectPipe()
        self._saving: asyncio.Task[None] | None = None
        self._finished = asyncio.Event()
        self._outcome = ""
        self._timer = DeadlineTimer(self._tick, TICK_S_MIN)
        self._black_box = BlackBox(setup.run_dir, core, lambda line: self.say("recording", line))

    async def run(self) -> str:
        """Serve until the job is over; return its outcome. UserError for bad certificates."""
        setup = self._setup
        tls = server_of(setup.tls)
        job = self._spec.job
        gate = Gate(setup.secret, self._serve, lambda line: self.say("refused", line), tls, job=job)
        gate.open(setup.listener)
        if tls is not None and (self._spec.compat.enabled or self._spec.workers.procs > 1):
            self.say("tls", TORCH_IN_THE_CLEAR)
        port = setup.listener.getsockname()[1]
        where = {"host": setup.host, "port": port, "pid": os.getpid()}
        write_json(self._setup.run_dir.coordinator, where)
        self._black_box.begin()
        self._feed(Tick())
        await self._finished.wait()
        step = self._core.snapshot().step
        flush_outlets()  # a reader of the result finds the whole event log
        write_json(self._setup.run_dir.result, {"outcome": self._outcome, "step": step})
        await self._wait_until_agents_left()
        gate.close()
        await self._black_box.close()
        return self._outcome

    def stop(self, reason: str, number: int = SIGTERM) -> None:
        """End the job, after a last checkpoint if it keeps any; asked again, at once.

        `number`: the signal by which scripts for torchrun are asked to end.
        """
        saves = bool(self._spec.checkpoints.store and self._nodes)
        self._feed(ce.StopRequested(reason, saves, number))

    def interrupt(self, number: int) -> None:
        """End the job as a signal asks."""
        self.stop("interrupted", number)

    async def _wait_until_agents_left(self) -> None:
        """Wait, for a limited time, until all agents that are there or coming know of the end."""
        connected_until = time.monotonic() + FAREWELL_S
        while True:
            now = time.monotonic()
            leaving = self._nodes and now < connected_until
            if not leaving and not self._nodes.expects_any(now):
                return
            await asyncio.sleep(0.01)

    async def _serve(self, channel: Channel) -> None:
        agent: AgentId | None = None
        try:
            while True:
                message: Incoming | None = await channel.receive(*INCOMING)
                match message:
                    case None:
                        break
                    case AgentReport():
                        agent = message.agent
                        self._nodes.record_report(agent, channel, time.monotonic())
                        self._feed(ce.ReportArrived(message))
                    case Address():
                        self._note_address(message, channel)
                    case JoinRequest(name=name):
                        host = channel.peer.rpartition(":")[0].strip("[]")
                        number = self._next_incarnation(name)
                        reply = JoinReply(spec=self._spec, seen_as=host, incarnation=number)
                        channel.send(reply)
                        self._nodes.record_question(time.monotonic())
                    case StatusRequest():
                        awaited = self._nodes.awaited
                        status = make_status(self._core.snapshot(), self._spec, awaited)
                        channel.send(StatusReply(text=encode_status(status)))
                    case StopRequest():
                        self.stop(message.reason)
                    case ClockRequest(asked=asked):
                        channel.send(ClockReply(asked=asked, told=time.time()))
                    case FilesRequest(held=held):
                        path = self._setup.run_dir.path
                        channel.send(await asyncio.to_thread(read_parts, path, dict(held)))
                    case LogRequest():
                        node = self._find_node_of(message.worker)
                        channel.send(await self._logs.find(message, node))
                    case LogReply():
                        self._logs.take(message)
                    case DrainRequest(agent=node):
                        warning = find_warning(self._core, node, time.monotonic())
                        problem = self._pass_on(message)
                        channel.send(OrderReply(problem=problem, warning=warning))
                    case MoveRequest() | LabelRequest():
                        channel.send(OrderReply(problem=self._pass_on(message)))
                    case NodesAwaited(text=text):
                        self._nodes.awaited = text
                        channel.send(OrderReply(problem=""))
                    case ScaleRequest(servers=count):
                        problem = find_scale_problem(self._spec, count)
                        if not problem:
                            self._feed(ce.ServersAsked(count))
                        channel.send(OrderReply(problem=problem))
                    case StacksRequest():
                        self._nodes.send_all(message)
                        channel.send(OrderReply(problem=""))
                    case _:
                        assert_never(message)
        except (WireError, OSError):
            raise  # the gate logs it
        except Exception:  # noqa: BLE001 - asyncio would hide it: crash and be restarted
            crash()
        finally:
            if agent is not None and self._nodes.remove(agent, channel):
                self._record_departure()

    def _next_incarnation(self, name: str) -> int:
        """Return an incarnation above the incarnations of all known agents of this name."""
        agents = self._core.snapshot().agents
        return max((each.incarnation for each in agents if each.agent == name), default=0) + 1

    def _find_node_of(self, worker: WorkerId) -> Channel | None:
        """Return the way to the node that a worker belongs to; None if it is not connected."""
        slots = self._core.snapshot().record.slots
        name = next((slot.agent for slot in slots if slot.worker == worker), None)
        return self._nodes.find(name)

    def _pass_on(self, message: DrainRequest | MoveRequest | LabelRequest) -> str:
        """Pass an order on to its node, which then reports it; return a problem, or ""."""
        if isinstance(message, MoveRequest) and self._spec.workers.spread > 1:
            return SPREAD_STAYS
        return self._nodes.pass_on(message)

    def _record_departure(self) -> None:
        """Record that an agent left an ended job after its workers; its last report may be lost."""
        outcome = self._core.outcome
        if outcome is not None and not self._nodes:
            self._carry_out([ce.Finish(outcome)])

    def _feed(self, event: ce.CoordinatorEvent) -> None:
        now = time.monotonic()
        self._carry_out(self._black_box.handle(event, now))
        is_over = self._finished.is_set()
        self._timer.set(None if is_over else self._core.deadline())

    def _tick(self) -> None:
        try:
            self._feed(Tick())
        except Exception:  # noqa: BLE001 - asyncio would hide it: crash and be restarted
            crash()

    def _carry_out(self, effects: Sequence[ce.CoordinatorEffect]) -> None:
        """Carry out effects in order; effects after a Persist wait until that is durable.

        Events are handled in the meantime.
        """
        self._pipe.push(effects)
        try:
            # Everything that is acknowledged below had arrived before this look at the clock.
            self._check()
        except Deposed as error:
            leave(error)
        while self._saving is None and (effect := self._pipe.pop()) is not None:
            match effect:
                case ce.Persist(record):
                    self._saving = asyncio.ensure_future(self._save(record))
                case ce.SendDirective(directive):
                    channel = self._nodes.find(directive.agent)
                    if channel is not None:
                        channel.send(directive)
                case ce.Announce():
                    self.say(effect.kind, effect.text, effect)
                case ce.Finish(outcome):
                    self._outcome = outcome
                    self._finished.set()
                case _:
                    assert_never(effect)

    async def _save(self, record: JobRecord) -> None:
        try:
            await self._journal.save(record)
            self._saving = None
            self._carry_out([])
        except HoldfastError as error:  # without a journal no decision may be made
            leave(error)
        except Exception:  # noqa: BLE001 - asyncio would hide it: crash and be restarted
            crash()

    def _note_address(self, message: Address, channel: Channel) -> None:
        view = self._core.view
        if view is None or message.view != view.number:
            return
        is_new, book = self._addresses.take(view, message)
        if book is not None:
            if is_new:
                self._nodes.send_all(book)
            else:
                channel.send(book)

    def say(self, kind: str, text: str, announced: ce.Announce | None = None) -> None:
        """Write one line of the job's event log, for people and for events.jsonl."""
        found = announced or ce.Announce(kind, text)
        term = self._core.snapshot().record.term if announced is None else 0
        self._events.write(
            LoggedEvent(
                time=time.time(),
                kind=kind,
                text=text,
                worker=found.worker,
                view=found.view,
                step=found.step,
                node=found.node,
                id=found.id or self._events.next_own_id(term),
                causes=found.causes,
                cost=None if found.cost is None else dataclasses.asdict(found.cost),
                members=found.members,
                again=found.again,
            )
        )


def find_warning(core: machine.CoordinatorMachine | GroupMachine, node: AgentId, now: float) -> str:
    """Return a warning for people about a node that is asked to leave; empty: there is none."""
    return core.foresee_loss(node, now) if isinstance(core, machine.CoordinatorMachine) else ""


# ---------------------------------------------------------------- ending


def leave(error: HoldfastError) -> NoReturn:
    """End this process at once, in one sentence; unsent messages are never sent."""
    print_line(error)
    flush_outlets()
    os._exit(DEPOSED if isinstance(error, WorldError) else 1)


def crash() -> NoReturn:
    """End this process with the traceback of a bug, to be started again."""
    traceback.print_exc()
    flush_outlets()
    os._exit(CRASHED)
