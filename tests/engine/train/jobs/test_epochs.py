"""Loops over epochs, in jobs of threads: workers die in each of them, and join in later ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Sampler

from holdfast.engine.core.errors import UserError
from holdfast.engine.records.ledger_audit import verify
from holdfast.engine.runtime.local_run import LocalRun, strike
from holdfast.engine.train.data.sampling import plan_of
from holdfast.engine.train.job import Job
from loop_kit import Script, dataset, digest, everywhere, net, protected, results, step_once
from places import TESTS
from thread_cluster import ThreadWorker

EPOCHS = 6
COUNT = 40  # samples: 3 full steps of 4 times 3, and one of 4


def map_style(job: Job) -> Any:
    return job.batches(dataset(COUNT), 3)


def dropping(job: Job) -> Any:
    return job.batches(dataset(COUNT), 3, drop_last=True)


class Uneven(Sampler[int]):
    """Gives more samples in each further epoch, but has no epoch after the last."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        assert epoch < EPOCHS, f"asked for the order of epoch {epoch}"
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(
            (7 * i + self.epoch) % COUNT for i in range(COUNT - 2 * EPOCHS + 5 * self.epoch)
        )


def sampled(job: Job) -> Any:
    return job.batches(DataLoader(dataset(COUNT), batch_size=3, sampler=Uneven()))


def streamed(job: Job) -> Any:
    def open_shard(shard: int, shards: int) -> Iterator[Any]:
        data = dataset(COUNT)
        return (data[i] for i in range(shard, COUNT, shards))

    return job.stream(open_shard, 3)


def train(job: Job, data: Any, steps: Any, model: Any, optimizer: Any) -> None:
    for step in steps:
        if data is not None:
            step_once(step, model, optimizer)
            continue
        for task in step:
            x = torch.full((2, 6), 0.01 * (task.step + task.vrank))
            step.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()


# ---------------------------------------------------------------- loops one after the other


def loops(make: Callable[[Job], Any] | None, length: int = 4) -> Script:
    """Return the commonest script: a loop over epochs around job.steps."""

    def script(job: Job, me: ThreadWorker) -> Any:
        model, optimizer = protected(job)
        data = make(job) if make else None
        for epoch in range(EPOCHS):
            train(job, data, job.steps(data, until=(epoch + 1) * length), model, optimizer)
        return digest(model)

    return script


def score(job: Job, model: Any) -> float:
    found: float = job.evaluate(lambda batch: model(batch[0]).square().mean(), dataset(20), 4)
    return found


def loops_with_values(job: Job, me: ThreadWorker) -> Any:
    """Evaluations and agreed values before, between and after the loops."""
    model, optimizer = protected(job)
    data = map_style(job)
    job.values["scores"] = []
    found = [job.agree("begins")]
    for epoch in range(EPOCHS):
        train(job, data, job.steps(data, until=(epoch + 1) * 4), model, optimizer)
        found.append(score(job, model))
        job.values["scores"] = [*job.values["scores"], found[-1]]
        found.append(job.agree(epoch))
    return digest(model), found, job.values["scores"]


def loops_of_rounds(job: Job, me: ThreadWorker) -> Any:
    first, second = net(6, 3), net(6, 4)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (first, second)]
    job.protect(first=first, second=second, a=optimizers[0], b=optimizers[1])
    data = map_style(job)
    for epoch in range(EPOCHS):
        for step in job.steps(data, until=(epoch + 1) * 4):
            for name, model, optimizer in zip(
                ("first", "second"), (first, second), optimizers, strict=True
            ):
                for x, y in step.round(name):
                    step.backward((model(x) - y).square().mean())
                optimizer.step()
    return digest(first, second)


slow = pytest.mark.slow


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(loops_with_values, marks=slow),
        pytest.param(loops(map_style), marks=pytest.mark.slow),
        pytest.param(loops(dropping, 3), marks=slow),
        pytest.param(loops(sampled, 3), marks=slow),
        pytest.param(loops(streamed), marks=slow),
        pytest.param(loops(None), marks=slow),
        pytest.param(loops_of_rounds, marks=slow),
    ],
    ids=["values", "map", "drop", "sampler", "stream", "none", "rounds"],
)
def test_workers_die_in_loops_and_join_in_later_ones(script: Script) -> None:
    everywhere(script)


# ---------------------------------------------------------------- job.epochs


def noted(steps: Any, epochs: list[int]) -> Iterator[Any]:
    """Yield the steps, and keep the epoch of each."""
    for step in steps:
        epochs.append(step.epoch)
        yield step


