"""Bad records in jobs of threads: read again, from a mirror, or left out by all alike."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.engine.core.errors import UserError
from holdfast.engine.core.job_spec import with_settings
from holdfast.engine.core.types import WorkerId
from holdfast.engine.records.ledger_audit import verify
from holdfast.engine.state.store.data_index import write_index
from holdfast.engine.train.data.batch_loading import BatchSource
from holdfast.engine.train.data.batch_tasks import LoadOptions
from holdfast.engine.train.data.quarantine import Quarantine, encode_bad
from holdfast.engine.train.data.sample_digest import index_samples
from holdfast.engine.train.data.sampling import SamplePlan, plan_of
from holdfast.engine.train.data.verified_samples import Checks
from holdfast.engine.train.job import Job
from loop_kit import DEATHS, dataset, digest, protected, step_once
from support import SPEC
from thread_cluster import ThreadCluster, ThreadWorker

RECORDS = 70
STEPS = 8  # steps of 12 samples: an epoch takes six
LEDGER = "ledger of a run"


class Decaying:
    """Is a copy of the data with bad records; `once`: bad only when they are first read.

    `ways`: the damage of each record: a "flip" of a bit, or an "error" that reading it raises.
    """

    def __init__(self, ways: Mapping[int, str], *, once: bool = False) -> None:
        self.sound = dataset(RECORDS)
        self.ways = dict(ways)
        self.once = once
        self.read: list[int] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, record: int) -> Any:
        with self._lock:
            self.read.append(record)
            way = self.ways.pop(record, "") if self.once else self.ways.get(record, "")
        x, y = self.sound[record]
        if way == "error":
            raise OSError(5, "Input/output error")
        if way == "flip":
            bits = x.clone().view(torch.int32)
            bits[3] ^= 1 << 7
            return bits.view(torch.float32), y
        return x, y


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("index") / "data.index"
    write_index(index_samples(dataset(RECORDS)), path)
    return path


Copy = Callable[[ThreadWorker], Any]  # the copy of the data that a worker reads


def train(
    copy: Copy,
    index: Path | None,
    most: int = 9,
    rounds: int = 1,
    **options: Any,
) -> Callable[[Job, ThreadWorker], Any]:
    """Return a script that trains and returns the model's digest, and records left out by step."""

    def script(job: Job, me: ThreadWorker) -> Any:
        model, optimizer = protected(job)
        data = job.batches(copy(me), 3, index=index, **options)
        for step in job.steps(data, until=STEPS):
            for _ in range(rounds):
                step_once(step, model, optimizer)
        return digest(model), dict(job._progress.places.quarantined.get(1, {}))

    return script


def run(
    script: Callable[[Job, ThreadWorker], Any],
    workers: int,
    kill_at: Mapping[int, int] | None = None,
    most: int = 9,
    run_dir: Path | None = None,
    seen: dict[int, int] | None = None,
) -> list[Any]:
    """Run a job of threads; return what the script returned on each worker at the end."""
    found: dict[WorkerId, Any] = {}

    def whole(job: Job, me: ThreadWorker) -> None:
        if run_dir is not None:  # the ledger is kept there
            object.__setattr__(job._environment, "run_dir", run_dir)
        returned = script(job, me)
        job._loops.end_open_loop()
        found[me.worker] = returned
        if seen is not None:
            seen[me.worker] = me.exchanges

    values = {"workers.nproc": workers, "workers.virtual": 4, "data.bad_samples_max": most}
    at = {WorkerId(worker): number for worker, number in (kill_at or {}).items()}
    cluster = ThreadCluster(with_settings(SPEC, values), whole, at)
    outcome = cluster.run()
    assert not cluster.errors, "; ".join(map(str, cluster.errors))
    assert outcome == ""
    return list(found.values())


BAD = {7: "flip", 50: "error", 69: "flip", 31: "error"}  # 50 would stand in for 7
QUARANTINED = {"on_error": "quarantine"}


@pytest.mark.slow
def test_sound_data_give_the_same_bits_with_and_without_an_index(index: Path) -> None:
    (plain,) = run(train(lambda me: dataset(RECORDS), None), 1)
    for workers in (1, 2):
        for options in ({}, QUARANTINED):
            script = train(lambda me: dataset(RECORDS), index, **options)
            assert run(script, workers) == [plain] * workers


