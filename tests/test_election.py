"""The coordinators' election: one in office at a time, whoever dies, freezes or is cut off."""

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
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from etcd_cluster import EtcdCluster, free_ports
from holdfast.core.errors import Deposed, Refused, Unreachable, UserError
from holdfast.core.job import JobSpec
from holdfast.core.types import AgentId, AgentReport, Directive, Incarnation, JobRecord
from holdfast.runtime.channel import Channel, connect
from holdfast.runtime.coordinator import Candidate, Seat
from holdfast.runtime.election import (
    Election,
    EtcdJournal,
    Hold,
    Incumbent,
    Office,
    locate,
    parse_election,
)
from holdfast.runtime.etcd import Endpoint, Entry, EtcdClient, put
from holdfast.runtime.journal import unseal
from holdfast.runtime.rundir import RunDir
from holdfast.wire.messages import StatusReply, StatusRequest, StopRequest
from waiting import WAIT_S, until

HOST = "127.0.0.1"
LONG_TTL_S = 60  # no hiccup of a busy machine ends such a lease
HOLDFAST = (sys.executable, "-m", "holdfast.cli.main")
SPEC = JobSpec(
    job="0123456789abcdef",
    script="train.py",
    args=("--steps", "3"),
    cwd="/",
    nproc=2,
    nodes_min=1,
    nodes_max=1,
    virtual_ranks=4,
    workers_min=1,
    seed=0,
    threads=1,
    lease_s=30.0,
    abandon_s=300.0,
    hang_s=60.0,
    losses_max=3,
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path_factory.mktemp("etcd")) as found:
        yield found


def quiet(text: str) -> None:
    """What a standby says about its waiting, where a test does not care."""


def make_election(url: str) -> Election:
    return Election(parse_election(url))


# ---------------------------------------------------------------- the client of etcd


