"""`holdfast launch` runs a job on nodes that it asks a cluster manager for, and replaces.

The launchers of all managers make their options, the job and its plan by the functions here.
"""

from __future__ import annotations

import argparse
import dataclasses
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from holdfast.engine.commands import run_command
from holdfast.engine.commands.job_options import read_config
from holdfast.engine.core.errors import UserError
from holdfast.engine.core.job_spec import JobSpec
from holdfast.engine.fleet.cluster_manager import FleetPlan, read_plan
from holdfast.engine.host.external_checks import parse_all_checks
from holdfast.engine.net.standard_streams import print_line, print_plain
from holdfast.engine.net.tcp import check_endpoint
from holdfast.engine.net.tls import peer_tls_of
from holdfast.engine.plugins import find_launcher, find_manager, list_launchers, load
from holdfast.engine.runtime.rundir import RunDir, choose_run_path

HERE = "127.0.0.1"  # the host that `holdfast resume` gives unless --host names another one
WAIT = "--wait-for-nodes"
REACHED = "the address by which the cluster reaches this machine"
# Where `holdfast resume` gives all nodes of the time before back, and then begins.
ABANDON_S = 60.0
DRAIN_S = 60.0
DRAIN_MAX_S = 65535.0  # Slurm signals a job that long before its end at most
LOCAL = "local"  # the manager whose launcher keeps a job going for managers without one


def main(argv: list[str]) -> int:
    """Run the launcher that the first argument names."""
    if not argv or argv[0] in ("-h", "--help"):
        print_plain("usage: holdfast launch MANAGER [OPTION ...] SCRIPT [ARG ...]\n")
        for word, manager in list_launchers().items():
            print_plain(f"  {word:<6} {manager.text}")
        print_plain("\nholdfast launch MANAGER --help describes its options.")
        return 0 if argv else 2
    return int(load("launcher", argv[0], find_launcher(argv[0]).launcher).main(argv[1:]))


def go_on(run_dir: RunDir, host: str, port: int) -> int:
    """Continue a job that a launcher began. Returns the exit status."""
    key = read_plan(run_dir).manager
    ours = find_manager(LOCAL).launcher
    module = load("launcher", key, find_manager(key).launcher or ours)
    if not hasattr(module, "go_on"):
        module = load("launcher", LOCAL, ours)
    return int(module.go_on(run_dir, host, port))


def launch_parser(
    manager: str, description: str, defaults: Mapping[str, str] | None = None
) -> argparse.ArgumentParser:
    """Make a parser with the options of `holdfast run`, and with the number of nodes.

    `defaults`: by their options, how --help describes defaults that differ from `holdfast run`. If
    --host is among them, it is "" unless it is given.
    """
    found = run_command.parser()
    hide_options(found, "--write-config", "--domain")
    shown = {"--nodes-min": "--nodes", "--nodes-max": "--nodes", **(defaults or {})}
    for option, text in shown.items():
        action = found._option_string_actions[option]
        action.help = f"{(action.help or '').partition('(default: ')[0]}(default: {text})"
    if defaults and "--host" in defaults:
        found.set_defaults(host="")
    found.prog, found.description = f"holdfast launch {manager}", description
    group = found.add_argument_group("nodes of the cluster")
    group.add_argument(
        "--nodes",
        type=int,
        default=1,
        metavar="N",
        help="begin with this many nodes (default 1); --nodes-min says how many the first step "
        "waits for (default: all of them), --nodes-max up to how many the job grows while the "
        "cluster has room (default: N); during a move there may be one more",
    )
    group.add_argument(
        "--drain-s",
        type=float,
        default=DRAIN_S,
        metavar="S",
        help="leave a node that is about to be taken this long before (default %(default)g)",
    )
    return found


def hide_options(found: argparse.ArgumentParser, *options: str) -> None:
    """Leave options out of --help: they are refused, with a reason."""
    for option in options:
        found._option_string_actions[option].help = argparse.SUPPRESS


def make_launch(
    options: argparse.Namespace,
    make: Callable[[argparse.Namespace], JobSpec] = run_command.make_spec,
) -> tuple[JobSpec, int]:
    """Make the job, and return it with the number of its nodes. UserError."""
    check_launch(options)
    if options.write_config is not None:
        raise UserError("--write-config is an option of `holdfast run`: use it there")
    if options.domain:
        text = "the cluster manager says in which domains nodes are; or give it to `holdfast agent`"
        raise UserError(f"--domain {options.domain[0]}: {text}")
    prefer(options, "nodes.min", options.nodes)
    prefer(options, "nodes.max", options.nodes)
    spec = make(options)
    wanted = spec.nodes_max
    if wanted < options.nodes:
        raise UserError(f"--nodes-max {wanted} must be at least --nodes {options.nodes}")
    nodes = dataclasses.replace(spec.nodes, max=wanted + 1)  # one takes another's place
    return dataclasses.replace(spec, nodes=nodes), wanted


def check_launch(options: argparse.Namespace) -> None:
    """Raise UserError for a value that no launcher can use."""
    if options.nodes < 1:
        raise UserError(f"--nodes {options.nodes}: at least 1 node is needed")
    if not 0 <= options.drain_s <= DRAIN_MAX_S:
        raise UserError(f"--drain-s {options.drain_s:g} must be from 0 to {DRAIN_MAX_S:g}")
    check_endpoint(options.host, options.port)
    parse_all_checks(options.check, options.check_limit_s)  # only for its UserError


def prefer(options: argparse.Namespace, key: str, value: object) -> None:
    """Set a setting of the job, unless the command line or the configuration file gives it."""
    given = read_config(options.config).settings if options.config is not None else {}
    if key not in given:
        vars(options).setdefault(key, value)


def make_run_dir(options: argparse.Namespace, manager: str, settings: Mapping[str, str]) -> RunDir:
    """Make the run directory of a job with its plan. UserError."""
    peer_tls_of(options.tls)  # raises UserError for a bad one
    spec, wanted = make_launch(options)
    run_dir = RunDir(run_dir_of(options))
    run_dir.create(spec, run_command.make_secret(options))
    FleetPlan(
        manager=manager,
        run_dir=str(run_dir.path),
        nodes=wanted,
        nodes_max=wanted + 1,
        drain_s=options.drain_s,
        tls=str(options.tls.absolute()) if options.tls is not None else "",
        agent_options=agent_options(options),
        settings=dict(settings),
    ).write()
    print_line(f"run directory {run_dir.path}")
    return run_dir


def run_dir_of(options: argparse.Namespace) -> Path:
    """Return the path of the run directory, and set the option where it was not given."""
    if options.run_dir is None:
        options.run_dir = choose_run_path()
    return Path(options.run_dir).absolute()


def agent_options(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the options of every agent: where notices come from, and the site's own checks."""
    notices = ["--notices", options.notices] if options.notices else []
    checks = [word for check in options.check for word in ("--check", check)]
    limit = ["--check-limit-s", f"{options.check_limit_s:g}"] if checks else []
    return (*notices, *checks, *limit)


def own_address(option: str, address: str) -> str:
    """Return the address of this machine from which another one is reached."""
    parts = urlsplit(address)
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)
        kind, _, _, _, there = found[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect(there)  # without sending a packet
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UserError(f"{option} {address} cannot be reached ({error.strerror})") from None
