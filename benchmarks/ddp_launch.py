"""Runs a script as processes of DistributedDataParallel, for benchmarks that compare with it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

# Options of the job in the comparison: no task is moved or copied because other workers slow the
# machine down.
STEADY = ("--no-rebalance", "--speculation-budget", "0")


def run_ddp(script: Path, words: Sequence[str], workers: int, limit_s: float) -> None:
    """Run `script` with these arguments in `workers` processes, which meet as in ddp_member.py.

    RuntimeError if one fails; subprocess.TimeoutExpired after `limit_s` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        shared = {
            **os.environ,
            "WORLD_SIZE": str(workers),
            "MEETING": str(Path(folder) / "meeting"),
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
        }
        command = [sys.executable, str(script), *words]
        processes = [
            subprocess.Popen(command, env={**shared, "RANK": str(rank)}) for rank in range(workers)
        ]
        try:
            codes = [process.wait(limit_s) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    if any(codes):
        raise RuntimeError(f"processes of DDP ended with {codes}")
