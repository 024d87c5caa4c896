"""`holdfast launch desk` runs a job on the desk."""

from __future__ import annotations

from holdfast.engine.commands.launch_command import launch_parser, make_run_dir
from holdfast.engine.fleet.cluster_job import launch_cluster_job
from holdfast.engine.runtime.rundir import RunDir


def main(argv: list[str]) -> int:
    """Run a job to its end. Returns the exit status."""
    parser = launch_parser("desk", "Run a training script on nodes that are on this desk.")
    options = parser.parse_args(argv)
    return go_on(make_run_dir(options, "desk", {}), options.host, options.port)


def go_on(run_dir: RunDir, host: str, port: int) -> int:
    """Run a job, or continue it, from here."""
    return launch_cluster_job(run_dir, host, port)
