"""Runs the fleet of a job next to its coordinator: asks a cluster manager for the job's nodes.

    python -m holdfast.engine.fleet.fleet_process RUN_DIR PARENT_PID

It may be killed at any time: another one learns the present nodes from the manager and the job. Its
launcher orders it to end once the job is over. The fleet machine decides; the driver here asks
manager and job in turn, in one event loop, and reports failures to the machine, which may try
again. The driver itself repeats no request.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.engine.core.domains import Domains
from holdfast.engine.core.errors import (
    HoldfastError,
    UserError,
    WorldError,
    assert_never,
    first_line,
)
from holdfast.engine.core.fleet import fleet_events as fe
from holdfast.engine.core.fleet.fleet import FleetMachine
from holdfast.engine.core.fleet.placements import Holding, NodeSeen, Placement, PlacementId
from holdfast.engine.core.types import AgentId, Tick
from holdfast.engine.fleet.cluster_manager import (
    ClusterManager,
    FleetPlan,
    PlacementOrder,
    StoppedByOperator,
    read_plan,
)
from holdfast.engine.host.lifetime import Orders, die_with_parent
from holdfast.engine.net.standard_streams import RareLines, print_line
from holdfast.engine.net.tls import client_of
from holdfast.engine.plugins import find_manager, load
from holdfast.engine.runtime.contact import Contact, contact_by, exchange
from holdfast.engine.runtime.event_loops import DeadlineTimer
from holdfast.engine.runtime.job_status import JobStatus, parse_status
from holdfast.engine.runtime.outlet import free_output
from holdfast.engine.runtime.rundir import RunDir, is_full
from holdfast.engine.wire.messages import (
    DrainRequest,
    LabelRequest,
    NodesAwaited,
    OrderReply,
    StatusReply,
    StatusRequest,
    StopRequest,
)

PATIENCE_S = 10.0  # a placement may wait this long without a word
AGAIN_S = 60.0  # between two reports whose reasons differ
RAN_MAX = 10_000  # placements whose end is looked for


class WaitingReport:
    """Makes one line once placements have waited for some time, and again as the reason changes.

    The reasons are the manager's own (`Placement.why`), each printed once, if it gives any. It also
    makes a line for a placement that ran and has ended for a reason.

    `manager`: its name for people.
    """

    def __init__(self, manager: str) -> None:
        self._manager = manager
        self._since: float | None = None  # when the oldest placement that waits was first listed
        self._quiet_until = float("-inf")
        self._last = ""
        self._ran: dict[PlacementId, None] = {}  # the newest placements whose end has no reason yet
        self.current = ""  # the line as of the last listing, whether it is due again or not

    def read(self, placements: Sequence[Placement], now: float) -> Iterator[str]:
        """Take in a listing, and yield the lines that are due."""
        yield from self._read_ended(placements)
        waiting = [each for each in placements if each.holding is Holding.WAITING]
        if not waiting:
            self._since, self._last, self._quiet_until = None, "", float("-inf")
            self.current = ""
            return
        self._since = now if self._since is None else self._since
        reasons = dict.fromkeys(each.why for each in waiting if each.why)
        given = sum(each.holding is Holding.RUNNING for each in placements)
        count = f"{self._manager} gives {given} of {given + len(waiting)} nodes"
        line = "; ".join((count, *reasons))
        if now < self._since + PATIENCE_S:
            return
        self.current = line
        if now >= self._quiet_until and line != self._last:
            self._last, self._quiet_until = line, now + AGAIN_S
            yield line

    def _read_ended(self, placements: Sequence[Placement]) -> Iterator[str]:
        """Yield a line for each placement that has ended, once the manager gives a reason.

        A manager may know the reason later than the end.
        """
        for each in placements:
            if each.holding is Holding.ENDED and each.why and each.id in self._ran:
                del self._ran[each.id]
                yield f"{each.id} has ended on {each.host}: {each.why}"
            elif each.holding is Holding.RUNNING:
                self._ran[each.id] = None
        for old in list(self._ran)[:-RAN_MAX]:
            del self._ran[old]


FULL = "its coordinator does not answer, and the file system of {path} is full: free space there"
FAILURES = (WorldError, UserError, OSError, asyncio.TimeoutError)
TICK_S_MIN = 0.01
DEADLINE_S_MIN = 0.001  # an overdue drain is still one at once
LOOK_S = 1.0  # between two looks at the progress of orders
# A second order to stop ends the job without its last checkpoint, for which it waits 25 s at most.
STOP_AGAIN_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPace:
    """Sets how often manager and job are asked, and how long an answer may take. In seconds."""

    observe_s: float = 2.0
    hear_s: float = 0.5
    answer_s: float = 30.0
    #: The time after the job's end for the manager to end all placements.
    release_s: float = 60.0
    #: The most requests under way at the same time.
    requests_max: int = 16


class JobLink:
    """Asks the coordinator of a job, wherever it is at the moment."""

    def __init__(self, run_dir: RunDir, contact: Contact, secret: bytes) -> None:
        self._run_dir = run_dir
        self._contact = contact
        self._secret = secret
        self._awaited = ""  # as the coordinator has it

    def is_over(self) -> bool:
        """Return whether the job has ended, by its run directory."""
        return self._run_dir.outcome() is not None

    async def nodes(self) -> tuple[NodeSeen, ...]:
        """Return the nodes that the coordinator knows. Raises what FAILURES lists."""
        try:
            reply = await exchange(self._contact, self._secret, StatusRequest(), StatusReply)
        except ConnectionError:
            if is_full(self._run_dir.path):
                raise WorldError(FULL.format(path=self._run_dir.path)) from None
            raise
        if reply is None:
            raise WorldError("the coordinator has closed the connection")
        status = parse_status(reply.text)
        self._awaited = status.awaited
        return read_nodes(status)

    async def note_awaited(self, text: str) -> None:
        """Show in the job's status which nodes are awaited, unless it does. Ask first."""
        if text != self._awaited:
            await exchange(self._contact, self._secret, NodesAwaited(text=text), OrderReply)

    async def drain(self, name: str, reason: str, deadline_s: float = float("inf")) -> None:
        """Order that a node is drained within a time. A node without a connection is no error."""
        order = DrainRequest(agent=AgentId(name), reason=reason, deadline_s=deadline_s)
        await exchange(self._contact, self._secret, order, OrderReply)

    async def label(self, name: str, domains: Domains) -> None:
        """Send the job a node's failure domains, if it is connected just now."""
        order = LabelRequest(agent=AgentId(name), domains=domains)
        await exchange(self._contact, self._secret, order, OrderReply)

    async def stop(self, reason: str) -> None:
        """End the job: after a last checkpoint, or at once if it was asked before."""
        remedy = f"`holdfast resume {self._run_dir.path}` continues it"
        channel = await self._contact.connect(self._secret)
        channel.send(StopRequest(reason=f"{reason}: {remedy}"))
        await channel.finish()


