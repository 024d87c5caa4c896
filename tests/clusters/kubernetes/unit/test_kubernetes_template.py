"""A user's pod templates are joined with what Holdfast needs in Kubernetes, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from holdfast.cli.main import main

LAUNCH = ["launch", "k8s", "--image", "i", "--drain-s", "30"]


def launch(
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    option: str,
    pod: dict[str, Any],
    *options: str,
) -> dict[str, dict[str, Any]]:
    """Launch with a template; return the manifests by their kinds."""
    path = folder / "pod.yaml"
    path.write_text(yaml.safe_dump(pod))
    assert main([*LAUNCH, "--gpus", "8", option, str(path), *options, "train.py"]) == 0
    return {each["kind"]: each for each in yaml.safe_load_all(capsys.readouterr().out)}


def test_the_coordinators_pod_is_shaped(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """So a ResourceQuota takes it, and PodSecurity's level `restricted`."""
    resources = {"requests": {"cpu": "1"}, "limits": {"cpu": "2"}}
    confined = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    container = {"name": "coordinator", "resources": resources, "securityContext": confined}
    spec = {
        "containers": [container],
        "nodeSelector": {"pool": "steady"},
        "priorityClassName": "high",
        "tolerations": [{"key": "steady", "operator": "Exists"}],
    }
    pod = {"metadata": {"annotations": {"a": "b"}, "labels": {"team": "x"}}, "spec": spec}
    job = launch(capsys, tmp_path, "--coordinator-pod", pod)["Job"]
    kubernetes_validate.validate(job, "1.37", strict=True)
    made = job["spec"]["template"]
    (found,) = made["spec"]["containers"]
    assert (found["resources"], found["securityContext"]) == (resources, confined)
    assert found["command"][:3] == ["python3", "-m", "holdfast.clusters.kubernetes.kubernetes_job"]
    assert made["metadata"]["annotations"] == {"a": "b"}
    assert {"team", "app.kubernetes.io/instance"} <= made["metadata"]["labels"].keys()
    assert made["spec"]["nodeSelector"] == {"pool": "steady"}
    assert made["spec"]["priorityClassName"] == "high"
    assert made["spec"]["tolerations"][0]["key"] == "steady"
    assert len(made["spec"]["tolerations"]) == 3


