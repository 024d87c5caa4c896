"""Sends all members the values of tasks besides gradients, or the leader's proposal.

A step of kind VALUES exchanges them: bytes, by virtual rank or as the leader's. In a step of
gradients the reports of its tasks travel in the same way: a report has a task's results besides its
gradient and its row. All members receive all reports when the step is committed. No sums are made
here: each receiver makes them, in the order of virtual ranks.

Values are packed trees of tensors, arrays, numbers and strings. An unpacked tree is a copy, with
tensors on their former kind of device. No code is executed.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash

from holdfast.engine.core.errors import Aborted, UserError, WireError
from holdfast.engine.core.spread_turns import Turn
from holdfast.engine.core.views import View
from holdfast.engine.train.checkpoint.state import allocate, flatten_named, metas, restore
from holdfast.engine.train.exchange.layout import TAG_VALUES, Layout
from holdfast.engine.train.exchange.seam import Pending, Transport, is_done
from holdfast.engine.train.exchange.tensor_bytes import as_bytes

Packed = tuple[bytes, list[str], list[bytes]]  # skeleton, kinds of devices, the tensors' bytes
_decode_tree = msgspec.msgpack.Decoder(Packed).decode
#: The place of the leader's proposal, next to the virtual ranks.
PROPOSAL = -1
VALUES_BYTES_MAX = 1 << 32  # limit for the values of one member in a step
_decode = msgspec.msgpack.Decoder(dict[int, bytes]).decode


def pack(value: object, name: str) -> bytes:
    """Pack a tree; UserError, which uses this name, for an unsuitable value.

    Tensors are taken without their graphs. Equal trees give equal bytes.
    """
    skeleton, found = flatten_named(value, name)
    for each in found:
        if each.box is not None:
            raise UserError(
                f"{each.path} is distributed over the processes of a worker: give its "
                "full_tensor(), or its to_local()"
            )
    kinds = [each.tensor.device.type for each in found]
    parts = [as_bytes(each.tensor).numpy().tobytes() for each in found]
    return msgspec.msgpack.encode((skeleton, kinds, parts))


def unpack(data: bytes) -> Any:
    """Return a copy of the tree that was packed. WireError if the bytes are damaged."""
    try:
        skeleton, kinds, parts = _decode_tree(data)
        tensors = []
        for meta, kind, part in zip(metas(skeleton), kinds, parts, strict=True):
            tensor = allocate(meta)
            flat = tensor.reshape(-1).view(torch.uint8)
            if len(part) != len(flat):
                raise WireError(f"a packed tensor {meta} has {len(part)} bytes")
            if part:
                flat.copy_(torch.frombuffer(bytearray(part), dtype=torch.uint8))
            is_here = kind == "cuda" and torch.cuda.is_available()
            tensors.append(tensor.to(kind) if is_here else tensor)
        return restore(skeleton, tensors)
    except (msgspec.MsgspecError, ValueError, RuntimeError, UnicodeDecodeError) as error:
        raise WireError(f"packed values cannot be read: {error}") from None


def count_tensors(data: bytes) -> int:
    """Return the number of tensors in a packed tree."""
    _, kinds, _ = _decode_tree(data)
    return len(kinds)


class TaskReport(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Contains packed trees: `values` for the script to gather, and the rank's new `states`.

    `bad`: names the records that the task had to leave out, as data/quarantine encodes them.
    """

    bad: bytes = b""
    values: dict[str, bytes] = {}
    states: dict[str, bytes] = {}

    def encode(self) -> bytes:
        """Return the encoded report; b"" if it is empty."""
        return msgspec.msgpack.encode(self) if self.bad or self.values or self.states else b""

    @property
    def digest(self) -> int:
        """Return 63 bits of all values and states; 0 without any."""
        if not (self.values or self.states):
            return 0
        return xxhash.xxh3_64_intdigest(_encode((self.values, self.states))) >> 1


NOTHING = TaskReport()
_encode = msgspec.msgpack.Encoder(order="deterministic").encode
_decode_report = msgspec.msgpack.Decoder(TaskReport).decode


def read_report(data: bytes) -> TaskReport:
    """Return the report that was encoded. WireError if it is damaged."""
    try:
        return _decode_report(data) if data else NOTHING
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise WireError(f"a task's report cannot be read: {error}") from None


