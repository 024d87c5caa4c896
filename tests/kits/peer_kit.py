"""A network of threads whose members may use their open connections only, and count messages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence

from holdfast.engine.core import tree
from holdfast.engine.train.exchange.layout import Layout
from holdfast.engine.train.exchange.seam import Message, Pending
from holdfast.engine.train.step.reduction import Operation, advance_all
from holdfast.lab.contracts.memory_transport import MemoryNetwork, MemoryTransport
from holdfast.lab.contracts.transports import SharedRendezvous
from mailboxes import together


class OpenConnections(MemoryTransport):
    """Refuses messages to members that are not `peers`, and records the messages sent."""

    def __init__(self, network: MemoryNetwork, rank: int, peers: Collection[int]) -> None:
        super().__init__(network, b"%d" % rank)
        self.peers = peers
        self.sent: list[tuple[int, int]] = []  # peers, and sizes in bytes

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], tag: int, sent_us: int = 0
    ) -> Pending:
        strangers = {peer for peer, _ in (*sends, *receives)} - set(self.peers)
        assert not strangers, f"{strangers} are not among the peers {set(self.peers)}"
        assert all(tensor.numel() for _, tensor in (*sends, *receives)), "an empty message"
        self.sent += [(peer, tensor.nbytes) for peer, tensor in sends]
        return super().exchange(sends, receives, tag, sent_us)

    @property
    def sent_bytes(self) -> int:
        return sum(size for _, size in self.sent)


def lay_out(hosts: Sequence[int], size: int) -> list[Layout]:
    """Return the layout of each of `size` members. `hosts`: by virtual rank."""
    vranks = len(hosts)
    hosted = tuple(tuple(v for v in range(vranks) if hosts[v] == r) for r in range(size))
    nodes = tuple(tree.maximal_nodes(each, vranks) for each in hosted)
    return [Layout(rank, size, vranks, hosted, nodes, tuple(hosts)) for rank in range(size)]


def connect(layouts: Sequence[Layout], *, all_open: bool = False) -> list[OpenConnections]:
    """Return a transport for each member, with the connections of a view's beginning."""
    network, addresses, size = MemoryNetwork(), dict[str, bytes](), len(layouts)
    everyone = frozenset(range(size))
    found = [OpenConnections(network, x.rank, everyone if all_open else x.peers) for x in layouts]

    def open_one(rank: int) -> None:
        found[rank].open(rank, size, SharedRendezvous(addresses, "kit", rank, threading.Event()))

    assert together(*[lambda r=r: open_one(r) for r in range(size)]) == []
    return found


def complete_all(
    operations: Sequence[Sequence[Operation]], transports: Sequence[OpenConnections]
) -> None:
    """Complete the operations of all members at the same time, as engines do."""

    def complete(mine: Sequence[Operation], transport: OpenConnections) -> None:
        try:
            for each in mine:
                each.begin(transport)
            left = list(mine)
            while left:
                left = advance_all(left, transport)
            for each in mine:
                each.finish()
        except BaseException:
            transport.abort()  # the other members need not wait
            raise

    pairs = zip(operations, transports, strict=True)
    actions: list[Callable[[], None]] = [lambda m=m, t=t: complete(m, t) for m, t in pairs]
    errors = together(*actions)
    if errors:
        raise errors[0]
    boxes = transports[0]._group.boxes
    assert not any(boxes.values()), "a message that no member has received"
