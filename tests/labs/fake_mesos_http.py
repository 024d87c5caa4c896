"""Answers the calls that fake masters of Mesos get (fake_mesos.py), and streams their events.

No answer is a recording: statuses and texts are those of the sources of Mesos 1.11 that
fake_mesos.py names. How a connection is cut is a guess.
"""

from __future__ import annotations

import base64
import contextlib
import json
import queue
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from holdfast.engine.net.descriptors import wait_readable
from labs.fake_mesos_state import CPUS, FakeMesosFramework, end_task

if TYPE_CHECKING:
    from labs.fake_mesos import FakeMesos

LOOK_S = 0.02
HANG_UP = 0  # in place of a status: no answer


class MesosMaster:
    """Serves one master; unless it leads, it sends callers to the leading one."""

    def __init__(self, fake: FakeMesos, number: int) -> None:
        self._fake = fake
        self._number = number
        self._server: ThreadingHTTPServer | None = None
        self.down = False

    def start(self) -> None:
        master = self

        class MesosAnswers(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                master.answer(self)

            def handle(self) -> None:
                with contextlib.suppress(ConnectionError):
                    super().handle()

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), MesosAnswers)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        assert self._server is not None
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        fake, knobs = self._fake, self._fake.knobs
        if self.down or knobs.away:
            request.close_connection = True
            return
        if self._number != fake.leader:
            # API, "Master detection"; Master::Http::redirect: "//" and the leader's address.
            there = fake.urls[fake.leader].removeprefix("http:") + request.path
            reply(request, 307, headers={"Location": there})
            return
        if knobs.missing:
            reply(request, 404, "<html>no such page</html>", "text/html")
            return
        user = who(request, knobs.passwords)
        if user is None:
            realm = (
                'Basic realm="mesos-master-scheduler"'  # src/common/http.cpp, docs/authentication
            )
            reply(request, 401, "", headers={"WWW-Authenticate": realm})
            return
        call = json.loads(body)
        fake.calls.append(call["type"])
        if request.path == "/api/v1":
            self._list_agents(request)
        elif call["type"] == "SUBSCRIBE":
            self._subscribe(request, call, user)
        else:
            with fake.lock:
                status, text = handle(fake, call, request.headers.get("Mesos-Stream-Id"))
            if status == HANG_UP:
                request.close_connection = True
            else:
                reply(request, status, text)

    def _list_agents(self, request: BaseHTTPRequestHandler) -> None:
        if self._fake.knobs.shy:
            reply(request, 403)  # no user may: docs/authorization.md
            return
        # Operator, GET_AGENTS.
        agents = [
            {
                "active": agent.up,
                "agent_info": {"hostname": agent.host, "id": {"value": agent.id}, "port": 5051},
                "total_resources": agent.resources(CPUS, agent.memory_mb, "*"),
                "version": "1.11.0",
            }
            for agent in self._fake.agents.values()
        ]
        found = {"type": "GET_AGENTS", "get_agents": {"agents": agents}}
        reply(request, 200, json.dumps(found), "application/json")

    # ------------------------------------------------------------ a subscription

    def _subscribe(self, request: BaseHTTPRequestHandler, call: dict[str, Any], user: str) -> None:
        fake, info = self._fake, call["subscribe"]["framework_info"]
        events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        with fake.lock:
            problem = refusal(fake, info, user)
            stream = fake.new_id("T")
            framework = None if problem else admit(fake, info)
            if framework is not None:
                if framework.events is not None:  # Master::failoverFramework
                    framework.tell("ERROR", message="Framework failed over")
                framework.leave(time.monotonic())
                framework.events, framework.stream = events, stream
                events.put(subscribed(framework, fake.knobs.beat_s))
                for task in framework.tasks.values():
                    if (
                        task.unacknowledged is not None
                    ):  # agents send updates until they are acknowledged
                        framework.update(task.unacknowledged)
            else:
                # Master::subscribe: the refusal is an event, and the stream ends after it.
                events.put({"type": "ERROR", "error": {"message": problem}})
                events.put(None)
        request.send_response(200)
        for name, value in (
            ("Content-Type", "application/json"),
            ("Transfer-Encoding", "chunked"),
            ("Mesos-Stream-Id", stream),
        ):
            request.send_header(name, value)
        request.end_headers()
        request.close_connection = True
        with contextlib.suppress(ConnectionError):
            self._stream(request, events, stream)
        with fake.lock:
            if framework is not None and framework.events is events:
                framework.leave(time.monotonic())

    def _stream(
        self,
        request: BaseHTTPRequestHandler,
        events: queue.Queue[dict[str, Any] | None],
        stream: str,
    ) -> None:
        """Send events until the subscription ends, or the scheduler has gone."""
        beat_at = time.monotonic()
        while True:
            knobs = self._fake.knobs
            muted = stream in knobs.muted
            if wait_readable([request.connection], LOOK_S if muted else 0.0):
                return  # no more bytes are sent on this connection: it is closed
            if muted:
                continue
            try:
                event = events.get(timeout=LOOK_S)
            except queue.Empty:
                if time.monotonic() < beat_at + knobs.beat_s:
                    continue
                beat_at, event = time.monotonic(), {"type": "HEARTBEAT"}
            if event is None:
                request.wfile.write(b"0\r\n\r\n")
                return
            # API, "RecordIO response format"; chunks need not begin with records.
            data = json.dumps(event).encode()
            data = f"{len(data)}\n".encode() + data
            for part in (data[:5], data[5:]):
                request.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")


