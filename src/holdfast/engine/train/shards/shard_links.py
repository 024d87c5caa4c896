"""Connects the processes of a worker: the machine is in the process of shard 0.

That process orders the other ones to carry out the machine's decisions. In each of them a stand-in
passes events on to the machine, and carries out the effects that arrive. Events, orders and
addresses travel over socket pairs or TCP: each message is MessagePack in a frame, the name of its
type and its fields.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

import msgspec

from holdfast.engine.core.errors import HoldfastError, WireError
from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.step.shards import FollowerProofs, ShardEvents, is_shared
from holdfast.engine.core.step.speculation import Lateness, Patience
from holdfast.engine.core.types import Incarnation, Peer, WorkerId
from holdfast.engine.core.views import View
from holdfast.engine.core.worker_status import Stage, WorkerStatus
from holdfast.engine.net.descriptors import wait_readable
from holdfast.engine.train.step.agent_link import AgentLink, write_stacks
from holdfast.engine.train.step.driver import Driver, Shards
from holdfast.engine.wire.frames import Opener, Sealer
from holdfast.engine.wire.messages import Address, StacksRequest, encode

RECEIVED_BYTES = 1 << 16
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Meeting:
    """Is the place where the processes of a worker meet, by torch's store."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Book:
    """Lists the addresses of the members of a view."""

    view: int
    addresses: tuple[tuple[Peer, bytes], ...]


_KINDS = {
    each.__name__: each
    for each in (
        *(*get_args(ef.WorkerEffect), *get_args(ev.WorkerEvent)),
        *(Meeting, Book, Address, StacksRequest),
    )
}
# Made here, and not by the threads that receive: msgspec must not look into a type in two at once.
_DECODERS = {name: msgspec.msgpack.Decoder(kind) for name, kind in _KINDS.items()}
_decode_frame = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw]).decode


class ShardChannel:
    """Sends to, and receives from, one other process of the worker."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._sealer = Sealer(None)
        self._opener = Opener(None)
        self._waiting: list[Any] = []  # messages that arrived with the first one
        self._leaving: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._write, name="holdfast-shards", daemon=True).start()

    def fileno(self) -> int:
        """Return the descriptor, to wait for messages."""
        return self._channel.fileno()

    def send(self, message: object) -> None:
        """Send one message, soon and in order; it is lost if the other process has ended."""
        words = type(message).__name__, message
        self._leaving.put(msgspec.msgpack.encode(words, enc_hook=list))  # ranges become lists

    def _write(self) -> None:
        """Send in a thread of its own: the sender may hold a lock that the receiver needs."""
        while True:
            data = self._leaving.get()
            with contextlib.suppress(OSError):
                self._channel.sendall(self._sealer.seal(data))

    def receive_first(self, kind: type[T]) -> T:
        """Wait for the first message, which must be of this kind. WireError, EOFError."""
        while not self._waiting:
            self._waiting = list(self._receive())
        found = self._waiting.pop(0)
        if not isinstance(found, kind):
            raise WireError(f"a worker's process began with a {type(found).__name__}")
        return found

    def receive(self) -> Iterator[Any]:
        """Yield messages in the order in which they were sent. WireError, EOFError."""
        waiting, self._waiting = self._waiting, []
        yield from waiting
        yield from self._receive()

    def _receive(self) -> Iterator[Any]:
        """Yield the messages that have arrived, at least one. WireError, EOFError."""
        try:
            data = self._channel.recv(RECEIVED_BYTES)
        except OSError:
            data = b""
        if not data:
            raise EOFError
        for payload in self._opener.feed(data):
            try:
                name, fields = _decode_frame(payload)
                yield _DECODERS[name].decode(fields)
            except (msgspec.MsgspecError, KeyError) as error:
                raise WireError(f"a worker's process sends what cannot be read: {error}") from None


class LeadingShard(Shards):
    """Connects to the processes of shards 1 and up, one for each of `channels`."""

    def __init__(self, worker: WorkerId, channels: Sequence[ShardChannel], link: AgentLink) -> None:
        self._worker = worker
        self._channels = channels
        self._link = link
        self._events = ShardEvents(len(channels) + 1)
        # The virtual ranks that the other processes know.
        self._told: tuple[int, ...] | None = None

    def start(self, driver: Driver) -> None:
        """Begin to listen to them."""
        with driver.monitor:
            self._tell(driver.status())
        self._link.pass_on = self._send
        for shard, channel in enumerate(self._channels, 1):
            threading.Thread(
                target=self._listen,
                args=(shard, channel, driver),
                name="holdfast-shard",
                daemon=True,
            ).start()

    def hear(self, shard: int, event: ev.WorkerEvent) -> Sequence[ev.WorkerEvent]:
        """Return the events for the machine that follow from an event in the process of `shard`."""
        return self._events.hear(shard, event)

    def order(self, effect: ef.WorkerEffect, status: WorkerStatus) -> None:
        """Send all of them an effect that they must carry out as well."""
        if isinstance(effect, ef.Install):
            self._events.begin(effect.view.number)
        if is_shared(effect):
            self._tell(status)
            self._send(effect)

    def meet(self, view: int, addresses: Mapping[Peer, bytes]) -> None:
        """Send them the addresses of the members of a view."""
        self._send(Book(view, tuple(addresses.items())))

    def _tell(self, status: WorkerStatus) -> None:
        if status.hosted != self._told:
            self._told = status.hosted
            self._send(ef.Tell(status))

    def _send(self, message: object) -> None:
        for channel in self._channels:
            channel.send(message)

    def _listen(self, shard: int, channel: ShardChannel, driver: Driver) -> None:
        try:
            while True:
                for message in channel.receive():
                    if isinstance(message, Address):
                        self._link.publish(message.view, message.address, message.peer.shard)
                    else:
                        driver.post(message, shard)
        except EOFError:
            return  # it has ended, which ends the worker: see runtime/node/shard_processes.py
        except HoldfastError as error:
            driver.fail(error)


POLL_S = 0.1


class FollowingMachine:
    """Passes on this process's events; effects arrive from the process of shard 0."""

    def __init__(self, worker: WorkerId, incarnation: Incarnation, channel: ShardChannel) -> None:
        self.lateness = Lateness(Patience(copies=0.0))
        self.view: View | None = None
        self.status = WorkerStatus(worker=worker, incarnation=incarnation, seq=0)
        self._channel = channel

    pending = False  # only the real machine knows

    def handle(self, event: ev.WorkerEvent, now: float) -> Sequence[ef.WorkerEffect]:
        """Pass an event on; the machine in shard 0's process decides."""
        self._channel.send(event)
        return ()

    def snapshot(self) -> WorkerStatus:
        """Return the worker's last status that was received."""
        return self.status

    def leads(self, now: float) -> bool:
        """Return False, since another process acts for the job if this worker leads."""
        return False

    def deadline(self) -> float | None:
        """Return None, since no timer runs here."""
        return None


