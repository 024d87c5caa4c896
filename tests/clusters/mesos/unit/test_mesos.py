"""The adapter of Mesos keeps the contract of all managers, against a fake that speaks real HTTP."""

from __future__ import annotations

import asyncio
import io
import json
import re
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.clusters.mesos import mesos_place, mesos_session
from holdfast.clusters.mesos.mesos_manager import MAINTENANCE, DeclinedOffers, MesosManager
from holdfast.clusters.mesos.mesos_session import MesosFramework, read_records
from holdfast.engine.core.errors import Refused, Unreachable
from holdfast.engine.core.fleet.placements import Holding, Placement, PlacementId
from holdfast.lab.contracts.cluster_contract import (
    CLUSTER_CASES,
    Case,
    find_placements,
    order,
    run_cluster_case,
    run_placement,
    until,
)
from labs.fake_mesos import FakeMesos
from labs.fake_mesos_state import FakeMesosFramework, FakeTask


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeMesos]:
    with FakeMesos(tmp_path_factory.mktemp("mesos"), masters=2) as made:
        yield made


@pytest.mark.parametrize("case", CLUSTER_CASES, ids=lambda case: case.__name__)
def test_mesos_keeps_the_contract(case: Case, cluster: FakeMesos) -> None:
    run_cluster_case(case, cluster)


# ---------------------------------------------------------------- what Mesos is told


def test_a_framework_says_how_long_its_tasks_go_on_without_it() -> None:
    one = MesosFramework(name="hf", user="me", command=("run",), role="gpu", gpus=2)
    assert one.info("F1") == {
        "name": "hf",
        "user": "me",
        "roles": ["gpu"],
        "capabilities": [{"type": "MULTI_ROLE"}, {"type": "GPU_RESOURCES"}],
        "failover_timeout": 3600.0,
        "checkpoint": True,
        "id": {"value": "F1"},
    }
    other = MesosFramework(name="hf", user="me", command=("run",), principal="joe")
    assert other.info()["principal"] == "joe"
    assert "id" not in other.info()


def scalar(name: str, value: float, **more: Any) -> dict[str, Any]:
    return {"name": name, "type": "SCALAR", "scalar": {"value": value}, **more}


def test_a_task_takes_the_resources_it_needs_and_no_revocable_ones() -> None:
    framework = MesosFramework(name="hf", user="me", command=("run", "it"), cpus=3, gpus=1)
    reserved = {"reservations": [{"role": "gpu"}], "allocation_info": {"role": "gpu"}}
    offer = {
        "agent_id": {"value": "S0"},
        "resources": [
            {"name": "ports", "type": "RANGES", "ranges": {}},
            scalar("cpus", 2, **reserved),
            scalar("cpus", 8, revocable={}),
            scalar("cpus", 4),
            scalar("mem", 4096),
            scalar("gpus", 2),
        ],
    }
    assert framework.task(PlacementId("hf-1"), offer) == {
        "name": "hf-1",
        "task_id": {"value": "hf-1"},
        "agent_id": {"value": "S0"},
        "resources": [
            scalar("cpus", 2, **reserved),
            scalar("cpus", 1),
            scalar("mem", 1024),
            scalar("gpus", 1),
        ],
        "command": {"shell": False, "value": "run", "arguments": ["run", "it", "hf-1"]},
    }
    less = [each for each in offer["resources"] if each != scalar("cpus", 4)]
    assert framework.task(PlacementId("hf-1"), {**offer, "resources": less}) is None


def offer_of(host: str, cpus: float, *, revocable: float = 0.0) -> dict[str, Any]:
    resources = [scalar("cpus", cpus), scalar("cpus", revocable, revocable={}), scalar("mem", 512)]
    return {"hostname": host, "resources": [*resources, {"name": "ports", "ranges": {}}]}


def test_why_no_offer_is_taken_is_kept_while_an_order_waits() -> None:
    declined = DeclinedOffers({"cpus": 2.0, "mem": 1024, "gpus": 0})
    declined.decline(offer_of("c", 1.0), "is avoided")
    assert declined.reason() == ""
    declined.look(True, 3600.0)
    start = "no offer of Mesos since 01:00:00 UTC fits cpus 2, mem 1024"
    assert declined.reason() == f"{start} (it has made none)"
    declined.look(True, 3605.0)
    declined.decline(offer_of("b", 1.0), "is avoided")
    declined.decline(offer_of("a", 9.0), "")
    declined.decline(offer_of("a", 1.5, revocable=8.0), "")
    assert declined.reason() == f"{start} (a offers cpus 1.5, mem 512; b is avoided)"
    declined.take("a", 3661.0)
    assert "since 01:01:01 UTC fits cpus 2, mem 1024 (a has a node" in declined.reason()
    for number in range(9):
        declined.decline(offer_of(f"c{number}", 1.0), "is avoided")
    assert declined.reason().endswith("; c5 is avoided; and 3 more)")
    declined.look(False, 3700.0)
    assert declined.reason() == ""


