"""Helps the tests of coordinators: waits for other processes, and jobs to coordinate."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from holdfast.engine.core.job_spec import JobSpec, Nodes, Workers
from holdfast.engine.runtime.rundir import RunDir
from labs.etcd_cluster import EtcdCluster

HOST = "127.0.0.1"
POLL_S = 0.01
WAIT_S = 60.0  # bounds a hang
SPEC = JobSpec(
    job="0123456789abcdef",
    script="train.py",
    args=("--steps", "3"),
    cwd="/",
    workers=Workers(hang_s=60.0, losses_max=3),
    nodes=Nodes(lease_s=3.0),
)
T = TypeVar("T")


def until(ready: Callable[[], T], what: str) -> T:
    """Look until `ready()` is truthy, and return that."""
    deadline = time.monotonic() + WAIT_S
    pause = threading.Event()
    while not (found := ready()):
        assert time.monotonic() < deadline, f"not in {WAIT_S} s: {what}"
        pause.wait(POLL_S)
    return found


def start_etcd(path: Path, size: int = 3, tls: dict[str, str] | None = None) -> EtcdCluster:
    """A cluster to be entered; the test is skipped where there can be none."""
    if EtcdCluster.available():
        pytest.skip(EtcdCluster.available())
    return EtcdCluster(path, size, tls)


class CoordinatorProcess:
    """Runs one coordinator as the launcher starts it."""

    def __init__(self, run_dir: RunDir, *options: str) -> None:
        with socket.create_server((HOST, 0)) as listener:
            self.popen = subprocess.Popen(
                [
                    *(
                        sys.executable,
                        "-m",
                        "holdfast.engine.runtime.coordinate.coordinator_process",
                    ),
                    *(str(run_dir.path), str(listener.fileno()), str(os.getpid()), *options),
                ],
                pass_fds=[listener.fileno()],
                stderr=subprocess.PIPE,
                text=True,
            )

    def __enter__(self) -> subprocess.Popen[str]:
        return self.popen

    def __exit__(self, *exc: object) -> None:
        self.popen.kill()
        self.popen.communicate()
