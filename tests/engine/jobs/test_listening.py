"""Processes of a job listen on the given address only, never on all addresses of a machine."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from conftest import RUN_S, SCRIPTS
from holdfast.engine.runtime.local_run import LocalRun
from holdfast.engine.train.torch_groups import find_store, open_store
from places import ROOT

FSDP = ROOT / "examples" / "fsdp.py"
LISTENS = "0A"
EVERYWHERE = {"0" * 8, "0" * 32}


def listening(pid: int) -> set[str]:
    """Return the addresses, as the kernel writes them, on which a process listens."""
    inodes, found = set(), set()
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(f"/proc/{pid}/fd/{name}"))
        for family in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{family}").read_text().splitlines()[1:]:
                _, local, _, state, *rest = line.split()
                if state == LISTENS and f"socket:[{rest[5]}]" in inodes:
                    found.add(local.partition(":")[0])
    return found


def test_a_store_listens_on_its_own_address_only() -> None:
    before = listening(os.getpid())
    store = open_store("127.0.0.1")
    assert listening(os.getpid()) - before <= {"0100007F"}
    find_store("127.0.0.1", store.port).set("key", "value")
    assert store.get("key") == b"value"


@pytest.mark.parametrize("kind", [pytest.param("procs", marks=pytest.mark.slow), "compat"])
def test_no_process_of_a_job_listens_everywhere(kind: str, tmp_path: Path) -> None:
    go_on = tmp_path / "go"
    inside = [str(SCRIPTS / "sharded.py"), "held:0.0:2,held:1.0:2", "-", str(FSDP), "--steps", "3"]
    compat = [str(SCRIPTS / "torchrun_waits.py"), str(go_on)]
    flags = ["--procs-per-worker", "2", "--virtual", "2"] if kind == "procs" else ["--compat"]
    words = inside if kind == "procs" else compat
    with LocalRun(tmp_path / "run", ["--nproc", "2", *flags], words) as run:
        if kind == "procs":
            run.until_members(2)
        else:
            run.until(lambda: "here" in run.out, RUN_S, "all processes to have met")
        found = {pid: listening(pid) for pid in [run.pid, *run.leftovers()]}
        go_on.touch()
        assert run.wait(RUN_S) == 0, run.log()
    assert any(found.values())
    assert not [pid for pid, addresses in found.items() if addresses & EVERYWHERE], found
