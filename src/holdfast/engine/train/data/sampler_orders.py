"""Draws the order of an epoch from a script's own sampler, alike on every worker.

An order is drawn from the sampler with all generators keyed by (seed, epoch): the global ones, and
those that the sampler holds itself. Must not know steps, workers or models.
"""

from __future__ import annotations

import array
import contextlib
import operator
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch.utils.data import DistributedSampler, Sampler

from holdfast.engine.core.errors import UserError
from holdfast.engine.train.data.order_plan import OrderFacts
from holdfast.engine.train.data.random_streams import key_apart, stream_seed

EPOCH_SAMPLES_MAX = 1 << 28
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class DrawnOrder:
    """Is one epoch's batches: the keys of its samples, and the place where each batch begins."""

    def __init__(self, keys: Sequence[Any] | NDArray[np.int64], begins: NDArray[np.int64]) -> None:
        self.begins = begins  # one more than there are batches
        self._keys = keys

    def __len__(self) -> int:
        return len(self.begins) - 1

    def batch(self, number: int) -> list[Any]:
        """Return the keys of a batch's samples; none past the last batch."""
        if number >= len(self):
            return []
        found = self._keys[self.begins[number] : self.begins[number + 1]]
        return found.tolist() if isinstance(found, np.ndarray) else list(found)

    def facts(self, epoch: int) -> OrderFacts:
        """Return the order's facts for the ledger."""
        keys = self._keys
        data = keys.tobytes() if isinstance(keys, np.ndarray) else _encode(keys)
        digest = xxhash.xxh3_64(self.begins.astype("<i8").tobytes())
        digest.update(data)
        return OrderFacts(
            epoch=epoch,
            order=digest.intdigest() >> 1,
            batches=len(self),
            samples=int(self.begins[-1]),
        )


def draw_order(sampler: Iterable[Any], seed: int, epoch: int) -> DrawnOrder:
    """Draw an epoch's order from a batch sampler. UserError if it is none."""
    name = _name(sampler)
    with key_apart(seed, epoch, "order"), _key_own_generators(sampler, seed, epoch):
        for each in _find_nested(sampler):
            if callable(getattr(each, "set_epoch", None)):
                each.set_epoch(epoch)
        keys: array.array[int] | list[Any] = array.array("q")
        begins = array.array("q", [0])
        for batch in sampler:
            for key in batch:
                try:
                    keys.append(operator.index(key))
                except (TypeError, OverflowError):
                    keys = keys if isinstance(keys, list) else list(keys)
                    keys.append(key)
            begins.append(len(keys))
            if begins[-1] == begins[-2]:
                raise UserError(f"{name} gave an empty batch in epoch {epoch}: leave it out")
            if begins[-1] > EPOCH_SAMPLES_MAX:
                raise UserError(
                    f"{name} has not come to an end after {begins[-1]} samples of epoch {epoch}: "
                    "give one that does"
                )
    if len(begins) == 1:
        raise UserError(f"{name} gave no batch in epoch {epoch}: give one that does")
    places = np.array(begins, dtype=np.int64)
    return DrawnOrder(keys if isinstance(keys, list) else np.array(keys, dtype="<i8"), places)


def check_sampler(sampler: Any) -> None:
    """Raise UserError for a sampler that shares an epoch out over processes itself."""
    for each in _find_nested(sampler):
        if isinstance(each, DistributedSampler):
            raise UserError(
                f"this DataLoader draws samples by a {type(each).__name__}, which gives each "
                "process a share: leave it out, as job.batches shares the samples over the "
                "virtual ranks"
            )


def _encode(keys: Sequence[Any]) -> bytes:
    try:
        return msgspec.msgpack.encode(keys)
    except (TypeError, OverflowError) as error:
        raise UserError(
            f"a sampler gave samples that are not named by plain values ({error}): let it give "
            "whole numbers, strings, or tuples of these"
        ) from None


def _name(sampler: Any) -> str:
    return " of ".join(type(each).__name__ for each in _find_nested(sampler))


def _find_nested(sampler: Any) -> list[Any]:
    """Return a sampler and the samplers from which it draws."""
    found = [sampler]
    for each in found:
        for name, value in getattr(each, "__dict__", {}).items():
            if name == "sampler" or isinstance(value, Sampler):
                if not any(value is known for known in found):
                    found.append(value)
    return found


@contextlib.contextmanager
def _key_own_generators(sampler: Any, seed: int, epoch: int) -> Iterator[None]:
    """Let a sampler, and those it draws from, hold keyed generators in place of their own."""
    before = [
        (each, name, value)
        for each in _find_nested(sampler)
        for name, value in getattr(each, "__dict__", {}).items()
        if isinstance(value, _GENERATORS)
    ]
    try:
        for number, (each, name, value) in enumerate(before):
            setattr(
                each, name, _make_keyed_like(value, stream_seed(seed, epoch, number, "sampler"))
            )
        yield
    finally:
        for each, name, value in before:
            setattr(each, name, value)


def _make_keyed_like(value: Any, seed: int) -> Any:
    if isinstance(value, torch.Generator):
        return torch.Generator(device=value.device).manual_seed(seed)
    if isinstance(value, np.random.Generator):
        return np.random.Generator(type(value.bit_generator)(seed))
    if isinstance(value, np.random.RandomState):
        return np.random.RandomState(seed % (1 << 32))
    return random.Random(seed)
