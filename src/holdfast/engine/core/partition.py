"""Divides ranges and items into parts of about equal size, one for each of several. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def part_of(total: int, index: int, count: int, align: int = 1) -> tuple[int, int]:
    """Return where the part of number `index` of `count` starts and stops; the last may be short.

    Parts start at multiples of `align`, in the unit of `total`.
    """
    size = -(-total // count)
    size = -(-size // align) * align
    return min(index * size, total), min((index + 1) * size, total)


def share_out(sizes: Sequence[int], loads: list[int]) -> list[int]:
    """Give each of several items to the receiver with the least, the largest items first.

    `loads`: each receiver's load, to which items are added. Returns the receiver of each item.
    """
    found = [0] * len(sizes)
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        found[item] = loads.index(min(loads))
        loads[found[item]] += sizes[item]
    return found
