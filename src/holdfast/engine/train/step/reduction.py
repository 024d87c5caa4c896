"""Exchanges acts, rows and buffers of a step between all members of a view.

An act describes the work that the workers do together in a step; all of them compare it. Every
operation has several turns, so that many can be under way at once.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np
import torch
import xxhash

from holdfast.engine.core.errors import Aborted, InvariantError, UserError
from holdfast.engine.core.ground.events import StepKind
from holdfast.engine.core.spread_turns import find_branches
from holdfast.engine.core.types import WorkerId
from holdfast.engine.core.views import View
from holdfast.engine.train.exchange.layout import (
    TAG_BUFFERS,
    TAG_OF_PLAN,
    TAG_PLAN,
    TAG_TABLE,
    Layout,
    gather_bytes,
)
from holdfast.engine.train.exchange.seam import Pending, Transport, is_done
from holdfast.engine.train.step.buckets import PLANS
from holdfast.engine.train.step.step_table import Buffers, StepTable

_decode = msgspec.msgpack.Decoder(tuple[str, int, str]).decode
HEAD_WORDS = 6  # before a member's rows: its flags, the fingerprints, and the size of its values
STOPS = 1  # the first word of a member whose script wants the loop to end


class StepFingerprints(NamedTuple):
    """Has fingerprints of the state before a step; 0: none."""

    part: int = 0
    whole: int = 0
    #: Of the values that are not tensors.
    plain: int = 0
    #: Of the copy for followers.
    copied: int = 0


NO_FINGERPRINTS = StepFingerprints()


@dataclass(frozen=True, slots=True)
class Act:
    """Describes the work of one step, which must be the same on all workers.

    `text`: the work, in words for people. `loop`: the number of the script's loop. `line`: the
    script's line that has opened the step; it may differ between workers. `kind`: what the step
    brings together, which follows from the text.
    """

    text: str = ""
    loop: int = 0
    line: str = ""
    kind: StepKind = StepKind.GRADIENTS

    def number(self, plan: int) -> int:
        """Return 63 bits that stand for the act and the plan of sums, but not for the line."""
        return xxhash.xxh3_64_intdigest(f"{plan} {self.loop} {self.text}".encode()) >> 1

    def encode(self) -> bytes:
        """Return the bytes of the act."""
        return msgspec.msgpack.encode((self.text, self.loop, self.line))

    @classmethod
    def decode(cls, data: bytes) -> Act:
        """Return the act that another member has sent. Aborted if it cannot be read."""
        try:
            return cls(*_decode(data))
        except msgspec.DecodeError as error:
            raise Aborted(f"a member has sent an act that cannot be read: {error}") from None


def describe_difference(acts: Mapping[WorkerId, Act]) -> str:
    """Describe in a sentence that two workers do different things in one step, and where."""
    first, mine = next(iter(acts.items()))
    for worker, act in acts.items():
        if (act.text, act.loop) != (mine.text, mine.loop):
            same = act.text == mine.text
            return (
                f"{_describe(first, mine, same)}, where {_describe(worker, act, same)}: the calls "
                "that workers make together must come in the same order on all workers, so make "
                "none of them under a condition that only some workers meet, such as job.is_leader"
            )
    others = [worker for worker in acts if worker != first]
    return (
        f"worker {others[0]} trains other parameters than worker {first} in this step: freeze, "
        "thaw, add and remove parameters on all workers at the same step"
    )


def _describe(worker: WorkerId, act: Act, with_loop: bool) -> str:
    loop = f" in its loop {act.loop + 1}" if with_loop else ""
    return f"worker {worker} {act.text}{loop}{f' ({act.line})' if act.line else ''}"


class Operation(Protocol):
    """Completes one exchange that all members need before the vote, in several turns."""

    def begin(self, transport: Transport) -> None: ...

    def is_ready(self) -> bool:
        """Return whether the turn under way is complete."""
        ...

    def advance(self, transport: Transport) -> bool:
        """Wait for the turn under way, and begin the next one; return False if none is left."""
        ...

    def finish(self) -> None: ...


AnyOperation = TypeVar("AnyOperation", bound=Operation)


def advance_all(operations: Sequence[AnyOperation], transport: Transport) -> list[AnyOperation]:
    """Advance the first operation, and all whose turn is complete; return the unfinished ones.

    All members take operations in one order. A member that waited for a later one could keep
    the rest from completing the first.
    """
    return [
        each
        for i, each in enumerate(operations)
        if (i and not each.is_ready()) or each.advance(transport)
    ]


class ActCheck:
    """Makes sure that all members do the same in a step, before its sums or values are used.

    Members spread the least and the greatest of their numbers in log2 N turns; where these differ,
    each member also sends a line of text.
    """

    def __init__(self, act: Act, plan: int, layout: Layout, view: View) -> None:
        self.number = act.number(plan)
        self._act = act
        # The least number, and the least of all with another sign.
        self._found = torch.from_numpy(np.array([self.number, -self.number], np.int64))
        self._come = torch.zeros(2, dtype=torch.int64)
        self._layout = layout
        self._view = view
        self._turns = deque(layout.turns)
        self._pending: Pending | None = None

    def begin(self, transport: Transport) -> None:
        """Begin the first turn."""
        self._pending = self._begin_turn(transport)

    def complete(self, transport: Transport) -> None:
        """Complete all turns. UserError on all members if one does something else."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        while pending is not None:
            pending.wait()
            self._found = torch.minimum(self._found, self._come)
            pending = self._begin_turn(transport)
        if self._found.tolist() != [self.number, -self.number]:
            told = gather_bytes(transport, self._layout, self._act.encode())
            acts = [Act.decode(each) for each in told]
            raise UserError(describe_difference(dict(zip(self._view.workers, acts, strict=True))))

    def _begin_turn(self, transport: Transport) -> Pending | None:
        if not self._turns:
            return None
        turn = self._turns.popleft()
        sends, receives = [(turn.give_to, self._found)], [(turn.get_from, self._come)]
        return transport.exchange(sends, receives, TAG_PLAN)


