"""Decides how one read of rows gets its answer: the servers to ask, the updates to send. Pure.

A worker reads rows as of a version, the number of updates that the job has committed. It keeps the
last updates itself, because all workers hold the sums with which a step was committed. So a server
that lacks some of them is sent these; one that lacks more copies the shards from another server. A
bare shard gets its first values if the worker keeps all updates. Rows are lost only if every server
that holds them has answered, again and again, and none has them.

All servers that answer for a shard must have the same rows of it, by their fingerprints, before any
of these are used: a server may compute wrongly. If they differ, the worker finds out which are
right, and the other servers drop theirs.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.engine.core.errors import require
from holdfast.tables.core.holdings import BARE, ShardStanding

GIVES_MAX = 3  # times that one server is given updates of a shard within a round
DENIALS_MAX = 5  # answers of all holders of a shard without its rows, before it counts as lost


class Try(enum.Enum):
    """Is the state of one server for one shard within a read."""

    #: The server can be asked.
    OPEN = "open"
    #: Its answer is awaited.
    ASKED = "asked"
    #: It lacks more than this worker keeps.
    BEHIND = "behind"
    #: It knows only later versions.
    PAST = "past"
    #: It did not answer, or is fetching the shard.
    UNREACHED = "unreached"


# ---------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Ask:
    """Read the wanted rows of these shards from a server.

    `compared`: shards whose fingerprints alone are wanted.
    """

    server: int
    shards: tuple[int, ...]
    compared: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Give:
    """Send a server the updates of these shards that follow `after`."""

    server: int
    after: int
    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OrderCopy:
    """Ask a server to fetch these shards from another one, unless it has had `version` updates.

    An order that arrives late must have no effect: a copy that is newer than the server's own rows
    would replace earlier versions that are still read.
    """

    server: int
    source: int
    shards: tuple[int, ...]
    version: int


@dataclass(frozen=True, slots=True)
class OrderReset:
    """Ask a server to give the rows of these shards their first values."""

    server: int
    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OrderLoad:
    """Ask a server to load these shards from the checkpoint with which the job has begun."""

    server: int
    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FindRight:
    """Find out which rows of a shard are right, as servers claim different ones.

    `claims`: servers with the fingerprints that they have. RowReading.settle takes the right one.
    """

    shard: int
    claims: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class OrderDrop:
    """Ask a server to drop a shard whose rows as of `version` are wrong, with this fingerprint."""

    server: int
    shard: int
    version: int
    fingerprint: int


@dataclass(frozen=True, slots=True)
class WaitAgain:
    """Wait a moment: a server may come back."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Give these shards up: no server has them as of the version any more."""

    shards: tuple[int, ...]


RowReadingEffect = (
    Ask | Give | OrderCopy | OrderReset | OrderLoad | FindRight | OrderDrop | WaitAgain | Lost
)


@dataclass(slots=True)
class _Shard:
    """Keeps the state of one shard; `compared`: servers whose fingerprints are wanted."""

    tries: dict[int, Try]
    compared: tuple[int, ...]
    gives: dict[int, int] = field(default_factory=dict)
    served_by: int | None = None
    #: The fingerprints by server.
    claims: dict[int, int] = field(default_factory=dict)
    #: The worker is finding out whose rows are right.
    is_settling: bool = False
    #: The times that a server was made to begin again with the shard.
    mends: int = 0
    #: A server has begun again since all servers were asked the last time.
    is_mended: bool = False
    #: Servers have claimed different rows, and that is not settled.
    is_doubted: bool = False

    @property
    def is_done(self) -> bool:
        """Return whether its rows are here, and no server that can be asked has other rows."""
        return self.served_by is not None and not self.is_doubted and not self.unheard

    @property
    def unheard(self) -> list[int]:
        """Return the servers whose fingerprints are still wanted."""
        waiting = (Try.OPEN, Try.ASKED)
        return [s for s in self.compared if self.tries[s] in waiting and s not in self.claims]

    def choose_mended(self) -> int:
        """Choose the server that begins again, each time another one, and let it be asked."""
        server = [*self.tries][self.mends % len(self.tries)]
        self.tries[server], self.is_mended = Try.OPEN, True
        self.mends += 1
        return server


