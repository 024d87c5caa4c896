"""`holdfast launch yarn` runs a job in containers of a YARN service, on a Hadoop cluster."""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from holdfast.clusters.launch_application import (
    application_parser,
    check_limits,
    check_room,
    end_application,
    own_user,
    path_of,
    run_application,
)
from holdfast.clusters.rest_link import RestAccess, RestLink, check_access
from holdfast.clusters.yarn.yarn_manager import (
    NAME,
    VERSION,
    NameTaken,
    QueueRefused,
    YarnManager,
    is_switched_off,
    list_nodes,
    open_manager,
)
from holdfast.engine.commands.launch_command import (
    ABANDON_S,
    check_launch,
    make_run_dir,
    own_address,
    prefer,
    run_dir_of,
)
from holdfast.engine.core.errors import Refused, UserError, WorldError, first_line
from holdfast.engine.fleet.cluster_manager import read_plan
from holdfast.engine.runtime.rundir import RunDir

EXAMPLE = "http://HOST:8088, its ResourceManager's web address"
SERVICE_NAME = r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?"
LIMITS = {"cpus": (1, 10_000), "memory": (1, 1 << 30), "gpus": (0, 10_000)}
RUNNING = "RUNNING"
# YARN replaces {{X}}, <LOG_DIR> and <CPS>, then runs the command in double quotes of a shell. A
# single quote in a path would be quoted by double ones.
CHANGED = re.compile(r"""\{\{|\}\}|<LOG_DIR>|<CPS>|[$`"'\\]""")


def main(argv: list[str]) -> int:
    """Run a job to its end. Returns the exit status."""
    options = parser().parse_args(argv)
    check_launch(options)
    check_values(options)
    prefer(options, "nodes.abandon_s", ABANDON_S)
    proved = options.kerberos
    access = RestAccess(
        address=options.rm,
        user="" if proved else options.user or own_user(),
        ca=path_of(options.ca_file),
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
    asyncio.run(create(run_dir, lambda manager, nodes: manager.create(nodes)))
    return run(run_dir, settings["listen"], options.port)


def go_on(run_dir: RunDir, host: str, port: int) -> int:
    """Continue a job from here; its service is started again if that has ended."""
    if asyncio.run(create(run_dir, lambda manager, nodes: manager.create_again(nodes))):
        return run(run_dir, host, port)
    return run_application(run_dir, host, port, destroy)


def run(run_dir: RunDir, host: str, port: int) -> int:
    """Run a job from here; the service ends with it."""
    try:
        return run_application(run_dir, host, port, destroy)
    except BaseException:  # the service would outlive this command
        destroy(run_dir)
        raise


def parser() -> argparse.ArgumentParser:
    return application_parser(
        "yarn",
        "YARN",
        (
            "a Hadoop cluster, in containers of one YARN service",
            "nodes that YARN decommissions",
        ),
        ("rm", "URL", "", "the ResourceManager's web address, such as http://HOST:8088"),
        ("service", "NAME", "", "name of the service in YARN (default: hf- and the job's id)"),
        ("queue", "NAME", "", "queue of the service (default: YARN's own)"),
        ("user", "NAME", "", "say that NAME asks (default: who you are on this machine)"),
        ("principal", "NAME", "", "Kerberos principal of the service's master, USER/_HOST@REALM"),
        ("keytab", "URI", "", "its keytab, file:///... on all nodes or hdfs://..."),
        ("cpus", "N", 1, "virtual cores of each container (default %(default)s)"),
        ("memory", "MB", 4096, "memory of each container, in MB (default %(default)s)"),
        ("gpus", "N", 0, "GPUs of each container, as yarn.io/gpu (default %(default)s)"),
        ("ca-file", "FILE", None, "trust the certificates in this file (https)"),
        ("kerberos", "", False, "prove with your Kerberos ticket who you are (SPNEGO); needs "
         "holdfast[yarn]"),
    )  # fmt: skip


def check_values(options: argparse.Namespace) -> None:
    """Raise UserError for a value that YARN would refuse, or could never satisfy."""
    if not options.rm:
        raise UserError(f"there is no ResourceManager to ask: name one, --rm {EXAMPLE}")
    check_limits(options, LIMITS, "principal", "keytab")
    check_path("--run-dir", str(run_dir_of(options)))
    check_path("the Python of Holdfast", sys.executable)
    if options.service and not re.fullmatch(SERVICE_NAME, options.service):
        raise UserError(
            f"--service {options.service[:100]!r} cannot be right: use small letters, digits and "
            "inner hyphens, a letter first, 63 characters at most"
        )


def check_path(what: str, path: str) -> None:
    """Raise UserError for a path that YARN would change in the command of a container."""
    found = CHANGED.search(path)
    if found:
        raise UserError(
            f"{what} {path!r} cannot be used: YARN expands or breaks on {found.group()!r} in the "
            "command of a container; choose a path without it"
        )


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
    check_room(options, fitting, {"MB": options.memory, "virtual cores": options.cpus})


def has_room(node: Mapping[str, Any], options: argparse.Namespace) -> bool:
    """Return whether a node is large enough for one of the containers."""
    memory = node.get("usedMemoryMB", 0) + node.get("availMemoryMB", 0)
    cores = node.get("usedVirtualCores", 0) + node.get("availableVirtualCores", 0)
    enough = memory >= options.memory and cores >= options.cpus
    return node.get("state") == RUNNING and bool(enough)


async def create(run_dir: RunDir, start: Callable[[YarnManager, int], Awaitable[bool]]) -> bool:
    """Start the service with the plan's number of nodes; return `start`'s answer. UserError."""
    plan = read_plan(run_dir)
    settings, manager = plan.settings, open_manager(plan, run_dir.spec())
    try:
        return await start(manager, plan.nodes)
    except NameTaken:
        raise UserError(
            f"--service {manager.name}: YARN has a service of this name; choose another, or "
            f"remove that one with `yarn app -destroy {manager.name}`"
        ) from None
    except QueueRefused as error:
        queue = settings["queue"] or "default"
        raise UserError(f"--queue {queue}: {first_line(error)}; name another") from None
    except Refused as error:
        raise UserError(f"the service is refused: {first_line(error)}") from None
    except WorldError as error:
        raise UserError(f"--rm {settings['rm']} cannot be used: {first_line(error)}") from None


def destroy(run_dir: RunDir) -> None:
    """End the service, or print that it may still be there."""
    manager = open_manager(read_plan(run_dir), run_dir.spec())
    remedy = f"yarn app -destroy {manager.name}"
    end_application(lambda: asyncio.run(manager.destroy()), f"service {manager.name}", remedy)
