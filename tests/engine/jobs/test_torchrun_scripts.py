"""Scripts for torchrun run unchanged: equal results, through lost processes and nodes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import RUN_S, SCRIPTS, finish
from holdfast.engine.runtime.local_run import LocalRun, strike

DDP, FSDP, LEAVES, ODD, SAVES = (
    SCRIPTS / f"torchrun_{name}.py" for name in ("ddp", "fsdp", "leaves", "odd", "saves")
)


def compat(folder: Path, *words: str, nproc: int = 2, options: tuple[str, ...] = ()) -> LocalRun:
    flags = ["--compat", "--nproc", str(nproc), *options]
    return LocalRun(folder / "run", flags, words)


def ddp(folder: Path, epochs: int, step_s: float = 0.0) -> tuple[str, ...]:
    snapshot = str(folder / "snapshot.pt")
    words = ("--epochs", str(epochs), "--step-s", str(step_s), "--snapshot", snapshot)
    return str(DDP), *words


def digest_of(lines: list[str]) -> str:
    (line,) = [line for line in lines if line.startswith("digest ")]
    return line


def pids(run: LocalRun, after: int) -> dict[int, int]:
    """Return rank -> pid of processes that have done the epoch `after`, the newest ones."""
    words = [line.split() for line in list(run.out) if line.startswith("pid ")]
    return {int(rank): int(pid) for _, rank, pid, epoch in words if int(epoch) >= after}


def kill(run: LocalRun, rank: int, after: int, number: int = 9) -> None:
    found = run.until(lambda: pids(run, after).get(rank), RUN_S, f"epoch {after} of rank {rank}")
    assert strike(found, number)


def torchrun(*words: str, nproc: int = 2) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(nproc)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *words], check=True, capture_output=True, text=True, env=variables
    )
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the digest of six epochs of the DDP script on two processes, undisturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with compat(folder, *ddp(folder, 6)) as run:
        finish(run)
    return digest_of(run.out)


@pytest.mark.parametrize(
    "rank", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow)]
)
def test_a_rank_is_killed_and_all_go_on_from_their_snapshot(
    rank: int, tmp_path: Path, undisturbed: str
) -> None:
    with compat(tmp_path, *ddp(tmp_path, 6, 0.02)) as run:
        kill(run, rank, after=1)
        finish(run)
    assert digest_of(run.out) == undisturbed
    (restart,) = run.events("restart")
    assert restart["text"].startswith(f"rank {rank} on node0 failed: ended by SIGKILL")
    assert "restarts 1" in "".join(run.out)


@pytest.mark.slow
def test_torchrun_gives_the_same_bits(tmp_path: Path, undisturbed: str) -> None:
    assert digest_of(torchrun(*ddp(tmp_path, 6))) == undisturbed


@pytest.mark.slow
def test_a_sharded_model_is_killed_and_ends_as_under_torchrun(tmp_path: Path) -> None:
    words = (str(FSDP), "--steps", "8", "--folder")
    expected = digest_of(torchrun(*words, str(tmp_path / "torchrun")))
    with compat(tmp_path, *words, str(tmp_path / "holdfast")) as run:
        kill(run, 1, after=1)
        kill(run, 0, after=4)
        finish(run)
    assert digest_of(run.out) == expected
    assert len(run.events("restart")) == 2


@pytest.mark.slow
def test_a_process_finds_the_variables_that_torchrun_sets(tmp_path: Path) -> None:
    with compat(tmp_path, str(ODD), "tell", "--x", "1") as run:
        finish(run)
    found = [json.loads(line) for line in run.out if line.startswith("[")]
    variables, argv, path, ours = min(found, key=lambda each: each[0]["RANK"])
    assert variables == {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "ROLE_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_WORLD_SIZE": "2",
        "ROLE_NAME": "default",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
    }
    assert argv == [str(ODD), "tell", "--x", "1"]
    assert path == str(SCRIPTS)
    assert sorted(ours) == ["HOLDFAST_GROUP", "HOLDFAST_HEARTBEAT"]
    assert {each[0]["RANK"] for each in found} == {"0", "1"}


@pytest.mark.slow
def test_restarts_are_counted_for_the_script(tmp_path: Path) -> None:
    with compat(tmp_path, str(ODD), "count") as run:
        finish(run)
    assert sorted(line for line in run.out if line.startswith("done")) == [
        "done 0 of  2",
        "done 1 of  2",
    ]
    texts = [event["text"] for event in run.events("restart")]
    assert "rank 1 on node0 failed: the script ended with exit code 7" in texts[0]
    assert "in 0.5 s (2 of at most 3 without progress)" in texts[1]


@pytest.mark.slow
def test_an_error_comes_first_and_ends_the_job_after_some_restarts(tmp_path: Path) -> None:
    with compat(tmp_path, str(ODD), "raise", options=("--restarts-max", "1")) as run:
        assert run.wait(RUN_S) == 1
    assert run.leftovers() == []
    told = [line for line in run.err if line.startswith("holdfast: rank 1 on node0 failed")]
    assert told == [
        "holdfast: rank 1 on node0 failed; the group is restarted "
        "(1 of at most 1 without progress)",
        "holdfast: rank 1 on node0 failed, after 1 restarts without progress in between; "
        "--restarts-max allows more",
    ]
    assert run.err[-1] == "ValueError: these data are not to be trained on"
    assert sum(line == run.err[-1] for line in run.err) == 2


@pytest.mark.slow
def test_a_crash_at_import(tmp_path: Path) -> None:
    with compat(tmp_path, str(ODD), "import", options=("--restarts-max", "2")) as run:
        assert run.wait(RUN_S) == 1
    assert run.err[-1] == "ModuleNotFoundError: No module named 'no_such_package'"
    assert len(run.events("restart")) == 2
    assert run.leftovers() == []


@pytest.mark.slow
def test_a_group_that_hangs_is_restarted(tmp_path: Path) -> None:
    with compat(tmp_path, str(ODD), "hang", options=("--hang-s", "2")) as run:
        finish(run)
    (restart,) = run.events("restart")
    assert restart["text"].startswith("no process has been at work for 2 s: the group hangs")


@pytest.mark.slow
def test_a_process_that_is_stopped_is_noticed_long_before_the_group_hangs(
    tmp_path: Path, undisturbed: str
) -> None:
    with compat(tmp_path, *ddp(tmp_path, 6, 0.05)) as run:
        kill(run, 1, after=1, number=signal.SIGSTOP)
        finish(run)
    assert digest_of(run.out) == undisturbed
    (restart,) = run.events("restart")
    assert "frozen: the kernel reports it stopped for 10 s" in restart["text"]


@pytest.mark.slow
def test_a_group_that_spins_is_judged_by_its_heartbeat(tmp_path: Path) -> None:
    with compat(tmp_path, str(ODD), "spin", options=("--hang-s", "3")) as run:
        finish(run)
    assert len(run.events("restart")) == 1


@pytest.mark.slow
def test_a_script_that_joins_needs_no_torchrun(tmp_path: Path) -> None:
    with compat(tmp_path, str(ODD), "join", options=("--restarts-max", "0")) as run:
        assert run.wait(RUN_S) == 1
    assert any("run it without --compat" in line for line in run.err)


@pytest.mark.slow
def test_threads_of_a_script_are_waited_for(tmp_path: Path) -> None:
    with compat(tmp_path, str(ODD), "thread") as run:
        finish(run)
    assert run.out.count("thread ended") == 2


@pytest.mark.slow
def test_a_module_that_cannot_be_imported_ahead(tmp_path: Path) -> None:
    with compat(tmp_path, str(ODD), "tell", options=("--preload", "no_such_module")) as run:
        assert run.wait(RUN_S) == 1
    assert "--preload no_such_module cannot be imported" in run.err[-1]


@pytest.mark.slow
def test_a_job_without_spares_and_forking_survives_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: str
) -> None:
    monkeypatch.setenv("HOLDFAST_FORK_SERVER", str(tmp_path / "nowhere"))
    with compat(tmp_path, *ddp(tmp_path, 6, 0.02), options=("--waiting", "0")) as run:
        kill(run, 1, after=1)
        finish(run)
    assert digest_of(run.out) == undisturbed


@pytest.mark.slow
def test_the_agent_or_the_coordinator_dies(tmp_path: Path, undisturbed: str) -> None:
    with compat(tmp_path, *ddp(tmp_path, 6, 0.05)) as run:
        run.until(lambda: pids(run, 0), RUN_S, "an epoch")
        strike(run.status()["coordinator"]["pid"])
        run.until(lambda: pids(run, 2), RUN_S, "two epochs more")
        assert run.events("restart") == [], "the group goes on without a coordinator"
        (agent,) = run.status()["agents"]
        strike(agent["pid"])
        finish(run)
    assert digest_of(run.out) == undisturbed
    (restart,) = run.events("restart")
    assert "its agent was restarted" in restart["text"]


@contextlib.contextmanager
def further_node(run: LocalRun) -> Iterator[LocalRun]:
    """Make a second node join, as another machine would."""
    run.until(run.run_dir.coordinator.exists, RUN_S, "an address")
    host, port = run.run_dir.address()
    folder = run.run_dir.path.with_name("node1")
    secret = ("--secret-file", str(run.run_dir.secret_file))
    words = ("agent", "--join", f"{host}:{port}", "--name", "node1", "--run-dir", str(folder))
    with LocalRun(folder, (), (), command=(*words, *secret)) as agent:
        yield agent


def two_nodes(folder: Path, *words: str, least: int = 1) -> LocalRun:
    nodes = ("--nodes-min", str(least), "--nodes-max", "2", "--lease-s", "1")
    return compat(folder, *words, nproc=1, options=nodes)


@pytest.mark.slow
def test_two_nodes_give_the_same_result_as_one(tmp_path: Path, undisturbed: str) -> None:
    with two_nodes(tmp_path, *ddp(tmp_path, 6), least=2) as run, further_node(run) as other:
        assert other.wait(RUN_S) == 0  # before the look at processes that name the run
        finish(run)
    assert digest_of(run.out) == undisturbed


@pytest.mark.slow
def test_a_node_is_lost_and_comes_back(tmp_path: Path) -> None:
    """The world shrinks to the node that is left, and grows when another one joins."""
    with two_nodes(tmp_path, *ddp(tmp_path, 400, 0.02), least=1) as run:
        with further_node(run) as other:
            run.until(lambda: "world 2 " in "".join(run.out), RUN_S, "a group of two nodes")
            other.signal(9)  # its launcher, and so all of that node
            run.until(lambda: "world 1 " in "".join(run.out[-2:]), RUN_S, "a group of one")
        with further_node(run):
            newer = len(run.out)
            run.until(lambda: "world 2 " in "".join(run.out[newer:]), RUN_S, "a group of two")
    assert "node node1 is lost" in [event["text"] for event in run.events("node")]
    texts = [event["text"] for event in run.events("restart")]
    assert texts[-1] == "node node1 joins: the group is restarted"


@pytest.mark.slow
def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    with compat(tmp_path, str(ODD), "wait", str(tmp_path / "never")) as run:
        run.until(lambda: len(pids(run, 0)) == 2, RUN_S, "two processes")
        run.signal(2)
        assert run.wait(RUN_S) == 130
    assert run.leftovers() == []


@pytest.mark.slow
def test_a_model_that_outlives_its_group_lets_the_script_end(tmp_path: Path) -> None:
    """PyTorch alone ends here in a deadlock in one run of two."""
    for attempt in range(3):
        with compat(tmp_path / str(attempt), str(LEAVES)) as run:
            finish(run)


SLOW = pytest.mark.slow


def begin(run: LocalRun) -> dict[int, int]:
    """Wait until both ranks run; return rank -> pid."""
    found: dict[int, int] = run.until(
        lambda: p if len(p := pids(run, 0)) == 2 else None, RUN_S, "both ranks"
    )
    return found


@pytest.mark.parametrize("to", [pytest.param("the launcher", marks=SLOW), "every process"])
def test_a_script_that_is_asked_to_end_can_save(to: str, tmp_path: Path) -> None:
    with compat(tmp_path, str(SAVES), str(tmp_path), "agrees") as run:
        begin(run)
        for pid in run.leftovers() if to == "every process" else ():
            strike(pid, signal.SIGTERM)
        run.signal(signal.SIGTERM)
        assert run.wait(RUN_S) == 130, run.log()
        assert run.leftovers() == []
    assert (tmp_path / "saved").read_text().isdecimal()


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=SLOW), signal.SIGUSR1])
def test_a_script_gets_the_signal_that_ends_the_job(number: int, tmp_path: Path) -> None:
    with compat(tmp_path, str(SAVES), str(tmp_path), "alone") as run:
        begin(run)
        run.signal(number)
        assert run.wait(RUN_S) == 130, run.log()
    name = signal.Signals(number).name
    assert sorted(tmp_path.glob("asked-*")) == [
        tmp_path / f"asked-{rank}-{name}" for rank in (0, 1)
    ]


def test_survivors_of_a_failure_are_asked_to_end_and_then_killed(tmp_path: Path) -> None:
    options = ("--end-s", "0.5")
    with compat(tmp_path, str(SAVES), str(tmp_path), "stubborn", options=options) as run:
        strike(begin(run)[1])
        finish(run)
    assert list(tmp_path.glob("asked-*")) == [tmp_path / "asked-0-SIGTERM"]
    assert len(run.events("restart")) == 1
