"""Serves dashboards for tests in a thread, asks them by HTTP, and makes up the files of runs."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from holdfast.engine.core.job_spec import JobSpec
from holdfast.engine.net.web_server import listen
from holdfast.engine.records.ledger import (
    HeaderLine,
    LedgerEntry,
    LedgerWriter,
    Place,
    ledger_path,
)
from holdfast.engine.records.time_lines import (
    ProcessHeader,
    SpentLine,
    TimesWriter,
    TimeUse,
    times_path,
)
from holdfast.engine.records.usage_lines import UsageHeader, UsageLine, UsageWriter, WorkerUse
from holdfast.engine.runtime.rundir import RunDir
from holdfast.reports.dashboard.site import Site, make_dashboard

LIMIT_S = 60.0
BEGAN = 1_795_000_000.0
SCRIPT = "<img src=x onerror=alert(1)>.py"


class Dashboard:
    """Is one served dashboard. `cookie`: what a browser keeps after the first page."""

    def __init__(self, run_dir: Path, host: str = "127.0.0.1") -> None:
        self.site = Site(RunDir(run_dir))
        self._listener = listen(host, 0)
        self._server, self.url = make_dashboard(self.site, self._listener, host)
        self._thread = threading.Thread(
            target=self._server.run, kwargs=dict(sockets=[self._listener]), daemon=True
        )
        parts = urlsplit(self.url)
        self.port = parts.port or 0
        self.origin = f"http://{parts.netloc}"
        self.token = parts.query.removeprefix("token=")
        self.cookie = f"holdfast-{self.port}={self.token}"

    def __enter__(self) -> Dashboard:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.should_exit = True
        self._thread.join(LIMIT_S)
        self._listener.close()
        assert not self._thread.is_alive()

    def ask(
        self, path: str, body: object = None, *, method: str = "", **headers: str
    ) -> tuple[int, str, http.client.HTTPMessage]:
        """Return status, body and headers of an answer. Underscores in names are dashes."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        data = None if body is None else json.dumps(body)
        connection.request(method or ("POST" if body is not None else "GET"), path, data, sent)
        answer = connection.getresponse()
        found = answer.status, answer.read().decode(), answer.headers
        connection.close()
        return found

    def order(self, path: str, body: object) -> dict[str, Any]:
        """Return the answer to an order from the dashboard's own page."""
        _, text, _ = self.ask(path, body, cookie=self.cookie, origin=self.origin)
        found: dict[str, Any] = json.loads(text)
        return found

    def until(self, *topics: str) -> dict[str, Any]:
        """Wait until these topics are known, and return the whole state."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            state: dict[str, Any] = json.loads(self.ask("/api/state", cookie=self.cookie)[1])
            if set(topics) <= state.keys():
                return state
            assert time.monotonic() < deadline, f"{topics} are not in {sorted(state)}"

    def follow(self) -> Iterator[tuple[str, Any]]:
        """Yield topics and values of the stream."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        connection.request("GET", "/api/stream", headers={"cookie": self.cookie})
        answer = connection.getresponse()
        assert answer.getheader("content-type", "").startswith("text/event-stream")
        topic = ""
        try:
            while line := answer.readline().decode().rstrip("\n"):
                if line.startswith("event: "):
                    topic = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    yield topic, json.loads(line.removeprefix("data: "))
                    answer.readline()
                else:
                    answer.readline()
        finally:
            connection.close()


def write_event(run_dir: Path, kind: str, text: str, at_s: float, **more: Any) -> None:
    """Append one line to the event log."""
    with open(run_dir / "events.jsonl", "a") as log:
        line = {"time": BEGAN + at_s, "kind": kind, "text": text, **more}
        log.write(json.dumps(line) + "\n")


def write_crashed_run(run_dir: Path, steps: int = 20) -> None:
    """Write the files of a run of two workers, whose every process was killed after some steps."""
    RunDir(run_dir).create(JobSpec(job="a" * 32, cwd="/", script=SCRIPT), bytes(32))
    write_event(run_dir, "view", "view 1: workers 0-1", 1.0, view=1, step=0, id="1.1")
    lost = f"worker 1 was lost: {SCRIPT}"
    write_event(run_dir, "lost", lost, 11.0, worker=1, id="1.2")
    view = dict(view=2, step=10, id="1.3", causes=["1.2"])
    write_event(run_dir, "view", "view 2: worker 0", 11.5, **view)
    cost = {"pause_s": 0.75, "tasks": 1, "steps": 0, "missing": 1}
    resumed = dict(view=2, step=10, id="1.4", causes=["1.3"], cost=cost)
    write_event(run_dir, "resumed", "step 10 is committed", 11.75, **resumed)
    for worker, until in ((0, steps), (1, steps // 2)):
        write_ledger(run_dir, worker, until)
        header = ProcessHeader(worker=worker, incarnation=1, began=BEGAN)
        times = TimesWriter(times_path(run_dir, worker, 1), header)
        times.append(SpentLine(0, {TimeUse.STARTING: 1.0}))
        for step in range(until):
            spent = {TimeUse.TASK: 0.75, TimeUse.WAIT: 0.25}
            times.append(SpentLine(step + 1, spent, {100: 1}))
        log = run_dir / "logs" / f"worker-{worker}-1.log"
        log.write_text("".join(f"line {number}\n" for number in range(300)))
    usage = UsageWriter(run_dir, UsageHeader("near", "127.0.0.1", 2, 8 * 10**9))
    for number in range(1, 5):
        workers = {worker: WorkerUse(0.5, 10**9) for worker in range(2)}
        usage.append(UsageLine(BEGAN + 5 * number, 5.0, 1.25, 2 * 10**9, 1e6, 3e6, workers))
    with open(run_dir / "events.jsonl", "a") as log:
        log.write('{"time": 1, "kind": "half')  # the coordinator was killed, too


def write_ledger(run_dir: Path, worker: int, until: int) -> None:
    """Write a ledger whose step n has the loss n + 0.5, and step 3 none that is a number."""
    writer = LedgerWriter(ledger_path(run_dir, worker, 1))
    writer.begin(HeaderLine(seed=0, virtual_ranks=2, plan={}, worker=worker, incarnation=1))
    for step in range(until):
        writer.append(
            LedgerEntry(
                place=Place(step, step),
                view=1,
                hosts=((0, 1), (1, 1)),
                counts=(1, 1),
                digests=(1, 2),
                loss=float("nan") if step == 3 else step + 0.5,
            )
        )
    writer.close()