def test_records_are_told_apart_by_their_lengths() -> None:
    sound = b'13\n{"type": "A"}\n14\n{"type":  "B"}'
    assert [each["type"] for each in read_records(io.BytesIO(sound))] == ["A", "B"]
    for wrong in (b"<html>", b"0\n", b"-1\n{}", b"99999999999\n{}", b"20\n{}", b"2\n{]"):
        with pytest.raises(ValueError, match=r"\w"):
            list(read_records(io.BytesIO(wrong)))


# ---------------------------------------------------------------- faults


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeMesos]:
    with FakeMesos(tmp_path, masters=2) as made:
        yield made


def run(work: Callable[[], Awaitable[Any]]) -> Any:
    async def whole() -> Any:
        return await work()

    return asyncio.run(whole())


def framework_of(fake: FakeMesos) -> FakeMesosFramework:
    (found,) = fake.frameworks.values()
    return found


def task_of(fake: FakeMesos, id_: PlacementId) -> FakeTask:
    return framework_of(fake).tasks[id_]


async def runs(manager: MesosManager, id_: PlacementId) -> Placement | None:
    return next(
        (p for p in await find_placements(manager, id_) if p.holding is Holding.RUNNING), None
    )


def test_a_restarted_command_goes_on_with_its_framework_and_its_tasks(fake: FakeMesos) -> None:
    first = fake.manager()
    found = run(lambda: run_placement(fake, first, order(1)))
    run(first.close)
    run(lambda: until(lambda: no_subscription(fake), "the master notices"))
    assert run(lambda: find_placements(fake.manager(), found.id)) == [found]
    assert framework_of(fake).info["id"]["value"] == framework_of(fake).id
    assert run(lambda: find_placements(first, found.id)) == [found]  # in another event loop


async def no_subscription(fake: FakeMesos) -> bool:
    return framework_of(fake).events is None


def test_another_master_that_leads_is_followed(fake: FakeMesos) -> None:
    async def work() -> None:
        manager = fake.manager()
        found = await run_placement(fake, manager, order(1))
        fake.fail_over()
        assert await until(lambda: find_placements(manager, found.id), "the next master") == [found]
        assert await run_placement(fake, manager, order(2))

    run(work)


def test_tasks_whose_agents_a_new_master_does_not_know_yet_are_listed(fake: FakeMesos) -> None:
    async def work() -> None:
        manager = fake.manager()
        found = await run_placement(fake, manager, order(1))
        fake.fail_over(known_in_s=3600.0)
        assert await until(lambda: find_placements(manager, found.id), "the next master") == [found]

    run(work)


def test_a_silent_subscription_is_made_again(fake: FakeMesos) -> None:
    fake.knobs.beat_s = 0.1

    async def work() -> None:
        manager = fake.manager()
        found = await run_placement(fake, manager, order(1))
        before = fake.calls.count("SUBSCRIBE")
        fake.mute()

        async def is_new() -> bool:
            assert await find_placements(manager, found.id) == [found]
            return fake.calls.count("SUBSCRIBE") > before

        await until(is_new, "another subscription")
        assert await run_placement(fake, manager, order(2))

    run(work)


