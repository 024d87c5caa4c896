"""Pieces in a node's memory: written, read after their worker's end, served, decoded."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.engine.core.errors import Damaged
from holdfast.engine.core.redundancy import KeptPieces, Piece, read_redundancy
from holdfast.engine.net import peer_stream
from holdfast.engine.net.tls import PeerIdentity
from holdfast.engine.state.memory import node_memory
from holdfast.engine.state.memory.arena import (
    FIRST,
    GRADIENT,
    HEAD,
    MAGIC,
    STATE,
    TABLE_BYTES,
    ArenaReading,
    PieceArena,
    PieceEntry,
    PieceShelf,
    Table,
    kept_pieces,
)
from holdfast.engine.state.memory.node_memory import Mending, NodeMemory, PieceReader, PieceServer
from holdfast.engine.state.memory.pieces import Image, PieceCoder

IDENTITY = PeerIdentity(key=b"k" * 32)
BUDGET = 1 << 20
ONE = PieceShelf(1, 3, ((0, 0), (2, 1)), 0)


def put(
    arena: PieceArena, kind: str, step: int, data: bytes, shelf: PieceShelf = ONE
) -> PieceEntry:
    """Put the same bytes there as each piece of a shelf."""
    count = len(shelf.pieces)
    start, room = arena.take(len(data) * count)
    for index in range(count):
        room[index * len(data) : (index + 1) * len(data)] = data
    digests = (xxhash.xxh3_128_digest(data),) * count
    whole = len(data) * 3
    entry = PieceEntry(kind, shelf.view, step, whole, len(data), start, digests, shelf.shard)
    arena.put(entry, shelf)
    return entry


@contextmanager
def file_of(budget: int = BUDGET) -> Iterator[tuple[PieceArena, ArenaReading]]:
    """Yield a file as its worker writes it, and as its agent reads it."""
    descriptor = os.memfd_create("test")
    reading = ArenaReading(descriptor)
    assert reading.table() is None  # it has no size yet
    yield PieceArena(descriptor, 5, budget), reading
    reading.close()


def kept(reading: ArenaReading) -> list[KeptPieces]:
    table = reading.table()
    return [] if table is None else kept_pieces([table])


# ---------------------------------------------------------------- one worker's file


def test_pieces_that_a_worker_puts_into_memory_are_listed_and_read() -> None:
    with file_of() as (arena, reading):
        assert kept(reading) == []
        entries = [put(arena, GRADIENT, step, b"%d" % step * 100) for step in range(3, 6)]
        put(arena, STATE, 3, b"s" * 50)
        arena.mark(1, 4)
        assert kept(reading) == [
            KeptPieces(
                view=1,
                worker=5,
                parts=3,
                pieces=(Piece(0, 0), Piece(2, 1)),
                states=(3,),
                first=3,
                end=6,
                committed=5,
            )
        ]
        assert bytes(reading.piece(entries[2], 1)) == b"5" * 100


def test_a_full_table_takes_nothing_more_but_marks() -> None:
    with file_of() as (arena, reading):
        table = Table(
            5, entries=tuple(PieceEntry(GRADIENT, 9, n, 1, 1, 0, ()) for n in range(40000))
        )
        arena._table = table
        with pytest.raises(MemoryError, match="40001 entries do not fit into the table of pieces"):
            put(arena, STATE, 3, b"s" * 50)
        assert arena._table == table
        arena.forget(1, 0)
        assert reading.table() == msgspec.structs.replace(table, forgotten=(1, 0))


def test_a_step_that_is_computed_again_takes_the_place_of_the_first_attempt() -> None:
    with file_of() as (arena, reading):
        put(arena, GRADIENT, 3, b"a" * 100)
        used = arena.used
        put(arena, GRADIENT, 3, b"b" * 100)
        table = reading.table()
        assert table is not None
        (entry,) = table.entries
        assert bytes(reading.piece(entry, 0)) == b"b" * 100
        assert arena.used == used


def test_pieces_older_than_a_protected_state_are_dropped() -> None:
    with file_of() as (arena, reading):
        put(arena, STATE, 0, b"old" * 9)
        for step in range(6):
            put(arena, GRADIENT, step, b"%d" % step * 100)
        put(arena, STATE, 4, b"new" * 9)
        arena.forget(1, 4)
        (found,) = kept(reading)
        assert (found.states, found.first, found.end) == ((4,), 4, 6)


def test_pieces_of_older_steps_that_a_later_view_keeps_stay() -> None:
    """The later view began further back, because a state that an older view protected was lost."""
    with file_of() as (arena, reading):
        put(arena, GRADIENT, 2, b"old" * 9)
        put(arena, GRADIENT, 2, b"new" * 9, PieceShelf(7, 3, ((0, 0),), 0))
        arena.forget(5, 100)
        (found,) = kept(reading)
        assert (found.view, found.first, found.end) == (7, 2, 3)


def test_a_table_that_was_not_written_to_its_end_does_not_count() -> None:
    with file_of() as (arena, reading):
        put(arena, GRADIENT, 3, b"a" * 100)
        put(arena, GRADIENT, 4, b"b" * 100)
        newest = arena._number % 2 * TABLE_BYTES + HEAD.size + 8
        arena._memory[newest] ^= 1
        (found,) = kept(reading)
        assert (found.first, found.end) == (3, 4)
        older = (arena._number + 1) % 2 * TABLE_BYTES + HEAD.size + 8
        arena._memory[older] ^= 1
        with pytest.raises(Damaged):
            reading.table()


def test_bytes_that_are_no_table_do_not_count_whatever_they_say() -> None:
    """A bit of a number may have flipped, or the script wrote there, with the right digest."""
    with file_of() as (arena, reading):
        put(arena, GRADIENT, 3, b"a" * 100)
        older = reading.table()
        put(arena, GRADIENT, 4, b"b" * 100)
        at = arena._number % 2 * TABLE_BYTES
        body = msgspec.msgpack.encode(Table(5, forgotten=(7, 7)))
        arena._memory[at + HEAD.size :][: len(body)] = body
        assert reading.table() == older
        arena._memory[at : at + HEAD.size] = HEAD.pack(
            MAGIC, arena._number, 4, xxhash.xxh3_128_digest(b"junk")
        )
        arena._memory[at + HEAD.size :][:4] = b"junk"
        assert reading.table() == older


def test_a_file_that_is_closed_takes_no_memory() -> None:
    descriptor = os.memfd_create("closed-twice")
    arena, reading = PieceArena(descriptor, 5, BUDGET), ArenaReading(os.dup(descriptor))
    put(arena, GRADIENT, 3, b"a" * 100)
    assert reading.table() is not None

    def maps() -> int:
        with open("/proc/self/maps", encoding="utf-8") as lines:
            return sum("/memfd:closed-twice" in line for line in lines)

    assert maps() == 2
    reading.close()
    assert maps() == 1
    os.close(descriptor)


def test_a_budget_is_kept() -> None:
    with file_of(budget=4096) as (arena, reading):
        put(arena, GRADIENT, 0, b"a" * 1500)
        with pytest.raises(MemoryError):
            put(arena, GRADIENT, 1, b"b" * 1500)
        arena.forget(1, 1)
        put(arena, GRADIENT, 1, b"b" * 1500)
        (found,) = kept(reading)
        assert (found.first, found.end) == (1, 2)


@pytest.mark.parametrize("seed", range(20))
def test_nothing_that_is_named_is_ever_overwritten(seed: int) -> None:
    rng = random.Random(seed)
    with file_of(budget=64 << 10) as (arena, reading):
        for step in range(200):
            try:
                put(arena, rng.choice((STATE, GRADIENT)), step, rng.randbytes(rng.randrange(9000)))
            except MemoryError:
                arena.forget(1, max(step - rng.randrange(5), 0))
            table = reading.table()
            assert table is not None
            for entry in table.entries:
                for index in range(len(entry.digests)):
                    reading.piece(entry, index)  # raises Damaged if its bytes have changed


WRITER = """
import sys
from holdfast.engine.state.memory.arena import GRADIENT, STATE, PieceEntry, PieceArena, PieceShelf
import xxhash
arena = PieceArena(int(sys.argv[1]), 5, 1 << 20)
step = 0
print("ready", flush=True)
while True:
    data = step.to_bytes(4, "big") * 5000
    start, room = arena.take(len(data))
    room[: len(data)] = data
    size, digest = len(data), xxhash.xxh3_128_digest(data)
    entry = PieceEntry(GRADIENT, 1, step, size, size, start, (digest,))
    arena.put(entry, PieceShelf(1, 1, ((0, 0),), 0))
    arena.mark(1, step)
    if step % 10 == 9:
        arena.forget(1, step - 3)
    step += 1
