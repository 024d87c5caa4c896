"""Relays TCP inside a host of a lab, as a slow, narrow, frozen or breaking path.

It makes delays and narrow paths without netem, which some kernels lack.

    with Relay(host, delay_s=0.05, rate_bytes_s=10e6) as relay:
        ...                     # whatever connects from this host to another now goes through it
        relay.pause()           # no byte moves, no connection closes
        relay.resume()
        relay.reset()           # every connection ends with a reset, on both sides

Without a `target` it transparently takes in every TCP connection that processes of its host begin
to other hosts. It ignores connections that other hosts begin, and earlier ones. With a target, it
takes in every connection to its address.

A relay ends TCP connections and makes new ones. So a connect succeeds before the target is reached
(and is then reset if it cannot be), and acknowledgements, keepalives and time-outs do not pass from
one side to the other: to study these, cut the lab's cables instead.

Both sides are here: `Relay` in the test, and the process that it starts (`python -m` this module),
which obeys JSON lines from an inherited socket and ends when that closes. Bytes are never lost or
reordered; the bytes under way are bounded, and senders wait beyond that.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
import sys
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TextIO

from holdfast.engine.core.errors import UserError, WorldError
from labs.network_lab import INTERFACE, Host, run_tool

Address = tuple[str, int]
ANSWER_S = 30.0  # bounds the start of the process and every answer, which take milliseconds
CHUNK_BYTES_MAX = 1 << 16
CHUNK_S = 0.01  # at a limited rate, chunks take about this long
CHUNKS_MAX = 512  # chunks under way in one direction of one connection
MARK = 0x486F6C64  # a mark on the relays' own packets, which no relay takes in
SO_ORIGINAL_DST = 80  # <linux/netfilter_ipv4.h>: where a redirected connection was going


class Relay:
    """Runs in `host`, listens at `address` and connects onwards to `target`; a context manager.

    Data sent either way arrive `delay_s` later, plus at random up to `jitter_s`. All connections
    share `rate_bytes_s` in each direction; 0 means no limit.
    """

    def __init__(
        self,
        host: Host,
        target: Address | None = None,
        listen: Address | None = None,
        delay_s: float = 0.0,
        jitter_s: float = 0.0,
        rate_bytes_s: float = 0.0,
    ) -> None:
        self.host = host
        self.target = target
        # It gets the port once the relay has started. Redirected connections arrive at the
        # loopback.
        self.address = listen or ("127.0.0.1" if target is None else host.address, 0)
        self._shape = _checked(delay_s, jitter_s, rate_bytes_s)
        self._control: TextIO | None = None
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Relay:
        with contextlib.ExitStack() as stack:
            here, there = socket.socketpair()
            here.settimeout(ANSWER_S)
            self._control = stack.enter_context(here.makefile("rw", buffering=1))
            with here, there:  # the file made of `here` stays open
                number = there.fileno()
                command = [sys.executable, "-m", "labs.relay", str(number)]
                tests = Path(__file__).parent.parent  # where the interpreter finds this package
                process = self.host.popen(command, pass_fds=[number], cwd=tests)
            stack.callback(process.wait)
            stack.callback(process.kill)
            what = {"listen": self.address, "target": self.target, **self._shape}
            self.address = (self.address[0], self._ask(**what)["port"])
            if self.target is None:
                self._take_in()
                stack.callback(self._nft, f"delete table ip {self._table()}")
            self._open = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.close()

    def pause(self) -> None:
        """Hold all bytes back from now; new connections reach only the relay."""
        self._ask(do="pause")

    def resume(self) -> None:
        """End a pause and pass on the waiting data."""
        self._ask(do="resume")

    def reset(self) -> int:
        """Break every connection as a router that lost its memory would; return their number."""
        return int(self._ask(do="reset")["connections"])

    def reshape(
        self, delay_s: float = 0.0, jitter_s: float = 0.0, rate_bytes_s: float = 0.0
    ) -> None:
        """Change the path for data that arrive from now on."""
        self._ask(do="reshape", **_checked(delay_s, jitter_s, rate_bytes_s))

    def connections(self) -> int:
        """Count the connections open through the relay."""
        return int(self._ask(do="count")["connections"])

    def _take_in(self) -> None:
        hook = "type nat hook output priority -100; policy accept;"
        others = f'oifname "{INTERFACE}" meta mark != {MARK} meta l4proto tcp'
        rule = f"{others} redirect to :{self.address[1]}"
        self._nft(f"table ip {self._table()} {{\nchain out {{\n{hook}\n{rule}\n}}\n}}")

    def _table(self) -> str:
        return f"relay{self.address[1]}"

    def _nft(self, text: str) -> None:
        with self.host.entered():
            run_tool("nft", ["-f", "-"], text + "\n")

    def _ask(self, **what: object) -> dict[str, Any]:
        if self._control is None:
            raise UserError("the relay has not been started: use it in a with statement")
        try:
            self._control.write(json.dumps(what) + "\n")
            line = self._control.readline()
        except OSError as error:
            raise WorldError(f"the relay in {self.host} does not answer: {error}") from error
        answer: dict[str, Any] = json.loads(line) if line else {"error": "it has ended"}
        if "error" in answer:
            raise WorldError(f"the relay in {self.host} failed: {answer['error']}")
        return answer


def _checked(delay_s: float, jitter_s: float, rate_bytes_s: float) -> dict[str, float]:
    shape = {"delay_s": delay_s, "jitter_s": jitter_s, "rate_bytes_s": rate_bytes_s}
    for name, value in shape.items():
        if not 0 <= value < float("inf"):
            raise UserError(f"{name} is {value}: choose 0 or more")
    return shape


class _Direction:
    """Computes when each chunk arrives in one direction of the path, shared by all connections."""

    def __init__(self) -> None:
        self.delay_s = self.jitter_s = self.rate_bytes_s = 0.0
        self._free_at = 0.0  # when the last chunk will have been sent

    def chunk_bytes(self) -> int:
        if not self.rate_bytes_s:
            return CHUNK_BYTES_MAX
        return max(1, min(CHUNK_BYTES_MAX, int(self.rate_bytes_s * CHUNK_S)))

    def arrival(self, size: int, now: float) -> float:
        self._free_at = max(now, self._free_at)
        if self.rate_bytes_s:
            self._free_at += size / self.rate_bytes_s
        return self._free_at + self.delay_s + random.uniform(0.0, self.jitter_s)


class _Proxy:
    """Runs the relay's process, with one task for each direction of each connection."""

    def __init__(self, target: Address | None) -> None:
        self.target = target
        self.directions = (_Direction(), _Direction())
        self.going = asyncio.Event()
        self.going.set()
        self.pairs: list[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = []

    def reshape(self, what: dict[str, Any]) -> None:
        for direction in self.directions:
            direction.delay_s = what["delay_s"]
            direction.jitter_s = what["jitter_s"]
            direction.rate_bytes_s = what["rate_bytes_s"]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.going.wait()
        try:
            far_reader, far_writer = await self._onwards(writer)
        except OSError:
            _abort(writer)
            return
        pair = (writer, far_writer)
        self.pairs.append(pair)
        there, back = self.directions
        try:
            await _all(
                self._pass_on(reader, far_writer, there), self._pass_on(far_reader, writer, back)
            )
            for end in pair:
                end.close()
        except OSError:  # one end broke, so the other must
            for end in pair:
                _abort(end)
        finally:
            self.pairs.remove(pair)

    async def _onwards(
        self, writer: asyncio.StreamWriter
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        target = self.target
        if target is None:
            taken = writer.get_extra_info("socket")
            port, address = struct.unpack(
                "!2xH4s8x", taken.getsockopt(socket.SOL_IP, SO_ORIGINAL_DST, 16)
            )
            target = (socket.inet_ntoa(address), port)
        with contextlib.ExitStack() as stack:
            end = stack.enter_context(socket.socket())
            end.setblocking(False)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, MARK)
            await asyncio.get_running_loop().sock_connect(end, target)
            stack.pop_all()
        return await asyncio.open_connection(sock=end)

    def reset(self) -> int:
        for pair in self.pairs:
            for end in pair:
                _abort(end)
        return len(self.pairs)

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: _Direction
    ) -> None:
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(CHUNKS_MAX)
        await _all(self._take(reader, queue, direction), self._give(queue, writer))

    async def _take(
        self,
        reader: asyncio.StreamReader,
        queue: asyncio.Queue[tuple[float, bytes]],
        direction: _Direction,
    ) -> None:
        clock, chunk = asyncio.get_running_loop().time, b"-"
        while chunk:  # until the empty one, which passes on the end
            await self.going.wait()
            chunk = await reader.read(direction.chunk_bytes())
            await queue.put((direction.arrival(len(chunk), clock()), chunk))

    async def _give(
        self, queue: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter
    ) -> None:
        clock, chunk = asyncio.get_running_loop().time, b"-"
        while chunk:
            arrival, chunk = await queue.get()
            await asyncio.sleep(max(0.0, arrival - clock()))
            await self.going.wait()
            if chunk:
                writer.write(chunk)
                await writer.drain()
        writer.write_eof()