@pytest.mark.parametrize("way", ["flip", "error"])
def test_a_record_that_is_bad_once_is_read_again(way: str, index: Path) -> None:
    (plain,) = run(train(lambda me: dataset(RECORDS), None), 1)
    copies = {}

    def copy(me: ThreadWorker) -> Any:
        return copies.setdefault(me.worker, Decaying({5: way, 40: way}, once=True))

    assert run(train(copy, index, **QUARANTINED), 2) == [plain] * 2
    read = [record for copy in copies.values() for record in copy.read]
    assert read.count(5) > 1
    assert read.count(40) > 1


class Flapping(Decaying):
    """A copy of the data whose record that is read first is unreadable in a task's second run.

    A worker's first task is computed twice; the second of these runs counts.
    """

    def __getitem__(self, record: int) -> Any:
        count = self.read.count(self.read[0]) if self.read else 0
        self.ways = {record: "error"} if self.read[:1] == [record] and count in (1, 2) else {}
        return super().__getitem__(record)


def test_a_record_that_comes_and_goes_between_two_runs_of_a_task() -> None:
    """The run that counts decides, and neither the script nor the worker is blamed."""
    copies: list[Flapping] = []

    def copy(me: ThreadWorker) -> Flapping:
        copies.append(Flapping({}))
        return copies[-1]

    ((_, quarantined),) = run(train(copy, None, **QUARANTINED), 1)
    assert quarantined == {copies[0].read[0]: 0}
    assert copies[0].read.count(copies[0].read[0]) == 3


@pytest.mark.parametrize("options", [pytest.param({}, marks=pytest.mark.slow), QUARANTINED])
def test_a_mirror_heals(options: dict[str, Any], index: Path) -> None:
    (plain,) = run(train(lambda me: dataset(RECORDS), None), 1)
    mirrors = [Decaying({7: "flip", 31: "flip"}), dataset(RECORDS)]
    script = train(lambda me: Decaying(BAD), index, mirrors=mirrors, **options)
    assert run(script, 2) == [plain] * 2


