"""The gate against strangers, over real sockets: each is refused, with a reason in one line.

Every test ends with a client that knows the secret and is served.
"""

from __future__ import annotations

import asyncio
import errno
import re
import socket

import pytest

from gates import (
    HOST,
    NO_JOB,
    PATIENCE_S,
    SECRET,
    Site,
    Stranger,
    answer,
    ask,
    between,
    honest,
    play,
    refusal,
    shaken_hands,
    site,
    stranger,
    until,
)
from holdfast.engine.core.errors import OtherJob, WireError
from holdfast.engine.core.job_problems import JOB_BYTES_MAX
from holdfast.engine.core.worker_status import WorkerStatus
from holdfast.engine.net.channel import Channel, Gate, connect
from holdfast.engine.net.strangers import Complaints
from holdfast.engine.wire import frames
from holdfast.engine.wire.messages import KINDS, StatusReply, StatusRequest, encode

NONCE = b"n" * frames.NONCE_BYTES


async def refused(here: Site, peer: Stranger, why: str) -> None:
    """Check that `peer` is hung up on, and that one line of the log names it and the reason."""
    await peer.ended()
    await until(lambda: here.lines)
    await honest(here)
    about = [line for line in here.lines if f" {peer.name}: " in line]
    assert len(about) == 1, here.lines
    assert re.search(why, about[0]), about
    assert len(here.lines) == 1, here.lines


# ---------------------------------------------------------------- two jobs with one secret


def test_both_sides_learn_that_the_other_is_of_another_job() -> None:
    async def scene() -> None:
        async with site(job="job-two") as here:
            with pytest.raises(
                OtherJob, match="job job-two is there, and this is of job job-one"
            ) as e:
                await connect(HOST, here.port, SECRET, job="job-one")
            assert e.value.met == "job-two"
            await until(lambda: here.lines)
            assert len(here.lines) == 1
            assert "it is of job job-one, and this is job job-two" in here.lines[0]
            assert not here.channels
            for job in ("job-two", ""):  # its own; a peer without a job yet
                channel = await connect(HOST, here.port, SECRET, job=job)
                assert await ask(channel) == StatusReply(text="hello")
                channel.close()

    play(scene)


def test_a_job_cannot_be_put_into_somebody_else_s_mouth() -> None:
    """Who sits on the path, without the secret, cannot make an agent believe in another job."""

    async def scene() -> None:
        async with site(job="job-one") as here:

            async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                inner, outer = await asyncio.open_connection(HOST, here.port)
                greeting = await inner.readexactly(frames.GREETING_BYTES)
                await inner.readexactly(JOB_BYTES_MAX)
                writer.write(greeting + frames.write_job("job-two"))
                outer.write(await reader.read(1 << 16))
                writer.write(await inner.read(1 << 16))
                writer.close()
                outer.close()

            async with await asyncio.start_server(relay, HOST, 0) as server:
                port = server.sockets[0].getsockname()[1]
                with pytest.raises(WireError, match="hung up on our proof") as e:
                    await connect(HOST, port, SECRET, job="job-one")
                assert not isinstance(e.value, OtherJob)
            await until(lambda: here.lines)
            assert "does not know this job's secret" in here.lines[0]

    play(scene)


def first_release(nonce: bytes) -> bytes:
    """Return the first bytes of a release whose greetings named no job; it reads equally many."""
    return frames.MAGIC + b"\0\1" + nonce


def test_a_client_of_the_first_release_is_told_so_and_told_apart() -> None:
    async def scene() -> None:
        async with site() as here:
            peer = await stranger(here)
            theirs = await peer.reader.readexactly(len(first_release(NONCE)))
            # It reads as much, and finds another version in it: one sentence at its side, too.
            assert theirs[len(frames.MAGIC) : len(frames.MAGIC) + 2] == b"\0\2"
            peer.say(first_release(NONCE))
            peer.writer.write_eof()  # it hangs up at once
            await refused(here, peer, "the client speaks version 1, we speak 2: install one")

    play(scene)


