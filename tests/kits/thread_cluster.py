"""Runs a whole job in threads of one process: real machines, drivers, engines; transport in memory.

The test's own thread is the control plane: a coordinator and one agent, in real time. Each worker
is a thread that runs a script with a Job of its own. Workers die where the script or the transport
ends them: their connections end, and no message of theirs arrives any more.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

import torch
import torch._dynamo

from holdfast.engine.core.errors import Aborted
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.job_record import JobRecord
from holdfast.engine.core.job_spec import JobSpec
from holdfast.engine.core.membership import agent as ag
from holdfast.engine.core.membership import coordinator as co
from holdfast.engine.core.membership import coordinator_events as ce
from holdfast.engine.core.types import AgentId, Incarnation, Peer, Tick, WorkerId
from holdfast.engine.core.views import FollowOrder, View
from holdfast.engine.core.worker.machine import WorkerMachine
from holdfast.engine.core.worker_status import WorkerStatus
from holdfast.engine.train.compose import Control, step_policy
from holdfast.engine.train.exchange.seam import Message, Pending
from holdfast.engine.train.job import Job
from holdfast.engine.train.script.environment import WorkerEnvironment
from holdfast.engine.train.step.driver import Driver, Monitor
from holdfast.engine.train.step.probe import current
from holdfast.lab.contracts.memory_transport import MemoryNetwork, MemoryTransport
from joiner_gate import JoinerGate

HANG_S = 60.0
ROUNDS_TO_FAIL = 20  # rounds of the control plane; a failing process takes a while to report
LOOK_S = 0.01  # between two looks at the clock
BEAT_S = 0.2
SOON_S = 5.0  # back-offs are shorter, and quarantines longer
NODE = AgentId("node0")


class Killed(BaseException):
    """Ends the threads of a worker that died."""


class MortalTransport(MemoryTransport):
    """Lets its worker die as it starts an exchange."""

    def __init__(self, network: MemoryNetwork, address: bytes, worker: ThreadWorker) -> None:
        super().__init__(network, address)
        self.closed = False
        self._worker = worker

    def close(self) -> None:
        self.closed = True
        super().close()

    def exchange(
        self,
        sends: Sequence[Message],
        receives: Sequence[Message],
        tag: int,
        sent_us: int = 0,
    ) -> Pending:
        self._worker.cluster.at_exchange(self._worker, tag)
        return super().exchange(sends, receives, tag, sent_us)


class MortalDriver(Driver):
    """Ends its worker, where a process would end itself."""

    mortal: ThreadWorker

    def end_process(self, reason: str = "") -> None:
        self.mortal.die()


class ThreadWorker:
    """Is one worker: its driver, its script's thread, and the connection to the control plane."""

    def __init__(
        self, cluster: ThreadCluster, worker: WorkerId, incarnation: Incarnation, spec: JobSpec
    ) -> None:
        self.cluster = cluster
        self.worker = worker
        self.incarnation = incarnation
        self.alive = True
        self.exchanges = 0
        self.thread: threading.Thread | None = None  # the script's thread
        self.transports: list[MortalTransport] = []
        self._machine = WorkerMachine(worker, incarnation, step_policy(spec, 0, writes=False))
        self.driver = MortalDriver(self._machine, self, Monitor())
        self.driver.mortal = self
        environment = WorkerEnvironment(spec=spec, worker=worker, incarnation=incarnation)
        self.control = Control(
            environment=environment,
            seed=0,
            driver=self.driver,
            link=self,
            make_transport=self.transport,
        )

    @property
    def expects_change(self) -> bool:
        """Return whether it knows of the planned end of its view."""
        return self._machine._standing.is_change_pending

    def transport(self) -> MortalTransport:
        number = b"%d.%d.%d" % (self.worker, self.incarnation, len(self.transports))
        self.transports.append(MortalTransport(self.cluster.network, number, self))
        return self.transports[-1]

    def tell(self, status: WorkerStatus) -> None:
        if self.alive:
            self.cluster.later(self.cluster.tell_agent, ag.WorkerSaid(status))

    def has_unread(self) -> bool:
        return False

    def publish(self, view: int, address: bytes) -> None:
        if self.alive:
            self.cluster.later(self.cluster.note_address, view, Peer(self.worker), address)

    def die(self) -> None:
        """End it as SIGKILL does; a thread of its own that calls this must raise Killed."""
        if self.alive:
            self.cluster.ended.add(self.worker)
            self.driver.fail(Killed())
            self._end(-9, "killed")

    def run(self, script: Callable[[Job, ThreadWorker], None]) -> None:
        self.thread = threading.current_thread()
        torch.set_num_threads(1)  # a number of the calling thread; sums in kernels depend on it
        try:
            script(Job(self.control), self)
        except Killed:
            self.die()
        except BaseException as error:  # noqa: BLE001 - as the bootstrap tells it
            self.cluster.errors.append(error)
            self.cluster.pass_rounds(ROUNDS_TO_FAIL)
            self._end(1, repr(error))
        else:
            self._end(0)

    def _end(self, code: int, detail: str = "") -> None:
        """End its process: earlier messages arrive before the end, or never."""
        if self.alive:
            self.alive = False
            for transport in self.transports:
                transport.close()
            end = ag.ProcessExited(self.worker, self.incarnation, code, detail, not code)
            self.cluster.later(self.cluster.tell_agent, end)


