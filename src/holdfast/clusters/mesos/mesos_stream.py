"""Keeps a subscription to a Mesos master: its events, which arrive on one response without an end.

A thread reads them and puts them in a queue. The formats are those of Mesos' v1 scheduler HTTP API:
https://mesos.apache.org/documentation/latest/scheduler-http-api/
"""

from __future__ import annotations

import contextlib
import http.client
import os
import queue
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

from holdfast.clusters.rest_link import BYTES_MAX, UNKNOWN, RestLink, read_answer
from holdfast.engine.core.errors import Refused, Unreachable
from holdfast.engine.state.store.regular_files import parse_json, read_up_to

SCHEDULER = "/api/v1/scheduler"
STREAM_ID = "Mesos-Stream-Id"
HEARTBEAT_S = 15.0  # the documentation's example; a master names its own
MISSED = 5  # heartbeats, until a stream counts as broken: also the documentation's number
SILENCE_S_MAX = 75.0
EVENTS_MAX = 10_000  # in the queue: when it is full, the thread reads no further ones


class MesosStream:
    """Reads the events of one subscription. It is opened by `subscribe`."""

    def __init__(self, response: Any, framework: str, silence_s: float) -> None:
        self.framework = framework
        self.id: str = response.headers.get(STREAM_ID) or ""
        self._response = response
        self._silence_s = silence_s
        self._heard_at = time.monotonic()
        self._events: queue.Queue[dict[str, Any]] = queue.Queue(EVENTS_MAX)
        self._over = threading.Event()
        self._closing = threading.Lock()

    def start(self) -> None:
        threading.Thread(target=self._read, daemon=True, name="mesos-events").start()

    def take(self, within_s: float = 0.0) -> dict[str, Any] | None:
        """Return the next event; None if there is none within the time."""
        try:
            return self._events.get(timeout=within_s) if within_s > 0 else self._events.get_nowait()
        except queue.Empty:
            return None

    def is_broken(self) -> bool:
        """Return whether no further event will come, or too many heartbeats are missing."""
        return self._over.is_set() or time.monotonic() > self._heard_at + self._silence_s

    def close(self) -> None:
        """End the subscription; the master keeps the framework until its failover time-out."""
        self._over.set()
        with self._closing, contextlib.suppress(OSError):
            if not self._response.isclosed():  # the thread is woken, and closes it
                with socket.socket(fileno=os.dup(self._response.fileno())) as connection:
                    connection.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        try:
            for event in read_records(self._response):
                self._heard_at = time.monotonic()
                if event.get("type") != "HEARTBEAT":
                    self._put(event)
                if self._over.is_set():
                    return
        except (OSError, http.client.HTTPException, ValueError):
            pass  # it is subscribed again
        finally:
            self._over.set()
            with self._closing:
                self._response.close()

    def _put(self, event: dict[str, Any]) -> None:
        while not self._over.is_set():
            with contextlib.suppress(queue.Full):
                self._events.put(event, timeout=1.0)
                return


def subscribe(link: RestLink, framework: dict[str, Any]) -> MesosStream:
    """Subscribe as a framework, which Mesos gives an id if it has none.

    Refused, with Mesos' reason; Unreachable.
    """
    call: dict[str, Any] = {"type": "SUBSCRIBE", "subscribe": {"framework_info": framework}}
    if "id" in framework:
        call["framework_id"] = framework["id"]
    response = link.of_any(lambda: link.open("POST", SCHEDULER, call, {}, SILENCE_S_MAX))
    try:
        if response.status == UNKNOWN:
            raise Refused(f"there is no Mesos master: it has no {SCHEDULER}")
        if response.status >= 300:
            raise link.failure(read_answer(response)[0])
        first = next(read_records(response), {})
        if first.get("type") == "ERROR":
            raise Refused(f"Mesos says: {first['error']['message']}")
        told = first["subscribed"]
        framework_id = str(told["framework_id"]["value"])
        beat_s = float(told.get("heartbeat_interval_seconds") or HEARTBEAT_S)
    except (OSError, http.client.HTTPException) as error:
        response.close()
        raise link.silence(error) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        response.close()
        raise Refused("there is no Mesos master: its answer has another form") from None
    except (Refused, Unreachable):
        response.close()
        raise
    stream = MesosStream(response, framework_id, min(MISSED * beat_s, SILENCE_S_MAX))
    stream.start()
    return stream


def read_records(response: Any) -> Iterator[dict[str, Any]]:
    """Read the records of a stream: the length in bytes, a line feed, a JSON object. ValueError."""
    while line := response.readline(32):
        if not line.strip():
            continue
        size = int(line)
        if not 0 < size <= BYTES_MAX:
            raise ValueError(f"a record of {size} bytes")
        data = read_up_to(response, size)
        if len(data) < size:
            raise ValueError("the stream has ended within a record")
        yield parse_json(data)
