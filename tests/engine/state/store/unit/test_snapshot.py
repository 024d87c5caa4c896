"""Shares of a checkpoint: how a state falls into them, and the process that saves them."""

from __future__ import annotations

import ctypes
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import RUN_S
from holdfast.engine.commands.run_command import make_spec, parser
from holdfast.engine.core.errors import Aborted, Damaged, WorldError
from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground.events import SaveEnded, SinkKind
from holdfast.engine.core.invalidations import Invalidation
from holdfast.engine.core.replica.retention import Retention
from holdfast.engine.core.types import AgentId, Incarnation, Peer, ViewNumber, WorkerId
from holdfast.engine.core.views import Member, View
from holdfast.engine.host.lifetime import ORDERS
from holdfast.engine.runtime.node import checkpoint_writer
from holdfast.engine.runtime.node.checkpoint_writer import SCRUB_S, Writer
from holdfast.engine.runtime.rundir import RunDir
from holdfast.engine.state.store.checkpoints import Checkpoints
from holdfast.engine.state.store.files import FileStorage
from holdfast.engine.state.store.manifest import PARTS, SAVING, manifest_name
from holdfast.engine.state.store.open import open_storage
from holdfast.engine.state.store.saving import Item
from holdfast.engine.state.store.snapshot import (
    Arena,
    Order,
    SaveAnswer,
    StagedItem,
    read_answer,
    receive,
    send,
    table_of,
    token_for,
)
from holdfast.engine.train.checkpoint.loaded_state import LoadedState
from holdfast.engine.train.exchange.layout import Layout
from holdfast.engine.train.state.restorer import Restorer
from holdfast.engine.train.state.saver import Saver, WriterLink
from holdfast.engine.train.state.share import StateShare, share_of
from mail_kit import Mail, Noisy
from support import until

SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=8)


