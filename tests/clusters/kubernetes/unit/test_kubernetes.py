"""A job's manifests for Kubernetes are valid, and what Kubernetes says is read as it is meant."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from lightkube.resources.batch_v1 import Job
from lightkube.resources.core_v1 import Node, Pod

from holdfast.cli.main import main
from holdfast.clusters.kubernetes import kubernetes_job, launch_k8s
from holdfast.clusters.kubernetes.kubernetes_manager import KubernetesManager, fill
from holdfast.clusters.kubernetes.kubernetes_manifests import POD_VARIABLE, TRIES_MAX
from holdfast.clusters.kubernetes.kubernetes_notices import (
    OVERDUE_AWAY_S,
    OVERDUE_S,
    Sightings,
    placement_of,
)
from holdfast.engine.core.errors import Refused, UserError
from holdfast.engine.core.fleet.placements import Holding, PlacementId
from holdfast.engine.fleet.cluster_manager import PlacementOrder
from holdfast.engine.net.channel import Channel, Gate
from holdfast.engine.net.secret import parse_secret
from holdfast.engine.runtime.rundir import write_json
from holdfast.engine.wire.job_document import decode_job
from holdfast.engine.wire.messages import DrainRequest, OrderReply
from labs.fake_kubernetes import FakeKubernetes
from labs.kubernetes_cluster import KubernetesCluster, write_kubeconfig

PATIENCE_S = 60.0  # bounds a hang
NOW = datetime(2026, 1, 1, tzinfo=timezone.utc)
KINDS = (
    "Secret ServiceAccount Role RoleBinding ClusterRole ClusterRoleBinding Service "
    "PodDisruptionBudget PersistentVolumeClaim PodTemplate Job"
).split()


def launch(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, dict[str, Any]]:
    """Return the manifests of a job by their kinds."""
    command = ["launch", "k8s", "--image", "team/train:7", "--nodes", "3", "--virtual", "8"]
    assert main([*command, *options, "train.py", "--lr", "1"]) == 0
    return {each["kind"]: each for each in yaml.safe_load_all(capsys.readouterr().out)}


@pytest.mark.slow_with("options0-1.37")
@pytest.mark.parametrize("version", ["1.26", "1.37"])
@pytest.mark.parametrize(
    "options",
    [[], ["--claim", "shared", "--gpus", "8", "--tls-secret", "certs", "--queue", "training"]],
)
def test_the_manifests_are_valid(
    version: str, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = launch(capsys, *options)
    assert list(found) == [kind for kind in KINDS if kind != "PersistentVolumeClaim" or not options]
    for each in found.values():
        kubernetes_validate.validate(each, version, strict=True)
    pod = {"apiVersion": "v1", "kind": "Pod", **found["PodTemplate"]["template"]}
    order = PlacementOrder(id=PlacementId("hf-1"), command=("a",), avoid=("n1", "n2"))
    kubernetes_validate.validate(fill(pod, order), version, strict=True)
    pod["spec"]["restartpolicy"] = "Never"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(pod, version, strict=True)


def test_a_coordinator_begins_with_what_was_launched(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "volume" / "run"
    found = launch(capsys, "--run-dir", str(run_dir), "--namespace", "ml", "--nodes-max", "5")
    held = found["Secret"]["stringData"]
    spec = decode_job(held["job.json"].encode())
    name = found["Job"]["metadata"]["name"]
    assert (spec.cwd, spec.script, spec.args) == ("/workspace", "train.py", ("--lr", "1"))
    assert (spec.nodes.min, spec.nodes.max) == (3, 6)
    for variable, key in (("SECRET", "secret"), ("JOB", "job.json"), ("PLAN", "fleet.json")):
        monkeypatch.setenv(f"HOLDFAST_{variable}", held[key])
    first = kubernetes_job.prepare(kubernetes_job.RunDir(run_dir))
    assert (first.nodes, first.nodes_max) == (5, 6)
    assert first.join == f"{name}.ml.svc:29600"
    assert kubernetes_job.RunDir(run_dir).secret() == parse_secret(held["secret"], "")
    assert not any(key in os.environ for key in ("HOLDFAST_SECRET", "HOLDFAST_JOB"))
    for variable, key in (("SECRET", "secret"), ("JOB", "job.json"), ("PLAN", "fleet.json")):
        monkeypatch.setenv(f"HOLDFAST_{variable}", held[key])
    assert kubernetes_job.prepare(kubernetes_job.RunDir(run_dir)) == first
    monkeypatch.delenv("HOLDFAST_PLAN", raising=False)
    monkeypatch.setenv("HOLDFAST_SECRET", held["secret"])
    with pytest.raises(UserError, match="no pod of a job's coordinator"):
        kubernetes_job.prepare(kubernetes_job.RunDir(run_dir))


@pytest.mark.slow
@pytest.mark.parametrize("of_another_job", [False, True])
def test_the_hook_of_a_pod_that_ends_orders_only_its_own_job(
    of_another_job: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both jobs have the same secret; the other one's node may have the same name."""
    found = launch(capsys)
    held = found["Secret"]["stringData"]
    (agent,) = found["PodTemplate"]["template"]["spec"]["containers"]
    command = agent["lifecycle"]["preStop"]["exec"]["command"]
    ordered: list[DrainRequest] = []

    async def answer(channel: Channel) -> None:
        ordered.append(await channel.receive(DrainRequest))
        channel.send(OrderReply(problem="it leaves already"))
        await channel.finish()

    async def end_a_pod() -> tuple[int, str]:
        job = "another" if of_another_job else decode_job(held["job.json"].encode()).job
        gate = Gate(parse_secret(held["secret"], ""), answer, print, job=job)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            gate.open(listener)
            join = f"127.0.0.1:{listener.getsockname()[1]}"
            hook = await asyncio.create_subprocess_exec(
                *(sys.executable, *command[1:3], join, *command[4:]),
                env={**os.environ, "HOLDFAST_SECRET": held["secret"], POD_VARIABLE: "pod-1"},
                stderr=asyncio.subprocess.PIPE,
            )
            _, told = await asyncio.wait_for(hook.communicate(), PATIENCE_S)
            gate.close()
        assert hook.returncode is not None
        return hook.returncode, told.decode()

    status, told = asyncio.run(end_a_pod())
    if of_another_job:
        assert (status, ordered) == (1, [])
        assert "job another is there" in told
    else:
        assert (status, [each.agent for each in ordered]) == (0, ["pod-1"])