def test_a_server_of_the_first_release_is_named_without_waiting_for_more() -> None:
    async def scene() -> None:
        async def old(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(first_release(NONCE))
            heard.append(await reader.readexactly(len(first_release(NONCE))))
            writer.close()

        heard: list[bytes] = []
        async with await asyncio.start_server(old, HOST, 0) as server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(WireError, match="the server speaks version 1, we speak 2"):
                await connect(HOST, port, SECRET, job="job-one", handshake_s=PATIENCE_S)
        await until(lambda: heard)  # it receives our greeting, so that its log can name the reason
        assert heard[0].startswith(frames.MAGIC + b"\0\2")

    play(scene)


# ---------------------------------------------------------------- before the proof


def other_version() -> bytes:
    greeting = bytearray(frames.greeting(NONCE))
    greeting[len(frames.MAGIC) + 1] += 1
    return bytes(greeting)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", r"not a Holdfast client: it begins with b'GET / HT'"),
        (b"\x16\x03\x01\x02\x00\x01\x00", "speaks TLS, which this job was started without"),
        (b"\xff", "not a Holdfast client"),
        (other_version(), "the client speaks version 3, we speak 2: install one release"),
        (frames.greeting(NONCE) + NO_JOB + b"p" * 32, "the client does not know this job's secret"),
        (frames.greeting(NONCE) + NO_JOB + b"p" * 33, "goes on before it is let in"),
        (frames.greeting(NONCE) + NO_JOB + b"p" * 1_000_000, "goes on before it is let in"),
    ],
    ids=["http", "tls", "byte", "version", "proof", "one more byte", "a million more"],
)
def test_wrong_words_before_the_proof(words: bytes, why: str) -> None:
    async def scene() -> None:
        async with site() as here:
            peer = await stranger(here)
            peer.say(words)
            await refused(here, peer, why)

    play(scene)


def test_a_wrong_secret_is_told_to_both_sides() -> None:
    async def scene() -> None:
        async with site() as here:
            told = await refusal(connect(HOST, here.port, b"another secret"))
            assert told == (
                f"{HOST}:{here.port}: it hung up on our proof: has it another secret or CA, or did "
                "it just end?"
            )
            await until(lambda: here.lines)
            await honest(here)
            assert len(here.lines) == 1
            assert here.lines[0].endswith("the client does not know this job's secret")

    play(scene)


def test_a_replayed_handshake_opens_nothing() -> None:
    async def scene() -> None:
        async with site() as here:
            async with between(here.port) as tapped:
                channel = await connect(HOST, tapped.port, SECRET)
                assert await ask(channel) == StatusReply(text="hello")
                channel.close()
            peer = await stranger(here)
            said = frames.GREETING_BYTES + JOB_BYTES_MAX + frames.PROOF_BYTES
            peer.say(tapped.client_said[:said])
            await refused(here, peer, "does not know this job's secret")
            assert len(here.channels) == 2  # the two honest ones
            with socket.create_server((HOST, 0)) as listener:
                listener.setblocking(False)
                joining = asyncio.ensure_future(connect(HOST, listener.getsockname()[1], SECRET))
                victim, _ = await asyncio.get_running_loop().sock_accept(listener)
                with victim:
                    victim.send(tapped.server_said)
                    with pytest.raises(WireError, match="the server does not know this job's"):
                        await joining

    play(scene)


def test_a_client_that_leaves_before_the_handshake_is_refused() -> None:
    async def scene() -> None:
        async with site() as here:
            peer = await stranger(here)
            peer.writer.close()
            await refused(here, peer, "left before the handshake was done")

    play(scene)


@pytest.mark.parametrize("words", [b"", b"HOL", frames.greeting(NONCE) + NO_JOB + b"p" * 31])
def test_a_client_that_never_finishes_the_handshake_is_hung_up_on(words: bytes) -> None:
    async def scene() -> None:
        async with site(handshake_s=0.2) as here:
            peer = await stranger(here)
            peer.say(words)
            await refused(here, peer, "did not finish the handshake in 0.2 s")

    play(scene)


