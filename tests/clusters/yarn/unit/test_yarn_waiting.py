"""A job on YARN asks for each missing node once, and says why YARN does not give it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.clusters.yarn import yarn_manager, yarn_waiting
from holdfast.clusters.yarn.yarn_manager import YarnManager
from holdfast.engine.core.fleet.placements import Holding, Placement, PlacementId
from holdfast.lab.contracts.cluster_contract import order, run_placement, until
from labs.fake_yarn import FakeYarn
from yarn_kit import run, runs, service_of, size, why_waits


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeYarn]:
    with FakeYarn(tmp_path) as made:
        yield made


# ---------------------------------------------------------------- raises


def raises(fake: FakeYarn) -> int:
    return sum(each.startswith("PUT") and "/components/" in each for each in fake.requests)


def test_orders_that_come_together_are_one_raise(fake: FakeYarn) -> None:
    async def work() -> None:
        manager = fake.manager()
        await run_placement(fake, manager, order(1))
        later = [order(number) for number in (2, 3, 4)]
        await asyncio.gather(*(manager.request(each) for each in later))
        assert (raises(fake), size(fake)) == (1, 4)
        for each in later:
            await until(lambda each=each: runs(manager, each.id), "all run")
        assert (raises(fake), size(fake)) == (1, 4)

    run(work)


def test_no_raise_replaces_one_that_is_outstanding(fake: FakeYarn) -> None:
    async def work() -> None:
        manager, orders = fake.manager(), [order(number) for number in (1, 2, 3)]
        await run_placement(fake, manager, orders[0])
        fake.full = True
        await manager.request(orders[1])
        await manager.request(orders[2])  # a raise would replace the first
        await manager.observe()
        assert (raises(fake), size(fake)) == (1, 2)
        fake.full = False
        for each in orders[1:]:
            await until(lambda each=each: runs(manager, each.id), "all run")
        assert (raises(fake), size(fake)) == (2, 3)

    run(work)


@pytest.mark.parametrize("lost", [True, False])
def test_a_raise_that_yarn_has_lost_is_repeated(
    fake: FakeYarn, monkeypatch: pytest.MonkeyPatch, *, lost: bool
) -> None:
    async def work() -> None:
        manager, second = fake.manager(), order(2)
        await run_placement(fake, manager, order(1))
        fake.full = True
        await manager.request(second)
        if lost:  # another raise has replaced it
            service_of(fake).asked = 0
            fake.full = False
        await manager.observe()
        assert raises(fake) == 1
        monkeypatch.setattr(yarn_manager, "AGAIN_S", 0.0)
        await manager.observe()
        assert raises(fake) == 1 + lost  # a full queue's request stays as it is
        fake.full = False
        await until(lambda: runs(manager, second.id), "it runs")

    run(work)


# ---------------------------------------------------------------- reasons to wait


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, within_s in (("UNREAD_S", 3.0), ("ASK_S", 0.0), ("STALE_S", 0.0)):
        monkeypatch.setattr(yarn_waiting, name, within_s)


@pytest.mark.parametrize(
    ("activities", "reason"),
    [
        ("activities-asked-first", ""),
        (
            "activities-full-queue",
            "YARN says of nm0: Queue does not have enough headroom for inner highest-priority "
            "request",
        ),
        (
            "activities-full-host",
            "YARN says of nm1: Node does not have sufficient resource for request, insufficient "
            "resources=[memory-mb], required=<memory:3072, vCores:1>, available=<memory:1928, vC",
        ),
        (
            "activities-constraint",  # a container of ours is on nm0
            "nm1 has room, but YARN still counts a container there that has ended (the host keeps "
            "the allocation tag 'node') and gives no other of this service: stop the job, and "
            "`holdfast resume {}/hf-fake` starts another service",
        ),
    ],
)
@pytest.mark.usefixtures("impatient")
def test_the_schedulers_reason_to_wait_is_told(
    fake: FakeYarn, activities: str, reason: str
) -> None:
    async def work() -> None:
        manager, fake.activities = fake.manager(), activities
        if activities == "activities-full-host":
            fake.described = ("nm1", "nm0")  # the second one has our container
        await run_placement(fake, manager, order(1))
        fake.full = True
        await manager.request(order(2))
        found = await why_waits(manager)
        assert found.startswith(reason.format(fake.folder))
        assert bool(found) == bool(reason)
        fake.full = False
        await until(lambda: all_run(manager), "both run")
        fake.full = True
        fake.activities = "activities-asked-first"
        await manager.request(order(3))
        assert not await why_waits(manager)  # the old reason is forgotten

    run(work)


async def all_run(manager: YarnManager) -> bool:
    return all(p.holding is Holding.RUNNING for p in await manager.observe())


@pytest.mark.usefixtures("impatient")
def test_a_master_that_waits_is_told(fake: FakeYarn) -> None:
    async def work() -> None:
        fake.start_s = 3600.0
        manager = fake.manager()
        await manager.request(order(1))
        found = await why_waits(manager)
        assert found.startswith(
            "the service's master is not up: Application is Activated, waiting for resources to be "
            "assigned for AM.  Details : AM Partition = <DEFAULT_PARTITION>"
        )

    run(work)


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_a_host_that_does_not_see_the_run_directory_is_named_and_left(fake: FakeYarn) -> None:
    async def work() -> None:
        fake.blind, fake.activities = {"nm0"}, "activities-asked-first"
        manager, first = fake.manager(), order(1)
        await manager.request(first)

        async def is_told() -> bool:
            return "nm0" in await why_waits(manager)

        await until(is_told, "the host is named")
        assert await why_waits(manager) == (
            "the container on nm0 has not read its order for 3 s: nm0 does not see the run "
            f"directory {fake.folder}/hf-fake, which must be on a file system that all nodes "
            "share, at the same path"
        )
        found = await until(lambda: runs(manager, first.id), "another host serves")
        assert found.host == "nm1"
        (output,) = fake.folder.glob("containers/*02/stdout.txt")
        assert output.read_text() == (
            f"holdfast: nm0 does not see the run directory {fake.folder}/hf-fake-elsewhere (No "
            "such file or directory): all nodes must share it, at the same path\n"
        )

    run(work)


@pytest.mark.usefixtures("impatient")
def test_containers_whose_command_fails_are_told(fake: FakeYarn) -> None:
    async def work() -> None:
        manager = fake.manager()
        await manager.create(1)
        service_of(fake).component["launch_command"] = "exit 127"
        await manager.request(order(1))

        async def is_told() -> bool:
            return "ended before they read an order" in await why_waits(manager)

        await until(is_told, "it is told")

    run(work)


# ---------------------------------------------------------------- reasons for an end


async def why_ended(fake: FakeYarn, manager: YarnManager, id_: PlacementId) -> str:
    """Kill the only container; return the reason that is given for its end."""
    service_of(fake).containers["node-0"].process.kill()

    async def ended() -> Placement | None:
        found = await manager.observe()
        return next((p for p in found if (p.id, p.holding) == (id_, Holding.ENDED)), None)

    return str((await until(ended, "it has ended")).why)


def test_a_container_that_had_too_much_memory_is_reported(fake: FakeYarn) -> None:
    async def work() -> None:
        manager, only = fake.manager(), order(1)
        await manager.create(1)
        service_of(fake).component["launch_command"] += " 1"  # MB
        await run_placement(fake, manager, only)
        note = fake.folder / "hf-fake" / "orders" / f"{only.id}.note"

        async def is_noted() -> bool:
            return note.exists()

        await until(is_noted, "the container finds out")
        said = await why_ended(fake, manager, only.id)
        assert re.fullmatch(
            r"its processes had \d+ MB, more than the 1 MB that its container asked for: if YARN "
            "has ended it for that, raise --memory",
            said,
        )

    run(work)


def test_memory_is_no_reason_for_an_end_on_a_host_that_is_lost() -> None:
    assert yarn_waiting.describe_end({"state": "RUNNING"}, "9 MB, more than the 8 MB")
    assert not yarn_waiting.describe_end({"state": "LOST"}, "9 MB, more than the 8 MB")
    assert not yarn_waiting.describe_end({"state": "RUNNING"}, "")


@pytest.mark.parametrize(
    ("report", "said"),
    [("", ""), ("1/1 local-dirs have errors", "YARN calls the host unhealthy (1/1 local-dirs ")],
)
def test_a_host_that_yarn_calls_unhealthy_is_reported(
    fake: FakeYarn, report: str, said: str
) -> None:
    async def work() -> None:
        manager, only = fake.manager(), order(1)
        found = await run_placement(fake, manager, only)
        if report:
            fake.unhealthy[found.host] = report
        why = await why_ended(fake, manager, only.id)
        assert why.startswith(said)
        assert bool(why) == bool(said)

    run(work)
