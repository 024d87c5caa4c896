"""Digests of gradients and of sums see each bit, and show where two runs begin to differ."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conftest import SCRIPTS, finish
from fake_gpu import fake_gpu, on_gpu
from holdfast.cli.main import main
from holdfast.engine.records.ledger import (
    HeaderLine,
    Place,
    StepDigests,
    StepLine,
    Uses,
    read_lines,
)
from holdfast.engine.records.ledger_audit import verify
from holdfast.engine.records.step_records import RunSteps, has_digests, read_steps
from holdfast.engine.runtime.local_run import LocalRun
from holdfast.engine.train.data.sampling import plan_of
from holdfast.engine.train.shards.inner_group import InnerGroup
from holdfast.engine.train.step.gradient_digest import ALWAYS_BYTES, AT_ONCE_BYTES, PartDigest
from holdfast.reports.commands.compare_command import compare_runs
from ledger_kit import audit, entry, write
from places import ROOT

__all__ = ["fake_gpu"]
CYCLE = 8
STEPS = 12
Capsys = pytest.CaptureFixture[str]


# ---------------------------------------------------------------- what a digest sees


def digest(parts: list[torch.Tensor], step: int = 0, cycle: int = CYCLE) -> int:
    return PartDigest(cycle).of(step, enumerate(parts))


def with_flipped_bit(flat: torch.Tensor, byte: int) -> torch.Tensor:
    found = flat.clone()
    found.view(-1).view(torch.uint8)[byte] ^= 16
    return found


KINDS = (torch.float32, torch.bfloat16, torch.float64, torch.complex64)


@pytest.mark.parametrize("size", [CYCLE * ALWAYS_BYTES, CYCLE * AT_ONCE_BYTES // 2])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_each_bit_is_seen_in_one_step_of_a_cycle(kind: torch.dtype, size: int) -> None:
    flat = torch.randn(size // kind.itemsize + 5).to(kind)
    cycle = range(100, 100 + CYCLE)
    for byte in (0, 12345, flat.nbytes // 2, flat.nbytes - 1):
        wrong = with_flipped_bit(flat, byte)
        assert sum(digest([flat], s) != digest([wrong], s) for s in cycle) == 1
        assert digest([flat], 3, cycle=1) != digest([wrong], 3, cycle=1)


def test_small_buckets_are_seen_whole_in_each_step() -> None:
    flat = torch.randn(ALWAYS_BYTES // 4 + 1)
    for step in range(CYCLE):
        assert digest([flat], step) != digest([with_flipped_bit(flat, 77)], step)


def test_buckets_come_in_any_order_and_are_told_apart() -> None:
    a, b = torch.randn(2, 100)
    one, other = PartDigest(CYCLE), PartDigest(CYCLE)
    assert one.of(5, [(0, a), (1, b)]) == other.of(5, [(1, b), (0, a)])
    assert one.of(5, [(0, a), (1, b)]) != one.of(5, [(0, b), (1, a)])


def test_without_a_cycle_nothing_is_digested_and_with_one_something_always_is() -> None:
    assert digest([torch.randn(9)], cycle=0) == 0
    assert digest([]) != 0
    assert digest([torch.empty(0)]) != 0
    assert all(0 < digest([torch.full((9,), float(k))]) < 1 << 63 for k in range(100))


def test_a_part_on_a_gpu_is_summed_there(fake_gpu: torch.device) -> None:
    flat = torch.randn(CYCLE * AT_ONCE_BYTES // 8)
    wrong = with_flipped_bit(flat, 12345)
    found = [[digest([on_gpu(each)], step) for step in range(CYCLE)] for each in (flat, wrong)]
    assert sum(a != b for a, b in zip(*found, strict=True)) == 1
    assert all(each > 0 for each in found[0])
    assert found[0] != [digest([flat], step) for step in range(CYCLE)]


# ---------------------------------------------------------------- copies of one run


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (StepDigests(gradients=(1, 2, 3, 5), sum=9), "in gradients"),
        (StepDigests(gradients=(1, 2, 3, 4), sum=8), "in sum"),
        (StepDigests(), "in gradients, sum"),
    ],
)
def test_workers_must_have_recorded_the_same(other: StepDigests, told: str, tmp_path: Path) -> None:
    same = StepDigests(gradients=(1, 2, 3, 4), sum=9)
    for worker in (0, 1):
        write(tmp_path, worker, [replace(entry(0), of=same), replace(entry(1), of=same)])
    assert audit(tmp_path).ok
    write(tmp_path, 2, [replace(entry(0), of=same), replace(entry(1), of=other)])
    (finding,) = audit(tmp_path).findings
    assert finding.startswith("worker-00002-00001.jsonl:3: step 1 differs from")
    assert finding.endswith(told)


def test_there_is_one_digest_for_each_virtual_rank(tmp_path: Path) -> None:
    write(tmp_path, 0, [replace(entry(0), of=StepDigests(gradients=(1, 2, 3), sum=9))])
    (finding,) = audit(tmp_path).findings
    assert finding.endswith("step 0 has 3 gradients for 4 virtual ranks")


# ---------------------------------------------------------------- two runs


def run_of(states: list[int], sums: list[int], digest_steps: int) -> RunSteps:
    """Return a run whose steps began with these states, and had these sums (0: no digests)."""
    found = RunSteps(
        "run", HeaderLine(seed=1, virtual_ranks=1, plan={}, worker=0, incarnation=1, format=3)
    )
    assert found.header is not None
    found.header.digest_steps = digest_steps
    for step, (state, total) in enumerate(zip(states, sums, strict=True)):
        found.steps[step] = StepLine(
            step=step,
            view=1,
            hosts=((0, 1),),
            counts=(1,),
            digests=(f"{1:016x}",),
            loss=(0.5).hex(),
            losses=f"{1:016x}",
            state=f"{state:016x}",
            gradients=f"{total:016x}" if total else "",
            sum=f"{total:016x}",
        )
    return found


@pytest.mark.parametrize(
    ("sums", "digest_steps", "cycle", "kind", "told"),
    [
        ([1, 1, 1], 1, 1, "update", "the update of step 1 differs"),
        ([1, 1, 1], 1, 2, "update", "the update of one of steps 0 to 1 differs"),
        ([1, 1, 1], 4, 1, "state", "step 2 began with another state"),
        ([1, 0, 1], 1, 1, "state", "step 2 began with another state"),
    ],
)
def test_the_update_differs_if_the_sums_before_it_do_not(
    sums: list[int], digest_steps: int, cycle: int, kind: str, told: str
) -> None:
    ours = run_of([1, 1, 1], sums, digest_steps)
    theirs = run_of([1, 1, 2], sums, digest_steps)
    first = compare_runs(ours, theirs, cycle).first
    assert first is not None
    assert (first.step, first.kind) == (2, kind)
    assert told in first.text


def test_other_states_at_the_first_step_are_no_ones_update() -> None:
    first = compare_runs(run_of([1], [1], 1), run_of([2], [1], 1), 1).first
    assert first is not None
    assert first.kind == "state"


def test_digests_of_other_parts_are_not_compared() -> None:
    found = compare_runs(run_of([1, 1], [1, 1], 64), run_of([1, 1], [2, 2], 1), 1)
    assert (found.first, found.digest_steps) == (None, (64, 1))


WHOLE = ("--digest-steps", "1", "--fingerprint-steps", "1")


def trained(path: Path, nproc: int, faults: str = "", options: tuple[str, ...] = WHOLE) -> Path:
    """Return the directory of a run of the test's trainer, disturbed by these faults."""
    path.mkdir()
    words = [str(SCRIPTS / "trainer.py"), "--steps", str(STEPS)]
    flags = ["--nproc", str(nproc), "--virtual", "4", *options]
    if faults:
        (path / "faults.txt").write_text(faults)
        flags += ["--faults", str(path / "faults.txt")]
    with LocalRun(path / "run", flags, words) as run:
        finish(run)
    assert main(["ledger", "verify", str(path / "run")]) == 0
    return path / "run"


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a run without errors, on one worker."""
    return trained(tmp_path_factory.mktemp("clean") / "job", 1)


def first_difference(ours: Path, theirs: Path, capsys: Capsys) -> dict[str, object]:
    capsys.readouterr()
    assert main(["compare", str(ours), str(theirs), "--json"]) == 1
    found: dict[str, object] = json.loads(capsys.readouterr().out)["first_difference"]
    return found


def test_a_wrong_gradient_is_named_with_its_worker(
    clean: Path, tmp_path: Path, capsys: Capsys
) -> None:
    other = trained(tmp_path / "job", 2, "worker 1 step 7 flip gradient\n")
    first = first_difference(clean, other, capsys)
    assert (first["step"], first["kind"]) == (7, "gradient")
    vranks, text = first["vranks"], str(first["text"])
    assert isinstance(vranks, list)
    (vrank,) = vranks
    assert read_steps(other).steps[7].hosts[vrank][0] == 1
    assert f"step 7: the gradient of virtual rank {vrank} differs, from the same samples" in text
    assert f"worker 0 computed it in {clean}, worker 1 in {other}" in text
    assert main(["replay", str(other), "--step", "7", "--vrank", str(vrank)]) == 1
    told = capsys.readouterr().out
    assert f"NOT THE SAME: step 7: the gradient of virtual rank {vrank} differs" in told
    assert f"step 7, virtual rank {vrank}: 6 samples" in told
    assert "gradient (digest" in told


@pytest.mark.slow
def test_a_wrong_sum_of_right_gradients_is_named(
    clean: Path, tmp_path: Path, capsys: Capsys
) -> None:
    """A partial sum arrives damaged at the worker that adds it, which sends the sum to all."""
    other = trained(tmp_path / "job", 2, "worker 1 step 7 flip received\n")
    first = first_difference(clean, other, capsys)
    assert (first["step"], first["kind"]) == (7, "sum")


@pytest.mark.slow
def test_a_state_that_changed_by_itself_is_told_from_a_wrong_sum(
    clean: Path, tmp_path: Path, capsys: Capsys
) -> None:
    other = trained(tmp_path / "job", 1, "worker 0 step 7 flip parameter\n")
    first = first_difference(clean, other, capsys)
    assert (first["step"], first["kind"]) == (7, "update")
    assert "the update of step 6 differs, or something has changed the state after it" in str(
        first["text"]
    )


@pytest.mark.slow
def test_people_are_told_what_is_not_compared(clean: Path, tmp_path: Path, capsys: Capsys) -> None:
    other = trained(tmp_path / "job", 1, options=("--digest-steps", "0", *WHOLE[2:]))
    header = next(read_lines(next((other / "ledger").iterdir())))
    assert isinstance(header, HeaderLine)
    assert header.digest_steps == 0
    assert not any(has_digests(line) for line in read_steps(other).steps.values())
    for ours, told in ((clean, "--digest-steps 1 and 0"), (other, "have no digests of them")):
        capsys.readouterr()
        assert main(["compare", str(ours), str(other)]) == 0
        assert told in capsys.readouterr().out


# ---------------------------------------------------------------- kinds of jobs


ROUNDS_AND_ROWS = """
import sys, torch, holdfast
from torch import nn
job = holdfast.join(seed=3)
torch.manual_seed(0)
table, one, two = nn.Embedding(50, 4, sparse=True), nn.Linear(4, 4), nn.Linear(4, 1)
optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (table, one, two)]
named = {f"optimizer{i}": each for i, each in enumerate(optimizers)}
job.protect(table=table, one=one, two=two, **named)
keys = torch.randint(0, 50, (64,))
data = job.batches(torch.utils.data.TensorDataset(keys, torch.randn(64, 1)), batch_size=3)
for step in job.steps(data, until=6):
    for names in (("table", "one"), ("two",)):
        for inputs, targets in step.round(*names):
            step.backward((two(torch.tanh(one(table(inputs)))) - targets).square().mean())
        for each, name in zip(optimizers, ("table", "one", "two")):
            if name in names:
                each.step()
        for each in optimizers:
            each.zero_grad()
    job.agree(step.index)
