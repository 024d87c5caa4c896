"""Defines the messages between coordinator, agents and workers: reports up, directives down. Pure.

Both are level-triggered: each carries the whole state of its sender, never a change alone. So a
lost, repeated or late message does no harm, and the receiver drops one with an older number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from holdfast.engine.core.domains import Domains
from holdfast.engine.core.hosted_service import RunningServer, ServerLayout, ServerPlace
from holdfast.engine.core.redundancy import KeptPieces
from holdfast.engine.core.types import (
    NO_VIEW,
    AgentId,
    Incarnation,
    ProcessRole,
    ViewNumber,
    WorkerId,
)
from holdfast.engine.core.views import FollowOrder, View
from holdfast.engine.core.worker_status import WorkerStatus

# The usual number of the signal that asks a process to end.
SIGTERM = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Replaces this process by a worker on node `to`."""

    worker: WorkerId
    #: The process to replace; 0, in an order: the running one.
    incarnation: Incarnation = Incarnation(0)
    #: The node of the new worker; empty: any.
    to: AgentId = AgentId("")
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentReport:
    """Reports the whole state of a node to the coordinator."""

    agent: AgentId
    incarnation: Incarnation
    #: The number grows within one incarnation of the agent.
    seq: int
    slots: int
    #: The number of slots among them for workers that are held back.
    spares: int = 0
    pid: int = 0
    #: The reason for which this node asks that its workers leave at a step boundary; or empty.
    draining: str = ""
    #: The check that it fails, if that is the reason.
    failing: str = ""
    #: The time after which the node will be gone, as far as it knows.
    leaves_in_s: float = float("inf")
    #: The orders to move workers of this node.
    leaving: tuple[Move, ...] = ()
    #: The failure domains of this node.
    domains: Domains = ()
    #: The pieces of the job's state in its memory.
    kept: tuple[KeptPieces, ...] = ()
    #: HOST:PORT where it serves these pieces.
    pieces_at: str = ""
    #: The bytes used by these pieces.
    pieces_bytes: int = 0
    #: Its servers of the hosted service.
    servers: tuple[RunningServer, ...] = ()
    #: The newest view that it knows.
    view_known: ViewNumber = NO_VIEW
    #: That view, for a coordinator that has forgotten it; usually None.
    view: View | None = None
    release_loop: int = 0
    #: It knows that the job is over: it starts no more processes.
    ending: bool = False
    workers: tuple[WorkerStatus, ...] = ()

    @property
    def leaves(self) -> bool:
        """Return whether the node is to be left for good, and not just until it is well again."""
        return bool(self.draining) and not self.failing


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedProcess:
    """Names one process that the coordinator wants to run on a node, and its role."""

    worker: WorkerId
    incarnation: Incarnation
    role: ProcessRole = ProcessRole.WORKER
    #: The number of this node among the worker's nodes.
    place: int = 0
    #: The rendezvous address at which processes on further nodes find the first node's process.
    meets_at: str = ""


class Freed(NamedTuple):
    """Frees a leaving node: the job does not need the pieces in this report and earlier ones."""

    agent: AgentId
    incarnation: Incarnation
    report: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Directive:
    """Orders the work of a node, from coordinator to agent. Ordered by (term, seq)."""

    term: int
    seq: int
    agent: AgentId
    agent_incarnation: Incarnation
    #: The newest report received. The agent's lease counts from the time when it sent that report.
    heard: int = 0
    #: The processes that the node should run.
    wanted: tuple[WantedProcess, ...] = ()
    #: The newest view that is stopped: no worker may act in it any more.
    stop_view: ViewNumber = NO_VIEW
    #: The newest view that ends at its next step boundary.
    pending_view: ViewNumber = NO_VIEW
    #: The state at that boundary is saved.
    pending_save: bool = False
    #: The number of the newest view.
    view_number: ViewNumber = NO_VIEW
    #: The newest view, for agents that may not know it.
    view: View | None = None
    #: Scripts leave their ended loops up to this one.
    release_loop: int = 0
    #: The coordinator still collects reports: the node continues as before.
    undecided: bool = False
    #: The job is over.
    shutdown: bool = False
    #: The signal by which scripts for torchrun are asked to end.
    end_signal: int = SIGTERM
    #: The number of the newest order to save the state at the next boundary; 0: none.
    save_wanted: int = 0
    #: The order to feed workers that join later.
    follow: FollowOrder | None = None
    #: The nodes that may leave with their pieces of the state.
    freed: tuple[Freed, ...] = ()
    #: All servers of the hosted service.
    servers: tuple[ServerPlace, ...] = ()
    #: The layout of the servers' contents.
    layout: ServerLayout | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDirective:
    """Passes the part of a directive that concerns a worker on to it.

    The channel from agent to worker keeps the order. The fields are those of the directive, and
    one more.
    """

    stop_view: ViewNumber = NO_VIEW
    pending_view: ViewNumber = NO_VIEW
    pending_save: bool = False
    view: View | None = None
    release_loop: int = 0
    save_wanted: int = 0
    follow: FollowOrder | None = None
    servers: tuple[ServerPlace, ...] = ()
    layout: ServerLayout | None = None
    #: At this time of its node's clock the worker promises its view.
    acting_until: float = float("inf")
