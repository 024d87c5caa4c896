"""`holdfast launch yarn` runs a job in containers of a YARN service, on a Hadoop cluster."""

from __future__ import annotations

import argparse
import asyncio
import getpass
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.cli.launch_options import (
    ABANDON_S,
    HERE,
    WAIT,
    check_launch,
    launch_parser,
    make_run_dir,
    own_address,
    prefer,
)
from holdfast.core.errors import Refused, UserError, WorldError, first_line
from holdfast.launch.cluster_job import launch_cluster_job
from holdfast.launch.fleet_plan import read_plan
from holdfast.launch.rest_link import RestAccess, RestLink, check_access
from holdfast.launch.yarn_manager import (
    NAME,
    VERSION,
    is_switched_off,
    list_nodes,
    open_manager,
)
from holdfast.runtime.rundir import RunDir

EXAMPLE = "http://HOST:8088, its ResourceManager's web address"
SERVICE_NAME = r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?"
LIMITS = {"cpus": (1, 10_000), "memory": (1, 1 << 30), "gpus": (0, 10_000)}
RUNNING = "RUNNING"


def main(argv: list[str]) -> int:
    """Run a job to its end. Returns the exit status."""
    options = parser().parse_args(argv)
    check_launch(options)
    check_values(options)
    prefer(options, "nodes.abandon_s", ABANDON_S)
    proved = options.kerberos
    access = RestAccess(
        address=options.rm,
        user="" if proved else options.user or getpass.getuser(),
        ca=str(options.ca_file.absolute()) if options.ca_file is not None else "",
        kerberos=proved,
    )
    check_access(access, "--rm", EXAMPLE)
    asyncio.run(check_cluster(RestLink(access, NAME), options))
    settings = {
        "rm": access.address,
        "user": access.user,
        "ca": access.ca,
        "kerberos": "yes" if proved else "",
        "listen": options.host or own_address("--rm", access.address),
        **{key: str(getattr(options, key)) for key in ("service", "queue", *LIMITS)},
        **{key: getattr(options, key) for key in ("principal", "keytab")},
    }
    run_dir = make_run_dir(options, "yarn", settings)
    asyncio.run(create(run_dir))
    try:
        return go_on(run_dir, settings["listen"], options.port)
    except BaseException:  # the service would outlive this command
        destroy(run_dir)
        raise


def go_on(run_dir: RunDir, host: str, port: int) -> int:
    """Run a job, or go on with it, from here; the service ends with it."""
    code = launch_cluster_job(
        run_dir, read_plan(run_dir).settings["listen"] if host == HERE else host, port
    )
    destroy(run_dir)
    return code


def parser() -> argparse.ArgumentParser:
    found = launch_parser(
        "yarn",
        "Run a training script on a Hadoop cluster, in containers of one YARN service: one agent "
        "in each, each on a host of its own. Nodes that are lost are replaced, and nodes that YARN "
        "decommissions are left. Coordinator and fleet run here. The run directory must be on a "
        "file system that all nodes share; workers' output goes to files in it.",
    )
    found.set_defaults(host="")
    group = found.add_argument_group("YARN")
    for name, metavar, default, text in (
        ("rm", "URL", "", "the ResourceManager's web address, such as http://HOST:8088"),
        ("service", "NAME", "", "name of the service in YARN (default: hf- and the job's id)"),
        ("queue", "NAME", "", "queue of the service (default: YARN's own)"),
        ("user", "NAME", "", "say that NAME asks (default: who you are on this machine)"),
        ("principal", "NAME", "", "Kerberos principal of the service's master, USER/_HOST@REALM"),
        ("keytab", "URI", "", "its keytab, file:///... on all nodes or hdfs://..."),
    ):
        group.add_argument(f"--{name}", metavar=metavar, default=default, help=text)
    for name, metavar, number, text in (
        ("cpus", "N", 1, "virtual cores of each container (default %(default)s)"),
        ("memory", "MB", 4096, "memory of each container, in MB (default %(default)s)"),
        ("gpus", "N", 0, "GPUs of each container, as yarn.io/gpu (default %(default)s)"),
    ):
        group.add_argument(f"--{name}", metavar=metavar, type=int, default=number, help=text)
    group.add_argument(
        "--ca-file", type=Path, metavar="FILE", help="trust the certificates in this file (https)"
    )
    group.add_argument(
        "--kerberos",
        action="store_true",
        help="prove with your Kerberos ticket who you are (SPNEGO); needs holdfast[yarn]",
    )
    group.add_argument(
        WAIT,
        action="store_true",
        help="begin although the cluster has fewer nodes than --nodes: they will come",
    )
    return found


