"""Plays a cluster and a job around FleetMachines, with faults from a seed, and checks the truth.

What really runs is known here, so the invariants that engine/core/fleet/fleet.py states are checked
against it and not against what the machine believes. Time is a number that the loop sets.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.engine.core.fleet import fleet_events as fe
from holdfast.engine.core.fleet.fleet import FleetMachine
from holdfast.engine.core.fleet.placements import (
    FleetPolicy,
    Holding,
    NodeSeen,
    Notice,
    Placement,
    PlacementId,
)
from holdfast.engine.core.types import Tick

PREFIX = "hf-job-"
IN_USE_S = 60.0  # within this time a host is in use that is there, admitted and needed
FAULTS_S, WHOLE_S, LEFT_S = 400.0, 800.0, 200.0  # faults end, the job ends, time after that
LEASE_S, BOOT_S, DRAINED_S, DOWN_S = 3.0, 5.0, 4.0, 40.0
POLICY = FleetPolicy(prefix=PREFIX, nodes=4, nodes_max=5, join_s=30.0, avoid_s=120.0, lost_s=5.0)


class Violated(AssertionError):
    """Names the invariant that the truth contradicts."""


@dataclass(slots=True)
class Thing:
    """Records what a manager really made: a placement, and the agent that runs there."""

    id: PlacementId
    handle: str
    host: str
    born: float
    avoid: tuple[str, ...] = ()  # hosts on which its request must not run
    alive: bool = True  # its processes run
    listed: Holding = Holding.RUNNING
    doomed: bool = False  # its agent never comes up
    heard_at: float = float("inf")
    members: int = 0
    draining: str = ""
    died_at: float = float("inf")


@dataclass(slots=True)
class Faults:
    """Chooses which misfortunes a run has: probabilities, or mean seconds between two."""

    lost_answers: float = 0.0
    refusals: float = 0.0
    away_every_s: float = 0.0
    restart_every_s: float = 0.0
    kill_every_s: float = 0.0
    notice_every_s: float = 0.0
    disown_every_s: float = 0.0
    late_listings_s: float = 0.0  # at most
    repeats: float = 0.0
    bad_hosts: int = 0
    copies: float = 0.0  # share of placements that a manager makes twice
    reboot_every_s: float = 0.0
    away_at_start_s: float = 0.0
    queues: bool = False  # without a free host a request is accepted, and waits
    spare_hosts: int = 8


def draw_faults(rng: random.Random) -> Faults:
    """Draw which faults a seed has; each about every second time."""

    def some(value: float) -> float:
        return value if rng.random() < 0.5 else 0.0

    found = Faults(
        lost_answers=some(0.3),
        refusals=some(0.2),
        away_every_s=some(100.0),
        restart_every_s=some(120.0),
        kill_every_s=some(60.0),
        notice_every_s=some(120.0),
        disown_every_s=some(120.0),
        late_listings_s=some(12.0),
        repeats=some(0.2),
        bad_hosts=rng.choice((0, 0, 1, 3)),
        copies=some(0.1),
        reboot_every_s=some(90.0),
        away_at_start_s=some(50.0),
        queues=rng.random() < 0.5,
    )
    if rng.random() < 0.4:  # the usual cluster of one job has a fixed size
        found.spare_hosts = found.bad_hosts = 0
    if found.disown_every_s:
        found.copies = 0.0  # a copy that its manager denies is out of reach
    return found


@dataclass(slots=True)
class FleetWorld:
    """Runs one seed; `run` raises Violated, or the errors of the machine's own checks."""

    seed: int
    rng: random.Random
    faults: Faults
    machine: FleetMachine
    now: float = 0.0
    things: list[Thing] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)
    notices: dict[str, Notice] = field(default_factory=dict)
    down_until: dict[str, float] = field(default_factory=dict)  # by host
    unused_since: dict[str, float] = field(default_factory=dict)  # by host that could be used
    away_until: float = 0.0
    over: bool = False
    finished: bool = False
    requests: dict[PlacementId, int] = field(default_factory=dict)
    in_flight: dict[PlacementId, int] = field(default_factory=dict)
    released: dict[str, float] = field(default_factory=dict)  # handle -> first asked for
    letting_go: set[str] = field(default_factory=set)  # handles; the manager has heard of it
    told: dict[PlacementId, NodeSeen] = field(default_factory=dict)  # last one a machine heard
    listing: tuple[float, tuple[Placement, ...]] = (float("-inf"), ())  # the newest delivered
    drained: dict[PlacementId, float] = field(default_factory=dict)  # by this machine
    wasted: dict[str, int] = field(default_factory=dict)  # host -> agents that never came up
    warned: dict[tuple[PlacementId, Notice], float] = field(default_factory=dict)
    epoch: int = 0
    _queue: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _count: itertools.count[int] = field(default_factory=itertools.count)
    _tick: float = float("inf")

    def run(self) -> FleetWorld:
        """Play the whole life of a job."""
        self.hosts = [f"h{number}" for number in range(POLICY.nodes + self.faults.spare_hosts)]
        self.away_until = self.faults.away_at_start_s
        self._at(0.0, self._observe)
        self._at(0.0, self._hear)
        self._at(0.5, self._live)
        f = self.faults
        for every_s, strike in (
            (f.away_every_s, self._go_away),
            (f.restart_every_s, self._restart),
            (f.kill_every_s, self._kill),
            (f.notice_every_s, self._notify),
            (f.disown_every_s, self._disown),
            (f.reboot_every_s, self._reboot),
        ):
            if every_s:
                self._often(every_s, strike)
        self._at(FAULTS_S, self._heal)
        self._at(WHOLE_S - 1.0, self._check_whole)
        self._at(WHOLE_S, self._end)
        while self._queue or self._tick < float("inf"):
            if self._queue and self._queue[0][0] <= self._tick:
                self.now, _, act = heapq.heappop(self._queue)
                act()
            else:
                self.now, self._tick = max(self._tick, self.now + 0.01), float("inf")
                self._feed(Tick())
            if self.now > WHOLE_S + LEFT_S:
                break
        self._require(self.finished, "the job is over, and the machine does not finish")
        return self

    # ------------------------------------------------------------ time

    def _at(self, time: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (time, next(self._count), act))

    def _often(self, every_s: float, strike: Callable[[], None]) -> None:
        time = self.rng.expovariate(1 / every_s)
        while time < FAULTS_S:
            self._at(time, strike)
            time += self.rng.expovariate(1 / every_s)

    def _require(self, holds: object, what: str) -> None:
        if not holds:
            raise Violated(f"seed {self.seed}, at {self.now:.1f} s: {what}")

    # ------------------------------------------------------------ machine

    def _restart(self) -> None:
        self.epoch += 1
        self.machine = FleetMachine(POLICY, f"e{self.epoch}")
        self.listing, self.drained = (float("-inf"), ()), {}
        self._tick = float("inf")

    def _feed(self, event: fe.FleetEvent) -> None:
        for effect in self.machine.handle(event, self.now):
            match effect:
                case fe.Request(id_, avoid):
                    self._check_request(id_)
                    self._request(id_, avoid)
                case fe.ReleasePlacement(id_, handle, _):
                    self._check_release(id_, handle)
                    self._release(handle)
                case fe.DrainNode(id_, reason, _):
                    self._check_drain(id_)
                    self.drained.setdefault(id_, self.now)
                    self._at(self.now + 0.2, lambda i=id_, r=reason: self._drain(i, r))
                case fe.Finished():
                    self._check_finished()
                    self.finished = True
                case fe.Note():
                    pass
        self.machine.check()
        deadline = self.machine.deadline()
        self._tick = deadline if deadline is not None and not self.finished else float("inf")

    def _observe(self) -> None:
        if not self.finished:
            self._at(self.now + 2.0, self._observe)
        if self.now < self.away_until:
            return
        asked_at, epoch = self.now, self.epoch
        placements = tuple(
            Placement(
                id=t.id,
                handle=t.handle,
                holding=t.listed,
                host=t.host,
                notice=self.notices.get(t.host),
            )
            for t in self.things
            if t.listed is not Holding.ENDED or self.rng.random() < 0.3
        )
        times = 2 if self.rng.random() < self.faults.repeats else 1
        for _ in range(times):
            late_s = self.rng.uniform(0.01, 0.5)
            if self.now < FAULTS_S:
                late_s += self.rng.uniform(0, self.faults.late_listings_s)
            self._at(self.now + late_s, lambda: self._deliver(epoch, asked_at, placements))

    def _deliver(self, epoch: int, asked_at: float, placements: tuple[Placement, ...]) -> None:
        if epoch != self.epoch or self.finished:
            return
        if asked_at > self.listing[0]:
            self.listing = (asked_at, placements)
            for each in placements:
                if each.notice is not None:
                    self.warned.setdefault((each.id, each.notice), self.now)
        self._feed(fe.Observed(placements, asked_at))

    def _hear(self) -> None:
        if self.over or self.finished:
            return
        self._at(self.now + 1.5, self._hear)
        found = {}
        for t in self.things:
            if self.now >= t.heard_at:
                silent = not t.alive and self.now >= t.died_at + LEASE_S
                if t.id in found and silent:
                    continue
                members = t.members if self.now < t.died_at + LEASE_S + 1.5 else 0
                found[t.id] = NodeSeen(
                    name=t.id, silent=silent, draining=t.draining, members=members
                )
        self.told = found
        self._feed(fe.JobHeard(tuple(found.values())))

    # ------------------------------------------------------------ manager

    def _request(self, id_: PlacementId, avoid: tuple[str, ...]) -> None:
        self.requests[id_] = self.requests.get(id_, 0) + 1
        self.in_flight[id_] = self.in_flight.get(id_, 0) + 1
        late_s = self.rng.uniform(0.05, 8.0 if self.rng.random() < 0.2 else 1.0)
        epoch = self.epoch
        self._at(self.now + late_s, lambda: self._place(epoch, id_, avoid))

    def _place(self, epoch: int, id_: PlacementId, avoid: tuple[str, ...]) -> None:
        self.in_flight[id_] -= 1
        chance, problem = self.rng.random(), ""
        free = self._free_hosts(avoid)
        known = any(t.id == id_ and t.listed is not Holding.ENDED for t in self.things)
        faulty = self.now < FAULTS_S
        if self.now < self.away_until or (faulty and chance < self.faults.refusals):
            problem = "refused"
        elif not known and not free and self.faults.queues:
            self._accept(id_, "", avoid).listed = Holding.WAITING
        elif not known and not free:
            problem = "there is no room"
            refused = self._accept(id_, "", avoid)  # Slurm lists such a job as an ended job
            refused.listed, refused.alive = Holding.ENDED, False
        elif not known:
            for host in self.rng.sample(free, 2 if self._doubles() and len(free) > 1 else 1):
                self._begin(self._accept(id_, host, avoid))
        if faulty and self.rng.random() < self.faults.lost_answers:
            if self.rng.random() < 0.5:
                return  # no answer at all
            problem = "the answer was lost"
        if epoch == self.epoch and not self.finished:
            self._feed(fe.RequestAnswered(id_, problem))

    def _doubles(self) -> bool:
        return self.now < FAULTS_S and self.rng.random() < self.faults.copies

    def _free_hosts(self, avoid: tuple[str, ...] = ()) -> list[str]:
        """Return the hosts that are up, admitted and without a placement, but for some."""
        taken = {t.host for t in self.things if t.alive} | {*avoid, *self.notices}
        return [h for h in self.hosts if h not in taken and self.now >= self._down(h)]

    def _down(self, host: str) -> float:
        return self.down_until.get(host, float("-inf"))

    def _accept(self, id_: PlacementId, host: str, avoid: tuple[str, ...]) -> Thing:
        self.things.append(Thing(id_, str(next(self._count)), host, self.now, avoid))
        return self.things[-1]

    def _serve_queue(self) -> None:
        """Start requests that wait, in their order, on hosts that are free by now."""
        for thing in self.things:
            if thing.alive and not thing.host and self.now >= self.away_until:
                free = self._free_hosts(thing.avoid)
                if free:
                    thing.host, thing.listed = self.rng.choice(free), Holding.RUNNING
                    self._begin(thing)

    def _begin(self, thing: Thing) -> None:
        if int(thing.host[1:]) < self.faults.bad_hosts:
            thing.doomed = True
            self.wasted[thing.host] = self.wasted.get(thing.host, 0) + 1
            if self.rng.random() < 0.5:
                self._at(self.now + 1.0, lambda: self._die(thing, 0.1))
            return
        if self.rng.random() < 0.3:
            thing.listed = Holding.WAITING
            self._at(self.now + 2.0, lambda: self._run(thing))
        self._at(self.now + BOOT_S, lambda: self._boot(thing))

    def _run(self, thing: Thing) -> None:
        if thing.listed is Holding.WAITING:
            thing.listed = Holding.RUNNING

    def _boot(self, thing: Thing) -> None:
        if thing.alive:
            for earlier in [t for t in self.things if t.id == thing.id and t.heard_at <= self.now]:
                earlier.heard_at, earlier.members = float("inf"), 0  # the newer one fences it
                earlier.doomed = True
            thing.heard_at = self.now
            self._at(self.now + 3.0, lambda: self._act(thing))

    def _act(self, thing: Thing) -> None:
        if thing.alive and not thing.draining and not thing.doomed:
            thing.members = 1

    def _release(self, handle: str) -> None:
        self.released.setdefault(handle, self.now)
        for thing in [t for t in self.things if t.handle == handle]:
            if self.now >= self.away_until:
                self.letting_go.add(handle)
                self._at(self.now + 0.5, lambda t=thing: self._die(t, 0.1))

    def _die(self, thing: Thing, unlisted_in_s: float) -> None:
        if thing.alive:
            thing.alive, thing.died_at = False, self.now

            def unlist() -> None:
                thing.listed = Holding.ENDED

            self._at(self.now + unlisted_in_s, unlist)

    def _drain(self, id_: PlacementId, reason: str) -> None:
        for thing in self.things:
            if thing.id == id_ and thing.alive and thing.heard_at <= self.now:
                if not thing.draining:
                    thing.draining = reason
                    self._at(self.now + DRAINED_S, lambda t=thing: self._leave(t))

    def _leave(self, thing: Thing) -> None:
        thing.members = 0
        self._at(self.now + 1.0, lambda: self._die(thing, 1.0))

    def _live(self) -> None:
        """Take the hosts that notices have announced."""
        if not self.finished:
            self._at(self.now + 1.0, self._live)
        for host, notice in list(self.notices.items()):
            if notice.until is not None and self.now >= notice.until:
                for thing in [t for t in self.things if t.host == host and t.alive]:
                    self._check_left(thing, notice.until)
                    self._die(thing, 1.0)
                del self.notices[host]
        self._serve_queue()
        self._check_hosts()

    # ------------------------------------------------------------ faults

    def _go_away(self) -> None:
        self.away_until = self.now + self.rng.uniform(1.0, 60.0)

    def _kill(self) -> None:
        living = [t for t in self.things if t.alive and t.host]
        if living:
            self._die(self.rng.choice(living), self.rng.choice((0.1, DOWN_S)))

    def _reboot(self) -> None:
        """Take the host of a placement away, for a while."""
        hosts = [t.host for t in self.things if t.alive and t.host]
        if hosts:
            host = self.rng.choice(hosts)
            self.down_until[host] = self.now + self.rng.uniform(12.0, DOWN_S)
            for thing in [t for t in self.things if t.alive and t.host == host]:
                self._die(thing, 1.0)

    def _notify(self) -> None:
        hosts = [t.host for t in self.things if t.alive and t.host and t.host not in self.notices]
        if hosts:
            until = self.now + self.rng.uniform(20.0, 200.0) if self.rng.random() < 0.6 else None
            self.notices[self.rng.choice(hosts)] = Notice(reason="a new fan", until=until)

    def _disown(self) -> None:
        """Have the manager believe for a while, or for ever, that a placement has ended."""
        living = [t for t in self.things if t.alive and t.listed is Holding.RUNNING]
        if living:
            thing = self.rng.choice(living)
            thing.listed = Holding.ENDED
            if self.rng.random() < 0.7:

                def again() -> None:
                    thing.listed = Holding.RUNNING if thing.alive else Holding.ENDED

                self._at(self.now + self.rng.uniform(1.0, 20.0), again)

    def _heal(self) -> None:
        self.away_until = 0.0
        self.notices = {h: n for h, n in self.notices.items() if n.until is not None}

    def _end(self) -> None:
        self.over = True
        self._feed(fe.JobEnded())

    # ------------------------------------------------------------ the truth

    def _held(self) -> list[Thing]:
        """Return the placements that the manager holds and was not asked to end."""
        held = [t for t in self.things if t.listed is not Holding.ENDED]
        return [t for t in held if t.handle not in self.released]

    def _check_request(self, id_: PlacementId) -> None:
        self._require(not self.over, f"{id_} is requested for a job that is over")
        listed = {t.id for t in self.things if t.listed is not Holding.ENDED}
        flying = [i for i, count in self.in_flight.items() if count]
        if id_ in self.requests:
            self._require(id_ not in listed, f"{id_} is requested again, and it is there")
            self._require(id_ not in flying, f"{id_} is requested again, too early")
        mine = f"{PREFIX}e{self.epoch}-"
        seen = {p.id for p in self.listing[1] if p.holding is not Holding.ENDED}
        newer = [t for t in self._held() if t.id.startswith(mine) and t.born > self.listing[0]]
        held = {t.id for t in self._held() if t.id in seen} | {t.id for t in newer}
        coming = {i for i in flying if i.startswith(mine) and i not in listed}
        count = len({*held, *coming, id_})
        self._require(count <= POLICY.nodes_max, f"{id_} would be number {count}")
        self._require(self.told or self.listing[0] > float("-inf"), "nothing is known yet")

    def _check_release(self, id_: PlacementId, handle: str) -> None:
        thing = next((t for t in self.things if t.handle == handle), None)
        self._require(thing is not None, f"{handle} was never there")
        copies = [p for p in self.listing[1] if p.id == id_ and p.handle != handle]
        if self.over or copies or handle in self.released:
            return
        seen = self.told.get(id_)
        heard = seen is not None and not seen.silent
        working = seen is not None and seen.members > 0
        self._require(not (heard and working), f"{id_} works, and is released")
        hopeful = thing.alive and not thing.doomed and not thing.draining and not heard
        young = self.now < thing.born + POLICY.join_s
        noticed = any(p.id == id_ and p.notice is not None for p in self.listing[1])
        leaving = [name for name, seen in self.told.items() if seen.draining or seen.silent]
        listed = [p.id for p in self.listing[1] if p.holding is not Holding.ENDED]
        others = [i for i in listed if i != id_ and i not in leaving]
        waits = any(p.id == id_ and p.holding is Holding.WAITING for p in self.listing[1])
        if hopeful and young and not (noticed or waits or self.faults.disown_every_s):
            told = len(others) >= POLICY.nodes
            self._require(told, f"{id_} is coming up, is needed, and is released")

    def _check_drain(self, id_: PlacementId) -> None:
        if id_ in self.drained:
            return
        seen = self.told.get(id_)
        self._require(seen is not None, f"{id_} is drained, and nobody has heard it")
        observed = self.listing[0] > float("-inf")
        self._require(observed, f"{id_} is drained before the manager was asked")
        notice = next((p.notice for p in self.listing[1] if p.id == id_), None)
        if notice is not None and notice.until is not None:
            if self.now >= notice.until - POLICY.drain_lead_s:
                return
        leaving = [
            n.name
            for n in self.told.values()
            if n.members > 0 and n.name != id_
            if n.silent or n.draining or n.name in self.drained
        ]
        if seen is not None and seen.members > 0:
            self._require(len(leaving) < POLICY.disruptions_max, f"{id_} beside {leaving}")

    def _check_hosts(self) -> None:
        """Require that a host that is up, admitted and wanted is in use within a minute."""
        working = sum(t.members > 0 and t.alive for t in self.things)
        avoided = self.machine.snapshot().avoided
        usable = [h for h in self._free_hosts(avoided) if int(h[1:]) >= self.faults.bad_hosts]
        if working >= POLICY.nodes or self.over or self.now < FAULTS_S + DOWN_S:
            usable = []
        since = {host: self.unused_since.get(host, self.now) for host in usable}
        self.unused_since = since
        for host, at in since.items():
            self._require(self.now < at + IN_USE_S, f"{host} is free since {at:g} s, and needed")

    def _check_left(self, thing: Thing, until: float) -> None:
        """Require that a node was asked to leave if it was warned in time, and reported that."""
        warned_at = self.warned.get((thing.id, self.notices[thing.host]), float("inf"))
        seen = self.told.get(thing.id)
        steady = not (self.faults.away_every_s or self.faults.restart_every_s)
        if steady and warned_at < until - 5.0 and seen is not None and not seen.silent:
            asked = thing.draining or thing.id in self.drained
            self._require(asked, f"{thing.id} was taken unasked")

    def _check_whole(self) -> None:
        """Require the wanted number, long after the last fault."""
        there = [t for t in self.things if t.members or t.listed is not Holding.ENDED]
        alive = [t for t in there if t.alive and not t.doomed]
        working = [t for t in alive if t.members]
        self._require(
            len(working) == len(alive) == POLICY.nodes,
            f"{len(alive)} nodes, of which {len(working)} work",
        )
        held = [t for t in there if t.listed is not Holding.ENDED]
        held = [t for t in held if t.handle not in self.letting_go]
        self._require(len(held) == POLICY.nodes, f"the manager holds {[t.id for t in held]}")
        for host, count in self.wasted.items():
            lives = self.epoch + 1  # each new machine learns about the hosts again
            self._require(count <= 9 * lives, f"{host} failed {count} times and is asked again")

    def _check_finished(self) -> None:
        self._require(self.over, "it finishes before the job")
        held = [t.id for t in self.things if t.listed is not Holding.ENDED]
        self._require(not held, f"it finishes while the manager holds {held}")
        flying = [i for i, count in self.in_flight.items() if count]
        self._require(not flying, f"it finishes while {flying} may still come")


def run_fleet(seed: int, faults: Faults | None = None) -> FleetWorld:
    """Play one seed, with faults of its own unless they are given."""
    rng = random.Random(seed)
    world = FleetWorld(seed, rng, faults or draw_faults(rng), FleetMachine(POLICY, "e0"))
    return world.run()
