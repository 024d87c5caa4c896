"""Hands the newest state of a run to its clients. A slow client cannot slow down others.

A topic has one newest message, or a list that grows. A client that reads too slowly loses all
messages that wait for it; it is told how many, and gets the whole state again.
"""

from __future__ import annotations

import asyncio
import collections
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from holdfast.engine.core.plain_text import escape_values

CLIENTS_MAX = 32
QUEUE_MAX = 64  # messages
LIST_MAX = 500  # newest items of a topic that grows
QUIET_S = 10.0  # then a line without meaning shows whether the client is still there


def encode_message(topic: str, value: Any) -> str:
    """Return one message of a server-sent stream."""
    return f"event: {topic}\ndata: {json.dumps(escape_values(value), allow_nan=False)}\n\n"


class Client:
    """Keeps the messages that one client has not read yet."""

    def __init__(self, feed: Feed, queue_max: int) -> None:
        self._feed = feed
        self._queue_max = queue_max
        self._queue: collections.deque[str] = collections.deque()
        self._dropped = 0
        self._filled = asyncio.Event()

    def wake(self) -> None:
        """End the wait of `take`."""
        self._filled.set()

    def put(self, message: str) -> None:
        """Add a message; a full queue is emptied first."""
        if self._dropped or len(self._queue) >= self._queue_max:
            self._dropped += len(self._queue) + 1
            self._queue.clear()
        else:
            self._queue.append(message)
        self._filled.set()

    async def take(self) -> list[str]:
        """Wait for messages, and return those that are to be sent next; none after 10 s."""
        if not self._queue and not self._dropped:
            self._filled.clear()
            try:
                await asyncio.wait_for(self._filled.wait(), QUIET_S)
            except asyncio.TimeoutError:
                return []
        dropped, self._dropped = self._dropped, 0
        found, first = list(self._queue), []
        self._queue.clear()
        if dropped:
            first = [encode_message("dropped", {"count": dropped}), *self._feed.messages()]
        return [*first, *found]


class Feed:
    """Keeps the newest state by topic, and the clients that follow it. For one event loop."""

    def __init__(self, queue_max: int = QUEUE_MAX) -> None:
        self._queue_max = queue_max
        self._newest: dict[str, Any] = {}
        self._totals: dict[str, int] = {}  # for a topic that grows: its items since the beginning
        self._clients: set[Client] = set()
        self._closed = False

    @property
    def is_full(self) -> bool:
        return len(self._clients) >= CLIENTS_MAX

    def state(self) -> dict[str, Any]:
        """Return the newest value of each topic; of one that grows its newest items."""
        return {topic: self._value_of(topic) for topic in self._newest}

    def messages(self) -> list[str]:
        """Return messages that tell the whole state."""
        return [encode_message(topic, value) for topic, value in self.state().items()]

    def publish(self, topic: str, value: Any) -> None:
        """Replace the value of a topic, if it differs, and hand it to all clients."""
        if topic in self._newest and self._newest[topic] == value:
            return
        self._newest[topic] = value
        self._hand_out(encode_message(topic, value))

    def append(self, topic: str, items: Sequence[Any]) -> None:
        """Add items to a topic that grows, and hand out these alone."""
        before = self._totals.get(topic, 0)
        self._totals[topic] = before + len(items)
        self._newest[topic] = [*self._newest.get(topic, ()), *items][-LIST_MAX:]
        shown = list(items)[-LIST_MAX:]
        value = {"first": self._totals[topic] - len(shown), "items": shown}
        self._hand_out(encode_message(topic, value))

    def restart(self, topic: str) -> None:
        """Forget all items of a topic that grows."""
        self._newest[topic], self._totals[topic] = [], 0
        self._hand_out(encode_message(topic, self._value_of(topic)))

    def close(self) -> None:
        """End the streams of all clients."""
        self._closed = True
        for client in self._clients:
            client.wake()

    async def follow(self) -> AsyncIterator[str]:
        """Yield the whole state, and then each change, for one client."""
        client = Client(self, self._queue_max)
        self._clients.add(client)
        try:
            yield "retry: 1000\n\n"
            for message in self.messages():
                yield message
            while not self._closed:
                for message in await client.take() or [": quiet\n\n"]:
                    yield message
        finally:
            self._clients.discard(client)

    def _value_of(self, topic: str) -> Any:
        value = self._newest[topic]
        if topic in self._totals:
            return {"first": self._totals[topic] - len(value), "items": value, "whole": True}
        return value

    def _hand_out(self, message: str) -> None:
        for client in self._clients:
            client.put(message)
