"""Plans a sum along the canonical tree, with O(log N) messages for each of N workers. Pure.

Every tree node's sum is computed by the hosts of that node alone. Each of them owns one piece of
it, all pieces are of one size, and a worker's piece of a node lies where its piece of the node's
child lay, as far as sizes allow. On the way up, the owner of a piece receives it from the owners in
both children, and adds the two. On the way down, finished sums travel back along the same ways,
until every worker has all of them. As each addition is one of the canonical tree, the bits do not
depend on the hosts. Where each of N workers hosts one block of virtual ranks, a worker talks to
about log2 N workers and sends 2 (1 - 1/N) times the size of the sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from holdfast.engine.core import tree
from holdfast.engine.core.tree import Node

WHOLE = (Fraction(0), Fraction(1))
Part = tuple[Fraction, Fraction]  # where a part of a sum starts and stops; the sum goes from 0 to 1


@dataclass(frozen=True, slots=True)
class Message:
    """Describes a part of a node's sum that travels to, or comes from, the worker `peer`."""

    peer: int
    node: Node
    part: Part


@dataclass(frozen=True, slots=True)
class Addition:
    """Describes this worker's piece of a node's sum; `left` and `right`: the node's children."""

    node: Node
    left: Node
    right: Node
    part: Part


@dataclass(frozen=True, slots=True)
class Level:
    """Describes one exchange: its messages, and the additions that follow."""

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    additions: tuple[Addition, ...] = ()


@dataclass(frozen=True, slots=True)
class SumPlan:
    """Describes one worker's part in every sum of a view.

    `up`: the exchanges of partial sums, from the leaves on. `own`: this worker's part of the root's
    sum, and the node that holds it, if it has one. `down`: the exchanges of finished sums.
    """

    up: tuple[Level, ...]
    down: tuple[Level, ...]
    own: tuple[Node, Part] | None

    @property
    def peers(self) -> tuple[int, ...]:
        """Return the workers with which this one exchanges, by rank."""
        levels = (*self.up, *self.down)
        return tuple(sorted({m.peer for each in levels for m in (*each.sends, *each.receives)}))


@dataclass(frozen=True, slots=True)
class SharedSum:
    """Describes the sum of a tree node with several hosts; `left` and `right`: its children.

    The node's pieces, which are of one size, are computed by `hosts`, in this order.
    """

    node: Node
    left: Node
    right: Node
    hosts: tuple[int, ...]


class _Hosts:
    """Orders the hosts of all tree nodes; a node's pieces belong to its hosts in this order.

    `turned`: if a node has several hosts, each piece moves on by this number of hosts.
    """

    def __init__(self, nodes: Sequence[Sequence[Node]], vranks: int, turned: int = 0) -> None:
        self._vranks = vranks
        self._order = {node: [rank] for rank, each in enumerate(nodes) for node in each}
        self._index = {node: {hosts[0]: 0} for node, hosts in self._order.items()}
        joined: list[tuple[Node, Node, Node]] = []
        self.root = self._visit(tree.root(vranks), joined)
        for node, _, _ in joined if turned else ():
            hosts, count = self._order[node], len(self._order[node])
            self._order[node] = [hosts[(i + turned) % count] for i in range(count)]
            self._index[node] = {rank: i for i, rank in enumerate(self._order[node])}
        found = [SharedSum(*each, tuple(self._order[each[0]])) for each in joined]
        # The nodes with several hosts, narrow nodes first. `shared_by` has the same nodes by host.
        self.shared = sorted(found, key=lambda each: each.node[1])
        self.shared_by: dict[int, list[SharedSum]] = {rank: [] for rank in range(len(nodes))}
        for each in self.shared:
            for rank in each.hosts:
                self.shared_by[rank].append(each)

    def _visit(self, node: Node, joined: list[tuple[Node, Node, Node]]) -> Node:
        """Order the hosts of a node and of all below it; return the node that holds its sum.

        Nodes with several hosts are added to `joined`, with their children.
        """
        if node in self._order:
            return node
        left, right = tree.children(node)
        left = self._visit(left, joined)
        if right[0] >= self._vranks:
            return left
        right = self._visit(right, joined)
        places: dict[int, tuple[float, int, int]] = {}
        for side, child in enumerate((left, right)):
            hosts = self._order[child]
            for i, rank in enumerate(hosts):
                if rank not in places:
                    # Equal quotients are equal floats, on any machine.
                    places[rank] = (2 * i + 1) / (2 * len(hosts)), side, rank
        self._order[node] = [rank for _, _, rank in sorted(places.values())]
        self._index[node] = {rank: i for i, rank in enumerate(self._order[node])}
        joined.append((node, left, right))
        return node

    def of(self, node: Node) -> Sequence[int]:
        """Return the hosts of a node, in the order of their pieces."""
        return self._order[node]

    def piece(self, node: Node, rank: int) -> Part | None:
        """Return the piece of a node's sum that a worker owns; None if it hosts no part of it."""
        i, count = self._index[node].get(rank), len(self._index[node])
        return None if i is None else cut_evenly(i, count)

    def owners(self, node: Node, part: Part | None) -> Iterator[tuple[int, Part]]:
        """Return the owners of a part of a node's sum, with the elements of each within it."""
        if part is None:
            return
        hosts = self._order[node]
        count = len(hosts)
        for i in range(math.floor(part[0] * count), math.ceil(part[1] * count)):
            start, stop = cut_evenly(i, count)
            yield hosts[i], (max(part[0], start), min(part[1], stop))


