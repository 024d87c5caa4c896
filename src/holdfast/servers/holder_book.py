"""Knows for a worker which servers hold which shards of a group, and where they listen.

The heir of a server, a second process of it on another node, has a number, too: that of the server,
plus the number of servers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.core.servers.holdings import ShardStanding
from holdfast.core.servers.placement import add_heirs, find_holders, find_shards
from holdfast.train.script.row_updates import ServerAccess


class HolderBook:
    """Looks up servers and heirs, and passes on how far heirs are. Threads may share it.

    `holders`: the servers of each shard. The first one is asked first.
    """

    def __init__(self, group: str, access: ServerAccess) -> None:
        self.access, self._group, self._count = access, group, access.servers
        self.holders = find_holders(access.servers, access.replicas)
        self._shards = {n: find_shards(n, self.holders) for n in range(access.servers)}
        access.heirs.add_group(group, self._shards)

    def name(self, server: int) -> str:
        """Return how to call a server or an heir in a sentence."""
        return (
            f"server {server}" if server < self._count else f"server {server - self._count}'s heir"
        )

    def find_address(self, server: int) -> str:
        """Return where a server or an heir listens; empty: that is not known."""
        if server < self._count:
            return self.access.find_address(server)
        return self.access.find_heir(server - self._count)

    def find_shards(self, server: int) -> tuple[int, ...]:
        """Return the shards that a server, or an heir, is to hold."""
        return self._shards[server % self._count]

    def list_heirs(self) -> list[int]:
        """Return the numbers of the heirs that there are now."""
        return [self._count + n for n in range(self._count) if self.access.find_heir(n)]

    def find_holders(self, shards: Iterable[int]) -> dict[int, tuple[int, ...]]:
        """Return which servers hold these shards now, and after them the heirs of these servers."""
        return add_heirs(self.holders, shards, self.list_heirs(), self._count)

    def look_at(self, server: int) -> None:
        """Report an heir that needs no rows, or forget one that has gone."""
        if server < self._count:
            return
        address = self.find_address(server)
        if not address:
            self.record_silence(server)
        elif not self.find_shards(server):
            self.record_answer(server, address, (), ShardStanding())

    def record_answer(
        self, server: int, address: str, shards: Sequence[int], standing: ShardStanding
    ) -> None:
        """Record how far a server or an heir is after an update of these shards."""
        if server >= self._count:
            number = server - self._count
            self.access.heirs.record_answer(self._group, number, address, shards, standing)

    def record_silence(self, server: int) -> None:
        """Record that a server or an heir has not answered an update."""
        if server >= self._count:
            self.access.heirs.record_silence(self._group, server - self._count)
