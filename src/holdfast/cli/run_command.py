"""`holdfast run`: coordinator, agent and workers on this machine."""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import sys
import time
from pathlib import Path

from holdfast.cli.shared_options import add_secret, add_tls
from holdfast.core.errors import UserError, WorldError
from holdfast.core.job_spec import JobSpec
from holdfast.net.secret import SECRET_BYTES_MIN, VARIABLE, load_secret
from holdfast.net.tcp import listen
from holdfast.net.tls import server_of
from holdfast.runtime.coordinate.election import parse_election
from holdfast.runtime.launcher import Desk, launch_job
from holdfast.runtime.rundir import RunDir
from holdfast.store.checkpoints import Checkpoints
from holdfast.store.open import FORM, absolute_store, open_storage
from holdfast.testing import fault_script  # tidy: allow layers because users test their jobs

# It is named by its place, not imported: it loads torch.
DISTURBED = str(Path(fault_script.__file__).with_name("disturbed.py"))


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
    _add_nodes(found)
    _add_checkpoints(found)
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
        default=2.5,
        help="a node that neither hears the coordinator nor completes steps for so long stops its "
        "workers; twice this bounds the pause when a node is cut off (default 2.5)",
    )
    found.add_argument(
        "--abandon-s",
        type=float,
        default=300.0,
        help="how long a job goes on without any coordinator, and how long unheard nodes that "
        "alone hold its state are waited for (default 300)",
    )
    found.add_argument(
        "--losses-max",
        type=int,
        default=30,
        metavar="K",
        help="give up after K lost workers without one step of progress (default 30)",
    )
    _add_stragglers(found)
    found.add_argument("script", type=Path)
    found.add_argument("args", nargs=argparse.REMAINDER, help="passed to the script")
    return found


def _add_nodes(found: argparse.ArgumentParser) -> None:
    found.add_argument(
        "--nodes-min",
        type=int,
        default=1,
        metavar="A",
        help="nodes to wait for before step 0; others join by `holdfast agent` (default 1)",
    )
    found.add_argument(
        "--nodes-max",
        type=int,
        metavar="B",
        help="further nodes wait until one is lost (default: --nodes-min)",
    )
    found.add_argument(
        "--host",
        default="127.0.0.1",
        help="address of this machine to listen on, by which other nodes reach it "
        "(default 127.0.0.1: this machine only)",
    )
    found.add_argument(
        "--election",
        default="",
        metavar="URL",
        help="elect the coordinator in etcd, so that others can take over by `holdfast "
        "coordinator`: etcd://HOST[:PORT],.../JOB",
    )
    found.add_argument("--port", type=int, default=0, help="to listen on (default: a free one)")
    add_secret(found, "HOLDFAST_SECRET, or a new one in the run directory")
    add_tls(found)


def _add_stragglers(found: argparse.ArgumentParser) -> None:
    found.add_argument(
        "--no-rebalance",
        action="store_true",
        help="leave virtual ranks where they are, however slow a worker is (default: with more "
        "virtual ranks than workers, slow ones get fewer; the result is the same)",
    )
    found.add_argument(
        "--speculation-budget",
        type=float,
        default=0.02,
        metavar="SHARE",
        help="of all tasks, that may be computed again by others because a worker is late; 0: wait "
        "for it, however long (default 0.02)",
    )
    found.add_argument(
        "--backup",
        type=int,
        default=0,
        metavar="B",
        help="a step does not wait for the last B workers, and drops what they compute of it: the "
        "result is not exact any more (default 0)",
    )
    found.add_argument(
        "--audit",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="of all tasks, that are computed by a second worker as well, to find machines that "
        "compute wrongly: 0.01 costs one per cent (default 0)",
    )
    found.add_argument(
        "--audit-tolerance",
        type=float,
        default=0.01,
        metavar="SHARE",
        help="of a gradient's norm, by which two runs of a task may differ on hardware that turns "
        "out not to be deterministic; 0: nothing is audited there (default 0.01)",
    )
    found.add_argument(
        "--fingerprint-steps",
        type=int,
        default=64,
        metavar="STEPS",
        help="in which every byte of the model's and the optimizer's state is compared between "
        "workers once; 1: all of it in every step; 0: never (default 64)",
    )
    found.add_argument(
        "--faults",
        type=Path,
        metavar="FILE",
        help="let what this script of faults says go wrong in the workers, to see what the job "
        "makes of it (docs/stragglers.md)",
    )


def _add_checkpoints(found: argparse.ArgumentParser) -> None:
    found.add_argument(
        "--store",
        default="",
        help=f"save checkpoints there, where every node reaches it: {FORM}",
    )
    found.add_argument(
        "--save-every",
        type=_save_every,
        default=0,
        metavar="N|auto",
        help="steps; auto (the default): as often as pays, by what a save costs and how often "
        "workers are lost",
    )
    found.add_argument(
        "--save-between",
        type=float,
        nargs=2,
        default=(10.0, 1800.0),
        metavar=("LEAST", "MOST"),
        help="seconds; bounds for auto (default 10 1800)",
    )
    found.add_argument(
        "--keep-last", type=int, default=3, metavar="K", help="checkpoints (default 3)"
    )
    found.add_argument(
        "--scrub-rate",
        type=float,
        default=20.0,
        metavar="MB",
        help="verify (and with ec: mend) what is kept once an hour, at so many megabytes a second "
        "(default 20; 0: not at all)",
    )


def _save_every(text: str) -> int:
    """0 for auto."""
    if text == "auto":
        return 0
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is neither auto nor a number of steps")
    return int(text)


