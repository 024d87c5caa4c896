"""What `make bench-peers` counts and writes, checked without the peers."""

from __future__ import annotations

import importlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from places import ROOT

FOLDER = ROOT / "benchmarks"
STEPS = 8
STEP_S = 0.2


@pytest.fixture(scope="module", autouse=True)
def modules() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield


def module(name: str) -> Any:
    return importlib.import_module(name)


class Story:
    """Writes the records of a made-up run, whose steps take STEP_S."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.numbers: dict[int, int] = {}

    def begin(self, at: float, pid: int, step: int, batch: int, attempt: int = 0) -> None:
        self.numbers[pid] = self.numbers.get(pid, 0) + 1
        samples = list(range(8 * batch, 8 * batch + 8))
        self._add(kind="begin", at=at, pid=pid, step=step, samples=samples, attempt=attempt)

    def end_step(
        self,
        at: float,
        pid: int,
        step: int,
        *,
        parts: int = 3,
        counted: bool = True,
        batches: int = 1,
        attempt: int = 0,
        kind: str = "commit",
    ) -> None:
        first = self.numbers.get(pid, 0) - batches + 1
        values = {"parts": parts, "counted": counted, "first": first, "attempt": attempt}
        self._add(kind=kind, at=at, pid=pid, step=step, **values)

    def steps(self, first: int, end: int, since: float, attempt: int = 0, pid: int = 0) -> None:
        """Let three processes from `pid` on do steps one after another, from `since` on."""
        for step in range(first, end):
            for worker in range(3):
                at = since + STEP_S * (step - first)
                self.begin(at, pid + worker, step, 3 * step + worker, attempt)
                self.end_step(at + STEP_S - 0.01, pid + worker, step, attempt=attempt)

    def result(self, framework: str = "Holdfast", **values: Any) -> Any:
        for pid in self.numbers:
            self._add(kind="end", at=99.0, pid=pid, step=STEPS, digest="d1", attempt=0)
        self.records.sort(key=lambda record: float(record["at"]))
        return module("peers_launch").RunResult(
            framework=framework, steps=STEPS, records=self.records, **values
        )

    def _add(self, **values: Any) -> None:
        number = self.numbers.get(values["pid"], 0)
        self.records.append({"worker": values["pid"] % 3, "number": number, **values})


def struck(story: Story, step: int, at: float, pid: int, framework: str = "Holdfast") -> Any:
    fault = module("peers_launch").Fault(number=signal.SIGKILL, worker=0, step=step, share=0.5)
    return story.result(framework, fault=fault, struck_at=at, victim_pid=pid)


def redone_by_survivors() -> Any:
    """Step 4: process 2 dies, process 1 also does its batch; process 12 comes in step 6."""
    story = Story()
    story.steps(0, 4, 0.0)
    for step in (4, 5):
        at = 0.8 + 0.4 * (step - 4)
        story.begin(at, 0, step, 3 * step)
        story.begin(at, 1, step, 3 * step + 1)
        story.begin(at + 0.2, 1, step, 3 * step + 2)
        story.end_step(at + 0.39, 0, step)
        story.end_step(at + 0.39, 1, step, batches=2)
    story.begin(0.8, 2, 4, 14)
    for step in (6, 7):
        for pid, batch in ((0, 0), (1, 1), (12, 2)):
            story.begin(1.6 + 0.2 * (step - 6), pid, step, 3 * step + batch)
            story.end_step(1.79 + 0.2 * (step - 6), pid, step)
    return struck(story, 4, 0.9, 2)


def test_an_undisturbed_run_uses_each_sample_once_and_nothing_in_vain() -> None:
    story = Story()
    story.steps(0, STEPS, 0.0)
    figures = module("peers_figures")
    result = story.result()
    use = figures.sample_use(result)
    assert (use.twice, use.never, use.vain) == (0, 0, 0)
    assert figures.usual_step_s(result) == pytest.approx(STEP_S)
    assert figures.digests(result) == {"d1"}


def test_a_batch_that_a_survivor_computes_again_is_in_vain_and_not_used_twice() -> None:
    figures = module("peers_figures")
    use = figures.sample_use(redone_by_survivors())
    assert (use.twice, use.never, use.vain) == (0, 0, 1)


def test_a_dead_workers_batch_counts_where_the_step_has_more_parts_than_the_survivors() -> None:
    story = Story()
    story.steps(0, 3, 0.0)
    for worker in range(3):
        story.begin(0.6, worker, 3, 9 + worker)
    for worker in range(2):
        story.end_step(0.8, worker, 3, parts=3)
    story.steps(4, STEPS, 0.9, pid=3)
    use = module("peers_figures").sample_use(story.result())
    assert (use.twice, use.never, use.vain) == (0, 0, 0)


def test_steps_after_a_checkpoint_are_computed_again_and_count_once() -> None:
    story = Story()
    story.steps(0, 5, 0.0)
    story.steps(2, STEPS, 9.0, attempt=1, pid=10)
    use = module("peers_figures").sample_use(struck(story, 5, 1.0, 1, "torchrun"))
    assert (use.twice, use.never, use.vain) == (0, 0, 9)


def test_steps_without_a_replica_leave_its_samples_unused() -> None:
    story = Story()
    story.steps(0, 6, 0.0)
    for worker in range(2):
        story.begin(1.2, worker, 6, 18 + worker)
        story.end_step(1.3, worker, 6, kind="drop")
        for step in (6, 7):
            story.begin(1.4 + step, worker, step, 3 * step + 3 + worker if step < 7 else worker)
            story.end_step(1.5 + step, worker, step, parts=2)
    use = module("peers_figures").sample_use(struck(story, 6, 1.25, 2, "torchft"))
    # 4 batches of the steps 6 and 7 that are in the model: two new ones, and two of step 0 again.
    assert (use.twice, use.never, use.vain) == (16, 8 * (24 - 18 - 2), 2)


def test_times_of_a_recovery_are_less_what_an_undisturbed_run_takes() -> None:
    times = module("peers_figures").recovery_times(redone_by_survivors())
    assert times.pause_s == pytest.approx(0.2)  # the dead worker's batch, which takes as long again
    assert times.progress_s == pytest.approx(1.59 - 0.9 - 0.3)
    assert times.all_s == pytest.approx(1.79 - 0.9)
    assert times.later_s == pytest.approx(1.99 - 0.9 - 0.7)


def test_workers_that_never_all_work_again_are_said() -> None:
    story = Story()
    story.steps(0, 4, 0.0)
    for step in range(4, STEPS):
        for pid in (0, 1):
            story.begin(0.2 * step, pid, step, 3 * step + pid)
            story.end_step(0.2 * step + 0.19, pid, step, parts=2)
    result = struck(story, 4, 0.81, 2, "torchft")
    assert module("peers_figures").recovery_times(result).all_s is None
    table = "\n".join(module("peers_sheet").fault_table([result], "kill"))
    assert "| torchft | 1 of 1 |" in table
    assert "| -; never in 1 |" in table


def test_a_run_without_a_step_after_its_fault_is_an_error_with_a_name() -> None:
    story = Story()
    story.steps(0, 4, 0.0)
    with pytest.raises(ValueError, match="Holdfast: no new step after the fault"):
        module("peers_figures").recovery_times(struck(story, 4, 0.81, 2))


def test_every_framework_meets_the_same_faults_and_fewer_are_the_first_of_more() -> None:
    launch = module("peers_launch")
    few, more = (launch.planned_faults(signal.SIGKILL, count, 100) for count in (2, 5))
    assert more[:2] == few
    runs = module("peers").planned_runs(2, 1)
    names = [module("peers").run_name(*run) for run in runs]
    assert len(set(names)) == len(names)
    whole = [run for run in runs if run[0] not in launch.PARTIAL]
    assert len(whole) == 5 * (len(launch.FRAMEWORKS) - len(launch.PARTIAL))


def test_the_sheet_has_a_row_for_each_framework_and_says_when_the_machine_was_busy() -> None:
    sheet = module("peers_sheet")
    story = Story()
    story.steps(0, STEPS, 0.0)
    results = [redone_by_survivors(), story.result(load=3.0)]
    text = "\n".join([*sheet.head(results, {"torch": "2.13.0"}), *sheet.lines(results)])
    assert "torch 2.13.0" in text
    assert "The machine was busy" in text
    assert "| Holdfast | 1 of 1 | **0.20 s** (0.20 s) |" in text
    used = "| Holdfast | **1** (1) [0] | **0** (0) | **0** (0) | 1 of 1 |"
    assert f"{used} one model from 1 |" in text


def test_a_run_that_failed_is_in_the_sheet_with_its_error() -> None:
    result = Story().result("Ray Train", error="not in 300 s: the end of a worker\nlast words")
    text = "\n".join(module("peers_sheet").lines([result]))
    assert "Ray Train, undisturbed:" in text
    assert "    last words" in text


def test_all_processes_train_the_same_model_on_the_same_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, launch = module("peers_task"), module("peers_launch")
    monkeypatch.setenv("PEERS_FOLDER", str(tmp_path))
    monkeypatch.setattr(task, "PACE_S", 0.0)
    first, second = task.make_data(2), task.make_data(2)
    assert len(first) == 48
    assert torch.equal(first.tensors[1], second.tensors[1])
    model, optimizer = task.make_model()
    assert task.digest_of(model) == task.digest_of(task.make_model()[0])
    before = task.digest_of(model)
    records = task.Records(worker=1)
    records.begin(0, first.tensors[0][:8])
    task.paced_loss(model, first.tensors[1][:8]).backward()
    optimizer.step()
    records.commit(0)
    records.end(1, model)
    reader = launch.RecordReader(tmp_path)
    found = reader.read()
    assert [record["kind"] for record in found] == ["begin", "commit", "end"]
    assert found[0]["samples"] == list(range(8))
    assert (found[1]["first"], found[1]["number"]) == (1, 1)
    assert found[2]["digest"] not in {before, ""}
    assert reader.read() == found


def test_a_record_that_is_being_written_is_left_for_later(tmp_path: Path) -> None:
    path = tmp_path / "records" / "1.jsonl"
    path.parent.mkdir()
    line = json.dumps({"at": 1.0, "kind": "begin"})
    path.write_text(f"{line}\n{line[:5]}")
    reader = module("peers_launch").RecordReader(tmp_path)
    assert len(reader.read()) == 1
    with path.open("a") as file:
        file.write(f"{line[5:]}\n")
    assert len(reader.read()) == 2


@pytest.mark.slow
def test_holdfast_loses_no_sample_to_a_kill_by_these_rules_too(tmp_path: Path) -> None:
    launch, figures = module("peers_launch"), module("peers_figures")
    fault = launch.Fault(number=signal.SIGKILL, worker=1, step=6, share=0.5)
    with launch.PeerRun("Holdfast", tmp_path / "run", 30) as run:
        result = run.train(fault)
    assert not result.error
    use = figures.sample_use(result)
    assert (use.twice, use.never) == (0, 0)
    assert len(figures.digests(result)) == 1
