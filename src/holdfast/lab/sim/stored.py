"""Simulates a job's store and the nodes' writers, and checks that no checkpoint goes too early.

A writer that dies loses the shares that it has not written yet. The share of rank 0 waits for the
rest, which may come from other nodes, and then the checkpoint is durable.
"""

from __future__ import annotations

from typing import Protocol

from holdfast.engine.core.ground.effects import CopyState
from holdfast.engine.core.ground.events import SaveEnded
from holdfast.engine.core.invalidations import Invalidations, is_invalidated, merge
from holdfast.engine.core.replica.retention import Retention, Saved, SaveOrder, choose_kept
from holdfast.engine.core.types import ViewNumber
from holdfast.engine.core.views import View
from holdfast.lab.sim.arithmetic import Copy
from holdfast.lab.sim.promises import Promises
from holdfast.lab.sim.seams import Actor, Clock
from holdfast.lab.sim.wrong_bits import Errors, Violation

Stored = tuple[int, ViewNumber]  # the step of a checkpoint, and the view that made it
LOOK_S = 0.1  # between two looks for the other shares


class StoredCheckpoints:
    """Knows the truth about the checkpoints that were ever saved."""

    def __init__(self) -> None:
        # Checkpoints that count, by step.
        self.saved: dict[int, Copy] = {}
        self.saved_in: dict[int, ViewNumber] = {}  # their views
        self.failed: dict[int, bool] = {}  # steps that could not be saved, once at least
        # Steps of checkpoints that cannot be read.
        self.rotten: dict[int, bool] = {}
        self.durable: dict[Stored, Copy] = {}  # whether or not they count yet
        self.unlike: dict[Stored, bool] = {}  # only some shares have a flip
        self.invalidations: Invalidations = ()  # checkpoints withdrawn from the store
        self._shares: dict[Stored, dict[int, Copy]] = {}  # by rank
        self._times: dict[Stored, float] = {}  # by the clocks of the nodes that committed them
        self._removed: dict[Stored, bool] = {}  # by the store's policy

    def record_share(self, step: int, view: View, rank: int, copy: Copy) -> None:
        """Record a share of a checkpoint that a writer has written."""
        self._shares.setdefault((step, view.number), {})[rank] = copy

    def are_shares_complete(self, step: int, view: View) -> bool:
        """Return whether all shares of a checkpoint are written."""
        return len(self._shares.get((step, view.number), {})) == len(view.members)

    def make_durable(self, step: int, view: View, *, checked: bool, time: float) -> bool:
        """Put the shares together, unless the checkpoint is invalidated by then.

        `checked`: unless they are unlike, either. `time`: by the clock of the node that does it.
        """
        key = step, view.number
        copies = self._shares.pop(key)
        if is_invalidated(self.invalidations, step, view.number):
            return False
        states = {state for state, _ in copies.values()}
        if len(states) > 1:
            raise Violation(f"the shares of the checkpoint of step {step} do not fit: {copies}")
        flips = [flip for _, flip in copies.values()]
        flip = next((flip for flip in flips if flip is not None), None)
        if checked and len(set(flips)) > 1:
            return False
        self.unlike[key] = len(set(flips)) > 1
        self.durable[key] = states.pop(), flip
        self._times[key] = time
        self._removed.pop(key, None)
        return True

    def was_durable(self, step: int) -> bool:
        """Return whether any checkpoint of a step was ever durable."""
        return any(key[0] == step for key in self.durable)

    def was_saved(self, step: int) -> bool:
        """Return whether a checkpoint counts, or did until the store's policy removed it."""
        return step in self.saved or any(key[0] == step for key in self._removed)

    def find(self, step: int) -> Stored | None:
        """Find the newest checkpoint of a step that can be read; None if there is none."""
        return max((key for key in self._present() if key[0] == step), default=None)

    def count(self, key: Stored) -> bool:
        """Make a checkpoint count from now on; return whether it is newer than the one so far."""
        step, view = key
        if self.saved_in.get(step, -1) >= view:
            return False
        self.saved[step], self.saved_in[step] = self.durable[key], view
        self.rotten.pop(step, None)
        return True

    def list_views(self) -> dict[int, ViewNumber | None]:
        """Return the steps of all checkpoints in the store, and the newest view of each."""
        return dict(sorted(self._present()))

    def withdraw(self, invalidations: Invalidations) -> None:
        """Remove the checkpoints that are invalidated."""
        self.invalidations = merge(self.invalidations, invalidations)
        self._drop()

    def retire(self, policy: Retention, now: float) -> list[int]:
        """Remove the checkpoints that the policy does not keep; return their steps.

        `now`: by the clock of a node. Violation unless a newer checkpoint is left for each of them.
        """
        views = self.list_views()
        present = [(step, view) for step, view in views.items() if view is not None]
        saved = [
            Saved(order=SaveOrder(view=view, step=step), age_s=now - self._times[step, view])
            for step, view in present
        ]
        steps = choose_kept(saved, policy)
        newest = max(((view, step) for step, view in present if step in steps), default=(0, 0))
        removed = [(step, view) for step, view in present if step not in steps]
        for step, view in removed:
            if newest < (view, step):
                raise Violation(f"the checkpoint of step {step} is removed: no newer one is there")
            self._removed.update({key: True for key in self.durable if key[0] == step})
        self._drop()
        return [step for step, _ in removed]

    def _present(self) -> list[Stored]:
        return [
            key
            for key in self.durable
            if key not in self._removed and not is_invalidated(self.invalidations, *key)
        ]

    def _drop(self) -> None:
        """Exclude removed checkpoints from now on."""
        present = self._present()
        for step, view in list(self.saved_in.items()):
            if (step, view) not in present:
                del self.saved[step], self.saved_in[step]


class StoreTruth(Protocol):
    """Has the parts of the truth about a run that a writer changes."""

    stored: StoredCheckpoints
    errors: Errors
    promises: Promises


class WriterHost:
    """Runs one node's writer; it is started again at once when it dies."""

    def __init__(self, world: Clock, truth: StoreTruth) -> None:
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
        copy: Copy = (process.work.state, process.spoiling.flipped)
        order = (process, share)
        self._under_way.append(order)
        self._truth.errors.record_comparison(share.step)
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
