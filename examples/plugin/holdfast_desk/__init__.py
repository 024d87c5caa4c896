"""Brings a manager of nodes on this desk, a hosted service, a listener and a command."""

from __future__ import annotations

from holdfast.engine.plugins import Command, Manager, Plugin

PLUGIN = Plugin(
    commands={
        "tally": Command(text="count the events of a run, by kind", module="holdfast_desk.tally")
    },
    managers={
        "desk": Manager(
            name="the desk",
            adapter="holdfast_desk.manager",
            launcher="holdfast_desk.launcher",
            text="processes of this machine, as an example of a plugin",
        )
    },
    services={"weights": "holdfast_desk.weights"},
    listeners={"tally": "holdfast_desk.tally"},
)
