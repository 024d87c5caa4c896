"""Defines the contract of every cluster manager's adapter, as cases to be run against a real one.

    for case in CLUSTER_CASES: run_cluster_case(case, harness)

A harness plays the operator and the misfortunes of one cluster with at least three idle hosts. A
new adapter passes all cases, and `assert_survives` with a real job (docs/clusters.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from holdfast.engine.core.domains import Domains
from holdfast.engine.core.errors import HoldfastError
from holdfast.engine.core.fleet.placements import Holding, Placement, PlacementId
from holdfast.engine.fleet.cluster_manager import ClusterManager, PlacementOrder
from holdfast.engine.runtime.local_run import LocalRun

PREFIX = "hf-fake-"
CASE_S = 90.0
LOOK_S = 0.1
MARK = "HOLDFAST_CONTRACT"
SLEEPER = (sys.executable, "-c", "import time; time.sleep(600)")


class ClusterHarness(Protocol):
    """Acts on one cluster in its manager's own way; hosts are named as listings name them.

    `away(True)` ends the manager's servers, as before an upgrade, and `away(False)` starts them
    again; processes on the hosts continue. `kill` ends a host with all its processes.
    """

    hosts: Sequence[str]
    #: The failure domains of each host.
    domains: Mapping[str, Domains]

    def manager(self, job: str = PREFIX) -> ClusterManager:
        """Make an adapter of the job whose ids begin with `job`."""
        ...

    def kill(self, host: str) -> None: ...

    def drain(self, host: str, reason: str) -> str | None:
        """Order the manager to announce a host's end; return its own reason, if it gives one."""
        ...

    def away(self, away: bool) -> None: ...

    def processes(self, id_: PlacementId) -> list[int]:
        """Return the processes of a placement, as this machine sees them."""
        ...


Case = Callable[[ClusterHarness, ClusterManager], Awaitable[None]]


def order(number: int, avoid: Sequence[str] = (), prefix: str = PREFIX) -> PlacementOrder:
    """Make an order for a process that sleeps; ids are new in every run of a case."""
    id_ = PlacementId(f"{prefix}{os.getpid()}-{time.monotonic_ns() // 1000:x}-{number}")
    return PlacementOrder(id=id_, command=SLEEPER, environment={MARK: "a b'c"}, avoid=tuple(avoid))


