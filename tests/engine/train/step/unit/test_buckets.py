"""How gradients get into buckets: when these are full, whose they are, which are refused."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from holdfast.engine.core.errors import UserError
from holdfast.engine.train.step.gradients import Gradients


def gradients_of(model: nn.Module) -> Gradients:
    named = [(f"model.{name}", param) for name, param in model.named_parameters()]
    found = Gradients(named, 1, threading.Condition(threading.RLock()))
    found.attach()
    return found


def test_unused_parameters_count_as_zero_and_are_marked() -> None:
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    gradients = gradients_of(model)
    gradients.begin_step()
    gradients.begin_task(0)
    with gradients.backward_pass():
        model[0](torch.ones(2, 3)).sum().backward()
    gradients.end_task()
    assert gradients.used.tolist() == [True, True, False, False]
    (bucket,) = gradients.buckets
    assert bucket.contributed == {0}
    bucket.result.data.copy_(bucket.partials[0, 1].data)
    gradients.publish(gradients.used)
    assert model[1].weight.grad is None
    assert torch.equal(model[0].bias.grad, torch.full((3,), 2.0))


def test_a_gradient_that_comes_twice_is_refused() -> None:
    model = nn.Linear(3, 3)
    gradients = gradients_of(model)
    gradients.begin_step()
    gradients.begin_task(0)
    loss = model(torch.ones(1, 3)).sum()
    with gradients.backward_pass():
        loss.backward(retain_graph=True)
        with pytest.raises(UserError, match="twice in one backward pass"):
            loss.backward()


def test_buckets_hold_one_dtype_and_are_full_with_their_last_tensor() -> None:
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(6)], nn.Linear(8, 8).bfloat16())
    sizes = [[p.nbytes for p in b.params] for b in gradients_of(model).buckets]
    dtypes = [{p.dtype for p in b.params} for b in gradients_of(model).buckets]
    assert all(len(each) == 1 for each in dtypes)
    assert all(sum(each[:-1]) < 8 << 20 for each in sizes)
    assert [len(each) for each in sizes] == [2, 4, 4, 4]


def test_a_bucket_belongs_to_one_module_and_a_round_sums_only_those_it_names() -> None:
    critic, maker = nn.Linear(2, 2), nn.Linear(2, 2)
    both = [("critic", critic), ("maker", maker)]
    named = [(f"{n}.{k}", p) for n, module in both for k, p in module.named_parameters()]
    gradients = Gradients(named, 1, threading.Condition(threading.RLock()))
    gradients.attach()
    assert [bucket.owners for bucket in gradients.buckets] == [("maker",), ("critic",)]
    gradients.begin_step(["critic"])
    gradients.begin_task(0)
    with gradients.backward_pass():
        (critic(torch.ones(1, 2)).sum() + maker(torch.ones(1, 2)).sum()).backward()
    gradients.end_task()
    maker_bucket, critic_bucket = gradients.buckets
    assert (maker_bucket.contributed, critic_bucket.contributed) == (set(), {0})
    critic_bucket.result.data.copy_(critic_bucket.partials[0, 1].data)
    gradients.publish(torch.ones(4, dtype=torch.bool), weight=4.0)
    assert maker.weight.grad is None
    assert torch.equal(critic.bias.grad, torch.full((2,), 0.25))
