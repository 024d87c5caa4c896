"""Ray's tables are read, and its driver and actors may end at any time; without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.main import main
from holdfast.clusters.ray import ray_manager, ray_place
from holdfast.clusters.ray.ray_manager import RayLink, RayManager, RayShare
from holdfast.clusters.ray.ray_tables import RayDemand, RayTables, read_tables, selector
from holdfast.engine.core.errors import Damaged, Refused, Unreachable
from holdfast.engine.core.fleet.placements import Holding, Notice, Placement, PlacementId
from holdfast.engine.fleet.cluster_manager import read_plan
from holdfast.engine.runtime.rundir import RunDir
from holdfast.lab.contracts.cluster_contract import (
    CLUSTER_CASES,
    Case,
    order,
    run_cluster_case,
    until,
)
from labs.fake_ray import FakeRay
from labs.slurm_cluster import our_processes
from ray_kit import check_reasons

WAIT_S = 30.0


def tables(*actors: tuple[str, str, str], **nodes: dict[str, Any]) -> RayTables:
    """Return tables with actors (name, state, node), and nodes by ids with their special fields."""
    usual = {"resources": {"CPU": 8.0}, "drains": False, "drained_at": 0.0}
    return read_tables(
        {
            "actors": [
                {"id": f"a-{name}", "name": name, "state": state, "node": node}
                for name, state, node in actors
            ],
            "nodes": [{**usual, "id": id_, "name": id_, **how} for id_, how in nodes.items()],
        }
    )


def run_placement(name: str, host: str, notice: Notice | None = None) -> Placement:
    return Placement(
        id=PlacementId(name), handle=f"a-{name}", holding=Holding.RUNNING, host=host, notice=notice
    )


def test_actors_are_placements_of_the_job_that_they_are_named_for() -> None:
    found = tables(
        ("hf-x-1", "DEPENDENCIES_UNREADY", ""),
        ("hf-x-2", "PENDING_CREATION", "b"),
        ("hf-x-3", "ALIVE", "a"),
        ("hf-x-4", "ALIVE", "lost"),
        ("hf-y-5", "ALIVE", "b"),
        a={"name": "10.0.0.1"},
        b={},
    ).placements("hf-x-", 0.0, 0.0)
    waiting, waits_on_a_node, runs, lost = found
    assert (waiting.holding, waiting.host) == (Holding.WAITING, "")
    assert (waits_on_a_node.holding, waits_on_a_node.host) == (Holding.WAITING, "")
    assert runs == run_placement("hf-x-3", "10.0.0.1")
    assert lost.holding is Holding.ENDED


def test_of_an_actor_that_was_listed_twice_the_later_state_counts() -> None:
    found = tables(("hf-x-1", "PENDING_CREATION", ""), ("hf-x-1", "ALIVE", "a"), a={})
    assert found.placements("hf-x-", 0.0, 0.0) == [run_placement("hf-x-1", "a")]


def test_a_node_that_drains_gives_notice_until_its_deadline() -> None:
    found = tables(
        ("hf-x-1", "ALIVE", "a"),
        ("hf-x-2", "ALIVE", "b"),
        a={"drains": True, "drained_at": 1030.0},
        b={"drains": True},
    ).placements("hf-x-", 7.0, 1000.0)
    assert found == [
        run_placement("hf-x-1", "a", Notice(reason="Ray drains its node", until=37.0)),
        run_placement("hf-x-2", "b", Notice(reason="Ray drains its node")),
    ]


def test_nodes_fit_that_have_enough_of_everything_and_stay() -> None:
    share = RayShare(cpus=8, gpus=1).resources
    found = tables(
        enough={"resources": {"CPU": 8.0, "GPU": 4.0}},
        without_gpu={"resources": {"CPU": 8.0}},
        small={"resources": {"CPU": 4.0, "GPU": 4.0}},
        leaves={"resources": {"CPU": 8.0, "GPU": 4.0}, "drains": True},
    )
    assert found.fitting(share) == 1
    assert found.fitting(RayShare(cpus=4).resources) == 3


def test_hosts_to_avoid_become_a_selector_of_nodes() -> None:
    found = tables(a={"name": "10.0.0.1"}, b={"name": "10.0.0.1"}, c={"name": "10.0.0.2"})
    assert found.ids(["10.0.0.1", "10.0.0.9"]) == ["a", "b"]
    assert selector(["a", "b"]) == {"ray.io/node-id": "!in(a,b)"}
    assert selector([]) == {}


USED = {"resources": {"CPU": 8.0}, "free": {"CPU": 2.0}}


@pytest.mark.parametrize(
    ("resources", "why"),
    [
        ({"CPU": 4.0, "GPU": 1.0},
         "CPU 4, GPU 1 is infeasible in Ray: none of its 6 nodes has so much"),
        ({"CPU": 4.0}, "CPU 4 is pending in Ray: of its 6 nodes 1 is too small, 1 drains, "
         "2 have a node of the job, 1 is avoided, 1 is in use"),
        ({"CPU": 2.0}, "CPU 2 is pending in Ray: of its 6 nodes 1 drains, "
         "2 have a node of the job, 1 is avoided, 2 are free"),
    ],
)  # fmt: skip
def test_why_ray_does_not_start_an_actor_is_what_its_nodes_lack(
    resources: dict[str, float], why: str
) -> None:
    nodes = {
        "small": {"resources": {"CPU": 2.0}, "free": {"CPU": 2.0}},
        "busy": USED,
        "leaves": {**USED, "drains": True},
        "first": {**USED, "taken": ["hf-x-", "hf-y-"]},
        "second": {**USED, "taken": ["hf-x-"]},
        "failed": USED,
    }
    found = tables(("hf-x-1", "PENDING_CREATION", ""), ("hf-x-2", "ALIVE", "first"), **nodes)
    mine = RayDemand(unit="hf-x-", resources=resources, avoid=["failed"])
    other = RayDemand(unit="hf-y-", resources={"CPU": 99.0})
    found = dataclasses.replace(found, demands=(mine, other, mine))
    assert [each.why for each in found.placements("hf-x-", 0.0, 0.0)] == [why, ""]


@pytest.mark.parametrize("answer", [{"nodes": []}, {"nodes": [{"id": "a"}], "actors": []}])
def test_an_answer_of_ray_that_cannot_be_read_is_reported_as_damaged(
    answer: dict[str, Any],
) -> None:
    with pytest.raises(Damaged, match="Ray's answer cannot be read"):
        read_tables(answer)


# ---------------------------------------------------------------- the driver's process

DRIVER = """
import json, sys, time
for line in sys.stdin:
    word, given = json.loads(line)
    print("noise", file=sys.stderr)
    if word == "die":
        sys.exit(1)
    if word == "hang":
        time.sleep(600)
    if word == "long":
        print(json.dumps({"found": "x" * 300_000}), flush=True)
    elif word == "echo":
        print(json.dumps({"found": given}), flush=True)
    else:
        print(json.dumps({"problem": word, "refused": word == "no"}), flush=True)
