"""Describes a checkpoint by its manifest, which names chunks, which lie in packs. Pure.

    packs/STEP-TOKEN-N          payloads of chunks, one after the other
    manifests/STEP              written last: a checkpoint is there if and only if this is
    saving/TOKEN[.N[.all]]      a save is under way; names the packs that it may build upon
    parts/TOKEN.N               the part of one of several writers, for the writer that commits
    suspect/STEP-TOKEN-N        some bytes of that pack were found wrong: no save builds upon it
    invalidation/STEP.VIEW      checkpoints after STEP, made up to VIEW, contain errors

Every entry's bytes fall into chunks of equal size (the last one is shorter). A chunk is known by
its length and digest, so an unchanged chunk of an earlier checkpoint stays in its pack. It is
compressed only where that makes it shorter: weights and moments in full use hardly shrink, and cost
more time to compress than to write; bytes that are mostly zeros, repeats or counts shrink to
little. A sample decides for each entry. All numbers that lead to reading are checked here,
before any byte is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import xxhash
import zstandard

from holdfast.engine.core.errors import Damaged, OtherRelease, newer_format
from holdfast.engine.core.replica.retention import SaveOrder
from holdfast.engine.core.types import NO_VIEW, ViewNumber
from holdfast.engine.state.store.storage import NAME
from holdfast.engine.wire.strict import StrictDecoder

T = TypeVar("T")
MAGIC = b"HFMANIF1"
SKELETON = ".skeleton"  # the entry with everything of a state that is no tensor
TABLES = ".tables/"  # before the names of entries that servers of tables have saved
PROCS = "procs"  # key in a checkpoint's `about`: the number of shards of its state
VIEW = "view"  # and the view that made it, if any did
DIGEST_BYTES = 16
CHUNK_BYTES = 1 << 20
CHUNK_BYTES_MAX = 64 << 20  # a chunk is held in memory while it is verified
MANIFEST_BYTES_MAX = 1 << 30
INTENT_BYTES_MAX = 64 << 20
PACKS, MANIFESTS, SAVING, PARTS = "packs/", "manifests/", "saving/", "parts/"
SUSPECT, INVALIDATION = "suspect/", "invalidation/"
STEP_DIGITS, VIEW_DIGITS_MAX = 12, 18
_SHARD = ".shard"
_ITEM_SIZES = (1, 2, 4, 8, 16)  # bytes of one element, of types that are not named below
ITEM_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32", "complex32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}
# Zstandard's level, and the bytes of the smallest entry that is compressed.
LEVEL, SIZE_MIN = 1, 4096
# Samples of an entry, spread evenly, must shrink to this share of their size, and a chunk to that.
SAMPLES, SAMPLE_BYTES, PAYS = 4, 16 << 10, 0.5
SHORTER = 0.9


def digest(data: bytes | bytearray | memoryview) -> bytes:
    """Digest bytes with xxh3-128, which guards against accidents at the speed of memory."""
    return xxhash.xxh3_128_digest(data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Describes chunks of an entry that lie one after the other in a pack."""

    chunks: int
    #: Number among the manifest's packs.
    pack: int
    offset: int  # bytes
    #: Bytes of each chunk in the pack, if any of them is compressed.
    stored: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Describes a tensor's bytes, row-major and little-endian, or plain bytes without a dtype."""

    name: str
    size: int  # bytes
    #: The digests of the entry's chunks, one after the other.
    digests: bytes
    runs: tuple[Run, ...]
    #: Torch's name of the type.
    dtype: str = ""
    shape: tuple[int, ...] = ()
    #: Place in elements in a larger tensor, if the entry is a part of one.
    offset: tuple[int, ...] = ()
    #: Shape of the whole tensor.
    whole: tuple[int, ...] = ()

    @property
    def label(self) -> str:
        """Return the name for people; for a part of a larger tensor, with its position."""
        place = f" at {list(self.offset)}" if self.whole not in ((), self.shape) else ""
        return self.name + place


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Describes one checkpoint completely.

    `time`: seconds since 1970. `about`: for people and for whoever resumes; no secrets.
    """

    step: int
    time: float
    token: str
    packs: tuple[str, ...]
    entries: tuple[Entry, ...]
    chunk_bytes: int = CHUNK_BYTES
    about: dict[str, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.entries)

    @property
    def order(self) -> SaveOrder:
        """Return its place among the checkpoints of its job."""
        return SaveOrder(view=_view_of(self.about), step=self.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPart:
    """Describes one writer's part: entries whose runs refer to these packs."""

    packs: tuple[str, ...]
    entries: tuple[Entry, ...]
    #: Bytes that this save has written; the rest was there before.
    written_bytes: int
    #: The checkpoint that holds the rest.
    base: int | None = None
    #: Shard of this share, where workers have several processes.
    shard: int = 0
    #: Fingerprint of the shard's whole state; 0: unknown.
    state_print: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Describes one chunk of an entry, and where it lies."""

    #: First byte within the entry.
    start: int
    size: int
    digest: bytes
    pack: str
    offset: int
    #: Bytes in the pack: fewer than `size`, if the chunk is compressed.
    stored: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """Announces a save. Packs it names, and those whose name has its token, are not garbage.

    `host`: the scope of the writer's process number, by `name_scope()`. `time`: for people.
    """

    token: str
    host: str
    pid: int
    time: float
    packs: tuple[str, ...] = ()
    step: int = -1
    view: ViewNumber = NO_VIEW

    @property
    def order(self) -> SaveOrder:
        return SaveOrder(view=self.view, step=self.step)


def invalidation_name(after: int, view: int) -> str:
    return f"{INVALIDATION}{after:0{STEP_DIGITS}d}.{view}"


def is_withdrawn(name: str, step: int, about: dict[str, str]) -> bool:
    """Return whether such a name covers a checkpoint; it never covers one made in no view."""
    after, _, view = name.removeprefix(INVALIDATION).partition(".")
    made_in = _view_of(about)
    if not (after.isdecimal() and view.isdecimal()) or made_in == NO_VIEW:
        return False
    return step > int(after) and made_in <= int(view)


def _view_of(about: dict[str, str]) -> ViewNumber:
    """Return the view that made a checkpoint, if any did."""
    made_in = about.get(VIEW, "")
    is_number = made_in.isdecimal() and len(made_in) <= VIEW_DIGITS_MAX
    return ViewNumber(int(made_in)) if is_number else NO_VIEW


def chunks_of(manifest: Manifest, entry: Entry) -> Iterator[Chunk]:
    index, size = 0, manifest.chunk_bytes
    for run in entry.runs:
        offset = run.offset
        for i in range(run.chunks):
            start = index * size
            count = min(size, entry.size - start)
            stored = run.stored[i] if run.stored else count
            yield Chunk(
                start=start,
                size=count,
                digest=entry.digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES],
                pack=manifest.packs[run.pack],
                offset=offset,
                stored=stored,
            )
            index, offset = index + 1, offset + stored


def manifest_name(step: int) -> str:
    return f"{MANIFESTS}{step:0{STEP_DIGITS}d}"


def step_of(name: str) -> int | None:
    """Return the step of a manifest's name; None for any other name."""
    digits = name.removeprefix(MANIFESTS)
    return int(digits) if digits.isdecimal() and len(digits) == STEP_DIGITS else None


