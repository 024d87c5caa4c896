"""The data plane of one simulated worker: groups, contributions, votes and state transfer.

Per view, connections are reliable and keep order while both ends live and neither has aborted. What
was under way when an end closes arrives or is lost, and the other end hears of it or never does, by
the seed. What is sent and when mirrors the real driver.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.core import tree
from holdfast.core.step.audit import Court, Ruling
from holdfast.core.step.speculation import worth_copying
from holdfast.core.step.speeds import Speeds
from holdfast.core.step.worker import (
    CaughtUp,
    GroupBroken,
    LinkLost,
    Loading,
    Reduced,
    Synced,
    Unreadable,
    Voted,
)
from holdfast.core.types import View, WorkerId
from holdfast.sim import audits
from holdfast.sim.checkers import Key, add
from holdfast.sim.crowd import CROWD, Meetings, Shape, Shapes

if TYPE_CHECKING:
    from holdfast.sim.workers import Process
    from holdfast.sim.world import World

Tokens = tuple[tuple[int, int], ...]  # vrank and token
Digest = tuple[int | None, int | None]  # of the common state, and of what a flip has made of it
Ballot = tuple[bool, int]  # whether a change is planned, and microseconds of computing


@dataclass(frozen=True, slots=True)
class Part:
    """What a member adds to a sum, and the fingerprint of (a part of) its state."""

    tokens: Tokens
    fingerprint: int | None


class Group:
    """One worker's end of the process group of a view."""

    def __init__(self, shape: Shape, speeds: Speeds) -> None:
        self.shape = shape
        self.view = shape.view
        self.number = shape.view.number
        self.keys = shape.keys
        self.open = True
        self.ready = False
        self.synced = False
        self.sent_turn = -1
        self.attempt = 0  # at the step
        self.voted_step = -1
        self.done_step = -1
        self.parts: dict[int, dict[Key, Part]] = {}
        self.court = Court()
        self.heard: dict[int, dict[Key, dict[int, int]]] = {}  # of audits, by turn
        self.rulings: dict[int, Ruling] = {}
        self.doubts: dict[int, dict[Key, tuple[int, int]]] = {}
        self.wrong: set[WorkerId] = set()
        self.diverged = False  # it is their states that are
        self.doubtful = -1  # the turn in which somebody was found to be wrong
        self.votes: dict[int, dict[Key, Ballot]] = {}
        self.speeds = speeds
        self.missed: dict[int, dict[Key, Share]] = {}  # of a member that catches up
        self.states: dict[Key, tuple[int, int, int | None]] = {}
        self.digests: dict[int, Digest] = {}

    def tell(self, process: Process, kind: str, turn: int, body: object) -> None:
        tell_all(process, self, kind, turn, body)


@dataclass(frozen=True, slots=True, order=True)
class Share:
    """What member `rank` of `size` keeps of a step's sum."""

    rank: int
    size: int
    total: int


NO_SHARE = Share(-1, 0, 0)


@dataclass(frozen=True, slots=True)
class Counted:
    """What follows from the votes of a step."""

    pending: bool
    owners: tuple[WorkerId, ...]


