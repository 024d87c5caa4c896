"""Cluster managers are asked by HTTP, by TLS with a site's own certificates, and with a ticket."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import json
import ssl
import sys
import threading
import types
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from certificates import make_certificates
from holdfast.clusters.rest_link import RestAccess, RestLink, check_access, describe_ticket
from holdfast.engine.core.errors import Refused, Unreachable, UserError

Answer = tuple[int, dict[str, str], bytes]


class Server:
    """Answers each request by `reply`, and keeps the requests."""

    def __init__(self, tls: Path | None = None) -> None:
        self.reply: Callable[[BaseHTTPRequestHandler], Answer] = lambda request: (200, {}, b"{}")
        self.asked: list[tuple[str, str, Any, dict[str, str]]] = []
        server = self

        class Answers(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length) or b"null")
                server.asked.append((self.command, self.path, body, dict(self.headers)))
                status, headers, data = server.reply(self)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_POST = do_PUT = do_DELETE = do_GET  # noqa: N815

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
        if tls is not None:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(tls / "tls.crt", tls / "tls.key")
            self.http.socket = context.wrap_socket(self.http.socket, server_side=True)
        scheme = "http" if tls is None else "https"
        self.url = f"{scheme}://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def link(self, **how: Any) -> RestLink:
        return RestLink(RestAccess(address=self.url, **how), "YARN")

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def must(link: RestLink, method: str = "GET", path: str = "/x", body: Any = None) -> Any:
    return asyncio.run(link.ask_or_raise(method, path, body))


def test_a_question_is_one_request_in_the_users_name(server: Server) -> None:
    assert must(server.link(user="jo e"), "POST", "/a/b", {"n": 1}) == {}
    ((method, path, body, headers),) = server.asked
    assert (method, path, body) == ("POST", "/a/b?user.name=jo%20e", {"n": 1})
    assert headers["Content-Type"] == "application/json"


@pytest.mark.parametrize(
    ("status", "data", "kind", "said"),
    [
        (400, b'{"diagnostics": "no\\nat all"}', Refused, "YARN says: no$"),
        (404, b'{"RemoteException": {"message": "gone"}}', Refused, "YARN says: gone$"),
        (500, b'{"diagnostics": null}', Unreachable, "YARN says: HTTP status 500"),
        (503, b"<html>", Unreachable, "YARN says: HTTP status 503"),
        (200, b"<html>", Refused, "YARN says: HTTP status 200"),
        (403, b'{"servlet": "a", "message": "GSS failure"}', Refused, "YARN says: GSS failure"),
        (
            500,
            b'{"servlet": "a", "message": "org.apache.hadoop.security.authentication.util.'
            b'KerberosName$NoMatchingRule: No rules applied to me@HERE"}',
            Unreachable,
            "^YARN says: No rules applied to me@HERE$",
        ),
        (401, b"", Refused, "YARN demands a proof of identity: use --kerberos, and run kinit"),
    ],
)
def test_refused_requests_and_unreachable_servers_are_told_apart(
    server: Server, status: int, data: bytes, kind: type[Exception], said: str
) -> None:
    server.reply = lambda request: (status, {}, data)
    with pytest.raises(kind, match=said):
        must(server.link())


@pytest.mark.parametrize("status", [307, 308])
def test_a_standby_sends_every_request_to_the_active_server(server: Server, status: int) -> None:
    standby = Server()
    try:
        for place in (server.url, server.url.removeprefix("http:")):  # Mesos leaves out the scheme
            standby.reply = lambda request, place=place: (  # type: ignore[misc]
                (status, {"Location": place + request.path}, b"standby")
            )
            access = RestAccess(address=standby.url, user="me", password="x")
            for method in ("GET", "POST", "PUT", "DELETE"):
                body = None if method in ("GET", "DELETE") else {"n": 1}
                assert must(RestLink(access, "YARN"), method, "/a", body) == {}
                asked, path, sent, headers = server.asked[-1]
                assert (asked, path, sent) == (method, "/a", body)
                assert headers["Authorization"] == f"Basic {base64.b64encode(b'me:x').decode()}"
    finally:
        standby.close()


def test_a_redirection_to_a_server_without_a_certificate_is_not_followed(
    server: Server, tmp_path: Path
) -> None:
    standby = Server(make_certificates(tmp_path, "127.0.0.1"))
    try:
        standby.reply = lambda request: (307, {"Location": server.url}, b"")
        with pytest.raises(Refused, match="YARN says: HTTP status 307"):
            must(standby.link(ca=str(tmp_path / "ca.crt")), "POST", "/a", {})
    finally:
        standby.close()
    assert not server.asked


def test_the_next_server_is_asked_once_one_does_not_answer(server: Server) -> None:
    access = RestAccess(address=f"http://127.0.0.1:1,{server.url}")
    check_access(access, "--rm", "http://HOST:8088")
    link = RestLink(access, "YARN")
    with pytest.raises(Unreachable, match=r"YARN does not answer at http://127.0.0.1:1 \("):
        must(link)
    assert must(link) == must(link) == {}


def test_a_reason_in_plain_text_is_told(server: Server) -> None:
    server.reply = lambda request: (403, {"Content-Type": "text/plain; charset=utf-8"}, b"no\n!")
    with pytest.raises(Refused, match=r"YARN says: no$"):
        must(server.link())


def test_a_server_that_hangs_up_does_not_answer(server: Server) -> None:
    def hang_up(request: BaseHTTPRequestHandler) -> Answer:
        request.connection.close()
        raise ConnectionError

    server.reply = hang_up
    server.http.handle_error = lambda *how: None  # type: ignore[method-assign]
    with pytest.raises(Unreachable, match=f"YARN does not answer at {server.url}"):
        must(server.link())


def test_certificates_are_checked(tmp_path: Path) -> None:
    made = Server(make_certificates(tmp_path, "127.0.0.1"))
    try:
        assert must(made.link(ca=str(tmp_path / "ca.crt"))) == {}
        with pytest.raises(Unreachable, match="certificate verify failed"):
            must(made.link())
    finally:
        made.close()


def pretend_gssapi(monkeypatch: pytest.MonkeyPatch, step: Callable[[], bytes]) -> list[str]:
    """Put a package in place of gssapi that makes a token without Kerberos; it needs a compiler."""
    found = types.ModuleType("gssapi")
    asked: list[str] = []

    def name(text: str, kind: str) -> str:
        asked.append(f"{text} {kind}")
        return text

    class SecurityContext:
        def __init__(self, *, name: str, usage: str) -> None:
            asked.append(f"{name} {usage}")

        def step(self) -> bytes:
            return step()

    vars(found).update(
        Name=name,
        NameType=types.SimpleNamespace(hostbased_service="host"),
        SecurityContext=SecurityContext,
        exceptions=types.SimpleNamespace(GSSError=RuntimeError),
    )
    monkeypatch.setitem(sys.modules, "gssapi", found)
    return asked


def negotiate(request: BaseHTTPRequestHandler) -> Answer:
    """Answer as Hadoop's filter does: a ticket once, then its cookie (AuthenticationFilter)."""
    proof = f"Negotiate {base64.b64encode(b'ticket').decode()}"
    if request.headers.get("Authorization") == proof:
        return 200, {"Set-Cookie": "hadoop.auth=me; Path=/"}, b'{"by": "ticket"}'
    if "hadoop.auth=me" in (request.headers.get("Cookie") or ""):
        return 200, {}, b'{"by": "cookie"}'
    return 401, {"WWW-Authenticate": "Negotiate"}, b""


