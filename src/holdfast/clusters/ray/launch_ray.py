"""`holdfast launch ray` runs a job on nodes of a Ray cluster, from a machine of that cluster."""

from __future__ import annotations

import argparse
import contextlib
import socket
from typing import Any

from holdfast.clusters.ray.ray_link import link_to
from holdfast.clusters.ray.ray_manager import SHARED, RayShare
from holdfast.clusters.ray.ray_tables import read_tables
from holdfast.engine.commands.launch_options import (
    ABANDON_S,
    HERE,
    REACHED,
    WAIT,
    check_launch,
    launch_parser,
    make_run_dir,
    prefer,
)
from holdfast.engine.core.errors import UserError, WorldError, first_line
from holdfast.engine.fleet.cluster_job import launch_cluster_job
from holdfast.engine.fleet.fleet_plan import read_plan
from holdfast.engine.runtime.rundir import RunDir

CONNECT_S = 5.0
SHARE_MAX = 100_000  # cores or GPUs of one machine
DOMAIN_LABEL = "ray.io/availability-zone"


def main(argv: list[str]) -> int:
    """Run a job to its end. Returns the exit status."""
    options = parser().parse_args(argv)
    for name in ("cpus", "gpus"):
        if not 0 <= getattr(options, name) <= SHARE_MAX:
            given = getattr(options, name)
            raise UserError(f"--{name} {given:g}: an agent needs 0 or more, at most {SHARE_MAX}")
    check_launch(options)
    prefer(options, "nodes.abandon_s", ABANDON_S)
    host = reach(options)
    settings = {
        "address": options.address,
        "cpus": f"{options.cpus:g}",
        "gpus": f"{options.gpus:g}",
        "domain": options.domain_label,
        "listen": options.host,
        SHARED: "yes" if options.shared else "",
    }
    return go_on(make_run_dir(options, "ray", settings), host, options.port)


def go_on(run_dir: RunDir, host: str, port: int) -> int:
    """Run a job, or go on with it, from here."""
    settings = read_plan(run_dir).settings
    if host == HERE:
        host = settings["listen"] or ask(settings["address"], "hello")[0]["host"]
    return launch_cluster_job(run_dir, host, port)


def parser() -> argparse.ArgumentParser:
    found = launch_parser(
        "ray",
        "Run a training script on nodes of a Ray cluster: one agent on each, in a detached actor. "
        "Nodes that are lost are replaced, and nodes that Ray drains are left. Coordinator and "
        "fleet run here, on a machine that is in the cluster. What workers print goes to files in "
        "the run directory.",
        {"--host": REACHED, "--abandon-s": f"{ABANDON_S:g}"},
    )
    group = found.add_argument_group("Ray")
    group.add_argument(
        "--domain-label",
        default=DOMAIN_LABEL,
        metavar="LABEL",
        help="failure domains: the values of this label of nodes (default: %(default)s)",
    )
    group.add_argument(
        "--address",
        default="auto",
        metavar="HOST:PORT",
        help="address of the cluster's head, as `ray start` prints it (default: RAY_ADDRESS, or "
        "the cluster that this machine has joined)",
    )
    group.add_argument(
        "--cpus",
        type=float,
        default=1.0,
        metavar="N",
        help="processor cores that Ray sets aside for each agent (default %(default)g)",
    )
    group.add_argument(
        "--gpus",
        type=float,
        default=0.0,
        metavar="N",
        help="GPUs that Ray sets aside for each agent, which sees no others (default %(default)g)",
    )
    group.add_argument(
        WAIT,
        action="store_true",
        help="begin although the cluster has fewer nodes than --nodes: they will come, for example "
        "by its autoscaler",
    )
    group.add_argument(
        "--not-shared",
        dest="shared",
        action="store_false",
        help="the run directory is not on a file system that all nodes share: each node has one of "
        "its own at this path, and is given the job's secret through Ray",
    )
    return found


def reach(options: argparse.Namespace) -> str:
    """Return this machine's address in the cluster, which has nodes enough. UserError."""
    hello, found = ask(options.address, "hello", "tables")
    share = RayShare(cpus=options.cpus, gpus=options.gpus).resources
    fitting = read_tables(found).fitting(share)
    if fitting < options.nodes and not options.wait_for_nodes:
        each = ", ".join(f"{number:g} {name}" for name, number in share.items())
        raise UserError(
            f"--nodes {options.nodes}: the cluster has {fitting} with {each}; start more, or give "
            f"{WAIT} if they come by themselves"
        )
    return str(options.host or hello["host"])


def ask(address: str, *words: str) -> list[Any]:
    """Ask the cluster some questions. UserError: there is no cluster, or no Ray."""
    where = f"no Ray cluster can be used at --address {address}"
    if "://" in address:
        raise UserError(f"{where}: give HOST:PORT of its head, on a machine that is in the cluster")
    host, _, port = address.rpartition(":")
    try:
        with contextlib.closing(link_to(address)) as link:
            if port.isdecimal():  # Ray would try for a minute
                socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
            return [link.ask(word) for word in words]
    except (WorldError, OSError, OverflowError) as error:
        raise UserError(
            f"{where} ({first_line(error)}): start one with `ray start --head`, and join it from "
            "here with `ray start --address HOST:PORT`"
        ) from None
