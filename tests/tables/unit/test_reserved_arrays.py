"""Arrays with room for whole tables: only the parts that are used take memory."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import pytest
import torch

from holdfast.tables.row_memory import RESERVED_MIN, ReservedArrays, check_room

BIG = 1 << 26  # bytes; more than any other use in that time
ROWS = BIG // 16


def resident() -> int:
    """Return the number of bytes of memory that this process uses."""
    text = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8")
    return int(re.search(r"^Rss:\s+(\d+) kB", text, re.MULTILINE)[1]) << 10  # type: ignore[index]


def test_only_parts_that_are_written_take_memory_until_they_are_released() -> None:
    memory, before = ReservedArrays(), resident()
    array = memory.make(4 * ROWS, 4)
    assert resident() - before < BIG // 4
    array[ROWS : 2 * ROWS] = 1.0
    assert resident() - before > BIG * 3 // 4
    memory.release([array], range(ROWS, 2 * ROWS))
    assert resident() - before < BIG // 4
    array[ROWS : 2 * ROWS] = 2.0
    assert array[ROWS : 2 * ROWS].unique().tolist() == [2.0]
    assert not array[:ROWS].any()
    assert not array[2 * ROWS :].any()


@pytest.mark.parametrize("width", [0, 1, 3])
def test_the_rows_next_to_a_part_that_is_released_stay(width: int) -> None:
    count = RESERVED_MIN  # elements of at least 4 bytes each
    memory = ReservedArrays()
    array = memory.make(count, width, torch.int32)
    array += 7
    part = range(1001, count - 1001)
    memory.release([array], part)
    assert bool((array[: part.start] == 7).all())
    assert bool((array[part.stop :] == 7).all())
    page = mmap.PAGESIZE // 4
    assert not array[part.start + page : part.stop - page].any()


def test_arrays_that_are_small_or_used_as_a_whole_are_plain_ones() -> None:
    for memory, count in ((ReservedArrays(), 100), (ReservedArrays(whole=True), RESERVED_MIN)):
        array = memory.make(count, 2)
        assert array.shape == (count, 2)
        assert not array.any()
        array += 1.0
        memory.release([array], range(count))
        assert bool(array.all()), "there is nothing to give back"


def test_more_than_a_machine_can_have_is_refused_before_it_is_used() -> None:
    check_room(1 << 20)
    with pytest.raises(RuntimeError):
        check_room(1 << 60)
