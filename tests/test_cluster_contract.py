"""Every cluster manager's adapter keeps the contract; here the fake one, and the local machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.testing.cluster_contract import CLUSTER_CASES, Case, run_cluster_case
from holdfast.testing.fake_cluster import FakeCluster


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[FakeCluster]:
    made = FakeCluster(tmp_path / "cluster")
    yield made
    made.close()


@pytest.mark.parametrize("case", CLUSTER_CASES, ids=lambda case: case.__name__)
def test_the_local_machine_keeps_the_contract(case: Case, cluster: FakeCluster) -> None:
    run_cluster_case(case, cluster)
