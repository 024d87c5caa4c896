"""Buckets: the same contract, against a real server process with the protocol of S3."""

from __future__ import annotations

import contextlib
import random
import secrets
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from holdfast.engine.core.errors import UserError, WorldError
from holdfast.engine.state.store.checkpoints import Checkpoints
from holdfast.engine.state.store.open import open_storage
from holdfast.engine.state.store.saving import Item
from holdfast.engine.state.store.storage import Storage
from holdfast.lab.contracts.storages import STORAGE_CASES, content
from labs.etcd_cluster import free_ports
from support import HOST, until

objects = pytest.importorskip("holdfast.engine.state.store.objects", exc_type=ImportError)
ObjectStorage, open_bucket = objects.ObjectStorage, objects.open_bucket


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the endpoint of an empty server."""
    pytest.importorskip("moto", reason="moto's S3 server is not installed")
    log = tmp_path_factory.mktemp("s3") / "log"
    # It takes a free port and prints it: a port that we chose could have another owner by then.
    command = [sys.executable, "-m", "moto.server", "-H", HOST, "-p", "0"]
    with open(log, "wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as popen:
        try:
            until(lambda: b"CTRL+C" in log.read_bytes(), "the S3 server")
            address = log.read_text().partition(" * Running on ")[2].split()[0]
            yield address.rstrip("/")
        finally:
            popen.kill()


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of a new bucket, with the keys in the environment."""
    for name, value in {
        "AWS_ENDPOINT": server,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    name = f"b{secrets.token_hex(6)}"
    request = urllib.request.Request(f"{server}/{name}", method="PUT")
    request.add_header("Authorization", "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/x")
    with contextlib.suppress(urllib.error.HTTPError):
        urllib.request.urlopen(request).close()
    return f"s3://{name}/some/prefix"


@pytest.mark.slow_with("what_is_put_can_be_read")
@pytest.mark.parametrize("case", STORAGE_CASES)
def test_the_contract(case: str, bucket: str) -> None:
    STORAGE_CASES[case](open_storage(bucket))


def test_checkpoints_in_a_bucket(bucket: str) -> None:
    data = bytearray(random.Random(1).randbytes(20 << 20))
    store = Checkpoints(open_storage(bucket))
    items = [Item(name="w", data=memoryview(data), dtype="uint8", shape=(len(data),))]
    store.save(1, items, {})
    data[12_345] ^= 1
    store.save(2, items, {})
    loaded = bytearray(len(data))
    again = Checkpoints(open_storage(bucket))
    again.load_newest(lambda manifest: [(manifest.entries[0], memoryview(loaded))])
    assert loaded == data
    sizes = [again.storage.size(pack) for pack in again.manifest(2).packs]
    assert sorted(filter(None, sizes)) == [1 << 20, 20 << 20]


def test_volumes_may_be_buckets(bucket: str) -> None:
    places = ",".join(f"{bucket}/{i}" for i in range(3))
    try:
        storage: Storage = open_storage(f"ec:2+1:{places}")
    except UserError as error:
        pytest.skip(str(error))
    storage.put("x", [b"spread" * 100_000])
    other = open_bucket(f"{bucket}/1")
    other.delete("x")
    assert content(storage, "x") == b"spread" * 100_000


def test_a_server_that_is_not_there_is_said_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (port,) = free_ports(1)
    monkeypatch.setenv("AWS_ENDPOINT", f"http://{HOST}:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setattr("holdfast.engine.state.store.objects.RETRIES", 1)
    with pytest.raises(WorldError, match=r"cannot look at s3://nowhere/a: ") as told:
        open_bucket("s3://nowhere").size("a")
    assert "\n" not in str(told.value)


def test_object_storage_in_memory_passes_the_same_cases() -> None:
    from obstore.store import MemoryStore

    for case in STORAGE_CASES.values():
        case(ObjectStorage(MemoryStore(), "memory://"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ec:4+2", "the form is"),
        ("ec:2+1:a,b", "need 3 volumes, not 2"),
        ("ec:1+1:a,a", "named twice"),
        ("ec:0+1:a", "at least 1"),
        ("xyz://bucket/a", "xyz://bucket/a"),
        ("", "empty place"),
    ],
)
def test_a_text_that_names_no_store_is_refused(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as told:
        open_storage(text)
    assert "\n" not in str(told.value)
