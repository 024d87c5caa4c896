"""Jobs that save checkpoints, and continue after the loss of every worker or process."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from conftest import RUN_S, SCRIPTS, finish
from holdfast.cli.main import main
from holdfast.engine.commands.run_command import make_spec, parser
from holdfast.engine.core.policies import CoordinatorPolicy
from holdfast.engine.fleet.cluster_manager import PLAN_FILE
from holdfast.engine.host.lifetime import SAME_S
from holdfast.engine.net.secret import SECRET_BYTES_MIN
from holdfast.engine.runtime.local_run import LocalRun, strike
from holdfast.engine.runtime.rundir import RunDir
from holdfast.engine.runtime.user_script import SOURCES_FILE, changed_sources
from holdfast.engine.state.store.checkpoints import Checkpoints
from holdfast.engine.state.store.open import open_storage
from holdfast.engine.train.script.script_state import MadeSettings
from support import SPEC, until

STEPS = 40
WORDS = (str(SCRIPTS / "trainer.py"), "--steps", str(STEPS), "--task-s", "0.02")


def saving(tmp_path: Path, store: str = "store", nproc: int = 2) -> LocalRun:
    options = ["--nproc", str(nproc), "--virtual", "4", "--save-every", "5"]
    return LocalRun(tmp_path / "run", [*options, "--store", str(tmp_path / store)], WORDS)


def find_resumed(run: LocalRun) -> LocalRun:
    return LocalRun(run.run_dir.path, [], [], command=("resume", str(run.run_dir.path)))


def steps(tmp_path: Path) -> list[int]:
    return Checkpoints(open_storage(str(tmp_path / "store"))).steps()


def until_saved(run: LocalRun, tmp_path: Path, step: int) -> None:
    run.until(lambda: max(steps(tmp_path), default=0) >= step, RUN_S, f"checkpoint {step}")


def kill_all(run: LocalRun) -> None:
    """Kill the launcher; wait until the kernel has ended all its processes, one after the other."""
    strike(run.pid)
    until(lambda: not run.leftovers(), "the end of all processes")


def last_view(run: LocalRun) -> str:
    return str(run.events("view")[-1]["text"])


@pytest.mark.slow
def test_saving_changes_nothing_and_keeps_the_newest(
    tmp_path: Path, reference: Callable[[int], str], capsys: pytest.CaptureFixture[str]
) -> None:
    with saving(tmp_path) as run:
        assert finish(run) == reference(STEPS)
    assert len(steps(tmp_path)) == 3
    assert all(step % 5 == 0 for step in steps(tmp_path))
    assert main(["run", "--store", str(tmp_path / "store"), *WORDS[:1]]) == 2
    assert "already holds checkpoints, up to step 35" in capsys.readouterr().err
    assert main(["ckpt", "verify", str(tmp_path / "store")]) == 0
    assert main(["ckpt", "show", str(tmp_path / "store")]) == 0
    assert "model.first.weight" in capsys.readouterr().out


@pytest.mark.slow
def test_without_a_number_of_steps_a_job_saves_as_often_as_pays(
    tmp_path: Path, reference: Callable[[int], str]
) -> None:
    options = ["--nproc", "2", "--virtual", "4", "--store", str(tmp_path / "store")]
    with LocalRun(tmp_path / "run", [*options, "--save-between", "0.1", "0.2"], WORDS) as run:
        assert finish(run) == reference(STEPS)
    assert len(steps(tmp_path)) > 1
    told = [event["text"] for event in run.events("save")]
    assert any("every 0.2 s: a save costs" in text for text in told), told
    assert any("one of 2 workers is lost every" in text for text in told), told
    told = [event["text"] for event in run.events("save")]
    assert any("is saved, in" in text and "one of 2 workers is lost every" in text for text in told)


@pytest.mark.slow
def test_when_all_workers_are_lost_the_newest_checkpoint_is_begun_from(
    tmp_path: Path, reference: Callable[[int], str]
) -> None:
    with saving(tmp_path) as run:
        until_saved(run, tmp_path, 10)
        for pid in run.members().values():
            strike(pid, signal.SIGSTOP)
        for pid in run.members().values():
            strike(pid)
        assert finish(run) == reference(STEPS)
    (view,) = [e["text"] for e in run.events("view") if "every worker was lost" in e["text"]]
    # The newest that a worker has reported; it may have been stopped before it could report 10.
    assert re.search(r"from the checkpoint of step (5|10|15)\b", view), view


@pytest.mark.parametrize(
    "nproc", [pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
def test_a_job_whose_every_process_was_killed_is_resumed_bit_for_bit(
    nproc: int, tmp_path: Path, reference: Callable[[int], str]
) -> None:
    with saving(tmp_path, nproc=nproc) as run:
        until_saved(run, tmp_path, 10)
        kill_all(run)
    with find_resumed(run) as again:
        until_saved(again, tmp_path, 20)
        assert "from the checkpoint of step" in last_view(again)
        kill_all(again)
    with find_resumed(run) as third:
        assert finish(third) == reference(STEPS)
    assert main(["ledger", "verify", str(run.run_dir.path)]) == 0


def test_an_interrupted_job_can_be_resumed_and_a_finished_one_not(
    tmp_path: Path, reference: Callable[[int], str], capsys: pytest.CaptureFixture[str]
) -> None:
    with saving(tmp_path) as run:
        until_saved(run, tmp_path, 5)
        assert main(["resume", str(run.run_dir.path)]) == 2
        assert "is running" in capsys.readouterr().err
        assert run.members()  # it is still to be reached
        run.signal(signal.SIGINT)
        assert run.wait(RUN_S) == 130
    with find_resumed(run) as again:
        assert finish(again) == reference(STEPS)
    assert main(["resume", str(run.run_dir.path)]) == 2
    assert "has succeeded" in capsys.readouterr().err


@pytest.mark.slow
def test_a_job_is_not_resumed_while_its_store_cannot_be_written(
    tmp_path: Path, reference: Callable[[int], str], capsys: pytest.CaptureFixture[str]
) -> None:
    with saving(tmp_path) as run:
        until_saved(run, tmp_path, 5)
        kill_all(run)
    (tmp_path / "store").rename(tmp_path / "away")
    (tmp_path / "store").touch()
    assert main(["resume", str(run.run_dir.path)]) == 2
    assert f"--store {tmp_path / 'store'} cannot be written" in capsys.readouterr().err
    (tmp_path / "store").unlink()
    (tmp_path / "away").rename(tmp_path / "store")
    with find_resumed(run) as again:
        assert finish(again) == reference(STEPS)


def test_a_writer_that_cannot_write_to_its_store_says_so_before_the_first_checkpoint(
    tmp_path: Path,
) -> None:
    """Its node may lack a mount, or rights, that the node has where the job was started."""
    script = tmp_path / "script.py"
    script.touch()
    run_dir = RunDir(tmp_path / "run")
    options = ["--store", str(tmp_path / "store"), str(script)]
    run_dir.create(make_spec(parser().parse_args(options)), os.urandom(32))
    shutil.rmtree(tmp_path / "store", ignore_errors=True)
    (tmp_path / "store").touch()  # in the place of the folder
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    module = "holdfast.engine.runtime.node.checkpoint_writer"
    command = [sys.executable, "-m", module, str(run_dir.path)]
    with (
        subprocess.Popen(
            [*command, str(theirs.fileno()), str(os.getpid())],
            pass_fds=[theirs.fileno()],
            stderr=subprocess.PIPE,
            text=True,
        ) as writer,
        ours,
    ):
        theirs.close()
        assert writer.stderr is not None
        line = writer.stderr.readline()
        assert "this node can save no checkpoints" in line
        assert str(tmp_path / "store") in line
        ours.close()
        assert writer.wait(RUN_S) == 0


@pytest.mark.slow
def test_a_second_interrupt_does_not_wait_for_a_last_checkpoint(
    tmp_path: Path, reference: Callable[[int], str]
) -> None:
    with saving(tmp_path) as run:
        until_saved(run, tmp_path, 5)
        for pid in run.members().values():
            strike(pid, signal.SIGSTOP)  # so that none can be made
        saved = steps(tmp_path)
        run.signal(signal.SIGINT)
        again_at = time.monotonic() + 2 * SAME_S  # before that it may be a copy of the first one
        run.until(lambda: run.events("stop"), RUN_S, "the order for a last checkpoint")
        run.until(lambda: time.monotonic() > again_at, RUN_S, "the time of a second one")
        run.signal(signal.SIGINT)
        assert run.wait(RUN_S) == 130
    first, second = run.events("stop")
    assert (first["text"], second["text"]) == (
        "the job stops after a last checkpoint",
        "interrupted",
    )
    assert second["time"] - first["time"] < CoordinatorPolicy(virtual_ranks=4).grace_s
    assert run.run_dir.outcome() == "interrupted"
    assert steps(tmp_path) == saved
    with find_resumed(run) as again:
        assert finish(again) == reference(STEPS)


@pytest.mark.slow
def test_a_preempted_job_saves_before_it_stops(
    tmp_path: Path, reference: Callable[[int], str]
) -> None:
    options = ["--nproc", "2", "--virtual", "4", "--save-every", "1000"]
    with LocalRun(tmp_path / "run", [*options, "--store", str(tmp_path / "store")], WORDS) as run:
        run.until(lambda: run.members() and run.status()["step"] > 5, RUN_S, "some steps")
        run.signal(signal.SIGTERM)
        assert run.wait(RUN_S) == 130
    (step,) = steps(tmp_path)
    assert step > 5
    with find_resumed(run) as again:
        assert finish(again) == reference(STEPS)
        assert f"from the checkpoint of step {step}" in str(again.events("view"))
    assert main(["ledger", "verify", str(run.run_dir.path)]) == 0


@pytest.mark.slow
def test_a_rotten_checkpoint_is_passed_over_for_an_older_one(
    tmp_path: Path, reference: Callable[[int], str]
) -> None:
    with saving(tmp_path) as run:
        until_saved(run, tmp_path, 15)
        kill_all(run)
    newest = max(steps(tmp_path))
    shares = sorted((tmp_path / "store" / "packs").glob(f"{newest:012d}-*"))
    assert len(shares) == 2  # each worker's
    pack = shares[-1]
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.write_bytes(bytes(data))
    with find_resumed(run) as again:
        assert finish(again) == reference(STEPS)
    begun = [e["text"] for e in again.events("view") if "every worker was lost" in e["text"]]
    assert f"from the checkpoint of step {newest - 5}" in begun[-1]


@pytest.mark.slow
def test_a_store_that_cannot_be_written_costs_checkpoints_only(
    tmp_path: Path, reference: Callable[[int], str]
) -> None:
    store = tmp_path / "store"
    with saving(tmp_path) as run:
        run.until(run.members, RUN_S, "the first view")
        store.rename(tmp_path / "gone")
        store.write_text("a file in the way")
        assert finish(run) == reference(STEPS)
    found = [event["text"] for event in run.events("unsaved")]
    assert any("is not saved: cannot write" in text for text in found)
    assert len(found) <= 4, "the first failure is told, then every tenth, hundredth, ..."
    ended = "\n".join(run.err)
    assert "no later step was saved either" in ended
    assert "no incidents" not in ended


@pytest.mark.slow
def test_without_a_store_a_killed_job_is_resumed_from_the_start(
    tmp_path: Path, reference: Callable[[int], str]
) -> None:
    run = LocalRun(tmp_path / "run", ["--nproc", "2", "--virtual", "4"], WORDS)
    with run:
        run.until(lambda: run.members() and run.status()["step"] > 5, RUN_S, "some steps")
        kill_all(run)
    with find_resumed(run) as again:
        assert finish(again) == reference(STEPS)
    assert main(["ledger", "verify", str(run.run_dir.path)]) == 0


EDITED = """
import torch
import holdfast

