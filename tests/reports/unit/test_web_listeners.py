"""The listeners for browsers and scrapers bound what strangers cost, and refuse foreign names."""

from __future__ import annotations

import collections
import http.client
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from dashboard_kit import LIMIT_S, write_crashed_run
from holdfast.cli.main import main
from holdfast.engine.net.web_server import STRANGERS_MAX, WORKING_MAX, listen, make_server

pytest.importorskip("prometheus_client")
from holdfast.reports.run_metrics import MetricsPage

URL = re.compile(r"(dashboard|metrics): (http://\S+)")
SILENT = STRANGERS_MAX + 100


class WebCommand:
    """Is `holdfast dashboard` or `holdfast metrics` as a process, with its URL."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.pid = process.pid
        parts = urlsplit(url)
        self.address = parts.hostname or "", parts.port or 0
        self.host = parts.netloc
        self.path = f"{parts.path}?{parts.query}"

    def ask(self, **headers: str) -> tuple[int, str]:
        """Return status and body of one answer."""
        connection = http.client.HTTPConnection(*self.address, timeout=LIMIT_S)
        try:
            connection.request("GET", self.path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, LIMIT_S)

    def request(self) -> bytes:
        """Return a whole request, whose connection may be used again."""
        return f"GET {self.path} HTTP/1.1\r\nhost: {self.host}\r\n\r\n".encode()

    def count_threads(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/task"))

    def count_sockets(self) -> int:
        folder = f"/proc/{self.pid}/fd"
        return sum(is_socket(f"{folder}/{fd}") for fd in os.listdir(folder))


@pytest.fixture(params=["dashboard", "metrics"])
def web(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[WebCommand]:
    run_dir = tmp_path / "run"
    write_crashed_run(run_dir)
    command = [sys.executable, "-m", "holdfast.cli.main", request.param, str(run_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            printed = URL.search(process.stdout.readline())
            assert printed is not None
            yield WebCommand(process, printed[2])
        finally:
            process.kill()


def is_socket(path: str) -> bool:
    try:
        return os.readlink(path).startswith("socket:")
    except FileNotFoundError:  # closed since it was listed
        return False


def find_readable(sockets: Sequence[socket.socket], limit_s: float) -> list[socket.socket]:
    """Return the readable ones, whatever their descriptors are."""
    with selectors.DefaultSelector() as selector:
        for each in sockets:
            selector.register(each, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(limit_s)]  # type: ignore[misc]


def has_ended(sock: socket.socket) -> bool:
    """Return whether the server has closed a connection; its bytes are dropped."""
    try:
        while find_readable([sock], 0):
            if not sock.recv(1 << 16):
                return True
    except OSError:
        return True
    return False


@pytest.mark.slow
def test_silent_connections_keep_no_request_out(web: WebCommand) -> None:
    assert web.ask()[0] == 200
    threads = web.count_threads()
    with ExitStack() as stack:
        for _ in range(SILENT):
            stack.enter_context(web.connect())
        for _ in range(5):
            assert web.ask()[0] == 200
        assert web.count_sockets() < STRANGERS_MAX + 50
        assert web.count_threads() < threads + SILENT / 10


def test_a_lasting_flood_keeps_no_request_of_its_own_address_out(web: WebCommand) -> None:
    over = threading.Event()

    def flood() -> None:
        with ExitStack() as stack:
            held: collections.deque[socket.socket] = collections.deque()
            while not over.is_set():
                held.append(stack.enter_context(web.connect()))
                if len(held) > SILENT:
                    held.popleft().close()

    with ThreadPoolExecutor(1) as pool:
        flooding = pool.submit(flood)
        try:
            assert [web.ask()[0] for _ in range(10)] == [200] * 10
        finally:
            over.set()
        flooding.result(LIMIT_S)


@pytest.mark.slow
def test_slow_silent_and_idle_connections_are_ended(web: WebCommand) -> None:
    head = iter(web.request() * 1000)
    without_body = web.request().replace(b"\r\n\r\n", b"\r\ncontent-length: 9\r\n\r\n")
    with ExitStack() as stack:
        silent, slow, idle, owing = (stack.enter_context(web.connect()) for _ in range(4))
        for each, request in ((idle, web.request()), (owing, without_body)):
            each.sendall(request)
            assert each.recv(4096).startswith(b"HTTP/1.1 200")
        slow.sendall(f"GET {web.path} HTTP/1.1\r\nhost: {web.host}\r\nx: ".encode())
        waiting, deadline = [silent, slow, idle, owing], time.monotonic() + LIMIT_S
        while waiting:
            assert time.monotonic() < deadline, f"{len(waiting)} connections are still open"
            ready = find_readable(waiting, 0.5)
            waiting = [each for each in waiting if each not in ready or not has_ended(each)]
            if slow in waiting and not ready:
                slow.send(bytes([next(head)]).replace(b"\r", b"x").replace(b"\n", b"x"))
    assert web.ask()[0] == 200


def test_a_name_of_elsewhere_is_refused_in_one_sentence(web: WebCommand) -> None:
    port = web.address[1]
    for name in ("evil.example", "127.0.0.1.evil.example", "10.0.0.1"):
        status, text = web.ask(host=f"{name}:{port}")
        assert status == 403
        assert text == (
            f"The name '{name}:{port}' is foreign to this server: use the URL that it printed.\n"
        )
    for name in ("127.0.0.1", "localhost", "LOCALHOST"):
        assert web.ask(host=f"{name}:{port}")[0] == 200


def test_a_head_that_is_too_long_is_refused(web: WebCommand) -> None:
    with web.connect() as sock:
        sock.sendall(f"GET {web.path} HTTP/1.1\r\nhost: {web.host}\r\nx: ".encode())
        sock.sendall(b"x" * (1 << 16))
        assert sock.recv(4096).startswith((b"HTTP/1.1 400", b"HTTP/1.1 431"))
    assert web.ask()[0] == 200


@contextmanager
def served(page: MetricsPage) -> Iterator[tuple[str, int]]:
    """Serve metrics in a thread."""
    listener = listen("127.0.0.1", 0)
    address = listener.getsockname()
    server, _ = make_server(page.application(), listener, "127.0.0.1")
    thread = threading.Thread(target=server.run, kwargs=dict(sockets=[listener]), daemon=True)
    thread.start()
    try:
        yield address
    finally:
        server.should_exit = True
        thread.join(LIMIT_S)
        listener.close()
    assert not thread.is_alive()


def test_scrapes_at_once_are_bounded_and_look_at_the_run_once() -> None:
    collected, free = [], threading.Event()

    def collect() -> bytes:
        assert free.wait(LIMIT_S)
        collected.append(threading.get_ident())
        return b"up 1\n"

    asked = WORKING_MAX + 50
    with served(MetricsPage(collect)) as address, ExitStack() as stack:
        request = f"GET /metrics HTTP/1.0\r\nhost: {address[0]}:{address[1]}\r\n\r\n".encode()
        clients = []
        for _ in range(asked):
            client = stack.enter_context(socket.create_connection(address, LIMIT_S))
            client.sendall(request)
            clients.append(client)
        while len(clients) > WORKING_MAX:
            ready = find_readable(clients, LIMIT_S)
            assert ready
            for client in ready:
                assert client.recv(4096).startswith(b"HTTP/1.1 503")
                clients.remove(client)
        free.set()
        for client in clients:
            assert client.recv(4096).startswith(b"HTTP/1.1 200")
    assert len(collected) == 1


def test_metrics_end_when_asked(tmp_path: Path) -> None:
    write_crashed_run(tmp_path / "run")
    command = [sys.executable, "-m", "holdfast.cli.main", "metrics", str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as it:
        assert it.stdout is not None
        assert URL.search(it.stdout.readline()) is not None
        it.send_signal(signal.SIGINT)
        _, errors = it.communicate(timeout=LIMIT_S)
        assert (it.returncode, errors[-3000:]) == (130, "")


def test_metrics_refuse_an_address_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_crashed_run(tmp_path / "run")
    assert main(["metrics", str(tmp_path / "run"), "--host", "192.0.2.1"]) == 2
    assert "cannot listen on 192.0.2.1:0" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["metrics", str(tmp_path / "run"), "--port", "70000"])
    assert "70000 is no port: 0 to 65535" in capsys.readouterr().err
