"""Streams whose readers report their place: jobs of threads, with well-known packages."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from holdfast.engine.core.errors import UserError
from holdfast.engine.train.data import streams
from holdfast.engine.train.data.read_plans import StreamPlan
from holdfast.engine.train.data.streams import ranks_watched
from holdfast.engine.train.job import Job, Stream
from loop_kit import digest, everywhere, protected, results, step_once
from thread_cluster import ThreadWorker

STEPS, V, LENGTHS = 11, 4, (7, 60, 3, 31)


def sample(shard: int, i: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(6, generator=torch.Generator().manual_seed(100 * shard + i))
    return x, x[:2].sin()


class Resumable:
    """Reads a shard, and can continue from another one's place."""

    def __init__(self, shard: int) -> None:
        self.shard, self.at, self.epoch = shard, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while self.at < LENGTHS[self.shard]:
            self.at += 1
            yield sample(self.shard, self.at - 1 + 1000 * self.epoch)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.epoch = state["at"], state["epoch"]


class Plain(Resumable):
    state_dict = None  # type: ignore[assignment]


class OfTensors(Resumable):
    def state_dict(self) -> dict[str, Any]:
        return {"at": torch.tensor(self.at)}


class Lying(Resumable):
    """Continues at another place, like a shuffled source that fills its buffer again."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"] + 1


class Failing(Resumable):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("no such state")


class Large(Resumable):
    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "more": bytes(streams.STATE_BYTES_MAX)}


def opened(kind: type[Resumable], made: list[Resumable]) -> Any:
    def make(shard: int, shards: int) -> Resumable:
        made.append(kind(shard))
        return made[-1]

    return make


def trained(job: Job, data: Stream, steps: int = STEPS) -> Any:
    model, optimizer = protected(job)
    loss = 0.0
    for step in job.steps(data, until=steps):
        step_once(step, model, optimizer)
        loss = step.loss
    return digest(model), loss, dict(job._progress.places.streams)


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "TELL_STEPS", 2)


@pytest.mark.slow
def test_states_change_nothing_but_what_is_read_again() -> None:
    read: list[list[Resumable]] = []
    said: list[str] = []

    def script(job: Job, me: ThreadWorker, kind: type[Resumable] = Resumable) -> Any:
        read.append([])
        data = job.stream(opened(kind, read[-1]), 3)
        data.log = said.append
        return trained(job, data)

    found = everywhere(script)
    assert results(lambda job, me: script(job, me, Plain), 1) == [found]
    goes = [tuple(map(int, text.split()[6:9:2])) for text in said if "is read from" in text]
    assert goes, "no shard has moved"
    assert any(start > 0 for start, _ in goes)
    assert all(end - start <= 2 * 3 for start, end in goes)  # two steps, at most


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        pytest.param(OfTensors, "torch.Tensor", marks=pytest.mark.slow),
        pytest.param(Lying, "gives other samples", marks=pytest.mark.slow),
        (Failing, "KeyError: 'no such state'"),
        (Large, "bytes, more than"),
    ],
)
def test_a_state_that_cannot_be_used_is_told_once(kind: type[Resumable], words: str) -> None:
    said: list[str] = []

    def script(job: Job, me: ThreadWorker, kind: type[Resumable] = kind) -> Any:
        data = job.stream(opened(kind, []), 3)
        data.log = said.append
        return trained(job, data), job._progress.places.readers

    ((mine, readers),) = results(script, 1)
    ((plain, _),) = results(lambda job, me: script(job, me, Plain), 1)
    assert mine == plain
    assert readers == {0: {}}
    (text,) = said
    assert "is read from its beginning" in text
    assert words in text


@pytest.mark.slow
def test_states_are_told_only_where_there_are_any() -> None:
    for kind, exchanges, readers in ((Plain, 0, 8), (Resumable, 2, 15), (Lying, 2, 9)):
        made: list[Resumable] = []

        def script(
            job: Job,
            me: ThreadWorker,
            kind: type[Resumable] = kind,
            made: list[Resumable] = made,
        ) -> Any:
            trained(job, job.stream(opened(kind, made), 3), 4)
            return job._loops.script.steps.at  # type: ignore[union-attr]

        assert results(script, 1) == [4 + exchanges]
        assert len(made) == readers  # 8 to read, 4 and 3 to try states
        assert results(script, 2) == [4 + exchanges] * 2


@pytest.mark.parametrize("told", [(0, 3), (1, 6), (1, 3), (1, 0)])
def test_a_state_of_another_place_is_not_used(told: tuple[int, int]) -> None:
    """The state is of sample 3 of epoch 1, which began in step 3."""
    plan = StreamPlan(batch_size=3, virtual_ranks=1, seed=0)
    state = msgspec.msgpack.encode({"at": told[1], "epoch": told[0]})
    made: list[Resumable] = []
    stream = Stream(
        opened(Resumable, made), list, plan, [(1, 3, 3)], {0: (*told, state)}, lambda text: None
    )
    expected = [sample(0, 1000 + i) for i in (3, 4, 5)]
    assert streams.are_alike(stream.source(plan).batch(4, 0), expected)
    assert len(made) == 1


def test_reader_states_are_alike_if_all_their_values_are() -> None:
    one = {"a": [1, np.ones(2)], "b": (torch.ones(2), "x")}
    assert streams.are_alike(one, {"a": [1, np.ones(2)], "b": (torch.ones(2), "x")})
    for other in (
        {"a": [1, np.ones(3)], "b": (torch.ones(2), "x")},
        {"a": [1, np.ones(2)], "b": (torch.zeros(2), "x")},
        {"a": [1, np.ones(2)], "b": (torch.ones(2), "y")},
        {"a": [1, np.ones(2)]},
        {"a": [1, np.ones(2), 2], "b": (torch.ones(2), "x")},
        {"a": [1, np.ones(2, np.float32)], "b": (torch.ones(2), "x")},
        [one],
    ):
        assert not streams.are_alike(one, other)
    assert streams.decode_state(b"") is streams.decode_state(b"\x93") is None


DATA = "torch.utils.data"


def looking_at_the_rank(shard: int, shards: int) -> Iterator[Any]:

    assert get_worker_info() is None
    rank = int(os.environ.get("RANK", "0")) + int(os.getenv("WORLD_SIZE", "1")) - 1
    for i in range(rank, 30):
        yield sample(shard, i)


def looking_at_the_group(shard: int, shards: int) -> list[Any]:
    assert os.environ.get("HOME") is not os.environ.get("RANKS")
    return [sample(shard, int(torch.distributed.is_initialized()))] * 30


@pytest.mark.parametrize(
    ("make", "names"),
    [
        pytest.param(
            looking_at_the_rank,
            [
                "torch.utils.data.get_worker_info()",
                "os.environ['RANK']",
                "os.environ['WORLD_SIZE']",
            ],
            marks=pytest.mark.slow,
        ),
        (looking_at_the_group, ["torch.distributed.is_initialized()"]),
        (opened(Plain, []), []),
    ],
)
def test_a_reader_that_looks_at_processes_is_told_so(make: Any, names: list[str]) -> None:
    said: list[str] = []

    def script(job: Job, me: ThreadWorker) -> Any:
        data = job.stream(make, 3)
        data.log = said.append
        return trained(job, data, 3)

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        results(script, 1)
    assert said == [str(each.message) for each in warned if "looks at" in str(each.message)]
    assert [text.partition(" looks at ")[2].partition(": cut")[0] for text in said] == (
        [", ".join(names)] if names else []
    )


def test_a_profiler_stays_in_its_place() -> None:
    def profiler(*_: Any) -> None: ...

    sys.setprofile(profiler)
    try:
        with ranks_watched() as found:
            os.environ.get("RANK")
            assert sys.getprofile() is profiler
    finally:
        sys.setprofile(None)
    assert found == []


def test_a_dataset_that_is_cut_by_processes_is_refused() -> None:
    inside = {"__module__": "streaming.base.dataset", "__iter__": lambda self: iter(())}
    kind = type("StreamingDataset", (IterableDataset,), inside)

    def script(job: Job, me: ThreadWorker) -> Any:
        with pytest.raises(UserError, match="StreamingDataset, which is cut by processes"):
            job.stream(kind(), 3)
        model, optimizer = protected(job)
        for step in job.steps(job.stream(lambda shard, shards: kind(), 3), until=1):
            step_once(step, model, optimizer)

    with pytest.raises(AssertionError, match="cut by processes"):
        results(script, 1)


def of_hugging_face(shuffled: bool) -> Any:
    """A dataset of 4 shards that are cut out of 8 parts."""
    datasets = pytest.importorskip("datasets")
    rows = np.random.default_rng(3).standard_normal((150, 6)).astype(np.float32)
    found = datasets.Dataset.from_dict({"x": rows}).to_iterable_dataset(num_shards=8)
    found = found.shuffle(seed=5, buffer_size=9) if shuffled else found
    return found.map(lambda row: {"y": [2 * v for v in row["x"][:2]]})


def paired(rows: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([row["x"] for row in rows]), torch.tensor([row["y"] for row in rows])


class Numbers(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Is the dataset whose state torchdata's loader keeps."""

    def __init__(self, shard: int) -> None:
        self.shard, self.at = shard, 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while self.at < LENGTHS[self.shard]:
            self.at += 1
            yield sample(self.shard, self.at - 1)
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def of_torchdata(shard: int, shards: int) -> Any:
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    return loaders.StatefulDataLoader(Numbers(shard), batch_size=None)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("kind", ["datasets", "shuffled datasets", "torchdata"])
def test_streams_of_packages_keep_their_states(kind: str) -> None:
    said: list[str] = []
    states: list[int] = []
    pytest.importorskip(kind.rsplit(maxsplit=1)[-1])

    def script(job: Job, me: ThreadWorker) -> Any:
        if kind == "torchdata":
            data = job.stream(of_torchdata, 3)
        else:
            data = job.stream(of_hugging_face("shuffled" in kind), 3, collate_fn=paired)
        data.log = said.append
        returned = trained(job, data)
        states.append(len(job._progress.places.readers[0]))
        return returned

    everywhere(script)
    assert not [text for text in said if "looks at" in text]
    refused = [text for text in said if "are not kept" in text]
    if kind == "shuffled datasets":  # the buffer's samples would be lost
        assert refused
        assert all("shuffle buffer" in text for text in refused)
        assert max(states) == 0
        return
    assert not refused, refused[0]
    assert min(states) == V
    goes = [tuple(map(int, text.split()[6:9:2])) for text in said if "is read from" in text]
    assert any(start > 0 for start, _ in goes)
    assert all(end - start <= 2 * 3 for start, end in goes)
