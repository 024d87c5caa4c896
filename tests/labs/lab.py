"""Runs jobs on several nodes with networks that can be cut: one host of a `Lab` for each node.

    with Lab(3) as lab, LabRun(lab, tmp_path / "run", ["--virtual", "4"], ["train.py"]) as run:
        run.until_members(3)
        fault = lab.cut(lab.hosts[2])
        ...
        lab.heal(fault)
        assert run.wait(60.0) == 0

The coordinator and node 0 are on host 0; the other nodes join from their own hosts. All share the
run directory.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from holdfast.engine.runtime.local_run import LocalRun
from labs.network_lab import Host, Lab


class LabRun(LocalRun):
    """Runs a job on all hosts of a lab, with the same number of workers on each."""

    def __init__(
        self,
        lab: Lab,
        run_dir: Path,
        options: Sequence[str],
        script: Sequence[str],
        nodes_min: int | None = None,
    ) -> None:
        self.lab = lab
        self.nodes: list[subprocess.Popen[Any]] = []  # the agents' launchers, from host 1 on
        self._outputs: list[Path] = []
        first = lab.hosts[0]
        least = len(lab.hosts) if nodes_min is None else nodes_min
        nodes = ["--nodes-min", str(least), "--nodes-max", str(len(lab.hosts))]
        super().__init__(
            run_dir,
            ["--host", first.address, *nodes, *options],
            script,
            first.popen,
        )

    def __enter__(self) -> LabRun:
        super().__enter__()
        self.until(self._listening, 30.0, "the coordinator listens")
        for host in self.lab.hosts[1:]:
            self.join(host)
        return self

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        for node in self.nodes:
            node.kill()
            node.wait()

    def join(self, host: Host) -> subprocess.Popen[Any]:
        """Make a host join the job (again)."""
        address, port = self.run_dir.address()
        self._outputs.append(self.run_dir.path / f"node{host.index}-{len(self.nodes)}.out")
        with open(self._outputs[-1], "wb") as output:
            node = self._join(host, address, port, output)
        self.nodes.append(node)
        return node

    def last_lines(self) -> set[str]:
        """Return the last line that each node has printed; only the leader's has details."""
        printed = ["\n".join(self.out), *(path.read_text() for path in self._outputs)]
        return {text.splitlines()[-1] for text in printed if text.strip()}

    def _join(
        self, host: Host, address: str, port: int, output: IO[bytes]
    ) -> subprocess.Popen[Any]:
        return host.popen(
            [
                *(sys.executable, "-m", "holdfast.cli.main", "agent"),
                *("--join", f"{address}:{port}", "--name", f"node{host.index}"),
                *("--run-dir", str(self.run_dir.path)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.DEVNULL,
        )

    def status(self) -> dict[str, Any]:
        with self.lab.hosts[0].entered():
            return super().status()

    def _listening(self) -> bool:
        return self.run_dir.coordinator.exists()