async def until(ready: Callable[[], Awaitable[Any]], what: str, within_s: float = CASE_S) -> Any:
    """Look until what `ready` returns is truthy, and return that; what fails is tried again."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            if found := await ready():
                return found
        except (HoldfastError, OSError) as error:
            what = f"{what.partition(' (')[0]} ({error})"
        assert time.monotonic() < deadline, f"not in {within_s:g} s: {what}"
        await asyncio.sleep(LOOK_S)


async def find_placements(manager: ClusterManager, id_: PlacementId) -> list[Placement]:
    """Return the placements of an id that have not ended.

    A manager may have no answer for a moment, as while a master is replaced: it is asked again.
    """

    async def look() -> tuple[Sequence[Placement]]:
        return (await manager.observe(),)

    (found,) = await until(look, "the manager lists the placements")
    return [p for p in found if p.id == id_ and p.holding is not Holding.ENDED]


async def run_placement(
    harness: ClusterHarness, manager: ClusterManager, wanted: PlacementOrder
) -> Placement:
    """Request a placement and wait until its command runs."""
    await manager.request(wanted)

    async def runs() -> Placement | None:
        found = [each for each in await manager.observe() if each.id == wanted.id]
        assert all(each.holding is not Holding.ENDED for each in found), f"{found} before it ran"
        up = found and found[0].holding is Holding.RUNNING and sleepers(harness, wanted.id)
        return found[0] if up else None

    found: Placement = await until(runs, f"{wanted.id} runs")
    return found


async def wait_until_gone(
    harness: ClusterHarness, manager: ClusterManager, id_: PlacementId
) -> None:
    async def is_gone() -> bool:
        return not await find_placements(manager, id_) and not harness.processes(id_)

    await until(is_gone, f"{id_} is gone")


def sleepers(harness: ClusterHarness, id_: PlacementId) -> list[int]:
    """Return the processes of a placement that run the ordered command itself.

    A manager's helpers carry the placement's mark too, and end once they have started the command.
    """
    found = list(harness.processes(id_))
    for pid in found:
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            found += [int(child) for child in children if int(child) not in found]
    return [pid for pid in found if _arguments(pid) == SLEEPER[1:]]


def _arguments(pid: int) -> tuple[str, ...]:
    with contextlib.suppress(OSError):
        return tuple(Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[1:-1])
    return ()


# ---------------------------------------------------------------- cases


async def a_placement_runs_on_a_named_host(h: ClusterHarness, manager: ClusterManager) -> None:
    found = await run_placement(h, manager, order(1))
    assert found.host in h.hosts
    assert found.notice is None
    assert found.domains == h.domains[found.host]


def _environment(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


async def the_ordered_environment_arrives(h: ClusterHarness, manager: ClusterManager) -> None:
    wanted = order(1)
    await run_placement(h, manager, wanted)
    assert any(f"{MARK}=a b'c".encode() in _environment(p) for p in sleepers(h, wanted.id))


async def what_finds_no_host_waits_or_is_refused(
    h: ClusterHarness, manager: ClusterManager
) -> None:
    wanted = order(1, avoid=h.hosts)
    with contextlib.suppress(HoldfastError, OSError):
        await manager.request(wanted)
    for found in await find_placements(manager, wanted.id):
        assert (found.holding, found.host) == (Holding.WAITING, "")
        await manager.release(wanted.id, found.handle)
    await wait_until_gone(h, manager, wanted.id)


async def hosts_to_avoid_are_avoided(h: ClusterHarness, manager: ClusterManager) -> None:
    found = await run_placement(h, manager, order(1, avoid=h.hosts[:-1]))
    assert found.host == h.hosts[-1]


async def two_placements_have_hosts_of_their_own(
    h: ClusterHarness, manager: ClusterManager
) -> None:
    first, second = [await run_placement(h, manager, order(number)) for number in (1, 2)]
    assert first.host != second.host


async def a_repeated_request_makes_no_second_placement(
    h: ClusterHarness, manager: ClusterManager
) -> None:
    wanted = order(1)
    await asyncio.gather(manager.request(wanted), manager.request(wanted))
    await run_placement(h, manager, wanted)
    again = h.manager()
    await again.request(wanted)
    assert len(await find_placements(again, wanted.id)) == 1
    await manager.release(wanted.id, (await find_placements(manager, wanted.id))[0].handle)
    await wait_until_gone(h, manager, wanted.id)


async def a_released_placement_ends(h: ClusterHarness, manager: ClusterManager) -> None:
    wanted = order(1)
    found = await run_placement(h, manager, wanted)
    other = await run_placement(h, manager, order(2))
    await manager.release(wanted.id, found.handle)
    await wait_until_gone(h, manager, wanted.id)
    await manager.release(wanted.id, found.handle)
    assert await find_placements(manager, other.id)


async def another_adapter_lists_the_same(h: ClusterHarness, manager: ClusterManager) -> None:
    found = await run_placement(h, manager, order(1))
    assert await find_placements(h.manager(), found.id) == [found]


async def other_jobs_are_not_listed(h: ClusterHarness, manager: ClusterManager) -> None:
    other = h.manager("hf-other-")
    wanted = order(1, prefix="hf-other-")
    await run_placement(h, other, wanted)
    assert not await find_placements(manager, wanted.id)
    await other.release(wanted.id, (await find_placements(other, wanted.id))[0].handle)
    await wait_until_gone(h, other, wanted.id)


async def what_has_ended_is_not_started_again(h: ClusterHarness, manager: ClusterManager) -> None:
    wanted = order(1)
    await run_placement(h, manager, wanted)
    for pid in h.processes(wanted.id):
        with contextlib.suppress(ProcessLookupError):  # a helper that has done its work
            os.kill(pid, 9)
    await wait_until_gone(h, manager, wanted.id)
    later = await run_placement(h, manager, order(2))
    assert not h.processes(wanted.id)
    assert await find_placements(manager, later.id)


async def a_killed_host_loses_its_placement_only(
    h: ClusterHarness, manager: ClusterManager
) -> None:
    first, second = [await run_placement(h, manager, order(number)) for number in (1, 2)]
    pids = sleepers(h, second.id)
    h.kill(first.host)
    await wait_until_gone(h, manager, first.id)
    assert sleepers(h, second.id) == pids
    assert await find_placements(manager, second.id)


async def a_drained_host_is_announced(h: ClusterHarness, manager: ClusterManager) -> None:
    first, second = [await run_placement(h, manager, order(number)) for number in (1, 2)]
    pids = sleepers(h, first.id)
    told = h.drain(first.host, "a new fan") or "a new fan"

    async def find_notice() -> Placement | None:
        return next(
            (p for p in await find_placements(manager, first.id) if p.notice is not None), None
        )

    found: Placement = await until(find_notice, "the notice")
    assert found.notice is not None
    assert told in found.notice.reason
    assert sleepers(h, first.id) == pids
    assert (await find_placements(manager, second.id))[0].notice is None


async def listen(manager: ClusterManager) -> list[Sequence[Placement]]:
    return [await manager.observe()]


async def a_manager_that_is_away_is_an_error(h: ClusterHarness, manager: ClusterManager) -> None:
    found = await run_placement(h, manager, order(1))
    pids = sleepers(h, found.id)
    h.away(True)
    try:
        for question in (manager.observe(), manager.request(order(2))):
            try:
                answer = await asyncio.wait_for(question, CASE_S)
            except (HoldfastError, OSError, asyncio.TimeoutError):
                continue
            raise AssertionError(f"a manager that is away has answered {answer!r}")
    finally:
        h.away(False)
    # The first answer after it holds: a node that is listed as ended is replaced at once.
    listed = await until(lambda: listen(manager), "the manager is back")
    back = [each for each in listed[0] if each.id == found.id]
    assert back == [found], f"{back} instead of {found}"
    assert sleepers(h, found.id) == pids


# The last ones change the cluster for good.
CLUSTER_CASES: tuple[Case, ...] = (
    a_placement_runs_on_a_named_host,
    the_ordered_environment_arrives,
    what_finds_no_host_waits_or_is_refused,
    hosts_to_avoid_are_avoided,
    two_placements_have_hosts_of_their_own,
    a_repeated_request_makes_no_second_placement,
    a_released_placement_ends,
    another_adapter_lists_the_same,
    other_jobs_are_not_listed,
    what_has_ended_is_not_started_again,
    a_manager_that_is_away_is_an_error,
    a_drained_host_is_announced,
    a_killed_host_loses_its_placement_only,
)


def run_cluster_case(case: Case, harness: ClusterHarness) -> None:
    """Run one case, and release the placements that it leaves."""

    async def run_whole() -> None:
        manager = harness.manager()
        try:
            await case(harness, manager)
        finally:
            for each in await manager.observe():
                await manager.release(each.id, each.handle)
            await until(lambda: _empty(manager), "everything is released")
            await manager.close()

    asyncio.run(run_whole())


async def _empty(manager: ClusterManager) -> bool:
    return all(p.holding is Holding.ENDED for p in await manager.observe())


# ---------------------------------------------------------------- a whole job


def assert_survives(
    run: LocalRun, harness: ClusterHarness, let_go: Callable[[], None], keep: str = ""
) -> None:
    """Kill one of a running job's hosts and drain another: both are replaced, and no step is lost.

    The job also learns the failure domains of its nodes from its manager.

    The job has three nodes of one worker and at least two hosts to spare; the host `keep` stays. It
    takes minutes, unless `let_go()` is called. The caller waits for its end, and compares the
    result.
    """
    manager = harness.manager("hf-")

    def placements() -> dict[str, str]:
        """Return the host of each serving agent; empty while any node does not answer."""
        try:
            hosts = {str(p.id): p.host for p in asyncio.run(_observe(manager))}
            serving = serving_nodes(run.status())
        except (HoldfastError, OSError, asyncio.TimeoutError):
            return {}
        return {name: hosts[name] for name in serving if name in hosts}

    def complete(without: Sequence[str]) -> dict[str, str] | None:
        found = placements()
        return found if len(found) == 3 and not set(without) & set(found) else None

    def is_labelled() -> bool:
        told = {agent["id"]: tuple(agent["domains"]) for agent in run.status()["agents"]}
        return all(told[name] == harness.domains[host] for name, host in first.items())

    first = run.until(lambda: complete([]), CASE_S, "three nodes")
    run.until(is_labelled, CASE_S, "the job knows its nodes' failure domains")
    killed, drained = [name for name in sorted(first) if first[name] != keep][:2]
    harness.kill(first[killed])
    second = run.until(lambda: complete([killed]), CASE_S, "a node in place of the killed one")
    assert first[killed] not in second.values(), "the failed host is not avoided"
    harness.drain(second[drained], "a new fan")
    third = run.until(
        lambda: complete([killed, drained]), CASE_S, "a node in place of the drained one"
    )
    assert second[drained] not in third.values(), "the drained host is used again"
    let_go()


def serving_nodes(status: dict[str, Any]) -> list[str]:
    """Return the agents that train, once each of them has the job's state: after its first step."""
    if not status["workers"] or max(w["step"] for w in status["workers"]) < 1:
        return []
    return sorted(a["id"] for a in status["agents"] if a["members"] and not a["silent"])


async def _observe(manager: ClusterManager) -> Sequence[Placement]:
    return await asyncio.wait_for(manager.observe(), CASE_S)
