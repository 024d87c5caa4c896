"""Carries host tensors over TCP connections of our own, which are proved before they are used.

A process has one listener, for all its groups. Each pair of members has one connection, or with TLS
one for each direction (wires.py). The lower rank opens them, and each side proves that it has the
job's peer key before any message is read (net/peer_listener.py). Strangers never reach a group. To
abort a group its connections are shut down, which frees all waiting threads on both sides at once.
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
from collections.abc import Sequence

import torch

from holdfast.core.errors import Aborted, HoldfastError, UserError
from holdfast.net import peer_stream, tls
from holdfast.net.peer_identity import PeerIdentity, split_address
from holdfast.net.peer_listener import PeerListener, open_listener
from holdfast.train.exchange import sockets
from holdfast.train.exchange.group_connection import GIVEN_UP, GroupConnection, Incoming, Outgoing
from holdfast.train.exchange.seam import Message, Pending, Rendezvous
from holdfast.train.exchange.tensor_bytes import memory_of
from holdfast.train.exchange.waits import Waits
from holdfast.train.exchange.wires import PlainWire, TlsWire, Wire

MAGIC = b"hfgroup1"
BUILD_S = 30.0  # limit for opening a group; the control plane reports dead members sooner
ENDED_S = 5.0  # how long a group stays whole though one of its connections has ended
LOST_S = 2.0  # packets stay unanswered for this long: four TCP attempts on a usual network
_NUMBER = struct.Struct("!Q")
_OUT, _BACK = 0, 1  # a connection's direction: from the rank that opens it, or to it
_Way = tuple[int, int]  # a peer's rank and a direction; without TLS _OUT carries both ways


class TcpListener:
    """Takes in the connections of this process's groups. `host`: the address that others use.

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

    def __init__(self, transport: TcpTransport) -> None:
        self.incoming: list[tuple[GroupConnection, Incoming]] = []
        self.outgoing: list[tuple[GroupConnection, Outgoing]] = []
        self._transport = transport

    def wait(self, waits: Waits | None = None) -> None:
        if waits is not None:
            waits.begin_wait()
        for link, message in self.incoming:
            link.wait_for(message)
            if waits is not None:
                waits.record_arrival(link.peer)
        for link, batch in self.outgoing:
            link.wait_until_sent(batch)
        self.incoming, self.outgoing = [], []
        self._transport.check()


