"""`holdfast coordinator`: whole processes that die, freeze, resign and take over."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from holdfast.engine.core.directives import AgentReport, Directive
from holdfast.engine.core.errors import HoldfastError, UserError
from holdfast.engine.core.job_record import JobRecord
from holdfast.engine.core.types import AgentId, Incarnation
from holdfast.engine.host.lifetime import ORDERS, Orders
from holdfast.engine.net.channel import Channel, connect
from holdfast.engine.runtime.contact import contact_by
from holdfast.engine.runtime.coordinate.coordinator_process import Candidate
from holdfast.engine.runtime.coordinate.coordinator_server import CoordinatorSetup
from holdfast.engine.runtime.launcher import CoordinatorSite
from holdfast.engine.runtime.leadership.election import (
    Leader,
    locate,
    open_election,
    parse_election,
    read_outcome,
)
from holdfast.engine.runtime.leadership.journal import DEPOSED, unseal
from holdfast.engine.runtime.rundir import RunDir
from holdfast.engine.wire.messages import StatusReply, StatusRequest, StopRequest
from labs.etcd_cluster import EtcdCluster, free_ports
from support import HOST, SPEC, WAIT_S, CoordinatorProcess, start_etcd, until

LONG_TTL_S = 60  # no hiccup of a busy machine ends such a lease
HOLDFAST = (sys.executable, "-m", "holdfast.cli.main")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with start_etcd(tmp_path_factory.mktemp("etcd")) as found:
        yield found


@dataclass(frozen=True, kw_only=True)
class Chief:
    """Is the candidate that leads."""

    number: int
    where: Leader
    pid: int

    @property
    def term(self) -> int:
        return self.where.term


class Candidates:
    """`holdfast coordinator` processes of one job."""

    def __init__(self, url: str, path: Path) -> None:
        self.url = url
        self.secret = secrets.token_bytes(32)
        self.run_dirs: list[RunDir] = []
        self.supervisors: list[subprocess.Popen[bytes]] = []
        self._path = path

    def publish(self) -> None:
        asyncio.run(open_election(self.url).publish(SPEC, self.secret))

    def start(self) -> int:
        """Start one more; return its number."""
        run_dir = RunDir(self._path / f"run{len(self.run_dirs)}")
        arguments = ("--election", self.url, "--run-dir", str(run_dir.path), "--host", HOST)
        with open(self._path / f"log{len(self.run_dirs)}", "wb") as log:
            popen = subprocess.Popen(
                [*HOLDFAST, "coordinator", *arguments],
                env={**os.environ, "HOLDFAST_SECRET": self.secret.hex()},
                stderr=log,
            )
        self.run_dirs.append(run_dir)
        self.supervisors.append(popen)
        return len(self.run_dirs) - 1

    def log(self, number: int) -> list[str]:
        return (self._path / f"log{number}").read_text().splitlines()

    def standing_by(self) -> list[int]:
        return [i for i in range(len(self.run_dirs)) if "is the leader" in str(self.log(i))]

    def after(self, term: int) -> Chief:
        """Return the coordinator that serves in a later term, once it does."""

        def later() -> Chief | None:
            with contextlib.suppress(OSError, UserError):
                where = asyncio.run(locate(self.url, WAIT_S))
                if where is None or where.term <= term:
                    return None
                answer = asyncio.run(status(where, self.secret))["coordinator"]
                there = [d.coordinator.exists() and d.address() for d in self.run_dirs]
                if answer["term"] != where.term or (where.host, where.port) not in there:
                    return None
                number = there.index((where.host, where.port))
                return Chief(number=number, where=where, pid=answer["pid"])
            return None

        found = until(later, f"a coordinator after term {term}")
        assert found is not None
        return found

    def end(self) -> None:
        for popen in self.supervisors:
            popen.kill()  # the kernel ends its coordinator with it
            popen.wait()


@pytest.fixture
def candidates(cluster: EtcdCluster, tmp_path: Path) -> Iterator[Candidates]:
    found = Candidates(cluster.url(tmp_path.name), tmp_path)
    try:
        yield found
    finally:
        found.end()


async def status(found: Leader, secret: bytes) -> Any:
    """Return its answer. OSError when there is none."""
    channel = await connect(found.host, found.port, secret)
    channel.send(StatusRequest())
    reply = await asyncio.wait_for(channel.receive(StatusReply), WAIT_S)
    channel.close()
    if reply is None:
        raise ConnectionError("hung up")
    return json.loads(reply.text)


def gone(pid: int) -> bool:
    """Return whether it has ended, even if its parent has not noticed."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


