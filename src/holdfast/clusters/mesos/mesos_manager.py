"""Runs a job in tasks of one Mesos framework: `holdfast launch mesos`.

Each node is a task. Orders for nodes are in the job's order book. An order that waits is launched
on the first offer that fits, and its agent is in the book before Mesos gets the launch: so no order
is launched twice, and an adapter that is started later can ask Mesos for all tasks by their names.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
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
from holdfast.clusters.mesos.mesos_session import (
    FRAMEWORK,
    UNUSABLE,
    MesosFramework,
    MesosSession,
    MesosStream,
    Unsubscribed,
)
from holdfast.clusters.order_book import ORDERS, BookEntry, OrderBook
from holdfast.clusters.rest_link import (
    ANSWER_S,
    NOT_JSON,
    UNKNOWN,
    RestAccess,
    RestLink,
    check_access,
)
from holdfast.engine.commands.launch_command import (
    ABANDON_S,
    check_launch,
    make_run_dir,
    own_address,
    prefer,
)
from holdfast.engine.core.domains import Domains
from holdfast.engine.core.errors import Refused, Unreachable, UserError, WorldError, first_line
from holdfast.engine.core.fleet.placements import Holding, Notice, Placement, PlacementId
from holdfast.engine.core.job_spec import JobSpec
from holdfast.engine.fleet.cluster_manager import FleetPlan, PlacementOrder, job_prefix, read_plan
from holdfast.engine.net.standard_streams import print_line
from holdfast.engine.runtime.rundir import RunDir
from holdfast.engine.state.store.regular_files import DOCUMENT_BYTES_MAX, read_regular

HOSTS_MAX = 8  # in one sentence


class DeclinedOffers:
    """Keeps the last offer of each host, from when an order begins to wait until one is taken.

    Mesos does not explain its offers. The reason why an order waits is made of the last offers that
    the job has declined, and of the moment since which none fits.

    `needs`: the resources of one task. Moments are on the clock on the wall.
    """

    def __init__(self, needs: Mapping[str, float]) -> None:
        self._needs = dict(needs)
        self._since: float | None = None
        self._lacks: dict[str, str] = {}  # by host

    def look(self, waits: bool, wall: float) -> None:
        """Begin a look at offers. `waits`: whether an order waits for one."""
        if not waits:
            self._since, self._lacks = None, {}
        elif self._since is None:
            self._since = wall

    def take(self, host: str, wall: float) -> None:
        """Record an offer that fits. Orders that still wait have waited since this moment."""
        self._since = wall
        self._lacks[host] = "has a node of the job"

    def decline(self, offer: Mapping[str, Any], lack: str) -> None:
        """Record an offer that does not fit. `lack`: why; empty: it is too small."""
        if self._since is not None:
            self._lacks[offer["hostname"]] = lack or f"offers {name_resources(offer, self._needs)}"

    def reason(self) -> str:
        """Return the reason why an order waits; empty if none does."""
        if self._since is None:
            return ""
        wanted = ", ".join(f"{key} {need:g}" for key, need in self._needs.items() if need)
        moment = time.strftime("%H:%M:%S UTC", time.gmtime(self._since))
        seen = "; ".join(f"{host} {lack}" for host, lack in sorted(self._lacks.items())[:HOSTS_MAX])
        more = len(self._lacks) - HOSTS_MAX
        seen += f"; and {more} more" if more > 0 else ""
        return f"no offer of Mesos since {moment} fits {wanted} ({seen or 'it has made none'})"


def name_resources(offer: Mapping[str, Any], needs: Mapping[str, float]) -> str:
    """Name the amounts of an offer that a task may use, of the resources that it needs."""
    has = {key: 0.0 for key, need in needs.items() if need}
    for each in offer["resources"]:
        if each["name"] in has and not UNUSABLE & set(each):
            has[each["name"]] += each["scalar"]["value"]
    return ", ".join(f"{key} {value:g}" for key, value in has.items())


NAME = "Mesos"
PROOF = "give --user and --password-file"
MAINTENANCE = "Mesos plans maintenance of its host"
# TASK_LOST stands for several of these, unless a framework asks for the exact one.
FAILED = ("FAILED", "ERROR", "LOST", "DROPPED", "UNREACHABLE", "GONE", "GONE_BY_OPERATOR")
OVER = frozenset(f"TASK_{state}" for state in ("FINISHED", "KILLED", "UNKNOWN", *FAILED))
# A master has this time to report the state of tasks; without it, they count as running.
HEARD_S = 2.0
REFUSE_S, REFUSE_IDLE_S = 5.0, 3600.0  # until an offer is made again, while orders wait or not


class MesosManager:
    """Launches, lists and kills the tasks of one framework, by the orders in `book`.

    The work is done in threads, one after the other, so it may be used in any event loop.
    """

    def __init__(self, session: MesosSession, framework: MesosFramework, book: OrderBook) -> None:
        self.session = session
        self._framework = framework
        self._book = book
        self._alone = threading.Lock()
        self._stream: MesosStream | None = None
        self._states: dict[str, str] = {}  # by task
        self._offers: dict[str, dict[str, Any]] = {}
        self._declined = DeclinedOffers(framework.needs)
        self._notices: dict[str, tuple[str, Notice]] = {}  # by agent, with the inverse offer's id

    async def observe(self) -> Sequence[Placement]:
        return await asyncio.to_thread(self._observe)

    async def request(self, order: PlacementOrder) -> None:
        await asyncio.to_thread(self._request, order)

    async def release(self, id_: PlacementId, handle: str) -> None:
        await asyncio.to_thread(self._release, id_)

    async def close(self) -> None:
        await asyncio.to_thread(self._close)

    # ------------------------------------------------------------ the contract

    def _observe(self) -> list[Placement]:
        with self._turn():
            entries = self._book.entries()
            stream = self._renew()
            held = [entry for entry in entries if entry.holder and not self._is_over(entry)]
            # Also the proof that the master answers, whatever the stream has brought.
            tasks = {"tasks": [_task_of(entry) for entry in held]}
            try:
                self.session.send(stream, "RECONCILE", tasks)
            except Unsubscribed:  # its end has not been noticed yet
                stream = self._renew()
                self.session.send(stream, "RECONCILE", tasks)
            self._hear(stream, [str(entry.order.id) for entry in held])
            self._place(stream, entries)
            return [self._placement(e) for e in self._book.entries() if e.waits or e.holder]

    def _request(self, order: PlacementOrder) -> None:
        with self._turn():
            self._book.add(order)
            self.session.call("REVIVE")  # offers come again, those refused too

    def _release(self, id_: PlacementId) -> None:
        with self._turn():
            entry = self._book.find(id_)
            if entry is None or (entry.waits and self._book.withdraw(id_)):
                return
            entry = self._book.find(id_) or entry
            if entry.holder and not self._is_over(entry):
                self.session.call("KILL", _task_of(entry))

    def _close(self) -> None:
        with self._turn():
            self.session.close()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        if not self._alone.acquire(timeout=ANSWER_S):
            raise Unreachable("Mesos has not answered an earlier question yet")
        try:
            yield
        finally:
            self._alone.release()

    def _renew(self) -> MesosStream:
        """Return the subscription. A new one begins without offers, and asks for all tasks."""
        stream = self.session.subscription()
        if stream is not self._stream:
            self._stream, self._offers = stream, {}
            self._states = {id_: state for id_, state in self._states.items() if state in OVER}
        return stream

    def _is_over(self, entry: BookEntry) -> bool:
        return self._states.get(entry.order.id) in OVER

    def _placement(self, entry: BookEntry) -> Placement:
        state = self._states.get(entry.order.id, "TASK_RUNNING")
        starts = entry.waits or state in ("TASK_STAGING", "TASK_STARTING")
        holding = Holding.WAITING if starts else Holding.RUNNING
        notice = self._notices.get(entry.holder or "")
        return Placement(
            id=entry.order.id,
            handle=entry.holder or "",
            holding=Holding.ENDED if state in OVER else holding,
            host=entry.host,
            notice=notice[1] if notice and holding is Holding.RUNNING else None,
            domains=entry.domains,
            why=self._declined.reason() if entry.waits else "",
        )

    # ------------------------------------------------------------ events

    def _hear(self, stream: MesosStream, tasks: Sequence[str]) -> None:
        """Take events until the state of all tasks is known, for a while. Unreachable."""
        until = time.monotonic() + HEARD_S
        while True:
            unknown = any(task not in self._states for task in tasks)
            left_s = max(until - time.monotonic(), 0.0) if unknown else 0.0
            event = stream.take(left_s)
            if event is not None:
                self._handle(stream, event)
            elif stream.is_broken():
                raise Unreachable("Mesos' events have ended: the next look subscribes again")
            else:
                return

    def _handle(self, stream: MesosStream, event: dict[str, Any]) -> None:
        kind = event.get("type")
        if kind == "OFFERS":
            for offer in event["offers"]["offers"]:
                self._offers[offer["id"]["value"]] = offer
                if "unavailability" not in offer:  # the only sign that maintenance is called off
                    self._notices.pop(offer["agent_id"]["value"], None)
        elif kind == "RESCIND":
            self._offers.pop(event["rescind"]["offer_id"]["value"], None)
        elif kind == "INVERSE_OFFERS":
            self._announce(stream, event["inverse_offers"]["inverse_offers"])
        elif kind == "RESCIND_INVERSE_OFFER":
            id_ = event["rescind_inverse_offer"]["inverse_offer_id"]["value"]
            self._notices = {a: told for a, told in self._notices.items() if told[0] != id_}
        elif kind == "UPDATE":
            self._update(stream, event["update"]["status"])
        elif kind == "FAILURE" and "executor_id" not in event["failure"]:
            agent = event["failure"].get("agent_id")  # its tasks get updates of their own
            self._offers = {
                o: each for o, each in self._offers.items() if each["agent_id"] != agent
            }
        elif kind == "ERROR":
            stream.close()
            raise Unreachable(f"Mesos says: {event['error']['message']}")

    def _announce(self, stream: MesosStream, inverse: Sequence[Mapping[str, Any]]) -> None:
        """Take in that agents will be unavailable; answer Mesos that we leave in time."""
        for each in inverse:
            start = int(each["unavailability"]["start"]["nanoseconds"]) / 1e9
            until = time.monotonic() + max(start - time.time(), 0.0)
            agent = each.get("agent_id", {}).get("value", "")
            self._notices[agent] = (each["id"]["value"], Notice(reason=MAINTENANCE, until=until))
        ids, again = [each["id"] for each in inverse], {"refuse_seconds": REFUSE_IDLE_S}
        told = {"inverse_offer_ids": ids, "filters": again}
        self.session.send(stream, "ACCEPT_INVERSE_OFFERS", told)

    def _update(self, stream: MesosStream, status: Mapping[str, Any]) -> None:
        task, state = str(status["task_id"]["value"]), str(status["state"])
        reason = status.get("reason", "")
        if state.removeprefix("TASK_") in FAILED and reason != "REASON_RECONCILIATION":
            told = status.get("message") or "Mesos gives no message"
            print_line(f"task {task} has ended as {state}: {told} ({reason or 'no reason'})")
        self._states[task] = state
        if "uuid" in status:
            ids = {key: status[key] for key in ("agent_id", "task_id", "uuid")}
            self.session.send(stream, "ACKNOWLEDGE", ids)

    # ------------------------------------------------------------ offers

    def _place(self, stream: MesosStream, entries: Sequence[BookEntry]) -> None:
        """Launch the orders that wait on offers that fit; all other offers are declined."""
        waiting = [entry for entry in entries if entry.waits]
        taken = {entry.host for entry in entries if entry.holder and not self._is_over(entry)}
        self._declined.look(bool(waiting), time.time())
        offers, self._offers, declined = list(self._offers.values()), {}, []
        for offer in offers:
            host = offer["hostname"]
            entry = next((e for e in waiting if host not in e.order.avoid), None)
            task = entry and self._framework.task(entry.order.id, offer)
            lack = _lack(offer, taken, avoided=entry is None)
            if not entry or not task or lack:
                self._declined.decline(offer, lack)
                declined.append(offer["id"])
                continue
            waiting.remove(entry)
            if self._book.claim(
                entry.order.id, offer["agent_id"]["value"], host, _domains_of(offer)
            ):
                taken.add(host)
                self._declined.take(host, time.time())
                self._states[entry.order.id] = "TASK_STAGING"
                launch = {"type": "LAUNCH", "launch": {"task_infos": [task]}}
                accepted = {"offer_ids": [offer["id"]], "operations": [launch]}
                self.session.send(stream, "ACCEPT", accepted)
            else:
                declined.append(offer["id"])
        if declined:
            again = {"refuse_seconds": REFUSE_S if waiting else REFUSE_IDLE_S}
            self.session.send(stream, "DECLINE", {"offer_ids": declined, "filters": again})


def _lack(offer: Mapping[str, Any], taken: Container[str], *, avoided: bool) -> str:
    """Return the reason, other than its size, why an offer does not fit; empty if it may."""
    if offer["hostname"] in taken:
        return "has a node of the job"
    if "unavailability" in offer:
        return "is about to be maintained"
    return "is avoided" if avoided else ""


def _task_of(entry: BookEntry) -> dict[str, Any]:
    return {"task_id": {"value": entry.order.id}, "agent_id": {"value": entry.holder}}


def _domains_of(offer: Mapping[str, Any]) -> Domains:
    """Return the region and the zone of an offer's agent, if they are set (DomainInfo)."""
    found = offer.get("domain", {}).get("fault_domain", {})
    return tuple(f"{key}={found[key]['name']}" for key in ("region", "zone") if key in found)


