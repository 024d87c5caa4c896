"""A real ResourceManager keeps the contract, and jobs on it survive what operators do.

A lab starts it from Hadoop's jars, or HOLDFAST_YARN_RM names it (docs/yarn.md).
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from holdfast.lab.contracts.cluster_contract import (
    CLUSTER_CASES,
    Case,
    a_drained_host_is_announced,
    a_killed_host_loses_its_placement_only,
    a_manager_that_is_away_is_an_error,
    run_cluster_case,
    two_placements_have_hosts_of_their_own,
)
from labs.cluster_run import (
    ClusterRun,
    assert_ends_with_its_service,
    environment_of,
    host_of,
    run_undisturbed,
)
from labs.yarn_cluster import RM_VARIABLE, YarnCluster
from labs.yarn_lab import YarnLab, missing

pytestmark = [pytest.mark.slow, pytest.mark.clusters, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return run_undisturbed(tmp_path_factory.mktemp("undisturbed"))


NEEDS_AN_OPERATOR = (
    a_manager_that_is_away_is_an_error,
    a_drained_host_is_announced,
    a_killed_host_loses_its_placement_only,
)


@pytest.fixture
def real_yarn(tmp_path: Path) -> Iterator[YarnCluster]:
    """Start a lab, or take the ResourceManager that is named."""
    named, why = RM_VARIABLE in os.environ, missing()
    if why and not named:
        pytest.skip(f"{why}, and {RM_VARIABLE} names no ResourceManager")
    with contextlib.ExitStack() as stack:
        lab = None if named else stack.enter_context(YarnLab(tmp_path / "yarn"))
        yield stack.enter_context(YarnCluster(lab))


# Each case that an operator takes part in has a lab of its own: a ResourceManager of 3.4.2 that was
# started again does not forget a container's tag, and does not report a lost host to a master.
IN_ONE_LAB = [case for case in CLUSTER_CASES if case not in NEEDS_AN_OPERATOR]


@pytest.mark.parametrize(
    "cases",
    [IN_ONE_LAB, *([case] for case in NEEDS_AN_OPERATOR)],
    ids=["the others", *(case.__name__ for case in NEEDS_AN_OPERATOR)],
)
def test_a_real_resource_manager_keeps_the_contract(
    real_yarn: YarnCluster, cases: Sequence[Case]
) -> None:
    for case in cases:
        if case in NEEDS_AN_OPERATOR and not real_yarn.has_operator():
            pytest.skip("only a lab's hosts and manager can be ended")
        if len(real_yarn.hosts) > 1 or case is not two_placements_have_hosts_of_their_own:
            run_cluster_case(case, real_yarn)


def test_a_job_survives_a_lost_container_on_a_real_resource_manager(
    real_yarn: YarnCluster, undisturbed: str
) -> None:
    asked = ("yarn", "--rm", real_yarn.url)
    job = ClusterRun(real_yarn.folder, asked, "--nodes", "2", "--wait-for-nodes")
    with job.run:
        first = job.serving(2)
        job.lose(first[0])
        job.serving(2, without=first[:1])
        assert job.digest() == undisturbed
    shutil.rmtree(real_yarn.folder)


def test_a_job_survives_the_loss_of_its_masters_host(
    real_yarn: YarnCluster, undisturbed: str
) -> None:
    if not real_yarn.has_operator():
        pytest.skip("only a lab's hosts can be ended")
    lab = real_yarn.lab
    job = ClusterRun(real_yarn.folder, ("yarn", "--rm", real_yarn.url), "--nodes", "2")
    with job.run:
        job.serving(2)
        host = environment_of(lab.master())["NM_HOST"]
        lost = [name for name in job.serving(2) if host_of(name) == host]
        lab.kill(host)
        job.serving(2, without=lost)
        assert job.digest() == undisturbed
    shutil.rmtree(real_yarn.folder)


def test_an_operator_ends_a_job_on_a_real_resource_manager(
    real_yarn: YarnCluster, undisturbed: str
) -> None:
    folder = real_yarn.folder / "a b,ü%&;(#!"  # a name that YARN does not change
    folder.mkdir()
    asked = ("yarn", "--rm", real_yarn.url)
    assert_ends_with_its_service(folder, asked, undisturbed, real_yarn.stop)
    shutil.rmtree(real_yarn.folder)
