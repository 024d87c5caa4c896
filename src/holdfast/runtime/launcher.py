"""The launchers: of a job, with its coordinator and first node, and of a further node.

The job's launcher holds the coordinator's listening socket, so a coordinator that dies comes back
at the same address.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from dataclasses import dataclass

from holdfast.core.errors import UserError
from holdfast.core.job import JobSpec
from holdfast.core.types import AgentId
from holdfast.runtime.coordinator_server import CONNECTING_MAX, DEPOSED
from holdfast.runtime.rundir import RunDir
from holdfast.runtime.supervise import Kept, Supervisor

FIRST_NODE = AgentId("node0")
INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine's part in a job. `host` is its address as other nodes know it.

    The coordinator is at `coordinator` or, if that is None, elected at `election`.
    """

    run_dir: RunDir
    name: AgentId
    nproc: int
    host: str
    coordinator: tuple[str, int] | None
    election: str = ""
    first_incarnation: int = 1

    def agent(self) -> Kept:
        where = ["--election", self.election]
        if self.coordinator is not None:
            where = ["--coordinator", self.coordinator[0], str(self.coordinator[1])]

        def command(starts: int) -> list[str]:
            return [
                *(sys.executable, "-m", "holdfast.runtime.agent", str(self.run_dir.path)),
                *(*where, "--name", self.name, "--host", self.host),
                *("--incarnation", str(self.first_incarnation + starts - 1)),
                *("--nproc", str(self.nproc), "--parent", str(os.getpid())),
            ]

        return Kept("agent", command)


def launch_job(run_dir: RunDir, spec: JobSpec, host: str, port: int) -> int:
    """Run a job to its end. Returns the exit status: 0 success, 1 failure, 130 after Ctrl-C."""
    try:
        listener = socket.create_server((host, port), backlog=CONNECTING_MAX)
    except OSError as error:
        raise UserError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    with listener:
        address: tuple[str, int] = listener.getsockname()[:2]
        if spec.nodes_max > 1:
            where = spec.election or f"{address[0]}:{address[1]}"
            print(
                f"holdfast: further nodes join with: holdfast agent --join {where}",
                file=sys.stderr,
                flush=True,
            )
        node = Node(
            run_dir=run_dir,
            name=FIRST_NODE,
            nproc=spec.nproc,
            host=host,
            coordinator=None if spec.election else address,
            election=spec.election,
        )
        coordinator = _coordinator(run_dir, spec, listener, host)
        interrupted = Supervisor([coordinator, node.agent()]).run()
    if spec.election and run_dir.outcome() is None:  # another coordinator has seen the end
        return INTERRUPTED if interrupted else (coordinator.code or 0)
    outcome = run_dir.outcome()
    record = run_dir.load_record()
    if outcome is None and record is not None:  # decided and journaled, but not yet written out
        outcome = record.outcome
    if outcome:
        print(f"holdfast: {outcome}", file=sys.stderr, flush=True)
    if interrupted:
        return INTERRUPTED
    return 0 if outcome == "" else 1


def launch_node(node: Node) -> int:
    """Be a further node of a job, until that is over. Exit status 0, or 130 after Ctrl-C."""
    return INTERRUPTED if Supervisor([node.agent()]).run() else 0


def incarnation_now() -> int:
    """For a node whose earlier incarnations nobody remembers: greater than any of them."""
    return int(time.time())


def _coordinator(run_dir: RunDir, spec: JobSpec, listener: socket.socket, host: str) -> Kept:
    election = ["--election", spec.election, "--host", host] if spec.election else []

    def command(starts: int) -> list[str]:
        return [
            *(sys.executable, "-m", "holdfast.runtime.coordinator", str(run_dir.path)),
            *(str(listener.fileno()), str(os.getpid()), *election),
        ]

    return Kept(
        "coordinator",
        command,
        ends_with=(0, 1),
        excused=(DEPOSED, -signal.SIGALRM),  # not in office any more: it stands by again
        pass_fds=[listener.fileno()],
    )
