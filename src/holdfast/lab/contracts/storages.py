"""Defines the contract of every storage, a storage in memory, and a disk that crashes.

    for name, case in STORAGE_CASES.items(): case(make_storage())

`CrashDisk` remembers synced bytes. At the chosen call it stops, and `survive` leaves on the disk
what a power cut might: everything synced, and any part of the rest.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from holdfast.engine.core.errors import Damaged, UserError
from holdfast.engine.state.store.files import RealDisk
from holdfast.engine.state.store.storage import Missing, Storage, check_name

LARGE = 20 << 20  # more than a storage's buffers hold


class MemoryStorage:
    """Keeps objects in a dictionary."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def put(self, name: str, parts: Iterable[bytes | memoryview]) -> int:
        check_name(name)
        data = b"".join(bytes(part) for part in parts)
        with self._lock:
            self.objects[name] = data
        return len(data)

    def read(self, name: str, offset: int, into: memoryview) -> None:
        check_name(name)
        data = self.objects.get(name)
        if data is None:
            raise Missing(f"there is no {name}")
        if offset + len(into) > len(data):
            raise Damaged(f"{name} ends at byte {len(data)}, before it should")
        into[:] = data[offset : offset + len(into)]

    def size(self, name: str) -> int | None:
        check_name(name)
        data = self.objects.get(name)
        return None if data is None else len(data)

    def names(self, prefix: str) -> list[str]:
        with self._lock:
            return sorted(name for name in self.objects if name.startswith(prefix))

    def delete(self, name: str) -> None:
        check_name(name)
        with self._lock:
            self.objects.pop(name, None)


# ---------------------------------------------------------------- the contract


def content(storage: Storage, name: str) -> bytes:
    size = storage.size(name)
    assert size is not None, f"there is no {name}"
    data = bytearray(size)
    storage.read(name, 0, memoryview(data))
    return bytes(data)


def what_is_put_can_be_read(storage: Storage) -> None:
    assert storage.put("a/b-1", [b"hello ", memoryview(b"world")]) == 11
    assert storage.size("a/b-1") == 11
    assert content(storage, "a/b-1") == b"hello world"
    part = bytearray(3)
    storage.read("a/b-1", 4, memoryview(part))
    assert part == b"o w"


def empty_objects_are_objects(storage: Storage) -> None:
    assert storage.put("empty", []) == 0
    assert storage.size("empty") == 0
    assert storage.names("") == ["empty"]
    storage.read("empty", 0, memoryview(bytearray()))


def a_large_object_is_whole(storage: Storage) -> None:
    rng = random.Random(7)
    data = rng.randbytes(LARGE + 12_345)
    cuts = sorted(rng.randrange(len(data)) for _ in range(40))
    parts = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    assert storage.put("large", parts) == len(data)
    assert content(storage, "large") == data
    tail = bytearray(5000)
    storage.read("large", len(data) - 5000, memoryview(tail))
    assert tail == data[-5000:]


def a_part_may_be_reused(storage: Storage) -> None:
    def parts() -> Iterator[memoryview]:
        memory = bytearray(3)
        for i in range(50):
            memory[:] = bytes([i, i, i])
            yield memoryview(memory)

    storage.put("reused", parts())
    assert content(storage, "reused") == bytes(i for i in range(50) for _ in range(3))


def names_are_listed_by_folder(storage: Storage) -> None:
    for name in ("b/2", "b/10", "a/1", "c", "b/sub/3"):
        storage.put(name, [b"x"])
    assert storage.names("") == ["a/1", "b/10", "b/2", "b/sub/3", "c"]
    assert storage.names("b/") == ["b/10", "b/2", "b/sub/3"]
    assert storage.names("none/") == []


def an_object_can_be_replaced_and_deleted(storage: Storage) -> None:
    storage.put("x", [b"old, and longer"])
    storage.put("x", [b"new"])
    assert content(storage, "x") == b"new"
    storage.delete("x")
    storage.delete("x")
    assert storage.size("x") is None
    assert storage.names("") == []


def what_is_not_there_is_missing(storage: Storage) -> None:
    assert storage.size("nothing") is None
    _raises(Missing, lambda: storage.read("nothing", 0, memoryview(bytearray(1))))


