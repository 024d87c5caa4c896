"""The erasure codes against a naive oracle: encoding, repair, updates, and pieces that lie."""

from __future__ import annotations

import mmap
import os
import random
import threading
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.engine.core.errors import Damaged, InvariantError, UserError
from holdfast.engine.state.coding import reed_solomon
from holdfast.engine.state.coding.reed_solomon import BLOCK_BYTES, ReedSolomon

try:
    ReedSolomon(2, 1)
except UserError as error:
    pytest.skip(str(error), allow_module_level=True)

SHAPES = [(1, 1), (2, 1), (4, 2), (3, 4), (10, 6), (12, 2)]  # data and parity pieces


def times(a: int, b: int) -> int:
    """Multiply in GF(2^8) with ISA-L's polynomial, bit by bit."""
    product = 0
    while b:
        product ^= a if b & 1 else 0
        a = (a << 1) ^ (0x11D if a & 0x80 else 0)
        b >>= 1
    return product


def inverse(a: int) -> int:
    return next(b for b in range(1, 256) if times(a, b) == 1)


def naive_parity(data: list[bytes], m: int) -> list[bytes]:
    """Compute the Cauchy code by definition: row i, column j of the parity is 1 / ((k + i) ^ j)."""
    k = len(data)
    rows = [[inverse((k + i) ^ j) for j in range(k)] for i in range(m)]
    parity = []
    for row in rows:
        piece = bytearray(len(data[0]))
        for factor, source in zip(row, data, strict=True):
            for at, byte in enumerate(source):
                piece[at] ^= times(factor, byte)
        parity.append(bytes(piece))
    return parity


def pieces_of(data: Iterable[bytes]) -> list[memoryview]:
    return [memoryview(bytearray(piece)) for piece in data]


def coded(code: ReedSolomon, size: int, seed: int) -> list[memoryview]:
    """Return all pieces of random data."""
    source = pieces_of(random.Random(seed).randbytes(size) for _ in range(code.k))
    parity = pieces_of([bytes(size)] * code.m)
    code.encode(source, parity)
    return [*source, *parity]


# ---------------------------------------------------------------- the field


@given(a=st.integers(0, 255), b=st.integers(0, 255))
def test_products_are_those_of_the_definition(a: int, b: int) -> None:
    assert reed_solomon.products()[a, b] == times(a, b)
    assert a == 0 or times(a, reed_solomon.inverse(a)) == 1


@given(st.data())
@settings(deadline=None)
def test_the_left_null_space_is_orthogonal_and_complete(data: st.DataObject) -> None:
    k, n = data.draw(st.integers(1, 6)), data.draw(st.integers(0, 6))
    generator = np.random.default_rng(data.draw(st.integers(0, 1000)))
    columns = generator.integers(0, 256, (k, n), np.uint8)
    if n > 1 and data.draw(st.booleans()):
        columns[:, 0] = columns[:, 1]
    rows = reed_solomon.left_null_space(columns)
    assert not reed_solomon.multiply(rows, columns).any()
    beyond = reed_solomon.left_null_space(np.ascontiguousarray(rows.T))
    assert len(rows) + len(beyond) == k  # the rows are independent
    # No other vector is orthogonal: the rows span all vectors outside the span of the columns.
    assert len(reed_solomon.left_null_space(np.concatenate([columns, rows.T], axis=1))) in range(k)


# ---------------------------------------------------------------- the code


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_the_code_is_the_naive_one_and_any_k_pieces_give_the_rest(data: st.DataObject) -> None:
    k, m = data.draw(st.integers(1, 6)), data.draw(st.integers(0, 3))
    size = data.draw(st.integers(1, 40))
    source = [data.draw(st.binary(min_size=size, max_size=size)) for _ in range(k)]
    code, parity = ReedSolomon(k, m), pieces_of([bytes(size)] * m)
    code.encode(pieces_of(source), parity)
    assert [bytes(piece) for piece in parity] == naive_parity(source, m)
    every = pieces_of([*source, *map(bytes, parity)])
    for number, piece in enumerate(every):
        alone = memoryview(bytearray(size))
        code.encode_piece(number, pieces_of(source), alone)
        assert alone == piece
    lost = data.draw(st.lists(st.integers(0, k + m - 1), max_size=m, unique=True))
    wanted = {i: memoryview(bytearray(size)) for i in lost}
    code.rebuild({i: p for i, p in enumerate(every) if i not in lost}, wanted)
    assert all(wanted[i] == every[i] for i in lost)


def test_the_largest_code_restores_as_many_pieces_as_it_may_lose() -> None:
    code = ReedSolomon(200, 56)
    every = coded(code, 50, 1)
    lost = random.Random(2).sample(range(256), 56)
    wanted = {i: memoryview(bytearray(50)) for i in lost}
    code.rebuild({i: p for i, p in enumerate(every) if i not in lost}, wanted)
    assert all(wanted[i] == every[i] for i in lost)


@pytest.mark.parametrize(("k", "m"), SHAPES)
def test_parity_follows_a_change_by_its_difference(k: int, m: int) -> None:
    code, rng = ReedSolomon(k, m), random.Random(k)
    every = coded(code, 100, k)
    for _ in range(3):
        changed = rng.randrange(k)
        new = rng.randbytes(100)
        delta = bytes(a ^ b for a, b in zip(every[changed], new, strict=True))
        code.update(changed, memoryview(delta), every[k:])
        every[changed][:] = new
        should = pieces_of([bytes(100)] * m)
        code.encode(every[:k], should)
        assert should == every[k:]


