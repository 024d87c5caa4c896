"""Storages keep their contract, also when the machine crashes between any two calls."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.engine.core.errors import Damaged, WorldError
from holdfast.engine.state.store.files import BUFFER_BYTES, FileStorage, RealDisk
from holdfast.engine.state.store.storage import Storage
from holdfast.lab.contracts.storages import STORAGE_CASES, Crash, CrashDisk, MemoryStorage, content

MAKERS: dict[str, Callable[[Path], Storage]] = {
    "memory": lambda path: MemoryStorage(),
    "files": lambda path: FileStorage(path / "store"),
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("case", STORAGE_CASES)
def test_the_contract(case: str, kind: str, tmp_path: Path) -> None:
    STORAGE_CASES[case](MAKERS[kind](tmp_path))


def test_a_file_system_without_direct_writes_will_do(tmp_path: Path) -> None:
    """Memory is one: /dev/shm refuses O_DIRECT."""
    folder = Path("/dev/shm") / f"holdfast-test-{os.getpid()}"
    try:
        for case in STORAGE_CASES.values():
            case(FileStorage(folder))
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_a_disk_that_stops_taking_odd_sizes_is_written_to_all_the_same(tmp_path: Path) -> None:
    class Picky(RealDisk):
        """Splits writes like a disk that is nearly full; the rest is then not aligned."""

        def write(self, handle: int, data: memoryview, offset: int) -> None:
            super().write(handle, data[:1000], offset)
            super().write(handle, data[1000:], offset + 1000)

    storage = FileStorage(tmp_path, Picky())
    data = random.Random(1).randbytes(3 * BUFFER_BYTES + 17)
    storage.put("odd", [data])
    assert content(storage, "odd") == data


def test_nothing_is_left_unfinished_and_what_others_left_is_swept(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path)
    storage.put("a", [b"x"])
    assert list((tmp_path / ".unfinished").iterdir()) == []
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    home, pid, *rest = unfinished(tmp_path)
    left = tmp_path / ".unfinished"
    names = ["-".join([home, str(n), *rest]) for n in (child.pid, pid)]
    names += [f"elsewhere-{n}-a-0-packs+000000000009-{n}{n}-0" for n in (1, 2)]
    for name in names:
        (left / name).write_bytes(b"half")
        os.utime(left / name, (0, 0))  # from any clock: times do not count
    assert storage.names("") == ["a"]
    FileStorage(tmp_path).put("b", [b"y"])
    assert sorted(path.name for path in left.iterdir()) == sorted(names[1:])
    storage.sweep(storage.unfinished(), {"11"})  # the token of a save under way
    assert sorted(path.name for path in left.iterdir()) == sorted(names[1:3])


def unfinished(root: Path) -> list[str]:
    """Return the parts of the name under which a storage writes."""

    def parts() -> Iterator[bytes]:
        (path,) = (root / ".unfinished").iterdir()
        found.extend(path.name.split("-"))
        yield b"x"

    found: list[str] = []
    FileStorage(root).put("c", parts())
    FileStorage(root).delete("c")
    return found


def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "manifests").symlink_to(tmp_path / "manifests")
    with pytest.raises(WorldError, match=r"cannot list .*manifests"):
        FileStorage(tmp_path).names("manifests/")


def test_a_file_that_cannot_be_written_is_reported_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file in the way")
    with pytest.raises(WorldError, match=r"cannot write .*store/a: Not a directory"):
        FileStorage(tmp_path / "store").put("a", [b"x"])


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk takes root")
def test_a_full_disk_is_said_and_leaves_what_was_there(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        storage = FileStorage(tmp_path)
        storage.put("small", [b"x" * 1000])
        with pytest.raises(WorldError, match="No space left on device"):
            storage.put("large", [b"y" * (6 << 20)])
        assert storage.names("") == ["small"]
        storage.put("fits", [b"z" * (2 << 20)])
        assert content(storage, "small") == b"x" * 1000
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_after_a_crash_at_any_call_an_object_is_whole_or_not_there(tmp_path: Path) -> None:
    old, new = b"old" * 1000, random.Random(2).randbytes(BUFFER_BYTES + 5000)
    crashes = 0
    for crash_at in range(1, 60):
        for seed in range(4):
            folder = tmp_path / f"{crash_at}-{seed}"
            FileStorage(folder).put("deep/x", [old])
            disk = CrashDisk(crash_at, random.Random(seed))
            try:
                FileStorage(folder, disk).put("deep/x", [new])
                FileStorage(folder, disk).put("other/y", [new])
            except Crash:
                crashes += 1
                disk.survive()
            storage = FileStorage(folder)
            assert content(storage, "deep/x") in (old, new)
            for name in storage.names("other/"):
                assert content(storage, name) == new
            shutil.rmtree(folder)
        if not crashes:
            pytest.fail("no crash ever struck")
        if disk.calls < crash_at:
            return
    pytest.fail("the calls never end")


def test_a_storage_that_forgets_to_sync_is_caught(tmp_path: Path) -> None:
    """The crash test can fail: publishing before the data is durable loses it."""

    class Hasty(CrashDisk):
        def close(self, handle: int, size: int, keep: bool) -> None:
            os.ftruncate(handle, size)
            RealDisk.close(self, handle, size, keep=False)
            self._forgotten = self._open.pop(handle)

        def publish(self, path: str, final: str) -> None:
            self._unsynced[final] = self._unsynced.pop(path)
            super().publish(path, final)

    damaged = 0
    for seed in range(12):
        folder = tmp_path / str(seed)
        disk = Hasty(5, random.Random(seed))
        storage = FileStorage(folder, disk)
        with contextlib.suppress(Crash):
            for i in range(9):
                storage.put(f"x{i}", [b"whole" * 1000])
        disk.survive()
        for name in FileStorage(folder).names(""):
            try:
                damaged += content(FileStorage(folder), name) != b"whole" * 1000
            except Damaged:
                damaged += 1
    assert damaged