@pytest.mark.slow
def test_a_standby_takes_over_when_the_coordinator_of_three_is_killed(
    candidates: Candidates,
) -> None:
    candidates.publish()
    for _ in range(3):
        candidates.start()
    first = candidates.after(0)
    until(lambda: len(candidates.standing_by()) == 2, "the other two")
    assert first.number not in candidates.standing_by()
    assert [d.coordinator.exists() for d in candidates.run_dirs].count(True) == 1
    os.kill(first.pid, signal.SIGKILL)
    second = candidates.after(first.term)
    assert second.pid != first.pid
    if second.number != first.number:  # the killed one is started again, and stands by
        until(lambda: first.number in candidates.standing_by(), "the killed one")


async def records_since(cluster: EtcdCluster, url: str, revision: int) -> list[JobRecord]:
    """Return every record that was written after `revision`."""
    client, key = cluster.client(), parse_election(url).key("record")
    body = {"key": base64.b64encode(key.encode()).decode()}
    newest = await client.request("/v3/kv/range", body, WAIT_S)
    found = {}
    for at in range(revision + 1, int(newest["header"]["revision"]) + 1):
        then = await client.request("/v3/kv/range", {**body, "revision": at}, WAIT_S)
        for entry in then.get("kvs", ()):
            if int(entry["mod_revision"]) > revision:
                found[entry["mod_revision"]] = unseal(base64.b64decode(entry["value"]))
    return list(found.values())


async def report(channel: Channel, seq: int) -> None:
    """Send a node's report, which the coordinator answers."""
    agent, one = AgentId("node0"), Incarnation(1)
    channel.send(AgentReport(agent=agent, incarnation=one, seq=seq, slots=1))
    await asyncio.sleep(0)


@pytest.mark.slow
def test_a_coordinator_that_was_frozen_does_nothing_any_more(
    candidates: Candidates, cluster: EtcdCluster
) -> None:
    candidates.publish()
    candidates.start()
    first = candidates.after(0)
    candidates.start()
    until(candidates.standing_by, "a standby")
    events = candidates.run_dirs[first.number].events

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        channel = await connect(first.where.host, first.where.port, candidates.secret)
        await report(channel, 1)
        answer = await asyncio.wait_for(channel.receive(Directive), WAIT_S)
        assert answer.heard == 1
        os.kill(first.pid, signal.SIGSTOP)
        before = events.read_text()
        await report(channel, 2)  # it does this first on waking
        second = await loop.run_in_executor(None, candidates.after, first.term)
        leader = await cluster.client().read(parse_election(candidates.url).key("leader"), WAIT_S)
        assert leader is not None
        os.kill(first.pid, signal.SIGCONT)
        assert await asyncio.wait_for(channel.receive(Directive), WAIT_S) is None, "it answered"
        await loop.run_in_executor(None, until, lambda: gone(first.pid), "its end")
        assert events.read_text() == before
        written = await records_since(cluster, candidates.url, leader.created)
        assert {record.term for record in written} <= {second.term}

    asyncio.run(scenario())
    until(lambda: first.number in candidates.standing_by(), "the frozen one to stand by")
    killed_by_the_kernel = "holdfast: this coordinator stood still until its term was over"
    assert killed_by_the_kernel in candidates.log(first.number)


