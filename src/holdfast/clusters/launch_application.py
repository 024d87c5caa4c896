"""Helps launchers whose manager knows a job as an application: YARN's service, Mesos' framework."""

from __future__ import annotations

import argparse
import getpass
import os
import pwd
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from holdfast.engine.commands.launch_command import ABANDON_S, HERE, REACHED, WAIT, launch_parser
from holdfast.engine.core.errors import UserError, WorldError, first_line
from holdfast.engine.fleet.cluster_job import launch_cluster_job
from holdfast.engine.fleet.cluster_manager import read_plan
from holdfast.engine.net.standard_streams import print_line
from holdfast.engine.runtime.rundir import RunDir

DESCRIPTION = (
    "Run a training script on {}: one agent in each, each on a host of its own. Nodes that are "
    "lost are replaced, and {} are left. Coordinator and fleet run here. The run directory must be "
    "on a file system that all nodes share; workers' output goes to files in it."
)
Option = tuple[str, str, Any, str]  # name, metavar, default, help; its type is the default's


def application_parser(
    manager: str, title: str, parts: tuple[str, str], *options: Option
) -> argparse.ArgumentParser:
    """Make a parser with the options of all launchers and with these.

    `parts`: where agents run, and which nodes the job leaves by itself. A default of None makes an
    option for a file, and False a flag.
    """
    defaults = {"--host": REACHED, "--abandon-s": f"{ABANDON_S:g}"}
    found = launch_parser(manager, DESCRIPTION.format(*parts), defaults)
    group = found.add_argument_group(title)
    for name, metavar, default, text in options:
        if default is False:
            group.add_argument(f"--{name}", action="store_true", help=text)
        else:
            kind = Path if default is None else type(default)
            group.add_argument(f"--{name}", metavar=metavar, type=kind, default=default, help=text)
    group.add_argument(
        WAIT,
        action="store_true",
        help="begin although the cluster has fewer nodes than --nodes: they will come",
    )
    return found


def check_limits(
    options: argparse.Namespace, limits: Mapping[str, tuple[float, float]], *pair: str
) -> None:
    """Raise UserError for a number out of its limits, or for one alone of a pair of options."""
    for name, (least, most) in limits.items():
        given = getattr(options, name)
        if not least <= given <= most:
            option = name.replace("_", "-")
            raise UserError(f"--{option} {given:g} must be from {least:g} to {most:.12g}")
    if len({bool(getattr(options, name.replace("-", "_"))) for name in pair}) > 1:
        both = " and ".join(f"--{name}" for name in pair)
        raise UserError(f"{both} belong together: give both, or none")


def check_room(options: argparse.Namespace, fitting: int, wanted: Mapping[str, float]) -> None:
    """Raise UserError if fewer nodes than asked have room for `wanted`, amounts by unit."""
    if fitting < options.nodes and not options.wait_for_nodes:
        text = ", ".join(f"{number:g} {unit}" for unit, number in wanted.items() if number)
        raise UserError(
            f"--nodes {options.nodes}: the cluster has {fitting} with {text}; ask for fewer or "
            f"smaller ones, or give {WAIT} if they will come"
        )


def own_user() -> str:
    """Return the user of this process, which the environment may misname."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return getpass.getuser()


def path_of(file: Path | None) -> str:
    """Return the full path of a file that an option names; "" for none."""
    return str(file.absolute()) if file is not None else ""


def run_application(run_dir: RunDir, host: str, port: int, end: Callable[[RunDir], None]) -> int:
    """Run a job, or continue it, from here; then end the application.

    Returns the exit status.
    """
    there = read_plan(run_dir).settings["listen"] if host == HERE else host
    code = launch_cluster_job(run_dir, there, port)
    end(run_dir)
    return code


def end_application(end: Callable[[], None], name: str, remedy: str) -> None:
    """End an application, or print that it may still be there."""
    try:
        end()
    except (WorldError, OSError) as error:
        print_line(f"{name} may still be there ({first_line(error)}): remove it with `{remedy}`")
