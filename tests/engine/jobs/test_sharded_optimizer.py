"""--shard-optimizer: each worker keeps its share of the optimizer's state, and any may be lost."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from test_memory_tier import (
    LATER,
    end,
    job,
    kill_workers,
    recalls,
    refused,
    until_step,
)
from torch import nn

from conftest import RUN_S, SCRIPTS, computed_twice, finish
from holdfast.engine.core.errors import Damaged, UserError
from holdfast.engine.runtime.local_run import LocalRun
from holdfast.engine.state.store.checkpoints import Checkpoints
from holdfast.engine.state.store.open import open_storage
from holdfast.engine.train.checkpoint import state
from holdfast.engine.train.checkpoint.formats import read_tensors
from holdfast.engine.train.checkpoint.loaded_state import LoadedState
from holdfast.engine.train.checkpoint.sharded_optimizers import (
    GatheredState,
    ShardedOptimizers,
    share_out,
)
from holdfast.engine.train.checkpoint.state import Extent
from holdfast.engine.train.exchange.layout import TAG_UPDATE, Layout
from holdfast.engine.train.exchange.seam import AloneTransport
from holdfast.engine.train.exchange.tensor_bytes import as_bytes
from holdfast.engine.train.state.share import share_selector
from mailboxes import mailboxes, together

Reference = Callable[[int], str]
SHORT = 12


def short(path: Path, workers: int, *words: str, options: tuple[str, ...] = ()) -> LocalRun:
    flags = ["--nproc", str(workers), "--virtual", "4", "--shard-optimizer"]
    flags += ["--protect-every", "4", *(options or ("--redundancy", "replicate:1"))]
    script = [str(SCRIPTS / "trainer.py"), "--steps", str(SHORT), "--gather", *words]
    return LocalRun(path, flags, script)


@pytest.mark.parametrize(
    ("workers", "fault"),
    [
        pytest.param(1, "", marks=pytest.mark.slow),
        pytest.param(3, "", marks=pytest.mark.slow),
        pytest.param(2, "SIGKILL:stepped:6:0", marks=pytest.mark.slow),  # the leader
        pytest.param(
            3, "SIGKILL:update:6:1", marks=pytest.mark.slow
        ),  # before it has sent the parameters it has updated
        pytest.param(3, "SIGKILL:update:11:2", marks=pytest.mark.slow),  # the last step
        pytest.param(4, "", marks=pytest.mark.slow),
        pytest.param(2, "SIGKILL:backward:6:1", marks=pytest.mark.slow),
        pytest.param(3, "SIGKILL:voted:6:0,1", marks=pytest.mark.slow),
        pytest.param(3, "SIGKILL:update:11:0", marks=pytest.mark.slow),
        pytest.param(3, "SIGKILL:updated:11:0", marks=pytest.mark.slow),
        pytest.param(3, "SIGKILL:updated:6:0,1,2", marks=pytest.mark.slow),
        pytest.param(2, "SIGSTOP:optimizer:6:1", marks=pytest.mark.slow),
    ],
)
def test_the_result_is_that_of_workers_that_hold_all(
    workers: int, fault: str, tmp_path: Path, reference: Reference
) -> None:
    """Model and optimizer are equal to the bit, and no worker's loss undoes a committed step."""
    with short(tmp_path / "run", workers, *(("--fault", fault) if fault else ())) as run:
        assert finish(run) == reference(SHORT)
    assert len(recalls(run)) == (1 if fault else 0)
    assert computed_twice(run) == []


@pytest.mark.slow
def test_nodes_are_lost_join_and_leave(tmp_path: Path, reference: Reference) -> None:
    with job(tmp_path, "rs:2+1", 3, "--shard-optimizer", steps=300) as (run, others):
        until_step(run, LATER)
        kill_workers(run)
        others.kill("node1")
        run.until(lambda: len(recalls(run)) >= 1, RUN_S, "a recall")
        others.add("later")
        run.until_members(3)
        until_step(run, 2 * LATER)
        others.kill("node2")
        assert reference(300) in end(run, others)
    assert computed_twice(run) == []


@pytest.mark.slow
def test_a_node_is_drained(tmp_path: Path, reference: Reference) -> None:
    with job(tmp_path, "rs:2+1", 4, "--shard-optimizer", steps=300) as (run, others):
        until_step(run, LATER)
        (tmp_path / "go").touch()
        done = holdfast_drain(run, "node2")
        assert done.returncode == 0, done.stderr
        assert reference(300) in end(run, others)
    assert computed_twice(run) == []


@pytest.mark.slow
def test_a_node_is_drained_where_only_the_store_keeps_the_state(
    tmp_path: Path, reference: Reference
) -> None:
    options = ("--shard-optimizer", "--store", str(tmp_path / "store"), "--save-every", "1000")
    with job(tmp_path, "none", 3, *options, steps=300) as (run, others):
        until_step(run, LATER)
        (tmp_path / "go").touch()
        done = holdfast_drain(run, "node2")
        assert done.returncode == 0, done.stderr
        assert reference(300) in end(run, others)
    assert len(run.events("view")) >= 2
    assert computed_twice(run) == []