def test_a_coordinator_that_is_not_root_may_write_to_its_volume(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A template's own security context counts instead, also that for agents."""
    ours = {"fsGroup": 1000, "fsGroupChangePolicy": "OnRootMismatch"}
    theirs = {"runAsUser": 7, "fsGroup": 7}
    for option in ("--pod", "--coordinator-pod"):
        for given, expected in (({}, ours), ({"securityContext": theirs}, theirs)):
            found = launch(capsys, tmp_path, option, {"spec": given})
            assert found["Job"]["spec"]["template"]["spec"]["securityContext"] == expected
            agents = found["PodTemplate"]["template"]["spec"].get("securityContext")
            assert agents == (theirs if given and option == "--pod" else None)
            claimed = launch(capsys, tmp_path, option, {"spec": given}, "--claim", "ours")
            context = claimed["Job"]["spec"]["template"]["spec"].get("securityContext")
            assert context == (theirs if given else None), "the user's volume stays as it is"


@pytest.mark.parametrize("read_only", [True, False])
def test_a_container_that_is_read_only_has_a_place_for_temporary_files(
    read_only: bool, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    confined = {"readOnlyRootFilesystem": read_only}
    for name, option in (("agent", "--pod"), ("coordinator", "--coordinator-pod")):
        pod = {"spec": {"containers": [{"name": name, "securityContext": confined}]}}
        found = launch(capsys, tmp_path, option, pod)
        owner = found["PodTemplate"] if name == "agent" else found["Job"]["spec"]
        (made,) = owner["template"]["spec"]["containers"]
        assert ("/tmp" in [m["mountPath"] for m in made["volumeMounts"]]) == read_only


def test_what_a_template_adds_is_kept(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    agent = {
        "name": "agent",
        "image": None,
        "resources": {"limits": {"rdma/hca": "1"}},
        "lifecycle": {"postStart": {"exec": {"command": ["true"]}}},
        "env": [{"name": "NCCL_DEBUG", "value": "INFO"}],
        "volumeMounts": [{"name": "run", "mountPath": "/dev/shm/"}],
    }
    zone = "topology.kubernetes.io/zone"
    spread = {"maxSkew": 2, "topologyKey": zone, "whenUnsatisfiable": "ScheduleAnyway"}
    spec = {
        "hostNetwork": True,
        "affinity": None,
        "containers": [agent, {"name": "exporter", "image": "e"}],
        "terminationGracePeriodSeconds": 300,
        "topologySpreadConstraints": [{**spread, "labelSelector": {}}],
        "volumes": [{"name": "run", "emptyDir": {}}],
    }
    pod = launch(capsys, tmp_path, "--pod", {"spec": spec})["PodTemplate"]["template"]["spec"]
    found = next(each for each in pod["containers"] if each["name"] == "agent")
    assert found["resources"]["limits"] == {"rdma/hca": "1", "nvidia.com/gpu": "8"}
    assert found["lifecycle"].keys() == {"postStart", "preStop"}
    assert "NCCL_DEBUG" in [each["name"] for each in found["env"]]
    assert pod["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert pod["terminationGracePeriodSeconds"] == 300
    assert [each["maxSkew"] for each in pod["topologySpreadConstraints"]] == [2]
    names = [each["name"] for each in pod["volumes"]]
    assert sorted(names) == ["holdfast-run", "run"]


AGENT = "containers: [{name: agent, %s}]"


@pytest.mark.parametrize(
    ("option", "text", "problem"),
    [
        ("--pod", "metadata: {name: x}", "metadata.name is not for you to set"),
        ("--pod", "metadata: {generateName: x}", "metadata.generateName is not"),
        ("--pod", "metadata: {ownerReferences: []}", "metadata.ownerReferences is not"),
        ("--pod", "metadata: {labels: {app.kubernetes.io/name: x}}", "label app.kubernetes.io/"),
        ("--pod", "spec: {restartPolicy: Always}", "spec.restartPolicy Always"),
        ("--pod", "spec: {activeDeadlineSeconds: 60}", "spec.activeDeadlineSeconds: leave it out"),
        ("--pod", "spec: {nodeName: n}", "spec.nodeName: leave it out"),
        ("--pod", "spec: {terminationGracePeriodSeconds: 29}", "29 is less than --drain-s 30"),
        ("--pod", f"spec: {{{AGENT % 'command: [sh]'}}}", "command of the container agent"),
        ("--pod", f"spec: {{{AGENT % 'args: [x]'}}}", "args of the container agent"),
        ("--pod", f"spec: {{{AGENT % 'image: other'}}}", "image other of the container agent"),
        ("--pod", f"spec: {{{AGENT % 'lifecycle: {preStop: {sleep: {seconds: 1}}}'}}}", "preStop"),
        ("--pod", f"spec: {{{AGENT % 'env: [{name: HOLDFAST_POD}]'}}}", "HOLDFAST_POD of the"),
        ("--pod", "spec: {containers: [{image: i}]}", "a container has no name"),
        ("--pod", "spec: {containers: [agent]}", "has not the shape of a pod template"),
        ("--coordinator-pod", "spec: {containers: [{name: log}]}", "container log would keep"),
        ("--coordinator-pod", "spec: {serviceAccountName: x}", "spec.serviceAccountName"),
        ("--coordinator-pod", "spec: {shareProcessNamespace: true}", "a signal to process 1"),
        ("--coordinator-pod", "containers: []", "--coordinator-pod pod.yaml is no pod template"),
    ],
)
def test_what_would_take_ours_away_is_refused(
    option: str,
    text: str,
    problem: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pod.yaml").write_text(text)
    assert main([*LAUNCH, option, "pod.yaml", "train.py"]) == 2
    told = capsys.readouterr().err
    assert problem in told
    assert told.startswith(f"holdfast: {option} pod.yaml")
    assert len(told.splitlines()) == 1
