"""An error of a machine, a full disk for instance, costs one worker; on all it ends the job."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from conftest import RUN_S, Start, finish
from holdfast.engine.core.errors import UserError, WorldError
from holdfast.engine.core.machine_errors import MachineError
from holdfast.engine.core.membership.machine_losses import (
    REMEMBERED_STEPS,
    MachineLoss,
    MachineLosses,
)
from holdfast.engine.core.membership.restart import replace_lost
from holdfast.engine.core.policies import RestartPolicy
from holdfast.engine.core.types import AgentId, WorkerId
from holdfast.engine.core.worker_status import Stage
from holdfast.engine.runtime.local_run import LocalRun
from holdfast.engine.runtime.node.bootstrap import find_machine_error
from holdfast.engine.runtime.node.shard_processes import BY_MACHINE, read_report
from roster_kit import Cluster, status

STEPS = 8
A, B = AgentId("a"), AgentId("b")
W0, W1, W2 = WorkerId(0), WorkerId(1), WorkerId(2)
Reference = Callable[[int], str]


# ---------------------------------------------------------------- whose fault an error is


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


def met(error: BaseException, before: BaseException) -> BaseException:
    error.__context__ = before
    return error


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (FULL, MachineError.DISK_FULL),
        (OSError(errno.EDQUOT, "x"), MachineError.QUOTA),
        (OSError(errno.EIO, "x"), MachineError.DEVICE),
        (OSError(errno.EROFS, "x"), MachineError.READ_ONLY),
        (OSError(errno.ESTALE, "x"), MachineError.STALE),
        (OSError(errno.EMFILE, "x"), MachineError.DESCRIPTORS),
        (OSError(errno.ENFILE, "x"), MachineError.DESCRIPTORS),
        (OSError(errno.ENOMEM, "x"), MachineError.MEMORY),
        (OSError(errno.ENOSPC, "x", "/dev/shm/torch_1"), MachineError.SHARED_MEMORY),
        (MemoryError(), MachineError.MEMORY),
        (ModuleNotFoundError("No module named 'flash_attn'"), MachineError.LIBRARY),
        (ImportError("libcudnn.so.9: cannot open shared object file"), MachineError.LIBRARY),
        (torch.OutOfMemoryError("CUDA out of memory"), MachineError.GPU_MEMORY),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), MachineError.GPU),
        (RuntimeError("can't start new thread"), MachineError.THREADS),
        (WorldError("the data workers were lost 4 times in a row"), MachineError.OTHER),
        # A library raises an error of its own because the disk is full.
        (met(RuntimeError("unexpected pos 64 vs 0"), FULL), MachineError.DISK_FULL),
        (caused(WorldError("the ledger cannot grow"), FULL), MachineError.DISK_FULL),
        # An error that another process has raised.
        (OSError("Caught OSError in worker process 0:\n[Errno 5] bad"), MachineError.DEVICE),
        (ValueError("the user's own mistake"), None),
        (FileNotFoundError(errno.ENOENT, "No such file", "train.bin"), None),
        (PermissionError(errno.EACCES, "Permission denied"), None),
        (caused(UserError("give --store another folder"), FULL), None),
        (met(UserError("install safetensors"), ImportError("x")), MachineError.LIBRARY),
        (RuntimeError("shape '[7]' is invalid for input of size 8"), None),
    ],
)
def test_the_error_says_whether_the_machine_or_the_script_is_at_fault(
    error: BaseException, found: MachineError | None
) -> None:
    assert find_machine_error(error) is found


def test_torch_reports_that_memory_has_run_out() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert find_machine_error(raised.value) is MachineError.MEMORY


def test_a_report_names_the_error_in_its_last_line() -> None:
    told = f"process 1 of the worker: OSError: x{BY_MACHINE}{MachineError.DISK_FULL.value}"
    assert read_report(told.encode()) == (
        "process 1 of the worker: OSError: x",
        MachineError.DISK_FULL,
    )
    assert read_report(b"ValueError: x") == ("ValueError: x", None)


# ---------------------------------------------------------------- when the job ends


def judged(
    *losses: tuple[int, MachineError, AgentId, int], places: dict[WorkerId, AgentId], step: int = 7
) -> str:
    """Count losses as (worker, error, node, step); return why the job ends at a step, or ""."""
    found = MachineLosses()
    for worker, error, node, at in losses:
        found.count(WorkerId(worker), MachineLoss(error=error, node=node, detail="OSError: x"), at)
    return found.reason_to_end(step, lambda: places)


DISK, LIBRARY = MachineError.DISK_FULL, MachineError.LIBRARY


def test_a_worker_that_is_spared_keeps_the_job() -> None:
    places = {W0: A, W1: A, W2: B}
    assert judged((0, DISK, A, 7), (1, DISK, A, 7), (0, DISK, A, 7), places=places) == ""
    ended = judged((0, DISK, A, 7), (1, DISK, A, 7), (2, DISK, B, 7), places=places)
    assert ended == "worker 2 failed (a disk is full on every worker): OSError: x"


def test_errors_of_several_kinds_are_no_proof() -> None:
    places = {W0: A, W1: B}
    assert judged((0, DISK, A, 7), (1, MachineError.MEMORY, B, 7), places=places) == ""


def test_the_only_worker_gets_one_more_try() -> None:
    assert judged((0, DISK, A, 7), places={W0: A}) == ""
    assert judged((0, DISK, A, 7), (0, DISK, A, 7), places={W0: A})


def test_a_missing_library_is_missing_on_the_whole_node() -> None:
    assert (
        judged((0, LIBRARY, A, 0), places={W0: A, W1: A}, step=0) == "worker 0 failed: OSError: x"
    )
    assert judged((0, LIBRARY, A, 0), places={W0: A, W1: B}, step=0) == ""
    assert judged((0, LIBRARY, A, 0), (1, LIBRARY, B, 0), places={W0: A, W1: B}, step=0)


def test_an_error_that_does_not_come_back_is_forgotten() -> None:
    far = 7 + REMEMBERED_STEPS + 1
    assert judged((0, DISK, A, 7), (1, DISK, B, far), places={W0: A, W1: B}, step=far) == ""
    twice = ((0, DISK, A, 7), (0, DISK, A, 7))
    assert judged(*twice, places={W0: A}, step=far) == "", "the other nodes left much later"


def test_kills_for_lack_of_memory_are_counted_as_other_kills_are() -> None:
    losses = [(0, MachineError.KILLED, A, 7)] * 3
    assert judged(*losses, places={W0: A}) == ""


def test_a_loss_is_named_with_its_node_the_script_s_line_and_the_remedy() -> None:
    library = 'File "/usr/lib/python3.12/pathlib.py", line 1078, in write_text'
    detail = f'  File "/me/train.py", line 31, in log\n  {library}\nOSError: [Errno 28] No space'
    lost = status(0, stage=Stage.LOST, detail=detail, machine_error=DISK)
    cluster = Cluster(lost)
    lines = cluster.change(*replace_lost(cluster.facts(), RestartPolicy()))
    assert lines == [
        "0: a disk is full on node n0 (OSError: [Errno 28] No space, train.py:31): free space there"
    ]


def test_a_machine_with_an_error_of_its_own_is_left_out_for_longer_each_time() -> None:
    policy = RestartPolicy(strikes_free=1, quarantine_s=4.0, quarantine_max_s=9.0)
    cluster, waited = Cluster(status(0)), []
    for incarnation in range(1, 5):
        cluster.hear("n0", status(0, incarnation, stage=Stage.LOST, machine_error=DISK))
        cluster.change(*replace_lost(cluster.facts(), policy))
        respawn_at = cluster.roster.slots[W0].respawn_at
        waited.append(0.0 if respawn_at is None else respawn_at - cluster.now)
        cluster.now += waited[-1]
        cluster.change(*replace_lost(cluster.facts(), policy))
    assert waited == pytest.approx([0.0, 4.0, 8.0, 9.0])


# ---------------------------------------------------------------- real processes


@pytest.mark.slow
def test_a_full_disk_under_one_worker_costs_that_worker(start: Start, reference: Reference) -> None:
    options = ("--steps", str(STEPS), "--fault", "FULL:forward:3:1", "--rejoin", "5")
    with start(*options, nproc=2) as run:
        assert finish(run) == reference(STEPS)
    (lost,) = run.events("lost")
    assert "a disk is full on node node0 (OSError: [Errno 28]" in lost["text"]
    assert "trainer.py:" in lost["text"]
    assert lost["text"].endswith("free space there")
    log = (run.run_dir.logs / "worker-1-1.log").read_text()
    assert "Traceback" in log, "the worker's log has the whole story"


def test_a_full_disk_under_all_workers_ends_the_job_with_the_scripts_line(start: Start) -> None:
    with start("--fault", "FULLS:forward:3:0,1", nproc=2) as run:
        assert run.wait(RUN_S) == 1
        assert run.leftovers() == []
    outcome = run.run_dir.outcome() or ""
    assert " failed (a disk is full on every worker): " in outcome
    assert "trainer.py" in outcome
    assert outcome.endswith("OSError: [Errno 28] No space left on device")
    assert len(run.events("lost")) <= 4


@pytest.mark.slow
def test_a_worker_whose_channel_to_its_agent_is_lost_is_replaced(start: Start) -> None:
    with start("channel", nproc=2, script="faulty.py") as run:
        assert run.wait(RUN_S) == 0, run.log()
    (lost,) = run.events("lost")
    assert "worker 1 was lost: ended by SIGKILL" in lost["text"]
    log = (run.run_dir.logs / "worker-1-1.log").read_text()
    assert "this process ends: its agent is gone" in log


def test_a_library_that_is_missing_on_all_nodes_ends_the_job_at_once(tmp_path: Path) -> None:
    script = tmp_path / "imports.py"
    script.write_text("import holdfast, no_such_library\n")
    with LocalRun(tmp_path / "run", ["--nproc", "1", "--virtual", "2"], [str(script)]) as run:
        assert run.wait(RUN_S) == 1
    assert len(run.events("lost")) == 1
    outcome = run.run_dir.outcome() or ""
    assert "imports.py" in outcome
    assert outcome.endswith("No module named 'no_such_library'")
