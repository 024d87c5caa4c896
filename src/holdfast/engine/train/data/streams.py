"""Reads a stream: shards that can only be read in order, one for each virtual rank.

The worker that hosts a virtual rank reads its shard. When a shard moves to another worker, that
worker opens it and reads up to the job's position, from the shard's beginning or from the last
state that its reader has reported. Only the worker that reads a shard knows that state, so it sends
it to the other workers now and then. A shard may be read by any process, so a reader that cuts its
samples by processes would cut them twice; such a reader is detected.

Invariants: a task's samples depend on the shard's position only, never on earlier readers. A state
only saves time; one from which a reader continues with other samples is not used. Watching a reader
does not change what the reader does.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed
import torch.utils.data

from holdfast.engine.core.errors import UserError
from holdfast.engine.train.checkpoint.state import keeps_state, to_plain
from holdfast.engine.train.data.batch_tasks import WHOLE, BatchPart, Source
from holdfast.engine.train.data.random_streams import enter_stream, key_apart, limit_to_one_thread
from holdfast.engine.train.data.read_plans import Position, StreamPlan
from holdfast.engine.train.data.sources import ReadData

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID")
_FUNCTIONS: dict[CodeType, str] = {
    torch.utils.data.get_worker_info.__code__: "torch.utils.data.get_worker_info()",
    torch.distributed.is_initialized.__code__: "torch.distributed.is_initialized()",
    torch.distributed.get_rank.__code__: "torch.distributed.get_rank()",
    torch.distributed.get_world_size.__code__: "torch.distributed.get_world_size()",
}
_ENVIRON = type(os.environ).__getitem__.__code__
_WAYS_THERE = ("os", "_collections_abc")  # modules between os.environ.get and its caller
# These are harmless: they do not cut samples, or only in data workers, where no shard is read.
_HARMLESS = ("datasets", "fsspec", "holdfast", "huggingface_hub", "torch", "torchdata")
TELL_STEPS = 64  # steps of the script between two reports of the states
STATE_BYTES_MAX = 1 << 20  # limit for the state of one reader
PARTS_MAX = 1000  # parts of a reader that are searched at most
ReaderState = tuple[int, int, bytes]  # epoch, samples of it that were read, and the packed state
_decode = msgspec.msgpack.Decoder(ReaderState).decode
MakeShard = Callable[[int, int], Iterable[Any]]  # number of the shard, number of shards


@contextlib.contextmanager
def ranks_watched() -> Iterator[list[str]]:
    """Collect the names of process facts read within, in this thread; none under a profiler."""
    found: list[str] = []

    def note(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call" and (name := _find_fact(frame)) and name not in found:
            found.append(name)

    if sys.getprofile() is not None:
        yield found
        return
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)


def _find_fact(frame: FrameType) -> str:
    """Return the name of the process fact that a call reads; "" if none, or if it is harmless."""
    if frame.f_code is _ENVIRON:
        key = frame.f_locals.get("key")
        name = f"os.environ[{key!r}]" if key in VARIABLES else ""
    else:
        name = _FUNCTIONS.get(frame.f_code, "")
    if not name:
        return ""
    caller = frame.f_back
    while caller is not None and caller.f_globals.get("__name__") in _WAYS_THERE:
        caller = caller.f_back
    module = "" if caller is None else str(caller.f_globals.get("__name__"))
    return "" if module.split(".")[0] in _HARMLESS else name


def pack_state(reader: Any) -> bytes:
    """Return a reader's state. UserError if it is not whole, not of plain values, or too large."""
    if any("BufferShuffled" in type(each).__name__ for each in _parts(reader)):
        raise UserError("the samples in its shuffle buffer are not in its state")
    found = msgspec.msgpack.encode(to_plain(reader.state_dict(), "the state of a stream's reader"))
    if len(found) > STATE_BYTES_MAX:
        raise UserError(
            f"the state of a stream's reader has {len(found)} bytes, more than {STATE_BYTES_MAX}"
        )
    return found


def _parts(reader: Any) -> list[Any]:
    """Return the objects behind a reader, as loaders and Hugging Face's datasets nest them."""
    found = [reader]
    for each in found:
        held = [getattr(each, name, None) for name in ("dataset", "_ex_iterable", "ex_iterable")]
        held += getattr(each, "ex_iterables", None) or []
        found += [part for part in held if part is not None]
        if len(found) > PARTS_MAX:
            break
    return found


def load(reader: Any, data: bytes) -> None:
    """Move a reader that has not begun to another reader's position."""
    reader.load_state_dict(msgspec.msgpack.decode(data))


def encode_state(state: ReaderState) -> bytes:
    """Encode a state for the other workers."""
    return msgspec.msgpack.encode(state)


def decode_state(data: bytes) -> ReaderState | None:
    """Decode a state from another worker; None if it is not valid."""
    try:
        return _decode(data)
    except msgspec.MsgspecError:
        return None


