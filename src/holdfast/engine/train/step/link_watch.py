"""Looks now and then whether a view's members can be reached, and whether descriptors suffice.

Only `look` may be called without the monitor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.views import View
from holdfast.engine.net.descriptors import DescriptorWatch

LOOK_S = 0.5  # between two looks at a group's links


class ViewGroup(Protocol):
    """Offers what any thread may use of a view's process group."""

    def abort(self) -> None: ...

    def lost_ranks(self) -> Sequence[int]: ...


class LinkWatch:
    """Knows the group of the present view. `group`: the view's number, and its group if any."""

    def __init__(self) -> None:
        self.group: tuple[int, ViewGroup] | None = None
        self._look_at = 0.0  # when to look next
        self._descriptors = DescriptorWatch()

    def abort(self, view: int) -> None:
        """Cut the group of this view, or of an earlier one."""
        if self.group is not None and self.group[0] <= view:
            self.group[1].abort()
            self.group = None

    def find_due(self, view: int, now: float) -> ViewGroup | None:
        """Return the group of this view if it is time to look at it."""
        if self.group is None or self.group[0] != view or now < self._look_at:
            return None
        self._look_at = now + LOOK_S
        return self.group[1]

    def look(self, view: View, group: ViewGroup) -> list[ev.WorkerEvent]:
        """Return what the machine must know of descriptors, and of the links of a view's group."""
        found: list[ev.WorkerEvent] = []
        if text := self._descriptors.complaint():
            found.append(ev.EventNoted("descriptors", text))
        if peers := tuple(view.workers[rank] for rank in group.lost_ranks()):
            found.append(ev.LinkLost(view.number, peers))
        return found
