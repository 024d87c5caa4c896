"""Decides how one read of rows gets its answer: whom to ask, what to give, when rows are lost.

A worker reads rows as of a version, the number of updates that the job has committed. It keeps
the last updates itself, since all workers hold the sums that a step was committed with. So a server
that lacks some of them is given these; one that lacks more copies the shards from another server.
Rows are lost only if every server that holds them has answered, again and again, and none has them.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.core.errors import require
from holdfast.core.servers.holdings import ShardStanding

GIVES_MAX = 3  # times that one server is given updates of a shard within a round
DENIALS_MAX = 5  # times that all holders of a shard answer in vain before it counts as lost


class Try(enum.Enum):
    """Is the state of one server for one shard within a read."""

    OPEN = "open"  # it can be asked
    ASKED = "asked"  # its answer is awaited
    BEHIND = "behind"  # it lacks more than this worker keeps
    PAST = "past"  # it knows only later versions
    UNREACHED = "unreached"  # it did not answer, or is fetching the shard


# ---------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Ask:
    """Read the wanted rows of these shards from a server."""

    server: int
    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Give:
    """Send a server the updates of these shards that follow `after`."""

    server: int
    after: int
    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OrderCopy:
    """Have a server fetch these shards from another one, unless it has had `version` updates.

    An order that comes late must change nothing: a copy that is newer than the server's own rows
    would take the place of earlier versions that are still read.
    """

    server: int
    source: int
    shards: tuple[int, ...]
    version: int


@dataclass(frozen=True, slots=True)
class OrderReset:
    """Have a server begin with the first values of these shards again."""

    server: int
    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OrderLoad:
    """Have a server load these shards from the checkpoint that the job has begun from."""

    server: int
    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WaitAgain:
    """Wait a moment: a server may come back."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Give these shards up: no server has them as of the version any more."""

    shards: tuple[int, ...]


RowReadingEffect = Ask | Give | OrderCopy | OrderReset | OrderLoad | WaitAgain | Lost


@dataclass(slots=True)
class _Shard:
    tries: dict[int, Try]
    gives: dict[int, int] = field(default_factory=dict)
    served_by: int | None = None


