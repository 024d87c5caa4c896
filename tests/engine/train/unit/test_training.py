"""The training library's parts: sums, state, buffers, and how the loop equals plain PyTorch."""

from __future__ import annotations

import collections
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from conftest import RUN_S
from holdfast.engine.core.errors import StateMismatch, UserError, WireError
from holdfast.engine.core.job_spec import with_settings
from holdfast.engine.faults.disturbed import flip_bit
from holdfast.engine.runtime.rundir import RunDir
from holdfast.engine.train.checkpoint import state
from holdfast.engine.train.checkpoint.loaded_state import fingerprint
from holdfast.engine.train.exchange.tensor_bytes import as_bytes
from holdfast.engine.train.script.fingerprints import Fingerprints
from holdfast.engine.train.step.gradient_digest import TaskDigest
from holdfast.engine.train.step.step_table import Buffers
from support import SPEC

# ---------------------------------------------------------------- fingerprints


def trained(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(300, 400), nn.BatchNorm1d(400), nn.Linear(400, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 300)).square().mean().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


@pytest.mark.slow
def test_every_bit_is_in_the_fingerprint_of_some_step_of_a_cycle() -> None:
    objects = trained()
    buffers = list(objects["model"].buffers())
    prints = Fingerprints(objects, 4)
    before = [prints.take_part(step, buffers) for step in range(4)]
    whole = prints.take_all(buffers)
    assert before == [Fingerprints(trained(), 4).take_part(step, buffers) for step in range(4)]
    kept = [t for each in objects["optimizer"].state.values() for t in each.values()]
    dice = random.Random(0)
    for tensor in [*objects["model"].parameters(), *buffers, *kept]:
        flip_bit(dice, [tensor])
        after = [prints.take_part(step, buffers) for step in range(4)]
        assert after != before
        assert prints.take_all(buffers) != whole
        before, whole = after, prints.take_all(buffers)


