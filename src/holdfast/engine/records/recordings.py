"""Describes recordings of a coordinator: the state of its machine, and the events after that.

A recording is a zstd stream of records, each with its length before it: first a header, then the
events that the machine handled, each with a digest of its decision where it decided anything. The
end may be missing. One term of a coordinator makes one recording after the other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import re
import struct
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal

import msgspec
import xxhash
import zstandard

import holdfast.engine.core
from holdfast.engine.core.errors import Damaged
from holdfast.engine.core.membership.coordinator import CoordinatorMachine
from holdfast.engine.core.membership.coordinator_events import (
    CoordinatorEffect,
    CoordinatorEvent,
    ReportArrived,
    SendDirective,
    ServersAsked,
    StopRequested,
)
from holdfast.engine.core.membership.facts import LatestFacts
from holdfast.engine.core.membership.group import GroupMachine
from holdfast.engine.core.types import Tick
from holdfast.engine.core.views import View
from holdfast.engine.state.store.regular_files import read_up_to, regular_stream
from holdfast.engine.wire.object_graphs import dump_graph, load_graph
from holdfast.engine.wire.strict import StrictDecoder

RECORDINGS_DIR = "recordings"
RECORD_BYTES_MAX = 256 << 20
_LENGTH = struct.Struct("<I")
_CACHES = (LatestFacts,)  # their values are found again from the rest
_KINDS: dict[type, str] = {
    ReportArrived: "report",
    StopRequested: "stop",
    ServersAsked: "servers",
    Tick: "tick",
}
_DECODERS: dict[str, StrictDecoder[Any]] = {
    name: StrictDecoder(kind) for kind, name in _KINDS.items()
}
_ENCODER = msgspec.msgpack.Encoder()
_CANONICAL = msgspec.msgpack.Encoder(order="deterministic")
DAMAGE = (msgspec.MsgspecError, zstandard.ZstdError, ValueError, RecursionError)
Machine = CoordinatorMachine | GroupMachine


class Header(msgspec.Struct, frozen=True, kw_only=True, tag="header"):
    """Begins a recording. `clock`: the machine's time, in seconds, at the wall time `began`.

    `core`: digest of the code that decides.
    """

    release: str
    core: str
    term: int
    began: float
    clock: float
    machine: bytes
    format: Literal[1] = 1


class HeardEvent(msgspec.Struct, frozen=True, tag="heard", array_like=True):
    """Is one event. `at`: the time at which the machine handled it."""

    at: float
    kind: str
    body: bytes

    def event(self) -> CoordinatorEvent:
        """Return the event. Damaged."""
        try:
            found: CoordinatorEvent = _DECODERS[self.kind].decode(self.body)
        except (msgspec.MsgspecError, KeyError, UnicodeDecodeError, RecursionError) as error:
            raise Damaged(f"an event cannot be read: {error}") from None
        return found


class DecisionDigest(msgspec.Struct, frozen=True, tag="decided", array_like=True):
    """Is the digest of the effects of the event before it; left out if there are none."""

    digest: int


_Record = Header | HeardEvent | DecisionDigest
_DIGESTED: list[tuple[View, bytes]] = []  # none or one
_decode_header = msgspec.msgpack.Decoder(Header).decode
_decode_record = msgspec.msgpack.Decoder(HeardEvent | DecisionDigest).decode


def digest_effects(effects: Sequence[CoordinatorEffect]) -> int:
    """Return 64 bits that differ if the effects do. A view that goes to many is encoded once."""
    digest = xxhash.xxh64()
    for effect in effects:
        if isinstance(effect, SendDirective) and (view := effect.directive.view) is not None:
            digest.update(_digest_view(view))
            effect = SendDirective(dataclasses.replace(effect.directive, view=None))
        digest.update(_CANONICAL.encode(effect))
    return digest.intdigest()


def _digest_view(view: View) -> bytes:
    """Digest a view, and remember the last: a large job's nodes receive it one by one."""
    if not _DIGESTED or _DIGESTED[0][0] is not view:
        _DIGESTED[:] = [(view, xxhash.xxh64_digest(_CANONICAL.encode(view)))]
    return _DIGESTED[0][1]


