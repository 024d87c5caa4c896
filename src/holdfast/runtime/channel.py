"""Authenticated message channels over asyncio streams: handshake, framing, bounded sending."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Any

from holdfast.core.errors import WireError
from holdfast.wire import frames
from holdfast.wire.messages import decode, encode

HANDSHAKE_S = 5.0
BACKLOG_BYTES_MAX = 64 << 20


class Channel:
    """One authenticated connection. `send` never blocks; `receive` returns None at its end."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        sealer: frames.Sealer,
        opener: frames.Opener,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._sealer = sealer
        self._opener = opener
        self._payloads: list[bytes] = []

    def send(self, message: object) -> None:
        """Queue a message; a peer that does not read is cut off rather than waited for."""
        if self._writer.transport.get_write_buffer_size() > BACKLOG_BYTES_MAX:
            self.close()
        if not self._writer.is_closing():
            self._writer.write(self._sealer.seal(encode(message)))

    async def receive(self, *accepted: type) -> Any:
        """The next message, of one of the accepted types; None at the end. WireError."""
        while not self._payloads:
            try:
                data = await self._reader.read(1 << 16)
            except OSError:
                data = b""
            if not data:
                return None
            self._payloads = self._opener.feed(data)
        return decode(self._payloads.pop(0), *accepted)

    def close(self) -> None:
        self._writer.close()

    async def finish(self) -> None:
        """Close once everything that was sent has been handed to the kernel."""
        self._writer.close()
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await asyncio.wait_for(self._writer.wait_closed(), HANDSHAKE_S)


async def accept(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes
) -> Channel:
    """The server's side of the handshake; WireError (and a closed connection) for strangers."""
    nonce = os.urandom(frames.NONCE_BYTES)
    try:
        writer.write(frames.greeting(nonce))
        answer = await asyncio.wait_for(reader.readexactly(frames.ANSWER_BYTES), HANDSHAKE_S)
        theirs, claim = answer[: frames.NONCE_BYTES], answer[frames.NONCE_BYTES :]
        frames.check_proof(claim, secret, "client", nonce, theirs)
    except (OSError, EOFError, asyncio.TimeoutError) as error:
        writer.close()
        raise WireError(f"a stranger did not finish the handshake: {error!r}") from None
    except WireError:
        writer.close()
        raise
    writer.write(frames.proof(secret, "server", nonce, theirs))
    sealer = frames.Sealer(frames.session_key(secret, "server", nonce, theirs))
    opener = frames.Opener(frames.session_key(secret, "client", nonce, theirs))
    return Channel(reader, writer, sealer, opener)


async def connect(host: str, port: int, secret: bytes) -> Channel:
    """The client's side. OSError when nobody answers, WireError when the wrong one does."""
    reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port), HANDSHAKE_S)
    try:
        greeting = await asyncio.wait_for(reader.readexactly(frames.GREETING_BYTES), HANDSHAKE_S)
        theirs = frames.read_greeting(greeting)
        nonce = os.urandom(frames.NONCE_BYTES)
        writer.write(nonce + frames.proof(secret, "client", theirs, nonce))
        claim = await asyncio.wait_for(reader.readexactly(frames.PROOF_BYTES), HANDSHAKE_S)
        frames.check_proof(claim, secret, "server", theirs, nonce)
    except (EOFError, asyncio.TimeoutError) as error:
        writer.close()
        raise ConnectionError(f"{host}:{port} broke off the handshake: {error!r}") from None
    except BaseException:
        writer.close()
        raise
    sealer = frames.Sealer(frames.session_key(secret, "client", theirs, nonce))
    opener = frames.Opener(frames.session_key(secret, "server", theirs, nonce))
    return Channel(reader, writer, sealer, opener)
