"""Finds out which heirs of servers have all rows, from their answers to updates.

An heir is a second process of a server, on another node. It is sent every update, copies the rows
that it lacks, and takes the server's place once it has all of them. It does not know sockets or
time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.core.servers.holdings import ShardStanding


@dataclass(slots=True)
class _Progress:
    """Keeps the shards that the heir at `address` had whole when it last answered for them."""

    address: str
    whole: set[int] = field(default_factory=set)


class HeirProgress:
    """Knows how far the heirs of all servers are with all groups of tables, for one worker."""

    def __init__(self) -> None:
        self._held: dict[str, Mapping[int, Sequence[int]]] = {}  # by group: shards of each server
        self._progress: dict[tuple[str, int], _Progress] = {}

    def add_group(self, group: str, held: Mapping[int, Sequence[int]]) -> None:
        """Add a group of tables. `held`: the shards that each server holds."""
        self._held[group] = held

    def record_answer(
        self, group: str, server: int, address: str, shards: Sequence[int], standing: ShardStanding
    ) -> None:
        """Record the answer of a server's heir to an update of these shards."""
        found = self._progress.get((group, server))
        if found is None or found.address != address:
            found = self._progress[group, server] = _Progress(address)
        lacks = {shard for shard, _ in standing.behind} | {*standing.past, *standing.copying}
        found.whole = (found.whole | set(shards)) - lacks

    def record_silence(self, group: str, server: int) -> None:
        """Record that the heir of a server has not answered."""
        self._progress.pop((group, server), None)

    def list_complete(self) -> tuple[str, ...]:
        """Return the addresses of the heirs that have all rows of all groups."""
        servers = sorted({server for _, server in self._progress})
        return tuple(sorted(filter(None, map(self._find_complete, servers))))

    def _find_complete(self, server: int) -> str:
        """Return the address of a server's heir if it has all rows, else ""."""
        address = ""
        for group, held in self._held.items():
            found = self._progress.get((group, server))
            if found is None or not set(held[server]) <= found.whole:
                return ""
            if address not in ("", found.address):
                return ""  # it was started again, and has not answered for all groups since
            address = found.address
        return address
