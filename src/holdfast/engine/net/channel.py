"""Opens, uses and closes authenticated message channels over TCP, with or without TLS.

`connect` is the client's side. `Gate` is the server's: it listens, admits holders of the job's
secret, and turns strangers away at a bounded cost in time, memory, connections and log lines. Every
WireError raised here begins with the peer's address and has closed the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from holdfast.engine.core.errors import OtherJob, WireError
from holdfast.engine.core.job_problems import JOB_BYTES_MAX
from holdfast.engine.net import tls as tls_module
from holdfast.engine.net.strangers import Complaints, Strangers
from holdfast.engine.net.tcp import CONNECT_S, DEAD_S, dial, name_of, tune
from holdfast.engine.wire import frames
from holdfast.engine.wire.messages import decode, encode

HANDSHAKE_S = 5.0
BACKLOG_BYTES_MAX = 64 << 20
READ_BYTES = 1 << 16
ACCEPTS_AT_ONCE = 64
EXHAUSTED_S = 0.2  # pause in accepting when descriptors or memory have run out
HUNG_UP = getattr(select, "POLLRDHUP", select.POLLHUP)  # Linux has the former
TLS_RECORD_START = b"\x16\x03"


class Channel:
    """Carries messages over one authenticated connection.

    `send` never blocks; `receive` returns None once the peer has closed the connection.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        sealer: frames.Sealer,
        opener: frames.Opener,
        backlog_bytes_max: int = BACKLOG_BYTES_MAX,
    ) -> None:
        self.peer = name_of(writer.get_extra_info("peername"))
        self.local_host = str((writer.get_extra_info("sockname") or ("",))[0])
        self.lost = ""  # why the connection ended, unless the peer closed it in order
        self._reader = reader
        self._writer = writer
        self._sealer = sealer
        self._opener = opener
        self._backlog_bytes_max = backlog_bytes_max
        self._payloads: Iterator[bytes] = iter(())
        self._cut_off = ""  # why we closed the connection ourselves
        self._hang_up = select.poll()
        self._hang_up.register(writer.get_extra_info("socket"), HUNG_UP)

    def send(self, message: object) -> None:
        """Queue a message; a peer that does not read is disconnected rather than waited for.

        A message to a peer that has hung up is dropped. asyncio would close the connection when
        that cannot be written, and with it lose the peer's last messages.
        """
        waiting = self._writer.transport.get_write_buffer_size()
        if waiting > self._backlog_bytes_max and not self._cut_off:
            self._cut_off = f"it has left {waiting} bytes unread"
            self._writer.transport.abort()  # a close would wait for the peer to read the rest
        if not self._writer.is_closing() and not self._has_hung_up():
            self._writer.write(self._sealer.seal(encode(message)))

    def _has_hung_up(self) -> bool:
        return bool(self._hang_up.poll(0))

    async def receive(self, *accepted: type) -> Any:
        """Return the next message, of one of the accepted types; None at the end. WireError."""
        try:
            while (payload := next(self._payloads, None)) is None:
                data = await self._read()
                if not data:
                    return None
                self._payloads = self._opener.feed(data)
            return decode(payload, *accepted)
        except WireError as error:
            self._writer.transport.abort()
            raise WireError(f"{self.peer}: {error}") from None

    def close(self) -> None:
        """Close; no later call closes again, because asyncio could then not abort TLS any more."""
        if not self._writer.is_closing():
            self._writer.close()

    async def finish(self) -> None:
        """Close once everything that was sent has been handed to the kernel."""
        self.close()
        try:
            await asyncio.wait_for(self._writer.wait_closed(), HANDSHAKE_S)
        except (OSError, asyncio.TimeoutError):
            self._writer.transport.abort()

    async def _read(self) -> bytes:
        """Read some bytes; none at the end, unless its reason is worth an error."""
        try:
            data = await self._reader.read(READ_BYTES)
        except ssl.SSLError as error:
            raise WireError(tls_module.describe_error(error)) from None
        except OSError as error:
            data = b""
            if error.errno == errno.ETIMEDOUT:
                self.lost = "its network is cut, or it does not read: nothing was acknowledged"
        if self._cut_off and not data:
            raise WireError(self._cut_off)
        return data


