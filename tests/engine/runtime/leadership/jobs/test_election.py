"""The leadership of coordinators: one holds it at a time, and knows until when."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import secrets
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from holdfast.engine.core.errors import Deposed, UserError
from holdfast.engine.core.job_record import JobRecord
from holdfast.engine.runtime.leadership.election import (
    EtcdJournal,
    Hold,
    Leader,
    Leadership,
    locate,
    open_election,
    parse_election,
)
from holdfast.engine.runtime.leadership.etcd import Endpoint, EtcdClient, KeyValue, put
from holdfast.engine.runtime.leadership.journal import seal, unseal
from labs.etcd_cluster import EtcdCluster, free_ports
from support import HOST, SPEC, WAIT_S, start_etcd

LONG_TTL_S = 60  # no hiccup of a busy machine ends such a lease


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with start_etcd(tmp_path_factory.mktemp("etcd")) as found:
        yield found


def quiet(text: str) -> None:
    """Ignore a standby's lines about its waiting."""


# ---------------------------------------------------------------- leadership


@pytest.mark.slow
def test_leaders_follow_one_another_in_growing_terms(cluster: EtcdCluster, tmp_path: Path) -> None:
    url = cluster.url(tmp_path.name, LONG_TTL_S)

    async def scenario() -> None:
        assert await locate(url) is None
        election = open_election(url)
        terms, told = [], []
        for port in (1001, 1002, 1003):
            leadership = await election.campaign(HOST, port, quiet)
            assert await locate(url) == Leader(term=leadership.held.term, host=HOST, port=port)
            rival = asyncio.ensure_future(open_election(url).campaign(HOST, 9, told.append))
            while len(told) < len(terms) + 1:
                await asyncio.sleep(0.01)
            assert not rival.done()
            rival.cancel()
            terms.append(leadership.held.term)
            await leadership.resign()
            with pytest.raises(Deposed):
                leadership.check()
        assert terms == [1, 2, 3]
        assert told[0] == f"standing by: {HOST}:1001 is the leader, term 1"

    asyncio.run(scenario())


def test_of_many_at_once_one_is_elected(cluster: EtcdCluster, tmp_path: Path) -> None:
    url = cluster.url(tmp_path.name, LONG_TTL_S)

    async def scenario() -> None:
        campaigns = [
            asyncio.ensure_future(open_election(url).campaign(HOST, port, quiet))
            for port in range(1, 6)
        ]
        for term in range(1, 6):
            done, waiting = await asyncio.wait(
                campaigns, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED
            )
            (winner,) = done
            leadership = winner.result()
            assert leadership.held.term == term
            campaigns = list(waiting)
            await leadership.resign()

    asyncio.run(scenario())


def test_a_term_that_passes_during_a_campaign_is_not_given_again(
    cluster: EtcdCluster, tmp_path: Path
) -> None:
    url = cluster.url(tmp_path.name, LONG_TTL_S)

    async def scenario() -> None:
        election = open_election(url)
        grant, terms = election._etcd.grant, []

        async def interrupted(ttl_s: int, within_s: float) -> tuple[int, float]:
            if not terms:
                other = await open_election(url).campaign(HOST, 2, quiet)
                terms.append(other.held.term)
                await other.resign()
            return await grant(ttl_s, within_s)

        election._etcd.grant = interrupted  # type: ignore[method-assign]
        leadership = None
        while leadership is None:
            leadership = await election._try(HOST, 1)
        assert [*terms, leadership.held.term] == [1, 2]

    asyncio.run(scenario())


class Lossy:
    """Is a path to etcd that carries requests out and loses some answers."""

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
    async def scenario() -> None:
        async with lossy(cluster) as (path, endpoint):
            path.lose = 2
            leadership = await open_election(f"etcd://{endpoint}/{tmp_path.name}?ttl=60").campaign(
                HOST, 1, quiet
            )
            assert leadership.held.term == 1
            journal = EtcdJournal(leadership)
            await journal.load()
            for release_loop in range(3):
                path.lose = release_loop
                await journal.save(JobRecord(term=1, release_loop=release_loop))
            for request in reversed(path.requests):  # late copies of every write
                await path.repeat(request)
            found = await leadership.etcd.read(leadership.url.key("record"), WAIT_S)
            assert found is not None
            assert unseal(found.value).release_loop == 2
            assert await leadership._renew() == ""

    asyncio.run(scenario())


