"""A channel in a network of its own that is cut: prints after how long each side has noticed.

    python cut_network.py DEAD_S idle|busy

Exit status 77: this machine lets nobody make a network namespace.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import json
import os
import socket
import struct
import sys

from holdfast.engine.net.channel import Channel, Gate, GatePolicy, connect
from holdfast.engine.wire.messages import StatusReply, StatusRequest

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
SECRET = b"s" * 32


def own_network() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) and libc.unshare(CLONE_NEWUSER | CLONE_NEWNET):
        print(os.strerror(ctypes.get_errno()))
        sys.exit(77)


def set_loopback(flags: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", flags))


async def main(dead_s: float, busy: bool) -> None:
    clock = asyncio.get_running_loop().time
    noticed: dict[str, float] = {}
    lines: list[str] = []
    cut_at = 0.0

    async def watch(name: str, channel: Channel) -> None:
        assert await channel.receive(StatusRequest, StatusReply) is None
        noticed[name] = clock() - cut_at

    async def serve(channel: Channel) -> None:
        await channel.receive(StatusRequest)
        channel.send(StatusReply(text="hello"))
        await watch("server", channel)

    set_loopback(IFF_UP)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        gate = Gate(SECRET, serve, lines.append, policy=GatePolicy(dead_s=dead_s))
        gate.open(listener)
        port = listener.getsockname()[1]
        channel = await connect("127.0.0.1", port, SECRET, dead_s=dead_s)
        channel.send(StatusRequest())
        await channel.receive(StatusReply)
        cut_at = clock()
        set_loopback(0)
        if busy:
            channel.send(StatusRequest())
        await watch("client", channel)
        while not lines:  # the gate's word on its side of it
            await asyncio.sleep(0.01)
        gate.close()
    print(json.dumps({"noticed": noticed, "lines": lines}))


if __name__ == "__main__":
    own_network()
    asyncio.run(main(float(sys.argv[1]), sys.argv[2] == "busy"))
