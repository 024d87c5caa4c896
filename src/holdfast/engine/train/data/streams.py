"""Reads a stream: shards that can only be read in order, one for each virtual rank.

The worker that hosts a virtual rank reads its shard. When a shard moves to another worker, that
worker opens it and reads up to the job's position, from the shard's beginning or from the last
state that its reader has reported. Invariant: a task's samples depend on the shard's position only,
never on earlier readers.
"""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.engine.core.errors import InvariantError, UserError
from holdfast.engine.train.checkpoint.state import keeps_state
from holdfast.engine.train.data.batch_loading import limit_to_one_thread
from holdfast.engine.train.data.batch_parts import WHOLE, BatchPart
from holdfast.engine.train.data.data_facts import Facts
from holdfast.engine.train.data.random_streams import enter_stream, key_apart
from holdfast.engine.train.data.rank_watch import ranks_watched
from holdfast.engine.train.data.reader_states import (
    TELL_STEPS,
    ReaderState,
    are_alike,
    decode_state,
    encode_state,
    load,
    pack_state,
)
from holdfast.engine.train.data.shard_positions import Position, StreamPlan

MakeShard = Callable[[int, int], Iterable[Any]]  # number of the shard, number of shards


class Stream:
    """Cuts the samples of a stream into steps; made by `Job.stream`.

    `positions`, `states`: the shards' positions, and the states that their readers have reported;
    parts of the job's state.
    """

    has_epochs = False
    quarantine = None

    def __init__(
        self,
        make: MakeShard,
        collate_fn: Callable[[list[Any]], Any],
        plan: StreamPlan,
        positions: list[Position],
        states: dict[int, ReaderState],
        tell: Callable[[str], None],
        part: BatchPart = WHOLE,
    ) -> None:
        self.part = part  # the part of each batch that this process of the worker trains on
        self.plan = plan
        self.positions = positions
        self.states = states
        self.tells_states = False  # the workers exchange the states after the present step
        self.make = make
        self.collate = collate_fn
        self.tell = tell
        self._first_step: int | None = None  # None: no loop has used it

    @property
    def facts(self) -> Facts:
        """Return the setting of the batches; only the worker that hosts a shard reads it."""
        return {"the dataset's batch_size": str(self.plan.batch_size)}

    def begin(self, step: int) -> StreamPlan:
        """Record that a loop over it begins at `step`; returns the plan from its first use."""
        if self._first_step is None:
            self._first_step = step
            self.plan = dataclasses.replace(self.plan, first_step=step)
        if all(position[:2] == (0, 0) for position in self.positions):
            self.positions[:] = self.plan.start()
        return self.plan

    def epoch_of(self, step: int) -> tuple[int, int]:
        """Return (0, steps since the first use): shards end at different times."""
        return self.plan.epoch_of(step)

    def epoch_steps(self, epoch: int) -> int:
        """Raise InvariantError, since there are no epochs."""
        raise InvariantError("a stream was asked how long its epochs are")

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

    def hear(self, told: Mapping[int, bytes]) -> None:
        """Take in the states that the readers of all shards have reported."""
        found = {vrank: decode_state(data) for vrank, data in sorted(told.items())}
        self.states.update({vrank: state for vrank, state in found.items() if state})

    def advance(self, step: int, counts: Sequence[int], digests: Sequence[int]) -> None:
        """Advance past the samples that a script's step has used, by virtual rank. UserError."""
        self.positions[:] = self.plan.position_after(self.positions, step, counts, digests)

    def samples(self, step: int) -> dict[str, str]:
        """Return no samples, since only the worker that hosts a shard reads it."""
        return {}


@dataclass(slots=True)
class _Shard:
    """Reads one shard in one epoch, which began in the step `began`."""

    epoch: int
    began: int
    reader: Iterable[Any]
    samples: Iterator[Any]
    taken: int = 0
    ahead: list[Any] | None = None  # the next samples, if they had to be read early


class StreamSource:
    """Provides the batches of one stream, for the virtual ranks that this worker hosts."""

    def __init__(self, stream: Stream, plan: StreamPlan) -> None:
        self.plan = plan
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

    def load_again(self, step: int, vrank: int, *, in_data_worker: bool = False) -> Any:
        """Return the batch of a task, collated once more: a stream is read only once."""
        return self.batch(step, vrank)

    def usage_of(self, step: int, vrank: int) -> tuple[int, int]:
        """Return how many samples the task has used, and their digest."""
        samples, digest = self._used[vrank]
        return len(samples), digest

    def report_of(self, step: int, vrank: int) -> bytes:
        """Return no bytes: an unreadable stream ends the job, so there are no records to report."""
        return b""

    def scale(self, step: int, vrank: int) -> float | None:
        """Return None, because samples are weighted after the step, when all are counted."""
        return None

    def close(self) -> None:
        """Close all shards."""
        self._shards.clear()

    def state(self, vrank: int) -> bytes | None:
        """Return the state of a shard's reader, for other workers; None if it has none.

        Each time another reader is opened from that state, to see that it goes on in the same way.
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
        self.stream.tell(
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
            self.stream.tell(text)
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
            self.stream.tell(
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
