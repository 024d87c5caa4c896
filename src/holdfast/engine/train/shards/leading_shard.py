"""Has the other processes of a worker carry out the decisions of the machine in this one."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from holdfast.engine.core.errors import HoldfastError
from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.step.shards import ShardEvents, is_shared
from holdfast.engine.core.types import Peer, WorkerId
from holdfast.engine.core.worker_status import WorkerStatus
from holdfast.engine.train.shards.shard_channel import Book, ShardChannel
from holdfast.engine.train.step.agent_link import AgentLink
from holdfast.engine.train.step.driver import Driver
from holdfast.engine.wire.messages import Address


class LeadingShard:
    """Connects to the processes of shards 1 and up, one for each of `channels`."""

    def __init__(self, worker: WorkerId, channels: Sequence[ShardChannel], link: AgentLink) -> None:
        self._worker = worker
        self._channels = channels
        self._link = link
        self._events = ShardEvents(len(channels) + 1)
        # the virtual ranks that were last reported to the others
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
        """Have all of them carry out what the machine has decided, if that is for them."""
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
