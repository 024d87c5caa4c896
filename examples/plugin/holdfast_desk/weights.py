"""Serves the weight of each sample, which is computed once for all workers: a hosted service.

    weights = holdfast_desk.weights.Weights()
    job.protect(model=model, optimizer=optimizer, weights=weights)
    ...
    loss = weights.ask(number) * ...

    holdfast run --servers 2 --hosted-service weights train.py

A weight is a function of the sample alone, so it does not matter which server gives it, nor how
often one is lost. A service with contents of its own must copy them to new servers, and save them
with each checkpoint, as `holdfast.tables` does.
"""

from __future__ import annotations

import functools
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from holdfast.engine.core.errors import WireError
from holdfast.engine.core.hosted_service import ServerLayout
from holdfast.engine.core.job_spec import JobSpec
from holdfast.engine.net import peer_stream
from holdfast.engine.net.peer_listener import serve
from holdfast.engine.net.tls import PeerIdentity
from holdfast.engine.train.script.service_link import ServiceClient, ServiceLink

MAGIC = b"desk-w-1"
PATIENCE_S = 5.0  # a server that is silent for longer is asked again
PAUSE_S = 0.05


class Question(msgspec.Struct):
    """Asks for the weight of a sample."""

    number: int


class Answer(msgspec.Struct):
    """Gives the weight."""

    weight: float


# ---------------------------------------------------------------- a server


def listen(spec: JobSpec, identity: PeerIdentity, host: str, say: Callable[[str], None]) -> str:
    """Serve weights on this host from now on; return the address. OSError."""
    return serve(host, identity, MAGIC, answer_all, say)[0]


def answer_all(channel: socket.socket, _: peer_stream.Purpose) -> None:
    """Answer a worker's questions until it goes. OSError, WireError."""
    while True:
        question = peer_stream.receive_message(channel, Question)
        peer_stream.send_message(channel, Answer(compute_weight(question.number)))


@functools.cache
def compute_weight(number: int) -> float:
    """Return the weight of a sample: it is less, the longer its Collatz sequence is."""
    steps, number = 1, number + 1
    while number != 1:
        steps, number = steps + 1, 3 * number + 1 if number % 2 else number // 2
    return 1.0 / steps


# ---------------------------------------------------------------- a worker


def connect(link: ServiceLink, protected: Mapping[str, Any]) -> ServiceClient:
    """Connect all protected `Weights` with the servers of the job."""
    client = WeightsClient(link)
    for value in protected.values():
        if isinstance(value, Weights):
            value.client = client
    return client


class Weights:
    """Looks up weights. It has no state of its own; the job's first loop connects it."""

    def __init__(self) -> None:
        self.client: WeightsClient | None = None

    def ask(self, number: int) -> float:
        """Return the weight of a sample."""
        assert self.client is not None, "weights are looked up in the job's loops"
        return self.client.ask(number)

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state: a weight is a function of its sample."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Accept an empty state."""


class WeightsClient(ServiceClient):
    """Asks the servers of the job; a lost server is asked again once it is back."""

    def __init__(self, link: ServiceLink) -> None:
        self._link, self._layout = link, link.layout
        self._channels: dict[str, socket.socket] = {}
        self._reported: object = None

    def ask(self, number: int) -> float:
        """Return the weight of a sample from any server that answers."""
        turn = number
        while True:
            self._report_servers()
            address = self._link.find_address(turn % self._layout.count)
            try:
                if address:
                    return self._ask_at(address, number)
            except (OSError, WireError):
                if (channel := self._channels.pop(address, None)) is not None:
                    channel.close()
            turn += 1
            time.sleep(PAUSE_S)

    def _ask_at(self, address: str, number: int) -> float:
        if address not in self._channels:
            self._channels[address] = peer_stream.connect(
                address, self._link.identity, MAGIC, (0, 0, 0), PATIENCE_S
            )
        peer_stream.send_message(self._channels[address], Question(number))
        return peer_stream.receive_message(self._channels[address], Answer).weight

    def _report_servers(self) -> None:
        """Report all new servers as complete, as each can compute every weight."""
        numbers, link = range(self._layout.servers), self._link
        known = {find(n) for n in numbers for find in (link.find_address, link.find_heir)} - {""}
        news = tuple(sorted(known)), self._layout
        if news != self._reported:
            self._reported = news
            link.report(*news)

    def change_layout(self, layout: ServerLayout) -> None:
        """Use another number of servers."""
        if layout.number > self._layout.number:
            self._layout = layout

    def save(self, step: int, token: str, first: int) -> int:
        """Return 0, because the servers have no contents to save."""
        return 0
