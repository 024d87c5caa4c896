"""What scripts do in their loops, in jobs of threads: rounds, weights, values, early ends.

Each script runs alone, on several workers, and with deaths in between; all must come to the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from holdfast.core.errors import UserError
from holdfast.core.job_spec import with_settings
from holdfast.core.types import WorkerId
from holdfast.observe.ledger import Place, Uses
from holdfast.train.data.sampling import SamplePlan
from holdfast.train.job import Job
from holdfast.train.ledger_recorder import LedgerRecorder
from support import SPEC
from thread_cluster import ThreadCluster, ThreadWorker

Script = Callable[[Job, ThreadWorker], Any]
DEATHS = (9, 14, 19, 26, 33, 41)


def results(
    script: Script,
    workers: int,
    kill_at: dict[int, int] | None = None,
) -> list[Any]:
    """Run a script; returns what it returned on each worker that came to its end."""
    found: dict[WorkerId, Any] = {}

    def run(job: Job, me: ThreadWorker) -> None:
        returned = script(job, me)
        job._end_open_loop()
        found[me.worker] = returned

    spec = with_settings(SPEC, {"workers.nproc": workers, "workers.virtual": 4})
    at = {WorkerId(worker): number for worker, number in (kill_at or {}).items()}
    cluster = ThreadCluster(spec, run, at)
    outcome = cluster.run()
    assert not cluster.errors, cluster.errors
    assert outcome == ""
    assert kill_at or len(found) == workers  # who dies at the end may not be needed again
    return list(found.values())


def everywhere(script: Script) -> Any:
    """Run a script alone, on 2 and 4 workers and with deaths; returns what all of them return."""
    (expected,) = results(script, 1)
    for workers in (2, 4):
        assert results(script, workers) == [expected] * workers
    for i, death in enumerate(DEATHS):
        assert set(map(repr, results(script, 3, {i % 3: death}))) == {repr(expected)}
    return expected


def net(inputs: int = 6, seed: int = 3) -> nn.Module:
    """A model that does not depend on torch's own generator, which belongs to all threads."""
    model = nn.Sequential(nn.Linear(inputs, 9), nn.Tanh(), nn.Linear(9, 2))
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=generator)
    return model


def dataset(count: int = 70) -> TensorDataset:
    inputs = torch.randn(count, 6, generator=torch.Generator().manual_seed(5))
    return TensorDataset(inputs, inputs[:, :2].sin())


def digest(*modules: nn.Module) -> str:
    found = hashlib.sha256()
    for module in modules:
        for value in module.state_dict().values():
            found.update(value.numpy().tobytes())
    return found.hexdigest()[:16]


def protected(job: Job) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    job.protect(model=model, optimizer=optimizer)
    return model, optimizer


