"""Jobs in real containers on real kubelets: the image, its users, signals, volumes and memory."""

from __future__ import annotations

import base64
import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from lightkube.resources.core_v1 import Pod
from test_kubernetes_jobs import STEPS, undisturbed

from certificates import make_certificates
from conftest import SCRIPTS
from holdfast.clusters.kubernetes.kubernetes_manifests import COORDINATOR
from holdfast.engine.core.fleet.placements import PlacementId
from holdfast.engine.runtime.local_run import strike
from holdfast.engine.state.store.checkpoints import Checkpoints
from holdfast.engine.state.store.open import open_storage
from labs import container_node, containers, control_plane, jobset
from labs.container_node import program
from labs.container_run import (
    RUN_DIR,
    SIGNALS,
    ContainerCluster,
    ContainerRun,
    mount_shared,
    open_cluster,
)
from labs.containers import IMAGE, PAUSE, ImageStore
from labs.jobset import NAME, JobSetRun, open_jobset
from labs.kubernetes_cluster import NAMESPACE
from labs.kubernetes_run import STEP_S

MISSING = containers.missing() or container_node.missing() or control_plane.missing()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.clusters,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
]
__all__ = ["undisturbed"]  # a fixture

JOB = "localhost/job:1"
USER = 1000
LIMIT = "2Gi"
READ_ONLY = {
    "securityContext": {
        "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return archives of an image with scripts on that of the Dockerfile, and of a pause."""
    folder = tmp_path_factory.mktemp("images")
    with ImageStore(folder / "store") as store:
        store.build_base()
        store.build_holdfast()
        context = folder / "job"
        context.mkdir()
        for name in ("paced.py", "hungry.py"):
            shutil.copy(SCRIPTS / name, context)
        (context / "Dockerfile").write_text(f"FROM {IMAGE}\nCOPY *.py /workspace/\n")
        store.build(JOB, context)
        store.build_pause(program("pause"))
        archives = {JOB: folder / "job.tar", PAUSE: folder / "pause.tar"}
        for name, archive in archives.items():
            store.export(name, archive)
    return list(archives.values())


@pytest.fixture
def cluster(images: list[Path]) -> Iterator[ContainerCluster]:
    with (
        tempfile.TemporaryDirectory(prefix="hfk-") as folder,
        open_cluster(Path(folder), images, nodes=4) as found,
    ):
        yield found


def test_the_image_is_complete(cluster: ContainerCluster) -> None:
    """It runs as an ordinary user, has what pods need, and trains."""
    script = (
        "set -e; id -u; id -g; holdfast --version; python3 -c 'import lightkube, obstore';"
        "command -v python3; touch go;"
        "holdfast run --nproc 2 --virtual 4 --run-dir /workspace/run paced.py /workspace/go 20"
    )
    mounts, volumes = mount_shared()
    box = {"name": "box", "image": JOB, "command": ["sh", "-c", script], "volumeMounts": mounts}
    spec = {"containers": [box], "volumes": volumes, "restartPolicy": "Never"}
    about = {"name": "alone", "namespace": NAMESPACE}
    cluster.apply([{"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": spec}])

    def end() -> str:
        phase = cluster.client.get(Pod, "alone").to_dict()["status"]["phase"]
        return phase if phase in ("Succeeded", "Failed") else ""

    phase = cluster.until(end, "the end of the pod", STEP_S)
    found = cluster.kubectl("logs", "alone")
    assert phase == "Succeeded", found
    lines = found.splitlines()
    assert lines[:2] == [str(USER), str(USER)]
    assert re.fullmatch(r"holdfast \d+\.\d+\.\d+\S*", lines[2])
    assert lines[3] == "/opt/holdfast/bin/python3"
    assert any(re.fullmatch(r"[0-9a-f]{64}", line) for line in lines), found


def test_a_job_in_containers_survives(cluster: ContainerCluster, undisturbed: str) -> None:
    """A worker is killed, a node dies, a pod is deleted; the coordinator's pod is moved."""
    run = ContainerRun(cluster, JOB, "--nodes", "3", agent=READ_ONLY)
    run.launch("paced.py", "/signals/go", STEPS)
    run.until(lambda: len(run.serving()) == 3, STEP_S, "three nodes")
    agent = min(run.serving())
    shown = "id -u; hostname; df --output=size -B1 /dev/shm | tail -n 1; touch /usr/x 2>&1"
    user, host, shared, refused, *_ = run.ask(agent, "sh", "-c", f"{shown} || true").splitlines()
    assert (int(user), host) == (USER, agent)
    assert int(shared) > 2**30
    assert "Read-only file system" in refused

    words = ("holdfast", "status", "--run-dir", RUN_DIR, "--json")
    shown = json.loads(run.ask(run.coordinator(), *words))
    (worker,) = (each["pid"] for each in shown["workers"] if each["agent"] == agent)
    run.ask(agent, "sh", "-c", f"kill -KILL {worker}")
    run.until_said("SIGKILL")
    run.until(lambda: len(run.serving()) == 3, STEP_S, "its worker again")

    lost = max(run.serving())
    cluster.kill(run.host(lost))
    run.until_replaced(lost)

    deleted = min(run.serving())
    cluster.delete(deleted)
    run.until_replaced(deleted)

    coordinator = run.coordinator()
    cluster.delete(coordinator)
    run.until(lambda: run.coordinator() != coordinator, STEP_S, "another pod of the coordinator")
    run.until(lambda: len(run.serving()) == 3, STEP_S, "that all nodes are known again")
    run.go.touch()
    assert run.finish() == undisturbed


def test_a_machine_that_is_shut_down_is_left_before(
    cluster: ContainerCluster, undisturbed: str
) -> None:
    """Its kubelet ends pods within some seconds, as on preemptible machines of a cloud."""
    run = ContainerRun(cluster, JOB, "--nodes", "3")
    run.launch("paced.py", "/signals/go", STEPS)
    run.until(lambda: len(run.serving()) == 3, STEP_S, "three nodes")
    first = next(pod for pod in run.serving() if run.host(pod) != coordinator_host(run))
    host = run.host(first)
    cluster.shut_down(host)
    run.until_replaced(first)
    assert not [text for text in run.events() if "lost" in text], run.events()

    cluster.bring_back(host)
    coordinator = run.coordinator()
    cluster.shut_down(coordinator_host(run))
    run.until(lambda: run.coordinator() != coordinator, STEP_S, "a coordinator elsewhere")
    run.until(lambda: len(run.serving()) == 3, STEP_S, "three nodes again")
    run.go.touch()
    assert run.finish() == undisturbed


def coordinator_host(run: ContainerRun) -> str:
    """Return the host of the coordinator's pod."""
    found: str = run.cluster.pods(run.prefix, COORDINATOR)[run.coordinator()]["spec"]["nodeName"]
    return found


def test_kills_for_lack_of_memory_are_named(cluster: ContainerCluster, undisturbed: str) -> None:
    """In a control group of version 1 the kernel kills only the worker; its agent names the OOM.

    In version 2 all of a pod would end so. Here a test ends the rest of it; Kubernetes knows why.
    """
    run = ContainerRun(cluster, JOB, "--memory", LIMIT)
    run.launch("hungry.py", "/signals/go", STEPS)
    run.until(lambda: len(run.serving()) == 2, STEP_S, "two nodes")
    hungry = min(run.serving())
    worker = run.worker(hungry)
    draft = run.signals / "draft"
    draft.write_text(str(worker))
    draft.rename(run.signals / "go.eat")
    run.until_said(rf"worker {worker}\b.*lack of memory")
    run.until(lambda: len(run.serving()) == 2, STEP_S, "both nodes again")

    for pid in cluster.processes(PlacementId(hungry)):
        strike(pid)
    said = run.until_said(r"its agent is lost \(OOMKilled")
    assert "OOMKilled: agent needs more memory than its limit, which --memory sets" in said
    run.until(lambda: len(run.serving()) == 2, STEP_S, "two nodes again")
    run.go.touch()
    assert run.finish() == undisturbed


def test_process_1_saves_on_a_signal(cluster: ContainerCluster) -> None:
    """SIGINT to process 1 of the coordinator's pod, as the documents say, saves and ends the job.

    SIGTERM, with which a pod ends, ends process 1 at once: the Job starts another pod. All
    connections are encrypted, with certificates that a user other than root can read.
    """
    tls = cluster.folder / "tls"
    tls.mkdir()
    make_certificates(tls, f"*.{NAMESPACE}.svc")
    held = {path.name: base64.b64encode(path.read_bytes()).decode() for path in tls.iterdir()}
    about = {"name": "certificates", "namespace": NAMESPACE}
    cluster.apply([{"apiVersion": "v1", "kind": "Secret", "metadata": about, "data": held}])
    store = ("--store", "/signals/store", "--save-every", "1000")
    certificates = ("--tls-secret", "certificates")
    run = ContainerRun(cluster, JOB, *store, *certificates, tls="/holdfast/tls")
    run.launch("paced.py", "/signals/go", STEPS)
    run.until(lambda: len(run.serving()) == 2, STEP_S, "two nodes")
    first = run.coordinator()
    run.ask(first, "sh", "-c", "kill -TERM 1")
    run.until(lambda: run.coordinator() != first, STEP_S, "another pod of the coordinator")
    run.until(lambda: len(run.serving()) == 2, STEP_S, "that all nodes are known again")
    assert not saved(run)
    run.ask(run.coordinator(), "sh", "-c", "kill -INT 1")
    assert run.ended() == "Failed", run.log()
    assert run.run_dir.outcome() == "interrupted"
    assert "Traceback" not in run.log()
    assert saved(run)


def test_a_volume_that_the_user_may_not_write_to_is_named(cluster: ContainerCluster) -> None:
    """A volume of the kind hostPath stays root's, whatever fsGroup says."""
    run = ContainerRun(cluster, JOB)
    (cluster.folder / "volume").chmod(0o755)
    run.launch("paced.py", "/signals/go", STEPS)
    said = run.until_said("may not write to the volume at /holdfast")
    assert f"user {USER} of this pod" in said
    assert "fsGroup" in said


def saved(run: ContainerRun) -> list[int]:
    """Return the steps whose checkpoints a job has left."""
    return list(Checkpoints(open_storage(str(run.signals / "store"))).steps())


@pytest.mark.skipif(bool(jobset.missing()), reason=jobset.missing())
def test_a_jobset_loses_a_node_and_its_first_pod(
    cluster: ContainerCluster, undisturbed: str
) -> None:
    with open_jobset(cluster.folder / "jobset", cluster.config) as controller:
        run = JobSetRun(cluster, controller, JOB, f"paced.py {SIGNALS}/go {STEPS}")
        run.until_training()
        lost = run.pods("nodes")[0]
        cluster.delete(lost)
        run.until_training(lost)

        (first,) = run.pods("first")
        cluster.delete(first)
        run.until_training(first)
        (run.folders[SIGNALS] / "go").touch()
        cluster.until(run.ended, "the end of the JobSet", STEP_S)
    printed = re.findall("^[0-9a-f]{64}$", cluster.printed(NAME), re.MULTILINE)
    assert printed == [undisturbed]
