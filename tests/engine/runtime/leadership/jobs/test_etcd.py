"""The small client of etcd: fail-over between servers, one sentence for each kind of failure."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import trustme

from holdfast.engine.core.errors import Refused, Unreachable, UserError
from holdfast.engine.runtime.leadership.election import Leader, locate, open_election
from holdfast.engine.runtime.leadership.etcd import Endpoint, EtcdClient, put
from labs.etcd_cluster import EtcdCluster, free_ports
from support import HOST, WAIT_S, start_etcd


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with start_etcd(tmp_path_factory.mktemp("etcd")) as found:
        yield found


@contextlib.asynccontextmanager
async def server(answer: bytes | None) -> AsyncIterator[Endpoint]:
    """Run a server that sends `answer` to every request and hangs up; None: it never answers."""

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
    "result": (b'HTTP/1.1 200 OK\r\n\r\n{"result":7}', "does not answer as etcd v3 does"),
    "list": (b"HTTP/1.1 200 OK\r\n\r\n[1]", "does not answer as etcd v3 does"),
    "no leader": (
        b'HTTP/1.1 503 No\r\n\r\n{"error":"x","message":"etcdserver: no leader","code":14}',
        "says 'etcdserver: no leader'",
    ),
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_another_server_is_tried(kind: str, cluster: EtcdCluster, tmp_path: Path) -> None:
    answer, words = UNUSABLE[kind]

    async def scenario() -> None:
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

    asyncio.run(scenario())


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


@pytest.mark.slow
def test_etcd_behind_tls(tmp_path: Path) -> None:
    tls = make_certificate(tmp_path)
    files = "ca={ca}&cert={cert}&key={key}".format(**tls)
    with start_etcd(tmp_path, size=1, tls=tls) as cluster:
        url = cluster.url("job").replace("etcd://", "etcds://")

        async def scenario() -> None:
            leadership = await open_election(f"{url}?{files}").campaign(HOST, 1, print)
            assert await locate(f"{url}?{files}") == Leader(term=1, host=HOST, port=1)
            await leadership.resign()
            for given in (url, f"{url}?ca={tls['ca']}"):  # unknown to us; we are unknown to it
                with pytest.raises(Unreachable, match=r"we do not agree on TLS: .* certificate"):
                    await locate(given, within_s=1.0)
            with pytest.raises(UserError, match="none cannot be used for TLS"):
                await locate(f"{url}?ca=none")

        asyncio.run(scenario())


def make_certificate(path: Path) -> dict[str, str]:
    """Files of an authority, and of a certificate by it for this machine."""
    authority = trustme.CA()
    certificate = authority.issue_cert(HOST)
    found = {name: str(path / f"{name}.pem") for name in ("ca", "cert", "key")}
    authority.cert_pem.write_to_path(found["ca"])
    certificate.cert_chain_pems[0].write_to_path(found["cert"])
    certificate.private_key_pem.write_to_path(found["key"])
    return found