def test_the_office_ends_by_its_own_clock(cluster: EtcdCluster, tmp_path: Path) -> None:
    now = 100.0

    async def scenario() -> None:
        nonlocal now
        election = open_election(cluster.url(tmp_path.name, LONG_TTL_S), now=lambda: now)
        leadership = await election.campaign(HOST, 1, quiet)
        now += LONG_TTL_S * 0.9
        leadership.check()
        now += LONG_TTL_S * 0.1  # etcd has not ended the lease: it knows no such time
        with pytest.raises(Deposed, match="was not renewed"):
            leadership.check()
        with pytest.raises(Deposed):
            await EtcdJournal(leadership).save(JobRecord(term=1))
        with pytest.raises(Deposed):
            await EtcdJournal(leadership).load()
        assert await locate(cluster.url(tmp_path.name)) is not None

    asyncio.run(scenario())


def test_a_record_from_a_later_term_is_not_followed(cluster: EtcdCluster, tmp_path: Path) -> None:
    """The term was removed from etcd by hand: agents would ignore a coordinator of term 1."""

    async def scenario() -> None:
        leadership = await open_election(cluster.url(tmp_path.name, LONG_TTL_S)).campaign(
            HOST, 1, quiet
        )
        later = put(leadership.url.key("record"), seal(JobRecord(term=7)))
        await cluster.client().transact([], [later], [], WAIT_S)
        with pytest.raises(UserError, match=r"record, .* is of term 7, .* put 7 there"):
            await EtcdJournal(leadership).load()

    asyncio.run(scenario())


def test_a_lease_counts_from_when_the_renewal_was_sent() -> None:
    """The answer is late: the lease has run since etcd got the question."""
    now = 100.0

    class SlowEtcd(EtcdClient):
        async def keep_alive(self, lease: int, within_s: float) -> float:
            nonlocal now
            now += 3.0
            return 10.0

        async def read(self, key: str, within_s: float) -> KeyValue:
            return KeyValue(value=b"", created=7, modified=7, lease=5)

    async def scenario() -> None:
        url = parse_election("etcd://nowhere/job")
        hold = Hold(term=1, created=7, lease=5, ttl_s=10.0)
        leadership = Leadership(SlowEtcd([]), url, hold, 100.5, lambda: now)
        assert await leadership._renew() == ""
        assert 6.0 < leadership.remaining_s() < 7.0

    asyncio.run(scenario())


def test_without_etcd_the_office_ends_in_time() -> None:
    async def scenario() -> None:
        url = parse_election(f"etcd://{HOST}:{free_ports(1)[0]}/job")
        hold = Hold(term=4, created=7, lease=5, ttl_s=0.3)
        loop = asyncio.get_running_loop()
        began = loop.time()
        leadership = Leadership(EtcdClient(url.endpoints, 0.1), url, hold, began + 0.3, loop.time)
        with pytest.raises(Deposed, match=r"term 4 .* is over: etcd did not carry out"):
            await leadership.hold()
        assert leadership.remaining_s() <= 0
        assert loop.time() - began >= 0.3

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["revoked", "deleted"])
def test_a_leader_whose_office_is_taken_away_notices(
    how: str, cluster: EtcdCluster, tmp_path: Path
) -> None:
    async def scenario() -> None:
        url = cluster.url(tmp_path.name, 4)
        leadership = await open_election(url).campaign(HOST, 1, quiet)
        if how == "revoked":
            await cluster.client().revoke(leadership.held.lease, WAIT_S)
        else:
            key = base64.b64encode(leadership.url.key("leader").encode()).decode()
            await cluster.client().request("/v3/kv/deleterange", {"key": key}, WAIT_S)
        with pytest.raises(Deposed, match="is over"):
            await asyncio.wait_for(leadership.hold(), WAIT_S)
        assert leadership.remaining_s() > 0, "it learned it from etcd, not from its clock"

    asyncio.run(scenario())


