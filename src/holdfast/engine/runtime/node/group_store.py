"""Serves a process of a group: its channel to the agent, and the store by which the group meets.

    python -m holdfast.engine.runtime.node.group_store

A process uses the channel until it becomes a script, which does not know it. The store runs on the
node of the group's rank 0. Every group gets a store of its own, so that no key of an earlier one is
ever read.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.engine.core.directives import WorkerDirective
from holdfast.engine.core.types import Incarnation, Peer, WorkerId
from holdfast.engine.core.views import View
from holdfast.engine.core.worker_status import Stage, WorkerStatus
from holdfast.engine.host.lifetime import end_lost
from holdfast.engine.net.descriptors import wait_readable
from holdfast.engine.runtime.node import bootstrap
from holdfast.engine.wire.frames import Opener, Sealer
from holdfast.engine.wire.messages import Address, AddressBook, decode, encode

REPEAT_S = 0.5  # an address may be lost with a coordinator


@dataclass(slots=True)
class GroupChannel:
    """Is one process's blocking channel to its agent; the end of the agent ends the process.

    `seq`: the number of its newest status.
    """

    socket: socket.socket
    worker: WorkerId
    incarnation: Incarnation
    seq: int = 0
    _sealer: Sealer = field(default_factory=lambda: Sealer(None))
    _opener: Opener = field(default_factory=lambda: Opener(None))

    @classmethod
    def take_channel(cls) -> GroupChannel:
        """Take the channel that this process was given by its agent."""
        return cls(
            socket.socket(fileno=int(os.environ.pop("HOLDFAST_FD"))),
            WorkerId(int(os.environ["HOLDFAST_WORKER"])),
            Incarnation(int(os.environ["HOLDFAST_INCARNATION"])),
        )

    def report_ready(self) -> None:
        """Report that this process waits for a group."""
        self.seq += 1
        self.send(
            WorkerStatus(
                worker=self.worker,
                incarnation=self.incarnation,
                seq=self.seq,
                stage=Stage.READY,
            )
        )

    def send(self, message: object) -> None:
        self.socket.sendall(self._sealer.seal(encode(message)))

    def wait_group(self, known: View | None, address: Callable[[View], bytes]) -> tuple[View, str]:
        """Wait for another group than `known` that names this process, and for its store.

        `address`: makes this process's own address for the group. Returns the group, and HOST:PORT.
        """
        told: Address | None = None
        view: View | None = None
        repeat_at = 0.0
        while True:
            wait_s = None if told is None else max(repeat_at - time.monotonic(), 0.0)
            if told is not None and wait_s == 0.0:
                self.send(told)
                repeat_at = time.monotonic() + REPEAT_S
            if not wait_readable([self.socket], wait_s):
                continue
            data = self.socket.recv(1 << 16)
            if not data:
                end_lost("its agent is gone")
            for payload in self._opener.feed(data):
                message: WorkerDirective | AddressBook = decode(
                    payload, WorkerDirective, AddressBook
                )
                if isinstance(message, AddressBook):
                    if view is not None and message.view == view.number:
                        return view, dict(message.addresses)[Peer(view.leader)].decode()
                elif self._is_news(message.view, view or known):
                    view = message.view
                    assert view is not None
                    peer = Peer(self.worker)
                    told = Address(view=view.number, peer=peer, address=address(view))
                    repeat_at = 0.0

    def _is_news(self, view: View | None, known: View | None) -> bool:
        if view is None or not view.includes(self.worker, self.incarnation):
            return False
        return known is None or view.number > known.number


MODULE = "holdfast.engine.runtime.node.group_store"


def main(argv: list[str]) -> int:
    """Serve one group after the other, until the agent ends this process."""
    failure_fd = bootstrap.attach()
    return bootstrap.run_and_report(_serve, bootstrap.make_reporter(failure_fd))


def _serve() -> None:
    from holdfast.engine.train.torch_groups import open_store  # takes seconds

    host = os.environ["HOLDFAST_HOST"]
    channel = GroupChannel.take_channel()
    channel.report_ready()
    kept: list[object] = []  # a store lives as long as its object
    view: View | None = None

    def address(view: View) -> bytes:
        store = open_store(host)
        kept[:] = [store]
        return f"{host}:{store.port}".encode()

    while True:
        view, _ = channel.wait_group(view, address)


if __name__ == "__main__":
    bootstrap.leave(main(sys.argv[1:]))
