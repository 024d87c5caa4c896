"""Where the batches of loops come from: loaders, streams, the script itself; jobs of threads."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from holdfast.engine.core.errors import UserError
from holdfast.engine.records.ledger import Place, Uses
from holdfast.engine.train.job import Job
from holdfast.engine.train.script.ledger_recorder import LedgerRecorder
from loop_kit import dataset, digest, everywhere, net, protected, results, step_once
from thread_cluster import ThreadWorker


def own_batches(job: Job, me: ThreadWorker) -> Any:
    """Train without a dataset: the script makes its own batches."""
    model, optimizer = protected(job)
    for step in job.steps(until=5):
        for task in step:
            dice = torch.Generator().manual_seed(9 * task.step + task.vrank)
            x = torch.randn(3, 6, generator=dice)
            step.backward((model(x) - x[:, :2]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return digest(model)


@pytest.mark.slow
def test_a_script_may_make_its_own_batches() -> None:
    everywhere(own_batches)


@pytest.mark.slow
def test_a_ready_loader_says_how_batches_are_made() -> None:
    def script(job: Job, me: ThreadWorker) -> Any:
        model, optimizer = protected(job)
        loader = DataLoader(dataset(), batch_size=3, shuffle=True, drop_last=True)
        for data in (job.batches(loader), job.batches(dataset(), 3, drop_last=True)):
            assert data.plan == job.batches(loader).plan
        for step in job.steps(job.batches(loader), until=3):
            step_once(step, model, optimizer)
        return digest(model)

    everywhere(script)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda d: DataLoader(d, batch_size=None), "NoneType"),
    ],
)
def test_a_loader_that_has_no_counterpart_is_told(make: Any, words: str) -> None:
    def script(job: Job, me: ThreadWorker) -> Any:
        with pytest.raises(UserError, match=words):
            job.batches(make(dataset()))
        with pytest.raises(UserError, match="give nothing else"):
            job.batches(DataLoader(dataset()), 4)
        with pytest.raises(UserError, match="no batch size"):
            job.batches(dataset())
        with pytest.warns(UserWarning, match="generator is not used"):
            job.batches(DataLoader(dataset(), generator=torch.Generator()))
        return True

    assert results(script, 1) == [True]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_loader_with_a_state_is_read_like_any_other() -> None:
    """Its own place counts neither in the job's state nor where the job begins."""
    kind = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def script(job: Job, me: ThreadWorker) -> Any:
        begun = kind(dataset(), batch_size=3, shuffle=True)
        for shuffle in (True, False):
            stateful, plain = (
                each(dataset(), batch_size=3, shuffle=shuffle) for each in (kind, DataLoader)
            )
            assert job.batches(stateful).plan == job.batches(plain).plan
        next(iter(begun))
        state = begun.state_dict()
        begun.load_state_dict(state)
        with pytest.raises(UserError, match=r"leave its load_state_dict\(\) out"):
            job.batches(begun)
        with pytest.raises(UserError, match="leave the StatefulDataLoader out, and give it to job"):
            job.protect(loader=stateful)
        return True

    assert results(script, 1) == [True]


