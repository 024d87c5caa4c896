"""Values that a script keeps in the job's state come back as they were, type for type."""

from __future__ import annotations

import collections
import enum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.engine.core.errors import UserError
from holdfast.engine.train.checkpoint.state import flatten, restore
from holdfast.engine.train.job import Job
from holdfast.engine.train.script.script_state import Values
from loop_kit import dataset, digest, net, protected, results, step_once
from thread_cluster import ThreadWorker

JOINS_AT = 9  # the exchange at which a worker dies; it joins again some steps later


class Best(NamedTuple):
    loss: float
    step: int


class Stage(enum.IntEnum):
    WARM = 1


def through_bytes(values: Values) -> Values:
    """Return the values that another worker, or a later job, has after loading these values."""
    found = Values()
    found.load_state_dict(restore(*flatten(values.state_dict(), "values")))
    return found


@pytest.mark.parametrize(
    "value",
    [
        (float("inf"), -1),
        [(1, "a"), [2.5, None, True, b"x"]],
        {("train", 0): {1: (2,)}},
        collections.OrderedDict(b=1, a=2),
        collections.Counter("abba"),
        collections.defaultdict(int, {"a": 1}),
        collections.defaultdict(list, {0: [1]}),
        collections.defaultdict(None, {0: 1}),
        1 << 80,
        np.float64(0.5),
        np.float32(0.1),
        np.int64(-3),
        np.bool_(True),
        np.str_("name"),
    ],
    ids=repr,
)
def test_a_value_comes_back_type_for_type(value: Any) -> None:
    values = Values()
    values["it"] = value
    found = through_bytes(values)["it"]
    assert repr(found) == repr(value)
    assert type(found) is type(value)
    if isinstance(value, collections.defaultdict):
        assert found.default_factory is value.default_factory


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Best(1.0, 2), "would come back as a plain tuple: give tuple"),
        (Stage.WARM, "would come back as a plain int: give int"),
        (collections.defaultdict(lambda: 3), "default is a function of the script"),
        ({1, 2}, "is a builtins.set: give numbers"),
        (np.zeros(2), "is a numpy.ndarray"),
        ([{"a": torch.zeros(2)}], r"job.values\['it'\]\[0\]\['a'\] is a torch.Tensor"),
        ({(Stage.WARM, 0): 1}, "would come back as a plain int"),
    ],
    ids=lambda each: each if isinstance(each, str) else type(each).__name__,
)
def test_a_value_that_would_come_back_as_another_one_is_refused(value: Any, message: str) -> None:
    values = Values()
    with pytest.raises(UserError, match=message):
        values["it"] = value
    assert "it" not in values


def test_lists_and_dictionaries_that_a_script_holds_take_over_the_jobs_values() -> None:
    mine, theirs = Values(), Values()
    history = mine.setdefault("history", [1])
    counts = mine.setdefault("counts", {"seen": collections.defaultdict(int), "gone": 1})
    seen = counts["seen"]
    mine["more"] = 1
    theirs["counts"] = {"seen": collections.defaultdict(int, {3: 4}), "new": (1, 2)}
    theirs["history"] = [1, 2, 3]
    mine.load_state_dict(theirs.state_dict())
    assert dict(mine) == dict(theirs)
    assert list(mine) == ["counts", "history"]
    assert mine["history"] is history == [1, 2, 3]
    assert mine["counts"] is counts
    assert counts["seen"] is seen == {3: 4}
    theirs["history"].append(4)
    assert history == [1, 2, 3]


def keeps_values(job: Job, me: ThreadWorker) -> Any:
    """Decides by values of many kinds, and by a list that it holds itself."""
    model, optimizer = protected(job)
    optimizer.param_groups[0]["lr"] = np.float64(0.02)
    job.values["best"] = (float("inf"), -1)
    hard = collections.defaultdict(int)
    job.values["hard"] = hard
    losses = job.values.setdefault("losses", [])
    for step in job.steps(job.batches(dataset(), 3), until=14):
        step_once(step, model, optimizer)
        losses.append(np.float32(step.loss))
        hard[step.index // 4] += 1
        job.values["best"] = min(job.values["best"], (step.loss, step.index))
        if job.values["best"] == (step.loss, step.index):
            optimizer.param_groups[0]["lr"] *= 0.9
    kinds = type(losses[0]), type(optimizer.param_groups[0]["lr"])
    return digest(model), dict(job.values), losses, hard, kinds


def test_values_of_every_kind_decide_alike_after_a_join() -> None:
    (expected,) = results(keeps_values, 1)
    assert results(keeps_values, 3, {1: JOINS_AT}, waits=True) == [expected] * 3


class Counted(nn.Module):
    """Keeps losses in what torch calls the extra state: a tensor whose length changes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()
        self.history: dict[str, list[float]] = {"losses": []}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x)
        return found

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor(self.history["losses"], dtype=torch.float64)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.history = {"losses": state.tolist()}


def extra(job: Job, me: ThreadWorker) -> Any:
    model = Counted()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    job.protect(model=model, optimizer=optimizer)
    for step in job.steps(job.batches(dataset(), 3), until=14):
        step_once(step, model, optimizer)
        model.history["losses"].append(step.loss)
    return digest(model.inner), model.history


def test_a_modules_extra_state_may_change_its_shape() -> None:
    (expected,) = results(extra, 1)
    assert results(extra, 3, {1: JOINS_AT}, waits=True) == [expected] * 3


def test_a_tuple_as_a_key_is_refused_where_values_are_told_as_plain_ones() -> None:
    def script(job: Job, me: ThreadWorker) -> Any:
        protected(job)
        with pytest.raises(UserError, match="has a tuple as a key"):
            job.agree({("train", 0): 1})
        return True

    assert results(script, 1) == [True]