def check_values(options: argparse.Namespace) -> None:
    """Raise UserError for a value that YARN would refuse, or could never satisfy."""
    if not options.rm:
        raise UserError(f"there is no ResourceManager to ask: name one, --rm {EXAMPLE}")
    for name, (least, most) in LIMITS.items():
        given = getattr(options, name)
        if not least <= given <= most:
            raise UserError(f"--{name} {given}: a container has from {least} to {most}")
    if options.service and not re.fullmatch(SERVICE_NAME, options.service):
        raise UserError(
            f"--service {options.service[:100]!r} cannot be right: use small letters, digits and "
            "inner hyphens, a letter first, 63 characters at most"
        )
    if bool(options.principal) != bool(options.keytab):
        raise UserError("--principal and --keytab belong together: give both, or none")


async def check_cluster(link: RestLink, options: argparse.Namespace) -> None:
    """Raise UserError unless YARN is there, starts services, and has nodes enough."""
    try:
        answer = await link.ask("GET", VERSION)
        if is_switched_off(answer):
            raise UserError(
                f"the ResourceManager at --rm {options.rm} has no services API: set "
                "yarn.webapp.api-service.enable to true in its yarn-site.xml, and start it again"
            )
        if not answer.accepted:
            raise link.failure(answer)
        fitting = sum(has_room(node, options) for node in await list_nodes(link))
    except WorldError as error:
        raise UserError(f"--rm {options.rm} cannot be used: {first_line(error)}") from None
    if fitting < options.nodes and not options.wait_for_nodes:
        raise UserError(
            f"--nodes {options.nodes}: the cluster has {fitting} with {options.memory} MB and "
            f"{options.cpus} virtual cores; ask for fewer or smaller ones, or give {WAIT} if they "
            "will come"
        )


def has_room(node: Mapping[str, Any], options: argparse.Namespace) -> bool:
    """Return whether a node is large enough for one of the containers."""
    memory = node.get("usedMemoryMB", 0) + node.get("availMemoryMB", 0)
    cores = node.get("usedVirtualCores", 0) + node.get("availableVirtualCores", 0)
    enough = memory >= options.memory and cores >= options.cpus
    return node.get("state") == RUNNING and bool(enough)


async def create(run_dir: RunDir) -> None:
    """Have YARN start the service. UserError: it refuses."""
    plan = read_plan(run_dir)
    told, manager = plan.settings, open_manager(plan, run_dir.spec())
    try:
        await manager.create(plan.nodes)
    except Refused as error:
        said = first_line(error)
        if "already" in said:
            raise UserError(
                f"--service {manager.name}: YARN has a service of this name; choose another, or "
                f"remove that one with `yarn app -destroy {manager.name}`"
            ) from None
        if "queue" in said:
            raise UserError(f"--queue {told['queue'] or 'default'}: {said}; name another") from None
        raise UserError(f"the service is refused: {said}") from None
    except WorldError as error:
        raise UserError(f"--rm {told['rm']} cannot be used: {first_line(error)}") from None


def destroy(run_dir: RunDir) -> None:
    """End the service, or say that it may still be there."""
    manager = open_manager(read_plan(run_dir), run_dir.spec())
    try:
        asyncio.run(manager.destroy())
    except (WorldError, OSError) as error:
        print(
            f"holdfast: service {manager.name} may still be there ({first_line(error)}): remove it "
            f"with `yarn app -destroy {manager.name}`",
            file=sys.stderr,
            flush=True,
        )
