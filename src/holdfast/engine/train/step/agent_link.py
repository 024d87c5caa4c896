"""Runs the control thread: this worker's connection to its agent, over an inherited socket.

It answers a few times a second whatever the script is doing, which also proves to the agent that
the process is alive. When the connection ends, the agent is gone and with it the right to act.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

from holdfast.engine.core.directives import WorkerDirective
from holdfast.engine.core.errors import WireError
from holdfast.engine.core.ground.events import Directed
from holdfast.engine.core.table_places import ServerLayout
from holdfast.engine.core.types import RELEASE_ALL, AgentId, Peer, ViewNumber, WorkerId
from holdfast.engine.core.views import Member, View
from holdfast.engine.core.worker_status import WorkerStatus
from holdfast.engine.host.lifetime import end_lost
from holdfast.engine.net.descriptors import is_readable, wait_readable
from holdfast.engine.train.step.driver import Driver
from holdfast.engine.train.step.stack_file import write_stacks
from holdfast.engine.wire.frames import Opener, Sealer
from holdfast.engine.wire.messages import Address, AddressBook, StacksRequest, decode, encode

HEARTBEAT_S = 0.5
POLL_S = 0.1
ACCEPTED = (WorkerDirective, AddressBook, StacksRequest)


class AgentLink:
    """Sends statuses at once and heartbeats in between; feeds directives to the driver."""

    def __init__(self, channel: socket.socket, worker: WorkerId) -> None:
        self._channel = channel
        self._worker = worker
        self._sealer = Sealer(None)
        self._lock = threading.Lock()
        #: To further processes.
        self.pass_on: Callable[[StacksRequest], None] = lambda _: None
        #: The addresses of the servers of tables, by number.
        self.servers: dict[int, str] = {}
        #: The addresses of their heirs, likewise.
        self.heirs: dict[int, str] = {}
        #: The newest layout of the rows on servers.
        self.layout: ServerLayout | None = None
        self.note_layout: Callable[[ServerLayout], None] = lambda _: None
        self._addresses: dict[Peer, Address] = {}  # sent again until the address book comes

    def tell(self, status: WorkerStatus) -> None:
        self._send(status)

    def publish(self, view: int, address: bytes, shard: int = 0) -> None:
        peer = Peer(self._worker, shard)
        told = Address(view=view, peer=peer, address=address)
        with self._lock:
            current = {p: a for p, a in self._addresses.items() if a.view == view}
            self._addresses = {**current, peer: told}
        self._send(told)

    def has_unread(self) -> bool:
        with contextlib.suppress(OSError, ValueError):
            return is_readable(self._channel)
        return False

    def start(self, driver: Driver) -> None:
        args = (driver,)
        threading.Thread(target=self._serve, args=args, name="holdfast-link", daemon=True).start()

    def _send(self, message: object) -> None:
        with self._lock, contextlib.suppress(OSError):  # the reader notices a lost agent
            self._channel.sendall(self._sealer.seal(encode(message)))

    def _serve(self, driver: Driver) -> None:
        opener = Opener(None)
        beat_at = time.monotonic()
        while True:
            if time.monotonic() >= beat_at:
                beat_at = time.monotonic() + HEARTBEAT_S
                self._send(driver.status())
                for told in self._addresses.values():
                    self._send(told)
            driver.times.note_alive()
            driver.tick()
            if not wait_readable([self._channel], POLL_S):
                continue
            try:
                data = self._channel.recv(1 << 16)
            except OSError:
                data = b""
            if not data:
                end_lost("its agent is gone, so that nothing could fence it any more")
            try:
                for payload in opener.feed(data):
                    self._receive(driver, payload)
            except WireError as error:
                driver.fail(error)

    def _receive(self, driver: Driver, payload: bytes) -> None:
        message: WorkerDirective | AddressBook | StacksRequest = decode(payload, *ACCEPTED)
        if isinstance(message, StacksRequest):
            self.pass_on(message)
            write_stacks(message.reason)
        elif isinstance(message, AddressBook):
            if any(told.view == message.view for told in self._addresses.values()):
                with self._lock:
                    self._addresses = {}
                driver.learn_addresses(message.view, dict(message.addresses))
        else:
            self.servers, self.heirs = (
                {each.number: each.address for each in message.servers if each.heir is is_heir}
                for is_heir in (False, True)
            )
            if message.layout is not None:
                self.layout = message.layout
                self.note_layout(message.layout)
            driver.post(Directed(message))


class SoloLink:
    """Stands in for an agent in a job of one worker, whose only view is installed at once."""

    def __init__(self, worker: WorkerId, vranks: int) -> None:
        self._worker = worker
        self._vranks = vranks

    def tell(self, status: WorkerStatus) -> None:
        return

    def publish(self, view: int, address: bytes) -> None:
        return

    def has_unread(self) -> bool:
        return False

    def start(self, driver: Driver) -> None:
        status = driver.status()
        member = Member(worker=self._worker, incarnation=status.incarnation, agent=AgentId("solo"))
        view = View(
            number=ViewNumber(1),
            members=(member,),
            owners=(self._worker,) * self._vranks,
            resume_step=0,
            leader=self._worker,
            joiners=(self._worker,),
            reason="a job of one worker without a launcher",
        )
        driver.post(Directed(WorkerDirective(view=view, release_loop=RELEASE_ALL)))
