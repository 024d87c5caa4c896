"""Defines the canonical binary tree over virtual ranks, the one order of every sum.

Level by level, vrank i is combined with i+1, then i+2, then i+4 and so on, left operand first. A
node is (start, width): the sum over vranks start .. start+width-1, cut off at V. Because every sum
follows this tree, it does not depend on which worker computed which leaf.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

Node = tuple[int, int]
T = TypeVar("T")


def root(vranks: int) -> Node:
    """Return the node that covers all of 0 .. vranks-1 (its width is a power of two)."""
    width = 1
    while width < vranks:
        width *= 2
    return (0, width)


def parent(node: Node) -> Node:
    start, width = node
    return (start - start % (2 * width), 2 * width)


def children(node: Node) -> tuple[Node, Node]:
    start, width = node
    return (start, width // 2), (start + width // 2, width // 2)


def maximal_nodes(leaves: Iterable[int], vranks: int) -> tuple[Node, ...]:
    """Return the fewest nodes that together cover exactly `leaves`, in order of their start.

    A node whose right half lies wholly beyond V counts as covered when its left half is.
    """
    found: list[Node] = []
    starts = sorted(leaves)  # where the nodes of this width start
    width = 1
    while width < vranks and starts:
        whole: list[int] = []
        for start in starts:
            if start % (2 * width) == 0:
                right = bisect.bisect_left(starts, start + width)
                beside = right < len(starts) and starts[right] == start + width
                whole += [start] if beside or start + width >= vranks else []
        taken = {s for start in whole for s in (start, start + width)}
        found += [(start, width) for start in starts if start not in taken]
        starts, width = whole, width * 2
    return tuple(sorted([*found, *((start, width) for start in starts)]))


def find_host_nodes(hosts: Sequence[int], size: int) -> list[tuple[Node, ...]]:
    """Return the maximal nodes of each of `size` hosts. `hosts`: the number of each leaf's."""
    leaves: list[list[int]] = [[] for _ in range(size)]
    for leaf, host in enumerate(hosts):
        leaves[host].append(leaf)
    return [maximal_nodes(each, len(hosts)) for each in leaves]


def fold(values: dict[Node, T], vranks: int, add: Callable[[T, T], T]) -> T:
    """Combine `values`, whose nodes must tile 0 .. V-1, along the tree; left operand first.

    Raises KeyError when a leaf is missing: an incomplete sum can never pass for a whole one.
    """

    def value(node: Node) -> T:
        if node in values:
            return values[node]
        if node[1] == 1:
            raise KeyError(f"virtual rank {node[0]} is missing from the sum")
        left, right = children(node)
        if right[0] >= vranks:
            return value(left)
        return add(value(left), value(right))

    return value(root(vranks))


def held_at_once(values: int, vranks: int) -> int:
    """Return the most sums that `fold` holds at once for `values` values; none is written to."""
    return min(values // 2, root(vranks)[1].bit_length() - 1)


def merge(
    values: dict[Node, T], node: Node, value: T, vranks: int, add: Callable[[T, T], T]
) -> None:
    """Put one node's value into `values` and combine it upwards as far as siblings allow.

    `add(left, right)` may reuse either operand. Keeps at most O(log V) nodes for contiguous leaves.
    """
    top = root(vranks)
    while node != top:
        up = parent(node)
        left, right = children(up)
        if node == left:
            if right[0] >= vranks:
                node = up
                continue
            if right not in values:
                break
            value = add(value, values.pop(right))
        else:
            if left not in values:
                break
            value = add(values.pop(left), value)
        node = up
    values[node] = value
