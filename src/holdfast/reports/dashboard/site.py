"""Puts the dashboard's pages together: the page itself, its stream, logs and orders.

A reader with the token of the printed URL sees the page and gives orders; a cookie keeps the token.
A page of another site can neither read anything (SameSite) nor give an order (Origin). The names of
the server that a request may use are checked before (engine/net/web_server.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    JSONResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.engine.core.errors import HoldfastError
from holdfast.engine.core.plain_text import escape_values
from holdfast.engine.net.web_server import WebServer, make_server
from holdfast.engine.runtime.contact import read_worker_log
from holdfast.engine.runtime.rundir import RunDir
from holdfast.reports.dashboard.feed import QUEUE_MAX, Feed, RunWatch
from holdfast.reports.dashboard.order_desk import OrderDesk
from holdfast.reports.dashboard.run_files import describe_usage

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
READING = ("GET", "HEAD")
STATIC = Path(__file__).with_name("static")
ORDER_BYTES_MAX = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Describes the port at which the dashboard listens, and its token."""

    port: int
    token: str = field(repr=False)

    @property
    def cookie(self) -> str:
        """Return the name of the cookie: browsers keep one jar for all ports of a host."""
        return f"holdfast-{self.port}"

    def is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(errors="replace"), self.token.encode())


class AccessGuard:
    """Passes requests with the token on to an application, and refuses the rest."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection, as ASGI has it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        token = self._token_in_url(scope)
        problem = self._find_problem(scope, token)

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                if token and not problem:
                    value = f"{self._access.cookie}={token}; Path=/; HttpOnly; SameSite=Strict"
                    headers.append("set-cookie", value)
            await send(message)

        refusal = PlainTextResponse(problem + "\n", status_code=403)
        await (refusal if problem else self._app)(scope, receive, send_guarded)

    def _find_problem(self, scope: Scope, token: str) -> str:
        """Return the reason that a request is refused, as a sentence; empty: it is not."""
        headers, access = Headers(scope=scope), self._access
        if not access.is_token(token or self._token_in_cookie(headers)):
            return "The token is missing or wrong: use the URL that the dashboard has printed."
        own = f"http://{headers.get('host', '')}"
        if scope["method"] not in READING and headers.get("origin") != own:
            return "Orders are taken only from the dashboard's own page."
        return ""

    def _token_in_url(self, scope: Scope) -> str:
        if scope["path"] != "/":
            return ""
        query = parse_qs(scope["query_string"].decode("latin-1"))
        return str(query.get("token", [""])[0])

    def _token_in_cookie(self, headers: Headers) -> str:
        try:
            found = SimpleCookie(headers.get("cookie", "")).get(self._access.cookie)
        except CookieError:
            return ""
        return str(found.value) if found is not None else ""


class Site:
    """Answers the requests that the guard lets through."""

    def __init__(
        self,
        run_dir: RunDir,
        tls: ssl.SSLContext | None = None,
        queue_max: int = QUEUE_MAX,
        update: Callable[[], None] | None = None,
    ) -> None:
        """`update` brings the files up to date, if they are copies of those elsewhere."""
        self._run_dir = run_dir
        self._tls = tls
        self.feed = Feed(queue_max)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watch = RunWatch(run_dir, tls, self.feed, update)
        self._desk = OrderDesk(run_dir, tls, self._tell_orders)

    def application(self, access: Access) -> ASGIApp:
        """Return the application with its guard."""
        routes = [
            Route("/", self._page),
            Route("/api/state", self._state),
            Route("/api/stream", self._stream),
            Route("/api/log", self._log),
            Route("/api/usage", self._usage),
            Route("/api/orders", self._ask, methods=["POST"]),
            Route("/api/orders/confirm", self._confirm, methods=["POST"]),
            Mount("/static", StaticFiles(directory=STATIC)),
        ]
        return AccessGuard(Starlette(routes=routes, lifespan=self._watch_run), access)

    @contextlib.asynccontextmanager
    async def _watch_run(self, _: Starlette) -> AsyncIterator[None]:
        """Watch the run as long as the server works."""
        self._loop = asyncio.get_running_loop()
        watching = asyncio.create_task(self._watch.run())
        try:
            yield
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching

    def _tell_orders(self, orders: list[dict[str, Any]]) -> None:
        """Publish the orders; called by any thread."""
        if self._loop is not None:
            # RuntimeError: the server has ended.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self.feed.publish, "orders", orders)

    async def _page(self, _: Request) -> Response:
        return FileResponse(STATIC / "index.html", media_type="text/html")

    async def _state(self, _: Request) -> Response:
        return JSONResponse(self.feed.state())

    async def _stream(self, _: Request) -> Response:
        if self.feed.is_full:
            return _problem("Too many pages follow this dashboard: close one of them.", 503)
        return StreamingResponse(self.feed.follow(), media_type="text/event-stream")

    async def _log(self, request: Request) -> Response:
        worker = request.query_params.get("worker", "")
        if not (worker.isascii() and worker.isdecimal() and len(worker) < 10):
            return _problem(f"worker={worker} is no number of a worker.", 400)
        asked = self._run_dir, self._tls, int(worker)
        name, lines = await asyncio.to_thread(read_worker_log, *asked)
        return JSONResponse({"name": name, "lines": lines})

    async def _usage(self, request: Request) -> Response:
        node = request.query_params.get("node", "")
        if node not in self.feed.state().get("machines", ()):
            return _problem("The use of no node of this name has been measured.", 404)
        found = await asyncio.to_thread(describe_usage, self._run_dir.path, node)
        return JSONResponse(escape_values(found))

    async def _ask(self, request: Request) -> Response:
        return await self._order(request, self._desk.ask)

    async def _confirm(self, request: Request) -> Response:
        return await self._order(request, self._desk.confirm)

    async def _order(self, request: Request, take: Callable[[bytes], object]) -> Response:
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > ORDER_BYTES_MAX:
                return _problem("The order is too long.", 413)
        try:
            return JSONResponse(await asyncio.to_thread(take, body))
        except (HoldfastError, OSError) as error:
            return _problem(str(error), 409)


def make_dashboard(
    site: Site, listener: socket.socket, host: str, token: str = ""
) -> tuple[WebServer, str]:
    """Return a server of a site for a listening socket, and the URL with its token."""
    access = Access(port=listener.getsockname()[1], token=token or secrets.token_urlsafe(32))
    server, address = make_server(site.application(access), listener, host, site.feed.close)
    return server, f"http://{address}/?token={access.token}"


def _problem(text: str, status: int) -> Response:
    return JSONResponse({"problem": text}, status_code=status)
