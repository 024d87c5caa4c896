"""Offers tools for those who test: scripts, the promise, adapters, and the protocol."""

from __future__ import annotations

from holdfast.engine.plugins import Command, Plugin

PLUGIN = Plugin(
    commands={
        "check": Command(
            text="try a training script on 1 and 2 workers, with a kill, and compare the bits",
            module="holdfast.lab.check.check_command",
        ),
        "demo": Command(
            text="train a small model through faults and prove that nothing changed",
            module="holdfast.lab.demo.demo",
        ),
        "sim": Command(
            text="run the protocol in the deterministic simulator",
            module="holdfast.lab.sim_command",
        ),
    },
)