def test_dripping_bytes_do_not_gain_time() -> None:
    async def scene() -> None:
        async with site(handshake_s=0.3) as here:
            peer = await stranger(here)
            await peer.reader.readexactly(frames.GREETING_BYTES + JOB_BYTES_MAX)
            for byte in frames.greeting(NONCE):
                peer.say(bytes([byte]))
                await asyncio.sleep(0.05)
                if peer.reader.at_eof():
                    break
            else:
                pytest.fail("all of it was listened to")
            await refused(here, peer, "did not finish the handshake in 0.3 s")

    play(scene)


def test_the_number_of_strangers_is_bounded() -> None:
    async def scene() -> None:
        async with site(strangers_max=4, handshake_s=PATIENCE_S) as here:
            peers = [await stranger(here) for _ in range(4)]
            await until(lambda: here.gate.strangers == 4)
            await honest(here)  # the oldest makes room
            await peers[0].ended()
            await until(lambda: here.lines)
            assert here.lines == [
                f"refused {peers[0].name}: too many connections have not proved themselves: 4"
            ]
            for peer in peers[1:]:
                assert await peer.reader.read(100) != b""  # the greeting: still welcome
                assert not peer.reader.at_eof()
                peer.writer.close()

    play(scene)


def test_a_flood_from_one_address_does_not_keep_others_out() -> None:
    async def scene() -> None:
        async with site(strangers_max=8, handshake_s=PATIENCE_S) as here:
            slow = await stranger(here, "127.0.0.3")  # the oldest of all, but alone
            await until(lambda: here.gate.strangers == 1)
            flood = [await stranger(here, "127.0.0.2") for _ in range(30)]
            await asyncio.gather(*(peer.ended() for peer in flood[:23]))
            await until(lambda: here.gate.strangers == 8)
            assert not slow.reader.at_eof()
            assert not any("127.0.0.3" in line for line in here.lines)
            await honest(here)
            for peer in [slow, *flood[23:]]:
                peer.writer.close()

    play(scene)


def test_bad_connections_do_not_flood_the_log() -> None:
    async def scene() -> None:
        async with site(lines_max=3, window_s=0.5) as here:
            for _ in range(50):
                peer = await stranger(here)
                peer.say(b"nonsense")
                await peer.ended()
            await honest(here)
            await until(lambda: told(here.lines) == 50)
            counted = [line for line in here.lines if line.startswith("and ")]
            assert 1 <= len(counted) <= len(here.lines) / 2
            assert re.search(
                r"and \d+ more in 0.5 s, the last: refused 127.0.0.1:\d+: ", counted[0]
            )

    play(scene)


def told(lines: list[str]) -> int:
    """Return the number of refusals in the log."""
    found = [re.match(r"and (\d+) more", line) for line in lines]
    return sum(int(m[1]) if m else 1 for m in found)


# ---------------------------------------------------------------- after the proof


@pytest.mark.parametrize(
    ("second", "why"),
    [
        ("replayed", "frame 1 is not authentic"),
        ("reordered", "frame 1 is not authentic"),
        ("altered", "frame 1 is not authentic"),
        ("unsealed", "a frame of 1751672936 bytes is over the limit of"),
        ("oversize", r"a frame of 67108865 bytes is over the limit of 67108864"),
        ("malformed", "a StatusRequest is malformed"),
        ("empty", "a message of kind b'' came where StatusRequest was expected"),
        ("unexpected", "a message of kind .* came where StatusRequest was expected"),
        ("unknown", "a message of kind b'.xfa' came where"),
    ],
)
def test_wrong_frames_after_the_proof(second: str, why: str) -> None:
    async def scene() -> None:
        async with site() as here:
            peer, sealer = await shaken_hands(here)
            first = sealer.seal(encode(StatusRequest()))
            peer.say(first + wrong(second, first, sealer))
            assert await peer.reader.read(1) != b""  # the first was good, and was answered
            await refused(here, peer, why)

    play(scene)


