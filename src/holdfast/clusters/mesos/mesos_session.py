"""Keeps one framework subscribed to a Mesos master, reads its events, and makes its calls.

Events arrive on one response without an end. A thread reads them and puts them in a queue. The
framework's id is in the run directory: with it a restarted command takes over its tasks. The
formats are in the documentation of Mesos' v1 scheduler HTTP API:
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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.clusters.rest_link import BYTES_MAX, UNKNOWN, RestLink, read_answer
from holdfast.engine.core.errors import Refused, Unreachable
from holdfast.engine.core.fleet.placements import PlacementId
from holdfast.engine.net.standard_streams import print_line
from holdfast.engine.state.store.regular_files import (
    DOCUMENT_BYTES_MAX,
    create_regular,
    parse_json,
    read_regular,
    read_up_to,
)

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


FRAMEWORK = "mesos_framework"  # in the run directory
UNUSABLE = frozenset({"revocable", "shared"})  # keys of resources that a task must not take
# Mesos' own words for a framework that it has given up.
REMOVED = "Framework has been removed"
NOT_SUBSCRIBED = (400, 403)  # also for the id of an older subscription


@dataclass(frozen=True, slots=True, kw_only=True)
class MesosFramework:
    """Describes the framework of one job, and its tasks: all run and need the same.

    `command`: the task's name is added to it. `failover_s`: how long tasks continue without us.
    """

    name: str
    user: str
    command: tuple[str, ...]
    role: str = "*"
    principal: str = ""
    cpus: float = 1
    memory_mb: int = 1024
    gpus: int = 0
    failover_s: float = 3600.0

    @property
    def needs(self) -> dict[str, float]:
        """Return the amounts that a task needs, by Mesos' names of resources."""
        return {"cpus": self.cpus, "mem": self.memory_mb, "gpus": self.gpus}

    def info(self, id_: str = "") -> dict[str, Any]:
        """Return the description by which Mesos knows the framework (FrameworkInfo)."""
        gpus = [{"type": "GPU_RESOURCES"}] if self.gpus else []
        return {
            "name": self.name,
            "user": self.user,
            "roles": [self.role],
            "capabilities": [{"type": "MULTI_ROLE"}, *gpus],
            "failover_timeout": self.failover_s,
            "checkpoint": True,  # tasks outlive a restart of their agent
            **({"principal": self.principal} if self.principal else {}),
            **({"id": {"value": id_}} if id_ else {}),
        }

    def task(self, id_: PlacementId, offer: Mapping[str, Any]) -> dict[str, Any] | None:
        """Describe a task on an offer (TaskInfo); None if the offer has too little."""
        resources: list[dict[str, Any]] = []
        for name, need in self.needs.items():
            for each in offer["resources"]:
                usable = each["name"] == name and not UNUSABLE & set(each)
                if usable and need > 0:
                    used = min(need, each["scalar"]["value"])
                    resources.append({**each, "scalar": {"value": used}})
                    need -= used
            if need > 0:
                return None
        words = [*self.command, id_]
        return {
            "name": id_,
            "task_id": {"value": id_},
            "agent_id": offer["agent_id"],
            "resources": resources,
            "command": {"shell": False, "value": words[0], "arguments": words},
        }


class Unsubscribed(Unreachable):
    """Reports that a subscription has ended, as another one of the framework is in its place."""


class MesosSession:
    """Subscribes as one framework, again whenever a subscription is broken.

    `id_file`: where the framework's id is kept. It is for one thread at a time.
    """

    def __init__(self, link: RestLink, framework: MesosFramework, id_file: Path) -> None:
        self._link = link
        self._framework = framework
        self._id_file = id_file
        self._stream: MesosStream | None = None

    def subscription(self) -> MesosStream:
        """Return the subscription, after making a new one if it is broken. Refused; Unreachable."""
        if self._stream is not None and not self._stream.is_broken():
            return self._stream
        self.close()
        kept = self.kept_id()
        try:
            stream = subscribe(self._link, self._framework.info(kept))
        except Refused as error:
            if not (kept and REMOVED in str(error)):
                raise
            print_line(
                f"Mesos has removed framework {kept} and ended its tasks: another one is made"
            )
            stream = subscribe(self._link, self._framework.info())
        if stream.framework != kept:
            with open(create_regular(self._id_file, 0o600), "w") as file:
                file.write(stream.framework)
        self._stream = stream
        self.send(stream, "REVIVE", {})  # offers refused by an earlier subscription come again
        return stream

    def call(self, kind: str, fields: Mapping[str, Any] | None = None) -> None:
        """Make a call on the subscription, or on a new one. Refused; Unreachable."""
        self.send(self.subscription(), kind, fields or {})

    def send(self, stream: MesosStream, kind: str, fields: Mapping[str, Any]) -> None:
        """Make a call on one subscription; Mesos carries it out later. Refused; Unreachable."""
        body: dict[str, Any] = {"framework_id": {"value": stream.framework}, "type": kind}
        if fields:
            body[kind.lower()] = fields
        try:
            answer = self._link.ask_now("POST", SCHEDULER, body, {STREAM_ID: stream.id})
            if answer.status in NOT_SUBSCRIBED:
                raise Unsubscribed(f"Mesos has ended the subscription: {answer.problem}")
            if not answer.accepted:
                raise self._link.failure(answer)
        except (Refused, Unreachable):
            stream.close()  # the next one is offered what this one may hold without our knowledge
            raise

    def kept_id(self) -> str:
        """Return the framework's id in Mesos; "" if it has none yet."""
        with contextlib.suppress(FileNotFoundError):
            return read_regular(self._id_file, DOCUMENT_BYTES_MAX).decode().strip()
        return ""

    def end(self) -> None:
        """Ask Mesos to end the framework with all its tasks, if there is one."""
        if self.kept_id():
            self.call("TEARDOWN")
            self._id_file.unlink()
            self.close()

    def close(self) -> None:
        """End the subscription; tasks continue until the failover time-out."""
        if self._stream is not None:
            self._stream.close()
