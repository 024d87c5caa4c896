"""The adapter of Kubernetes keeps the contract of all managers, against a fake of the API."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from httpx2 import ConnectError
from lightkube.resources.core_v1 import Pod

from holdfast.clusters.kubernetes import kubernetes_manager
from holdfast.clusters.kubernetes.kubernetes_manager import KubernetesManager
from holdfast.engine.core.fleet.placements import Placement, PlacementId
from holdfast.engine.fleet.cluster_manager import PlacementOrder
from holdfast.lab.contracts.cluster_contract import CLUSTER_CASES, Case, run_cluster_case, until
from labs.fake_kubernetes import FakeKubernetes
from labs.kubelet import UNMOUNTED, Kubelet
from labs.kubernetes_cluster import PREFIX, KubernetesCluster, write_kubeconfig


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubernetesCluster]:
    tmp_path = tmp_path_factory.mktemp("kubernetes")
    with FakeKubernetes() as api:

        def away(away: bool) -> None:
            (api.away.set if away else api.away.clear)()

        config = write_kubeconfig(tmp_path / "config", api.url)
        with KubernetesCluster(tmp_path, config, away) as found:
            yield found


@pytest.mark.slow_with("a_killed_host_loses_its_placement_only", "a_placement_runs_on_a_named_host")
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
    node = Kubelet(api, "node", "zone", tmp_path, {})
    with pytest.raises(ConnectError):
        node._look()
    assert api.pod["status"]["phase"] == "Pending"
    pod = node._pods["1"]
    node._watch("1", pod, api.pod)
    pod.popen.kill()
    pod.popen.wait()
    assert api.pod["status"]["phase"] == "Running"


def test_a_volume_that_a_node_cannot_mount_is_the_reason_to_wait(
    cluster: KubernetesCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pod stays in ContainerCreating; the events of the pod have the reason."""
    monkeypatch.setattr(kubernetes_manager, "START_S", 0.0)
    wanted = PlacementOrder(id=PlacementId(f"{PREFIX}mount"), command=("true",))

    async def scene() -> None:
        manager = cluster.manager(PREFIX)
        await manager.request(wanted)
        found = await until(lambda: reason_to_wait(manager, wanted.id), "a reason")
        assert found.stuck
        assert found.why == f"FailedMount on {found.host}: {UNMOUNTED}"
        await manager.release(found.id, found.handle)
        await manager.close()

    for host in cluster.hosts:
        cluster.break_mounts(host, True)
    try:
        asyncio.run(scene())
    finally:
        for host in cluster.hosts:
            cluster.break_mounts(host, False)


async def reason_to_wait(manager: KubernetesManager, id_: PlacementId) -> Placement | None:
    return next((p for p in await manager.observe() if p.id == id_ and p.why), None)


def test_a_role_of_an_earlier_release_that_has_no_right_to_events_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_manager, "START_S", 0.0)

    async def scene() -> None:
        manager = cluster.manager()
        wanted = PlacementOrder(id=PlacementId("hf-fake-1"), command=("true",))
        await manager.request(wanted)
        cluster.client.patch(Pod, wanted.id, {"spec": {"nodeName": "node0"}})
        (found,) = await manager.observe()
        assert (found.host, found.why) == ("node0", "")
        await manager.close()

    with FakeKubernetes() as api:
        api.forbidden.add("events")
        config = write_kubeconfig(tmp_path / "config", api.url)
        cluster = KubernetesCluster(tmp_path, config, lambda away: None)
        asyncio.run(scene())
