"""Several streams of a GPU, on a fake one: sums never read gradients that are not complete yet."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from test_buckets import gradients_of
from torch import nn

from fake_gpu import DEFAULT, RECORDED, FakeStream, fake_gpu, in_stream, move, on_gpu
from holdfast.engine.core.errors import UserError
from holdfast.engine.train.state.step_image import LARGE_BYTES, StepMemory
from holdfast.engine.train.step import gradients
from holdfast.engine.train.step.gradients import Gradients, order_gradient
from holdfast.engine.train.step.time_sheet import TaskClock

__all__ = ["fake_gpu"]


def begin_step(model: nn.Module) -> Gradients:
    found = gradients_of(model)
    found.begin_step()
    return found


def reach(param: nn.Parameter, stream: FakeStream | None, value: float) -> None:
    """Give a parameter a gradient and call its hooks, as FSDP2 does in its stream."""
    param.grad = on_gpu(torch.zeros(param.shape))
    with contextlib.nullcontext() if stream is None else in_stream(stream):
        param.grad.copy_(on_gpu(torch.full(param.shape, value)))  # under way, unless it is default
        for hook in [*param._post_accumulate_grad_hooks.values()]:
            hook(param)


def summed(names: str) -> list[float]:
    """Return all numbers of the only bucket after a task.

    `names`: the stream of each gradient, a letter, or "-" for the default one.
    """
    sides = {name: FakeStream() for name in "ab"}
    model = move(nn.Linear(1, 2))
    gradients = begin_step(model)
    gradients.begin_task(0)
    with gradients.backward_pass():
        for number, (param, name) in enumerate(zip(model.parameters(), names, strict=True), 1):
            reach(param, sides.get(name), float(number))
    gradients.end_task()
    (bucket,) = gradients.buckets
    return sorted(bucket.partials[0, 1].data.tolist())


RIGHT = [1.0, 1.0, 2.0, 2.0]


@pytest.mark.parametrize("names", ["--", "a-", "-a", "ab", "aa"])
def test_gradients_of_other_streams_are_whole_when_they_are_summed(
    names: str, fake_gpu: torch.device
) -> None:
    assert summed(names) == RIGHT


@contextlib.contextmanager
def anywhere(_: torch.Tensor) -> Iterator[None]:
    """Plant a bug: the bucket is filled in the present stream."""
    yield


@pytest.mark.parametrize(
    ("name", "planted", "names"),
    [("order_gradient", lambda _: None, "a-"), ("on_default_stream", anywhere, "-a")],
)
def test_the_fake_shows_gradients_that_nobody_waited_for(
    name: str,
    planted: Callable[[torch.Tensor], None],
    names: str,
    fake_gpu: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gradients, name, planted)
    assert summed(names) != RIGHT


@pytest.mark.parametrize("names", ["a-", "-a", "ab"])
def test_memory_of_a_gradient_is_not_used_again_before_it_is_read(
    names: str, fake_gpu: torch.device
) -> None:
    RECORDED.clear()
    summed(names)
    assert [stream for _, stream in RECORDED] == [DEFAULT] * len(names.replace("-", ""))
    assert len({address for address, _ in RECORDED}) == len(RECORDED)


def test_memory_of_sparse_gradients_is_kept_as_well(
    fake_gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda each, _: kept.append(each))
    param = nn.Parameter(torch.zeros(3, 2))
    values = torch.ones(1, 2)
    param.grad = torch.sparse_coo_tensor(torch.tensor([[1]]), values, (3, 2))
    with in_stream(FakeStream()):
        order_gradient(param)
    assert [each.shape for each in kept] == [(1, 1), (1, 2)]


def test_a_loop_in_a_stream_of_its_own_is_refused(fake_gpu: torch.device) -> None:
    gradients = begin_step(move(nn.Linear(1, 2)))
    with in_stream(FakeStream()), pytest.raises(UserError, match="in a CUDA stream of its own"):
        gradients.begin_task(0)


def test_the_time_of_a_task_that_is_running_is_not_asked_for(fake_gpu: torch.device) -> None:
    clock = TaskClock(fake_gpu)
    clock.begin()
    clock.end()
    clock.begin()  # as in a member whose work is dropped: the results of other members are enough
    assert clock.step_us() == 1000
    clock.end()
    assert clock.step_us() == 2000
    clock.reset()
    assert clock.step_us() == 0


def test_copies_on_a_gpu_are_not_kept_for_later_steps(fake_gpu: torch.device) -> None:
    memory = StepMemory()
    memory.give_back([on_gpu(torch.zeros(LARGE_BYTES, dtype=torch.uint8))])
    assert memory._free == []
    memory.give_back([torch.zeros(LARGE_BYTES, dtype=torch.uint8)])
    assert len(memory._free) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("order", ["beside", "last"])
def test_gradients_of_a_stream_on_a_real_gpu_are_whole_when_they_are_summed(order: str) -> None:
    side, model = torch.cuda.Stream(), nn.Linear(1, 2).cuda()
    gradients = begin_step(model)
    gradients.begin_task(0)
    slow = [*model.parameters()][0 if order == "beside" else 1]
    with gradients.backward_pass():
        for param in model.parameters():
            stream = side if param is slow else torch.cuda.default_stream()
            with torch.cuda.stream(stream):
                param.grad = torch.zeros_like(param)
                torch.cuda._sleep(100_000_000 if param is slow else 1)  # cycles
                param.grad.fill_(2.0)
                for hook in [*param._post_accumulate_grad_hooks.values()]:
                    hook(param)
    gradients.end_task()
    (bucket,) = gradients.buckets
    assert bucket.partials[0, 1].data.tolist() == [2.0] * 4