"""


@pytest.mark.parametrize("_", range(5))
def test_a_worker_that_is_killed_leaves_what_it_has_named(_: int) -> None:
    descriptor = os.memfd_create("test")
    popen = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(descriptor)],
        pass_fds=[descriptor],
        stdout=subprocess.PIPE,
    )
    assert popen.stdout is not None
    popen.stdout.readline()
    reading = ArenaReading(descriptor)
    while not kept(reading) or kept(reading)[0].end < 40:
        pass
    popen.send_signal(signal.SIGKILL)
    popen.wait()
    popen.stdout.close()
    table = reading.table()
    assert table is not None
    for entry in table.entries:
        assert bytes(reading.piece(entry, 0)) == entry.step.to_bytes(4, "big") * 5000
    (found,) = kept_pieces([table])
    assert found.end - found.first == len(table.entries) >= 4
    assert found.end - 1 <= found.committed <= found.end
    reading.close()


# ---------------------------------------------------------------- pieces


SETTINGS = st.sampled_from(["replicate:1", "replicate:2", "replicate:3", "rs:2+1", "rs:4+2"])


@settings(max_examples=60, deadline=None)
@given(
    text=SETTINGS,
    parts=st.integers(1, 7),
    buffers=st.lists(st.binary(max_size=70), min_size=1, max_size=5),
    data=st.data(),
)
def test_any_pieces_that_are_enough_give_the_image(
    text: str, parts: int, buffers: list[bytes], data: st.DataObject
) -> None:
    redundancy = read_redundancy(text)
    image = b"".join(buffers)
    coder = PieceCoder(redundancy, parts, len(image))
    room = coder.room().data
    for part in range(parts):
        numbers = range(redundancy.pieces)
        left = data.draw(st.permutations(numbers))[: redundancy.data]
        there = {}
        for number in left:
            piece = Piece(part, number)
            target = np.zeros(coder.size, np.uint8).data
            digest = coder.make(Image([memoryview(b) for b in buffers]), piece, target)
            assert digest == xxhash.xxh3_128_digest(target)
            place = coder.place(room, piece)
            if place is not None:
                place[:] = target
            there[number] = target
        coder.complete(room, part, there)
    assert bytes(room[: len(image)]) == image


# ---------------------------------------------------------------- nodes


class Nodes:
    """Nodes whose memory has the pieces that a member on each of them put there in view 1."""

    def __init__(self, text: str, count: int, shard: int = 0, procs: int = 1) -> None:
        self.shard = shard
        self.redundancy = read_redundancy(text)
        self.memories = [NodeMemory(procs=procs) for _ in range(count)]
        self.files: list[int] = []
        self.arenas: list[PieceArena] = []
        self.addresses = []
        for number, memory in enumerate(self.memories):
            file, descriptor = memory.open(number)
            self.files.append(file)
            self.arenas.append(PieceArena(descriptor, number, BUDGET))
            self.addresses.append(PieceServer(memory, IDENTITY).listen("127.0.0.1"))

    def keep(self, kind: str, step: int, image: bytes) -> None:
        count = len(self.arenas)
        coder = PieceCoder(self.redundancy, count, len(image))
        for node, arena in enumerate(self.arenas):
            pieces = [Piece((node - n) % count, n) for n in range(self.redundancy.pieces)]
            start, room = arena.take(coder.size * len(pieces))
            digests = [
                coder.make(
                    Image([memoryview(image)]), p, room[i * coder.size : (i + 1) * coder.size]
                )
                for i, p in enumerate(pieces)
            ]
            sizes = (len(image), coder.size, start)
            entry = PieceEntry(kind, 1, step, *sizes, tuple(digests), self.shard)
            plain = tuple((p.part, p.number) for p in pieces)
            arena.put(entry, PieceShelf(1, count, plain, 0, self.shard))

    def damage(self, node: int, piece: int = 0) -> None:
        """Flip a bit in a node's memory."""
        entry = self.arenas[node]._table.entries[0]
        self.arenas[node]._memory[entry.start + piece * entry.size] ^= 4

    def read(self, kind: str, step: int, without: tuple[int, ...] = ()) -> bytes:
        left = [a for node, a in enumerate(self.addresses) if node not in without]
        reader = PieceReader(left, IDENTITY, self.redundancy, self.shard)
        try:
            return bytes(reader.read(kind, 1, step))
        finally:
            reader.close()


