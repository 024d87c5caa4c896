"""Starts real etcd members on free ports for tests, disturbs them on purpose, and stops them."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import signal
import socket
import ssl
import subprocess
import time
from pathlib import Path

from holdfast.engine.core.errors import WorldError
from holdfast.engine.runtime.leadership.etcd import Endpoint, EtcdClient

HOST = "127.0.0.1"
START_S = 60.0
TRIES = 5  # another process may take a port before etcd does


class EtcdCluster:
    """Runs an etcd cluster, if it is `available`, while used as a context manager.

    Members are numbered from 0.
    """

    def __init__(self, path: Path, size: int = 3, tls: dict[str, str] | None = None) -> None:
        self.endpoints: list[Endpoint] = []
        self._path = path
        self._size = size
        self._tls = tls  # files: "ca", and "cert" and "key" signed by it, for all members
        self._commands: list[list[str]] = []
        self._members: list[subprocess.Popen[bytes]] = []

    @staticmethod
    def available() -> str:
        """Return the reason why there can be no cluster here; empty if there can."""
        return "" if shutil.which("etcd") else "`etcd` is not installed (package etcd-server)"

    def __enter__(self) -> EtcdCluster:
        for attempt in range(TRIES):
            self._plan(self._path / f"try{attempt}")
            self._members = [self._start(i) for i in range(self._size)]
            with contextlib.suppress(WorldError):
                self.until_serving()
                return self
            self._stop()
        raise AssertionError(f"etcd does not start; see {self._path}")

    def __exit__(self, *exc: object) -> None:
        self._stop()

    def url(self, job: str, ttl_s: int | None = None) -> str:
        places = ",".join(map(str, self.endpoints))
        return f"etcd://{places}/{job}" + (f"?ttl={ttl_s}" if ttl_s else "")

    def client(self, attempt_s: float = 5.0) -> EtcdClient:
        return self._client(self.endpoints, attempt_s)

    def kill(self, member: int) -> None:
        self._members[member].kill()
        self._members[member].wait()

    def restart(self, member: int) -> None:
        """Start a member again with its data; return when every member serves."""
        self._members[member] = self._start(member)
        self.until_serving()

    def freeze(self, member: int) -> None:
        self._members[member].send_signal(signal.SIGSTOP)

    def thaw(self, member: int) -> None:
        self._members[member].send_signal(signal.SIGCONT)

    def leader(self) -> int:
        """Return the member that etcd's own election has chosen."""
        for member, endpoint in enumerate(self.endpoints):
            status = self._client([endpoint], 5.0).request("/v3/maintenance/status", {}, START_S)
            answer = asyncio.run(status)
            if answer["leader"] == answer["header"]["member_id"]:
                return member
        raise AssertionError("no member leads")

    def until_serving(self) -> None:
        for member, endpoint in enumerate(self.endpoints):
            deadline = time.monotonic() + START_S
            while True:
                self._check_alive()
                try:
                    asyncio.run(self._client([endpoint], 2.0).read("any", 2.0))
                    break
                except WorldError:
                    assert time.monotonic() < deadline, f"member {member} does not serve"
        self._check_alive()  # another process may have a member's port, and answer there

    def _check_alive(self) -> None:
        """Raise WorldError if any member has ended: without a majority no other one serves."""
        for number, popen in enumerate(self._members):
            if popen.poll() is not None:
                raise WorldError(f"etcd member {number} ended")

    def _client(self, endpoints: list[Endpoint], attempt_s: float) -> EtcdClient:
        if self._tls is None:
            return EtcdClient(endpoints, attempt_s)
        context = ssl.create_default_context(cafile=self._tls["ca"])
        context.load_cert_chain(self._tls["cert"], self._tls["key"])
        return EtcdClient(endpoints, attempt_s, context)

    def _plan(self, path: Path) -> None:
        path.mkdir()
        ports = free_ports(2 * self._size)
        self.endpoints = [Endpoint(HOST, port) for port in ports[: self._size]]
        peers = [f"http://{HOST}:{port}" for port in ports[self._size :]]
        ours = [f"http{'s' if self._tls else ''}://{endpoint}" for endpoint in self.endpoints]
        tls = []
        if self._tls is not None:
            tls = ["--cert-file", self._tls["cert"], "--key-file", self._tls["key"]]
            tls += ["--trusted-ca-file", self._tls["ca"]]
            tls.append("--client-cert-auth")
        everyone = ",".join(f"m{i}={peer}" for i, peer in enumerate(peers))
        self._commands = [
            [
                # The kernel ends it with this process, even if that is killed.
                *("setpriv", "--pdeathsig", "KILL", "etcd", "--name", f"m{i}"),
                *("--data-dir", str(path / f"m{i}")),
                *("--listen-client-urls", ours[i]),
                *("--advertise-client-urls", ours[i]),
                *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                *("--initial-cluster", everyone, *tls),
            ]
            for i, peer in enumerate(peers)
        ]

    def _start(self, member: int) -> subprocess.Popen[bytes]:
        with open(self._path / f"m{member}.log", "ab") as log:
            command = self._commands[member]
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _stop(self) -> None:
        for member in self._members:
            member.kill()
            member.wait()
        self._members = []


def free_ports(count: int) -> list[int]:
    """Find ports without a listener, below the ports that the kernel gives to clients."""
    found: list[int] = []
    dice = random.SystemRandom()  # two runs of the tests at once may have seeded the other alike
    while len(found) < count:
        port = dice.randrange(10_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((HOST, port))
            if port not in found:
                found.append(port)
    return found
