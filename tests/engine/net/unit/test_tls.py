"""TLS with the operator's certificates: who shows the wrong one is refused, in one line."""

from __future__ import annotations

import asyncio
import datetime
import re
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
import trustme

from gates import (
    HOST,
    PATIENCE_S,
    SECRET,
    Site,
    ask,
    between,
    honest,
    play,
    refusal,
    site,
    stranger,
    until,
)
from holdfast.engine.core.errors import UserError, WireError
from holdfast.engine.net.channel import Channel, connect
from holdfast.engine.net.tls import TlsFiles, client_context, server_context
from holdfast.engine.wire.messages import StatusReply, StatusRequest

SOON_S = 5.0  # asyncio itself waits 30 s for the end of TLS
LONG_AGO = datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc)
# The words depend on OpenSSL's version and on how much of its chain the peer sends.
UNKNOWN = "(unable to get local issuer|self.signed) certificate"
Issue = Callable[..., TlsFiles]


@pytest.fixture(scope="module")
def issue(tmp_path_factory: pytest.TempPathFactory) -> Issue:
    """Return issue(ca="ours", host=HOST, not_after=None): it makes files; one CA for each name."""
    authorities: dict[str, trustme.CA] = {}

    def make(
        ca: str = "ours", host: str = HOST, not_after: datetime.datetime | None = None
    ) -> TlsFiles:
        authority = authorities.setdefault(ca, trustme.CA())
        before = LONG_AGO - datetime.timedelta(days=9) if not_after else None
        leaf = authority.issue_cert(host, not_before=before, not_after=not_after)
        folder = tmp_path_factory.mktemp("tls")
        files = TlsFiles(cert=folder / "cert", key=folder / "key", ca=folder / "ca")
        leaf.cert_chain_pems[0].write_to_path(files.cert)
        leaf.private_key_pem.write_to_path(files.key)
        authority.cert_pem.write_to_path(files.ca)
        return files

    return make


@pytest.fixture(scope="module")
def ours(issue: Issue) -> TlsFiles:
    return issue()


def test_both_sides_prove_certificate_and_secret(ours: TlsFiles) -> None:
    async def scene() -> None:
        async with site(tls=server_context(ours)) as here:
            client = client_context(ours)
            await honest(here, client)
            told = await refusal(connect(HOST, here.port, b"another secret", tls=client))
            assert "it hung up on our proof" in told
            await until(lambda: here.lines)
            await honest(here, client)
            assert len(here.lines) == 1
            assert here.lines[0].endswith("the client does not know this job's secret")
            inside = await connect(HOST, here.port, SECRET, tls=client)
            secured = inside._writer.get_extra_info("ssl_object")
            assert secured.version() == "TLSv1.3"
            assert secured.getpeercert()["subjectAltName"] == (("IP Address", HOST),)
            inside.close()

    play(scene)


def test_many_large_replies_over_tls_arrive_in_order(ours: TlsFiles) -> None:
    async def talk(channel: Channel) -> None:
        assert await channel.receive(StatusRequest) == StatusRequest()
        for number in range(200):
            channel.send(StatusReply(text=f"{number}" + "x" * 20_000))
        await channel.finish()

    async def scene() -> None:
        async with site(talk, tls=server_context(ours)) as here:
            channel = await connect(HOST, here.port, SECRET, tls=client_context(ours))
            channel.send(StatusRequest())
            for number in range(200):
                reply = await channel.receive(StatusReply)
                assert reply == StatusReply(text=f"{number}" + "x" * 20_000)
            assert await channel.receive(StatusReply) is None
            channel.close()

    play(scene)


