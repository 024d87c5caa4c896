"""Well-known trainers end with the same bits on any number of workers, and through deaths."""

from __future__ import annotations

import copy
import csv
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import loop_kit
from conftest import SCRIPTS, finish
from holdfast.engine.core.errors import UserError
from holdfast.engine.records.ledger_audit import verify
from holdfast.engine.runtime.local_run import LocalRun
from holdfast.engine.train.data.sampling import plan_of
from holdfast.engine.train.job import Job
from places import ROOT

EXAMPLES = ROOT / "examples"
HUGGING = [str(EXAMPLES / "finetune_transformers.py"), "--steps", "12", "--evaluate-every", "4"]
HUGGING += ["--width", "16", "--batch-size", "4"]
LIGHTNING = [str(EXAMPLES / "lightning_module.py"), "--epochs", "3", "--samples", "200"]
ACCELERATE = [str(SCRIPTS / "accelerated.py"), "3"]
EARLY = "stops early"
STREAM = "stream"
LOGGED = "logged"
HALF = {f"{name} in half": name for name in ("accelerate", "transformers", "lightning")}
JOBS = {
    "transformers": [*HUGGING, "--output", "OUT"],
    "llama": [*HUGGING, "--model", "llama"],
    "lightning": [*LIGHTNING, "--output", "OUT"],
    "gan": [*LIGHTNING, "--gan"],
    "accelerate": ACCELERATE,
    EARLY: [str(SCRIPTS / "stops_early.py"), "OUT"],
    STREAM: [str(SCRIPTS / "hugging_stream.py")],
    LOGGED: [str(SCRIPTS / "csv_logged.py"), "OUT"],
    "lora": [str(SCRIPTS / "lora.py"), "plain", "12"],
    "peft": [str(SCRIPTS / "lora.py"), "peft", "12"],
    **{name: [str(SCRIPTS / "half.py"), trainer] for name, trainer in HALF.items()},
}
PACKAGES = {"llama": "transformers", "gan": "lightning", EARLY: "transformers", STREAM: "datasets"}
PACKAGES |= {LOGGED: "lightning", "lora": "torch", **HALF}


def run(
    path: Path,
    name: str,
    workers: int,
    faults: str = "",
    rejoin: str = "",
    more: tuple = (),
    options: tuple = (),
) -> tuple[str, LocalRun]:
    """Run a job to its end; return its digest. The ledger must prove that all is well."""
    if importlib.util.find_spec(PACKAGES.get(name, name)) is None:
        pytest.skip(f"{PACKAGES.get(name, name)} is not installed")
    path.mkdir()
    options = ("--nproc", str(workers), "--virtual", "4", *options)
    if faults:
        (path / "faults").write_text(faults)
        options += ("--faults", str(path / "faults"))
    script = [each.replace("OUT", str(path / "out")) for each in JOBS[name]]
    wrapped = [str(SCRIPTS / "rejoining.py"), rejoin] if rejoin else []
    with LocalRun(path / "run", options, [*wrapped, *script, *more]) as job:
        digest = finish(job)
    assert re.fullmatch("[0-9a-f]{64}", digest)
    report = verify(job.run_dir.path, plan_of)
    assert report.ok, report.findings
    return digest, job


@pytest.mark.slow_with("accelerate")
@pytest.mark.parametrize(
    "name", ["accelerate", *(pytest.param(n, marks=pytest.mark.slow) for n in ("lightning", EARLY))]
)
def test_a_death_changes_nothing(name: str, tmp_path: Path) -> None:
    alone, _ = run(tmp_path / "alone", name, 1)
    struck, job = run(tmp_path / "struck", name, 2, faults="worker 1 step 3 kill\n")
    assert len(job.events("lost")) == 1
    assert struck == alone


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for name in JOBS if name not in (EARLY, LOGGED)])
def test_the_number_of_workers_deaths_and_joins_change_nothing(name: str, tmp_path: Path) -> None:
    """A worker dies and comes back; then the leader dies, and another takes its place."""
    alone, _ = run(tmp_path / "alone", name, 1)
    for workers in (2, 4):
        assert run(tmp_path / f"{workers}", name, workers)[0] == alone
    late = 19 if name == "gan" else 9  # each step of a GAN is two of the job
    faults = f"worker 1 step 3 kill\nworker 0 step {late} kill\n"
    struck, job = run(tmp_path / "struck", name, 2, faults=faults, rejoin="4,5,6,7")
    assert len(job.events("lost")) == 2
    assert not any("from step 0 again" in line for line in job.err)
    assert struck == alone


