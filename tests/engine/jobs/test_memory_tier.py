"""Jobs that keep their state in the nodes' memory survive the loss of all its holders."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from certificates import make_certificates
from conftest import RUN_S, SCRIPTS, computed_twice
from holdfast.engine.runtime.local_run import LocalRun
from holdfast.engine.state.memory.arena import FIRST
from labs.local_nodes import LocalNodes, names
from memory_kit import kill_workers, recalls, until_step

STEPS = 60
LATER = 25  # no fault comes before this step
EVERY = 7
Reference = Callable[[int], str]


@contextmanager
def job(
    path: Path,
    redundancy: str,
    nodes: int,
    *options: str,
    steps: int = STEPS,
    nproc: int = 1,
    tls: Path | None = None,
) -> Iterator[tuple[LocalRun, LocalNodes]]:
    """Run a job of `nproc` workers on each of `nodes` nodes; at step LATER it waits for `go`."""
    flags = ["--nproc", str(nproc), "--virtual", "4", "--nodes-min", str(nodes)]
    flags += ["--nodes-max", str(2 * nodes), "--redundancy", redundancy]
    flags += ["--protect-every", str(EVERY), *options]
    words = [str(SCRIPTS / "trainer.py"), "--steps", str(steps)]
    words += ["--hold", str(LATER), str(path / "go")]
    words += ["--gather"] if "--shard-optimizer" in options else []
    with LocalRun(path / "run", flags, words, tls=tls) as run, LocalNodes(run) as others:
        run.until(run.run_dir.coordinator.exists, RUN_S, "the coordinator listens")
        for name in names(nodes):
            others.add(name)
        run.until_members(nodes * nproc)
        yield run, others


def shown(run: LocalRun) -> dict[str, Any] | None:
    status = run.status()
    return status if status["memory"]["step"] > 0 else None


def end(run: LocalRun, nodes: LocalNodes) -> set[str]:
    """Wait for success; return the last lines that all nodes have printed."""
    assert run.wait(RUN_S) == 0, run.log()
    return set(nodes.last_lines())


@pytest.mark.parametrize(
    ("redundancy", "nodes", "nproc"),
    [
        pytest.param("replicate:1", 1, 3, marks=pytest.mark.slow),
        pytest.param("replicate:2", 2, 2, marks=pytest.mark.slow),
        pytest.param("rs:2+1", 3, 1, marks=pytest.mark.slow),
    ],
)
def test_every_worker_is_killed_and_no_step_is_lost(
    redundancy: str, nodes: int, nproc: int, tmp_path: Path, reference: Reference
) -> None:
    with job(tmp_path, redundancy, nodes, nproc=nproc) as (run, others):
        until_step(run, LATER)
        status = run.until(lambda: shown(run), RUN_S, "what the memory holds")
        assert status["memory"]["redundancy"] == redundancy
        assert status["memory"]["step"] <= status["step"] + 1
        assert status["memory"]["bytes"] == sum(a["pieces_bytes"] for a in status["agents"]) > 0
        kill_workers(run)
        assert reference(STEPS) in end(run, others)
    (step,) = recalls(run)
    assert step >= LATER
    assert computed_twice(run) == []


@pytest.mark.slow
def test_pieces_are_encrypted_and_recovered(tmp_path: Path, reference: Reference) -> None:
    tls = make_certificates(tmp_path, "127.0.0.1")
    with job(tmp_path, "rs:2+1", 3, tls=tls) as (run, others):
        until_step(run, LATER)
        run.until(lambda: shown(run), RUN_S, "what the memory holds")
        kill_workers(run)
        assert reference(STEPS) in end(run, others)
    (step,) = recalls(run)
    assert step >= LATER


@pytest.mark.slow
def test_nodes_are_lost_with_their_memory_while_all_workers_are_killed(
    tmp_path: Path, reference: Reference
) -> None:
    with job(tmp_path, "rs:2+1", 4) as (run, others):
        until_step(run, LATER)
        kill_workers(run)
        others.kill("node2")
        assert reference(STEPS) in end(run, others)
    assert len(recalls(run)) == 1
    assert computed_twice(run) == []


@pytest.mark.slow
def test_a_job_recalls_its_state_from_memory_again_and_again(
    tmp_path: Path, reference: Reference
) -> None:
    """Workers that have just been recalled are lost, too, and a node joins in between."""
    with job(tmp_path, "rs:2+1", 3, steps=400) as (run, others):
        until_step(run, LATER)
        kill_workers(run)
        run.until(lambda: len(recalls(run)) == 1, RUN_S, "a recall")
        run.until_members(3)
        kill_workers(run)
        run.until(lambda: len(recalls(run)) == 2, RUN_S, "another recall")
        others.add("later")
        run.until_members(4)
        until_step(run, LATER + 30)
        kill_workers(run)
        others.kill("node1")
        assert reference(400) in end(run, others)
    assert len(recalls(run)) >= 3
    assert computed_twice(run) == []


@pytest.mark.slow
def test_beyond_what_is_protected_the_job_goes_back_to_a_checkpoint(
    tmp_path: Path, reference: Reference
) -> None:
    store = tmp_path / "store"
    options = ("--store", str(store), "--save-every", "10", "--abandon-s", "5")
    with job(tmp_path, "rs:2+1", 3, *options) as (run, others):
        until_step(run, LATER)
        run.until(lambda: any((store / "manifests").iterdir()), RUN_S, "a checkpoint")
        kill_workers(run)
        others.kill("node1")
        others.kill("node2")
        assert reference(STEPS) in end(run, others)
    assert any("every worker was lost" in event["text"] for event in run.events("view"))


def memory_files(agent: int) -> list[Path]:
    """Return the files of pieces of a node's workers, as its agent has them open."""
    found = []
    for name in os.listdir(f"/proc/{agent}/fd"):
        path = Path(f"/proc/{agent}/fd/{name}")
        if os.readlink(path).startswith("/memfd:holdfast-worker"):
            found.append(path)
    return found