async def accept(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    secret: bytes,
    *,
    job: str = "",
    handshake_s: float = HANDSHAKE_S,
    dead_s: float = DEAD_S,
    backlog_bytes_max: int = BACKLOG_BYTES_MAX,
) -> Channel:
    """Do the server's side of the handshake; WireError (and a closed connection) for strangers.

    `reader` and `writer` may be those of a TLS connection; `Gate` takes care of that. `job`:
    the job of this server; a client of another one is told so, and refused with OtherJob.
    """
    peer = name_of(writer.get_extra_info("peername"))
    nonce = os.urandom(frames.NONCE_BYTES)
    try:
        tune(writer.get_extra_info("socket"), dead_s)
        ours = frames.write_job(job)
        writer.write(frames.greeting(nonce) + ours)
        encounter = await asyncio.wait_for(_answer(reader, secret, nonce, ours), handshake_s)
        writer.write(frames.proof(secret, "server", encounter))
    except asyncio.TimeoutError:
        writer.transport.abort()
        raise WireError(f"{peer}: it did not finish the handshake in {handshake_s:g} s") from None
    except WireError as error:
        writer.transport.abort()
        raise WireError(f"{peer}: {error}") from None
    except ssl.SSLError as error:
        writer.transport.abort()
        raise WireError(f"{peer}: {tls_module.describe_error(error)}") from None
    except (OSError, EOFError):
        writer.transport.abort()
        raise WireError(f"{peer}: it left before the handshake was done") from None
    except BaseException:
        writer.transport.abort()
        raise
    theirs = frames.read_job(encounter.client_job)
    if _are_different(job, theirs):
        writer.close()  # once our proof is on its way: they learn it from that
        raise OtherJob(f"{peer}: it is of job {theirs}, and this is job {job}", theirs)
    sealer = frames.Sealer(frames.session_key(secret, "server", encounter))
    opener = frames.Opener(frames.session_key(secret, "client", encounter))
    return Channel(reader, writer, sealer, opener, backlog_bytes_max)


def _are_different(job: str, other: str) -> bool:
    """Return whether both sides name a job, and not the same one."""
    return bool(job and other and job != other)


async def connect(
    host: str,
    port: int,
    secret: bytes,
    *,
    job: str = "",
    tls: ssl.SSLContext | None = None,
    connect_s: float = CONNECT_S,
    handshake_s: float = HANDSHAKE_S,
    dead_s: float = DEAD_S,
) -> Channel:
    """Open a channel to a server. OSError if no server answers, WireError if the wrong one does.

    `job`: the job of this client, if it has one yet; OtherJob if the server's is another.
    `tls`: a context from `client_context`; the server's certificate is then checked against `host`.
    """
    sock = await dial(host, port, connect_s)
    peer = f"{host}:{port}"
    hint = "; its log says why" if tls else "; if it wants TLS, this side needs certificates"
    try:
        tune(sock, dead_s)
        return await asyncio.wait_for(_join(sock, host, secret, job, tls), handshake_s)
    except asyncio.TimeoutError:
        text = f"{peer} did not finish the handshake in {handshake_s:g} s{hint}"
        raise ConnectionError(text) from None
    except ssl.SSLError as error:
        raise WireError(f"{peer}: {tls_module.describe_error(error)}") from None
    except OtherJob as error:
        raise OtherJob(f"{peer}: {error}", error.met) from None
    except WireError as error:
        raise WireError(f"{peer}: {error}") from None
    except (OSError, EOFError):
        raise ConnectionError(f"{peer} broke off the handshake{hint}") from None


async def _answer(
    reader: asyncio.StreamReader, secret: bytes, nonce: bytes, ours: bytes
) -> frames.Encounter:
    """Check the client's proof; return the greetings of both."""
    answer = b""
    while len(answer) < frames.GREETING_BYTES:  # refused at the first wrong byte
        answer += await _read_some(reader, frames.GREETING_BYTES - len(answer))
        if answer.startswith(TLS_RECORD_START):
            raise WireError("it speaks TLS, which this job was started without")
        frames.check_start(answer, "client")
    theirs = frames.read_greeting(answer, "client")
    claim = b""
    size = JOB_BYTES_MAX + frames.PROOF_BYTES
    while len(claim) < size:
        claim += await _read_some(reader, size + 1 - len(claim))
    if len(claim) > size:
        raise WireError("it goes on before it is let in")
    job, proof = claim[:JOB_BYTES_MAX], claim[JOB_BYTES_MAX:]
    encounter = frames.Encounter(
        server_nonce=nonce, client_nonce=theirs, server_job=ours, client_job=job
    )
    frames.check_proof(proof, secret, "client", encounter)
    return encounter