@pytest.mark.slow
@pytest.mark.parametrize("name", HALF)
def test_the_scale_of_losses_goes_on_from_a_checkpoint(name: str, tmp_path: Path) -> None:
    """The only worker is lost after updates were left out, and begins at the newest checkpoint."""
    alone, _ = run(tmp_path / "alone", name, 1)
    store = ("--store", str(tmp_path / "store"), "--save-every", "2")
    faults = "worker 0 step 9 kill\n"
    again, job = run(tmp_path / "again", name, 1, faults=faults, options=store)
    assert any("from the checkpoint" in line for line in job.err), job.err
    assert again == alone


@pytest.mark.slow
@pytest.mark.parametrize("late", [4, 9])
def test_a_new_leader_goes_on_with_lightnings_csv_file(late: int, tmp_path: Path) -> None:
    """Each step is in it once, and each epoch's validation, through the deaths of two leaders."""

    def rows(where: Path) -> list[dict[str, str]]:
        with (where / "out" / "csv" / "one" / "metrics.csv").open() as file:
            return list(csv.DictReader(file))

    alone, _ = run(tmp_path / "alone", LOGGED, 1)
    faults = f"worker 0 step {late} kill\nworker 1 step 10 kill\n"
    struck, job = run(tmp_path / "struck", LOGGED, 2, faults=faults, rejoin="8,9,11")
    assert len(job.events("lost")) == 2
    assert struck == alone
    expected, found = rows(tmp_path / "alone"), rows(tmp_path / "struck")
    steps = [row["step"] for row in expected if row["train_loss_step"]]
    assert [row["step"] for row in found if row["train_loss_step"]] == steps
    validated = [(row["step"], row["val_loss"]) for row in expected if row["val_loss"]]
    assert [(row["step"], row["val_loss"]) for row in found if row["val_loss"]] == validated
    assert (len(steps), len(validated)) == (12, 3)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_checkpoint_of_hugging_face_goes_on_as_if_it_had_not_ended(tmp_path: Path) -> None:
    """Dropout, data and schedule go on at the step of the checkpoint."""
    whole, _ = run(tmp_path / "whole", "transformers", 2)
    checkpoint = tmp_path / "whole" / "out" / "checkpoint-4"
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    assert state["global_step"] == 4
    assert Path(state["best_model_checkpoint"]).name == "checkpoint-4"
    assert sorted(p.name for p in checkpoint.parent.iterdir()) == [
        "checkpoint-12",
        "checkpoint-4",
        "checkpoint-8",
    ]
    again, _ = run(tmp_path / "again", "transformers", 1, more=("--resume", str(checkpoint)))
    assert again == whole