class SumPlans:
    """Plans the parts of all workers. `nodes`: the maximal nodes that each worker hosts.

    `turned`: each piece is computed by another host of its node, this number of places later.
    """

    def __init__(self, nodes: Sequence[Sequence[Node]], vranks: int, turned: int = 0) -> None:
        self._hosts = hosts = _Hosts(nodes, vranks, turned)
        at_root = hosts.of(hosts.root)
        idle = [each for each, hosted in enumerate(nodes) if not hosted]
        # By giver: the workers that host no task. They receive the whole sum at last.
        self._tail: dict[int, list[int]] = {}
        self._giver: dict[int, int] = {}
        for i, each in enumerate(idle):
            self._giver[each] = at_root[i % len(at_root)]
            self._tail.setdefault(self._giver[each], []).append(each)

    def of(self, rank: int) -> SumPlan:
        """Return the part of one worker."""
        hosts = self._hosts
        here = hosts.shared_by[rank]
        widths = sorted({each.node[1] for each in here})
        up = [_plan_up(hosts, [each for each in here if each.node[1] == w], rank) for w in widths]
        down = []
        for width in reversed(widths):
            down.append(_plan_down(hosts, [each for each in here if each.node[1] == width], rank))
        givers = [self._giver[rank]] if rank in self._giver else []
        sends = tuple(Message(to, hosts.root, WHOLE) for to in self._tail.get(rank, ()))
        receives = tuple(Message(giver, hosts.root, WHOLE) for giver in givers)
        if sends or receives:
            down.append(Level(sends, receives))
        piece = hosts.piece(hosts.root, rank)
        own = None if piece is None else (hosts.root, piece)
        levels = [each for each in down if each.sends or each.receives]
        return SumPlan(up=tuple(up), down=tuple(levels), own=own)


def plan_sum(nodes: Sequence[Sequence[Node]], vranks: int, rank: int, turned: int = 0) -> SumPlan:
    """Plan the part of the worker `rank`, as SumPlans does."""
    return SumPlans(nodes, vranks, turned).of(rank)


def find_shared_sums(
    nodes: Sequence[Sequence[Node]], vranks: int, turned: int = 0
) -> list[SharedSum]:
    """Return the sums that several workers compute, in the order of each worker's additions."""
    return _Hosts(nodes, vranks, turned).shared


