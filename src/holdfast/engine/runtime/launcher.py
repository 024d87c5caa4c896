"""Launches a job with its coordinator and first node, a further node, or a standby.

Whoever launches a coordinator holds its listening socket, so that a coordinator that dies comes
back at the same address.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from holdfast.engine.core.domains import Domains
from holdfast.engine.core.errors import UserError
from holdfast.engine.core.job_spec import JobSpec
from holdfast.engine.core.types import AgentId, ProcessRole
from holdfast.engine.net.standard_streams import print_line
from holdfast.engine.records.summary import summarize
from holdfast.engine.runtime.contact import ENDED_ALONE
from holdfast.engine.runtime.leadership.journal import DEPOSED
from holdfast.engine.runtime.rundir import RunDir, read_goodput
from holdfast.engine.runtime.supervise import Kept, Streams, Supervisor, say

FIRST_NODE = AgentId("node0")
INTERRUPTED = 130


Show = Callable[[RunDir, Path | None], AbstractContextManager[Streams | None]]


def hide_nothing(run_dir: RunDir, tls: Path | None) -> AbstractContextManager[None]:
    """Leave the output of processes to them: they write to ours."""
    return contextlib.nullcontext()


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """Describes one machine's part in a job.

    `join`: HOST:PORT of the coordinator, or the URL where it is elected. `host`: this machine's
    address as other nodes know it. `tls`: directory of the certificates.
    """

    run_dir: RunDir
    name: AgentId
    nproc: int
    host: str
    join: str
    tls: Path | None = None
    first_incarnation: int = 1
    #: The time from SIGTERM to this machine's end.
    notice_s: float = float("inf")
    #: The server that knows whether this machine is taken away.
    notices: str = ""
    #: The failure domains of this machine.
    domains: Domains = ()

    def processes(self, spec: JobSpec) -> list[Kept]:
        """Return the processes to keep running: the agent, and a writer if there is a store."""
        if not spec.checkpoints.store:
            return [self.agent(None, spec.nodes_max > 1)]
        orders, taken = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

        def command(starts: int) -> list[str]:
            return [
                *(sys.executable, "-m", "holdfast.engine.runtime.node.checkpoint_writer"),
                str(self.run_dir.path),
                *(str(taken.fileno()), str(os.getpid())),
            ]

        writer = Kept(
            "checkpoint writer",
            command,
            pass_fds=[taken.fileno()],
            serves=True,
            give_up=taken.close,
        )
        return [self.agent(orders, spec.nodes_max > 1), writer]

    def agent(self, orders: socket.socket | None, spared: bool) -> Kept:
        """Describe the agent's process; its workers order checkpoints through `orders`.

        `spared`: a coordinator here can do without it, since other nodes may take part.
        """

        def command(starts: int) -> list[str]:
            return [
                *(sys.executable, "-m", "holdfast.engine.runtime.node.agent_process"),
                str(self.run_dir.path),
                *("--join", self.join, "--name", self.name, "--host", self.host),
                *("--incarnation", str(self.first_incarnation + starts - 1)),
                *("--nproc", str(self.nproc), "--parent", str(os.getpid())),
                *(("--tls", str(self.tls)) if self.tls is not None else ()),
                *(("--notice-s", str(self.notice_s)) if self.notice_s < float("inf") else ()),
                *(("--notices", self.notices) if self.notices else ()),
                *(f"--domain={each}" for each in self.domains),
                *(("--orders", str(orders.fileno())) if orders is not None else ()),
            ]

        passed = [orders.fileno()] if orders is not None else []
        return Kept(
            "agent",
            command,
            ends_with=(0, ENDED_ALONE),
            pass_fds=passed,
            spared=spared,
            give_up=_tell_of_lost_node,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorSite:
    """Describes the place of a coordinator: its socket, and its name for other nodes."""

    run_dir: RunDir
    listener: socket.socket
    host: str
    tls: Path | None = None

    def coordinator(self, arguments: Sequence[str], at_first: Sequence[str] = ()) -> Kept:
        """Describe the coordinator's process; its replacements do not get `at_first`."""

        def command(starts: int) -> list[str]:
            return [
                *(sys.executable, "-m", "holdfast.engine.runtime.coordinate.coordinator_process"),
                str(self.run_dir.path),
                *(str(self.listener.fileno()), str(os.getpid()), "--host", self.host),
                *(("--tls", str(self.tls)) if self.tls is not None else ()),
                *arguments,
                *(at_first if starts == 1 else ()),
            ]

        # Its term is over: started again, it stands by.
        stood_still = "this coordinator stood still until its term was over"
        excused = {DEPOSED: "", -signal.SIGALRM: stood_still}
        return Kept(
            "coordinator",
            command,
            ends_with=(0, 1),
            excused=excused,
            pass_fds=[self.listener.fileno()],
            # A coordinator that cannot even write the outcome has not reported it to agents. After
            # the end of a term, the next leader does.
            has_told=lambda code: code in (0, *excused) or self.run_dir.outcome() is not None,
        )