class GatheredValues(Mapping[str, list]):
    """Maps names to the gathered values of a committed step, in the order of virtual ranks.
    UserError for a name that no task of the step has used.
    """

    def __init__(self, step: int, reports: Mapping[int, TaskReport]) -> None:
        self._step = step
        self._packed: dict[str, list[bytes]] = {}
        for _, report in sorted(reports.items()):
            for name, value in report.values.items():
                self._packed.setdefault(name, []).append(value)
        self._unpacked = functools.cache(lambda name: [unpack(v) for v in self._packed[name]])

    def __getitem__(self, name: str) -> list:
        if name not in self._packed:
            known = f"but {', '.join(map(repr, self._packed))}" if self._packed else "nor any other"
            raise UserError(
                f"step.gathered[{name!r}]: no task of step {self._step} has called "
                f"step.gather({name!r}, ...), {known}"
            )
        return self._unpacked(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the list of a name's values; `default` if no task of the step has used it."""
        if name not in self:
            return default
        return self[name]

    def __contains__(self, name: object) -> bool:
        return name in self._packed

    def __iter__(self) -> Iterator[str]:
        return iter(self._packed)

    def __len__(self) -> int:
        return len(self._packed)


class StepValues:
    """Keeps the values of the open step. Used with the monitor held."""

    def __init__(self) -> None:
        #: By virtual rank, or PROPOSAL; from all members.
        self.told: dict[int, bytes] = {}
        self._mine: dict[int, bytes] = {}

    def reset(self) -> None:
        """Forget all values: another step begins, or the same one again."""
        self.told, self._mine = {}, {}

    def put(self, place: int, value: bytes) -> None:
        """Record this worker's value for a place."""
        self._mine[place] = value

    def put_report(self, vrank: int, told: bytes) -> None:
        """Record the encoded report of this worker's task, which may be empty."""
        self._mine.pop(vrank, None)
        if told:
            self._mine[vrank] = told

    def own_values(self, places: Iterable[int]) -> dict[int, bytes]:
        """Return this worker's values for those of these places that have one."""
        return {place: self._mine[place] for place in places if place in self._mine}

    def encode(self) -> bytes:
        """Return the values of all members, for `receive`; b"" if there are none.

        All members return the same bytes: pieces of a kept step are made by different ones.
        """
        return msgspec.msgpack.encode(dict(sorted(self.told.items()))) if self.told else b""

    def receive(self, data: bytes | memoryview) -> None:
        """Take in the values of all members, or of one member. Aborted."""
        try:
            self.told |= _decode(data) if data else {}
        except msgspec.DecodeError as error:
            raise Aborted(f"values that cannot be read have come: {error}") from None


class ValuesGather:
    """Spreads the values of all members; most steps have none, and then it sends no message.

    A member sends at most one message in each of log2 N turns, with all values that it has by then,
    and receives the values of each member once. The members' rows, which are gathered with it,
    contain the sizes of the values. `counts`: False if the results of this member's tasks are
    dropped.
    """

    def __init__(self, values: StepValues, layout: Layout, view: View, *, counts: bool) -> None:
        places = list(layout.hosted[layout.rank]) if counts else []
        if view.workers[layout.rank] == view.leader:
            places.append(PROPOSAL)
        values.told = mine = values.own_values(places)
        self._values = values
        self._layout = layout
        self._mine = msgspec.msgpack.encode(mine) if mine else b""
        #: The bytes of values of this member.
        self.size = len(self._mine)
        self._sizes: Mapping[int, int] = {}  # by rank
        # The values of all members, and where each member's start, from this member's own on.
        self._room = torch.empty(0, dtype=torch.uint8)
        self._starts: list[int] = []
        self._turn = 0
        self._coming: list[Pending | None] = []  # by turn
        self._given: list[Pending] = []

    def expect(self, sizes: Mapping[int, int]) -> None:
        """Expect these numbers of bytes by rank; the mapping fills as rows come."""
        self._sizes = sizes

    def begin(self, transport: Transport) -> None:
        return

    def is_ready(self) -> bool:
        return not self._coming or is_done(self._coming[self._turn])

    def advance(self, transport: Transport) -> bool:
        """Spread the values once all sizes are known. Aborted."""
        if not self._starts:
            if len(self._sizes) < self._layout.size:
                return True
            self._make_room()
            self._coming = [self._begin_receive(transport, each) for each in self._layout.turns]
        else:
            if (pending := self._coming[self._turn]) is not None:
                pending.wait()
            self._turn += 1
        if self._turn == len(self._coming):
            return False
        turn = self._layout.turns[self._turn]
        held = self._part(0, turn.records)
        if len(held):
            self._given.append(transport.exchange([(turn.give_to, held)], [], TAG_VALUES))
        return True

    def finish(self) -> None:
        """Take in the values of all members. Aborted."""
        for pending in self._given:
            pending.wait()
        for i in range(1, self._layout.size):
            self._values.receive(self._part(i, i + 1).numpy().data)

    def _make_room(self) -> None:
        """Make room for the values of all members. Aborted for sizes that cannot be."""
        size = self._layout.size
        if any(not 0 <= each <= VALUES_BYTES_MAX for each in self._sizes.values()):
            raise Aborted(f"values of impossible sizes were announced: {dict(self._sizes)}")
        ranks = [(self._layout.rank + i) % size for i in range(size)]
        self._starts = [0, *itertools.accumulate(self._sizes[rank] for rank in ranks)]
        self._room = torch.empty(self._starts[-1], dtype=torch.uint8)
        self._room.numpy()[: self.size] = np.frombuffer(self._mine, np.uint8)
        self._mine = b""

    def _begin_receive(self, transport: Transport, turn: Turn) -> Pending | None:
        """Expect the message of a turn, before it comes; None if it has no values."""
        come = self._part(turn.distance, turn.distance + turn.records)
        return transport.exchange([], [(turn.get_from, come)], TAG_VALUES) if len(come) else None

    def _part(self, start: int, stop: int) -> torch.Tensor:
        """Return the values of the members from the `start`-th after this one on."""
        return self._room[self._starts[start] : self._starts[stop]]
