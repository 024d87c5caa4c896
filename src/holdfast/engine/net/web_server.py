"""Serves HTTP to browsers and scrapers, and limits what a connection may cost.

A connection is a stranger until the head of a request has come, and again between two requests.
The rules of net/strangers.py apply to it, as on the control plane. The module knows no application:
callers pass one, and uvicorn handles HTTP. Every request must call the server by one of its own
names, because a page of another site can have its name resolved to this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Callable
from dataclasses import dataclass

import uvicorn
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from holdfast.engine.core.errors import UserError
from holdfast.engine.net.strangers import Strangers
from holdfast.engine.net.tcp import tune

BACKLOG = 64  # accepted at once, too
HEAD_S = 5  # to send the head of a request
HEAD_BYTES_MAX = 16 << 10
STRANGERS_MAX = 512  # several times BACKLOG: a request is read some turns after its connection came
WORKING_MAX = 64
DEAD_S = 20.0
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")
NAME_SHOWN_MAX = 100


@dataclass(frozen=True, slots=True)
class OwnNames:
    """Lists the names by which requests may call a server."""

    names: frozenset[str]  # in small letters
    any_address: bool  # an address cannot be rebound as a name can
    port: int

    @classmethod
    def collect(cls, host: str, port: int) -> OwnNames:
        """Return the names of a server that listens at `host`, as --host has it."""
        names = {*LOOPBACK_NAMES, bracket_host(host).lower()}
        if not is_loopback(host):
            names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
        return cls(frozenset(names), is_any(host), port)

    def is_own(self, header: str) -> bool:
        """Return whether a Host header names the server."""
        host, _, port = header.rpartition(":")
        known = host.lower() in self.names or (self.any_address and is_address(host))
        return known and port == str(self.port)


class WebGuard:
    """Lets requests through to an application if they call the server by one of its names.

    At most WORKING_MAX requests are let through at any one time.
    """

    def __init__(self, app: ASGIApp, names: OwnNames) -> None:
        self._app = app
        self._names = names
        self._working = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection, as ASGI has it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._find_refusal(Headers(scope=scope).get("host", ""))
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        self._working += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._working -= 1

    def _find_refusal(self, name: str) -> PlainTextResponse | None:
        """Return the answer to a request that is refused."""
        plain = {"x-content-type-options": "nosniff"}
        if not self._names.is_own(name):
            shown = repr(name[:NAME_SHOWN_MAX])
            text = f"The name {shown} is foreign to this server: use the URL that it printed.\n"
            return PlainTextResponse(text, status_code=403, headers=plain)
        if self._working >= WORKING_MAX:
            text = f"{WORKING_MAX} requests are being answered: try again later.\n"
            return PlainTextResponse(text, status_code=503, headers=plain)
        return None


class WebState(ServerState):
    """Keeps the strangers of one server next to the connections that uvicorn keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.strangers: Strangers[WebConnection] = Strangers(STRANGERS_MAX)


class WebConnection(H11Protocol):
    """Is one connection. It counts among the strangers while no request of it is at work."""

    server_state: WebState

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        tune(transport.get_extra_info("socket"), DEAD_S)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_working:
            self.server_state.strangers.leave(self)

    def on_response_complete(self) -> None:
        super().on_response_complete()  # this may begin with the next request
        if not self._is_working:
            self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self.server_state.strangers.leave(self)
        super().connection_lost(exc)

    @property
    def _is_working(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait_for_head(self) -> None:
        host = self.client[0] if self.client else ""
        closed = self.server_state.strangers.enter(self, host, self.loop.time(), HEAD_S)
        for each, _ in closed:
            each.transport.abort()


class WebServer(uvicorn.Server):
    """Serves one application. `before_end` ends its streams, for which the end would wait."""

    def __init__(self, config: uvicorn.Config, before_end: Callable[[], None]) -> None:
        super().__init__(config)
        self.server_state: WebState = WebState()
        self.is_up = asyncio.Event()
        self._before_end = before_end

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start as uvicorn does; from then on requests and signals are answered."""
        await super().startup(sockets)
        self.is_up.set()

    async def on_tick(self, counter: int) -> bool:
        """End late strangers, ten times a second; return whether the server is to end."""
        for each, _ in self.server_state.strangers.expire(asyncio.get_running_loop().time()):
            each.transport.abort()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End as uvicorn does."""
        self._before_end()
        await super().shutdown(sockets)


def make_server(
    app: ASGIApp, listener: socket.socket, host: str, before_end: Callable[[], None] = lambda: None
) -> tuple[WebServer, str]:
    """Return a server for a listening socket, and the HOST:PORT for its URL."""
    port = listener.getsockname()[1]
    config = uvicorn.Config(
        WebGuard(app, OwnNames.collect(host, port)),
        log_level="error",
        access_log=False,
        http=WebConnection,
        ws="none",
        loop="asyncio",
        lifespan="auto",
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=HEAD_S,
        timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=HEAD_BYTES_MAX,
    )
    shown = socket.gethostname() if is_any(host) else bracket_host(host)
    return WebServer(config, before_end), f"{shown}:{port}"


def serve(listener: socket.socket, server: WebServer, announce: Callable[[], None]) -> None:
    """Serve until Ctrl-C, announce the server once it is up, and close the listening socket."""
    with contextlib.closing(listener), contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(listener, server, announce))


async def _serve(listener: socket.socket, server: WebServer, announce: Callable[[], None]) -> None:
    # Before the server is up, a signal may be lost: Python ignores an exception in a destructor.
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    rising = asyncio.create_task(server.is_up.wait())
    await asyncio.wait({serving, rising}, return_when=asyncio.FIRST_COMPLETED)
    rising.cancel()
    if server.started:
        announce()
    await serving


def listen(host: str, port: int) -> socket.socket:
    """Open the listening socket; port 0: a free one. UserError."""
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = places[0]
        found = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UserError(f"--host {host} is no address of this machine: {error.strerror}") from None
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(BACKLOG)
    except OSError as error:
        found.close()
        raise UserError(
            f"cannot listen on {host}:{port}: {error.strerror}; name another --port, or none"
        ) from None
    return found


def bracket_host(host: str) -> str:
    """Return a host as URLs have it: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def is_any(host: str) -> bool:
    """Return whether this host means all addresses of the machine."""
    return is_address(host) and ipaddress.ip_address(host).is_unspecified


def is_loopback(host: str) -> bool:
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)
