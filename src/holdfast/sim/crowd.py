"""Makes a world of ten thousand workers affordable.

All members of a view share what follows from the view alone. In a large group an all-gather is one
meeting instead of a message for each pair: each member has all contributions once the last one has
come, after a delay of its own, or never.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.sim.arithmetic import Key
from holdfast.sim.seams import Actor, Clock

CROWD = 64  # members from which on a group's exchanges are meetings
TELLERS = 3  # this many closing ends of a group reach its peers: enough for all


class Meetings:
    """All-gathers under way, by view, kind and step."""

    def __init__(self, world: Clock) -> None:
        self._world = world
        self._under_way: dict[tuple[int, str, int], dict[Key, object]] = {}
        self._tellers: dict[int, int] = {}

    def give(
        self,
        process: Actor,
        members: list[Actor],
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

    def count_closing(self, number: int) -> bool:
        """Count one more closing end; return whether it matters to the other members."""
        self._tellers[number] = self._tellers.get(number, 0) + 1
        return self._tellers[number] <= TELLERS
