"""Runs one node of a cluster on this machine: a real kubelet, and the containerd that it uses.

The folder that HOLDFAST_NODE names has the programs, as `node/build.sh` leaves them. Each node has
its own containerd, with the images of its pods, and its own control group with all of its pods. By
this group it is killed, like a machine that loses its power.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from holdfast.clusters.kubernetes.kubernetes_manifests import ZONE
from labs import pod_network
from labs.commands import start_server
from labs.containers import PAUSE, unmount_below
from labs.etcd_cluster import free_ports
from labs.pod_network import PLUGINS, PodNetwork

FOLDER = "HOLDFAST_NODE"
PROGRAMS = "containerd containerd-shim-runc-v2 ctr kubelet coredns logind pause".split()
BUS = "dbus-daemon"
GROUPS = Path("/sys/fs/cgroup")
CPUSET = GROUPS / "cpuset"
UP_S = 60.0
OFF_S = 120.0
# What a kubelet has for all pods when its machine is shut down; the last of it is for the system's.
SHUTDOWN_S, CRITICAL_S = 20, 5
RENEWED_S = 4  # the length of a node's lease; the kubelet renews it four times as often


def missing() -> str:
    """Return the reason that no kubelet can run here, or an empty string."""
    folder = Path(os.environ.get(FOLDER, "/nowhere"))
    lacking = [name for name in PROGRAMS if not os.access(folder / name, os.X_OK)]
    if lacking:
        return f"{FOLDER} names no folder with {', '.join(lacking)}: `make kubernetes-lab` does"
    if not (CPUSET / "cpuset.cpus").exists():
        return "the control groups here are not of version 1, in which these nodes are made"
    if not shutil.which(BUS):
        return f"{BUS} is not installed"
    return pod_network.missing()


def program(name: str) -> Path:
    return Path(os.environ[FOLDER], name)


class ContainerNode:
    """Runs the kubelet of a node, and kills and freezes it. `images`: archives for its containerd.

    `config`: a kubeconfig file of an administrator. The control group is named after the network's
    folder, which no other cluster on this machine has.
    """

    def __init__(
        self,
        folder: Path,
        host: str,
        zone: str,
        network: PodNetwork,
        config: Path,
        images: Sequence[Path],
    ) -> None:
        self.folder = folder
        self._host = host
        self._zone = zone
        self._network = network
        self._config = config
        self._images = images
        self._group = f"{network.folder.name}-{host}"
        self._socket, self._bus = folder / "containerd.sock", folder / "bus"
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start its programs; the node becomes ready later."""
        self._make_groups()
        first = not self.folder.exists()
        if first:
            self.folder.mkdir(parents=True)
            (self.folder / "containerd.toml").write_text(self._describe_containerd())
            (self.folder / "kubelet.json").write_text(json.dumps(self._describe_kubelet()))
        self._bus.unlink(missing_ok=True)
        self._popen(BUS, "--session", "--nofork", "--nopidfile", f"--address=unix:path={self._bus}")
        wait_for(self._bus.exists, self.folder)
        self._popen("logind")
        self._popen("containerd", "--config", str(self.folder / "containerd.toml"))
        wait_for(lambda: not self._ctr("version").returncode, self.folder)
        if first:
            for archive in self._images:
                self._import(archive)
        self._popen(
            "kubelet",
            f"--config={self.folder / 'kubelet.json'}",
            f"--root-dir={self.folder / 'kubelet'}",
            f"--cert-dir={self.folder / 'certificates'}",
            f"--hostname-override={self._host}",
            f"--node-ip={self._network.machine}",
            f"--node-labels={ZONE}={self._zone}",
            f"--kubeconfig={self._config}",
        )

    def send(self, signal_: signal.Signals) -> None:
        """Stop the kubelet but not its pods, or continue it."""
        self._running["kubelet"].send_signal(signal_)

    def shut_down(self) -> None:
        """Shut the machine down: its kubelet ends the pods first, within SHUTDOWN_S."""
        self._running["logind"].send_signal(signal.SIGUSR1)
        self._running["logind"].wait(OFF_S)
        self.kill()

    def kill(self) -> None:
        """Kill all processes of the node."""
        for name in list(self._running):
            popen = self._running.pop(name)
            popen.kill()
            popen.wait()
        while found := self.processes():
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def remove(self) -> None:
        """Kill the node, and remove its mounts and control groups."""
        self.kill()
        unmount_below(self.folder)
        for root in self._roots():
            for path, _, _ in os.walk(root, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(path)

    def processes(self) -> list[int]:
        """Return the processes of the node, those of its pods among them."""
        found: set[int] = set()
        for path, _, _ in os.walk(GROUPS / "pids" / self._group):
            with contextlib.suppress(OSError):
                found |= {int(pid) for pid in Path(path, "cgroup.procs").read_text().split()}
        return sorted(found)

    # ------------------------------------------------------------ how it is made

    def _roots(self) -> list[Path]:
        return [each / self._group for each in GROUPS.iterdir() if not each.is_symlink()]

    def _make_groups(self) -> None:
        for root in self._roots():
            root.mkdir(exist_ok=True)
        for name in ("cpuset.cpus", "cpuset.mems"):
            (CPUSET / self._group / name).write_text((CPUSET / name).read_text())

    def _popen(self, name: str, *words: str) -> None:
        # The shims of containers stay in this group when containerd is killed.
        enter = f'echo $$ > "{GROUPS}/pids/{self._group}/cgroup.procs" && exec "$@"'
        path = f"{os.environ[FOLDER]}:{os.environ['PATH']}"
        more = {"PATH": path, "DBUS_SYSTEM_BUS_ADDRESS": f"unix:path={self._bus}"}
        command, log = ["sh", "-c", enter, "sh", name, *words], self.folder / f"{name}.log"
        self._running[name] = start_server(command, log, {**os.environ, **more})

    def _import(self, archive: Path) -> None:
        done = self._ctr("--namespace=k8s.io", "images", "import", str(archive))
        assert done.returncode == 0, done.stderr

    def _ctr(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [str(program("ctr")), f"--address={self._socket}", *words]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def _describe_containerd(self) -> str:
        return f"""\
version = 3
root = "{self.folder}/containerd"
state = "{self.folder}/state"
[grpc]
  address = "{self._socket}"
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "{PAUSE}"
[plugins."io.containerd.cri.v1.runtime"]
  netns_mounts_under_state_dir = true
  # Without the capability SYS_RESOURCE nobody may lower it.
  restrict_oom_score_adj = true
[plugins."io.containerd.cri.v1.runtime".cni]
  conf_dir = "{self._network.folder}/cni"
  bin_dirs = ["{PLUGINS}"]
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
"""

    def _describe_kubelet(self) -> dict[str, object]:
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "containerRuntimeEndpoint": f"unix://{self._socket}",
            "address": self._network.machine,
            "port": free_ports(1)[0],
            "readOnlyPort": 0,
            "healthzPort": 0,
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "clusterDNS": [self._network.dns],
            "clusterDomain": "cluster.local",
            "resolvConf": "",
            "failCgroupV1": False,
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self._group}",
            "enforceNodeAllocatable": [],
            "failSwapOn": False,
            "makeIPTablesUtilChains": False,
            # This machine's disk is not to decide which pods are evicted.
            "evictionHard": {"memory.available": "1Mi", "nodefs.available": "0%"},
            "imageGCHighThresholdPercent": 100,
            "nodeLeaseDurationSeconds": RENEWED_S,
            "nodeStatusUpdateFrequency": "2s",
            "shutdownGracePeriod": f"{SHUTDOWN_S}s",
            "shutdownGracePeriodCriticalPods": f"{CRITICAL_S}s",
            "podLogsDir": str(self.folder / "logs"),
            "volumePluginDir": str(self.folder / "plugins"),
        }


def wait_for(ready: Callable[[], bool], folder: Path) -> None:
    deadline = time.monotonic() + UP_S
    while not ready():
        assert time.monotonic() < deadline, f"a node does not start; see {folder}"
        time.sleep(0.1)