def test_agents_are_made_from_the_users_template(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    spec = {
        "nodeSelector": {"pool": "gpu"},
        "imagePullSecrets": [{"name": "registry"}],
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "containers": [{"name": "agent", "volumeMounts": [{"name": "d", "mountPath": "/dev/shm"}]}],
        "volumes": [{"name": "d", "hostPath": {"path": "/dev/shm"}}],
    }
    path = tmp_path / "pod.yaml"
    path.write_text(yaml.safe_dump({"kind": "Pod", "spec": spec}))
    found = launch(capsys, "--pod", str(path), "--spread", "rack")
    made = found["PodTemplate"]["template"]["spec"]
    assert made["nodeSelector"] == {"pool": "gpu"}
    assert len(made["tolerations"]) == 3
    (agent,) = made["containers"]
    assert [each["mountPath"] for each in agent["volumeMounts"]] == ["/dev/shm", "/holdfast"]
    assert made["topologySpreadConstraints"][0]["topologyKey"] == "rack"
    coordinator = found["Job"]["spec"]["template"]["spec"]
    assert coordinator["imagePullSecrets"] == [{"name": "registry"}]
    assert "nodeSelector" not in coordinator


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--workdir", "here"], "--workdir here must be a full path"),
        (["--run-dir", "/run"], "--run-dir /run must be a path such as"),
        (["--tls", "certificates"], "--tls names a folder of this machine"),
        (["--store", "checkpoints"], "--store checkpoints must be a full path"),
        (["--pod", "nowhere.yaml"], "--pod nowhere.yaml cannot be read"),
        (["--nodes", "0"], "--nodes 0: at least 1"),
        (["--image", ""], "there is no image"),
        (["--restarts-max", "7"], "--restarts-max 7 has an effect only with --compat"),
    ],
)
def test_bad_options_are_refused(
    options: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "k8s", "--image", "i", *options, "train.py"]) == 2
    assert problem in capsys.readouterr().err


def test_a_template_that_is_none_is_refused(tmp_path: Path) -> None:
    for text in ("[1]", "spec: 3", "containers: []", "{"):
        (tmp_path / "pod.yaml").write_text(text)
        with pytest.raises(UserError, match=r"pod\.yaml"):
            launch_k8s.read_pod(tmp_path / "pod.yaml")