def launch_job(
    site: CoordinatorSite,
    spec: JobSpec,
    *,
    resume: bool = False,
    notices: str = "",
    domains: Domains = (),
    show: Show = hide_nothing,
    beside: Sequence[Kept] = (),
) -> int:
    """Run a job to its end. Returns the exit status: 0 success, 1 failure, 130 after Ctrl-C.

    `resume`: it has run before; its end then does not count. `notices`: the server that knows
    whether this machine is taken away. `domains`: failure domains that it is in. `show`: a context
    for the time in which the job runs; it may take the output of its processes. `beside`: processes
    that serve the job's user as long as it runs.
    """
    host = f"[{site.host}]" if ":" in site.host else site.host
    join = spec.nodes.election or f"{host}:{site.listener.getsockname()[1]}"
    if spec.nodes_max > 1:
        say(f"further nodes join with: holdfast agent --join {join}")
    node = Node(
        run_dir=site.run_dir,
        name=FIRST_NODE,
        nproc=spec.roles_per_node[ProcessRole.WORKER],
        host=site.host,
        join=join,
        tls=site.tls,
        first_incarnation=incarnation_after() if resume else 1,
        notices=notices,
        domains=domains,
    )
    election = ["--election", spec.nodes.election] if spec.nodes.election else []
    coordinator = site.coordinator(election, ["--resume"] if resume else [])
    with show(site.run_dir, site.tls) as streams:
        interrupted = Supervisor(
            [coordinator, *node.processes(spec), *beside], streams, adopts=True
        ).run()
    _tell_how_it_went(site.run_dir)
    outcome = site.run_dir.outcome()
    if outcome and not interrupted:  # else the coordinator has printed it
        say(outcome)
    if interrupted:
        return INTERRUPTED
    return 0 if outcome == "" else 1


def _tell_of_lost_node() -> None:
    text = "this node takes no part any more: the job continues on other nodes, or waits for one"
    print_line(text)


def _tell_how_it_went(run_dir: RunDir) -> None:
    """Print a few lines on a run that is over, and the command that shows more."""
    try:
        goodput = read_goodput(run_dir)
    except UserError:  # no worker has begun, or the log cannot be read
        return
    if not goodput.steps:  # only the reason of the failure counts then
        return
    for line in [*summarize(goodput), f"for more: holdfast report {run_dir.path}"]:
        say(line)


def launch_node(node: Node, spec: JobSpec) -> int:
    """Be a further node of a job, until that is over. Returns the exit status.

    It is 0, or 130 after Ctrl-C, or 1 if the node ends without its job.
    """
    processes = node.processes(spec)
    if Supervisor(processes, adopts=True).run():
        return INTERRUPTED
    return 1 if processes[0].code == ENDED_ALONE else 0


def launch_standby(site: CoordinatorSite, arguments: Sequence[str]) -> int:
    """Keep one more coordinator of an elected job. Returns the exit status.

    0 and 1 are the job's success and failure, or 0 after SIGTERM and 130 after Ctrl-C: a job that
    is being coordinated here is left to another one then.
    """
    coordinator = site.coordinator([*arguments, "--guest"])
    interrupted = Supervisor([coordinator]).run()
    if interrupted:
        return INTERRUPTED if interrupted == signal.SIGINT else 0
    return coordinator.code or 0


def incarnation_after(known: int = 0) -> int:
    """Return an incarnation that is most likely greater than the earlier ones of the node.

    `known`: the coordinator knows no greater one. A coordinator that was started again has
    forgotten them; then only the clock is left.
    """
    return max(known, int(time.time()))
