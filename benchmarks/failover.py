"""How long an elected job has no coordinator: one is killed, another of three becomes leader.

Real processes and a real etcd of three members, with default settings.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from scale import spec

from holdfast.engine.core.errors import WorldError
from holdfast.engine.runtime.leadership.election import Leader, locate, open_election
from holdfast.engine.runtime.rundir import RunDir
from labs.etcd_cluster import EtcdCluster

HOST = "127.0.0.1"
CANDIDATES = 3
WAIT_S = 30.0


def candidate(url: str, path: Path, secret: bytes) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "holdfast.cli.main", "coordinator", "--election", url),
            *("--run-dir", str(path), "--host", HOST),
        ],
        env={**os.environ, "HOLDFAST_SECRET": secret.hex()},
        stderr=subprocess.DEVNULL,
    )


def until_leader(url: str, after_term: int, folder: Path) -> tuple[Leader, int]:
    """Return the leader of a later term, and its process; poll every 10 ms."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(WorldError):
            found = asyncio.run(locate(url))
            if found is not None and found.term > after_term:
                return found, pid_at(folder, found.port)
        time.sleep(0.01)
    raise TimeoutError(f"nobody became leader within {WAIT_S:g} s")


def pid_at(folder: Path, port: int) -> int:
    """Return the process id of the coordinator that serves at this port."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        for path in folder.glob("run*"):
            with contextlib.suppress(OSError, ValueError):
                found = json.loads(RunDir(path).coordinator.read_text())
                if found["port"] == port and os.path.exists(f"/proc/{found['pid']}"):
                    return int(found["pid"])
        time.sleep(0.001)
    raise TimeoutError(f"no coordinator serves at port {port}")


def measure(count: int) -> tuple[float, ...]:
    """Seconds from each kill -9 to the next leader."""
    times = []
    with tempfile.TemporaryDirectory() as name, EtcdCluster(Path(name)) as etcd:
        folder, url, secret = Path(name), etcd.url("failover"), secrets.token_bytes(32)
        asyncio.run(open_election(url).publish(spec(1, 1), secret))
        running = [candidate(url, folder / f"run{i}", secret) for i in range(CANDIDATES)]
        try:
            leader, pid = until_leader(url, 0, folder)
            for _ in range(count):
                time.sleep(1.0)
                os.kill(pid, signal.SIGKILL)
                began = time.monotonic()
                leader, pid = until_leader(url, leader.term, folder)
                times.append(time.monotonic() - began)
        finally:
            for popen in running:
                popen.kill()
                popen.wait()
    return tuple(times)


def main() -> None:
    times = measure(10)
    print(f"median {statistics.median(times):.2f} s, most {max(times):.2f} s")


if __name__ == "__main__":
    main()
