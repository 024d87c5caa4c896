"""Slurm's output is read, and its scripts are written; the real one is in test_slurm_cluster."""

from __future__ import annotations

import asyncio
import subprocess
import time
from pathlib import Path

import pytest

from holdfast.cli.main import main
from holdfast.clusters.slurm import slurm_batch, slurm_manager
from holdfast.clusters.slurm.slurm_batch import (
    NODE,
    clean_environment,
    job_script,
    read_options,
    read_time,
)
from holdfast.clusters.slurm.slurm_manager import SlurmManager
from holdfast.engine.core.errors import Damaged, Unreachable
from holdfast.engine.core.fleet.placements import Holding, PlacementId
from holdfast.engine.fleet.cluster_manager import STILL_RUNNING

JOBS = """\
2|F|n/a||INVALID|NonZeroExitCode|hf-x-2
3|PD|n/a||2-00:00:00|Resources|hf-x-3
1|R|node1|node1|2:57|None|hf-x-1
4|R|node0|node[0,2-3]|UNLIMITED|None|a|name
5|CG|node4|node4|0:00|None|hf-x-5
6|CF|n/a|node5|1-02:03:04|None|hf-x-6
"""
NODES = """\
node0|allocated|none
node1|draining|a new fan | or two
node1|draining|a new fan | or two
node2|down*|Not responding
node3|mixed@|none
node4|idle~|none
node5|unknown|none
"""


def test_jobs_are_read() -> None:
    failed, waiting, runs, allocation, ends, starts = slurm_batch.read_jobs(JOBS)
    assert (failed.holding, waiting.holding, runs.holding) == (
        Holding.ENDED,
        Holding.WAITING,
        Holding.RUNNING,
    )
    assert (waiting.hosts, waiting.script_host, waiting.why) == ("", "", "Resources")
    assert (runs.hosts, runs.name, runs.left_s, runs.why) == ("node1", "hf-x-1", 177.0, "")
    assert (allocation.hosts, allocation.name) == ("node[0,2-3]", "a|name")
    assert (failed.left_s, allocation.left_s) == (0.0, None)
    assert ends.holding is Holding.ENDED
    assert (starts.holding, starts.left_s) == (Holding.WAITING, 93784.0)


def test_steps_are_read() -> None:
    assert slurm_batch.read_steps("4.0|node0|hf-y-1\n4.batch|node0|batch\n") == [
        slurm_batch.SlurmStep(id="4.0", name="hf-y-1", host="node0"),
        slurm_batch.SlurmStep(id="4.batch", name="batch", host="node0"),
    ]


def test_nodes_are_read() -> None:
    """What runs on a node that slurmctld does not know yet has not ended."""
    found = {n.name: (n.gone, n.up, n.leaving) for n in slurm_batch.read_nodes(NODES)}
    assert found == {
        "node0": (False, True, ""),
        "node1": (False, True, "a new fan | or two"),
        "node2": (True, False, ""),
        "node3": (False, True, "Slurm calls it mixed@"),
        "node4": (False, True, ""),
        "node5": (False, False, ""),
    }


@pytest.mark.parametrize("text", ["1|R|node1", "1|R|n|n|yesterday|None|hf-x-1"])
def test_an_answer_of_slurm_that_cannot_be_read_is_reported_as_damaged(text: str) -> None:
    with pytest.raises(Damaged, match="Slurm's answer cannot be read"):
        slurm_batch.read_jobs(text)


MUNGE_IS_AWAY = """\
squeue: error: If munged is up, restart with --num-threads=10
squeue: error: Munge encode failed: Failed to connect to "/run/munge.sock": Connection refused
squeue: error: slurm_send_node_msg: auth_g_create: REQUEST_JOB_INFO has authentication error
slurm_load_jobs error: Protocol authentication error
"""


def test_the_cause_of_a_problem_is_reported_and_not_the_advice() -> None:
    """As Slurm 22.05 prints it when munged has been killed."""
    cause = 'Munge encode failed: Failed to connect to "/run/munge.sock": Connection refused'
    assert slurm_batch.read_problem(MUNGE_IS_AWAY) == f"{cause}; is munged running on this host?"
    refused = "sbatch: error: Batch job submission failed: Invalid partition name specified\n"
    why = "Batch job submission failed: Invalid partition name specified"
    assert slurm_batch.read_problem(refused) == why
    assert slurm_batch.read_problem("") == ""


def test_without_slurm_the_manager_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unreachable, match="there is no command squeue: is Slurm installed"):
        asyncio.run(SlurmManager(tmp_path, "hf-x-").observe())


