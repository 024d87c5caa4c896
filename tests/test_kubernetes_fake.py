"""The adapter of Kubernetes keeps the contract of all managers, against a fake of the API."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.testing.cluster_contract import CLUSTER_CASES, Case, run_cluster_case
from labs.fake_kubernetes import FakeKubernetes
from labs.kubernetes_cluster import KubernetesCluster, write_kubeconfig


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubernetesCluster]:
    tmp_path = tmp_path_factory.mktemp("kubernetes")
    with FakeKubernetes() as api:

        def away(away: bool) -> None:
            (api.away.set if away else api.away.clear)()

        config = write_kubeconfig(tmp_path / "config", api.url)
        with KubernetesCluster(tmp_path, config, away) as found:
            yield found


@pytest.mark.parametrize("case", CLUSTER_CASES, ids=lambda case: case.__name__)
def test_kubernetes_keeps_the_contract(case: Case, cluster: KubernetesCluster) -> None:
    run_cluster_case(case, cluster)