async def _join(
    sock: socket.socket, host: str, secret: bytes, job: str, tls: ssl.SSLContext | None
) -> Channel:
    reader, writer = await asyncio.open_connection(
        sock=sock, ssl=tls, server_hostname=host if tls else None
    )
    nonce, ours = os.urandom(frames.NONCE_BYTES), frames.write_job(job)
    try:
        head = await reader.readexactly(frames.HEAD_BYTES)
        writer.write(frames.greeting(nonce))  # first, so that a server of another release sees it
        frames.check_start(head, "server")
        greeting = head + await reader.readexactly(frames.GREETING_BYTES - frames.HEAD_BYTES)
        theirs = frames.read_greeting(greeting, "server")
        encounter = frames.Encounter(
            server_nonce=theirs,
            client_nonce=nonce,
            server_job=await reader.readexactly(JOB_BYTES_MAX),
            client_job=ours,
        )
        writer.write(ours + frames.proof(secret, "client", encounter))
        frames.check_proof(await _claim(reader), secret, "server", encounter)
        found = frames.read_job(encounter.server_job)
        if _are_different(job, found):
            raise OtherJob(f"job {found} is there, and this is of job {job}", found)
    except WireError:
        writer.close()
        raise
    except BaseException:
        writer.transport.abort()
        raise
    sealer = frames.Sealer(frames.session_key(secret, "client", encounter))
    opener = frames.Opener(frames.session_key(secret, "server", encounter))
    return Channel(reader, writer, sealer, opener)


async def _claim(reader: asyncio.StreamReader) -> bytes:
    """Check the server's proof; a server that rejects ours hangs up instead."""
    try:
        return await reader.readexactly(frames.PROOF_BYTES)
    except (EOFError, ConnectionResetError):
        text = "it hung up on our proof: has it another secret or CA, or did it just end?"
        raise WireError(text) from None


async def _read_some(reader: asyncio.StreamReader, bytes_max: int) -> bytes:
    data = await reader.read(bytes_max)
    if not data:
        raise EOFError
    return data


@dataclass(frozen=True, slots=True, kw_only=True)
class GatePolicy:
    """Limits what a gate spends on connections that have not proved themselves yet.

    `strangers_max`: how many of them there may be at any one time.
    """

    handshake_s: float = HANDSHAKE_S
    strangers_max: int = 1024
    dead_s: float = DEAD_S
    backlog_bytes_max: int = BACKLOG_BYTES_MAX
    lines_max: int = 10
    window_s: float = 10.0


@dataclass(slots=True, eq=False)
class _Stranger:
    """Represents a connection whose handshake is not complete."""

    sock: socket.socket
    host: str
    peer: str
    sent_away: str = ""  # why we closed it


Serve = Callable[[Channel], Awaitable[None]]


