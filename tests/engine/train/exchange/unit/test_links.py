"""Slow networks: found in made-up exchanges, not taken for slow computing; no victim is blamed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch

from holdfast.engine.core.step.link_detector import LinkDetector, LinkVerdict
from holdfast.engine.core.step.stragglers import Detector
from holdfast.engine.core.types import WorkerId
from holdfast.engine.train.exchange.layout import Layout
from holdfast.engine.train.exchange.seam import AloneTransport, Message, NothingPending, Pending
from holdfast.engine.train.step.bucket_sums import BucketSum
from holdfast.engine.train.step.buckets import Bucket
from holdfast.engine.train.step.probe import Probe, current
from labs.made_up_exchanges import BUCKETS, MadeUpExchange

BEGIN = 40  # the step at which something becomes slow
# The time of a message, and the computing that is left when the first one can be sent.
SHAPES = [(0.0002, 0.2), (0.004, 0.2), (0.02, 0.2), (0.02, 0.0)]
Factor = Callable[[int, int, int], float]  # step, from, to: a factor for a message's time


def watch(
    size: int,
    seed: int,
    shape: tuple[float, float],
    steps: int,
    slow: Callable[[int, int], float],
    link: Factor,
) -> tuple[list[tuple[int, LinkVerdict]], int]:
    """Return the verdicts on links, with the steps; and how often computing was called slow."""
    made = MadeUpExchange(size, random.Random(seed), *shape)
    workers = [WorkerId(10 + m) for m in range(size)]  # no ranks
    links, detector = LinkDetector(workers), Detector(workers)
    found, blamed = [], 0
    for step in range(steps):
        waits = made.step(lambda m: slow(step, m), lambda a, b: link(step, a, b))  # noqa: B023
        compute_us = [int(s * 1e6) for s in made.took_s]
        found += [(step, v) for v in links.observe(waits, compute_us)]
        verdicts = detector.observe(made.took_s)
        blamed += sum(v.kind.value != "slow once" for v in verdicts)
    return found, blamed


def sound(*_: int) -> float:
    return 1.0


def since(begin: int, factor: float, *who: int) -> Callable[..., float]:
    """Return a factor from that step on, for this worker, or from this one to that one."""
    return lambda step, *at: factor if step >= begin and at[: len(who)] == who else 1.0


@pytest.mark.parametrize("size", [3, 12])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_slow_network_is_found_within_twenty_steps(size: int, shape: tuple[float, float]) -> None:
    """Neither another network nor a worker's computing is blamed."""
    for seed, late_s in enumerate([0.1, 0.2, 0.5]):
        factor = 1 + late_s / shape[0] / BUCKETS
        found, blamed = watch(size, seed, shape, BEGIN + 20, sound, since(BEGIN, factor, 1))
        assert [(v.worker, v.to) for _, v in found] == [(11, None)], (seed, late_s, found)
        assert blamed == 0


@pytest.mark.parametrize("size", [2, 3, 12])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_slow_link_is_found_within_twenty_steps(size: int, shape: tuple[float, float]) -> None:
    """The receiver over it is late with its own gradients, and other members wait for it."""
    for seed, late_s in enumerate([0.1, 0.2, 0.5]):
        factor = 1 + late_s / shape[0] / BUCKETS
        found, _ = watch(size, seed, shape, BEGIN + 20, sound, since(BEGIN, factor, 1, 0))
        assert [(v.worker, v.to) for _, v in found] == [(11, 10)], (seed, late_s, found)


@pytest.mark.slow_with("shape0-12", "shape1-12", "shape2-12", "shape3-12")
@pytest.mark.parametrize("size", [2, 3, 12])
@pytest.mark.parametrize("shape", SHAPES)
def test_slow_computing_is_no_slow_network(size: int, shape: tuple[float, float]) -> None:
    for seed, factor in enumerate([1.1, 1.3, 2.0, 5.0]):
        found, blamed = watch(size, seed, shape, BEGIN + 60, since(BEGIN, factor, 1), sound)
        assert found == [], (seed, factor)
        assert blamed > 0


@pytest.mark.slow_with("shape3-12")
@pytest.mark.parametrize("size", [2, 3, 12])
@pytest.mark.parametrize("shape", SHAPES)
def test_false_alarms_are_rare(size: int, shape: tuple[float, float]) -> None:
    found, _ = watch(size, 3, shape, 6000 // size, sound, sound)
    assert found == []


def test_a_link_that_is_mended_is_told_once() -> None:
    def link(step: int, *ends: int) -> float:
        return 30.0 if ends == (1, 0) and 20 <= step < 40 else 1.0

    found, _ = watch(4, 1, (0.004, 0.2), 100, sound, link)
    (begin, slow), (end, over) = found
    assert (begin < 40, slow.slow, over.slow) == (True, True, False)
    assert 40 < end < 60
    assert str(slow).startswith("the link from worker 11 to worker 10 is slow: worker 10 waits ")
    assert str(over).startswith("the link from worker 11 to worker 10 is not slow any more: ")


def test_a_slow_network_is_found_though_another_computes_slowly() -> None:
    slow, link = since(0, 1.3, 2), since(0, 60.0, 1)
    found, blamed = watch(4, 1, (0.004, 0.2), 30, slow, link)
    assert [(v.worker, v.to) for _, v in found] == [(11, None)]
    assert blamed > 0


def test_the_fault_kit_is_told_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(Probe):
        sent = 0

        def handle_sending(self, peer: int, size: int) -> None:
            self.sent += size

    probe = Counting()
    monkeypatch.setattr(current, "probe", probe)
    bucket = Bucket(0, [torch.nn.Parameter(torch.zeros(1000))], [0])
    bucket.contribute(0, bucket.leaf(), 2)
    layout = Layout(0, 2, 2, ((0,), (1,)), (((0, 1),), ((1, 1),)), (0, 1))
    sent: list[Message] = []

    class Sink(AloneTransport):
        def exchange(
            self,
            sends: Sequence[Message],
            receives: Sequence[Message],
            tag: int,
            sent_us: int = 0,
        ) -> Pending:
            sent.extend(sends)
            return NothingPending()

    BucketSum(bucket, layout).begin(Sink())
    assert probe.sent == sum(tensor.nbytes for _, tensor in sent) > 1000
