"""A frozen base travels once to each worker that joins, and is written once into the store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import loop_kit
import thread_cluster
from conftest import Start, finish
from holdfast.engine.state.store.checkpoints import Checkpoints
from holdfast.engine.state.store.open import open_storage
from holdfast.engine.train.job import Job

WIDTH, STEPS = 256, 12
BASE = 2 * (WIDTH + 1) * WIDTH * 4  # bytes of two layers
ADAPTER = 16 * WIDTH * 4


def test_steps_carry_adapters_and_a_join_the_base(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: dict[tuple[int, int, int], int] = {}  # by worker, incarnation and step: bytes until then
    total: dict[tuple[int, int], int] = {}
    plain = thread_cluster.MortalTransport.exchange

    def exchange(self: Any, sends: Any, *args: Any, **kwargs: Any) -> Any:
        me = self._worker.worker, self._worker.incarnation
        total[me] = total.get(me, 0) + sum(tensor.nbytes for _, tensor in sends)
        return plain(self, sends, *args, **kwargs)

    def script(job: Job, me: Any) -> str:
        base = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        model = nn.Sequential(base.requires_grad_(False), nn.Linear(WIDTH, 16, bias=False))
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.05, generator=generator)
        optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
        job.protect(model=model, optimizer=optimizer)
        inputs = torch.randn(64, WIDTH, generator=generator)
        data = job.batches(torch.utils.data.TensorDataset(inputs, inputs[:, :16]), batch_size=2)
        for step in job.steps(data, until=STEPS):
            sent[me.worker, me.incarnation, step.index] = total[me.worker, me.incarnation]
            loop_kit.step_once(step, model, optimizer)
        return loop_kit.digest(model)

    monkeypatch.setattr(thread_cluster.MortalTransport, "exchange", exchange)
    assert len(set(loop_kit.results(script, 2, {1: 40}, waits=True))) == 1
    (joined,) = {step for worker, life, step in sent if life == 2 and (1, 2, step - 1) not in sent}
    of_steps = [sent[0, 1, n] - sent[0, 1, n - 1] for n in range(1, STEPS)]
    of_join = of_steps.pop(joined - 1)
    assert 0 < joined < STEPS
    assert max(of_steps) < 1.2 * ADAPTER < BASE / 10
    assert BASE + 3 * ADAPTER <= of_join < BASE + 5 * ADAPTER  # with the optimizer's state


def test_later_checkpoints_write_the_adapters_only(start: Start, tmp_path: Path) -> None:
    store = ("--store", str(tmp_path / "store"), "--save-every", "3")
    with start("plain", "60", nproc=2, script="lora.py", options=store) as run:
        finish(run)
    found = Checkpoints(open_storage(str(tmp_path / "store")))
    (size, *_), written = zip(
        *(
            (m.size, sum(found.storage.size(p) or 0 for p in m.packs if m.token in p))
            for m in map(found.manifest, found.steps())
        ),
        strict=True,
    )
    assert len(written) > 1
    assert size > 4_000_000
    assert max(written[1:]) < 200_000