@contextlib.asynccontextmanager
async def server(answer: bytes | None) -> AsyncIterator[Endpoint]:
    """A server that sends `answer` to every request and hangs up; None: it never answers."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            if answer is None:
                await reader.read()
            else:
                writer.write(answer)
        writer.close()

    listening = await asyncio.start_server(serve, HOST, 0)
    async with listening:
        yield Endpoint(HOST, listening.sockets[0].getsockname()[1])


UNUSABLE = {
    "hung": (None, "did not answer within 0.2 s"),
    "hung up": (b"", "hung up"),
    "cut": (b"HTTP/1.0 200 OK\r\nContent-Length: 50\r\n\r\n{}", "sent 2 of 50 bytes"),
    "other": (b"SSH-2.0-OpenSSH_9.2\r\n", "is no HTTP server"),
    "web": (b"HTTP/1.1 404 Not Found\r\n\r\n<html>", "does not answer as etcd v3 does: HTTP 404"),
    "json": (b"HTTP/1.1 200 OK\r\n\r\n{}", "does not answer as etcd v3 does: HTTP 200, '{}'"),
    "list": (b"HTTP/1.1 200 OK\r\n\r\n[1]", "does not answer as etcd v3 does"),
    "no leader": (
        b'HTTP/1.1 503 No\r\n\r\n{"error":"x","message":"etcdserver: no leader","code":14}',
        "says 'etcdserver: no leader'",
    ),
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_another_server_is_tried(kind: str, cluster: EtcdCluster, tmp_path: Path) -> None:
    answer, words = UNUSABLE[kind]

    async def story() -> None:
        async with server(answer) as bad:
            with pytest.raises(Unreachable) as caught:
                await EtcdClient([bad], attempt_s=0.2).read("key", 0.2)
            assert f"{bad} {words}" in str(caught.value)
            key = f"/test/{tmp_path.name}"
            client = EtcdClient([bad, *cluster.endpoints], attempt_s=0.2)
            await client.transact([], [put(key, b"value")], [], WAIT_S)
            found = await client.read(key, WAIT_S)
            assert found is not None
            assert found.value == b"value"

    asyncio.run(story())


def test_every_server_that_failed_is_named() -> None:
    dead = [Endpoint(HOST, port) for port in free_ports(3)]
    with pytest.raises(Unreachable) as caught:
        asyncio.run(EtcdClient(dead).read("key", 0.1))
    assert all(f"{endpoint} refused the connection" in str(caught.value) for endpoint in dead)


def test_a_refusal_is_told_from_an_outage(cluster: EtcdCluster) -> None:
    with pytest.raises(Refused, match="requested lease not found"):
        asyncio.run(cluster.client().revoke(12345, WAIT_S))
    big = put("/test/big", bytes(2_000_000))
    with pytest.raises(Refused, match="request is too large"):
        asyncio.run(cluster.client().transact([], [big], [], WAIT_S))


# ---------------------------------------------------------------- the office


def test_one_after_the_other(cluster: EtcdCluster, tmp_path: Path) -> None:
    url = cluster.url(tmp_path.name, LONG_TTL_S)

    async def story() -> None:
        assert await locate(url) is None
        election = make_election(url)
        terms, told = [], []
        for port in (1001, 1002, 1003):
            office = await election.campaign(HOST, port, quiet)
            assert await locate(url) == Incumbent(term=office.held.term, host=HOST, port=port)
            rival = asyncio.ensure_future(make_election(url).campaign(HOST, 9, told.append))
            while len(told) < len(terms) + 1:
                await asyncio.sleep(0.01)
            assert not rival.done()
            rival.cancel()
            terms.append(office.held.term)
            await office.resign()
            with pytest.raises(Deposed):
                office.check()
        assert terms == [1, 2, 3]
        assert told[0] == f"standing by: {HOST}:1001 is in office, term 1"

    asyncio.run(story())


def test_of_many_at_once_one_is_elected(cluster: EtcdCluster, tmp_path: Path) -> None:
    url = cluster.url(tmp_path.name, 4)  # polls of a longer lease are far apart

    async def story() -> None:
        campaigns = [
            asyncio.ensure_future(make_election(url).campaign(HOST, port, quiet))
            for port in range(1, 6)
        ]
        for term in range(1, 6):
            done, waiting = await asyncio.wait(
                campaigns, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED
            )
            (winner,) = done
            office = winner.result()
            assert office.held.term == term
            campaigns = list(waiting)
            await office.resign()

    asyncio.run(story())


class Lossy:
    """A path to etcd that carries requests out and loses some answers."""

    def __init__(self, to: Endpoint) -> None:
        self.lose = 0
        self.requests: list[bytes] = []
        self._to = to

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        request = head + await reader.readexactly(size)
        answer = await self.repeat(request)
        if b"/v3/kv/txn" in head:
            self.requests.append(request)
            self.lose -= 1
        if b"/v3/kv/txn" not in head or self.lose < 0:
            writer.write(answer)
        writer.close()

    async def repeat(self, request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(self._to.host, self._to.port)
        writer.write(request)
        answer = await reader.read()
        writer.close()
        return answer


@contextlib.asynccontextmanager
async def lossy(cluster: EtcdCluster) -> AsyncIterator[tuple[Lossy, Endpoint]]:
    path = Lossy(cluster.endpoints[0])
    listening = await asyncio.start_server(path.serve, HOST, 0)
    async with listening:
        yield path, Endpoint(HOST, listening.sockets[0].getsockname()[1])


def test_lost_answers_change_nothing(cluster: EtcdCluster, tmp_path: Path) -> None:
    async def story() -> None:
        async with lossy(cluster) as (path, endpoint):
            path.lose = 2
            office = await make_election(f"etcd://{endpoint}/{tmp_path.name}?ttl=60").campaign(
                HOST, 1, quiet
            )
            assert office.held.term == 1
            journal = EtcdJournal(office)
            await journal.load()
            for release_loop in range(3):
                path.lose = release_loop
                await journal.save(JobRecord(term=1, release_loop=release_loop))
            for request in path.requests:  # late copies of everything that was ever written
                await path.repeat(request)
            found = await office.etcd.read(office.url.key("record"), WAIT_S)
            assert found is not None
            assert unseal(found.value).release_loop == 2
            assert await office._renew() == ""

    asyncio.run(story())


def test_the_office_ends_by_its_own_clock(cluster: EtcdCluster, tmp_path: Path) -> None:
    now = 100.0

    async def story() -> None:
        nonlocal now
        url = parse_election(cluster.url(tmp_path.name, LONG_TTL_S))
        office = await Election(url, now=lambda: now).campaign(HOST, 1, quiet)
        now += LONG_TTL_S * 0.9
        office.check()
        now += LONG_TTL_S * 0.1  # etcd has not ended the lease: it knows of no such time
        with pytest.raises(Deposed, match="was not renewed"):
            office.check()
        with pytest.raises(Deposed):
            await EtcdJournal(office).save(JobRecord(term=1))
        with pytest.raises(Deposed):
            await EtcdJournal(office).load()
        assert await locate(cluster.url(tmp_path.name)) is not None

    asyncio.run(story())


def test_what_counts_is_when_the_renewal_was_sent() -> None:
    """The answer comes late: the lease has run since etcd got the question."""
    now = 100.0

    class SlowEtcd(EtcdClient):
        async def keep_alive(self, lease: int, within_s: float) -> float:
            nonlocal now
            now += 3.0
            return 10.0

        async def read(self, key: str, within_s: float) -> Entry:
            return Entry(value=b"", created=7, modified=7, lease=5)

    async def story() -> None:
        url = parse_election("etcd://nowhere/job")
        hold = Hold(term=1, created=7, lease=5, ttl_s=10.0)
        office = Office(SlowEtcd([]), url, hold, 100.5, lambda: now)
        assert await office._renew() == ""
        assert 6.0 < office.left_s() < 7.0

    asyncio.run(story())


def test_without_etcd_the_office_ends_in_time() -> None:
    async def story() -> None:
        url = parse_election(f"etcd://{HOST}:{free_ports(1)[0]}/job")
        hold = Hold(term=4, created=7, lease=5, ttl_s=0.3)
        loop = asyncio.get_running_loop()
        began = loop.time()
        office = Office(EtcdClient(url.endpoints, 0.1), url, hold, began + 0.3, loop.time)
        with pytest.raises(Deposed, match=r"term 4 .* is over: etcd did not carry out"):
            await office.hold()
        assert office.left_s() <= 0
        assert loop.time() - began >= 0.3

    asyncio.run(story())


@pytest.mark.parametrize("how", ["revoked", "deleted"])
def test_whose_office_is_taken_away_notices(how: str, cluster: EtcdCluster, tmp_path: Path) -> None:
    async def story() -> None:
        url = cluster.url(tmp_path.name, 4)
        office = await make_election(url).campaign(HOST, 1, quiet)
        if how == "revoked":
            await cluster.client().revoke(office.held.lease, WAIT_S)
        else:
            key = base64.b64encode(office.url.key("office").encode()).decode()
            await cluster.client().request("/v3/kv/deleterange", {"key": key}, WAIT_S)
        with pytest.raises(Deposed, match="is over"):
            await asyncio.wait_for(office.hold(), WAIT_S)
        assert office.left_s() > 0, "it learned it from etcd, not from its clock"

    asyncio.run(story())


async def renewed(office: Office) -> None:
    """Until the office is prolonged once more."""
    calls: list[float] = []
    enough = asyncio.Event()

    def prolonged(left_s: float) -> None:
        calls.append(left_s)
        if len(calls) > 1:  # the first comes at once
            enough.set()

    office.on_prolonged(prolonged)
    await asyncio.wait_for(enough.wait(), WAIT_S)


@pytest.mark.parametrize("which", ["killed", "frozen", "leader killed"])
def test_one_etcd_member_is_not_missed(which: str, cluster: EtcdCluster, tmp_path: Path) -> None:
    leader = cluster.leader()
    victim = leader if which == "leader killed" else (leader + 1) % 3
    places = [cluster.endpoints[victim], *cluster.endpoints]  # the victim is asked first

    async def story() -> None:
        url = f"etcd://{','.join(map(str, places))}/{tmp_path.name}?ttl=8"
        office = await make_election(url).campaign(HOST, 1, quiet)
        holding = asyncio.ensure_future(office.hold())
        journal = EtcdJournal(office)
        await journal.load()
        if which == "frozen":
            cluster.freeze(victim)
        else:
            cluster.kill(victim)
        await journal.save(JobRecord(term=1))
        await renewed(office)
        assert not holding.done()
        assert (await locate(url)) == Incumbent(term=1, host=HOST, port=1)
        holding.cancel()

    try:
        asyncio.run(story())
    finally:
        if which == "frozen":
            cluster.thaw(victim)
        else:
            cluster.restart(victim)


def test_a_standby_turns_everyone_away(tmp_path: Path) -> None:
    async def story() -> None:
        listener = socket.create_server((HOST, 0))
        seat = Seat(run_dir=RunDir(tmp_path), secret=b"x", listener=listener, host=HOST)
        candidate = Candidate(parse_election("etcd://nowhere/job"), seat, guest=True)
        turning_away = asyncio.ensure_future(candidate._turn_away())
        for _ in range(2):
            with pytest.raises(ConnectionError):
                await asyncio.wait_for(connect(HOST, listener.getsockname()[1], b"x"), WAIT_S)
        turning_away.cancel()
        listener.close()

    asyncio.run(story())


# ---------------------------------------------------------------- what the job is


def test_standbys_learn_what_the_job_is_with_its_secret_only(
    cluster: EtcdCluster, tmp_path: Path
) -> None:
    url, secret = cluster.url(tmp_path.name), secrets.token_bytes(32)

    async def story() -> None:
        election = make_election(url)
        assert await election.known(secret) is None
        await election.publish(SPEC, secret)
        await election.publish(SPEC, secret)  # by a restarted coordinator
        assert await election.known(secret) == SPEC
        with pytest.raises(UserError, match=rf"not the secret of the job {tmp_path.name}"):
            await election.known(b"other")
        with pytest.raises(UserError, match=rf"another run named {tmp_path.name}"):
            await election.publish(SPEC, secrets.token_bytes(32))

    asyncio.run(story())
    everything = {"key": base64.b64encode(b"\0").decode(), "range_end": "AA=="}
    found = asyncio.run(cluster.client().request("/v3/kv/range", everything, WAIT_S))
    stored = [base64.b64decode(entry["value"]) for entry in found["kvs"]]
    assert any(b"train.py" in value for value in stored)
    for value in stored:
        assert secret not in value
        assert secret.hex().encode() not in value


# ---------------------------------------------------------------- whole processes


@dataclass(frozen=True, kw_only=True)
class Chief:
    """The candidate in office."""

    number: int
    where: Incumbent
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
        asyncio.run(make_election(self.url).publish(SPEC, self.secret))

    def start(self) -> int:
        """One more; returns its number."""
        run_dir = RunDir(self._path / f"run{len(self.run_dirs)}")
        arguments = ("--election", self.url, "--run-dir", str(run_dir.path), "--host", HOST)
        with open(self._path / f"story{len(self.run_dirs)}", "wb") as story:
            popen = subprocess.Popen(
                [*HOLDFAST, "coordinator", *arguments],
                env={**os.environ, "HOLDFAST_SECRET": self.secret.hex()},
                stderr=story,
            )
        self.run_dirs.append(run_dir)
        self.supervisors.append(popen)
        return len(self.run_dirs) - 1

    def story(self, number: int) -> list[str]:
        return (self._path / f"story{number}").read_text().splitlines()

    def standing_by(self) -> list[int]:
        return [i for i in range(len(self.run_dirs)) if "is in office" in str(self.story(i))]

    def after(self, term: int) -> Chief:
        """The one that serves in a later term, once it does."""

        def later() -> Chief | None:
            with contextlib.suppress(OSError, UserError):
                where = asyncio.run(locate(self.url, WAIT_S))
                if where is None or where.term <= term:
                    return None
                answer = asyncio.run(status(where, self.secret))["coordinator"]
                addresses = [d.address() for d in self.run_dirs if d.coordinator.exists()]
                if answer["term"] != where.term or (where.host, where.port) not in addresses:
                    return None
                held = [d.coordinator.exists() and d.address() for d in self.run_dirs]
                number = held.index((where.host, where.port))
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


async def status(found: Incumbent, secret: bytes) -> Any:
    """What it answers. OSError when it does not."""
    channel = await connect(found.host, found.port, secret)
    channel.send(StatusRequest())
    reply = await asyncio.wait_for(channel.receive(StatusReply), WAIT_S)
    channel.close()
    if reply is None:
        raise ConnectionError("hung up")
    return json.loads(reply.text)


def gone(pid: int) -> bool:
    """Ended, whether or not its parent has noticed."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def test_three_candidates_and_a_killed_coordinator(candidates: Candidates) -> None:
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
    """Every record that was written after `revision`."""
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


