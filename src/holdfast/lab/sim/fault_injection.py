"""Chooses the faults of a run and their times, by the seed while the run unfolds.

Faults strike until `faults_end_s`; then all of them heal, and the remaining
processes must finish the job.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Protocol

from holdfast.engine.core.directives import Move
from holdfast.engine.core.ground.events import RoomSeen
from holdfast.engine.core.machine_errors import MachineError
from holdfast.engine.core.membership import agent as ag
from holdfast.engine.core.step.rulings import STEADY_MAX
from holdfast.engine.core.types import WorkerId
from holdfast.engine.core.worker_status import Stage
from holdfast.lab.sim.arithmetic import Key
from holdfast.lab.sim.endings import SCRIPT_FAILED
from holdfast.lab.sim.hosts import AgentHost, HostWorld
from holdfast.lab.sim.run_options import EXCHANGE_KIND, RACK_SHARE, STORE_LOST
from holdfast.lab.sim.seams import Actor
from holdfast.lab.sim.workers import Process

EXCHANGE_TIMES = 3  # how much oftener than between effects a fault strikes between turns
LATE_S, LATE_SHARE = 10.0, 0.3
#: The longest wait for a machine that leaves.
STAYS_S = 40.0


class FaultyWorld(HostWorld, Protocol):
    """Is the world that faults strike."""

    def live_processes(self) -> list[Process]: ...

    def first_process(self, key: Key) -> Process | None: ...


class Faults:
    """Injects the kinds of faults that the options of this seed allow."""

    def __init__(self, world: FaultyWorld) -> None:
        self._world = world
        self._inside_worker = False
        self._inside_coordinator = False
        self._exchanges = False
        self._journal = False
        self._kinds: tuple[str, ...] = ()
        self.active = False
        self.disturbed_until = 0.0  # as far as faults have struck until now
        self.count: dict[str, int] = {}
        self.workers = WorkerFaults(self, world)
        self._nodes = NodeFaults(self, world)

    def start(self) -> None:
        kinds = self._world.options.faults
        passive = ("lossy", "journal_lost")
        self._kinds = tuple(k for k in kinds if not k.endswith("_inside") and k not in passive)
        self._journal = "journal_lost" in kinds
        self._inside_worker = "worker_crash_inside" in kinds
        self._inside_coordinator = "coordinator_crash_inside" in kinds
        self._exchanges = EXCHANGE_KIND in kinds
        self.active = True
        self._world.call_later(self._world.options.faults_end_s, self._stop)
        self._strike_next()

    def _stop(self) -> None:
        """Heal the world: stopped processes and cut links come back by their own timers."""
        self.active = self._inside_worker = self._inside_coordinator = False

    def _strike_next(self) -> None:
        world = self._world
        if self.active and self._kinds:
            self._strike(world.rng.choice(self._kinds))
            world.call_later(
                world.rng.expovariate(1 / world.options.fault_every_s), self._strike_next
            )

    # ------------------------------------------------------------ in the middle of things

    def strikes_inside(self, process: Process) -> bool:
        """Return whether this process dies here, between two effects; if so, end it."""
        world = self._world
        if not self._inside_worker or world.rng.random() >= world.options.crash_inside:
            return False
        self.note("worker_crash_inside")
        process.end(-11, "crashed between two effects")
        # All other workers end at the same moment.
        if "all_lost" in self._kinds and world.story.events % 2:
            self._lose_all([each for each in world.live_processes() if each is not process])
        return True

    def strikes_exchange(self, process: Actor, place: str, peer: Actor | None) -> None:
        """End, freeze or cut off a process between two turns of an exchange, now and then."""
        world = self._world
        chance = EXCHANGE_TIMES * world.options.crash_inside
        if self._exchanges and self.active and world.rng.random() < chance:
            strike_between_turns(self, process, peer, place, world)

    def strikes_coordinator(self) -> bool:
        world = self._world
        if not self._inside_coordinator or world.rng.random() >= world.options.crash_inside:
            return False
        self.note("coordinator_crash_inside")
        world.coordinator.crash()
        self.heal_later(world.rng.uniform(0.1, 4.0), world.coordinator.start)
        return True

    def loses_journal(self) -> bool:
        """Return whether a coordinator that starts finds its journal damaged.

        It never does after the job has ended: no node might be left to report the end.
        """
        disk = self._world.truth.membership.disk
        if disk is not None and disk.outcome is not None:
            return False
        if not (self._journal and self.active) or self._world.rng.random() >= 0.3:
            return False
        self.note("journal_lost")
        return True

    # ------------------------------------------------------------ from outside

    def _strike(self, kind: str) -> None:
        world, rng = self._world, self._world.rng
        live = world.live_processes()
        match kind:
            case "agent_crash" | "agent_lost" | "partition" | "data_partition" | "writer_crash":
                self._nodes.strike(kind)
            case (
                "agent_freeze" | "node_freeze" | "drain" | "leave" | "move" | "notice" | "isolation"
            ):
                self._nodes.strike(kind)
            case "clock_set":
                self._nodes.strike(kind)
            case "rack_crash" | "rack_partition":
                self._nodes.strike_rack(kind)
            case "all_lost":
                self._lose_all(live)
            case "rows_lost":
                self.note(kind)
                world.truth.rows.lose()
            case "coordinator_crash":
                self.note(kind)
                world.coordinator.crash()
                self.heal_later(
                    rng.choice((0.5, 8.0)) * rng.uniform(0.1, 1.0), world.coordinator.start
                )
            case "coordinator_freeze":
                if not world.coordinator.frozen:
                    self.note(kind)
                    world.coordinator.frozen = True
                    self.heal_later(self.draw_duration_s(), world.coordinator.thaw)
            case "scale":
                self.note(kind)
                world.coordinator.scale(rng.randint(1, 4))
            case "rot":
                if world.truth.stored.saved:
                    self.note(kind)
                    step = max(world.truth.stored.saved)
                    world.truth.stored.rotten[step] = world.truth.promises.unreadable[step] = True
            case "link_break":
                self._break_link()
            case "store_silent" | "store_lost":
                if not world.store_silent:
                    self.note(kind)
                    world.store_silent = True
                    world.truth.endings.store_silent_since = world.now
                    if kind != STORE_LOST:
                        self.heal_later(self.draw_duration_s(), self._store_answers)
            case "no_room":
                self.note(kind)
                fill_disk(self, live, rng, self.draw_duration_s())
            case "machine_error":
                self.workers.fail(kind, live)
            case _:
                if live:
                    self.note(kind)
                    process = rng.choice(live)
                    if world.options.spread > 1 and rng.random() < 0.5:
                        self.workers.strike_further(kind, process)
                    else:
                        self.workers.strike(kind, process)

    def _lose_all(self, live: list[Process]) -> None:
        """End all workers at once, and perhaps some nodes with what their memory holds."""
        world, rng = self._world, self._world.rng
        self.note("all_lost")
        nodes = rng.choice((0, world.options.redundancy.parity, rng.randint(0, 3)))
        hosts = self._nodes.list_hosts()
        for host in rng.sample(hosts, min(nodes, max(len(hosts) - 1, 0))):
            host.crash()
            self.heal_later(self.draw_duration_s(), host.start)
        for process in live:
            process.end(-9, "crashed")

    def _store_answers(self) -> None:
        self._world.store_silent = False
        self._world.truth.endings.store_silent_since = None

    def _break_link(self) -> None:
        world = self._world
        live = [p for p in world.live_processes() if p.tie.group is not None and p.tie.group.open]
        a = world.rng.choice(live) if live else None
        if a is None or a.tie.group is None:
            return
        number = a.tie.group.number
        peers = [p for p in live if p is not a and p.open_group(number) is not None]
        if peers:
            self.note("link_break")
            world.data.cut_link(a, world.rng.choice(peers), number)

    # ------------------------------------------------------------ tools

    def heal_later(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        """Undo a fault, later; until then the world is disturbed."""
        self.disturbed_until = max(self.disturbed_until, self._world.now + delay_s)
        self._world.call_later(delay_s, call, *args)

    def draw_duration_s(self) -> float:
        """Draw the duration of a fault, until a second after the last fault at most."""
        rng = self._world.rng
        return min(rng.choice((0.2, 1.0, 10.0)) * rng.uniform(0.2, 2.0), self._remaining_s() + 1)

    def _remaining_s(self) -> float:
        return max(self._world.options.faults_end_s - self._world.now, 0.0)

    def note(self, kind: str) -> None:
        self.count[kind] = self.count.get(kind, 0) + 1
        self.disturbed_until = max(self.disturbed_until, self._world.now)
        self._world.story.mark(f"fault: {kind}")


class WorkerFaults:
    """Strikes processes of workers: ends, freezes, delays and spoils them."""

    def __init__(self, faults: Faults, world: FaultyWorld) -> None:
        self._faults = faults
        self._world = world
        # Workers whose machine stays wrong, and the error that it adds.
        self._lying: dict[int, int] = {}
        # The worker whose machine has errors of its own.
        self._failing: WorkerId | None = None
        # Workers that were wrong in the same way each time.
        self._steady: dict[int, None] = {}

    def strike(self, kind: str, process: Process) -> None:
        world, rng = self._world, self._world.rng
        match kind:
            case "worker_crash":
                process.end(rng.choice((-9, -11, -6)), "crashed")
            case "quit":  # something in the script calls os._exit(0)
                process.end(0)
            case "freeze":
                process.stopped = process.health.froze = True
                process.host.sampler.watch(process)
                if rng.random() < 0.7:  # else only the agent ends it
                    self._faults.heal_later(rng.uniform(0.1, 4.0), process.resume)
            case "silent":
                process.health.ailing = (
                    process.health.ailing or process.health.silenced
                )  # so often that it may count
                process.silent = process.health.silenced = True
                process.host.sampler.watch(process)
                self._faults.heal_later(rng.uniform(0.5, 6.0), process.resume)
            case "busy":
                process.health.stuck = process.health.ailing = True
                self._faults.heal_later(rng.uniform(0.5, 6.0), self._unstick, process)
            case "stuck":
                process.health.stuck = process.health.ailing = (
                    rng.random() < 0.2 or process.health.ailing
                )
                self._faults.heal_later(3 * world.options.hang_s, self._unstick, process)
            case "flip" | "liar" | "lie_once" | "poison" | "sum_wrongly":
                self._spoil(kind, process)
            case "slow":
                process.health.ailing = True
                process.health.slowness = rng.uniform(2.0, 10.0)
                self._faults.heal_later(rng.uniform(1.0, 20.0), hasten, process)

    def strike_further(self, kind: str, process: Process) -> None:
        """Strike a worker's processes on one of its further nodes."""
        rng = self._world.rng
        each = rng.choice(list(process.spread.further.values()) or [None])
        match kind:
            case _ if each is None or not each.alive:
                return
            case "worker_crash":
                each.end(-9, "crashed")
            case "quit":
                each.end(0)
            case "freeze" | "silent":
                process.health.ailing = True
                each.stopped, each.silent = kind == "freeze", kind == "silent"
                each.host.sampler.watch(each)
                self._faults.heal_later(rng.uniform(0.1, 6.0), each.resume)

    def _spoil(self, kind: str, process: Process) -> None:
        """Make the bits of a process wrong, from here on or once."""
        world, rng = self._world, self._world.rng
        if not can_be_wrong(process, world.live_processes()):
            return
        match kind:
            case "flip":
                process.spoiling.flipped = rng.randrange(max(world.options.cycle, 1))
                # A second computation gives another result.
                process.spoiling.lied_in = process.work.step
            case "liar":
                process.spoiling.lies = rng.choice((7, -1))
                if world.options.wrong_together:
                    process.spoiling.lies = draw_own_lie(process, self._steady)
                is_one_of_many = world.options.wrong_together and self._lying
                if world.options.wrong_stays and not is_one_of_many:
                    self._lying[process.worker] = process.spoiling.lies
            case "lie_once":
                process.spoiling.lies_once = True
            case "poison":
                process.spoiling.poisons_once = True
            case "sum_wrongly":
                process.spoiling.sums_wrongly = True

    def _unstick(self, process: Process) -> None:
        process.health.stuck = False

    def draw_lie_at_start(self, process: Process) -> int:
        """Return the error that a starting process adds to its results, if its machine is wrong."""
        lies = self._lying.get(process.worker, 0)
        wrong = (
            lies
            and self._faults.active
            and not any(p.spoiling.is_spoiled for p in self._world.live_processes())
        )
        return lies if wrong else 0

    def fail(self, kind: str, live: list[Process]) -> None:
        """End a process by an error of its machine's own; always of the same worker."""
        found = [process for process in live if self._failing in (None, process.worker)]
        if found and len(live) > 1:
            process = self._world.rng.choice(found)
            self._faults.note(kind)
            self._failing = process.worker
            process.end(1, SCRIPT_FAILED, error=MachineError.DISK_FULL)


