"""Plain rows: no generator is keyed for them, and code that may draw keeps its random numbers."""

import collections
import random

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from holdfast.engine.train.data.batch_loading import BatchSource
from holdfast.engine.train.data.batch_tasks import LoadOptions
from holdfast.engine.train.data.datasets import are_plain_samples, is_plain_dataset
from holdfast.engine.train.data.random_streams import enter_stream
from holdfast.engine.train.data.sampling import SamplePlan

COUNT = 24
PLAN = SamplePlan(length=COUNT, batch_size=3, virtual_ranks=2, seed=5)
TABLE = torch.arange(COUNT * 2.0).reshape(COUNT, 2)

PLAIN = {
    "tensors": TensorDataset(TABLE, torch.arange(COUNT)),
    "a tensor": TABLE,
    "an array": TABLE.numpy(),
    "tuples": [(row, n, "name") for n, row in enumerate(TABLE)],
    "dictionaries": [{"row": row, "of": (n, 0.5)} for n, row in enumerate(TABLE)],
    "a subset": Subset(TensorDataset(TABLE.repeat(2, 1)), list(range(COUNT, 2 * COUNT))),
}


def draw():
    return torch.tensor([random.random(), np.random.random(), torch.rand(()).item()])


class DrawingRecord(collections.UserDict):
    """Stands in a list, and draws when it is collated."""

    def __getitem__(self, key):
        return draw()


class DrawingTensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        found = super().__torch_function__(func, types, args, kwargs or {})
        if func is torch.Tensor.__getitem__:
            return found.as_subclass(torch.Tensor) + draw().sum()
        return found


class DrawingDataset(TensorDataset):
    def __getitem__(self, index):
        return (*super().__getitem__(index), draw())


class DrawingIndices(list):
    def __getitem__(self, place):
        return int(draw()[0] * COUNT)


def with_drawing_getitems():
    dataset = TensorDataset(TABLE)
    dataset.__getitems__ = lambda indices: [draw() for _ in indices]
    return dataset


DRAWING = {
    "a subclass": DrawingDataset(TABLE),
    "records": [DrawingRecord(row=0) for _ in range(COUNT)],
    "records within": [(0, [DrawingRecord(row=0)]) for _ in range(COUNT)],
    "tensors": TensorDataset(TABLE.as_subclass(DrawingTensor)),
    "a subset": Subset(TensorDataset(TABLE), DrawingIndices(range(COUNT))),
    "a subset's dataset": Subset(DrawingDataset(TABLE), range(COUNT)),
    "several at once": with_drawing_getitems(),
}


def drawing_collate(samples):
    return default_collate([(*sample, draw()) for sample in samples])


def bits(value):
    """Return everything in a batch, in a form that can be compared."""
    if isinstance(value, dict | collections.UserDict):
        return {
            key: bits(value.data[key] if hasattr(value, "data") else value[key]) for key in value
        }
    if isinstance(value, list | tuple):
        return [bits(each) for each in value]
    return value.tolist() if isinstance(value, torch.Tensor) else value


def by_hand(dataset, task, collate=default_collate):
    """Load a batch as it has always been defined: with the generators keyed by its task."""
    enter_stream(PLAN.seed, *task, "data")
    keys = PLAN.keys(*task)
    many = getattr(dataset, "__getitems__", None)
    return bits(collate(many(keys) if many else [dataset[key] for key in keys]))


def loaded(dataset, task, **options):
    source = BatchSource(dataset, PLAN, LoadOptions(**options))
    source.follow(range(PLAN.virtual_ranks), task[0], task[0] + 1)
    try:
        return bits(source.batch(*task))
    finally:
        source.close()


def states():
    _, words, place, *_ = np.random.get_state()
    return random.getstate(), (words.tolist(), place), torch.get_rng_state().tolist()


@pytest.mark.parametrize("name", PLAIN)
def test_plain_rows_have_the_same_bits_and_leave_the_generators_alone(name):
    expected = by_hand(PLAIN[name], (2, 1))
    enter_stream(0, 0, 0, "before")
    before = states()
    assert loaded(PLAIN[name], (2, 1)) == expected
    assert states() == before


@pytest.mark.parametrize("name", DRAWING)
def test_data_that_draw_keep_their_random_numbers(name):
    enter_stream(PLAN.seed, 2, 1, "data")
    undrawn = states()
    expected = by_hand(DRAWING[name], (2, 1))
    drawn = states()
    assert drawn != undrawn
    assert loaded(DRAWING[name], (2, 1)) == expected
    assert states() == drawn


def test_a_collate_function_of_the_scripts_keeps_its_random_numbers():
    dataset = PLAIN["tensors"]
    expected = by_hand(dataset, (2, 1), drawing_collate)
    draw()
    assert loaded(dataset, (2, 1), collate_fn=drawing_collate) == expected
    assert loaded(dataset, (2, 1), collate_fn=drawing_collate, num_workers=1) == expected


def test_functions_added_to_pytorchs_collating_keep_their_random_numbers(monkeypatch):
    def stack(batch, *, collate_fn_map):
        return torch.stack(batch) + draw().sum()

    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, stack)
    expected = by_hand(TABLE, (2, 1))
    draw()
    assert loaded(TABLE, (2, 1)) == expected


def test_samples_of_other_kinds_or_too_deep_are_not_plain():
    assert are_plain_samples([[[[TABLE]]], 1.0])
    assert not are_plain_samples([[[[[[TABLE]]]]]])
    assert not are_plain_samples([(TABLE, {"of": object()})])
    assert not are_plain_samples([{DrawingRecord: 1}])
    assert not is_plain_dataset(np.zeros(3).view(np.matrix))
