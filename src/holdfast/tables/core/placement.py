"""Assigns keys to shards, and shards to servers.

Every process computes the same assignment from the number of servers alone, so it need not be sent.
A server keeps most of its shards when their number changes (rendezvous hashing: Thaler and
Ravishankar, "A name-based mapping scheme for rendezvous", 1996).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence

from holdfast.engine.core.errors import require
from holdfast.engine.core.hosted_service import ServerLayout

SHARDS = 16  # in each table; key k is in shard k % SHARDS
HEIRS = 1 << 16  # the heir of server N has the number HEIRS + N
_MASK = (1 << 64) - 1


def find_holders(servers: int, replicas: int) -> tuple[tuple[int, ...], ...]:
    """Return for each shard the servers that hold it, the one to ask first at the front.

    `servers`: their number, at least 1. `replicas`: how many hold each shard, 1 to `servers`.
    """
    require(1 <= replicas <= servers, f"{replicas} replicas on {servers} servers")
    shares = [0] * servers
    found = []
    for shard in range(SHARDS):
        ranked = sorted(range(servers), key=lambda server: _mix(shard * 65_537 + server))
        chosen = ranked[:replicas]
        # The first one is asked for the rows, so these roles are spread evenly.
        chosen.sort(key=lambda server: (shares[server], ranked.index(server)))
        shares[chosen[0]] += 1
        found.append(tuple(chosen))
    return tuple(found)


@functools.lru_cache(maxsize=64)
def lay_out(layout: ServerLayout, replicas: int) -> tuple[tuple[int, ...], ...]:
    """Return for each shard the servers that hold it, or will; the one to ask first at the front.

    While the layout is changing, servers that will hold a shard stand after the former ones.
    """
    former = find_holders(layout.count, replicas)
    later = find_holders(layout.goal, replicas)
    return tuple(
        (*old, *(server for server in new if server not in old))
        for old, new in zip(former, later, strict=True)
    )


def find_shards(server: int, holders: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the shards that a server holds."""
    return tuple(shard for shard, holding in enumerate(holders) if server in holding)


def share_out(holders: Sequence[Sequence[int]]) -> dict[int, tuple[int, ...]]:
    """Return for each server the shards that it is asked for first; each shard is in one list."""
    found: dict[int, tuple[int, ...]] = {}
    for shard, holding in enumerate(holders):
        found[holding[0]] = (*found.get(holding[0], ()), shard)
    return found


def choose_savers(
    parts: Mapping[int, Sequence[int]], sources: Mapping[int, Sequence[int]]
) -> list[tuple[int, tuple[int, ...]]]:
    """Return for each share of a checkpoint the server that saves it, and its shards.

    `parts`: the shards of each server, for each share. `sources`: the servers that have each shard
    now. A shard that its server lacks becomes part of another one's share. A share without shards
    is saved by a server that saves another one, too.
    """
    mine: dict[int, list[int]] = {server: [] for server in parts}
    for server, shards in parts.items():
        for shard in shards:
            able = [other for other in sources[shard] if other in mine]
            least = min(able, key=lambda other: (len(mine[other]), other), default=server)
            mine[server if server in able else least].append(shard)
    busiest = max(mine, key=lambda server: len(mine[server]))
    return [(server if mine[server] else busiest, tuple(mine[server])) for server in parts]


def choose_part(shards: Iterable[int], update: int, part: tuple[int, int]) -> tuple[int, ...]:
    """Return those of these shards whose rows one worker sends for an update.

    `part`: the worker's place among the members, and their number. The members take turns with each
    shard, so every member learns how far all servers are.
    """
    place, members = part
    return tuple(shard for shard in shards if (shard + update) % members == place)


def add_heirs(
    holders: Sequence[Sequence[int]], shards: Iterable[int], heirs: Sequence[int]
) -> dict[int, tuple[int, ...]]:
    """Return the servers that hold these shards, and after them the heirs of these servers.

    `heirs`: the numbers of the heirs that exist.
    """
    return {
        shard: (*holders[shard], *(heir for heir in heirs if heir - HEIRS in holders[shard]))
        for shard in shards
    }


def _mix(x: int) -> int:
    """Return 64 well mixed bits (the finalizer of SplitMix64)."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
