"""Finds out which processes of servers have all rows, from their answers to updates.

This matters for heirs, the second processes of servers that move to other nodes, and for all
servers while their number changes. Such a process is sent every update and copies the rows that it
lacks. Once it has all of them, every worker uses it. This module does not know sockets or time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from holdfast.engine.core.hosted_service import ServerLayout
from holdfast.tables.core.holdings import ShardStanding
from holdfast.tables.core.placement import HEIRS, find_shards, lay_out


@dataclass(frozen=True, slots=True)
class HolderAnswer:
    """Records the progress of a server or an heir after an update of some shards.

    `address`: where it listened. `layout`: the number of the layout that it knew then.
    """

    server: int
    address: str
    layout: int
    shards: Sequence[int]
    standing: ShardStanding


@dataclass(slots=True)
class _Progress:
    """Keeps the shards that the process at `address` had whole when it last answered for them."""

    address: str
    whole: set[int] = field(default_factory=set)


class HeirProgress:
    """Knows how far new processes of servers are with all groups of tables, for one worker.

    A server's number means the server itself, and HEIRS + its number the heir.
    """

    def __init__(self, layout: ServerLayout, replicas: int) -> None:
        self._layout, self._replicas = layout, replicas
        self._groups: list[str] = []
        self._progress: dict[tuple[str, int], _Progress] = {}

    @property
    def layout(self) -> ServerLayout:
        """Return the newest layout."""
        return self._layout

    def add_group(self, group: str) -> None:
        """Add a group of tables."""
        self._groups.append(group)

    def change_layout(self, layout: ServerLayout) -> None:
        """Use another layout: the shards of each server change, so all must answer again."""
        self._layout = layout
        self._progress.clear()

    def record_answer(self, group: str, answer: HolderAnswer) -> None:
        """Record a server's answer to an update.

        An answer of an earlier layout does not count: the server may hold other shards now.
        """
        is_new = answer.server >= HEIRS or self._layout.is_changing
        if answer.layout != self._layout.number or not is_new:
            return
        found = self._progress.get((group, answer.server))
        if found is None or found.address != answer.address:
            found = self._progress[group, answer.server] = _Progress(answer.address)
        standing = answer.standing
        lacks = {shard for shard, _ in standing.behind} | {*standing.past, *standing.copying}
        found.whole = (found.whole | set(answer.shards)) - lacks

    def record_silence(self, group: str, server: int) -> None:
        """Record that a server has not answered."""
        self._progress.pop((group, server), None)

    def list_complete(self) -> tuple[str, ...]:
        """Return the addresses of the new processes that have all rows of all groups."""
        servers = sorted({server for _, server in self._progress})
        return tuple(sorted(filter(None, map(self._find_complete, servers))))

    def _find_complete(self, server: int) -> str:
        """Return the address of a server if it has all rows, else ""."""
        held = set(find_shards(server % HEIRS, lay_out(self._layout, self._replicas)))
        address = ""
        for group in self._groups:
            found = self._progress.get((group, server))
            if found is None or not held <= found.whole:
                return ""
            if address not in ("", found.address):
                return ""  # it was started again, and has not answered for all groups since
            address = found.address
        return address