"""


def linked(tmp_path: Path, answer_s: float = WAIT_S) -> RayLink:
    return RayLink((sys.executable, "-c", DRIVER), tmp_path / "logs" / "ray.txt", answer_s)


def test_a_driver_answers_or_says_what_ray_says(tmp_path: Path) -> None:
    link = linked(tmp_path)
    assert link.ask("echo", 1, {"a": None}) == [1, {"a": None}]
    assert len(link.ask("long")) == 300_000
    with pytest.raises(Refused, match="Ray says: no"):
        link.ask("no")
    with pytest.raises(Unreachable, match="Ray says: later"):
        link.ask("later")
    link.close()
    assert "noise" in (tmp_path / "logs" / "ray.txt").read_text()


def test_a_driver_that_ends_or_hangs_is_replaced(tmp_path: Path) -> None:
    for word, answer_s in (("die", WAIT_S), ("hang", 1.0)):
        link = linked(tmp_path, answer_s)
        with pytest.raises(Unreachable, match=r"Ray does not answer \(see .*ray.txt\)"):
            link.ask(word)

        def answers(link: RayLink = link) -> bool:
            with contextlib.suppress(Unreachable):  # a new one may be slow to start
                return link.ask("echo", 1) == [1]
            return False

        eventually(answers, "another driver answers")
        link.close()


def test_a_thread_that_waits_for_a_driver_is_told_when_it_is_closed(tmp_path: Path) -> None:
    link, told = linked(tmp_path), []

    def wait() -> None:
        try:
            link.ask("hang")
        except Unreachable as error:
            told.append(error)

    assert link.ask("echo") == []
    thread = threading.Thread(target=wait)
    thread.start()
    while thread.is_alive():  # it may not have begun to ask
        link.close()
        thread.join(0.05)
    assert told


# ---------------------------------------------------------------- an actor's process

PARENT = "import subprocess, sys; subprocess.run(['sleep', '600'])"
ACTOR = """
import sys, threading
from holdfast.clusters.ray.ray_place import RayPlace
RayPlace([sys.executable, "-c", sys.argv[1]], {"MARK": sys.argv[2]}, sys.argv[3])
print("up", flush=True)
threading.Event().wait()
"""


def actor(tmp_path: Path, script: str, *, stays: bool = True) -> tuple[subprocess.Popen[str], str]:
    """Start an actor, and return it once its command runs, with the mark of its processes.

    `stays`: the command does not end on its own, and the actor with it.
    """
    mark = f"{tmp_path}/mark"
    process = subprocess.Popen(
        [sys.executable, "-c", ACTOR, script, mark, str(tmp_path / "logs" / "out.txt")],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert not stays or process.stdout.readline() == "up\n"
    return process, f"MARK={mark}"


def eventually(ready: Any, what: str) -> None:
    async def look() -> bool:
        return bool(ready())

    asyncio.run(until(look, what, WAIT_S))


def test_an_actor_takes_all_its_processes_along_and_its_children_are_not_theirs(
    tmp_path: Path,
) -> None:
    process, mark = actor(tmp_path, PARENT)
    eventually(lambda: len(our_processes(mark)) == 3, "what keeps it, the command, its child")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert not {int(pid) for pid in children} & set(our_processes(mark))  # Ray kills children
    process.kill()
    process.wait(WAIT_S)
    eventually(lambda: not our_processes(mark), "all have ended")


def test_an_actor_ends_with_its_command_and_keeps_what_it_has_printed(tmp_path: Path) -> None:
    command = "import sys; print('one'); print('two', file=sys.stderr)"
    process, mark = actor(tmp_path, command, stays=False)
    assert process.wait(WAIT_S) == 0
    assert not our_processes(mark)
    assert sorted((tmp_path / "logs" / "out.txt").read_text().split()) == ["one", "two"]


def test_nothing_is_started_for_an_actor_that_has_ended(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    subprocess.run(
        [sys.executable, "-m", ray_place.__name__, str(ended.pid), "touch", str(tmp_path / "x")],
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "MARK": str(tmp_path)},
    )
    eventually(lambda: not our_processes(f"MARK={tmp_path}"), "it has ended")
    assert not (tmp_path / "x").exists()


# ---------------------------------------------------------------- the contract, on a fake


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeRay]:
    with FakeRay(tmp_path_factory.mktemp("ray"), hosts=4) as made:
        yield made


@pytest.mark.parametrize("case", CLUSTER_CASES, ids=lambda case: case.__name__)
def test_the_adapter_keeps_the_contract(case: Case, cluster: FakeRay) -> None:
    run_cluster_case(case, cluster)


def test_why_an_actor_waits_is_found(tmp_path: Path) -> None:
    with FakeRay(tmp_path, hosts=2) as cluster:
        asyncio.run(check_reasons(cluster, small=0))


class Recorder(FakeRay):
    """Keeps the orders to start, and starts nothing."""

    started: dict[str, Any]

    def ask(self, word: str, *given: Any) -> Any:
        if word == "start":
            self.started = json.loads(json.dumps(given[0]))
            return None
        return super().ask(word, *given)


def test_an_order_says_all_to_ray(tmp_path: Path) -> None:
    ray, share = Recorder(tmp_path), RayShare(cpus=8, gpus=4)
    wanted = order(1, avoid=["n1", "gone"])
    asyncio.run(RayManager(ray, "hf-fake-", tmp_path, share).request(wanted))
    assert ray.started == {
        "name": wanted.id,
        "command": list(wanted.command),
        "environment": {**wanted.environment, "HOLDFAST_PLACEMENT": wanted.id},
        "output": f"{tmp_path}/{wanted.id}.txt",
        "cpus": 8,
        "gpus": 4,
        "unit": "hf-fake-",
        "avoid": ["id-n1"],
    }


@pytest.mark.parametrize("shared", [True, False])
def test_the_secret_goes_through_ray_only_where_no_file_system_is_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    ray = Recorder(tmp_path)
    monkeypatch.setattr(ray_manager, "link_to", lambda address, log=None: ray)
    monkeypatch.setattr(ray_manager, "launch_cluster_job", lambda *how: 0)
    options = ["--run-dir", str(tmp_path / "run"), "--cpus", "0.5"]
    assert main(["launch", "ray", *options, *(() if shared else ("--not-shared",)), __file__]) == 0
    run_dir = RunDir(tmp_path / "run")
    manager = ray_manager.open_manager(read_plan(run_dir), run_dir.spec())
    asyncio.run(manager.request(order(1)))
    secret = {} if shared else {"HOLDFAST_SECRET": run_dir.secret().hex()}
    found = ray.started["environment"]
    assert {n: v for n, v in found.items() if n == "HOLDFAST_SECRET"} == secret
    assert (ray.started["cpus"], ray.started["gpus"]) == (0.5, 0.0)
    assert ray.started["output"].startswith(f"{tmp_path}/run/logs/hf-")


# ---------------------------------------------------------------- the command


def refusal(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["launch", "ray", *options, __file__]) == 2
    return capsys.readouterr().err


def test_without_ray_the_command_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "Ray is not installed here: pip install 'holdfast[ray]'" in refusal(capsys)


def test_an_address_without_a_cluster_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ray")
    said = refusal(capsys, "--address", "127.0.0.1:1")
    assert "no Ray cluster can be used at --address 127.0.0.1:1 ([Errno 111]" in said
    assert "give HOST:PORT of its head" in refusal(capsys, "--address", "ray://127.0.0.1:10001")


@pytest.fixture
def on_a_fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay(tmp_path)
    monkeypatch.setattr(ray_manager, "link_to", lambda address: fake)
    return fake


def test_too_few_nodes_are_refused_unless_more_will_come(
    tmp_path: Path,
    on_a_fake: FakeRay,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "--nodes 4: the cluster has 3 with 1 CPU; start more" in refusal(capsys, "--nodes", "4")
    said = refusal(capsys, "--nodes", "2", "--gpus", "8")
    assert "--nodes 2: the cluster has 0 with 1 CPU, 8 GPU" in said
    assert "--cpus -1: an agent needs 0 or more" in refusal(capsys, "--cpus", "-1")
    launched: list[tuple[RunDir, str, int]] = []
    monkeypatch.setattr(ray_manager, "launch_cluster_job", lambda *how: launched.append(how) or 0)
    options = ["--run-dir", str(tmp_path / "run"), "--nodes", "4", "--wait-for-nodes"]
    assert main(["launch", "ray", *options, __file__]) == 0
    ((run_dir, host, port),) = launched
    assert (host, port) == ("127.0.0.1", 0)
    assert run_dir.spec().nodes.abandon_s == 60.0


def test_a_resumed_job_asks_ray_where_it_is(
    tmp_path: Path, on_a_fake: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[str] = []
    monkeypatch.setattr(
        ray_manager, "launch_cluster_job", lambda run_dir, host, port: launched.append(host) or 0
    )
    monkeypatch.setattr(on_a_fake, "_hello", lambda: {"host": "10.0.0.7", "version": ""})
    options = ["--run-dir", str(tmp_path / "run"), "--address", "10.0.0.1:6379"]
    assert main(["launch", "ray", *options, __file__]) == 0
    assert main(["resume", str(tmp_path / "run")]) == 0
    assert main(["resume", str(tmp_path / "run"), "--host", "10.0.0.9"]) == 0
    assert launched == ["10.0.0.7", "10.0.0.7", "10.0.0.9"]