def test_misuse_of_the_code_is_refused() -> None:
    for k, m in ((0, 1), (1, -1), (200, 57)):
        with pytest.raises(UserError, match="pieces"):
            ReedSolomon(k, m)
    code = ReedSolomon(2, 1)
    with pytest.raises(InvariantError, match="different lengths"):
        code.encode(pieces_of([b"ab", b"a"]), pieces_of([b"xx"]))
    with pytest.raises(InvariantError, match="too few"):
        code.rebuild({0: memoryview(bytearray(2))}, {1: memoryview(bytearray(2))})
    with pytest.raises(InvariantError, match="read-only"):
        code.encode(pieces_of([b"ab", b"ab"]), [memoryview(b"xx")])
    with pytest.raises(InvariantError, match="different lengths"):
        code.update(0, memoryview(b"abc"), pieces_of([b"xx"]))
    with pytest.raises(InvariantError, match="different lengths"):
        code.encode_piece(0, pieces_of([b"ab", b"ab"]), memoryview(bytearray(1)))


def test_pieces_in_shared_memory_are_used_where_they_lie() -> None:
    code, size = ReedSolomon(2, 1), 1 << 16
    descriptor = os.memfd_create("pieces")
    os.truncate(descriptor, 3 * size)
    every = memoryview(mmap.mmap(descriptor, 3 * size))
    every[: 2 * size] = random.Random(1).randbytes(2 * size)
    read_only = memoryview(mmap.mmap(descriptor, 3 * size, prot=mmap.PROT_READ))
    code.encode([read_only[:size], read_only[size : 2 * size]], [every[2 * size :]])
    found = memoryview(bytearray(size))
    code.rebuild({1: read_only[size : 2 * size], 2: read_only[2 * size :]}, {0: found})
    assert found == every[:size]


def test_python_goes_on_while_pieces_are_computed() -> None:
    code = ReedSolomon(8, 4)
    data, parity = pieces_of([bytes(4 << 20)] * 8), pieces_of([bytes(4 << 20)] * 4)
    started, ended, seen = threading.Event(), threading.Event(), 0

    def work() -> None:
        started.set()
        for _ in range(20):
            code.encode(data, parity)
        ended.set()

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    while not ended.is_set():  # this loop could not run during a call that keeps the lock
        seen += 1
    thread.join()
    assert seen > 1000


# ---------------------------------------------------------------- pieces that lie


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_wrong_pieces_are_found_whatever_is_wrong_with_them(data: st.DataObject) -> None:
    k, m = data.draw(st.sampled_from(SHAPES))
    code = ReedSolomon(k, m)
    every = coded(code, 64, data.draw(st.integers(0, 99)))
    lost = data.draw(st.lists(st.integers(0, k + m - 1), max_size=m - 1, unique=True))
    there = {i: piece for i, piece in enumerate(every) if i not in lost}
    most = (len(there) - k) // 2
    wrong = data.draw(st.lists(st.sampled_from(sorted(there)), max_size=most, unique=True))
    alike = data.draw(st.booleans())  # errors that depend on each other are harder
    flips = st.tuples(st.integers(0, 63), st.integers(1, 255))
    shared = data.draw(st.lists(flips, min_size=1, max_size=5, unique_by=lambda f: f[0]))
    for number in wrong:
        mine = shared
        if not alike:
            mine = data.draw(st.lists(flips, min_size=1, max_size=5, unique_by=lambda f: f[0]))
        for at, bits in mine:
            there[number][at] ^= bits
    assert code.find_wrong(there) == tuple(sorted(wrong))


@pytest.mark.parametrize(("k", "m"), SHAPES)
def test_pieces_full_of_noise_are_found_until_one_is_left_to_check_by(k: int, m: int) -> None:
    code, rng = ReedSolomon(k, m), random.Random(m)
    for count in range(m + 2):
        every = coded(code, 5000, count)
        wrong = sorted(rng.sample(range(k + m), min(count, k + m)))
        for number in wrong:
            every[number][:] = rng.randbytes(5000)
        if count < m:
            assert code.find_wrong(dict(enumerate(every))) == tuple(wrong)
        else:
            with pytest.raises(Damaged, match="cannot be told from the right ones"):
                code.find_wrong(dict(enumerate(every)))


def test_one_flipped_bit_far_into_large_pieces_is_found() -> None:
    code, size = ReedSolomon(4, 2), 3 * BLOCK_BYTES + 5
    every = coded(code, size, 3)
    every[5][size - 1] ^= 1
    assert code.find_wrong(dict(enumerate(every))) == (5,)
    every[5][size - 1] ^= 1
    every[1][2 * BLOCK_BYTES] ^= 0x80
    assert code.find_wrong(dict(enumerate(every))) == (1,)


def test_wrong_pieces_are_not_looked_for_among_too_few() -> None:
    code = ReedSolomon(3, 2)
    every = dict(enumerate(coded(code, 10, 1)))
    with pytest.raises(InvariantError, match="too few"):
        code.find_wrong({i: every[i] for i in (0, 4)})
    assert code.find_wrong({i: every[i] for i in (0, 2, 4)}) == ()  # no piece is left for a check
