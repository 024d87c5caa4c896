"""Journals: the contract that all keep, damage that is always noticed, the order of effects."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import pytest

from holdfast.engine.core.errors import Damaged, Deposed, UserError
from holdfast.engine.core.job_record import JobRecord, Slot
from holdfast.engine.core.types import AgentId, Incarnation, ViewNumber, WorkerId
from holdfast.engine.core.views import Member, View
from holdfast.engine.runtime.leadership.election import (
    EtcdJournal,
    Leadership,
    open_election,
    parse_election,
)
from holdfast.engine.runtime.leadership.etcd import put
from holdfast.engine.runtime.leadership.journal import (
    COUNTED_MAX,
    FileJournal,
    Journal,
    MemoryJournal,
    MemoryStore,
    PatientJournal,
    read_record,
    seal,
    unseal,
)
from labs.etcd_cluster import EtcdCluster
from support import WAIT_S, start_etcd

TTL_S = 60  # the time of leases, which are not renewed here


def record(term: int, release_loop: int = 0) -> JobRecord:
    agent, worker, one = AgentId("node0"), WorkerId(0), Incarnation(1)
    member = Member(worker=worker, incarnation=one, agent=agent)
    view = View(
        number=ViewNumber(3), members=(member,), owners=(worker,), resume_step=7, leader=worker
    )
    slot = Slot(worker=worker, agent=agent, incarnation=one)
    return JobRecord(term=term, view=view, slots=(slot,), release_loop=release_loop)


# ---------------------------------------------------------------- the contract


class Bench(Protocol):
    """Gives the contract access to one kind of journal and to its stored bytes."""

    async def open(self) -> Journal:
        """Open one more coordinator's journal."""
        ...

    async def end(self, journal: Journal) -> None:
        """End a journal's coordinator."""
        ...

    async def usurp(self) -> Journal:
        """Open one more coordinator's journal, while the last one believes that it is alone."""
        ...

    async def change(self, how: Callable[[bytes], bytes]) -> None:
        """Damage the stored bytes."""
        ...


class FileBench:
    def __init__(self, path: Path) -> None:
        self.path = path / "journal"

    async def open(self) -> Journal:
        return FileJournal(self.path)

    async def end(self, journal: Journal) -> None:
        journal.close()

    async def usurp(self) -> Journal:
        return FileJournal(self.path)

    async def change(self, how: Callable[[bytes], bytes]) -> None:
        self.path.write_bytes(how(self.path.read_bytes()))


class MemoryBench:
    def __init__(self) -> None:
        self.store = MemoryStore()

    async def open(self) -> Journal:
        return MemoryJournal(self.store)

    async def end(self, journal: Journal) -> None:
        journal.close()

    async def usurp(self) -> Journal:
        return MemoryJournal(self.store)

    async def change(self, how: Callable[[bytes], bytes]) -> None:
        self.store.data = how(self.store.data or b"")


class EtcdBench:
    def __init__(self, url: str) -> None:
        self.url = parse_election(url)
        # A clock that stands still: no journal learns from it that it was deposed.
        self.election = open_election(url, now=lambda: 0.0)
        self.leaderships: list[Leadership] = []

    async def open(self) -> Journal:
        self.leaderships.append(await self.election.campaign("127.0.0.1", 1, print))
        return EtcdJournal(self.leaderships[-1])

    async def end(self, journal: Journal) -> None:
        journal.close()
        await self.leaderships[-1].resign()

    async def usurp(self) -> Journal:
        leadership = self.leaderships[-1]
        await leadership.etcd.revoke(leadership.held.lease, WAIT_S)
        return await self.open()

    async def change(self, how: Callable[[bytes], bytes]) -> None:
        etcd, key = self.leaderships[-1].etcd, self.url.key("record")
        found = await etcd.read(key, WAIT_S)
        assert found is not None
        await etcd.transact([], [put(key, how(found.value))], [], WAIT_S)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with start_etcd(tmp_path_factory.mktemp("etcd")) as found:
        yield found


