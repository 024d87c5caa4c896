"""Checks what is promised to people: how many nodes take part, who leads, what is kept.

Each check compares an order of the coordinator, or what a process does, with facts of the simulated
world and with what reached the coordinator, never with what a machine believes.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.core.types import AgentId, AgentReport, JobRecord
from holdfast.sim.run_options import Options
from holdfast.sim.seams import Actor
from holdfast.sim.wrong_bits import Violation


class Promises:
    """Observes one run; raises Violation when a promise is broken."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._fence_s = options.lease_s + options.lease_margin_s
        self._started_at = 0.0  # the present coordinator
        self._heard: dict[AgentId, tuple[float, AgentReport]] = {}  # by it: the newest of each

    # ------------------------------------------------------------ what the coordinator knows

    def listens(self, now: float) -> None:
        """Note that a coordinator starts, and has heard nobody."""
        self._started_at = now
        self._heard.clear()

    def heard(self, report: AgentReport, now: float) -> None:
        """Note that the coordinator takes in a report."""
        _, newest = self._heard.get(report.agent, (now, report))
        if (report.incarnation, report.seq) >= (newest.incarnation, newest.seq):
            self._heard[report.agent] = now, report

    def _heard_at(self, agent: AgentId) -> float:
        return self._heard[agent][0] if agent in self._heard else self._started_at

    # ------------------------------------------------------------ what is promised

    def ordered(self, record: JobRecord) -> None:
        """Check what the journal orders."""
        nodes = sorted({slot.agent for slot in record.slots})
        if len(nodes) > self._options.nodes_max:
            raise Violation(f"{nodes} have slots: {self._options.nodes_max} nodes may take part")

    def finished(self, live: Iterable[Actor], now: float) -> None:
        """Check that nothing runs when the job is over, but on nodes that nobody can hear."""
        for process in live:
            if now < self._heard_at(process.agent) + self._fence_s:
                raise Violation(f"the job is said to be over, and worker {process.key} runs")