def step_once(step: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for x, y in step:
        step.backward(nn.functional.mse_loss(model(x), y))
    optimizer.step()
    optimizer.zero_grad()


# ---------------------------------------------------------------- losses


def weight_of(x: torch.Tensor) -> torch.Tensor:
    return (x[:, 0] > 0).float()  # how many count differs from batch to batch


def weighted(job: Job, me: ThreadWorker) -> Any:
    model, optimizer = protected(job)
    losses = []
    for step in job.steps(job.batches(dataset(), 3), until=5):
        for x, y in step:
            weight = weight_of(x)
            loss = ((model(x) - y).square().mean(dim=1) * weight).sum()
            step.backward(loss, weight=weight.sum())
        losses.append(step.loss)
        optimizer.step()
        optimizer.zero_grad()
    return digest(model), losses[-1:]


def test_weighted_losses_are_divided_by_the_weight_of_the_whole_step() -> None:
    _, (last,) = everywhere(weighted)
    model, data, losses = net(), dataset(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plan = SamplePlan(length=70, batch_size=3, virtual_ranks=4, seed=0)
    for step in range(5):
        x, y = data[plan.step_indices(step).tolist()]
        weight = weight_of(x)
        loss = ((model(x) - y).square().mean(dim=1) * weight).sum() / weight.sum()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert last == pytest.approx(losses[-1], rel=1e-4)


def in_parts(job: Job, me: ThreadWorker) -> Any:
    """Each batch in two parts: the weighted sums add up to those of the whole batch."""
    model, optimizer = protected(job)
    for step in job.steps(job.batches(dataset(), 4), until=4):
        for x, y in step:
            parts = list(zip(x.split(2), y.split(2), strict=True))
            for i, (a, b) in enumerate(parts):
                loss = (model(a) - b).square().sum()
                step.backward(loss, weight=len(a), last=i == len(parts) - 1)
        optimizer.step()
        optimizer.zero_grad()
    return digest(model)


def through_parts_of_the_model(job: Job, me: ThreadWorker) -> Any:
    """The second backward reaches another part of the model than the first."""
    first, second = net(6, 3), net(2, 4)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=1e-2)
    job.protect(first=first, second=second, optimizer=optimizer)
    for step in job.steps(job.batches(dataset(), 3), until=4):
        for x, y in step:
            hidden = first(x)
            step.backward(hidden.square().mean(), last=False)
            step.backward((second(hidden.detach()) - y).square().mean())
        assert all(p.grad is not None for p in [*first.parameters(), *second.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return digest(first, second)


@pytest.mark.parametrize("script", [in_parts, through_parts_of_the_model])
def test_a_batch_may_have_several_backward_passes(script: Script) -> None:
    everywhere(script)


def test_wrong_calls_of_backward_are_told() -> None:
    def script(job: Job, me: ThreadWorker) -> Any:
        model, _ = protected(job)
        found: list[str] = []

        def fails(call: Callable[[], None]) -> None:
            with pytest.raises(UserError) as error:
                call()
            found.append(str(error.value))

        for step in job.steps(job.batches(dataset(), 3), until=1):
            for x, y in step:
                loss = nn.functional.mse_loss(model(x), y)
                fails(lambda loss=loss, step=step: step.backward(loss.expand(2)))
                fails(lambda loss=loss, step=step: step.backward(loss, weight=-1.0))
                break
            break
        return found

    scalar, weight = results(lambda job, me: _ignoring_its_end(job, script(job, me)), 1)[0]
    assert "scalar" in scalar
    assert "weight=-1.0" in weight


def _ignoring_its_end(job: Job, found: Any) -> Any:
    job._step = None
    return found


# ---------------------------------------------------------------- rounds


def gan(
    job: Job,
    me: ThreadWorker,
    spoil: Callable[[ThreadWorker, int, str], float] = lambda me, step, name: 1.0,
) -> Any:
    """Two optimizers in turn: each round reduces the gradients of one module."""
    critic, generator = net(6, 3), net(6, 4)
    for_critic = torch.optim.AdamW(critic.parameters(), lr=1e-2)
    for_generator = torch.optim.AdamW(generator.parameters(), lr=1e-2)
    job.protect(critic=critic, generator=generator, a=for_critic, b=for_generator)
    losses = []
    for step in job.steps(job.batches(dataset(), 3), until=4):
        for x, _ in step.round("critic"):
            noise = x.flip(1)  # threads share torch's generator
            loss = critic(x).mean() - generator(noise).square().mean()
            step.backward(loss * spoil(me, step.index, "critic"))
        assert all(p.grad is None for p in generator.parameters())
        for_critic.step()
        losses.append(step.loss)
        for x, _ in step.round("generator"):
            noise = x.flip(1)
            loss = generator(noise).square().mean() + critic(x).square().mean()
            step.backward(loss * spoil(me, step.index, "generator"))
        assert all(p.grad is None for p in critic.parameters())
        for_generator.step()
        losses.append(step.loss)
    return digest(critic, generator), losses[-1:]


def test_a_step_may_have_several_rounds() -> None:
    everywhere(gan)


@pytest.mark.parametrize("spoiled", ["critic", "generator"])
def test_a_round_that_is_computed_again_sums_what_it_did_before(spoiled: str) -> None:
    (expected,) = results(gan, 1)
    once: list[int] = []

    def spoil(me: ThreadWorker, step: int, name: str) -> float:
        """Return what a worker's first loss of a round is multiplied by: no number, once."""
        strikes = (me.worker, step, name) == (1, 2, spoiled) and not once
        once.extend([step] * strikes)
        return float("nan") if strikes else 1.0

    def script(job: Job, me: ThreadWorker) -> Any:
        return gan(job, me, spoil)

    assert results(script, 3) == [expected] * 3
    assert once == [2]


def test_a_round_names_modules() -> None:
    def script(job: Job, me: ThreadWorker) -> Any:
        protected(job)
        for step in job.steps(job.batches(dataset(), 3), until=1):
            with pytest.raises(UserError, match="protected under that name, but model"):
                next(step.round("optimizer"))
            for x, _ in step:
                step.backward(
                    x.sum() * 0 + sum(p.sum() for p in job._protected["model"].parameters())
                )
        return True

    assert results(script, 1) == [True]


# ---------------------------------------------------------------- values


def with_values(job: Job, me: ThreadWorker) -> Any:
    """What is agreed on, evaluated and kept decides how training goes on."""
    model, optimizer = protected(job)
    job.values["best"] = 1e9
    job.values["seen"] = []
    held_out = dataset(23)

    def measure(batch: Any) -> dict[str, Any]:
        x, y = batch
        error = (model(x) - y).square().mean(dim=1)
        return {"error": error.mean(), "large": ((error > 1).sum(), len(x))}

    for step in job.steps(job.batches(dataset(), 3), until=6):
        if step.index == 2:
            optimizer.param_groups[0]["lr"] *= job.agree(0.5)
        step_once(step, model, optimizer)
        if step.index % 2:
            found = job.evaluate(measure, held_out, 5)
            job.values["best"] = min(job.values["best"], found["error"])
            job.values["seen"].append(found["large"])
    after = job.evaluate(lambda batch: (model(batch[0]) - batch[1]).square().mean(), held_out, 4)
    return digest(model), job.values["best"], list(job.values["seen"]), after


def test_values_are_a_part_of_the_state() -> None:
    _, best, seen, after = everywhere(with_values)
    assert len(seen) == 3
    assert after == pytest.approx(best, rel=1e-5)


def test_an_evaluation_is_the_mean_over_all_samples() -> None:
    def script(job: Job, me: ThreadWorker) -> Any:
        model = net()
        model.append(nn.Dropout(0.5))
        job.protect(model=model)
        loader = DataLoader(dataset(23), batch_size=4)

        def error(batch: Any) -> torch.Tensor:
            assert not torch.is_grad_enabled()
            return (model(batch[0]) - batch[1]).square().mean()

        found = job.evaluate(error, loader)
        assert model.training
        return found

    (found,) = results(script, 1)
    with torch.no_grad():
        x, y = dataset(23).tensors
        assert found == pytest.approx((net()(x) - y).square().mean().item(), rel=1e-6)
    assert results(script, 3) == [found] * 3


def test_what_is_agreed_is_the_leaders() -> None:
    def script(job: Job, me: ThreadWorker) -> Any:
        model, optimizer = protected(job)
        found = [job.agree({"at": job.worker})]
        for step in job.steps(until=3):
            for task in step:
                x = torch.full((2, 6), float(task.vrank))
                step.backward(model(x).square().mean())
            optimizer.step()
            found.append(job.agree([job.worker, job.is_leader]))
        found.append(job.agree(job.worker))
        return found

    assert results(script, 3) == [[{"at": 0}, *[[0, True]] * 3, 0]] * 3
    for death in (5, 15, 25):
        first, *others = [found[-1] for found in results(script, 3, {0: death})]
        assert others == [first] * len(others), "all workers hear the same, whoever leads"


def test_what_cannot_travel_is_no_value() -> None:
    def script(job: Job, me: ThreadWorker) -> Any:
        model, _ = protected(job)
        with pytest.raises(UserError, match=r"job.values\['a'\]\[1\] is a Tensor"):
            job.values["a"] = [1, torch.zeros(2)]
        with pytest.raises(UserError, match=r"agree.*is a Sequential"):
            job.agree(model)
        with pytest.raises(UserError, match="Holdfast uses that name"):
            job.protect(holdfast=model)
        return True

    assert results(script, 1) == [True]


def test_a_function_that_evaluates_to_nothing_is_told() -> None:
    def script(job: Job, me: ThreadWorker) -> Any:
        protected(job)
        return job.evaluate(lambda batch: "good", dataset(), 3)

    with pytest.raises(AssertionError, match="returned str: return a number"):
        results(script, 1)


# ---------------------------------------------------------------- ends


def stops(job: Job, me: ThreadWorker) -> Any:
    model, optimizer = protected(job)
    taken = []
    for until in (9, 20):
        for step in job.steps(job.batches(dataset(), 3), until=until):
            step_once(step, model, optimizer)
            taken.append(step.index)
            if step.index == 3:
                job.stop()
    return digest(model), job.stopped


def test_all_loops_end_after_the_step_that_follows_a_stop() -> None:
    def alone(job: Job, me: ThreadWorker) -> Any:
        model, optimizer = protected(job)
        for step in job.steps(job.batches(dataset(), 3), until=5):
            step_once(step, model, optimizer)
        return digest(model), True

    assert results(alone, 1) == [everywhere(stops)]


def test_one_workers_stop_is_enough() -> None:
    def script(job: Job, me: ThreadWorker) -> Any:
        model, optimizer = protected(job)
        last = -1
        for step in job.steps(job.batches(dataset(), 3), until=9):
            step_once(step, model, optimizer)
            last = step.index
            if step.index == 2 and job.worker == 1:
                job.stop()
        return last

    assert results(script, 3) == [3, 3, 3]


def breaks(job: Job, me: ThreadWorker) -> Any:
    model, optimizer = protected(job)
    first = job.batches(dataset(), 3)
    for step in job.steps(first, until=9):
        step_once(step, model, optimizer)
        if step.index == 2:
            break
    found = [job.agree("between")]
    for step in job.steps(job.batches(dataset(40), 2), until=8):  # the first loop might have 9
        found.append(step.step_in_epoch)
        step_once(step, model, optimizer)
        if len(found) > 1 and step.index == 6:
            break
    return digest(model)


def test_a_loop_may_be_left_by_break() -> None:
    everywhere(breaks)


def test_a_step_that_was_left_early_is_told() -> None:
    def script(job: Job, me: ThreadWorker) -> Any:
        model, _ = protected(job)
        for step in job.steps(job.batches(dataset(), 3), until=9):
            for x, y in step:
                step.backward(nn.functional.mse_loss(model(x), y))
                break
            break
        with pytest.raises(UserError, match="step 0 was left early"):
            job._end_open_loop()
        job._step = None
        return True

    assert results(script, 1) == [True]


# ---------------------------------------------------------------- data


def own_batches(job: Job, me: ThreadWorker) -> Any:
    """No dataset: the script makes its own batches."""
    model, optimizer = protected(job)
    for step in job.steps(until=5):
        for task in step:
            dice = torch.Generator().manual_seed(9 * task.step + task.vrank)
            x = torch.randn(3, 6, generator=dice)
            step.backward((model(x) - x[:, :2]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return digest(model)


def test_a_script_may_make_its_own_batches() -> None:
    everywhere(own_batches)


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
        (
            lambda d: DataLoader(
                d, sampler=torch.utils.data.WeightedRandomSampler([1.0] * len(d), len(d))
            ),
            "WeightedRandomSampler",
        ),
        (
            lambda d: DataLoader(
                d, sampler=torch.utils.data.RandomSampler(d, num_samples=5), batch_size=2
            ),
            "RandomSampler",
        ),
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
    return digest(model), losses[-1:], dict(job._progress.streams)


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


def test_what_is_no_stream_is_told() -> None:
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
    assert places == [Place(3 * i + j, i, use) for i in range(2) for j, use in enumerate(uses)]
