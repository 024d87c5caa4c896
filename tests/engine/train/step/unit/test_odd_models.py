"""Members whose tasks fill other gradients, or in another order, sum them, with equal bits."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from gradients_kit import seeded
from holdfast.engine.train.job import Job
from holdfast.engine.train.step import buckets
from holdfast.engine.train.step.engine import Engine
from holdfast.engine.train.step.probe import Probe, current
from loop_kit import Script, digest, results
from odd_models import train_odd_model
from thread_cluster import ThreadWorker

QUICK = (1, 4, 9)  # seeds 1 and 9 hung while each member took its buckets in an order of its own


class IdleThreads:
    """Knows the threads that wait for a condition, and have not been notified since."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._wait_for: dict[threading.Thread, threading.Condition] = {}
        plain_wait, plain_notify = threading.Condition.wait, threading.Condition.notify

        def wait(condition: threading.Condition, timeout: float | None = None) -> bool:
            self._wait_for[threading.current_thread()] = condition
            try:
                return plain_wait(condition, timeout)
            finally:
                self._wait_for.pop(threading.current_thread(), None)

        def notify(condition: threading.Condition, n: int = 1) -> None:
            for thread, awaited in list(self._wait_for.items()):
                if awaited is condition:
                    self._wait_for.pop(thread, None)
            plain_notify(condition, n)

        monkeypatch.setattr(threading.Condition, "wait", wait)
        monkeypatch.setattr(threading.Condition, "notify", notify)

    def __contains__(self, thread: threading.Thread) -> bool:
        return thread in self._wait_for


class EagerEngines(Probe):
    """Delays a backward pass, bucket by bucket, until the engine has no more work.

    So sums begin in the middle of each pass, whichever of a worker's threads is quicker.
    """

    def __init__(self, idle: IdleThreads) -> None:
        self._idle = idle

    def handle_gradient(self, vrank: int, leaf: torch.Tensor) -> None:
        script = threading.current_thread()
        for engine in threading.enumerate():
            if isinstance(engine, Engine) and engine._driver.mortal.thread is script:
                while engine.is_alive() and engine not in self._idle:
                    os.sched_yield()  # the other thread needs its turn


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give almost every parameter a bucket of its own, as large models do."""
    monkeypatch.setattr(buckets, "FIRST_BUCKET_BYTES", 1)
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 40)
    monkeypatch.setattr(current, "probe", EagerEngines(IdleThreads(monkeypatch)))


def assert_equal_everywhere(script: Script) -> None:
    (expected,) = results(script, 1)
    for workers in (2, 3):
        assert results(script, workers) == [expected] * workers


def tied_language_model(job: Job, me: ThreadWorker) -> Any:
    """The embedding and the output share a weight, and two samples are left for step 1."""
    words, body, head = nn.Embedding(9, 16), nn.Linear(16, 16), nn.Linear(16, 9, bias=False)
    head.weight = words.weight
    model = seeded(nn.Sequential(words, body, head))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    job.protect(model=model, optimizer=optimizer)
    data = TensorDataset(torch.arange(10) % 9)
    for step in job.steps(job.batches(data, batch_size=2), until=4):
        for (x,) in step:
            step.backward(nn.functional.cross_entropy(model(x), x))
        optimizer.step()
        optimizer.zero_grad()
    return digest(model)


def test_a_worker_without_samples_and_one_with_tied_weights_sum_the_same_buckets() -> None:
    assert_equal_everywhere(tied_language_model)


@pytest.mark.parametrize("seed", QUICK)
def test_any_model_and_any_epoch_have_equal_bits(seed: int) -> None:
    assert_equal_everywhere(train_odd_model(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_more_models_and_epochs(seed: int) -> None:
    assert_equal_everywhere(train_odd_model(seed))
