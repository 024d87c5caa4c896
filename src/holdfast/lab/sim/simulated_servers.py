"""Is servers of tables and their network, as the simulator of tables has them.

A server's machine is the product's (tables/core/); its rows are one number for each shard, and an
update changes it in a way that no other order or repetition of updates could.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable, Sequence

from holdfast.engine.core.errors import assert_never, require
from holdfast.lab.sim.wrong_bits import Violation
from holdfast.tables.core.holdings import (
    AdoptCopy,
    ApplyUpdate,
    BeginCopies,
    CopyArrived,
    CopyFailed,
    DropShards,
    ForgetUpdate,
    Holdings,
    HoldingsEvent,
    ShardsChosen,
    ShardsGivenUp,
    UpdateArrived,
)
from holdfast.tables.core.placement import SHARDS

_PRIME = (1 << 61) - 1
PATIENCE_S = 0.2  # a worker waits this long for a server
WRITING_S = 0.01  # a server writes a copy of a shard for about this long
LATER = object()  # an act returns it if the server can carry the request out only in a moment


def grow(shard: int, value: int, number: int) -> int:
    """Return a shard's value after update `number`, given the one before it."""
    return (value * 1_000_003 + number * 7919 + shard + 1) % _PRIME


class RowTruth:
    """Knows the value of every shard after every update."""

    def __init__(self) -> None:
        self._values: list[list[int]] = [[shard] for shard in range(SHARDS)]
        self.spoilt: set[int] = set()  # shards that a server has computed wrongly at some time
        # Wrong shards that other servers copied before the error was noticed.
        self.spread: set[int] = set()

    def value(self, shard: int, version: int) -> int:
        values = self._values[shard]
        while len(values) <= version:
            values.append(grow(shard, values[-1], len(values)))
        return values[version]

    def grow_from(self, shard: int, value: int, start: int, stop: int) -> int:
        """Return a shard's value after `stop` updates, given the one after `start` of them."""
        for number in range(start + 1, stop + 1):
            value = grow(shard, value, number)
        return value


