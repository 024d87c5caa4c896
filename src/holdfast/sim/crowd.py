"""Makes a world of ten thousand workers affordable.

All members of a view share what follows from the view alone. In a large group an all-gather is one
meeting instead of a message for each pair: each member has what all have given once the last one
has given, after a delay of its own, or never.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast.core.types import View

if TYPE_CHECKING:
    from holdfast.sim.arithmetic import Key
    from holdfast.sim.workers import Process
    from holdfast.sim.world import World

CROWD = 64  # members from which on a group's exchanges are meetings
VIEWS_KEPT = 8
TELLERS = 3  # of a group's closing ends, whose peers may notice: beyond these nobody is left


class Shape:
    """Holds what follows from a view."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.keys: tuple[Key, ...] = tuple(
            (int(m.worker), int(m.incarnation)) for m in view.members
        )
        self.joiners = frozenset(view.joiners)
        self.donors = len(view.donors)


class Shapes:
    """Keeps the shapes of the newest views."""

    def __init__(self) -> None:
        self._kept: dict[int, Shape] = {}

    def of(self, view: View) -> Shape:
        shape = self._kept.get(view.number)
        if shape is None or shape.view is not view:
            shape = self._kept[view.number] = Shape(view)
            if len(self._kept) > VIEWS_KEPT:
                del self._kept[min(self._kept)]
        return shape


class Meetings:
    """All-gathers under way, by view, kind and step."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._under_way: dict[tuple[int, str, int], dict[Key, object]] = {}
        self._tellers: dict[int, int] = {}

    def give(
        self,
        process: Process,
        members: list[Process],
        what: tuple[int, str, int],
        body: object,
        gathered: Callable[..., None],
    ) -> None:
        """`gathered(member, what, bodies)` is called for each member once all have given."""
        bodies = self._under_way.setdefault(what, {})
        bodies[process.key] = body
        if len(bodies) < len(members):
            return
        del self._under_way[what]
        world = self._world
        for member in members:
            member.post(world.delay(world.options.data_s), gathered, member, what, bodies)

    def may_tell(self, number: int) -> bool:
        """Count one more closing end; tell whether it matters to the other members."""
        self._tellers[number] = self._tellers.get(number, 0) + 1
        return self._tellers[number] <= TELLERS
