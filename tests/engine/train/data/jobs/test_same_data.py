"""Tests that workers whose data differ are named: at the start, at a join, after a restart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler, Subset

from conftest import RUN_S
from holdfast.engine.core.errors import UserError
from holdfast.engine.core.job_spec import with_settings
from holdfast.engine.core.types import WorkerId
from holdfast.engine.runtime.local_run import LocalRun
from holdfast.engine.runtime.node import fork_server
from holdfast.engine.train.data.random_streams import enter_stream
from holdfast.engine.train.data.sample_digest import describe_data, find_difference
from holdfast.engine.train.job import Job
from holdfast.engine.train.script.script_state import DataPlaces
from loop_kit import dataset, digest, protected, results, step_once
from support import SPEC
from thread_cluster import ThreadCluster, ThreadWorker

STEPS = 8


def rolled(by: int, count: int = 70) -> Subset:
    return Subset(dataset(), torch.arange(count).roll(by).tolist())


def split(by: int) -> Subset:
    """Return a part of the data, as random_split makes it."""
    order = torch.randperm(70, generator=torch.Generator().manual_seed(by)).tolist()
    return Subset(dataset(), order[:40])


def told(
    script: Callable[[Job, ThreadWorker], Any], workers: int, kill_at: dict[int, int] | None = None
) -> str:
    """Run a script; return why the job has ended."""
    spec = with_settings(SPEC, {"workers.nproc": workers, "workers.virtual": 4})
    deaths = {WorkerId(w): at for w, at in (kill_at or {}).items()}
    cluster = ThreadCluster(spec, script, deaths, waits=True)
    assert cluster.run(), "the job came to its end"
    assert not any("wrongly" in text for text in cluster.told("wrong")), "a machine was blamed"
    return " / ".join(str(e) for e in cluster.errors if isinstance(e, UserError))


def trains_on(data: Callable[[Job, ThreadWorker], Any]) -> Callable[[Job, ThreadWorker], None]:
    def script(job: Job, me: ThreadWorker) -> None:
        model, optimizer = protected(job)
        for step in job.steps(data(job, me), until=STEPS):
            step_once(step, model, optimizer)

    return script


def sampled(data: Dataset[Any]) -> DataLoader[Any]:
    return DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 3, False))


@pytest.mark.slow_with(
    "<lambda>-place 0 of the Subset is sample -3",
    "<lambda>-place 0 of the Subset is sample 0 on-3",
    "<lambda>-place 0 of the Subset is sample-3",
    "<lambda>-the dataset's batch_size is 3 on-3",
    "<lambda>-the dataset's length is 60 -3",
    "<lambda>-the dataset's shuffle is True on worker 0 and False on worker 1-3",
)
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize(
    ("data", "name"),
    [
        (lambda job, me: job.batches(split(me.worker), 3), "place 0 of the Subset is sample "),
        (lambda job, me: job.batches(rolled(me.worker), 3), "place 0 of the Subset is sample 0 on"),
        (lambda job, me: job.batches(sampled(split(me.worker))), "place 0 of the Subset is sample"),
        (lambda job, me: job.batches(rolled(0, 60 + me.worker), 3), "the dataset's length is 60 "),
        (lambda job, me: job.batches(dataset(), 3 + me.worker), "the dataset's batch_size is 3 on"),
        (
            lambda job, me: job.batches(dataset(), 3, shuffle=not me.worker),
            "the dataset's shuffle is True on worker 0 and False on worker 1",
        ),
    ],
)
def test_data_that_differ_end_the_job_at_the_first_step(
    data: Callable[[Job, ThreadWorker], Any], name: str, workers: int
) -> None:
    text = told(trains_on(data), workers)
    assert name in text
    assert "at step 0: datasets must hold the same samples in the same order" in text


def test_data_that_differ_in_a_later_loop_end_the_job_at_its_first_step() -> None:
    def script(job: Job, me: ThreadWorker) -> None:
        model, optimizer = protected(job)
        for step in job.steps(job.batches(dataset(), 3), until=5):
            step_once(step, model, optimizer)
        for step in job.steps(job.batches(split(me.worker), 3), until=STEPS):
            step_once(step, model, optimizer)

    assert "at step 5: datasets must hold" in told(script, 2)


def test_a_joiner_whose_data_differ_is_named() -> None:
    text = told(trains_on(lambda job, me: job.batches(split(me.incarnation), 3)), 3, {1: 14})
    assert "on worker 1, and was sample" in text
    assert "when the job began with these data: datasets must hold the same samples" in text


@pytest.mark.parametrize("workers", [2, 3])
def test_data_of_an_evaluation_that_differ_end_the_job(workers: int) -> None:
    def script(job: Job, me: ThreadWorker) -> None:
        model, optimizer = protected(job)
        for step in job.steps(job.batches(dataset(), 3), until=STEPS):
            step_once(step, model, optimizer)
            if step.index == 5:
                job.evaluate(
                    lambda b: nn.functional.mse_loss(model(b[0]), b[1]), split(me.worker), 2
                )

    text = told(script, workers)
    assert "on worker 1, in job.evaluate(...): datasets must hold the same samples" in text


class InEpochs(Dataset[Any]):
    """Gives other samples in each epoch, as the script has set it."""

    epoch = 0

    def __len__(self) -> int:
        return 70

    def __getitem__(self, index: int) -> Any:
        x, y = dataset()[index]
        return x * (1 + self.epoch), y


def test_data_that_follow_the_epoch_are_the_same_data() -> None:
    def script(job: Job, me: ThreadWorker) -> str:
        model, optimizer = protected(job)
        data = InEpochs()
        for epoch in job.epochs(job.batches(data, 6), until=4):
            data.epoch = epoch.index
            for step in epoch:
                step_once(step, model, optimizer)
        return digest(model)

    (expected,) = results(script, 1)
    assert set(results(script, 3, {1: 20})) == {expected}


def test_reading_samples_to_compare_them_changes_no_generator() -> None:
    enter_stream(1, 2, 3, "model")
    expected = torch.rand(2).tolist()
    enter_stream(1, 2, 3, "model")
    facts = describe_data(split(1), torch.utils.data.default_collate, 0, 0)
    assert torch.rand(2).tolist() == expected
    assert facts["the dataset's length"] == "40"
    assert sum(name.startswith("sample ") for name in facts) == 2


class Unreadable(Dataset[Any]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        raise OSError("no such device")


def test_a_sample_that_one_machine_cannot_read_is_no_difference() -> None:
    collate = torch.utils.data.default_collate
    here = describe_data(Unreadable(), collate, 0, 0)
    there = describe_data(torch.zeros(5, 2), collate, 0, 0)
    assert find_difference(here, there) == find_difference(there, here) == ""


def test_what_a_job_began_with_is_a_part_of_its_state() -> None:
    began, again = DataPlaces(), DataPlaces()
    mine, other = {"sample 3 of the dataset": "a"}, {"sample 3 of the dataset": "b"}
    assert began.compare(0, mine, 0) == began.compare(1, other, 0) == ("", "")
    again.load_state_dict(began.state_dict())
    assert again.compare(0, mine, 4) == again.compare(2, mine, 4) == ("", "")
    name, text = again.compare(0, other, 4)
    assert name == "sample 3 of the dataset"
    assert text.startswith("sample 3 of the dataset is b on worker 4, and was a when the job began")


SPLITS = """
import random, numpy, torch
parts = torch.utils.data.random_split(range(50), [40, 10])
print("DRAWN", list(parts[1].indices), random.random(), numpy.random.rand())
import holdfast
"""


@pytest.mark.slow
def test_what_is_drawn_before_the_job_is_joined_depends_on_the_job_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch seeds its generator at random when it is imported: in each run, and on each node."""
    monkeypatch.delenv(fork_server.VARIABLE, raising=False)
    script = tmp_path / "splits.py"
    script.write_text(SPLITS)
    drawn = []
    for option in ("--fork", "--no-fork"):
        with LocalRun(tmp_path / option, ["--nproc", "1", option], [str(script)]) as run:
            assert run.wait(RUN_S) == 0, run.log()
            drawn += [line.partition("DRAWN")[2] for line in run.out if "DRAWN" in line]
    assert len(drawn) == 2
    assert len(set(drawn)) == 1