class Gate:
    """Listens, and runs `serve` for every connection that has proved that it knows the secret.

    Clients of another job than `job` are refused, once they know of it.

    `serve` may let WireError and OSError pass: the connection is then closed. `say` gets one line
    for every stranger turned away, every WireError and every peer lost to a dead network; beyond
    `lines_max` lines in `window_s`, one line counts the rest. A stranger gets `handshake_s` for the
    whole handshake, TLS included. When there are too many strangers, the address with the most of
    them loses its oldest, so that a flood from one address does not keep others out.
    """

    def __init__(
        self,
        secret: bytes,
        serve: Serve,
        say: Callable[[str], None],
        tls: ssl.SSLContext | None = None,
        policy: GatePolicy | None = None,
        job: str = "",
    ) -> None:
        self.policy = policy or GatePolicy()
        self._secret = secret
        self._job = job
        self._serve = serve
        self._tls = tls
        self._complaints = Complaints(say, self.policy.lines_max, self.policy.window_s)
        self._strangers: Strangers[_Stranger] = Strangers(self.policy.strangers_max)
        self._listener: list[socket.socket] = []  # none or one
        self._timer: asyncio.TimerHandle | None = None  # for late strangers and held complaints

    @property
    def strangers(self) -> int:
        return len(self._strangers)

    def open(self, listener: socket.socket) -> None:
        """Begin to accept, in the running event loop; `listener` is the caller's to close."""
        listener.setblocking(False)
        self._listener = [listener]
        asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def close(self) -> None:
        """Stop accepting and turn the strangers away; channels being served stay."""
        for listener in self._listener:
            asyncio.get_running_loop().remove_reader(listener)
        self._listener = []
        self._send_away([(each, "the job is over") for each in self._strangers.list_all()])
        if self._timer is not None:
            self._timer.cancel()
        self._complaints.flush(asyncio.get_running_loop().time(), force=True)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTS_AT_ONCE):
            try:
                sock, address = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptors or no memory: accepting again would spin
                self._complain(f"accepting no connections for now: {error.strerror}")
                self._send_away(self._strangers.make_room())
                loop = asyncio.get_running_loop()
                loop.remove_reader(listener)
                loop.call_later(EXHAUSTED_S, self._resume, listener)
                return
            sock.setblocking(False)
            self._admit(_Stranger(sock, str(address[0]), name_of(address)))

    def _resume(self, listener: socket.socket) -> None:
        if listener in self._listener:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _admit(self, stranger: _Stranger) -> None:
        loop = asyncio.get_running_loop()
        handshake_s = self.policy.handshake_s
        closed = self._strangers.enter(stranger, stranger.host, loop.time(), handshake_s)
        self._send_away(closed)
        task = loop.create_task(self._meet(stranger))
        _running.add(task)
        task.add_done_callback(_report_failure)
        self._set_timer()

    def _send_away(self, strangers: list[tuple[_Stranger, str]]) -> None:
        """Close strangers; the task of each notices, wherever it is, and logs the reason."""
        for stranger, why in strangers:
            self._strangers.leave(stranger)
            stranger.sent_away = why
            with contextlib.suppress(OSError):
                stranger.sock.shutdown(socket.SHUT_RDWR)

    def _set_timer(self) -> None:
        dues = (self._strangers.deadline(), self._complaints.deadline())
        due = min((at for at in dues if at is not None), default=None)
        if self._timer is not None and (due is None or self._timer.when() > due):
            self._timer.cancel()
            self._timer = None
        if self._timer is None and due is not None:
            self._timer = asyncio.get_running_loop().call_at(due, self._look_at_clock)

    def _look_at_clock(self) -> None:
        now = asyncio.get_running_loop().time()
        self._timer = None
        self._send_away(self._strangers.expire(now))
        self._complaints.flush(now)
        self._set_timer()

    async def _meet(self, stranger: _Stranger) -> None:
        channel: Channel | None = None
        try:
            channel = await self._enter(stranger)
            self._strangers.leave(stranger)
            await self._serve(channel)
            if channel.lost:
                self._complain(f"lost {stranger.peer}: {channel.lost}")
        except WireError as error:
            why = f"{stranger.peer}: {stranger.sent_away}" if stranger.sent_away else str(error)
            self._complain(f"refused {why}")
        except OSError:
            pass  # an authenticated peer's connection has ended: its owner notices
        finally:
            self._strangers.leave(stranger)
            if channel is not None:
                channel.close()

    async def _enter(self, stranger: _Stranger) -> Channel:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        limit_s = self.policy.handshake_s if self._tls else None
        try:
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol, stranger.sock, ssl=self._tls, ssl_handshake_timeout=limit_s
            )
        except OSError as error:
            _refuse_tls(stranger.peer, error)
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        return await accept(
            reader,
            writer,
            self._secret,
            job=self._job,
            handshake_s=self.policy.handshake_s,
            dead_s=self.policy.dead_s,
            backlog_bytes_max=self.policy.backlog_bytes_max,
        )

    def _complain(self, text: str) -> None:
        loop = asyncio.get_running_loop()
        self._complaints.add(text, loop.time())
        self._set_timer()


# Tasks of all gates: a loop refers to a task that waits only weakly, and a gate may be dropped.
_running: set[asyncio.Task[None]] = set()


def _report_failure(task: asyncio.Task[None]) -> None:
    _running.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        told = {"message": "the gate's server failed", "exception": error, "task": task}
        task.get_loop().call_exception_handler(told)


def _refuse_tls(peer: str, error: OSError) -> NoReturn:
    if isinstance(error, ssl.SSLError):
        raise WireError(f"{peer}: {tls_module.describe_error(error)}") from None
    raise WireError(f"{peer}: it left before TLS was agreed") from None
