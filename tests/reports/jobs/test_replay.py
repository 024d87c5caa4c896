"""Steps of a run are computed again, and runs are compared, by their ledgers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from conftest import SCRIPTS, Start, finish, has_checkpoint
from holdfast.cli.main import main
from holdfast.engine.records.ledger import add_chain
from holdfast.engine.runtime.local_run import LocalRun, strike
from holdfast.engine.state.store.files import FileStorage
from holdfast.engine.state.store.manifest import manifest_name
from holdfast.engine.state.store.open import ForkedStorage

STEPS = 40


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run in which a worker was killed, with a checkpoint of step 24."""
    for _ in range(5):
        place = tmp_path_factory.mktemp("disturbed")
        options = ["--nproc", "2", "--virtual", "4", "--fingerprint-steps", "4"]
        options += ["--store", str(place / "store"), "--save-every", "12"]
        words = [str(SCRIPTS / "trainer.py"), "--steps", str(STEPS), "--task-s", "0.02"]
        with LocalRun(place / "run", options, words) as run:
            members = run.until_members(2)
            run.until(lambda run=run: run.status()["step"] >= 5, 60, "some steps")
            assert strike(members[1])
            finish(run)
        if has_checkpoint(place / "store", 24):
            return place / "run"
    raise AssertionError("no run of five has saved step 24")


@pytest.fixture
def copy(disturbed: Path, tmp_path: Path) -> Path:
    """A copy of that run's directory, to be changed."""
    return shutil.copytree(disturbed, tmp_path / "copy")


def rewrite(run: Path, step: int, change: dict[str, object]) -> None:
    """Change a step in all copies of the ledger, and chain the lines again."""
    for path in (run / "ledger").glob("*.jsonl"):
        chain, lines = "", []
        for line in path.read_bytes().splitlines():
            found = json.loads(line)
            found.pop("chain", None)
            if found.get("step") == step and found["kind"] == "step":
                found |= change
            whole, chain = add_chain(json.dumps(found, separators=(",", ":")).encode(), chain)
            lines.append(whole + b"\n")
        path.write_bytes(b"".join(lines))


