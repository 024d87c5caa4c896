"""`holdfast launch` runs a job on nodes that it asks a cluster manager for, and replaces."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from holdfast.engine.fleet.fleet_plan import read_plan
from holdfast.engine.net.standard_streams import print_plain
from holdfast.engine.plugins import find_launcher, find_manager, list_launchers
from holdfast.engine.runtime.rundir import RunDir

LOCAL = "local"


def main(argv: list[str]) -> int:
    """Run the launcher that the first argument names."""
    if not argv or argv[0] in ("-h", "--help"):
        print_plain("usage: holdfast launch MANAGER [OPTION ...] SCRIPT [ARG ...]\n")
        for word, manager in list_launchers().items():
            print_plain(f"  {word:<6} {manager.text}")
        print_plain("\nholdfast launch MANAGER --help tells more of one.")
        return 0 if argv else 2
    return int(import_module(find_launcher(argv[0]).launcher).main(argv[1:]))


def go_on(run_dir: RunDir, host: str, port: int) -> int:
    """Go on with a job that a launcher began. Returns the exit status."""
    return int(_launcher_of(read_plan(run_dir).manager).go_on(run_dir, host, port))


def _launcher_of(manager: str) -> ModuleType:
    """Import the launcher of a manager that keeps a job going on this machine."""
    module = import_module(find_manager(manager).launcher or find_manager(LOCAL).launcher)
    return module if hasattr(module, "go_on") else import_module(find_manager(LOCAL).launcher)
