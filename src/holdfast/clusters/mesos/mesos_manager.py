"""Gets a job's nodes from Mesos: each is a task of one framework, by the v1 scheduler HTTP API.

Orders are in the job's order book. An order that waits is launched on the first offer that fits,
and the book says on which agent before Mesos is told: so nothing is launched twice, and an adapter
that is started later can ask Mesos for all tasks by their names.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.clusters.mesos.mesos_session import (
    FRAMEWORK,
    MesosFramework,
    MesosSession,
    Unsubscribed,
    say,
)
from holdfast.clusters.mesos.mesos_stream import MesosStream
from holdfast.clusters.mesos.mesos_waiting import DeclinedOffers
from holdfast.clusters.order_book import ORDERS, BookEntry, OrderBook
from holdfast.clusters.rest_link import ANSWER_S, RestAccess, RestLink
from holdfast.engine.core.domains import Domains
from holdfast.engine.core.errors import Unreachable, UserError
from holdfast.engine.core.fleet.placements import Holding, Notice, Placement, PlacementId
from holdfast.engine.core.job_spec import JobSpec
from holdfast.engine.fleet.cluster_manager import PlacementOrder
from holdfast.engine.fleet.fleet_plan import FleetPlan, job_prefix
from holdfast.engine.state.store.regular_files import DOCUMENT_BYTES_MAX, read_regular

NAME = "Mesos"
PROOF = "give --user and --password-file"
MAINTENANCE = "Mesos plans maintenance of its host"
# TASK_LOST stands for several of these, unless a framework asks to have them told apart.
FAILED = ("FAILED", "ERROR", "LOST", "DROPPED", "UNREACHABLE", "GONE", "GONE_BY_OPERATOR")
OVER = frozenset(f"TASK_{state}" for state in ("FINISHED", "KILLED", "UNKNOWN", *FAILED))
HEARD_S = 2.0  # for a master to tell the state of tasks; without it, they count as running
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
        """Take in that agents will be unavailable; Mesos is told that we leave in time."""
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
            say(f"task {task} has ended as {state}: {told} ({reason or 'no reason'})")
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
    """Return why an offer does not fit for another reason than its size; empty if it may."""
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


def access_of(told: Mapping[str, str]) -> RestAccess:
    """Return how Mesos is reached, by the settings of a plan. UserError: there is no password."""
    password = ""
    if told["password_file"]:
        try:
            password = read_regular(told["password_file"], DOCUMENT_BYTES_MAX).decode().strip()
        except (OSError, ValueError) as error:
            raise UserError(f"--password-file cannot be read: {error}") from None
        if not password:
            raise UserError(f"--password-file {told['password_file']} is empty: write one into it")
    return RestAccess(address=told["master"], user=told["user"], password=password, ca=told["ca"])


def open_manager(plan: FleetPlan, spec: JobSpec) -> MesosManager:
    """Open the manager of a plan; its framework is named after the job."""
    told, run_dir = plan.settings, plan.run_dir
    framework = MesosFramework(
        name=job_prefix(spec.job).rstrip("-"),
        user=told["runs_as"],
        command=(sys.executable, "-m", "holdfast.clusters.mesos.mesos_place", run_dir),
        role=told["role"],
        principal=told["user"],
        cpus=float(told["cpus"]),
        memory_mb=int(told["memory"]),
        gpus=int(told["gpus"]),
        failover_s=float(told["failover_s"]),
    )
    session = MesosSession(
        RestLink(access_of(told), NAME, PROOF), framework, Path(run_dir, FRAMEWORK)
    )
    return MesosManager(session, framework, OrderBook(Path(run_dir, ORDERS)))