job = holdfast.join()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
job.protect(model=model, optimizer=optimizer, schedule=schedule)
data = torch.utils.data.TensorDataset(torch.ones(8, 2))
for step in job.steps(job.batches(data, 2), until=8):
    for (x,) in step:
        step.backward(model(x).mean())
    optimizer.step()
    schedule.step()
    if step.index == 6:
        raise RuntimeError("no room")
"""


@pytest.mark.slow
def test_what_was_changed_in_the_script_before_a_job_goes_on_is_named(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(EDITED)
    options = ["--nproc", "1", "--save-every", "2", "--store", str(tmp_path / "store")]
    with LocalRun(tmp_path / "run", options, (str(script),)) as run:
        assert run.wait(RUN_S) == 1
    edited = EDITED.replace("lr=0.5", "lr=0.25").replace("step_size=2", "step_size=3")
    script.write_text(edited.replace('raise RuntimeError("no room")', "pass"))
    with find_resumed(run) as again:
        assert again.wait(RUN_S) == 0, again.log()
    (told,) = (line for line in again.err if "the script has changed since the job began" in line)
    assert "optimizer.param_groups[0]['lr'] (0.5 before, 0.25 now)" in told
    assert "schedule['step_size'] (2 before, 3 now)" in told
    assert any("train.py changed since the run began" in line for line in again.err)


def test_the_settings_of_a_changed_script_are_found_once() -> None:
    job, here = MadeSettings(), MadeSettings()
    job.begin({"optimizer.lr": "0.5", "gone": "1", "same": "2"})
    here.begin({"optimizer.lr": "0.25", "new": "3", "same": "2"})
    assert here.describe_changed() == ""
    here.load_state_dict({})
    assert here.describe_changed() == "", "an older release has saved none"
    for _ in range(2):
        here.load_state_dict(job.state_dict())
    told = here.describe_changed()
    assert "optimizer.lr (0.5 before, 0.25 now)" in told
    assert "gone (1 before, missing now), new (missing before, 3 now)." in told
    assert here.state_dict() == job.state_dict()


def test_changed_files_of_a_script_are_found(tmp_path: Path) -> None:
    script, helper = tmp_path / "train.py", tmp_path / "model.py"
    script.write_text("import model")
    helper.write_text("WIDTH = 3")
    run_dir, spec = RunDir(tmp_path / "run"), replace(SPEC, cwd=str(tmp_path), script="train.py")
    run_dir.create(spec, b"s" * SECRET_BYTES_MIN)
    assert changed_sources(run_dir.path, tmp_path, spec.script) == []
    helper.write_text("WIDTH = 4")
    assert changed_sources(run_dir.path, tmp_path, spec.script) == ["model.py"]
    (run_dir.path / SOURCES_FILE).write_text("no JSON")
    assert changed_sources(run_dir.path, tmp_path, spec.script) == []


def test_what_a_resume_cannot_do_here_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    gone = RunDir(tmp_path / "gone")
    gone.create(replace(SPEC, cwd=str(tmp_path / "folder"), script=str(script)), bytes(32))
    assert main(["resume", str(gone.path)]) == 2
    assert (
        f"the job's folder {tmp_path / 'folder'} is not on this machine" in capsys.readouterr().err
    )
    launched = RunDir(tmp_path / "launched")
    launched.create(replace(SPEC, cwd=str(tmp_path), script=str(script)), bytes(32))
    (launched.path / PLAN_FILE).touch()
    assert main(["resume", str(launched.path), "--notices", "aws"]) == 2
    assert "--notices aws: the nodes of this job ask" in capsys.readouterr().err
