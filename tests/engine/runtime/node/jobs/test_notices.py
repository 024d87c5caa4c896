"""Tests notices that a machine is about to be taken away.

The servers here answer as each cloud's documents describe (runtime/node/notices.py names them). No
answer is recorded from a cloud, and no test has run in one. By the documents: paths, headers,
statuses, names of fields, the words of actions and events. Guesses: that a cloud answers so on
every machine type, that Google's machines end 30 s after the notice, and that AWS's `time` is in
UTC.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from conftest import RUN_S
from holdfast.engine.core.errors import UserError, WorldError
from holdfast.engine.runtime.local_run import LocalRun
from holdfast.engine.runtime.node.notices import (
    MachineNotice,
    NoticeSource,
    list_notices,
    notice_source,
)

Answer = Callable[[str, str, dict[str, str]], tuple[int, str]]  # method, path, headers: a reply


@contextlib.contextmanager
def serving(answer: Answer) -> Iterator[str]:
    """Serve the replies of `answer`; yield the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answer(
                self.command,
                self.path,
                {name.lower(): value for name, value in self.headers.items()},
            )
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def do_PUT(self) -> None:
            self.do_GET()

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def polled(kind: str, answer: Answer) -> MachineNotice | None:
    with serving(answer) as url:
        return NoticeSource(kind, url).poll() if "/" not in kind else NoticeSource(url).poll()


def in_a_minute() -> datetime:
    return datetime.now(timezone.utc) + timedelta(seconds=60)


def about_a_minute(notice: MachineNotice | None, reason: str) -> bool:
    return notice is not None and notice.reason == reason and 30 < notice.in_s <= 61


def test_a_spot_instance_of_aws_is_asked_with_a_token() -> None:
    def answer(method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        if (method, path) == ("PUT", "/latest/api/token"):
            return 200, "secret" if "x-aws-ec2-metadata-token-ttl-seconds" in headers else ""
        assert path == "/latest/meta-data/spot/instance-action"
        if headers.get("x-aws-ec2-metadata-token") != "secret":
            return 401, ""
        text = in_a_minute().strftime("%Y-%m-%dT%H:%M:%SZ")
        return 200, json.dumps({"action": "terminate", "time": text})

    assert about_a_minute(polled("aws", answer), "the spot instance is to terminate")
    none = polled("aws", lambda method, path, _: (404 if "spot" in path else 200, "t"))
    assert none is None


def test_an_instance_of_google_cloud_says_that_it_is_preempted() -> None:
    def answer(word: str) -> Answer:
        return lambda _, path, headers: (
            (200, word) if headers.get("metadata-flavor") == "Google" else (403, "")
        )

    assert polled("gcp", answer("TRUE")) == MachineNotice(
        in_s=30.0, reason="the instance is preempted"
    )
    assert polled("gcp", answer("FALSE")) is None


def test_events_of_azure_count_if_they_name_this_machine() -> None:
    def answer(event: dict[str, object]) -> Answer:
        def found(method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
            if "scheduledevents" in path:
                return 200, json.dumps({"DocumentIncarnation": 1, "Events": [event]})
            return 200, "vm_3"

        return found

    soon = format_datetime(in_a_minute(), usegmt=True)
    event = {"EventType": "Preempt", "NotBefore": soon, "Resources": ["vm_2", "vm_3"]}
    assert about_a_minute(polled("azure", answer(event)), "the machine is to preempt")
    assert polled("azure", answer({**event, "NotBefore": ""})) is not None
    assert polled("azure", answer({**event, "Resources": ["vm_2"]})) is None
    assert polled("azure", answer({**event, "EventType": "Freeze"})) is None


def test_a_server_of_ones_own_is_asked() -> None:
    assert polled("http://", lambda *_: (204, "")) is None
    found = polled("http://", lambda *_: (200, '{"in_s": 12.5, "reason": "the lab closes"}'))
    assert found == MachineNotice(in_s=12.5, reason="the lab closes")


@pytest.mark.parametrize("body", ["[", "{}", '{"in_s": "soon"}', '{"in_s": -1}', '{"in_s": NaN}'])
def test_an_answer_that_cannot_be_read_is_told(body: str) -> None:
    with pytest.raises(WorldError, match="an answer cannot be read"):
        polled("http://", lambda *_: (200, body))


def test_a_server_that_fails_is_told() -> None:
    with pytest.raises(WorldError, match="answers 500"):
        polled("http://", lambda *_: (500, ""))
    with pytest.raises(OSError, match="refused"):
        NoticeSource("http://127.0.0.1:9/").poll()


def test_a_server_that_speaks_no_http_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            channel, _ = server.accept()
            with channel:
                channel.recv(1 << 16)
                channel.sendall(b"200 what?\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(WorldError, match="an answer cannot be read"):
            NoticeSource(f"http://127.0.0.1:{server.getsockname()[1]}/").poll()
        thread.join()


def test_each_new_problem_of_a_source_is_printed_once() -> None:
    notice = MachineNotice(in_s=1.0, reason="soon")
    answers: list[Exception | MachineNotice | None] = [
        *(OSError("a"), OSError("a"), WorldError("b")),
        *(None, WorldError("b"), notice),
    ]

    class Unsteady(NoticeSource):
        """Fails, answers and fails again."""

        def poll(self) -> MachineNotice | None:
            found = answers.pop(0)
            if isinstance(found, Exception):
                raise found
            return found

    lines: list[str] = []

    async def first() -> MachineNotice:
        async for found in list_notices(Unsteady("aws"), lines.append, every_s=0.0):
            return found
        raise AssertionError

    assert asyncio.run(first()) == notice
    assert lines == [f"no notices can be received ({each})" for each in "abb"]


def test_a_source_that_does_not_exist_is_refused() -> None:
    assert notice_source("") is None
    with pytest.raises(UserError, match="--notices 'ibm': say aws, gcp, azure, or the URL"):
        notice_source("ibm")


SCRIPT = """
import time, torch, holdfast
job = holdfast.join()
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job.protect(model=model, optimizer=optimizer)
data = job.batches(torch.utils.data.TensorDataset(torch.randn(64, 8)), batch_size=4)
for step in job.steps(data, until=100_000):
    for (x,) in step:
        step.backward(model(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.01)
"""


@pytest.mark.slow
def test_a_job_that_is_taken_away_whole_is_saved_twice(tmp_path: Path) -> None:
    """It is saved at once, and again as late as possible; in between it trains."""
    (tmp_path / "train.py").write_text(SCRIPT)
    told = threading.Event()
    answer = '{"in_s": 8, "reason": "the lab closes"}'
    with serving(lambda *_: (200, answer) if told.is_set() else (204, "")) as url:
        flags = ["--nproc", "1", "--store", str(tmp_path / "store"), "--save-every", "1000000"]
        script = [str(tmp_path / "train.py")]
        with LocalRun(tmp_path / "run", [*flags, "--notices", url], script) as job:
            job.until_members(1)
            told.set()
            job.until(lambda: len(_saved(job)) == 2, RUN_S, "two checkpoints")
            lines = [event["text"] for event in job.events("save")]
            first, last = _saved(job)
    assert any("a checkpoint is made" in line for line in lines)
    assert any("a last checkpoint is made before" in line for line in lines)
    assert last > first


def _saved(job: LocalRun) -> list[int]:
    lines = [event["text"].split() for event in job.events("save")]
    return [
        int(words[1]) for words in lines if words[0] == "step" and words[2:4] == ["is", "saved,"]
    ]
