"""Implements a storage in a bucket, on S3 and its like, with Rust's object_store.

Keys and endpoints come from the URL and the environment, as its documentation says (AWS_ENDPOINT,
AWS_ACCESS_KEY_ID, ...). An upload of several parts becomes visible only once it is complete;
requests that fail for a passing reason are repeated with growing pauses.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterable, Iterator
from typing import Any

import obstore
from obstore.exceptions import BaseError
from obstore.store import ObjectStore, from_url

from holdfast.engine.core.errors import Damaged, UserError, WorldError, first_line
from holdfast.engine.state.store.storage import Missing, check_name

PART_BYTES = 16 << 20
UPLOADS = 4  # parts under way at a time
RETRY_S = 60.0  # for one request and its repetitions
RETRIES = 8
FAILURES = (BaseError, OSError)


def open_bucket(url: str) -> ObjectStorage:
    """Open s3://BUCKET/PREFIX, gs://... or az://... UserError."""
    retry: Any = {
        "max_retries": RETRIES,
        "retry_timeout": datetime.timedelta(seconds=RETRY_S),
        "backoff": {
            "init_backoff": datetime.timedelta(milliseconds=100),
            "max_backoff": datetime.timedelta(seconds=5),
            "base": 2,
        },
    }
    client: Any = {"allow_http": True, "timeout": datetime.timedelta(seconds=30)}
    try:
        store: Any = from_url(url, retry_config=retry, client_options=client)
    except (BaseError, ValueError) as error:
        raise UserError(f"--store {url}: {first_line(error)}") from None
    return ObjectStorage(store, url)


class ObjectStorage:
    """Implements `Storage` in a bucket. `store`: from obstore; `url` names it in messages."""

    def __init__(self, store: ObjectStore, url: str) -> None:
        self._store = store
        self._url = url.rstrip("/")

    def put(self, name: str, parts: Iterable[bytes | memoryview]) -> int:
        check_name(name)
        source = _Source(parts)
        try:
            obstore.put(self._store, name, source, chunk_size=PART_BYTES, max_concurrency=UPLOADS)
        except FAILURES as error:
            raise self._make_error("write", name, error) from None
        return source.size

    def read(self, name: str, offset: int, into: memoryview) -> None:
        check_name(name)
        if not into and self.size(name) is not None:
            return
        try:
            data = obstore.get_range(self._store, name, start=offset, length=max(len(into), 1))
        except FileNotFoundError:
            raise Missing(f"there is no {self._url}/{name}") from None
        except FAILURES as error:
            size = self.size(name)
            if size is not None and offset + len(into) > size:
                raise self._make_short_error(name, size) from None
            raise self._make_error("read", name, error) from None
        found = memoryview(data)
        if len(found) != len(into):
            raise self._make_short_error(name, offset + len(found))
        into[:] = found

    def size(self, name: str) -> int | None:
        check_name(name)
        try:
            return int(obstore.head(self._store, name)["size"])
        except FileNotFoundError:
            return None
        except FAILURES as error:
            raise self._make_error("look at", name, error) from None

    def names(self, prefix: str) -> list[str]:
        try:
            batches = obstore.list(self._store, prefix.rstrip("/") or None)
            return sorted(meta["path"] for batch in batches for meta in batch)
        except FAILURES as error:
            raise self._make_error("list", prefix, error) from None

    def delete(self, name: str) -> None:
        check_name(name)
        try:
            with contextlib.suppress(FileNotFoundError):
                obstore.delete(self._store, name)
        except FAILURES as error:
            raise self._make_error("delete", name, error) from None

    def _make_short_error(self, name: str, end: int) -> Damaged:
        return Damaged(f"{self._url}/{name} ends at byte {end}, before it should")

    def _make_error(self, what: str, name: str, error: Exception) -> WorldError:
        return WorldError(f"cannot {what} {self._url}/{name}: {first_line(error)}")


class _Source:
    """Provides the parts as the uploader wants them, and counts their size."""

    def __init__(self, parts: Iterable[bytes | memoryview]) -> None:
        self.size = 0
        self._parts = iter(parts)

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        part = bytes(next(self._parts))  # a copy: it is sent later
        self.size += len(part)
        return part