def bare_client(ours: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(ours.ca)
    return context


def old_client(ours: TlsFiles) -> ssl.SSLContext:
    context = client_context(ours)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    return context


@pytest.mark.parametrize(
    ("whose", "why"),
    [
        ("expired", "its certificate is not accepted: certificate has expired"),
        ("unknown", f"its certificate is not accepted: {UNKNOWN}"),
        ("self-signed", "its certificate is not accepted: self.signed certificate"),
        ("none", "it shows no certificate"),
        ("old", "TLS failed: unsupported protocol"),
    ],
)
def test_a_client_with_a_wrong_certificate(
    whose: str, why: str, issue: Issue, ours: TlsFiles, tmp_path: Path
) -> None:
    def showing(files: TlsFiles) -> ssl.SSLContext:
        return client_context(TlsFiles(cert=files.cert, key=files.key, ca=ours.ca))

    context = {
        "expired": lambda: showing(issue(not_after=LONG_AGO)),
        "unknown": lambda: showing(issue(ca="other")),
        "self-signed": lambda: showing(signed_by_itself(tmp_path / "root")),
        "none": lambda: bare_client(ours),
        "old": lambda: old_client(ours),
    }[whose]()

    async def scene() -> None:
        async with site(tls=server_context(ours)) as here:
            told = await refusal(connect(HOST, here.port, SECRET, tls=context))
            assert told != ""
            assert "\n" not in told
            await one_line(here, client_context(ours), why)
            assert len(here.channels) == 1  # the honest one

    play(scene)


def signed_by_itself(path: Path) -> TlsFiles:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(path)
    authority.private_key_pem.write_to_path(path, append=True)
    return TlsFiles(cert=path, key=path, ca=path)


async def one_line(here: Site, client: ssl.SSLContext, why: str) -> None:
    await until(lambda: here.lines)
    await honest(here, client)
    assert len(here.lines) == 1, here.lines
    assert re.fullmatch(rf"refused {HOST}:\d+: {why}.*", here.lines[0]), here.lines


@pytest.mark.parametrize(
    ("whose", "why"),
    [
        ("expired", "its certificate is not accepted: certificate has expired"),
        ("unknown", f"its certificate is not accepted: {UNKNOWN}"),
        ("elsewhere", "its certificate is not accepted: Hostname mismatch"),
        ("numbered", "its certificate is not accepted: IP address mismatch"),
    ],
)
def test_a_server_with_a_wrong_certificate(
    whose: str, why: str, issue: Issue, ours: TlsFiles
) -> None:
    theirs = {
        "expired": lambda: issue(not_after=LONG_AGO),
        "unknown": lambda: issue(ca="other"),
        "elsewhere": lambda: issue(host="node7.example"),
        "numbered": lambda: issue(host="node7.example"),
    }[whose]()
    host = "localhost" if whose == "elsewhere" else HOST

    async def scene() -> None:
        async with site(tls=server_context(theirs)) as here:
            client = client_context(ours)
            with pytest.raises(WireError, match=f"^{host}:{here.port}: {why}"):
                await connect(host, here.port, SECRET, tls=client)
            await until(lambda: here.lines)
            assert len(here.lines) == 1  # what the server sees of it
            if whose in ("elsewhere", "numbered"):
                unchecked = client_context(ours, check_names=False)
                channel = await connect(host, here.port, SECRET, tls=unchecked)
                assert await ask(channel) == StatusReply(text="hello")
                channel.close()

    play(scene)


def test_a_connection_with_tls_on_one_side_only_is_refused_with_the_reason(ours: TlsFiles) -> None:
    async def scene() -> None:
        async with site(tls=server_context(ours), handshake_s=0.3) as here:
            told = await refusal(connect(HOST, here.port, SECRET))
            assert told.endswith("if it wants TLS, this side needs certificates")
            await one_line(here, client_context(ours), "it did not finish the handshake in 0.3 s")
        async with site() as here:
            told = await refusal(connect(HOST, here.port, SECRET, tls=client_context(ours)))
            assert told == f"{HOST}:{here.port}: it does not speak TLS"
            await until(lambda: here.lines)
            assert here.lines[0].endswith("it speaks TLS, which this job was started without")

    play(scene)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "it does not speak TLS"),
        (b"HOLDFAST\x00\x01" + b"n" * 48, "it does not speak TLS"),
        (b"\x16\x03\x01", "it did not finish the handshake in 0.5 s"),
        (b"", "it did not finish the handshake in 0.5 s"),
    ],
)
def test_strangers_before_tls(words: bytes, why: str, ours: TlsFiles) -> None:
    async def scene() -> None:
        async with site(tls=server_context(ours), handshake_s=0.5) as here:
            peer = await stranger(here)
            peer.say(words)
            await peer.ended()
            await one_line(here, client_context(ours), why)

    play(scene)


