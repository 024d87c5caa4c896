"""Examines a machine before it joins a job."""

from __future__ import annotations

from holdfast.engine.plugins import Command, Plugin

PLUGIN = Plugin(
    commands={
        "doctor": Command(
            text="examine this machine before it joins a job",
            module="holdfast.doctor.doctor_command",
        ),
    },
)