class RowReading:
    """Decides for one read, as the module describes.

    `holders`: of each shard, the servers that hold it in the order in which to ask them.
    `kept_after`: the worker keeps every update after this one, up to `version`. `stored`: the
    version of the rows in the checkpoint that the job has begun from, if it has.
    """

    def __init__(
        self,
        version: int,
        holders: Mapping[int, Sequence[int]],
        kept_after: int,
        suspects: Iterable[int] = (),
        stored: int | None = None,
    ) -> None:
        self._version = version
        self._kept_after = kept_after
        self._can_load = stored is not None and kept_after <= stored <= version
        self._denials = 0
        last = frozenset(suspects)
        self._shards = {
            shard: _Shard(dict.fromkeys(sorted(servers, key=lambda s: s in last), Try.OPEN))
            for shard, servers in holders.items()
        }
        require(all(each.tries for each in self._shards.values()), "a shard without a server")

    @property
    def is_done(self) -> bool:
        """Return whether every shard was served."""
        return all(each.served_by is not None for each in self._shards.values())

    def next(self) -> list[RowReadingEffect]:
        """Return what to do now; nothing while answers are awaited, or once all is done."""
        asks: dict[int, list[int]] = {}
        stuck: list[int] = []
        for shard, each in self._shards.items():
            if each.served_by is not None or Try.ASKED in each.tries.values():
                continue
            server = next((s for s, t in each.tries.items() if t is Try.OPEN), None)
            if server is None:
                stuck.append(shard)
                continue
            each.tries[server] = Try.ASKED
            asks.setdefault(server, []).append(shard)
        if asks:
            return [Ask(server, tuple(shards)) for server, shards in asks.items()]
        open_shards = [each for each in self._shards.values() if each.served_by is None]
        is_awaited = any(Try.ASKED in each.tries.values() for each in open_shards)
        return [] if is_awaited or not stuck else self._unstick(stuck)

    def record_answer(self, server: int, shards: Sequence[int]) -> list[RowReadingEffect]:
        """Take in that a server has sent the rows; others that lack the shards fetch them there."""
        behind: dict[int, list[int]] = {}
        for shard in shards:
            each = self._shards[shard]
            each.tries[server], each.served_by = Try.OPEN, server
            for other, state in each.tries.items():
                if state is Try.BEHIND:
                    behind.setdefault(other, []).append(shard)
        version = self._version
        return [OrderCopy(other, server, tuple(found), version) for other, found in behind.items()]

    def record_refusal(
        self, server: int, shards: Sequence[int], standing: ShardStanding
    ) -> list[RowReadingEffect]:
        """Take in that a server has answered how far it is instead."""
        gives: dict[int, list[int]] = {}
        for shard in shards:
            self._shards[shard].tries[server] = Try.OPEN  # unless it is among the following
        for shard, have in standing.behind:
            each = self._shards[shard]
            count = each.gives.get(server, 0)
            if have >= self._kept_after and count < GIVES_MAX:
                each.gives[server] = count + 1
                gives.setdefault(have, []).append(shard)
            else:
                each.tries[server] = Try.BEHIND
        for shard in standing.past:
            self._shards[shard].tries[server] = Try.PAST
        for shard in standing.copying:
            self._shards[shard].tries[server] = Try.UNREACHED
        return [Give(server, have, tuple(found)) for have, found in sorted(gives.items())]

    def record_silence(self, server: int) -> None:
        """Take in that a server did not answer."""
        for each in self._shards.values():
            if server in each.tries and each.served_by is None:
                each.tries[server] = Try.UNREACHED

    @property
    def missing(self) -> list[int]:
        """Return the shards that no server has served yet."""
        return [shard for shard, each in self._shards.items() if each.served_by is None]

    def try_again(self, holders: Mapping[int, Sequence[int]]) -> None:
        """Ask all servers again, after a wait. `holders`: the present ones of missing shards."""
        for shard in self.missing:
            each = self._shards[shard]
            each.tries = dict.fromkeys(holders[shard], Try.OPEN)
            each.gives.clear()

    def _unstick(self, stuck: Sequence[int]) -> list[RowReadingEffect]:
        resets: dict[int, list[int]] = {}
        loads: dict[int, list[int]] = {}
        lost: list[int] = []
        for shard in stuck:
            each = self._shards[shard]
            if Try.UNREACHED in each.tries.values():
                self._denials = 0
                return [WaitAgain()]
            if self._kept_after == 0:  # from the first values on, all can be made again
                server = next(iter(each.tries))
                each.tries[server] = Try.OPEN
                resets.setdefault(server, []).append(shard)
            elif self._can_load:
                server = next(iter(each.tries))
                each.tries[server] = Try.OPEN
                loads.setdefault(server, []).append(shard)
            else:
                lost.append(shard)
        self._denials += bool(lost)
        if lost and self._denials < DENIALS_MAX:
            return [WaitAgain()]  # another worker may be giving what this one does not keep
        if lost:
            return [Lost(tuple(lost))]
        orders: list[RowReadingEffect] = [OrderReset(n, tuple(s)) for n, s in resets.items()]
        return orders + [OrderLoad(server, tuple(shards)) for server, shards in loads.items()]


def bring_up(
    server: int,
    update: int,
    standing: ShardStanding,
    kept_after: int,
    holders: Mapping[int, Sequence[int]],
) -> list[RowReadingEffect]:
    """Return what a server needs that was sent `update`, but lacks earlier updates.

    `standing`: its answer, which says how far it is. It fetches what this worker does not keep from
    the first other server that holds the shard.
    """
    gives: dict[int, list[int]] = {}
    copies: dict[int, list[int]] = {}
    for shard, have in standing.behind:
        if have >= kept_after:
            gives.setdefault(have, []).append(shard)
            continue
        source = next((other for other in holders[shard] if other != server), None)
        if source is not None:
            copies.setdefault(source, []).append(shard)
    effects: list[RowReadingEffect] = [
        Give(server, have, tuple(shards)) for have, shards in sorted(gives.items())
    ]
    return effects + [OrderCopy(server, s, tuple(shards), update) for s, shards in copies.items()]
