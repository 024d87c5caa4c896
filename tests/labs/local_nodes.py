"""Runs further nodes of a local run's job on this machine, each an agent with its own processes.

No part is faked or recorded: agents, workers and connections are real. It is a guess that they
behave as on machines of their own, because these nodes share one clock, disk, kernel and loopback
network. They end by a signal, which closes their connections at once; a machine that loses its
power or its network closes none (network_lab.py).
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from holdfast.engine.core.errors import HoldfastError
from holdfast.engine.runtime.local_run import LocalRun, strike

END_S = 30.0


class LocalNodes:
    """Starts and kills nodes that join a run; all of them are killed at the end."""

    def __init__(self, run: LocalRun) -> None:
        self._run = run
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> LocalNodes:
        return self

    def __exit__(self, *exc: object) -> None:
        for name in list(self._nodes):
            self.kill(name)

    def add(self, name: str, *options: str) -> subprocess.Popen[bytes]:
        """Make a node join, under a name that no other node of the job has at present."""
        host, port = self._run.run_dir.address()
        with open(self.output(name), "ab") as output:
            self._nodes[name] = subprocess.Popen(
                [
                    *(sys.executable, "-m", "holdfast.cli.main", "agent"),
                    *("--join", f"{host}:{port}", "--name", name),
                    *("--run-dir", str(self._run.run_dir.path), *options),
                    *(("--tls", str(self._run.tls)) if self._run.tls is not None else ()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        return self._nodes[name]

    def kill(self, name: str) -> None:
        """Kill a node at once: its agent, and with it all its workers and its memory."""
        popen = self._nodes.pop(name)
        with contextlib.suppress(KeyError, HoldfastError):
            strike(self._agents()[name])
        popen.kill()
        popen.wait(END_S)

    def wait(self, timeout_s: float = END_S) -> list[int]:
        """Wait until all nodes have ended by themselves; returns their exit statuses."""
        codes = [popen.wait(timeout_s) for popen in self._nodes.values()]
        self._nodes.clear()
        return codes

    def output(self, name: str) -> Path:
        """Return the file to which a node prints; the leader's script prints to its node's."""
        return Path(f"{self._run.run_dir.path}-{name}.out")

    def last_lines(self) -> Iterator[str]:
        """Return the last line that each node has printed, the first one's included."""
        yield from self._run.out[-1:]
        for path in sorted(
            self._run.run_dir.path.parent.glob(f"{self._run.run_dir.path.name}-*.out")
        ):
            yield from path.read_text().splitlines()[-1:]

    def _agents(self) -> dict[str, int]:
        return {each["id"]: each["pid"] for each in self._run.status()["agents"]}


def names(count: int) -> Sequence[str]:
    """Name nodes that join a run of `count` nodes, besides the first one."""
    return [f"node{number}" for number in range(1, count)]
