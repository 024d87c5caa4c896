"""Jobs that train tables: the same bits on any number of workers, and after deaths."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from conftest import computed_twice, finish
from example_kit import ARGS, EXAMPLES
from holdfast.engine.core.errors import UserError
from holdfast.engine.core.job_spec import ServerSettings
from holdfast.engine.runtime.local_run import LocalRun
from holdfast.engine.train.checkpoint.sharded_optimizers import ShardedOptimizers
from holdfast.engine.train.exchange.layout import Layout
from holdfast.engine.train.exchange.seam import AloneTransport
from holdfast.engine.train.job import Job
from holdfast.engine.train.script.row_updates import RowUpdates
from holdfast.engine.train.script.service_link import ServiceLink
from holdfast.tables import (
    SGD,
    Adagrad,
    Embedding,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    LazyAdam,
    RowOptimizer,
    RowWiseAdagrad,
    service,
)
from loop_kit import digest, everywhere, net, results
from memory_kit import kill_workers, recalls, until_step
from thread_cluster import ThreadWorker

ROWS, DIM, BAG = 40, 4, 3
FIRST = {"initial_accumulator_value": 0.5}


def clicks(count: int = 70) -> TensorDataset:
    """Return bags of ids [count, 2, BAG], most of them small, and targets [count, 2]."""
    dice = torch.Generator().manual_seed(5)
    ids = (ROWS * torch.rand(count, 2, BAG, generator=dice) ** 3).long()
    return TensorDataset(ids, ids.sum(2).float().sin())


class Ranker(nn.Module):
    """Ranks by the rows of two features, from two tables that it holds itself."""

    def __init__(self, rule: RowOptimizer, items: int | None = ROWS) -> None:
        super().__init__()
        room, self.factor = (None, 1) if items is not None else (20, 0x5DEECE66D1357)
        configs = [
            EmbeddingBagConfig(
                name="items", num_embeddings=items, embedding_dim=DIM, max_capacity=room
            ),
            EmbeddingBagConfig(name="users", num_embeddings=ROWS, embedding_dim=DIM),
        ]
        self.tables = EmbeddingBagCollection(configs, rule, seed=7)
        self.top = net(2 * DIM)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        offsets = torch.arange(0, len(ids) * BAG, BAG)
        items, users = (ids[:, 0] * self.factor).reshape(-1), ids[:, 1].reshape(-1)
        found = self.tables({"items": (items, offsets), "users": (users, offsets)})
        return self.top(torch.cat([found["items"], found["users"]], dim=1))


def trained(job: Job, ranker: Ranker, *, rates: bool = False) -> str:
    """Train, and return a digest of the rows, their slots and the rest."""
    optimizer = torch.optim.AdamW(ranker.top.parameters(), lr=1e-2)
    job.protect(ranker=ranker, optimizer=optimizer)
    rows = ranker.tables.row_optimizer
    for step in job.steps(job.batches(clicks(), 3), until=8):
        for ids, targets in step:
            step.backward(nn.functional.mse_loss(ranker(ids), targets))
        optimizer.step()
        optimizer.zero_grad()
        if rates:
            rows.param_groups[0]["lr"] *= 0.9
    assert all(p.grad is None for p in ranker.tables.parameters())
    kept = [rows.state[p][name] for p in ranker.tables.parameters() for name in rows.state[p]]
    return digest(ranker) + repr([each.double().sum().item() for each in kept])


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(SGD(lr=0.1, momentum=0.9), marks=pytest.mark.slow),
        pytest.param(Adagrad(lr=0.1), marks=pytest.mark.slow),
        pytest.param(RowWiseAdagrad(lr=0.1), marks=pytest.mark.slow),  # below, with its rate
        pytest.param(LazyAdam(lr=0.01), marks=pytest.mark.slow),
    ],
    ids=lambda rule: type(rule).__name__,
)
def test_tables_are_the_same_on_any_number_of_workers_and_after_deaths(rule: RowOptimizer) -> None:
    def script(job: Job, me: ThreadWorker) -> str:
        return trained(job, Ranker(rule))

    everywhere(script)


def test_tables_of_one_width_are_summed_together_but_those_of_any_keys() -> None:
    configs = [
        EmbeddingBagConfig(name="a", num_embeddings=ROWS, embedding_dim=DIM),
        EmbeddingBagConfig(name="b", num_embeddings=ROWS, embedding_dim=2 * DIM),
        EmbeddingBagConfig(name="c", num_embeddings=None, embedding_dim=DIM, max_capacity=9),
        EmbeddingBagConfig(name="d", num_embeddings=ROWS, embedding_dim=DIM),
    ]
    tables = EmbeddingBagCollection(configs, SGD(lr=0.1))
    other, plain = Embedding(ROWS, DIM, name="e"), nn.Embedding(ROWS, DIM, sparse=True)
    updates = RowUpdates()
    updates.find("tables", nn.ModuleList([tables, other]))
    weights = [tables.embedding_bags[name].weight for name in "abcd"]
    weights += [other.weight, plain.weight]
    found = updates.group(weights)
    names = {id(w): name for name, w in zip("abcdep", weights, strict=True)}
    assert ["".join(names[id(w)] for w in group) for group in found] == ["ad", "b", "c", "e", "p"]


def test_servers_without_any_table_are_a_mistake() -> None:
    link = cast(ServiceLink, SimpleNamespace(layout=None, settings=ServerSettings(count=2)))
    with pytest.raises(UserError, match=r"--servers.*protects no table.*leave --servers out"):
        service.connect(link, {"model": nn.Linear(2, 2)})


def test_a_table_of_any_keys_beside_one_of_the_same_width_is_the_same_on_any_workers() -> None:
    def script(job: Job, me: ThreadWorker) -> str:
        ranker = Ranker(LazyAdam(lr=0.01), items=None)
        return trained(job, ranker) + repr(ranker.tables.read_keys("items").tolist())

    (alone,) = results(script, 1)
    assert results(script, 2) == [alone] * 2


@pytest.mark.slow
def test_a_rate_that_the_script_changes_goes_to_workers_that_come_back() -> None:
    def script(job: Job, me: ThreadWorker) -> str:
        return trained(job, Ranker(RowWiseAdagrad(lr=0.1)), rates=True)

    everywhere(script)


def test_rows_are_updated_as_an_optimizer_of_the_script_would() -> None:
    def script(job: Job, me: ThreadWorker, own: bool = False) -> str:
        table = Embedding(ROWS, DIM, name="items", seed=7, optimizer=LazyAdam(lr=0.01))
        optimizers = {}
        if own:
            del table.row_optimizer
            optimizers["adam"] = torch.optim.SparseAdam(table.parameters(), lr=0.01)
        job.protect(table=table, **optimizers)
        for step in job.steps(job.batches(clicks(), 3), until=8):
            for ids, targets in step:
                step.backward((table(ids[:, 0]).sum((1, 2)) - targets[:, 0]).square().mean())
            for each in optimizers.values():
                each.step()
                each.zero_grad()
        return digest(table)

    (plain,) = results(lambda job, me: script(job, me, own=True), 1)
    assert results(script, 2) == [plain] * 2


@pytest.mark.slow
def test_a_round_updates_the_rows_of_its_modules_only() -> None:
    def script(job: Job, me: ThreadWorker) -> Any:
        first, second = (Embedding(ROWS, DIM, name=name, seed=7) for name in "ab")
        job.protect(first=first, second=second)
        before = second.weight.detach().clone()
        for step in job.steps(job.batches(clicks(), 3), until=3):
            for ids, _ in step.round("first"):
                step.backward((first(ids) + second(ids)).square().mean())
        assert torch.equal(before, second.weight)
        return digest(first)

    everywhere(script)


def test_an_optimizer_that_has_the_rows_as_well_is_refused() -> None:
    def script(job: Job, me: ThreadWorker) -> None:
        ranker = Ranker(SGD(lr=0.1))
        optimizer = torch.optim.SGD(ranker.top.parameters(), lr=0.1)
        optimizer.add_param_group({"params": list(ranker.tables.parameters())})
        with pytest.raises(UserError, match=r"parameters of ranker.tables, whose rows the job"):
            job.protect(ranker=ranker, optimizer=optimizer)

    results(script, 1)


def test_rows_are_updated_by_whoever_has_come_to_own_them() -> None:
    """Shares may change before a state is loaded, and each change drops other owners' states."""

    def updated(*layouts: Layout) -> list[torch.Tensor]:
        table = Embedding(ROWS, DIM, name="items", seed=7, optimizer=Adagrad(lr=0.1, **FIRST))
        rows = table.row_optimizer
        sharding = ShardedOptimizers({"table": table, "rows": rows}, lambda: None)
        for layout in layouts:
            sharding.enter(layout, AloneTransport())
        table(torch.tensor([[1, 5], [5, 9]])).square().sum().backward()
        rows.step()
        return [table.weight.detach(), rows.state[table.weight]["sum"]]

    owned_by_another = Layout(1, 2, 2, ((0,), (1,)), ((), ()), (0, 1))
    alone = Layout(0, 1, 1, ((0, 1),), ((),), (0,))
    for before, after in zip(updated(alone), updated(owned_by_another, alone), strict=True):
        assert torch.equal(before, after)