class SimServer:
    """Is one process of a server: its machine, its values, and the faults that strike it.

    It holds no shard until a worker names a layout, and the shards.
    """

    def __init__(self, number: int, truth: RowTruth, name: str) -> None:
        self.number, self.name = number, name
        self.layout = -1
        self.holdings = Holdings(())
        self.is_dead = False
        self.frozen_until = 0.0
        self.cut_until = 0.0
        self._truth = truth
        # Values of the shards that are not bare.
        self.values: dict[int, int] = {}
        self._written: dict[int, int] = {}  # stands for the checksums of the rows
        self.damages = 0
        # Shards whose next update it will compute wrongly (False), or has done so (True).
        self.errors: dict[int, bool] = {}
        self._old: dict[int, list[tuple[int, int]]] = {}
        self._copies: dict[int, int] = {}
        self._tokens: set[int] = set()

    def hold(self, shards: Sequence[int], layout: int) -> None:
        """Hold these shards from now on, by `layout`, which is newer than the last one."""
        self.layout = layout
        for shard in [*self.values]:
            if shard not in shards:
                self._forget(shard)
        self.handle(ShardsChosen(tuple(shards)))

    def give_up_for(self, arrived: CopyArrived) -> bool:
        """Give a shard up, so that a copy can be written over it, if the copy is wanted."""
        if not self.holdings.is_wanted(arrived):
            self.handle(CopyFailed((arrived.shard,)))
            return False
        self.handle(ShardsGivenUp((arrived.shard,)))
        is_bare = arrived.shard not in self.values
        self._need(is_bare, f"shard {arrived.shard} can be read while a copy is written over it")
        return True

    def handle(self, event: HoldingsEvent, copied: int = 0) -> tuple[int, ...]:
        """Feed the machine, and carry out its orders; returns the shards to copy now.

        `copied`: the value of a copy.
        """
        wanted: tuple[int, ...] = ()
        if isinstance(event, UpdateArrived):
            self._tokens.add(event.token)
        if isinstance(event, CopyArrived):
            self._copies[event.shard] = copied
        damaged: list[int] = []
        for effect in self.holdings.handle(event):
            match effect:
                case ApplyUpdate(number, shards, token):
                    self._need(token in self._tokens, f"update {number} was forgotten before")
                    bare = [shard for shard in shards if shard not in self.values]
                    self._need(not bare, f"shards {bare} are bare, but updated")
                    damaged += [shard for shard in shards if self.is_damaged(shard)]
                    for shard in shards:
                        if shard not in damaged:
                            self._old.setdefault(shard, []).append((number, self.values[shard]))
                            value = grow(shard, self.values[shard], number)
                            if self.errors.get(shard) is False:
                                self.errors[shard] = True
                                self._truth.spoilt.add(shard)
                                value ^= self.number + 1
                            self._write(shard, value)
                case BeginCopies(shards):
                    wanted = shards
                case AdoptCopy(shard):
                    value = self._copies.pop(shard)
                    self._forget(shard)
                    self._write(shard, value)
                    if value != self._truth.value(shard, self.holdings.version(shard)):
                        self.errors[shard] = True  # so it was where it came from
                        self._truth.spread.add(shard)
                case DropShards(shards):
                    for shard in shards:
                        self._forget(shard)
                case ForgetUpdate(token):
                    self._tokens.discard(token)
                case _:
                    assert_never(effect)
        self.holdings.check()
        if damaged:
            self.drop(damaged)
            return wanted
        for shard, value in self._written.items():
            version = self.holdings.version(shard)
            right = value == self._truth.value(shard, version)
            is_known = self.errors.get(shard, False)
            self._need(right or is_known, f"shard {shard} is not as after {version} updates")
        return wanted

    def _write(self, shard: int, value: int) -> None:
        self.values[shard] = self._written[shard] = value

    def _forget(self, shard: int) -> None:
        """Forget the rows of a shard."""
        for each in (self.values, self._written, self._old, self.errors):
            each.pop(shard, None)

    def flip(self, shard: int, bit: int) -> None:
        """Change a value as a fault of the memory does."""
        self.values[shard] ^= 1 << bit

    def is_damaged(self, shard: int) -> bool:
        """Return whether a value is not as it was written."""
        return self.values[shard] != self._written[shard]

    def drop(self, shards: Sequence[int]) -> None:
        """Drop shards whose memory has changed."""
        self.damages += len(shards)
        self.handle(ShardsGivenUp(tuple(shards)))

    def drop_damaged(self, shards: Sequence[int]) -> None:
        """Drop those of these shards whose memory has changed."""
        found = [shard for shard in shards if shard in self.values and self.is_damaged(shard)]
        if found:
            self.drop(found)

    def drop_wrong(self, shard: int, version: int, value: int) -> None:
        """Drop a shard, if it has this value as of a version."""
        standing = self.holdings.judge(version, [shard])
        if standing.can_serve and self.read(shard, version) == value:
            self.handle(ShardsGivenUp((shard,)))

    def is_whole(self, shard: int, version: int) -> bool:
        """Return whether a shard is right and lacks one update at most, if it is held here."""
        if self.is_dead or not self.holdings.is_held(shard):
            return True
        is_near = self.holdings.version(shard) >= max(version - 1, 0)
        return shard not in self.errors and is_near

    def find(self, shard: int, version: int) -> int | None:
        """Return a value as of a version, if it can be read here now."""
        known = self.holdings.judge(version, [shard]).can_serve
        return self.read(shard, version) if known else None

    def is_silent(self, now: float) -> bool:
        """Return whether no request is answered."""
        return self.is_dead or now < self.frozen_until or now < self.cut_until

    def read(self, shard: int, version: int) -> int:
        """Return a value as of a version, by undoing later updates."""
        self._need(shard in self.values, f"shard {shard} is bare, but read")
        value = self.values[shard]
        for number, old in reversed(self._old.get(shard, [])):
            if number > version:
                value = old
        return value

    def _need(self, condition: bool, text: str) -> None:
        if not condition:
            raise Violation(f"server {self.number}: {text}")