IMAGE = bytes(range(251)) * 41


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("replicate:1", 1),
        ("replicate:2", 4),
        ("rs:2+1", 3),
        pytest.param("rs:4+2", 7, marks=pytest.mark.slow),
    ],
)
def test_an_image_is_put_together_while_enough_nodes_that_hold_pieces_are_left(
    text: str, count: int
) -> None:
    nodes = Nodes(text, count)
    nodes.keep(STATE, 8, IMAGE)
    for first in range(count):
        lost = tuple((first + n) % count for n in range(nodes.redundancy.parity))
        assert nodes.read(STATE, 8, lost) == IMAGE
    if count > nodes.redundancy.parity:
        with pytest.raises(Damaged):
            nodes.read(STATE, 8, tuple(range(nodes.redundancy.parity + 1)))
    with pytest.raises(Damaged, match="no node that is reached holds the gradient of step 8"):
        nodes.read(GRADIENT, 8)


def test_a_damaged_piece_is_never_used_and_not_told_of_any_more() -> None:
    nodes = Nodes("rs:2+1", 4)
    nodes.keep(STATE, 8, IMAGE)
    nodes.damage(2)
    assert nodes.memories[2].report()[0] != ()
    assert nodes.read(STATE, 8) == IMAGE
    assert nodes.memories[2].report()[0] == ()  # no reader counts on it a second time
    assert nodes.read(STATE, 8) == IMAGE
    with pytest.raises(Damaged):
        nodes.read(STATE, 8, without=(3,))