def epochs(make: Callable[[Job], Any] | None) -> Script:
    """Epochs with lines, values and evaluations above and below their steps."""

    def script(job: Job, me: ThreadWorker) -> Any:
        model, optimizer = protected(job)
        data = make(job) if make else None
        length = None if getattr(data, "has_epochs", False) else 4
        job.values.update(scores=[], begun=[])
        for epoch in job.epochs(data, until=EPOCHS, steps_per_epoch=length):
            for group in optimizer.param_groups:  # once in each epoch, however many workers join
                group["lr"] *= 0.9
            job.values["begun"] = [*job.values["begun"], job.agree(epoch.index), score(job, model)]
            seen: list[int] = []
            train(job, data, noted(epoch, seen), model, optimizer)
            assert set(seen) == {epoch.index}
            job.values["scores"] = [*job.values["scores"], score(job, model)]
        assert job.values["begun"][::2] == list(range(EPOCHS))
        return digest(model), dict(job.values), optimizer.param_groups[0]["lr"]

    return script


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(map_style, marks=pytest.mark.slow),
        pytest.param(sampled, marks=slow),
        pytest.param(streamed, marks=slow),
        pytest.param(None, marks=slow),
    ],
)
def test_workers_join_in_the_middle_of_an_epoch(make: Callable[[Job], Any] | None) -> None:
    everywhere(epochs(make))


@pytest.mark.parametrize("make", [map_style, dropping])
def test_epochs_take_the_steps_that_loops_one_after_the_other_take(
    make: Callable[[Job], Any],
) -> None:
    def script(job: Job, me: ThreadWorker) -> Any:
        model, optimizer = protected(job)
        data = make(job)
        for _ in job.epochs(data, until=EPOCHS):
            train(job, data, _, model, optimizer)
        return digest(model)

    length = 3 if make is dropping else 4
    assert results(script, 2)[0] == results(loops(make, length), 1)[0]


def test_a_joiner_runs_no_line_of_the_epochs_that_are_over() -> None:
    entered: dict[tuple[int, int], list[int]] = {}

    def script(job: Job, me: ThreadWorker) -> Any:
        model, optimizer = protected(job)
        data = map_style(job)
        mine = entered.setdefault((me.worker, me.incarnation), [])
        for epoch in job.epochs(data, until=EPOCHS):
            mine.append(epoch.index)
            for step in epoch:
                step_once(step, model, optimizer)
                if (me.incarnation, me.worker, step.index) == (1, 1, 13):
                    me.die()
            score(job, model)
        return digest(model)

    (expected,) = results(script, 1)
    entered.clear()
    assert set(results(script, 2, {1: 10_000}, waits=True)) == {expected}
    assert entered.pop((1, 1)) == [0, 1, 2, 3]
    # A worker that was fed too late begins again, and later.
    joined = [epochs for (worker, _), epochs in sorted(entered.items()) if worker == 1]
    for mine in joined:
        assert mine == [*range(mine[0], mine[-1] + 1)]
    assert 3 <= joined[0][0] <= joined[-1][0]
    assert joined[-1][-1] == EPOCHS - 1


def stops_early(job: Job, me: ThreadWorker) -> Any:
    model, optimizer = protected(job)
    data = map_style(job)
    job.values["scores"] = []
    for epoch in job.epochs(data, until=EPOCHS):
        for step in epoch:
            step_once(step, model, optimizer)
            if step.index == 13:
                job.stop()
        job.values["scores"] = [*job.values["scores"], score(job, model)]
    for epoch in job.epochs(data, until=EPOCHS + 1):
        raise AssertionError(epoch.index)
    return digest(model), job._progress.steps, job.values["scores"]


def breaks(where: str) -> Script:
    """Leaves the loop over epochs above, within or below the steps of one."""

    def script(job: Job, me: ThreadWorker) -> Any:
        model, optimizer = protected(job)
        data = map_style(job)
        job.values["found"] = []
        for epoch in job.epochs(data, until=EPOCHS):
            if where == "above" and epoch.index == 3 and job.agree("enough") == "enough":
                break
            for step in epoch:
                step_once(step, model, optimizer)
                if where == "within" and step.index == 13:
                    break
            if where != "above" and epoch.index == 3:
                break
        job.values["score"] = score(job, model)
        for epoch in job.epochs(data, until=5):  # continues with the epoch that was left
            for step in epoch:
                step_once(step, model, optimizer)
            job.values["found"] = [*job.values["found"], epoch.index]
        for step in job.steps(data, until=22):
            step_once(step, model, optimizer)
        assert job.values["found"] == ([4] if where == "below" else [3, 4])
        return digest(model), dict(job.values)

    return script


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(breaks("within"), marks=pytest.mark.slow),
        pytest.param(stops_early, marks=slow),
        pytest.param(breaks("above"), marks=slow),
        pytest.param(breaks("below"), marks=slow),
    ],
    ids=["break", "stop", "above", "below"],
)
def test_epochs_may_end_early(script: Script) -> None:
    everywhere(script)