# ---------------------------------------------------------------- processes

HOSTS = ("--virtual", "4", "--no-rebalance", "--speculation-budget", "0")
MEMORY = ("--redundancy", "replicate:1", "--protect-every", "4")
TURNS = "worker 0 step 5 kill\nworker 1 step 8 kill\n"  # one of these may be the spare
STEPS = 12
MANY = 150


def recommender(path: Path, workers: int, *options: str, steps: int = STEPS) -> LocalRun:
    script = [str(EXAMPLES / "recommender.py"), *ARGS["recommender.py"], "--steps", f"{steps}"]
    return LocalRun(path, ["--nproc", str(workers), *HOSTS, *options], script)


def score(run: LocalRun) -> list[str]:
    """Return the last line of a job that ends well: how good the model is, and a digest."""
    finish(run)
    assert run.out[-2].startswith("AUC ")
    return run.out[-2:]


@pytest.mark.parametrize(
    ("options", "deaths", "lost", "recalled"),
    [
        pytest.param(
            ("--shard-optimizer", *MEMORY),
            "worker 1 step 6 kill\n",
            (1,),
            1,
            marks=pytest.mark.slow,
        ),
        pytest.param(("--spares", "1", "--hot-spares"), TURNS, (1, 2), 0, marks=pytest.mark.slow),
    ],
    ids=["shares", "hot_spare"],
)
def test_rows_go_on_with_what_their_optimizer_kept(
    options: tuple[str, ...], deaths: str, lost: tuple[int, ...], recalled: int, tmp_path: Path
) -> None:
    """Score, model and rows are those of the undisturbed run, whichever worker is lost."""
    (tmp_path / "faults").write_text(deaths)
    with recommender(tmp_path / "1", 1) as run:
        expected = score(run)
    with recommender(tmp_path / "2", 2, *options, "--faults", str(tmp_path / "faults")) as run:
        assert score(run) == expected
    assert len(run.events("lost")) in lost
    assert len(recalls(run)) == recalled
    assert computed_twice(run) == []


@pytest.mark.slow
@pytest.mark.parametrize("shares", [True, False])
def test_rows_go_on_with_what_the_memory_of_their_node_has(shares: bool, tmp_path: Path) -> None:
    options = (*MEMORY, "--shard-optimizer") if shares else MEMORY
    with recommender(tmp_path / "1", 1, steps=MANY) as run:
        expected = score(run)
    with recommender(tmp_path / "2", 2, *options, steps=MANY) as run:
        run.until_members(2)
        until_step(run, 6)
        kill_workers(run)
        assert score(run) == expected
    assert len(recalls(run)) == 1
    assert computed_twice(run) == []
