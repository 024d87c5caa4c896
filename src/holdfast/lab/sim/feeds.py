"""Simulates how the members of a view feed a worker that is not one of them, while they train.

It carries messages as separate sockets would: the messages of one order arrive in sequence, or not
at all once either process has died or ended the order. The follower's machine decides when a state
is loaded and when a step is applied.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.ground.events import SourceKind
from holdfast.engine.core.replica.feeding import count_feeders
from holdfast.engine.core.types import NO_VIEW, WorkerId
from holdfast.engine.core.views import FollowOrder
from holdfast.lab.sim.arithmetic import MISSING_STATE_OFFSET, Key, Share
from holdfast.lab.sim.checkers import Truth
from holdfast.lab.sim.data_network import DataNetwork
from holdfast.lab.sim.groups import Group
from holdfast.lab.sim.seams import Actor, Clock
from holdfast.lab.sim.simulated_mover import SimulatedEnd
from holdfast.lab.sim.wrong_bits import Violation

BEHIND = 0.1  # how much rarer than failing copies it is that a follower is too slow for a step


@dataclass(frozen=True, slots=True)
class StagedCopy:
    """Describes the copy made by member `rank` of `size`: the whole state; it sends a share."""

    step: int
    rank: int
    size: int
    state: int | None
    flipped: int | None


@dataclass(frozen=True, slots=True)
class FedMessage:
    """A message to a follower is a copy, a piece of a step, or the end of an order.

    `broken`: the connection has ended before its time. `compared`: the members have compared their
    copies, and they are the same.
    """

    number: int
    content: StagedCopy | tuple[int, Share] | None
    compared: bool = False
    broken: bool = False


class FeedWorld(Clock, Protocol):
    """Is the world around a process's feeds."""

    @property
    def data(self) -> DataNetwork: ...

    @property
    def truth(self) -> Truth: ...

    @property
    def processes(self) -> Mapping[Key, Actor]: ...