class NodeFaults:
    """Strikes nodes and racks: ends, freezes, drains and cuts them off."""

    def __init__(self, faults: Faults, world: FaultyWorld) -> None:
        self._faults = faults
        self._world = world

    def strike(self, kind: str) -> None:
        world, rng = self._world, self._world.rng
        hosts = self.list_hosts()
        if not hosts:
            return
        host, duration_s = rng.choice(hosts), self._faults.draw_duration_s()
        match kind:
            case "agent_crash":
                self._faults.note(kind)
                host.crash()
                self._faults.heal_later(duration_s, host.start)
            case "agent_lost":
                if len(hosts) > 1 and rng.random() < 0.3:
                    self._faults.note(kind)
                    host.crash()
                    host.gone = True
            case "writer_crash":
                self._faults.note(kind)
                host.writer.crash()
            case "clock_set":
                self._faults.note(kind)
                host.writer.clock_ahead_s = rng.uniform(-1e4, 1e4)
            case "agent_freeze" | "node_freeze":
                if not host.frozen and host.machine is not None:
                    self._faults.note(kind)
                    self._freeze(host, whole=kind == "node_freeze")
                    self._faults.heal_later(duration_s, self._thaw, host)
            case "drain":
                self._faults.note(kind)
                host.drained = True
                host.handle(ag.Drained("asked for", rng.choice(("", "disk"))))
                self._faults.heal_later(duration_s, host.handle, ag.Drained(""))
            case "leave":  # for good; another machine comes once it has left
                self._faults.note(kind)
                host.drained = True
                host.handle(ag.Drained("it is needed elsewhere", leave=True))
                self._faults.heal_later(duration_s, start_another, self._faults, host)
            case "notice":  # a notice of this machine's end; another machine comes later
                self._faults.note(kind)
                host.drained = True
                in_s = rng.uniform(0.5, 8.0)
                world.truth.leaves.record_notice(host, in_s)
                host.handle(ag.Drained("taken away", leave=True, deadline_s=in_s))
                # Some machines are taken later than announced.
                late_s = LATE_S if in_s % 1.0 < LATE_SHARE else 0.0
                self._faults.heal_later(in_s + late_s, host.crash)
                self._faults.heal_later(
                    in_s + late_s + duration_s, start_another, self._faults, host
                )
            case "move" if host.processes:
                self._faults.note(kind)
                worker, to = rng.choice(sorted(host.processes)), rng.choice(hosts).name
                host.handle(ag.MoveAsked(Move(worker=WorkerId(worker), to=to, reason="asked for")))
            case "partition":
                self._faults.note(kind)
                self._cut(host, rng.choice(((True,), (False,), (True, False))), duration_s)
            # The node is cut off from all other nodes.
            case "isolation":
                self._faults.note(kind)
                self._cut(host, (True, False), duration_s)
                for other in hosts:
                    if other is not host:
                        world.data.part(host.name, other.name)
                        self._faults.heal_later(duration_s, world.data.join, host.name, other.name)
            case "data_partition":
                other = rng.choice(hosts)
                if other is not host:
                    self._faults.note(kind)
                    world.data.part(host.name, other.name)
                    self._faults.heal_later(duration_s, world.data.join, host.name, other.name)

    def strike_rack(self, kind: str) -> None:
        """Neighbours fail at the same moment, and come back one by one."""
        rng, hosts = self._world.rng, self.list_hosts()
        if not hosts:
            return
        size = max(len(hosts) // RACK_SHARE, rng.randint(2, 4))
        first, duration_s = rng.randrange(len(hosts)), self._faults.draw_duration_s()
        self._faults.note(kind)
        for host in hosts[first : first + size]:
            back_s = duration_s * rng.uniform(1.0, 1.5)
            if kind == "rack_crash":
                host.crash()
                self._faults.heal_later(back_s, host.start)
            else:
                self._cut(host, (True, False), back_s)

    def list_hosts(self) -> list[AgentHost]:
        hosts = sorted(self._world.hosts.items())
        return [h for _, h in hosts if not h.gone and h.started]

    def _cut(self, host: AgentHost, directions: tuple[bool, ...], duration_s: float) -> None:
        """Cut a host off from the coordinator; `directions`: True towards it, False from it."""
        network = self._world.network
        for up in directions:
            network.cut(host.name, up)
            self._faults.heal_later(duration_s, network.heal, host.name, up)

    def _freeze(self, host: AgentHost, whole: bool) -> None:
        host.frozen = True
        for process in host.processes.values() if whole else ():
            # The whole machine is frozen: no process on it notices.
            process.silent = True

    def _thaw(self, host: AgentHost) -> None:
        """Wake a frozen machine; it is not known who runs first on it."""
        processes = list(host.processes.values())
        if self._world.rng.random() < 0.5:
            host.thaw()
        for process in processes:
            process.resume()
        host.thaw()


def hasten(process: Process) -> None:
    """End the slowness of a process."""
    process.health.slowness = 1.0


def strike_between_turns(
    faults: Faults, process: Actor, peer: Actor | None, place: str, world: FaultyWorld
) -> None:
    """End or freeze a process between two turns, or cut it off from a peer of the next turn."""
    act = world.rng.choice(("kill", "freeze", "partition"))
    struck = world.first_process(process.key)
    if struck is None or (act == "partition" and peer is None):
        return
    faults.note(f"{act}_in_{place}")
    if act == "kill":
        struck.end(-9, f"killed between two turns of a {place}")
    elif act == "freeze":
        struck.stopped = struck.health.froze = True
        struck.host.sampler.watch(struck)
        if world.rng.random() < 0.7:  # else only the agent ends it
            faults.heal_later(world.rng.uniform(0.1, 4.0), struck.resume)
    elif peer is not None and peer.agent != process.agent:
        world.data.part(process.agent, peer.agent)
        duration_s = world.rng.choice((0.2, 1.0, 10.0)) * world.rng.uniform(0.2, 2.0)
        faults.heal_later(duration_s, world.data.join, process.agent, peer.agent)
    elif peer is not None and process.tie.group is not None:
        world.data.cut_link(process, peer, process.tie.group.number)


def fill_disk(faults: Faults, live: list[Process], rng: Random, duration_s: float) -> None:
    """Leave all workers, or one of them, without room for their ledgers for a while."""
    ready = [each for each in live if each.machine.snapshot().stage is Stage.READY]
    for process in ready if rng.random() < 0.5 else ready[: rng.randint(0, 1)]:
        process.post(0.0, process.feed, RoomSeen(has_room=False))
        seen = process.feed, RoomSeen(has_room=True)
        faults.heal_later(duration_s * rng.random(), process.post, 0.0, *seen)


def start_another(faults: Faults, host: AgentHost, waited_s: float = 0.0) -> None:
    """Start another machine in the place of one that leaves, once it has left.

    A machine that is needed for very long, because no other one arrives, is taken away.
    """
    if host.machine is not None and waited_s < STAYS_S:
        faults.heal_later(1.0, start_another, faults, host, waited_s + 1.0)
        return
    if host.machine is not None:
        faults.note("taken")
        host.crash()
    host.gone = False
    host.start()


def can_be_wrong(process: Process, live: Sequence[Process]) -> bool:
    """Return whether one more process may be wrong: alone, or since most members are sound."""
    if not process.world.options.wrong_together:
        return not any(each.spoiling.is_spoiled for each in live)
    view = process.exchanges.view
    if view is None:
        return False
    by_key = {each.key: each for each in live}
    members = {m.worker: by_key.get((m.worker, m.incarnation)) for m in view.members}
    proven = [each for worker, each in members.items() if worker not in view.unproven]
    return all(_are_mostly_sound(each, process) for each in (list(members.values()), proven))


def draw_own_lie(process: Process, steady: dict[int, None]) -> int:
    """Return the error of one of several wrong processes: no two agree, and few are steady."""
    view = process.exchanges.view
    if view is None or process.worker in view.unproven:
        return -1
    if len(steady) < STEADY_MAX:
        steady[process.worker] = None
    return 7 + int(process.worker) if process.worker in steady else -1


def _are_mostly_sound(members: Sequence[Process | None], one: Process) -> bool:
    """Return whether most of these members would still be sound if this process were not."""
    sound = [
        m for m in members if m is not None and m is not one and not m.spoiling.is_ill(m.work.step)
    ]
    return 2 * len(sound) > len(members)
