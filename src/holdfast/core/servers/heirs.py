"""Finds out which processes of servers have all rows, from their answers to updates.

A process is new if it is the heir of a server, a second process of it on another node, or if the
number of servers is changing. It is sent every update, copies the rows that it lacks, and is used
by everybody once it has all of them. This does not know sockets or time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from holdfast.core.servers.holdings import ShardStanding
from holdfast.core.servers.placement import HEIRS, find_shards, lay_out
from holdfast.core.types import ServerLayout


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
        self._find_held()

    @property
    def layout(self) -> ServerLayout:
        """Return the newest layout."""
        return self._layout

    def add_group(self, group: str) -> None:
        """Add a group of tables."""
        self._groups.append(group)

    def change_layout(self, layout: ServerLayout) -> None:
        """Go by another layout: the shards of each server are others, so all must answer again."""
        self._layout = layout
        self._progress.clear()
        self._find_held()

    def is_new(self, server: int) -> bool:
        """Return whether it matters how far a server is."""
        return server >= HEIRS or self._layout.is_changing

    def record_answer(
        self, group: str, server: int, address: str, shards: Sequence[int], standing: ShardStanding
    ) -> None:
        """Record the answer of a server to an update of these shards."""
        if not self.is_new(server):
            return
        found = self._progress.get((group, server))
        if found is None or found.address != address:
            found = self._progress[group, server] = _Progress(address)
        lacks = {shard for shard, _ in standing.behind} | {*standing.past, *standing.copying}
        found.whole = (found.whole | set(shards)) - lacks

    def record_silence(self, group: str, server: int) -> None:
        """Record that a server has not answered."""
        self._progress.pop((group, server), None)

    def list_complete(self) -> tuple[str, ...]:
        """Return the addresses of the new processes that have all rows of all groups."""
        servers = sorted({server for _, server in self._progress})
        return tuple(sorted(filter(None, map(self._find_complete, servers))))

    def _find_held(self) -> None:
        holders = lay_out(self._layout, self._replicas)
        self._held = {n: set(find_shards(n, holders)) for n in range(self._layout.servers)}

    def _find_complete(self, server: int) -> str:
        """Return the address of a server if it has all rows, else ""."""
        address = ""
        for group in self._groups:
            found = self._progress.get((group, server))
            if found is None or not self._held.get(server % HEIRS, set()) <= found.whole:
                return ""
            if address not in ("", found.address):
                return ""  # it was started again, and has not answered for all groups since
            address = found.address
        return address