def access_of(settings: Mapping[str, str]) -> RestAccess:
    """Return the way to Mesos, by the settings of a plan. UserError: there is no password."""
    password, file = "", settings["password_file"]
    if file:
        try:
            password = read_regular(file, DOCUMENT_BYTES_MAX).decode().strip()
        except (OSError, ValueError) as error:
            raise UserError(f"--password-file cannot be read: {error}") from None
        if not password:
            raise UserError(f"--password-file {file} is empty: write one into it")
    return RestAccess(
        address=settings["master"], user=settings["user"], password=password, ca=settings["ca"]
    )


def open_manager(plan: FleetPlan, spec: JobSpec) -> MesosManager:
    """Open the manager of a plan; its framework is named after the job."""
    settings, run_dir = plan.settings, plan.run_dir
    framework = MesosFramework(
        name=job_prefix(spec.job).rstrip("-"),
        user=settings["runs_as"],
        command=(sys.executable, "-m", "holdfast.clusters.mesos.mesos_place", run_dir),
        role=settings["role"],
        principal=settings["user"],
        cpus=float(settings["cpus"]),
        memory_mb=int(settings["memory"]),
        gpus=int(settings["gpus"]),
        failover_s=float(settings["failover_s"]),
    )
    session = MesosSession(
        RestLink(access_of(settings), NAME, PROOF), framework, Path(run_dir, FRAMEWORK)
    )
    return MesosManager(session, framework, OrderBook(Path(run_dir, ORDERS)))


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
    """Run a job, or continue it, from here; the framework ends with it."""
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
    """Subscribe the framework once. UserError: Mesos refuses it."""
    settings, session = read_plan(run_dir).settings, session_of(run_dir)
    try:
        session.subscription()
    except Refused as error:
        reason = first_line(error)
        if "role" in reason.lower():
            raise UserError(f"--role {settings['role']}: {reason}; name another") from None
        raise UserError(f"the framework is refused: {reason}") from None
    except WorldError as error:
        raise UserError(
            f"--master {settings['master']} cannot be used: {first_line(error)}"
        ) from None
    finally:
        session.close()


def end(run_dir: RunDir) -> None:
    """End the framework, or print that it may still be there."""
    session = session_of(run_dir)
    remedy = f"curl -d frameworkId={session.kept_id()} MASTER/master/teardown"
    end_application(session.end, f"framework {session.kept_id()}", remedy)


def session_of(run_dir: RunDir) -> MesosSession:
    return open_manager(read_plan(run_dir), run_dir.spec()).session
