"""The adapter of Kubernetes keeps the contract of all managers, against a fake of the API."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from httpx2 import ConnectError
from lightkube.resources.core_v1 import Pod

from holdfast.testing.cluster_contract import CLUSTER_CASES, Case, run_cluster_case
from labs.fake_kubernetes import FakeKubernetes
from labs.kubelet import Kubelet
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


class ForgetfulApi:
    """Has one pod, and does not answer the first report that the pod runs."""

    def __init__(self) -> None:
        self.fails = 1
        metadata = {"uid": "1", "name": "pod", "namespace": "default"}
        self.pod = {
            "metadata": metadata,
            "spec": {"containers": [{"name": "main", "command": ["sleep", "60"]}]},
            "status": {"phase": "Pending"},
        }

    def list(self, *_: Any, **__: Any) -> list[Any]:
        return [Pod.from_dict(self.pod)]

    def create(self, *_: Any, **__: Any) -> None:
        raise AssertionError("the node is registered")

    def patch(self, kind: Any, name: str, change: dict[str, Any], **_: Any) -> None:
        if kind is Pod.Status and self.fails:
            self.fails -= 1
            raise ConnectError("the API is away")
        if kind is Pod.Status:
            self.pod["status"] = change["status"]


def test_a_kubelet_says_again_that_a_pod_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", "none")
    api: Any = ForgetfulApi()
    node = Kubelet(api, "node", "zone", tmp_path)
    with pytest.raises(ConnectError):
        node._look()
    assert api.pod["status"]["phase"] == "Pending"
    pod = node._pods["1"]
    node._watch("1", pod, api.pod)
    pod.popen.kill()
    pod.popen.wait()
    assert api.pod["status"]["phase"] == "Running"
