"""Describes a running job as `holdfast status` shows it: one struct for all its readers.

The coordinator makes it (coordinate/status_making.py) and sends it as JSON. Commands, fleets and
tests read it here, so that a field is named and typed in one place.
"""

from __future__ import annotations

import enum
import json
from typing import Any

import msgspec

from holdfast.engine.core.errors import WireError
from holdfast.engine.state.store.regular_files import parse_json


class JobPhase(enum.Enum):
    """Names what a job as a whole is doing."""

    STARTING = "starting"  # no view has been formed yet
    TRAINING = "training"
    RECOVERING = "recovering"  # a view has ended, and the next one is not formed yet
    FINISHING = "finishing"  # every script may leave its last loop
    STOPPING = "stopping"  # the outcome is decided; processes are being ended
    OVER = "over"


class ProcessPhase(enum.Enum):
    """Names what a worker's process is doing, as the coordinator last heard."""

    BOOTING = "booting"
    EXITED = "exited"
    FAILED = "failed"
    LOST = "lost"
    STORE = "store"  # serves torch.distributed's store to a group
    SPARE = "spare"
    SUSPENDED = "suspended"
    CHANGING_VIEW = "changing view"
    STOPPED = "stopped"
    JOINING = "joining"
    HOT_SPARE = "hot spare"
    ENDED = "ended"
    WAITING = "waiting"
    COMPUTING = "computing"

    @property
    def hosts(self) -> bool:
        """Return whether the process is a member of the view that hosts virtual ranks."""
        return self in HOSTS


HOSTS = (
    ProcessPhase.COMPUTING,
    ProcessPhase.WAITING,
    ProcessPhase.ENDED,
    ProcessPhase.CHANGING_VIEW,
    ProcessPhase.STOPPED,
    ProcessPhase.JOINING,
)


class CoordinatorStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Describes the coordinator that answers."""

    pid: int
    term: int


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Describes a node. A new coordinator knows some nodes by the last view only: no pid yet."""

    id: str
    incarnation: int | None = None
    pid: int | None = None  # the agent's
    silent: bool = False
    draining: str = ""  # the reason; empty: it is not being drained
    domains: tuple[str, ...] = ()
    members: int = 0  # workers on it that are members of the view
    needed: bool = False  # it leaves, and others have yet to take over what is in its memory
    pieces_bytes: int = 0  # pieces of the job's state in its memory


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Describes the process of a worker."""

    id: int
    pid: int = 0
    agent: str  # its node
    incarnation: int = 1
    state: ProcessPhase
    virtual_ranks: tuple[int, ...] = ()
    step: int = 0  # steps that it has committed
    detail: str = ""


class ServerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Describes a server of tables that listens."""

    number: int
    agent: str  # its node
    pid: int
    address: str


class MemoryStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Describes the copies of the job's state in the memory of nodes."""

    redundancy: str
    step: int  # all nodes that keep pieces have those of this step
    bytes: int


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Describes a running job. `group`: its processes form a fixed torch.distributed group."""

    view: int = 0
    step: int = 0
    state: JobPhase = JobPhase.STARTING
    coordinator: CoordinatorStatus
    agents: tuple[NodeStatus, ...] = ()
    workers: tuple[ProcessStatus, ...] = ()
    leader: int | None = None
    group: bool = False
    memory: MemoryStatus | None = None  # None: nothing is kept there
    servers: tuple[ServerStatus, ...] = ()  # the tables' servers
    servers_held: int = 0  # this many hold all rows together; 0: the job has none
    servers_wanted: int = 0  # this many were asked for
    awaited: str = ""  # nodes that the cluster manager does not give yet, and its reasons

    def to_dict(self) -> dict[str, Any]:
        """Return it as `holdfast status --json` prints it."""
        found: dict[str, Any] = parse_json(encode_status(self))
        return found

    def node(self, name: str) -> NodeStatus | None:
        """Return the node of this name, or None."""
        return next((node for node in self.agents if node.id == name), None)


def encode_status(status: JobStatus) -> str:
    """Encode a status as JSON."""
    return json.dumps(msgspec.to_builtins(status))


def parse_status(text: str) -> JobStatus:
    """Parse a coordinator's answer. WireError if it is not one of this version of Holdfast."""
    try:
        return msgspec.convert(parse_json(text), JobStatus)
    except ValueError as error:
        raise WireError(
            f"the coordinator's status cannot be read ({error}): install the same version of "
            "Holdfast here and on the coordinator's machine"
        ) from None