def test_fingerprints_and_digests_are_the_same_for_ever() -> None:
    """The values are pinned: workers of two releases must not consider each other wrong."""
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.copy_(torch.arange(6).view(2, 3) / 8)
        model.bias.fill_(0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    optimizer.state[model.bias]["momentum_buffer"] = torch.tensor([1.0, 2.0])
    prints = Fingerprints({"model": model, "optimizer": optimizer}, 2)
    buffers = [torch.tensor([3.0])]
    assert prints.take_all(buffers) == 1132907197916398458
    steps = [prints.take_part(step, buffers) for step in range(3)]
    assert steps == [4429493873247173383, 1761965699372546210, 4429493873247173383]
    digest = TaskDigest()
    digest.begin(bits=True, sketch=False)
    digest.note(0, torch.arange(5) / 4)
    digest.note(1, torch.ones(3))
    assert digest.bits == 6778923111244334632


def test_tensors_are_described_as_they_stood_between_two_steps() -> None:
    """FSDP2 puts gathered parameters into the modules within a step, and frees them after use."""
    objects = trained()
    buffers = list(objects["model"].buffers())
    prints = Fingerprints(objects, 4)
    prints.take_part(0, buffers)
    before = prints.take_each(buffers)
    objects["model"][0].weight = nn.Parameter(torch.zeros(1))
    assert prints.take_each(buffers) == before
    prints.forget()  # the module has changed for good
    assert next(name for name, _ in prints.take_each(buffers)) == "model.0.weight"
    assert prints.take_each(buffers) != before


@pytest.mark.slow
def test_without_a_cycle_nothing_is_compared() -> None:
    assert (
        Fingerprints(trained(), 0).take_part(3, []) == Fingerprints(trained(), 0).take_all([]) == 0
    )


# ---------------------------------------------------------------- buffers


@pytest.mark.slow
def test_every_task_starts_from_the_buffers_of_the_steps_start() -> None:
    norm = nn.BatchNorm1d(4)
    twin = nn.BatchNorm1d(4)
    buffers, others = Buffers([("m", norm)]), Buffers([("m", twin)])
    first, second = torch.randn(8, 4), torch.randn(8, 4)
    for each, module, order in ((buffers, norm, (0, 1)), (others, twin, (1, 0))):
        each.remember()
        for vrank in order:
            each.restore()
            module(first if vrank == 0 else second)
            each.keep(vrank, each.changes())
        each.share()
        each.apply()
    expected = nn.BatchNorm1d(4)
    expected(first)
    for module in (norm, twin):
        for key, value in expected.state_dict().items():
            assert torch.equal(module.state_dict()[key], value), key


# ---------------------------------------------------------------- state

PLAIN = {
    "none": None,
    "flags": [True, False],
    "int": 1 << 80,
    "float": -0.0,
    "text": "ü",
    "bytes": b"\x00\xff",
    "nested": {"a": (1, 2.5), 3: [None]},
    "ordered": collections.OrderedDict(b=1, a=2),
    "counter": collections.Counter({4: 1, 8: 1}),
    "dtype": torch.bfloat16,
    "array": np.arange(6).reshape(2, 3),
    "tensors": [
        torch.randn(3, 4),
        torch.tensor(5),
        torch.empty(0),
        torch.ones(2, dtype=torch.bool),
    ],
}


def test_a_state_survives_the_journey() -> None:
    skeleton, tensors = state.flatten(PLAIN, "state")
    copies = [state.allocate(meta) for meta in state.metas(skeleton)]
    for copy, tensor in zip(copies, tensors, strict=True):
        as_bytes(copy).copy_(as_bytes(tensor))
    found = state.restore(skeleton, copies)
    assert list(found) == list(PLAIN)
    for key in set(PLAIN) - {"tensors", "array"}:
        assert found[key] == PLAIN[key], key
        assert type(found[key]) is type(PLAIN[key]), key
    assert np.array_equal(found["array"], PLAIN["array"])
    assert all(map(torch.equal, found["tensors"], PLAIN["tensors"]))
    assert fingerprint(skeleton, copies) == fingerprint(skeleton, tensors)
    copies[0].view(torch.uint8)[1] ^= 1
    assert fingerprint(skeleton, copies) != fingerprint(skeleton, tensors)


def test_an_object_that_cannot_travel_is_named() -> None:
    with pytest.raises(UserError, match=r"state\['f'\] is a function"):
        state.flatten({"f": lambda: 0}, "state")


@pytest.mark.slow
@settings(max_examples=500)
@given(data=st.binary(max_size=200))
def test_no_bytes_crash_the_state_reader(data: bytes) -> None:
    try:
        state.metas(data)
    except WireError:
        return


def test_a_damaged_skeleton_is_refused_or_has_another_fingerprint() -> None:
    skeleton, tensors = state.flatten(PLAIN, "state")
    whole, refused = fingerprint(skeleton, tensors), 0
    for bit in range(8 * len(skeleton)):
        damaged = bytearray(skeleton)
        damaged[bit // 8] ^= 1 << bit % 8
        assert fingerprint(bytes(damaged), tensors) != whole
        try:
            state.metas(bytes(damaged))
            state.restore(bytes(damaged), tensors)
        except WireError:
            refused += 1
    assert refused > 4 * len(skeleton), refused  # the rest are other values, well formed


BROKEN_SKELETONS = {
    "cut off": lambda whole: whole[:-1],
    "continued": lambda whole: whole + b"\x00",
    "nothing": lambda whole: b"",
    "no tag": lambda whole: msgspec.msgpack.encode([]),
    "an unknown tag": lambda whole: msgspec.msgpack.encode(["x", 1]),
    "an unknown mapping": lambda whole: msgspec.msgpack.encode(["m", "ChainMap", []]),
    "an unknown sequence": lambda whole: msgspec.msgpack.encode(["s", "deque", []]),
    "not a number": lambda whole: msgspec.msgpack.encode(["i", "seven"]),
    "not a dtype": lambda whole: msgspec.msgpack.encode(["d", "nn"]),
    "a key that cannot be one": lambda whole: msgspec.msgpack.encode(
        ["m", "dict", [[["s", "list", []], ["v", 1]]]]
    ),
    "fewer tensors than there are": lambda whole: msgspec.msgpack.encode(["v", None]),
    "more tensors than there are": lambda whole: msgspec.msgpack.encode(
        ["s", "list", [["t", "float32", [1]]] * 99]
    ),
}


@pytest.mark.parametrize("name", BROKEN_SKELETONS)
def test_a_broken_skeleton_is_refused(name: str) -> None:
    skeleton, tensors = state.flatten(PLAIN, "state")
    with pytest.raises(WireError, match="skeleton"):
        state.restore(BROKEN_SKELETONS[name](skeleton), tensors)


@pytest.mark.parametrize("meta", [("nn", (1,)), ("float33", ()), ("float32", (2, -1))])
def test_an_impossible_tensor_is_refused(meta: state.Meta) -> None:
    with pytest.raises(WireError, match="impossible tensor"):
        state.allocate(meta)


def test_a_model_of_another_shape_is_named() -> None:
    skeleton, tensors = state.capture({"m": nn.Linear(8, 7)})
    with pytest.raises(StateMismatch, match=r"m\.weight is \[8, 8\] .* and \[7, 8\]"):
        state.apply({"m": nn.Linear(8, 8)}, skeleton, tensors)


# ---------------------------------------------------------------- the loop, in plain PyTorch

UNGUARDED = {"silent_errors.repeat_steps": 0, "silent_errors.fingerprint_steps": 0}
PLAIN_SCRIPT = """
import torch, holdfast
from torch import nn
job = holdfast.join()
model = nn.Linear(5, 3)
twin = nn.Linear(5, 3)
twin.load_state_dict(model.state_dict())
ours = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(37, 5)
class Numbered(torch.utils.data.Dataset):
    def __len__(self):
        return 37
    def __getitem__(self, i):
        return i, x[i]
job.protect(model=model, optimizer=ours)
seen = []
for step in job.steps(job.batches(Numbered(), batch_size=4), until=9):
    used = []
    for i, batch in step:
        used += i.tolist()
        step.backward(model(batch).square().mean())
    loss = twin(x[used]).square().mean()
    grads = torch.autograd.grad(loss, list(twin.parameters()))
    assert torch.allclose(model.weight.grad, grads[0], rtol=1e-5, atol=1e-6)
    assert abs(step.loss - loss.item()) < 1e-5, (step.loss, loss.item())
    ours.step()
    with torch.no_grad():
        torch._foreach_add_(list(twin.parameters()), grads, alpha=-0.1)
    ours.zero_grad()
    seen += used
assert [sorted(seen[e * 37:(e + 1) * 37]) == list(range(37)) for e in range(3)] == [True] * 3
assert step.epoch == 2 and job.is_leader
"""


@pytest.mark.slow
def test_a_step_is_the_mean_over_its_samples_also_in_an_uneven_tail(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text(PLAIN_SCRIPT)
    run_dir = RunDir(tmp_path / "run")
    run_dir.create(with_settings(SPEC, {"workers.virtual": 4, **UNGUARDED}), b"")
    found = subprocess.run(
        [sys.executable, str(script)],
        check=False,
        env=os.environ | {"HOLDFAST_RUN_DIR": str(run_dir.path)},
        capture_output=True,
        text=True,
        timeout=RUN_S,
    )
    assert found.returncode == 0, found.stderr


TWO_LOOPS = """
import torch, holdfast
from torch import nn
job = holdfast.join()
model = nn.Linear(5, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job.protect(model=model, optimizer=optimizer)
data = job.batches(torch.utils.data.TensorDataset(torch.randn(16, 5)), batch_size=2)
for until in (3, 7, 7):
    for step in job.steps(data, until=until):
        for (x,) in step:
            step.backward(model(x).square().mean())
        optimizer.step()
    if job.is_leader:
        print("after", until, model.weight.sum().item(), flush=True)
"""


@pytest.mark.slow
def test_several_loops_in_one_script(tmp_path: Path) -> None:
    script = tmp_path / "loops.py"
    script.write_text(TWO_LOOPS)
    command = [sys.executable, "-m", "holdfast.cli.main", "run", "--virtual", "2"]
    outputs = []
    for nproc in ("1", "2"):
        options = ["--nproc", nproc, "--run-dir", str(tmp_path / nproc), str(script)]
        found = subprocess.run(
            [*command, *options], check=True, capture_output=True, text=True, timeout=RUN_S
        )
        outputs.append(found.stdout)
    assert outputs[0] == outputs[1]
    assert [line.split()[1] for line in outputs[0].splitlines()] == ["3", "7", "7"]