@pytest.mark.slow
def test_steps_of_a_disturbed_run_are_computed_again(
    disturbed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ledger", "verify", str(disturbed)]) == 0
    words = ["replay", str(disturbed), "--step", "30", "--step", "3", "--vrank", "2"]
    assert main(words) == 0
    out = capsys.readouterr().out
    # From the beginning up to 3, and from the checkpoint of step 24 up to 30.
    assert "11 steps computed again, with the recorded result: 0-3, 24-30" in out
    assert "step 30, virtual rank 2:" in out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "vranks"),
    [("losses", "task", [1]), ("gradients", "gradient", [1]), ("sum", "sum", [])],
)
def test_an_altered_step_is_found(
    name: str, kind: str, vranks: list[int], copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (line, *_) = [
        json.loads(line)
        for path in (copy / "ledger").glob("*.jsonl")
        for line in path.read_bytes().splitlines()
        if b'"step":26,' in line
    ]
    old = line[name]
    at = 16 if vranks else 0
    flipped = f"{int(old[at : at + 16], 16) ^ 1:016x}"
    rewrite(copy, 26, {name: old[:at] + flipped + old[at + 16 :]})
    assert main(["replay", str(copy), "--step", "28", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] == [24, 25]
    (difference,) = found["differences"]
    assert (difference["step"], difference["kind"], difference["vranks"]) == (26, kind, vranks)


STOPPED = """
import sys, torch, holdfast
from pathlib import Path
job, mark = holdfast.join(seed=1), Path(sys.argv[1])
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job.protect(model=model, optimizer=optimizer)
data = job.batches(torch.utils.data.TensorDataset(torch.arange(64.0).reshape(32, 2)), batch_size=2)
for step in job.steps(data, until=1000):
    for (x,) in step:
        step.backward(model(x / 64).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    if step.index == 9:
        mark.touch()
    if mark.exists():
        job.stop()
"""


@pytest.mark.slow
def test_a_replay_does_not_stop_where_the_script_would(
    tmp_path: Path, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "job.py"
    script.write_text(STOPPED)
    options = ("--virtual", "2")
    with start(str(tmp_path / "mark"), nproc=1, script=str(script), options=options) as run:
        finish(run)
    assert main(["replay", str(run.run_dir.path), "--step", "9"]) == 0
    assert "10 steps computed again, with the recorded result: 0-9" in capsys.readouterr().out


@pytest.mark.slow
def test_a_random_share_of_steps_is_audited(
    disturbed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", str(disturbed), "--share", "0.1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["chosen"]) == STEPS // 10
    assert set(found["chosen"]) <= set(found["steps"])


def test_two_runs_of_one_job_are_compared(
    disturbed: Path, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", str(disturbed), str(copy)]) == 0
    assert "do not differ in their 40 common steps" in capsys.readouterr().out
    for step, change, told in (
        (30, {"state": f"{7:016x}"}, "step 30 began with another state\n"),
        (20, {"loss": (0.5).hex()}, "step 20: the loss is"),
        (
            11,
            {"digests": [f"{9:016x}"] * 4},
            "step 11: virtual ranks 0, 1, 2, 3 used other samples",
        ),
        (5, {"sum": f"{3:016x}"}, "step 5: the sum of the gradients differs"),
        (
            4,
            {"gradients": f"{5:016x}" * 4},
            "step 4: the gradients of virtual ranks 0, 1, 2, 3 differ, from the same samples, and "
            "the sum of all is the same; worker",
        ),
        (2, {"handed": {"3": f"{1:016x}"}}, "step 2: virtual rank 3 handed over other values"),
    ):
        rewrite(copy, step, change)
        assert main(["compare", str(disturbed), str(copy)]) == 1
        assert f"the first difference: {told}" in capsys.readouterr().out


def test_a_flipped_bit_is_where_two_runs_differ(
    start: Start, disturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = tmp_path / "faults.txt"
    faults.write_text("worker 0 step 9 flip gradient\n")
    words = ("--steps", str(STEPS))
    options = ("--faults", str(faults), "--fingerprint-steps", "4")
    with start(*words, nproc=1, options=options) as run:
        run.wait(100)
    assert main(["compare", str(disturbed), str(run.run_dir.path), "--json"]) == 1
    first = json.loads(capsys.readouterr().out)["first_difference"]
    # Its buckets are too small to be digested in parts: the first wrong gradient is found.
    assert (first["step"], first["kind"]) == (9, "gradient")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["replay", "RUN", "--step", "99"], "has no step 99: it has steps 0 to 39"),
        (["replay", "RUN", "--step", "3", "--vrank", "4"], "--vrank 4: the job has virtual ranks"),
        (["replay", "RUN", "--step", "3", "--timeout", "0"], "--timeout 0"),
        (["audit", "RUN", "--share", "0"], "--share 0"),
        (["compare", "RUN", "nowhere"], "there is no run directory nowhere"),
        (["replay", "nowhere", "--step", "3"], "there is no run directory nowhere"),
    ],
)
def test_bad_input_is_named(
    words: list[str], told: str, disturbed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(disturbed) if word == "RUN" else word for word in words]) == 2
    assert told in capsys.readouterr().err


def test_runs_of_two_jobs_are_not_compared(
    copy: Path, disturbed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (copy / "ledger").glob("*.jsonl"):
        path.write_bytes(path.read_bytes().replace(b'"seed":0', b'"seed":1'))
    assert main(["compare", str(disturbed), str(copy)]) == 2
    assert "are runs of two jobs: the seed 0 and 1" in capsys.readouterr().err


def test_a_fork_of_a_storage_leaves_the_original_alone(tmp_path: Path) -> None:
    original, own = FileStorage(tmp_path / "a"), FileStorage(tmp_path / "b")
    for step in (3, 5, 8):
        original.put(manifest_name(step), [b"old"])
    original.put("packs/x", [b"pack"])
    fork = ForkedStorage(original, own, 5)
    assert fork.names("") == [manifest_name(5), "packs/x"]
    assert fork.size(manifest_name(8)) is None
    fork.put(manifest_name(8), [b"newer"])
    fork.put("packs/y", [b"own"])
    fork.delete(manifest_name(5))
    assert fork.names("") == [manifest_name(5), manifest_name(8), "packs/x", "packs/y"]
    read = bytearray(5)
    fork.read(manifest_name(8), 0, memoryview(read))
    assert read == b"newer"
    assert original.names("packs/") == ["packs/x"]
    assert original.size(manifest_name(8)) == 3