class Feeds(SimulatedEnd):
    """Carries out the decisions of one process's machine on feeding and being fed."""

    def __init__(self, process: Actor, world: FeedWorld) -> None:
        self._process = process
        self._world = world
        self._order: FollowOrder | None = None  # by which it feeds
        self._place = (0, 1)  # its rank in the view of that, and the members
        self._full: set[tuple[int, Key]] = set()  # by order: followers that take too much memory
        self._free_at: dict[Key, float] = {}  # by follower: arrival time of the last message
        self._number = 0  # number of the order that it follows; 0: none
        self._heard: dict[int, dict[int, StagedCopy]] = {}  # by order and rank
        self._steps: dict[int, dict[int, list[Share]]] = {}  # by order and step
        # By order and step: the number of members whose copies are known to be equal.
        self._compared: dict[int, dict[int, int]] = {}
        self._broken: dict[int, bool] = {}
        self._copied: StagedCopy | None = None  # what this process has copied last
        # It was fed a wrong state, which other members could have detected.
        self.is_wrong = False

    # ------------------------------------------------------------ feeding

    def take_copy(self, order: ef.CopyState, began: float) -> ev.StateCopied:
        """Send this process's copy of the state."""
        assert order.order is not None, "followers are fed by an order"
        number, problem = order.order.number, self._stage(order)
        return ev.StateCopied(order.sink, order.step, problem=problem, order=number)

    def _stage(self, effect: ef.CopyState) -> str:
        """Send the copy; returns why it cannot be sent, or ""."""
        process, world = self._process, self._world
        if world.rng.random() < world.options.feed_fails:
            world.truth.count["not staged"] += 1
            return "there is no memory for a copy"
        view = effect.view
        self._order, rank = effect.order, view.rank(process.worker)
        self._place = (rank, count_feeders(len(view.members)))
        flipped = process.spoiling.flipped
        world.truth.steps.check_staging(process, effect.step)
        copy = StagedCopy(effect.step, *self._place, process.work.state, flipped)
        self._copied = copy
        if _is_feeder(*self._place):
            self._send(copy, world.options.load_s)
        return ""

    def copied_fingerprint(self, step: int) -> int:
        """Return a fingerprint of the state that was copied one step before; 0: none was."""
        copy = self._copied
        if copy is None or copy.step != step - 1:
            return 0
        return hash((copy.state, -1 if copy.flipped is None else copy.flipped)) or 1

    def keep(self, order: ef.KeepStep, group: Group | None) -> None:
        """Send this process's piece of a sum that is committed."""
        if not _is_feeder(*self._place):
            return
        share = Share(*self._place, self._process.work.total or 0)
        self._send((order.step, share), compared=order.compared)
        feed, world = self._order, self._world
        chance = world.options.feed_fails * BEHIND
        for key in self._followers(feed) if chance else ():
            if feed is not None and world.rng.random() < chance:
                delay_s = world.delay(world.options.channel_s)
                self._process.post(delay_s, self._run_out_of_memory, feed.number, key)

    def _run_out_of_memory(self, number: int, key: Key) -> None:
        """Report that no further step for a follower fits into the memory."""
        self._full.add((number, key))
        self._process.feed(ev.FollowerBehind(number, WorkerId(key[0]), 1 << 20))

    def forget(self, order: ef.Forget) -> None:
        """Send no more to one follower, which is too slow, or to any."""
        if order.follower is None:
            self._end(finish=order.finish)
        else:
            self._drop(order.follower)

    def _drop(self, follower: WorkerId) -> None:
        order = self._order
        if order is None:
            return
        self._world.truth.count["followers dropped"] += 1
        slow = tuple(each for each in order.followers if each.worker == follower)
        self._break(dataclasses.replace(order, followers=slow))
        left = tuple(each for each in order.followers if each.worker != follower)
        self._order = dataclasses.replace(order, followers=left)

    def _end(self, *, finish: bool) -> None:
        """Send no more. Without `finish`, messages under way may be lost."""
        if self._order is not None and not finish:
            self._break(self._order)
        self._order = None

    def break_off(self) -> None:
        """Break off whatever this process sends."""
        self._end(finish=False)

    def _send(
        self,
        content: StagedCopy | tuple[int, Share],
        extra_s: float = 0.0,
        *,
        compared: bool = False,
    ) -> None:
        order, world = self._order, self._world
        for key in self._followers(order):
            at = world.now + world.delay(world.options.data_s) + extra_s
            at = self._free_at[key] = max(at, self._free_at.get(key, 0.0))
            assert order is not None
            if (order.number, key) in self._full:
                raise Violation(f"worker {self._process.key} feeds {key}: no memory is left for it")
            message = FedMessage(order.number, content, compared)
            world.call_later(at - world.now, self._arrive, key, message)

    def _break(self, order: FollowOrder) -> None:
        world = self._world
        lost = world.rng.random() < world.options.cut_in_flight
        for key in self._followers(order):
            soon = world.now + world.delay(world.options.data_s)
            at = soon if lost else max(soon, self._free_at.get(key, 0.0))
            message = FedMessage(order.number, None, broken=True)
            world.call_later(at - world.now, self._arrive, key, message)

    def _followers(self, order: FollowOrder | None) -> list[Key]:
        return [(int(f.worker), int(f.incarnation)) for f in order.followers] if order else []

    def _arrive(self, key: Key, message: FedMessage) -> None:
        receiver = self._world.processes.get(key)
        if receiver is None or self._world.data.is_apart(self._process, receiver):
            return
        receiver.deliver(_deliver_message, (receiver, message))

    # ------------------------------------------------------------ being fed

    def follow(self, order: FollowOrder | None) -> None:
        """Take in the messages of this order, those sent before included; None: of none."""
        self._number = 0 if order is None else order.number
        if order is not None:
            self._look()

    def receive(self, message: FedMessage) -> None:
        """Take in a message."""
        match message.content:
            case None:
                self._broken[message.number] = True
            case (step, share):
                of_step = self._steps.setdefault(message.number, {})
                of_step.setdefault(step, []).append(share)
                said = self._compared.setdefault(message.number, {})
                said[step] = said.get(step, 0) + message.compared
            case StagedCopy() as copy if not self._broken.get(message.number):
                self._heard.setdefault(message.number, {})[copy.rank] = copy
        if message.number == self._number:
            self._look()

    def _look(self) -> None:
        """Report all complete messages to the machine."""
        number, process = self._number, self._process
        copies = self._heard.get(number, {})
        first = next(iter(copies.values()), None)
        if first is not None and len(copies) == first.size:
            process.feed(ev.StateFed(number, first.step))
            for step, shares in sorted(self._steps.get(number, {}).items()):
                if number == self._number and len(shares) == shares[0].size:
                    compared = self._compared[number][step] == shares[0].size
                    process.feed(ev.StepFed(number, step, compared))
        if self._broken.pop(number, False):
            reason = "a member feeds it no more"
            process.feed(ev.ObtainFailed(SourceKind.FEED, NO_VIEW, reason, order=number))

    def load_state(self, order: ef.ObtainState, group: Group | None) -> None:
        """Load the state, which takes a while."""
        process, world = self._process, self._world
        process.work.state = None
        process.post(world.delay(world.options.load_s), self._finish_load, order.order)

    def _finish_load(self, number: int) -> None:
        process = self._process
        if number != self._number:
            return
        copies = self._heard[number]
        if len({(copy.step, copy.size, copy.state) for copy in copies.values()}) > 1:
            raise Violation(f"worker {process.key} is fed copies that do not fit: {copies}")
        for rank, copy in sorted(copies.items()):
            process.work.state, process.work.step = copy.state, copy.step
            if copy.flipped is not None and copy.flipped % copy.size == rank:
                process.spoiling.flipped = copy.flipped
                unlike = len({each.flipped for each in copies.values()}) > 1
                self.is_wrong = unlike and self._world.options.cycle > 0
        process.spoiling.lacks = MISSING_STATE_OFFSET * self._world.options.forgetful
        process.feed(ev.StateObtained(SourceKind.FEED, NO_VIEW, number))

    def take_step(self, order: ef.ObtainStep, group: Group | None) -> None:
        """Put a sum that was fed where the script applies it."""
        process, step = self._process, order.step
        shares = sorted(self._steps[self._number].pop(step))
        self._world.truth.steps.check_pieces(process, step, shares)
        process.work.total, process.work.total_step = shares[0].total, step
        self._world.truth.count["steps fed"] += 1
        process.feed(ev.StepObtained(SourceKind.FEED, order.view, step))


def _deliver_message(receiver: Actor, message: FedMessage) -> None:
    """A message to a follower has come."""
    receiver.feeds.receive(message)


def _is_feeder(rank: int, feeders: int) -> bool:
    return rank < feeders
