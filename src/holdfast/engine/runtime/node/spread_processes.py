"""Brings the processes of a worker together that is spread over several nodes.

The process of shard 0 listens, at an address that the coordinator passes on. Each process on a
further node connects to it before the script begins, to be given orders; the first one on each node
has a second connection, over which the ends of the processes there, and of the worker, are heard.
These are never encrypted: another process goes on with their descriptors.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from holdfast.engine.core.errors import WireError, first_line
from holdfast.engine.host.lifetime import end_lost
from holdfast.engine.net import peer_stream
from holdfast.engine.net.peer_identity import PeerIdentity
from holdfast.engine.net.peer_listener import PeerListener
from holdfast.engine.net.tcp import tune

MAGIC = b"hspread\1"
ORDERS, LIFE = 0, 1  # what a connection is for
DONE = b"\0"  # the script has ended well
LOOK_S = 0.05
DEAD_S = 5.0  # after this silence of a machine a connection counts as ended
END_S = 60.0  # for the process of shard 0 to end this one, after a failure


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadPlace:
    """Names this node among a worker's (`place`, of `nodes`), and the shards here."""

    place: int = 0
    nodes: int = 1
    procs: int = 1  # in the whole worker
    incarnation: int = 0

    @property
    def shards(self) -> range:
        each = self.procs // self.nodes
        return range(self.place * each, (self.place + 1) * each)

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> SpreadPlace:
        """Take it from the variables of a process."""
        return cls(
            place=int(environ.get("HOLDFAST_PLACE", "0")),
            nodes=int(environ.get("HOLDFAST_SPREAD", "1")),
            procs=int(environ.get("HOLDFAST_PROCS", "1")),
            incarnation=int(environ.get("HOLDFAST_INCARNATION", "0")),
        )


class Gathering:
    """Waits, in the process of shard 0, until all of those on further nodes have come."""

    def __init__(self, listener: socket.socket, key: bytes, place: SpreadPlace) -> None:
        self._listener = listener
        self._key = key
        self._place = place
        self._arrived = threading.Condition()
        self._come: dict[tuple[int, int], socket.socket] = {}  # by what for, and the shard

    def connections(self) -> tuple[list[socket.socket], dict[int, socket.socket]]:
        """Return connections for orders, by shard from the first on a further node; and of lives.

        The latter by the first shard on each node. Waits for as long as it takes: if some are lost
        meanwhile, the coordinator has this process ended.
        """
        here, procs = len(self._place.shards), self._place.procs
        orders = [(ORDERS, shard) for shard in range(here, procs)]
        lives = [(LIFE, shard) for shard in range(here, procs, here)]
        listener = PeerListener(self._listener, PeerIdentity(key=self._key), MAGIC, self._admit)
        listener.start()
        with self._arrived:
            self._arrived.wait_for(lambda: all(each in self._come for each in (*orders, *lives)))
        listener.close()
        return [self._come[each] for each in orders], {s: self._come[k, s] for k, s in lives}

    def _admit(self, channel: socket.socket, come_for: peer_stream.Purpose) -> None:
        incarnation, shard, purpose = come_for
        if incarnation != self._place.incarnation:
            raise WireError(
                f"it belongs to incarnation {incarnation} of this worker, which is now "
                f"{self._place.incarnation}"
            )
        _tune(channel)
        with self._arrived:
            self._come[purpose, shard] = channel
            self._arrived.notify_all()


def connect(
    address: str, key: bytes, place: SpreadPlace, shard: int, purpose: int
) -> socket.socket:
    """Connect to the process of shard 0; this process ends at once if that is gone."""
    try:
        who = PeerIdentity(key=key)
        channel = peer_stream.connect(address, who, MAGIC, (place.incarnation, shard, purpose))
        _tune(channel)
    except (OSError, WireError) as error:
        end_lost(f"its worker's first process cannot be reached: {first_line(error)}")
    return channel


def _tune(channel: socket.socket) -> None:
    tune(channel, DEAD_S)
    channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def end_together(life: int, failure_fd: int) -> None:
    """End this process when that of shard 0 does, by the descriptor `life`: well if it ends well.

    `failure_fd`: reports a good end to this node's agent.
    """

    def watch() -> None:
        data = b""
        with contextlib.suppress(OSError):
            data = os.read(life, 1)
        if data == DONE:
            with contextlib.suppress(OSError):
                os.write(failure_fd, DONE)
            os._exit(0)
        end_lost("its worker has ended")

    threading.Thread(target=watch, name="holdfast-life", daemon=True).start()


def wait_to_be_ended(limit_s: float = float("inf")) -> NoReturn:
    """Wait, on a further node, until the process of shard 0 ends this one."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        time.sleep(LOOK_S)
    end_lost("its worker has not ended")
