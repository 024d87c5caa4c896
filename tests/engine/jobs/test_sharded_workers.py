"""Workers of several processes: any of these may be lost, and the result stays the same."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import RUN_S, SCRIPTS, computed_twice, finish
from holdfast.engine.records.ledger_audit import verify
from holdfast.engine.runtime.local_run import LocalRun
from holdfast.engine.train.data.sampling import plan_of
from places import ROOT

EXAMPLE = ROOT / "examples" / "fsdp.py"
STEPS = 12
SAMPLES = 4 * 8  # samples of a step
Quiet = Callable[..., str]


def sharded(
    path: Path,
    *script: str,
    workers: int = 3,
    faults: str = "-",
    rejoins: str = "-",
    options: tuple[str, ...] = (),
    procs: int = 2,
) -> LocalRun:
    """Prepare a job of `workers` of `procs` processes; `faults`, `rejoins`: scripts/sharded.py."""
    flags = ["--nproc", str(workers), "--procs-per-worker", str(procs), "--virtual", "4", *options]
    words = [str(SCRIPTS / "sharded.py"), faults, rejoins]
    return LocalRun(path, flags, [*words, *(script or (str(EXAMPLE), "--steps", str(STEPS)))])


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Quiet:
    """Return quiet(script...): the last line of an undisturbed job of one worker."""
    known: dict[tuple[object, ...], str] = {}

    def last(*script: str, procs: int = 2) -> str:
        key = (procs, *script)
        if key not in known:
            path = tmp_path_factory.mktemp("quiet") / "run"
            with sharded(path, *script, workers=1, procs=procs) as run:
                known[key] = finish(run)
            assert re.fullmatch("[0-9a-f]{64}", known[key])
        return known[key]

    return last


@pytest.mark.parametrize(
    ("workers", "faults", "rejoins", "lost"),
    [
        pytest.param(2, "-", "-", 0, marks=pytest.mark.slow),
        pytest.param(2, "task:1.1:4", "5", 1, marks=pytest.mark.slow),
        pytest.param(4, "-", "-", 0, marks=pytest.mark.slow),
        # One of a worker's processes, for which the rest wait; then the process of shard 0.
        pytest.param(3, "task:1.1:3,end:2.0:7", "4,8", 2, marks=pytest.mark.slow),
        # Two processes of different workers in the same step, while the third continues.
        pytest.param(3, "backward:0.1:5,backward:2.0:5", "6", 2, marks=pytest.mark.slow),
        # Just before, amid and after the exchange.
        pytest.param(3, "end:0.0:2,task:1.0:5,backward:2.1:8", "3,6", 3, marks=pytest.mark.slow),
        # Processes that end with status 0 in the middle of the job.
        pytest.param(3, "task:1.1:3:EXIT,end:2.0:7:EXIT", "4,8", 2, marks=pytest.mark.slow),
        # A process that is frozen ends its worker.
        pytest.param(2, "task:1.1:4:SIGSTOP", "5", 1, marks=pytest.mark.slow),
    ],
)
def test_any_process_may_be_lost(
    workers: int, faults: str, rejoins: str, lost: int, tmp_path: Path, quiet: Quiet
) -> None:
    with sharded(tmp_path / "run", workers=workers, faults=faults, rejoins=rejoins) as run:
        assert finish(run) == quiet()
    assert len(run.events("lost")) == lost
    report = verify(run.run_dir.path, plan_of)
    assert report.ok, report.findings
    assert (report.steps, report.samples) == (STEPS, STEPS * SAMPLES)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--audit", "1"), marks=pytest.mark.slow),
        pytest.param(("--audit", "1", "--audit-tolerance", "0.01"), marks=pytest.mark.slow),
        pytest.param(("--fingerprint-steps", "1", "--repeat-steps", "1"), marks=pytest.mark.slow),
        pytest.param(("--spares", "1", "--hot-spares"), marks=pytest.mark.slow),
    ],
)
def test_sharded_workers_survive_with_audits_repeats_and_hot_spares_too(
    options: tuple[str, ...], tmp_path: Path, quiet: Quiet
) -> None:
    run = sharded(tmp_path / "run", faults="end:1.1:5", rejoins="7", options=options)
    with run:
        assert finish(run) == quiet()
    assert run.events("wrong") == []
    assert len(run.events("lost")) == 1


@pytest.mark.parametrize(
    ("faults", "option", "told"),
    [
        pytest.param("flip gradient", "--audit", "computed virtual rank", marks=pytest.mark.slow),
        pytest.param(
            *("flip received", "--audit", "summed a part of step 5 wrongly"),
            marks=pytest.mark.slow,
        ),
        pytest.param("flip parameter", "--fingerprint-steps", "", marks=pytest.mark.slow),
        pytest.param("flip optimizer", "--fingerprint-steps", "", marks=pytest.mark.slow),
    ],
)
def test_a_wrong_bit_in_one_process_is_found_and_does_not_change_the_result(
    faults: str, option: str, told: str, tmp_path: Path, quiet: Quiet
) -> None:
    """It strikes the first of the worker's processes to reach the place."""
    script = tmp_path / "faults.txt"
    script.write_text(f"worker 1 step 5 {faults}\n")
    with sharded(tmp_path / "run", options=(option, "1", "--faults", str(script))) as run:
        assert finish(run) == quiet()
    texts = [event["text"] for event in run.events()]
    assert not told or any(told in text for text in texts), texts
    assert told or [event["worker"] for event in run.events("lost")] == [1]