def pack_name(step: int, token: str, number: int) -> str:
    return f"{PACKS}{step:0{STEP_DIGITS}d}-{token}-{number}"


def part_name(token: str, number: int) -> str:
    return f"{PARTS}{token}.{number}"


def name_in_shard(name: str, shard: int) -> str:
    """Return the name of an entry that each shard has for itself; shard 0's entry stands for all.

    Parts of a tensor that is cut over the shards have one name, and differ by their offsets.
    """
    return name if shard == 0 else f"{_SHARD}{shard}/{name}"


def is_of_one_shard(name: str) -> bool:
    """Return whether an entry belongs to a further shard alone, not to all shards."""
    return name.startswith(_SHARD)


def is_of_tables(name: str) -> bool:
    """Return whether an entry holds rows of tables that servers have saved."""
    return name.startswith(TABLES)


def intent_name(token: str, writer: int | None) -> str:
    return f"{SAVING}{token}" + ("" if writer is None else f".{writer}")


def suspect_name(pack: str) -> str:
    return SUSPECT + pack.removeprefix(PACKS)


def token_of(name: str) -> str:
    """Return the token of the save that wrote a pack or a part."""
    if name.startswith(PARTS):
        return name.removeprefix(PARTS).partition(".")[0]
    parts = name.removeprefix(PACKS).split("-")
    return parts[1] if len(parts) == 3 else ""


