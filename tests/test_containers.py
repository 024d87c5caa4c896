"""Jobs in real containers: the image of the Dockerfile, its users, signals, volumes and memory."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from certificates import make_certificates
from conftest import SCRIPTS
from holdfast.core.errors import HoldfastError
from holdfast.net.tls import client_of
from holdfast.runtime.contact import job_status
from holdfast.runtime.rundir import RunDir
from holdfast.store.checkpoints import Checkpoints
from holdfast.store.open import open_storage
from labs import containers, control_plane
from labs.containers import IMAGE, ImageStore
from labs.control_plane import ControlPlane
from labs.kubernetes_cluster import NAMESPACE, KubernetesCluster
from labs.kubernetes_run import STEP_S, KubernetesRun
from labs.pod_container import TOGETHER, PodContainer, runc_words
from test_kubernetes_jobs import STEPS, undisturbed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.clusters,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(containers.missing()), reason=containers.missing()),
]
needs_binaries = pytest.mark.skipif(bool(control_plane.missing()), reason=control_plane.missing())
__all__ = ["undisturbed"]  # a fixture

JOB = "localhost/job"
RUN_DIR = "/holdfast/run"
USER = 1000
LIMIT = "2Gi"
COMMAND_S = 120.0
READ_ONLY = {
    "readOnlyRootFilesystem": True,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
}


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a file on an image made from that of the Dockerfile, with scripts."""
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
        store.open(JOB).save(folder / "job.json")
        yield folder / "job.json"


