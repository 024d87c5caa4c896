"""Runs a real Kubernetes control plane on this machine for tests: its servers, no nodes.

The binaries are found as envtest finds them: in the folder KUBEBUILDER_ASSETS, or in the path in a
variable like TEST_ASSET_KUBE_APISERVER; then on PATH. docs/kubernetes.md explains how to get them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import httpx2

from certificates import make_certificates
from labs.commands import start_server
from labs.etcd_cluster import free_ports
from labs.kubernetes_cluster import write_kubeconfig
from labs.pod_network import API_PORT, PodNetwork

HOST = "127.0.0.1"
UP_S = 60.0
GRACE_S = 8  # after this long without a renewed lease a node counts as unreachable
TOKEN = "an-operator"
BINARIES = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
ASSETS = "KUBEBUILDER_ASSETS"
NO_ACCOUNTS = "--disable-admission-plugins=ServiceAccount"


def find_binary(name: str) -> str:
    """Return the path of a program of the control plane; empty if there is none."""
    exact = os.environ.get(f"TEST_ASSET_{name.upper().replace('-', '_')}", "")
    folder = os.environ.get(ASSETS, "")
    for path in (exact, str(Path(folder, name)) if folder else "", shutil.which(name) or ""):
        if path and os.access(path, os.X_OK):
            return path
    return ""


def missing() -> str:
    """Return the reason why there can be no control plane here; empty if there can."""
    lacking = [name for name in BINARIES if not find_binary(name)]
    where = f"docs/kubernetes.md says how to get them; {ASSETS} says where they are"
    return f"no {', '.join(lacking)}: {where}" if lacking else ""


class ControlPlane:
    """Runs etcd and the servers of Kubernetes, while used as a context manager.

    `config`: a kubeconfig file of an administrator. With a network for pods the API has its address
    there, and pods get the tokens of their service accounts from real kubelets.
    """

    def __init__(self, folder: Path, network: PodNetwork | None = None) -> None:
        self.folder = folder
        self._network = network
        self.config = folder / "kubeconfig"
        self._commands: dict[str, list[str]] = {}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._url = ""

    def __enter__(self) -> ControlPlane:
        self._plan(*free_ports(5))
        self._start("etcd")
        self.away(False)
        return self

    def __exit__(self, *exc: object) -> None:
        for name in reversed(list(self._running)):
            self._stop(name)

    def version(self) -> str:
        return str(self._get("/version")["gitVersion"])

    def away(self, away: bool) -> None:
        """End the servers of Kubernetes, as before an upgrade, or start them; wait until done."""
        for name in BINARIES[1:]:
            if away:
                self._stop(name)
            else:
                self._start(name)
                if name == BINARIES[1]:
                    self._until_ready()

    def _plan(self, etcd: int, peer: int, api: int, manager: int, scheduler: int) -> None:
        folder = self.folder
        key, public, tokens = (folder / name for name in ("sa.key", "sa.pub", "tokens.csv"))
        for words in (
            ["genrsa", "-out", str(key), "2048"],
            ["rsa", "-in", str(key), "-pubout", "-out", str(public)],
        ):
            subprocess.run(["openssl", *words], check=True, capture_output=True)
        tokens.write_text(f"{TOKEN},operator,1,system:masters\n")
        certificates = folder / "certs"
        certificates.mkdir()
        host, services, identity, authority = HOST, "10.0.0.0/24", [NO_ACCOUNTS], []
        if self._network is not None:
            host, api, services = self._network.api, API_PORT, str(self._network.services)
            identity = ["--kubelet-preferred-address-types=InternalIP"]
            authority = [f"--root-ca-file={certificates / 'ca.crt'}"]
        self._url = f"https://{host}:{api}"
        # A certificate that the server makes is new, so a node whose clock is behind refuses it.
        make_certificates(certificates, host)
        write_kubeconfig(self.config, self._url, TOKEN, certificates / "ca.crt")
        store = f"http://{HOST}:{etcd}"
        self._commands = {
            "etcd": [
                *("--data-dir", str(folder / "etcd"), "--listen-client-urls", store),
                *("--advertise-client-urls", store, "--unsafe-no-fsync"),
                *("--listen-peer-urls", f"http://{HOST}:{peer}"),
                *("--initial-advertise-peer-urls", f"http://{HOST}:{peer}"),
                *("--initial-cluster", f"default=http://{HOST}:{peer}"),
            ],
            "kube-apiserver": [
                *(f"--etcd-servers={store}", f"--secure-port={api}", f"--bind-address={host}"),
                *("--service-account-issuer=https://kubernetes.test", "--authorization-mode=RBAC"),
                *(f"--service-account-signing-key-file={key}", f"--token-auth-file={tokens}"),
                *(f"--service-account-key-file={public}", f"--cert-dir={certificates}"),
                f"--tls-cert-file={certificates / 'tls.crt'}",
                f"--tls-private-key-file={certificates / 'tls.key'}",
                *(f"--service-cluster-ip-range={services}", "--allow-privileged=true", *identity),
            ],
            "kube-controller-manager": [
                *(f"--kubeconfig={self.config}", "--leader-elect=false"),
                *(f"--node-monitor-grace-period={GRACE_S}s", "--node-monitor-period=1s"),
                *(f"--service-account-private-key-file={key}", f"--secure-port={manager}"),
                *(f"--cert-dir={certificates}", *authority),
            ],
            "kube-scheduler": [
                *(f"--kubeconfig={self.config}", "--leader-elect=false"),
                *(f"--secure-port={scheduler}", f"--cert-dir={certificates}"),
            ],
        }

    def _start(self, name: str) -> None:
        command = [find_binary(name), *self._commands[name]]
        self._running[name] = start_server(command, self.folder / f"{name}.log")

    def _stop(self, name: str) -> None:
        popen = self._running.pop(name, None)
        if popen is not None:
            popen.kill()
            popen.wait()

    def _get(self, path: str) -> dict[str, object]:
        about = {"Authorization": f"Bearer {TOKEN}"}
        answer = httpx2.get(self._url + path, headers=about, verify=False)
        found: dict[str, object] = answer.json() if path == "/version" else {"ok": answer.text}
        return found

    def _until_ready(self) -> None:
        deadline = time.monotonic() + UP_S
        while True:
            try:
                if self._get("/readyz")["ok"] == "ok":
                    return
            except httpx2.HTTPError:
                pass
            popen = self._running["kube-apiserver"]
            assert popen.poll() is None, f"kube-apiserver has ended; see {self.folder}"
            assert time.monotonic() < deadline, f"kube-apiserver is not ready; see {self.folder}"
            time.sleep(0.1)