_ENCODER = msgspec.msgpack.Encoder()
_MANIFEST = StrictDecoder(Manifest)
_INTENT = StrictDecoder(Intent)
_PART = StrictDecoder(SavedPart)


def encode(manifest: Manifest) -> bytes:
    return _seal(_ENCODER.encode(manifest))


def decode(data: bytes, name: str) -> Manifest:
    """Decode a manifest; Damaged, in words for people, unless every byte is as it was written."""
    manifest = _decode(_MANIFEST, data, name)
    problem = problem_of(manifest)
    if problem:
        raise Damaged(f"{name} contradicts itself: {problem}")
    return manifest


def encode_intent(intent: Intent) -> bytes:
    return _seal(_ENCODER.encode(intent))


def decode_intent(data: bytes, name: str) -> Intent:
    """Decode the announcement of a save. Damaged."""
    return _decode(_INTENT, data, name)


def encode_part(part: SavedPart) -> bytes:
    return _seal(_ENCODER.encode(part))


def decode_part(data: bytes, name: str) -> SavedPart:
    """Decode a writer's part. Damaged.

    Its runs are checked once it is in a manifest.
    """
    part = _decode(_PART, data, name)
    if any(not 0 <= r.pack < len(part.packs) for e in part.entries for r in e.runs):
        raise Damaged(f"{name} contradicts itself: a run lies in no pack")
    return part


def _decode(decoder: StrictDecoder[T], data: bytes, name: str) -> T:
    try:
        return decoder.decode(_unseal(data, name))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise OtherRelease(f"{name} is of another release of Holdfast: {error}") from None


def _seal(payload: bytes) -> bytes:
    head = MAGIC + len(payload).to_bytes(8, "little")
    return head + payload + digest(head + payload)


def _unseal(data: bytes, name: str) -> bytes:
    head = len(MAGIC) + 8
    newer = newer_format(data, MAGIC)
    if len(data) < head + DIGEST_BYTES or not (newer or data.startswith(MAGIC)):
        raise Damaged(f"{name} is damaged: it begins with {data[:8]!r} and has {len(data)} bytes")
    size = int.from_bytes(data[len(MAGIC) : head], "little")
    if len(data) != head + size + DIGEST_BYTES:
        raise Damaged(f"{name} is damaged: it has {len(data)} bytes and says {size}")
    if digest(data[:-DIGEST_BYTES]) != data[-DIGEST_BYTES:]:
        raise Damaged(f"{name} is damaged: its digest is another")
    if newer:
        raise OtherRelease(f"{name} {newer}")
    return data[head:-DIGEST_BYTES]


