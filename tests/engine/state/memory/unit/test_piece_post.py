"""Processes of a worker put pieces into each other's memory, on other nodes."""

from __future__ import annotations

import os

import pytest
import xxhash

from holdfast.engine.core.errors import WorldError
from holdfast.engine.net.tls import PeerIdentity
from holdfast.engine.state.memory.arena import (
    GRADIENT,
    STATE,
    ArenaReading,
    PieceArena,
    PieceEntry,
    PieceShelf,
)
from holdfast.engine.state.memory.pieces import Parcel, PiecePost

IDENTITY = PeerIdentity(key=b"k" * 32)
BUDGET = 1 << 16


class Other:
    """Is a process on another node: the pieces that it receives are in its memory."""

    def __init__(self) -> None:
        descriptor = os.memfd_create("test")
        self.arena = PieceArena(descriptor, 4, BUDGET)
        self.reading = ArenaReading(descriptor)
        self.post = PiecePost(self.arena, IDENTITY)
        self.address = self.post.listen("127.0.0.1")

    def pieces(self, step: int) -> list[bytes]:
        table = self.reading.table()
        entries = [] if table is None else [e for e in table.entries if e.step == step]
        return [bytes(self.reading.piece(e, i)) for e in entries for i in range(len(e.digests))]


def parcel(step: int, pieces: list[bytes], kind: str = GRADIENT, shard: int = 1) -> Parcel:
    digests = tuple(xxhash.xxh3_128_digest(piece) for piece in pieces)
    size = len(pieces[0]) if pieces else 1
    entry = PieceEntry(kind, 9, step, 3 * size, size, 0, digests, shard)
    numbers = tuple((0, number) for number in range(len(pieces)))
    return Parcel(entry, PieceShelf(9, 1, numbers, 0, shard))


def sent(post: PiecePost, to: int, step: int, pieces: list[bytes], kind: str = GRADIENT) -> None:
    post.put([(to, parcel(step, pieces, kind), [memoryview(piece) for piece in pieces])])


@pytest.fixture
def met() -> tuple[PiecePost, list[Other]]:
    others = [Other(), Other()]
    sender = Other().post
    sender.meet({shard: other.address for shard, other in enumerate(others)})
    return sender, others


def test_pieces_are_there_once_they_are_sent(met: tuple[PiecePost, list[Other]]) -> None:
    sender, others = met
    sent(sender, 0, 5, [b"a" * 100, b"b" * 100])
    sent(sender, 1, 5, [b"c" * 100])
    sent(sender, 0, 6, [b"d" * 100], STATE)
    assert others[0].pieces(5) == [b"a" * 100, b"b" * 100]
    assert others[1].pieces(5) == [b"c" * 100]
    assert others[0].pieces(6) == [b"d" * 100]
    sent(sender, 0, 5, [b"e" * 100])  # an attempt that was made again
    assert others[0].pieces(5) == [b"e" * 100]


def test_a_commit_is_marked_for_all_shards(met: tuple[PiecePost, list[Other]]) -> None:
    sender, others = met
    for shard in (1, 2):
        piece = memoryview(b"a" * 10)
        sender.put([(0, parcel(5, [bytes(piece)], shard=shard), [piece])])
    others[0].arena.mark(9, 5)
    table = others[0].reading.table()
    assert table is not None
    assert [(shelf.shard, shelf.committed) for shelf in table.shelves] == [(1, 6), (2, 6)]


def test_pieces_that_do_not_fit_are_refused_and_the_connection_goes_on(
    met: tuple[PiecePost, list[Other]],
) -> None:
    sender, others = met
    with pytest.raises(MemoryError, match="do not fit"):
        sent(sender, 0, 5, [b"a" * 60_000, b"a" * 60_000])
    used = others[0].arena.used
    sent(sender, 0, 6, [b"b" * 100])
    assert others[0].pieces(6) == [b"b" * 100]
    assert used == 0


def test_a_damaged_piece_is_not_kept_and_others_are_still_sent(
    met: tuple[PiecePost, list[Other]],
) -> None:
    sender, others = met
    with pytest.raises(WorldError, match="arrived damaged"):
        sender.put([(0, parcel(5, [b"a" * 100]), [memoryview(b"x" * 100)])])
    assert (others[0].pieces(5), others[0].arena.used) == ([], 0)
    sent(sender, 0, 6, [b"b" * 100])
    assert others[0].pieces(6) == [b"b" * 100]


def test_nonsense_is_refused(met: tuple[PiecePost, list[Other]]) -> None:
    sender, others = met
    with pytest.raises(WorldError, match="none that can be kept"):
        sent(sender, 0, 5, [b"a" * (BUDGET + 1)])
    assert others[0].arena.used == 0


def test_strangers_put_nothing_there(met: tuple[PiecePost, list[Other]]) -> None:
    _, others = met
    stranger = PiecePost(others[1].arena, PeerIdentity(key=b"s" * 32))
    stranger.meet({0: others[0].address})
    with pytest.raises((WorldError, OSError)):
        sent(stranger, 0, 5, [b"a" * 100])
    assert others[0].pieces(5) == []
