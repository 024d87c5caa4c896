"""Sets up TCP for the control plane: it connects quickly or not at all, and notices a dead network.

Without these options a connection whose network is gone looks alive for a quarter of an hour. With
them the kernel gives up after `dead_s` without an acknowledgement. A frozen peer is another case:
its kernel still acknowledges. It is disconnected, like a peer that does not read, only when its
receive buffer has been full for `dead_s`; it can connect again when it wakes.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import math
import re
import socket
from collections.abc import Sequence
from typing import Any

from holdfast.engine.core.errors import UserError

HOST = re.compile(r"[\w.:%-]{0,253}")
PORT_MAX = (1 << 16) - 1
CONNECT_S = 1.0
RESOLVE_S = 5.0  # to resolve a name; an address needs no time
DEAD_S = 2.0
CONNECTING_MAX = 4096  # agents that come back all at once, when a coordinator has died


def tune(sock: socket.socket, dead_s: float) -> None:
    """Ask the kernel to close the connection after `dead_s` without acknowledgement.

    If the connection is idle, this takes up to 1 s longer.
    """
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    # Keepalive covers an idle connection, the user time-out one with data under way; the kernel
    # counts keepalive in whole seconds, and ends it by the user time-out rather than by its count.
    probe_s = max(1, math.ceil(dead_s / 2))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(dead_s * 1000)))


async def _resolve(host: str, port: int) -> Sequence[tuple[Any, ...]]:
    """Return the addresses of a host. An address needs no resolver. OSError."""
    with contextlib.suppress(socket.gaierror):
        numeric = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=numeric)
    resolving = asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    try:
        return await asyncio.wait_for(resolving, RESOLVE_S)
    except asyncio.TimeoutError:
        raise TimeoutError(f"the name {host} is not resolved within {RESOLVE_S:g} s") from None


async def dial(host: str, port: int, connect_s: float) -> socket.socket:
    """Return a connected socket; each address of the host is tried for `connect_s`. OSError."""
    loop, found = asyncio.get_running_loop(), await _resolve(host, port)
    failure: OSError = ConnectionError(f"{host} has no address")
    for family, kind, protocol, _, address in found:
        sock = socket.socket(family, kind, protocol)
        sock.setblocking(False)
        try:
            await asyncio.wait_for(loop.sock_connect(sock, address), connect_s)
        except asyncio.TimeoutError:
            sock.close()
            failure = TimeoutError(f"{host}:{port} does not answer within {connect_s:g} s")
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise failure


def check_endpoint(host: str, port: int) -> None:
    """Raise UserError for a --host (which may be empty) or --port that no machine can have."""
    if not HOST.fullmatch(host):
        raise UserError(f"--host {host[:100]!r} is no name or address of a machine")
    if not 0 <= port <= PORT_MAX:
        raise UserError(f"--port {str(port)[:20]} must be from 0 to {PORT_MAX}")


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket at an address that agents can reach. UserError."""
    try:
        if not host or ipaddress.ip_address(host).is_unspecified:
            raise UserError(
                f"--host {host or repr(host)} names no single machine: give a name or address "
                "that agents can reach"
            )
    except ValueError:
        pass  # it is a name
    check_endpoint(host, port)
    try:
        kind, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=kind, backlog=CONNECTING_MAX)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(
            f"cannot listen on {host}:{port}: {why}; give an address of this machine with --host, "
            "and a free --port"
        ) from None


def name_of(address: object) -> str:
    """Format the address of a connection's end, as the kernel reports it, as HOST:PORT."""
    if isinstance(address, tuple) and len(address) >= 2:
        host, port = address[:2]
        return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
    return "a peer without an address"
