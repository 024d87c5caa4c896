"""The properties that fuzzing checks: what may happen when code reads any bytes at all.

Each target takes bytes and fails with an AssertionError, or lets an exception through that nobody
announced. They are driven by Hypothesis (test_fuzz.py) and by the fuzzers of fuzz/run.py.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator

import msgspec
import xxhash

from holdfast.engine.core.directives import (
    AgentReport,
    Directive,
    Move,
    WantedProcess,
    WorkerDirective,
)
from holdfast.engine.core.errors import Damaged, UserError, WireError
from holdfast.engine.core.job_problems import find_problem
from holdfast.engine.core.job_record import JobRecord, Slot
from holdfast.engine.core.types import AgentId, Incarnation, Peer, ViewNumber, WorkerId
from holdfast.engine.core.views import Member, View
from holdfast.engine.core.worker_status import Stage, WorkerStatus
from holdfast.engine.net.peer_stream import HELLO, NONCE_BYTES, PeerProof
from holdfast.engine.runtime.leadership.journal import MAGIC, seal, unseal
from holdfast.engine.state.store import manifest
from holdfast.engine.state.store.data_index import (
    DIGEST_BYTES,
    FileEntry,
    FileIndex,
    SampleIndex,
    block_digest,
    decode_index,
    encode_index,
)
from holdfast.engine.state.store.data_index import MAGIC as INDEX_MAGIC
from holdfast.engine.wire import frames
from holdfast.engine.wire.job_document import decode_job, encode_job
from holdfast.engine.wire.messages import (
    KINDS,
    Address,
    AddressBook,
    ClockReply,
    ClockRequest,
    DrainRequest,
    FilePart,
    FilesReply,
    FilesRequest,
    JoinReply,
    JoinRequest,
    LabelRequest,
    LogReply,
    LogRequest,
    MoveRequest,
    NodesAwaited,
    OrderReply,
    PeerReply,
    PeerRequest,
    ScaleRequest,
    StacksRequest,
    StatusReply,
    StatusRequest,
    StopRequest,
    decode,
    encode,
)
from support import SPEC

KEY = b"k" * 32
PEER_MAGIC = b"hfuzz\0\0\1"
UNUSED_KEY = b"u" * 32  # seals nothing: a fuzzer learns from KEY's frames how to make them
STATUS = WorkerStatus(worker=WorkerId(3), incarnation=Incarnation(2), stage=Stage.LOST, detail="x")
VIEW = View(
    number=ViewNumber(7),
    members=(Member(worker=WorkerId(3), incarnation=Incarnation(2), agent=AgentId("a")),),
    owners=(WorkerId(3),) * 4,
    resume_step=9,
    leader=WorkerId(3),
)
MESSAGES: list[object] = [
    STATUS,
    WorkerDirective(stop_view=ViewNumber(6), view=VIEW),
    AgentReport(agent=AgentId("a"), incarnation=Incarnation(1), seq=4, slots=2, workers=(STATUS,)),
    Directive(
        term=1,
        seq=2,
        agent=AgentId("a"),
        agent_incarnation=Incarnation(1),
        wanted=(WantedProcess(worker=WorkerId(3), incarnation=Incarnation(2)),),
        view=VIEW,
    ),
    Address(view=7, peer=Peer(WorkerId(3)), address=b"\x00\xff"),
    JoinRequest(),
    PeerRequest(number=3, stream="up"),
    PeerReply(number=3, received_s=1.5, answered_s=1.6, stream_port=7001, stream_token=b"t"),
    Directive(term=1, seq=2, agent=AgentId("a"), agent_incarnation=Incarnation(1)),
    JoinReply(spec=SPEC, seen_as="10.0.0.2"),
    AddressBook(view=7, addresses=((Peer(WorkerId(3)), b"\x00\xff"),)),
    StatusRequest(),
    StatusReply(text="{}"),
    StopRequest(reason="enough"),
    DrainRequest(agent=AgentId("node1"), reason="a new fan"),
    StacksRequest(reason="an operator asks"),
    ClockRequest(asked=1.7e9),
    ClockReply(asked=1.7e9, told=1.8e9),
    LabelRequest(agent=AgentId("node1"), domains=("rack=r7",)),
    NodesAwaited(text="Slurm gives 1 of 2 nodes; Resources"),
    OrderReply(problem=""),
    FilesRequest(held=(("events.jsonl", 100),)),
    FilesReply(parts=(FilePart(name="journal", data=b"x", held=1, replaces=True),), more=False),
    LogRequest(worker=WorkerId(3), number=7),
    LogReply(number=7, name="worker-3-2.log", lines=("step 9", "")),
    ScaleRequest(servers=3),
    MoveRequest(
        agent=AgentId("node1"),
        leaving=Move(worker=WorkerId(3), incarnation=Incarnation(2), to=AgentId("node2")),
    ),
]
RECORD = JobRecord(
    term=3,
    view=VIEW,
    slots=(Slot(worker=WorkerId(3), agent=AgentId("a"), incarnation=Incarnation(2)),),
)
PIECES_MAX = 16
FIRST_BYTES_MAX, BYTES_MAX = 900, 1200  # every message of MESSAGES fits


def pieces(data: bytes, cuts: bytes) -> Iterator[bytes]:
    """`data` in pieces: some of the sizes that `cuts` names, over and over, then the rest."""
    at = 0
    for turn in range(PIECES_MAX if cuts else 0):
        size = cuts[turn % len(cuts)] + 1
        yield data[at : at + size]
        at += size
    yield data[at:]


def opened(stream: bytes, cuts: bytes, key: bytes | None) -> tuple[list[bytes], bool]:
    """(payloads, whether the stream was refused), with the opener's memory watched."""
    opener = frames.Opener(key, BYTES_MAX, FIRST_BYTES_MAX)
    found: list[bytes] = []
    try:
        for piece in pieces(stream, cuts):
            for payload in opener.feed(piece):
                assert len(payload) <= (BYTES_MAX if found else FIRST_BYTES_MAX)
                found.append(payload)
            assert opener.held_bytes < 4 + frames.TAG_BYTES + BYTES_MAX
    except WireError:
        return found, True
    return found, False


