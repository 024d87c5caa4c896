"""Keeps the checkpoints of a simulated job's store, and checks that none is removed too early."""

from __future__ import annotations

from holdfast.engine.core.invalidations import Invalidations, is_invalidated, merge
from holdfast.engine.core.replica.retention import Retention, Saved, SaveOrder, choose_kept
from holdfast.engine.core.types import ViewNumber
from holdfast.engine.core.views import View
from holdfast.lab.sim.arithmetic import Copy
from holdfast.lab.sim.wrong_bits import Violation

Stored = tuple[int, ViewNumber]  # the step of a checkpoint, and the view that made it


class StoredCheckpoints:
    """Knows the truth about the checkpoints that were ever saved."""

    def __init__(self) -> None:
        self.saved: dict[int, Copy] = {}  # those that count, by step
        self.saved_in: dict[int, ViewNumber] = {}  # their views
        self.failed: dict[int, bool] = {}  # steps that could not be saved, once at least
        self.rotten: dict[int, bool] = {}  # steps of those that cannot be read
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
        """Let a checkpoint count from now on; return whether it is newer than the one so far."""
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
        """Let those that have been removed count no more."""
        present = self._present()
        for step, view in list(self.saved_in.items()):
            if (step, view) not in present:
                del self.saved[step], self.saved_in[step]
