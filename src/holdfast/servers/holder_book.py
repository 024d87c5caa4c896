"""Knows for a worker which servers hold which shards of a group, and where they listen.

The heir of a server, a second process of it on another node, has a number, too: HEIRS, plus that of
the server.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.core.servers.holdings import ShardStanding
from holdfast.core.servers.placement import HEIRS, add_heirs, find_shards, lay_out
from holdfast.core.types import ServerLayout
from holdfast.train.script.row_updates import ServerAccess


class _Layout:
    """Lists the servers of each shard (`holders`), and the shards of each server."""

    def __init__(self, layout: ServerLayout, replicas: int) -> None:
        self.number, self.servers = layout.number, layout.servers
        self.holders = lay_out(layout, replicas)
        self.shards = {n: find_shards(n, self.holders) for n in range(self.servers)}


class HolderBook:
    """Looks up servers and heirs, and passes on how far new ones are. Threads may share it."""

    def __init__(self, group: str, access: ServerAccess) -> None:
        self.access, self._group = access, group
        self._layout = _Layout(access.heirs.layout, access.replicas)
        access.heirs.add_group(group)

    def _find_layout(self) -> _Layout:
        """Return the present layout."""
        newest = self.access.heirs.layout
        if newest.number != self._layout.number:
            self._layout = _Layout(newest, self.access.replicas)
        return self._layout

    @property
    def layout(self) -> int:
        """Return the number of the present layout."""
        return self._find_layout().number

    def name(self, server: int) -> str:
        """Return how to call a server or an heir in a sentence."""
        return f"server {server}" if server < HEIRS else f"server {server - HEIRS}'s heir"

    def find_address(self, server: int) -> str:
        """Return where a server or an heir listens; empty: that is not known."""
        if server < HEIRS:
            return self.access.find_address(server)
        return self.access.find_heir(server - HEIRS)

    def find_shards(self, server: int) -> tuple[int, ...]:
        """Return the shards that a server, or an heir, is to hold."""
        return self._find_layout().shards.get(server % HEIRS, ())

    def list_servers(self) -> list[int]:
        """Return the numbers of all servers, and of the heirs that there are now."""
        return [*range(self._find_layout().servers), *self._list_heirs()]

    def find_holders(self, shards: Iterable[int]) -> dict[int, tuple[int, ...]]:
        """Return which servers hold these shards now, and after them the heirs of these servers."""
        return add_heirs(self._find_layout().holders, shards, self._list_heirs())

    def look_at(self, server: int) -> None:
        """Report a new process that needs no rows, or forget one that has gone."""
        if not self.access.heirs.is_new(server):
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
        if self.access.heirs.is_new(server):
            self.access.heirs.record_answer(self._group, server, address, shards, standing)

    def record_silence(self, server: int) -> None:
        """Record that a server or an heir has not answered an update."""
        if self.access.heirs.is_new(server):
            self.access.heirs.record_silence(self._group, server)

    def _list_heirs(self) -> list[int]:
        servers = range(self._find_layout().servers)
        return [HEIRS + n for n in servers if self.access.find_heir(n)]