FAKE_SLURM = """\
#!/bin/bash
case "$(basename "$0") $*" in
squeue*preempttime*) echo N/A ;;
squeue*--steps*) echo '4.1|node0|hf-x-1'; echo '4.2|node1|hf-x-2' ;;
squeue*) echo '4|R|node0|node[0-1]|UNLIMITED|None|a job'
    for further in 5 6; do echo "$further|PD|n/a||UNLIMITED|Resources|hf-x-$further"; done ;;
sinfo*) echo 'node0|mixed|none'; echo 'node1|mixed|none' ;;
scontrol*hostnames*) echo node0; echo node1 ;;
scancel*) echo 'scancel: error: Job/step already completing or completed' >&2; exit 1 ;;
esac
"""


def test_a_cancelled_step_that_stays_listed_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does a step that ended while slurmctld was away; a request that waits takes its host."""
    for name in ("squeue", "sinfo", "scontrol", "scancel"):
        (tmp_path / name).write_text(FAKE_SLURM)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    manager = SlurmManager(tmp_path, "hf-x-", "4")

    def look() -> dict[str, tuple[Holding, bool]]:
        return {p.id: (p.holding, p.stuck) for p in asyncio.run(manager.observe())}

    running, waiting = (Holding.RUNNING, False), (Holding.WAITING, False)
    before = {"hf-x-1": running, "hf-x-2": running, "hf-x-5": waiting, "hf-x-6": waiting}
    assert look() == before
    asyncio.run(manager.release(PlacementId("hf-x-2"), "4.2"))
    assert look() == before
    later = time.monotonic() + slurm_manager.STALE_S  # after KillWait
    monkeypatch.setattr("time.monotonic", lambda: later)
    one_asks_again = {"hf-x-5": (Holding.WAITING, True)}
    assert look() == before | {"hf-x-2": (Holding.ENDED, False)} | one_asks_again


LEAVING_SLURM = """\
#!/bin/bash
case "$(basename "$0") $*" in
squeue*preempttime*) echo N/A ;;
squeue*--steps*) ;;
squeue*) echo '4|R|login|node[0-1]|UNLIMITED|None|a job' ;;
sinfo*) echo 'node0|{node0}|none'; echo 'node1|draining|a new fan' ;;
scontrol*hostnames*) echo node0; echo node1 ;;
scontrol*) echo "$*" >>"$(dirname "$0")/updates" ;;
esac
"""


@pytest.mark.parametrize(
    ("node0", "updates"), [("mixed", ["update JobId=4 NodeList=node0"]), ("draining", [])]
)
def test_hosts_that_are_left_are_given_back_but_never_all_of_them(
    node0: str, updates: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("squeue", "sinfo", "scontrol"):
        (tmp_path / name).write_text(LEAVING_SLURM.replace("{node0}", node0))
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    manager = SlurmManager(tmp_path, "hf-x-", "4")
    for _ in range(2):  # the second look comes too soon for another try
        assert asyncio.run(manager.observe()) == []
    written = tmp_path / "updates"
    assert (written.read_text().splitlines() if written.exists() else []) == updates


def write_script(tmp_path: Path, *options: str) -> str:
    script = tmp_path / "train.py"
    script.touch()
    run_dir = str(tmp_path / "a run")
    words = ["launch", "slurm", "--run-dir", run_dir, "--write-script", *options, str(script)]
    assert main(words) == 0
    path = tmp_path / "a run" / "slurm_job.sh"
    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0
    return path.read_text()


def test_the_script_of_a_job_says_all_to_slurm(tmp_path: Path) -> None:
    text = write_script(
        tmp_path, "--nodes", "4", "--nodes-max", "8", "--sbatch=--partition=gpu", "--drain-s=90"
    )
    directives = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    for wanted in (
        "--nodes=4",
        "--no-kill",
        "--requeue",
        "--signal=B:USR1@90",
        "--exclusive",
        "--partition=gpu",
        "--open-mode=append",
    ):
        assert f"#SBATCH {wanted}" in directives
    assert f'#SBATCH "--output={tmp_path}/a run/slurm-%j.txt"' in directives
    assert f"-m holdfast.engine.fleet.cluster_job '{tmp_path}/a run' --port 0 &" in text


@pytest.mark.parametrize(("least", "wanted"), [("1", "1-4"), ("4", "4")])
def test_a_job_that_may_begin_with_fewer_nodes_asks_for_a_range(
    tmp_path: Path, least: str, wanted: str
) -> None:
    """So a job that Slurm has requeued does not wait for a host that is gone."""
    text = write_script(tmp_path, "--nodes", "4", "--nodes-min", least)
    assert f"#SBATCH --nodes={wanted}\n" in text


def test_options_that_are_none_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "slurm", "--sbatch", "gpu", "train.py"]) == 2
    assert "--sbatch 'gpu' is no option: write --sbatch=--partition=gpu" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ("--array=0-3", "each task would need a run directory of its own"),
        ("-a0-3", "each task would need a run directory of its own"),
        ("--nodelist=a,b", "a node that is lost could not be replaced"),
        ("-w a", "a node that is lost could not be replaced"),
        ("--output=x", "slurm-JOB.txt"),
        ("--signal=USR1@5", "--drain-s"),
        ("--job-name=x", "by their names"),
        ("-N2", "use --nodes"),
        ("--wait", "returns at once"),
        ("--time=2", "leaves no time to train"),
        ("-t 1:30", "leaves no time to train"),
        ("--partition gpu", "write --sbatch=--partition=..."),
    ],
)
def test_options_that_would_take_ours_away_are_refused(
    option: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "slurm", f"--sbatch={option}", "train.py"]) == 2
    assert problem in capsys.readouterr().err


def test_hosts_to_exclude_are_joined(tmp_path: Path) -> None:
    found = read_options(["--partition=gpu", "--exclude=bad[1-3]", "-x worse"], 60.0)
    assert found.of_further_job(["h4", "h5"]) == [
        "--partition=gpu",
        "--exclude=bad[1-3],worse,h4,h5",
    ]
    assert read_options([]).of_job() == []
    assert "#SBATCH --exclude=bad" in write_script(tmp_path, "--sbatch=--exclude=bad")


def test_further_jobs_begin_at_once() -> None:
    when = ["--hold", "-dafterok:7", "--begin=now+1hour"]
    found = read_options(["--partition=gpu", *when])
    assert found.of_job() == ["--partition=gpu", *when]
    assert found.of_further_job([]) == ["--partition=gpu"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5", 300),
        ("5:30", 330),
        ("1:02:03", 3723),
        ("2-3", 183600),
        ("2-3:4", 183840),
        ("2-03:04:05", 183845),
        ("UNLIMITED", None),
        ("soon", None),
    ],
)
def test_a_time_limit_is_read(text: str, seconds: float | None) -> None:
    assert read_time(text) == seconds


def test_a_name_with_a_percent_sign_is_the_jobs_own(tmp_path: Path) -> None:
    folder = tmp_path / "%j"
    folder.mkdir()
    assert f'"--output={tmp_path}/%%j/a run/slurm-%j.txt"' in write_script(folder)


def test_the_environment_of_a_user_does_not_change_answers() -> None:
    placing = {"SBATCH_ACCOUNT": "a", "SBATCH_PARTITION": "p", "SBATCH_GPUS_PER_NODE": "8"}
    kept = {**placing, "SLURM_CONF": "c", "SLURM_JOB_ID": "7", "HOME": "/", "SLURM_NTASKS": "2"}
    changing = ("SQUEUE_PARTITION", "SINFO_FORMAT", "SBATCH_ARRAY_INX", "SBATCH_EXPORT")
    changing += ("SALLOC_KILL_CMD", "SRUN_EXPORT_ENV", "SCANCEL_STATE", "SLURM_TIME_FORMAT")
    changing += ("SLURM_EXPORT_ENV", "SLURM_CLUSTERS", "SBATCH_OUTPUT", "SBATCH_WAIT")
    assert clean_environment({**kept, **dict.fromkeys(changing, "x")}) == kept


def test_a_job_that_has_no_checkpoints_is_not_begun_again_when_its_time_is_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = write_script(tmp_path, "--sbatch=--time=60")
    assert "a job that takes longer than --sbatch=--time does not end" in capsys.readouterr().err
    loop = "kill -USR1 $PPID; while true; do sleep 0.1 >&- 2>&-; done"
    script = write_job("bash", "-c", f"trap 'exit 130' TERM; {loop}", has_store=False)
    ended = run_with_fakes(tmp_path, script, squeue=fake_queue("R", "N/A"))
    assert "without --store there is no checkpoint to go on from" in ended.stdout
    assert "scontrol requeue 7" not in told(tmp_path)
    assert "without --store there is no checkpoint to go on from" in text


def run_with_fakes(
    tmp_path: Path, script: str, **commands: str
) -> subprocess.CompletedProcess[str]:
    """Run a script whose Slurm is these shell commands; `told` has their arguments."""
    for name in ("squeue", "scontrol", "scancel"):
        body = commands.get(name, "true")
        path = tmp_path / name
        path.write_text(f'#!/bin/bash\necho "{name} $*" >> {tmp_path}/told\n{body}\n')
        path.chmod(0o755)
    path = tmp_path / "script.sh"
    path.write_text(script)
    return subprocess.run(
        ["bash", str(path), "sleep", "60"],
        env={
            "PATH": f"{tmp_path}:/usr/bin:/bin",
            "HOLDFAST_SLURM_JOB": "7",
            "HOLDFAST_SLURM_LOOK_S": "0.1",
            "SLURM_JOB_ID": "7",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )


def told(tmp_path: Path) -> list[str]:
    return (tmp_path / "told").read_text().splitlines()


def test_a_node_ends_with_its_job_and_requeues_one_that_lost_its_script(tmp_path: Path) -> None:
    over = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
    assert run_with_fakes(tmp_path, NODE, squeue=over).returncode == -15
    once = f'[ -e {tmp_path}/seen ] && exit 0; touch {tmp_path}/seen; echo "R node0 node[1-2]"'
    assert run_with_fakes(tmp_path, NODE, squeue=once, scontrol="echo node1").returncode == -15
    assert "scontrol requeue 7" in told(tmp_path)


def test_a_node_ends_while_its_job_waits_to_begin_again(tmp_path: Path) -> None:
    """It may hold a host that the job needs."""
    assert run_with_fakes(tmp_path, NODE, squeue="echo 'PD n/a '").returncode == -15


def test_a_node_goes_on_while_slurm_is_away(tmp_path: Path) -> None:
    away = (
        f"echo x >> {tmp_path}/count; [ $(wc -l < {tmp_path}/count) -gt 3 ] && exit 0; "
        "echo 'Unable to contact slurm controller' >&2; exit 1"
    )
    assert run_with_fakes(tmp_path, NODE, squeue=away).returncode == -15
    assert len(told(tmp_path)) == 4


def fake_queue(state: str, preempted_at: str) -> str:
    """Return a squeue that lists three jobs, and knows the state of ours."""
    listed = "printf '3 hf-x-1\\n4 other\\n5 hf-x-2\\n'"
    runs = "echo 7" if state == "R" else "true"
    return f"case $* in *--me*) {listed};; *--states=R*) {runs};; *) echo {preempted_at};; esac"


def write_job(*command: str, has_store: bool = True) -> str:
    return job_script(
        name="hf-x",
        prefix="hf-x-",
        nodes="2",
        command=command,
        output="o",
        signal_s=60,
        has_store=has_store,
    )


@pytest.mark.parametrize(
    ("code", "state", "preempted_at", "requeued"),
    [
        (1, "R", "2026-11-29T20:12:21", True),
        (1, "R", "N/A", False),
        (0, "R", "2026-11-29T20:12:21", False),
        (1, "CG", "2026-11-29T20:12:21", False),
    ],
)
def test_a_job_that_slurm_preempts_is_requeued_after_its_end(
    tmp_path: Path, code: int, state: str, preempted_at: str, requeued: bool
) -> None:
    script = write_job("bash", "-c", f"exit {code}")
    queue = fake_queue(state, preempted_at)
    assert run_with_fakes(tmp_path, script, squeue=queue).returncode == code
    assert ("scontrol requeue 7" in told(tmp_path)) is requeued


@pytest.mark.parametrize(
    ("signals", "state", "requeued"),
    [
        ("USR1", "R", True),
        ("TERM", "R", False),
        pytest.param(
            "USR1 TERM", "R", False, marks=pytest.mark.slow
        ),  # cancelled while it stops for its time limit
        ("USR1", "CG", False),
    ],
)
def test_a_job_is_requeued_when_its_time_is_over_and_not_when_it_is_cancelled(
    tmp_path: Path, signals: str, state: str, requeued: bool
) -> None:
    # The script passes each signal on, so the next one is sent once the last one has come.
    first, *second = signals.split()
    then = f"kill -{second[0]} $PPID; trap 'exit 130' TERM; sleep 20" if second else "exit 130"
    command = (
        "bash",
        "-c",
        f"trap '{then.replace(chr(39), chr(34))}' TERM; kill -{first} $PPID; "
        "while true; do sleep 0.1 >&- 2>&-; done",
    )
    script = write_job(*command)
    jobs = fake_queue(state, "N/A")
    assert run_with_fakes(tmp_path, script, squeue=jobs).returncode == 130
    assert [line for line in told(tmp_path) if "scancel" in line] == ["scancel 3", "scancel 5"]
    assert ("scontrol requeue 7" in told(tmp_path)) is requeued


def test_a_job_that_is_submitted_twice_leaves_the_first_one_alone(tmp_path: Path) -> None:
    command = ("bash", "-c", f"exit {STILL_RUNNING}")
    script = write_job(*command)
    jobs = "printf '3 hf-x-1\\n'"
    assert run_with_fakes(tmp_path, script, squeue=jobs).returncode == STILL_RUNNING
    assert not (tmp_path / "told").exists()