def test_a_client_that_leaves_before_tls_is_agreed_is_named(ours: TlsFiles) -> None:
    async def scene() -> None:
        async with site(tls=server_context(ours)) as here:
            peer = await stranger(here)
            peer.writer.close()
            await one_line(here, client_context(ours), "it left before TLS was agreed")

    play(scene)


def test_a_flood_of_half_open_tls_is_bounded(ours: TlsFiles) -> None:
    async def scene() -> None:
        tls = server_context(ours)
        async with site(tls=tls, strangers_max=4, handshake_s=PATIENCE_S) as here:
            peers = [await stranger(here) for _ in range(20)]
            await asyncio.gather(*(peer.ended() for peer in peers[:16]))
            assert here.gate.strangers == 4
            await honest(here, client_context(ours))
            for peer in peers[16:]:
                peer.writer.close()

    play(scene)


def test_bytes_altered_inside_tls_are_refused(ours: TlsFiles) -> None:
    """An attacker between the two has flipped a bit of the client's data after the handshake."""

    async def scene() -> None:
        async with site(tls=server_context(ours)) as here, between(here.port) as tapped:
            channel = await connect(HOST, tapped.port, SECRET, tls=client_context(ours))
            assert await ask(channel) == StatusReply(text="hello")
            tapped.alter = lambda data: data[:-1] + bytes([data[-1] ^ 1])
            channel.send(StatusRequest())
            await until(lambda: here.lines)
            await one_line(here, client_context(ours), "TLS failed: decryption failed")
            channel.close()

    play(scene)


def test_a_connection_that_is_closed_twice_ends_though_the_peer_does_not_answer(
    ours: TlsFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's asyncio loses track of TLS at a second close: 3.11.2 then fails at an abort."""
    monkeypatch.setattr("holdfast.engine.net.channel.HANDSHAKE_S", 0.2)

    async def scene() -> None:
        async with site(tls=server_context(ours)) as here, between(here.port) as tapped:
            channel = await connect(HOST, tapped.port, SECRET, tls=client_context(ours))
            tapped.alter = lambda data: b""  # the word that ends TLS does not arrive
            socket = channel._writer.get_extra_info("socket")
            channel.close()
            channel.close()
            await channel.finish()
            await asyncio.wait_for(until(lambda: socket.fileno() == -1), SOON_S)

    play(scene)


def test_files_that_cannot_be_used(issue: Issue, ours: TlsFiles, tmp_path: Path) -> None:
    nonsense = tmp_path / "nonsense"
    nonsense.write_text("not PEM")
    locked = tmp_path / "locked"
    locked.write_text(
        "-----BEGIN ENCRYPTED PRIVATE KEY-----\nMIGj\n-----END ENCRYPTED PRIVATE KEY-----\n"
    )
    none = tmp_path / "none"
    for cert, key, ca, why in [
        (none, ours.key, ours.ca, f"the TLS file {none} cannot be read: No such file"),
        (ours.cert, none, ours.ca, f"the TLS file {none} cannot be read: No such file"),
        (ours.cert, ours.key, none, f"the TLS file {none} cannot be read: No such file"),
        (ours.cert, ours.key, tmp_path, f"{tmp_path} cannot be read: Is a directory"),
        (ours.cert, issue().key, ours.ca, "does not belong to the certificate"),
        (nonsense, ours.key, ours.ca, "are not a PEM certificate and its PEM key"),
        (ours.cert, nonsense, ours.ca, "are not a PEM certificate and its PEM key"),
        (ours.cert, locked, ours.ca, "key without a password"),
        (ours.cert, ours.key, nonsense, f"{nonsense} holds no CA certificate in PEM"),
    ]:
        for make in (server_context, client_context):
            with pytest.raises(UserError) as told:
                make(TlsFiles(cert=cert, key=key, ca=ca))
            assert why in str(told.value)
            assert "\n" not in str(told.value)