def test_a_ticket_is_shown_once(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = pretend_gssapi(monkeypatch, lambda: b"ticket")
    server.reply = negotiate
    link = server.link(kerberos=True)
    assert must(link) == {"by": "ticket"}
    assert must(link) == {"by": "cookie"}
    assert asked == ["HTTP@127.0.0.1 host", "HTTP@127.0.0.1 initiate"]
    with pytest.raises(Refused, match="use --kerberos"):
        must(server.link())


def test_a_missing_ticket_is_said(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> bytes:
        raise RuntimeError("No Kerberos credentials available")

    pretend_gssapi(monkeypatch, fail)
    server.reply = negotiate
    with pytest.raises(Refused, match=r"no Kerberos ticket for HTTP@127.0.0.1 \(No Kerberos"):
        must(server.link(kerberos=True))


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        ("Ticket expired", "there is no Kerberos ticket for HTTP@rm (Ticket expired): run kinit"),
        ("Clock skew too great", "there is no Kerberos ticket for HTTP@rm (Clock skew too great)"),
        (
            "Server HTTP/rm@HERE not found in Kerberos database",
            "Kerberos has no principal HTTP/rm (Server HTTP/rm@HERE not found in Kerberos database)"
            ": write the address with the host name that the principal of its web server has",
        ),
    ],
)
def test_a_ticket_that_cannot_be_had_is_explained(problem: str, said: str) -> None:
    by_gss = "Major (851968): Unspecified GSS failure.  Minor code may provide more information, "
    assert describe_ticket("rm", f"{by_gss}Minor (2529638944): {problem}") == said


def test_a_ticket_that_is_not_accepted_is_said(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gssapi(monkeypatch, lambda: b"other")
    server.reply = negotiate
    with pytest.raises(Refused, match="YARN does not accept a Kerberos ticket as a proof of ident"):
        must(server.link(kerberos=True))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    access = RestAccess(address="http://rm:8088", kerberos=True)
    with pytest.raises(UserError, match=r"one more package: pip install 'holdfast\[yarn\]'"):
        check_access(access, "--rm", "http://HOST:8088")