class FollowingLink:
    """Receives orders from the process of shard 0; `shard`: the shard of this process.

    `agent`: the connection to this node's agent, in the first process on a further node of a spread
    worker.
    """

    def __init__(
        self,
        channel: ShardChannel,
        machine: FollowingMachine,
        shard: int,
        agent: socket.socket | None = None,
    ) -> None:
        self._channel = channel
        self._machine = machine
        self._shard = shard
        self._agent = agent
        self._sealer = Sealer(None)
        self._seq = 0
        self._proofs = FollowerProofs()

    def tell(self, status: WorkerStatus) -> None:
        """Ignore a status: the process of shard 0 reports to the agent."""

    def has_unread(self) -> bool:
        return False

    def publish(self, view: int, address: bytes) -> None:
        """Publish the address of this process to the members of a view."""
        peer = Peer(self._machine.status.worker, self._shard)
        self._channel.send(Address(view=view, peer=peer, address=address))

    def start(self, driver: Driver) -> None:
        """Begin to carry out orders."""
        threading.Thread(
            target=self._serve, args=(driver,), name="holdfast-link", daemon=True
        ).start()

    def _serve(self, driver: Driver) -> None:
        try:
            while True:
                driver.tick()
                if wait_readable([self._channel], POLL_S):
                    for message in self._channel.receive():
                        self._obey(driver, message)
        except EOFError:
            return  # the kernel ends this process with the other one
        except HoldfastError as error:
            driver.fail(error)

    def _prove(self, commit: ef.Commit) -> None:
        """Report to the agent the time since which all members have acted in the view.

        A commit proves it. So the node need not pause this process while the coordinator is silent.
        """
        proved_at = self._proofs.record_commit(time.monotonic(), voted=commit.voted)
        if self._agent is None or proved_at is None:
            return
        self._seq += 1
        me = self._machine.status
        status = WorkerStatus(
            worker=me.worker,
            incarnation=me.incarnation,
            seq=self._seq,
            stage=Stage.READY,
            proved_at=proved_at,
        )
        with contextlib.suppress(OSError):
            self._agent.sendall(self._sealer.seal(encode(status)))

    def _obey(self, driver: Driver, message: ef.WorkerEffect | Book | StacksRequest) -> None:
        match message:
            case StacksRequest(reason=reason):
                write_stacks(reason, self._shard)
            case Book(view, addresses):
                driver.learn_addresses(view, dict(addresses))
            case ef.Tell(status):
                with driver.monitor:
                    self._machine.status = status
            case ef.Commit():
                self._prove(message)
                driver.obey(message)
            case ef.Install(view=view):
                with driver.monitor:
                    self._machine.view = view
                    driver.obey(message)
            case _:
                driver.obey(message)
