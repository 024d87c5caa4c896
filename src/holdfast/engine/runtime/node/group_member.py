"""Runs a script that was written for torchrun, once this process has its rank.

    python -m holdfast.engine.runtime.node.group_member SCRIPT ARGS...

Until then it waits, with PyTorch imported: a group that starts again does not wait for imports.
The script sees the same as under torchrun.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from holdfast.engine.core.errors import UserError
from holdfast.engine.core.job_spec import JobSpec
from holdfast.engine.core.membership.group_faults import ranks_of
from holdfast.engine.core.types import WorkerId
from holdfast.engine.core.views import View
from holdfast.engine.core.worker_status import Phase, ReplicaStage, Stage, WorkerStatus
from holdfast.engine.host.lifetime import restore_ending_signals
from holdfast.engine.runtime import user_script
from holdfast.engine.runtime.node import bootstrap
from holdfast.engine.runtime.node.group_store import GroupChannel
from holdfast.engine.runtime.rundir import RunDir
from holdfast.engine.runtime.user_script import find_source

MODULE = "holdfast.engine.runtime.node.group_member"
# Libraries that a process may import before it knows its rank, and before a fork.
SAFE = ("torch", "torchvision", "numpy")
BASE = ("torch._dynamo", "torch.distributed", "torch.distributed.checkpoint", "torch.utils.data")


def main(argv: list[str]) -> int:
    """Wait for a rank, then run the script. Returns the exit code."""
    failure_fd = bootstrap.attach()

    def run() -> None:
        spec = RunDir(Path(os.environ["HOLDFAST_RUN_DIR"])).spec()
        preload(spec)
        variables = _wait(spec)
        user_script.become(argv)
        for name in [n for n in os.environ if n.startswith("HOLDFAST_")]:
            del os.environ[name]
        os.environ.update(variables)
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # as torchrun does
        with contextlib.suppress(ImportError):  # a PyTorch without torch.distributed
            importlib.import_module("holdfast.engine.train.torch_groups").keep_last()
        try:
            user_script.run(argv[0])
        finally:
            _join_threads()

    return bootstrap.run_and_report(run, bootstrap.make_reporter(failure_fd))


def preload(spec: JobSpec) -> None:
    """Import what the script will want. UserError names what the job asks for and is not there."""
    for name in libraries_of(find_source(spec.cwd, spec.script)):
        with contextlib.suppress(Exception):  # the script may not need it, and else fails by itself
            importlib.import_module(name)
    for name in spec.modules():
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise UserError(f"--preload {name} cannot be imported: {error}") from None


def libraries_of(script: Path | None) -> list[str]:
    """Find which of the SAFE libraries' modules a script imports."""
    if script is None:
        return []
    try:
        tree = ast.parse(script.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []  # running it shows the error
    found = [name for node in ast.walk(tree) for name in _imported(node)]
    return list(dict.fromkeys(name for name in found if name.split(".")[0] in SAFE))


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module


def _wait(spec: JobSpec) -> dict[str, str]:
    """Wait for a rank; return the variables that show it to the script."""
    run_dir = Path(os.environ["HOLDFAST_RUN_DIR"])
    channel = GroupChannel.take_channel()
    channel.report_ready()
    view, store = channel.wait_group(None, lambda view: b"-")
    worker, incarnation = channel.worker, channel.incarnation
    status = WorkerStatus(
        worker=worker,
        incarnation=incarnation,
        seq=channel.seq + 1,
        stage=Stage.READY,
        view=view.number,
        state=ReplicaStage.CURRENT,
        phase=Phase.COMPUTING,
        hosted=(view.owners.index(worker),),
    )
    restore_ending_signals()
    channel.send(status)
    channel.socket.close()
    variables = torchrun_variables(view, worker, store, spec)
    return {**variables, "HOLDFAST_HEARTBEAT": heartbeat_file(run_dir, worker, incarnation)}


def heartbeat_file(run_dir: Path, worker: int, incarnation: int) -> str:
    """Name the file to which a script may write its step."""
    return str(run_dir / "logs" / f"heartbeat-{worker}-{incarnation}")


def torchrun_variables(view: View, worker: WorkerId, store: str, spec: JobSpec) -> dict[str, str]:
    """Return the variables that torchrun gives a process, and a mark of ours."""
    ranks = ranks_of(view)
    rank = view.owners.index(worker)
    nodes = list(dict.fromkeys(member.agent for member in ranks))
    here = [i for i, member in enumerate(ranks) if member.agent == ranks[rank].agent]
    host, _, port = store.rpartition(":")
    found = {
        "LOCAL_RANK": here.index(rank),
        "RANK": rank,
        "GROUP_RANK": nodes.index(ranks[rank].agent),
        "ROLE_RANK": rank,
        "ROLE_NAME": "default",
        "LOCAL_WORLD_SIZE": len(here),
        "WORLD_SIZE": len(ranks),
        "GROUP_WORLD_SIZE": len(nodes),
        "ROLE_WORLD_SIZE": len(ranks),
        "MASTER_ADDR": host.strip("[]"),
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": view.restarts,
        "TORCHELASTIC_MAX_RESTARTS": spec.compat.restarts_max,
        "TORCHELASTIC_RUN_ID": spec.job,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "HOLDFAST_GROUP": view.number,
    }
    return {name: str(value) for name, value in found.items()}


def _join_threads() -> None:
    """Wait for the threads that python itself waits for at its end."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()


def modules_of(spec: JobSpec) -> Sequence[str]:
    """Return the modules to import in the process that is forked for this job."""
    return [*BASE, *libraries_of(find_source(spec.cwd, spec.script)), *spec.modules()]


if __name__ == "__main__":
    bootstrap.leave(main(sys.argv[1:]))