@pytest.mark.slow
def test_all_are_lost_and_go_on_from_a_checkpoint(tmp_path: Path, quiet: Quiet) -> None:
    store = ("--store", str(tmp_path / "store"), "--save-every", "5")
    faults = "saved:0.0:7,task:0.0:9,task:1.1:9"
    with sharded(tmp_path / "run", workers=2, faults=faults, options=store) as run:
        assert finish(run) == quiet()
    texts = [event["text"] for event in run.events("view")]
    assert any("from the checkpoint of step 5" in text for text in texts), texts


@pytest.mark.slow
def test_all_are_lost_and_go_on_from_the_memory_of_their_node(tmp_path: Path, quiet: Quiet) -> None:
    memory = ("--redundancy", "replicate:1", "--protect-every", "5")
    faults = "end:0.1:8,end:1.0:8"
    with sharded(tmp_path / "run", workers=2, faults=faults, options=memory) as run:
        assert finish(run) == quiet()
    assert run.events("memory"), run.log()
    assert computed_twice(run) == []


@pytest.mark.parametrize(
    ("kind", "procs"),
    [
        pytest.param("columns", 2, marks=pytest.mark.slow),
        pytest.param("columns --weighted", 2, marks=pytest.mark.slow),
        pytest.param("half", 2, marks=pytest.mark.slow),
        pytest.param("half --weighted", 2, marks=pytest.mark.slow),
        pytest.param("both", 4, marks=pytest.mark.slow),
        pytest.param("sampler", 2, marks=pytest.mark.slow),
        pytest.param("stream", 2, marks=pytest.mark.slow),
    ],
)
def test_other_ways_to_divide_the_work(kind: str, procs: int, tmp_path: Path, quiet: Quiet) -> None:
    script = (str(SCRIPTS / "tensor_parallel.py"), "10", *kind.split())
    workers = 3 if procs == 2 else 2
    faults, store = f"task:0.{procs - 1}:3,backward:1.0:6", str(tmp_path / "store")
    options = ("--store", store, "--save-every", "4")
    run = sharded(
        tmp_path / "run",
        *script,
        workers=workers,
        faults=faults,
        rejoins="4",
        options=options,
        procs=procs,
    )
    with run:
        assert finish(run) == quiet(*script, procs=procs)
    assert len(run.events("lost")) == 2


ERRORS = """
import torch, holdfast
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
job = holdfast.join()
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
{shard}
job.protect(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
data = job.batches(torch.utils.data.TensorDataset(torch.ones(64, 4)), 8)
for step in job.steps(data, until=4):
    for (x,) in step:
        {task}
        step.backward(model(x).square().mean())
"""
FULL = "fully_shard(model, mesh=job.mesh)"


