"""Workers that are moved between the nodes of a job while it trains."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import RUN_S
from dashboard_kit import Dashboard
from holdfast.engine.core.errors import HoldfastError, UserError
from holdfast.engine.runtime.contact import make_order
from holdfast.engine.runtime.job_status import (
    CoordinatorStatus,
    JobStatus,
    NodeStatus,
    ProcessPhase,
    ProcessStatus,
)
from holdfast.engine.runtime.local_run import LocalRun
from support import start_etcd

HOLDFAST = (sys.executable, "-m", "holdfast.cli.main")
SCRIPT = """
import hashlib, os, sys, time, torch, holdfast
job = holdfast.join()
model = torch.nn.Linear(300, 300)
optimizer = torch.optim.AdamW(model.parameters())
job.protect(model=model, optimizer=optimizer)
data = job.batches(torch.utils.data.TensorDataset(torch.ones(64, 300)), batch_size=4)
step_s = float(sys.argv[1])
for step in job.steps(data, until=100_000):
    for (x,) in step:
        step.backward((model(x) - 1).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    print("STEP", job.worker, step.index, flush=True)
    if job.is_leader and (os.path.exists(sys.argv[2]) or step.index == 2000):
        job.stop()
    time.sleep(step_s)
with open(sys.argv[2] + ".digests", "a") as told:
    digest = hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest()
    told.write(f"{digest} {step.index}\\n")
"""


class Nodes:
    """Runs a job of two workers on node `local`, and further nodes whose workers wait."""

    def __init__(self, run: LocalRun, stop: Path) -> None:
        self.run = run
        self.stop = stop

    @contextlib.contextmanager
    def node(self, name: str, nproc: int, join: str = "") -> Iterator[None]:
        host, port = self.run.run_dir.address()
        popen = subprocess.Popen(
            [
                *(*HOLDFAST, "agent", "--join", join or f"{host}:{port}", "--name", name),
                *("--nproc", str(nproc), "--run-dir", str(self.run.run_dir.path)),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield
        finally:
            popen.kill()
            popen.wait()

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [*HOLDFAST, *words, "--run-dir", str(self.run.run_dir.path)]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=RUN_S)

    def on(self, state: str, node: str) -> list[int]:
        """Return the workers in this state on a node."""
        with contextlib.suppress(HoldfastError):
            workers = self.run.status()["workers"]
            return [w["id"] for w in workers if w["state"] == state and w["agent"] == node]
        return []

    def spares(self, node: str, count: int) -> list[int]:
        def there() -> list[int]:
            found = self.on("spare", node)
            return found if len(found) >= count else []

        found: list[int] = self.run.until(there, RUN_S, f"{count} workers wait on {node}")
        return found

    def finish(self) -> str:
        """End the job at the same step; return the digest of all workers."""
        self.stop.touch()
        assert self.run.wait(RUN_S) == 0, self.run.log()
        (found,) = set(self.stop.with_suffix(".digests").read_text().splitlines())
        return found


@contextlib.contextmanager
def nodes_of(tmp_path: Path, virtual: int, *more: str) -> Iterator[Nodes]:
    script = tmp_path / "moved.py"
    script.write_text(SCRIPT)
    options = ["--nproc", "2", "--virtual", str(virtual), "--nodes-max", "4"]
    options += ["--join-pause", "0", "--fingerprint-steps", "4", *more]
    stop = tmp_path / "stop"
    with LocalRun(tmp_path / "run", options, [str(script), "0.01", str(stop)]) as run:
        run.until_members(2)
        yield Nodes(run, stop)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with nodes_of(tmp_path, 2) as found:
        yield found


def undisturbed(tmp_path: Path, last: str, virtual: int = 2) -> str:
    """Run the same job alone up to the same step."""
    script = tmp_path / "alone.py"
    text = SCRIPT.replace("until=100_000", f"until={int(last) + 1}")
    script.write_text(text)
    options = ["--nproc", "1", "--virtual", str(virtual)]
    with LocalRun(tmp_path / "alone", options, [str(script), "0", str(tmp_path / "no")]) as run:
        assert run.wait(RUN_S) == 0, run.log()
    return (tmp_path / "no.digests").read_text().strip()


@pytest.mark.slow
def test_workers_are_moved_and_a_node_drained_without_a_pause(nodes: Nodes, tmp_path: Path) -> None:
    with nodes.node("b", 2), nodes.node("c", 1):
        nodes.spares("b", 2)
        nodes.spares("c", 1)
        moved = nodes("migrate", "1", "--to", "c")
        assert moved.returncode == 0, moved.stderr
        assert "takes the place of worker 1" in moved.stdout
        assert len(nodes.on("spare", "c")) == 0
        drained = nodes("drain", "node0")
        assert drained.returncode == 0, drained.stderr
        events = [e["text"] for e in nodes.run.events("join")]
        assert sum("the state while" in text for text in events) >= 2
        assert not any(e["kind"] == "lost" for e in nodes.run.events())
        found = nodes.finish()
    assert found == undisturbed(tmp_path, found.split()[1])


@pytest.mark.slow
def test_a_worker_is_moved_from_the_dashboard(nodes: Nodes, tmp_path: Path) -> None:
    with nodes.node("b", 1), Dashboard(nodes.run.run_dir.path) as dashboard:
        (spare,) = nodes.spares("b", 1)
        order = {"order": "migrate", "worker": 1, "to": "b"}
        asked = dashboard.order("/api/orders", order)
        assert asked["question"].startswith("Move worker 1 to node b?")
        dashboard.order("/api/orders/confirm", {"confirm": asked["confirm"]})
        states = (value[0] for topic, value in dashboard.follow() if topic == "orders")
        told = next(each for each in states if each["state"] != "waiting")
        assert (told["text"], told["state"]) == ("migrate worker 1 to b", "done"), told
        assert sorted(nodes.run.members()) == [0, spare]
        assert not any(e["kind"] == "lost" for e in nodes.run.events())
        found = nodes.finish()
    assert found == undisturbed(tmp_path, found.split()[1])


@pytest.mark.slow
def test_two_nodes_are_drained_at_once_the_leaders_too(tmp_path: Path) -> None:
    with nodes_of(tmp_path, 4) as nodes, nodes.node("b", 2):
        nodes.run.until_members(4, RUN_S)
        with nodes.node("c", 4):
            nodes.spares("c", 4)
            drained = nodes("drain", "node0", "b")
            assert drained.returncode == 0, drained.stderr
            assert not any(e["kind"] == "lost" for e in nodes.run.events())
            nodes.run.until(lambda: len(nodes.run.members()) == 4, RUN_S, "four members on c")
            found = nodes.finish()
    assert found == undisturbed(tmp_path, found.split()[1], 4)


@pytest.mark.slow
def test_workers_and_coordinator_leave_the_first_machine(tmp_path: Path) -> None:
    """It is drained, and then ends without notice; a standby continues the job."""
    with start_etcd(tmp_path, 1) as etcd:
        url = etcd.url("moved")
        with nodes_of(tmp_path, 2, "--election", url) as nodes, nodes.node("b", 2, url):
            run = nodes.run.run_dir
            command = [*HOLDFAST, "coordinator", "--election", url, "--host", "127.0.0.1"]
            command += ["--run-dir", str(tmp_path / "standby")]
            command += ["--secret-file", str(run.path / "secret")]
            standby = subprocess.Popen(command)
            try:
                nodes.spares("b", 2)
                drained = nodes("drain", "node0")
                assert drained.returncode == 0, drained.stderr
                assert not any(e["kind"] == "lost" for e in nodes.run.events())
                nodes.run.signal(signal.SIGKILL)
                nodes.run.wait(RUN_S)
                nodes.stop.touch()
                assert standby.wait(RUN_S) == 0
            finally:
                standby.kill()
                standby.wait()
            (found,) = set(nodes.stop.with_suffix(".digests").read_text().splitlines())
    assert found == undisturbed(tmp_path, found.split()[1])


def test_a_move_that_cannot_be_is_refused() -> None:
    status = JobStatus(
        coordinator=CoordinatorStatus(pid=1, term=1),
        agents=tuple(NodeStatus(id=name) for name in "abc"),
        workers=(
            ProcessStatus(id=0, state=ProcessPhase.COMPUTING, agent="a"),
            ProcessStatus(id=1, state=ProcessPhase.COMPUTING, agent="b"),
            ProcessStatus(id=2, state=ProcessPhase.SPARE, agent="b"),
        ),
    )
    assert make_order(status, 0, "b", "").agent == "a"
    for worker, to, problem in (
        (0, "x", "there is no node 'x' in the job; its nodes: a, b, c"),
        (2, "a", "worker 2 takes no part in the job; 0, 1 do"),
        (0, "a", "worker 0 is on node a already"),
        (0, "c", "no worker waits on node c"),
    ):
        with pytest.raises(UserError, match=problem):
            make_order(status, worker, to, "")


@pytest.mark.slow
def test_impossible_moves_are_refused_in_one_sentence(nodes: Nodes) -> None:
    for words, message in (
        (("9", "--to", "node0"), "worker 9 takes no part in the job; 0, 1 do"),
        (("1", "--to", "x"), "there is no node 'x' in the job; its nodes: node0"),
        (("1", "--to", "node0"), "worker 1 is on node node0 already"),
    ):
        found = nodes("migrate", *words)
        assert found.returncode == 2
        assert message in found.stderr
    with nodes.node("b", 1):
        nodes.spares("b", 1)
        nodes("migrate", "0", "--to", "b")
        found = nodes("migrate", "1", "--to", "b")
        assert "no worker waits on node b" in found.stderr
    nodes.finish()


@pytest.mark.slow
def test_a_node_with_little_time_is_left_before_its_end(nodes: Nodes) -> None:
    """A deadline is kept, whether or not a worker has received the state by then."""
    with nodes.node("b", 2):
        nodes.spares("b", 2)
        drained = nodes("drain", "node0", "--deadline", "4")
        assert drained.returncode == 0, drained.stderr
        assert not any(e["kind"] == "lost" for e in nodes.run.events())
        nodes.finish()
    refused = nodes("drain", "node0", "--deadline", "-1")
    assert refused.returncode == 2
    assert "is no number of seconds above 0" in refused.stderr