class DataNetwork:
    """Connections between workers, and the place where the members of a view meet."""

    def __init__(self, world: World) -> None:
        self.shapes = Shapes()
        self.meetings = Meetings(world)
        self._world = world
        self._arrived: dict[int, list[Process]] = {}
        self._last: dict[tuple[int, Key, Key], float] = {}
        self._cut_links: dict[tuple[int, Key, Key], bool] = {}
        self._apart: dict[tuple[str, str], bool] = {}
        self._summed: tuple[object, int] = (None, 0)
        self._crowd: dict[int, Speeds] = {}  # of the newest large group, whose members share them
        self._counted: dict[tuple[int, int], Counted] = {}  # its steps
        self._named: tuple[object, dict[int, Digest]] = (None, {})

    def arrive(self, process: Process, group: Group) -> None:
        """A member builds the group: it is ready once all are here and reach each other."""
        here = self._arrived.setdefault(group.number, [])
        here.append(process)
        if len(here) < len(group.keys):
            return
        world = self._world
        if any(not p.alive or not p.open_group(group.number) for p in here):
            return
        if self._apart and any(self._is_apart(a, b) for a in here for b in here):
            return
        build_s = world.options.build_s
        for p in here:
            p.post(world.rng.uniform(0.2, 1.0) * build_s, group_ready, p, group.number)

    def send(
        self,
        sender: Process,
        group: Group,
        key: Key,
        kind: str,
        step: int,
        body: object,
        extra_s: float = 0.0,
    ) -> None:
        world = self._world
        receiver = world.processes.get(key)
        if receiver is None:
            return
        link = (group.number, sender.key, key)
        at = world.now + extra_s + world.delay(world.options.data_s)
        at = max(at, self._last.get(link, 0.0))
        self._last[link] = at
        world.at(at - world.now, self._deliver, link, sender, receiver, kind, step, body)

    def _deliver(
        self,
        link: tuple[int, Key, Key],
        sender: Process,
        receiver: Process,
        kind: str,
        step: int,
        body: object,
    ) -> None:
        if sender.cut_through >= link[0] or self._cut_links or self._apart:
            if sender.cut_through >= link[0] or link in self._cut_links:
                return
            if self._is_apart(sender, receiver):
                self._cut_links[link] = True  # order is kept: nothing later may overtake the loss
                return
        receiver.deliver(received, (receiver, link[0], kind, step, sender.key, body))

    def members(self, group: Group) -> list[Process]:
        """Who has come to build this group."""
        return self._arrived[group.number]

    def close(self, process: Process, group: Group, reason: str) -> None:
        """One end closes: what it had under way and what its peers notice is up to the seed."""
        if not group.open:
            return
        group.open = False
        world, options = self._world, self._world.options
        if world.rng.random() < options.cut_in_flight:
            process.cut_through = max(process.cut_through, group.number)
        if len(group.keys) > CROWD and not self.meetings.may_tell(group.number):
            return
        for peer in self._arrived.get(group.number, ()):
            if peer is process or not peer.alive or world.rng.random() < options.unheard_break:
                continue
            delay_s = world.delay(options.data_s) * world.rng.choice((1, 1, 20))
            peer.post(delay_s, broken, peer, group.number, reason)

    def cut_link(self, a: Process, b: Process, number: int) -> None:
        """A connection breaks between two live workers; at least one of them is told."""
        rng = self._world.rng
        self._cut_links[(number, a.key, b.key)] = self._cut_links[(number, b.key, a.key)] = True
        told = rng.choice(((a,), (b,), (a, b)))
        for process in told:
            process.post(rng.uniform(0.0, 0.5), broken, process, number, "link broke")

    def silence(self, a: Process, b: Process, number: int) -> None:
        """Nothing passes between two workers any more; in time the kernel says so, to one or both.

        What was never sent on a link that is healed again in time goes unnoticed, as it may.
        """
        world = self._world
        self._cut_links[(number, a.key, b.key)] = self._cut_links[(number, b.key, a.key)] = True
        told = world.rng.choice(((a,), (b,), (a, b)))
        for process in told:
            peer = b if process is a else a
            delay_s = world.rng.uniform(1.0, 1.5) * world.options.link_s
            process.post(delay_s, link_lost, process, number, peer.worker)

    def part(self, a: str, b: str) -> None:
        """Two nodes' data networks lose each other; groups across them break."""
        self._apart[(a, b)] = self._apart[(b, a)] = True
        live = self._world.live()
        for p in live:
            for q in live:
                if p.agent == a and q.agent == b and p.group is not None and q.group is not None:
                    if p.group.number == q.group.number and p.group.open and q.group.open:
                        self.silence(p, q, p.group.number)

    def join(self, a: str, b: str) -> None:
        self._apart.pop((a, b), None)
        self._apart.pop((b, a), None)

    def total(self, process: Process, group: Group, step: int, parts: dict[Key, Part]) -> int:
        """The sum of a step in the canonical order; what all share is summed and checked once."""
        if parts is not self._summed[0]:
            flat = [(key, v, token) for key in group.keys for v, token in parts[key].tokens]
            self._world.truth.reduced(process, group.view, step, flat)
            values = {(v, 1): token for _, v, token in flat}
            total: int = tree.fold(values, self._world.options.vranks, add)
            self._summed = (parts, total)
        return self._summed[1]

    def speeds(self, view: View) -> Speeds:
        """A member's own, or that of all in a large group."""
        if view.number in self._crowd:
            return self._crowd[view.number]
        made = Speeds(view, self._world.options.balance)
        if len(view.members) > CROWD:
            self._crowd, self._counted = {view.number: made}, {}
        return made

    def count(self, group: Group, step: int, votes: dict[Key, Ballot]) -> Counted:
        shared = self._counted.get((group.number, step))
        if shared is not None:
            return shared
        pending = any(pending for pending, _ in votes.values())
        group.speeds.observe([votes[key][1] for key in group.keys], leads=False)
        found = Counted(pending, group.speeds.owners)
        if group.number in self._crowd:
            self._counted[group.number, step] = found
        return found

    def by_worker(self, bodies: dict[Key, Digest]) -> dict[int, Digest]:
        if bodies is not self._named[0]:
            self._named = (bodies, {key[0]: body for key, body in bodies.items()})
        return self._named[1]

    def unreached(self, process: Process, group: Group) -> tuple[WorkerId, ...]:
        here = self._arrived.get(group.number, [])
        return tuple(p.worker for p in here if p.alive and self._is_apart(process, p))

    def _is_apart(self, a: Process, b: Process) -> bool:
        return (a.agent, b.agent) in self._apart


