"""`holdfast launch` runs a job on nodes that it asks a cluster manager for, and replaces."""

from __future__ import annotations

import importlib

from holdfast.core.errors import UserError
from holdfast.launch.fleet_plan import read_plan
from holdfast.net.standard_streams import print_plain
from holdfast.runtime.rundir import RunDir

LAUNCHERS = {
    "slurm": "a batch job of Slurm, and further ones as it grows",
    "ray": "nodes of a Ray cluster, by an actor on each",
    "yarn": "containers of a service on a Hadoop cluster",
    "mesos": "tasks of a framework on a Mesos cluster",
    "local": "processes of this machine that stand for nodes, to try things out",
    "k8s": "pods of Kubernetes: writes the manifests, or applies them",
}


def main(argv: list[str]) -> int:
    """Run the launcher that the first argument names; each is a module holdfast.cli.launch_NAME."""
    if not argv or argv[0] in ("-h", "--help"):
        print_plain("usage: holdfast launch MANAGER [OPTION ...] SCRIPT [ARG ...]\n")
        for name, text in LAUNCHERS.items():
            print_plain(f"  {name:<6} {text}")
        print_plain("\nholdfast launch MANAGER --help tells more of one.")
        return 0 if argv else 2
    if argv[0] not in LAUNCHERS:
        raise UserError(f"there is no launcher {argv[0]!r}: use one of {', '.join(LAUNCHERS)}")
    return int(importlib.import_module(f"holdfast.cli.launch_{argv[0]}").main(argv[1:]))


def go_on(run_dir: RunDir, host: str, port: int) -> int:
    """Go on with a job that a launcher began. Returns the exit status."""
    manager = read_plan(run_dir).manager
    found = manager if manager in LAUNCHERS else "local"
    module = importlib.import_module(f"holdfast.cli.launch_{found}")
    return int(module.go_on(run_dir, host, port))