class ThreadCluster:
    """Runs a job as the module describes. `kill_at`: by worker, the exchange at which it dies.

    `damage_at`: a worker, and the number of its exchange in which a bit of a message is flipped.
    `waits`: the other workers wait for a worker that died, so that it joins however late it comes
    back.
    """

    def __init__(
        self,
        spec: JobSpec,
        script: Callable[[Job, ThreadWorker], None],
        kill_at: dict[WorkerId, int] | None = None,
        damage_at: tuple[int, int] = (-1, -1),
        *,
        waits: bool = False,
    ) -> None:
        self.network = MemoryNetwork()
        self.workers: dict[WorkerId, ThreadWorker] = {}  # the newest of each number
        self.errors: list[BaseException] = []
        self.ended: set[WorkerId] = set()  # workers that ended before the end of their script
        self.damaging: list[MortalTransport] = []  # transports ordered to flip a bit
        self.views: list[str] = []  # the coordinator's text on each
        self.events: list[tuple[str, str]] = []  # the job's events: kind and text
        self._spec = spec
        self._script = script
        self._kill_at = dict(kill_at or {})
        self._damage_at = damage_at
        self._probe = JoinerGate(self) if waits else current.probe
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._addresses: dict[int, dict[Peer, bytes]] = {}
        self._outcome: str | None = None
        self._rounds = 0
        self._round = threading.Condition()
        self._record: JobRecord | None = None  # the newest record that a coordinator has kept
        self._away = False  # whether the coordinator is away
        self.term = 0  # the coordinator's term
        self._restart_coordinator()
        spares = spec.spares(spec.workers.nproc)
        slots = spec.workers.nproc + spares
        policy = ag.AgentPolicy(heartbeat_s=BEAT_S, lease=spec.lease(), spares=spares)
        self._agent = ag.AgentMachine(NODE, Incarnation(1), slots, policy, 1)

    def run(self) -> str:
        """Run the job; returns its outcome, empty for success."""
        before, current.probe = current.probe, self._probe
        try:
            return self._run()
        finally:
            current.probe = before

    @property
    def view(self) -> View | None:
        """Return the newest view."""
        return self._coordinator.view

    @property
    def feed(self) -> FollowOrder | None:
        """Return the order to feed workers that holds now."""
        return self._coordinator._job.followers.order

    def comes_back(self, worker: WorkerId) -> bool:
        """Return whether a worker that ended is soon started again; one in quarantine is not."""
        slot = self._coordinator._roster.slots.get(worker)
        if slot is None:
            return False
        return slot.respawn_at is None or slot.respawn_at < time.monotonic() + SOON_S

    def _run(self) -> str:
        deadline = time.monotonic() + HANG_S
        beat_at = 0.0
        self.tell_coordinator(Tick())
        self.tell_agent(ag.CoordinatorReached())
        while self._outcome is None:
            now = time.monotonic()
            with self._round:
                self._rounds += 1
                self._round.notify_all()
            assert now < deadline, f"hangs: {[w.driver.status() for w in self.workers.values()]}"
            live = [w for w in self.workers.values() if w.alive]
            if self._away and not any(w.worker in self._coordinator.view.workers for w in live):
                self._away = False
                self._restart_coordinator()
                self.tell_agent(ag.CoordinatorReached())
            for worker in live:
                worker.driver.tick()
                if now >= beat_at:
                    self.tell_agent(ag.WorkerSaid(worker.driver.status()))
            beat_at = now + BEAT_S if now >= beat_at else beat_at
            for machine, tell in (
                (self._coordinator, self.tell_coordinator),
                (self._agent, self.tell_agent),
            ):
                if (due := machine.deadline()) is not None and due <= now:
                    tell(Tick())
            try:
                self._calls.get(timeout=LOOK_S)()
            except queue.Empty:
                continue
        return self._outcome

    def told(self, kind: str) -> list[str]:
        """Return the texts of the job's events of one kind."""
        return [text for each, text in self.events if each == kind]

    def later(self, action: Callable[..., None], *arguments: object) -> None:
        """Run something in the control plane's thread."""
        self._calls.put(lambda: action(*arguments))

    def lose_coordinator(self) -> None:
        """Take the coordinator away until all members of its view have ended; for `on_view`."""
        self._away = True

    def on_view(self, text: str) -> None:
        """Do no work; a test may act here when the node has received a view."""

    def pass_rounds(self, count: int) -> None:
        """Wait for some rounds of the control plane."""
        with self._round:
            until = self._rounds + count
            self._round.wait_for(lambda: self._rounds >= until, HANG_S)

    def await_round(self, is_ready: Callable[[], bool]) -> None:
        """Wait until something holds; look again in each round of the control plane."""
        with self._round:
            assert self._round.wait_for(is_ready, HANG_S), "a worker waits for another in vain"

    def at_exchange(self, worker: ThreadWorker, tag: int) -> None:
        """Count an exchange; the worker dies if its time has come."""
        worker.exchanges += 1
        if worker.incarnation == 1 and (worker.worker, worker.exchanges) == self._damage_at:
            self.damaging.append(worker.transports[-1])
            self.damaging[0].damages_next = True
        if worker.incarnation == 1 and self._kill_at.get(worker.worker) == worker.exchanges:
            worker.die()
        if not worker.alive and threading.current_thread().name == "holdfast-backup":
            raise Aborted("its worker has ended")  # the end of this thread is not reported
        if not worker.alive:
            raise Killed

    # ------------------------------------------------------------ the control plane

    def _restart_coordinator(self) -> None:
        self.term += 1
        now = time.monotonic()
        machine = co.CoordinatorMachine(self._spec.policy(), self.term, self._record, now, 0)
        self._coordinator = machine

    def tell_coordinator(self, event: ce.CoordinatorEvent) -> None:
        if self._away:
            return  # the message is lost
        for effect in self._coordinator.handle(event, time.monotonic()):
            match effect:
                case ce.Persist(record):
                    self._record = record
                case ce.SendDirective(directive):
                    self.later(self.tell_agent, ag.DirectiveArrived(directive))
                case ce.Announce(kind, text):
                    self.events.append((kind, text))
                    if kind == "view":
                        self.views.append(text)
                        self.later(self.on_view, text)
                case ce.Finish(outcome):
                    self._outcome = outcome

    def tell_agent(self, event: ag.AgentEvent) -> None:
        for effect in self._agent.handle(event, time.monotonic()):
            match effect:
                case ag.SendReport(report):
                    self.later(self.tell_coordinator, ce.ReportArrived(report))
                case ag.SendWorker(worker, incarnation, directive):
                    process = self.workers[worker]
                    if process.incarnation == incarnation and process.alive:
                        process.driver.post(ev.Directed(directive))
                case ag.Spawn(worker, incarnation):
                    self._spawn(worker, incarnation)
                case ag.Kill(worker, incarnation):
                    if self.workers[worker].incarnation == incarnation:
                        self.workers[worker].die()
                case _:
                    pass  # no worker is paused here, and the agent's end is the job's

    def _spawn(self, worker: WorkerId, incarnation: Incarnation) -> None:
        process = self.workers[worker] = ThreadWorker(self, worker, incarnation, self._spec)
        threading.Thread(target=process.run, args=(self._script,), daemon=True).start()
        self.later(self.tell_agent, ag.Spawned(worker, incarnation, 1000 + worker))

    def note_address(self, number: int, peer: Peer, address: bytes) -> None:
        view = self._coordinator.view
        if view is None or view.number != number:
            return
        book = self._addresses.setdefault(number, {})
        book[peer] = address
        if all(each in book for each in view.peers):
            for member in view.members:
                process = self.workers[member.worker]
                if process.alive:
                    process.driver.learn_addresses(number, book)
