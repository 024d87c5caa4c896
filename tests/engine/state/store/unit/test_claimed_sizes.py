"""A limit and a claimed length take no memory: only bytes that have come do."""

from __future__ import annotations

import io
import socket
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import zstandard

from holdfast.cli.main import main
from holdfast.clusters.mesos.mesos_session import read_records
from holdfast.clusters.rest_link import read_answer
from holdfast.engine.core.errors import UserError, WireError
from holdfast.engine.net.peer_stream import MESSAGE_BYTES_MAX, receive_exactly
from holdfast.engine.records.recordings import _LENGTH, RECORD_BYTES_MAX, _read_records
from holdfast.engine.runtime.coordinate.black_box import _end_of
from holdfast.engine.state.store.data_index import FileIndex, open_index, write_index
from holdfast.engine.state.store.manifest import Entry
from holdfast.engine.state.store.regular_files import (
    READ_BYTES,
    read_named,
    read_regular,
    read_up_to,
)
from holdfast.engine.train.checkpoint.formats import _bytes_to_read

MIB = 1 << 20


@contextmanager
def spending_at_most(bytes_max: int) -> Iterator[None]:
    """Check how much memory Python takes at its height."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] <= bytes_max
    finally:
        tracemalloc.stop()


def test_an_index_takes_as_much_memory_as_it_has_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index, data = tmp_path / "index", tmp_path / "data"
    write_index(FileIndex(block_bytes=4096, files=()), index)
    data.mkdir()
    with spending_at_most(MIB):
        assert open_index(index) == FileIndex(block_bytes=4096, files=())
    assert main(["data", "verify", str(data), str(index)]) == 0
    capsys.readouterr()
    index.write_bytes(b"text")
    with spending_at_most(MIB), pytest.raises(UserError, match="is not an index"):
        open_index(index)


def test_files_are_read_for_what_they_have(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"text")
    with spending_at_most(4 * MIB):
        assert read_regular(tmp_path / "file", 1 << 40) == b"text"
        assert read_named(tmp_path / "file", 1 << 40) == b"text"
        assert _end_of(tmp_path / "file", 1 << 40) == b"text"
    with pytest.raises(OSError, match="more than the 3 bytes"):
        read_named(tmp_path / "file", 3)


def test_a_stream_is_read_to_its_end_or_to_the_limit() -> None:
    data = bytes(range(256)) * (READ_BYTES // 100)
    assert read_up_to(io.BytesIO(data), 1 << 40) == data
    assert read_up_to(io.BytesIO(data), READ_BYTES + 7) == data[: READ_BYTES + 7]
    assert read_up_to(io.BytesIO(data), 0) == b""


def test_a_message_takes_memory_as_it_comes() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(bytes(100))
        theirs.shutdown(socket.SHUT_WR)
        with spending_at_most(4 * MIB), pytest.raises(WireError, match="has ended"):
            receive_exactly(ours, MESSAGE_BYTES_MAX)


def test_a_long_message_is_received_whole() -> None:
    data = bytes(range(256)) * 8192 + b"end"
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = threading.Thread(target=theirs.sendall, args=(data,))
        sender.start()
        assert receive_exactly(ours, len(data)) == data
        sender.join()


def test_a_record_that_claims_to_be_long_takes_no_memory() -> None:
    head = _LENGTH.pack(RECORD_BYTES_MAX)
    stream = io.BytesIO(zstandard.ZstdCompressor().compress(head + b"cut off"))
    with spending_at_most(8 * MIB):
        assert list(_read_records(stream)) == []


def test_answers_of_managers_take_memory_as_they_come() -> None:
    body = io.BufferedReader(io.BytesIO(b'{"a": 1}'))  # it takes memory as http.client's files do
    found = SimpleNamespace(read=body.read, headers={}, status=200, url="http://a")
    with spending_at_most(4 * MIB):
        assert read_answer(found)[0].document == {"a": 1}
    with spending_at_most(4 * MIB), pytest.raises(ValueError, match="ended within a record"):
        list(read_records(io.BufferedReader(io.BytesIO(b"60000000\n{}"))))


def test_a_tensor_without_bytes_counts_as_large_as_it_claims_to_be() -> None:
    empty = Entry(
        name="w",
        size=0,
        digests=b"",
        runs=(),
        dtype="float32",
        shape=(0, 7),
        offset=(0, 0),
        whole=(1 << 50, 7),
    )
    assert _bytes_to_read([empty]) == 7 << 52
