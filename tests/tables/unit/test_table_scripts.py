"""What scripts do with tables besides looking rows up: the same bits on servers, or a sentence."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from test_row_servers import Servers, close_servers
from torch import nn
from torch.optim.swa_utils import AveragedModel

from holdfast.engine.core.errors import UserError
from holdfast.engine.train.job import Job
from holdfast.engine.train.script.row_updates import RowUpdates
from holdfast.engine.train.script.service_link import HostedService
from holdfast.engine.train.state.share import StateShare
from holdfast.tables import (
    Adagrad,
    Embedding,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyRules,
    service,
)
from loop_kit import everywhere, net, results
from thread_cluster import ThreadWorker

__all__ = ["close_servers"]  # a fixture

ROWS, DIM = 40, 3
IDS = torch.tensor([3, 8, 8, 17, 39])
PRETRAINED = torch.linspace(-1, 1, ROWS * DIM).view(ROWS, DIM)


class Trained:
    """Trains a table and a layer in steps of one task, without a job around it.

    `servers`: has the rows; None: they are in this process.
    """

    def __init__(self, servers: Servers | None, staleness: int = 0) -> None:
        self.table = Embedding(ROWS, DIM, name="items", seed=7, optimizer=Adagrad(lr=0.1))
        torch.manual_seed(3)
        self.top = nn.Linear(DIM, 1)
        self.optimizer = torch.optim.SGD(self.top.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        self.updates, self.service = RowUpdates(), HostedService()
        self._access = servers.access(staleness) if servers is not None else None

    def begin(self, *, scaled: bool = False) -> None:
        """Protect everything, and reach the servers, as the job's first loop does."""
        protected = {"table": self.table, "top": self.top, "optimizer": self.optimizer}
        protected |= {"scaler": self.scaler} if scaled else {}
        found: dict[str, torch.optim.Optimizer] = {}
        for name, value in protected.items():
            found |= self.updates.find(name, value)
        for name, value in protected.items():
            self.updates.check(name, value)
        if self._access is not None:
            self.service.use(service.connect(self._access.link, found))

    def backward(self, factor: float = 1.0, *, scaled: bool = False) -> None:
        """Compute a step's gradients, and commit them."""
        self.optimizer.zero_grad()
        self.service.write()
        loss = factor * self.top(self.table(IDS)).square().mean()
        (self.scaler.scale(loss) if scaled else loss).backward()
        self.updates.hold()

    def step(self) -> None:
        """Call the optimizer as a script does whose optimizers are watched."""
        self.updates.note_step(self.optimizer)
        self.optimizer.step()

    def end(self) -> torch.Tensor:
        """End the last step, and return all rows."""
        self.updates.settle(0)
        self.service.write()
        return self.table.read_rows()


@pytest.fixture(params=[False, True], ids=["here", "on servers"])
def servers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Servers | None:
    if not request.param:
        return None
    monkeypatch.setattr("holdfast.tables.embeddings.count_servers", lambda service: 2)
    return Servers(2)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Servers:
    monkeypatch.setattr("holdfast.tables.embeddings.count_servers", lambda service: 2)
    return Servers(2)


# ---------------------------------------------------------------- clipping and scaling


def test_clipped_gradients_of_rows_are_those_of_a_dense_table(servers: Servers | None) -> None:
    """The norm is over rows and other parameters; the clipped gradient updates the rows."""
    mine = Trained(servers)
    mine.begin()
    dense = nn.Embedding(ROWS, DIM, _weight=mine.table.read_rows())
    top = copy.deepcopy(mine.top)
    adagrad = torch.optim.Adagrad(dense.parameters(), lr=0.1)
    sgd = torch.optim.SGD(top.parameters(), lr=0.1)
    for _ in range(3):
        mine.backward(50.0)
        norm = nn.utils.clip_grad_norm_([*mine.table.parameters(), *mine.top.parameters()], 0.3)
        mine.step()
        for each in adagrad, sgd:
            each.zero_grad()
        (50.0 * top(dense(IDS)).square().mean()).backward()
        expected = nn.utils.clip_grad_norm_([*dense.parameters(), *top.parameters()], 0.3)
        for each in adagrad, sgd:
            each.step()
        assert float(norm) == pytest.approx(float(expected))
    assert torch.allclose(mine.end(), dense.weight.detach(), atol=1e-6)


