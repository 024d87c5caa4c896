"""Small servers and clients in the hosts of a network laboratory, for the tests of it."""

from __future__ import annotations

import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from labs.network_lab import Host

PATIENCE_S = 20.0  # time limit for events that must happen
SILENCE_S = 0.3  # after this long without an event it counts as silence
PYTHON = [sys.executable, "-S", "-E", "-c"]  # starts at once

ECHO = """
import socket, sys, threading
def echo(connection):
    while data := connection.recv(65536):
        connection.sendall(data)
    connection.close()
server = socket.create_server((sys.argv[1], int(sys.argv[2])))
print(server.getsockname()[1], flush=True)
while True:
    threading.Thread(target=echo, args=server.accept()[:1], daemon=True).start()
"""
CLIENT = """
import socket, sys
try:
    with socket.create_connection((sys.argv[1], int(sys.argv[2])), float(sys.argv[3])) as server:
        server.sendall(b"over the wire")
        print(server.recv(100).decode())
except OSError as error:
    print(type(error).__name__)
"""


def until(ready: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := ready()):
        assert time.monotonic() < deadline, "this should have come about"
        select.select([], [], [], 0.005)
    return found


def serve(host: Host, program: str = ECHO, address: str = "", port: int = 0) -> tuple[int, int]:
    """Start a server process in the host; return its pid and port."""
    command = [*PYTHON, program, address or host.address, str(port)]
    server = host.popen(command, stdout=subprocess.PIPE)
    with server.stdout:
        return server.pid, int(server.stdout.readline())


def call(host: Host, address: str, port: int, timeout_s: float = PATIENCE_S) -> str:
    """Return the answer that a client process in the host gets from a server, or an error name."""
    command = [*PYTHON, CLIENT, address, str(port), str(timeout_s)]
    return host.run(command, stdout=subprocess.PIPE, text=True).stdout.strip()


def connected(host: Host, address: str, port: int) -> socket.socket:
    found = host.socket()
    found.settimeout(PATIENCE_S)
    found.connect((address, port))
    return found


def receive(connection: socket.socket, size: int) -> bytes:
    """Receive `size` bytes, or all until the end if that is earlier."""
    found = b""
    while len(found) < size and (part := connection.recv(size - len(found))):
        found += part
    return found