async def renewed(leadership: Leadership) -> None:
    """Wait until the leadership is prolonged once more."""
    calls: list[float] = []
    enough = asyncio.Event()

    def prolonged(left_s: float) -> None:
        calls.append(left_s)
        if len(calls) > 1:  # the first is made at once
            enough.set()

    leadership.on_prolonged(prolonged)
    await asyncio.wait_for(enough.wait(), WAIT_S)


@pytest.mark.slow_with("leader killed")
@pytest.mark.parametrize(
    "which",
    [*(pytest.param(w, marks=pytest.mark.slow) for w in ("killed", "frozen")), "leader killed"],
)
def test_one_etcd_member_is_not_missed(which: str, cluster: EtcdCluster, tmp_path: Path) -> None:
    leader = cluster.leader()
    victim = leader if which == "leader killed" else (leader + 1) % 3
    places = [cluster.endpoints[victim], *cluster.endpoints]  # the victim is asked first

    async def scenario() -> None:
        url = f"etcd://{','.join(map(str, places))}/{tmp_path.name}?ttl=8"
        leadership = await open_election(url).campaign(HOST, 1, quiet)
        holding = asyncio.ensure_future(leadership.hold())
        journal = EtcdJournal(leadership)
        await journal.load()
        if which == "frozen":
            cluster.freeze(victim)
        else:
            cluster.kill(victim)
        await journal.save(JobRecord(term=1))
        await renewed(leadership)
        assert not holding.done()
        assert (await locate(url)) == Leader(term=1, host=HOST, port=1)
        holding.cancel()

    try:
        asyncio.run(scenario())
    finally:
        if which == "frozen":
            cluster.thaw(victim)
        else:
            cluster.restart(victim)


# ---------------------------------------------------------------- what the job is


def test_standbys_learn_what_the_job_is_with_its_secret_only(
    cluster: EtcdCluster, tmp_path: Path
) -> None:
    url, secret = cluster.url(tmp_path.name), secrets.token_bytes(32)

    async def scenario() -> None:
        election = open_election(url)
        assert await election.read_job(secret) is None
        await election.publish(SPEC, secret)
        await election.publish(SPEC, secret)  # by a restarted coordinator
        assert await election.read_job(secret) == SPEC
        with pytest.raises(UserError, match=rf"not the secret of the job {tmp_path.name}"):
            await election.read_job(b"other")
        with pytest.raises(UserError, match=rf"another run named {tmp_path.name}"):
            await election.publish(SPEC, secrets.token_bytes(32))

    asyncio.run(scenario())
    everything = {"key": base64.b64encode(b"\0").decode(), "range_end": "AA=="}
    found = asyncio.run(cluster.client().request("/v3/kv/range", everything, WAIT_S))
    stored = [base64.b64decode(entry["value"]) for entry in found["kvs"]]
    assert any(b"train.py" in value for value in stored)
    for value in stored:
        assert secret not in value
        assert secret.hex().encode() not in value


# ---------------------------------------------------------------- where


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("zookeeper://host/job", "zookeeper is not supported"),
        ("host:2379/job", "is not HOST:PORT"),
        ("etcd://host", "'' is no job name"),
        ("etcd:///job", "'' is not HOST:PORT"),
        ("etcd://a,,b/job", "'' is not HOST:PORT"),
        ("etcd://host:port/job", "port"),
        ("etcd://host:99999/job", "ort"),
        ("etcd://host/a/b", "'a/b' is no job name"),
        ("etcd://host/job?ttl=0", "ttl=0"),
        ("etcd://host/job?ttl=soon", "ttl=soon"),
        ("etcd://host/job?tll=3", "'tll' is not known"),
        ("etcd://me:pass@host/job", "is not HOST:PORT"),
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


@pytest.mark.slow
def test_a_cluster_takes_other_ports_if_a_majority_finds_its_own_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with socket.create_server((HOST, 0)) as one, socket.create_server((HOST, 0)) as other:
        taken = [each.getsockname()[1] for each in (one, other)]
        found = [[*free_ports(4), *taken], free_ports(6)]  # the last ones are those of peers
        monkeypatch.setattr("labs.etcd_cluster.free_ports", lambda _: found.pop(0))
        with start_etcd(tmp_path):
            assert found == []