def test_a_scaler_reaches_rows_as_it_does_other_parameters(servers: Servers | None) -> None:
    plain, scaled = (Trained(servers) for _ in range(2))
    plain.begin()
    for _ in range(4):
        plain.backward()
        plain.step()
    expected = plain.end()
    again = Trained(Servers(2)) if servers is not None else scaled
    again.begin(scaled=True)
    for _ in range(4):
        again.backward(scaled=True)
        again.scaler.unscale_(again.optimizer)
        assert again.table.weight.grad.values().abs().max() < 10
        again.updates.note_step(again.optimizer)
        again.scaler.step(again.optimizer)
        again.scaler.update()
    assert again.scaler.get_scale() == 4096.0  # it has grown: no step was left out
    assert torch.equal(again.end(), expected)


@pytest.mark.parametrize("where", ["rows", "layer"])
def test_a_step_that_the_scaler_leaves_out_updates_no_row(
    where: str, servers: Servers | None
) -> None:
    mine = Trained(servers)
    mine.begin(scaled=True)
    before = mine.table.read_rows()
    mine.backward(float("inf") if where == "rows" else 1.0, scaled=True)
    if where == "layer":
        mine.top.weight.grad[0, 0] = float("inf")
        mine.optimizer.found_inf = torch.tensor(1.0)  # the same way as for a fused optimizer
    mine.updates.note_step(mine.optimizer)
    mine.scaler.step(mine.optimizer)
    mine.scaler.update()
    assert mine.scaler.get_scale() == 512.0
    assert torch.equal(mine.end(), before)


def test_a_step_without_an_optimizers_call_updates_no_row_and_is_told_once(
    servers: Servers | None,
) -> None:
    mine = Trained(servers)
    mine.begin()
    before = mine.table.read_rows()
    mine.backward()
    assert "no optimizer in step 4" in mine.updates.settle(4)
    mine.backward()
    assert mine.updates.settle(5) == ""
    assert torch.equal(mine.table.read_rows(), before)


def test_a_backward_pass_without_the_protected_scaler_is_refused() -> None:
    mine = Trained(None)
    mine.begin()
    with pytest.raises(UserError, match="GradScaler that is not protected"):
        mine.updates.check_scaler(mine.scaler)
    mine.begin(scaled=True)
    mine.updates.check_scaler(mine.scaler)
    with pytest.raises(UserError, match=r"call step.backward\(loss, scaler\) with the loss as it"):
        mine.updates.check_scaler(None)


# ---------------------------------------------------------------- rows from elsewhere


def load_tensor(mine: Trained, _: Path) -> None:
    mine.table.write_rows(PRETRAINED)


def load_parts(mine: Trained, _: Path) -> None:
    mine.table.write_rows(PRETRAINED.double()[20:], torch.arange(20, ROWS))
    mine.table.write_rows(PRETRAINED[:20].half().float(), torch.arange(20, dtype=torch.int32))
    mine.table.write_rows(PRETRAINED[:20], torch.arange(20))


def load_dictionary(mine: Trained, _: Path) -> None:
    nn.ModuleDict({"e": mine.table}).load_state_dict({"e.weight": PRETRAINED})


def load_file(mine: Trained, path: Path) -> None:
    torch.save({"weight": PRETRAINED}, path / "rows.pt")
    mine.table.load_state_dict(torch.load(path / "rows.pt", weights_only=True, mmap=True))