@pytest.mark.slow
def test_heartbeats_keep_a_subscription(fake: FakeMesos, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.knobs.beat_s, patience_s = 0.1, 3.0  # longer than a busy machine holds anybody up
    monkeypatch.setattr(mesos_session, "MISSED", patience_s / fake.knobs.beat_s)

    async def work() -> None:
        manager = fake.manager()
        await manager.observe()
        stream, until_ = framework_of(fake).stream, time.monotonic() + patience_s + 0.5
        while time.monotonic() < until_:
            await manager.observe()
            await asyncio.sleep(0.2)
        assert framework_of(fake).stream == stream

    run(work)


def test_a_subscription_that_another_one_has_replaced_is_made_again_at_once(
    fake: FakeMesos, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end has not been noticed yet when the next call is made."""
    closed: list[bool] = []

    async def work() -> None:
        first, second = fake.manager(), fake.manager()
        await first.observe()
        stream = first._stream
        assert stream is not None
        close = stream.close
        monkeypatch.setattr(stream, "is_broken", lambda: bool(closed))
        monkeypatch.setattr(stream, "close", lambda: (closed.append(True), close()))
        await second.observe()
        assert await first.observe() == []
        assert closed

    run(work)


@pytest.mark.parametrize("kind", ["ACCEPT", "DECLINE", "ACKNOWLEDGE", "RECONCILE", "REVIVE"])
def test_a_call_whose_answer_is_lost_makes_no_second_task(fake: FakeMesos, kind: str) -> None:
    async def work() -> None:
        manager = fake.manager()
        await manager.observe()
        fake.knobs.lost.append(kind)
        wanted = order(1)
        if kind == "REVIVE":
            with pytest.raises(Unreachable, match="Mesos does not answer at"):
                await manager.request(wanted)
        await manager.request(wanted)
        await until(lambda: runs(manager, wanted.id), "it runs")
        await until(lambda: all_told(fake), "all is acknowledged")
        assert not fake.knobs.lost
        assert len(framework_of(fake).tasks) == 1

    run(work)


async def all_told(fake: FakeMesos) -> bool:
    await asyncio.sleep(0)
    return all(task.unacknowledged is None for task in framework_of(fake).tasks.values())


def test_the_message_of_mesos_about_a_failed_call_is_shown(fake: FakeMesos) -> None:
    async def work() -> None:
        manager = fake.manager()
        await manager.observe()
        fake.knobs.failing = 1
        with pytest.raises(Unreachable, match="Mesos says: Master has not finished recovery"):
            await manager.observe()
        await manager.observe()

    run(work)


def test_a_task_on_an_offer_that_is_gone_has_ended_and_its_reason_is_told(
    fake: FakeMesos, capsys: pytest.CaptureFixture[str]
) -> None:
    async def work() -> None:
        manager, wanted = fake.manager(), order(1)
        await manager.request(wanted)
        await until(lambda: has_offers(fake), "offers")
        with fake.lock:
            framework_of(fake).offers.clear()

        async def is_over() -> bool:
            found = [p for p in await manager.observe() if p.id == wanted.id]
            return found[0].holding is Holding.ENDED

        await until(is_over, "the task is over")
        said = capsys.readouterr().err
        assert f"task {wanted.id} has ended as TASK_LOST: Task launched with invalid offers" in said
        assert "(REASON_INVALID_OFFERS)" in said

    run(work)


async def has_offers(fake: FakeMesos) -> bool:
    return len(framework_of(fake).offers) == len(fake.hosts)


def test_why_a_task_has_failed_is_told(fake: FakeMesos, capsys: pytest.CaptureFixture[str]) -> None:
    async def work() -> None:
        manager = fake.manager()
        found = await run_placement(fake, manager, order(1))
        task_of(fake, found.id).process.kill()

        async def is_gone() -> bool:
            return not await find_placements(manager, found.id)

        await until(is_gone, "the task is over")
        assert (
            f"holdfast: task {found.id} has ended as TASK_FAILED: Command terminated with signal 9 "
            "(REASON_COMMAND_EXECUTOR_FAILED)\n"
        ) in capsys.readouterr().err
        await until(lambda: all_told(fake), "the end is acknowledged")

    run(work)


@pytest.mark.slow
def test_offers_that_are_too_small_are_declined_until_a_larger_one_comes(fake: FakeMesos) -> None:
    async def work() -> None:
        manager = fake.manager()
        agents = fake.agents.values()
        for agent in agents:
            agent.memory_mb = 512.0
        wanted, lacks = order(1), list[str]()
        await manager.request(wanted)

        async def are_declined() -> bool:
            (found,) = await find_placements(manager, wanted.id)
            assert (found.holding, found.host) == (Holding.WAITING, "")
            lacks.append(found.why)
            return len(framework_of(fake).refused) == len(fake.hosts)

        await until(are_declined, "all offers are declined")
        assert re.fullmatch(
            r"no offer of Mesos since [0-9:]{8} UTC fits cpus 1, mem 1024 "
            r"\(agent0 offers cpus 8, mem 512; .*agent3 offers cpus 8, mem 512\)",
            lacks[-1],
        )
        wait_s = [until_ - time.monotonic() for until_ in framework_of(fake).refused.values()]
        assert all(0 < each <= 5 for each in wait_s)
        fake.agents["agent2"].memory_mb = 2048.0
        found = await until(lambda: runs(manager, wanted.id), "it runs")
        assert found.host == "agent2"

    run(work)


def test_nobody_is_held_up_by_a_job_that_waits_for_nothing(fake: FakeMesos) -> None:
    async def work() -> None:
        manager = fake.manager()
        await run_placement(fake, manager, order(1))

        async def are_declined() -> bool:
            await manager.observe()
            waits = [at - time.monotonic() for at in framework_of(fake).refused.values()]
            return sum(each > 3000 for each in waits) >= len(fake.hosts) - 1

        await until(are_declined, "offers are declined for long")
        await run_placement(fake, manager, order(2))

    run(work)


def test_maintenance_is_announced_until_it_is_called_off(fake: FakeMesos) -> None:
    async def work() -> None:
        manager = fake.manager()
        found = await run_placement(fake, manager, order(1))
        fake.drain(found.host, "", within_s=500)

        async def noticed() -> Placement | None:
            return next((p for p in await find_placements(manager, found.id) if p.notice), None)

        told = await until(noticed, "the notice")
        assert told.notice.reason == MAINTENANCE
        assert 400 < told.notice.until - time.monotonic() <= 500
        assert framework_of(fake).refused_inverse  # accepted
        assert await find_placements(manager, found.id) == [told]
        another = fake.manager()
        again = await until(lambda: noticed_by(another, found.id), "another adapter hears of it")
        assert abs(again.notice.until - told.notice.until) < 5
        elsewhere = await run_placement(fake, another, order(2, avoid=tuple(fake.hosts[2:])))
        assert elsewhere.host != found.host
        fake.call_off(found.host)

        async def is_off() -> bool:
            return all(p.notice is None for p in await find_placements(another, found.id))

        await until(is_off, "the notice is withdrawn")

    run(work)


async def noticed_by(manager: MesosManager, id_: PlacementId) -> Placement | None:
    return next((p for p in await find_placements(manager, id_) if p.notice), None)


def test_a_framework_that_mesos_has_removed_is_made_again(
    fake: FakeMesos, capsys: pytest.CaptureFixture[str]
) -> None:
    async def work() -> None:
        manager = fake.manager()
        found = await run_placement(fake, manager, order(1))
        old = framework_of(fake)
        with fake.lock:
            fake.remove(old)
        await until(lambda: empty(manager), "its task is over")
        said = capsys.readouterr().err
        assert f"Mesos has removed framework {old.id} and ended its tasks" in said
        await run_placement(fake, manager, order(2))
        assert framework_of(fake).id != old.id
        assert not await find_placements(manager, found.id)

    run(work)


async def empty(manager: MesosManager) -> bool:
    return all(p.holding is Holding.ENDED for p in await manager.observe())


def test_tasks_end_when_a_command_stays_away_for_longer_than_said(fake: FakeMesos) -> None:
    async def work() -> None:
        manager = fake.manager()
        found = await run_placement(fake, manager, order(1))
        framework_of(fake).info["failover_timeout"] = 0.0
        await manager.close()

        async def is_gone() -> bool:
            return not fake.processes(found.id)

        await until(is_gone, "its processes end")
        assert not await find_placements(manager, found.id)

    run(work)


def test_the_framework_ends_with_all_that_runs(fake: FakeMesos) -> None:
    async def work() -> None:
        found = await run_placement(fake, fake.manager(), order(1))
        session = fake.manager().session
        session.end()
        session.end()
        assert not fake.frameworks

        async def is_gone() -> bool:
            return not fake.processes(found.id)

        await until(is_gone, "its processes end")

    run(work)


def test_a_role_that_is_refused_is_said(fake: FakeMesos) -> None:
    fake.knobs.roles = ["gpu"]
    with pytest.raises(Refused, match=r"Role '\*' is not present in the master's --roles"):
        run(fake.manager().observe)


def test_a_task_without_its_order_says_where_it_looked(tmp_path: Path) -> None:
    place = [sys.executable, "-m", mesos_place.__name__, str(tmp_path), "hf-1"]
    ended = subprocess.run(place, check=False, timeout=60, capture_output=True, text=True)
    assert ended.returncode == 1
    assert f"{tmp_path} has no order hf-1: is it shared with" in ended.stderr
    (tmp_path / "orders").mkdir()
    (tmp_path / "orders" / "hf-1.order").write_text(json.dumps([]))
    ended = subprocess.run(place, check=False, timeout=60, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "order hf-1 cannot be read" in ended.stderr
