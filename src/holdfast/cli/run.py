"""`holdfast run`: coordinator, agent and workers on this machine."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from holdfast.core.errors import UserError
from holdfast.runtime.launcher import Launcher
from holdfast.runtime.rundir import JobSpec, RunDir


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="holdfast run",
        description="Run SCRIPT on N workers of this machine, through failures. The script's own "
        "output goes to standard output; Holdfast's events go to standard error.",
    )
    found.add_argument("--nproc", type=int, default=1, metavar="N", help="workers (default 1)")
    found.add_argument(
        "--virtual",
        type=int,
        metavar="V",
        help="virtual ranks: the result depends on V, never on N (default: N)",
    )
    found.add_argument(
        "--min-workers",
        type=int,
        default=1,
        metavar="M",
        help="wait at a step boundary while fewer than M workers live (default 1)",
    )
    found.add_argument("--run-dir", type=Path, help="default: holdfast-runs/TIME-PID")
    found.add_argument("--seed", type=int, default=0, help="the job's seed (default 0)")
    found.add_argument(
        "--threads",
        type=int,
        default=1,
        help="CPU threads per worker; part of the job, since kernels sum by thread (default 1)",
    )
    found.add_argument(
        "--hang-s",
        type=float,
        default=1800.0,
        help="replace a worker that others wait for after nothing moved this long (default 1800)",
    )
    found.add_argument(
        "--lease-s",
        type=float,
        default=30.0,
        help="a node unheard of for this long has fenced its workers (default 30)",
    )
    found.add_argument(
        "--losses-max",
        type=int,
        default=30,
        metavar="K",
        help="give up after K lost workers without one step of progress (default 30)",
    )
    found.add_argument("script", type=Path)
    found.add_argument("args", nargs=argparse.REMAINDER, help="passed to the script")
    return found


def main(argv: list[str]) -> int:
    options = parser().parse_args(argv)
    spec = make_spec(options)
    name = time.strftime("%Y%m%d-%H%M%S") + f"-{os.getpid()}"
    run_dir = RunDir(options.run_dir or Path("holdfast-runs") / name)
    run_dir.create(spec)
    print(f"holdfast: run directory {run_dir.path}", file=sys.stderr, flush=True)
    return Launcher(run_dir, spec).run()


def make_spec(options: argparse.Namespace) -> JobSpec:
    """Check the options against each other; UserError says which value is wrong."""
    virtual = options.nproc if options.virtual is None else options.virtual
    if options.nproc < 1:
        raise UserError(f"--nproc {options.nproc}: at least 1 worker is needed")
    if virtual < options.nproc:
        raise UserError(
            f"--virtual {virtual} is smaller than --nproc {options.nproc}: every worker needs a "
            "virtual rank, so raise --virtual or lower --nproc"
        )
    if not 1 <= options.min_workers <= options.nproc:
        raise UserError(f"--min-workers {options.min_workers} must be from 1 to --nproc")
    for flag in ("threads", "losses_max", "hang_s", "lease_s"):
        if getattr(options, flag) <= 0:
            raise UserError(f"--{flag.replace('_', '-')} {getattr(options, flag)} must be positive")
    if not options.script.is_file():
        raise UserError(f"there is no script {options.script}: check the path")
    return JobSpec(
        script=str(options.script),
        args=tuple(options.args),
        nproc=options.nproc,
        virtual_ranks=virtual,
        workers_min=options.min_workers,
        seed=options.seed,
        threads=options.threads,
        lease_s=options.lease_s,
        hang_s=options.hang_s,
        losses_max=options.losses_max,
    )
