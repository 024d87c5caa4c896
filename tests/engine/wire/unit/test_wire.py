"""Frames and messages: damaged, replayed, foreign or malformed ones are refused, cleanly."""

from __future__ import annotations

import dataclasses
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz.targets import KEY, MESSAGES, STATUS
from holdfast.engine.core.directives import Directive
from holdfast.engine.core.errors import RELEASE, WireError
from holdfast.engine.wire import frames
from holdfast.engine.wire.messages import KINDS, decode, encode


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_messages_survive_the_wire(message: object) -> None:
    assert decode(encode(message), *KINDS.values()) == message


@pytest.mark.slow
@given(payload=st.lists(st.binary(max_size=300), max_size=8), cut=st.integers(1, 50))
def test_frames_survive_any_cutting(payload: list[bytes], cut: int) -> None:
    for key in (None, KEY):
        sealer, opener = frames.Sealer(key), frames.Opener(key)
        stream = b"".join(sealer.seal(p) for p in payload)
        found = [p for i in range(0, len(stream), cut) for p in opener.feed(stream[i : i + cut])]
        assert found == payload


@given(position=st.integers(4, 200), bit=st.integers(0, 7))
def test_a_flipped_bit_is_refused(position: int, bit: int) -> None:
    frame = bytearray(frames.Sealer(KEY).seal(b"p" * 100))
    frame[position % (len(frame) - 4) + 4] ^= 1 << bit
    with pytest.raises(WireError, match="not authentic"):
        list(frames.Opener(KEY).feed(bytes(frame)))


def test_a_replayed_or_reordered_frame_is_refused() -> None:
    sealer = frames.Sealer(KEY)
    one, two = sealer.seal(b"one"), sealer.seal(b"two")
    opener = frames.Opener(KEY)
    assert list(opener.feed(one)) == [b"one"]
    with pytest.raises(WireError, match="not authentic"):
        list(opener.feed(one))
    with pytest.raises(WireError, match="not authentic"):
        list(frames.Opener(KEY).feed(two))


def test_an_oversize_frame_is_refused_before_it_comes() -> None:
    with pytest.raises(WireError, match="over the limit"):
        list(frames.Opener(KEY, bytes_max=1000).feed((1001).to_bytes(4, "big")))


def test_the_first_frame_must_be_small() -> None:
    sealer, opener = frames.Sealer(KEY), frames.Opener(KEY, bytes_max=1000, first_bytes_max=10)
    small, large = sealer.seal(b"x" * 10), sealer.seal(b"x" * 11)
    assert list(opener.feed(small)) == [b"x" * 10]
    assert list(opener.feed(large)) == [b"x" * 11]
    with pytest.raises(WireError, match="over the limit of 10"):
        list(frames.Opener(KEY, bytes_max=1000, first_bytes_max=10).feed(large[:4]))


def test_frames_before_a_bad_one_are_delivered() -> None:
    sealer = frames.Sealer(KEY)
    found = frames.Opener(KEY).feed(sealer.seal(b"good") + sealer.seal(b"good") + b"\xff" * 4)
    assert [next(found), next(found)] == [b"good", b"good"]
    with pytest.raises(WireError, match="over the limit"):
        next(found)


@pytest.mark.slow
def test_opening_frames_costs_no_more_than_their_number() -> None:
    """16 times the frames take about 16 times as long; were it quadratic, 256 times."""

    def least_s(count: int) -> float:
        sealer = frames.Sealer(None)
        data = b"".join(sealer.seal(b"x") for _ in range(count))
        found = []
        for _ in range(5):
            opener, began = frames.Opener(None), time.process_time()
            assert sum(1 for _ in opener.feed(data)) == count
            found.append(time.process_time() - began)
        return min(found)

    few, many = least_s(4000), least_s(64_000)
    assert many / few < 64, f"{few:.4f} s -> {many:.4f} s"


def test_only_accepted_kinds_are_decoded() -> None:
    with pytest.raises(WireError, match="came where Directive was expected"):
        decode(encode(STATUS), Directive)


def test_another_version_is_refused() -> None:
    greeting = bytearray(frames.greeting(b"n" * frames.NONCE_BYTES))
    assert frames.read_greeting(bytes(greeting), "server") == b"n" * frames.NONCE_BYTES
    with pytest.raises(WireError, match="has 41 bytes"):
        frames.read_greeting(bytes(greeting[:-1]), "server")
    greeting[len(frames.MAGIC) + 1] += 1
    with pytest.raises(WireError, match="the client speaks version 3, we speak 2"):
        frames.read_greeting(bytes(greeting), "client")
    with pytest.raises(WireError, match="not a Holdfast server"):
        frames.read_greeting(b"SSH-2.0-OpenSSH_9.6 and more bytes", "server")


@pytest.mark.parametrize("theirs", [b"9.12.1", b"\xff\x1b[2J"])
def test_another_release_is_refused_by_name(theirs: bytes) -> None:
    ours = RELEASE.encode()
    greeting = frames.greeting(b"n" * frames.NONCE_BYTES)
    other = greeting.replace(ours.ljust(16, b"\0"), theirs.ljust(16, b"\0"))
    with pytest.raises(WireError, match="install one release on all machines") as caught:
        frames.read_greeting(other, "server")
    assert RELEASE in str(caught.value)
    assert str(caught.value).isprintable()


def test_proofs_bind_the_role_both_nonces_and_both_jobs() -> None:
    met = frames.Encounter(
        server_nonce=b"s" * 16,
        client_nonce=b"c" * 16,
        server_job=frames.write_job("one"),
        client_job=frames.write_job(""),
    )
    good = frames.proof(b"secret", "client", met)
    frames.check_proof(good, b"secret", "client", met)
    two = frames.write_job("two")
    for secret, role, said in [
        (b"guess", "client", {}),
        (b"secret", "server", {}),
        (b"secret", "client", {"server_nonce": b"t" * 16}),
        (b"secret", "client", {"client_nonce": b"d" * 16}),
        (b"secret", "client", {"server_job": two}),
        (b"secret", "client", {"client_job": two}),
        (b"secret", "client", {"server_job": met.client_job, "client_job": met.server_job}),
    ]:
        with pytest.raises(WireError, match="does not know this job's secret"):
            frames.check_proof(good, secret, role, dataclasses.replace(met, **said))
    keys = {frames.session_key(b"secret", who, met) for who in ("client", "server")}
    assert len(keys | {good}) == 3


def test_the_release_fits_into_a_greeting() -> None:
    assert len(RELEASE) <= frames.RELEASE_BYTES