def who(request: BaseHTTPRequestHandler, passwords: dict[str, str]) -> str | None:
    """Return the user that a request proves, "" if none is asked for; None if it proves none."""
    if not passwords:
        return ""
    kind, _, text = (request.headers.get("Authorization") or "").partition(" ")
    user, _, password = base64.b64decode(text).decode().partition(":") if text else ("", "", "")
    return user if kind == "Basic" and passwords.get(user) == password else None


def reply(
    request: BaseHTTPRequestHandler,
    status: int,
    text: str = "",
    kind: str = "text/plain; charset=utf-8",
    headers: dict[str, str] | None = None,
) -> None:
    data = text.encode()
    request.send_response(status)
    for name, value in (headers or {}).items():
        request.send_header(name, value)
    request.send_header("Content-Type", kind)
    request.send_header("Content-Length", str(len(data)))
    request.end_headers()
    request.wfile.write(data)


def refusal(fake: FakeMesos, info: dict[str, Any], user: str) -> str:
    """Return the reason why a framework may not subscribe (Master::subscribe)."""
    id_, role = info.get("id", {}).get("value"), info["roles"][0]
    if role not in fake.knobs.roles:
        return f"Role '{role}' is not present in the master's --roles"
    if id_ in fake.removed:
        return "Framework has been removed"
    if user and info.get("principal") not in (None, user):
        said = info.get("principal")
        return f"Framework principal '{said}' does not match authenticated principal '{user}'"
    return ""


def admit(fake: FakeMesos, info: dict[str, Any]) -> FakeMesosFramework:
    """Return the framework of a subscription: the one with its id, or a new one."""
    id_ = info.get("id", {}).get("value") or fake.new_id("F")
    framework = fake.frameworks.setdefault(id_, FakeMesosFramework(id=id_, info=info))
    framework.info = info
    return framework


def subscribed(framework: FakeMesosFramework, beat_s: float) -> dict[str, Any]:
    # scheduler.proto, Event.Subscribed.
    told = {"framework_id": {"value": framework.id}, "heartbeat_interval_seconds": beat_s}
    return {"type": "SUBSCRIBED", "subscribed": told}


# ---------------------------------------------------------------- the other calls


def handle(fake: FakeMesos, call: dict[str, Any], stream: str | None) -> tuple[int, str]:
    """Carry out a call; return the answer's status and text (Master::Http::scheduler)."""
    if fake.knobs.failing:
        fake.knobs.failing -= 1
        return 503, "Master has not finished recovery"
    framework = fake.frameworks.get(call["framework_id"]["value"])
    if framework is None:
        return 400, "Framework cannot be found"
    if framework.events is None:
        return 403, "Framework is not subscribed"
    if stream != framework.stream:
        told = "didn't match the stream ID currently associated with framework ID"
        return 400, f"The stream ID '{stream}' included in this request {told} {framework.id}"
    kind = call["type"]
    {
        "TEARDOWN": lambda: fake.remove(framework),
        "ACCEPT": lambda: accept(fake, framework, call["accept"]),
        "DECLINE": lambda: decline(framework, call["decline"]),
        "ACCEPT_INVERSE_OFFERS": lambda: accept_inverse(framework, call["accept_inverse_offers"]),
        "REVIVE": lambda: revive(framework),
        "KILL": lambda: kill(framework, call["kill"]),
        "ACKNOWLEDGE": lambda: acknowledge(framework, call["acknowledge"]),
        "RECONCILE": lambda: reconcile(fake, framework, call["reconcile"]),
    }[kind]()
    if kind in fake.knobs.lost:
        fake.knobs.lost.remove(kind)
        return HANG_UP, ""
    return 202, ""