def lie(nodes: Nodes, node: int, index: int) -> None:
    """Make a node keep a wrong piece with its right digest, like a fault while it was made."""
    arena = nodes.arenas[node]
    (entry,) = arena._table.entries
    nodes.damage(node, index)
    start = entry.start + index * entry.size
    digests = list(entry.digests)
    digests[index] = xxhash.xxh3_128_digest(arena._memory[start : start + entry.size])
    taken = dict(arena._taken)
    arena.put(msgspec.structs.replace(entry, digests=tuple(digests)), arena._table.shelves[0])
    arena._taken = taken


def test_a_piece_that_was_wrong_from_the_beginning_is_found_by_two_others() -> None:
    nodes = Nodes("rs:2+3", 5)
    nodes.keep(STATE, 8, IMAGE)
    lie(nodes, 2, 2)  # node 0 keeps piece 0 of part 0, node 1 piece 1, node 2 piece 2
    for lost in range(5):
        assert nodes.read(STATE, 8, without=(lost,)) == IMAGE


def test_damaged_pieces_are_mended_from_those_of_other_nodes() -> None:
    nodes = Nodes("rs:2+1", 4)
    nodes.keep(STATE, 8, IMAGE)
    nodes.keep(GRADIENT, 8, IMAGE[::-1])
    mending = Mending(nodes.memories[2], IDENTITY, nodes.redundancy)
    assert mending.round(1e12, nodes.addresses) == []
    nodes.damage(2, 1)
    (line,) = mending.round(1e12, nodes.addresses)
    assert line == (
        "pieces of the state of step 8 were damaged in memory, and were made again from those of "
        "other nodes"
    )
    assert mending.round(1e12, nodes.addresses) == []
    assert nodes.memories[2].find_damaged() == []
    for lost in (0, 1, 3):  # the mended piece is needed then
        assert nodes.read(STATE, 8, without=(lost,)) == IMAGE
        assert nodes.read(GRADIENT, 8, without=(lost,)) == IMAGE[::-1]
    states = {each.states for each in nodes.memories[2].report()[0]}
    assert (8,) in states
    nodes.arenas[2].forget(1, 9)
    assert nodes.memories[2].report()[0] == ()
    assert len(nodes.memories[2]._files) == 1  # the file of the living worker


def test_a_slow_round_ends_when_it_is_asked_to() -> None:
    nodes = Nodes("rs:2+1", 4)
    nodes.keep(STATE, 8, IMAGE)
    mending = Mending(nodes.memories[2], IDENTITY, nodes.redundancy)
    round_ = threading.Thread(target=mending.round, args=(0.001, nodes.addresses), daemon=True)
    round_.start()  # it would take months
    mending.end()
    round_.join(60.0)
    assert not round_.is_alive()


def test_pieces_that_cannot_be_mended_are_reported_once() -> None:
    nodes = Nodes("replicate:1", 1)
    nodes.keep(STATE, 8, IMAGE)
    nodes.damage(0)
    mending = Mending(nodes.memories[0], IDENTITY, nodes.redundancy)
    (line,) = mending.round(1e12, nodes.addresses)
    assert "were damaged in memory, and cannot be made again" in line
    assert mending.round(1e12, nodes.addresses) == []


@pytest.mark.parametrize("lost", [0, 1])
def test_a_piece_that_was_wrong_from_the_beginning_is_noticed_by_one_other(lost: int) -> None:
    nodes = Nodes("rs:2+2", 4)
    nodes.keep(STATE, 8, IMAGE)
    lie(nodes, 2, 2)
    assert nodes.read(STATE, 8) == IMAGE  # none of its bytes are used
    with pytest.raises(Damaged, match="contradict"):
        nodes.read(STATE, 8, without=(lost,))