def plain(tmp_path: Path, trainer: str, arguments: str) -> list[float]:
    """Train a small model on lines in their order by a Trainer; return its parameters' sums."""
    code = f"""
import sys; sys.path.insert(0, {str(EXAMPLES)!r})
import holdfast, torch
import finetune_transformers as example
from transformers import Trainer as Plain, TrainingArguments
job = holdfast.join()
torch.manual_seed(3)
model = example.make_model("llama", 16)
args = TrainingArguments(
    output_dir={str(tmp_path / "out")!r}, max_steps=5, per_device_train_batch_size=3,
    train_sampling_strategy="sequential", learning_rate=1e-2, save_strategy="no", report_to=[],
    use_cpu=True, {arguments}
)
trainer = {trainer}(model=model, args=args, data_collator=example.collate,
                    train_dataset=example.sums(40, seed=1))
trainer.train()
print(*[float(p.detach().double().abs().sum()) for p in model.parameters()])
"""
    script = tmp_path / "script.py"
    script.write_text(code)
    command = [sys.executable, str(script)]
    if trainer != "Plain":
        command = [sys.executable, "-m", "holdfast.cli.main", "run", "--nproc", "1"]
        command += ["--virtual", "4", "--run-dir", str(tmp_path / "run"), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    return [float(word) for word in done.stdout.splitlines()[-1].split()]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_virtual_ranks_are_hugging_faces_gradient_accumulation(tmp_path: Path) -> None:
    """All tokens have the same weight, in every batch, also in the last step of an epoch."""
    pytest.importorskip("transformers")
    expected = plain(tmp_path, "Plain", "gradient_accumulation_steps=4")
    (tmp_path / "of").mkdir()
    found = plain(tmp_path / "of", "example.Trainer", "gradient_accumulation_steps=4")
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_a_missing_package_is_named_in_one_sentence() -> None:
    code = """
import importlib, sys
for name in ("transformers", "accelerate", "lightning", "lightning_loggers"):
    sys.modules[name] = None
    try:
        importlib.import_module(f"holdfast.trainers.{name}")
    except Exception as error:
        print(type(error).__name__, error)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    first, second, third, fourth = done.stdout.splitlines()
    assert first.startswith("UserError holdfast.trainers.transformers needs the package")
    assert "pip install 'holdfast[transformers]'" in first
    assert "pip install 'holdfast[accelerate]'" in second
    assert "pip install 'holdfast[lightning]'" in third
    assert "pip install 'holdfast[lightning]'" in fourth


@pytest.mark.slow
def test_a_job_that_begins_at_a_step_goes_on_as_the_whole_one() -> None:
    """The samples of a step depend on its number, wherever the job has begun."""
    kept: dict[str, Any] = {}

    def whole(job: Job, me: Any) -> str:
        model, optimizer = loop_kit.protected(job)
        data = job.batches(loop_kit.dataset(), batch_size=4)
        for step in job.steps(data, until=9):
            if step.index == 6 and job.is_leader:
                kept.update(copy.deepcopy({"m": model.state_dict(), "o": optimizer.state_dict()}))
            loop_kit.step_once(step, model, optimizer)
        return loop_kit.digest(model)

    def rest(job: Job, me: Any) -> str:
        model, optimizer = loop_kit.protected(job)
        model.load_state_dict(kept["m"])
        optimizer.load_state_dict(copy.deepcopy(kept["o"]))
        job.begin_at(6)
        data = job.batches(loop_kit.dataset(), batch_size=4)
        seen = []
        for step in job.steps(data, until=9):
            seen.append((step.index, step.epoch))
            loop_kit.step_once(step, model, optimizer)
        assert seen == [(6, 1), (7, 1), (8, 1)]
        with pytest.raises(UserError, match="before the first steps"):
            job.begin_at(7)
        return loop_kit.digest(model)

    (expected, _) = loop_kit.results(whole, 2)
    assert loop_kit.results(rest, 3) == [expected] * 3


@pytest.mark.slow
def test_the_checkpoint_that_was_just_written_stays_whatever_the_clock_says(tmp_path: Path) -> None:
    utils = pytest.importorskip("transformers.trainer_utils")
    from holdfast.trainers.transformers import mark_newest

    for number, time in ((10, 3e9), (20, 3.1e9), (5, 1e9)):  # the clock and the job went back
        (tmp_path / f"checkpoint-{number}").mkdir()
        os.utime(tmp_path / f"checkpoint-{number}", (time, time))
    mark_newest(tmp_path / "checkpoint-5")
    utils.rotate_checkpoints(str(tmp_path), save_total_limit=1, use_mtime=True)
    assert [each.name for each in tmp_path.iterdir()] == ["checkpoint-5"]
