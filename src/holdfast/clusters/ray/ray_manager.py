"""Runs a job on nodes of a Ray cluster, from a machine of that cluster: `holdfast launch ray`.

Each node is a detached actor, whose name is the placement's id. Ray makes no second actor of a
name. There are no placement groups: a group and its actor would be two requests, between which we
might end, and a group outlives its node. Ray is asked through a process that may hang or end at any
time (ray_driver.py).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from holdfast.clusters.ray.ray_tables import RayTables, read_tables
from holdfast.engine.commands.launch_command import (
    ABANDON_S,
    HERE,
    REACHED,
    WAIT,
    check_launch,
    launch_parser,
    make_run_dir,
    prefer,
)
from holdfast.engine.core.errors import Refused, Unreachable, UserError, WorldError, first_line
from holdfast.engine.core.fleet.placements import Placement, PlacementId
from holdfast.engine.core.job_spec import JobSpec
from holdfast.engine.fleet.cluster_job import launch_cluster_job
from holdfast.engine.fleet.cluster_manager import FleetPlan, PlacementOrder, job_prefix, read_plan
from holdfast.engine.net.descriptors import wait_readable
from holdfast.engine.net.secret import VARIABLE, read_run_dir
from holdfast.engine.runtime.rundir import RunDir
from holdfast.engine.state.store.regular_files import append_regular

ANSWER_S = 25.0  # with the start of a driver


class RayLink:
    """Keeps one driver while it answers, and starts it when it is needed. Threads may share it.

    `log`: where Ray's own messages go; without one they go where ours do.
    """

    def __init__(
        self, command: Sequence[str], log: Path | None = None, answer_s: float = ANSWER_S
    ) -> None:
        self._command = tuple(command)
        self._log = log
        self._answer_s = answer_s
        self._alone = threading.Lock()
        self._driver: subprocess.Popen[bytes] | None = None

    def ask(self, word: str, *given: Any) -> Any:
        """Return the answer to one question. Refused, or Unreachable: it may have been done."""
        until = time.monotonic() + self._answer_s
        with self._alone:
            driver = self._ensure_driver()
            line = b""
            with contextlib.suppress(OSError):
                assert driver.stdin is not None
                driver.stdin.write(json.dumps([word, given]).encode() + b"\n")
                driver.stdin.flush()
                line = _line(driver, until)
            if not line:
                self._end(driver)
                raise Unreachable(
                    "Ray does not answer" + (f" (see {self._log})" if self._log else "")
                )
        reply = json.loads(line)
        if "problem" in reply:
            kind = Refused if reply["refused"] else Unreachable
            raise kind(f"Ray says: {reply['problem']}")
        return reply["found"]

    def close(self) -> None:
        """End the driver; callers that wait for its answer get none."""
        if self._driver is not None:
            self._end(self._driver)

    def _ensure_driver(self) -> subprocess.Popen[bytes]:
        if self._driver is None or self._driver.poll() is not None:
            with contextlib.ExitStack() as stack:
                log = None
                if self._log is not None:
                    self._log.parent.mkdir(parents=True, exist_ok=True)
                    log = stack.enter_context(open(append_regular(self._log), "ab"))
                self._driver = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,
                )
        return self._driver

    def _end(self, driver: subprocess.Popen[bytes]) -> None:
        driver.kill()
        driver.wait()


def _line(driver: subprocess.Popen[bytes], until: float) -> bytes:
    """Read one line; empty if it does not come in time, or at all."""
    assert driver.stdout is not None
    found = b""
    while not found.endswith(b"\n"):
        left_s = max(until - time.monotonic(), 0.0)
        if not wait_readable([driver.stdout], left_s):
            return b""
        more = os.read(driver.stdout.fileno(), 1 << 20)
        if not more:
            return b""
        found += more
    return found


def link_to(address: str, log: Path | None = None) -> RayLink:
    """Return a link to the cluster at an address. UserError: Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise UserError("Ray is not installed here: pip install 'holdfast[ray]'")
    return RayLink((sys.executable, "-m", "holdfast.clusters.ray.ray_driver", address), log)


SHARED = "shared"


class RayAnswers(Protocol):
    """Answers the questions that ray_driver.py knows. Refused, or Unreachable."""

    def ask(self, word: str, *given: Any) -> Any: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RayShare:
    """Sets each agent's share of its node. `environment` is added to the variables of orders.

    `label`: the label of nodes whose values are failure domains.
    """

    cpus: float = 1.0
    gpus: float = 0.0
    environment: Mapping[str, str] = field(default_factory=dict)
    label: str = ""

    @property
    def resources(self) -> dict[str, float]:
        return {"CPU": self.cpus, **({"GPU": self.gpus} if self.gpus else {})}


class RayManager:
    """Starts, lists and kills the actors whose names begin with `prefix`.

    What agents print goes to files in `folder`, on their own nodes.
    """

    def __init__(self, link: RayAnswers, prefix: str, folder: Path, share: RayShare) -> None:
        self._link = link
        self._prefix = prefix
        self._folder = folder
        self._share = share

    async def observe(self) -> Sequence[Placement]:
        tables = await self._tables()
        label = self._share.label
        return tables.placements(self._prefix, time.monotonic(), time.time(), label)

    async def request(self, order: PlacementOrder) -> None:
        tables = await self._tables()
        given = {"HOLDFAST_PLACEMENT": order.id, **self._share.environment, **order.environment}
        wanted = {
            "name": order.id,
            "command": order.command,
            "environment": given,
            "output": str(self._folder / f"{order.id}.txt"),
            "cpus": self._share.cpus,
            "gpus": self._share.gpus,
            "unit": self._prefix,
            "avoid": tables.ids(order.avoid),
        }
        await self._ask("start", wanted)

    async def release(self, id_: PlacementId, handle: str) -> None:
        await self._ask("end", id_, handle)

    async def close(self) -> None:
        self._link.close()

    async def _tables(self) -> RayTables:
        return read_tables(await self._ask("tables"))

    async def _ask(self, word: str, *given: Any) -> Any:
        return await asyncio.to_thread(self._link.ask, word, *given)


def open_manager(plan: FleetPlan, spec: JobSpec) -> RayManager:
    """Open the manager of a plan, on a machine that is in the cluster."""
    logs, settings = Path(plan.run_dir, "logs"), plan.settings
    secret = {} if settings[SHARED] else {VARIABLE: read_run_dir(Path(plan.run_dir)).hex()}
    share = RayShare(
        cpus=float(settings["cpus"]),
        gpus=float(settings["gpus"]),
        environment=secret,
        label=settings["domain"],
    )
    link = link_to(settings["address"], logs / "ray.txt")
    return RayManager(link, job_prefix(spec.job), logs, share)


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
    """Run a job, or continue it, from here."""
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
