"""Defines the vote, a member's opinion at the end of a step, and counts those of all. Pure."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.engine.core.ground.events import NO_WAIT, Doubt, Row, Wait
from holdfast.engine.core.types import ViewNumber


class Wish(enum.IntEnum):
    """Grades the wish to save the state after a step; the strongest one of all counts."""

    NONE = 0
    SAVE = 1
    #: The workers are about to end: there may be no further step.
    LAST_SAVE = 2
    #: The same, and the view ends after this step.
    END_SAVE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """Describes a member's opinion at the end of a step.

    `pending`: it knows of a planned change. `save`: whether the state after this step should be
    saved, and counts without a further step.
    `busy`: it still saves another one. `alike`: how alike audited tasks must be from the next step
    on. `doubt`: whether its sums are finite. `compute_us`: the time of its own tasks of the step.
    `wait`: its wait for others at the end of the exchange. `follow`: the order by which it can
    feed.
    `protect`: whether the state after this step should be protected. `staged`: the newest state
    that it has put into memory (core/replica/replicating.py).
    """

    view: ViewNumber
    step: int
    pending: bool = False
    save: Wish = Wish.NONE
    busy: bool = False
    alike: int = 0
    doubt: int = Doubt.FINITE
    compute_us: int = 0
    wait: Wait = NO_WAIT
    follow: int = 0
    protect: bool = False
    staged: int = 0

    def row(self) -> Row:
        """Return the vote as it travels."""
        wait = self.wait
        flags = (int(self.pending), int(self.save), int(self.busy), self.alike, int(self.doubt))
        waited = (wait.peer, wait.took_us, wait.waited_us)
        memory = (int(self.protect), self.staged)
        return (self.view, self.step, *flags, self.compute_us, self.follow, *memory, *waited)

    @classmethod
    def of(cls, row: Row) -> Vote:
        """Read a vote that has travelled."""
        view, step, pending, save, busy, alike, doubt, *rest = map(int, row)
        compute_us, follow, protect, staged, *wait = rest
        return cls(
            view=ViewNumber(view),
            step=step,
            pending=bool(pending),
            save=Wish(save),
            busy=bool(busy),
            alike=alike,
            doubt=doubt,
            compute_us=compute_us,
            wait=Wait(*wait),
            follow=follow,
            protect=bool(protect),
            staged=staged,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Sums up the votes of all members, the same on each of them."""

    #: A vote is of another view or step.
    alien: bool
    pending: bool
    save: Wish
    alike: int
    doubts: tuple[int, ...]
    compute_us: tuple[int, ...]
    waits: tuple[Wait, ...]
    #: The newest order to feed that all members can carry out; 0: there is none.
    follow: int
    protect: bool
    staged: tuple[int, ...]


def count_votes(rows: Sequence[Row]) -> Tally:
    """Count the votes of all members, by rank."""
    votes = [Vote.of(row) for row in rows]
    return Tally(
        alien=len({(v.view, v.step) for v in votes}) > 1,
        pending=any(v.pending for v in votes),
        save=Wish.NONE if any(v.busy for v in votes) else max(v.save for v in votes),
        alike=max(v.alike for v in votes),
        doubts=tuple(v.doubt for v in votes),
        compute_us=tuple(v.compute_us for v in votes),
        waits=tuple(v.wait for v in votes),
        follow=votes[0].follow if len({v.follow for v in votes}) == 1 else 0,
        protect=any(v.protect for v in votes),
        staged=tuple(v.staged for v in votes),
    )