"""


def compared(paths: list[Path], capsys: Capsys, *, steps: int) -> None:
    """Check that runs of one job have the same digests in all steps."""
    for path in paths:
        found = read_steps(path).steps
        assert len(found) == steps
        assert all(has_digests(line) for line in found.values())
        assert verify(path, plan_of).ok
    capsys.readouterr()
    assert main(["compare", *map(str, paths)]) == 0
    assert f"do not differ in their {steps} common steps" in capsys.readouterr().out


@pytest.mark.slow
def test_rounds_and_sparse_rows_have_the_same_digests_on_any_number_of_workers(
    tmp_path: Path, capsys: Capsys
) -> None:
    (tmp_path / "job.py").write_text(ROUNDS_AND_ROWS)
    for nproc in (1, 2):
        options = ["--nproc", str(nproc), "--virtual", "4", *WHOLE]
        with LocalRun(tmp_path / str(nproc), options, [str(tmp_path / "job.py")]) as run:
            finish(run)
    compared([tmp_path / "1", tmp_path / "2"], capsys, steps=18)
    for step, line in read_steps(tmp_path / "2").steps.items():
        assert bool(line.gradients) == (step % 3 < 2)  # the third one only agrees on a value


@pytest.mark.slow
def test_a_sharded_optimizer_has_the_same_digests(
    clean: Path, tmp_path: Path, capsys: Capsys
) -> None:
    options = ("--shard-optimizer", "--redundancy", "replicate:1", *WHOLE)
    other = trained(tmp_path / "job", 2, options=options)
    compared([clean, other], capsys, steps=STEPS)


@pytest.mark.slow
def test_states_with_digests_of_other_parts_are_not_compared(
    clean: Path, tmp_path: Path, capsys: Capsys
) -> None:
    other = trained(tmp_path / "job", 1, options=("--digest-steps", "1"))
    capsys.readouterr()
    assert main(["compare", str(clean), str(other)]) == 0
    told = capsys.readouterr().out
    assert "states were not compared: the runs differ in --fingerprint-steps or" in told
    assert "gradients and sums were not compared" not in told
    assert main(["compare", str(clean), str(other), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["states_compared"], found["digest_steps"]) == (False, [1, 1])


class Joined(InnerGroup):
    """Stands for a worker's process, next to other workers with these digests."""

    def __init__(self, *others: list[int]) -> None:
        self._others = others

    def _gather_all(self, mine: torch.Tensor) -> list[torch.Tensor]:
        return [mine, *map(torch.tensor, self._others)]