def flip(path: Path) -> None:
    """Flip a bit in each page of pieces of a file in memory."""
    with open(path, "r+b", buffering=0) as file:
        size = os.stat(path).st_blocks * 512
        for at in range(FIRST, FIRST + size, 4096):
            file.seek(at)
            byte = file.read(1)
            if byte:
                file.seek(at)
                file.write(bytes([byte[0] ^ 1]))


def agents(run: LocalRun) -> dict[str, int]:
    return {each["id"]: each["pid"] for each in run.status()["agents"]}


@pytest.mark.slow
def test_pieces_that_memory_has_corrupted_are_not_loaded(
    tmp_path: Path, reference: Reference
) -> None:
    """A corrupt replica must cost neither the model nor a loop of restarts (Megatron-LM 5281)."""
    with job(tmp_path, "rs:2+1", 3) as (run, others):
        until_step(run, LATER)
        pids = agents(run)
        kill_workers(run)
        for path in memory_files(pids["node1"]):
            flip(path)
        assert reference(STEPS) in end(run, others)
    assert len(recalls(run)) == 1
    assert computed_twice(run) == []


@pytest.mark.slow
def test_corruption_of_too_many_pieces_takes_the_job_back_and_does_not_hold_it_up(
    tmp_path: Path, reference: Reference
) -> None:
    with job(tmp_path, "replicate:1", 1) as (run, others):
        until_step(run, LATER)
        (agent,) = agents(run).values()
        kill_workers(run)
        for path in memory_files(agent):
            flip(path)
        assert reference(STEPS) in end(run, others)
    assert len(run.events("memory")) <= 3
    assert "every worker was lost" in run.events("view")[-1]["text"]


# ---------------------------------------------------------------- bad input


def refused(*options: str) -> str:
    words = [sys.executable, "-m", "holdfast.cli.main", "run", *options, "train.py"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=RUN_S)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--redundancy", "raid5"), ["--redundancy raid5 must be none, replicate:R", "rs:K+M"]),
        (
            ("--redundancy", "rs:4+2", "--nodes-min", "3"),
            ["--redundancy rs:4+2 needs 6 nodes", "at most 3 take part", "--nodes-max"],
        ),
        (("--redundancy", "replicate:1", "--memory-budget", "0"), ["--memory-budget", "at least"]),
        (("--protect-every", "0"), ["--protect-every 0 must be at least 1"]),
    ],
)
def test_settings_that_cannot_work_are_refused(options: Sequence[str], words: list[str]) -> None:
    said = refused(*options)
    assert all(word in said for word in words), said


def test_a_budget_that_is_too_small_is_refused_with_what_is_needed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(LARGE)
    flags = ["--nproc", "1", "--redundancy", "replicate:1", "--memory-budget", "10"]
    with LocalRun(tmp_path / "run", flags, [str(script)]) as run:
        assert run.wait(RUN_S) != 0
    said = run.log()
    assert "the memory budget of 10 MB for each worker is too small" in said
    assert "raise --memory-budget" in said
    assert "Traceback" not in said


LARGE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
import holdfast
job = holdfast.join()
torch.manual_seed(0)
model = nn.Linear(1000, 1000)
optimizer = torch.optim.AdamW(model.parameters())
job.protect(model=model, optimizer=optimizer)
data = TensorDataset(torch.randn(64, 1000))
for step in job.steps(job.batches(data, batch_size=8), until=8):
    for (x,) in step:
        step.backward(model(x).square().mean())
    optimizer.step()
"""
