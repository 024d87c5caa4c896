"""Cuts a range into contiguous parts of about equal size, one for each of several. Pure."""

from __future__ import annotations


def part_of(total: int, index: int, count: int, align: int = 1) -> tuple[int, int]:
    """Return where the part of number `index` of `count` starts and stops; the last may be short.

    Parts start at multiples of `align`, in the unit of `total`.
    """
    size = -(-total // count)
    size = -(-size // align) * align
    return min(index * size, total), min((index + 1) * size, total)