@pytest.fixture(params=["file", "memory", "etcd"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Bench:
    if request.param == "file":
        return FileBench(tmp_path)
    if request.param == "memory":
        return MemoryBench()
    cluster: EtcdCluster = request.getfixturevalue("cluster")
    return EtcdBench(cluster.url(tmp_path.name, TTL_S))


def test_the_first_coordinator_finds_nothing(bench: Bench) -> None:
    async def scenario() -> None:
        loaded = await (await bench.open()).load()
        assert (loaded.term, loaded.record, loaded.damage) == (1, None, "")

    asyncio.run(scenario())


def test_the_newest_record_is_found_by_the_next(bench: Bench) -> None:
    async def scenario() -> None:
        first = await bench.open()
        await first.load()
        for release_loop in range(3):
            await first.save(record(1, release_loop))
        await bench.end(first)
        loaded = await (await bench.open()).load()
        assert (loaded.term, loaded.record, loaded.damage) == (2, record(1, 2), "")

    asyncio.run(scenario())


def test_every_coordinator_has_a_term_of_its_own(bench: Bench) -> None:
    async def scenario() -> None:
        terms = []
        for _ in range(4):
            journal = await bench.open()
            terms.append((await journal.load()).term)
            await bench.end(journal)  # it never saved anything
        assert terms == [1, 2, 3, 4]

    asyncio.run(scenario())


def test_a_coordinator_whose_term_is_over_cannot_save(bench: Bench) -> None:
    async def scenario() -> None:
        journal = await bench.open()
        await journal.load()
        await bench.end(journal)
        with pytest.raises(Deposed):
            await journal.save(record(1))
        assert (await (await bench.open()).load()).record is None

    asyncio.run(scenario())


def test_of_two_coordinators_only_one_can_save(bench: Bench) -> None:
    async def scenario() -> None:
        first = await bench.open()
        await first.load()
        await first.save(record(1, 1))
        second = await bench.usurp()
        try:
            loaded = await second.load()
        except UserError:  # a second one is not let in at all
            await first.save(record(1, 2))
            return
        assert loaded.record == record(1, 1)
        with pytest.raises(Deposed):
            await first.save(record(1, 2))
        await second.save(record(2, 3))
        with pytest.raises(Deposed):
            await first.save(record(1, 4))
        await bench.end(second)
        assert (await (await bench.open()).load()).record == record(2, 3)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (lambda data: b"", "empty"),
        (lambda data: data[:-5], "cut short"),
        (lambda data: data + b"more", "too many"),
        (lambda data: b"garbage" * 9, "begins with"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "digest"),
    ],
    ids=["empty", "short", "long", "garbage", "flipped"],
)
def test_damage_is_named_until_there_is_a_new_record(
    bench: Bench, how: Callable[[bytes], bytes], words: str
) -> None:
    async def scenario() -> None:
        journal = await bench.open()
        await journal.load()
        await journal.save(record(1))
        await bench.change(how)
        for term in (2, 3):  # and the next one, if this one dies before it has saved
            await bench.end(journal)
            journal = await bench.open()
            loaded = await journal.load()
            assert (loaded.term, loaded.record) == (term, None)
            assert "journal" in loaded.damage
            if term == 2:
                assert words in loaded.damage
        await journal.save(record(3))
        await bench.end(journal)
        loaded = await (await bench.open()).load()
        assert (loaded.term, loaded.record, loaded.damage) == (4, record(3), "")

    asyncio.run(scenario())


# ---------------------------------------------------------------- bytes


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    data, path = seal(record(1)), tmp_path / "journal"
    assert unseal(data) == record(1)
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(Damaged, match=f"{path} is damaged: it is (empty|cut short)"):
            read_record(path)


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    data, path = seal(record(1)), tmp_path / "journal"
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        with pytest.raises(Damaged, match=f"{path} is damaged: "):
            read_record(path)


def test_a_record_of_10000_workers_fits_into_etcd() -> None:
    agents = [AgentId(f"node{i // 8}") for i in range(10_000)]
    members = tuple(
        Member(worker=WorkerId(i), incarnation=Incarnation(1 + i % 3), agent=agent)
        for i, agent in enumerate(agents)
    )
    view = View(
        number=ViewNumber(1),
        members=members,
        owners=tuple(m.worker for m in members),
        resume_step=0,
        leader=WorkerId(0),
    )
    slots = tuple(Slot(worker=m.worker, agent=m.agent, incarnation=m.incarnation) for m in members)
    assert len(seal(JobRecord(term=1, view=view, slots=slots))) < 400_000


# ---------------------------------------------------------------- in a file


def load(path: Path, now: float = 0.0) -> tuple[int, JobRecord | None, str]:
    """Load the journal as one more coordinator would."""
    journal = FileJournal(path, clock=lambda: now)
    try:
        loaded = asyncio.run(journal.load())
        return loaded.term, loaded.record, loaded.damage
    finally:
        journal.close()


def save(path: Path, release_loop: int = 0) -> None:
    async def scenario() -> None:
        journal = FileJournal(path)
        loaded = await journal.load()
        await journal.save(record(loaded.term, release_loop))
        journal.close()

    asyncio.run(scenario())


def test_damaged_files_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    for number in (1, 2):
        save(path)
        path.write_bytes(b"garbage %d" % number)
        _, found, damage = load(path)
        assert found is None
        assert damage.endswith(f"it is kept as journal.damaged-{number}")
        assert not path.exists()
    kept = {p.name: p.read_bytes() for p in tmp_path.glob("journal.damaged-*")}
    assert kept == {"journal.damaged-1": b"garbage 1", "journal.damaged-2": b"garbage 2"}


def test_a_journal_that_has_vanished_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    save(path)
    path.unlink()
    for term in (2, 3):
        assert load(path) == (
            term,
            None,
            f"the journal {path} is gone, though coordinators have written to it",
        )


