"""Simulates the nodes' checkpoint writers, and the store in which they put shares together.

A writer that dies loses the shares that it has not written yet. The share of rank 0 waits for the
others, which may come from other nodes, and then the checkpoint is durable.
"""

from __future__ import annotations

from holdfast.engine.core.ground.effects import CopyState
from holdfast.engine.core.ground.events import SaveEnded
from holdfast.engine.core.replica.retention import Retention
from holdfast.lab.sim.arithmetic import Copy
from holdfast.lab.sim.checkers import Truth
from holdfast.lab.sim.seams import Actor, Clock

LOOK_S = 0.1  # between two looks for the other shares


class WriterHost:
    """Runs one node's writer; it is started again at once when it dies."""

    def __init__(self, world: Clock, truth: Truth) -> None:
        self._world = world
        self._truth = truth
        self._starts = 0
        self._under_way: list[tuple[Actor, CopyState]] = []
        self.clock_ahead_s = 0.0  # by how much the node's clock is set ahead

    def crash(self) -> None:
        """Lose shares that are not written yet; workers learn of it by their sockets."""
        self._starts += 1
        lost, self._under_way = self._under_way, []
        for process, order in lost:
            event = SaveEnded(order.step, order.view.number, problem="the writer died")
            self._truth.stored.failed[order.step] = True
            process.post(self._world.delay(0.01), process.feed, event)

    def save(self, process: Actor, share: CopyState) -> None:
        """Write a worker's share of the state."""
        world = self._world
        copy: Copy = (process.state, process.spoiling.flipped)
        order = (process, share)
        self._under_way.append(order)
        self._truth.record_copy(share.step)
        delay_s = world.delay(world.options.load_s)
        world.call_later(delay_s, self._finish_write, self._starts, order, copy)

    def _finish_write(self, starts: int, order: tuple[Actor, CopyState], copy: Copy) -> None:
        if starts != self._starts:
            return
        process, share = order
        step, view = share.step, share.view
        rank, truth = view.rank(process.worker), self._truth
        truth.stored.record_share(step, view, rank, copy)
        if rank == 0:
            self._await_others(starts, order, self._world.now + 4 * self._world.options.load_s + 1)
        else:
            self._under_way.remove(order)
            process.post(0.001, process.feed, SaveEnded(step, view.number))

    def _await_others(self, starts: int, order: tuple[Actor, CopyState], until: float) -> None:
        if starts != self._starts:
            return
        process, share = order
        step, view, world = share.step, share.view, self._world
        if self._truth.stored.are_shares_complete(step, view):
            time, stored = world.now + self.clock_ahead_s, self._truth.stored
            durable = stored.make_durable(step, view, checked=share.checked, time=time)
            problem = "" if durable else "it is invalidated, or its shares are unlike"
            event = SaveEnded(step, view.number, durable, problem)
            if durable and world.options.keep_last:
                policy = Retention(last=world.options.keep_last, settled=world.options.cycle)
                for removed in stored.retire(policy, time):
                    self._truth.promises.unreadable[removed] = True
        elif world.now > until:
            event = SaveEnded(step, view.number, problem="a share did not come")
        else:
            world.call_later(LOOK_S, self._await_others, starts, order, until)
            return
        if event.problem:
            self._truth.stored.failed[step] = True
        self._under_way.remove(order)
        process.post(0.001, process.feed, event)
