"""Try out arithmetic and memory with numpy, in a process of its own.

The products have one exact result (core/exact_products.py), so a wrong bit is the machine's fault.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.engine.core.exact_products import WIDE, ExactProduct, digest_of
from holdfast.engine.host.checks_trials import ArithmeticSample, MemorySpeedSample
from holdfast.engine.host.findings import MIB

REPEATS_MIN, REPEATS_MAX = 3, 200
COPY_BYTES = 128 * MIB
THREADS_MAX = 16
PIECE = MIB // 8  # words filled and compared at a time, while they are in the cache
ROWS_SHOWN = 5
ODD = 0x9E3779B97F4A7C15  # any odd number: multiplying by it is reversible, so no two words agree

Matrix = NDArray[Any]


def operands(product: ExactProduct, dtype: Any) -> tuple[Matrix, Matrix]:
    left = np.frombuffer(product.left_entries(), np.int8).reshape(product.rows, product.inner)
    right = np.frombuffer(product.right_entries(), np.int8).reshape(product.inner, product.columns)
    return left.astype(dtype), right.astype(dtype)


def result_digest(result: Matrix) -> str:
    """Digest a result of whole numbers; a result with fractions, inf or nan gets another digest."""
    with np.errstate(invalid="ignore"):
        whole = result.astype("<i4")
    fraction = b"" if np.array_equal(whole, result) else b"fraction"
    return digest_of(whole.tobytes() + fraction)


def find_wrong_rows(product: ExactProduct, result: Matrix) -> list[int]:
    """Find the rows that cannot be right, comparing result @ x with left @ (right @ x).

    It computes with whole numbers only. A wrong row shows unless its errors cancel in this one sum
    (Freivalds' check).
    """
    left, right = operands(product, np.int64)
    x = np.arange(1, product.columns + 1, dtype=np.int64)
    expected = left @ (right @ x)
    with np.errstate(invalid="ignore"):
        whole = result.astype(np.int64)
    wrong = (whole @ x != expected) | ~np.isfinite(result).all(axis=1) | (whole != result).any(1)
    return [int(row) for row in np.flatnonzero(wrong)]


def describe_rows(rows: list[int], product: ExactProduct) -> str:
    shown = ", ".join(map(str, rows[:ROWS_SHOWN])) + (", ..." if len(rows) > ROWS_SHOWN else "")
    return f"{len(rows)} of {product.rows} rows ({shown})" if rows else "columns of one row moved"


def try_arithmetic(budget_s: float, multiply: Any = np.matmul) -> ArithmeticSample:
    """Multiply for `budget_s` seconds, and at least three times."""
    left, right = operands(WIDE, np.float32)
    out = np.empty((WIDE.rows, WIDE.columns), np.float32)
    times: list[float] = []
    wrong, where = 0, ""
    end = time.perf_counter() + budget_s
    while len(times) < REPEATS_MIN or (len(times) < REPEATS_MAX and time.perf_counter() < end):
        started = time.perf_counter()
        multiply(left, right, out=out)
        times.append(time.perf_counter() - started)
        if result_digest(out) != WIDE.digest:
            wrong += 1
            where = where or describe_rows(find_wrong_rows(WIDE, out), WIDE)
    return ArithmeticSample(
        device="processors (numpy)",
        repeats=len(times),
        wrong=wrong,
        where=where,
        operations_per_s=WIDE.operations / max(median(times), 1e-9),
    )


def try_memory(budget_s: float, available_bytes: int, threads: int) -> MemorySpeedSample:
    """Copy memory that was touched before, then write patterns and read them back."""
    size = max(1 * MIB, min(COPY_BYTES, available_bytes // 8)) // 8 * 8
    source = np.arange(size // 8, dtype=np.uint64)
    target = np.ones_like(source)
    rate = copy_rate(source, target, budget_s / 2, max(1, min(threads, THREADS_MAX)))
    end = time.perf_counter() + budget_s / 2
    wrong, where = 0, ""
    for pattern in (0, 1, 2):
        if pattern and time.perf_counter() > end:
            break
        write_pattern(target, pattern)
        count, first = check_pattern(target, pattern)
        wrong += count
        where = where or (f"first at byte {first} of the buffer" if count else "")
    return MemorySpeedSample(
        copied_per_s=rate, tested_bytes=int(target.nbytes), wrong_bytes=wrong, where=where
    )


def copy_rate(source: Matrix, target: Matrix, budget_s: float, threads: int) -> float:
    """Return the best of several passes, in bytes a second: load can only slow one down."""
    pieces = list(
        zip(np.array_split(source, threads), np.array_split(target, threads), strict=True)
    )
    best_s = float("inf")
    end = time.perf_counter() + budget_s
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(REPEATS_MAX):
            started = time.perf_counter()
            list(pool.map(lambda pair: np.copyto(pair[1], pair[0]), pieces))
            best_s = min(best_s, time.perf_counter() - started)
            if time.perf_counter() > end:
                break
    return float(target.nbytes / max(best_s, 1e-9))


def fill(words: Matrix, start: int, pattern: int) -> None:
    """Fill words by `pattern`: 0 alternating bits; 1 inverted ones; 2 a word for each place."""
    if pattern < 2:
        words[:] = np.uint64(0x5555555555555555 << pattern & 0xFFFFFFFFFFFFFFFF)
        return
    words[:] = np.arange(start, start + len(words), dtype=np.uint64)
    with np.errstate(over="ignore"):
        words *= np.uint64(ODD)


def write_pattern(words: Matrix, pattern: int) -> None:
    for start in range(0, len(words), PIECE):
        fill(words[start : start + PIECE], start, pattern)


def check_pattern(words: Matrix, pattern: int) -> tuple[int, int]:
    """Return the number of bytes that differ, and the position of the first one (-1: none)."""
    expected = np.empty(PIECE, np.uint64)
    wrong, first = 0, -1
    for start in range(0, len(words), PIECE):
        piece = words[start : start + PIECE]
        should = expected[: len(piece)]
        fill(should, start, pattern)
        if not np.array_equal(piece, should):
            differs = piece.view(np.uint8) != should.view(np.uint8)
            wrong += int(differs.sum())
            first = 8 * start + int(np.argmax(differs)) if first < 0 else first
    return wrong, first
