"""Keeps the records of a fake Mesos (fake_mesos.py), in the shapes that its master sends.

No real master was asked: fields and values are those of the sources, the ids are made up.

* `mesos.proto`, `scheduler.proto`: include/mesos/v1/ of https://github.com/apache/mesos, at 1.11
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

HEARTBEAT_S = 15.0  # DEFAULT_HEARTBEAT_INTERVAL of src/master/constants.hpp
CPUS, MEMORY_MB = 8.0, 8192.0
CLUSTER = "5b2e"  # begins all ids that the master gives


@dataclass(slots=True, kw_only=True)
class FakeAgent:
    """Describes an agent; `back_at`: when a new leading master will know it again."""

    id: str
    host: str
    region: str
    zone: str
    memory_mb: float = MEMORY_MB
    up: bool = True
    leaves_at: float | None = None  # its maintenance, in seconds since the epoch
    back_at: float = 0.0

    def resources(self, cpus: float, memory_mb: float, role: str) -> list[dict[str, Any]]:
        # mesos.proto, Resource: with the role that it is allocated to.
        about = {"type": "SCALAR", "role": "*", "allocation_info": {"role": role}}
        found = {"cpus": cpus, "mem": memory_mb}
        ports = {"name": "ports", "type": "RANGES", "ranges": {"range": [{"begin": 1, "end": 9}]}}
        return [
            *({"name": name, "scalar": {"value": value}, **about} for name, value in found.items()),
            {**ports, "role": "*", "allocation_info": {"role": role}},
        ]

    def unavailability(self) -> dict[str, Any]:
        # mesos.proto, Unavailability: TimeInfo has nanoseconds since the epoch.
        if self.leaves_at is None:
            return {}
        return {"unavailability": {"start": {"nanoseconds": int(self.leaves_at * 1e9)}}}


@dataclass(slots=True, kw_only=True)
class FakeTask:
    """Describes a task; its last update is sent again until it is acknowledged."""

    id: str
    agent: FakeAgent
    cpus: float
    memory_mb: float
    process: subprocess.Popen[bytes]
    state: str = "TASK_RUNNING"
    killed: bool = False
    unacknowledged: dict[str, Any] | None = None

    def status(self, state: str, **fields: Any) -> dict[str, Any]:
        # mesos.proto, TaskStatus.
        return {
            "task_id": {"value": self.id},
            "agent_id": {"value": self.agent.id},
            "state": state,
            "source": "SOURCE_EXECUTOR",
            "timestamp": time.time(),
            **fields,
        }


@dataclass(slots=True, kw_only=True)
class FakeMesosFramework:
    """Describes a framework; `events`: of its subscription, None while there is none."""

    id: str
    info: dict[str, Any]
    events: queue.Queue[dict[str, Any] | None] | None = None
    stream: str = ""
    left_at: float = 0.0
    offers: dict[str, FakeAgent] = field(default_factory=dict)
    inverse: dict[str, FakeAgent] = field(default_factory=dict)
    refused: dict[str, float] = field(default_factory=dict)  # by agent: until when
    refused_inverse: dict[str, float] = field(default_factory=dict)
    tasks: dict[str, FakeTask] = field(default_factory=dict)

    @property
    def role(self) -> str:
        return str(self.info["roles"][0])

    def tell(self, kind: str, **fields: Any) -> None:
        # scheduler.proto, Event: the field of a kind has its name.
        if self.events is not None:
            self.events.put({"type": kind, **({kind.lower(): fields} if fields else {})})

    def update(self, status: dict[str, Any]) -> None:
        self.tell("UPDATE", status=status)

    def leave(self, now: float) -> None:
        """End the subscription: offers do not outlive it."""
        if self.events is not None:
            self.events.put(None)
        self.events, self.left_at = None, now
        self.offers, self.inverse = {}, {}


@dataclass(slots=True, kw_only=True)
class MesosKnobs:
    """Sets what the masters do wrong, or differently.

    `failing`: how many of the next calls fail. `lost`: kinds of calls that are carried out, and not
    answered. `muted`: subscriptions that stay silent. `passwords`: by user; without any, no caller
    is asked. `missing`: there is no Mesos at this address. `shy`: no caller may list agents.
    `away`: no master answers.
    """

    beat_s: float = HEARTBEAT_S
    failing: int = 0
    lost: list[str] = field(default_factory=list)
    muted: list[str] = field(default_factory=list)
    roles: Sequence[str] = ("*", "gpu")
    passwords: dict[str, str] = field(default_factory=dict)
    missing: bool = False
    shy: bool = False
    away: bool = False


def end_task(task: FakeTask) -> None:
    """End a task's group of processes, as an agent does at last."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(task.process.pid, signal.SIGKILL)