class RowMessages:
    """Carries out acts in the order of their times, and delivers requests to servers."""

    def __init__(self, dice: random.Random) -> None:
        self.now = 0.0
        # By number; the heir of a server has HEIRS plus the server's number.
        self.servers: dict[int, SimServer] = {}
        # Names of processes that write a copy: they write no other one, and change no layout.
        self._writing: set[str] = set()
        self._dice, self._order = dice, 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []

    def step(self) -> None:
        """Carry out the next act. InvariantError if there is none."""
        require(bool(self._queue), "nothing is left to happen")
        self.now, _, act = heapq.heappop(self._queue)
        act()

    def call_at(self, when: float, act: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._queue, (when, self._order, act))

    def call_after(self, delay_s: float, act: Callable[[], None]) -> None:
        self.call_at(self.now + delay_s, act)

    def latency(self) -> float:
        """Draw how long a message takes, in seconds."""
        slow = self._dice.random() < 0.05
        return self._dice.uniform(0.01, 0.15) if slow else self._dice.uniform(0.0005, 0.004)

    def call(
        self, number: int, act: Callable[[SimServer], object], answer: Callable[[object], None]
    ) -> None:
        """Send a request; `answer` gets what `act` returns, or None if no answer comes."""
        server = self.servers[number]
        answered = [False]

        def reply(found: object) -> None:
            if not answered[0]:
                answered[0] = True
                answer(found)

        def deliver() -> None:
            if server.is_dead or server is not self.servers[number]:
                self.call_after(self.latency(), lambda: reply(None))
            elif self.now < server.frozen_until:
                self.call_at(server.frozen_until + self.latency(), deliver)
            elif self.now >= server.cut_until:
                found = act(server)
                if found is LATER:
                    self.call_after(WRITING_S, deliver)
                else:
                    self.call_after(self.latency(), lambda: reply(found))

        self.call_after(self.latency(), deliver)
        self.call_after(PATIENCE_S, lambda: reply(None))

    def is_writing(self, server: SimServer) -> bool:
        """Return whether a server is writing a copy of a shard."""
        return server.name in self._writing

    def bring(
        self, server: SimServer, copies: Iterable[tuple[CopyArrived, int]], left: set[int]
    ) -> None:
        """Give copies to a server one after the other, as its thread for them does.

        `left`: all shards to copy. Their copying has failed if no copy comes.
        """
        coming = iter(copies)

        def begin() -> None:
            if self.is_writing(server):
                self.call_after(WRITING_S, lambda: self._when_running(server, begin))
                return
            for arrived, value in coming:
                left.discard(arrived.shard)
                if server.give_up_for(arrived):
                    self._finish_later(server, arrived, value, begin)
                    return
            server.handle(CopyFailed(tuple(sorted(left))))

        self._when_running(server, begin)

    def _finish_later(
        self, server: SimServer, arrived: CopyArrived, value: int, go_on: Callable[[], None]
    ) -> None:
        """End a server's writing of a copy after a while, and then call `go_on`."""

        def finish() -> None:
            self._writing.discard(server.name)
            server.handle(arrived, value)
            go_on()

        self._writing.add(server.name)
        slow = self._dice.random() < 0.05
        taken_s = self._dice.uniform(0.0, 0.5 if slow else 2 * WRITING_S)
        self.call_after(taken_s, lambda: self._when_running(server, finish))

    def _when_running(self, server: SimServer, act: Callable[[], None]) -> None:
        """Do something in a server's process, unless it has ended, and not while it is frozen."""
        if self.now < server.frozen_until:
            self.call_at(server.frozen_until, lambda: self._when_running(server, act))
        elif not server.is_dead:
            act()