def reading_past_the_end_is_damage(storage: Storage) -> None:
    storage.put("short", [b"abc"])
    _raises(Damaged, lambda: storage.read("short", 2, memoryview(bytearray(2))))


def a_failing_source_leaves_nothing(storage: Storage) -> None:
    def parts() -> Iterator[bytes]:
        yield b"x" * LARGE
        raise RuntimeError("the source has failed")

    storage.put("kept", [b"before"])
    for name in ("kept", "fresh"):
        _raises(RuntimeError, partial(storage.put, name, parts()))
    assert content(storage, "kept") == b"before"
    assert storage.names("") == ["kept"]


def bad_names_are_refused(storage: Storage) -> None:
    bad = ("", "/etc/passwd", "../up", "a//b", "a/", ".hidden", "a/../b", "sp ace", "\u00e9", "a\n")
    for name in bad:
        _raises(UserError, partial(storage.put, name, [b"x"]))


def many_threads_may_use_it(storage: Storage) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for i in range(8):
                data = bytes([number]) * (1000 + i)
                storage.put(f"t{number}/{i}", [data])
                assert content(storage, f"t{number}/{i}") == data
        except BaseException as error:  # noqa: BLE001 - told in the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(storage.names("")) == 32


def _raises(kind: type[BaseException], call: Callable[[], object]) -> None:
    try:
        call()
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")


STORAGE_CASES: dict[str, Callable[[Storage], None]] = {
    case.__name__: case
    for case in (
        what_is_put_can_be_read,
        empty_objects_are_objects,
        a_large_object_is_whole,
        a_part_may_be_reused,
        names_are_listed_by_folder,
        an_object_can_be_replaced_and_deleted,
        what_is_not_there_is_missing,
        reading_past_the_end_is_damage,
        a_failing_source_leaves_nothing,
        bad_names_are_refused,
        many_threads_may_use_it,
    )
}


# ---------------------------------------------------------------- crashes


class Crash(BaseException):
    """Stands for a loss of power: no code of the program runs any more."""


class CrashDisk(RealDisk):
    """Writes to a real folder and crashes; `crash_at` is the number of the call that crashes.

    Data that was not synced may be lost or partly there; so may a rename or removal since the last
    sync of its folder, which here `publish` does itself.
    """

    def __init__(self, crash_at: int, rng: random.Random) -> None:
        self.calls = 0
        self._crash_at = crash_at
        self._rng = rng
        self._open: dict[int, str] = {}
        self._unsynced: dict[str, int] = {}  # path -> bytes written

    def create(self, path: str) -> int:
        self._count()
        handle = super().create(path)
        self._open[handle] = path
        self._unsynced[path] = 0
        return handle

    def write(self, handle: int, data: memoryview, offset: int) -> None:
        self._count()
        super().write(handle, data, offset)
        self._unsynced[self._open[handle]] = offset + len(data)

    def close(self, handle: int, size: int, keep: bool) -> None:
        path = self._open.pop(handle)
        try:
            self._count()
        except Crash:
            os.close(handle)
            raise
        super().close(handle, size, keep)
        if keep:
            self._unsynced.pop(path, None)

    def publish(self, path: str, final: str) -> None:
        self._count()
        if self._crashes() and self._rng.random() < 0.5:
            super().publish(path, final)  # the rename had reached the disk
        self._count()
        super().publish(path, final)

    def remove(self, path: str) -> None:
        self._count()
        super().remove(path)

    def survive(self) -> None:
        """Lose, cut short or corrupt bytes that were never synced before the crash."""
        for path, size in self._unsynced.items():
            if not os.path.exists(path):
                continue
            match self._rng.randrange(3):
                case 0:
                    os.unlink(path)
                case 1:
                    os.truncate(path, self._rng.randint(0, size))
                case 2:
                    Path(path).write_bytes(self._rng.randbytes(min(size, 5000)))

    def _crashes(self) -> bool:
        return self.calls + 1 == self._crash_at

    def _count(self) -> None:
        self.calls += 1
        if self.calls >= self._crash_at:
            raise Crash(f"at call {self.calls}")
