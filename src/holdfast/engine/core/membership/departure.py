"""Decides when a node's agent may end: its node leaves, or its job is gone. Pure.

It also keeps the orders to move workers away from the node."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from holdfast.engine.core.directives import Directive, Move
from holdfast.engine.core.redundancy import KeptPieces
from holdfast.engine.core.types import AgentId, Incarnation, WorkerId

NEVER = float("inf")


class Departure:
    """Keeps the last request to leave a node. A node that leaves for good is never used again.

    `failing`: the check that failed; empty if a person or a manager asks for it.
    """

    def __init__(self) -> None:
        self.reason = self.failing = ""
        self.for_good = False
        self._by = NEVER
        self._told_in = 0  # number of the first report with this request
        self._pieces: tuple[KeptPieces, ...] = ()
        self._listed_in = 0  # number of the first report that lists them

    def ask(self, reason: str, failing: str, for_good: bool, by: float, report: int) -> bool:
        """Take in a request, or (an empty reason) its end; return whether that is news.

        `report`: the number of the next report to the coordinator.
        """
        if self.for_good and not for_good:
            return False
        if not self.for_good:
            self._told_in = report
        news = by < self._by or (reason, failing) != (self.reason, self.failing)
        self.reason, self.failing, self.for_good = reason, failing, for_good
        self._by = min(self._by, by) if for_good else by
        return news

    def keep(self, pieces: tuple[KeptPieces, ...], report: int) -> None:
        """Record the pieces of the state that are here; `report` is the first one to list them."""
        if pieces != self._pieces:
            self._pieces, self._listed_in = pieces, report

    def may_end(self, agent: AgentId, told: Directive | None, now: float, *, alone: bool) -> bool:
        """Return whether the job is over, or this node leaves and the job needs it no more.

        Its servers are needed until the coordinator knows of the departure, and then until their
        heirs elsewhere have all contents. Its pieces of the state are needed until the coordinator
        frees it by a report that lists them. If it has not answered for very long (`alone`), it has
        given them up. But neither is needed for longer than the node is there.
        """
        if told is None or told.shutdown:
            return told is not None
        mine = {each.number for each in told.servers if each.agent == agent and not each.heir}
        if told.heard >= self._told_in:
            mine &= {each.number for each in told.servers if each.heir}
        me = agent, told.agent_incarnation
        is_free = any(f[:2] == me and f.report >= self._listed_in for f in told.freed)
        keeps = bool(self._pieces) and not (is_free or alone)
        return self.for_good and (not (mine or keeps) or now >= self._by)

    @property
    def ends_at(self) -> float:
        """Return when this node is taken away for good; infinite if that is not known."""
        return self._by if self.for_good else NEVER

    def remaining_s(self, now: float) -> float:
        """Return the seconds until this node is taken away; infinite if that is not known."""
        return max(self._by - now, 0.0)


class MoveOrders:
    """Keeps the orders to move workers of a node, the newest for each worker."""

    def __init__(self) -> None:
        self._orders: dict[WorkerId, Move] = {}

    def ask(self, order: Move, incarnation: Incarnation) -> bool:
        """Record the order to move this worker's process; return whether it is new."""
        named = dataclasses.replace(order, incarnation=incarnation)
        news = self._orders.get(order.worker) != named
        self._orders[order.worker] = named
        return news

    def list_open(self, find: Callable[[WorkerId, Incarnation], object | None]) -> tuple[Move, ...]:
        """Return the orders for processes that `find` finds."""
        orders = (order for _, order in sorted(self._orders.items()))
        return tuple(o for o in orders if find(o.worker, o.incarnation) is not None)


class OwnJob:
    """Keeps the job of one node, which never changes once it is known.

    `other`: the job that was met in its place; empty if none was. `ended`: whether the node has
    learnt, without its coordinator, that the job is over.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.other = ""
        self.ended = False

    @property
    def is_gone(self) -> bool:
        """Return whether orders of this node's own job can never come again."""
        return self.ended or self.other != ""

    def meet(self, job: str) -> bool:
        """Take in whose coordinator was reached; return whether it is this node's own.

        A node without a job belongs to the first job that it meets.
        """
        self._name = self._name or job
        if job and job != self._name:
            self.other = job
        return not self.other

    @property
    def problem(self) -> str:
        """Return the reason for the end of the node's agent; empty if it met no other job."""
        if not self.other:
            return ""
        return (
            f"this node is of job {self._name}, whose coordinator is gone, and job {self.other} is "
            "at its address now: its workers are ended; start the node again to have it in that job"
        )
