"""Starts processes of a node by forking a process that has imported torch already.

    python -m holdfast.engine.runtime.node.fork_server LISTENER_FD PARENT_PID MODULE...

Importing torch takes seconds of processor time, a fork milliseconds. Agents that find the path
of the server's socket in their environment (`HOLDFAST_FORK_SERVER`) ask it for workers, by one
connection for each: the request goes one way, then the process id and at last the exit status come
back. The processes behave as if the agent had started them: environment, directory, network
namespace, descriptors and session are those asked for, and they are killed when the agent goes.

What torch reads from the environment while it is imported cannot be changed afterwards: a request
that differs there is refused, and the agent starts the process in the ordinary way (LocalProcess).
Event loops wait in the same way for processes of both kinds, and for their output.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import ctypes
import fcntl
import importlib
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, ClassVar, NoReturn

from holdfast.engine.core.job_spec import Workers
from holdfast.engine.host.lifetime import (
    adopt_orphans,
    die_with_parent,
    end_orphans,
    leave_ending_signals,
)
from holdfast.engine.runtime.node import (
    bootstrap,
    gpu_shares,
    group_member,
    group_store,
    service_process,
)

MODULE = "holdfast.engine.runtime.node.fork_server"
VARIABLE = "HOLDFAST_FORK_SERVER"
DESCRIPTORS_MAX = 253  # the kernel's limit
REQUEST_BYTES_MAX = 4 << 20
NUMBER = struct.Struct("!q")
CLONE_NEWNET = 0x40000000
REQUEST_S = 10.0  # for a request to arrive whole
#: Nearly every worker needs these.
NEEDED = (
    *("torch._dynamo", "torch.distributed"),
    *("holdfast.engine.train.compose", "holdfast.engine.train.job"),
)
ENTRIES = {m.MODULE: m.main for m in (bootstrap, group_member, group_store, service_process)}
# Variables that Python, torch and the libraries under it read only once, when they are loaded.
READ_AT_IMPORT = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONPATH", "PYTHONHASHSEED")
READ_AT_IMPORT_PREFIXES = (
    "LD_",
    "TORCH_",
    "PYTORCH_",
    "MALLOC_",
    "KMP_",
    "GOMP_",
    "CUDA_",
    "NCCL_",
    "THP_",
)


class ForkedProcess:
    """Represents a process that the fork server has started; it is used like a subprocess.Popen."""

    def __init__(self, connection: socket.socket, pid: int, out: IO[bytes], err: IO[bytes]) -> None:
        self.pid = pid
        self.stdout = out
        self.stderr = err
        self._connection = connection
        self._code: int | None = None

    def end_descriptor(self) -> int:
        """Return a new descriptor, which becomes readable when the process has ended."""
        return os.dup(self._connection.fileno())

    def collect(self) -> int:
        """Wait for the exit status: negative for the signal that ended it."""
        if self._code is None:
            try:
                self._code = _receive_number(self._connection)
            except OSError:  # the server was killed, and the process with it
                self._code = -signal.SIGKILL
            self._connection.close()
        return self._code

    def give_up(self) -> None:
        """Order the server to kill the process, and do not wait for it."""
        self._connection.close()


def fork(
    path: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    pass_fds: Sequence[int],
    module: str = bootstrap.MODULE,
) -> ForkedProcess | None:
    """Ask the server whose socket is `path` to run a module; None if it refuses, or is gone.

    `module`: one of ENTRIES. Waits until the server has imported torch.
    """
    request = {
        "module": module,
        "arguments": list(arguments),
        "environment": dict(environment),
        "directory": os.getcwd(),
        "affinity": sorted(os.sched_getaffinity(0)),
        "places": [0, 1, 2, *pass_fds],
    }
    null = os.open(os.devnull, os.O_RDONLY)
    namespace = os.open("/proc/self/ns/net", os.O_RDONLY)
    (out_read, out_write), (err_read, err_write) = os.pipe(), os.pipe()
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
        data = json.dumps(request).encode()
        sent = [namespace, null, out_write, err_write, *pass_fds]
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", sent))
        connection.sendmsg([NUMBER.pack(len(data))], [rights])
        connection.sendall(data)
        pid = _receive_number(connection)
    except OSError:
        pid = 0
    finally:
        for each in (null, namespace, out_write, err_write):
            os.close(each)
    if pid == 0:
        connection.close()
        os.close(out_read)
        os.close(err_read)
        return None
    return ForkedProcess(
        connection, pid, os.fdopen(out_read, "rb", 0), os.fdopen(err_read, "rb", 0)
    )


@contextlib.contextmanager
def run_fork_server(
    path: Path,
    threads: int = Workers().threads,
    variables: Mapping[str, str] | None = None,
    modules: Sequence[str] = (),
) -> Iterator[None]:
    """Run a fork server for workers with `threads` CPU threads, with its socket at `path`.

    `variables`: its processes' environment, if not the job's. `modules`: further ones to import.
    """
    job = bootstrap.environment_of_job(threads, Workers().seed)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(128)
        server = subprocess.Popen(
            [sys.executable, "-m", MODULE, str(listener.fileno()), str(os.getpid()), *modules],
            env={
                **os.environ,
                **(job if variables is None else variables),
                **bootstrap.environment_for_memory(os.environ),
                "PYTHONUNBUFFERED": "1",
            },
            stdin=subprocess.DEVNULL,
            pass_fds=(listener.fileno(),),
        )
    try:
        yield
    finally:
        server.kill()
        server.wait()


class _Server:
    """Forks on request, passes exit statuses on, and kills what belongs to agents that went."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._environment = dict(os.environ)
        self._children: dict[int, socket.socket] = {}

    def serve(self) -> NoReturn:
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(wake_read, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj == wake_read:
                    os.read(wake_read, 4096)
                    self._reap()
                else:
                    self._forget_agent(key.data)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(REQUEST_S)
        descriptors: list[int] = []
        try:
            request = _read_request(connection, descriptors)
            differing = _differing_variables(self._environment, request["environment"])
            pid = 0 if differing else self._fork(request, descriptors)
        except (OSError, ValueError, KeyError, TypeError, struct.error):  # no agent, or it went
            connection.close()
            return
        finally:
            for each in descriptors:
                os.close(each)
        if pid != 0:
            self._children[pid] = connection
            self._selector.register(connection, selectors.EVENT_READ, pid)
        with contextlib.suppress(OSError):  # an agent that went is noticed by the selector
            connection.sendall(NUMBER.pack(pid))
        if pid == 0:
            connection.close()

    def _fork(self, request: dict[str, Any], descriptors: Sequence[int]) -> int:
        grouped_read, grouped_write = os.pipe()
        server, pid = os.getpid(), os.fork()
        if pid == 0:
            try:
                os.setsid()
                os.close(grouped_read)
                os.close(grouped_write)
                self._selector.close()
                for each in (self._listener, *self._children.values()):
                    each.close()
                _become(request, descriptors, server)
            except BaseException:  # noqa: BLE001 - this process must not go on as a server
                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(grouped_write)
        os.read(grouped_read, 1)  # ends once the process has a group, by which it can be killed
        os.close(grouped_read)
        return pid

    def _reap(self) -> None:
        """Report the ends of processes, after their orphans are killed."""
        ended: list[tuple[socket.socket, int]] = []
        with contextlib.suppress(ChildProcessError):  # there are no children
            while (found := os.waitpid(-1, os.WNOHANG))[0] != 0:
                pid, status = found
                if pid in self._children:
                    ended.append((self._children.pop(pid), os.waitstatus_to_exitcode(status)))
        end_orphans(self._children)
        for connection, code in ended:
            with contextlib.suppress(OSError):  # the agent may have gone at the same time
                connection.sendall(NUMBER.pack(code))
            with contextlib.suppress(KeyError):
                self._selector.unregister(connection)
            connection.close()

    def _forget_agent(self, pid: int) -> None:
        if pid in self._children:  # else it was reaped in the same round
            self._selector.unregister(self._children[pid])
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def _become(request: Mapping[str, Any], descriptors: Sequence[int], server: int) -> NoReturn:
    """Turn this fresh fork into the process that was asked for, and run the script."""
    namespace, *given = descriptors
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _enter_network(namespace)
    os.close(namespace)
    free = max(request["places"]) + 1  # above all places: none is overwritten before it is moved
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD, free) for each in given]
    for each in given:
        os.close(each)
    for each, place in zip(moved, request["places"], strict=True):
        os.dup2(each, place)
        os.close(each)
    os.chdir(request["directory"])
    os.sched_setaffinity(0, request["affinity"])
    os.environ.clear()
    os.environ.update({**request["environment"], "HOLDFAST_PARENT": str(server)})
    # A fork's environment and arguments cannot be seen from outside: this file shows its run.
    os.open(os.environ["HOLDFAST_RUN_DIR"], os.O_RDONLY | os.O_DIRECTORY)
    sys.path[0] = request["directory"]
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # as different in each process as it is after an import
    bootstrap.leave(ENTRIES[request["module"]](request["arguments"]))


