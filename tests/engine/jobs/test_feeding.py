"""Tests workers that are fed while the other workers train, and join by one change of the view."""

from __future__ import annotations

import dataclasses
import queue
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from certificates import make_certificates
from holdfast.engine.core.errors import HoldfastError, WireError
from holdfast.engine.core.job_spec import with_settings
from holdfast.engine.core.replica import feeding
from holdfast.engine.core.types import WorkerId
from holdfast.engine.net import peer_stream
from holdfast.engine.net.peer_listener import PeerListener, open_listener
from holdfast.engine.net.peer_stream import SendRate
from holdfast.engine.net.tls import PeerIdentity
from holdfast.engine.runtime.local_run import LocalRun, strike
from holdfast.engine.state.memory import free_memory
from holdfast.engine.state.memory.free_memory import free_bytes
from holdfast.engine.train.job import Job
from holdfast.engine.train.state import feeder
from holdfast.engine.train.state.feeder import FeedHead
from holdfast.lab.sim.drawn_options import draw
from holdfast.lab.sim.world import Machines, World
from loop_kit import Script, dataset, digest, net, protected, step_once
from support import SPEC
from thread_cluster import ThreadCluster, ThreadWorker

FED = {"nodes.join_pause": 0, "silent_errors.fingerprint_steps": 1000}
STEPS = 100
KEY = b"k" * 32


def run(
    script: Script,
    workers: int,
    kill_at: dict[int, int] | None = None,
    **settings: Any,
) -> tuple[set[str], ThreadCluster]:
    """Run a job whose workers are fed; returns what its scripts return, and the cluster."""
    found: dict[WorkerId, str] = {}

    def runs(job: Job, me: ThreadWorker) -> None:
        returned = script(job, me)
        job._loops.end_open_loop()
        job._loops.wait_for_others()
        found[me.worker] = returned

    given = {"workers.nproc": workers, "workers.virtual": 4, **FED}
    spec = with_settings(SPEC, given | {k.replace("__", "."): v for k, v in settings.items()})
    at = {WorkerId(worker): number for worker, number in (kill_at or {}).items()}
    cluster = ThreadCluster(spec, runs, at, waits=True)
    outcome = cluster.run()
    assert not cluster.errors, cluster.errors
    assert outcome == ""
    return set(found.values()), cluster


def joined_fed(cluster: ThreadCluster) -> bool:
    return any("the state while" in text for text in cluster.told("join")) and any(
        text.endswith((" joins", " join")) for text in cluster.views
    )


# ---------------------------------------------------------------- scripts


def plain(job: Job, me: ThreadWorker) -> str:
    model, optimizer = protected(job)
    for step in job.steps(job.batches(dataset(), batch_size=3), until=STEPS):
        step_once(step, model, optimizer)
    return digest(model)


def with_buffers(job: Job, me: ThreadWorker) -> str:
    """Train with statistics of batches, a scheduler, loops in turn, and values between them."""
    model = nn.Sequential(net(), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7)
    job.protect(model=model, optimizer=optimizer, scheduler=scheduler)
    data = job.batches(dataset(), batch_size=3)
    for until in (30, 60, STEPS):
        for step in job.steps(data, until=until):
            step_once(step, model, optimizer)
            scheduler.step()
            job.values["best"] = min(job.values.get("best", 9.0), step.loss)
        job.values["agreed"] = job.agree(round(job.values["best"], 3))
    return digest(model) + str(dict(job.values))


def in_rounds(job: Job, me: ThreadWorker) -> str:
    """Train two modules in turn: every other step of the job follows no boundary."""
    first, second = net(seed=1), net(seed=2)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (first, second)]
    job.protect(first=first, second=second, one=optimizers[0], two=optimizers[1])
    for step in job.steps(job.batches(dataset(), batch_size=3), until=STEPS // 2):
        for name, model, optimizer in zip(
            ("first", "second"), (first, second), optimizers, strict=True
        ):
            for x, y in step.round(name):
                step.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    return digest(first, second)


def sparse(job: Job, me: ThreadWorker) -> str:
    model = nn.EmbeddingBag(50, 4, sparse=True)
    nn.init.normal_(model.weight, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=1e-2)
    job.protect(model=model, optimizer=optimizer)
    words = torch.randint(50, (64, 3), generator=torch.Generator().manual_seed(2))
    data = torch.utils.data.TensorDataset(words)
    for step in job.steps(job.batches(data, batch_size=4), until=STEPS):
        for (x,) in step:
            step.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return digest(model)


@pytest.mark.slow_with("in_rounds", "plain")
@pytest.mark.parametrize(
    "script",
    [plain, in_rounds, *(pytest.param(s, marks=pytest.mark.slow) for s in (with_buffers, sparse))],
)
def test_a_joiner_is_fed_and_the_result_is_the_same(script: Script) -> None:
    expected, _ = run(script, 1)
    for workers in (2, 3):
        found, cluster = run(script, workers, {1: 30})
        assert found == expected
        assert joined_fed(cluster), cluster.events


class Average:
    """A tensor that is neither a parameter nor an optimizer's: no step compares it."""

    def __init__(self) -> None:
        self.held = torch.zeros(40)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"held": self.held}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.held.copy_(state["held"])