def wrong(what: str, first: bytes, sealer: frames.Sealer) -> bytes:
    request = encode(StatusRequest())
    kind = {cls: number for number, cls in KINDS.items()}
    match what:
        case "replayed":
            return first
        case "reordered":
            sealer.seal(request)
            return sealer.seal(request)
        case "altered":
            return sealer.seal(request)[:-1] + b"\x81"
        case "unsealed":
            return b"hhhh" * 10
        case "oversize":
            return (frames.FRAME_BYTES_MAX + 1).to_bytes(4, "big")
        case "malformed":
            return sealer.seal(request[:1] + b"\xc1")
        case "empty":
            return sealer.seal(b"")
        case "unexpected":
            return sealer.seal(bytes([kind[WorkerStatus]]) + b"\x80")
    return sealer.seal(b"\xfa" + request)


def test_the_first_frame_may_not_be_huge() -> None:
    async def scene() -> None:
        async with site() as here:
            peer, _ = await shaken_hands(here)
            peer.say((frames.FIRST_FRAME_BYTES_MAX + 1).to_bytes(4, "big"))
            await refused(here, peer, f"over the limit of {frames.FIRST_FRAME_BYTES_MAX}")

    play(scene)


def test_a_client_that_never_reads_is_cut_off() -> None:
    async def flood(channel: Channel) -> None:
        """Send whenever there is a message, and listen all the time, like the coordinator."""
        if (await channel.receive(StatusRequest)) is not None and greedy:
            greedy.clear()
            listening = asyncio.ensure_future(channel.receive(StatusRequest))
            while not listening.done():
                channel.send(StatusReply(text="x" * 10_000))
                await asyncio.sleep(0)
            await listening
        else:
            channel.send(StatusReply(text="hello"))
            await answer(channel)

    greedy = ["the first client"]

    async def scene() -> None:
        async with site(flood, backlog_bytes_max=1 << 20, dead_s=60.0) as here:
            peer, sealer = await shaken_hands(here)
            peer.writer.transport.pause_reading()
            peer.say(sealer.seal(encode(StatusRequest())))
            await until(lambda: here.lines)
            assert re.fullmatch(
                rf"refused {peer.name}: it has left 10\d{{5}} bytes unread", here.lines[0]
            )
            peer.writer.transport.resume_reading()
            await refused(here, peer, "bytes unread")

    play(scene)


def test_a_client_that_never_reads_is_lost_when_the_kernel_gives_up() -> None:
    """The backlog is within bounds, but no byte of it moves: the kernel gives up after dead_s."""

    async def flood(channel: Channel) -> None:
        while await channel.receive(StatusRequest) is not None:
            first = len(here[0].channels) == 1
            channel.send(StatusReply(text="x" * 20_000_000 if first else "hello"))

    here: list[Site] = []

    async def scene() -> None:
        async with site(flood, dead_s=0.5) as place:
            here.append(place)
            peer, sealer = await shaken_hands(place)
            peer.writer.transport.pause_reading()
            peer.say(sealer.seal(encode(StatusRequest())))
            await until(lambda: place.lines)
            assert place.lines == [
                f"lost {peer.name}: its network is cut, or it does not read: nothing was "
                "acknowledged"
            ]
            await honest(place)
            assert len(place.lines) == 1
            peer.writer.transport.abort()

    play(scene)


def test_a_fault_of_our_own_is_not_kept_quiet() -> None:
    async def broken(channel: Channel) -> None:
        raise ZeroDivisionError("planted")

    async def scene() -> None:
        async with site(broken) as here:
            channel = await connect(HOST, here.port, SECRET)
            assert await channel.receive(StatusReply) is None
            channel.close()

    with pytest.raises(AssertionError, match="planted"):
        play(scene)