def are_alike(left: Any, right: Any) -> bool:
    """Return whether two samples, or lists of them, have the same values."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(left, Mapping):
        return list(left) == list(right) and all(are_alike(left[k], right[k]) for k in left)
    if isinstance(left, Sequence) and not isinstance(left, str | bytes):
        return len(left) == len(right) and all(map(are_alike, left, right))
    return bool(left == right)


class Stream(ReadData[StreamPlan]):
    """Cuts the samples of a stream into steps; made by `Job.stream`.

    `states`: the states that the shards' readers have reported; a part of the job's state.

        def read(shard, shards):
            yield from (dataset[i] for i in range(shard, len(dataset), shards))

        data = job.stream(read, batch_size=4)
        for step in job.steps(data, until=10):
            for inputs, targets in step:
                step.backward(loss_fn(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
    """

    def __init__(
        self,
        make: MakeShard,
        collate_fn: Callable[[list[Any]], Any],
        plan: StreamPlan,
        positions: list[Position],
        states: dict[int, ReaderState],
        log: Callable[[str], None],
        part: BatchPart = WHOLE,
    ) -> None:
        super().__init__(plan, positions, part)
        self.states = states
        #: The workers exchange the states after the present step.
        self.tells_states = False
        self.make = make
        self.collate = collate_fn
        self.log = log
        # Only the worker that hosts a shard reads it, so samples cannot be compared.
        self.facts = {"the dataset's batch_size": str(plan.batch_size)}

    def epoch_of(self, step: int) -> tuple[int, int]:
        """Return (0, steps since the first use): shards end at different times."""
        return self.plan.epoch_of(step)

    def source(self, plan: StreamPlan) -> StreamSource:
        """Return the reader of the batches."""
        return StreamSource(self, plan)

    def check(self, step: int, counts: Sequence[int], digests: Sequence[int]) -> str:
        """Check the samples that all tasks of a script's step have used, by virtual rank.

        UserError.
        """
        stateful = self.plan.stateful(self.positions, step, counts, digests)
        self.tells_states = stateful and (step - self.plan.first_step) % TELL_STEPS == 0
        return ""

    def take_states(self, told: Mapping[int, bytes]) -> None:
        """Take in the states that the readers of all shards have reported."""
        found = {vrank: decode_state(data) for vrank, data in sorted(told.items())}
        self.states.update({vrank: state for vrank, state in found.items() if state})


@dataclass(slots=True)
class _Shard:
    """Reads one shard in one epoch, which began in the step `began`."""

    epoch: int
    began: int
    reader: Iterable[Any]
    samples: Iterator[Any]
    taken: int = 0
    #: The next samples, if they had to be read early.
    ahead: list[Any] | None = None


class StreamSource(Source):
    """Provides the batches of one stream, for the virtual ranks that this worker hosts.

    A stream is read only once, and if it cannot be read, the job ends. Samples are weighted after
    the step, when all are counted.
    """

    plan: StreamPlan

    def __init__(self, stream: Stream, plan: StreamPlan) -> None:
        self.plan, self.seed = plan, plan.seed
        self.stream = stream
        self._shards: dict[int, _Shard] = {}
        self._step = -1
        self._used: dict[int, tuple[list[Any], int]] = {}  # samples of the step, and their digest
        self._watched = False  # whether the first batch has been watched for reads of process facts
        self._refuses = False  # True: readers' states are not sent, as one could not be used

    def follow(self, vranks: Sequence[int], from_step: int, until: int) -> None:
        """Close the shards that this worker does not host any more."""
        self._shards = {v: shard for v, shard in self._shards.items() if v in vranks}

    def batch(self, step: int, vrank: int) -> Any:
        """Return the collated batch of a task, or None if the task has no samples."""
        if step != self._step:
            self._step = step
            self._used.clear()
        if vrank not in self._used:
            with limit_to_one_thread():
                self._used[vrank] = self._read_watched(step, vrank)
        samples, _ = self._used[vrank]
        if not samples:
            return None
        part = self.stream.part
        enter_stream(part.seed(self.plan.seed), step, vrank, "collate")
        with limit_to_one_thread():
            return self.stream.collate(part.of(samples))

    def usage_of(self, step: int, vrank: int) -> tuple[int, int]:
        """Return the number of samples that the task has used, and their digest."""
        samples, digest = self._used[vrank]
        return len(samples), digest

    def close(self) -> None:
        """Close all shards."""
        self._shards.clear()

    def state(self, vrank: int) -> bytes | None:
        """Return the state of a shard's reader, for other workers; None if it has none.

        Each time another reader is opened from that state, to see that it gives the same samples.
        """
        shard = self._shards.get(vrank)
        if self._refuses or shard is None or not keeps_state(shard.reader):
            return None
        if shard.ahead is not None:  # its reader is past the samples that were taken
            return None
        with limit_to_one_thread(), key_apart(self.plan.seed, 0, "state"):
            try:
                state = shard.epoch, shard.taken, pack_state(shard.reader)
                trial = self._open(vrank, shard.epoch, shard.began, state)
                theirs = self._take(trial, vrank)
            except Exception as error:  # noqa: BLE001 - the script's own; without it, it goes on
                self._refuse(f"{type(error).__name__}: {error}")
                return None
            shard.ahead = self._take(shard, vrank)
            shard.taken -= len(shard.ahead)
            if not are_alike(shard.ahead, theirs):
                self._refuse("a reader that begins there gives other samples")
                return None
        return encode_state(state)

    def _refuse(self, why: str) -> None:
        self._refuses = True
        self.stream.log(
            f"the places of a stream's readers are not kept, and a shard that moves to another "
            f"worker is read from its beginning: {why}"
        )

    def _read_watched(self, step: int, vrank: int) -> tuple[list[Any], int]:
        """Read the next batch; the first time, see whether the reader cuts it by processes."""
        if self._watched:
            return self._read(step, vrank)
        self._watched = True
        with ranks_watched() as looked_at:
            found = self._read(step, vrank)
        if looked_at:
            text = (
                f"what reads the shards of a stream looks at {', '.join(looked_at)}: cut the "
                "samples by (shard, shards) only, as any process may read any shard"
            )
            self.stream.log(text)
            warnings.warn(text, UserWarning, stacklevel=2)
        return found

    def _read(self, step: int, vrank: int) -> tuple[list[Any], int]:
        """Read the next batch of a shard; at its end, the first one of its next epoch."""
        epoch, taken, _ = self.stream.positions[vrank]
        shard = self._reader_at(vrank, self.stream.positions[vrank])
        samples = self._take(shard, vrank)
        if not samples:
            epoch, taken = epoch + 1, 0
            shard = self._shards[vrank] = self._open(vrank, epoch, step)
            samples = self._take(shard, vrank)
        if len(samples) < self.plan.batch_size:
            del self._shards[vrank]
        stateful = keeps_state(shard.reader)
        return samples, self.plan.digest(vrank, epoch, taken, len(samples), stateful)

    def _reader_at(self, vrank: int, position: Position) -> _Shard:
        """Return the shard's reader at this position; open it again if need be."""
        epoch, taken, began = position
        shard = self._shards.get(vrank)
        if shard is None or shard.epoch != epoch or shard.taken > taken:
            state = self.stream.states.get(vrank)
            if state is not None and (state[0] != epoch or state[1] > taken):
                state = None
            shard = self._shards[vrank] = self._open(vrank, epoch, began, state)
        if shard.taken < taken:
            self.stream.log(
                f"shard {vrank} is read from sample {shard.taken} to {taken} of epoch {epoch} to "
                "go on"
            )
        while shard.taken < taken:
            if not self._take(shard, vrank):
                raise UserError(
                    f"shard {vrank} of the stream has ended after {shard.taken} samples where it "
                    f"had {taken} before: a shard must give the same samples each time"
                )
        return shard

    def _open(self, vrank: int, epoch: int, began: int, state: ReaderState | None = None) -> _Shard:
        """Open a shard at its beginning, or at another reader's state."""
        enter_stream(self.plan.seed, epoch, vrank, "shard")
        reader = self.stream.make(vrank, self.plan.virtual_ranks)
        _check_reader(reader)
        set_epoch = getattr(reader, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        if state is None:
            return _Shard(epoch, began, reader, iter(reader))
        load(reader, state[2])
        return _Shard(epoch, began, reader, iter(reader), taken=state[1])

    def _take(self, shard: _Shard, vrank: int) -> list[Any]:
        """Take the next samples; random numbers drawn for them depend on their position only."""
        samples, shard.ahead = shard.ahead, None
        if samples is None:
            step = shard.began + shard.taken // self.plan.batch_size
            enter_stream(self.plan.seed, step, vrank, "data")
            samples = list(itertools.islice(shard.samples, self.plan.batch_size))
        shard.taken += len(samples)
        return samples


def _check_reader(reader: Any) -> None:
    """Raise UserError for a reader that shares its samples out over processes by itself."""
    for each in (reader, getattr(reader, "dataset", None)):
        for kind in type(each).__mro__:
            if kind.__name__ == "StreamingDataset" and kind.__module__.split(".")[0] == "streaming":
                raise UserError(
                    f"job.stream(...) with a {type(each).__name__}, which is cut by processes, not "
                    "by (shard, shards): give job.batches a dataset whose __len__ and __getitem__ "
                    "are its own, and virtual ranks share its samples"
                )


def shards_of(dataset: Any) -> MakeShard:
    """Return the function that makes a stream's shards; UserError if it cannot be cut into any.

    `dataset`: a function of a shard's number and of the number of shards, or a dataset with a
    method `shard(num_shards, index)`, as those of Hugging Face's `datasets`.
    """
    _check_reader(dataset)
    if callable(getattr(dataset, "shard", None)):

        def shard(number: int, count: int) -> Iterable[Any]:
            found: Iterable[Any] = dataset.shard(num_shards=count, index=number)
            return found

        return shard
    if callable(dataset):
        return dataset
    raise UserError(
        f"job.stream({type(dataset).__name__}): this stream cannot be cut into shards; give a "
        "function of (shard, shards) that returns the samples of one of them, in order"
    )