async def report(channel: Channel, seq: int, slots: int) -> None:
    """A node's report, after which the coordinator writes a record and answers."""
    agent, one = AgentId("node0"), Incarnation(1)
    channel.send(AgentReport(agent=agent, incarnation=one, seq=seq, slots=slots))
    await asyncio.sleep(0)


def test_a_coordinator_that_was_frozen_does_nothing_any_more(
    candidates: Candidates, cluster: EtcdCluster
) -> None:
    candidates.publish()
    candidates.start()
    first = candidates.after(0)
    candidates.start()
    until(candidates.standing_by, "a standby")
    events = candidates.run_dirs[first.number].events

    async def story() -> None:
        loop = asyncio.get_running_loop()
        channel = await connect(first.where.host, first.where.port, candidates.secret)
        await report(channel, 1, slots=1)
        answer = await asyncio.wait_for(channel.receive(Directive), WAIT_S)
        assert answer.heard == 1
        os.kill(first.pid, signal.SIGSTOP)
        before = events.read_text()
        await report(channel, 2, slots=2)  # it is the first thing to do on waking
        second = await loop.run_in_executor(None, candidates.after, first.term)
        office = await cluster.client().read(parse_election(candidates.url).key("office"), WAIT_S)
        assert office is not None
        os.kill(first.pid, signal.SIGCONT)
        assert await asyncio.wait_for(channel.receive(Directive), WAIT_S) is None, "it answered"
        await loop.run_in_executor(None, until, lambda: gone(first.pid), "its end")
        assert events.read_text() == before
        written = await records_since(cluster, candidates.url, office.created)
        assert {record.term for record in written} <= {second.term}

    asyncio.run(story())
    until(lambda: first.number in candidates.standing_by(), "the frozen one to stand by")


