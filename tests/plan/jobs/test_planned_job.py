"""The job that a plan writes runs without a change, and survives the loss of its workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import RUN_S, SCRIPTS
from holdfast.engine.runtime.local_run import LocalRun
from holdfast.plan.job_file import STORE
from holdfast.plan.plan_command import main
from labs.local_nodes import LocalNodes, names
from memory_kit import kill_workers, recalls, until_step

NODES = 4
STEPS = 60
LATER = 25  # the workers are killed at this step


def test_a_planned_job_survives_the_loss_of_every_worker(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], reference: Callable[[int], str]
) -> None:
    config = tmp_path / "job.toml"
    cluster = ["--nodes", str(NODES), "--gpus-per-node", "1", "--replace-s", "60:600"]
    # Failures at this rate make pieces in memory worth their cost.
    work = ["--shard-optimizer", "--state", "10", "--step-s", "1", "--rate", "3000"]
    assert main([*cluster, *work, "--machines", "0", "--output", str(config)]) == 0
    advice = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("advice: "))
    assert f"{NODES} workers with 1 virtual rank each" in advice
    assert "redundancy replicate:2" in advice
    text = config.read_text()
    assert STORE in text
    config.write_text(text.replace(STORE, str(tmp_path / "store")))

    words = [str(SCRIPTS / "trainer.py"), "--steps", str(STEPS), "--gather"]
    words += ["--hold", str(LATER), str(tmp_path / "go")]
    with (
        LocalRun(tmp_path / "run", ["--config", str(config)], words) as run,
        LocalNodes(run) as others,
    ):
        run.until(run.run_dir.coordinator.exists, RUN_S, "the coordinator listens")
        for name in names(NODES):
            others.add(name)
        run.until_members(NODES)
        until_step(run, LATER)
        run.until(lambda: run.status()["memory"]["step"] > 0, RUN_S, "a state in memory")
        kill_workers(run)
        assert run.wait(RUN_S) == 0, run.log()
        assert reference(STEPS) in set(others.last_lines())
    assert min(recalls(run)) >= LATER
