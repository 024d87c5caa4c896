"""Knows for a worker which servers hold which shards of a group, and where they listen.

The heir of a server, a second process of it on another node, has a number, too: HEIRS, plus that of
the server.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.engine.core.servers.heirs import HolderAnswer
from holdfast.engine.core.servers.holdings import ShardStanding
from holdfast.engine.core.servers.placement import HEIRS, add_heirs, find_shards, lay_out
from holdfast.engine.core.table_places import ServerLayout
from holdfast.engine.train.script.row_updates import ServerAccess
from holdfast.tables.server_wire import Answer


class HolderBook:
    """Looks up servers and heirs, and passes on how far new ones are. Threads may share it."""

    def __init__(self, group: str, access: ServerAccess) -> None:
        self.access, self._group = access, group
        access.heirs.add_group(group)

    @property
    def layout(self) -> ServerLayout:
        """Return the newest layout."""
        return self.access.heirs.layout

    def name(self, server: int) -> str:
        """Return how to call a server or an heir in a sentence."""
        return f"server {server}" if server < HEIRS else f"server {server - HEIRS}'s heir"

    def find_address(self, server: int) -> str:
        """Return where a server or an heir listens; empty: that is not known."""
        if server < HEIRS:
            return self.access.find_address(server)
        return self.access.find_heir(server - HEIRS)

    def find_shards(self, server: int, layout: ServerLayout) -> tuple[int, ...]:
        """Return the shards that a server, or an heir, is to hold in this layout."""
        return find_shards(server % HEIRS, lay_out(layout, self.access.replicas))

    def list_servers(self) -> list[int]:
        """Return the numbers of all servers, and of the heirs that there are now."""
        count = self.layout.servers
        return [*range(count), *self._list_heirs(count)]

    def find_holders(self, shards: Iterable[int]) -> dict[int, tuple[int, ...]]:
        """Return which servers hold these shards now, and after them the heirs of these servers."""
        layout = self.layout
        holders = lay_out(layout, self.access.replicas)
        return add_heirs(holders, shards, self._list_heirs(layout.servers))

    def look_at(self, server: int, layout: ServerLayout) -> None:
        """Report a process that needs no rows in this layout, or forget one that has gone."""
        address = self.find_address(server)
        if not address:
            self.record_silence(server)
        elif not self.find_shards(server, layout):
            self.record_answer(HolderAnswer(server, address, layout.number, (), ShardStanding()))

    def record_answer(self, answer: HolderAnswer) -> None:
        """Record how far a server or an heir is after an update of some shards."""
        self.access.heirs.record_answer(self._group, answer)

    def record_silence(self, server: int) -> None:
        """Record that a server or an heir has not answered an update."""
        self.access.heirs.record_silence(self._group, server)

    def tell_of_damage(self, server: int, answer: Answer) -> None:
        """Report shards that a server has dropped, as its answer says."""
        if answer.dropped:
            shards = ", ".join(map(str, answer.dropped))
            self.access.tell(
                f"{self.name(server)}: memory with rows of {self._group} has changed by itself; "
                f"the server drops shards {shards} and gets them again"
            )

    def _list_heirs(self, servers: int) -> list[int]:
        return [HEIRS + n for n in range(servers) if self.access.find_heir(n)]