def main(argv: list[str]) -> int:
    options = parser().parse_args(argv)
    spec = make_spec(options)
    name = time.strftime("%Y%m%d-%H%M%S") + f"-{os.getpid()}"
    run_dir = RunDir(options.run_dir or Path("holdfast-runs") / name)
    server_of(options.tls)  # says what is wrong with it
    with listen(options.host, options.port) as listener:
        run_dir.create(spec, make_secret(options))
        print(f"holdfast: run directory {run_dir.path}", file=sys.stderr, flush=True)
        desk = Desk(run_dir=run_dir, listener=listener, host=options.host, tls=options.tls)
        return launch_job(desk, spec)


def make_secret(options: argparse.Namespace) -> bytes:
    if options.secret_file is not None or VARIABLE in os.environ:
        return load_secret(os.environ, file=options.secret_file)
    return secrets.token_bytes(SECRET_BYTES_MIN)


def _check_unused(store: str) -> None:
    """UserError if it holds checkpoints: a job must never begin from those of another one."""
    with contextlib.suppress(WorldError):  # whether it can be written is seen when it must be
        steps = Checkpoints(open_storage(store)).steps()
        if steps:
            raise UserError(
                f"--store {store} already holds checkpoints, up to step {steps[-1]}: name an empty "
                "one, or go on with the job that saved them by `holdfast resume RUN_DIR`"
            )


def _check_faults(path: Path) -> None:
    try:
        fault_script.parse(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--faults {path} cannot be read: {error}") from None


def _check_shares(options: argparse.Namespace) -> None:
    if options.fingerprint_steps < 0:
        raise UserError(f"--fingerprint-steps {options.fingerprint_steps} must not be negative")
    if not 0 <= options.audit_tolerance < 1:
        raise UserError(f"--audit-tolerance {options.audit_tolerance:g} must be from 0 to below 1")
    if not 0 <= options.audit <= 1:
        raise UserError(f"--audit {options.audit:g} must be from 0 to 1")
    if not 0 <= options.speculation_budget <= 1:
        raise UserError(f"--speculation-budget {options.speculation_budget:g} must be from 0 to 1")


def _check_backup(options: argparse.Namespace, workers: int) -> None:
    if not 0 <= options.backup < workers:
        raise UserError(
            f"--backup {options.backup} must be from 0 to {workers - 1}: a step of {workers} "
            "workers needs the result of one at least"
        )
    if options.backup and options.audit:
        raise UserError(
            f"--backup {options.backup} and --audit {options.audit:g} exclude each other: what is "
            "dropped cannot be compared"
        )


def make_spec(options: argparse.Namespace) -> JobSpec:
    """Check the options against each other; UserError says which value is wrong."""
    nodes_min = options.nodes_min
    nodes_max = nodes_min if options.nodes_max is None else options.nodes_max
    workers = options.nproc * nodes_min
    virtual = workers if options.virtual is None else options.virtual
    if options.nproc < 1:
        raise UserError(f"--nproc {options.nproc}: at least 1 worker is needed")
    if not 1 <= nodes_min <= nodes_max:
        raise UserError(f"--nodes-min {nodes_min} must be from 1 to --nodes-max {nodes_max}")
    if virtual < workers:
        of = "--nproc" if nodes_min == 1 else f"{nodes_min} nodes with --nproc"
        raise UserError(
            f"--virtual {virtual} is smaller than {of} {options.nproc}: every worker needs a "
            "virtual rank, so raise --virtual or lower --nproc"
        )
    if not 1 <= options.min_workers <= options.nproc * nodes_max:
        raise UserError(f"--min-workers {options.min_workers} must be from 1 to --nproc")
    if options.election:
        parse_election(options.election)
    if options.abandon_s < 2 * options.lease_s:
        raise UserError(f"--abandon-s {options.abandon_s} must be at least twice --lease-s")
    if options.store:
        _check_unused(options.store)
    for flag in ("threads", "losses_max", "hang_s", "lease_s", "keep_last"):
        if getattr(options, flag) <= 0:
            raise UserError(f"--{flag.replace('_', '-')} {getattr(options, flag)} must be positive")
    least_s, most_s = options.save_between
    if not 0 < least_s <= most_s:
        raise UserError(f"--save-between {least_s:g} {most_s:g}: LEAST must be from 0 to MOST")
    if options.scrub_rate < 0:
        raise UserError(f"--scrub-rate {options.scrub_rate:g} must not be negative")
    _check_shares(options)
    _check_backup(options, workers)
    if not options.script.is_file():
        raise UserError(f"there is no script {options.script}: check the path")
    script, args = str(options.script), list(options.args)
    if options.faults is not None:
        _check_faults(options.faults)
        script, args = DISTURBED, [str(options.faults.absolute()), script, *args]
    return JobSpec(
        job=secrets.token_hex(8),
        cwd=os.getcwd(),
        election=options.election,
        script=script,
        args=tuple(args),
        nproc=options.nproc,
        nodes_min=nodes_min,
        nodes_max=nodes_max,
        virtual_ranks=virtual,
        workers_min=options.min_workers,
        seed=options.seed,
        threads=options.threads,
        lease_s=options.lease_s,
        abandon_s=options.abandon_s,
        hang_s=options.hang_s,
        losses_max=options.losses_max,
        store=absolute_store(options.store) if options.store else "",
        save_every=options.save_every,
        save_least_s=least_s,
        save_most_s=most_s,
        keep_last=options.keep_last,
        scrub_rate=options.scrub_rate * 1e6,
        rebalance=not options.no_rebalance,
        speculation=options.speculation_budget,
        audit=options.audit,
        audit_tolerance=options.audit_tolerance,
        backup=options.backup,
        fingerprint_steps=options.fingerprint_steps,
    )
