"""Checks what is promised to people: how many nodes take part, who leads, what is kept.

Each check compares an order of the coordinator, or what a process does, with facts of the simulated
world and with what reached the coordinator, never with what a machine believes.
"""

from __future__ import annotations

from holdfast.core.types import JobRecord
from holdfast.sim.run_options import Options
from holdfast.sim.wrong_bits import Violation


class Promises:
    """Observes one run; raises Violation when a promise is broken."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def ordered(self, record: JobRecord) -> None:
        """Check what the journal orders."""
        nodes = sorted({slot.agent for slot in record.slots})
        if len(nodes) > self._options.nodes_max:
            raise Violation(f"{nodes} have slots: {self._options.nodes_max} nodes may take part")
