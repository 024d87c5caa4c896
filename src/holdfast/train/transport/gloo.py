"""Carries host tensors over TCP with gloo, and aborts by cutting the group's own sockets.

Every wait carries its own (long) timeout, because a timeout of the group itself would poison it;
nothing is ever detected here by waiting: peers' deaths close sockets, and the control plane aborts.
Aborting cuts the sockets and aborts what is under way, as gloo does not end every wait by itself. A
group is only handed out once every peer has proved that it belongs to the job (see proof.py).
"""

from __future__ import annotations

import ipaddress
import math
import os
import socket
import threading
import time
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from holdfast.core.errors import Aborted, first_line
from holdfast.net import proof
from holdfast.train.step.waits import Waits
from holdfast.train.transport import sockets
from holdfast.train.transport.gloo_abort import Aborter
from holdfast.train.transport.seam import Message, Pending, Rendezvous

FOREVER = timedelta(days=365)
ENDED_S = 5.0  # how long a group stays whole though one of its connections has ended
LOST_S = 2.0  # of unanswered packets: four TCP attempts on a usual network
TAG_PROOF = 9
_DEVICE_LOCK = threading.Lock()


class GlooDevice:
    """Holds the endpoint on which all groups of this process listen, and the job's peer key."""

    def __init__(self, host: str, peer_key: bytes = b"") -> None:
        self.peer_key = peer_key
        self._host = host
        self._device: object | None = None
        self._port = 0
        self.address = ""  # our address, as others connect to it

    def get(self) -> tuple[object, int]:
        """Return the gloo device and its port; made on first use."""
        with _DEVICE_LOCK:
            if self._device is None:
                self.aborter = Aborter()
                self.address = str(socket.getaddrinfo(self._host, None)[0][4][0])
                old = sockets.socket_inodes()
                self._device = dist.ProcessGroupGloo.create_device(hostname=self._host)
                self._port = sockets.listening_port(sockets.socket_inodes().keys() - old.keys())
            return self._device, self._port