class TcpTransport:
    """Implements `Transport` for one view's members."""

    ordered = False

    def __init__(
        self, listener: TcpListener, build_s: float = BUILD_S, ended_s: float = ENDED_S
    ) -> None:
        self._listener = listener
        self._build_s = build_s
        self._ended_s = ended_s
        self._changed = threading.Condition()
        self._number = 0
        self._awaited: set[_Way] = set()  # connections of lower ranks that are still missing
        self._dialing: dict[_Way, socket.socket] = {}
        self._proved: dict[_Way, socket.socket] = {}  # connections whose pair is not complete yet
        self._links: dict[int, GroupConnection] = {}  # by rank
        self._began_at = math.inf
        self._ended_at = math.inf  # when a connection was first seen to have ended
        self.aborted = False

    # ------------------------------------------------------------ building

    def open(self, rank: int, size: int, rendezvous: Rendezvous) -> None:
        ways = self._listener.ways
        self._awaited = {(peer, way) for peer in range(rank) for way in ways}
        self._number, address = self._listener.expect(self)
        try:
            rendezvous.publish(address)
            addresses = {peer: rendezvous.lookup(peer) for peer in range(size) if peer != rank}
            self._began_at = time.monotonic()
            deadline = self._began_at + self._build_s
            to_dial = [(peer, way) for peer in range(rank + 1, size) for way in ways]
            dialed = [(each, self._dial(each, addresses[each[0]])) for each in to_dial]
            for each, channel in dialed:
                self._meet(rank, each, channel, addresses[each[0]], deadline)
            self._await_lower_ranks(deadline)
        except Aborted:
            self.close()
            raise
        finally:
            self._listener.forget(self._number)
            with self._changed:
                unmet = [*self._dialing.values(), *self._proved.values()]
                self._dialing, self._proved = {}, {}
            for channel in unmet:
                channel.close()

    def _dial(self, which: _Way, address: bytes) -> socket.socket:
        """Begin to connect."""
        host, port, _ = split_address(address[_NUMBER.size :].decode())
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        channel = socket.socket(family, socket.SOCK_STREAM)
        channel.setblocking(False)
        with self._changed:
            self._dialing[which] = channel
            self.check()
        channel.connect_ex((host, port))
        return channel

    def _meet(
        self, rank: int, which: _Way, channel: socket.socket, address: bytes, deadline: float
    ) -> None:
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
                self.check()
            peer_stream.introduce(channel, identity.key, MAGIC, (number, rank, way), deadline)
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
            self.check()
            del self._dialing[which]
            self._add(which, channel, dialed=True)

    def admit(self, which: _Way, channel: socket.socket) -> bool:
        """Take in a lower rank that has proved itself; return whether it was awaited here."""
        with self._changed:
            if self.aborted or which not in self._awaited:
                return False
            self._awaited.remove(which)
            self._add(which, channel, dialed=False)
            self._changed.notify_all()
            return True

    def _add(self, which: _Way, channel: socket.socket, *, dialed: bool) -> None:
        """Add a connection; the link begins once all of the pair's are here."""
        peer, _ = which
        sockets.prepare(channel)
        self._proved[which] = channel
        found = [self._proved.get((peer, way)) for way in self._listener.ways]
        channels = [each for each in found if each is not None]
        if len(channels) < len(found):
            return
        for way in self._listener.ways:
            del self._proved[peer, way]
        one, other = channels[0], channels[-1]  # _OUT and _BACK
        if self._listener.identity.tls is None:
            wire: Wire = PlainWire(one)
        else:
            wire = TlsWire(one, other) if dialed else TlsWire(other, one)
        self._links[peer] = link = GroupConnection(peer, wire, self._wake)
        link.start()

    def _await_lower_ranks(self, deadline: float) -> None:
        with self._changed:
            while self._awaited:
                self.check()
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    late = sorted({peer for peer, _ in self._awaited})
                    raise Aborted(f"ranks {late} have not connected", late[0])
                self._changed.wait(left_s)
            self.check()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # ------------------------------------------------------------ exchanging

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Pending:
        self.check()
        pending = _TcpPending(self)
        for peer, tensor in receives:
            link = self._link(peer)
            pending.incoming.append((link, link.expect(tag, _memory(tensor))))
        batches: dict[int, list[tuple[int, memoryview]]] = {}
        for peer, tensor in sends:
            batches.setdefault(peer, []).append((tag, _memory(tensor)))
        for peer, batch in batches.items():
            link = self._link(peer)
            outgoing = link.send(batch)
            if outgoing is not None:
                pending.outgoing.append((link, outgoing))
        return pending

    def _link(self, peer: int) -> GroupConnection:
        link = self._links.get(peer)
        if link is None:
            raise Aborted(GIVEN_UP)
        return link

    def check(self) -> None:
        """Raise Aborted once the view is given up."""
        if self.aborted:
            raise Aborted(GIVEN_UP)

    # ------------------------------------------------------------ the end

    def lost_ranks(self) -> Sequence[int]:
        now = time.monotonic()
        with self._changed:
            if self.aborted:
                return ()
            late = now >= self._began_at + LOST_S
            dialing = list(self._dialing.items()) if late else []
            links = list(self._links.values())
        if any(sockets.has_ended(each) for link in links for each in link.wire.channels):
            self._ended_at = min(self._ended_at, now)
        if now >= self._ended_at + self._ended_s:
            self.abort()
        unanswered = [peer for (peer, _), channel in dialing if sockets.is_connecting(channel)]
        silent = [
            link.peer
            for link in links
            if any(sockets.is_silent(each, LOST_S) for each in link.wire.channels)
        ]
        return sorted({*unanswered, *silent})

    def abort(self) -> None:
        with self._changed:
            self.aborted = True
            links, dialing = list(self._links.values()), list(self._dialing.values())
            dialing += self._proved.values()
            self._changed.notify_all()
        for channel in dialing:
            peer_stream.shut(channel)
        for link in links:
            link.end()

    def close(self) -> None:
        self.abort()
        self._listener.forget(self._number)
        with self._changed:
            links, self._links = list(self._links.values()), {}
        for link in links:
            link.close()


def _memory(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the host, where they lie."""
    if not tensor.is_contiguous() or tensor.is_cuda:
        raise ValueError("only contiguous tensors of the host can be exchanged")
    return memory_of(tensor)