def accept(fake: FakeMesos, framework: FakeMesosFramework, told: dict[str, Any]) -> None:
    (id_,) = [each["value"] for each in told["offer_ids"]]
    agent = framework.offers.pop(id_, None)
    for operation in told["operations"]:
        assert operation["type"] == "LAUNCH"
        for info in operation["launch"]["task_infos"]:
            about = {"task_id": info["task_id"], "agent_id": info["agent_id"]}
            about["source"] = "SOURCE_MASTER"
            if agent is None:  # Master::accept, validation::offer
                text = f"Task launched with invalid offers: Offer {id_} is no longer valid"
                why = {"reason": "REASON_INVALID_OFFERS", "message": text}
                framework.update({**about, "state": "TASK_LOST", **why})
            elif info["task_id"]["value"] in framework.tasks:  # validation::task
                text = f"Task has duplicate ID: {info['task_id']['value']}"
                why = {"reason": "REASON_TASK_INVALID", "message": text}
                framework.update({**about, "state": "TASK_ERROR", **why})
            else:
                fake.run(framework, agent, info)
    if agent is not None:
        refuse(framework.refused, agent.id, told)


def refuse(until: dict[str, float], agent: str, told: dict[str, Any]) -> None:
    # mesos.proto, Filters: 5 seconds unless the call sets another time.
    seconds = float(told.get("filters", {}).get("refuse_seconds", 5.0))
    until[agent] = time.monotonic() + seconds


def decline(framework: FakeMesosFramework, told: dict[str, Any]) -> None:
    for each in told["offer_ids"]:
        agent = framework.offers.pop(each["value"], None)
        if agent is not None:
            refuse(framework.refused, agent.id, told)


def accept_inverse(framework: FakeMesosFramework, told: dict[str, Any]) -> None:
    for each in told["inverse_offer_ids"]:
        agent = framework.inverse.get(each["value"])
        if agent is not None:
            refuse(framework.refused_inverse, agent.id, told)


def revive(framework: FakeMesosFramework) -> None:
    # HierarchicalAllocatorProcess::reviveOffers clears both kinds of filters.
    framework.refused.clear()
    framework.refused_inverse.clear()


def kill(framework: FakeMesosFramework, told: dict[str, Any]) -> None:
    task = framework.tasks.get(told["task_id"]["value"])
    if task is None:
        framework.update(lost(told))
    elif task.agent.up:
        task.killed = True
        end_task(task)


def acknowledge(framework: FakeMesosFramework, told: dict[str, Any]) -> None:
    task = framework.tasks.get(told["task_id"]["value"])
    if (
        task is not None
        and task.unacknowledged is not None
        and task.unacknowledged["uuid"] == told["uuid"]
    ):
        task.unacknowledged = None
        if task.state != "TASK_RUNNING":
            del framework.tasks[task.id]


def reconcile(fake: FakeMesos, framework: FakeMesosFramework, told: dict[str, Any]) -> None:
    """Send an update of each named task, or of all, unless its agent is not back yet."""
    now, why = time.monotonic(), {"source": "SOURCE_MASTER", "reason": "REASON_RECONCILIATION"}
    names = [each["task_id"]["value"] for each in told["tasks"]] or list(framework.tasks)
    agents = {each["task_id"]["value"]: each["agent_id"]["value"] for each in told["tasks"]}
    for name in names:
        task = framework.tasks.get(name)
        if any(a.id == agents.get(name) and a.up and a.back_at > now for a in fake.agents.values()):
            continue  # Master::_reconcileTasks: "is transitioning"
        if task is not None:
            framework.update({**task.status(task.state), **why})
        else:
            framework.update(lost({"task_id": {"value": name}}))


def lost(told: dict[str, Any]) -> dict[str, Any]:
    # Master::_reconcileTasks, for a framework without PARTITION_AWARE.
    text = "Reconciliation: Task is unknown"
    return {
        "task_id": told["task_id"],
        "state": "TASK_LOST",
        "source": "SOURCE_MASTER",
        "reason": "REASON_RECONCILIATION",
        "message": text,
    }
