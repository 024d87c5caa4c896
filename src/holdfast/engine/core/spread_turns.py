"""Plans how records spread among all members of a view, in about log2 N turns. Pure.

In each turn a member sends all its records to one member and receives the same number from another
one, so the number of its records doubles. They are in the order of the ranks, from its own rank on.
"""

from __future__ import annotations

from typing import NamedTuple


class Turn(NamedTuple):
    """Describes one turn of one member.

    `distance`: the number of its records before the turn. `records`: the number that it sends, and
    receives: the last turn needs fewer. `give_to`, `get_from`: ranks.
    """

    distance: int
    records: int
    give_to: int
    get_from: int


def plan_turns(rank: int, size: int) -> tuple[Turn, ...]:
    """Return the turns in which the member `rank` of `size` receives the record of every member."""
    distances = [1 << k for k in range((size - 1).bit_length())]
    return tuple(Turn(d, min(d, size - d), (rank - d) % size, (rank + d) % size) for d in distances)


def find_branches(rank: int, root: int, size: int) -> tuple[int | None, tuple[int, ...]]:
    """Return the rank that a member gets from, and the ranks that it gives to.

    A message spreads from the member `root` to all along a binomial tree. The first is None for
    the root.
    """
    place = (rank - root) % size
    below = 1 << place.bit_length()
    branches = [place + (below << k) for k in range(size.bit_length())]
    takers = tuple((each + root) % size for each in branches if each < size)
    if not place:
        return None, takers
    return (place - (below >> 1) + root) % size, takers