class _AddressStore(dist.Store):
    """Serves gloo's rendezvous with ours: each rank sets one address and reads every other's.

    What is published is the port, the host as 16 bytes, a nonce for the proof, and gloo's address.
    """

    def __init__(self, rank: int, host: str, port: int, rendezvous: Rendezvous) -> None:
        super().__init__()
        self._rank = rank
        self._head = port.to_bytes(2, "big") + _packed(host) + os.urandom(proof.NONCE_BYTES)
        self._rendezvous = rendezvous
        self.published: dict[int, bytes] = {}  # by rank
        self.ports = {port}

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # gloo sets bytes
        self.published[self._rank] = self._head + bytes(value)
        self._rendezvous.publish(self.published[self._rank])

    def get(self, key: str) -> bytes:
        return self.address_of(int(key.rpartition("/")[2]))[len(self._head) :]

    def address_of(self, rank: int) -> bytes:
        if rank not in self.published:
            self.published[rank] = self._rendezvous.lookup(rank)
            self.ports.add(int.from_bytes(self.published[rank][:2], "big"))
        return self.published[rank]

    def wait(self, keys: Sequence[str], limit: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def ranks_at(self, hosts: Collection[str]) -> list[int]:
        """Return the ranks on these hosts whose address is known by now."""
        packed = {_packed(host) for host in hosts}
        known = list(self.published.items())
        return sorted(rank for rank, address in known if address[2:18] in packed)


def _packed(host: str) -> bytes:
    address = ipaddress.ip_address(host.partition("%")[0])
    return address.packed.rjust(16, b"\0")


class _GlooPending:
    """Holds messages under way; the works also keep gloo writing into their tensors."""

    def __init__(self, works: list[dist.Work], transport: GlooTransport) -> None:
        self.works = works
        self.senders: list[int] = []  # ranks whose messages are the first of the works
        self._transport = transport

    def wait(self, waits: Waits | None = None) -> None:
        if waits is not None:
            waits.awaits()
        for i, work in enumerate(self.works):
            wait_for(work, FOREVER)
            if waits is not None and i < len(self.senders):
                waits.arrived(self.senders[i])
        self._transport.ended(self)


def wait_for(work: dist.Work, limit: timedelta) -> None:
    try:
        done = work.wait(limit)
    except RuntimeError as error:
        raise Aborted(f"gloo: {first_line(error)}") from None
    if not done:
        raise Aborted("the view was given up")


class GlooTransport:
    """Implements `Transport` for one view's gloo group."""

    ordered = False

    def __init__(self, device: GlooDevice, build_s: float = 30.0, ended_s: float = ENDED_S) -> None:
        self._device = device
        self._build_s = build_s
        self._ended_s = ended_s
        self._group: dist.ProcessGroupGloo | None = None
        self._sockets: list = []
        self._store: _AddressStore | None = None
        self._old: Collection[int] = ()  # sockets that were there before
        self._began_at = 0.0
        self._ended_at = math.inf  # when a connection was first seen to have ended
        self._lock = threading.Lock()
        self._under_way: set[_GlooPending] = set()
        self.aborted = False

    def open(self, rank: int, size: int, rendezvous: Rendezvous) -> None:
        device, port = self._device.get()
        store = _AddressStore(rank, self._device.address, port, rendezvous)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [device]
        options._timeout = timedelta(seconds=self._build_s)
        old = sockets.socket_inodes().keys()
        with self._lock:
            self._store, self._old, self._began_at = store, old, time.monotonic()
        try:
            group = dist.ProcessGroupGloo(store, rank, size, options)
        except RuntimeError as error:
            raise Aborted(f"gloo could not connect: {first_line(error)}") from None
        kept = sockets.keep_group_sockets(old, store.ports)
        for each in kept:
            sockets.probe(each)
        with self._lock:
            self._group, self._sockets = group, kept
        del group  # whoever catches what is raised here would keep it
        try:
            if self.aborted:
                raise Aborted("the view was given up while its group was built")
            self._prove(rank, size, proof.group_name([store.address_of(r) for r in range(size)]))
        except Aborted:
            self.close()
            raise

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Pending:
        return self._start(sends, receives, tag)

    def _start(
        self, sends: Sequence[Message], receives: Sequence[Message], tag: int
    ) -> _GlooPending:
        pending = _GlooPending([], self)
        with self._lock:
            group: Any = self._group
            if group is None or self.aborted:
                raise Aborted("the view was given up")
            self._under_way.add(pending)
            try:
                for peer, tensor in receives:
                    pending.works.append(group.recv([tensor], peer, tag))
                    pending.senders.append(peer)
                for peer, tensor in sends:
                    pending.works.append(group.send([tensor], peer, tag))
            except RuntimeError as error:
                raise Aborted(f"gloo: {first_line(error)}") from None
        return pending

    def ended(self, pending: _GlooPending) -> None:
        """Forget an exchange whose messages have all arrived."""
        with self._lock:
            self._under_way.discard(pending)
            if self.aborted:
                raise Aborted("the view was given up")

    def _prove(self, rank: int, size: int, group: bytes) -> None:
        """Show every peer our token and check theirs, within the time for building the group."""
        key, deadline = self._device.peer_key, time.monotonic() + self._build_s
        peers = [r for r in range(size) if r != rank]
        mine = {p: bytearray(proof.token(key, group, rank, p)) for p in peers}
        theirs = {p: torch.zeros(proof.TOKEN_BYTES, dtype=torch.uint8) for p in peers}
        sends = [(p, torch.frombuffer(mine[p], dtype=torch.uint8)) for p in peers]
        pending = self._start(sends, list(theirs.items()), TAG_PROOF)
        works = list(pending.works)
        for work in works:
            self._device.aborter.check(work)
        failure: Aborted | None = None
        # Receives come first, one for each peer. All are waited for: a peer that aborts because it
        # has met an impostor must not keep us from naming the impostor too.
        for i, work in enumerate(works):
            left_s = max(deadline - time.monotonic(), 0.001)
            try:
                wait_for(work, timedelta(seconds=left_s))
            except Aborted as error:
                failure = failure or error
                continue
            if i < len(peers):
                peer = peers[i]
                if not proof.is_token(theirs[peer].numpy().tobytes(), key, group, peer, rank):
                    raise Aborted(
                        f"the peer at rank {peer} has not proved that it belongs to this job: is "
                        "HOLDFAST_PEER_KEY the same on every node?"
                    )
        if failure is not None:
            raise failure
        self.ended(pending)

    def lost(self) -> Sequence[int]:
        now = time.monotonic()
        with self._lock:
            store, building = self._store, self._group is None
            if store is None or self.aborted:
                return ()
            if not building:
                if sockets.any_ended(self._sockets):
                    self._ended_at = min(self._ended_at, now)
                unfinished = now >= self._ended_at + self._ended_s
                silent = store.ranks_at(sockets.silent_peers(self._sockets, LOST_S))
        if not building:
            if unfinished:
                self.abort()
            return silent
        late = now >= self._began_at + LOST_S
        return store.ranks_at(sockets.unanswered(self._old)) if late else ()

    def abort(self) -> None:
        with self._lock:
            self.aborted = True
            sockets.cut(self._sockets)
            for pending in self._under_way:
                for work in pending.works:
                    self._device.aborter.abort(work)

    def close(self) -> None:
        self.abort()
        with self._lock:  # another thread may be aborting, too
            kept, self._sockets = self._sockets, []
            under_way, self._under_way = self._under_way, set()
            held, self._group = [self._group], None
        for each in kept:
            each.close()
        for pending in under_way:  # until its work is gone gloo may write into a tensor
            pending.works.clear()
        # Tearing down a gloo group can block for hundreds of milliseconds: do it in a thread.
        threading.Thread(target=held.clear, daemon=True).start()
