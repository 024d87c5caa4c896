"""Every cluster manager's adapter keeps the contract; here the fake one, and the local machine."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.clusters.local.fake_cluster import FakeCluster
from holdfast.engine.core.fleet.placements import PlacementId
from holdfast.lab.contracts.cluster_contract import (
    CLUSTER_CASES,
    Case,
    a_drained_host_is_announced,
    a_killed_host_loses_its_placement_only,
    a_manager_that_is_away_is_an_error,
    run_cluster_case,
)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[FakeCluster]:
    made = FakeCluster(tmp_path / "cluster")
    yield made
    made.close()


@pytest.mark.parametrize("case", CLUSTER_CASES, ids=lambda case: case.__name__)
def test_the_local_machine_keeps_the_contract(case: Case, cluster: FakeCluster) -> None:
    run_cluster_case(case, cluster)


class WithHelpers(FakeCluster):
    """Shows a helper at first, which ends after it has started the placement, as Ray's does."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._shown: Counter[str] = Counter()

    def processes(self, id_: PlacementId) -> list[int]:
        found = super().processes(id_)
        if not found or self._shown[id_] == 2:
            return found
        self._shown[id_] += 1
        helper = subprocess.Popen([sys.executable, "-c", "", str(id_)])
        helper.wait()
        return [helper.pid]


@pytest.mark.parametrize(
    "case",
    [
        a_manager_that_is_away_is_an_error,
        a_drained_host_is_announced,
        a_killed_host_loses_its_placement_only,
    ],
    ids=lambda case: case.__name__,
)
def test_a_helper_that_has_ended_is_not_taken_for_its_placement(case: Case, tmp_path: Path) -> None:
    cluster = WithHelpers(tmp_path / "cluster")
    try:
        run_cluster_case(case, cluster)
    finally:
        cluster.close()