def encode_record(record: _Record) -> bytes:
    """Return a record with its length."""
    data = _ENCODER.encode(record)
    return _LENGTH.pack(len(data)) + data


def make_heard(event: CoordinatorEvent, at: float) -> HeardEvent:
    """Return the record of an event."""
    return HeardEvent(at, _KINDS[type(event)], _ENCODER.encode(event))


def freeze(machine: Machine) -> bytes:
    """Return the whole state of a machine. TypeError if it holds values of other kinds."""
    return dump_graph(machine, _CACHES)


def thaw(data: bytes) -> Machine:
    """Return the machine that has this state. Damaged."""
    found = load_graph(data, _CACHES)
    if not isinstance(found, Machine):
        raise Damaged("this is the state of no coordinator")
    return found


@dataclass(frozen=True, slots=True)
class Recording:
    """Is a recording as it was read. `problem`: why it ends early, if it is damaged."""

    header: Header
    records: tuple[HeardEvent | DecisionDigest, ...]
    problem: str = ""


def read_recording(stream: IO[bytes]) -> Recording:
    """Read a recording as far as it goes. Damaged if not even its beginning can be read."""
    found = _read_records(stream)
    header, records, problem = _take_header(found), [], ""
    try:
        for data in found:
            records.append(_decode_record(data))
    except DAMAGE as error:
        problem = f"it is damaged: {error}"
    return Recording(header, tuple(records), problem)


def read_header(stream: IO[bytes]) -> Header:
    """Read only a recording's beginning. Damaged."""
    return _take_header(_read_records(stream))


def _take_header(records: Iterator[bytes]) -> Header:
    try:
        return _decode_header(next(records, b""))
    except DAMAGE as error:
        text = f"this is no recording of a coordinator, or it is damaged: {error}"
        raise Damaged(text) from None


def open_recording(path: Path) -> Recording:
    """Read the recording in a file. Damaged; OSError."""
    with regular_stream(path) as stream:
        return read_recording(stream)


def order_of_name(path: Path) -> tuple[int, ...]:
    """Return the numbers in a file's name, a term first: they only grow, while times may not."""
    return tuple(map(int, re.findall(r"\d{1,18}", path.stem)))


@contextlib.contextmanager
def open_recordings(
    source: Path,
) -> Iterator[dict[str, Callable[[], contextlib.AbstractContextManager[IO[bytes]]]]]:
    """Yield the recordings of a bundle, of a run directory, or the one in a file.

    By name: a function that opens one to be read. OSError; zipfile.BadZipFile.
    """
    if source.is_dir():
        paths = (source / RECORDINGS_DIR).glob("*.zst")
        yield {path.name: partial(regular_stream, path) for path in paths}
        return
    with regular_stream(source) as file:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as bundle:
                yield {name: partial(bundle.open, name) for name in _list_recordings(bundle)}
        else:
            yield {source.name: partial(regular_stream, source)}


def _list_recordings(bundle: zipfile.ZipFile) -> list[str]:
    """Return the names of a bundle's recordings. BadZipFile if one is compressed otherwise."""
    found = [i for i in bundle.infolist() if i.filename.startswith(f"{RECORDINGS_DIR}/")]
    for each in found:
        if each.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            text = f"{each.filename!r} is compressed in a way that no bundle of Holdfast is"
            raise zipfile.BadZipFile(text)
    return [each.filename for each in found]


def _read_records(stream: IO[bytes]) -> Iterator[bytes]:
    with zstandard.ZstdDecompressor().stream_reader(stream, closefd=False) as plain:
        while len(head := plain.read(_LENGTH.size)) == _LENGTH.size:
            (length,) = _LENGTH.unpack(head)
            if length > RECORD_BYTES_MAX:
                raise zstandard.ZstdError(f"a record of {length} bytes cannot be right")
            data = read_up_to(plain, length)
            if len(data) < length:
                return  # the process was killed as it wrote
            yield data


def digest_core() -> str:
    """Return a digest of the code that decides: other code may decide otherwise."""
    found = hashlib.sha256()
    for path in sorted(Path(holdfast.engine.core.__path__[0]).rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]