def plan_flat_sum(
    nodes: Sequence[Sequence[Node]], vranks: int, rank: int, turned: int = 0
) -> SumPlan:
    """Plan a sum where each worker computes one piece from the partial sums of all workers.

    Each worker exchanges with all. `turned`: each worker's piece is this number of ranks later.
    """
    hosts, size = _Hosts(nodes, vranks), len(nodes)
    if not hosts.shared:  # one worker has all partial sums
        return plan_sum(nodes, vranks, rank)
    pieces = [cut_evenly((each + turned) % size, size) for each in range(size)]
    mine, peers = pieces[rank], [(rank + i) % size for i in range(1, size)]
    host = {node: each for each, hosted in enumerate(nodes) for node in hosted}
    children = [child for each in hosts.shared for child in (each.left, each.right)]
    parts = [(node, host[node]) for node in children if node in host]  # in the order of additions
    up = Level(
        tuple(Message(p, node, pieces[p]) for p in peers for node, by in parts if by == rank),
        tuple(Message(by, node, mine) for node, by in parts if by != rank),
        tuple(Addition(each.node, each.left, each.right, mine) for each in hosts.shared),
    )
    down = Level(
        tuple(Message(peer, hosts.root, mine) for peer in peers),
        tuple(Message(peer, hosts.root, pieces[peer]) for peer in peers),
    )
    return SumPlan(up=(up,), down=(down,), own=(hosts.root, mine))


def _plan_up(hosts: _Hosts, shared: Sequence[SharedSum], rank: int) -> Level:
    """Plan the exchange before the sums of nodes of one width, which `rank` helps to compute."""
    sends: list[Message] = []
    receives: list[Message] = []
    additions: list[Addition] = []
    for each in shared:
        node, mine = each.node, hosts.piece(each.node, rank)
        assert mine is not None, "only its hosts compute a node's sum"
        additions.append(Addition(node, each.left, each.right, mine))
        for child in (each.left, each.right):
            to = hosts.owners(node, hosts.piece(child, rank))
            sends += [Message(peer, child, part) for peer, part in to if peer != rank]
            come = hosts.owners(child, mine)
            receives += [Message(peer, child, part) for peer, part in come if peer != rank]
    return Level(tuple(sends), tuple(receives), tuple(additions))


def _plan_down(hosts: _Hosts, shared: Sequence[SharedSum], rank: int) -> Level:
    """Plan the exchange that brings finished sums from nodes of one width to their children.

    A worker that needs a part for several nodes receives it more than once.
    """
    sends: list[Message] = []
    receives: list[Message] = []
    for each in shared:
        node, mine = each.node, hosts.piece(each.node, rank)
        for child in (each.left, each.right):
            for peer, part in hosts.owners(child, mine):
                if peer != rank:
                    missing = subtract(part, hosts.piece(node, peer))
                    sends += [Message(peer, node, gap) for gap in missing]
            for peer, part in hosts.owners(node, hosts.piece(child, rank)):
                if peer != rank:
                    receives += [Message(peer, node, gap) for gap in subtract(part, mine)]
    return Level(tuple(sends), tuple(receives))


def cut_evenly(piece: int, count: int) -> Part:
    """Return one of `count` equal pieces of a sum."""
    return Fraction(piece, count), Fraction(piece + 1, count)


def have_common_elements(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Return whether two pieces have common elements: each its number, and how many there are."""
    return overlap(cut_evenly(*one), cut_evenly(*other)) is not None


def overlap(one: Part, other: Part) -> Part | None:
    """Return the elements that are in both parts; None if there are none."""
    start, stop = max(one[0], other[0]), min(one[1], other[1])
    return (start, stop) if start < stop else None


def subtract(part: Part, held: Part | None) -> list[Part]:
    """Return a part without the elements of another one: none, one or two parts."""
    if held is None:
        return [part]
    before = overlap(part, (Fraction(0), held[0]))
    after = overlap(part, (held[1], Fraction(1)))
    return [each for each in (before, after) if each is not None]


def cut(part: Part, numel: int, align: int) -> slice:
    """Return a part of a sum as elements; pieces start at multiples of `align`."""
    units = -(-numel // align)
    ends = (bound.numerator * units // bound.denominator * align for bound in part)
    start, stop = (min(end, numel) for end in ends)
    return slice(start, stop)


def part_of(total: int, index: int, count: int, align: int = 1) -> tuple[int, int]:
    """Return where the part of number `index` of `count` starts and stops; the last may be short.

    Parts start at multiples of `align`, in the unit of `total`.
    """
    size = -(-total // count)
    size = -(-size // align) * align
    return min(index * size, total), min((index + 1) * size, total)
