"""The ledger's proof about samplers: each of their indices is used once, in their order."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from conftest import finish
from holdfast.engine.core.errors import UserError
from holdfast.engine.records.ledger import LedgerEntry, Place
from holdfast.engine.records.ledger_audit import verify
from holdfast.engine.runtime.local_run import LocalRun
from holdfast.engine.train.data.read_plans import OrderFacts, OrderPlan, encode_facts
from holdfast.engine.train.data.sampling import plan_of
from ledger_kit import OWNERS, write

ORDERED = OrderPlan(number=0, virtual_ranks=4, seed=11)
FACTS = (
    OrderFacts(epoch=0, order=77, batches=6, samples=15),
    OrderFacts(epoch=1, order=78, batches=5, samples=9),
)


def of_order(*steps):
    """Return a sampler's entries: for each task epoch, batch, samples before it, its count.

    A string before them is the word of the step.
    """
    found = []
    for index, step in enumerate(steps):
        told = step[0] if isinstance(step[0], str) else ""
        tasks = step[1:] if told else step
        digests = [ORDERED.digest(FACTS[e], batch, at, n) for e, batch, at, n in tasks]
        found.append(
            LedgerEntry(
                place=Place(index, index, told=told),
                view=1,
                hosts=tuple((owner, 1) for owner in OWNERS),
                counts=[count for *_, count in tasks],
                digests=digests,
                loss=0.5,
            )
        )
    return found


FIRST = (encode_facts(FACTS[0]), (0, 0, 0, 3), (0, 1, 3, 3), (0, 2, 6, 2), (0, 3, 8, 3))
SECOND = ((0, 4, 11, 3), (0, 5, 14, 1), (0, 6, 15, 0), (0, 6, 15, 0))
THIRD = (encode_facts(FACTS[1]), (1, 0, 0, 2), (1, 1, 2, 2), (1, 2, 4, 2), (1, 3, 6, 2))
LAST = ((1, 4, 8, 1), *[(1, 5, 9, 0)] * 3)


def prove(run, *steps):
    for worker in (0, 1):
        write(run, worker, of_order(*steps), plan=ORDERED)
    return verify(run, plan_of)


@pytest.mark.parametrize("steps", [(FIRST,), (FIRST, SECOND), (FIRST, SECOND, THIRD, LAST)])
def test_the_samples_that_a_sampler_gave_are_proved(tmp_path, steps):
    report = prove(tmp_path, *steps)
    assert report.ok, report.findings
    assert (report.steps, report.samples) == (len(steps), sum((11, 4, 8, 1)[: len(steps)]))


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ((FIRST, ((0, 3, 8, 3), *SECOND[1:])), "other samples"),  # some are used again
        ((FIRST, ((0, 5, 14, 1), (0, 5, 15, 0), *SECOND[2:])), "other samples"),  # one is left out
        ((FIRST, THIRD), "other samples"),  # the epoch does not reach its end
        (
            (FIRST, ((0, 4, 11, 2), (0, 5, 13, 1), *[(0, 6, 14, 0)] * 2)),
            "batch 6 of 6",
        ),  # cut short
        (((*FIRST[:3], (0, 2, 6, 0), (0, 3, 6, 3)),), "other samples"),  # an empty batch
        ((FIRST[1:], SECOND), "begins epoch 0"),  # the step gives no word
        # Another epoch's facts, and the ones of the epoch before.
        ((FIRST, SECOND, (encode_facts(FACTS[0]), *THIRD[1:])), "begins epoch 1"),
        ((FIRST, SECOND, (encode_facts(FACTS[1]), *FIRST[1:])), "other samples"),
        (((*FIRST[:3], FIRST[4], FIRST[3]), SECOND), "other samples"),  # out of order
    ],
)
def test_other_samples_than_the_sampler_gave_are_found(tmp_path, steps, words):
    report = prove(tmp_path, *steps)
    assert len(report.findings) == 1, report.findings
    assert words in report.findings[0]


def test_workers_that_tell_of_other_orders_are_found(tmp_path):
    other = encode_facts(dataclasses.replace(FACTS[0], samples=16))
    write(tmp_path, 0, of_order(FIRST), plan=ORDERED)
    write(tmp_path, 1, of_order((other, *FIRST[1:])), plan=ORDERED)
    assert any("differs" in each for each in verify(tmp_path, plan_of).findings)


@pytest.mark.parametrize(
    "told", ["x", "[1]", "{}", '{"epoch":0,"order":-1,"batches":6,"samples":15}', "[" * 9000]
)
def test_the_order_that_a_step_tells_is_not_trusted(told):
    with pytest.raises(UserError, match="begins epoch 0"):
        ORDERED.position_after(ORDERED.start(), 0, (0,) * 4, (0,) * 4, told)


@pytest.mark.parametrize(
    "plain",
    [
        {"order": "sampler-1"},
        {**ORDERED.to_dict(), "more": 1},
        {**ORDERED.to_dict(), "number": "3"},
        {**ORDERED.to_dict(), "virtual_ranks": 0},
    ],
)
def test_a_samplers_plan_is_not_trusted(plain):
    with pytest.raises(UserError):
        plan_of(plain)
    assert plan_of(ORDERED.to_dict()) == ORDERED


SCRIPT = """
import hashlib, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler
import holdfast

job = holdfast.join()
model = nn.Linear(6, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
job.protect(model=model, optimizer=optimizer)
x = torch.randn(60, 6, generator=torch.Generator().manual_seed(1))
sampler = WeightedRandomSampler([1.0 + i for i in range(60)], 50)
loader = DataLoader(TensorDataset(x), batch_size=3, sampler=sampler, num_workers=WORKERS)
for step in job.steps(job.batches(loader), until=17):
    for (batch,) in step:
        step.backward((model(batch + 0.1 * torch.rand(6)) - batch.sum(1, True)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
if job.is_leader:
    print(hashlib.sha256(repr(model.state_dict()).encode()).hexdigest(), flush=True)
"""


@pytest.mark.slow
def test_real_workers_draw_the_same_orders_and_deaths_change_nothing(tmp_path: Path) -> None:
    faults, last = tmp_path / "faults.txt", []
    faults.write_text("worker 1 step 3 kill\nworker 0 step 12 kill\n")
    runs = [("1", 0, []), ("2", 2, []), ("2", 0, ["--faults", str(faults)])]
    for number, (workers, loading, disturbed) in enumerate(runs):
        script = tmp_path / f"train{number}.py"
        script.write_text(SCRIPT.replace("WORKERS", str(loading)))
        options = ["--nproc", workers, "--virtual", "4", *disturbed]
        with LocalRun(tmp_path / f"run{number}", options, [str(script)]) as run:
            last.append(finish(run))
        report = verify(run.run_dir.path, plan_of)
        assert report.ok, report.findings
        assert (report.steps, report.samples) == (17, 3 * 50 + 24)  # 17 batches: five steps
    assert last[0] == last[1] == last[2]
    assert len(run.events("lost")) == 2