@pytest.mark.parametrize(
    "rounds", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
def test_bad_records_are_left_out_by_all_alike(rounds: int, index: Path, tmp_path: Path) -> None:
    """The records are bad on all copies; the result does not depend on the workers."""
    script = train(lambda me: Decaying(BAD), index, rounds=rounds, **QUARANTINED)
    (expected,) = run(script, 1)
    assert set(expected[1]) == set(BAD)
    assert expected != run(train(lambda me: dataset(RECORDS), None, rounds=rounds), 1)[0]
    seen: dict[int, int] = {}
    for workers in (2, 4):
        assert run(script, workers, run_dir=tmp_path / str(workers), seen=seen) == (
            [expected] * workers
        )
        report = verify(tmp_path / str(workers), plan_of)
        assert report.ok, report.findings
        assert report.quarantined == len(BAD)
        assert report.replaced >= len(BAD)
    exchanges = max(seen.values())
    for i in range(DEATHS):
        at = {i % 2: 3 + i * (exchanges - 5) // (DEATHS - 1)}
        folder = tmp_path / f"death-{i}"
        assert set(map(repr, run(script, 2, at, run_dir=folder))) == {repr(expected)}
        report = verify(folder, plan_of)
        assert report.ok, report.findings


def only_on(worker: int) -> Copy:
    """Return a way to read data that are bad on one worker, until it has died."""
    return lambda me: Decaying(BAD if (me.worker, me.incarnation) == (worker, 1) else {})


@pytest.mark.slow
def test_a_record_that_is_bad_on_one_worker_is_left_out_by_all(index: Path, tmp_path: Path) -> None:
    """The ledger proves it, also if the worker dies before or after it has reported the record.

    A record that only the dead worker could not read stays out for all. If the worker had not
    reported it when the step was committed, the other workers read it in that step.
    """
    script = train(only_on(1), index, **QUARANTINED)
    seen: dict[int, int] = {}
    first, second = run(script, 2, seen=seen)
    assert first == second
    assert first[1]
    numbers = set()
    for death in range(3, max(seen.values()), 5):
        folder = tmp_path / str(death)
        found = run(script, 2, {1: death}, run_dir=folder)
        assert len(set(map(repr, found))) == 1
        report = verify(folder, plan_of)
        assert report.ok, (death, report.findings)
        assert report.quarantined == len(found[0][1])
        numbers.add(report.quarantined)
    assert len(numbers) > 1  # more are left out the later it dies


def stops(script: Callable[[Job, ThreadWorker], Any], workers: int, most: int) -> str:
    """Return the outcome of a job that meets too many bad records."""
    with pytest.raises(AssertionError) as error:
        run(script, workers, most=most)
    return str(error.value)


@pytest.mark.slow
def test_a_budget_ends_the_job(index: Path) -> None:
    script = train(lambda me: Decaying(BAD), index, **QUARANTINED)
    for workers in (1, 2):
        assert "the job may leave out 3: restore the data" in stops(script, workers, 3)
        assert "the job may leave out 0: restore the data" in stops(script, workers, 0)
        assert set(run(script, workers, most=4)[0][1]) == set(BAD)


def test_without_a_quarantine_the_first_bad_record_ends_the_job(index: Path) -> None:
    flip = train(lambda me: Decaying({7: "flip"}), index)
    assert "record 7 of Decaying differs from its index" in stops(flip, 2, 9)
    error = train(lambda me: Decaying({8: "error"}), index)
    assert "Input/output error" in stops(error, 2, 9)


@pytest.mark.slow
def test_errors_are_left_out_without_an_index() -> None:
    script = train(lambda me: Decaying({8: "error", 20: "error"}), None, **QUARANTINED)
    (expected,) = run(script, 1)
    assert set(expected[1]) == {8, 20}
    assert run(script, 3) == [expected] * 3


@pytest.mark.slow
def test_data_workers_verify_what_they_read(index: Path) -> None:
    (inline,) = run(train(lambda me: Decaying(BAD), index, **QUARANTINED), 1)
    script = train(lambda me: Decaying(BAD), index, num_workers=2, **QUARANTINED)
    assert run(script, 1) == [inline]
    (plain,) = run(train(lambda me: dataset(RECORDS), None), 1)
    mirror = [dataset(RECORDS)]
    assert run(train(lambda me: Decaying(BAD), index, num_workers=1, mirrors=mirror), 1) == [plain]


@pytest.mark.slow
def test_batches_loaded_ahead_leave_out_records_quarantined_since() -> None:
    """The record is readable on this worker; another worker has reported it."""
    plan = SamplePlan(length=RECORDS, batch_size=3, virtual_ranks=4, seed=1)
    quarantine = Quarantine(1, RECORDS, {}, most=9)
    source = BatchSource(
        dataset(RECORDS), plan, LoadOptions(num_workers=1), Checks(quarantines=True), quarantine
    )
    source.follow([0], 0, STEPS)
    source.batch(0, 0)
    bad = int(plan.indices(1, 0)[0])  # it has been sent to the data worker by now
    quarantine.take_reports({3: encode_bad({bad: "why"})})
    quarantine.settle(0)
    x, _ = source.batch(1, 0)
    used, _ = plan.replace_bad(plan.indices(1, 0), {bad})
    assert torch.equal(x, dataset(RECORDS)[used.tolist()][0])
    assert source.usage_of(1, 0) == (3, plan.digest_of(used))
    assert source.stats.discarded == 1
    source.close()


def test_an_index_that_does_not_fit_the_dataset_is_refused(index: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.index"
    write_index(index_samples(dataset(RECORDS + 1)), other)
    shuffled = tmp_path / "shuffled.index"
    turned = torch.utils.data.Subset(dataset(RECORDS), [*range(1, RECORDS), 0])
    write_index(index_samples(turned), shuffled)

    def script(job: Job, me: ThreadWorker) -> Any:
        protected(job)
        for found, words in (
            (other, "71 samples but TensorDataset has 70"),
            (shuffled, "all differ from its index"),
            (tmp_path / "none", "cannot be read"),
        ):
            with pytest.raises(UserError, match=words):
                job.batches(dataset(RECORDS), 3, index=found)
        with pytest.raises(UserError, match="'ignore'"):
            job.batches(dataset(RECORDS), 3, on_error="ignore")
        return True

    assert run(script, 1) == [True]
