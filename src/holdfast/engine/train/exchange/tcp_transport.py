"""Carries host tensors over TCP connections of our own, which are proved before they are used.

A process has one listener, for all its groups. Members that exchange something have a connection,
or with TLS one for each direction (wires.py): those to a group's nearest members are opened with
the group, the rest when they are first needed. The lower rank opens them, and each side proves that
it has the job's peer key before any message is read (net/peer_listener.py). Strangers never reach
a group. To abort a group its connections are shut down, which frees all waiting threads on both
sides at once.
"""

from __future__ import annotations

import math
import os
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence

import torch

from holdfast.engine.core.errors import Aborted, HoldfastError, UserError
from holdfast.engine.net import peer_stream, tls
from holdfast.engine.net.peer_listener import PeerListener, open_listener
from holdfast.engine.net.tls import PeerIdentity, split_address
from holdfast.engine.train.exchange.group_link import GroupLink
from holdfast.engine.train.exchange.group_network import Expected, GroupNetwork, Leaving
from holdfast.engine.train.exchange.seam import Message, Pending, Rendezvous, Waits
from holdfast.engine.train.exchange.tensor_bytes import memory_of
from holdfast.engine.train.exchange.wires import (
    PlainWire,
    TlsWire,
    Wire,
    has_ended,
    is_connecting,
    is_silent,
    prepare,
)

MAGIC = b"hfgroup1"
BUILD_S = 30.0  # limit for opening a group; the control plane reports dead members sooner
ENDED_S = 5.0  # how long a group stays whole though one of its connections has ended
LOST_S = 2.0  # packets stay unanswered for this long: four TCP attempts on a usual network
_NUMBER = struct.Struct("!Q")
_OUT, _BACK = 0, 1  # a connection's direction: from the rank that opens it, or to it
_Way = tuple[int, int]  # a peer's rank and a direction; without TLS _OUT carries both ways


class TcpListener:
    """Takes in the connections of this process's groups. `host`: the address that peers use.

    It listens once the first group is opened. UserError if it cannot.
    """

    def __init__(self, host: str, identity: PeerIdentity | None = None) -> None:
        self.identity = identity or PeerIdentity()
        self.ways = (_OUT,) if self.identity.tls is None else (_OUT, _BACK)
        self._host = host
        self._lock = threading.Lock()
        self._address = ""
        self._groups: dict[int, TcpTransport] = {}  # by a random number

    def expect(self, group: TcpTransport) -> tuple[int, bytes]:
        """Accept connections for this group; return its number and the data for its members."""
        with self._lock:
            if not self._address:
                self._address = self._listen()
            number = int.from_bytes(os.urandom(_NUMBER.size), "big")
            self._groups[number] = group
            return number, _NUMBER.pack(number) + self._address.encode()

    def _listen(self) -> str:
        try:
            host = str(socket.getaddrinfo(self._host, None)[0][4][0])
            listener, address = open_listener(host)
            PeerListener(listener, self.identity, MAGIC, self._admit).start()
            return self.identity.address(self._host, address)
        except OSError as error:
            raise UserError(
                f"this worker cannot listen on {self._host}: {error.strerror or error}; give an "
                "address of this machine with --host"
            ) from None

    def forget(self, number: int) -> None:
        """Refuse connections of a group from now on."""
        with self._lock:
            self._groups.pop(number, None)

    def _admit(self, channel: socket.socket, purpose: peer_stream.Purpose) -> None:
        number, rank, way = purpose
        with self._lock:
            group = self._groups.get(number)
        if group is None or not group.admit((rank, way), channel):
            channel.close()


class _TcpPending:
    """Is one exchange whose messages are under way."""

    def __init__(
        self, network: GroupNetwork, expected: list[Expected], leaving: list[Leaving]
    ) -> None:
        self._network = network
        self._expected = expected
        self._leaving = leaving

    def is_done(self) -> bool:
        return self._network.are_done(self._expected, self._leaving)

    def wait(self, waits: Waits | None = None) -> None:
        if waits is not None:
            waits.begin_wait()
        record = None if waits is None else waits.record_arrival
        self._network.wait(self._expected, self._leaving, record)
        self._expected, self._leaving = [], []