@pytest.mark.parametrize(
    ("procs", "shard", "task", "words"),
    [
        pytest.param(
            2,
            "fully_shard(model[0], mesh=job.mesh)",
            "pass",
            ["model.1.weight", "split="],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            4,
            "pairs = init_device_mesh('cpu', (2, 2), mesh_dim_names=('a', 'b'))\n"
            "fully_shard(model, mesh=pairs['b'])",
            "pass",
            ["model.0.weight is distributed over 2 processes", "4 processes train", "job.mesh"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            2,
            "fully_shard(model, mesh=init_device_mesh('cpu', (1,)))",
            "pass",
            ["is distributed over a mesh of 1 processes", "has 2", "--procs-per-worker"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            2,
            FULL,
            "1 / (1 - job.mesh.get_local_rank())",
            ["process 1", "ZeroDivisionError"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            2,
            FULL,
            "1 / job.mesh.get_local_rank()",
            ["worker 0 failed", "ZeroDivisionError"],
            marks=pytest.mark.slow,
        ),
        pytest.param(2, FULL, "raise SystemExit('enough')", ["enough"], marks=pytest.mark.slow),
        (2, "job.batches([], 1, on_error='quarantine')", "pass", ["give split=False"]),
    ],
)
def test_a_wrong_script_is_told_what_is_wrong(
    procs: int, shard: str, task: str, words: list[str], tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(ERRORS.format(shard=shard, task=task))
    with LocalRun(
        tmp_path / "run", ["--virtual", "2", "--procs-per-worker", str(procs)], [str(script)]
    ) as run:
        assert run.wait(RUN_S) == 1, run.log()
    assert all(word in run.log() for word in words), run.log()
    assert run.leftovers() == []


@pytest.mark.slow
def test_a_checkpoint_begins_jobs_of_any_number_of_processes(tmp_path: Path) -> None:
    store, script = str(tmp_path / "store"), str(SCRIPTS / "begun_from.py")
    options = ("--store", store, "--save-every", "3")
    with sharded(tmp_path / "first", workers=2, options=options) as run:
        finish(run)
    told = []
    for procs in (1, 2, 3):
        with sharded(tmp_path / f"{procs}", script, store, procs=procs, workers=1) as run:
            finish(run)
            told.append([line for line in run.out if re.match(r"\d+ steps|loss", line)])
    first, *others = told
    # The line is of the newest save: a due save waits while another one is written.
    assert " steps " in first[0]
    assert all(other[0] == first[0] for other in others), told  # model and optimizer, to the bit
    losses = [[float(line.split()[1]) for line in lines[1:]] for lines in told]
    assert len(losses[0]) == 4
    assert all(losses[0] == pytest.approx(other, rel=1e-4) for other in losses[1:])


@pytest.mark.slow
def test_the_norm_that_clips_is_that_of_all_shards(tmp_path: Path) -> None:
    """A job without shards, and with PyTorch alone, gives the same losses up to rounding."""
    losses = []
    for name, procs in (("one", 1), ("two", 2)):
        with sharded(tmp_path / name, procs=procs, workers=1) as run:
            finish(run)
            (line,) = [line for line in run.out if line.startswith("step 10: loss")]
            losses.append(float(line.split()[-1]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


GATHERS = """
import torch, holdfast
job = holdfast.join()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
job.protect(model=model, optimizer=optimizer)
place = job.mesh.get_local_rank()
for step in job.steps(until=2):
    for task in step:
        step.gather("where", [step.virtual_rank, place])
        step.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    print("gathered", place, step.gathered["where"], flush=True)
"""


@pytest.mark.slow
def test_gathered_values_are_those_of_the_processes_of_the_same_place(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(GATHERS)
    options = ["--nproc", "2", "--procs-per-worker", "2", "--virtual", "3"]
    with LocalRun(tmp_path / "run", options, [str(script)]) as run:
        finish(run)
        told = [line for line in run.out if line.startswith("gathered")]
    assert len(told) == 8
    assert set(told) == {f"gathered {p} {[[vrank, p] for vrank in range(3)]}" for p in (0, 1)}