def holdfast_drain(run: LocalRun, name: str) -> subprocess.CompletedProcess[str]:
    words = [
        sys.executable,
        "-m",
        "holdfast.cli.main",
        "drain",
        name,
        "--run",
        str(run.run_dir.path),
    ]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=RUN_S)


@pytest.mark.slow
def test_without_redundancy_the_job_goes_back_to_a_checkpoint(
    tmp_path: Path, reference: Reference
) -> None:
    """The checkpoint is equal to the checkpoint of a job whose workers keep all of the state."""
    store = ("--store", str(tmp_path / "store"), "--save-every", "3")
    saved = tmp_path / "saved"
    words = ("--hold", "8", str(saved), "--fault", "SIGKILL:backward:10:1")
    with short(tmp_path / "run", 3, *words, options=store) as run:
        run.until(lambda: bool(run.events("save")), RUN_S, "a checkpoint")
        saved.touch()
        assert finish(run) == reference(SHORT)
    assert "from the checkpoint of step" in run.events("view")[-1]["text"]
    newest = Checkpoints(open_storage(str(tmp_path / "store"), print), print).steps()[-1]
    whole = tmp_path / "whole"
    script = [str(SCRIPTS / "trainer.py"), "--steps", str(SHORT)]
    flags = ["--nproc", "1", "--virtual", "4", "--store", str(whole), "--save-every", str(newest)]
    with LocalRun(tmp_path / "other", flags, script) as run:
        finish(run)
    assert exported(tmp_path / "store", newest) == exported(whole, newest)


