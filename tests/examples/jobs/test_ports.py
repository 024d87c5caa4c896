"""The ported scripts run, end with the same bits on any number of workers, and cost few lines."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import port_counts
from conftest import RUN_S, finish
from holdfast.engine.runtime.local_run import LocalRun

ARGS = {
    "actor_critic": ["--steps", "4", "--episode", "10"],
    "dcgan": ["--epochs", "1", "--batch-size", "4", "--images", "48"],
    "ddpm": ["--steps", "7", "--batch-size", "4", "--print-every", "6"],
    "distillation": ["--epochs", "1", "--batch-size", "8", "--samples", "64"],
    "gcn": ["--steps", "6", "--graph-nodes", "60", "--print-every", "6"],
    "knowledge_tracing": ["--epochs", "2", "--students", "24", "--batch-size", "4"],
    "mixed_precision": ["--epochs", "1", "--samples", "96", "--batch-size", "4"],
    "moco": ["--epochs", "1", "--images", "96", "--batch-size", "8", "--queue", "64"],
    "ppo": ["--rollouts", "2", "--moves", "12"],
    "sam": ["--epochs", "2", "--samples", "64", "--batch-size", "4"],
    "siamese": ["--epochs", "2", "--images", "64", "--batch-size", "4"],
    "time_sequence": ["--steps", "1", "--waves", "8", "--length", "8"],
    "titan": ["--steps", "4", "--print-every", "4"],
    "word_lm": ["--epochs", "1", "--words", "2000", "--width", "16", "--columns", "2"],
}
LONGER = {
    "actor_critic": ["--steps", "60", "--episode", "60", "--solved", "1000"],
    "dcgan": ["--epochs", "8"],
    "ddpm": ["--steps", "500", "--print-every", "100"],
    "distillation": ["--epochs", "12"],
    "gcn": ["--steps", "500", "--print-every", "100"],
    "knowledge_tracing": ["--epochs", "16", "--patience", "16"],
    "mixed_precision": ["--epochs", "12"],
    "sam": ["--epochs", "100"],
    "siamese": ["--epochs", "10"],
    "time_sequence": ["--steps", "8"],
    "titan": ["--steps", "100"],
}
OPTIONS = {"titan": ["--procs-per-worker", "2"]}
NAMES = sorted(LONGER)  # the three others are run by test_examples.py
# One process runs them all, since importing torch takes longer than all of them.
ALL = """
import runpy, sys
for script, *args in {commands!r}:
    sys.argv, sys.path[0] = [script, *args], script.rpartition("/")[0]
    sys.modules.pop("model", None)
    runpy.run_path(script, run_name="__main__")
"""


def path_of(name: str, kind: str = "train") -> str:
    return str(port_counts.PORTS / name / f"{kind}.py")


@pytest.mark.slow
@pytest.mark.timeout(7 * RUN_S)
def test_ports_run() -> None:
    commands = [[path_of(name), *ARGS[name]] for name in NAMES]
    command = [sys.executable, "-c", ALL.format(commands=commands)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=6 * RUN_S, check=False)
    assert done.returncode == 0, done.stderr
    digests = re.findall("^[0-9a-f]{64}$", done.stdout, re.MULTILINE)
    assert len(set(digests)) == len(NAMES), done.stdout


@pytest.mark.slow
@pytest.mark.timeout(4 * RUN_S)
@pytest.mark.parametrize("name", NAMES)
def test_a_port_ends_with_the_same_bits_on_any_workers_and_after_a_death(
    name: str, tmp_path: Path
) -> None:
    """One worker is killed early enough that another one joins in its place."""
    faults = tmp_path / "faults.txt"
    faults.write_text("worker 1 step 3 kill\n")
    # Late or slow, a worker would host no task of the step in which it is to be killed.
    disturbed = ["--faults", str(faults), "--no-rebalance", "--speculation-budget", "0"]
    digests = []
    for run_name, workers, options in (
        ("one", 1, []),
        ("two", 2, []),
        ("three", 3, []),
        ("killed", 3, disturbed),
    ):
        flags = ["--nproc", str(workers), "--virtual", "4", *options, *OPTIONS.get(name, [])]
        with LocalRun(tmp_path / run_name, flags, [path_of(name), *LONGER[name]]) as run:
            digests.append(finish(run))
    assert re.fullmatch("[0-9a-f]{64}", digests[0])
    assert digests == digests[:1] * 4
    assert len(run.events("lost")) == 1
    assert any("worker 1 joins" in each["text"] for each in run.events("view")), run.events()


@pytest.mark.slow
@pytest.mark.parametrize("name", port_counts.names())
def test_the_scripts_that_a_port_is_compared_with_run(name: str, tmp_path: Path) -> None:
    command = [sys.executable, path_of(name, "plain"), *ARGS[name]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, check=True)
    assert re.fullmatch("[0-9a-f]{64}", done.stdout.splitlines()[-1])
    flags = ["--compat", "--nproc", "2"]
    with LocalRun(tmp_path / "ddp", flags, [path_of(name, "ddp"), *ARGS[name]]) as run:
        assert re.fullmatch("[0-9a-f]{64}", finish(run))


def test_the_table_of_ports_is_counted_from_these_files() -> None:
    page = (port_counts.PORTS.parent.parent / "docs" / "porting.md").read_text()
    table = page.partition(port_counts.BEGIN)[2].partition(port_counts.END)[0]
    assert table.strip().splitlines() == list(port_counts.table()), (
        "python tests/kits/port_counts.py"
    )