class TableGather:
    """Spreads all members' rows to every table, in log2 N turns, and joins their used flags.

    `follows`: the bytes of values that this member sends after its rows. `act`: the number of the
    step's act, so that rows of different acts never meet.
    """

    def __init__(
        self,
        table: StepTable,
        used: torch.Tensor,
        layout: Layout,
        fingerprints: StepFingerprints = NO_FINGERPRINTS,
        follows: int = 0,
        act: int = 0,
    ) -> None:
        # By rank; of all members after the last turn.
        self.fingerprints = {layout.rank: fingerprints}
        self.follows = {layout.rank: follows}
        #: The rank whose message of the turn under way is missing.
        self.awaited: int | None = None
        self._table = table
        self._layout = layout
        self._tag = TAG_TABLE + TAG_OF_PLAN * (act % PLANS)
        self._used = used.to(torch.uint8)
        self._come = torch.zeros_like(self._used)
        self._ranks = [(layout.rank + i) % layout.size for i in range(layout.size)]
        sizes = [HEAD_WORDS + table.words(len(layout.hosted[rank])) for rank in self._ranks]
        # Where each member's words start, from this member's own on.
        self._starts = [0, *itertools.accumulate(sizes)]
        self._words = torch.zeros(self._starts[-1], dtype=torch.int64)
        self._turns = deque(layout.turns)
        self._held = 1  # members whose rows are here
        self._pending: Pending | None = None

    def begin(self, transport: Transport) -> None:
        """Begin the first turn."""
        layout = self._layout
        self._table.used.copy_(self._used)
        flags = STOPS * self._table.stops
        head = (flags, *self.fingerprints[layout.rank], self.follows[layout.rank])
        mine = self._table.pack(head, layout.hosted[layout.rank])
        self._words[: len(mine)] = mine
        self._begin_turn(transport)

    def is_ready(self) -> bool:
        return is_done(self._pending)

    def advance(self, transport: Transport) -> bool:
        """Take in the rows of the turn under way, and begin the next one."""
        if self._pending is None:
            return False
        self._pending.wait()
        self.awaited = None
        count = self._turns.popleft().records
        self._used |= self._come
        for i in range(self._held, self._held + count):
            self._take(self._ranks[i], self._words[self._starts[i] : self._starts[i + 1]])
        self._held += count
        self._table.used.copy_(self._used)
        return self._begin_turn(transport)

    def finish(self) -> None:
        return

    def _begin_turn(self, transport: Transport) -> bool:
        """Send all rows that are here to one member; return False if no turn is left."""
        self._pending = None
        if not self._turns:
            return False
        distance, count, give_to, get_from = self._turns[0]
        come = self._words[self._starts[distance] : self._starts[distance + count]]
        sent = self._words[: self._starts[count]]
        sends, receives = [(give_to, sent)], [(get_from, come)]
        if len(self._used):
            sends.append((give_to, self._used))
            receives.append((get_from, self._come))
        self.awaited = get_from
        self._pending = transport.exchange(sends, receives, self._tag)
        return True

    def _take(self, rank: int, words: torch.Tensor) -> None:
        flags, *fingerprints, follows = words[:HEAD_WORDS].tolist()
        self._table.stops |= bool(flags & STOPS)
        self.fingerprints[rank] = StepFingerprints(*fingerprints)
        self.follows[rank] = follows
        self._table.unpack(HEAD_WORDS, self._layout.hosted[rank], words)


