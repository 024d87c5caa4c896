"""Orders checkpoints before all holders of the state are taken away at once. Pure.

One is ordered as soon as the end is known, and another one as late as there is time for it, so that
the last seconds of a notice are used for training. If all nodes are to be left at an unknown time,
one is ordered every few seconds.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from holdfast.engine.core.membership.coordinator_events import Announce
from holdfast.engine.core.membership.facts import Facts
from holdfast.engine.core.membership.formation import candidates
from holdfast.engine.core.membership.roster import NodeState
from holdfast.engine.core.types import ViewNumber

TOOK_S = 2.0  # for one checkpoint, until it is known
SPARE_S = 1.0  # before the end, in which a checkpoint should be durable
ORDERS_PER_TERM = 1 << 20
AGAIN_S, AGAIN_TIMES = 10.0, 10.0  # between two without a known end: seconds, and times of one
NEVER = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class LastSaves:
    """Describes the orders. `newest`: the number of the newest order; 0: none."""

    #: The number of the newest order, greater than in any term before.
    last: int
    newest: int = 0
    #: The time at which another one must be ordered.
    due_at: float | None = None
    ordered_at: float = 0.0
    #: The step of the newest checkpoint by then.
    ordered_after: int = 0
    took_s: float = TOOK_S
    #: The end for which they are ordered.
    ends: tuple[ViewNumber, float] | None = None

    def order(self, durable: int, now: float) -> LastSaves:
        """Order a checkpoint at the next boundary; `durable`: the step of the newest one."""
        number = self.last + 1
        return dataclasses.replace(
            self, last=number, newest=number, ordered_at=now, ordered_after=durable
        )

    def review(
        self, facts: Facts, durable: int, before_end: bool = False
    ) -> tuple[LastSaves, list[Announce]]:
        """Return the orders, now that the state may be about to be lost, and lines.

        `before_end`: all workers that hold it are to be ended, because of a planned change.
        """
        now, view, found = facts.now, facts.view, self
        if durable > self.ordered_after and self.ordered_at:
            took_s = max(now - self.ordered_at, 0.0)
            found = dataclasses.replace(self, took_s=took_s, ordered_at=0.0)
        end = _end_time(facts)
        repeats = end == NEVER and not before_end
        end = NEVER if end is None and before_end else end
        if view is None or end is None:
            return dataclasses.replace(found, ends=None, due_at=None), []
        due_at = end - SPARE_S - 2 * found.took_s
        if repeats:
            due_at = now + max(AGAIN_S, AGAIN_TIMES * found.took_s)
        known = found.ends
        if known is None or known[0] != view.number or end < known[1] - SPARE_S:
            found = dataclasses.replace(found, ends=(view.number, end), due_at=due_at)
            text = f"all workers are taken away in {end - now:.3g} s: a checkpoint is made"
            if repeats:
                text = "all nodes are to be left, and nobody has said when they end: a checkpoint"
                text += f" is made, and one every {due_at - now:.3g} s"
            elif end == NEVER:
                text = "a checkpoint is made before all workers begin again"
            return found.order(durable, now), [Announce("save", text)]
        if found.due_at is None:
            return found, []
        if repeats:
            if now < found.due_at:
                return found, []
            return dataclasses.replace(found, due_at=due_at).order(durable, now), []
        if now < due_at:
            return dataclasses.replace(found, due_at=due_at), []
        text = "a last checkpoint is made before all workers are taken away"
        ordered = dataclasses.replace(found, due_at=None).order(durable, now)
        return ordered, [Announce("save", text)]


def _end_time(facts: Facts) -> float | None:
    """Return the time at which the last member is taken away; None: some members stay.

    The time is infinite if all nodes are to be left at an unknown time.
    """
    roster, members = facts.roster, facts.members
    if not any(_is_left(node) for node in roster.nodes.values()):
        return None  # as almost always
    if not members or facts.caught_up or facts.feeding or candidates(facts):
        return None
    every = [
        [node for name in member.nodes if (node := roster.nodes.get(name)) is not None]
        for member in members
    ]
    if not all(any(_is_left(node) for node in each) for each in every):
        return None
    return max(min(node.leave_by for node in each) for each in every)


def _is_left(node: NodeState) -> bool:
    return bool(node.draining) or node.report.leaves or node.leave_by < NEVER