def test_some_members_feed_where_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    connect, seen = feeder.connect_follower, set[tuple[int, int]]()

    def record(address: str, identity: PeerIdentity, number: int, rank: int, size: int) -> Any:
        seen.add((rank, size))
        return connect(address, identity, number, rank, size)

    monkeypatch.setattr(feeding, "FEEDERS_MAX", 2)
    monkeypatch.setattr(feeder, "connect_follower", record)
    expected, _ = run(plain, 1)
    for victim in (0, 3):
        found, cluster = run(plain, 4, {victim: 40})
        assert joined_fed(cluster)
        assert found == expected
    assert seen == {(0, 2), (1, 2)}


@pytest.mark.slow
def test_a_wrong_state_is_found_before_a_fed_worker_joins() -> None:
    """Members compare all copied parts, also the parts that no other check looks at."""

    def flips(job: Job, me: ThreadWorker) -> str:
        model, average = net(), Average()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        job.protect(model=model, optimizer=optimizer, average=average)
        for step in job.steps(job.batches(dataset(), batch_size=3), until=60):
            step_once(step, model, optimizer)
            if me.worker == 2 and step.index == 3:
                average.held[-1] += 1
        return digest(model)

    _, cluster = run(flips, 4, {1: 60})
    texts = [text for _, text in cluster.events]
    found = [i for i, text in enumerate(texts) if "of worker 2 is not that of the others" in text]
    fed = [i for i, text in enumerate(texts) if "the state while" in text]
    joins = [i for i, text in enumerate(texts) if "worker 1 joins" in text]
    assert fed[0] < found[0] < min([*joins, len(texts)]), texts


@pytest.mark.slow
def test_a_member_dies_while_it_feeds() -> None:
    """The state fed so far is useless, and the follower joins all the same, by another order."""
    expected, _ = run(plain, 1)
    for death in (60, 75, 90):
        found, _ = run(plain, 3, {1: 30, 2: death})
        assert found == expected


@pytest.mark.slow
def test_without_memory_for_a_copy_all_wait_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = run(plain, 1)
    monkeypatch.setattr(feeder, "free_bytes", lambda: 0)
    found, cluster = run(plain, 2, {1: 30})
    assert found == expected
    assert any("of memory, and 0 MiB are free" in text for text in cluster.told("join"))
    assert any(text.endswith("worker 1 joins") for text in cluster.views)


def test_nobody_is_fed_without_a_rate() -> None:
    _, cluster = run(plain, 2, {1: 30}, nodes__join_rate=0)
    assert not any("the state while" in text for text in cluster.told("join"))
    assert any(text.endswith("worker 1 joins") for text in cluster.views)


@pytest.mark.slow
def test_a_small_model_is_sent_while_all_wait() -> None:
    _, cluster = run(plain, 2, {1: 30}, nodes__join_pause=1)
    assert not any("the state while" in text for text in cluster.told("join"))
    assert any(text.endswith("worker 1 joins") for text in cluster.views)


# ---------------------------------------------------------------- the connection


def pair(theirs: bytes = KEY) -> tuple[Any, Any]:
    """Connect a member with this key to a follower; return both ends, or the error."""
    arrived: queue.Queue[Any] = queue.Queue()
    listener, address = open_listener("127.0.0.1")
    listening = PeerListener(
        listener,
        PeerIdentity(key=KEY),
        feeder.MAGIC,
        lambda *end: arrived.put(end),
        arrived.put,
    )
    listening.start()
    member: Any
    try:
        member = feeder.connect_follower(address, PeerIdentity(key=theirs), 7, 1, 3)
    except (OSError, WireError) as error:
        member = error
    follower = arrived.get(timeout=20.0)
    listening.close()
    return member, follower


def test_both_sides_prove_that_they_are_of_the_job() -> None:
    member, (follower, who) = pair()
    assert who == (7, 1, 3)
    data = bytes(range(200))
    feeder.send_message(member, FeedHead(kind="step", step=4), [memoryview(data)], SendRate(1e9))
    head = feeder.read_head(follower)
    place = bytearray(200)
    feeder.read_into(follower, memoryview(place), head.buffers[0])
    assert (head.kind, head.step, bytes(place)) == ("step", 4, data)
    member.close()
    follower.close()