def test_pieces_of_the_dead_are_kept_until_something_newer_is_protected() -> None:
    memory = NodeMemory()
    numbers = []
    for worker in (1, 2):
        number, descriptor = memory.open(worker)
        numbers.append((number, PieceArena(descriptor, worker, BUDGET)))
    (dead, arena), (_, other) = numbers
    put(arena, STATE, 4, b"a" * 100)
    put(arena, GRADIENT, 4, b"g" * 100)
    memory.record_end(dead)
    assert [each.worker for each in memory.report()[0]] == [1]
    later = PieceShelf(2, 3, ((0, 0),), 0)
    put(other, STATE, 9, b"b" * 100, later)
    assert [each.worker for each in memory.report()[0]] == [1, 2]
    other.forget(2, 9)
    assert [each.worker for each in memory.report()[0]] == [2]
    assert len(memory._files) == 1
    os.close(descriptor)


def test_only_steps_that_all_processes_of_a_worker_keep_count() -> None:
    memory = NodeMemory(procs=2)
    arenas = [PieceArena(memory.open(5)[1], 5, BUDGET) for _ in range(2)]
    for step in (4, 5, 6):
        put(arenas[0], GRADIENT, step, b"g" * 100)
    put(arenas[0], STATE, 4, b"a" * 100)
    arenas[0].mark(1, 5)
    (found,) = memory.report()[0]
    assert (found.states, found.first, found.end) == ((), 0, 0)
    other = msgspec.structs.replace(ONE, shard=1)
    put(arenas[1], STATE, 4, b"b" * 100, other)
    for step in (4, 5):
        put(arenas[1], GRADIENT, step, b"h" * 100, other)
    (found,) = memory.report()[0]
    assert (found.worker, found.states, found.first, found.end) == (5, (4,), 4, 6)
    assert found.committed == 6, "one of them has it from the vote"
    assert memory.report()[1] == 7 * 2 * 100


def test_a_damaged_piece_of_a_shard_is_mended_as_that_of_the_shard() -> None:
    nodes = Nodes("rs:2+1", 3, shard=1, procs=2)
    nodes.keep(STATE, 8, IMAGE)
    other = b"another shard" * 10
    for node, memory in enumerate(nodes.memories):  # shard 0 keeps another state there
        arena = PieceArena(memory.open(node)[1], node, BUDGET)
        put(arena, STATE, 8, other, PieceShelf(1, 3, ((node, 0), ((node + 2) % 3, 1)), 0))
    nodes.damage(2)
    assert nodes.read(STATE, 8) == IMAGE
    assert [kept.states for kept in nodes.memories[2].report()[0]] == [()]
    mending = Mending(nodes.memories[2], IDENTITY, nodes.redundancy)
    assert any("made again" in line for line in mending.round(1e9, nodes.addresses))
    assert [kept.states for kept in nodes.memories[2].report()[0]] == [(8,)]
    assert nodes.read(STATE, 8, without=(0,)) == IMAGE


def test_strangers_and_nonsense_do_not_hold_up_a_server() -> None:
    nodes = Nodes("replicate:1", 1)
    nodes.keep(STATE, 8, IMAGE)
    with ExitStack() as stack:
        host, _, port = nodes.addresses[0].rpartition(":")
        silent = stack.enter_context(socket.create_connection((host, int(port))))
        silent.sendall(b"GET / HTTP/1.1\r\n\r\n" * 4)
        reader = PieceReader(nodes.addresses, PeerIdentity(key=b"x" * 32), nodes.redundancy)
        with pytest.raises(Damaged):
            reader.read(STATE, 1, 8)
        member = stack.enter_context(
            peer_stream.connect(nodes.addresses[0], IDENTITY, node_memory.MAGIC, (0, 0, 0))
        )
        member.sendall(peer_stream.LENGTH.pack(1 << 31))
        assert member.recv(1) == b""
        for wrong in (
            PieceEntry(STATE, 1, 8, 1, 1 << 40, FIRST, (b"",)),
            PieceEntry(STATE, 1, 8, 1, -1, -5, (b"",)),
        ):
            other = stack.enter_context(
                peer_stream.connect(nodes.addresses[0], IDENTITY, node_memory.MAGIC, (0, 0, 0))
            )
            peer_stream.send_message(other, node_memory.PieceRequest(nodes.files[0], wrong, 0))
            assert not peer_stream.receive_message(other, node_memory.PieceAnswer).sound
        assert nodes.read(STATE, 8) == IMAGE