def run_inside(image: Path, folder: Path, script: str, **container: Any) -> str:
    """Return what a shell script prints in a container of its own."""
    pod = {"metadata": {"name": "alone", "uid": "alone"}, "spec": {}}
    made = containers.ContainerImage.load(image)
    box = PodContainer(folder, made, pod, container, lambda _: folder, lambda _: {})
    box.make(["sh", "-c", script], {"HOSTNAME": "alone"}, None)
    try:
        done = subprocess.run(
            box.run_words(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=COMMAND_S,
            text=True,
            check=False,
        )
    finally:
        box.remove()
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_image_is_complete(image: Path, tmp_path: Path) -> None:
    """It runs as an ordinary user, has what pods need, and trains."""
    found = run_inside(
        image,
        tmp_path / "box",
        "set -e; id -u; id -g; holdfast --version; python3 -c 'import lightkube, obstore';"
        "command -v python3; touch go;"
        "holdfast run --nproc 2 --virtual 4 --run-dir /workspace/run paced.py /workspace/go 20",
    )
    lines = found.splitlines()
    assert lines[:2] == [str(USER), str(USER)]
    assert re.fullmatch(r"holdfast \d+\.\d+\.\d+\S*", lines[2])
    assert lines[3] == "/opt/holdfast/bin/python3"
    assert any(re.fullmatch(r"[0-9a-f]{64}", line) for line in lines), found


class ContainerRun(KubernetesRun):
    """Launches a job whose pods are containers, and watches it as the documents say."""

    def __init__(self, cluster: KubernetesCluster, *options: str, **container: Any) -> None:
        self.signals = cluster.folder / "signals"
        self.signals.mkdir()
        self.signals.chmod(0o777)
        agent = {
            "name": "agent",
            "volumeMounts": [{"name": "signals", "mountPath": "/signals"}],
            **container,
        }
        volumes = [{"name": "signals", "hostPath": {"path": str(self.signals)}}]
        template = cluster.folder / "pod.yaml"
        template.write_text(json.dumps({"spec": {"containers": [agent], "volumes": volumes}}))
        words = ["--nodes", "2", "--drain-s", "10", "--image", JOB, "--workdir", "/workspace"]
        words += ["--run-dir", RUN_DIR, "--pod", str(template)]
        super().__init__(cluster, *words, *options)

    @property
    def go(self) -> Path:
        return self.signals / "go"

    def words(self, pod: str, *command: str) -> list[str]:
        """Return the command that runs another one in a pod's container, as `kubectl exec`."""
        found = {**self.cluster.pods(self.prefix), **self.cluster.pods(self.prefix, "coordinator")}
        uid = found[pod]["metadata"]["uid"]
        return [
            *runc_words(self.cluster.folder / "containers"),
            "exec",
            f"holdfast-{uid}",
            *command,
        ]

    def ask(self, pod: str, *command: str) -> str:
        done = subprocess.run(
            self.words(pod, *command), capture_output=True, text=True, timeout=60, check=False
        )
        if done.returncode:
            raise HoldfastError(done.stderr)
        return done.stdout

    def status(self) -> dict[str, Any]:
        """Ask from this machine, by a copy of the secret: the job's own is for its user only."""
        copy = self.cluster.folder / "copy"
        copy.mkdir(exist_ok=True)
        try:
            for path in (*self.run_dir.path.glob("*.json"), self.run_dir.path / "secret"):
                shutil.copy(path, copy)
        except OSError as error:
            raise HoldfastError(str(error)) from None
        return job_status(RunDir(copy), client_of(self.tls)).to_dict()

    def events(self) -> list[str]:
        if not self.run_dir.events.exists():
            return []
        lines = self.run_dir.events.read_text().splitlines()
        return [str(json.loads(line)["text"]) for line in lines]

    def worker(self, pod: str) -> int:
        """Return the number of a pod's worker."""
        return next(int(w["id"]) for w in self.status()["workers"] if w["agent"] == pod)

    def until_said(self, text: str) -> str:
        def said() -> str:
            lines = [*self.events(), *self.log().splitlines()]
            return next((line for line in lines if re.search(text, line)), "")

        found: str = self.until(said, STEP_S, text)
        return found


@pytest.fixture
def cluster(image: Path, tmp_path: Path) -> Iterator[KubernetesCluster]:
    with (
        ControlPlane(tmp_path) as plane,
        KubernetesCluster(tmp_path, plane.config, plane.away, nodes=5, image=image) as found,
    ):
        yield found


@needs_binaries
def test_a_job_in_containers_survives(cluster: KubernetesCluster, undisturbed: str) -> None:
    """A worker is killed, a node dies, a pod is deleted; the coordinator's pod is moved."""
    run = ContainerRun(cluster, "--nodes", "3", securityContext=READ_ONLY)
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


@needs_binaries
def test_a_kill_for_lack_of_memory_is_named(cluster: KubernetesCluster, undisturbed: str) -> None:
    """In a control group of version 1 the kernel kills only the worker; its agent names the OOM."""
    run = ContainerRun(cluster, "--memory", LIMIT)
    worker = begin_to_eat(run)
    run.until_said(rf"worker {worker}\b.*lack of memory")
    run.until(lambda: len(run.serving()) == 2, STEP_S, "two nodes again")
    run.go.touch()
    assert run.finish() == undisturbed


@needs_binaries
def test_a_pod_that_ends_for_lack_of_memory_is_named(
    cluster: KubernetesCluster, undisturbed: str
) -> None:
    """Where control groups are of version 2, nothing of the pod is left: Kubernetes says so.

    On this machine the kubelet of the test kit ends what the kernel has left.
    """
    run = ContainerRun(cluster, "--memory", LIMIT)
    (cluster.folder / "containers").mkdir(exist_ok=True)
    (cluster.folder / "containers" / TOGETHER).touch()
    begin_to_eat(run)
    said = run.until_said(r"its agent is lost \(OOMKilled")
    assert "OOMKilled: agent needs more memory than its limit, which --memory sets" in said
    run.until(lambda: len(run.serving()) == 2, STEP_S, "two nodes again")
    run.go.touch()
    assert run.finish() == undisturbed


def begin_to_eat(run: ContainerRun) -> int:
    """Launch a job whose scripts can use up memory, and have one do it; return its worker."""
    run.launch("hungry.py", "/signals/go", STEPS)
    run.until(lambda: len(run.serving()) == 2, STEP_S, "two nodes")
    worker = run.worker(min(run.serving()))
    draft = run.signals / "draft"
    draft.write_text(str(worker))
    draft.rename(run.signals / "go.eat")
    return worker


@needs_binaries
def test_process_1_saves_on_a_signal(cluster: KubernetesCluster) -> None:
    """SIGINT to process 1 of the coordinator's pod, as the documents say, saves and ends the job.

    SIGTERM, with which a pod ends, ends process 1 at once: the Job starts another pod. All
    connections are encrypted, with certificates that a user other than root can read.
    """
    tls = cluster.folder / "tls"
    tls.mkdir()
    make_certificates(tls, "127.0.0.1")
    held = {path.name: base64.b64encode(path.read_bytes()).decode() for path in tls.iterdir()}
    about = {"name": "certificates", "namespace": NAMESPACE}
    cluster.apply([{"apiVersion": "v1", "kind": "Secret", "metadata": about, "data": held}])
    store = ("--store", "/signals/store", "--save-every", "1000")
    run = ContainerRun(cluster, *store, "--tls-secret", "certificates")
    run.tls = tls
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


@needs_binaries
def test_a_volume_that_the_user_may_not_write_to_is_named(cluster: KubernetesCluster) -> None:
    """A template whose security context has no fsGroup takes Holdfast's own away."""
    template = cluster.folder / "coordinator.yaml"
    template.write_text(json.dumps({"spec": {"securityContext": {"runAsNonRoot": True}}}))
    run = ContainerRun(cluster, "--coordinator-pod", str(template))
    run.launch("paced.py", "/signals/go", STEPS)
    said = run.until_said("may not write to the volume at /holdfast")
    assert f"user {USER} of this pod" in said
    assert "fsGroup" in said


def saved(run: ContainerRun) -> list[int]:
    """Return the steps whose checkpoints a job has left."""
    return list(Checkpoints(open_storage(str(run.signals / "store"))).steps())
