"""The adapter of YARN keeps the contract of all managers, against a fake that speaks real HTTP."""

from __future__ import annotations

import json
import os
import pwd
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.main import main
from holdfast.clusters import launch_application
from holdfast.clusters.order_book import ORDERS, OrderBook
from holdfast.clusters.rest_link import FILTER, NOT_JSON, RestAccess, RestAnswer, RestLink
from holdfast.clusters.yarn import yarn_manager
from holdfast.clusters.yarn.yarn_manager import YarnService, is_switched_off
from holdfast.engine.core.errors import Refused, Unreachable
from holdfast.engine.core.fleet.placements import Holding
from holdfast.engine.fleet.cluster_manager import StoppedByOperator, read_plan
from holdfast.engine.runtime.rundir import RunDir
from holdfast.lab.contracts.cluster_contract import (
    CLUSTER_CASES,
    Case,
    find_placements,
    order,
    run_cluster_case,
    run_placement,
    until,
)
from labs.fake_yarn import FakeService, FakeYarn
from yarn_kit import JOB, run, runs, service_of, size, why_waits


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeYarn]:
    with FakeYarn(tmp_path_factory.mktemp("yarn")) as made:
        yield made


@pytest.mark.parametrize("case", CLUSTER_CASES, ids=lambda case: case.__name__)
def test_yarn_keeps_the_contract(case: Case, cluster: FakeYarn) -> None:
    run_cluster_case(case, cluster)


# ---------------------------------------------------------------- the service


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeYarn]:
    with FakeYarn(tmp_path) as made:
        yield made


def test_a_service_is_defined_so_that_failures_do_not_end_it() -> None:
    service = YarnService(
        name="train", command="run me", queue="gpu", cpus=8, memory_mb=2048, gpus=2
    ).definition(3)
    (component,) = service.pop("components")
    assert service.pop("configuration")["properties"] == {
        "yarn.service.container-failure-per-component.threshold": "1000000",
        "yarn.service.node-blacklist.threshold": "1000000",
        "yarn.service.am-restart.max-attempts": "1000000",
        "yarn.service.am-failure.validity-interval-ms": "600000",
        "yarn.service.container-recovery.timeout.ms": "10000",
        "yarn.service.container-failure.retry.max": "0",
    }
    assert service == {"name": "train", "version": "1", "lifetime": -1, "queue": "gpu"}
    assert component == {
        "name": "node",
        "number_of_containers": 3,
        "launch_command": "run me",
        "resource": {"cpus": 8, "memory": "2048", "additional": {"yarn.io/gpu": {"value": 2}}},
        "restart_policy": "ALWAYS",
        "placement_policy": {
            "constraints": [{"type": "ANTI_AFFINITY", "scope": "NODE", "target_tags": ["node"]}]
        },
    }
    keys = {"principal_name": "me/_HOST@X", "keytab": "file:///k"}
    secure = YarnService(name="s", command="c", principal="me/_HOST@X", keytab="file:///k")
    assert secure.definition(1)["kerberos_principal"] == keys


def test_a_container_in_place_of_another_is_another_node(fake: FakeYarn) -> None:
    async def work() -> None:
        manager = fake.manager()
        first, second = order(1), order(2)
        old = await run_placement(fake, manager, first)
        container = service_of(fake).containers["node-0"]
        service_of(fake).failures = 10  # one more would end a service by default
        container.process.kill()

        async def is_replaced() -> bool:
            found = service_of(fake).containers.get("node-0")
            return found is not None and found.id != container.id

        await until(is_replaced, "YARN starts another container")
        assert not await find_placements(manager, first.id)
        new = await run_placement(fake, manager, second)
        assert new.handle != old.handle
        assert new.handle == service_of(fake).containers["node-0"].id
        assert size(fake) == 1

    run(work)