# ---------------------------------------------------------------- one worker's side


def install(process: Process, view: View) -> None:
    """Begin to build the group of `view`, and give up if the others do not come."""
    world = process.world
    group = process.group = Group(world.data.shapes.of(view), world.data.speeds(view))
    world.truth.hosted(view.number, view.resume_step, view.owners)
    if not view.catching_up:
        process.kept.clear()
    process.plan_audits()
    world.truth.withdrawn(view)
    world.data.arrive(process, group)
    process.post(world.options.link_s, unbuilt, process, view.number)
    process.post(world.options.build_timeout_s, build_timeout, process, view.number)


def unbuilt(process: Process, number: int) -> None:
    """The group takes long: whom does the network not reach?"""
    group = process.open_group(number)
    if group is None or group.ready:
        return
    lost = process.world.data.unreached(process, group)
    if lost:
        process.feed(LinkLost(group.view.number, lost))


def link_lost(process: Process, number: int, peer: WorkerId) -> None:
    group = process.open_group(number)
    if group is not None:
        process.feed(LinkLost(group.view.number, (peer,)))


def build_timeout(process: Process, number: int) -> None:
    group = process.open_group(number)
    if group is not None and not group.ready:
        process.feed(GroupBroken(group.view.number, "the group could not be built in time"))


def broken(process: Process, number: int, reason: str) -> None:
    group = process.open_group(number)
    if group is not None:
        process.feed(GroupBroken(group.view.number, reason))