@pytest.mark.slow
def test_a_coordinator_that_is_asked_to_end_lets_another_take_over(candidates: Candidates) -> None:
    candidates.url += f"?ttl={LONG_TTL_S}"  # its lease would keep the leadership for a minute
    candidates.publish()
    candidates.start()
    first = candidates.after(0)
    candidates.supervisors[first.number].terminate()
    assert candidates.supervisors[first.number].wait(WAIT_S) == 0
    assert asyncio.run(locate(candidates.url)) is None
    candidates.start()
    assert candidates.after(first.term).term == first.term + 1
    standby = candidates.start()
    until(lambda: standby in candidates.standing_by(), "a standby")
    candidates.supervisors[standby].send_signal(signal.SIGINT)
    assert candidates.supervisors[standby].wait(WAIT_S) == 130


@pytest.mark.slow
def test_a_whole_job(candidates: Candidates, tmp_path: Path) -> None:
    """The first coordinator brings the job, a stranger is sent away, the end is everyone's."""
    stranger = candidates.start()
    until(lambda: "nobody has begun the job" in str(candidates.log(stranger)), "its waiting")
    run_dir = RunDir(tmp_path / "run1")
    run_dir.create(SPEC, bytes(range(32)))
    candidates.secret = run_dir.secret()
    first = candidates.start()
    assert candidates.after(0).number == first
    assert candidates.supervisors[stranger].wait(WAIT_S) == 1
    assert "not the secret of the job" in candidates.log(stranger)[-1]
    standby = candidates.start()
    until(lambda: standby in candidates.standing_by(), "a standby")

    def stopped() -> bool:  # the leader may change before it has informed a node
        with contextlib.suppress(OSError, HoldfastError):
            if (leads := asyncio.run(locate(candidates.url))) is not None:
                asyncio.run(end_job(leads, candidates.secret))
        return candidates.supervisors[first].poll() is not None

    until(stopped, "the first to end")
    for number in (first, standby):
        assert candidates.supervisors[number].wait(WAIT_S) == 1
        assert candidates.run_dirs[number].outcome() == "enough"


def test_ctrl_c_at_a_standby_of_the_launcher_ends_the_job(
    cluster: EtcdCluster, tmp_path: Path
) -> None:
    url, run_dirs = cluster.url(tmp_path.name), [RunDir(tmp_path / "a"), RunDir(tmp_path / "b")]
    for run_dir in run_dirs:
        run_dir.create(SPEC, bytes(range(32)))
    run_dirs[1].secret_file.write_text(run_dirs[0].secret_file.read_text())
    with CoordinatorProcess(run_dirs[0], "--election", url) as first:
        until(run_dirs[0].coordinator.exists, "the first leader")
        with CoordinatorProcess(run_dirs[1], "--election", url) as standby:
            assert standby.stderr is not None
            assert "is the leader, term 1" in standby.stderr.readline()
            standby.send_signal(ORDERS[signal.SIGTERM])
            assert first.wait(WAIT_S) == 1
            assert standby.wait(WAIT_S) == 1
    assert [run_dir.outcome() for run_dir in run_dirs] == ["interrupted", "interrupted"]


def test_a_node_with_a_run_directory_of_its_own_learns_from_etcd_that_the_job_is_over(
    cluster: EtcdCluster, tmp_path: Path
) -> None:
    """No coordinator is left to send it the news."""
    url, run_dir = cluster.url(tmp_path.name), RunDir(tmp_path / "a")
    run_dir.create(SPEC, bytes(range(32)))
    contact = contact_by(url)
    assert not asyncio.run(contact.has_ended()), "nobody has begun the job"
    with CoordinatorProcess(run_dir, "--election", url) as leader:
        until(run_dir.coordinator.exists, "the leader")
        assert not asyncio.run(contact.has_ended()), "a coordinator leads the job"
        leader.send_signal(ORDERS[signal.SIGTERM])
        assert leader.wait(WAIT_S) == 1
    assert asyncio.run(contact.has_ended())
    assert asyncio.run(read_outcome(url)) == "interrupted"


