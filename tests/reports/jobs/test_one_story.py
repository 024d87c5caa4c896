"""Six faults strike one job; all reports on it agree, with the same numbers."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from conftest import RUN_S
from dashboard_kit import Dashboard
from holdfast.cli.main import main
from holdfast.engine.records.goodput import share_out
from holdfast.engine.records.incidents import describe_cost
from holdfast.engine.records.time_lines import read_times
from holdfast.engine.runtime.contact import DRAIN_REASON, await_drained, drain
from holdfast.engine.runtime.local_run import LocalRun, strike
from labs.local_nodes import LocalNodes

pytestmark = pytest.mark.slow

STEPS_MAX = 100_000
SCRIPT = """
import hashlib, os, sys, time, torch, holdfast
job = holdfast.join()
torch.manual_seed(3)
model = torch.nn.Linear(30, 30)
optimizer = torch.optim.AdamW(model.parameters())
job.protect(model=model, optimizer=optimizer)
data = job.batches(torch.utils.data.TensorDataset(torch.randn(64, 30)), batch_size=4)
for step in job.steps(data, until=int(sys.argv[2])):
    for (x,) in step:
        step.backward((model(x) - 1).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    if job.is_leader and os.path.exists(sys.argv[1]):
        job.stop()
    time.sleep(0.02)
if job.is_leader:
    digest = hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest()
    print("digest", step.index + 1, digest)
"""


def train(folder: Path, stop: Path, until: int, *options: str) -> LocalRun:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    flags = ["--nproc", "2", "--virtual", "6", "--fingerprint-steps", "4", *options]
    return LocalRun(folder / f"run-{until}", flags, [str(script), str(stop), str(until)])


def digest_of(run: LocalRun) -> str:
    return next(line for line in reversed(run.out) if line.startswith("digest "))


class Striker:
    """Strikes a job, and waits each time until it continues."""

    def __init__(self, run: LocalRun, nodes: LocalNodes) -> None:
        self.run = run
        self.nodes = nodes

    def until_event(self, kind: str, strike_it: Callable[[], None]) -> None:
        """Strike, and wait for one more event of a kind and for two steps more."""
        before = len(self.run.events(kind))
        strike_it()
        self.run.until(lambda: len(self.run.events(kind)) > before, RUN_S, f"another {kind}")
        self.go_on()

    def go_on(self) -> None:
        """Wait for two steps."""
        step = self.step()
        self.run.until(lambda: self.step() >= step + 2, RUN_S, "the job goes on")

    def step(self) -> int:
        return int(self.run.status()["step"])

    def pid_on(self, node: str) -> int:
        workers = self.run.status()["workers"]
        return int(next(w["pid"] for w in workers if w["agent"] == node and w["pid"]))

    def strike_all(self) -> None:
        run, status = self.run, self.run.status
        self.until_event("back", lambda: None)  # as --faults has flipped a bit
        run.until_members(3)
        self.until_event("resumed", lambda: strike(self.pid_on("far")))
        run.until_members(3)
        frozen = self.pid_on("far")
        self.until_event("resumed", lambda: strike(frozen, signal.SIGSTOP))
        strike(frozen, signal.SIGCONT)
        run.until_members(3)
        old = status()["coordinator"]["pid"]
        strike(old)
        run.until(lambda: status()["coordinator"]["pid"] != old, RUN_S, "another coordinator")
        self.go_on()
        self.until_event("resumed", lambda: self.nodes.kill("far"))
        self.nodes.add("near", "--nproc", "1")
        run.until_members(3)
        drain(run.run_dir, None, ["near"], DRAIN_REASON, float("inf"))
        await_drained(run.run_dir, None, "near")
        self.go_on()


@pytest.fixture(scope="module")
def struck(tmp_path_factory: pytest.TempPathFactory) -> LocalRun:
    """Return a run that six faults have struck.

    They are a wrong bit, a kill, a freeze, the coordinator's loss, a node's loss and a drain.
    """
    folder = tmp_path_factory.mktemp("struck")
    faults, stop = folder / "faults", folder / "stop"
    faults.write_text("worker 1  step 9  flip parameter\n")
    store = ("--store", str(folder / "store"), "--save-every", "5")
    options = (
        *store,
        "--nodes-min",
        "2",
        "--nodes-max",
        "3",
        "--lease-s",
        "1",
        "--faults",
        str(faults),
    )
    with train(folder, stop, STEPS_MAX, *options) as run, LocalNodes(run) as nodes:
        run.until(run.run_dir.coordinator.exists, RUN_S, "the coordinator listens")
        nodes.add("far", "--nproc", "1")
        Striker(run, nodes).strike_all()
        stop.touch()
        assert run.wait(RUN_S) == 0, run.log()
    return run


def show(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(list(words)) == 0
    return json.loads(capsys.readouterr().out)


def test_the_result_is_that_of_the_undisturbed_run(struck: LocalRun, tmp_path: Path) -> None:
    steps = int(digest_of(struck).split()[1])
    with train(tmp_path, tmp_path / "never", steps) as run:
        assert run.wait(RUN_S) == 0, run.log()
    assert digest_of(run) == digest_of(struck)


def test_all_viewers_tell_the_same_story(
    struck: LocalRun, capsys: pytest.CaptureFixture[str]
) -> None:
    path = struck.run_dir.path
    told = show(capsys, "explain", str(path), "--json")
    report = show(capsys, "report", str(path), "--json")
    ledger = show(capsys, "ledger", "verify", str(path), "--json")
    check_events(struck, told)

    assert [each["id"] for each in report["incidents"]] == [each["id"] for each in told]
    pauses = {each["id"]: each["cost"].get("pause_s", 0.0) for each in told}
    assert {each["id"]: each["pause_s"] for each in report["incidents"]} == pauses
    assert sum(report["parts"].values()) == pytest.approx(report["total_s"])
    assert ledger["ok"]
    steps = int(digest_of(struck).split()[1])
    assert report["steps"] == ledger["steps"] == steps

    check_metrics(scrape(str(path), capsys), report, sum(pauses.values()))
    check_trace(path, told, report, capsys)
    check_dashboard(path, told, report)
    check_page(path, report, capsys)
    closing = [line for line in struck.err if "incidents: pauses of" in line]
    assert re.findall(r"(\d+) incidents", "\n".join(closing)) == [str(len(told))]
    check_replay(struck, told, capsys)


def check_events(run: LocalRun, told: list[dict[str, Any]]) -> None:
    """Check that every fault has left its event; all but the coordinator's loss are incidents."""
    texts = " ".join(event["text"] for event in run.events())
    assert "(drained by the operator)" in texts
    assert run.events("wrong")
    assert "SIGSEGV" not in texts
    ids = [event["id"] for each in told for event in each["events"]]
    assert len(set(ids)) == len(ids)
    titles = " ".join(each["title"] for each in told)
    assert "was lost: ended by SIGKILL" in titles
    assert len(told) >= 3
    assert len({event["id"].partition(".")[0] for event in run.events()}) == 2  # two terms


def scrape(path: str, capsys: pytest.CaptureFixture[str]) -> dict[str, float]:
    assert main(["metrics", path, "--once"]) == 0
    lines = capsys.readouterr().out.splitlines()
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


def check_metrics(found: dict[str, float], report: dict[str, Any], pauses_s: float) -> None:
    assert found["holdfast_incidents_total"] == len(report["incidents"])
    assert found["holdfast_incident_pause_seconds_total"] == pytest.approx(pauses_s)
    assert found["holdfast_goodput_ratio"] == pytest.approx(report["goodput"])
    assert found["holdfast_ettr_ratio"] == pytest.approx(report["ettr"])
    for part, seconds in report["parts"].items():
        name = f'holdfast_worker_time_seconds{{part="{part}"}}'
        assert found[name] == pytest.approx(seconds)


def check_trace(
    path: Path,
    told: list[dict[str, Any]],
    report: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["trace", str(path)]) == 0
    capsys.readouterr()
    entries = json.loads((path / "trace.json").read_text())["traceEvents"]
    begins = [entry for entry in entries if entry["ph"] == "b"]
    assert [entry["id"] for entry in begins] == [each["id"] for each in told]
    assert [entry["args"] for entry in begins] == [each["cost"] for each in told]
    spans = [e["dur"] / 1e6 for e in entries if e["ph"] == "X" and e["cat"] == "worker"]
    written = sum(line.seconds for process in read_times(path) for line in process.lines)
    assert sum(spans) == pytest.approx(written)
    assert written <= report["total_s"] + 1e-6


def check_dashboard(path: Path, told: list[dict[str, Any]], report: dict[str, Any]) -> None:
    with Dashboard(path) as dashboard:
        state = dashboard.until("incidents", "goodput", "run", "loss")
    items = {each["id"]: each for each in state["incidents"]["items"]}
    assert list(items) == [each["id"] for each in told]
    for each in report["incidents"]:
        shown = items[each["id"]]
        assert shown["title"] == each["title"]
        assert (shown["pause_s"] or 0.0) == each["pause_s"]
        assert shown["worker_s"] == pytest.approx(sum(each["worker_s"].values()))
    assert state["goodput"]["share"] == pytest.approx(report["goodput"])
    assert state["goodput"]["total_s"] == pytest.approx(report["total_s"])
    assert state["goodput"]["steps"] == state["loss"]["step"] + 1 == report["steps"]
    assert state["run"]["outcome"] == ""


def check_page(path: Path, report: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(path)]) == 0
    capsys.readouterr()
    page = unescape((path / "report.html").read_text())
    goodput = share_out(path, [*map(json.loads, (path / "events.jsonl").read_text().splitlines())])
    assert goodput is not None
    assert f"<b>{report['goodput']:.1%}</b>" in page
    for cost in goodput.costs:
        assert f"<b>{cost.incident.title}</b>" in page
        assert describe_cost(cost.incident) in page


def check_replay(
    run: LocalRun, told: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Check that the decisions of both coordinators, made again, announce the same events."""
    found = show(capsys, "incident", "replay", str(run.run_dir.path), "--json")
    assert [each["term"] for each in found] == [1, 2]
    announced = {each["id"] for each in found for each in each["announced"]}
    events = {event["id"] for event in run.events()}
    assert announced <= events
    unrecorded = [e for each in told for e in each["events"] if e["id"] not in announced]
    died_at = max(event["time"] for event in run.events() if event["id"].startswith("1."))
    for event in unrecorded:  # the first coordinator was killed before it wrote them
        assert event["id"].startswith("1.")
        assert event["time"] > died_at - 1.0
    assert list((run.run_dir.path / "post-mortem").glob("*.zip"))


def test_the_story_of_each_incident_is_in_its_bundle(struck: LocalRun) -> None:
    names = {path.stem for path in (struck.run_dir.path / "post-mortem").glob("*.zip")}
    found = share_out(struck.run_dir.path, struck.events())
    assert found is not None
    assert names <= {cost.incident.name for cost in found.costs}
