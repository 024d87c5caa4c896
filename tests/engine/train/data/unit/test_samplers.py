"""Loaders with samplers of their own: jobs of threads, and the orders that are drawn from them."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from holdfast.engine.core.errors import UserError
from holdfast.engine.core.job_spec import with_settings
from holdfast.engine.train.data.batch_loading import BatchSource
from holdfast.engine.train.data.batch_tasks import LoadOptions
from holdfast.engine.train.data.read_plans import OrderPlan
from holdfast.engine.train.data.sampled_batches import DrawnTasks, EpochOrders, draw_order
from holdfast.engine.train.job import Job
from loop_kit import dataset, digest, everywhere, net, protected, results, step_once
from support import SPEC
from thread_cluster import ThreadCluster, ThreadWorker

SIZE, STEPS, V = 70, 9, 4


class Buckets(Sampler[list[int]]):
    """Batches of similar lengths, in another order and number each epoch; its length is wrong."""

    def __init__(self) -> None:
        self.dice = random.Random(1)
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[list[int]]:
        indices = list(range(self.epoch % 3, SIZE))
        sizes = [1 + i % 3 for i in range(self.epoch, 14 - self.epoch % 2)]
        self.dice.shuffle(indices)
        for size in sizes:
            yield [indices.pop() for _ in range(size)]


def own_generator() -> torch.Generator:
    """Return a generator for one job: all threads of a test share the global one."""
    return torch.Generator().manual_seed(3)


def loader(kind: str) -> DataLoader[Any]:
    data = dataset(SIZE)
    if kind == "buckets":
        return DataLoader(data, batch_sampler=Buckets())
    samplers = {
        "weighted": lambda: WeightedRandomSampler(
            [1.0 + i for i in range(SIZE)], 50, generator=own_generator()
        ),
        "subset": lambda: SubsetRandomSampler(range(10, 60, 2), generator=own_generator()),
        "replaced": lambda: RandomSampler(data, replacement=True, generator=own_generator()),
        "fewer": lambda: RandomSampler(data, num_samples=31, generator=own_generator()),
        "reversed": lambda: range(SIZE)[::-1],
    }
    return DataLoader(data, batch_size=3, sampler=samplers[kind](), drop_last=kind == "fewer")


def trained(job: Job, me: ThreadWorker, kind: str) -> Any:
    model, optimizer = protected(job)
    last = ()
    for step in job.steps(job.batches(loader(kind)), until=STEPS):
        step_once(step, model, optimizer)
        last = step.loss, step.epoch, step.step_in_epoch
    return digest(model), last, dict(job._progress.places.orders)


def by_hand(kind: str) -> tuple[nn.Module, list[tuple[int, int]]]:
    """Train as one process would, on the indices that the sampler gives for (seed 0, epoch)."""
    model, data = net(), dataset(SIZE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sampler = loader(kind).batch_sampler
    steps: list[tuple[int, int]] = []
    for epoch in range(STEPS):
        order = draw_order(sampler, 0, epoch)
        for within in range(-(-len(order) // V)):
            if len(steps) < STEPS:
                keys = [i for b in range(V) for i in order.batch(within * V + b)]
                x, y = (
                    torch.stack(each) for each in zip(*map(data.__getitem__, keys), strict=True)
                )
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                steps.append((epoch, within))
    return model, steps


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("weighted", marks=pytest.mark.slow),
        pytest.param("buckets", marks=pytest.mark.slow),
    ],
)
def test_each_virtual_rank_takes_the_next_batch_of_a_sampler(kind: str) -> None:
    _, (_, *last), orders = everywhere(lambda job, me: trained(job, me, kind))
    assert tuple(last) == by_hand(kind)[1][-1]
    assert last[0] > 0
    assert len(orders) == 1


@pytest.mark.parametrize("kind", ["weighted", "buckets", "subset", "replaced", "fewer", "reversed"])
def test_the_samples_of_a_sampler_are_used_in_its_order(kind: str) -> None:
    found: list[nn.Module] = []

    def script(job: Job, me: ThreadWorker) -> Any:
        returned = trained(job, me, kind)
        found.append(job._protected["model"])
        return returned[0]

    assert len(set(results(script, 2))) == 1
    expected, _ = by_hand(kind)
    for mine, theirs in zip(found[0].parameters(), expected.parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_another_loop_does_not_move_a_samplers_order() -> None:
    def script(job: Job, me: ThreadWorker) -> Any:
        model, optimizer = protected(job)
        data = job.batches(loader("subset"))
        for loop, until in ((data, 2), (job.batches(dataset(), 3), 4), (data, 7)):
            for step in job.steps(loop, until=until):
                step_once(step, model, optimizer)
        return digest(model), [epoch for epoch, *_ in job._progress.places.orders[0]]

    _, epochs = everywhere(script)
    assert epochs == [1]  # an epoch of 9 batches, in 3 steps: 2 and 1, and 2 of the next


class Unkeyed(Sampler[int]):
    """Gives each object an order of its own."""

    made = 0

    def __init__(self) -> None:
        Unkeyed.made += 1
        self.number = Unkeyed.made

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(range(SIZE), key=lambda i: i * self.number % 71))


def test_workers_whose_samplers_differ_are_told() -> None:
    def script(job: Job, me: ThreadWorker) -> Any:
        model, optimizer = protected(job)
        data = DataLoader(dataset(SIZE), batch_size=3, sampler=Unkeyed())
        for step in job.steps(job.batches(data), until=2):
            step_once(step, model, optimizer)

    spec = with_settings(SPEC, {"workers.nproc": 2, "workers.virtual": V})
    cluster = ThreadCluster(spec, script, {})
    cluster.run()
    assert cluster.errors
    words = "(another|sample) order .*in epoch 0"
    assert all(re.search(words, str(each)) for each in cluster.errors), cluster.errors
    assert all(isinstance(each, UserError) for each in cluster.errors)


def test_a_state_of_another_order_is_told() -> None:
    plan = OrderPlan(number=0, virtual_ranks=V, seed=0)
    orders = EpochOrders([[0], [1]], plan)
    with pytest.raises(UserError, match="another order in epoch 3"):
        orders.position_after((3, 1, 1, 12345, 2, 2), 0)
    assert orders.position_after((3, 0, 0, orders.of(3)[1].order, 2, 2), 1) == (4, 0)


class Scales(Sampler[Any]):
    """Names samples by more than a number, for instance pictures of several sizes."""

    def __iter__(self) -> Iterator[Any]:
        yield [(0, "s"), 1]
        yield [np.int64(2), torch.tensor(3)]


class Bad:
    def __init__(self, *batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def test_an_order_depends_on_seed_and_epoch_only() -> None:
    for sampler in (
        BatchSampler(RandomSampler(range(50)), 4, False),
        BatchSampler(RandomSampler(range(50), generator=own_generator()), 4, True),
        Buckets(),
        NumpyShuffled(),
    ):
        orders = [draw_order(sampler, *key).facts(0).order for key in ((5, 1), (5, 1), (5, 2))]
        torch.manual_seed(random.randrange(99))
        np.random.seed(random.randrange(99))
        assert draw_order(sampler, 5, 1).facts(0).order == orders[0] == orders[1] != orders[2]
        assert draw_order(sampler, 6, 1).facts(0).order != orders[0]


def test_samplers_within_samplers_know_the_epoch() -> None:
    inner = Buckets()
    outer = BatchSampler(inner, 2, False)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="BatchSampler of Buckets gave no batch in epoch 14"):
        draw_order(outer, 0, 14)
    assert inner.epoch == 14


class NumpyShuffled:
    def __init__(self) -> None:
        self.generator = np.random.default_rng(1)
        self.old = np.random.RandomState(2)

    def __iter__(self) -> Iterator[list[int]]:
        return iter([self.generator.permutation(9), self.old.permutation(9)])


def test_drawing_leaves_all_generators_alone() -> None:
    sampler = BatchSampler(RandomSampler(range(50), generator=own_generator()), 4, False)
    own = sampler.sampler.generator
    found = []
    for draws in (0, 1):
        random.seed(7), np.random.seed(7), torch.manual_seed(7)
        for _ in range(draws):
            draw_order(sampler, 5, 1)
        found.append((random.random(), np.random.rand(), torch.rand(1).item()))
    assert found[0] == found[1]
    assert sampler.sampler.generator is own
    assert torch.equal(own.get_state(), own_generator().get_state())


def test_samples_may_be_named_by_more_than_numbers() -> None:
    order = draw_order(Scales(), 0, 0)
    assert [order.batch(i) for i in range(3)] == [[(0, "s"), 1], [2, 3], []]
    facts = order.facts(0)
    assert (facts.batches, facts.samples) == (2, 4)
    assert facts.order != draw_order([[(0, "m"), 1], [2, 3]], 0, 0).facts(0).order
    assert facts.order != draw_order([[(0, "s")], [1, 2, 3]], 0, 0).facts(0).order


@pytest.mark.parametrize(
    ("sampler", "words"),
    [
        (Bad(), "Bad gave no batch in epoch 2"),
        (Bad([1], []), "Bad gave an empty batch in epoch 2"),
        (Bad([object()]), "not named by plain values"),
    ],
)
def test_orders_that_cannot_be_used_are_told(sampler: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        draw_order(sampler, 0, 2).facts(2)


def test_a_sampler_without_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.engine.train.data.sampled_batches.EPOCH_SAMPLES_MAX", 100)
    with pytest.raises(UserError, match="has not come to an end after 101 samples"):
        draw_order(iter(lambda: [1], 0), 0, 0)


class Keyed:
    """Has an unknown length, and depends on the global generators."""

    def __getitem__(self, key: int) -> Any:
        return torch.tensor([key]), torch.rand(2), random.random()


def test_data_workers_load_the_same_batches() -> None:
    now, found = 0, []
    for num_workers in (0, 2):
        plan = OrderPlan(number=0, virtual_ranks=V, seed=0)
        tasks = DrawnTasks(plan, EpochOrders(Buckets(), plan), plan.start(), lambda: now)
        source = BatchSource(Keyed(), tasks, LoadOptions(num_workers=num_workers))
        source.follow(range(V), 0, STEPS)
        try:
            found.append([source.batch(s, v) for s in range(STEPS) for v in range(V)])
        finally:
            source.close()
        assert source.stats.ahead == (V * STEPS if num_workers else 0)
    assert repr(found[0]) == repr(found[1])
    assert None in found[0]


def test_a_distributed_sampler_is_told() -> None:
    def script(job: Job, me: ThreadWorker) -> Any:
        sampler = DistributedSampler(dataset(), num_replicas=2, rank=0)
        for found in (
            DataLoader(dataset(), batch_size=2, sampler=sampler),
            DataLoader(dataset(), batch_sampler=BatchSampler(sampler, 2, False)),
        ):
            with pytest.raises(UserError, match="DistributedSampler, which gives each process"):
                job.batches(found)
        with pytest.raises(UserError, match="sampler of its own"):
            job.evaluate(lambda batch: 0.0, loader("subset"))
        plain = DataLoader(
            dataset(), batch_sampler=BatchSampler(SequentialSampler(dataset()), 3, False)
        )
        assert job.batches(plain).steps_per_epoch == 6  # 24 batches
        return True

    assert results(script, 1) == [True]


def test_samplers_and_backup_workers_are_told() -> None:
    spec = with_settings(SPEC, {"workers.nproc": 2, "workers.virtual": 4, "stragglers.backup": 1})

    def script(job: Job, me: ThreadWorker) -> Any:
        with pytest.raises(UserError, match="--backup"):
            job.batches(loader("subset"))
        protected(job)
        for step in job.steps(until=1):
            for _ in step:
                step.backward(job._protected["model"](torch.zeros(1, 6)).sum())

    cluster = ThreadCluster(spec, script, {})
    cluster.run()
    assert not cluster.errors
