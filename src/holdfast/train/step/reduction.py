"""Reduces the gradients of one step exactly, among the members of one view.

It is a reduce-scatter by direct exchange: member i owns the i-th piece of every bucket, receives
everyone's partial sums for that piece and folds them along the canonical tree; then all gather the
pieces. It moves the bytes of a ring all-reduce when each member holds one node of the tree. Every
operation has two phases (gather, spread) so that many can be under way at once.
"""

from __future__ import annotations

import cmath
from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np
import torch

from holdfast.core import tree
from holdfast.core.errors import InvariantError, UserError
from holdfast.core.step.events import FINITE, NOBODYS, SOMEBODYS
from holdfast.core.types import View
from holdfast.train.exchange.layout import (
    TAG_BUCKETS,
    TAG_BUFFERS,
    TAG_OF_PLAN,
    TAG_PLAN,
    TAG_TABLE,
    Layout,
    gather_bytes,
)
from holdfast.train.exchange.seam import Message, Pending, Transport
from holdfast.train.exchange.tensor_bytes import as_bytes
from holdfast.train.exchange.waits import Waits
from holdfast.train.step.act import Act, describe_difference
from holdfast.train.step.buckets import PLANS, Bucket, Flat
from holdfast.train.step.probe import current
from holdfast.train.step.row_table import Rows
from holdfast.train.step.step_table import Buffers, StepTable

# Fingerprints of a part of the state, all of it, its plain values, and the copy for followers;
# 0: none.
Prints = tuple[int, int, int, int]
HEAD_WORDS = 6  # before a message's rows: its flags, the fingerprints, and the size of its values
HERE, STOPS = 1, 2  # bits of the first word: the message has come, and wants the loop to end


class Operation(Protocol):
    """Completes one exchange that all members need before the vote."""

    def gather(self, transport: Transport) -> None: ...

    def spread(self, transport: Transport) -> None:
        """Finish gathering, then start the second phase."""
        ...

    def finish(self) -> None: ...


