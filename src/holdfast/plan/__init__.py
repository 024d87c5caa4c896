"""Predicts the time and the cost of a job on a cluster that need not exist yet."""

from __future__ import annotations

from holdfast.engine.plugins import Command, Plugin

PLUGIN = Plugin(
    commands={
        "plan": Command(
            text="choose redundancy, spares and intervals for a cluster that fails",
            module="holdfast.plan.plan_command",
        ),
    },
)
