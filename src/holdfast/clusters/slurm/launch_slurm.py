"""`holdfast launch slurm` submits a job to Slurm, whose nodes it then keeps."""

from __future__ import annotations

import os
import subprocess
import sys

from holdfast.clusters.slurm.slurm_options import clean_environment, read_options
from holdfast.clusters.slurm.slurm_scripts import escape_pattern, job_script
from holdfast.clusters.slurm.slurm_tables import read_problem
from holdfast.engine.commands.launch_options import launch_parser, make_run_dir, prefer
from holdfast.engine.core.errors import UserError
from holdfast.engine.fleet.fleet_plan import job_prefix, read_plan
from holdfast.engine.net.standard_streams import print_plain
from holdfast.engine.runtime.rundir import RunDir

SCRIPT = "slurm_job.sh"
ABANDON_S = 60.0  # only a requeue brings a coordinator back after so long, and that ends all nodes


def main(argv: list[str]) -> int:
    """Submit a job, and return at once. Exit status 0: Slurm has taken it in."""
    parser = launch_parser(
        "slurm",
        "Submit a training script to Slurm: one job with --nodes nodes, which starts a coordinator "
        "and one agent on each node, replaces nodes that are lost, leaves nodes that are drained, "
        "and grows by further jobs. The run directory must be on a file system that all nodes "
        "share. Workers' output goes to files in it.",
        {
            "--host": "the name of the node where the coordinator runs",
            "--abandon-s": f"{ABANDON_S:g}",
        },
    )
    group = parser.add_argument_group("Slurm")
    group.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="an option of sbatch for the job and its further jobs; may be repeated: "
        "--sbatch=--partition=gpu --sbatch=--time=12:00:00",
    )
    group.add_argument(
        "--write-script",
        action="store_true",
        help="write the batch script and say where it is, instead of submitting it",
    )
    options = parser.parse_args(argv)
    prefer(options, "nodes.abandon_s", ABANDON_S)
    found = read_options(options.sbatch, options.drain_s)
    settings = {"options": "\n".join(options.sbatch), "listen": options.host}
    run_dir = make_run_dir(options, "slurm", settings)
    if found.time_s is not None and not run_dir.spec().checkpoints.store:
        print_plain(
            "holdfast: without --store nothing is kept when the job's time is over: a job that "
            "takes longer than --sbatch=--time does not end its training",
            file=sys.stderr,
            flush=True,
        )
    write_script(run_dir, options.nodes, options.port)
    if options.write_script:
        print_plain(f"holdfast: submit it with: sbatch {run_dir.path / SCRIPT}", file=sys.stderr)
        return 0
    return submit(run_dir)


def go_on(run_dir: RunDir, host: str, port: int) -> int:
    """Submit a job again, as it was."""
    return submit(run_dir)


def write_script(run_dir: RunDir, nodes: int, port: int) -> None:
    plan, spec = read_plan(run_dir), run_dir.spec()
    host, given = plan.settings["listen"], plan.settings["options"]
    listen = (*(("--host", host) if host else ()), "--port", str(port))
    text = job_script(
        name=job_prefix(spec.job).rstrip("-"),
        prefix=job_prefix(spec.job),
        nodes=nodes,
        command=(sys.executable, "-m", "holdfast.engine.fleet.cluster_job", plan.run_dir, *listen),
        output=f"{escape_pattern(plan.run_dir)}/slurm-%j.txt",
        signal_s=plan.drain_s,
        options=read_options(given.split("\n") if given else ()).of_job(),
        has_store=bool(spec.checkpoints.store),
    )
    (run_dir.path / SCRIPT).write_text(text)


def submit(run_dir: RunDir) -> int:
    """Hand the script to sbatch. UserError with sbatch's words if it refuses."""
    try:
        found = subprocess.run(
            ["sbatch", "--parsable", str(run_dir.path / SCRIPT)],
            env=clean_environment(os.environ),
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        raise UserError(
            "there is no command sbatch here: use a machine that submits jobs"
        ) from None
    if found.returncode:
        raise UserError(f"sbatch refuses the job: {read_problem(found.stderr)}")
    print_plain(
        f"holdfast: submitted as Slurm job {found.stdout.strip()}", file=sys.stderr, flush=True
    )
    return 0