@pytest.mark.parametrize("load", [load_tensor, load_parts, load_dictionary, load_file])
def test_training_begins_with_pretrained_rows(
    load: Any, servers: Servers | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.tables.served_tables.WRITTEN_AT_ONCE", 4 * DIM)  # 10 updates
    mine = Trained(servers)
    load(mine, tmp_path)
    mine.begin()
    mine.backward()
    read = mine.table.read_rows()
    assert torch.equal(read, PRETRAINED)
    mine.step()
    updated = mine.end()
    other = torch.ones(ROWS, dtype=torch.bool)
    other[IDS] = False
    assert torch.equal(updated[other], PRETRAINED[other])
    assert not torch.equal(updated[IDS], PRETRAINED[IDS])


def test_rows_are_written_between_steps_and_keep_what_their_optimizer_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def trained(servers: Servers | None) -> torch.Tensor:
        mine = Trained(servers)
        mine.begin()
        for _ in range(4):
            mine.backward()
            mine.step()
            mine.table.write_rows(mine.table.read_rows().clamp(-0.05, 0.05))
        return mine.end()

    here = trained(None)
    monkeypatch.setattr("holdfast.tables.embeddings.count_servers", lambda service: 2)
    assert torch.equal(trained(Servers(2)), here)


def test_a_stale_read_has_the_rows_that_were_written(served: Servers) -> None:
    mine = Trained(served, staleness=3)
    mine.table.write_rows(PRETRAINED)
    mine.begin()
    mine.backward()
    assert torch.equal(mine.table(torch.arange(ROWS)), PRETRAINED)
    mine.step()
    assert torch.equal(mine.table(torch.arange(ROWS)), PRETRAINED)
    assert not torch.equal(mine.table.read_rows(), PRETRAINED)


def test_rows_that_were_written_before_a_state_came_do_not_count(served: Servers) -> None:
    """A worker that joins runs the script from its first line, and then takes the job's state."""
    first = Trained(served)
    first.table.write_rows(PRETRAINED)
    first.begin()
    first.backward()
    first.step()
    first.updates.settle(0)
    state = first.table.row_optimizer.state_dict()
    joiner = Trained(served)
    joiner.table.write_rows(PRETRAINED)
    joiner.begin()
    joiner.table.row_optimizer.load_state_dict(state)
    joiner.service.write()
    assert torch.equal(joiner.table.read_rows(), first.table.read_rows())
    assert joiner.table.row_optimizer.state_dict() == state


def test_a_state_shows_which_rows_were_written(served: Servers) -> None:
    states = []
    for rows in PRETRAINED, PRETRAINED, PRETRAINED.flip(0):
        mine = Trained(Servers(2))
        mine.table.write_rows(rows)
        mine.begin()
        mine.service.write()
        states.append(mine.table.row_optimizer.state_dict()["param_groups"])
    assert states[0] == states[1]
    assert states[0] != states[2]


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda e: e.write_rows(PRETRAINED[1:]), r"rows of shape \[39, 3\] for 40 ids: give"),
        (lambda e: e.write_rows(PRETRAINED[:1], torch.tensor([40])), "id 40 is beyond"),
        (lambda e: e.write_rows(PRETRAINED[:2], torch.tensor([1, 1])), "give each id once"),
        (lambda e: e.write_rows(PRETRAINED[:1], torch.tensor([1.0])), "are no whole numbers"),
        (lambda e: setattr(e, "weight", nn.Parameter(PRETRAINED)), "to write_rows"),
        (lambda e: e.from_pretrained(PRETRAINED), r"then give it the rows: table.write_rows\(rows"),
        (lambda e: e.double(), "rows are float32 and cannot become torch.float64"),
        (lambda e: nn.Sequential(e).half(), "rows are float32 and cannot become torch.float16"),
        (lambda e: e.to(torch.bfloat16), "rows are float32 and cannot become torch.bfloat16"),
    ],
)
def test_rows_that_do_not_fit_are_refused(write: Any, words: str, servers: Servers | None) -> None:
    with pytest.raises(UserError, match=words):
        write(Embedding(ROWS, DIM, name="items"))


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("keys", [None, KeyRules(capacity=64)])
@pytest.mark.parametrize(
    "use",
    [
        lambda e: e.weight.detach().norm(),
        lambda e: torch.ones(1, DIM) @ e.weight.T,
        lambda e: e.weight.square().mean(),
        lambda e: nn.init.normal_(e.weight),
        lambda e: e.weight.clamp_(-1, 1),
        lambda e: setattr(e.weight, "data", PRETRAINED),
        lambda e: e.weight.data.mul_(2),
        lambda e: nn.utils.parameters_to_vector(e.parameters()),
        lambda e: float(e.weight[0, 0]),
        lambda e: nn.functional.linear(torch.ones(1, DIM), e.weight),
        AveragedModel,
        lambda e: copy.deepcopy(nn.Sequential(e)),
    ],
)
@torch.no_grad()
def test_a_weight_without_rows_refuses_what_needs_them(use: Any, keys: KeyRules | None) -> None:
    with pytest.raises(UserError, match=r"the rows of table items .* read them with read_rows"):
        use(Embedding(ROWS if keys is None else None, DIM, name="items", keys=keys))


