"""Makes a network for pods in containers on this machine: a bridge, addresses of services, DNS.

Each pod has an address of its own on the bridge, by the reference plugins of the Container Network
Interface (Debian's containernetworking-plugins), and all of them reach each other and this machine.
Only two services have addresses that work, because there is no kube-proxy: the API's, where the API
server itself listens, and the service of DNS, where CoreDNS does. The headless Service of a job
needs no other.
"""

from __future__ import annotations

import ipaddress
import json
import os
import random
import subprocess
from pathlib import Path

from labs.commands import start_server

PLUGINS = Path("/usr/lib/cni")
NEEDED = ("bridge", "host-local", "loopback")
API_PORT, DNS_PORT = 443, 53
TABLE = Path("/proc/net/fib_trie")


class PodNetwork:
    """Makes the bridge, while used as a context manager.

    `services`: the range of services' addresses, whose first one is the API's. `pods`: the range of
    pods' addresses. `machine`: the address of this machine in it.
    """

    def __init__(self, folder: Path, coredns: Path) -> None:
        self.folder = folder
        self._coredns = coredns
        self._bridge = self._addresses = ""
        self._dns: subprocess.Popen[bytes] | None = None
        self.services = self.pods = ipaddress.IPv4Network("127.0.0.0/24")

    @property
    def api(self) -> str:
        return str(self.services[1])

    @property
    def dns(self) -> str:
        return str(self.services[10])

    @property
    def machine(self) -> str:
        return str(self.pods[1])

    def __enter__(self) -> PodNetwork:
        number = find_unused()
        self._bridge, self._addresses = f"hf{number}", f"hf{number}s"
        whole = ipaddress.IPv4Network(f"10.{number}.0.0/23")
        self.services, self.pods = whole.subnets()
        # The plugin wants a bridge with no other addresses than its own.
        # Without a fixed address a bridge takes the least one of its ports. It changes as pods end,
        # and the other pods then do not reach the API for half a minute.
        for place, link in enumerate(self._links()):
            address = f"02:0a:{number:02x}:00:00:0{place}"
            ip("link", "add", link, "address", address, "type", "bridge")
            ip("link", "set", link, "up")
        ip("addr", "add", f"{self.machine}/24", "dev", self._bridge)
        for address in (self.api, self.dns):
            ip("addr", "add", f"{address}/32", "dev", self._addresses)
        (self.folder / "cni").mkdir()
        (self.folder / "cni" / "10-pods.conflist").write_text(json.dumps(self._describe()))
        return self

    def __exit__(self, *exc: object) -> None:
        if self._dns is not None:
            self._dns.kill()
            self._dns.wait()
        for link in self._links():
            ip("link", "delete", link)

    def start_dns(self, config: Path) -> None:
        """Answer for the names of services from now on. `config`: a kubeconfig file."""
        zone = f"kubernetes cluster.local {{\n kubeconfig {config}\n }}"
        rules = self.folder / "Corefile"
        rules.write_text(f".:{DNS_PORT} {{\n bind {self.dns}\n errors\n {zone}\n}}\n")
        command = [str(self._coredns), "-conf", str(rules)]
        self._dns = start_server(command, self.folder / "coredns.log")

    def _links(self) -> tuple[str, str]:
        return self._bridge, self._addresses

    def _describe(self) -> dict[str, object]:
        addresses = {
            "type": "host-local",
            "dataDir": str(self.folder / "addresses"),
            "ranges": [[{"subnet": str(self.pods), "rangeStart": str(self.pods[10])}]],
        }
        bridge = {"type": "bridge", "bridge": self._bridge, "isDefaultGateway": True}
        plugins = [{**bridge, "ipam": addresses}]
        return {"cniVersion": "1.0.0", "name": self._bridge, "plugins": plugins}


def ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
    return done.stdout


def find_unused() -> int:
    """Return a second number of an address 10.X that is unused on this machine."""
    used = TABLE.read_text()
    dice = random.SystemRandom()
    return next(n for n in iter(lambda: dice.randrange(128, 256), None) if f" 10.{n}." not in used)


def missing() -> str:
    """Return the reason that pods can have no network here, or an empty string."""
    lacking = [name for name in NEEDED if not os.access(PLUGINS / name, os.X_OK)]
    return f"no {', '.join(lacking)} in {PLUGINS} (containernetworking-plugins)" if lacking else ""