def test_containers_that_nobody_wants_are_given_back(
    fake: FakeYarn, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        manager = fake.manager()
        found = await run_placement(fake, manager, order(1, avoid=fake.hosts[:2]))
        assert size(fake) == 3  # two hold the hosts to avoid
        monkeypatch.setattr(yarn_manager, "IDLE_S", 0.0)
        await manager.observe()
        assert size(fake) == 1
        assert await find_placements(manager, found.id) == [found]

    run(work)


def test_an_order_waits_while_the_master_starts(fake: FakeYarn) -> None:
    async def work() -> None:
        fake.start_s = 3600.0
        manager, first, second = fake.manager(), order(1), order(2)
        await manager.request(first)
        await manager.request(second)  # the master could not be asked for more
        assert [p.holding for p in await manager.observe()] == [Holding.WAITING] * 2
        assert size(fake) == 1
        service_of(fake).up_at = 0.0
        for each in (first, second):
            await until(lambda each=each: runs(manager, each.id), "both run")
        assert size(fake) == 2

    run(work)


@pytest.mark.slow
def test_a_master_that_starts_again_is_away(
    fake: FakeYarn, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        manager = fake.manager()
        found = await run_placement(fake, manager, order(1))
        service = service_of(fake)
        service.up_at = time.monotonic() + 3600.0
        with pytest.raises(Unreachable, match="the master of service hf-fake is being started"):
            await manager.observe()
        service.up_at = 0.0
        service.listed_at = time.monotonic() + 3600.0
        for asked in (manager, fake.manager()):
            with pytest.raises(Unreachable, match="hf-fake does not list all containers"):
                await asked.observe()
        (container,) = service.containers.values()
        service.containers.clear()  # for a moment YARN may count none
        with pytest.raises(Unreachable, match="hf-fake does not list all containers"):
            await manager.observe()
        service.containers[container.instance] = container
        service.listed_at = 0.0
        assert await find_placements(manager, found.id) == [found]
        container.process.kill()
        monkeypatch.setattr(yarn_manager, "RECOVERY_S", 0.0)

        async def is_gone() -> bool:
            return not await find_placements(manager, found.id)

        await until(is_gone, "its end is believed")

    run(work)


def test_a_service_that_has_failed_is_started_again_when_nodes_are_wanted(fake: FakeYarn) -> None:
    async def work() -> None:
        manager = fake.manager()
        found = await run_placement(fake, manager, order(1))
        old = service_of(fake).id
        with fake.lock:
            fake.end(service_of(fake), "failed")
        assert not await find_placements(manager, found.id)
        assert service_of(fake).id == old
        second = order(2)
        await manager.request(second)
        assert (await why_waits(manager)).startswith(
            f"service hf-fake has failed and is started again (Application {old} failed 2 times "
            "due to AM Container for appattempt_"
        )
        await until(lambda: runs(manager, second.id), "it runs")
        assert service_of(fake).id != old

    run(work)


@pytest.mark.parametrize(
    ("method", "path", "body", "command", "reason"),
    [
        (
            "PUT",
            "/app/v1/services/hf-fake",
            {"state": "STOPPED"},
            "app -stop hf-fake",
            "Stopped by",
        ),
        (
            "DELETE",
            "/app/v1/services/hf-fake",
            None,
            "app -destroy hf-fake",
            "Stopped by user root",
        ),
        (
            "PUT",
            "/ws/v1/cluster/apps/{}/state",
            {"state": "KILLED"},
            "application -kill {}",
            "Application ",
        ),
    ],
)
@pytest.mark.parametrize("other", [False, True])
def test_a_service_that_an_operator_ends_is_not_started_again(
    fake: FakeYarn, method: str, path: str, body: Any, command: str, reason: str, *, other: bool
) -> None:
    async def work() -> None:
        manager = fake.manager()
        await run_placement(fake, manager, order(1))
        id_ = service_of(fake).id
        link = RestLink(RestAccess(address=fake.url), "YARN")
        await link.ask_or_raise(method, path.format(id_), body)
        asked = fake.manager() if other else manager  # a fleet that was started since
        said = f"YARN has ended service hf-fake, as by `yarn {command.format(id_)}` ({reason}"
        for question in (asked.observe(), asked.request(order(2)), asked.observe()):
            with pytest.raises(StoppedByOperator, match=re.escape(said)):
                await question
        assert len(fake.applications) == 1
        assert await asked.create_again(2)
        assert size(fake) == 2
        assert not await asked.create_again(2)

    run(work)


def test_the_message_of_yarn_about_a_failed_call_is_shown(fake: FakeYarn) -> None:
    async def work() -> None:
        fake.failing = 1
        with pytest.raises(Unreachable, match="YARN says: Call From host/"):
            await fake.manager().observe()
        fake.off = True
        for kind, status in ((Unreachable, 500), (Refused, 404)):
            with pytest.raises(kind, match=f"YARN says: HTTP status {status}"):
                await fake.manager().observe()

    run(work)


def test_the_service_is_destroyed_with_all_that_runs(fake: FakeYarn) -> None:
    async def work() -> None:
        manager = fake.manager()
        found = await run_placement(fake, manager, order(1))
        await manager.destroy()
        await manager.destroy()
        assert not fake.services

        async def is_gone() -> bool:
            return not fake.processes(found.id)

        await until(is_gone, "its processes end")

    run(work)


def test_yarn_finds_all_processes_of_a_node_below_its_container(fake: FakeYarn) -> None:
    async def work() -> None:
        only = order(1)
        await run_placement(fake, fake.manager(), only)
        container = service_of(fake).containers["node-0"].process.pid
        found = fake.processes(only.id)
        assert found
        assert all(container in ancestors(pid) for pid in found)

    run(work)


def ancestors(pid: int) -> list[int]:
    """Return a process's parents, the nearest first, as YARN finds them in /proc."""
    found = []
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])
        found.append(pid)
    return found