class TcpTransport:
    """Implements `Transport` for one view's members."""

    ordered = False

    def __init__(
        self, listener: TcpListener, build_s: float = BUILD_S, ended_s: float = ENDED_S
    ) -> None:
        self._listener = listener
        self._build_s = build_s
        self._ended_s = ended_s
        self._network = GroupNetwork()
        self._number = 0
        self._rank = self._size = 0
        self._rendezvous: Rendezvous | None = None
        self._opening = threading.Lock()  # held by the thread that opens connections
        self._reached: set[int] = set()  # higher ranks with connections
        self._changed = threading.Lock()
        self._dialing: dict[_Way, socket.socket] = {}
        self._proved: dict[_Way, socket.socket] = {}  # connections whose pair is not complete yet
        self._began_at = math.inf
        self._ended_at = math.inf  # when a connection was first seen to have ended

    # ------------------------------------------------------------ building

    def open(
        self, rank: int, size: int, rendezvous: Rendezvous, peers: Collection[int] | None = None
    ) -> None:
        self._rank, self._size, self._rendezvous = rank, size, rendezvous
        self._number, address = self._listener.expect(self)
        wanted = set(range(size) if peers is None else peers) - {rank}
        try:
            rendezvous.publish(address)
            deadline = self._connect([peer for peer in sorted(wanted) if peer > rank])
            lower = [peer for peer in wanted if peer < rank]
            late = self._network.await_connections(lower, deadline)
            if late:
                raise Aborted(f"ranks {sorted(late)} have not connected", min(late))
        except Aborted:
            self.close()
            raise

    def _connect(self, higher: Sequence[int]) -> float:
        """Open connections to higher ranks, and return when that has to be done."""
        assert self._rendezvous is not None, "a group is opened before it is used"
        addresses = {peer: self._rendezvous.lookup(peer) for peer in higher}
        self._began_at = time.monotonic()
        deadline = self._began_at + self._build_s
        to_dial = [(peer, way) for peer in higher for way in self._listener.ways]
        try:
            dialed = [(each, self._dial(each, addresses[each[0]])) for each in to_dial]
            for each, channel in dialed:
                self._meet(each, channel, addresses[each[0]], deadline)
        finally:
            with self._changed:
                unmet, self._dialing = list(self._dialing.values()), {}
            for channel in unmet:
                channel.close()
        return deadline

    def _dial(self, which: _Way, address: bytes) -> socket.socket:
        """Begin to connect."""
        host, port, _ = split_address(address[_NUMBER.size :].decode())
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        channel = socket.socket(family, socket.SOCK_STREAM)
        channel.setblocking(False)
        with self._changed:
            self._dialing[which] = channel
            self._network.check()
        channel.connect_ex((host, port))
        return channel

    def _meet(self, which: _Way, channel: socket.socket, address: bytes, deadline: float) -> None:
        """Finish connecting to a higher rank, and prove each other's job."""
        (number,) = _NUMBER.unpack(address[: _NUMBER.size])
        peer, way = which
        try:
            waiting = select.poll()
            waiting.register(channel, select.POLLOUT)
            if not waiting.poll(max(deadline - time.monotonic(), 0) * 1000):
                raise TimeoutError("it does not answer")
            code = channel.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
            channel.setblocking(True)
            identity = self._listener.identity
            _, _, name = split_address(address[_NUMBER.size :].decode())
            channel = peer_stream.begin_tls(channel, identity, name)
            with self._changed:
                self._dialing[which] = channel
                self._network.check()
            purpose = (number, self._rank, way)
            peer_stream.introduce(channel, identity.key, MAGIC, purpose, deadline)
        except ssl.SSLError as error:
            why = f"rank {peer} cannot be trusted: {tls.describe_error(error)}"
            raise Aborted(why, peer) from None
        except OSError as error:
            why = f"rank {peer} cannot be reached: {error.strerror or error}"
            raise Aborted(why, peer) from None
        except HoldfastError:
            raise Aborted(
                f"the peer at rank {peer} has not proved that it belongs to this job: is "
                "HOLDFAST_PEER_KEY the same on every node, or has the peer just ended?",
                peer,
            ) from None
        with self._changed:
            self._network.check()
            del self._dialing[which]
            self._add(which, channel, dialed=True)

    def admit(self, which: _Way, channel: socket.socket) -> bool:
        """Take in a lower rank that has proved itself; return whether it was awaited here."""
        peer, way = which
        with self._changed:
            is_known = 0 <= peer < self._rank and way in self._listener.ways
            if self._network.aborted or not is_known or which in self._proved:
                return False
            if peer in self._network.wires():
                return False
            return self._add(which, channel, dialed=False)

    def _add(self, which: _Way, channel: socket.socket, *, dialed: bool) -> bool:
        """Add a connection; the link works once all of the pair's are here."""
        peer, _ = which
        prepare(channel)
        self._proved[which] = channel
        found = [self._proved.get((peer, way)) for way in self._listener.ways]
        channels = [each for each in found if each is not None]
        if len(channels) < len(found):
            return True
        for way in self._listener.ways:
            del self._proved[peer, way]
        one, other = channels[0], channels[-1]  # _OUT and _BACK
        if self._listener.identity.tls is None:
            wire: Wire = PlainWire(one)
        else:
            wire = TlsWire(one, other) if dialed else TlsWire(other, one)
        return self._network.connect(peer, wire)

    # ------------------------------------------------------------ exchanging

    def exchange(
        self,
        sends: Sequence[Message],
        receives: Sequence[Message],
        tag: int,
        sent_us: int = 0,
    ) -> Pending:
        self._reach(peer for peer, _ in (*sends, *receives))
        network = self._network
        places = [(network.link(peer), _memory(tensor)) for peer, tensor in receives]
        batches: dict[GroupLink, list[tuple[int, memoryview]]] = {}
        for peer, tensor in sends:
            batches.setdefault(network.link(peer), []).append((tag, _memory(tensor)))
        return _TcpPending(network, *network.exchange(batches, places, tag, sent_us))

    def _reach(self, peers: Iterable[int]) -> None:
        """Open connections to the higher ones of these ranks, if there are none. Aborted."""
        self._network.check()
        higher = {peer for peer in peers if peer > self._rank}
        if higher <= self._reached:
            return
        with self._opening:
            self._connect(sorted(higher - self._network.wires().keys()))
            self._reached |= higher

    def listen(
        self, tag: int, size: int, hear: Callable[[int, bytes], None], *, always: bool = False
    ) -> None:
        self._network.listen(tag, size, hear, always=always)

    def go_on(self) -> None:
        self._network.go_on()

    # ------------------------------------------------------------ the end

    def lost_ranks(self) -> Sequence[int]:
        now = time.monotonic()
        with self._changed:
            if self._network.aborted:
                return ()
            late = now >= self._began_at + LOST_S
            dialing = list(self._dialing.items()) if late else []
        wires = self._network.wires()
        if any(has_ended(each) for wire in wires.values() for each in wire.channels):
            self._ended_at = min(self._ended_at, now)
        if now >= self._ended_at + self._ended_s:
            self.abort()
        unanswered = [peer for (peer, _), channel in dialing if is_connecting(channel)]
        silent = [
            peer
            for peer, wire in wires.items()
            if any(is_silent(each, LOST_S) for each in wire.channels)
        ]
        return sorted({*unanswered, *silent})

    def abort(self) -> None:
        self._network.abort()
        with self._changed:
            unmet = [*self._dialing.values(), *self._proved.values()]
        for channel in unmet:
            peer_stream.shut(channel)

    def close(self) -> None:
        self.abort()
        self._listener.forget(self._number)
        with self._changed:
            unmet, self._proved = list(self._proved.values()), {}
        for channel in unmet:
            channel.close()
        self._network.close()


def _memory(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the host, where they lie."""
    if not tensor.is_contiguous() or tensor.is_cuda:
        raise ValueError("only contiguous tensors of the host can be exchanged")
    return memory_of(tensor)
