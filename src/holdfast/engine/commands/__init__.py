"""Offers the commands of the engine, which run a job and operate it."""

from __future__ import annotations

from holdfast.engine.plugins import Command, Plugin

PLUGIN = Plugin(
    commands={
        "run": Command(
            text="run a training script on this machine, through failures",
            module="holdfast.engine.commands.run_command",
        ),
        "launch": Command(
            text="run a training script on the nodes of a cluster manager, and replace lost ones",
            module="holdfast.engine.commands.launch_command",
        ),
        "resume": Command(
            text="continue a run that was killed, stopped or failed",
            module="holdfast.engine.commands.resume_command",
        ),
        "agent": Command(
            text="add this machine to a running job",
            module="holdfast.engine.commands.join_commands",
            main="join_as_agent",
        ),
        "status": Command(
            text="show a running job: view, step, processes",
            module="holdfast.engine.commands.status_command",
        ),
        "drain": Command(
            text="empty a node of a running job, which goes on without it",
            module="holdfast.engine.commands.order_commands",
            main="run_drain",
        ),
        "migrate": Command(
            text="move a worker of a running job to another node, while it trains",
            module="holdfast.engine.commands.order_commands",
            main="run_migrate",
        ),
        "scale": Command(
            text="put the tables of a running job on another number of servers",
            module="holdfast.engine.commands.order_commands",
            main="run_scale",
        ),
        "coordinator": Command(
            text="stand by as another coordinator of a job, on any machine",
            module="holdfast.engine.commands.join_commands",
            main="join_as_coordinator",
        ),
        "ckpt": Command(
            text="list, verify, compare, repair and export checkpoints",
            module="holdfast.engine.commands.ckpt_command",
        ),
        "data": Command(
            text="write digests of training data, and find later changes",
            module="holdfast.engine.commands.data_command",
        ),
        "ledger": Command(
            text="prove from a run's ledger that every sample was used exactly once",
            module="holdfast.engine.commands.ledger_command",
        ),
        "completion": Command(
            text="print a script with which bash, zsh or fish completes commands and options",
            module="holdfast.engine.commands.completion_command",
        ),
    }
)