class RowReading:
    """Decides for one read, as the module describes.

    `holders`: of each shard, the servers that hold it in the order in which to ask them.
    `replicas`: how many of these are to have the shard whole, the first ones: they are compared.
    `kept_after`: the worker keeps every update after this one, up to `version`. `stored`: the
    version of the rows in the checkpoint that the job has begun from, if it has. `waits`: until
    servers have the rows; otherwise these are lost at once, and no server is made to begin again.
    """

    def __init__(
        self,
        version: int,
        holders: Mapping[int, Sequence[int]],
        kept_after: int,
        suspects: Iterable[int] = (),
        stored: int | None = None,
        replicas: int = 1,
        *,
        waits: bool = True,
    ) -> None:
        self._version, self._replicas, self._waits = version, replicas, waits
        self._kept_after = kept_after
        self._can_load = stored is not None and kept_after <= stored <= version
        self._denials = 0
        self._last = frozenset(suspects)
        self._shards = {shard: self._begin(servers) for shard, servers in holders.items()}
        require(all(each.tries for each in self._shards.values()), "a shard without a server")

    def _begin(self, servers: Sequence[int]) -> _Shard:
        order = sorted(servers, key=lambda server: server in self._last)
        compared = [s for s in servers[: self._replicas] if s not in self._last]
        return _Shard(dict.fromkeys(order, Try.OPEN), tuple(compared))

    @property
    def is_done(self) -> bool:
        """Return whether every shard was served, and no server that can be asked has other rows."""
        return all(each.is_done for each in self._shards.values())

    def next(self) -> list[RowReadingEffect]:
        """Return the next acts; none while answers are awaited, or once all is done."""
        asks: dict[int, tuple[list[int], list[int]]] = {}
        disputes: list[RowReadingEffect] = []
        stuck: list[int] = []
        for shard, each in self._shards.items():
            if each.is_done or each.is_settling or Try.ASKED in each.tries.values():
                continue
            server = next((s for s, t in each.tries.items() if t is Try.OPEN), None)
            if each.served_by is None and server is None:
                stuck.append(shard)
            elif each.served_by is not None and not each.unheard:
                each.is_settling = True
                disputes.append(FindRight(shard, tuple(sorted(each.claims.items()))))
            else:
                others = each.unheard
                if each.served_by is None and server is not None:
                    others = [other for other in others if other != server]
                    each.tries[server] = Try.ASKED
                    asks.setdefault(server, ([], []))[0].append(shard)
                for other in others:
                    each.tries[other] = Try.ASKED
                    asks.setdefault(other, ([], []))[1].append(shard)
        if asks or disputes:
            asked: list[RowReadingEffect] = [
                Ask(server, tuple(wanted), tuple(compared))
                for server, (wanted, compared) in asks.items()
            ]
            return asked + disputes
        open_shards = [each for each in self._shards.values() if each.served_by is None]
        is_awaited = any(Try.ASKED in each.tries.values() for each in open_shards)
        if is_awaited or not stuck:
            return []
        return self._unstick(stuck) if self._waits else [Lost(tuple(self.missing))]

    def record_answer(
        self, server: int, shards: Sequence[int], claims: Mapping[int, int]
    ) -> list[RowReadingEffect]:
        """Take in that a server has sent the rows; servers that lack the shards fetch them there.

        `claims`: its fingerprints of all shards of the request.
        """
        for shard, claim in claims.items():
            each = self._shards[shard]
            each.tries[server], each.claims[server] = Try.OPEN, claim
            each.is_doubted |= len(set(each.claims.values())) > 1
        for shard in shards:
            self._shards[shard].served_by = server
        return self._order_copies(shards)

    def _order_copies(self, shards: Iterable[int]) -> list[RowReadingEffect]:
        """Ask servers that lack these shards to fetch them from the server that has sent them."""
        behind: dict[tuple[int, int], list[int]] = {}
        for shard in shards:
            each = self._shards[shard]
            for other, state in each.tries.items():
                if state is Try.BEHIND and each.served_by is not None:
                    behind.setdefault((other, each.served_by), []).append(shard)
        version = self._version
        return [
            OrderCopy(other, server, tuple(found), version)
            for (other, server), found in behind.items()
        ]

    def settle(
        self, shard: int, claims: Mapping[int, int], right: int | None
    ) -> list[RowReadingEffect]:
        """Take in the right fingerprint of a shard; None: it is unknown, and the shard is lost.

        `claims`: the present fingerprints; a server may have dropped its wrong rows in between.
        Servers with another one drop the shard, and fetch it from another server.
        """
        each, drops = self._shards[shard], list[RowReadingEffect]()
        each.is_settling, each.is_doubted = False, right is None
        for server, before in list(each.claims.items()):
            now = claims.get(server)
            if now is not None and now == before == right:
                continue
            del each.claims[server]
            if each.served_by == server:
                each.served_by = None
            if now is None:
                each.tries[server] = Try.UNREACHED
            elif now == right:
                each.tries[server] = Try.OPEN
            else:
                each.tries[server] = Try.BEHIND
                drops.append(OrderDrop(server, shard, self._version, now))
        if right is None and drops:
            return [*drops, Lost((shard,))]
        return drops + self._order_copies([shard])

    def record_refusal(
        self, server: int, shards: Sequence[int], standing: ShardStanding
    ) -> list[RowReadingEffect]:
        """Take in that a server has answered how far it is instead.

        `shards`: all shards of the request, also those to compare.
        """
        gives: dict[int, list[int]] = {}
        bare: list[int] = []
        for shard in shards:
            self._shards[shard].tries[server] = Try.OPEN  # unless it is among the following
        for shard, have in standing.behind:
            each = self._shards[shard]
            count = each.gives.get(server, 0)
            if have == BARE and self._kept_after == 0:
                each.tries[server] = Try.UNREACHED
                bare.append(shard)
            elif have >= self._kept_after and count < GIVES_MAX:
                each.gives[server] = count + 1
                gives.setdefault(have, []).append(shard)
            else:
                each.tries[server] = Try.BEHIND
        for shard in standing.past:
            self._shards[shard].tries[server] = Try.PAST
        for shard in standing.copying:
            self._shards[shard].tries[server] = Try.UNREACHED
        effects: list[RowReadingEffect] = [
            Give(server, have, tuple(found)) for have, found in sorted(gives.items())
        ]
        if bare:
            effects.append(OrderReset(server, tuple(bare)))
        return effects + self._order_copies(shard for shard, _ in standing.behind)

    def record_silence(self, server: int) -> None:
        """Take in that a server did not answer."""
        for each in self._shards.values():
            if server in each.tries and not each.is_done:
                each.tries[server] = Try.UNREACHED

    def record_full(self, server: int) -> None:
        """Take in that a server has no memory for the rows, so that it has none of them."""
        for each in self._shards.values():
            if server in each.tries and not each.is_done:
                each.tries[server] = Try.BEHIND

    def find_sources(self) -> dict[int, tuple[int, ...]]:
        """Return the servers of each shard that have answered for its rows."""
        return {shard: tuple(sorted(each.claims)) for shard, each in self._shards.items()}

    @property
    def missing(self) -> list[int]:
        """Return the shards that no server has served yet."""
        return [shard for shard, each in self._shards.items() if each.served_by is None]

    def try_again(self, holders: Mapping[int, Sequence[int]]) -> None:
        """Ask all servers again, after a wait. `holders`: the present ones of missing shards."""
        for shard in self.missing:
            before, each = self._shards[shard], self._begin(holders[shard])
            each.is_doubted, each.mends = before.is_doubted, before.mends
            each.claims = {s: claim for s, claim in before.claims.items() if s in each.tries}
            self._shards[shard] = each

    def _unstick(self, stuck: Sequence[int]) -> list[RowReadingEffect]:
        resets: dict[int, list[int]] = {}
        loads: dict[int, list[int]] = {}
        lost: list[int] = []
        for shard in stuck:
            each = self._shards[shard]
            if Try.UNREACHED in each.tries.values():
                self._denials = 0
                return [WaitAgain()]
            if each.is_mended:  # the order had no effect: perhaps the server does not hold it
                return [WaitAgain()]
            if self._kept_after == 0:  # from the first values on, all can be made again
                resets.setdefault(each.choose_mended(), []).append(shard)
            elif self._can_load:
                loads.setdefault(each.choose_mended(), []).append(shard)
            else:
                lost.append(shard)
        self._denials += bool(lost)
        if lost and self._denials < DENIALS_MAX:
            return [WaitAgain()]  # another worker may be giving what this one does not keep
        if lost:
            return [Lost(tuple(lost))]
        orders: list[RowReadingEffect] = [OrderReset(n, tuple(s)) for n, s in resets.items()]
        return orders + [OrderLoad(server, tuple(shards)) for server, shards in loads.items()]


def can_begin_from(earlier: Mapping[int, int], claims: Mapping[int, int]) -> bool:
    """Return whether a worker that settles a dispute can begin with the rows of an earlier version.

    `earlier`: the fingerprints of servers that know that version; `claims`: the present
    fingerprints. All servers that know it must have agreed then, and each claim must be one of
    theirs. If they agree now, because one has dropped its rows or copied another server's, a single
    server is enough.
    """
    sides = {claims[server] for server in earlier}
    return len(set(earlier.values())) == 1 and sides == set(claims.values())


def find_common(claims: Collection[int]) -> int | None:
    """Return the fingerprint that all servers claim, if they agree."""
    return next(iter(claims)) if len(set(claims)) == 1 else None


def bring_up(
    server: int,
    update: int,
    standing: ShardStanding,
    kept_after: int,
    holders: Mapping[int, Sequence[int]],
) -> list[RowReadingEffect]:
    """Return the orders for a server that was sent `update`, but lacks earlier updates.

    `standing`: its answer, with its version. It fetches the updates that this worker does not keep
    from the first other server that holds the shard.
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