def read_nodes(status: JobStatus) -> tuple[NodeSeen, ...]:
    """Return the nodes of a status as the fleet machine takes them."""
    return tuple(
        NodeSeen(
            name=node.id,
            silent=node.silent,
            draining=node.draining,
            members=node.members,
            needed=node.needed,
            domains=node.domains,
        )
        for node in status.agents
    )


class FleetDriver:
    """Runs a machine against one manager and one job, until the job is over and all is released."""

    def __init__(
        self,
        machine: FleetMachine,
        manager: ClusterManager,
        job: JobLink,
        order: Callable[[PlacementId, Sequence[str]], PlacementOrder],
        say: Callable[[str], None],
        pace: FleetPace,
        name: str = "the manager",
    ) -> None:
        """Prepare to run. `name`: of the manager, for people."""
        self._machine = machine
        self._manager = manager
        self._job = job
        self._order = order
        self._say = say
        self._pace = pace
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(pace.requests_max)
        self._requesting: set[PlacementId] = set()
        self._finished = asyncio.Event()
        self._ended = False
        self._timer = DeadlineTimer(lambda: self._feed(Tick()), TICK_S_MIN)
        self._problems = RareLines(say)  # by the questions that have failed
        self._waiting = WaitingReport(name)
        self._stop_at = float("-inf")  # the job is not asked to stop before

    async def run(self) -> None:
        """Keep the job's nodes, until the job is over. A cancellation leaves them as they are.

        After the end it waits for the manager for a while, and names placements that may be left.
        """
        self._spawn(self._watch_manager())
        self._spawn(self._watch_job())
        try:
            while not self._finished.is_set():
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._finished.wait(), LOOK_S)
                for task in [t for t in self._tasks if t.done()]:
                    self._tasks.discard(task)
                    task.result()  # a bug of ours ends the driver
        finally:
            self._finished.set()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._timer.cancel()

    def end(self) -> None:
        """Take the job as over."""
        if self._ended:
            return
        self._ended = True
        asyncio.get_running_loop().call_later(self._pace.release_s, self._give_up)
        self._feed(fe.JobEnded())

    def _give_up(self) -> None:
        if not self._finished.is_set():
            kept = ", ".join(node.id for node in self._machine.snapshot().nodes)
            self._say(f"the job is over, but the manager may still hold {kept or 'something'}")
            self._finished.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.add(asyncio.ensure_future(work))

    # ------------------------------------------------------------ asking

    async def _watch_manager(self) -> None:
        # asyncio loses a cancellation that comes as an answer does (until Python 3.12).
        while not self._finished.is_set():
            asked_at = time.monotonic()
            found = await self._try("the manager", self._observe())
            if found is not None:
                self._feed(fe.Observed(tuple(found), asked_at))
                for line in self._waiting.read(found, time.monotonic()):
                    self._say(line)
            await asyncio.sleep(self._pace.observe_s)

    async def _observe(self) -> Sequence[Placement] | None:
        """List the placements; None if an operator has ended them, with which the job ends."""
        try:
            return await self._manager.observe()
        except StoppedByOperator as error:
            if self._ended:
                return ()
            now = time.monotonic()
            if now >= self._stop_at:
                await self._job.stop(str(error))
                self._stop_at = now + STOP_AGAIN_S
                self._say(f"{error}: the job ends")
            return None

    async def _watch_job(self) -> None:
        while not self._finished.is_set():
            if self._job.is_over():
                self.end()
                return
            found = await self._try("the job", self._job.nodes())
            if found is not None:
                self._feed(fe.JobHeard(found))
                shown = self._job.note_awaited(self._waiting.current)
                await self._try("the job, to show what it waits for,", shown)
            await asyncio.sleep(self._pace.hear_s)

    async def _try(self, whom: str, question: Coroutine[Any, Any, Any]) -> Any:
        """Return the answer, or None when it fails; a problem is printed once."""
        try:
            found = await asyncio.wait_for(question, self._pace.answer_s)
        except FAILURES as error:
            self._problems.put(f"{whom} cannot be asked ({first_line(error)})", whom)
            return None
        self._problems.forget(whom)
        return found

    # ------------------------------------------------------------ acting

    def _feed(self, event: fe.FleetEvent) -> None:
        now = time.monotonic()
        for effect in self._machine.handle(event, now):
            self._carry_out(effect)
        self._timer.set(None if self._finished.is_set() else self._machine.deadline())

    def _carry_out(self, effect: fe.FleetEffect) -> None:
        match effect:
            case fe.Request(id_, avoid):
                self._spawn(self._request(self._order(id_, avoid)))
            case fe.ReleasePlacement(id_, handle, _):
                self._spawn(self._release(id_, handle))
            case fe.DrainNode(id_, reason, until):
                self._spawn(self._drain(id_, reason, until))
            case fe.LabelNode(id_, domains):
                told = self._job.label(id_, domains)
                self._spawn(self._try(f"the job, to label {id_},", told))
            case fe.Note(text):
                self._say(text)
            case fe.Finished():
                self._finished.set()
            case _:
                assert_never(effect)

    async def _request(self, order: PlacementOrder) -> None:
        if order.id in self._requesting:
            return  # it still waits for its turn: that answer counts
        self._requesting.add(order.id)
        problem = ""
        try:
            async with self._slots:
                await asyncio.wait_for(self._manager.request(order), self._pace.answer_s)
        except FAILURES as error:
            problem = first_line(error)
        self._requesting.discard(order.id)
        self._feed(fe.RequestAnswered(order.id, problem))

    async def _release(self, id_: PlacementId, handle: str) -> None:
        await self._try(f"the manager, to end {id_},", self._manager.release(id_, handle))

    async def _drain(self, id_: PlacementId, reason: str, until: float | None) -> None:
        """Order the job to leave a node; `until`: when it is taken, by our clock."""
        left_s = float("inf") if until is None else max(until - time.monotonic(), DEADLINE_S_MIN)
        await self._try(f"the job, to drain {id_},", self._job.drain(id_, reason, left_s))


DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def main(argv: list[str]) -> int:
    run_dir, parent = RunDir(Path(argv[0])), int(argv[1])
    die_with_parent(parent)
    orders = Orders.receive()
    free_output("")
    try:
        asyncio.run(keep(run_dir, read_plan(run_dir), orders))
    except HoldfastError as error:
        print_line(error)
        return 1
    return 0


async def keep(run_dir: RunDir, plan: FleetPlan, orders: Orders) -> None:
    """Keep the nodes of the job in a run directory until the launcher orders the end."""
    spec = run_dir.spec()
    manager = manager_of(plan, run_dir)
    contact = contact_by(plan.join, client_of(Path(plan.tls) if plan.tls else None), spec.job)
    driver = FleetDriver(
        FleetMachine(plan.policy(spec), new_epoch()),
        manager,
        JobLink(run_dir, contact, run_dir.secret()),
        plan.order,
        print_line,
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
    module = load("manager", plan.manager, find_manager(plan.manager).adapter)
    found: ClusterManager = module.open_manager(plan, run_dir.spec())
    return found


def new_epoch() -> str:
    """Return a name that no earlier fleet of the job has had: the time, in milliseconds."""
    left, found = time.time_ns() // 1_000_000, ""
    while left:
        left, digit = divmod(left, 36)
        found = DIGITS[digit] + found
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
