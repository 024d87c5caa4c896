"""Runs one process of a node for its agent: its start, its channel, its output, its end.

The process reads what the job is from the run directory. Its environment names only the process
and the way to its agent; train/script/environment.py reads that.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from holdfast.engine.core.directives import Directive
from holdfast.engine.core.domains import Domains
from holdfast.engine.core.errors import WireError, assert_never
from holdfast.engine.core.job_spec import JobSpec
from holdfast.engine.core.machine_errors import MachineError
from holdfast.engine.core.membership.agent import ProcessExited
from holdfast.engine.core.types import NO_VIEW, Incarnation, ProcessRole, WorkerId
from holdfast.engine.core.worker_status import WorkerStatus
from holdfast.engine.host.host import advise_on_shared_memory
from holdfast.engine.host.kernel_log import OomKills
from holdfast.engine.host.lifetime import end_orphans
from holdfast.engine.net import secret
from holdfast.engine.net.standard_streams import print_line
from holdfast.engine.runtime.node import bootstrap, group_member, group_store
from holdfast.engine.runtime.node.fork_server import (
    ForkedProcess,
    LocalProcess,
    read_chunks,
    start_process,
    wait_for_end,
)
from holdfast.engine.runtime.node.gpu_shares import VARIABLE, share_of_gpus, visible_gpus
from holdfast.engine.runtime.node.shard_processes import DONE, read_report
from holdfast.engine.runtime.outlet import LogFile, write_all
from holdfast.engine.runtime.rundir import STACKS_DIR, RunDir
from holdfast.engine.wire.frames import Opener, Sealer
from holdfast.engine.wire.messages import Address, StacksRequest, decode, encode

STORY_BYTES_MAX = 16 << 10  # longest part of a traceback that is reported
LINE_BYTES_MAX = 64 << 10  # a longer line is passed on in pieces
DRAIN_S = 5.0
STORY_S = 0.2  # to read the last report of a process that a signal has ended


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTemplate:
    """Keeps the settings that all processes of one node have in common."""

    run_dir: RunDir
    spec: JobSpec
    host: str
    #: The descriptor for orders to the checkpoint writer. None: the job has no store.
    orders_fd: int | None = None
    #: The directory of the certificates. None: no TLS.
    tls: Path | None = None
    #: The failure domains of the node that its operator has given.
    domains: Domains = ()
    #: The most bytes of pieces in this node's memory.
    memory_bytes: int = 0
    oom_kills: OomKills = field(default_factory=OomKills)

    @property
    def pass_fds(self) -> tuple[int, ...]:
        return () if self.orders_fd is None else (self.orders_fd,)

    def command(self, role: ProcessRole) -> list[str]:
        """Return the module that a process in this role runs, and its arguments."""
        match role:
            case ProcessRole.WORKER:
                module = group_member.MODULE if self.spec.compat.enabled else bootstrap.MODULE
                command = [module, self.spec.script, *self.spec.args]
            case ProcessRole.STORE:
                command = [group_store.MODULE]
            case _:
                assert_never(role)
        return command

    def job_variables(self) -> dict[str, str]:
        """Return the variables of the job; a script for torchrun keeps variables that are set."""
        found = bootstrap.environment_of_job(self.spec.workers.threads, self.spec.workers.seed)
        if self.spec.compat.enabled:
            return {name: os.environ.get(name, value) for name, value in found.items()}
        return found

    def common_environment(self) -> dict[str, str]:
        """Return the environment that workers and servers have in common."""
        inherited = {k: v for k, v in os.environ.items() if k != secret.VARIABLE}
        peer_key = secret.derive_peer_key(self.run_dir.secret(), self.spec.job)
        return {
            **inherited,
            **self.job_variables(),
            **bootstrap.environment_for_memory(os.environ),
            "HOLDFAST_PARENT": str(os.getpid()),
            "HOLDFAST_RUN_DIR": str(self.run_dir.path.resolve()),
            "HOLDFAST_HOST": self.host,
            "HOLDFAST_PEER_KEY": peer_key.hex(),
            "HOLDFAST_TLS": str(self.tls or ""),
        }

    def stacks_path(self, worker: WorkerId, incarnation: Incarnation) -> Path:
        """Return the file in which a worker's process writes the stacks of its threads."""
        return self.run_dir.path.resolve() / STACKS_DIR / f"worker-{worker}-{incarnation}.txt"

    def environment(
        self,
        worker: WorkerId,
        incarnation: Incarnation,
        channel_fd: int,
        failure_fd: int,
        role: ProcessRole = ProcessRole.WORKER,
        spread: SpreadPart | None = None,
    ) -> dict[str, str]:
        """Return the environment of one process; the two descriptors lead to its agent."""
        return {
            **self.common_environment(),
            "PYTHONUNBUFFERED": "1",
            "HOLDFAST_FD": str(channel_fd),
            "HOLDFAST_FAILURE_FD": str(failure_fd),
            "HOLDFAST_WORKER": str(worker),
            "HOLDFAST_INCARNATION": str(incarnation),
            "HOLDFAST_ROLE": role.value,
            "HOLDFAST_STACKS": str(self.stacks_path(worker, incarnation)),
            "HOLDFAST_PROCS": str(self.spec.workers.procs),
            "HOLDFAST_MEMORY_BYTES": str(self.memory_bytes),
            "HOLDFAST_ORDERS_FD": str(-1 if self.orders_fd is None else self.orders_fd),
            **(spread.variables(self.spec.workers.spread) if spread is not None else {}),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadPart:
    """Describes a node's part of a worker that spans several, and how its processes meet.

    `listener`: on the first node; the processes of further nodes connect to it at `meets_at`.
    """

    place: int
    meets_at: str
    listener: socket.socket | None = None

    @property
    def descriptors(self) -> tuple[int, ...]:
        return () if self.listener is None else (self.listener.fileno(),)

    def variables(self, nodes: int) -> dict[str, str]:
        """Return the process's environment variables; `nodes`: the number of the worker's nodes."""
        return {
            "HOLDFAST_SPREAD": str(nodes),
            "HOLDFAST_PLACE": str(self.place),
            "HOLDFAST_MEETS_AT": self.meets_at,
            "HOLDFAST_MEETING_FD": " ".join(map(str, self.descriptors)),
        }


OnMessage = Callable[["WorkerProcess", "WorkerStatus | Address"], None]
OnExit = Callable[["WorkerProcess", ProcessExited], None]


class ProcessOutput:
    """Passes the output of one process on: whole lines to our own output, all bytes to its log.

    `label`: the head of its lines on standard error. `size`: the number of bytes so far.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self.size = 0
        self.tasks: list[asyncio.Task[None]] = []
        self._log: LogFile | None = None

    def begin(self, log: Path, out: IO[bytes] | None, err: IO[bytes] | None) -> None:
        """Copy from the pipes of a process until it closes them."""
        self._log = LogFile(log, say)
        self.tasks = [
            asyncio.ensure_future(self._copy(out, 1)),
            asyncio.ensure_future(self._copy(err, 2)),
        ]

    def note(self, text: str) -> None:
        """Write a line of ours to the log."""
        self._write_log(text.encode() + b"\n")

    def close_log(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None

    async def _copy(self, pipe: IO[bytes] | None, to_fd: int) -> None:
        rest = b""
        async for data in read_chunks(pipe):
            self._write_log(data)
            self.size += len(data)
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > LINE_BYTES_MAX:
                lines, rest = [*lines, rest], b""
            write_all(to_fd, b"".join(self._head(to_fd) + line + b"\n" for line in lines))
        if rest:
            write_all(to_fd, self._head(to_fd) + rest + b"\n")

    def _head(self, to_fd: int) -> bytes:
        return b"" if to_fd == 1 else f"[{self.label}] ".encode()

    def _write_log(self, data: bytes) -> None:
        if self._log is not None:
            self._log.write(data)


class ScriptReport:
    """Collects the report of a script on its end, from the failure pipe of its process."""

    def __init__(self) -> None:
        self.text = b""
        self.tasks: list[asyncio.Task[None]] = []  # none or one

    def begin(self, descriptor: int) -> None:
        self.tasks = [asyncio.ensure_future(self._collect(descriptor))]

    async def _collect(self, descriptor: int) -> None:
        async for data in read_chunks(os.fdopen(descriptor, "rb", buffering=0)):
            self.text = (self.text + data)[-STORY_BYTES_MAX:]
            if self.text.endswith(DONE):  # processes that it started may keep the pipe open
                return


class WorkerProcess:
    """Runs one process of a worker; after `start`, its callbacks report all its acts."""

    def __init__(
        self,
        template: WorkerTemplate,
        worker: WorkerId,
        incarnation: Incarnation,
        role: ProcessRole = ProcessRole.WORKER,
        spread: SpreadPart | None = None,
    ) -> None:
        self.spread = spread
        self.worker = worker
        self.incarnation = incarnation
        self.role = role
        self.running = False
        self.killed_early = False
        self._template = template
        self.memory: list[tuple[int, int]] = []  # number and descriptor of its files for pieces
        self.place: int | None = None  # on its node, while it has one
        self._popen: LocalProcess | ForkedProcess | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._sealer = Sealer(None)
        self._output = ProcessOutput(f"worker {worker}")
        self._report = ScriptReport()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def pid(self) -> int:
        """Return the process id; 0 before the start."""
        return self._popen.pid if self._popen is not None else 0

    @property
    def printed_bytes(self) -> int:
        return self._output.size

    def label_rank(self, ranks: Sequence[int]) -> None:
        """Show the first of these ranks at the head of its lines, if there is one."""
        if ranks:
            self._output.label = f"rank {ranks[0]}"

    async def start(self, on_message: OnMessage, on_exit: OnExit) -> None:
        """Raises OSError when no process can be made."""
        ours, theirs = socket.socketpair()
        failure_read, failure_write = os.pipe()
        try:
            self._popen = await self._start(theirs.fileno(), failure_write)
        except OSError:
            ours.close()
            os.close(failure_read)
            raise
        finally:
            theirs.close()
            os.close(failure_write)
            if self.spread is not None and self.spread.listener is not None:
                self.spread.listener.close()
        self.running = True
        self._output.begin(self._log_path(), self._popen.stdout, self._popen.stderr)
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._report.begin(failure_read)
        listening = asyncio.ensure_future(self._listen(reader, on_message))
        self._tasks = [listening, asyncio.ensure_future(self._reap(on_exit, listening))]

    async def _start(self, channel_fd: int, failure_fd: int) -> LocalProcess | ForkedProcess:
        command = self._template.command(self.role)
        environment = self._template.environment(
            self.worker, self.incarnation, channel_fd, failure_fd, self.role, self.spread
        )
        pass_fds = (channel_fd, failure_fd, *self._template.pass_fds)
        pass_fds += self.spread.descriptors if self.spread is not None else ()
        if self.place is not None and not self._template.spec.compat.enabled:
            procs = self._template.spec.workers.procs_on_node
            gpus = share_of_gpus(visible_gpus(os.environ), self.place, procs)
            environment |= {VARIABLE: ",".join(gpus)} if gpus else {}
        files = [descriptor for _, descriptor in self.memory]
        environment["HOLDFAST_MEMORY_FDS"] = " ".join(map(str, files))
        pass_fds = (*pass_fds, *files)
        return await start_process(command, environment, pass_fds)

    def send(self, message: object) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(self._sealer.seal(encode(message)))

    def kill(self) -> None:
        """End the process and every process it has started. SIGKILL also ends stopped ones."""
        if not self.running:
            self.killed_early = True
            return
        self._signal(signal.SIGKILL)

    def ask_to_end(self, number: int) -> None:
        """Send a signal to the process alone: its script ends its own children."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def pause(self) -> None:
        """Stop the process and all its children with SIGSTOP."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def ask_for_stacks(self, request: StacksRequest) -> None:
        """Ask the process to write the stacks of its threads; a script for torchrun cannot."""
        if self.role is ProcessRole.WORKER and not self._template.spec.compat.enabled:
            self.send(request)

    def note(self, text: str) -> None:
        """Write a line of ours to the worker's log."""
        self._output.note(text)

    def _signal(self, number: int) -> None:
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    async def wait_until_drained(self) -> None:
        """Wait until everything that the process printed has been passed on."""
        if tasks := [*self._output.tasks, *self._report.tasks]:
            await asyncio.wait(tasks, timeout=DRAIN_S)

    async def _reap(self, on_exit: OnExit, listening: asyncio.Task[None]) -> None:
        popen = self._popen
        assert popen is not None
        code = await wait_for_end(popen)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(popen.pid, signal.SIGKILL)  # the children that it has left behind
        end_orphans(LocalProcess.living)  # and its descendants in other groups
        self.running = False
        if code > 0:
            await self.wait_until_drained()
        else:
            last_words = [*self._report.tasks, *([listening] if code else ())]
            await asyncio.wait(last_words, timeout=STORY_S if code else DRAIN_S)
        on_exit(self, self._make_end(code))
        await self.wait_until_drained()
        if self._writer is not None:
            self._writer.close()
        self._output.close_log()

    def _make_end(self, code: int) -> ProcessExited:
        """Describe the end of the process, by its own report and by the kernel's."""
        compat = self._template.spec.compat.enabled
        reported = self._report.text.endswith(DONE) or compat
        detail, error = ("", None) if code <= 0 and reported else read_report(self._report.text)
        if error is not None:
            self.note(detail)  # the job may continue without it, and its log has the reason
        if code == -signal.SIGKILL:
            evidence = self._template.oom_kills.explain(self.pid, time.monotonic())
            if evidence:
                what = f"{MachineError.KILLED.what}: " if compat else ""
                detail, error = f"{what}{evidence}", MachineError.KILLED
        if code < 0 and not detail:
            detail = f"ended by {signal.Signals(-code).name}"
            if code == -signal.SIGBUS:
                detail = f"{detail}, perhaps because {advise_on_shared_memory()}"
        # A group restarts whole, for whatever reason.
        error = None if compat else error
        return ProcessExited(self.worker, self.incarnation, code, detail, reported, error)

    async def _listen(self, reader: asyncio.StreamReader, on_message: OnMessage) -> None:
        opener = Opener(None)
        while True:
            try:
                data = await reader.read(1 << 16)
                if not data:
                    return
                for payload in opener.feed(data):
                    message: WorkerStatus | Address = decode(payload, WorkerStatus, Address)
                    on_message(self, message)
            except OSError:
                return
            except WireError as error:
                self.note(f"holdfast: killed: {error}")
                self.kill()
                return

    def _log_path(self) -> Path:
        place = self.spread.place if self.spread is not None else 0
        name = f"worker-{self.worker}-{self.incarnation}{f'-node-{place}' if place else ''}.log"
        return self._template.run_dir.logs / name


class StackDumps:
    """Asks the workers of a node for the stacks of their threads, as a view ends or on request.

    `processes`: the present ones of this node.
    """

    def __init__(self, processes: Mapping[WorkerId, WorkerProcess]) -> None:
        self._processes = processes
        self._ended = NO_VIEW

    def follow(self, directive: Directive) -> None:
        """Ask for stacks if the directive ends a view."""
        if directive.stop_view > self._ended:
            self._ended = directive.stop_view
            self.write(StacksRequest(reason=f"view {directive.stop_view} ends"))

    def write(self, request: StacksRequest) -> None:
        """Ask for stacks now."""
        for process in self._processes.values():
            process.ask_for_stacks(request)


def say(text: str) -> None:
    print_line(f"agent: {text}")
