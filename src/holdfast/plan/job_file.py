"""Writes the choice of a plan as the configuration file of a job."""

from __future__ import annotations

import math
from pathlib import Path

from holdfast.engine.commands.job_options import write_config
from holdfast.engine.core.errors import UserError
from holdfast.engine.core.job_spec import (
    CheckpointSettings,
    JobSpec,
    MemorySettings,
    Nodes,
    Workers,
)
from holdfast.plan.advice import Advice
from holdfast.plan.scenario import Choice, Scenario

#: Stands in the file where only the user knows the place.
STORE = "REPLACE-WITH-YOUR-STORE"


def make_job(scenario: Scenario, choice: Choice) -> JobSpec:
    """Return the job document of a choice, without script and store."""
    workers, nodes = scenario.count_workers(choice), scenario.working_nodes(choice)
    saves = choice.save_every_s < math.inf
    working = nodes if scenario.is_spread else scenario.cluster.nodes
    return JobSpec(
        job="",
        cwd="",
        script="",
        workers=Workers(
            nproc=scenario.workers_per_node,
            virtual=choice.tasks * workers,
            procs=scenario.work.worker_gpus,
            spread=scenario.nodes_per_worker,
            spares=None if choice.spare_nodes and not scenario.is_spread else 0,
            hot_spares=choice.hot,
            shard_optimizer=scenario.work.shard_optimizer,
            hang_s=scenario.hang_s,
        ),
        nodes=Nodes(min=working, max=working, lease_s=choice.lease_s),
        checkpoints=CheckpointSettings(
            store=STORE if saves else "",
            every=scenario.steps_between_saves(choice) if saves else None,
        ),
        memory=MemorySettings(
            redundancy=str(choice.redundancy),
            every=choice.protect_every if choice.redundancy.data else MemorySettings().every,
        ),
    )


def write_job_file(path: Path, advice: Advice) -> None:
    """Write the configuration of the best choice. UserError if the file cannot be written."""
    text = write_config(make_job(advice.scenario, advice.best.rated.choice))
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output {path} cannot be written: {error.strerror}") from None