def any_frames(data: bytes) -> None:
    """Put random bytes through in random pieces: without a key the same bytes come out."""
    cuts, stream = data[1 : 1 + data[0] % 8], data[1 + data[0] % 8 :]
    payloads, refused = opened(stream, cuts, None)
    again = b"".join(frames.Sealer(None).seal(p) for p in payloads)
    assert stream.startswith(again)
    assert opened(stream, b"", None) == (payloads, refused), "it depends on the pieces"
    assert opened(stream, cuts, UNUSED_KEY)[0] == [], "a frame was forged"


def damaged_frames(data: bytes) -> None:
    """Reorder, repeat or replace sealed frames: only sealed bytes may come out."""
    how, junk = data[:9].ljust(9, b"\0"), data[9:]
    cuts, sealed = how[:2], [encode(MESSAGES[n % len(MESSAGES)]) for n in how[2:5]]
    sealer = frames.Sealer(KEY)
    whole = [sealer.seal(payload) for payload in sealed]
    stream = b"".join(whole)
    at, length = int.from_bytes(how[5:7], "big") % (len(stream) + 1), how[7]
    changed = stream[:at] + junk + stream[at + length :]
    if how[8]:
        changed = b"".join(whole[how[8] // 3**i % 3] for i in range(4))
    payloads, refused = opened(changed, cuts, KEY)
    assert payloads == sealed[: len(payloads)], "something came out that was never sealed"
    if changed == stream:
        assert (len(payloads), refused) == (len(sealed), False)


def any_message(data: bytes) -> None:
    """A message of an accepted kind, the same when sent on, or WireError."""
    which = int.from_bytes(data[:2], "big")
    accepted = tuple(cls for number, cls in KINDS.items() if which >> number & 1)
    try:
        message = decode(data[2:], *accepted)
    except WireError:
        return
    assert type(message) in accepted
    hash(message)  # all the way down it is made of immutable values
    again = decode(encode(message), *accepted)
    assert again == message or encode(again) == encode(message)  # a NaN is no equal of itself


def any_greeting(data: bytes) -> None:
    """A nonce of the right size out of a greeting of our own release, or WireError."""
    try:
        frames.check_start(data, "client")
    except WireError:
        assert not frames.MAGIC.startswith(data[:8]) or len(data) >= frames.HEAD_BYTES
    try:
        nonce = frames.read_greeting(data, "client")
    except WireError:
        return
    assert frames.greeting(nonce) == data


def any_peer_words(data: bytes) -> None:
    """No words open a listener without the key, and none are read beyond the proof."""
    proof, sent = PeerProof(KEY, PEER_MAGIC), b""
    with contextlib.suppress(WireError):
        for piece in pieces(data[8:], data[:8]):
            left = piece
            while left:
                assert proof.wants > 0
                taken, left = left[: proof.wants], left[proof.wants :]
                sent += proof.feed(taken)
    assert proof.purpose is None
    assert len(sent) <= NONCE_BYTES


def any_job_document(data: bytes) -> None:
    """A job that every check finds good, the same when written again, or Damaged."""
    with contextlib.suppress(Damaged):
        spec = decode_job(data)
        assert find_problem(spec) == ""
        assert decode_job(encode_job(spec)) == spec


def any_journal(data: bytes) -> None:
    """A record, the same when sealed again, or Damaged."""
    body = zlib.compress(data, 1)
    digest = xxhash.xxh3_128(body).digest()
    for sealed in (data, MAGIC + len(body).to_bytes(8, "big") + digest + body):
        with contextlib.suppress(Damaged):
            record = unseal(sealed)
            assert unseal(seal(record)) == record


def any_index(data: bytes) -> None:
    """An index of data, the same when written again, or a UserError."""
    head = (len(data) % 64).to_bytes(4, "little")
    body = INDEX_MAGIC + head + data
    sealed = body + block_digest(body)
    for whole in (data, INDEX_MAGIC + data + block_digest(INDEX_MAGIC + data), sealed):
        with contextlib.suppress(UserError):
            index = decode_index(whole, "x")
            assert decode_index(encode_index(index), "x") == index


def any_manifest(data: bytes) -> None:
    """A manifest whose numbers agree and can be held in memory, or Damaged."""
    head = manifest.MAGIC + len(data).to_bytes(8, "little") + data
    for whole in (data, head + manifest.digest(head)):
        with contextlib.suppress(Damaged):
            found = manifest.decode(whole, "x")
            assert manifest.problem_of(manifest.decode(manifest.encode(found), "x")) == ""
            for entry in found.entries:
                for chunk in manifest.chunks_of(found, entry):
                    assert 0 < chunk.stored <= chunk.size <= manifest.CHUNK_BYTES_MAX
                    assert 0 <= chunk.start <= chunk.start + chunk.size <= entry.size


MANIFEST = manifest.Manifest(
    step=1,
    time=0.0,
    token="t",
    packs=("p",),
    entries=(
        manifest.Entry(
            name="w",
            size=(1 << 20) + 8,
            digests=bytes(32),
            runs=(manifest.Run(chunks=2, pack=0, offset=0, stored=(100, 8)),),
            dtype="float32",
            shape=(2, (1 << 17) + 1),
            offset=(2, 0),
            whole=(4, (1 << 17) + 1),
        ),
    ),
)
INDEXES = (
    SampleIndex(digests=bytes(range(48))),
    FileIndex(
        block_bytes=4096,
        files=(
            FileEntry(name="a", size=5000, digests=bytes(range(32))),
            FileEntry(name="b/c", size=1, digests=bytes(16)),
        ),
    ),
)

TARGETS: list[Callable[[bytes], None]] = [
    any_message,
    any_frames,
    damaged_frames,
    any_greeting,
    any_journal,
    any_job_document,
    any_index,
    any_peer_words,
    any_manifest,
]


def seeds() -> Iterator[bytes]:
    """Good inputs to begin from, each with the number of its target in front."""
    for message in MESSAGES:
        sealed = frames.Sealer(None).seal(encode(message))
        yield bytes([0, 0xFF, 0xFF]) + encode(message)
        yield bytes([1, 2, 3, 4]) + sealed + sealed
    yield bytes([2, 9, 9, 0, 1, 2, 0, 0, 0, 0])
    yield bytes([2, 0, 7, 3, 4, 5, 0, 30, 4, 0]) + b"junk"
    yield bytes([2, 9, 9, 0, 1, 2, 0, 0, 0, 22])
    yield bytes([3]) + frames.greeting(b"n" * frames.NONCE_BYTES)
    yield bytes([4]) + msgspec.msgpack.encode(RECORD)
    yield bytes([4]) + seal(RECORD)
    yield bytes([5]) + encode_job(SPEC)
    for index in INDEXES:
        whole = encode_index(index)
        yield bytes([6]) + whole
        yield bytes([6]) + whole[len(INDEX_MAGIC) : -DIGEST_BYTES]
    hello = HELLO.pack(PEER_MAGIC, 1, 2, 3, bytes(16))
    sealed = manifest.encode(MANIFEST)
    yield bytes([8]) + sealed
    yield bytes([8]) + sealed[16:-16]
    yield bytes([7, *range(8)]) + hello + bytes(32)


def one_input(data: bytes) -> None:
    """The first byte names the target."""
    if data:
        TARGETS[data[0] % len(TARGETS)](data[1:] or b"\0")