def test_manifests_are_delivered_as_asked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of them is closed to others, and `--apply` gives them to kubectl."""
    out, applied = tmp_path / "job.yaml", tmp_path / "applied"
    command = ["launch", "k8s", "--image", "i", "train.py"]
    assert main([*command[:4], "--out", str(out), "train.py"]) == 0
    assert oct(out.stat().st_mode)[-3:] == "600"
    assert main([*command[:4], "--out", str(out), "train.py"]) == 2
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(
        f'#!/bin/sh\ncase "$1" in apply) echo "# $@" >> {applied}; cat >> {applied} ;; esac\n'
    )
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert main([*command[:4], "--apply", "train.py"]) == 0
    first, secret, rest = applied.read_text().split("# apply -f -\n")
    assert (first, yaml.safe_load(secret)["kind"]) == ("", "Secret")
    assert len(list(yaml.safe_load_all(rest))) == 9  # one node needs no disruption budget
    kubectl.write_text("#!/bin/sh\nexit 3\n")
    assert main([*command[:4], "--apply", "train.py"]) == 2
    assert capsys.readouterr().out == ""


KUBECTL = """\
#!/bin/sh
echo "$@" >> {folder}/asked
case "$1" in
get) cat {folder}/job ;;
create) cat > {folder}/created; test ! -e {folder}/full ;;
esac
"""


def test_a_job_that_failed_is_resumed_by_another_of_its_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = launch(capsys)["Job"]
    name = made["metadata"]["name"]
    job = json.loads(json.dumps(made))
    job["metadata"] |= {"uid": "u", "resourceVersion": "7"}
    job["spec"] |= {"selector": {"matchLabels": {"controller-uid": "u"}}, "backoffLimit": 0}
    given = {"controller-uid": "u", "batch.kubernetes.io/job-name": name}
    job["spec"]["template"]["metadata"]["labels"] |= given
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(KUBECTL.format(folder=tmp_path))
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    command = ["launch", "k8s", "--resume", name]

    for ended, problem in (
        ("", "is running"),
        ("SuccessCriteriaMet", "has succeeded"),
        ("Complete", "has succeeded"),
    ):
        job["status"] = {"conditions": [{"type": ended, "status": "True"}] if ended else []}
        (tmp_path / "job").write_text(json.dumps(job))
        assert main(command) == 2
        assert f"the job {name} {problem}: there is nothing to resume" in capsys.readouterr().err
    assert not (tmp_path / "created").exists()

    for ended in ("FailureTarget", "Failed"):
        job["status"] = {"conditions": [{"type": ended, "status": "True"}]}
        (tmp_path / "job").write_text(json.dumps(job))
        assert main(command) == 0
        assert json.loads((tmp_path / "created").read_text()) == made
        asked = (tmp_path / "asked").read_text().splitlines()
        assert asked[-2].startswith(f"delete job {name} --namespace default --cascade=background")

    (tmp_path / "full").touch()
    assert main(command) == 2
    assert f"the Job is in {name}.json" in capsys.readouterr().err
    assert json.loads((tmp_path / f"{name}.json").read_text())["metadata"]["name"] == name


# ---------------------------------------------------------------- what Kubernetes says


def later(seconds: float) -> str:
    return (NOW + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def read(
    pod: dict[str, Any] | None = None,
    node: dict[str, Any] | None = None,
    words: str = "",
    phase: str = "Running",
    seen_s: float = 0.0,
    **status: Any,
) -> tuple[Holding, tuple[str, float | None] | None]:
    """Return how a pod on a node is read; parts of its metadata, and of the node's spec.

    It is read at 1000 s by our clock; all this was first seen `seen_s` earlier.
    """
    bears = {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "tolerationSeconds": 30}
    rent = {"key": "rent", "value": "due"}
    made = {
        "metadata": {"name": "hf-1", "uid": "u", **(pod or {})},
        "spec": {"containers": [], "nodeName": "n", "tolerations": [bears, rent]},
        "status": {"phase": phase, **status},
    }
    about = {"name": "n", "annotations": {"holdfast/reason": words} if words else {}}
    nodes: Any = {"n": Node.from_dict({"metadata": about, "spec": node or {}})}
    typed: Any = Pod.from_dict(made)
    sightings = Sightings()
    for now in (1000.0 - seen_s, 1000.0):
        sightings.begin(now)
        found = placement_of(typed, nodes, sightings)
    assert (found.id, found.handle, found.host) == ("hf-1", "u", "n")
    notice = found.notice
    return found.holding, None if notice is None else (notice.reason, notice.until)


def taint(key: str, effect: str, value: str = "") -> dict[str, Any]:
    return {"key": key, "effect": effect, "value": value, "timeAdded": later(0)}


def test_a_pod_is_read() -> None:
    assert read() == (Holding.RUNNING, None)
    assert read(phase="Pending") == (Holding.WAITING, None)
    assert read(phase="Unknown") == (Holding.RUNNING, None)
    assert read(phase="Succeeded") == read(phase="Failed") == (Holding.ENDED, None)
    # Another container goes on: the placement has yet to be released.
    assert read(containerStatuses=ended("Error")) == (Holding.RUNNING, None)


def waiting(reason: str, message: str = "") -> list[dict[str, Any]]:
    state = {"waiting": {"reason": reason, "message": message}}
    parts = {"image": "", "imageID": "", "ready": False, "restartCount": 0}
    return [{"name": "agent", "state": state, **parts}]


UNPLACED = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes: Insufficient cpu."}


@pytest.mark.parametrize(
    ("host", "status", "why"),
    [
        ("", {"conditions": [UNPLACED]}, "0/3 nodes: Insufficient cpu."),
        ("n", {"conditions": [{**UNPLACED, "status": "True"}]}, ""),
        ("n", {"containerStatuses": waiting("ContainerCreating")}, ""),
        ("n", {"containerStatuses": waiting("ImagePullBackOff", "Back-off pulling image \"i\"")},
         'ImagePullBackOff on n: Back-off pulling image "i"'),
        ("n", {"initContainerStatuses": waiting("CreateContainerConfigError")},
         "CreateContainerConfigError on n"),
        ("n", {"phase": "Running", "containerStatuses": waiting("CrashLoopBackOff")}, ""),
    ],
)  # fmt: skip
def test_what_a_pod_waits_for_is_kubernetes_own_reason(
    host: str, status: dict[str, Any], why: str
) -> None:
    made = {
        "metadata": {"name": "hf-1", "uid": "u"},
        "spec": {"containers": [], "nodeName": host},
        "status": {"phase": "Pending", **status},
    }
    typed: Any = Pod.from_dict(made)
    found = placement_of(typed, {}, Sightings())
    of_job = why.startswith("CreateContainerConfigError")
    assert (found.why, found.stuck) == (why, bool(host and why) and not of_job)


def ended(reason: str, container: str = "agent") -> list[dict[str, Any]]:
    state = {"terminated": {"exitCode": 137, "reason": reason}}
    parts = {"image": "", "imageID": "", "ready": False, "restartCount": 0}
    return [{"name": container, "state": state, **parts}]


LOW = "The node was low on resource: memory.\nContainer agent used 9Gi."


@pytest.mark.parametrize(
    ("status", "why"),
    [
        ({"containerStatuses": ended("Error")}, ""),
        ({"containerStatuses": ended("OOMKilled")},
         "OOMKilled: agent needs more memory than its limit, which --memory sets"),
        ({"containerStatuses": ended("OOMKilled", "logs")},
         "OOMKilled: logs needs more memory than its limit, which the template sets"),
        ({"reason": "Evicted", "message": LOW}, f"Evicted: {LOW}".replace("\n", " ")),
        ({"phase": "Running", "containerStatuses": ended("OOMKilled")}, ""),
    ],
)  # fmt: skip
def test_what_has_ended_a_pod_is_kubernetes_own_reason(status: dict[str, Any], why: str) -> None:
    made = {
        "metadata": {"name": "hf-1", "uid": "u"},
        "spec": {"containers": [], "nodeName": "n"},
        "status": {"phase": "Failed", **status},
    }
    typed: Any = Pod.from_dict(made)
    assert placement_of(typed, {}, Sightings()).why == why


def deleted(grace_s: int, clock_s: float = 0.0) -> dict[str, Any]:
    """Return metadata of a pod that is being deleted, in a cluster whose clock may be wrong."""
    return {
        "deletionTimestamp": later(grace_s + clock_s),
        "deletionGracePeriodSeconds": grace_s,
    }


@pytest.mark.parametrize("clock_s", [0.0, 3600.0, -3600.0])
def test_a_pod_that_is_deleted_goes_at_the_end_of_its_grace_period(clock_s: float) -> None:
    assert read(deleted(20, clock_s)) == (
        Holding.RUNNING,
        ("its pod is being deleted", 1020.0),
    )
    evicted = {"type": "DisruptionTarget", "status": "True", "message": "Eviction API: evicting"}
    assert read(deleted(20, clock_s), seen_s=5, conditions=[evicted])[1] == (
        "Eviction API: evicting",
        1015.0,
    )
    assert read(conditions=[evicted])[1] == ("Eviction API: evicting", None)
    assert read(conditions=[{**evicted, "status": "False"}])[1] is None


@pytest.mark.parametrize("clock_s", [0.0, 3600.0, -3600.0])
def test_a_pod_that_nobody_confirms_to_have_ended_has(clock_s: float) -> None:
    unreachable = {"taints": [taint("node.kubernetes.io/unreachable", "NoExecute")]}
    for node, overdue_s in (({}, OVERDUE_S), (unreachable, OVERDUE_AWAY_S)):
        pod = deleted(10, clock_s)
        assert read(pod, node, seen_s=9 + overdue_s)[0] is Holding.RUNNING
        assert read(pod, node, seen_s=11 + overdue_s)[0] is Holding.ENDED


def test_a_deletion_with_a_shorter_grace_period_is_a_new_one() -> None:
    sightings, pod = Sightings(), {"name": "hf-1", "uid": "u"}
    for now, grace_s, until in ((1000.0, 30, 1030.0), (1010.0, 5, 1015.0), (1012.0, 5, 1015.0)):
        made: Any = Pod.from_dict(
            {"metadata": {**pod, **deleted(grace_s)}, "spec": {"containers": []}}
        )
        sightings.begin(now)
        notice = placement_of(made, {}, sightings).notice
        assert notice is not None
        assert notice.until == until


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        ([taint("maintenance", "NoExecute", "fan")], ("maintenance=fan:NoExecute", 995.0)),
        ([taint("maintenance", "NoExecute")], ("maintenance:NoExecute", 995.0)),
        ([taint("node.kubernetes.io/unreachable", "NoExecute")], None),
        ([taint("node.kubernetes.io/not-ready", "NoExecute")], None),
        ([taint("node.kubernetes.io/unreachable", "NoSchedule")], None),
        ([taint("node.kubernetes.io/memory-pressure", "NoSchedule")], None),
        ([taint("ToBeDeletedByClusterAutoscaler", "NoSchedule", "17")],
         ("ToBeDeletedByClusterAutoscaler=17:NoSchedule", None)),
        ([taint("rent", "NoSchedule", "due")], None),
        ([taint("rent", "NoExecute", "due")], None),
        ([taint("rent", "NoSchedule", "paid")], ("rent=paid:NoSchedule", None)),
        ([taint("rent", "PreferNoSchedule", "paid")], None),
        ([taint("a", "NoSchedule"), taint("b", "NoExecute")], ("b:NoExecute", 995.0)),
    ],
)  # fmt: skip
def test_taints_that_are_not_tolerated_are_notices(
    node: list[dict[str, Any]], expected: tuple[str, float | None] | None
) -> None:
    if expected is not None:
        expected = (f"its node is tainted {expected[0]}", expected[1])
    assert read(node={"taints": node}, seen_s=5) == (Holding.RUNNING, expected)


def test_a_cordoned_node_is_to_be_left() -> None:
    taints = [taint("node.kubernetes.io/unschedulable", "NoSchedule")]
    cordon = {"unschedulable": True, "taints": taints}
    assert read(node=cordon)[1] == ("its node is cordoned", None)
    assert read(node=cordon, words="a new fan")[1] == ("its node is cordoned (a new fan)", None)


def test_the_most_urgent_notice_counts() -> None:
    node = {"unschedulable": True, "taints": [taint("a", "NoExecute")]}
    assert read(deleted(20), node)[1] == (
        "its node is tainted a:NoExecute",
        1000.0,
    )


# ---------------------------------------------------------------- the adapter


def test_an_adapter_without_rights_to_nodes_sees_pods(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scene() -> None:
        manager = cluster.manager()
        order = PlacementOrder(id=PlacementId("hf-fake-1"), command=("true",))
        await manager.request(order)
        for _ in range(2):
            assert [each.id for each in await manager.observe()] == [order.id]
        await manager.close()

    with FakeKubernetes() as api:
        api.forbidden.add("nodes")
        cluster = KubernetesCluster(
            tmp_path, write_kubeconfig(tmp_path / "config", api.url), lambda away: None
        )
        asyncio.run(scene())
    assert len(re.findall("nodes may not be listed", capsys.readouterr().err)) == 1


def test_a_pod_is_only_released_by_its_own_handle(tmp_path: Path) -> None:
    async def scene() -> None:
        manager = cluster.manager()
        await manager.request(PlacementOrder(id=PlacementId("hf-fake-1"), command=("true",)))
        (found,) = await manager.observe()
        await manager.release(found.id, "another")
        assert list(await manager.observe()) == [found]
        await manager.release(found.id, found.handle)
        assert list(await manager.observe()) == []
        await manager.release(found.id, found.handle)
        await manager.close()

    with FakeKubernetes() as api:
        config = write_kubeconfig(tmp_path / "config", api.url)
        cluster = KubernetesCluster(tmp_path, config, lambda away: None)
        asyncio.run(scene())


def test_an_image_without_the_client_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"holdfast\[kubernetes\]"):
        kubernetes_job.run(kubernetes_job.RunDir(tmp_path))


@pytest.mark.parametrize(
    ("outcome", "status", "tries"), [("interrupted", 1, 0), ("", 0, TRIES_MAX)]
)
def test_a_pod_of_a_job_that_is_over_ends_the_job_as_well(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    outcome: str,
    status: int,
    tries: int,
) -> None:
    """Kubernetes may not have answered the pod that ended it: further pods would follow."""
    run_dir = kubernetes_job.RunDir(tmp_path / "run")
    run_dir.path.mkdir()
    write_json(run_dir.result, {"outcome": outcome})
    found = launch(capsys, "--run-dir", str(run_dir.path))
    held = found["Secret"]["stringData"]
    for variable, key in (("SECRET", "secret"), ("JOB", "job.json"), ("PLAN", "fleet.json")):
        monkeypatch.setenv(f"HOLDFAST_{variable}", held[key])
    with FakeKubernetes() as api:
        config = write_kubeconfig(tmp_path / "config", api.url)
        monkeypatch.setenv("KUBECONFIG", str(config))
        cluster = KubernetesCluster(tmp_path, config, lambda away: None)
        cluster.apply([found["Job"]])
        assert kubernetes_job.run(run_dir) == status
        job = cluster.client.get(Job, found["Job"]["metadata"]["name"]).to_dict()
        assert job["spec"]["backoffLimit"] == tries


def test_an_order_of_a_job_that_is_gone_is_refused(tmp_path: Path) -> None:
    """Otherwise nothing would ever end its pod."""

    async def scene() -> None:
        manager = cluster.manager()
        await manager.close()
        other: KubernetesManager = cluster.manager()
        cluster.client.delete(Job, "hf-fake")
        order = PlacementOrder(id=PlacementId("hf-fake-1"), command=("true",))
        with pytest.raises(Refused, match="not found"):
            await other.request(order)
        await other.close()

    with FakeKubernetes() as api:
        config = write_kubeconfig(tmp_path / "config", api.url)
        cluster = KubernetesCluster(tmp_path, config, lambda away: None)
        asyncio.run(scene())


def test_a_job_that_failed_for_good_gets_no_more_pods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeKubernetes() as api:
        config = write_kubeconfig(tmp_path / "config", api.url)
        cluster = KubernetesCluster(tmp_path, config, lambda away: None)
        asyncio.run(cluster.manager().close())
        patch: Any = cluster.client.patch
        patch(Job, "hf-fake", {"spec": {"backoffLimit": 100}})
        monkeypatch.setenv("KUBECONFIG", str(config))
        asyncio.run(kubernetes_job.finish_job("default", "hf-fake-", 1))
        found = cluster.client.get(Job, "hf-fake").to_dict()
        assert found["spec"]["backoffLimit"] == 0
        asyncio.run(kubernetes_job.finish_job("default", "hf-none-", 1))  # says so, and that is all
