"""Listens for browsers, and serves the dashboard until it is interrupted."""

from __future__ import annotations

import contextlib
import secrets
import socket
import ssl
from collections.abc import Callable

import uvicorn

from holdfast.core.errors import UserError
from holdfast.dashboard.access import Access, bracket_host, is_any
from holdfast.dashboard.site import Site
from holdfast.runtime.rundir import RunDir

BACKLOG = 64
CONNECTIONS_MAX = 128


class DashboardServer(uvicorn.Server):
    """Ends the streams of pages before it waits for the end of all answers."""

    def __init__(self, config: uvicorn.Config, site: Site) -> None:
        super().__init__(config)
        self._site = site

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End as uvicorn does."""
        self._site.feed.close()
        await super().shutdown(sockets)


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


def make_server(
    site: Site, listener: socket.socket, host: str, token: str = ""
) -> tuple[DashboardServer, str]:
    """Return a server for a listening socket, and the URL with its token."""
    port = listener.getsockname()[1]
    access = Access(host=host, port=port, token=token or secrets.token_urlsafe(32))
    config = uvicorn.Config(
        site.application(access),
        log_level="error",
        access_log=False,
        http="h11",
        ws="none",
        loop="asyncio",
        lifespan="on",
        proxy_headers=False,
        server_header=False,
        limit_concurrency=CONNECTIONS_MAX,
        timeout_graceful_shutdown=1,
    )
    shown = socket.gethostname() if is_any(host) else bracket_host(host)
    return DashboardServer(config, site), f"http://{shown}:{port}/?token={access.token}"


def serve(
    run_dir: RunDir,
    tls: ssl.SSLContext | None,
    *,
    host: str,
    port: int,
    tell: Callable[[str], None],
    update: Callable[[], None] | None = None,
) -> None:
    """Serve the dashboard of a run until Ctrl-C. `tell` takes the URL. UserError.

    `update` brings the run's files up to date, if they are copies of those elsewhere.
    """
    with contextlib.closing(listen(host, port)) as listener:
        server, url = make_server(Site(run_dir, tls, update=update), listener, host)
        tell(url)
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[listener])