def test_a_channel_that_is_finished_has_delivered_everything() -> None:
    async def talk(channel: Channel) -> None:
        for _ in range(300):
            channel.send(StatusReply(text="x" * 10_000))
        await channel.finish()

    async def scene() -> None:
        async with site(talk) as here:
            channel = await connect(HOST, here.port, SECRET)
            for _ in range(300):
                assert await channel.receive(StatusReply) == StatusReply(text="x" * 10_000)
            assert await channel.receive(StatusReply) is None
            channel.close()
            assert here.lines == []

    play(scene)


# ---------------------------------------------------------------- the gate itself


class Exhausted(socket.socket):
    """Is a listener that finds no free descriptor the first time."""

    tries = 0

    def accept(self) -> tuple[socket.socket, object]:
        self.tries += 1
        if self.tries == 1:
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_running_out_of_descriptors_is_a_pause() -> None:
    async def scene() -> None:
        lines: list[str] = []
        with Exhausted() as listener:
            listener.bind((HOST, 0))
            listener.listen()
            gate = Gate(SECRET, answer, lines.append)
            gate.open(listener)
            channel = await connect(HOST, listener.getsockname()[1], SECRET)
            assert await ask(channel) == StatusReply(text="hello")
            channel.close()
            gate.close()
        assert lines == ["accepting no connections for now: Too many open files"]

    play(scene)


def test_a_closed_gate_lets_nobody_in_and_keeps_its_connections() -> None:
    async def scene() -> None:
        async with site(handshake_s=PATIENCE_S) as here:
            inside = await connect(HOST, here.port, SECRET)
            assert await ask(inside) == StatusReply(text="hello")
            waiting = await stranger(here)
            await until(lambda: here.gate.strangers == 1)
            here.gate.close()
            await waiting.ended()
            late = await stranger(here)  # the kernel still takes it, for whoever listens next
            assert await ask(inside) == StatusReply(text="hello")
            assert here.gate.strangers == 0
            late.writer.close()
            inside.close()

    play(scene)


def test_complaints_are_told_or_counted() -> None:
    said: list[str] = []
    log = Complaints(said.append, lines_max=2, window_s=10.0)
    assert log.deadline() is None
    for second in range(5):
        log.add(f"c{second}", 100.0 + second)
    assert said == ["c0", "c1"]
    assert log.deadline() == 110.0
    log.flush(109.9)
    assert said == ["c0", "c1"]
    log.flush(110.0)
    assert said == ["c0", "c1", "and 3 more in 10 s, the last: c4"]
    assert log.deadline() is None
    log.add("c5", 111.0)
    log.add("c6", 130.0)  # no flush before: a new window all the same
    assert said[3:] == ["c5", "c6"]
    log.add("c7", 131.0)
    log.add("c8", 132.0)
    log.flush(133.0, force=True)
    assert said[5:] == ["c7", "and 1 more in 10 s, the last: c8"]


@pytest.mark.parametrize("unread", [False, True], ids=["read all", "left some unread"])
def test_the_last_words_of_a_peer_are_read_though_it_cannot_be_answered(unread: bool) -> None:
    """An agent can be such a peer: it was frozen while its job ended, and reports as it wakes."""

    async def scene() -> None:
        with socket.create_server((HOST, 0)) as listener:
            ours = socket.create_connection(listener.getsockname()[:2])
            theirs = listener.accept()[0]
        key = b"k" * 32
        reader, writer = await asyncio.open_connection(sock=ours)
        channel = Channel(reader, writer, frames.Sealer(key), frames.Opener(key))
        channel.send(StatusRequest())
        if not unread:
            assert theirs.recv(1 << 16)
        theirs.sendall(frames.Sealer(key).seal(encode(StatusReply(text="it is over"))))
        theirs.close()
        for _ in range(3):  # before anything can be read
            channel.send(StatusRequest())
        assert await channel.receive(StatusReply) == StatusReply(text="it is over")
        assert await channel.receive(StatusReply) is None
        channel.close()

    play(scene)
