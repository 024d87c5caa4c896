"""Decides when a worker saves its share of the state, and when a checkpoint counts. Pure.

All members agree in their votes that the next boundary is to be saved. A checkpoint counts once the
copied states of all members have been compared, which happens in the next step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from holdfast.engine.core.ground.effects import CopyState, Outcome
from holdfast.engine.core.ground.events import EventNoted, SaveEnded, SinkKind
from holdfast.engine.core.ground.vote import Wish
from holdfast.engine.core.invalidations import Invalidations, is_invalidated
from holdfast.engine.core.policies import PacePolicy
from holdfast.engine.core.replica.intervals import Exposure, Pace
from holdfast.engine.core.types import ViewNumber, WorkerId
from holdfast.engine.core.views import Member, View


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePolicy:
    """Sets how often to save, where checkpoints are enabled.

    `every`: steps between checkpoints; 0: as often as `pace` demands. `enabled`: there is a writer.
    `compared`: fingerprints are compared, so a checkpoint waits for that before it counts.
    """

    enabled: bool = False
    every: int = 0
    pace: PacePolicy = field(default_factory=PacePolicy)
    compared: bool = False


@dataclass(frozen=True, slots=True)
class SavedUpTo:
    """Reports a checkpoint that is durable, and whose state the other members have."""

    step: int
    view: ViewNumber


@dataclass(frozen=True, slots=True)
class AgreedSave:
    """Records that all members of a view save the state after `after` steps, and why.

    `copied`: this worker has copied its share.
    """

    after: int
    view: View
    wish: Wish
    copied: bool = False

    @property
    def is_end(self) -> bool:
        """Return whether the view has ended with this state."""
        return self.copied and self.wish is Wish.END_SAVE


class SaveFailures:
    """Counts failed saves in a row, which are reported ever more seldom."""

    def __init__(self) -> None:
        self._failures = 0

    def count_failure(self, what: str, problem: str) -> str:
        """Count a failure; return a line about it, or "" if it was reported recently."""
        self._failures += 1
        count = self._failures
        if count == 1:
            return f"{what} is not saved: {problem}"
        if str(count).strip("0") == "1":  # 10, 100, ...
            return f"{what} is not saved, nor were the {count - 1} before it: {problem}"
        return ""

    def forget_failures(self) -> str:
        """Forget the failures; return their number, as the end of a line, or ""."""
        count, self._failures = self._failures, 0
        many = "one before it was" if count == 1 else f"{count} before it were"
        return f"; the {many} not" if count else ""


class Saves:
    """Decides one worker's part in saving; `until` is where the present loop of its script ends."""

    def __init__(self, policy: SavePolicy, me: WorkerId, exposure: Exposure) -> None:
        self.agreed: AgreedSave | None = None
        self._policy = policy
        self._me = me
        self._exposure = exposure
        self._pace: Pace | None = None
        self._last: int | None = None  # step that was saved, or that this worker began with
        self._wanted = False  # at the next boundary, by an order
        self._order = 0  # the number of the newest one
        # No further step compares saved states, so checkpoints count at once.
        self._settled = False
        self._last_save = -1  # the newest that is checked as it is written, and so counts at once
        self._view: View | None = None  # the present one
        self._failures = SaveFailures()
        self._busy: int | None = None  # the step whose share is being saved
        self._durable: list[SaveEnded] = []  # not compared yet
        self._savers: dict[
            tuple[int, ViewNumber], tuple[Member, ...]
        ] = {}  # savers of checkpoints that may count

    def enter(self, view: View, now: float) -> None:
        """Record the members of a new view."""
        if self._pace is None:
            self._pace = Pace(self._policy.pace, self._exposure, now)
        self._view = view

    def drop_unconfirmed(self, committed: int) -> None:
        """Drop checkpoints that not all of their savers have compared in time."""
        for (step, number), savers in list(self._savers.items()):
            if step >= committed and not self._are_all_here(savers):
                del self._savers[step, number]

    def want(self, order: int) -> None:
        """Save at the next boundary and let it count at once: the workers are about to end."""
        if order > self._order:
            self._order, self._wanted = order, True

    def want_now(self) -> None:
        """Save at the next boundary: this worker may have to rest there for long."""
        self._wanted = True

    @property
    def can_save(self) -> bool:
        """Return whether one more step has the state saved that is wanted."""
        return self._policy.enabled and self._wanted and self._busy is None

    def opinion(
        self, step: int, now: float, *, leads: bool, ends: bool = False
    ) -> tuple[Wish, bool]:
        """Return, once for each step, whether to save the state after it; and whether busy.

        `ends`: the view should end, and the state in which it ends is to be saved.
        """
        policy, busy = self._policy, self._busy is not None
        if not policy.enabled or self._pace is None:
            return Wish.NONE, False
        self._pace.record_step(now, busy=busy)
        if self._last is None:
            self._last = step
        due = (
            (step + 1) // policy.every > self._last // policy.every
            if policy.every
            else self._pace.is_due(now)
        )
        if ends:
            return Wish.END_SAVE, busy
        if self._wanted:
            return Wish.LAST_SAVE, busy
        return Wish.SAVE if due and leads else Wish.NONE, busy

    def agree(self, after: int, view: View, wish: Wish) -> None:
        """Record that all members save the state after `after` steps."""
        self.agreed, self._wanted = AgreedSave(after, view, wish), False
        if wish >= Wish.LAST_SAVE:
            self._last_save = after

    def postpone(self, step: int) -> None:
        """Record that the script did not rest after `step` steps: save at the next boundary."""
        if self.agreed is not None and self.agreed.after == step:
            self.agreed = replace(self.agreed, after=step + 1)
            self._last_save += self._last_save == step

    def next_copy(self, step: int) -> list[Outcome]:
        """Return the order to copy, if the state as it is now was agreed on."""
        agreed = self.agreed
        if not self._policy.enabled or agreed is None or agreed.after != step:
            return []
        self._last = self._busy = step
        self.agreed, view = replace(agreed, copied=True), agreed.view
        if self._are_all_here(view.members):  # else the checkpoint cannot be compared
            self._savers[step, view.number] = view.members
        checked = self._policy.compared and step == self._last_save
        return [CopyState(SinkKind.STORE, step, view, checked=checked)]

    def has_ended(self, view: ViewNumber) -> bool:
        """Return whether this view ends here, because its last state was copied."""
        agreed = self.agreed
        return agreed is not None and agreed.is_end and agreed.view.number == view

    @property
    def ending(self) -> int:
        """Return the step at which the newest agreed save ends its view, while it is written."""
        agreed = self.agreed
        is_busy = agreed is not None and agreed.is_end and self._busy == agreed.after
        return agreed.after if agreed is not None and is_busy else 0

    def _are_all_here(self, savers: tuple[Member, ...]) -> bool:
        """Return whether all of these are members of the present view."""
        view = self._view
        if view is None or savers == view.members:
            return view is not None
        return all(view.includes(each.worker, each.incarnation) for each in savers)

    def record_copy(self, step: int, now: float, stall_s: float, problem: str) -> list[Outcome]:
        """Record that the script stood still for a copy; the writer may have answered by now.

        The first member logs that there is no copy.
        """
        if self._pace is not None:  # or it would be due, and cost a copy, after every step
            self._pace.record_save(now, stall_s)
        if not problem:
            return []
        if self._busy == step:
            self._busy = None
        first = self._view is not None and self._view.workers[0] == self._me
        return self._record_failure(step, problem) if first else []

    def record_end(self, save: SaveEnded, committed: int) -> list[Outcome | SavedUpTo]:
        """Take the writer's answer in; only share 0 learns that the whole checkpoint is durable."""
        if self._busy == save.step:
            self._busy = None
        if save.problem and save.first:
            return [*self._record_failure(save.step, save.problem)]
        if not save.durable:
            self._savers.pop((save.step, save.view), None)
            return []
        often = "" if self._policy.every else f"; {self._pace}"
        before = self._failures.forget_failures()
        text = f"step {save.step} is saved, in {save.took_s:.2f} s{before}{often}"
        self._durable.append(save)
        return [EventNoted("save", text), *self.count_compared(committed)]

    def _record_failure(self, step: int, problem: str) -> list[Outcome]:
        text = self._failures.count_failure(f"step {step}", problem)
        return [EventNoted("unsaved", text)] if text else []

    def finish_loop(self, committed: int) -> list[SavedUpTo]:
        """Record that no further step of the loop compares states."""
        self._settled = True
        return self.count_compared(committed)

    def enter_loop(self) -> None:
        """Record that further steps compare saved states."""
        self._settled = False

    def count_compared(self, committed: int) -> list[SavedUpTo]:
        """Return the checkpoints that count by now."""
        found: list[SavedUpTo] = []
        for save in list(self._durable):
            checked = save.step == self._last_save
            waits = self._policy.compared and not self._settled and not checked
            if waits and committed <= save.step:
                continue
            self._durable.remove(save)
            savers = self._savers.pop((save.step, save.view), ())
            found += [SavedUpTo(save.step, save.view)] if savers or not waits else []
        return found


def list_replacements(
    stored: Mapping[int, ViewNumber | None], damaged: int, invalidations: Invalidations
) -> list[int]:
    """Return the steps of checkpoints that may be used in place of a damaged one, best first.

    `stored`: the view in which each was made, None if it was made in no view. The newest one before
    the damaged one is best. Workers that have outlived their coordinator may have saved newer ones,
    and removed the older ones. So newer ones follow, if another one was made later in the same
    view, as then the states of all members were compared.
    """
    valid = {
        step: view
        for step, view in sorted(stored.items(), reverse=True)
        if view is None or not is_invalidated(invalidations, step, view)
    }
    before = [step for step in valid if step < damaged]
    after = [step for step in valid if step > damaged]
    return before + [a for a in after if any(valid[b] == valid[a] for b in after if b > a)]