def group_ready(process: Process, number: int) -> None:
    group = process.open_group(number)
    if group is None:
        return
    group.ready = True
    view, data, shape = group.view, process.world.data, group.shape
    if not shape.joiners:
        group.synced = True
        audits.enter(process, view)
        process.feed(Synced(view.number))
    elif view.late_worker(process.worker) is not None:
        catch_up(process, group)
    elif process.worker not in shape.joiners:
        send_missed(process, group)
        process.world.truth.donated(process, view)
        for key in group.keys:
            if WorkerId(key[0]) in shape.joiners and view.late_worker(WorkerId(key[0])) is None:
                body = (process.state, process.step, process.flipped)
                data.send(process, group, key, "state", 0, body, process.world.options.load_s)
        verify(process, number)
    elif shape.donors:
        process.feed(Loading())
        process.state = None
        loaded(process, group)  # what donors that were ready earlier have sent may all be here
    elif view.resume_step:
        restore(process, group)
    else:
        verify(process, number)
    advance(process)


def send_missed(process: Process, group: Group) -> None:
    """The steps that a returning member has missed: from each donor a share, in order."""
    view = group.view
    for lag in view.catching_up:
        for step in range(lag.committed, view.resume_step):
            share = process.kept.get(step, NO_SHARE)
            key = (int(lag.worker), int(lag.incarnation))
            process.world.data.send(process, group, key, "missed", step, share)


def catch_up(process: Process, group: Group) -> None:
    """Apply the next missed step, once all shares of it are here and the script waits for it."""
    step, view = process.step, group.view
    shares = group.missed.get(step, {})
    if step >= view.resume_step:
        if process.state is not None and process.key[0] not in group.digests:
            verify(process, view.number)
    elif process.in_step and process.local_done and len(shares) == len(view.donors):
        del group.missed[step]
        process.world.truth.put_together(process, step, [shares[key] for key in sorted(shares)])
        process.total, process.total_step = min(shares.values()).total, step
        process.feed(CaughtUp(view.number, step))


def loaded(process: Process, group: Group) -> None:
    if group.ready and len(group.states) == group.shape.donors:
        process.post(
            process.world.delay(process.world.options.load_s), store_state, process, group.number
        )


def restore(process: Process, group: Group) -> None:
    """Begin from a checkpoint: each reads its share, and one of them finds what is wrong."""
    view, truth = group.view, process.world.truth
    readable = [step for step in truth.saved if step not in truth.rotten]
    reader = group.keys[view.number % len(group.keys)]
    if process.key == reader and view.resume_step not in readable:
        older = [step for step in readable if step < view.resume_step]
        process.feed(Unreadable(view.number, view.resume_step, max(older, default=0)))
        return
    process.feed(Loading())
    process.state = None
    delay_s = process.world.delay(process.world.options.load_s)
    process.post(delay_s, restored, process, group.number)


def restored(process: Process, number: int) -> None:
    group = process.open_group(number)
    if group is None:
        return
    process.step = group.view.resume_step
    process.state, process.flipped = process.world.truth.restored(process.step)
    verify(process, number)


def store_state(process: Process, number: int) -> None:
    group = process.open_group(number)
    if group is None:
        return
    _, (process.state, process.step, process.flipped) = min(group.states.items())
    verify(process, number)


def verify(process: Process, number: int) -> None:
    """Tell everyone the digest of this worker's state."""
    group = process.open_group(number)
    if group is None:
        return
    digest = process.state, process.flipped
    tell_all(process, group, "digest", 0, digest)
    group.digests[process.key[0]] = digest
    advance(process)


def late_tasks(process: Process) -> list[int]:
    """What it may copy: tasks of members whose parts of the sum are not here."""
    group = process.group
    if group is None or not group.open or not group.synced or len(group.keys) > CROWD:
        return []
    here = group.parts.get(audits.turn_of(process, group), {})
    late = [WorkerId(key[0]) for key in group.keys if key not in here and key != process.key]
    owners, workers = process.machine.owners, group.view.workers
    tasks = worth_copying(owners, workers, late, process.worker) if late else ()
    return [vrank for vrank in tasks if vrank not in process.copies]


