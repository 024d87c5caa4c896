"""The examples run as they are, and their result does not depend on the number of workers."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import RUN_S, finish
from example_kit import ARGS, EXAMPLES
from holdfast.engine.records.ledger_audit import verify
from holdfast.engine.runtime.local_run import LocalRun
from holdfast.engine.train.data.sampling import plan_of

# They import much, or are covered by another example of the same kind.
SLOW = (
    *("digits.py", "fsdp.py", "finetune_transformers.py", "gan.py", "lightning_module.py"),
    *("grpo.py", "moco.py", "ppo.py", "word_lm.py"),  # run below
)


@pytest.mark.slow_with("gpt.py", "recommender.py", "stream.py")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in ARGS]
)
def test_the_last_line_does_not_depend_on_the_workers(name: str, tmp_path: Path) -> None:
    # Not imported here: an import changes the environment, and no worker could then be forked.
    if name == "digits.py" and importlib.util.find_spec("sklearn") is None:
        pytest.skip("scikit-learn is not installed")
    for package in ("transformers", "lightning"):
        if package in name and importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    last = []
    for workers in (1, 2):
        options = ["--nproc", str(workers), "--virtual", "2"]
        script = [str(EXAMPLES / name), *ARGS[name]]
        with LocalRun(tmp_path / f"{workers}", options, script) as run:
            last.append(finish(run))
    assert re.fullmatch("[0-9a-f]{64}", last[0])
    assert last[0] == last[1]


@pytest.mark.parametrize(
    ("name", "steps", "samples"),
    [
        pytest.param("gan.py", 43, 21 * 4 * 8, marks=pytest.mark.slow),
        pytest.param("stream.py", 12, 12 * 4 * 2, marks=pytest.mark.slow),
    ],
)
def test_deaths_change_nothing(name: str, steps: int, samples: int, tmp_path: Path) -> None:
    """Every second step of the GAN is a round, and every fortieth an evaluation."""
    faults = tmp_path / "faults.txt"
    faults.write_text(f"worker 1 step 5 kill\nworker 0 step {steps - 3} kill\n")
    script, last = [str(EXAMPLES / name), *ARGS[name]], []
    for run_name, disturbed in (("quiet", []), ("faults", ["--faults", str(faults)])):
        # Late or slow, a worker would host no task of the step in which it is to be killed.
        hosts = ["--no-rebalance", "--speculation-budget", "0"]
        options = ["--nproc", "2", "--virtual", "4", *hosts, *disturbed]
        with LocalRun(tmp_path / run_name, options, script) as run:
            last.append(finish(run))
        report = verify(run.run_dir.path, plan_of)
        assert report.ok, report.findings
        assert (report.steps, report.samples) == (steps, samples)
    assert last[0] == last[1]
    assert len(run.events("lost")) == 2


# The examples whose virtual ranks keep states, or whose tasks hand over values.
TELLING = ("grpo.py", "moco.py", "ppo.py", "word_lm.py")
FAULTS = {
    1: "worker 0 step 3 kill\nworker 0 step 6 freeze\n",
    2: "worker 1 step 3 kill\nworker 0 step 6 freeze\n",
    3: "worker 1 step 3 freeze\nworker 2 step 6 kill\nworker 0 step 8 kill\n",
    4: "worker 1 step 3 kill\nworker 3 step 3 freeze\nworker 0 step 8 freeze\n",
}


@pytest.mark.slow_with("ppo.py")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "ppo.py" else [pytest.mark.slow]) for n in TELLING]
)
def test_states_that_virtual_ranks_keep_and_gather_survive_a_death_and_a_freeze(
    name: str, tmp_path: Path
) -> None:
    """Two workers of three are struck within steps in which they have changed their states."""
    faults = tmp_path / "faults.txt"
    faults.write_text("worker 1 step 4 kill\nworker 2 step 6 freeze\n")
    hosts = ["--no-rebalance", "--speculation-budget", "0"]
    script, last = [str(EXAMPLES / name), *ARGS[name]], []
    for workers, disturbed in ((1, []), (3, [*hosts, "--faults", str(faults)])):
        options = ["--nproc", str(workers), "--virtual", "4", *disturbed]
        with LocalRun(tmp_path / f"{workers}", options, script) as run:
            last.append(finish(run))
    assert re.fullmatch("[0-9a-f]{64}", last[0])
    assert last[0] == last[1]
    assert [event["worker"] for event in run.events("lost")] == [1, 2]
    assert "frozen" in run.events("lost")[1]["text"]


@pytest.mark.slow
@pytest.mark.timeout(6 * RUN_S)
@pytest.mark.parametrize("name", TELLING)
def test_kills_and_freezes_on_any_number_of_workers(name: str, tmp_path: Path) -> None:
    """A single worker is struck as well: it goes on from a checkpoint, with all states."""
    script = [str(EXAMPLES / name), *ARGS[name]]
    with LocalRun(tmp_path / "quiet", ["--nproc", "1", "--virtual", "4"], script) as run:
        quiet = finish(run)
    assert re.fullmatch("[0-9a-f]{64}", quiet)
    for workers, text in FAULTS.items():
        faults = tmp_path / f"faults{workers}.txt"
        faults.write_text(text)
        options = ["--nproc", str(workers), "--virtual", "4", "--faults", str(faults)]
        options += ["--no-rebalance", "--speculation-budget", "0"]
        options += ["--store", str(tmp_path / f"store{workers}"), "--save-every", "2"]
        with LocalRun(tmp_path / f"{workers}", options, script) as run:
            assert finish(run) == quiet, (workers, run.events())
        lost = run.events("lost")
        struck = [int(line.split()[1]) for line in text.splitlines()]
        assert sorted(event["worker"] for event in lost) == sorted(struck), (workers, lost)
        frozen = sum("frozen" in event["text"] for event in lost)
        assert frozen == text.count("freeze"), (workers, lost)
        report = verify(run.run_dir.path, plan_of)
        assert report.ok, (workers, report.findings)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_recommender_has_two_deaths_and_any_number_of_workers(tmp_path: Path) -> None:
    """The second one to die leads; the first one may have come back by then."""
    faults = tmp_path / "faults.txt"
    faults.write_text("worker 1 step 3 kill\nworker 0 step 8 kill\n")
    disturbed = ["--no-rebalance", "--speculation-budget", "0", "--faults", str(faults)]
    name, last = "recommender.py", []
    for workers, options in ((1, []), (2, []), (4, []), (4, disturbed)):
        flags = ["--nproc", str(workers), "--virtual", "4", *options]
        script = [str(EXAMPLES / name), *ARGS[name]]
        with LocalRun(tmp_path / f"{workers}{bool(options)}", flags, script) as run:
            last.append(finish(run))
    assert last == last[:1] * 4
    assert sorted(event["worker"] for event in run.events("lost")) == [0, 1]


@pytest.mark.slow
def test_a_sharded_example_runs_alone() -> None:
    command = [sys.executable, str(EXAMPLES / "fsdp.py"), "--steps", "10"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.startswith("step 10: loss")
    assert re.fullmatch("[0-9a-f]{64}", done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_an_example_runs_alone() -> None:
    command = [sys.executable, str(EXAMPLES / "gpt.py"), *ARGS["gpt.py"], "--print-every", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    lines = done.stdout.splitlines()
    assert [line.split()[:2] for line in lines[:2]] == [["step", "1"], ["step", "3"]]
    assert re.fullmatch("[0-9a-f]{64}", lines[-1])


@pytest.mark.slow
def test_without_scikit_learn_the_digits_say_so_in_one_line() -> None:
    code = (
        "import runpy, sys\n"
        "sys.modules['sklearn'] = None  # as if it were not installed\n"
        f"runpy.run_path({str(EXAMPLES / 'digits.py')!r}, run_name='__main__')\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert done.stderr == "digits.py needs scikit-learn: pip install scikit-learn\n"


def test_the_demo_runs_the_example_that_people_read() -> None:
    spec = importlib.util.find_spec("holdfast.lab.demo.gpt")
    assert spec is not None
    assert spec.origin is not None
    assert Path(spec.origin).read_bytes() == (EXAMPLES / "gpt.py").read_bytes()
