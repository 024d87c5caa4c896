"""Replaces the worker's machine in its further processes: the machine is in shard 0's process."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Sequence

from holdfast.engine.core.errors import HoldfastError
from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.step.shards import FollowerProofs
from holdfast.engine.core.step.speculation import Lateness, Patience
from holdfast.engine.core.types import Incarnation, Peer, WorkerId
from holdfast.engine.core.views import View
from holdfast.engine.core.worker_status import Stage, WorkerStatus
from holdfast.engine.net.descriptors import wait_readable
from holdfast.engine.train.shards.shard_channel import Book, ShardChannel
from holdfast.engine.train.step.driver import Driver
from holdfast.engine.train.step.stack_file import write_stacks
from holdfast.engine.wire.frames import Sealer
from holdfast.engine.wire.messages import Address, StacksRequest, encode

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
        """Do nothing, since the process of shard 0 reports to the agent."""

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
