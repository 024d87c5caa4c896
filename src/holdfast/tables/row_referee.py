"""Finds out which rows are right when servers hold different ones.

Servers that agree about the rows before an update can disagree about those after it only if one of
them has computed wrongly. So the worker gets the rows on which they agree, applies the updates
itself, which it keeps, and believes the servers with the same result.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch

from holdfast.engine.core.errors import UserError, WireError
from holdfast.engine.core.servers.reading import FindRight, can_begin_from, find_common
from holdfast.engine.net import peer_stream
from holdfast.tables import server_wire as wire
from holdfast.tables.kept_updates import KeptUpdates
from holdfast.tables.server_connection import ServerConnection
from holdfast.tables.server_group import ServerGroup, ShardRows, fill_shard
from holdfast.tables.serving import fetch_shard


class RowReferee:
    """Settles disputes of one group's servers. `connect`: returns the connection to a server."""

    def __init__(
        self,
        group: wire.TableGroup,
        kept: KeptUpdates,
        connect: Callable[[int], ServerConnection],
    ) -> None:
        self._group, self._kept, self._connect = group, kept, connect

    def judge(self, dispute: FindRight, version: int) -> tuple[dict[int, int], int | None]:
        """Return the servers' fingerprints of a shard as of `version`, and which one is right.

        They are asked again: one may have dropped its rows in between, or have other ones. None:
        that cannot be told.
        """
        shard, claims, heard = dispute.shard, dict[int, int](), dict[int, int]()
        for server, before in dispute.claims:
            answer = self._ask(server, shard, version)
            if answer is None:
                heard[server] = before  # the server is silent
            elif answer.fingerprints:
                claims[server] = heard[server] = answer.fingerprints[0]
        if not claims:
            return claims, None
        right = self._compute(shard, heard, list(claims), version)
        said = [*heard.values(), *(claim for _, claim in dispute.claims)]
        return claims, right if right is not None else find_common(said)

    def _compute(
        self, shard: int, heard: dict[int, int], servers: list[int], version: int
    ) -> int | None:
        """Return the fingerprint that this worker computes, from rows on which servers agree."""
        first = self._kept.find_start(version)
        start, sources = 0, dict[int, int]()
        for earlier in range(version - 1, first - 1, -1):
            answers = {server: self._ask(server, shard, earlier) for server in servers}
            known = {n: a.fingerprints[0] for n, a in answers.items() if a and a.fingerprints}
            if can_begin_from(known, heard):
                start, sources = earlier, known
                break
        if not sources and first > 0:
            return None
        own = ServerGroup(self._group, (shard,))
        if start == 0:
            fill_shard(own, shard)
        elif not any(self._copy(own, n, shard, start, sources[n]) for n in sources):
            return None
        for number, update in self._kept.list_since(start):
            if number <= version:
                own.update(number, (shard,), update.pick_update([shard]))
        return _read(own, shard, version)

    def _ask(self, server: int, shard: int, version: int) -> wire.Answer | None:
        """Ask for a server's fingerprint of a shard as of `version`; None: it does not answer."""
        none = (0,) * len(self._group.tables)
        connection = self._connect(server)
        try:
            channel = connection.open()
            request = wire.ReadRows(self._group.name, version, (), none, compared=(shard,))
            peer_stream.send_message(channel, request)
            return peer_stream.receive_message(channel, wire.Answer)
        except (OSError, WireError, UserError):
            connection.close()
            return None

    def _copy(
        self, own: ServerGroup, server: int, shard: int, version: int, fingerprint: int
    ) -> bool:
        """Get a shard as of `version` from a server; return whether it has this fingerprint."""
        connection = self._connect(server)
        with suppress(OSError, WireError, UserError):
            fetch_shard(connection.open(), own, shard, version)
            return _read(own, shard, version) == fingerprint
        connection.close()
        return False


def _read(group: ServerGroup, shard: int, version: int) -> int | None:
    """Return the fingerprint of a shard of this process's own, if it has that version."""
    none = [torch.empty(0, dtype=torch.int64) for _ in group.group.tables]
    found = group.read(version, [], none, [shard])
    return found.fingerprints[0] if isinstance(found, ShardRows) else None