async def _all(*works: Awaitable[None]) -> None:
    """Wait until all are done; if one fails, cancel the other ones."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _abort(writer: asyncio.StreamWriter) -> None:
    """Close with a reset instead of an orderly end."""
    with contextlib.suppress(OSError):
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()


async def _main(control: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=control)
    what = json.loads(await reader.readline() or "null")
    if what is None:
        return
    proxy = _Proxy(what["target"] and tuple(what["target"]))
    proxy.reshape(what)
    try:
        server = await asyncio.start_server(proxy.serve, *what["listen"])
        answer: dict[str, object] = {"port": server.sockets[0].getsockname()[1]}
    except OSError as error:
        answer = {"error": str(error)}
    while True:
        writer.write(json.dumps(answer).encode() + b"\n")
        line = await reader.readline()
        if not line:
            return
        answer = _obey(proxy, json.loads(line))


def _obey(proxy: _Proxy, what: dict[str, Any]) -> dict[str, object]:
    match what["do"]:
        case "pause":
            proxy.going.clear()
        case "resume":
            proxy.going.set()
        case "reset":
            return {"connections": proxy.reset()}
        case "reshape":
            proxy.reshape(what)
    return {"connections": len(proxy.pairs)}


if __name__ == "__main__":
    asyncio.run(_main(socket.socket(fileno=int(sys.argv[1]))))
