"""The fork server: its processes behave as if the agent had started them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from holdfast.engine.core.job_spec import with_settings
from holdfast.engine.runtime.node import bootstrap, fork_server
from holdfast.engine.runtime.node.fork_server import NUMBER, ForkedProcess
from holdfast.engine.runtime.node.group_watch import run_forking
from holdfast.engine.runtime.node.worker_process import WorkerTemplate
from holdfast.engine.runtime.rundir import RunDir
from support import SPEC, until

TELLS = """
import json, os, sys
os.write(int(os.environ["SAY_FD"]), json.dumps({
    "argv": sys.argv, "path": sys.path[0], "cwd": os.getcwd(), "name": __name__,
    "session": os.getsid(0) == os.getpid(), "stdin": sys.stdin.read(),
    "torch": "torch" in sys.modules,
    "variables": sorted(k for k in os.environ if k in ("MARK", "HOLDFAST_SECRET", "PATH")),
}).encode())
print("out"); print("err", file=sys.stderr)
"""
WAITS = "import signal, sys; print('up', flush=True); signal.pause()"


class Site:
    """Starts scripts by the server of this session."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failure_read, self.failure_write = os.pipe()
        self.say_read, self.say_write = os.pipe()
        self.channel, self.other = socket.socketpair()

    def fork(
        self, text: str, *args: str, given: Sequence[int] = (), **variables: str
    ) -> ForkedProcess | None:
        script = self.path / "script.py"
        script.write_text(text)
        environment = {
            **os.environ,
            **bootstrap.environment_of_job(1, 0),
            **bootstrap.environment_for_memory({}),
            "HOLDFAST_RUN_DIR": str(self.path),
            "HOLDFAST_FD": str(self.channel.fileno()),
            "HOLDFAST_FAILURE_FD": str(self.failure_write),
            "SAY_FD": str(self.say_write),
            **variables,
        }
        fds = (self.channel.fileno(), self.failure_write, self.say_write, *given)
        server = os.environ[fork_server.VARIABLE]
        return fork_server.fork(server, [str(script), *args], environment, fds)

    def start(
        self, text: str, *args: str, given: Sequence[int] = (), **variables: str
    ) -> ForkedProcess:
        process = self.fork(text, *args, given=given, **variables)
        assert process is not None
        return process


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_a_forked_process_is_as_if_started(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(site.path)
    process = site.start(TELLS, "--steps", "3", MARK="1")
    assert process.collect() == 0
    assert process.stdout.read() == b"out\n"
    assert process.stderr.read() == b"err\n"
    assert json.loads(os.read(site.say_read, 4096)) == {
        "argv": [str(site.path / "script.py"), "--steps", "3"],
        "path": str(site.path),
        "cwd": str(site.path),
        "name": "__main__",
        "session": True,
        "stdin": "",
        "torch": True,
        "variables": ["MARK", "PATH"],
    }


def test_an_exception_is_told_and_the_exit_status_passed_on(site: Site) -> None:
    assert site.start("raise ValueError('no such thing')").collect() == 1
    told = os.read(site.failure_read, 4096).decode()
    assert told.startswith("Traceback")
    assert told.endswith("ValueError: no such thing")
    assert "fork_server" not in told
    assert site.start("import sys; sys.exit(7)").collect() == 7


def test_a_killed_process_is_told_by_its_signal(site: Site) -> None:
    process = site.start(WAITS)
    assert process.stdout.readline() == b"up\n"
    os.killpg(process.pid, signal.SIGKILL)
    assert process.collect() == -signal.SIGKILL
    assert process.collect() == -signal.SIGKILL


def test_processes_end_with_the_agent(site: Site) -> None:
    process = site.start(WAITS)
    assert process.stdout.readline() == b"up\n"
    process.give_up()  # as the kernel does for an agent that dies
    until(lambda: not Path(f"/proc/{process.pid}").exists(), "the process has ended")


def test_variables_that_are_read_only_at_import_cannot_differ(site: Site) -> None:
    assert site.fork(WAITS, OMP_NUM_THREADS="3") is None
    assert site.fork(WAITS, CUDA_LAUNCH_BLOCKING="1") is None
    process = site.start("", CUDA_VISIBLE_DEVICES="1")  # read when a GPU is first used
    assert process.collect() == 0


def test_descriptors_come_where_they_are_asked_for_however_high(
    site: Site,
) -> None:
    """An agent with many workers has higher descriptors than those in use by the server."""
    high = [fcntl.fcntl(site.say_write, fcntl.F_DUPFD, 200 + number) for number in range(12)]
    ends = [os.pipe() for _ in high]
    for place, (_, write) in zip(high, ends, strict=True):
        os.dup2(write, place)
    text = f"import os\nfor n, fd in enumerate({high}): os.write(fd, b'%d' % n)"
    try:
        assert site.start(text, given=high).collect() == 0
        assert [os.read(read, 9) for read, _ in ends] == [b"%d" % n for n in range(12)]
    finally:
        for fd in (*high, *(fd for pair in ends for fd in pair)):
            os.close(fd)


def test_without_a_server_there_is_no_process(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(fork_server.VARIABLE, str(site.path / "nowhere"))
    assert site.fork(WAITS) is None


@pytest.mark.parametrize("data", [b"x" * 99, NUMBER.pack(1 << 40), NUMBER.pack(2) + b"{]", b""])
def test_strangers_do_not_disturb_the_server(data: bytes, site: Site) -> None:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(os.environ[fork_server.VARIABLE])
        stranger.sendall(data)
    assert site.start("").collect() == 0


@pytest.mark.parametrize(
    ("settings", "gpus", "forks"),
    [
        ({}, "", True),
        ({"workers.fork": False}, "", False),
        ({}, "0,1", False),
        ({"memory.redundancy": "replicate:1"}, "0,1", True),
        ({"memory.redundancy": "replicate:1", "workers.fork": False}, "", False),
    ],
)
def test_a_node_forks_its_workers_unless_it_has_gpus(
    settings: dict[str, object],
    gpus: str,
    forks: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker that takes a lost one's place must not spend its first seconds on imports."""
    started: list[Path] = []

    @contextlib.contextmanager
    def start(path: Path, **given: object) -> Iterator[None]:
        started.append(path)
        yield

    monkeypatch.delenv(fork_server.VARIABLE)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.setattr(fork_server, "run_fork_server", start)
    spec = with_settings(SPEC, settings)
    template = WorkerTemplate(run_dir=RunDir(tmp_path), spec=spec, host="127.0.0.1")
    with run_forking(template):
        found = os.environ.get(fork_server.VARIABLE)
        assert found == (str(started[0]) if forks else None)
    assert bool(started) == forks