def test_ctrl_c_while_nobody_can_stop_the_job_stops_it_later(
    cluster: EtcdCluster, tmp_path: Path
) -> None:
    url, run_dir = cluster.url(tmp_path.name, LONG_TTL_S), RunDir(tmp_path / "run")
    run_dir.create(SPEC, bytes(range(32)))
    dead = free_ports(1)[0]
    leadership = asyncio.run(open_election(url).campaign(HOST, dead, print))
    with CoordinatorProcess(run_dir, "--election", url) as standby:
        assert standby.stderr is not None
        assert f"{HOST}:{dead} is the leader, term 1" in standby.stderr.readline()
        standby.send_signal(ORDERS[signal.SIGTERM])
        assert "cannot reach the leader" in standby.stderr.readline()
        asyncio.run(leadership.resign())
        assert standby.wait(WAIT_S) == 1
    assert run_dir.outcome() == "interrupted"


def test_nodes_are_waited_for_after_a_coordinator_whose_term_is_over(tmp_path: Path) -> None:
    """The next leader must end them, unless a leader failed before it informed a node."""
    with socket.socket() as listener:
        site = CoordinatorSite(run_dir=RunDir(tmp_path), listener=listener, host=HOST)
        has_told = site.coordinator([]).has_told
    assert [has_told(code) for code in (0, DEPOSED, -signal.SIGALRM)] == [True] * 3
    assert not has_told(1)


async def end_job(where: Leader, secret: bytes) -> None:
    channel = await connect(where.host, where.port, secret)
    channel.send(StopRequest(reason="enough"))
    await channel.finish()


def test_a_standby_turns_everyone_away(tmp_path: Path) -> None:
    async def scenario() -> None:
        listener = socket.create_server((HOST, 0))
        setup = CoordinatorSetup(
            run_dir=RunDir(tmp_path), secret=b"x", listener=listener, host=HOST
        )
        candidate = Candidate(open_election("etcd://nowhere/job"), setup, Orders(-1), guest=True)
        turning_away = asyncio.ensure_future(candidate._turn_away())
        for _ in range(2):
            with pytest.raises(ConnectionError, match="broke off the handshake"):  # at once
                await asyncio.wait_for(connect(HOST, listener.getsockname()[1], b"x"), WAIT_S)
        turning_away.cancel()
        listener.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        (["--election", "etcd://h"], {}, ["--election etcd://h", "the form is"]),
        (["--host", "0.0.0.0"], {}, ["--host 0.0.0.0", "agents"]),
        (["--host", "192.0.2.1"], {}, ["192.0.2.1", "--host"]),
        (["--port", "70000"], {}, ["--port 70000"]),
        (["--secret-file", "none"], {}, ["secret file none", "No such file"]),
        (["--run-dir", "/proc/none"], {}, ["/proc/none", "name another"]),
        ([], {"HOLDFAST_SECRET": ""}, ["HOLDFAST_SECRET", "at least 64"]),
        ([], {"HOLDFAST_SECRET": "secret"}, ["HOLDFAST_SECRET", "hexadecimal"]),
        ([], {"HOLDFAST_SECRET": None}, ["no job secret", "--secret-file", "HOLDFAST_SECRET"]),
    ],
)
def test_a_wrong_command_line(
    arguments: list[str], environment: dict[str, str | None], words: list[str], tmp_path: Path
) -> None:
    given = ["--election", "etcd://h/job", "--run-dir", str(tmp_path), "--host", HOST, *arguments]
    wanted = {**os.environ, "HOLDFAST_SECRET": "ab" * 32, **environment}
    found = subprocess.run(
        [*HOLDFAST, "coordinator", *given],
        env={k: v for k, v in wanted.items() if v is not None},
        check=False,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert found.returncode == 2
    (line,) = found.stderr.splitlines()
    assert all(word in line for word in words), line