def problem_of(manifest: Manifest) -> str:
    """Return the reason why this manifest cannot be right; empty if it may be."""
    if manifest.step < 0:
        return f"step {manifest.step}"
    if not 1 <= manifest.chunk_bytes <= CHUNK_BYTES_MAX:
        return f"chunks of {manifest.chunk_bytes} bytes, where 1 to {CHUNK_BYTES_MAX} can be right"
    for pack in manifest.packs:
        if not (pack.startswith(PACKS) and NAME.fullmatch(pack)):
            return f"{pack!r} is no name of a pack"
    names = [(entry.name, entry.offset) for entry in manifest.entries]
    if len(set(names)) != len(names):
        return "two entries have the same name"
    for entry in manifest.entries:
        count = -(-entry.size // manifest.chunk_bytes)
        if entry.size < 0 or len(entry.digests) != count * DIGEST_BYTES:
            return f"{entry.name} has {entry.size} bytes and {len(entry.digests)} of digests"
        if sum(run.chunks for run in entry.runs) != count:
            return f"{entry.name} has {count} chunks, which lie elsewhere"
        for run in entry.runs:
            if run.chunks < 1 or run.offset < 0 or not 0 <= run.pack < len(manifest.packs):
                return f"{entry.name} lies at {run}"
            if run.stored and len(run.stored) != run.chunks:
                return f"{entry.name} has {len(run.stored)} lengths of {run.chunks} chunks"
        if any(not 1 <= c.stored <= c.size for c in chunks_of(manifest, entry)):
            return f"{entry.name} has a chunk that is longer than it says"
        if problem := _shape_problem(entry):
            return problem
    return ""


def _shape_problem(entry: Entry) -> str:
    """Return the reason that bytes are no tensor of the entry's type and shape; "" if they are."""
    if not entry.dtype:
        return f"{entry.name} has a shape and no type" if entry.shape else ""
    elements = math.prod(entry.shape)
    sizes = (ITEM_BYTES[entry.dtype],) if entry.dtype in ITEM_BYTES else _ITEM_SIZES
    fits = any(entry.size == elements * each for each in sizes)
    if not fits or any(length < 0 for length in entry.shape):
        shape = list(entry.shape)
        return f"{entry.name} has {entry.size} bytes, and is a {entry.dtype} of shape {shape}"
    if not entry.offset and not entry.whole:
        return ""
    if not len(entry.offset) == len(entry.whole) == len(entry.shape):
        return f"{entry.name} is a part of {list(entry.whole)} at {list(entry.offset)}"
    places = zip(entry.offset, entry.shape, entry.whole, strict=True)
    if any(at < 0 or at + length > whole for at, length, whole in places):
        return f"{entry.name} lies at {list(entry.offset)}, outside of {list(entry.whole)}"
    return ""


def is_worthwhile(data: memoryview) -> bool:
    """Return whether an entry of these bytes should be compressed."""
    if len(data) < SIZE_MIN:
        return False
    size = min(SAMPLE_BYTES, len(data) // SAMPLES)
    gap = (len(data) - size) // (SAMPLES - 1)
    sample = b"".join(data[i * gap : i * gap + size] for i in range(SAMPLES))
    return len(_compressor().compress(sample)) <= PAYS * len(sample)


def shorten(chunk: memoryview) -> bytes | memoryview:
    """Return the chunk compressed, or unchanged if that would not make it much shorter."""
    found = _compressor().compress(chunk)
    return found if len(found) <= SHORTER * len(chunk) else chunk


def expand(data: memoryview, into: memoryview) -> str:
    """Decompress into `into`; return why that is impossible, or an empty string."""
    try:
        size = zstandard.frame_content_size(data)  # checked before so much memory is taken
        if size != len(into):
            return f"it has {size} bytes, decompressed, and not {len(into)}"
        into[:] = zstandard.ZstdDecompressor().decompress(data)
    except (zstandard.ZstdError, ValueError, MemoryError) as error:
        return f"it cannot be decompressed: {error}"
    return ""


def _compressor() -> zstandard.ZstdCompressor:
    return zstandard.ZstdCompressor(level=LEVEL)
