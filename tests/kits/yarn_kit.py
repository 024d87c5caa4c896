"""Helpers of the tests of YARN's adapter against its fake."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from holdfast.clusters.yarn.yarn_manager import YarnManager
from holdfast.engine.core.fleet.placements import Holding, Placement, PlacementId
from holdfast.lab.contracts.cluster_contract import find_placements
from labs.fake_yarn import FakeService, FakeYarn

JOB = "hf-fake"


def run(work: Callable[[], Awaitable[Any]]) -> Any:
    async def whole() -> Any:
        return await work()

    return asyncio.run(whole())


def service_of(fake: FakeYarn) -> FakeService:
    return fake.services[JOB]


def size(fake: FakeYarn) -> int:
    return int(service_of(fake).component["number_of_containers"])


async def runs(manager: YarnManager, id_: PlacementId) -> Placement | None:
    return next(
        (p for p in await find_placements(manager, id_) if p.holding is Holding.RUNNING), None
    )


async def why_waits(manager: YarnManager) -> str:
    (found,) = [p for p in await manager.observe() if p.holding is Holding.WAITING]
    return found.why
