"""Simulates the data plane between workers: groups, their messages, and the loss of messages.

Per view, connections are reliable and keep order while both ends live and neither has aborted. When
an end closes, the seed decides whether messages under way arrive, and whether the other end notices
it. This module only carries messages; the step machines decide which are sent, and when.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from holdfast.engine.core.ground.events import EventNoted, GroupBroken, LinkLost, Row
from holdfast.engine.core.ground.vote import Tally, Wish, count_votes
from holdfast.engine.core.step.balance import BalancePolicy
from holdfast.engine.core.step.step_policy import Counting
from holdfast.engine.core.types import WorkerId
from holdfast.engine.core.views import View
from holdfast.lab.sim.arithmetic import Key
from holdfast.lab.sim.groups import Group, Shapes, TurnOf, What
from holdfast.lab.sim.seams import Actor
from holdfast.lab.sim.turns import Turns, TurnWorld, handle_turn

T = TypeVar("T")
CROWD = 64  # with more members, only the first TELLERS ends are sent to all
TELLERS = 3  # ends of a larger group that are sent to its peers


class SharedCounting(Counting):
    """Counts the votes of a large group once for all its members."""

    def __init__(self, view: View, balance: BalancePolicy | None) -> None:
        super().__init__(view, balance)
        self._counted: tuple[Sequence[Row], Tally] | None = None
        self._observed: Tally | None = None

    def count(self, rows: Sequence[Row]) -> Tally:
        """Count the votes that end a step."""
        if self._counted is None or self._counted[0] is not rows:
            self._counted = rows, super().count(rows)
        return self._counted[1]

    def observe(self, tally: Tally, leads: bool) -> list[EventNoted]:
        """Learn from the times in the votes, once."""
        if tally is not self._observed:
            self._observed = tally
            super().observe(tally, leads=False)
        return []


class SharedResults:
    """Computes the results of a gather once for all members of a view, which are often many."""

    def __init__(self) -> None:
        # The counter of the newest large group.
        self._crowd: dict[int, SharedCounting] = {}
        self._ordered: tuple[object, tuple[Any, ...]] = (None, ())
        self._summed: tuple[object, Any] = (None, None)
        self._held: tuple[object, dict[WorkerId, int]] = (None, {})
        self._announced: tuple[Sequence[Row], Tally] | None = None

    def counting_of(self, view: View, balance: BalancePolicy | None) -> Counting:
        """Return the counter of a view's votes: a member's own, or a large group's shared one."""
        if len(view.members) <= CROWD:
            return Counting(view, balance)
        if view.number not in self._crowd:
            self._crowd = {view.number: SharedCounting(view, balance)}
        return self._crowd[view.number]

    def bodies_in_order(self, group: Group, bodies: dict[Key, Any]) -> tuple[Any, ...]:
        """Return the messages of all members, by rank."""
        if bodies is not self._ordered[0]:
            self._ordered = (bodies, tuple(bodies[key] for key in group.keys))
        return self._ordered[1]

    def combine(
        self, group: Group, bodies: dict[Key, Any], fold: Callable[[Group, dict[Key, Any]], T]
    ) -> T:
        """Combine the contributions of the members."""
        if bodies is not self._summed[0]:
            self._summed = (bodies, fold(group, bodies))
        found: T = self._summed[1]
        return found

    def held_prints(self, group: Group, prints: dict[Key, Any]) -> dict[WorkerId, int]:
        """Return the fingerprints of the members that hold the state already."""
        if prints is not self._held[0]:
            view = group.view
            without = set(view.joiners) - {lag.worker for lag in view.catching_up}
            found = {WorkerId(key[0]): hash(prints[key]) for key in group.keys}
            self._held = (prints, {w: found[w] for w in found if w not in without})
        return self._held[1]

    def announces(self, votes: Sequence[Row], *, can_save: bool) -> bool:
        """Return whether these votes announce that the view ends at the next boundary.

        `can_save`: the state there can be saved, because it lies within a loop.
        """
        if self._announced is None or votes is not self._announced[0]:
            self._announced = (votes, count_votes(votes))
        tally = self._announced[1]
        return tally.pending or (tally.save is Wish.END_SAVE and can_save)