def test_a_coordinator_that_is_asked_to_end_lets_another_take_over(candidates: Candidates) -> None:
    candidates.url += f"?ttl={LONG_TTL_S}"  # its lease would keep the office for a minute
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


def test_a_whole_job(candidates: Candidates, tmp_path: Path) -> None:
    """The first coordinator brings the job, a stranger is sent away, the end is everyone's."""
    stranger = candidates.start()
    until(lambda: "nobody has begun the job" in str(candidates.story(stranger)), "its waiting")
    run_dir = RunDir(tmp_path / "run1")
    run_dir.create(SPEC, bytes(range(32)))
    candidates.secret = run_dir.secret()
    first = candidates.start()
    assert candidates.after(0).number == first
    assert candidates.supervisors[stranger].wait(WAIT_S) == 1
    assert "not the secret of the job" in candidates.story(stranger)[-1]
    standby = candidates.start()
    until(lambda: standby in candidates.standing_by(), "a standby")
    asyncio.run(end_job(candidates.after(0).where, candidates.secret))
    for number in (first, standby):
        assert candidates.supervisors[number].wait(WAIT_S) == 1
        assert candidates.run_dirs[number].outcome() == "enough"


async def end_job(where: Incumbent, secret: bytes) -> None:
    channel = await connect(where.host, where.port, secret)
    channel.send(StopRequest(reason="enough"))
    await channel.finish()


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("zookeeper://host/job", "zookeeper is not supported"),
        ("host:2379/job", "is no HOST:PORT"),
        ("etcd://host", "'' is no job name"),
        ("etcd:///job", "'' is no HOST:PORT"),
        ("etcd://a,,b/job", "'' is no HOST:PORT"),
        ("etcd://host:port/job", "port"),
        ("etcd://host:99999/job", "ort"),
        ("etcd://host/a/b", "'a/b' is no job name"),
        ("etcd://host/job?ttl=0", "ttl=0"),
        ("etcd://host/job?ttl=soon", "ttl=soon"),
        ("etcd://host/job?tll=3", "'tll' is not known"),
        ("etcd://me:pass@host/job", "is no HOST:PORT"),
    ],
)
def test_a_wrong_election_url(url: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_election(url)
    assert words in str(caught.value)
    assert url in str(caught.value)
    assert "etcd://HOST[:PORT]" in str(caught.value)


def test_election_urls() -> None:
    found = parse_election("etcd://a,b:12,[::1]:7/my-job?ttl=9")
    assert found.endpoints == (Endpoint("a", 2379), Endpoint("b", 12), Endpoint("::1", 7))
    assert (found.job, found.ttl_s) == ("my-job", 9)
    assert found.key("term") == "/holdfast/my-job/term"
    assert str(found.endpoints[2]) == "[::1]:7"


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