def test_a_joint_digest_depends_on_each_process_and_is_0_where_none_has_one() -> None:
    found = Joined([5, 7, 0]).join_digests([1, 2, 0])
    others = [Joined([5, 8, 0]), Joined([7, 5, 0]), Joined([5, 7, 1]), Joined([5, 7, 0], [0, 0, 0])]
    for k, other in enumerate(other.join_digests([1, 2, 0]) for other in others):
        assert [a == b for a, b in zip(found, other, strict=True)] == [
            [True, False, True],
            [False, False, True],
            [True, True, False],
            [False, False, True],
        ][k]
    assert found[2] == 0
    assert all(0 < each < 1 << 63 for each in found[:2])


@pytest.mark.slow
def test_workers_of_several_processes_record_one_digest_of_all_they_hold(
    tmp_path: Path, capsys: Capsys
) -> None:
    example = ROOT / "examples" / "fsdp.py"
    for nproc in (1, 2):
        options = ["--nproc", str(nproc), "--procs-per-worker", "2", "--virtual", "4", *WHOLE]
        words = [str(example), "--steps", "6"]
        with LocalRun(tmp_path / str(nproc), options, words) as run:
            finish(run)
    compared([tmp_path / "1", tmp_path / "2"], capsys, steps=6)
    first = read_steps(tmp_path / "1").steps[0]
    assert first.place == Place(0, 0)
    assert len(set(first.all_gradients())) == 4


def with_values_at_the_end(told: str) -> RunSteps:
    """Return a run whose last step only exchanges values."""
    found = run_of([1, 1], [1, 1], 1)
    found.steps[2] = StepLine(
        step=2,
        view=1,
        hosts=((0, 1),),
        counts=(0,),
        digests=(f"{0:016x}",),
        loss=(0.0).hex(),
        uses=Uses.NO_SAMPLES,
        told=told,
    )
    return found


def test_a_run_that_ends_with_an_exchange_of_values_has_the_losses_of_its_tasks() -> None:
    found = compare_runs(with_values_at_the_end(""), with_values_at_the_end(""), 1)
    assert (found.first, found.has_losses) == (None, True)
    older = with_values_at_the_end("")
    older.steps[0].losses = ""
    assert not compare_runs(older, with_values_at_the_end(""), 1).has_losses


def test_another_agreed_value_is_named() -> None:
    first = compare_runs(with_values_at_the_end("3"), with_values_at_the_end("4"), 1).first
    assert first is not None
    assert (first.step, first.kind) == (2, "values")
    assert "agreed on 3 in run and on 4 in run" in first.text