@pytest.mark.usefixtures("served")
def test_a_weight_without_rows_has_a_shape_a_device_and_a_gradient() -> None:
    table = nn.Sequential(Embedding(ROWS, DIM, name="items")).to("cpu").requires_grad_(False)
    (weight,) = table.parameters()
    assert (weight.numel(), list(weight.shape), weight.grad) == (ROWS * DIM, [ROWS, DIM], None)
    assert "read_rows" in repr(weight)
    assert not table.state_dict()
    with pytest.raises(RuntimeError, match=r"Missing key.*0.weight"):
        table.load_state_dict({})


def test_a_table_of_any_keys_takes_no_rows_from_outside(servers: Servers | None) -> None:
    table = Embedding(None, DIM, name="items", keys=KeyRules(capacity=64))
    with pytest.raises(UserError, match=r"takes no rows from outside.*give num_embeddings"):
        table.write_rows(PRETRAINED, torch.arange(ROWS))


# ---------------------------------------------------------------- names, keys, protection


def test_ids_of_any_whole_numbers_are_the_same(servers: Servers | None) -> None:
    mine = Trained(servers)
    mine.begin()
    expected = mine.table(IDS)
    for kind in torch.int32, torch.int16, torch.uint8:
        assert torch.equal(mine.table(IDS.to(kind)), expected)
    for kind in torch.float32, torch.bool:
        with pytest.raises(UserError, match=f"ids of type {kind} are no whole numbers"):
            mine.table(IDS.to(kind))


def test_two_trained_tables_of_one_name_are_refused() -> None:
    def table(name: str = "items") -> Embedding:
        return Embedding(ROWS, DIM, name=name)

    config = EmbeddingBagConfig(name="items", num_embeddings=ROWS, embedding_dim=DIM)
    for other in table(), EmbeddingBagCollection([config], Adagrad(lr=0.1)):
        updates = RowUpdates()
        updates.find("first", table())
        with pytest.raises(UserError, match=r"two tables have the name 'items', in first and othe"):
            updates.find("other", other)
    updates = RowUpdates()
    updates.find("first", table())
    updates.find("other", table("users"))
    updates.find("target", table().requires_grad_(False))
    updates.find("average", AveragedModel(table()))


def test_a_table_that_is_trained_but_not_protected_is_named() -> None:
    def script(job: Job, me: ThreadWorker) -> None:
        table, other = (Embedding(ROWS, DIM, name=name, seed=7) for name in ("a", "b"))
        job.protect(table=table)
        for step in job.steps(until=2):
            with torch.no_grad():
                other(IDS)
            for _ in step:
                step.backward((table(IDS) + other(IDS)).square().mean())

    with pytest.raises(AssertionError, match=r"table b is looked up .* but is not protected"):
        results(script, 1)


@pytest.mark.slow
def test_a_clipped_table_is_the_same_on_any_workers() -> None:
    def script(job: Job, me: ThreadWorker) -> str:
        table, top = Embedding(ROWS, DIM, name="items", seed=7), net(DIM)
        keyed = Embedding(None, DIM, name="keys", seed=7, keys=KeyRules(capacity=64))
        average = AveragedModel(table)
        optimizer = torch.optim.SGD(top.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        job.protect(
            table=table, keyed=keyed, top=top, optimizer=optimizer, scaler=scaler, average=average
        )
        for step in job.steps(until=6):
            for task in step:
                ids = (IDS + task.vrank) % ROWS
                loss = 30 * top(table(ids) + keyed(ids * 0x5DEECE66D)).square().mean()
                step.backward(loss, scaler)
            scaler.unscale_(optimizer)
            every = [*table.parameters(), *keyed.parameters(), *top.parameters()]
            assert nn.utils.clip_grad_norm_(every, 0.1) > 0.1
            scaler.step(optimizer)
            scaler.update()
            average.update_parameters(table)
        rows = [table.read_rows(), keyed.read_rows(), average.module.weight, *top.parameters()]
        return repr([each.tolist() for each in rows])

    everywhere(script)


def test_state_of_served_tables_is_copied_without_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("holdfast.tables.embeddings.count_servers", lambda service: 2)
    table, top = Embedding(ROWS, DIM, name="items"), nn.Linear(DIM, 1)
    share = StateShare({"table": table, "top": top})
    share.begin()
    assert all(share.is_steady(parameter) for parameter in top.parameters())