def received(
    process: Process, number: int, kind: str, step: int, sender: Key, body: object
) -> None:
    group = process.open_group(number)
    if group is None:
        return
    if kind == "part":
        group.parts.setdefault(step, {})[sender] = body  # type: ignore[assignment]
    elif kind == "audit":
        group.heard.setdefault(step, {})[sender] = body  # type: ignore[assignment]
    elif kind == "doubt":
        group.doubts.setdefault(step, {})[sender] = body  # type: ignore[assignment]
        audits.conclude(process, group, step)
    elif kind == "vote":
        group.votes.setdefault(step, {})[sender] = body  # type: ignore[assignment]
    elif kind == "missed":
        group.missed.setdefault(step, {})[sender] = body  # type: ignore[assignment]
    elif kind == "state":
        group.states[sender] = body  # type: ignore[assignment]
        loaded(process, group)
    else:
        group.digests[sender[0]] = body  # type: ignore[assignment]
    advance(process)


def advance(process: Process) -> None:
    """Do whatever of the present step's exchange can be done now."""
    group = process.group
    if group is None or not group.open or not group.ready:
        return
    view = group.view
    if not group.synced:
        if view.late_worker(process.worker) is not None:
            catch_up(process, group)
        if len(group.digests) < len(group.keys) or audits.turn_of(process, group) in group.rulings:
            return
        if not audits.alike(process, group):
            return
        group.synced = True
        audits.enter(process, view)
        process.world.truth.synced(process, view, group.digests)
        process.feed(Synced(view.number))
        return
    step, turn = process.step, audits.turn_of(process, group)
    if process.local_done and group.sent_turn < turn:
        group.sent_turn = turn
        tokens = tuple((v, process.tokens[v]) for v in process.machine.snapshot().hosted)
        mine = Part(tokens, audits.fingerprint(process))
        group.parts.setdefault(turn, {})[process.key] = mine
        tell_all(process, group, "part", turn, mine)
    if group.sent_turn == turn and group.voted_step < step:
        if len(group.parts[turn]) == len(group.keys) and audits.settled(process, group, turn):
            reduce(process, group, step, group.parts.pop(turn))
    if group.voted_step == step and group.done_step < step:
        votes = group.votes.get(step, {})
        if len(votes) == len(group.keys):
            group.done_step = step
            group.attempt, group.court = 0, Court()
            counted = process.world.data.count(group, step, votes)
            if counted.pending:
                process.last_step_of = group.number
            process.world.truth.hosted(view.number, step + 1, counted.owners)
            if view.suspended:
                rank, size = view.workers.index(process.worker), len(view.members)
                process.kept[step] = Share(rank, size, process.total or 0)
            process.feed(Voted(view.number, step, counted.pending, counted.owners))


def reduce(process: Process, group: Group, step: int, parts: dict[Key, Part]) -> None:
    """Sum what came, in the canonical order; then vote."""
    process.total = process.world.data.total(process, group, step, parts)
    process.total_step = step
    group.voted_step = step
    audits.summed(process, step)
    process.feed(Reduced(group.view.number, step))
    if not group.open:
        return
    vote = process.machine.pending, process.compute_us
    group.votes.setdefault(step, {})[process.key] = vote
    tell_all(process, group, "vote", step, vote)


def tell_all(process: Process, group: Group, kind: str, step: int, body: object) -> None:
    data = process.world.data
    if len(group.keys) > CROWD:
        what = (int(group.number), kind, step)
        data.meetings.give(process, data.members(group), what, body, gathered)
        return
    for key in group.keys:
        if key != process.key:
            data.send(process, group, key, kind, step, body)


def gathered(process: Process, what: tuple[int, str, int], bodies: dict[Key, Any]) -> None:
    """An all-gather of a large group is done."""
    number, kind, step = what
    group = process.open_group(number)
    if group is None:
        return
    if kind == "part":
        group.parts[step] = bodies
    elif kind == "vote":
        group.votes[step] = bodies
    else:
        group.digests = process.world.data.by_worker(bodies)
    advance(process)
