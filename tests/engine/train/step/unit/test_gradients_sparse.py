"""Sparse gradients: summed row by row in canonical order, on whichever workers compute them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from holdfast.engine.core import tree
from holdfast.engine.core.errors import UserError, WireError
from holdfast.engine.core.ground.events import Purpose
from holdfast.engine.train.checkpoint.state import flatten, metas, restore
from holdfast.engine.train.data.sampling import SamplePlan
from holdfast.engine.train.exchange.layout import Layout
from holdfast.engine.train.job import Job
from holdfast.engine.train.state.step_image import MissedSteps
from holdfast.engine.train.step.driver import Monitor
from holdfast.engine.train.step.gradients import Gradients
from holdfast.engine.train.step.row_sums import RowsSum
from holdfast.engine.train.step.row_table import Rows
from holdfast.engine.train.step.step_data import FinishedTask, SpeculativeTasks, StepData
from holdfast.engine.train.step.step_table import Buffers, StepTable
from holdfast.lab.contracts.memory_transport import MemoryNetwork
from holdfast.lab.contracts.transports import GroupMember, run_contract_in_threads
from loop_kit import Script, digest, everywhere, results
from step_data_kit import keep_missed, receive_missed, send_missed
from thread_cluster import MortalTransport, ThreadWorker

WORDS, WIDTH = 40, 5


class Words(nn.Module):
    """Two tables and a dense layer; tasks may leave one of the tables alone."""

    def __init__(self, *, sparse: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, sparse=sparse)
        self.bags = nn.EmbeddingBag(WORDS, WIDTH, mode="sum", sparse=sparse)
        self.out = nn.Linear(WIDTH, 1)
        generator = torch.Generator().manual_seed(3)
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = self.words(ids).sum(dim=1)
        return self.out(found + self.bags(ids) if ids[0, 0] % 2 else found)

    def tables(self) -> list[nn.Parameter]:
        return [self.words.weight, self.bags.weight]


def ids() -> TensorDataset:
    return TensorDataset(
        torch.randint(0, WORDS, (70, 4), generator=torch.Generator().manual_seed(5))
    )


def sparse(job: Job, me: ThreadWorker) -> Any:
    model = Words()
    for_rows = torch.optim.SparseAdam(model.tables(), lr=1e-2)
    for_rest = torch.optim.AdamW(model.out.parameters(), lr=1e-2)
    job.protect(model=model, rows=for_rows, rest=for_rest)
    seen: list[Any] = []
    for step in job.steps(job.batches(ids(), 2), until=5):
        for (batch,) in step:
            step.backward(model(batch).square().mean())
        grad = model.words.weight.grad
        assert grad is not None
        assert grad.is_sparse
        assert grad.is_coalesced()
        seen = [grad.indices().tolist(), grad.values().tolist(), step.loss]
        for_rows.step()
        for_rest.step()
    return digest(model), seen


def by_sgd(job: Job, me: ThreadWorker) -> Any:
    """Train with one optimizer for sparse and dense gradients, and losses with a weight."""
    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    job.protect(model=model, optimizer=optimizer)
    for step in job.steps(job.batches(ids(), 2), until=5):
        for (batch,) in step:
            step.backward(model(batch[:1]).sum(), weight=1, last=len(batch) == 1)
            if len(batch) > 1:
                step.backward(model(batch[1:]).sum(), weight=len(batch) - 1)
        optimizer.step()
    return digest(model)


def with_momentum(job: Job, me: ThreadWorker) -> Any:
    """The optimizer's state is sparse, too."""
    model = nn.Embedding(WORDS, WIDTH, sparse=True)
    nn.init.normal_(model.weight, generator=torch.Generator().manual_seed(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    job.protect(model=model, optimizer=optimizer)
    for step in job.steps(job.batches(ids(), 2), until=6):
        for (batch,) in step:
            step.backward(model(batch).square().mean())
        optimizer.step()
    assert optimizer.state[model.weight]["momentum_buffer"].is_sparse
    return digest(model)


def only_rows(job: Job, me: ThreadWorker) -> Any:
    """Train without other gradients to sum; a round names one of two modules."""
    first, second = nn.Embedding(WORDS, 1, sparse=True), nn.Embedding(WORDS, 1, sparse=True)
    for table in (first, second):
        nn.init.normal_(table.weight, generator=torch.Generator().manual_seed(3))
    optimizer = torch.optim.SGD([first.weight, second.weight], lr=1e-2)
    job.protect(first=first, second=second, optimizer=optimizer)
    for step in job.steps(job.batches(ids(), 2), until=4):
        for name, other in (("first", second), ("second", first)):
            for (batch,) in step.round(name):
                step.backward((first(batch) * second(batch)).sum())
            assert other.weight.grad is None
            optimizer.step()
    return digest(first, second)


@pytest.mark.parametrize("script", [by_sgd, only_rows])
def test_sparse_gradients_are_the_same_on_any_workers(script: Script) -> None:
    (expected,) = results(script, 1)
    assert results(script, 2) == [expected] * 2


def test_sparse_gradients_go_where_all_exchanges_keep_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL needs this order, because its messages have no tags."""
    (expected,) = results(by_sgd, 1)
    monkeypatch.setattr(MortalTransport, "ordered", True)
    assert results(by_sgd, 3) == [expected] * 3


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(sparse, marks=pytest.mark.slow),
        pytest.param(by_sgd, marks=pytest.mark.slow),
        pytest.param(only_rows, marks=pytest.mark.slow),
        pytest.param(with_momentum, marks=pytest.mark.slow),
    ],
)
def test_sparse_gradients_are_the_same_on_any_workers_and_through_deaths(script: Script) -> None:
    everywhere(script)


def test_sparse_gradients_are_those_of_plain_pytorch() -> None:
    model = Words()
    for_rows = torch.optim.SparseAdam(model.tables(), lr=1e-2)
    for_rest = torch.optim.AdamW(model.out.parameters(), lr=1e-2)
    plan = SamplePlan(length=70, batch_size=2, virtual_ranks=4, seed=0)
    for step in range(5):
        (batch,) = ids()[[int(i) for task in plan.step_tasks(step) for i in task]]
        sum(model(part).square().mean() / 4 for part in batch.split(2)).backward()
        grad = model.words.weight.grad.coalesce()
        for optimizer in (for_rows, for_rest):
            optimizer.step()
            optimizer.zero_grad()
    ((_, (places, values, _)),) = results(sparse, 1)
    assert places == grad.indices().tolist()
    assert torch.allclose(torch.tensor(values), grad.values(), rtol=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {"silent_errors.audit": 1.0},
        pytest.param({"silent_errors.fingerprint_steps": 1}, marks=pytest.mark.slow),
    ],
)
def test_audits_change_nothing(settings: dict[str, Any]) -> None:
    for script in (sparse, only_rows):
        (expected,) = results(script, 1)
        assert results(script, 3, settings=settings) == [expected] * 3


def test_a_wrong_sum_of_rows_is_found_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """One member adds wrongly once; its worker is named, and the result is right."""
    (expected,) = results(only_rows, 1)
    once: list[int] = []
    take_in = RowsSum._take_in

    def take_in_wrongly(self: RowsSum, arrived: Any) -> None:
        take_in(self, arrived)
        if self._layout.rank == 1 and self.made and not once and len(self.made[0][0].rows.places):
            once.append(1)
            self.made[0][0].rows.values.add_(1)

    monkeypatch.setattr(RowsSum, "_take_in", take_in_wrongly)
    assert results(only_rows, 3, settings={"silent_errors.audit": 1.0}) == [expected] * 3
    assert once == [1]


def test_with_backup_workers_replicas_stay_alike() -> None:
    found = results(by_sgd, 3, settings={"stragglers.backup": 1})
    assert found == [found[0]] * 3


def spoiled(job: Job, me: ThreadWorker, once: list[int]) -> Any:
    """A step is computed again, since its sum is not finite at first."""
    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    job.protect(model=model, optimizer=optimizer)
    for step in job.steps(job.batches(ids(), 2), until=4):
        for (batch,) in step:
            strikes = (me.worker, step.index) == (1, 2) and not once
            once.extend([1] * strikes)
            factor = torch.tensor(1.0)
            if strikes:  # a row of the table only
                handle = model.words.weight.register_hook(lambda grad: grad * float("nan"))
            step.backward(model(batch).square().mean() * factor)
            if strikes:
                handle.remove()
        optimizer.step()
    return digest(model)


@pytest.mark.slow
def test_rows_that_are_not_finite_have_the_step_computed_again() -> None:
    (expected,) = results(lambda job, me: spoiled(job, me, [1]), 1)
    once: list[int] = []
    assert results(lambda job, me: spoiled(job, me, once), 3) == [expected] * 3
    assert once == [1]


def test_a_state_may_have_sparse_tensors() -> None:
    places = torch.tensor([[3, 1, 3]])
    loose = torch.sparse_coo_tensor(places, torch.ones(3), (5,), check_invariants=True)
    for value in (loose, loose.coalesce()):
        skeleton, tensors = flatten({"buffer": value}, "state")
        assert [meta[0] for meta in metas(skeleton)] == ["int64", "float32"]
        found = restore(skeleton, tensors)["buffer"]
        assert found.is_coalesced() == value.is_coalesced()
        assert torch.equal(found._indices(), value._indices())
        assert torch.equal(found._values(), value._values())
    tensors[0][0, 0] = 7  # it is not within the tensor
    with pytest.raises(WireError):
        restore(skeleton, tensors)
    with pytest.raises(UserError, match=r"state\['buffer'\] is a Tensor, which cannot travel"):
        flatten({"buffer": torch.eye(2).to_mkldnn()}, "state")


# ---------------------------------------------------------------- parts


def rows(places: list[int], values: list[float]) -> Rows:
    return Rows(places=torch.tensor(places, dtype=torch.int64), values=torch.tensor(values))


def test_rows_add_up() -> None:
    left, right = rows([1, 4], [1.0, 2.0]), rows([0, 4], [8.0, 16.0])
    assert left.add(right).equals(rows([0, 1, 4], [8.0, 1.0, 18.0]))
    none = rows([], [])
    assert none.add(left).equals(left)
    assert left.add(none).equals(left)


def gradients_of(model: nn.Module, tables: list[list[torch.Tensor]], vranks: int = 4) -> Gradients:
    named = [(f"model.{name}", param) for name, param in model.named_parameters()]
    found = Gradients(named, vranks, Monitor(), by_row=tables)
    found.attach()
    return found


def compute(gradients: Gradients, model: nn.Embedding, vrank: int, purpose: Purpose) -> None:
    gradients.begin_task(vrank, purpose)
    dice = torch.Generator().manual_seed(vrank)
    batch = torch.randint(0, WORDS, (7,), generator=dice)
    with gradients.backward_pass():
        (model(batch) * torch.randn(7, WIDTH, generator=dice)).sum().backward()
    gradients.end_task()


def table() -> nn.Embedding:
    found = nn.Embedding(WORDS, WIDTH, sparse=True)
    nn.init.normal_(found.weight, generator=torch.Generator().manual_seed(3))
    return found


def train_two(gradients: Gradients, first: nn.Embedding, second: nn.Embedding) -> list[Any]:
    """Compute four tasks, two with both tables; return the gradients of both, as dense ones."""
    gradients.begin_step()
    for vrank in range(4):
        gradients.begin_task(vrank)
        dice = torch.Generator().manual_seed(vrank)
        batch = torch.randperm(WORDS, generator=dice)[:7]
        with gradients.backward_pass(last=vrank not in (1, 2)):
            first(batch).square().sum().backward()
        if vrank == 1:  # the gradient of all rows comes from here
            with gradients.backward_pass():
                second.weight.square().sum().backward()
        if vrank == 2:
            with gradients.backward_pass():
                (first(batch + 0) * second(batch)).sum().backward()
        gradients.end_task()
    for each in gradients.tables:
        each.result = each.partials[0, 4]
    gradients.publish(gradients.used, scale=0.25)
    grads = [first.weight.grad, second.weight.grad]
    return [None if grad is None else grad.to_dense() for grad in grads]


def test_parameters_that_are_summed_as_one_table_have_their_own_gradients() -> None:
    found = []
    for is_one in (False, True):
        first, second = table(), table()
        weights = [first.weight, second.weight]
        by_row = [weights] if is_one else [[weight] for weight in weights]
        gradients = gradients_of(nn.ModuleList([first, second]), by_row)
        assert len(gradients.tables) == len(by_row)
        found.append(train_two(gradients, first, second))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_second_pass_is_noticed_although_another_parameter_of_the_table_had_none() -> None:
    first, second = table(), table()
    gradients = gradients_of(nn.ModuleList([first, second]), [[first.weight, second.weight]])
    gradients.begin_task(0)
    with gradients.backward_pass():
        first(torch.tensor([3, 1])).sum().backward()
    with pytest.raises(UserError, match="got a gradient twice"), gradients.backward_pass():
        first(torch.tensor([3])).sum().backward()
    gradients.end_task()
    gradients.tables[0].result = gradients.tables[0].partials[0, 1]
    gradients.publish(gradients.used)
    assert second.weight.grad is None, "no task has used it"


def test_a_copy_of_a_task_is_used_as_the_task_itself_or_compared_with_it() -> None:
    model = table()
    gradients = gradients_of(model, [[model.weight]])
    speculative = SpeculativeTasks(gradients, StepTable(4, 1), Buffers([]))
    for vrank in (0, 1):
        compute(gradients, model, vrank, Purpose.HOSTED)
    for vrank in (2, 3):
        compute(gradients, model, vrank, Purpose.SPECULATIVE)
        speculative.keep(vrank, FinishedTask(loss=0.0, count=1, digest=0))
    hosts = ((0, 1, 2), (3,))
    nodes = tuple(tree.maximal_nodes(each, 4) for each in hosts)
    rows_of_two = gradients.copy_of(2)[gradients.tables[0].index]
    speculative.adopt(2, (0, 1))
    model = table()
    other = gradients_of(model, [[model.weight]])
    compute(other, model, 3, Purpose.HOSTED)
    found: dict[int, Any] = {}

    def member(me: GroupMember) -> None:
        mine = [gradients, other][me.rank]
        layout = Layout(me.rank, 2, 4, hosts, nodes, ())
        summing = RowsSum.of(mine.active_tables, layout, counts=True)
        transport = me.open("sum")
        summing.begin(transport)
        while summing.advance(transport):
            pass
        summing.finish()
        found[me.rank] = mine.tables[0].result
        if me.rank == 0:
            found["alike"] = speculative.contradicted_vranks([summing], {}, [0] * 4)
            gradients.copy_of(3)[gradients.tables[0].index] = rows_of_two
            found["unlike"] = speculative.contradicted_vranks([summing], {}, [0] * 4)
        me.meet("done")

    assert run_contract_in_threads(member, MemoryNetwork().transport, 2) == []
    assert found[0].equals(found[1])
    assert (found["alike"], found["unlike"]) == ((), (3,))
    model = table()
    alone = gradients_of(model, [[model.weight]])
    for vrank in range(4):
        compute(alone, model, vrank, Purpose.HOSTED)
    assert alone.tables[0].partials[0, 4].equals(found[0])


def test_a_late_worker_receives_rows_too() -> None:
    kept: list[Rows] = []

    def data() -> StepData:
        model = nn.Sequential(table(), table())
        gradients = gradients_of(model, [[each] for each in model.parameters()])
        rest: Any = None
        return StepData(gradients, StepTable(4, 2), Buffers([]), rest, rest)

    def member(me: GroupMember) -> None:
        step = data()
        missed = MissedSteps(step)
        transport = me.open("missed")
        if me.rank < 2:
            step.gradients.tables[0].result = rows([], []).add(rows([3, 7], [[1.0] * 5, [2.0] * 5]))
            keep_missed(missed, 5, me.rank, 2)
            step.gradients.tables[0].result.values.zero_()  # the script may do so
            send_missed(missed, transport, range(5, 6), me.rank, 2)
        else:
            receive_missed(missed, transport, 2)
            kept.extend(each.result for each in step.gradients.tables)
        me.meet("done")

    assert run_contract_in_threads(member, MemoryNetwork().transport, 3) == []
    assert kept[0].equals(rows([3, 7], [[1.0] * 5, [2.0] * 5]))
    assert not len(kept[1].places)


# ---------------------------------------------------------------- refused, or dense after all


def tied(job: Job, me: ThreadWorker) -> Any:
    """Use a table densely as well, which makes the gradient dense, as in PyTorch."""
    embedding = nn.Embedding(WORDS, WIDTH, sparse=True)
    nn.init.normal_(embedding.weight, generator=torch.Generator().manual_seed(3))
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1e-2)
    job.protect(model=embedding, optimizer=optimizer)
    for step in job.steps(job.batches(ids(), 2), until=3):
        for (batch,) in step:
            logits = embedding(batch) @ embedding.weight.T if batch[0, 0] % 2 else embedding(batch)
            step.backward(logits.logsumexp(dim=-1).mean())
        optimizer.step()
    assert embedding.weight.grad.layout == torch.strided
    return digest(embedding)


def test_a_table_may_get_a_dense_gradient() -> None:
    (expected,) = results(tied, 1)
    assert results(tied, 2) == [expected] * 2


@pytest.mark.slow
def test_a_table_may_get_a_dense_gradient_through_deaths() -> None:
    everywhere(tied)


def refused(make: Callable[[], nn.Module], use: Callable[[nn.Module, torch.Tensor], Any]) -> str:
    def script(job: Job, me: ThreadWorker) -> str:
        model = make()
        job.protect(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
        try:
            for step in job.steps(job.batches(ids(), 2), until=1):
                for (batch,) in step:
                    step.backward(use(model, batch).sum())
        except UserError as error:
            job._loops.step = None
            return str(error)
        return ""

    return results(script, 1)[0]


def test_a_sparse_gradient_outside_of_tables_is_refused() -> None:
    text = refused(
        lambda: nn.Linear(WIDTH, WORDS),
        lambda m, batch: nn.functional.embedding(batch, m.weight, sparse=True),
    )
    assert "model.weight has a sparse gradient, which only the weight of an nn.Embedding" in text
    text = refused(lambda: nn.Embedding(WORDS, 2, max_norm=1.0), lambda m, batch: m(batch))
    assert "model has max_norm=1.0, with which a forward pass changes the parameter" in text
