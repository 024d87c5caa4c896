"""A real Slurm on this machine: its adapter keeps the contract, and jobs survive what happens."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.testing.cluster_contract import CLUSTER_CASES, Case, run_cluster_case
from holdfast.testing.slurm_cluster import SlurmCluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(SlurmCluster.missing()), reason=SlurmCluster.missing()),
]


@pytest.fixture(scope="module", params=["further jobs", "an allocation"])
def slurm(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SlurmCluster]:
    with SlurmCluster(tmp_path_factory.mktemp("slurm"), hosts=7) as made:
        if request.param == "an allocation":
            made.allocate(3)
        yield made


@pytest.mark.parametrize("case", CLUSTER_CASES, ids=lambda case: case.__name__)
def test_slurm_keeps_the_contract(case: Case, slurm: SlurmCluster) -> None:
    run_cluster_case(case, slurm)