class Shards:
    """Shards of different lengths, whose samples also depend on a keyed generator."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self.lengths = lengths
        self.opened: list[int] = []

    def __call__(self, shard: int, shards: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        assert shards == 4
        self.opened.append(shard)
        for i in range(self.lengths[shard]):
            dice = torch.Generator().manual_seed(100 * shard + i)
            x = torch.randn(6, generator=dice)
            yield x, x[:2].sin()


def streamed(job: Job, me: ThreadWorker, lengths: tuple[int, ...] = (7, 12, 3, 30)) -> Any:
    model, optimizer = protected(job)
    losses = []
    for step in job.steps(job.stream(Shards(lengths), 3), until=8):
        step_once(step, model, optimizer)
        losses.append(step.loss)
    return digest(model), losses[-1:], dict(job._progress.places.streams)


@pytest.mark.slow
def test_each_virtual_rank_reads_its_own_shard_of_a_stream() -> None:
    _, _, streams = everywhere(streamed)
    # 7 = 3 + 3 + 1: three steps; 12: four, and again; 3: one step, each an epoch.
    assert streams == {0: [(2, 6, 6), (1, 12, 4), (7, 3, 7), (0, 24, 0)]}


def test_a_streams_loss_is_the_mean_over_its_samples() -> None:
    lengths = (4, 1, 2, 3)

    def script(job: Job, me: ThreadWorker) -> Any:
        model, _ = protected(job)
        for step in job.steps(job.stream(Shards(lengths), 4), until=1):
            for x, y in step:
                step.backward(nn.functional.mse_loss(model(x), y))
            gradient = model[0].weight.grad.clone()
        return step.loss, gradient

    (loss, gradient), *_ = results(script, 3)
    model = net()
    samples = [sample for shard in range(4) for sample in Shards(lengths)(shard, 4)]
    x, y = (torch.stack(each) for each in zip(*samples, strict=True))
    mine = nn.functional.mse_loss(model(x), y)
    mine.backward()
    assert loss == pytest.approx(mine.item(), rel=1e-5)
    assert torch.allclose(gradient, model[0].weight.grad, rtol=1e-4, atol=1e-7)


def test_an_object_that_is_no_stream_is_refused() -> None:
    def script(job: Job, me: ThreadWorker) -> Any:
        model, optimizer = protected(job)
        with pytest.raises(UserError, match=r"job.stream\(list\): .*cut into shards"):
            job.stream([1, 2], 3)
        with pytest.raises(UserError, match="batch_size=0"):
            job.stream(Shards((1,) * 4), 0)
        for step in job.steps(job.stream(Shards((0,) * 4), 3), until=1):
            step_once(step, model, optimizer)

    with pytest.raises(AssertionError, match="no shard of the stream has any sample"):
        results(script, 1)


def test_the_ledger_says_what_each_step_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[Place] = []
    monkeypatch.setattr(LedgerRecorder, "commit", lambda self, place, *rest: places.append(place))

    def script(job: Job, me: ThreadWorker) -> Any:
        model, optimizer = protected(job)
        for step in job.steps(job.batches(dataset(), 3), until=2):
            step_once(step, model, optimizer)
            step_once(step, model, optimizer)
            job.agree(1)
        return True

    results(script, 1)
    uses = (Uses.SAMPLES, Uses.SAME_SAMPLES, Uses.NO_SAMPLES)
    expected = [Place(3 * i + j, i, use) for i in range(2) for j, use in enumerate(uses)]
    assert [dataclasses.replace(place, told="") for place in places] == expected
    assert [place.told for place in places] == ["", "", "1"] * 2


def with_a_norm(job: Job, me: ThreadWorker) -> Any:
    """BatchNorm needs two samples at least, and an epoch's last step has two for four ranks."""
    model = nn.Sequential(net(), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    job.protect(model=model, optimizer=optimizer)
    for step in job.steps(job.batches(dataset(26), 4), until=5):
        step_once(step, model, optimizer)
    return digest(model)


def test_an_epochs_last_step_makes_no_smaller_batch_than_a_loader_would() -> None:
    (expected,) = results(with_a_norm, 1)
    assert results(with_a_norm, 3) == [expected] * 3


def test_a_job_of_an_older_release_keeps_its_shares_of_an_epochs_last_step() -> None:
    """Its checkpoints lack the rule by which the last samples are shared out."""

    def script(job: Job, me: ThreadWorker) -> Any:
        model, optimizer = protected(job)
        saved = job._progress.state_dict()
        del saved["packed"]
        job._progress.load_state_dict(saved)
        found = []
        for step in job.steps(job.batches(dataset(26), 4), until=2):
            for x, y in step:
                step.backward((model(x) - y).square().mean())
                found.append(len(x))
            optimizer.step()
        assert not job._progress.state_dict()["packed"]
        return found[4:] or found

    assert results(script, 1, settings={"silent_errors.repeat_steps": 0}) == [[3, 3, 2, 2]]
