"""The SkyPilot task of examples/skypilot survives a notice and the loss of its whole cluster.

Its `run` section is executed as SkyPilot does, on two nodes that are processes here. A folder
stands for the bucket, and a server of ours for the cloud's notices; SkyPilot itself is not run.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

import support
from conftest import RUN_S, SCRIPTS
from example_kit import EXAMPLES, add_command
from holdfast.engine.core.errors import HoldfastError
from holdfast.engine.runtime.contact import job_status
from holdfast.engine.runtime.job_events import read_events
from holdfast.engine.runtime.local_run import processes_that_name, strike
from holdfast.engine.runtime.rundir import RunDir
from support import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]  # two clusters, one after the other

STEPS, HELD = 300, 250


@contextlib.contextmanager
def serve_notices(is_told: threading.Event) -> Iterator[str]:
    """Serve no notice until the event is set; yield the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if is_told.is_set() else 204)
            self.end_headers()
            if is_told.is_set():
                self.wfile.write(b'{"in_s": 60, "reason": "the spot instance is to terminate"}')

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


class Cloud:
    """Starts clusters of two nodes for the task, and takes them away."""

    def __init__(self, folder: Path, notices: str, words: str) -> None:
        self._folder = folder
        self._path = add_command(folder / "bin")
        self._notices = notices
        self._words = words
        task = yaml.safe_load((EXAMPLES / "skypilot" / "train.yaml").read_text())
        self._script = task["run"].replace("/kept", str(folder / "bucket"))
        self._task_env = task["envs"]
        self._nodes: list[subprocess.Popen[str]] = []
        (folder / "bucket").mkdir()

    def start(self) -> RunDir:
        """Start a cluster on empty disks; return the first node's run directory."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(2):
            disk = self._folder / f"disk{rank}"
            disk.mkdir()
            environment = {
                **os.environ,
                **self._task_env,
                "PATH": self._path,
                "HOLDFAST_SECRET": "5e" * 32,
                "STORE": str(self._folder / "bucket" / "checkpoints"),
                "NOTICES": self._notices if rank else "http://127.0.0.1:9/",
                "PORT": str(port),
                "NPROC": "1",
                "SCRIPT": f"--virtual 4 --spares 0 --save-every 20 {self._words}",
                "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1",
                "SKYPILOT_NODE_RANK": str(rank),
                "SKYPILOT_NUM_NODES": "2",
            }
            output = open(disk / "output", "w")  # noqa: SIM115 - the process has it
            popen = subprocess.Popen(
                ["bash", "-c", self._script], cwd=disk, env=environment, stdout=output, text=True
            )
            self._nodes.append(popen)
        return RunDir(self._folder / "disk0" / "run")

    def find_saved(self) -> tuple[int, ...]:
        """Return the steps of the checkpoints that the journal in the bucket knows."""
        record = RunDir(self._folder / "bucket" / "run").load_record()
        return record.saved if record is not None else ()

    def wait(self, rank: int) -> int:
        """Wait for the end of a node of the newest cluster; return its exit status."""
        return self._nodes[rank - 2].wait(RUN_S)

    def read_output(self) -> str:
        return (self._folder / "disk0" / "output").read_text()

    def take_away(self) -> None:
        """Kill all nodes at once, with their disks."""
        for popen in self._nodes:
            popen.kill()
        disks = list(self._folder.glob("disk*"))
        for pid in [pid for disk in disks for pid in processes_that_name(disk)]:
            strike(pid)
        until(lambda: not any(processes_that_name(disk) for disk in disks), "their end")
        for popen in self._nodes:
            popen.wait(RUN_S)
        for disk in disks:
            shutil.rmtree(disk)


def find_busy_nodes(run_dir: RunDir) -> set[str]:
    """Return the nodes whose workers have virtual ranks; empty while there is no answer."""
    with contextlib.suppress(HoldfastError):
        return {w.agent for w in job_status(run_dir, None).workers if w.virtual_ranks}
    return set()


def test_a_spot_job_outlives_a_notice_and_its_whole_cluster(
    tmp_path: Path, reference: Callable[[int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support, "WAIT_S", RUN_S)  # two nodes import torch
    told, gate = threading.Event(), tmp_path / "gate"
    words = f"{SCRIPTS / 'trainer.py'} --steps {STEPS} --task-s 0.05 --hold {HELD} {gate}"
    with serve_notices(told) as notices:
        cloud = Cloud(tmp_path, notices, words)
        try:
            run_dir = cloud.start()
            until(lambda: len(find_busy_nodes(run_dir)) == 2, "both nodes train")
            told.set()
            assert cloud.wait(1) == 0  # the second node has left in time
            told.clear()
            events = read_events(run_dir.events)
            assert any("the spot instance is to terminate" in e["text"] for e in events)
            assert not [e for e in events if e["kind"] == "lost"]
            until(cloud.find_saved, "a journal in the bucket that knows a checkpoint")
            cloud.take_away()
            gate.touch()
            run_dir = cloud.start()
            assert cloud.wait(0) == 0, cloud.read_output()
            assert cloud.wait(1) == 0
            assert cloud.read_output().split()[-1] == reference(STEPS)
            views = [e["step"] for e in read_events(run_dir.events) if e["kind"] == "view"]
            assert min(views) > 0  # it has not begun again from step 0
        finally:
            cloud.take_away()
