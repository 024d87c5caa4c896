"""Keeps one framework subscribed to Mesos, and makes its calls.

The framework's id is in the run directory, by which a restarted command goes on with its tasks.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.clusters.mesos.mesos_stream import SCHEDULER, STREAM_ID, MesosStream, subscribe
from holdfast.clusters.mesos.mesos_waiting import UNUSABLE
from holdfast.clusters.rest_link import RestLink
from holdfast.engine.core.errors import Refused, Unreachable
from holdfast.engine.core.fleet.placements import PlacementId
from holdfast.engine.net.standard_streams import print_plain
from holdfast.engine.state.store.regular_files import (
    DOCUMENT_BYTES_MAX,
    create_regular,
    read_regular,
)

FRAMEWORK = "mesos_framework"  # in the run directory
REMOVED = "Framework has been removed"  # Mesos' own words, for one that it has given up
NOT_SUBSCRIBED = (400, 403)  # also for the id of an older subscription


@dataclass(frozen=True, slots=True, kw_only=True)
class MesosFramework:
    """Describes the framework of one job, and its tasks: all run and need the same.

    `command`: the task's name is added to it. `failover_s`: how long tasks go on without us.
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
        """Return what a task needs, by Mesos' names of resources."""
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
            say(f"Mesos has removed framework {kept} and ended its tasks: another one is made")
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
        """Have Mesos end the framework with all its tasks, if there is one."""
        if self.kept_id():
            self.call("TEARDOWN")
            self._id_file.unlink()
            self.close()

    def close(self) -> None:
        """End the subscription; tasks go on until the failover time-out."""
        if self._stream is not None:
            self._stream.close()


def say(text: str) -> None:
    print_plain(f"holdfast: {text}", file=sys.stderr, flush=True)