def test_a_stranger_is_sent_away() -> None:
    member, follower = pair(b"x" * 32)
    assert isinstance(member, HoldfastError | OSError)
    assert "does not know this job's secret" in str(follower)


def read_one(channel: socket.socket) -> None:
    head = feeder.read_head(channel)
    feeder.read_into(channel, memoryview(bytearray(100)), head.buffers[0])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda data: data[:-1] + b"!", "arrived damaged"),
        (lambda data: data[:-20], "ended the connection"),
        (lambda data: b"\xff" * 4 + data, "a message has"),
        (lambda data: b"\0\0\0\3" + b"abc", "cannot be read"),
    ],
)
def test_frames_of_a_feed_are_checked_when_they_arrive(spoil: Any, message: str) -> None:
    member, follower = socket.socketpair()
    with member, follower:
        feeder.send_message(member, FeedHead(kind="part"), [memoryview(bytes(100))])
        data = spoil(follower.recv(1 << 16))
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.sendall(data)
            ours.shutdown(socket.SHUT_WR)
            with pytest.raises(WireError, match=message):
                read_one(theirs)


def test_a_pace_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, slept = [100.0], []
    monkeypatch.setattr(peer_stream.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(peer_stream.time, "sleep", slept.append)
    pace = SendRate(1000.0)
    pace.count_sent(500)
    assert slept == [0.5]
    clock[0] += 2.0
    pace.count_sent(500)  # bytes not sent in time are not made up for
    assert slept == [0.5, 0.5]
    SendRate(0.0).count_sent(10**9)
    assert slept == [0.5, 0.5]


def test_memory_is_that_of_the_machine_or_of_its_group(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 2048 kB\n")
    assert free_bytes(tmp_path / "meminfo", tmp_path) == 2048 << 10
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert free_bytes(tmp_path / "meminfo", tmp_path) == 2048 << 10
    (tmp_path / "memory.max").write_text("5000\n")
    assert free_bytes(tmp_path / "meminfo", tmp_path) == 4000
    assert free_bytes(tmp_path / "nothing", tmp_path) == 4000
    assert free_bytes() > 1 << 20


# ---------------------------------------------------------------- real processes


@pytest.mark.slow
@pytest.mark.parametrize("encrypted", [False, True])
def test_a_killed_worker_is_replaced_by_one_that_is_fed(encrypted: bool, tmp_path: Path) -> None:
    tls = make_certificates(tmp_path, "127.0.0.1") if encrypted else None
    script = tmp_path / "large.py"
    script.write_text(
        "import sys, hashlib, torch, holdfast\n"
        "job = holdfast.join()\n"
        "model = torch.nn.Linear(1000, 1000)\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "job.protect(model=model, optimizer=optimizer)\n"
        "data = job.batches(torch.utils.data.TensorDataset(torch.ones(64, 1000)), batch_size=4)\n"
        "for step in job.steps(data, until=int(sys.argv[1])):\n"
        "    tasks = 0\n"
        "    for (x,) in step:\n"
        "        step.backward((model(x) - 1).square().mean())\n"
        "        tasks += 1\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
        "    print('STEP', job.worker, step.index, tasks, flush=True)\n"
        "print(hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest(), flush=True)\n"
    )
    options = ["--nproc", "2", "--virtual", "4", "--join-pause", "0", "--fingerprint-steps", "4"]
    digests = []
    for name, kills in (("quiet", False), ("killed", True)):
        with LocalRun(tmp_path / name, options, [str(script), "150"], tls=tls) as job:
            if kills:
                members = job.until_members(2)
                job.until(lambda: any("STEP 1 3 " in line for line in job.out), 60, "step 5")
                strike(members[1])
            assert job.wait(120) == 0, job.log()
            digests += [line for line in job.out if not line.startswith("STEP")]
        if kills:
            assert any("while the others train" in e["text"] for e in job.events("join"))
            assert any(e["text"].endswith("worker 1 joins") for e in job.events("view"))
    assert len(set(digests)) == 1


def test_pieces_may_take_what_was_asked_for_or_half_of_the_free_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(free_memory, "free_bytes", lambda: 1000)
    assert free_memory.piece_bytes(3) == 3_000_000
    assert free_memory.piece_bytes(0) == 0
    assert free_memory.piece_bytes(None) == 500


def test_some_members_feed_in_the_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeding, "FEEDERS_MAX", 2)
    fed = 0
    for seed in range(16):
        options = dataclasses.replace(draw(seed, small=True), feeds=True, spares=0)
        world = World(options, Machines(), None)
        world.run()  # its checkers raise Violation
        fed += world.truth.count["steps fed"]
    assert fed