def test_a_container_that_is_started_again_in_place_is_no_other_node(tmp_path: Path) -> None:
    book = OrderBook(tmp_path / ORDERS)
    for number in (1, 2):
        book.add(order(number))
    assert book.take("container_1", "a") is not None
    place = [sys.executable, "-m", "holdfast.clusters.yarn.yarn_place", str(tmp_path)]
    environment = {**os.environ, "CONTAINER_ID": "container_1", "NM_HOST": "a"}
    assert subprocess.run(place, env=environment, check=False, timeout=60).returncode == 1
    assert sum(entry.waits for entry in book.entries()) == 1


# ---------------------------------------------------------------- the command


def launch(fake: FakeYarn, *options: str) -> int:
    run_dir = str(fake.folder / "run")
    return main(["launch", "yarn", "--rm", fake.url, "--run-dir", run_dir, *options, __file__])


def refusal(fake: FakeYarn, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """Return the one sentence by which a command is refused; nothing is left in YARN."""
    before = list(fake.services)
    assert launch(fake, *options) == 2
    assert list(fake.services) == before
    said = [line for line in capsys.readouterr().err.splitlines() if "run directory" not in line]
    assert len(said) == 1, said
    return said[0]


def test_an_address_without_yarn_is_refused(
    fake: FakeYarn, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(fake, capsys, "--rm", "http://127.0.0.1:1")
    assert "--rm http://127.0.0.1:1 cannot be used: YARN does not answer at" in said
    assert "[Errno 111] Connection refused" in said
    for address in ("rm:8088", "ftp://rm", "http://", "http://rm:port", "http://rm/?a=b"):
        said = refusal(fake, capsys, "--rm", address)
        assert f"--rm '{address}' is no address: write it as http://HOST:8088" in said
    assert "there is no ResourceManager to ask" in refusal(fake, capsys, "--rm", "")


def test_a_services_api_that_is_switched_off_is_named(
    fake: FakeYarn, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.off = True
    for _ in range(2):
        said = refusal(fake, capsys)
        assert "has no services API: set yarn.webapp.api-service.enable to true" in said


@pytest.mark.parametrize(
    ("status", "document", "off"),
    [
        (404, None, True),
        (500, {"servlet": "API-Service", "message": "no root resource classes"}, True),
        (401, NOT_JSON, False),
        (403, {"servlet": "default", "message": "GSS failure"}, False),
        (500, {"servlet": "default", "message": f"{FILTER}.NoMatchingRule: of ann"}, False),
        (200, {"uri": "/v1"}, False),
    ],
)
def test_a_demand_for_a_proof_is_no_missing_api(status: int, document: Any, *, off: bool) -> None:
    assert is_switched_off(RestAnswer(status, document)) is off


def test_a_queue_that_is_refused_is_named(
    fake: FakeYarn, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(fake, capsys, "--queue", "cpu")
    assert "--queue cpu: YARN says: Failed to submit application" in said
    assert "unknown queue: cpu; name another" in said


def test_a_service_name_that_is_taken_is_named(
    fake: FakeYarn, capsys: pytest.CaptureFixture[str]
) -> None:
    run(lambda: fake.manager().create(1))
    said = refusal(fake, capsys, "--service", JOB)
    assert "--service hf-fake: YARN has a service of this name; choose another" in said
    assert "yarn app -destroy hf-fake" in said
    assert "--service 'Train_1' cannot be right" in refusal(fake, capsys, "--service", "Train_1")


def test_too_few_nodes_are_refused(fake: FakeYarn, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(fake, capsys, "--nodes", "5")
    assert "--nodes 5: the cluster has 4 with 4096 MB, 1 virtual cores" in said
    assert "the cluster has 0 with 9000 MB" in refusal(fake, capsys, "--memory", "9000")
    fake.drain("nm0", "")
    assert "the cluster has 3" in refusal(fake, capsys, "--nodes", "4")
    said = refusal(fake, capsys, "--memory", "9000", "--wait-for-nodes")
    assert "the service is refused: YARN says: Component" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--cpus", "0"], "--cpus 0 must be from 1 to 10000"),
        (["--memory", "-1"], "--memory -1 must be from 1 to"),
        (["--gpus", "-1"], "--gpus -1 must be from 0 to"),
        (["--principal", "me@X"], "--principal and --keytab belong together"),
        (["--ca-file", "/none.pem"], "--ca-file /none.pem is no file: name one"),
        (["--ca-file", __file__], "holds no certificates"),
        (
            ["--run-dir", "/tmp/a$x"],
            "--run-dir '/tmp/a$x' cannot be used: YARN expands or breaks on '$'",
        ),
        (
            ["--run-dir", "/tmp/{{x}}"],
            "YARN expands or breaks on '{{' in the command of a container",
        ),
        (["--run-dir", "/tmp/<LOG_DIR>"], "YARN expands or breaks on '<LOG_DIR>'"),
        (["--run-dir", "/tmp/it's"], "choose a path without it"),
        (["--run-dir", "/tmp/`x`"], "choose a path without it"),
    ],
)
def test_values_that_yarn_cannot_use_are_refused(
    fake: FakeYarn, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    assert said in refusal(fake, capsys, *options)


def test_the_environment_changes_no_answer(
    fake: FakeYarn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [f"{kind}_proxy" for kind in ("http", "https", "all", "no")]
    names += [
        "HADOOP_CONF_DIR",
        "HADOOP_USER_NAME",
        "YARN_CONF_DIR",
        "CLASSPATH",
        "LOGNAME",
        "USER",
    ]
    for name in names:
        monkeypatch.setenv(name, "http://127.0.0.1:1")
        monkeypatch.setenv(name.upper(), "http://127.0.0.1:1")
    assert "the cluster has 4 with" in refusal(fake, capsys, "--nodes", "5")
    assert set(fake.asked_by) == {pwd.getpwuid(os.getuid()).pw_name}


def test_a_service_has_the_jobs_name_and_nodes_and_ends_with_the_job(
    fake: FakeYarn, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int, str]] = []

    def job(run_dir: RunDir, host: str, port: int) -> int:
        (service,) = fake.services.values()
        seen.append((service.definition["name"], size_of(service), host))
        assert run_dir.spec().nodes.abandon_s == 60.0
        assert json.loads(json.dumps(dict(read_plan(run_dir).settings)))["queue"] == "gpu"
        return 130

    def size_of(service: FakeService) -> int:
        return int(service.component["number_of_containers"])

    monkeypatch.setattr(launch_application, "launch_cluster_job", job)
    assert launch(fake, "--nodes", "2", "--queue", "gpu", "--user", "joe") == 130
    name = f"hf-{RunDir(fake.folder / 'run').spec().job[:8]}"
    assert seen == [(name, 2, "127.0.0.1")]
    assert not fake.services
    assert set(fake.asked_by) == {"joe"}


def test_a_service_ends_with_a_job_that_cannot_begin_and_a_lasting_one_is_named(
    fake: FakeYarn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "cannot listen on 192.0.2.1" in refusal(fake, capsys, "--host", "192.0.2.1")

    def job(*how: object) -> int:
        fake.away(True)
        return 0

    monkeypatch.setattr(launch_application, "launch_cluster_job", job)
    assert launch(fake, "--run-dir", str(fake.folder / "other"), "--service", "train") == 0
    said = capsys.readouterr().err
    assert "service train may still be there (YARN does not answer at" in said
    assert "remove it with `yarn app -destroy train`" in said


def test_a_signal_ends_all_processes_of_a_container(fake: FakeYarn) -> None:
    async def work() -> None:
        manager = fake.manager()
        found = await run_placement(fake, manager, order(1))
        os.kill(service_of(fake).containers["node-0"].process.pid, signal.SIGTERM)

        async def is_gone() -> bool:
            return not fake.processes(found.id)

        await until(is_gone, "all processes end")

    run(work)