class DataNetwork:
    """Connections between workers, and the place where the members of a view meet."""

    def __init__(self, world: TurnWorld) -> None:
        self.shapes = Shapes()
        self.results = SharedResults()
        self.turns = Turns(world, self.send)
        self._closed: Counter[int] = Counter()  # ends of large groups, by view
        self._world = world
        self._arrived: dict[int, list[Actor]] = {}
        self._last: dict[tuple[int, Key, Key], float] = {}
        self._cut_links: dict[tuple[int, Key, Key], bool] = {}
        self._apart: dict[tuple[str, str], bool] = {}

    def install(self, process: Actor, view: View) -> None:
        """Begin to build the group of `view`, and give up if other members stay away."""
        world = self._world
        group = process.tie.group = Group(self.shapes.of(view))
        here = self._arrived.setdefault(group.number, [])
        here.append(process)
        process.post(world.options.link_s, self._report_unreachable, process, view.number)
        process.post(
            world.options.build_timeout_s, self._handle_build_timeout, process, view.number
        )
        if len(here) < len(group.keys):
            return
        if any(not p.alive or not p.open_group(group.number) for p in here):
            return
        if self._apart and any(self.is_apart(a, b) for a in here for b in here):
            return
        for p in here:
            p.post(
                world.rng.uniform(0.2, 1.0) * world.options.build_s,
                p.handle_connection,
                group.number,
            )

    # ------------------------------------------------------------ messages

    def tell_all(self, process: Actor, group: Group, what: What, body: object) -> None:
        """Send a message to all members and the sender; each one's `receive` takes it."""
        group.heard.setdefault(what, {})[process.key] = body
        for key in group.keys:
            if key != process.key:
                self.send(process, group, key, what, body)

    def send(
        self,
        sender: Actor,
        group: Group,
        key: Key,
        what: What | TurnOf,
        body: object,
        extra_s: float = 0.0,
    ) -> None:
        """Send something to one member; messages of turns may overtake each other."""
        world = self._world
        receiver = world.processes.get(key)
        if receiver is None:
            return
        link = (group.number, sender.key, key)
        at = world.now + extra_s + world.delay(world.options.data_s)
        if len(what) == 2:
            at = self._last[link] = max(at, self._last.get(link, 0.0))
        world.call_later(at - world.now, self._deliver, link, sender, receiver, what, body)

    def _deliver(
        self,
        link: tuple[int, Key, Key],
        sender: Actor,
        receiver: Actor,
        what: What | TurnOf,
        body: object,
    ) -> None:
        if sender.tie.cut_through >= link[0] or self._cut_links or self._apart:
            if sender.tie.cut_through >= link[0] or link in self._cut_links:
                return
            if self.is_apart(sender, receiver):
                # Order is kept: no later message may overtake the loss.
                self._cut_links[link] = True
                return
        handle = handle_turn if len(what) == 3 else handle_message
        receiver.deliver(handle, (receiver, link[0], what, sender.key, body))

    # ------------------------------------------------------------ ends and cuts

    def members(self, group: Group) -> list[Actor]:
        """Return the members that have begun to build this group."""
        return self._arrived[group.number]

    def close(self, process: Actor, group: Group, reason: str) -> None:
        """Close one end; the seed decides which messages are lost and which peers notice."""
        if not group.open:
            return
        group.open = False
        world, options = self._world, self._world.options
        if world.rng.random() < options.cut_in_flight:
            process.tie.cut_through = max(process.tie.cut_through, group.number)
        if len(group.keys) > CROWD:
            self._closed[group.number] += 1
            if self._closed[group.number] > TELLERS:
                return
        for peer in self._arrived.get(group.number, ()):
            if peer is process or not peer.alive or world.rng.random() < options.unheard_break:
                continue
            delay_s = world.delay(options.data_s) * world.rng.choice((1, 1, 20))
            peer.post(delay_s, handle_break, peer, group.number, process.worker, reason)

    def cut_link(self, a: Actor, b: Actor, number: int) -> None:
        """Break a connection between two live workers; at least one of them notices."""
        rng = self._world.rng
        self._cut_links[(number, a.key, b.key)] = self._cut_links[(number, b.key, a.key)] = True
        told = rng.choice(((a,), (b,), (a, b)))
        for process in told:
            peer = b if process is a else a
            soon_s = rng.uniform(0.0, 0.5)
            process.post(soon_s, handle_break, process, number, peer.worker, "link broke")

    def silence(self, a: Actor, b: Actor, number: int) -> None:
        """Drop all messages between two workers; in time the kernel reports it, to one or both.

        A link that is healed in time may go unnoticed, if no message was sent on it.
        """
        world = self._world
        self._cut_links[(number, a.key, b.key)] = self._cut_links[(number, b.key, a.key)] = True
        told = world.rng.choice(((a,), (b,), (a, b)))
        for process in told:
            peer = b if process is a else a
            delay_s = world.rng.uniform(1.0, 1.5) * world.options.link_s
            process.post(delay_s, handle_lost_link, process, number, peer.worker)

    def part(self, a: str, b: str) -> None:
        """Cut two nodes' data networks from each other; groups across them break."""
        self._apart[(a, b)] = self._apart[(b, a)] = True
        live = self._world.live_processes()
        for p in live:
            for q in live:
                ours, theirs = p.tie.group, q.tie.group
                if (p.agent, q.agent) != (a, b) or ours is None or theirs is None:
                    continue
                if ours.number == theirs.number and ours.open and theirs.open:
                    self.silence(p, q, ours.number)

    def join(self, a: str, b: str) -> None:
        """Join two nodes' data networks again."""
        self._apart.pop((a, b), None)
        self._apart.pop((b, a), None)

    def are_apart(self, a: str, b: str) -> bool:
        """Return whether two nodes' data networks are cut from each other."""
        return (a, b) in self._apart

    def _report_unreachable(self, process: Actor, number: int) -> None:
        """Report the unreachable members to one whose group takes long to build."""
        group = process.open_group(number)
        if group is None or process.tie.is_connected or not self._apart:
            return
        here = self._arrived.get(group.number, [])
        lost = tuple(p.worker for p in here if p.alive and self.is_apart(process, p))
        if lost:
            process.feed(LinkLost(group.view.number, lost))

    def _handle_build_timeout(self, process: Actor, number: int) -> None:
        group = process.open_group(number)
        if group is not None and not process.tie.is_connected:
            process.feed(GroupBroken(group.view.number, "the group could not be built in time"))

    def ask_awaited(self, asker: Actor, group: Group, rank: int, step: int) -> int:
        """Return the rank that a member waits for; its own rank if the member does not answer."""
        peer = self._world.processes.get(group.keys[rank])
        if peer is None or not (peer.alive and peer.is_running and peer.open_group(group.number)):
            return rank
        if self.is_apart(asker, peer) or (group.number, asker.key, peer.key) in self._cut_links:
            return rank
        return peer.exchanges.awaited_rank(step)

    def is_apart(self, a: Actor, b: Actor) -> bool:
        """Return whether the network between the nodes of two processes is cut."""
        return (a.agent, b.agent) in self._apart


def handle_lost_link(process: Actor, number: int, peer: WorkerId) -> None:
    """Report to a process that the kernel has given up a connection."""
    group = process.open_group(number)
    if group is not None:
        process.feed(LinkLost(group.view.number, (peer,)))


def handle_break(process: Actor, number: int, peer: WorkerId, reason: str) -> None:
    """Report to a process that its connection to `peer` has ended."""
    group = process.open_group(number)
    if group is not None:
        process.feed(GroupBroken(group.view.number, reason, peer))


def handle_message(process: Actor, number: int, what: What, sender: Key, body: object) -> None:
    """Give a message to its receiver."""
    group = process.open_group(number)
    if group is not None:
        group.heard.setdefault(what, {})[sender] = body
        process.receive(what)
