"""Keeps the newest state of a run, from its files and its coordinator, and hands it to clients.

A topic has one newest message, or a list that grows. A slow client cannot slow down the rest: it
loses all messages that wait for it, gets their number, and then the whole state again. When no
coordinator answers, the feed shows that and continues with the files; every look asks again.
"""

from __future__ import annotations

import asyncio
import collections
import json
import ssl
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from holdfast.engine.core.errors import HoldfastError
from holdfast.engine.core.plain_text import escape_values
from holdfast.engine.runtime.contact import job_status
from holdfast.engine.runtime.job_status import JobStatus
from holdfast.engine.runtime.rundir import RunDir
from holdfast.reports.dashboard.run_files import RunFiles

CLIENTS_MAX = 32
QUEUE_MAX = 64  # messages
LIST_MAX = 500  # newest items of a topic that grows
QUIET_S = 10.0  # then a line without meaning shows whether the client is still there
FILES_S = 0.5  # between looks at the files
STATUS_S = 1.0  # between questions to the coordinator
OVER_S = 5.0  # the same, once the run is over: it may be resumed


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
        """Wait for messages, and return the next ones to send; none after 10 s."""
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
        """Return the newest value of each topic; of a list, its newest items."""
        return {topic: self._value_of(topic) for topic in self._newest}

    def messages(self) -> list[str]:
        """Return messages with the whole state."""
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


class RunWatch:
    """Watches one run. `run` ends only when it is cancelled."""

    def __init__(
        self,
        run_dir: RunDir,
        tls: ssl.SSLContext | None,
        feed: Feed,
        update: Callable[[], None] | None = None,
    ) -> None:
        """`update` brings the files up to date, if they are copies of those elsewhere."""
        self._update = update
        self._run_dir = run_dir
        self._tls = tls
        self._feed = feed
        self._files = RunFiles(run_dir)
        self._answered_at: float | None = None

    async def run(self) -> None:
        """Watch until cancelled."""
        await asyncio.gather(self._watch_files(), self._watch_status())

    async def look_at_files(self) -> None:
        """Read the new lines of the files, once. A file that cannot be used now is read later."""
        files = self._files
        try:
            was_cut, events = await asyncio.to_thread(files.read_events)
            if was_cut:
                self._feed.restart("events")
            if events or "events" not in self._feed.state():
                self._feed.append("events", events)
            spec = await asyncio.to_thread(self._run_dir.spec)
            for topics in (
                await asyncio.to_thread(files.read_run, spec),
                files.read_notes(),
                await asyncio.to_thread(files.read_losses),
                await asyncio.to_thread(files.read_time_left),
                await asyncio.to_thread(files.read_times),
                await asyncio.to_thread(files.read_machines),
            ):
                for topic, value in topics.items():
                    self._feed.publish(topic, value)
            if self._update is not None:
                await asyncio.to_thread(self._update)
        except (HoldfastError, OSError) as error:
            self._feed.publish("files", {"problem": str(error)})
        else:
            self._feed.publish("files", {"problem": ""})

    async def look_at_status(self) -> bool:
        """Ask the coordinator once; return whether it has answered."""
        try:
            status = await asyncio.to_thread(job_status, self._run_dir, self._tls)
        except (HoldfastError, OSError) as error:
            over = self._run_dir.outcome() is not None
            link = {"state": "over" if over else "lost", "text": str(error)}
            self._feed.publish("link", {**link, "answered": self._answered_at})
            self._feed.publish("status", None)
            return False
        self._answered_at = time.time()
        text = f"the coordinator answers (pid {status.coordinator.pid})"
        self._feed.publish("link", {"state": "live", "text": text, "answered": None})
        self._feed.publish("status", describe_status(status))
        return True

    async def _watch_files(self) -> None:
        while True:
            await self.look_at_files()
            await asyncio.sleep(FILES_S)

    async def _watch_status(self) -> None:
        while True:
            answers = await self.look_at_status()
            over = not answers and self._run_dir.outcome() is not None
            await asyncio.sleep(OVER_S if over else STATUS_S)


def describe_status(status: JobStatus) -> dict[str, Any]:
    """Return a status for the page: rows of workers are short, since there may be thousands."""
    return {
        "state": status.state.value,
        "view": status.view,
        "step": status.step,
        "term": status.coordinator.term,
        "leader": status.leader,
        "nodes": [
            {
                "id": node.id,
                "pid": node.pid,
                "silent": node.silent,
                "draining": node.draining,
                "members": node.members,
                "domains": node.domains,
            }
            for node in status.agents
        ],
        "workers": [
            [
                *(each.id, each.agent, each.state.value, each.pid or None, each.incarnation),
                *(each.step, list(each.virtual_ranks), each.detail),
            ]
            for each in status.workers
        ],
    }