class BuffersSpread:
    """Spreads the buffers that virtual rank 0 left, from its host to all: first their size.

    A member sends them to at most log2 N members.

    If rank 0's do not count, the first virtual rank that a rank in `counted` hosts takes its place.
    """

    def __init__(self, buffers: Buffers, layout: Layout, counted: Iterable[int]) -> None:
        self._buffers = buffers
        self._layout = layout
        host = min((layout.hosted[r][0], r) for r in counted if layout.hosted[r])[1]
        self._giver, self._takers = find_branches(layout.rank, host, layout.size)
        self._given: list[Pending] = []
        self._size = torch.zeros(1, dtype=torch.int64)
        self._turn = 0
        self._pending: Pending | None = None

    def begin(self, transport: Transport) -> None:
        """Begin to spread the size."""
        if self._giver is None:
            self._buffers.share()
            self._size[0] = len(self._left_buffers())
        self._pending = self._get(transport, self._size)

    def is_ready(self) -> bool:
        return is_done(self._pending)

    def advance(self, transport: Transport) -> bool:
        """Hand on the size, and then the buffers."""
        if self._pending is not None:
            self._pending.wait()
        self._turn += 1
        if self._turn == 1:
            self._give(transport, self._size)
            if self._giver is not None:
                self._buffers.receive(torch.empty(int(self._size[0]), dtype=torch.uint8))
            self._pending = self._get(transport, self._left_buffers())
            return True
        self._give(transport, self._left_buffers())
        return False

    def finish(self) -> None:
        """Wait until all is sent."""
        for each in self._given:
            each.wait()

    def _get(self, transport: Transport, message: torch.Tensor) -> Pending | None:
        if self._giver is None:
            return None
        return transport.exchange([], [(self._giver, message)], TAG_BUFFERS)

    def _give(self, transport: Transport, message: torch.Tensor) -> None:
        sends = [(peer, message) for peer in self._takers]
        self._given.append(transport.exchange(sends, [], TAG_BUFFERS))

    def _left_buffers(self) -> torch.Tensor:
        if self._buffers.left is None:
            raise InvariantError("virtual rank 0 left no buffers")
        return self._buffers.left