def _enter_network(namespace: int) -> None:
    """Move into another network namespace, if it is another. OSError where that is not allowed."""
    ours = os.stat("/proc/self/ns/net")
    if os.path.samestat(ours, os.fstat(namespace)):
        return
    if ctypes.CDLL(None, use_errno=True).setns(namespace, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "cannot enter the agent's network namespace")


def _read_request(connection: socket.socket, descriptors: list[int]) -> dict[str, Any]:
    """Read one request, and append the descriptors that came with it."""
    head, fds, _, _ = socket.recv_fds(connection, NUMBER.size, DESCRIPTORS_MAX)
    descriptors.extend(fds)
    (size,) = NUMBER.unpack(head)
    if not 0 < size <= REQUEST_BYTES_MAX:
        raise ValueError(f"a request of {size} bytes")
    request: dict[str, Any] = json.loads(_receive(connection, size))
    if len(request["places"]) + 1 != len(descriptors):
        raise ValueError("the descriptors do not fit the request")
    return request


def _differing_variables(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Return which of the variables that are read only once differ."""
    names = sorted({*ours, *theirs})
    read = [n for n in names if n in READ_AT_IMPORT or n.startswith(READ_AT_IMPORT_PREFIXES)]
    # Which GPUs there are is read as the first one is used.
    return [n for n in read if ours.get(n) != theirs.get(n) and n != gpu_shares.VARIABLE]


def _receive_number(connection: socket.socket) -> int:
    number: int = NUMBER.unpack(_receive(connection, NUMBER.size))[0]
    return number


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (more := connection.recv(size - len(data))):
            raise OSError("the other side has gone")
        data += more
    return data


def main(argv: Sequence[str]) -> NoReturn:
    listener_fd, parent = map(int, argv[:2])
    die_with_parent(parent)
    leave_ending_signals()
    adopt_orphans()
    os.set_inheritable(listener_fd, False)
    _load(argv[2:])
    _Server(socket.socket(fileno=listener_fd)).serve()


def _load(modules: Sequence[str]) -> None:
    """Import the modules that processes will need, for seconds; requests wait.

    It is done before the first one: a node that waits to take a lost one's place is to be quick. No
    thread starts by it, no device is touched and no random number drawn.
    """
    for name in NEEDED:
        importlib.import_module(name)
    for name in modules:
        with contextlib.suppress(Exception):  # a process that needs it reports its failure
            importlib.import_module(name)


if __name__ == "__main__":
    main(sys.argv[1:])


class LocalProcess(subprocess.Popen[bytes]):
    """Is a process that this one has started. `living`: the ids of those not yet collected."""

    living: ClassVar[set[int]] = set()

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        super().__init__(command, **options)
        self.living.add(self.pid)

    def collect(self) -> int:
        """Wait for the exit status: negative for the signal that ended it."""
        code = self.wait()
        self.living.discard(self.pid)
        return code

    def end_descriptor(self) -> int:
        """Return a descriptor that becomes readable once the process has ended; close it."""
        return os.pidfd_open(self.pid)


async def start_process(
    command: Sequence[str], environment: Mapping[str, str], pass_fds: Sequence[int]
) -> LocalProcess | ForkedProcess:
    """Start a module with its arguments: a fork, if there is a server that makes it. OSError."""
    module, *arguments = command
    if (path := os.environ.get(VARIABLE)) and module in ENTRIES:
        forked = await asyncio.to_thread(fork, path, arguments, environment, pass_fds, module)
        if forked is not None:
            return forked
    return LocalProcess(  # in the main thread, by whose end the process dies
        [sys.executable, "-m", *command],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=pass_fds,
        start_new_session=True,
    )


async def wait_for_end(process: LocalProcess | ForkedProcess) -> int:
    """Wait for the end of a process; returns its status, negative for a signal."""
    try:
        descriptor = process.end_descriptor()
    except OSError:  # no descriptors are left
        return await asyncio.to_thread(process.collect)
    try:
        await wait_until_readable(descriptor)
    finally:
        os.close(descriptor)
    return process.collect()


async def wait_until_readable(descriptor: int) -> None:
    """Wait until there is something to read, or the other end is closed."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(descriptor, _set_once, ready)
    try:
        await ready
    finally:
        loop.remove_reader(descriptor)


async def read_chunks(pipe: IO[bytes] | None) -> AsyncIterator[bytes]:
    """Yield the bytes of a pipe until the other end is closed, and close it."""
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, pipe)
    try:
        while data := await reader.read(1 << 16):
            yield data
    finally:
        transport.close()


def _set_once(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
