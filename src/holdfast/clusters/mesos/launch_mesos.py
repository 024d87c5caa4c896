"""`holdfast launch mesos` runs a job in tasks of one Mesos framework."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
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
from holdfast.clusters.mesos.mesos_manager import NAME, PROOF, access_of, open_manager
from holdfast.clusters.mesos.mesos_session import MesosSession
from holdfast.clusters.rest_link import NOT_JSON, UNKNOWN, RestLink, check_access
from holdfast.engine.commands.launch_options import (
    ABANDON_S,
    check_launch,
    make_run_dir,
    own_address,
    prefer,
)
from holdfast.engine.core.errors import Refused, UserError, WorldError, first_line
from holdfast.engine.fleet.fleet_plan import read_plan
from holdfast.engine.runtime.rundir import RunDir

EXAMPLE = "http://HOST:5050, a master's web address"
OPERATOR, FORBIDDEN = "/api/v1", 403
LIMITS: dict[str, tuple[float, float]] = {
    "cpus": (0.01, 10_000),
    "memory": (1, 1 << 30),
    "gpus": (0, 10_000),
    "failover_s": (60, 31_536_000),
}


def main(argv: list[str]) -> int:
    """Run a job to its end. Returns the exit status."""
    options = parser().parse_args(argv)
    check_launch(options)
    check_values(options)
    prefer(options, "nodes.abandon_s", ABANDON_S)
    settings = {
        "runs_as": own_user(),
        "ca": path_of(options.ca_file),
        "password_file": path_of(options.password_file),
        **{key: str(getattr(options, key)) for key in ("master", "user", "role", *LIMITS)},
    }
    access = access_of(settings)
    check_access(access, "--master", EXAMPLE)
    check_cluster(RestLink(access, NAME, PROOF), options)
    settings["listen"] = options.host or own_address("--master", options.master.split(",")[0])
    run_dir = make_run_dir(options, "mesos", settings)
    start(run_dir)
    try:
        return go_on(run_dir, settings["listen"], options.port)
    except BaseException:  # the framework would outlive this command
        end(run_dir)
        raise


def go_on(run_dir: RunDir, host: str, port: int) -> int:
    """Run a job, or go on with it, from here; the framework ends with it."""
    return run_application(run_dir, host, port, end)


def parser() -> argparse.ArgumentParser:
    return application_parser(
        "mesos",
        "Mesos",
        (
            "a Mesos cluster, in tasks of one framework",
            "hosts that are scheduled for maintenance",
        ),
        ("master", "URL", "", "address of a master, or of several with commas, http://HOST:5050"),
        ("role", "NAME", "*", "role whose resources are used (default %(default)s)"),
        ("user", "NAME", "", "prove to be NAME, the principal, with --password-file"),
        ("cpus", "N", 1.0, "CPUs of each task (default %(default)g)"),
        ("memory", "MB", 4096, "memory of each task, in MB (default %(default)s)"),
        ("gpus", "N", 0, "GPUs of each task (default %(default)s)"),
        ("failover-s", "S", 3600.0, "Mesos ends all tasks when neither this command nor "
         "`holdfast resume` is there for so long (default %(default)g)"),
        ("password-file", "FILE", None, "read --user's password from a file only you can read"),
        ("ca-file", "FILE", None, "trust the certificates in this file (https)"),
    )  # fmt: skip


def check_values(options: argparse.Namespace) -> None:
    """Raise UserError for a value that Mesos would refuse, or could never satisfy."""
    if not options.master:
        raise UserError(f"there is no Mesos master to ask: name one, --master {EXAMPLE}")
    check_limits(options, LIMITS, "user", "password-file")


def check_cluster(link: RestLink, options: argparse.Namespace) -> None:
    """Raise UserError unless a master of Mesos is there, and it has agents enough."""
    try:
        answer = link.of_any(lambda: link.ask_now("POST", OPERATOR, {"type": "GET_AGENTS"}))
        if answer.status == UNKNOWN or answer.document is NOT_JSON:
            raise UserError(f"--master {options.master} is no Mesos: it does not know {OPERATOR}")
        if answer.status == FORBIDDEN:
            return  # agents are shown to operators alone
        if not answer.accepted:
            raise link.failure(answer)
    except WorldError as error:
        raise UserError(f"--master {options.master} cannot be used: {first_line(error)}") from None
    agents = answer.document.get("get_agents", {}).get("agents", ())
    fitting = sum(has_room(each, options) for each in agents)
    wanted = {"CPUs": options.cpus, "MB": options.memory, "GPUs": options.gpus}
    check_room(options, fitting, wanted)


def has_room(agent: Mapping[str, Any], options: argparse.Namespace) -> bool:
    """Return whether an agent is large enough for one of the tasks."""
    total = dict.fromkeys(("cpus", "mem", "gpus"), 0.0)
    for each in agent.get("total_resources", ()):
        if each["name"] in total:
            total[each["name"]] += each["scalar"]["value"]
    enough = total["cpus"] >= options.cpus and total["mem"] >= options.memory
    return bool(agent.get("active") and enough and total["gpus"] >= options.gpus)


def start(run_dir: RunDir) -> None:
    """Have Mesos know the framework. UserError: it refuses."""
    told, session = read_plan(run_dir).settings, session_of(run_dir)
    try:
        session.subscription()
    except Refused as error:
        if "ole" in first_line(error):  # role, or Role
            text = f"--role {told['role']}: {first_line(error)}; name another"
            raise UserError(text) from None
        raise UserError(f"the framework is refused: {first_line(error)}") from None
    except WorldError as error:
        raise UserError(f"--master {told['master']} cannot be used: {first_line(error)}") from None
    finally:
        session.close()


def end(run_dir: RunDir) -> None:
    """End the framework, or say that it may still be there."""
    session = session_of(run_dir)
    remedy = f"curl -d frameworkId={session.kept_id()} MASTER/master/teardown"
    end_application(session.end, f"framework {session.kept_id()}", remedy)


def session_of(run_dir: RunDir) -> MesosSession:
    return open_manager(read_plan(run_dir), run_dir.spec()).session