def test_terms_grow_whatever_is_lost(tmp_path: Path) -> None:
    path, lock = tmp_path / "journal", tmp_path / "journal.lock"
    save(path)
    lock.write_bytes(b"nonsense")
    assert load(path) == (2, record(1), "")  # the record counts too
    path.write_bytes(b"")
    assert load(path)[0] == 3  # as does the lock
    save(path)
    path.write_bytes(b"garbage")
    lock.write_bytes(b"term 12 recorded 0123456789abcdef\n")
    term, found, damage = load(path, now=1.8e9)
    assert (term, found) == (COUNTED_MAX + 1_800_000_001, None)
    assert "garbage" in damage
    assert load(path)[0] == term + 1
    path.unlink(missing_ok=True)
    lock.write_bytes(b"nonsense")
    term, found, damage = load(path, now=1.9e9)
    assert (term, found) == (COUNTED_MAX + 1_900_000_001, None)
    assert str(lock) in damage
    lock.write_bytes(b"nonsense")
    assert load(path, now=0.0)[0] > 2**31  # above all counted terms, though the clock is at 1970


KILLED_WHILE_SAVING = """
import asyncio, os, signal, sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from holdfast.engine.runtime.leadership import journal
from test_journal import record

calls = ["open", "write", "pwrite", "fsync", "replace", "close"]
path = Path(sys.argv[1])

async def save(number, die_at):
    kept = journal.FileJournal(path)
    loaded = await kept.load()
    count = 0
    def dying(name):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            if count == die_at:
                if name == "write":
                    real[name](args[0], args[1][:20])
                os.kill(os.getpid(), signal.SIGKILL)
            return real[name](*args, **kwargs)
        return call
    real = {name: getattr(os, name) for name in calls}
    for name in calls:
        setattr(os, name, dying(name))
    kept._save(journal.seal(record(loaded.term, number)))
    os._exit(7)

number = 0
for die_at in range(1, 100):
    number += 1
    child = os.fork()
    if not child:
        asyncio.run(save(number, die_at))
    status = os.waitpid(child, 0)[1]
    kept = journal.FileJournal(path)
    loaded = asyncio.run(kept.load())
    kept.close()
    found = -1 if loaded.record is None else loaded.record.release_loop
    print(die_at, os.waitstatus_to_exitcode(status), number, found, loaded.damage, flush=True)
    if os.waitstatus_to_exitcode(status) == 7:
        break
"""


def test_killed_while_saving_leaves_the_old_or_the_new_record(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    save(path, release_loop=0)
    command = [sys.executable, "-c", KILLED_WHILE_SAVING, str(path), *sys.path]
    text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=WAIT_S)
    old, changes, kills = 0, 0, 0
    for line in text.stdout.splitlines():
        _, code, saved, found, *damage = line.split()
        assert damage == [], line
        assert int(found) in (old, int(saved)), line
        kills += int(code) == -signal.SIGKILL
        changes += int(found) == int(saved)
        old = int(found)
    assert code == "7", "the last save was not killed"
    assert kills >= 7, text.stdout  # open, write, fsync, close, replace, and those of the directory
    assert 2 <= changes < kills, text.stdout


# ---------------------------------------------------------------- a full disk


class FullJournal(MemoryJournal):
    """Has no room for the next records."""

    left = 0

    async def save(self, record: JobRecord) -> None:
        self.left -= 1
        if self.left >= 0:
            raise UserError("cannot write journal: No space left on device")
        await super().save(record)


def test_a_record_without_room_is_saved_again_until_there_is_some() -> None:
    async def scenario() -> None:
        full, said = FullJournal(MemoryStore()), list[str]()
        patient = PatientJournal(full, 60.0, said.append, again_s=0.0)
        term = (await patient.load()).term
        full.left = 3
        await patient.save(record(term))
        assert unseal(full._store.data or b"") == record(term)
        assert said == [
            "cannot write journal: No space left on device: all changes wait, for 60 s at most",
            "the journal can be written again",
        ]

    asyncio.run(scenario())


@pytest.mark.parametrize(("patience_s", "view"), [(0.0, True), (60.0, False)])
def test_a_job_that_has_waited_long_enough_or_not_begun_ends(patience_s: float, view: bool) -> None:
    async def scenario() -> None:
        full = FullJournal(MemoryStore())
        patient = PatientJournal(full, patience_s, lambda line: None, again_s=0.0)
        term = (await patient.load()).term
        full.left = 3
        found = record(term) if view else JobRecord(term=term)
        with pytest.raises(UserError, match="No space left"):
            await patient.save(found)
        assert full.left == 2

    asyncio.run(scenario())


def test_an_older_record_does_not_hold_up_the_end_of_a_job() -> None:
    async def scenario() -> None:
        full = FullJournal(MemoryStore())
        is_over = iter((False, False, True))
        patient = PatientJournal(full, 60.0, lambda line: None, lambda: next(is_over), again_s=0.0)
        term = (await patient.load()).term
        full.left = 9
        with pytest.raises(UserError, match="No space left"):
            await patient.save(record(term))
        assert full.left == 6

    asyncio.run(scenario())