@pytest.mark.parametrize(("until", "expected"), [(1, []), (5, [2, 3, 4])])
def test_a_job_that_was_begun_elsewhere_goes_on_with_its_epoch(
    until: int, expected: list[int]
) -> None:
    def script(job: Job, me: ThreadWorker) -> Any:
        model, optimizer = protected(job)
        job.begin_at(9)
        found = []
        for epoch in job.epochs(map_style(job), until=until):
            found.append(job.agree(epoch.index))
            for step in epoch:
                step_once(step, model, optimizer)
        return digest(model), found

    (alone,) = results(script, 1)
    assert alone[1] == expected
    # Without steps, a worker that is too late for the state is ended with the job.
    found = results(script, 2, all_return=until > 1)
    assert found == [alone] * len(found)


def test_loops_that_are_over_from_the_start_are_passed() -> None:
    def script(job: Job, me: ThreadWorker) -> Any:
        model, optimizer = protected(job)
        job.begin_at(9)
        data = map_style(job)
        for epoch in range(EPOCHS):
            train(job, data, job.steps(data, until=(epoch + 1) * 4), model, optimizer)
        return digest(model), job._progress.steps

    assert results(script, 2) == results(script, 1) * 2
    assert results(script, 1)[0][1] == 24


def test_wrong_uses_of_epochs_are_told() -> None:
    told: list[str] = []

    def script(job: Job, me: ThreadWorker) -> Any:
        model, optimizer = protected(job)

        def fails(call: Callable[[], Any], text: str) -> None:
            with pytest.raises(UserError, match=text):
                call()
            told.append(text)

        fails(lambda: next(job.epochs(until=2)), "say how many steps make one")
        fails(lambda: next(job.epochs(until=2, steps_per_epoch=0)), "steps_per_epoch=0")
        data = map_style(job)
        fails(lambda: next(job.epochs(data, until=2, steps_per_epoch=3)), "of their own")
        walk = job.epochs(data, until=2)
        epoch = next(walk)
        fails(lambda: next(job.epochs(data, until=2)), "within the loop over other steps")
        for step in epoch:
            step_once(step, model, optimizer)
            break
        fails(lambda: next(iter(epoch)), "once")
        fails(lambda: next(walk), "epoch 0 was left early, at step 0")
        return True

    assert results(script, 1) == [True]
    assert len(told) == 6


def test_steps_must_not_go_back() -> None:
    def script(job: Job, me: ThreadWorker) -> Any:
        model, optimizer = protected(job)
        for until in (8, 8):
            for step in job.steps(map_style(job), until=until):
                step_once(step, model, optimizer)
        with pytest.raises(UserError, match=r"until=4\) after a loop that has ended at 8"):
            next(job.steps(map_style(job), until=4))
        return True

    assert results(script, 2) == [True, True]


# ---------------------------------------------------------------- real processes


@slow
@pytest.mark.parametrize("form", ["loops", "epochs"])
def test_a_killed_process_comes_back_in_a_later_epoch(form: str, tmp_path: Path) -> None:
    script = str(TESTS / "scripts" / "epochs.py")
    options = ["--nproc", "2", "--virtual", "4"]
    digests = []
    for kills in ((), (6,), (6, 250)):
        with LocalRun(tmp_path / str(len(kills)), options, [script, form]) as job:
            for number, step in enumerate(kills):
                members = job.until_members(2)
                seen = f" {step}"
                job.until(lambda seen=seen: any(li.endswith(seen) for li in job.out), 60, seen)
                strike(members[(number + 1) % 2])
            assert job.wait(120) == 0, job.log()
            digests += [line for line in job.out if not line.startswith("STEP")]
        report = verify(job.run_dir.path, plan_of)
        assert report.ok, report.findings
        if kills:
            assert any(e["text"].endswith((" joins", " join")) for e in job.events("view")[1:])
    assert len(set(digests)) == 1, digests