class ActCheck:
    """Makes sure that all members do the same in a step, before its sums or values are used.

    Each member sends one number to each other member; where these differ, also a line of text.
    """

    def __init__(self, act: Act, plan: int, layout: Layout, view: View) -> None:
        self.number = act.number(plan)
        self._act = act
        self._mine = torch.from_numpy(np.array([self.number], np.int64))
        self._layout = layout
        self._view = view
        self._numbers = {peer: torch.zeros(1, dtype=torch.int64) for peer in layout.others}
        self._pending: Pending | None = None

    def gather(self, transport: Transport) -> None:
        sends = [(peer, self._mine) for peer in self._layout.others]
        self._pending = transport.exchange(sends, list(self._numbers.items()), TAG_PLAN)

    def finish(self, transport: Transport) -> None:
        """Wait for the others' numbers. UserError on all members if one does something else."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        pending.wait()
        if any(number[0] != self.number for number in self._numbers.values()):
            told = gather_bytes(transport, self._layout, self._act.encode())
            acts = [Act.decode(each) for each in told]
            raise UserError(describe_difference(dict(zip(self._view.workers, acts, strict=True))))


class BucketSum:
    """Sums one bucket over all virtual ranks, into its `result`.

    With `into`, another buffer, and `turned`, the same sum is computed again by other members.
    """

    def __init__(
        self, bucket: Bucket, layout: Layout, into: torch.Tensor | None = None, turned: int = 0
    ) -> None:
        self._tag = TAG_BUCKETS + 2 * bucket.index + TAG_OF_PLAN * bucket.plan
        self._total: torch.Tensor | None = None  # sum of all elements of this member's piece
        self._result = bucket.result.data if into is None else into
        self.bucket = bucket
        self._layout = layout
        numel = self._result.numel()
        self._pieces = [layout.piece(rank, numel, turned) for rank in range(layout.size)]
        self._own = {n: bucket.partials[n].data for n in layout.nodes[layout.rank]}
        self._received: dict[tree.Node, torch.Tensor] = {}
        self._free: list[torch.Tensor] = []  # rooms for intermediate sums
        self._pending: Pending | None = None

    def gather(self, transport: Transport) -> None:
        layout, bucket = self._layout, self.bucket
        own = self._pieces[layout.rank]
        width = own.stop - own.start
        sends: list[Message] = []
        receives: list[Message] = []
        incoming = [(p, node) for p in layout.others for node in layout.nodes[p]]
        count = len(incoming) + tree.held_at_once(len(incoming) + len(self._own), layout.vranks)
        scratch = bucket.scratch(width * count)
        rows = [scratch[i * width : (i + 1) * width] for i in range(count)]
        for i, (peer, node) in enumerate(incoming):
            self._received[node] = rows[i]
            receives.append((peer, rows[i]))
        self._free = rows[len(incoming) + 1 :]  # one of the sums goes straight to the result
        for peer in layout.others:
            parts = [data[self._pieces[peer]] for data in self._own.values()]
            sends += [(peer, part) for part in parts]
            current.probe.handle_sending(peer, sum(part.nbytes for part in parts))
        self._pending = transport.exchange(_drop_empty(sends), _drop_empty(receives), self._tag)

    def spread(self, transport: Transport, waits: Waits | None = None) -> None:
        _wait(self._pending, waits)
        for part in self._received.values():
            current.probe.handle_received(part)
        result, piece, peers = self._result, self._pieces[self._layout.rank], self._layout.others
        out = result[piece]
        self._fold(out, piece)
        sends = [(p, out) for p in peers]
        receives = [(p, result[self._pieces[p]]) for p in peers]
        self._pending = transport.exchange(_drop_empty(sends), _drop_empty(receives), self._tag + 1)
        wide = torch.float32 if result.dtype in (torch.float16, torch.bfloat16) else None
        self._total = out.sum(dtype=wide)  # computed while the piece is sent

    def finish(self) -> None:
        _wait(self._pending)

    @property
    def sums(self) -> list[torch.Tensor]:
        """Return the tensors with this operation's sums."""
        return [self._result]

    def doubt(self) -> int:
        """Judge the piece that was summed here: FINITE, or whose part of it is not."""
        if self._total is None or cmath.isfinite(self._total.item()):
            return FINITE
        owner = {node: rank for rank, nodes in enumerate(self._layout.nodes) for node in nodes}
        piece = self._pieces[self._layout.rank]
        parts = {**self._received, **{node: data[piece] for node, data in self._own.items()}}
        wrong = [owner[n] for n, part in parts.items() if not bool(torch.isfinite(part).all())]
        return NOBODYS if not wrong else SOMEBODYS + min(wrong)

    def agrees(self, vrank: int, leaves: Mapping[int, Flat | Rows]) -> bool:
        """Return whether a rank's part, as far as it is here, equals its leaf bit for bit."""
        piece, leaf = self._pieces[self._layout.rank], leaves[self.bucket.index]
        assert isinstance(leaf, Flat)
        for (start, width), part in self._received.items():
            if start == vrank and min(width, self._layout.vranks - start) == 1:
                return torch.equal(as_bytes(part), as_bytes(leaf.data[piece]))
        return True

    def _fold(self, out: torch.Tensor, piece: slice) -> None:
        """Sum into `out`, and leave all parts unchanged: they may be examined afterwards."""
        parts = {n: data[piece] for n, data in self._own.items()} | self._received
        kept = {id(part) for part in parts.values()}
        free = [out, *self._free]  # the first one taken ends up with the whole sum

        def add(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            ours = [each for each in (left, right) if id(each) not in kept]
            free.extend(ours[1:])
            return torch.add(left, right, out=ours[0] if ours else free.pop(0))

        total = tree.fold(parts, self._layout.vranks, add)
        if total is not out:  # there was nothing to add
            out.copy_(total)


class TableGather:
    """Everyone's rows and used flags, in everyone's table. The first word says that it is here.

    `follows`: how many bytes of values this member sends after its rows. `act`: the number of what
    it does in the step, so that its rows never meet those of another act.
    """

    def __init__(
        self,
        table: StepTable,
        used: torch.Tensor,
        layout: Layout,
        prints: Prints = (0, 0, 0, 0),
        follows: int = 0,
        act: int = 0,
    ) -> None:
        # By rank; of all members once `spread` has returned.
        self.prints = {layout.rank: prints}
        self.follows = {layout.rank: follows}
        self._table = table
        self._used = used
        self._layout = layout
        self._tag = TAG_TABLE + TAG_OF_PLAN * (act % PLANS)
        self._messages: dict[int, torch.Tensor] = {}
        self._pending: Pending | None = None

    def gather(self, transport: Transport) -> None:
        layout = self._layout
        self._table.used.copy_(self._used)
        flags = HERE | STOPS * self._table.stops
        head = (flags, *self.prints[layout.rank], self.follows[layout.rank])
        mine = self._table.pack(head, layout.hosted[layout.rank], self._used)
        self._messages = {
            p: self._table.message(HEAD_WORDS, len(layout.hosted[p])) for p in layout.others
        }
        sends = [(p, mine) for p in layout.others]
        self._pending = transport.exchange(
            _drop_empty(sends), _drop_empty(list(self._messages.items())), self._tag
        )

    def spread(self, transport: Transport) -> None:
        _wait(self._pending)
        for peer, message in self._messages.items():
            brings, *prints, follows = message[:HEAD_WORDS].tolist()
            self._table.stops |= bool(brings & STOPS)
            self.prints[peer] = prints[0], prints[1], prints[2], prints[3]
            self.follows[peer] = follows
            self._table.unpack(HEAD_WORDS, self._layout.hosted[peer], message)

    def finish(self) -> None:
        return

    def awaited_ranks(self) -> list[int]:
        """Ranks that are not done with their tasks yet, as far as known here."""
        return [peer for peer, message in self._messages.items() if not message[0]]


class BuffersSpread:
    """Spreads the buffers that virtual rank 0 left, from its host to all: first their size.

    If rank 0's do not count, the first virtual rank that a rank in `counted` hosts takes its place.
    """

    def __init__(self, buffers: Buffers, layout: Layout, counted: Iterable[int]) -> None:
        self._buffers = buffers
        self._layout = layout
        self._host = min((layout.hosted[r][0], r) for r in counted if layout.hosted[r])[1]
        self._size = torch.zeros(1, dtype=torch.int64)
        self._pending: Pending | None = None

    def gather(self, transport: Transport) -> None:
        if self._layout.rank == self._host:
            self._buffers.share()
            self._size[0] = len(self._left_buffers())
        self._pending = self._send(transport, self._size)

    def spread(self, transport: Transport) -> None:
        _wait(self._pending)
        if self._layout.rank != self._host:
            self._buffers.receive(torch.empty(int(self._size[0]), dtype=torch.uint8))
        self._pending = self._send(transport, self._left_buffers())

    def finish(self) -> None:
        _wait(self._pending)

    def _left_buffers(self) -> torch.Tensor:
        if self._buffers.left is None:
            raise InvariantError("virtual rank 0 left no buffers")
        return self._buffers.left

    def _send(self, transport: Transport, message: torch.Tensor) -> Pending:
        if self._layout.rank == self._host:
            return transport.exchange([(p, message) for p in self._layout.others], [], TAG_BUFFERS)
        return transport.exchange([], [(self._host, message)], TAG_BUFFERS)


def _wait(pending: Pending | None, waits: Waits | None = None) -> None:
    if pending is None:
        raise InvariantError("an operation was continued before it began")
    pending.wait(waits)


def _drop_empty(messages: list[Message]) -> list[Message]:
    return [m for m in messages if m[1].numel() > 0]