def exported(store: Path, step: int) -> dict[str, bytes]:
    """Return the bytes of each tensor of a checkpoint, joined from the parts of all workers."""
    checkpoints = Checkpoints(open_storage(str(store), print), print)
    tensors = read_tensors(checkpoints, step)
    return {name: as_bytes(each).numpy().tobytes() for name, each in tensors.items()}


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), ["--shard-optimizer", "needs --redundancy, or at least --store"]),
        (
            ("--redundancy", "replicate:1", "--procs-per-worker", "2"),
            ["--shard-optimizer", "--procs-per-worker 2", "exclude each other"],
        ),
        (
            ("--redundancy", "replicate:1", "--spares", "1", "--hot-spares"),
            ["--shard-optimizer", "--hot-spares", "exclude each other"],
        ),
        (
            ("--redundancy", "replicate:1", "--nproc", "2", "--backup", "1"),
            ["--shard-optimizer", "--backup 1", "exclude each other"],
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(options: tuple[str, ...], words: list[str]) -> None:
    said = refused("--shard-optimizer", *options)
    assert all(word in said for word in words), said


# ---------------------------------------------------------------- shares


class Ended(Exception):
    """Is raised where a member would wait for its end."""


def wait_for_end() -> None:
    raise Ended


class Member:
    """Is one member of a view: a model, an optimizer, and a share of the optimizer's state."""

    def __init__(self, rank: int, boxes: Sequence[Any]) -> None:
        torch.manual_seed(5)
        parts = [nn.Linear(40, 9), nn.BatchNorm1d(9), nn.Linear(9, 4).to(torch.float64)]
        self.model = nn.ModuleList(parts)
        self.model[0].weight.data = self.model[0].weight.data.t().clone().t()  # with gaps
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.protected = {"model": self.model, "optimizer": self.optimizer}
        self.sharding = ShardedOptimizers(self.protected, wait_for_end)
        size = len(boxes)
        layout = Layout(rank, size, size, tuple((r,) for r in range(size)), ((),) * size, (0,))
        self.sharding.enter(layout, boxes[rank])

    def step(self, number: int) -> None:
        source = torch.Generator().manual_seed(number)  # the other members draw at the same time
        for index, p in enumerate(self.model.parameters()):
            unused = index == 1 and number == 0
            p.grad = None if unused else torch.rand(p.shape, generator=source).to(p.dtype)
        before = [p.grad for p in self.model.parameters()]
        self.sharding.hide_others(self.optimizer, closure=False)
        self.optimizer.step()
        self.sharding.exchange_parameters()
        assert all(p.grad is g for p, g in zip(self.model.parameters(), before, strict=True))

    @property
    def held(self) -> set[int]:
        return set(self.optimizer.state_dict()["state"])


def members_of(size: int) -> list[Member]:
    return [Member(rank, boxes) for boxes in [mailboxes(size)] for rank in range(size)]


def all_do(members: Sequence[Member], what: Callable[[Member], object]) -> list[BaseException]:
    return together(*(lambda member=member: what(member) for member in members))


def everything(_: bytes, tensors: Sequence[torch.Tensor], __: int) -> list[Extent]:
    return [Extent(index, 0, tensor.nbytes) for index, tensor in enumerate(tensors)]


def trained(size: int, steps: int = 3) -> list[Member]:
    members = members_of(size)
    for number in range(steps):
        assert all_do(members, lambda member, number=number: member.step(number)) == []
    return members


def test_the_largest_share_goes_to_the_rank_with_the_least() -> None:
    loads = [0, 0, 5]
    assert share_out([3, 10, 4, 1], loads) == [1, 0, 1, 2]
    assert loads == [10, 7, 6]
    assert share_out([], loads) == []


@pytest.mark.parametrize("size", [2, 3, 5])
def test_each_updates_its_share_and_all_have_all(size: int) -> None:
    (alone,), members = trained(1), trained(size)
    assert set().union(*(member.held for member in members)) == alone.held
    assert sum(len(member.held) for member in members) == len(alone.held)
    assert all(member.held for member in members)
    for member in members:
        for one, other in zip(alone.model.parameters(), member.model.parameters(), strict=True):
            assert torch.equal(one, other)
        for place in member.held:
            kept = member.optimizer.state_dict()["state"][place]["exp_avg"]
            assert torch.equal(kept, alone.optimizer.state_dict()["state"][place]["exp_avg"])


def test_the_whole_state_equals_that_of_a_worker_with_all() -> None:
    (alone,), members = trained(1), trained(3)
    whole = GatheredState(alone.sharding).capture(everything)
    found: dict[int, Any] = {}

    def capture(member: Member) -> None:
        captured = GatheredState(member.sharding).capture(everything)
        found[members.index(member)] = captured

    assert all_do(members, capture) == []
    for skeleton, named in found.values():
        assert skeleton == whole[0]
        assert [each.path for each in named] == [each.path for each in whole[1]]
        for one, other in zip(named, whole[1], strict=True):
            assert torch.equal(one.tensor, other.tensor), one.path


def test_only_the_selected_shares_are_received() -> None:
    members, received = trained(3), []

    def capture(member: Member) -> None:
        GatheredState(member.sharding).capture(share_selector(3))

    for member in members:
        box = member.sharding.transport
        exchange = box.exchange

        def counted(sends: Any, receives: Any, tag: int, exchange: Any = exchange) -> Any:
            received.extend(tensor.nbytes for _, tensor in receives if tag == TAG_UPDATE)
            return exchange(sends, receives, tag)

        box.exchange = counted
    assert all_do(members, capture) == []
    total = sum(t.nbytes for t in state.capture(trained(1)[0].protected)[1])
    assert 0 < sum(received) < total  # together, with digests


def capture_all(members: Sequence[Member]) -> list[BaseException]:
    return all_do(members, lambda member: GatheredState(member.sharding).capture(everything))


def test_a_state_that_arrives_damaged_is_not_used() -> None:
    """The news of the state arrives damaged: no member uses it, and none waits for another."""
    members = trained(2)
    members[0].sharding.transport.damage = True
    errors = capture_all(members)
    assert [type(error) for error in errors] == [Damaged, Damaged], errors
    assert capture_all(members) == []


def test_a_tensor_that_arrives_damaged_is_not_used() -> None:
    members = trained(2)
    box = members[0].sharding.transport
    exchange = box.exchange

    def damaging(sends: Any, receives: Any, tag: int) -> Any:
        box.damage = tag == TAG_UPDATE
        return exchange(sends, receives, tag)

    box.exchange = damaging
    (error,) = capture_all(members)
    assert isinstance(error, Damaged)


def test_a_loaded_state_leaves_out_what_others_own() -> None:
    (alone,), members = trained(1), trained(3)
    for member in members:
        held = member.held
        LoadedState(member.protected, member.sharding).load(*state.capture(alone.protected))
        assert member.held == held
        common = LoadedState(member.protected, member.sharding).capture()
        LoadedState(member.protected, member.sharding).load(*common)
        assert member.held == held  # the other members do not know of it, so it stays


def test_a_new_view_shares_out_again() -> None:
    member = trained(1)[0]
    assert len(member.held) == 6
    boxes = mailboxes(2)
    member.sharding.enter(Layout(1, 2, 2, ((0,), (1,)), ((), ()), (0, 1)), boxes[1])
    assert 0 < len(member.held) < 6


def test_a_process_that_is_left_alone_waits_for_its_end() -> None:
    member = members_of(2)[0]
    member.sharding.transport = AloneTransport()
    with pytest.raises(Ended):
        member.step(0)
    with pytest.raises(Ended):
        GatheredState(member.sharding).capture(everything)
    with pytest.raises(Ended):  # the leader must assume that the other members lack the lost state
        member.sharding.meet(0)
    member.sharding.meet(1)


def test_an_optimizer_that_computes_losses_is_refused() -> None:
    member = members_of(2)[0]
    with pytest.raises(UserError, match=r"AdamW\.step\(closure\) with --shard-optimizer"):
        member.sharding.hide_others(member.optimizer, closure=True)