@given(SHAPES, st.integers(1, 6))
def test_shares_are_the_state_again_in_the_order_of_the_ranks(
    shapes: list[list[int]], size: int
) -> None:
    tensors = [torch.zeros(shape) for shape in shapes]
    rows = {i: (t.shape[0] if t.dim() else 1) for i, t in enumerate(tensors)}
    at, share = (0, 0), sum(t.nbytes for t in tensors) / size
    for rank in range(size):
        taken = share_of(tensors, rank, size)
        saved = 0
        for each in taken:
            assert (each.tensor, each.start) == at
            assert each.cut == (each.stop - each.start < rows[each.tensor])
            saved += (
                (each.stop - each.start) * tensors[each.tensor].nbytes // max(rows[each.tensor], 1)
            )
            at = (each.tensor, each.stop) if each.stop < rows[each.tensor] else (each.tensor + 1, 0)
        widest = max((t.nbytes // max(rows[i], 1) for i, t in enumerate(tensors)), default=0)
        assert abs(saved - share) < widest + size  # a row, and the remainder
    assert at == (len(tensors), 0)


class Thing:
    """Is a protected object with tensors of several kinds."""

    def __init__(self, seed: int) -> None:
        made = torch.Generator().manual_seed(seed)
        self.state: dict[str, object] = {
            "matrix": torch.randn(301, 40, generator=made),
            "scalar": torch.tensor(seed),
            "none": torch.zeros(0, 3),
            "half": torch.randn(7, 5, generator=made).to(torch.bfloat16),
            "words": ["a", seed, None],
        }

    def state_dict(self) -> dict[str, object]:
        return self.state

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.state = state


def same(a: Thing, b: Thing) -> bool:
    pairs = [(a.state[k], b.state[k]) for k in a.state]
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in pairs)


def view(size: int, number: int = 1) -> View:
    workers = [WorkerId(i) for i in range(size)]
    return View(
        number=ViewNumber(number),
        members=tuple(
            Member(worker=w, incarnation=Incarnation(1), agent=AgentId("node0")) for w in workers
        ),
        owners=tuple(workers),
        resume_step=0,
        leader=workers[0],
    )


@pytest.fixture
def orders(tmp_path: Path) -> Iterator[socket.socket]:
    """Give a socket to a writer in a thread, which saves under tmp_path."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    writer = Writer(Checkpoints(FileStorage(tmp_path)), Retention(last=3))
    thread = threading.Thread(target=writer.serve, args=(theirs,))
    thread.start()
    yield ours
    ours.close()
    thread.join(RUN_S)
    theirs.close()
    assert not thread.is_alive()


def a_saver(
    orders: socket.socket,
    protected: dict[str, Any],
    saved: list[int],
    told: list[str] | None = None,
    state_print: int = 7,
    rank: int = 0,
) -> Saver:
    """Make a saver. `saved`, `told`: lists of durable steps, and of reasons against other steps."""

    def tell(save: SaveEnded) -> None:
        if save.durable:
            saved.append(save.step)
        if save.problem and told is not None:
            told.append(save.problem)

    writer = WriterLink(orders, "job", Peer(WorkerId(rank)))
    return Saver(writer, protected, tell, lambda: state_print)


def copy(saver: Saver, step: int, within: View, checked: bool = False) -> str:
    """Copy a share of the state; return the problem, or ""."""
    return saver.copy(ef.CopyState(SinkKind.STORE, step, within, checked=checked)).problem


def test_a_checkpoint_saved_without_the_coordinator_is_used_once_it_was_compared(
    tmp_path: Path, orders: socket.socket
) -> None:
    """They continue, and remove the checkpoint that the coordinator knows."""
    saved: list[int] = []
    saver = a_saver(orders, {"thing": Thing(1)}, saved)
    for step in (10, 20, 30, 40, 50):
        copy(saver, step, view(1, 1))
        saver.finish()
    store = Checkpoints(FileStorage(tmp_path))
    restorer = Restorer(store, LoadedState({"thing": Thing(2)}))
    assert store.steps() == [30, 40, 50]
    assert restorer.find_replacement(10, ()) == 40  # there is no report that 50 counts
    assert restorer.find_replacement(10, (Invalidation(after=35, view=ViewNumber(1)),)) == 0
    assert restorer.find_replacement(40, ()) == 30
    copy(saver, 60, view(1, 2))
    saver.finish()
    assert restorer.find_replacement(10, ()) == 40  # 50 was not compared in its own view


@pytest.mark.parametrize("size", [1, 2, 5])
def test_any_number_of_workers_restores_a_checkpoint_that_several_saved(
    size: int, tmp_path: Path, orders: socket.socket
) -> None:
    saved: list[int] = []
    savers = [a_saver(orders, {"thing": Thing(1)}, saved, rank=rank) for rank in range(size)]
    store = Checkpoints(FileStorage(tmp_path))
    for number, step in enumerate((10, 20, 30, 40), start=1):
        for saver in savers:
            assert copy(saver, step, view(size, number)) == ""
        for saver in savers:
            saver.finish()
    assert saved == [10, 20, 30, 40]
    assert store.steps() == [20, 30, 40]
    for readers in (1, 2, 3):
        things = [Thing(2) for _ in range(readers)]
        restore_together(store, 40, things)
        assert all(same(thing, Thing(1)) for thing in things)
    assert store.storage.names(PARTS) == []
    assert len(store.manifest(40).packs) == size  # the same state: all bytes are from step 10
    assert {p.split("/")[1][:12] for p in store.manifest(40).packs} == {f"{10:012d}"}


def test_a_last_checkpoint_of_unlike_states_does_not_exist(
    tmp_path: Path, orders: socket.socket
) -> None:
    """A bit may have flipped since states were compared, and no step follows to compare them."""
    saved: list[int] = []
    told: list[str] = []
    for step, (other, checked) in enumerate(((8, True), (8, False), (7, True)), start=1):
        savers = [
            a_saver(orders, {"thing": Thing(1)}, saved, told, each, rank)
            for rank, each in enumerate((7, other))
        ]
        for saver in savers:
            assert copy(saver, step, view(2, step), checked) == ""
        for saver in savers:
            saver.finish()
    assert told == ["step 1 cannot be kept: its shares are of unlike states"]
    assert saved == Checkpoints(FileStorage(tmp_path)).steps() == [2, 3]


def restore_together(
    store: Checkpoints, step: int, things: list[Thing], mail: type[Mail] = Mail
) -> None:
    """Restore together; each thing belongs to one member of a view."""
    size = len(things)
    boxes = {(a, b): queue.Queue[torch.Tensor]() for a in range(size) for b in range(size)}

    def restore(rank: int) -> None:
        transport: Any = mail(boxes, rank)
        layout = Layout.of(view(size), Peer(WorkerId(rank)))
        Restorer(store, LoadedState({"thing": things[rank]})).restore(step, transport, layout)

    with ThreadPoolExecutor(size) as pool:
        for done in [pool.submit(restore, rank) for rank in range(size)]:
            done.result(RUN_S)


def test_a_checkpoint_that_cannot_be_read_gives_way_to_the_newest_other_one(
    tmp_path: Path, orders: socket.socket
) -> None:
    saved: list[int] = []
    thing = {"thing": Thing(1), "thing.state": Thing(2)}
    saver = a_saver(orders, thing, saved)
    for number, step in enumerate((30, 10, 20), start=1):
        thing["thing"].state["scalar"] = torch.tensor(step)
        copy(saver, step, view(1, number))
        saver.finish()
    store = Checkpoints(FileStorage(tmp_path))
    restorer = Restorer(store, LoadedState(thing))
    assert restorer.find_replacement(40, ()) == 30
    assert restorer.find_replacement(30, ()) == 20
    assert restorer.find_replacement(20, ()) == 10  # never a newer one than was agreed on
    assert restorer.find_replacement(10, ()) == 0
    manifest = tmp_path / manifest_name(30)
    manifest.write_bytes(manifest.read_bytes()[:-1])
    assert restorer.find_replacement(40, ()) == 20
    assert (
        Restorer(Checkpoints(FileStorage(tmp_path / "none")), LoadedState(thing)).find_replacement(
            10, ()
        )
        == 0
    )


def test_an_invalidated_checkpoint_is_neither_loaded_nor_saved(
    tmp_path: Path, orders: socket.socket
) -> None:
    """An earlier writer saves no checkpoint of it either; a later view may save."""
    saved: list[int] = []
    thing = {"thing": Thing(1)}
    told: list[str] = []
    saver = a_saver(orders, thing, saved, told)
    store = Checkpoints(FileStorage(tmp_path))
    restorer = Restorer(store, LoadedState(thing))

    def save(step: int, number: int) -> None:
        thing["thing"].state["scalar"] = torch.tensor(1000 * number + step)
        copy(saver, step, view(1, number))
        saver.finish()

    for step in (10, 20, 30):
        save(step, 1)
    invalidation = Invalidation(after=10, view=ViewNumber(1))
    assert restorer.find_replacement(99, (invalidation,)) == 10
    restorer.withdraw_now((invalidation,))
    assert store.steps() == [10]
    save(40, 1)
    assert store.steps() == saved[:1] == [10]
    assert "step 40 is invalidated" in told[-1]
    save(20, 2)
    restorer.withdraw_now((invalidation,))
    assert store.steps() == [10, 20]


def test_a_skeleton_that_cannot_be_loaded_here_is_damage_and_not_a_store_that_is_away(
    tmp_path: Path, orders: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[int] = []
    saver = a_saver(orders, {"thing": Thing(1)}, saved)
    copy(saver, 10, view(1))
    saver.finish()
    things = [Thing(2)]
    monkeypatch.delattr(torch, "bfloat16")  # as if an older PyTorch met a newer one's state
    with pytest.raises(Damaged, match=r"step 10 cannot be used here: .*bfloat16"):
        restore_together(Checkpoints(FileStorage(tmp_path)), 10, things)


class Alike:
    """Has tensors whose names look the same to a person."""

    def state_dict(self) -> dict[str, object]:
        return {"a": {"b": torch.zeros(2)}, "a.b": torch.ones(2)}

    def load_state_dict(self, state: dict[str, object]) -> None:
        raise NotImplementedError


def test_every_tensor_has_a_name_of_its_own(tmp_path: Path, orders: socket.socket) -> None:
    saved: list[int] = []
    saver = a_saver(orders, {"x": Alike()}, saved)
    copy(saver, 10, view(1))
    saver.finish()
    names = [e.name for e in Checkpoints(FileStorage(tmp_path)).manifest(10).entries]
    assert len(set(names)) == len(names) == 3


def test_damaged_data_are_never_restored(tmp_path: Path, orders: socket.socket) -> None:
    saved: list[int] = []
    saver = a_saver(orders, {"thing": Thing(1)}, saved)
    copy(saver, 10, view(1))
    saver.finish()
    store, things = Checkpoints(FileStorage(tmp_path)), [Thing(2), Thing(2)]
    with pytest.raises(Aborted, match="that rank 0 read arrived damaged"):
        restore_together(store, 10, things, Noisy)
    assert same(things[1], Thing(2))
    (pack,) = (tmp_path / "packs").iterdir()
    data = bytearray(pack.read_bytes())
    data[len(data) // 4] ^= 1
    pack.write_bytes(bytes(data))
    things = [Thing(2)]
    with pytest.raises(Damaged, match="thing"):
        restore_together(store, 10, things)
    assert same(things[0], Thing(2))


def test_a_share_that_does_not_come_costs_the_checkpoint(
    tmp_path: Path, orders: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.engine.runtime.node.checkpoint_writer.OTHERS_S", 0.1)
    answer = read_answer(order_share(orders, 10, 0, 2))
    assert "writer 1 has not come" in answer.problem
    store = Checkpoints(FileStorage(tmp_path))
    assert store.steps() == []
    assert store.storage.names(SAVING) == []
    answer = read_answer(order_share(orders, 20, 1, 2))  # no worker waits for this order
    assert (answer.problem, answer.durable) == ("", False)
    assert store.steps() == []


def test_a_message_that_is_no_valid_order_is_passed_over(
    tmp_path: Path, orders: socket.socket
) -> None:
    orders.send(b"nonsense")
    arena = Arena()
    arena.fit(10)
    good = Order(step=1, view=1, token="ab", rank=0, size=1, table_at=0, table_bytes=0)
    for bad in (
        replace(good, table_at=1 << 40, table_bytes=9),
        replace(good, table_at=-3, table_bytes=9),
        put_table(arena, good, [StagedItem(name="x", start=1 << 40, size=1)]),
        put_table(arena, good, [StagedItem(name="x", start=-9, size=1)]),
    ):
        assert "a snapshot's table" in read_answer(send(orders, bad, arena)).problem
    assert read_answer(order_share(orders, 10, 0, 1)).durable


def put_table(arena: Arena, order: Order, slots: list[StagedItem]) -> Order:
    table = table_of(slots)
    arena.memory[: len(table)] = table
    return replace(order, table_bytes=len(table))


def order_share(orders: socket.socket, step: int, rank: int, size: int) -> int:
    """Order a share with a single item; return where the answer will come."""
    data = random.Random(f"{step} {rank}").randbytes(200_000)
    table = table_of([StagedItem(name=f"part{rank}", start=0, size=len(data))])
    arena = Arena()
    arena.fit(len(data) + len(table))
    arena.memory[: len(data)] = data
    arena.memory[len(data) : len(data) + len(table)] = table
    order = Order(
        step=step,
        view=1,
        token=token_for("job", 1, step),
        rank=rank,
        size=size,
        table_at=len(data),
        table_bytes=len(table),
    )
    return send(orders, order, arena)


def test_orders_end_with_their_givers() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.close()
    assert receive(theirs) is None
    theirs.close()


def test_without_a_writer_no_more_is_copied_than_with_one() -> None:
    """The core decides how often it is tried again: test_saves.py."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.close()
    told: list[SaveEnded] = []
    writer = WriterLink(ours, "job", Peer(WorkerId(0)))
    saver = Saver(writer, {"thing": Thing(1)}, told.append, lambda: 7)
    problem = copy(saver, 10, view(1))
    assert "takes no orders" in problem
    saver.finish()
    assert told == []
    ours.close()


def test_without_a_writer_an_order_says_so() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.close()
    with pytest.raises(WorldError, match="takes no orders"):
        order_share(ours, 1, 0, 1)
    ours.close()


class Enough(Exception):
    """Ends an endless loop."""


class Clock:
    """Has pauses that take no time; after the third long one it has had enough."""

    def __init__(self) -> None:
        self.paused: list[float] = []

    def __call__(self, seconds: float) -> None:
        self.paused.append(seconds)
        if self.paused.count(SCRUB_S) > 2:
            raise Enough


@pytest.mark.parametrize("coded", [False, True])
def test_a_rotten_pack_is_found_and_with_parity_mended(
    coded: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if coded:
        pytest.importorskip("pyeclib")
    places = [tmp_path / name for name in "abc"] if coded else [tmp_path]
    text = "ec:2+1:" + ",".join(map(str, places)) if coded else str(tmp_path)
    store = Checkpoints(open_storage(text))
    writer = Writer(store, Retention(last=3))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    thread = threading.Thread(target=writer.serve, args=(theirs,))
    thread.start()
    assert read_answer(order_share(ours, 10, 0, 1)).durable
    ours.close()
    thread.join(RUN_S)
    (pack,) = (places[0] / "packs").iterdir()
    before = pack.read_bytes()
    pack.write_bytes(bytes([before[0] ^ 1]) + before[1:])
    clock = Clock()
    with pytest.raises(Enough):
        writer.scrub(1.0, clock)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1  # one pass: no save before the second
    assert ("repaired" if coded else "step 10: ") in lines[0]
    assert (pack.read_bytes() == before) == coded
    assert any(10_000 < seconds != SCRUB_S for seconds in clock.paused)  # at a byte a second
    theirs.close()


# ---------------------------------------------------------------- real processes


@pytest.fixture
def process(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    """Start a writer that saves under tmp_path / "store"; yield it, and a socket for its orders."""
    script = tmp_path / "script.py"
    script.touch()
    options = ["--store", str(tmp_path / "store"), str(script)]
    run_dir = RunDir(tmp_path / "run")
    run_dir.create(make_spec(parser().parse_args(options)), os.urandom(32))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    popen = subprocess.Popen(
        [
            *(sys.executable, "-m", checkpoint_writer.__name__, str(run_dir.path)),
            *(str(theirs.fileno()), str(os.getpid())),
        ],
        pass_fds=[theirs.fileno()],
    )
    theirs.close()
    yield popen, ours
    ours.close()
    assert popen.wait(RUN_S) in (0, -signal.SIGKILL, 128 + signal.SIGTERM)


@pytest.mark.slow
def test_a_worker_that_dies_after_its_copy_has_saved_it(
    tmp_path: Path, process: tuple[subprocess.Popen[bytes], socket.socket]
) -> None:
    popen, orders = process
    popen.send_signal(signal.SIGSTOP)  # it saves no checkpoint while the worker lives
    code = (
        "import os, socket, sys; sys.path[:0] = sys.argv[2:]\n"
        "from test_snapshot import order_share\n"
        "order_share(socket.socket(fileno=int(sys.argv[1])), 10, 0, 1)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    worker = subprocess.run(
        [sys.executable, "-c", code, str(orders.fileno()), *sys.path],
        pass_fds=[orders.fileno()],
        check=False,
        timeout=RUN_S,
    )
    assert worker.returncode == -signal.SIGKILL
    popen.send_signal(signal.SIGCONT)
    store = Checkpoints(FileStorage(tmp_path / "store"))
    until(lambda: store.steps() == [10], "the checkpoint")
    assert store.verify(10) == []


@pytest.mark.parametrize("to", ["the process", "another thread"])
def test_a_writer_that_is_to_end_finishes_what_it_has_begun(
    to: str, tmp_path: Path, process: tuple[subprocess.Popen[bytes], socket.socket]
) -> None:
    """The kernel may deliver a signal for the process to any of its threads."""
    popen, orders = process
    store = Checkpoints(FileStorage(tmp_path / "store"))
    answers = order_share(orders, 10, 0, 2)
    until(lambda: store.storage.names("packs/"), "its share")
    popen.terminate()  # a scheduler sends this to every process of a job
    order = ORDERS[signal.SIGTERM]
    if to == "the process":
        popen.send_signal(order)
    else:
        threads = map(int, os.listdir(f"/proc/{popen.pid}/task"))
        other_thread = max(thread for thread in threads if thread != popen.pid)
        assert ctypes.CDLL(None).tgkill(popen.pid, other_thread, order) == 0
    (token,) = {name.split("-")[1] for name in store.storage.names("packs/")}
    other = store.begin(10, token, writer=1)
    other.publish(other.write([Item(name="other", data=memoryview(b"abc"))], 1))
    assert read_answer(answers).durable
    assert popen.wait(RUN_S) == 128 + signal.SIGTERM  # if it is needed, it is started again
    assert store.verify(10) == []


def test_a_writer_that_dies_is_noticed_and_what_it_wrote_is_garbage(
    tmp_path: Path, process: tuple[subprocess.Popen[bytes], socket.socket]
) -> None:
    popen, orders = process
    store = Checkpoints(FileStorage(tmp_path / "store"))
    answers = order_share(orders, 10, 0, 2)  # the other share never comes
    until(lambda: store.storage.names("packs/"), "its share")
    popen.kill()
    popen.wait(RUN_S)
    assert read_answer(answers) == SaveAnswer(problem="the checkpoint writer has died")
    assert store.steps() == []
    left = store.storage.names("packs/")  # it may have got further than its share
    assert store.collect().packs == len(left) >= 1
    assert store.storage.names("") == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_copies_from_a_gpu_are_of_the_state_before_the_next_update() -> None:
    """Copies of buffers are from before the next forward pass, which changes them."""
    model = torch.nn.Sequential(torch.nn.Linear(2000, 2000), torch.nn.BatchNorm1d(2000)).cuda()
    before = {name: tensor.cpu().clone() for name, tensor in model.state_dict().items()}
    places, at = [], 0
    for tensor in model.state_dict().values():
        places.append((at, tensor))
        at += -(-tensor.nbytes // 64) * 64
    arena = Arena()
    arena.fit(at)
    share = StateShare({"model": model})
    for _ in range(3):
        share.copy(arena.memory, places)
        model(torch.randn(64, 2000, device="cuda"))
        share.wait_before_update()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 1
        share.wait_for_copies()
        assert not share.is_busy
        for (start, tensor), wanted in zip(places, before.values(), strict=True):
            data = arena.memory[start : start + tensor.nbytes]
            found = torch.frombuffer(data, dtype=torch.uint8).view(tensor.dtype)
            assert torch.equal(found.view(tensor.shape), wanted)
        before = {name: tensor.cpu().clone() for name, tensor in model.state_dict().items()}
    share.release()
