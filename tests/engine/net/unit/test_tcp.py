"""A dead network is noticed in seconds, a frozen peer is no dead one, dialling is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
import time

import pytest

from conftest import SCRIPTS
from gates import HOST, PATIENCE_S, SECRET, ask, play, site
from holdfast.engine.net.channel import Channel, connect
from holdfast.engine.net.tcp import dial, name_of
from holdfast.engine.wire.messages import StatusReply, StatusRequest


def told_to_kernel(sock: socket.socket) -> tuple[int, ...]:
    tcp = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_USER_TIMEOUT)
    keepalive = sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    return (keepalive, *(sock.getsockopt(socket.IPPROTO_TCP, option) for option in tcp))


def test_both_sides_are_tuned() -> None:
    async def scene() -> None:
        async with site(dead_s=5.0) as here:
            channel = await connect(HOST, here.port, SECRET, dead_s=2.0)
            assert await ask(channel) == StatusReply(text="hello")
            sockets = [c._writer.get_extra_info("socket") for c in (channel, here.channels[0])]
            assert [told_to_kernel(s) for s in sockets] == [(1, 1, 1, 2000), (1, 3, 3, 5000)]
            channel.close()

    play(scene)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["idle", "busy"])
def test_a_cut_network_is_noticed_by_both_sides(how: str) -> None:
    script = str(SCRIPTS / "cut_network.py")
    done = subprocess.run(
        [sys.executable, script, "1", how], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode == 77:
        pytest.skip(f"no network namespace can be made here: {done.stdout.strip()}")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert all(0.5 < told["noticed"][side] < 4.0 for side in ("client", "server")), told
    assert [line.endswith("nothing was acknowledged") for line in told["lines"]] == [True]


@pytest.mark.slow
def test_a_frozen_peer_keeps_its_connection() -> None:
    async def freeze(channel: Channel) -> None:
        await channel.receive(StatusReply)
        child.send_signal(signal.SIGSTOP)
        channel.send(StatusRequest())  # under way: only the peer's kernel can acknowledge it
        began = time.monotonic()
        with contextlib.suppress(asyncio.TimeoutError):
            heard.append(await asyncio.wait_for(channel.receive(StatusReply), 4.0))
        heard.append(time.monotonic() - began)
        child.send_signal(signal.SIGCONT)
        heard.append(await channel.receive(StatusReply))
        over.set()

    async def scene() -> None:
        nonlocal child
        async with site(freeze, dead_s=1.0) as here:
            script = str(SCRIPTS / "freezable.py")
            child = await asyncio.create_subprocess_exec(sys.executable, script, str(here.port))
            try:
                await asyncio.wait_for(over.wait(), PATIENCE_S)
            finally:
                child.kill()
                await child.wait()

    heard: list[object] = []
    over = asyncio.Event()
    child: asyncio.subprocess.Process
    play(scene)
    frozen_s, word = heard  # it was silent for 4 s, and still there
    assert isinstance(frozen_s, float)
    assert frozen_s >= 4.0
    assert word == StatusReply(text="awake")


def test_dialling_gives_up_in_time() -> None:
    """A listener with a full queue ignores new connections, as a dead host does."""

    async def scene() -> str:
        with socket.socket() as listener, contextlib.ExitStack() as queue:
            listener.bind((HOST, 0))
            listener.listen(0)
            for _ in range(4):  # more than it takes
                waiting = queue.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(listener.getsockname())
            with pytest.raises(OSError, match="does not answer") as told:
                await connect(HOST, listener.getsockname()[1], SECRET, connect_s=0.2)
            return str(told.value)

    assert play(scene).endswith("does not answer within 0.2 s")


def test_a_silent_server_is_given_up() -> None:
    async def scene() -> str:
        with socket.create_server((HOST, 0)) as listener:
            with pytest.raises(OSError, match="handshake") as told:
                await connect(HOST, listener.getsockname()[1], SECRET, handshake_s=0.2)
            return str(told.value)

    assert "did not finish the handshake in 0.2 s; if it wants TLS, this side needs" in play(scene)


def test_a_dial_to_a_port_without_a_listener_is_refused() -> None:
    async def scene() -> None:
        with socket.create_server((HOST, 0)) as listener:
            port = listener.getsockname()[1]
        with pytest.raises(ConnectionRefusedError):
            await dial(HOST, port, 1.0)

    play(scene)


def test_names_of_peers() -> None:
    assert name_of(("10.0.0.1", 7)) == "10.0.0.1:7"
    assert name_of(("::1", 7, 0, 0)) == "[::1]:7"
    assert name_of(None) == "a peer without an address"


def test_an_address_asks_no_resolver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resolver may be slow when the machine is, and its threads may all be busy."""

    async def connect() -> None:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "getaddrinfo", None, raising=False)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            (await dial("127.0.0.1", listener.getsockname()[1], 5.0)).close()

    asyncio.run(connect())
