"""Passes a worker's share of a checkpoint to its node's writer in memory that outlives the worker.

The worker copies its share into memory without a name (memfd) and hands the descriptor to the
writer process of its node, over a socket that keeps messages apart (SOCK_SEQPACKET) and that all
workers of the node share. Whatever happens to the worker then, the writer has the bytes. The answer
comes through a pipe; if that ends without an answer, the writer has died.
"""

from __future__ import annotations

import array
import contextlib
import mmap
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from holdfast.engine.core.errors import Damaged, WorldError
from holdfast.engine.state.store.manifest import digest
from holdfast.engine.state.store.saving import Item

PACKET_BYTES_MAX = 4096
ALIGN = 64  # bytes; any tensor may begin there
GROW = 1 << 20
_DESCRIPTORS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedItem:
    """Names one item, and gives the place of its bytes in the memory."""

    name: str
    start: int
    size: int
    dtype: str = ""
    shape: tuple[int, ...] = ()
    offset: tuple[int, ...] = ()
    whole: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Asks to save this memory as share `rank` of `size` of the checkpoint of `step` and `view`.

    `token`: shared by the shares of one checkpoint only. `table_at` and `table_bytes`: the place in
    the memory of the list of its items. `shard`, of `procs`: the shard whose state this is a share
    of. `state_print`: a fingerprint of that whole state; 0: unknown. `patience_s`: the least time
    to wait for the other shares.
    """

    step: int
    view: int
    token: str
    rank: int
    size: int
    table_at: int
    table_bytes: int
    shard: int = 0
    procs: int = 1
    state_print: int = 0
    patience_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveAnswer:
    """Answers an order: `problem` is the reason that the share is not saved.

    `durable`: the whole checkpoint is saved.
    """

    problem: str = ""
    durable: bool = False


_decode_order = msgspec.msgpack.Decoder(Order).decode
_decode_items = msgspec.msgpack.Decoder(list[StagedItem]).decode
_decode_answer = msgspec.msgpack.Decoder(SaveAnswer).decode


def token_for(job: str, view: int, step: int) -> str:
    """Compute 16 hexadecimal digits that all members of a view share, and no other job."""
    return digest(f"{job} {view} {step}".encode()).hex()[:16]


class Arena:
    """Keeps memory that grows when needed, is touched once, and is used again and again."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("holdfast-snapshot", os.MFD_CLOEXEC)
        self.memory: memoryview = memoryview(b"")

    def fit(self, size: int) -> None:
        """Grow to at least `size` bytes; their contents are lost if there were fewer. OSError."""
        if size <= len(self.memory):
            return
        size = -(-size // GROW) * GROW
        os.posix_fallocate(self.descriptor, 0, size)  # memory is taken now, not during a step
        self.memory = memoryview(mmap.mmap(self.descriptor, size))
        zeros = bytes(GROW)
        for start in range(0, size, GROW):
            self.memory[start : start + GROW] = zeros


def table_of(slots: Sequence[StagedItem]) -> bytes:
    """Encode the list of items as it stands in the memory."""
    return msgspec.msgpack.encode(slots)


def send(channel: socket.socket, order: Order, arena: Arena) -> int:
    """Send an order; return the descriptor on which the answer will come.

    WorldError if no writer takes orders.
    """
    answers, theirs = os.pipe()
    descriptors = array.array("i", [arena.descriptor, theirs])
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)]
    try:
        channel.sendmsg([msgspec.msgpack.encode(order)], ancillary, socket.MSG_DONTWAIT)
    except OSError as error:
        os.close(answers)
        raise WorldError(f"the checkpoint writer takes no orders: {error.strerror}") from None
    finally:
        os.close(theirs)
    return answers


def read_answer(descriptor: int) -> SaveAnswer:
    """Wait for the answer, then close the descriptor."""
    with os.fdopen(descriptor, "rb") as pipe:
        data = pipe.read()
    try:
        return _decode_answer(data)
    except msgspec.MsgspecError:
        return SaveAnswer(problem="the checkpoint writer has died")


class Delivery:
    """Keeps an order that has arrived, with its memory. Close it when it is carried out."""

    def __init__(self, packet: bytes, descriptors: Sequence[int]) -> None:
        """Take over the descriptors; Damaged, with these closed, for what no worker sends."""
        self._descriptors = list(descriptors)
        try:
            self.order = _decode_order(packet)
            memory, _ = descriptors
            self._map = mmap.mmap(memory, 0, prot=mmap.PROT_READ)
        except (msgspec.MsgspecError, ValueError, OSError) as error:
            self._close_descriptors()
            raise Damaged(f"an order for a checkpoint cannot be read: {error}") from None

    def items(self) -> list[Item]:
        """Return the items to be saved. Damaged."""
        memory, order = memoryview(self._map), self.order
        try:
            table = memory[order.table_at : order.table_at + order.table_bytes]
            slots = _decode_items(table)
        except msgspec.MsgspecError as error:
            raise Damaged(f"a snapshot's table cannot be read: {error}") from None
        if any(not 0 <= slot.start <= slot.start + slot.size <= len(memory) for slot in slots):
            raise Damaged("a snapshot's table names places outside of it")
        return [
            Item(
                name=slot.name,
                data=memory[slot.start : slot.start + slot.size],
                dtype=slot.dtype,
                shape=slot.shape,
                offset=slot.offset,
                whole=slot.whole,
            )
            for slot in slots
        ]

    def answer(self, answer: SaveAnswer) -> None:
        with contextlib.suppress(OSError):  # the worker has gone
            os.write(self._descriptors[1], msgspec.msgpack.encode(answer))
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []


def receive(channel: socket.socket) -> Delivery | None:
    """Wait for the next order; None when no process can send one any more. Damaged."""
    room = socket.CMSG_SPACE(_DESCRIPTORS * array.array("i").itemsize)
    packet, ancillary, _, _ = channel.recvmsg(PACKET_BYTES_MAX, room, socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    if not packet and not descriptors:
        return None
    return Delivery(packet, list(descriptors))
