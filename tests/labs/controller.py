"""Runs a controller of Kubernetes, Kueue or JobSet, next to the control plane of a test.

A folder has its program, the manifests of its types, and the manifest of its webhooks, as the
scripts that build controllers leave them.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx2
import yaml

from certificates import make_certificates
from holdfast.engine.core.errors import HoldfastError
from labs.commands import run_kubectl, start_server
from labs.etcd_cluster import free_ports

HOST = "127.0.0.1"
UP_S = 60.0

Manifest = dict[str, Any]


class Controller:
    """Runs one controller. `config`: a kubeconfig file of an administrator.

    `built`: the folder with the program, which is called `name`. `is_needed`: returns whether a
    webhook is needed, by its rules.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        config: Path,
        built: Path,
        is_needed: Callable[[Sequence[Manifest]], bool] = bool,
    ) -> None:
        self.folder = folder
        self._name = name
        self._config = config
        self._built = built
        self._is_needed = is_needed
        self._running: subprocess.Popen[bytes] | None = None

    def start(self, settings: Mapping[str, Any], around: Sequence[str] = ()) -> None:
        """Start it, with these settings and the addresses; wait until it is ready.

        `around`: a command that runs the program, whose words come after it.
        """
        self.folder.mkdir(exist_ok=True)
        certificates = make_certificates(self.folder, HOST)
        webhook, health = free_ports(2)
        kept = {
            **settings,
            "health": {"healthProbeBindAddress": f"{HOST}:{health}"},
            "metrics": {"bindAddress": "0"},
            "webhook": {"host": HOST, "port": webhook, "certDir": str(self.folder)},
            "leaderElection": {"leaderElect": False},
            "internalCertManagement": {"enable": False},
        }
        (self.folder / "config.json").write_text(json.dumps(kept))
        self._apply(types := self._built / "types")
        established = ("--for=condition=Established", f"--timeout={UP_S:g}s")
        retry(lambda: self.kubectl("wait", *established, f"--filename={types}"))
        authority = (certificates / "ca.crt").read_text()
        self._apply(self._write_webhooks(f"https://{HOST}:{webhook}", authority))
        command = [*around, str(self._built / self._name), "--zap-log-level=2"]
        command.append(f"--config={self.folder / 'config.json'}")
        environment = {**os.environ, "KUBECONFIG": str(self._config)}
        self._running = start_server(command, self.folder / f"{self._name}.log", environment)
        self._until_ready(f"http://{HOST}:{health}/readyz")

    def stop(self) -> None:
        if self._running is not None:
            self._running.kill()
            self._running.wait()

    def apply(self, *objects: Mapping[str, Any]) -> None:
        """Apply objects, while the webhooks may still be coming up."""
        path = self.folder / "objects.yaml"
        path.write_text(yaml.safe_dump_all(objects))
        retry(lambda: self._apply(path))

    def kubectl(self, *words: str) -> str:
        return run_kubectl(self._config, *words)

    def _apply(self, path: Path) -> None:
        self.kubectl("apply", "--server-side", "--force-conflicts", f"--filename={path}")

    def _until_ready(self, address: str) -> None:
        deadline = time.monotonic() + UP_S
        while True:
            try:
                if httpx2.get(address).status_code == httpx2.codes.OK:
                    return
            except httpx2.HTTPError:
                pass
            assert self._running is not None
            assert self._running.poll() is None, f"{self._name} has ended; see {self.folder}"
            assert time.monotonic() < deadline, f"{self._name} is not ready; see {self.folder}"
            time.sleep(0.1)

    def _write_webhooks(self, address: str, authority: str) -> Path:
        """Write the webhooks that are needed, with our address."""
        found = []
        for each in yaml.safe_load_all((self._built / "webhooks.yaml").read_text()):
            kept = []
            for hook in each["webhooks"]:
                if not self._is_needed(hook["rules"]):
                    continue
                path = hook["clientConfig"]["service"]["path"]
                bundle = base64.b64encode(authority.encode()).decode()
                hook["clientConfig"] = {"url": f"{address}{path}", "caBundle": bundle}
                kept.append(hook)
            found.append({**each, "webhooks": kept})
        path = self.folder / "webhooks.yaml"
        path.write_text(yaml.safe_dump_all(found))
        return path


def retry(act: Callable[[], object]) -> None:
    """Do something again until it succeeds, or UP_S have passed."""
    deadline = time.monotonic() + UP_S
    while True:
        try:
            act()
            return
        except HoldfastError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.2)
